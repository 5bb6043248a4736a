"""Models to measure on: published shapes with random weights, made on the device, thresholds calibrated to a target.

Speed depends on shapes and on how many channels are kept, not on what the weights are.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import click
import torch
from shapes import LLAMA_8B

from wisparse.formats.bundle import ProjectionMask, scale_shapes
from wisparse.formats.checkpoint import TensorInfo
from wisparse.formats.errors import BundleError
from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel, unread
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors
from wisparse.formats.weight_types import interleaved, quantise
from wisparse.formats.write import write_bundle
from wisparse.kernels.gpu.expert_gemm import expert_gemm
from wisparse.kernels.reference import scores
from wisparse.runtime.cuda import eager
from wisparse.runtime.cuda import weights as cuda_weights
from wisparse.runtime.cuda.decoder import CudaDecoder

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "pycode-llama-6m"

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


# Bits of graded weights -> shares of channels whose high and whose low plane is read, as in the two example models.
KEPT = {4.25: (0.84, 0.2225), 3.5: (0.72, 0.155), 3.0: (0.63, 0.12)}
SPARSITIES = (0.0, 0.3, 0.4, 0.5)
LEVELS = {
    **dict.fromkeys(("native", "int8", "fp8", "int4"), SPARSITIES),
    "graded": tuple(unread(bits) for bits in (8.0, *KEPT)),
}
Masks = dict[str, ProjectionMask]


class Several(click.ParamType):
    """Values of one type, separated by commas."""

    name = "a,b,…"

    def __init__(self, of: Callable[[str], Any] | Sequence[str]) -> None:
        self.of = of

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = [self.of(one) if callable(self.of) else one for one in value.split(",")]
        except ValueError:
            self.fail(f"expected numbers separated by commas, found {value!r}", parameter, context)
        if not callable(self.of) and (unknown := set(found) - set(self.of)):
            self.fail(f"expected some of {', '.join(self.of)}, found {', '.join(sorted(unknown))}", parameter, context)
        return found


shape_option = click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-3.1-8b")
blocks_option = click.option("--blocks", type=int, help="Fewer blocks than the shape has.")
out_option = click.option("--out", type=Path, envvar="OUT", help="Write results into this folder.")


def save(out: Path | None, name: str, text: str) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, "utf-8")


def need_gpu(device: str = "cuda") -> None:
    """Exit with status 2 where there is no GPU, before anything is made."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.UsageError(f"expected an NVIDIA GPU, found none that torch {torch.__version__} can use")


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


def calibrate(
    decoder: CudaDecoder, sparsities: list[float], tokens: int = 256, *, alpha: float = 0.5, dense: bool = False
) -> dict[float, list]:
    """Thresholds of every group for each sparsity, from one pass over random tokens at each.

    Each projection's threshold is set as the pass reaches it, so that later ones see what earlier masks leave, unless the
    pass is ``dense``. Scales are the weights' column norms to the power ``alpha``; 0 leaves them at 1.

    Returns:
        {sparsity: [(group, thresholds)]}; with experts a group for each.
    """
    found = {}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(decoder.config.vocab_size, (tokens,), generator=generator).to(decoder.device)
    for group in (group for block in decoder.weights.blocks for group in block.linears if alpha):
        first = 0
        for i, width in enumerate(group.widths):
            g = group.weight.data[:, first : first + width].float().norm(dim=1)
            group.scales[i] = (g / g.log().mean().exp()) ** alpha
            first += width
    for sparsity in sparsities:
        settings = []

        def observe(group, x, sparsity=sparsity, settings=settings):
            for i in range(len(group.widths) if len(x) else 0):
                score = scores(x, group.scales[i]).flatten()
                rank = max(1, round(sparsity * score.numel()))
                group.thresholds[i] = score.kthvalue(rank).values if sparsity > 0 else 0.0
            settings.append((group, group.thresholds.clone()))

        if not dense:
            _switch_dense(decoder, False)
        decoder.cache.grow(0, tokens)
        decoder.cache.begin(0, 0)

        def project(block, role, x, first_sparse, observe=observe):
            observe(getattr(block, role), x)
            return CudaDecoder.project(decoder, block, role, x, first_sparse)

        def of_experts(x, linear, groups, *others, observe=observe, **options):
            for index, (first, end) in enumerate(pairwise(groups.offset.tolist())):
                rows = groups.order[first:end] // linear.chosen
                observe(linear.one(index), x[rows] if "activation" in options else x[first:end])
            expert_gemm(x, linear, groups, *others, **options)

        with patch.object(decoder, "project", project), patch.object(eager, "expert_gemm", of_experts):
            for _ in decoder._read(decoder._cache, 0, ids, tokens if dense else 0, 0, tokens):
                pass
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


# --- graded weights, and masks by level


