"""Bundles on an NVIDIA GPU through the public interface, against the plain PyTorch decoder on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.model import Generation, Model
from wisparse.runtime.text.edge import Text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = ["def add(a, b):\n", "class Stack:\n    def push(", "import os\n\n\nfor name in"]


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("gpu") / "bundle")


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def answers(bundle: Path, dtype: str, max_batch: int = 1, **settings: object) -> list[Generation]:
    with wisparse.load(bundle, device="cuda", backend="triton", dtype=dtype, max_batch=max_batch) as model:
        assert model.decoder.name == "triton"
        return model.generate(PROMPTS, max_new_tokens=64, **settings)


def plain_answers(bundle: Path, max_batch: int = 1, device: str = "cuda", **settings: object) -> list[Generation]:
    """By the plain decoder in float64, as float32 weights are decoded in float64 here."""
    opened = Bundle.open(bundle)
    decoder = make_decoder(
        opened, device=torch.device(device), dtype=torch.float64, max_seq_len=256, backend="torch", max_batch=max_batch
    )
    with Model(opened, decoder, Text.from_bundle(opened)) as model:
        return model.generate(PROMPTS, max_new_tokens=64, **settings)


@pytest.mark.parametrize("prefill", ["dense", "half", "all"])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_greedy_tokens_in_float32_are_the_plain_decoders(bundle: Path, prefill: str, max_batch: int) -> None:
    fast = answers(bundle, "float32", max_batch, prefill=prefill)
    slow = plain_answers(bundle, max_batch, prefill=prefill)
    assert [one.token_ids for one in fast] == [one.token_ids for one in slow]
    assert [one.text for one in fast] == [one.text for one in slow]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 7}])
def test_two_runs_are_the_same(bundle: Path, dtype: str, settings: dict[str, object]) -> None:
    first, second = (answers(bundle, dtype, **settings) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]


def test_sampled_tokens_in_float32_are_the_plain_decoders(bundle: Path) -> None:
    settings = {"temperature": 0.7, "top_p": 0.95, "seed": 3}
    fast, slow = answers(bundle, "float32", **settings), plain_answers(bundle, **settings)
    assert [one.token_ids for one in fast] == [one.token_ids for one in slow]


def test_the_sparsity_counted_is_the_plain_decoders(bundle: Path) -> None:
    fast = answers(bundle, "float32", measure_sparsity=True)[0]
    slow = plain_answers(bundle, measure_sparsity=True)[0]
    assert fast.realised_sparsity == pytest.approx(slow.realised_sparsity, abs=1e-9)
