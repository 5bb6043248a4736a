"""``wisparse eval --reference A --model B``: figures by hand, the three kinds of places, the cache, mistakes."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

from wisparse.converter.divergence import LogitsCache, divergence
from wisparse.converter.evaluation import evaluate_text, rounded, token_figures

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WISPARSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "logits"


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def test_figures_by_hand() -> None:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.995, 0.003, 0.002]])
    q = torch.tensor([[0.4, 0.5, 0.1], [0.2, 0.5, 0.3], [0.9, 0.05, 0.05]])
    found = divergence([token_figures(p.log(), q.log(), torch.tensor([0, 2, -1]))])
    kl = [
        sum(a * math.log(a / b) for a, b in zip(*rows, strict=True))
        for rows in zip(p.tolist(), q.tolist(), strict=True)
    ]
    assert found.kl.mean == pytest.approx(sum(kl) / 3, rel=1e-5)
    assert found.kl_quantiles["largest"] == pytest.approx(max(kl), rel=1e-5)
    assert (found.top1_agreement.mean, found.flips_lost.mean, found.flips_gained.mean) == (pytest.approx(2 / 3), 0.5, 0)
    assert found.probability_rms.mean == pytest.approx(math.sqrt(0.2**2 / 2), rel=1e-5)
    assert found.perplexity_ratio.mean == pytest.approx(math.sqrt(0.6 / 0.4), rel=1e-5)
    assert [(one.low, one.num_tokens) for one in found.buckets] == [(0.5, 2), (0.99, 1)]
    assert math.isnan(found.kl.stderr), "of one sequence"
    assert found.to_dict()["kl"]["stderr"] is None


def test_figures_are_those_of_evaluate_text() -> None:
    texts = [torch.arange(300) % 7, torch.arange(40) % 5]  # the first is longer than a piece
    models = [lambda ids, start, seed=seed: _random(400, 11, seed=seed)[: len(ids)] for seed in (1, 2)]
    rows = [token_figures(models[0](x, 0), models[1](x, 0), torch.cat((x[1:], torch.tensor([-1])))) for x in texts]
    found = divergence(rows)
    wanted = evaluate_text(models[1], texts, ["all"], reference=models[0])["all"].overall
    estimates = (found.kl, found.top1_agreement)
    assert [one.mean for one in estimates] == pytest.approx([wanted.kl, wanted.top1_agreement], rel=1e-5)
    assert [one.stderr for one in estimates] == pytest.approx([wanted.kl_stderr, wanted.top1_stderr], rel=1e-4)
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-5)
    assert sum(one.kl.mean * one.num_tokens for one in found.buckets) / 340 == pytest.approx(found.kl.mean)


@pytest.mark.parametrize("scale", [0.1, 5.0, 1e4])
def test_rounding_of_the_cached_logits(scale: float) -> None:
    logits = _random(50, 1000) * scale
    logits[:, 5] = -torch.inf  # a token that a model excludes
    kl = divergence([token_figures(logits.clamp(min=-1e30), rounded(logits), torch.full((50,), -1))]).kl.mean
    assert abs(kl) < 1e-6


def test_cache_is_bounded_and_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = LogitsCache("model", 10, max_bytes=100 * 20, folder=tmp_path / "logits")
    texts = [torch.arange(40) + at for at in range(3)]
    assert cache.holds(40)
    for age, ids in enumerate(texts):
        cache.write(ids, rounded(_random(40, 10, seed=age)))
        for path in (tmp_path / "logits").iterdir():  # older by ten seconds
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    assert cache.read(texts[0]) is None, "the oldest made room"
    assert torch.equal(cache.read(texts[2]), rounded(_random(40, 10, seed=2)))  # type: ignore[arg-type]
    assert LogitsCache("other", 10, folder=tmp_path / "logits").read(texts[2]) is None
    for damage in (lambda data: data[:-1], lambda data: data[:50] + b"!" + data[51:], lambda data: b""):
        cache.write(texts[1], rounded(_random(40, 10)))
        for path in (tmp_path / "logits").iterdir():
            path.write_bytes(damage(path.read_bytes()))
        assert cache.read(texts[1]) is None
        assert "is damaged and ignored; it is computed again" in caplog.messages[-1]
    (tmp_path / "logits" / "folder").mkdir()  # somebody else's
    cache.write(texts[2], rounded(_random(40, 10)))
    cache.write(texts[0], rounded(_random(40, 10)))
    assert cache.read(texts[0]) is not None
    assert not cache.holds(101)
    assert "the reference's logits are not cached: they take 1 MB, the limit is 1 MB" in caplog.messages[-1]


def test_cache_of_a_folder_that_is_gone_or_read_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ids = LogitsCache("model", 10, folder=tmp_path / "logits"), torch.arange(40)
    assert cache.holds(40)
    cache.write(ids, rounded(_random(40, 10)))
    with monkeypatch.context() as patch:
        for name in ("touch", "unlink"):
            patch.setattr(Path, name, Mock(side_effect=PermissionError(13, "Permission denied")))
        assert cache.read(ids) is not None
        next((tmp_path / "logits").iterdir()).write_bytes(b"x")
        assert cache.read(ids) is None
    shutil.rmtree(tmp_path / "logits")
    (tmp_path / "logits").write_text("")
    cache.write(ids, rounded(_random(40, 10)))
    assert "cannot be written: Not a directory" in caplog.messages[-1]


@pytest.mark.parametrize("name", ["reference", "model"])
def test_logits_that_are_nan(example_model: Path, tmp_path: Path, run: Run, stdlib_file: Path, name: str) -> None:
    """NaN is no token to leave out of a mean."""
    places = {"reference": example_model, "model": example_model, name: tmp_path / "broken"}
    shutil.copytree(example_model, tmp_path / "broken")
    for path in (tmp_path / "broken").glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][:] = 3e38
            save_file(tensors, path, {"format": "pt"})
    text = ("--text", stdlib_file, "--num-samples", 1, "--seq-len", 16)
    code, _, err = run("eval", "--reference", places["reference"], "--model", places["model"], *text)
    assert code == 2, err
    assert f"expected the {name}'s logits to be numbers, found NaN or infinity at 16 of 16 tokens" in err


def test_logits_at_the_ends_of_their_range() -> None:
    """Tokens that are ruled out in both, and a text that the model rules out."""
    p, q = torch.tensor([[2.0, 1.0, -math.inf]] * 2), torch.tensor([[2.0, 1.0, torch.finfo().min]] * 2)
    assert divergence([token_figures(p, q, torch.tensor([1, -1]))]).kl.mean == 0
    found = divergence([token_figures(p, q.flip(-1), torch.tensor([0, -1]))])
    assert found.kl.mean > 1000
    assert found.perplexity == found.perplexity_ratio.mean == math.inf


def test_models_of_all_kinds(
    bundle: Path, example_model: Path, run: Run, cache: Path, stdlib_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = ("--text", stdlib_file, "--num-samples", 3, "--seq-len", 64)
    text += ("--dtype", "float32", "--json")
    models = ("--model", example_model, "--model", bundle)
    code, out, err = run("eval", "--reference", example_model, *models, "--backend", "torch", *text)
    assert code == 0, err
    itself, sparse = json.loads(out)["models"]
    assert 0 <= itself["kl"]["mean"] < 1e-6
    assert (itself["noise_floor"], itself["top1_agreement"]["mean"]) == (None, 1.0)
    assert sparse["noise_floor"]["kl"]["mean"] < 1e-6 < 0.05 < sparse["kl"]["mean"]
    assert "40%" in sparse["how"]
    # The same figure as the bundle's own evaluation, as its dense model is the reference.
    code, out, err = run("eval", bundle, "--prefill", "all", "--backend", "torch", *text)
    own = json.loads(out)["bundles"][0]["quality"]["all"]["overall"]
    assert sparse["kl"]["mean"] == pytest.approx(own["kl"], rel=1e-3)
    assert sparse["kl"]["stderr"] == pytest.approx(own["kl_stderr"], rel=1e-3)
    # A bundle as reference is its dense model; the second run reads the cache, unless a file is damaged.
    assert len(list(cache.iterdir())) == 3
    next(cache.iterdir()).write_bytes(b"!")
    code, out, err = run("eval", "--reference", example_model, "--model", bundle, "--sparsity", 0, *text)
    assert code == 0
    assert sum("is damaged and ignored" in message for message in caplog.messages) == 1
    assert json.loads(out)["models"][0]["kl"]["mean"] < 1e-6
    code, out, err = run("eval", "--reference", bundle, "--model", bundle, *text[:-1])
    assert "KL" in out
    assert "too few tokens to tell: 192" in " ".join(out.split())


def test_gguf_and_rounded_types(tmp_path: Path, run: Run) -> None:
    write_gguf("llama-3.1", tmp_path / "exact.gguf", "F32")
    write_gguf("llama-3.1", tmp_path / "q4.gguf", "Q4_K")
    size = ("--num-samples", 2, "--seq-len", 32, "--json")
    models = ("--model", tmp_path / "q4.gguf", "--model", tmp_path / "exact.gguf")
    code, out, err = run("eval", "--reference", tmp_path / "exact.gguf", *models, "--dtype", "bfloat16", *size)
    assert code == 0, err
    q4, exact = json.loads(out)["models"]
    assert q4["kl"]["mean"] > 5 * q4["noise_floor"]["kl"]["mean"] > 0
    # The reference's logits are stored in half precision, for the noise floor the model's are: errors of 2e-4 of a logit beside
    # 0.02 of bfloat16, in directions of their own, so the KLs differ by about a thousandth.
    assert exact["kl"]["mean"] == pytest.approx(exact["noise_floor"]["kl"]["mean"], rel=4e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--reference EXAMPLE", "--reference and --model go together"),
        ("--model EXAMPLE", "--reference and --model go together"),
        ("", "expected a BUNDLE, or --reference and --model; found neither"),
        ("BUNDLE --reference EXAMPLE --model EXAMPLE", "--reference: BUNDLE cannot be given with it"),
        ("--reference EXAMPLE --model EXAMPLE --compare", "--reference: --compare cannot be given with it"),
        ("--reference EXAMPLE --model EXAMPLE --sparsity 0.3", "--sparsity: expected a bundle as --model, found none"),
        (
            "--reference EXAMPLE --model EXAMPLE --prefill half --prefill all",
            "--prefill: expected one with --reference",
        ),
        (
            "--reference EXAMPLE --model EXAMPLE --seq-len 4096",
            "expected at most the models' context, 2048 tokens, found",
        ),
        ("--reference EXAMPLE --model OTHER", "expected the vocabulary of EXAMPLE, 8,192 tokens, found "),
        ("--reference EXAMPLE --model RENAMED", "expected the reference's tokenizer, found another: token 300 is"),
        ("--reference EXAMPLE --model TEXT", "is a file, not a folder"),
    ],
)
def test_mistakes(options: str, sentence: str, bundle: Path, example_model: Path, run: Run, tmp_path: Path) -> None:
    import shutil

    if "OTHER" in options:
        write_gguf("llama-3.1", tmp_path / "other.gguf", "F32")
    if "RENAMED" in options:
        shutil.copytree(example_model, tmp_path / "renamed")
        tokenizer = json.loads((tmp_path / "renamed" / "tokenizer.json").read_text("utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        one, other = (next(token for token, index in vocabulary.items() if index == at) for at in (300, 301))
        vocabulary[one], vocabulary[other] = 301, 300
        (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "text").write_text("words")
    places = {"EXAMPLE": example_model, "BUNDLE": bundle, "OTHER": tmp_path / "other.gguf"}
    places |= {"RENAMED": tmp_path / "renamed", "TEXT": tmp_path / "text"}
    code, _, err = run("eval", *(places.get(word, word) for word in options.split()))
    for name in ("EXAMPLE", "OTHER"):
        sentence = sentence.replace(name, str(places[name]))
    assert code in (2, 4)
    assert sentence in err
