"""``wisparse generate``: continue a prompt, or answer it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from wisparse.formats.errors import UsageError

from .options import footer, load_model, loading_options, sampling_options, set_up_logging, show
from .places import FOLDER_OR_ID

__all__ = ["command"]


@click.command("generate")
@click.argument("bundle", type=FOLDER_OR_ID)
@click.option("--prompt", help="The text; - reads it from standard input, as does leaving the option out in a pipe.")
@loading_options
@sampling_options
@click.option(
    "--chat-template/--ignore-chat-template",
    default=None,
    help="Put the prompt through the chat template as a user's message, or continue it as it stands.  "
    "[default: the template, if it ends an answer with a token the model stops at]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end instead of the text.")
def command(
    bundle: str,
    prompt: str | None,
    as_json: bool,
    verbose: bool,
    **settings: Any,
) -> None:
    """Generate text from BUNDLE, a folder or a Hub id.

    The text goes to standard output as it comes; a line with speed, memory and realised sparsity to standard error.

    \b
    wisparse generate out --prompt "Why is the sky blue?"
    wisparse generate USER/NAME --temperature 0.7 --seed 1 < prompt.txt
    wisparse generate out --prompt "Once" --device cpu --weights int8 --json
    """
    set_up_logging(verbose)
    text = _read_prompt(prompt)
    model = load_model(bundle, settings)
    if as_json:
        answer = model.generate(text, measure_sparsity=True, **settings)
        click.echo(json.dumps(_document(answer, model.decoder.name), indent=2))
        return
    answer = None
    stream = model.stream(text, measure_sparsity=True, **settings)
    try:
        for piece in stream:
            show(piece.text)
            answer = piece.generation
    finally:
        click.echo()  # a shell's prompt, or the word that it was interrupted, starts a line of its own
    if answer is not None:
        click.echo(footer(answer, model), err=True)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give one with --prompt, or - to type it and end with Ctrl-D")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text in {error.encoding}: give the prompt in UTF-8") from error


def _document(answer: Any, backend: str) -> dict[str, Any]:
    return {
        **dataclasses.asdict(answer),
        "prompt_tok_per_s": answer.prompt_tok_per_s,
        "generation_tok_per_s": answer.generation_tok_per_s,
        "backend": backend,
    }
