"""Tiny quantised checkpoints: by the package compressed-tensors, GPTQ's and AWQ's written from their descriptions."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wisparse.formats.weight_types import QuantizedMatrix, pack_int4, quantise, unpack_int4

Parts = dict[str, Tensor]
Pack = Callable[[Tensor], Parts]


def quantise_model(plain: Path, out: Path, pack: Pack, config: Mapping[str, Any]) -> Path:
    """A copy of the model in ``plain`` whose projections are stored as ``pack`` has them; biases and norms stay."""
    out.mkdir(parents=True)
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors: Parts = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("_proj.weight", "_mqa.weight")):
            parts = pack(tensor.float())
            tensors |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    change_config(out, lambda d: d.update(quantization_config=dict(config)))
    return out


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((folder / "config.json").read_text())
    change(document)
    (folder / "config.json").write_text(json.dumps(document))


def change_tensors(folder: Path, change: Callable[[Parts], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compressed(
    form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None
) -> tuple[Pack, dict[str, Any]]:
    """How compressed-tensors stores a weight, with scales of our own rounding, and the ``quantization_config`` for it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(weight: Tensor) -> Parts:
        scale, zero = _scale_and_zero(weight, args)
        given = {"weight": weight, "weight_scale": scale}
        if not args.symmetric:
            given["weight_zero_point"] = zero
        return compressor.compress(given, scheme)

    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "input_activations": activations}
    groups = {"group_0": group | {"output_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return pack, {**config, "ignore": ["lm_head"], "config_groups": groups}


def _scale_and_zero(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    if args.strategy == "block":
        (r, c) = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % c, 0, -rows % r))
        blocks = padded.unflatten(0, (-1, r)).unflatten(2, (-1, c))
        scale = blocks.abs().amax((1, 3)) / 448
        return scale, torch.zeros_like(scale)
    if args.strategy == "tensor":
        weight = weight.reshape(1, -1)
    if args.type == "float":
        scale = quantise("fp8", weight).scales
        return (scale[0] if args.strategy == "tensor" else scale), torch.zeros(1)
    rounded = quantise if args.symmetric else quantise_with_zeros
    matrix = rounded("int4" if args.num_bits == 4 else "int8", weight, group=args.group_size)
    zeros = torch.zeros(matrix.scales.shape, dtype=torch.int8)
    if matrix.zeros is not None:
        zeros = (matrix.zeros.to(torch.int16) - (8 if args.num_bits == 4 else 0)).to(torch.int8)
    if args.strategy == "tensor":
        return matrix.scales[0], zeros[0]
    return matrix.scales, zeros


def words(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """(R, 8 W) codes to (R, W) int32 words; the code at place ``order[i]`` of eight goes to bits 4 i to 4 i + 3."""
    places = values.astype(np.uint32).reshape(len(values), -1, 8)[:, :, list(order)]
    return (places << (4 * np.arange(8, dtype=np.uint32))).sum(2, dtype=np.uint32).view(np.int32)


def quantise_with_zeros(
    kind: str, weight: Tensor, *, group: int | None = None, scale_dtype: torch.dtype = torch.float32
) -> QuantizedMatrix:
    low, high = (0, 15) if kind == "int4" else (-128, 127)
    values = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    least, largest = values.amin(2).clamp_(max=0), values.amax(2).clamp_(min=0)
    scales = ((largest - least) / (high - low)).to(scale_dtype).float()
    scales = torch.where(scales > 0, scales, 1.0)
    zeros = (low + torch.round(-least / scales)).clamp_(low, high)
    codes = (torch.round(values / scales[..., None]) + zeros[..., None]).clamp_(low, high).flatten(1)
    codes = pack_int4(codes) if kind == "int4" else codes.to(torch.int8)
    return QuantizedMatrix(kind, codes, scales, zeros.to(codes.dtype), group, tuple(weight.shape))


def int4_parts(weight: Tensor, group: int, zero_points: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A rounded weight's codes (N, K), scales (N, G) and zero points (N, G), as numpy has them."""
    matrix = (quantise_with_zeros if zero_points else quantise)("int4", weight, group=group, scale_dtype=torch.float16)
    zeros = torch.full(matrix.scales.shape, 8, dtype=torch.uint8) if matrix.zeros is None else matrix.zeros
    return unpack_int4(matrix.codes, matrix.shape[1]).numpy(), matrix.scales.numpy(), zeros.numpy()


def gptq(weight: Tensor, group: int = 8, symmetric: bool = True, offset: int = 1) -> Parts:
    """As GPTQ stores a weight: transposed, codes in words along the input, zero points less one along the output."""
    codes, scales, zeros = int4_parts(weight, group, zero_points=not symmetric)
    return {
        "qweight": torch.from_numpy(words(codes).T.copy()),
        "qzeros": torch.from_numpy(words((zeros.T.astype(np.int64) - offset) % 16)),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }


def awq(weight: Tensor, group: int = 8) -> Parts:
    """As AutoAWQ's ``gemm`` stores a weight: codes and zero points in words along the output, even places first."""
    codes, scales, zeros = int4_parts(weight, group, zero_points=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": torch.from_numpy(words(codes.T, order)),
        "qzeros": torch.from_numpy(words(zeros.T, order)),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }


_AUTO_ROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 8, "sym": True,
    "data_type": "int", "act_bits": 16, "iters": 200, "autoround_version": "0.12.3", "block_name_to_quantize": "model.layers",
    "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}},
}  # fmt: skip
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}


def _int(bits: int, strategy: str, symmetric: bool = True) -> dict[str, Any]:
    found = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric}
    return found | ({"group_size": 8} if strategy == "group" else {})


