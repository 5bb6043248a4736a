"""Rotation of the model to the principal directions of its hidden states and of its attention values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from .experts import Rows
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
# Tokens on which the rotated model is compared with the source, and the largest KL, nats per token, that is accepted.
_TOKENS, _MAX_KL = 256, 0.02
_OF_VALUES = ("v_proj", "qkv_proj", "o_proj")  # roles


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrices, float32 on the CPU; None: coordinates are kept."""

    residual: Tensor | None  # Q (hidden_size, hidden_size)
    heads: tuple[Tensor | None, ...]  # per block, R of each key-value head: (num_kv_heads, head_dim, head_dim)


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
    """Principal directions over the counted tokens, in the dense model."""
    config = source.config
    fixed, input_norms = config.fixed_hidden, _input_norms(config)
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
    norms = {name: norm_factors(checkpoint, input_norms[name], "cpu") for name in first}
    flow = BlockFlow(source.model, config, tokens.input_ids, tokens.keep, _BATCH_SIZE)
    batch = 0

    def observe(name: str, x: Tensor) -> None:
        if name in first:
            x = Rows.counted(source.projections[name], x, flow.counted[batch], flow.places[batch]).x.float()
            weight = norms[name].to(x.device)
            nonzero = weight.abs() > _SMALLEST_WEIGHT * weight.abs().max()
            x = torch.where(nonzero, x / torch.where(nonzero, weight, 1.0), 0.0)
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
    return Rotation(None if fixed else _directions(hidden_moments), turned)


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

    q, input_norms = rotation.residual.to(device), _input_norms(config)
    stacked = {one.name: (part, one) for part, one in stacked_experts(config).items()}
    final_norm = f"{config.architecture.final_norm}.weight"
    head = config.embedding if config.tie_word_embeddings else LM_HEAD

    @cache  # many experts share a norm
    def norm_of(name: str) -> Tensor:
        return norm_factors(checkpoint, name, device)

    def embedding(name: str, weight: Tensor | float) -> Tensor:
        stored = checkpoint.tensor(name)
        chunks = (rows.to(device).float() for rows in stored.split(_ROWS))
        return torch.cat([((rows * weight) @ q).to(stored.dtype).cpu() for rows in chunks])

    def make(name: str) -> Tensor:
        if name == config.embedding:
            return embedding(name, 1.0)
        if name == LM_HEAD:
            return embedding(head, norm_of(final_norm))
        if name == final_norm or name in input_norms.values():
            return torch.full((config.hidden_size,), 0.0 if config.architecture.norm_offset else 1.0, device=device)
        projection, _, kind = name.rpartition(".")
        if name in stacked and name.endswith("down_proj"):  # of all experts, transposed
            return torch.stack([(expert.to(device).float() @ q).cpu() for expert in checkpoint.tensor(name)])
        if name in stacked and name.endswith("gate_up_proj"):
            norm = norm_of(input_norms[stacked[name][0].removesuffix(".weight")])[:, None]
            return torch.stack([(q.T @ (norm * expert.to(device).float())).cpu() for expert in checkpoint.tensor(name)])
        if projection in by_name:
            value = with_heads(name, by_name[projection])
            if by_name[projection].role.removeprefix("shared_") in ("o_proj", "out_proj", "down_proj"):
                return q.T @ value
            return (value * norm_of(input_norms[projection])) @ q if kind == "weight" else value
        value = checkpoint.tensor(name, device).float()
        if name in stacked:  # biases
            return value @ q if "down_proj" in name else value
        # A router, its bias, sinks, or q/k norms
        reads = projection in input_norms and kind == "weight"
        return (value * norm_of(input_norms[projection])) @ q if reads else value

    tensors = {name: replace(info, file="") for name, info in checkpoint.tensors.items() if name != LM_HEAD}
    tensors[LM_HEAD] = replace(checkpoint.tensors[head], name=LM_HEAD, file="")
    stated = {**checkpoint.config_dict, "tie_word_embeddings": False}
    changed = {"config_dict": stated, "config": ModelConfig.from_dict(stated), "rotation": rotation.residual}
    return derived(tensors, make, tensors=tensors, **changed)


def _input_norms(config: ModelConfig) -> dict[str, str]:
    """Projections and routers that read the hidden state -> the weight of the norm before them."""
    arch = config.architecture
    norms: dict[str, str] = {}
    for projection in config.projections():
        role = projection.role.removeprefix("shared_")
        if role in (*arch.qkv, "in_proj", *arch.gate_up):
            norm = arch.norms.mlp_input if role in arch.gate_up else arch.norms.attention_input
            names = (projection.name, *projection.parts)
            norms |= dict.fromkeys(names, f"model.layers.{projection.block}.{norm}.weight")
    for index, block in enumerate(config.blocks):
        if block.experts is not None:
            for name in filter(None, (block.experts.router, block.experts.shared_gate)):
                reader = f"model.layers.{index}.{name}".removesuffix(".weight")
                norms[reader] = f"model.layers.{index}.{arch.norms.mlp_input}.weight"
    return norms


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
            num_batches = -(-rotation_tokens.num_samples // _BATCH_SIZE)
            with stages.progress.stage("Principal directions", num_batches) as stage:
                rotation = vars(find_rotation(source, checkpoint, rotation_tokens, stage.advance))
        return stages.processes.broadcast(rotation)

    def log_probs() -> Tensor:
        ids = tokens.input_ids[:1, :_TOKENS].to(source.device)
        return source.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)

    made = rotated(checkpoint, Rotation(**stages.run("rotation", find)), source.device)
    before = log_probs()
    model = source.model
    output = model.get_output_embeddings()
    if output.weight is model.get_input_embeddings().weight and not made.config.tie_word_embeddings:
        output.weight = nn.Parameter(torch.empty_like(output.weight), requires_grad=False)
        model.config.tie_word_embeddings = False
    with stages.progress.stage("Rotating", len(made.tensors)) as stage:
        load_weights(model, made, stage.advance)
    # Rounding can make the KL of two almost equal models negative.
    kl = max(0.0, float(kl_rows(before, log_probs()).double().mean()))
    if not kl <= _MAX_KL:
        far = f"rotated, the model is {kl:.2g} nats/token from what it was, expected less than {_MAX_KL:g}"
        advice = f"{source.dtype} is too coarse for it; convert it with --rotation none"
        raise UnsupportedModelError(f"{checkpoint.folder.name}: {far}: {advice}")
    kind = "heads" if made.rotation is None else "pca"
    return replace(source, config=made.config), made, RotationRecord(kind, kl, len(before))


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
