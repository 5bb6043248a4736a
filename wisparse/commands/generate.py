"""``wisparse generate``: text from a prompt or a file of prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from wisparse.formats.bundle import is_document
from wisparse.formats.errors import ResourceError, UsageError, WisparseError
from wisparse.formats.folder import lock_file, require_writable, write_file
from wisparse.formats.guard import expand, parse_json

from .. import options as shared

if TYPE_CHECKING:
    from wisparse.runtime.model import Generation, Model


class Batch:
    """A file of prompts, one JSON object per line. ``output`` gets the same objects, each with ``answer``. Until all are
    answered, answers are saved in ``output.progress``, from which a run with the same prompts and settings resumes."""

    def __init__(self, prompts: str, output: str, settings: dict[str, Any]) -> None:
        text = shared.read_text(prompts)
        self._inputs = [text, settings]
        self._lines: dict[int, dict[str, Any]] = {}  # by line number
        for number, line in enumerate(text.split("\n"), 1):  # splitlines() also splits within JSON strings
            if not line.strip():
                continue
            record = parse_json(line.encode(), f"--input: line {number}", UsageError)
            prompt, messages = record.get("prompt"), record.get("messages")
            turns = messages if isinstance(messages, list) else []
            said = [one for one in turns if isinstance(one, dict) and {"content", "tool_calls"} & one.keys()]
            is_conversation = len(said) == len(turns) > 0 and all(isinstance(one.get("role"), str) for one in said)
            if not (isinstance(prompt, str) and messages is None) and not (prompt is None and is_conversation):
                wanted = "a text as prompt, or a list of messages with role and content"
                raise UsageError(f"--input: line {number}: expected {wanted}")
            if "answer" in record:
                raise UsageError(f"--input: line {number}: has an answer already; leave the field out")
            self._lines[number] = record
        if not self._lines:
            raise UsageError("--input: expected a prompt a line, found none")
        self._output = Path(os.path.abspath(expand(output)))
        if os.path.lexists(self._output):
            raise UsageError(f"--output: {output:.200} is there already; choose another file")
        self._progress = self._output.with_name(self._output.name + ".progress")
        require_writable(self._output.parent, "--output", "choose another file", self._progress.name)
        if not self._output.parent.is_dir():
            raise UsageError(f"--output: there is no folder {str(self._output.parent)!r:.200}; make it first")

    def run(self, model: Model, settings: dict[str, Any]) -> tuple[int, int]:
        """Generate the missing answers; returns the number of prompts, and of those that an earlier run answered."""
        busy = UsageError(f"--output: another process writes {self._progress}; wait for it or choose another file")
        try:
            with lock_file(self._progress, busy) as file:
                done = self._resume(file, model)
                before, pending = len(done), [number for number in self._lines if number not in done]
                for index, answer in self._answers(model, settings, pending):
                    fields = {name: getattr(answer, name) for name in ("text", "finish_reason", "prompt_tokens")}
                    scores = None if answer.scores is None else [dataclasses.asdict(score) for score in answer.scores]
                    fields |= {"thought": answer.thought} if answer.thought else {}
                    fields |= {"completion_tokens": len(answer.token_ids), "seed": answer.seed}
                    done[pending[index]] = fields if scores is None else {**fields, "scores": scores}
                    file.write(json.dumps([pending[index], done[pending[index]]]) + "\n")
                    file.flush()
                answered = ({**line, "answer": done[number]} for number, line in self._lines.items())
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in answered)
                write_file(self._output, text.encode())
                self._progress.unlink()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("what is answered is kept, the same command goes on") from None
        except OSError as error:
            raise ResourceError(f"--output: {self._output} cannot be written: {error.strerror or error}") from error
        return len(self._lines), before

    def _answers(self, model: Model, settings: dict[str, Any], pending: list[int]) -> Iterable[tuple[int, Generation]]:
        """Generations of the lines ``pending``, by index; an invalid prompt is an error with its line number."""
        prompts = [self._lines[number].get("messages") or self._lines[number]["prompt"] for number in pending]
        try:
            return model.generate_each(prompts, **settings) if prompts else ()
        except WisparseError:
            if len(pending) == len(self._lines):  # it has no answers yet
                self._progress.unlink()
            for number, prompt in zip(pending, prompts, strict=True):
                try:
                    model.generate_each([prompt], **settings)
                except WisparseError as reason:
                    raise type(reason)(f"--input: line {number}: {reason}") from None
            raise

    def _resume(self, file: IO[str], model: Model) -> dict[int, dict[str, Any]]:
        """The answers of an earlier run, by line. Truncates an incomplete last line, and leaves the file at its end. Its
        first line is a digest of what determines the answers: prompts, settings and the bundle's files."""
        files = {name: digest for name, digest in model.bundle.manifest.sha256.items() if not is_document(name)}
        expected = hashlib.sha256(json.dumps([*self._inputs, files], sort_keys=True).encode()).hexdigest()
        file.seek(0)
        complete = file.read().rpartition("\n")[0]
        digest, *lines = complete.split("\n")
        if digest != expected and lines:
            wrong = "left by a run with other prompts, settings or another bundle"
            raise UsageError(f"{self._progress}: {wrong}; repeat that one, or delete the file")
        # The file of another run without answers is overwritten.
        file.truncate(len(f"{complete}\n".encode()) if digest == expected else 0)
        file.seek(0, os.SEEK_END)
        if digest != expected:
            file.write(expected + "\n")
        try:
            answers = {int(number): dict(answer) for number, answer in map(json.loads, lines)}
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self._progress}: damaged; delete the file") from error
        return {number: answer for number, answer in answers.items() if number in self._lines}


