"""A bundle's masks on a transformers model: the same tokens as our runtime, with everything transformers can do.

The weights are not touched. Every projection gets a forward pre-hook that drops channels of its input, and the decoder
gets one that looks at each forward pass and says which tokens are sparse. It saves no time: transformers multiplies by
the zeros. It is for checking, for evaluation, and for whatever else only transformers does.

The scales belong to the hooks, not to the modules: no `state_dict` holds them, so a saved model is a plain dense
checkpoint, and `model.to(torch.bfloat16)` cannot round them, which would change the masks.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.guard import arguments
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.prefill import PREFILL_POLICIES
from wisparse.kernels.reference import keep_mask

__all__ = ["desparsify", "sparsify"]

_HANDLES = "_wisparse_handles"

M = TypeVar("M")


def sparsify(
    model: M,
    bundle: str | os.PathLike[str] | Bundle,
    *,
    sparsity: float | None = None,
    prefill: str = "dense",
    revision: str | None = None,
) -> M:
    """Put a bundle's masks on a transformers causal LM, in place.

    Works with every attention implementation, with ``generate``, pipelines, device maps and offloading. Masks that are
    already there are replaced. Saving the model afterwards writes a dense checkpoint; the bundle keeps the masks.

    Args:
        model: e.g. ``AutoModelForCausalLM.from_pretrained(bundle)``.
        bundle: a folder, a Hub id, or an opened bundle.
        sparsity: one of the bundle's rungs, or 0 for no masks; None: the rung in force of an opened bundle, else the
            default.
        prefill: ``dense``, ``half`` (the last half of each prompt is sparse) or ``all``. A forward pass with several
            new tokens, or on an empty cache, counts as a prompt; a pass with one new token is always sparse. So
            ``generate(use_cache=False)``, where every pass is a prompt, is not sparse under ``dense``.
        revision: branch, tag or commit, for a Hub id.

    Returns:
        The same model.

    Raises:
        UsageError: an unknown ``prefill``, a sparsity that the bundle lacks, or a model whose projections cannot be
            reached (tensor-parallel, fused).
        UnsupportedModelError: the model is not of the bundle's architecture or shape.
        AccessError, BundleError: the bundle cannot be found, or is damaged.
    """
    arguments.choice("prefill", prefill, PREFILL_POLICIES)
    if revision is not None:
        arguments.text("revision", revision, empty=False)
    if not isinstance(bundle, Bundle):
        arguments.place("bundle", bundle)
        bundle = Bundle.open(fetch_bundle(bundle, revision))
    if sparsity is not None:
        bundle = bundle.at(sparsity)
    projections = _find_projections(model, bundle)
    desparsify(model)
    watch = _Watch(prefill)
    found: Any = model  # whose type brings what the search above has asked for
    handles = [found.get_decoder().register_forward_pre_hook(watch, with_kwargs=True)]
    for name, module in projections.items():
        mask = bundle.masks[name]
        if mask.sparsity > 0:
            handles.append(module.register_forward_pre_hook(_Drop(mask, watch)))
            if mask.output_bias is not None:
                handles.append(module.register_forward_hook(_Add(mask.output_bias, watch)))
    setattr(model, _HANDLES, handles)
    # transformers copies the entry into whatever it saves, where it would promise a sidecar that is not there.
    if "wisparse" in vars(found.config):
        del found.config.wisparse
    return model


def desparsify(model: M) -> M:
    """Take a bundle's masks off again, in place; a model without any is left alone."""
    for handle in vars(model).pop(_HANDLES, ()):
        handle.remove()
    return model


class _Watch:
    """Pre-hook of the decoder: which tokens of this forward pass are sparse.

    ``sparse`` is True (all), False (none) or a bool tensor (B, L).
    """

    def __init__(self, prefill: str) -> None:
        self.prefill = prefill
        self.sparse: bool | Tensor = False

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs["inputs_embeds"]
        count = tokens.shape[1]
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        if self.prefill == "all" or (count == 1 and past > 0):
            self.sparse = True
        elif self.prefill == "dense":
            self.sparse = False
        else:
            self.sparse = _last_half(kwargs.get("attention_mask"), tokens.shape[0], count, tokens.device)


def _last_half(attention_mask: Any, batch: int, count: int, device: torch.device) -> Tensor:
    """(B, L) bool: the last L // 2 tokens of every sequence, padding left out of the count."""
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        real = attention_mask[:, -count:].to(device=device, dtype=torch.bool)
    else:
        real = torch.ones(batch, count, dtype=torch.bool, device=device)
    lengths = real.sum(dim=1, keepdim=True)
    position = real.cumsum(dim=1) - 1
    return real & (position >= lengths - lengths // 2)


class _Drop:
    """Pre-hook of a projection: zero the channels of its input that the mask drops, on the sparse tokens."""

    def __init__(self, mask: ProjectionMask, watch: _Watch) -> None:
        self.channel_scale = mask.channel_scale
        self.threshold = mask.threshold
        self.watch = watch

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        sparse = self.watch.sparse
        if sparse is False:
            return None
        x = args[0]
        if self.channel_scale.device != x.device:
            self.channel_scale = self.channel_scale.to(x.device)  # stays there: a projection sees one device
        keep = keep_mask(x, self.channel_scale, self.threshold)
        if isinstance(sparse, Tensor):
            keep = keep | ~sparse.to(x.device)[..., None]
        # where, not a product: a dropped Inf must become 0
        return (torch.where(keep, x, x.new_zeros(())), *args[1:])


class _Add:
    """Hook of a projection: add the mask's output bias to its output, on the sparse tokens."""

    def __init__(self, output_bias: Tensor, watch: _Watch) -> None:
        self.output_bias = output_bias
        self.watch = watch

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        sparse = self.watch.sparse
        if sparse is False:
            return None
        if self.output_bias.device != y.device:
            self.output_bias = self.output_bias.to(y.device)
        with_bias = (y + self.output_bias).to(y.dtype)
        return torch.where(sparse.to(y.device)[..., None], with_bias, y) if isinstance(sparse, Tensor) else with_bias


def _find_projections(model: Any, bundle: Bundle) -> dict[str, nn.Module]:
    """The model's module for every mask of the bundle."""
    if not isinstance(model, nn.Module) or not hasattr(model, "get_decoder"):
        raise UsageError(f"model: expected a transformers causal LM, found {type(model).__name__}")
    found = getattr(model.config, "model_type", None)
    if found != bundle.config.model_type:
        raise UnsupportedModelError(
            f"the bundle's masks are for a {bundle.config.model_type} model, found {found!r}; load the bundle's own "
            "weights with AutoModelForCausalLM.from_pretrained"
        )
    # Both feed a projection's weight something else than the projection's own input.
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise UsageError("sparsify: a tensor-parallel model splits its channels; load it without tp_plan")
    if getattr(model, "use_kernels", False):
        raise UsageError("sparsify: fused kernels go around the projections; load the model without use_kernels")
    modules = dict(model.named_modules())
    missing = [name for name in bundle.masks if name not in modules]
    if missing:
        raise UnsupportedModelError(
            f"{missing[0]}: expected a projection of that name in the model, found none ({len(missing)} of "
            f"{len(bundle.masks)} missing); pass the causal LM itself, not a part or a wrapper of it"
        )
    for name, mask in bundle.masks.items():
        width = getattr(modules[name], "in_features", None)
        if width != len(mask.channel_scale):
            raise UnsupportedModelError(
                f"{name}: the bundle's mask has {len(mask.channel_scale)} channels, the model's projection {width}"
            )
    return {name: modules[name] for name in bundle.masks}
