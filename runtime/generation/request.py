"""What callers ask for, checked; a request on its way through the engine; and the answer that it gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch

from wisparse.formats import guard
from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.weight_types import PREFILL_POLICIES

from ..decoding.decoder import peak_bytes
from ..decoding.sampling import SamplingParams
from ..tokenizer import Detokenizer, StopStrings
from .grammar import Constraint, Grammar
from .logits import LogitsProcessor, TokenScore
from .speculation import DraftCounts, Drafter

F = TypeVar("F", bound=Callable[..., Any])
Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]

_FORMS = "a text, messages with a role, token ids, or a list of these"


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts that an argument holds, and whether it is a single one. Token ids may be numpy's or torch's: a vector
    of integers is a prompt, a matrix is a list of them."""
    single = _as_prompt(prompts, "prompt")
    if single is not None:
        return [single], True
    found = []
    for index, given in enumerate(prompts):
        prompt = _as_prompt(given, f"prompt[{index}]")
        if prompt is None:
            nested = f"found a list of lists: {guard.quoted(given)}"
            raise UsageError(f"prompt[{index}]: expected a text, messages or token ids, {nested}")
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
        words = "a message with a role (str) and a content"
        guard.expect(isinstance(message.get("role"), str), f"{where}[{index}]", words, dict(message))
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
    speculative: bool = True

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
        guard.switch("speculative", self.speculative)

    @property
    def parsed_grammar(self) -> Grammar | None:
        if self.json_schema is not None and self.grammar is not None:
            raise UsageError("grammar: expected none beside json_schema, found both")
        if self.json_schema is not None:
            return Grammar.of_schema("json_schema", self.json_schema)
        return None if self.grammar is None else Grammar("grammar", self.grammar)

    @property
    def stop_texts(self) -> list[str]:
        if self.stop is None:
            return []
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        guard.expect(isinstance(given, (list, tuple, set, frozenset)), "stop", "a text, or a list of texts", self.stop)
        return [guard.text("stop", one, empty=False) for one in given]

    @classmethod
    def spelled_out(cls, function: F) -> F:
        """Give a function that takes ``**settings`` a signature with the fields' names and defaults."""
        signature, make = inspect.signature(function), partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        keywords = [make(one.name, default=one.default, annotation=one.type) for one in fields(cls)]
        parameters = [*list(signature.parameters.values())[:-1], *keywords]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function


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
    speculative: bool


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer without special tokens and without the stop string.
        token_ids: all generated ids, those of a stop token or stop string included.
        finish_reason: ``stop`` (a stop token or string) or ``length`` (``max_new_tokens``, or the context is full).
        seed: repeats a sampled answer; None for a greedy one.
        prompt_seconds: wall time from the first prefill chunk to the first token.
        generation_seconds: wall time from the first token to the last, the time a stream's reader takes included; 0 for
            a single token. Compilation and graph capture come before the prompt and are not counted.
        peak_memory_bytes: the most memory used so far: on a GPU the device's, else this process's.
        realised_sparsity: share of the projections' weights not needed at the sparse positions; None unless asked for.
            In a batch it is that of all answers together.
        scores: log-probabilities of ``token_ids``; None unless ``logprobs`` asks for them.
        prompt_scores: those of the prompt's tokens but the first; None unless a request asks for them.
        cached_tokens: prompt tokens that the KV cache held already.
        stop_string: the stop string that ended the answer; None if something else did.
        drafts: of speculation: how many drafts were verified, how many tokens they had, how many were accepted.
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

    @property
    def prompt_tok_per_s(self) -> float:
        """Prompt tokens prefilled per second; cached ones are not counted."""
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tok_per_s(self) -> float:
        """Tokens decoded per second; the first comes from the prefill and is not counted. 0 for a single token."""
        return (len(self.token_ids) - 1) / self.generation_seconds if self.generation_seconds else 0.0


