"""How much each block minds being sparse, alone: the measurement of the paper's Fig. 2, as a KL divergence.

One block at a time is made sparse, all its projections at the same sparsity and every other block dense, and the
token-mean KL(dense || sparse) is taken. The paper plots the relative change of perplexity; the KL says the same without
labels, with less noise, and cannot be negative. Source: the paper's section 4 (observation 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..bench.workbench import Workbench

__all__ = ["LEVELS", "BlockSensitivity", "block_sensitivity"]

# The curves of the paper's Fig. 2.
LEVELS = (0.4, 0.5, 0.6)


@dataclass(frozen=True)
class BlockSensitivity:
    """KL in nats per token with one block sparse.

    Attributes:
        levels: the sparsities tried.
        kl: per level, one value per block.
        num_tokens: tokens the values are means over.
    """

    levels: tuple[float, ...]
    kl: tuple[tuple[float, ...], ...]
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@torch.no_grad()
def block_sensitivity(
    bench: Workbench, levels: Sequence[float] = LEVELS, advance: Callable[[], None] = lambda: None
) -> BlockSensitivity:
    """Measure every block: blocks x levels runs of, on average, half the model over the bench's tokens.

    Args:
        bench: with a scale on every projection; its tables are built here.
        levels: sparsities to try.
        advance: called after every block.
    """
    table = []
    for view in bench.blocks():
        view.build_tables()
        table.append(
            [bench.kl(dict.fromkeys(view.names, level), start=view.index, hidden=view.hidden) for level in levels]
        )
        advance()
    return BlockSensitivity(tuple(levels), tuple(zip(*table, strict=True)), bench.flow.num_counted)
