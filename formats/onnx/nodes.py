"""An ONNX graph under way: nodes, small constants, and the weights that it refers to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

__all__ = ["Graph", "Weight"]


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