class GradedSource(cuda_weights._Source):
    """Reads plain weights as a graded bundle's."""

    def weight(self, name: str, weights: str) -> Any:
        if "layers" not in name:
            return super().weight(name, weights)
        group = next(size for size in (128, 64, 8) if self.checkpoint.shapes[name][1] % size == 0)
        return interleaved(quantise("int8", self.tensor(name), group=group, graded=True))


def masks_by_sparsity(bundle: SimpleNamespace, device: torch.device, dtype: torch.dtype) -> dict[float, Masks]:
    """The masks of every sparsity in ``LEVELS`` and ``KEPT``, calibrated on the plain weights; those of 0 drop nothing."""
    wanted = sorted({*SPARSITIES[1:], *(round(1 - share, 6) for kept in KEPT.values() for share in kept)})
    decoder = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
    settings = calibrate(decoder, wanted, tokens=128)
    found: dict[float, Masks] = {}
    for sparsity in wanted:
        mask_bundle(bundle, decoder, settings, sparsity)
        found[sparsity] = dict(bundle.masks)
    decoder.close()
    found[0.0] = {name: ProjectionMask(mask.channel_scale, 0.0, 0.0) for name, mask in found[wanted[0]].items()}
    return found


def masks_of(weights: str, level: float, masks: Mapping[float, Masks]) -> Masks:
    """The masks of a level of ``LEVELS``; graded weights have a threshold for each plane."""
    if weights != "graded":
        return masks[level]
    if level == 0:
        return {name: replace(mask, plane_thresholds=(0.0, 0.0)) for name, mask in masks[0.0].items()}
    kept = next(kept for bits, kept in KEPT.items() if unread(bits) == level)
    high, low = (masks[round(1 - share, 6)] for share in kept)
    return {
        name: replace(mask, sparsity=level, plane_thresholds=(mask.threshold, low[name].threshold))
        for name, mask in high.items()
    }


# --- bundles in files


def endless_source(folder: Path, vocab_size: int | None = None) -> Path:
    """The example's files without an end-of-text token, so that every answer has the same length; with ``vocab_size`` only
    its tokenizer, made that large by words of its own."""
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        document = json.loads((EXAMPLE / name).read_text("utf-8"))
        kept = {key: value for key, value in document.items() if not key.startswith("eos_token")}
        if vocab_size is None or name == "tokenizer_config.json":
            (folder / name).write_text(json.dumps(kept), "utf-8")
    shutil.copy(EXAMPLE / "chat_template.jinja", folder)
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text("utf-8"))
    if vocab_size is None:
        shutil.copy(EXAMPLE / "model.safetensors", folder)
    else:
        words = tokenizer["model"]["vocab"]
        words.update({f"Ġword{index}": index for index in range(len(words), vocab_size)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return folder


def write_random_bundle(shape: str, num_blocks: int | None, out: Path, device: str, sparsity: float) -> None:
    """A bundle of a published shape: random weights, masks calibrated on the device."""
    random = random_bundle(shape, num_blocks=num_blocks)
    config = random.config
    config_dict = {**SHAPES[shape], "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"}
    config_dict["num_hidden_layers"] = config.num_blocks
    decoder = CudaDecoder(random, device=torch.device(device), dtype=torch.bfloat16, max_seq_len=512)
    mask_bundle(random, decoder, calibrate(decoder, [sparsity]), sparsity)
    decoder.close()
    masks = {name: ProjectionMask(m.channel_scale.cpu(), m.threshold, sparsity) for name, m in random.masks.items()}

    class Source:
        """What ``write_bundle`` asks of a checkpoint; each tensor is made when it is written."""

        def __init__(self, folder: Path) -> None:
            self.config, self.config_dict, self.folder = config, config_dict, folder
            self.error, self.quantised, self.rotation, self.is_dequantised = BundleError, {}, None, False
            self.tensors = {
                name: TensorInfo(name, "none", name, size, "BF16") for name, size in expected_tensors(config).items()
            }

        def chunks(self, name: str, chunk_bytes: int):
            yield from random.checkpoint.tensor(name, device).flatten().cpu().split(chunk_bytes // 2)

    entries = tuple(ProjectionRecipe(name, sparsity, 0.5, mask.threshold, sparsity) for name, mask in masks.items())
    recipe = Recipe(
        base_model=f"random/{shape}", base_revision=None, method="wisparse", default=sparsity,
        levels=(SparsityLevel(sparsity, entries, (sparsity,) * config.num_blocks),),
        calibration=CalibrationRecord("self", 1, 256, 256, 0, "ab" * 32),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source = Source(endless_source(Path(folder, "source"), config.vocab_size))
        write_bundle(source, recipe, {sparsity: masks}, out)  # type: ignore[arg-type]
