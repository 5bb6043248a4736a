"""What the compiled functions read: rows of int64 words. A row's class declares its words as fields, through which Python
writes them; compiled code reads a word at its position, a member of the row's enum.

Sizes are in elements. A tensor is the address of its first element, 0 if there is none.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64
MOST_LISTED = 256  # rows of a group in `linear._add_in_integers`: up to 128 channels of a graded weight
# float32 words of each row of PARTIAL after its sums: a list of one group's rows for `linear._add_in_integers`, of
# int64 offsets (16 more, to be prefetched), float32 values and two int8 limbs each; and 32 words of padding.
LIST_WORDS = 2 * (MOST_LISTED + 16) + MOST_LISTED + MOST_LISTED // 2 + 2
PARTIAL_EXTRA = 32 + LIST_WORDS
# dtype names within the names of regions.
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# An integer; a float, rounded to float32; a tensor, an array or a row, of which the address is written; None: 0.
Word = Any


class Row:
    """Base of the rows, whose annotations are the fields. Setting a field writes its word; the row keeps alive what its
    addresses point to."""

    word_order: ClassVar[dict[str, int]]
    words: np.ndarray

    def __init_subclass__(cls) -> None:
        cls.word_order = {name: at for at, name in enumerate(cls.__annotations__)}

    def __init__(self, **values: Word) -> None:
        self.__dict__["words"] = np.zeros(len(self.word_order), np.int64)
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Word) -> None:
        word = value = value.contiguous() if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            word = value.data_ptr()
        elif isinstance(value, (np.ndarray, Row)):
            word = (value.words if isinstance(value, Row) else value).ctypes.data
        elif isinstance(value, float):
            word = np.float32(value).view(np.int32)
        self.words[self.word_order[name]] = word or 0
        self.__dict__[name] = value


def positions(row: type[Row]) -> Any:
    """The enum of a row's fields: their positions, by name in capital letters."""
    return IntEnum(row.__name__.replace("Row", "Field"), {name.upper(): at for name, at in row.word_order.items()})


class StoredAs(IntEnum):
    """The type of a weight, or of the KV cache."""

    BASE = 0  # the activations' dtype at load: float32, bfloat16 or float16
    INT8 = 1  # a scale for each output; of the cache, for each position and head
    INT4 = 2  # two outputs a byte, a scale for each group of channels and output
    E4M3 = 3  # cache only, with scales as INT8


class MlpActivation(IntEnum):
    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    RELU2 = 3  # of an MLP without a gate


