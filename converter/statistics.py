"""Column norms of the weights; quantiles of the scores, and thresholds in the gaps between scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
# Scores that tell about where a rank is, and how far off it may be at first, as a fraction of all scores.
_SAMPLE, _MARGIN = 1 << 20, 4e-3


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
        self.device, self.processes, self._inputs, self._scale = inputs.x.device, processes, inputs, scale
        self._only = self._scores(inputs) if len(self._chunks) == 1 else None
        self.total = int(processes.add(torch.tensor(inputs.x.numel(), device=self.device)))

    def _scores(self, rows: Rows) -> Tensor:
        return reference.scores(rows.x, rows.scale(self._scale))

    def __iter__(self) -> Iterator[Tensor]:
        if self._only is not None:
            yield self._only
        else:
            yield from map(self._scores, self._chunks)

    def sample(self) -> Tensor:
        """Every so many-th of this process's scores, over all tokens and channels, ascending."""
        inputs, scale = self._inputs, self._scale.to(self.device)
        every = max(1, inputs.x.numel() // _SAMPLE) | 1  # odd, as widths are mostly even: one channel after another
        at = torch.arange(0, inputs.x.numel(), every, device=self.device)
        row, channel = at // inputs.x.shape[1], at % inputs.x.shape[1]
        scale = scale[channel] if inputs.experts is None else scale[inputs.experts[row], channel]
        return _sorted(reference.scores(inputs.x[row, channel], scale))


def _sorted(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.sort().values
    values.numpy().sort()  # in place, and ten times as fast as torch, which finds the permutation too
    return values


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
    """The distinct scores around those at ranks ``first`` to ``last``, from 0, and how many each stands for, of all
    processes: exact, by one pass over the scores where a sample tells about where the ranks are, else by more."""

    def __init__(self, scores: Scores, first: int, last: int) -> None:
        sample, processes, margin = scores.sample().nan_to_num(nan=math.inf), scores.processes, _MARGIN
        while True:
            low, high = math.inf, -math.inf  # of a process without tokens
            if len(sample):
                begin = math.floor(len(sample) * (first / scores.total - margin)) - 1
                end = math.ceil(len(sample) * (last / scores.total + margin)) + 1
                low = float(sample[begin]) if begin >= 0 else -math.inf
                high = float(sample[end]) if end < len(sample) else math.inf
            bounds = processes.gather((low, high))
            low, high = min(one for one, _ in bounds), max(one for _, one in bounds)
            counts, inside = torch.zeros(2, dtype=torch.int64, device=scores.device), []
            for chunk in scores:
                flat = chunk.reshape(-1)
                # Those equal to the lowest are counted, not kept: they may be most of all, zeros of a ReLU.
                counts += torch.stack(((flat < low).count_nonzero(), (flat == low).count_nonzero()))
                inside.append(flat[(flat > low) & (flat <= high)])
            below, equal = processes.add(counts).tolist()
            values, repeats = torch.cat(inside).unique(return_counts=True)
            if processes.world_size > 1:
                parts = processes.gather((values.cpu(), repeats.cpu()))
                values, which = torch.cat([one for one, _ in parts]).unique(return_inverse=True)
                every = torch.cat([one for _, one in parts])
                repeats = torch.zeros(len(values), dtype=torch.int64).index_add_(0, which, every)
            self.values = torch.cat((torch.tensor([low]), values.cpu()))
            self._repeats = torch.cat((torch.tensor([equal]), repeats.cpu()))
            self._below, self._through, self._total = below, below + self._repeats.cumsum(0), scores.total
            # Where bounds no longer leave anything out, a rank beyond them is that of a NaN.
            if (below <= first and last < int(self._through[-1])) or (low, high) == (-math.inf, math.inf):
                return
            margin *= 8

    def at(self, rank: int) -> tuple[float, int, int]:
        """As `ranked`; the largest are NaN."""
        found = int(torch.searchsorted(self._through, rank, right=True))
        if found == len(self.values):
            return math.nan, int(self._through[-1]), self._total
        through = int(self._through[found])
        return float(self.values[found]), through - int(self._repeats[found]), through

    def dropped(self, threshold: float) -> int:
        """How many a mask of ``threshold``, within the window, drops, of all processes."""
        return self._below + int(self._repeats[self.values < threshold].sum())


class Gaps:
    """The distinct scores near the quantile of a sparsity in (0, 1), and the widest gap between two of them."""

    def __init__(self, scores: Scores, sparsity: float) -> None:
        """Between two scores such that any threshold above the one, up to the other, drops ``sparsity`` within `_NEAR`;
        further off only where so many scores tie that they decide: then they and a neighbour."""
        total, self._processes = scores.total, scores.processes
        wanted, near = sparsity * total, _NEAR * total
        first = max(1, min(round(wanted), math.ceil(wanted - near))) - 1
        last = max(0, min(total - 1, max(round(wanted), math.floor(wanted + near))))
        window = Window(scores, first, last)
        (low, below, through), (high, _, _) = window.at(first), window.at(last)
        if not low < high:
            up = through - wanted < wanted - below
            neighbour = through if up else below - 1
            high, low = (math.inf, low) if up else (low, 0.0)  # where there is none
            if 0 <= neighbour < total:
                window = Window(scores, min(first, neighbour), max(last, neighbour))
                value = window.at(neighbour)[0]
                low, high = (low, value) if up else (value, high)
        self.dropped, self._low, self._high = window.dropped, low, high
        self._values = [torch.tensor([low, high])]
        self.add(window.values)

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
