"""A conversion from end to end: preflight, model, calibration tokens, search, recipe, bundle."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor

import wisparse
from wisparse.formats import guard
from wisparse.formats.bundle import Bundle, ProjectionMask, verify_bundle
from wisparse.formats.card import read_inherited
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, ResourceError
from wisparse.formats.folder import clear_leftovers
from wisparse.formats.hub import Source, fetch_source, push_bundle
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
from .gptq import LONGEST, SAMPLES, compare_coordinates, quantise_weights
from .measurement import Budget, Choice, choose, fresh_text, measure
from .planes import plane_ratios, read_in_planes
from .preflight import Plan, preflight
from .processes import Processes, Progress, joined
from .report import Report
from .rotation import rotate
from .search.allocation import mean_sparsity
from .search.search import OTHER_SPARSITIES, SearchResult, SearchSettings, SparsityLevels
from .settings import MAX_SPARSITY, ConvertOptions, ConvertSettings
from .source import SourceModel, full_config, load_source, small_digests, weight_digests
from .state import Stages, placed_bundle, remove_state

_log = logging.getLogger("wisparse")

# Far from any seed that a person chooses, and from those of the texts that measure (`measurement`).
_DIRECTIONS_SEED_OFFSET, _COORDINATES_SEED_OFFSET = 3_000_003, 4_000_003
# Sparsities that the report shows beside what a budget allowed.
_NEIGHBOURS = 0.05


@dataclass(frozen=True)
class Conversion:
    """A finished conversion. The report has no measurement if an interrupted run had written the bundle already."""

    folder: Path
    plan: Plan
    report: Report
    seconds: dict[str, float]  # stage -> wall-clock seconds
    choice: Choice | None = None  # how a budget was met
    url: str | None = None  # where it was uploaded to


def convert(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    *,
    progress: bool | None = None,
    **settings: Unpack[ConvertOptions],
) -> Path:
    """Convert a Hugging Face causal LM into a sparse bundle.

    Args:
        model: a folder, or a Hub id.
        output_dir: the bundle's folder; by default ``<model-name>-wisparse`` in the current folder.
        progress: draw progress bars; None: bars on a terminal, else a line on stderr every ten seconds.
        settings: the options of ``wisparse convert --help`` with ``_`` in place of ``-``, such as ``sparsity=0.5``
            or ``sparsity=[0.3, 0.5]``; the fields of `ConvertSettings`.

    Returns:
        The bundle's folder.

    Raises:
        WisparseError: its sub-classes say what is wrong; see `wisparse.formats.errors`.
    """
    if progress is not None:
        guard.switch("progress", progress)
    guard.keywords("convert", settings, [field.name for field in fields(ConvertSettings)[2:]])
    given = ConvertSettings(cast(str, model), cast(Path, output_dir), **cast(dict[str, Any], settings))
    run(given, Progress(progress))
    return given.output_dir


def run(settings: ConvertSettings, progress: Progress | None = None) -> Conversion | None:
    """Preflight, conversion and upload, by all processes that torchrun started; None in all but the first."""
    progress = progress or Progress(enabled=False)
    with joined(settings.device) as (processes, device):
        plan = cast(Plan, processes.broadcast(preflight(settings, progress) if processes.leads else None))
        if processes.size > 1 and plan.max_memory is not None:
            wrong = f"with {processes.size} processes each GPU must hold the whole model, and it is too large"
            advice = "start one process, without torchrun, which spreads the model over all GPUs"
            raise ResourceError(f"{plan.source.name}: {wrong}; {advice}")
        if not processes.leads:
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
        # A kill before this: the next run knows the bundle for its own. A failed upload says how to go on.
        if settings.resume:
            remove_state(settings.state_dir, default=settings.work_dir is None)


def _convert(plan: Plan, progress: Progress, processes: Processes) -> Conversion | None:
    """Everything up to the bundle in its place; its state is still there."""
    settings = plan.settings
    with progress.stage("Fetching weights"):
        fetched = fetch_source(settings.model, plan.source.commit) if processes.leads else plan.source
        fetched = processes.broadcast(fetched)
        checkpoint = Checkpoint.open(fetched.folder, complete=full_config)
    stages, small_files, complete = Stages(processes=processes, progress=progress), {}, False
    if processes.leads:
        small_files = small_digests(checkpoint.folder, checkpoint.error)
        with progress.stage("Reading the weights"):
            weight_files = weight_digests(checkpoint) if settings.resume else {}
        fingerprint = _fingerprint(plan, fetched, {**weight_files, **small_files})
        if plan.placed and placed_bundle(settings.state_dir, settings.output_dir) == fingerprint:
            with suppress(BundleError):  # an interrupted run had only not cleaned up
                verify_bundle(settings.output_dir)
                clear_leftovers(Path(os.path.abspath(settings.output_dir)), BUNDLE)
                complete = True
    if processes.broadcast(complete):
        if not processes.leads:
            return None
        _log.warning("the bundle in %s was complete already", settings.output_dir)
        report = Report(Bundle.open(settings.output_dir).recipe, plan.config, None)
        return Conversion(settings.output_dir, plan, report, progress.seconds)
    if processes.leads and settings.resume:
        stages.open(settings.state_dir, fingerprint, default=settings.work_dir is None)
    with closing(stages):
        with progress.stage("Loading the model"):
            source = load_source(fetched.folder, plan.dtype, plan.device, max_memory=plan.max_memory)
            processes.gather(None)
        source, checkpoint, tokens, fresh, record, compared = _prepared(plan, source, checkpoint, stages)
        results, choice = _search(source, tokens, settings, stages)
        if not processes.leads:
            return None
        at = settings.default_of(results) if settings.full_report(plan.device.type) else None
        measurement = measure(source, tokens, results, settings.calibration, at, fresh, progress)
        planes = source.planes
        del source  # the writer copies from the files and needs its memory more than a model does
        recipe = _recipe(plan, fetched, checkpoint, tokens, results, choice, record, compared)
        report = Report(recipe, plan.config, measurement)
        masks = {}
        for sparsity, result in results.items():
            entries, scales = result.projections.items(), result.channel_scales
            masks[sparsity] = {name: _mask(scales[name], one, planes) for name, one in entries}
        with progress.stage("Writing the bundle"):
            # The weights are compared with what was opened wherever they are read; these are read anew.
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
                extra_files=report.files(read_inherited(checkpoint.folder), settings.upload_repo),
                overwrite=settings.overwrite,
                before_swap=stages.mark_bundle,
            )
    return Conversion(settings.output_dir, plan, report, progress.seconds, choice)


def _mask(scale: Tensor, found: ProjectionRecipe, planes: int) -> ProjectionMask:
    if planes == 1:
        return ProjectionMask(scale, found.threshold, found.sparsity)
    thresholds = [found.threshold * ratio for ratio in plane_ratios(scale, planes)]
    # In float32 a further one must not come out below the first.
    rounded = torch.tensor(thresholds, dtype=torch.float32).cummax(0).values.tolist()
    return ProjectionMask(
        scale.unflatten(-1, (planes, -1))[..., 0, :].contiguous(), rounded[0], found.sparsity, tuple(rounded)
    )


def library_versions() -> dict[str, str]:
    """What a recipe's numbers depend on besides the settings: recorded, and part of the fingerprint."""
    # Ours is not asked of the installed distribution: a checkout on the path has none.
    libraries = ("torch", "transformers", "tokenizers")
    return {"wisparse": wisparse.__version__, **{name: metadata.version(name) for name in libraries}}


