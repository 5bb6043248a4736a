"""``wisparse chat``: talk with a model, line by line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from wisparse.formats.errors import ContextLengthError, UsageError

from ..console import FOLDER_OR_ID
from ..options import footer, load_model, loading_options, sampling_options, set_up_logging, show, speculative_option
from .generate import read_text

if TYPE_CHECKING:
    from wisparse.runtime.model import Model

_HELP = "/reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D (or /exit) leaves"


@click.command("chat")
@click.argument("bundle", type=FOLDER_OR_ID)
@click.option("--prompt-file", help="File with the first message; what comes after it is typed.")
@loading_options
@speculative_option("auto")
@sampling_options
def command(bundle: str, prompt_file: str | None, verbose: bool, system_prompt: str | None, **settings: Any) -> None:
    """Talk with BUNDLE, a folder or a Hub id.

    Each line is a message; the model sees the whole conversation. /reset forgets it, Ctrl-C stops an answer, Ctrl-D
    leaves. A message of many lines comes from --prompt-file.

    \b
    wisparse chat out
    wisparse chat USER/NAME --system-prompt "Answer in one sentence."
    wisparse chat out --prompt-file question.txt
    """
    set_up_logging(verbose)
    first = None if prompt_file is None else read_text(prompt_file)
    if first is not None and not first.strip():
        raise UsageError("--prompt-file: expected a message, found an empty file")
    model = load_model(bundle, settings)
    if model.text is None or model.text.template is None:
        raise UsageError("this model has no chat template: use wisparse generate to continue a text")
    start: list[dict[str, str]] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    click.echo(_HELP, err=True)
    messages = list(start)
    if first is not None:
        _turn(model, messages, first, settings)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(start)
            click.echo("forgotten", err=True)
        elif line in ("/help", "/?"):
            click.echo(_HELP, err=True)
        elif line:
            _turn(model, messages, line, settings)
    click.echo(err=True)


def _read_line() -> str | None:
    while True:
        try:
            if sys.stdin.isatty():
                import readline  # noqa: F401  (gives input() its editing and history)

                return input("> ").strip()
            return line.strip() if (line := sys.stdin.readline()) else None
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo("\nCtrl-D leaves", err=True)


def _turn(model: Model, messages: list[dict[str, str]], message: str, settings: dict[str, Any]) -> None:
    """A message and its answer, both added to the conversation. Ctrl-C ends an answer early; what is there is kept."""
    messages.append({"role": "user", "content": message})
    text, answer = "", None
    try:
        stream = model.stream_together(messages, **settings)
    except ContextLengthError as error:
        messages.pop()
        click.echo(f"{error}, or forget the conversation with /reset", err=True)
        return
    try:
        for chunks in stream:
            added = "".join(chunk.text for chunk in chunks)
            show(added)
            text += added
            answer = chunks[-1].generation
    except KeyboardInterrupt:
        click.echo(" (stopped)", err=True)
    finally:
        stream.close()
    click.echo()
    messages.append({"role": "assistant", "content": text})
    if answer is not None:
        click.echo(footer(answer, model), err=True)
