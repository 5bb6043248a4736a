"""Prompts of the protocol's requests as token ids, and what formatting their answers takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wisparse.formats.errors import ContextLengthError

from ..generation.choosing import Constraint
from ..generation.grammar import Grammar
from ..model import Model
from ..protocol.errors import ApiError
from ..protocol.formatter import OPEN
from ..protocol.requests import ChatRequest, CompletionRequest
from ..protocol.tools import ToolCallParser, call_grammar, short_ids, syntax_of


@dataclass(frozen=True)
class Encoded:
    """A request's prompts.

    Attributes:
        prompts: token ids.
        texts: of each prompt, if the answers repeat it.
        thinks: whether answers begin inside a thought; None: the model has no thoughts to split off.
        call_parser: makes a parser of tool calls; None: no tools were offered.
        visible: special tokens that are part of an answer's text.
    """

    prompts: list[list[int]]
    texts: list[str]
    thinks: bool | None = None
    call_parser: Callable[[bool], ToolCallParser] | None = None
    visible: frozenset[int] = frozenset()


class Encoder:
    """Encodes requests for one model; from any thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        text = model.text
        source = None if text is None else text.template_source
        self._template = source or ""
        self._syntax = None if source is None else syntax_of(source)
        self._special: dict[str, int] = {}  # markers of calls that are special tokens
        self._thinks = False
        if text is not None:
            markers = () if self._syntax is None else (self._syntax.opens, self._syntax.closes)
            self._special = {one: text.token_id(one) for one in markers if text.is_special(one)}  # type: ignore[misc]
            # A special token would be no part of an answer's text.
            self._thinks = text.token_id(OPEN) is not None and not text.is_special(OPEN)

    def encode_completion(self, request: CompletionRequest) -> Encoded:
        prompts = [self._encode(one) if isinstance(one, str) else one for one in request.prompt]
        size = self._model.config.vocab_size
        for ids in prompts:
            if len(ids) > self._model.max_seq_len:
                limit = self._model.max_seq_len
                raise ContextLengthError(f"the prompt has {len(ids)} tokens and the context holds {limit}: shorten it")
            if not ids:
                raise ContextLengthError("the prompt has no tokens: give at least one")
            strange = next((token for token in ids if token >= size), None)
            if strange is not None:
                found = f"prompt: expected token ids from 0 to {size - 1}, found {strange}"
                raise ApiError(400, found, param="prompt", code="invalid_value")
        if not request.echo:
            return Encoded(prompts, [])
        decode = self._model.tokenizer.decode
        texts = [
            one if isinstance(one, str) else decode(ids, skip_special_tokens=False)
            for one, ids in zip(request.prompt, prompts, strict=True)
        ]
        return Encoded(prompts, texts)

    def encode_chat(self, request: ChatRequest) -> Encoded:
        messages, functions, syntax = request.conversation(), request.functions, self._syntax
        calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if self._template and "tool" not in self._template and calls:
            raise ApiError(
                400,
                "messages: this model's chat template leaves calls and their results out; tell them as text",
                param="messages",
                code="unsupported_parameter",
            )
        if functions and syntax is None:
            raise ApiError(
                400,
                "tools: this model's chat template has no tools in a syntax that this server reads (Hermes's and "
                "Qwen's <tool_call>, Llama 3's JSON, Mistral's [TOOL_CALLS] with a list); leave them out",
                param="tools",
                code="unsupported_parameter",
            )
        if syntax is not None and syntax.short_ids:
            messages = short_ids(messages)
        rendered = self._model.tokenizer.render(messages, **request.template_variables())
        thinks = True if rendered.rstrip().endswith(OPEN) else False if self._thinks else None
        if thinks and request.forced:
            raise ApiError(
                400,
                "tool_choice: this model's template begins with a thought, for which a call that has to be leaves no "
                "room; ask with auto, or switch thoughts off by chat_template_kwargs",
                param="tool_choice",
                code="invalid_value",
            )
        prompts = [self._encode(rendered, add_special_tokens=False)]
        if not functions or syntax is None:
            return Encoded(prompts, [], thinks)
        names, one = [function["name"] for function in functions], not request.several_calls

        def parser(whole: bool) -> ToolCallParser:
            return ToolCallParser(syntax, names, one=one, whole=whole)

        return Encoded(prompts, [], thinks, parser, frozenset(self._special.values()))

    def constraints(self, request: ChatRequest | CompletionRequest, count: int) -> list[Constraint | None]:
        """The grammar of each answer, at its beginning; compiling one may take long."""
        grammar: Grammar | None = request.constraint()
        if isinstance(request, ChatRequest) and request.forced and self._syntax is not None:
            grammar = call_grammar(request.forced, self._syntax, self._special, request.several_calls)
        return [None if grammar is None else self._model.grammars.begin(grammar) for _ in range(count)]

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer, limit = self._model.tokenizer, self._model.max_seq_len
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, most=limit)
        if len(ids) > limit:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens and the context holds {limit}: shorten it")
        return ids
