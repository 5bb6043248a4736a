"""From a checkpoint to answers, for every family: converted, verified, decoded dense and sparse like transformers."""

import importlib.util
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import runtime_models
import torch
import triton_worker
from bundle_maker import make_bundle
from family_cases import COUNT, PLAIN, ROUTED, ClearAnswer, clear_answer, converted, greedy, hugging_face, make_source
from runtime_models import SMALL, WRAPPERS
from safetensors import safe_open

import wisparse
from wisparse.converter.config import full_config
from wisparse.formats import architectures
from wisparse.formats.architectures import ARCHITECTURES
from wisparse.formats.block_ops import not_yet
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.model_config import expected_tensors
from wisparse.runtime.cuda.weights import load_weights
from wisparse.runtime.onnx_export import export_onnx
from wisparse.runtime.torch.decoder import TorchDecoder

# One family a feature: biases, norms of whole vectors, windows and soft caps, fused projections, DeltaNet, shared keys and
# values, experts and a shared one, attention sinks. Experts alone are in test_experts.py.
FEATURES = (
    "seed-oss",
    "olmo2",
    "gemma2",
    "phi3-partial",
    "qwen3.5",
    "gemma4",
    "qwen3.5-moe",
    "gpt-oss",
    "gemma4-moe",
    "lfm2",
)
FEATURES += (*SMALL,)
# ``uniform``, without rotation, is cheap and shared by all tests here; ``refine`` is the default, with the rotation.
CASES = [
    pytest.param(name, search, marks=() if search == "uniform" and name in FEATURES else pytest.mark.exhaustive)
    for name in (*PLAIN, *SMALL, *ROUTED)
    for search in ("uniform", "refine")
]
QUICK = ["--num-samples", "4", "--seq-len", "24", "--device", "cpu"]

# An interpreted token takes seconds, a compiled one none.
INTERPRETED = not torch.cuda.is_available()
TRITON_COUNT = 3 if INTERPRETED else COUNT


class Bundles:
    """Of every family, converted once for all tests of this file, with transformers' answer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answer = cache(lambda name, kind: clear_answer(self.bundle(name, kind)))

    def folder(self, name: str, kind: str) -> Path:
        return self.root / f"{name}-{kind}"

    def source(self, name: str, kind: str) -> Path:
        folder = self.folder(name, kind) / ("wrapper" if kind == "wrapper" else "source")
        return folder if folder.exists() else make_source(name, folder)

    def bundle(self, name: str, kind: str) -> Path:
        """``kind``: the search, or ``wrapper``: a model of pictures and text."""
        out = self.folder(name, kind) / "bundle"
        return out if out.exists() else converted(self.source(name, kind), out, kind.replace("wrapper", "uniform"))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("families"))


@torch.inference_mode()
def check_bundle(bundle: Path, dense: torch.nn.Module, theirs: ClearAnswer) -> None:
    """Dense logits are the source's, as ``dense`` computes them; sparse greedy tokens those of transformers, masked."""
    verify_bundle(bundle)
    prompt = theirs.prompt
    expected = dense(prompt[None], use_cache=False).logits[0]
    assert expected.abs().max() > 1, "logits this small would hide any difference"
    config = Bundle.open(bundle).config
    for backend in (one for one in ("torch", "numba") if not_yet(config, one) is None):
        decoder = wisparse.load(bundle, device="cpu", dtype="float32", backend=backend).decoder
        assert decoder.name == backend
        assert (decoder.logits(prompt, len(prompt)) - expected).abs().max() < 1e-4, backend
        assert_answers(theirs, backend, *greedy(decoder, prompt, COUNT))
        sparse = decoder.logits(prompt, 0)
        assert (sparse - expected).abs().max() > 0.1, "masks that change nothing show nothing"


def assert_answers(theirs: ClearAnswer, backend: str, tokens: list[int], logits: torch.Tensor) -> None:
    assert tokens == theirs.tokens[: len(tokens)], backend
    assert (logits - theirs.logits[: len(tokens)]).abs().max() < 1e-4, backend


