"""``wisparse convert``: a Hugging Face model in, a sparse bundle out."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wisparse.converter.settings import (
    DTYPES,
    METHODS,
    REPORTS,
    SEARCHES,
    WEIGHTS,
    ConvertSettings,
    check_method,
    default_output,
    for_sparsities,
)
from wisparse.formats.machine.torchrun import torchrun_place

from .places import FILE_OR_ID, FOLDER_OR_ID, NEW_FOLDER

if TYPE_CHECKING:
    from wisparse.converter.pipeline import Conversion
    from wisparse.converter.preflight import Plan

__all__ = ["command"]


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    try:
        return [float(number) for number in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected a number, or several with commas between, found {value!r}") from None


class _Method(click.Choice):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return check_method(value)


@click.command("convert", context_settings={"show_default": True})
@click.argument("model", type=FOLDER_OR_ID)
@click.option(
    "-o",
    "--output-dir",
    type=NEW_FOLDER,
    show_default="MODEL's name, -wisparse- and the percentage",
    help="Folder to write the bundle to.",
)
@click.option(
    "--sparsity",
    "sparsities",
    metavar="FRACTION[,…]",
    callback=_numbers,
    default=str(ConvertSettings.sparsity),
    help="Fraction of the weights in the blocks' linear layers to leave unread, 0 to 0.95. Several give several "
    "bundles from one calibration, each with its percentage behind the folder's name.",
)
@click.option("--method", type=_Method(METHODS), default=ConvertSettings.method, help="How channels are scored.")
@click.option(
    "--search",
    type=click.Choice(("auto", *SEARCHES)),
    default=ConvertSettings.search,
    help="How the sparsity is spread over the layers. auto: refine; for other methods, their authors' way. "
    "fisher: nearly as good, in less time.",
)
@click.option("--num-generations", type=int, help="Generations of --search paper. The paper has 400.")
@click.option("--num-offspring", type=int, help="Candidates per generation of --search paper. The paper has 64.")
@click.option(
    "--calibration",
    "calibration",
    type=FILE_OR_ID,
    metavar="SOURCE",
    multiple=True,
    default=("self",),
    help="self: the model writes its own text. paper: the paper's mixture, from the Hub. Or a text, JSONL or source "
    "file, a folder of them, or a Hub data set (USER/NAME). Repeat it for several.",
)
@click.option("--num-samples", type=int, default=ConvertSettings.num_samples, help="Calibration sequences.")
@click.option(
    "--seq-len", type=int, show_default="2048 on a GPU, 512 on a CPU", help="Tokens per calibration sequence."
)
@click.option("--seed", type=int, default=ConvertSettings.seed, help="The same seed gives the same bundle.")
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default=ConvertSettings.weights,
    help="How the bundle stores the layers' weights. native: as the source does. int8, fp8: rounded, with a scale a "
    "row. int4: fitted to the calibration text (GPTQ), in groups of 128. As compressed-tensors, which others load.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=ConvertSettings.dtype,
    help="Of the bundle's weights; auto copies the source's bytes.",
)
@click.option("--device", default=ConvertSettings.device, help="auto, cpu, cuda or cuda:N.")
@click.option("--revision", help="Branch, tag or commit of a model on the Hub.")
@click.option("--max-shard-size", default=ConvertSettings.max_shard_size, help="Largest weight file.")
@click.option(
    "--work-dir",
    type=NEW_FOLDER,
    show_default="OUTPUT_DIR.work",
    help="Folder for the state of an unfinished conversion.",
)
@click.option("--resume/--no-resume", default=True, help="Keep state, and go on where an interrupted run stopped.")
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle, once the new one is complete.")
@click.option(
    "--report",
    type=click.Choice(REPORTS),
    default=ConvertSettings.report,
    help="full: the report shows what each block minds being sparse alone. brief leaves that out: nothing is decided "
    "by it, and on a CPU it takes time. auto: full on a GPU, brief on a CPU.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, and stop.")
@click.option("--upload-repo", metavar="USER/NAME", help="Push the bundle to the Hub afterwards.")
@click.option("--private", is_flag=True, help="Make that repository private.")
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bars, only errors.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(
    model: str,
    output_dir: Path | None,
    sparsities: list[float],
    dry_run: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert MODEL, a folder or a Hub id, into a sparse bundle.

    \b
    wisparse-convert meta-llama/Llama-3.1-8B-Instruct
    wisparse-convert ./my-fine-tune --sparsity 0.4 --calibration corpus/ -o out
    wisparse-convert ./my-fine-tune --sparsity 0.3,0.4,0.5
    wisparse-convert Qwen/Qwen2.5-7B --dry-run

    On several GPUs of one machine, one process each, with the same result:

    \b
    torchrun --nproc-per-node 4 -m wisparse convert MODEL
    """
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet exclude each other")
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    # Of several processes the first one speaks.
    place = torchrun_place()
    helper = place.index > 0
    level = logging.CRITICAL if helper else logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    logger = logging.getLogger("wisparse")
    logger.setLevel(level)
    if place.ignored:
        logger.warning(place.ignored)
    named_after = sparsities[0] if len(sparsities) == 1 else None
    base = ConvertSettings(model=model, output_dir=output_dir or default_output(model, named_after), **options)
    all_settings = for_sparsities(base, sparsities)
    if not helper:
        for settings in all_settings:
            settings.check()  # before torch and transformers are imported: a typing error is answered at once
    from wisparse.converter.work.progress import Progress

    progress = Progress(False if quiet or helper else None)
    if dry_run and helper:
        return
    if dry_run:
        from wisparse.converter.preflight import preflight

        _print_plans([preflight(settings, progress) for settings in all_settings], as_json)
        return
    from wisparse.converter.pipeline import run_all

    try:
        conversions = run_all(all_settings, progress)
    except KeyboardInterrupt as interruption:
        # An upload knows the command that goes on with it alone.
        raise KeyboardInterrupt(str(interruption) or _resume_hint(base)) from None
    if conversions:  # under torchrun the first process has them
        _print_conversions(conversions, as_json)


