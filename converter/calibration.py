"""The calibration text: what the statistics and the thresholds rest on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from wisparse.formats.errors import CalibrationError

from .documents import (
    CalibrationTokens,
    Conversations,
    Document,
    TemplateError,
    dataset_documents,
    is_dataset_id,
    path_documents,
)
from .processes import Progress
from .self_calibration import write_calibration

# The paper's mixture (its section 5.1); the names are those of the data sets' present homes on the Hub.
PAPER_DATASETS = (
    "mit-han-lab/pile-val-backup:validation",
    "sahil2801/CodeAlpaca-20k:train",
    "meta-math/MetaMathQA:train",
)

# A document is cut into passages of about this many characters per token of a sequence, so that one long file does not
# fill every sequence with its first pages.
_CHARACTERS_PER_TOKEN = 6


def load_calibration(
    spec: str | Sequence[str],
    tokenizer: Any,
    model: Any = None,
    num_samples: int = 16,
    seq_len: int = 512,
    seed: int = 0,
    progress: Progress | None = None,
) -> CalibrationTokens:
    """Calibration tokens (num_samples, seq_len) from ``self``, ``paper``, a Hub data set, or one or more paths.

    ``tokenizer`` and ``model`` are transformers'; the model is needed for ``self`` only.
    """
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise CalibrationError("no calibration source; expected self, paper, a Hub data set or paths")
    progress = progress or Progress(enabled=False)
    if specs == ["self"]:
        if model is None:
            raise CalibrationError("calibration 'self' needs the model; expected one, found None")
        return write_calibration(model, tokenizer, [(num_samples, seq_len, seed)], progress)[0]
    source = describe_spec(specs)
    with progress.stage("Calibration", num_samples) as stage:
        if specs == ["paper"]:
            # Equal parts: the remainder goes to the first ones.
            rows: list[list[int]] = []
            for index, name in enumerate(PAPER_DATASETS):
                share = num_samples // len(PAPER_DATASETS) + (index < num_samples % len(PAPER_DATASETS))
                if share:
                    rows += pack(dataset_documents(name, seed), tokenizer, share, seq_len, seed, name)
            random.Random(seed).shuffle(rows)
        else:
            paths = [spec for spec in specs if not is_dataset_id(spec)]
            for word in ("self", "paper"):
                if word in paths and not Path(word).exists():
                    raise CalibrationError(f"calibration {word!r} stands alone; it cannot be mixed with other sources")
            documents = [path_documents(paths, seed)] if paths else []
            documents += [dataset_documents(spec, seed) for spec in specs if is_dataset_id(spec)]
            rows = pack(chain.from_iterable(documents), tokenizer, num_samples, seq_len, seed, source)
        stage.advance(num_samples)
    return CalibrationTokens.from_rows(rows, source, seed)


def describe_spec(spec: str | Sequence[str]) -> str:
    """A spec as it is recorded in the recipe: names, never paths of this machine."""
    specs = [spec] if isinstance(spec, str) else list(spec)
    return ", ".join(
        one if one in ("self", "paper") or is_dataset_id(one) else Path(one).resolve().name for one in specs
    )


def pack(
    documents: Iterable[Document], tokenizer: Any, num_samples: int, seq_len: int, seed: int, source: str
) -> list[list[int]]:
    """Cut documents into ``num_samples`` rows of ``seq_len`` tokens.

    Documents are cut into passages, the passages are put into a seeded order, and rows are filled one after the other;
    what is left of a passage when its row is full is used only if the passages run out. So a large source is sampled
    from all over, and a source that is just long enough suffices.
    """
    # What the tokenizer puts in front of a text: usually the beginning-of-text token, or nothing.
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = (i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain)
    prefix = full[: next(starts, 0)]
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    body = seq_len - len(prefix)
    if body < 1:
        raise CalibrationError(
            f"--seq-len {seq_len}: expected more than the {len(prefix)} tokens every text begins with"
        )
    passages = list(_passages(documents, tokenizer, num_samples, seq_len))
    random.Random(seed).shuffle(passages)
    rows: list[list[int]] = []
    row: list[int] = []
    leftovers: list[list[int]] = []
    found = 0

    def add(tokens: list[int]) -> list[int]:
        """Fill the row under way; returns what did not fit."""
        nonlocal row
        joined = (separator if row else []) + tokens
        room = body - len(row)
        row += joined[:room]
        if len(row) == body:
            rows.append(prefix + row)
            row = []
        return joined[room:]

    for passage in passages:
        if len(rows) == num_samples:
            return rows
        tokens = tokenizer.encode(passage, add_special_tokens=False)
        if prefix and tokens[: len(prefix)] == prefix:  # a chat template wrote it already
            tokens = tokens[len(prefix) :]
        if not tokens:
            continue
        found += len(tokens)
        if rest := add(tokens):
            leftovers.append(rest)
    for rest in leftovers:
        while rest and len(rows) < num_samples:
            rest = add(rest)
    if len(rows) < num_samples:
        raise CalibrationError(
            f"calibration text {source} is too short: {num_samples} samples of {seq_len} tokens need "
            f"{num_samples * body} tokens, found {found}; give more text, or lower --num-samples or --seq-len"
        )
    return rows


def _passages(documents: Iterable[Document], tokenizer: Any, num_samples: int, seq_len: int) -> Iterator[str]:
    """Passages cut at the last line's end in their second half, if there is one."""
    length = max(256, seq_len * _CHARACTERS_PER_TOKEN)
    # Enough to choose from; a corpus of gigabytes is not read to its end for a few thousand tokens.
    enough = max(1 << 24, 16 * num_samples * length)
    read = 0
    conversations = Conversations(tokenizer)
    for document in documents:
        text = _text(document, conversations)
        read += len(text)
        start = 0
        while start < len(text):
            end = min(start + length, len(text))
            if end < len(text):
                end = text.rfind("\n", start + length // 2, end) + 1 or end
            if text[start:end].strip():
                yield text[start:end]
            start = end
        if read >= enough:
            return


def _text(document: Document, conversations: Conversations) -> str:
    if isinstance(document, str):
        return document
    if conversations.source:
        try:
            return conversations.render(document)
        except TemplateError as error:
            # A template is a program of the model's author and may refuse roles or orders in any way it likes.
            raise CalibrationError(
                f"the model's chat template refuses a conversation of the calibration data: {error!s:.200}"
            ) from error
    return "\n\n".join(str(message["content"]) for message in document)
