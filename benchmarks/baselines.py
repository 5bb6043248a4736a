"""Two methods that ask for more than a mask on a projection's input; no bundle holds them, here they are measured.

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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from quality import Divergence, Evaluator
from torch import Tensor, nn
from torch.nn import functional

from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.calibration_state import CalibrationState, final_thresholds
from wisparse.converter.search.allocation import MAX_SPARSITY
from wisparse.converter.search.search import SearchResult
from wisparse.converter.source import SourceModel
from wisparse.converter.statistics import Scores, score_quantiles
from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import ProjectionRecipe
from wisparse.kernels.reference import keep_mask

# Shares of the weights that are read which may go to the factors.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True)
class Baseline:
    """A method on a model, inside its context.

    Attributes:
        places: what is masked, by name, as `MaskedModel` takes it; their weights are all projections' together.
        result: scales and thresholds of these places.
        read_always: share of the weights read besides those that the masks keep.
    """

    places: Mapping[str, Any]
    result: SearchResult
    read_always: float = 0.0

    def measure(self, evaluator: Evaluator) -> Divergence:
        """Every token sparse; of the realised sparsity only what is not read is left."""
        found = evaluator(self.result, self.places)
        return replace(found, realised_sparsity=found.realised_sparsity - self.read_always)


@contextmanager
def cats(source: SourceModel, tokens: CalibrationTokens, sparsity: float, kl_tokens: int = 0) -> Iterator[Baseline]:
    """CATS, on a model whose gate and up are two projections.

    Raises:
        UsageError: more than up and down alone can give.
    """
    mlps = [module for name, module in source.model.named_modules() if f"{name}.down_proj" in source.projections]
    places: dict[str, Any] = {}
    for name, module in source.projections.items():
        if name.endswith("down_proj"):
            places[name.replace("down_proj", "act_fn")] = _Activation(module)
        elif not name.endswith("up_proj"):
            places[name] = module
    activations = [place for place in places.values() if isinstance(place, _Activation)]
    gated, total = (sum(place.weight.numel() for place in some) for some in (activations, places.values()))
    needed = sparsity * total / gated
    if needed > MAX_SPARSITY:
        raise UsageError(
            f"cats: only up and down are sparse, at most {MAX_SPARSITY * gated / total:.1%} of this model's "
            f"projections, found {sparsity:g}"
        )
    try:
        for mlp, place in zip(mlps, activations, strict=True):
            mlp.act_fn = nn.Sequential(mlp.act_fn, place)
        allocation = {name: needed * (place in activations) for name, place in places.items()}
        yield Baseline(places, _result(replace(source, projections=places), tokens, allocation))
    finally:
        for mlp in mlps:
            if isinstance(mlp.act_fn, nn.Sequential):
                mlp.act_fn = mlp.act_fn[0]


class _Activation(nn.Identity):
    """The gate's activation as a place to mask: a dropped channel spares a row of up and a column of ``down``."""

    def __init__(self, down: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = down.in_features, 2 * down.out_features
        self.weight = torch.empty(self.out_features, self.in_features, device="meta")


@contextmanager
def rsparse(
    source: SourceModel, tokens: CalibrationTokens, sparsity: float, kl_tokens: int = 4096
) -> Iterator[Baseline]:
    """R-Sparse; ranks are chosen on about ``kl_tokens`` tokens, thresholds on all."""
    num_samples = min(tokens.num_samples, max(1, round(kl_tokens / tokens.seq_len)))
    ranks = {}
    with CalibrationState(source, tokens, num_samples=num_samples) as calib:
        for view in calib.blocks():
            ranks |= {name: choose_rank(view.inputs[name].x, source.weight(name), sparsity) for name in view.names}
    paths = [_Path(source.projections[name], rank) for name, rank in ranks.items() if rank]
    try:
        allocation = {n: low_rank_sparsity(source.projections[n].weight, sparsity, rank) for n, rank in ranks.items()}
        total = sum(module.weight.numel() for module in source.projections.values())
        always = sum(path.left.numel() + path.right.numel() for path in paths) / total
        yield Baseline(source.projections, _result(source, tokens, allocation), always)
    finally:
        for path in paths:
            path.close()


class _Path:
    """Sends what a mask put on later drops from a projection's input through factors of its weight."""

    def __init__(self, module: nn.Linear, rank: int) -> None:
        self.left, self.right = (f.to(module.weight) for f in low_rank_factors(module.weight, rank))
        # Hooks run in the order they were put on: this one sees the input as it was, `_add` as the mask left it.
        self._handles = [module.register_forward_pre_hook(self._keep), module.register_forward_hook(self._add)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self._whole = args[0]

    def _add(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        whole, kept = self._whole, args[0]
        del self._whole
        if kept is whole:
            return output  # no mask is on
        return output + functional.linear(functional.linear(whole - kept, self.right), self.left)


def low_rank_sparsity(weight: Tensor, target: float, rank: int) -> float:
    """Channels to drop from ``weight`` (N, K) so that with factors of ``rank`` a share ``target`` of it is unread."""
    rows, columns = weight.shape
    return target + rank * (rows + columns) / (rows * columns) if target > 0 else 0.0


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of ``weight`` (N, K) of a rank: (N, rank) and (rank, K) float32."""
    left, values, right = torch.linalg.svd(weight.detach().float(), full_matrices=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).contiguous(), (root[:, None] * right[:rank]).contiguous()


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
    thresholds = score_quantiles(Scores(x, plain), [low_rank_sparsity(weight, target, rank) for rank in ranks])
    errors = []
    for rank, threshold in zip(ranks, thresholds, strict=True):
        dropped = torch.where(keep_mask(x, plain, threshold), 0.0, x)
        # What the path leaves: the directions of W beyond its rank, which are orthogonal in the output.
        left_over = (dropped @ right[rank:].T) * values[rank:]
        errors.append(float(left_over.square().sum(dtype=torch.float64)))
    return ranks[errors.index(min(errors))]


def _result(source: SourceModel, tokens: CalibrationTokens, allocation: Mapping[str, float]) -> SearchResult:
    """Thresholds on |x| for an allocation, as every search ends."""
    scales = {name: torch.ones(place.in_features, device=source.device) for name, place in source.projections.items()}
    with CalibrationState(source, tokens) as calib:
        found = final_thresholds(calib, scales, allocation, lambda: None)
    projections = {name: ProjectionRecipe(name, p, 0.0, *found[name]) for name, p in allocation.items()}
    return SearchResult(projections, scales, {"kl_evaluations": 0.0})


BASELINES = {"cats": cats, "rsparse": rsparse}
