"""Loading of a model's weights and masks onto the GPU, transposed: a channel is one contiguous row."""

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
from torch.nn import functional

from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.model_config import ModelConfig, Projection
from wisparse.formats.tensors import StackedExperts, block_fields, stacked_experts
from wisparse.formats.weight_types import WEIGHT_TYPES, QuantizedMatrix, interleaved, round_weight
from wisparse.kernels.gpu.experts import ExpertLinear, empty_experts
from wisparse.kernels.gpu.weights import DeviceWeight, FusedLinear, empty_weight, store_columns, without_default_zeros

from ..torch.block import SHARED, Block, Norm, norm_embedding, read_spec, roles_of

_HEAD_ROWS = 4096  # rows of a quantized output layer that fit into ``CudaWeights.dequantized``, at least
_MOST_THREADS = 12  # of ``staged_reads``
_HEAD = "lm_head.weight"

EXPERTS = ("gate_up", "down")  # roles that may be an ExpertLinear
AnyLinear = FusedLinear | ExpertLinear


@dataclass(frozen=True)
class CudaWeights:
    embedding: Tensor
    blocks: list[Block[AnyLinear]]
    norm: Norm
    head: Tensor  # (V, H), int8 if it has scales
    head_scales: Tensor | None  # (V,) float32
    dequantized: Tensor | None  # (n,) scratch for one dequantized projection, for prompts; None: nothing is quantized

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device; tied embeddings count once."""
        outside = [self.embedding, self.norm.weight, self.head, self.head_scales]
        outside += [block.router for block in self.blocks]
        mixers = [
            mixer
            for block in self.blocks
            for mixer in (block.delta, block.conv, block.mamba, block.latent)
            if mixer is not None
        ]
        outside += [tensor for mixer in mixers for tensor in vars(mixer).values()]
        tensors = {id(tensor): tensor for tensor in outside if isinstance(tensor, Tensor)}
        inside = sum(linear.weight.num_bytes for block in self.blocks for linear in block.linears)
        return sum(tensor.nbytes for tensor in tensors.values()) + inside

    @property
    def num_bytes_read(self) -> int:
        """Bytes of the projections that a token reads: of experts the chosen ones."""
        return sum(linear.num_bytes_read for block in self.blocks for linear in block.linears)

    @property
    def dense_weights(self) -> int:
        """Weights (times planes) of the linears that drop nothing, for one row."""
        linears = (linear for block in self.blocks for linear in block.linears if linear.dense)
        read = ((linear, linear.chosen if isinstance(linear, ExpertLinear) else 1) for linear in linears)
        return sum(one.in_features * one.weight.planes * one.out_features * times for one, times in read)


@dataclass(frozen=True)
class _Source:
    """A bundle's tensors, converted to ``dtype`` on ``device``."""

    checkpoint: Any  # a Checkpoint, or a stand-in with generated tensors
    stored: Callable[[str], Tensor]  # a tensor on the device in its stored dtype; dequantized if quantized
    graded: bool
    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str) -> Tensor:
        return self.stored(name).to(self.dtype)

    def weight(self, name: str, weights: str, group: int | None = None) -> Tensor | QuantizedMatrix:
        """A weight of the type ``weights``; "native": as it is stored. ``group``: as of `round_weight`."""
        stored = self.checkpoint.quantised.get(name) if isinstance(self.checkpoint, Checkpoint) else None
        if stored is not None and weights in ("native", stored.packing.kind):
            matrix = self.checkpoint.matrix(name, self.device)
            try:
                return interleaved(matrix) if self.graded and name != _HEAD else matrix
            except ValueError as error:
                raise BundleError(f"{name}: {error}; convert again") from None
        found = self.tensor(name)
        return found if weights == "native" else self.rounded(name, found, weights, group)

    def rounded(self, name: str, weight: Tensor, weights: str, group: int | None = None) -> QuantizedMatrix:
        least, largest = torch.aminmax(weight)
        if not (bool(torch.isfinite(least)) and bool(torch.isfinite(largest))):
            raise BundleError(f"{name}: expected finite weights, found NaN or Inf in {self.dtype}")
        try:
            return round_weight(weight, weights, group)
        except ValueError as error:
            raise UsageError(f"{name}: {error}: load it with weights int8") from None

    def head(self, config: ModelConfig, embedding: Tensor, weights: str) -> Tensor | QuantizedMatrix:
        """The output layer, unquantized or int8 with a scale for each row."""
        if config.tie_word_embeddings:
            return embedding if weights == "native" else self.rounded(config.embedding, embedding, weights)
        found = self.weight(_HEAD, weights)
        if isinstance(found, Tensor) or (found.kind == "int8" and found.group is None and found.zeros is None):
            return found
        head = found.dequantise(self.dtype)
        return head if weights == "native" else self.rounded(_HEAD, head, weights)


