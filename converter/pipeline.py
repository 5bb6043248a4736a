"""A conversion from end to end: preflight, model, calibration tokens, search, recipe, bundle.

    convert(model) -> folder          the public call, `wisparse.convert`
    run(settings) -> Conversion       the same, with what was measured on the way

Equal settings give equal bytes on one machine: nothing random is global, and neither a time nor a path of the machine
gets into the bundle. What took how long is in `Conversion.seconds`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

import wisparse
from wisparse.formats.bundle import Bundle, ProjectionMask, is_document
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import ResourceError
from wisparse.formats.guard import arguments
from wisparse.formats.guard.folder import clear_leftovers
from wisparse.formats.guard.places import expand
from wisparse.formats.hub import Source, fetch_source, push_bundle
from wisparse.formats.in_codes import in_codes
from wisparse.formats.machine.device import choose_device
from wisparse.formats.model.quantised import Kind
from wisparse.formats.record.card import Evaluation, read_inherited, render_card
from wisparse.formats.record.recipe import CalibrationRecord, ProjectionRecipe, Recipe, Rung
from wisparse.formats.write import BUNDLE, write_bundle

from .model.fingerprint import Hashes, small_digests, weight_digests
from .model.source import SourceModel, load_source
from .preflight import Plan, check_places, preflight, require_resources
from .quality.figures import FIGURES
from .quality.measurement import Measurement, measure
from .quality.report import expectation, render_report, verdict
from .searches.search import SearchResult, SearchSettings, search
from .settings import MAX_SPARSITY, ConvertSettings, default_output
from .text.calibration import load_calibration
from .text.tokens import CalibrationTokens
from .weights.stage import quantise_weights
from .work.finish import is_finished, remove_mark, write_mark
from .work.processes import ALONE, LeadersStore, Processes, joined
from .work.progress import Progress
from .work.state import NO_STATE, SharedStore, StateStore, Store

__all__ = ["Conversion", "convert", "execute", "run", "run_all"]

_log = logging.getLogger("wisparse")

# What a recipe's numbers depend on besides the settings; recorded, and part of the state's fingerprint.
_LIBRARIES = ("torch", "transformers", "tokenizers")

# Results that do not depend on the sparsity: the text a model writes, and what the default search measures by backward
# passes. By far the most of the work.
_SPARSITY_FREE = ("calibration", "weights/", "fisher/fisher/", "fisher/damage/")


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        folder: the bundle.
        recipe: what was decided.
        measurement: what it costs, on fresh text; None if an interrupted run had written the bundle already.
        plan: what the preflight found.
        seconds: stage -> wall-clock seconds; what several conversions share is the first one's.
        url: where it was uploaded to, or None.
    """

    folder: Path
    recipe: Recipe
    measurement: Measurement | None
    plan: Plan
    seconds: dict[str, float]
    url: str | None


