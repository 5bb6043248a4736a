"""Keys and values: those stored in 8 bits, and the pages that slots take and give back."""

import ctypes
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import cpu_decoder, scarce, small_chunks, tokens_of
from bundle_maker import run as finish

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ContextLengthError, ResourceError
from wisparse.formats.weight_types import KV_CACHE_DTYPES
from wisparse.runtime.cuda import pages
from wisparse.runtime.decoding.cache import KVCache, quantise
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.memory import bytes_per_position, mapped_bytes, state_bytes

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
    for index, ours in fast.cache.attention.items():
        for own, other in zip(ours[:2], plain.cache.attention[index][:2], strict=True):
            same = own[0, :, :52].float() == other[0, :, :52].float()
            assert same.float().mean() > 0.999  # but for numbers that lie between two codes
    assert all(state.state.dtype == torch.float32 for state in fast.cache.recurrent.values())


@pytest.mark.parametrize(("stored", "most"), [("int8", 0.001), ("fp8", 0.015)])
def test_the_loss_is_small(bundle: Path, stored: str, most: float, stdlib_file: Path) -> None:
    """KL of the example model on code that it was not trained on; int8 costs less than fp8 at the same size."""
    text, found = stdlib_file.read_text(), []
    for kind in ("auto", stored):
        with wisparse.load(bundle, sparsity=0, dtype="float32", max_seq_len=512, kv_cache_dtype=kind) as model:
            ids = torch.tensor(model.tokenizer.encode(text)[:512])
            found.append(model.decoder.logits(ids, len(ids)).log_softmax(-1))
    kl = (found[0].exp() * (found[0] - found[1])).sum(-1).mean()
    assert 0 < kl < most


