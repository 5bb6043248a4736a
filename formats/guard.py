"""The folder that somebody gave for a model, and, if it is none, what it is and what to give instead.

Looks at names and a few small files only. A sentence here is for a person who downloaded the wrong thing.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import io
import json
import math
import numbers
import operator
import os
import re
import reprlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import AccessError, UsageError, WisparseError

# Longer than any path that a system takes, and than any Hub id.
_LONGEST_PLACE = 4096

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def quoted(value: Any) -> str:
    """A value as an error message shows it: on one line, and not all of a long one."""
    return " ".join(_short.repr(value).split())


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer of at least ``least`` and at most ``most``; numpy's and torch's are integers too.

    Raises:
        UsageError: it is none, or out of range.
    """
    try:
        plain = None if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool" else value
        plain = operator.index(plain)  # type: ignore[arg-type]  # what is no integer has none
    except TypeError:
        plain = None
    if plain is None or plain < least or (most is not None and plain > most):
        if most is None:
            words = {0: "an integer, 0 or more", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
        else:
            words = f"an integer from {least} to {most:,}"
        raise UsageError(f"{name}: expected {words}, found {quoted(value)}")
    return plain


def number(name: str, value: Any, low: float, high: float, words: str, *, above: bool = False) -> float:
    """A number from ``low`` to ``high``, which are never NaN; ``above``: ``low`` itself is not one of them.

    Raises:
        UsageError: it is none, or out of range; ``words`` say what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name}: expected {words}, found {quoted(value)}")
    # NaN is not less than anything, and not at most anything.
    if value < low or not value <= high or (above and value == low):
        raise UsageError(f"{name}: expected {words}, found {quoted(value)}")
    return float(value)


def switch(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        UsageError: something else, also what Python would count as true.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name}: expected True or False, found {quoted(value)}")
    return value


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """One of some words.

    Raises:
        UsageError: another; a close one is suggested.
    """
    if not isinstance(value, str) or value not in known:
        close = difflib.get_close_matches(value[:80], known, n=1) if isinstance(value, str) else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"{name}: expected one of {', '.join(known)}, found {quoted(value)}{hint}")
    return value


def text(name: str, value: Any, *, empty: bool = True) -> str:
    """A text that can be written as UTF-8.

    Raises:
        UsageError: no str, one with half of a surrogate pair in it, or an ``empty`` one where that means nothing.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name}: expected a text (str), found {quoted(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{name}: expected text, found half of a surrogate pair in {quoted(value)}, which no text holds; was it "
            "read as another encoding than UTF-8?"
        ) from None
    if not empty and not value:
        raise UsageError(f"{name}: expected a text of at least one character, found an empty one")
    return value


def place(name: str, value: Any) -> str:
    """A folder's path or a Hub id, as a str; nothing is looked up.

    Raises:
        UsageError: no str and no path, empty, or nothing that a file system could hold.
    """
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise UsageError(f"{name}: expected a path or a Hub id (str or pathlib.Path), found {quoted(value)}")
    if not given:
        raise UsageError(f"{name}: expected a path or a Hub id, found an empty text")
    try:
        encoded = os.fsencode(given)
    except UnicodeEncodeError:
        raise UsageError(f"{name}: expected a path or a Hub id, found half of a surrogate pair in it") from None
    if b"\0" in encoded:
        raise UsageError(f"{name}: expected a path or a Hub id, found a null character in {quoted(given)}")
    if len(encoded) > _LONGEST_PLACE:
        raise UsageError(f"{name}: expected a path or a Hub id, found {len(given):,} characters: {quoted(given)}")
    return given


_COMMIT = re.compile("[0-9a-f]{40}")

# Ends the name of what is being written and not yet whole.
PARTIAL = ".partial"


@dataclass(frozen=True)
class FileIdentity:
    """Which file it was and when it was last written; another one under the same name means that it was replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int


def _identity_of(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def resolve_inside(folder: Path, name: str, error: type[WisparseError]) -> Path:
    """The real path of ``folder/name``.

    Raises:
        error: the name leaves the folder, or nothing is there.
    """
    if not name or "\0" in name or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        raise error(f"{name!r:.100}: expected a file inside the folder, found a path that leaves it")
    root = os.path.realpath(folder)
    try:
        real = os.path.realpath(os.path.join(root, name), strict=True)
    except OSError as reason:
        raise _unreadable(name, reason, error) from None
    if os.path.commonpath([root, real]) == root:
        return Path(real)
    if os.path.dirname(real) == _hub_blobs(root):
        return Path(real)
    raise error(f"{name}: a symlink that leaves the folder; copy the file itself into {Path(folder).name}")


def _hub_blobs(root: str) -> str | None:
    """Where the files of a snapshot in the Hub's cache really lie: ``models--OWNER--NAME/blobs``, its own and no other.

    The snapshot is ``models--OWNER--NAME/snapshots/COMMIT``; a folder called ``blobs`` anywhere else is just a folder.
    """
    snapshots, commit = os.path.split(root)
    repository, name = os.path.split(snapshots)
    if name == "snapshots" and _COMMIT.fullmatch(commit) and os.path.basename(repository).startswith("models--"):
        return os.path.join(repository, "blobs")
    return None


def open_regular(
    folder: Path, name: str, error: type[WisparseError], expected: FileIdentity | None = None
) -> io.FileIO:
    """Open ``folder/name`` for reading, unbuffered.

    Args:
        expected: what ``identity`` said before; a file that changed since is refused.

    Raises:
        error: not a regular file inside the folder, or not the expected one.
        AccessError: no permission to read it.
    """
    path = resolve_inside(folder, name, error)
    try:
        # Looked at before it is opened: opening a device can already have an effect.
        _require_regular(name, os.stat(path, follow_symlinks=False), error)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as reason:
        raise _unreadable(name, reason, error) from None
    file = io.FileIO(descriptor, "rb", closefd=True)
    try:
        status = os.fstat(descriptor)
        _require_regular(name, status, error)
        if expected is not None and _identity_of(status) != expected:
            raise error(f"{name}: changed on disk since it was checked; open it again")
    except BaseException:
        file.close()
        raise
    return file


def identity(file: io.FileIO) -> FileIdentity:
    """The identity of an open file."""
    return _identity_of(os.fstat(file.fileno()))


def read_bounded(folder: Path, name: str, limit: int, error: type[WisparseError]) -> bytes:
    """The whole of a small file.

    Raises:
        error: missing, not a regular file inside the folder, or longer than ``limit`` bytes.
    """
    with open_regular(folder, name, error) as file:
        size = identity(file).size
        if size > limit:
            raise error(f"{name}: expected at most {limit:,} bytes, found {size:,}")
        try:
            # A file of /proc says it is empty and is not, so ask for one byte more than allowed, not for the size.
            data = bytearray()
            while len(data) <= limit and (piece := file.read(min(1 << 20, limit + 1 - len(data)))):
                data += piece
        except OSError as reason:
            raise _unreadable(name, reason, error) from None
    if len(data) > limit:
        raise error(f"{name}: expected at most {limit:,} bytes, found more")
    return bytes(data)


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path, limit: int, error: type[WisparseError], *, deep: bool = False) -> list[str]:
    """Names of everything in ``folder`` that is not a folder, sorted.

    Args:
        deep: also what lies in its folders, as ``folder/name``; those that are symlinks or hidden are not entered.

    Raises:
        AccessError: no such folder.
        error: more than ``limit`` of them.
    """
    require_folder(folder)
    found: list[str] = []
    pending = [""]
    entries = 0
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(folder, prefix)) as scan:
            for entry in scan:
                entries += 1
                if entries > limit:
                    raise error(f"{folder.name}: expected at most {limit:,} files, found more")
                if not entry.is_dir(follow_symlinks=False):
                    found.append(f"{prefix}{entry.name}")
                elif deep and not entry.name.startswith("."):
                    pending.append(f"{prefix}{entry.name}/")
    return sorted(found)


def require_folder(folder: Path) -> None:
    """Raise AccessError unless ``folder`` is an existing folder."""
    try:
        if folder.is_dir():
            return
        found = "a file" if folder.exists() else "nothing"
    except OSError as reason:
        raise AccessError(f"{str(folder)!r:.200}: cannot be read: {reason.strerror}") from None
    raise AccessError(f"{folder}: expected a folder, found {found}")


def _require_regular(name: str, status: os.stat_result, error: type[WisparseError]) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    found = next((kind for test, kind in kinds if test(status.st_mode)), "a device")
    raise error(f"{name}: expected a regular file, found {found}")


def _unreadable(name: str, reason: OSError, error: type[WisparseError]) -> WisparseError:
    if isinstance(reason, FileNotFoundError):
        return error(f"{name}: missing")
    if reason.errno in (errno.EACCES, errno.EPERM):
        return AccessError(f"{name}: no permission to read it")
    return error(f"{name!r:.200}: cannot be read: {reason.strerror}")


_MAX_DEPTH = 32
# Every value but the first is announced by one of these bytes; counting them is quick, and commas inside strings only
# err on the strict side.
_MAX_VALUES = 500_000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(folder: Path, name: str, limit: int, error: type[WisparseError]) -> dict[str, Any]:
    """Parse ``folder/name``, at most ``limit`` bytes, which has to hold a JSON object."""
    return parse_json(read_bounded(folder, name, limit, error), name, error)


def parse_json(data: bytes, where: str, error: type[WisparseError], most_values: int = _MAX_VALUES) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: the text.
        where: what the text is, for messages.
        most_values: more of them are a bomb.

    Raises:
        error: not UTF-8, not JSON, not an object, a key twice, NaN or Infinity, half a surrogate pair, or a bomb.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"{where}: the key {twice!r:.100} stands there twice")
        return found

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise error(f"{where}: expected finite numbers, found {text:.40}")
        return value

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{where}: expected UTF-8, found a wrong byte at {reason.start}") from None
    if data.count(b",") + data.count(b"[") + data.count(b"{") > most_values:
        raise error(f"{where}: expected at most {most_values:,} values, found more")
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except (json.JSONDecodeError, RecursionError, ValueError) as reason:
        raise error(f"{where}: expected JSON, found something else ({reason!s:.100})") from None
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    _refuse_deep(value, where, error)
    if _SURROGATE.search(data):
        _refuse_surrogates(value, where, error)
    return value


def dump_json(value: Mapping[str, Any]) -> bytes:
    """Readable JSON with the keys in their order; equal values give equal bytes.

    Raises:
        ValueError, TypeError: NaN, or something that is not JSON.
    """
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _refuse_deep(value: Any, where: str, error: type[WisparseError]) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise error(f"{where}: expected at most {_MAX_DEPTH} levels, found more")


def _refuse_surrogates(value: Any, where: str, error: type[WisparseError]) -> None:
    """Half of a surrogate pair is no character: such a text can be neither printed nor written nor hashed."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as reason:
        half = ascii(reason.object[reason.start])
        raise error(f"{where}: expected characters, found {half}, half of a surrogate pair") from None


_WANTED = "give a folder with config.json, safetensors weights and a tokenizer"
_ORIGINAL = "give the checkpoint it was made from, with config.json and safetensors weights"
_MOST_NAMES = 2000
_MAX_JSON_BYTES = 1 << 20

# End of a file's name -> what such a file is, and what to give.
_FILES = (
    ((".gguf",), f"a GGUF file, llama.cpp's format: {_ORIGINAL}"),
    ((".onnx", ".onnx.data"), f"an ONNX file: {_ORIGINAL}"),
    ((".nemo",), "a NeMo archive: export it to Hugging Face's format first"),
    ((".safetensors", ".bin", ".pt", ".pth", ".ckpt"), "a file of weights: give the folder that it lies in"),
    ((".zip", ".tar", ".gz", ".tgz", ".zst", ".xz", ".7z"), f"an archive: unpack it, and {_WANTED}"),
    (("config.json",), "a file: give the folder that it lies in"),
)
# End of the name of a file in a folder without config.json -> what the folder is.
_FOLDERS = (
    (("model_index.json",), "a diffusers pipeline (images, sound), not a language model; give a causal LM"),
    (
        ("modules.json", "config_sentence_transformers.json"),
        "a sentence-transformers model, which turns text into vectors and writes none; give a causal LM",
    ),
    ((".gguf",), f"GGUF files, llama.cpp's format: {_ORIGINAL}"),
    (
        ("params.json", "consolidated.safetensors", "consolidated.00.pth"),
        "weights in Meta's or Mistral's own layout: give the same model in Hugging Face's (with config.json)",
    ),
    ((".onnx",), f"an ONNX export: {_ORIGINAL}"),
    ((".nemo",), "a NeMo archive: export it to Hugging Face's format first"),
    (
        ("tf_model.h5", ".keras", ".msgpack", "saved_model.pb", ".tflite"),
        f"a TensorFlow, Keras or JAX model: {_ORIGINAL}",
    ),
    (
        ("dataset_info.json", "dataset_dict.json", ".parquet", ".jsonl", ".csv"),
        "a data set, not a model; text to calibrate on goes to --calibration",
    ),
    (
        (".safetensors", ".bin", ".pt", ".pth"),
        "weights without config.json: download the whole repository, not the weights alone",
    ),
)


def find_folder(model: str | os.PathLike[str]) -> Path | None:
    """The folder of this machine that ``model`` names, ``~`` resolved; None if it has to be a Hub id.

    Raises:
        UsageError: nothing that can be a path (`place`).
        AccessError: a file, a path that leads nowhere, or one that may not be looked at.
    """
    # An empty string, as an unset shell variable leaves one, would be the current folder to pathlib.
    typed = place("model", model)
    path = expand(typed)
    try:
        if path.is_dir():
            return path
        is_file = path.exists()
    except OSError as error:
        raise AccessError(f"{typed!r:.200}: cannot be opened as a folder: {error.strerror}") from None
    if is_file:
        raise AccessError(f"{typed!r:.200} is {_file_kind(path)}")
    return None


def shown(folder: str | os.PathLike[str]) -> str:
    """A folder as the user knows it: the path that was given, or the Hub id of a snapshot in the cache."""
    parts = Path(folder).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return str(folder)


def expand(path: str) -> Path:
    """A path with its ``~`` resolved.

    Raises:
        AccessError: of a user whom this machine does not know.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise AccessError(f"{path!r:.200}: no user of this machine has that home folder") from None


def _file_kind(path: Path) -> str:
    """What a file is that was given for a model, as the end of a sentence that begins with its name."""
    name = path.name.lower()
    return next((words for ends, words in _FILES if name.endswith(ends)), f"a file, not a folder: {_WANTED}")


def folder_kind(folder: Path) -> str | None:
    """What a folder is that is no model, as the end of a sentence; None if it may be one: it has a config.json."""
    with os.scandir(folder) as scan:
        entries = [entry for _, entry in zip(range(_MOST_NAMES), scan, strict=False)]
    files = {entry.name.lower() for entry in entries if not os.path.isdir(entry.path)}
    folders = sorted(entry.name for entry in entries if os.path.isdir(entry.path))
    if "adapter_config.json" in files and not {"model.safetensors", "model.safetensors.index.json"} & files:
        return _adapter(folder)
    if "config.json" in files:
        return None
    if "snapshots" in folders:
        return "the Hub's cache of a model: give the model's Hub id, or a folder inside its snapshots/"
    for ends, words in _FOLDERS:
        if any(name.endswith(ends) for name in files):
            return words
    models = [name for name in folders if (folder / name / "config.json").is_file()]
    if models:
        some = "a training run" if models[0].startswith("checkpoint-") else "a folder of models"
        return f"{some}, not a model: give one of the {len(models)} inside it, such as {folder / models[-1]}"
    if not entries:
        return f"an empty folder: {_WANTED}"
    return f"no model: config.json is missing; {_WANTED}"


def _adapter(folder: Path) -> str:
    try:
        settings = read_json(folder, "adapter_config.json", _MAX_JSON_BYTES, WisparseError)
    except WisparseError:
        settings = {}  # what it says is only for the sentence below
    base = settings.get("base_model_name_or_path")
    of = f" of {base!r:.120}" if isinstance(base, str) and base else ""
    return (
        f"a LoRA (PEFT) adapter{of}, not a whole model: merge the two with peft's merge_and_unload(), save them with "
        "save_pretrained(), and give that folder"
    )
