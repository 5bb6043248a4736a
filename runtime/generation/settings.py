"""The options of generation, checked when they are given, and the same names for a type checker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from wisparse.formats import guard
from wisparse.formats.errors import UsageError
from wisparse.formats.weight_types import PREFILL_POLICIES

from ..decoding.sampling import SamplingParams
from ..prompts import stop_texts
from .grammar import Grammar

F = TypeVar("F", bound=Callable[..., Any])


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
        return stop_texts(self.stop)


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
