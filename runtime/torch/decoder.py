"""The decoder in plain PyTorch, the reference for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.model_config import Projection
from wisparse.formats.weight_types import QuantizedMatrix, round_weight, split_planes

from ..decoding.cache import KVCache
from ..decoding.decoder import Decoder
from .block import Block, MaskedLinear, PerLayer, finish_logits, norm_embedding, read_spec, roles_of
from .mixers import Norm


class TorchDecoder(Decoder):
    """Any device, any floating dtype."""

    name: ClassVar[str] = "torch"
    weight_types: ClassVar[tuple[str, ...]] = ("native",)
    # Bounds the activations, the (chunk, T) attention mask, and the time that other sequences wait for a chunk.
    prefill_chunk = prefix_block_size = 128
    _blocks: list[Block[list[MaskedLinear]]]

    def _load(self, bundle: Bundle, weights: str, cache: KVCache | None) -> None:
        config, device, dtype = self.config, self.device, self.dtype
        read = self._read_matrices(bundle, weights)

        stored = partial(bundle.checkpoint.tensor, device=device)

        def read_tensor(name: str) -> Tensor:
            return stored(name).to(dtype)

        self._blocks = blocks = []
        for index in range(config.num_blocks):
            projections = ([one for p in shared for one in read(p)] for shared in config.shared_inputs(index))
            linears: dict[str, Any] = dict(zip(roles_of(config, index), projections, strict=False))
            blocks.append(Block(**read_spec(config, index, stored, dtype), **linears))
        self._per_layer = PerLayer.read(config, read_tensor, stored)
        self._norm = Norm(read_tensor(f"{config.architecture.final_norm}.weight"), *config.norm("final"))
        slots = self.max_batch, self.max_seq_len
        self._cache = cache or KVCache(
            config, *slots, device, dtype, self.kv_cache_dtype, self._state_buffers, pages=self._pages
        )
        self._projections = [projection for block in blocks for linear in block.linears for projection in linear]

    def _read_matrices(self, bundle: Bundle, weights: str) -> Callable[[Projection], list[MaskedLinear]]:
        """Load embedding and output layer; returns a function that loads a projection, or all of its experts."""
        tensor, device, dtype = bundle.checkpoint.tensor, self.device, self.dtype
        self._embedding = norm_embedding(self.config, tensor(self.config.embedding, device).to(dtype))
        tied = self.config.tie_word_embeddings
        self._head: Any = self._embedding if tied else tensor("lm_head.weight", device).to(dtype)
        graded = planes_of(bundle.masks) > 1
        if graded:  # the output layer of a graded bundle is int8 in every back end
            self._head = round_weight(self._head, "int8").dequantise(dtype)

        def read(p: Projection) -> list[MaskedLinear]:
            linears: list[MaskedLinear] = []
            for expert, part in enumerate(p.parts):
                weight: Any = tensor(f"{part}.weight", device).to(dtype)
                if graded:
                    matrix = bundle.checkpoint.matrix(f"{part}.weight", device)
                    assert isinstance(matrix, QuantizedMatrix)
                    try:
                        _, low = split_planes(matrix.codes)
                    except ValueError as error:
                        raise bundle.checkpoint.error(f"{part}: {error}; convert again") from None
                    weight = weight, replace(matrix, codes=low).dequantise(dtype)
                linears.append(MaskedLinear(bundle, p, weight, device, dtype, expert))
            return linears

        return read

    def bytes_read(self) -> tuple[int, int]:
        parts = ((one, part) for one in self._projections for part in (one.weight, one.low) if part is not None)
        return round(sum(one.share * part.nbytes for one, part in parts)), self._head.nbytes

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        lengths, tokens, rows = self._cache.lengths, token_ids.tolist(), []
        self._grow_one(tokens)
        for slot, token in enumerate(tokens):
            if token < 0:
                rows.append(torch.zeros(1, self.config.vocab_size, device=self.device))
                continue
            ids = torch.tensor([token], device=self.device)
            hidden = self._forward(self._cache, slot, ids, start=lengths[slot], total=lengths[slot] + 1, first_sparse=0)
            lengths[slot] += 1
            rows.append(self._logits(hidden))
        return torch.cat(rows)

    def project(self, block: Block[list[MaskedLinear]], role: str, x: Tensor, first_sparse: int) -> list[Tensor]:
        return [projection(x, first_sparse) for projection in getattr(block, role)]

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._output(self._norm(hidden))

    def _output(self, x: Tensor) -> Tensor:
        return finish_logits(self.config, functional.linear(x, self._head).float())

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        for projection in self._projections:
            projection.set_mask(masks[projection.name])

    def _with_masks(self, masks: Mapping[str, ProjectionMask]) -> Self:
        other = copy(self)
        other._blocks, other._projections = [], []
        for block in self._blocks:
            linears: dict[str, Any] = {
                role: [copy(one) for one in linear] for role, linear in zip(block.roles, block.linears, strict=True)
            }
            other._blocks.append(replace(block, **linears))
            other._projections += [one for linear in linears.values() for one in linear]
        for projection in other._projections:
            projection.kept = None
            projection.set_mask(masks[projection.name])
        return other

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        self._sparse_positions = 0
        for projection in self._projections:
            projection.kept = torch.zeros((), dtype=torch.int64, device=self.device) if enabled else None

    def realised_sparsity(self) -> float | None:
        positions = self._sparse_positions
        dropped = total = 0.0
        for projection, kept in zip(self._projections, self._kept_channels(), strict=True):
            if projection.kept is None or not positions:
                return None
            channels, outputs = projection.in_features * projection.planes * positions, projection.out_features
            channels *= projection.share
            total += outputs * channels
            dropped += outputs * (channels - kept)
        return dropped / total

    def _kept_channels(self) -> list[int]:
        """Kept channels of each projection, summed over the masked positions, and over planes if graded."""
        return [0 if projection.kept is None else int(projection.kept) for projection in self._projections]
