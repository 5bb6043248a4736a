"""``wisparse convert``: a Hugging Face model in, a sparse bundle out."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wisparse.converter.settings import (
    DTYPES,
    METHODS,
    REPORTS,
    ROTATIONS,
    SEARCHES,
    USUAL,
    USUAL_DEFAULT,
    WEIGHTS,
    ConvertSettings,
    check_method,
    default_output,
)
from wisparse.formats.machine import idle_cores, torchrun_place, usable_cores

from ..options import FILE_OR_ID, FOLDER_OR_ID, NEW_FOLDER

if TYPE_CHECKING:
    from wisparse.converter.choice import Choice
    from wisparse.converter.evaluation import Quality
    from wisparse.converter.pipeline import Conversion
    from wisparse.converter.preflight import Plan


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        return tuple(sorted(float(number) for number in value.split(","))) if value is not None else ()
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
    show_default="MODEL's name and -wisparse, with one sparsity its percentage",
    help="Folder to write the bundle to.",
)
@click.option(
    "--sparsity",
    "sparsities",
    metavar="FRACTION[,…]",
    callback=_numbers,
    show_default=",".join(f"{level:g}" for level in USUAL),
    help="Fraction of the weights in the blocks' linear layers to leave unread, 0 to 0.95. Several are sparsity levels of one "
    "bundle: choose among them when you load it.",
)
@click.option(
    "--default",
    type=float,
    metavar="FRACTION",
    show_default=f"{USUAL_DEFAULT:g}, or the nearest to it",
    help="The sparsity level in force unless another is asked for.",
)
@click.option(
    "--max-kl",
    type=float,
    metavar="NATS",
    help="Find the highest sparsity whose KL(dense || sparse), in nats per token, is at most this, on text that "
    "neither the calibration nor the search has seen.",
)
@click.option(
    "--min-top1",
    type=float,
    metavar="SHARE",
    help="The same for the share of tokens where dense and sparse choose the same: at least this, such as 0.95.",
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
    "--rotation",
    type=click.Choice(ROTATIONS),
    default=ConvertSettings.rotation,
    help="pca: turn the weights to the principal directions of what flows through them, where leaving channels out "
    "costs far less; the dense model stays the same but for rounding. none: the source's bytes. auto: pca where the "
    "model allows it.",
)
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
    sparsities: tuple[float, ...],
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
    wisparse-convert ./my-fine-tune --sparsity 0.3,0.4,0.5,0.6 --default 0.5
    wisparse-convert ./my-fine-tune --max-kl 0.02
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
    out = output_dir or default_output(model, sparsities)
    settings = ConvertSettings(model=model, output_dir=out, sparsities=sparsities, **options)
    if not helper:
        settings.check()  # before torch and transformers are imported: a typing error is answered at once
        _leave_busy_cores()
    from wisparse.converter.processes import Progress

    progress = Progress(False if quiet or helper else None)
    if dry_run and helper:
        return
    if dry_run:
        from wisparse.converter.preflight import preflight

        plan = preflight(settings, progress)
        if as_json:
            click.echo(json.dumps(plan.to_dict(), indent=2))
        else:
            _print_plan(plan)
        return
    from wisparse.converter.pipeline import run

    try:
        conversion = run(settings, progress)
    except KeyboardInterrupt as interruption:
        # An upload knows the command that goes on with it alone.
        raise KeyboardInterrupt(str(interruption) or _resume_hint(settings)) from None
    if conversion is None:  # under torchrun the first process has it
        return
    if as_json:
        click.echo(json.dumps(_document(conversion), indent=2))
    else:
        _print_conversion(conversion)


def _leave_busy_cores() -> None:
    """Compute on the cores that are idle now, unless the user has said on how many.

    Threads that share cores with other programs wait for each other, and what they burn meanwhile is taken off this
    process's own share: beside a load of five, two threads needed 1.5 times as long as one. OpenMP reads the number
    when torch is imported; the bundle does not depend on it.
    """
    if "OMP_NUM_THREADS" in os.environ or "torch" in sys.modules:
        return
    idle, usable = idle_cores(), usable_cores()
    if idle < usable:
        os.environ["OMP_NUM_THREADS"] = str(idle)
        logging.getLogger("wisparse").info(
            "other programs are busy: computing on %d of %d cores; OMP_NUM_THREADS says otherwise", idle, usable
        )


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
        ("sparsity", f"{_target(settings)}, method {settings.method}, search {settings.chosen_search}"),
        (
            "calibration",
            f"{plan.calibration}: {settings.num_samples} x {settings.seq_len} = "
            f"{settings.num_samples * settings.length:,} tokens, seed {settings.seed}",
        ),
        ("rotation", settings.rotation + (f": {plan.not_rotated}" if plan.not_rotated else _turned(plan))),
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


def _turned(plan: Plan) -> str:
    """What turning the weights takes, in words."""
    if plan.settings.rotation == "none":
        return ""
    apart = f"; tied embeddings become two tensors, {_size(plan.apart_bytes)} more" if plan.apart_bytes else ""
    return f": to the principal directions of what flows through them{apart}"


def _target(settings: ConvertSettings) -> str:
    """What sparsity was asked for, in words."""
    if settings.has_budget:
        limits = [f"KL at most {settings.max_kl:g} nats/token"] if settings.max_kl is not None else []
        limits += [f"top-1 agreement at least {settings.min_top1:.4g}"] if settings.min_top1 is not None else []
        return f"the highest with {' and '.join(limits)}"
    return _percents(settings.levels, settings.default_of(settings.levels))


def _percents(levels: Sequence[float], default: float) -> str:
    names = [f"{level:.1%}{' (default)' * (level == default and len(levels) > 1)}" for level in levels]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _realised(conversion: Conversion, sparsity: float) -> float:
    sizes = [projection.num_parameters for projection in conversion.plan.config.projections()]
    entries = conversion.recipe.at(sparsity).projections
    return sum(n * entry.realised_sparsity for n, entry in zip(sizes, entries, strict=True)) / sum(sizes)


def _quality(conversion: Conversion, sparsity: float) -> Quality | None:
    return conversion.measurement.levels[sparsity] if conversion.measurement else None


def _document(conversion: Conversion) -> dict[str, Any]:
    recipe = conversion.recipe
    levels = []
    for sparsity in recipe.sparsities:
        quality = _quality(conversion, sparsity)
        levels.append(
            {
                "sparsity": sparsity,
                "realised_sparsity": _realised(conversion, sparsity),
                "quality": quality.to_dict() if quality else None,
            }
        )
    default = next(level for level in levels if level["sparsity"] == recipe.default)
    return {
        "bundle": str(conversion.folder),
        "url": conversion.url,
        **{key: default[key] for key in ("sparsity", "realised_sparsity", "quality")},
        "levels": levels,
        "choice": conversion.choice.to_dict() if conversion.choice else None,
        "measured_on": _measured_on(conversion),
        "seconds": {name: round(value, 3) for name, value in conversion.seconds.items()},
        "recipe": recipe.to_dict(),
    }


def _print_conversion(conversion: Conversion) -> None:
    from wisparse.converter.report import expectation, verdict

    recipe = conversion.recipe
    default, levels = recipe.default, recipe.sparsities
    measured_on = _measured_on(conversion)
    # One exponent for all (fisher and refine have 1, TEAL 0) says nothing.
    alphas = [entry.alpha for entry in recipe.projections]
    blocks = recipe.block_sparsities
    expected = expectation(_realised(conversion, default), _quality(conversion, default), recipe)
    at_default = f"at {default:.1%}, " if len(levels) > 1 else ""
    rows = [
        ("bundle", str(conversion.folder)),
        *([("left out", recipe.text_only)] if recipe.text_only else []),
        ("sparsity", f"{_percents(levels, default)} {_how_chosen(conversion)}; {at_default}{expected}"),
        ("rotation", str(recipe.rotation or f"none{_why(conversion.plan)}")),
        *([("chosen", _chosen(conversion.choice))] if conversion.choice else []),
        ("by block", f"{at_default}{min(blocks):.1%} to {max(blocks):.1%}"),
        *(("quality" if level == levels[0] else "", verdict(level, _quality(conversion, level))) for level in levels),
        *_neighbours(conversion),
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


def _why(plan: Plan) -> str:
    return f": {plan.not_rotated}" if plan.not_rotated else ""


def _how_chosen(conversion: Conversion) -> str:
    return "found" if conversion.plan.settings.has_budget else "asked for"


def _chosen(choice: Choice) -> str:
    """What a budget allowed, and what the next step would have cost."""
    tried = {sparsity: (kl, top1) for sparsity, kl, top1 in choice.tried}
    words = [_cost(choice.sparsity, *tried[choice.sparsity])]
    beyond = next((one for one in tried if one > choice.sparsity), None)
    if beyond is not None:
        words.append(f"beyond what was allowed: {_cost(beyond, *tried[beyond])}")
    return f"on {choice.num_tokens:,} tokens held apart {'; '.join(words)}"


def _cost(sparsity: float, kl: float, top1: float) -> str:
    return f"{sparsity:.1%} costs KL {kl:.3g} nats/token and agrees in {top1:.1%} of first choices"


def _neighbours(conversion: Conversion) -> list[tuple[str, str]]:
    """What a bit less and a bit more than a budget allowed would cost."""
    if conversion.choice is None or conversion.measurement is None:
        return []
    from wisparse.converter.report import verdict

    others = [(one, found) for one, found in conversion.measurement.curve if one != conversion.choice.sparsity]
    return [("less" if one < conversion.choice.sparsity else "more", verdict(one, found)) for one, found in others]


def _measured_on(conversion: Conversion) -> str | None:
    """Which text the figures of quality are of: another text gives other figures."""
    measurement = conversion.measurement
    if measurement is None:
        return None
    num_tokens = measurement.levels[conversion.recipe.default].sparse.num_tokens
    return f"{num_tokens:,} tokens of {measurement.text}; other text gives other figures"


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
