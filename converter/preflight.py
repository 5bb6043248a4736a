"""The preflight: all checks that need no weights, in seconds, and estimates of the memory, disk and time of a conversion."""

from __future__ import annotations

import logging
import math
import os
import shutil
import timeit
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wisparse.formats.architectures import WRAPPERS
from wisparse.formats.bundle import scale_shapes
from wisparse.formats.checkpoint import read_config
from wisparse.formats.config_fields import GENERATION_CONFIG, sampling_defaults
from wisparse.formats.errors import AccessError, ResourceError, UnsupportedModelError, UsageError
from wisparse.formats.guard import find_gguf, parse_json
from wisparse.formats.hub import Source, check_read_access, check_write_access, download_bytes, is_public
from wisparse.formats.machine import available_bytes, choose_device, shown_bytes
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.quantization import read_quantisation
from wisparse.formats.tensors import PER_LAYER_EMBEDDING, expected_tensors
from wisparse.formats.write import check_output, copied_files, parse_size

from .calibration import CalibrationTokens, describe_spec, load_calibration
from .config import full_config
from .evaluation import REFERENCE_BYTES
from .gguf_source import dequantised_from, open_checkpoint, open_source
from .gptq import group_size
from .measurement import fresh_text
from .processes import SILENT, Progress
from .rotation import why_fixed
from .sensitivity import LARGEST_LOGITS
from .settings import ConvertSettings, auto_seq_len
from .source import choose_dtype, lacks_accelerate
from .state import check_folder, placed_bundle
from .tokenizer import load_tokenizer

# Memory of a Python process with torch and transformers, without a model.
BASE_BYTES = 600 << 20
# A search takes as long as this many forward passes over the calibration text at the speed of a matrix product. On a GPU
# refine: on the 8B shape on an H200 (132 s, benchmarks/results/scale-h200.json); fisher is not measured there. On a CPU on
# SmolLM2-135M (25 and 13) and on the 6.5M example (70 with refine at two sparsities). The other searches were not measured.
_PASSES = {"cuda": {"refine": 190, "fisher": 46}, "cpu": {"refine": 40, "fisher": 20}}
# The overhead of a block per decode step in transformers, which generates the calibration text.
_BLOCK_SECONDS = {"cuda": 0.0014, "cpu": 0.005}
_WRITTEN_BYTES_PER_S = 450e6  # to write and verify a bundle (benchmarks/results/scale-h200.json)
_LARGE = 1 << 28  # bytes of a matrix that no cache holds


def bundle_bytes(config: ModelConfig, num_parameters: int, dtype: str, num_levels: int = 3) -> int:
    """Estimated size of a bundle of ``num_parameters``, stored in ``dtype`` (``auto``: the source's)."""
    sidecar = sum(4 * num_levels * math.prod(shape) + 512 for shape in scale_shapes(config).values())
    return num_parameters * itemsize(config, dtype) + sidecar + (32 << 20)  # tokenizers have up to 20 MB


def itemsize(config: ModelConfig, dtype: str) -> int:
    return getattr(torch, config.dtype if dtype == "auto" else dtype, torch.float32).itemsize


def working_bytes(config: ModelConfig, dtype: torch.dtype, settings: ConvertSettings) -> int:
    """Memory that a conversion needs beside the weights: a bound from measurements (benchmarks/results/scale*.json)."""
    length, tokens = settings.length, settings.num_samples * settings.length
    # One block's inputs at all tokens, twice while they are concatenated; its input and output.
    chosen = max(1 if block.experts is None else block.experts.chosen for block in config.blocks)
    states = tokens * (4 * chosen * config.hidden_size + 2 * config.mlp_size) * dtype.itemsize
    states += tokens * config.num_blocks * config.per_layer_size * dtype.itemsize
    # A backward pass of one micro-batch: attention scores in float32, rows of logits.
    attention = 6 * 4 * config.num_heads * length * length
    logits = 6 * 4 * min(LARGEST_LOGITS, tokens * config.vocab_size)
    # The refinement's float64 sums of four micro-batches, and its state; experts have many channels.
    channels = 160 * sum(map(math.prod, scale_shapes(config).values()))
    # The KV cache while the model generates its calibration text.
    kv_bytes = tokens * config.kv_size * dtype.itemsize
    cache = min(2 * kv_bytes, 4 << 30) * 5 // 4 if settings.calibration == ("self",) else 0
    return max(states, attention + logits + channels, cache) + BASE_BYTES