def _resume_hint(settings: ConvertSettings) -> str:
    """What the command line says after Ctrl-C."""
    if not settings.resume:
        return "nothing was kept (--no-resume)"
    # As it was typed: wisparse convert, or wisparse-convert.
    program = click.get_current_context().command_path.split()
    arguments = sys.argv[len(program) :]
    several = torchrun_place().size
    if several > 1:
        program = ["torchrun", "--nproc-per-node", str(several), "-m", "wisparse", "convert"]
    return f"what was computed is kept; go on with: {shlex.join([*program, *arguments])}"


def _print_plans(plans: list[Plan], as_json: bool) -> None:
    if as_json:
        documents = [plan.to_dict() for plan in plans]
        click.echo(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
        return
    for plan in plans:
        _print_plan(plan)


def _print_plan(plan: Plan) -> None:
    settings, config = plan.settings, plan.config

    rows = [
        ("model", plan.source.name + (f" at {plan.source.commit}" if plan.source.commit else "")),
        (
            "architecture",
            f"{config.model_type}{f', the text model of {plan.text_of}' if plan.text_of else ''}, "
            f"{config.num_blocks} blocks, hidden {config.hidden_size}, "
            f"{_count(plan.num_parameters)} parameters, "
            f"{plan.projection_parameters / plan.num_parameters:.0%} of them in scope",
        ),
        ("sparsity", f"{settings.sparsity:.1%}, method {settings.method}, search {settings.chosen_search}"),
        (
            "calibration",
            f"{plan.calibration}: {settings.num_samples} x {settings.seq_len} = "
            f"{settings.num_samples * settings.length:,} tokens, seed {settings.seed}",
        ),
        ("compute", f"{plan.device}, {str(plan.dtype).removeprefix('torch.')}"),
        ("memory", f"about {_size(plan.memory_bytes)} of {_size(plan.memory_free_bytes)} free"),
        *([("weights on", f"{plan.weights_on} (slower)")] if plan.max_memory is not None else []),
        ("download", _size(plan.download_bytes) if plan.download_bytes else "nothing"),
        ("disk", f"{_size(plan.bundle_bytes)} of {_size(plan.disk_free_bytes)} free"),
        ("output", str(settings.output_dir) + (" (overwritten)" if settings.output_dir.exists() else "")),
        ("state", str(settings.state_dir) if settings.resume else "not kept"),
    ]
    if settings.upload_repo:
        rows.append(("upload", settings.upload_repo + (" (private)" if settings.private else "")))
    _print_rows("Plan (nothing was converted)", rows)


def _print_conversions(conversions: list[Conversion], as_json: bool) -> None:
    if as_json:
        documents = [_document(conversion) for conversion in conversions]
        click.echo(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
        return
    for conversion in conversions:
        _print_conversion(conversion)


def _realised(conversion: Conversion) -> float:
    sizes = [projection.num_parameters for projection in conversion.plan.config.projections()]
    entries = conversion.recipe.projections
    return sum(n * entry.realised_sparsity for n, entry in zip(sizes, entries, strict=True)) / sum(sizes)


def _document(conversion: Conversion) -> dict[str, Any]:
    return {
        "bundle": str(conversion.folder),
        "url": conversion.url,
        "realised_sparsity": _realised(conversion),
        "quality": conversion.measurement.quality.to_dict() if conversion.measurement else None,
        "measured_on": _measured_on(conversion),
        "seconds": {name: round(value, 3) for name, value in conversion.seconds.items()},
        "recipe": conversion.recipe.to_dict(),
    }


def _print_conversion(conversion: Conversion) -> None:
    from wisparse.converter.quality.report import expectation, verdict

    recipe, realised = conversion.recipe, _realised(conversion)
    quality = conversion.measurement.quality if conversion.measurement else None
    measured_on = _measured_on(conversion)
    # One exponent for all (fisher and refine have 1, TEAL 0) says nothing.
    alphas = [entry.alpha for entry in recipe.projections]
    blocks = recipe.block_sparsities
    rows = [
        ("bundle", str(conversion.folder)),
        *([("left out", recipe.text_only)] if recipe.text_only else []),
        ("sparsity", f"{recipe.sparsity:.1%} asked for; {expectation(realised, quality)}"),
        ("by block", f"{min(blocks):.1%} to {max(blocks):.1%}"),
        ("quality", verdict(recipe.sparsity, quality)),
        *([("measured on", measured_on)] if measured_on else []),
        *([("alpha", f"{min(alphas):g} to {max(alphas):g}")] if min(alphas) < max(alphas) else []),
        ("calibration", f"{recipe.calibration.source}, {recipe.calibration.num_tokens:,} tokens"),
        (
            "time",
            ", ".join(f"{name.lower()} {value:.0f} s" for name, value in conversion.seconds.items() if value >= 1),
        ),
    ]
    if conversion.url:
        rows.append(("uploaded", conversion.url))
    _print_rows("Converted", rows)
    # A prompt of the user's own: what a model knows (stories, code, a language) its files do not say.
    click.echo(f"\nTry it:  wisparse generate {shlex.quote(str(conversion.folder))} --prompt 'YOUR TEXT'")


def _measured_on(conversion: Conversion) -> str | None:
    """Which text the figures of quality are of: another text gives other figures."""
    measurement = conversion.measurement
    if measurement is None:
        return None
    return f"{measurement.quality.sparse.num_tokens:,} tokens of {measurement.text}; other text gives other figures"


def _print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from wisparse.formats.errors import printable

    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, printable(value))
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, 100) if not console.is_terminal else console.width
    console.print(table)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
