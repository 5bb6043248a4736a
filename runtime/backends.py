"""Loading a model from a folder or a Hub id, and the choice of its back end."""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.machine import choose_device
from wisparse.formats.manifest import unread
from wisparse.formats.weight_types import DTYPES, KV_CACHE_DTYPES, NOT_DTYPES, PREFILL_POLICIES, WEIGHT_TYPES
from wisparse.kernels.backend import BACKENDS, choose_backend

from .choice import auto_max_kl, choose_weights, rows_of
from .decoding.decoder import Decoder
from .decoding.heads import HeadFiles, MtpFiles
from .generation.speculation import SpeculativeConfig, make_drafter
from .measured_choice import choose_level
from .memory import default_limits, memory_errors, paging_of, state_bytes, states_kept, weight_bytes
from .model import Model
from .tokenizer import Tokenizer
from .torch.decoder import TorchDecoder

log = logging.getLogger(__name__)

_LARGEST_BATCH = 2**16  # far above what any device holds
_HEADED_POSITIONS = 16384  # most positions per slot that memory of a draft head is reserved for


def decoder_class(device: torch.device, dtype: torch.dtype, backend: str) -> tuple[type[Decoder], str, str]:
    """The decoder's class of ``backend``, its name, and why it was chosen."""
    try:
        name, reason = choose_backend(device, dtype, backend)
    except ValueError as error:
        raise UsageError(str(error)) from error
    chosen: type[Decoder] = TorchDecoder
    if name == "numba":  # imported here: numba and triton take seconds
        from .cpu.decoder import CpuDecoder as chosen
    elif name == "triton":
        from .cuda.decoder import CudaDecoder as chosen
    return chosen, name, reason


def make_decoder(
    bundle: Bundle,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_seq_len: int | None,
    backend: str = "auto",
    weights: str = "native",
    max_batch: int | None = 1,
    kv_cache_dtype: str = "auto",
    kv_cache_memory_bytes: int | None = None,
    drafting: tuple[Bundle, str] | None = None,
    max_drafted: int = 0,
    head: HeadFiles | MtpFiles | None = None,
    state_checkpoints: int | None = None,
) -> Decoder:
    """Construct the decoder of ``backend``; ``auto``: the fastest that supports the model. Arguments as for :func:`load`;
    ``drafting``: for `Decoder.draft_by_steps`; ``max_drafted``: see `Decoder`; ``head``: a draft head."""
    longest = bundle.config.max_position_embeddings
    if bundle.recipe.graded and weights != "native":
        raise UsageError(f"weights: expected native for a graded bundle, which has its own, found {weights!r}")
    if max_seq_len is not None and not 1 <= max_seq_len <= longest:
        raise UsageError(f"max_seq_len: expected 1 to the model's context of {longest}, found {max_seq_len}")
    chosen, name, reason = decoder_class(device, dtype, backend)
    refused = chosen.refusal(bundle.config, weights)
    if refused is not None and backend == "auto" and name != "torch":
        reason, chosen = f"{name} cannot: {refused}", TorchDecoder
        refused = chosen.refusal(bundle.config, weights)
        if refused is not None:
            raise UsageError(f"no back end can run this model on {device}: {reason}; torch cannot: {refused}")
    if refused is not None:
        raise UsageError(f"back end {chosen.name} cannot run this model: {refused}")
    rounded = drafting[1] if drafting is not None and drafting[1] != "native" else None
    if rounded is not None and (refused := chosen.refusal(bundle.config, rounded)):
        raise UsageError(f"speculative: bits: back end {chosen.name} cannot: {refused}")
    lack = chosen.memory_shortfall(bundle, device, dtype, weights)
    nbytes = weight_bytes(bundle, dtype, weights, chosen.keeps, routed=lack is None)
    nbytes += weight_bytes(bundle, dtype, rounded, chosen.keeps) if rounded is not None else 0
    head_bytes, head_position_bytes = head.memory(dtype) if head is not None else (0, 0)
    with memory_errors(device, "to begin with"):
        paging = paging_of(bundle.config, dtype, kv_cache_dtype, chosen.page_bytes)
        state = state_bytes(bundle.config, dtype)
        headed = head_position_bytes * min(max_seq_len or longest, _HEADED_POSITIONS)
        sizes = nbytes + head_bytes, paging, states_kept(max_drafted) * state, headed, kv_cache_memory_bytes, state
        limits = default_limits(bundle.config, device, max_batch, max_seq_len, *sizes, state_checkpoints)
    if max_seq_len is None and limits[1] < longest:
        text = "max_seq_len %d: the model's context of %d does not fit the free memory's share"
        log.info(text, limits[1], longest)
    max_batch, max_seq_len, pages, checkpoints = limits
    log.info("back end %s on %s in %s: %s", chosen.name, device, str(dtype).removeprefix("torch."), reason)
    dequantized = {
        stored.packing.kind if stored.packing.group is None else f"{stored.packing.kind} (groups)"
        for stored in bundle.checkpoint.quantised.values()
        if weights not in ("native", stored.packing.kind) or not chosen.keeps(stored, bundle.recipe.graded)
    }
    if dequantized:
        rounding = "" if weights == "native" else f", and rounds them to {weights}"
        kinds = ", ".join(sorted(dequantized))
        log.info("back end %s dequantizes the bundle's %s weights at load%s", chosen.name, kinds, rounding)
    with memory_errors(device, "to load the model"):
        decoder = chosen(
            bundle, device=device, dtype=dtype, weights=weights, max_seq_len=max_seq_len, max_batch=max_batch,
            kv_cache_dtype=kv_cache_dtype, max_drafted=max_drafted, pages=pages, lack=lack,
        )  # fmt: skip
        decoder.max_checkpoints = checkpoints
        log.info("KV cache: %s, allocated as sequences grow", decoder.cache)
        if drafting is not None:
            decoder.draft_by_steps(*drafting)
        if head is not None:
            decoder.attach(head)
        return decoder


