"""A model's weights on the GPU, channel-major: a kept channel is one contiguous row.

Each tensor is read, moved to the GPU, transposed there into its place and let go, so the GPU holds the weights and one
tensor more, and the host a few parts of one (``staging``). ``lm_head`` and the embeddings are read densely and
stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wisparse.formats.model import model_config
from wisparse.formats.model.model_config import ModelConfig, Projection
from wisparse.formats.weights.checkpoint import Checkpoint
from wisparse.kernels.gpu.gemv import Group
from wisparse.kernels.gpu.matrix import empty_matrix, put_columns
from wisparse.kernels.precision import wide_dtype

from ..torch.decoder import Norm
from .staging import staged_reads

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask

__all__ = [
    "BlockWeights",
    "CudaNorm",
    "CudaWeights",
    "MaskKind",
    "load_weights",
    "mask_kinds",
    "put_masks",
    "with_kinds",
]

_GROUPS = ("qkv", "o", "gate_up", "down")
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class CudaNorm(Norm):
    """A norm, and what the kernels multiply by: the weight, or 1 + weight in the type that they add up in."""

    factors: Tensor


@dataclass(frozen=True)
class BlockWeights:
    """One transformer block; each group's projections read the same input. A norm that there is not is None."""

    facts: model_config.Block
    attention_input: CudaNorm | None
    attention_output: CudaNorm | None
    mlp_input: CudaNorm | None
    mlp_output: CudaNorm | None
    qkv: Group
    o: Group
    gate_up: Group
    down: Group
    q_norm: CudaNorm | None
    k_norm: CudaNorm | None

    @property
    def groups(self) -> tuple[Group, Group, Group, Group]:
        """In the order of execution."""
        return self.qkv, self.o, self.gate_up, self.down


class MaskKind(NamedTuple):
    """What a group's launches depend on: whether a mask drops anything, and whether one adds something."""

    dense: bool
    biased: bool


@dataclass(frozen=True)
class CudaWeights:
    """Everything a decoder reads."""

    embedding: Tensor
    blocks: list[BlockWeights]
    norm: CudaNorm
    head: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device; tied embeddings count once."""
        tensors = {id(t): t for t in (self.embedding, self.norm.weight, self.head)}
        for block in self.blocks:
            for group in block.groups:
                tensors[id(group)] = group.matrix.data
        return sum(t.numel() * t.element_size() for t in tensors.values())


def load_weights(bundle: Bundle, device: torch.device, dtype: torch.dtype) -> CudaWeights:
    """Read a bundle's weights onto ``device`` as ``dtype``; copies may still be under way on the current stream.

    The bundle's masks are in force; ``with_kinds`` and ``put_masks`` bring others.
    """
    with _reads(bundle.checkpoint, _names(bundle.config), device) as stored:

        def read(name: str) -> Tensor:
            return stored(name).to(dtype)

        config = bundle.config
        embedding = read(_EMBEDDING)
        head = embedding if config.tie_word_embeddings else read(_HEAD)
        blocks = [_load_block(config, index, read, device, dtype) for index in range(config.num_blocks)]
        unmasked = CudaWeights(embedding, blocks, _norm(config, read(_NORM)), head)
        weights = with_kinds(unmasked, mask_kinds(config, bundle.masks))
        put_masks(weights, config, bundle.masks)
        return weights


def _reads(
    checkpoint: Any, names: Iterable[str], device: torch.device
) -> AbstractContextManager[Callable[[str], Tensor]]:
    """``read(name)`` for the tensors of a checkpoint, or of whatever else makes them up."""
    if isinstance(checkpoint, Checkpoint) and not checkpoint.quantised:
        return staged_reads(checkpoint, names, device)
    return nullcontext(lambda name: checkpoint.tensor(name, device).to(device))


def _names(config: ModelConfig) -> Iterator[str]:
    """The tensors in the order in which they are read: the largest first, while there is room for a temporary."""
    yield _EMBEDDING
    if not config.tie_word_embeddings:
        yield _HEAD
    for index in range(config.num_blocks):
        yield from (f"model.layers.{index}.{name}.weight" for name in _norms(config).values() if name is not None)
        for projection in config.projections(index):
            yield f"{projection.name}.weight"
            if projection.bias:
                yield f"{projection.name}.bias"
    yield _NORM


def _norms(config: ModelConfig) -> dict[str, str | None]:
    """A block's norms, the fields of ``BlockWeights``, and their names in the checkpoint."""
    arch = config.architecture
    q_norm, k_norm = (None, None) if arch.qk_norm is None else arch.qk_norm.names
    own = {"q_norm": q_norm and f"self_attn.{q_norm}", "k_norm": k_norm and f"self_attn.{k_norm}"}
    return asdict(arch.norms) | own


def _norm(config: ModelConfig, weight: Tensor) -> CudaNorm:
    offset = config.architecture.norm_offset
    factors = 1.0 + weight.to(wide_dtype(weight.dtype)) if offset else weight
    return CudaNorm(weight, config.rms_norm_eps, offset, factors)


