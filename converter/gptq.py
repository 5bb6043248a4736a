"""Quantization of a model's projections in place, and the comparison of int4 with and without rotation.

GPTQ needs correlated inputs, which a rotation to principal directions removes, and masks need the rotation. Which costs
less depends on the model and the sparsity (benchmarks/coordinates.py), so `compare_coordinates` measures it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import Kind, QuantizedMatrix, pack_int4, quantise

from .calibration import CalibrationTokens
from .evaluation import evaluate_text
from .flow import BlockFlow, Hidden, StopForward
from .measurement import MaskedLogits
from .rotation import load_weights, rotate
from .search.search import SearchSettings, SparsityLevels
from .source import SourceModel
from .state import NO_STATE, Stages

# Candidates for a scale: 7.5 steps are this fraction of the group's largest value. Codes are -8 to 7.
_CLIPS = tuple(1.08 - 0.02 * step for step in range(25))
_STEPS = 7.5
# Times the mean of the diagonal, added to it: the inverse of few tokens' moments would be noise.
_DAMPING = 0.01
# Channels rounded before their errors are propagated to all remaining channels.
_PANEL = 128
# The fraction applied of the correction for the inputs' own error, since all of it overfits the calibration text
# (benchmarks/LOG.md); and its ridge, times the mean of the moments' diagonal.
_CORRECTION, _RIDGE = 0.5, 0.05
# Weights of the experts that are fitted in one batch.
_BATCH_WEIGHTS = 1 << 25
# Rows, of each expert, whose scales are solved in one batch.
_ROWS = 1024
_MIN_EXPERT_TOKENS = 256  # an expert with fewer tokens is rounded, not fitted
# Of the comparison of coordinates: sequences, and tokens of each, both for the search and for the measurement.
SAMPLES, LONGEST = 4, 256

_log = logging.getLogger("wisparse")


def fit_int4(
    weight: Tensor, moments: Tensor, group: int, scale_dtype: torch.dtype, cross: Tensor | None = None
) -> QuantizedMatrix:
    """Symmetric int4 codes for a finite weight (N, K); ``group`` neighbouring channels share a scale. Experts' weights
    (E, N, K), with moments (E, K, K), give codes (E * N, K).

    ``moments`` (K, K) float32: the sum of x xᵀ; ``cross``: the sum of z xᵀ; x and z are the projection's inputs in the
    quantized and in the dense model. The target is W moved towards the weight whose product with x is W z
    (as in arXiv:2504.02692); then GPTQ (arXiv:2210.17323), then least-squares scales for the codes.
    """
    columns = weight.shape[-1]
    target, diagonal = weight.to(torch.float32), moments.diagonal(dim1=-2, dim2=-1)
    if cross is not None:
        ridge = diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * _RIDGE
        damped = moments + torch.diag_embed(ridge.expand_as(diagonal))
        target = target + _CORRECTION * torch.linalg.solve(damped, (target @ (cross - moments)).mT).mT
    scales = search_scales(target, diagonal, group, scale_dtype)
    codes = _round_columns(target, moments, scales.repeat_interleave(group, dim=-1))
    scales = _least_squares(target, moments, codes, scales, scale_dtype).flatten(0, -2)
    codes = codes.flatten(0, -2)
    return QuantizedMatrix("int4", pack_int4((codes + 8).to(torch.uint8)), scales, None, group, (len(codes), columns))


def _round_columns(target: Tensor, moments: Tensor, scales: Tensor) -> Tensor:
    """GPTQ's codes (N, K) of the weight ``target`` for scales (N, K): columns in the order of falling moments, each rounded
    and its error propagated to those after it."""
    order = torch.argsort(moments.diagonal(dim1=-2, dim2=-1), descending=True, stable=True, dim=-1)
    rows = moments.gather(-2, order.unsqueeze(-1).expand_as(moments))
    factor = _inverse_factor(rows.gather(-1, order.unsqueeze(-2).expand_as(moments)))
    by_column = order.unsqueeze(-2).expand_as(target)
    remaining, scales = target.gather(-1, by_column), scales.gather(-1, by_column)
    codes, columns = torch.empty_like(target), target.shape[-1]
    for first in range(0, columns, _PANEL):
        last = min(first + _PANEL, columns)
        panel = remaining[..., first:last]
        errors = torch.empty_like(panel)
        for k in range(last - first):
            row, scale = factor[..., first + k, None, first:last], scales[..., first + k]
            code = torch.round(panel[..., k] / scale).clamp_(-8, 7)
            errors[..., k] = (panel[..., k] - code * scale) / row[..., k]
            panel[..., k:] -= errors[..., k, None] * row[..., k:]
            codes[..., first + k] = code
        remaining[..., last:] -= errors @ factor[..., first:last, last:]
    return torch.empty_like(codes).scatter_(-1, by_column, codes)


def _least_squares(target: Tensor, moments: Tensor, codes: Tensor, scales: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Least-squares scales (..., N, G) of the codes (..., N, K), row by row: A s = b with A_gh = C_gᵀ H C_h and
    b_g = C_gᵀ H w, where C_g are the codes of group g. A scale that would change by half or more is kept."""
    groups, result = scales.shape[-1], scales.clone()
    group = codes.shape[-1] // groups
    for first in range(0, codes.shape[-2], _ROWS):
        rows = (..., slice(first, first + _ROWS), slice(None))
        code, before = codes[rows], scales[rows]
        matrix = torch.empty(*code.shape[:-1], groups, groups, device=codes.device)
        for g in range(groups):
            columns = slice(g * group, (g + 1) * group)
            matrix[..., g, :] = (
                ((code[..., columns] @ moments[..., columns, :]) * code).unflatten(-1, (groups, group)).sum(-1)
            )
        right = ((target[rows] @ moments) * code).unflatten(-1, (groups, group)).sum(-1)
        # The ridge pulls towards the scales before, for groups without codes other than 0.
        ridge = matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) * 1e-3 + 1e-20
        matrix.diagonal(dim1=-2, dim2=-1).add_(ridge)
        solved = torch.linalg.solve(matrix, right + ridge * before)
        ratio = solved / before
        result[rows] = torch.where((ratio > 0.5) & (ratio < 1.5), solved, before)
    return result.to(scale_dtype).to(torch.float32)


