"""From a checkpoint to answers, for every family: converted, verified, decoded dense and sparse like transformers."""

import importlib.util
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtime_models
import torch
import triton_worker
from bundle_maker import make_bundle
from family_cases import COUNT, PLAIN, ROUTED, ClearAnswer, clear_answer, converted, greedy, hugging_face, make_source
from runtime_models import FEATURES, SMALL, WRAPPERS
from safetensors import safe_open

import wisparse
from wisparse.converter.config import full_config
from wisparse.formats import architectures, block_ops
from wisparse.formats.architectures import ARCHITECTURES
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError, WisparseError
from wisparse.formats.tensors import expected_tensors
from wisparse.runtime.cuda.weights import load_weights
from wisparse.runtime.onnx_export import OnnxDecoder, export_onnx
from wisparse.runtime.torch.decoder import TorchDecoder

# ``uniform``, without rotation, is cheap and shared by all tests here; ``refine`` is the default, with the rotation.
CASES = [
    pytest.param(name, search, marks=() if search == "uniform" and name in FEATURES else pytest.mark.exhaustive)
    for name in (*PLAIN, *SMALL, *ROUTED)
    for search in ("uniform", "refine")
]
QUICK = ["--num-samples", "4", "--seq-len", "24", "--device", "cpu"]
pytestmark = pytest.mark.usefixtures("quick_conversion")

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
    """Dense logits are the source's, or the bundle's where norms are fitted, as ``dense`` computes them; sparse greedy tokens
    those of transformers, masked."""
    verify_bundle(bundle)
    prompt, rotation = theirs.prompt, Bundle.open(bundle).recipe.rotation
    if rotation is not None and rotation.kind == "fitted":  # near the source; back ends compute what it says itself
        assert "nearly what the source's say" in (bundle / "README.md").read_text("utf-8")
        dense = hugging_face(bundle)
    expected = dense(prompt[None], use_cache=False).logits[0]
    assert expected.abs().max() > 1, "logits this small would hide any difference"
    config = Bundle.open(bundle).config
    for backend in (one for one in ("torch", "numba") if block_ops.not_yet(config, one) is None):
        decoder = wisparse.load(bundle, device="cpu", dtype="float32", backend=backend).decoder
        assert decoder.name == backend
        assert_rounded(decoder.logits(prompt, len(prompt)), expected, backend)
        assert_answers(theirs, backend, *greedy(decoder, prompt, COUNT))
        sparse = decoder.logits(prompt, 0)
        assert (sparse - expected).abs().max() > 0.1, "masks that change nothing show nothing"


def assert_answers(theirs: ClearAnswer, backend: str, tokens: list[int], logits: torch.Tensor) -> None:
    assert tokens == theirs.tokens[: len(tokens)], backend
    assert_rounded(logits, theirs.logits[: len(tokens)], backend)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, backend: str) -> None:
    """Within the roundings of float32, which grow with the largest logit: 50 in Gemma, 2 in Granite."""
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max(), backend


@pytest.mark.parametrize(("variant", "search"), CASES)
def test_a_family_is_converted_and_decoded_as_transformers_does(variant: str, search: str, bundles: Bundles) -> None:
    dense = hugging_face(bundles.source(variant, search))
    bundle = bundles.bundle(variant, search)
    check_bundle(bundle, dense, bundles.answer(variant, search))
    # The read ahead of a GPU's loader expects the order in which it asks for them.
    if block_ops.not_yet(Bundle.open(bundle).config, "triton") is None:
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


# A family that has the operation, as few as hold them all. Every executor runs it as transformers does, or refuses it by
# name.
OPERATIONS: dict[type[block_ops.Op], str] = {
    **dict.fromkeys(
        (block_ops.Norm, block_ops.Linear, block_ops.Attention, block_ops.Activate, block_ops.Add), "gemma4-small"
    ),
    block_ops.DeltaNet: "qwen3.5-moe",
    block_ops.ShortConv: "lfm2",
    **dict.fromkeys((block_ops.LatentQuery, block_ops.LatentKeys, block_ops.LatentValues), "glm4-moe-lite"),
    block_ops.Mamba2: "granite-hybrid",
    block_ops.Router: "qwen3.5-moe",
    block_ops.Experts: "qwen3.5-moe",
    block_ops.Sum: "gemma4-moe",
    block_ops.PerLayer: "gemma4-small",
    block_ops.Scale: "gemma4-small",
}


def test_every_operation_has_a_family(bundles: Bundles) -> None:
    assert set(OPERATIONS) == set(block_ops.Op.__subclasses__())
    for operation, name in OPERATIONS.items():
        config = Bundle.open(bundles.bundle(name, "uniform")).config
        assert operation in {type(op) for i in range(config.num_blocks) for op in block_ops.block_ops(config, i)}


