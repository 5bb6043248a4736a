"""A decode step of up to 16 rows, captured as a CUDA graph, with five launches a block:

    embed -> [qkv -> attention -> o -> gate, up -> down] x blocks -> logits -> next token (argmax or sample)

Experts: a router launch precedes gate and up, which are those of each row's chosen experts; a dense MLP beside the
experts follows, and a launch adds both. Recurrent blocks: Gated DeltaNet, a short convolution or Mamba-2 (two launches) in
place of attention. Models that normalize or scale an output or the sum: a residual-add launch after o and after down.

All tensors of the step are allocated once. Token ids, positions and cache slots are on the device, so that a graph
serves any slots and the next step can be launched without waiting for the host to read the tokens. From compute
capability 9.0 on launches overlap by programmatic dependent launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.backend import triton_compiling
from wisparse.kernels.gpu.attention import Rows
from wisparse.kernels.gpu.common import Input, KVSplits, Output, Routing
from wisparse.kernels.gpu.count import launch_count
from wisparse.kernels.gpu.delta_net import DeltaInput, DeltaMemory, DeltaTensors, launch_delta_net
from wisparse.kernels.gpu.experts import launch_router
from wisparse.kernels.gpu.head import Logits, launch_argmax, launch_embed, launch_logits
from wisparse.kernels.gpu.kv_cache import kv_slots
from wisparse.kernels.gpu.launch import Scratch, launch_linear
from wisparse.kernels.gpu.mamba2 import MambaTensors, launch_mamba2
from wisparse.kernels.gpu.products import Product, choose_product
from wisparse.kernels.gpu.sample import SAMPLED_DTYPES, Choice, SampleState, launch_sample
from wisparse.kernels.gpu.tiles import Tile, gpu_of

from ..decoding.cache import KVCache
from ..decoding.heads import DraftHead
from ..decoding.sampling import SamplingParams
from ..torch.block import Block
from .blocks import AttentionParts, BlockLauncher, added_by_linears, router_of
from .weights import AnyLinear, CudaWeights

MAX_ROWS = 16
# Longest context -> KV splits of one row. 16 splits of 8 KV heads are about one program for each multiprocessor of an
# H200; fewer splits of a short context are cheaper to combine in o.
KV_SPLITS = {256: 4, 512: 8, 2**31: 16}


def kv_splits_for(context: int, rows: int = 1) -> int:
    """A power of two, such that ``rows`` rows have about as many programs as one row, or twice as many in a short
    context."""
    splits = next(splits for longest, splits in KV_SPLITS.items() if context <= longest)
    if rows > 1:
        splits = max(1, min(2 * splits, max(KV_SPLITS.values())) // rows)
    return 1 << (splits.bit_length() - 1)


def contexts_between(first: int, last: int) -> list[int]:
    """One context length from ``first`` to ``last`` for each number of KV splits."""
    return sorted({min(longest, last) for longest in KV_SPLITS if first <= longest})


def capture(launch: Callable[[], object], device: torch.device, pool: Any = None) -> Callable[[], object]:
    """A function that replays the launches of ``launch`` as a CUDA graph, asynchronously. ``launch`` runs once before
    the capture, which compiles its kernels. The caller keeps alive the tensors that ``launch`` uses but does not
    create. ``pool``: memory pool shared by graphs of which one runs at a time."""
    if device.type != "cuda":
        return launch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launch()
    return graph.replay


GATE_UP = ("gate_up", "shared_gate_up")


def _num_sums(chosen: Product | None) -> int:
    """Partial sums of squares of a row that a linear's launch, or the addition after it, writes."""
    adds = chosen is not None and chosen.problem is not None and chosen.problem.output == "residual"
    return chosen.ssq_parts if chosen is not None and adds else 1


