"""What a region of the CPU back end is given: int64 parameters, named here in order of position.

Sizes are counts of elements, tensors are the address of their first element, 0 stands for "none".
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE = 64
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def type_name(dtype: torch.dtype) -> str:
    """The part of a region's name that tells its floating type.

    Raises:
        TypeError: not one of float32, bfloat16 and float16.
    """
    if dtype not in _NAMES:
        raise TypeError(f"expected float32, bfloat16 or float16, found {dtype}")
    return _NAMES[dtype]


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory that starts on a cache line, so that rows of whole lines do."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = torch.empty(size + _CACHE_LINE - 1, dtype=torch.uint8)
    skip = -buffer.data_ptr() % _CACHE_LINE
    return buffer[skip : skip + size].view(dtype).view(shape)


TILE = 64  # rows and columns that are transposed at a time


class StoredAs(IntEnum):
    """What the numbers of a weight are stored as."""

    BASE = 0  # the type of the cache: float32, bfloat16 or float16
    INT8 = 1  # and one scale a column
    INT4 = 2  # two columns a byte, and a scale for each group of channels and column: see `grouped`


class ScaleType(IntEnum):
    """The type of int4 weights' scales."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class ProjectionField(IntEnum):
    """One row of the table of projections (int64)."""

    WEIGHT = 0  # (K, N); int4: (K, ceil(N / 2)) bytes
    N = 1
    K = 2
    SCALE = 3  # channel_scale (K,) float32; 0: dense
    BIAS = 4  # (N,) float32 or 0
    COLUMN_SCALE = 5  # int8: (N,) float32; int4: (G, 2, ceil(N / 2)), the even columns of a group, then the odd ones
    STORED_AS = 6  # `StoredAs`
    GROUP = 7  # channels that share a scale, int4 only
    SCALE_TYPE = 8  # `ScaleType`, int4 only
    ZERO_POINT = 9  # uint8, like the scales of int4; 0: the code 8 is zero


class BlockField(IntEnum):
    """One row of the table of blocks (int64): in what a model's blocks differ. Norms are float32 weights, 0: none."""

    ATTENTION_INPUT = 0  # (hidden,)
    ATTENTION_OUTPUT = 1
    MLP_INPUT = 2
    MLP_OUTPUT = 3
    Q_NORM = 4  # (head_dim,), or (q,) if StepField.QK_WHOLE
    K_NORM = 5  # (head_dim,), or (kv,)
    WINDOW = 6  # 0: attends to everything
    ROTARY_HALF = 7  # pairs that are turned; 0: positions are not told apart
    COS = 8  # (max_len, rotary_half) float32
    SIN = 9
    INTERLEAVED = 10  # pairs are neighbours, not halves
    FIRST = 11  # its first row of the table of projections
    NUM_INPUTS = 12  # projections that read the input of attention or of the recurrent half
    INPUT_WIDTH = 13  # columns of these together; the values come last, and are the keys where there is no v_proj
    DELTA = 14  # recurrent: a row of `DeltaField`; 0: it has attention
    KV_HEADS = 15
    HEAD_DIM = 16
    KEYS = 17  # (max_batch, kv_heads, max_len, head_dim), the base type
    VALUES = 18
    VALUE_NORM = 19  # (head_dim,) float32: each head's values are normalised by it; 0: they are not
    SCALAR = 20  # () float32: what the block's output is multiplied by; 0: nothing


class DeltaField(IntEnum):
    """A recurrent block's own numbers (int64): a gated DeltaNet. Tensors are float32 but for the inputs."""

    KEY_HEADS = 0
    VALUE_HEADS = 1
    KEY_DIM = 2
    VALUE_DIM = 3
    TAPS = 4  # of the convolution
    A = 5  # (value_heads, hidden): how fast a head forgets
    B = 6  # (value_heads, hidden): how much it takes in
    KERNEL = 7  # (taps, mixed_size)
    RATE = 8  # (value_heads,)
    DT_BIAS = 9  # (value_heads,)
    NORM = 10  # (value_dim,)
    INPUTS = 11  # (slots, taps - 1, mixed_size), the base type: the convolution's last inputs
    STATES = 12  # (slots, value_heads, key_dim, value_dim)


