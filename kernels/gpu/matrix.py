"""What a launch of a product is cut by, and what it has to know of the weights' layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bits of a code, and the code of zero where there are no zero points.
CODE_BITS = {"int4": 4, "int8": 8, "fp8": 8}
MIDDLE = {"int4": 8, "int8": 0, "fp8": 0}
# A multiple of what one warp reads of a row: 16 bytes for each of 8 lanes.
COLUMN_BLOCK = 256
# Plain rows start at multiples of 16 elements, so that they can be read 16 bytes at a time.
_PLAIN_BLOCK = 16
# Numbers laid out or widened at a time.
_PIECE = 8 << 20


@dataclass(frozen=True)
class Matrix:
    """Weights (K, N) of one or several projections.

    Attributes:
        kind: ``plain``, ``int8``, ``int4`` or ``fp8``.
        data: plain: (K, stride) of ``dtype``; codes: (K, words) int32.
        scales: codes: (G, columns) float32, each projection padded as in ``data``; 0 in the padding.
        zeros: (G, columns) float32: the code of zero; None: the kind's own.
        group: neighbouring channels that share a scale: K / G.
        dtype: of x and of the products' outputs.
        widths: columns of each projection.
    """

    kind: str
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    group: int
    dtype: torch.dtype
    widths: tuple[int, ...]

    @property
    def in_features(self) -> int:
        """K."""
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of data, scales and zero points."""
        held = (part for part in (self.data, self.scales, self.zeros) if part is not None)
        return sum(part.numel() * part.element_size() for part in held)

    def to(self, device: torch.device | str) -> Matrix:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: None if (held := getattr(self, name)) is None else held.to(device) for name in _TENSORS
        }
        return replace(self, **moved)

    def first(self, index: int) -> int:
        """The first column of a projection, in the columns of ``scales`` and of the unpacked data."""
        widths = self.widths[:index]
        return sum(widths) if self.kind == "plain" else sum(map(padded_width, widths))


_TENSORS = ("data", "scales", "zeros")


