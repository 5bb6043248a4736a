"""The decoder for CPUs: a decode step is one call of a compiled region (``kernels.cpu``), which reads only kept
channels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.machine import available_bytes
from wisparse.formats.model_config import ModelConfig, Projection
from wisparse.formats.weight_types import WEIGHT_TYPES
from wisparse.kernels.cpu.launch import has_tiles, prepare, product_dtype, regions_of

from ..decoding.cache import KVCache
from ..decoding.decoder import OnLogits, verified_settings
from ..decoding.heads import HeadFiles, MtpFiles
from ..decoding.rotary import switch_length
from ..decoding.sampling import SamplingParams, sample
from ..memory import weight_bytes
from ..torch.block import MaskedLinear, attention, finish_logits, norm_embedding
from ..torch.decoder import TorchDecoder
from .step import MOST_ROWS, Step
from .weights import CpuProjection, MappedMemory, Matrix, read_matrix

_PREFIX_BLOCK = TorchDecoder.prefix_block_size


class CpuDecoder(TorchDecoder):
    name: ClassVar[str] = "numba"
    weight_types: ClassVar[tuple[str, ...]] = ("native", "int8", "int4")
    # Tokens are delivered at a display's rate: a delivery uses two cores and evicts the step's data from the caches,
    # which for every token would take a third of a small model's step.
    delivery_interval: ClassVar[float] = 1 / 60
    # A chunk converts the weights once. Its products are bitwise equal to those of a prefix block.
    prefill_chunk, chunks_split_under_load = 4 * _PREFIX_BLOCK, 4

    def _load(self, bundle: Bundle, weights: str, cache: KVCache | None) -> None:
        super()._load(bundle, weights, cache)
        # Rows of experts' products depend on the tokens' choices, those of latents on the number of rows.
        if self.config.has_experts or self.config.latent is not None:
            self.prefill_chunk, self.chunks_split_under_load = _PREFIX_BLOCK, 1
        # The most tokens of a prompt that a step reads faster than torch, which converts the weights. Measured.
        codes = any(projection.weight.scale is not None for projection in self._projections)
        converted = self.dtype != torch.float32 or codes
        fast = product_dtype(self.dtype) == torch.bfloat16
        if not codes:  # with codes every row costs as much as the first
            self.verify_costs = 0.3, 0.5
        tiled = self.dtype == torch.bfloat16 and has_tiles()
        few = 4 if codes else 2
        self._step_rows = few if tiled else 8 if fast else MOST_ROWS if converted else MOST_ROWS // 2
        self._step = Step(self)

    def _read_matrices(self, bundle: Bundle, weights: str) -> Callable[[Projection], list[MaskedLinear]]:
        config, dtype = self.config, self.dtype
        stored = {stored.packing.kind for stored in bundle.checkpoint.quantised.values()}
        int4 = weights == "int4" or (weights == "native" and ("int4" in stored or planes_of(bundle.masks) > 1))
        prepare(*regions_of(dtype, mixers=config.has_mixers, experts=config.has_experts, int4=int4))
        names = [f"{part}.weight" for projection in config.projections() for part in projection.parts]
        of_experts = [projection for projection in config.projections() if projection.experts]
        routed = {f"{part}.weight" for projection in of_experts for part in projection.parts}
        mapped = self._mapped = None if self._lack is None else MappedMemory()
        # Reading, checksums and transposition release the GIL.
        with ThreadPoolExecutor(max_workers=max(1, min(torch.get_num_threads(), 8, os.cpu_count() or 1))) as pool:

            def read(name: str) -> Matrix:
                empty = mapped.empty if mapped is not None and name in routed else torch.empty
                return read_matrix(bundle, name, dtype, weights, transposed=True, empty=empty)

            matrices = dict(zip(names, pool.map(read, names), strict=True))
        if mapped is not None:
            assert self._lack is not None
            mapped.close_files(*self._lack, of_experts[0].chosen / of_experts[0].experts)
        self._head = embedding = read_matrix(bundle, config.embedding, dtype, "native", transposed=False)
        graded = planes_of(bundle.masks) > 1
        self._embedding = norm_embedding(config, embedding.data)
        head_type = "int8" if graded else WEIGHT_TYPES[weights].head
        if not config.tie_word_embeddings or head_type != "native":
            head = config.embedding if config.tie_word_embeddings else "lm_head.weight"
            self._head = read_matrix(bundle, head, dtype, head_type, transposed=False)

        def read_all(p: Projection) -> list[MaskedLinear]:
            parts = enumerate(p.parts)
            return [CpuProjection(bundle, p, matrices[f"{part}.weight"], self.device, dtype, at) for at, part in parts]

        return read_all

    @classmethod
    def memory_shortfall(
        cls, bundle: Bundle, device: torch.device, dtype: torch.dtype, weights: str
    ) -> tuple[int, int] | None:
        if not bundle.config.has_experts or not hasattr(os, "posix_fallocate"):
            return None
        needed, free = weight_bytes(bundle, dtype, weights, cls.keeps), available_bytes(device)
        return (needed, free) if needed > free else None

    @classmethod
    def refusal(cls, config: ModelConfig, weights: str) -> str | None:
        refused = super().refusal(config, weights)
        return refused and refused + "; int8 ones are as small" * (weights not in cls.weight_types)

    @classmethod
    def keeps(cls, stored: StoredWeight, graded: bool = False) -> bool:
        packing = stored.packing
        return (
            graded
            or packing.kind == "int4"
            or (packing.kind == "int8" and packing.group is None and not packing.zero_points)
        )

    def decode(self, token_ids: Tensor) -> Tensor:
        lengths, tokens = self._cache.lengths, token_ids.tolist()
        self._grow_one(tokens)
        rows = [(slot, token, lengths[slot]) for slot, token in enumerate(tokens) if token >= 0]
        if rows:
            self._step.run(rows, [slot for slot, _, _ in rows])
            for slot, _, length in rows:
                lengths[slot] = length + 1
            self._sparse_positions += len(rows)
            self._feed_head(rows)
        return self._step.first_logits[len(tokens)]

    def step(
        self, token_ids: Tensor, settings: Sequence[SamplingParams], adjust: OnLogits = None, last: bool = False
    ) -> Tensor:
        """The tokens are valid until the next call. They are chosen without torch, whose operations take 10 to 30 us
        each after a step has filled the caches with weights."""
        if adjust is not None:
            return super().step(token_ids, settings, adjust, last)
        self.decode(token_ids)
        return self._step.choose(settings, self._cache.lengths)

    def attach(self, files: HeadFiles | MtpFiles) -> None:
        self._step.tap(files.taps)
        super().attach(files)

    def _head_dtype(self) -> torch.dtype:
        return product_dtype(self.dtype)

    def _feed_head(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Pass the hidden states of the last step's rows (slot, token, position) to the draft head."""
        if self.head is not None:
            slots, tokens, positions = zip(*rows, strict=True)
            self.head.take(slots, positions, tokens, self._step.taps(len(rows)))

    def verify(self, token_ids: Sequence[Sequence[int]], settings: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
        self._grow_verified(token_ids)
        lengths = self._cache.lengths
        rows = [(slot, token, lengths[slot] + i) for slot, one in enumerate(token_ids) for i, token in enumerate(one)]
        self._step.run(rows, range(len(rows)))
        for slot, tokens in enumerate(token_ids):
            lengths[slot] += len(tokens)
        self._sparse_positions += len(rows)
        self._feed_head(rows)
        logits = self._step.logits[: len(rows)]
        return sample(logits, verified_settings(token_ids, settings), self._verified_positions(token_ids)), logits

    def _forward(self, cache: KVCache, slot: int, ids: Tensor, *, start: int, total: int, first_sparse: int) -> Tensor:
        """A few tokens, also those after the last whole prefix block, are read as rows of a decode step, which converts
        no weights."""
        switch = switch_length(self.config)  # a step has a single table of rotary factors
        one_table = switch is None or total <= switch
        rest = (start + len(ids)) % self.prefix_block_size
        if one_table and cache is self._cache and 0 < rest <= self._step_rows and rest < len(ids):
            head, first = len(ids) - rest, min(first_sparse, len(ids) - rest)
            before = self._forward(cache, slot, ids[:head], start=start, total=total, first_sparse=first)
            after = self._forward(
                cache, slot, ids[head:], start=start + head, total=total, first_sparse=first_sparse - first
            )
            return torch.cat((before, after))
        if cache is not self._cache or len(ids) > self._step_rows or not one_table:
            return super()._forward(cache, slot, ids, start=start, total=total, first_sparse=first_sparse)
        tokens = ids.tolist()
        self._sparse_positions += len(tokens) - first_sparse
        parts = ((tokens[:first_sparse], start, False), (tokens[first_sparse:], start + first_sparse, True))
        read = []
        for part, at, masked in parts:
            if part:
                read.append(self._step.read(slot, part, at, masked=masked).to(self.dtype))
                self._feed_head([(slot, token, at + i) for i, token in enumerate(part)])
        return torch.cat(read)

    @staticmethod
    def attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, *rest: Any) -> Tensor:
        """One prefix block of queries at a time, which bounds the scores' memory and makes results independent of
        chunks."""
        parts = []
        for first in range(0, q.shape[1], _PREFIX_BLOCK):
            some, at = q[:, first : first + _PREFIX_BLOCK], start + first
            stop = at + some.shape[1]
            parts.append(attention(config, some, keys[:, :stop], values[:, :stop], at, *rest))
        return torch.cat(parts, 1)

    def _with_masks(self, masks: Mapping[str, ProjectionMask]) -> Self:
        other = super()._with_masks(masks)
        other._step = Step(other)
        return other

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        super().set_masks(masks)
        self._step.take_masks()

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        super().measure_sparsity(enabled)
        self._step.counts[:] = 0

    def _kept_channels(self) -> list[int]:
        """Of prompts, if measured, and of decode steps, which always count."""
        return [prompt + decoded for prompt, decoded in zip(super()._kept_channels(), self._step.kept(), strict=True)]

    def _logits(self, hidden: Tensor) -> Tensor:
        if len(hidden) == 1 and self._head.scale is not None:  # without converting the codes
            return self._step.finish(hidden)
        return finish_logits(self.config, self._head.linear(self._norm(hidden), None).float())

    def _output(self, x: Tensor) -> Tensor:
        if self._head.scale is not None:
            return self._step.finish(x.to(self.dtype), normed=True)
        return finish_logits(self.config, self._head.linear(x.to(self.dtype), None).float())