class ScaleType(IntEnum):
    """The type of int4 weights' scales."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class ProjectionRow(Row):
    """A projection."""

    weight: Word  # (K, N); int4: (K, ceil(N / 2)) bytes
    n: Word
    k: Word
    scale: Word  # channel_scale (K,) float32; 0: dense
    bias: Word  # (N,) float32
    column_scale: Word  # int8: (N,) float32; int4: (K / GROUP, 2, ceil(N / 2)), even outputs, then odd ones
    stored_as: Word  # StoredAs
    group: Word  # int4: channels that share a scale
    scale_type: Word  # int4: ScaleType
    zero_point: Word  # int4: uint8, in the layout of the scales; 0: all zero points are 8
    planes: Word  # rows of WEIGHT for each channel; 2: graded, int4 in both planes, GROUP counts rows
    stride: Word  # int4: bytes between rows of WEIGHT


class OpCode(IntEnum):
    """The operations of a step. Each thread has all columns of its inputs, unless they are divided: its own columns."""

    NORM = 0  # Y = RMSNorm(X)
    LINEAR = 1  # Y = the projections' outputs of X, concatenated
    GATE_UP = 2  # Y, divided = activation(gate) * up, or RELU2 of one projection, of X
    LINEAR_OF_PARTS = 3  # Y = the projection's output of X, divided
    ATTENTION = 4  # Y, divided = the heads' outputs, of queries, keys and values X
    DELTA_NET = (
        5  # Y, divided = the heads' outputs, of queries, keys, values and gates X, and their projections' input Z
    )
    ROUTER = 6  # the chosen experts, and their weights
    EXPERTS = 7  # Y = the weighted sum of the chosen experts' outputs, of X
    ADD = 8  # Y += a number * X
    SCALE = 9  # Y *= a number
    PER_LAYER = 10  # Y = projection(activation(gate(X)) * the token's per-layer embedding)
    TAP = 11  # stores X for a draft head
    SHORT_CONV = 12  # Y, divided = c * conv(b * x), of b, c and x X
    MAMBA2 = 13  # Y, divided = the heads' outputs, gated and normed, of in_proj's output X, which it changes
    LATENT_ATTENTION = 14  # Y, divided = the heads' outputs, of queries X, and of a row's latent and rotated part in Z


class OpRow(Row):
    """An operation. Values are (rows, width) float32. Those that each thread has a copy of have a step of SCRATCH_BYTES
    between the copies, others of 0."""

    code: Word  # OpCode
    x: Word
    x_step: Word
    y: Word
    y_step: Word
    z: Word
    z_step: Word
    parameters: Word  # (width,) float32 weights of a norm; float32 number; the row of another operation
    first: Word  # row of its first projection
    count: Word  # projections; columns of a norm
    width: Word  # sum of the projections' outputs; columns of a norm's X
    eps: Word  # float32, of a norm


class AttentionRow(Row):
    """Norms have float32 weights (head_dim,), with QK_WHOLE (heads * head_dim,)."""

    q_norm: Word
    k_norm: Word
    value_norm: Word
    window: Word  # 0: attends to all positions
    kv_heads: Word
    head_dim: Word
    keys: Word  # (max_batch, kv_heads, max_len, head_dim), of type CACHED_AS; with shared KV another block's
    values: Word
    key_scales: Word  # (max_batch, kv_heads, max_len) float32 of a quantized cache
    value_scales: Word
    rotary_half: Word  # rotated pairs of a head; 0: no rotary embedding
    cos: Word  # (max_len, rotary_half) float32
    sin: Word
    interleaved: Word  # rotary pairs are (2 i, 2 i + 1), not (i, i + ROTARY_HALF)
    sinks: Word  # (heads,) float32: an additional score of each head's softmax; 0: none
    input_width: Word  # values come last, and are the keys if there is no v_proj
    query_stride: Word  # between heads' queries
    gate_from: Word  # from a head's query to its gate (head_dim,) of the attention's output; 0: none


class LatentRow(Row):
    """Multi-head latent attention, as ``runtime.torch.mixers`` defines it."""

    attention: Word  # AttentionRow, of one KV head
    norm: Word  # (rank,) float32
    kv_b: Word  # (heads, KEY_DIM + VALUE_DIM, rank), the base type
    key_dim: Word
    value_dim: Word
    rotary_dim: Word
    query_width: Word  # columns of X
    latent_from: Word  # the first column of the latent in Z,
    width: Word  # which has so many


class DeltaRow(Row):
    """A gated DeltaNet. Tensors are float32 except INPUTS."""

    key_heads: Word
    value_heads: Word
    key_dim: Word
    value_dim: Word
    taps: Word  # of the convolution
    a: Word  # (value_heads, hidden): decay
    b: Word  # (value_heads, hidden): beta
    kernel: Word  # (taps, mixed_size)
    rate: Word  # (value_heads,)
    dt_bias: Word  # (value_heads,)
    norm: Word  # (value_dim,)
    inputs: Word  # (buffers, slots, taps - 1, mixed_size), the base type: the convolution's last inputs
    states: Word  # (buffers, slots, value_heads, key_dim, value_dim)
    buffers: Word  # the state after p positions is in buffer p % BUFFERS
    slots: Word


class ShortConvRow(Row):
    """A gated short convolution."""

    taps: Word
    kernel: Word  # (taps, hidden) float32
    bias: Word  # (hidden,) float32
    inputs: Word  # (buffers, slots, taps - 1, hidden), the base type: the convolution's last inputs
    buffers: Word  # as of `DeltaRow`
    slots: Word


class MambaRow(Row):
    """A Mamba-2 block. Tensors are float32 except INPUTS."""

    heads: Word
    groups: Word
    head_dim: Word
    state_dim: Word
    taps: Word  # of the convolution
    kernel: Word  # (taps, mixed_size)
    bias: Word  # (mixed_size,), of the convolution
    rate: Word  # (heads,)
    dt_bias: Word  # (heads,)
    skip: Word  # (heads,)
    norm: Word  # (heads * head_dim,)
    inputs: Word  # (buffers, slots, taps - 1, mixed_size), the base type
    states: Word  # (buffers, slots, heads, state_dim, head_dim)
    buffers: Word  # as of `DeltaRow`
    slots: Word


class ExpertsRow(Row):
    """Experts and their router. Projections: all gates (not with RELU2), all ups, all downs, then the shared expert's."""

    count: Word
    chosen: Word  # of a token
    size: Word  # outputs of gate and up
    # float32 numbers: the chosen experts' weights are divided by NORM_ADDED plus their sum or, if that is less, NORM_LEAST,
    # and multiplied by FACTOR.
    renormalised: Word
    norm_least: Word
    norm_added: Word
    factor: Word
    sigmoid: Word  # scores are the logits' sigmoids, not their softmax
    choice_bias: Word  # (COUNT,) float32: added to the scores for the choice
    groups: Word  # of experts, of which GROUPS_KEPT are chosen from; 0: none
    groups_kept: Word
    group_best: Word  # experts of a group that decide, 1 or 2
    router: Word  # (COUNT, hidden) float32
    router_bias: Word  # (COUNT,) float32
    scale: Word  # (COUNT,) float32: multiplies the experts' weights
    shared_size: Word  # of the expert for every token; 0: none
    shared_gate: Word  # (hidden,) float32; 0: its weight is 1


