"""The source's tokenizer, loaded by transformers, and the bundle's files of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from wisparse.formats.bundle import SMALL_FILES
from wisparse.formats.chat_template import special_tokens
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.guard import dump_json, read_json, shown

_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_FILES = (_FILE, "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer of ``tokenizer.json``, as in the runtime, with the tokens that the other files add; without that file
    the one that transformers makes from ``vocab.json`` and ``merges.txt``, or from ``tokenizer.model``. The class that
    AutoTokenizer chooses by ``model_type`` may replace tokenizer.json's pre-tokenizer, as Qwen2's does."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder)
    loader = PreTrainedTokenizerFast if (folder / _FILE).is_file() else AutoTokenizer
    files = sorted(name for name in _FILES if (folder / name).is_file())
    where: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet_transformers():
            tokenizer = loader.from_pretrained(folder, **where)
            if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
                raise TypeError(f"{type(tokenizer).__name__} is not a tokenizer of the tokenizers library")
            if _FILE not in files and "tokenizer.model" in files:
                _as_trained(tokenizer, PreTrainedTokenizerFast.from_pretrained(folder, **where))
        return tokenizer
    except Exception as error:
        wrong = f" can be made from {', '.join(files)}: {' '.join(str(error).split())[:300]}"
        if not files:
            wrong = ": expected tokenizer.json beside config.json, found none; copy it from the base model"
        lacks = [name for name in ("sentencepiece", "tiktoken") if find_spec(name) is None]
        if lacks and _FILE not in files and any(name.endswith(".model") for name in files):
            wrong = (
                f": {', '.join(files)} needs the package {' or '.join(lacks)}: pip install 'wisparse[sentencepiece]'"
            )
        raise UnsupportedModelError(f"{shown(folder)}: no tokenizer{wrong}") from error


def _as_trained(tokenizer: Any, general: Any) -> None:
    """Give ``tokenizer`` the model and the normalizer of tokenizer.model, which ``general`` was made from. The classes of
    Llama and Gemma have one of their own, which suits their own files (transformers 5.24). Text behind special tokens is
    theirs where the file agrees with them, as it depends on other settings."""
    text = "a  b ﬁ "
    ids = [one.encode(text, add_special_tokens=False) for one in (tokenizer, general)]
    if ids[0] != ids[1] and tokenizer.get_vocab() == general.get_vocab():
        for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
            setattr(tokenizer.backend_tokenizer, part, getattr(general.backend_tokenizer, part))


def bundle_files(folder: Path, tokenizer: Any) -> dict[str, bytes]:
    """The bundle's tokenizer files that are not the source's: ``tokenizer.json``, if the source has none or its other files
    add tokens, and ``tokenizer_config.json``, if a class of transformers gives special tokens that no file names."""
    library, files, file = tokenizer.backend_tokenizer, dict[str, bytes](), folder / _FILE
    if not file.is_file() or _content(tokenizers.Tokenizer.from_file(str(file))) != _content(library):
        saved = tokenizers.Tokenizer.from_str(library.to_str())
        saved.no_truncation()
        saved.no_padding()
        files[_FILE] = saved.to_str(pretty=True).encode()
    read = {}
    for name in (_CONFIG, "special_tokens_map.json"):
        present = (folder / name).is_file()
        read[name] = read_json(folder, name, SMALL_FILES[name], UnsupportedModelError) if present else {}
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    stated = special_tokens(*read.values())
    if not file.is_file() or any(stated.get(name) != named.get(name) for name in ("bos_token", "eos_token")):
        # The class that reads tokenizer.json as it is.
        config = {**read[_CONFIG], **named, "tokenizer_class": "PreTrainedTokenizerFast"}
        files[_CONFIG] = dump_json({k: v for k, v in config.items() if k not in ("auto_map", "vocab_file")})
    return files


def _content(library: tokenizers.Tokenizer) -> list[Any]:
    """What token ids depend on, beside the model's vocabulary."""
    parts = [library.normalizer, library.pre_tokenizer, library.decoder]
    post: Any = library.post_processor
    if post is not None and post.num_special_tokens_to_add(False):  # transformers adds one that adds no tokens
        parts.append(post)
    added = {index: token.__getstate__() for index, token in library.get_added_tokens_decoder().items()}
    return [added, *(part and json.loads(part.__getstate__()) for part in parts)]


# Digits, indentation, other scripts, and spaces at both ends.
_PROBES = (
    " def f(x):\n    return x**2 + 1234567\n",
    "It's 3.14 o'clock;\tnaïve Ünï – 東京 😀 привет ไทย ",
    "\n\n a  b\r\n",
)


def differing_text(folder: Path, encode: Callable[[str], list[int]]) -> str | None:
    """The first of some texts, and of all added tokens, of which ``encode`` gives other ids than transformers; None if all
    are equal."""
    tokenizer = load_tokenizer(folder)
    added = (f"a{token.content} b" for token in tokenizer.added_tokens_decoder.values())
    return next((text for text in (*_PROBES, *added) if tokenizer.encode(text) != encode(text)), None)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings of transformers: what they warn of is checked here and raised."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
