"""A loaded bundle that takes text and gives text."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Unpack, overload

from wisparse.formats.errors import UsageError
from wisparse.formats.model.model_config import ModelConfig
from wisparse.formats.prefill import sparse_from

from .choosing import TokenScore
from .decoder import Decoder
from .generation import Job, Request, Scheduler, Tally
from .memory import memory_errors, peak_bytes
from .sampling import SamplingSettings
from .settings import GenerationArguments, GenerationSettings, spelled_out
from .text.detokenize import Detokenizer, StopStrings
from .text.edge import Text, stop_ids
from .text.prompts import Message, Prompt, as_prompts

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle

__all__ = ["Generation", "Message", "Model", "Piece", "Prompt", "Writer"]


# How long a call waits for another thread to move a stream that only its own has moved so far.
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer, special tokens and the stop string left out.
        token_ids: all generated ids, those of a stop token or stop string included.
        finish_reason: ``stop`` (a stop token or string) or ``length`` (``max_new_tokens``, or the context is full).
        seed: repeats a sampled answer; None for a greedy one.
        prompt_tokens: length of the prompt.
        prompt_seconds: from the prompt to the first token.
        generation_seconds: from the first token to the last, on the clock: in a stream what its reader did between two
            tokens counts too. 0 if there was only one. What a first use compiles and captures comes before the prompt.
        peak_memory_bytes: the most memory used so far: on a GPU the device's, else this process's.
        realised_sparsity: share of the projections' weights that were not needed at the sparse positions; None unless
            asked for. In a batch it is that of all answers together.
        scores: what the model thought of each of ``token_ids``; None unless ``logprobs`` asks for it.
        prompt_scores: of the prompt's tokens but the first; None unless a request asks for it.
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

    @property
    def prompt_tok_per_s(self) -> float:
        """Prompt tokens read per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tok_per_s(self) -> float:
        """Tokens decoded per second, the first not counted: the prefill gave it. 0 if it is the only one."""
        return (len(self.token_ids) - 1) / self.generation_seconds if self.generation_seconds else 0.0


@dataclass(frozen=True)
class Piece:
    """What one token added to a streamed answer.

    Attributes:
        text: whole characters, maybe none: an incomplete character or the beginning of a stop string is held back.
        token_id: the token.
        finish_reason: set on the last piece, as in ``Generation``.
        generation: the whole answer, on the last piece.
        score: what the model thought of the token; None unless ``logprobs`` asks for it.
        prompt_scores: on the first piece, of the prompt's tokens but the first; None unless a request asks for it.
    """

    text: str
    token_id: int
    finish_reason: str | None = None
    generation: Generation | None = None
    score: TokenScore | None = None
    prompt_scores: Sequence[TokenScore] | None = None


class Writer:
    """Turns one job's tokens into text, and ends the job at a stop string."""

    def __init__(self, job: Job, detokenizer: Detokenizer | None, stops: Sequence[str]) -> None:
        self.job = job
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._parts: list[str] = []
        self.finish_reason: str | None = None

    def take(self) -> str:
        """The text that the job's newest token completes."""
        self.finish_reason = self.job.finish_reason
        piece = ""
        if self._detokenizer is not None:
            if self.finish_reason != "stop":  # a stop token has no text of its own
                piece = self._stops.add(self._detokenizer.add(self.job.token_ids[-1]))
            if self.finish_reason is not None:
                piece += self._stops.add(self._detokenizer.finish()) + self._stops.finish()
            if self._stops.found:
                self.finish_reason = "stop"
        self._parts.append(piece)
        return piece

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def score(self) -> TokenScore | None:
        """What the model thought of the newest token, where that is asked for."""
        return self.job.scores[-1] if self.job.scores else None


