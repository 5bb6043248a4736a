"""ONNX exports give our runtime's tokens in onnxruntime-genai and in optimum-onnx.

These have an environment of their own, named by WISPARSE_ONNX_PEERS_PYTHON; ``.ci/run`` makes one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle
from runtime_models import FAMILIES, make_checkpoint

from wisparse.formats.bundle import Bundle
from wisparse.runtime.torch.decoder import TorchDecoder

pytest.importorskip("onnx", reason="needs the onnx extra")

from wisparse.commands.export_onnx import rotary_tables
from wisparse.formats.onnx.export import export_onnx

pytestmark = pytest.mark.exhaustive  # needs another environment

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
# Heads of another size than hidden_size / num_attention_heads and a window among them. Not ministral3 and Gemma 4:
# optimum-onnx's transformers knows neither.
VARIANTS = (
    *("llama-tied", "llama-head-dim", "mistral-window", "qwen2", "qwen3", "phi3-partial"),
    *(name for name in FAMILIES if name not in ("ministral3", "gemma4")),
)
PROMPTS = [[5, 17, 60, 4, 33, 8, 90, 21, 7, 12, 54], [44, 3, 71, 18], [9]]


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has both."""
    found = os.environ.get("WISPARSE_ONNX_PEERS_PYTHON")
    if not found:
        pytest.skip(
            "needs onnxruntime-genai and optimum-onnx in an environment of their own: python -m venv onnx-peers && "
            "onnx-peers/bin/pip install -r benchmarks/onnx_peers.txt && "
            "export WISPARSE_ONNX_PEERS_PYTHON=$PWD/onnx-peers/bin/python"
        )
    return found


def write_tokens(bundle: Bundle, file: Path, count: int) -> None:
    """What our plain decoder answers in float32, as ``onnx_peers.py`` reads it."""
    answers = []
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=64)
    for prompt in PROMPTS:
        tokens = [int(decoder.prefill(0, torch.tensor(prompt), len(prompt)).argmax())]
        while len(tokens) < count:
            tokens.append(int(decoder.decode(torch.tensor(tokens[-1:]))[0].argmax()))
        answers.append(tokens)
    file.write_text(json.dumps({"prompts": PROMPTS, "answers": answers}))


def compare(python: str, *arguments: Path) -> tuple[int, list[dict[str, object]], str]:
    command = [python, str(BENCHMARKS / "onnx_peers.py"), *map(str, arguments)]
    # Not ours: what surrounds this test has another transformers.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, reports, done.stderr


def test_tokens_of_our_runtime(python: str, example_model: Path, tmp_path: Path) -> None:
    arguments = []
    for name in (*VARIANTS, example_model.name):
        source = example_model if name == example_model.name else make_checkpoint(name, tmp_path / name / "source")
        bundle = Bundle.open(make_bundle(source, tmp_path / name / "bundle"))
        export_onnx(bundle, tmp_path / name / "onnx", rotary_tables(bundle.config))
        write_tokens(bundle, tmp_path / name / "tokens.json", 24)
        arguments += [tmp_path / name / "onnx", tmp_path / name / "tokens.json"]
    code, reports, stderr = compare(python, *arguments)
    assert len(reports) == len(VARIANTS) + 1, stderr[-3000:]
    for name, report in zip((*VARIANTS, example_model.name), reports, strict=True):
        assert (report["optimum_onnx"], report["onnxruntime_genai"]) == (True, True), name
    assert code == 0

    # And it would see another model: the same weights, the masks of a sparser one.
    sparser = Bundle.open(make_bundle(example_model, tmp_path / "sparser", 0.6))
    export_onnx(sparser, tmp_path / "wrong", rotary_tables(sparser.config))
    code, (report,), _ = compare(python, tmp_path / "wrong", arguments[-1])
    assert code == 1
    assert (report["optimum_onnx"], report["onnxruntime_genai"]) == (False, False)
