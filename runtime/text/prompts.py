"""What may be asked of a model: prompts in every form that is taken, and the texts that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.guard.arguments import integer, quoted, text

__all__ = ["Message", "Prompt", "as_prompts", "stop_texts"]

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]

_FORMS = "a text, messages with a role, token ids, or a list of these"


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """The prompts that ``prompt`` holds, and whether it is a single one.

    Token ids may be numpy's or torch's: a vector of integers is a prompt, a matrix is a list of them.

    Raises:
        UsageError: something else, or different things in one list.
    """
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return [text("prompt", prompt)], True
    kinds = _kinds(prompt, "prompt")
    if kinds != "prompts":
        return [_single(prompt, kinds, "prompt")], True
    prompts: list[Prompt] = []
    for index, one in enumerate(prompt):
        where = f"prompt[{index}]"
        one = _plain(one)
        if isinstance(one, str):
            prompts.append(text(where, one))
        elif (kind := _kinds(one, where)) == "prompts":
            raise UsageError(f"{where}: expected a text, messages or token ids, found a list of lists: {quoted(one)}")
        else:
            prompts.append(_single(one, kind, where))
    return prompts, False


def stop_texts(stop: Any) -> list[str]:
    """The texts before which an answer ends: none, one, or several of them.

    Raises:
        UsageError: something else, or an empty text.
    """
    if stop is None:
        return []
    several = [stop] if isinstance(stop, str) else stop
    if not isinstance(several, (list, tuple, set, frozenset)):
        raise UsageError(f"stop: expected a text, or a list of texts, found {quoted(stop)}")
    return [text("stop", one, empty=False) for one in several]


def _plain(value: Any) -> Any:
    """Arrays of numpy and tensors of torch as lists of Python's numbers."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def _kinds(prompt: Any, where: str) -> str:
    """What a list holds: ``ids``, ``messages`` or ``prompts``, one of them throughout."""
    if isinstance(prompt, Mapping):
        raise UsageError(f"{where}: expected {_FORMS}, found one message: put it into a list")
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        raise UsageError(f"{where}: expected {_FORMS}, found {quoted(prompt)}")
    if not prompt:
        raise UsageError(f"{where}: expected {_FORMS}, found an empty list")
    first = _kind(prompt[0])
    for index, one in enumerate(prompt):
        kind = _kind(one)
        if kind is None:
            raise UsageError(f"{where}[{index}]: expected {_FORMS}, found {quoted(one)}")
        if kind != first:
            raise UsageError(f"{where}: expected one kind of thing in a list, found {first} and then {quoted(one)}")
    assert first is not None
    return first


def _kind(value: Any) -> str | None:
    """What a list is that has ``value`` in it; None for what no prompt holds."""
    if isinstance(value, Mapping):
        return "messages"
    if isinstance(value, (str, Sequence)) or getattr(value, "shape", ()) != ():
        return "prompts"
    return "ids" if hasattr(value, "__index__") and not isinstance(value, bool) else None


def _single(prompt: Sequence[Any], kind: str, where: str) -> Prompt:
    if kind == "ids":
        return [integer(f"{where}[{index}]", one, 0) for index, one in enumerate(prompt)]
    for index, message in enumerate(prompt):
        _check_message(message, f"{where}[{index}]")
    return list(prompt)


def _check_message(message: Message, where: str) -> None:
    """A message has a role, and a content unless it holds something else, such as the calls of tools."""
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{where}: expected a message with a role (str) and a content, found {quoted(dict(message))}")
    content = message.get("content")
    if isinstance(content, list) or (content is None and message.keys() - {"role", "content"}):
        return  # the model's chat template knows parts and calls, or refuses them
    text(f"{where}: content", content)
