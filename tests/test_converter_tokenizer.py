"""Tokenizers as models are published: the bundle's is the one that calibration used, whatever files the source had."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from wisparse import UnsupportedModelError, convert
from wisparse.cli import main
from wisparse.converter.checks import end_turns
from wisparse.converter.source import load_source
from wisparse.converter.tokenizer import bundle_files, differing_text, load_tokenizer
from wisparse.formats.bundle import Bundle
from wisparse.runtime.tokenizer import Tokenizer, check_tokenizer, stop_ids

LINES = ["def add(a, b):\n    return a + b", "The cat sat on the mat. It's 12345!", "Brötchen – naïve 東京 😀"]
LINES = [*LINES, "  a\t b"] * 9
TURN = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {
    "content": "<|turn|>",
    "special": True,
}


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return folder


def byte_level(folder: Path, special: tuple[str, ...] = ("<|endoftext|>", "<|im_end|>")) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[*special], show_progress=False, initial_alphabet=alphabet
    )
    library.train_from_iterator(LINES, trainer)
    library.save(str(folder / "tokenizer.json"))
    write(
        folder,
        config__json={"model_type": "llama", "vocab_size": 400},
        tokenizer_config__json={"eos_token": special[0]},
    )
    return library


def plain(folder: Path) -> None:
    byte_level(folder)


def padded(folder: Path) -> None:
    library = byte_level(folder)
    library.enable_truncation(8)
    library.enable_padding(length=8, pad_token="<|endoftext|>")
    library.save(str(folder / "tokenizer.json"))


def added_tokens_decoder(folder: Path) -> None:
    decoder = {str(i): token.__getstate__() for i, token in byte_level(folder).get_added_tokens_decoder().items()}
    write(
        folder,
        tokenizer_config__json={"eos_token": "<|turn|>", "added_tokens_decoder": {**decoder, "340": TURN}},
        special_tokens_map__json={"eos_token": "<|im_end|>"},
    )  # not read beside added_tokens_decoder


def added_tokens(folder: Path) -> None:
    byte_level(folder)
    write(
        folder, added_tokens__json={"<|turn|>": 340, "<tool>": 341}, special_tokens_map__json={"eos_token": "<|turn|>"}
    )


def special_tokens_map(folder: Path) -> None:
    byte_level(folder)
    write(folder, special_tokens_map__json={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|new|>"})


def no_config(folder: Path) -> None:
    byte_level(folder)
    write(folder, special_tokens_map__json={"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})
    (folder / "tokenizer_config.json").unlink()


def vocab_and_merges(folder: Path, name: str = "GPT2Tokenizer") -> None:
    byte_level(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""])
    config = {"tokenizer_class": name}
    write(folder, vocab__json=model["vocab"], merges__txt=merges, tokenizer_config__json=config)


LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def sentencepiece(folder: Path, training: dict[str, Any] = LLAMA, **config: Any) -> None:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    (folder / "text").write_text("\n".join(LINES))
    trainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=330,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, user_defined_symbols=["<|turn|>"],
        **{"model_type": "bpe"} | training,
    )  # fmt: skip
    write(folder, config__json={"model_type": "llama"}, tokenizer_config__json=config)


def tiktoken(folder: Path) -> None:
    pytest.importorskip("tiktoken")
    pieces = [*(bytes([byte]) for byte in range(256)), b" t", b"he", b" the", b"in"]
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces))
    write(
        folder,
        tokenizer__model="".join(lines),
        config__json={"model_type": "llama"},
        tokenizer_config__json={"eos_token": "<|turn|>", "added_tokens_decoder": {"260": TURN}},
    )


SOURCES: dict[str, tuple[Callable[[Path], None], str | None, set[str]]] = {  # the end token, and the files that change
    "plain": (plain, "<|endoftext|>", set()),
    "padded": (padded, "<|endoftext|>", set()),
    "added_tokens_decoder": (added_tokens_decoder, "<|turn|>", {"tokenizer.json"}),
    "added_tokens.json": (added_tokens, "<|turn|>", {"tokenizer.json"}),
    "special_tokens_map": (special_tokens_map, "<|im_end|>", {"tokenizer.json"}),
    "no config": (no_config, "<|im_end|>", set()),
    "gpt2": (vocab_and_merges, "<|endoftext|>", {"tokenizer.json", "tokenizer_config.json"}),
    "qwen2": (lambda folder: vocab_and_merges(folder, "Qwen2Tokenizer"), "<|endoftext|>",
              {"tokenizer.json", "tokenizer_config.json"}),
    "llama 2": (lambda folder: sentencepiece(folder, tokenizer_class="LlamaTokenizer", add_bos_token=True), "</s>",
                {"tokenizer.json", "tokenizer_config.json"}),
    "gemma": (lambda folder: sentencepiece(folder, tokenizer_class="GemmaTokenizer"), "<eos>",
              {"tokenizer.json", "tokenizer_config.json"}),
    "sentencepiece": (sentencepiece, "</s>", {"tokenizer.json", "tokenizer_config.json"}),
    "tiktoken": (tiktoken, "<|turn|>", {"tokenizer.json", "tokenizer_config.json"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_the_bundles_tokenizer_is_the_one_of_calibration(name: str, tmp_path: Path) -> None:
    make, end, changed = SOURCES[name]
    make(tmp_path)
    source = load_tokenizer(tmp_path)
    files = bundle_files(tmp_path, source)
    assert set(files) == changed
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)

    def read(file: str) -> dict[str, Any]:
        return json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}

    text = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), read("tokenizer_config.json"), None, 10_000,
                     read("special_tokens_map.json"))  # fmt: skip
    assert text.special_tokens.get("eos_token") == source.eos_token == end
    assert text.special_id("eos_token") == source.eos_token_id
    assert text.special_id("bos_token") == source.bos_token_id
    for line in [*LINES[:4], "a<|turn|>b <|im_end|>", "<|new|>x<tool>"]:
        ids = source.encode(line)
        assert text.encode(line)[: len(ids)] == ids
        assert text.decode(ids, skip_special_tokens=False) == source.decode(ids)
    # A bundle is read by transformers too, with the same ids.
    assert differing_text(tmp_path, text.encode) is None
    assert bundle_files(tmp_path, load_tokenizer(tmp_path)) == {}


@pytest.mark.parametrize("name", ["plain", "added_tokens_decoder", "gpt2"])
@pytest.mark.usefixtures("quick_conversion")
def test_a_conversion_writes_the_tokenizer_and_the_templates(name: str, tmp_path: Path) -> None:
    model, config = tmp_path / "model", {**tiny_config(), "vocab_size": 400}
    write_tiny_model(model, config)
    SOURCES[name][0](model)
    source = write(model, config__json=config, generation_config__json={})
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    expected = load_tokenizer(source).encode("a<|turn|>b 12\n")
    before = (model / "tokenizer.json").read_bytes() if name == "plain" else None
    settings = {"search": "uniform", "method": "teal", "num_samples": 2, "seq_len": 16, "device": "cpu"}
    bundle = Bundle.open(convert(model, tmp_path / "out", sparsity=0.5, **settings))
    text = check_tokenizer(bundle)
    assert text is not None
    assert text.encode("a<|turn|>b 12\n") == expected
    assert text.special_id("eos_token") in stop_ids(bundle, text)
    assert text.special_tokens["eos_token"] == SOURCES[name][1]
    assert text.render([{"role": "user", "content": "x"}], tools=[{}, {}]) == "2 tools"
    assert before in (None, bundle.read_bytes("tokenizer.json"))


@pytest.mark.parametrize("training", [LLAMA, {}, LLAMA | {"add_dummy_prefix": False}, {"model_type": "unigram"}])
def test_text_is_normalized_as_tokenizer_model_says(training: dict[str, Any], tmp_path: Path) -> None:
    """transformers' LlamaTokenizer has one normalizer for all files (5.24)."""
    sentencepiece(tmp_path, training, tokenizer_class="LlamaTokenizer", add_bos_token=True)
    pieces = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = load_tokenizer(tmp_path)
    for text in (*LINES[:3], "a  b", "two words ", "the ﬁrst Ａ"):
        assert tokenizer.encode(text, add_special_tokens=False) == pieces.encode(text), text
        assert tokenizer.encode(text) == [tokenizer.bos_token_id, *pieces.encode(text)]


