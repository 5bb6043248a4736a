"""Passes of the sparse model over a micro-batch: the joint KL, its gradient through the masks, and what is kept.

u = log(channel_scale / threshold)          a channel is kept where log|x| + u >= 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wisparse.kernels.reference import keep_mask

from ..bench.divergence import kl_rows
from ..bench.sensitivity import backward, rows_at_once
from ..model.flow import BlockFlow
from ..model.masking import MaskedModel
from .refinement import BatchGradient, Channels

__all__ = ["Measured", "batch_gradient", "dense_states", "measure_batch"]

# Of the sigmoid that stands in for the step.
_WIDTH = 0.3

_SMALLEST = 1e-30

# Of every projection: u is in the scales.
_THRESHOLD = 1.0


@torch.no_grad()
def dense_states(flow: BlockFlow, masked: MaskedModel, batch: int) -> Tensor:
    """The dense model's last hidden states at the counted tokens of a micro-batch, (T, hidden_size) on the CPU."""
    with masked.masking({}), masked.sparing(None):
        final = flow.finish(0, batch, flow.start()[batch])
    return final[flow.counted[batch].to(final.device)].cpu()


def batch_gradient(
    flow: BlockFlow, masked: MaskedModel, batch: int, channels: Channels, logits: Tensor, dense: Tensor
) -> BatchGradient:
    """One pass of the sparse model forward and backward over a micro-batch.

    Args:
        logits: (C,) float32, u of every channel.
        dense: of `dense_states`.
    """
    counted = flow.counted[batch]
    by_name = channels.split(logits.to(flow.device))
    seen: dict[str, Tensor] = {}
    gradient: dict[str, Tensor] = {}
    slope: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    total: list[Tensor] = []

    def note(name: str, x: Tensor) -> None:
        if torch.is_grad_enabled():
            seen[name] = x.detach()

    def divergence(dense_rows: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            log_probs = flow.logits(dense_rows).log_softmax(-1)
        return kl_rows(log_probs, flow.logits(rows)).sum()

    def loss(final: Tensor) -> list[Tensor]:
        value = final.new_zeros((), dtype=torch.float32)
        size = rows_at_once(flow)
        for dense_rows, rows in zip(dense.to(final.device).split(size), final.split(size), strict=True):
            if len(final) <= size:
                value = divergence(dense_rows, rows)
            else:
                value = value + checkpoint(divergence, dense_rows, rows, use_reentrant=False)
        total.append(value.detach().double())
        return [value]

    def receive(name: str, _: Tensor, at_input: Tensor) -> None:
        x = seen.pop(name)[counted.to(at_input.device)].float()
        u = by_name[name].to(x.device)
        z = (x.abs().clamp_min(_SMALLEST).log() + u) / _WIDTH
        soft = torch.sigmoid(z)
        weight = soft * (1 - soft) / _WIDTH
        # What one process of several sends, and all add up in one order.
        gradient[name] = (at_input.float() * x * weight).sum(0).double().to(flow.device)
        slope[name] = weight.sum(0).double().to(flow.device)
        # As the mask on the way forward decided, which the sign of z does not tell where rounding does.
        kept[name] = keep_mask(x, u.exp(), _THRESHOLD).sum().double().to(flow.device)

    with _masks(masked, by_name, ~counted), masked.observing(note):
        backward(flow, masked, batch, loss, receive)
    kept_all = torch.stack([kept[name] for name in channels.widths])
    return BatchGradient(
        channels.join(gradient), channels.join(slope), kept_all, total[0].to(flow.device), counted.sum().double()
    )


@dataclass(frozen=True)
class Measured:
    """Of the sparse model over the counted tokens of one micro-batch or several.

    Attributes:
        kept: channels kept, per projection.
        kl: summed.
        num_tokens: how many.
    """

    kept: dict[str, int]
    kl: float
    num_tokens: int

    @classmethod
    def total(cls, parts: Sequence[Measured]) -> Measured:
        kept = {name: sum(one.kept[name] for one in parts) for name in parts[0].kept}
        return cls(kept, math.fsum(one.kl for one in parts), sum(one.num_tokens for one in parts))

    def dropped(self, channels: Channels) -> dict[str, float]:
        """Share of the channels left unread, per projection."""
        return {name: 1 - self.kept[name] / self.num_tokens / width for name, width in channels.widths.items()}


@torch.no_grad()
def measure_batch(
    flow: BlockFlow, masked: MaskedModel, batch: int, channels: Channels, logits: Tensor, dense: Tensor | None = None
) -> Measured:
    """One pass over a micro-batch, everything sparse; without ``dense``, of `dense_states`, the KL is not measured."""
    counted = flow.counted[batch]
    with _masks(masked, channels.split(logits.to(flow.device)), ~counted), masked.counting() as realised:
        final = flow.finish(0, batch, flow.start()[batch])
        found = realised()
    kl = 0.0
    if dense is not None:
        size, rows = rows_at_once(flow), final[counted.to(final.device)]
        for dense_rows, some in zip(dense.to(final.device).split(size), rows.split(size), strict=True):
            kl += float(kl_rows(flow.logits(dense_rows).log_softmax(-1), flow.logits(some)).double().sum())
    num_tokens = int(counted.sum())
    kept = {name: round((1 - found[name]) * num_tokens * width) for name, width in channels.widths.items()}
    return Measured(kept, kl, num_tokens)


@contextmanager
def _masks(masked: MaskedModel, logits: Mapping[str, Tensor], dense_tokens: Tensor) -> Iterator[None]:
    for name, u in logits.items():
        masked.set_scale(name, u.exp())
    with masked.masking(dict.fromkeys(logits, _THRESHOLD)), masked.sparing(dense_tokens):
        yield