@pytest.mark.parametrize(("variant", "search"), CASES)
def test_a_family_is_converted_and_decoded_as_transformers_does(variant: str, search: str, bundles: Bundles) -> None:
    dense = hugging_face(bundles.source(variant, search))
    bundle = bundles.bundle(variant, search)
    check_bundle(bundle, dense, bundles.answer(variant, search))
    if (
        not_yet(Bundle.open(bundle).config, "triton") is None
    ):  # the read ahead of a GPU's loader expects the order in which it asks for them
        load_weights(Bundle.open(bundle), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3-vl" else pytest.mark.exhaustive) for name in WRAPPERS]
)
def test_a_wrapper_is_converted_as_text(name: str, bundles: Bundles, run: Callable[..., tuple[int, str, str]]) -> None:
    from transformers import AutoModelForImageTextToText

    source, bundle = bundles.source(name, "wrapper"), bundles.folder(name, "wrapper") / "bundle"
    code, shown, err = run("convert", source, "-o", bundle, "--sparsity", "0.5", "--search", "uniform", *QUICK)
    assert code == 0, err
    stored = safe_open(source / "model.safetensors", "pt").keys()
    # The rotation gives tied embeddings an output layer of its own.
    kept = [name for name in Bundle.open(bundle).checkpoint.tensors if not name.startswith("lm_head")]
    count = sum("lm_head" not in name for name in stored) - len(kept)
    assert count > 5
    said = f"text only: {count} tensors of the vision tower left out"
    assert said in shown
    assert said in (bundle / "README.md").read_text()
    assert Bundle.open(bundle).recipe.text_only == said
    dense = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    check_bundle(bundle, dense, bundles.answer(name, "wrapper"))
    opened = Bundle.open(bundle)
    config = opened.config_dict
    assert config["model_type"] in ARCHITECTURES
    assert config["architectures"] == [ARCHITECTURES[config["model_type"]].class_name]
    assert not any("vision" in key or "mrope" in str(value) for key, value in config.items())
    assert set(opened.checkpoint.tensors) == set(expected_tensors(opened.config))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_gives_the_tokens_of_transformers(bundles: Bundles) -> None:
    """From bundles of two families; triton_decoder_cases.py compares all families with the plain decoder."""
    names = ("gemma2", "qwen3.5")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), triton_worker.start, (INTERPRETED,)) as pool:
        answers = [bundles.answer(name, "uniform") for name in names]
        jobs = [
            pool.submit(triton_worker.answer, str(bundles.bundle(name, "uniform")), one.prompt.tolist(), TRITON_COUNT)
            for name, one in zip(names, answers, strict=True)
        ]
        for job, theirs in zip(jobs, answers, strict=True):
            tokens, logits = job.result()
            assert len(tokens) == TRITON_COUNT
            assert_answers(theirs, "triton", tokens, torch.tensor(logits))


@pytest.mark.parametrize(
    ("name", "what"), [("gemma4-small", "per-layer embeddings"), ("lfm2", "gated short convolutions")]
)
def test_back_ends_refuse_operations_that_they_lack(name: str, what: str, bundles: Bundles, tmp_path: Path) -> None:
    bundle, backends = Bundle.open(bundles.bundle(name, "uniform")), {"numba", "triton", "onnx"}
    refusing = {backend for backend in backends if not_yet(bundle.config, backend) == what}
    assert refusing == {"triton", "onnx"} | ({"numba"} if name == "lfm2" else set())
    if "numba" in refusing:
        with pytest.raises(UsageError, match=f"numba cannot run this model: it does not run {what} yet"):
            wisparse.load(bundle, device="cpu", backend="numba")
    if importlib.util.find_spec("triton") is not None:
        from wisparse.runtime.cuda.decoder import CudaDecoder

        assert CudaDecoder.refusal(bundle.config, "native") == f"it does not run {what} yet"
    with pytest.raises(UnsupportedModelError, match=f"found {what}, which have no ONNX export yet"):
        export_onnx(bundle, tmp_path / "onnx")


PAGE = Path(__file__).resolve().parent.parent / "docs" / "bring-your-own-architecture.md"


def test_the_row_in_the_page_makes_an_unknown_model_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, variant = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    rows = eval(f"{{{row}}}", vars(architectures))
    ((name, settings),) = eval(f"{{{variant}}}").items()
    monkeypatch.setitem(runtime_models.VARIANTS, name, settings)
    source = runtime_models.make_checkpoint(name, tmp_path / "source")
    message = re.search(r"^wisparse: (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    with pytest.raises(UnsupportedModelError) as refused:
        Checkpoint.open(source, complete=full_config)
    assert str(refused.value) == message[1]
    ((model_type, facts),) = rows.items()
    monkeypatch.setitem(architectures.ARCHITECTURES, model_type, facts)
    folder = make_bundle(source, tmp_path / "bundle")
    bundle = Bundle.open(folder)
    assert bundle.config.attention_softcap == 2.0
    tokens = torch.arange(3, 40)
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=64)
    with torch.inference_mode():
        expected = hugging_face(folder)(tokens[None]).logits[0]
    assert (decoder.logits(tokens, len(tokens)) - expected).abs().max() < 1e-4
