"""Faster LLM decoding without training: weight-aware activation sparsity for Hugging Face causal LMs.

import wisparse
model = wisparse.load("path/to/bundle")
print(model.generate("Why is the sky blue?", max_new_tokens=200).text)
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["WisparseConfig", "__version__", "convert", "load", "sparsify"]

__version__ = "0.1.0"

# Run from the root of a checkout, Python finds this folder before an installed copy, and the rooms beside it are its
# sub-packages there. An installed copy has no such neighbours and is left alone.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "converter").is_dir() and str(_ROOT) not in __path__:
    __path__.append(str(_ROOT))

# Public name -> the room that defines it. Resolved on first use: `import wisparse` must stay light.
_PUBLIC = {
    "WisparseConfig": "wisparse.converter.integration",
    "convert": "wisparse.converter.pipeline",
    "load": "wisparse.runtime.loader",
    "sparsify": "wisparse.converter.sparsify",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'wisparse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
