"""``wisparse rotate``: a copy of a model in coordinates in which sparsity costs less."""

from __future__ import annotations

import json
import logging
import sys

import click

from wisparse.formats.errors import printable
from wisparse.formats.guard.arguments import place

from .places import FOLDER_OR_ID, NEW_FOLDER

__all__ = ["command"]


@click.command("rotate")
@click.argument("model", type=FOLDER_OR_ID)
@click.option("-o", "--output-dir", type=NEW_FOLDER, required=True, help="The folder to make.")
@click.option(
    "--calibration",
    multiple=True,
    metavar="self|paper|HUB_ID|PATH",
    help="Text whose directions count; may be given several times.  [default: self, text that the model writes]",
)
@click.option("--num-samples", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences of the text.")
@click.option("--seq-len", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of a sequence.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=2, show_default=True, help="Which part of the text.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--revision", help="Branch, tag or commit of a model on the Hub.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bars, only errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    model: str,
    output_dir: str,
    calibration: tuple[str, ...],
    num_samples: int,
    seq_len: int,
    seed: int,
    device: str,
    revision: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write a rotated copy of MODEL, a folder or a Hub id, to be converted in its place.

    The copy says what MODEL says, but for rounding, in coordinates in which far fewer channels matter: at the same
    sparsity its bundle is closer to the dense model. Its weights are not MODEL's bytes any more. For families with
    norms before attention and MLP alone (Llama, Mistral, Qwen, Phi-3, Granite, ...).

    \b
    wisparse rotate meta-llama/Llama-3.1-8B-Instruct -o rotated
    wisparse-convert rotated
    """
    logging.basicConfig(level=logging.ERROR if quiet else logging.WARNING, format="%(message)s", stream=sys.stderr)
    for text in calibration:
        place("--calibration", text)
    from wisparse.converter.rotate import rotate
    from wisparse.converter.work.progress import Progress

    made = rotate(
        model,
        output_dir,
        calibration=calibration or "self",
        num_samples=num_samples,
        seq_len=seq_len,
        seed=seed,
        device=device,
        revision=revision,
        progress=Progress(False if quiet else None),
    )
    if as_json:
        click.echo(json.dumps({"folder": str(made.folder), "kl": made.kl, "num_tokens": made.num_tokens}, indent=2))
        return
    folder = printable(str(made.folder))
    click.echo(f"{folder}: KL to the source {made.kl:.6f} nats/token, over {made.num_tokens} tokens: rounding")
    click.echo(f"\nConvert it:  wisparse-convert {folder}")
