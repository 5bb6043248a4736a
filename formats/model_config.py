"""A model as its ``config.json`` describes it: dimensions, blocks, rotary embeddings and multipliers, all checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .architectures import ARCHITECTURES, Activation, Architecture, Power, why_refused
from .blocks import Block, DeltaNet, RopeConfig, dimension, number, read_blocks, read_delta_net, read_rope, switch
from .errors import UnsupportedModelError

# Far above any model there is; keeps a hostile config from asking for absurd memory before a tensor was looked at.
_LARGEST_NUM_BLOCKS = 10_000


@dataclass(frozen=True)
class Projection:
    """One linear layer inside a block. ``name`` is its full Hugging Face module name; its weight is (N, K)."""

    name: str
    block: int
    role: str
    in_features: int
    out_features: int
    bias: bool

    @property
    def num_parameters(self) -> int:
        """Weights of the projection, without its bias: the unit in which sparsities are averaged."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class ModelConfig:
    """A causal LM's dimensions and its blocks, from its ``config.json`` (transformers 4 or 5 spelling).

    Attributes:
        num_kv_heads, head_dim: of blocks that have none of their own (``Block``).
        blocks: one entry a block, in order.
        rotaries: the rotary embeddings that blocks use, one or two.
        attention_scale: what scores are multiplied by.
        attention_softcap, logits_softcap: c in c * tanh(x / c), or None.
        embedding_multiplier, residual_multiplier, logits_multiplier: what embeddings, each half's output (before it is
            added) and logits are multiplied by. The first is rounded to the activations' type before it is used.
        delta_net: of the recurrent blocks; None where there are none.
        query_scaling: (beta, n): queries at position p are multiplied by 1 + beta * log(1 + floor(p / n)).
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    activation: Activation
    blocks: tuple[Block, ...]
    rotaries: tuple[RopeConfig, ...]
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_multiplier: float
    query_scaling: tuple[float, int] | None
    delta_net: DeltaNet | None = None

    @property
    def architecture(self) -> Architecture:
        """The row of ``ARCHITECTURES`` this model belongs to."""
        return ARCHITECTURES[self.model_type]

    def q_size(self, block: int) -> int:
        """Width of a block's queries; also K of its ``o_proj``."""
        return self.num_heads * self.blocks[block].head_dim

    def projections(self, block: int | None = None) -> Iterator[Projection]:
        """The projections in scope, in the order of execution: all of them, or one block's.

        In scope are all linear layers inside the blocks, never ``lm_head`` nor the embeddings.
        """
        arch = self.architecture
        mlp_sizes = {
            "gate_proj": self.intermediate_size,
            "up_proj": self.intermediate_size,
            "gate_up_proj": 2 * self.intermediate_size,
        }
        for index in range(self.num_blocks) if block is None else (block,):
            attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
            if self.delta_net is not None and self.blocks[index].recurrent:
                yield from self._recurrent_projections(index, self.delta_net)
            else:
                q_size, kv_size = self.q_size(index), self.blocks[index].kv_size
                sizes = {
                    "q_proj": q_size * (2 if arch.attention_gate else 1),
                    "k_proj": kv_size,
                    "v_proj": kv_size,
                    "qkv_proj": q_size + 2 * kv_size,
                }
                for role in self.qkv(index):
                    yield Projection(attention + role, index, role, self.hidden_size, sizes[role], self.qkv_bias)
                yield Projection(attention + "o_proj", index, "o_proj", q_size, self.hidden_size, self.o_bias)
            for role in arch.gate_up:
                yield Projection(mlp + role, index, role, self.hidden_size, mlp_sizes[role], self.mlp_bias)
            yield Projection(
                mlp + "down_proj", index, "down_proj", self.intermediate_size, self.hidden_size, self.mlp_bias
            )

    def qkv(self, block: int) -> tuple[str, ...]:
        """Roles of the projections that read the input of a block's attention; not for recurrent blocks."""
        return tuple(one for one in self.architecture.qkv if one != "v_proj" or not self.blocks[block].shared_values)

    def shared_inputs(self, block: int) -> list[list[Projection]]:
        """A block's projections by the input that they read, in the order of execution."""
        found: list[list[Projection]] = []
        for projection in self.projections(block):
            if projection.role in ("o_proj", "out_proj", self.architecture.gate_up[0], "down_proj") or not found:
                found.append([])
            found[-1].append(projection)
        return found

    def _recurrent_projections(self, index: int, delta: DeltaNet) -> Iterator[Projection]:
        for role, inputs, outputs in (
            ("in_proj_qkv", self.hidden_size, delta.mixed_size),
            ("in_proj_z", self.hidden_size, delta.value_size),
            ("out_proj", delta.value_size, self.hidden_size),
        ):
            yield Projection(f"model.layers.{index}.linear_attn.{role}", index, role, inputs, outputs, False)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dimensions from a parsed ``config.json``.

        Raises:
            UnsupportedModelError: unknown ``model_type``, an activation or rotary scaling this project does not
                implement, or a missing or nonsensical dimension.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise UnsupportedModelError(f"unsupported architecture: {why_refused(config, model_type, ARCHITECTURES)}")
        # Gemma 4's "vision" is about pictures' tokens alone.
        if config.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise UnsupportedModelError(
                f"unsupported architecture: model_type {model_type!r} with use_bidirectional_attention is an encoder, "
                "whose tokens see those that follow, and which writes no text"
            )
        arch = ARCHITECTURES[model_type]
        config = {**arch.defaults, **config}

        def fixed(value: bool | str) -> bool:
            return switch(config, value) if isinstance(value, str) else value

        def power(value: Power | None, default: float) -> float:
            return default if value is None else number(config, value[0]) ** value[1]

        def optional(key: str | None) -> float | None:
            return None if key is None or config.get(key) is None else number(config, key)

        if arch.full_heads and (reason := _why_not_plain(config)):
            raise UnsupportedModelError(f"unsupported architecture: model_type {model_type!r} with {reason}")
        hidden_size = dimension(config, "hidden_size")
        num_heads = dimension(config, "num_attention_heads")
        num_kv_heads = dimension(config, "num_key_value_heads", default=num_heads)
        num_blocks = dimension(config, "num_hidden_layers", largest=_LARGEST_NUM_BLOCKS)
        head_dim = dimension(config, "head_dim", default=hidden_size // num_heads)
        blocks = read_blocks(config, arch, num_blocks, head_dim, num_kv_heads)
        for heads, width in {(num_kv_heads, head_dim), *((one.num_kv_heads, one.head_dim) for one in blocks)}:
            if num_heads % heads:
                raise UnsupportedModelError(
                    f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({heads})"
                )
            if width % 2:
                raise UnsupportedModelError(f"head_dim: expected an even number, found {width}")
        eps = config.get("rms_norm_eps", 1e-6)
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
            raise UnsupportedModelError(f"config.json: rms_norm_eps: expected a small number, found {eps!r:.80}")
        return cls(
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=dimension(config, "intermediate_size"),
            num_blocks=num_blocks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=dimension(config, "vocab_size"),
            rms_norm_eps=float(eps),
            max_position_embeddings=dimension(config, "max_position_embeddings"),
            tie_word_embeddings=switch(config, "tie_word_embeddings"),
            qkv_bias=fixed(arch.qkv_bias),
            o_bias=fixed(arch.o_bias),
            mlp_bias=fixed(arch.mlp_bias),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            activation=_activation(config, arch),
            blocks=blocks,
            rotaries=_rotaries(config, arch, head_dim, next((b.head_dim for b in blocks if b.rotary == 0), head_dim)),
            attention_scale=power(arch.attention_scale, head_dim**-0.5),
            attention_softcap=optional(arch.attention_softcap),
            logits_softcap=optional(arch.logits_softcap),
            embedding_multiplier=power(arch.embedding_multiplier, 1.0),
            residual_multiplier=power(arch.residual_multiplier, 1.0),
            logits_multiplier=power(arch.logits_multiplier, 1.0),
            query_scaling=_query_scaling(config) if arch.query_scaling else None,
            delta_net=read_delta_net(config) if any(block.recurrent for block in blocks) else None,
        )


def _activation(config: Mapping[str, Any], arch: Architecture) -> Activation:
    given = config.get(arch.activation) or arch.defaults.get(arch.activation, "silu")
    if not isinstance(given, str) or given not in arch.activations:
        known = " or ".join(repr(name) for name in arch.activations)
        raise UnsupportedModelError(f"{arch.activation}: expected {known}, found {given!r:.80}")
    return arch.activations[given]


def _why_not_plain(config: Mapping[str, Any]) -> str | None:
    """What a smaller or sparser Gemma 4 has that the large dense one has not."""
    if config.get("enable_moe_block"):
        return "enable_moe_block is a mixture-of-experts model, which reads only some of its weights at a token already"
    for key, what in (
        ("hidden_size_per_layer_input", "every block has an embedding of its own"),
        ("num_kv_shared_layers", "some blocks have no keys and values of their own"),
    ):
        if config.get(key):
            return f"{key} {config[key]!r:.20} is not supported: {what}; of this family the dense models without are"
    return None


def _rotaries(
    config: Mapping[str, Any], arch: Architecture, head_dim: int, full_head_dim: int
) -> tuple[RopeConfig, ...]:
    # transformers 5 keeps everything in rope_parameters; 4 kept rope_theta beside rope_scaling.
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta", 10000.0)
    if arch.local_theta is None:
        return (read_rope(config, given, theta, head_dim, interleaved=arch.interleaved),)
    local: Any = {}
    if isinstance(given, Mapping) and ("full_attention" in given or "sliding_attention" in given):
        given, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    local_theta = config.get(arch.local_theta, theta)
    return (
        read_rope(config, given, theta, full_head_dim, interleaved=arch.interleaved),
        read_rope(config, local, local_theta, head_dim, interleaved=arch.interleaved),
    )


def _query_scaling(config: Mapping[str, Any]) -> tuple[float, int] | None:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    beta = given.get("llama_4_scaling_beta") if isinstance(given, Mapping) else None
    if beta is None:
        return None
    return number(given, "llama_4_scaling_beta"), dimension(given, "original_max_position_embeddings")
