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
from dataclasses import dataclass, field
from importlib import metadata as metadata_of
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..architectures import ModelConfig
from ..bundle import ProjectionMask

__all__ = ["DOMAIN", "DTYPES", "OPSETS", "RotaryTables", "Weight", "build_graph"]

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
_LOWEST = np.float32(np.finfo(np.float32).min)


@dataclass(frozen=True)
class RotaryTables:
    """Rotary frequencies, as the runtime uses them.

    Attributes:
        frequencies: (rotary_dim / 2,) float32, radians per position.
        scaling: what cos and sin are multiplied by.
        long_frequencies: LongRoPE: those for sequences of more than ``switch_length`` positions, else None.
    """

    frequencies: np.ndarray
    scaling: float = 1.0
    long_frequencies: np.ndarray | None = None
    switch_length: int = 0


@dataclass(frozen=True)
class Weight:
    """An initializer that the graph wants and the caller writes: ``tensor`` of the checkpoint, perhaps transposed."""

    name: str
    tensor: str
    transposed: bool


@dataclass
class _Graph:
    """Nodes and small constants under way; every method returns the name of a value."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    scope: str = ""

    def op(self, kind: str, *inputs: str, domain: str = "", name: str = "", **attributes: Any) -> str:
        return self.ops(kind, *inputs, count=1, domain=domain, name=name, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, count: int, domain: str = "", name: str = "", **attributes: Any
    ) -> list[str]:
        base = name or f"{self.scope}/{kind}"
        number = self.counts[base] = self.counts.get(base, -1) + 1
        node = base if not number else f"{base}_{number}"
        outputs = [f"{node}_out{index or ''}" for index in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=node, domain=domain, **attributes))
        return outputs

    def constant(self, value: np.ndarray | np.float32, name: str = "") -> str:
        """An inline constant; unnamed ones, scalars and short vectors, with equal content are one."""
        array = np.asarray(value, order="C")
        # Python writes a number so that it can be read back: names are equal only if values are.
        written = ",".join(str(number) for number in array.ravel().tolist())
        name = name or f"const/{array.dtype}/{written if not array.shape else f'[{written}]'}"
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def weight(self, tensor: str, transposed: bool = False) -> str:
        # A transposed weight has another name: whoever looks for the Hugging Face one must not find other bytes.
        name = f"{tensor}_t" if transposed else tensor
        self.weights.append(Weight(name, tensor, transposed))
        return name


def build_graph(
    config: ModelConfig,
    masks: Mapping[str, ProjectionMask],
    rotary: RotaryTables,
    *,
    opset: int,
    dtype: str,
    metadata: Mapping[str, str],
) -> tuple[onnx.ModelProto, list[Weight]]:
    """The model without its weights.

    Args:
        opset: one of ``OPSETS``.
        dtype: of weights and activations, one of ``DTYPES``; scores, norms, softmax and logits are float32 in any case.
        metadata: key-value pairs for the model file.

    Returns:
        The model, and the weights it refers to, which the caller adds as initializers of ``dtype``.
    """
    graph = _Graph()
    step = _Step(graph, config, rotary, DTYPES[dtype])
    hidden = graph.op("Gather", graph.weight("model.embed_tokens.weight"), "input_ids", name="model.embed_tokens")
    for index in range(config.num_blocks):
        hidden = _block(graph, step, config, masks, index, hidden)
    graph.scope = "model.norm"
    hidden = step.norm(hidden, graph.weight("model.norm.weight"))
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


class _Step:
    """What all blocks share in one pass: lengths, attention biases, cosines and sines, sparse or not."""

    def __init__(self, graph: _Graph, config: ModelConfig, rotary: RotaryTables, dtype: int) -> None:
        self.graph, self.config, self.dtype = graph, config, dtype
        graph.scope = "step"
        op = graph.op
        sequence = op("Squeeze", op("Shape", "input_ids", start=1, end=2), graph.ints(0))
        past = op("Squeeze", op("Shape", "past_key_values.0.key", start=2, end=3), graph.ints(0))
        one, zero = (graph.constant(np.array(value, dtype=np.int64)) for value in (1, 0))
        decoding = op("And", op("Equal", sequence, one), op("Greater", past, zero))
        self.sparse = op("Cast", decoding, to=TensorProto.FLOAT)  # 1 or 0: what the thresholds are multiplied by
        total = op("Add", past, sequence)
        # Positions in the cache, padding included: what is visible depends on distances only.
        queries = op("Unsqueeze", op("Range", past, total, one), graph.ints(1))  # (S, 1)
        keys = op("Range", zero, total, one)  # (T,)
        visible = op("LessOrEqual", keys, queries)
        real = op("Unsqueeze", op("Cast", "attention_mask", to=TensorProto.BOOL), graph.ints(1, 2, 3))
        self._biases: dict[int | None, str] = {}
        for window in dict.fromkeys(block.window for block in config.blocks):
            seen = visible
            if window is not None:
                oldest = op("Sub", queries, graph.constant(np.array(window, dtype=np.int64)))
                seen = op("And", visible, op("Greater", keys, oldest))
            # (B, 1, 1, S, T). The lowest number instead of -inf: a padded query sees nothing, and must not give NaN.
            self._biases[window] = op(
                "Where", op("And", seen, real), graph.constant(np.float32(0)), graph.constant(_LOWEST)
            )
        self._cos, self._sin = self._rotation(rotary)
        self._rotary_dim = 2 * len(rotary.frequencies)

    def _rotation(self, rotary: RotaryTables) -> tuple[str, str]:
        graph, op = self.graph, self.graph.op
        frequencies = graph.constant(rotary.frequencies.astype(np.float32), "rotary.frequencies")
        if rotary.long_frequencies is not None:
            length = op("ReduceMax", "position_ids", keepdims=0)  # of the longest sequence, less one
            long = op("GreaterOrEqual", length, graph.constant(np.array(rotary.switch_length, dtype=np.int64)))
            other = graph.constant(rotary.long_frequencies.astype(np.float32), "rotary.long_frequencies")
            frequencies = op("Where", long, other, frequencies)
        positions = op("Cast", op("Unsqueeze", "position_ids", graph.ints(1, 3)), to=TensorProto.FLOAT)
        angles = op("Mul", positions, frequencies)  # (B, 1, S, rotary_dim / 2)
        scaling = graph.constant(np.float32(rotary.scaling))
        cos, sin = (op("Mul", op(kind, angles), scaling) for kind in ("Cos", "Sin"))
        return op("Cast", cos, to=self.dtype), op("Cast", sin, to=self.dtype)

    def norm(self, x: str, weight: str) -> str:
        """RMSNorm over the last axis, in float32."""
        op = self.graph.op
        wide = op("Cast", x, to=TensorProto.FLOAT)
        mean = op("ReduceMean", op("Mul", wide, wide), self.graph.ints(-1))
        root = op("Sqrt", op("Add", mean, self.graph.constant(np.float32(self.config.rms_norm_eps))))
        return op("Mul", op("Cast", op("Div", wide, root), to=self.dtype), weight)

    def rotate(self, x: str) -> str:
        """Rotary embedding of x (B, heads, S, head_dim): pairs (i, i + rotary_dim / 2)."""
        graph, op, half = self.graph, self.graph.op, self._rotary_dim // 2
        rest = self.config.head_dim - self._rotary_dim
        sizes = graph.ints(half, half, *([rest] if rest else []))
        first, second, *passed = graph.ops("Split", x, sizes, count=3 if rest else 2, axis=-1)
        turned = [
            op("Sub", op("Mul", first, self._cos), op("Mul", second, self._sin)),
            op("Add", op("Mul", second, self._cos), op("Mul", first, self._sin)),
        ]
        return op("Concat", *turned, *passed, axis=-1)

    def attention(self, q: str, k: str, v: str, window: int | None) -> str:
        """q (B, heads, S, D) over k and v (B, kv_heads, T, D); gives (B, S, heads * D)."""
        graph, op, config = self.graph, self.graph.op, self.config
        groups = config.num_heads // config.num_kv_heads
        scale = graph.constant(np.array(config.head_dim**-0.5, dtype=helper.tensor_dtype_to_np_dtype(self.dtype)))
        # Heads that share keys stand side by side, so that the keys are read, not copied, for each of them.
        grouped = op("Reshape", op("Mul", q, scale), graph.ints(0, config.num_kv_heads, groups, -1, config.head_dim))
        keys = op("Unsqueeze", op("Transpose", k, perm=[0, 1, 3, 2]), graph.ints(2))
        scores = op("Cast", op("MatMul", grouped, keys), to=TensorProto.FLOAT)
        weights = op("Softmax", op("Add", scores, self._biases[window]), axis=-1)
        mixed = op("MatMul", op("Cast", weights, to=self.dtype), op("Unsqueeze", v, graph.ints(2)))
        heads = op("Reshape", mixed, graph.ints(0, config.num_heads, -1, config.head_dim))
        return op("Reshape", op("Transpose", heads, perm=[0, 2, 1, 3]), graph.ints(0, 0, config.q_size))


def _block(
    graph: _Graph,
    step: _Step,
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

    graph.scope = f"{name}.input_layernorm"
    x = step.norm(hidden, graph.weight(f"{name}.input_layernorm.weight"))
    graph.scope = f"{name}.self_attn"
    parts = project("self_attn", arch.qkv, x, (config.q_size, config.kv_size, config.kv_size))
    split = graph.ints(0, 0, -1, config.head_dim)
    q, k, v = (graph.op("Reshape", part, split) for part in parts)
    if arch.qk_norm:
        q = step.norm(q, graph.weight(f"{name}.self_attn.q_norm.weight"))
        k = step.norm(k, graph.weight(f"{name}.self_attn.k_norm.weight"))
    q, k, v = (graph.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, k, v))
    q, k = step.rotate(q), step.rotate(k)
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
    mixed = step.attention(q, f"present.{index}.key", f"present.{index}.value", config.blocks[index].window)
    (attended,) = project("self_attn", ("o_proj",), mixed, (config.hidden_size,))
    hidden = graph.op("Add", hidden, attended)
    graph.scope = f"{name}.post_attention_layernorm"
    x = step.norm(hidden, graph.weight(f"{name}.post_attention_layernorm.weight"))
    graph.scope = f"{name}.mlp"
    gate, up = project("mlp", arch.gate_up, x, (config.intermediate_size, config.intermediate_size))
    gated = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
    (down,) = project("mlp", ("down_proj",), gated, (config.hidden_size,))
    return graph.op("Add", hidden, down)


def _project(graph: _Graph, step: _Step, name: str, masks: Mapping[str, ProjectionMask], x: str, bias: bool) -> str:
    mask, weight = masks[name], graph.weight(f"{name}.weight", transposed=True)
    if mask.sparsity > 0:
        scale = graph.constant(mask.channel_scale.numpy(), f"{name}.channel_scale")
        threshold = graph.constant(np.float32(mask.threshold), f"{name}.threshold")
        threshold = graph.op("Mul", threshold, step.sparse, name=f"{name}/threshold")
        y = graph.op("SparseLinear", x, weight, scale, threshold, domain=DOMAIN, name=name)
    else:
        y = graph.op("MatMul", x, weight, name=name)
    return graph.op("Add", y, graph.weight(f"{name}.bias"), name=f"{name}/bias") if bias else y


def _head(graph: _Graph, config: ModelConfig, hidden: str) -> None:
    """logits (B, S, V) float32. Gemm takes the weight as (V, H), so a tied one is stored once, as the embedding."""
    graph.scope = "lm_head"
    op = graph.op
    weight = "model.embed_tokens.weight" if config.tie_word_embeddings else graph.weight("lm_head.weight")
    rows = op("Reshape", hidden, graph.ints(-1, config.hidden_size))
    flat = op("Cast", op("Gemm", rows, weight, transB=1, name="lm_head"), to=TensorProto.FLOAT)
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

    def cache(length: str) -> list[str | int | None]:
        return ["batch_size", config.num_kv_heads, length, config.head_dim]

    for index in range(config.num_blocks):
        for what in ("key", "value"):
            inputs.append(value(f"past_key_values.{index}.{what}", dtype, cache("past_sequence_length")))
            outputs.append(value(f"present.{index}.{what}", dtype, cache("total_sequence_length")))
    return inputs, outputs
