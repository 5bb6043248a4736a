"""Graded reading in transformers' model: each projection reads its input once for each plane of its codes, side by side,
so that a plane of a channel is a channel to the masks and searches, and the share of them dropped that of unread bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wisparse.formats.weight_types import PLANE_BITS, QuantizedMatrix, split_planes

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
    repeat, projections = _Repeat(), {}
    for name, module in source.projections.items():
        matrix = matrices[name]
        numbers: list[Any] = []
        shift = sum(PLANE_BITS)
        for bits, plane in zip(PLANE_BITS, split_planes(matrix.codes), strict=True):
            shift -= bits
            codes = replace(matrix, codes=plane, scales=matrix.scales * 2.0**shift)
            numbers.append(codes.dequantise(module.weight.dtype).to(module.weight.device))
        rows, columns = module.weight.shape
        wide = nn.Linear(len(PLANE_BITS) * columns, rows, bias=False, device="meta")
        wide.weight = nn.Parameter(torch.cat(numbers, dim=1), requires_grad=False)
        wide.bias = module.bias
        source.model.set_submodule(name, _InPlanes(wide, repeat))
        projections[name] = wide
    return replace(source, projections=projections, planes=len(PLANE_BITS))


def tied(scale: Tensor, planes: int) -> Tensor:
    """A scale (planes * K,) in which each further plane's is the first's divided by one number: what a bundle can hold."""
    if planes == 1:
        return scale
    logs = scale.double().log().view(planes, -1)
    offsets = logs.mean(1, keepdim=True) - logs.mean()
    return (logs - offsets).mean(0).add(offsets).exp().float().flatten()


def plane_ratios(scale: Tensor, planes: int) -> list[float]:
    """Of a tied scale, what the thresholds of the planes are times the first one's, in float32; ascending from 1."""
    logs = scale.double().log().view(planes, -1).mean(1)
    return (logs[0] - logs).exp().tolist()
