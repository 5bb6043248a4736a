"""Validation of arguments, paths, files and JSON, and of folders given as a model."""

from __future__ import annotations

import contextlib
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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .errors import AccessError, UsageError, WisparseError

# Suffix of a folder that is being written.
PARTIAL = ".partial"
# Longer than any path or Hub id.
_MAX_PATH_BYTES = 4096

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def quoted(value: Any) -> str:
    return " ".join(_short.repr(value).split())


def expect(valid: bool, name: str, words: str, value: Any, advice: str = "") -> None:
    if not valid:
        raise UsageError(f"{name}: expected {words}, found {quoted(value)}{advice}")


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Require an integer in a range, also of numpy or torch, but no bool."""
    found = least - 1
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "torch.bool":
        with contextlib.suppress(TypeError):
            found = operator.index(value)
    if found < least or (most is not None and found > most):
        words = {0: "an integer, 0 or more", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
        # Settings whose only limit is that of 64 bits are described without it, unless it is exceeded.
        unlimited = most is None or (most == 2**63 - 1 and found < least)
        expect(False, name, words if unlimited else f"an integer from {least} to {most:,}", value)
    return found


def number(name: str, value: Any, low: float, high: float, words: str, *, above: bool = False) -> float:
    """Require a number from ``low`` (with ``above`` excluded) to ``high``; ``words``: the expected range in the error."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # The comparisons are False for NaN.
    expect(is_number and low <= value <= high and not (above and value == low), name, words, value)
    return float(value)


def switch(name: str, value: Any) -> bool:
    expect(isinstance(value, bool), name, "True or False", value)
    return bool(value)


def choice(name: str, value: Any, known: Sequence[str], elsewhere: Mapping[str, str] = {}) -> str:
    """``elsewhere``: values of another argument, and the advice for them."""
    if not isinstance(value, str) or value not in known:
        close = difflib.get_close_matches(value[:80], known, n=1) if isinstance(value, str) else []
        advice = f"; did you mean {close[0]!r}?" if close else ""
        advice = f"; {elsewhere[value]}" if isinstance(value, str) and value in elsewhere else advice
        expect(False, name, f"one of {', '.join(known)}", value, advice)
    return str(value)


def keywords(function: str, given: Iterable[str], known: Sequence[str], other_names: Mapping[str, str] = {}) -> None:
    """Refuse unknown keyword arguments; ``other_names``: name in other libraries -> our name, for the advice."""
    for name in given:
        if name not in known:
            close = [other_names[name]] if name in other_names else difflib.get_close_matches(name[:80], known, n=1)
            advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise UsageError(f"{function}: unknown argument {quoted(name)}; {advice}")


