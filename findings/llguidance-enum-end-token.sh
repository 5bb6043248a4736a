#!/usr/bin/env bash
# llguidance 1.9.1 with tokenizers 0.23.3: a JSON schema's enum whose text contains the spelling of an added token.
#
# Guess: the grammar lets a model write the text token by token, as any other text.
# Seen: (1) where the text contains the end token's name, the mask inside the string allows the end token alone: the answer ends
# there, as unfinished JSON. (2) where it contains an added token in angle brackets that is not special (special: false, as
# <tool_call> in Qwen's tokenizers), the matcher stops with an error of the kind "doesn't satisfy the grammar".
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|im_end|>"], initial_alphabet=alphabet, show_progress=False)
tokenizer.train_from_iterator(["hello world"] * 9, trainer)
tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=[0])


def follow(text):
    """What the grammar of an enum with this text alone makes a model write, and how that ends."""
    matcher, ids = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps({"enum": [text]}))), []
    while True:
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            return tokenizer.decode(ids), matcher.get_error()
        allowed = [token for token in range(vocabulary.vocab_size) if bits[token // 8] >> token % 8 & 1]
        if allowed[0] == 0:
            return tokenizer.decode(ids), f"end token, allowed alone: {allowed == [0]}"
        ids.append(allowed[0])
        matcher.consume_token(allowed[0])


print("llguidance", version("llguidance"), "tokenizers", version("tokenizers"))
control, end = follow("plain")
print(f"control:           {control!r}, {end}")
assert (control, end) == ('"plain"', "end token, allowed alone: True")
written, end = follow("a<|im_end|>b")
print(f"end token's name:  {written!r}, {end}")
assert (written, end) == ('"a', "end token, allowed alone: True")
written, end = follow("a<tool_call>b")
print(f"plain added token: {written!r}, {end.splitlines()[0]:.100}")
assert "doesn't satisfy the grammar" in end
PY
