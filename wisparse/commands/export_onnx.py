"""``wisparse export-onnx``: export a bundle as an ONNX decoder."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import click

from wisparse.formats.errors import UsageError
from wisparse.formats.folder import check_target
from wisparse.formats.guard import text

from ..options import FOLDER_OR_ID, NEW_FOLDER, open_bundle, option_table, revision_option

_LEVEL = "A sparsity level of the bundle, or 0 for the dense model.  [default: the bundle's own]"
_DTYPE = "Type of weights and activations; auto is the bundle's own, and float32 for bfloat16."


@click.command("export-onnx")
@click.argument("bundle", type=FOLDER_OR_ID)
@click.argument("out", type=NEW_FOLDER)
@option_table(
    ("--opset", click.IntRange(18, 24), 21, "ONNX operator set."),
    ("--dtype", click.Choice(["auto", "float32", "float16"]), "auto", _DTYPE),
    ("--sparsity", float, None, _LEVEL),
)
@click.option("--check/--no-check", default=True, show_default=True, help="Run it and compare it with our runtime.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in OUT, once the new one is complete.")
@revision_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(bundle: str, out: Path, sparsity: float | None, revision: str | None, as_json: bool, **how: Any) -> None:
    """Write BUNDLE, a folder or a Hub id, to the folder OUT as an ONNX decoder with a KV cache.

    OUT works in ONNX Runtime, onnxruntime-genai and optimum. The sparse projections are nodes
    ai.wisparse::SparseLinear, a function that the file defines: every ONNX runtime can run them, and one that has an
    operator of this name can skip the dropped channels.

    \b
    Example:
      wisparse export-onnx out out-onnx --dtype float16
    """
    for package in ("onnx", "onnxruntime") if how["check"] else ("onnx",):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"export-onnx needs the package {package}: pip install {package}")
    from wisparse.runtime.onnx_export import EXPORT, export_onnx

    text("OUT", str(out))  # the onnx package requires UTF-8
    check_target(Path(os.path.abspath(out)), EXPORT, how["overwrite"])  # before a bundle is fetched
    started = time.monotonic()
    opened = open_bundle(bundle, revision, sparsity)
    report = export_onnx(opened, out, **how)
    report["seconds"] = round(time.monotonic() - started, 3)
    for note in report["notes"]:
        click.echo(f"note: {note}", err=True)
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    size = f"{report['num_sparse_projections']} sparse projections, {report['num_bytes'] / 1e6:,.1f} MB"
    click.echo(f"{out}: opset {how['opset']}, {report['dtype']}, {size}, in {report['seconds']:.1f} s")
    if how["check"]:
        click.echo(
            f"agrees with our runtime: dense logits to {report['check']['dense_error']:.1e}, sparse projections to "
            f"{report['check']['projection_error']:.1e} of the largest value"
        )
