"""The memory of a decoder: bytes of weights, of the KV cache's pages and recurrent states, and the limits that fit."""

from __future__ import annotations

import bisect
import math
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.errors import ResourceError, first_line
from wisparse.formats.machine import available_bytes
from wisparse.formats.model_config import LM_HEAD, Block, ModelConfig
from wisparse.formats.tensors import PER_LAYER_EMBEDDING, expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES, code_bytes

# Share of the memory free beside the weights that the KV cache may use. Activations and CUDA graphs need 1 to 2 GB of a
# GPU's. A CPU's memory is shared with other programs: the larger share applies only if both limits are arguments.
_CACHE_SHARES = {"cuda": 0.7, "cpu": 0.25}
_FEWEST_POSITIONS = 256
_SERVED_POSITIONS = 2048  # positions per slot by which the default max_batch is chosen
_SLOT_CHECKPOINTS = 8  # default copies of recurrent states per slot
_MOST_SLOTS = {"cuda": 32, "cpu": 8}
# In torch's messages for errors that are a plain RuntimeError.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
# Quantized types of keys and values, and the largest code.
KV_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
PAGE_POSITIONS = 16  # of the widest block in a page that is only counted; vLLM's block size
# Bytes of created pages by device, which torch.cuda.memory_allocated does not include.
mapped_bytes: Counter[torch.device] = Counter()


