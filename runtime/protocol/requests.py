"""OpenAI's requests, checked field by field: a parsed body in, what the engine needs out.

A field that would change the answer and that this server does not have is refused under its
name unless its value changes nothing; fields that change nothing about the answer (``user``, ``metadata``, …) pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.guard import parse_json

from ..decoding.sampling import SamplingParams
from ..generation.grammar import ANY_OBJECT, Grammar
from .errors import ApiError, bad, checked, integer, number, switch
from .tools import Offer, read_offer

ANSWER: Mapping[str, Sequence[Any]] = {
    # OpenAI's own.
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
    # How the prompt is made.
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "enable_thinking": (),
    "negative_prompt": ("",),
    "prompt_logprobs": (),
    "reasoning": ({}, {"summary": "auto"}),
    "thinking": (),
    "truncate_prompt_tokens": (),
    # What the answer has to be.
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "structured_outputs": (),
    # Where it ends.
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "n_predict": (-1,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    # How its tokens are chosen.
    "allowed_token_ids": ([],),
    "bad_words": ([], ""),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "repeat_penalty": (1,),
    "samplers": (),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
    # By which weights.
    "adapters": (),
    "draft_model": (),
    "lora": ([],),
}
# What ``/v1/responses`` has beside: what would need an earlier answer too.
RESPONSE: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "conversation": (),
    # A thought is told as it is, so nothing has to be encrypted to come back.
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuse these fields, ``neutral`` values excepted; an object of nulls is as good as an empty one.

    Raises:
        ApiError: with the field named.
    """
    for field, values in neutral.items():
        value = body.get(field)
        if isinstance(value, dict):
            value = {name: inner for name, inner in value.items() if inner is not None}
        # True equals 1 in Python, and nothing else here means the same.
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            continue
        raise ApiError(
            400, f"{field}: this server does not have it; leave it out", param=field, code="unsupported_parameter"
        )


_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_CALLS = 128
_SHORT = 9


def read_message(message: Any, where: str) -> dict[str, Any]:
    """One message as templates expect it; ``where``: its place in the body.

    Raises:
        ApiError: with the field named.
    """
    if not isinstance(message, dict):
        raise bad(where, "an object with role and content", message)
    role = message.get("role")
    if role not in _ROLES:
        raise bad(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    for field in ("function_call", "audio") if role == "assistant" else ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise ApiError(
                400, f"{where}.{field}: this server does not have it yet", param=f"{where}.{field}",
                code="unsupported_parameter",
            )  # fmt: skip
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise bad(f"{where}.content", "a text, or a list of parts", content)
    more = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
    if role == "tool":
        more["tool_call_id"] = message.get("tool_call_id")
        if not isinstance(more["tool_call_id"], str):
            raise bad(f"{where}.tool_call_id", "the id of the call that this answers", more["tool_call_id"])
    if role == "assistant" and message.get("reasoning_content"):
        more["reasoning_content"] = message["reasoning_content"]
        if not isinstance(more["reasoning_content"], str):
            raise bad(f"{where}.reasoning_content", "a text", more["reasoning_content"])
    if message.get("tool_calls"):
        more["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return {"role": "system" if role == "developer" else role, "content": content, **more}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image_url", "input_image", "input_audio", "file", "video_url"):
        raise ApiError(
            501, f"{where}: this server reads text alone, not {kind}", param=where, code="unsupported_content"
        )
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise bad(where, "a part of type text", part)
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """An assistant message's ``tool_calls``, as templates expect them: their arguments are objects.

    Raises:
        ApiError: with the field named.
    """
    if not isinstance(calls, list) or len(calls) > _MOST_CALLS:
        raise bad(where, f"a list of up to {_MOST_CALLS} calls", calls)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"id": str(name), "function": {"name": str(function)} as called} if call.get("type", "function") == (
            "function"
        ):
            pass
        case _:
            raise bad(where, "an object of type function, with an id and a function with a name", call)
    arguments = called.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments.encode(), f"{where}.function.arguments", UsageError)
        except UsageError as error:
            raise ApiError(400, str(error), param=f"{where}.function.arguments", code="invalid_value") from error
    if not isinstance(arguments, dict):
        raise bad(f"{where}.function.arguments", "an object, or its JSON as a text", arguments)
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give the results among a conversation's messages the names of the functions that were called, where their client
    left them out, as OpenAI's may: some templates want them."""
    called = {call["id"]: call["function"]["name"] for one in messages for call in one.get("tool_calls", ())}
    for one in messages:
        if one["role"] == "tool" and one["tool_call_id"] in called:
            one.setdefault("name", called[one["tool_call_id"]])


def short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of nine letters and digits: a call's as long as it likes, say of another server, is known
    by its digest."""

    def short(name: str) -> str:
        fits = len(name) == _SHORT and name.isascii() and name.isalnum()
        return name if fits else hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_SHORT]

    found = [dict(one) for one in messages]
    for one in found:
        if "tool_calls" in one:
            one["tool_calls"] = [{**call, "id": short(call["id"])} for call in one["tool_calls"]]
        if "tool_call_id" in one:
            one["tool_call_id"] = short(one["tool_call_id"])
    return found


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
        visible_special_tokens: those that are part of the text.
        sparsity: the sparsity level that the answer is to be decoded at, as it was given: which there are the engine knows. None:
            the server's.
    """

    prompts: tuple[Any, ...]
    sampling: SamplingParams
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
    visible_special_tokens: frozenset[int] = frozenset()
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
    call = _requests_call(body, (conversation,), sampling, most, max_tokens, template)
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
    call = _requests_call(body, prompts, sampling, most, max_tokens, {}, more)
    return replace(call, echo=switch(body, "echo", False))


def _sampling(body: Mapping[str, Any], defaults: Defaults, logprobs: int | None) -> SamplingParams:
    seed = integer(body, "seed", None, -_SEED, _SEED)
    return SamplingParams(
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


def _requests_call(
    body: Mapping[str, Any],
    prompts: tuple[Any, ...],
    sampling: SamplingParams,
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
