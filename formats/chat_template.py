"""Rendering of chat templates, as in transformers."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import BundleError, UsageError

_MAX_SOURCE, _MAX_INPUT = 1 << 20, 64 << 20
# Limit of a rendered conversation: messages, tools and documents, maybe indented or repeated, and fixed text.
_MAX_OUTPUT, _MAX_GROWTH = 200_000, 8
_TRIAL_SECONDS, _TRIAL_BYTES = 2, 1 << 30
# Timeout of a child process that waits for a core, or sleeps.
_TRIAL_TIMEOUT = 60
_PROBE = "wisparse"  # content of messages by which a template is examined
_TRIAL_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG")
_passed: set[bytes] = set()  # digests of the templates, with their variables, that passed the check in this process
_TRIAL = "import sys; sys.path[:] = {path!r}; from wisparse.formats.chat_template import _run_trial; _run_trial()"


class _Refusal(Exception):
    """Raised by a template through ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks an assistant's words for training; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own: variables set inside are not visible after it.
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


def _compile(source: str, variables: Mapping[str, str]) -> Template:
    """The template in transformers' environment (``transformers.utils.chat_template_utils``)."""

    def raise_exception(message: Any) -> None:
        raise _Refusal(str(message))

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own filter escapes <, > and & for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    environment.globals |= variables
    return environment.from_string(source)


def special_tokens(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token``, … of ``tokenizer_config.json`` and ``special_tokens_map.json``. As in transformers, the
    second takes precedence, and is not read if the first lists the added tokens."""
    merged = config if "added_tokens_decoder" in config else {**config, **special_tokens_map}
    # In older files a token is an object with the text under ``content``.
    texts = {key: one.get("content") if isinstance(one, dict) else one for key, one in merged.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


class ChatTemplate:
    """A template's Jinja source, and its variables beside the messages (``bos_token``, ``eos_token``, …). A child process
    checks it in the background, once for all of its loads; the first rendering, or :meth:`check`, waits for the result."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        if len(source) > _MAX_SOURCE:
            raise BundleError(f"the chat template has {len(source):,} characters, expected at most {_MAX_SOURCE:,}")
        self.source, self._variables = source, dict(variables)
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._forms: dict[str, tuple[bool, bool]] = {}  # see `_takes`
        given = json.dumps([source, self._variables]).encode()
        self._digest = hashlib.sha256(given).digest()
        self._trial = None if self._digest in _passed else _start_trial(given)

    def check(self) -> Template:
        """Wait for the check; BundleError if the template does not compile, or exceeds a limit of time or memory."""
        with self._lock:
            if self._template is None:
                if self._trial is not None:
                    _wait_for(self._trial)
                    _passed.add(self._digest)
                self._template = _compile(self.source, self._variables)
            return self._template

    @cached_property
    def reads(self) -> set[str]:
        """Names of the variables that the template reads."""
        return meta.find_undeclared_variables(self.check().environment.parse(self.source))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """The prompt of a conversation. A content is passed in the form that the template takes: as a text, or as a list
        of parts; texts of parts are joined for a template that takes texts only."""
        self.check()
        given = [dict(message) for message in messages]
        values = {"messages": given, "tools": None, "documents": None, **more}
        length = _length(values)
        if length > _MAX_INPUT:
            raise UsageError(f"messages: expected at most {_MAX_INPUT:,} characters, found {length:,}")
        for message in given:
            content, role = message.get("content"), message.get("role")
            if isinstance(content, str | list):
                as_text, as_parts = self._takes(role if role in ("system", "assistant") else "user")
                if isinstance(content, str) and as_parts and not as_text:
                    message["content"] = [{"type": "text", "text": content}]
                elif isinstance(content, list) and as_text and not as_parts and all(map(_is_text, content)):
                    message["content"] = "".join(part["text"] for part in content)
        return self._render(length, {**values, "add_generation_prompt": add_generation_prompt})

    def _takes(self, role: str) -> tuple[bool, bool]:
        """Whether messages of a role may have a text as content, and a list of parts; found by rendering both."""
        if role not in self._forms:
            parts = [{"type": "text", "text": _PROBE}]
            asks = "?" if role == "user" or self._takes("user")[0] else [{"type": "text", "text": "?"}]
            user = {"role": "user", "content": asks}

            def shown(content: Any) -> str:
                message = {"role": role, "content": content}
                turns = [message] if role == "user" else [message, user] if role == "system" else [user, message]
                with contextlib.suppress(UsageError, BundleError):  # it refuses such a message
                    return self._render(0, {"messages": turns, "tools": None, "documents": None})
                return ""

            as_text, as_parts = shown(_PROBE), shown(parts)
            # Within quotes it is a part of the printed list.
            printed = any(quoted in as_parts and quoted not in as_text for quoted in (f"'{_PROBE}'", f'"{_PROBE}"'))
            self._forms[role] = _PROBE in as_text, _PROBE in as_parts and not printed
        return self._forms[role]

    def _render(self, length: int, values: Mapping[str, Any]) -> str:
        template, most, advice = self.check(), _MAX_OUTPUT + _MAX_GROWTH * length, "use --ignore-chat-template"
        chunks, length = [], 0
        try:
            for chunk in template.generate(**values):
                chunks.append(chunk)
                length += len(chunk)
                if length > most:
                    raise BundleError(f"the chat template fails (it makes more than {most:,} characters); {advice}")
        except _Refusal as error:
            raise UsageError(f"the model's chat template refuses these messages: {error!s:.300}") from error
        except BundleError:
            raise
        except Exception as error:  # a template can raise any exception
            failed = f"{type(error).__name__}: {error!s:.300}"
            raise BundleError(f"the chat template fails ({failed}); {advice}") from error
        return "".join(chunks)


def after_answer(render: Callable[..., str]) -> list[str]:
    """What a template writes after an assistant's message: at the end, and before the user's next message. ``render`` is
    called with messages and ``add_generation_prompt``; its errors are passed on."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    next_turn = {"role": "user", "content": "and then?"}
    whole = (render(turns, add_generation_prompt=False), render([*turns, next_turn], add_generation_prompt=False))
    last, between = (text.rpartition(_PROBE)[2] for text in whole)
    return [last, between.partition(next_turn["content"])[0]]


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _length(value: Any) -> int:
    """Number of characters of all texts in ``value``; UsageError for values that JSON cannot represent."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_length(key) + _length(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_length, value))
    if value is not None and not isinstance(value, (bool, int, float)) and not hasattr(value, "item"):
        raise UsageError(f"messages: expected texts, numbers, lists and mappings, found {type(value).__name__}")
    return 8


def _start_trial(given: bytes) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _TRIAL.format(path=[os.path.abspath(entry) for entry in sys.path])],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _TRIAL_ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C is for this process
        )