class PerLayerRow(Row):
    """A block's per-layer embeddings; tensors are of the base type."""

    block: Word
    gate: Word  # (PER_LAYER, hidden)
    projection: Word  # (hidden, PER_LAYER)


class DequantizeRow(Row):
    """`linear.dequantize` of some outputs of an int4 weight."""

    projection: Word
    first: Word  # output, even
    last: Word  # exclusive
    target: Word  # (K, LAST - FIRST)


class ProductRow(Row):
    """`product.product` of many rows and one projection; strides in bytes."""

    projection: Word
    x: Word  # (ROWS, X_STRIDE) bfloat16
    x_stride: Word
    rows: Word  # a multiple of half of `product.TILE`
    kept: Word  # rows of Y; the other rows of X are padding
    y: Word  # (KEPT, N) bfloat16
    columns: Word  # of a block, multiples of `product.TILE`
    depth: Word  # channels of a block
    scratch: Word  # (threads, SCRATCH_BYTES)
    scratch_bytes: Word


class TeamField(IntEnum):
    """int64 words of a barrier, each in a cache line of its own, zero before the first use."""

    ARRIVED = 0  # threads waiting at the current barrier
    PASSED = 8  # completed barriers
    WAITED_NS = 16  # time waited beyond what `barrier.barrier` spins for
    SIZE = 24


