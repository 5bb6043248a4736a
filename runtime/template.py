"""Chat templates: messages to the text a model was trained on, rendered as transformers does, in a sandbox.

The template is a program that came with the model: it runs without access to Python, and on a budget (``sandbox``).
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

from wisparse.formats.errors import BundleError, UsageError

from .sandbox import Sandbox, budget

__all__ = ["ChatTemplate"]


class _TemplateMessage(Exception):
    """What a template says through ``raise_exception``: the messages are not in a form it accepts."""


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
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        environment.add_filter("tojson", _to_json)
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
        try:
            with budget():
                return self._template.render(values)
        except _TemplateMessage as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # any Python error can come out of a stranger's program
            raise BundleError(
                f"the chat template fails ({type(error).__name__}: {error}); use --ignore-chat-template"
            ) from error
