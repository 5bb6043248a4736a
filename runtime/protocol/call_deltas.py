"""What the pieces of an answer add to its calls, and how OpenAI writes that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CallDelta", "call_delta", "same_call", "whole_calls"]


@dataclass(frozen=True)
class CallDelta:
    """What a piece adds to a call: its beginning, which has a name, or some of its arguments' JSON."""

    index: int
    text: str = ""
    id: str | None = None
    name: str | None = None


def same_call(part: str | CallDelta) -> tuple[int, bool] | None:
    """What neighbours have in common that may go out as one: a call's name comes before its arguments; None: text."""
    return (part.index, part.name is not None) if isinstance(part, CallDelta) else None


def call_delta(parts: Sequence[CallDelta]) -> dict[str, Any]:
    """A call's name, or some more of its arguments."""
    first, text = parts[0], "".join(part.text for part in parts)
    if first.name is None:
        return {"index": first.index, "function": {"arguments": text}}
    return {
        "index": first.index, "id": first.id, "type": "function", "function": {"name": first.name, "arguments": text}
    }  # fmt: skip


def whole_calls(parts: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Calls from their parts, in order."""
    calls = []
    for _, group in itertools.groupby(parts, lambda part: part.index):
        first, *rest = group
        arguments = "".join(part.text for part in rest)
        calls.append({"id": first.id, "type": "function", "function": {"name": first.name, "arguments": arguments}})
    return calls
