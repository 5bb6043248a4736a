"""Documents to calibrate or evaluate on, read from files, folders and data sets."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.chat_template import ChatTemplate
from wisparse.formats.errors import AccessError, BundleError, CalibrationError, UsageError, first_line, printable
from wisparse.formats.hub import check_read_access


@dataclass(frozen=True)
class CalibrationTokens:
    """Token sequences (S, L) int64 and which of their tokens count (S, L) bool: not padding, nor the first of each.

    ``source``: what they were made from, without any path of this machine; ``seed``: of their order or sampling.
    """

    input_ids: Tensor
    keep: Tensor
    source: str
    seed: int

    @property
    def num_samples(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """How many tokens count."""
        return int(self.keep.sum())

    @cached_property
    def digest(self) -> str:
        """sha256 of the shape and the token ids, as ``sha256:<hex>``."""
        ids = self.input_ids.to("cpu", torch.int64).contiguous()
        hashed = hashlib.sha256(f"{tuple(ids.shape)}".encode())
        hashed.update(ids.numpy().astype("<i8").tobytes())
        return f"sha256:{hashed.hexdigest()}"

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], source: str, seed: int) -> CalibrationTokens:
        """From full rows of one length; the first token of each is excluded."""
        input_ids = torch.tensor(rows, dtype=torch.int64)
        keep = torch.ones_like(input_ids, dtype=torch.bool)
        keep[:, 0] = False
        return cls(input_ids, keep, source, seed)


class TemplateError(Exception):
    """The template refuses the messages, or fails; says which."""


class Conversations:
    """The chat template of a tokenizer of transformers'.

    Args:
        source: the template's text; None without one.
    """

    def __init__(self, tokenizer: Any) -> None:
        found = tokenizer.chat_template
        # Several are kept by name; the one that is meant without a name is called so.
        self.source: str | None = (found.get("default") if isinstance(found, dict) else found) or None
        self._variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}

    @cached_property
    def _template(self) -> ChatTemplate:
        assert self.source is not None
        return ChatTemplate(self.source, self._variables)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """The conversation as the model was trained on it."""
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except (BundleError, UsageError) as error:
            raise TemplateError(printable(str(error.__cause__ or error))) from error


_log = logging.getLogger("wisparse")

Document = str | list[dict[str, Any]]

_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.\[\]%:-]+)?")
_TABLES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
_TEXT_TABLES = (".csv", ".tsv")
# May lie in a data set's folder beside its tables.
_BESIDE_TABLES = re.compile(r"(README|LICEN[SC]E|NOTICE)[^/]*|.*\.(json|ya?ml)", re.IGNORECASE)
# (question, answer) under the names that data sets give them.
_PAIRS = (("prompt", "completion"), ("query", "response"), ("question", "answer"), ("instruction", "output"))


def is_dataset_id(spec: str) -> bool:
    """Whether ``spec`` names a data set of the Hub, ``owner/name`` or ``owner/name:split``, and no path here."""
    return bool(_DATASET_ID.fullmatch(spec)) and not os.path.exists(spec) and not Path(spec).suffix[1:].isalpha()


def path_documents(paths: Sequence[str], seed: int) -> Iterator[Document]:
    """The documents under ``paths``, file by file in a seeded order."""
    files = [(path, file) for path in paths for file in _files(path)]
    random.Random(seed).shuffle(files)
    for path, file in files:
        # A spreadsheet among other files is one text more; named by itself it is a data set, a document a line.
        if _is_dataset(file) and not (str(file) != path and file.suffix in _TEXT_TABLES):
            yield from _saved_dataset(file, seed)
        elif file.suffix in (".jsonl", ".ndjson"):
            for number, line in enumerate(_read(file).split("\n"), 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise CalibrationError(
                        f"{file}, line {number}: expected one JSON value per line ({error})"
                    ) from error
                yield document_of(record, f"{file}, line {number}")
        else:
            text = _read(file)
            if text.strip():
                yield text
            elif str(file) == path:
                raise CalibrationError(f"calibration file {path} is empty; expected text")


def dataset_documents(name: str, seed: int) -> Iterator[Document]:
    """The documents of a Hub data set, streamed in a seeded order."""
    datasets = _datasets()
    identifier, _, split = name.partition(":")
    # Asked first: datasets itself would try again for half a minute before it says that there is no network.
    check_read_access(identifier, dataset=True)
    try:
        if not split:
            splits = datasets.get_dataset_split_names(identifier)
            split = "train" if "train" in splits else splits[0]
        stream = datasets.load_dataset(identifier, split=split, streaming=True)
        stream = stream.shuffle(seed=seed, buffer_size=2000)
        records = iter(stream)
        first = next(records, None)
    except CalibrationError:
        raise
    except Exception as error:
        # datasets, huggingface_hub, the HTTP client and the readers each raise their own kinds.
        raise AccessError(
            f"calibration data set {identifier} cannot be read from the Hub: {first_line(error)}; "
            "check the name and the network, or calibrate with --calibration self or a local path"
        ) from error
    if first is None:
        raise CalibrationError(f"calibration data set {identifier}, split {split}, is empty")
    yield document_of(first, identifier)
    for record in records:
        yield document_of(record, identifier)


def document_of(record: Any, source: str) -> Document:
    """The text of one record: a string, or an object with a known field."""
    if isinstance(record, str):
        return record
    if isinstance(record, Mapping):
        for key in ("messages", "conversations"):
            messages = record.get(key)
            if isinstance(messages, list) and messages and all(isinstance(one, Mapping) for one in messages):
                return [_message(one, source) for one in messages]
        for key in ("text", "content"):
            if isinstance(record.get(key), str):
                return str(record[key])
        for asked, answered in _PAIRS:
            if isinstance(record.get(asked), str) and isinstance(record.get(answered), str):
                extra = record.get("input") if asked == "instruction" else None
                parts = [record[asked], extra if isinstance(extra, str) and extra else None, record[answered]]
                # A prompt and its completion are one running text; questions and answers are paragraphs.
                return ("" if asked == "prompt" else "\n\n").join(part for part in parts if part)
    found = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
    raise CalibrationError(
        f"{source}: expected text, content, messages, or prompt and completion in a record; found {found or 'nothing'}"
    )


def _message(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise CalibrationError(
            f"{source}: expected messages with role and content, found {', '.join(map(str, message))}"
        )
    return {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CalibrationError(f"calibration file {file} cannot be read: {error.strerror or error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"calibration file {file} is no UTF-8 text (byte {error.start})") from error
    # Lines end in one way whatever the machine: the same text must give the same tokens.
    return text.replace("\r\n", "\n")


def _files(path: str) -> list[Path]:
    """The readable files of one path, sorted; a saved data set counts as one file. Logs what becomes of a folder's."""
    root = Path(path)
    if not os.path.exists(path):  # False as well for what no file system can hold
        raise CalibrationError(
            f"calibration source {path}: no such file or folder; "
            "expected self, paper, a Hub data set (owner/name) or a path"
        )
    if not root.is_file() and not root.is_dir():
        raise CalibrationError(
            f"calibration source {path}: expected a file or a folder, found a pipe or a device, which cannot be read "
            "twice; save the text to a file"
        )
    if _is_dataset(root):
        return [root]
    if root.is_file():
        if root.stat().st_size == 0:
            raise CalibrationError(f"calibration file {path} is empty; expected text")
        if _is_binary(root):
            raise CalibrationError(f"calibration file {path} is binary; expected UTF-8 text, JSONL or source code")
        return [root]
    candidates = sorted(
        (file for file in root.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(root))),
        key=lambda file: file.relative_to(root).as_posix(),
    )
    texts = [file for file in candidates if _is_dataset(file) or (file.stat().st_size and not _is_binary(file))]
    if not texts:
        raise CalibrationError(f"calibration folder {path} holds no text; expected text, JSONL or source files")
    tables = sum(file.suffix in _TEXT_TABLES for file in texts)
    datasets = sum(_is_dataset(file) for file in texts) - tables
    counts = (
        (len(texts) - tables - datasets, "of text, JSONL or source"),
        (tables, "CSV or TSV read as text, each as one document (name it by itself for a document a line)"),
        (datasets, "Parquet or Arrow, a document a row"),
        (len(candidates) - len(texts), "empty or binary and left out"),
    )
    level = logging.WARNING if tables or datasets else logging.INFO
    said = ", ".join(f"{count} {what}" for count, what in counts if count)
    _log.log(level, "calibration folder %s: %s", path, said)
    return texts


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _is_binary(file: Path) -> bool:
    try:
        with open(file, "rb") as opened:
            head = opened.read(1 << 16)
    except OSError as error:
        raise CalibrationError(f"calibration file {file} cannot be read: {error.strerror or error}") from error
    if b"\0" in head:
        return True
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character cut by the end of what was read is no sign of anything.
        return error.start < len(head) - 4
    return False


