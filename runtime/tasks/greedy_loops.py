"""Greedy loops: the share of long greedy answers that end in saying the same thing over and over.

What users notice first of a damaged model, and no likelihood shows. A prompt is the opening of a piece of Python or of
plain text, answered greedily with 256 tokens. An answer loops if its last 192 characters repeat a piece of at most 64,
so at least three times over. Small dense models loop too: what counts is how many more answers do.

Made from a seed. This file is read by lm-evaluation-harness through ``greedy_loops.yaml`` and needs nothing but the
standard library.
"""

from __future__ import annotations

import random
from typing import Any

TASK = "greedy_loops"

# What the harness asks; a benchmark makes more.
COUNT, SEED = 100, 0
MAX_NEW_TOKENS = 256

_TAIL, _LONGEST_PIECE = 192, 64

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
_VERBS = ("read", "write", "open", "close", "find", "sort", "merge", "split", "send", "copy", "parse", "count", "build")
_NOUNS = (
    *("file", "record", "message", "table", "user", "letter", "garden", "window", "queue", "token", "image", "number"),
    *("list", "house", "cache", "server", "river", "field", "book", "engine", "clock", "color", "market", "signal"),
)


def make_prompts(count: int, seed: int) -> list[str]:
    """Openings of functions, classes, tests, questions and stories; the same ones on every machine, none twice.

    Args:
        count: how many, at most 10,000.
        seed: of the generator.
    """
    draw = random.Random(seed)

    def one(words: tuple[str, ...]) -> str:
        # random() alone is promised to be the same in every version of Python.
        return words[int(draw.random() * len(words))]

    found: dict[str, None] = {}
    while len(found) < count:
        opening, verb, noun, other = one(_OPENINGS), one(_VERBS), one(_NOUNS), one(_NOUNS)
        words = {"verb": verb, "noun": noun, "other": other}
        capitals = {word.capitalize(): value.capitalize() for word, value in words.items()}
        found[opening.format(**words, **capitals)] = None
    return list(found)


def loops(answer: str) -> bool:
    """Whether the last 192 characters of an answer have a period of at most 64; a shorter answer does not loop."""
    tail = answer[-_TAIL:]
    return len(tail) == _TAIL and any(tail[period:] == tail[:-period] for period in range(1, _LONGEST_PIECE + 1))


def custom_dataset(**_: Any) -> dict[str, Any]:
    """What the harness calls: the prompts as a data set with one split, ``test``."""
    import datasets

    return {"test": datasets.Dataset.from_list([{"prompt": prompt} for prompt in make_prompts(COUNT, SEED)])}


def process_results(_: dict[str, Any], results: list[str]) -> dict[str, float]:
    """What the harness calls with the one answer to a prompt."""
    return {"loops": float(loops(results[0]))}
