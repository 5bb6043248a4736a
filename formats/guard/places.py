"""The folder that somebody gave for a model, and, if it is none, what it is and what to give instead.

Looks at names and a few small files only. A sentence here is for a person who downloaded the wrong thing.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import AccessError, WisparseError
from .arguments import place
from .safe_json import read_json

__all__ = ["expand", "find_folder", "folder_kind", "shown"]

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
