"""One pass of a decoder, written as ONNX nodes: what all blocks share, and the arithmetic that the data choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..model_config import Block, ModelConfig


@dataclass(frozen=True)
class Weight:
    """An initializer that the graph wants and the caller writes: ``tensor`` of the checkpoint, perhaps transposed."""

    name: str
    tensor: str
    transposed: bool


@dataclass
class Graph:
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

    def soft_cap(self, x: str, cap: float | None) -> str:
        """cap * tanh(x / cap) of a float32 x; x itself without a cap."""
        if cap is None:
            return x
        number = self.constant(np.float32(cap))
        return self.op("Mul", number, self.op("Tanh", self.op("Div", x, number)))

    def weight(self, tensor: str, transposed: bool = False) -> str:
        # A transposed weight has another name: whoever looks for the Hugging Face one must not find other bytes.
        name = f"{tensor}_t" if transposed else tensor
        self.weights.append(Weight(name, tensor, transposed))
        return name


_LOWEST = np.float32(np.finfo(np.float32).min)


@dataclass(frozen=True)
class RotaryTables:
    """One rotary embedding's frequencies, as the runtime uses them."""

    frequencies: np.ndarray  # (rotary_dim / 2,) float32, radians per position
    scaling: float = 1.0  # what cos and sin are multiplied by
    # LongRoPE: those for sequences of more than ``switch_length`` positions, else None
    long_frequencies: np.ndarray | None = None
    switch_length: int = 0