def _fingerprint(plan: Plan, fetched: Source, files: Mapping[str, str]) -> dict[str, Any]:
    """Everything that a bundle's bytes depend on, as JSON values by name."""
    settings = plan.settings
    return {
        **files,
        **settings.fingerprint(),
        "calibration": plan.tokens.digest if plan.tokens else plan.calibration,
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type,
        "computing in": str(plan.dtype),
        **library_versions(),
        "name": fetched.name,
        "commit": fetched.commit,
        "dtype": settings.dtype,
        "max_shard_size": settings.max_shard_size,
        "upload_repo": settings.upload_repo,
        "full report": settings.full_report(plan.device.type),
    }


def _prepared(
    plan: Plan, source: SourceModel, checkpoint: Checkpoint, stages: Stages
) -> tuple[
    SourceModel,
    Checkpoint,
    CalibrationTokens,
    CalibrationTokens | None,
    RotationRecord | None,
    dict[str, Any] | None,
]:
    """The model with the weights that the bundle gets, their checkpoint, the calibration text, the text to measure on
    where the model wrote one, and the records of the rotation and of the coordinates that were compared."""
    settings = plan.settings
    samples, length, seed = settings.num_samples, settings.length, settings.seed
    sizes = {
        "calibration": (samples, length, seed),
        # Another text than the calibration's, half as long: directions need less of it than thresholds.
        "rotation": (-(-samples // 2), length, seed + _DIRECTIONS_SEED_OFFSET),
        "coordinates": (SAMPLES, min(LONGEST, length), seed + _COORDINATES_SEED_OFFSET),
        "measurement": fresh_text(samples, length, seed),
    }
    texts = {}
    if plan.tokens is None:
        unused = {"none": {"rotation", "coordinates"}, "pca": {"coordinates"}}.get(settings.rotation, set())
        texts = _self_texts(source, {name: sizes[name] for name in sizes if name not in unused}, stages)
    tokens = plan.tokens or texts["calibration"]

    @cache
    def text(name: str) -> CalibrationTokens:
        if texts:
            return texts[name]
        return load_calibration(settings.calibration, source.tokenizer, None, *sizes[name], stages.progress)

    directions, record, compared = partial(text, "rotation"), None, None
    if settings.rotation == "auto":
        sparsity = settings.usual_default if settings.has_budget else settings.default_of(settings.levels)
        held_back = partial(text, "coordinates")
        kls = compare_coordinates(source, checkpoint, tokens, directions, held_back, sparsity, stages)
        compared = {"sparsity": sparsity, "kl": kls}
    if settings.rotation == "pca" or (compared and kls["pca"] < kls["none"]):
        source, checkpoint, record = rotate(source, checkpoint, tokens, directions, stages)
    if settings.weights != "native":  # `source` computes with the quantized weights from here on
        kind, numbers = settings.weights, checkpoint.dtype
        # int4 is fitted to the text of the rotation too, which is there already.
        fit = tokens.joined(text("rotation")) if kind == "int4" and settings.rotation != "none" else tokens
        matrices = quantise_weights(source, fit, kind, numbers, stages)
        checkpoint = checkpoint.quantize(matrices, numbers)
        if kind == "graded":
            source = read_in_planes(source, matrices)
    return source, checkpoint, tokens, texts.get("measurement"), record, compared


def _self_texts(
    source: SourceModel, sizes: Mapping[str, tuple[int, int, int]], stages: Stages
) -> dict[str, CalibrationTokens]:
    """What the model writes, by the first process and side by side."""

    def write() -> dict[str, list[list[int]]]:
        found = {}
        if stages.processes.leads:
            texts = write_calibration(source.model, source.tokenizer, [*sizes.values()], stages.progress)
            found = {name: text.input_ids.tolist() for name, text in zip(sizes, texts, strict=True)}
        return stages.processes.broadcast(found)

    rows = stages.run("calibration", write)
    return {name: CalibrationTokens.from_rows(rows[name], "self", seed) for name, (_, _, seed) in sizes.items()}


def _search(
    source: SourceModel, tokens: CalibrationTokens, settings: ConvertSettings, stages: Stages
) -> tuple[dict[float, SearchResult], Choice | None]:
    """The sparsity levels, ascending, and how a budget was met."""
    names = ("method", "num_generations", "num_offspring", "seed")
    search = SearchSettings(search=settings.chosen_search, **{name: getattr(settings, name) for name in names})
    with SparsityLevels(source, tokens, search, stages) as levels:
        choice = None
        # The highest first: there is most to gain from the steps that only the first one goes all of.
        wanted: Sequence[float] = sorted(settings.levels, reverse=True)
        others: tuple[float, ...] = OTHER_SPARSITIES if len(wanted) == 1 and source.planes == 1 else ()
        if settings.has_budget:
            choice = choose(levels, settings.calibration, Budget(settings.max_kl, settings.min_top1))
            wanted = [choice.sparsity]
            beside = (round(choice.sparsity + step, 4) for step in (-_NEIGHBOURS, _NEIGHBOURS))
            others = tuple(one for one in beside if 0.0 < one <= MAX_SPARSITY)
        found = {sparsity: levels.at(sparsity) for sparsity in wanted}
        return {one: levels.with_curve(result, others) for one, result in sorted(found.items())}, choice


def _recipe(
    plan: Plan,
    fetched: Source,
    checkpoint: Checkpoint,
    tokens: CalibrationTokens,
    results: Mapping[float, SearchResult],
    choice: Choice | None,
    rotation: RotationRecord | None,
    compared: Mapping[str, Any] | None,
) -> Recipe:
    settings, levels = plan.settings, []
    by_block = [list(plan.config.projections(block)) for block in range(plan.config.num_blocks)]
    for sparsity, result in results.items():
        found = result.projections
        blocks = (
            mean_sparsity([found[one.name].sparsity for one in block], [one.num_parameters for one in block])
            for block in by_block
        )
        entries = tuple(found[one.name] for one in chain.from_iterable(by_block))
        levels.append(SparsityLevel(sparsity, entries, tuple(blocks)))
    # How the search went: what holds for all sparsity levels, and what each has of its own.
    shared = ("settings", "kl_tokens")
    search = {key: next(iter(results.values())).details[key] for key in shared}
    search["settings"] = {key: value for key, value in search["settings"].items() if key != "sparsity"}
    own = ({key: value for key, value in one.details.items() if key not in shared} for one in results.values())
    search["levels"] = [{"sparsity": sparsity, **details} for sparsity, details in zip(results, own, strict=True)]
    if compared is not None:
        search["coordinates"] = compared
    if choice is not None:
        search["budget"] = {"max_kl": settings.max_kl, "min_top1": settings.min_top1, **choice.to_dict()}
    return Recipe(
        base_model=fetched.name,
        base_revision=fetched.commit,
        method=settings.method,
        default=settings.default_of(results),
        levels=tuple(levels),
        calibration=CalibrationRecord(**{key: getattr(tokens, key) for key in CalibrationRecord.__dataclass_fields__}),
        search=search,
        versions=library_versions(),
        vision_tensors_left_out=checkpoint.vision_tensors,
        rotation=rotation,
        plane_bits=PLANE_BITS if settings.weights == "graded" else (),
    )
