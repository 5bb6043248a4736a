"""A conversion from end to end: preflight, model, calibration tokens, search, recipe, bundle.

    convert(model) -> folder          the public call, `wisparse.convert`
    run(settings) -> Conversion       the same, with what was measured on the way

Equal settings give equal bytes on one machine: nothing random is global, and neither a time nor a path of the machine
gets into the bundle. What took how long is in `Conversion.seconds`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

import wisparse
from wisparse.formats import guard
from wisparse.formats.bundle import Bundle, ProjectionMask, is_document
from wisparse.formats.card import Evaluation, read_inherited, render_card
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.derived_checkpoint import in_codes
from wisparse.formats.errors import ResourceError, UsageError
from wisparse.formats.folder import clear_leftovers
from wisparse.formats.guard import expand
from wisparse.formats.hub import Source, fetch_source, push_bundle
from wisparse.formats.machine import choose_device
from wisparse.formats.manifest import BUNDLE, CalibrationRecord, Recipe, SparsityLevel
from wisparse.formats.weight_types import Kind
from wisparse.formats.write import write_bundle

from .calibration import load_calibration
from .choice import Budget, Choice, choose
from .documents import CalibrationTokens
from .gptq import quantise_weights
from .measurement import Measurement, choice_text, measure
from .preflight import Plan, check_places, preflight, require_resources
from .processes import ALONE, LeadersStore, Processes, Progress, joined
from .report import FIGURES, expectation, grade, render_report, verdict
from .rotation import Turned, rotate
from .search.search import OTHER_SPARSITIES, SearchResult, SearchSettings, SparsityLevels
from .settings import MAX_SPARSITY, ConvertSettings, default_output
from .source import Hashes, SourceModel, load_source, small_digests, weight_digests
from .state import NO_STATE, StateStore, Store, is_finished, pack, remove_mark, unpack, write_mark

_log = logging.getLogger("wisparse")

# What a recipe's numbers depend on besides the settings; recorded, and part of the state's fingerprint.
_LIBRARIES = ("torch", "transformers", "tokenizers")

# Far from any seed that a person chooses, and from those of the texts that measure (`measurement`).
_DIRECTIONS_SEED_OFFSET = 3_000_003

# How far beside what a budget allowed the report looks.
_NEIGHBOURS = 0.05


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        folder: the bundle.
        recipe: what was decided.
        measurement: what it costs, on fresh text; None if an interrupted run had written the bundle already.
        plan: what the preflight found.
        seconds: stage -> wall-clock seconds.
        url: where it was uploaded to, or None.
        choice: how a budget was met; None without one, or if an interrupted run had written the bundle already.
    """

    folder: Path
    recipe: Recipe
    measurement: Measurement | None
    plan: Plan
    seconds: dict[str, float]
    url: str | None
    choice: Choice | None = None


