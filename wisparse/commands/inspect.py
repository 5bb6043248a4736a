"""``wisparse inspect``: what a bundle drops, and where it comes from."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError, printable
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.manifest import ProjectionRecipe

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
    if as_json:
        click.echo(json.dumps({"model": _model(opened), **opened.recipe.to_dict()}, indent=2))
        return
    # Wide enough for every column where the output is no terminal and so has no width.
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    for name, value in _summary(opened):
        console.print(Text(f"{name:<12} {printable(value)[:500]}"))
    console.print(_table(opened, show))


def _model(bundle: Bundle) -> dict[str, Any]:
    config = bundle.config
    return {
        "model_type": config.model_type,
        "num_blocks": config.num_blocks,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_bytes": bundle.checkpoint.nbytes,
        "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in bundle.checkpoint.tensors.values()}),
    }


def _summary(bundle: Bundle) -> list[tuple[str, str]]:
    recipe, model, calibration = bundle.recipe, _model(bundle), bundle.recipe.calibration
    revision = f" at {recipe.base_revision}" if recipe.base_revision else ""
    return [
        ("base model", f"{recipe.base_model}{revision}"),
        *([("left out", recipe.text_only)] if recipe.text_only else []),
        ("rotation", str(recipe.rotation or "none: the weights are the source's")),
        (
            "model",
            f"{model['model_type']}, {model['num_blocks']} blocks, hidden {model['hidden_size']}, "
            f"MLP {model['intermediate_size']}, {model['num_bytes'] / 1e6:,.1f} MB {'/'.join(model['dtypes'])}",
        ),
        ("method", recipe.method),
        ("levels", ", ".join(f"{one:.1%}{' (the default)' * (one == recipe.default)}" for one in recipe.sparsities)),
        (
            "calibration",
            f"{calibration.source}: {calibration.num_samples} samples of up to {calibration.seq_len} "
            f"tokens ({calibration.num_tokens:,} in all), seed {calibration.seed}",
        ),
    ]


def _table(bundle: Bundle, show: str) -> Table:
    roles = [projection.role for projection in bundle.config.projections(0)]
    table = Table(
        title=f"{show} per projection at {bundle.sparsity:.1%}", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("block", justify="right")
    for role in roles:
        table.add_column(role, justify="right")
    table.add_column("block sparsity", justify="right")
    level = bundle.recipe.at(bundle.sparsity)
    entries = {entry.name: entry for entry in level.projections}
    for block, sparsity in enumerate(level.block_sparsities):
        cells = [_cell(entries[projection.name], show) for projection in bundle.config.projections(block)]
        table.add_row(str(block), *cells, f"{sparsity:.1%}")
    return table


def _cell(entry: ProjectionRecipe, show: str) -> str:
    if show == "alpha":
        return f"{entry.alpha:.2f}"
    if show == "threshold":
        return f"{entry.threshold:.4g}"
    return f"{entry.sparsity if show == 'sparsity' else entry.realised_sparsity:.1%}"
