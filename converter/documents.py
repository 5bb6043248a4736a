"""Documents for calibration and evaluation, read from files, folders and data sets."""

from __future__ import annotations

import json
import logging
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from wisparse.formats.errors import AccessError, CalibrationError, first_line
from wisparse.formats.hub import check_read_access

_log = logging.getLogger("wisparse")

Document = str | list[dict[str, Any]]  # text, or the messages of a conversation

_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.\[\]%:-]+)?")
_TABLES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
_TEXT_TABLES = (".csv", ".tsv")
# Other files that a folder of tables may hold and still be a data set.
_BESIDE_TABLES = re.compile(r"(README|LICEN[SC]E|NOTICE)[^/]*|.*\.(json|ya?ml)", re.IGNORECASE)
# Fields of (question, answer) in known data sets.
_PAIRS = (("prompt", "completion"), ("query", "response"), ("question", "answer"), ("instruction", "output"))


def is_dataset_id(spec: str) -> bool:
    """Whether ``spec`` is a Hub data set, ``owner/name`` or ``owner/name:split``, and not an existing path."""
    return bool(_DATASET_ID.fullmatch(spec)) and not os.path.exists(spec) and not Path(spec).suffix[1:].isalpha()


def path_documents(paths: Sequence[str], seed: int) -> Iterator[Document]:
    """The documents under ``paths``, file by file in a seeded order."""
    files = [(file, file == Path(path)) for path in paths for file in _files(path)]
    random.Random(seed).shuffle(files)
    for file, named in files:
        # A CSV or TSV file in a folder is read as one text; named itself, it is a data set with a document per line.
        if _is_dataset(file) and (named or file.suffix not in _TEXT_TABLES):
            yield from dataset_documents(file, seed)
            continue
        try:
            # Line ends are normalised, so that a text gives the same tokens on every system.
            text = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except OSError as error:
            raise _unreadable(file, error) from error
        except UnicodeDecodeError as error:
            raise CalibrationError(f"text file {file} is no UTF-8 text (byte {error.start})") from error
        if not text.strip():
            if named:
                raise CalibrationError(f"text file {file} is empty; expected text")
        elif file.suffix not in (".jsonl", ".ndjson"):
            yield text
        else:
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    try:
                        record = json.loads(line)
                    except ValueError as error:
                        message = f"{file}, line {number}: expected one JSON value per line ({error})"
                        raise CalibrationError(message) from error
                    yield document_of(record, f"{file}, line {number}")


def dataset_documents(name: str | Path, seed: int) -> Iterator[Document]:
    """The documents of a data set in a seeded order: of the Hub (``owner/name:split``), streamed, or on disk, either
    written by ``save_to_disk`` or as Parquet, CSV or Arrow files."""
    try:
        import datasets
    except ImportError as error:
        needed = "reading data sets needs the package datasets: pip install datasets"
        raise CalibrationError(f"{needed}; or calibrate with --calibration self, or on text files") from error
    datasets.disable_progress_bars()
    path = name if isinstance(name, Path) else None
    identifier, _, split = (str(path), "", "") if path else str(name).partition(":")
    if not path:  # without a network, datasets itself would retry for half a minute
        check_read_access(identifier, dataset=True)
    order: dict[str, Any] = {"seed": seed}
    try:
        if not path:
            splits = [split] if split else datasets.get_dataset_split_names(identifier)
            split = "train" if "train" in splits else splits[0]
            loaded = datasets.load_dataset(identifier, split=split, streaming=True)
            order["buffer_size"] = 2000
        elif path.is_dir() and any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(identifier)
        elif path.is_dir():
            loaded = datasets.load_dataset(identifier, streaming=True)
        else:
            options = {"sep": "\t"} if path.suffix == ".tsv" else {}
            loaded = datasets.load_dataset(_TABLES[path.suffix], data_files=identifier, streaming=True, **options)
        if isinstance(loaded, Mapping):
            loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
        if not isinstance(loaded, datasets.IterableDataset):
            order["keep_in_memory"] = True  # else datasets writes the shuffled indices beside the user's files
        records = iter(loaded.shuffle(**order))
        first = list(islice(records, 1))
    except Exception as error:
        # datasets, huggingface_hub, the HTTP client and the file readers each raise errors of their own.
        failed = f"data set {identifier} cannot be read"
        if path:
            raise CalibrationError(f"{failed}: {first_line(error)}") from error
        advice = "check the name and the network, or calibrate with --calibration self or a local path"
        raise AccessError(f"{failed} from the Hub: {first_line(error)}; {advice}") from error
    if not first:
        raise CalibrationError(f"data set {identifier}{f', split {split},' if split else ''} is empty")
    yield from (document_of(record, path.name if path else identifier) for record in chain(first, records))


