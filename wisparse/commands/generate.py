"""``wisparse generate``: continue a prompt, or answer it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from wisparse.formats.errors import UsageError

from .batch import Batch, read_text
from .options import footer, load_model, loading_options, sampling_options, set_up_logging, show
from .places import FOLDER_OR_ID

__all__ = ["command"]


@click.command("generate")
@click.argument("bundle", type=FOLDER_OR_ID)
@click.option("--prompt", help="The text; - reads it from standard input, as does leaving the option out in a pipe.")
@click.option("--prompt-file", help="File with the text.")
@click.option(
    "--input", "prompts", help="File of prompts, a JSON object a line: prompt (a text), or messages (a conversation)."
)
@click.option("--output", help="File for their answers, in order; a run that was killed goes on where it was.")
@click.option(
    "--max-batch", type=click.IntRange(1, 64), default=4, show_default=True, help="Prompts of --input at a time."
)
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
    prompt_file: str | None,
    prompts: str | None,
    output: str | None,
    max_batch: int,
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
    wisparse generate out --input prompts.jsonl --output answers.jsonl
    """
    set_up_logging(verbose)
    if prompts is not None or output is not None:
        if prompts is None or output is None or prompt is not None or prompt_file is not None or as_json:
            raise UsageError("--input and --output go together, without --prompt, --prompt-file and --json")
        batch = Batch(prompts, output, {"bundle": bundle, **settings})
        model = load_model(bundle, settings, max_batch)
        count, before = batch.run(model, settings)
        click.echo(f"{count} answers in {output}{f', {before} of them from before' if before else ''}", err=True)
        return
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file: expected one of them, found both")
    text = _read_prompt(prompt) if prompt_file is None else read_text(prompt_file)
    model = load_model(bundle, settings)
    if as_json:
        answer = model.generate(text, measure_sparsity=True, **settings)
        click.echo(json.dumps(_document(answer, model.decoder.name), indent=2))
        return
    answer = None
    stream = model.stream_together(text, measure_sparsity=True, **settings)
    try:
        for pieces in stream:
            show("".join(piece.text for piece in pieces))
            answer = pieces[-1].generation
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
