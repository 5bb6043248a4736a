"""Names of the int64 parameters of the compiled functions, by position.

Sizes are in elements. A tensor is the address of its first element, 0 if there is none.
"""

from __future__ import annotations

from enum import IntEnum

import torch

CACHE_LINE = 64
MOST_LISTED = 256  # rows of a group in `linear._add_in_integers`: up to 128 channels of a graded weight
# float32 words of each row of PARTIAL after its sums: a list of one group's rows for `linear._add_in_integers`, of
# int64 offsets (16 more, to be prefetched), float32 values and two int8 limbs each; and 32 words of padding.
LIST_WORDS = 2 * (MOST_LISTED + 16) + MOST_LISTED + MOST_LISTED // 2 + 2
PARTIAL_EXTRA = 32 + LIST_WORDS
# dtype names within the names of regions.
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


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


class ScaleType(IntEnum):
    """The type of int4 weights' scales."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class ProjectionField(IntEnum):
    """A row of the table of projections."""

    WEIGHT = 0  # (K, N); int4: (K, ceil(N / 2)) bytes
    N = 1
    K = 2
    SCALE = 3  # channel_scale (K,) float32; 0: dense
    BIAS = 4  # (N,) float32
    COLUMN_SCALE = 5  # int8: (N,) float32; int4: (K / GROUP, 2, ceil(N / 2)), even outputs, then odd ones
    STORED_AS = 6  # StoredAs
    GROUP = 7  # int4: channels that share a scale
    SCALE_TYPE = 8  # int4: ScaleType
    ZERO_POINT = 9  # int4: uint8, in the layout of the scales; 0: all zero points are 8
    PLANES = 10  # rows of WEIGHT for each channel; 2: graded, int4 in both planes, GROUP counts rows
    STRIDE = 11  # int4: bytes between rows of WEIGHT


class BlockField(IntEnum):
    """A row of the table of blocks."""

    # Norms: float32 weights (hidden,); of q and k (head_dim,), with QK_WHOLE (heads * head_dim,).
    ATTENTION_INPUT = 0
    ATTENTION_OUTPUT = 1
    MLP_INPUT = 2
    MLP_OUTPUT = 3
    Q_NORM = 4
    K_NORM = 5
    VALUE_NORM = 6
    # Attention.
    WINDOW = 7  # 0: attends to all positions
    KV_HEADS = 8
    HEAD_DIM = 9
    KEYS = 10  # (max_batch, kv_heads, max_len, head_dim), of type CACHED_AS; with shared KV another block's
    VALUES = 11
    ROTARY_HALF = 12  # rotated pairs of a head; 0: no rotary embedding
    COS = 13  # (max_len, rotary_half) float32
    SIN = 14
    INTERLEAVED = 15  # rotary pairs are (2 i, 2 i + 1), not (i, i + ROTARY_HALF)
    DELTA = 16  # a row of DeltaField in a recurrent block, 0 in one with attention
    # Projections.
    FIRST = 17  # the block's first row in the table of projections
    NUM_INPUTS = 18  # projections that read the block's input
    INPUT_WIDTH = 19  # sum of their outputs; values come last, and are the keys if there is no v_proj
    SCALAR = 20  # () float32: multiplies the block's output
    # Experts. Their projections follow o's in the table: all gates, all ups, all downs, then the shared expert's three.
    EXPERTS = 21  # number of experts; 0: a dense MLP
    CHOSEN = 22  # experts of a token
    EXPERT_SIZE = 23
    RENORMALISED = 24  # the chosen experts' weights are divided by their sum
    ROUTER = 25  # (EXPERTS, hidden) float32
    SHARED_SIZE = 26  # of the expert for every token; 0: none
    SHARED_GATE = 27  # (hidden,) float32
    KEY_SCALES = 28  # (max_batch, kv_heads, max_len) float32 of a quantized cache
    VALUE_SCALES = 29
    SINKS = 30  # (heads,) float32: an additional score of each head's softmax; 0: none
    ROUTER_BIAS = 31  # (EXPERTS,) float32
    # Experts beside a dense MLP, which is stored as the shared expert, without a gate; with norms float32 (hidden,).
    BESIDE = 32  # 1 or 0
    EXPERTS_INPUT = 33
    EXPERTS_OUTPUT = 34
    SHARED_OUTPUT = 35
    ROUTER_SCALE = 36  # (hidden,) float32: the weight of the norm before the router
    EXPERT_SCALE = 37  # (EXPERTS,) float32: multiplies the chosen experts' weights
    # Per-layer embeddings, of the base type; the norm is float32 (hidden,).
    PER_LAYER_GATE = 38  # (PER_LAYER, hidden)
    PER_LAYER_PROJECTION = 39  # (hidden, PER_LAYER)
    PER_LAYER_OUTPUT = 40


class DeltaField(IntEnum):
    """Parameters of a Gated DeltaNet. Tensors are float32 except INPUTS."""

    KEY_HEADS = 0
    VALUE_HEADS = 1
    KEY_DIM = 2
    VALUE_DIM = 3
    TAPS = 4  # of the convolution
    A = 5  # (value_heads, hidden): decay
    B = 6  # (value_heads, hidden): beta
    KERNEL = 7  # (taps, mixed_size)
    RATE = 8  # (value_heads,)
    DT_BIAS = 9  # (value_heads,)
    NORM = 10  # (value_dim,)
    INPUTS = 11  # (buffers, slots, taps - 1, mixed_size), the base type: the convolution's last inputs
    STATES = 12  # (buffers, slots, value_heads, key_dim, value_dim)
    BUFFERS = 13  # the state after p positions is in buffer p % BUFFERS
    SLOTS = 14


class FloatField(IntEnum):
    """float32 constants of a step; a cap of 0: none."""

    EPS = 0
    ATTENTION_SCALE = 1
    ATTENTION_CAP = 2
    EMBEDDING_MULTIPLIER = 3
    RESIDUAL_MULTIPLIER = 4
    LOGITS_MULTIPLIER = 5
    LOGITS_CAP = 6
    CLAMP_SLOPE = 7  # of the clamped activation
    CLAMP_LIMIT = 8


class DequantizeField(IntEnum):
    """Parameters of `linear.dequantize`, for some outputs of an int4 weight."""

    PROJECTION = 0
    FIRST = 1  # output, even
    LAST = 2  # exclusive
    TARGET = 3  # (K, LAST - FIRST)


class ProductField(IntEnum):
    """Parameters of `product.product`, of many rows and one projection; strides in bytes."""

    PROJECTION = 0
    X = 1  # (ROWS, X_STRIDE) bfloat16
    X_STRIDE = 2
    ROWS = 3  # a multiple of half of `product.TILE`
    KEPT = 4  # rows of Y; the other rows of X are padding
    Y = 5  # (KEPT, N) bfloat16
    COLUMNS = 6  # of a block, multiples of `product.TILE`
    DEPTH = 7  # channels of a block
    SCRATCH = 8  # (threads, SCRATCH_BYTES)
    SCRATCH_BYTES = 9


class TeamField(IntEnum):
    """int64 words of a barrier, each in a cache line of its own, zero before the first use."""

    ARRIVED = 0  # threads waiting at the current barrier
    PASSED = 8  # completed barriers
    WAITED_NS = 16  # time waited beyond what `step.barrier` spins for
    SIZE = 24


class StepField(IntEnum):
    """Parameters of `step.step`."""

    # The batch.
    ROWS = 0
    SLOTS = 1  # (rows,) int64
    TOKENS = 2  # (rows,) int64
    POSITIONS = 3  # (rows,) int64
    # The model.
    HIDDEN = 4
    PER_LAYER = 5  # size of the per-layer embeddings; 0: none
    HEADS = 6
    MAX_LEN = 7
    VOCAB = 8
    NUM_BLOCKS = 9
    NUM_PROJECTIONS = 10  # of all blocks
    NUM_GATE_UP = 11  # 2, or 1 if fused
    QK_WHOLE = 12  # q and k are normalized over all heads, not head by head
    QK_AFTER = 13  # q and k are normalized after the rotary embedding, not before
    ACTIVATION = 14  # MlpActivation
    GATED = 15  # each head's query is followed by a gate (head_dim,) of the attention's output
    EMBEDDING = 16  # (V, hidden), the base type
    HEAD = 17  # (V, hidden), the base type or int8
    HEAD_SCALE = 18  # (V,) float32 of an int8 head
    FINAL_NORM = 19  # (hidden,) float32
    QUERY_SCALES = 20  # (max_len,) float32: multiplies queries by position
    FLOATS = 21  # FloatField
    BLOCKS = 22  # rows of BlockField
    PROJECTIONS = 23  # rows of ProjectionField, block by block
    THRESHOLDS = 24  # (projections, 2) float32, the second for a graded weight's low plane
    # Buffers shared by all threads.
    LOGITS = 25  # (outputs, V) float32
    SCORES = 26  # (heads, max_len) float32
    HALF = 27  # (rows, hidden) float32: the output of attention or MLP
    QKV = 28  # (rows, INPUT_WIDTH) float32
    SEGMENT_INDEX = 29  # (list_length,) int32
    SEGMENT_VALUE = 30  # (rows, list_length) float32
    SEGMENT_COUNT = 31  # (threads, 2) int64
    COUNTS = 32  # (threads, projections) int64, to which numbers of kept channels are added
    SPARE_COUNTS = 33  # (threads,) int64, written instead of COUNTS where nothing is to be counted
    TEAM = 34  # TeamField
    # Scratch memory of each thread, see `scratch_layout`.
    SCRATCH = 35  # (threads, SCRATCH_BYTES)
    SCRATCH_BYTES = 36
    LIST_LENGTH = 37  # the largest K * PLANES
    ACC_LENGTH = 38  # the largest N of an accumulator
    NORMED_AT = 39  # offsets in bytes
    ACC_AT = 40
    ACC_UP_AT = 41
    INDEX_AT = 42
    VALUE_AT = 43
    PARTIAL_AT = 44
    # One token's experts. Slots: its chosen experts, then the shared one.
    EXPERT_SCORES = 45  # (experts,) float32
    EXPERT_CHOICE = 46  # (threads, slots, 2) int64: expert id, and the bits of its float32 weight
    EXPERT_INDEX = 47  # (slots, EXPERT_LENGTH) int32: down's kept channels, thread by thread
    EXPERT_VALUE = 48  # (slots, EXPERT_LENGTH) float32
    EXPERT_COUNT = 49  # (slots, threads, 2) int64
    EXPERT_SLOTS = 50
    EXPERT_LENGTH = 51
    CACHED_AS = 52  # StoredAs of keys and values
    OUTPUTS = 53  # (rows,) int64: for each row the row of LOGITS
    # Hidden states for a draft head. (blocks + 2,) int64: for each block the offset of its input in a row of TAPS, -1:
    # not stored; the offset of the last block's output; the length of a row.
    TAPPED = 54
    TAPS = 55  # (rows, length) float32
    BESIDE = 56  # (rows, hidden) float32: the output of a dense MLP beside experts
    TOKEN_AT = 57  # offset in the scratch memory: normalized input of one token's experts
    # With PER_LAYER.
    PER_LAYER_PROJECTION = 58  # (blocks * PER_LAYER, hidden), the base type
    PER_LAYER_NORM = 59  # (PER_LAYER,) float32
    PER_LAYER_INPUTS = 60  # (rows, blocks * PER_LAYER) float32: token embeddings; the step adds PER_LAYER_PROJECTED
    PER_LAYER_PROJECTED = 61  # (rows, blocks * PER_LAYER) float32: projections of the input embedding
    PER_LAYER_GATED = 62  # (rows, PER_LAYER) float32: of one block
    ROW_NUMBERS = 63  # (rows,) int64: 0, 1, ...
    MAPPED = 64  # 1: experts are memory-mapped from a file, and madvise precedes their use


def scratch_layout(rows: int, hidden: int, list_length: int, acc_length: int) -> dict[StepField, int]:
    """Byte offsets of the buffers in a thread's scratch memory; the residual (rows, hidden) float32 comes first."""
    sizes = {
        StepField.NORMED_AT: rows * hidden,  # float32
        StepField.TOKEN_AT: hidden,
        StepField.ACC_AT: rows * acc_length,  # float32, as the other accumulator
        StepField.ACC_UP_AT: rows * acc_length,
        StepField.INDEX_AT: list_length,  # int32
        StepField.VALUE_AT: rows * list_length,  # float32
        StepField.PARTIAL_AT: rows * (acc_length + PARTIAL_EXTRA),  # float32: sums of one group of int4 weights
    }
    layout, offset = {StepField.LIST_LENGTH: list_length, StepField.ACC_LENGTH: acc_length}, 4 * rows * hidden
    for field, size in sizes.items():
        layout[field] = offset
        offset += 4 * size
    layout[StepField.SCRATCH_BYTES] = -(-offset // 4096) * 4096  # whole pages, so that threads share no cache line
    return layout
