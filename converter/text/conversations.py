"""Conversations as text: through the source's own chat template, which is a stranger's program like any bundle's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from wisparse.formats.errors import BundleError, UsageError, printable
from wisparse.formats.guard.template import ChatTemplate

__all__ = ["Conversations", "TemplateError"]


class TemplateError(Exception):
    """The template refuses the messages, fails, or takes more time or memory than it may; says which."""


class Conversations:
    """The chat template of a tokenizer of transformers', rendered in a process apart (``formats.guard.sandbox``).

    Attributes:
        source: the template's text; None without one.
    """

    def __init__(self, tokenizer: Any) -> None:
        found = tokenizer.chat_template
        # Several are kept by name; the one that is meant without a name is called so.
        self.source: str | None = (found.get("default") if isinstance(found, dict) else found) or None
        self._variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}

    @cached_property
    def _template(self) -> ChatTemplate:
        assert self.source is not None
        return ChatTemplate(self.source, self._variables)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """The conversation as the model was trained on it.

        Raises:
            TemplateError: see there.
        """
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except (BundleError, UsageError) as error:
            raise TemplateError(printable(str(error.__cause__ or error))) from error
