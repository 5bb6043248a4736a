"""Quality of a sparse model against the dense one on the same tokens, for any function from token ids to logits.

Source: the paper's sections 4.2 (KL) and 5.1 (half of the prefill: the accuracy protocol of TEAL as well)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.manifest import QualityRow, QualityTable
from wisparse.formats.weight_types import WEIGHT_TYPES, round_weight, sparse_from

from .sensitivity import kl_rows
from .source import SourceModel

# (token_ids (T,) int64, sparse_from) -> (T, V) float32: positions from sparse_from on run sparse, others dense.
Logits = Callable[[Tensor, int], Tensor]

_ROWS = 256  # of logits at a time: limits the float32 temporaries (rows, vocab_size)


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


def next_tokens(ids: Tensor) -> Tensor:
    """Labels (T,) of token ids (T,): the next token, -1 after the last."""
    return torch.cat((ids[1:], ids.new_full((1,), -1)))


def token_figures(reference: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Figures (T, 7) float64 from logits (T, V) and the next tokens ``labels`` (T,), -1 if there is none: KL, whether the most
    likely tokens agree, the reference's largest probability; with a label also its log-probability in the reference and
    in the model, and whether it is the most likely one there; else NaN."""
    parts = []
    for p, q, targets in zip(reference.split(_ROWS), logits.split(_ROWS), labels.split(_ROWS), strict=True):
        # A logit of -inf, or of the type's least number, rules a token out; NaN stays.
        log_p, log_q = (one.float().to(q.device).log_softmax(dim=-1).clamp_(min=-6e4) for one in (p, q))
        best_p, best_q, targets = log_p.argmax(dim=-1), log_q.argmax(dim=-1), targets.to(q.device)
        index = targets.clamp(min=0)[:, None]
        labelled = [log_p.gather(-1, index)[:, 0], log_q.gather(-1, index)[:, 0], best_p == targets, best_q == targets]
        labelled = [torch.where(targets >= 0, one.float(), math.nan) for one in labelled]
        agree = (best_p == best_q).float()
        kl = kl_rows(log_p, log_q).clamp(min=0)  # rounding
        parts.append(torch.stack([kl, agree, log_p.amax(dim=-1).exp(), *labelled], dim=-1).cpu())
    return torch.cat(parts).double()


def _sums(figures: Tensor) -> Tensor:
    """Sums (6,) of `token_figures` (T, 7): tokens, labels, agreeing tokens, KL, loss, dense loss."""
    kl, agreeing, _, dense_log, log, right, _ = figures.T
    known = ~right.isnan()
    parts = (torch.ones_like(kl), known, agreeing, kl, -log[known], -dense_log[known])
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


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


def perplexity_of(loss: float) -> float:
    """Infinity where `math.exp` raises an error."""
    return math.exp(loss) if loss < 700 else math.inf


