"""A model's projections in fewer bits, before anything else is measured on it: block by block, and in place; and in which
coordinates int4 weights and masks cost least together.

GPTQ needs correlated inputs, which a rotation to principal directions takes away, and masks need the rotation. Which
wins depends on the model and the sparsity (benchmarks/coordinates.py), so it is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import cast

import torch
from torch import Tensor

from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import Kind, QuantizedMatrix, pack_int4, quantise

from .calibration import CalibrationTokens
from .evaluation import evaluate_text
from .experts import ExpertProjection
from .flow import BlockFlow, Hidden
from .measurement import MaskedLogits
from .rotation import load_weights, rotate
from .search.search import SearchSettings, SparsityLevels
from .source import SourceModel
from .state import NO_STATE, Stages

# Seven and a half steps are this much of a group's largest value: above 1 the seventh step can meet a positive one.
_CLIPS = tuple(1.08 - 0.02 * step for step in range(25))
_STEPS = 7.5
# Added to the diagonal, of its mean: without it the inverse of few tokens' moments is noise.
_DAMPING = 0.01
# Channels rounded before their errors are carried to all that are left.
_PANEL = 128
# Of the change that makes up for the inputs' own error: all of it follows the calibration text too closely
# (benchmarks/LOG.md). And what is added to the moments' diagonal for it, of its mean.
_CORRECTION, _RIDGE = 0.5, 0.05
# Numbers of the experts that are fitted together.
_TOGETHER = 1 << 25
# Rows whose scales are solved for together, of each expert.
_ROWS = 1024
_ENOUGH_TOKENS = 256  # of an expert to fit its weights to
# To choose coordinates by: sequences and tokens of each, to fit and to mask with, and others to measure on.
SAMPLES, LONGEST = 4, 256

_log = logging.getLogger("wisparse")


def fit_int4(
    weight: Tensor, moments: Tensor, group: int, scale_dtype: torch.dtype, cross: Tensor | None = None
) -> QuantizedMatrix:
    """int4 codes without zero points for a weight (N, K), finite; ``group`` neighbouring channels share a scale. Of several
    experts' weights (E, N, K) all at once, with moments (E, K, K): codes (E * N, K).

    ``moments`` (K, K) float32 is the sum of x xᵀ over the inputs x that the projection gets here, and ``cross`` that of
    z xᵀ with its inputs z in the dense model. GPTQ (arXiv:2210.17323) of the weight that, on x, comes nearer to W z
    (as arXiv:2504.02692 does), then scales of least squares for the codes found.
    """
    columns = weight.shape[-1]
    target, diagonal = weight.to(torch.float32), moments.diagonal(dim1=-2, dim2=-1)
    if cross is not None:
        ridge = diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * _RIDGE
        damped = moments + torch.diag_embed(ridge.expand_as(diagonal))
        target = target + _CORRECTION * torch.linalg.solve(damped, (target @ (cross - moments)).mT).mT
    scales = search_scales(target, diagonal, group, scale_dtype)
    order = torch.argsort(diagonal, descending=True, stable=True, dim=-1)
    by_column, by_row = order.unsqueeze(-2), order.unsqueeze(-1)
    sorted_moments = moments.gather(-2, by_row.expand_as(moments)).gather(-1, by_column.expand_as(moments))
    factor = _inverse_factor(sorted_moments)
    by_column = by_column.expand_as(target)
    left = target.gather(-1, by_column)
    by_channel = scales.repeat_interleave(group, dim=-1).gather(-1, by_column)
    codes = torch.empty_like(left)
    for first in range(0, columns, _PANEL):
        last = min(first + _PANEL, columns)
        panel = left[..., first:last]
        lost = torch.empty_like(panel)
        for k in range(last - first):
            scale, row = by_channel[..., first + k], factor[..., first + k, None, first:last]
            code = torch.round(panel[..., k] / scale).clamp_(-8, 7)
            codes[..., first + k] = code
            lost[..., k] = (panel[..., k] - code * scale) / row[..., k]
            panel[..., k:] -= lost[..., k, None] * row[..., k:]
        left[..., last:] -= lost @ factor[..., first:last, last:]
    found = torch.empty_like(codes).scatter_(-1, by_column, codes)
    scales = _least_squares(target, moments, found, scales, scale_dtype).flatten(0, -2)
    found = found.flatten(0, -2)
    return QuantizedMatrix("int4", pack_int4((found + 8).to(torch.uint8)), scales, None, group, (len(found), columns))


def _least_squares(target: Tensor, moments: Tensor, codes: Tensor, scales: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Scales (..., N, G) that bring codes (..., N, K) nearest to the target on the moments' inputs, row by row: of the
    group's own columns C_g, A_gh = C_gᵀ H C_h and b_g = C_gᵀ H w. Those that change by half or more stay as they were."""
    groups, found = scales.shape[-1], scales.clone()
    group = codes.shape[-1] // groups
    for first in range(0, codes.shape[-2], _ROWS):
        rows = (..., slice(first, first + _ROWS), slice(None))
        code, given = codes[rows], scales[rows]
        matrix = torch.empty(*code.shape[:-1], groups, groups, device=codes.device)
        for g in range(groups):
            columns = slice(g * group, (g + 1) * group)
            matrix[..., g, :] = (
                ((code[..., columns] @ moments[..., columns, :]) * code).unflatten(-1, (groups, group)).sum(-1)
            )
        wanted = ((target[rows] @ moments) * code).unflatten(-1, (groups, group)).sum(-1)
        # Towards the scales that there are, where the codes do not say.
        ridge = matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) * 1e-3 + 1e-20
        matrix.diagonal(dim1=-2, dim2=-1).add_(ridge)
        solved = torch.linalg.solve(matrix, wanted + ridge * given)
        ratio = solved / given
        found[rows] = torch.where((ratio > 0.5) & (ratio < 1.5), solved, given)
    return found.to(scale_dtype).to(torch.float32)


