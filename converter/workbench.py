"""What the stages of a search work on: the model under masks, its tokens, and what is known of every projection.

Two views of the same tokens:

    blocks()     block by block over the dense flow: the inputs of the block's projections, its output, its error under
                 given thresholds. One block's statistics are in memory at a time.
    kl(...)      the whole model, sparse from the first token that counts to the last: the objective.

A candidate's thresholds come from one table per projection: the quantiles of its scores on the 0.5% grid, rebuilt when
its channel_scale changes. So a candidate costs a swap of thresholds and a forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .budget import MAX_SPARSITY, STEP
from .documents import CalibrationTokens
from .flow import BlockFlow, Hidden, block_projections
from .masking import MaskedModel
from .processes import ALONE, Processes
from .sensitivity import DenseReference
from .source import SourceModel
from .statistics import Scores, block_inputs, score_quantiles

# Candidates in one pass, and how large the widest tensor of such a pass may be: a GPU takes as long for a few thousand
# tokens as for a few ten thousand, a CPU does not.
_MOST_CANDIDATES = 16
_LARGEST_PASS = {"cuda": 1 << 26, "cpu": 1 << 20}

# The sparsities of the quantile tables: 0, 0.5%, ..., 95%.
_LEVELS: tuple[float, ...] = tuple(round(i * STEP, 4) for i in range(round(MAX_SPARSITY / STEP) + 1))


class Workbench:
    """The masked model and its tables.

    Args:
        source: the dense model.
        tokens: what to measure on.
        num_samples: use the first so many sequences only; None uses all.
        batch_size: sequences per forward pass.
        processes: each takes a share of the micro-batches; quantiles and KL are over all of them.
        masked: use these masks instead of own ones.

    Attributes:
        names, sizes, groups: projections in order of execution, their parameters, and their names by block.
        num_counted: tokens that count, of all processes.
        batch_shape: sequences and tokens of a micro-batch.
        idle: some process has no tokens.
        num_kl_evaluations: whole passes over the tokens that `kl` has made, a part of one counted as that part.
        side_by_side: how many candidates `kls` takes.
    """

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
        rows = processes.rows(len(ids), batch_size)
        self.idle = -(-len(ids) // batch_size) < processes.size
        self.masked = masked or MaskedModel(source.projections)
        self.flow = BlockFlow(source.model, source.config, ids[rows], keep[rows], batch_size)
        self.names = list(source.projections)
        self.sizes = {name: module.weight.numel() for name, module in source.projections.items()}
        self.groups = block_projections(self.names, len(source.blocks))
        self.block_sizes = [sum(self.sizes[name] for name in group) for group in self.groups]
        self.scales: dict[str, Tensor] = {}
        self.num_kl_evaluations = 0.0
        self._tables: dict[str, list[float]] = {}
        self._reference: DenseReference | None = None
        self._wide: list[BlockFlow] = []
        batch_tokens = max((ids.numel() for ids in self.flow.input_ids), default=1)
        widest = max(module.in_features for module in source.projections.values())
        room = _LARGEST_PASS.get(self.flow.device.type, 1) // (batch_tokens * widest)
        self.side_by_side = max(1, min(room, _MOST_CANDIDATES))

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *_: object) -> None:
        self.masked.close()

    # ------------------------------------------------------------------ scales and tables

    def set_scale(self, name: str, scale: Tensor) -> None:
        """Put a channel_scale (K,) on a projection; its table is void until `set_table`."""
        self.masked.set_scale(name, scale)
        self.scales[name] = scale
        self._tables.pop(name, None)

    def part(self, source: SourceModel, tokens: CalibrationTokens, processes: Processes) -> Workbench:
        """A bench for this process's share of the same tokens, with the same masks, scales and tables; else itself."""
        if processes.size == 1:
            return self
        size = self.flow.input_ids[0].shape[0]
        num_samples = sum(ids.shape[0] for ids in self.flow.input_ids)
        share = Workbench(
            source, tokens, num_samples=num_samples, batch_size=size, processes=processes, masked=self.masked
        )
        share.scales, share._tables = self.scales, self._tables
        return share

    def table(self, name: str) -> list[float]:
        return self._tables[name]

    def set_table(self, name: str, table: Sequence[float]) -> None:
        """The score's quantiles at the sparsities of `levels`."""
        self._tables[name] = list(table)

    @property
    def levels(self) -> tuple[float, ...]:
        return _LEVELS

    def thresholds(self, allocation: Mapping[str, float]) -> dict[str, float]:
        """Thresholds of an allocation (projection name -> sparsity), between two entries of a table linearly."""
        result = {}
        for name, sparsity in allocation.items():
            if sparsity <= 0.0:
                result[name] = 0.0
                continue
            table = self._tables[name]
            low = min(int(sparsity / STEP), len(table) - 2)
            part = sparsity / STEP - low
            result[name] = table[low] + part * (table[low + 1] - table[low])
        return result

    # ------------------------------------------------------------------ block by block

    def blocks(self, only: Collection[int] | None = None) -> Iterator[BlockView]:
        """Every block in turn, or those in ``only``, entered by the dense model's hidden states."""
        hidden = self.flow.start()
        for index, names in enumerate(self.groups):
            self.masked.clear()
            if only is not None and index not in only:
                hidden = self._step(index, hidden)
                continue
            inputs, out = block_inputs(self.flow, self.masked, index, hidden, names)
            yield BlockView(self, index, tuple(names), inputs, hidden, out)
            del inputs
            hidden = out

    @torch.no_grad()
    def _step(self, index: int, hidden: Hidden) -> Hidden:
        return self.flow.step(index, hidden)

    # ------------------------------------------------------------------ the whole model

    @property
    def reference(self) -> DenseReference:
        """The dense model's distributions; one dense pass at first use."""
        if self._reference is None:
            reference = DenseReference(self.flow, num_tokens=self.num_counted)
            self.masked.clear()
            with torch.no_grad():
                for batch, hidden in enumerate(self.flow.start()):
                    reference.add(batch, self.flow.finish(0, batch, hidden))
            self._reference = reference
        return self._reference

    @torch.no_grad()
    def kl(
        self,
        allocation: Mapping[str, float],
        *,
        start: int = 0,
        hidden: Hidden | None = None,
        num_batches: int | None = None,
        thresholds: Mapping[str, float] | None = None,
    ) -> float:
        """Token-mean KL(dense || sparse) with the projections of ``allocation`` sparse and all others dense.

        Args:
            thresholds: instead of those that the tables give for the allocation.
            start, hidden: the blocks before ``start`` are dense, and ``hidden`` is what enters it.
            num_batches: measure on the first so many micro-batches only.
        """
        reference = self.reference
        flow, batches = self.flow, range(self.flow.num_batches if num_batches is None else num_batches)
        hidden = flow.start() if hidden is None else hidden
        found = []
        with self.masked.masking(self.thresholds(allocation) if thresholds is None else thresholds):
            for batch in batches:
                with self.masked.sparing(~flow.counted[batch]):
                    kl = reference.kl_sum(batch, flow.finish(start, batch, hidden[batch]))
                found.append((kl, int(flow.counted[batch].sum())))
        self.num_kl_evaluations += 1.0 if num_batches is None else len(batches) / flow.num_batches
        found = self.processes.in_order(found)
        return sum(kl for kl, _ in found) / max(sum(tokens for _, tokens in found), 1)

    @torch.no_grad()
    def kls(self, allocations: Sequence[Mapping[str, float]], *, num_batches: int | None = None) -> list[float]:
        """`kl` of up to `side_by_side` allocations of the same projections, in one pass: each has a part of the rows.

        A pass has the same shape however many there are, so that a candidate's KL does not depend on its neighbours.
        """
        if self.side_by_side == 1:
            return [self.kl(allocation, num_batches=num_batches) for allocation in allocations]
        reference = self.reference
        filled = [*allocations, *[allocations[0]] * (self.side_by_side - len(allocations))]
        thresholds = [self.thresholds(allocation) for allocation in filled]
        totals, tokens = [0.0] * len(allocations), 0
        for batch in range(self.flow.num_batches if num_batches is None else num_batches):
            wide, rows = self._widened(batch), len(self.flow.input_ids[batch])
            one_each = {
                name: torch.tensor([found[name] for found in thresholds], device=wide.device).repeat_interleave(rows)
                for name in allocations[0]
            }
            with self.masked.masking(one_each), self.masked.sparing(~wide.counted[0]):
                final = wide.finish(0, 0, wide.start()[0])
            for i in range(len(allocations)):
                totals[i] += reference.kl_sum(batch, final[i * rows : (i + 1) * rows])
            tokens += int(self.flow.counted[batch].sum())
        share = 1.0 if num_batches is None else num_batches / self.flow.num_batches
        self.num_kl_evaluations += len(allocations) * share
        return [total / max(tokens, 1) for total in totals]

    def _widened(self, batch: int) -> BlockFlow:
        """The flow of one micro-batch, `side_by_side` times."""
        while len(self._wide) <= batch:
            index, times = len(self._wide), self.side_by_side
            ids, keep = self.flow.input_ids[index].repeat(times, 1), self.flow.counted[index].repeat(times, 1)
            self._wide.append(BlockFlow(self.flow.model, self.flow.config, ids, keep, len(ids)))
        return self._wide[batch]


