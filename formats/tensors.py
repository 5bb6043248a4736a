"""The tensors of a model as one table: their names, shapes, and places in `runtime.torch.block.Block`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .model_config import LM_HEAD, ModelConfig

MTP = "mtp."  # prefix of the tensors of a multi-token prediction head
# Of per-layer embeddings, for all blocks.
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"  # (V, blocks * width)
PER_LAYER_PROJECTION = "model.per_layer_model_projection.weight"
PER_LAYER_NORM = "model.per_layer_projection_norm.weight"


@dataclass(frozen=True)
class StackedExperts:
    """The position of an expert's tensor in a tensor of all experts of its block."""

    name: str  # of the tensor of all experts
    shape: tuple[int, ...]
    expert: int
    index: int  # 0 for gate, 1 for up
    each: int  # tensors per expert, 1 or 2
    interleaved: bool
    part: tuple[int, ...]  # shape of the expert's tensor

    def of(self, whole: Any) -> Any:
        """The expert's tensor as a view of ``whole[expert]``."""
        if not self.interleaved:
            return whole.chunk(self.each)[self.index]
        part = whole[..., self.index :: self.each]
        return part.t() if len(self.part) == 2 else part


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]  # of weights (out, in)
    # Of `Block`, or with ``delta.``, ``conv.``, ``mamba.`` and ``latent.`` of its mixer; None: a projection's, or no block's.
    field: str | None = None
    norm: bool = False  # the weight of a `Norm`
    wide: bool = False  # float32, whatever the activations' dtype
    order: tuple[int, ...] = ()  # the rows in the order of the operations; empty: as stored
    stacked: StackedExperts | None = None  # of an expert's tensor


def model_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors in the order of execution; no ``lm_head`` with tied embeddings; experts have separate tensors."""
    hidden, vocab, per_layer = config.hidden_size, config.vocab_size, config.per_layer_size
    yield TensorSpec(config.embedding, (vocab, hidden))
    if per_layer:
        every = config.num_blocks * per_layer
        yield TensorSpec(PER_LAYER_EMBEDDING, (vocab, every))
        yield TensorSpec(PER_LAYER_NORM, (per_layer,))
        yield TensorSpec(PER_LAYER_PROJECTION, (every, hidden))
    for index in range(config.num_blocks):
        yield from block_tensors(config, index)
    yield TensorSpec(f"{config.architecture.final_norm}.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield TensorSpec(LM_HEAD, (vocab, hidden))


def block_tensors(config: ModelConfig, index: int) -> Iterator[TensorSpec]:
    """The tensors of block ``index``, with its projections', in the order of execution."""
    arch, spec, hidden, prefix = config.architecture, config.blocks[index], config.hidden_size, f"model.layers.{index}."
    experts = spec.experts

    def row(field: str, name: str, *shape: int, norm: bool = False) -> TensorSpec:
        return TensorSpec(prefix + name, shape, field, norm)

    def norms(field: str) -> list[TensorSpec]:
        name = getattr(config.norms, field)
        return [] if name is None else [row(field, f"{name}.weight", hidden, norm=True)]

    projections = list(config.projections(index))
    output = "o_proj" if spec.mixer == "attention" else "out_proj"
    # Role of a projection -> the tensors before and after its own.
    before = {projections[0].role: norms("attention_input"), arch.gate_up[0]: norms("mlp_input"), output: []}
    after = {output: norms("attention_output"), "down_proj": norms("mlp_output")}
    mixer = before[output]
    if spec.mixer == "attention":
        if arch.qk_norm is not None and config.has_qk_norm:
            sizes = {"q_norm": config.q_size(index)} | ({} if spec.kv_from is not None else {"k_norm": spec.kv_size})
            for (field, size), name in zip(sizes.items(), arch.qk_norm.names, strict=False):
                size = spec.head_dim if arch.qk_norm.per_head else size
                mixer.append(row(field, f"self_attn.{name}.weight", size, norm=True))
        if (latent := config.latent) is not None:
            if latent.query_rank:
                mixer.append(row("query_norm", "self_attn.q_a_layernorm.weight", latent.query_rank, norm=True))
            mixer.append(row("latent.norm", "self_attn.kv_a_layernorm.weight", latent.rank, norm=True))
            rows = config.num_heads * (latent.key_dim + latent.value_dim)
            mixer.append(row("latent.kv_b", "self_attn.kv_b_proj.weight", rows, latent.rank))
        if arch.sinks:
            mixer.append(row("sinks", arch.modules.get("sinks", "self_attn.sinks"), config.num_heads))
    elif spec.mixer == "delta_net" and (delta := config.delta_net) is not None:
        if arch.interleaved_delta:
            each = delta.value_heads // delta.key_heads
            ba = row("delta.ba", "linear_attn.in_proj_ba.weight", 2 * delta.value_heads, hidden)
            mixer.append(replace(ba, order=delta.order(each, each)))
        else:
            names = {"delta.b": "linear_attn.in_proj_b.weight", "delta.a": "linear_attn.in_proj_a.weight"}
            mixer += [row(field, name, delta.value_heads, hidden) for field, name in names.items()]
        mixer += [  # small and sensitive, so no masked projections
            row("delta.kernel", "linear_attn.conv1d.weight", delta.mixed_size, 1, delta.taps),
            row("delta.dt_bias", "linear_attn.dt_bias", delta.value_heads),
            row("delta.log_rate", "linear_attn.A_log", delta.value_heads),
            row("delta.norm", "linear_attn.norm.weight", delta.value_dim),
        ]
    elif spec.mixer == "mamba2" and (mamba := config.mamba2) is not None:
        part = arch.modules.get("in_proj", "mamba.in_proj").removesuffix("in_proj")
        mixer.append(row("mamba.kernel", f"{part}conv1d.weight", mamba.mixed_size, 1, mamba.taps))
        if mamba.conv_bias:
            mixer.append(row("mamba.bias", f"{part}conv1d.bias", mamba.mixed_size))
        names = {"mamba.dt_bias": "dt_bias", "mamba.log_rate": "A_log", "mamba.skip": "D"}
        mixer += [row(field, f"{part}{name}", mamba.heads) for field, name in names.items()]
        mixer.append(row("mamba.norm", f"{part}norm.weight", mamba.inner))
    elif (conv := config.short_conv) is not None:
        mixer.append(row("conv.kernel", "conv.conv.weight", hidden, 1, conv.taps))
        if conv.bias:
            mixer.append(row("conv.bias", "conv.conv.bias", hidden))
    if experts is not None:
        routing = before[arch.gate_up[0]]
        routing.append(replace(row("router", experts.router, experts.count, hidden), wide=experts.rounded is None))
        if experts.router_bias is not None:
            routing.append(
                replace(row("router_bias", experts.router_bias, experts.count), wide=experts.rounded is None)
            )
        if experts.choice_bias is not None and arch.experts is not None:
            one_row = (1,) * arch.experts.choice_bias_row
            routing.append(
                replace(
                    row("choice_bias", experts.choice_bias, *one_row, experts.count), wide=experts.rounded != "logits"
                )
            )
        if experts.parallel_mlp:
            routing += [
                row("experts_input", "pre_feedforward_layernorm_2.weight", hidden, norm=True),
                row("experts_output", "post_feedforward_layernorm_2.weight", hidden, norm=True),
                row("shared_output", "post_feedforward_layernorm_1.weight", hidden, norm=True),
                row("router_scale", "router.scale", hidden),
                row("expert_scale", "router.per_expert_scale", experts.count),
            ]
        elif experts.shared_gate is not None:
            before["shared_gate_proj"] = [row("shared_gate", experts.shared_gate, 1, hidden)]
    interleaved = arch.experts is not None and arch.experts.stacked == "interleaved"
    for one in projections:
        yield from before.get(one.role, ())
        down = one.role == "down_proj"
        alone = down or not arch.gated
        position, each = (0, 1) if alone else (int(one.role == "up_proj"), 2)
        name = one.name if alone else f"{one.name.rpartition('.')[0]}.gate_up_proj"
        if arch.experts is not None and arch.experts.stacked_names is not None:
            name = f"{prefix}{arch.experts.module}.{arch.experts.stacked_names[down]}"
        rows, columns = each * one.out_features, one.in_features
        whole: tuple[int, ...] = (one.experts, columns, rows) if interleaved else (one.experts, rows, columns)
        shape: tuple[int, ...] = one.out_features, one.in_features
        for kind in ("weight", "bias") if one.bias else ("weight",):
            if kind == "bias":
                name, whole, shape = f"{name}_bias", (one.experts, rows), shape[:1]
            for expert, part in enumerate(one.parts):
                place = StackedExperts(name, whole, expert, position, each, interleaved, shape) if one.experts else None
                order = config.delta_net.heads_order if one.role == "in_proj_qkvz" and config.delta_net else ()
                yield TensorSpec(f"{part}.{kind}", shape, stacked=place, order=order)
        yield from after.get(one.role, ())
    if per_layer := config.per_layer_size:
        yield row("per_layer_gate", "per_layer_input_gate.weight", per_layer, hidden)
        yield row("per_layer_projection", "per_layer_projection.weight", hidden, per_layer)
        yield row("per_layer_output", "post_per_layer_input_norm.weight", hidden, norm=True)
    if arch.block_scalar is not None:
        yield row("scalar", arch.block_scalar, 1)


