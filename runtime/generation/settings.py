"""What callers give to ``Model.generate``, checked: prompts, and the options with their names for a type checker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from wisparse.formats import guard
from wisparse.formats.errors import UsageError
from wisparse.formats.weight_types import PREFILL_POLICIES

from ..decoding.sampling import SamplingParams
from .grammar import Grammar

F = TypeVar("F", bound=Callable[..., Any])
Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]

_FORMS = "a text, messages with a role, token ids, or a list of these"


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts that an argument holds, and whether it is a single one.

    Token ids may be numpy's or torch's: a vector of integers is a prompt, a matrix is a list of them.
    """
    single = _as_prompt(prompts, "prompt")
    if single is not None:
        return [single], True
    found = []
    for index, given in enumerate(prompts):
        prompt = _as_prompt(given, f"prompt[{index}]")
        if prompt is None:
            raise UsageError(
                f"prompt[{index}]: expected a text, messages or token ids, found a list of lists: {guard.quoted(given)}"
            )
        found.append(prompt)
    return found, False


def _as_prompt(given: Any, where: str) -> Prompt | None:
    """One prompt, checked; None if it is a list of prompts."""
    if hasattr(given, "tolist") and hasattr(given, "shape"):
        given = given.tolist()
    if isinstance(given, str):
        return guard.text(where, given)
    if isinstance(given, Mapping):
        raise UsageError(f"{where}: expected {_FORMS}, found one message: put it into a list")
    if isinstance(given, (bytes, bytearray, memoryview)) or not isinstance(given, Sequence):
        raise UsageError(f"{where}: expected {_FORMS}, found {guard.quoted(given)}")
    if not given:
        raise UsageError(f"{where}: expected {_FORMS}, found an empty list")
    first = ""
    for index, one in enumerate(given):
        if isinstance(one, Mapping):
            kind = "messages"
        elif isinstance(one, (str, Sequence)) or getattr(one, "shape", ()) != ():
            kind = "prompts"
        elif hasattr(one, "__index__") and not isinstance(one, bool):
            kind = "ids"
        else:
            raise UsageError(f"{where}[{index}]: expected {_FORMS}, found {guard.quoted(one)}")
        first = first or kind
        if kind != first:
            found = f"{first} and then {guard.quoted(one)}"
            raise UsageError(f"{where}: expected one kind of thing in a list, found {found}")
    if first == "prompts":
        return None
    if first == "ids":
        return [guard.integer(f"{where}[{index}]", one, 0) for index, one in enumerate(given)]
    for index, message in enumerate(given):
        if not isinstance(message.get("role"), str):
            found = guard.quoted(dict(message))
            raise UsageError(f"{where}[{index}]: expected a message with a role (str) and a content, found {found}")
        content = message.get("content")
        # The chat template knows parts and calls of tools, or refuses them.
        if not isinstance(content, list) and (content is not None or not message.keys() - {"role", "content"}):
            guard.text(f"{where}[{index}]: content", content)
    return list(given)


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplingParams):
    """How prompts are continued: the keyword arguments of ``Model.generate``, described there."""

    max_new_tokens: int | None = 256
    json_schema: Mapping[str, Any] | str | None = None
    grammar: str | None = None
    stop: str | Sequence[str] | None = None
    system_prompt: str | None = None
    chat_template: bool | None = None
    prefill: str | None = None
    measure_sparsity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.stop_texts, self.parsed_grammar  # which check what they are made from
        if self.max_new_tokens is not None:  # numpy's integers become Python's
            object.__setattr__(self, "max_new_tokens", guard.integer("max_new_tokens", self.max_new_tokens, 1))
        if self.system_prompt is not None:
            guard.text("system_prompt", self.system_prompt)
        if self.chat_template is not None:
            guard.switch("chat_template", self.chat_template)
        if self.prefill is not None:
            guard.choice("prefill", self.prefill, PREFILL_POLICIES)
        guard.switch("measure_sparsity", self.measure_sparsity)

    @property
    def parsed_grammar(self) -> Grammar | None:
        if self.json_schema is not None and self.grammar is not None:
            raise UsageError("grammar: expected none beside json_schema, found both")
        if self.json_schema is not None:
            return Grammar.of_schema("json_schema", self.json_schema)
        return None if self.grammar is None else Grammar.of_text("grammar", self.grammar)

    @property
    def stop_texts(self) -> list[str]:
        if self.stop is None:
            return []
        several = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(several, (list, tuple, set, frozenset)):
            raise UsageError(f"stop: expected a text, or a list of texts, found {guard.quoted(self.stop)}")
        return [guard.text("stop", one, empty=False) for one in several]


class GenerationArguments(TypedDict, total=False):
    """The fields of :class:`GenerationSettings`, for ``Unpack``."""

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    json_schema: Mapping[str, Any] | str | None
    grammar: str | None
    stop: str | Sequence[str] | None
    system_prompt: str | None
    chat_template: bool | None
    prefill: str | None
    measure_sparsity: bool


def spelled_out(function: F) -> F:
    """Give a function that takes ``**settings`` a signature with the fields' names and defaults."""
    signature = inspect.signature(function)
    keywords = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(GenerationSettings)
    ]
    parameters = [*list(signature.parameters.values())[:-1], *keywords]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function
