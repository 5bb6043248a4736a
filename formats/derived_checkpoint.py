"""A checkpoint with its projections in codes, as compressed-tensors stores them: what a bundle is then written from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, StoredWeight, TensorInfo, is_finite
from .model_config import LM_HEAD, ModelConfig
from .packings import Packed, Packing, Plain
from .weight_types import QuantizedMatrix


@dataclass(frozen=True)
class Remade(Checkpoint):
    """``made``: name -> what makes a tensor that is not in the files, on the CPU and contiguous."""

    made: Mapping[str, Callable[[], Tensor]]

    def chunks(self, name: str, chunk_bytes: int = 32 << 20) -> Iterator[Tensor]:
        if name not in self.made:
            yield from super().chunks(name, chunk_bytes)
            return
        tensor = self._stored(name).flatten()
        yield from tensor.split(max(1, chunk_bytes // tensor.dtype.itemsize))

    def _stored(self, name: str) -> Tensor:
        if name not in self.made:
            return super()._stored(name)
        tensor = self.made[name]()
        if tensor.is_floating_point() and not is_finite(tensor):
            raise self.error(f"{name}: made anew, it holds values beyond {tensor.dtype}'s range")
        return tensor


def remade(source: Checkpoint, made: Mapping[str, Callable[[], Tensor]], **changes: Any) -> Remade:
    """``source`` with other attributes (``tensors``, ``config``, …), and with these tensors made.

    What ``source`` makes itself, and is still among the tensors, it makes here too.
    """
    same = {field.name: getattr(source, field.name) for field in fields(Checkpoint)} | changes
    before = source.made if isinstance(source, Remade) else {}
    every = {name: make for name, make in {**before, **made}.items() if name in same["tensors"]}
    return Remade(**same, made=every)


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
            tensors[stored] = TensorInfo(stored, "", stored, tuple(tensor.shape), tensor.dtype)
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
