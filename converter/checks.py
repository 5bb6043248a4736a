"""Checks of a source once it is loaded: finite logits, weights around zero, a perplexity below that of guessing."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import UnsupportedModelError

from .source import SourceModel

_log = logging.getLogger("wisparse")

_TOKENS = 256  # of a text, for its perplexity
_ROWS = 4096  # of a weight, for its mean
# Trained weights have means of less than 0.01 of their spread; a zero point of 4 bits that is off by one shifts them by 0.2
# to 0.4.
_LARGEST_SHIFT = 0.15


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
    """UnsupportedModelError if the means of a quantised model's weights are as far from zero as a wrong zero point moves them."""
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
        _log.warning("%s: the dense model predicts its calibration text hardly better than guessing (%s): is it trained, and "
                     "are its weights and tokenizer those that belong together?", name, found)  # fmt: skip
