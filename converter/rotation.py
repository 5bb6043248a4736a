"""Rotation of the model to the principal directions of its hidden states and of its attention values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from wisparse.formats.checkpoint import Checkpoint, TensorInfo
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.manifest import RotationRecord
from wisparse.formats.model_config import LM_HEAD, ModelConfig, Projection
from wisparse.formats.tensors import MTP, PER_LAYER_EMBEDDING, stacked_experts

from .calibration import CalibrationTokens
from .experts import Rows, at_rows
from .flow import BlockFlow
from .masking import MaskedModel
from .sensitivity import kl_rows
from .source import SourceModel, weights_of
from .state import NO_STATE, Stages

# Relative to the largest: a norm's weights below this count as 0; their channels do not matter to the directions.
_SMALLEST_WEIGHT = 1e-4
# Rows of the embedding rotated at a time, in float32.
_ROWS = 8192
_BATCH_SIZE = 4  # sequences
# A sequence's first token counts as this fraction of all its tokens in the hidden state's moments: as an attention sink it
# differs from the others, and errors there reach them all.
_FIRST_TOKEN = 1 / 32
# Tokens on which the rotated model is compared with the source, and the largest KL, nats per token, that is accepted.
_TOKENS, _MAX_KL = 256, 0.02
# The same where norms after attention and MLP are fitted: about the KL of two computations in bfloat16. Above it the hidden
# state is left as it is.
_MAX_FITTED_KL = 0.005
_FIT_STEPS = 30
_OF_VALUES = ("v_proj", "qkv_proj", "o_proj")  # roles


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrices, float32 on the CPU; None: coordinates are kept."""

    residual: Tensor | None  # Q (hidden_size, hidden_size)
    heads: tuple[Tensor | None, ...]  # per block, R of each key-value head: (num_kv_heads, head_dim, head_dim)
    # Name of the weight of a norm after attention or MLP -> its factors (hidden_size,) for the rotated hidden state.
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


def why_fixed(config: ModelConfig, quantised: bool) -> str | None:
    """Why a model cannot be rotated, as a clause; None if it can."""
    arch = config.architecture
    if arch.latent:
        return f"the latents of {config.model_type} tie values to their coordinates"
    if arch.attention_gate or config.delta_net is not None:
        return f"the gates and recurrent blocks of {config.model_type} tie values to their coordinates"
    if quantised:
        return "the source is quantised, and rotated weights would have to be rounded anew"
    if config.fixed_hidden and all(_values_of(config, index) is None for index in range(config.num_blocks)):
        return f"the norms and shared keys of {config.model_type} tie it to its coordinates"
    return None


def _values_of(config: ModelConfig, index: int) -> int | None:
    """The block whose values a block reads; None if it reads none, or some that are keys too, which cannot be rotated."""
    maker = config.blocks[index].kv_from
    maker = index if maker is None else maker
    return maker if config.blocks[maker].mixer == "attention" and not config.blocks[maker].shared_values else None


def find_rotation(
    source: SourceModel, checkpoint: Checkpoint, tokens: CalibrationTokens, advance: Callable[[], None] = lambda: None
) -> Rotation:
    """Principal directions over the counted and the first tokens, in the dense model."""
    config = source.config
    fixed, before = config.fixed_hidden, _norms(config)[0]
    zeros = partial(torch.zeros, dtype=torch.float64, device=source.device)
    hidden_moments = zeros(config.hidden_size, config.hidden_size)
    values_of = [_values_of(config, index) for index in range(config.num_blocks)]
    head_moments = {
        index: zeros(config.blocks[index].num_kv_heads, *[config.blocks[index].head_dim] * 2)
        for index in values_of
        if index is not None
    }
    # One projection of each sublayer: the others share its input.
    first_roles = () if fixed else (config.architecture.qkv[0], "in_proj", config.architecture.gate_up[0])
    first = {one.name: one.chosen for one in config.projections() if one.role in first_roles}
    outputs = {one.name: values_of[one.block] for one in config.projections() if one.role == "o_proj"}
    norms = {name: norm_factors(checkpoint, norm, "cpu") for name in first if (norm := before[name]) is not None}
    flow = BlockFlow(source.model, config, tokens.input_ids, tokens.keep, _BATCH_SIZE)
    factors = [counted.float() for counted in flow.counted]
    for of_batch in factors:
        of_batch[:, 0] = math.sqrt(_FIRST_TOKEN * tokens.seq_len)
    batch = 0

    def observe(name: str, x: Tensor) -> None:
        if name in first:
            of_rows = at_rows(source.projections[name], x, factors[batch].to(x.device)).flatten()
            x = x.flatten(0, -2).float()
            if name in norms:
                weight = norms[name].to(x.device)
                nonzero = weight.abs() > _SMALLEST_WEIGHT * weight.abs().max()
                x = torch.where(nonzero, x / torch.where(nonzero, weight, 1.0), 0.0)
            else:  # the hidden state itself, which grows from block to block
                x = torch.nn.functional.rms_norm(x, x.shape[-1:])
            x = x * of_rows[:, None]
            hidden_moments.add_((x.T @ x).double() / first[name])  # as many experts have a row of each token
        elif (maker := outputs.get(name)) is not None:
            moments = head_moments[maker]
            x = x.flatten(0, 1)[flow.places[batch].to(x.device)].float()
            x = x.view(len(x), len(moments), -1, moments.shape[-1])
            moments.add_(torch.einsum("tkri,tkrj->kij", x, x).double())

    with MaskedModel(source.projections) as masked, masked.during(observer=observe), torch.no_grad():
        for batch in range(flow.num_batches):
            flow.final(batch)
            advance()
    heads = {index: _directions(moments) for index, moments in head_moments.items()}
    turned = tuple(None if index is None else heads[index] for index in values_of)
    if fixed:
        return Rotation(None, turned)
    residual = _directions(hidden_moments)
    return Rotation(residual, turned, _fit_output_norms(source, checkpoint, flow, residual, advance))


