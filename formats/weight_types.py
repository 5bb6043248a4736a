"""The weight types of loaded models: a table for options, memory estimates and back ends; quantization of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from . import guard
from .lazy import Tensor, torch

PREFILL_POLICIES = ("dense", "half", "all")


def sparse_from(policy: str, length: int) -> int:
    """The first masked position of a prompt of ``length`` tokens; ``length`` if there is none."""
    guard.choice("prefill", policy, PREFILL_POLICIES)
    # "half" is the accuracy protocol of the paper. Position 0 is never masked: every later position attends to it, and on
    # SmolLM2 its mask alone is a third of the KL (benchmarks/LOG.md).
    return {"dense": length, "half": length - length // 2, "all": min(1, length)}[policy]


Kind = Literal["int8", "int4", "fp8"]
# By kind: dtype of the codes, their range, and the code of zero without zero points.
_STORED = {"int8": "int8", "int4": "uint8", "fp8": "float8_e4m3fn"}
_RANGE = {"int8": (-128, 127), "int4": (0, 15), "fp8": (-448, 448)}
_MIDDLE = {"int8": 0, "int4": 8, "fp8": 0}
# The code of a group's largest absolute value. int8 does not use -128; int4 clips half a step at either end.
_LARGEST = {"int8": 127.0, "int4": 7.5, "fp8": 448.0}
# Smallest scale: smaller ones would be subnormal or round to zero.
_SMALLEST_NORMAL = 2.0**-126
# Elements that are converted to float32 at a time.
_CHUNK = 4 << 20


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized weight (N, K)."""

    kind: Kind
    codes: Tensor  # int8: (N, K) int8; int4: (N, ceil(K / 2)) uint8, see `pack_int4`; fp8: (N, K) float8_e4m3fn (e4m3)
    scales: Tensor  # (N, G) float32, finite; G = K / group, or 1 without groups
    # (N, G), unpacked integer codes; None: 0 for int8, 8 for int4
    zeros: Tensor | None
    group: int | None  # channels per scale, which divides K; None: one scale per row
    shape: tuple[int, int]  # (N, K)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)
        return sum(part.numel() * part.element_size() for part in parts)

    def rows(self, first: int, last: int) -> QuantizedMatrix:
        return self._of(slice(first, last))

    def reordered(self, order: Sequence[int]) -> QuantizedMatrix:
        """The rows ``order``."""
        return self._of(torch.tensor(order, device=self.codes.device))

    def _of(self, rows: slice | Tensor) -> QuantizedMatrix:
        zeros = None if self.zeros is None else self.zeros[rows]
        codes, scales = self.codes[rows], self.scales[rows]
        return QuantizedMatrix(self.kind, codes, scales, zeros, self.group, (len(codes), self.shape[1]))

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) in ``dtype``, computed in float32 and rounded once, in chunks of rows."""
        weight = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for part in _row_slices(*self.shape):
            codes = unpack_int4(self.codes[part], self.shape[1]) if self.kind == "int4" else self.codes[part]
            groups = codes.to(torch.float32).unflatten(1, (self.scales.shape[1], -1))
            if self.zeros is not None:
                groups -= self.zeros[part].to(torch.float32).unsqueeze(2)
            elif _MIDDLE[self.kind]:
                groups -= _MIDDLE[self.kind]
            weight[part] = groups.mul_(self.scales[part].unsqueeze(2)).flatten(1)
        return weight


def pack_int4(codes: Tensor) -> Tensor:
    """Integer codes (N, K) in 0 … 15 to two per byte, the first in the low bits: (N, ceil(K / 2)) uint8."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    codes = codes.to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, :columns]


# Graded weights are int8 codes c = 16 h + l, with a high plane h and a low plane l in [-8, 7].
PLANE_BITS = (4, 4)
_LARGEST_GRADED = 119.0


