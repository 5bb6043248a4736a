"""Validated arguments of generation, the request that the engine runs, and its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch

from wisparse.formats import guard
from wisparse.formats.config_fields import SAMPLING_FIELDS
from wisparse.formats.errors import UsageError
from wisparse.formats.weight_types import PREFILL_POLICIES, sparse_from

from ..decoding.sampling import SamplingParams
from ..thoughts import LogitsMask, ThoughtParser
from .grammar import Grammar
from .logits import LogitsProcessor, TokenScore, score_tokens
from .speculation import DraftCounts, Drafter

F = TypeVar("F", bound=Callable[..., Any])
Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]

_MAX_ANSWERS = 64  # to one prompt
# Checks of the fields of `GenerationSettings` whose values are independent of others.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": partial(guard.integer, least=1),
    "n": partial(guard.integer, least=1, most=_MAX_ANSWERS),
    "prefill": partial(guard.choice, known=PREFILL_POLICIES),
    "thinking_budget": partial(guard.integer, least=0),
    **dict.fromkeys(("measure_sparsity", "speculative", "thinking"), guard.switch),
    **dict.fromkeys(("system_prompt", "reasoning_effort"), guard.text),
}

_FORMS = "a text, messages with a role, token ids, or a list of these"


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts of an argument, and whether it is a single one. Token ids may be a numpy array or a tensor: a vector
    of integers is a prompt, a matrix is a list of them."""
    single = _as_prompt(prompts, "prompt")
    if single is not None:
        return [single], True
    checked = []
    for index, value in enumerate(prompts):
        prompt = _as_prompt(value, f"prompt[{index}]")
        if prompt is None:
            nested = f"found a list of lists: {guard.quoted(value)}"
            raise UsageError(f"prompt[{index}]: expected a text, messages or token ids, {nested}")
        checked.append(prompt)
    return checked, False


def _as_prompt(value: Any, field: str) -> Prompt | None:
    """One prompt, checked; None if it is a list of prompts."""
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        value = value.tolist()
    if isinstance(value, str):
        return guard.text(field, value)
    if isinstance(value, Mapping):
        raise UsageError(f"{field}: expected {_FORMS}, found one message: put it into a list")
    if isinstance(value, (bytes, bytearray, memoryview)) or not isinstance(value, Sequence):
        raise UsageError(f"{field}: expected {_FORMS}, found {guard.quoted(value)}")
    if not value:
        raise UsageError(f"{field}: expected {_FORMS}, found an empty list")
    first_kind = ""
    for index, item in enumerate(value):
        if isinstance(item, Mapping):
            kind = "messages"
        elif isinstance(item, (str, Sequence)) or getattr(item, "shape", ()) != ():
            kind = "prompts"
        elif hasattr(item, "__index__") and not isinstance(item, bool):
            kind = "ids"
        else:
            raise UsageError(f"{field}[{index}]: expected {_FORMS}, found {guard.quoted(item)}")
        first_kind = first_kind or kind
        if kind != first_kind:
            mixed = f"{first_kind} and then {guard.quoted(item)}"
            raise UsageError(f"{field}: expected one kind of thing in a list, found {mixed}")
    if first_kind == "prompts":
        return None
    if first_kind == "ids":
        return [guard.integer(f"{field}[{index}]", token, 0) for index, token in enumerate(value)]
    messages: list[Message] = []
    for index, message in enumerate(value):
        expected = "a message with a role (str) and a content"
        guard.expect(isinstance(message.get("role"), str), f"{field}[{index}]", expected, dict(message))
        content = message.get("content")
        # Tool calls are validated by the chat template.
        if isinstance(content, list):
            where, expected = f"{field}[{index}]: content", "a text, or parts {'type': 'text', 'text': …}"
            for part in content:
                is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
                guard.expect(is_text, where, expected, part)
            message = {**message, "content": "".join(part["text"] for part in content)}
        elif content is not None or not message.keys() - {"role", "content"}:
            guard.text(f"{field}[{index}]: content", content)
        messages.append(message)
    return messages


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplingParams):
    """The keyword arguments of ``Model.generate``, described there."""

    max_new_tokens: int | None = 256
    n: int = 1
    json_schema: Mapping[str, Any] | str | None = None
    grammar: str | None = None
    stop: str | Sequence[str] | None = None
    system_prompt: str | None = None
    chat_template: bool | str | None = None
    prefill: str | None = None
    measure_sparsity: bool = False
    speculative: bool = True
    thinking: bool | None = None
    thinking_budget: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in fields(self):
            value, check = getattr(self, option.name), _CHECKS.get(option.name)
            if check is not None and not (value is None and "None" in str(option.type)):
                object.__setattr__(self, option.name, check(option.name, value))  # a numpy integer becomes an int
        kwargs = self.chat_template_kwargs
        guard.expect(kwargs is None or isinstance(kwargs, Mapping), "chat_template_kwargs", "a mapping", kwargs)
        _ = self.stop_texts, self.parsed_grammar  # both validate their fields
        if isinstance(self.chat_template, str):
            guard.text("chat_template", self.chat_template, empty=False)
        elif self.chat_template is not None:
            guard.switch("chat_template", self.chat_template)

    @property
    def parsed_grammar(self) -> Grammar | None:
        if self.json_schema is not None and self.grammar is not None:
            raise UsageError("grammar: expected none beside a JSON schema, found both")
        if self.json_schema is not None:
            return Grammar.of_schema("json_schema", self.json_schema)
        return None if self.grammar is None else Grammar("grammar", self.grammar)

    @property
    def stop_texts(self) -> list[str]:
        if self.stop is None:
            return []
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        guard.expect(isinstance(stop, (list, tuple, set, frozenset)), "stop", "a text, or a list of texts", self.stop)
        return [guard.text("stop", text, empty=False) for text in stop]

    @classmethod
    def as_keywords(cls, function: F) -> F:
        """Decorator: replace ``**settings`` in a function's signature by the fields and their defaults; None for those
        that generation_config.json has."""
        signature, make = inspect.signature(function), partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        defaults = {entry.name: None if entry.name in SAMPLING_FIELDS else entry.default for entry in fields(cls)}
        types = {name: hint.__forward_arg__ for name, hint in GenerationArguments.__annotations__.items()}
        keywords = [make(name, default=default, annotation=types[name]) for name, default in defaults.items()]
        parameters = [*list(signature.parameters.values())[:-1], *keywords]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function


