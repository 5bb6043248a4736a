"""Says that kernels are being compiled: a first use takes seconds, and nobody should wonder what for.

Both compilers keep their work on disk, so it is said where it is really compiled, once in a process and for each kind
of kernels; nothing is said where they are found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["say_compiling", "triton_compiling"]

log = logging.getLogger(__name__)

_said: set[str] = set()


def say_compiling(kind: str, count: int) -> None:
    """Log, as a warning, which every verbosity but --quiet shows, that ``count`` kernels are being compiled."""
    if kind in _said:
        return
    _said.add(kind)
    log.warning(
        "compiling %d kernel%s for the %s, which takes some seconds; it happens once, later runs find %s on disk",
        count,
        "s"[: count != 1],
        kind,
        "them" if count != 1 else "it",
    )


@contextmanager
def triton_compiling(count: int) -> Iterator[None]:
    """Around first launches of ``count`` Triton kernels: says so once one of them was not found on disk."""
    import triton

    compilation: Any = triton.knobs.compilation
    before = compilation.listener

    def listen(*, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            say_compiling("GPU", count)
        if before is not None:
            before(cache_hit=cache_hit, **more)

    compilation.listener = listen
    try:
        yield
    finally:
        compilation.listener = before
