"""What a search is told, and what it gives back: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from wisparse.formats.errors import UsageError
from wisparse.formats.record.recipe import ProjectionRecipe

from ..budget import check_target
from ..model.masking import MaskedModel
from ..settings import METHODS, SEARCHES
from . import additive

__all__ = ["SearchResult", "SearchSettings"]


@dataclass(frozen=True)
class SearchSettings:
    """What to search and how hard.

    Attributes:
        sparsity: the target, a fraction of the parameters of all projections.
        method: the score. ``wisparse`` |x| g^alpha; ``teal`` |x|; ``wina`` |x| g; ``wina-code`` as WINA's published
            code has it, |x| g for k and gate and |x| elsewhere.
        search: how sparsity is spread; see `search`.
        num_generations, num_offspring: of ``paper``; None is 60 x 24. The paper's own are 400 x 64.
        seed: of everything that is drawn.
        kl_tokens: how many tokens the search measures on, about; None is 16,384 for ``fisher`` and ``refine``, which go
            through them only twice, and 4,096 for the others. Final thresholds, and ``refine``'s steps, rest on all.
        stages: of the evolution, (survivors, micro-batches or None for all) in turn.
        levels: at which sparsities ``additive`` probes a projection.
        greedy_step: sparsity that one greedy step adds to a block. TEAL's 5% is half of a small projection at once, and
            in models this small costs a third of the quality (benchmarks/LOG.md).
        fisher_draws: labels drawn per token for ``fisher``.
        refine_steps: of ``refine``; None goes by the number of tokens, see `plan_steps`.
        batch_size: sequences per forward pass.
    """

    sparsity: float = 0.5
    method: str = "wisparse"
    search: str = "refine"
    num_generations: int | None = None
    num_offspring: int | None = None
    seed: int = 0
    kl_tokens: int | None = None
    stages: tuple[tuple[int, int | None], ...] = ((1, None),)
    levels: tuple[float, ...] = additive.LEVELS
    greedy_step: float = 0.01
    fisher_draws: int = 2
    refine_steps: int | None = None
    batch_size: int = 4

    def __post_init__(self) -> None:
        check_target(self.sparsity)
        for option, given, known in (("method", self.method, METHODS), ("search", self.search, SEARCHES)):
            if given not in known:
                raise UsageError(f"--{option}: expected one of {', '.join(known)}, found {given!r}")
        if self.by_gradients and self.method != "wisparse":
            raise UsageError(
                f"--search {self.search} decides the score too, so it belongs to --method wisparse; "
                f"with --method {self.method} choose additive, greedy, paper or uniform"
            )

    @property
    def by_gradients(self) -> bool:
        """Whether the search rests on backward passes."""
        return self.search in ("fisher", "refine")


@dataclass(frozen=True)
class SearchResult:
    """Plain data.

    Attributes:
        projections: by name, in order of execution.
        channel_scales: by name, (K,) float32 on the CPU.
        details: JSON values: settings, losses by stage, KL evaluations. No times: equal runs give equal details.
        thresholds_at: another sparsity -> thresholds by name with the same scales, for a curve of quality: from the
            dense model's inputs, so about right.
    """

    projections: Mapping[str, ProjectionRecipe]
    channel_scales: Mapping[str, Tensor]
    details: dict[str, Any] = field(default_factory=dict)
    thresholds_at: Mapping[float, Mapping[str, float]] = field(default_factory=dict)

    @property
    def sparsity(self) -> float:
        """The target."""
        return float(self.details.get("settings", {}).get("sparsity", 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors in dicts and lists; all but ``thresholds_at``."""
        projections = [asdict(entry) for entry in self.projections.values()]
        return {"projections": projections, "channel_scales": dict(self.channel_scales), "details": self.details}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchResult:
        """Of `to_dict`."""
        entries = [ProjectionRecipe(**entry) for entry in data["projections"]]
        return cls({entry.name: entry for entry in entries}, data["channel_scales"], data["details"])

    def apply_to(self, masked: MaskedModel) -> dict[str, float]:
        """Put the scales on a model; the thresholds are returned, for `MaskedModel.set_thresholds`."""
        for name, scale in self.channel_scales.items():
            masked.set_scale(name, scale)
        return {name: entry.threshold for name, entry in self.projections.items()}
