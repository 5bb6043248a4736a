"""Rotation of the model to the principal directions of its hidden states and of its attention values."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.manifest import RotationRecord
from wisparse.formats.model_config import LM_HEAD, ModelConfig
from wisparse.formats.tensors import MTP, stacked_experts

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


@dataclass(frozen=True)
class Rotation:
    residual: Tensor  # Q (hidden_size, hidden_size), float32 on the CPU
    heads: tuple[Tensor, ...]  # per block, R of each key-value head: (num_kv_heads, head_dim, head_dim)


def why_fixed(config: ModelConfig, quantised: bool) -> str | None:
    """Why a model cannot be rotated, as a clause; None if it can."""
    arch, norms = config.architecture, config.norms
    if norms.attention_output or norms.mlp_output or not norms.attention_input or not norms.mlp_input:
        return f"the norms of {config.model_type} tie its hidden state to its coordinates"
    if arch.latent:
        return f"the latents of {config.model_type} tie values to their coordinates"
    if arch.attention_gate or config.delta_net is not None:
        return f"the gates and recurrent blocks of {config.model_type} tie values to their coordinates"
    if quantised:
        return "the source is quantised, and rotated weights would have to be rounded anew"
    return None


def find_rotation(
    source: SourceModel, checkpoint: Checkpoint, tokens: CalibrationTokens, advance: Callable[[], None] = lambda: None
) -> Rotation:
    """Principal directions over the counted tokens, in the dense model."""
    config = source.config
    sharing, width, input_norms = config.num_heads // config.num_kv_heads, config.head_dim, _input_norms(config)
    zeros = partial(torch.zeros, dtype=torch.float64, device=source.device)
    hidden_moments = zeros(config.hidden_size, config.hidden_size)
    head_moments = [zeros(config.num_kv_heads, width, width) for _ in range(config.num_blocks)]
    # One projection of each sublayer: the others share its input.
    first_roles = (config.architecture.qkv[0], "in_proj", config.architecture.gate_up[0])
    first = {one.name: one.chosen for one in config.projections() if one.role in first_roles}
    outputs = {one.name: one.block for one in config.projections() if one.role == "o_proj"}
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
        elif name in outputs:
            x = x.flatten(0, 1)[flow.places[batch].to(x.device)].float().view(-1, config.num_kv_heads, sharing, width)
            head_moments[outputs[name]].add_(torch.einsum("tkri,tkrj->kij", x, x).double())

    with MaskedModel(source.projections) as masked, masked.during(observer=observe), torch.no_grad():
        for batch in range(flow.num_batches):
            flow.final(batch)
            advance()
    return Rotation(_directions(hidden_moments), tuple(map(_directions, head_moments)))


def _directions(moments: Tensor) -> Tensor:
    """Eigenvectors as columns, with the sign that makes the largest entry positive, so that results repeat."""
    vectors = torch.linalg.eigh(moments.cpu())[1]
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return (vectors * largest.sign()).float()


def rotated(checkpoint: Checkpoint, rotation: Rotation, device: torch.device) -> Checkpoint:
    """The rotated checkpoint, with untied embeddings; its tensors are computed on ``device`` when they are read."""
    config = checkpoint.config
    by_name = {part: projection for projection in config.projections() for part in projection.parts}
    input_norms, stacked = (
        _input_norms(config),
        {one.name: (part, one) for part, one in stacked_experts(config).items()},
    )
    q = rotation.residual.to(device)
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
        value = checkpoint.tensor(name, device).float()
        if name in stacked:  # biases
            return value @ q if "down_proj" in name else value
        if projection not in by_name:  # a router, its bias, sinks, or q/k norms
            reads = projection in input_norms and kind == "weight"
            return (value * norm_of(input_norms[projection])) @ q if reads else value
        role = by_name[projection].role.removeprefix("shared_")
        heads = rotation.heads[by_name[projection].block].to(device)
        if role in ("o_proj", "out_proj", "down_proj"):
            if role == "o_proj" and kind == "weight":
                shaped = value.view(len(value), config.num_kv_heads, -1, config.head_dim)
                value = torch.einsum("nkri,kij->nkrj", shaped, heads).reshape(len(value), -1)
            return q.T @ value
        if kind == "weight":
            value = (value * norm_of(input_norms[projection])) @ q
        if role in ("v_proj", "qkv_proj"):
            width = config.blocks[by_name[projection].block].kv_size
            kept, values = value.split([len(value) - width, width])
            shaped = values.reshape(config.num_kv_heads, config.head_dim, -1)
            value = torch.cat([kept, torch.einsum("kij,kin->kjn", heads, shaped).reshape(values.shape)])
        return value

    def make_stored(name: str) -> Tensor:
        return make(name).to(tensors[name].dtype).contiguous().cpu()

    tensors = {name: replace(info, file="") for name, info in checkpoint.tensors.items() if name != LM_HEAD}
    tensors[LM_HEAD] = replace(checkpoint.tensors[head], name=LM_HEAD, file="")
    stated = {**checkpoint.config_dict, "tie_word_embeddings": False}
    made = {name: partial(make_stored, name) for name in tensors}
    changed = {"config_dict": stated, "config": ModelConfig.from_dict(stated), "rotation": rotation.residual}
    return checkpoint.derive(made, tensors=tensors, **changed)


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
    if output.weight is model.get_input_embeddings().weight:
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
    return replace(source, config=made.config), made, RotationRecord("pca", kl, len(before))


@torch.no_grad()
def load_weights(model: Any, checkpoint: Checkpoint, advance: Callable[[], None] = lambda: None) -> None:
    """Copy a checkpoint's tensors into a model of its shapes; without an output layer, the embedding into the model's."""
    parameters, output = weights_of(model, checkpoint.config), model.get_output_embeddings()
    # transformers' model has no MTP head.
    names = [name for name in checkpoint.tensors if not name.startswith(MTP)]

    @torch.no_grad()  # grad mode is per thread
    def load(name: str) -> None:
        (output.weight if name == LM_HEAD else parameters[name]).copy_(checkpoint.tensor(name))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # For a GPU, files are read in parallel; on a CPU, matrix products use several threads already.
        for _ in (pool.map if output.weight.is_cuda else map)(load, names):
            advance()
    if LM_HEAD not in checkpoint.tensors:
        output.weight.copy_(checkpoint.tensor(checkpoint.config.embedding))
