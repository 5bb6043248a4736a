"""A model's weights on the GPU, channel-major: a kept channel is one contiguous row.

Each tensor is read, moved to the GPU, laid out there in its place and let go, so the GPU holds the weights and one
tensor more, and the host a few parts of one (``staging``). Projections that a bundle holds in codes stay in them, and
others are rounded here if they are asked for so. ``lm_head`` and the embeddings are read densely and stay as they are;
``lm_head`` may be rounded to eight bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.model_config import ModelConfig, Projection
from wisparse.formats.weight_types import WEIGHT_TYPES, QuantizedMatrix, round_weight
from wisparse.kernels.gpu.gemv import Group
from wisparse.kernels.gpu.matrix import MIDDLE, Matrix, empty_matrix, put_columns
from wisparse.kernels.reference import activation_dtype, wide_dtype

from ..torch.block import BlockFacts, Norm
from ..torch.delta_net import delta_names, read_delta_weights
from .graph import staged_reads

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask


_GROUPS = ("qkv", "o", "gate_up", "down")
# Rows of an output layer in codes that a prompt reads at once, at least.
_HEAD_ROWS = 4096
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class CudaNorm(Norm):
    """A norm, and what the kernels multiply by: the weight, or 1 + weight in the type that they add up in."""

    factors: Tensor


@dataclass(frozen=True, kw_only=True)
class BlockWeights(BlockFacts[CudaNorm]):
    """One transformer block; each group's projections read the same input.

    ``delta`` and ``scalar`` are of the activations' type. A recurrent block's ``qkv`` and ``o`` are the products around
    its ``delta``.
    """

    qkv: Group
    o: Group
    gate_up: Group
    down: Group

    @property
    def groups(self) -> tuple[Group, Group, Group, Group]:
        """In the order of execution."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def qk_norm(self) -> tuple[Tensor, Tensor] | None:
        """What queries and keys are multiplied by once they are normalised; None where they are not."""
        return (self.q_norm.factors, self.k_norm.factors) if self.q_norm and self.k_norm else None


class MaskKind(NamedTuple):
    """What a group's launches depend on: whether a mask drops anything."""

    dense: bool


@dataclass(frozen=True)
class CudaWeights:
    """Everything a decoder reads.

    Attributes:
        head: (V, H), int8 if it has scales.
        head_scales: (V,) float32, or None.
        widened: (n,) room for one projection's numbers, in which prompts read codes; None without codes.
    """

    embedding: Tensor
    blocks: list[BlockWeights]
    norm: CudaNorm
    head: Tensor
    head_scales: Tensor | None
    widened: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device; tied embeddings count once."""
        tensors = {id(t): t for t in (self.embedding, self.norm.weight, self.head)}
        if self.head_scales is not None:
            tensors[id(self.head_scales)] = self.head_scales
        for block in self.blocks:
            if block.delta is not None:
                tensors |= {id(t): t for t in vars(block.delta).values() if isinstance(t, Tensor)}
        return sum(tensor.nbytes for tensor in tensors.values()) + self.num_bytes_inside

    @property
    def num_bytes_inside(self) -> int:
        """Bytes of the projections' weights."""
        return sum(group.matrix.num_bytes for block in self.blocks for group in block.groups)


@dataclass(frozen=True)
class _Source:
    """A bundle's tensors, as ``dtype`` on ``device``.

    Attributes:
        checkpoint: a ``Checkpoint``, or whatever else makes tensors up.
        stored: reads one of them onto the device, in its stored type, quantised ones widened.
    """

    checkpoint: Any
    stored: Callable[[str], Tensor]
    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str) -> Tensor:
        return self.stored(name).to(self.dtype)

    def weight(self, name: str, weights: str) -> Tensor | QuantizedMatrix:
        """A weight as ``weights`` says: in codes where it is stored in them, or was asked for so.

        Raises:
            BundleError: damaged, or beyond ``dtype`` where it is rounded.
            UsageError: its channels cannot be cut into groups.
        """
        how = self.checkpoint.quantised.get(name) if isinstance(self.checkpoint, Checkpoint) else None
        if how is not None and weights in ("native", how.packing.kind):
            return self.checkpoint.matrix(name, self.device)
        plain = self.tensor(name)
        return plain if weights == "native" else self.rounded(name, plain, weights)

    def rounded(self, name: str, weight: Tensor, weights: str) -> QuantizedMatrix:
        """A weight in codes; errors as of `weight`."""
        least, largest = torch.aminmax(weight)
        if not (bool(torch.isfinite(least)) and bool(torch.isfinite(largest))):
            raise BundleError(f"{name}: expected finite weights, found NaN or Inf in {self.dtype}")
        try:
            return round_weight(weight, weights)
        except ValueError as error:
            raise UsageError(f"{name}: {error}: load it with weights int8") from None

    def head(self, config: ModelConfig, embedding: Tensor, weights: str) -> Tensor | QuantizedMatrix:
        """The output layer, plain or int8 with a scale a row."""
        if config.tie_word_embeddings:
            return embedding if weights == "native" else self.rounded(_EMBEDDING, embedding, weights)
        found = self.weight(_HEAD, weights)
        if isinstance(found, Tensor) or (found.kind == "int8" and found.group is None and found.zeros is None):
            return found
        wide = found.dequantise(self.dtype)
        return wide if weights == "native" else self.rounded(_HEAD, wide, weights)


