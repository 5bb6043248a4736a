"""Weights as planes of two-bit codes. A channel of a matrix has a width of 2, 4, 6 or 8 bits, that is one to four rows of
codes in {-1.5, -0.5, 0.5, 1.5} times a scale of the row; rows add up. So a row is a channel to masks and searches, and
their sparsity is the fraction of unread bits. A prototype, whose figures decided against it (LOG.md): `planes.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.calibration_state import block_inputs
from wisparse.converter.flow import BlockFlow
from wisparse.converter.gptq import corrected, fit_projections, in_order, round_columns
from wisparse.converter.masking import MaskedModel
from wisparse.converter.sensitivity import DenseReference, fisher_diagonal
from wisparse.converter.source import SourceModel
from wisparse.converter.state import NO_STATE, Stages
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig, Projection

# Width in bits -> the mean squared error of a normal variable of variance 1, rounded uniformly, and the best step.
_ERRORS = {2: 0.1188, 4: 0.01154, 6: 0.00104, 8: 0.000089}
_STEPS = {2: 0.9957, 4: 0.3352, 6: 0.1041, 8: 0.0308}
# Steps that are tried for a channel, in units of the best one of a normal variable.
_FACTORS = (0.72, 0.8, 0.87, 0.93, 1.0, 1.06, 1.13, 1.22, 1.33, 1.5)
_SCALE_BITS = 16  # of a row of codes, and of an output
_LARGEST_BIT_PRICE = 200.0  # log2 of the ratio between the prices that `choose_widths` bisects
# Of the least-squares scales of rows: the ridge, relative to the diagonal.
_RIDGE = 0.02
_FISHER_TOKENS = 16384
_BATCH_SIZE = 4  # sequences


@dataclass(frozen=True)
class PlaneMatrix:
    """A weight (N, K) as rows of codes, plane by plane, the channels ascending in each; plane 1 has all channels."""

    codes: Tensor  # (R, N) uint8, 0 to 3
    channels: Tensor  # (R,) int64: each row's channel
    row_scales: Tensor  # (R,) float32, float16's values
    output_scales: Tensor  # (N,) float32, float16's values

    def rows(self, dtype: torch.dtype) -> Tensor:
        """What an input's channels are multiplied by, (N, R)."""
        values = (self.codes.to(torch.float32) - 1.5) * self.row_scales[:, None] * self.output_scales
        return values.to(dtype).t()

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """(N, K): the sum of each channel's rows."""
        width = int(self.channels.max()) + 1
        weight = self.codes.new_zeros(self.codes.shape[1], width, dtype=torch.float32)
        return weight.index_add_(1, self.channels, self.rows(torch.float32)).to(dtype)

    @property
    def bits(self) -> int:
        """Everything stored, but for the widths."""
        return 2 * self.codes.numel() + _SCALE_BITS * (len(self.row_scales) + len(self.output_scales))