def split_planes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes to high and low plane, int8 each; ValueError for codes above 119, which have no planes."""
    if codes.numel() and int(codes.max()) > _LARGEST_GRADED:
        raise ValueError(f"expected int8 codes up to {_LARGEST_GRADED:g}, which have planes, found {int(codes.max())}")
    high = (codes + 8) >> 4
    return high, codes - 16 * high


def interleaved(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """int8 codes (N, K) to planes as int4 (N, 2 K): channel 2 k is the high plane of k, 2 k + 1 the low one; their inputs are
    16 x and x. ValueError as in `split_planes`."""
    high, low = split_planes(matrix.codes)
    codes = ((high + 8) | (low + 8) << 4).view(torch.uint8)
    group = None if matrix.group is None else 2 * matrix.group
    return QuantizedMatrix("int4", codes, matrix.scales, None, group, (matrix.shape[0], 2 * matrix.shape[1]))


def quantise(
    kind: Kind,
    weight: Tensor,
    *,
    group: int | None = None,
    scale_dtype: torch.dtype | None = None,
    graded: bool = False,
) -> QuantizedMatrix:
    """Quantize a finite weight (N, K) symmetrically, with a scale per ``group`` channels, or per row if None. Scales are
    rounded to ``scale_dtype``, float32 if None. ``graded``: only codes that have planes."""
    rows, columns = weight.shape
    groups = 1 if group is None else columns // group
    width = (columns + 1) // 2 if kind == "int4" else columns
    scale_dtype = scale_dtype or torch.float32
    smallest, largest = max(_SMALLEST_NORMAL, torch.finfo(scale_dtype).tiny), torch.finfo(scale_dtype).max
    codes = torch.empty(rows, width, dtype=getattr(torch, _STORED[kind]), device=weight.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=weight.device)
    for part in _row_slices(rows, columns):
        values = weight[part].to(torch.float32).unflatten(1, (groups, -1))
        scale = values.abs().amax(2) / _LARGEST[kind]
        if graded:
            scale = torch.maximum(values.amax(2) / _LARGEST_GRADED, values.amin(2) / _RANGE[kind][0])
        # A group of zeros has scale 1.
        scale = torch.where(scale > 0, scale.clamp(smallest, largest), 1.0).to(scale_dtype).to(torch.float32)
        code = values / scale.unsqueeze(2)
        if kind != "fp8":
            code = torch.round(code) + _MIDDLE[kind]
        low, high = _RANGE[kind]
        code = code.clamp_(low, _LARGEST_GRADED if graded else high).flatten(1)
        codes[part] = pack_int4(code) if kind == "int4" else code.to(codes.dtype)
        scales[part] = scale
    return QuantizedMatrix(kind, codes, scales, None, group, (rows, columns))


def _row_slices(rows: int, columns: int) -> list[slice]:
    step = max(1, _CHUNK // max(1, columns))
    return [slice(first, min(rows, first + step)) for first in range(0, rows, step)]


DTYPES = ("bfloat16", "float16", "float32")
# Weight types, which are no dtypes.
NOT_DTYPES = {one: f"{one} weights are chosen by --weights {one} (weights={one!r})" for one in ("int8", "int4", "fp8")}

# Types of the KV cache; auto: the decoder's dtype.
KV_CACHE_DTYPES = ("auto", "fp8", "int8")

_GROUP, _SMALLEST_GROUP = 128, 32


@dataclass(frozen=True)
class WeightType:
    bits: int | None  # per code; None: not quantized
    grouped: bool  # a scale per group of channels, see :func:`group_of`; else per row
    scale: str  # dtype of the scales
    head: str  # type of the output layer, for which four bits would cost quality

    @property
    def scale_dtype(self) -> torch.dtype:
        return getattr(torch, self.scale)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Approximate bytes of a weight (N, K) of this type in a decoder of ``dtype``."""
        if self.bits is None or len(shape) != 2:
            return math.prod(shape) * dtype.itemsize
        return code_bytes(self.bits, shape, _GROUP if self.grouped else None)


WEIGHT_TYPES: Mapping[str, WeightType] = {
    "native": WeightType(None, False, "float32", "native"),
    "int8": WeightType(8, False, "float32", "int8"),
    "int4": WeightType(4, True, "bfloat16", "int8"),
    "fp8": WeightType(8, False, "float32", "int8"),
}


def code_bytes(bits: int, shape: tuple[int, ...], group: int | None, *, zero_points: bool = False) -> int:
    """Approximate bytes of a quantized weight (N, K), with float32 scales as an upper bound."""
    n, k = shape
    groups = 1 if group is None else -(-k // group)
    return (n * bits + 7) // 8 * k + n * groups * (8 if zero_points else 4)


def group_of(k: int) -> int:
    """Group size of a weight with ``k`` channels: the largest divisor up to 128. ValueError if it is below 32 and not ``k``,
    as the scales would need too much memory."""
    group = next(divisor for divisor in range(min(_GROUP, k), 0, -1) if k % divisor == 0)
    if group < min(_SMALLEST_GROUP, k):
        raise ValueError(f"{k} channels cannot be cut into even groups of {_SMALLEST_GROUP} to {_GROUP}")
    return group


def round_weight(weight: Tensor, weights: str, group: int | None = None) -> QuantizedMatrix:
    """Quantize a finite weight (N, K) to the type ``weights`` other than ``native``, in groups of ``group`` channels if that
    divides K, else of `group_of`, whose ValueError it raises."""
    held, k = WEIGHT_TYPES[weights], weight.shape[1]
    group = (group if group and k % group == 0 else group_of(k)) if held.grouped else None
    return quantise(cast(Kind, weights), weight, group=group, scale_dtype=held.scale_dtype)