def search_scales(weight: Tensor, importance: Tensor, group: int, scale_dtype: torch.dtype) -> Tensor:
    """Scales (..., N, K / group) float32 of least squared rounding error, weighted by channel ``importance`` (..., K)."""
    groups = weight.to(torch.float32).unflatten(-1, (-1, group))
    weights = importance.to(torch.float32).clamp(min=0).unflatten(-1, (-1, group))
    # A small weight for channels without importance: a group of only these needs a scale too.
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
    """Upper Cholesky factors of the inverse damped moments; damping is increased where factorisation fails."""
    if not torch.isfinite(moments).all():
        raise UnsupportedModelError(
            "int4: a projection's inputs on the calibration text are NaN or infinite; use an intact model"
        )
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    damping = diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * _DAMPING
    while True:
        factor, info = torch.linalg.cholesky_ex(moments + torch.diag_embed(damping.expand_as(diagonal)))
        upper, inverse_info = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        failed = (info != 0) | (inverse_info != 0)
        if not failed.any():
            return upper
        damping = torch.where(failed.unsqueeze(-1), 10 * damping, damping)


def group_size(config: ModelConfig, weights: str = "int4") -> int:
    """The quantization group of int4 and graded weights: 128 channels if that divides every input, else 64 or 32."""
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
    """Quantize every projection of ``source`` in place; returns the codes on the CPU, by checkpoint name. int4 is fitted
    to ``tokens``; int8 and fp8 are rounded with a scale per row, graded weights to int8 in groups. Scales are rounded to
    ``scale_dtype``."""
    graded = weights == "graded"
    kind = cast(Kind, "int8" if graded else weights)
    group = group_size(source.config, weights) if weights in ("int4", "graded") else None
    projections = [(each, source.projections[each.name].weight) for each in source.config.projections()]
    matrices: dict[str, QuantizedMatrix] = {}
    if kind != "int4":  # not a stage: rounding again takes no longer than reading its result
        with stages.progress.stage("Quantising", len(projections)) as stage:
            for projection, weight in projections:
                flat = weight.flatten(0, -2)  # all experts' rows
                matrix = quantise(kind, flat, group=group, scale_dtype=scale_dtype, graded=graded)
                weight.copy_(matrix.dequantise(weight.dtype).view_as(weight))
                on_cpu, rows = replace(matrix, codes=matrix.codes.cpu(), scales=matrix.scales.cpu()), weight.shape[-2]
                parts = enumerate(projection.parts)
                matrices |= {part: on_cpu.rows(i * rows, (i + 1) * rows) for i, part in parts}
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
            for name, matrix in fit_projections(source, tokens, group, scale_dtype):
                put(name, matrix.codes, matrix.scales)
                stage.advance()
        return {name: [matrix.codes, matrix.scales] for name, matrix in matrices.items()}

    for name, (codes, scales) in stages.run("weights", compute).items():
        if name not in matrices:
            put(name, codes.to(source.device), scales.to(source.device))
    return matrices


