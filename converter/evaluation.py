"""Quality of a sparse model against the dense one on the same tokens, for any function from token ids to logits.

Source: the paper's sections 4.2 (KL) and 5.1 (half of the prefill: the accuracy protocol of TEAL as well)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.weight_types import sparse_from

from .sensitivity import kl_rows

# (token_ids (T,) int64, sparse_from) -> (T, V) float32: positions from sparse_from on run sparse, others dense.
Logits = Callable[[Tensor, int], Tensor]

# Rows of logits processed at a time: limits the float32 temporaries (rows, vocab_size).
_ROWS = 256


@dataclass(frozen=True)
class Measured:
    """Dense against sparse over a set of positions: KL(dense || sparse) in nats per token, perplexities (NaN without
    labels), the fraction of positions with the same most likely token. Standard errors are over sequences, NaN of one; the
    perplexity's is that of its change from the dense model's."""

    num_tokens: int
    kl: float
    dense_perplexity: float
    perplexity: float
    top1_agreement: float
    kl_stderr: float = math.nan
    perplexity_stderr: float = math.nan
    top1_stderr: float = math.nan


@dataclass(frozen=True)
class Quality:
    """Quality under one prefill policy."""

    prefill: str
    sparse: Measured  # over the sparse positions
    overall: Measured  # over all positions
    realised_sparsity: float | None = None  # fraction of the weights not read at the sparse positions, if counted
    realised_range: tuple[float, float] | None = None  # its minimum and maximum over sequences

    def to_dict(self) -> dict[str, Any]:
        """JSON values; figures over no tokens are null."""
        return json_values(asdict(self))


def json_values(value: Any, digits: int | None = None, longest: int | None = None) -> Any:
    """JSON values: null for NaN and infinity, floats rounded to ``digits``, lists of more than ``longest`` numbers
    subsampled."""
    if isinstance(value, Mapping):
        return {str(key): json_values(entry, digits, longest) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [json_values(entry, digits, longest) for entry in value]
        numbers = all(entry is None or isinstance(entry, (int, float)) for entry in entries)
        if longest and len(entries) > longest and numbers:
            return [entries[round(i * (len(entries) - 1) / (longest - 1))] for i in range(longest)]
        return entries
    if isinstance(value, float):
        return (float(f"{value:.{digits}g}") if digits else value) if math.isfinite(value) else None
    return value


def _sums(dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
    """Sums (6,) float64 over rows of logits (T, V): tokens, labels, agreeing tokens, KL, loss, dense loss. ``labels``
    (T,): the next tokens, or -1."""
    total = torch.zeros(6, dtype=torch.float64)
    for p, q, targets in zip(dense.split(_ROWS), sparse.split(_ROWS), labels.split(_ROWS), strict=True):
        log_p, log_q = p.float().log_softmax(dim=-1), q.float().log_softmax(dim=-1)
        known, index = targets >= 0, targets.clamp(min=0)[:, None]
        agreeing, kl = log_p.argmax(-1) == log_q.argmax(-1), kl_rows(log_p, log_q).double()
        losses = (-log.gather(-1, index)[known].double().sum() for log in (log_q, log_p))
        numbers = (len(log_p), known.sum(), agreeing.sum(), kl.sum(), *losses)
        total += torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    return total


def mean_and_error(total: Tensor, count: Tensor) -> tuple[float, float]:
    """The mean of sums (S,) over counts (S,) by sequence, and its standard error over the sequences; NaN of none, of one."""
    total, count = total[count > 0], count[count > 0]
    if not len(count):
        return math.nan, math.nan
    mean = float(total.sum() / count.sum())
    if len(count) < 2:
        return mean, math.nan
    spread = (total - mean * count).square().sum() * len(count) / (len(count) - 1)
    return mean, float(spread.sqrt() / count.sum())


def _measured(texts: Sequence[Tensor]) -> Measured:
    """From the `_sums` of each sequence; standard errors are over sequences."""
    rows = torch.stack(list(texts))
    tokens, labels, agreeing, kl, loss, dense_loss = rows.T

    def exp(value: float) -> float:
        return math.exp(value) if value < 700 else math.inf

    (kl_mean, kl_stderr), (top1, top1_stderr) = mean_and_error(kl, tokens), mean_and_error(agreeing, tokens)
    perplexity, (_, change_stderr) = exp(mean_and_error(loss, labels)[0]), mean_and_error(loss - dense_loss, labels)
    return Measured(
        num_tokens=int(tokens.sum()),
        kl=kl_mean,
        dense_perplexity=exp(mean_and_error(dense_loss, labels)[0]),
        perplexity=perplexity,
        top1_agreement=top1,
        kl_stderr=kl_stderr,
        perplexity_stderr=perplexity * change_stderr,
        top1_stderr=top1_stderr,
    )


@torch.inference_mode()
def evaluate_text(
    logits: Logits,
    sequences: Iterable[Tensor],
    policies: Sequence[str] = ("half", "all"),
    *,
    reference: Logits | None = None,
    counter: Any = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Quality]:
    """Quality by prefill policy over ``sequences``, each (T,) int64, T >= 1, without padding. ``reference`` gives the
    dense logits if more than the masks differs (rounded weights). ``counter`` has the decoders' ``measure_sparsity`` and
    ``realised_sparsity``."""
    inside: dict[str, list[Tensor]] = {policy: [] for policy in policies}
    overall: dict[str, list[Tensor]] = {policy: [] for policy in policies}
    dropped: dict[str, list[tuple[float, int]]] = {policy: [] for policy in policies}
    for ids in sequences:
        length = len(ids)
        # The decoder's next call overwrites its logits.
        dense = (reference or logits)(ids, length).clone()
        labels = torch.cat((ids[1:], ids.new_full((1,), -1))).to(dense.device)
        for policy in policies:
            start = sparse_from(policy, length)
            if counter is not None:
                counter.measure_sparsity(True)
            sparse = logits(ids, start)
            if counter is not None:
                realised = counter.realised_sparsity()
                counter.measure_sparsity(False)
                if realised is not None and start < length:
                    dropped[policy].append((realised, length - start))
            inside[policy].append(_sums(dense[start:], sparse[start:], labels[start:]))
            overall[policy].append(inside[policy][-1] + _sums(dense[:start], sparse[:start], labels[:start]))
        advance()
    result = {}
    for policy in policies:
        counted = dropped[policy]
        shares = [share for share, _ in counted]
        result[policy] = Quality(
            policy,
            sparse=_measured(inside[policy]),
            overall=_measured(overall[policy]),
            realised_sparsity=sum(share * n for share, n in counted) / sum(n for _, n in counted) if counted else None,
            realised_range=(min(shares), max(shares)) if shares else None,
        )
    return result


@torch.inference_mode()
def evaluate_together(
    logits: Logits,
    texts: Tensor,
    reference: Logits,
    at_once: int,
    counter: Any = None,
    advance: Callable[[], None] = lambda: None,
) -> Quality:
    """`evaluate_text` with the policy ``all`` for texts (S, T) int64, ``at_once`` of them in a pass: ``logits`` maps (B, T)
    to (B, T, V), ``reference`` (T,) to (T, V). Without ``realised_range``."""
    start, rows = sparse_from("all", texts.shape[1]), []
    if counter is not None:
        counter.measure_sparsity(True)
    for group in texts.split(at_once):
        for ids, sparse in zip(group, logits(group, start), strict=True):
            labels = torch.cat((ids[1:], ids.new_full((1,), -1))).to(sparse.device)
            rows.append(_sums(reference(ids, len(ids))[start:], sparse[start:], labels[start:]))
            advance()
    realised = None
    if counter is not None:
        realised = counter.realised_sparsity()
        counter.measure_sparsity(False)
    measured = _measured(rows)
    return Quality("all", sparse=measured, overall=measured, realised_sparsity=realised)


def same_text(digest: str, source: str, seed: int, calibration: Any) -> str | None:
    """Why an evaluation text may be the calibration text of a `CalibrationRecord`, as a clause; else None."""
    if digest == calibration.digest:
        return "these are the very tokens the bundle was calibrated on"
    if source != calibration.source:
        return None
    same_seed = seed == calibration.seed
    if source == "self":
        return f"the model wrote the calibration text with this seed ({seed}) too" if same_seed else None
    return f"the text has the name{' and seed' * same_seed} of the calibration text ({source})"
