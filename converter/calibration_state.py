"""The masked model on its calibration tokens, with every projection's channel scale and quantile table; final thresholds.

A table holds the quantiles of a projection's scores on the 0.5% grid. So a candidate allocation costs a swap of
thresholds and a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wisparse.kernels import reference

from .calibration import CalibrationTokens
from .experts import Rows, channels_read, numbers_read
from .flow import BlockFlow, Hidden
from .masking import MaskedModel
from .processes import ALONE, Processes
from .search.allocation import MAX_SPARSITY, STEP
from .sensitivity import DenseReference
from .source import SourceModel
from .statistics import Gaps, Scores, score_quantiles

# Candidates in one pass, and elements of its widest tensor: a GPU takes as long for 3,000 tokens as for 30,000.
_MOST_CANDIDATES = 16
_LARGEST_PASS = {"cuda": 1 << 26, "cpu": 1 << 20}
# Tables come from about so many tokens at most: a quantile of theirs is a tenth of a point of sparsity off at most.
_TABLE_TOKENS = 2048
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
        sampled[tuple(keep.nonzero()[:: max(1, self.num_counted // _TABLE_TOKENS)].T)] = True
        self.sampled = sampled[rows][keep[rows]]  # of the counted tokens, those of the tables
        # A process without tokens does not know what its blocks would read.
        self.idle = -(-len(ids) // batch_size) < processes.world_size
        self.masked = masked or MaskedModel(source.projections)
        self.flow = BlockFlow(source.model, source.config, ids[rows], keep[rows], batch_size)
        self.reference = DenseReference(self.flow, self.masked)
        self.names = list(source.projections)  # in order of execution
        self.sizes = {name: numbers_read(module) for name, module in source.projections.items()}
        blocks = range(source.config.num_blocks)
        self.groups = [[name for name in self.names if f".{block}." in name] for block in blocks]
        self.scales: dict[str, Tensor] = {}
        self.tables: dict[str, list[float]] = {}
        self.num_kl_evaluations = 0.0  # whole passes over the tokens; of a part of one that part
        self._wide: list[BlockFlow] = []
        widest = max(channels_read(module) for module in source.projections.values())
        room = _LARGEST_PASS.get(self.flow.device.type, 1) // (batch_size * ids.shape[1] * widest)
        self.side_by_side = max(1, min(room, _MOST_CANDIDATES))  # how many candidates `kls` takes

    def __exit__(self, *_: object) -> None:
        self.masked.close()

    def set_scale(self, name: str, scale: Tensor) -> None:
        """Put a channel_scale (K,) on a projection; its table is void until it is built again."""
        self.masked.set_scale(name, scale)
        self.scales[name] = scale
        self.tables.pop(name, None)

    def thresholds(self, allocation: Mapping[str, float]) -> dict[str, float]:
        """Thresholds of an allocation (projection name -> sparsity), linear between two entries of a table."""
        result = {}
        for name, sparsity in allocation.items():
            result[name] = 0.0
            if sparsity > 0.0:
                table = self.tables[name]
                low = min(int(sparsity / STEP), len(table) - 2)
                result[name] = table[low] + (sparsity / STEP - low) * (table[low + 1] - table[low])
        return result

    def build_tables(self) -> None:
        """The tables of all projections, for the scales they have now."""
        for view in self.blocks():
            view.build_tables()

    def blocks(self, only: Collection[int] | None = None) -> Iterator[BlockView]:
        """Every block in turn, or those in ``only``, with dense hidden states as its input; only one's are in
        memory."""
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
        """Token-mean KL(dense || sparse), the projections of ``thresholds`` sparse, none of them before ``view``'s
        block."""
        flow = self.flow
        start, hidden = (0, flow.start()) if view is None else (view.index, view.hidden)
        found = []
        for batch in range(flow.num_batches if num_batches is None else min(num_batches, flow.num_batches)):
            with self.masked.masking(thresholds), self.masked.during(dense_tokens=~flow.counted[batch]):
                final = flow.final(batch, start, hidden[batch])
            found.append((self.reference.kl_sum(batch, final), len(final)))
        self.num_kl_evaluations += len(found) / max(flow.num_batches, 1)
        found = self.processes.in_order(found)
        return sum(kl for kl, _ in found) / max(sum(count for _, count in found), 1)

    @torch.no_grad()
    def kls(self, allocations: Sequence[Mapping[str, float]]) -> list[float]:
        """`kl` of up to `side_by_side` allocations of the same projections, in one pass: each has a part of the rows. A
        pass has the same shape however many there are, so that a candidate's KL does not depend on the others."""
        if self.side_by_side == 1:
            return [self.kl(self.thresholds(allocation)) for allocation in allocations]
        flow, count = self.flow, self.side_by_side
        filled = [*allocations, *[allocations[0]] * (count - len(allocations))]
        thresholds = [self.thresholds(allocation) for allocation in filled]
        totals, tokens = [0.0] * len(allocations), 0
        for batch in range(flow.num_batches):
            while len(self._wide) <= batch:  # the flow of one micro-batch, `side_by_side` times
                index = len(self._wide)
                ids, keep = flow.input_ids[index].repeat(count, 1), flow.counted[index].repeat(count, 1)
                self._wide.append(BlockFlow(flow.model, flow.config, ids, keep, len(ids)))
            wide, rows = self._wide[batch], len(flow.input_ids[batch])
            one_each = {
                name: torch.tensor([found[name] for found in thresholds], device=wide.device).repeat_interleave(rows)
                for name in allocations[0]
            }
            with self.masked.masking(one_each), self.masked.during(dense_tokens=~wide.counted[0]):
                finals = wide.final(0).chunk(count)
            for i in range(len(allocations)):
                totals[i] += self.reference.kl_sum(batch, finals[i])
            tokens += len(finals[0])
        self.num_kl_evaluations += len(allocations)
        return [total / max(tokens, 1) for total in totals]


