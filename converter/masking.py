"""Masks on the projections of a transformers model: for the converter (`MaskedModel`), and for users (`sparsify`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.weight_types import PREFILL_POLICIES, sparse_from
from wisparse.kernels.reference import scores

from .experts import Release, at_rows, find_experts


def ones(values: Tensor) -> Tensor:
    """The number of ones among zeros and ones of any type, float64; several times as fast as count_nonzero on a CPU."""
    return values.sum(-1, dtype=torch.float32).sum(dtype=torch.float64)  # a row's sum is exact


@dataclass
class _Pass:
    """Options of a forward pass, shared by all masks of a model."""

    # (B, L) bool: tokens that are not masked, such as padding and the first of a sequence. None: no token, True: all.
    dense_tokens: Tensor | bool | None = None
    observer: Callable[[str, Tensor], None] | None = None  # called with a projection's name and unmasked input
    replacer: Callable[[str, Tensor], Tensor] | None = None  # maps a projection's name and masked input to its input
    counting: bool = False


@dataclass
class _Mask:
    """Forward pre-hook of a projection: zero the channels of its input whose score is below the threshold."""

    name: str
    shared: _Pass
    scale: Tensor | None = None  # (K,) float32, or (E, K)
    threshold: Any = None  # a number, (B, 1, 1) float32, or None for dense
    kept: int | Tensor = 0
    counted: int | Tensor = 0

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x, shared = args[0], self.shared
        if shared.observer is not None:
            shared.observer(self.name, x)
        dense = shared.dense_tokens
        if self.threshold is not None and self.scale is not None and dense is not True:
            if self.scale.device != x.device:  # an offloaded weight's device is not the one it runs on
                self.scale = self.scale.to(x.device)
            if isinstance(self.threshold, Tensor):
                self.threshold = self.threshold.to(x.device)
            threshold, scale, routing = self.threshold, self.scale, getattr(module, "routing", None)
            if routing is not None:
                scale = scale[routing.experts]
            if isinstance(threshold, Tensor) and threshold.ndim and x.dim() == 2:  # (B, 1, 1) to (rows, 1)
                tokens = len(x) if routing is None else len(x) // module.chosen
                threshold = at_rows(module, x, threshold[:, 0].expand(-1, tokens // len(threshold)))[:, None]
            if isinstance(dense, Tensor):
                dense = at_rows(module, x, dense.to(x.device))
                threshold = torch.where(dense[..., None], -torch.inf, threshold)
            # 0 or 1 in x's dtype: several times as fast on a CPU as torch.where. NaN * 0 is NaN, so it is not dropped.
            keep = torch.ge(scores(x.detach(), scale), threshold, out=torch.empty_like(x, requires_grad=False))
            if shared.counting:
                num_dense = dense.sum() * x.shape[-1] if isinstance(dense, Tensor) else 0
                self.kept += ones(keep) - num_dense
                self.counted += keep.numel() - num_dense
            x = x * keep if x.requires_grad else keep.mul_(x)
        if shared.replacer is not None:
            x = shared.replacer(self.name, x)
        return None if x is args[0] else (x, *args[1:])


class MaskedModel(AbstractContextManager["MaskedModel"]):
    """Masks on ``projections``, a mapping from Hugging Face module names to ``nn.Linear`` or `ExpertProjection`. The hooks
    are removed by `close` or at the end of the context."""

    def __init__(self, projections: Mapping[str, Any]) -> None:
        self.projections = dict(projections)
        self._shared = _Pass()
        self._masks = {name: _Mask(name, self._shared) for name in self.projections}
        self._handles = [module.register_forward_pre_hook(self._masks[n]) for n, module in self.projections.items()]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def set_scale(self, name: str, channel_scale: Tensor) -> None:
        weight = self.projections[name].weight
        device = channel_scale.device if weight.is_meta else weight.device
        self._masks[name].scale = channel_scale.to(device=device, dtype=torch.float32)

    def set_threshold(self, name: str, threshold: float | Tensor | None) -> None:
        """Mask a projection, whose scale is set, at ``threshold``; None or 0: dense. A tensor (B,) has a threshold for each
        sequence of the batch."""
        mask = self._masks[name]
        if threshold is None or (not isinstance(threshold, Tensor) and threshold == 0):
            mask.threshold = None
            return
        assert mask.scale is not None
        value = torch.as_tensor(threshold, dtype=torch.float32, device=mask.scale.device)
        mask.threshold = value.view(-1, 1, 1) if value.ndim else value

    def clear(self) -> None:
        """Make every projection dense; scales stay."""
        for mask in self._masks.values():
            mask.threshold = None

    @contextmanager
    def masking(self, thresholds: Mapping[str, float | Tensor | None]) -> Iterator[None]:
        """Within the context only the projections of ``thresholds`` are masked; after it none is."""
        self.clear()
        try:
            for name, threshold in thresholds.items():
                self.set_threshold(name, threshold)
            yield
        finally:
            self.clear()

    @contextmanager
    def during(self, **values: Any) -> Iterator[None]:
        """Within the context, set these options of `_Pass`."""
        before = {name: getattr(self._shared, name) for name in values}
        vars(self._shared).update(values)
        try:
            yield
        finally:
            vars(self._shared).update(before)

    @contextmanager
    def counting(self) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Count dropped channels at the tokens that are not ``dense_tokens``. Yields a function that returns the realised
        sparsity so far by projection: the fraction of (token, channel) pairs that were dropped, () float64."""
        for mask in self._masks.values():
            mask.kept = mask.counted = 0

        def realised() -> dict[str, Tensor]:
            counts = {name: map(torch.as_tensor, (mask.kept, mask.counted)) for name, mask in self._masks.items()}
            return {name: (counted - kept).double() / counted.clamp(min=1) for name, (kept, counted) in counts.items()}

        with self.during(counting=True):
            yield realised


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

    Works with every attention implementation, with ``generate``, pipelines, device maps and offloading. Masks of an
    earlier call are replaced. Saving the model afterwards writes a dense checkpoint without masks.

    Args:
        model: e.g. ``AutoModelForCausalLM.from_pretrained(bundle)``.
        bundle: a folder, a Hub id, or an opened bundle.
        sparsity: one of the bundle's sparsity levels, or 0 for no masks; None: the level chosen in an opened bundle, else
            the default level.
        prefill: ``dense``, ``half`` (the last half of each prompt is sparse) or ``all`` (but the first token). A
            forward pass with several new tokens, or on an empty cache, counts as a prompt; a pass with one new token is
            always sparse. So ``generate(use_cache=False)``, where every pass is a prompt, is not sparse under ``dense``.
        revision: branch, tag or commit, for a Hub id.

    Returns:
        The same model.

    Raises:
        UsageError: an unknown ``prefill``, a sparsity that the bundle lacks, or a model whose projections cannot be
            reached (tensor-parallel, fused).
        UnsupportedModelError: the model is not of the bundle's architecture or shape, or has other weights.
        AccessError, BundleError: the bundle cannot be found, or is damaged.
    """
    guard.choice("prefill", prefill, PREFILL_POLICIES)
    if revision is not None:
        guard.text("revision", revision, empty=False)
    if not isinstance(bundle, Bundle):
        guard.place("bundle", bundle)
        bundle = Bundle.open(fetch_bundle(bundle, revision))
    bundle = bundle.chosen(sparsity, None)
    if bundle.recipe.graded and bundle.sparsity:
        raise UsageError(
            "sparsify: a graded bundle is read by planes by wisparse.load; here choose sparsity 0, the dense model"
        )
    projections = _find_projections(model, bundle)
    _check_weights(projections, bundle)
    desparsify(model)
    experts = find_experts(model, bundle.config)
    projections |= experts
    shared, hf_model = _Pass(), model
    decoder: Any = hf_model.get_decoder()  # type: ignore[attr-defined]

    def choose_tokens(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shared.dense_tokens = _dense_tokens(prefill, args, kwargs)

    handles: list[Any] = [decoder.register_forward_pre_hook(choose_tokens, with_kwargs=True), Release(experts.values())]
    for name, module in projections.items():
        mask = bundle.masks[name]
        if mask.sparsity > 0 and bundle.sparsity:
            handles.append(module.register_forward_pre_hook(_Mask(name, shared, mask.channel_scale, mask.threshold)))
    setattr(model, _HANDLES, handles)
    # save_pretrained would copy the entry into a checkpoint that has no sidecar.
    config: Any = hf_model.config  # type: ignore[attr-defined]
    if "wisparse" in vars(config):
        del config.wisparse
    return model


def desparsify(model: M) -> M:
    """Remove a bundle's masks, in place; a model without masks stays unchanged."""
    for handle in vars(model).pop(_HANDLES, ()):
        handle.remove()
    return model