def _is_dataset(path: Path) -> bool:
    """Whether a file is a table, or a folder what `datasets` saved, or tables and nothing else to read."""
    if not path.is_dir():
        return path.suffix in _TABLES
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return True
    visible = [file for file in path.iterdir() if not _is_hidden(Path(file.name))]
    tables = [file for file in visible if file.suffix in _TABLES and file.is_file()]
    others = [file for file in visible if file not in tables and not _BESIDE_TABLES.fullmatch(file.name)]
    return bool(tables) and not others


def _saved_dataset(path: Path, seed: int) -> Iterator[Document]:
    """A data set on disk: what ``save_to_disk`` wrote, or Parquet, CSV and Arrow files."""
    datasets = _datasets()
    try:
        if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(path))
        elif path.is_dir():
            loaded = datasets.load_dataset(str(path), streaming=True)
        else:
            options = {"sep": "\t"} if path.suffix == ".tsv" else {}
            loaded = datasets.load_dataset(_TABLES[path.suffix], data_files=str(path), streaming=True, **options)
        if isinstance(loaded, Mapping):
            loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
        # Shuffled in memory: datasets would write its order beside the user's files.
        in_memory = {} if isinstance(loaded, datasets.IterableDataset) else {"keep_in_memory": True}
        records = iter(loaded.shuffle(seed=seed, **in_memory))
        first = next(records, None)
    except Exception as error:
        raise CalibrationError(f"calibration data set {path} cannot be read: {first_line(error)}") from error
    if first is None:
        raise CalibrationError(f"calibration data set {path} is empty")
    yield document_of(first, path.name)
    for record in records:
        yield document_of(record, path.name)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            "reading data sets needs the package datasets: pip install 'wisparse[datasets]'; "
            "or calibrate with --calibration self, or on text files"
        ) from error
    datasets.disable_progress_bars()
    return datasets
