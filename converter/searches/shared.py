"""What searches at several sparsities of one model share: the bench, and all that no sparsity decides.

Of ``fisher`` and ``refine`` that is most of the work before the refinement; and a refinement that follows another one
begins where that one ended, and goes a quarter of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..bench.statistics import weight_norm
from ..bench.workbench import Workbench
from ..model.source import SourceModel
from ..text.tokens import CalibrationTokens
from ..work.processes import Processes
from . import additive
from .descent import Trajectory
from .settings import SearchSettings

__all__ = ["FisherStart", "Shared", "batch_size"]

_LARGEST_LOGITS = 1 << 27


@dataclass(frozen=True)
class FisherStart:
    """Where ``fisher`` stands before it asks for a sparsity.

    Attributes:
        scales, tables: of every projection, with loss-weighted norms.
        curves: each projection's damage at every sparsity.
    """

    scales: Mapping[str, Tensor]
    tables: Mapping[str, list[float]]
    curves: Mapping[str, additive.Curve]


class Shared:
    """One per model and text.

    Attributes:
        bench: the search's tokens.
        part: this process's share of them; the bench itself where there is one process.
        norms: weight norms by projection.
        fisher: filled by the first search that needs it.
        dense_states: of `Descent`, by micro-batch.
        trajectories: of refinements, by sparsity.
    """

    def __init__(
        self, source: SourceModel, tokens: CalibrationTokens, settings: SearchSettings, processes: Processes
    ) -> None:
        kl_tokens = settings.kl_tokens or (16384 if settings.by_gradients else 4096)
        num_samples = min(tokens.num_samples, max(1, round(kl_tokens / tokens.seq_len)))
        size = batch_size(settings, source, tokens)
        self.bench = Workbench(source, tokens, num_samples=num_samples, batch_size=size)
        # Where all tokens are gone through once, each process goes through its own; else it has units of its own.
        self.part = self.bench.part(source, tokens, processes)
        self.norms = {name: weight_norm(source.weight(name)) for name in source.projections}
        self.fisher: FisherStart | None = None
        self.dense_states: dict[int, Tensor] = {}
        self.trajectories: dict[float, Trajectory] = {}

    def nearest_trajectory(self, sparsity: float) -> Trajectory | None:
        """The refinement at the nearest sparsity, of two the higher; None before the first one."""
        if not self.trajectories:
            return None
        return self.trajectories[min(self.trajectories, key=lambda other: (abs(other - sparsity), -other))]

    def close(self) -> None:
        """Take the masks off the model."""
        self.bench.masked.close()


def batch_size(settings: SearchSettings, source: SourceModel, tokens: CalibrationTokens) -> int:
    """Sequences of a micro-batch: a backward pass holds a few float32 tensors (tokens, vocabulary), 512 MiB at most."""
    return max(1, min(settings.batch_size, _LARGEST_LOGITS // (source.config.vocab_size * tokens.seq_len)))