@torch.no_grad()
def _fit_output_norms(
    source: SourceModel, checkpoint: Checkpoint, flow: BlockFlow, residual: Tensor, advance: Callable[[], None]
) -> dict[str, Tensor]:
    """Factors of the norms after attention and MLP for the rotated hidden state, by name of the weight.

    A norm with factors w adds w y / rms(y), in rotated coordinates r / rms(y) with r = (w y) Q. Where the rows before it
    give r / f, a norm with factors f adds r / rms(r / f): of the same direction, and equal if all w are. The other error,
    of length, is made small by least squares: v = f**-2 > 0 such that r² v is y² in the mean over channels, relative to it.
    The multiplicative updates (Daube-Witherspoon and Muehllehner 1986) begin with equal factors and keep v positive."""
    inputs: dict[str, list[Tensor]] = {}
    q, hidden, factors = residual.to(source.device), flow.start(), dict[str, Tensor]()

    def fit(name: str, y: Tensor) -> Tensor:
        # Channels' parts of the mean of squares, tokens in rows.
        parts = ((y * norm_factors(checkpoint, name, y.device)) @ q.to(y.device)).square_()
        parts /= y.square().sum(-1, keepdim=True).clamp_min(1e-30)
        total, sums = parts.sum(-1), parts.sum(0)
        v = torch.full_like(sums, float(total.sum() / total.square().sum()))
        for _ in range(_FIT_STEPS):
            v *= sums / (parts.T @ (parts @ v)).clamp_min(1e-30)
        # A channel that nothing is added to has no sum.
        return v.clamp_min(1e-4 * v.mean()).rsqrt().cpu()

    def record(name: str, batch: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name].append(Rows.counted(module, args[0], flow.counted[batch], flow.places[batch]).x.float())

    after = dict.fromkeys(filter(None, _norms(source.config)[1].values()))
    for block in range(source.config.num_blocks if after else 0):
        prefix = f"model.layers.{block}."
        inputs = {name: [] for name in after if name.startswith(prefix)}
        for batch, state in enumerate(hidden):
            hooks = [
                source.model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(
                    partial(record, name, batch)
                )
                for name in inputs
            ]
            try:
                hidden[batch] = flow.block(block, batch, state)
            finally:
                for hook in hooks:
                    hook.remove()
        factors |= {name: fit(name, torch.cat(rows)) for name, rows in inputs.items()}
        advance()
    return factors


def _directions(moments: Tensor) -> Tensor:
    """Eigenvectors as columns, with the sign that makes the largest entry positive, so that results repeat."""
    vectors = torch.linalg.eigh(moments.cpu())[1]
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return (vectors * largest.sign()).float()