def drafting_level(bundle: Bundle, config: SpeculativeConfig, weights: str) -> tuple[Bundle, str]:
    """For the method ``self``: a bundle at the level of the drafts, and the type that weights are rounded to."""
    stored = {one.packing.kind for one in bundle.checkpoint.quantised.values()}
    if bundle.recipe.graded and config.sparsity is None and config.bits == 4:  # the high planes alone
        masks = {
            name: replace(mask, threshold=0.0, sparsity=0.5, plane_thresholds=(0.0, math.inf))
            for name, mask in next(iter(bundle.levels.values())).items()
        }
        return replace(bundle, levels={unread(4): masks}, sparsity=unread(4)), "native"
    if bundle.recipe.graded or config.bits is None:
        try:
            return bundle.at(config.sparsity, config.bits), "native"
        except UsageError as error:
            raise UsageError(f"speculative: {error}") from None
    if config.bits != 4 or weights == "int4" or (weights == "native" and "int4" in stored):
        expected = "weights of more bits, as int4 ones have" if config.bits == 4 else "4"
        raise UsageError(f"speculative: bits: expected {expected}, found {config.bits:g}")
    return bundle.at(config.sparsity or 0.0), "int4"


# Names in transformers, vLLM and llama.cpp of arguments of `load`, for the error message.
_OTHER_NAMES = {
    "torch_dtype": "dtype",
    "cache_dtype": "kv_cache_dtype",
    "attn_implementation": "backend",
    "ctx_checkpoints": "state_checkpoints",
    **dict.fromkeys(("device_map", "tensor_parallel_size"), "device"),
    **dict.fromkeys(("quantization", "quantization_config", "load_in_8bit", "load_in_4bit"), "weights"),
    **dict.fromkeys(("max_model_len", "n_ctx", "max_length", "context_length"), "max_seq_len"),
    **dict.fromkeys(("max_num_seqs", "batch_size"), "max_batch"),
    **dict.fromkeys(("gpu_memory_utilization", "kv_cache_size"), "kv_cache_memory_bytes"),
    **dict.fromkeys(("speculative_config", "speculative_model", "assistant_model"), "speculative"),
}