def measured(texts: Sequence[Tensor]) -> Measured:
    """From the `token_figures` of each sequence; standard errors are over sequences."""
    tokens, labels, agreeing, kl, loss, dense_loss = torch.stack([_sums(figures) for figures in texts]).T
    (kl_mean, kl_stderr), (top1, top1_stderr) = mean_and_error(kl, tokens), mean_and_error(agreeing, tokens)
    perplexity = perplexity_of(mean_and_error(loss, labels)[0])
    _, change_stderr = mean_and_error(loss - dense_loss, labels)
    return Measured(
        num_tokens=int(tokens.sum()),
        kl=kl_mean,
        dense_perplexity=perplexity_of(mean_and_error(dense_loss, labels)[0]),
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
            overall[policy].append(token_figures(dense, sparse, next_tokens(ids)))
            inside[policy].append(overall[policy][-1][start:])
        advance()
    result = {}
    for policy in policies:
        counted = dropped[policy]
        shares = [share for share, _ in counted]
        result[policy] = Quality(
            policy,
            sparse=measured(inside[policy]),
            overall=measured(overall[policy]),
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
            rows.append(token_figures(reference(ids, len(ids))[start:], sparse[start:], next_tokens(ids)[start:]))
            advance()
    realised = None
    if counter is not None:
        realised = counter.realised_sparsity()
        counter.measure_sparsity(False)
    found = measured(rows)
    return Quality("all", sparse=found, overall=found, realised_sparsity=realised)


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


_FLOOR_TOKENS = 2048  # of the noise floor, at most
REFERENCE_BYTES = 2 << 30  # of logits that are kept while the weights are quantized


def rounded(logits: Tensor) -> Tensor:
    """Logits (T, V) as stored: relative to each row's largest one, in float16. Their KL to the given ones is below 1e-6."""
    return (logits.float() - logits.float().amax(dim=-1, keepdim=True)).clamp(min=-6e4).half()


@torch.no_grad()
def dense_logits(source: SourceModel, ids: Tensor) -> Tensor:
    """Logits (..., T, V) float32 of token ids (..., T)."""
    logits: Tensor = source.model(input_ids=ids.to(source.device).view(-1, ids.shape[-1]), use_cache=False).logits
    return logits.float().view(*ids.shape, -1)


def reference_logits(source: SourceModel, texts: Tensor) -> list[Tensor]:
    """Logits of as many of the sequences (S, T) as fit the memory for them, in float16."""
    each = texts.shape[1] * source.config.vocab_size * 2
    return [rounded(dense_logits(source, ids)).cpu() for ids in texts[: max(1, REFERENCE_BYTES // each)]]


def can_round(source: SourceModel) -> bool:
    """Whether all weights are in memory, unquantised."""
    return source.planes == 1 and not any(module.weight.is_meta for module in source.projections.values())


@contextmanager
def rounded_weights(source: SourceModel, kind: str) -> Iterator[None]:
    """The projections and the output layer compute with weights rounded as ``load(weights=kind)`` rounds them, each while it
    runs."""
    held: dict[Any, Tensor] = {}

    def round_one(module: Any, args: Any) -> None:
        weight, head = module.weight.data, module is source.model.get_output_embeddings()
        held[module] = weight.clone()
        matrices = weight if weight.ndim == 3 else weight[None]
        for matrix in matrices:
            matrix.copy_(round_weight(matrix, "int8" if head else kind).dequantise(matrix.dtype))

    def restore(module: Any, args: Any, output: Any) -> None:
        module.weight.data.copy_(held.pop(module))

    modules = [*source.projections.values(), source.model.get_output_embeddings()]
    hooks = [module.register_forward_pre_hook(round_one) for module in modules]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def noise_floor(source: SourceModel, texts: Tensor) -> float:
    """KL of the model in its arithmetic to the same weights in float32; 0 for a model in float32, NaN if that does not fit."""
    if source.dtype == torch.float32:
        return 0.0
    parameters = list(source.model.parameters())
    needed = sum(parameter.numel() for parameter in parameters) * 2
    if source.config.per_layer_size or any(one.is_meta for one in parameters):
        return math.nan
    if source.device.type == "cuda" and needed > 0.9 * torch.cuda.mem_get_info(source.device)[0]:
        return math.nan
    texts = texts[: max(1, _FLOOR_TOKENS // texts.shape[1])]
    own = [dense_logits(source, ids).cpu() for ids in texts]
    dtypes = [parameter.dtype for parameter in parameters]
    try:
        for parameter in parameters:  # exact, and back again
            parameter.data = parameter.data.float()
        exact = [dense_logits(source, ids).cpu() for ids in texts]
    finally:
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)
    start = sparse_from("all", texts.shape[1])
    parts = (
        token_figures(p[start:], q[start:], next_tokens(ids)[start:])
        for ids, p, q in zip(texts, exact, own, strict=True)
    )
    return float(torch.cat([*parts])[:, 0].mean())


def estimate(part: Measured, default_part: Measured, default: Measured) -> Measured:
    """Figures of all tokens from those of a part, by the ratio of the default level's figures on all and on the part."""

    def ratio(of: Callable[[Measured], float]) -> float:
        whole, some = of(default), of(default_part)
        return whole / some if some > 0 and math.isfinite(whole / some) else 1.0

    relative = default.kl_stderr / default.kl if default.kl > 0 else 0.0
    kl, misses = ratio(lambda one: one.kl), ratio(lambda one: 1 - one.top1_agreement)
    perplexity = ratio(lambda one: one.dense_perplexity)
    return replace(
        part,
        kl=part.kl * kl,
        kl_stderr=max(part.kl_stderr, part.kl * relative) * kl,  # the first alone is of few sequences
        top1_agreement=max(0.0, 1 - (1 - part.top1_agreement) * misses),
        dense_perplexity=default.dense_perplexity,
        perplexity=part.perplexity * perplexity,
        perplexity_stderr=part.perplexity_stderr * perplexity,
    )


def quality_table(
    text: str, floor: float, default: Measured, pairs: Mapping[tuple[str, float], Measured]
) -> QualityTable | None:
    """The table by weight type and level; None if a figure is not finite."""
    rows = []
    order = list(WEIGHT_TYPES)
    for (weights, sparsity), found in sorted(pairs.items(), key=lambda pair: (order.index(pair[0][0]), pair[0][1])):
        errors = [value if math.isfinite(value) else None for value in (found.kl_stderr, found.perplexity_stderr)]
        rows.append(
            QualityRow(
                weights,
                sparsity,
                found.num_tokens,
                found.kl,
                errors[0],
                found.top1_agreement,
                found.perplexity,
                errors[1],
            )
        )
    figures = [default.dense_perplexity, *(value for row in rows for value in (row.kl, row.perplexity))]
    if not all(map(math.isfinite, figures)):
        return None
    return QualityTable(
        text, default.num_tokens, default.dense_perplexity, None if math.isnan(floor) else floor, tuple(rows)
    )


def unmasked(tokens: int, perplexity: float) -> Measured:
    """The reference against itself."""
    return Measured(tokens, 0.0, perplexity, perplexity, 1.0, 0.0, 0.0, 0.0)
