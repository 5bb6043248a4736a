"""How quantized weights lie in a checkpoint's tensors: one class a packing, from the formats' public descriptions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .weight_types import Kind, QuantizedMatrix, pack_int4

_FLOATS = ("BF16", "F16", "F32")
_FP8_NAN = 0x7F
# The place of channel i in a word of AWQ's: its kernels unpack even and odd ones side by side.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Part:
    """One tensor of a weight: the shapes and the types (as safetensors names them) that it may have."""

    shapes: tuple[tuple[int, ...], ...]
    codes: tuple[str, ...]
    required: bool = True


class Packing(ABC):
    """A way to store a weight. Two weights are stored alike if their packings are equal."""

    kind: Kind
    # Neighbouring channels that share a scale; None for a whole row.
    group: int | None
    zero_points: bool

    @abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Last part of a tensor's name -> what is expected there, for a weight (rows, columns)."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        """The weight (rows, columns) from the tensors of `parts`."""

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:  # noqa: B027
        """Check those of the small tensors ``weight_shape`` and ``g_idx`` that there are."""

    def encode(self, matrix: QuantizedMatrix, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        """The reverse of `decode`, for those packings that are written: without zero points."""
        raise NotImplementedError(f"{type(self).__name__} is not written")

    def _groups(self, columns: int) -> int:
        if self.group is not None and columns % self.group:
            raise ValueError(f"groups of {self.group} do not divide its {columns} channels")
        return 1 if self.group is None else columns // self.group


@dataclass(frozen=True)
class Packed(Packing):
    """compressed-tensors' ``pack-quantized``: codes of 4 or 8 bits, offset to be unsigned, in int32 words along K, the
    first in the lowest bits; zero points alike along N. Scales (N, G), for a tensor of one scale (1,)."""

    bits: Literal[4, 8]
    group: int | None
    symmetric: bool
    per_tensor: bool = False

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        return "int4" if self.bits == 4 else "int8"

    @property
    def zero_points(self) -> bool:  # type: ignore[override]
        return not self.symmetric

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = self._groups(columns)
        found = {
            "weight_packed": Part(((rows, -(-columns * self.bits // 32)),), ("I32",)),
            "weight_scale": Part(((1,), ()) if self.per_tensor else ((rows, groups),), _FLOATS),
            "weight_shape": Part(((2,),), ("I64", "I32")),
        }
        if not self.symmetric:
            found["weight_zero_point"] = Part(((-(-rows * self.bits // 32), groups),), ("I32",))
        return found

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        stated = parts["weight_shape"].tolist()
        if stated != [rows, columns]:
            raise ValueError(f"weight_shape: expected {[rows, columns]}, found {stated}")

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        codes, zeros = parts["weight_packed"].contiguous().view(torch.uint8), None
        if not self.symmetric:
            zeros = _from_words(parts["weight_zero_point"].t(), self.bits, rows).t().contiguous()
        scales = _scales(parts["weight_scale"], self.bits).expand(rows, -1)
        if self.bits == 8:
            codes, zeros = _signed(codes[:, :columns]), None if zeros is None else _signed(zeros)
        else:
            codes = codes[:, : (columns + 1) // 2]
        return QuantizedMatrix(self.kind, codes.contiguous(), scales, zeros, self.group, (rows, columns))

    def encode(self, matrix: QuantizedMatrix, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        codes = matrix.codes if self.bits == 4 else _signed(matrix.codes.view(torch.uint8)).view(torch.uint8)
        if self.bits == 4 and matrix.shape[1] % 2:
            raise ValueError(f"rows of {matrix.shape[1]} codes end in half a byte")
        padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4))
        return {
            "weight_packed": padded.contiguous().view(torch.int32),
            "weight_scale": matrix.scales.to(scale_dtype),
            "weight_shape": torch.tensor(matrix.shape),
        }


@dataclass(frozen=True)
class Plain(Packing):
    """A code a number: int8 or fp8 e4m3, with a scale a tensor, a row, a group, or a block of rows and channels.

    compressed-tensors' ``int-quantized`` and ``float-quantized``, and fp8 as DeepSeek and Qwen publish it, whose scales
    are named ``weight_scale_inv`` (and are multiplied with nevertheless).
    """

    kind: Literal["int8", "fp8"]
    group: int | None = None
    block_rows: int | None = None
    per_tensor: bool = False
    symmetric: bool = True
    scale: str = "weight_scale"
    input_scale: bool = False

    @property
    def zero_points(self) -> bool:  # type: ignore[override]
        return not self.symmetric

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = self._groups(columns)
        scale_rows = rows if self.block_rows is None else -(-rows // self.block_rows)
        shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1)) if self.per_tensor else ((scale_rows, groups),)
        found = {
            "weight": Part(((rows, columns),), ("I8" if self.kind == "int8" else "F8_E4M3",)),
            self.scale: Part(shapes, _FLOATS),
        }
        if not self.symmetric:
            found["weight_zero_point"] = Part(shapes, ("I8",))
        if self.input_scale:  # of activations, which are not rounded here
            found["input_scale"] = Part(((1,), ()), _FLOATS, required=False)
        return found

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
        scales = by_row(_scales(parts[self.scale], 8))
        zeros = None if self.symmetric else by_row(parts["weight_zero_point"])
        return QuantizedMatrix(self.kind, codes, scales, zeros, self.group, (rows, columns))

    def encode(self, matrix: QuantizedMatrix, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": matrix.codes, self.scale: matrix.scales.to(scale_dtype)}


@dataclass(frozen=True)
class Gptq(Packing):
    """GPTQ's: 4-bit codes in int32 words along K, zero points along N, scales (G, N); everything is transposed.

    ``zero_offset``: what is added to a stored zero point: 1 in the first version of the format, 0 in the second.
    """

    group: int | None
    zero_offset: int
    kind = "int4"
    zero_points = True

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = self._groups(columns)
        if rows % 8 or columns % 8:
            raise ValueError(f"words of eight codes do not divide its shape {(rows, columns)}")
        return {
            "qweight": Part(((columns // 8, rows),), ("I32",)),
            "qzeros": Part(((groups, rows // 8),), ("I32",)),
            "scales": Part(((groups, rows),), _FLOATS),
            "g_idx": Part(((columns,),), ("I32",), required=False),
        }

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        order = parts.get("g_idx")
        if order is not None and not torch.equal(order.long(), torch.arange(columns) // (self.group or columns)):
            raise ValueError(
                "its channels were reordered by their activations (act-order: desc_act with a g_idx of its own), so "
                "neighbours share no scale; take a checkpoint quantised with desc_act=False"
            )

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        codes = _from_words(parts["qweight"].t(), 4, columns)
        zeros = (_from_words(parts["qzeros"], 4, rows).t() + self.zero_offset) & 15
        scales = _scales(parts["scales"], 4).t().contiguous()
        return QuantizedMatrix("int4", pack_int4(codes), scales, zeros.contiguous(), self.group, (rows, columns))


@dataclass(frozen=True)
class Awq(Packing):
    """AutoAWQ's ``gemm``: 4-bit codes and zero points in int32 words along N, interleaved; scales (G, N)."""

    group: int | None
    kind = "int4"
    zero_points = True

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = self._groups(columns)
        if rows % 8:
            raise ValueError(f"words of eight codes do not divide its shape {(rows, columns)}")
        return {
            "qweight": Part(((columns, rows // 8),), ("I32",)),
            "qzeros": Part(((groups, rows // 8),), ("I32",)),
            "scales": Part(((groups, rows),), _FLOATS),
        }

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        codes, zeros = (
            _from_words(parts[name], 4, rows).unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1).t()
            for name in ("qweight", "qzeros")
        )
        scales = _scales(parts["scales"], 4).t().contiguous()
        return QuantizedMatrix("int4", pack_int4(codes), scales, zeros.contiguous(), self.group, (rows, columns))


def _from_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Codes (R, columns) uint8 from int32 words (R, W), the first in the lowest bits."""
    # Not contiguous(): of a single word a row it leaves strides as they are.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        data = torch.stack((data & 15, data >> 4), dim=2).flatten(1)
    return data[:, :columns]


def _signed(codes: Tensor) -> Tensor:
    """Unsigned bytes, 128 standing for 0, as int8."""
    return (codes ^ 128).view(torch.int8)


def _scales(stored: Tensor, bits: int) -> Tensor:
    """Scales in float32; codes of 4 and 8 bits, less their zero points, are at most 15 and 448."""
    scales = stored.to(torch.float32)
    least, largest = (float(value) for value in torch.aminmax(scales))
    # NaN fails every comparison.
    if not (least > 0 and largest < torch.finfo(torch.float32).max / (15 if bits == 4 else 448)):
        raise ValueError(f"expected finite positive scales, found {least:g} to {largest:g}")
    return scales
