"""A conversion from end to end: preflight, model, calibration tokens, search, recipe, bundle."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import wisparse
from wisparse.formats.bundle import Bundle, ProjectionMask, verify_bundle
from wisparse.formats.card import read_inherited
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import AccessError, BundleError, CalibrationError, ResourceError
from wisparse.formats.folder import clear_leftovers
from wisparse.formats.hub import push_bundle
from wisparse.formats.machine import choose_device
from wisparse.formats.manifest import (
    BUNDLE,
    CalibrationRecord,
    ProjectionRecipe,
    Recipe,
    RotationRecord,
    SparsityLevel,
)
from wisparse.formats.weight_types import PLANE_BITS
from wisparse.formats.write import write_bundle

from .calibration import CalibrationTokens, load_calibration, write_calibration
from .checks import end_turns, require_centred_weights, require_finite_logits, warn_of_absurd_perplexity
from .cpu_kernels import start_compiling, wait_for_compilers
from .equalization import equalize
from .evaluation import reference_logits
from .gguf_source import gguf_weights, open_checkpoint, open_source
from .gptq import LONGEST, SAMPLES, compare_coordinates, quantise_weights
from .measurement import Budget, Choice, choose, fresh_text, measure
from .planes import plane_ratios, read_in_planes
from .preflight import Plan, conversion_seconds, preflight
from .processes import Processes, Progress, joined
from .report import Report
from .rotation import rotate
from .search.allocation import mean_sparsity
from .search.search import OTHER_SPARSITIES, SearchResult, SearchSettings, SparsityLevels
from .settings import MAX_SPARSITY, ConvertSettings
from .source import SourceModel, float32_by_onednn, load_source, small_digests, weight_digests
from .state import Stages, placed_bundle, remove_state
from .tokenizer import bundle_files

_log = logging.getLogger("wisparse")

# Added to the seed. Far from seeds that users choose, and from the offsets in `measurement`.
_DIRECTIONS_SEED_OFFSET, _COORDINATES_SEED_OFFSET = 3_000_003, 4_000_003
# With a budget, the report's quality curve has the chosen sparsity, and this much less and more.
_CURVE_STEP = 0.05


@dataclass(frozen=True)
class Conversion:
    """A finished conversion. ``report.measurement`` is None if an earlier, interrupted run had written the bundle."""

    folder: Path
    plan: Plan
    report: Report
    seconds: dict[str, float]  # stage -> wall-clock seconds
    choice: Choice | None = None  # the search for a sparsity within a budget
    url: str | None = None  # of the upload


@dataclass
class Prepared:
    """The model that is searched, as it is after rotation and quantization, and its texts."""

    source: SourceModel
    checkpoint: Checkpoint
    tokens: CalibrationTokens
    held_out: CalibrationTokens | None  # measurement tokens; None if they are not read yet
    reference: list[Tensor]  # the logits on them before quantization, float16; empty for native weights
    rotation: RotationRecord | None = None
    compared: dict[str, Any] | None = None  # the KL with and without rotation
    equalized: int = 0  # inputs of projections


def run(settings: ConvertSettings, progress: Progress | None = None) -> Conversion | None:
    """Preflight, conversion and upload. Every process of torchrun calls it; all but rank 0 return None."""
    progress = progress or Progress(enabled=False)
    with joined(settings.device) as (processes, device), float32_by_onednn():
        plan = cast(Plan, processes.broadcast(preflight(settings, progress) if processes.is_main else None))
        if processes.world_size > 1 and plan.max_memory is not None:
            wrong = f"with {processes.world_size} processes each GPU must hold the whole model, and it is too large"
            advice = "start one process, without torchrun, which spreads the model over all GPUs"
            raise ResourceError(f"{plan.source.name}: {wrong}; {advice}")
        if not processes.is_main:
            progress, plan = Progress(enabled=False), replace(plan, device=choose_device(device))
        try:
            conversion = _convert(plan, progress, processes)
        except torch.cuda.OutOfMemoryError as error:
            lack = f"{plan.source.name}: {plan.device} has too little memory for the conversion"
            advice = "lower --seq-len or --num-samples, or choose another --device"
            raise ResourceError(f"{lack}; {advice}") from error
    if conversion is None:
        return None
    try:
        if settings.upload_repo is not None:
            with progress.stage("Uploading"):
                url = push_bundle(settings.output_dir, settings.upload_repo, settings.private)
            conversion = replace(conversion, url=url)
        return conversion
    finally:
        # Also after a failed upload, whose error names the command to repeat. Not after a kill: the next run resumes.
        if settings.resume:
            remove_state(settings.state_dir, default=settings.work_dir is None)


def _convert(plan: Plan, progress: Progress, processes: Processes) -> Conversion | None:
    """Convert the model and write the bundle. Leaves the state folder for `run` to remove."""
    settings = plan.settings
    with progress.stage("Fetching weights"):
        if processes.is_main:
            plan = replace(plan, source=open_source(settings.model, plan.source.commit, settings.gguf_file))
        fetched = processes.broadcast(plan.source)
        checkpoint = open_checkpoint(fetched)
    # The configuration with what the weights tell, of a model on the Hub.
    plan = replace(plan, source=fetched, config=checkpoint.config)
    if fetched.commit is not None and processes.is_main:
        for note in checkpoint.notes:
            _log.warning("%s: %s", fetched.name, note)
    stages, small_files, complete = Stages(processes=processes, progress=progress), {}, False
    if processes.is_main:
        small_files = small_digests(checkpoint.folder, checkpoint.error)
        with progress.stage("Reading the weights"):
            weight_files = weight_digests(checkpoint) if settings.resume else {}
        fingerprint = _fingerprint(plan, {**weight_files, **small_files})
        if plan.placed and placed_bundle(settings.state_dir, settings.output_dir) == fingerprint:
            with suppress(BundleError):  # the interrupted run was killed after the bundle was complete
                verify_bundle(settings.output_dir)
                clear_leftovers(Path(os.path.abspath(settings.output_dir)), BUNDLE)
                complete = True
    if processes.broadcast(complete):
        if not processes.is_main:
            return None
        _log.warning("the bundle in %s was complete already", settings.output_dir)
        report = Report(Bundle.open(settings.output_dir).recipe, plan.config, None)
        return Conversion(settings.output_dir, plan, report, progress.seconds)
    given = {"given_text": plan.tokens is not None}
    progress.expect(partial(conversion_seconds, plan.config, settings, plan.device, plan.dtype, **given))
    compilers = start_compiling(settings, checkpoint) if processes.is_main else []
    if processes.is_main and settings.resume:
        stages.open(settings.state_dir, fingerprint, default=settings.work_dir is None)
    with closing(stages):
        with progress.stage("Loading the model"):
            weights = gguf_weights(fetched)
            source = load_source(fetched.folder, plan.dtype, plan.device, max_memory=plan.max_memory, weights=weights)
            if checkpoint.quantised:
                require_centred_weights(source, fetched.name)
            require_finite_logits(source, fetched.name)
            processes.gather(None)
        texts = {**bundle_files(fetched.folder, source.tokenizer), **end_turns(source, fetched.folder)}
        model = _prepare_model(plan, source, checkpoint, stages)
        del source
        results, choice = _search(model.source, model.tokens, settings, stages)
        if not processes.is_main:
            return None
        sensitivity_at = settings.default_of(results) if settings.full_report(plan.device.type) else None
        measurement = measure(
            model.source,
            model.tokens,
            results,
            settings.calibration,
            sensitivity_at,
            model.held_out,
            progress,
            default=settings.default_of(results),
            reference=model.reference,
        )
        recipe = replace(_recipe(plan, model, results, choice), quality=measurement.table)
        checkpoint, planes = model.checkpoint, model.source.planes
        del model  # frees memory: the bundle is written from the checkpoint's files
        report = Report(recipe, plan.config, measurement)
        masks = {}
        for sparsity, result in results.items():
            entries, scales = result.projections.items(), result.channel_scales
            masks[sparsity] = {name: _mask(scales[name], entry, planes) for name, entry in entries}
        with progress.stage("Writing the bundle"):
            # Reading a weight file checks that it is unchanged; the small files are read again here.
            for name, digest in small_digests(checkpoint.folder, checkpoint.error).items():
                if small_files.get(name) != digest:
                    raise checkpoint.error(f"{name}: changed while the model was converted; run this again")
            write_bundle(
                checkpoint,
                recipe,
                masks,
                settings.output_dir,
                dtype=settings.dtype,
                max_shard_size=settings.max_shard_size,
                extra_files={**texts, **report.files(read_inherited(checkpoint.folder), settings.upload_repo)},
                overwrite=settings.overwrite,
                before_swap=stages.mark_bundle,
            )
        wait_for_compilers(compilers, progress)
    return Conversion(settings.output_dir, plan, report, progress.seconds, choice)


def _mask(scale: Tensor, entry: ProjectionRecipe, planes: int) -> ProjectionMask:
    if planes == 1:
        return ProjectionMask(scale, entry.threshold, entry.sparsity)
    thresholds = [entry.threshold * ratio for ratio in plane_ratios(scale, planes)]
    # Plane thresholds have to ascend after rounding to float32 too.
    rounded = torch.tensor(thresholds, dtype=torch.float32).cummax(0).values.tolist()
    first_plane = scale.unflatten(-1, (planes, -1))[..., 0, :].contiguous()
    return ProjectionMask(first_plane, rounded[0], entry.sparsity, tuple(rounded))


def library_versions() -> dict[str, str]:
    """Versions that a recipe's numbers depend on: recorded in the recipe, and part of the fingerprint."""
    # A checkout on the path has no metadata to read our own version from.
    libraries = ("torch", "transformers", "tokenizers")
    return {"wisparse": wisparse.__version__, **{name: metadata.version(name) for name in libraries}}


