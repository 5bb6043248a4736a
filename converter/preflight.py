"""The preflight: everything that can be known before a weight is read, in seconds."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wisparse.formats.architectures import WRAPPERS
from wisparse.formats.bundle import scale_shapes
from wisparse.formats.checkpoint import Checkpoint, read_config
from wisparse.formats.errors import AccessError, ResourceError, UnsupportedModelError, UsageError
from wisparse.formats.hub import Source, check_read_access, check_write_access, download_bytes, fetch_source, is_public
from wisparse.formats.machine import available_bytes, choose_device
from wisparse.formats.model_config import PER_LAYER_EMBEDDING, ModelConfig, expected_tensors
from wisparse.formats.quantization import read_quantisation
from wisparse.formats.write import check_output, copied_files, parse_size

from .calibration import CalibrationTokens, describe_spec, load_calibration
from .gptq import group_size
from .processes import SILENT, Progress
from .rotation import why_fixed
from .sensitivity import LARGEST_LOGITS
from .settings import ConvertSettings, auto_seq_len
from .source import choose_dtype, full_config, lacks_accelerate, load_tokenizer
from .state import check_folder, placed_bundle

# What a Python process with torch and transformers takes before it holds a model.
_BASE_BYTES = 600 << 20


@dataclass(frozen=True)
class Plan:
    """What a conversion is going to do, and what it needs. `settings` have every default filled in."""

    settings: ConvertSettings
    source: Source  # of a Hub model only the small files are there yet
    config: ModelConfig
    text_of: str | None  # the source's own model_type where only its text model is converted
    num_parameters: int
    num_in_memory: int  # of these: the others are looked up in their file
    projection_parameters: int
    device: torch.device
    dtype: torch.dtype  # of the computation
    tokens: CalibrationTokens | None  # None where the model writes them
    calibration: str  # what they are made from, in words
    download_bytes: int
    bundle_bytes: int
    disk_free_bytes: int
    memory_bytes: int  # an estimate
    memory_free_bytes: int
    max_memory: dict[int | str, int] | None  # bytes by GPU and for "cpu", for a model larger than the device
    placed: bool  # an interrupted run had put its bundle into the output folder already
    not_rotated: str | None  # why the weights stay in the source's coordinates, where nobody asked for that
    untied_bytes: int  # what rotation adds to the bundle, because tied embeddings become two tensors

    @property
    def weights_on(self) -> str:
        """Where the weights are during the conversion, in words."""
        if self.max_memory is None:
            return str(self.device)
        left, used = self.num_in_memory * self.dtype.itemsize, []
        for place, room in self.max_memory.items():
            if left > 0 and room > 0:
                used.append(f"cuda:{place}" if isinstance(place, int) else "memory")
                left -= room
        return ", ".join([*used, *(["the model's files"] if left > 0 else [])])

    def to_dict(self) -> dict[str, Any]:
        settings, config = self.settings, self.config
        names = ("text_of", "num_parameters", "projection_parameters", "not_rotated", "calibration", "download_bytes")
        sizes = ("untied_bytes", "bundle_bytes", "disk_free_bytes", "memory_bytes", "memory_free_bytes", "weights_on")
        return {
            "model": self.source.name,
            "commit": self.source.commit,
            **{name: getattr(config, name) for name in ("model_type", "num_blocks")},
            "output_dir": str(settings.output_dir),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            **settings.fingerprint(),
            "calibration_tokens": settings.num_samples * settings.length,
            **{name: getattr(self, name) for name in (*names, *sizes)},
            "work_dir": str(settings.state_dir) if settings.resume else None,
            "upload_repo": settings.upload_repo,
        }


def preflight(settings: ConvertSettings, progress: Progress = SILENT) -> Plan:
    """Check everything that can be checked without the weights; any `WisparseError` but damage to the weights."""
    parse_size(settings.max_shard_size)
    device = choose_device(settings.device, "--device")
    with progress.stage("Checking", 4) as stage:
        check_read_access(settings.model)
        if settings.upload_repo is not None:
            check_write_access(settings.upload_repo)
            if settings.private and is_public(settings.upload_repo):
                public = f"{settings.upload_repo!r} exists and is public, but --private was given"
                raise AccessError(f"{public}; choose a new name for --upload-repo, or leave --private out")
        stage.advance()
        source = fetch_source(settings.model, settings.revision, weights=False)
        read = read_config(source.folder)
        stated = full_config(read)
        config = ModelConfig.from_dict(stated)
        quantised = bool(read_quantisation(stated, config))
        for option, value, kept in (("dtype", settings.dtype, "auto"), ("weights", settings.weights, "native")):
            if quantised and value != kept:
                stay = "the model is quantised, and its weights stay as they are"
                raise UsageError(f"--{option} {value}: {stay}; leave it out")
        if settings.weights in ("int4", "graded"):
            group_size(config, settings.weights)
        context = config.max_position_embeddings
        settings = replace(settings, seq_len=settings.seq_len or auto_seq_len(device.type, context))
        if settings.length > context:
            raise UsageError(f"--seq-len {settings.seq_len}: the model's context is {context} tokens")
        placed = settings.resume and placed_bundle(settings.state_dir, settings.output_dir) is not None
        if not placed:
            check_output(settings.output_dir, settings.overwrite, source=source.folder)
        if settings.resume:
            check_folder(settings.state_dir)
        for _ in copied_files(source.folder, UnsupportedModelError):
            pass  # reading says whether the bundle can have them
        stage.advance()
        if source.commit is None:
            Checkpoint.open(source.folder, complete=full_config)  # every header, no weight
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
    if settings.weights == "graded":  # a number for each plane
        held = sum(one.in_features * one.out_features * len(one.parts) for one in config.projections())
        # Experts' are made beside transformers' own.
        working += held * dtype.itemsize * (2 if config.has_experts else 1)
    untied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    rotated_bytes = (num_in_memory + untied) * dtype.itemsize + working
    fixed = why_fixed(config, quantised)
    if settings.rotation == "pca" and fixed:
        raise UnsupportedModelError(f"--rotation pca: {fixed}; leave it out, or give none")
    if settings.rotation == "auto" and settings.method != "wisparse":
        fixed = f"--method {settings.method} is measured as its authors have it"
    elif settings.rotation == "auto" and settings.levels and not any(settings.levels):
        fixed = "nothing is left unread"
    if settings.rotation != "none" and not fixed and rotated_bytes > free:
        fixed = f"the model does not fit into the memory of {device}, and weights in their files cannot be rotated"
        if settings.rotation == "pca":
            raise ResourceError(f"{source.name}: {fixed}; choose a larger device, or --rotation none")
    not_rotated = fixed if settings.rotation == "auto" else None
    if fixed:
        settings = replace(settings, rotation="none")
    elif settings.rotation == "auto" and settings.weights != "int4":  # for int4 it is measured
        settings = replace(settings, rotation="pca")
    untied = untied if settings.rotation != "none" else 0
    needed = (num_in_memory + untied) * dtype.itemsize + working
    out = Path(os.path.abspath(settings.output_dir))
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    plan = Plan(
        settings=settings,
        source=source,
        config=config,
        text_of=read["model_type"] if read["model_type"] in WRAPPERS else None,
        num_parameters=num_parameters,
        num_in_memory=num_in_memory,
        projection_parameters=sum(projection.num_parameters for projection in config.projections()),
        device=device,
        dtype=dtype,
        tokens=tokens,
        calibration=describe_spec(settings.calibration),
        download_bytes=download_bytes(settings.model, settings.revision),
        bundle_bytes=bundle_bytes(config, num_parameters + untied, settings.dtype, max(1, len(settings.levels))),
        disk_free_bytes=shutil.disk_usage(existing).free,
        memory_bytes=needed,
        memory_free_bytes=free,
        max_memory=_spread_over(device, free, working) if needed > free else None,
        placed=placed,
        not_rotated=not_rotated,
        untied_bytes=untied * _itemsize(config, settings.dtype),
    )
    if not placed:
        _check_resources(plan)
    return plan


def bundle_bytes(config: ModelConfig, num_parameters: int, dtype: str, num_levels: int = 3) -> int:
    """Size of a bundle of so many parameters, stored in ``dtype`` (``auto``: the source's)."""
    sidecar = sum(4 * num_levels * math.prod(shape) + 512 for shape in scale_shapes(config).values())
    return num_parameters * _itemsize(config, dtype) + sidecar + (32 << 20)  # tokenizers have up to 20 MB


def _itemsize(config: ModelConfig, dtype: str) -> int:
    return getattr(torch, config.dtype if dtype == "auto" else dtype, torch.float32).itemsize


def working_bytes(config: ModelConfig, dtype: torch.dtype, settings: ConvertSettings) -> int:
    """What is needed beside the weights: a bound from measurements (benchmarks/results/scale*.json)."""
    length, tokens = settings.length, settings.num_samples * settings.length
    # One block's inputs at all tokens, twice while they are put together; hidden states before and after it.
    chosen = max(1 if block.experts is None else block.experts.chosen for block in config.blocks)
    states = tokens * (4 * chosen * config.hidden_size + 2 * config.mlp_size) * dtype.itemsize
    states += tokens * config.num_blocks * config.per_layer_size * dtype.itemsize
    # A backward pass through one micro-batch: the scores of attention in float32, some rows of logits.
    attention = 6 * 4 * config.num_heads * length * length
    logits = 6 * 4 * min(LARGEST_LOGITS, tokens * config.vocab_size)
    # The refinement's sums over four micro-batches, and its state, in float64: of experts many channels.
    channels = 160 * sum(map(math.prod, scale_shapes(config).values()))
    # Keys and values while the model writes its own text, and as they grow.
    written = tokens * config.kv_size * dtype.itemsize
    cache = min(2 * written, 4 << 30) * 5 // 4 if settings.calibration == ("self",) else 0
    return max(states, attention + logits + channels, cache) + _BASE_BYTES


def _spread_over(device: torch.device, free: int, working: int) -> dict[int | str, int] | None:
    """Room for weights by place: all GPUs, then memory (and then the files); None if there is no room to work."""
    if working >= free:
        return None
    memory = available_bytes(torch.device("cpu")) - _BASE_BYTES
    if device.type == "cpu":
        return {"cpu": max(0, min(memory, free) - working)}
    gpus = dict.fromkeys((device.index or 0, *range(torch.cuda.device_count())))
    room = {index: available_bytes(torch.device("cuda", index)) - working for index in gpus}
    return {place: max(0, count) for place, count in {**room, "cpu": memory}.items()}


def _check_resources(plan: Plan) -> None:
    """ResourceError unless disk and memory are enough."""
    name, settings, device = plan.source.name, plan.settings, plan.device
    sizes = (plan.bundle_bytes, plan.disk_free_bytes, plan.memory_bytes, plan.memory_free_bytes)
    bundle, disk, memory, free = (f"{size / 1e9:.1f} GB" for size in sizes)
    if settings.weights != "native" and plan.max_memory is not None:
        large = f"{name} does not fit into the memory of {device}"
        stuck = f"weights that stay in their files cannot become {settings.weights}"
        raise ResourceError(f"{large}, and {stuck}; choose a larger device, or leave --weights out")
    if plan.bundle_bytes > plan.disk_free_bytes:
        few = f"the bundle takes about {bundle} of disk, {disk} are free"
        raise ResourceError(f"{settings.output_dir}: {few}; free some space or choose another --output-dir")
    left = plan.num_in_memory * plan.dtype.itemsize - sum((plan.max_memory or {}).values())
    if plan.max_memory is not None and plan.config.has_experts and left > 0:
        large = f"{name} is larger than all memory here, by {left / 1e9:.1f} GB"
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
