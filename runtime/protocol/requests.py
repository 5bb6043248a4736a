"""OpenAI's requests, checked field by field: a parsed body in, what the engine needs out.

A field that would change the answer and that this server does not have is refused under its
name unless its value changes nothing; fields that change nothing about the answer (``user``, ``metadata``, …) pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wisparse.formats.errors import UsageError

from ..decoding.sampling import SamplingSettings
from ..generation.grammar import ANY_OBJECT, Grammar
from .errors import ApiError, bad
from .fields import checked, integer, number, switch
from .messages import name_results, read_message
from .tools import Offer, read_offer
from .unsupported import ANSWER, refuse_unsupported

__all__ = ["ApiCall", "Defaults", "read_chat", "read_completion"]

_STOPS = 16
_LONGEST_STOP = 1000
_TEMPERATURE = 100.0
_SEED = 2**63 - 1
_LOGPROBS = 20
_BIASES = 1024

# What only a chat has.
_CHAT = ("tools", "tool_choice")


@dataclass(frozen=True)
class Defaults:
    """What a request that is silent about it gets: the model's own generation settings, else OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ApiCall:
    """A checked request.

    Attributes:
        prompts: one answer's worth each: a text, token ids, or the messages of one conversation.
        template: further variables for the chat template.
        n: answers to each prompt.
        max_tokens: None until the context is full.
        include_usage, continuous_usage: a stream tells its tokens at its end, or after all that it sends.
        echo: put the prompt before its answer.
        grammar: what the answer has to be.
        offer: the functions that the answer may call.
        spoken: special tokens that are part of an answer's text.
        sparsity: the rung that the answer is to be decoded at, as it was given: which there are the engine knows. None:
            the server's.
    """

    prompts: tuple[Any, ...]
    sampling: SamplingSettings
    stop: tuple[str, ...]
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    template: Mapping[str, Any]
    echo: bool = False
    grammar: Grammar | None = None
    offer: Offer | None = None
    spoken: frozenset[int] = frozenset()
    sparsity: float | None = None

    @property
    def silent(self) -> bool:
        """Whether what the model thinks of the prompt is all that is asked for."""
        return self.max_tokens == 0


def read_chat(body: Mapping[str, Any], defaults: Defaults, most: int) -> ApiCall:
    """A body of ``/v1/chat/completions``; ``most`` answers at a time.

    Raises:
        ApiError: with the field named.
    """
    refuse_unsupported({name: value for name, value in body.items() if name not in _CHAT}, ANSWER)
    offer = read_offer(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "a list of messages, one at least", messages)
    template = body.get("chat_template_kwargs") or {}
    if not isinstance(template, dict) or {"messages", "add_generation_prompt"} & set(template):
        raise bad("chat_template_kwargs", "an object of further template variables", template)
    if offer is not None:
        if "tools" in template:
            raise bad("chat_template_kwargs", "no tools beside those of the request", template)
        template = {**template, "tools": offer.tools}
    given = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    conversation = [read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    name_results(conversation)
    top = integer(body, "top_logprobs", 0, 0, _LOGPROBS)
    logprobs = top if switch(body, "logprobs", False) else None
    if logprobs is None and top:
        raise bad("logprobs", "true, as top_logprobs asks for some", body.get("logprobs"))
    max_tokens = integer(body, given, None, 1, _SEED)
    sampling = _sampling(body, defaults, logprobs)
    call = _call(body, (conversation,), sampling, most, max_tokens, template)
    return replace(call, offer=offer)


def read_completion(body: Mapping[str, Any], defaults: Defaults, most: int, more: int = 0) -> ApiCall:
    """A body of ``/v1/completions``; ``most`` answers at a time, and to several prompts ``more`` that wait.

    Raises:
        ApiError: with the field named.
    """
    refuse_unsupported(body, ANSWER)
    prompt = body.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        prompts: tuple[Any, ...] = (prompt,)
    elif isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_ids(one) for one in prompt):
        prompts = tuple(prompt)
    else:
        raise bad("prompt", "a text, a list of token ids, or a list of either", prompt)
    sampling = _sampling(body, defaults, integer(body, "logprobs", None, 0, _LOGPROBS))
    max_tokens = integer(body, "max_tokens", 16, 0, _SEED)
    call = _call(body, prompts, sampling, most, max_tokens, {}, more)
    return replace(call, echo=switch(body, "echo", False))


