"""``wisparse convert``: convert a Hugging Face model into a sparse bundle."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

import click

from wisparse.converter.config import require_supported
from wisparse.converter.settings import HELP, ConvertSettings
from wisparse.formats.guard import find_gguf
from wisparse.formats.hub import require_place
from wisparse.formats.machine import idle_cores, shown_bytes, torchrun_place, usable_cores
from wisparse.formats.manifest import level_name, plus_minus

from ..options import FILE_OR_ID, FOLDER_OR_ID, NEW_FOLDER, Dtype, print_rows, stacked

if TYPE_CHECKING:
    from wisparse.converter.pipeline import Conversion
    from wisparse.converter.preflight import Plan

_log = logging.getLogger("wisparse")


class _Command(click.Command):
    """A command whose help shows the options in the groups of `ConvertSettings`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {field.name: field.metadata["group"] for field in fields(ConvertSettings)[1:]}
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in named.values()}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                groups.setdefault(named.get(parameter.name or "", "Other"), []).append(record)
        for group, records in groups.items():
            with formatter.section(f"{group} options"):
                formatter.write_dl(records)


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in value.split(",")) if value is not None else ()
    except ValueError:
        raise click.BadParameter(f"expected a number, or several with commas between, found {value!r}") from None


def _option(field: Field[Any]) -> Any:
    metadata, name = field.metadata, "--" + field.name.replace("_", "-")
    kwargs: dict[str, Any] = {"help": HELP[field.name], "metavar": metadata.get("metavar")}
    match metadata["kind"]:
        case "switch":
            names = f"{name}/{metadata['no']}" if "no" in metadata else name
            return click.option(names, is_flag=True, default=field.default, **kwargs)
        case "fractions":
            return click.option(name, callback=_numbers, show_default=metadata["shown"], **kwargs)
        case "places":
            return click.option(name, type=FILE_OR_ID, multiple=True, default=field.default, **kwargs)
        case "choice":
            kwargs["type"] = (Dtype if name == "--dtype" else click.Choice)(metadata["choices"])
        case "int" | "float" | "folder" as kind:
            kwargs["type"] = {"int": int, "float": float, "folder": NEW_FOLDER}[kind]
    letter = [metadata["letter"]] if "letter" in metadata else []
    return click.option(*letter, name, default=field.default, show_default=metadata.get("shown", True), **kwargs)