def conversion_seconds(
    config: ModelConfig,
    settings: ConvertSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    given_text: bool = False,
) -> float | None:
    """An estimate, from two matrix products that are timed on ``device``; the true time is half to twice it. None: the search
    or the weight type (int4, graded) was not measured. ``given_text``: the calibration text is not generated."""
    passes = _PASSES[device.type].get(settings.chosen_search)
    if passes is None or settings.weights in ("int4", "graded"):
        return None
    length, samples = settings.length, settings.num_samples
    weight = torch.ones(config.intermediate_size, config.hidden_size, dtype=dtype, device=device)
    mac = _seconds(length, weight) / (length * weight.numel())
    large = torch.ones(_LARGE // dtype.itemsize // config.hidden_size, config.hidden_size, dtype=dtype, device=device)
    read = _seconds(1, large) / large.numel()
    in_blocks = sum(projection.num_parameters for projection in config.projections())
    search = passes * in_blocks * samples * length * mac
    step = in_blocks * (read + samples * mac) + _BLOCK_SECONDS[device.type] * config.num_blocks
    written = sum(map(math.prod, expected_tensors(config).values())) * itemsize(config, "auto")
    return search + (0 if given_text else length * step) + written / _WRITTEN_BYTES_PER_S


def _seconds(rows: int, weight: torch.Tensor) -> float:
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def multiply() -> None:
        torch.nn.functional.linear(x, weight)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)

    return min(timeit.repeat(multiply, number=1, repeat=4))


_log = logging.getLogger("wisparse")


@dataclass(frozen=True)
class Plan:
    """What a conversion does and what it needs."""

    settings: ConvertSettings  # with defaults filled in
    source: Source  # of a Hub model, only the small files are downloaded yet
    config: ModelConfig
    text_of: str | None  # the source's model_type if only its text model is converted
    dequantised_from: str  # the types of a GGUF file's matrices
    num_parameters: int
    num_in_memory: int  # without those that are read from their file row by row
    projection_parameters: int
    device: torch.device
    dtype: torch.dtype  # of the computation
    tokens: CalibrationTokens | None  # None if the model generates them
    calibration: str  # their source
    download_bytes: int
    bundle_bytes: int
    disk_free_bytes: int
    memory_bytes: int  # an estimate
    memory_free_bytes: int
    max_memory: dict[int | str, int] | None  # bytes by GPU and for "cpu", for a model larger than the device
    placed: bool  # an interrupted run has written its bundle to the output folder
    not_rotated: str | None  # why --rotation auto does not rotate
    extra_embedding_bytes: int  # extra bundle size if rotation unties the embeddings

    @property
    def weights_on(self) -> str:
        """The devices that hold the weights during the conversion, as text."""
        if self.max_memory is None:
            return str(self.device)
        remaining, used = self.num_in_memory * self.dtype.itemsize, []
        for device, num_bytes in self.max_memory.items():
            if remaining > 0 and num_bytes > 0:
                used.append(f"cuda:{device}" if isinstance(device, int) else "memory")
                remaining -= num_bytes
        return ", ".join([*used, *(["the model's files"] if remaining > 0 else [])])

    def to_dict(self) -> dict[str, Any]:
        settings, config = self.settings, self.config
        names = ("text_of", "dequantised_from", "num_parameters", "projection_parameters", "not_rotated", "calibration")
        sizes = (
            "download_bytes",
            "extra_embedding_bytes",
            "bundle_bytes",
            "disk_free_bytes",
            "memory_bytes",
            "memory_free_bytes",
        )
        return {
            "model": self.source.name,
            "commit": self.source.commit,
            **{name: getattr(config, name) for name in ("model_type", "num_blocks")},
            "output_dir": str(settings.output_dir),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            **settings.fingerprint(),
            "calibration_tokens": settings.num_samples * settings.length,
            **{name: getattr(self, name) for name in (*names, *sizes, "weights_on")},
            "work_dir": str(settings.state_dir) if settings.resume else None,
            "upload_repo": settings.upload_repo,
        }


