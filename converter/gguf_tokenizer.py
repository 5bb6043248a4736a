"""A GGUF file's tokenizer as ``tokenizer.json`` and ``tokenizer_config.json``, with its end tokens and chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.gguf import GgufFile

from .gguf_model import ADVICE

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # token types; 1: normal
_SPACE = "▁"  # SentencePiece's
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_CASED = rf"{_WORD}{_UPPER}*{_LOWER}+END|{_WORD}{_UPPER}+{_LOWER}*END|\p{{N}}DIGITS" + _REST.replace("n]*", "n/]*", 1)
_TEKKEN = _CASED.replace("END", "").replace("DIGITS", "")
_GPT4O = _CASED.replace("END", f"{_CONTRACTIONS}?").replace("DIGITS", "{1,3}")
_DIGITS = {"type": "Digits", "individual_digits": True}


def _byte_level(use_regex: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> list[dict[str, Any]]:
    parts = [{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in patterns]
    return [*parts, _byte_level()]


# ``tokenizer.ggml.pre`` -> the pre-tokenizers of the families' own tokenizer.json.
_PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    name: parts
    for names, parts in (
        ("llama-bpe llama3 llama-v3 dbrx smaug-bpe glm4 chatglm-bpe", _split(_LLAMA3)),
        ("qwen2 deepseek-r1-qwen", _split(_QWEN2)),
        ("smollm starcoder refact", [_DIGITS, _byte_level(use_regex=True)]),
        ("gpt-2 olmo exaone4", [_byte_level(use_regex=True)]),
        ("tekken", _split(_TEKKEN)),
        ("gpt-4o llama4", _split(_GPT4O)),
        (
            "deepseek-coder",
            [*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")[:-1], _DIGITS, _byte_level()],
        ),
    )
    for name in names.split()
}
_NORMALISED = ("qwen2", "deepseek-r1-qwen", "olmo")  # to NFC
_IGNORE_MERGES = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "tekken",
)  # a word that is a token is not merged; they begin with bos
# Tokens that end an answer, which files do not list: only one end of text, and sometimes one of a turn and of a message.
_ENDS = re.compile(r"<\|(eot_id|eom_id|im_end|end|endoftext|end_of_text)\|>|</s>|<end_of_turn>|<｜end▁of▁sentence｜>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Recommended sampling, as generation_config.json names it.
_SAMPLING = {
    f"general.sampling.{stored}": key
    for stored, key in {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }.items()
}


class _Vocabulary:
    def __init__(self, file: GgufFile, vocab_size: int) -> None:
        self.file = file
        self.model, self.pre = self.get("model", ""), self.get("pre", "default")
        tokens, types, scores = self.get("tokens", []), self.get("token_type", None), self.get("scores", [])
        self.tokens: list[str] = tokens
        valid = isinstance(tokens, list) and 0 < len(tokens) <= vocab_size and all(isinstance(t, str) for t in tokens)
        if not valid:
            raise self.wrong(
                "tokens", f"a list of at most {vocab_size:,} texts, as many as there are embeddings", len(tokens)
            )
        self.types: list[int] = [1] * len(tokens) if types is None else types
        self.scores: list[float] = scores or [0.0] * len(tokens)
        for key, values in (("token_type", self.types), ("scores", self.scores)):
            if not isinstance(values, list) or len(values) != len(tokens):
                raise self.wrong(key, f"a list of {len(tokens):,} numbers", values)

    def get(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def wrong(self, key: str, expected: str, found: Any) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.file.name}: tokenizer.ggml.{key}: expected {expected}, found {found!r:.80}; {ADVICE}"
        )

    def id(self, key: str) -> int | None:
        value = self.get(key, None)
        # llama.cpp writes -1 for none, as an unsigned number.
        if value is None or value in (-1, 2**32 - 1):
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.wrong(key, f"a token's id, below {len(self.tokens)}", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    @property
    def end_ids(self) -> list[int]:
        named = [one for key in _END_KEYS if (one := self.id(key)) is not None]
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        known = [at for at, (token, kind) in pairs if kind in (_CONTROL, _USER_DEFINED) and _ENDS.fullmatch(token)]
        return list(dict.fromkeys([*named, *known]))


def tokenizer_files(file: GgufFile, vocab_size: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """JSON documents and texts by name: the tokenizer, the ids in generation_config.json, the chat templates."""
    vocabulary = _Vocabulary(file, vocab_size)
    if vocabulary.model == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(vocabulary), vocabulary.pre in _IGNORE_MERGES
    elif vocabulary.model == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    else:
        raise vocabulary.wrong("model", "gpt2 (byte-level BPE) or llama (SentencePiece BPE)", vocabulary.model)
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if vocabulary.model == "llama" else {}
    ids = {}
    for name in ("bos", "eos", "unknown", "padding"):
        given = vocabulary.id(f"{name}_token_id")
        ids[name] = (
            defaults.get(name) if given is None and f"tokenizer.ggml.{name}_token_id" not in file.metadata else given
        )
    if vocabulary.flag("add_bos_token", add_bos) and ids["bos"] is not None:
        bos = vocabulary.tokens[ids["bos"]]
        special = {bos: {"id": bos, "ids": [ids["bos"]], "tokens": [bos]}}
        text = [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"]
        begin = {"SpecialToken": {"id": bos, "type_id": 0}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, text[0]],
            "pair": [begin, text[0], begin, text[1]],
            "special_tokens": special,
        }
    if vocabulary.flag("add_eos_token", False):
        raise vocabulary.wrong("add_eos_token", "false: an end after each prompt is not known here", True)
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{named[name]}_token": vocabulary.tokens[one] for name, one in ids.items() if one is not None}
    generation: dict[str, Any] = {"eos_token_id": vocabulary.end_ids}
    generation |= {key: file.metadata[stored] for stored, key in _SAMPLING.items() if stored in file.metadata}
    generation |= {f"{named[name]}_token_id": ids[name] for name in ("bos", "padding") if ids[name] is not None}
    texts = {}
    for key, template in file.metadata.items():
        match = re.fullmatch(r"tokenizer\.chat_template(?:\.([\w-]{1,64}))?", key)
        if match and isinstance(template, str):
            place = f"additional_chat_templates/{match[1]}.jinja" if match[1] else "chat_template.jinja"
            texts[place] = template
    documents = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "generation_config.json": generation}
    return documents, texts


def _is_spaces(vocabulary: _Vocabulary, token: str) -> bool:
    """Whether a token is a run of spaces of SentencePiece, which merges make: text is never compared with its spelling."""
    return vocabulary.model == "llama" and not token.strip(" " + _SPACE)


def _document(vocabulary: _Vocabulary, **parts: Any) -> dict[str, Any]:
    added = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (_UNKNOWN, _CONTROL) or (kind == _USER_DEFINED and not _is_spaces(vocabulary, token)):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": index, "content": token, **flags, "special": kind != _USER_DEFINED})
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, "added_tokens": added, **parts}


def _model(vocabulary: _Vocabulary, tokens: list[str], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    # Rows of the embedding without a token are unused ones.
    known = {token: index for index, token in enumerate(tokens) if vocabulary.types[index] != _UNUSED}
    if len(known) != len(tokens) - vocabulary.types.count(_UNUSED):
        twice = next(token for index, token in enumerate(tokens) if known.get(token, index) != index)
        raise vocabulary.wrong("tokens", "different ones", f"{twice} twice")
    for left, right in merges:
        if not {left, right, left + right} <= known.keys():
            raise vocabulary.wrong("merges", "pairs of tokens that make another", f"{left} {right}")
    none = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    model = {"type": "BPE", **none, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {**model, **settings, "vocab": known, "merges": merges}


def _byte_level_bpe(vocabulary: _Vocabulary) -> dict[str, Any]:
    pre = vocabulary.pre
    if pre not in _PRE_TOKENIZERS:
        known = f"how text is split, one of {', '.join(_PRE_TOKENIZERS)}"
        raise vocabulary.wrong("pre", known, pre)
    merges = vocabulary.get("merges", [])
    if not isinstance(merges, list) or not all(isinstance(one, str) and one.count(" ", 1) == 1 for one in merges):
        raise vocabulary.wrong("merges", "a list of pairs of tokens", merges)
    model = _model(vocabulary, vocabulary.tokens, [m.split(" ") for m in merges], ignore_merges=pre in _IGNORE_MERGES)
    parts = _PRE_TOKENIZERS[pre]
    return _document(
        vocabulary,
        normalizer={"type": "NFC"} if pre in _NORMALISED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": parts} if len(parts) > 1 else parts[0],
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model=model,
    )


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """As Llama 2's tokenizer.json: merges in the order of the scores that their results have. Of Gemma's vocabulary, where
    runs of spaces have no scores, in the order of ids."""
    if vocabulary.flag("remove_extra_whitespaces", False):
        raise vocabulary.wrong("remove_extra_whitespaces", "false", True)
    architecture = str(vocabulary.file.metadata.get("general.architecture"))
    gemma, phi3 = architecture.startswith("gemma"), architecture == "phi3"
    # Runs of spaces are stored as such.
    tokens = [token if token.strip(" ") else _SPACE * len(token) for token in vocabulary.tokens]
    mergeable = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, vocabulary.types, strict=True))
        if kind == 1 or (kind == _USER_DEFINED and _is_spaces(vocabulary, token))
    }
    ranked = [(-vocabulary.scores[index], index, token) for token, index in mergeable.items()]
    if gemma:
        ranked = [(index, index, token) for _, index, token in ranked]
    merges = [
        [token[:at], token[at:]]
        for _, _, token in sorted(ranked)
        for at in range(1, len(token))
        if token[:at] in mergeable and token[at:] in mergeable
    ]
    unknown = next((token for token, kind in zip(tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None)
    model = _model(
        vocabulary, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in vocabulary.types
    )
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = vocabulary.flag("add_space_prefix", not gemma)
    normalizers = [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), spaces]
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    document = _document(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
        model=model,
    )
    if phi3:  # as llama.cpp: the file does not say that these tokens take the white space after them
        for token in document["added_tokens"]:
            token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return document
