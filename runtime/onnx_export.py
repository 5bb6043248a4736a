"""Export of a bundle to an ONNX folder with the files of ONNX runtimes, and a check of the result."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from wisparse.formats.block_ops import not_yet
from wisparse.formats.bundle import SMALL_FILES, Bundle
from wisparse.formats.errors import AccessError, BundleError, UnsupportedModelError, UsageError, WisparseError
from wisparse.formats.folder import Kind, check_target, replaced_folder
from wisparse.formats.guard import dump_json, expect, read_json
from wisparse.formats.tensor_file import is_finite
from wisparse.formats.tensors import expected_tensors
from wisparse.kernels.reference import keep_mask, scores

from .decoding.rotary import switch_length
from .onnx_graph import DOMAIN, DTYPES, DecoderGraph
from .torch.decoder import TorchDecoder

OPSETS = range(18, 25)  # ReduceMean has axes as an input since 18; 24 is the newest tested one
MODEL, DATA, GENAI = "model.onnx", "model.onnx.data", "genai_config.json"
# The manifest of an export, which identifies it.
MANIFEST = "wisparse_export.json"
_MAX_MANIFEST_BYTES = 1 << 20
_ALIGNMENT = 4096  # onnxruntime maps weights on page boundaries

# Size of the check: prompt tokens, and decode steps.
_PROMPT, _STEPS = 24, 16
# Tolerance of the difference, relative to the largest value: about ten times the observed one.
_DENSE = {"float32": 1e-4, "float16": 2e-2}
_PROJECTION = {"float32": 1e-5, "float16": 5e-3}
# Relative distance to the threshold within which a score may be on either side: ONNX Runtime on CPUs computes with a higher
# precision than the float16 activation that it returns.
_ROUNDING = {"float32": 1e-6, "float16": 1e-3}


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


def export_onnx(
    bundle: Bundle,
    out: str | os.PathLike[str],
    *,
    opset: int = 21,
    dtype: str = "auto",
    overwrite: bool = False,
    check: bool = True,
) -> dict[str, Any]:
    """Write a bundle as an ONNX decoder with a KV cache to the folder ``out``; returns what ``--json`` prints.

    Args:
        dtype: ``float32``, ``float16``, or ``auto``: the bundle's own where it is one of these, else ``float32`` (ONNX
            Runtime computes no bfloat16 on a CPU).
        check: run the result and compare it with our runtime; nothing is written if they disagree.
    """
    config, checkpoint, recipe = bundle.config, bundle.checkpoint, bundle.recipe
    expect(opset in OPSETS, "opset", f"{OPSETS.start} to {OPSETS.stop - 1}", opset)
    if dtype == "auto":
        dtype = config.dtype if config.dtype in DTYPES else "float32"
    expect(dtype in DTYPES, "dtype", f"auto, {' or '.join(DTYPES)}", dtype)
    lacking = not_yet(config, "onnx") or ("keys and values that blocks share" if config.shares_kv else None)
    if lacking is not None:
        known = "attention of every block's own, and dense MLPs"
        why = f"expected {known}, found {lacking}, which have no ONNX export yet; run the bundle with wisparse generate"
        raise UnsupportedModelError(f"{config.model_type}: {why}")
    if recipe.graded:
        if bundle.sparsity:
            raise UsageError("export-onnx: a graded bundle is exported as its dense model alone: add --sparsity 0")
        # Without planes its output layer is the stored one, which our back ends round to int8 beside graded weights.
        levels = {
            level: {name: replace(mask, plane_thresholds=()) for name, mask in masks.items()}
            for level, masks in bundle.levels.items()
        }
        bundle = replace(bundle, recipe=replace(recipe, plane_bits=()), levels=levels)
    graph = DecoderGraph(bundle, opset, dtype)
    model = graph.build()
    read = {tensor for tensor, _ in graph.weights.values()}
    if unread := [name for name in expected_tensors(config) if name not in read]:
        raise UnsupportedModelError(
            f"{config.model_type}: {unread[0]} has no ONNX export yet; run the bundle with wisparse generate"
        )
    notes = []
    properties = {"base_model": recipe.base_model, "base_revision": recipe.base_revision or ""}
    properties |= {"method": recipe.method, "sparsity": repr(bundle.sparsity)}
    if checkpoint.quantised:
        kinds = sorted({stored.packing.kind for stored in checkpoint.quantised.values()})
        notes.append(
            f"the bundle's {' and '.join(kinds)} weights are widened to {dtype}: the same numbers, but the file is as "
            "large as that of an unquantised model"
        )
    length = switch_length(config)
    if length is not None:
        properties["longrope_switch_length"] = str(length)
        notes.append(
            f"LongRoPE: a prompt of any length is right, but a sequence that grows beyond {length:,} positions while "
            "it is decoded has to be read anew at that point, as one prompt; onnxruntime-genai does so at 4,096 "
            "positions, for one sequence at a time, optimum-onnx does not"
        )
    helper.set_model_props(model, properties)
    # The export is no bundle, and its weights are not quantized.
    plain = {key: value for key, value in bundle.config_dict.items() if key not in ("wisparse", "quantization_config")}
    small = {name: content for name in SMALL_FILES if (content := bundle.read_bytes(name)) is not None}
    small |= {"config.json": dump_json(plain), GENAI: dump_json(_genai_config(bundle))}
    names = {MODEL, DATA, MANIFEST, *small}
    small[MANIFEST] = dump_json({"what": EXPORT.name, "files": sorted(names)})
    found = None
    out = Path(os.path.abspath(out))
    check_target(out, EXPORT, overwrite)
    with replaced_folder(out, EXPORT, names, overwrite=overwrite) as partial:
        with open(partial / DATA, "wb") as data:
            for name, (tensor, transposed) in graph.weights.items():
                values = checkpoint.tensor(tensor).to(getattr(torch, dtype))
                if not is_finite(values):
                    raise UnsupportedModelError(
                        f"{tensor}: holds values that {values.dtype} cannot; export with --dtype float32"
                    )
                values = (values.t() if transposed else values).contiguous()
                data.write(b"\0" * (-data.tell() % _ALIGNMENT))
                initializer = TensorProto(
                    name=name, data_type=DTYPES[dtype], dims=list(values.shape), data_location=TensorProto.EXTERNAL
                )
                for key, entry in (("location", DATA), ("offset", data.tell()), ("length", values.nbytes)):
                    initializer.external_data.add(key=key, value=str(entry))
                data.write(values.numpy().data.cast("B"))
                model.graph.initializer.append(initializer)
        onnx.save(model, str(partial / MODEL))
        # By path, for external data and for weights over 2 GB.
        onnx.checker.check_model(str(partial / MODEL))
        for name, content in small.items():
            (partial / name).write_bytes(content)
        if check:
            found = check_export(partial, bundle, dtype)
    return {
        "folder": str(out),
        "opset": opset,
        "dtype": dtype,
        "num_bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "num_sparse_projections": sum(mask.sparsity > 0 for mask in bundle.masks.values()) if bundle.sparsity else 0,
        "check": found,
        "notes": notes,
    }


def _genai_config(bundle: Bundle) -> dict[str, Any]:
    """onnxruntime-genai's config of a decoder; its default names of inputs and outputs are ours."""
    config = bundle.config
    generation = json.loads(bundle.read_bytes("generation_config.json") or b"{}")
    ids = {key: generation.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids = {key: bundle.config_dict.get(key) if found is None else found for key, found in ids.items()}
    if ids["pad_token_id"] is None:
        end = ids["eos_token_id"]
        ids["pad_token_id"] = end[0] if isinstance(end, list) and end else end
    return {
        "model": {
            **{key: found for key, found in ids.items() if found is not None},
            "context_length": config.max_position_embeddings,
            "decoder": {
                "filename": MODEL,
                "head_size": config.head_dim,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.num_heads,
                "num_hidden_layers": config.num_blocks,
                "num_key_value_heads": config.num_kv_heads,
            },
            # A generic decoder type, as it knows few families. With Phi-3's type it prefills a sequence again when
            # LongRoPE's frequencies change.
            "type": "decoder" if switch_length(config) is None else "phi3",
            "vocab_size": config.vocab_size,
        },
        # The graph concatenates to the cache, so it cannot share a buffer.
        "search": {"max_length": config.max_position_embeddings, "past_present_share_buffer": False},
    }


class OnnxDecoder:
    """Runs an exported folder on the CPU, one batch at a time."""

    def __init__(self, folder: Path, model: onnx.ModelProto | None = None) -> None:
        """``model``: replaces the folder's model, with the same weights."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        given = str(folder / MODEL) if model is None else model.SerializeToString()
        self.session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        self.reset(1)

    def reset(self, batch: int) -> None:
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self.mask = np.zeros((batch, 0), dtype=np.int64)
        self.cache = {
            value.name: np.zeros((batch, value.shape[1], 0, value.shape[3]), dtype=types[value.type])
            for value in self.session.get_inputs()
            if value.name.startswith("past_key_values.")
        }

    def run(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Append tokens (B, L) int64; ``mask``: 0 for left padding. Returns all outputs."""
        self.mask = np.concatenate((self.mask, np.ones_like(tokens) if mask is None else mask), axis=1)
        positions = np.maximum(self.mask.cumsum(axis=1) - 1, 0)[:, -tokens.shape[1] :]
        feeds = {"input_ids": tokens, "attention_mask": self.mask, "position_ids": positions, **self.cache}
        names = [value.name for value in self.session.get_outputs()]
        found = dict(zip(names, self.session.run(None, feeds), strict=True))
        self.cache = {name: found[name.replace("past_key_values.", "present.")] for name in self.cache}
        return found


def check_export(folder: Path, bundle: Bundle, dtype: str) -> dict[str, float]:
    """Compare an export with our decoder in float32; WisparseError if they differ by more than ``dtype`` explains.

    Dense logits of a prompt in two chunks are compared end to end, sparse projections node by node, each on its own
    input in a decoding step: end to end, a score within a rounding error of its threshold is kept by one and dropped by
    the other, which changes the next blocks' scores in turn. How far that goes is reported, not judged: ``sparse_kl``,
    ``sparse_top1`` (of the sparse steps' logits against ours: mean KL in nats, share with the same first choice) and,
    to compare with, ``masks_kl`` between our sparse and our dense steps. Errors: largest difference over largest value.
    """
    config = bundle.config
    # With LongRoPE, stay below the length at which all angles change.
    length = min(_PROMPT + _STEPS, config.max_position_embeddings, switch_length(config) or _PROMPT + _STEPS)
    prompt = max(2, length - _STEPS)
    ours = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=length)
    # Text sampled from the model: on random tokens a trained model is less stable numerically.
    generator, written = torch.Generator().manual_seed(0), [int(bundle.config_dict.get("bos_token_id") or 0)]
    logits = ours.prefill(0, torch.tensor(written), 1)
    while len(written) < length:
        written.append(int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)))
        logits = ours.decode(torch.tensor(written[-1:]))[0]
    ids = torch.tensor(written)
    dense = ours.logits(ids, length)
    ours.prefill(0, ids[:prompt], prompt)
    sparse = torch.cat([ours.decode(ids[i : i + 1]) for i in range(prompt, length)])
    ours.close()

    theirs = OnnxDecoder(folder)

    def forward(start: int, end: int) -> torch.Tensor:
        return torch.from_numpy(theirs.run(ids[None, start:end].numpy())["logits"][0])

    found = torch.cat([forward(0, prompt // 2), forward(prompt // 2, prompt)])
    error = float((found - dense[:prompt]).abs().max() / dense[:prompt].abs().max())
    projection_error = _check_projections(folder, bundle, dtype, theirs, ids[None, prompt : prompt + 1].numpy())
    steps = torch.cat([forward(i, i + 1) for i in range(prompt, length)])
    for what, value, limit in (
        ("the dense logits", error, _DENSE[dtype]),
        ("the sparse projections", projection_error, _PROJECTION[dtype]),
    ):
        if not value <= limit:  # a NaN fails too
            raise WisparseError(
                f"the ONNX model does not agree with our runtime: {what} differ by {value:.2g}, expected at most "
                f"{limit:.2g} in {dtype}; nothing was written"
            )

    def kl(found: torch.Tensor) -> float:
        """Mean KL(ours, sparse || ``found``) of logits (T, V), in nats."""
        left, right = (torch.log_softmax(logits.double(), dim=-1) for logits in (sparse, found))
        return float((left.exp() * (left - right)).sum(-1).mean())

    return {
        "dense_error": error,
        "projection_error": projection_error,
        "sparse_kl": kl(steps),
        "masks_kl": kl(dense[prompt:]),
        "sparse_top1": float((sparse.argmax(-1) == steps.argmax(-1)).float().mean()),
    }


def _check_projections(folder: Path, bundle: Bundle, dtype: str, filled: OnnxDecoder, token: np.ndarray) -> float:
    """Largest relative error of a sparse node for its own input, in the step that appends ``token``. Contributions of
    channels with a score within ``_ROUNDING`` of the threshold are not counted."""
    # The same model with the inputs and outputs of all sparse nodes as outputs, and the same weight files.
    model = onnx.load(str(folder / MODEL), load_external_data=False)
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    for name in dict.fromkeys(value for node in nodes for value in (node.input[0], node.output[0])):
        model.graph.output.append(helper.make_tensor_value_info(name, DTYPES[dtype], None))
    probe = OnnxDecoder(folder, model)
    probe.mask, probe.cache = filled.mask, filled.cache
    values = probe.run(token)
    errors = [0.0]
    for node in nodes:
        mask = bundle.masks[node.name]
        x, found = (torch.from_numpy(values[name]).flatten() for name in (node.input[0], node.output[0]))
        weight = bundle.checkpoint.tensor(f"{node.name}.weight").to(x.dtype).double()
        kept = torch.where(keep_mask(x, mask.channel_scale, mask.threshold), x, 0)
        expected = weight @ kept.double()
        close = (scores(x, mask.channel_scale) - mask.threshold).abs() <= _ROUNDING[dtype] * mask.threshold
        undecided = weight[:, close].abs() @ x[close].double().abs()
        difference = (found.double() - expected).abs() - undecided
        # A projection whose channels are all dropped has output 0.
        errors.append(float(difference.max() / expected.abs().max().clamp(min=1e-30)))
    return float(np.max(errors))  # unlike max(), returns NaN if there is one