def test_a_tokenizer_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece(tmp_path)
    monkeypatch.setattr("wisparse.converter.tokenizer.find_spec", lambda name: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: 1 // 0)
    with pytest.raises(
        UnsupportedModelError, match=r"tokenizer\.model needs the package sentencepiece.*wisparse\[sentencepiece\]"
    ):
        load_tokenizer(tmp_path)


def test_tekken_json_alone_is_refused(tmp_path: Path) -> None:
    """It names no special tokens in roles; advice to install mistral-common would not help."""
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tekken.json").write_text('{"config": {}, "vocab": []}')
    with pytest.raises(
        UnsupportedModelError, match=r"expected tokenizer\.json beside config\.json, found none; copy it"
    ):
        load_tokenizer(tmp_path)


def test_verify_compares_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle of an earlier version, whose tokenizer.json lacks a token that tokenizer_config.json adds."""
    model = write_tiny_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    size = Library.from_file(str(model / "tokenizer.json")).get_vocab_size()
    write(model, tokenizer_config__json={**config, "added_tokens_decoder": {str(size): TURN}})
    assert (
        differing_text(model, Tokenizer((model / "tokenizer.json").read_bytes(), {}, None, 9999).encode)
        == "a<|turn|> b"
    )
    folder = write_tiny_bundle(tmp_path / "bundle", model)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(folder)])
    assert caught.value.code == 6
    assert "for 'a<|turn|> b', transformers other ids" in capsys.readouterr().err


ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|pad|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
GENERATION = {"generation_config.json": {"temperature": 0.5, "eos_token_id": [0, 3]}}


@pytest.mark.parametrize(
    ("template", "likely", "named"),
    [
        (ENDS, 3, True),
        (ENDS.replace("<|pad|>", " <|pad|>\n"), 3, True),
        (ENDS, 0, False),  # a base model with a template, which ends texts
        (ENDS, 17, False),  # and one that goes on
        (ENDS.replace("<|pad|>", "<|endoftext|>"), 3, None),  # named already
        (ENDS.replace("<|pad|>", "###"), 3, None),
        (None, 3, None),
    ],
)
def test_the_templates_end_is_named_if_the_model_predicts_it(
    template: str | None, likely: int, named: bool | None, example_model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    source = load_source(example_model, device="cpu")
    monkeypatch.setattr(source.tokenizer, "chat_template", template)
    logits = torch.nn.functional.one_hot(torch.tensor([[likely]]), 8192) * 20.0
    monkeypatch.setattr(source.model, "forward", lambda ids: SimpleNamespace(logits=logits))
    write(tmp_path, generation_config__json={"temperature": 0.5, "eos_token_id": 0})
    files = end_turns(source, tmp_path)
    assert {name: json.loads(data) for name, data in files.items()} == (GENERATION if named else {})
    assert ("ends turns with <|pad|>" in caplog.text) == (named is not None)
    assert ("as for a base model" in caplog.text) == (named is False)
