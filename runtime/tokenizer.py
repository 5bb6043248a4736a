"""A stranger's ``tokenizer.json``, given to the tokenizers library.

The library's Rust part panics on some contents that its reader lets through. Python sees a BaseException of its own
kind, after a page for developers went to stderr. So the known causes are looked for first; whatever else panics is an
error of ours all the same, only with that page above it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from wisparse.formats.errors import BundleError
from wisparse.formats.safe_json import parse_json

__all__ = ["faults_are_errors", "read_tokenizer"]

_NAME = "tokenizer.json"
# Without a prefix, as in every model that is supported, its merges need not be read twice.
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


def read_tokenizer(data: bytes) -> Tokenizer:
    """The tokenizer that ``data`` describes, without truncation and padding.

    Raises:
        BundleError: it is none, or one that cannot encode.
    """
    if _PREFIX.search(data):
        _check_merges(parse_json(data, _NAME, BundleError))
    try:
        tokenizer = Tokenizer.from_buffer(data)
        # Left over from training, either would change a prompt silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except BaseException as error:
        # The library reports damage as bare Exception, and a panic as a BaseException.
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise BundleError(f"{_NAME}: not a tokenizer of the tokenizers library: {error!s:.200}") from error
    for part in _parts(_state(tokenizer.post_processor)):
        _check_template(part)
    for part in _parts(_state(tokenizer.normalizer)):
        if part.get("prepend") == "" or part.get("pattern") in ({"String": ""}, {"Regex": ""}):
            raise BundleError(f"{_NAME}: normalizer {part['type']}: expected a text, found an empty one")
    return tokenizer


@contextmanager
def faults_are_errors() -> Iterator[None]:
    """Around every use of the tokenizer: what goes wrong inside it is the fault of the file.

    Raises:
        BundleError: the library failed, or panicked.
    """
    try:
        yield
    except BaseException as error:
        # It raises the bare class for what it finds out only now, an unknown token that is in no vocabulary, say; that
        # of panics is in no module that could be imported.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise BundleError(f"{_NAME}: the tokenizers library cannot run it: {error!s:.200}") from error


def _check_merges(document: dict[str, Any]) -> None:
    """BPE takes the prefix off the right half of every merge, without looking whether it is there."""
    model = document.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for index, merge in enumerate(merges):
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(halves, list) or len(halves) != 2 or not isinstance(halves[1], str):
            continue  # the library has words for that
        if not halves[1].startswith(prefix):
            raise BundleError(f"{_NAME}: merge {index}: expected its right half to begin with {prefix!r:.80}")


def _check_template(part: dict[str, Any]) -> None:
    """A template names special tokens, whose ids it has to hold."""
    if part.get("type") != "TemplateProcessing":
        return
    for piece in [*part["single"], *part["pair"]]:
        name = piece.get("SpecialToken", {}).get("id")
        if name is not None and name not in part["special_tokens"]:
            raise BundleError(f"{_NAME}: post_processor: no id for its special token {name!r:.80}")


def _state(component: Any) -> Any:
    """What the library understood, as JSON."""
    return None if component is None else json.loads(component.__getstate__())


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """Every component in a sequence of them, or in a sequence of sequences."""
    pending = [state]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            yield item
            pending += [item.get("normalizers"), item.get("processors")]
