"""Checkpoints derived from another: with tensors made anew, or with quantized projections as compressed-tensors stores them."""

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
class DerivedCheckpoint(Checkpoint):
    """``made``: name -> what makes a tensor that is not in the files, on the CPU and contiguous, when it is read."""

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


def derive(source: Checkpoint, made: Mapping[str, Callable[[], Tensor]], **changes: Any) -> DerivedCheckpoint:
    """``source`` with other attributes (``tensors``, ``config``, …), and with these tensors made, beside its own."""
    same = {field.name: getattr(source, field.name) for field in fields(Checkpoint)} | changes
    before = source.made if isinstance(source, DerivedCheckpoint) else {}
    every = {name: make for name, make in {**before, **made}.items() if name in same["tensors"]}
    return DerivedCheckpoint(**same, made=every)


def quantized_checkpoint(
    source: Checkpoint, matrices: Mapping[str, QuantizedMatrix], scale_dtype: torch.dtype
) -> Checkpoint:
    """``source``, not quantized, with the weights of these projections replaced by their codes.

    ``matrices``, by projection, have no zero points and are all of one kind and group; ``scale_dtype`` is that of the
    stored scales.
    """
    first = next(iter(matrices.values()))
    packing: Packing = Plain("fp8")
    if first.kind != "fp8":
        packing = Packed(4 if first.kind == "int4" else 8, first.group, symmetric=True)
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
            made[stored] = partial(lambda made: made, tensor)
            tensors[stored] = TensorInfo(stored, "", stored, tuple(tensor.shape), tensor.dtype)
    config = {**source.config_dict, "quantization_config": _config(source.config, first)}
    return derive(source, made, config_dict=config, tensors=tensors, quantised=quantised)


def _config(config: ModelConfig, matrix: QuantizedMatrix) -> dict[str, Any]:
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
        "format": "float-quantized" if matrix.kind == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