def preflight(settings: ConvertSettings, progress: Progress = SILENT) -> Plan:
    """Check everything that needs no weights, and fill in the settings' defaults; raises `WisparseError`."""
    parse_size(settings.max_shard_size)
    device = choose_device(settings.device, "--device")
    with progress.stage("Checking", 4) as stage:
        on_disk = find_gguf(settings.model, settings.gguf_file) is not None
        if not on_disk:
            check_read_access(settings.model)
        if settings.upload_repo is not None:
            check_write_access(settings.upload_repo)
            if settings.private and is_public(settings.upload_repo):
                public = f"{settings.upload_repo!r} exists and is public, but --private was given"
                raise AccessError(f"{public}; choose a new name for --upload-repo, or leave --private out")
        stage.advance()
        source = open_source(settings.model, settings.revision, settings.gguf_file, weights=False)
        source_config = read_config(source.folder)
        stated = full_config(source_config)
        config = ModelConfig.from_dict(stated)
        quantised = bool(read_quantisation(stated, config))
        for option, value, default in (("dtype", settings.dtype, "auto"), ("weights", settings.weights, "native")):
            if quantised and value != default:
                stay = "the model is quantised, and its weights stay as they are"
                raise UsageError(f"--{option} {value}: {stay}; leave it out")
        if settings.weights in ("int4", "graded"):
            group_size(config, settings.weights)
        context = config.max_position_embeddings
        settings = replace(settings, seq_len=settings.seq_len or auto_seq_len(device.type, context))
        if settings.length > context:
            raise UsageError(
                f"--seq-len: expected at most the model's context, {context} tokens, found {settings.length}"
            )
        placed = settings.resume and placed_bundle(settings.state_dir, settings.output_dir) is not None
        if not placed:
            check_output(settings.output_dir, settings.overwrite, source=source.folder)
        if settings.resume:
            check_folder(settings.state_dir)
        # Reading raises an error for a file that the bundle cannot have.
        copied = dict(copied_files(source.folder, UnsupportedModelError))
        sampling = parse_json(copied.get(GENERATION_CONFIG, b"{}"), GENERATION_CONFIG, UnsupportedModelError)
        if ignored := ", ".join(f"{name} {value!r:.40}" for name, value in sampling_defaults(sampling)[1].items()):
            _log.warning("%s: not supported, so ignored: %s", GENERATION_CONFIG, ignored)
        stage.advance()
        if source.commit is None or source.gguf is not None:
            checkpoint = open_checkpoint(source)  # reads all headers, hardly a weight
            config = checkpoint.config
            for note in checkpoint.notes:
                _log.warning("%s: %s", source.name, note)
        tokenizer = load_tokenizer(source.folder)
        stage.advance()
        tokens = None
        if settings.calibration != ("self",):
            sizes = settings.num_samples, settings.length, settings.seed
            tokens = load_calibration(settings.calibration, tokenizer, None, *sizes, progress)
            if (largest := int(tokens.input_ids.max())) >= config.vocab_size:
                differs = f"the tokenizer gives token {largest}, but the model knows {config.vocab_size}"
                raise UnsupportedModelError(f"{differs}; they do not belong together")
        stage.advance()
    dtype = choose_dtype(config.dtype, device)
    free, working = available_bytes(device), working_bytes(config, dtype, settings)
    expected = expected_tensors(config)
    num_parameters = sum(map(math.prod, expected.values()))
    num_in_memory = num_parameters - math.prod(expected.get(PER_LAYER_EMBEDDING, (0,)))
    if settings.weights == "graded":  # two planes of each weight
        count = sum(one.in_features * one.out_features * len(one.parts) for one in config.projections())
        # Experts' planes are allocated beside transformers' parameters.
        working += count * dtype.itemsize * (2 if config.has_experts else 1)
    if device.type == "cpu":
        working += working // 8  # what the C library keeps of the memory that is freed
        if settings.weights != "native":  # the codes, and the logits before rounding
            samples, length, _ = fresh_text(settings.num_samples, settings.length, 0, "cpu", tokens is None)
            working += min(REFERENCE_BYTES, samples * length * config.vocab_size * 2)
            working += sum(one.num_parameters for one in config.projections())
    rotated_bytes = (num_in_memory + config.untied_parameters) * dtype.itemsize + working
    fixed = why_fixed(config, quantised)
    if settings.rotation == "pca" and fixed:
        raise UnsupportedModelError(f"--rotation pca: {fixed}; leave it out, or give none")
    if settings.rotation == "auto" and settings.method != "wisparse":
        fixed = f"--method {settings.method} is defined without rotation"
    elif settings.rotation == "auto" and settings.levels and not any(settings.levels):
        fixed = "nothing is left unread"
    if settings.rotation != "none" and not fixed and rotated_bytes > free:
        fixed = f"the model does not fit into the memory of {device}, and weights in their files cannot be rotated"
        if settings.rotation == "pca":
            raise ResourceError(f"{source.name}: {fixed}; choose a larger device, or --rotation none")
    not_rotated = fixed if settings.rotation == "auto" else None
    if fixed:
        settings = replace(settings, rotation="none")
    elif settings.rotation == "auto" and settings.weights != "int4":  # for int4 `compare_coordinates` decides
        settings = replace(settings, rotation="pca")
    untied = config.untied_parameters if settings.rotation != "none" else 0
    needed = (num_in_memory + untied) * dtype.itemsize + working
    out = Path(os.path.abspath(settings.output_dir))
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    plan = Plan(
        settings=settings,
        source=source,
        config=config,
        text_of=source_config["model_type"] if source_config["model_type"] in WRAPPERS else None,
        dequantised_from=dequantised_from(source),
        num_parameters=num_parameters,
        num_in_memory=num_in_memory,
        projection_parameters=sum(projection.num_parameters for projection in config.projections()),
        device=device,
        dtype=dtype,
        tokens=tokens,
        calibration=describe_spec(settings.calibration),
        download_bytes=0 if on_disk else download_bytes(settings.model, settings.revision, settings.gguf_file),
        bundle_bytes=bundle_bytes(config, num_parameters + untied, settings.dtype, max(1, len(settings.levels))),
        disk_free_bytes=shutil.disk_usage(existing).free,
        memory_bytes=needed,
        memory_free_bytes=free,
        max_memory=_spread_over(device, free, working) if needed > free else None,
        placed=placed,
        not_rotated=not_rotated,
        extra_embedding_bytes=untied * itemsize(config, settings.dtype),
    )
    if not placed:
        _check_resources(plan)
    return plan