def search_scales(weight: Tensor, importance: Tensor, group: int, scale_dtype: torch.dtype) -> Tensor:
    """Scales (..., N, K / group), float32, of least rounding error, each channel's weighted by ``importance`` (..., K)."""
    groups = weight.to(torch.float32).unflatten(-1, (-1, group))
    weights = importance.to(torch.float32).clamp(min=0).unflatten(-1, (-1, group))
    # A channel that was never used still counts a little: a group of such has to have a scale.
    weights = (weights + weights.mean((-2, -1), keepdim=True).clamp(min=1e-30) * 1e-6).unsqueeze(-3)
    largest = groups.abs().amax(-1)
    best = torch.full_like(largest, float("inf"))
    scales = torch.ones_like(largest)
    smallest = max(torch.finfo(scale_dtype).tiny, torch.finfo(torch.float32).tiny)
    for clip in _CLIPS:
        scale = (largest * (clip / _STEPS)).clamp(min=smallest).to(scale_dtype).to(torch.float32)
        step = scale.unsqueeze(-1)
        loss = ((torch.round(groups / step).clamp_(-8, 7) * step - groups).square_() * weights).sum(-1)
        better = loss < best
        best, scales = torch.where(better, loss, best), torch.where(better, scale, scales)
    return torch.where(largest > 0, scales, 1.0).contiguous()


