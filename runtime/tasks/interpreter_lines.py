"""Interpreter lines: a generation task with an exact answer, for models trained on Python.

A prompt is a short interpreter session whose lines are solved, and one more line; the answer is what the interpreter
would print. It breaks visibly when a model is damaged, needs no download, and an answer is right or wrong:

    >>> 12 + 30
    42
    >>> len('tau')
    3
    >>> sorted([9, 2, 14])
    [2, 9, 14]        <- to be produced

The problems are made from a seed, the same on every machine. This file is read by lm-evaluation-harness through
``interpreter_lines.yaml`` and needs nothing but the standard library.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

TASK = "interpreter_lines"
COUNT, SEED = 500, 0

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_KINDS = (
    *("add", "subtract", "multiply", "compare", "join", "upper"),
    *("len", "sum", "max", "sorted", "index", "reverse"),
)


class Problem(NamedTuple):
    """``prompt`` ends with a line break, ``answer`` has none; ``kind`` says which of the twelve expressions it is."""

    prompt: str
    answer: str
    kind: str


def _expression(draw: random.Random) -> tuple[str, str, object]:
    """One of twelve kinds of expression, equally likely: its kind, its source and its value."""

    def number(below: int) -> int:
        # random() alone is promised to be the same in every version of Python.
        return int(draw.random() * below)

    def word() -> str:
        return "".join(_LETTERS[number(26)] for _ in range(2 + number(5)))

    def numbers(longest: int = 6) -> list[int]:
        return [number(21) for _ in range(2 + number(longest - 1))]

    kind = _KINDS[number(len(_KINDS))]
    if kind in ("add", "subtract", "compare", "multiply"):
        left, right = number(100), 1 + number(9) if kind == "multiply" else number(100)
        values = {"add": left + right, "subtract": left - right, "compare": left > right, "multiply": left * right}
        sign = {"add": "+", "subtract": "-", "compare": ">", "multiply": "*"}[kind]
        return kind, f"{left} {sign} {right}", values[kind]
    if kind in ("join", "upper", "len"):
        text = word()
        back = text[::-1]
        sources = {"join": f"{text!r} + {back!r}", "upper": f"{text!r}.upper()", "len": f"len({text!r})"}
        return kind, sources[kind], {"join": text + back, "upper": text.upper(), "len": len(text)}[kind]
    items = numbers(longest=3 if kind == "sum" else 6)
    if kind == "index":
        place = number(len(items))
        return kind, f"{items}[{place}]", items[place]
    if kind == "reverse":
        return kind, f"{items}[::-1]", items[::-1]
    return kind, f"{kind}({items})", {"sum": sum(items), "max": max(items), "sorted": sorted(items)}[kind]


def make_problems(count: int, seed: int, solved: int = 8) -> list[Problem]:
    """Fresh problems; the same arguments give the same problems on every machine.

    Args:
        count: how many.
        seed: of the generator.
        solved: solved lines before the one in question.
    """
    draw = random.Random(seed)
    problems = []
    for _ in range(count):
        lines = [_expression(draw) for _ in range(solved + 1)]
        session = "".join(f">>> {source}\n{value!r}\n" for _, source, value in lines[:-1])
        kind, source, value = lines[-1]
        problems.append(Problem(f"{session}>>> {source}\n", repr(value), kind))
    return problems


def custom_dataset(**_: Any) -> dict[str, Any]:
    """What the harness calls: the problems as a data set with one split, ``test``."""
    import datasets

    return {"test": datasets.Dataset.from_list([problem._asdict() for problem in make_problems(COUNT, SEED)])}
