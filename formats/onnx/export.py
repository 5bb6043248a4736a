"""A bundle exported as an ONNX folder: the graph, its weights as external data, and what ONNX runtimes read beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata as metadata_of
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from ..bundle import SMALL_FILES, Bundle, ProjectionMask
from ..checkpoint import is_finite
from ..errors import AccessError, BundleError, UnsupportedModelError, UsageError
from ..folder import Kind, check_target, replaced_folder
from ..guard import read_json
from ..model_config import Block, ModelConfig
from .graph import Graph, RotaryTables, Step, Weight

DOMAIN = "ai.wisparse"
OPSETS = range(18, 25)  # ReduceMean takes its axes as an input from 18 on; 24 is the newest that was tried
DTYPES: Mapping[str, int] = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
_GRAPH_DOC = (
    "One pass over new tokens: logits (batch, new tokens, vocabulary) in float32, and the cache with the new tokens' "
    "keys and values behind the past ones. Projections are sparse in a pass of one new token on a filled "
    "cache, else dense."
)
_FUNCTION_DOC = (
    "y = where(|x| * channel_scale < threshold, 0, x) @ weight_t. x (..., K); weight_t (K, N), a channel's weights "
    "in a row; channel_scale (K,) and threshold () float32. Rows of dropped channels need not be read."
)


def build_graph(
    config: ModelConfig,
    masks: Mapping[str, ProjectionMask],
    rotaries: Sequence[RotaryTables],
    *,
    opset: int,
    dtype: str,
    metadata: Mapping[str, str],
) -> tuple[onnx.ModelProto, list[Weight]]:
    """The model, and the weights it refers to, which the caller adds as initializers of ``dtype``, one of ``DTYPES``.

    Hidden states between blocks, norms, scores and logits are float32 whatever the ``dtype``.
    """
    graph = Graph()
    step = Step(graph, config, rotaries, opset, DTYPES[dtype])
    hidden = graph.op("Gather", graph.weight("model.embed_tokens.weight"), "input_ids", name="model.embed_tokens")
    hidden = step.wide(step.times(hidden, config.embedding_multiplier))
    for index in range(config.num_blocks):
        hidden = _block(graph, step, config, masks, index, hidden)
    hidden = step.norm(hidden, "model.norm")
    _head(graph, config, hidden)
    inputs, outputs = _signature(config, DTYPES[dtype])
    proto = helper.make_graph(
        graph.nodes, "wisparse", inputs, outputs, initializer=list(graph.constants.values()), doc_string=_GRAPH_DOC
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    version = max(10, helper.find_min_ir_version_for(opsets, ignore_unknown=True))
    model = helper.make_model(
        proto,
        opset_imports=opsets,
        functions=[_sparse_linear(opset)],
        ir_version=version,
        producer_name="wisparse",
        producer_version=metadata_of.version("wisparse"),
        doc_string=f"{config.model_type} decoder with weight-aware activation sparsity, {config.num_blocks} blocks.",
    )
    helper.set_model_props(model, dict(metadata))
    return model, graph.weights


def _sparse_linear(opset: int) -> onnx.FunctionProto:
    """``kernels.reference.sparse_linear`` in plain operators: a NaN score is kept, for it is not less."""
    node = helper.make_node
    return helper.make_function(
        DOMAIN,
        "SparseLinear",
        inputs=["x", "weight_t", "channel_scale", "threshold"],
        outputs=["y"],
        nodes=[
            node("Cast", ["x"], ["x32"], to=TensorProto.FLOAT),
            node("Abs", ["x32"], ["magnitude"]),
            node("Mul", ["magnitude", "channel_scale"], ["score"]),
            node("Less", ["score", "threshold"], ["drop"]),
            node("Constant", [], ["zero32"], value=helper.make_tensor("zero32", TensorProto.FLOAT, [], [0.0])),
            node("CastLike", ["zero32", "x"], ["zero"]),
            node("Where", ["drop", "zero", "x"], ["masked"]),
            node("MatMul", ["masked", "weight_t"], ["y"]),
        ],
        opset_imports=[helper.make_opsetid("", opset)],
        doc_string=_FUNCTION_DOC,
    )


def _block(
    graph: Graph,
    step: Step,
    config: ModelConfig,
    masks: Mapping[str, ProjectionMask],
    index: int,
    hidden: str,
) -> str:
    name = f"model.layers.{index}"
    arch = config.architecture
    biases = dict.fromkeys(arch.qkv, config.qkv_bias)
    biases |= dict.fromkeys((*arch.gate_up, "down_proj"), config.mlp_bias)
    biases["o_proj"] = config.o_bias

    def project(part: str, roles: Sequence[str], x: str, sizes: Sequence[int]) -> list[str]:
        """The outputs of some projections of x, split into ``sizes``."""
        outputs = [_project(graph, step, f"{name}.{part}.{role}", masks, x, biases[role]) for role in roles]
        if len(outputs) == len(sizes):
            return outputs
        return graph.ops("Split", outputs[0], graph.ints(*sizes), count=len(sizes), axis=-1)

    def enter(hidden: str, norm: str | None) -> str:
        """The input of attention or of the MLP."""
        return step.narrow(hidden) if norm is None else step.norm(hidden, f"{name}.{norm}")

    def leave(hidden: str, output: str, norm: str | None) -> str:
        """The hidden states with the output of attention or of the MLP added."""
        output = step.wide(output) if norm is None else step.norm(output, f"{name}.{norm}", wide=True)
        if config.residual_multiplier != 1.0:
            output = graph.op("Mul", output, graph.constant(np.float32(config.residual_multiplier)))
        return graph.op("Add", hidden, output)

    x = enter(hidden, arch.norms.attention_input)
    graph.scope = f"{name}.self_attn"
    own = config.blocks[index]
    if own.shared_values:
        q, k = project("self_attn", config.qkv(index), x, (0, 0))
        parts = [q, k, k]
    else:
        parts = project("self_attn", arch.qkv, x, (config.q_size(index), own.kv_size, own.kv_size))
    q, k, v = step.place(f"{name}.self_attn", index, parts)
    for what, new in (("key", k), ("value", v)):
        graph.nodes.append(
            helper.make_node(
                "Concat",
                [f"past_key_values.{index}.{what}", new],
                [f"present.{index}.{what}"],
                name=f"{name}.self_attn/cache_{what}",
                axis=2,
            )
        )
    mixed = step.attention(q, f"present.{index}.key", f"present.{index}.value", own)
    (attended,) = project("self_attn", ("o_proj",), mixed, (config.hidden_size,))
    hidden = leave(hidden, attended, arch.norms.attention_output)
    x = enter(hidden, arch.norms.mlp_input)
    graph.scope = f"{name}.mlp"
    gate, up = project("mlp", arch.gate_up, x, (config.intermediate_size, config.intermediate_size))
    gated = graph.op("Mul", step.activate(gate), up)
    (down,) = project("mlp", ("down_proj",), gated, (config.hidden_size,))
    hidden = leave(hidden, down, arch.norms.mlp_output)
    if arch.block_scalar is None:
        return hidden
    return graph.op("Mul", hidden, step.wide(graph.weight(f"{name}.{arch.block_scalar}")))


def _project(graph: Graph, step: Step, name: str, masks: Mapping[str, ProjectionMask], x: str, bias: bool) -> str:
    mask, weight = masks[name], graph.weight(f"{name}.weight", transposed=True)
    if mask.sparsity > 0:
        scale = graph.constant(mask.channel_scale.numpy(), f"{name}.channel_scale")
        threshold = graph.constant(np.float32(mask.threshold), f"{name}.threshold")
        threshold = graph.op("Mul", threshold, step.sparse, name=f"{name}/threshold")
        y = graph.op("SparseLinear", x, weight, scale, threshold, domain=DOMAIN, name=name)
    else:
        y = graph.op("MatMul", x, weight, name=name)
    return graph.op("Add", y, graph.weight(f"{name}.bias"), name=f"{name}/bias") if bias else y


def _head(graph: Graph, config: ModelConfig, hidden: str) -> None:
    """logits (B, S, V) float32. Gemm takes the weight as (V, H), so a tied one is stored once, as the embedding."""
    graph.scope = "lm_head"
    op = graph.op
    weight = "model.embed_tokens.weight" if config.tie_word_embeddings else graph.weight("lm_head.weight")
    rows = op("Reshape", hidden, graph.ints(-1, config.hidden_size))
    flat = op("Cast", op("Gemm", rows, weight, transB=1, name="lm_head"), to=TensorProto.FLOAT)
    if config.logits_multiplier != 1.0:
        flat = op("Mul", flat, graph.constant(np.float32(config.logits_multiplier)))
    flat = graph.soft_cap(flat, config.logits_softcap)
    lengths = op("Shape", "input_ids")
    shape = op("Concat", lengths, graph.ints(config.vocab_size), axis=0)
    graph.nodes.append(helper.make_node("Reshape", [flat, shape], ["logits"], name="lm_head/logits"))


def _signature(config: ModelConfig, dtype: int) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    value = helper.make_tensor_value_info
    inputs = [
        value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        value("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
        value("position_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
    ]
    outputs = [value("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", config.vocab_size])]

    for index, block in enumerate(config.blocks):

        def cache(length: str, block: Block = block) -> list[str | int | None]:
            return ["batch_size", block.num_kv_heads, length, block.head_dim]

        for what in ("key", "value"):
            inputs.append(value(f"past_key_values.{index}.{what}", dtype, cache("past_sequence_length")))
            outputs.append(value(f"present.{index}.{what}", dtype, cache("total_sequence_length")))
    return inputs, outputs


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
    """Write a bundle as an ONNX decoder with a KV cache to the folder ``out``.

    Args:
        dtype: ``float32``, ``float16``, or ``auto``: the bundle's own where it is one of these, else ``float32`` (ONNX
            Runtime computes no bfloat16 on a CPU).
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
            values = bundle.checkpoint.tensor(weight.tensor).to(_TYPES[dtype])
            if not is_finite(values):
                raise UnsupportedModelError(
                    f"{weight.tensor}: holds values that {_TYPES[dtype]} cannot; export with --dtype float32"
                )
            values = (values.t() if weight.transposed else values).contiguous()
            data.write(b"\0" * (-data.tell() % _ALIGNMENT))
            tensor = TensorProto(
                name=weight.name,
                data_type=DTYPES[dtype],
                dims=list(values.shape),
                data_location=TensorProto.EXTERNAL,
            )
            for key, value in (("location", DATA), ("offset", data.tell()), ("length", values.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            data.write(values.numpy().data.cast("B"))
            model.graph.initializer.append(tensor)
    onnx.save(model, str(folder / MODEL))
    # By path, so that the checker finds the external data; and weights over 2 GB cannot be checked otherwise.
    onnx.checker.check_model(str(folder / MODEL))
    for name, content in small.items():
        (folder / name).write_bytes(content)
    # The export is no bundle, and its weights are not quantized.
    config = {key: value for key, value in bundle.config_dict.items() if key not in ("wisparse", "quantization_config")}
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENAI, _genai_config(bundle, long_rope=length is not None))
    return sum(mask.sparsity > 0 for mask in bundle.masks.values())


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