def _inverse_factor(moments: Tensor) -> Tensor:
    """Upper Cholesky factors of the damped moments' inverses; more damping where rounding leaves them not definite."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    damping = diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * _DAMPING
    while True:
        factor, failed = torch.linalg.cholesky_ex(moments + torch.diag_embed(damping.expand_as(diagonal)))
        upper, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        wrong = (failed != 0) | (failed_too != 0)
        if not wrong.any():
            return upper
        damping = torch.where(wrong.unsqueeze(-1), 10 * damping, damping)


def group_size(config: ModelConfig, weights: str = "int4") -> int:
    """Neighbouring channels that share a scale in int4 and graded weights: 128 where that divides every input, else 64 or 32."""
    inputs = sorted({projection.in_features for projection in config.projections()})
    group = next((group for group in (128, 64, 32) if not any(size % group for size in inputs)), None)
    if group is None:
        lack = f"no group of 128, 64, 32 channels divides the projections' inputs ({', '.join(map(str, inputs))})"
        raise UnsupportedModelError(f"--weights {weights}: {lack}; choose int8 or fp8")
    return group


@torch.no_grad()
def quantise_weights(
    source: SourceModel,
    tokens: CalibrationTokens,
    weights: str,
    scale_dtype: torch.dtype,
    stages: Stages = NO_STATE,
) -> dict[str, QuantizedMatrix]:
    """Quantise every projection of ``source`` in place; returns the codes by name on disk, on the CPU. int4 is fitted to
    ``tokens``; int8 and fp8 are rounded, with a scale a row, and graded weights to int8 in groups. Scales are numbers of
    ``scale_dtype``."""
    graded = weights == "graded"
    kind = cast(Kind, "int8" if graded else weights)
    group = group_size(source.config, weights) if weights in ("int4", "graded") else None
    projections = [(one, source.projections[one.name].weight) for one in source.config.projections()]
    matrices: dict[str, QuantizedMatrix] = {}
    if kind != "int4":  # rounded again as fast as a state of it is read
        with stages.progress.stage("Quantising", len(projections)) as stage:
            for projection, weight in projections:
                flat = weight.flatten(0, -2)  # of experts all together: each row is rounded for itself
                matrix = quantise(kind, flat, group=group, scale_dtype=scale_dtype, graded=graded)
                weight.copy_(matrix.dequantise(weight.dtype).view_as(weight))
                kept, rows = replace(matrix, codes=matrix.codes.cpu(), scales=matrix.scales.cpu()), weight.shape[-2]
                parts = enumerate(projection.parts)
                matrices |= {part: kept.rows(i * rows, (i + 1) * rows) for i, part in parts}
                stage.advance()
        return matrices
    weights_by_name: dict[str, Tensor] = {}
    for projection, weight in projections:
        weights_by_name |= zip(projection.parts, weight if projection.experts else (weight,), strict=True)

    def put(name: str, codes: Tensor, scales: Tensor) -> None:
        weight = weights_by_name[name]
        matrix = QuantizedMatrix(kind, codes, scales, None, group, (weight.shape[0], weight.shape[1]))
        weight.copy_(matrix.dequantise(weight.dtype))
        matrices[name] = replace(matrix, codes=codes.cpu(), scales=scales.cpu())

    def compute() -> dict[str, list[Tensor]]:
        assert group is not None
        with stages.progress.stage("Quantising", len(weights_by_name)) as stage:
            for name, matrix in _fitted(source, tokens, group, scale_dtype):
                put(name, matrix.codes, matrix.scales)
                stage.advance()
        return {name: [matrix.codes, matrix.scales] for name, matrix in matrices.items()}

    for name, (codes, scales) in stages.run("weights", compute).items():
        if name not in matrices:
            put(name, codes.to(source.device), scales.to(source.device))
    return matrices


def _fitted(
    source: SourceModel, tokens: CalibrationTokens, group: int, scale_dtype: torch.dtype
) -> Iterator[tuple[str, QuantizedMatrix]]:
    """One projection after another; the caller puts its matrix into ``source`` before it asks for the next."""
    flow = BlockFlow(source.model, source.config, tokens.input_ids, tokens.keep)
    dense, hidden = flow.start(), flow.start()  # entering the block: in the dense model, and in the one made here
    rounded = total = 0
    for block in range(source.config.num_blocks):
        groups = source.config.shared_inputs(block)
        shared = [[projection.name for projection in sharing] for sharing in groups]
        modules = {one.name: source.projections[one.name] for one, *_ in groups if not one.experts}
        of_dense: dict[str, list[Tensor]] = {name: [] for name in modules}
        for batch, state in enumerate(dense):
            with _kept_inputs(modules, of_dense):
                dense[batch] = flow.block(block, batch, state)
        for (first, *others), sharing in zip(shared, groups, strict=True):
            module = source.projections[first]
            if sharing[0].experts:
                # Without ``cross``: in the dense model other tokens may have reached an expert.
                inputs = [rows.split(counts) for rows, counts in _expert_inputs(flow, block, hidden, first, module)]
                reached = [sum(len(rows[expert]) for rows in inputs) for expert in range(sharing[0].experts)]
                few = [expert for expert, count in enumerate(reached) if count < _ENOUGH_TOKENS]
                rounded, total = rounded + len(few), total + len(reached)
                for projection, expert in product(sharing, few):
                    weight = source.projections[projection.name].weight[expert]
                    yield projection.parts[expert], quantise("int4", weight, group=group, scale_dtype=scale_dtype)
                many = [expert for expert, count in enumerate(reached) if count >= _ENOUGH_TOKENS]
                step = max(1, _TOGETHER // (module.in_features * module.out_features))
                for some in (many[i : i + step] for i in range(0, len(many), step)):
                    every = (torch.cat([rows[expert] for rows in inputs]).to(torch.float32) for expert in some)
                    moments = torch.stack([x.t() @ x for x in every])
                    for projection in sharing:
                        weight = source.projections[projection.name].weight[some]
                        matrix, rows = fit_int4(weight, moments, group, scale_dtype), weight.shape[1]
                        for i, expert in enumerate(some):
                            yield projection.parts[expert], matrix.rows(i * rows, (i + 1) * rows)
                continue
            moments, cross = torch.zeros(2, module.in_features, module.in_features, device=module.weight.device)
            for batch, state in enumerate(hidden):
                here: dict[str, list[Tensor]] = {first: []}
                with suppress(_Enough), _kept_inputs({first: module}, here, stop=True):
                    flow.block(block, batch, state)
                x, z = (inputs.to(torch.float32) for inputs in (here[first][0], of_dense[first][batch]))
                moments.addmm_(x.t(), x)
                cross.addmm_(z.t(), x)
            for name in (first, *others):
                yield name, fit_int4(source.projections[name].weight, moments, group, scale_dtype, cross)
        hidden = [flow.block(block, batch, state) for batch, state in enumerate(hidden)]
    if rounded:
        text = "int4: %d of %d weights' inputs in experts are from fewer than %d tokens: these weights are rounded, not fitted"
        _log.warning(text, rounded, total, _ENOUGH_TOKENS)


def _expert_inputs(
    flow: BlockFlow, block: int, hidden: Hidden, name: str, module: ExpertProjection
) -> Iterator[tuple[Tensor, list[int]]]:
    """Of each micro-batch the rows that enter a projection of experts, expert by expert, and how many each has."""
    for batch, state in enumerate(hidden):
        here: dict[str, list[Tensor]] = {name: []}
        with suppress(_Enough), _kept_inputs({name: module}, here, stop=True):
            flow.block(block, batch, state)
        assert module.routing is not None
        yield here[name][0], module.routing.counts


class _Enough(Exception):
    """The block need not be run any further."""


@contextmanager
def _kept_inputs(
    modules: Mapping[str, torch.nn.Module], kept: Mapping[str, list[Tensor]], *, stop: bool = False
) -> Iterator[None]:
    """Keep the inputs (T, K) of modules while they are run; with ``stop`` they raise `_Enough` in place of running."""

    def keep(name: str, _: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        kept[name].append(args[0].flatten(0, -2))
        if stop:
            raise _Enough

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(partial(keep, name)).remove)
        yield


@torch.no_grad()
def compare_coordinates(
    source: SourceModel,
    checkpoint: Checkpoint,
    tokens: CalibrationTokens,
    directions: Callable[[], CalibrationTokens],
    held_back: Callable[[], CalibrationTokens],
    sparsity: float,
    stages: Stages,
) -> dict[str, float]:
    """KL(dense || int4 with masks of ``sparsity``), nats a token, of ``none`` and ``pca`` on a few sequences held back.
    ``source`` is changed in between, and holds the checkpoint's weights again afterwards."""
    few = replace(tokens, input_ids=tokens.input_ids[:SAMPLES, :LONGEST], keep=tokens.keep[:SAMPLES, :LONGEST])

    def compare() -> dict[str, float]:
        sequences = stages.processes.broadcast(list(held_back().input_ids) if stages.processes.is_main else [])
        dense = [source.model(input_ids=ids[None].to(source.device)).logits[0].cpu() for ids in sequences]
        trial = replace(stages, folder=None)  # nothing of it is kept

        def kl() -> float:
            waiting = iter(dense)
            quantise_weights(source, few, "int4", checkpoint.dtype, trial)
            with SparsityLevels(source, few, SearchSettings(search="fisher"), trial) as levels:
                result = levels.at(sparsity)
            with MaskedLogits(source, result) as logits:
                found = evaluate_text(
                    logits, sequences, ["all"], reference=lambda ids, _: next(waiting).to(source.device)
                )
            load_weights(source.model, checkpoint)
            return found["all"].sparse.kl

        found = {"none": kl()}
        rotate(source, checkpoint, tokens, directions, stages)
        return stages.processes.broadcast({**found, "pca": kl()})

    return stages.run("coordinates", compare)