def padded_width(width: int) -> int:
    """Columns that a projection takes in the codes' layout."""
    return -(-width // COLUMN_BLOCK) * COLUMN_BLOCK


def plain_matrix(data: Tensor, widths: tuple[int, ...]) -> Matrix:
    """Weights as they are: (K, stride), the first ``sum(widths)`` columns are used."""
    return Matrix("plain", data, None, None, data.shape[0], data.dtype, widths)


def empty_matrix(
    kind: str,
    k: int,
    widths: tuple[int, ...],
    group: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    zeros: bool = False,
) -> Matrix:
    """Room for weights, to be filled by `put_columns`.

    Args:
        kind: as in `Matrix`.
        k: channels.
        widths: columns of each projection, one to three.
        group: channels that share a scale, a divisor of ``k``; None: all. Plain weights have no scales.
        dtype: of x and of the products' outputs.
        device: where.
        zeros: whether any projection has zero points.

    Raises:
        ValueError: no such kind, or groups that do not divide.
    """
    if kind == "plain":
        stride = -(-sum(widths) // _PLAIN_BLOCK) * _PLAIN_BLOCK
        return plain_matrix(torch.empty(k, stride, dtype=dtype, device=device), widths)
    if kind not in CODE_BITS:
        raise ValueError(f"kind: expected plain, {', '.join(CODE_BITS)}, found {kind!r}")
    group = k if group is None else group
    if group < 1 or k % group:
        raise ValueError(f"group: expected a divisor of {k}, found {group}")
    columns = sum(map(padded_width, widths))
    data = torch.zeros(k, columns * CODE_BITS[kind] // 32, dtype=torch.int32, device=device)
    scales = torch.zeros(k // group, columns, device=device)
    middle = torch.full_like(scales, MIDDLE[kind]) if zeros else None
    return Matrix(kind, data, scales, middle, group, dtype, widths)


def put_columns(
    matrix: Matrix, index: int, codes: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None
) -> None:
    """Lay one projection's weight where the products read it; its numbers come row by row, as checkpoints hold them.

    Args:
        matrix: of `empty_matrix`.
        index: of the projection.
        codes: int8 (N, K) int8; int4 (N, ceil(K / 2)) uint8, channel 2j in the low half of byte j; fp8 (N, K)
            float8_e4m3fn; plain (N, K), any floating type. On any device.
        scales: (N, G), or (N, 1) for any G; codes only.
        zeros: (N, G) or (N, 1), the codes of zero, for a matrix that has room for them; None: the kind's own.

    Raises:
        ValueError: a shape that is not the matrix's, or zero points that it has no room for.
    """
    k, width = matrix.in_features, matrix.widths[index]
    across = (k + 1) // 2 if matrix.kind == "int4" else k
    if tuple(codes.shape) != (width, across):
        raise ValueError(f"codes: expected {(width, across)}, found {tuple(codes.shape)}")
    first = matrix.first(index)
    if matrix.kind == "plain":
        matrix.data[:, first : first + width].copy_(codes.T)
        return
    for name, given, held in (("scales", scales, matrix.scales), ("zeros", zeros, matrix.zeros)):
        if given is None and name == "zeros":
            continue
        if held is None:
            raise ValueError("zeros: the matrix was made without room for zero points")
        groups = held.shape[0]
        if given is None or tuple(given.shape) not in ((width, groups), (width, 1)):
            found = None if given is None else tuple(given.shape)
            raise ValueError(f"{name}: expected {(width, groups)}, found {found}")
        held[:, first : first + width] = given.T.to(held.device, held.dtype)
    raw = matrix.data.view(torch.uint8)
    per_byte = 8 // CODE_BITS[matrix.kind]
    step = max(COLUMN_BLOCK, _PIECE // k // COLUMN_BLOCK * COLUMN_BLOCK)
    for start in range(0, width, step):
        piece = codes[start : start + step].to(raw.device)
        if matrix.kind == "int4":
            if piece.shape[0] % 2:
                piece = torch.nn.functional.pad(piece, (0, 0, 0, 1))
            # Two rows in a byte instead of two channels.
            even, odd = piece[::2], piece[1::2]
            low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 240)
            piece = torch.stack((low, high), dim=2).flatten(1)[:, :k]
        at = (first + start) // per_byte
        raw[:, at : at + piece.shape[0]] = piece.view(torch.uint8).T


def widen(matrix: Matrix, index: int | None, out: Tensor) -> Tensor:
    """The numbers that the products multiply by, rounded once: float32 (code - zero) * scale to out's type.

    Args:
        matrix: of any kind.
        index: of a projection; None: all of them, side by side without padding.
        out: (K, N), any strides: the transpose of (N, K) too. Plain numbers are only copied.

    Returns:
        ``out``.
    """
    indices = range(len(matrix.widths)) if index is None else (index,)
    start = 0
    for i in indices:
        width = matrix.widths[i]
        _widen_one(matrix, i, out[:, start : start + width])
        start += width
    return out


def _widen_one(matrix: Matrix, index: int, out: Tensor) -> None:
    k, width = matrix.in_features, matrix.widths[index]
    first = matrix.first(index)
    if matrix.scales is None:
        out.copy_(matrix.data[:, first : first + width])
        return
    raw = matrix.data.view(torch.uint8)
    per_byte = 8 // CODE_BITS[matrix.kind]
    for begin, end in _pieces(k, width):
        codes = raw[begin:end, first // per_byte : (first + padded_width(width)) // per_byte]
        if matrix.kind == "int4":
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        elif matrix.kind == "int8":
            codes = codes.view(torch.int8)
        else:
            codes = codes.view(torch.float8_e4m3fn)
        groups = torch.arange(begin, end, device=raw.device) // matrix.group
        numbers = codes[:, :width].to(torch.float32)
        if matrix.zeros is not None:
            numbers -= matrix.zeros[groups, first : first + width]
        elif MIDDLE[matrix.kind]:
            numbers -= MIDDLE[matrix.kind]
        out[begin:end] = numbers.mul_(matrix.scales[groups, first : first + width])


def _pieces(k: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE // width)
    for begin in range(0, k, step):
        yield begin, min(k, begin + step)


_BLOCK = tl.constexpr(COLUMN_BLOCK)
_INT4_MIDDLE = tl.constexpr(MIDDLE["int4"])


@triton.jit
def code_columns(of, n, shape: tl.constexpr):
    """Where the columns ``n`` of a tile's projection stand among the padded ones: an index of ``code_scales``."""
    FIRST: tl.constexpr = (shape.n0 + _BLOCK - 1) // _BLOCK * _BLOCK
    SECOND: tl.constexpr = FIRST + (shape.n1 + _BLOCK - 1) // _BLOCK * _BLOCK
    return tl.where(of.projection == 0, 0, tl.where(of.projection == 1, FIRST, SECOND)) + n


@triton.jit
def decoded(weights, column, k, live, wide: tl.constexpr, shape: tl.constexpr, modes: tl.constexpr):
    """(code - zero) * scale of the channels ``k`` (BLOCK_K,) and the padded columns (BLOCK_N,), wide; 0 where not
    ``live`` (BLOCK_K, BLOCK_N). No product of a code and a scale is rounded to the weights' type."""
    BITS: tl.constexpr = 4 if modes.codes == "int4" else 8
    EACH: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = shape.stride * EACH
    at = k.to(tl.int64)[:, None] * shape.stride + (column // EACH)[None, :]
    word = tl.load(weights.weight_t + at, mask=live, other=0)
    code = (word >> ((column % EACH) * BITS)[None, :]) & (15 if modes.codes == "int4" else 255)
    if modes.codes == "fp8":
        # As a float32 whose exponent is 120 too small; that of subnormal numbers too.
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        value = (bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0).to(wide)
    else:
        value = ((code ^ 128) - 128 if modes.codes == "int8" else code).to(wide)
    scale_at = (k // modes.group)[:, None] * COLUMNS + column[None, :]
    if weights.zeros is not None:
        value -= tl.load(weights.zeros + scale_at, mask=live, other=0.0).to(wide)
    elif modes.codes == "int4":
        value -= _INT4_MIDDLE
    return value * tl.load(weights.code_scales + scale_at, mask=live, other=0.0).to(wide)


@dataclass(frozen=True)
class GemvTile:
    """How a launch is cut: ``splits`` segments of channels times tiles of ``block_n`` columns.

    A program of ``warps`` warps reads ``unroll`` times ``block_k`` rows at a time. Channels are dealt to the splits
    ``chunk`` at a time. With programmatic dependent launch, ``early`` lets the launch begin before the one before it
    has ended, and ``trigger`` says when it lets the next one begin: 1 at its start, 2 after its product. ``lead`` times
    ``unroll * block_k`` rows are read before the channels are selected, and multiplied by zero if they were to be
    dropped. For the tensor cores ``block_k`` channels are read and dealt at a time, ``stages - 1`` times that many are
    on their way before the channels are selected, and ``chunk``, ``unroll``, ``trigger`` and ``lead`` mean nothing. Of
    weights in codes a warp reads ``unroll`` times 16 channels at a time, ``stages`` times that many are on their way,
    and ``block_k`` and ``lead`` mean nothing.

    Partial sums are added by the program of a tile that arrives last, or by ``pollers`` (a power of two) of its last
    splits, which wait for all others. One waits for programs that began before it. Several wait for each other too, so
    those of all tiles must have places on the GPU at once: one for each multiprocessor there always is.
    ``choose_tile`` gives no more, and ``launch_gemv`` takes no more.

    Raises:
        ValueError: ``pollers`` is no power of two, or larger than ``splits``; or two threads would look at one sum:
            they may not see the same, and the program would take what only one of them has seen.
    """

    block_n: int = 512
    block_k: int = 2
    splits: int = 8
    warps: int = 4
    stages: int = 1
    chunk: int = 8
    unroll: int = 4
    trigger: int = 1
    early: bool = True
    lead: int = 0
    pollers: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("lead", "pollers", "early") else 1
            if not isinstance(value, bool if name == "early" else int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, found {value!r}")
        for name in ("block_n", "block_k", "warps"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, found {value}")
        if not 0 <= self.pollers <= self.splits or self.pollers & (self.pollers - 1):
            raise ValueError(
                f"expected pollers to be 0 or a power of two up to splits ({self.splits}), found {self.pollers}"
            )
        if self.pollers and triton.next_power_of_2(self.splits) * self.block_n // self.pollers < 32 * self.warps:
            raise ValueError(f"expected a sum to look at for every thread of a poller, found {self}")

    def parts(self, width: int) -> int:
        """Columns of ``ssq_out``: partial sums of squares that a launch with ``width`` outputs leaves."""
        return triton.cdiv(width, self.block_n) * max(1, self.pollers)


def count_tiles(widths: tuple[int, ...], block_n: int) -> int:
    """Tiles of ``block_n`` columns of projections so wide; none spans two of them."""
    return sum(triton.cdiv(width, block_n) for width in widths)


class Layout(NamedTuple):
    """What a launch has to know of a group before it sees a number of it: as in ``Group`` and ``Matrix``."""

    in_features: int
    widths: tuple[int, ...]
    stride: int
    dtype: torch.dtype
    device: torch.device
    dense: bool
    codes: str = "plain"
    group: int = 0
    zeros: bool = False
