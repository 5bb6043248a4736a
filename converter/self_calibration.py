"""Calibration text that the model writes itself: no data set, and a fit for any fine-tune, language or tokenizer."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import CalibrationError
from wisparse.formats.model_config import ModelConfig

from .documents import CalibrationTokens, Conversations, TemplateError
from .flow import input_device
from .processes import Progress

_log = logging.getLogger("wisparse")

_HOT = 2.0
_HOT_TOKENS = 10
# A question that never ends would leave no room for an answer.
_LONGEST_QUESTION = 128
_PLACEHOLDER = "placeholder"


@torch.no_grad()  # not inference_mode: a search may ask for gradients over these very tokens
def write_calibration(
    model: Any, tokenizer: Any, texts: Sequence[tuple[int, int, int]], progress: Progress
) -> list[CalibrationTokens]:
    """Let ``model`` write texts of (num_samples, seq_len, seed), all of them side by side."""
    device = input_device(model)
    opening = [_first_token(model, tokenizer)]
    ends = _end_ids(model, tokenizer)
    turns = _turns(tokenizer, opening[0], ends)
    rows: list[_Row] = []
    for num_samples, seq_len, seed in texts:
        generator = torch.Generator(device=device).manual_seed(seed)
        conversations = num_samples // 2 if turns else 0
        for index in range(num_samples):
            question, answer = turns if turns and index < conversations else (opening, None)
            rows.append(_Row(seq_len, ends, question, answer, generator))
    longest = max(row.seq_len for row in rows)
    # Keys and values at most about 4 GB. Heads may differ from block to block.
    numbers = 2 * sum(block.kv_size for block in ModelConfig.from_dict(model.config.to_dict()).blocks)
    batch = max(1, min(len(rows), (4 << 30) // (numbers * longest * next(model.parameters()).element_size())))
    # One thread for a small model on a CPU: its steps are so short that threads would mostly wait for each other.
    threads = torch.get_num_threads()
    small = model.device.type == "cpu" and sum(parameter.numel() for parameter in model.parameters()) < 100e6
    if small:
        torch.set_num_threads(1)
    try:
        with progress.stage("Writing calibration text", -(-len(rows) // batch) * longest) as stage:
            for start in range(0, len(rows), batch):
                _write(model, rows[start : start + batch], stage)
    finally:
        torch.set_num_threads(threads)
    found, first = [], 0
    for num_samples, _, seed in texts:
        written = [row.tokens for row in rows[first : first + num_samples]]
        found.append(CalibrationTokens.from_rows(written, "self", seed))
        first += num_samples
    return found


class _Row:
    """A row of the batch, and what it writes next: a forced token (an opening), or whatever the model draws."""

    def __init__(
        self,
        seq_len: int,
        ends: frozenset[int],
        question: list[int],
        answer: list[int] | None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.seq_len, self.generator = seq_len, generator
        self.ends, self.question, self.answer = ends, question, answer
        self.longest = min(_LONGEST_QUESTION, max(1, seq_len // 4))
        self.tokens: list[int] = []
        self.forced = deque(question)
        self.asking = answer is not None
        self.free = 0  # tokens drawn since the last opening

    def accept(self, drawn: int) -> int:
        """The next token: the forced one, or ``drawn``."""
        if self.forced:
            return self.forced.popleft()
        turn_over = drawn in self.ends
        if self.asking and self.answer is not None:
            # Some templates close a turn with a marker that is no end-of-text token: the first token of what follows.
            if turn_over or drawn == self.answer[0] or self.free >= self.longest:
                self.forced.extend(self.answer)
                self.asking, self.free = False, 0
                return self.forced.popleft()
        elif turn_over:
            self.forced.extend(self.question)
            self.asking, self.free = self.answer is not None, 0
            if drawn == self.question[0]:
                self.forced.popleft()
            return drawn
        self.free += 1
        return drawn

    @property
    def temperature(self) -> float:
        return max(1.0, _HOT - (_HOT - 1.0) * self.free / _HOT_TOKENS)


def _write(model: Any, rows: list[_Row], stage: Any) -> None:
    device, seq_len = input_device(model), max(row.seq_len for row in rows)
    cache = _cache(model.config, seq_len)
    drawn = [0] * len(rows)  # never used: every row begins with a forced token
    for position in range(seq_len):
        tokens = [row.accept(token) for row, token in zip(rows, drawn, strict=True)]
        for row, token in zip(rows, tokens, strict=True):
            if position < row.seq_len:
                row.tokens.append(token)
        stage.advance()
        if position + 1 < seq_len:
            step = torch.tensor(tokens, device=device).unsqueeze(1)
            logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            drawn = _draw(logits, rows)


def _cache(config: Any, seq_len: int) -> Any:
    """transformers' cache with room for ``seq_len`` tokens from the start; its own copies all of them at every token."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class Preallocated(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            begin = self.get_seq_length()
            end = begin + key_states.shape[-2]
            if not self.is_initialized:
                self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
                self.room = [new.new_empty(*new.shape[:2], seq_len, new.shape[3]) for new in (key_states, value_states)]
            for room, new in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, begin:end] = new
            self.keys, self.values = (room[:, :, :end] for room in self.room)
            return self.keys, self.values

    cache = DynamicCache(config=config)
    # Layers with a sliding window keep their own kind: they need no more room than the window.
    cache.layers = [Preallocated() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _draw(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    heat = torch.tensor([row.temperature for row in rows], device=logits.device).unsqueeze(1)
    probabilities = torch.softmax(logits.float() / heat, dim=-1)
    # argmax(p / -log u) is a sample from p, without sorting, and without a running sum, which is not reproducible on a
    # GPU. Each text has a generator of its own.
    numbers = [
        torch.rand(len(list(some)), logits.shape[1], generator=generator, device=logits.device)
        for generator, some in groupby(rows, key=lambda row: row.generator)
    ]
    chosen: list[int] = (probabilities / -torch.cat(numbers).log_()).argmax(dim=-1).tolist()
    return chosen


def _first_token(model: Any, tokenizer: Any) -> int:
    # Qwen has no beginning-of-text token; its documents begin after an end-of-text token.
    generation = getattr(model, "generation_config", None)
    candidates = [tokenizer.bos_token_id, model.config.bos_token_id, getattr(generation, "bos_token_id", None)]
    candidates.append(tokenizer.eos_token_id)
    for candidate in candidates:
        if isinstance(candidate, int) and 0 <= candidate < model.config.vocab_size:
            return candidate
    raise CalibrationError(
        "calibration 'self': the model has neither a beginning-of-text nor an end-of-text token to begin with; "
        "give text instead: --calibration PATH"
    )


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (
        tokenizer.eos_token_id,
        model.config.eos_token_id,
        getattr(generation, "eos_token_id", None),
    ):
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)


def _turns(tokenizer: Any, first: int, ends: frozenset[int]) -> tuple[list[int], list[int]] | None:
    """The template's tokens that open a user turn, and those between the question and its answer; None without one.

    None as well where the template does not close an assistant's turn with an end-of-text token: a base model that
    ships a template none the less was never trained on its tokens, and what it writes after them is noise.
    """
    conversations = Conversations(tokenizer)
    if conversations.source is None:
        return None
    question_asked = [{"role": "user", "content": _PLACEHOLDER}]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
    try:
        text = conversations.render(question_asked, add_generation_prompt=True)
        closing = conversations.render(turns).rpartition(_PLACEHOLDER)[2]
    except TemplateError as error:
        # It wants something else than a user turn (a system prompt, tools), or does not work: documents alone will do.
        _log.warning("the model writes documents and no conversations: its chat template says %.200s", error)
        return None
    if ends.isdisjoint(tokenizer.encode(closing, add_special_tokens=False)):
        return None
    before, found, after = text.partition(_PLACEHOLDER)
    question = tokenizer.encode(before, add_special_tokens=False)
    answer = tokenizer.encode(after, add_special_tokens=False)
    if not found or not question or not answer:
        return None
    return (question if question[0] == first else [first, *question]), answer
