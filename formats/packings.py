"""Formats in which checkpoints store quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from .lazy import Tensor, torch
from .weight_types import Kind, QuantizedMatrix, pack_int4

_FLOATS = ("BF16", "F16", "F32")
_FP8_NAN = 0x7F
ACT_ORDER = (
    "GPTQ with act-order is not supported, because neighbouring channels share no scale; take a checkpoint quantised with "
    "desc_act=False, or convert the unquantised model with --weights int4"
)
# Position of channel i in an int32 word of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Part:
    """One tensor of a quantized weight: its allowed shapes and dtypes (safetensors' names)."""

    shapes: tuple[tuple[int, ...], ...]
    codes: tuple[str, ...]
    required: bool = True


# A packing is a storage format of a weight. It has a ``kind``, a ``group`` (channels per scale; None: one scale per row),
# ``zero_points``, and
#   parts(rows, columns): last part of a tensor's name -> its `Part`; ValueError for an impossible shape
#   check(parts, rows, columns): validates ``weight_shape`` and ``g_idx``, if present
#   decode(parts, rows, columns): the weight (rows, columns) from the tensors of `parts`
# Packings that are written also have encode(matrix, scale_dtype): last part of a tensor's name -> function that computes it


def _groups(group: int | None, columns: int) -> int:
    if group is not None and columns % group:
        raise ValueError(f"groups of {group} do not divide its {columns} channels")
    return 1 if group is None else columns // group


@dataclass(frozen=True)
class Packed:
    """compressed-tensors' ``pack-quantized``: unsigned codes of 4 or 8 bits in int32 words along K, the first in the lowest
    bits; zero points likewise along N. Scales (N, G), or (1,) per tensor."""

    kind: Literal["int4", "int8"]
    group: int | None
    zero_points: bool = False
    per_tensor: bool = False

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups, in_word = _groups(self.group, columns), 8 if self.kind == "int4" else 4
        found = {
            "weight_packed": Part(((rows, -(-columns // in_word)),), ("I32",)),
            "weight_scale": Part(((1,), ()) if self.per_tensor else ((rows, groups),), _FLOATS),
            "weight_shape": Part(((2,),), ("I64", "I32")),
        }
        if self.zero_points:
            found["weight_zero_point"] = Part(((-(-rows // in_word), groups),), ("I32",))
        return found

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        stated = parts["weight_shape"].tolist()
        if stated != [rows, columns]:
            raise ValueError(f"weight_shape: expected {[rows, columns]}, found {stated}")

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        codes, zeros = parts["weight_packed"].contiguous().view(torch.uint8), None
        if self.zero_points:
            zeros = _from_words(parts["weight_zero_point"].t(), self.kind, rows).t().contiguous()
        scales = _scales(parts["weight_scale"], self.kind).expand(rows, -1)
        if self.kind == "int8":
            codes, zeros = _signed(codes[:, :columns]), None if zeros is None else _signed(zeros)
        else:
            codes = codes[:, : (columns + 1) // 2]
        return QuantizedMatrix(self.kind, codes.contiguous(), scales, zeros, self.group, (rows, columns))

    def encode(self, matrix: QuantizedMatrix, scale_dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
        def packed() -> Tensor:
            codes = matrix.codes if self.kind == "int4" else _signed(matrix.codes.view(torch.uint8)).view(torch.uint8)
            return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).contiguous().view(torch.int32)

        if self.kind == "int4" and matrix.shape[1] % 2:
            raise ValueError(f"rows of {matrix.shape[1]} codes end in half a byte")
        return {
            "weight_packed": packed,
            "weight_scale": partial(matrix.scales.to, scale_dtype),
            "weight_shape": partial(torch.tensor, matrix.shape),
        }


@dataclass(frozen=True)
class Plain:
    """One int8 or fp8 (e4m3) code per element; a scale per tensor, row, group, or block of rows and channels.
    compressed-tensors' ``int-quantized`` and ``float-quantized``, and fp8 as DeepSeek and Qwen publish it, whose scales
    are named ``weight_scale_inv`` (but multiply the codes, too)."""

    kind: Literal["int8", "fp8"]
    group: int | None = None
    block_rows: int | None = None
    per_tensor: bool = False
    zero_points: bool = False
    scale: str = "weight_scale"
    input_scale: bool = False

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = _groups(self.group, columns)
        scale_rows = rows if self.block_rows is None else -(-rows // self.block_rows)
        shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1)) if self.per_tensor else ((scale_rows, groups),)
        code = "I8" if self.kind == "int8" else "F8_E4M3"
        found = {"weight": Part(((rows, columns),), (code,)), self.scale: Part(shapes, _FLOATS)}
        if self.zero_points:
            found["weight_zero_point"] = Part(shapes, ("I8",))
        if self.input_scale:  # of activations, which stay unquantized
            found["input_scale"] = Part(((1,), ()), _FLOATS, required=False)
        return found

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        pass

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        def by_row(values: Tensor) -> Tensor:
            if self.per_tensor:
                return values.reshape(1, 1).expand(rows, 1).contiguous()
            if self.block_rows is not None:
                return values.repeat_interleave(self.block_rows, dim=0)[:rows].contiguous()
            return values.contiguous()

        codes = parts["weight"]
        if self.kind == "fp8" and bool(((codes.view(torch.uint8) & _FP8_NAN) == _FP8_NAN).any()):
            raise ValueError("the weights hold NaN; the model is damaged")
        scales = by_row(_scales(parts[self.scale], self.kind))
        zeros = by_row(parts["weight_zero_point"]) if self.zero_points else None
        return QuantizedMatrix(self.kind, codes, scales, zeros, self.group, (rows, columns))

    def encode(self, matrix: QuantizedMatrix, scale_dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
        return {"weight": lambda: matrix.codes, self.scale: partial(matrix.scales.to, scale_dtype)}


@dataclass(frozen=True)
class Transposed:
    """GPTQ, and AutoAWQ's ``gemm``: 4-bit codes and zero points in int32 words, scales (G, N), all transposed. Words of codes
    are along K in GPTQ, along N in AWQ; words of zero points are along N. AWQ interleaves both."""

    group: int | None
    awq: bool = False
    zero_offset: int = 0  # added to a stored zero point: 1 in the first version of GPTQ's format
    symmetric: bool = False  # all zero points are 8
    kind: ClassVar[Kind] = "int4"
    zero_points: ClassVar[bool] = True

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = _groups(self.group, columns)
        if rows % 8 or (columns % 8 and not self.awq):
            raise ValueError(f"words of eight codes do not divide its shape {(rows, columns)}")
        found = {
            "qweight": Part(((columns, rows // 8) if self.awq else (columns // 8, rows),), ("I32",)),
            "qzeros": Part(((groups, rows // 8),), ("I32",)),
            "scales": Part(((groups, rows),), _FLOATS),
        }
        return found if self.awq else found | {"g_idx": Part(((columns,),), ("I32",), required=False)}

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        order = parts.get("g_idx")
        if order is not None and not torch.equal(order.long(), torch.arange(columns) // (self.group or columns)):
            raise ValueError(ACT_ORDER)

    def fitted(self, stored: Tensor) -> Transposed:
        """This packing of symmetric weights with the offset that makes the ``stored`` zero points (G, N / 8) 8, whatever the
        version in the config; ValueError if there is none."""
        low, high = (int(value) for value in torch.aminmax(_from_words(stored, "int4", 8 * stored.shape[1])))
        if low != high or low not in (7, 8):
            found = f"{low} to {high}" if low != high else str(low)
            raise ValueError(f"expected stored zero points of 7 (gptq) or 8 (gptq_v2), as sym is true, found {found}")
        return replace(self, zero_offset=8 - low)

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        zeros = _from_words(parts["qzeros"], "int4", rows)
        if self.awq:
            both = (_from_words(parts["qweight"], "int4", rows), zeros)
            codes, zeros = (one.unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1) for one in both)
            codes = codes.t()
        else:
            codes = _from_words(parts["qweight"].t(), "int4", columns)
        zeros = ((zeros.t() + self.zero_offset) & 15).contiguous()
        scales = _scales(parts["scales"], "int4").t().contiguous()
        if self.symmetric and bool(((zeros != 8) & (scales != 0)).any()):
            low, high = (int(value) for value in torch.aminmax(zeros))
            raise ValueError(f"expected zero points of 8, as sym is true, found {low} to {high}; the model is damaged")
        return QuantizedMatrix("int4", pack_int4(codes), scales, zeros, self.group, (rows, columns))


Packing = Packed | Plain | Transposed


def _from_words(words: Tensor, kind: Kind, columns: int) -> Tensor:
    """Codes (R, columns) uint8 from int32 words (R, W), the first in the lowest bits."""
    # contiguous() would keep the strides of one word per row, which view() does not accept.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if kind == "int4":
        data = torch.stack((data & 15, data >> 4), dim=2).flatten(1)
    return data[:, :columns]


def _signed(codes: Tensor) -> Tensor:
    return (codes ^ 128).view(torch.int8)


# gpt-oss' experts in MXFP4: suffixes of the tensors' names, and values of the codes. Blocks of 32 elements share a power of
# two; the first of two codes in a byte is in the low bits.
MXFP4 = ("_blocks", "_scales")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_parts(shape: tuple[int, ...]) -> dict[str, Part]:
    """The tensors of a weight (E, K, N) in transformers' layout; the codes are transposed."""
    experts, k, n = shape
    return {MXFP4[0]: Part(((experts, n, k // 32, 16),), ("U8",)), MXFP4[1]: Part(((experts, n, k // 32),), ("U8",))}


def widen_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weight (E, K, N) in bfloat16, which is exact except at the ends of its range."""
    if bool((scales == 255).any()):
        raise ValueError("expected MXFP4 scales that are powers of two, found NaN; the model is damaged")
    experts, n, groups, _ = blocks.shape
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.bfloat16)
    weight = torch.empty(experts, 32 * groups, n, dtype=torch.bfloat16)
    for expert in range(experts):
        codes = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(-2)
        power = scales[expert].to(torch.int32)[..., None] - 127
        weight[expert] = torch.ldexp(values[codes.to(torch.int64)], power).flatten(1).t()
    return weight


def _scales(stored: Tensor, kind: Kind) -> Tensor:
    """Validated scales in float32, which may be negative (AutoRound) or 0 (pruned rows). Codes less zero points are at most
    15 (4 bits) and 448 (8 bits)."""
    scales = stored.to(torch.float32)
    largest = float(scales.abs().max())
    # NaN fails every comparison.
    if not largest < torch.finfo(torch.float32).max / (15 if kind == "int4" else 448):
        raise ValueError(f"expected finite scales, found {largest:g}")
    return scales