class StepRow(Row):
    """Parameters of `step.step`."""

    # The batch.
    rows: Word
    slots: Word  # (rows,) int64
    tokens: Word  # (rows,) int64
    positions: Word  # (rows,) int64
    outputs: Word  # (rows,) int64: for each row the row of LOGITS
    # The model.
    hidden: Word
    heads: Word
    max_len: Word
    vocab: Word
    qk_whole: Word  # q and k are normalized over all heads, not head by head
    qk_after: Word  # q and k are normalized after the rotary embedding, not before
    activation: Word  # MlpActivation
    embedding: Word  # (V, hidden), the base type
    head: Word  # (V, hidden), the base type or int8
    head_scale: Word  # (V,) float32 of an int8 head
    final_norm: Word  # (hidden,) float32
    query_scales: Word  # (max_len,) float32: multiplies queries by position
    cached_as: Word  # StoredAs of keys and values
    mapped: Word  # 1: experts are memory-mapped from a file, and madvise precedes their use
    ops: Word  # rows of `OpRow`: the blocks' operations in order
    num_ops: Word
    projections: Word  # rows of `ProjectionRow`, block by block
    num_projections: Word
    thresholds: Word  # (projections, 2) float32, the second for a graded weight's low plane
    # float32 numbers; a cap of 0: none.
    eps: Word
    attention_scale: Word
    attention_cap: Word
    embedding_multiplier: Word
    logits_multiplier: Word
    logits_cap: Word
    clamp_slope: Word  # of the clamped activation
    clamp_limit: Word
    # Buffers shared by all threads.
    logits: Word  # (outputs, V) float32
    scores: Word  # (heads, max_len) float32
    segment_index: Word  # (list_length,) int32
    segment_value: Word  # (rows, list_length) float32
    segment_count: Word  # (threads, 2) int64
    counts: Word  # (threads, projections) int64, to which numbers of kept channels are added
    spare_counts: Word  # (threads,) int64, written instead of COUNTS where nothing is to be counted
    team: Word  # TeamField
    row_numbers: Word  # (rows,) int64: 0, 1, ...
    taps: Word  # (rows, hidden states, hidden) float32: for a draft head
    # Scratch memory of each thread. It begins with the residual stream, (rows, hidden) float32.
    scratch: Word  # (threads, SCRATCH_BYTES)
    scratch_bytes: Word
    list_length: Word  # the largest K * PLANES
    acc_length: Word  # the largest N of an accumulator
    acc_at: Word  # offsets in bytes
    acc_up_at: Word
    index_at: Word
    value_at: Word
    partial_at: Word
    # Experts. A token's slots: its chosen experts, then the shared one.
    expert_scores: Word  # (rows, experts) float32
    expert_keys: Word  # (threads, 3, experts) float32: a token's scores, what the choice is by, and that of groups
    expert_choice: Word  # (threads, rows, slots, 2) int64: expert id, and the bits of its float32 weight
    expert_index: Word  # (slots, EXPERT_LENGTH) int32: down's kept channels of a token, thread by thread
    expert_value: Word  # (slots, EXPERT_LENGTH) float32
    expert_count: Word  # (slots, threads, 2) int64
    expert_slots: Word
    expert_length: Word
    # Per-layer embeddings.
    per_layer: Word  # size of an embedding; 0: none
    num_blocks: Word
    per_layer_projection: Word  # (blocks * PER_LAYER, hidden), the base type
    per_layer_norm: Word  # (PER_LAYER,) float32
    per_layer_inputs: Word  # (rows, blocks * PER_LAYER) float32: token embeddings, then with their projections
    per_layer_projected: Word  # (rows, blocks * PER_LAYER) float32: projections of the input embedding
    per_layer_gated: Word  # (rows, PER_LAYER) float32: of one block


ProjectionField, OpField, AttentionField = positions(ProjectionRow), positions(OpRow), positions(AttentionRow)
LatentField = positions(LatentRow)
DeltaField, ExpertsField, PerLayerField = positions(DeltaRow), positions(ExpertsRow), positions(PerLayerRow)
ShortConvField = positions(ShortConvRow)
MambaField = positions(MambaRow)
DequantizeField, ProductField, StepField = positions(DequantizeRow), positions(ProductRow), positions(StepRow)


def scratch_layout(rows: int, widest: int, list_length: int, acc_length: int) -> tuple[dict[str, int], list[int]]:
    """Fields of `StepRow`: the buffers' byte offsets in a thread's scratch memory; and the offsets of the residual stream
    and of two more values (rows, widest) float32."""
    sizes = {
        "acc_at": rows * acc_length,  # float32, as the other accumulator
        "acc_up_at": rows * acc_length,
        "index_at": list_length,  # int32
        "value_at": rows * list_length,  # float32
        "partial_at": rows * (acc_length + PARTIAL_EXTRA),  # float32: sums of one group of int4 weights
    }
    values = [4 * rows * widest * number for number in range(3)]
    layout, offset = {"list_length": list_length, "acc_length": acc_length}, 4 * rows * widest * len(values)
    for field, size in sizes.items():
        layout[field] = offset
        offset += 4 * size
    layout["scratch_bytes"] = -(-offset // 4096) * 4096  # whole pages, so that threads share no cache line
    return layout, values
