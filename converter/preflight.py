"""The preflight: everything that can be known before a weight is read, in seconds.

It fetches the configuration and the tokenizer, not the weights; it reads the calibration text, unless the model is to
write it. What it finds is a `Plan`: for ``--dry-run`` to show, for the conversion to follow.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wisparse.formats.checkpoint import Checkpoint, read_config
from wisparse.formats.config import expected_tensors, is_wrapper, text_config
from wisparse.formats.errors import AccessError, ResourceError, UnsupportedModelError, UsageError
from wisparse.formats.hub import Source, check_read_access, check_write_access, download_bytes, fetch_source, is_public
from wisparse.formats.machine import available_bytes, choose_device
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.quantization import read_quantisation
from wisparse.formats.write import check_output, copied_files, parse_size

from .calibration import describe_spec, load_calibration
from .documents import CalibrationTokens
from .gptq import group_size
from .processes import Progress
from .rotation import why_fixed
from .sensitivity import LARGEST_LOGITS
from .settings import ConvertSettings, auto_seq_len
from .source import choose_dtype, lacks_accelerate, load_tokenizer
from .state import StateStore, check_mark, names_the_bundle

# What a Python process with torch and transformers takes before it holds a model.
_BASE_BYTES = 600 << 20


@dataclass(frozen=True)
class Plan:
    """What a conversion is going to do, and what it needs.

    Attributes:
        source: the model; of a Hub model only the small files are there yet.
        config: its dimensions.
        text_of: the source's own ``model_type`` where only its text model is converted; None for a plain model.
        num_parameters, projection_parameters: all of them, and those in scope.
        device, dtype: of the computation.
        tokens: the calibration tokens; None where the model writes them.
        calibration: what they are made from, in words.
        download_bytes: still to come from the Hub.
        bundle_bytes, disk_free_bytes: size of the result, and room where it goes.
        memory_bytes, memory_free_bytes: estimate for the device, and what is free there.
        max_memory: where the weights go, in bytes by GPU and for ``cpu``, if the device alone cannot hold them.
        finished: an interrupted run put the bundle there that is in the output folder; whether it was one of this very
            source, these settings and this text is known once the weights are read.
        not_rotated: why the weights stay in the source's coordinates, where nobody asked for that.
        apart_bytes: what the bundle takes more because tied embeddings are two tensors once they are turned.
    """

    settings: ConvertSettings
    source: Source
    config: ModelConfig
    text_of: str | None
    num_parameters: int
    projection_parameters: int
    device: torch.device
    dtype: torch.dtype
    tokens: CalibrationTokens | None
    calibration: str
    download_bytes: int
    bundle_bytes: int
    disk_free_bytes: int
    memory_bytes: int
    memory_free_bytes: int
    max_memory: dict[int | str, int] | None = None
    finished: bool = False
    not_rotated: str | None = None
    apart_bytes: int = 0

    @property
    def weights_on(self) -> str:
        """Where the weights are during the conversion, in words."""
        if self.max_memory is None:
            return str(self.device)
        left = self.num_parameters * self.dtype.itemsize
        places = []
        for place, room in self.max_memory.items():
            if left > 0 and room > 0:
                places.append(f"cuda:{place}" if isinstance(place, int) else "memory")
                left -= room
        return ", ".join([*places, *(["the model's files"] if left > 0 else [])])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        settings = self.settings
        return {
            "model": self.source.name,
            "commit": self.source.commit,
            "model_type": self.config.model_type,
            "text_of": self.text_of,
            "num_blocks": self.config.num_blocks,
            "num_parameters": self.num_parameters,
            "projection_parameters": self.projection_parameters,
            "output_dir": str(settings.output_dir),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            **settings.deciding(),
            "rotation": settings.rotation,
            "not_rotated": self.not_rotated,
            "calibration": self.calibration,
            "calibration_tokens": settings.num_samples * settings.length,
            "download_bytes": self.download_bytes,
            "apart_bytes": self.apart_bytes,
            "bundle_bytes": self.bundle_bytes,
            "disk_free_bytes": self.disk_free_bytes,
            "memory_bytes": self.memory_bytes,
            "memory_free_bytes": self.memory_free_bytes,
            "weights_on": self.weights_on,
            "work_dir": str(settings.state_dir) if settings.resume else None,
            "upload_repo": settings.upload_repo,
        }


def preflight(settings: ConvertSettings, progress: Progress | None = None) -> Plan:
    """Check everything that can be checked without the weights.

    Raises:
        UsageError: contradictory settings, the output exists.
        CalibrationError: the calibration source is missing, empty, binary or too short.
        UnsupportedModelError: unknown architecture, quantised, already sparse, damaged headers.
        AccessError: no such model, gated, no network, no permission to upload.
        ResourceError: not enough disk or memory.
    """
    progress = progress or Progress(enabled=False)
    settings.check()
    parse_size(settings.max_shard_size)
    device = choose_device(settings.device, "--device")
    with progress.stage("Checking", 4) as stage:
        check_read_access(settings.model)
        if settings.upload_repo is not None:
            check_write_access(settings.upload_repo)
            if settings.private and is_public(settings.upload_repo):
                raise AccessError(
                    f"{settings.upload_repo!r} exists and is public, but --private was given; choose a new name for "
                    "--upload-repo, or leave --private out"
                )
        stage.advance()
        source = fetch_source(settings.model, settings.revision, weights=False)
        config, text_of, quantised = _read_config(source.folder, settings)
        if settings.seq_len is None:
            settings = replace(settings, seq_len=auto_seq_len(device.type, config.max_position_embeddings))
        finished = settings.resume and names_the_bundle(settings.output_dir)
        check_places(settings, source, finished)
        for _ in copied_files(source.folder, UnsupportedModelError):
            pass  # reading says whether the bundle can have them
        if settings.length > config.max_position_embeddings:
            raise UsageError(
                f"--seq-len {settings.seq_len}: the model's context is {config.max_position_embeddings} tokens"
            )
        stage.advance()
        if source.commit is None:
            Checkpoint.open(source.folder)  # every header, no weight
        tokenizer = load_tokenizer(source.folder)
        stage.advance()
        tokens = _calibration(settings, config, tokenizer, progress)
        stage.advance()
    shapes = expected_tensors(config)
    dtype = choose_dtype(config.dtype, device)
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    working = working_bytes(config, dtype, settings)
    free = available_bytes(device)
    rotation, not_rotated = _rotation(settings, config, quantised)
    # Turned, tied embeddings are two tensors.
    apart = config.vocab_size * config.hidden_size if rotation != "none" and config.tie_word_embeddings else 0
    weights = (num_parameters + apart) * dtype.itemsize
    if rotation != "none" and weights + working > free:
        why = (
            f"the model does not fit into the memory of {device}, and weights that stay in their files cannot be turned"
        )
        if settings.rotation != "auto":
            raise ResourceError(f"{source.name}: {why}; choose a larger device, or --rotation none")
        rotation, not_rotated, apart, weights = "none", why, 0, num_parameters * dtype.itemsize
    settings = replace(settings, rotation=rotation)
    plan = Plan(
        settings=settings,
        source=source,
        config=config,
        text_of=text_of,
        num_parameters=num_parameters,
        projection_parameters=sum(projection.num_parameters for projection in config.projections()),
        device=device,
        dtype=dtype,
        tokens=tokens,
        calibration=describe_spec(settings.calibration),
        download_bytes=download_bytes(settings.model, settings.revision),
        bundle_bytes=bundle_bytes(config, num_parameters + apart, settings.dtype, max(1, len(settings.levels))),
        disk_free_bytes=shutil.disk_usage(_existing(settings.output_dir)).free,
        memory_bytes=weights + working,
        memory_free_bytes=free,
        max_memory=_max_memory(device, free, working) if weights + working > free else None,
        finished=finished,
        not_rotated=not_rotated,
        apart_bytes=apart * _itemsize(config, settings.dtype),
    )
    if settings.weights != "native" and plan.max_memory is not None:
        raise ResourceError(
            f"{plan.source.name} does not fit into the memory of {device}, and weights that stay in their files cannot "
            f"become {settings.weights}; choose a larger device, or leave --weights out"
        )
    if not finished:
        require_resources(plan)
    return plan


def check_places(settings: ConvertSettings, source: Source, finished: bool) -> None:
    """Whether bundle and state may be written where the settings say; ``finished``: the bundle is there already.

    Raises:
        UsageError: not there.
    """
    if settings.resume:
        StateStore.check(settings.state_dir)
        check_mark(settings.output_dir)
    if not finished:
        check_output(settings.output_dir, settings.overwrite, source=source.folder)


def _rotation(settings: ConvertSettings, config: ModelConfig, quantised: bool) -> tuple[str, str | None]:
    """What `ConvertSettings.rotation` comes to, and why ``auto`` leaves the weights as they are."""
    fixed = why_fixed(config, quantised)
    if settings.rotation != "auto":
        if settings.rotation != "none" and fixed:
            raise UnsupportedModelError(f"--rotation {settings.rotation}: {fixed}; leave it out, or give none")
        return settings.rotation, None
    if settings.method != "wisparse":
        fixed = f"--method {settings.method} is measured as its authors have it"
    elif settings.levels and not any(settings.levels):
        fixed = "nothing is left unread"
    return ("none", fixed) if fixed else ("pca", None)


def _read_config(folder: Path, settings: ConvertSettings) -> tuple[ModelConfig, str | None, bool]:
    config = read_config(folder)
    plain = text_config(config)
    read = ModelConfig.from_dict(plain)
    quantised = bool(read_quantisation(plain, read))
    if quantised:
        for option, value, kept in (("dtype", settings.dtype, "auto"), ("weights", settings.weights, "native")):
            if value != kept:
                raise UsageError(
                    f"--{option} {value}: the model is quantised, and its weights stay as they are; leave it out"
                )
    if settings.weights == "int4":
        group_size(read)
    return read, config["model_type"] if is_wrapper(config) else None, quantised


def _calibration(
    settings: ConvertSettings, config: ModelConfig, tokenizer: Any, progress: Progress
) -> CalibrationTokens | None:
    if settings.calibration == ("self",):
        return None
    tokens = load_calibration(
        settings.calibration,
        tokenizer,
        num_samples=settings.num_samples,
        seq_len=settings.length,
        seed=settings.seed,
        progress=progress,
    )
    largest = int(tokens.input_ids.max())
    if largest >= config.vocab_size:
        raise UnsupportedModelError(
            f"the tokenizer gives token {largest}, but the model knows {config.vocab_size}; they do not belong together"
        )
    return tokens


def bundle_bytes(config: ModelConfig, num_parameters: int, dtype: str, num_levels: int = 3) -> int:
    """Size of a bundle of so many parameters, stored in ``dtype`` (``auto``: the source's)."""
    sidecar = sum(4 * num_levels * projection.in_features + 512 for projection in config.projections())
    return num_parameters * _itemsize(config, dtype) + sidecar + (32 << 20)  # tokenizers have up to 20 MB


def _itemsize(config: ModelConfig, dtype: str) -> int:
    return getattr(torch, config.dtype if dtype == "auto" else dtype, torch.float32).itemsize


def working_bytes(config: ModelConfig, dtype: torch.dtype, settings: ConvertSettings) -> int:
    """What is needed beside the weights: a bound from measurements (benchmarks/results/scale*.json)."""
    length, tokens = settings.length, settings.num_samples * settings.length
    # One block's inputs at all tokens, twice while they are put together; hidden states before and after it.
    states = tokens * (4 * config.hidden_size + 2 * config.intermediate_size) * dtype.itemsize
    # A backward pass through one micro-batch: the scores of attention in float32, some rows of logits.
    attention = 6 * 4 * config.num_heads * length * length
    logits = 6 * 4 * min(LARGEST_LOGITS, tokens * config.vocab_size)
    # Keys and values while the model writes its own text, and as they grow.
    written = tokens * sum(block.kv_size for block in config.blocks) * dtype.itemsize
    cache = min(2 * written, 4 << 30) * 5 // 4 if settings.calibration == ("self",) else 0
    return max(states, attention + logits, cache) + _BASE_BYTES


def _max_memory(device: torch.device, free: int, working: int) -> dict[int | str, int] | None:
    """Room for weights by place, for a model that the device cannot hold: all GPUs, then memory, then its files.

    None if the device has not even room to work.
    """
    if working >= free:
        return None
    memory = available_bytes(torch.device("cpu")) - _BASE_BYTES
    if device.type == "cpu":
        return {"cpu": max(0, min(memory, free) - working)}
    gpus = [device.index or 0, *(i for i in range(torch.cuda.device_count()) if i != (device.index or 0))]
    room: dict[int | str, int] = {}
    for index in gpus:
        room[index] = max(0, available_bytes(torch.device("cuda", index)) - working)
    return {**room, "cpu": max(0, memory)}


def require_resources(plan: Plan) -> None:
    """Raise ResourceError unless disk and memory are enough."""
    if plan.bundle_bytes > plan.disk_free_bytes:
        raise ResourceError(
            f"{plan.settings.output_dir}: the bundle takes about {plan.bundle_bytes / 1e9:.1f} GB of disk, "
            f"{plan.disk_free_bytes / 1e9:.1f} GB are free; free some space or choose another --output-dir"
        )
    if plan.max_memory is not None and (lack := lacks_accelerate()) is not None:
        raise ResourceError(
            f"{plan.source.name} is larger than the memory of {plan.device}; it can be spread over GPUs, memory and "
            f"its own files, but {lack}"
        )
    if plan.memory_bytes > plan.memory_free_bytes and plan.max_memory is None:
        where = "GPU memory" if plan.device.type == "cuda" else "memory"
        raise ResourceError(
            f"{plan.source.name}: the conversion takes about {plan.memory_bytes / 1e9:.1f} GB of {where} on "
            f"{plan.device}, {plan.memory_free_bytes / 1e9:.1f} GB are free; close other programs, choose another "
            "--device, or lower --num-samples or --seq-len"
        )


def _existing(path: Path) -> Path:
    path = Path(os.path.abspath(path))
    while not path.exists():
        path = path.parent
    return path
