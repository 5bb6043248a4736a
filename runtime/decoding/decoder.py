"""How much memory a model needs, how much was used, and what is said where there is not enough."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from wisparse.formats.errors import ContextLengthError, ResourceError, UsageError, first_line
from wisparse.formats.machine import available_bytes
from wisparse.formats.model_config import LM_HEAD, ModelConfig, expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES, code_bytes
from wisparse.kernels.reference import activation_dtype

from .cache import bytes_per_position
from .sampling import SamplingParams, sample

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask
    from wisparse.formats.checkpoint import StoredWeight


class Decoder(Protocol):
    """One model on one device, with ``max_batch`` slots of up to ``max_seq_len`` positions.

    Implementations subclass it. They are constructed as ``Implementation(bundle, device=..., dtype=..., weights=...,
    max_seq_len=..., max_batch=...)`` by ``backends.make_decoder``, which has asked ``refusal`` before.

    Not safe to call from several threads at once: ``engine`` sees to it that one at a time does. After any exception,
    also a KeyboardInterrupt, inside ``prefill``, ``decode`` or ``step`` the slots are undefined until their next
    ``prefill`` from position 0, and that must then work.

    Attributes:
        name: ``torch``, ``numba`` or ``triton``.
        weight_types: which of ``WEIGHT_TYPES`` it can hold weights as.
        config: the model's dimensions.
        device, dtype: where the weights are, and their floating type; activations between projections have this type.
        max_batch: number of slots.
        max_seq_len: positions of one slot, at most ``config.max_position_embeddings``.
        piece: positions of a prompt that are read in one go: the pieces of a prompt begin at multiples of it.
        prefix_block_size: a slot's first positions can serve another prompt up to a multiple of it. Where that is the piece,
            what comes after is the same to the last bit whether they were read anew or not: each piece is computed
            from the same matrices either way. On a GPU it is 1, and products of other shapes round otherwise.
    """

    name: ClassVar[str]
    weight_types: ClassVar[tuple[str, ...]]
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_batch: int
    max_seq_len: int
    prefill_chunk: int
    prefix_block_size: int

    @classmethod
    def refusal(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, weights: str) -> str | None:
        """Why this implementation cannot run such a model there, as a clause without a full stop; None if it can.

        Must be cheap: called before any weight is read.
        """
        return None

    @classmethod
    def keeps(cls, stored: StoredWeight) -> bool:
        """Whether it multiplies with a weight's codes as a bundle stores them, where it may (``weights`` native or of
        their kind); if not, they are widened at load."""
        return False

    def bytes_read(self) -> tuple[int, int]:
        """Bytes of the projections' weights and of the output layer's, as a step reads them: all that it keeps."""
        ...

    @property
    def prefill_chunk_under_load(self) -> int:
        """As ``piece``, while other sequences wait for their next token; ``piece`` is a multiple of it."""
        return self.prefill_chunk

    @property
    def lengths(self) -> list[int]:
        """Positions filled in each of the ``max_batch`` slots, counted on the host (no device synchronisation)."""
        ...

    def prefill(
        self,
        slot: int,
        token_ids: Tensor,
        sparse_from: int,
        *,
        start: int = 0,
        stop: int | None = None,
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Read a prompt into a slot, or a part of it; what the slot held from ``start`` on is forgotten.

        Positions before ``sparse_from`` run dense, the others with the bundle's masks (policy ``dense``: T, ``half``:
        T - T // 2, ``all``: 0). Memory must not grow with T**2.

        Rotary scaling ``longrope`` takes its long factors for the whole prompt if T is above
        ``original_max_position_embeddings``, else the short ones, as transformers does.

        Args:
            slot: 0 to ``max_batch`` - 1.
            token_ids: (T,) int64, on any device, 1 <= T <= ``max_seq_len``, every id in [0, vocab_size).
            sparse_from: 0 to T.
            start: positions before it stand in the slot already: read from the same tokens, with the same positions
                sparse and (``longrope``) the same factors. Below ``stop``.
            stop: positions from it on are left for later calls; None for T.
            on_logits: called with the logits (n, V) of all positions read, chunk by chunk, in order.

        Returns:
            (V,) float32 on ``device``: logits of the last position read. Valid until the decoder's next call.

        Raises:
            ContextLengthError: T is 0 or above ``max_seq_len`` (see :func:`check_prompt`).
        """
        ...

    def decode(self, token_ids: Tensor) -> Tensor:
        """Append one token to each of the slots 0..B-1, with the bundle's masks.

        A negative id marks an idle row: its slot stays as it is; its row of the result is undefined (it must cost no
        error, even if the slot is full or was never filled).

        ``longrope``: the position's own factors (long beyond ``original_max_position_embeddings``). Keys cached with
        the short factors would not fit them, so the caller prefills the sequence anew at that point, as transformers
        does; ``generation.Scheduler`` takes care of it.

        Args:
            token_ids: (B,) int64, on any device, 1 <= B <= ``max_batch``.

        Returns:
            (B, V) float32 on ``device``. Valid until the decoder's next call.

        Raises:
            ContextLengthError: a slot that is not idle holds ``max_seq_len`` positions already.
        """
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Fill a slot with the first ``length`` positions of another one.

        Args:
            source, target: slots.
            length: 1 to the positions that ``source`` holds.
        """
        ...

    def step(
        self,
        token_ids: Tensor,
        settings: Sequence[SamplingParams],
        adjust: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """``decode``, then choose the next token of every row: what the generation loop calls.

        An implementation that samples on its device (in its graph, say) overrides this. It has to give what
        ``sampling.sample`` gives: for greedy rows the lowest id among the most probable; for sampled rows the same
        filters and the same random numbers, ``sampling.uniform(seed, position)`` with position = the slot's length
        after the append, that is, the position the chosen token will have; -1 for a row whose logits are not finite.

        Args:
            token_ids: (B,) int64, as for ``decode``.
            settings: B of them, one for each row, seeds resolved.
            adjust: changes the logits (B, V) in place before tokens are chosen from them; called once. What it raises
                comes out of here.

        Returns:
            (B,) int64, on ``device`` or on the CPU; idle rows hold anything.
        """
        logits = self.decode(token_ids)
        if adjust is not None:
            logits = logits.clone()
            adjust(logits)
        active = next((row for row, token in enumerate(token_ids.tolist()) if token >= 0), 0)  # the first one
        chosen = sample(logits[active:], settings[active:], self.lengths[active : len(settings)])
        return chosen if active == 0 else torch.cat((chosen.new_full((active,), -1), chosen))

    def prepare(self, slots: Sequence[int], first: int, last: int, *, sampled: bool = False) -> None:
        """Do now what the first of some steps would do before it runs: compile kernels, capture graphs.

        Args:
            slots: those that are not idle in the steps.
            first, last: how many positions the longest of them holds after the first step and after the last.
            sampled: whether tokens are drawn.
        """
        return None

    def prepare_prompts(self) -> None:
        """Do now what the first long prompt would do before it is read: for a server, whose clients would all wait."""
        return None

    def prepare_batches(self) -> None:
        """Do now what the first step of some later batch would do: for a server, whose running answers would wait."""
        return None

    def logits(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        """Logits of every position of one sequence, for evaluation; no slot is changed.

        Args:
            token_ids: (T,) int64, as for ``prefill``.
            sparse_from: as for ``prefill``.

        Returns:
            (T, V) float32 on ``device``.
        """
        ...

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        """Put other masks in force: another sparsity level of the same bundle, or none that drops anything.

        Costs milliseconds, as no weight is touched. ``lengths`` are 0 afterwards, and nothing is counted. A slot's
        first positions that were read dense still stand there, the same under any masks: ``prefill`` may go on behind
        them (``start``), and ``copy`` take them. What was computed with other masks is no longer of use.

        Args:
            masks: projection name -> mask, for every projection.
        """
        ...

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        """Start counting dropped channels from zero, or stop; ``every``: one decode step of so many is enough.

        What it costs: a decode step runs the same launches either way. ``triton`` counts in them (one number a program
        writes; the choice of the kernel and of the graph is all that differs), ``numba`` always does, so both decode
        as fast as without; ``torch``, the readable one, adds up every mask it makes, some percent. Positions of a
        prompt that run sparse (prefill ``half`` or ``all``, and ``logits``) are masked a second time to count them.
        """
        ...

    def realised_sparsity(self) -> float | None:
        """Share of the projections' weights that needed no reading at the sparse positions since counting began.

        Dropped channels over all channels, each weighted by the projection's number of parameters, dense projections
        included; None if nothing was counted or this implementation cannot count.
        """
        return None

    def close(self) -> None:
        """Give the memory back; the decoder cannot be used any more. Closing twice is fine."""
        ...


def check_prompt(length: int, max_seq_len: int) -> None:
    """Raise ContextLengthError unless ``1 <= length <= max_seq_len``."""
    if length < 1:
        raise ContextLengthError("the prompt has no tokens: give at least one")
    if length > max_seq_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens and the context holds {max_seq_len}: "
            "shorten it, or load with a larger max_seq_len if the model allows one"
        )


def check_part(token_ids: Tensor, max_seq_len: int, start: int, stop: int | None) -> int:
    """``stop`` of a prefill, its default resolved.

    Raises:
        ContextLengthError: the prompt does not fit.
        UsageError: not ``0 <= start < stop <= T``.
    """
    total = len(token_ids)
    check_prompt(total, max_seq_len)
    stop = total if stop is None else stop
    if not 0 <= start < stop <= total:
        raise UsageError(f"start, stop: expected 0 <= start < stop <= {total}, found {start} and {stop}")
    return stop


def check_capacity(token_ids: Sequence[int], lengths: Sequence[int], max_seq_len: int) -> None:
    """Raise ContextLengthError if a slot that is given a token (none is negative) holds ``max_seq_len`` positions."""
    for slot, token in enumerate(token_ids):
        if token >= 0 and lengths[slot] >= max_seq_len:
            raise ContextLengthError(f"slot {slot} is full: it holds {max_seq_len} positions")


def prompt_chunks(start: int, stop: int, total: int, size: int, sparse_from: int) -> Iterator[tuple[int, int, int]]:
    """The pieces, at most ``size`` long, of the positions ``start`` to ``stop`` of a sequence of ``total``.

    Yields:
        First and last position (this one not included), and how many of them stand before ``sparse_from``.

    Raises:
        UsageError: not ``0 <= sparse_from <= total``.
    """
    if not 0 <= sparse_from <= total:
        raise UsageError(f"sparse_from: expected 0 to {total}, found {sparse_from}")
    while start < stop:
        end = min(next_chunk(start, size), stop)
        yield start, end, min(max(sparse_from - start, 0), end - start)
        start = end


def next_chunk(start: int, piece: int) -> int:
    """Where the piece that position ``start`` lies in ends."""
    return (start // piece + 1) * piece


# The cache may take this share of the memory that the weights leave free.
_CACHE_SHARE = 0.25
_FEWEST_POSITIONS = 256
# How torch says it where the error has no type of its own.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def weight_bytes(
    bundle: Bundle, dtype: torch.dtype, weights: str, keeps: Callable[[StoredWeight], bool] = lambda _: False
) -> int:
    """What a bundle's weights take in memory, matrices held as ``weights`` says, all else as numbers of ``dtype``. The
    files may hold another type.

    Args:
        keeps: whether a weight that is stored in codes stays so, as of a `decoder.Decoder`.
    """
    chosen = WEIGHT_TYPES[weights]
    total = 0
    for name, shape in expected_tensors(bundle.config).items():
        kind = "native" if "embed" in name else chosen.head if name == LM_HEAD else weights
        stored = bundle.checkpoint.quantised.get(name)
        if stored is not None and kind in ("native", stored.packing.kind) and keeps(stored):
            packing = stored.packing
            bits = 4 if packing.kind == "int4" else 8
            total += code_bytes(bits, shape, packing.group, zero_points=packing.zero_points)
        else:
            total += WEIGHT_TYPES[kind].nbytes(shape, dtype)
    return total


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Turn what torch raises when a device has no memory left into a sentence.

    Raises:
        ResourceError: there is not enough.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = str(error).lower()
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(one in words for one in _NO_MEMORY):
            raise
        raise ResourceError(
            f"not enough memory on {device} {doing} ({first_line(error)}): end what else uses it, choose another "
            "device, or load with a smaller max_seq_len or max_batch"
        ) from error


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: of the device on a GPU, else resident memory of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def default_max_seq_len(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_batch: int, weight_bytes: int
) -> int:
    """The model's context, or as many positions as fit into a quarter of the memory that the weights leave free.

    At least 256, and rounded down to a multiple of 256 unless it is the model's context.
    """
    if device.type == "cuda":
        dtype = activation_dtype(dtype)
    free = max(available_bytes(device) - weight_bytes, 0)
    fitting = int(free * _CACHE_SHARE) // (bytes_per_position(config, dtype) * max_batch)
    if fitting >= config.max_position_embeddings:
        return config.max_position_embeddings
    rounded = max(fitting // _FEWEST_POSITIONS * _FEWEST_POSITIONS, _FEWEST_POSITIONS)
    return min(rounded, config.max_position_embeddings)
