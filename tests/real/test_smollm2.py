"""A chat model that others trained, SmolLM2-135M-Instruct, in daily use: converted from a GGUF file, asked, served, exported."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import smollm2
import torch
from serve_soak import address_of

import wisparse
from wisparse.runtime.model import Model

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

TEXT = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
# A text and not the model's own, few samples, no rotation: a minute of one core instead of several.
SHORT: dict[str, Any] = {
    "calibration": (str(TEXT),), "num_samples": 2, "seq_len": 64, "search": "fisher", "rotation": "none",
}  # fmt: skip
# Continued, this is far from a tie; the first word of an answer to ASK is nearly one.
CONTINUE: Any = {"prompt": "The capital of France is", "chat_template": False, "max_new_tokens": 4}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def source() -> Path:
    """Its GGUF file."""
    pytest.importorskip("gguf")
    try:
        return smollm2.fetch()
    except smollm2.NotAvailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def bundle(source: Path, folder: Path) -> Path:
    return Path(wisparse.convert(source, folder / "bundle", sparsity=0.4, **SHORT))


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    """As a user loads it: bfloat16, by the CPU's kernels."""
    with wisparse.load(bundle, device="cpu") as model:
        yield model


@pytest.fixture(scope="module")
def dense(bundle: Path) -> Any:
    """transformers' model of the same folder, which knows nothing of masks, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "wisparse", "serve", str(bundle), "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield openai.OpenAI(base_url=address_of(process), api_key="none", max_retries=0)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def their_tokenizer(bundle: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundle)


def chat(client: openai.OpenAI, messages: Any = ASK, **more: Any) -> Any:
    name = client.models.list().data[0].id
    return client.chat.completions.create(**{"model": name, "messages": messages, "temperature": 0, **more})


def answer(theirs: Any, tokenizer: Any, messages: Any = ASK) -> list[int]:
    """Greedy token ids of transformers."""
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    found = theirs.generate(**given, max_new_tokens=24, do_sample=False)
    return found[0, given["input_ids"].shape[1] :].tolist()


def test_transformers_has_our_tokens(their_tokenizer: Any, model: Model) -> None:
    theirs = their_tokenizer
    assert len(model.tokenizer.encode("2024")) == 4  # the model's pre-tokenizer takes digits one by one
    for text in ("def f(x):\n\treturn 2024 + 1e-5", "Straße, 東京, ελληνικά", "  two  spaces", "<|im_end|>1,234.5"):
        assert model.tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


def test_generate_answers_in_the_terminal(bundle: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, said, noted = run("generate", bundle, "--device", "cpu", "--prompt", ASK[0]["content"])
    assert (code, "Paris" in said) == (0, True), (said, noted)
    assert "numba on cpu, bfloat16" in noted


def test_the_second_turn_of_a_chat_sees_the_first(bundle: Path, model: Model) -> None:
    lines = [ASK[0]["content"], "And of Italy?"]
    command = [sys.executable, "-m", "wisparse", "chat", str(bundle), "--device", "cpu", "--max-new-tokens", "24"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first = model.generate(ASK, max_new_tokens=24).text
    turns = [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": lines[1]}]
    second = model.generate(turns, max_new_tokens=24).text
    assert second != model.generate(turns[-1:], max_new_tokens=24).text
    assert done.stdout == f"{first}\n{second}\n"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_stream_is_the_answer(model: Model, server: openai.OpenAI, sampling: dict[str, Any]) -> None:
    # More tokens than a sentence, with characters that the tokenizer spells in several tokens.
    ask = [{"role": "user", "content": "Write 東京 and ελληνικά, then count from 1 to 12."}]
    whole = model.generate(ask, max_new_tokens=30, **sampling).text
    assert "".join(piece.text for piece in model.stream(ask, max_new_tokens=30, **sampling)) == whole
    over_http = chat(server, ask, max_tokens=30, **sampling)
    chunks = chat(server, ask, max_tokens=30, stream=True, stream_options={"include_usage": True}, **sampling)
    *pieces, last = list(chunks)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == over_http.choices[0].message.content
    assert over_http.choices[0].message.content == whole
    assert last.usage == over_http.usage


def test_openai_client(server: openai.OpenAI) -> None:
    assert "Paris" in chat(server).choices[0].message.content
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = chat(server, response_format=wanted, max_tokens=60).choices[0]
    assert (found.finish_reason, json.loads(found.message.content).keys()) == ("stop", {"city"})


def test_transformers_reads_a_bundle_dense(bundle: Path, dense: Any, their_tokenizer: Any) -> None:
    prompts = [ASK, [{"role": "user", "content": "Write a Python function that adds two numbers."}]]
    with wisparse.load(bundle, device="cpu", dtype="float32", sparsity=0) as model:
        ours = [list(model.generate(one, max_new_tokens=24).token_ids) for one in prompts]
    assert [answer(dense, their_tokenizer, one) for one in prompts] == ours


def test_transformers_with_our_masks(bundle: Path, dense: Any, their_tokenizer: Any) -> None:
    """The first sparse step of each prompt. Noise of 1e-7 drops another channel in one step of ten or so, and then moves
    log-probabilities by up to 3: what follows such a step in the same answer is another text."""
    wisparse.sparsify(dense, bundle)
    apart = []
    with wisparse.load(bundle, device="cpu", dtype="float32") as model:
        for words in TEXT.read_text("utf-8").split("\n\n")[:8]:
            given = torch.tensor([their_tokenizer.encode(words)])
            settings = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
            found = dense.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=2, **settings)
            ours = model.generate(given[0].tolist(), max_new_tokens=2, logprobs=5).scores
            for score, logits in zip(ours, found.logits, strict=True):
                theirs = logits[0].log_softmax(-1)
                apart.append(max(abs(float(theirs[token]) - value) for token, value in score.top))
    wisparse.desparsify(dense)
    assert max(apart[::2]) < 1e-3  # the prompts are dense
    assert sorted(apart[1::2])[4] < 1e-3


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_rounded_at_load(bundle: Path, weights: str) -> None:
    with wisparse.load(bundle, device="cpu", weights=weights) as model:
        assert "Paris" in model.generate(**CONTINUE).text


@exhaustive
@pytest.mark.parametrize("weights", ["int8", "int4", "graded"])
def test_conversion_to_codes(
    source: Path, folder: Path, their_tokenizer: Any, weights: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    from transformers import AutoModelForCausalLM

    level = {"bits": 4.25} if weights == "graded" else {"sparsity": 0.4}
    bundle = Path(wisparse.convert(source, folder / weights, weights=weights, **level, **SHORT))
    assert run("verify", bundle)[0] == 0
    with wisparse.load(bundle, device="cpu") as model:
        assert "Paris" in model.generate(**CONTINUE).text
    theirs = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32)
    dense = {"bits": 8} if weights == "graded" else {"sparsity": 0}
    with wisparse.load(bundle, device="cpu", dtype="float32", **dense) as model:
        assert answer(theirs, their_tokenizer) == list(model.generate(ASK, max_new_tokens=24).token_ids)


@exhaustive
def test_onnx_gives_our_tokens(
    bundle: Path, their_tokenizer: Any, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    pytest.importorskip("onnxruntime")
    from wisparse.runtime.onnx_export import OnnxDecoder

    code, _, noted = run("export-onnx", bundle, tmp_path / "onnx", "--dtype", "float32")
    assert code == 0, noted
    with wisparse.load(bundle, device="cpu", dtype="float32") as model:
        ours = list(model.generate(ASK, max_new_tokens=24).token_ids)
    tokens = their_tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=True, return_tensors="np")
    tokens, decoder, found = tokens["input_ids"], OnnxDecoder(tmp_path / "onnx"), []
    decoder.reset(1)
    for _ in ours:
        tokens = decoder.run(tokens)["logits"][:, -1:].argmax(axis=-1)
        found.append(int(tokens[0, 0]))
    assert found == ours


@exhaustive
def test_every_command_with_its_defaults(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    """The model's own text, rotation, three levels; then each verb on the result."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(source, "SmolLM2.gguf")
    for arguments in (
        ("advise", "SmolLM2.gguf"),
        ("convert", "SmolLM2.gguf", "-o", "out", "--search", "fisher", "--num-samples", 4, "--seq-len", 128),
        ("verify", "out"),
        ("inspect", "out"),
        ("eval", "out", "--text", TEXT, "--num-samples", 2, "--seq-len", 128),
        ("bench", "out", "--device", "cpu", "--max-new-tokens", 32),
    ):
        code, said, noted = run(*arguments)
        assert code == 0, (arguments, noted)
        assert said.strip()
        assert "nan" not in said.lower().split()