def convert(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    *,
    sparsity: float | Sequence[float] | None = None,
    default: float | None = None,
    max_kl: float | None = None,
    min_top1: float | None = None,
    method: str = ConvertSettings.method,
    search: str = ConvertSettings.search,
    num_generations: int | None = None,
    num_offspring: int | None = None,
    calibration: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "self",
    num_samples: int = ConvertSettings.num_samples,
    seq_len: int | None = None,
    seed: int = ConvertSettings.seed,
    rotation: str = ConvertSettings.rotation,
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
        output_dir: the bundle's folder; by default ``<model-name>-wisparse`` in the current folder, and with one
            sparsity ``<model-name>-wisparse-50``.
        sparsity: one or several, the bundle's sparsity levels; by default 0.3, 0.4 and 0.5.
        max_kl, min_top1: find the highest sparsity that keeps them, instead of ``sparsity``.
        calibration: ``self``, ``paper``, a Hub data set, or one or several paths.
        progress: draw progress bars; None draws them if stderr is a terminal.

    The others are those of `ConvertSettings`.

    Returns:
        The bundle's folder.

    Raises:
        WisparseError: its sub-classes say what is wrong; see `wisparse.formats.errors`.
    """
    name = guard.place("model", model)
    out = None if output_dir is None else expand(guard.place("output_dir", output_dir))
    work = None if work_dir is None else expand(guard.place("work_dir", work_dir))
    sparsities = _sparsities(sparsity)
    if default is not None:
        default = guard.number("default", default, 0.0, MAX_SPARSITY, f"a number from 0 to {MAX_SPARSITY}")
    sources = calibration if isinstance(calibration, (list, tuple)) else [calibration]
    if not isinstance(max_shard_size, str):
        max_shard_size = str(guard.integer("max_shard_size", max_shard_size, 1))
    if progress is not None:
        guard.switch("progress", progress)
    settings = ConvertSettings(
        model=name,
        output_dir=out or default_output(name, sparsities),
        sparsities=sparsities,
        default=default,
        max_kl=max_kl,
        min_top1=min_top1,
        method=method,
        search=search,
        num_generations=num_generations,
        num_offspring=num_offspring,
        calibration=tuple(guard.place("calibration", one) for one in sources),
        num_samples=num_samples,
        seq_len=seq_len,
        seed=seed,
        rotation=rotation,
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


def _sparsities(given: Any) -> tuple[float, ...]:
    if given is None:
        return ()
    words = f"a number from 0 to {MAX_SPARSITY}, or several"
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise UsageError(f"sparsity: expected {words}, found none")
    return tuple(sorted(guard.number("sparsity", value, 0.0, MAX_SPARSITY, words) for value in values))


def run(settings: ConvertSettings, progress: Progress | None = None) -> Conversion | None:
    """Preflight and conversion, by all processes that torchrun started; arguments and errors as `convert`.

    Returns:
        The conversion; None in processes other than the first.
    """
    progress = progress or Progress(enabled=False)
    with joined(settings.device) as (processes, device):
        plan = processes.broadcast(preflight(settings, progress) if processes.leads else None)
        plan = cast(Plan, plan)
        if not processes.leads:
            progress = Progress(enabled=False)
        if processes.size > 1 and plan.max_memory is not None:
            raise ResourceError(
                f"{plan.source.name}: with {processes.size} processes each GPU must hold the whole model, and it "
                "is too large; start one process, without torchrun, which spreads the model over all GPUs"
            )
        if not processes.leads:
            plan = replace(plan, device=choose_device(device))
        conversion = execute(plan, progress, processes)
    if conversion is None:
        return None
    try:
        return _upload(conversion, progress)
    finally:
        # A kill before this: the next run knows the bundle for its own. A failed upload says how to go on.
        if settings.resume:
            remove_mark(conversion.folder)


def execute(plan: Plan, progress: Progress, processes: Processes = ALONE) -> Conversion | None:
    """Carry out a plan, up to the bundle; uploading is the caller's.

    State is removed when it is done; the mark of the finished bundle (`finish`) is the caller's to remove. Processes
    other than the first one help, and return nothing.
    """
    try:
        conversion = _convert(plan, progress, processes)
    except torch.cuda.OutOfMemoryError as error:
        raise ResourceError(
            f"{plan.source.name}: {plan.device} has too little memory for the conversion; "
            "lower --seq-len or --num-samples, or choose another --device"
        ) from error
    if processes.leads:
        _remove_state(plan.settings)
    return conversion


def _convert(plan: Plan, progress: Progress, processes: Processes) -> Conversion | None:
    settings = plan.settings
    with progress.stage("Fetching weights"):
        fetched = fetch_source(settings.model, plan.source.commit) if processes.leads else plan.source
        fetched = processes.broadcast(fetched)
        checkpoint = Checkpoint.open(fetched.folder)
    origin = _origin(plan, fetched, checkpoint, progress) if processes.leads else None
    finished = origin is not None and plan.finished and is_finished(settings.output_dir, origin.made_from)
    if processes.broadcast(finished):
        return _already_complete(plan, progress) if processes.leads else None
    if plan.finished and processes.leads:  # the bundle in place is of another conversion after all
        check_places(settings, fetched, False)
        require_resources(plan)
    with _state(plan, origin) if origin else nullcontext(NO_STATE) as own:
        store = own if processes.size == 1 else LeadersStore(own, processes)
        with progress.stage("Loading the model"):
            source = load_source(fetched.folder, plan.dtype, plan.device, max_memory=plan.max_memory)
            processes.gather(None)
        tokens = plan.tokens
        if tokens is None:
            tokens = _self_calibration(source, settings, own, progress) if processes.leads else None
            tokens = cast(CalibrationTokens, processes.broadcast(tokens))
        turned = None
        if settings.rotation != "none":
            text = partial(_directions_text, source, tokens, settings, progress)
            turned = rotate(source, checkpoint, tokens, text, progress, store, processes)
            source, checkpoint = turned.source, turned.checkpoint
        if settings.weights != "native":
            kind, numbers = cast(Kind, settings.weights), checkpoint.dtype
            checkpoint = in_codes(
                checkpoint, quantise_weights(source, tokens, kind, numbers, progress, store), numbers
            )  # `source` computes with these from here on
        results, choice = _search(source, tokens, settings, progress, store, processes)
        if origin is None:  # a helper
            return None
        default = settings.default_of(results)
        measurement = measure(
            source,
            tokens,
            results,
            default=default,
            calibration=settings.calibration,
            sensitivity=settings.full_report(plan.device.type),
            progress=progress,
        )
        del source  # the writer copies from the files and needs its memory more than a model does
        recipe = _recipe(plan, fetched, checkpoint, tokens, results, choice, turned)
        with progress.stage("Writing the bundle"):
            _write(plan, origin, checkpoint, recipe, results, measurement)
    return Conversion(settings.output_dir, recipe, measurement, plan, progress.take_seconds(), None, choice)


def _directions_text(
    source: SourceModel, tokens: CalibrationTokens, settings: ConvertSettings, progress: Progress
) -> CalibrationTokens:
    """Another text than the calibration's, half as long: directions need less of it than thresholds."""
    shape = (-(-tokens.num_samples // 2), tokens.seq_len)
    seed = tokens.seed + _DIRECTIONS_SEED_OFFSET
    return load_calibration(settings.calibration, source.tokenizer, source.model, *shape, seed, progress)


def _search(
    source: SourceModel,
    tokens: CalibrationTokens,
    settings: ConvertSettings,
    progress: Progress,
    store: Store,
    processes: Processes,
) -> tuple[dict[float, SearchResult], Choice | None]:
    """The sparsity levels, ascending, and how a budget was met."""
    with SparsityLevels(source, tokens, _search_settings(settings), progress, store, processes) as levels:
        choice = None
        # The highest first: there is most to gain from the steps that only the first one goes all of.
        wanted: Sequence[float] = sorted(settings.levels, reverse=True)
        others: tuple[float, ...] = OTHER_SPARSITIES if len(wanted) == 1 else ()
        if settings.has_budget:

            def text() -> CalibrationTokens:
                return choice_text(source, tokens, settings.calibration, progress)

            budget = Budget(settings.max_kl, settings.min_top1)
            choice = choose(source, levels, budget, text, progress, store, processes)
            wanted = [choice.sparsity]
            others = tuple(round(choice.sparsity + step, 4) for step in (-_NEIGHBOURS, _NEIGHBOURS))
            others = tuple(one for one in others if 0.0 < one <= MAX_SPARSITY)
        found = {sparsity: levels.at(sparsity) for sparsity in wanted}
        return {one: levels.with_curve(result, others) for one, result in sorted(found.items())}, choice


def _already_complete(plan: Plan, progress: Progress) -> Conversion:
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


def _origin(plan: Plan, fetched: Source, checkpoint: Checkpoint, progress: Progress) -> _Origin:
    settings = plan.settings
    small = small_digests(checkpoint.folder, checkpoint.error)
    weights: Hashes = {}
    if settings.resume:
        with progress.stage("Reading the weights"):
            weights = weight_digests(checkpoint, StateStore.hashes(settings.state_dir))
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
def _state(plan: Plan, origin: _Origin) -> Iterator[Store]:
    settings = plan.settings
    if not settings.resume:
        yield NO_STATE
        return
    with StateStore.open(settings.state_dir, origin.fingerprint, default=settings.work_dir is None) as store:
        store.keep_hashes(origin.weights)
        if store.changed:
            _log.warning("starting over, because this differs from the interrupted run: %s", "; ".join(store.changed))
        elif store.resumed:
            _log.warning("resuming from %s (%d results)", settings.state_dir, store.resumed)
        yield store


def _remove_state(settings: ConvertSettings) -> None:
    if settings.resume and os.path.lexists(settings.state_dir):
        with StateStore.open(settings.state_dir, None, default=settings.work_dir is None) as store:
            store.remove()


def _self_calibration(
    source: SourceModel, settings: ConvertSettings, store: Store, progress: Progress
) -> CalibrationTokens:
    saved = store.load("calibration")
    if saved is not None:
        return CalibrationTokens.from_rows(unpack(saved), "self", settings.seed)
    shape = (settings.num_samples, settings.length)
    tokens = load_calibration("self", source.tokenizer, source.model, *shape, settings.seed, progress)
    store.save("calibration", pack(tokens.input_ids.tolist()))
    return tokens


# ---------------------------------------------------------------------- result


def _versions() -> dict[str, str]:
    # Ours is not asked of the installed distribution: a checkout on the path has none.
    return {"wisparse": wisparse.__version__, **{name: metadata.version(name) for name in _LIBRARIES}}


def _search_settings(settings: ConvertSettings) -> SearchSettings:
    return SearchSettings(
        method=settings.method,
        search=settings.chosen_search,
        num_generations=settings.num_generations,
        num_offspring=settings.num_offspring,
        seed=settings.seed,
    )


def _recipe(
    plan: Plan,
    fetched: Source,
    checkpoint: Checkpoint,
    tokens: CalibrationTokens,
    results: Mapping[float, SearchResult],
    choice: Choice | None,
    turned: Turned | None,
) -> Recipe:
    settings = plan.settings
    return Recipe(
        base_model=fetched.name,
        base_revision=fetched.commit,
        method=settings.method,
        default=settings.default_of(results),
        levels=tuple(_level(plan, sparsity, result) for sparsity, result in results.items()),
        calibration=CalibrationRecord(
            source=tokens.source,
            num_samples=tokens.num_samples,
            seq_len=tokens.seq_len,
            num_tokens=tokens.num_tokens,
            seed=tokens.seed,
            digest=tokens.digest,
        ),
        search=_details(settings, results, choice),
        versions=_versions(),
        vision_tensors_left_out=checkpoint.vision_tensors,
        rotation=turned.record if turned else None,
    )


def _level(plan: Plan, sparsity: float, result: SearchResult) -> SparsityLevel:
    projections = list(plan.config.projections())
    entries = tuple(result.projections[projection.name] for projection in projections)
    blocks = []
    for block in range(plan.config.num_blocks):
        mine = [(p.num_parameters, e.sparsity) for p, e in zip(projections, entries, strict=True) if p.block == block]
        blocks.append(sum(size * sparsity for size, sparsity in mine) / sum(size for size, _ in mine))
    return SparsityLevel(sparsity, entries, tuple(blocks))


def _details(settings: ConvertSettings, results: Mapping[float, SearchResult], choice: Choice | None) -> dict[str, Any]:
    """How the search went: what holds for all sparsity levels, and what each has of its own."""
    shared = ("settings", "kl_tokens")
    common = {key: next(iter(results.values())).details[key] for key in shared}
    common["settings"] = {key: value for key, value in common["settings"].items() if key != "sparsity"}
    own = [
        {"sparsity": sparsity, **{key: value for key, value in result.details.items() if key not in shared}}
        for sparsity, result in results.items()
    ]
    budget = {"max_kl": settings.max_kl, "min_top1": settings.min_top1}
    return {**common, "levels": own, **({"budget": {**budget, **choice.to_dict()}} if choice else {})}


def _write(
    plan: Plan,
    origin: _Origin,
    checkpoint: Checkpoint,
    recipe: Recipe,
    results: Mapping[float, SearchResult],
    measurement: Measurement,
) -> None:
    settings = plan.settings
    # The weights are compared with what was opened wherever they are read; these are read anew.
    for name, digest in small_digests(checkpoint.folder, checkpoint.error).items():
        if origin.small.get(name) != digest:
            raise checkpoint.error(f"{name}: changed while the model was converted; run this again")
    levels = {sparsity: _masks(result) for sparsity, result in results.items()}
    report = render_report(recipe, plan.config, measurement)
    card = render_card(
        recipe,
        read_inherited(checkpoint.folder),
        evaluations=[_evaluation(measurement, recipe, sparsity) for sparsity in recipe.sparsities],
        figures=[(name, caption) for name, caption in FIGURES.items() if name in report],
        repo_id=settings.upload_repo,
    )
    write_bundle(
        checkpoint,
        recipe,
        levels,
        settings.output_dir,
        dtype=settings.dtype,
        max_shard_size=settings.max_shard_size,
        extra_files={"README.md": card.encode(), **report},
        overwrite=settings.overwrite,
        before_swap=partial(write_mark, settings.output_dir, origin.made_from) if settings.resume else None,
    )


def _masks(result: SearchResult) -> dict[str, ProjectionMask]:
    return {
        name: ProjectionMask(
            result.channel_scales[name].detach().cpu().float().contiguous(), entry.threshold, entry.sparsity
        )
        for name, entry in result.projections.items()
    }


def _evaluation(measurement: Measurement, recipe: Recipe, sparsity: float) -> Evaluation:
    quality = measurement.levels[sparsity]
    found = quality.sparse
    return Evaluation(
        sparsity=sparsity,
        text=measurement.text,
        num_tokens=found.num_tokens,
        protocol="every token sparse",
        dense_perplexity=found.dense_perplexity,
        sparse_perplexity=found.perplexity,
        kl=found.kl,
        top1_agreement=found.top1_agreement,
        realised_sparsity=quality.realised_sparsity or 0.0,
        grade=grade(quality),
        verdict=verdict(sparsity, quality),
        expectation=expectation(sparsity, quality, recipe),
    )
