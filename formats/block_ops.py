"""What a transformer block computes: its operations in order. The reference (``runtime.torch.block``), the ONNX graph, the
CUDA launches (``runtime.cuda.blocks``) and the CPU step (``runtime.cpu.step``) run this list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .model_config import ModelConfig, Projection

HIDDEN = "hidden"  # the residual stream, (T, H): the block's input and output


@dataclass(frozen=True)
class Op:
    """One operation. It reads the values named ``inputs`` and writes the value ``output``, each with T rows."""

    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Norm(Op):
    """RMSNorm."""

    weight: str  # field of `runtime.torch.block.Block`


@dataclass(frozen=True)
class Linear(Op):
    """Projections of one input, each with a mask of its own. ``split``: the operation that reads the output takes the parts
    of several projections, also where the checkpoint stores them in one."""

    role: str  # field of `runtime.torch.block.Block`
    projections: tuple[Projection, ...]
    split: bool


@dataclass(frozen=True)
class Attention(Op):
    """Queries, keys and values, of the projections' output, to the heads' outputs. With norms of queries and keys, rotary
    embedding, window, sinks, soft cap and gate as the model's configuration has them. Reads and writes the KV cache."""


@dataclass(frozen=True)
class GatedAttention(Attention):
    """Attention with gates, of the projection of the queries or of one of their own."""


@dataclass(frozen=True)
class LatentQuery(Op):
    """RMSNorm of the queries' latent, the first part of the input."""


@dataclass(frozen=True)
class LatentKeys(Op):
    """Queries and keys for `Attention`, of the queries, or of the projections' output alone, and of the latent in it."""


@dataclass(frozen=True)
class LatentValues(Op):
    """The heads' outputs, of latents that `Attention` has added up."""


@dataclass(frozen=True)
class DeltaNet(Op):
    """Gated DeltaNet: reads the projections' output and their input; reads and writes the recurrent state."""


@dataclass(frozen=True)
class ShortConv(Op):
    """Gated short convolution of the projections' output: c * conv(b * x). Reads and writes the recurrent state."""


@dataclass(frozen=True)
class Mamba2(Op):
    """Mamba-2: the projection's output, gates, inputs and steps, to the heads' outputs, gated and normed. Reads and writes the
    recurrent state."""


@dataclass(frozen=True)
class Activate(Op):
    """activation(gate) * up, of the output of gate and up."""


@dataclass(frozen=True)
class UngatedActivate(Activate):
    """activation(up), of an MLP without a gate."""


@dataclass(frozen=True)
class Router(Op):
    """The chosen experts of each row and their weights, as the model's configuration says (`Experts`). ``normed``: the input
    goes through a norm of its own first."""

    normed: bool


@dataclass(frozen=True)
class Experts(Op):
    """The weighted sum of the chosen experts' MLPs; reads the MLPs' input and the router's result. A shared expert is one
    more expert, chosen by every row, with weight 1 or sigmoid(gate)."""

    projections: tuple[Projection, ...]


@dataclass(frozen=True)
class UngatedExperts(Experts):
    """Experts whose MLPs have no gate."""


@dataclass(frozen=True)
class Sum(Op):
    """The sum of its inputs."""


@dataclass(frozen=True)
class Add(Op):
    """The residual stream plus ``multiplier`` times the other input."""

    multiplier: float


@dataclass(frozen=True)
class PerLayer(Op):
    """Adds what the token's per-layer embedding gives, gated by the residual stream."""


@dataclass(frozen=True)
class Scale(Op):
    """The residual stream times a learned number."""