def load_weights(bundle: Bundle, device: torch.device, dtype: torch.dtype, weights: str = "native") -> CudaWeights:
    """Read a bundle's weights onto ``device``; copies may still be under way on the current stream.

    The bundle's masks are in force; ``with_kinds`` and ``put_masks`` bring others.

    Args:
        dtype: of the activations, and of the weights that are not in codes.
        weights: one of ``WEIGHT_TYPES``: what the projections are rounded to; ``native``: as the bundle has them.
    """
    config = bundle.config
    with _reads(bundle.checkpoint, _names(config), device) as stored:
        source = _Source(bundle.checkpoint, stored, device, dtype)
        embedding = source.tensor(_EMBEDDING)
        head = source.head(config, embedding, WEIGHT_TYPES[weights].head)
        blocks = [_load_block(config, index, source, weights) for index in range(config.num_blocks)]
        norm = _norm(config, source.tensor(_NORM))
        codes, scales = (head, None) if isinstance(head, Tensor) else (head.codes, head.scales.flatten())
        widest = max(_numbers_to_widen(group) for block in blocks for group in block.groups)
        if scales is not None:
            widest = max(widest, _HEAD_ROWS * codes.shape[1])
        widened = torch.empty(widest, dtype=dtype, device=device) if widest else None
        unmasked = CudaWeights(embedding, blocks, norm, codes, scales, widened)
        found = with_kinds(unmasked, mask_kinds(config, bundle.masks))
        put_masks(found, config, bundle.masks)
        return found


def _numbers_to_widen(group: Group) -> int:
    """Numbers of the group's widest projection, if it is in codes."""
    return 0 if group.matrix.kind == "plain" else group.in_features * max(group.widths)


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
        yield from (
            f"model.layers.{index}.{name}.weight" for name in _norms(config, index).values() if name is not None
        )
        if config.architecture.block_scalar is not None:
            yield f"model.layers.{index}.{config.architecture.block_scalar}"
        yield from delta_names(config, index).values()
        for projection in config.projections(index):
            yield f"{projection.name}.weight"
            if projection.bias:
                yield f"{projection.name}.bias"
    yield _NORM


def _norms(config: ModelConfig, index: int) -> dict[str, str | None]:
    """A block's norms, the fields of ``BlockWeights``, and their names in the checkpoint."""
    arch = config.architecture
    q_norm, k_norm = (None, None) if arch.qk_norm is None or config.blocks[index].recurrent else arch.qk_norm.names
    own = {"q_norm": q_norm and f"self_attn.{q_norm}", "k_norm": k_norm and f"self_attn.{k_norm}"}
    return asdict(arch.norms) | own


def _norm(config: ModelConfig, weight: Tensor) -> CudaNorm:
    offset = config.architecture.norm_offset
    factors = 1.0 + weight.to(wide_dtype(weight.dtype)) if offset else weight
    return CudaNorm(weight, config.rms_norm_eps, offset, factors)


def _load_block(config: ModelConfig, index: int, source: _Source, weights: str) -> BlockWeights:
    norms = {
        field: None if name is None else _norm(config, source.tensor(f"model.layers.{index}.{name}.weight"))
        for field, name in _norms(config, index).items()
    }
    activations = activation_dtype(source.dtype)
    delta = read_delta_weights(config, index, lambda name: source.tensor(name).to(activations))
    name = config.architecture.block_scalar
    scalar = None if name is None else source.tensor(f"model.layers.{index}.{name}").to(activations)
    projections = _projections(config, index)
    groups = {field: _load_group(*projections[field], source, weights) for field in _GROUPS}
    return BlockWeights(**norms, **groups, facts=config.blocks[index], delta=delta, scalar=scalar)  # type: ignore[arg-type]


