"""A model's weights on the GPU, channel-major: a kept channel is one contiguous row."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.model_config import ModelConfig, Projection
from wisparse.formats.weight_types import WEIGHT_TYPES, QuantizedMatrix, interleaved, round_weight
from wisparse.kernels.gpu.weights import DeviceWeight, FusedLinear, empty_weight, store_columns, without_default_zeros

from ..torch.block import LINEARS, Block, Norm, block_tensors, read_spec

_HEAD_ROWS = 4096  # rows of a quantized output layer that a prompt dequantizes at once, at least
_MOST_THREADS = 12  # that read files
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class CudaWeights:
    embedding: Tensor
    blocks: list[Block[FusedLinear]]
    norm: Norm
    head: Tensor  # (V, H), int8 if it has scales
    head_scales: Tensor | None  # (V,) float32
    dequantized: Tensor | None  # (n,) scratch for one projection's numbers, for prompts; None if nothing is quantized

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device; tied embeddings count once."""
        outside = [self.embedding, self.norm.weight, self.head, self.head_scales]
        outside += [tensor for block in self.blocks if block.delta is not None for tensor in vars(block.delta).values()]
        tensors = {id(tensor): tensor for tensor in outside if isinstance(tensor, Tensor)}
        return sum(tensor.nbytes for tensor in tensors.values()) + self.num_bytes_inside

    @property
    def num_bytes_inside(self) -> int:
        return sum(linear.weight.num_bytes for block in self.blocks for linear in block.linears)


@dataclass(frozen=True)
class _Source:
    """A bundle's tensors, as ``dtype`` on ``device``."""

    checkpoint: Any  # a Checkpoint, or whatever else makes tensors up
    stored: Callable[[str], Tensor]  # reads one onto the device, in its stored type, quantized ones dequantized
    graded: bool
    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str) -> Tensor:
        return self.stored(name).to(self.dtype)

    def weight(self, name: str, weights: str) -> Tensor | QuantizedMatrix:
        """A weight as ``weights`` says: quantized where it is stored so, or was asked for so."""
        how = self.checkpoint.quantised.get(name) if isinstance(self.checkpoint, Checkpoint) else None
        if how is not None and weights in ("native", how.packing.kind):
            matrix = self.checkpoint.matrix(name, self.device)
            try:
                return interleaved(matrix) if self.graded and name != _HEAD else matrix
            except ValueError as error:
                raise BundleError(f"{name}: {error}; convert again") from None
        found = self.tensor(name)
        return found if weights == "native" else self.rounded(name, found, weights)

    def rounded(self, name: str, weight: Tensor, weights: str) -> QuantizedMatrix:
        least, largest = torch.aminmax(weight)
        if not (bool(torch.isfinite(least)) and bool(torch.isfinite(largest))):
            raise BundleError(f"{name}: expected finite weights, found NaN or Inf in {self.dtype}")
        try:
            return round_weight(weight, weights)
        except ValueError as error:
            raise UsageError(f"{name}: {error}: load it with weights int8") from None

    def head(self, config: ModelConfig, embedding: Tensor, weights: str) -> Tensor | QuantizedMatrix:
        """The output layer, unquantized or int8 with a scale a row."""
        if config.tie_word_embeddings:
            return embedding if weights == "native" else self.rounded(_EMBEDDING, embedding, weights)
        found = self.weight(_HEAD, weights)
        if isinstance(found, Tensor) or (found.kind == "int8" and found.group is None and found.zeros is None):
            return found
        numbers = found.dequantise(self.dtype)
        return numbers if weights == "native" else self.rounded(_HEAD, numbers, weights)


