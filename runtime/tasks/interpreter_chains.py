"""Interpreter chains: small programs run line after line, each line from the value before, graded exactly.

One damaged token is enough to spoil a long answer, which likelihood hardly shows and one short line
(`interpreter_lines`) shows seldom. Here an answer is the trace of a whole program: eight lines, of arithmetic on a
running number, on a list, or on a word; right only if every line is.

    >>> [9, 2, 14][::-1]
    [14, 2, 9]                  <- to be produced
    >>> sorted([14, 2, 9])
    [2, 9, 14]                  <- to be produced
    >>> max([2, 9, 14])
    14                          <- to be produced
    >>> 14 + 30
    ...

The next line holds the last value, so the lines are given, one question each, after the right values of those before.
That is the same as a session in which the model goes on from its own values: a trace is right only as long as these are
the right ones. Before the program stand eight solved lines, as many as it has itself: with the last half of a prompt
sparse (``prefill="half"``) all the program's own lines are, as if they had been decoded; with ``all``, those before it
too.

Made from a seed with the standard library alone; `interpreter_chains_task` is what the harness reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from .interpreter_lines import make_problems

TASK = "interpreter_chains"

# What the harness asks; a benchmark makes others.
COUNT, SEED = 100, 0

STEPS = 8

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

Step = tuple[str, object]


class Chain(NamedTuple):
    """A program and its trace.

    Attributes:
        session: solved lines to begin with; ends with a line break.
        sources: the program's lines, without ``>>>``.
        answers: what the interpreter prints after each.
        kind: ``arithmetic``, ``list`` or ``word``.
    """

    session: str
    sources: list[str]
    answers: list[str]
    kind: str

    def questions(self) -> Iterator[str]:
        """What follows the session, for each line: the lines before with their right values, then the line itself."""
        before = ""
        for source, answer in zip(self.sources, self.answers, strict=True):
            yield f"{before}>>> {source}\n"
            before += f">>> {source}\n{answer}\n"


def make_chains(count: int, seed: int, solved: int = STEPS) -> list[Chain]:
    """Fresh chains; the same arguments give the same ones on every machine.

    Args:
        count: how many.
        seed: of the generator.
        solved: solved lines before the program.
    """
    draw = random.Random(seed)
    chains = []
    for _ in range(count):
        lines = make_problems(1, _below(draw, 1 << 30), solved)[0].prompt
        session = lines[: lines.rindex(">>> ")]
        kind = ("arithmetic", "list", "word")[_below(draw, 3)]
        steps = {"arithmetic": _arithmetic, "list": _of_list, "word": _of_word}[kind](draw)
        chains.append(Chain(session, [source for source, _ in steps], [repr(value) for _, value in steps], kind))
    return chains


def _below(draw: random.Random, limit: int) -> int:
    # random() alone is promised to be the same in every version of Python.
    return int(draw.random() * limit)


def _arithmetic(draw: random.Random, start: int | None = None, steps: int = STEPS) -> list[Step]:
    """Sums, differences and products of a running number, which stays within 0 and 99."""
    value = _below(draw, 100) if start is None else start
    found: list[Step] = []
    for _ in range(steps):
        sign = "+-*"[_below(draw, 3)]
        if sign == "*" and not 0 < value < 50:
            sign = "-+"[value == 0]
        if sign == "+":
            right = _below(draw, 100 - value)
            after = value + right
        elif sign == "-":
            right = _below(draw, value + 1)
            after = value - right
        else:
            right = 2 + _below(draw, min(9, 99 // value) - 1)
            after = value * right
        found.append((f"{value} {sign} {right}", after))
        value = after
    return found


def _of_list(draw: random.Random) -> list[Step]:
    """A list turned round and sorted by turns, one number of it, and arithmetic on that."""
    items = [_below(draw, 21) for _ in range(5 + _below(draw, 2))]
    found: list[Step] = []
    for place in range(4):
        source, items = (f"sorted({items})", sorted(items)) if place % 2 else (f"{items}[::-1]", items[::-1])
        found.append((source, items))
    place = _below(draw, len(items))
    source, value = (f"max({items})", max(items)) if _below(draw, 2) else (f"{items}[{place}]", items[place])
    return [*found, (source, value), *_arithmetic(draw, value, STEPS - len(found) - 1)]


def _of_word(draw: random.Random) -> list[Step]:
    """A word and its mirror image joined, in capitals, counted, and arithmetic on that."""
    word = "".join(_LETTERS[_below(draw, 26)] for _ in range(2 + _below(draw, 2)))
    joined = word + word[::-1]
    found: list[Step] = [
        (f"{word!r} + {word[::-1]!r}", joined),
        (f"{joined!r}.upper()", joined.upper()),
        (f"len({joined.upper()!r})", len(joined)),
    ]
    return [*found, *_arithmetic(draw, len(joined), STEPS - len(found))]
