"""transformers' own door: ``from_pretrained(bundle, quantization_config=WisparseConfig())`` loads a sparse model.

Importing this module registers the method, as transformers wants it done; ``from wisparse import WisparseConfig`` does
that, and ``import wisparse`` alone does not. A bundle's ``config.json`` does not name the method: programs that do not
know it would refuse the bundle, which they can load dense.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.weight_types import PREFILL_POLICIES
from wisparse.kernels.reference import keep_mask


class _Slot:
    """What one projection's hook reads: no mask while ``threshold`` is None."""

    __slots__ = ("counted", "kept", "scale", "threshold", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.scale: Tensor | None = None
        self.threshold: Tensor | None = None
        self.kept: Tensor | None = None
        self.counted = 0

    def follow(self, x: Tensor) -> None:
        """Move to where the projection is computed, which its weight may not tell while it is kept elsewhere."""
        if self.scale is not None and self.scale.device != x.device:
            self.scale = self.scale.to(x.device)
            self.threshold = self.threshold.to(x.device) if self.threshold is not None else None


class MaskedModel:
    """Masks on ``projections``, a mapping from Hugging Face module name to the ``nn.Linear`` there.

    Use as a context manager, or call `close`, to take the hooks off again.
    """

    def __init__(self, projections: Mapping[str, nn.Linear]) -> None:
        self.projections = dict(projections)
        self._dense_tokens: Tensor | None = None
        self._slots = {name: _Slot(module.in_features) for name, module in self.projections.items()}
        self._observer: Callable[[str, Tensor], None] | None = None
        self._replacer: Callable[[str, Tensor], Tensor] | None = None
        self._counting = False
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._hook(name, self._slots[name]))
            for name, module in self.projections.items()
        ]

    def __enter__(self) -> MaskedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ------------------------------------------------------------------ what is masked

    def set_scale(self, name: str, channel_scale: Tensor) -> None:
        """Put ``channel_scale`` (K,) float32 on a projection."""
        slot = self._slots[name]
        if channel_scale.shape != (slot.width,):
            raise UsageError(f"{name}: expected channel_scale ({slot.width},), found {tuple(channel_scale.shape)}")
        weight = self.projections[name].weight
        device = channel_scale.device if weight.is_meta else weight.device
        slot.scale = channel_scale.to(device=device, dtype=torch.float32)

    def set_threshold(self, name: str, threshold: float | Tensor | None) -> None:
        """Mask a projection at ``threshold``; None or 0 leaves it dense.

        A tensor (B,) gives every sequence of the batch its own threshold, so that candidates run side by side.
        """
        slot = self._slots[name]
        if threshold is None or (not isinstance(threshold, Tensor) and threshold == 0):
            slot.threshold = None
            return
        if slot.scale is None:
            raise UsageError(f"{name}: a threshold was set before its channel_scale; call set_scale first")
        value = torch.as_tensor(threshold, dtype=torch.float32, device=slot.scale.device)
        slot.threshold = value.view(-1, 1, 1) if value.ndim else value

    def set_thresholds(self, thresholds: Mapping[str, float | Tensor | None]) -> None:
        """`set_threshold` for every entry; projections not named keep theirs."""
        for name, threshold in thresholds.items():
            self.set_threshold(name, threshold)

    def clear(self) -> None:
        """Every projection dense again; scales stay."""
        for slot in self._slots.values():
            slot.threshold = None

    @contextmanager
    def masking(self, thresholds: Mapping[str, float | Tensor | None]) -> Iterator[None]:
        """Within the context the projections of ``thresholds`` are masked and all others dense; after it all are."""
        self.clear()
        try:
            self.set_thresholds(thresholds)
            yield
        finally:
            self.clear()

    def sparing(self, dense_tokens: Tensor | None) -> AbstractContextManager[None]:
        """Within the context, every mask leaves ``dense_tokens`` (B, L) bool alone.

        This is how the first token of a sequence, padding, or the dense half of a prompt is kept dense: by a mask that
        travels with the batch, never by a position.
        """
        return self._during("_dense_tokens", dense_tokens)

    # ------------------------------------------------------------------ what is observed

    def observing(self, observer: Callable[[str, Tensor], None]) -> AbstractContextManager[None]:
        """Within the context, ``observer(name, x)`` sees every projection's input before the mask, (B, L, K)."""
        return self._during("_observer", observer)

    def replacing(self, replacer: Callable[[str, Tensor], Tensor]) -> AbstractContextManager[None]:
        """Within the context, a projection multiplies ``replacer(name, x)`` where x (B, L, K) is its masked input."""
        return self._during("_replacer", replacer)

    @contextmanager
    def counting(self) -> Iterator[Callable[[], dict[str, float]]]:
        """Count dropped channels over the tokens that `sparing` does not leave alone.

        Yields a function that returns, per projection, the fraction of (token, channel) pairs dropped so far: the
        realised sparsity.
        """
        for slot in self._slots.values():
            slot.kept, slot.counted = None, 0
        self._counting = True
        try:
            yield self._realised
        finally:
            self._counting = False

    @contextmanager
    def _during(self, attribute: str, value: Any) -> Iterator[None]:
        before = getattr(self, attribute)
        setattr(self, attribute, value)
        try:
            yield
        finally:
            setattr(self, attribute, before)

    def _realised(self) -> dict[str, float]:
        return {
            name: 0.0 if slot.kept is None or not slot.counted else 1.0 - int(slot.kept) / slot.counted
            for name, slot in self._slots.items()
        }

    # ------------------------------------------------------------------ the hook

    def _hook(self, name: str, slot: _Slot) -> Callable[[nn.Module, tuple], tuple | None]:
        def mask_input(module: nn.Module, args: tuple) -> tuple | None:
            x = args[0]
            if self._observer is not None:
                self._observer(name, x)
            # set_threshold refuses one without a scale
            if slot.threshold is not None and slot.scale is not None:
                slot.follow(x)
                keep = keep_mask(x, slot.scale, slot.threshold)
                if self._counting:
                    self._count(slot, keep)
                if self._dense_tokens is not None:
                    keep = keep | self._dense_tokens[..., None].to(keep.device)
                # where, not a product: a dropped Inf must become 0
                x = torch.where(keep, x, x.new_zeros(()))
            if self._replacer is not None:
                x = self._replacer(name, x)
            return None if x is args[0] else (x, *args[1:])

        return mask_input

    def _count(self, slot: _Slot, keep: Tensor) -> None:
        sparse = keep if self._dense_tokens is None else keep[~self._dense_tokens.to(keep.device)]
        kept = sparse.sum()
        slot.kept = kept if slot.kept is None else slot.kept + kept
        slot.counted += sparse.numel()


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
        sparsity: one of the bundle's sparsity levels, or 0 for no masks; None: the sparsity level in force of an opened bundle, else the
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
    guard.choice("prefill", prefill, PREFILL_POLICIES)
    if revision is not None:
        guard.text("revision", revision, empty=False)
    if not isinstance(bundle, Bundle):
        guard.place("bundle", bundle)
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


