"""The decoder for CPUs: a whole decode step is one compiled call that reads the kept channels only (``kernels.cpu``).

Prompts are read as dense matrix products, by the reference's own code over the same weights. Decoding keeps
activations in float32 whatever the weights' type, so it rounds less than the reference does in bfloat16; in float32 the
two agree up to the order of sums. A sequence gives the same bits alone and in a batch, on one thread and on many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import WEIGHT_TYPES
from wisparse.kernels.cpu.layout import StoredAs, type_name
from wisparse.kernels.cpu.matrix import Matrix
from wisparse.kernels.cpu.threads import prepare_all

from ..decoding.cache import KVCache, prefix_block_size
from ..decoding.decoder import check_capacity
from ..decoding.rotary import Rotary
from ..torch.block import finish_logits, read_block, read_norm
from ..torch.decoder import PREFILL_CHUNK, TorchDecoder
from .step import Step
from .weights import CpuProjection, read_matrices

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The regions that weights go through at load and at a prompt, by what they are held as.
_ON_THE_WAY = {
    "native": ("transpose_{}",),
    "int8": ("quantize_{}",),
    "int4": ("quantize_{}", "pack_int4", "dequantize_{}"),
}


class CpuDecoder(TorchDecoder):
    """See :class:`runtime.decoding.decoder.Decoder`; CPU only."""

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
        base = type_name(dtype)
        region = f"step_{base}"
        kinds = (weights, "int4") if bundle.checkpoint.quantised else (weights,)
        prepare_all([region, *dict.fromkeys(name.format(base) for kind in kinds for name in _ON_THE_WAY[kind])])
        names = [f"{projection.name}.weight" for projection in config.projections()]
        matrices = read_matrices(bundle, names, dtype, weights, transposed=True)
        self._embedding = read_matrices(bundle, ["model.embed_tokens.weight"], dtype, "native", transposed=False)[
            "model.embed_tokens.weight"
        ].data
        tied = config.tie_word_embeddings
        head_type = WEIGHT_TYPES[weights].head
        if tied and head_type == "native":
            self._output = Matrix(
                StoredAs.BASE, self._embedding, (config.vocab_size, config.hidden_size), transposed=False
            )
        else:
            head = "model.embed_tokens.weight" if tied else "lm_head.weight"
            self._output = read_matrices(bundle, [head], dtype, head_type, transposed=False)[head]
        self._blocks = [
            read_block(
                bundle, index, device, dtype, lambda p: CpuProjection(bundle, p, matrices[f"{p.name}.weight"], dtype)
            )
            for index in range(config.num_blocks)
        ]
        self._norm = read_norm(bundle, "model.norm", device, dtype)
        self._rotaries = [Rotary(rope, device, dtype) for rope in config.rotaries]
        self._cache = KVCache(config, max_batch, max_seq_len, device, dtype)
        self.prefix_block_size = prefix_block_size(config, PREFILL_CHUNK, max_seq_len)
        self._sparse_positions = 0
        self._decoded_positions = 0
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
        inside = sum(projection.nbytes for block in self._blocks for projection in block.projections)
        return inside, self._output.nbytes

    def decode(self, token_ids: Tensor) -> Tensor:
        lengths = self._cache.lengths
        tokens = token_ids.tolist()
        check_capacity(tokens, lengths, self.max_seq_len)
        rows = [(slot, token, lengths[slot]) for slot, token in enumerate(tokens) if token >= 0]
        if rows:
            self._step.run(rows)
            for slot, _, length in rows:
                lengths[slot] = length + 1
            self._decoded_positions += len(rows)
        return self._step.logits[: len(tokens)]

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        super().set_masks(masks)
        self._step.take_masks()

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        super().measure_sparsity(enabled)
        self._decoded_positions = 0
        self._step.forget()

    def realised_sparsity(self) -> float | None:
        # Decoding counts always; the prefill when asked to.
        projections = [projection for block in self._blocks for projection in block.projections]
        positions = self._sparse_positions + self._decoded_positions
        dropped = total = 0
        for projection, decoded in zip(projections, self._step.kept(), strict=True):
            if projection.kept is None or not positions:
                return None
            total += projection.out_features * projection.in_features * positions
            if projection.channel_scale is not None:
                kept = int(projection.kept) + decoded
                dropped += projection.out_features * (projection.in_features * positions - kept)
        return dropped / total

    def close(self) -> None:
        super().close()
        for name in ("_output", "_step"):
            self.__dict__.pop(name, None)

    def _logits(self, hidden: Tensor) -> Tensor:
        return finish_logits(self.config, self._output.linear(self._norm(hidden), None).float())