def load_weights(bundle: Bundle, device: torch.device, dtype: torch.dtype, weights: str = "native") -> CudaWeights:
    """Read a bundle's weights onto ``device``, with its masks; copies may still be under way on the current stream."""
    config, checkpoint = bundle.config, bundle.checkpoint
    if isinstance(checkpoint, Checkpoint) and not checkpoint.quantised:
        reads: Any = staged_reads(checkpoint, _names(config), device)
    else:
        reads = nullcontext(lambda name: checkpoint.tensor(name, device).to(device))
    with reads as stored:
        graded = planes_of(bundle.masks) > 1
        source = _Source(checkpoint, stored, graded, device, dtype)
        embedding = source.tensor(_EMBEDDING)
        head = source.head(config, embedding, "int8" if graded else WEIGHT_TYPES[weights].head)
        blocks = []
        for index in range(config.num_blocks):
            spec = read_spec(config, index, source.tensor)
            loaded = (_load_linear(*one, source, weights) for one in _projections(config, index))
            linears: dict[str, Any] = dict(zip(LINEARS, loaded, strict=True))
            blocks.append(Block(**spec, **linears))
        norm = Norm(source.tensor(_NORM), config.rms_norm_eps, config.architecture.norm_offset)
        codes, scales = (head, None) if isinstance(head, Tensor) else (head.codes, head.scales.flatten())
        quantized = [linear for block in blocks for linear in block.linears if linear.weight.quant != "none"]
        widest = max((linear.in_features * max(linear.widths) for linear in quantized), default=0)
        if scales is not None:
            widest = max(widest, _HEAD_ROWS * codes.shape[1])
        scratch = torch.empty(widest, dtype=dtype, device=device) if widest else None
        unmasked = CudaWeights(embedding, blocks, norm, codes, scales, scratch)
        found = with_dense(unmasked, dense_linears(config, bundle.masks))
        put_masks(found, config, bundle.masks)
        return found


def _names(config: ModelConfig) -> Iterator[str]:
    """The tensors in the order in which they are read: the largest first, while there is memory for a temporary."""
    yield _EMBEDDING
    if not config.tie_word_embeddings:
        yield _HEAD
    for index in range(config.num_blocks):
        yield from block_tensors(config, index).values()
        for projection in config.projections(index):
            yield f"{projection.name}.weight"
            if projection.bias:
                yield f"{projection.name}.bias"
    yield _NORM


def _projections(config: ModelConfig, index: int) -> Iterator[tuple[list[Projection], int]]:
    """A block's fused linears, and how many each projection stands for: a fused gate_up_proj is two that share a mask."""
    fused = len(config.architecture.gate_up) == 1
    for role, projections in zip(LINEARS, config.shared_inputs(index), strict=True):
        yield projections, 2 if fused and role == "gate_up" else 1


