"""Which decoder runs a bundle."""

from __future__ import annotations

import logging
from typing import Any

import torch

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.formats.guard import arguments
from wisparse.formats.model.model_config import ModelConfig
from wisparse.formats.model.weight_types import WEIGHT_TYPES
from wisparse.kernels.backend import choose_backend

from .decoding.decoder import Decoder
from .decoding.memory import memory_errors

__all__ = ["choose_decoder", "make_decoder"]

log = logging.getLogger(__name__)


def make_decoder(
    bundle: Bundle,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_seq_len: int,
    backend: str = "auto",
    weights: str = "native",
    max_batch: int = 1,
) -> Decoder:
    """Build the decoder that ``backend`` names, or the fastest one that can run this bundle there.

    The choice and its reason are logged. ``auto`` falls back to plain PyTorch if the faster one refuses the model;
    a back end asked for by name is never replaced.

    Args:
        bundle: an opened bundle; its weights are read here, once.
        device, dtype: where, and in which floating type.
        max_seq_len: positions of one slot, 1 to the model's context.
        backend: ``auto``, ``torch``, ``numba`` or ``triton``.
        weights: ``native`` (as ``dtype`` says, or the bundle's codes where they can be multiplied with), or one of the
            other ``WEIGHT_TYPES`` (rounded at load; not every back end has them).
        max_batch: slots, that is, sequences decoded side by side.

    Raises:
        UsageError: a back end that does not fit the device, dtype, weights or model.
    """
    if not 1 <= max_seq_len <= bundle.config.max_position_embeddings:
        raise UsageError(
            f"max_seq_len: expected 1 to the model's context of {bundle.config.max_position_embeddings}, "
            f"found {max_seq_len}"
        )
    arguments.integer("max_batch", max_batch, 1)
    implementation, reason = choose_decoder(bundle.config, device, dtype, backend, weights)
    log.info("back end %s on %s in %s: %s", implementation.name, device, str(dtype).removeprefix("torch."), reason)
    _log_widened(bundle, implementation, weights)
    with memory_errors(device, "to load the model"):
        return implementation(
            bundle, device=device, dtype=dtype, weights=weights, max_seq_len=max_seq_len, max_batch=max_batch
        )


def choose_decoder(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, backend: str, weights: str
) -> tuple[type[Any], str]:
    """The decoder that runs such a model there, and why; arguments and errors as for :func:`make_decoder`."""
    arguments.choice("weights", weights, tuple(WEIGHT_TYPES))
    try:
        choice = choose_backend(device, dtype, backend)
    except ValueError as error:
        raise UsageError(str(error)) from error
    reason = choice.reason
    implementation = _implementation(choice.name)
    refused: str | None = implementation.refusal(config, device, dtype, weights)
    if refused is not None and backend == "auto" and choice.name != "torch":
        reason = f"{choice.name} cannot: {refused}"
        implementation = _implementation("torch")
        refused = implementation.refusal(config, device, dtype, weights)
        if refused is not None:
            raise UsageError(f"no back end can run this model on {device}: {reason}; torch cannot: {refused}")
    if refused is not None:
        raise UsageError(f"back end {implementation.name} cannot run this model: {refused}")
    return implementation, reason


def _log_widened(bundle: Bundle, implementation: type[Any], weights: str) -> None:
    """What a bundle's codes become where nothing multiplies with them as they are."""
    others = {
        stored.packing.kind if stored.packing.group is None else f"{stored.packing.kind} (groups)"
        for stored in bundle.checkpoint.quantised.values()
        if weights not in ("native", stored.packing.kind) or not implementation.keeps(stored)
    }
    if others:
        then = "" if weights == "native" else f", and rounds them to {weights}"
        kinds = ", ".join(sorted(others))
        log.info("back end %s widens the bundle's %s weights at load%s", implementation.name, kinds, then)


def _implementation(name: str) -> type[Any]:
    """The decoder of a back end; imported when chosen, because numba and triton cost seconds."""
    if name == "numba":
        from .cpu.decoder import CpuDecoder

        return CpuDecoder
    if name == "triton":
        from .cuda.decoder import CudaDecoder

        return CudaDecoder
    from .torch.decoder import TorchDecoder

    return TorchDecoder
