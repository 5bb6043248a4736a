"""``wisparse chat``: a conversation in the terminal."""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wisparse.formats.errors import ContextLengthError, ResourceError, UsageError, WisparseError
from wisparse.formats.folder import require_writable, write_file
from wisparse.formats.guard import expand, expect

from .. import options as shared

if TYPE_CHECKING:
    from wisparse.runtime.model import Generation, Model

_START = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D (or /exit) leaves"
_COMMAND = re.compile(r"/[A-Za-z?-]*(?=\s|$)")
_QUOTES = '"""'


@click.command("chat")
@click.argument("bundle", type=shared.FOLDER_OR_ID)
@click.option("--prompt-file", help="File with the first message; the next ones are typed.")
@click.option("--session", help="File of the conversation: written at the end, gone on with if it exists.")
@shared.loading_options
@shared.speculative_option("auto")
@shared.sampling_options
@shared.thinking_options
@shared.template_option
def command(
    bundle: str,
    prompt_file: str | None,
    session: str | None,
    verbose: bool,
    system_prompt: str | None,
    chat_template: str | None,
    **settings: Any,
) -> None:
    """Talk with BUNDLE, a folder or a Hub id.

    Each line is a message; the model sees the whole conversation. A message of several lines stands between two lines
    of three quotes, or has a backslash at the end of each line but the last. /help lists the commands, Ctrl-C stops an
    answer, Ctrl-D leaves.

    \b
    wisparse chat out
    wisparse chat USER/NAME --system-prompt "Answer in one sentence."
    wisparse chat out --prompt-file question.txt
    wisparse chat out --session talk.safetensors
    """
    shared.set_up_logging(verbose)
    first = None if prompt_file is None else shared.read_text(prompt_file)
    if first is not None and not first.strip():
        raise UsageError("--prompt-file: expected a message, found an empty file")
    model = shared.load_model(bundle, settings, settings["n"])
    if chat_template is not None:
        model.tokenizer.select_template(chat_template)
    if model.text is None or model.text.template is None:
        raise UsageError("this model has no chat template: use wisparse generate to continue a text")
    chat = Chat(model, settings, system_prompt)
    save = None if session is None else chat.open_session(Path(expand(session)))
    _say(_START)
    try:
        if first is not None:
            chat.send(first)
        while (message := _read_message()) is not None and chat.take(message):
            pass
        _say()
    finally:
        if save is not None:
            save()


def _say(text: str = "") -> None:
    click.echo(text, err=True)