def load_weights(bundle: Bundle, device: torch.device, dtype: torch.dtype, weights: str = "native") -> CudaWeights:
    """Read a bundle's weights and masks onto ``device``; the copies are asynchronous on the current stream."""
    config, checkpoint = bundle.config, bundle.checkpoint
    if isinstance(checkpoint, Checkpoint) and not checkpoint.quantised:
        layout = config.architecture.experts
        places = {} if layout is None or layout.stacked is None else stacked_experts(config)
        names = (places[name].name if name in places else name for name in _names(config))
        reads: Any = _reads_of_parts(staged_reads(checkpoint, dict.fromkeys(names), device), places)
    else:
        reads = nullcontext(lambda name: checkpoint.tensor(name, device).to(device))
    with reads as stored:
        graded = planes_of(bundle.masks) > 1
        source = _Source(checkpoint, stored, graded, device, dtype)
        embedding = norm_embedding(config, source.tensor(config.embedding))
        head = source.head(config, embedding, "int8" if graded else WEIGHT_TYPES[weights].head)
        blocks = []
        for index in range(config.num_blocks):
            spec, experts = read_spec(config, index, stored, dtype), config.blocks[index].experts
            if experts is not None and spec["shared_gate"] is not None:  # stored as the router's last row
                spec["router"] = torch.cat((spec["router"], spec["shared_gate"]))
            linears: dict[str, Any] = {
                role: _load_linear(own, copies, source, weights)
                if experts is None or role not in EXPERTS
                else _load_experts(own, shared, source, weights)
                for role, own, shared, copies in _linears(config, index)
            }
            blocks.append(Block(**spec | {"shared_gate": None}, **linears))
        norm = Norm(source.tensor(f"{config.architecture.final_norm}.weight"), *config.norm("final"))
        codes, scales = (head, None) if isinstance(head, Tensor) else (head.codes, head.scales.flatten())
        linears_of = (linear for block in blocks for linear in block.linears if isinstance(linear, FusedLinear))
        quantized = [linear for linear in linears_of if linear.weight.quant != "none"]
        widest = max((linear.in_features * max(linear.widths) for linear in quantized), default=0)
        if scales is not None:
            widest = max(widest, _HEAD_ROWS * codes.shape[1])
        scratch = torch.empty(widest, dtype=dtype, device=device) if widest else None
        unmasked = CudaWeights(embedding, blocks, norm, codes, scales, scratch)
        found = with_dense(unmasked, dense_linears(config, bundle.masks))
        put_masks(found, config, bundle.masks)
        return found


def _names(config: ModelConfig) -> Iterator[str]:
    """Tensor names in reading order: the largest first, while there is memory for temporaries."""
    yield config.embedding
    if not config.tie_word_embeddings:
        yield _HEAD
    for index in range(config.num_blocks):
        yield from (one.name for one in block_fields(config, index).values())
        for _, own, shared, _ in _linears(config, index):
            yield from (f"{part}.weight" for projection in (*own, *shared) for part in projection.parts)
            biased = (projection for projection in (*own, *shared) if projection.bias)
            yield from (f"{part}.bias" for projection in biased for part in projection.parts)
    yield f"{config.architecture.final_norm}.weight"