def _spread_over(device: torch.device, free: int, working: int) -> dict[int | str, int] | None:
    """accelerate's ``max_memory``: bytes for weights on all GPUs, then in memory; None if ``working`` does not fit."""
    if working >= free:
        return None
    memory = available_bytes(torch.device("cpu")) - BASE_BYTES
    if device.type == "cpu":
        return {"cpu": max(0, min(memory, free) - working)}
    gpus = dict.fromkeys((device.index or 0, *range(torch.cuda.device_count())))
    on_gpus = {index: available_bytes(torch.device("cuda", index)) - working for index in gpus}
    return {device: max(0, num_bytes) for device, num_bytes in {**on_gpus, "cpu": memory}.items()}


def _check_resources(plan: Plan) -> None:
    """ResourceError if disk or memory is not enough."""
    name, settings, device = plan.source.name, plan.settings, plan.device
    sizes = (plan.bundle_bytes, plan.disk_free_bytes, plan.memory_bytes, plan.memory_free_bytes)
    bundle, disk, memory, free = map(shown_bytes, sizes)
    if settings.weights != "native" and plan.max_memory is not None:
        large = f"{name} does not fit into the memory of {device}"
        stuck = f"weights that stay in their files cannot become {settings.weights}"
        raise ResourceError(f"{large}, and {stuck}; choose a larger device, or leave --weights out")
    if plan.bundle_bytes > plan.disk_free_bytes:
        few = f"the bundle takes about {bundle} of disk, {disk} are free"
        raise ResourceError(f"{settings.output_dir}: {few}; free some space or choose another --output-dir")
    excess = plan.num_in_memory * plan.dtype.itemsize - sum((plan.max_memory or {}).values())
    if plan.max_memory is not None and plan.config.has_experts and excess > 0:
        large = f"{name} is larger than all memory here, by {shown_bytes(excess)}"
        raise ResourceError(
            f"{large}, and weights of experts cannot stay in their files; use a machine with more memory"
        )
    if plan.max_memory is not None and (lack := lacks_accelerate()) is not None:
        where = "it can be spread over GPUs, memory and its own files"
        raise ResourceError(f"{name} is larger than the memory of {device}; {where}, but {lack}")
    if plan.memory_bytes > plan.memory_free_bytes and plan.max_memory is None:
        where = "GPU memory" if device.type == "cuda" else "memory"
        few = f"the conversion takes about {memory} of {where} on {device}, {free} are free"
        advice = "close other programs, choose another --device, or lower --num-samples or --seq-len"
        raise ResourceError(f"{name}: {few}; {advice}")
