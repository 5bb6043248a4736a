"""The token that ends an assistant's turn, where a chat model's configuration names another end."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from wisparse.formats.bundle import SMALL_FILES
from wisparse.formats.chat_template import after_answer
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.guard import dump_json, read_json

from .calibration import TemplateError, conversation_renderer, end_ids
from .source import SourceModel

_log = logging.getLogger("wisparse")

_FILE = "generation_config.json"
_EXCHANGE = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]
# Of the closing token after the exchange: SmolLM2-135M-Instruct gives it 0.78, and the end-of-text token 1e-6.
_SMALLEST_PROBABILITY = 0.01


def closing_token(tokenizer: Any, ends: Set[int]) -> int | None:
    """The added token that the chat template writes after an answer; None if there is none, or one of ``ends``."""
    if {"<|channel|>", "<|message|>"} <= tokenizer.get_added_vocab().keys():
        return None  # gpt-oss: it ends a message of an answer
    render = conversation_renderer(tokenizer)
    if render is None:
        return None
    try:
        closings = [tokenizer.encode(text, add_special_tokens=False) for text in after_answer(render)]
    except TemplateError:
        return None  # it needs other messages
    if any(not ends.isdisjoint(closing) for closing in closings):
        return None
    first = next((one for one in closings[0] if tokenizer.decode([one]).strip()), None)
    return first if first in tokenizer.added_tokens_decoder else None


@torch.no_grad()
def probability_of_end(source: SourceModel, closing: int, ends: Set[int]) -> tuple[float, float]:
    """Probability of the closing token after a short exchange, and the largest one of ``ends``."""
    render = conversation_renderer(source.tokenizer)
    assert render is not None
    answer = _EXCHANGE[1]["content"]
    before, _, _ = render(_EXCHANGE).rpartition(answer)
    ids = source.tokenizer.encode(before + answer, add_special_tokens=False)
    logits = source.model(torch.tensor([ids], device=source.device)).logits[0, -1].float()
    probabilities = logits.softmax(-1)
    return float(probabilities[closing]), max(
        (float(probabilities[one]) for one in ends if one < len(logits)), default=0.0
    )


def end_turns(source: SourceModel, folder: Path) -> dict[str, bytes]:
    """``generation_config.json`` with the template's closing token as an end, if no configuration names one that the
    template writes and the model predicts it after an answer. A base model with a template, as Qwen's, does not: it was
    not trained on the template, and its bundle continues texts."""
    ends = end_ids(source.model, source.tokenizer)
    closing = closing_token(source.tokenizer, ends)
    if closing is None or closing >= source.config.vocab_size:
        return {}
    found, other = probability_of_end(source, closing, ends)
    says = f"the chat template ends turns with {source.tokenizer.decode([closing])}, which no configuration names as an end"
    if found < max(other, _SMALLEST_PROBABILITY):
        unlikely = f"which the model does not predict after an answer (probability {found:.2g})"
        so = "conversations end there, but `generate` continues texts without the template, as for a base model"
        _log.warning("%s, and %s: %s", says, unlikely, so)
        return {}
    _log.warning(
        "%s; the model predicts it after an answer (probability %.2g): the bundle's %s names it", says, found, _FILE
    )
    config = read_json(folder, _FILE, SMALL_FILES[_FILE], UnsupportedModelError) if (folder / _FILE).is_file() else {}
    ids = [*sorted(ends), closing]
    source.model.generation_config.eos_token_id = ids  # for text that the model writes
    return {_FILE: dump_json({**config, "eos_token_id": ids})}
