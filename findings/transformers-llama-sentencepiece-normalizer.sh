#!/usr/bin/env bash
# transformers 5.24.0 with sentencepiece 0.2.3: `AutoTokenizer` on a folder with tokenizer.model, no tokenizer.json, and
# "tokenizer_class": "LlamaTokenizer", as models of the first Llama's time and many trained from scratch have it.
#
# Guess: identifiers are SentencePiece's, since the options of its training stand in the file.
# Seen: `LlamaTokenizer` takes pieces and merges from the file and nothing of its normalizer: the text is Llama's, whatever was trained.
# SentencePiece's own defaults are NFKC and one space for several: here two spaces stay two, and a ligature or a full-width letter
# becomes its bytes. With add_dummy_prefix=false each text begins with a space that is not there. With the class
# PreTrainedTokenizerFast the same file gives SentencePiece's identifiers. Nothing is printed. (transformers 4 had a class that called
# SentencePiece beside the converted one, of which issue 24233 tells this for OpenLLaMA's merges. That a leading space is lost by
# default, with Llama's own file too, is known: pull request 47700.)
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 sentencepiece==0.2.3 protobuf
"$folder/venv/bin/python" - "$folder" <<'PY' 2>&1 | grep -v "PyTorch was not found"
import json
import sys
from importlib.metadata import version
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer

folder = Path(sys.argv[1])
words = "the model reads a text of many words and writes the next word after it".split()
(folder / "text").write_text("".join(" ".join(words[i % 14:] + words[: i % 14]) + ".\n" for i in range(400)))
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
OPTIONS = {"Llama's": LLAMA, "SentencePiece's defaults": {}, "Llama's without a prefix": LLAMA | {"add_dummy_prefix": False}}
TEXTS = ("the next word", "the model  reads", "the ﬁrst Ａ")
WRONG = {"Llama's": set(), "SentencePiece's defaults": {1, 2}, "Llama's without a prefix": {0, 1, 2}}

print(*(f"{name} {version(name)}" for name in ("transformers", "tokenizers", "sentencepiece")))
for name, options in OPTIONS.items():
    path = folder / name.replace(" ", "-")
    path.mkdir()
    SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(path / "tokenizer"), model_type="bpe", vocab_size=340, byte_fallback=True,
        minloglevel=2, **options,
    )
    (path / "config.json").write_text('{"model_type": "llama"}')
    pieces = SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    tokenizers = {}
    for kind in ("LlamaTokenizer", "PreTrainedTokenizerFast"):
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **special}))
        tokenizers[kind] = AutoTokenizer.from_pretrained(path)
    print(f"trained with {name}:")
    for number, text in enumerate(TEXTS):
        right = pieces.encode(text)
        found = {kind: one(text, add_special_tokens=False).input_ids for kind, one in tokenizers.items()}
        llama = found["LlamaTokenizer"]
        print(f"  {text!r}:", "equal" if llama == right else
              f"sentencepiece {pieces.id_to_piece(right)}, LlamaTokenizer {pieces.id_to_piece(llama)}")
        assert found["PreTrainedTokenizerFast"] == right and (llama != right) is (number in WRONG[name])
PY
