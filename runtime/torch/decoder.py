"""The decoder in plain PyTorch: the one to read, and the one the faster ones must agree with.

Every projection q … down of its blocks (``block``) drops the channels its mask drops (``kernels.reference``), on the
sparse positions. It multiplies by the whole weight all the same, so it is right, not fast. Slots are decoded one after
the other: a sequence then meets the same matrix shapes, and so gives the same bits, alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig

from ..decoding.cache import KVCache, prefix_block_size
from ..decoding.decoder import Decoder, check_capacity, check_part, check_prompt, prompt_chunks
from ..decoding.rotary import Rotary
from .block import Block, MaskedLinear, Positions, embed, finish_logits, read_block, read_norm, run_block

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask


# Prompts are read in pieces: bounds the activations and the (piece, T) attention mask of a long prompt, and the time
# that other sequences wait for theirs. What a chat's turns share is read again up to a piece.
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
    """See :class:`runtime.decoding.decoder.Decoder`; any device, any floating dtype."""

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
        self.config: ModelConfig = bundle.config
        self.device, self.dtype = device, dtype
        self.max_batch, self.max_seq_len = max_batch, max_seq_len
        self._embedding = bundle.checkpoint.tensor("model.embed_tokens.weight", device).to(dtype)
        self._blocks = [
            read_block(bundle, index, device, dtype, lambda p: _Projection(bundle, p.name, p.bias, device, dtype))
            for index in range(self.config.num_blocks)
        ]
        self._norm = read_norm(bundle, "model.norm", device, dtype)
        tied = self.config.tie_word_embeddings
        self._head = self._embedding if tied else bundle.checkpoint.tensor("lm_head.weight", device).to(dtype)
        self._rotaries = [Rotary(rope, device, dtype) for rope in self.config.rotaries]
        self._cache = KVCache(self.config, max_batch, max_seq_len, device, dtype)
        self.prefix_block_size = prefix_block_size(self.config, PREFILL_CHUNK, max_seq_len)
        self._sparse_positions = 0

    @classmethod
    def refusal(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, weights: str) -> str | None:
        return None if weights in cls.weight_types else f"it has no {weights} weights"

    def bytes_read(self) -> tuple[int, int]:
        inside = sum(projection.nbytes for block in self._blocks for projection in block.projections)
        return inside, self._head.nbytes

    @property
    def lengths(self) -> list[int]:
        return list(self._cache.lengths)

    @torch.inference_mode()
    def prefill(
        self,
        slot: int,
        token_ids: Tensor,
        sparse_from: int,
        *,
        start: int = 0,
        stop: int | None = None,
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        stop = check_part(token_ids, self.max_seq_len, start, stop)
        self._cache.begin(slot, start)
        for hidden in self._read(self._cache, slot, token_ids, sparse_from, start, stop):
            if on_logits is not None:
                on_logits(self._logits(hidden))
            last = hidden[-1:]
        self._cache.lengths[slot] = stop
        return self._logits(last)[0]

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        lengths = self._cache.lengths
        tokens = token_ids.tolist()
        rows = []
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

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        self._cache.copy(source, target, length)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        total = len(token_ids)
        check_prompt(total, self.max_seq_len)
        scratch = KVCache(self.config, 1, total, self.device, self.dtype)
        result = torch.empty(total, self.config.vocab_size, device=self.device)
        start = 0
        for hidden in self._read(scratch, 0, token_ids, sparse_from, 0, total):
            result[start : start + len(hidden)] = self._logits(hidden)
            start += len(hidden)
        return result

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        self.measure_sparsity(False)
        self._cache.forget()
        for block in self._blocks:
            for projection in block.projections:
                projection.set_mask(masks[projection.name])

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        self._sparse_positions = 0
        for block in self._blocks:
            for projection in block.projections:
                projection.kept = torch.zeros((), dtype=torch.int64, device=self.device) if enabled else None

    def realised_sparsity(self) -> float | None:
        positions = self._sparse_positions
        dropped = total = 0
        for block in self._blocks:
            for projection in block.projections:
                if projection.kept is None or not positions:
                    return None
                outputs, channels = projection.out_features, projection.in_features
                total += outputs * channels * positions
                if projection.channel_scale is not None:
                    dropped += outputs * (channels * positions - int(projection.kept))
        return dropped / total

    def close(self) -> None:
        for name in ("_embedding", "_blocks", "_norm", "_head", "_cache"):
            self.__dict__.pop(name, None)

    def _read(self, cache: KVCache, slot: int, token_ids: Tensor, sparse_from: int, start: int, stop: int):
        """Run positions of a sequence through the blocks; yields their hidden states piece by piece, (piece, H)."""
        total = len(token_ids)
        for first, end, first_sparse in prompt_chunks(start, stop, total, self.prefill_chunk, sparse_from):
            piece = token_ids[first:end].to(self.device)
            yield self._forward(cache, slot, piece, start=first, total=total, first_sparse=first_sparse)

    def _forward(
        self, cache: KVCache, slot: int, token_ids: Tensor, *, start: int, total: int, first_sparse: int
    ) -> Tensor:
        """Positions ``start``.. of a sequence of ``total``: (T,) ids to (T, H) hidden states, filling the cache."""
        config, count = self.config, len(token_ids)
        self._sparse_positions += count - first_sparse
        places = range(start, start + count)
        at = Positions.of(config, self._rotaries, cache, slot, places, total, self.device)
        x = embed(config, self._embedding, token_ids)
        for index, block in enumerate(self._blocks):

            def apply(role: str, n: Tensor, block: Block = block) -> list[Tensor]:
                found = getattr(block, role)
                projections = found if isinstance(found, list) else [found]
                return [projection(n, first_sparse) for projection in projections]

            x = run_block(config, index, block, x, at, apply)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        """(T, H) to (T, V) float32."""
        return finish_logits(self.config, functional.linear(self._norm(hidden), self._head).float())