def output_fisher(source: SourceModel, tokens: CalibrationTokens) -> dict[str, Tensor]:
    """The mean square of the loss's gradient at each output of each projection, (N,) float64, on the CPU."""
    probes = {name: nn.Identity() for name in source.projections}
    for name, module in source.projections.items():
        probes[name].out_features = probes[name].in_features = module.out_features
    handles = [
        module.register_forward_hook(lambda _, __, out, probe=probes[name]: probe(out))
        for name, module in source.projections.items()
    ]
    few = max(1, _FISHER_TOKENS // tokens.seq_len)
    try:
        flow = BlockFlow(source.model, source.config, tokens.input_ids[:few], tokens.keep[:few], _BATCH_SIZE)
        totals: dict[str, Tensor] = {}
        with MaskedModel(probes) as masked:
            reference = DenseReference(flow, masked)
            for batch in range(flow.num_batches):
                draw = torch.Generator().manual_seed((tokens.seed << 32) + batch)
                for name, squares in fisher_diagonal(reference, batch, draw).items():
                    totals[name] = totals.get(name, 0.0) + squares / flow.num_counted
    finally:
        for handle in handles:
            handle.remove()
    return totals


def choose_widths(
    source: SourceModel, tokens: CalibrationTokens, bits: float, fisher: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Each channel's width, (K,) int64 by projection, so that the least predicted loss is stored in ``bits`` a weight,
    with all scales. A channel's loss is its conditional variance given the channels rounded after it, times the errors'
    energy, times the outputs' Fisher information."""
    losses: dict[str, Tensor] = {}
    flow = BlockFlow(source.model, source.config, tokens.input_ids, tokens.keep, _BATCH_SIZE)
    hidden = flow.start()
    with MaskedModel(source.projections) as masked, torch.no_grad():
        for block in range(source.config.num_blocks):
            groups = [[one.name for one in group] for group in source.config.shared_inputs(block)]
            inputs, hidden = block_inputs(flow, masked, block, hidden, [name for group in groups for name in group])
            for group in groups:
                x = inputs[group[0]].x.to(torch.float32)
                moments = x.t() @ x / len(x)
                order, factor = in_order(moments)
                variance = torch.empty_like(factor[0]).scatter_(0, order, factor.diagonal() ** -2)
                for name in group:
                    weight, scales = _normalised(source.weight(name).to(torch.float32), moments)
                    information = (fisher[name].to(scales.device) * scales.double() ** 2).sum()
                    losses[name] = (variance * weight.square().mean(0)).double() * information
    outputs = {name: len(fisher[name]) for name in losses}
    weights = sum(len(loss) * outputs[name] for name, loss in losses.items())
    budget = bits * weights - _SCALE_BITS * sum(outputs.values())
    widths, errors = (torch.tensor(list(row)) for row in (_ERRORS, _ERRORS.values()))
    by_name = {name: loss.cpu().clamp_min(1e-300)[:, None] * errors for name, loss in losses.items()}
    costs = {name: widths * outputs[name] + _SCALE_BITS * widths // 2 for name in losses}

    def chosen(price: float) -> dict[str, Tensor]:
        return {name: (loss + price * costs[name]).argmin(1) for name, loss in by_name.items()}

    def spent(choice: Mapping[str, Tensor]) -> int:
        return sum(int(costs[name][index].sum()) for name, index in choice.items())

    if not spent(chosen(torch.inf)) <= budget:
        raise UnsupportedModelError(f"{bits:g} bits: two bits a channel and the scales need more")
    low, high = -_LARGEST_BIT_PRICE, _LARGEST_BIT_PRICE
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(chosen(2.0**middle)) > budget else (low, middle)
    return {name: widths[index] for name, index in chosen(2.0**high).items()}


def _normalised(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """The weight divided by scales (N,) of its outputs: float16's values of the root mean square over the channels."""
    diagonal = moments.diagonal()
    diagonal = diagonal + diagonal.mean().clamp_min(1e-30) * 1e-6  # inputs may have been 0
    scales = ((weight.square() @ diagonal) / diagonal.sum()).sqrt().clamp_min(2.0**-14)
    scales = scales.to(torch.float16).to(torch.float32)
    return weight / scales[:, None], scales


def fit_planes(weight: Tensor, moments: Tensor, cross: Tensor | None, widths: Tensor, fisher: Tensor) -> PlaneMatrix:
    """GPTQ with a width for each channel; see `gptq.fit_int4` for weight, moments and cross. ``fisher`` (N,) weighs the
    outputs' errors in the choice of a channel's step."""
    target, output_scales = _normalised(corrected(weight, moments, cross), moments)
    importance = fisher.to(target.device, torch.float32) * output_scales.square()
    importance = importance / importance.mean().clamp_min(1e-30) + 1e-6
    order, factor = in_order(moments)
    codes = torch.empty(target.shape[1], target.shape[0], dtype=torch.uint8, device=target.device)
    steps = torch.ones(target.shape[1], device=target.device)
    factors, positions = torch.tensor(_FACTORS, device=target.device)[:, None], widths[order.cpu()].tolist()

    def rounded(k: int, column: Tensor) -> Tensor:
        bits = positions[k]
        half = 2 ** (bits - 1)
        tried = (column.square().mean().sqrt().clamp_min(2.0**-12) * _STEPS[bits] * factors).half().float()
        values = (column / tried).floor_().clamp_(-half, half - 1)
        # index_select, as an index of no dimensions would wait for a GPU.
        best = ((values.add(0.5).mul_(tried) - column).square_() @ importance).argmin(0, keepdim=True)
        code, step = values.index_select(0, best)[0], tried.index_select(0, best)[0, 0]
        codes[k], steps[k] = (code + half).to(torch.uint8), step
        return (code + 0.5) * step

    round_columns(target[:, order], factor, rounded)
    back = torch.argsort(order)
    codes, steps = codes[back], steps[back]
    device_widths, rows = widths.to(codes.device), []
    for plane in range(int(widths.max()) // 2):
        channels = (device_widths > 2 * plane).nonzero()[:, 0]
        shift = device_widths[channels] - 2 * (plane + 1)
        rows.append((codes[channels] >> shift[:, None] & 3, channels, steps[channels] * 2.0**shift))
    all_codes, all_channels, row_scales = (torch.cat(parts) for parts in zip(*rows, strict=True))
    matrix = PlaneMatrix(all_codes, all_channels, row_scales, output_scales)
    return _with_fitted_scales(matrix, target, moments, importance)


def _with_fitted_scales(matrix: PlaneMatrix, target: Tensor, moments: Tensor, importance: Tensor) -> PlaneMatrix:
    """Least-squares scales of the rows, then of the outputs, for the codes; ``target``: the normalised weight."""
    values = (matrix.codes.to(torch.float32) - 1.5) * matrix.row_scales[:, None]  # (R, N)
    channels, weighted = matrix.channels, values * importance
    gram = (values @ weighted.t()) * moments[channels][:, channels]
    right = (weighted * (target @ moments).t()[channels]).sum(1)
    ridge = gram.diagonal() * _RIDGE + 1e-20
    ratio = torch.linalg.solve(gram + torch.diag(ridge), right + ridge)
    ratio = torch.where((ratio > 0.5) & (ratio < 1.5), ratio, 1.0)
    row_scales = (matrix.row_scales * ratio).half().float()
    fitted = replace(matrix, row_scales=row_scales, output_scales=torch.ones_like(matrix.output_scales))
    rounded = fitted.dequantise(torch.float32)
    of_moments = rounded @ moments
    change = (of_moments * target).sum(1) / (of_moments * rounded).sum(1).clamp_min(1e-20)
    scales = (matrix.output_scales * change.clamp(0.8, 1.25)).half().float()
    return replace(fitted, output_scales=scales)


@torch.no_grad()
def quantise_in_planes(
    source: SourceModel, tokens: CalibrationTokens, bits: float, stages: Stages = NO_STATE
) -> dict[str, PlaneMatrix]:
    """Quantise every projection of ``source``, in place, to ``bits`` stored a weight; returns the codes by name."""
    if any(projection.experts for projection in source.config.projections()):
        raise UnsupportedModelError("planes: expected a model without routed experts")
    fisher = output_fisher(source, tokens)
    widths = choose_widths(source, tokens, bits, fisher)
    matrices: dict[str, PlaneMatrix] = {}

    def fit(name: str, weight: Tensor, moments: Tensor, cross: Tensor) -> PlaneMatrix:
        return fit_planes(weight, moments, cross, widths[name], fisher[name])

    with stages.progress.stage("Quantising", len(widths)) as stage:
        for name, matrix in fit_projections(source, tokens, 0, torch.float16, fit):
            source.projections[name].weight.copy_(matrix.dequantise(source.projections[name].weight.dtype))
            matrices[name] = matrix
            stage.advance()
    return matrices


class _Gather(nn.Module):
    """A projection of the channels of its rows."""

    def __init__(self, rows: nn.Linear, channels: Tensor) -> None:
        super().__init__()
        self.rows, self.channels = rows, channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rows(x.index_select(-1, self.channels))
        return out


class _OwnInputs(ModelConfig):
    """A configuration whose projections share no input: each gathers its own."""

    def shared_inputs(self, block: int) -> list[list[Projection]]:
        return [[one] for one in self.projections(block)]


@torch.no_grad()
def read_by_rows(source: SourceModel, matrices: Mapping[str, PlaneMatrix]) -> SourceModel:
    """Replace the projections of ``source``, in place, by weights (N, R): a channel for each row of codes."""
    projections = dict(source.projections)
    for name, matrix in matrices.items():
        module = projections[name]
        wide = nn.Linear(len(matrix.channels), module.out_features, bias=False, device="meta")
        wide.weight = nn.Parameter(matrix.rows(module.weight.dtype).contiguous(), requires_grad=False)
        wide.bias = module.bias
        source.model.set_submodule(name, _Gather(wide, matrix.channels))
        projections[name] = wide
    config = _OwnInputs(**{one.name: getattr(source.config, one.name) for one in fields(source.config) if one.init})
    return replace(source, projections=projections, config=config)
