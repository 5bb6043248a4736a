"""The transformer block in plain PyTorch: the reference for the CPU and GPU kernels, and the prefill of most decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats import block_ops, model_config
from wisparse.formats.block_ops import HIDDEN, Op
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION, block_fields
from wisparse.kernels.reference import keep_mask, soft_cap

from ..decoding.cache import KVCache
from ..decoding.rotary import rotate
from .mixers import ConvWeights, DeltaWeights, LatentWeights, MambaWeights, Norm, float_dtype

Linear = TypeVar("Linear")
LINEARS = ("qkv", "o", "gate_up", "down")  # groups of projections with the same input, in the order of execution
SHARED = ("shared_gate_up", "shared_down")  # of a shared expert, after LINEARS
ROLES = ("qkv", "q_b", *LINEARS[1:], *SHARED)


def drop_channels(x: Tensor, keep: Tensor) -> Tensor:
    """x (T, K) with dropped channels of the last R rows at zero; keep: (R, K)."""
    dense, masked = x[: len(x) - len(keep)], x[len(x) - len(keep) :]
    return torch.cat((dense, torch.where(keep, masked, masked.new_zeros(()))))


class MaskedLinear:
    """A projection, or one expert of it, with its mask."""

    def __init__(
        self,
        bundle: Bundle,
        projection: model_config.Projection,
        weight: Any,
        device: torch.device,
        dtype: torch.dtype,
        expert: int = 0,
    ) -> None:
        """weight: (N, K), or another type that a subclass multiplies with; in a graded bundle a pair: the weight (N, K) and
        its low plane (N, K)."""
        self.expert = expert if projection.experts else None
        # The share of all tokens that are routed to it, on average.
        self.share = projection.chosen / max(projection.experts, 1)
        name, self.in_features, self.out_features = projection.name, projection.in_features, projection.out_features
        self.weight, self.low = weight if isinstance(weight, tuple) else (weight, None)
        self.name, self._device, self.planes = name, device, len(bundle.masks[name].plane_thresholds) or 1
        part = projection.parts[expert]
        self.bias = bundle.checkpoint.tensor(f"{part}.bias", device).to(dtype) if projection.bias else None
        self.kept: Tensor | None = None  # () int64: number of kept channels (times planes) while counting
        self.set_mask(bundle.masks[name])

    def set_mask(self, mask: ProjectionMask) -> None:
        self.thresholds = mask.plane_thresholds or (mask.threshold,)
        scale = mask.channel_scale if self.expert is None else mask.channel_scale[self.expert]
        # (K,) float32; None: dense
        self.channel_scale = scale.contiguous().to(self._device) if mask.sparsity > 0 else None

    def product(self, x: Tensor, low: Tensor | None = None) -> Tensor:
        """x (T, K) to (T, N), with the bias. ``low``: x for the low plane, with its dropped channels at zero."""
        y = functional.linear(x, self.weight, self.bias)
        if low is not None and self.low is not None:
            y -= functional.linear(x - low, self.low)
        return y

    def __call__(self, x: Tensor, first_sparse: int) -> Tensor:
        """x (T, K) to (T, N); rows from ``first_sparse`` on are masked."""
        if first_sparse >= len(x):
            return self.product(x)
        if self.channel_scale is None:
            if self.kept is not None:
                self.kept += x[first_sparse:].numel() * self.planes
            return self.product(x)
        keeps = [keep_mask(x[first_sparse:], self.channel_scale, threshold) for threshold in self.thresholds]
        if self.kept is not None:
            self.kept += sum(keep.sum() for keep in keeps)
        return self.product(*(drop_channels(x, keep) for keep in keeps))


@dataclass(frozen=True, kw_only=True)
class Block(Generic[Linear]):
    """A block's weights; ``Linear`` is the decoder's type of projections. In a recurrent block ``qkv`` are in_proj_qkv and
    in_proj_z, or in_proj; ``o`` is out_proj. Norms that the architecture lacks and projections of a half that the block lacks
    are None."""

    spec: model_config.Block
    ops: tuple[Op, ...]
    qkv: Linear | None = None
    o: Linear | None = None
    gate_up: Linear | None = None
    down: Linear | None = None
    attention_input: Norm | None = None
    attention_output: Norm | None = None
    mlp_input: Norm | None = None
    mlp_output: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    delta: DeltaWeights | None = None  # of a block with this mixer
    conv: ConvWeights | None = None
    mamba: MambaWeights | None = None
    # Of multi-head latent attention, with the queries' second projection and its norm.
    latent: LatentWeights | None = None
    q_b: Linear | None = None
    query_norm: Norm | None = None
    scalar: Tensor | None = None  # (1,), factor of the block's output
    sinks: Tensor | None = None  # (num_heads,), an additional logit in each head's softmax
    # Of a block with experts: (E, H), (E,); of a shared expert its projections and gate (1, H).
    router: Tensor | None = None
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None  # (E,) or (1, E)
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    shared_gate: Tensor | None = None
    # Of experts in parallel to a dense MLP: norms, (H,), (E,).
    experts_input: Norm | None = None
    experts_output: Norm | None = None
    shared_output: Norm | None = None
    router_scale: Tensor | None = None
    expert_scale: Tensor | None = None
    # Of per-layer embeddings: (P, H), (H, P), (H,).
    per_layer_gate: Tensor | None = None
    per_layer_projection: Tensor | None = None
    per_layer_output: Norm | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in ROLES if getattr(self, role) is not None)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(getattr(self, role) for role in self.roles)


def roles_of(config: ModelConfig, index: int) -> list[str]:
    """The roles of ``ModelConfig.shared_inputs``, in order; those of a shared expert last, if there is one."""
    spec, latent = config.blocks[index], config.latent
    lacks = [] if spec.mixer else ["qkv", "o"]
    lacks += [] if spec.has_mlp else ["gate_up", "down", *SHARED]
    lacks += [] if latent is not None and latent.query_rank else ["q_b"]
    return [role for role in ROLES if role not in lacks]


def read_spec(config: ModelConfig, index: int, read: Callable[[str], Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a `Block` except its projections; ``read`` loads a tensor by its name in the checkpoint, as stored;
    ``dtype``: of the activations."""
    eps = config.rms_norm_eps
    found: dict[str, Any] = {one.name: None for one in fields(Block) if one.default is None and one.name not in ROLES}
    parts: dict[str, dict[str, Any]] = {"delta": {}, "conv": {}, "mamba": {}, "latent": {}}
    for field_, one in block_fields(config, index).items():
        mixer, _, name = field_.rpartition(".")
        tensor = read(one.name).to(float_dtype(dtype) if one.wide else dtype)
        (parts[mixer] if mixer else found)[name] = Norm(tensor, *config.norm(field_)) if one.norm else tensor
    qk_norm, spec = config.architecture.qk_norm, config.blocks[index]
    if qk_norm is not None and not qk_norm.names and spec.mixer == "attention":
        ones = Norm(found["attention_input"].weight.new_ones(spec.head_dim), eps, offset=False)
        found |= {"q_norm": ones, "k_norm": ones}
    if "ba" in parts["delta"]:
        parts["delta"] |= zip("ba", parts["delta"].pop("ba").chunk(2), strict=True)
    if parts["delta"] and config.delta_net is not None:
        found["delta"] = DeltaWeights(config.delta_net, eps=eps, **parts["delta"])
    if parts["conv"]:
        found["conv"] = ConvWeights(**parts["conv"])
    if parts["latent"] and config.latent is not None:
        found["latent"] = LatentWeights(config.latent, **parts["latent"])
    if parts["mamba"] and config.mamba2 is not None:
        found["mamba"] = MambaWeights(config.mamba2, eps=eps, **parts["mamba"])
    return found | {"spec": spec, "ops": block_ops.block_ops(config, index)}


