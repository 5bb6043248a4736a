"""The product of a masked layer as one torch operator, ``wisparse::masked_linear``, and its launches on a GPU."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.bundle import ProjectionMask
from wisparse.kernels.reference import keep_mask

from .settings import may_mask

if TYPE_CHECKING:  # Triton need not be installed
    from wisparse.kernels.gpu.products import Product

log = logging.getLogger("vllm.wisparse")
HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 16  # elements: rows of the weights can be read 16 bytes at a time
CODE_ROWS = 16  # up to which our products of codes take a batch in place of vLLM's
GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64)  # of vLLM's usual graphs
WIDE = 1 << 16  # outputs; above it large batches are split


def channel_major(weight: Tensor) -> Tensor:
    """The same (N, K) matrix with each column contiguous, on a GPU; a CPU has no kernel that would gain from it."""
    if not weight.is_cuda or weight.stride(0) == 1:
        return weight
    n, k = weight.shape
    weight_t = torch.empty(k, -(-n // _ALIGNED) * _ALIGNED, dtype=weight.dtype, device=weight.device)
    weight_t[:, :n] = weight.t()
    return weight_t[:, :n].t()


def mask_tensors(masks: Sequence[ProjectionMask], channels: slice) -> tuple[Tensor, Tensor]:
    """Scales (projections, K) of these channels and thresholds (projections,), or one for each plane, both float32."""
    # Explicitly: vLLM builds models with the weights' type as torch's default.
    scales = torch.stack([mask.channel_scale[channels] for mask in masks]).float()
    thresholds = [threshold for mask in masks for threshold in mask.plane_thresholds or (mask.threshold,)]
    return scales, torch.tensor(thresholds, dtype=torch.float32)


@dataclass(frozen=True)
class Layer:
    """Projections that read the same input, and their masks: arguments of `masked_linear`."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor
    thresholds: Tensor
    widths: Sequence[int]
    codes: str = ""  # their type, if the weight holds codes in our layout
    code_scales: Tensor | None = None
    code_zeros: Tensor | None = None

    def linear(self, dtype: torch.dtype, *, dense: bool = False) -> Any:
        """The ``FusedLinear`` for activations of ``dtype``; a threshold of 0 drops nothing, so it need not be dense."""
        from wisparse.kernels.gpu.weights import DeviceWeight, FusedLinear, unquantized

        widths, scales = tuple(self.widths), self.code_scales
        if scales is None:
            weight = unquantized(self.weight.t(), widths)
        else:
            group, planes = len(self.weight) // len(scales), len(self.thresholds) // len(widths)
            weight = DeviceWeight(self.codes, self.weight, scales, self.code_zeros, group, dtype, widths, planes)
        return FusedLinear(weight, self.bias, self.scales, self.thresholds, dense=dense)

    def parts(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Each projection's weight (width, K), of graded weights (2, width, K), and bias (width,)."""
        widths = list(self.widths)
        biases: Sequence[Tensor | None] = [None] * len(widths) if self.bias is None else self.bias.split(widths)
        return zip(self.weight.split(widths, dim=-2), biases, strict=True)


@dataclass(frozen=True, eq=False)
class Placed:
    """What the host knows of a weight besides the operator's arguments, which are all that a compiled graph holds."""

    dense: bool  # its masks drop nothing
    many: Callable[[Tensor, Tensor | None], Tensor] | None = None  # vLLM's product of the same weights, of x and bias


PLACED: weakref.WeakValueDictionary[int, Placed] = weakref.WeakValueDictionary()  # by the weight's address
_UNKNOWN = Placed(dense=False)


def masked_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    thresholds: Tensor,
    masked: Tensor,
    widths: list[int],
    ready: bool = False,
    codes: str = "",
    code_scales: Tensor | None = None,
    code_zeros: Tensor | None = None,
) -> Tensor:
    """Projections of x (..., K) that read the same input, over the channels that each row keeps: (..., N). weight: (N,
    K), on a GPU with contiguous columns, the projections' outputs side by side; bias: (N,); scales: (projections, K)
    float32; thresholds: (projections,) float32; masked: (rows or more,) float32, 1 for a row that is masked, else 0;
    widths: outputs of each projection; ready: x comes from `mask_ahead`. Of quantised weights on a GPU, ``DeviceWeight``'s:
    weight: the codes, codes: their type, code_scales and code_zeros. Of graded weights thresholds: (projections * 2,), and
    in plain torch weight: (2, N, K), itself and its low plane. Batches of more than 16 rows are dense where vLLM's own
    product takes them."""
    finish_compiling()
    count = x.numel() // x.shape[-1]
    if count > len(masked):
        raise RuntimeError(f"expected a batch of at most {len(masked)} tokens, found {count}")
    placed = PLACED.get(weight.data_ptr(), _UNKNOWN)
    if placed.many is not None and count > CODE_ROWS:
        return placed.many(x, bias)
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    dense = placed.dense or not (capturing or may_mask(masked))
    if dense and code_scales is None:
        return functional.linear(x, weight if weight.dim() == 2 else weight[0], bias)
    rows, masked = x.reshape(-1, x.shape[-1]).contiguous(), masked[:count]
    layer = Layer(weight, bias, scales, thresholds, widths, codes, code_scales, code_zeros)
    if code_scales is not None:
        y = of_codes(rows, layer, masked, dense=placed.dense or (dense and count > CODE_ROWS))
    elif not (x.is_cuda and x.dtype in HALF):
        y = functional.linear(rows, weight, bias) if ready else in_torch(rows, layer, masked)
    else:
        product = product_of(layer, x.dtype, count, ready=ready)
        if ready and not product.fused:
            y = functional.linear(rows, weight, bias)
        else:
            y = launched(product, rows, layer, masked)
    return y.reshape(*x.shape[:-1], sum(widths))


