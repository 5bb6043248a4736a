"""Keys and values stored in 8 bits: the codes, the back ends' agreement, what it costs and what it saves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bundle_maker import cpu_decoder, small_chunks
from bundle_maker import run as finish

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.formats.weight_types import KV_CACHE_DTYPES
from wisparse.runtime.decoding.cache import KVCache, bytes_per_position, quantise, state_bytes
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler

CODED = [kind for kind in KV_CACHE_DTYPES if kind != "auto"]


@pytest.mark.parametrize("stored", CODED)
def test_codes_are_the_nearest(stored: str) -> None:
    x = torch.randn(50, 3, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 30, 50)[:, None, None]
    x[3] = 0
    codes, scales = quantise(x, stored)
    numbers, steps = codes.float() * scales[..., None], scales[..., None]
    if stored == "fp8":  # three bits behind the first, down to 2**-9
        steps = steps * torch.exp2((x / steps.clamp(min=1e-38)).abs().clamp(min=2**-6).log2().floor() - 3)
    assert ((numbers - x).abs() <= steps * 0.5001).all()
    assert not numbers[3].any()
    assert (quantise(x.double(), stored)[0].float() == codes.float()).all()


@pytest.mark.parametrize(("variant", "stored"), [("gemma3", "int8"), ("gemma4", "fp8"), ("qwen3.5", "int8")])
def test_back_ends_store_and_read_the_same(variant_bundle: Callable[[str], Path], variant: str, stored: str) -> None:
    """Prompts are read by torch, and short ones by the step; a window of 7 is crossed. Recurrent states stay as they are."""
    bundle = Bundle.open(variant_bundle(variant)).at(0)
    settings = {"max_seq_len": 64, "max_batch": 2, "kv_cache_dtype": stored}
    plain, fast = (cpu_decoder(bundle, backend, **settings) for backend in ("torch", "numba"))
    for length, slot in ((40, 0), (5, 1)):
        prompt = torch.arange(length) * 7 % 101
        expected, found = (decoder.prefill(slot, prompt, length).clone() for decoder in (plain, fast))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    tokens = torch.tensor([3, 4])
    for _ in range(12):
        expected, found = (decoder.decode(tokens).clone() for decoder in (plain, fast))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        tokens = expected.argmax(-1)
    for index, ours in fast._cache.attention.items():
        for own, other in zip(ours[:2], plain._cache.attention[index][:2], strict=True):
            same = own[0, :, :52].float() == other[0, :, :52].float()
            assert same.float().mean() > 0.999  # but for numbers that lie between two codes
    assert all(state.state.dtype == torch.float32 for state in fast._cache.recurrent.values())


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("stored", CODED)
def test_tokens_depend_on_no_neighbour(variant_bundle: Callable[[str], Path], backend: str, stored: str) -> None:
    bundle, prompts = (
        Bundle.open(variant_bundle("llama")),
        [list(range(3, 30)), [*range(3, 20), 50, 51], list(range(40, 45))],
    )
    together = Scheduler(small_chunks(bundle, backend, max_batch=3, kv_cache_dtype=stored))
    requests = [together.add(Request(prompt, 12)) for prompt in prompts]
    finish(together)
    assert requests[1].cached_tokens in (0, 16)
    for prompt, request in zip(prompts, requests, strict=True):
        alone = finish(Scheduler(small_chunks(bundle, backend, kv_cache_dtype=stored)), Request(prompt, 12))
        assert request.output_token_ids == alone.output_token_ids


@pytest.mark.parametrize(("stored", "most"), [("int8", 0.001), ("fp8", 0.015)])
def test_the_loss_is_small(bundle: Path, stored: str, most: float, stdlib_files: dict[str, list[Path]]) -> None:
    """KL of the example model on code that it was not trained on; int8 costs less than fp8 at the same size."""
    text, found = stdlib_files["evaluation"][0].read_text(), []
    for kind in ("auto", stored):
        with wisparse.load(bundle, sparsity=0, dtype="float32", max_seq_len=512, kv_cache_dtype=kind) as model:
            ids = torch.tensor(model.tokenizer.encode(text)[:512])
            found.append(model.decoder.logits(ids, len(ids)).log_softmax(-1))
    kl = (found[0].exp() * (found[0] - found[1])).sum(-1).mean()
    assert 0 < kl < most


def test_bytes_are_counted(variant_bundle: Callable[[str], Path]) -> None:
    config = Bundle.open(variant_bundle("gemma4")).config
    for kind in KV_CACHE_DTYPES:
        cache = KVCache(config, 2, 10, torch.device("cpu"), torch.bfloat16, kind)
        tensors = [tensor for stored in cache.attention.values() for tensor in stored if tensor is not None]
        assert sum(tensor.nbytes for tensor in tensors) == 20 * bytes_per_position(config, torch.bfloat16, kind)
    config = Bundle.open(variant_bundle("qwen3.5")).config
    states = KVCache(config, 2, 10, torch.device("cpu"), torch.bfloat16, buffers=5).recurrent.values()
    each = state_bytes(config, torch.bfloat16)
    assert sum(tensor.nbytes for state in states for tensor in vars(state).values()) == 2 * 5 * each > 0
