"""All that a model computes from one attention to the next as one torch operator, ``wisparse::between_attentions``: o_proj,
norm, MLP, the next block's norm and qkv_proj. On a GPU a few tokens take four launches, each with its norm, activation
or addition, where vLLM has seven. Larger batches have launches of their own for these."""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .product import (
    CODE_ROWS,
    GRAPH_ROWS,
    HALF,
    Layer,
    Placed,
    awaiting,
    begin_compiling,
    compile_ahead,
    few_rows,
    finish_compiling,
    masked_linear,
    product_of,
    register_operator,
    scratch_of,
)

if TYPE_CHECKING:  # Triton need not be installed
    from wisparse.kernels.gpu.products import Product

log = logging.getLogger("vllm.wisparse")
# Classes of blocks whose ``forward`` is: norm, attention, norm, MLP; each norm also adds its input to the residual stream.
_KNOWN = {
    "llama.LlamaDecoderLayer",
    "mistral.MistralDecoderLayer",
    "qwen2.Qwen2DecoderLayer",
    "qwen3.Qwen3DecoderLayer",
}
# Classes of models whose ``forward`` is: their blocks, one after another, and their last norm.
_KNOWN_MODELS = {"llama.LlamaModel", "mistral.MistralModel", "qwen2.Qwen2Model", "qwen3.Qwen3Model"}
_ACTIVATIONS = {"SiluAndMul": "silu"}  # vLLM's classes, and the names of our products' ends
# Drafts that read nothing of the hidden states inside the model.
DRAFTS = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True)
class Linear:
    layer: Layer
    placed: Placed

    def __call__(self, x: Tensor, masked: Tensor, *, ready: bool = False) -> Tensor:
        of = self.layer
        masks, codes = (of.scales, of.thresholds, masked), (of.codes, of.code_scales, of.code_zeros)
        return masked_linear(x, of.weight, of.bias, *masks, list(of.widths), ready, *codes)


@dataclass(frozen=True)
class Norm:
    weight: Tensor  # (H,)
    eps: float

    def after_adding(self, x: Tensor, stream: Tensor) -> Tensor:
        """The norm of stream + x, which becomes the stream; (T, H)."""
        if not _compiled(x):
            return functional.rms_norm(stream.add_(x), stream.shape[1:], self.weight, self.eps)
        from wisparse.kernels.gpu.reduction import launch_residual_add

        out = torch.empty_like(x)
        launch_residual_add(x, stream, None, next_norm=self.weight, normed=out, eps=self.eps)
        return out


