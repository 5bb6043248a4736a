"""The program of a worker process: a stranger's chat template or tokenizer, where it can be stopped. See ``sandbox``.

Run by its path, in an interpreter of its own that sees no settings of the user's: it knows nothing of this project. It
is asked on its standard input and answers on its standard output: eight bytes of length, then JSON. Each question says
what it may cost, each answer what it took; who needs more is ended by the operating system. Nothing that a library
prints gets anywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import struct
import sys
import time
from typing import Any

_MOST_MESSAGE = 300


class Refusal(Exception):
    """What a template says through ``raise_exception``: the messages are not in a form it accepts."""


class TooLong(Exception):
    """An answer of more characters or ids than were allowed."""


class Template:
    """Renders as transformers does: the same settings, filters and globals, in Jinja's immutable sandbox."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        from jinja2 import nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace

        class Generation(Extension):
            # Marks the assistant's words for training, means nothing here.
            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                # A scope of its own, as there: what is set inside is not seen behind it.
                return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

            def _same(self, caller: Any) -> Any:
                return caller()

        class PlainNamespace(Namespace):
            # Jinja's own would hold an attribute that its sandbox does not let a template read.
            def __init__(*args: Any, **attributes: Any) -> None:
                values = dict(*args[1:], **attributes)
                for name in values:
                    PlainNamespace.check(name)
                Namespace.__init__(args[0], values)

            def __setitem__(self, name: str, value: Any) -> None:
                PlainNamespace.check(name)
                Namespace.__setitem__(self, name, value)

            @staticmethod
            def check(name: Any) -> None:
                if isinstance(name, str) and name.startswith("_"):
                    raise SecurityError(f"a namespace holds no {name:.40}")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern),
            "namespace": PlainNamespace,
        }
        environment.globals |= variables
        self._template = environment.from_string(source)

    def render(self, values: dict[str, Any], most: int) -> str:
        """The text, of at most ``most`` characters; no more than one piece beyond them is ever made."""
        pieces, length = [], 0
        for piece in self._template.generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                raise TooLong(f"it makes more than {most:,} characters")
        return "".join(pieces)


class Tokenizer:
    """The tokenizers library, text and ids as plain values."""

    def __init__(self, source: str) -> None:
        from tokenizers import Tokenizer as Library

        self._library = Library.from_str(source)
        # Left over from training, either would change a prompt silently.
        self._library.no_truncation()
        self._library.no_padding()

    def encode(self, text: str, add_special_tokens: bool, most: int) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        if len(ids) > most:
            raise TooLong(f"it makes more than {most:,} tokens of {len(text):,} characters")
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool, most: int) -> str:
        text: str = self._library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if len(text) > most:
            raise TooLong(f"it makes more than {most:,} characters of {len(token_ids):,} tokens")
        return text

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._library.token_to_id(token)
        return found


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limit(seconds: float, megabytes: int) -> None:
    """From here on so much processor time; and so much address space, where the system can limit it."""
    with contextlib.suppress(ImportError, AttributeError):  # neither is on Windows, where only the asker's clock counts
        import resource

        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also in the middle of a C function
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = megabytes << 20 if hard == resource.RLIM_INFINITY else min(megabytes << 20, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _written(started: float, **answer: Any) -> bytes:
    text = json.dumps(answer, ensure_ascii=False)[:-1]  # before the clock is read: it takes its time, too
    return f'{text}, "seconds": {time.process_time() - started}}}'.encode("utf-8", "surrogatepass")


def main() -> None:
    """Answer until the questions end. The first one makes what the others are put to."""
    sys.path += sys.argv[1:]
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    subject: Any = None
    while len(length := questions.read(8)) == 8:
        question = json.loads(questions.read(struct.unpack(">Q", length)[0]).decode("utf-8", "surrogatepass"))
        started = time.process_time()
        try:
            _limit(question["seconds"], question["megabytes"])
            if subject is None:
                subject, result = (
                    {"template": Template, "tokenizer": Tokenizer}[question["do"]](**question["with"]),
                    None,
                )
            else:
                result = getattr(subject, question["do"])(**question["with"])
            answer = _written(started, result=result)
        except MemoryError:
            message = f"it needs more than {question['megabytes']} MB of memory"
            answer = _written(started, error="MemoryError", message=message)
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            answer = _written(started, error=type(error).__name__, message=str(error)[:_MOST_MESSAGE])
        _limit(0, question["megabytes"])
        answers.write(struct.pack(">Q", len(answer)) + answer)
        answers.flush()
        if subject is None:
            return


if __name__ == "__main__":
    main()