def block_ops(config: ModelConfig, index: int) -> tuple[Op, ...]:
    """The operations of block ``index`` in order."""
    arch, spec = config.architecture, config.blocks[index]
    groups = iter(config.shared_inputs(index))
    found: list[Op] = []

    def norm(value: str, weight: str, output: str) -> str:
        """``value``, or the name of its norm if the family has that norm."""
        if getattr(config.norms, weight) is None:
            return value
        found.append(Norm((value,), output, weight))
        return output

    def linear(value: str, role: str, output: str) -> str:
        found.append(Linear((value,), output, role, tuple(next(groups)), role.endswith(("qkv", "gate_up"))))
        return output

    def mlp(value: str, prefix: str = "") -> str:
        gate_up = linear(value, f"{prefix}gate_up", f"{prefix}gate_up")
        found.append((Activate if arch.gated else UngatedActivate)((gate_up,), f"{prefix}activated"))
        return linear(f"{prefix}activated", f"{prefix}down", f"{prefix}down")

    def add(value: str, weight: str) -> None:
        normed = norm(value, weight, f"{value}_normed")
        found.append(Add((HIDDEN, normed), HIDDEN, config.residual_multiplier))

    n = qkv = ""
    if spec.mixer is not None:
        n = norm(HIDDEN, "attention_input", "attention_input")
        qkv = linear(n, "qkv", "qkv")
    if spec.mixer == "delta_net":
        found.append(DeltaNet((qkv, n), "attended"))
    elif spec.mixer is not None:
        read: tuple[str, ...] = (qkv,)
        if config.latent is not None:
            if config.latent.query_rank:
                found.append(LatentQuery(read, "query"))
                read = (linear("query", "q_b", "queries"), qkv)
            found.append(LatentKeys(read, "keys"))
            read = ("keys",)
        attention = GatedAttention if arch.attention_gate else Attention
        found.append({"short_conv": ShortConv, "mamba2": Mamba2}.get(spec.mixer, attention)(read, "attended"))
        if config.latent is not None:
            found.append(LatentValues(("attended",), "attended"))
    if spec.mixer is not None:
        add(linear("attended", "o", "o"), "attention_output")

    if not spec.has_mlp:
        pass
    elif spec.experts is None:
        add(mlp(norm(HIDDEN, "mlp_input", "mlp_input")), "mlp_output")
    elif not spec.experts.parallel_mlp:
        n = norm(HIDDEN, "mlp_input", "mlp_input")
        found.append(Router((n,), "routing", normed=False))
        kind = Experts if arch.gated else UngatedExperts
        found.append(kind((n, "routing"), "experts", tuple(one for group in groups for one in group)))
        add("experts", "mlp_output")
    else:  # a dense MLP beside the experts
        routed = tuple(one for _ in range(2) for one in next(groups))
        found.append(Router((HIDDEN,), "routing", normed=True))
        found.append(Norm((HIDDEN,), "experts_input", "experts_input"))
        found.append(Experts(("experts_input", "routing"), "experts", routed))
        shared = mlp(norm(HIDDEN, "mlp_input", "mlp_input"), "shared_")
        found.append(Norm((shared,), "shared_output", "shared_output"))
        found.append(Norm(("experts",), "experts_output", "experts_output"))
        found.append(Sum(("shared_output", "experts_output"), "mlp"))
        add("mlp", "mlp_output")

    if config.per_layer_size:
        found.append(PerLayer((HIDDEN,), HIDDEN))
    if arch.block_scalar is not None:
        found.append(Scale((HIDDEN,), HIDDEN))
    return tuple(found)


# Operation -> what a model that has it consists of, and the back ends and exports that do not run it yet.
NOT_YET: Mapping[type[Op], tuple[str, frozenset[str]]] = {
    DeltaNet: ("recurrent blocks", frozenset({"onnx", "vllm"})),
    GatedAttention: ("gates of attention", frozenset({"onnx", "vllm"})),
    LatentKeys: ("multi-head latent attention", frozenset({"onnx", "vllm"})),
    ShortConv: ("gated short convolutions", frozenset({"onnx", "vllm"})),
    Mamba2: ("Mamba-2 blocks", frozenset({"onnx", "vllm"})),
    UngatedActivate: ("MLPs without a gate", frozenset({"vllm"})),
    Experts: ("experts", frozenset({"onnx"})),
    UngatedExperts: ("experts without a gate", frozenset({"onnx", "vllm"})),
    PerLayer: ("per-layer embeddings", frozenset({"triton", "onnx"})),
}


def not_yet(config: ModelConfig, executor: str) -> str | None:
    """The first operations of a model that ``executor`` does not run, as a plural noun; None if it runs all."""
    used = {type(op) for index in range(config.num_blocks) for op in block_ops(config, index)}
    return next((what for op, (what, lacking) in NOT_YET.items() if op in used and executor in lacking), None)


def describe(config: ModelConfig) -> list[str]:
    """The operations as lines of text; blocks with the same ones stand together."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index in range(config.num_blocks):
        alike.setdefault(tuple(_line(op) for op in block_ops(config, index)), []).append(index)
    lines = []
    for ops, blocks in alike.items():
        lines += [f"blocks {', '.join(map(str, blocks))}:", *(f"  {line}" for line in ops)]
    return lines


def _line(op: Op) -> str:
    projections = getattr(op, "projections", ())
    parts = [f"{one.role} {one.in_features} -> {one.out_features}" for one in projections]
    call = f"{op.output} = {type(op).__name__}({', '.join(op.inputs)})"
    return f"{call:<48}{', '.join(parts)}".rstrip()
