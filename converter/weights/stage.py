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
from wisparse.formats.model.model_config import ModelConfig
from wisparse.formats.model.quantised import Kind, QuantizedMatrix, quantise_fp8, quantise_int8

from ..model.flow import BlockFlow
from ..model.source import SourceModel
from ..text.tokens import CalibrationTokens
from ..work.progress import Progress
from ..work.state import Store, pack, unpack
from .gptq import fit_int4

__all__ = ["group_size", "quantise_weights"]

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
