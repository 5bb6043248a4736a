"""Chat templates: messages to the text a model was trained on, rendered as transformers does, in a sandbox.

The template is a program that came with the model: it runs without access to Python's objects, and may neither grow its
output without bound nor multiply strings to fill the memory.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wisparse.formats.errors import BundleError, UsageError

__all__ = ["ChatTemplate"]

# Far above any context; a template that prints more is broken or hostile.
_MOST_CHARACTERS = 64 << 20


class _TemplateMessage(Exception):
    """What a template says through ``raise_exception``: the messages are not in a form it accepts."""


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator != "%" or isinstance(left, str):
            sizes = [len(side) if isinstance(side, (str, list, tuple)) else abs(side) for side in (left, right)]
            plain = all(isinstance(side, (int, float)) for side in (left, right))
            if operator == "**" and max(sizes) > 1024:
                raise OverflowError("a power of such numbers is not allowed in a chat template")
            if operator == "*" and not plain and sizes[0] * sizes[1] > _MOST_CHARACTERS:
                raise OverflowError("such a long repetition is not allowed in a chat template")
            if operator == "%" and len(left) > 1024:
                raise OverflowError("such a long format is not allowed in a chat template")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: marks the assistant's words for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _TemplateMessage(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        variables: what the template sees beside the messages: ``bos_token``, ``eos_token`` and the like.

    Raises:
        BundleError: not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise BundleError(f"the chat template is no valid Jinja: {error}; pass raw text instead") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """The conversation as text, ready for the model's answer.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with the opening of an assistant's turn.
            more: further variables the template may know (``enable_thinking``, ``tools``, …).

        Raises:
            UsageError: the template refuses these messages.
            BundleError: the template itself fails.
        """
        values = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            **self._variables,
            "add_generation_prompt": add_generation_prompt,
            **more,
        }
        pieces, length = [], 0
        try:
            for piece in self._template.generate(values):
                length += len(piece)
                if length > _MOST_CHARACTERS:
                    raise OverflowError("its output does not end")
                pieces.append(piece)
        except _TemplateMessage as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # any Python error can come out of a stranger's program
            raise BundleError(
                f"the chat template fails ({type(error).__name__}: {error}); use --ignore-chat-template"
            ) from error
        return "".join(pieces)
