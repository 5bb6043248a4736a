"""An answer on the way to its receiver: a chunk for each token, and the result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wisparse.formats.errors import WisparseError

from ..detokenizer import Detokenizer
from ..memory import peak_bytes
from ..tokenizer import StopStrings, Tokenizer
from .request import Chunk, Generation, Request


class Delivery:
    """``receive`` gets the chunks, of ``final_only`` just the last one, or the error."""

    def __init__(
        self, request: Request, receive: Callable[[Chunk | WisparseError], None], *, final_only: bool = False
    ) -> None:
        self.receive, self.final_only = receive, final_only
        self._request = request
        self._stop_strings: StopStrings  # by ``begin``
        self._detokenizer: Detokenizer | None = None
        self._texts: list[str] = []  # by delivered token
        self._thoughts: list[str] = []

    def begin(self, tokenizer: Tokenizer | None) -> None:
        self._stop_strings = StopStrings(self._request.stop)
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(self._request.visible_special_tokens)

    @property
    def pending(self) -> int:
        """Tokens without a chunk."""
        return len(self._request.output_token_ids) - len(self._texts)

    def next_chunk(self) -> Chunk:
        """The first pending token as a chunk; its ``finish_reason`` is ``stop`` if it completes a stop string."""
        request, index = self._request, len(self._texts)
        token = request.output_token_ids[index]
        last = self.pending == 1 and request.error is None
        finish_reason = request.finish_reason if last else None
        text = ""
        if self._detokenizer is not None:
            if finish_reason != "stop":  # a stop token has no text of its own
                text = self._stop_strings.add(self._detokenizer.add(token))
            if finish_reason is not None:
                text += self._stop_strings.add(self._detokenizer.finish()) + self._stop_strings.finish()
            if self._stop_strings.found is not None:
                finish_reason = "stop"
        thought = ""
        if request.thoughts is not None:
            thought, text = request.thoughts.add(text, finish_reason is not None)
            self._thoughts.append(thought)
        self._texts.append(text)
        score = request.scores[index] if request.scores else None
        return Chunk(text, token, finish_reason, None, score, request.prompt_scores if index == 0 else None, thought)

    def generation(self, finish_reason: str, device: torch.device, realised_sparsity: float | None) -> Generation:
        """The result of the chunks so far."""
        request, count = self._request, len(self._texts)
        return Generation(
            text="".join(self._texts),
            token_ids=tuple(request.output_token_ids[:count]),
            finish_reason=finish_reason,
            seed=None if request.sampling.greedy else request.sampling.seed,
            prompt_tokens=len(request.prompt_token_ids),
            prompt_seconds=request.first_token_time - request.prefill_started,
            generation_seconds=request.last_token_time - request.first_token_time,
            peak_memory_bytes=peak_bytes(device),
            realised_sparsity=realised_sparsity,
            scores=None if request.sampling.logprobs is None else tuple(request.scores[:count]),
            prompt_scores=None if request.prompt_scores is None else tuple(request.prompt_scores),
            cached_tokens=request.cached_tokens,
            stop_string=self._stop_strings.found,
            drafts=request.drafts,
            thought="".join(self._thoughts),
            thought_tokens=0 if request.thoughts is None else request.thoughts.tokens,
            thought_closed=request.thoughts is None or request.thoughts.closed,
        )
