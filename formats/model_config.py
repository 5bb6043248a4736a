"""A model's validated ``config.json``: dimensions, blocks, rotary embeddings and multipliers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from .architectures import (
    ARCHITECTURES,
    MIXERS,
    Activation,
    Architecture,
    ExpertsLayout,
    Mixer,
    Norms,
    Power,
    why_refused,
)
from .config_fields import (
    LARGEST_DIMENSION,
    RopeConfig,
    dimension,
    listed,
    number,
    read_count,
    read_rope,
    require,
    switch,
)
from .errors import UnsupportedModelError

LM_HEAD = "lm_head.weight"
LARGEST_NUM_BLOCKS = 10_000
# Kinds of blocks -> their older names, which transformers replaces.
_OLDER_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_MLP_KINDS = ("mlp", "moe")  # of blocks without a mixer
_LETTERS = "M*-E"  # of a pattern of blocks: the same kinds
_MOST_EXPERTS = 1 << 17  # in all blocks
# Config keys of unsupported kinds of routers.
_GROUPED = ("n_group", "topk_group")
_NOT_ROUTERS = (*_GROUPED, "routed_scaling_factor", "moe_router_use_sigmoid", "scoring_func")
_MOST_GROUPS = 32


@dataclass(frozen=True)
class Projection:
    """One linear layer of a block, or the same one of all its experts. ``name``: its Hugging Face module name; the weight is
    (N, K), for each expert."""

    name: str
    block: int
    role: str
    in_features: int
    out_features: int
    bias: bool
    experts: int = 0  # number of experts; 0: not routed
    chosen: int = 1  # experts per token
    parts: tuple[str, ...] = ()  # names of the weights on disk without ``.weight``, one per expert

    def __post_init__(self) -> None:
        if not self.parts:
            object.__setattr__(self, "parts", (self.name,))

    @property
    def in_mlp(self) -> bool:
        """Whether it is of the MLP or the experts, not of what mixes the tokens."""
        return self.role.removeprefix("shared_") in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")

    @property
    def num_parameters(self) -> int:
        """Parameters that a token uses, without the bias: the weight of its sparsity in averages."""
        return self.in_features * self.out_features * self.chosen


class Groups(NamedTuple):
    """Consecutive experts in groups of the same size. Experts are chosen of the ``kept`` groups whose ``best`` highest
    sums of score and bias (1 or 2) add up to most."""

    number: int
    kept: int
    best: int


@dataclass(frozen=True)
class Experts:
    """A block's routed experts. The router's weight (E, H) gives their logits, ``score`` their scores. A token uses the
    ``chosen`` with the largest sums of score and bias, weighted by score."""

    count: int
    chosen: int
    intermediate_size: int
    renormalised: bool  # whether the top-k weights are divided by their sum
    shared_size: int  # width of a shared expert, whose weight is 1 or sigmoid(gate (1, H) x); 0: none
    router: str  # tensor names within the block: the router, and the shared expert's gate
    router_bias: str | None = None
    parallel_mlp: bool = False  # see `ExpertsLayout`; the shared expert is the dense MLP, without a gate
    shared_gate: str | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: str | None = None
    norm: tuple[float, float] = (0.0, 0.0)  # the sum is at least the first; the second is added to it
    scale: float = 1.0  # factor of the weights
    rounded: Literal["logits", "scores"] | None = "logits"  # see `ExpertsLayout`
    groups: Groups | None = None


@dataclass(frozen=True)
class DeltaNet:
    """Dimensions of a model's recurrent blocks; the state of a value head is (key_dim, value_dim)."""

    key_heads: int
    value_heads: int  # in groups of the same size for each key head
    key_dim: int
    value_dim: int
    taps: int  # kernel size of the causal convolution

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of the values, of the gate, and of ``out_proj``'s input."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def heads_order(self) -> tuple[int, ...]:
        """The rows of ``in_proj_qkvz`` in the order of ``in_proj_qkv`` and ``in_proj_z``."""
        values = self.value_size // self.key_heads
        return self.order(self.key_dim, self.key_dim, values, values)

    def order(self, *sizes: int) -> tuple[int, ...]:
        """Rows of a matrix that has, for each key head, parts of these ``sizes``: those of all heads' first parts, …"""
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        heads = range(0, self.key_heads * sum(sizes), sum(sizes))
        parts = zip(starts, sizes, strict=True)
        return tuple(head + start + row for start, size in parts for head in heads for row in range(size))


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution: ``in_proj`` gives three vectors b, c and x of the hidden size, ``out_proj`` reads
    c * conv(b * x). The convolution is causal, of each channel alone; its last ``taps - 1`` inputs are the state."""

    taps: int  # kernel size
    bias: bool  # of the projections and of the convolution


@dataclass(frozen=True)
class Mamba2:
    """Dimensions of a model's Mamba-2 blocks; the state of a head is (state_dim, head_dim). ``in_proj`` gives a gate, the
    convolution's channels (values, then B and C of each group), and each head's step."""

    heads: int  # in groups of the same size that share B and C
    groups: int
    head_dim: int
    state_dim: int
    taps: int  # kernel size of the causal convolution
    conv_bias: bool
    bias: bool  # of the projections

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed_size(self) -> int:
        return self.inner + 2 * self.groups * self.state_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention. A token's keys and values are made by ``kv_b_proj`` of a latent of ``rank`` elements,
    and of ``rotary_dim`` rotated ones that all heads share. Both are cached, in place of a KV head's keys and values."""

    rank: int
    query_rank: int  # of the queries' latent; 0: none
    key_dim: int  # of a head, without the rotated elements
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True)
class Block:
    window: int | None  # sliding window in positions, including the current one; None: full attention
    rotary: int | None  # index into ``ModelConfig.rotaries``; None without a rotary embedding
    head_dim: int
    num_kv_heads: int
    mixer: Mixer | None = "attention"  # None: the block is an MLP alone
    has_mlp: bool = True  # or experts
    shared_values: bool = False  # values are the output of ``k_proj``; no ``v_proj``
    latent: bool = False  # multi-head latent attention: values are the keys, which are stored once
    kv_from: int | None = None  # index of an earlier block whose keys and values it uses; only ``q_proj``
    wide_mlp: bool = False  # the dense MLP's width is twice ``intermediate_size``
    experts: Experts | None = None  # in place of a dense MLP

    @property
    def recurrent(self) -> bool:
        """Whether the block has a state in place of keys and values."""
        return self.mixer not in (None, "attention")

    @property
    def stores_kv(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.mixer == "attention" and self.kv_from is None

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """A causal LM's dimensions and blocks. ``num_kv_heads`` and ``head_dim``: of blocks that do not state their own."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int  # the longest context; of YaRN at least the original length times the factor
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    activation: Activation
    # (a, c) of ``clamped``: (up + 1) * gate * sigmoid(a * gate), gate clamped to at most c, up to [-c, c]
    clamp: tuple[float, float]
    blocks: tuple[Block, ...]
    rotaries: tuple[RopeConfig, ...]  # the blocks' rotary embeddings, one or two
    attention_scale: float  # factor of the scores
    attention_softcap: float | None  # c in c * tanh(x / c)
    logits_softcap: float | None
    embedding_multiplier: float  # rounded to the activations' dtype before use
    residual_multiplier: float  # factor of each sublayer's output before the residual addition
    logits_multiplier: float
    # (beta, n): queries at position p are multiplied by 1 + beta * log(1 + floor(p / n))
    query_scaling: tuple[float, int] | None
    delta_net: DeltaNet | None = None  # of blocks with that mixer, or None
    short_conv: ShortConv | None = None
    mamba2: Mamba2 | None = None
    per_layer_size: int = 0  # width of per-layer embeddings; 0: none
    latent: Latent | None = None
    output_eps: float | None = None  # of the norms of outputs; None: ``rms_norm_eps``
    has_qk_norm: bool = True  # if the family may have it
    has_output_norms: bool = True

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model_type]

    @property
    def norms(self) -> Norms:
        norms = self.architecture.norms
        return norms if self.has_output_norms else replace(norms, attention_output=None, mlp_output=None)

    @property
    def fixed_hidden(self) -> bool:
        """Whether the hidden state cannot be rotated: norms whose weights tie it to its coordinates cannot be fitted."""
        beside = self.per_layer_size or any(one.experts and one.experts.parallel_mlp for one in self.blocks)
        return self._has_norms_after and bool(beside or (self.tie_word_embeddings and self.architecture.always_tied))

    @property
    def fitted_hidden(self) -> bool:
        """Whether norms after attention or MLP are fitted to a rotated hidden state, which they tie to its coordinates."""
        return self._has_norms_after and not self.fixed_hidden

    @property
    def _has_norms_after(self) -> bool:
        return self.norms.attention_output is not None or self.norms.mlp_output is not None

    @property
    def untied_parameters(self) -> int:
        """Parameters that a rotation of the hidden state adds, as it unties the embeddings."""
        return self.vocab_size * self.hidden_size if self.tie_word_embeddings and not self.fixed_hidden else 0

    @property
    def has_experts(self) -> bool:
        return any(block.experts for block in self.blocks)

    @property
    def has_mixers(self) -> bool:
        """Whether a block has another mixer than attention over keys and values of heads."""
        return self.latent is not None or any(block.recurrent for block in self.blocks)

    @property
    def has_states(self) -> bool:
        return any(block.recurrent for block in self.blocks)

    @property
    def mlp_size(self) -> int:
        """Largest number of intermediate activations of a token in the MLP of any block."""
        experts = [block.experts for block in self.blocks]
        return max(
            self.dense_size(index) if one is None else one.chosen * one.intermediate_size + one.shared_size
            for index, one in enumerate(experts)
        )

    @property
    def shares_kv(self) -> bool:
        return any(block.kv_from is not None for block in self.blocks)

    @property
    def embedding(self) -> str:
        """Name of the tensor."""
        return f"{self.architecture.embedding}.weight"

    def norm(self, weight: str) -> tuple[float, bool, bool]:
        """What a norm adds to the mean square, whether it multiplies by 1 + weight, and whether in float32; ``weight``: as of
        `block_ops.Norm`, or ``final``."""
        if weight in ("query_norm", "latent.norm"):  # transformers' default
            return 1e-6, False, False
        output = self.output_eps if weight in ("attention_output", "mlp_output") else None
        offset = self.architecture.norm_offset and (weight != "final" or self.architecture.final_offset)
        return (self.rms_norm_eps if output is None else output), offset, self.architecture.wide_norms

    def dense_size(self, block: int) -> int:
        """Width of a block's dense MLP."""
        return self.intermediate_size * (2 if self.blocks[block].wide_mlp else 1)

    @property
    def kv_size(self) -> int:
        """Elements of one position's keys (or values) in all blocks that have their own."""
        return sum(block.kv_size for block in self.blocks if block.stores_kv)

    def q_size(self, block: int) -> int:
        """Width of a block's queries, and of ``o_proj``'s input."""
        return self.num_heads * self.blocks[block].head_dim

    def qkv(self, block: int) -> tuple[str, ...]:
        """Roles of a block's query, key and value projections; not for recurrent blocks."""
        spec = self.blocks[block]
        lacks = ("k_proj", "v_proj") if spec.kv_from is not None else ("v_proj",) if spec.shared_values else ()
        return tuple(one for one in self.architecture.qkv if one not in lacks)

    def projections(self, block: int | None = None) -> Iterator[Projection]:
        """The maskable projections, of the model or of one block, in the order of execution: all linear layers of the
        blocks, without embeddings and ``lm_head``."""
        arch, hidden, delta, conv = self.architecture, self.hidden_size, self.delta_net, self.short_conv
        mamba = self.mamba2
        for index in range(self.num_blocks) if block is None else (block,):
            q, kv, inner = self.q_size(index), self.blocks[index].kv_size, self.dense_size(index)
            mixer = self.blocks[index].mixer
            if mixer is None:
                part, sizes = "", []
            elif mixer == "short_conv" and conv is not None:
                part = "conv"
                sizes = [("in_proj", hidden, 3 * hidden, conv.bias), ("out_proj", hidden, hidden, conv.bias)]
            elif mixer == "mamba2" and mamba is not None:
                part, rows = "mamba", mamba.inner + mamba.mixed_size + mamba.heads
                sizes = [("in_proj", hidden, rows, mamba.bias), ("out_proj", mamba.inner, hidden, mamba.bias)]
            elif mixer == "delta_net" and delta is not None:
                part = "linear_attn"
                outputs = {"in_proj_qkv": delta.mixed_size, "in_proj_z": delta.value_size}
                if arch.interleaved_delta:
                    outputs = {"in_proj_qkvz": delta.mixed_size + delta.value_size}
                sizes = [(role, hidden, rows, False) for role, rows in outputs.items()]
                sizes.append(("out_proj", delta.value_size, hidden, False))
            elif (latent := self.latent) is not None:
                part, queries = "self_attn", self.num_heads * (latent.key_dim + latent.rotary_dim)
                of_latent = ("kv_a_proj_with_mqa", hidden, latent.rank + latent.rotary_dim, self.qkv_bias)
                sizes = [("q_proj", hidden, queries, False), of_latent]
                if latent.query_rank:
                    sizes[0] = ("q_a_proj", hidden, latent.query_rank, self.qkv_bias)
                    sizes.append(("q_b_proj", latent.query_rank, queries, False))
                sizes.append(("o_proj", self.num_heads * latent.value_dim, hidden, self.o_bias))
            else:
                part, gates = "self_attn", 2 if arch.attention_gate == "q_proj" else 1
                outputs = {"q_proj": gates * q, "k_proj": kv, "v_proj": kv, "qkv_proj": q + 2 * kv}
                sizes = [(role, hidden, outputs[role], self.qkv_bias) for role in self.qkv(index)]
                if arch.attention_gate == "attention_gate_proj":
                    sizes.insert(1, (arch.attention_gate, hidden, q, False))
                sizes.append(("o_proj", q, hidden, self.o_bias))
            for role, inputs, rows, bias in sizes:
                name = arch.modules.get(role, f"{part}.{role}")
                yield Projection(f"model.layers.{index}.{name}", index, role, inputs, rows, bias)
            experts = self.blocks[index].experts
            if experts is None or arch.experts is None:
                for role in (*arch.gate_up, "down_proj") if self.blocks[index].has_mlp else ():
                    name = f"model.layers.{index}.{arch.modules.get(role, f'mlp.{role}')}"
                    rows = {"gate_up_proj": 2 * inner, "down_proj": hidden}.get(role, inner)
                    inputs = inner if role == "down_proj" else hidden
                    yield Projection(name, index, role, inputs, rows, self.mlp_bias)
                continue
            roles = (*arch.gate_up, "down_proj")
            for role, stored in zip(roles, arch.experts.names, strict=True):
                shape = (
                    (experts.intermediate_size, hidden) if role == "down_proj" else (hidden, experts.intermediate_size)
                )
                module = f"model.layers.{index}."
                folder = module if experts.parallel_mlp else f"{module}{arch.experts.module}."
                parts = tuple(f"{folder}experts.{expert}.{stored}" for expert in range(experts.count))
                name = f"{module}{'experts' if experts.parallel_mlp else arch.modules.get('experts', 'mlp.experts')}.{role}"
                yield Projection(name, index, role, *shape, arch.experts.biases, experts.count, experts.chosen, parts)
            for role in roles if experts.shared_size else ():
                shape = (experts.shared_size, hidden) if role == "down_proj" else (hidden, experts.shared_size)
                name = role if experts.parallel_mlp else f"{arch.experts.shared_module}.{role}"
                name = f"model.layers.{index}.{arch.experts.module}.{name}"
                yield Projection(name, index, f"shared_{role}", *shape, self.mlp_bias)

    def shared_inputs(self, block: int) -> list[list[Projection]]:
        """A block's projections, grouped by common input, in the order of execution."""
        found: list[list[Projection]] = [[]]
        own_input = (
            "q_b_proj",
            "o_proj",
            "out_proj",
            self.architecture.gate_up[0],
            "down_proj",
            f"shared_{self.architecture.gate_up[0]}",
            "shared_down_proj",
        )
        for projection in self.projections(block):
            if projection.role in own_input:
                found.append([])
            found[-1].append(projection)
        return found if found[0] else found[1:]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise UnsupportedModelError(f"unsupported architecture: {why_refused(config, model_type, ARCHITECTURES)}")
        require_values(config, model_type)
        arch = ARCHITECTURES[model_type]
        if arch.one_half:
            kinds = listed(config, "layers_block_type", len(config.get("layers_block_type") or [0]))
            mlps = ["sparse" if kind == "moe" else "dense" for kind in kinds]
            config = {**config, "layer_types": kinds, "num_hidden_layers": len(kinds), "mlp_layer_types": mlps}

        def power(value: Power | None, default: float = 1.0) -> float:
            return default if value is None else number(config, value[0]) ** value[1]

        def optional(key: str | None) -> float | None:
            if key is not None and key not in config:
                raise UnsupportedModelError(f"config.json: {key}: expected a number or null, found no such key")
            return None if key is None or config[key] is None else number(config, key)

        sizes = ("hidden_size", "vocab_size", "max_position_embeddings")
        dimensions: dict[str, Any] = {key: dimension(config, key) for key in sizes}
        inner = arch.mlp_size
        if arch.experts is not None and inner not in config:  # they have no dense MLP
            inner = arch.experts.intermediate_size
        dimensions["intermediate_size"] = dimension(config, inner)
        if arch.adjusted_mlp and switch(config, "block_auto_adjust_ff_dim"):
            unit, factor = dimension(config, "block_multiple_of"), 1.0
            if config.get("block_ffn_dim_multiplier") is not None:
                factor = number(config, "block_ffn_dim_multiplier", 1e-3, 1e3)
            width = int(factor * int(2 * dimensions["intermediate_size"] / 3))
            dimensions["intermediate_size"] = max(-(-width // unit), 1) * unit
        num_heads = dimension(config, "num_attention_heads")
        num_kv_heads = dimension(config, "num_key_value_heads")
        num_blocks = dimension(config, "num_hidden_layers", largest=LARGEST_NUM_BLOCKS)
        stated = config.get("head_dim") is not None
        head_dim = dimension(config, "head_dim") if stated else dimensions["hidden_size"] // num_heads
        latent = _latent(config) if arch.latent else None
        rotated_dim, scale = head_dim, head_dim**-0.5
        if latent is not None:
            rotated_dim, scale = latent.rotary_dim, (latent.key_dim + latent.rotary_dim) ** -0.5
            head_dim, num_kv_heads = latent.rank + latent.rotary_dim, 1
        blocks = _blocks(config, arch, num_blocks, head_dim, num_kv_heads)
        layout = None if arch.one_half and "moe" not in config["layer_types"] else arch.experts
        if layout is not None and (layout.parallel_mlp is None or switch(config, layout.parallel_mlp)):
            blocks = _with_experts(config, layout, blocks)
            narrow = not any(block.wide_mlp for block in blocks)
            require(narrow, str(arch.wide_mlp), "false where blocks have experts", True)
        per_layer_size = read_count(config, arch.per_layer)
        if per_layer_size:
            rows, key = config.get("vocab_size_per_layer_input"), "vocab_size_per_layer_input"
            require(rows == dimensions["vocab_size"], key, f"vocab_size ({dimensions['vocab_size']})", rows)
        for heads, width in {(num_kv_heads, head_dim), *((one.num_kv_heads, one.head_dim) for one in blocks)}:
            multiple = f"a multiple of num_key_value_heads ({heads})"
            require(num_heads % heads == 0, "num_attention_heads", multiple, num_heads)
            require(width % 2 == 0, "head_dim", "an even number", width)
        activation: Any = "silu" if arch.activation is None else config.get(arch.activation)
        # transformers before 5.24 has the two numbers in its code.
        clamped = arch.activations[activation] == "clamped"
        config = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, **config} if clamped else config
        rope: Any = config.get("rope_parameters")
        if arch.unrotated == "all":  # in place of none
            rope = {"rope_type": "default", "rope_theta": 10000.0}
        require(isinstance(rope, Mapping), "rope_parameters", "an object", rope)
        ropes = [(rope, rotated_dim)]
        if arch.local_rope:
            full_dim = next((block.head_dim for block in blocks if block.rotary == 0), head_dim)
            ropes = [(rope.get("full_attention"), full_dim), (rope.get("sliding_attention"), head_dim)]
        if arch.rope_thetas is not None:
            ropes = [
                ({**rope, "rope_theta": theta}, head_dim) for theta in _thetas(config, arch, num_blocks)[0]
            ] or ropes
        if latent is not None and rope.get("rope_type") == "yarn" and rope.get("mscale_all_dim"):
            factor = number(rope, "rope_parameters.factor", 1, 1e30)
            scale *= (0.1 * number(rope, "rope_parameters.mscale_all_dim") * math.log(factor) + 1) ** 2
        query_scaling = None
        if arch.query_scaling and rope.get("llama_4_scaling_beta") is not None:
            positions = dimension(rope, "original_max_position_embeddings")
            query_scaling = (number(rope, "llama_4_scaling_beta"), positions)
        rotaries = tuple(read_rope(config, one, width, arch) for one, width in ropes)
        for one in rotaries:  # model cards tell to add YaRN without changing max_position_embeddings
            if one.rope_type == "yarn":
                scaled = one.parameters["original_max_position_embeddings"] * one.parameters["factor"]
                key = "max_position_embeddings"
                dimensions[key] = max(dimensions[key], min(int(scaled), LARGEST_DIMENSION))
        biases = {name: getattr(arch, name) for name in ("qkv_bias", "o_bias", "mlp_bias")}
        factors = ("embedding_multiplier", "residual_multiplier", "logits_multiplier")
        multipliers: dict[str, Any] = {name: power(getattr(arch, name)) for name in factors}
        return cls(
            model_type=model_type,
            **dimensions,
            num_blocks=num_blocks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, arch.eps, 0, 1, "a small number"),
            tie_word_embeddings=switch(config, "tie_word_embeddings"),
            **{name: switch(config, bias) if isinstance(bias, str) else bias for name, bias in biases.items()},
            dtype=str(config.get("dtype") or "float32"),
            activation=arch.activations[activation],
            clamp=(number(config, "swiglu_alpha"), number(config, "swiglu_limit")) if clamped else (0.0, 0.0),
            blocks=blocks,
            rotaries=rotaries,
            attention_scale=power(arch.attention_scale, scale) * power(arch.query_multiplier),
            attention_softcap=optional(arch.attention_softcap),
            logits_softcap=optional(arch.logits_softcap),
            **multipliers,
            query_scaling=query_scaling,
            delta_net=_delta_net(config) if any(block.mixer == "delta_net" for block in blocks) else None,
            short_conv=_short_conv(config) if any(block.mixer == "short_conv" for block in blocks) else None,
            mamba2=_mamba2(config, arch.mamba2) if any(block.mixer == "mamba2" for block in blocks) else None,
            per_layer_size=per_layer_size,
            latent=latent,
            output_eps=None if arch.output_eps is None else number(config, arch.output_eps, 0, 1, "a small number"),
            has_output_norms=arch.norms.outputs_key is None or switch(config, arch.norms.outputs_key),
            has_qk_norm=arch.qk_norm is None or arch.qk_norm.key is None or switch(config, arch.qk_norm.key),
        )


def require_values(config: Mapping[str, Any], model_type: str, complete: bool = True) -> None:
    """UnsupportedModelError for a value that the family's row does not have. With ``complete`` false, fields may be missing
    or null, where transformers has a default."""
    arch = ARCHITECTURES[model_type]
    # Gemma 4's "vision" concerns image tokens only.
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        why = "is an encoder, whose tokens see those that follow, and which writes no text"
        found = f"model_type {model_type!r} with use_bidirectional_attention"
        raise UnsupportedModelError(f"unsupported architecture: {found} {why}")
    for key in arch.without:
        require(config.get(key) in (None, False), key, "null or false, the only values known here", config.get(key))
    for key in arch.always if complete else [key for key in arch.always if key in config]:
        require(config.get(key) is True, key, "true, the only value known here", config.get(key))
    tied = switch(config, "tie_word_embeddings")
    require(not (tied and arch.embedding_norm), "tie_word_embeddings", "false: embeddings have a norm", tied)
    named = arch.activation
    if named is not None and (complete or config.get(named) is not None):
        known = isinstance(config.get(named), str) and config[named] in arch.activations
        require(known, named, " or ".join(map(repr, arch.activations)), config.get(named))
    key, alone = ("layers_block_type", _MLP_KINDS) if arch.one_half else ("layer_types", ())
    names = [arch.recurrent or "sliding_attention", "full_attention", *alone]
    kinds: Any = config.get(key) if arch.layer_types and isinstance(config.get(key), list) else []
    older = not complete and any(kind in _OLDER_KINDS.values() for kind in kinds)
    spelled = [_OLDER_KINDS.get(name, name) for name in names] if older else names
    for kind in kinds:
        require(kind in names or kind in spelled, key, " or ".join(spelled), kind)
    if arch.one_half and not kinds and (pattern := config.get("hybrid_override_pattern")) is not None:
        unknown = "".join(letter for letter in dict.fromkeys(str(pattern)) if letter not in _LETTERS)
        require(not unknown, "hybrid_override_pattern", f"the letters {', '.join(_LETTERS)}", unknown)
    layout = arch.experts
    if layout is not None and (layout.parallel_mlp is None or switch(config, layout.parallel_mlp)):
        for key in _NOT_ROUTERS:
            stated = key == layout.scale or (key in _GROUPED and bool(layout.group_best))
            value = None if stated else config.get(key)
            require(value in (None, False, 0, 1, layout.score), key, "nothing: such a router is not known here", value)


def _blocks(
    config: Mapping[str, Any], arch: Architecture, num_blocks: int, head_dim: int, num_kv_heads: int
) -> tuple[Block, ...]:
    has_windows = (arch.layer_types or arch.window) and config.get("sliding_window") not in (None, 0)
    window = dimension(config, "sliding_window") if has_windows else None
    other = arch.recurrent or "sliding_attention"
    kinds: list[Any] = listed(config, "layer_types", num_blocks) if arch.layer_types else [other] * num_blocks
    rotated: list[Any] = [True] * num_blocks
    unstated = arch.unrotated == "position_embedding_type" and config.get("position_embedding_type") != "rope"
    if unstated or arch.unrotated == "all":
        rotated = [False] * num_blocks
    elif arch.recurrent or (arch.unrotated == "full" and window is not None):
        rotated = [(kind == other) != bool(arch.recurrent) for kind in kinds]
    elif arch.unrotated not in (None, "full"):
        rotated = listed(config, arch.unrotated, num_blocks)
    which = [0] * num_blocks
    if arch.rope_thetas is not None:
        known, thetas = _thetas(config, arch, num_blocks)
        rotated, which = thetas, [known.index(theta) if theta else 0 for theta in thetas]
    blocks = []
    for kind, has_rotary, at in zip(kinds, rotated, which, strict=True):
        own = window if kind == other and not arch.recurrent else None
        rotary: int | None = 1 if arch.local_rope and own is not None else at
        mixer: Mixer | None = "mamba2" if arch.mamba2 and kind == other else MIXERS.get(kind, "attention")
        mixer, mlp = (None if kind in _MLP_KINDS else mixer), kind in _MLP_KINDS or not arch.one_half
        rotary = rotary if has_rotary else None
        blocks.append(Block(own, rotary, head_dim, num_kv_heads, mixer, mlp, arch.latent, arch.latent))
    if arch.full_heads:
        blocks = _with_full_heads(config, arch, blocks)
    shared = read_count(config, arch.shared_kv)
    require(shared < num_blocks, str(arch.shared_kv), f"fewer than num_hidden_layers ({num_blocks})", shared)
    wide = arch.wide_mlp is not None and switch(config, arch.wide_mlp)
    first = num_blocks - shared
    for index in range(first, num_blocks):
        of_kind = [earlier for earlier in range(first) if kinds[earlier] == kinds[index]]
        before = f"a block of {kinds[index]} before block {first}, whose keys and values block {index} shares"
        require(bool(of_kind), "layer_types", before, kinds[:first])
        source, own = blocks[of_kind[-1]].num_kv_heads, blocks[index].num_kv_heads
        require(own == source, "per_layer_config", f"{source} num_key_value_heads in block {index}", own)
        blocks[index] = replace(blocks[index], kv_from=of_kind[-1], wide_mlp=wide)
    return tuple(blocks)


def _thetas(config: Mapping[str, Any], arch: Architecture, num_blocks: int) -> tuple[list[float], list[float]]:
    """The different bases of the rotary angles, at most two, and each block's; 0: no rotary embedding."""
    key = str(arch.rope_thetas)
    thetas: list[Any] = listed(config, key, num_blocks, "numbers")
    for theta in thetas:
        require(type(theta) in (int, float) and 0 <= theta <= 1e30, key, "numbers from 0", theta)
    different = sorted({theta for theta in thetas if theta})
    require(len(different) <= 2, key, "at most two different bases", different)
    return different, thetas


def _with_full_heads(config: Mapping[str, Any], arch: Architecture, blocks: list[Block]) -> list[Block]:
    """Set the head dimensions of Gemma 4's full attention blocks, which differ."""
    shared = arch.shared_values is not None and switch(config, arch.shared_values)
    # transformers before 5.20 states them once, later versions per block.
    own = {"head_dim": config.get("global_head_dim")}
    if shared:
        own["num_key_value_heads"] = config.get("num_global_key_value_heads")
    default = {index: own for index, block in enumerate(blocks) if block.window is None}
    given: Any = config.get("per_layer_config", default)
    require(isinstance(given, Mapping), "per_layer_config", "an object", given)
    # The keys are numbers as JSON has them: "5", and "05" in a model of more than ten blocks.
    stated = {int(key) if re.fullmatch("[0-9]{1,5}", str(key)) else -1: (key, one) for key, one in given.items()}
    unknown = min((key for index, (key, _) in stated.items() if not 0 <= index < len(blocks)), default=None)
    require(unknown is None, "per_layer_config", "blocks", unknown)
    found = []
    for index, block in enumerate(blocks):
        _, own = stated.get(index, ("", {}))
        valid = isinstance(own, Mapping) and set(own) <= {"head_dim", "num_key_value_heads"}
        require(valid, "per_layer_config", "head_dim and num_key_value_heads", own)
        heads = {key: dimension(own, key) for key, value in own.items() if value is not None}
        width, kv_heads = heads.get("head_dim", block.head_dim), heads.get("num_key_value_heads", block.num_kv_heads)
        shares = shared and block.window is None
        found.append(replace(block, head_dim=width, num_kv_heads=kv_heads, shared_values=shares))
    for full in (True, False):
        widths = {block.head_dim for block in found if (block.window is None) == full}
        require(len(widths) < 2, "per_layer_config", "one head_dim for blocks of a kind", sorted(widths))
    return found


def _with_experts(config: Mapping[str, Any], layout: ExpertsLayout, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    # transformers has both spellings, and writes one or the other.
    key = layout.count or ("num_local_experts" if "num_local_experts" in config else "num_experts")
    count = dimension(config, key, largest=_MOST_EXPERTS // len(blocks))
    require(config.get("num_experts", count) == count, "num_experts", f"{key} ({count})", config.get("num_experts"))
    chosen = dimension(config, layout.chosen)
    require(chosen <= count, layout.chosen, f"at most the number of experts ({count})", chosen)
    how = layout.renormalised
    if isinstance(how, str):
        require(isinstance(config.get(how), bool), how, "true or false", config.get(how))
    shared_size = 0 if layout.shared_size is None else dimension(config, layout.shared_size)
    if layout.shared_count is not None:
        shared_size *= read_count(config, layout.shared_count)
    biased = layout.choice_bias_key is None or switch(config, layout.choice_bias_key)
    experts = Experts(
        count,
        chosen,
        dimension(config, layout.intermediate_size),
        bool(config[how]) if isinstance(how, str) else how,
        shared_size,
        f"{layout.router}.weight" if layout.parallel_mlp else f"{layout.module}.{layout.router}.weight",
        f"{layout.module}.{layout.router}.bias" if layout.biases else None,
        layout.parallel_mlp is not None,
        layout.shared_gate if shared_size else None,
        layout.score,
        layout.choice_bias if biased else None,
        (0.0 if layout.norm_least is None else number(config, layout.norm_least, 0), layout.norm_added),
        1.0 if layout.scale is None else number(config, layout.scale),
        layout.rounded,
        _groups(config, layout, count, chosen),
    )
    every, dense = 1, list[int]()
    if layout.dense_blocks == "mlp_layer_types":
        kinds = listed(config, "mlp_layer_types", len(blocks))
        require(set(kinds) <= {"dense", "sparse"}, "mlp_layer_types", "dense or sparse", kinds)
        dense += [index for index, kind in enumerate(kinds) if kind == "dense"]
    elif layout.dense_blocks in ("num_dense_layers", "first_k_dense_replace"):
        dense += range(read_count(config, layout.dense_blocks))
    elif layout.dense_blocks == "moe_layer_interval":
        every, last = dimension(config, "moe_layer_interval"), read_count(config, "moe_layer_end_index")
        first = read_count(config, "moe_layer_start_index")
        dense += [index for index in range(len(blocks)) if not first <= index <= last]
    elif layout.dense_blocks:
        every, named = dimension(config, "decoder_sparse_step"), config.get("mlp_only_layers")
        valid = isinstance(named, list) and all(type(one) is int and 0 <= one < len(blocks) for one in named)
        require(valid, "mlp_only_layers", "a list of blocks", named)
        dense += named or ()
    routed = [index not in dense and (index + 1) % every == 0 for index in range(len(blocks))]
    require(any(routed), str(layout.dense_blocks), "blocks with experts", config.get(str(layout.dense_blocks)))
    pairs = zip(blocks, routed, strict=True)
    return tuple(replace(block, experts=experts) if here else block for block, here in pairs)


def _groups(config: Mapping[str, Any], layout: ExpertsLayout, count: int, chosen: int) -> Groups | None:
    method, methods = config.get("topk_method"), ("greedy", "group_limited_greedy")  # of DeepSeek-V2
    require(layout.group_best != 1 or method in methods, "topk_method", " or ".join(methods), method)
    if not layout.group_best or (layout.group_best == 1 and method == "greedy") or config.get("n_group") in (None, 1):
        return None
    found = Groups(
        dimension(config, "n_group", largest=_MOST_GROUPS), dimension(config, "topk_group"), layout.group_best
    )
    size, rest = divmod(count, found.number)
    require(rest == 0 and size >= found.best, "n_group", f"equal groups of the {count} experts", found.number)
    least = f"{-(-chosen // size)} to {found.number}, groups with {chosen} experts"
    require(chosen <= found.kept * size and found.kept <= found.number, "topk_group", least, found.kept)
    return found


def _delta_net(config: Mapping[str, Any]) -> DeltaNet:
    found = DeltaNet(
        key_heads=dimension(config, "linear_num_key_heads"),
        value_heads=dimension(config, "linear_num_value_heads"),
        key_dim=dimension(config, "linear_key_head_dim"),
        value_dim=dimension(config, "linear_value_head_dim"),
        taps=_taps(config, "linear_conv_kernel_dim"),
    )
    multiple = f"a multiple of linear_num_key_heads ({found.key_heads})"
    require(found.value_heads % found.key_heads == 0, "linear_num_value_heads", multiple, found.value_heads)
    return found


def _taps(config: Mapping[str, Any], key: str) -> int:
    """Kernel size of a causal convolution."""
    taps = dimension(config, key, largest=64)
    require(taps > 1, key, "2 or more", taps)
    return taps


def _latent(config: Mapping[str, Any]) -> Latent:
    found = config.get("rope_interleave", True)
    require(found is True, "rope_interleave", "true, the only value known here", found)
    given = config.get("q_lora_rank") is not None
    return Latent(
        dimension(config, "kv_lora_rank"),
        dimension(config, "q_lora_rank") if given else 0,
        *(dimension(config, f"{key}_head_dim") for key in ("qk_nope", "qk_rope", "v")),
    )


def _short_conv(config: Mapping[str, Any]) -> ShortConv:
    return ShortConv(_taps(config, "conv_L_cache"), switch(config, "conv_bias"))


def _mamba2(config: Mapping[str, Any], keys: Sequence[str]) -> Mamba2:
    """``keys``: as of ``Architecture.mamba2``."""
    heads, groups, head_dim, state_dim = (dimension(config, key) for key in keys[:4])
    found = Mamba2(
        heads, groups, head_dim, state_dim, _taps(config, keys[4]), *(switch(config, key) for key in keys[5:])
    )
    require(heads % groups == 0, keys[0], f"a multiple of {groups} groups", heads)
    limit, act = config.get("time_step_limit"), config.get("mamba_hidden_act")
    require(limit in (None, [0, math.inf], (0, math.inf)), "time_step_limit", "no limit", limit)
    require(act in (None, "silu"), "mamba_hidden_act", "'silu'", act)
    return found
