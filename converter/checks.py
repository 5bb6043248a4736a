"""What is checked of a source once it is loaded: finite logits, weights around zero, a perplexity below that of guessing, and
the token that ends an assistant's turn, where a chat model's configuration names another end."""

from __future__ import annotations

import logging
import math
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.bundle import SMALL_FILES
from wisparse.formats.chat_template import after_answer
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.guard import dump_json, read_json

from .calibration import TemplateError, conversation_renderer, end_ids
from .source import SourceModel

_log = logging.getLogger("wisparse")

_TOKENS = 256  # of a text, for its perplexity
_ROWS = 4096  # of a weight, for its mean
# Trained weights have means of less than 0.01 of their spread; a zero point of 4 bits that is off by one shifts them by 0.2
# to 0.4.
_LARGEST_SHIFT = 0.15
_FILE = "generation_config.json"
_EXCHANGE = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]
# Of the closing token after the exchange: SmolLM2-135M-Instruct gives it 0.78, and the end-of-text token 1e-6.
_SMALLEST_PROBABILITY = 0.01


@torch.no_grad()
def require_finite_logits(source: SourceModel, name: str) -> None:
    """UnsupportedModelError with the first block whose output is NaN or infinite at a few tokens, if any."""
    broken: list[int] = []

    def record(block: int, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not torch.isfinite(hidden).all():
            broken.append(block)

    ids = torch.arange(min(16, source.config.vocab_size), device=source.device)
    blocks = (source.model.get_submodule(f"model.layers.{index}") for index in range(source.config.num_blocks))
    hooks = [block.register_forward_hook(partial(record, index)) for index, block in enumerate(blocks)]
    try:
        finite = bool(torch.isfinite(source.model(input_ids=ids[None]).logits).all())
    finally:
        for hook in hooks:
            hook.remove()
    if not finite:
        where = f"block {broken[0]}" if broken else "the output layer"
        wrong = f"the dense model's logits are NaN or infinite, from {where} on, computed in {source.dtype}"
        raise UnsupportedModelError(f"{name}: {wrong}; use an intact checkpoint")


@torch.no_grad()
def require_centred_weights(source: SourceModel, name: str) -> None:
    """UnsupportedModelError if a quantised model's weights have means as far from zero as a wrong zero point moves them."""
    shifts = []
    for projection in source.projections:
        spread, mean = torch.std_mean(source.weight(projection).flatten(0, -2)[:_ROWS].to(torch.float32))
        shifts.append(float(mean.abs() / spread.clamp(min=1e-30)))
    shift = sorted(shifts)[len(shifts) // 2]
    if shift > _LARGEST_SHIFT:
        wrong = f"the quantised weights' means are {shift:.2g} of their standard deviations (expected below 0.01)"
        advice = (
            "their zero points are off by one or so: in quantization_config, try checkpoint_format 'gptq' or 'gptq_v2' (of "
            "AutoRound packing_format 'auto_round:auto_gptq' or 'auto_round:gptqmodel')"
        )
        raise UnsupportedModelError(f"{name}: {wrong}; {advice}, or take another checkpoint")


@torch.no_grad()
def warn_of_absurd_perplexity(source: SourceModel, ids: Tensor, name: str) -> None:
    """Log a warning if the text ``ids`` (T,) has a perplexity of more than a third of the vocabulary."""
    ids = ids[:_TOKENS].to(source.device)
    logits = source.model(input_ids=ids[None]).logits[0, :-1].to(torch.float32)
    loss = float(torch.nn.functional.cross_entropy(logits, ids[1:].to(logits.device)))
    if loss > math.log(source.config.vocab_size / 3):
        found = f"perplexity {math.exp(min(loss, 700)):.3g}, with {source.config.vocab_size} tokens in the vocabulary"
        _log.warning(
            f"{name}: the dense model predicts its calibration text hardly better than guessing ({found}): is it trained, "
            "and are its weights and tokenizer those that belong together?"
        )


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
    return float(probabilities[closing]), max((float(probabilities[i]) for i in ends if i < len(logits)), default=0.0)


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
