"""Graded weights in a transformers model: a projection becomes one of (N, planes * K), with x repeated for each plane of
the codes. So a plane of a channel is a channel to masks and searches, and their sparsity is the fraction of unread bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from wisparse.formats.weight_types import PLANE_BITS, QuantizedMatrix, split_planes

from .experts import ExpertProjection
from .source import SourceModel


class _Repeat:
    """x (…, K) to (…, planes * K); the last result is reused, so that projections with one input still share one."""

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.repeated = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self.x is not x:
            self.x, self.repeated = x, torch.cat([x] * len(PLANE_BITS), dim=-1)
        return self.repeated


class _InPlanes(nn.Module):
    def __init__(self, planes: nn.Linear, repeat: _Repeat) -> None:
        super().__init__()
        self.planes, self.repeat = planes, repeat

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.planes(self.repeat(x))
        return out


@torch.no_grad()
def read_in_planes(source: SourceModel, matrices: Mapping[str, QuantizedMatrix]) -> SourceModel:
    """Replace the projections of ``source``, in place, by weights (N, planes * K) of int8 codes, the high plane first."""
    repeat, projections = _Repeat(), dict(source.projections)
    for projection in source.config.projections():
        name, module = projection.name, projections[projection.name]
        weights: list[Tensor] = []
        for part in projection.parts:
            device, shift, planes = module.weight.device, sum(PLANE_BITS), []
            scales = matrices[part].scales.to(device)
            for bits, plane in zip(PLANE_BITS, split_planes(matrices[part].codes.to(device)), strict=True):
                shift -= bits
                codes = replace(matrices[part], codes=plane, scales=scales * 2.0**shift)
                planes.append(codes.dequantise(module.weight.dtype))
            weights.append(torch.cat(planes, dim=1))
        if isinstance(module, ExpertProjection):
            role, weight = projection.role, torch.stack(weights)
            projections[name] = ExpertProjection(module.experts, role, module.chosen, weight, len(PLANE_BITS))
            module.experts._wisparse_projections[role] = projections[name]
            continue
        rows, columns = module.weight.shape
        wide = nn.Linear(len(PLANE_BITS) * columns, rows, bias=False, device="meta")
        wide.weight = nn.Parameter(weights[0], requires_grad=False)
        wide.bias = module.bias
        source.model.set_submodule(name, _InPlanes(wide, repeat))
        projections[name] = wide
    return replace(source, projections=projections, planes=len(PLANE_BITS))


def by_plane(values: Tensor, planes: int) -> Tensor:
    """(planes * K,) to (planes, K); of experts (E, planes * K) to (planes, E * K)."""
    return values.unflatten(-1, (planes, -1)).movedim(-2, 0).flatten(1)


def from_planes(values: Tensor, like: Tensor) -> Tensor:
    """The inverse of `by_plane`, in the shape of ``like``."""
    return values.view(len(values), *like.shape[:-1], -1).movedim(0, -2).flatten(-2)


def tied(scale: Tensor, planes: int) -> Tensor:
    """The nearest scale, in logarithms, whose planes differ by a constant factor each: the form that a bundle stores."""
    if planes == 1:
        return scale
    logs = by_plane(scale.double().log(), planes)
    offsets = logs.mean(1, keepdim=True) - logs.mean()
    return from_planes((logs - offsets).mean(0).add(offsets).exp().float(), scale)


def plane_ratios(scale: Tensor, planes: int) -> list[float]:
    """The planes' thresholds divided by the first plane's, for a tied scale: ascending from 1."""
    logs = by_plane(scale.double().log(), planes).mean(1)
    return (logs[0] - logs).exp().tolist()
