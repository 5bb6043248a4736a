"""Faster LLM decoding without training: weight-aware activation sparsity for Hugging Face causal LMs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = [
    "AccessError", "BundleError", "CalibrationError", "Chunk", "ContextLengthError", "Generation", "Model",
    "PromptError",
    "ResourceError", "UnavailableError", "UnsupportedModelError", "UploadError", "UsageError", "WisparseConfig",
    "WisparseError", "__version__", "convert", "desparsify", "load", "sparsify",
]  # fmt: skip

__version__ = "0.1.0"

# In a checkout the folders beside this one are sub-packages. This makes them importable from the checkout's root, and
# with an editable install that is older than a file. An installed copy has no such folders.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "converter").is_dir():
    __path__[:] = [str(_ROOT / "wisparse"), str(_ROOT)]

if TYPE_CHECKING:
    from .converter.api import convert
    from .converter.masking import WisparseConfig, desparsify, sparsify
    from .formats.errors import (
        AccessError,
        BundleError,
        CalibrationError,
        ContextLengthError,
        PromptError,
        ResourceError,
        UnavailableError,
        UnsupportedModelError,
        UploadError,
        UsageError,
        WisparseError,
    )
    from .runtime.backends import load
    from .runtime.model import Chunk, Generation, Model
else:
    # The same names, imported on first use, so that `import wisparse` is quick. Type checkers do not see this, as
    # with __getattr__ every name would exist. A test compares the two lists.
    _PUBLIC = {
        "converter.api": ("convert",),
        "converter.masking": ("WisparseConfig", "desparsify", "sparsify"),
        "formats.errors": tuple(name for name in __all__ if name.endswith("Error")),
        "runtime.backends": ("load",),
        "runtime.model": ("Generation", "Model", "Chunk"),
    }

    def __getattr__(name: str) -> Any:
        for module, names in _PUBLIC.items():
            if name in names:
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