_LIBRARY = torch.library.Library("wisparse", "FRAGMENT")


def register_operator(of: Callable[..., Tensor], fake: Callable[..., Tensor], mutates: Sequence[str] = ()) -> None:
    """Make ``of`` the operator of its name, on GPUs and CPUs; ``fake``: its output without numbers; ``mutates``: arguments
    that it changes. Not by torch.library.custom_op, whose wrapper takes as long as a product's launch where no graph is
    replayed."""
    _LIBRARY.define(of.__name__ + torch.library.infer_schema(of, mutates_args=tuple(mutates)))
    for place in ("CUDA", "CPU"):
        _LIBRARY.impl(of.__name__, of, place)
    torch.library.register_fake(f"wisparse::{of.__name__}", fake, lib=_LIBRARY)


register_operator(
    masked_linear,
    lambda x, weight, bias, scales, thresholds, masked, widths, *_: x.new_empty((*x.shape[:-1], sum(widths))),
)


def mask_ahead(x: Tensor, scale: Tensor, threshold: Tensor, masked: Tensor) -> Tensor:
    """x (..., K) with dropped channels at zero; scale: (K,), threshold: (), masked: as for `masked_linear`."""
    rows = x.flatten(0, -2)  # vLLM's models of transformers' classes have a batch's tokens in a second dimension
    limit = threshold * masked.narrow(0, 0, rows.shape[0])
    return torch.where(keep_mask(rows, scale, limit[:, None]), rows, x.new_zeros(())).view(x.shape)


