"""How far a model's distributions are from a reference's, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .evaluation import json_values, mean_and_error
from .sensitivity import kl_rows

_ROWS = 256  # of logits at a time
# Edges of the buckets: the probability of the reference's most likely token.
CONFIDENCES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its standard error over sequences, NaN of one sequence."""

    mean: float
    stderr: float


@dataclass(frozen=True)
class Bucket:
    """The tokens at which the probability of the reference's most likely token is in [low, high)."""

    low: float
    high: float
    num_tokens: int
    kl: Estimate
    top1_agreement: Estimate


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) in nats per token, and what changes by token. Flips are over the tokens with a next token in the
    text: whether that one is the most likely."""

    num_tokens: int
    kl: Estimate
    kl_quantiles: dict[str, float]
    top1_agreement: Estimate
    flips_lost: Estimate  # right in the reference, wrong in the model
    flips_gained: Estimate
    probability_rms: Estimate  # root mean square change of the next token's probability
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: Estimate
    buckets: tuple[Bucket, ...]

    def to_dict(self) -> dict[str, Any]:
        return json_values(asdict(self))


def token_figures(reference: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Figures (T, 7) float64 from logits (T, V) and the next tokens ``labels`` (T,), -1 if there is none: KL, whether the most
    likely tokens agree, the reference's largest probability; with a label also its log-probability in the reference and
    in the model, and whether it is the most likely one there; else NaN."""
    parts = []
    for p, q, targets in zip(reference.split(_ROWS), logits.split(_ROWS), labels.split(_ROWS), strict=True):
        # A logit of -inf, or of the type's least number, rules a token out; NaN stays.
        log_p, log_q = (one.float().to(q.device).log_softmax(dim=-1).clamp(min=-6e4) for one in (p, q))
        best_p, best_q, targets = log_p.argmax(dim=-1), log_q.argmax(dim=-1), targets.to(q.device)
        index = targets.clamp(min=0)[:, None]
        labelled = [log_p.gather(-1, index)[:, 0], log_q.gather(-1, index)[:, 0], best_p == targets, best_q == targets]
        labelled = [torch.where(targets >= 0, one.float(), math.nan) for one in labelled]
        agree = (best_p == best_q).float()
        kl = kl_rows(log_p, log_q).clamp(min=0)  # rounding
        parts.append(torch.stack([kl, agree, log_p.amax(dim=-1).exp(), *labelled], dim=-1).cpu())
    return torch.cat(parts).double()


def _exp(value: float) -> float:
    """Infinity where `math.exp` raises an error."""
    return math.exp(value) if value < 700 else math.inf


def divergence(texts: Sequence[Tensor]) -> Divergence:
    """From the `token_figures` of each sequence."""

    def estimate(values: Sequence[Tensor]) -> Estimate:
        """Of values by token and sequence; NaN is left out."""
        known = [one[~one.isnan()] for one in values]
        sums = torch.stack([one.sum() for one in known])
        return Estimate(*mean_and_error(sums, torch.tensor([float(len(one)) for one in known])))

    columns = [[text[:, column] for text in texts] for column in range(7)]
    kl, agree, confidence, log_p, log_q, right_p, right_q = columns

    def pairs(first: Sequence[Tensor], second: Sequence[Tensor]) -> Any:
        return zip(first, second, strict=True)

    buckets = []
    for low, high in pairwise(CONFIDENCES):
        inside = [(one >= low) & ((one < high) | (high == 1.0)) for one in confidence]
        count = sum(int(one.sum()) for one in inside)
        if count:
            cells = ([one[mask] for one, mask in pairs(values, inside)] for values in (kl, agree))
            buckets.append(Bucket(low, high, count, *(estimate(cell) for cell in cells)))
    all_kl = torch.cat(kl)
    quantiles = [float(torch.quantile(all_kl, at)) for at in _QUANTILES] if len(all_kl) else [math.nan] * 4
    squares = estimate([(q.exp() - p.exp()).square() for p, q in pairs(log_p, log_q)])
    ratio = estimate([p - q for p, q in pairs(log_p, log_q)])  # its exponential is the ratio of the perplexities
    dense, root, change = _exp(-estimate(log_p).mean), math.sqrt(squares.mean), _exp(ratio.mean)
    return Divergence(
        num_tokens=len(all_kl),
        kl=estimate(kl),
        kl_quantiles=dict(zip(("median", "90%", "99%", "largest"), quantiles, strict=True)),
        top1_agreement=estimate(agree),
        flips_lost=estimate([p * (1 - q) for p, q in pairs(right_p, right_q)]),
        flips_gained=estimate([q * (1 - p) for p, q in pairs(right_p, right_q)]),
        probability_rms=Estimate(root, squares.stderr / (2 * root) if root else 0.0),
        reference_perplexity=dense,
        perplexity=_exp(ratio.mean - estimate(log_p).mean),
        perplexity_ratio=Estimate(change, change * ratio.stderr),
        buckets=tuple(buckets),
    )