_METHOD = "wisparse"


class WisparseConfig(QuantizationConfigMixin):
    """Load a bundle sparse.

    Args:
        prefill: which tokens of a prompt are sparse, as in ``wisparse.sparsify``.
    """

    def __init__(self, prefill: str = "dense", **_: Any) -> None:
        guard.choice("prefill", prefill, PREFILL_POLICIES)
        self.quant_method: Any = _METHOD
        self.prefill = prefill


class WisparseQuantizer(HfQuantizer):
    """Lets transformers load the dense weights as always, then puts the masks on.

    What comes out is a plain model with hooks, not a "quantised" one: ``to(dtype)`` and ``save_pretrained`` work.
    """

    requires_calibration = False

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        # Where transformers found the weights. From the Hub, that is our cache entry as well.
        files = kwargs.get("checkpoint_files")
        self._folder = Path(files[0]).parent if files else None
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        prefill = vars(self.quantization_config)["prefill"]
        self.remove_quantization_config(model)
        folder = self._folder
        if folder is not None and (folder / "wisparse.safetensors").is_file():
            return sparsify(model, folder, prefill=prefill)
        # transformers fetched the weights only.
        name, commit = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
        local = Path(name).is_dir()
        return sparsify(model, name, prefill=prefill, revision=None if local else commit)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


if _METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(_METHOD)(WisparseConfig)
    register_quantizer(_METHOD)(WisparseQuantizer)