def fit_projections(
    source: SourceModel, tokens: CalibrationTokens, group: int, scale_dtype: torch.dtype
) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Fit the projections in order; the caller has to put each matrix into ``source`` before the next is computed."""
    flow = BlockFlow(source.model, source.config, tokens.input_ids, tokens.keep)
    dense, hidden = flow.start(), flow.start()  # the block's input in the dense model, and in the quantized one
    rounded = total = 0  # experts' weights
    for block in range(source.config.num_blocks):
        groups = source.config.shared_inputs(block)
        shared = [[projection.name for projection in sharing] for sharing in groups]
        modules = {first.name: source.projections[first.name] for first, *_ in groups if not first.experts}
        dense_inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
        for batch, state in enumerate(dense):
            with _record_inputs(modules, dense_inputs):
                dense[batch] = flow.block(block, batch, state)
        for (first, *others), sharing in zip(shared, groups, strict=True):
            module = source.projections[first]
            if sharing[0].experts:
                # Without ``cross``: in the dense model the router may choose an expert for other tokens.
                inputs = [rows.split(module.routing.counts) for rows in _inputs(flow, block, hidden, first, module)]
                num_rows = [sum(len(rows[expert]) for rows in inputs) for expert in range(sharing[0].experts)]
                few = [expert for expert, count in enumerate(num_rows) if count < _MIN_EXPERT_TOKENS]
                rounded, total = rounded + len(few), total + len(num_rows)
                for projection, expert in product(sharing, few):
                    weight = source.projections[projection.name].weight[expert]
                    yield projection.parts[expert], quantise("int4", weight, group=group, scale_dtype=scale_dtype)
                many = [expert for expert, count in enumerate(num_rows) if count >= _MIN_EXPERT_TOKENS]
                step = max(1, _BATCH_WEIGHTS // (module.in_features * module.out_features))
                for experts in (many[i : i + step] for i in range(0, len(many), step)):
                    xs = (torch.cat([rows[expert] for rows in inputs]).to(torch.float32) for expert in experts)
                    moments = torch.stack([x.t() @ x for x in xs])
                    for projection in sharing:
                        weight = source.projections[projection.name].weight[experts]
                        matrix, rows = fit_int4(weight, moments, group, scale_dtype), weight.shape[1]
                        for i, expert in enumerate(experts):
                            yield projection.parts[expert], matrix.rows(i * rows, (i + 1) * rows)
                continue
            moments, cross = torch.zeros(2, module.in_features, module.in_features, device=module.weight.device)
            for pair in zip(_inputs(flow, block, hidden, first, module), dense_inputs[first], strict=True):
                x, z = (inputs.to(torch.float32) for inputs in pair)
                moments.addmm_(x.t(), x)
                cross.addmm_(z.t(), x)
            for name in (first, *others):
                yield name, fit_int4(source.projections[name].weight, moments, group, scale_dtype, cross)
        hidden = [flow.block(block, batch, state) for batch, state in enumerate(hidden)]
    if rounded:
        text = "int4: %d of %d weights' inputs in experts are from fewer than %d tokens: these weights are rounded, not fitted"
        _log.warning(text, rounded, total, _MIN_EXPERT_TOKENS)


def _inputs(flow: BlockFlow, block: int, hidden: Hidden, name: str, module: Any) -> Iterator[Tensor]:
    """A projection's inputs by micro-batch, of experts sorted by expert; the block runs up to it."""
    for batch, state in enumerate(hidden):
        recorded: dict[str, list[Tensor]] = {name: []}
        with suppress(StopForward), _record_inputs({name: module}, recorded, stop=True):
            flow.block(block, batch, state)
        yield recorded[name][0]


@contextmanager
def _record_inputs(
    modules: Mapping[str, torch.nn.Module], inputs: Mapping[str, list[Tensor]], *, stop: bool = False
) -> Iterator[None]:
    """Append the modules' inputs (T, K) to ``inputs``; with ``stop`` they raise `StopForward` before they run."""

    def record(name: str, _: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name].append(args[0].flatten(0, -2))
        if stop:
            raise StopForward

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(partial(record, name)).remove)
        yield


@torch.no_grad()
def compare_coordinates(
    source: SourceModel,
    checkpoint: Checkpoint,
    tokens: CalibrationTokens,
    rotation_text: Callable[[], CalibrationTokens],
    held_out: Callable[[], CalibrationTokens],
    sparsity: float,
    stages: Stages,
) -> dict[str, float]:
    """KL(dense || int4 with masks of ``sparsity``), nats per token, for rotation ``none`` and ``pca``, on a few held-out
    sequences. ``source`` is changed meanwhile; at the end it has the checkpoint's weights again."""
    few = replace(tokens, input_ids=tokens.input_ids[:SAMPLES, :LONGEST], keep=tokens.keep[:SAMPLES, :LONGEST])

    def compare() -> dict[str, float]:
        sequences = stages.processes.broadcast(list(held_out().input_ids) if stages.processes.is_main else [])
        dense = [source.model(input_ids=ids[None].to(source.device)).logits[0].cpu() for ids in sequences]
        trial = replace(stages, folder=None)  # does not save its stages

        def kl() -> float:
            dense_logits = iter(dense)
            quantise_weights(source, few, "int4", checkpoint.dtype, trial)
            with SparsityLevels(source, few, SearchSettings(search="fisher"), trial) as levels:
                result = levels.at(sparsity)
            with MaskedLogits(source, result) as logits:
                quality = evaluate_text(
                    logits, sequences, ["all"], reference=lambda ids, _: next(dense_logits).to(source.device)
                )
            load_weights(source.model, checkpoint)
            return quality["all"].sparse.kl

        unrotated = kl()
        rotate(source, checkpoint, tokens, rotation_text, stages)
        return stages.processes.broadcast({"none": unrotated, "pca": kl()})

    return stages.run("coordinates", compare)
