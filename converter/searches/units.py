"""A search as units of work, each done once: kept in the state, dealt out among processes, counted alike everywhere.

The outcome of a unit is numbers, strings and tensors in dicts and lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..bench.workbench import BlockView, Workbench
from ..work.processes import Processes
from ..work.state import Store, pack, unpack

__all__ = ["Units"]


class Units:
    """The units of one search.

    Args:
        store: where outcomes are kept.
        bench: whose KL evaluations are counted, also those that a unit from the store once took.
        prefix: of the units' keys.
    """

    def __init__(self, store: Store, bench: Workbench, prefix: str, processes: Processes) -> None:
        self._store, self._bench, self._prefix, self._processes = store, bench, prefix, processes

    def one(self, key: str, compute: Callable[[], Any]) -> Any:
        """The outcome of ``compute``, which every process calls, from the store if it is there."""
        data = self._load(key)
        if data is None:
            data = self._packed(compute)
            self._save(key, data)
        return self._unpacked(data)

    def many(self, keys: Sequence[str], compute: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
        """``(index, compute(index))`` in order, each computed by one process; kept after every round of them."""
        index = self._processes.index
        for share in self._processes.rounds(len(keys)):
            data = {i: self._load(keys[i]) for i in share}
            mine = share[index] if index < len(share) else None
            fresh = self._packed(partial(compute, mine)) if mine is not None and data[mine] is None else None
            for i, found in zip(share, self._processes.gather(fresh), strict=False):
                if found is not None:
                    data[i] = found
                    self._save(keys[i], found)
            for i in sorted(share):
                yield i, self._unpacked(data[i])

    def blocks(self, key: str, compute: Callable[[BlockView], Any]) -> Iterator[tuple[list[str], Any]]:
        """As `many`, one unit per block: the names of the block's projections, and the outcome."""
        bench, processes = self._bench, self._processes
        shares = processes.rounds(len(bench.groups))
        views = bench.blocks({share[processes.index] for share in shares if processes.index < len(share)})

        def compute_block(index: int) -> Any:
            return compute(next(view for view in views if view.index == index))

        for index, found in self.many([f"{key}/{i}" for i in range(len(bench.groups))], compute_block):
            yield bench.groups[index], found

    def _packed(self, compute: Callable[[], Any]) -> bytes:
        before = self._bench.num_kl_evaluations
        value = compute()
        data = pack([value, self._bench.num_kl_evaluations - before])
        self._bench.num_kl_evaluations = before
        return data

    def _unpacked(self, data: bytes | None) -> Any:
        value, evaluations = unpack(data or b"")
        self._bench.num_kl_evaluations += evaluations
        return value

    def _load(self, key: str) -> bytes | None:
        return self._store.load(f"{self._prefix}/{key}")

    def _save(self, key: str, data: bytes) -> None:
        self._store.save(f"{self._prefix}/{key}", data)