def in_torch(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """The definition, projection by projection."""
    outputs = []
    limits = layer.thresholds.view(len(layer.widths), -1)
    for scale, planes, (weight, bias) in zip(layer.scales, limits, layer.parts(), strict=True):
        kept, *lows = (mask_ahead(x, scale, threshold, masked) for threshold in planes)
        y = functional.linear(kept, weight[0] if lows else weight, bias)
        for low in lows:  # without the low plane of channels that keep the high plane only
            y = y - functional.linear(kept - low, weight[1])
        outputs.append(y)
    return torch.cat(outputs, dim=-1)


def of_codes(x: Tensor, layer: Layer, masked: Tensor, *, dense: bool) -> Tensor:
    """The product (M, N) of quantised weights on a GPU by our kernels."""
    from wisparse.kernels.gpu.products import MASKED_ROWS

    if len(x) > MASKED_ROWS and sum(layer.widths) > WIDE:  # an output layer: ``widen`` would need as much memory
        pieces = zip(x.split(MASKED_ROWS), masked.split(MASKED_ROWS), strict=True)
        return torch.cat([of_codes(part, layer, rows, dense=dense) for part, rows in pieces])
    product = product_of(layer, x.dtype, len(x), dense=dense)
    if product.copies and len(layer.thresholds) > len(layer.widths):  # more rows of planes than a kernel masks
        weight = layer.linear(x.dtype).weight
        both = torch.stack([widened(weight, low) for low in (False, True)])
        return in_torch(x, replace(layer, weight=both), masked)
    return launched(product, x, layer, masked, dense=dense)


def widened(weight: Any, low: bool = False) -> Tensor:
    """The dequantised weight (N, K), or its low plane."""
    from wisparse.kernels.gpu.weights import dequantize

    out = torch.empty(sum(weight.widths), weight.in_features, dtype=weight.dtype, device=weight.data.device)
    for index, part in enumerate(out.split(weight.widths)):
        dequantize(weight, index, part.t(), low=low)
    return out


def product_of(
    layer: Layer, dtype: torch.dtype, rows: int, *, dense: bool = False, place: str = "plugin", **options: Any
) -> Product:
    """``options``: as of ``choose_product``."""
    from wisparse.kernels.gpu.products import choose_product

    return choose_product(layer.linear(dtype, dense=dense).shape, rows, place, **options)


def few_rows(layer: Layer) -> int:
    """Up to how many rows a product of the layer may be launched with its ends."""
    from wisparse.kernels.gpu.products import PLUGIN_ROWS

    return PLUGIN_ROWS if layer.code_scales is None else CODE_ROWS


def launched(product: Product, x: Tensor, layer: Layer, masked: Tensor, *, dense: bool = False) -> Tensor:
    from wisparse.kernels.gpu.launch import multiply

    linear, scratch = layer.linear(x.dtype, dense=dense), scratch_of(x.device, x.dtype)
    return multiply(product, linear, x, scratch, row_mask=None if dense else masked)


@functools.cache
def scratch_of(device: torch.device, dtype: torch.dtype) -> Any:
    """One for all layers: their launches follow one another on one stream."""
    from wisparse.kernels.gpu.launch import Scratch

    return Scratch(device, dtype)


held: Counter[str] = Counter()  # bytes of quantised weights, by layout
awaiting: list[Callable[[], None]] = []  # calls of ``reserve`` for the layers that were loaded
_known: set[tuple[Any, ...]] = set()  # kinds of layers whose kernels are compiled, or being compiled
_running: list[Future[None]] = []


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # A few: they share the interpreter with the tracing of the model.
    return ThreadPoolExecutor(min(3, len(os.sched_getaffinity(0))), "wisparse-compile")


def fused_products(layer: Layer, dtype: torch.dtype, placed: Placed, first: int = 1) -> Iterator[Product]:
    """All products of `masked_linear` that use scratch memory, from ``first`` rows on. Its input is not masked ahead where
    nothing is compiled."""
    from wisparse.kernels.gpu.products import PLUGIN_ROWS

    codes, dense = layer.code_scales is not None, placed.dense
    most = PLUGIN_ROWS if not codes else CODE_ROWS if placed.many is not None else 2 * CODE_ROWS
    for rows in range(first, most + 1):
        for whole in {dense, codes and (dense or rows > CODE_ROWS)}:
            yield product_of(layer, dtype, rows, dense=whole)


def reserve(layer: Layer, dtype: torch.dtype, placed: Placed, *, ahead: bool = False, first: int = 1) -> None:
    """Before the first batch: allocate the scratch memory, whose address graphs capture, and compile the layer's kernels
    in threads, unless a layer like it came before. ``ahead``: its inputs are masked by `mask_ahead`; ``first``: the fewest
    rows of a batch."""
    weight, codes, dense = layer.weight, layer.code_scales is not None, placed.dense
    if not codes and (dense or not (weight.is_cuda and dtype in HALF)):
        return
    from wisparse.kernels.gpu.products import MASKED_ROWS

    # Each for the fewest rows that take the same kernel.
    sizes = [rows for rows in (*GRAPH_ROWS, MASKED_ROWS, MASKED_ROWS + 1) if rows >= first]
    scratch = scratch_of(weight.device, dtype)
    if codes:
        sizes = [rows for rows in sizes if placed.many is None or rows <= CODE_ROWS]
        if sum(layer.widths) > WIDE:
            sizes = [rows for rows in sizes if rows <= MASKED_ROWS]
    wanted = [(rows, dense) for rows in sizes]
    if codes and not dense:  # batches of prompts
        wanted += [(rows, True) for rows in sizes if rows > CODE_ROWS]
    for product in fused_products(layer, dtype, placed, first):
        scratch.reserve(product)
    products = [(product_of(layer, dtype, rows, ready=ahead, dense=whole), whole) for rows, whole in wanted]
    if codes and any(product.kernel == "cuBLAS" for product, _ in products):
        size = max(layer.widths) * layer.scales.shape[1]
        if scratch.widened is None or scratch.widened.numel() < size:
            scratch.widened = torch.empty(size, dtype=dtype, device=weight.device)

    def launch_on_zeros(product: Product, whole: bool) -> None:
        masked = torch.ones(product.rows, dtype=torch.float32, device=weight.device)
        x = torch.zeros(product.rows, layer.scales.shape[1], dtype=dtype, device=weight.device)
        launched(product, x, layer, masked, dense=whole)

    launches = {
        (product.kernel, product.problem, product.tile, product.copies, whole): functools.partial(
            launch_on_zeros, product, whole
        )
        for product, whole in reversed(products)
        if product.masks or product.copies or codes
    }
    kind = layer.linear(dtype, dense=dense).shape, layer.bias is None, ahead, first
    compile_ahead(kind, weight.device, launches.values())


def compile_ahead(kind: tuple[Any, ...], device: torch.device, launches: Iterable[Callable[[], object]]) -> None:
    """Run ``launches``, which compile the kernels of a kind of layers, in threads, unless they were run for that kind."""
    if kind in _known or device.type != "cuda":
        return
    _known.add(kind)
    stream = torch.cuda.current_stream(device)

    def run(launch: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            launch()

    _running.extend(_threads().submit(run, launch) for launch in launches)


def begin_compiling() -> None:
    """Reserve for the layers that were loaded."""
    while awaiting:
        awaiting.pop(0)()


def finish_compiling() -> None:
    """Wait for the compilations of `reserve`, before a graph is captured. Raises what a launch raised."""
    if not (_running or awaiting):
        return
    begin_compiling()
    while _running:
        _running.pop().result()
    if held:
        log.info("quantised weights: %s", ", ".join(f"{size / 2**30:.2f} GiB in {of}" for of, size in held.items()))
        held.clear()
    _threads().shutdown()
    _threads.cache_clear()