@dataclass
class BlockView:
    """One block between its dense input and its dense output.

    Attributes:
        inputs: per projection what enters it, (T, K), counted tokens only.
        hidden, out: the block's input and output by micro-batch, (B, L, hidden_size).
    """

    bench: Workbench
    index: int
    names: tuple[str, ...]
    inputs: dict[str, Tensor]
    hidden: Hidden
    out: Hidden

    def scores(self, name: str, scale: Tensor) -> Scores:
        """|x| * scale of the projection's inputs."""
        return Scores(self.inputs[name], scale, self.bench.processes)

    def threshold(self, name: str, scale: Tensor, sparsity: float) -> float:
        """The exact quantile."""
        return score_quantiles(self.scores(name, scale), [sparsity])[0]

    def build_tables(self) -> None:
        """The quantile tables of the block's projections, for the scales they have now."""
        for name in self.names:
            self.bench.set_table(name, score_quantiles(self.scores(name, self.bench.scales[name]), _LEVELS))

    @torch.no_grad()
    def error(self, thresholds: Mapping[str, float]) -> float:
        """Mean squared error of the block's output over the counted tokens, with ``thresholds`` on."""
        masked, flow = self.bench.masked, self.bench.flow
        total = 0.0
        with masked.masking(thresholds):
            for batch, hidden in enumerate(self.hidden):
                counted = flow.counted[batch]
                with masked.sparing(~counted):
                    difference = flow.block(self.index, batch, hidden) - self.out[batch]
                total += float(difference[counted.to(difference.device)].float().square().sum(dtype=torch.float64))
        return total / (flow.num_counted * self.out[0].shape[-1])
