"""Column norms of the weights; quantiles of the scores, and thresholds in the gaps between scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from wisparse.kernels import reference

from .experts import Rows
from .processes import ALONE, Processes

_SMALLEST = 1e-4
# How far from the quantile a threshold may be, as a fraction of all scores: a tenth of a point of sparsity.
_NEAR = 1e-3
# Scores sorted at once, at most: 256 MiB of float32.
_SORT_LIMIT = 1 << 26
# Scores counted at once, about: each takes some 20 bytes on the way.
_CHUNK = 1 << 24
_BINS = 1 << 16


def weight_norm(weight: Tensor) -> Tensor:
    """L2 norm of every column of ``weight`` (N, K), in float32: (K,); of experts' (E, N, K): (E, K)."""
    return weight.detach().float().square().sum(dim=-2).sqrt()


def channel_scale(norm: Tensor, alpha: float) -> Tensor:
    """``clamp(g / gmean(g), 1e-4) ** alpha``, (K,) float32. The geometric mean is over the non-zero columns: a zero
    column adds nothing to the output, and must not drag the mean to 0 nor get a scale of 0 (a threshold of 0 means
    dense)."""
    positive = norm[norm > 0].double()
    mean = positive.log().mean().exp() if positive.numel() else norm.new_ones((), dtype=torch.float64)
    return (norm.double() / mean).clamp(min=_SMALLEST).pow(alpha).float()


