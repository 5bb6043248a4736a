"""The decoder for CPUs: a decode step is one compiled call that reads only the kept channels (``kernels.cpu``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import WEIGHT_TYPES
from wisparse.kernels.cpu.launch import prepare
from wisparse.kernels.cpu.layout import StoredAs, type_name

from ..decoding.cache import KVCache
from ..decoding.decoder import check_capacity
from ..decoding.rotary import switch_length
from ..torch.block import finish_logits, read_block
from ..torch.decoder import TorchDecoder
from .step import MOST_ROWS, Step
from .weights import CpuProjection, Matrix, product_dtype, read_matrices

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EMBEDDING = "model.embed_tokens.weight"


class CpuDecoder(TorchDecoder):
    name: ClassVar[str] = "numba"
    weight_types: ClassVar[tuple[str, ...]] = ("native", "int8", "int4")

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
        region = f"step_{type_name(dtype)}"
        stored = {stored.packing.kind for stored in bundle.checkpoint.quantised.values()}
        if weights == "int4" or (weights == "native" and "int4" in stored):
            prepare(region, f"dequantize_{type_name(product_dtype(dtype))}")
        else:
            prepare(region)

        names = [f"{projection.name}.weight" for projection in config.projections()]
        matrices = read_matrices(bundle, names, dtype, weights, transposed=True)
        self._embedding = read_matrices(bundle, [_EMBEDDING], dtype, "native", transposed=False)[_EMBEDDING].data
        tied, head_type = config.tie_word_embeddings, WEIGHT_TYPES[weights].head
        if tied and head_type == "native":
            shape = config.vocab_size, config.hidden_size
            self._output = Matrix(StoredAs.BASE, self._embedding, shape, transposed=False)
        else:
            head = _EMBEDDING if tied else "lm_head.weight"
            self._output = read_matrices(bundle, [head], dtype, head_type, transposed=False)[head]
        self._blocks = [
            read_block(
                bundle, index, device, dtype, lambda p: CpuProjection(bundle, p, matrices[f"{p.name}.weight"], dtype)
            )
            for index in range(config.num_blocks)
        ]
        self._prepare(bundle)
        # Tokens of a prompt that the step reads faster than torch, which has to convert weights. Measured.
        converted = dtype != torch.float32 or any(matrix.stored_as != StoredAs.BASE for matrix in matrices.values())
        self._step_rows = 8 if product_dtype(dtype) == torch.bfloat16 else MOST_ROWS if converted else MOST_ROWS // 2
        self._step = Step(
            region, config, self._blocks, self._embedding, self._norm, self._output, self._rotaries, self._cache
        )

    @classmethod
    def refusal(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, weights: str) -> str | None:
        if device.type != "cpu":
            return f"it runs on the CPU, the device is {device.type}"
        if weights not in cls.weight_types:
            return f"it has no {weights} weights; int8 ones are as small"
        return None if dtype in _DTYPES else f"it knows float32, bfloat16 and float16, not {dtype}"

    @classmethod
    def keeps(cls, stored: StoredWeight) -> bool:
        packing = stored.packing
        return packing.kind == "int4" or (packing.kind == "int8" and packing.group is None and not packing.zero_points)

    def bytes_read(self) -> tuple[int, int]:
        return sum(projection.nbytes for projection in self._projections), self._output.nbytes

    def decode(self, token_ids: Tensor) -> Tensor:
        lengths = self._cache.lengths
        tokens = token_ids.tolist()
        check_capacity(tokens, lengths, self.max_seq_len)
        rows = [(slot, token, lengths[slot]) for slot, token in enumerate(tokens) if token >= 0]
        if rows:
            self._step.run(rows)
            for slot, _, length in rows:
                lengths[slot] = length + 1
            self._sparse_positions += len(rows)
        return self._step.logits[: len(tokens)]

    def _forward(
        self, cache: KVCache, slot: int, token_ids: Tensor, *, start: int, total: int, first_sparse: int
    ) -> Tensor:
        switch = switch_length(self.config)  # the step has one table of rotary factors
        if cache is not self._cache or len(token_ids) > self._step_rows or (switch is not None and total > switch):
            return super()._forward(cache, slot, token_ids, start=start, total=total, first_sparse=first_sparse)
        tokens = token_ids.tolist()
        self._sparse_positions += len(tokens) - first_sparse
        parts = ((tokens[:first_sparse], start, False), (tokens[first_sparse:], start + first_sparse, True))
        return torch.cat(
            [self._step.read(slot, part, at, masked=masked).to(self.dtype) for part, at, masked in parts if part]
        )

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        super().set_masks(masks)
        self._step.take_masks()

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        super().measure_sparsity(enabled)
        self._step.forget()

    def _kept_channels(self) -> list[int]:
        """Decode steps always count, prompts where asked to."""
        return [prompt + decoded for prompt, decoded in zip(super()._kept_channels(), self._step.kept(), strict=True)]

    def _logits(self, hidden: Tensor) -> Tensor:
        return finish_logits(self.config, self._output.linear(self._norm(hidden), None).float())
