"""Which versions of vLLM the plug-in knows, and what it says to the others."""

from __future__ import annotations

import re

from wisparse.formats.errors import UsageError

__all__ = ["BEFORE", "FIRST", "require_known_version"]

# Those in between were not run; what differs between the two that were is in the code beside it.
FIRST, BEFORE = (0, 26), (0, 33)


def require_known_version(found: str) -> None:
    """Raise UsageError unless ``found``, vLLM's own ``__version__``, is in the declared range."""
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) < BEFORE:
        raise UsageError(
            f"vLLM: expected a version from {_text(FIRST)} to before {_text(BEFORE)}, found {found}; install one "
            "(pip install 'wisparse[vllm]') or run the dense model: VLLM_PLUGINS='' vllm serve …"
        )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
