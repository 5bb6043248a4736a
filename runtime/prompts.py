"""What callers give as prompts and stop strings, checked: texts, messages and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.guard import integer, quoted, text

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]

_FORMS = "a text, messages with a role, token ids, or a list of these"


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """The prompts that ``prompt`` holds, and whether it is a single one.

    Token ids may be numpy's or torch's: a vector of integers is a prompt, a matrix is a list of them.
    """
    prompt = _without_arrays(prompt)
    if isinstance(prompt, str):
        return [text("prompt", prompt)], True
    kind = _list_kind(prompt, "prompt")
    if kind != "prompts":
        return [_checked(prompt, kind, "prompt")], True
    prompts: list[Prompt] = []
    for index, one in enumerate(prompt):
        where = f"prompt[{index}]"
        one = _without_arrays(one)
        if isinstance(one, str):
            prompts.append(text(where, one))
        elif (kind := _list_kind(one, where)) == "prompts":
            raise UsageError(f"{where}: expected a text, messages or token ids, found a list of lists: {quoted(one)}")
        else:
            prompts.append(_checked(one, kind, where))
    return prompts, False


def stop_texts(stop: Any) -> list[str]:
    """The texts before which an answer ends: none, one, or several of them."""
    if stop is None:
        return []
    several = [stop] if isinstance(stop, str) else stop
    if not isinstance(several, (list, tuple, set, frozenset)):
        raise UsageError(f"stop: expected a text, or a list of texts, found {quoted(stop)}")
    return [text("stop", one, empty=False) for one in several]


def _without_arrays(value: Any) -> Any:
    """Arrays of numpy and tensors of torch as lists."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def _list_kind(prompt: Any, where: str) -> str:
    """What a list holds: ``ids``, ``messages`` or ``prompts``, one of them throughout."""
    if isinstance(prompt, Mapping):
        raise UsageError(f"{where}: expected {_FORMS}, found one message: put it into a list")
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        raise UsageError(f"{where}: expected {_FORMS}, found {quoted(prompt)}")
    if not prompt:
        raise UsageError(f"{where}: expected {_FORMS}, found an empty list")
    first = ""
    for index, one in enumerate(prompt):
        if isinstance(one, Mapping):
            kind = "messages"
        elif isinstance(one, (str, Sequence)) or getattr(one, "shape", ()) != ():
            kind = "prompts"
        elif hasattr(one, "__index__") and not isinstance(one, bool):
            kind = "ids"
        else:
            raise UsageError(f"{where}[{index}]: expected {_FORMS}, found {quoted(one)}")
        first = first or kind
        if kind != first:
            raise UsageError(f"{where}: expected one kind of thing in a list, found {first} and then {quoted(one)}")
    return first


def _checked(prompt: Sequence[Any], kind: str, where: str) -> Prompt:
    if kind == "ids":
        return [integer(f"{where}[{index}]", one, 0) for index, one in enumerate(prompt)]
    for index, message in enumerate(prompt):
        if not isinstance(message.get("role"), str):
            found = quoted(dict(message))
            raise UsageError(f"{where}[{index}]: expected a message with a role (str) and a content, found {found}")
        content = message.get("content")
        # The chat template knows parts and calls of tools, or refuses them.
        if not isinstance(content, list) and (content is not None or not message.keys() - {"role", "content"}):
            text(f"{where}[{index}]: content", content)
    return list(prompt)
