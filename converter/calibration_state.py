"""Losses of the masked model on calibration tokens, each projection's channel scale and quantile table; final thresholds.

A table holds the quantiles of a projection's scores on the 0.5% grid. Scoring an allocation is then a table look-up and
one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wisparse.kernels import reference

from .calibration import CalibrationTokens
from .experts import Rows, channels_read, weights_read
from .flow import BlockFlow, Hidden, StopForward
from .masking import MaskedModel
from .processes import ALONE, Processes
from .search.allocation import MAX_SPARSITY, STEP
from .sensitivity import DenseReference
from .source import SourceModel
from .statistics import Gaps, Scores, score_quantiles

# Limits of one pass: candidates, and elements of its widest tensor. A GPU takes as long for 3,000 tokens as for 30,000.
_MOST_CANDIDATES = 16
_LARGEST_PASS = {"cuda": 1 << 26, "cpu": 1 << 20}
# About the most tokens that a table is built from: its quantiles are at most a tenth of a point of sparsity off.
TABLE_TOKENS = 2048
# The sparsities of the quantile tables: 0, 0.5%, ..., 95%.
GRID: tuple[float, ...] = tuple(round(i * STEP, 4) for i in range(round(MAX_SPARSITY / STEP) + 1))


class CalibrationState(contextlib.AbstractContextManager["CalibrationState"]):
    """A model, its calibration tokens, and the scales and tables of its projections."""

    def __init__(
        self,
        source: SourceModel,
        tokens: CalibrationTokens,
        *,
        num_samples: int | None = None,
        batch_size: int = 4,
        processes: Processes = ALONE,
        masked: MaskedModel | None = None,
    ) -> None:
        ids, keep = tokens.input_ids[:num_samples], tokens.keep[:num_samples]
        self.processes = processes
        self.num_counted = int(keep.sum())
        self.batch_shape = (batch_size, ids.shape[1])
        rows = [row for row in range(len(ids)) if row // batch_size % processes.world_size == processes.rank]
        sampled = torch.zeros_like(keep)
        sampled[tuple(keep.nonzero()[:: max(1, self.num_counted // TABLE_TOKENS)].T)] = True
        self.sampled = sampled[rows][keep[rows]]  # which of the counted tokens the tables are built from
        # Whether there are processes without micro-batches, which cannot see which projections share an input.
        self.idle = -(-len(ids) // batch_size) < processes.world_size
        self.masked = masked or MaskedModel(source.projections)
        self.flow = BlockFlow(source.model, source.config, ids[rows], keep[rows], batch_size)
        self.reference = DenseReference(self.flow, self.masked)
        self.names = list(source.projections)  # in order of execution
        self.sizes = {name: weights_read(module) for name, module in source.projections.items()}
        blocks = range(source.config.num_blocks)
        self.groups = [[name for name in self.names if name.startswith(f"model.layers.{block}.")] for block in blocks]
        self.scales: dict[str, Tensor] = {}
        self.tables: dict[str, list[float]] = {}
        self.num_kl_evaluations = 0.0  # in passes over all tokens; partial passes count as fractions
        self._wide: list[BlockFlow] = []
        widest = max(channels_read(module) for module in source.projections.values())
        largest = _LARGEST_PASS.get(self.flow.device.type, 1) // (batch_size * ids.shape[1] * widest)
        self.side_by_side = max(1, min(largest, _MOST_CANDIDATES))  # the most candidates that `kls` takes

    def __exit__(self, *_: object) -> None:
        self.masked.close()

    def set_scale(self, name: str, scale: Tensor) -> None:
        """Set a projection's channel_scale (K,) and delete its table, which has to be built again."""
        self.masked.set_scale(name, scale)
        self.scales[name] = scale
        self.tables.pop(name, None)

    def thresholds(self, allocation: Mapping[str, float]) -> dict[str, float]:
        """Thresholds of an allocation (projection name -> sparsity), interpolated linearly in the tables."""
        result = {}
        for name, sparsity in allocation.items():
            result[name] = 0.0
            if sparsity > 0.0:
                table = self.tables[name]
                low = min(int(sparsity / STEP), len(table) - 2)
                result[name] = table[low] + (sparsity / STEP - low) * (table[low + 1] - table[low])
        return result

    def build_tables(self) -> None:
        """Build the tables of all projections for their present scales."""
        for view in self.blocks():
            view.build_tables()

    def blocks(self, only: Collection[int] | None = None) -> Iterator[BlockView]:
        """Every block, or those in ``only``, in order, with the dense model's hidden states as input. The inputs of one
        block at a time are in memory."""
        hidden = self.flow.start()
        for index, names in enumerate(self.groups):
            self.masked.clear()
            if only is not None and index not in only:
                with torch.no_grad():
                    hidden = [self.flow.block(index, batch, h) for batch, h in enumerate(hidden)]
                continue
            inputs, out = block_inputs(self.flow, self.masked, index, hidden, names)
            yield BlockView(self, index, tuple(names), inputs, hidden, out)
            del inputs
            hidden = out

    @torch.no_grad()
    def kl(
        self, thresholds: Mapping[str, float], *, num_batches: int | None = None, view: BlockView | None = None
    ) -> float:
        """Token-mean KL(dense || sparse) with the projections of ``thresholds`` sparse. With ``view``, which skips the
        blocks before its own, none of them may be in an earlier block."""
        flow = self.flow
        start, hidden = (0, flow.start()) if view is None else (view.index, view.hidden)
        sums = []
        for batch in range(flow.num_batches if num_batches is None else min(num_batches, flow.num_batches)):
            with self.masked.masking(thresholds), self.masked.during(dense_tokens=~flow.counted[batch]):
                final = flow.final(batch, start, hidden[batch])
            sums.append((self.reference.kl_sum(batch, final), len(final)))
        self.num_kl_evaluations += len(sums) / max(flow.num_batches, 1)
        sums = self.processes.in_order(sums)
        return sum(kl for kl, _ in sums) / max(sum(count for _, count in sums), 1)

    @torch.no_grad()
    def kls(self, allocations: Sequence[Mapping[str, float]]) -> list[float]:
        """`kl` of up to `side_by_side` allocations of the same projections, in one batch with the tokens once for each. The
        batch is always padded to `side_by_side`, so that a candidate's KL does not depend on their number."""
        if self.side_by_side == 1:
            return [self.kl(self.thresholds(allocation)) for allocation in allocations]
        flow, count = self.flow, self.side_by_side
        padded = [*allocations, *[allocations[0]] * (count - len(allocations))]
        thresholds = [self.thresholds(allocation) for allocation in padded]
        totals, tokens = [0.0] * len(allocations), 0
        for batch in range(flow.num_batches):
            while len(self._wide) <= batch:  # the micro-batch's tokens repeated `side_by_side` times
                index = len(self._wide)
                ids, keep = flow.input_ids[index].repeat(count, 1), flow.counted[index].repeat(count, 1)
                self._wide.append(BlockFlow(flow.model, flow.config, ids, keep, len(ids)))
            wide, rows = self._wide[batch], len(flow.input_ids[batch])
            by_sequence = {
                name: torch.tensor([of_one[name] for of_one in thresholds], device=wide.device).repeat_interleave(rows)
                for name in allocations[0]
            }
            with self.masked.masking(by_sequence), self.masked.during(dense_tokens=~wide.counted[0]):
                finals = wide.final(0).chunk(count)
            for i in range(len(allocations)):
                totals[i] += self.reference.kl_sum(batch, finals[i])
            tokens += len(finals[0])
        self.num_kl_evaluations += len(allocations)
        return [total / max(tokens, 1) for total in totals]


