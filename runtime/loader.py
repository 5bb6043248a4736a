"""Loading: from a folder or a Hub id to a model that answers."""

from __future__ import annotations

import logging
import os
import time

import torch

from wisparse.formats.bundle import Bundle
from wisparse.formats.guard import arguments
from wisparse.formats.guard.sandbox import together
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.machine.device import choose_device
from wisparse.formats.model.weight_types import DTYPES, WEIGHT_TYPES
from wisparse.formats.prefill import PREFILL_POLICIES
from wisparse.kernels.backend import BACKENDS

from .backends import choose_decoder, make_decoder
from .decoding.memory import default_max_seq_len, memory_errors, weight_bytes
from .model import Model
from .text.edge import Text

__all__ = ["load", "pick_dtype"]

log = logging.getLogger(__name__)

# Far above what any device holds; a slip of the hand is refused before memory is asked for.
_LARGEST_BATCH = 2**16


@together()
def load(
    bundle: str | os.PathLike[str],
    *,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    weights: str = "native",
    sparsity: float | None = None,
    prefill: str = "dense",
    max_seq_len: int | None = None,
    max_batch: int = 1,
    revision: str | None = None,
) -> Model:
    """Load a bundle.

    Args:
        bundle: a folder, or a Hub id ``USER/NAME``; a folder that exists wins.
        device: ``auto`` (the first NVIDIA GPU, else the CPU), ``cpu``, ``cuda``, ``cuda:1``, …
        dtype: ``auto`` (the weights' own), ``bfloat16``, ``float16`` or ``float32``.
        backend: ``auto`` (the fastest that can run it; the choice and its reason are logged), ``torch``, ``numba`` or
            ``triton``.
        weights: ``native``, or rounded where the back end can: ``int8`` (a scale a row), ``int4`` (a scale for each
            group of 128 channels, or the largest divisor below), ``fp8`` (e4m3, a scale a row; NVIDIA GPUs); the output
            layer is int8 with any of them.
        sparsity: one of the bundle's rungs, or 0 for the dense model; None: the bundle's default. ``model.sparsity``
            changes it between two answers.
        prefill: which prompt tokens are sparse: ``dense`` none, ``half`` the last half, ``all`` every one.
        max_seq_len: tokens that prompt and answer may have together. None: the model's context, or as many as a quarter
            of the memory that the weights leave free can hold.
        max_batch: prompts decoded side by side; more of them wait their turn. Sparsity pays most at 1.
        revision: branch, tag or commit on the Hub.

    Raises:
        AccessError: no such folder or repository, no permission, no network.
        BundleError: damaged, inconsistent or too new.
        UsageError: arguments that contradict each other, or a sparsity that the bundle lacks.
        ResourceError: not enough memory.
    """
    arguments.place("bundle", bundle)
    target = choose_device(device)
    arguments.choice("dtype", dtype, ("auto", *DTYPES))
    arguments.choice("backend", backend, ("auto", *BACKENDS))
    arguments.choice("weights", weights, tuple(WEIGHT_TYPES))
    arguments.choice("prefill", prefill, PREFILL_POLICIES)
    max_batch = arguments.integer("max_batch", max_batch, 1, _LARGEST_BATCH)
    max_seq_len = None if max_seq_len is None else arguments.integer("max_seq_len", max_seq_len, 1)
    revision = None if revision is None else arguments.text("revision", revision, empty=False)
    start = time.perf_counter()
    folder = fetch_bundle(bundle, revision)
    opened = Bundle.open(folder)
    if sparsity is not None:
        opened = opened.at(sparsity)
    chosen = pick_dtype(opened, dtype)
    text = Text.from_bundle(opened) if opened.read_bytes("tokenizer.json") is not None else None
    if max_seq_len is None:
        implementation, _ = choose_decoder(opened.config, target, chosen, backend, weights)
        needed = weight_bytes(opened, chosen, weights, implementation.keeps)
        with memory_errors(target, "to begin with"):
            max_seq_len = default_max_seq_len(opened.config, chosen, target, max_batch, needed)
        if max_seq_len < opened.config.max_position_embeddings:
            log.info(
                "max_seq_len %d: the model's context of %d does not fit a quarter of the free memory",
                max_seq_len,
                opened.config.max_position_embeddings,
            )
    decoder = make_decoder(
        opened,
        device=target,
        dtype=chosen,
        max_seq_len=max_seq_len,
        backend=backend,
        weights=weights,
        max_batch=max_batch,
    )
    log.info("loaded %s in %.1f s", folder.name, time.perf_counter() - start)
    return Model(opened, decoder, text, prefill)


def pick_dtype(bundle: Bundle, dtype: str) -> torch.dtype:
    """The floating type that a name stands for; ``auto`` is that of the bundle's weights."""
    if dtype != "auto":
        return DTYPES[dtype]
    return bundle.checkpoint.dtype
