"""The recipe: what a conversion decided, for people and for provenance (``wisparse.json``).

A recipe says which channels are dropped and why; the numbers the runtime needs are in the sidecar tensors. It is
plain data: frozen dataclasses that can be written as JSON and read back equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["FORMAT_VERSION", "CalibrationRecord", "ProjectionRecipe", "Recipe", "RotationRecord", "Rung"]

# Version 1 held one sparsity; it is still read.
FORMAT_VERSION = 2


@dataclass(frozen=True)
class ProjectionRecipe:
    """What was decided for one projection.

    Attributes:
        name: full Hugging Face module name, e.g. ``model.layers.0.mlp.down_proj``.
        sparsity: fraction of channels to drop, in [0, 0.95]; 0 means dense, no mask.
        alpha: exponent of the weight norm in the score, >= 0.
        threshold: keep a channel if its score is at least this.
        realised_sparsity: fraction of channels dropped on the calibration tokens.
    """

    name: str
    sparsity: float
    alpha: float
    threshold: float
    realised_sparsity: float


@dataclass(frozen=True)
class Rung:
    """One sparsity of a bundle.

    Attributes:
        sparsity: the target, a fraction of the parameters of all projections in scope, in [0, 0.95].
        projections: one entry per projection of the model, in the order of execution.
        block_sparsities: parameter-weighted sparsity of every block.
    """

    sparsity: float
    projections: tuple[ProjectionRecipe, ...]
    block_sparsities: tuple[float, ...]


@dataclass(frozen=True)
class CalibrationRecord:
    """Which text the thresholds rest on. ``digest`` is the sha256 of the token ids."""

    source: str
    num_samples: int
    seq_len: int
    num_tokens: int
    seed: int
    digest: str


@dataclass(frozen=True)
class RotationRecord:
    """How the source's weights were turned before anything else.

    Attributes:
        kind: ``pca``: to the principal directions of the hidden states over another text, and of each head's values.
        kl: KL(source || turned), nats a token, both dense, in the type of the conversion: what rounding costs.
        num_tokens: that it was measured on.
    """

    kind: str
    kl: float
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.kind}: KL {self.kl:.2g} nats/token to the source, both dense ({self.num_tokens} tokens)"


@dataclass(frozen=True)
class Recipe:
    """Everything a conversion decided, and from what.

    Attributes:
        base_model: Hub id or folder name of the source; never a path of the machine that converted it.
        base_revision: commit of the source, where it came from the Hub.
        method: ``wisparse``, ``teal``, …
        default: sparsity of the rung that is in force unless another is asked for.
        rungs: at least one, in ascending sparsity, no two of them equal.
        search: settings and outcome of the search, JSON values only.
        versions: of the libraries that took part.
        vision_tensors_left_out: how many tensors of the source are not its text model's; on disk only if any.
        rotation: of the weights; None where they are the source's, and then not on disk.
    """

    base_model: str
    base_revision: str | None
    method: str
    default: float
    rungs: tuple[Rung, ...]
    calibration: CalibrationRecord
    search: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    vision_tensors_left_out: int = 0
    rotation: RotationRecord | None = None

    @property
    def sparsities(self) -> tuple[float, ...]:
        """Of all rungs, ascending."""
        return tuple(rung.sparsity for rung in self.rungs)

    @property
    def sparsity(self) -> float:
        """Of the default rung."""
        return self.default

    @property
    def projections(self) -> tuple[ProjectionRecipe, ...]:
        """Of the default rung."""
        return self.at(self.default).projections

    @property
    def block_sparsities(self) -> tuple[float, ...]:
        """Of the default rung."""
        return self.at(self.default).block_sparsities

    def at(self, sparsity: float) -> Rung:
        """The rung of exactly this sparsity, one of ``sparsities``."""
        return next(rung for rung in self.rungs if rung.sparsity == sparsity)

    @property
    def text_only(self) -> str | None:
        """What of the source is not in the bundle, in words; None where nothing is missing."""
        count = self.vision_tensors_left_out
        return f"text only: {count} tensor{'s' * (count > 1)} of the vision tower left out" if count else None

    def to_dict(self, version: int = FORMAT_VERSION) -> dict[str, Any]:
        """JSON-ready, with ``format_version`` first; as version 1 had it, where there is one rung."""
        document = {"format_version": version, **asdict(self)}
        if version == 1:
            del document["default"]
            (rung,) = document.pop("rungs")
            document |= rung
        if not self.vision_tensors_left_out:
            del document["vision_tensors_left_out"]
        if self.rotation is None:
            del document["rotation"]
        return document
