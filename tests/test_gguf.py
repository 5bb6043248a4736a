"""GGUF files as sources: weights, configuration and tokenizer as those of the model that the file was made from."""

import contextlib
import json
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import hugging_face
from gguf_files import MODELS, VOCAB, texts, write_gguf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import wisparse
from wisparse.cli import convert_main
from wisparse.converter.gguf_source import gguf_weights, open_source
from wisparse.converter.gguf_tokenizer import tokenizer_files
from wisparse.converter.settings import ConvertSettings
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import AccessError, UnsupportedModelError, UsageError, WisparseError
from wisparse.formats.gguf import GgufFile

pytest.importorskip("gguf")


def loaded(path: Path) -> SourceModel:
    source = open_source(str(path), None, None)
    return load_source(source.folder, torch.float32, "cpu", weights=gguf_weights(source))


@torch.inference_mode()
def assert_same_logits(path: Path, model: torch.nn.Module) -> None:
    """Also beyond windows, and beyond the original lengths of scaled rotary embeddings, which are 16 to 64."""
    ids = torch.randint(VOCAB, (2, 200), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(path).model(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_each_family(name: str, tmp_path: Path) -> None:
    assert_same_logits(tmp_path / "m.gguf", write_gguf(name, tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_logits_of_each_type(kind: str, tmp_path: Path) -> None:
    assert_same_logits(tmp_path / "m.gguf", write_gguf("llama-bias", tmp_path / "m.gguf", kind))


LOAD = """
import sys, psutil, torch
from transformers import AutoModelForCausalLM
from transformers.models.{family} import modeling_{family}
from wisparse.converter.gguf_source import gguf_weights, open_source
from wisparse.converter.source import load_source
before = psutil.Process().memory_info().rss
source = open_source(sys.argv[1], None, None)
model = load_source(source.folder, torch.float32, "cpu", weights=gguf_weights(source)).model
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print((peak - before) / sum(4 * one.numel() for one in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), pytest.param("gemma", True, marks=pytest.mark.exhaustive)]
)
def test_memory_of_a_load(family: str, tied: bool, tmp_path: Path) -> None:
    write_gguf(family, tmp_path / "m.gguf", "F16", vocab_size=110_000, tie_word_embeddings=tied)
    command = [sys.executable, "-c", LOAD.replace("{family}", family), str(tmp_path / "m.gguf")]
    assert float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 1.3


def small_files(path: Path, name: str = "llama", **metadata: Any) -> dict[str, Any]:
    """The JSON documents that are made of a file's metadata."""
    if not path.exists():
        write_gguf(name, path, metadata={key.replace("__", "."): value for key, value in metadata.items()})
    folder = open_source(str(path), None, None).folder
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}


@pytest.mark.parametrize(
    ("name", "metadata", "rope"),
    [
        ("llama-3.1", {}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}),
        # A scaling that Llama 3's formula does not give.
        ("phi3-long", {}, {"rope_type": "longrope", "partial_rotary_factor": 0.75}),
        ("llama", {"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {"rope_type": "default"}),
    ],
)
def test_rotary_scaling(name: str, metadata: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    write_gguf(name, tmp_path / "m.gguf", metadata=metadata)
    config = small_files(tmp_path / "m.gguf")["config.json"]
    assert rope.items() <= config["rope_parameters"].items()
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (
        1e-6,
        MODELS[name][2].get("rope_parameters", {}).get("rope_theta", 10000.0),
    )


def test_ends_and_templates(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    more = {"general.sampling.temp": 0.7, "general.license": "mit"}
    write_gguf("llama", tmp_path / "m.gguf", metadata={**templates, **more})
    source = open_source(str(tmp_path / "m.gguf"), None, None)
    documents = small_files(tmp_path / "m.gguf")
    # The field's, the turn's, and the one that only its text tells.
    assert documents["generation_config.json"] == {"eos_token_id": [258, 257], "temperature": 0.7, "bos_token_id": 256}
    assert documents["config.json"]["eos_token_id"] == [258, 257]
    assert (source.folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (source.folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    tokenizer = loaded(tmp_path / "m.gguf").tokenizer
    assert tokenizer("he12<tool_call>")["input_ids"] == [256, 260, 261, 259]  # begins with bos, as llama-bpe does
    assert "[PAD270]" not in tokenizer.get_vocab()


_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}"
    r"\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}"
    r"\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTE_LEVEL]


# ``tokenizer.ggml.pre`` -> what the families' tokenizer.json has.
PRE_TOKENIZERS: dict[str, list[Any]] = {
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_LLAMA3.replace("{1,3}", "")),
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "gpt-2": [_GPT2],
    "tekken": _split(_TEKKEN),
    "gpt-4o": _split(_GPT4O),
    "deepseek-coder": [
        *(pre_tokenizers.Split(Regex(one), "isolated") for one in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
        pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        _BYTE_LEVEL,
    ],
}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_token_ids_are_those_of_the_source(pre: str) -> None:
    source = Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    if pre == "qwen2":
        source.normalizer = normalizers.NFC()
    corpus = texts()
    source.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=_BYTE_LEVEL.alphabet()))
    source.add_special_tokens(["<|im_end|>"])
    source.add_tokens(["<think>"])
    vocabulary = sorted(source.get_vocab(), key=source.token_to_id)
    kinds = [{"<|im_end|>": 3, "<think>": 4}.get(token, 1) for token in vocabulary]
    merges = [" ".join(pair) for pair in json.loads(source.to_str())["model"]["merges"]]
    made = tokenizer_of(model="gpt2", pre=pre, tokens=vocabulary, token_type=kinds, merges=merges)
    assert len(corpus) > 200
    for text in [*corpus, "<think>a</think><|im_end|> b"]:
        assert made.encode(text, add_special_tokens=False).ids == source.encode(text).ids, text


def tokenizer_of(architecture: str = "llama", **fields: Any) -> Tokenizer:
    metadata = {"general.architecture": architecture, **{f"tokenizer.ggml.{key}": one for key, one in fields.items()}}
    documents, _ = tokenizer_files(types.SimpleNamespace(name="m.gguf", metadata=metadata), len(fields["tokens"]))
    return Tokenizer.from_str(json.dumps(documents["tokenizer.json"]))


@pytest.mark.parametrize(("architecture", "prefix"), [("llama", True), ("gemma", False)])
def test_token_ids_are_those_of_sentencepiece(architecture: str, prefix: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    corpus = texts()
    (tmp_path / "corpus.txt").write_text("\n".join(corpus))
    spaces = [] if prefix else ["▁" * count for count in range(2, 32)]  # as in Gemma's vocabulary
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "m"), vocab_size=1200, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        add_dummy_prefix=prefix, user_defined_symbols=["<think>", *spaces], character_coverage=0.99,
        allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    source = library.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    every = range(source.vocab_size())
    defined = {source.piece_to_id(piece) for piece in ["<think>", *spaces]}
    is_kind = ((source.is_unknown, 2), (source.is_control, 3), (source.is_byte, 6), (defined.__contains__, 4))
    kinds = [next((kind for test, kind in is_kind if test(at)), 1) for at in every]
    pieces, scores = [source.id_to_piece(at) for at in every], [source.get_score(at) for at in every]
    # Runs of spaces as llama.cpp's converter writes them.
    pieces = [" " * len(piece) if at in defined and not piece.strip("▁") else piece for at, piece in enumerate(pieces)]
    made = tokenizer_of(architecture, model="llama", tokens=pieces, token_type=kinds, scores=scores, bos_token_id=1)
    for text in corpus:
        assert made.encode(text, add_special_tokens=False).ids == source.encode(text), text
        assert made.encode(text).ids == [1, *source.encode(text)]
        assert made.decode(made.encode(text).ids) == text


@pytest.mark.usefixtures("quick_conversion")
@pytest.mark.parametrize(("dtype", "weights"), [("float32", "native"), ("auto", "native"), ("auto", "int8")])
def test_conversion(dtype: str, weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_gguf("llama-3.1", tmp_path / "m.gguf", "Q4_K", {"general.license": "apache-2.0"})
    arguments = f"{tmp_path}/m.gguf -o {tmp_path}/out --dtype {dtype} --weights {weights} --rotation none --sparsity 0"
    arguments += " --search uniform --num-samples 2 --seq-len 16 --device cpu"
    with pytest.raises(SystemExit) as ended:
        convert_main(arguments.split())
    assert not ended.value.code
    said = "dequantised from GGUF, Q4_K (23); quality is measured against the dequantised weights"
    assert "dequantised from GGUF, Q4_K (23); quality is measured" in " ".join(capsys.readouterr().out.split())
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.recipe.measured_against.startswith(said)
    card, report = ((tmp_path / "out" / name).read_text() for name in ("README.md", "conversion_report.json"))
    assert said in card
    assert "license: apache-2.0" in card
    assert said in report
    state = model.state_dict()
    stored = {"float32": torch.float32}.get(dtype, torch.bfloat16)
    names = ["model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"]
    for name in names if weights == "native" else names[::2]:  # rounded once, from the dequantised ones
        assert torch.equal(bundle.checkpoint.tensor(name), state[name].to(stored)), name
    if dtype == "float32":
        ids = torch.randint(VOCAB, (1, 150), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            torch.testing.assert_close(hugging_face(tmp_path / "out")(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "falcon-h1"},
        "unsupported architecture 'falcon-h1'; GGUF files are read of",
    ),
    "projector": ({"general.type": "mmproj"}, "holds 'mmproj', not a language model"),
    "split": ({"split.count": 3}, "one of 3 parts of a model; join them with llama-gguf-split --merge"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "default"}, r"tokenizer\.ggml\.pre: expected how text is split"),
    "unknown pre-tokenizer": ({"tokenizer.ggml.pre": "kimi-k2"}, "found 'kimi-k2'; give the checkpoint"),
    "tokenizer": ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model: expected gpt2"),
    "unknown scaling": (
        {"llama.rope.scaling.type": "dynamic"},
        r"llama\.rope\.scaling\.type: expected none, linear, yarn",
    ),
    "what changes the model": (
        {"llama.attention.clamp_kqv": 8.0},
        r"llama\.attention\.clamp_kqv is 8\.0, which is not known",
    ),
    "end after prompts": ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token: expected false"),
    "no number": ({"llama.context_length": "many"}, r"llama\.context_length: expected a number, found 'many'"),
    "absurd": (
        {"llama.block_count": 10**9},
        r"llama\.block_count: expected a whole number from 1 to 29, found 1000000000",
    ),
    "missing": ({"llama.embedding_length": None}, r"llama\.embedding_length: expected a number, found None"),
    "another vocabulary": (
        {"tokenizer.ggml.eos_token_id": 5000},
        "eos_token_id: expected a token's id, below 272, found 5000",
    ),
    "heads": ({"llama.attention.head_count": 7}, "is not that of 7 heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_restored_is_refused_by_name(name: str, tmp_path: Path) -> None:
    metadata, words = REFUSED[name]
    write_gguf("llama", tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=words):
        loaded(tmp_path / "m.gguf")


def test_damaged_files(tmp_path: Path) -> None:
    write_gguf("llama-3.1", tmp_path / "whole.gguf", "Q4_0")
    whole = (tmp_path / "whole.gguf").read_bytes()
    start = min(tensor.offset for tensor in GgufFile(tmp_path / "whole.gguf").tensors.values())
    huge = struct.pack("<Q", 2**60)
    damaged = {
        "empty": b"", "pointer": b"version https://git-lfs", "magic": b"GGML" + whole[4:], "header": whole[: start // 2],
        "data": whole[:-500], "big-endian": whole[:4] + whole[4:8][::-1] + whole[8:], "version": whole[:4] + b"\x09" + whole[5:],
        "tensors": whole[:8] + huge + whole[16:], "keys": whole[:16] + huge + whole[24:], "name": whole[:24] + huge + whole[32:],
    }  # fmt: skip
    words = ["found b''", "Git LFS", "not a GGUF file", "cut off", "cut off", "big-endian", "version 9"]
    words += ["claims", "claims", "cut off"]
    for (name, data), said in zip(damaged.items(), words, strict=True):
        (tmp_path / f"{name}.gguf").write_bytes(data)
        with pytest.raises(UnsupportedModelError, match=said):
            GgufFile(tmp_path / f"{name}.gguf")
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(4, start, (300,), generator=generator).tolist():
        path = tmp_path / "flipped.gguf"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with contextlib.suppress(WisparseError):  # any other error fails the test
            gguf_weights(open_source(str(path), None, None))


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    write_gguf("llama", tmp_path / "folder" / "m.gguf")
    monkeypatch.chdir(tmp_path)
    for model, gguf_file in (("folder/m.gguf", None), ("folder", "m.gguf")):
        assert open_source(model, None, gguf_file).name == "m"
        assert ConvertSettings(model, gguf_file=gguf_file).output_dir == Path("m-wisparse")
    with pytest.raises(UnsupportedModelError, match=r"is GGUF files, llama[.]cpp's format: give one of the files"):
        wisparse.convert("folder", "out")
    with pytest.raises(AccessError, match=r"'other\.gguf' is not in '\S*folder'; its GGUF files: m\.gguf"):
        wisparse.convert("folder", "out", gguf_file="other.gguf")
    for wrong in ("m.bin", "../m.gguf", "/m.gguf"):
        with pytest.raises(UsageError, match=r"expected the name of a \.gguf file"):
            wisparse.convert("folder", "out", gguf_file=wrong)
    with pytest.raises(AccessError, match=r"is a GGUF file, llama[.]cpp's format: make a bundle of it"):
        wisparse.load("folder/m.gguf")
    with pytest.raises(UsageError, match="--revision names a commit"):
        wisparse.convert("folder/m.gguf", "out", revision="main")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'wisparse\[gguf\]'"):
        open_source("folder/m.gguf", None, None)
