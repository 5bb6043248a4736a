"""Questions of the tasks that ship with the project, made from a seed with the standard library alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

SEED = 0
NUM_LINES, NUM_CHAINS, NUM_LOOPS = 500, 100, 100  # what the harness asks
STEPS = 8  # lines of a chain, and solved lines before it


class Draw:
    """``random.random`` alone is promised to be the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def word(self, longest: int) -> str:
        return "".join(chr(ord("a") + self.below(26)) for _ in range(2 + self.below(longest - 1)))


class Problem(NamedTuple):
    prompt: str  # ends with a line break
    answer: str  # has none
    kind: str  # of expression, one of twelve


_SIGNS = {"add": "+", "subtract": "-", "compare": ">", "multiply": "*"}
_KINDS = ("add", "subtract", "multiply", "compare", "join", "upper", "len", "sum", "max", "sorted", "index", "reverse")


def _expression(draw: Draw) -> tuple[str, str]:
    kind = _KINDS[draw.below(len(_KINDS))]
    if kind in _SIGNS:
        left, right = draw.below(100), 1 + draw.below(9) if kind == "multiply" else draw.below(100)
        return kind, f"{left} {_SIGNS[kind]} {right}"
    if kind in ("join", "upper", "len"):
        text = draw.word(6)
        sources = {"join": f"{text!r} + {text[::-1]!r}", "upper": f"{text!r}.upper()", "len": f"len({text!r})"}
        return kind, sources[kind]
    items = [draw.below(21) for _ in range(2 + draw.below(2 if kind == "sum" else 5))]
    if kind == "index":
        return kind, f"{items}[{draw.below(len(items))}]"
    return kind, f"{items}[::-1]" if kind == "reverse" else f"{kind}({items})"


def _value(source: str) -> Any:
    """What the interpreter says to a line that was made here."""
    return eval(source)


def make_problems(count: int, seed: int, solved: int = 8) -> list[Problem]:
    """The same arguments give the same problems on every machine; ``solved`` lines stand before each."""
    draw = Draw(seed)
    problems = []
    for _ in range(count):
        *before, (kind, source) = [_expression(draw) for _ in range(solved + 1)]
        session = "".join(f">>> {line}\n{_value(line)!r}\n" for _, line in before)
        problems.append(Problem(f"{session}>>> {source}\n", repr(_value(source)), kind))
    return problems


class Chain(NamedTuple):
    session: str  # solved lines to begin with; ends with a line break
    sources: list[str]  # the program's lines, without ``>>>``
    answers: list[str]  # what the interpreter prints after each
    kind: str  # ``arithmetic``, ``list`` or ``word``

    def questions(self) -> Iterator[str]:
        """For each line: the lines before it with their right values, then the line itself."""
        before = ""
        for source, answer in zip(self.sources, self.answers, strict=True):
            yield f"{before}>>> {source}\n"
            before += f">>> {source}\n{answer}\n"


def make_chains(count: int, seed: int, solved: int = STEPS) -> list[Chain]:
    """The same arguments give the same chains on every machine; ``solved`` lines stand before each program."""
    draw = Draw(seed)
    chains = []
    for _ in range(count):
        lines = make_problems(1, draw.below(1 << 30), solved)[0].prompt
        session = lines[: lines.rindex(">>> ")]
        kind = ("arithmetic", "list", "word")[draw.below(3)]
        sources: list[str] = []
        value: Any = draw.below(100) if kind == "arithmetic" else None
        if kind == "list":
            items = [draw.below(21) for _ in range(5 + draw.below(2))]
            for place in range(4):
                sources.append(f"sorted({items})" if place % 2 else f"{items}[::-1]")
                items = _value(sources[-1])
            place = draw.below(len(items))
            sources.append(f"max({items})" if draw.below(2) else f"{items}[{place}]")
        elif kind == "word":
            word = draw.word(3)
            joined = word + word[::-1]
            sources += [f"{word!r} + {word[::-1]!r}", f"{joined!r}.upper()", f"len({joined.upper()!r})"]
        while len(sources) < STEPS:  # sums, differences and products of a number that stays within 0 and 99
            value = _value(sources[-1]) if sources else value
            sign = "+-*"[draw.below(3)]
            if sign == "*" and not 0 < value < 50:
                sign = "-+"[value == 0]
            if sign == "*":
                right = 2 + draw.below(min(9, 99 // value) - 1)
            else:
                right = draw.below(100 - value if sign == "+" else value + 1)
            sources.append(f"{value} {sign} {right}")
        chains.append(Chain(session, sources, [repr(_value(source)) for source in sources], kind))
    return chains


_TAIL, _LONGEST_PERIOD = 192, 64
_OPENINGS = (
    'def {verb}_{noun}(self, {other}):\n    """',
    "def {verb}_{noun}({other}, {noun}=None):\n    {other} = ",
    'class {Noun}{Other}:\n    """{Verb} the {noun} of a {other}.',
    "import os\nimport sys\n\n\ndef {verb}_{noun}s({other}s):\n    for {other} in {other}s:\n",
    "class Test{Noun}(unittest.TestCase):\n    def test_{verb}_{other}(self):\n",
    "# How to {verb} a {noun} when there is no {other}.\n",
    "The {noun} of a {other} is",
    "How do I {verb} a {noun}?\n\n",
    "Once there was a {noun} that wanted to {verb} every {other}.",
    "Here is a list of things to {verb}:\n1. The {noun}\n2. The {other}\n",
)
_VERBS = ["read", "write", "open", "close", "find", "sort", "merge", "split", "send", "copy", "parse", "count", "build"]
_NOUNS = ["file", "record", "message", "table", "user", "letter", "garden", "window", "queue", "token", "image"]
_NOUNS += ["number", "list", "house", "cache", "server", "river", "field", "book", "engine", "clock", "color"]
_NOUNS += ["market", "signal"]


def make_prompts(count: int, seed: int) -> list[str]:
    """Openings of functions, classes, tests, questions and stories; none twice, at most 10,000."""
    draw = Draw(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        opening, verb, noun, other = (words[draw.below(len(words))] for words in (_OPENINGS, _VERBS, _NOUNS, _NOUNS))
        words = {"verb": verb, "noun": noun, "other": other}
        capitals = {word.capitalize(): value.capitalize() for word, value in words.items()}
        found[opening.format(**words, **capitals)] = None
    return list(found)


def loops(answer: str) -> bool:
    """Whether the last 192 characters of an answer have a period of at most 64; a shorter answer does not loop."""
    tail = answer[-_TAIL:]
    return len(tail) == _TAIL and any(tail[period:] == tail[:-period] for period in range(1, _LONGEST_PERIOD + 1))