class Model:
    """A bundle on a device; make one with ``wisparse.load``.

    One answer, or one batch, is generated at a time: calls wait for each other. A stream that is left unfinished holds
    the model until it is closed (``stream.close()``, or its last reference goes). A call that could only wait for
    itself is refused: one from the only thread that has ever touched the stream, when no other moves it (at once, if
    there is no other; else after some seconds, as a thread pool's next worker may).

    Attributes:
        config: the model's dimensions.
        decoder: what runs it, on token ids.
        text: tokenizer and chat template; None if the bundle has no tokenizer.
        stop_ids: the tokens that end an answer.
    """

    def __init__(self, bundle: Bundle, decoder: Decoder, text: Text | None, prefill: str = "dense") -> None:
        sparse_from(prefill, 1)
        self.bundle = bundle
        self.decoder = decoder
        self.text = text
        self.prefill = prefill
        self.stop_ids = stop_ids(bundle, text)
        self._chat = text is not None and text.template_ends_turns(self.stop_ids)
        self._free = threading.Condition()
        self._closed = self._busy = False
        self._movers: set[int] = set()  # threads that began or moved on what holds the model

    def __repr__(self) -> str:
        decoder = self.decoder
        return (
            f"<wisparse.Model {str(self.bundle.folder)!r}: {self.config.model_type}, {self.config.num_blocks} blocks, "
            f"sparsity {self.sparsity:g}, prefill {self.prefill}; back end {decoder.name} on "
            f"{decoder.device}, {str(decoder.dtype).removeprefix('torch.')}, max_seq_len {decoder.max_seq_len}"
            f"{'; closed' if self._closed else ''}>"
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
        """Of the rung in force, one of ``bundle.rungs``; 0 for the dense model. Setting it takes milliseconds and loads
        nothing.

        Raises:
            UsageError: set to a rung that the bundle lacks, or while an answer is in progress.
        """
        return self.bundle.sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        bundle = self.bundle.at(sparsity)
        with self._free:
            if self._busy:
                raise UsageError(
                    f"sparsity: an answer is in progress at {self.sparsity:g}; wait for its end or close() the stream, "
                    f"then set {bundle.sparsity:g}"
                )
            if self._closed:
                raise UsageError("the model was closed: load it again")
            if bundle.sparsity != self.sparsity:
                self.decoder.set_masks(bundle.masks)
                self.bundle = bundle

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
                logit_bias, logprobs: see :class:`SamplingSettings`; temperature 0 is greedy. A seed that
                is given holds for each prompt of a list, which so gets the answer it gets alone; without one each gets
                a fresh seed of its own, to be found in its :class:`Generation`.
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
            UsageError: another argument out of range, or a stream of this thread is unfinished.
        """
        prompts, single = as_prompts(prompt)
        plan = self._plan(prompts, GenerationSettings(**settings))
        for _ in self._run(plan):
            pass
        answers = [self.answer(writer, plan.realised_sparsity) for writer in plan.writers.values()]
        return answers[0] if single else answers

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

    def _answers(self, plan: _Plan, tally: Tally | None) -> Generator[tuple[int, Generation], None, None]:
        index = {writer: number for number, writer in enumerate(plan.writers.values())}
        for writer, _ in self._run(plan):
            if writer.finish_reason is not None:
                yield index[writer], self.answer(writer, plan.realised_sparsity)
        if tally is not None:
            tally.tokens += plan.scheduler.tally.tokens
            tally.seconds += plan.scheduler.tally.seconds

    def stream(self, prompt: Prompt, **settings: Unpack[GenerationArguments]) -> Generator[Piece, None, None]:
        """Answer piece by piece as tokens come; arguments as for :meth:`generate`, one prompt only.

        Arguments are checked at once, the model starts at the first ``next``. Leaving the loop early is fine.
        """
        prompts, single = as_prompts(prompt)
        if not single:
            raise UsageError("stream takes one prompt; use generate for a list of them")
        return self._pieces(self._plan(prompts, GenerationSettings(**settings)))

    def close(self) -> None:
        """Give the memory back; the model cannot be used any more."""
        with self._held(threading.get_ident()):
            self._closed = True
            self.decoder.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plan(self, prompts: Sequence[Prompt], settings: GenerationSettings) -> _Plan:
        """Tokenise; the model is not touched."""
        most, sampling, stops = settings.max_new_tokens, settings.sampling, settings.stop_texts
        prefill = settings.prefill or self.prefill
        scheduler = Scheduler(self.decoder)
        writers = {}
        for prompt in prompts:
            token_ids = self._encode(prompt, settings.system_prompt, settings.chat_template)
            request, texts = self.request(token_ids, most, sampling, stops, prefill)
            job = scheduler.submit(request)
            writers[job] = self.writer(job, texts)
        return _Plan(scheduler, writers, settings.measure_sparsity)

    def request(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int | None,
        sampling: SamplingSettings,
        stops: Sequence[str],
        prefill: str,
    ) -> tuple[Request, list[str]]:
        """What a scheduler takes for a prompt, and those of the stop strings that only the text can show.

        A stop string that is a special token's name is a token to stop at.
        """
        special = [one for one in stops if self.text is not None and self.text.is_special(one)]
        tokens = {self.text.token_id(one) for one in special} if self.text is not None else set()
        ends = self.stop_ids | {token for token in tokens if token is not None}
        return Request(token_ids, max_new_tokens, sampling, ends, prefill), [one for one in stops if one not in special]

    def writer(self, job: Job, stops: Sequence[str]) -> Writer:
        """What turns the job's tokens into text."""
        return Writer(job, None if self.text is None else self.text.detokenizer(), stops)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The model for this thread alone: calls from others wait until the block ends."""
        with self._held(threading.get_ident()):
            yield

    def _run(self, plan: _Plan) -> Iterator[tuple[Writer, str]]:
        """Run a plan to its end; yields every token's writer and text."""
        with self._held(plan.thread), memory_errors(self.decoder.device, "for this prompt"):
            self.decoder.measure_sparsity(plan.measure_sparsity)
            while plan.scheduler.busy:
                for job in plan.scheduler.step():
                    writer = plan.writers[job]
                    piece = writer.take()
                    if writer.finish_reason is not None:
                        plan.scheduler.cancel(job)
                    if not plan.scheduler.busy and plan.measure_sparsity:
                        plan.realised_sparsity = self.decoder.realised_sparsity()
                    yield writer, piece
                    self._movers.add(threading.get_ident())

    def _pieces(self, plan: _Plan) -> Generator[Piece, None, None]:
        for writer, text in self._run(plan):
            done = writer.finish_reason is not None
            answer = self.answer(writer, plan.realised_sparsity) if done else None
            yield Piece(text, writer.job.token_ids[-1], writer.finish_reason, answer, writer.score)

    def answer(self, writer: Writer, realised_sparsity: float | None = None) -> Generation:
        """The whole answer of a job that has ended."""
        job = writer.job
        return Generation(
            text=writer.text,
            token_ids=tuple(job.token_ids),
            finish_reason=str(writer.finish_reason),
            seed=None if job.sampling.greedy else job.sampling.seed,
            prompt_tokens=len(job.request.token_ids),
            prompt_seconds=job.prompt_seconds,
            generation_seconds=job.generation_seconds,
            peak_memory_bytes=peak_bytes(self.decoder.device),
            realised_sparsity=realised_sparsity,
            scores=None if job.sampling.logprobs is None else tuple(job.scores),
            prompt_scores=None if job.prompt_scores is None else tuple(job.prompt_scores),
        )

    @contextmanager
    def _held(self, beginner: int) -> Iterator[None]:
        """The model for one caller alone; ``beginner`` is the thread that asked for what is to run."""
        me = threading.get_ident()
        with self._free:
            while self._busy:
                # Whoever waits for a stream that it alone has moved so far waits for itself, unless another thread
                # goes on with it: in a thread pool each piece may be pulled by another worker.
                alone = self._movers == {me}
                if alone and (threading.active_count() == 1 or not self._free.wait(_PATIENCE_SECONDS)):
                    if self._busy and self._movers == {me}:
                        raise UsageError(
                            "a stream of this model is unfinished in this thread: exhaust it or close() it first"
                        )
                elif not alone:
                    self._free.wait()
            if self._closed:
                raise UsageError("the model was closed: load it again")
            self._busy, self._movers = True, {beginner, me}
        try:
            yield
        finally:
            with self._free:
                self._busy = False
                self._free.notify_all()

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


@dataclass
class _Plan:
    """Requests under way, checked and tokenised."""

    scheduler: Scheduler
    writers: dict[Job, Writer]
    measure_sparsity: bool
    thread: int = field(default_factory=threading.get_ident)
    realised_sparsity: float | None = None
