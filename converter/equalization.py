"""Equalization of the projections' inputs, which lowers the error of weights with one scale a row.

Column k of the weights that read an input is multiplied by a factor f_k, and what makes channel k, a norm's weight or a row of
``up_proj``, is divided by it (as in AWQ, arXiv:2306.00978). Factors are powers of two: the dense model stays the same to the
last bit, but for float16 weights that become subnormal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.block_ops import Activate, Linear, Norm, block_ops
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.model_config import LM_HEAD, ModelConfig
from wisparse.formats.tensors import block_fields

from .calibration import CalibrationTokens
from .masking import MaskedModel
from .source import SourceModel, weights_of
from .state import NO_STATE, Stages

_BATCH_SIZE = 4  # sequences
_MOST_SEQUENCES = 4  # that the moments are taken from
_ROWS = 2048  # of a weight, evenly spaced, that the factors are fitted to
# The softmax that stands for a row's maximum has this inverse temperature; steps of the fit, and their size.
_SHARPNESS, _STEPS, _STEP = 16.0, 20, 0.1
_LEAST_GAIN = 0.9  # factors that leave more of the error are not applied
# Largest exponent of two: 1 / f - 1, the weight of a norm that multiplies by 1 + weight, then fits bfloat16.
_LARGEST = 8


@dataclass(frozen=True)
class EqualInput:
    """An input whose channels can have factors."""

    name: str  # of the first projection that reads it, or ``lm_head.weight``
    readers: tuple[str, ...]  # weights
    makers: tuple[str, ...]  # a norm's weight, or a weight and bias whose last rows are the channels
    offset: bool = False  # the norm multiplies by 1 + weight


def equal_inputs(config: ModelConfig) -> Iterator[EqualInput]:
    """The inputs that projections alone read, of a norm with a weight or of activation(gate) * up, and the output layer's.
    Not those of experts and their routers, of ``o_proj`` and ``out_proj``, and of a DeltaNet, which reads its input too."""
    arch = config.architecture
    for index in range(config.num_blocks):
        fields, ops = block_fields(config, index), block_ops(config, index)
        last: dict[str, Any] = {}  # value -> the operation that wrote it
        for op in ops:
            if isinstance(op, Linear):
                maker, projections = last.get(op.inputs[0]), op.projections
                readers = tuple(f"{one.name}.weight" for one in projections)
                if isinstance(maker, Norm) and sum(maker.output in other.inputs for other in ops) == 1:
                    norm = (fields[maker.weight].name,)
                    yield EqualInput(projections[0].name, readers, norm, config.norm(maker.weight)[1])
                elif type(maker) is Activate and config.activation != "clamped":
                    up = last[maker.inputs[0]].projections[-1]
                    makers = (f"{up.name}.weight", f"{up.name}.bias")[: 1 + up.bias]
                    yield EqualInput(projections[0].name, readers, makers)
            last[op.output] = op
    if not config.tie_word_embeddings and not arch.mtp:  # an MTP head has another norm before the output layer
        yield EqualInput(LM_HEAD, (LM_HEAD,), (f"{arch.final_norm}.weight",), config.norm("final")[1])


def second_moments(source: SourceModel, inputs: Sequence[EqualInput], tokens: CalibrationTokens) -> dict[str, Tensor]:
    """The sums of each input's squares (K,) float32, by name. First tokens count, unlike in a search: their large activations
    reach all others by attention."""
    moments: dict[str, Any] = {one.name: 0.0 for one in inputs}
    counted = tokens.keep.clone()
    counted[:, 0] = True

    def add(keep: Tensor, name: str, x: Tensor) -> None:
        if name in moments:
            moments[name] += x.flatten(0, -2)[keep.flatten().to(x.device)].float().square().sum(0)

    with MaskedModel(source.projections) as masked:
        for ids, keep in zip(tokens.input_ids.split(_BATCH_SIZE), counted.split(_BATCH_SIZE), strict=True):
            observer = partial(add, keep)
            with masked.during(observer=observer):
                observer(LM_HEAD, source.model.get_decoder()(input_ids=ids.to(source.device), use_cache=False)[0])
    return moments


def fit_factors(weights: Sequence[Tensor], moments: Tensor) -> Tensor:
    """Powers of two (K,) for the columns of ``weights`` (N, K) each, with the least rounding error found: the sum over rows r
    of s_r² times the sum over channels of moments_k / f_k², where the scale s_r is the largest |w_rk| f_k. A weight's rows
    count by the inverse of its output's energy.

    The logarithm of this error is convex in log f. At the minimum a channel's share of the second sum equals its share of
    the rows' maxima, and a step moves log f by the logarithm of their ratio.
    """
    parts = [weight[:: -(-len(weight) // _ROWS)].float().abs() for weight in weights]
    moments = (moments / moments.max().clamp(min=1e-30)).clamp(min=1e-9)
    energy = [(part.square() @ moments).sum().clamp(min=1e-30) for part in parts]
    importance = torch.cat([torch.full_like(part[:, 0], 1.0) / of for part, of in zip(parts, energy, strict=True)])
    rows = torch.cat(parts)
    logs, log_rows = torch.zeros_like(moments), rows.clamp(min=1e-12).log()
    for _ in range(_STEPS):
        moved = log_rows + logs
        of_row = importance * (2 * moved.amax(1)).exp()
        maxima = (of_row / of_row.sum()) @ (moved * _SHARPNESS).softmax(1)
        errors = moments * (-2 * logs).exp()
        logs += _STEP * (errors / errors.sum() / maxima.clamp(min=1e-12)).log().clamp(-2, 2)
    exponents = (logs - logs.mean()) / math.log(2)

    def error(factors: Tensor) -> float:
        return float((importance * (rows * factors).amax(1).square()).sum() * (moments / factors.square()).sum())

    # A common factor changes nothing but how the logarithms are rounded.
    rounded = [(exponents + offset / 8).round().clamp(-_LARGEST, _LARGEST).exp2() for offset in range(8)]
    best, ones = min(rounded, key=error), torch.ones_like(moments)
    return best if error(best) < _LEAST_GAIN * error(ones) else ones


def _divide_offset(weight: Tensor, factors: Tensor) -> Tensor:
    """The weight, float64, of a norm by 1 + weight whose channels are divided."""
    return (1.0 + weight.double()) / factors.to(weight.device) - 1.0


@torch.no_grad()
def equalize(
    source: SourceModel, checkpoint: Checkpoint, tokens: CalibrationTokens, stages: Stages = NO_STATE
) -> tuple[Checkpoint, int]:
    """Equalize the inputs of ``source``, in place, for the activations on ``tokens``. Returns the checkpoint with the same
    change, and the number of inputs. All processes call it."""
    inputs, tokens = list(equal_inputs(checkpoint.config)), tokens.spread(_MOST_SEQUENCES)
    parameters = {**weights_of(source.model, source.config), LM_HEAD: source.model.get_output_embeddings().weight}

    def find() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if stages.processes.is_main:
            with stages.progress.stage("Equalising", len(inputs)) as stage:
                moments = second_moments(source, inputs, tokens)
                for one in inputs:
                    weights = [parameters[name] for name in one.readers]
                    if one.name == LM_HEAD:  # rows count as often as their tokens occur, as by the KL
                        weights = [weights[0][tokens.input_ids[tokens.keep].to(weights[0].device)]]
                    found[one.name] = fit_factors(weights, moments[one.name]).cpu()
                    stage.advance()
        return stages.processes.broadcast(found)

    factors = stages.run("equalization", find)

    def is_kept(one: EqualInput) -> bool:
        """Whether there are factors, and the norm can be divided: 1 + weight can have more digits than the weight's dtype."""
        if not (factors[one.name] != 1.0).any():
            return False
        if not one.offset:
            return True
        weight = checkpoint.tensor(one.makers[0])
        divided = _divide_offset(weight, factors[one.name])
        return torch.equal(divided.to(weight.dtype).double(), divided)

    inputs = [one for one in inputs if is_kept(one)]
    columns = {name: factors[one.name] for one in inputs for name in one.readers}
    rows = {name: factors[one.name] for one in inputs for name in one.makers}
    offset = {one.makers[0] for one in inputs if one.offset}

    def changed(name: str, value: Tensor) -> Tensor:
        value = value.clone()
        if name in columns:
            value *= columns[name].to(value.device)
        if name in offset:
            value = _divide_offset(value, rows[name]).to(value.dtype)
        elif name in rows:
            divisor = rows[name].to(value.device)
            value[-len(divisor) :] /= divisor.view(-1, *[1] * (value.dim() - 1))
        return value

    def stored(name: str) -> Tensor:
        return changed(name, checkpoint.tensor(name))

    names = {*rows, *columns}
    for name in names:
        parameters[name].copy_(changed(name, parameters[name]))
    return checkpoint.derive({name: partial(stored, name) for name in names}), len(inputs)