@dataclass
class BlockView:
    """One block with its input and output in the dense model."""

    calib: CalibrationState
    index: int
    names: tuple[str, ...]
    inputs: dict[str, Rows]  # of each projection, at the counted tokens
    hidden: Hidden  # the block's input, by micro-batch
    out: Hidden  # the block's output, by micro-batch

    def build_tables(self) -> None:
        """Build the quantile tables of the block's projections for their present scales."""
        for name in self.names:
            rows = self.inputs[name]
            sample: Any = self.calib.sampled.to(rows.x.device)
            if rows.experts is not None:  # a token has several rows: sample rows, not tokens
                sample = slice(None, None, max(1, len(rows.x) // TABLE_TOKENS))
            scores = Scores(rows[sample], self.calib.scales[name], self.calib.processes)
            self.calib.tables[name] = score_quantiles(scores, GRID)

    @torch.no_grad()
    def error(self, thresholds: Mapping[str, float]) -> float:
        """Mean squared error of the block's output over the counted tokens, masked at ``thresholds``."""
        masked, flow = self.calib.masked, self.calib.flow
        total = 0.0
        with masked.masking(thresholds):
            for batch, hidden in enumerate(self.hidden):
                counted = flow.counted[batch]
                with masked.during(dense_tokens=~counted):
                    difference = flow.block(self.index, batch, hidden).hidden - self.out[batch].hidden
                total += float(difference[counted.to(difference.device)].float().square().sum(dtype=torch.float64))
        return total / (flow.num_counted * self.out[0].hidden.shape[-1])


@torch.no_grad()
def block_inputs(
    flow: BlockFlow, masked: MaskedModel, index: int, hidden: Hidden, names: Collection[str], *, first: bool = False
) -> tuple[dict[str, Rows], Hidden]:
    """Run block ``index``. Returns the inputs of its projections ``names`` at the counted tokens, in the model's dtype,
    where projections with one input share one copy, and the block's output. With ``first`` the pass ends at the first of
    ``names`` that runs, and only it and those that share its input are returned."""
    if not hidden:  # this process has no micro-batches
        return {name: Rows.none(masked.projections[name]) for name in names}, []
    sharing = [[one.name for one in group if one.name in names] for group in flow.config.shared_inputs(index)]
    parts: dict[str, list[Rows]] = {}
    reader: dict[str, str] = {}  # projection -> the first one with the same input
    out: Hidden = []
    for batch, h in enumerate(hidden):
        seen: dict[str, Tensor] = {}

        def observe(name: str, x: Tensor, seen: dict[str, Tensor] = seen) -> None:
            if name in names:
                seen[name] = x
                if first:
                    # Modules that baselines mask beside the model's projections share no input.
                    seen.update(dict.fromkeys(next((group for group in sharing if name in group), (name,)), x))
                    raise StopForward

        with masked.during(dense_tokens=~flow.counted[batch], observer=observe), contextlib.suppress(StopForward):
            out.append(flow.block(index, batch, h))
        for name, x in seen.items():
            reader[name] = next(other for other, y in seen.items() if y is x)
            if reader[name] == name:
                rows = Rows.counted(masked.projections[name], x, flow.counted[batch], flow.places[batch])
                parts.setdefault(name, []).append(rows)
    inputs = {name: Rows.cat(batches) for name, batches in parts.items()}
    return {name: inputs[reader[name]] for name in reader}, out


@torch.no_grad()
def final_thresholds(
    calib: CalibrationState, scales: Mapping[str, Tensor], allocation: Mapping[str, float], advance: Callable[[], None]
) -> dict[str, tuple[float, float, float]]:
    """Per projection (threshold, fraction of the scores below it, fraction of exact zeros in the input, which is counted
    where the activation has them), in order of execution. A projection's threshold is taken from its inputs with all
    projections before it masked at their final thresholds. From the dense model's inputs it would drop up to a point more
    than asked for, since sparse inputs are smaller."""
    flow, masked, processes = calib.flow, calib.masked, calib.processes
    for name, scale in scales.items():
        masked.set_scale(name, scale)
    result: dict[str, tuple[float, float, float]] = {}
    relu = flow.config.activation == "relu2"
    zeros = {one.name for one in flow.config.projections() if relu and one.role.endswith("down_proj")}

    def decide(name: str, x: Rows, first: bool) -> None:
        """Set the result from the inputs at the counted tokens; ``first``: these are the normalised embeddings."""
        result[name] = (0.0, 0.0, 0.0)
        if allocation[name] > 0.0:
            scores = Scores(x, scales[name], processes)
            gaps = Gaps(scores, allocation[name])
            if first:
                _add_vocabulary(gaps, calib, name, scales[name])
            threshold = gaps.threshold()
            result[name] = (threshold, gaps.dropped(threshold) / scores.total, 0.0)
        if name in zeros:
            sums = processes.add(torch.stack(((x.x == 0).sum(), torch.tensor(x.x.numel(), device=x.x.device))))
            result[name] = (*result[name][:2], int(sums[0]) / int(sums[1]))

    hidden = flow.start()
    with masked.masking({}):
        for index, names in enumerate(calib.groups):
            if flow.num_batches == 1 and processes.world_size == 1:
                # One pass: when a projection is reached its threshold is decided and set, before it runs.
                counted = flow.counted[0]
                embedded: list[Tensor] = []

                def reached(name: str, x: Tensor, counted: Tensor = counted, embedded: list[Tensor] = embedded) -> None:
                    if not result:
                        embedded.append(x)
                    rows = Rows.counted(masked.projections[name], x, counted, flow.places[0])
                    decide(name, rows, any(x is first for first in embedded))
                    masked.set_threshold(name, result[name][0])

                with masked.during(dense_tokens=~counted, observer=reached):
                    hidden[0] = flow.block(index, 0, hidden[0])
                advance()
                continue
            pending = list(names)
            while pending:
                # The next projection and those that share its input: no other pending projection can change it.
                inputs, _ = block_inputs(flow, masked, index, hidden, pending, first=True)
                ready = processes.broadcast(list(inputs)) if calib.idle else list(inputs)
                first = not result
                for name in ready:
                    decide(name, inputs[name], first)
                for name in ready:
                    masked.set_threshold(name, result[name][0])
                pending = [name for name in pending if name not in ready]
                del inputs
            for batch, h in enumerate(hidden):
                with masked.during(dense_tokens=~flow.counted[batch]):
                    hidden[batch] = flow.block(index, batch, h)
            advance()
    return result


def _add_vocabulary(gaps: Gaps, calib: CalibrationState, name: str, scale: Tensor) -> None:
    """Add the scores of block 0's first inputs for every token of the vocabulary: normalised embeddings, which depend on
    neither position nor context. Each process adds a part."""
    flow = calib.flow
    num_tokens = flow.model.get_input_embeddings().weight.shape[0]
    rows, length = calib.batch_shape
    ids = torch.arange(-(-num_tokens // length) * length).remainder(num_tokens).view(-1, length)
    for batch in list(ids.split(rows))[calib.processes.rank :: calib.processes.world_size]:
        embedding = BlockFlow(flow.model, flow.config, batch, torch.ones_like(batch, dtype=torch.bool), rows)
        x = block_inputs(embedding, calib.masked, 0, embedding.start(), [name], first=True)[0][name].x
        gaps.add(reference.scores(x, scale.to(x.device)))