class Step:
    """What all blocks share in one pass (lengths, attention biases, cosines and sines, sparse or not), and arithmetic
    that is chosen by the data."""

    def __init__(
        self, graph: Graph, config: ModelConfig, rotaries: Sequence[RotaryTables], opset: int, dtype: int
    ) -> None:
        self.graph, self.config, self.opset, self.dtype = graph, config, opset, dtype
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
        self._positions = op("Cast", op("Unsqueeze", "position_ids", graph.ints(1, 3)), to=TensorProto.FLOAT)
        used = {block.rotary for block in config.blocks}
        self._rotations = {index: self._rotation(rotaries[index], index) for index in used if index is not None}
        self._query_scales = self._scales()

    def _rotation(self, rotary: RotaryTables, index: int) -> tuple[str, str, int]:
        """Cosines and sines of the pass, (B, 1, S, rotary_dim / 2), and rotary_dim."""
        graph, op = self.graph, self.graph.op
        name = f"rotary.{index}" if index else "rotary"
        frequencies = graph.constant(rotary.frequencies.astype(np.float32), f"{name}.frequencies")
        if rotary.long_frequencies is not None:
            length = op("ReduceMax", "position_ids", keepdims=0)  # of the longest sequence, less one
            long = op("GreaterOrEqual", length, graph.constant(np.array(rotary.switch_length, dtype=np.int64)))
            other = graph.constant(rotary.long_frequencies.astype(np.float32), f"{name}.long_frequencies")
            frequencies = op("Where", long, other, frequencies)
        angles = op("Mul", self._positions, frequencies)
        scaling = graph.constant(np.float32(rotary.scaling))
        cos, sin = (self.narrow(op("Mul", op(kind, angles), scaling)) for kind in ("Cos", "Sin"))
        if self.config.rotaries[index].interleaved:
            # A pair is an axis of its own then, and every pair has one angle.
            cos, sin = (op("Unsqueeze", table, graph.ints(-1)) for table in (cos, sin))
        return cos, sin, 2 * len(rotary.frequencies)

    def _scales(self) -> str | None:
        """What queries are multiplied by for their position, (B, 1, S, 1): 1 + beta * log(1 + floor(p / n))."""
        if self.config.query_scaling is None:
            return None
        op, constant = self.graph.op, self.graph.constant
        beta, length = (constant(np.float32(value)) for value in self.config.query_scaling)
        one = constant(np.float32(1))
        grown = op("Log", op("Add", one, op("Floor", op("Div", self._positions, length))))
        return self.narrow(op("Add", one, op("Mul", beta, grown)))

    def wide(self, x: str) -> str:
        """x as float32."""
        return x if self.dtype == TensorProto.FLOAT else self.graph.op("Cast", x, to=TensorProto.FLOAT)

    def narrow(self, x: str) -> str:
        """A float32 x as the projections take it."""
        return x if self.dtype == TensorProto.FLOAT else self.graph.op("Cast", x, to=self.dtype)

    def times(self, x: str, factor: float) -> str:
        """x multiplied by a number of x's type; x itself where that is 1."""
        if factor == 1.0:
            return x
        number = np.array(factor, dtype=helper.tensor_dtype_to_np_dtype(self.dtype))
        return self.graph.op("Mul", x, self.graph.constant(number))

    def norm(self, x: str, name: str | None, *, wide: bool = False) -> str:
        """The RMSNorm of that name over x's last axis; x is of any float type, the result float32 if ``wide``. None:
        one without a weight."""
        graph, op = self.graph, self.graph.op
        outer = graph.scope
        graph.scope = outer if name is None else name
        x = op("Cast", x, to=TensorProto.FLOAT)
        mean = op("ReduceMean", op("Mul", x, x), graph.ints(-1))
        normed = op("Div", x, op("Sqrt", op("Add", mean, graph.constant(np.float32(self.config.rms_norm_eps)))))
        if name is None:
            graph.scope = outer
            return normed if wide else self.narrow(normed)
        weight = graph.weight(f"{name}.weight")
        if self.config.architecture.norm_offset or wide:
            scale = self.wide(weight)
            if self.config.architecture.norm_offset:
                scale = op("Add", scale, graph.constant(np.float32(1)))
            normed = op("Mul", normed, scale)
            normed = normed if wide else self.narrow(normed)
        else:
            normed = op("Mul", self.narrow(normed), weight)
        graph.scope = outer
        return normed

    def activate(self, x: str) -> str:
        """The MLP's activation of its gate."""
        graph, op = self.graph, self.graph.op
        if self.config.activation == "silu":
            return op("Mul", x, op("Sigmoid", x))
        if self.opset >= 20:
            return op("Gelu", x, approximate="tanh")
        # The operator's definition: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).
        half, one, cubic, slope = (
            graph.constant(np.float32(value)) for value in (0.5, 1.0, 0.044715, math.sqrt(2 / math.pi))
        )
        wide = self.wide(x)
        cube = op("Mul", op("Mul", wide, wide), wide)
        bent = op("Tanh", op("Mul", slope, op("Add", wide, op("Mul", cubic, cube))))
        return self.narrow(op("Mul", op("Mul", half, wide), op("Add", one, bent)))

    def rotate(self, x: str, rotary: int, head_dim: int) -> str:
        """Rotary embedding of x (B, heads, S, head_dim): pairs (i, i + rotary_dim / 2), or (2i, 2i + 1)."""
        graph, op = self.graph, self.graph.op
        cos, sin, size = self._rotations[rotary]
        rest = head_dim - size
        passed: list[str] = []
        if rest:
            x, *passed = graph.ops("Split", x, graph.ints(size, rest), count=2, axis=-1)
        interleaved = self.config.rotaries[rotary].interleaved
        if interleaved:
            x = op("Reshape", x, graph.ints(0, 0, 0, size // 2, 2))
        one = 1 if interleaved else size // 2
        first, second = graph.ops("Split", x, graph.ints(one, one), count=2, axis=-1)
        turned = [
            op("Sub", op("Mul", first, cos), op("Mul", second, sin)),
            op("Add", op("Mul", second, cos), op("Mul", first, sin)),
        ]
        if not interleaved:
            return op("Concat", *turned, *passed, axis=-1)
        whole = op("Reshape", op("Concat", *turned, axis=-1), graph.ints(0, 0, 0, size))
        return op("Concat", whole, *passed, axis=-1) if passed else whole

    def place(self, name: str, index: int, parts: Sequence[str]) -> tuple[str, str, str]:
        """Queries, keys and values (B, S, size) as attention takes them, (B, heads, S, head_dim): normalised, and
        turned to their positions."""
        graph, op, config = self.graph, self.graph.op, self.config
        norm, rotary, head_dim = config.architecture.qk_norm, config.blocks[index].rotary, config.blocks[index].head_dim
        q, k, v = parts

        def normalised(q: str, k: str) -> tuple[str, str]:
            assert norm is not None
            return self.norm(q, f"{name}.{norm.names[0]}"), self.norm(k, f"{name}.{norm.names[1]}")

        if norm is not None and not norm.per_head:
            q, k = normalised(q, k)
        split = graph.ints(0, 0, -1, head_dim)
        q, k, v = (op("Transpose", op("Reshape", part, split), perm=[0, 2, 1, 3]) for part in (q, k, v))
        if norm is not None and norm.per_head and not norm.after_rotary:
            q, k = normalised(q, k)
        if rotary is not None:
            q, k = self.rotate(q, rotary, head_dim), self.rotate(k, rotary, head_dim)
        if norm is not None and norm.per_head and norm.after_rotary:
            q, k = normalised(q, k)
        if self._query_scales is not None:
            q = op("Mul", q, self._query_scales)
        if config.architecture.value_norm:
            v = self.norm(v, None)
        return q, k, v

    def attention(self, q: str, k: str, v: str, block: Block) -> str:
        """q (B, heads, S, D) over k and v (B, kv_heads, T, D); gives (B, S, heads * D)."""
        graph, op, config = self.graph, self.graph.op, self.config
        groups = config.num_heads // block.num_kv_heads
        # Heads that share keys stand side by side, so that the keys are read, not copied, for each of them.
        shape = graph.ints(0, block.num_kv_heads, groups, -1, block.head_dim)
        grouped = op("Reshape", self.times(q, config.attention_scale), shape)
        keys = op("Unsqueeze", op("Transpose", k, perm=[0, 1, 3, 2]), graph.ints(2))
        scores = self.wide(op("MatMul", grouped, keys))
        scores = graph.soft_cap(scores, config.attention_softcap)
        weights = op("Softmax", op("Add", scores, self._biases[block.window]), axis=-1)
        mixed = op("MatMul", self.narrow(weights), op("Unsqueeze", v, graph.ints(2)))
        heads = op("Reshape", mixed, graph.ints(0, config.num_heads, -1, block.head_dim))
        whole = graph.ints(0, 0, config.num_heads * block.head_dim)
        return op("Reshape", op("Transpose", heads, perm=[0, 2, 1, 3]), whole)
