"""Column norms of weights, channel scales, quantiles of scores, and thresholds in the gaps between scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from wisparse.kernels import reference

from .experts import Rows
from .processes import ALONE, Processes

_SMALLEST = 1e-4
# The largest distance of a threshold's rank from the quantile, as a fraction of all scores: 0.1 points of sparsity.
_NEAR = 1e-3
# The most scores that are sorted at once: 256 MiB of float32.
_SORT_LIMIT = 1 << 26
# About how many scores are processed at once; each needs about 20 bytes of temporaries.
_CHUNK = 1 << 24
# `Window`'s sample size, and its first margin around the ranks, as a fraction of all scores.
_SAMPLE, _MARGIN = 1 << 20, 4e-3


def weight_norm(weight: Tensor) -> Tensor:
    """L2 norm of every column of ``weight`` (N, K): (K,) float32; of experts (E, N, K): (E, K)."""
    return weight.detach().float().square().sum(dim=-2).sqrt()


def channel_scale(norm: Tensor, alpha: float) -> Tensor:
    """``clamp(g / gmean(g), 1e-4) ** alpha``, (K,) float32. The geometric mean is over the non-zero columns, since a zero
    column would make it 0. Scales are not 0, because a threshold of 0 means dense."""
    positive = norm[norm > 0].double()
    mean = positive.log().mean().exp() if positive.numel() else norm.new_ones((), dtype=torch.float64)
    return (norm.double() / mean).clamp(min=_SMALLEST).pow(alpha).float()


class Scores:
    """|x| * scale, float32, of inputs (T, K) and a scale (K,), or (E, K) of experts: iterates over chunks of rows.
    ``total``: the number of scores of all processes."""

    def __init__(self, inputs: Rows | Tensor, scale: Tensor, processes: Processes = ALONE) -> None:
        inputs = Rows(inputs) if isinstance(inputs, Tensor) else inputs
        step = max(1, _CHUNK // inputs.x.shape[1])
        self._chunks = [inputs[first : first + step] for first in range(0, max(1, len(inputs.x)), step)]
        self.device, self.processes, self._inputs, self._scale = inputs.x.device, processes, inputs, scale
        self._single = self._scores(inputs) if len(self._chunks) == 1 else None  # kept for several iterations
        self.total = int(processes.add(torch.tensor(inputs.x.numel(), device=self.device)))

    def _scores(self, rows: Rows) -> Tensor:
        return reference.scores(rows.x, rows.scale(self._scale))

    @property
    def sortable(self) -> bool:
        """Whether all scores can be sorted here: on a CPU by one process."""
        return self.device.type == "cpu" and self.processes.world_size == 1 and self.total <= _SORT_LIMIT

    def __iter__(self) -> Iterator[Tensor]:
        if self._single is not None:
            yield self._single
        else:
            yield from map(self._scores, self._chunks)

    def sample(self) -> Tensor:
        """A regular sample of this process's scores, over all tokens and channels, sorted."""
        inputs, scale = self._inputs, self._scale.to(self.device)
        stride = max(1, inputs.x.numel() // _SAMPLE) | 1  # odd, as widths are mostly even: so it reaches all channels
        if self._single is not None:
            return _sorted(self._single.reshape(-1)[::stride].clone())
        index = torch.arange(0, inputs.x.numel(), stride, device=self.device)
        row, channel = index // inputs.x.shape[1], index % inputs.x.shape[1]
        scale = scale[channel] if inputs.experts is None else scale[inputs.experts[row], channel]
        return _sorted(reference.scores(inputs.x[row, channel], scale))


def _sorted(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.sort().values
    values.numpy().sort()  # in place; ten times as fast as torch's sort, which also computes the permutation
    return values


def score_quantiles(scores: Scores, sparsities: Sequence[float]) -> list[float]:
    """Thresholds that drop the fractions ``sparsities``, in [0, 1), of the scores of all processes, >= 0, where
    ``score >= threshold`` is kept. The dropped fraction is the nearest possible: within half a score, unless scores are
    equal. The threshold of sparsity 0 is 0."""
    total = scores.total
    values = ranked(scores, [min(round(s * total), total - 1) for s in sparsities])
    result = []
    for sparsity, (value, below, through) in zip(sparsities, values, strict=True):
        # Scores equal to the threshold are either all kept (``below`` are dropped) or all dropped (``through`` are).
        wanted = sparsity * total
        drop = through - wanted < wanted - below
        result.append(0.0 if sparsity <= 0.0 else next_float(value) if drop else value)
    return result


def next_float(value: float) -> float:
    """The next larger float32."""
    return torch.nextafter(torch.tensor(value, dtype=torch.float32), torch.tensor(math.inf)).item()


def ranked(scores: Scores, ranks: Sequence[int]) -> list[tuple[float, int, int]]:
    """The scores at ``ranks``, counted from 0, of all scores sorted: (score, number smaller, number not larger)."""
    on_cpu, few = scores.device.type == "cpu", len(ranks) <= 4
    if scores.total > _SORT_LIMIT or (few and not on_cpu):
        return [Window(scores, rank, rank).at(rank) for rank in ranks]
    values = torch.cat([chunk.reshape(-1) for chunk in scores])
    if scores.processes.world_size > 1:
        values = torch.cat(scores.processes.gather(values.cpu())).to(values.device)
    if on_cpu and few:
        array = values.numpy()
        array.partition(sorted(set(ranks)))
        return [(float(v), int((array < v).sum()), int((array <= v).sum())) for v in array[list(ranks)]]
    values = _sorted(values)
    chosen = values[torch.tensor(ranks, device=values.device)]
    below, through = (torch.searchsorted(values, chosen, right=right) for right in (False, True))
    return list(zip(chosen.tolist(), below.tolist(), through.tolist(), strict=True))


class Window:
    """The distinct scores at the ranks ``first`` to ``last``, counted from 0, of all processes, and some around them, with
    their numbers. A sample bounds them, so that one pass over the scores is enough; if the bounds fail, they are widened."""

    def __init__(self, scores: Scores, first: int, last: int) -> None:
        if scores.sortable and self._partition(scores, first, last):
            return
        sample, processes, margin = scores.sample().nan_to_num(nan=math.inf), scores.processes, _MARGIN
        while True:
            low, high = math.inf, -math.inf  # for a process without tokens
            if len(sample):
                begin = math.floor(len(sample) * (first / scores.total - margin)) - 1
                end = math.ceil(len(sample) * (last / scores.total + margin)) + 1
                low = float(sample[begin]) if begin >= 0 else -math.inf
                high = float(sample[end]) if end < len(sample) else math.inf
            bounds = processes.gather((low, high))
            low, high = min(lower for lower, _ in bounds), max(upper for _, upper in bounds)
            counts, inside = torch.zeros(2, dtype=torch.int64, device=scores.device), []
            for chunk in scores:
                flat = chunk.reshape(-1)
                # Scores equal to the lower bound are only counted: they may be most of all, as the zeros of a ReLU.
                counts += torch.stack(((flat < low).count_nonzero(), (flat == low).count_nonzero()))
                inside.append(flat[(flat > low) & (flat <= high)])
            below, equal = processes.add(counts).tolist()
            values, repeats = torch.cat(inside).unique(return_counts=True)
            if processes.world_size > 1:
                parts = processes.gather((values.cpu(), repeats.cpu()))
                values, inverse = torch.cat([part for part, _ in parts]).unique(return_inverse=True)
                counted = torch.cat([count for _, count in parts])
                repeats = torch.zeros(len(values), dtype=torch.int64).index_add_(0, inverse, counted)
            self.values = torch.cat((torch.tensor([low]), values.cpu()))
            self._repeats = torch.cat((torch.tensor([equal]), repeats.cpu()))
            self._below, self._through, self._total = below, below + self._repeats.cumsum(0), scores.total
            # With infinite bounds, ranks after the last are those of NaN.
            if (below <= first and last < int(self._through[-1])) or (low, high) == (-math.inf, math.inf):
                return
            margin *= 8

    def _partition(self, scores: Scores, first: int, last: int) -> bool:
        """Fill the window from a partition of all scores; False if its last score is NaN."""
        array = torch.cat([chunk.reshape(-1) for chunk in scores]).numpy()
        array.partition(first)
        array[first:].partition(last - first)  # two ranks at once would take ten times as long
        if np.isnan(array[last]):
            return False
        values, repeats = np.unique(array[first : last + 1], return_counts=True)
        repeats[-1] += np.count_nonzero(array[last + 1 :] == array[last])
        self._below = int(np.count_nonzero(array[:first] < array[first]))
        repeats[0] += first - self._below
        self.values, self._repeats = torch.from_numpy(values), torch.from_numpy(repeats)
        self._through, self._total = self._below + self._repeats.cumsum(0), scores.total
        return True

    def at(self, rank: int) -> tuple[float, int, int]:
        """As `ranked`; NaN is the largest score."""
        index = int(torch.searchsorted(self._through, rank, right=True))
        if index == len(self.values):
            return math.nan, int(self._through[-1]), self._total
        through = int(self._through[index])
        return float(self.values[index]), through - int(self._repeats[index]), through

    def dropped(self, threshold: float) -> int:
        """The number of scores, of all processes, below ``threshold``, which has to be within the window."""
        return self._below + int(self._repeats[self.values < threshold].sum())


class Gaps:
    """The distinct scores near the quantile of a sparsity in (0, 1), and a threshold in the widest gap between them."""

    def __init__(self, scores: Scores, sparsity: float) -> None:
        """Choose the interval (low, high] in which every threshold drops ``sparsity`` within `_NEAR`. If all scores in it
        are equal, they and the next distinct score are its ends."""
        total, self._processes = scores.total, scores.processes
        wanted, near = sparsity * total, _NEAR * total
        first = max(1, min(round(wanted), math.ceil(wanted - near))) - 1
        last = max(0, min(total - 1, max(round(wanted), math.floor(wanted + near))))
        window = Window(scores, first, last)
        (low, below, through), (high, _, _) = window.at(first), window.at(last)
        if not low < high:
            up = low == 0 or through - wanted < wanted - below  # zeros are dropped for nothing
            neighbour = through if up else below - 1
            high, low = (math.inf, low) if up else (low, 0.0)  # without a neighbour
            if 0 <= neighbour < total:
                window = Window(scores, min(first, neighbour), max(last, neighbour))
                value = window.at(neighbour)[0]
                low, high = (low, value) if up else (value, high)
        self.dropped, self._low, self._high = window.dropped, low, high
        self._values = [torch.tensor([low, high])]
        self.add(window.values)

    def add(self, scores: Tensor) -> None:
        """Add scores, of any shape, as ends of gaps; the interval stays the same."""
        self._values.append(scores[(scores >= self._low) & (scores <= self._high)].unique().cpu())

    def threshold(self) -> float:
        """The middle of the widest gap relative to its upper end; of equal gaps, the first. All processes call it."""
        local = torch.cat(self._values).unique()
        values = torch.cat(self._processes.gather(local)).unique().double()
        if len(values) < 2 or values[-1] == math.inf:
            # All scores are equal: they are kept or dropped together.
            last = float(values[0]) if len(values) < 2 else next_float(float(values[-2]))
            return max(last, torch.finfo(torch.float32).tiny) if last else last  # bundles have no subnormal thresholds
        gaps = (values[1:] - values[:-1]) / values[1:]
        widest = int((gaps == gaps.max()).nonzero()[0])
        below, above = float(values[widest]), float(values[widest + 1])
        middle = float(torch.tensor((below + above) / 2))
        return middle if middle > below else above  # no float32 lies between adjacent ones