@dataclass(frozen=True)
class Positions:
    """A chunk's positions in a slot, and tensors that depend on them."""

    cache: KVCache
    slot: int
    start: int
    first_sparse: int  # rows from this one on are masked
    tables: Sequence[tuple[Tensor, Tensor]]  # cos and sin of each rotary embedding
    scales: Tensor | None = None  # (T,), factors of the queries
    per_layer: Tensor | None = None  # (T, blocks, P), per-layer embeddings

    def attend(
        self, config: ModelConfig, index: int, block: Block[Any], q: Tensor, kv: tuple[Tensor, Tensor] | None,
        executor: Executor,
    ) -> Tensor:  # fmt: skip
        """Store keys and values (num_kv_heads, T, head_dim), unless the block uses another's; attend with q (num_heads, T,
        head_dim), returns the same."""
        if kv is not None:
            self.cache.write(index, self.slot, self.start, *kv)
        source = index if block.spec.kv_from is None else block.spec.kv_from
        keys, values = self.cache.read(source, self.slot, self.start + q.shape[1])
        return executor.attention(config, q, keys, values, self.start, block.spec.window, block.sinks)


def attention(
    config: ModelConfig,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of positions from ``start`` on, with a sliding ``window``. q (num_heads, T, head_dim); keys, values
    (num_kv_heads, start + T, head_dim); returns (num_heads, T, head_dim)."""
    count, stop = q.shape[1], keys.shape[1]
    first = 0 if window is None else max(start - window + 1, 0)
    keys, values = keys[:, first:], values[:, first:]
    mask = None
    if count > 1:  # (T, stop - first) bool, True where attended
        offset = torch.arange(first, stop, device=q.device) - torch.arange(start, stop, device=q.device)[:, None]
        mask = offset <= 0 if window is None else (offset <= 0) & (offset > -window)
    if config.attention_softcap is not None or sinks is not None:  # scaled_dot_product_attention supports neither
        keys, values = (x.repeat_interleave(q.shape[0] // len(x), dim=0) for x in (keys, values))
        scores = soft_cap(q @ keys.transpose(1, 2) * config.attention_scale, config.attention_softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), dim=-1)
        weights = scores.softmax(dim=-1, dtype=float_dtype(q.dtype)).to(q.dtype)
        return weights[..., : keys.shape[1]] @ values
    gqa = q.shape[0] != keys.shape[0]
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, scale=config.attention_scale, enable_gqa=gqa
    )[0]


class Executor(Protocol):
    """What decoders do in their own way. Rows from ``first_sparse`` on are masked."""

    config: ModelConfig
    attention: Callable[..., Tensor] = staticmethod(attention)

    def project(self, block: Any, role: str, x: Tensor, first_sparse: int) -> Sequence[Tensor]:
        """The projections ``role`` of x (T, K): their outputs, or one concatenated output."""

    def route(self, block: Any, x: Tensor) -> Any:
        """The chosen experts and their weights, by the router's input x (T, H)."""
        return route(block, x)

    def run_experts(self, block: Any, x: Tensor, routing: Any, first_sparse: int) -> Tensor:
        """The experts' input x (T, H) and what ``route`` returned to the weighted sum (T, H)."""
        return run_experts(self.config, block, x, routing, first_sparse)


def run_block(
    config: ModelConfig, index: int, block: Block[Any], x: Tensor, at: Positions, executor: Executor, **given: Tensor
) -> Tensor:
    """One block: x (T, H) to (T, H); fills the cache. Runs ``block.ops`` one by one, but those whose output is ``given``."""
    values: dict[str, Any] = {HIDDEN: x, **given}
    for op in block.ops:
        if op.output in given:
            continue
        inputs = [values[name] for name in op.inputs]
        values[op.output] = _run(op, config, index, block, inputs, at, executor)
    return values[HIDDEN]


def _run(
    op: Op, config: ModelConfig, index: int, block: Block[Any], inputs: list[Any], at: Positions, executor: Executor
) -> Any:
    match op:
        case block_ops.Norm():
            return getattr(block, op.weight)(*inputs)
        case block_ops.Linear():
            outputs = executor.project(block, op.role, inputs[0], at.first_sparse)
            return outputs if op.split else outputs[0]
        case block_ops.Attention():
            return _attention(config, index, block, inputs[0], at, executor)
        case block_ops.LatentQuery():
            assert block.query_norm is not None
            return block.query_norm(inputs[0][0])
        case block_ops.LatentKeys():
            assert block.latent is not None
            return block.latent.queries_and_keys(inputs[0] if len(inputs) == 2 else inputs[0][0], inputs[-1][-1])
        case block_ops.LatentValues():
            assert block.latent is not None
            return block.latent.outputs(*inputs)
        case block_ops.DeltaNet():
            parts, n = inputs
            assert block.delta is not None
            delta = block.delta.config
            mixed, gate = parts if len(parts) == 2 else parts[0].split((delta.mixed_size, delta.value_size), dim=-1)
            return block.delta(n, mixed, gate, at.cache.advance(index, at.slot, at.start, at.start + len(n)))
        case block_ops.ShortConv():
            ((projected,),) = inputs
            assert block.conv is not None
            return block.conv(projected, at.cache.advance(index, at.slot, at.start, at.start + len(projected)))
        case block_ops.Mamba2():
            ((projected,),) = inputs
            assert block.mamba is not None
            return block.mamba(projected, at.cache.advance(index, at.slot, at.start, at.start + len(projected)))
        case block_ops.UngatedActivate():
            return activate(config, inputs[0][0])
        case block_ops.Activate():
            (parts,) = inputs
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            return activate(config, gate, up)
        case block_ops.Router():
            return executor.route(block, router_input(block, *inputs))
        case block_ops.Experts():
            return executor.run_experts(block, inputs[0], inputs[1], at.first_sparse)
        case block_ops.Sum():
            return inputs[0] + inputs[1]
        case block_ops.Add():
            x, output = inputs
            return x + (output if op.multiplier == 1.0 else output * op.multiplier)
        case block_ops.PerLayer():
            (x,), gate, projection = inputs, block.per_layer_gate, block.per_layer_projection
            assert at.per_layer is not None
            assert gate is not None
            assert projection is not None
            gated = activate(config, functional.linear(x, gate), at.per_layer[:, index])
            return x + _maybe(block.per_layer_output, functional.linear(gated, projection))
        case block_ops.Scale():
            return inputs[0] * block.scalar
    raise TypeError(f"no such operation: {op}")


def _attention(
    config: ModelConfig, index: int, block: Block[Any], qkv: Sequence[Tensor], at: Positions, executor: Executor
) -> Tensor:
    """Outputs of the query, key and value projections to ``o``'s input (T, heads * head_dim); fills the cache."""
    spec, heads, gate_of = block.spec, config.num_heads, config.architecture.attention_gate
    q_size = heads * spec.head_dim
    num_kv = 0 if spec.kv_from is not None else 1 if spec.shared_values else 2
    own = [q_size] if gate_of == "attention_gate_proj" else []
    sizes = (q_size * (2 if gate_of == "q_proj" else 1), *own, *[spec.kv_size] * num_kv)
    q, *kv = qkv if len(qkv) == len(sizes) else qkv[0].split(sizes, dim=-1)
    count, gates = len(q), kv.pop(0) if own else None
    if gate_of == "q_proj":  # each head's query, then its gate
        q, gates = (half.reshape(-1, q_size) for half in q.view(count, heads, 2 * spec.head_dim).chunk(2, dim=-1))
    norm = config.architecture.qk_norm

    def norm_and_rotate(x: Tensor, weight: Norm | None) -> Tensor:
        """Queries or keys (T, heads * head_dim) to (heads, T, head_dim)."""
        if norm is not None and not norm.per_head:
            x = _maybe(weight, x)
        x = x.view(len(x), -1, spec.head_dim).transpose(0, 1)
        if norm is not None and norm.per_head and not norm.after_rotary:
            x = _maybe(weight, x)
        if spec.rotary is not None:
            cos, sin = at.tables[spec.rotary]
            x = rotate(x, cos, sin, interleaved=config.rotaries[spec.rotary].interleaved)
        return _maybe(weight, x) if norm is not None and norm.per_head and norm.after_rotary else x

    q = norm_and_rotate(q, block.q_norm)
    if at.scales is not None:
        q = q * at.scales[:, None].to(q.dtype)
    new = None
    if spec.kv_from is None:
        k, v = norm_and_rotate(kv[0], block.k_norm), kv[-1].view(count, -1, spec.head_dim).transpose(0, 1)
        if config.architecture.value_norm:
            v = Norm(v.new_ones(()), config.rms_norm_eps, offset=False)(v)
        new = k, k if spec.latent else v
    attended = at.attend(config, index, block, q, new, executor)
    attended = attended.transpose(0, 1).reshape(count, -1)
    return attended if gates is None else attended * gates.sigmoid()


def router_input(block: Block[Any], x: Tensor) -> Tensor:
    """The router's input, by that of the experts, x (T, H)."""
    if block.router_scale is None or block.mlp_input is None:
        return x
    return Norm(block.router_scale, block.mlp_input.eps, offset=False)(x) * x.shape[1] ** -0.5


def route(block: Block[Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """The router's input x (T, H) to the chosen experts' weights, in x's dtype, and their indices: (T, chosen) each."""
    experts, router = block.spec.experts, block.router
    assert experts is not None
    assert router is not None
    wide = float_dtype(x.dtype)
    logits = functional.linear(x.to(router.dtype), router, block.router_bias)
    logits = logits if experts.rounded == "scores" else logits.to(wide)
    probabilities = (logits.softmax(-1) if experts.score == "softmax" else logits.sigmoid()).to(wide)
    keys = probabilities if block.choice_bias is None else probabilities + block.choice_bias.flatten()
    if (groups := experts.groups) is not None:
        by_group = keys.unflatten(-1, (groups.number, -1))
        kept = by_group.topk(groups.best, dim=-1).values.sum(-1).topk(groups.kept, dim=-1).indices
        outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        keys = by_group.masked_fill(outside[..., None], float("-inf")).flatten(-2)
    chosen = keys.topk(experts.chosen, dim=-1).indices
    weights = probabilities.gather(-1, chosen)
    if experts.renormalised:
        least, added = experts.norm
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=least) + added)
    if experts.scale != 1.0:
        weights = weights * experts.scale
    if block.expert_scale is not None:
        weights = weights * block.expert_scale[chosen]
    return weights.to(x.dtype), chosen


def run_experts(
    config: ModelConfig, block: Block[Any], x: Tensor, routing: tuple[Tensor, Tensor], first_sparse: int
) -> Tensor:
    """A block's experts, x (T, H) to (T, H); rows from ``first_sparse`` on are masked. ``block.gate_up`` lists the gate
    projections of all experts, if they have any, then the up projections."""
    assert block.gate_up is not None
    assert block.down is not None
    count, out = len(block.down), torch.zeros_like(x)
    weights, chosen = routing
    for expert in chosen.unique().tolist():
        tokens, rank = (chosen == expert).nonzero(as_tuple=True)
        rows, num_dense = x[tokens], int((tokens < first_sparse).sum())
        parts = (linear(rows, num_dense) for linear in block.gate_up[expert::count])
        output = block.down[expert](activate(config, *parts), num_dense)
        out.index_add_(0, tokens, output * weights[tokens, rank, None])
    assert block.spec.experts is not None
    if block.shared_gate_up is None or block.shared_down is None or block.spec.experts.parallel_mlp:
        return out
    parts = (linear(x, first_sparse) for linear in block.shared_gate_up)
    shared = block.shared_down[0](activate(config, *parts), first_sparse)
    return out + (shared if block.shared_gate is None else functional.linear(x, block.shared_gate).sigmoid() * shared)


def activate(config: ModelConfig, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """activation(gate) * up; without ``up``, of an MLP that has no gate, relu(gate)**2."""
    if up is None:
        return functional.relu(gate).square()
    if config.activation == "clamped":
        slope, limit = config.clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * slope))
    return up * (functional.silu(gate) if config.activation == "silu" else functional.gelu(gate, approximate="tanh"))


