"""A decoder's forward pass as ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from wisparse.formats.block_ops import (
    HIDDEN,
    Activate,
    Add,
    Attention,
    Linear,
    Norm,
    Op,
    Scale,
    UngatedActivate,
    block_ops,
)
from wisparse.formats.bundle import Bundle

from .decoding.rotary import attention_scaling, inverse_frequencies, switch_length

DOMAIN = "ai.wisparse"
DTYPES: Mapping[str, int] = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
_LOWEST = np.float32(np.finfo(np.float32).min)
_GRAPH_DOC = (
    "One pass over new tokens: logits (batch, new tokens, vocabulary) in float32, and the cache with the new tokens' "
    "keys and values behind the past ones. Projections are sparse in a pass of one new token on a filled "
    "cache, else dense."
)
_FUNCTION_DOC = (
    "y = where(|x| * channel_scale < threshold, 0, x) @ weight_t. x (..., K); weight_t (K, N), a channel's weights "
    "in a row; channel_scale (K,) and threshold () float32. Rows of dropped channels need not be read."
)


class DecoderGraph:
    """Nodes and small constants. Methods that add nodes return the names of their outputs. Hidden states between blocks,
    norms, scores and logits are float32; weights and cache are ``dtype``."""

    def __init__(self, bundle: Bundle, opset: int, dtype: str) -> None:
        self.config, self.masks, self.opset, self.dtype = bundle.config, bundle.masks, opset, DTYPES[dtype]
        self.masked = bundle.sparsity > 0  # else masks only drop exact zeros, which gains nothing here
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.weights: dict[str, tuple[str, bool]] = {}  # initializer -> (name in the checkpoint, whether transposed)
        self.counts: dict[str, int] = {}
        self.scope = ""

    def ops(self, kind: str, *inputs: str, out: Sequence[str], name: str = "", **attributes: Any) -> list[str]:
        """Add a node; ``out``: names of its outputs, or suffixes to the node's name."""
        base = name or f"{self.scope}/{kind}"
        number = self.counts[base] = self.counts.get(base, -1) + 1
        node = f"{base}_{number}" if number else base
        outputs = [f"{node}{one}" if one.startswith("_") else one for one in out]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=node, **attributes))
        return outputs

    def op(self, kind: str, *inputs: str, out: str = "_out", name: str = "", **attributes: Any) -> str:
        return self.ops(kind, *inputs, out=[out], name=name, **attributes)[0]

    def split(self, x: str, *sizes: int) -> list[str]:
        out = ["_out", *(f"_out{index}" for index in range(1, len(sizes)))]
        return self.ops("Split", x, self.ints(*sizes), out=out, axis=-1)

    def constant(self, value: Any, name: str = "") -> str:
        """An inline constant. Unnamed ones, scalars and short vectors, are shared if equal."""
        array = np.asarray(value, order="C")
        # repr() of a float is exact, so names are equal only if values are.
        written = ",".join(str(number) for number in array.ravel().tolist())
        name = name or f"const/{array.dtype}/{written if not array.shape else f'[{written}]'}"
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def weight(self, tensor: str, transposed: bool = False) -> str:
        # A transposed weight has another name, as Hugging Face names imply the layout (out, in).
        name = f"{tensor}_t" if transposed else tensor
        self.weights[name] = (tensor, transposed)
        return name

    def to_float32(self, x: str) -> str:
        return x if self.dtype == TensorProto.FLOAT else self.op("Cast", x, to=TensorProto.FLOAT)

    def to_dtype(self, x: str) -> str:
        return x if self.dtype == TensorProto.FLOAT else self.op("Cast", x, to=self.dtype)

    def times(self, x: str, factor: float, dtype: int = TensorProto.FLOAT) -> str:
        if factor == 1.0:
            return x
        return self.op("Mul", x, self.constant(np.array(factor, dtype=helper.tensor_dtype_to_np_dtype(dtype))))

    def soft_cap(self, x: str, cap: float | None) -> str:
        """cap * tanh(x / cap) of a float32 x; x itself without a cap."""
        if cap is None:
            return x
        number = self.constant(np.float32(cap))
        return self.op("Mul", number, self.op("Tanh", self.op("Div", x, number)))

    def norm(self, x: str, name: str | None, *, in_float32: bool = False) -> str:
        """RMSNorm over x's last axis by the weight of that name, or None; float32 if requested."""
        op, offset = self.op, self.config.architecture.norm_offset
        outer, self.scope = self.scope, name or self.scope
        x = op("Cast", x, to=TensorProto.FLOAT)
        mean = op("ReduceMean", op("Mul", x, x), self.ints(-1))
        y = op("Div", x, op("Sqrt", op("Add", mean, self.constant(np.float32(self.config.rms_norm_eps)))))
        weight = self.weight(f"{name}.weight") if name else None
        if weight and (offset or in_float32):
            scale = self.to_float32(weight)
            y = op("Mul", y, op("Add", scale, self.constant(np.float32(1))) if offset else scale)
            weight = None
        if not in_float32:
            y = self.to_dtype(y)
        if weight:
            y = op("Mul", y, weight)
        self.scope = outer
        return y

    def activate(self, x: str) -> str:
        op = self.op
        if self.config.activation == "silu":
            return op("Mul", x, op("Sigmoid", x))
        if self.opset >= 20:
            return op("Gelu", x, approximate="tanh")
        # The operator's definition: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).
        numbers = (0.5, 1.0, 0.044715, math.sqrt(2 / math.pi))
        half, one, cubic, slope = (self.constant(np.float32(number)) for number in numbers)
        x = self.to_float32(x)
        cube = op("Mul", op("Mul", x, x), x)
        bent = op("Tanh", op("Mul", slope, op("Add", x, op("Mul", cubic, cube))))
        return self.to_dtype(op("Mul", op("Mul", half, x), op("Add", one, bent)))

    def project(self, name: str, x: str, bias: bool) -> str:
        mask, weight = self.masks[name], self.weight(f"{name}.weight", transposed=True)
        if mask.sparsity > 0 and self.masked:
            scale = self.constant(mask.channel_scale.numpy(), f"{name}.channel_scale")
            threshold = self.constant(np.float32(mask.threshold), f"{name}.threshold")
            threshold = self.op("Mul", threshold, self.sparse, name=f"{name}/threshold")
            y = self.op("SparseLinear", x, weight, scale, threshold, domain=DOMAIN, name=name)
        else:
            y = self.op("MatMul", x, weight, name=name)
        return self.op("Add", y, self.weight(f"{name}.bias"), name=f"{name}/bias") if bias else y

    def begin(self) -> None:
        """Values for all blocks: whether the pass is sparse, attention biases, rotary tables, query scales."""
        config, op, constant = self.config, self.op, self.constant
        self.scope = "step"
        sequence = op("Squeeze", op("Shape", "input_ids", start=1, end=2), self.ints(0))
        past = op("Squeeze", op("Shape", "past_key_values.0.key", start=2, end=3), self.ints(0))
        one, zero = (constant(np.int64(value)) for value in (1, 0))
        decoding = op("And", op("Equal", sequence, one), op("Greater", past, zero))
        self.sparse = op("Cast", decoding, to=TensorProto.FLOAT)  # 1 or 0, a factor of the thresholds
        total = op("Add", past, sequence)
        # Positions in the cache, including padding: the mask depends on distances only.
        queries = op("Unsqueeze", op("Range", past, total, one), self.ints(1))  # (S, 1)
        keys = op("Range", zero, total, one)  # (T,)
        visible = op("LessOrEqual", keys, queries)
        real = op("Unsqueeze", op("Cast", "attention_mask", to=TensorProto.BOOL), self.ints(1, 2, 3))
        self.biases: dict[int | None, str] = {}
        for window in dict.fromkeys(block.window for block in config.blocks):
            seen = visible
            if window is not None:
                seen = op("And", visible, op("Greater", keys, op("Sub", queries, constant(np.int64(window)))))
            # (B, 1, 1, S, T). The lowest float instead of -inf, which would give NaN for a padded query.
            self.biases[window] = op("Where", op("And", seen, real), constant(np.float32(0)), constant(_LOWEST))
        positions = op("Cast", op("Unsqueeze", "position_ids", self.ints(1, 3)), to=TensorProto.FLOAT)
        # Cosines and sines (B, 1, S, rotary_dim / 2).
        self.rotations: dict[int, tuple[str, str]] = {}
        for index in {block.rotary for block in config.blocks if block.rotary is not None}:
            rope, name = config.rotaries[index], f"rotary.{index}" if index else "rotary"
            frequencies = constant(inverse_frequencies(rope).numpy(), f"{name}.frequencies")
            if rope.rope_type == "longrope":
                length = op("ReduceMax", "position_ids", keepdims=0)  # of the longest sequence, minus 1
                long = op("GreaterOrEqual", length, constant(np.int64(switch_length(config) or 0)))
                other = constant(inverse_frequencies(rope, long=True).numpy(), f"{name}.long_frequencies")
                frequencies = op("Where", long, other, frequencies)
            angles = op("Mul", positions, frequencies)
            scaling = constant(np.float32(attention_scaling(rope)))
            cos, sin = (self.to_dtype(op("Mul", op(kind, angles), scaling)) for kind in ("Cos", "Sin"))
            if rope.interleaved:
                # Then a pair is a separate axis, with one angle per pair.
                cos, sin = (op("Unsqueeze", table, self.ints(-1)) for table in (cos, sin))
            self.rotations[index] = cos, sin
        self.query_scales = None  # (B, 1, S, 1): 1 + beta * log(1 + floor(position / n))
        if config.query_scaling is not None:
            beta, length = (constant(np.float32(value)) for value in config.query_scaling)
            unit = constant(np.float32(1))
            grown = op("Log", op("Add", unit, op("Floor", op("Div", positions, length))))
            self.query_scales = self.to_dtype(op("Add", unit, op("Mul", beta, grown)))

    def rotate(self, x: str, index: int, head_dim: int) -> str:
        """Rotary embedding of x (B, heads, S, head_dim): pairs (i, i + rotary_dim / 2), or (2i, 2i + 1)."""
        op, rope, (cos, sin) = self.op, self.config.rotaries[index], self.rotations[index]
        size, passed = rope.rotary_dim, []
        if size < head_dim:
            x, *passed = self.split(x, size, head_dim - size)
        half = size // 2
        if rope.interleaved:
            x, half = op("Reshape", x, self.ints(0, 0, 0, half, 2)), 1
        first, second = self.split(x, half, half)
        turned = [
            op("Sub", op("Mul", first, cos), op("Mul", second, sin)),
            op("Add", op("Mul", second, cos), op("Mul", first, sin)),
        ]
        if not rope.interleaved:
            return op("Concat", *turned, *passed, axis=-1)
        whole = op("Reshape", op("Concat", *turned, axis=-1), self.ints(0, 0, 0, size))
        return op("Concat", whole, *passed, axis=-1) if passed else whole

    def attention(self, index: int, parts: list[str]) -> str:
        """The outputs of the query, key and value projections to ``o_proj``'s input (B, S, heads * head_dim)."""
        config, op, arch = self.config, self.op, self.config.architecture
        block, name, norm = config.blocks[index], f"model.layers.{index}.self_attn", config.architecture.qk_norm
        if len(parts) == 1:
            parts = self.split(parts[0], config.q_size(index), block.kv_size, block.kv_size)
        q, k, v = (*parts, parts[1]) if block.shared_values else parts

        def normalized(q: str, k: str, wanted: bool) -> tuple[str, str]:
            if norm is None or not wanted:
                return q, k
            return self.norm(q, f"{name}.{norm.names[0]}"), self.norm(k, f"{name}.{norm.names[1]}")

        q, k = normalized(q, k, norm is not None and not norm.per_head)
        split = self.ints(0, 0, -1, block.head_dim)
        q, k, v = (op("Transpose", op("Reshape", part, split), perm=[0, 2, 1, 3]) for part in (q, k, v))
        q, k = normalized(q, k, norm is not None and norm.per_head and not norm.after_rotary)
        if block.rotary is not None:
            q, k = (self.rotate(part, block.rotary, block.head_dim) for part in (q, k))
        q, k = normalized(q, k, norm is not None and norm.per_head and norm.after_rotary)
        if self.query_scales is not None:
            q = op("Mul", q, self.query_scales)
        if arch.value_norm:
            v = self.norm(v, None)

        def cached(what: str, new: str) -> str:
            past, present = (f"{prefix}.{index}.{what}" for prefix in ("past_key_values", "present"))
            return op("Concat", past, new, out=present, name=f"{name}/cache_{what}", axis=2)

        k, v = cached("key", k), cached("value", v)
        # Grouped-query attention: group the query heads of a key head, so that keys are not repeated.
        shape = self.ints(0, block.num_kv_heads, config.num_heads // block.num_kv_heads, -1, block.head_dim)
        grouped = op("Reshape", self.times(q, config.attention_scale, self.dtype), shape)
        keys = op("Unsqueeze", op("Transpose", k, perm=[0, 1, 3, 2]), self.ints(2))
        scores = self.soft_cap(self.to_float32(op("MatMul", grouped, keys)), config.attention_softcap)
        biased = op("Add", scores, self.biases[block.window])
        shares = self.to_dtype(op("Softmax", biased, axis=-1))
        mixed = op("MatMul", shares, op("Unsqueeze", v, self.ints(2)))
        if arch.sinks:  # an additional logit s of each head leaves sigmoid(log-sum-exp - s) to the others
            split = self.ints(block.num_kv_heads, -1, 1, 1)
            sinks = op("Reshape", self.to_float32(self.weight(f"{name}.sinks")), split)
            total = op("ReduceLogSumExp", biased, self.ints(-1), keepdims=1)
            mixed = op("Mul", mixed, self.to_dtype(op("Sigmoid", op("Sub", total, sinks))))
        heads = op("Reshape", mixed, self.ints(0, config.num_heads, -1, block.head_dim))
        whole = self.ints(0, 0, config.num_heads * block.head_dim)
        return op("Reshape", op("Transpose", heads, perm=[0, 2, 1, 3]), whole)

    def block(self, index: int, hidden: str) -> str:
        """A block's operations; ``hidden``, the residual stream, is float32."""
        ops, values = block_ops(self.config, index), {HIDDEN: hidden}
        for op in ops:
            values[op.output] = self.run(op, index, *(values[name] for name in op.inputs))
        return values[HIDDEN]

    def run(self, op: Op, index: int, *inputs: Any) -> Any:
        config, arch, name = self.config, self.config.architecture, f"model.layers.{index}"
        match op:
            case Norm():
                # What is added to the residual stream stays in float32.
                return self.norm(
                    inputs[0], f"{name}.{getattr(arch.norms, op.weight)}", in_float32=op.inputs != (HIDDEN,)
                )
            case Linear():
                self.scope = op.projections[0].name.rpartition(".")[0]
                x = self.to_dtype(*inputs) if op.inputs == (HIDDEN,) else inputs[0]
                outputs = [self.project(one.name, x, one.bias) for one in op.projections]
                return outputs if op.split else self.to_float32(outputs[0])  # added to the residual stream
            case Attention():
                return self.attention(index, *inputs)
            case UngatedActivate():
                x = self.op("Relu", inputs[0][0])
                return self.op("Mul", x, x)
            case Activate():
                (parts,) = inputs
                gate, up = parts if len(parts) == 2 else self.split(parts[0], *[config.intermediate_size] * 2)
                return self.op("Mul", self.activate(gate), up)
            case Add():
                hidden, output = inputs
                return self.op("Add", hidden, self.times(output, op.multiplier))
            case Scale():
                return self.op("Mul", inputs[0], self.to_float32(self.weight(f"{name}.{arch.block_scalar}")))
        raise TypeError(f"no such operation in an ONNX graph: {op}")

    def build(self) -> onnx.ModelProto:
        """The model; the caller adds the initializers of ``weights``."""
        config, op, value = self.config, self.op, helper.make_tensor_value_info
        self.begin()
        embedding = self.weight(config.embedding)
        hidden = op("Gather", embedding, "input_ids", name="model.embed_tokens")
        hidden = self.to_float32(self.times(hidden, config.embedding_multiplier, self.dtype))
        for index in range(config.num_blocks):
            hidden = self.block(index, hidden)
        hidden = self.norm(hidden, config.architecture.final_norm)
        self.scope = "lm_head"
        # Gemm reads the weight as (V, H), so a tied embedding is stored once.
        weight = embedding if config.tie_word_embeddings else self.weight("lm_head.weight")
        rows = op("Reshape", hidden, self.ints(-1, config.hidden_size))
        flat = op("Cast", op("Gemm", rows, weight, transB=1, name="lm_head"), to=TensorProto.FLOAT)
        flat = self.soft_cap(self.times(flat, config.logits_multiplier), config.logits_softcap)
        shape = op("Concat", op("Shape", "input_ids"), self.ints(config.vocab_size), axis=0)
        op("Reshape", flat, shape, out="logits", name="lm_head/logits")

        tokens = ("batch_size", "sequence_length")
        inputs = [
            value("input_ids", TensorProto.INT64, tokens),
            value("attention_mask", TensorProto.INT64, ("batch_size", "total_sequence_length")),
            value("position_ids", TensorProto.INT64, tokens),
        ]
        outputs = [value("logits", TensorProto.FLOAT, (*tokens, config.vocab_size))]
        for index, block in enumerate(config.blocks):
            heads, dim = block.num_kv_heads, block.head_dim
            past, total = (("batch_size", heads, f"{one}_sequence_length", dim) for one in ("past", "total"))
            for what in ("key", "value"):
                inputs.append(value(f"past_key_values.{index}.{what}", self.dtype, past))
                outputs.append(value(f"present.{index}.{what}", self.dtype, total))
        constants = list(self.constants.values())
        graph = helper.make_graph(self.nodes, "wisparse", inputs, outputs, initializer=constants, doc_string=_GRAPH_DOC)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(
            graph,
            opset_imports=opsets,
            functions=[_sparse_linear(self.opset)],
            ir_version=max(10, helper.find_min_ir_version_for(opsets, ignore_unknown=True)),
            producer_name="wisparse",
            producer_version=metadata.version("wisparse"),
            doc_string=f"{config.model_type} decoder with weight-aware activation sparsity, {config.num_blocks} blocks.",
        )


def _sparse_linear(opset: int) -> onnx.FunctionProto:
    """``kernels.reference.sparse_linear`` in standard operators; a NaN score is kept."""
    function = onnx.parser.parse_function(f"""
        <domain: "{DOMAIN}", opset_import: ["": {opset}]>
        SparseLinear (x, weight_t, channel_scale, threshold) => (y) {{
            x32 = Cast <to = {TensorProto.FLOAT}> (x)
            magnitude = Abs (x32)
            score = Mul (magnitude, channel_scale)
            drop = Less (score, threshold)
            zero32 = Constant <value = float {{0.0}}> ()
            zero = CastLike (zero32, x)
            masked = Where (drop, zero, x)
            y = MatMul (masked, weight_t)
        }}""")
    function.doc_string = _FUNCTION_DOC
    return function
