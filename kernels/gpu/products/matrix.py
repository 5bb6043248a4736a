"""A group's weights as the products read them: channel-major, the projections' columns side by side.

Plain numbers are a matrix (K, stride). Codes of one byte or half of one stand in words of 32 bits: a row's word w
holds the columns 8 w to 8 w + 7 of four bits, or 4 w to 4 w + 3 of eight, lowest bits first. A projection begins at a
multiple of `COLUMN_BLOCK` columns, so that no warp's columns span two of them.

    weight[k, n] = (code[k, n] - zero[g, n]) * scale[g, n]          g = k // group

``int4``: 0 … 15, zero 8 where none are given; ``int8``: two's complement; ``fp8``: e4m3, finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CODE_BITS",
    "COLUMN_BLOCK",
    "Matrix",
    "empty_matrix",
    "padded_width",
    "plain_matrix",
    "put_columns",
    "widen",
]

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