def _projections(config: ModelConfig, index: int) -> dict[str, tuple[list[Projection], int]]:
    """A block's groups, in the order of execution: their projections, and how many each of these stands for."""
    # A fused gate_up_proj is two projections that share one mask.
    fused = {"gate_up"} if len(config.architecture.gate_up) == 1 else set()
    groups = zip(_GROUPS, config.shared_inputs(index), strict=True)
    return {field: (projections, 2 if field in fused else 1) for field, projections in groups}


def _load_group(projections: list[Projection], copies: int, source: _Source, weights: str) -> Group:
    device, dtype = source.device, source.dtype
    k = projections[0].in_features
    total = sum(projection.out_features for projection in projections)
    has_bias = any(projection.bias for projection in projections)
    bias = torch.zeros(total, dtype=dtype, device=device) if has_bias else None
    widths = tuple(projection.out_features // copies for projection in projections for _ in range(copies))
    matrix: Matrix | None = None
    first = 0
    for i, projection in enumerate(projections):
        last = first + projection.out_features
        weight = source.weight(f"{projection.name}.weight", weights)
        if matrix is None:
            matrix = _room_for(weight, widths, dtype)
        for copy in range(copies):
            _put_rows(matrix, i * copies + copy, weight, copy * widths[i * copies])
        del weight
        if bias is not None and projection.bias:
            bias[first:last] = source.tensor(f"{projection.name}.bias")
        first = last
    assert matrix is not None
    if matrix.zeros is not None and bool((matrix.zeros == MIDDLE[matrix.kind]).all()):
        matrix = replace(matrix, zeros=None)  # as codes without zero points are: there is nothing to read
    scales = torch.ones(len(widths), k, dtype=torch.float32, device=device)
    thresholds = torch.zeros(len(widths), dtype=torch.float32, device=device)
    return Group(matrix, widths, bias, scales, thresholds, dense=True)


def _room_for(weight: Tensor | QuantizedMatrix, widths: tuple[int, ...], dtype: torch.dtype) -> Matrix:
    """Room for projections that are held as the first of them is: those of one input are stored alike."""
    k = weight.shape[1]
    if isinstance(weight, Tensor):
        return empty_matrix("plain", k, widths, None, dtype, weight.device)
    zeros = weight.zeros is not None
    return empty_matrix(weight.kind, k, widths, weight.group, dtype, weight.codes.device, zeros=zeros)


def _put_rows(matrix: Matrix, index: int, weight: Tensor | QuantizedMatrix, first: int) -> None:
    """Lay out the rows of a weight, from ``first`` on, that are projection ``index`` of a group."""
    last = first + matrix.widths[index]
    if isinstance(weight, Tensor):
        put_columns(matrix, index, weight[first:last])
    else:
        rows = weight.rows(first, last)
        put_columns(matrix, index, rows.codes, rows.scales, rows.zeros)


def mask_kinds(config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> tuple[MaskKind, ...]:
    """Group by group, what a step is compiled for: weights of equal kinds share their steps, whatever the masks."""
    kinds = []
    for index in range(config.num_blocks):
        for projections, _ in _projections(config, index).values():
            mine = [mask for projection in projections if (mask := masks.get(projection.name)) is not None]
            kinds.append(MaskKind(not any(mask.threshold for mask in mine)))
    return tuple(kinds)


def with_kinds(weights: CudaWeights, kinds: Sequence[MaskKind]) -> CudaWeights:
    """The same weights for masks of these kinds: scales and thresholds are shared, no mask is in force."""
    rest = iter(kinds)
    blocks = []
    for block in weights.blocks:
        qkv, o, gate_up, down = (replace(group, dense=next(rest).dense) for group in block.groups)
        blocks.append(replace(block, qkv=qkv, o=o, gate_up=gate_up, down=down))
    return replace(weights, blocks=blocks)


def put_masks(weights: CudaWeights, config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> None:
    """Write masks where the kernels read them, in place: a captured step goes on with them. They are of the kinds that
    the weights are for."""
    for index, block in enumerate(weights.blocks):
        for group, (projections, copies) in zip(block.groups, _projections(config, index).values(), strict=True):
            group.scales.fill_(1.0)
            thresholds = [0.0] * len(group.widths)
            for i, projection in enumerate(projections):
                mask = masks.get(projection.name)
                if mask is not None and mask.sparsity > 0:
                    group.scales[i * copies : (i + 1) * copies] = mask.channel_scale.to(group.scales.device)
                    thresholds[i * copies : (i + 1) * copies] = [float(mask.threshold)] * copies
            group.thresholds.copy_(torch.tensor(thresholds, dtype=torch.float32))