class Chat:
    """A conversation and its commands. ``settings``: the arguments of ``Model.generate``."""

    def __init__(self, model: Model, settings: dict[str, Any], system_prompt: str | None = None) -> None:
        self._model, self._settings, self._system = model, settings, system_prompt
        self.messages: list[dict[str, str]] = []  # without the system message
        self._again = 0  # answers to the newest message
        self._shown = True  # thoughts are printed
        # Name -> argument, description, method; a method gets the argument and returns False to leave.
        self._commands: dict[str, tuple[str, str, Callable[[str], object]]] = {
            "/help": ("", "list the commands", self._help),
            "/system": ("[TEXT]", "set the system message (off: none), or show it", self._set_system),
            "/regen": ("[TEMPERATURE]", "answer the last message again", self._regenerate),
            "/thinking": ("[on|off|auto|show|hide]", "switch thoughts, or their display", self._set_thinking),
            "/save": ("FILE", "save the conversation as a line of JSON", self._save),
            "/reset": ("", "forget the conversation", self._reset),
            "/exit": ("", "leave", lambda _: False),
        }

    def open_session(self, path: Path) -> Callable[[], None] | None:
        """Go on with the conversation in a file, if there is one. Returns a function that saves it; None, with a line, if
        the file is no such one."""
        from wisparse.runtime.generation.prompt_files import PromptFile, fingerprint, save

        require_writable(path.parent, "--session", "choose another file", path.name)
        shortened = f"{str(path)!r:.200}"
        engine = self._model.engine
        digest, scheduler = fingerprint(self._model.bundle, engine.decoder), engine.scheduler

        def write() -> None:
            try:
                if self.messages:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    talk = {"messages": self.messages, "system": self._system}
                    engine.call(lambda: save(path, scheduler, scheduler.prefixes.newest(), digest, talk))
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                _say(f"--session: {shortened}: {error.strerror or error}")

        if os.path.lexists(path):
            try:
                found = PromptFile.open(path)
                messages: Any = found.conversation.get("messages")
                system: Any = found.conversation.get("system")
                known = (
                    isinstance(messages, list)
                    and isinstance(system, str | None)
                    and all(
                        isinstance(one, dict)
                        and one.keys() == {"role", "content"}
                        and {*map(type, one.values())} == {str}
                        for one in messages
                    )
                )
                expect(known, f"{path.name}: messages", "texts by role", messages)
            except WisparseError as error:
                _say(f"--session: ignored, and will not be written: {error}")
                return None
            self.messages, self._system = messages, system if self._system is None else self._system
            try:
                found.check(engine.decoder, digest)
                scheduler.saved.append(found)
            except WisparseError as error:
                _say(f"--session: the conversation is read again: {error}")
            _say(f"{len(messages)} messages of {shortened}; /reset forgets them")
        for number in (signal.SIGHUP, signal.SIGTERM):  # also written when the terminal is closed
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        return write

    def take(self, message: str) -> bool:
        """Run a command, or answer a message; False to leave."""
        if not (found := _COMMAND.match(message)):
            if message.strip():
                self.send(message.strip())
            return True
        name = {"/?": "/help", "/quit": "/exit", "/bye": "/exit", "/clear": "/reset"}.get(found[0], found[0])
        if name in self._commands:
            return self._commands[name][2](message[found.end() :].strip()) is not False
        close = difflib.get_close_matches(name, self._commands, 1) or ["/help"]
        _say(f"unknown command {name}; did you mean {close[0]}? (a space before it makes it a message)")
        return True

    def send(self, message: str) -> None:
        """Answer a message, and add both to the conversation."""
        self.messages.append({"role": "user", "content": message})
        self._again = 0
        if not self._answer(self._settings):
            self.messages.pop()

    def _answer(self, settings: dict[str, Any]) -> bool:
        """Answer the last message; False, with a line, if that is impossible. Ctrl-C keeps the answer's beginning."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        prompt, text = [*system, *self.messages], ""
        answers: list[Generation] = []
        printer = shared.AnswerPrinter(self._shown)
        try:
            if settings["n"] > 1:
                answers = [answer for _, answer in sorted(self._model.generate_each([prompt], **settings))]
                for number, answer in enumerate(answers, 1):
                    shared.show(f"--- {number} of {len(answers)} ---\n{answer.text}\n")
                text = answers[0].text
            else:
                stream = self._model.stream_together(prompt, **settings)
                try:
                    for chunks in stream:
                        text += printer.show(chunks)
                        answers = [one for chunk in chunks if (one := chunk.generation)]
                finally:
                    stream.close()
                click.echo()
        except KeyboardInterrupt:
            _say(" (stopped)")
            click.echo()
        except UsageError as error:
            if not isinstance(error, ContextLengthError) and len(self.messages) == 1:
                raise
            _say(
                f"{error}, or forget the conversation with /reset"
                if isinstance(error, ContextLengthError)
                else str(error)
            )
            return False
        self.messages.append({"role": "assistant", "content": text})
        for line in shared.score_lines(answers, self._model):
            _say(line)
        if answers:
            _say(shared.footer(answers[-1], self._model, settings))
        return True

    def _help(self, _: str) -> None:
        width = max(len(f"{name} {argument}") for name, (argument, _, _) in self._commands.items())
        for name, (argument, description, _method) in self._commands.items():
            _say(f"{f'{name} {argument}':<{width}}  {description}")
        _say(f"{_QUOTES:<{width}}  begins and ends a message of several lines; or end each line but the last with \\")
        _say(f"{'Ctrl-C':<{width}}  stops an answer; Ctrl-D leaves")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "off" else text
        _say("no system message" if self._system is None else f"system message: {self._system}")

    def _set_thinking(self, value: str) -> None:
        from wisparse.runtime.thoughts import switch_of

        if value in ("show", "hide"):
            self._shown = value == "show"
        elif value in ("on", "off") and switch_of(self._model.tokenizer.template_reads) is None:
            _say("this model's chat template has no switch for thoughts")
            return
        elif value in ("on", "off", "auto"):
            self._settings["thinking"] = {"on": True, "off": False, "auto": None}[value]
        elif value:
            _say(f"expected on, off, auto, show or hide, found {value!r:.40}")
            return
        state = {True: "on", False: "off", None: "as the chat template has it"}[self._settings["thinking"]]
        _say(f"thoughts: {state}, {'shown' if self._shown else 'hidden'}")

    def _regenerate(self, temperature: str) -> None:
        if not self.messages:
            _say("there is no answer yet")
            return
        settings = dict(self._settings)
        try:
            if temperature:
                settings["temperature"] = float(temperature)
        except ValueError:
            _say(f"expected a temperature, found {temperature!r:.40}")
            return
        if self._model.sampling(settings, settings["n"])["temperature"] == 0:
            _say("greedy decoding gives the same answer again; /regen 0.8 samples at temperature 0.8")
            return
        self._again += 1
        if settings["seed"] is not None:
            settings["seed"] = (settings["seed"] + self._again) % 2**63
        answer = self.messages.pop()
        if not self._answer(settings):
            self.messages.append(answer)

    def _save(self, file: str) -> None:
        path = Path(expand(file)) if file else None
        if path is None or path.exists():
            _say(
                "expected a file: /save FILE" if path is None else f"{file:.200} is there already; choose another file"
            )
            return
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        try:
            line = json.dumps({"messages": [*system, *self.messages]}, ensure_ascii=False)
            write_file(path, f"{line}\n".encode())
        except (OSError, ResourceError) as error:
            _say(f"{file:.200}: {getattr(error, 'strerror', None) or error}")
            return
        _say(f"saved {len(self.messages)} messages in {file:.200}")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        _say("forgotten")


def _read_message() -> str | None:
    """A message of one or more lines; None at the end of the input."""
    while True:
        try:
            line = _read_line("> ")
            if line is None:
                return None
            if line.lstrip().startswith(_QUOTES):
                return _read_quoted(line.lstrip().removeprefix(_QUOTES))
            lines = [line]
            while lines[-1].endswith("\\") and (line := _read_line("... ")) is not None:
                lines[-1:] = [lines[-1][:-1], line]
            return "\n".join(lines)
        except KeyboardInterrupt:
            _say("\nCtrl-D leaves")


def _read_quoted(line: str) -> str:
    lines = []
    while not line.rstrip().endswith(_QUOTES):
        lines.append(line)
        if (following := _read_line("... ")) is None:
            break
        line = following
    else:
        lines.append(line.rstrip().removesuffix(_QUOTES))
    return " " + "\n".join(lines)  # a space: no command


def _read_line(prompt: str) -> str | None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() its editing and history)

        try:
            return input(prompt)
        except EOFError:
            return None
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text in {error.encoding}") from error
    return line.removesuffix("\n") if line else None
