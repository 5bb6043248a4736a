"""A loaded bundle that takes text and gives text."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Unpack, overload

from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import sparse_from

from .decoding.decoder import Decoder
from .decoding.sampling import SamplingParams
from .generation.engine import Engine, Generation, Piece, Ticket
from .generation.grammar import Grammars
from .generation.scheduler import Request, Tally
from .generation.settings import GenerationArguments, GenerationSettings, spelled_out
from .text.text import Message, Prompt, Text, as_prompts, stop_ids

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle


class Model:
    """A bundle on a device; make one with ``wisparse.load``.

    Calls from several threads are decoded together, ``max_batch`` answers at a time; each gets the tokens that it gets
    alone. A stream that is left unfinished keeps its place among them until it is closed (``stream.close()``, or its
    last reference goes) or the others have moved it to its end.

    A prompt that begins like one that the cache still holds is read from where they part.

    Attributes:
        config: the model's dimensions.
        decoder: what runs it, on token ids. Whoever uses it directly does so through ``engine.call`` and
            ``engine.forget_prefixes``, or does not use the calls below.
        engine: what all calls below go through.
        text: tokenizer and chat template; None if the bundle has no tokenizer.
        stop_ids: the tokens that end an answer.
        grammars: compiles what answers have to be.
    """

    def __init__(self, bundle: Bundle, decoder: Decoder, text: Text | None, prefill: str = "dense") -> None:
        sparse_from(prefill, 1)
        self.bundle = bundle
        self.decoder = decoder
        self.text = text
        self.prefill = prefill
        self.stop_ids = stop_ids(bundle, text)
        self.engine = Engine(decoder, text, bundle)
        self._chat = text is not None and text.template_ends_turns(self.stop_ids)
        self.grammars = Grammars(lambda: bundle.read_bytes("tokenizer.json"), self.stop_ids)

    def __repr__(self) -> str:
        decoder = self.decoder
        return (
            f"<wisparse.Model {str(self.bundle.folder)!r}: {self.config.model_type}, {self.config.num_blocks} blocks, "
            f"sparsity {self.sparsity:g}, prefill {self.prefill}; back end {decoder.name} on "
            f"{decoder.device}, {str(decoder.dtype).removeprefix('torch.')}, max_seq_len {decoder.max_seq_len}"
            f"{'; closed' if self.engine.closed else ''}>"
        )

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def tokenizer(self) -> Text:
        """The bundle's tokenizer: ``encode`` gives a text's token ids, ``decode`` the text of token ids.

        Raises:
            UsageError: the bundle has none.
        """
        if self.text is None:
            raise UsageError("this bundle has no tokenizer: give token ids")
        return self.text

    def spell(self, token: int) -> str:
        """One token as it stands within a text, special ones by their names; empty if there is no tokenizer."""
        if self.text is None:
            return ""
        # Many tokenizers drop a leading space at the beginning of a text, so the token is looked at behind itself.
        once, twice = (self.text.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :]

    @property
    def sparsity(self) -> float:
        """Of the sparsity level that answers are decoded at, one of ``bundle.sparsity levels``; 0 for the dense model. Setting it takes
        milliseconds and loads nothing. A server's requests may each name another one.

        Raises:
            UsageError: set to a sparsity level that the bundle lacks, or while an answer is in progress.
        """
        return self.bundle.sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        bundle = self.bundle.at(sparsity)

        def switch() -> None:
            if self.engine.state.running:
                raise UsageError(
                    f"sparsity: an answer is in progress at {self.sparsity:g}; wait for its end or close() the stream, "
                    f"then set {bundle.sparsity:g}"
                )
            self.engine.set_sparsity(bundle.sparsity)
            self.bundle = bundle

        self.engine.call(switch)

    @property
    def max_seq_len(self) -> int:
        """Tokens that prompt and answer may have together (the answer's last one needs no place)."""
        return self.decoder.max_seq_len

    @overload
    def generate(self, prompt: Prompt, **settings: Unpack[GenerationArguments]) -> Generation:  # type: ignore[overload-overlap]
        ...  # a text is a sequence of texts as well, and one prompt

    @overload
    def generate(self, prompt: Sequence[Prompt], **settings: Unpack[GenerationArguments]) -> list[Generation]: ...

    @spelled_out
    def generate(
        self, prompt: Prompt | Sequence[Prompt], **settings: Unpack[GenerationArguments]
    ) -> Generation | list[Generation]:
        """Continue a prompt, answer a conversation, or do so for several at once.

        Args:
            prompt: a text, a conversation (messages with ``role`` and ``content``), token ids (also a numpy array or
                a tensor of integers), or a list of any one of these.
            max_new_tokens: at most so many; None until the context is full.
            temperature, top_k, top_p, min_p, seed, repetition_penalty, frequency_penalty, presence_penalty,
                logit_bias, logprobs: see :class:`SamplingParams`; temperature 0 is greedy. A seed that
                is given holds for each prompt of a list, which so gets the answer it gets alone; without one each gets
                a fresh seed of its own, to be found in its :class:`Generation`.
            json_schema: the answer is JSON that this schema describes, a mapping or its text; ``{}`` is any JSON.
                ``max_new_tokens`` may still cut it off. Needs ``pip install 'wisparse[serve]'``.
            grammar: the answer is what this grammar describes, written as llguidance's Lark or llama.cpp's GBNF.
            stop: the answer ends before any of these strings; a special token's name works too. None for none.
            system_prompt: put before a text as the system's message; needs a chat template.
            chat_template: whether a text is put through the model's chat template as a user's message. None: if the
                template ends an assistant's turn with a token that ends generation, as those of instruction-tuned
                models do; a base model continues the text as it stands. Conversations always are.
            prefill: ``dense``, ``half`` or ``all``; the loader's choice if None.
            measure_sparsity: count the dropped channels; see :meth:`Decoder.measure_sparsity`.

        Returns:
            A :class:`Generation`, or a list of them if a list of prompts was given.

        Raises:
            ContextLengthError: a prompt longer than the context.
            UsageError: another argument out of range.
        """
        prompts, single = as_prompts(prompt)
        plan = self._plan(prompts, GenerationSettings(**settings))
        answers: dict[int, Generation] = dict(self._answers(plan))
        # All of them together: what was counted when the last one ended.
        total = list(answers.values())[-1].realised_sparsity
        ordered = [replace(answers[index], realised_sparsity=total) for index in range(len(answers))]
        return ordered[0] if single else ordered

    def generate_each(
        self, prompts: Sequence[Prompt], *, tally: Tally | None = None, **settings: Unpack[GenerationArguments]
    ) -> Generator[tuple[int, Generation], None, None]:
        """Answer many prompts, as many at a time as there are slots: gives each one's index and answer as it ends.

        Arguments are checked at once, the model starts at the first ``next``.

        Args:
            prompts: as for :meth:`generate`.
            tally: what the steps gave and took is added to it in the end.
            settings: as for :meth:`generate`.
        """
        return self._answers(self._plan(prompts, GenerationSettings(**settings)), tally)

    def _answers(self, plan: _Plan, tally: Tally | None = None) -> Generator[tuple[int, Generation], None, None]:
        """Every prompt's index and answer, as it ends."""
        ended: deque[tuple[int, Piece | WisparseError]] = deque()
        before = self.engine.tally
        with self._under_way(plan) as submit:
            tickets = [
                submit(index, lambda item, index=index: ended.append((index, item)), pieces=False)
                for index in range(len(plan.requests))
            ]
            for _ in tickets:
                self.engine.drive(ended.__len__)
                index, last = ended.popleft()
                yield index, _whole(tickets[index], last)
        if tally is not None:
            after = self.engine.tally
            tally.tokens += after.tokens - before.tokens
            tally.seconds += after.seconds - before.seconds

    def stream(self, prompt: Prompt, **settings: Unpack[GenerationArguments]) -> Generator[Piece, None, None]:
        """Answer piece by piece as tokens come; arguments as for :meth:`generate`, one prompt only.

        Arguments are checked at once, the model starts at the first ``next``. Leaving the loop early is fine.
        """
        return _one_by_one(self.stream_together(prompt, **settings))

    def stream_together(
        self, prompt: Prompt, **settings: Unpack[GenerationArguments]
    ) -> Generator[list[Piece], None, None]:
        """:meth:`stream`, with the pieces that are there at once in one list: for what is shown or sent, which costs
        as much for one token as for many.
        """
        prompts, single = as_prompts(prompt)
        if not single:
            raise UsageError("stream takes one prompt; use generate for a list of them")
        return self._pieces(self._plan(prompts, GenerationSettings(**settings)))

    def _pieces(self, plan: _Plan) -> Generator[list[Piece], None, None]:
        came: deque[Piece | WisparseError] = deque()
        with self._under_way(plan) as submit:
            ticket = submit(0, came.append)
            together: list[Piece] = []
            while not together or together[-1].finish_reason is None:
                if not came:
                    self.engine.drive(came.__len__)
                together = [_good(ticket, came.popleft())]
                while came and isinstance(came[0], Piece):
                    together.append(came.popleft())  # type: ignore[arg-type]
                yield together

    def astream(self, prompt: Prompt, **settings: Unpack[GenerationArguments]) -> AsyncGenerator[Piece, None]:
        """:meth:`stream` for ``async for``: the event loop stays free, a thread runs the steps meanwhile."""
        prompts, single = as_prompts(prompt)
        if not single:
            raise UsageError("astream takes one prompt; use generate for a list of them")
        return self._pieces_to_come(self._plan(prompts, GenerationSettings(**settings)))

    async def _pieces_to_come(self, plan: _Plan) -> AsyncGenerator[Piece, None]:
        came: deque[Piece | WisparseError] = deque()
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def deliver(item: Piece | WisparseError) -> None:
            came.append(item)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to read it
                loop.call_soon_threadsafe(woken.set)

        with self._under_way(plan) as submit:
            ticket = submit(0, deliver)
            threading.Thread(
                target=self.engine.drive, args=(lambda: ticket.done,), name="wisparse-stream", daemon=True
            ).start()
            reason = None
            while reason is None:
                while not came:
                    woken.clear()
                    if not came:
                        await woken.wait()
                piece = _good(ticket, came.popleft())
                reason = piece.finish_reason
                yield piece

    def close(self) -> None:
        """Give the memory back; the model cannot be used any more. What other threads wait for ends with an error."""
        self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plan(self, prompts: Sequence[Prompt], settings: GenerationSettings) -> _Plan:
        """Tokenise; the model is not touched."""
        most, sampling, stops = settings.max_new_tokens, settings.sampling, settings.stop_texts
        prefill, rule = settings.prefill or self.prefill, settings.rule
        requests = []
        for prompt in prompts:
            token_ids = self._encode(prompt, settings.system_prompt, settings.chat_template)
            request, texts = self.request(token_ids, most, sampling, stops, prefill)
            if rule is not None:
                request = replace(request, constraint=self.grammars.begin(rule))
            requests.append((request, texts))
            self.engine.check(requests[-1][0])
        return _Plan(requests, settings.measure_sparsity)

    def request(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int | None,
        sampling: SamplingParams,
        stops: Sequence[str],
        prefill: str,
        sparsity: float | None = None,
    ) -> tuple[Request, list[str]]:
        """What a scheduler takes for a prompt, and those of the stop strings that only the text can show.

        A stop string that is a special token's name is a token to stop at.
        """
        special = [one for one in stops if self.text is not None and self.text.is_special(one)]
        tokens = {self.text.token_id(one) for one in special} if self.text is not None else set()
        ends = self.stop_ids | {token for token in tokens if token is not None}
        request = Request(token_ids, max_new_tokens, sampling, ends, prefill, sparsity=sparsity)
        return request, [one for one in stops if one not in special]

    @contextmanager
    def _under_way(self, plan: _Plan) -> Iterator[Callable[..., Ticket]]:
        """Gives what submits a request of the plan by its index; what has not ended is taken back in the end."""
        tickets = []

        def submit(index: int, deliver: Callable[[Piece | WisparseError], None], **how: bool) -> Ticket:
            request, stops = plan.requests[index]
            tickets.append(self.engine.submit(request, stops, deliver, measure=plan.measure, **how))
            return tickets[-1]

        if plan.measure:
            self.engine.start_measuring()
        try:
            yield submit
        finally:
            for ticket in tickets:
                self.engine.cancel(ticket)
            if plan.measure:
                self.engine.stop_measuring()

    def _encode(self, prompt: Prompt, system_prompt: str | None, chat_template: bool | None) -> list[int]:
        """A prompt's token ids."""
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            if system_prompt is not None or chat_template:
                raise UsageError(
                    "token ids stand for themselves: they take neither a system prompt nor a chat template"
                )
            return list(prompt)  # type: ignore[arg-type]
        tokenizer = self.tokenizer
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        if isinstance(prompt, str):
            if chat_template is False and system:
                raise UsageError("a system prompt needs the chat template: drop one of the two")
            if not (self._chat or system if chat_template is None else chat_template):
                return tokenizer.encode(prompt, most=self.max_seq_len)
            messages: list[Message] = [*system, {"role": "user", "content": prompt}]
        else:
            messages = [*system, *prompt]
        return tokenizer.encode(tokenizer.render(messages), add_special_tokens=False, most=self.max_seq_len)


@dataclass(frozen=True)
class _Plan:
    """Requests, checked and tokenised, each with the stop strings that only its text can show."""

    requests: Sequence[tuple[Request, list[str]]]
    measure: bool


def _one_by_one(stream: Generator[list[Piece], None, None]) -> Generator[Piece, None, None]:
    with contextlib.closing(stream):
        for together in stream:
            yield from together


def _good(ticket: Ticket, item: Piece | WisparseError) -> Piece:
    """A piece, or what ended the request is raised."""
    if isinstance(item, WisparseError):
        raise ticket.failure or item
    return item


def _whole(ticket: Ticket, last: Piece | WisparseError) -> Generation:
    generation = _good(ticket, last).generation
    assert generation is not None  # the last piece has it
    return generation