def load(
    bundle: str | os.PathLike[str] | Bundle,
    *,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    weights: str | None = None,
    sparsity: float | None = None,
    bits: float | None = None,
    max_kl: float | str | None = "auto",
    prefill: str = "dense",
    max_seq_len: int | None = None,
    max_batch: int | None = 1,
    kv_cache_dtype: str = "auto",
    kv_cache_memory_bytes: int | None = None,
    state_checkpoints: int | None = None,
    revision: str | None = None,
    speculative: Mapping[str, Any] | str | None = None,
    **unknown: Any,
) -> Model:
    """Load a bundle.

    Args:
        bundle: a folder, a Hub id ``USER/NAME`` (a folder that exists wins), or an opened bundle.
        device: ``auto`` (the first NVIDIA GPU, else the CPU), ``cpu``, ``cuda``, ``cuda:1``, …
        dtype: ``auto`` (the weights' own), ``bfloat16``, ``float16`` or ``float32``.
        backend: ``auto`` (the fastest that can run it; choice and reason are logged), ``torch``, ``numba``, ``triton``.
        weights: ``native``, or rounded where the back end can: ``int8`` (a scale a row), ``int4`` (a scale for each
            group of 128 channels, or the largest divisor below), ``fp8`` (e4m3, a scale a row; NVIDIA GPUs); the output
            layer is int8 with any of them.
        max_kl: choose the fastest weight type and sparsity level on this machine whose KL is at most this, nats per token,
            by the bundle's quality table and a measurement of a second that is remembered. ``auto``: 0.05, or
            ``$WISPARSE_MAX_KL``, for a folder or Hub id; None: the default level. Arguments ``weights``, ``sparsity``
            and ``bits`` win, and a bundle without a table is loaded natively at its default level.
        sparsity: one of the bundle's sparsity levels, or 0 for the dense model; None: its default, or the chosen level of
            an opened bundle. ``model.sparsity`` changes it while no request runs.
        bits: instead of ``sparsity`` for a graded bundle, the bits read per weight; 8 is the dense int8 model.
            ``model.bits`` changes it.
        prefill: which prompt tokens are sparse: ``dense`` none, ``half`` the last half, ``all`` every one.
        max_seq_len: most tokens of prompt and answer. None: the model's context, or as many as the KV cache's memory can
            hold.
        max_batch: most sequences decoded together; others wait. The speedup by sparsity is largest at 1. None: as many
            as memory holds with 2,048 tokens each, up to 32 (8 on a CPU).
        kv_cache_dtype: type of keys and values: ``auto`` (``dtype``), or one byte per element and a scale for each
            position and head: ``int8``, or ``fp8`` (e4m3), which costs more quality at the same size.
        kv_cache_memory_bytes: most memory of the KV cache. None: 70% of the memory free beside the weights; on a CPU a
            quarter unless ``max_seq_len`` and ``max_batch`` are numbers.
        state_checkpoints: most copies of recurrent states that are kept, so that a prompt which begins like an earlier one
            is read from where they part; part of the KV cache's memory. None: 8 a sequence, in at most a quarter of that
            memory. No effect on models without recurrent blocks.
        revision: branch, tag or commit on the Hub.
        speculative: speculative decoding, a mapping or its JSON. ``method`` ``ngram``: prompt lookup, with vLLM's keys
            ``num_speculative_tokens`` (7), ``prompt_lookup_min`` (3) and ``prompt_lookup_max`` (8). ``self``: the model
            drafts at another level of the bundle, ``sparsity`` or ``bits`` (4 in a bundle that is not graded: a second
            copy of the weights, rounded to int4), with ``num_speculative_tokens`` (4). ``eagle3``: an EAGLE-3 head
            drafts, ``model`` is its folder or Hub id. ``mtp``: the MTP head in a Qwen3.5 bundle drafts. ``auto``:
            ``ngram`` if it changes no token and the model has no recurrent blocks; None: off.

    Raises:
        AccessError: no such folder or repository, no permission, no network.
        BundleError: damaged, inconsistent or too new.
        UsageError: arguments that contradict each other, or a sparsity that the bundle lacks.
        ResourceError: not enough memory.
    """
    parameters = [name for name in inspect.signature(load).parameters if name not in ("bundle", "unknown")]
    guard.keywords("load", unknown, parameters, _OTHER_NAMES)
    if not isinstance(bundle, Bundle):
        guard.place("bundle", bundle)
    target = choose_device(device)
    guard.choice("dtype", dtype, ("auto", *DTYPES), NOT_DTYPES)
    guard.choice("backend", backend, ("auto", *BACKENDS))
    if weights is not None:
        guard.choice("weights", weights, tuple(WEIGHT_TYPES))
    if max_kl == "auto":
        max_kl = None if isinstance(bundle, Bundle) else auto_max_kl()
    elif max_kl is not None:
        max_kl = guard.number("max_kl", max_kl, 0, math.inf, "a number of nats per token, 0 or more, auto or None")
    guard.choice("prefill", prefill, PREFILL_POLICIES)
    guard.choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    max_batch = None if max_batch is None else guard.integer("max_batch", max_batch, 1, _LARGEST_BATCH)
    max_seq_len = None if max_seq_len is None else guard.integer("max_seq_len", max_seq_len, 1)
    if kv_cache_memory_bytes is not None:
        kv_cache_memory_bytes = guard.integer("kv_cache_memory_bytes", kv_cache_memory_bytes, 1)
    if state_checkpoints is not None:
        state_checkpoints = guard.integer("state_checkpoints", state_checkpoints, 0, _LARGEST_BATCH)
    revision = None if revision is None else guard.text("revision", revision, empty=False)
    config = SpeculativeConfig() if speculative in (None, "auto") else SpeculativeConfig.parse(speculative)
    start = time.perf_counter()
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(fetch_bundle(bundle, revision))
    opened = opened.chosen(sparsity, bits)
    explicit, recurrent = speculative not in (None, "auto"), opened.config.has_states
    head: HeadFiles | MtpFiles | None = HeadFiles.open(config.model, opened) if config.model is not None else None
    if config.method == "mtp":
        head = MtpFiles.open(opened)
    if head is not None and max_batch is None and max_seq_len is None:  # its memory is reserved at full length
        max_seq_len = min(opened.config.max_position_embeddings, _HEADED_POSITIONS)
    chosen = opened.checkpoint.dtype if dtype == "auto" else getattr(torch, dtype)
    given, supported = weights, ["native"]
    if max_kl is not None and sparsity is None and bits is None and opened.recipe.quality is not None:
        kind, _, _ = decoder_class(target, chosen, backend)
        supported = [one for one in WEIGHT_TYPES if kind.refusal(opened.config, one) is None] or supported
        if opened.recipe.graded:
            supported = ["native"]
        if not rows_of(opened, weights, supported):
            max_kl = None
        else:
            weights = choose_weights(opened, chosen, weights, supported, max_kl)
    else:
        max_kl = None
    weights = weights or "native"
    text = Tokenizer.from_bundle(opened) if opened.read_bytes("tokenizer.json") is not None else None
    decoder = make_decoder(
        opened, device=target, dtype=chosen, max_seq_len=max_seq_len, backend=backend, weights=weights,
        max_batch=max_batch, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=kv_cache_memory_bytes,
        drafting=drafting_level(opened, config, weights) if config.method == "self" else None,
        max_drafted=config.num_speculative_tokens if explicit else 0, head=head, state_checkpoints=state_checkpoints,
    )  # fmt: skip
    log.info("loaded %s in %.1f s", opened.folder.name, time.perf_counter() - start)
    # In recurrent blocks a draft needs memory for a state per token: no default.
    decoder.speculates = explicit or (speculative == "auto" and decoder.verifies_alike and not recurrent)
    if decoder.speculates:
        log.info("speculation: %s", config)
    drafter = make_drafter(config, decoder.verify_costs, decoder.draft_cost, ())
    if config.method != "ngram" and not drafter.propose(config.num_speculative_tokens):
        reason = "a drafted token takes %.2f of a step, and its verification more than it saves"
        log.warning(f"speculative: no drafts are made: {reason}", decoder.draft_cost)
    model = Model(opened, decoder, text, prefill, config if decoder.speculates else None)
    if max_kl is not None:
        model.choice = choose_level(model, weights, given, supported, max_kl)
    return model