def numba_answer(bundle: Path, prompt: list[int], count: int) -> tuple[list[int], list[list[float]]]:
    decoder = wisparse.load(bundle, device="cpu", dtype="float32", backend="numba").decoder
    tokens, logits = greedy(decoder, torch.tensor(prompt), count)
    return tokens, logits.tolist()


def onnx_answer(bundle: Path, prompt: list[int], count: int) -> tuple[list[int], list[list[float]]]:
    pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    export_onnx(Bundle.open(bundle), bundle.with_name("onnx"), check=False, overwrite=True)
    decoder = OnnxDecoder(bundle.with_name("onnx"))
    decoder.reset(1)
    logits = [decoder.run(np.array([prompt]))["logits"][0, -1].tolist()]
    tokens = [int(np.argmax(logits[-1]))]
    while len(tokens) < count:
        logits.append(decoder.run(np.array([tokens[-1:]]))["logits"][0, -1].tolist())
        tokens.append(int(np.argmax(logits[-1])))
    return tokens, logits


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """The process of `triton_worker`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), triton_worker.start, (INTERPRETED,)) as pool:
        yield pool


RUNS: list[Any] = [
    (name, executor) for name in dict.fromkeys(OPERATIONS.values()) for executor in ("numba", "triton", "onnx")
]
RUNS += [
    pytest.param(name, executor, marks=pytest.mark.exhaustive)
    for name in (*PLAIN, *ROUTED)
    if name not in OPERATIONS.values()
    for executor in (("numba", "triton", "onnx") if name in ("gemma2", "qwen3.5", "gemma4") else ("triton",))
]


@pytest.mark.parametrize(("name", "executor"), RUNS)
def test_executors_run_or_refuse_every_operation(
    name: str, executor: str, bundles: Bundles, interpreter: ProcessPoolExecutor
) -> None:
    """triton_decoder_cases.py compares all families with the plain decoder."""
    if executor == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    folder, theirs = bundles.bundle(name, "uniform"), bundles.answer(name, "uniform")
    lacking = block_ops.not_yet(Bundle.open(folder).config, executor)
    if lacking is not None:
        if executor == "triton":
            from wisparse.runtime.cuda.decoder import CudaDecoder

            assert CudaDecoder.refusal(Bundle.open(folder).config, "native") == f"it does not run {lacking} yet"
            return
        refuse = numba_answer if executor == "numba" else onnx_answer
        with pytest.raises(WisparseError, match=f"(does not run|found) {lacking}.* yet"):
            refuse(folder, theirs.prompt.tolist(), 1)
        return
    prompt = theirs.prompt.tolist()
    if executor == "triton":
        tokens, logits = interpreter.submit(triton_worker.answer, str(folder), prompt, TRITON_COUNT).result()
    else:
        answer = numba_answer if executor == "numba" else onnx_answer
        tokens, logits = answer(folder, prompt, TRITON_COUNT)
    assert len(tokens) == TRITON_COUNT
    assert_answers(theirs, executor, tokens, torch.tensor(logits))


PAGE = Path(__file__).resolve().parent.parent / "docs" / "bring-your-own-architecture.md"


def test_the_row_in_the_page_makes_an_unknown_model_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, table = PAGE.read_text("utf-8"), architectures.ARCHITECTURES
    row, variant = re.findall(r"^ *```python\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)
    ((model_type, facts),) = eval(f"{{{row}}}", vars(architectures)).items()
    ((name, settings),) = eval(f"{{{variant}}}", vars(runtime_models)).items()
    assert (table[model_type], runtime_models.VARIANTS[name]) == (facts, settings), "the page shows what is there"
    message = re.search(r"^wisparse: (.*)$", page, re.MULTILINE)
    unknown = re.search(r"model_type '(\w+)'", message[1])
    with pytest.raises(UnsupportedModelError) as refused:
        architectures.require_known({"model_type": unknown[1]})
    assert str(refused.value) == message[1]
    source = runtime_models.make_checkpoint(name, tmp_path / "source")
    monkeypatch.delitem(table, model_type)
    with pytest.raises(UnsupportedModelError, match=f"model_type '{model_type}'"):
        Checkpoint.open(source, complete=full_config)
    monkeypatch.setitem(table, model_type, facts)
    folder = make_bundle(source, tmp_path / "bundle")
    bundle = Bundle.open(folder)
    assert bundle.config.attention_softcap == 2.0
    tokens = torch.arange(3, 40)
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=64)
    with torch.inference_mode():
        expected = hugging_face(folder)(tokens[None]).logits[0]
    assert (decoder.logits(tokens, len(tokens)) - expected).abs().max() < 1e-4
