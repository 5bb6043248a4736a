"""What is given for a model and is none gets a sentence that says what it is; JSON that is refused."""

import json
from pathlib import Path

import pytest
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

import wisparse
from wisparse.formats.architectures import ARCHITECTURES, why_refused
from wisparse.formats.errors import AccessError, BundleError, UnsupportedModelError
from wisparse.formats.guard import parse_json, shown
from wisparse.formats.hub import fetch_source
from wisparse.formats.model_config import ModelConfig

FOLDERS = {
    "adapter_config.json adapter_model.safetensors": "is a LoRA (PEFT) adapter of 'org/base', not a whole model: merge",
    "config.json adapter_config.json adapter_model.safetensors": "is a LoRA (PEFT) adapter of 'org/base'",
    "model_index.json": "is a diffusers pipeline",
    "modules.json model.safetensors": "is a sentence-transformers model",
    "model-Q4_K_M.gguf README.md": "is GGUF files, llama.cpp's format: give the checkpoint it was made from",
    "params.json consolidated.00.pth": "is weights in Meta's or Mistral's own layout",
    "model.onnx": "is an ONNX export",
    "tf_model.h5": "is a TensorFlow, Keras or JAX model",
    "train.parquet": "is a data set, not a model; text to calibrate on goes to --calibration",
    "model.safetensors tokenizer.json": "is weights without config.json",
    "snapshots/abc/config.json": "is the Hub's cache of a model",
    "checkpoint-100/config.json checkpoint-200/config.json": "is a training run, not a model: give one of the 2 inside",
    "": "is an empty folder: give a folder with config.json",
    "notes.txt": "is no model: config.json is missing",
}
# Of other blocks than the table's rows can say.
DENSE = ("gpt2", "arcee", "olmo", "nanochat", "cwm", "cohere2", "vaultgemma")


@pytest.mark.parametrize("names", FOLDERS)
def test_a_folder_that_is_no_model(tmp_path: Path, names: str) -> None:
    folder = tmp_path / "some folder"
    folder.mkdir()
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(UnsupportedModelError) as caught:
        wisparse.convert(folder, tmp_path / "out")
    assert str(caught.value).startswith(f"{folder} {FOLDERS[names]}")  # named as it was typed
    with pytest.raises(BundleError, match=r"no wisparse\.json; make one with wisparse-convert from a model \(this is "):
        wisparse.load(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.gguf", "is a GGUF file, llama.cpp's format: give the checkpoint it was made from"),
        ("model.safetensors", "is a file of weights: give the folder that it lies in"),
        ("model.onnx", "is an ONNX file"),
        ("model.tar.gz", "is an archive: unpack it"),
        ("config.json", "is a file: give the folder that it lies in"),
        ("model", "is a file, not a folder: give a folder with config.json"),
    ],
)
def test_a_file_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("x")
    with pytest.raises(AccessError) as caught:
        fetch_source(name)  # as a relative name it has the spelling of a Hub id
    assert str(caught.value).startswith(f"'{name}' {words}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"model_type": name}, "mixture-of-experts") for name in ("dbrx", "glm4_moe", "deepseek_v4", "mellum")),
        ({"model_type": "brand_new", "num_experts": 64}, "'brand_new' is a mixture-of-experts model"),
        ({"model_type": "bert"}, "an encoder, which writes no text"),
        ({"model_type": "t5"}, "an encoder-decoder model"),
        ({"model_type": "brand_new", "is_encoder_decoder": True}, "an encoder-decoder model"),
        *(({"model_type": name}, "recurrent or state-space") for name in ("mamba2", "falcon_h1", "olmo_hybrid")),
        ({"model_type": "whisper"}, "a model of speech, sound or pictures"),
        ({"model_type": "qwen2_5_vl"}, "a model of pictures and text together"),
        ({"model_type": "brand_new", "vision_config": {}}, "a model of pictures and text together"),
        *(({"model_type": name}, "a dense decoder whose blocks are put together in another way") for name in DENSE),
        ({"model_type": "lama"}, "(did you mean 'llama'?)"),
    ],
)
def test_other_families_are_refused_by_what_they_are(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dict(tiny_config() | changes)
    assert str(caught.value).startswith("unsupported architecture: ")
    assert words in str(caught.value)
    assert "known ones: llama, mistral, " in str(caught.value)
    assert ("did you mean" in str(caught.value)) == (changes["model_type"] == "lama")


def test_no_supported_family_is_named_among_the_refused() -> None:
    """A row that is added takes its family off the list of those that need more than a row."""
    assert [name for name in ARCHITECTURES if why_refused({}, name, ()) != f"model_type {name!r}; known ones: "] == []


def test_errors_name_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path / "up" / "model")
    write_tiny_bundle(tmp_path / "up" / "bundle", tmp_path / "up" / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"^up/bundle: already a sparse bundle"):
        wisparse.convert("up/bundle", "out")
    with pytest.raises(BundleError, match=r"^up/model: not a bundle: .* make one with wisparse-convert up/model$"):
        wisparse.load("up/model")
    assert shown("/cache/models--org--name/snapshots/0123abc") == "org/name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' stands there twice"),
        *((text, "expected JSON") for text in (b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"")),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "expected at most 32 levels"),
        (b'{"a": NaN}', "expected finite numbers, found NaN"),
        *((text, "expected finite numbers") for text in (b'{"a": -Infinity}', b'{"a": 1e999}')),
        (b'{"\xff": 1}', "expected UTF-8, found a wrong byte at 2"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'"text"', "expected a JSON object, found str"),
    ],
)
def test_json_that_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        parse_json(text, "it", BundleError)


def test_a_text_of_many_commas_is_json() -> None:
    prompt = "," * 1_000_000
    assert parse_json(json.dumps({"prompt": prompt}).encode(), "it", BundleError) == {"prompt": prompt}
    assert len(parse_json(b'{"ids": [' + b"1," * 600_000 + b"1]}", "it", BundleError)["ids"]) == 600_001
