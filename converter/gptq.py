"""A model's projections in fewer bits, before anything else is measured on it: block by block, and in place.

The model computes with the widened codes from then on, so masks, thresholds and figures are those of the weights that
the bundle will hold. Every block's codes are kept as they are found; a run that was killed goes on after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import Kind, QuantizedMatrix, pack_int4, quantise_fp8, quantise_int8

from .documents import CalibrationTokens
from .flow import BlockFlow
from .processes import Progress
from .source import SourceModel
from .state import Store, pack, unpack

# Of a group's largest value, what seven and a half steps are: above 1 the seventh step can meet a positive one.
_CLIPS = tuple(1.08 - 0.02 * step for step in range(25))
_STEPS = 7.5
# Added to the diagonal, of its mean: without it the inverse of few tokens' moments is noise.
_DAMPING = 0.01
# Channels rounded before what they lost is carried to all that are left.
_PANEL = 128


def fit_int4(weight: Tensor, moments: Tensor, group: int, scale_dtype: torch.dtype) -> QuantizedMatrix:
    """Codes for a weight.

    Args:
        weight: (N, K), finite.
        moments: (K, K) float32, the sum of x xᵀ over the inputs x, on the weight's device.
        group: neighbouring channels that share a scale; divides K.
        scale_dtype: scales are numbers of this type.

    Returns:
        int4 without zero points.
    """
    rows, columns = weight.shape
    left = weight.to(torch.float32).clone()
    moments = moments.to(torch.float32)
    scales = search_scales(left, moments.diagonal(), group, scale_dtype)
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(moments[order][:, order])
    left = left[:, order]
    by_channel = scales.repeat_interleave(group, dim=1)[:, order]
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    for first in range(0, columns, _PANEL):
        last = min(first + _PANEL, columns)
        panel, lost = left[:, first:last], torch.empty(rows, last - first, device=weight.device)
        for k in range(last - first):
            scale, row = by_channel[:, first + k], factor[first + k, first:last]
            code = torch.round(panel[:, k] / scale).clamp_(-8, 7)
            codes[:, first + k] = (code + 8).to(torch.uint8)
            lost[:, k] = (panel[:, k] - code * scale) / row[k]
            panel[:, k:] -= torch.outer(lost[:, k], row[k:])
        left[:, last:] -= lost @ factor[first:last, last:]
    found = torch.empty_like(codes)
    found[:, order] = codes
    return QuantizedMatrix("int4", pack_int4(found), scales, None, group, (rows, columns))


def search_scales(weight: Tensor, importance: Tensor, group: int, scale_dtype: torch.dtype) -> Tensor:
    """Scales (N, K / group), float32: of some that clip more or less, those that lose least by rounding alone, each
    channel's loss weighted by ``importance`` (K,)."""
    groups = weight.to(torch.float32).unflatten(1, (-1, group))
    weights = importance.to(torch.float32).clamp(min=0).unflatten(0, (-1, group))
    # A channel that was never used still counts a little: a group of such has to have a scale.
    weights = weights + weights.mean().clamp(min=1e-30) * 1e-6
    largest = groups.abs().amax(2)
    best = torch.full_like(largest, float("inf"))
    scales = torch.ones_like(largest)
    smallest = max(torch.finfo(scale_dtype).tiny, torch.finfo(torch.float32).tiny)
    for clip in _CLIPS:
        scale = (largest * (clip / _STEPS)).clamp(min=smallest).to(scale_dtype).to(torch.float32)
        step = scale.unsqueeze(2)
        loss = ((torch.round(groups / step).clamp_(-8, 7) * step - groups).square_() * weights).sum(2)
        better = loss < best
        best, scales = torch.where(better, loss, best), torch.where(better, scale, scales)
    return torch.where(largest > 0, scales, 1.0).contiguous()