@dataclass(frozen=True)
class Chunk:
    """What one token adds to a streamed answer."""

    text: str  # whole characters, maybe none: an incomplete one or a possible start of a stop string is held back
    token_id: int
    finish_reason: str | None = None  # on the last chunk, as ``generation``, the whole answer
    generation: Generation | None = None
    score: TokenScore | None = None  # as in ``Generation``
    prompt_scores: Sequence[TokenScore] | None = None  # on the first chunk


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and its state."""

    prompt_token_ids: Sequence[int]  # at least one
    max_new_tokens: int | None = None  # None until the context is full
    # its seed is resolved when the scheduler queues the request
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()  # texts before which the answer ends
    stop_token_ids: frozenset[int] = frozenset()  # a token of these ends the answer, and is its last
    prefill: str = "dense"  # one of ``PREFILL_POLICIES``
    # the level to decode at, 0 for the dense model; None: the scheduler's default, resolved when queued
    sparsity: float | None = None
    constraint: Constraint | None = None  # what the answer may be, for this request alone
    score_prompt: bool = False  # give the prompt tokens' log-probabilities too; needs ``sampling.logprobs``
    visible_special_tokens: frozenset[int] = frozenset()  # special tokens that are part of the answer's text
    measure_sparsity: bool = False  # give the realised sparsity with the answer; the engine has to be measuring
    speculative: bool = True  # where the scheduler speculates

    number: int = field(default=0, init=False)  # in the order of arrival; by the scheduler
    running: bool = field(default=False, init=False)  # it has a slot of the decoder; set by the scheduler
    # None while under way; ``stop``, ``length``, ``cancelled`` or ``error``
    finish_reason: str | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)  # what ended the request, as it was raised
    done: bool = field(default=False, init=False)  # nothing more will be delivered
    output_token_ids: list[int] = field(default_factory=list, init=False)
    scores: list[TokenScore] = field(default_factory=list, init=False)
    prompt_scores: list[TokenScore] | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)  # prompt tokens that a slot held already
    # positions of the sequence (prompt and output) that its slot holds during prefill
    num_computed_tokens: int = field(default=0, init=False)
    num_prefilled: int = field(default=0, init=False)  # tokens read as a prompt, not decoded; by the scheduler
    most_positions: int = field(default=0, init=False)  # of prompt and answer; the answer's last token takes none
    prefill_started: float = field(default=0.0, init=False)
    first_token_time: float = field(default=0.0, init=False)
    last_token_time: float = field(default=0.0, init=False)
    processor: LogitsProcessor = field(init=False, repr=False)  # by the scheduler
    drafter: Drafter | None = field(default=None, init=False, repr=False)
    drafts: DraftCounts = field(default_factory=DraftCounts, init=False)

    deliver: Callable[[Chunk | WisparseError], None] = field(init=False, repr=False)  # these four by the engine
    final_only: bool = field(default=False, init=False)
    detokenizer: Detokenizer | None = field(default=None, init=False, repr=False)
    stop_strings: StopStrings = field(init=False, repr=False)
    text_parts: list[str] = field(default_factory=list, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def needs_prompt_scores(self) -> bool:
        return self.score_prompt and self.sampling.logprobs is not None and not self.output_token_ids

    @property
    def undelivered(self) -> int:
        return len(self.output_token_ids) - len(self.text_parts)

    def next_chunk(self) -> Chunk:
        """The first undelivered token as a chunk; its ``finish_reason`` is ``stop`` if it completes a stop string."""
        index = len(self.text_parts)
        token = self.output_token_ids[index]
        finish_reason = self.finish_reason if self.undelivered == 1 else None
        text = ""
        if self.detokenizer is not None:
            if finish_reason != "stop":  # a stop token has no text of its own
                text = self.stop_strings.add(self.detokenizer.add(token))
            if finish_reason is not None:
                text += self.stop_strings.add(self.detokenizer.finish()) + self.stop_strings.finish()
            if self.stop_strings.found is not None:
                finish_reason = "stop"
        self.text_parts.append(text)
        score = self.scores[index] if self.scores else None
        return Chunk(text, token, finish_reason, None, score, self.prompt_scores if index == 0 else None)

    def generation(self, finish_reason: str, device: torch.device, realised_sparsity: float | None) -> Generation:
        """The answer made of the chunks so far."""
        count = len(self.text_parts)
        return Generation(
            text="".join(self.text_parts),
            token_ids=tuple(self.output_token_ids[:count]),
            finish_reason=finish_reason,
            seed=None if self.sampling.greedy else self.sampling.seed,
            prompt_tokens=len(self.prompt_token_ids),
            prompt_seconds=self.first_token_time - self.prefill_started,
            generation_seconds=self.last_token_time - self.first_token_time,
            peak_memory_bytes=peak_bytes(device),
            realised_sparsity=realised_sparsity,
            scores=None if self.sampling.logprobs is None else tuple(self.scores[:count]),
            prompt_scores=None if self.prompt_scores is None else tuple(self.prompt_scores),
            cached_tokens=self.cached_tokens,
            stop_string=self.stop_strings.found,
            drafts=self.drafts,
        )
