"""Final thresholds: from inputs as sparse as at run time, each in a gap between scores.

A quantile is a score that occurs, or the next number. What occurred in the calibration text occurs again, above all in
block 0, where q, k and v read what depends on the token alone; and a score on the threshold is kept by one right
program and dropped by another, for they round differently. So a threshold stands midway in the widest gap there is
among the scores near the quantile, which in block 0 are those of the whole vocabulary too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from wisparse.kernels import reference

from ..budget import MAX_SPARSITY, check_target
from ..flow import BlockFlow
from ..statistics import Scores, first_inputs, next_float, ranked
from ..workbench import Workbench

GRID: tuple[float, ...] = tuple(round(0.05 * i, 2) for i in range(31))


def search_alpha(
    loss: Callable[[Mapping[str, float]], float],
    names: Sequence[str],
) -> dict[str, float]:
    """Alphas of least ``loss``.

    Args:
        loss: the block's error with the given alpha per projection, thresholds following from the alphas.
        names: the block's projections, in order of execution: the order of the coordinate sweeps.
    """
    least, tied = min((loss(dict.fromkeys(names, alpha)), alpha) for alpha in GRID)
    best = dict.fromkeys(names, tied)
    for name in names:
        for alpha in GRID:
            if alpha == best[name]:
                continue
            error = loss({**best, name: alpha})
            if error < least:
                least, best = error, {**best, name: alpha}
    return best


def allocate_greedily(
    loss: Callable[[Mapping[str, float]], float],
    sizes: Mapping[str, int],
    target: float,
    *,
    step: float = 0.01,
) -> dict[str, float]:
    """Sparsity per projection whose parameter-weighted mean is ``target``.

    Args:
        loss: the block's error at given sparsities; called with every projection present.
        sizes: parameters per projection.
        target: the block's sparsity, at most `MAX_SPARSITY`.
        step: sparsity of the whole block that one step adds.
    """
    check_target(target)
    total = sum(sizes.values())
    sparsities = dict.fromkeys(sizes, 0.0)
    spent = 0.0
    while target * total - spent > 1e-9 * total:
        amount = min(step * total, target * total - spent)
        best: tuple[float, str, float] | None = None
        for name, size in sizes.items():
            if sparsities[name] >= MAX_SPARSITY:
                continue
            # What does not fit under the bound is left for the next step.
            raised = min(sparsities[name] + amount / size, MAX_SPARSITY)
            error = loss({**sparsities, name: raised})
            if best is None or error < best[0]:
                best = (error, name, raised)
        if best is None:
            break
        _, name, raised = best
        spent += (raised - sparsities[name]) * sizes[name]
        sparsities[name] = raised
    return sparsities


# How far from the quantile a threshold may be, as a fraction of all scores: a tenth of a point of sparsity. The widest
# of n gaps grows with log n only; of a million scores those in a fifth of a point leave one of about 1e-5 of the score.
_NEAR = 1e-3


class Gaps:
    """The distinct scores near a quantile, and the widest gap between two of them.

    Args:
        scores: of the calibration text; those of all processes count.
        sparsity: fraction of them to drop, in (0, 1).
    """

    def __init__(self, scores: Scores, sparsity: float) -> None:
        self._processes = scores.processes
        self._low, self._high = _around(scores, sparsity)
        self._values = [torch.tensor([self._low, self._high])]
        for piece in scores:
            self.add(piece)

    def add(self, scores: Tensor) -> None:
        """More scores, of any shape, that a threshold must keep away from; the quantile stays what it is."""
        inside = scores[(scores >= self._low) & (scores <= self._high)]
        self._values.append(inside.unique().cpu())

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


def _around(scores: Scores, sparsity: float) -> tuple[float, float]:
    """Two scores such that any threshold above the one, up to the other, drops about ``sparsity``: within `_NEAR`.

    Further off only where so many scores tie: then they are what all is decided by, and a neighbour.
    """
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


@torch.no_grad()
def final_thresholds(
    bench: Workbench,
    scales: Mapping[str, Tensor],
    allocation: Mapping[str, float],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, tuple[float, float]]:
    """Thresholds as the runtime needs them: from inputs that are sparse already, in order of execution.

    Before a projection, everything else is sparse as decided, so its inputs are those it will meet. A threshold from
    the dense model's inputs drops up to a point more than asked for, since sparse inputs are smaller.

    Returns:
        Per projection (threshold, fraction of the scores below it).
    """
    for name, scale in scales.items():
        bench.masked.set_scale(name, scale)
    with bench.masked.masking({}):
        return _one_after_the_other(bench, scales, allocation, advance)


def _one_after_the_other(
    bench: Workbench, scales: Mapping[str, Tensor], allocation: Mapping[str, float], advance: Callable[[], None]
) -> dict[str, tuple[float, float]]:
    """`final_thresholds`; leaves the masks on."""
    result: dict[str, tuple[float, float]] = {}
    hidden = bench.flow.start()
    masked = bench.masked
    for index, names in enumerate(bench.groups):
        pending = list(names)
        while pending:
            # Those that read the same tensor as the first pending one see inputs that no other pending one can change.
            ready, inputs = first_inputs(bench.flow, masked, index, hidden, pending)
            if bench.idle:  # a process without tokens cannot tell
                ready = bench.processes.broadcast(ready)
            scores = {name: Scores(inputs, scales[name], bench.processes) for name in ready}
            gaps = {name: Gaps(scores[name], allocation[name]) for name in ready if allocation[name] > 0.0}
            if result or not gaps:
                vocabulary: Iterator[Tensor] = iter(())
            else:
                vocabulary = _vocabulary_inputs(bench, ready)
            for x in vocabulary:
                for name, found in gaps.items():
                    found.add(reference.scores(x, scales[name].to(x.device)))
            for name in ready:
                threshold = gaps[name].threshold() if name in gaps else 0.0
                result[name] = (threshold, scores[name].dropped(threshold) / scores[name].total)
                masked.set_threshold(name, threshold)
            pending = [name for name in pending if name not in ready]
            del inputs, scores
        hidden = [_sparse_step(bench, index, batch, h) for batch, h in enumerate(hidden)]
        advance()
    return result


def _sparse_step(bench: Workbench, index: int, batch: int, hidden: Tensor) -> Tensor:
    with bench.masked.sparing(~bench.flow.counted[batch]):
        return bench.flow.block(index, batch, hidden)


def _vocabulary_inputs(bench: Workbench, names: Sequence[str]) -> Iterator[Tensor]:
    """What the first projections of block 0 read at every token of the vocabulary, in pieces (T, K).

    It is the token's embedding, normalised: neither position nor context has come in yet. Several processes have a
    share each.
    """
    flow = bench.flow
    num_tokens = flow.model.get_input_embeddings().weight.shape[0]
    rows, length = bench.batch_shape
    ids = torch.arange(-(-num_tokens // length) * length).remainder(num_tokens).view(-1, length)
    for some in list(ids.split(rows))[bench.processes.index :: bench.processes.size]:
        part = BlockFlow(flow.model, flow.config, some, torch.ones_like(some, dtype=torch.bool), rows)
        yield first_inputs(part, bench.masked, 0, part.start(), names)[1]