def _load_block(
    config: ModelConfig,
    index: int,
    read: Callable[[str], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> BlockWeights:
    def group(field: str) -> Group:
        return _load_group(*_projections(config, index)[field], read, device, dtype)

    norms = {
        field: None if name is None else _norm(config, read(f"model.layers.{index}.{name}.weight"))
        for field, name in _norms(config).items()
    }
    groups = {field: group(field) for field in _GROUPS}
    return BlockWeights(**norms, **groups, facts=config.blocks[index])  # type: ignore[arg-type]


def _projections(config: ModelConfig, index: int) -> dict[str, tuple[list[Projection], int]]:
    """A block's groups, in the order of execution: their projections, and how many each of these stands for."""
    arch = config.architecture
    by_role = {projection.role: projection for projection in config.projections(index)}
    roles = {"qkv": arch.qkv, "o": ("o_proj",), "gate_up": arch.gate_up, "down": ("down_proj",)}
    # A fused gate_up_proj is two projections that share one mask.
    fused = {"gate_up"} if len(arch.gate_up) == 1 else set()
    return {field: ([by_role[role] for role in roles[field]], 2 if field in fused else 1) for field in _GROUPS}


def _load_group(
    projections: list[Projection],
    copies: int,
    read: Callable[[str], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Group:
    k = projections[0].in_features
    total = sum(projection.out_features for projection in projections)
    has_bias = any(projection.bias for projection in projections)
    bias = torch.zeros(total, dtype=dtype, device=device) if has_bias else None
    widths = tuple(projection.out_features // copies for projection in projections for _ in range(copies))
    matrix = empty_matrix("plain", k, widths, None, dtype, device)
    first = 0
    for i, projection in enumerate(projections):
        last = first + projection.out_features
        for copy, part in enumerate(read(f"{projection.name}.weight").chunk(copies)):
            put_columns(matrix, i * copies + copy, part)
        if bias is not None and projection.bias:
            bias[first:last] = read(f"{projection.name}.bias")
        first = last
    scales = torch.ones(len(widths), k, dtype=torch.float32, device=device)
    thresholds = torch.zeros(len(widths), dtype=torch.float32, device=device)
    return Group(matrix, widths, bias, scales, thresholds, dense=True)


def mask_kinds(config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> tuple[MaskKind, ...]:
    """Group by group, what a step is compiled for: weights of equal kinds share their steps, whatever the masks."""
    kinds = []
    for index in range(config.num_blocks):
        for projections, _ in _projections(config, index).values():
            mine = [mask for projection in projections if (mask := masks.get(projection.name)) is not None]
            kinds.append(MaskKind(not any(mask.threshold for mask in mine), any(_biased(mask) for mask in mine)))
    return tuple(kinds)


def with_kinds(weights: CudaWeights, kinds: Sequence[MaskKind]) -> CudaWeights:
    """The same weights for masks of these kinds: scales and thresholds are shared, no mask is in force."""
    rest = iter(kinds)

    def of_kind(group: Group, kind: MaskKind) -> Group:
        none = torch.zeros(group.out_features, dtype=wide_dtype(group.matrix.dtype), device=group.matrix.data.device)
        return replace(group, dense=kind.dense, masked_bias=none if kind.biased else None)

    blocks = []
    for block in weights.blocks:
        qkv, o, gate_up, down = (of_kind(group, next(rest)) for group in block.groups)
        blocks.append(replace(block, qkv=qkv, o=o, gate_up=gate_up, down=down))
    return replace(weights, blocks=blocks)


def put_masks(weights: CudaWeights, config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> None:
    """Write masks where the kernels read them, in place: a captured step goes on with them. They are of the kinds that
    the weights are for."""
    for index, block in enumerate(weights.blocks):
        for group, (projections, copies) in zip(block.groups, _projections(config, index).values(), strict=True):
            group.scales.fill_(1.0)
            thresholds = [0.0] * len(group.widths)
            if group.masked_bias is not None:
                group.masked_bias.zero_() if group.bias is None else group.masked_bias.copy_(group.bias)
            first = 0
            for i, projection in enumerate(projections):
                last = first + projection.out_features
                mask = masks.get(projection.name)
                if mask is not None and mask.sparsity > 0:
                    group.scales[i * copies : (i + 1) * copies] = mask.channel_scale.to(group.scales.device)
                    thresholds[i * copies : (i + 1) * copies] = [float(mask.threshold)] * copies
                if mask is not None and group.masked_bias is not None and _biased(mask):
                    group.masked_bias[first:last] += mask.output_bias.to(group.scales.device)  # type: ignore[union-attr]
                first = last
            group.thresholds.copy_(torch.tensor(thresholds, dtype=torch.float32))


def _biased(mask: ProjectionMask) -> bool:
    return mask.sparsity > 0 and mask.output_bias is not None
