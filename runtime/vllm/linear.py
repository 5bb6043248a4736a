"""Our linear layers in vLLM's models: loading, layouts and the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_pp_group
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.packings import Packing
from wisparse.formats.weight_types import QuantizedMatrix, round_weight

from .codes import create_parameters, device_weight, plain_weight, read_matrices
from .product import (
    HALF,
    PLACED,
    Layer,
    Placed,
    awaiting,
    channel_major,
    held,
    mask_ahead,
    mask_tensors,
    reserve,
)
from .settings import MaskedRows

_Codes = tuple[str, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Projections:
    """What a layer of vLLM's computes."""

    prefix: str
    count: int  # projections that are stored on their own: 1 for a stored qkv_proj or gate_up_proj
    masks: Sequence[ProjectionMask]  # of each, in the order of the layer's outputs; none: dense
    packing: Packing | None  # None: not quantised in the files
    dense: bool  # the masks drop nothing
    rows: MaskedRows
    # vLLM's method for the same weights, and a layer for it, from the layer: a second layout. None: one layout.
    other: Callable[[Any], tuple[Any, torch.nn.Module]] | None = None
    rounded: bool = False  # to int8, once loaded
    joins: bool = False  # its block may be computed by ``blocks``


@linear.register_weight_loader_v2_supported_method
class WisparseLinearMethod(linear.UnquantizedLinearMethod):
    """vLLM's own layer up to the loaded weights, our product from there on."""

    supports_pre_processed_weights = False

    def __init__(self, of: Projections) -> None:
        super().__init__()
        self._of = of
        # It reads the product of activation and up: a compiler fuses the mask into that.
        self._ahead = of.prefix.endswith(".down_proj") and len(of.masks) == 1 and of.packing is None
        self._widths: list[int] = []
        self._parts = 1  # of a stored projection that a block's operator reads as several, with the same mask
        self._in_features, self._split, self._dtype = 0, False, torch.float32
        self._other: tuple[Any, torch.nn.Module] | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **more: Any,
    ) -> None:
        """As vLLM's own, with the masks checked against the layer."""
        of, outputs = self._of, len(output_partition_sizes)
        if of.count not in (1, outputs):
            raise BundleError(f"{of.prefix}: expected {outputs} projections, found {of.count}")
        for mask in of.masks:
            if len(mask.channel_scale) != input_size:
                raise BundleError(
                    f"{of.prefix}: expected channel_scale ({input_size},), found {tuple(mask.channel_scale.shape)}; "
                    "the bundle is of another model"
                )
        self._widths = list(output_partition_sizes) if of.count > 1 else [sum(output_partition_sizes)]
        if of.joins and of.prefix.endswith(".gate_up_proj"):
            self._parts = outputs // of.count
        self._in_features, self._split = input_size_per_partition, input_size_per_partition != input_size
        self._dtype = params_dtype
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        if of.packing is None:
            super().create_weights(layer, *sizes, **more)
            return
        loader = more["weight_loader"]
        create_parameters(layer, of.packing, of.prefix, self._widths, self._in_features, self._split, loader)
        if of.other is not None:
            self._other = method, twin = of.other(layer)
            try:
                method.create_weights(twin, *sizes, weight_loader=lambda *_, **__: None)
            except (ValueError, NotImplementedError) as error:
                ours = '--additional-config \'{"wisparse": {"layouts": "ours"}}\''
                raise UsageError(f"{of.prefix}: vLLM has no product of these weights ({error}); use {ours}") from None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lay the weights out channel-major, with scales and thresholds beside them."""
        of, k, stored = self._of, self._in_features, self._widths
        if hasattr(layer, "wisparse_layer"):
            raise UsageError(
                f"{of.prefix}: with the plug-in weights cannot be loaded again into a running engine; start a new one"
            )
        # A layer split along its inputs has a slice of them here.
        first = layer.tp_rank * k if self._split else 0
        self._widths = [width // self._parts for width in stored for _ in range(self._parts)]
        count = len(self._widths)
        scales, thresholds = torch.ones(count, k, dtype=torch.float32), torch.zeros(count, dtype=torch.float32)
        if of.masks:
            masks = [mask for mask in of.masks for _ in range(self._parts)]
            scales, thresholds = mask_tensors(masks, slice(first, first + k))
        many: Callable[[Tensor, Tensor | None], Tensor] | None = None
        codes: _Codes = ("", None, None)
        loaded = {name: value.data for name, value in layer.named_parameters(recurse=False) if name != "bias"}
        if of.packing is not None:
            many = None if self._other is None else self._fill_other(*self._other, loaded)
            matrices = list(read_matrices(loaded, of.packing, of.prefix, stored, k, first))
            if self._parts > 1:
                (matrix,), (width, *_) = matrices, self._widths
                matrices = [matrix.rows(i, i + width) for i in range(0, self._parts * width, width)]
            codes = self._store_codes(layer, matrices, loaded, planes=len(thresholds) // count)
        elif of.rounded:
            codes = self._store_codes(layer, [round_weight(loaded["weight"], "int8")], loaded, planes=1)
        else:
            layer.weight.data = channel_major(layer.weight.data)
        device = layer.weight.device
        layer.register_buffer("wisparse_scales", scales.to(device), persistent=False)
        layer.register_buffer("wisparse_thresholds", thresholds.to(device), persistent=False)
        layer.register_buffer("wisparse_masked", of.rows.on(device), persistent=False)
        layer.wisparse_codes = codes[0]
        layer.register_buffer("wisparse_code_scales", codes[1], persistent=False)
        layer.register_buffer("wisparse_code_zeros", codes[2], persistent=False)
        layer.wisparse_placed = PLACED[layer.weight.data_ptr()] = Placed(of.dense, many)
        bias, kind, own = getattr(layer, "bias", None), codes[0], (layer.wisparse_scales, layer.wisparse_thresholds)
        layer.wisparse_layer = Layer(layer.weight, bias, own[0], own[1], self._widths, kind, codes[1], codes[2])
        # Of unquantised weights a CPU's compiler fuses more than we would.
        layer.wisparse_joins = of.joins and (of.packing is not None or bool(of.masks and device.type == "cuda"))
        layer.wisparse_joined = 0  # the most rows that the joined block launches with their ends
        awaiting.append(lambda: self._reserve(layer))

    def _reserve(self, layer: Any) -> None:
        placed, first = layer.wisparse_placed, layer.wisparse_joined + 1
        reserve(layer.wisparse_layer, self._dtype, placed, ahead=self._ahead, first=first)

    def _store_codes(
        self, layer: Any, matrices: Sequence[QuantizedMatrix], loaded: Iterable[str], planes: int
    ) -> _Codes:
        """Replace the loaded parameters by ``layer.weight``; the codes' type, scales and zero points."""
        for name in loaded:
            delattr(layer, name)
        codes: _Codes = ("", None, None)
        if matrices[0].codes.is_cuda and self._dtype in HALF:
            weight = device_weight(matrices, planes, self._dtype)
            data, codes = weight.data, (weight.quant, weight.scales, weight.zeros)
        else:
            data = plain_weight(matrices, planes, self._dtype)
        layer.register_parameter("weight", torch.nn.Parameter(data, requires_grad=False))
        held["our layout"] += sum(one.nbytes for one in (data, *codes[1:]) if one is not None)
        return codes

    def _fill_other(
        self, method: Any, twin: torch.nn.Module, loaded: Mapping[str, Tensor]
    ) -> Callable[[Tensor, Tensor | None], Tensor]:
        """vLLM's own product, of the loaded parameters."""
        for name, value in twin.named_parameters(recurse=False):
            if name in loaded:
                value.data.copy_(loaded[name])
        method.process_weights_after_loading(twin)
        held["vLLM's, for larger batches"] += sum(value.nbytes for value in (*twin.parameters(), *twin.buffers()))

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            found: Tensor = method.apply(twin, x, bias)
            return found

        return product

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) to (..., N) by one opaque operator, so that graphs and compilers see no branch. A joined block's
        operator has computed what stands for x: it is returned."""
        if layer.wisparse_joined:
            return x
        ready = self._ahead and torch.compiler.is_compiling()
        if ready:
            x = mask_ahead(x, layer.wisparse_scales[0], layer.wisparse_thresholds[0], layer.wisparse_masked)
        masks = layer.wisparse_scales, layer.wisparse_thresholds, layer.wisparse_masked
        codes = layer.wisparse_codes, layer.wisparse_code_scales, layer.wisparse_code_zeros
        return torch.ops.wisparse.masked_linear(x, layer.weight, bias, *masks, self._widths, ready, *codes)


class TiedOutputMethod(UnquantizedEmbeddingMethod):
    """Of an embedding that is the output layer too: a copy of its weight in int8 computes the logits."""

    def __init__(self, embedding: Any, rows: MaskedRows) -> None:
        super().__init__()
        of = Projections("lm_head", 1, (), None, dense=True, rows=rows, rounded=True)
        self._method, self._copy = WisparseLinearMethod(of), torch.nn.Module()
        (n, k), dtype = embedding.weight.shape, embedding.weight.dtype
        with torch.device("meta"):
            self._method.create_weights(self._copy, k, [n], k, n, dtype, weight_loader=None)
        self._copy.weight = embedding.weight
        self._method.process_weights_after_loading(self._copy)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._method.apply(self._copy, x, bias)


def round_tied_output(model: torch.nn.Module, config: Any, rows: MaskedRows) -> None:
    """An output layer in int8 for a model that multiplies by its embedding. ``config``: the text model's."""
    if not get_pp_group().is_last_rank or any(isinstance(module, ParallelLMHead) for module in model.modules()):
        return
    shape = config.vocab_size, config.hidden_size
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = [one for one in embeddings if (one.org_vocab_size, one.embedding_dim) == shape]
    if len(embeddings) != 1:
        raise UsageError(
            f"output_layer: expected stored for {type(model).__name__}, which has no output layer, found int8"
        )
    embeddings[0].quant_method = TiedOutputMethod(embeddings[0], rows)
