"""How far a sparse model is from its dense self: KL divergence per token.

    KL = mean over tokens of  sum_v p_v (log p_v - log q_v)        p dense, q sparse, in nats

The dense distributions are needed at every evaluation and are large (tokens x vocabulary). `DenseReference` keeps them
in one of two compact forms: float16 log-probabilities where they fit in ``limit_bytes`` (renormalised on use, so what
is measured is a true KL to a distribution whose logarithms are off by at most 2^-11 of their size), else the last
hidden state (hidden size instead of vocabulary: 31 times smaller for Llama-3.1-8B), from which they are recomputed
exactly.
Source: the paper's section 4.2 (objective of the block search).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.flow import BlockFlow

__all__ = ["DenseReference", "kl_rows"]

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