@contextmanager
def _reads_of_parts(reads: Any, places: Mapping[str, StackedExperts]) -> Iterator[Callable[[str], Tensor]]:
    """``reads`` for checkpoints with all experts of a block in one tensor; keeps the last such tensor."""
    whole: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        place = places.get(name)
        if place is None:
            return stored(name)
        if place.name not in whole:
            whole.clear()
            whole[place.name] = stored(place.name)
        return place.of(whole[place.name][place.expert])

    with reads as stored:
        yield read


def _linears(config: ModelConfig, index: int) -> Iterator[tuple[str, list[Projection], list[Projection], int]]:
    """A block's linears: role; projections; those of a shared expert stored among the experts; number of projections, each
    with a mask of its own, that one tensor stores (2 for a fused gate_up_proj). A dense MLP beside experts has its own roles."""
    fused, experts = config.architecture.gate_up == ("gate_up_proj",), config.blocks[index].experts
    own = config.shared_inputs(index)
    parallel = experts is not None and experts.parallel_mlp
    roles = roles_of(config, index)
    alone = [role for role in roles if role not in SHARED]
    shared = {} if parallel else dict(zip(EXPERTS, own[len(alone) :], strict=False))
    for role, projections in zip(roles if parallel else alone, own, strict=False):
        yield role, projections, shared.get(role, []), 2 if fused and role == "gate_up" else 1