def _maybe(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def norm_embedding(config: ModelConfig, embedding: Tensor) -> Tensor:
    """The embedding (V, H), after the norm of the tokens' embeddings if the model has one."""
    if not config.architecture.embedding_norm:
        return embedding
    norm = Norm(embedding.new_ones(()), config.rms_norm_eps, offset=False)
    return torch.cat([norm(rows) for rows in embedding.split(8192)])


def embed(config: ModelConfig, embedding: Tensor, token_ids: Tensor) -> Tensor:
    """Token ids (T,) to embeddings (T, H), times the multiplier rounded to their dtype, as in Gemma."""
    x = functional.embedding(token_ids, embedding)
    if config.embedding_multiplier == 1.0:
        return x
    # A Python number: a CPU tensor would be copied to the device, which a CUDA graph cannot capture.
    return x * float(torch.tensor(config.embedding_multiplier, dtype=x.dtype))


@dataclass(frozen=True)
class PerLayer:
    """Gemma's per-layer embeddings: P numbers for each token and block, by the token's id and embedding."""

    embedding: Tensor  # (V, blocks * P), in the stored dtype: rows are converted after the lookup
    projection: Tensor  # (blocks * P, H)
    norm: Norm  # (P,)

    @classmethod
    def read(cls, config: ModelConfig, read: Callable[[str], Tensor], tensor: Callable[..., Tensor]) -> PerLayer | None:
        """``read`` loads a tensor in the activations' dtype, ``tensor`` in the stored dtype. None for other models."""
        if not config.per_layer_size:
            return None
        norm = Norm(read(PER_LAYER_NORM), config.rms_norm_eps, config.architecture.norm_offset)
        return cls(tensor(PER_LAYER_EMBEDDING), read(PER_LAYER_PROJECTION), norm)

    def of_tokens(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Token ids (T,) to (T, blocks * P), times sqrt(P) rounded to ``dtype``."""
        rows = functional.embedding(token_ids, self.embedding).to(dtype)
        return rows * float(torch.tensor(len(self.norm.weight) ** 0.5, dtype=dtype))

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Token ids (T,) and their embeddings x (T, H) to (T, blocks, P)."""
        projected = functional.linear(x, self.projection) * x.shape[1] ** -0.5
        of_tokens = self.of_tokens(token_ids, x.dtype).view(len(x), -1, len(self.norm.weight))
        return (self.norm(projected.view_as(of_tokens)) + of_tokens) * 2**-0.5


def finish_logits(config: ModelConfig, logits: Tensor) -> Tensor:
    """Apply the logits multiplier and soft cap to the output layer's products (..., V) float32."""
    if config.logits_multiplier != 1.0:
        logits = logits * config.logits_multiplier
    return soft_cap(logits, config.logits_softcap)
