"""From a request to what the engine needs, as far as that depends on the model: token ids, grammars, calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from wisparse.formats.errors import ContextLengthError

from ..generation.choosing import Constraint
from ..model import Model
from ..protocol.calls import CallParser
from ..protocol.errors import ApiError
from ..protocol.messages import short_ids
from ..protocol.requests import ApiCall
from ..protocol.syntax import syntax_of
from ..protocol.thinking import OPEN

__all__ = ["Encoder"]


class Encoder:
    """Encodes requests to one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        # A special token would be no part of an answer's text.
        self._thinks = (
            model.text is not None and model.text.token_id(OPEN) is not None and not model.text.is_special(OPEN)
        )
        source = None if model.text is None else model.text.template_source
        self._syntax = None if source is None else syntax_of(source)
        self._markers = {} if self._syntax is None else _special(model, (self._syntax.opens, self._syntax.closes))

    def call_parser(self, call: ApiCall) -> Callable[[bool], CallParser] | None:
        """What splits calls from an answer's text, if it may have some."""
        offer, syntax = call.offer, self._syntax
        if offer is None or syntax is None:
            return None
        return lambda held: CallParser(syntax, offer.names, one=not offer.several, held=held)

    def with_calls(self, call: ApiCall) -> ApiCall:
        """The call with what the model's syntax needs, if functions are offered."""
        text = self._model.text
        source = (text and text.template_source) or "tool"  # without a template it is refused all the same
        if "tool" not in source and any("tool_calls" in one or one["role"] == "tool" for one in call.prompts[0]):
            raise ApiError(
                400, "messages: this model's chat template leaves calls and their results out; tell them as text",
                param="messages", code="unsupported_parameter",
            )  # fmt: skip
        if self._syntax is not None and self._syntax.short:
            call = replace(call, prompts=tuple(map(short_ids, call.prompts)))
        if call.offer is None:
            return call
        if self._syntax is None:
            raise ApiError(
                400, "tools: this model's chat template has no tools in a syntax that this server reads (Hermes's and "
                "Qwen's <tool_call>, Llama 3's JSON, Mistral's [TOOL_CALLS] with a list); leave them out",
                param="tools", code="unsupported_parameter",
            )  # fmt: skip
        grammar = call.offer.grammar(self._syntax, self._markers) if call.offer.forced else call.grammar
        return replace(call, grammar=grammar, spoken=frozenset(self._markers.values()))

    def echo(self, call: ApiCall, prompts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """Of each answer to come its prompt's text and first token, where they are told."""
        if not call.echo:
            return []
        decode = self._model.tokenizer.decode
        texts = [
            prompt if isinstance(prompt, str) else decode(ids, skip_special_tokens=False)
            for prompt, ids in zip(call.prompts, prompts, strict=True)
        ]
        return [(text, ids[0]) for text, ids in zip(texts, prompts, strict=True) for _ in range(call.n)]

    def encode(self, call: ApiCall) -> tuple[list[list[int]], list[Constraint | None], bool | None]:
        """Token ids of a call's prompts, what each of its answers has to be, and whether it begins with a thought."""
        thinks: bool | None = None
        text, most = self._model.tokenizer, self._model.max_seq_len
        encoded = []
        for prompt in call.prompts:
            if isinstance(prompt, str):
                encoded.append(text.encode(prompt, most=most))
            elif isinstance(prompt[0], int):
                encoded.append(prompt)
            else:
                rendered = text.render(prompt, **call.template)
                thinks = True if rendered.rstrip().endswith(OPEN) else False if self._thinks else None
                encoded.append(text.encode(rendered, add_special_tokens=False, most=most))
        for ids in encoded:
            if len(ids) > most:
                raise ContextLengthError(f"the prompt has {len(ids)} tokens and the context holds {most}: shorten it")
        if thinks and call.offer is not None and call.offer.forced:
            raise ApiError(
                400, "tool_choice: this model's template begins with a thought, for which a call that has to be leaves "
                "no room; ask with auto, or switch thoughts off by chat_template_kwargs", param="tool_choice",
                code="invalid_value",
            )  # fmt: skip
        count, grammar = len(encoded) * call.n, call.grammar
        constraints: list[Constraint | None] = [
            None if grammar is None else self._model.grammars.begin(grammar) for _ in range(count)
        ]
        return encoded, constraints, thinks


def _special(model: Model, markers: Sequence[str]) -> dict[str, int]:
    """Ids of those that are special tokens."""
    text = model.tokenizer
    found = {marker: text.token_id(marker) for marker in markers if text.is_special(marker)}
    return {marker: token for marker, token in found.items() if token is not None}
