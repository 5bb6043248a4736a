"""What a search has to know of a block before it tries anything: column norms of the weights, quantiles of the scores.

    g_i           = ||W[:, i]||_2                                     weight norm of channel i      (K,) float32
    channel_scale = clamp(g / gmean(g), 1e-4) ** alpha                constant factors cancel in tau
    tau(s)        = the s-quantile of the scores |x| * channel_scale  over all (token, channel) pairs

Quantiles are exact order statistics, found by counting the bit patterns of the scores (a radix select): memory does not
grow with the number of tokens, and the result does not depend on how they were split into batches.
Source: the paper's section 4.1 (weight norm, threshold as a quantile).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wisparse.kernels import reference

from .flow import BlockFlow, Hidden
from .masking import MaskedModel
from .processes import ALONE, Processes

_SMALLEST = 1e-4

# Scores sorted at once, at most: 64 MiB of float32.
_SORT_LIMIT = 1 << 24

# Scores counted at once, about: each takes some 20 bytes on the way.
_PIECE = 1 << 24

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
    """|x| * scale, float32, piece by piece: what all of it would take is never in memory at once.

    Args:
        inputs: (T, K) in the model's dtype.
        scale: (K,) float32.
        processes: where each has some of the tokens.

    Attributes:
        total: how many scores there are, of all processes.
    """

    def __init__(self, inputs: Tensor, scale: Tensor, processes: Processes = ALONE) -> None:
        self._pieces = inputs.split(max(1, _PIECE // inputs.shape[1]))
        self._scale = scale.to(inputs.device)
        self.processes = processes
        self.total = int(processes.add(torch.tensor(inputs.numel(), device=inputs.device)))

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        return reference.scores(self._pieces[index], self._scale)

    def dropped(self, threshold: float) -> int:
        """How many a mask of ``threshold`` drops, of all processes."""
        kept = torch.stack([reference.kept(piece, threshold).sum() for piece in self]).sum()
        return self.total - int(self.processes.add(kept))


def score_quantiles(scores: Sequence[Tensor], sparsities: Sequence[float]) -> list[float]:
    """Thresholds that drop given fractions of the scores.

    Args:
        scores: tensors of any shape, float32, >= 0, on one device. `Scores` that several processes have a share of are
            taken together.
        sparsities: fractions to drop, each in [0, 1).

    Returns:
        One threshold per sparsity: with ``score >= threshold`` kept, the fraction dropped is as close to the sparsity
        as the values allow: within half a value, and beyond that only where values tie. 0 for a sparsity of 0.
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
    """The values at ``ranks`` of the sorted scores, from 0: (value, how many are smaller, how many are not larger).

    Args:
        scores: as `score_quantiles` takes them.
    """
    processes = scores.processes if isinstance(scores, Scores) else ALONE
    # One value is two passes of counting; a table of many is cheaper by sorting, while that fits into memory.
    by_sorting = _total(scores) <= _SORT_LIMIT and len(ranks) > 4
    found = (_sorted_ranks if by_sorting else _counted_ranks)(scores, ranks, processes)
    return [(_float(bits), below, through) for bits, below, through in found]


def _total(scores: Sequence[Tensor]) -> int:
    return scores.total if isinstance(scores, Scores) else sum(part.numel() for part in scores)


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<i", bits))[0]


def _sorted_ranks(scores: Sequence[Tensor], ranks: Sequence[int], processes: Processes) -> list[tuple[int, int, int]]:
    """As `_counted_ranks`, by sorting everything."""
    values = torch.cat([part.reshape(-1) for part in scores])
    if processes.size > 1:
        values = torch.cat(processes.gather(values.cpu())).to(values.device)
    values = values.sort().values
    chosen = values[torch.tensor(ranks, device=values.device)]
    below = torch.searchsorted(values, chosen)
    through = torch.searchsorted(values, chosen, right=True)
    bits = chosen.view(torch.int32)
    return list(zip(bits.tolist(), below.tolist(), through.tolist(), strict=True))