def _fp8(strategy: str, block_rows: int = 4) -> dict[str, Any]:
    found = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    return found | ({"block_structure": [block_rows, 8]} if strategy == "block" else {})


def _block_fp8() -> tuple[Pack, dict[str, Any]]:
    # The last block has fewer rows; the package's first versions store such, but cannot read them.
    pack, _ = compressed("float-quantized", _fp8("block", 5))

    def renamed(weight: Tensor) -> Parts:
        parts = pack(weight)
        return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}

    return renamed, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [5, 8], "activation_scheme": "dynamic"}


def _tensor_fp8() -> tuple[Pack, dict[str, Any]]:
    pack, _ = compressed("float-quantized", _fp8("tensor"))

    def with_input(weight: Tensor) -> Parts:
        parts = pack(weight)
        return {"weight": parts["weight"], "weight_scale": parts["weight_scale"][0], "input_scale": torch.tensor(0.5)}

    return with_input, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


# Without it the package takes weights of eight bits for packed ones.
_ROUNDED = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

PUBLISHED: Mapping[str, Callable[[], tuple[Pack, dict[str, Any]]]] = {
    "pack int4 groups": lambda: compressed("pack-quantized", _int(4, "group")),
    "pack int4 groups, zero points": lambda: compressed("pack-quantized", _int(4, "group", False)),
    "pack int4 rows": lambda: compressed("pack-quantized", _int(4, "channel")),
    "pack int8 rows": lambda: compressed("pack-quantized", _int(8, "channel")),
    "pack int8 groups, zero points": lambda: compressed("pack-quantized", _int(8, "group", False)),
    "int8 rows": lambda: compressed("int-quantized", _int(8, "channel"), _ROUNDED),
    "int8 rows, zero points": lambda: compressed("int-quantized", _int(8, "channel", False), _ROUNDED),
    "int8 tensor": lambda: compressed("int-quantized", _int(8, "tensor"), _ROUNDED),
    "fp8 tensor": lambda: compressed("float-quantized", _fp8("tensor")),
    "fp8 rows": lambda: compressed("float-quantized", _fp8("channel")),
    "fp8 blocks": lambda: compressed("float-quantized", _fp8("block")),
    "fp8 blocks, as DeepSeek's": _block_fp8,
    "fp8 tensor, with activations' scales": _tensor_fp8,
    "gptq": lambda: (gptq, _GPTQ),
    "gptq, zero points": lambda: (lambda w: gptq(w, symmetric=False), _GPTQ | {"sym": False}),
    "gptq, second version": lambda: (lambda w: gptq(w, offset=0), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "awq": lambda: (awq, _AWQ),
    "auto-round": lambda: (gptq, _AUTO_ROUND),
    "auto-round, second version": lambda: (
        lambda w: gptq(w, symmetric=False, offset=0),
        _AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "sym": False},
    ),
    "auto-round, as awq": lambda: (awq, _AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}),
}
