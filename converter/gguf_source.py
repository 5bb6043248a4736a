"""A GGUF file as the source of a conversion: a folder with the small files of a checkpoint, made from its metadata."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from wisparse.formats.card import LICENCE_FILE
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UsageError
from wisparse.formats.gguf import GgufFile
from wisparse.formats.guard import Identity, dump_json, find_gguf
from wisparse.formats.hub import Source, fetch_source

from .config import full_config
from .gguf_model import GgufWeights, read_config
from .gguf_tokenizer import tokenizer_files


def open_source(model: str, revision: str | None, gguf_file: str | None, *, weights: bool = True) -> Source:
    """The source of a conversion; of a GGUF file, ``folder`` is one that is made from its metadata and lives as long as this
    process."""
    path = find_gguf(model, gguf_file)
    if path is None:
        source = fetch_source(model, revision, weights=weights, gguf_file=gguf_file)
    elif revision is not None:
        raise UsageError(f"--revision names a commit on the Hub, but {model!r:.200} is on disk")
    else:
        source = Source(path.parent, None, path.stem, path)
    if source.gguf is None:
        return source
    return replace(source, folder=_made_folder(source.gguf, GgufFile(source.gguf).identity))


def gguf_weights(source: Source) -> GgufWeights | None:
    return None if source.gguf is None else GgufWeights(source.gguf)


def open_checkpoint(source: Source) -> Checkpoint:
    return Checkpoint.open(source.folder, complete=full_config, weights=gguf_weights(source))


def dequantised_from(source: Source) -> str:
    """The types of a GGUF file's matrices and their number, as text; empty for another source."""
    return "" if source.gguf is None else ", ".join(f"{kind} ({n})" for kind, n in GgufFile(source.gguf).kinds.items())


@cache
def _made_folder(path: Path, identity: Identity) -> Path:
    """A folder with config.json, tokenizer, templates and a card; ``identity`` of the file makes a changed one anew."""
    file = GgufFile(path)
    config = read_config(file)
    documents, texts = tokenizer_files(file, config["vocab_size"])
    ids = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}  # not the defaults of the family's class
    documents["config.json"] = {**config, **{key: documents["generation_config.json"].get(key) for key in ids}}
    work = tempfile.mkdtemp(prefix="wisparse-gguf-")
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    folder = Path(work) / re.sub(r"[^\w.-]", "_", path.name)
    contents = {name: dump_json(one) for name, one in documents.items()}
    contents |= {name: text.encode() for name, text in {**texts, "README.md": _card(file)}.items()}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in os.listdir(path.parent):
        if LICENCE_FILE.fullmatch(name) and (path.parent / name).is_file():
            shutil.copyfile(path.parent / name, folder / name)
    return folder


def _card(file: GgufFile) -> str:
    """The card's metadata that a bundle's card repeats."""
    keys = {"license": "license", "license.name": "license_name", "license.link": "license_link"}
    keys |= {"languages": "language", "tags": "tags"}
    stated: dict[str, Any] = {card: file.metadata.get(f"general.{key}") for key, card in keys.items()}
    return f"---\n{yaml.safe_dump({key: value for key, value in stated.items() if value})}---\n"
