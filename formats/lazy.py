"""Lazy imports of large libraries, for a fast start of commands that do not need them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch as torch
    from huggingface_hub import errors as hub_errors
    from torch import Tensor as Tensor
else:
    torch, hub_errors = LazyModule("torch"), LazyModule("huggingface_hub.errors")
    Tensor = "torch.Tensor"  # for annotations only