class GenerationArguments(TypedDict, total=False):
    """The fields of :class:`GenerationSettings`, for ``Unpack``."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    n: int
    json_schema: Mapping[str, Any] | str | None
    grammar: str | None
    stop: str | Sequence[str] | None
    system_prompt: str | None
    chat_template: bool | str | None
    prefill: str | None
    measure_sparsity: bool
    speculative: bool
    thinking: bool | None
    thinking_budget: int | None
    reasoning_effort: str | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class Generation:
    """The result of a finished request.

    Attributes:
        text: the answer without special tokens, the stop string and the thought.
        thought: what a reasoning model thought before the answer; of conversations.
        thought_tokens: tokens of the thought, including its markers.
        thought_closed: false if the thought did not end, so that there is no answer.
        token_ids: all generated ids, including those of a stop token or stop string.
        finish_reason: ``stop`` (a stop token or string) or ``length`` (``max_new_tokens`` or the context's end).
        seed: reproduces a sampled answer; None for a greedy one.
        prompt_seconds: wall time from the first prefill chunk to the first token.
        generation_seconds: wall time from the first token to the last, including the time of a stream's reader; 0 for
            a single token. Compilation and graph capture come before the prompt and are not counted.
        peak_memory_bytes: peak memory so far: of the GPU, else of this process.
        realised_sparsity: share of the projections' weights not needed at the sparse positions, over all requests that
            ran since the measurement began, of a GPU's decode steps of the first and every 16th after it; None without
            ``measure_sparsity``.
        scores: log-probabilities of ``token_ids``; None without ``logprobs``.
        prompt_scores: log-probabilities of the prompt's tokens except the first; None without ``score_prompt``.
        cached_tokens: prompt tokens whose KV cache entries were reused.
        stop_string: the stop string that ended the answer, or None.
        drafts: number of verified drafts, of their tokens and of accepted tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int | None
    prompt_tokens: int
    prompt_seconds: float
    generation_seconds: float
    peak_memory_bytes: int
    realised_sparsity: float | None = None
    scores: tuple[TokenScore, ...] | None = None
    prompt_scores: tuple[TokenScore, ...] | None = None
    cached_tokens: int = 0
    stop_string: str | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)
    thought: str = ""
    thought_tokens: int = 0
    thought_closed: bool = True

    @property
    def prompt_tok_per_s(self) -> float:
        """Prompt tokens prefilled per second, without cached ones."""
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tok_per_s(self) -> float:
        """Tokens decoded per second, without the first, which prefill gives; 0 for a single token."""
        return (len(self.token_ids) - 1) / self.generation_seconds if self.generation_seconds else 0.0


