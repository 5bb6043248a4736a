"""How models write calls of functions; which way is told by a model's chat template.

A call is a JSON object with ``name`` and ``arguments`` (or ``parameters``), behind a marker:

    hermes   <tool_call>{...}</tool_call>      Hermes, Qwen 2.5 and 3
    llama    {...}; {...}  or  <|python_tag|>{...}      Llama 3.1 to 3.3: an answer or a line begins with it
    mistral  [TOOL_CALLS][{...}, {...}]
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

__all__ = ["HERMES", "LLAMA", "MISTRAL", "Syntax", "syntax_of"]


@dataclass(frozen=True)
class Syntax:
    """How a model writes calls.

    Attributes:
        opens: the marker before a call, or before the list of them.
        closes: what may stand behind a call, and belongs to it.
        listed: calls are a JSON list.
        bare: a call may do without its marker where a line begins.
        key: how the model calls the arguments.
        short: ids have nine characters, else the template refuses them.
    """

    opens: str
    closes: str
    key: str = "arguments"
    listed: bool = False
    bare: bool = False
    short: bool = False

    def new_id(self) -> str:
        """A name for a call."""
        return uuid.uuid4().hex[:9] if self.short else f"call_{uuid.uuid4().hex[:24]}"


HERMES = Syntax("<tool_call>", "</tool_call>")
LLAMA = Syntax("<|python_tag|>", ";", key="parameters", bare=True)
MISTRAL = Syntax("[TOOL_CALLS]", "]", listed=True, short=True)


def syntax_of(template: str) -> Syntax | None:
    """The syntax that a chat template writes; None if it knows no tools, or has a syntax that is not known here."""
    text = template.replace('\\"', '"')
    if "tools" not in text:
        return None
    if "<tool_call>" in text:
        # Others write <function=name> or <arg_key> between the same tags.
        return HERMES if "arguments" in text and "<function=" not in text and "<arg_key>" not in text else None
    if MISTRAL.opens in text:
        return None if "[ARGS]" in text else MISTRAL
    return LLAMA if '"parameters": ' in text and '{"name": ' in text else None