@dataclass
class BlockView:
    """One block between its dense input and its dense output."""

    calib: CalibrationState
    index: int
    names: tuple[str, ...]
    inputs: dict[str, Rows]  # what enters each projection, counted tokens only
    hidden: Hidden  # the block's input by micro-batch; ``out``: its output
    out: Hidden

    def build_tables(self) -> None:
        """The quantile tables of the block's projections, for the scales they have now."""
        for name in self.names:
            rows = self.inputs[name]
            # Of experts every so many rows, as there are several of a token.
            few = slice(None, None, max(1, len(rows.x) // _TABLE_TOKENS))
            some = rows[self.calib.sampled.to(rows.x.device) if rows.experts is None else few]
            scores = Scores(some, self.calib.scales[name], self.calib.processes)
            self.calib.tables[name] = score_quantiles(scores, GRID)

    @torch.no_grad()
    def error(self, thresholds: Mapping[str, float]) -> float:
        """Mean squared error of the block's output over the counted tokens, with ``thresholds`` on."""
        masked, flow = self.calib.masked, self.calib.flow
        total = 0.0
        with masked.masking(thresholds):
            for batch, hidden in enumerate(self.hidden):
                counted = flow.counted[batch]
                with masked.during(dense_tokens=~counted):
                    difference = flow.block(self.index, batch, hidden).hidden - self.out[batch].hidden
                total += float(difference[counted.to(difference.device)].float().square().sum(dtype=torch.float64))
        return total / (flow.num_counted * self.out[0].hidden.shape[-1])


class _Stop(Exception):
    """Ends a block's forward pass whose remaining part is not needed."""


@torch.no_grad()
def block_inputs(
    flow: BlockFlow, masked: MaskedModel, index: int, hidden: Hidden, names: Collection[str], *, first: bool = False
) -> tuple[dict[str, Rows], Hidden]:
    """Run block ``index``; gives the inputs of its projections ``names`` at the counted tokens, in the model's
    dtype, of which q, k and v share one copy, and the block's output. With ``first`` only of those that read the same as
    the first one to run; no more of the block is run."""
    if not hidden:  # this process has no micro-batch
        return {name: Rows.none(masked.projections[name]) for name in names}, []
    sharing = [[one.name for one in group if one.name in names] for group in flow.config.shared_inputs(index)]
    parts: dict[str, list[Rows]] = {}
    reader: dict[str, str] = {}  # of the same tensor, the first
    out: Hidden = []
    for batch, h in enumerate(hidden):
        seen: dict[str, Tensor] = {}

        def observe(name: str, x: Tensor, seen: dict[str, Tensor] = seen) -> None:
            if name in names:
                seen[name] = x
                if first:
                    # What a baseline masks beside the model's projections has inputs of its own.
                    seen.update(dict.fromkeys(next((group for group in sharing if name in group), (name,)), x))
                    raise _Stop

        with masked.during(dense_tokens=~flow.counted[batch], observer=observe), contextlib.suppress(_Stop):
            out.append(flow.block(index, batch, h))
        for name, x in seen.items():
            reader[name] = next(other for other, y in seen.items() if y is x)
            if reader[name] == name:
                parts.setdefault(name, []).append(Rows.counted(masked.projections[name], x, flow.counted[batch]))
    joined = {name: Rows.cat(some) for name, some in parts.items()}
    return {name: joined[reader[name]] for name in reader}, out


@torch.no_grad()
def final_thresholds(
    calib: CalibrationState, scales: Mapping[str, Tensor], allocation: Mapping[str, float], advance: Callable[[], None]
) -> dict[str, tuple[float, float]]:
    """Per projection (threshold, fraction of the scores below it), in order of execution. Before a projection
    everything else is sparse as decided, so its inputs are those it will meet. A threshold from the dense model's
    inputs drops up to a point more than asked for, since sparse inputs are smaller."""
    flow, masked, processes = calib.flow, calib.masked, calib.processes
    for name, scale in scales.items():
        masked.set_scale(name, scale)
    result: dict[str, tuple[float, float]] = {}

    def decide(name: str, x: Rows, first: bool) -> None:
        """From the inputs of the counted tokens; ``first``: they are the normalised embeddings."""
        result[name] = (0.0, 0.0)
        if allocation[name] > 0.0:
            found = Scores(x, scales[name], processes)
            gaps = Gaps(found, allocation[name])
            if first:
                _add_vocabulary(gaps, calib, name, scales[name])
            threshold = gaps.threshold()
            result[name] = (threshold, gaps.dropped(threshold) / found.total)

    hidden = flow.start()
    with masked.masking({}):
        for index, names in enumerate(calib.groups):
            if flow.num_batches == 1 and processes.world_size == 1:
                # In the one pass: a projection's threshold is decided when it is reached, and its mask put on.
                counted = flow.counted[0]
                embedded: list[Tensor] = []

                def reached(name: str, x: Tensor, counted: Tensor = counted, embedded: list[Tensor] = embedded) -> None:
                    if not result:
                        embedded.append(x)
                    rows = Rows.counted(masked.projections[name], x, counted)
                    decide(name, rows, any(x is one for one in embedded))
                    masked.set_threshold(name, result[name][0])

                with masked.during(dense_tokens=~counted, observer=reached):
                    hidden[0] = flow.block(index, 0, hidden[0])
                advance()
                continue
            pending = list(names)
            while pending:
                # Those that read the same tensor as the first see inputs that no other pending one can change.
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
    """Add what a first projection of block 0 reads at every token of the vocabulary: its embedding, normalised. Neither
    position nor context has come in yet. Several processes have a share each."""
    flow = calib.flow
    num_tokens = flow.model.get_input_embeddings().weight.shape[0]
    rows, length = calib.batch_shape
    ids = torch.arange(-(-num_tokens // length) * length).remainder(num_tokens).view(-1, length)
    for some in list(ids.split(rows))[calib.processes.rank :: calib.processes.world_size]:
        part = BlockFlow(flow.model, flow.config, some, torch.ones_like(some, dtype=torch.bool), rows)
        x = block_inputs(part, calib.masked, 0, part.start(), [name], first=True)[0][name].x
        gaps.add(reference.scores(x, scale.to(x.device)))
