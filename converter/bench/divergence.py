"""How far a sparse model is from its dense self: KL divergence per token, perplexity, top-1 agreement.

    KL = mean over tokens of  sum_v p_v (log p_v - log q_v)        p dense, q sparse, in nats

The dense distributions are needed at every evaluation and are large (tokens x vocabulary). `DenseReference` keeps them
in one of two compact forms: float16 log-probabilities where they fit in ``limit_bytes`` (renormalised on use, so what
is measured is a true KL to a distribution whose logarithms are off by at most 2^-11 of their size), else the last
hidden state (hidden size instead of vocabulary: 31 times smaller for Llama-3.1-8B), from which they are recomputed
exactly.
Source: the paper's section 4.2 (objective of the block search).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.flow import BlockFlow, Hidden
from ..model.masking import MaskedModel

__all__ = ["DenseReference", "Divergence", "evaluate", "kl_rows"]

# Rows of logits handled at a time: bounds the float32 (rows, vocabulary) temporaries.
_ROWS = 1024


def kl_rows(dense_log_probs: Tensor, logits: Tensor) -> Tensor:
    """KL(dense || sparse) of every row, in nats.

    Args:
        dense_log_probs: (T, V) float32, normalised.
        logits: (T, V) float32 of the sparse model, not normalised.

    Returns:
        (T,) float32.
    """
    log_q = logits.log_softmax(dim=-1)
    return (dense_log_probs.exp() * (dense_log_probs - log_q)).sum(dim=-1)


class DenseReference:
    """The dense model's distributions over the counted tokens of a flow, and the KL of anything else to them."""

    def __init__(self, flow: BlockFlow, *, num_tokens: int | None = None, limit_bytes: int = 1 << 30) -> None:
        self.flow = flow
        vocabulary = flow.head.weight.shape[0]
        # By the tokens of all processes: a KL must not depend on how many there are.
        self.exact = (flow.num_counted if num_tokens is None else num_tokens) * vocabulary * 2 > limit_bytes
        self._kept: list[Tensor] = []

    def add(self, batch: int, final: Tensor) -> None:
        """Take the dense model's last hidden state (B, L, hidden_size) of micro-batch ``batch``, in order."""
        rows = self._rows(batch, final)
        if not self.exact:
            rows = torch.cat([self.flow.logits(part).log_softmax(-1).half() for part in rows.split(_ROWS)])
        self._kept.append(rows)

    def _rows(self, batch: int, final: Tensor) -> Tensor:
        return final[self.flow.counted[batch].to(final.device)]

    def _log_probs(self, rows: Tensor) -> Tensor:
        return (self.flow.logits(rows) if self.exact else rows.float()).log_softmax(-1)

    def kl_sum(self, batch: int, final: Tensor) -> float:
        """Sum of the KL over the counted tokens of one micro-batch, given the sparse model's last hidden state."""
        total: Tensor | float = 0.0
        for dense, sparse in zip(self._kept[batch].split(_ROWS), self._rows(batch, final).split(_ROWS), strict=True):
            total += kl_rows(self._log_probs(dense), self.flow.logits(sparse)).double().sum()
        return float(total)

    @torch.no_grad()
    def kl(self, hidden: Hidden, start: int = 0, batches: Sequence[int] | None = None) -> float:
        """Token-mean KL of the model as it is masked now, from the inputs of block ``start`` on."""
        total, tokens = 0.0, 0
        for batch in range(self.flow.num_batches) if batches is None else batches:
            total += self.kl_sum(batch, self.flow.finish(start, batch, hidden[batch]))
            tokens += int(self.flow.counted[batch].sum())
        return total / max(tokens, 1)


@dataclass(frozen=True)
class Divergence:
    """Dense against sparse on the same tokens; perplexities are per token, ``realised_sparsity`` by parameters."""

    kl: float
    perplexity: float
    dense_perplexity: float
    top1_agreement: float
    realised_sparsity: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    model: Any,
    masked: MaskedModel,
    input_ids: Tensor,
    thresholds: dict[str, float],
    *,
    prefill: str = "all",
    batch_size: int = 4,
    dense_log_probs: list[Tensor] | None = None,
) -> Divergence:
    """Run the model dense and masked over whole sequences without padding.

    Args:
        input_ids: (S, L) int64.
        thresholds: per projection; their scales are on ``masked`` already.
        prefill: ``all``: every token is sparse (the first one too); ``half``: the last L // 2 tokens are, and only
            their predictions are measured.
        dense_log_probs: a list that keeps the dense model's (B, L, V) per batch: filled if empty, used if filled. Same
            tokens, prefill and batch size every time.
    """
    length = input_ids.shape[1]
    first = 0 if prefill == "all" else length - length // 2
    sizes = {name: module.weight.numel() for name, module in masked.projections.items()}
    device = next(model.parameters()).device
    kl = agree = loss = dense_loss = 0.0
    tokens = predicted = 0
    previous = masked.dense_tokens
    masked.clear()
    with masked.counting() as realised:
        known = list(dense_log_probs or ())
        for index, ids in enumerate(input_ids.split(batch_size)):
            ids = ids.to(device)
            masked.clear()
            if known:
                dense = known[index]
            else:
                dense = model(input_ids=ids, use_cache=False).logits[:, first:].float().log_softmax(-1)
                if dense_log_probs is not None:
                    dense_log_probs.append(dense)
            masked.dense_tokens = (torch.arange(length, device=device) < first).expand_as(ids) if first else None
            masked.set_thresholds(thresholds)
            sparse = model(input_ids=ids, use_cache=False).logits[:, first:].float().log_softmax(-1)
            kl += float((dense.exp() * (dense - sparse)).sum(dtype=torch.float64))
            agree += int((dense.argmax(-1) == sparse.argmax(-1)).sum())
            labels = ids[:, first + 1 :, None]
            dense_loss -= float(dense[:, :-1].gather(-1, labels).sum(dtype=torch.float64))
            loss -= float(sparse[:, :-1].gather(-1, labels).sum(dtype=torch.float64))
            tokens += sparse.shape[0] * sparse.shape[1]
            predicted += labels.numel()
        dropped = realised()
    masked.clear()
    masked.dense_tokens = previous
    return Divergence(
        kl=kl / tokens,
        perplexity=math.exp(loss / predicted),
        dense_perplexity=math.exp(dense_loss / predicted),
        top1_agreement=agree / tokens,
        realised_sparsity=sum(dropped[name] * sizes[name] for name in sizes) / sum(sizes.values()),
        num_tokens=tokens,
    )