def _dense_tokens(prefill: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | bool | None:
    """`_Pass.dense_tokens` of a decoder's forward pass."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if tokens is None:
        tokens = kwargs["inputs_embeds"]
    batch, count = tokens.shape[:2]
    cache = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
    past = 0 if cache is None else int(cache.get_seq_length())
    if past > 0 and (prefill == "all" or count == 1):
        return None
    if prefill == "dense":
        return True
    attention_mask = kwargs.get("attention_mask")
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        real = attention_mask[:, -count:].to(device=tokens.device, dtype=torch.bool)
    else:
        real = torch.ones(batch, count, dtype=torch.bool, device=tokens.device)
    starts = torch.tensor([[sparse_from(prefill, length)] for length in real.sum(dim=1).tolist()], device=real.device)
    return ~(real & (real.cumsum(dim=1) - 1 >= starts))  # padding is not counted


def _find_projections(model: Any, bundle: Bundle) -> dict[str, nn.Module]:
    """The model's modules for the masks of the bundle, by name."""
    if not isinstance(model, nn.Module) or not hasattr(model, "get_decoder"):
        raise UsageError(f"model: expected a transformers causal LM, found {type(model).__name__}")
    model_type = getattr(model.config, "model_type", None)
    if model_type != bundle.config.model_type:
        differs = f"the bundle's masks are for a {bundle.config.model_type} model, found {model_type!r}"
        advice = "load the bundle's own weights with AutoModelForCausalLM.from_pretrained"
        raise UnsupportedModelError(f"{differs}; {advice}")
    # Under both, a projection's weight is multiplied by another tensor than the input that the hook masks.
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise UsageError("sparsify: a tensor-parallel model splits its channels; load it without tp_plan")
    if getattr(model, "use_kernels", False):
        raise UsageError("sparsify: fused kernels go around the projections; load the model without use_kernels")
    modules: dict[str, Any] = dict(model.named_modules())
    modules |= find_experts(model, bundle.config)
    missing = [name for name in bundle.masks if name not in modules]
    if missing:
        lack = f"found none ({len(missing)} of {len(bundle.masks)} missing)"
        wanted = f"{missing[0]}: expected a projection of that name in the model, {lack}"
        raise UnsupportedModelError(f"{wanted}; pass the causal LM itself, not a part or a wrapper of it")
    for name, mask in bundle.masks.items():
        width, num_channels = getattr(modules[name], "in_features", None), mask.channel_scale.shape[-1]
        if width != num_channels:
            differs = f"the bundle's mask has {num_channels} channels, the model's projection {width}"
            raise UnsupportedModelError(f"{name}: {differs}")
    return {name: modules[name] for name in bundle.masks}


def _check_weights(projections: Mapping[str, nn.Module], bundle: Bundle) -> None:
    """Refuse the source's weights where the bundle's are rotated: its masks are of other channels. A fine-tuned model is
    accepted. Packed and offloaded weights, and those of experts, are not compared; a rotation changes all, a family's order
    of rows (Qwen3-Next's) some."""
    different = []
    for one in bundle.config.projections(0):
        weight = None if one.experts else getattr(projections[one.name], "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and not weight.is_meta:
            stored = bundle.checkpoint.tensor(f"{one.name}.weight", weight.device).float()
            if weight.shape == stored.shape:
                if (weight.detach().float() - stored).norm() <= stored.norm() / 2:
                    return
                different.append(one.name)
    if different:
        advice = "load the model with AutoModelForCausalLM.from_pretrained of the bundle"
        raise UnsupportedModelError(f"{different[0]}: expected the bundle's own weights, found others; {advice}")


_METHOD = "wisparse"


class WisparseConfig(QuantizationConfigMixin):
    """Load a bundle sparse; ``prefill`` and ``sparsity`` are those of ``wisparse.sparsify``."""

    def __init__(self, prefill: str = "dense", sparsity: float | None = None, **others: Any) -> None:
        others.pop("quant_method", None)  # passed if transformers makes it from a dictionary
        if "bits" in others:
            where = "wisparse.load(..., bits=...) reads fewer bits of graded weights"
            raise UsageError(f"WisparseConfig: bits: {where}; transformers loads such a bundle as int8")
        guard.keywords("WisparseConfig", others, ("prefill", "sparsity"))
        guard.choice("prefill", prefill, PREFILL_POLICIES)
        if sparsity is not None:
            guard.number("sparsity", sparsity, 0, 1, "a sparsity level of the bundle, or 0")
        self.quant_method: Any = _METHOD
        self.prefill, self.sparsity = prefill, sparsity


class WisparseQuantizer(HfQuantizer):
    """transformers loads the dense weights, then the masks are put on. The result is an unquantised model with hooks:
    ``to(dtype)`` and ``save_pretrained`` work."""

    requires_calibration = False

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        # The folder of the weights; for a Hub id, in the cache that `fetch_bundle` uses too.
        files = kwargs.get("checkpoint_files")
        self._folder = Path(files[0]).parent if files else None
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        options = {name: getattr(self.quantization_config, name) for name in ("prefill", "sparsity")}
        self.remove_quantization_config(model)
        if self._folder is not None and (self._folder / "wisparse.safetensors").is_file():
            return sparsify(model, self._folder, **options)
        # transformers downloads the weights only, not the sidecar.
        name, commit = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
        return sparsify(model, name, revision=None if Path(name).is_dir() else commit, **options)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


if _METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(_METHOD)(WisparseConfig)
    register_quantizer(_METHOD)(WisparseQuantizer)