def test_bytes_are_counted(variant_bundle: Callable[[str], Path]) -> None:
    for name, kind in itertools.product(("gemma4", "glm4-moe-lite"), KV_CACHE_DTYPES):
        config = Bundle.open(variant_bundle(name)).config
        cache = KVCache(config, 2, 10, torch.device("cpu"), torch.bfloat16, kind)
        tensors = {x.data_ptr(): x for stored in cache.attention.values() for x in stored if x is not None}.values()
        assert len(tensors) == len(cache.attention) * (1 if name == "glm4-moe-lite" else 2) * (1 + (kind != "auto"))
        assert sum(tensor.nbytes for tensor in tensors) == 20 * bytes_per_position(config, torch.bfloat16, kind)
    config = Bundle.open(variant_bundle("qwen3.5")).config
    states = KVCache(config, 2, 10, torch.device("cpu"), torch.bfloat16, buffers=5).recurrent.values()
    each = state_bytes(config, torch.bfloat16)
    assert sum(tensor.nbytes for state in states for tensor in vars(state).values()) == 2 * 5 * each > 0


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_the_queue_waits_in_order_for_memory(
    variant_bundle: Callable[[str], Path], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight pages of eight positions in each block. Who ends, or is cancelled, gives memory back; idle prefixes do."""
    scheduler = Scheduler(scarce(Bundle.open(variant_bundle("llama")), backend, monkeypatch))
    with pytest.raises(ContextLengthError, match="the prompt has 65 tokens and the context holds 64"):
        scheduler.validate(Request(tokens_of(65), 1))
    first, large, small = (scheduler.add(Request(tokens_of(size, size), 9)) for size in (30, 40, 5))
    for _ in range(8):
        generate_step(scheduler)
    assert scheduler.slots == [first, None, None]  # the small one does not overtake the one that has no room
    assert (list(scheduler.waiting), scheduler.cache_usage) == ([large, small], 5 / 8)
    scheduler.finish(first, "cancelled")
    generate_step(scheduler)
    assert large in scheduler.slots
    finish(scheduler)
    assert large.first_token_time < small.first_token_time
    assert (scheduler.cache_usage, scheduler.stats.preemptions) == (0, 0)
    assert finish(scheduler, Request(tokens_of(63), 2)).cached_tokens == 0  # it has what all others held
    assert finish(scheduler, Request(tokens_of(40, 40), 9)).output_token_ids == large.output_token_ids


@pytest.mark.parametrize(("variant", "backend"), [("llama", "torch"), ("llama", "numba"), ("glm4-moe-lite", "numba")])
def test_the_youngest_makes_room(
    variant_bundle: Callable[[str], Path], variant: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has decoded is decoded again: in half precision a prompt's products have other bits."""
    bundle, half = Bundle.open(variant_bundle(variant)), {"dtype": torch.bfloat16}
    monkeypatch.setattr("wisparse.runtime.cpu.decoder.CpuDecoder.chunks_split_under_load", 1)  # of a chunk of 8
    scheduler = Scheduler(scarce(bundle, backend, monkeypatch, **half))
    requests = [scheduler.add(Request(tokens_of(20, seed), 40)) for seed in range(3)]
    ended = []
    while scheduler.busy:
        ended += [request for request in generate_step(scheduler) if request.finish_reason is not None]
    assert ended == requests
    assert scheduler.stats.preemptions >= 2
    for request in requests:
        alone = finish(Scheduler(small_chunks(bundle, backend, **half)), Request(request.prompt_token_ids, 40))
        assert request.output_token_ids == alone.output_token_ids


def test_memory_for_the_cache_is_checked(variant_bundle: Callable[[str], Path]) -> None:
    with pytest.raises(ResourceError, match="kv_cache_memory_bytes: 1,000 bytes hold 0 positions of one sequence"):
        wisparse.load(variant_bundle("llama"), kv_cache_memory_bytes=1000)
    with wisparse.load(variant_bundle("llama"), max_batch=None, kv_cache_memory_bytes=1 << 20) as model:
        cache = model.decoder.cache
        assert cache.pages * cache.paging.page_bytes <= 1 << 20
        assert cache.paging.positions(cache.pages, 1000) >= model.max_seq_len == 256


class FakeDriver:
    """The functions of libcuda.so.1 over so many pages; each address is mapped once, each page in one place."""

    def __init__(self, left: int) -> None:
        self.left, self.reserved = left, 0
        self.mapped: dict[int, int] = {}
        self.existing: set[int] = set()

    def cuMemGetAllocationGranularity(self, size: Any, *_: Any) -> int:
        size.contents.value = 2 << 20
        return 0

    def cuMemAddressReserve(self, address: Any, size: Any, *_: Any) -> int:
        address.contents.value, self.reserved = 1 << 40, size.value
        return 0

    def cuMemCreate(self, handle: Any, *_: Any) -> int:
        if len(self.existing) == self.left:
            return 2
        handle.contents.value = 1 + max(self.existing, default=0)
        self.existing.add(handle.contents.value)
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert (1 << 40) <= address.value < (1 << 40) + self.reserved
        assert address.value not in self.mapped
        assert handle.value in self.existing - set(self.mapped.values())
        self.mapped[address.value] = handle.value
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, *_: Any) -> int:
        assert all(at in self.mapped for at in range(address.value, address.value + size.value, 2 << 20))
        return 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        del self.mapped[address.value]
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.existing.remove(handle.value)
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        self.reserved -= size.value
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name.contents.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.mark.parametrize("left", [100, 20])
def test_pages_of_a_gpu_are_where_they_are_counted(
    variant_bundle: Callable[[str], Path], left: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``left``: pages that the device has; the cache thinks of 25. In the end all are free."""
    driver, device = FakeDriver(left), torch.device("cuda", 0)
    monkeypatch.setattr(pages, "load_driver", lambda: driver)
    monkeypatch.setattr(pages.ctypes, "byref", ctypes.pointer)  # what it points at can be written
    for name in ("init", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)

    class Faked(pages.CudaPages):
        def tensor(self) -> torch.Tensor:
            return torch.empty(self._size.value, dtype=torch.uint8)

    config = Bundle.open(variant_bundle("gemma4")).config  # whose blocks differ in the bytes of a position
    cache = KVCache(config, 4, 40000, device, torch.float32, memory=Faked, pages=25)
    keys = cache.attention[0].keys
    assert keys.stride(0) * 4 % (2 << 20) == 0
    dice, refused = random.Random(0), 0
    for _ in range(300):
        slot, positions = dice.randrange(4), dice.randrange(1, 40001)
        fits = cache.missing_pages(slot, positions) <= 0
        if dice.random() < 0.3:
            cache.release(slot)
        elif dice.random() < 0.3:
            assert cache.claim(slot, positions) == fits
        elif cache.grow(slot, positions):
            assert fits
            assert cache.held[slot] >= positions
        else:
            refused += fits
        assert len(driver.mapped) <= sum(cache.taken) == cache.pages - cache.free
        assert len(driver.existing) <= cache.pages
        for size, (first, span, _) in zip(cache.paging.sizes, cache._regions, strict=True):
            for number, held in enumerate(cache.held):
                begin = (1 << 40) + first + number * span
                assert all(at in driver.mapped for at in range(begin, begin + held * size, 2 << 20))
    assert (refused > 0, cache.pages) == ((True, 20) if left == 20 else (False, 25))
    assert ("the KV cache is limited" in caplog.text) == (left == 20)
    monkeypatch.setattr(driver, "cuMemMap", lambda *_: 1)
    for slot in range(4):
        cache.release(slot)
    with pytest.raises(ResourceError, match="cuMemMap failed: CUDA_ERROR_INVALID_VALUE"):
        cache.grow(0, 40000)
    for _ in range(2):
        cache.close()
    assert (driver.mapped, driver.existing, driver.reserved, mapped_bytes[device]) == ({}, set(), 0, 0)