def _wait_for(trial: subprocess.Popen[bytes]) -> None:
    try:
        output, _ = trial.communicate(timeout=_TRIAL_TIMEOUT)
    except subprocess.TimeoutExpired:
        trial.kill()
        output, _ = trial.communicate()
    reason, code = output.decode(errors="replace").strip(), trial.returncode
    end = "for a message of two letters; convert again without it"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise BundleError(f"the chat template takes more than {_TRIAL_SECONDS} seconds {end}")
    if code:
        raise BundleError(f"the chat template crashes, or needs more than {_TRIAL_BYTES >> 20:,} MB of memory, {end}")
    if reason:
        raise BundleError(f"the chat template is no valid Jinja: {reason}; convert again without it")


def _run_trial() -> None:
    """The child process: compile, render a small conversation, and print an error of the compilation."""
    source, variables = json.load(sys.stdin.buffer)
    # CPU time since the start of the process; the soft limit's signal ends it.
    limit = int(time.process_time()) + _TRIAL_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
    try:
        template = _compile(source, variables)
    except MemoryError:
        raise
    except Exception as error:  # beside TemplateError: SyntaxError, RecursionError, OverflowError, …
        kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        print(f"{kind}{error!s:.300}")
        return
    messages = [{"role": "user", "content": "hi"}]
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        lengths = itertools.accumulate(map(len, template.generate(values)))
        any(length > 10 * _MAX_OUTPUT for length in lengths)  # rendering stops there
    except MemoryError:
        raise
    except Exception:
        pass  # the template may need other messages