class DecodeStep(BlockLauncher):
    """A step of ``rows`` rows, each of any slot."""

    def __init__(
        self, weights: CudaWeights, config: ModelConfig, cache: KVCache, parts: Sequence[AttentionParts], counted: Tensor,
        *, rows: int, tiles: dict[str, Tile] | None = None, kv_splits: int = max(KV_SPLITS.values()),
        verifies: bool = False, head: DraftHead | None = None,
    ) -> None:  # fmt: skip
        """``counted``: (2,) int64, the weights that the rows of counting steps read, and the number of these rows.
        ``tiles``: by role (qkv, o, gate_up, down), in place of the chosen ones, for measurements.
        ``verifies``: rows may be consecutive positions of one slot. ``head``: receives the hidden states that it
        reads."""
        self.weights, self.config, self.rows, self._parts = weights, config, rows, parts
        self._counted, self._verifies, self._head = counted, verifies, head
        device, dtype = weights.embedding.device, weights.embedding.dtype
        gpu = gpu_of(device)
        self.pdl = gpu.arch >= 90
        self._cache = {i: kv_slots(*stored) for i, stored in cache.attention.items()}
        self._kept = {i: states.inputs for i, states in cache.recurrent.items()}
        self._states = {
            i: DeltaMemory(s.inputs, s.state, s.inputs.stride(0), s.state.stride(0)) for i, s in cache.recurrent.items()
        }
        # Rows padded to 16 bytes: Triton specializes kernels on the alignment of pointers.
        padded = -(-rows // 4) * 4
        self._positions_slots = torch.zeros(2, padded, dtype=torch.int32, device=device)[:, :rows]
        self.positions, self.slots = self._positions_slots  # (rows,): of each row's input token; its cache slot
        self._embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=dtype))
        self._scratch, self._kv_splits = Scratch(device, dtype), kv_splits
        self.plans: list[dict[str, Product]] = []
        for block in weights.blocks:
            self.plans.append(self._plan(block, kv_splits, tiles or {}))

        def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        self._ids = torch.full((2, padded), -1, dtype=torch.int64, device=device)[:, :rows]
        self._buffer = 0  # of ``_ids``
        self.hidden = empty(rows, config.hidden_size)
        # Partial sums of squares: of down and the embedding for the first norm of a block, of o for the second.
        sums_of = max((one.ssq_parts for plans in self.plans for one in plans.values()), default=1)
        self._ssq = empty(2, rows * sums_of, kind=torch.float32)
        # Measured on an H200: five stages are faster for long contexts.
        long = gpu.arch == 90 and dtype != torch.float32 and kv_splits * rows > min(KV_SPLITS.values())
        self._stages = [5 if long and block.head_dim <= 128 else 3 for block in config.blocks]
        self._buffers: dict[str, Tensor] = {}  # of ``_memory``
        self._routing: Routing | None = None  # of the last router
        self._logits = Logits.empty(rows, weights.head)
        self._sampling = SampleState.empty(rows, config.vocab_size, device) if dtype in SAMPLED_DTYPES else None
        self._settings: list[SamplingParams] = []
        self._of_row = torch.tensor([weights.dense_weights, 1], device=device)  # of each row of a counting step
        self._replays: dict[tuple[bool, bool], list[Callable[[], object]]] = {}

    def _plan(self, block: Block[AnyLinear], kv_splits: int, tiles: dict[str, Tile]) -> dict[str, Product]:
        """How the block's linears are computed."""
        activation, added, chosen = self.config.activation, added_by_linears(block.ops), dict[str, Product]()

        def choose(role: str, output: str, ssq_parts: int = 1, **attention: Any) -> None:
            ends: dict[str, Any] = {"output": output, "ssq_parts": ssq_parts} | attention
            if getattr(block, role).shape.experts:
                ends["clamp"] = self.config.clamp
            chosen[role] = self._choose(block, role, "step", tiles, **ends)

        plain = block.spec.recurrent or block.spec.latent
        splits = {} if plain else {"kv_splits": kv_splits, "head_dim": block.spec.head_dim}
        for role in block.roles:
            if role in ("o", "down"):
                choose(role, "residual" if role in added else "plain", **(splits if role == "o" else {}))
            elif role in ("q_b", "shared_down"):
                choose(role, "plain")
        # The first linear reads the partial sums of squares that the previous block's last one writes. The embedding writes as
        # many as block 0's down.
        at, last = self._added_before(len(self.plans))
        sums = _num_sums((chosen if at < 0 else self.plans[at]).get(last))
        if block.spec.mixer is not None:
            choose("qkv", "plain", sums)
            sums = _num_sums(chosen["o"])
        for role in GATE_UP:
            if role in block.roles:
                choose(role, activation, sums)
        return {role: chosen[role] for role in block.roles}

    def _choose(self, block: Block[AnyLinear], role: str, place: str, tiles: dict[str, Tile], **ends: Any) -> Product:
        linear = getattr(block, role)
        first = next(getattr(one, role) for one in self.weights.blocks if role in one.roles)
        tile = tiles.get(role) if linear.widths == first.widths and not linear.shape.experts else None
        product = choose_product(linear.shape, self.rows, place, tile=tile, pdl=self.pdl, **ends)
        self._scratch.reserve(product)
        return product

    def launch(self, *, sampled: bool = False, count: bool = False, indices: Iterable[int] | None = None) -> None:
        """``indices``: of the blocks to launch; None: all."""
        embedding, multiplier = self.weights.embedding, self._embedding_multiplier
        launch_embed(self.tokens, embedding, self.hidden, self._sums(-1, "down"), multiplier=multiplier)
        self._counting = count
        self.launch_blocks(indices)
        self.launch_logits()
        if count:
            self._counted.add_((self.tokens >= 0).sum() * self._of_row)
        config, choice = self.config, Choice(self.tokens, self._ids[1 - self._buffer], self.positions)
        if sampled and self._sampling is not None:
            factors: dict[str, Any] = {"multiplier": config.logits_multiplier, "cap": config.logits_softcap}
            launch_sample(self._logits, choice, self._sampling, embedding.dtype, **factors, pdl=self.pdl)
        else:
            launch_argmax(self._logits, *choice, pdl=self.pdl)
        self._buffer = 1 - self._buffer

    def block_launches(self, index: int) -> dict[str, Callable[[], object]]:
        """One block's launches by name, in order."""
        self._counting, self._launches = False, {}
        try:
            self.launch_block(index)
            return self._launches
        finally:
            self._launches = None

    def _linear(self, index: int, role: str, value: Input) -> Tensor:
        block, chosen = self.weights.blocks[index], self.plans[index][role]
        linear = getattr(block, role)
        routing = self._routing if linear.shape.experts else None
        if chosen.problem is not None and chosen.problem.output == "residual":
            output = Output(self.hidden, self._sums(index, role))
        else:
            rows, width = self.rows, linear.out_features
            if role in GATE_UP:  # after the activation; of experts a row for each pair of a row and a chosen expert
                rows *= linear.chosen if routing is not None else 1
                width = getattr(block, role.replace("gate_up", "down")).in_features
            output = Output(self._memory(role, rows, width))
        self._count(linear, value, routing)
        eps = self.config.rms_norm_eps
        self._launch(role, launch_linear, linear, value, output, self._scratch, chosen, eps=eps, routing=routing)
        return output.out

    def _count(self, linear: AnyLinear, value: Input, routing: Routing | None = None) -> None:
        """Count the weights that a masked linear's input reads."""
        if self._counting and not linear.dense:
            expert, eps = None if routing is None else routing.expert, self.config.rms_norm_eps
            options: dict[str, Any] = {"tokens": self.tokens, "expert": expert, "eps": eps}
            launch_count(linear, value, self._counted, **options, pdl=self._overlaps)

    def _attend(self, index: int, qkv: Tensor) -> Input:
        out = self._splits(self.weights.blocks[index].spec.head_dim)
        return self._attend_rows(index, qkv, out, stored=self._verifies, stages=self._stages[index], pdl=self.pdl)

    def _splits(self, width: int) -> KVSplits:
        splits = self.rows, self.config.num_heads, self._kv_splits
        shapes = {"attended": (*splits, width), "maximum": splits, "total": splits}
        return KVSplits(*(self._memory(name, *shape, dtype=torch.float32) for name, shape in shapes.items()))

    def _delta_net(self, index: int, projected: Tensor, x: Input) -> Tensor:
        delta = self.weights.blocks[index].delta
        assert delta is not None
        if self.normed is not None:  # the kernel norms its input itself
            norm = self._next_norm(index - 1, ())
            x = Input(self.hidden, self._sums(*self._added_before(index)), norm.factors) if norm else Input(self.hidden)
        out = self._memory("recalled", self.rows, delta.config.value_size)
        inputs = DeltaInput(projected, self.hidden, x.ssq, x.norm)
        weights = DeltaTensors(delta.a, delta.b, delta.kernel, delta.log_rate, delta.dt_bias, delta.norm)
        options: dict[str, Any] = {"key_heads": delta.config.key_heads, "eps": self.config.rms_norm_eps}
        options |= {"pdl": self._overlaps, "in_order": self._verifies}
        self._launch("attention", launch_delta_net, inputs, weights, self._states[index], self._inputs, out, **options)
        return out

    def _mamba2(self, index: int, projected: Tensor) -> Tensor:
        mamba, pdl = self.weights.blocks[index].mamba, self._overlaps
        assert mamba is not None
        weights = MambaTensors(*(getattr(mamba, name) for name in MambaTensors._fields))
        gated = self._memory("gated", self.rows, mamba.config.inner, dtype=torch.float32)
        out = self._memory("recalled", *gated.shape)
        arguments = projected, weights, self._states[index], self._inputs, gated, out
        options = {"groups": mamba.config.groups, "eps": mamba.eps, "pdl": pdl, "in_order": self._verifies}
        self._launch("mamba2", launch_mamba2, *arguments, **options)
        return out

    def _route(self, index: int, x: Input) -> Routing:
        block = self.weights.blocks[index]
        if block.router_scale is not None:
            x = Input(self.hidden, self._sums(index, "o"), block.router_scale)
        router, eps = router_of(block), self.config.rms_norm_eps
        logits = self._memory("router", self.rows, len(router.weight), dtype=torch.float32)
        counter = self._memory("router counter", self.rows, dtype=torch.int32)
        expert = self._memory("expert", self.rows, router.total, dtype=torch.int32)
        self._routing = Routing(expert, self._memory("expert weight", *expert.shape, dtype=torch.float32))
        self._launch("router", launch_router, x, router, logits, counter, self._routing, eps=eps, pdl=self.pdl)
        return self._routing

    def _experts(self, index: int, x: Input, routing: Routing) -> Tensor:
        return self._linear(index, "down", Input(self._linear(index, "gate_up", x)))

    def launch_logits(self) -> None:
        weights, ssq = self.weights, self._sums(*self._added_before(len(self.weights.blocks)))
        head = weights.norm.factors, weights.head, weights.head_scales
        launch_logits(self.hidden, ssq, *head, self._logits, eps=self.config.rms_norm_eps, pdl=self.pdl)

    def _memory(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """What launches of this name write, at the same address in each block. It grows in the run before a capture."""
        size, held = math.prod(shape), self._buffers.get(name)
        if held is None or len(held) < size:
            self._buffers[name] = held = torch.zeros(size, dtype=dtype or self.hidden.dtype, device=self.hidden.device)
        return held[:size].view(shape)

    def _sums(self, index: int, role: str) -> Tensor:
        """(rows, parts): partial sums of squares that ``role`` of block ``index`` writes; block -1 is the embedding."""
        role = role.removeprefix("shared_")
        parts = _num_sums(self.plans[max(index, 0)].get(role))
        return self._ssq[0 if role == "down" else 1, : self.rows * parts].view(self.rows, parts)

    @property
    def _inputs(self) -> Rows:  # type: ignore[override]
        return Rows(self.tokens, self.positions, self.slots)

    @property
    def tokens(self) -> Tensor:
        """(rows,) int64: input ids of the next step; after it, the chosen ids; negative for idle rows. Double-buffered,
        so that chosen ids can be copied to the host while the next step runs."""
        return self._ids[self._buffer]

    @property
    def logits(self) -> Tensor:
        """(rows, V) float32, before the model's multiplier and cap (``finish_logits``)."""
        return self._logits.logit

    def set_inputs(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
        """Set the inputs of the first rows; the others become idle."""
        idle = self.rows - len(tokens)
        self.tokens.copy_(torch.tensor([*tokens, *[-1] * idle]), non_blocking=True)
        positions_slots = torch.tensor([[*positions, *[0] * idle], [*slots, *[0] * idle]], dtype=torch.int32)
        self._positions_slots.copy_(positions_slots, non_blocking=True)

    def replay(self, settings: Sequence[SamplingParams] = (), *, count: bool = False) -> None:
        """Run the step on ``tokens``, asynchronously. ``settings``: of the first rows, with seeds; the other rows are
        greedy. ``count``: add what the rows read to ``counted``."""
        sampled = any(not setting.greedy for setting in settings)
        if sampled and list(settings) != self._settings:
            assert self._sampling is not None  # the dtype is one of SAMPLED_DTYPES
            self._settings = list(settings)
            padded = self._settings + [SamplingParams()] * (self.rows - len(settings))
            numbers = [(s.temperature, s.top_k, s.top_p, s.min_p) for s in padded]
            self._sampling.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
            self._sampling.seeds.copy_(torch.tensor([s.seed or 0 for s in padded]))
        buffer = self._buffer
        self.prepare(sampled=sampled, count=count)
        self._replays[sampled, count][buffer]()
        self._buffer = 1 - buffer

    def prepare(self, *, sampled: bool = False, count: bool = False, compile_only: bool = False) -> None:
        """Compile and capture the graphs of :meth:`replay`, unless captured before. ``compile_only``: launch every
        kernel once, within ``compiling_side_by_side``."""
        if (sampled, count) in self._replays:
            return
        saved_ids, buffer = self._ids.clone(), self._buffer
        # Idle rows: the run before the capture writes neither cache nor positions, and counts nothing.
        self._ids.fill_(-1)

        def launch(buffer: int, indices: Iterable[int] | None = None) -> None:
            self._buffer = buffer
            self.launch(sampled=sampled, count=count, indices=indices)

        # Kernels besides argmax or sampling: embedding, logits, attention, linears, residual add.
        linears = {(p.kernel, p.problem, p.launch) for plans in self.plans for p in plans.values() if p.fused}
        separate = any(len(added_by_linears(block.ops)) < 2 for block in self.weights.blocks)
        kernels = 2 + (1 + self._verifies) * len(set(self.config.blocks)) + len(linears) + separate
        if compile_only:
            distinct = {
                (block, *((p.problem, p.launch, p.packed) for p in own.values())): index
                for index, (block, own) in enumerate(zip(self.config.blocks, self.plans, strict=True))
            }
            launch(0, distinct.values())
        else:
            with triton_compiling(kernels + (3 if sampled else 1)):
                self._replays[sampled, count] = [capture(partial(launch, other), self._ids.device) for other in (0, 1)]
        self._ids.copy_(saved_ids)
        self._buffer = buffer
