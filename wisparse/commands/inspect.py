"""``wisparse inspect``: what a bundle drops, and where it comes from."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError, printable
from wisparse.formats.hub import fetch_bundle

from ..options import FOLDER_OR_ID, revision_option


@click.command("inspect")
@click.argument("bundle", type=FOLDER_OR_ID)
@revision_option
@click.option("--show", type=click.Choice(["sparsity", "alpha", "threshold", "realised"]), default="sparsity")
@click.option("--sparsity", type=float, help="The sparsity level whose table is shown.  [default: the bundle's own]")
@click.option("--json", "as_json", is_flag=True, help="Print the whole recipe as JSON.")
def command(bundle: str, revision: str | None, show: str, sparsity: float | None, as_json: bool) -> None:
    """Show the recipe of BUNDLE, a folder or a Hub id: one line per block, one column per projection.

    The weights are not read; `wisparse verify` does that.

    \b
    wisparse inspect out
    wisparse inspect USER/NAME --revision main --json
    """
    opened = Bundle.open(fetch_bundle(bundle, revision))
    if sparsity is not None:
        opened = opened.at(sparsity)
        if opened.sparsity not in opened.levels:
            raise UsageError("sparsity: 0 is the dense model, which has no masks to show")
    recipe, config, calibration = opened.recipe, opened.config, opened.recipe.calibration
    num_bytes = opened.checkpoint.nbytes
    dtypes = sorted({str(info.dtype).removeprefix("torch.") for info in opened.checkpoint.tensors.values()})
    if as_json:
        names = ("model_type", "num_blocks", "hidden_size", "intermediate_size")
        model = {**{name: getattr(config, name) for name in names}, "num_bytes": num_bytes, "dtypes": dtypes}
        click.echo(json.dumps({"model": model, **recipe.to_dict()}, indent=2))
        return
    revised = f" at {recipe.base_revision}" if recipe.base_revision else ""
    rows = [
        ("base model", f"{recipe.base_model}{revised}"),
        *([("left out", recipe.text_only)] if recipe.text_only else []),
        ("rotation", str(recipe.rotation or "none: the weights are the source's")),
        (
            "model",
            f"{config.model_type}, {config.num_blocks} blocks, hidden {config.hidden_size}, "
            f"MLP {config.intermediate_size}, {num_bytes / 1e6:,.1f} MB {'/'.join(dtypes)}",
        ),
        ("method", recipe.method),
        ("levels", ", ".join(f"{one:.1%}{' (the default)' * (one == recipe.default)}" for one in recipe.sparsities)),
        (
            "calibration",
            f"{calibration.source}: {calibration.num_samples} samples of up to {calibration.seq_len} "
            f"tokens ({calibration.num_tokens:,} in all), seed {calibration.seed}",
        ),
    ]
    # Wide enough for every column where the output is no terminal and so has no width.
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    for name, value in rows:
        console.print(Text(f"{name:<12} {printable(value)[:500]}"))
    console.print(_table(opened, show))


def _table(bundle: Bundle, show: str) -> Table:
    title = f"{show} per projection at {bundle.sparsity:.1%}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("block", *(projection.role for projection in bundle.config.projections(0)), "block sparsity"):
        table.add_column(column, justify="right")
    value = {"alpha": "{0.alpha:.2f}", "threshold": "{0.threshold:.4g}", "sparsity": "{0.sparsity:.1%}"}
    level = bundle.recipe.at(bundle.sparsity)
    entries = {entry.name: entry for entry in level.projections}
    for block, sparsity in enumerate(level.block_sparsities):
        cells = [
            value.get(show, "{0.realised_sparsity:.1%}").format(entries[projection.name])
            for projection in bundle.config.projections(block)
        ]
        table.add_row(str(block), *cells, f"{sparsity:.1%}")
    return table