def block_fields(config: ModelConfig, index: int) -> dict[str, TensorSpec]:
    """A block's tensors except the projections', by field of `Block`."""
    return {one.field: one for one in block_tensors(config, index) if one.field is not None}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of `model_tensors`."""
    return {one.name: one.shape for one in model_tensors(config)}


def stacked_experts(config: ModelConfig) -> dict[str, StackedExperts]:
    """Name of each expert's tensor -> its position in a tensor of all experts of its block."""
    return {one.name: one.stacked for one in model_tensors(config) if one.stacked is not None}


def mtp_config(config: ModelConfig) -> ModelConfig:
    """The configuration of an MTP head's single attention block as a model; its tensors have the prefix ``model.`` instead
    of ``mtp.``."""
    return replace(
        config, num_blocks=1, blocks=(replace(config.blocks[0], mixer="attention", rotary=0),), delta_net=None
    )


def mtp_tensors(config: ModelConfig) -> list[TensorSpec]:
    """An MTP head's tensors; embedding and output layer are the model's. Empty in other families."""
    if not config.architecture.mtp:
        return []
    hidden, found = config.hidden_size, list[TensorSpec]()
    found += [TensorSpec(f"{MTP}pre_fc_norm_{half}.weight", (hidden,)) for half in ("embedding", "hidden")]
    found.append(TensorSpec(f"{MTP}fc.weight", (hidden, 2 * hidden)))
    for one in model_tensors(mtp_config(config)):
        if one.name not in (config.embedding, LM_HEAD):
            place = one.stacked and replace(one.stacked, name=MTP + one.stacked.name.removeprefix("model."))
            found.append(replace(one, name=MTP + one.name.removeprefix("model."), stacked=place))
    return found