@click.command("convert", cls=_Command, context_settings={"show_default": True})
@click.argument("model", type=FOLDER_OR_ID)
@stacked(*map(_option, fields(ConvertSettings)[1:]))
@click.option("--dry-run", is_flag=True, help="Run the preflight, print the plan and the output of `advise`, and stop.")
@click.option("-v", "--verbose", is_flag=True, help="Print more.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(dry_run: bool, verbose: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Convert MODEL, a folder, a GGUF file or a Hub id, into a sparse bundle.

    \b
    wisparse-convert meta-llama/Llama-3.1-8B-Instruct
    wisparse-convert ./my-fine-tune --sparsity 0.4 --calibration corpus/ -o out
    wisparse-convert ./my-fine-tune --sparsity 0.3,0.4,0.5,0.6 --default 0.5
    wisparse-convert ./my-fine-tune --max-kl 0.02
    wisparse-convert ./my-fine-tune --weights graded --bits 4.25,3.5
    wisparse-convert Qwen/Qwen2.5-7B --dry-run
    wisparse-convert USER/MODEL-GGUF --gguf-file model-Q4_K_M.gguf

    On several GPUs of one machine, one process each, with the same result:

    \b
    torchrun --nproc-per-node 4 -m wisparse convert MODEL
    """
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet exclude each other")
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    place = torchrun_place()
    silent = place.index > 0  # of several processes only rank 0 reports
    level = logging.CRITICAL if silent else logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    _log.setLevel(level)
    if place.ignored:
        _log.warning(place.ignored)
    settings = ConvertSettings(**options)  # before torch is imported, so that usage errors come at once
    if find_gguf(settings.model, settings.gguf_file) is None:
        require_place(settings.model)
        require_supported(settings.model)
    if not silent:
        limit_threads_to_idle_cores()
    from wisparse.converter.processes import Progress

    progress = Progress(False if quiet or silent else None)
    if dry_run:
        if not silent:
            from wisparse.converter.preflight import preflight

            plan = preflight(settings, progress)
            advice = None
            if not quiet:
                from ..advice import advise, print_advice

                given: dict[str, Any] = {"revision": settings.revision, "gguf_file": settings.gguf_file}
                advice = advise(settings.model, plan.source.folder, plan.device, progress, **given)
            if as_json:
                click.echo(json.dumps({**plan.to_dict(), "advice": advice and advice.to_dict()}, indent=2))
            else:
                _print_plan(plan)
                if advice:
                    print_advice(advice)
        return
    from wisparse.converter.pipeline import run

    try:
        conversion = run(settings, progress)
    except KeyboardInterrupt as interruption:
        hint = "nothing was kept (--no-resume)"
        if settings.resume:
            # The program that the user started: wisparse convert, or wisparse-convert.
            program = click.get_current_context().command_path.split()
            arguments = sys.argv[len(program) :]
            if place.size > 1:
                program = ["torchrun", "--nproc-per-node", str(place.size), "-m", "wisparse", "convert"]
            hint = f"finished stages are kept; go on with: {shlex.join([*program, *arguments])}"
        # An interrupted upload has a message of its own.
        raise KeyboardInterrupt(str(interruption) or hint) from None
    if conversion is not None and as_json:  # under torchrun, only in rank 0
        click.echo(json.dumps(_document(conversion), indent=2))
    elif conversion is not None and not quiet:
        _print_conversion(conversion)


def limit_threads_to_idle_cores() -> None:
    """Set OMP_NUM_THREADS, unless the user has, to the number of idle cores: threads that share cores with other programs
    delay all. OpenMP reads the variable when torch is imported."""
    is_set = "OMP_NUM_THREADS" in os.environ or "torch" in sys.modules
    if not is_set and (idle := idle_cores()) < (usable := usable_cores()):
        os.environ["OMP_NUM_THREADS"] = str(idle)
        _log.info("other programs are busy: computing on %d of %d cores; OMP_NUM_THREADS overrides it", idle, usable)


def _print_plan(plan: Plan) -> None:
    settings, config, size = plan.settings, plan.config, plan.num_parameters
    rotation = settings.rotation + (f": {plan.not_rotated}" if plan.not_rotated else "")
    if settings.rotation != "none":
        parts = "each head's values" if config.fixed_hidden else "what flows through them"
        rotation += f": to the principal directions of {parts}"
        if config.fitted_hidden:
            rotation += "; of each head's values alone if norms after attention and MLP cannot be fitted to it"
        rotation += ", if int4 loses less there" * (settings.rotation == "auto")
    if plan.extra_embedding_bytes:
        rotation += f"; tied embeddings become two tensors, {shown_bytes(plan.extra_embedding_bytes)} more"
    if settings.has_budget:
        limits = [f"KL at most {settings.max_kl:g} nats/token"] if settings.max_kl is not None else []
        limits += [f"top-1 agreement at least {settings.min_top1:.4g}"] if settings.min_top1 is not None else []
        target = f"the highest with {' and '.join(limits)}"
    else:
        target = _names(settings.levels, settings.default_of(settings.levels), settings.weights == "graded")
    text_of = f", the text model of {plan.text_of}" if plan.text_of else ""
    parameters = f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.1f}M"
    shape = f"{config.model_type}{text_of}, {config.num_blocks} blocks, hidden {config.hidden_size}"
    in_scope = f"{plan.projection_parameters / size:.0%} of them in scope"
    samples = f"{settings.num_samples} x {settings.seq_len} = {settings.num_samples * settings.length:,} tokens"
    dequantised = f"dequantised from GGUF, {plan.dequantised_from}; quality is measured against these"
    overwritten = " (overwritten)" if settings.output_dir.exists() else ""
    rows = (
        ("model", plan.source.name + (f" at {plan.source.commit}" if plan.source.commit else "")),
        ("architecture", f"{shape}, {parameters} parameters, {in_scope}"),
        (
            "bits" if settings.weights == "graded" else "sparsity",
            f"{target}, method {settings.method}, search {settings.chosen_search}",
        ),
        ("weights", dequantised if plan.dequantised_from else None),
        ("calibration", f"{plan.calibration}: {samples}, seed {settings.seed}"),
        ("rotation", rotation),
        ("compute", f"{plan.device}, {str(plan.dtype).removeprefix('torch.')}"),
        ("memory", f"about {shown_bytes(plan.memory_bytes)} of {shown_bytes(plan.memory_free_bytes)} free"),
        ("weights on", f"{plan.weights_on} (slower)" if plan.max_memory is not None else None),
        ("download", shown_bytes(plan.download_bytes) if plan.download_bytes else "nothing"),
        ("disk", f"{shown_bytes(plan.bundle_bytes)} of {shown_bytes(plan.disk_free_bytes)} free"),
        ("output", f"{settings.output_dir}{overwritten}"),
        ("state", str(settings.state_dir) if settings.resume else "not kept"),
        ("upload", f"{settings.upload_repo}{' (private)' * settings.private}" if settings.upload_repo else None),
    )
    print_rows("Plan (nothing was converted)", rows)


def _names(levels: Sequence[float], default: float, graded: bool) -> str:
    mark = " (default)" if len(levels) > 1 else ""
    names = [f"{level_name(level, graded, '.1f')}{mark * (level == default)}" for level in levels]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _document(conversion: Conversion) -> dict[str, Any]:
    report, recipe = conversion.report, conversion.report.recipe
    levels = []
    for sparsity in recipe.sparsities:
        quality = (measured := report.quality(sparsity)) and measured.to_dict()
        levels.append({"sparsity": sparsity, "realised_sparsity": report.realised(sparsity), "quality": quality})
    return {
        "bundle": str(conversion.folder),
        "url": conversion.url,
        **next(level for level in levels if level["sparsity"] == recipe.default),
        "levels": levels,
        "choice": conversion.choice.to_dict() if conversion.choice else None,
        "measured_on": report.measured_on,
        "seconds": {name: round(value, 3) for name, value in conversion.seconds.items()},
        "recipe": recipe.to_dict(),
    }


def _recommended(conversion: Conversion) -> str | None:
    """What the runtime takes of the bundle by default, by the forecast; None without a quality table."""
    import torch

    from wisparse.formats.bundle import Bundle
    from wisparse.formats.machine import choose_device
    from wisparse.runtime.backends import decoder_class
    from wisparse.runtime.choice import MAX_KL, choose, forecast_pairs, rows_of

    bundle = Bundle.open(conversion.folder)
    dtype = bundle.checkpoint.dtype
    kinds = ("native",) if bundle.recipe.graded else decoder_class(choose_device(), dtype, "auto")[0].weight_types
    rows = rows_of(bundle, None, kinds)
    if not rows or not isinstance(dtype, torch.dtype):
        return None
    found = choose(forecast_pairs(bundle, dtype, rows), MAX_KL, bundle.recipe.graded)
    level = level_name(found.pair.sparsity, bundle.recipe.graded) if found.pair.sparsity else "dense"
    reason = f"the fastest by bytes with KL at most {MAX_KL:g}" if found.within else f"nothing has a KL of {MAX_KL:g}"
    kl = f"KL {found.pair.kl:.2g}{plus_minus(found.pair.kl_stderr)}"
    return f"generate, chat and serve take {found.pair.weights} {level}, {kl}: {reason}; --max-kl changes it"


def _print_conversion(conversion: Conversion) -> None:
    from wisparse.converter.report import verdict

    report, recipe, choice = conversion.report, conversion.report.recipe, conversion.choice
    default, levels, blocks = recipe.default, recipe.sparsities, recipe.block_sparsities
    alphas = [entry.alpha for entry in recipe.projections]
    origin = "found" if conversion.plan.settings.has_budget else "asked for"
    graded = recipe.graded
    at_default = f"at {level_name(default, graded, '.1f')}, " if len(levels) > 1 else ""
    not_rotated = f"none: {conversion.plan.not_rotated}" if conversion.plan.not_rotated else "none"
    neighbours = report.measurement.curve if choice and report.measurement else ()
    seconds = [f"{name.lower()} {value:.0f} s" for name, value in conversion.seconds.items() if value >= 1]
    chosen = None
    if choice:  # the KL at the chosen sparsity, and at the next higher one that was tried
        costs = [
            f"{level_name(sparsity, graded, '.1f')} costs KL {kl:.3g} nats/token and agrees in {top1:.1%} of first choices"
            for sparsity, kl, top1 in choice.tried
            if sparsity >= choice.sparsity
        ]
        chosen = f"on {choice.num_tokens:,} tokens held apart {'; beyond what was allowed: '.join(costs[:2])}"
    rows = [
        ("bundle", str(conversion.folder)),
        ("left out", recipe.text_only),
        ("weights", recipe.measured_against),
        (
            "bits" if graded else "sparsity",
            f"{_names(levels, default, graded)} {origin}; {at_default}{report.expectation(default)}",
        ),
        ("rotation", str(recipe.rotation or not_rotated)),
        ("coordinates", report.coordinates),
        ("chosen", chosen),
        ("by block", f"{at_default}{min(blocks):.1%} to {max(blocks):.1%}{' of the bits unread' * graded}"),
        *(("quality" if one == levels[0] else "", verdict(one, report.quality(one), graded)) for one in levels),
        *(
            ("less" if one < default else "more", verdict(one, quality, graded))
            for one, quality in neighbours
            if one != default
        ),
        ("default", _recommended(conversion)),
        ("measured on", report.measured_on),
        # Not shown if all are equal (fisher and refine have 1, TEAL 0).
        ("alpha", f"{min(alphas):g} to {max(alphas):g}" if min(alphas) < max(alphas) else None),
        ("calibration", report.calibrated_on),
        ("time", ", ".join(seconds)),
        ("uploaded", conversion.url),
    ]
    print_rows("Converted", rows)
    # No example prompt: the model's files do not say what it was trained on.
    click.echo(f"\nTry it:  wisparse generate {shlex.quote(str(conversion.folder))} --prompt 'YOUR TEXT'")
