"""Column norms of the weights, quantiles of the scores."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wisparse.kernels import reference

from .processes import ALONE, Processes

_SMALLEST = 1e-4

# Scores sorted at once, at most: 64 MiB of float32.
_SORT_LIMIT = 1 << 24

# Scores counted at once, about: each takes some 20 bytes on the way.
_CHUNK = 1 << 24

# Half of a float32's bits; and how many bins of the upper half are refined in one pass, 32 MiB of counts.
_BINS = 1 << 16
_BINS_PER_PASS = 64


def weight_norm(weight: Tensor) -> Tensor:
    """L2 norm of every column of ``weight`` (N, K), in float32: (K,)."""
    return weight.detach().float().square().sum(dim=0).sqrt()


def channel_scale(norm: Tensor, alpha: float) -> Tensor:
    """``clamp(g / gmean(g), 1e-4) ** alpha``, (K,) float32.

    The geometric mean is over the non-zero columns: a zero column contributes nothing to the output, and must neither
    drag the mean to 0 nor get a scale of 0 (a threshold of 0 means dense).
    """
    positive = norm[norm > 0].double()
    mean = positive.log().mean().exp() if positive.numel() else norm.new_ones((), dtype=torch.float64)
    return (norm.double() / mean).clamp(min=_SMALLEST).pow(alpha).float()


class Scores(Sequence[Tensor]):
    """|x| * scale of inputs (T, K) and scale (K,), float32, in chunks: never all in memory at once.

    ``total`` counts the scores of all processes.
    """

    def __init__(self, inputs: Tensor, scale: Tensor, processes: Processes = ALONE) -> None:
        self._chunks = inputs.split(max(1, _CHUNK // inputs.shape[1]))
        self._scale = scale.to(inputs.device)
        self.processes = processes
        self.total = int(processes.add(torch.tensor(inputs.numel(), device=inputs.device)))

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return reference.scores(self._chunks[index], self._scale)

    def dropped(self, threshold: float) -> int:
        """How many a mask of ``threshold`` drops, of all processes."""
        kept = torch.stack([reference.kept(chunk, threshold).sum() for chunk in self]).sum()
        return self.total - int(self.processes.add(kept))


def score_quantiles(scores: Sequence[Tensor], sparsities: Sequence[float]) -> list[float]:
    """Thresholds that drop given fractions, in [0, 1), of float32 scores >= 0 on one device.

    With ``score >= threshold`` kept, the fraction dropped is as close to the sparsity as the values allow: within half
    a value, and beyond that only where values tie. The threshold of sparsity 0 is 0. `Scores` of several processes are
    taken together.
    """
    total = _total(scores)
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
    return _float(struct.unpack("<i", struct.pack("<f", value))[0] + 1)


def ranked(scores: Sequence[Tensor], ranks: Sequence[int]) -> list[tuple[float, int, int]]:
    """The values at ``ranks`` of the sorted scores, from 0: (value, how many are smaller, how many are not larger)."""
    processes = scores.processes if isinstance(scores, Scores) else ALONE
    on_cpu = scores[0].device.type == "cpu"
    # On a GPU a few values are found faster by counting.
    if _total(scores) > _SORT_LIMIT or (not on_cpu and len(ranks) <= 4):
        return _counted_ranks(scores, ranks, processes)
    values = torch.cat([chunk.reshape(-1) for chunk in scores])
    if processes.size > 1:
        values = torch.cat(processes.gather(values.cpu())).to(values.device)
    if on_cpu:  # numpy's sort is ten times as fast as torch's, which finds the permutation too
        values.numpy().sort()
    else:
        values = values.sort().values
    chosen = values[torch.tensor(ranks, device=values.device)]
    below, through = (torch.searchsorted(values, chosen, right=right) for right in (False, True))
    return list(zip(chosen.tolist(), below.tolist(), through.tolist(), strict=True))


def _total(scores: Sequence[Tensor]) -> int:
    return scores.total if isinstance(scores, Scores) else sum(chunk.numel() for chunk in scores)


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<i", bits))[0]


def _counted_ranks(
    scores: Sequence[Tensor], ranks: Sequence[int], processes: Processes
) -> list[tuple[float, int, int]]:
    """`ranked` by counting bits, which order like the floats where these are not negative.

    The upper 16 bits first, then the lower 16 within each of the bins that hold a wanted rank, some bins per pass.
    """

    def bits_of(chunk: Tensor) -> Tensor:
        return chunk.reshape(-1).contiguous().view(torch.int32)

    device = scores[0].device
    upper = torch.zeros(_BINS, dtype=torch.int64, device=device)
    for chunk in scores:
        upper += torch.bincount(bits_of(chunk) >> 16, minlength=_BINS)
    processes.add(upper)
    through_bin = upper.cumsum(0)
    wanted = torch.tensor(ranks, device=device)
    bins = torch.searchsorted(through_bin, wanted, right=True)
    before = (through_bin - upper)[bins]
    values, below, through = (torch.empty_like(wanted) for _ in range(3))
    for some in bins.unique().split(_BINS_PER_PASS):
        index_of = torch.full((_BINS,), -1, dtype=torch.int32, device=device)
        index_of[some] = torch.arange(len(some), dtype=torch.int32, device=device)
        counts = torch.zeros(len(some) * _BINS, dtype=torch.int64, device=device)
        for chunk in scores:
            bits = bits_of(chunk)
            index = index_of[bits >> 16]
            inside = index >= 0
            counts += torch.bincount(index[inside] * _BINS + (bits[inside] & 0xFFFF), minlength=len(counts))
        processes.add(counts)
        # One running sum over all bins of the pass; what lies before a bin is subtracted.
        sums = counts.cumsum(0)
        mine = (index_of[bins] >= 0).nonzero().squeeze(1)
        first = index_of[bins[mine]].long() * _BINS
        offset = torch.where(first > 0, sums[(first - 1).clamp(min=0)], 0)
        low = torch.searchsorted(sums, offset + wanted[mine] - before[mine], right=True)
        values[mine] = (bins[mine] << 16) | (low - first)
        through[mine] = before[mine] + sums[low] - offset
        below[mine] = through[mine] - counts[low]
    return list(zip([_float(bits) for bits in values.tolist()], below.tolist(), through.tolist(), strict=True))
