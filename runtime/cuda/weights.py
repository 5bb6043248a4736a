"""A model's weights on the GPU, channel-major: a kept channel is one contiguous row.

Each tensor is read, moved to the GPU, transposed there into its place and let go, so the GPU holds the weights and one
tensor more, and the host a few parts of one (``staging``). ``lm_head`` and the embeddings are read densely and
stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wisparse.formats.architectures import ModelConfig, Projection
from wisparse.formats.checkpoint import Checkpoint
from wisparse.kernels.gpu.gemv import Group

from .staging import staged_reads

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask

__all__ = ["BlockWeights", "CudaWeights", "load_weights"]

_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class BlockWeights:
    """One transformer block; each group's projections read the same input."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Group
    o: Group
    gate_up: Group
    down: Group
    qk_norm: tuple[Tensor, Tensor] | None
    window: int | None

    @property
    def groups(self) -> tuple[Group, Group, Group, Group]:
        """In the order of execution."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True)
class CudaWeights:
    """Everything a decoder reads."""

    embedding: Tensor
    blocks: list[BlockWeights]
    norm: Tensor
    head: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device; tied embeddings count once."""
        tensors = {id(t): t for t in (self.embedding, self.norm, self.head)}
        for block in self.blocks:
            for group in block.groups:
                tensors[id(group)] = group.weight_t
        return sum(t.numel() * t.element_size() for t in tensors.values())


def load_weights(bundle: Bundle, device: torch.device, dtype: torch.dtype) -> CudaWeights:
    """Read a bundle's weights onto ``device`` as ``dtype``; copies may still be under way on the current stream."""
    with _reads(bundle.checkpoint, _names(bundle.config), device) as stored:

        def read(name: str) -> Tensor:
            return stored(name).to(dtype)

        config = bundle.config
        embedding = read(_EMBEDDING)
        head = embedding if config.tie_word_embeddings else read(_HEAD)
        blocks = [_load_block(config, index, read, bundle.masks, device, dtype) for index in range(config.num_blocks)]
        return CudaWeights(embedding, blocks, read(_NORM), head)


def _reads(
    checkpoint: Any, names: Iterable[str], device: torch.device
) -> AbstractContextManager[Callable[[str], Tensor]]:
    """``read(name)`` for the tensors of a checkpoint, or of whatever else makes them up."""
    if isinstance(checkpoint, Checkpoint):
        return staged_reads(checkpoint, names, device)
    return nullcontext(lambda name: checkpoint.tensor(name, device).to(device))


def _names(config: ModelConfig) -> Iterator[str]:
    """The tensors in the order in which they are read: the largest first, while there is room for a temporary."""
    yield _EMBEDDING
    if not config.tie_word_embeddings:
        yield _HEAD
    for index in range(config.num_blocks):
        yield from (f"model.layers.{index}.{norm}.weight" for norm in _norms(config))
        for projection in config.projections(index):
            yield f"{projection.name}.weight"
            if projection.bias:
                yield f"{projection.name}.bias"
    yield _NORM


def _norms(config: ModelConfig) -> tuple[str, ...]:
    """A block's norms: before the attention, before the MLP, and of queries and keys if it has them."""
    own = ("self_attn.q_norm", "self_attn.k_norm") if config.architecture.qk_norm else ()
    return ("input_layernorm", "post_attention_layernorm", *own)


def _load_block(
    config: ModelConfig,
    index: int,
    read: Callable[[str], Tensor],
    masks: Mapping[str, ProjectionMask],
    device: torch.device,
    dtype: torch.dtype,
) -> BlockWeights:
    arch = config.architecture
    by_role = {projection.role: projection for projection in config.projections(index)}

    def group(roles: tuple[str, ...], copies: int = 1) -> Group:
        return _load_group([by_role[role] for role in roles], copies, read, masks, device, dtype)

    attention_norm, mlp_norm, *qk_norm = (read(f"model.layers.{index}.{norm}.weight") for norm in _norms(config))
    return BlockWeights(
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        qkv=group(arch.qkv),
        o=group(("o_proj",)),
        # A fused gate_up_proj is two projections that share one mask.
        gate_up=group(arch.gate_up, copies=2 if len(arch.gate_up) == 1 else 1),
        down=group(("down_proj",)),
        qk_norm=(qk_norm[0], qk_norm[1]) if qk_norm else None,
        window=config.blocks[index].window,
    )


def _load_group(
    projections: list[Projection],
    copies: int,
    read: Callable[[str], Tensor],
    masks: Mapping[str, ProjectionMask],
    device: torch.device,
    dtype: torch.dtype,
) -> Group:
    k = projections[0].in_features
    total = sum(projection.out_features for projection in projections)
    # Rows start at multiples of 16 elements, so that they can be read 16 bytes at a time.
    weight_t = torch.empty(k, -(-total // 16) * 16, dtype=dtype, device=device)
    has_bias = any(projection.bias for projection in projections)
    bias = torch.zeros(total, dtype=dtype, device=device) if has_bias else None
    widths: list[int] = []
    scales = torch.ones(len(projections) * copies, k, dtype=torch.float32, device=device)
    thresholds = [0.0] * (len(projections) * copies)
    first = 0
    for i, projection in enumerate(projections):
        last = first + projection.out_features
        weight_t[:, first:last] = read(f"{projection.name}.weight").T
        if bias is not None and projection.bias:
            bias[first:last] = read(f"{projection.name}.bias")
        mask = masks.get(projection.name)
        if mask is not None and mask.sparsity > 0:
            scales[i * copies : (i + 1) * copies] = mask.channel_scale.to(device)
            thresholds[i * copies : (i + 1) * copies] = [float(mask.threshold)] * copies
        widths += [projection.out_features // copies] * copies
        first = last
    return Group(
        weight_t,
        tuple(widths),
        bias,
        scales,
        torch.tensor(thresholds, dtype=torch.float32, device=device),
        dense=not any(thresholds),
    )
