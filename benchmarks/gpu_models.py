"""Models to measure on: published shapes with random weights, made on the device, thresholds calibrated to a target.

Speed depends on shapes and on how many channels are kept, not on what the weights say.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import argparse
import math
import zlib
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from shapes import LLAMA_8B

from wisparse.formats.bundle import ProjectionMask, scale_shapes
from wisparse.formats.model_config import ModelConfig, expected_tensors
from wisparse.kernels.reference import scores
from wisparse.runtime.cuda.decoder import CudaDecoder

_LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3",
    rope_theta=500000.0,
)  # fmt: skip
_PLAIN = {"rope_type": "default", "rope_theta": 1e6}
SHAPES = {
    "llama-3.1-8b": LLAMA_8B | dict(rope_parameters=_LLAMA3),
    "mistral-7b": dict(
        model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32768, max_position_embeddings=32768, rope_parameters=_PLAIN,
        rms_norm_eps=1e-5, hidden_act="silu",
    ),
    "qwen2.5-7b": dict(
        model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768, rope_parameters=_PLAIN,
        rms_norm_eps=1e-6, hidden_act="silu", layer_types=["full_attention"] * 28,
    ),
    "llama-3.1-70b": LLAMA_8B
    | dict(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, rope_parameters=_LLAMA3
    ),
    "qwen3-32b": dict(
        model_type="qwen3", hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=32768, rope_parameters=_PLAIN,
        rms_norm_eps=1e-6, hidden_act="silu", layer_types=["full_attention"] * 64,
    ),
}  # fmt: skip


def need_gpu(parser: argparse.ArgumentParser, device: str = "cuda") -> None:
    """End a script that measures a GPU in one sentence where there is none, before it has made anything (exit 2)."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"expected an NVIDIA GPU, found none that torch {torch.__version__} can use")


class _RandomCheckpoint:
    """Tensors made on demand, the same for the same name and seed."""

    quantised: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype) -> None:
        self.shapes = expected_tensors(config)
        self._seed, self._dtype = seed, dtype
        self._middle = 0 if config.architecture.norm_offset else 1  # of the norms' weights

    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        shape = self.shapes[name]
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        if len(shape) == 1:
            spread = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            middle = 0 if name.endswith(("bias", "A_log")) else 1 if "linear_attn" in name else self._middle
            return (middle + 0.1 * spread).to(self._dtype)
        values = torch.randn(shape, generator=generator, device=device, dtype=self._dtype)
        return values if "embed" in name else values / math.sqrt(shape[-1])


def random_bundle(
    shape: str | dict, *, num_blocks: int | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0
):
    """What a decoder needs of a bundle: config (a name in ``SHAPES``, or what ``config.json`` holds), tensors, masks
    (none yet: see :func:`set_sparsity`)."""
    config_dict = dict(SHAPES[shape] if isinstance(shape, str) else shape)
    if num_blocks is not None:
        config_dict["num_hidden_layers"] = num_blocks
        if "layer_types" in config_dict:
            config_dict["layer_types"] = config_dict["layer_types"][:num_blocks]
    config = ModelConfig.from_dict(config_dict)
    masks = {name: ProjectionMask(torch.ones(shape), 0.0, 0.0) for name, shape in scale_shapes(config).items()}
    return SimpleNamespace(config=config, checkpoint=_RandomCheckpoint(config, seed, dtype), masks=masks)


def calibrate(decoder: CudaDecoder, sparsities: list[float], tokens: int = 256, alpha: float = 0.5) -> dict:
    """Thresholds of every group for each sparsity, from one pass over random tokens at each.

    Each projection's threshold is set as the pass reaches it, so that later ones see what earlier masks leave. Scales
    are the weights' column norms to the power alpha.

    Returns:
        {sparsity: [(group, scales, thresholds)]}
    """
    found = {}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(decoder.config.vocab_size, (tokens,), generator=generator).to(decoder.device)
    for block in decoder.weights.blocks:
        for group in block.linears:
            first = 0
            for i, width in enumerate(group.widths):
                g = group.weight.data[:, first : first + width].float().norm(dim=1)
                group.scales[i] = (g / g.log().mean().exp()) ** alpha
                first += width
    for sparsity in sparsities:
        settings = []

        def observe(group, x, first_sparse, sparsity=sparsity, settings=settings):
            for i in range(len(group.widths)):
                score = scores(x, group.scales[i]).flatten()
                rank = max(1, round(sparsity * score.numel()))
                group.thresholds[i] = score.kthvalue(rank).values if sparsity > 0 else 0.0
            settings.append((group, group.thresholds.clone()))

        _switch_dense(decoder, False)
        decoder.cache.grow(0, tokens)
        decoder.cache.begin(0, 0)
        decoder._observe = observe
        for _ in decoder._read(decoder._cache, 0, ids, 0, 0, tokens):
            pass
        decoder._observe = None
        found[sparsity] = settings
    return found


def set_sparsity(decoder: CudaDecoder, calibrated: dict, sparsity: float) -> None:
    """Put a calibrated sparsity's thresholds in force; graphs are captured anew, as sparsity 0 has its own kernels."""
    for group, thresholds in calibrated[sparsity] if sparsity > 0 else []:
        group.thresholds.copy_(thresholds)
    if sparsity == 0:
        for block in decoder.weights.blocks:
            for group in block.linears:
                group.thresholds.zero_()
    _switch_dense(decoder, sparsity == 0)
    decoder._steps.clear()


def mask_bundle(bundle: SimpleNamespace, decoder: CudaDecoder, calibrated: dict, sparsity: float) -> None:
    """Put a calibrated sparsity's masks into a bundle, for decoders made of it from then on."""
    settings = iter(calibrated[sparsity])
    for index, block in enumerate(decoder.weights.blocks):
        projections = list(bundle.config.projections(index))
        for group in block.linears:
            _, thresholds = next(settings)
            own = [projections.pop(0)]
            while sum(projection.out_features for projection in own) < group.out_features:
                own.append(projections.pop(0))
            copies = len(group.widths) // len(own)  # a fused one's parts share a mask
            for i, projection in enumerate(own):
                bundle.masks[projection.name] = ProjectionMask(
                    group.scales[i * copies].clone(), float(thresholds[i * copies]), sparsity
                )


def _switch_dense(decoder: CudaDecoder, dense: bool) -> None:
    for block in decoder.weights.blocks:
        for group in block.linears:
            object.__setattr__(group, "dense", dense)
            group.__dict__.pop("shape", None)  # worked out once


def tiny(given: dict) -> dict:
    """A model of the same family that an interpreter gets through."""
    given = {key: value for key, value in given.items() if key != "head_dim"}
    heads, kv_heads = 4, 4 if given["num_attention_heads"] == given["num_key_value_heads"] else 2
    if given["model_type"] == "qwen3_5_text":  # a block of either kind
        given |= dict(
            full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12,
            linear_value_head_dim=20,
        )  # fmt: skip
    if given["model_type"] == "gemma4_text":
        given |= dict(global_head_dim=24, num_global_key_value_heads=1, sliding_window=7)
    return given | dict(
        hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, vocab_size=70, max_position_embeddings=256,
    )  # fmt: skip