def text(name: str, value: Any, *, empty: bool = True) -> str:
    expect(isinstance(value, str), name, "a text (str)", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        half = f"half of a surrogate pair in {quoted(value)}, which no text holds"
        raise UsageError(f"{name}: expected text, found {half}; was it read as another encoding than UTF-8?") from None
    if not empty and not value:
        raise UsageError(f"{name}: expected a text of at least one character, found an empty one")
    return str(value)


def place(name: str, value: Any) -> str:
    """Require the syntax of a path or a Hub id."""
    given: Any = os.fspath(value) if isinstance(value, os.PathLike) else value
    expect(isinstance(given, str), name, "a path or a Hub id (str or pathlib.Path)", value)
    found = "" if given else "an empty text"
    try:
        if len(os.fsencode(given)) > _MAX_PATH_BYTES:
            found = f"{len(given):,} characters: {quoted(given)}"
    except UnicodeEncodeError:
        found = "half of a surrogate pair in it"
    if "\0" in given:
        found = f"a null character in {quoted(given)}"
    if found:
        raise UsageError(f"{name}: expected a path or a Hub id, found {found}")
    return str(given)


# Device, inode, size and time of the last change (ns): differs if a file was replaced or changed.
Identity = tuple[int, int, int, int]


def identity(file: io.FileIO | str) -> Identity:
    status = os.stat(file) if isinstance(file, str) else os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def resolve_inside(folder: Path, name: str, error: type[WisparseError]) -> Path:
    """The real path of ``folder/name``; ``error`` for a path or symlink outside the folder. A snapshot in the Hub's cache,
    ``models--OWNER--NAME/snapshots/COMMIT``, may link to its own ``blobs`` folder."""
    if not name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise error(f"{name!r:.100}: expected a file inside the folder, found a path that leaves it")
    root = Path(os.path.realpath(folder))
    try:
        real = Path(os.path.realpath(root / name, strict=True))
    except OSError as reason:
        raise _unreadable(name, reason, error) from None
    if real.is_relative_to(root):
        return real
    repository = root.parent.parent
    is_snapshot = root.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", root.name)
    if is_snapshot and repository.name.startswith("models--") and real.parent == repository / "blobs":
        return real
    raise error(f"{name}: a symlink that leaves the folder; copy the file itself into {Path(folder).name}")


def open_regular(folder: Path, name: str, error: type[WisparseError], expected: Identity | None = None) -> io.FileIO:
    """Open ``folder/name`` for reading, unbuffered; ``error`` unless it is a regular file, and the expected one."""
    path = resolve_inside(folder, name, error)

    def require_regular(mode: int) -> None:
        if not stat.S_ISREG(mode):
            kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
            raise error(f"{name}: expected a regular file, found {kinds.get(stat.S_IFMT(mode), 'a device')}")

    try:
        # Checked before the open, which can have an effect on a device.
        require_regular(path.lstat().st_mode)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
            require_regular(os.fstat(file.fileno()).st_mode)
            if expected is not None and identity(file) != expected:
                raise error(f"{name}: changed on disk since it was checked; open it again")
            stack.pop_all()  # the caller closes it
    except OSError as reason:
        raise _unreadable(name, reason, error) from None
    return file


def read_bounded(folder: Path, name: str, limit: int, error: type[WisparseError]) -> bytes:
    with open_regular(folder, name, error) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            # Files of /proc have size 0 and content.
            data = io.BufferedReader(file).read(limit + 1) if size <= limit else b""
        except OSError as reason:
            raise _unreadable(name, reason, error) from None
    if max(size, len(data)) > limit:
        raise error(f"{name}: expected at most {limit:,} bytes, found {max(size, len(data)):,}")
    return data


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path, limit: int, error: type[WisparseError], *, deep: bool = False) -> list[str]:
    """Sorted names of the files in ``folder``, at most ``limit`` entries. ``deep``: also files in its folders, as
    ``folder/name``; symlinks and hidden folders are not entered."""
    require_folder(folder)
    found: list[str] = []
    prefixes, entries = [""], 0
    for prefix in prefixes:
        with os.scandir(folder / prefix) as scan:
            for entry in scan:
                entries += 1
                if entries > limit:
                    raise error(f"{folder.name}: expected at most {limit:,} files, found more")
                if not entry.is_dir(follow_symlinks=False):
                    found.append(f"{prefix}{entry.name}")
                elif deep and not entry.name.startswith("."):
                    prefixes.append(f"{prefix}{entry.name}/")
    return sorted(found)


def require_folder(folder: Path) -> None:
    try:
        if folder.is_dir():
            return
        found = "a file" if folder.exists() else "nothing"
    except OSError as reason:
        raise AccessError(f"{str(folder)!r:.200}: cannot be read: {reason.strerror}") from None
    raise AccessError(f"{folder}: expected a folder, found {found}")


def _unreadable(name: str, reason: OSError, error: type[WisparseError]) -> WisparseError:
    if isinstance(reason, FileNotFoundError):
        return error(f"{name}: missing from the folder; copy or download it again")
    if reason.errno in (errno.EACCES, errno.EPERM):
        return AccessError(f"{name}: no permission to read it")
    return error(f"{name!r:.200}: cannot be read: {reason.strerror}")


_MAX_DEPTH = 32
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    folder: Path, name: str, limit: int, error: type[WisparseError], *, infinite: bool = False
) -> dict[str, Any]:
    return parse_json(read_bounded(folder, name, limit, error), name, error, infinite=infinite)


def parse_json(data: bytes, where: str, error: type[WisparseError], *, infinite: bool = False) -> dict[str, Any]:
    """Parse a JSON object, whose size the caller limits. Refused: other encodings than UTF-8, duplicate keys, NaN and, unless
    ``infinite``, infinity, lone surrogates, deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise error(f"{where}: the key {twice!r:.100} stands there twice")
        return found

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) and not (infinite and text == "Infinity"):
            raise error(f"{where}: expected finite numbers, found {text:.40}")
        return value

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{where}: expected UTF-8, found a wrong byte at {reason.start}") from None
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except (RecursionError, ValueError) as reason:
        raise error(f"{where}: expected JSON, found something else ({reason!s:.100})") from None
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        children = [parent.values() if isinstance(parent, dict) else parent for parent in level]
        level = [child for several in children for child in several if isinstance(child, (dict, list))]
    if level:
        raise error(f"{where}: expected at most {_MAX_DEPTH} levels, found more")
    if _SURROGATE.search(data):
        # A lone surrogate cannot be encoded: neither printed, written nor hashed.
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as reason:
            half = ascii(reason.object[reason.start])
            raise error(f"{where}: expected characters, found {half}, half of a surrogate pair") from None
    return value


def dump_json(value: Mapping[str, Any]) -> bytes:
    """Indented JSON with keys in their order; deterministic. ValueError for NaN."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