def rotated(checkpoint: Checkpoint, rotation: Rotation, device: torch.device) -> Checkpoint:
    """The rotated checkpoint, with untied embeddings if the hidden state is rotated; its tensors are computed on ``device``
    when they are read."""
    config = checkpoint.config
    by_name = {part: projection for projection in config.projections() for part in projection.parts}

    def with_heads(name: str, projection: Projection) -> Tensor:
        """A projection's weight or bias, with the heads' values rotated."""
        value, role, heads = checkpoint.tensor(name, device).float(), projection.role, rotation.heads[projection.block]
        if heads is None or role not in _OF_VALUES:
            return value
        heads = heads.to(device)
        number, width, _ = heads.shape
        if role == "o_proj":
            if name.endswith(".bias"):
                return value
            return torch.einsum("nkri,kij->nkrj", value.view(len(value), number, -1, width), heads).flatten(1)
        kept, values = value.split([len(value) - number * width, number * width])
        shaped = values.reshape(number, width, -1)
        return torch.cat([kept, torch.einsum("kij,kin->kjn", heads, shaped).reshape(values.shape)])

    def derived(infos: Mapping[str, TensorInfo], make: Callable[[str], Tensor], **changes: Any) -> Checkpoint:
        def stored(name: str) -> Tensor:
            return make(name).to(infos[name].dtype).contiguous().cpu()

        return checkpoint.derive({name: partial(stored, name) for name in infos}, **changes)

    if rotation.residual is None:
        roles = {name: by_name.get(name.rpartition(".")[0]) for name in checkpoint.tensors}
        turned = {name: one for name, one in roles.items() if one is not None and one.role in _OF_VALUES}
        return derived({name: checkpoint.tensors[name] for name in turned}, lambda name: with_heads(name, turned[name]))

    q, (before, after) = rotation.residual.to(device), _norms(config)
    offset = float(config.architecture.norm_offset)
    stacked = {one.name: (part, one) for part, one in stacked_experts(config).items()}
    final_norm = f"{config.architecture.final_norm}.weight"
    head = config.embedding if config.tie_word_embeddings else LM_HEAD

    @cache  # many experts share a norm
    def norm_of(name: str | None) -> Tensor | float:
        return 1.0 if name is None else norm_factors(checkpoint, name, device)

    def fitted(name: str) -> Tensor:
        """A norm's factors, rounded as they are stored."""
        stored = (rotation.outputs[name].to(device) - offset).to(checkpoint.tensors[name].dtype)
        return stored.float() + offset

    def writer(projection: str) -> Tensor:
        """What a projection's output is multiplied by from the right."""
        norm = after[projection]
        return q if norm is None else norm_factors(checkpoint, norm, device)[:, None] * q / fitted(norm)

    def embedding(name: str, weight: Tensor | float) -> Tensor:
        stored = checkpoint.tensor(name)
        chunks = (rows.to(device).float() for rows in stored.split(_ROWS))
        return torch.cat([((rows * weight) @ q).to(stored.dtype).cpu() for rows in chunks])

    def make(name: str) -> Tensor:
        if name == config.embedding:
            return embedding(name, 1.0)
        if name == LM_HEAD:
            return embedding(head, norm_of(final_norm))
        if name == final_norm or name in before.values():
            return torch.full((config.hidden_size,), 1.0 - offset, device=device)
        if name in rotation.outputs:
            return fitted(name) - offset
        projection, _, kind = name.rpartition(".")
        if name in stacked:  # of all experts
            part, place = stacked[name]
            role, _, kind = part.rpartition(".")
            writes, weights = role.endswith("down_proj"), checkpoint.tensor(name)
            if kind == "bias":
                return weights.to(device).float() @ writer(role) if writes else weights.float()

            def turned(weight: Tensor) -> Tensor:
                return writer(role).T @ weight if writes else (weight * norm_of(before[role])) @ q

            each = (expert.to(device).float() for expert in weights)
            return torch.stack([turned(one.T).T.cpu() if place.interleaved else turned(one).cpu() for one in each])
        if projection in by_name:
            value = with_heads(name, by_name[projection])
            if projection in after:
                return writer(projection).T @ value
            return (value * norm_of(before[projection])) @ q if kind == "weight" else value
        value = checkpoint.tensor(name, device).float()
        # A router, its bias, sinks, or q/k norms
        reads = projection in before and kind == "weight"
        return (value * norm_of(before[projection])) @ q if reads else value

    tensors = {name: replace(info, file="") for name, info in checkpoint.tensors.items() if name != LM_HEAD}
    tensors[LM_HEAD] = replace(checkpoint.tensors[head], name=LM_HEAD, file="")
    stated = {**checkpoint.config_dict, "tie_word_embeddings": False}
    changed = {"config_dict": stated, "config": ModelConfig.from_dict(stated), "rotation": rotation.residual}
    return derived(tensors, make, tensors=tensors, **changed)


