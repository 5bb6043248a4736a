"""Requests of the protocol as requests of the engine."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.guard import parse_json

from ..decoding.sampling import SamplingParams
from ..generation.grammar import Constraint
from ..generation.request import Request
from ..model import Model
from ..protocol.formatter import THINK, Context
from ..protocol.requests import ApiError, ChatRequest, CompletionRequest
from ..protocol.tools import ToolCallParser, call_grammar, short_ids, syntax_of

_SPELLED_TOKENS = 1 << 16  # whose text is kept for the next request that asks for log-probabilities


def sampling_defaults(model: Model) -> dict[str, float]:
    """What a request that leaves these fields out gets: the model's generation config, else OpenAI's defaults."""
    data = model.bundle.read_bytes("generation_config.json")
    config = {} if data is None else parse_json(data, "generation_config.json", UsageError)
    defaults: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    ranges = {"temperature": (0.0, 100.0), "top_k": (0, 2**31), "top_p": (1e-9, 1.0), "repetition_penalty": (0.01, 100)}
    for name, (low, high) in ranges.items():
        value = config.get(name)
        if type(value) in (int, float) and low <= value <= high:
            defaults[name] = value
    return defaults


class Encoder:
    """For one model, whose name is ``name``; from any thread."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._context = functools.partial(Context, name, functools.lru_cache(_SPELLED_TOKENS)(model.spell))
        self._defaults = sampling_defaults(model)
        text = model.text
        self._template = "" if text is None else text.template_source or ""
        self._syntax = syntax_of(self._template)
        markers = () if self._syntax is None else (self._syntax.opens, self._syntax.closes)
        # Those that are special tokens, which an answer's text shows then.
        self._special: dict[str, int] = {one: text.token_id(one) for one in markers if text.is_special(one)}  # type: ignore
        # A special token would not be part of an answer's text.
        self._thinks = text is not None and text.token_id(THINK) is not None and not text.is_special(THINK)

    def encode(self, body: ChatRequest | CompletionRequest) -> tuple[list[Request], Context]:
        """A validated engine request for each answer, and what formatting the answers takes."""
        return self._chat(body) if isinstance(body, ChatRequest) else self._completion(body)

    def _completion(self, body: CompletionRequest) -> tuple[list[Request], Context]:
        requests: list[Request] = []
        echo: list[tuple[str, int]] = []
        count, text = 0, self._model.text
        for prompt in body.prompt:
            ids = self._encode(prompt) if isinstance(prompt, str) else prompt
            requests += self._requests(body, ids, max_new_tokens=body.max_tokens or 1, score_prompt=body.echo)
            count += len(ids)
            if body.echo:
                if not isinstance(prompt, str):
                    prompt = "" if text is None else text.decode(ids, skip_special_tokens=False)
                echo += [(prompt, ids[0])] * body.n
        return requests, self._context(len(requests), count, echo)

    def _chat(self, body: ChatRequest) -> tuple[list[Request], Context]:
        messages, functions, syntax = body.conversation(), body.functions, self._syntax
        calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if self._template and "tool" not in self._template and calls:
            raise _unsupported("messages", "chat template leaves calls and their results out; tell them as text")
        if functions and syntax is None:
            raise _unsupported(
                "tools",
                "chat template has no tools in a syntax that this server reads (Hermes's and Qwen's <tool_call>, Llama "
                "3's JSON, Mistral's [TOOL_CALLS] with a list); leave them out",
            )
        if syntax is not None and syntax.short_ids:
            messages = short_ids(messages)
        rendered = self._model.tokenizer.render(messages, **body.template_variables())
        thinks = True if rendered.rstrip().endswith(THINK) else False if self._thinks else None
        if thinks and body.forced:
            raise _unsupported(
                "tool_choice",
                "template begins with a thought, for which a call that has to be leaves no room; ask with auto, or "
                "switch thoughts off by chat_template_kwargs",
            )
        ids = self._encode(rendered, add_special_tokens=False)
        most = body.max_completion_tokens or body.max_tokens
        parser, visible = None, frozenset[int]()
        if functions and syntax is not None:
            names = [function["name"] for function in functions]
            parser = functools.partial(ToolCallParser, syntax, names, one=not body.several_calls)
            visible = frozenset(self._special.values())
        requests = self._requests(body, ids, max_new_tokens=most, visible_special_tokens=visible)
        return requests, self._context(body.n, len(ids), thinks=thinks, call_parser=parser)

    def constraints(self, body: ChatRequest | CompletionRequest, count: int) -> list[Constraint | None]:
        """The grammar of each answer, at its beginning; compiling it may take long."""
        grammar = body.constraint()
        if isinstance(body, ChatRequest) and body.forced and self._syntax is not None:
            grammar = call_grammar(body.forced, self._syntax, self._special, body.several_calls)
        return [None if grammar is None else self._model.grammars.begin(grammar) for _ in range(count)]

    def _encode(self, text: str, **how: bool) -> list[int]:
        return self._model.tokenizer.encode(text, most=self._model.max_seq_len, **how)

    def _requests(self, body: ChatRequest | CompletionRequest, ids: list[int], **more: Any) -> list[Request]:
        sampling = SamplingParams(**body.sampling(self._defaults))
        seeds = [None if sampling.seed is None else (sampling.seed + copy) % 2**63 for copy in range(body.n)]
        common = {"stop": body.stop, "sparsity": body.sparsity, **more}
        return [self._model.request(ids, sampling=replace(sampling, seed=seed), **common) for seed in seeds]


def _unsupported(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: this model's {why}", param=field, code="unsupported_parameter")