WANTED = "give a folder with config.json, safetensors weights and a tokenizer"
WANTED_BUNDLE = "give the folder of a bundle, or its Hub id"
_MOST_NAMES, _MAX_JSON_BYTES = 2000, 1 << 20


@cache
def refusals() -> dict[str, Any]:
    """Why models, files and folders are refused: the rows of ``refusals.yaml``."""
    import yaml

    rows: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
    return rows


def _refusal(kind: str, names: Iterable[str]) -> str | None:
    """The refusal that matches these file names, or None."""
    rows, names = refusals()[kind], list(names)
    return next((row["is"] for row in rows if any(name.endswith((*row["names"],)) for name in names)), None)


def find_folder(model: str | os.PathLike[str], wanted: str = WANTED) -> Path | None:
    """The local folder ``model``, with ``~`` expanded; None if it can only be a Hub id. AccessError for a file or a path
    without permission."""
    # pathlib takes an empty string, as from an unset shell variable, for the current folder.
    typed = place("model", model)
    path = expand(typed)
    try:
        if path.is_dir():
            return path
        is_file = path.exists()
    except OSError as error:
        raise AccessError(f"{typed!r:.200}: cannot be opened as a folder: {error.strerror}") from None
    if is_file:
        kind = _refusal("files", [path.name.lower()]) or f"a file, not a folder: {wanted}"
        raise AccessError(f"{typed!r:.200} is {kind}")
    return None


def find_gguf(model: str | os.PathLike[str], gguf_file: str | None = None) -> Path | None:
    """The local GGUF file ``model``, or ``gguf_file`` in the local folder ``model``; None for another folder or a Hub id."""
    path = expand(place("model", model))
    if gguf_file is not None and (not gguf_file.endswith(".gguf") or gguf_file.startswith("/") or ".." in gguf_file):
        raise UsageError(f"--gguf-file: expected the name of a .gguf file in the repository, found {quoted(gguf_file)}")
    try:
        if gguf_file is None:
            return path if path.name.endswith(".gguf") and path.is_file() else None
        if path.is_file():
            raise UsageError(f"--gguf-file names a file in a folder or repository, but {quoted(model)} is a file")
        if not path.is_dir():
            return None
        if (path / gguf_file).is_file():
            return path / gguf_file
    except OSError as error:
        raise AccessError(f"{str(path)!r:.200}: cannot be opened: {error.strerror}") from None
    found = ", ".join(sorted(file.name for file in path.glob("*.gguf"))) or "none"
    raise AccessError(f"--gguf-file: {quoted(gguf_file)} is not in {str(path)!r:.200}; its GGUF files: {found:.500}")


def shown(folder: str | os.PathLike[str]) -> str:
    """A folder's name in messages: its path, or the Hub id of a snapshot in the cache."""
    parts = Path(folder).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return str(folder)


def expand(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise AccessError(f"{path!r:.200}: no user of this machine has that home folder") from None


def folder_kind(folder: Path) -> str | None:
    """What a folder without config.json is, as the end of a sentence; None if it may be a model."""
    with os.scandir(folder) as scan:
        entries = [entry for _, entry in zip(range(_MOST_NAMES), scan, strict=False)]
    files = {entry.name.lower() for entry in entries if not os.path.isdir(entry.path)}
    folders = sorted(entry.name for entry in entries if os.path.isdir(entry.path))
    if "adapter_config.json" in files and not {"model.safetensors", "model.safetensors.index.json"} & files:
        base = None
        with contextlib.suppress(WisparseError):
            adapter = read_json(folder, "adapter_config.json", _MAX_JSON_BYTES, WisparseError)
            base = adapter.get("base_model_name_or_path")
        of = f" of {base!r:.120}" if isinstance(base, str) and base else ""
        how = "merge the two with peft's merge_and_unload(), save them with save_pretrained(), and give that folder"
        return f"a LoRA (PEFT) adapter{of}, not a whole model: {how}"
    if "config.json" in files:
        return None
    if "snapshots" in folders:
        return "the Hub's cache of a model: give the model's Hub id, or a folder inside its snapshots/"
    if words := _refusal("folders", files):
        return words
    models = [name for name in folders if (folder / name / "config.json").is_file()]
    if models:
        some = "a training run" if models[0].startswith("checkpoint-") else "a folder of models"
        return f"{some}, not a model: give one of the {len(models)} inside it, such as {folder / models[-1]}"
    if not entries:
        return f"an empty folder: {WANTED}"
    return f"no model: config.json is missing; {WANTED}"
