"""``wisparse advise``: recommend a weight type and sparsity for a model on this machine."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from wisparse.converter.config import require_supported
from wisparse.formats.card import QUALITY_HEADS, quality_cells, quality_note
from wisparse.formats.guard import find_gguf
from wisparse.formats.hub import require_place
from wisparse.formats.manifest import MANIFEST, Manifest

from ..options import FOLDER_OR_ID, option_table, print_table, set_up_logging


@click.command("advise", context_settings={"show_default": True})
@click.argument("model", type=FOLDER_OR_ID)
@option_table(
    ("--device", str, "auto", "auto, cpu, cuda or cuda:N."),
    ("--context", click.IntRange(min=1), 4096, "Tokens of the KV cache in the memory estimate."),
    ("--revision", str, None, "Branch, tag or commit of a model on the Hub."),
    ("--gguf-file", str, None, "The GGUF file of those in MODEL."),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(model: str, device: str, context: int, revision: str | None, gguf_file: str | None, as_json: bool) -> None:
    """Estimate speed, memory, disk and quality of MODEL, a folder, a GGUF file or a Hub id, after a conversion to each
    weight type and sparsity, and recommend a command.

    No weights are read or downloaded. Speed is measured on blocks of the model's shape with random weights, which takes
    5 to 20 seconds on two idle cores and about 45 on a GPU the first time, most of it to compile kernels.

    \b
    wisparse advise meta-llama/Llama-3.1-8B-Instruct
    wisparse advise ./my-fine-tune --device cpu --json
    """
    set_up_logging(False)
    if find_gguf(model, gguf_file) is None:
        require_place(model)  # before torch is imported, so that usage errors come at once
        require_supported(model)
    from wisparse.converter.gguf_source import open_source
    from wisparse.converter.processes import Progress
    from wisparse.formats.machine import choose_device

    from ..advice import advise, print_advice

    chosen = choose_device(device, "--device")
    folder = open_source(model, revision, gguf_file, weights=False).folder
    given: dict[str, Any] = {"revision": revision, "gguf_file": gguf_file}
    advice = advise(model, folder, chosen, Progress(), **given, context=context)
    if as_json:
        click.echo(json.dumps(advice.to_dict(), indent=2))
    else:
        print_advice(advice)
        if os.path.lexists(folder / MANIFEST) and (cells := quality_cells(recipe := Manifest.read(folder).recipe)):
            print_table(QUALITY_HEADS, cells, title="measured on this bundle", left=2, note=quality_note(recipe))
