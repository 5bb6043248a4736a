"""The dense self of a loaded bundle: the same weights on the same back end, with every mask off."""

from __future__ import annotations

import dataclasses

from .decoder import make_decoder
from .model import Model

__all__ = ["without_masks"]


def without_masks(model: Model, *, weights: str = "native") -> Model:
    """A dense twin of ``model``, which may be closed already: weights are read anew, one of the two can be in memory.

    Args:
        model: a loaded bundle; device, dtype, context and slots are taken from it.
        weights: as for `load`.
    """
    masks = {name: dataclasses.replace(mask, threshold=0.0, sparsity=0.0) for name, mask in model.bundle.masks.items()}
    bundle = dataclasses.replace(model.bundle, masks=masks)
    twin = model.decoder
    decoder = make_decoder(
        bundle,
        device=twin.device,
        dtype=twin.dtype,
        max_seq_len=twin.max_seq_len,
        backend=twin.name,
        weights=weights,
        max_batch=twin.max_batch,
    )
    return Model(bundle, decoder, model.text, model.prefill)