def convert(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    *,
    sparsity: float = ConvertSettings.sparsity,
    method: str = ConvertSettings.method,
    search: str = ConvertSettings.search,
    num_generations: int | None = None,
    num_offspring: int | None = None,
    calibration: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "self",
    num_samples: int = ConvertSettings.num_samples,
    seq_len: int | None = None,
    seed: int = ConvertSettings.seed,
    weights: str = ConvertSettings.weights,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    max_shard_size: str | int = ConvertSettings.max_shard_size,
    work_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Path:
    """Convert a Hugging Face causal LM into a sparse bundle.

    Args:
        model: a folder, or a Hub id.
        output_dir: the bundle's folder; by default ``<model-name>-wisparse-50`` in the current folder, for 50%.
        calibration: ``self``, ``paper``, a Hub data set, or one or several paths.
        progress: draw progress bars; None draws them if stderr is a terminal.

    The others are those of `ConvertSettings`.

    Returns:
        The bundle's folder.

    Raises:
        WisparseError: its sub-classes say what is wrong; see `wisparse.formats.errors`.
    """
    name = arguments.place("model", model)
    out = None if output_dir is None else expand(arguments.place("output_dir", output_dir))
    work = None if work_dir is None else expand(arguments.place("work_dir", work_dir))
    arguments.number("sparsity", sparsity, 0.0, MAX_SPARSITY, f"a number from 0 to {MAX_SPARSITY}")
    sources = calibration if isinstance(calibration, (list, tuple)) else [calibration]
    if not isinstance(max_shard_size, str):
        max_shard_size = str(arguments.integer("max_shard_size", max_shard_size, 1))
    if progress is not None:
        arguments.switch("progress", progress)
    settings = ConvertSettings(
        model=name,
        output_dir=out or default_output(name, sparsity),
        sparsity=sparsity,
        method=method,
        search=search,
        num_generations=num_generations,
        num_offspring=num_offspring,
        calibration=tuple(arguments.place("calibration", one) for one in sources),
        num_samples=num_samples,
        seq_len=seq_len,
        seed=seed,
        weights=weights,
        dtype=dtype,
        device=device,
        revision=revision,
        max_shard_size=max_shard_size,
        work_dir=work,
        resume=resume,
        overwrite=overwrite,
    )
    run(settings, Progress(progress))
    return settings.output_dir


def run(settings: ConvertSettings, progress: Progress | None = None) -> Conversion | None:
    """Preflight and conversion; arguments and errors as `convert`. Of several processes the first one returns it."""
    conversions = run_all([settings], progress or Progress(enabled=False))
    return conversions[0] if conversions else None


def run_all(all_settings: Sequence[ConvertSettings], progress: Progress) -> list[Conversion]:
    """Preflight and conversion of settings that differ in their sparsity alone, by all processes that torchrun started.

    Returns:
        One conversion each; none in processes other than the first.
    """
    with joined(all_settings[0].device) as (processes, device):
        plans = [preflight(settings, progress) for settings in all_settings] if processes.leads else []
        plans = processes.broadcast(plans)
        if not processes.leads:
            progress = Progress(enabled=False)
        if processes.size > 1 and any(plan.max_memory is not None for plan in plans):
            raise ResourceError(
                f"{plans[0].source.name}: with {processes.size} processes each GPU must hold the whole model, and it "
                "is too large; start one process, without torchrun, which spreads the model over all GPUs"
            )
        if not processes.leads:
            plans = [replace(plan, device=choose_device(device)) for plan in plans]
        conversions = execute(plans, progress, processes)
    try:
        return [_upload(conversion, progress) for conversion in conversions]
    finally:
        # A kill before this: the next run knows the bundles for its own. A failed upload says how to go on.
        for conversion in conversions:
            if conversion.plan.settings.resume:
                remove_mark(conversion.folder)


def execute(plans: Sequence[Plan], progress: Progress, processes: Processes = ALONE) -> list[Conversion]:
    """Carry out plans that differ in their sparsity alone, up to the bundles; uploading is the caller's.

    The model is loaded once, and statistics are shared. Each bundle has the bytes it would have by itself. State is
    removed when all are done; the marks of the finished bundles (`finish`) are the caller's to remove. Processes other
    than the first one help, and return nothing.
    """
    common = _Common() if len(plans) > 1 else None
    found = [_execute(plan, progress, common, processes) for plan in plans]
    if processes.leads:
        for plan in plans:
            _remove_state(plan.settings)
    return [conversion for conversion in found if conversion is not None]


@dataclass
class _Common:
    """What several conversions of one model share: the model, and results that do not depend on the sparsity."""

    source: SourceModel | None = None
    results: dict[str, bytes] = field(default_factory=dict)
    weights: Hashes = field(default_factory=dict)


def _execute(plan: Plan, progress: Progress, common: _Common | None, processes: Processes) -> Conversion | None:
    try:
        return _convert(plan, progress, common, processes)
    except torch.cuda.OutOfMemoryError as error:
        raise ResourceError(
            f"{plan.source.name}: {plan.device} has too little memory for the conversion; "
            "lower --seq-len or --num-samples, or choose another --device"
        ) from error


def _convert(plan: Plan, progress: Progress, common: _Common | None, processes: Processes) -> Conversion | None:
    settings = plan.settings
    with progress.stage("Fetching weights"):
        fetched = fetch_source(settings.model, plan.source.commit) if processes.leads else plan.source
        fetched = processes.broadcast(fetched)
        checkpoint = Checkpoint.open(fetched.folder)
    origin = _origin(plan, fetched, checkpoint, progress, common) if processes.leads else None
    finished = origin is not None and plan.finished and is_finished(settings.output_dir, origin.made_from)
    if processes.broadcast(finished):
        return _found_finished(plan, progress) if processes.leads else None
    if plan.finished and processes.leads:  # the bundle in place is of another conversion after all
        check_places(settings, fetched, False)
        require_resources(plan)
    with _state(plan, origin, common) if origin else nullcontext(NO_STATE) as own:
        store = own if processes.size == 1 else LeadersStore(own, processes)
        source = common.source if common else None
        if source is None:
            with progress.stage("Loading the model"):
                source = load_source(fetched.folder, plan.dtype, plan.device, max_memory=plan.max_memory)
                processes.gather(None)
        if common:
            common.source = source
        tokens = plan.tokens
        if tokens is None:
            tokens = _self_calibration(source, settings, own, progress) if processes.leads else None
            tokens = cast(CalibrationTokens, processes.broadcast(tokens))
        if settings.weights != "native":
            checkpoint = _in_codes(source, tokens, checkpoint, settings, progress, store)
        result = search(source, tokens, _search_settings(settings), progress, store, processes)
        if origin is None:  # a helper
            return None
        measurement = measure(
            source,
            tokens,
            result,
            calibration=settings.calibration,
            sensitivity=settings.full_report(plan.device.type),
            progress=progress,
        )
        del source  # the writer copies from the files and needs its memory more than a model does
        recipe = _recipe(plan, fetched, checkpoint, tokens, result)
        with progress.stage("Writing the bundle"):
            _write(plan, origin, checkpoint, recipe, result, measurement)
    return Conversion(settings.output_dir, recipe, measurement, plan, progress.take_seconds(), None)


def _in_codes(
    source: SourceModel,
    tokens: CalibrationTokens,
    checkpoint: Checkpoint,
    settings: ConvertSettings,
    progress: Progress,
    store: Store,
) -> Checkpoint:
    """The checkpoint with its projections in fewer bits; ``source`` computes with them from here on."""
    matrices = quantise_weights(source, tokens, cast(Kind, settings.weights), checkpoint.dtype, progress, store)
    return in_codes(checkpoint, matrices, checkpoint.dtype)


def _found_finished(plan: Plan, progress: Progress) -> Conversion:
    """The bundle of a run that was killed before it could clean up."""
    out = plan.settings.output_dir
    clear_leftovers(Path(os.path.abspath(out)), BUNDLE)
    _log.warning("the bundle in %s was complete already", out)
    return Conversion(out, Bundle.open(out).recipe, None, plan, progress.take_seconds(), None)


def _upload(conversion: Conversion, progress: Progress) -> Conversion:
    settings = conversion.plan.settings
    if settings.upload_repo is None:
        return conversion
    with progress.stage("Uploading"):
        url = push_bundle(settings.output_dir, settings.upload_repo, settings.private)
    return replace(conversion, url=url, seconds={**conversion.seconds, **progress.take_seconds()})


# ---------------------------------------------------------------------- state


@dataclass(frozen=True)
class _Origin:
    """What a bundle is made from.

    Attributes:
        fingerprint: what the results of the search depend on.
        small: file of the source -> sha256, for all but its weights.
        weights: what `fingerprint.weight_digests` found.
        made_from: the fingerprint and what else decides the bundle's bytes.
    """

    fingerprint: dict[str, Any]
    small: dict[str, str]
    weights: Hashes
    made_from: dict[str, Any]


def _origin(plan: Plan, fetched: Source, checkpoint: Checkpoint, progress: Progress, common: _Common | None) -> _Origin:
    settings = plan.settings
    small = small_digests(checkpoint.folder, checkpoint.error)
    weights: Hashes = {}
    if settings.resume:
        with progress.stage("Reading the weights"):
            known = StateStore.hashes(settings.state_dir)
            weights = weight_digests(checkpoint, {**known, **(common.weights if common else {})})
    if common:
        common.weights = weights
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type
    fingerprint = {
        **{name: found[-1] for name, found in weights.items()},
        **{name: digest for name, digest in small.items() if not is_document(name)},
        **settings.deciding(),
        "calibration": plan.tokens.digest if plan.tokens else plan.calibration,
        "device": device,
        "computing in": str(plan.dtype),
        **_versions(),
    }
    made_from = {
        **fingerprint,
        **small,
        "name": fetched.name,
        "commit": fetched.commit,
        "dtype": settings.dtype,
        "max_shard_size": settings.max_shard_size,
        "upload_repo": settings.upload_repo,
    }
    return _Origin(fingerprint, small, weights, made_from)


@contextmanager
def _state(plan: Plan, origin: _Origin, common: _Common | None) -> Iterator[Store]:
    settings = plan.settings
    if not settings.resume:
        yield SharedStore(NO_STATE, common.results, _SPARSITY_FREE) if common else NO_STATE
        return
    with StateStore.open(settings.state_dir, origin.fingerprint, default=settings.work_dir is None) as store:
        store.keep_hashes(origin.weights)
        if store.changed:
            _log.warning("starting over, because this differs from the interrupted run: %s", "; ".join(store.changed))
        elif store.resumed:
            _log.warning("resuming from %s (%d results)", settings.state_dir, store.resumed)
        yield SharedStore(store, common.results, _SPARSITY_FREE) if common else store


def _remove_state(settings: ConvertSettings) -> None:
    if settings.resume and os.path.lexists(settings.state_dir):
        with StateStore.open(settings.state_dir, None, default=settings.work_dir is None) as store:
            store.remove()


def _self_calibration(
    source: SourceModel, settings: ConvertSettings, store: Store, progress: Progress
) -> CalibrationTokens:
    shape = (settings.num_samples, settings.length)
    saved = store.load("calibration")
    if saved is not None:
        ids = torch.frombuffer(bytearray(saved), dtype=torch.int64).reshape(shape)
        return CalibrationTokens.from_rows(ids.tolist(), "self", settings.seed)
    tokens = load_calibration("self", source.tokenizer, source.model, *shape, settings.seed, progress)
    store.save("calibration", tokens.input_ids.contiguous().numpy().tobytes())
    return tokens


# ---------------------------------------------------------------------- result


def _versions() -> dict[str, str]:
    # Ours is not asked of the installed distribution: a checkout on the path has none.
    return {"wisparse": wisparse.__version__, **{name: metadata.version(name) for name in _LIBRARIES}}


def _search_settings(settings: ConvertSettings) -> SearchSettings:
    return SearchSettings(
        sparsity=settings.sparsity,
        method=settings.method,
        search=settings.chosen_search,
        num_generations=settings.num_generations,
        num_offspring=settings.num_offspring,
        seed=settings.seed,
    )


def _recipe(
    plan: Plan, fetched: Source, checkpoint: Checkpoint, tokens: CalibrationTokens, result: SearchResult
) -> Recipe:
    settings = plan.settings
    projections = list(plan.config.projections())
    entries = tuple(result.projections[projection.name] for projection in projections)
    blocks = []
    for block in range(plan.config.num_blocks):
        mine = [(p.num_parameters, e.sparsity) for p, e in zip(projections, entries, strict=True) if p.block == block]
        blocks.append(sum(size * sparsity for size, sparsity in mine) / sum(size for size, _ in mine))
    return Recipe(
        base_model=fetched.name,
        base_revision=fetched.commit,
        method=settings.method,
        default=settings.sparsity,
        rungs=(Rung(settings.sparsity, entries, tuple(blocks)),),
        calibration=CalibrationRecord(
            source=tokens.source,
            num_samples=tokens.num_samples,
            seq_len=tokens.seq_len,
            num_tokens=tokens.num_tokens,
            seed=tokens.seed,
            digest=tokens.digest,
        ),
        search=result.details,
        versions=_versions(),
        vision_tensors_left_out=checkpoint.vision_tensors,
    )


def _write(
    plan: Plan,
    origin: _Origin,
    checkpoint: Checkpoint,
    recipe: Recipe,
    result: SearchResult,
    measurement: Measurement,
) -> None:
    settings = plan.settings
    # The weights are compared with what was opened wherever they are read; these are read anew.
    for name, digest in small_digests(checkpoint.folder, checkpoint.error).items():
        if origin.small.get(name) != digest:
            raise checkpoint.error(f"{name}: changed while the model was converted; run this again")
    masks = {entry.name: _mask(entry, result) for entry in recipe.projections}
    report = render_report(
        recipe,
        plan.config,
        quality=measurement.quality,
        quality_text=measurement.text,
        sensitivity=measurement.sensitivity,
        curve=measurement.curve,
    )
    card = render_card(
        recipe,
        read_inherited(checkpoint.folder),
        evaluation=_evaluation(measurement, recipe),
        figures=[(name, caption) for name, caption in FIGURES.items() if name in report],
        repo_id=settings.upload_repo,
    )
    write_bundle(
        checkpoint,
        recipe,
        {recipe.default: masks},
        settings.output_dir,
        dtype=settings.dtype,
        max_shard_size=settings.max_shard_size,
        extra_files={"README.md": card.encode(), **report},
        overwrite=settings.overwrite,
        before_swap=partial(write_mark, settings.output_dir, origin.made_from) if settings.resume else None,
    )


def _mask(entry: ProjectionRecipe, result: SearchResult) -> ProjectionMask:
    return ProjectionMask(
        result.channel_scales[entry.name].detach().cpu().float().contiguous(),
        entry.threshold,
        entry.sparsity,
    )


def _evaluation(measurement: Measurement, recipe: Recipe) -> Evaluation:
    found = measurement.quality.sparse
    return Evaluation(
        text=measurement.text,
        num_tokens=found.num_tokens,
        protocol="every token sparse",
        dense_perplexity=found.dense_perplexity,
        sparse_perplexity=found.perplexity,
        kl=found.kl,
        top1_agreement=found.top1_agreement,
        realised_sparsity=measurement.quality.realised_sparsity or 0.0,
        verdict=verdict(recipe.sparsity, measurement.quality),
        expectation=expectation(recipe.sparsity, measurement.quality),
    )