@dataclass(frozen=True)
class Chunk:
    """One token of a streamed answer."""

    text: str  # complete characters; may be empty: a possible start of a stop string is held back
    token_id: int
    finish_reason: str | None = None  # on the last chunk, as is ``generation``
    generation: Generation | None = None
    score: TokenScore | None = None  # as in ``Generation``
    prompt_scores: Sequence[TokenScore] | None = None  # on the first chunk
    thought: str = ""  # what the token adds to the thought


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and its state in the scheduler."""

    prompt_token_ids: Sequence[int]  # at least one
    max_new_tokens: int | None = None  # None: up to the context's end
    # the scheduler sets a missing seed
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()  # strings that end the answer and are not part of it
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end the answer and are its last
    prefill: str = "dense"  # one of ``PREFILL_POLICIES``
    # the sparsity level, 0 for the dense model; None: the scheduler's default, which ``Scheduler.add`` sets
    sparsity: float | None = None
    constraint: LogitsMask | None = None  # its grammar state; not shared with other requests
    score_prompt: bool = False  # return the prompt's log-probabilities; needs ``sampling.logprobs``
    visible_special_tokens: frozenset[int] = frozenset()  # special tokens kept in the answer's text
    thoughts: ThoughtParser | None = None  # separates the thought; not shared with other requests
    measure_sparsity: bool = False  # return the realised sparsity; needs ``start_measuring``
    speculative: bool = True  # no effect on a scheduler without speculation

    arrival: int = field(default=0, init=False)  # number in the order of arrival; this and the next: by the scheduler
    running: bool = field(default=False, init=False)  # has a slot of the decoder
    # None until finished: ``stop``, ``length``, ``cancelled`` or ``error``
    finish_reason: str | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)  # the exception behind ``error``
    done: bool = field(default=False, init=False)  # the last chunk or the error was delivered; by the engine
    output_token_ids: list[int] = field(default_factory=list, init=False)
    scores: list[TokenScore] = field(default_factory=list, init=False)
    prompt_scores: list[TokenScore] | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)  # prompt tokens reused from the prefix cache
    # during prefill: positions of prompt and output whose keys and values are in the slot
    num_computed_tokens: int = field(default=0, init=False)
    num_prefilled: int = field(default=0, init=False)  # tokens computed by prefill, not decode
    max_positions: int = field(default=0, init=False)  # of prompt and answer; the last token needs none
    prefill_started: float = field(default=0.0, init=False)
    first_token_time: float = field(default=0.0, init=False)
    last_token_time: float = field(default=0.0, init=False)
    processor: LogitsProcessor = field(init=False, repr=False)
    drafter: Drafter | None = field(default=None, init=False, repr=False)
    drafts: DraftCounts = field(default_factory=DraftCounts, init=False)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def sparse_from(self) -> int:
        """The first masked position of the prompt; at sparsity 0 there is none."""
        return sparse_from(self.prefill if self.sparsity != 0 else "dense", len(self.prompt_token_ids))

    @property
    def needs_prompt_scores(self) -> bool:
        return self.score_prompt and self.sampling.logprobs is not None and not self.output_token_ids

    def score_prompt_tokens(self, logits: torch.Tensor) -> None:
        """Append the log-probabilities of the next prompt tokens, by the logits (n, V) before them."""
        assert self.prompt_scores is not None
        assert self.sampling.logprobs is not None
        first = len(self.prompt_scores) + 1
        following = self.prompt_token_ids[first : first + len(logits)]
        self.prompt_scores += score_tokens(logits[: len(following)], following, self.sampling.logprobs)
