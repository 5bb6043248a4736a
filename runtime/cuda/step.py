"""One decode step for up to 16 slots as a CUDA graph: 5 launches a block, the logits, the choice of the next token.

    embed -> [qkv -> attention -> o -> gate, up -> down] x blocks -> logits -> next

In a recurrent block a gated DeltaNet's step stands where others have attention.
Where outputs are normalised or multiplied before they are added, or the sum is, each of o and down has a launch more
that does it.

Everything the step reads and writes is allocated here, once; the token ids and positions live on the device, so a
replay needs nothing from the host. Launches overlap the tail of the one before (programmatic dependent launch) on GPUs
that can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.backend import triton_compiling
from wisparse.kernels.gpu.attention import launch_attention
from wisparse.kernels.gpu.delta_net import DeltaInput, DeltaMemory, DeltaTensors, launch_delta_net
from wisparse.kernels.gpu.gemv import GemvTile, Group, Scratch, launch_gemv, launch_kind
from wisparse.kernels.gpu.head import HEAD_ROWS, HEAD_ROWS_BATCHED, launch_embed, launch_logits, launch_next
from wisparse.kernels.gpu.norms import launch_add
from wisparse.kernels.gpu.sample import SAMPLED_DTYPES, SampleState, launch_sample
from wisparse.kernels.gpu.tiles import choose_tile
from wisparse.kernels.reference import activation_dtype, rows_together, wide_dtype

from ..decoding.cache import KVCache
from ..decoding.rotary import Rotary, query_scales
from ..decoding.sampling import SamplingParams
from ..torch.delta_net import DeltaWeights
from .graph import capture
from .weights import BlockWeights, CudaNorm, CudaWeights

MAX_ROWS = 16
# Stretches one row's context is split into, up to how many positions: with 8 KV heads 16 make about one program for
# each of an H200's multiprocessors. A short context needs fewer, and o_proj then has less to combine.
KV_SPLITS = {256: 4, 512: 8, 2**31: 16}


def describe(device: torch.device) -> tuple[int, int]:
    """Compute capability (90 for 9.0) and multiprocessors; the interpreter's CPU counts as one small Ampere."""
    if device.type != "cuda":
        return 80, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def kv_splits_for(context: int, rows: int = 1) -> int:
    """Stretches for contexts up to ``context`` positions, a power of two. Several rows make about as many programs as
    one does, in a short context twice as many: each waits for less."""
    splits = next(splits for longest, splits in KV_SPLITS.items() if context <= longest)
    if rows > 1:
        splits = max(1, min(2 * splits, max(KV_SPLITS.values())) // rows)
    return 1 << (splits.bit_length() - 1)


def qk_norm_kind(config: ModelConfig) -> str:
    """Of queries and keys, one of ``QK_NORMS``."""
    norm = config.architecture.qk_norm
    if norm is None or norm.per_head:
        return "turned head" if norm and norm.after_rotary else "head"
    return "whole"


def contexts_between(first: int, last: int) -> list[int]:
    """Contexts from ``first`` to ``last`` positions, one for each number of stretches that they are split into."""
    found = []
    for longest in KV_SPLITS:
        if first <= longest:
            found.append(min(longest, last))
            if last <= longest:
                break
    return found


@dataclass(frozen=True)
class Places:
    """What attention needs to know of every position.

    Attributes:
        rotaries: cosines and sines (max_seq_len, rotary_dim / 2) of the model's rotary embeddings.
        query_scales: (max_seq_len,) what queries are multiplied by; None for 1. All of the activations' type.
    """

    rotaries: Sequence[tuple[Tensor, Tensor]]
    query_scales: Tensor | None

    @classmethod
    def of(
        cls, config: ModelConfig, rotaries: Sequence[Rotary], max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> Places:
        """Of the positions up to ``max_seq_len``."""
        scales = query_scales(config, 0, max_seq_len, device)
        tables = [rotary.step_tables(max_seq_len) for rotary in rotaries]
        return cls(tables, None if scales is None else scales.to(dtype))

    def rotary(self, index: int | None) -> tuple[Tensor, Tensor]:
        """A block's cosines and sines; of no dimensions where nothing is turned."""
        if index is None:
            cos, sin = self.rotaries[0]
            return cos[:, :0], sin[:, :0]
        return self.rotaries[index]


class DecodeStep:
    """The step of slots ``first`` to ``first + rows - 1``.

    Attributes:
        logits: (rows, V) float32, the head's products: before a model's multiplier and cap (``finish_logits``).
    """

    def __init__(
        self,
        weights: CudaWeights,
        config: ModelConfig,
        cache: KVCache,
        positions: torch.Tensor,
        places: Places,
        *,
        first: int,
        rows: int,
        tiles: dict[str, GemvTile] | None = None,
        pdl: bool | None = None,
        kv_splits: int = max(KV_SPLITS.values()),
    ) -> None:
        """``tiles`` (by role: qkv, o, gate_up, down) and ``pdl`` override what would be chosen, for measurements."""
        self.weights, self.config, self.rows = weights, config, rows
        device, dtype = weights.embedding.device, weights.embedding.dtype
        wide, activations = wide_dtype(dtype), activation_dtype(dtype)
        together = rows_together(rows, dtype)
        arch, multiprocessors = describe(device)
        self.pdl = arch >= 90 if pdl is None else pdl
        self._places = places
        own = slice(first, first + rows)
        self._cached = {index: (keys[own], values[own]) for index, (keys, values) in cache.attention.items()}
        self._states = {
            index: DeltaMemory(
                states.inputs[:, own], states.state[:, own], states.inputs.stride(0), states.state.stride(0),
            )
            for index, states in cache.recurrent.items()
        }  # fmt: skip
        self.positions = positions[own]

        def tile(role: str, group: Group, kind: str) -> GemvTile:
            if tiles is not None and role in tiles and group.widths == getattr(weights.blocks[0], role).widths:
                return tiles[role]
            matrix = group.matrix
            return choose_tile(
                arch, multiprocessors, group.in_features, group.widths, kind, together, dtype, matrix.kind, matrix.group
            )

        roles = ("qkv", "o", "gate_up", "down")
        # Block by block: one of a role may be dense and another sparse, or wider, and their tiles differ.
        chosen: dict[tuple[str, str, tuple[int, ...]], GemvTile] = {}
        self.tiles: list[dict[str, GemvTile]] = []
        self._scratch = Scratch(device, dtype)
        for block in weights.blocks:
            of_block = {}
            for role, group in zip(roles, block.groups, strict=True):
                key = (role, launch_kind(together, dense=group.dense), (group.in_features, *group.widths))
                if key not in chosen:
                    chosen[key] = tile(role, group, key[1])
                    self._scratch.reserve(group, chosen[key], rows)
                of_block[role] = chosen[key]
            self.tiles.append(of_block)

        norms = config.architecture.norms
        multiplied = config.residual_multiplier != 1.0
        scaled = config.architecture.block_scalar is not None
        # Products whose outputs go through a launch of their own before they are part of the residual stream.
        self._added = {
            "o": multiplied or norms.attention_output is not None,
            "down": multiplied or scaled or norms.mlp_output is not None,
        }
        self._embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=activations))
        # Beside the choice of the token: embedding, logits, and one for each way to attend, to multiply and to add.
        self._kernels = 2 + len(set(config.blocks)) + len(chosen) + any(self._added.values())

        def empty(*shape: int, kind: torch.dtype = activations) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        hidden = config.hidden_size
        # Apart by a multiple of 16 bytes, so that one compiled kernel serves both.
        self._ids = torch.full((2, MAX_ROWS), -1, dtype=torch.int64, device=device)[:, :rows]
        self._turn = 0
        self.hidden = empty(rows, hidden)
        self._half = empty(rows, hidden)
        # Sums of squares: down and the embedding feed the next block's first norm, o feeds the second.
        parts = max(t.parts(hidden) for t in chosen.values())
        self._ssq = empty(2, rows * parts, kind=wide)
        self._qkv = empty(rows * max(block.qkv.out_features for block in weights.blocks))
        self._recalled = empty(rows, config.delta_net.value_size if config.delta_net is not None else 0)
        stretches = (rows, config.num_heads, kv_splits)
        of_width = {width: empty(*stretches, width, kind=wide) for width in {b.head_dim for b in config.blocks}}
        self._attended = [of_width[block.head_dim] for block in config.blocks]
        self._softmax = (empty(*stretches, kind=wide), empty(*stretches, kind=wide))
        # Measured on an H200: more of a long context on its way at a time, where there is room for it.
        long = arch == 90 and dtype != torch.float32 and kv_splits * rows > min(KV_SPLITS.values())
        self._attention_stages = [5 if long and block.head_dim <= 128 else 3 for block in config.blocks]
        self._activated = empty(rows, config.intermediate_size)
        self.logits = empty(rows, config.vocab_size, kind=torch.float32)
        head_tiles = triton.cdiv(config.vocab_size, HEAD_ROWS if together == 1 else HEAD_ROWS_BATCHED)
        self._best = empty(rows, head_tiles, kind=torch.float32)
        self._best_id = empty(rows, head_tiles, kind=torch.int32)
        sampled = dtype in SAMPLED_DTYPES
        self._sampling = SampleState.empty(rows, config.vocab_size, device) if sampled else None
        self._settings: list[SamplingParams] = []
        self._kept: _Kept | None = None  # while channels are counted
        self._replays: dict[tuple[bool, bool], list[Callable[[], None]]] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """A block's launches, in order: the roles that :meth:`launch_part` knows."""
        after = {role: (role, f"{role} add") if added else (role,) for role, added in self._added.items()}
        return ("qkv", "attention", *after["o"], "gate_up", *after["down"])

    @property
    def tokens(self) -> torch.Tensor:
        """(rows,) int64: what the next step reads, then what it has chosen; negative rows are idle.

        Two buffers take turns, so that a choice can be copied while the step after it runs."""
        return self._ids[self._turn]

    def replay(self, settings: Sequence[SamplingParams] = (), *, count: bool = False) -> None:
        """Run the step on ``tokens``; asynchronous. What was chosen before stays where it is until the next call.

        Args:
            settings: how the first rows' tokens are chosen; the other rows are greedy. Seeds resolved, and all greedy
                unless the weights' dtype is one of ``SAMPLED_DTYPES``.
            count: add the channels that the rows keep to :meth:`kept`.
        """
        sampled = any(not setting.greedy for setting in settings)
        if sampled:
            self._set(list(settings))
        turn = self._turn
        self.prepare(sampled=sampled, count=count)
        if self._kept is not None:
            self._kept.begin(turn, count=count)
        self._replays[sampled, count][turn]()
        self._turn = 1 - turn

    def prepare(self, *, sampled: bool = False, count: bool = False) -> None:
        """Compile and capture what :meth:`replay` runs, if it has not been done."""
        if (sampled, count) in self._replays:
            return
        if count and self._kept is None:
            self._kept = _Kept(self)
        wanted, turn = self._ids.clone(), self._turn
        counted = None if self._kept is None else self._kept.cells.clone()
        self._ids.fill_(-1)  # idle rows: the run before the capture writes no cache and moves no position
        with triton_compiling(self._kernels + (3 if sampled else 1)):
            self._replays[sampled, count] = [
                capture(partial(self._launch_turn, other, sampled, count), self._ids.device) for other in (0, 1)
            ]
        self._ids.copy_(wanted)
        self._turn = turn
        if self._kept is not None and counted is not None:
            self._kept.cells.copy_(counted)

    def kept(self, *, but_last: bool = False) -> int:
        """Weights whose channels were kept since :meth:`count_from_zero`, of the groups that are not dense, over all
        counted rows and steps; ``but_last``: without those of the last step, as it was only started ahead."""
        return 0 if self._kept is None else self._kept.weights(but_last=but_last)

    def forget_last(self) -> None:
        """Take back what the last step counted."""
        if self._kept is not None:
            self._kept.forget_last()

    def count_from_zero(self) -> None:
        """Forget what was counted."""
        if self._kept is not None:
            self._kept.cells.zero_()

    def _set(self, settings: list[SamplingParams]) -> None:
        """Put settings where the kernels read them; nothing to do while they stay the same."""
        if self._sampling is None:
            raise ValueError(f"expected greedy settings for {self.weights.embedding.dtype} logits, found {settings}")
        if settings == self._settings:
            return
        padded = settings + [SamplingParams()] * (self.rows - len(settings))
        numbers = [(s.temperature, s.top_k, s.top_p, s.min_p) for s in padded]
        self._sampling.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        self._sampling.seeds.copy_(torch.tensor([s.seed or 0 for s in padded]))
        self._settings = settings

    def _launch_turn(self, turn: int, sampled: bool, count: bool) -> None:
        self._turn = turn
        self.launch(sampled=sampled, count=count)

    def launch(self, *, sampled: bool = False, count: bool = False) -> None:
        """The step's launches, one after the other, on the current stream."""
        launch_embed(
            self.tokens, self.weights.embedding, self.hidden, self._sums(-1, "down"),
            multiplier=self._embedding_multiplier,
        )  # fmt: skip
        for index in range(len(self.weights.blocks)):
            for role in self.parts:
                self.launch_part(index, role, count=count)
        self.launch_part(len(self.weights.blocks), "logits")
        self.launch_part(len(self.weights.blocks), "sample" if sampled else "next")
        self._turn = 1 - self._turn

    def _sums(self, index: int, role: str) -> torch.Tensor:
        """(rows, parts): sums of squares that ``role`` of block ``index`` leaves; block -1 is the embedding."""
        parts = 1 if self._added[role] else self.tiles[max(index, 0)][role].parts(self.config.hidden_size)
        return self._ssq[0 if role == "down" else 1, : self.rows * parts].view(self.rows, parts)

    def launch_part(self, index: int, role: str, *, count: bool = False) -> None:
        """One launch of block ``index`` (or the logits), as the step does it; also for per-kernel timings."""
        config, weights = self.config, self.weights
        eps, batch, pdl = config.rms_norm_eps, self.rows, self.pdl
        if role == "logits":
            launch_logits(
                self.hidden, self._sums(index - 1, "down"), weights.norm.factors, weights.head, self.logits,
                self._best, self._best_id, eps=eps, scales=weights.head_scales, pdl=pdl,
            )  # fmt: skip
            return
        if role == "next":
            chosen = self._ids[1 - self._turn]
            launch_next(self._best, self._best_id, self.tokens, chosen, self.positions, pdl=pdl)
            return
        if role == "sample" and self._sampling is not None:
            chosen = self._ids[1 - self._turn]
            launch_sample(
                self.logits, self._best, self._best_id, self.tokens, chosen, self.positions, self._sampling,
                self.weights.embedding.dtype, multiplier=config.logits_multiplier, cap=config.logits_softcap, pdl=pdl,
            )  # fmt: skip
            return
        block, tiles = weights.blocks[index], self.tiles[index]
        kept = self._kept.of(index, role, self._turn) if count and self._kept is not None else None
        if role == "qkv":
            launch_gemv(
                block.qkv, self.hidden, self._columns(block), self._scratch, tiles["qkv"], batch=batch, pdl=pdl,
                kept=kept,
                **self._read(block.attention_input, self._sums(index - 1, "down")),
            )  # fmt: skip
        elif role == "attention" and block.delta is not None:
            norm, sums = block.attention_input, self._sums(index - 1, "down")
            launch_delta_net(
                DeltaInput(self._columns(block), self.hidden, sums if norm else None, norm.factors if norm else None),
                _delta_tensors(block.delta), self._states[index], self.tokens, self.positions, self._recalled,
                key_heads=block.delta.config.key_heads, eps=eps, pdl=pdl,
            )  # fmt: skip
        elif role == "attention":
            facts = block.facts
            keys, values = self._cached[index]
            launch_attention(
                self._columns(block), keys, values, self.tokens, self.positions,
                *self._places.rotary(facts.rotary),
                self._attended[index], self._softmax, heads=config.num_heads, scale=config.attention_scale,
                cap=config.attention_softcap, window=facts.window, interleaved=config.rotaries[0].interleaved,
                query_scales=self._places.query_scales, qk_norm=block.qk_norm, norm_of=qk_norm_kind(config),
                gated=config.architecture.attention_gate, shared=facts.shared_values,
                value_norm=config.architecture.value_norm, eps=eps, stages=self._attention_stages[index], pdl=pdl,
            )  # fmt: skip
        elif role == "o" and block.delta is not None:
            launch_gemv(
                block.o, self._recalled, batch=batch, scratch=self._scratch, tile=tiles["o"], pdl=pdl, kept=kept,
                **self._write(index, "o"),
            )  # fmt: skip
        elif role == "o":
            launch_gemv(
                block.o, self._attended[index], batch=batch, scratch=self._scratch, tile=tiles["o"], pdl=pdl, kept=kept,
                source="attention", softmax=self._softmax, head_dim=block.facts.head_dim, **self._write(index, "o"),
            )  # fmt: skip
        elif role == "gate_up":
            launch_gemv(
                block.gate_up, self.hidden, self._activated, self._scratch, tiles["gate_up"], batch=batch, pdl=pdl,
                target=config.activation, kept=kept, **self._read(block.mlp_input, self._sums(index, "o")),
            )  # fmt: skip
        elif role == "down":
            launch_gemv(
                block.down, self._activated, batch=batch, scratch=self._scratch, tile=tiles["down"], pdl=pdl,
                kept=kept, **self._write(index, "down"),
            )  # fmt: skip
        elif role in ("o add", "down add"):
            norm = block.attention_output if role == "o add" else block.mlp_output
            scalar = block.scalar if role == "down add" else None
            launch_add(
                self._half, self.hidden, self._sums(index, role.removesuffix(" add")),
                norm=None if norm is None else norm.factors, scalar=scalar, eps=eps,
                multiplier=config.residual_multiplier, pdl=pdl,
            )  # fmt: skip
        else:
            raise ValueError(f"unknown part {role!r}")

    def _columns(self, block: BlockWeights) -> Tensor:
        """(rows, N): the outputs of a block's first products."""
        width = block.qkv.out_features
        return self._qkv[: self.rows * width].view(self.rows, width)

    def _read(self, norm: CudaNorm | None, sums: Tensor) -> dict[str, Any]:
        """How a product reads the residual stream: normalised or, without a norm, as it is."""
        if norm is None:
            return {"source": "plain"}
        return {"source": "hidden", "norm": norm.factors, "eps": norm.eps, "ssq_in": sums}

    def _write(self, index: int, role: str) -> dict[str, Any]:
        """Where the output of o or down goes: into the residual stream or, to be added later, beside it."""
        if self._added[role]:
            return {"out": self._half, "target": "plain"}
        return {"out": self.hidden, "target": "residual", "ssq_out": self._sums(index, role)}


