"""Masks on the projections of a Hugging Face model, so that a search can try one allocation after another.

A mask is put on by a forward pre-hook, so the weights are never touched and the dense model is one `clear()` away.
What is swapped between two candidates is a handful of scalars: thresholds and scales are replaced, nothing is rebuilt.
The mask itself is `kernels.reference.keep_mask`: a search sees the very rule the runtime applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wisparse.formats.errors import UsageError
from wisparse.kernels.reference import keep_mask

__all__ = ["MaskedModel"]


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
