#!/usr/bin/env bash
# xgrammar 0.2.9, JSON schemas of a string with a `pattern`, in a text of tokens that are bytes.
#
# Guess: the pattern restricts the string's text, and JSON's spelling of it is written: a quote is \", a line break \n. (Strings with
# `minLength` or `maxLength` can hold no escape, which is known: mlc-ai/xgrammar, issue 800.)
# Seen: a pattern restricts the characters of the JSON text. What it names is written bare: the only answer to ^say "hi"$ is
# "say "hi"", which is no JSON, and the right spelling is refused; the same for a line break, and for a backslash, after which the
# next letter is read as an escape. A dot or a class that excludes one letter matches no escape: to ^.*$ no text with a quote can
# be written. No warning is printed. llguidance 1.9.1 takes the right spelling of each and no other.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 xgrammar==0.2.9 llguidance==1.9.1 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PY'
import json
import re
from importlib.metadata import version

import xgrammar
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = 256  # tokens are the 256 bytes and an end
info = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"</s>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]
)
compiler = xgrammar.GrammarCompiler(info, max_threads=1)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
bytewise.decoder = decoders.ByteLevel()
bytewise.add_special_tokens(["</s>"])
vocabulary = LLTokenizer(bytewise.to_str(), eos_token=[END])


def xgrammar_takes(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), any_whitespace=False))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


def llguidance_takes(schema, text):
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    ids = bytewise.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


print(*(f"{name} {version(name)}" for name in ("xgrammar", "llguidance", "torch", "transformers")))
for pattern, right, bare in (
    ('^say "hi"$', r'"say \"hi\""', '"say "hi""'),
    (r"^C:\\\w+$", r'"C:\\temp"', r'"C:\temp"'),
    (r"^a\nb$", r'"a\nb"', '"a\nb"'),
    (r"^.*$", r'"say \"hi\""', None),
    (r"^[^x]*$", r'"a\nb"', None),
):
    assert re.search(pattern, json.loads(right))
    schema = {"type": "string", "pattern": pattern}
    one, other = ([bool(text) and takes(schema, text) for text in (right, bare)] for takes in (xgrammar_takes, llguidance_takes))
    print(f"{pattern}: the right spelling and the bare one are taken by xgrammar {one}, by llguidance {other}")
    assert (one, other) == ([False, bare is not None], [True, False])
PY