def _counted_ranks(scores: Sequence[Tensor], ranks: Sequence[int], processes: Processes) -> list[tuple[int, int, int]]:
    """The values at ``ranks`` of the sorted scores: (float32 bits, how many are smaller, how many are not larger).

    The bits of a non-negative float32 order like the float: count the upper 16, then the lower 16 within each of the
    bins that hold a wanted rank, some bins per pass.
    """
    device = scores[0].device
    upper = torch.zeros(_BINS, dtype=torch.int64, device=device)
    for part in scores:
        upper += torch.bincount(_bits(part) >> 16, minlength=_BINS)
    processes.add(upper)
    through_bin = upper.cumsum(0)
    wanted = torch.tensor(ranks, device=device)
    bins = torch.searchsorted(through_bin, wanted, right=True)
    before = (through_bin - upper)[bins]
    values, below, through = (torch.empty_like(wanted) for _ in range(3))
    for some in bins.unique().split(_BINS_PER_PASS):
        place = torch.full((_BINS,), -1, dtype=torch.int32, device=device)
        place[some] = torch.arange(len(some), dtype=torch.int32, device=device)
        counts = torch.zeros(len(some) * _BINS, dtype=torch.int64, device=device)
        for part in scores:
            bits = _bits(part)
            places = place[bits >> 16]
            inside = places >= 0
            counts += torch.bincount(places[inside] * _BINS + (bits[inside] & 0xFFFF), minlength=len(counts))
        processes.add(counts)
        # One running sum over all bins of the pass; what lies before a bin comes off again.
        sums = counts.cumsum(0)
        mine = (place[bins] >= 0).nonzero().squeeze(1)
        first = place[bins[mine]].long() * _BINS
        offset = torch.where(first > 0, sums[(first - 1).clamp(min=0)], 0)
        low = torch.searchsorted(sums, offset + wanted[mine] - before[mine], right=True)
        values[mine] = (bins[mine] << 16) | (low - first)
        through[mine] = before[mine] + sums[low] - offset
        below[mine] = through[mine] - counts[low]
    return list(zip(values.tolist(), below.tolist(), through.tolist(), strict=True))


def _bits(part: Tensor) -> Tensor:
    return part.reshape(-1).contiguous().view(torch.int32)


@torch.no_grad()
def block_inputs(
    flow: BlockFlow, masked: MaskedModel, index: int, hidden: Hidden, names: Sequence[str]
) -> tuple[dict[str, Tensor], Hidden]:
    """Run block ``index`` and catch what enters each of its projections.

    Returns:
        Per projection the inputs of the counted tokens, (T, K) in the model's dtype, and the block's output.
        Projections that read the same tensor (q, k, v) share one copy.
    """
    caught: dict[str, list[Tensor]] = {name: [] for name in names}
    out: Hidden = []
    for batch, h in enumerate(hidden):
        counted = flow.counted[batch]
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, which keeps its id from being reused

        def catch(
            name: str, x: Tensor, counted: Tensor = counted, copies: dict[int, tuple[Tensor, Tensor]] = copies
        ) -> None:
            if name in caught:
                if id(x) not in copies:
                    copies[id(x)] = x[counted.to(x.device)], x
                caught[name].append(copies[id(x)][0])

        with masked.sparing(~counted), masked.observing(catch):
            out.append(flow.block(index, batch, h))
    joined: dict[tuple[int, ...], Tensor] = {}
    result = {}
    for name in names:
        key = tuple(id(part) for part in caught[name])
        if key and key not in joined:
            joined[key] = torch.cat(caught[name])
        result[name] = joined[key] if key else _no_tokens(masked, name)
    return result, out


class _Enough(Exception):
    """Stops a block whose remaining part is of no interest."""


@torch.no_grad()
def first_inputs(
    flow: BlockFlow, masked: MaskedModel, index: int, hidden: Hidden, names: Sequence[str]
) -> tuple[list[str], Tensor]:
    """What enters the first of ``names`` in block ``index``, which is run no further than that.

    Returns:
        Those of ``names`` that read the very same tensor, in their order, and the inputs of the counted tokens (T, K).
    """
    parts: list[Tensor] = []
    sharing = [names[0]]
    for batch, h in enumerate(hidden):
        counted = flow.counted[batch]
        first: list[Tensor] = []

        def catch(name: str, x: Tensor, first: list[Tensor] = first) -> None:
            if name == names[0]:
                first.append(x)
            elif first and x is first[0] and name in names:
                if name not in sharing:
                    sharing.append(name)
            elif first:
                raise _Enough
            if first and name == names[-1]:
                raise _Enough

        with masked.sparing(~counted), masked.observing(catch), contextlib.suppress(_Enough):
            flow.block(index, batch, h)
        parts.append(first[0][counted.to(first[0].device)])
    return sharing, torch.cat(parts) if parts else _no_tokens(masked, names[0])


def _no_tokens(masked: MaskedModel, name: str) -> Tensor:
    weight = masked.projections[name].weight
    return weight.new_empty(0, weight.shape[1])
