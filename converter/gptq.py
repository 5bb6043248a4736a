"""A model's projections in fewer bits, before anything else is measured on it: block by block, and in place."""

from __future__ import annotations

import torch
from torch import Tensor

from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import Kind, QuantizedMatrix, pack_int4, quantise

from .calibration import CalibrationTokens
from .flow import BlockFlow
from .source import SourceModel
from .state import NO_STATE, Stages

# Seven and a half steps are this much of a group's largest value: above 1 the seventh step can meet a positive one.
_CLIPS = tuple(1.08 - 0.02 * step for step in range(25))
_STEPS = 7.5
# Added to the diagonal, of its mean: without it the inverse of few tokens' moments is noise.
_DAMPING = 0.01
# Channels rounded before their errors are carried to all that are left.
_PANEL = 128


def fit_int4(weight: Tensor, moments: Tensor, group: int, scale_dtype: torch.dtype) -> QuantizedMatrix:
    """int4 codes without zero points for a weight (N, K), finite. ``moments`` (K, K) float32 is the sum of x xᵀ over
    the inputs x; ``group`` neighbouring channels share a scale."""
    rows, columns = weight.shape
    left = weight.to(torch.float32).clone()
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
    """Scales (N, K / group), float32, of least rounding error, each channel's weighted by ``importance`` (K,)."""
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
        factor, failed = torch.linalg.cholesky_ex(moments + torch.diag((mean * damping).expand(len(moments))))
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed:
                return upper
        damping *= 10


def group_size(config: ModelConfig) -> int:
    """Neighbouring channels that share a scale in int4: 128 where that divides every input, else 64 or 32."""
    inputs = sorted({projection.in_features for projection in config.projections(0)})
    group = next((group for group in (128, 64, 32) if not any(size % group for size in inputs)), None)
    if group is None:
        lack = f"no group of 128, 64, 32 channels divides the projections' inputs ({', '.join(map(str, inputs))})"
        raise UnsupportedModelError(f"--weights int4: {lack}; choose int8 or fp8")
    return group


@torch.no_grad()
def quantise_weights(
    source: SourceModel, tokens: CalibrationTokens, kind: Kind, scale_dtype: torch.dtype, stages: Stages = NO_STATE
) -> dict[str, QuantizedMatrix]:
    """Quantise every projection of ``source`` in place; returns the codes by name, on the CPU. int4 is fitted to
    ``tokens``; int8 and fp8 are rounded, with a scale a row. Scales are numbers of ``scale_dtype``."""
    fitted = kind == "int4"
    group = group_size(source.config) if fitted else None
    matrices: dict[str, QuantizedMatrix] = {}

    def put(name: str, codes: Tensor, scales: Tensor) -> None:
        weight = source.projections[name].weight
        matrices[name] = QuantizedMatrix(kind, codes, scales, None, group, (weight.shape[0], weight.shape[1]))
        weight.copy_(matrices[name].dequantise(weight.dtype))

    def compute() -> dict[str, list[Tensor]]:
        flow = BlockFlow(source.model, source.config, tokens.input_ids, tokens.keep) if fitted else None
        hidden = flow.start() if flow else []
        with stages.progress.stage("Quantising", source.config.num_blocks) as stage:
            for block in range(source.config.num_blocks):
                for sharing in source.config.shared_inputs(block):
                    names = [projection.name for projection in sharing]
                    # From a pass through the block as it is by now.
                    moments = _moments(source, flow, block, hidden, names[0]) if flow else None
                    for name in names:
                        weight = source.projections[name].weight
                        if moments is not None and group is not None:
                            matrix = fit_int4(weight, moments, group, scale_dtype)
                        else:
                            matrix = quantise(kind, weight, scale_dtype=scale_dtype)
                        put(name, matrix.codes.cpu(), matrix.scales.cpu())
                if flow:
                    hidden = [flow.block(block, batch, h) for batch, h in enumerate(hidden)]
                stage.advance()
        return {name: [matrix.codes, matrix.scales] for name, matrix in matrices.items()}

    for name, (codes, scales) in stages.run("weights", compute).items():
        if name not in matrices:
            put(name, codes, scales)
    return matrices


def _moments(source: SourceModel, flow: BlockFlow, block: int, hidden: list[Tensor], name: str) -> Tensor:
    """Sum of x xᵀ (K, K) over the inputs of a projection."""
    module = source.projections[name]
    total = torch.zeros(module.in_features, module.in_features, device=module.weight.device)

    def add(_: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].flatten(0, -2).to(torch.float32)
        total.addmm_(rows.t(), rows)

    handle = module.register_forward_pre_hook(add)
    try:
        for batch, state in enumerate(hidden):
            flow.block(block, batch, state)
    finally:
        handle.remove()
    return total