def _load_linear(projections: list[Projection], copies: int, source: _Source, weights: str) -> FusedLinear:
    device, dtype, k = source.device, source.dtype, projections[0].in_features
    widths = tuple(projection.out_features // copies for projection in projections for _ in range(copies))
    fused: DeviceWeight | None = None
    biases = []
    for i, projection in enumerate(projections):
        weight = source.weight(f"{projection.name}.weight", weights)
        if fused is None:  # those of one input are stored alike
            if isinstance(weight, Tensor):
                fused = empty_weight("none", k, widths, None, dtype, device)
            else:
                options: dict[str, Any] = {"zeros": weight.zeros is not None, "planes": weight.shape[1] // k}
                fused = empty_weight(weight.kind, weight.shape[1], widths, weight.group, dtype, device, **options)
        for copy in range(copies):
            rows = slice(copy * widths[i * copies], (copy + 1) * widths[i * copies])
            if isinstance(weight, Tensor):
                store_columns(fused, i * copies + copy, weight[rows])
            else:
                part = weight.rows(rows.start, rows.stop)
                store_columns(fused, i * copies + copy, part.codes, part.scales, part.zeros)
        del weight
        none = torch.zeros(projection.out_features, dtype=dtype, device=device)
        biases.append(source.tensor(f"{projection.name}.bias") if projection.bias else none)
    assert fused is not None
    bias = torch.cat(biases) if any(projection.bias for projection in projections) else None
    scales = torch.ones(len(widths), k, dtype=torch.float32, device=device)
    thresholds = torch.zeros(len(widths) * fused.planes, dtype=torch.float32, device=device)
    return FusedLinear(without_default_zeros(fused), bias, scales, thresholds, dense=True)


def dense_linears(config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> tuple[bool, ...]:
    """Linear by linear, whether masks drop nothing: what a step is compiled for. Masks alike share their steps."""
    linears = (shared for index in range(config.num_blocks) for shared in config.shared_inputs(index))
    read_whole = {name for name, mask in masks.items() if not any((mask.threshold, *mask.plane_thresholds))}
    return tuple(all(projection.name in read_whole for projection in shared) for shared in linears)


def with_dense(weights: CudaWeights, dense: tuple[bool, ...]) -> CudaWeights:
    """The same weights for such masks: scales and thresholds are shared, no mask is in force."""
    rest, blocks = iter(dense), []
    for block in weights.blocks:
        linears = (replace(linear, dense=next(rest)) for linear in block.linears)
        changes: dict[str, Any] = dict(zip(LINEARS, linears, strict=True))
        blocks.append(replace(block, **changes))
    return replace(weights, blocks=blocks)


def put_masks(weights: CudaWeights, config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> None:
    """Write masks where the kernels read them, in place, for weights from :func:`with_dense`; captured steps go on."""
    linears = [linear for block in weights.blocks for linear in block.linears]
    scales: list[Tensor] = []
    thresholds: list[float] = []
    for index in range(config.num_blocks):
        for projections, copies in _projections(config, index):
            for projection in projections:
                mask = masks[projection.name]
                scales += [mask.channel_scale] * copies
                thresholds += [*(mask.plane_thresholds or [mask.threshold])] * copies
    # One transfer each: a transfer for every projection waits for the device as often.
    device = linears[0].scales.device
    flat, bounds = torch.cat(scales).to(device), torch.tensor(thresholds, dtype=torch.float32).to(device)
    for linear, part in zip(linears, flat.split([linear.scales.numel() for linear in linears]), strict=True):
        linear.scales.copy_(part.view_as(linear.scales))
    for linear, part in zip(linears, bounds.split([len(linear.thresholds) for linear in linears]), strict=True):
        linear.thresholds.copy_(part)


@contextmanager
def staged_reads(
    checkpoint: Checkpoint, names: Iterable[str], device: torch.device, *, threads: int = 0, part_bytes: int = 8 << 20
) -> Iterator[Callable[[str], Tensor]]:
    """Gives ``read(name)`` for ``names`` in their order: the tensor on ``device``, checked, its copy queued on the stream."""
    threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
    on_gpu = device.type == "cuda"
    parts = (
        (name, offset, min(part_bytes, checkpoint.tensors[name].nbytes - offset))
        for name in names
        for offset in range(0, checkpoint.tensors[name].nbytes, part_bytes)
    )
    # Parts that threads read from the files into memory of their own, once the copy that last read from it has ended.
    pending: deque[tuple[tuple[str, int, int], Tensor, torch.cuda.Event | None, Future[None]]] = deque()

    def fill(part: tuple[str, int, int], memory: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        name, offset, count = part
        checkpoint.read_part(name, offset, memory[:count])

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="staging") as pool:

        def submit(memory: Tensor, copied: torch.cuda.Event | None) -> None:
            part = next(parts, None)
            if part is not None:
                pending.append((part, memory, copied, pool.submit(fill, part, memory, copied)))

        def read(name: str) -> Tensor:
            info = checkpoint.tensors[name]
            tensor = torch.empty(info.shape, dtype=info.dtype, device=device)
            flat = tensor.view(-1).view(torch.uint8)
            for _ in range(0, info.nbytes, part_bytes):
                (owner, offset, count), memory, copied, future = pending.popleft()
                if owner != name:
                    raise ValueError(f"expected {owner} to be read next, found {name}")
                future.result()
                flat[offset : offset + count].copy_(memory[:count], non_blocking=True)
                if copied is not None:
                    copied.record()
                submit(memory, copied)
            return tensor

        try:
            for _ in range(2 * threads):  # half of them being read, half on their way to the device
                memory = torch.empty(part_bytes, dtype=torch.uint8, pin_memory=on_gpu)
                submit(memory, torch.cuda.Event() if on_gpu else None)
            yield read
        finally:
            for *_, future in pending:
                future.cancel()