def _inverse_factor(moments: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped moments' inverse; more damping where rounding leaves them not definite."""
    diagonal = moments.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    damping = _DAMPING
    while True:
        damped = moments + torch.diag((mean * damping).expand(len(moments)))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse = torch.cholesky_inverse(factor)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(failed):
                return upper
        damping *= 10


_GROUPS = (128, 64, 32)


def group_size(config: ModelConfig) -> int:
    """Neighbouring channels that share a scale in four bits: 128 where that divides every input, else less.

    Raises:
        UnsupportedModelError: not even 32 does.
    """
    inputs = {projection.in_features for projection in config.projections(0)}
    for group in _GROUPS:
        if not any(size % group for size in inputs):
            return group
    raise UnsupportedModelError(
        f"--weights int4: no group of {', '.join(map(str, _GROUPS))} channels divides the projections' inputs "
        f"({', '.join(map(str, sorted(inputs)))}); choose int8 or fp8"
    )


@torch.no_grad()
def quantise_weights(
    source: SourceModel,
    tokens: CalibrationTokens,
    kind: Kind,
    scale_dtype: torch.dtype,
    progress: Progress,
    store: Store,
) -> dict[str, QuantizedMatrix]:
    """Quantise every projection of ``source`` in place.

    Args:
        source: its weights are replaced by the widened codes.
        tokens: what int4 is fitted to; int8 and fp8 are rounded, with a scale a row.
        scale_dtype: scales are numbers of this type, that of the file's other weights.
        store: holds what an interrupted run had found.

    Returns:
        Name of the projection -> its codes, on the CPU.
    """
    found: dict[str, QuantizedMatrix] = {}
    fitted = kind == "int4"
    flow = BlockFlow(source.model, source.config, tokens.input_ids, tokens.keep) if fitted else None
    hidden = flow.start() if flow is not None else []
    with progress.stage("Quantising", len(source.blocks)) as stage:
        for block in range(len(source.blocks)):
            for group in source.config.shared_inputs(block):
                names = [projection.name for projection in group]
                saved = {name: store.load(_key(name)) for name in names}
                moments: Tensor | None = None
                for name in names:
                    weight = source.projections[name].weight
                    shape = (weight.shape[0], weight.shape[1])
                    data = saved[name]
                    if data is not None:
                        codes, scales = unpack(data)
                        size = group_size(source.config) if fitted else None
                        matrix = QuantizedMatrix(kind, codes, scales, None, size, shape)
                    else:
                        if flow is not None and moments is None:
                            moments = _moments(source, flow, block, hidden, name)
                        matrix = _quantised(weight, kind, moments, source.config, scale_dtype)
                        store.save(_key(name), pack([matrix.codes, matrix.scales]))
                    weight.copy_(matrix.dequantise(weight.dtype))
                    found[name] = matrix
            if flow is not None:
                hidden = flow.step(block, hidden)
            stage.advance()
    return found


def _quantised(
    weight: Tensor, kind: Kind, moments: Tensor | None, config: ModelConfig, scale_dtype: torch.dtype
) -> QuantizedMatrix:
    if moments is not None:
        matrix = fit_int4(weight, moments, group_size(config), scale_dtype)
    elif kind == "int8":
        matrix = quantise_int8(weight, scale_dtype=scale_dtype)
    else:
        matrix = quantise_fp8(weight, scale_dtype=scale_dtype)
    return QuantizedMatrix(kind, matrix.codes.cpu(), matrix.scales.cpu(), None, matrix.group, matrix.shape)


def _moments(source: SourceModel, flow: BlockFlow, block: int, hidden: list[Tensor], name: str) -> Tensor:
    """Sum of x xᵀ (K, K) over the inputs of a projection, from a pass through its block as it is by now."""
    module = source.projections[name]
    total = torch.zeros(module.in_features, module.in_features, device=module.weight.device)
    with _watched(module, partial(_add, total)):
        for batch, state in enumerate(hidden):
            flow.block(block, batch, state)
    return total


def _add(total: Tensor, x: Tensor) -> None:
    rows = x.flatten(0, -2).to(torch.float32)
    total.addmm_(rows.t(), rows)


@contextmanager
def _watched(module: torch.nn.Module, see: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, args: see(args[0]))
    try:
        yield
    finally:
        handle.remove()


def _key(name: str) -> str:
    return f"weights/{name}"
