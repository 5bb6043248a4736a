"""The decoder in plain PyTorch: the readable one, with which the faster ones must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig, Projection

from ..decoding.cache import KVCache, prefix_block_size
from ..decoding.decoder import Decoder, check_capacity, prompt_chunks
from ..decoding.rotary import Rotary
from .block import Block, MaskedLinear, Positions, embed, finish_logits, read_block, read_norm, run_block

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask

# Bounds a prompt's activations, its (chunk, T) attention mask, and the time that other sequences wait.
PREFILL_CHUNK = 128


class _Projection(MaskedLinear):
    def __init__(self, bundle: Bundle, name: str, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = bundle.checkpoint.tensor(f"{name}.weight", device).to(dtype)
        self.bias = bundle.checkpoint.tensor(f"{name}.bias", device).to(dtype) if bias else None
        out_features, in_features = self.weight.shape
        super().__init__(name, in_features, out_features, device)
        self.set_mask(bundle.masks.get(name))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class TorchDecoder(Decoder):
    """Any device, any floating dtype."""

    name: ClassVar[str] = "torch"
    weight_types: ClassVar[tuple[str, ...]] = ("native",)
    prefill_chunk = PREFILL_CHUNK

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_seq_len: int,
        max_batch: int = 1,
        weights: str = "native",
    ) -> None:
        self.config = config = bundle.config
        self.device, self.dtype = device, dtype
        self.max_batch, self.max_seq_len = max_batch, max_seq_len
        read_projection = self._read_matrices(bundle, weights)
        self._blocks: list[Block] = [
            read_block(bundle, index, device, dtype, read_projection) for index in range(config.num_blocks)
        ]
        self._norm = read_norm(bundle, "model.norm", device, dtype)
        self._rotaries = [Rotary(rope, device, dtype) for rope in config.rotaries]
        self._cache = KVCache(config, max_batch, max_seq_len, device, dtype)
        self._projections = [projection for block in self._blocks for projection in block.projections]
        self.prefix_block_size = prefix_block_size(config, PREFILL_CHUNK, max_seq_len)
        self._sparse_positions = 0

    def _read_matrices(self, bundle: Bundle, weights: str) -> Callable[[Projection], MaskedLinear]:
        """Read embedding and output layer; returns what makes the projections."""
        tensor, device, dtype = bundle.checkpoint.tensor, self.device, self.dtype
        self._embedding = tensor("model.embed_tokens.weight", device).to(dtype)
        tied = self.config.tie_word_embeddings
        self._head: Any = self._embedding if tied else tensor("lm_head.weight", device).to(dtype)
        return lambda p: _Projection(bundle, p.name, p.bias, device, dtype)

    @classmethod
    def refusal(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, weights: str) -> str | None:
        return None if weights in cls.weight_types else f"it has no {weights} weights"

    def bytes_read(self) -> tuple[int, int]:
        return sum(projection.nbytes for projection in self._projections), self._head.nbytes

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        lengths, tokens, rows = self._cache.lengths, token_ids.tolist(), []
        check_capacity(tokens, lengths, self.max_seq_len)
        for slot, token in enumerate(tokens):
            if token < 0:
                rows.append(torch.zeros(1, self.config.vocab_size, device=self.device))
                continue
            one = torch.tensor([token], device=self.device)
            hidden = self._forward(self._cache, slot, one, start=lengths[slot], total=lengths[slot] + 1, first_sparse=0)
            lengths[slot] += 1
            rows.append(self._logits(hidden))
        return torch.cat(rows)

    def _read(
        self, cache: KVCache, slot: int, token_ids: Tensor, sparse_from: int, start: int, stop: int
    ) -> Iterator[Tensor]:
        total = len(token_ids)
        for first, end, first_sparse in prompt_chunks(start, stop, total, self.prefill_chunk, sparse_from):
            chunk = token_ids[first:end].to(self.device)
            yield self._forward(cache, slot, chunk, start=first, total=total, first_sparse=first_sparse)

    def _forward(
        self, cache: KVCache, slot: int, token_ids: Tensor, *, start: int, total: int, first_sparse: int
    ) -> Tensor:
        """Positions from ``start`` on, of a sequence of ``total``: (T,) ids to (T, H) hidden states, filling the cache.

        Those from the chunk's ``first_sparse``-th on are masked.
        """
        config, count = self.config, len(token_ids)
        self._sparse_positions += count - first_sparse
        at = Positions.of(config, self._rotaries, cache, slot, range(start, start + count), total, self.device)
        x = embed(config, self._embedding, token_ids)
        for index, block in enumerate(self._blocks):

            def apply(role: str, n: Tensor, block: Block = block) -> list[Tensor]:
                found = getattr(block, role)
                projections = found if isinstance(found, list) else [found]
                return [projection(n, first_sparse) for projection in projections]

            x = run_block(config, index, block, x, at, apply)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        return finish_logits(self.config, functional.linear(self._norm(hidden), self._head).float())

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        self.measure_sparsity(False)
        self._cache.forget()
        for projection in self._projections:
            projection.set_mask(masks[projection.name])

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        self._sparse_positions = 0
        for projection in self._projections:
            projection.kept = torch.zeros((), dtype=torch.int64, device=self.device) if enabled else None

    def realised_sparsity(self) -> float | None:
        positions = self._sparse_positions
        dropped = total = 0
        for projection, kept in zip(self._projections, self._kept_channels(), strict=True):
            if projection.kept is None or not positions:
                return None
            channels, outputs = projection.in_features * positions, projection.out_features
            total += outputs * channels
            if projection.channel_scale is not None:
                dropped += outputs * (channels - kept)
        return dropped / total

    def _kept_channels(self) -> list[int]:
        """Of each projection, summed over the sparse positions."""
        return [0 if projection.kept is None else int(projection.kept) for projection in self._projections]
