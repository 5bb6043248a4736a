#!/usr/bin/env bash
# onnxruntime-genai 0.18.0 with tokenizers 0.23.3: `Tokenizer` on a tokenizer.json whose pre-tokenizers are `Digits` and then
# `ByteLevel`, as SmolLM2 has them.
#
# Guess: the identifiers are those of tokenizers, or the pre-tokenizer is refused, as an unknown type is.
# Seen: `Digits` is a known type that does nothing. Where the expression of `ByteLevel` and the vocabulary keep digits apart anyway, the
# tokens are equal, but white space before a digit is split otherwise: the blank line before the "1." of a list is two tokens "\n" in
# place of "\n\n", four spaces before a number are three and one. With SmolLM2's own tokenizer.json 32 of 600 passages (prose, code,
# mixed scripts) differ. A vocabulary with numbers of several digits gives these. Nothing is printed.
# (c_api.md of onnxruntime-extensions says "not directly used" of the pre-tokenizer; since its pull request 1059 each `Split` is used.)
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnxruntime-genai==0.18.0 tokenizers==0.23.3 onnx==1.23.2
"$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import onnx
import onnxruntime_genai
from onnx import TensorProto, helper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

folder = Path(sys.argv[1])
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
# Merges of white space as SmolLM2's vocabulary has them, and one of digits, which its vocabulary has not.
merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠ", "Ġ"), ("2", "0")]
tokens = letters + [a + b for a, b in merges]
tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
# A tokenizer is made from a model: one node that returns the identifiers.
ids, logits = (helper.make_tensor_value_info(name, kind, ["batch", "length"])
               for name, kind in (("input_ids", TensorProto.INT64), ("logits", TensorProto.FLOAT)))
graph = helper.make_graph([helper.make_node("Cast", ["input_ids"], ["logits"], to=TensorProto.FLOAT)], "model", [ids], [logits])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx")
sizes = {"head_size": 16, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1}
(folder / "genai_config.json").write_text(json.dumps({
    "model": {
        "type": "llama", "vocab_size": len(tokens), "context_length": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        "decoder": {"filename": "model.onnx", "inputs": {"input_ids": "input_ids"}, "outputs": {"logits": "logits"}, **sizes},
    },
    "search": {"max_length": 64},
}))
genai = onnxruntime_genai.Tokenizer(onnxruntime_genai.Model(str(folder)))

print(*(f"{name} {version(name)}" for name in ("onnxruntime-genai", "tokenizers")))
TEXTS = {"a\n\nb    c, 3 of 4": True, "Steps:\n\n1. go": False, "x =    7": False, "in 2020": False}
for text, equal in TEXTS.items():
    right, found = tokenizer.encode(text).tokens, [tokens[number] for number in genai.encode(text)]
    print(f"{text!r}:", "equal" if right == found else f"tokenizers {right}, genai {found}")
    assert "".join(right) == "".join(found) and (right == found) is equal
assert [tokens[number] for number in genai.encode("\n\n1")] == ["Ċ", "Ċ", "1"] and tokenizer.encode("\n\n1").tokens == ["ĊĊ", "1"]
PY
