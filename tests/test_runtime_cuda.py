"""Bundles on an NVIDIA GPU through the public interface, against the plain PyTorch decoder on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle
from quantised_models import PUBLISHED, quantise_model
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.formats.weight_types import round_weight
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.model import Generation, Model
from wisparse.runtime.tokenizer import Tokenizer
from wisparse.runtime.torch.decoder import TorchDecoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

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
    """By the plain decoder in float64."""
    opened = Bundle.open(bundle)
    decoder = make_decoder(
        opened, device=torch.device(device), dtype=torch.float64, max_seq_len=256, backend="torch", max_batch=max_batch
    )
    with Model(opened, decoder, Tokenizer.from_bundle(opened)) as model:
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


def greedy_rows(decoder: Decoder, rows: int) -> list[list[int]]:
    """25 tokens of each of some prompts, side by side."""
    last = torch.stack([decoder.prefill(slot, torch.arange(9) * 7 + slot, 4).argmax() for slot in range(rows)])
    tokens = [last.tolist()]
    for _ in range(24):
        last = decoder.step(last, [SamplingParams()] * rows)
        tokens.append(last.tolist())
    return tokens


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_of_weights_rounded_at_load_are_the_plain_decoders(weights: str, tied: bool, tmp_path: Path) -> None:
    """Alone and in rows, sparse and dense; the plain decoder has the same rounded weights, float32 activations here and
    there. A tied output layer is rounded, the embedding is not: its logits are compared as far as tokens go."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "max_position_embeddings": 64}
    model = write_tiny_model(tmp_path / "model", tiny_config("qwen2", tie_word_embeddings=tied, **sizes))
    opened = Bundle.open(write_tiny_bundle(tmp_path / "bundle", model))
    from triton_weights_cases import rounded

    from wisparse.runtime.cuda.decoder import CudaDecoder

    settings = {"device": torch.device("cuda"), "max_seq_len": 64}
    fast = CudaDecoder(opened, dtype=torch.float32, max_batch=2, weights=weights, **settings)
    slow = TorchDecoder(rounded(opened, weights), dtype=torch.float64, max_batch=2, **settings)
    if tied:
        head = round_weight(opened.checkpoint.tensor("model.embed_tokens.weight").float(), "int8")
        slow._head = head.dequantise(torch.float32).to("cuda", torch.float64)
    for sparsity in (opened.sparsity, 0.0):
        for decoder in (fast, slow):
            decoder.set_masks(opened.at(sparsity).masks)
        assert greedy_rows(fast, 2) == greedy_rows(slow, 2)


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_a_bundles_codes_decode_as_the_plain_decoder_widens_them(scheme: str, tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", tiny_config(tie_word_embeddings=False))
    source = quantise_model(plain, tmp_path / "source", *PUBLISHED[scheme]())
    opened = Bundle.open(write_tiny_bundle(tmp_path / "bundle", source))
    from wisparse.runtime.cuda.decoder import CudaDecoder

    settings = {"device": torch.device("cuda"), "max_seq_len": 64}
    fast, slow = (
        CudaDecoder(opened, dtype=torch.float32, **settings),
        TorchDecoder(opened, dtype=torch.float64, **settings),
    )
    assert greedy_rows(fast, 1) == greedy_rows(slow, 1)


def test_loading_codes_takes_their_memory_and_one_tensor_more(tmp_path: Path) -> None:
    config = tiny_config(
        "qwen2", tie_word_embeddings=False, hidden_size=1024, intermediate_size=4096, head_dim=256,
        num_hidden_layers=8, max_position_embeddings=64, dtype="bfloat16",
    )  # fmt: skip
    model = write_tiny_model(tmp_path / "model", config, dtype=torch.bfloat16)
    opened = Bundle.open(write_tiny_bundle(tmp_path / "bundle", model))
    from wisparse.runtime.cuda.weights import load_weights

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = load_weights(opened, torch.device("cuda"), torch.bfloat16, "int4")
    peak = torch.cuda.max_memory_allocated() - before
    largest = 2 * 1024 * 4096
    assert weights.num_bytes < 0.4 * opened.checkpoint.nbytes
    # The room for widening is one projection's; rounding works on pieces of at most that.
    assert peak < weights.num_bytes + 20 * largest


def test_the_sparsity_counted_is_the_plain_decoders(bundle: Path) -> None:
    fast = answers(bundle, "float32", measure_sparsity=True)[0]
    slow = plain_answers(bundle, measure_sparsity=True)[0]
    # Of all scores a share of about 2**-19 lies where float32's rounding may decide.
    assert fast.realised_sparsity == pytest.approx(slow.realised_sparsity, abs=2**-18)