def weight_bytes(
    bundle: Bundle,
    dtype: torch.dtype,
    weights: str,
    keeps: Callable[[StoredWeight, bool], bool],
    *,
    routed: bool = True,
) -> int:
    """Memory of a bundle's weights as type ``weights``, other tensors in ``dtype``; keeps: `Decoder.keeps`. ``routed``:
    include routed experts."""
    chosen = WEIGHT_TYPES[weights]
    excluded = () if routed else {part for one in bundle.config.projections() if one.experts for part in one.parts}
    total = 0
    for name, shape in expected_tensors(bundle.config).items():
        if name.removesuffix(".weight") in excluded:
            continue
        head = "int8" if bundle.recipe.graded else chosen.head
        kind = "native" if "embed" in name else head if name == LM_HEAD else weights
        # Per-layer embeddings stay in their stored type.
        native = getattr(torch, bundle.config.dtype, dtype) if name == PER_LAYER_EMBEDDING else dtype
        stored = bundle.checkpoint.quantised.get(name)
        if stored is not None and kind in ("native", stored.packing.kind) and keeps(stored, bundle.recipe.graded):
            packing = stored.packing
            bits = 4 if packing.kind == "int4" else 8
            total += code_bytes(bits, shape, packing.group, zero_points=packing.zero_points)
        else:
            total += WEIGHT_TYPES[kind].nbytes(shape, native) * (2 if bundle.recipe.graded and stored else 1)
    if bundle.config.tie_word_embeddings and chosen.head != "native":  # the output layer is a second copy
        total += WEIGHT_TYPES[chosen.head].nbytes((bundle.config.vocab_size, bundle.config.hidden_size), dtype)
    return total


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on a GPU, else the resident memory of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) + mapped_bytes[device]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def bytes_per_position(config: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> int:
    """Bytes of one position's keys and values in all blocks that have their own."""
    blocks = [block for block in config.blocks if block.stores_kv]
    return sum(nbytes for block in blocks for _, nbytes in stored_parts(block, dtype, kv_cache_dtype))


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one state of a slot in all recurrent blocks."""
    shapes = [state_shapes(config, block) for block in config.blocks if block.recurrent]
    return sum(math.prod(inputs) * dtype.itemsize + 4 * math.prod(state) for inputs, state in shapes)


def state_shapes(config: ModelConfig, block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the tensors of a block's `RecurrentState`."""
    if config.short_conv is not None and block.mixer == "short_conv":
        return (config.short_conv.taps - 1, config.hidden_size), (0,)
    if (mamba := config.mamba2) is not None:
        return (mamba.taps - 1, mamba.mixed_size), (mamba.heads, mamba.state_dim, mamba.head_dim)
    assert config.delta_net is not None
    delta = config.delta_net
    return (delta.taps - 1, delta.mixed_size), (delta.value_heads, delta.key_dim, delta.value_dim)


class Paging(NamedTuple):
    """How the cache's memory is divided. A page belongs to one block of one slot."""

    sizes: tuple[int, ...]  # bytes of a position in each block that has keys and values
    page_bytes: int
    least: int = 0  # pages that slot 0 never releases

    def pages(self, positions: int) -> int:
        """Pages of ``positions`` of a slot."""
        return sum(-(-positions * size // self.page_bytes) for size in self.sizes)

    def positions(self, pages: int, limit: int) -> int:
        """Most positions of one slot in ``pages``, less those of slot 0, up to ``limit``."""
        return bisect.bisect_right(range(1, limit + 1), pages - self.least, key=self.pages)


def paging_of(config: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str, page_bytes: int | None) -> Paging:
    """``page_bytes``: of mapped pages; None: pages are only counted."""
    kept = [block for block in config.blocks if block.stores_kv]
    sizes = tuple(padded(sum(padded(n, 16) for _, n in stored_parts(one, dtype, kv_cache_dtype)), 32) for one in kept)
    if page_bytes is None:
        return Paging(sizes, PAGE_POSITIONS * max(sizes, default=1))
    # The first page of each block stays mapped: Triton and torch query the driver about its address.
    return Paging(sizes, page_bytes, Paging(sizes, page_bytes).pages(1))


def stored_parts(block: Block, dtype: torch.dtype, kv_cache_dtype: str) -> list[tuple[torch.dtype, int]]:
    """Dtype and bytes of a position's keys and values, and of their scales if quantized; with latents of keys alone."""
    quantised = kv_cache_dtype != "auto"
    kind = KV_CODES[kv_cache_dtype][0] if quantised else dtype
    parts = [(kind, block.kv_size * kind.itemsize), (torch.float32, 4 * block.num_kv_heads)][: 1 + quantised]
    return [part for part in parts for _ in range(1 if block.latent else 2)]


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def states_kept(max_drafted: int) -> int:
    """States per slot of a recurrent block: before the newest token, and after it and each drafted token."""
    return max_drafted + 2 if max_drafted else 1


def default_limits(
    config: ModelConfig, device: torch.device, max_batch: int | None, max_seq_len: int | None, weight_bytes: int,
    paging: Paging, slot_bytes: int = 0, head_bytes: int = 0, memory_bytes: int | None = None, state_bytes: int = 0,
    checkpoints: int | None = None,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Resolved ``max_batch`` and ``max_seq_len``, the cache's pages, and the most ``checkpoints`` of recurrent states, of
    ``state_bytes`` each; by default ``_SLOT_CHECKPOINTS`` a slot in at most a quarter of the memory. Default batch: slots
    of ``_SERVED_POSITIONS`` that fit, up to ``_MOST_SLOTS``. Default length: the model's context, or the positions, a
    multiple of 256, of one sequence in all pages. ``slot_bytes``: of a slot's recurrent states; ``head_bytes``: of its
    part of a draft head's cache. ``memory_bytes``: of the cache; None: a share of the free memory."""
    per_slot = slot_bytes + head_bytes
    longest = config.max_position_embeddings
    memory = memory_bytes
    if memory is None:
        explicit = max_batch is not None and max_seq_len is not None
        share = _CACHE_SHARES["cuda" if explicit else device.type]
        memory = int(max(available_bytes(device) - weight_bytes, 0) * share)
    if max_batch is None:
        served = paging.pages(min(max_seq_len or longest, _SERVED_POSITIONS)) * paging.page_bytes + per_slot
        max_batch = min(max(memory // served, 1), _MOST_SLOTS[device.type])
    if checkpoints is None or not state_bytes:
        checkpoints = min(_SLOT_CHECKPOINTS * max_batch, memory // 4 // state_bytes) if state_bytes else 0
    pages = max(memory - max_batch * per_slot - checkpoints * state_bytes, 0) // paging.page_bytes
    fitting = paging.positions(pages, longest)
    if memory_bytes is not None and fitting < min(max_seq_len or _FEWEST_POSITIONS, longest):
        draft_head = f", beside {max_batch * head_bytes:,} bytes of the draft head" if head_bytes else ""
        raise ResourceError(
            f"kv_cache_memory_bytes: {memory_bytes:,} bytes hold {fitting} positions of one sequence{draft_head}, expected "
            f"{min(max_seq_len or _FEWEST_POSITIONS, longest)}: give more, or a smaller max_seq_len"
        )
    if max_seq_len is None:
        rounded = max(fitting // _FEWEST_POSITIONS * _FEWEST_POSITIONS, _FEWEST_POSITIONS)
        max_seq_len = longest if fitting >= longest else min(rounded, longest)
    slot_pages = paging.pages(max_seq_len)
    return max_batch, max_seq_len, min(max(pages, slot_pages + paging.least), max_batch * slot_pages), checkpoints


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Convert out-of-memory errors of Python and torch to ResourceError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(one in text for one in _NO_MEMORY):
            raise
        raise ResourceError(
            f"not enough memory on {device} {doing} ({first_line(error)}): end what else uses it, choose another "
            "device, or load with a smaller max_seq_len or max_batch"
        ) from error
