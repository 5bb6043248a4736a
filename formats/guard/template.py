"""Chat templates: messages to the text a model was trained on, rendered as transformers does, in a process apart.

The template is a program that came with the model: it runs without access to Python, and on a budget (``sandbox``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BundleError, UsageError
from .sandbox import Worker, WorkerError

__all__ = ["ChatTemplate"]

_MEGABYTES = 512
# A rendered conversation is its messages, tools and documents, each maybe indented or told twice, between fixed words.
_CHARACTERS = 200_000
_TIMES = 8


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        variables: what the template sees beside the messages: ``bos_token``, ``eos_token`` and the like.

    Raises:
        BundleError: not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        try:
            self._worker = Worker("template", _MEGABYTES, source=source, variables=dict(variables))
        except WorkerError as error:
            raise BundleError(f"the chat template is no valid Jinja: {error}; convert again without it") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """The conversation as text, ready for the model's answer.

        Args:
            messages: each with ``role`` and ``content``; texts, numbers, lists and mappings, as in JSON.
            add_generation_prompt: end with the opening of an assistant's turn.
            more: further variables the template may know (``enable_thinking``, ``tools``, …).

        Raises:
            UsageError: the template refuses these messages, or they hold something else than JSON has.
            BundleError: the template itself fails, takes too long, or makes far more text than it was given.
        """
        values = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **more,
        }
        try:
            text: str = self._worker.ask("render", values=values, most=_CHARACTERS + _TIMES * _length(values))
        except WorkerError as error:
            if error.kind == "Refusal":
                reason = error.args[0]
                raise UsageError(f"the model's chat template refuses these messages: {reason}") from error
            raise BundleError(f"the chat template fails ({error}); use --ignore-chat-template") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"messages: {error}") from error
        return text


def _length(value: Any) -> int:
    """Characters of all texts in ``value``."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_length(key) + _length(item) for key, item in value.items())
    return sum(map(_length, value)) if isinstance(value, (list, tuple)) else 8