class FloatField(IntEnum):
    """The numbers (float32) that a step computes with; a cap of 0: none."""

    EPS = 0
    ATTENTION_SCALE = 1
    ATTENTION_CAP = 2
    EMBEDDING_MULTIPLIER = 3
    RESIDUAL_MULTIPLIER = 4
    LOGITS_MULTIPLIER = 5
    LOGITS_CAP = 6


class LayoutField(IntEnum):
    """Parameters of the regions that transpose, quantise or pack one weight."""

    SOURCE = 0  # (rows, K): some rows of a weight (N, K); int4: two channels a byte, (rows, ceil(K / 2))
    ROWS = 1
    K = 2
    TARGET = 3  # where the first of these rows goes: a column of (K, N), or a row of (N, K) if TRANSPOSED is 0
    STRIDE = 4  # N
    TRANSPOSED = 5
    SCALE = 6  # (rows,) float32, written by the quantisation
    TILES = 7  # per thread: TILE * (TILE + 1) elements of 4 bytes


class DequantizeField(IntEnum):
    """Parameters of the region that turns columns of an int4 weight into numbers of a floating type."""

    PROJECTION = 0
    FIRST = 1  # column, even
    LAST = 2  # the first column that is left out
    TARGET = 3  # (K, LAST - FIRST)


class TeamField(IntEnum):
    """What the threads of a team tell each other: int64, each on a cache line of its own, zero before the first use."""

    ARRIVED = 0  # threads that wait at the present barrier
    PASSED = 8  # barriers that are over
    WAITED_NS = 16  # beyond what `barrier` calls brief
    SIZE = 24


class StepField(IntEnum):
    """Parameters of the region that decodes one token for each of ``rows`` slots."""

    ROWS = 0
    SLOTS = 1  # (rows,) int64
    TOKENS = 2  # (rows,) int64
    POSITIONS = 3  # (rows,) int64
    HIDDEN = 4
    INTERMEDIATE = 5
    HEADS = 6
    MAX_LEN = 7
    NUM_BLOCKS = 8
    NUM_PROJECTIONS = 9  # of all blocks
    NUM_GATE_UP = 10  # 2, or 1 if fused
    VOCAB = 11
    QK_WHOLE = 12  # q and k are normalised as whole vectors, not head by head
    QK_AFTER = 13  # each head is normalised after the rotation, not before
    GELU = 14  # the MLP's activation is GELU, not SiLU
    EMBEDDING = 15  # (V, hidden), the base type
    HEAD = 16  # (V, hidden)
    HEAD_SCALE = 17  # (V,) float32 where the head is int8, else 0
    BLOCKS = 18  # the table
    FINAL_NORM = 19  # (hidden,) float32
    QUERY_SCALES = 20  # (max_len,) float32: what queries are multiplied by; 0: nothing
    PROJECTIONS = 21  # the table, block by block
    THRESHOLDS = 22  # one float32 for each of its rows
    FLOATS = 23  # see `FloatField`
    HALF = 24  # (rows, hidden) float32: the output of attention or MLP
    QKV = 25  # (rows, the block's INPUT_WIDTH) float32
    SEGMENT_INDEX = 26  # (max(q, intermediate),) int32
    SEGMENT_VALUE = 27  # (rows, max(q, intermediate)) float32
    SEGMENT_COUNT = 28  # (threads, 2) int64
    SCORES = 29  # (heads, max_len) float32
    SCRATCH = 30  # per thread, see `step`
    SCRATCH_BYTES = 31
    LIST_LENGTH = 32  # longest K
    ACC_LENGTH = 33  # widest N of an accumulator
    COUNTS = 34  # (threads, projections) int64, kept channels are added
    SPARE_COUNTS = 35  # (threads,) int64 that nobody reads
    LOGITS = 36  # (slots, V) float32
    TEAM = 37  # see `TeamField`
    GATED = 38  # each head's query is followed by a gate of the same width, for what attention gives it
