"""A bundle exported as an ONNX folder: the graph, its weights as external data, and what ONNX runtimes read beside it.

Weights go from the bundle's files to ``model.onnx.data`` one at a time, so an export needs the memory of the largest
weight, not of the model. The folder is made under another name and renamed when it is complete and checked
(`folder`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import torch
from onnx import TensorProto

from ..bundle import SMALL_FILES, Bundle
from ..errors import AccessError, BundleError, UnsupportedModelError, UsageError
from ..guard.folder import Kind, check_target, replaced_folder
from ..guard.safe_json import read_json
from ..weights.checkpoint import is_finite
from .graph import DTYPES, OPSETS, build_graph
from .step import RotaryTables

__all__ = ["OnnxExport", "export_onnx"]

MODEL = "model.onnx"
DATA = "model.onnx.data"
CONFIG = "config.json"
GENAI = "genai_config.json"
# Which files belong to the export: by this, and by nothing that others write too, an export is known for ours.
MANIFEST = "wisparse_export.json"
_MAX_MANIFEST_BYTES = 1 << 20

# Memory-mapping wants weights on page boundaries; onnxruntime maps those of 4096.
_ALIGNMENT = 4096
_TYPES = {"float32": torch.float32, "float16": torch.float16}


def _files_of(folder: Path) -> set[str] | None:
    try:
        manifest = read_json(folder, MANIFEST, _MAX_MANIFEST_BYTES, BundleError)
    except (BundleError, AccessError):
        return None
    files = manifest.get("files")
    if manifest.get("what") != EXPORT.name or not isinstance(files, list):
        return None
    return {name for name in files if isinstance(name, str)}


EXPORT = Kind("an ONNX export", "export", MANIFEST, _files_of)


@dataclass(frozen=True)
class OnnxExport:
    """What was written. ``num_bytes`` counts every file of the folder; ``notes`` say what its users have to know."""

    folder: Path
    opset: int
    dtype: str
    num_bytes: int
    num_sparse: int
    notes: tuple[str, ...] = ()


def export_onnx(
    bundle: Bundle,
    out: str | os.PathLike[str],
    rotaries: Sequence[RotaryTables],
    *,
    opset: int = 21,
    dtype: str = "auto",
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
    check_files: Sequence[str] = (),
) -> OnnxExport:
    """Write a bundle as an ONNX decoder with a KV cache.

    Args:
        out: the folder to make.
        rotaries: the frequencies that the runtime uses, one entry for each of the model's rotary embeddings.
        opset: one of ``OPSETS``.
        dtype: ``float32``, ``float16``, or ``auto``: the bundle's own where it is one of these, else ``float32``
            (ONNX Runtime computes no bfloat16 on a CPU).
        overwrite: replace ``out`` if it holds an earlier export.
        check: called with the unfinished folder; if it raises, nothing is left behind.
        check_files: names of the files that it makes there, and removes.

    Raises:
        UsageError: ``out`` exists (with ``overwrite``: and is no export, or holds other files too), an unknown opset or
            dtype.
        UnsupportedModelError: a weight does not fit into float16, or some blocks are recurrent.
        ResourceError: the disk is full.
    """
    if opset not in OPSETS:
        raise UsageError(f"opset: expected {OPSETS.start} to {OPSETS.stop - 1}, found {opset}")
    if dtype == "auto":
        dtype = bundle.config.dtype if bundle.config.dtype in DTYPES else "float32"
    if dtype not in DTYPES:
        raise UsageError(f"dtype: expected auto, {' or '.join(DTYPES)}, found {dtype!r}")
    if bundle.config.delta_net is not None:
        raise UnsupportedModelError(
            f"{bundle.config.model_type}: expected blocks with attention, found recurrent ones, which have no ONNX "
            "export yet; run the bundle with wisparse generate"
        )
    out = Path(os.path.abspath(out))
    check_target(out, EXPORT, overwrite)
    small = {name: content for name in SMALL_FILES if (content := bundle.read_bytes(name)) is not None}
    names = [MODEL, DATA, CONFIG, GENAI, MANIFEST, *small]
    with replaced_folder(out, EXPORT, [*names, *check_files], overwrite=overwrite) as partial:
        num_sparse = _write(bundle, partial, small, rotaries, opset, dtype)
        _write_json(partial / MANIFEST, {"what": EXPORT.name, "files": sorted(names)})
        if check is not None:
            check(partial)
    num_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return OnnxExport(out, opset, dtype, num_bytes, num_sparse, _notes(bundle, rotaries, dtype))


def _switch_length(rotaries: Sequence[RotaryTables]) -> int | None:
    """Where LongRoPE's frequencies change, if they do."""
    return min((rotary.switch_length for rotary in rotaries if rotary.long_frequencies is not None), default=None)