def _delta_tensors(weights: DeltaWeights) -> DeltaTensors:
    return DeltaTensors(weights.a, weights.b, weights.kernel, weights.log_rate, weights.dt_bias, weights.norm)


class _Kept:
    """Kept channels of a step's rows, counted by its launches (``launch_gemv``).

    Each launch has cells of its own, one for each program that counts, so nothing is added up while the step runs. Two
    sets take turns, as the token ids do: a step reads the sums of the one before it and writes its own. So a step that
    was started ahead and is not wanted is simply not looked at. Steps between may count nothing.

    Attributes:
        cells: (2, cells) int64.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._ids = step._ids
        launches = step.rows // rows_together(step.rows, step.weights.embedding.dtype)
        self._shapes: dict[tuple[int, str], tuple[int, tuple[int, int, int]]] = {}
        widths: list[Tensor] = []
        size = 0
        for index, (block, tiles) in enumerate(zip(step.weights.blocks, step.tiles, strict=True)):
            for role in ("qkv", "o", "gate_up", "down"):
                group: Group = getattr(block, role)
                if group.dense:
                    continue
                shape = (launches, len(group.widths), tiles[role].splits)
                self._shapes[index, role] = size, shape
                widths.append(torch.tensor(group.widths)[None, :, None].expand(shape).flatten())
                size += widths[-1].numel()
        device = step.weights.embedding.device
        self._widths = torch.cat(widths) if widths else torch.zeros(0, dtype=torch.int64)
        self.cells = torch.zeros(2, size, dtype=torch.int64, device=device)
        self._newest = 0  # the set that holds what all steps counted
        self._last_counted = False

    def begin(self, turn: int, *, count: bool) -> None:
        """A step of this turn runs now, which counts or does not."""
        self._last_counted = count
        if count:
            if self._newest == turn:
                self.cells[1 - turn].copy_(self.cells[turn])
            self._newest = turn

    def forget_last(self) -> None:
        """What the last step counted, if it did, is not looked at."""
        if self._last_counted:
            self._newest, self._last_counted = 1 - self._newest, False

    def of(self, index: int, role: str, turn: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What ``launch_gemv`` takes to count; None for a dense group."""
        if (index, role) not in self._shapes:
            return None
        first, shape = self._shapes[index, role]
        before, after = (self.cells[which, first : first + math.prod(shape)].view(shape) for which in (1 - turn, turn))
        return self._ids[turn], before, after

    def weights(self, *, but_last: bool) -> int:
        """Sum of what was counted, each channel times the outputs it goes to."""
        which = 1 - self._newest if but_last and self._last_counted else self._newest
        return int((self.cells[which].cpu() * self._widths).sum())
