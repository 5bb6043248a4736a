"""``wisparse generate``: continue a prompt, or answer it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import click

from wisparse.formats.bundle import is_document
from wisparse.formats.errors import ResourceError, UsageError, WisparseError
from wisparse.formats.folder import lock_file, require_writable, write_file
from wisparse.formats.guard import expand, parse_json, read_bounded
from wisparse.runtime.model import Generation, Model

from ..options import FOLDER_OR_ID, footer, load_model, loading_options, sampling_options, set_up_logging, show

_MOST_BYTES = 1 << 28
# Ends the name of the file that holds what is answered so far.
_PROGRESS = ".progress"
# What a message has beside its role, at least one of them.
_SAID = ("content", "tool_calls")


def read_text(file: str) -> str:
    """The text of a file that a user names.

    Raises:
        UsageError: missing, not a regular file, too large, or not UTF-8.
    """
    path = Path(os.path.realpath(expand(file)))
    try:
        # Windows puts a mark before the text, which is no part of it.
        return read_bounded(path.parent, path.name, _MOST_BYTES, UsageError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name:.200}: not text in UTF-8: {error}") from error


class Batch:
    """A file of prompts, one JSON object a line with ``prompt`` (a text) or ``messages`` (a conversation).

    Its answers go to ``output``: the same lines, each with ``answer``. Until the last is there they are kept in
    ``output.progress``, which a run with the same prompts and settings goes on with.

    Raises:
        UsageError: a line that is none of these, an output that exists, or one that cannot be written.
    """

    def __init__(self, prompts: str, output: str, settings: dict[str, Any]) -> None:
        text = read_text(prompts)
        # Not splitlines(): it takes letters for the end of a line that JSON leaves as they are.
        numbered = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
        self._numbers = list(numbered)
        self._lines = [_line(line, number) for number, line in numbered.items()]
        if not self._lines:
            raise UsageError("--input: expected a prompt a line, found none")
        self._output = Path(os.path.abspath(expand(output)))
        if os.path.lexists(self._output):
            raise UsageError(f"--output: {output:.200} is there already; choose another file")
        self._progress = self._output.with_name(self._output.name + _PROGRESS)
        require_writable(self._output.parent, "--output", "choose another file", self._progress.name)
        if not self._output.parent.is_dir():
            raise UsageError(f"--output: there is no folder {str(self._output.parent)!r:.200}; make it first")
        self._told = [text, settings]

    def run(self, model: Model, settings: dict[str, Any]) -> tuple[int, int]:
        """Answer what is not answered yet; how many prompts there are, and how many had been answered before.

        Raises:
            UsageError: another process writes there, or the progress is of another run.
            ResourceError: the disk is full.
        """
        busy = UsageError(f"--output: another process writes {self._progress}; wait for it or choose another file")
        try:
            with lock_file(self._progress, busy) as file:
                done = self._resume(file, self._fingerprint(model))
                left = [index for index in range(len(self._lines)) if index not in done]
                before = len(done)
                for index, answer in self._answers(model, settings, left):
                    done[left[index]] = _answer_row(answer)
                    file.write(json.dumps([left[index], done[left[index]]]) + "\n")
                    file.flush()
                ordered = [{**line, "answer": done[index]} for index, line in enumerate(self._lines)]
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in ordered)
                write_file(self._output, text.encode())
                self._progress.unlink()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("what is answered is kept, the same command goes on") from None
        except OSError as error:
            raise ResourceError(f"--output: {self._output} cannot be written: {error.strerror or error}") from error
        return len(self._lines), before

    def _answers(self, model: Model, settings: dict[str, Any], left: list[int]) -> Iterable[tuple[int, Generation]]:
        """Of these lines; a prompt that cannot be answered is refused under its line's number before the first one."""
        asked = [self._lines[index].get("messages") or self._lines[index]["prompt"] for index in left]
        try:
            return model.generate_each(asked, **settings) if asked else ()
        except WisparseError:
            if len(left) == len(self._lines):  # nothing is kept there yet
                self._progress.unlink()
            for index, prompt in zip(left, asked, strict=True):
                try:
                    model.generate_each([prompt], **settings)
                except WisparseError as reason:
                    raise type(reason)(f"--input: line {self._numbers[index]}: {reason}") from None
            raise

    def _fingerprint(self, model: Model) -> str:
        """Of all that decides the answers: another bundle may stand under the name that was typed by now."""
        files = {name: digest for name, digest in model.bundle.manifest.sha256.items() if not is_document(name)}
        return hashlib.sha256(json.dumps([*self._told, files], sort_keys=True).encode()).hexdigest()

    def _resume(self, file: IO[str], expected: str) -> dict[int, dict[str, Any]]:
        """What an earlier run has answered; the file is left at its end, without a line cut by a kill."""
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]
        fingerprint, *lines = whole.splitlines() or [""]
        if fingerprint != expected and not lines:
            whole = ""  # somebody's beginning, without an answer: nothing is lost
        elif fingerprint != expected:
            raise UsageError(
                f"{self._progress}: left by a run with other prompts, settings or another bundle; repeat that one, or "
                "delete the file"
            )
        file.truncate(len(whole.encode()))
        file.seek(0, os.SEEK_END)
        if not whole:
            file.write(expected + "\n")
        try:
            found = {int(index): dict(answer) for index, answer in map(json.loads, lines)}
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self._progress}: damaged; delete the file") from error
        return {index: answer for index, answer in found.items() if 0 <= index < len(self._lines)}


def _line(line: str, number: int) -> dict[str, Any]:
    found = parse_json(line.encode(), f"--input: line {number}", UsageError)
    prompt, messages = found.get("prompt"), found.get("messages")
    texts = isinstance(prompt, str) and messages is None
    talk = isinstance(messages, list) and messages and all(map(_is_message, messages)) and prompt is None
    if not (texts or talk):
        raise UsageError(
            f"--input: line {number}: expected a text as prompt, or a list of messages with role and content"
        )
    if "answer" in found:
        raise UsageError(f"--input: line {number}: has an answer already; leave the field out")
    return found


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("role"), str) and not found.keys().isdisjoint(_SAID)


def _answer_row(answer: Generation) -> dict[str, Any]:
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "seed": answer.seed,
    }


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
