"""The converter cuts text into the tokens the model was trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from wisparse.converter.source import load_tokenizer


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_tokenizer_json_is_taken_literally(model_type: str, example_model: Path, tmp_path: Path) -> None:
    # transformers chooses a class by model_type; for qwen2 that class splits numbers into single digits.
    for file in example_model.glob("*.json"):
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    text = ">>> 12 + 30\n42\n>>> sorted([11, 6, 100])\n"
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text
    assert tokenizer.eos_token_id == 0
