"""The searches within a block (alphas, greedy allocation), and the final thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from wisparse.kernels import reference

from ..calibration_state import CalibrationState, first_inputs
from ..flow import BlockFlow
from ..statistics import Scores, next_float, ranked
from .allocation import MAX_SPARSITY, check_target

ALPHAS: tuple[float, ...] = tuple(round(0.05 * i, 2) for i in range(31))

# How far from the quantile a threshold may be, as a fraction of all scores: a tenth of a point of sparsity.
_NEAR = 1e-3


def search_alpha(loss: Callable[[Mapping[str, float]], float], names: Sequence[str]) -> dict[str, float]:
    """Alphas of least ``loss``, the block's error with the given alpha per projection.

    One alpha for all projections first, then each projection's own in the order of ``names``.
    """
    least, tied = min((loss(dict.fromkeys(names, alpha)), alpha) for alpha in ALPHAS)
    best = dict.fromkeys(names, tied)
    for name in names:
        for alpha in ALPHAS:
            if alpha == best[name]:
                continue
            error = loss({**best, name: alpha})
            if error < least:
                least, best = error, {**best, name: alpha}
    return best


def allocate_greedily(
    loss: Callable[[Mapping[str, float]], float], sizes: Mapping[str, int], target: float, *, step: float = 0.01
) -> dict[str, float]:
    """Sparsity per projection whose parameter-weighted mean is ``target``.

    Every step adds ``step`` to the sparsity of the whole block, at the projection where ``loss``, the block's error at
    given sparsities, rises least.
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
        """Two scores such that any threshold above the one, up to the other, drops ``sparsity`` within `_NEAR`.

        Further off only where so many scores tie that they decide: then they and a neighbour.
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


@torch.no_grad()
def final_thresholds(
    calib: CalibrationState,
    scales: Mapping[str, Tensor],
    allocation: Mapping[str, float],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, tuple[float, float]]:
    """Per projection (threshold, fraction of the scores below it), in order of execution.

    Before a projection everything else is sparse as decided, so its inputs are those it will meet. A threshold from
    the dense model's inputs drops up to a point more than asked for, since sparse inputs are smaller.
    """
    flow, masked, processes = calib.flow, calib.masked, calib.processes
    for name, scale in scales.items():
        masked.set_scale(name, scale)
    result: dict[str, tuple[float, float]] = {}
    hidden = flow.start()
    with masked.masking({}):
        for index, names in enumerate(calib.groups):
            pending = list(names)
            while pending:
                # Those that read the same tensor as the first see inputs that no other pending one can change.
                ready, inputs = first_inputs(flow, masked, index, hidden, pending)
                if calib.idle:
                    ready = processes.broadcast(ready)
                first = not result
                for name in ready:
                    scores = Scores(inputs, scales[name], processes)
                    threshold = 0.0
                    if allocation[name] > 0.0:
                        gaps = Gaps(scores, allocation[name])
                        if first:
                            _add_vocabulary(gaps, calib, name, scales[name])
                        threshold = gaps.threshold()
                    result[name] = (threshold, scores.dropped(threshold) / scores.total)
                for name in ready:
                    masked.set_threshold(name, result[name][0])
                pending = [name for name in pending if name not in ready]
                del inputs
            for batch, h in enumerate(hidden):
                with masked.sparing(~flow.counted[batch]):
                    hidden[batch] = flow.block(index, batch, h)
            advance()
    return result


def _add_vocabulary(gaps: Gaps, calib: CalibrationState, name: str, scale: Tensor) -> None:
    """Add what a first projection of block 0 reads at every token of the vocabulary: its embedding, normalised.

    Neither position nor context has come in yet. Several processes have a share each.
    """
    flow = calib.flow
    num_tokens = flow.model.get_input_embeddings().weight.shape[0]
    rows, length = calib.batch_shape
    ids = torch.arange(-(-num_tokens // length) * length).remainder(num_tokens).view(-1, length)
    for some in list(ids.split(rows))[calib.processes.index :: calib.processes.size]:
        part = BlockFlow(flow.model, flow.config, some, torch.ones_like(some, dtype=torch.bool), rows)
        _, x = first_inputs(part, calib.masked, 0, part.start(), [name])
        gaps.add(reference.scores(x, scale.to(x.device)))