def _norms(config: ModelConfig) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Projections and routers that read the hidden state -> the weight of the norm before them, and projections that add to
    it -> of the norm after them; None: there is no such norm."""
    arch, norms = config.architecture, config.norms
    before: dict[str, str | None] = {}
    after: dict[str, str | None] = {}

    def weight(block: int, norm: str | None) -> str | None:
        return None if norm is None else f"model.layers.{block}.{norm}.weight"

    for projection in config.projections():
        role, names = projection.role.removeprefix("shared_"), (projection.name, *projection.parts)
        if role in (*arch.qkv, "in_proj", *arch.gate_up):
            norm = norms.mlp_input if role in arch.gate_up else norms.attention_input
            before |= dict.fromkeys(names, weight(projection.block, norm))
        elif role in ("o_proj", "out_proj", "down_proj"):
            norm = norms.mlp_output if role == "down_proj" else norms.attention_output
            after |= dict.fromkeys(names, weight(projection.block, norm))
    for index, block in enumerate(config.blocks):
        if block.experts is not None:
            for name in filter(None, (block.experts.router, block.experts.shared_gate)):
                reader = f"model.layers.{index}.{name}".removesuffix(".weight")
                before[reader] = weight(index, norms.mlp_input)
    return before, after


def norm_factors(checkpoint: Checkpoint, name: str, device: str | torch.device) -> Tensor:
    """The factors of a norm, (hidden_size,) float32."""
    weight = checkpoint.tensor(name, device).float()
    return 1.0 + weight if checkpoint.config.architecture.norm_offset else weight


@torch.no_grad()
def rotate(
    source: SourceModel,
    checkpoint: Checkpoint,
    tokens: CalibrationTokens,
    text: Callable[[], CalibrationTokens],
    stages: Stages = NO_STATE,
) -> tuple[SourceModel, Checkpoint, RotationRecord]:
    """Rotate ``source``, in place, to the principal directions over ``text``. Returns it, the rotated checkpoint and the
    recipe's record. All processes call it."""

    def find() -> Any:
        rotation = None
        if stages.processes.is_main:
            rotation_tokens = text()
            passes = -(-rotation_tokens.num_samples // _BATCH_SIZE)
            passes += source.config.num_blocks * source.config.fitted_hidden
            with stages.progress.stage("Principal directions", passes) as stage:
                rotation = vars(find_rotation(source, checkpoint, rotation_tokens, stage.advance))
        return stages.processes.broadcast(rotation)

    def log_probs() -> Tensor:
        ids = tokens.input_ids[:1, :_TOKENS].to(source.device)
        return source.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)

    model = source.model
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()

    def load(rotation: Rotation) -> tuple[Checkpoint, float]:
        """The rotated checkpoint, loaded, and its KL."""
        made = rotated(checkpoint, rotation, source.device)
        if (output.weight is embedding.weight) != made.config.tie_word_embeddings:
            untied = nn.Parameter(torch.empty_like(output.weight), requires_grad=False)
            output.weight = embedding.weight if made.config.tie_word_embeddings else untied
            model.config.tie_word_embeddings = made.config.tie_word_embeddings
        with stages.progress.stage("Rotating", len(made.tensors)) as stage:
            load_weights(model, made, stage.advance)
        # Rounding can make the KL of two almost equal models negative.
        kl = max(0.0, float(kl_rows(before, log_probs()).double().mean()))
        return made, stages.processes.broadcast(kl)

    rotation, before, rejected = Rotation(**stages.run("rotation", find)), log_probs(), None
    made, kl = load(rotation)
    if rotation.outputs and not kl <= _MAX_FITTED_KL:
        rejected = kl
        made, kl = load(Rotation(None, rotation.heads))
    if not kl <= _MAX_KL:
        far = f"rotated, the model is {kl:.2g} nats/token from what it was, expected less than {_MAX_KL:g}"
        advice = f"{source.dtype} is too coarse for it; convert it with --rotation none"
        raise UnsupportedModelError(f"{checkpoint.folder.name}: {far}: {advice}")
    kind = "heads" if made.rotation is None else "fitted" if rotation.outputs else "pca"
    return replace(source, config=made.config), made, RotationRecord(kind, kl, len(before), rejected)


@torch.no_grad()
def load_weights(model: Any, checkpoint: Checkpoint, advance: Callable[[], None] = lambda: None) -> None:
    """Copy a checkpoint's tensors into a model of its shapes; without an output layer, the embedding into the model's."""
    parameters, output = weights_of(model, checkpoint.config), model.get_output_embeddings()
    # transformers' model has no MTP head, and reads per-layer embeddings from the file.
    names = [name for name in checkpoint.tensors if not name.startswith((MTP, PER_LAYER_EMBEDDING))]

    @torch.no_grad()  # grad mode is per thread
    def load(name: str) -> None:
        (output.weight if name == LM_HEAD else parameters[name]).copy_(checkpoint.tensor(name))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # For a GPU, files are read in parallel; on a CPU, matrix products use several threads already.
        for _ in (pool.map if output.weight.is_cuda else map)(load, names):
            advance()
    if LM_HEAD not in checkpoint.tensors:
        output.weight.copy_(checkpoint.tensor(checkpoint.config.embedding))