def _fingerprint(plan: Plan, files: Mapping[str, str]) -> dict[str, Any]:
    """Everything that a bundle's bytes depend on, as JSON values by name."""
    settings = plan.settings
    return {
        **files,
        **settings.fingerprint(),
        "calibration": plan.tokens.digest if plan.tokens else plan.calibration,
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type,
        "computing in": str(plan.dtype),
        **library_versions(),
        "name": plan.source.name,
        "commit": plan.source.commit,
        "dtype": settings.dtype,
        "max_shard_size": settings.max_shard_size,
        "upload_repo": settings.upload_repo,
        "full report": settings.full_report(plan.device.type),
    }


def _prepare_model(plan: Plan, source: SourceModel, checkpoint: Checkpoint, stages: Stages) -> Prepared:
    """Rotate and quantize the model."""
    settings = plan.settings
    samples, length, seed = settings.num_samples, settings.length, settings.seed
    sizes = {
        "calibration": (samples, length, seed),
        # Half the calibration text's size: principal directions need fewer tokens than thresholds.
        "rotation": (-(-samples // 2), length, seed + _DIRECTIONS_SEED_OFFSET),
        "coordinates": (SAMPLES, min(LONGEST, length), seed + _COORDINATES_SEED_OFFSET),
        "measurement": fresh_text(samples, length, seed, plan.device.type, plan.tokens is None),
    }
    texts = {}
    if plan.tokens is None:
        unused = {"none": {"rotation", "coordinates"}, "pca": {"coordinates"}}.get(settings.rotation, set())
        texts = _self_texts(source, {name: sizes[name] for name in sizes if name not in unused}, stages)
    tokens = plan.tokens or texts["calibration"]
    if stages.processes.is_main:
        warn_of_absurd_perplexity(source, tokens.input_ids[0], plan.source.name)

    @cache
    def text(name: str) -> CalibrationTokens:
        if texts:
            return texts[name]
        return load_calibration(settings.calibration, source.tokenizer, None, *sizes[name], stages.progress)

    rotation_text, record, compared = partial(text, "rotation"), None, None
    equalized = 0
    if settings.rotation == "auto":
        sparsity = settings.usual_default if settings.has_budget else settings.default_of(settings.levels)
        other = partial(text, "coordinates")
        kls = compare_coordinates(source, checkpoint, tokens, rotation_text, other, sparsity, stages)
        compared = {"sparsity": sparsity, "kl": kls}
    if settings.rotation == "pca" or (compared and kls["pca"] < kls["none"]):
        source, checkpoint, record = rotate(source, checkpoint, tokens, rotation_text, stages)
    if record is not None or settings.weights == "int8":  # int4 in the source's coordinates loses by it
        checkpoint, equalized = equalize(source, checkpoint, tokens if record is None else rotation_text(), stages)
    reference: list[Tensor] = []
    if settings.weights != "native":  # `source` computes with the quantized weights from here on
        kind, scale_dtype = settings.weights, checkpoint.dtype
        # int4 is fitted to the rotation text too, which is loaded already.
        fit = tokens.joined(text("rotation")) if kind == "int4" and settings.rotation != "none" else tokens
        if stages.processes.is_main:
            with suppress(AccessError, CalibrationError):  # `measure` says so
                reference = reference_logits(source, text("measurement").input_ids)
        matrices = quantise_weights(source, fit, kind, scale_dtype, stages)
        checkpoint = checkpoint.quantize(matrices, scale_dtype)
        if kind == "graded":
            source = read_in_planes(source, matrices)
    held_out = text("measurement") if texts or reference else None
    return Prepared(source, checkpoint, tokens, held_out, reference, record, compared, equalized)


def _self_texts(
    source: SourceModel, sizes: Mapping[str, tuple[int, int, int]], stages: Stages
) -> dict[str, CalibrationTokens]:
    """Tokens that the model generates, by name; rank 0 generates them all in one batch."""

    def write() -> dict[str, list[list[int]]]:
        rows = {}
        if stages.processes.is_main:
            texts = write_calibration(source.model, source.tokenizer, [*sizes.values()], stages.progress)
            rows = {name: text.input_ids.tolist() for name, text in zip(sizes, texts, strict=True)}
        return stages.processes.broadcast(rows)

    rows = stages.run("calibration", write)
    return {name: CalibrationTokens.from_rows(rows[name], "self", seed) for name, (_, _, seed) in sizes.items()}


def _search(
    source: SourceModel, tokens: CalibrationTokens, settings: ConvertSettings, stages: Stages
) -> tuple[dict[float, SearchResult], Choice | None]:
    """Search results by sparsity, ascending, and with a budget the record of how its sparsity was chosen."""
    names = ("method", "num_generations", "num_offspring", "seed")
    search = SearchSettings(search=settings.chosen_search, **{name: getattr(settings, name) for name in names})
    with SparsityLevels(source, tokens, search, stages) as levels:
        choice = None
        # The highest first: only the first refinement takes all its steps, and a high sparsity gains most from them.
        sparsities: Sequence[float] = sorted(settings.levels, reverse=True)
        curve: tuple[float, ...] = OTHER_SPARSITIES if len(sparsities) == 1 and source.planes == 1 else ()
        if settings.has_budget:
            choice = choose(levels, settings.calibration, Budget(settings.max_kl, settings.min_top1))
            sparsities = [choice.sparsity]
            neighbours = (round(choice.sparsity + step, 4) for step in (-_CURVE_STEP, _CURVE_STEP))
            curve = tuple(sparsity for sparsity in neighbours if 0.0 < sparsity <= MAX_SPARSITY)
        results = {sparsity: levels.at(sparsity) for sparsity in sparsities}
        return {sparsity: levels.with_curve(result, curve) for sparsity, result in sorted(results.items())}, choice


def _recipe(plan: Plan, model: Prepared, results: Mapping[float, SearchResult], choice: Choice | None) -> Recipe:
    settings, levels = plan.settings, []
    by_block = [list(plan.config.projections(block)) for block in range(plan.config.num_blocks)]
    for sparsity, result in results.items():
        recipes = result.projections
        blocks = (
            mean_sparsity([recipes[p.name].sparsity for p in block], [p.num_parameters for p in block])
            for block in by_block
        )
        entries = tuple(recipes[projection.name] for projection in chain.from_iterable(by_block))
        levels.append(SparsityLevel(sparsity, entries, tuple(blocks)))
    # The search record: what all sparsity levels share, and what differs between them.
    shared = ("settings", "kl_tokens")
    search = {key: next(iter(results.values())).details[key] for key in shared}
    search["settings"] = {key: value for key, value in search["settings"].items() if key != "sparsity"}
    own = ({key: value for key, value in each.details.items() if key not in shared} for each in results.values())
    search["levels"] = [{"sparsity": sparsity, **details} for sparsity, details in zip(results, own, strict=True)]
    if model.compared is not None:
        search["coordinates"] = model.compared
    if model.equalized:
        search["equalized"] = model.equalized
    if choice is not None:
        search["budget"] = {"max_kl": settings.max_kl, "min_top1": settings.min_top1, **choice.to_dict()}
    return Recipe(
        base_model=plan.source.name,
        base_revision=plan.source.commit,
        method=settings.method,
        default=settings.default_of(results),
        levels=tuple(levels),
        calibration=CalibrationRecord(**{k: getattr(model.tokens, k) for k in CalibrationRecord.__dataclass_fields__}),
        search=search,
        versions=library_versions(),
        vision_tensors_left_out=model.checkpoint.vision_tensors,
        dequantised_from=plan.dequantised_from,
        rotation=model.rotation,
        plane_bits=PLANE_BITS if settings.weights == "graded" else (),
    )
