"""Parts of a bundle's quality table: rounded weights, the noise floor, estimates from a part of the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.manifest import QualityRow, QualityTable
from wisparse.formats.weight_types import WEIGHT_TYPES, round_weight

from .evaluation import Measured, evaluate_text
from .logits_cache import rounded
from .source import SourceModel

_FLOOR_TOKENS = 2048  # of the noise floor, at most
_REFERENCE_BYTES = 2 << 30  # of logits that are kept while the weights are quantized


@torch.no_grad()
def dense_logits(source: SourceModel, ids: Tensor) -> Tensor:
    """Logits (..., T, V) float32 of token ids (..., T)."""
    logits: Tensor = source.model(input_ids=ids.to(source.device).view(-1, ids.shape[-1]), use_cache=False).logits
    return logits.float().view(*ids.shape, -1)


def reference_logits(source: SourceModel, texts: Tensor) -> list[Tensor]:
    """Logits of as many of the sequences (S, T) as fit the memory for them, in float16."""
    each = texts.shape[1] * source.config.vocab_size * 2
    return [rounded(dense_logits(source, ids)).cpu() for ids in texts[: max(1, _REFERENCE_BYTES // each)]]


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
    by_text = {ids.numpy().tobytes(): pair for ids, *pair in zip(texts, own, exact, strict=True)}
    found = evaluate_text(
        lambda ids, _: by_text[ids.numpy().tobytes()][0],
        texts,
        ["all"],
        reference=lambda ids, _: by_text[ids.numpy().tobytes()][1],
    )
    return max(0.0, found["all"].sparse.kl)


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
        kl, top1 = max(0.0, found.kl), min(1.0, found.top1_agreement)
        rows.append(QualityRow(weights, sparsity, found.num_tokens, kl, errors[0], top1, found.perplexity, errors[1]))
    figures = [default.dense_perplexity, *(value for row in rows for value in (row.kl, row.perplexity))]
    if not all(map(math.isfinite, figures)):
        return None
    return QualityTable(
        text, default.num_tokens, default.dense_perplexity, None if math.isnan(floor) else floor, tuple(rows)
    )


def unmasked(tokens: int, perplexity: float) -> Measured:
    """The reference against itself."""
    return Measured(tokens, 0.0, perplexity, perplexity, 1.0, 0.0, 0.0, 0.0)
