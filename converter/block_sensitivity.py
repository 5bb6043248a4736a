"""How much each block minds being sparse, alone: the measurement of the paper's Fig. 2, as a KL divergence.

One block at a time is made sparse, all its projections at the same sparsity and every other block dense, and the
token-mean KL(dense || sparse) is taken. The paper plots the relative change of perplexity; the KL says the same without
labels, with less noise, and cannot be negative. Source: the paper's section 4 (observation 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from wisparse.kernels.reference import scores

from .divergence import DenseReference
from .flow import BlockFlow, block_projections
from .masking import MaskedModel
from .statistics import block_inputs, score_quantiles

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
    flow: BlockFlow,
    masked: MaskedModel,
    reference: DenseReference,
    channel_scales: Mapping[str, Tensor],
    levels: Sequence[float] = LEVELS,
    *,
    max_tokens: int = 4096,
    advance: Callable[[], None] = lambda: None,
) -> BlockSensitivity:
    """Measure every block. Costs blocks x levels runs of, on average, half the model over ``max_tokens`` tokens.

    Args:
        flow: the tokens; its first micro-batches are used, up to about ``max_tokens`` counted tokens.
        masked: the model's masks; cleared here, before and after. ``channel_scales`` are left on it.
        reference: the dense distributions over the same flow.
        channel_scales: per projection (K,) float32.
        levels: sparsities to try.
        advance: called after every block.
    """
    used, num_tokens = 0, 0
    while used < flow.num_batches and (used == 0 or num_tokens + int(flow.counted[used].sum()) <= max_tokens):
        num_tokens += int(flow.counted[used].sum())
        used += 1
    groups = block_projections(list(masked.projections), len(flow.blocks))
    previous = masked.dense_tokens
    masked.clear()
    masked.dense_tokens = None
    table: list[list[float]] = []
    hidden = flow.start()[:used]
    for index, names in enumerate(groups):
        inputs, after = block_inputs(flow, masked, index, hidden, names)
        thresholds = {}
        for name in names:
            masked.set_scale(name, channel_scales[name])
            x = inputs[name]
            thresholds[name] = score_quantiles([scores(x, channel_scales[name].to(x.device))], levels)
        row = []
        for level in range(len(levels)):
            masked.set_thresholds({name: thresholds[name][level] for name in names})
            total = 0.0
            for batch in range(used):
                # The first token of a sequence stays dense, as in the search.
                masked.dense_tokens = ~flow.counted[batch]
                total += reference.kl_sum(batch, flow.finish(index, batch, hidden[batch]))
            row.append(total / max(num_tokens, 1))
        table.append(row)
        masked.clear()
        masked.dense_tokens = None
        hidden = after
        advance()
    masked.dense_tokens = previous
    return BlockSensitivity(tuple(levels), tuple(zip(*table, strict=True)), num_tokens)
