"""The block as data: facts about each supported architecture, as one table, and a model read from its ``config.json``.

A block is two halves, attention and MLP, each ``x + output_norm(half(input_norm(x)))`` with either norm left out in
some families:

    attention   o(softmax(cap(scale * q k^T)) v)         q, k normalised, turned by the block's rotary embedding
    MLP         down(activation(gate) * up)

``ARCHITECTURES`` says for every ``model_type`` what stands where; ``ModelConfig`` says it for one model, block by
block. Every executor reads these two and no executor knows a family's name, so that a family which needs no new
arithmetic is one more row. Names are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import UnsupportedModelError
from .positions import RopeConfig, read_rope
from .refusals import why_refused

__all__ = ["ARCHITECTURES", "Architecture", "Block", "ModelConfig", "Norms", "Projection", "QKNorm"]

Activation = Literal["silu", "gelu_tanh"]

# A config key, and the power its number is raised to: Gemma's scores are multiplied by query_pre_attn_scalar**-0.5.
Power = tuple[str, float]

# The names that a projection can have: separate, or fused.
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Norms:
    """Where a block's norms over the hidden state stand, by name; None where there is none."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


_BEFORE = Norms()
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm of queries and keys: of each head alone, or of all heads as one vector; before the rotation or after."""

    per_head: bool = True
    after_rotary: bool = False
    names: tuple[str, str] = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Architecture:
    """How one ``model_type`` is put together.

    Attributes:
        norms: where the norms over the hidden state stand.
        norm_offset: norms multiply by 1 + weight, in float32 (Gemma), instead of by weight.
        qkv: projections that read the attention's input, in the order their outputs are laid out as q, k, v; or the one
            that all three are fused in, ``qkv_proj``.
        gate_up: projections that read the MLP's input, in the order gate, up; or the fused ``gate_up_proj``.
        qkv_bias, o_bias, mlp_bias: True or False where the architecture fixes it, else the config key that says so.
        qk_norm: how q and k are normalised, if they are.
        activation: which config key names the MLP's activation.
        interleaved: rotary embeddings turn neighbours, not halves.
        local_theta: config key with the rotary base of blocks with a sliding window, where that is another one; None
            where all blocks share one rotary embedding.
        unrotated: which blocks know no positions: ``full``, those without a window in a model where others have one;
            ``listed``, those whose entry in ``no_rope_layers`` is 0.
        sliding: which config key switches the sliding window on; None if its mere presence does.
        full_every: without ``layer_types``, every n-th block attends to everything (``sliding_window_pattern``
            overrides n); None: all blocks have the window.
        attention_scale: what scores are multiplied by; None for head_dim**-0.5.
        query_scaling: queries grow with the logarithm of the position, by ``llama_4_scaling_beta``.
        attention_softcap, logits_softcap: config keys of c in c * tanh(x / c), None where there is no such thing.
        embedding_multiplier, residual_multiplier, logits_multiplier: what embeddings, each half's output, and logits
            are multiplied by; None for 1.
        defaults: what transformers takes a key for that ``config.json`` leaves out.
    """

    class_name: str
    norms: Norms = _BEFORE
    norm_offset: bool = False
    qkv: tuple[str, ...] = _QKV[0]
    gate_up: tuple[str, ...] = _GATE_UP[0]
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QKNorm | None = None
    activation: str = "hidden_act"
    interleaved: bool = False
    local_theta: str | None = None
    unrotated: Literal["full", "listed"] | None = None
    sliding: str | None = None
    full_every: int | None = None
    attention_scale: Power | None = None
    query_scaling: bool = False
    attention_softcap: str | None = None
    logits_softcap: str | None = None
    embedding_multiplier: Power | None = None
    residual_multiplier: Power | None = None
    logits_multiplier: Power | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = (("qkv", self.qkv, _QKV), ("gate_up", self.gate_up, _GATE_UP))
        for name, given, expected in known:
            if given not in expected:
                raise ValueError(f"{self.class_name}: expected {name} to be one of {expected}, found {given}")


_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_GEMMA: dict[str, Any] = {
    **_BIASES,
    "norm_offset": True,
    "activation": "hidden_activation",
    "embedding_multiplier": ("hidden_size", 0.5),
}
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", **_BIASES, mlp_bias="mlp_bias"),
    "mistral": Architecture("MistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral3": Architecture(
        "Ministral3ForCausalLM",
        query_scaling=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        **_BIASES,
        qk_norm=QKNorm(),
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "phi3": Architecture("Phi3ForCausalLM", qkv=_QKV[1], gate_up=_GATE_UP[1], defaults={"rms_norm_eps": 1e-5}),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        norms=_SANDWICH,
        full_every=2,
        attention_scale=("query_pre_attn_scalar", -0.5),
        attention_softcap="attn_logit_softcapping",
        logits_softcap="final_logit_softcapping",
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        **_GEMMA,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        norms=_SANDWICH,
        qk_norm=QKNorm(),
        local_theta="rope_local_base_freq",
        full_every=6,
        attention_scale=("query_pre_attn_scalar", -0.5),
        logits_softcap="final_logit_softcapping",
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        **_GEMMA,
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM", norms=_AFTER, **_BIASES, qk_norm=QKNorm(per_head=False), defaults={"rms_norm_eps": 1e-5}
    ),
    "olmo3": Architecture(
        "Olmo3ForCausalLM",
        norms=_AFTER,
        **_BIASES,
        qk_norm=QKNorm(per_head=False),
        local_theta="rope_theta",
        full_every=4,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        **_BIASES,
        mlp_bias="mlp_bias",
        unrotated="listed",
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        **_BIASES,
        mlp_bias="mlp_bias",
        attention_scale=("attention_multiplier", 1),
        embedding_multiplier=("embedding_multiplier", 1),
        residual_multiplier=("residual_multiplier", 1),
        logits_multiplier=("logits_scaling", -1),
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        gate_up=_GATE_UP[1],
        qkv_bias="attention_bias",
        interleaved=True,
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        norms=_AFTER,
        qk_norm=QKNorm(),
        unrotated="full",
        full_every=4,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "rms_norm_eps": 1e-5},
    ),
    "hunyuan_v1_dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        **_BIASES,
        qk_norm=QKNorm(after_rotary=True, names=("query_layernorm", "key_layernorm")),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "ernie4_5": Architecture(
        "Ernie4_5ForCausalLM",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        interleaved=True,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True)
class Block:
    """What tells one block of a model from another.

    Attributes:
        window: how many positions it attends to, itself included; None for all.
        rotary: which of ``ModelConfig.rotaries`` turns its queries and keys; None where nothing does.
    """

    window: int | None
    rotary: int | None


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
        blocks: one entry a block, in order.
        rotaries: the rotary embeddings that blocks use, one or two.
        attention_scale: what scores are multiplied by.
        attention_softcap, logits_softcap: c in c * tanh(x / c), or None.
        embedding_multiplier, residual_multiplier, logits_multiplier: what embeddings, each half's output (before it is
            added) and logits are multiplied by. The first is rounded to the activations' type before it is used.
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

    @property
    def architecture(self) -> Architecture:
        """The row of ``ARCHITECTURES`` this model belongs to."""
        return ARCHITECTURES[self.model_type]

    @property
    def features(self) -> frozenset[str]:
        """What the model's blocks have that Llama's have not, in words: what an executor may not know yet."""
        arch, norm = self.architecture, self.architecture.qk_norm
        has = {
            "norms of outputs": bool(arch.norms.attention_output or arch.norms.mlp_output),
            "inputs that are not normalised": not (arch.norms.attention_input and arch.norms.mlp_input),
            "norms by 1 + weight": arch.norm_offset,
            "norms of q and k as a whole": norm is not None and not norm.per_head,
            "norms of q and k after the rotation": norm is not None and norm.after_rotary,
            "GELU": self.activation != "silu",
            "interleaved rotary embeddings": self.rotaries[0].interleaved,
            "two rotary embeddings": len(self.rotaries) > 1,
            "blocks without positions": any(block.rotary is None for block in self.blocks),
            "an attention scale of its own": self.attention_scale != self.head_dim**-0.5,
            "queries scaled by position": self.query_scaling is not None,
            "capped scores": self.attention_softcap is not None,
            "capped logits": self.logits_softcap is not None,
            "multiplied embeddings": self.embedding_multiplier != 1.0,
            "multiplied outputs": self.residual_multiplier != 1.0,
            "multiplied logits": self.logits_multiplier != 1.0,
        }
        return frozenset(name for name, present in has.items() if present)

    @property
    def q_size(self) -> int:
        """Width of the queries, ``num_heads * head_dim``; also K of ``o_proj``."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys and of the values, ``num_kv_heads * head_dim``."""
        return self.num_kv_heads * self.head_dim

    def projections(self, block: int | None = None) -> Iterator[Projection]:
        """The projections in scope, in the order of execution: all of them, or one block's.

        In scope are all linear layers inside the blocks, never ``lm_head`` nor the embeddings.
        """
        arch = self.architecture
        qkv_sizes = {
            "q_proj": self.q_size,
            "k_proj": self.kv_size,
            "v_proj": self.kv_size,
            "qkv_proj": self.q_size + 2 * self.kv_size,
        }
        mlp_sizes = {
            "gate_proj": self.intermediate_size,
            "up_proj": self.intermediate_size,
            "gate_up_proj": 2 * self.intermediate_size,
        }
        for index in range(self.num_blocks) if block is None else (block,):
            attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
            for role in arch.qkv:
                yield Projection(attention + role, index, role, self.hidden_size, qkv_sizes[role], self.qkv_bias)
            yield Projection(attention + "o_proj", index, "o_proj", self.q_size, self.hidden_size, self.o_bias)
            for role in arch.gate_up:
                yield Projection(mlp + role, index, role, self.hidden_size, mlp_sizes[role], self.mlp_bias)
            yield Projection(
                mlp + "down_proj", index, "down_proj", self.intermediate_size, self.hidden_size, self.mlp_bias
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dimensions from a parsed ``config.json``.

        Raises:
            UnsupportedModelError: unknown ``model_type``, quantised weights, an activation or rotary scaling this
                project does not implement, or a missing or nonsensical dimension.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise UnsupportedModelError(f"unsupported architecture: {why_refused(config, model_type, ARCHITECTURES)}")
        if config.get("quantization_config"):
            raise UnsupportedModelError(
                "the model is quantised (config.json has quantization_config); "
                "expected bf16, fp16 or fp32 weights: use the unquantised checkpoint"
            )
        arch = ARCHITECTURES[model_type]
        config = {**arch.defaults, **config}

        def switch(value: bool | str) -> bool:
            return _switch(config, value) if isinstance(value, str) else value

        def power(value: Power | None, default: float) -> float:
            return default if value is None else _number(config, value[0]) ** value[1]

        def optional(key: str | None) -> float | None:
            return None if key is None or config.get(key) is None else _number(config, key)

        hidden_size = _dimension(config, "hidden_size")
        num_heads = _dimension(config, "num_attention_heads")
        num_kv_heads = _dimension(config, "num_key_value_heads", default=num_heads)
        num_blocks = _dimension(config, "num_hidden_layers", largest=_LARGEST_NUM_BLOCKS)
        head_dim = _dimension(config, "head_dim", default=hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim: expected an even number, found {head_dim}")
        eps = config.get("rms_norm_eps", 1e-6)
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
            raise UnsupportedModelError(f"config.json: rms_norm_eps: expected a small number, found {eps!r:.80}")
        blocks = _blocks(config, arch, num_blocks)
        return cls(
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=_dimension(config, "intermediate_size"),
            num_blocks=num_blocks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_dimension(config, "vocab_size"),
            rms_norm_eps=float(eps),
            max_position_embeddings=_dimension(config, "max_position_embeddings"),
            tie_word_embeddings=_switch(config, "tie_word_embeddings"),
            qkv_bias=switch(arch.qkv_bias),
            o_bias=switch(arch.o_bias),
            mlp_bias=switch(arch.mlp_bias),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            activation=_activation(config, arch),
            blocks=blocks,
            rotaries=_rotaries(config, arch, head_dim),
            attention_scale=power(arch.attention_scale, head_dim**-0.5),
            attention_softcap=optional(arch.attention_softcap),
            logits_softcap=optional(arch.logits_softcap),
            embedding_multiplier=power(arch.embedding_multiplier, 1.0),
            residual_multiplier=power(arch.residual_multiplier, 1.0),
            logits_multiplier=power(arch.logits_multiplier, 1.0),
            query_scaling=_query_scaling(config) if arch.query_scaling else None,
        )


def _activation(config: Mapping[str, Any], arch: Architecture) -> Activation:
    given = config.get(arch.activation) or arch.defaults.get(arch.activation, "silu")
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        known = " or ".join(repr(name) for name in _ACTIVATIONS)
        raise UnsupportedModelError(f"{arch.activation}: expected {known}, found {given!r:.80}")
    return _ACTIVATIONS[given]


def _blocks(config: Mapping[str, Any], arch: Architecture, num_blocks: int) -> tuple[Block, ...]:
    windows = _windows(config, arch, num_blocks)
    unrotated: set[int] = set()
    if arch.unrotated == "full" and any(window is not None for window in windows):
        unrotated = {index for index, window in enumerate(windows) if window is None}
    elif arch.unrotated == "listed":
        listed = _listed(config, "no_rope_layers", num_blocks)
        if listed is None:
            every = _dimension(config, "no_rope_layer_interval", default=4)
            listed = [int((index + 1) % every != 0) for index in range(num_blocks)]
        unrotated = {index for index in range(num_blocks) if not listed[index]}
    local = 0 if arch.local_theta is None else 1
    return tuple(
        Block(window, None if index in unrotated else 0 if window is None else local)
        for index, window in enumerate(windows)
    )


def _windows(config: Mapping[str, Any], arch: Architecture, num_blocks: int) -> list[int | None]:
    window = config.get("sliding_window")
    if window is not None:
        _dimension(config, "sliding_window")
    if window is None or (arch.sliding is not None and not _switch(config, arch.sliding)):
        return [None] * num_blocks
    kinds = _listed(config, "layer_types", num_blocks)
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if arch.unrotated == "listed":
        # SmolLM3's rule: without a list of kinds, the window stands where positions are not told apart.
        listed = _listed(config, "no_rope_layers", num_blocks)
        every = _dimension(config, "no_rope_layer_interval", default=4)
        rotated = listed or [(index + 1) % every for index in range(num_blocks)]
        return [None if rotated[index] else window for index in range(num_blocks)]
    if arch.full_every is not None:
        return [None if full else window for full in _full(config, arch.full_every, num_blocks)]
    # Qwen's rule before layer_types existed: the first max_window_layers blocks attend to everything.
    first = config.get("max_window_layers", 0) if arch.sliding is not None else 0
    if not isinstance(first, int):
        raise UnsupportedModelError(f"config.json: max_window_layers: expected a number, found {first!r:.80}")
    return [window if index >= first else None for index in range(num_blocks)]


def _full(config: Mapping[str, Any], every: int, num_blocks: int) -> list[bool]:
    """Which blocks attend to everything, by ``sliding_window_pattern``: a period, or a period spelled in L and G."""
    pattern = config.get("sliding_window_pattern", every)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        # The last block attends to everything whatever the letters say.
        return [pattern[index % len(pattern)] == "G" or index == num_blocks - 1 for index in range(num_blocks)]
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedModelError(
            f"config.json: sliding_window_pattern: expected a positive integer or letters, found {pattern!r:.80}"
        )
    return [(index + 1) % pattern == 0 for index in range(num_blocks)]


def _rotaries(config: Mapping[str, Any], arch: Architecture, head_dim: int) -> tuple[RopeConfig, ...]:
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
        read_rope(config, given, theta, head_dim, interleaved=arch.interleaved),
        read_rope(config, local, local_theta, head_dim, interleaved=arch.interleaved),
    )


def _query_scaling(config: Mapping[str, Any]) -> tuple[float, int] | None:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    beta = given.get("llama_4_scaling_beta") if isinstance(given, Mapping) else None
    if beta is None:
        return None
    return _number(given, "llama_4_scaling_beta"), _dimension(given, "original_max_position_embeddings")


# Far above any model there is; keeps a hostile config from asking for absurd memory before a tensor was looked at.
_LARGEST_DIMENSION = 2**27
_LARGEST_NUM_BLOCKS = 10_000


def _dimension(
    config: Mapping[str, Any], key: str, default: int | None = None, largest: int = _LARGEST_DIMENSION
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive integer, found {value!r:.80}")
    if value > largest:
        raise UnsupportedModelError(f"config.json: {key}: expected at most {largest:,}, found {value!r:.40}")
    return value


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModelError(f"config.json: {key}: expected true or false, found {value!r:.80}")
    return bool(value)


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    # The bounds keep sums, powers and quotients of it finite; NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-12 < value < 1e12:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive number, found {value!r:.80}")
    return float(value)


def _listed(config: Mapping[str, Any], key: str, num_blocks: int) -> list[Any] | None:
    """A list with an entry for every block; None if the config has none."""
    values = config.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != num_blocks:
        raise UnsupportedModelError(f"config.json: {key}: expected {num_blocks} entries, found {values!r:.80}")
    return values