def _compiled(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


@dataclass(frozen=True, eq=False)
class Between:
    """What is computed between two attentions, or after the last."""

    o: Linear
    norm: Norm
    gate_up: Linear
    activation: str
    down: Linear
    next_norm: Norm
    qkv: Linear | None  # None after the last block

    def apart(self, attention: Tensor, stream: Tensor, masked: Tensor) -> Tensor:
        """With launches of their own for norms and the activation."""
        x = self.norm.after_adding(self.o(attention, masked), stream)
        x, ready = self._activate(self.gate_up(x, masked), masked)
        x = self.next_norm.after_adding(self.down(x, masked, ready=ready), stream)
        return x if self.qkv is None else self.qkv(x, masked)

    def _activate(self, gate_up: Tensor, masked: Tensor) -> tuple[Tensor, bool]:
        """down's input, and whether its channels were dropped in the same launch."""
        if not _compiled(gate_up):
            gate, up = gate_up.chunk(2, dim=1)
            return functional.silu(gate) * up, False
        from wisparse.kernels.gpu.reduction import launch_activate

        layer, dense = self.down.layer, self.down.placed.dense
        ready = layer.code_scales is None and not dense
        mask = (layer.scales, layer.thresholds) if ready else None
        return launch_activate(gate_up, self.activation, mask, masked if ready else None), ready

    def fused(self, attention: Tensor, stream: Tensor, masked: Tensor) -> Tensor:
        """In four launches, as in a step of our own decoder."""
        from wisparse.kernels.gpu.common import Input, Output
        from wisparse.kernels.gpu.launch import launch_linear

        rows, scratch = len(attention), scratch_of(stream.device, stream.dtype)
        o, gate_up, down, *qkv = self.products(rows, stream.dtype)

        def launch(of: Linear, product: Any, x: Input, output: Output, eps: float = 0.0) -> None:
            dense = of.placed.dense
            linear, masks = of.layer.linear(stream.dtype, dense=dense), None if dense else masked[:rows]
            launch_linear(linear, x._replace(row_mask=masks), output, scratch, product, eps=eps)

        def sums(product: Any) -> Tensor:
            return stream.new_empty(rows, product.ssq_parts, dtype=torch.float32)

        added = Output(stream, sums(o))
        launch(self.o, o, Input(attention), added)
        activated = stream.new_empty(rows, self.gate_up.layer.widths[0])
        launch(self.gate_up, gate_up, Input(stream, added.ssq, self.norm.weight), Output(activated), self.norm.eps)
        added = Output(stream, sums(down))
        launch(self.down, down, Input(activated), added)
        if self.qkv is None:
            return functional.rms_norm(stream, stream.shape[1:], self.next_norm.weight, self.next_norm.eps)
        out = stream.new_empty(rows, sum(self.qkv.layer.widths))
        launch(self.qkv, qkv[0], Input(stream, added.ssq, self.next_norm.weight), Output(out), self.next_norm.eps)
        return out

    def products(self, rows: int, dtype: torch.dtype) -> list[Product]:
        """Of o, gate and up, down, qkv."""

        def chosen(of: Linear, output: str, ssq_parts: int = 1) -> Product:
            ends = {"output": output, "ssq_parts": ssq_parts}
            return product_of(of.layer, dtype, rows, dense=of.placed.dense, place="step", **ends)

        o, down = (chosen(of, "residual") for of in (self.o, self.down))
        qkv = [] if self.qkv is None else [chosen(self.qkv, "plain", down.ssq_parts)]
        return [o, chosen(self.gate_up, self.activation, o.ssq_parts), down, *qkv]

    @property
    def linears(self) -> list[Linear]:
        return [one for one in (self.o, self.gate_up, self.down, self.qkv) if one is not None]

    @property
    def few(self) -> int:
        """The most rows of `fused`."""
        return min(few_rows(one.layer) for one in self.linears)

    def reserve(self, dtype: torch.dtype) -> None:
        """As ``product.reserve``, for the launches of `fused`."""
        weight = self.o.layer.weight
        if not weight.is_cuda or dtype not in HALF:
            return
        for rows in range(1, self.few + 1):
            for product in self.products(rows, dtype):
                scratch_of(weight.device, dtype).reserve(product)

        def launch_on_zeros(rows: int) -> None:
            attention, stream = (
                torch.zeros(rows, width, dtype=dtype, device=weight.device)
                for width in (self.o.layer.scales.shape[1], len(self.norm.weight))
            )
            self.fused(attention, stream, torch.ones(rows, dtype=torch.float32, device=weight.device))

        kinds = [
            (one.layer.linear(dtype, dense=one.placed.dense).shape, one.layer.bias is None) for one in self.linears
        ]
        launches = [functools.partial(launch_on_zeros, rows) for rows in GRAPH_ROWS if rows <= self.few]
        compile_ahead(("block", *kinds), weight.device, launches)


BETWEEN: weakref.WeakValueDictionary[int, Between] = weakref.WeakValueDictionary()  # by the address of o_proj's weight


def between_attentions(attention: Tensor, stream: Tensor, masked: Tensor, weight: Tensor, width: int) -> Tensor:
    """The next attention's qkv (T, width), or after the last block the normed hidden states, from attention's output (T, K).
    stream: (T, H), the residual stream, updated; masked: as for ``masked_linear``; weight: o_proj's, which names the
    block."""
    finish_compiling()
    between = BETWEEN[weight.data_ptr()]
    few = _compiled(attention) and len(attention) <= between.few
    return (between.fused if few else between.apart)(attention, stream, masked)


register_operator(
    between_attentions,
    lambda attention, stream, masked, weight, width: attention.new_empty(attention.shape[0], width),
    mutates=("stream",),
)


class Unchanged(torch.nn.Module):
    """In place of a module that the operator computes."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return x if residual is None else (x, residual)


class AfterAttention(torch.nn.Module):
    """In place of the norm after attention."""

    between: Between
    masked: Tensor
    o_weight: Tensor
    width: int

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.ops.wisparse.between_attentions(x, residual, self.masked, self.o_weight, self.width)
        return out, residual


def join_blocks(model: torch.nn.Module) -> None:
    """Let the operator compute the blocks of ``model``, whose weights are loaded, where it can."""
    joined, reason = 0, "no block is known"
    for inner in list(model.modules()):
        layers, norm = getattr(inner, "layers", None), getattr(inner, "norm", None)
        if not isinstance(layers, torch.nn.ModuleList) or not len(layers) or norm is None:
            continue
        others = None if _known(inner, _KNOWN_MODELS) else f"a model of another class, {type(inner).__name__}"
        why_not = [why for why in (others, *map(_why_not, layers), _why_not_norm(norm)) if why is not None]
        if why_not:
            reason = why_not[0]
            continue
        for layer, after in zip(layers, (*layers[1:], None), strict=True):
            _join(layer, after, norm)
        joined += len(layers)
    if joined:
        log.info("%d blocks: with a few tokens norms and activations are in the launches of our products", joined)
    else:
        log.info("norms and activations are vLLM's: %s", reason)


def _linears(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj


def _known(module: Any, names: set[str]) -> bool:
    package, _, file = type(module).__module__.rpartition(".")
    return package.startswith("vllm.") and f"{file}.{type(module).__name__}" in names


def _why_not(layer: Any) -> str | None:
    if not _known(layer, _KNOWN):
        return f"blocks of another class, {type(layer).__name__}"
    if getattr(layer, "ada_rms_norm_t_cond", None) is not None:
        return "norms that depend on a time"
    if not all(getattr(linear, "wisparse_joins", False) for linear in _linears(layer)):
        return "projections of another method, several cards, or drafts that read hidden states"
    if type(layer.mlp.act_fn).__name__ not in _ACTIVATIONS:
        return f"activation {type(layer.mlp.act_fn).__name__}"
    return _why_not_norm(layer.input_layernorm) or _why_not_norm(layer.post_attention_layernorm)


def _why_not_norm(norm: Any) -> str | None:
    plain = type(norm).__name__ == "RMSNorm" and norm.has_weight and norm.variance_size_override is None
    return None if plain else f"norms of another kind, {type(norm).__name__}"


def _linear(module: Any) -> Linear:
    return Linear(module.wisparse_layer, module.wisparse_placed)


def _norm(module: Any) -> Norm:
    return Norm(module.weight.data, module.variance_epsilon)


def _join(layer: Any, after: Any, last: Any) -> None:
    """Let the operator compute what follows the attention of ``layer``. ``after``: the next block; None: the norm ``last``
    follows."""
    _, o, gate_up, down = _linears(layer)
    qkv, next_norm = (None, last) if after is None else (after.self_attn.qkv_proj, after.input_layernorm)
    activation, norm = _ACTIVATIONS[type(layer.mlp.act_fn).__name__], layer.post_attention_layernorm
    between = Between(
        _linear(o), _norm(norm), _linear(gate_up), activation, _linear(down), _norm(next_norm),
        None if qkv is None else _linear(qkv),
    )  # fmt: skip
    for linear in (o, gate_up, down, qkv):
        if linear is not None:
            linear.wisparse_joined = between.few if o.weight.is_cuda else CODE_ROWS
    # Classes change, so that parameters keep their names.
    for module in (layer.mlp, next_norm):
        module.__class__ = Unchanged
    norm.__class__ = AfterAttention
    norm.between = BETWEEN[o.weight.data_ptr()] = between
    norm.register_buffer("masked", o.wisparse_masked, persistent=False)
    norm.register_buffer("o_weight", o.weight.data, persistent=False)
    norm.width = len(last.weight) if qkv is None else sum(qkv.wisparse_layer.widths)
    awaiting.append(functools.partial(between.reserve, norm.weight.dtype))


def watch_loader() -> None:
    """Wrap vLLM's loader, once in a process, so that loaded blocks are joined and a tied output layer is rounded."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader import base_loader

    from .linear import round_tied_output

    original = base_loader.process_weights_after_loading
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def process(model: torch.nn.Module, model_config: Any, *rest: Any, **more: Any) -> None:
        original(model, model_config, *rest, **more)
        if any(hasattr(module, "wisparse_layer") for module in model.modules()):
            current = get_current_vllm_config()
            if model_config is current.model_config and current.quant_config.output_layer == "int8":
                round_tied_output(model, model_config.hf_text_config, current.quant_config.rows)
            join_blocks(model)
            begin_compiling()

    base_loader.process_weights_after_loading = process
