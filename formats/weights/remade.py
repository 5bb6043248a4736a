"""A checkpoint of which some tensors are not in the files: each is made when it is read, and forgotten again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from .checkpoint import Checkpoint, is_finite

__all__ = ["Remade", "remade"]


@dataclass(frozen=True)
class Remade(Checkpoint):
    """``made``: name -> what makes a tensor that is not in the files, on the CPU and contiguous."""

    made: Mapping[str, Callable[[], Tensor]]

    def chunks(self, name: str, chunk_bytes: int = 32 << 20) -> Iterator[Tensor]:
        if name not in self.made:
            yield from super().chunks(name, chunk_bytes)
            return
        tensor = self._stored(name).flatten()
        yield from tensor.split(max(1, chunk_bytes // tensor.dtype.itemsize))

    def _stored(self, name: str) -> Tensor:
        if name not in self.made:
            return super()._stored(name)
        tensor = self.made[name]()
        if tensor.is_floating_point() and not is_finite(tensor):
            raise self.error(f"{name}: made anew, it holds values beyond {tensor.dtype}'s range")
        return tensor


def remade(source: Checkpoint, made: Mapping[str, Callable[[], Tensor]], **changes: Any) -> Remade:
    """``source`` with other attributes (``tensors``, ``config``, …), and with these tensors made.

    What ``source`` makes itself, and is still among the tensors, it makes here too.
    """
    same = {field.name: getattr(source, field.name) for field in fields(Checkpoint)} | changes
    before = source.made if isinstance(source, Remade) else {}
    every = {name: make for name, make in {**before, **made}.items() if name in same["tensors"]}
    return Remade(**same, made=every)
