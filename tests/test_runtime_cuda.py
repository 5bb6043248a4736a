"""Bundles on an NVIDIA GPU through the public interface, against the plain PyTorch decoder on the same GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle, tokens_of
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.memory import mapped_bytes, paging_of
from wisparse.runtime.model import Generation, Model
from wisparse.runtime.tokenizer import Tokenizer

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
    opened, how = Bundle.open(bundle), {"dtype": torch.float64, "max_seq_len": 256, "max_batch": max_batch}
    decoder = make_decoder(opened, device=torch.device(device), backend="torch", **how)
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


def paged_decoder(opened: Bundle, slots: int, dtype: torch.dtype, stored: str, page: int) -> CudaDecoder:
    """Of eight slots of three pages, in each block, of ``page`` positions, with pages for ``slots`` of them."""
    paging = paging_of(opened.config, dtype, stored, CudaDecoder.page_bytes)
    how = {"device": torch.device("cuda", 0), "dtype": dtype, "max_batch": 8, "kv_cache_dtype": stored}
    decoder = CudaDecoder(opened, max_seq_len=3 * page, pages=slots * paging.pages(3 * page) + paging.least, **how)
    decoder.prepare_prompts()
    decoder.prepare_batches()
    return decoder


@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_scarce_memory_changes_no_token_and_is_given_back(bundle: Path, stored: str) -> None:
    """Requests grow by a page in the middle of an answer, go back to the queue, and take what others had."""
    opened, device, found = Bundle.open(bundle), torch.device("cuda", 0), []
    page = CudaDecoder.page_bytes // paging_of(opened.config, torch.float32, stored, CudaDecoder.page_bytes).sizes[0]
    for slots in (8, 1):
        decoder = paged_decoder(opened, slots, torch.float32, stored, page)
        scheduler, cache = Scheduler(decoder), decoder.cache
        lengths = (page - 5, 2 * page - 3, 7, page - 9, 2 * page - 8, page + 1, 3, page - 1)
        requests = [scheduler.add(Request(tokens_of(one, one), 20)) for one in lengths]
        while scheduler.busy:
            generate_step(scheduler)
            assert cache.free + sum(cache.taken) == cache.pages
            assert mapped_bytes[device] <= cache.pages * cache.paging.page_bytes
        found.append([request.output_token_ids for request in requests])
        assert (scheduler.stats.preemptions > 0) == (slots == 1)
        decoder.close()
        assert mapped_bytes[device] == 0  # counted once the driver has taken them back
    # An answer that is read again as a prompt may have other codes.
    assert found[0] == found[1] or stored == "int8"


def test_pages_move_below_captured_graphs(bundle: Path) -> None:
    """To the bit what memory for all slots gives, in half precision, where prompts are read by graphs too."""
    opened = Bundle.open(bundle)
    page = CudaDecoder.page_bytes // paging_of(opened.config, torch.bfloat16, "auto", CudaDecoder.page_bytes).sizes[0]
    scarce, ample = (paged_decoder(opened, slots, torch.bfloat16, "auto", page) for slots in (1, 8))
    for slot, length in ((0, page - 5), (2, 40), (1, 2 * page - 4), (3, page + 1), (0, 3 * page - 9), (2, page - 1)):
        for other in range(8):
            if other != slot and not scarce.cache.grow(slot, length + 8):
                scarce.cache.release(other)
        prompt, seen = torch.tensor(tokens_of(length, length)), []
        for decoder in (scarce, ample):
            logits = [decoder.prefill(slot, prompt, length).clone()]
            tokens = torch.full((8,), -1)
            tokens[slot] = logits[0].argmax()
            for _ in range(7):
                chosen = decoder.step(tokens, [SamplingParams()] * 8)
                tokens[slot] = chosen[slot]
            logits.append(decoder.decode(tokens)[slot].clone())
            seen.append(torch.stack(logits))
        assert torch.equal(seen[0], seen[1])
    scarce.close(), ample.close()


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