def _sampling(body: Mapping[str, Any], defaults: Defaults, logprobs: int | None) -> SamplingSettings:
    seed = integer(body, "seed", None, -_SEED, _SEED)
    return SamplingSettings(
        temperature=number(body, "temperature", defaults.temperature, 0.0, _TEMPERATURE),
        top_k=max(integer(body, "top_k", defaults.top_k, -1, _SEED) or 0, 0),  # -1: all, as vLLM has it
        top_p=number(body, "top_p", defaults.top_p, 0.0, 1.0) or 1e-9,  # 0: the likeliest alone
        min_p=number(body, "min_p", 0.0, 0.0, 1.0),
        seed=None if seed is None else seed % (_SEED + 1),
        repetition_penalty=number(body, "repetition_penalty", defaults.repetition_penalty, 0.01, 100.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=number(body, "presence_penalty", 0.0, -2.0, 2.0),
        logit_bias=_biases(body),
        logprobs=logprobs,
    )


def _biases(body: Mapping[str, Any]) -> dict[int, float]:
    """``logit_bias``: an object, whose keys are token ids as texts."""
    expected = f"an object of up to {_BIASES} token ids with numbers from -100 to 100"
    given = checked(
        body, "logit_bias", {}, lambda value: isinstance(value, dict) and len(value) <= _BIASES, expected
    )  # fmt: skip
    for token, bias in given.items():
        id_like = token.isascii() and token.isdigit() and len(token) < 10
        if not id_like or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise bad("logit_bias", expected, {token: bias})
    return {int(token): float(bias) for token, bias in given.items()}


def _call(
    body: Mapping[str, Any],
    prompts: tuple[Any, ...],
    sampling: SamplingSettings,
    most: int,
    max_tokens: int | None,
    template: Mapping[str, Any],
    more: int = 0,
) -> ApiCall:
    stream = switch(body, "stream", False)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise bad("stream_options", "an object", options)
    n = integer(body, "n", 1, 1, most)
    assert n is not None  # it has a default
    if n * len(prompts) > most + more:
        raise bad("prompt", f"at most {most + more} answers in one request", f"{len(prompts)} prompts with n = {n}")
    return ApiCall(
        prompts=prompts,
        sampling=sampling,
        stop=_stops(body),
        max_tokens=max_tokens,
        n=n,
        stream=stream,
        include_usage=stream and switch(options or {}, "include_usage", False, "stream_options."),
        continuous_usage=stream and switch(options or {}, "continuous_usage_stats", False, "stream_options."),
        template=template,
        grammar=_grammar(body),
        sparsity=body.get("sparsity"),
    )


def _grammar(body: Mapping[str, Any]) -> Grammar | None:
    """``response_format``, or ``grammar``."""
    field, wanted = "response_format", body.get("response_format")
    expected = "an object of type text, json_object, or json_schema with a schema"
    schema: Any = None
    match wanted:
        case None | {"type": "text"}:
            field = "grammar"
            text = checked(body, field, "", lambda value: isinstance(value, str), "a grammar as a text")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            pass
        case {"type": "json_object"}:
            schema = ANY_OBJECT
        case _:
            raise bad(field, expected, wanted)
    if schema is not None and body.get("grammar"):
        raise bad("grammar", "none beside a response_format", body["grammar"])
    try:
        if schema is not None:
            return Grammar.of_schema(field, schema)
        return Grammar.of_text(field, text) if text else None
    except UsageError as error:
        raise ApiError(400, str(error), param=field, code="invalid_value") from error


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    given = body.get("stop")
    stops: Sequence[Any] = [] if given is None else given if isinstance(given, list) else [given]
    if len(stops) > _STOPS or not all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops):
        raise bad("stop", f"a text, or up to {_STOPS} of them, none empty or over {_LONGEST_STOP} characters", given)
    return tuple(stops)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
