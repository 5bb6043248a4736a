"""Two baselines that ask for more than a mask on a projection's input.

    cats      up and down alone are sparse, by the gate: channel j of the MLP is left out if |SiLU(gate)_j| is below the
              block's threshold, and then neither up's row j nor down's column j is read. Gate and attention stay dense.
    rsparse   small |x| take a low-rank path in place of none:  y = W x_kept + left (right x_dropped),
              left right the best approximation of W of its rank; the factors' reads come out of the same budget

R-Sparse shares each projection's budget between its two paths by an evolutionary search on perplexity. Here each
projection takes the share, of a few and none among them, that leaves the least error in its own output on the
calibration tokens, which needs no search.
Sources: CATS (Lee et al., arXiv:2404.08763); R-Sparse (Zhang et al., arXiv:2504.19449).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wisparse.formats.architectures import ModelConfig
from wisparse.formats.errors import UsageError
from wisparse.kernels.reference import keep_mask, scores

from ..bench.statistics import score_quantiles
from ..budget import MAX_SPARSITY

__all__ = ["SHARES", "choose_rank", "gate_sparsity", "low_rank_factors", "low_rank_sparsity"]

# Shares of the weights that are read which may go to the factors.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def gate_sparsity(config: ModelConfig, target: float) -> float:
    """The share of MLP channels that ``cats`` has to leave out for ``target`` of all projections' weights.

    Raises:
        UsageError: more than the largest sparsity, because only up and down can be sparse.
    """
    sizes = [projection.num_parameters for projection in config.projections()]
    # Up has the size of down, alone or as half of a fused projection.
    gated = 2 * sum(p.num_parameters for p in config.projections() if p.role == "down_proj")
    needed = target * sum(sizes) / gated
    if needed > MAX_SPARSITY:
        largest = MAX_SPARSITY * gated / sum(sizes)
        raise UsageError(
            f"--method cats: only up and down are sparse, at most {largest:.1%} of this model's projections, found "
            f"--sparsity {target:g}; choose {int(100 * largest) / 100:g} or less, or another method"
        )
    return needed


def low_rank_sparsity(weight: Tensor, target: float, rank: int) -> float:
    """Channels to drop from ``weight`` (N, K) so that with factors of ``rank`` a share ``target`` of it is unread."""
    rows, columns = weight.shape
    return target + rank * (rows + columns) / (rows * columns) if target > 0 else 0.0


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of ``weight`` (N, K) of a rank: (N, rank) and (rank, K) float32, on the CPU."""
    left, values, right = torch.linalg.svd(weight.detach().float(), full_matrices=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).cpu().contiguous(), (root[:, None] * right[:rank]).cpu().contiguous()


def choose_rank(x: Tensor, weight: Tensor, target: float) -> int:
    """The rank of least output error among `SHARES` of the budget; 0 for no low-rank path.

    Args:
        x: (T, K), the projection's inputs.
        weight: (N, K).
        target: share of the weight to leave unread.
    """
    if target <= 0:
        return 0
    rows, columns = weight.shape
    affordable = (1 - target) * rows * columns / (rows + columns)
    ranks = sorted({int(share * affordable) for share in SHARES})
    ranks = [rank for rank in ranks if low_rank_sparsity(weight, target, rank) <= MAX_SPARSITY]
    _, values, right = torch.linalg.svd(weight.detach().float(), full_matrices=False)
    x = x.float()
    plain = x.new_ones(columns)
    thresholds = score_quantiles([scores(x, plain)], [low_rank_sparsity(weight, target, rank) for rank in ranks])
    errors = []
    for rank, threshold in zip(ranks, thresholds, strict=True):
        dropped = torch.where(keep_mask(x, plain, threshold), 0.0, x)
        # What the path leaves: the directions of W beyond its rank, which are orthogonal in the output.
        left_over = (dropped @ right[rank:].T) * values[rank:]
        errors.append(float(left_over.square().sum(dtype=torch.float64)))
    return ranks[errors.index(min(errors))]