class Scores:
    """|x| * scale of inputs (T, K) and scale (K,), of experts (E, K), float32, in chunks: never all in memory at once.
    ``total`` counts the scores of all processes."""

    def __init__(self, inputs: Rows | Tensor, scale: Tensor, processes: Processes = ALONE) -> None:
        inputs = Rows(inputs) if isinstance(inputs, Tensor) else inputs
        step = max(1, _CHUNK // inputs.x.shape[1])
        self._chunks = [inputs[first : first + step] for first in range(0, max(1, len(inputs.x)), step)]
        self.device, self.processes, self._scale = inputs.x.device, processes, scale
        self._only = self._scores(inputs) if len(self._chunks) == 1 else None
        self.total = int(processes.add(torch.tensor(inputs.x.numel(), device=self.device)))

    def _scores(self, rows: Rows) -> Tensor:
        return reference.scores(rows.x, rows.scale(self._scale))

    def __iter__(self) -> Iterator[Tensor]:
        if self._only is not None:
            yield self._only
        else:
            yield from map(self._scores, self._chunks)

    def dropped(self, threshold: float) -> int:
        """How many a mask of ``threshold`` drops, of all processes."""
        kept = torch.stack([reference.kept(chunk, threshold).count_nonzero() for chunk in self]).sum()
        return self.total - int(self.processes.add(kept))


def score_quantiles(scores: Scores, sparsities: Sequence[float]) -> list[float]:
    """Thresholds that drop given fractions, in [0, 1), of float32 scores >= 0. With ``score >= threshold`` kept, the
    fraction dropped is as close to the sparsity as the values allow: within half a value, and beyond that only where
    values tie. The threshold of sparsity 0 is 0. `Scores` of several processes are taken together."""
    total = scores.total
    found = ranked(scores, [min(round(s * total), total - 1) for s in sparsities])
    result = []
    for sparsity, (value, below, through) in zip(sparsities, found, strict=True):
        # Values that tie with the threshold are all kept (``below`` dropped) or all dropped: take what comes closer.
        wanted = sparsity * total
        drop = through - wanted < wanted - below
        result.append(0.0 if sparsity <= 0.0 else next_float(value) if drop else value)
    return result


def next_float(value: float) -> float:
    """The float32 after a non-negative one."""
    return torch.nextafter(torch.tensor(value, dtype=torch.float32), torch.tensor(math.inf)).item()


def ranked(scores: Scores, ranks: Sequence[int]) -> list[tuple[float, int, int]]:
    """The values at ``ranks`` of the sorted scores, from 0: (value, how many are smaller, how many are not larger)."""
    on_cpu = scores.device.type == "cpu"
    # On a GPU a few values are found faster by counting.
    if scores.total > _SORT_LIMIT or (not on_cpu and len(ranks) <= 4):
        return _counted_ranks(scores, ranks)
    values = torch.cat([chunk.reshape(-1) for chunk in scores])
    if scores.processes.size > 1:
        values = torch.cat(scores.processes.gather(values.cpu())).to(values.device)
    if on_cpu:  # numpy sorts ten times as fast as torch, which finds the permutation too
        array = values.numpy()
        if len(ranks) <= 4:
            array.partition(sorted(set(ranks)))
            return [(float(v), int((array < v).sum()), int((array <= v).sum())) for v in array[list(ranks)]]
        array.sort()
    else:
        values = values.sort().values
    chosen = values[torch.tensor(ranks, device=values.device)]
    below, through = (torch.searchsorted(values, chosen, right=right) for right in (False, True))
    return list(zip(chosen.tolist(), below.tolist(), through.tolist(), strict=True))


def _counted_ranks(scores: Scores, ranks: Sequence[int]) -> list[tuple[float, int, int]]:
    """`ranked` by counting bits, which order like the floats where these are not negative: the upper 16 bits of all
    scores first, then the lower 16 of those in the bin that holds a rank."""

    def count(bits_of: Callable[[Tensor], Tensor]) -> Tensor:
        counts = torch.zeros(_BINS, dtype=torch.int64, device=scores.device)
        for chunk in scores:
            counts += torch.bincount(bits_of(chunk.reshape(-1).contiguous().view(torch.int32)), minlength=_BINS)
        return scores.processes.add(counts).cumsum(0).cpu()

    def find(sums: Tensor, rank: int) -> tuple[int, int, int]:
        """The bin of a rank, and how many are below it and through it."""
        found = int(torch.searchsorted(sums, rank, right=True))
        return found, int(sums[found - 1]) if found else 0, int(sums[found])

    upper = count(lambda bits: bits >> 16)
    lower: dict[int, Tensor] = {}
    result = []
    for rank in ranks:
        high, before, _ = find(upper, rank)
        if high not in lower:
            lower[high] = count(lambda bits, high=high: bits[bits >> 16 == high] & 0xFFFF)  # type: ignore[misc]
        low, below, through = find(lower[high], rank - before)
        value = torch.tensor(high << 16 | low, dtype=torch.int32).view(torch.float32).item()
        result.append((value, before + below, before + through))
    return result


class Gaps:
    """The distinct scores near the quantile of a sparsity in (0, 1), and the widest gap between two of them."""

    def __init__(self, scores: Scores, sparsity: float) -> None:
        self._processes = scores.processes
        self._low, self._high = self._around(scores, sparsity)
        self._values = [torch.tensor([self._low, self._high])]
        for chunk in scores:
            self.add(chunk)

    @staticmethod
    def _around(scores: Scores, sparsity: float) -> tuple[float, float]:
        """Two scores such that any threshold above the one, up to the other, drops ``sparsity`` within `_NEAR`; further
        off only where so many scores tie that they decide: then they and a neighbour."""
        total = scores.total
        wanted, near = sparsity * total, _NEAR * total
        fewest = max(1, min(round(wanted), math.ceil(wanted - near)))
        most = min(total - 1, max(round(wanted), math.floor(wanted + near)))
        (low, below, through), (high, _, _) = ranked(scores, [fewest - 1, max(most, 0)])
        if low < high:
            return low, high
        if through - wanted < wanted - below:
            return low, ranked(scores, [through])[0][0] if through < total else math.inf
        return ranked(scores, [below - 1])[0][0] if below else 0.0, low

    def add(self, scores: Tensor) -> None:
        """More scores, of any shape, that a threshold must keep away from; the quantile stays what it is."""
        self._values.append(scores[(scores >= self._low) & (scores <= self._high)].unique().cpu())

    def threshold(self) -> float:
        """Midway in the widest gap, relative to the score; of equals in the first. Every process has to call it."""
        mine = torch.cat(self._values).unique()
        values = torch.cat(self._processes.gather(mine)).unique().double()
        if len(values) < 2 or values[-1] == math.inf:
            # All scores are one value, to be kept or dropped together.
            return float(values[0]) if len(values) < 2 else next_float(float(values[-2]))
        gaps = (values[1:] - values[:-1]) / values[1:]
        widest = int((gaps == gaps.max()).nonzero()[0])
        below, above = float(values[widest]), float(values[widest + 1])
        middle = float(torch.tensor((below + above) / 2))
        return middle if middle > below else above  # neighbours have nothing between them
