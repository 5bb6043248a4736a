"""A loaded bundle that generates text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, overload

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle
from wisparse.formats.config_fields import GENERATION_CONFIG, SAMPLING_FIELDS, sampling_defaults
from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.model_config import ModelConfig

from .choice import Choice
from .decoding.decoder import Decoder
from .generation.engine import Engine
from .generation.grammar import Grammar, Grammars
from .generation.request import Chunk, Generation, GenerationArguments, GenerationSettings, Prompt, Request, as_prompts
from .generation.speculation import SpeculativeConfig
from .thoughts import HARMONY, ThinkingConstraint, find_format, switch_of, template_variables
from .tokenizer import Tokenizer, read_json, stop_ids

log = logging.getLogger(__name__)

# Names in OpenAI's API, transformers and vLLM of arguments of `Model.generate`, for the error message.
_OTHER_NAMES = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_length"), "max_new_tokens"),
    **dict.fromkeys(("stop_strings", "stop_token_ids"), "stop"),
    **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
    **dict.fromkeys(("guided_json", "response_format"), "json_schema"),
}
_OTHER_NAMES |= {"do_sample": "temperature (0 is greedy)", "guided_grammar": "grammar", "output_scores": "logprobs"}
_OTHER_NAMES |= {"use_chat_template": "chat_template", "repeat_penalty": "repetition_penalty"}
_OTHER_NAMES["bad_words"] = "bad_words_ids"


# Arguments of `Model.generate` that only prompts through the chat template have.
_OF_CONVERSATIONS = ("thinking", "thinking_budget", "reasoning_effort", "chat_template_kwargs")


class Model(AbstractContextManager["Model"]):
    """A bundle on a device; make one with ``wisparse.load``.

    Requests of several threads are batched, up to ``max_batch`` at a time; each gets the same tokens as alone. An unfinished
    stream keeps its slot until it is closed or other calls have decoded it to its end. A prompt's prefix that is in the
    KV cache is not computed again.

    Attributes:
        decoder: runs the model on token ids. Use it directly only through ``engine.call``, followed by
            ``engine.scheduler.start_over``.
        engine: runs the requests of all methods below.
        text: tokenizer and chat template; None if the bundle has no tokenizer.
        stop_ids: the tokens that end an answer.
        thoughts: how a reasoning model marks its thoughts, or None.
        grammars: compiles the grammars that constrain answers.
        choice: how weight type and level were chosen by ``max_kl``; None if they were not.
        sampling_defaults: what generation_config.json says about sampling, by names of :class:`SamplingParams`.
    """

    def __init__(
        self, bundle: Bundle, decoder: Decoder, text: Tokenizer | None, prefill: str = "dense",
        speculative: SpeculativeConfig | None = None,
    ) -> None:  # fmt: skip
        self.bundle, self.decoder, self.text, self.prefill = bundle, decoder, text, prefill
        self.choice: Choice | None = None
        configured = self.stop_ids = stop_ids(bundle, text)
        self.thoughts = None if text is None else find_format(text.template_source or "", text.token_id)
        # gpt-oss' <|end|> ends a message of an answer.
        end = None if text is None or self.thoughts is HARMONY else text.end_of_turn(configured)
        if end is not None:
            self.stop_ids = configured | {end}
            token = self.tokenizer.token_bytes(end).decode(errors="replace")
            log.warning(
                f"the chat template ends turns with {token}, which no configuration names as an end: answers end there "
                "too; generate continues texts without the template"
            )
        self.sampling_defaults = self._read_sampling_defaults()
        self.engine = Engine(decoder, text, bundle, speculative)
        self._chat = text is not None and text.template_ends_turns(configured)
        self.grammars = Grammars(text, self.stop_ids)

    def __repr__(self) -> str:
        decoder = self.decoder
        level = f"sparsity {self.sparsity:g}" if self.bits is None else f"bits {self.bits:g}"
        return (
            f"<wisparse.Model {str(self.bundle.folder)!r}: {self.config.model_type}, {self.config.num_blocks} blocks, "
            f"{level}, prefill {self.prefill}; back end {decoder.name} on {decoder.device}, "
            f"{str(decoder.dtype).removeprefix('torch.')}, max_seq_len {decoder.max_seq_len}"
            f"{'; closed' if self.engine.closed else ''}>"
        )

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; UsageError if the bundle has none."""
        if self.text is None:
            raise UsageError("this bundle has no tokenizer: give token ids")
        return self.text

    @property
    def sparsity(self) -> float:
        """The default sparsity level, one of the bundle's, or 0 for the dense model. Setting it takes milliseconds and is
        an error while a request runs. A server's requests may name another level."""
        return self.bundle.sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        bundle = self.bundle.at(sparsity)

        def switch() -> None:
            state = self.engine.state
            if state.running or state.waiting:
                raise UsageError(
                    f"sparsity: an answer is in progress at {self.sparsity:g}; wait for its end or close() the stream, "
                    f"then set {bundle.sparsity:g}"
                )
            self.engine.scheduler.levels.default = bundle.sparsity
            self.engine.restore_sparsity()
            self.bundle = bundle

        self.engine.call(switch)

    @property
    def bits(self) -> float | None:
        """:attr:`sparsity` of a graded bundle as bits read per weight, 8 for the dense model; None for other bundles."""
        return self.bundle.bits

    @bits.setter
    def bits(self, bits: float) -> None:
        self.sparsity = self.bundle.at(bits=bits).sparsity

    @property
    def max_seq_len(self) -> int:
        """Most positions of prompt and answer; the answer's last token needs none."""
        return self.decoder.max_seq_len

    @overload
    def generate(self, prompt: Prompt, **settings: Unpack[GenerationArguments]) -> Generation:  # type: ignore[overload-overlap]
        ...  # a str is also a Sequence[str]

    @overload
    def generate(self, prompt: Sequence[Prompt], **settings: Unpack[GenerationArguments]) -> list[Generation]: ...

    @GenerationSettings.as_keywords
    def generate(
        self, prompt: Prompt | Sequence[Prompt], **settings: Unpack[GenerationArguments]
    ) -> Generation | list[Generation]:
        """Continue one or more prompts or conversations.

        Args:
            prompt: a text, a conversation (messages with ``role`` and ``content``), token ids (also a numpy array or
                a tensor of integers), or a list of any one of these.
            max_new_tokens: most tokens of the answer; None: up to the context's end.
            seed, frequency_penalty, presence_penalty, logit_bias, logprobs, and the next eight: see
                :class:`SamplingParams`. A seed applies to each prompt of a list, its next numbers to the next of ``n``
                answers; without one each gets a random seed, which its :class:`Generation` has.
            temperature, top_k, top_p, min_p, repetition_penalty, suppress_tokens, begin_suppress_tokens, bad_words_ids:
                None: as generation_config.json says, which may set each of them; else off, and greedy.
            n: answers to each prompt; without a temperature here and in generation_config.json, it is 1 for several.
            json_schema: constrain the answer to JSON of this schema, a mapping or its text; ``{}`` is any JSON.
                ``max_new_tokens`` may still truncate it. Needs ``pip install llguidance``.
            grammar: constrain the answer to a grammar in llguidance's Lark or llama.cpp's GBNF.
            stop: strings that end the answer and are not part of it; also names of special tokens.
            system_prompt: the system message before a text; needs a chat template.
            chat_template: whether to apply the chat template to a text, as a user message, or the name of one of the
                model's templates. None: if the template ends an assistant's turn with a stop token, as those of
                instruction-tuned models do. A base model continues the text. Conversations always use it.
            prefill: ``dense``, ``half`` or ``all``; None: as loaded.
            measure_sparsity: count the dropped channels; see :meth:`Decoder.measure_sparsity`.
            speculative: draft tokens, if the model was loaded with ``speculative``.
            thinking: switch thoughts on or off, by the chat template's own variable; None: the template's default.
            thinking_budget: most tokens of a thought; then its end is forced.
            reasoning_effort: for templates that read it, such as ``low``, ``medium`` and ``high`` of gpt-oss.
            chat_template_kwargs: further variables of the chat template.

        Returns:
            A :class:`Generation`; a list of them for a list of prompts or n > 1, then with the answers to a prompt in
            a row.

        Raises:
            ContextLengthError: a prompt longer than the context.
            UsageError: another argument out of range.
        """
        prompts, single = as_prompts(prompt)
        answers = dict(self.generate_each(prompts, **settings))
        # The counts of all requests together, at the end of the last one.
        total = list(answers.values())[-1].realised_sparsity
        ordered = [replace(answers[index], realised_sparsity=total) for index in range(len(answers))]
        return ordered[0] if single and len(ordered) == 1 else ordered

    def generate_each(
        self, prompts: Sequence[Prompt], **settings: Unpack[GenerationArguments]
    ) -> Generator[tuple[int, Generation], None, None]:
        """:meth:`generate` for many prompts: yields the index and result of each answer as it finishes. Arguments are
        validated immediately, generation starts at the first ``next``."""
        batches = self._chunks(self._requests(prompts, settings), final_only=True)
        return ((index, chunk.generation) for new in batches for index, chunk in new if chunk.generation is not None)

    def stream(self, prompt: Prompt, **settings: Unpack[GenerationArguments]) -> Generator[Chunk, None, None]:
        """:meth:`generate` for one prompt, token by token. Arguments are validated immediately, generation starts at the
        first ``next``. Closing the generator cancels the request."""
        return (chunk for together in self.stream_together(prompt, **settings) for chunk in together)

    def stream_together(
        self, prompt: Prompt, **settings: Unpack[GenerationArguments]
    ) -> Generator[list[Chunk], None, None]:
        """:meth:`stream` in lists of all chunks that are available at once."""
        chunks = self._chunks(self._one_request("stream", prompt, settings))
        return ([chunk for _, chunk in together] for together in chunks)

    def astream(self, prompt: Prompt, **settings: Unpack[GenerationArguments]) -> AsyncGenerator[Chunk, None]:
        """:meth:`stream` for ``async for``; a thread runs the steps."""
        (request,) = requests = self._one_request("astream", prompt, settings)

        async def chunks() -> AsyncGenerator[Chunk, None]:
            items: asyncio.Queue[Chunk | WisparseError] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def deliver(_: int, item: Chunk | WisparseError) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(items.put_nowait, item)

            with self._submitted(requests, deliver, final_only=False):
                drive = partial(self.engine.drive, lambda: request.done)
                threading.Thread(target=drive, name="wisparse-stream", daemon=True).start()
                reason = None
                while reason is None:
                    chunk = _checked(request, await items.get())
                    reason = chunk.finish_reason
                    yield chunk

        return chunks()

    def close(self) -> None:
        """Free the memory; the model cannot be used afterwards. Open requests end with an error."""
        self.engine.close()
        self.grammars.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def request(
        self, prompt_token_ids: Sequence[int], *, stop: Sequence[str] = (), prefill: str | None = None, **fields: Any
    ) -> Request:
        """A validated :class:`Request` for ``engine.submit``. Stop strings that are names of special tokens become stop
        tokens. prefill: None for the model's."""
        special = {} if self.text is None else self.text.special_ids
        request = Request(
            prompt_token_ids,
            stop=[one for one in stop if one not in special],
            stop_token_ids=self.stop_ids | {special[one] for one in stop if one in special},
            prefill=prefill or self.prefill,
            **fields,
        )
        self.engine.validate(request)
        return request

    def thinks(
        self, prompt: str, variables: Mapping[str, Any], budget: int | None = None, visible: Iterable[int] = ()
    ) -> dict[str, Any]:
        """The arguments of :meth:`request` for an answer to a ``prompt`` rendered with ``variables``: what separates the
        thought, and limits it to ``budget`` tokens. ``visible``: further visible special tokens."""
        if self.thoughts is None:
            return {"visible_special_tokens": frozenset(visible)}
        begun, special = self.thoughts.begins(prompt), self.tokenizer.special_ids
        if begun is None and variables.get(switch_of(self.tokenizer.template_reads) or "") is False:
            begun = False
        markers = {special[marker] for marker in self.thoughts.markers if marker in special}
        return {
            "thoughts": self.thoughts.parser(begun),
            "visible_special_tokens": frozenset({*visible, *markers}),
            "constraint": None if budget is None else self._thinking_constraint(begun, budget),
        }

    def constrain(self, request: Request, grammar: Grammar) -> None:
        """Set the grammar of a request, which begins after the thought. One that the user wrote with a thought's markers, or
        their ids, is that of the whole answer."""
        constraint = self.grammars.begin(grammar)
        markers = () if self.thoughts is None or grammar.schema else self.thoughts.markers
        names = [*markers, *(f"<[{self.tokenizer.token_id(marker)}]>" for marker in markers)]
        if request.thoughts is None or any(name in grammar.source for name in names):
            request.constraint = constraint
            return
        if request.constraint is None:
            request.constraint = self._thinking_constraint(request.thoughts.begun)
        assert isinstance(request.constraint, ThinkingConstraint)
        request.constraint.grammar = constraint

    def _thinking_constraint(self, begun: bool | None, budget: int | None = None) -> ThinkingConstraint:
        assert self.thoughts is not None
        markers = (self.thoughts.opens, self.thoughts.closes)
        opens, closes = (self.tokenizer.encode(marker, add_special_tokens=False) for marker in markers)
        return ThinkingConstraint(self.thoughts, opens, closes, self.tokenizer.token_bytes, begun=begun, budget=budget)

    def sampling(self, given: Mapping[str, Any], n: int = 1) -> dict[str, Any]:
        """The arguments of one of ``n`` answers: those given, else generation_config.json's, else greedy or, for several
        answers, temperature 1."""
        chosen = {name: value for name, value in given.items() if value is not None or name not in SAMPLING_FIELDS}
        return {"temperature": 0.0 if n == 1 else 1.0, **self.sampling_defaults, **chosen}

    def _read_sampling_defaults(self) -> dict[str, Any]:
        defaults, ignored = sampling_defaults(read_json(self.bundle, GENERATION_CONFIG))
        if ignored:
            log.info("%s: not supported: %s", GENERATION_CONFIG, ", ".join(ignored))
        size, stops = self.config.vocab_size, [[token] for token in self.stop_ids]
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            defaults[name] = [token for token in defaults.get(name, ()) if token < size]
        words = defaults.get("bad_words_ids", ())  # a stop token is no bad word, as in transformers
        defaults["bad_words_ids"] = [word for word in words if max(word) < size and word not in stops]
        return {name: value for name, value in defaults.items() if value != []}

    def _requests(self, prompts: Sequence[Prompt], arguments: GenerationArguments) -> list[Request]:
        guard.keywords("generate", arguments, tuple(GenerationArguments.__annotations__), _OTHER_NAMES)
        settings = GenerationSettings(**self.sampling(arguments, arguments.get("n", 1)))
        grammar = settings.parsed_grammar
        requests = []
        for prompt in prompts:
            ids, rendered, variables = self._encode(prompt, settings)
            unused = next((name for name in _OF_CONVERSATIONS if getattr(settings, name) is not None), None)
            if rendered is None and unused is not None:
                raise UsageError(f"{unused}: expected a conversation or the chat template, found a text to continue")
            if self.thoughts is None and settings.thinking_budget is not None:
                raise UsageError("thinking_budget: this model marks no thoughts: leave it out")
            for copy in range(settings.n):
                seed = None if settings.seed is None else (settings.seed + copy) % 2**63
                request = self.request(
                    ids,
                    max_new_tokens=settings.max_new_tokens,
                    sampling=replace(settings, seed=seed),
                    stop=settings.stop_texts,
                    prefill=settings.prefill,
                    measure_sparsity=settings.measure_sparsity,
                    speculative=settings.speculative,
                    # A text that is continued has no thought apart from it.
                    **({} if rendered is None else self.thinks(rendered, variables, settings.thinking_budget)),
                )
                if grammar is not None:
                    self.constrain(request, grammar)
                requests.append(request)
        return requests

    def _one_request(self, verb: str, prompt: Prompt, arguments: GenerationArguments) -> list[Request]:
        prompts, single = as_prompts(prompt)
        if not single or arguments.get("n", 1) != 1:
            raise UsageError(f"{verb} takes one prompt with one answer; use generate for several")
        return self._requests(prompts, arguments)

    def _chunks(self, requests: Sequence[Request], final_only: bool = False) -> Iterator[list[tuple[int, Chunk]]]:
        """Yields all new chunks at a time, each with the index of its request, until all have finished."""
        items: deque[tuple[int, Chunk | WisparseError]] = deque()
        unfinished = len(requests)
        with self._submitted(requests, lambda index, item: items.append((index, item)), final_only):
            while unfinished:
                self.engine.drive(items.__len__)
                index, item = items.popleft()
                chunks = [(index, _checked(requests[index], item))]
                while items and isinstance(items[0][1], Chunk):
                    chunks.append(items.popleft())  # type: ignore[arg-type]
                unfinished -= sum(chunk.finish_reason is not None for _, chunk in chunks)
                yield chunks

    @contextmanager
    def _submitted(
        self, requests: Sequence[Request], deliver: Callable[[int, Chunk | WisparseError], None], final_only: bool
    ) -> Iterator[None]:
        """Submit requests that ``deliver`` their index and chunks; cancel those that are not done at the exit."""
        measure = any(request.measure_sparsity for request in requests)
        if measure:
            self.engine.start_measuring()
        try:
            for index, request in enumerate(requests):
                self.engine.submit(request, partial(deliver, index), final_only=final_only)
            yield
        finally:
            for request in requests:
                self.engine.cancel(request)
            if measure:
                self.engine.stop_measuring()

    def _encode(self, prompt: Prompt, settings: GenerationSettings) -> tuple[list[int], str | None, dict[str, Any]]:
        """The token ids, the rendered conversation or, if the chat template was not used, None, and its variables."""
        system_prompt, chat_template = settings.system_prompt, settings.chat_template
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            if system_prompt is not None or chat_template:
                raise UsageError("token ids are used unchanged: they take no system prompt and no chat template")
            return list(prompt), None, {}  # type: ignore[arg-type]
        tokenizer = self.tokenizer
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        if isinstance(prompt, str):
            if chat_template is False and system:
                raise UsageError("a system prompt needs the chat template: drop one of the two")
            if not (self._chat or system if chat_template is None else chat_template):
                return tokenizer.encode(prompt, most=self.max_seq_len), None, {}
            prompt = [{"role": "user", "content": prompt}]
        named = chat_template if isinstance(chat_template, str) else None
        variables = template_variables(
            tokenizer.template_reads, settings.thinking, settings.reasoning_effort, settings.chat_template_kwargs
        )
        rendered = tokenizer.render([*system, *prompt], chat_template=named, **variables)
        return tokenizer.encode(rendered, add_special_tokens=False, most=self.max_seq_len), rendered, variables


def _checked(request: Request, item: Chunk | WisparseError) -> Chunk:
    """The chunk; if it is an error, raise the request's original exception."""
    if isinstance(item, WisparseError):
        raise request.error or item
    return item