@click.command("generate")
@click.argument("bundle", type=shared.FOLDER_OR_ID)
@click.option("--prompt", help="The prompt; - reads it from standard input, which is also the default in a pipe.")
@click.option("--prompt-file", help="File with the prompt.")
@click.option(
    "--input", "prompts", help="File of prompts, one JSON object a line: prompt (a text), or messages (a conversation)."
)
@click.option("--output", help="File for their answers, in order; an interrupted run can be resumed.")
@shared.option_table(("--max-batch", click.IntRange(1, 64), 4, "Prompts of --input in a batch."))
@shared.loading_options
@shared.speculative_option("off")
@shared.sampling_options
@shared.thinking_options
@shared.template_option
@click.option("--ignore-chat-template", is_flag=True, help="Continue the prompt unchanged.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end instead of the text.")
def command(
    bundle: str, prompt: str | None, prompt_file: str | None, prompts: str | None, output: str | None, max_batch: int,
    as_json: bool, verbose: bool, ignore_chat_template: bool, **settings: Any,
) -> None:  # fmt: skip
    """Generate text from BUNDLE, a folder or a Hub id.

    The text is streamed to standard output; a line with speed, memory and realised sparsity goes to standard error.

    \b
    wisparse generate out --prompt "Why is the sky blue?"
    wisparse generate USER/NAME --temperature 0.7 --seed 1 < prompt.txt
    wisparse generate out --prompt "Once" --device cpu --weights int8 --json
    wisparse generate out --prompt "A person, as JSON" --json-schema @person.json
    wisparse generate out --input prompts.jsonl --output answers.jsonl
    """
    shared.set_up_logging(verbose)
    if ignore_chat_template:
        if settings["chat_template"] is not None:
            raise UsageError("--chat-template and --ignore-chat-template: expected one of them, found both")
        settings["chat_template"] = False
    if prompts is not None or output is not None:
        if prompts is None or output is None or prompt is not None or prompt_file is not None or as_json:
            raise UsageError("--input and --output go together, without --prompt, --prompt-file and --json")
        if settings["n"] > 1:
            raise UsageError("--n: expected 1 beside --input; repeat the prompts in the file")
        batch = Batch(prompts, output, {"bundle": bundle, **settings})
        model = shared.load_model(bundle, settings, max_batch)
        count, before = batch.run(model, settings)
        earlier = f", {before} of them from before" if before else ""
        click.echo(f"{count} answer{'s' * (count != 1)} in {output}{earlier}", err=True)
        return
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file: expected one of them, found both")
    if prompt_file is not None:
        prompt = shared.read_text(prompt_file)
    elif prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            raise UsageError("no prompt: give one with --prompt, or - to type it and end with Ctrl-D")
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not text in {error.encoding}: give the prompt in UTF-8") from error
        if not prompt:
            raise UsageError("no prompt: standard input is empty; give one with --prompt or --prompt-file")
    assert prompt is not None
    model = shared.load_model(bundle, settings, settings["n"])
    answers = []
    if as_json or settings["n"] > 1:
        found = model.generate(prompt, measure_sparsity=True, **settings)
        answers = found if isinstance(found, list) else [found]
    if as_json:
        documents = []
        for answer in answers:
            speed = {name: getattr(answer, name) for name in ("prompt_tok_per_s", "generation_tok_per_s")}
            how = {"backend": model.decoder.name, "sampling": shared.describe_sampling(model, settings)}
            documents.append({**dataclasses.asdict(answer), **speed, **how})
        click.echo(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
        return
    if answers:
        for number, answer in enumerate(answers, 1):
            shared.show(f"--- {number} of {len(answers)} ---\n{answer.text}\n")
    else:
        stream = model.stream_together(prompt, measure_sparsity=True, **settings)
        printer = shared.AnswerPrinter()
        try:
            for chunks in stream:
                printer.show(chunks)
                answers = [one for chunk in chunks if (one := chunk.generation)]
        finally:
            click.echo()  # ends the line, also after an interrupt
    for line in shared.score_lines(answers, model):
        click.echo(line, err=True)
    if answers:
        click.echo(shared.footer(answers[-1], model, settings), err=True)
