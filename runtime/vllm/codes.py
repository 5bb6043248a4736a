"""Quantised weights in vLLM: its parameters, in the packings of ``formats.packings``, and their layouts for products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import BundleError
from wisparse.formats.packings import Packed, Packing, Plain, Transposed
from wisparse.formats.weight_types import QuantizedMatrix, interleaved, split_planes

# Of each part of a packing: dimension of the outputs, of the inputs, and the one that is packed into words.
_Dimensions = tuple[int | None, int | None, int | None]
_DIMENSIONS: dict[str, _Dimensions] = {
    "weight_packed": (0, 1, 1),
    "weight_scale": (0, 1, None),
    "weight_zero_point": (0, 1, 0),
    "weight": (0, 1, None),
    "qweight": (1, 0, 0),
    "qzeros": (1, 0, 1),
    "scales": (1, 0, None),
    "g_idx": (None, 0, None),
}
_DTYPES = {"I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
_OF_GROUPS = ("weight_scale", "weight_zero_point", "qzeros", "scales")


def _dimensions(packing: Packing, part: str) -> _Dimensions:
    if isinstance(packing, Plain) and part == "weight_zero_point":
        return 0, 1, None
    if isinstance(packing, Transposed) and packing.awq and part == "qweight":
        return 1, 0, 1
    return _DIMENSIONS.get(part, (None, None, None))


def create_parameters(
    layer: Any, packing: Packing, name: str, widths: Sequence[int], k: int, split: bool, loader: Callable[..., None]
) -> None:
    """Parameters of a fused layer for vLLM to load the parts of its projections into. ``name``: of the layer, for errors;
    ``widths``: outputs here of each projection; ``k``: inputs here; ``split``: the inputs are split among cards."""
    from vllm.model_executor import parameter

    in_word = 8 if packing.kind == "int4" else 4
    try:
        parts = packing.parts(sum(widths), k)
        if split and isinstance(packing, Packed) and k % in_word:
            raise ValueError(f"words of {in_word} codes do not divide its {k} channels")
        if (isinstance(packing, Transposed) or packing.zero_points) and any(width % in_word for width in widths):
            raise ValueError(f"words of {in_word} codes do not divide its outputs, {list(widths)}")
    except ValueError as error:
        raise BundleError(f"{name}, as tensor parallelism splits it: {error}; use fewer cards") from None
    for part, found in parts.items():
        output, of_input, packed = _dimensions(packing, part)
        if packing.group is None and part in _OF_GROUPS:
            of_input = None
        data = torch.zeros(found.shapes[0], dtype=_DTYPES.get(found.codes[0], torch.float32))
        given: dict[str, Any] = {"data": data, "weight_loader": loader}
        if part == "input_scale" or (part in _OF_GROUPS and getattr(packing, "per_tensor", False)):
            made = parameter.PerTensorScaleParameter(**given | {"data": data.new_zeros(len(widths))})
        elif part == "g_idx":
            # As a checkpoint states it, for all cards. Some leave it out, and vLLM 0.32 does not load it.
            first = layer.tp_rank * k if split else 0
            given["data"] = torch.arange(first, first + k, dtype=torch.int32) // (packing.group or k)
            made = parameter.RowvLLMParameter(input_dim=0, **given)
        elif output is None:
            made = parameter.BasevLLMParameter(**given)
        elif packed is not None:
            words = {"packed_dim": packed, "packed_factor": in_word, "output_dim": output}
            if of_input is None:
                made = parameter.PackedColumnParameter(**words, **given)
            else:
                made = parameter.PackedvLLMParameter(input_dim=of_input, **words, **given)
        elif of_input is None:
            made = parameter.ChannelQuantScaleParameter(output_dim=output, **given)
        else:
            made = parameter.ModelWeightParameter(input_dim=of_input, output_dim=output, **given)
        layer.register_parameter(part, made)


def read_matrices(
    parts: dict[str, Tensor], packing: Packing, name: str, widths: Sequence[int], k: int, first: int
) -> Iterator[QuantizedMatrix]:
    """The projections' weights from the loaded parameters ``parts``; ``first``: the first input channel here."""
    for index, width in enumerate(widths):
        own = {}
        for part, tensor in parts.items():
            output, *_ = _dimensions(packing, part)
            if part in _OF_GROUPS and getattr(packing, "per_tensor", False):
                own[part] = tensor[index : index + 1]
            elif output is not None:
                shapes = (packing.parts(one, k)[part].shapes[0][output] for one in widths)
                begin = [0, *accumulate(shapes)]
                own[part] = tensor.narrow(output, begin[index], begin[index + 1] - begin[index])
        try:
            if "g_idx" in parts:
                packing.check({"g_idx": parts["g_idx"].cpu() - first // (packing.group or k)}, width, k)
            fitted = packing
            if isinstance(packing, Transposed) and packing.symmetric:
                fitted = packing.fitted(own["qzeros"])
            yield fitted.decode(own, width, k)
        except ValueError as error:
            raise BundleError(f"{name}: {error}") from None


def plain_weight(matrices: Sequence[QuantizedMatrix], planes: int, dtype: torch.dtype) -> Tensor:
    """(N, K) for plain torch; of graded weights (2, N, K), the weight and its low plane."""
    weight = torch.cat([matrix.dequantise(dtype) for matrix in matrices])
    if planes == 1:
        return weight
    lows = (replace(matrix, codes=split_planes(matrix.codes)[1]) for matrix in matrices)
    return torch.stack((weight, torch.cat([low.dequantise(dtype) for low in lows])))


def device_weight(matrices: Sequence[QuantizedMatrix], planes: int, dtype: torch.dtype) -> Any:
    """The ``DeviceWeight`` of fused projections, for our kernels."""
    from wisparse.kernels.gpu.weights import empty_weight, store_columns, without_default_zeros

    first, k = matrices[0], matrices[0].shape[1] * planes
    kind, group = ("int4", first.group and 2 * first.group) if planes == 2 else (first.kind, first.group)
    widths, zeros = tuple(matrix.shape[0] for matrix in matrices), first.zeros is not None
    weight = empty_weight(kind, k, widths, group, dtype, first.codes.device, zeros=zeros, planes=planes)
    for index, matrix in enumerate(matrices):
        stored = interleaved(matrix) if planes == 2 else matrix
        store_columns(weight, index, stored.codes, stored.scales, stored.zeros)
    return without_default_zeros(weight)