def document_of(record: Any, source: str) -> Document:
    """The document of one record: a string, or an object with known fields."""
    if isinstance(record, str):
        return record
    fields = record if isinstance(record, Mapping) else {}
    for key in ("messages", "conversations"):
        messages = fields.get(key)
        if isinstance(messages, list) and messages and all(isinstance(item, Mapping) for item in messages):
            return [_message(item, source) for item in messages]
    texts = {key: value for key, value in fields.items() if isinstance(value, str)}
    for key in ("text", "content"):
        if key in texts:
            return texts[key]
    for question, answer in _PAIRS:
        if question in texts and answer in texts:
            extra = texts.get("input") if question == "instruction" else None
            # A completion continues its prompt; questions and answers are paragraphs.
            separator = "" if question == "prompt" else "\n\n"
            return separator.join(part for part in (texts[question], extra, texts[answer]) if part)
    found = ", ".join(map(str, fields)) or ("nothing" if isinstance(record, Mapping) else type(record).__name__)
    raise CalibrationError(f"{source}: expected text, content, messages, or prompt and completion; found {found}")


def _message(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        found = ", ".join(map(str, message))
        raise CalibrationError(f"{source}: expected messages with role and content, found {found}")
    return {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}


def _files(path: str) -> list[Path]:
    """The readable files under one path, sorted; a saved data set counts as one file. Logs a folder's numbers of files."""
    root = Path(path)
    if not os.path.exists(path):  # also False for names that are not valid
        wanted = "expected self, paper, a Hub data set (owner/name) or a path"
        raise CalibrationError(f"{path}: no such file or folder; {wanted}")
    if not root.is_file() and not root.is_dir():
        found = "a pipe or a device, which cannot be read twice; save the text to a file"
        raise CalibrationError(f"{path}: expected a file or a folder, found {found}")
    if _is_dataset(root):
        return [root]
    if root.is_file():
        if _is_binary(root):
            raise CalibrationError(f"text file {path} is binary; expected UTF-8 text, JSONL or source code")
        return [root]
    names = {file.relative_to(root): file for file in root.rglob("*") if file.is_file()}
    candidates = [names[name] for name in sorted(names, key=Path.as_posix) if not _is_hidden(name)]
    texts = [file for file in candidates if _is_dataset(file) or (file.stat().st_size and not _is_binary(file))]
    if not texts:
        raise CalibrationError(f"{path}: the folder holds no text; expected text, JSONL or source files")
    tables = sum(file.suffix in _TEXT_TABLES for file in texts)
    datasets = sum(_is_dataset(file) for file in texts) - tables
    counts = (
        (len(texts) - tables - datasets, "of text, JSONL or source"),
        (tables, "CSV or TSV read as text, each as one document (name it by itself for a document a line)"),
        (datasets, "Parquet or Arrow, a document a row"),
        (len(candidates) - len(texts), "empty or binary and left out"),
    )
    level = logging.WARNING if tables or datasets else logging.INFO
    _log.log(level, "calibration folder %s: %s", path, ", ".join(f"{count} {what}" for count, what in counts if count))
    return texts


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _is_binary(file: Path) -> bool:
    try:
        with open(file, "rb") as opened:
            head = opened.read(1 << 16)
        head.decode("utf-8")
    except OSError as error:
        raise _unreadable(file, error) from error
    except UnicodeDecodeError as error:
        # The last character may be cut by the end of the read.
        return b"\0" in head or error.start < len(head) - 4
    return b"\0" in head


def _unreadable(file: Path, error: OSError) -> CalibrationError:
    return CalibrationError(f"calibration file {file} cannot be read: {error.strerror or error}")


def _is_dataset(path: Path) -> bool:
    """Whether a file is a table, or a folder was saved by `datasets` or holds tables and no other text."""
    if not path.is_dir():
        return path.suffix in _TABLES
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return True
    visible = [file for file in path.iterdir() if not _is_hidden(Path(file.name))]
    tables = [file for file in visible if file.suffix in _TABLES and file.is_file()]
    return bool(tables) and all(file in tables or _BESIDE_TABLES.fullmatch(file.name) for file in visible)
