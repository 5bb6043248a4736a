#!/usr/bin/env bash
# llguidance 1.9.1 with tokenizers 0.23.3: JSON schemas with integers beyond 2^53, as identifiers of 64 bits are.
#
# Guess: `const` and `enum` are exact, since a grammar of their digits needs no arithmetic; bounds are clamped to 64 bits.
# Seen: all are read as doubles. (1) Of {"enum": [1234567890123456789]} the only answer is 1234567890123456768, which the schema
# does not allow; the right one is refused. From 2^63 on it is the double's shortest text: 2^64 - 1 becomes 18446744073709552000.
# (2) A maximum of 10^18 - 1 lets 10^18 pass. (3) The range of a 64-bit integer, -2^63 to 2^63 - 1, is an error, "Failed to generate
# regex for integer range"; -(2^63 - 1024) compiles. Nothing is logged for (1) and (2). Up to 2^53, and as strings, all are right.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = 256  # tokens are the 256 bytes and an end
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["</s>"])
vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=[END])


def start(schema):
    return LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def takes(schema, value):
    matcher, ids = start(schema), tokenizer.encode(json.dumps(value)).ids
    return not matcher.is_error() and matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def only_answer(schema):
    matcher, ids = start(schema), []
    while True:
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(END + 1) if bits[token // 8] >> token % 8 & 1]
        assert len(allowed) == 1, allowed
        if allowed == [END]:
            return tokenizer.decode(ids)
        ids += allowed
        matcher.consume_token(allowed[0])


print("llguidance", version("llguidance"), "tokenizers", version("tokenizers"))
LONG = 1234567890123456789
for value, seen in ((2**53, 2**53), (str(LONG), str(LONG)), (LONG, 1234567890123456768), (2**53 + 1, 2**53),
                    (2**64 - 1, 18446744073709552000)):
    for schema in ({"const": value}, {"enum": [value]}):
        found = only_answer(schema)
        print(f"{json.dumps(schema)}: the only answer is {found}, the value itself is taken: {takes(schema, value)}")
        assert found == json.dumps(seen) and takes(schema, value) is (value == seen)
below = {"type": "integer", "maximum": 10**18 - 1}
print(json.dumps(below), "takes 10^18:", takes(below, 10**18))
assert takes(below, 10**18) and takes(below, 10**18 - 1)
whole = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
less = {**whole, "minimum": 1024 - 2**63}
print(json.dumps(whole), "error:", start(whole).get_error())
print(json.dumps(less), "error:", start(less).is_error())
assert "Failed to generate regex for integer range" in start(whole).get_error() and not start(less).is_error()
PY