def _load_experts(own: list[Projection], shared: list[Projection], source: _Source, weights: str) -> ExpertLinear:
    """Gate and up, up alone, or down, of all experts, followed by a shared expert's, divided into parts of an expert's
    size."""
    first, down, found = own[0], own[0].role == "down_proj", None
    size = first.in_features if down else first.out_features  # intermediate size of an expert
    num_parts = 0
    if shared:
        num_parts = -(-(shared[0].in_features if down else shared[0].out_features) // size)
    for i, projection in enumerate(own):
        for expert, part in enumerate(projection.parts):
            weight = source.weight(f"{part}.weight", weights)
            if found is None:  # all have the same type
                kind, group, zeros = _stored_as(weight)
                found = empty_experts(
                    first.experts + num_parts, first.chosen + num_parts, kind, weight.shape[1],
                    tuple(one.out_features for one in own), group, source.dtype, source.device, zeros=zeros,
                    planes=weight.shape[1] // first.in_features,
                )  # fmt: skip
            _store(found.one(expert).weight, i, weight)
    assert found is not None
    for i, projection in enumerate(shared):
        weight = source.weight(f"{projection.name}.weight", weights, group)  # in groups of the experts'
        width = size * found.weight.planes if down else size
        other, of_shared, _ = _stored_as(weight)
        if (other, of_shared) != (kind, group) or (down and group is not None and width % group):
            raise BundleError(
                f"{projection.name}: expected weights like the experts', {kind} in groups of {group}, found {other} in "
                f"groups of {of_shared}; convert again"
            )
        for part_index in range(num_parts):
            part_weight = _part_of(weight, part_index * width, width, down)
            _store(found.one(first.experts + part_index).weight, i, part_weight)
    bias: Tensor | None = None
    if any(projection.bias for projection in (*own, *shared)):
        biases = [
            torch.zeros(len(found.scales), one.out_features, dtype=source.dtype, device=source.device) for one in own
        ]
        for projections, start in ((own, 0), (shared, first.experts)):
            for projection, rows in zip(projections, biases, strict=False):
                if projection.bias:  # a shared down's is of its first part
                    values = torch.cat([source.tensor(f"{part}.bias") for part in projection.parts])
                    rows[start:].view(-1)[: len(values)] = values
        bias = torch.cat(biases, dim=1)
    return replace(found, weight=without_default_zeros(found.weight), bias=bias)


def _stored_as(weight: Tensor | QuantizedMatrix) -> tuple[str, int | None, bool]:
    """Kind, group, and whether there are zero points."""
    return (
        ("none", None, False) if isinstance(weight, Tensor) else (weight.kind, weight.group, weight.zeros is not None)
    )


def _part_of(weight: Tensor | QuantizedMatrix, first: int, size: int, down: bool) -> Tensor | QuantizedMatrix:
    """``size`` rows of a weight (N, K) from ``first`` on, or columns of down's, padded by zeros. Down's padding is not
    dequantized to 0, but its input, the padded gate and up, is."""

    def cut(tensor: Tensor, per_element: int = 1) -> Tensor:
        stop = -(-(first + size) // per_element)
        tensor = tensor[:, first // per_element : stop] if down else tensor[first : first + size]
        missing = size // per_element - tensor.shape[1] if down else size - len(tensor)
        return functional.pad(tensor, (0, missing) if down else (0, 0, 0, missing)) if missing > 0 else tensor

    if isinstance(weight, Tensor):
        return cut(weight)
    codes = cut(weight.codes.view(torch.uint8), 2 if down and weight.kind == "int4" else 1)
    scales, zeros = weight.scales, weight.zeros
    if not down or weight.group is not None:
        group = (weight.group or 1) if down else 1
        scales, zeros = cut(scales, group), None if zeros is None else cut(zeros, group)
    shape = (weight.shape[0], size) if down else (size, weight.shape[1])
    return replace(weight, codes=codes, scales=scales, zeros=zeros, shape=shape)


def _store(target: DeviceWeight, index: int, weight: Tensor | QuantizedMatrix) -> None:
    if isinstance(weight, Tensor):
        store_columns(target, index, weight)
    else:
        store_columns(target, index, weight.codes, weight.scales, weight.zeros)


def _load_linear(projections: list[Projection], copies: int, source: _Source, weights: str) -> FusedLinear:
    device, dtype, k = source.device, source.dtype, projections[0].in_features
    widths = tuple(projection.out_features // copies for projection in projections for _ in range(copies))
    fused: DeviceWeight | None = None
    for i, projection in enumerate(projections):
        weight = source.weight(f"{projection.name}.weight", weights)
        if fused is None:  # projections of the same input have the same type
            if isinstance(weight, Tensor):
                fused = empty_weight("none", k, widths, None, dtype, device)
            else:
                options: dict[str, Any] = {"zeros": weight.zeros is not None, "planes": weight.shape[1] // k}
                fused = empty_weight(weight.kind, weight.shape[1], widths, weight.group, dtype, device, **options)
        for copy in range(copies):
            rows = slice(copy * widths[i * copies], (copy + 1) * widths[i * copies])
            part = weight[rows] if isinstance(weight, Tensor) else weight.rows(rows.start, rows.stop)
            _store(fused, i * copies + copy, part)
        del weight
    assert fused is not None
    bias: Tensor | None = None
    if any(projection.bias for projection in projections):
        zeros = [torch.zeros(projection.out_features, dtype=dtype, device=device) for projection in projections]
        biases = [source.tensor(f"{one.name}.bias") if one.bias else zeros[i] for i, one in enumerate(projections)]
        bias = torch.cat(biases)
    scales = torch.ones(len(widths), k, dtype=torch.float32, device=device)
    thresholds = torch.zeros(len(widths) * fused.planes, dtype=torch.float32, device=device)
    return FusedLinear(without_default_zeros(fused), bias, scales, thresholds, dense=True)


def dense_linears(config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> tuple[bool, ...]:
    """For each linear whether its masks drop nothing. Kernels are compiled for it, so masks with equal results share
    steps."""
    linears = ((*own, *shared) for index in range(config.num_blocks) for _, own, shared, _ in _linears(config, index))
    dense = {name for name, mask in masks.items() if not any((mask.threshold, *mask.plane_thresholds))}
    return tuple(all(projection.name in dense for projection in projections) for projections in linears)


def with_dense(weights: CudaWeights, dense: tuple[bool, ...], *, copy_masks: bool = False) -> CudaWeights:
    """The same weights with ``dense`` set for each linear. Scales and thresholds, for ``put_masks`` to fill, are shared
    with ``weights``, or copies."""
    rest, blocks = iter(dense), []
    for block in weights.blocks:
        linears = [replace(linear, dense=next(rest)) for linear in block.linears]
        if copy_masks:
            linears = [replace(one, scales=one.scales.clone(), thresholds=one.thresholds.clone()) for one in linears]
        changes: dict[str, Any] = dict(zip(block.roles, linears, strict=True))
        blocks.append(replace(block, **changes))
    return replace(weights, blocks=blocks)


def put_masks(weights: CudaWeights, config: ModelConfig, masks: Mapping[str, ProjectionMask]) -> None:
    """Write masks in place to weights from :func:`with_dense`, so that captured steps use them."""
    linears = [linear for block in weights.blocks for linear in block.linears]
    scales: list[Tensor] = []
    thresholds: list[Tensor] = []
    for index, block in enumerate(weights.blocks):
        for linear, (_, own, shared, copies) in zip(block.linears, _linears(config, index), strict=True):
            of_own = [masks[projection.name] for projection in own for _ in range(copies)]
            limits = torch.tensor([[*(mask.plane_thresholds or [mask.threshold])] for mask in of_own])
            if isinstance(linear, FusedLinear):
                scales.append(torch.stack([mask.channel_scale for mask in of_own]))
                thresholds.append(limits)
                continue
            experts, k = own[0].experts, linear.in_features
            scales.append(torch.stack([mask.channel_scale for mask in of_own], 1))
            thresholds.append(limits.flatten().expand(experts, -1))
            if shared:  # divided like its weights: down's input channels among the parts, padded by zeros
                of_shared, num_parts = [masks[projection.name] for projection in shared], len(linear.scales) - experts
                rows = torch.stack([mask.channel_scale for mask in of_shared])
                parts = functional.pad(rows, (0, -rows.shape[1] % k)).view(len(rows), -1, k).transpose(0, 1)
                scales.append(parts.expand(num_parts, -1, -1))
                limits = torch.tensor([[*(mask.plane_thresholds or [mask.threshold])] for mask in of_shared])
                thresholds.append(limits.flatten().expand(num_parts, -1))
    # One transfer for all scales and one for all thresholds: each transfer synchronizes with the device.
    device = linears[0].scales.device
    flat, bounds = (torch.cat([part.flatten() for part in parts]).to(device) for parts in (scales, thresholds))
    for linear, part in zip(linears, flat.split([linear.scales.numel() for linear in linears]), strict=True):
        linear.scales.copy_(part.view_as(linear.scales))
    for linear, part in zip(linears, bounds.split([linear.thresholds.numel() for linear in linears]), strict=True):
        linear.thresholds.copy_(part.view_as(linear.thresholds))


@contextmanager
def staged_reads(
    checkpoint: Checkpoint, names: Iterable[str], device: torch.device, *, threads: int = 0, part_bytes: int = 8 << 20
) -> Iterator[Callable[[str], Tensor]]:
    """Yields ``read(name)``, to be called for ``names`` in their order: the tensor on ``device``, copied asynchronously
    on the current stream from pinned buffers that ``threads`` fill from the files."""
    threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
    on_gpu = device.type == "cuda"
    parts = (
        (name, offset, min(part_bytes, checkpoint.tensors[name].nbytes - offset))
        for name in names
        for offset in range(0, checkpoint.tensors[name].nbytes, part_bytes)
    )
    # Parts in order: (name, offset, bytes), its buffer, the event of the buffer's last copy, the file read.
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
            info, order = checkpoint.tensors[name], checkpoint.orders.get(name)
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
            return tensor if order is None else tensor[list(order)]

        try:
            for _ in range(2 * threads):  # half of the buffers being filled, half being copied
                memory = torch.empty(part_bytes, dtype=torch.uint8, pin_memory=on_gpu)
                submit(memory, torch.cuda.Event() if on_gpu else None)
            yield read
        finally:
            for *_, future in pending:
                future.cancel()
