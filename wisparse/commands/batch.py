"""Prompts from a file, answers to a file: in order, as many at a time as the model has slots, resumed after a kill."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from wisparse.formats.bundle import is_document
from wisparse.formats.errors import ResourceError, UsageError, WisparseError
from wisparse.formats.guard.files import read_bounded
from wisparse.formats.guard.folder import lock_file, require_writable, write_file
from wisparse.formats.guard.places import expand
from wisparse.formats.guard.safe_json import parse_json
from wisparse.runtime.model import Generation, Model

__all__ = ["Batch", "read_text"]

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
