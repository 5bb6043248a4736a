"""A bundle's decoder as an ONNX graph, with the names that optimum and onnxruntime-genai expect.

    input_ids, attention_mask, position_ids, past_key_values.N.key/value  ->  logits, present.N.key/value

The graph is written node by node, not traced: so names stay Hugging Face's, weights never have to be in memory
together, and equal bundles give equal files. A sparse projection is one node ``ai.wisparse::SparseLinear``. The file
carries that function's body in plain operators, so every ONNX runtime runs it; one that registers an operator of that
name may skip the dropped channels instead, whose weights are whole rows of ``weight_t`` (K, N).

Sparse is what our runtime makes sparse by default: a pass of one new token on a filled cache. For any other pass the
thresholds that reach the nodes are 0, which keeps every channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata as metadata_of

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..bundle import ProjectionMask
from ..model.model_config import Block, ModelConfig
from .nodes import Graph, Weight
from .step import RotaryTables, Step

__all__ = ["ADDED", "DOMAIN", "DTYPES", "OPSETS", "build_graph"]

DOMAIN = "ai.wisparse"
# Behind a projection's name: the node that adds its mask's output bias.
ADDED = "/output_bias"
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
    """The model without its weights.

    Args:
        rotaries: the tables of every entry of ``config.rotaries``.
        opset: one of ``OPSETS``.
        dtype: of weights and activations, one of ``DTYPES``; hidden states between blocks, norms, scores and logits are
            float32 in any case.
        metadata: key-value pairs for the model file.

    Returns:
        The model, and the weights it refers to, which the caller adds as initializers of ``dtype``.
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
        """The outputs of some projections of x, cut into ``sizes``."""
        outputs = [_project(graph, step, f"{name}.{part}.{role}", masks, x, biases[role]) for role in roles]
        if len(outputs) == len(sizes):
            return outputs
        return graph.ops("Split", outputs[0], graph.ints(*sizes), count=len(sizes), axis=-1)

    def enter(hidden: str, role: str | None) -> str:
        """What a half reads of the hidden states."""
        return step.narrow(hidden) if role is None else step.norm(hidden, f"{name}.{role}")

    def leave(hidden: str, half: str, role: str | None) -> str:
        """The hidden states with a half's output added."""
        half = step.wide(half) if role is None else step.norm(half, f"{name}.{role}", wide=True)
        if config.residual_multiplier != 1.0:
            half = graph.op("Mul", half, graph.constant(np.float32(config.residual_multiplier)))
        return graph.op("Add", hidden, half)

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
        if mask.output_bias is not None:
            added = graph.op("Mul", graph.constant(mask.output_bias.numpy(), f"{name}.output_bias"), step.sparse)
            y = graph.op("Add", y, step.narrow(added), name=f"{name}{ADDED}")
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
