"""A checkpoint with its projections in codes, as compressed-tensors stores them: what a bundle is then written from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model.expected import LM_HEAD
from ..model.model_config import ModelConfig
from ..model.quantised import QuantizedMatrix
from .checkpoint import Checkpoint, StoredWeight, TensorInfo
from .packings import Packed, Packing, Plain
from .remade import remade

__all__ = ["in_codes"]


def in_codes(source: Checkpoint, matrices: Mapping[str, QuantizedMatrix], scale_dtype: torch.dtype) -> Checkpoint:
    """``source`` with the weights of these projections replaced by their codes.

    Args:
        source: not quantised.
        matrices: name of a projection -> its codes, without zero points; all of one kind and group.
        scale_dtype: of the stored scales, which are numbers of this type.
    """
    first = next(iter(matrices.values()))
    packing, form = _packing(first)
    tensors: dict[str, TensorInfo] = {}
    made: dict[str, Callable[[], Tensor]] = {}
    quantised: dict[str, StoredWeight] = {}
    for name, info in source.tensors.items():
        matrix = matrices.get(name.removesuffix(".weight"))
        if matrix is None:
            tensors[name] = info
            continue
        quantised[name] = StoredWeight(packing, *matrix.shape)
        for part, tensor in packing.encode(matrix, scale_dtype).items():
            stored = name.removesuffix("weight") + part
            made[stored] = partial(_same, tensor)
            nbytes = tensor.numel() * tensor.dtype.itemsize
            tensors[stored] = TensorInfo(stored, "", tuple(tensor.shape), tensor.dtype, 0, nbytes)
    config = {**source.config_dict, "quantization_config": _config(source.config, first, form)}
    return remade(source, made, config_dict=config, tensors=tensors, quantised=quantised)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _packing(matrix: QuantizedMatrix) -> tuple[Packing, str]:
    if matrix.kind == "fp8":
        return Plain("fp8"), "float-quantized"
    return Packed(4 if matrix.kind == "int4" else 8, matrix.group, symmetric=True), "pack-quantized"


def _config(config: ModelConfig, matrix: QuantizedMatrix, form: str) -> dict[str, Any]:
    weights = {
        "num_bits": 4 if matrix.kind == "int4" else 8,
        "type": "float" if matrix.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if matrix.group is None else "group",
        "group_size": matrix.group,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    ignore = [LM_HEAD.removesuffix(".weight")]
    if config.delta_net is not None:
        # Linear layers as well, but small ones that are no projections.
        ignore.append(r"re:.*\.linear_attn\.in_proj_[ab]$")
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
