"""Graded reading in transformers' model: each projection reads its input once for each plane of its codes, side by side,
so that a plane of a channel is a channel to the masks and searches, and the share of them dropped that of unread bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from wisparse.formats.weight_types import PLANE_BITS, QuantizedMatrix, split_planes

from .experts import ExpertProjection
from .source import SourceModel


class _Repeat:
    """x (…, K) once for each plane, (…, planes * K); the last one again, so that those who read one input still do."""

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
    """``source``, in place, with projections of int8 codes read in planes: weights (N, planes * K), the high plane first."""
    repeat, projections = _Repeat(), dict(source.projections)
    for projection in source.config.projections():
        name, module = projection.name, projections[projection.name]
        wholes: list[Tensor] = []
        for part in projection.parts:
            device, shift, planes = module.weight.device, sum(PLANE_BITS), []
            scales = matrices[part].scales.to(device)
            for bits, plane in zip(PLANE_BITS, split_planes(matrices[part].codes.to(device)), strict=True):
                shift -= bits
                codes = replace(matrices[part], codes=plane, scales=scales * 2.0**shift)
                planes.append(codes.dequantise(module.weight.dtype))
            wholes.append(torch.cat(planes, dim=1))
        if isinstance(module, ExpertProjection):
            role, numbers = projection.role, torch.stack(wholes)
            projections[name] = ExpertProjection(module.experts, role, module.chosen, numbers, len(PLANE_BITS))
            module.experts._wisparse_projections[role] = projections[name]
            continue
        rows, columns = module.weight.shape
        wide = nn.Linear(len(PLANE_BITS) * columns, rows, bias=False, device="meta")
        wide.weight = nn.Parameter(wholes[0], requires_grad=False)
        wide.bias = module.bias
        source.model.set_submodule(name, _InPlanes(wide, repeat))
        projections[name] = wide
    return replace(source, projections=projections, planes=len(PLANE_BITS))


def by_plane(values: Tensor, planes: int) -> Tensor:
    """(planes * K,), or (E, planes * K) of experts, as (planes, K) or (planes, E * K)."""
    return values.unflatten(-1, (planes, -1)).movedim(-2, 0).flatten(1)


def from_planes(values: Tensor, like: Tensor) -> Tensor:
    """What `by_plane` made of ``like``, in its shape again."""
    return values.view(len(values), *like.shape[:-1], -1).movedim(0, -2).flatten(-2)


def tied(scale: Tensor, planes: int) -> Tensor:
    """A scale in which each further plane's is the first's divided by one number: what a bundle can hold."""
    if planes == 1:
        return scale
    logs = by_plane(scale.double().log(), planes)
    offsets = logs.mean(1, keepdim=True) - logs.mean()
    return from_planes((logs - offsets).mean(0).add(offsets).exp().float(), scale)


def plane_ratios(scale: Tensor, planes: int) -> list[float]:
    """Of a tied scale, what the thresholds of the planes are times the first one's, in float32; ascending from 1."""
    logs = by_plane(scale.double().log(), planes).mean(1)
    return (logs[0] - logs).exp().tolist()