def _notes(bundle: Bundle, rotaries: Sequence[RotaryTables], dtype: str) -> tuple[str, ...]:
    notes = []
    if bundle.checkpoint.quantised:
        kinds = sorted({stored.packing.kind for stored in bundle.checkpoint.quantised.values()})
        notes.append(
            f"the bundle's {' and '.join(kinds)} weights are widened to {dtype}: the same numbers, but the file is as "
            "large as that of an unquantised model"
        )
    length = _switch_length(rotaries)
    if length is not None:
        notes.append(
            f"LongRoPE: a prompt of any length is right, but a sequence that grows beyond {length:,} positions while "
            "it is decoded has to be read anew at that point, as one prompt; onnxruntime-genai does so at 4,096 "
            "positions, for one sequence at a time, optimum-onnx does not"
        )
    return tuple(notes)


def _write(
    bundle: Bundle, folder: Path, small: Mapping[str, bytes], rotaries: Sequence[RotaryTables], opset: int, dtype: str
) -> int:
    recipe = bundle.recipe
    metadata = {
        "base_model": recipe.base_model,
        "base_revision": recipe.base_revision or "",
        "method": recipe.method,
        "sparsity": repr(bundle.sparsity),
    }
    length = _switch_length(rotaries)
    if length is not None:
        metadata["longrope_switch_length"] = str(length)
    model, weights = build_graph(bundle.config, bundle.masks, rotaries, opset=opset, dtype=dtype, metadata=metadata)
    with open(folder / DATA, "wb") as data:
        for weight in dict.fromkeys(weights):
            values = _convert(bundle, weight.tensor, _TYPES[dtype])
            model.graph.initializer.append(
                _append(data, weight.name, values.t().contiguous() if weight.transposed else values, DTYPES[dtype])
            )
    onnx.save(model, str(folder / MODEL))
    # By path, so that the checker finds the external data; and weights over 2 GB cannot be checked otherwise.
    onnx.checker.check_model(str(folder / MODEL))
    for name, content in small.items():
        (folder / name).write_bytes(content)
    # What is written here has no sidecar, and is no bundle; its weights are widened.
    config = {key: value for key, value in bundle.config_dict.items() if key not in ("wisparse", "quantization_config")}
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENAI, _genai_config(bundle, long_rope=length is not None))
    return sum(mask.sparsity > 0 for mask in bundle.masks.values())


def _convert(bundle: Bundle, name: str, dtype: torch.dtype) -> torch.Tensor:
    values = bundle.checkpoint.tensor(name).to(dtype)
    if not is_finite(values):
        raise UnsupportedModelError(f"{name}: holds values that {dtype} cannot; export with --dtype float32")
    return values


def _append(data: BinaryIO, name: str, values: torch.Tensor, dtype: int) -> TensorProto:
    """Write a weight to the data file; returns the initializer that points at it."""
    data.write(b"\0" * (-data.tell() % _ALIGNMENT))
    offset = data.tell()
    data.write(values.contiguous().numpy().data.cast("B"))
    tensor = TensorProto(name=name, data_type=dtype, dims=list(values.shape), data_location=TensorProto.EXTERNAL)
    for key, value in (("location", DATA), ("offset", offset), ("length", data.tell() - offset)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _genai_config(bundle: Bundle, long_rope: bool) -> dict[str, Any]:
    """onnxruntime-genai's description of a decoder."""
    config = bundle.config
    generation = json.loads(bundle.read_bytes("generation_config.json") or b"{}")

    def token(key: str) -> Any:
        found = generation.get(key)
        return bundle.config_dict.get(key) if found is None else found

    end = token("eos_token_id")
    pad = token("pad_token_id")
    first = end[0] if isinstance(end, list) and end else end
    ids: Mapping[str, Any] = {
        "bos_token_id": token("bos_token_id"),
        "eos_token_id": end,
        "pad_token_id": first if pad is None else pad,
    }
    return {
        "model": {
            **{key: value for key, value in ids.items() if value is not None},
            "context_length": config.max_position_embeddings,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": MODEL,
                "head_size": config.head_dim,
                "hidden_size": config.hidden_size,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": config.num_heads,
                "num_hidden_layers": config.num_blocks,
                "num_key_value_heads": config.num_kv_heads,
            },
            # Its word for "a decoder with these inputs and outputs", for it knows few families by name. By Phi-3's it
            # reads a sequence anew where LongRoPE's frequencies change.
            "type": "phi3" if long_rope else "decoder",
            "vocab_size": config.vocab_size,
        },
        "search": {
            "do_sample": False,
            "max_length": config.max_position_embeddings,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            # The graph appends to the cache; a shared buffer would need to write into it.
            "past_present_share_buffer": False,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
