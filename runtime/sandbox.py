"""A Jinja environment for a stranger's template: no way to Python's objects, and an end to its time and memory.

Jinja's sandbox hides attributes and mutation; it does not stop ``'x' * 10**10``, two nested loops, or a list that holds
itself twice, again and again. Here everything that can repeat or grow is metered: loops and calls look at the clock,
and whatever makes a string or a list longer pays for its length, before it is made where one step could be too much.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["Sandbox", "budget"]

# Far above what a conversation of any length needs, and little for a machine.
_MOST_CHARACTERS = 64 << 20
_MOST_ITEMS = 1 << 20
_MOST_SECONDS = 3.0
# Widths, counts and exponents: what a template says about layout, never about data.
_MOST_WIDTH = 100_000
_MOST_BITS = 128
_LONG_NUMBER = re.compile(r"\d{6}|\*|:[^}]*\{")


class _Meter:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._characters = _MOST_CHARACTERS
        self._deadline = time.monotonic() + _MOST_SECONDS

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it takes more than {_MOST_SECONDS:.0f} seconds")

    def spend(self, characters: float) -> None:
        self.tick()
        self._characters -= int(min(characters, 2 * _MOST_CHARACTERS))
        if self._characters < 0:
            raise OverflowError(f"it makes more than {_MOST_CHARACTERS:,} characters")


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """What is rendered inside may take three seconds and make 64 million characters, all in all."""
    token = _METER.set(_Meter())
    try:
        yield
    finally:
        _METER.reset(token)


class _Counted(Iterable[Any]):
    """What a loop runs over, paying for every turn; it still has the length that ``loop.last`` needs."""

    def __init__(self, items: Any, meter: _Meter, cost: int) -> None:
        self._items = items if isinstance(items, Sized) else list(items)
        self._meter, self._cost = meter, cost

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:  # type: ignore[attr-defined]
            self._meter.spend(self._cost)
            yield item

    def __len__(self) -> int:
        return len(self._items)


class _Metering(NodeTransformer):
    """Puts the internal filters below around loops, ``~`` and literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_weighed")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_weighed")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_weighed") if node.ctx == "load" else node


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Renders inside ``budget()``."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._cost = 1
        self.globals.pop("lipsum", None)
        for name, function in list(self.filters.items()):
            self.filters[name] = self._metered(name, function)
        self.filters |= {
            "_counted": lambda items: _Counted(items, self._meter, self._cost),
            "_concatenated": self._concatenate,
            "_weighed": self._weigh,
        }

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, metered like the others."""
        self.filters[name] = self._metered(name, function)

    @property
    def _meter(self) -> _Meter:
        # Outside a budget only constants are folded, while a template is compiled: each on its own.
        return _METER.get() or _Meter()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        # A turn of a loop can print all of the template's own text.
        self._cost = max(len(source) // 16, 1)
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if operator in ("*", "**") and bits > _MOST_BITS:
                raise OverflowError("such a large number is not allowed in a chat template")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*" and (_is_sequence(left) or _is_sequence(right)):
            items, times = (left, right) if _is_sequence(left) else (right, left)
            self._make(items, len(items) * max(times, 0) if isinstance(times, int) else 0)
        elif operator == "+" and _is_sequence(left) and _is_sequence(right):
            self._make(left, len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._meter.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            self._check_growth(getattr(obj, "__name__", ""), owner, args, kwargs)
        else:
            self._weigh([*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, (str, bytes)):
            self._meter.spend(len(result))
        return result

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # carries the mark that says what Jinja passes first
        def metered(*args: Any, **kwargs: Any) -> Any:
            values = args[1:] if getattr(function, "jinja_pass_arg", None) is not None else args
            if name == "join" and values and not isinstance(values[0], Sized):
                joined = list(values[0])
                args = tuple(joined if value is values[0] else value for value in args)
                values = (joined, *values[1:])
            if values:
                self._check_growth(name, values[0], values[1:], kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, (str, bytes)):
                self._meter.spend(len(result))
            return result

        return metered

    def _check_growth(self, name: str, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pay in advance for what a method or filter of this name may make of ``subject``."""
        given = [*args, *kwargs.values()]
        longest = max((len(value) for value in given if isinstance(value, (str, bytes))), default=0)
        size = len(subject) if isinstance(subject, Sized) else 1
        if name in ("format", "format_map") and isinstance(subject, (str, bytes)):
            self._check_format(subject, given)
            return
        if name == "list" and size > _MOST_ITEMS:
            raise OverflowError(f"a list of more than {_MOST_ITEMS:,} items is not allowed in a chat template")
        if name == "translate":
            raise OverflowError("translate is not allowed in a chat template")
        if any(isinstance(value, int) and abs(value) > _MOST_WIDTH for value in given):
            raise OverflowError(f"{name} with such a large number is not allowed in a chat template")
        widest = max((abs(value) for value in given if isinstance(value, int)), default=0)
        if name in ("replace", "join", "wordwrap", "indent", "xmlattr", "tojson", "expandtabs"):
            self._meter.spend(size * max(longest, widest if name in ("indent", "tojson", "expandtabs") else 1))
        elif name in ("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"):
            self._meter.spend(size + widest)

    def _check_format(self, text: str | bytes, values: Iterable[Any]) -> None:
        pattern = text if isinstance(text, str) else text.decode("latin-1")
        if len(pattern) > 1024 or (_LONG_NUMBER.search(pattern) and pattern.strip("%{}") != pattern):
            raise OverflowError("such a format is not allowed in a chat template")
        values = [value for item in values for value in (item.values() if isinstance(item, dict) else [item])]
        self._weigh(values)
        longest = max((len(value) for value in values if isinstance(value, (str, bytes, list, tuple))), default=0)
        self._meter.spend(len(pattern) * (1 + longest))

    def _make(self, kind: Any, length: int) -> None:
        if not isinstance(kind, (str, bytes)) and length > _MOST_ITEMS:
            raise OverflowError(f"a list of more than {_MOST_ITEMS:,} items is not allowed in a chat template")
        self._meter.spend(length)

    def _concatenate(self, parts: list[Any]) -> str:
        texts = [part if isinstance(part, str) else str(part) for part in parts]
        self._meter.spend(sum(map(len, texts)))
        return "".join(texts)

    def _weigh(self, value: Any) -> Any:
        """``value``, unless written out in full it is huge: a list can hold itself a million times for nothing."""
        weight, pending = 0, [value]
        while pending:
            item = pending.pop()
            weight += 1
            if weight > _MOST_ITEMS:
                raise OverflowError("such deeply shared lists are not allowed in a chat template")
            if isinstance(item, Namespace):
                item = object.__getattribute__(item, "_Namespace__attrs")
            if isinstance(item, dict):
                pending += item.values()
            elif isinstance(item, (list, tuple)):
                pending += item
        self._meter.tick()
        return value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))
