"""The mask's definition and its edges, and the choice of a back end."""

import importlib.util
import math
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wisparse.kernels.backend import ForkedCompilations, choose_backend, compiling_side_by_side
from wisparse.kernels.reference import keep_mask, scores, sparse_linear

CPU = torch.device("cpu")


def test_the_fastest_that_can_is_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(CPU, torch.bfloat16) == ("numba", "the fastest for cpu")
    assert choose_backend(CPU, torch.float32, "torch") == ("torch", "asked for")
    name, reason = choose_backend(CPU, torch.float64)
    assert (name, "float64" in reason) == ("torch", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend(CPU, torch.float32) == ("torch", "numba cannot: the package numba is not installed")


@pytest.mark.parametrize(("hip", "capability", "reason"), [(None, (7, 5), "7.5"), ("7.0", (9, 4), "NVIDIA")])
def test_an_old_gpu_and_another_makers_fall_back(hip, capability, reason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    name, why = choose_backend(torch.device("cuda", 0), torch.float16)
    assert (name, reason in why) == ("torch", True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_cudnn_that_cannot_attend_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from wisparse.kernels.gpu import cudnn
    from wisparse.kernels.gpu.attention import AttentionShape
    from wisparse.kernels.gpu.kv_cache import kv_slots
    from wisparse.kernels.gpu.tiles import Gpu

    shape, memory = AttentionShape(8, 2, 64, rotary=64), torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    cache = kv_slots(memory, memory)
    assert not cudnn.cudnn_attends(cache, shape)  # no GPU of its generations

    def attend(*given: object) -> None:
        raise RuntimeError("no plan for this graph\nmore")

    monkeypatch.setattr(cudnn, "gpu_of", lambda device: Gpu(90, 132))
    monkeypatch.setattr(cudnn, "attend_by_cudnn", attend)
    for supported in (False, True):
        cudnn.supports.cache_clear()
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda of: supported)  # noqa: B023
        assert not cudnn.cudnn_attends(cache, shape)
        assert (
            caplog.messages
            == ["prompts are read without cuDNN, which cannot attend: no plan for this graph"] * supported
        )
    monkeypatch.setattr(cudnn, "attend_by_cudnn", lambda *given: None)
    cudnn.supports.cache_clear()
    assert cudnn.cudnn_attends(cache, shape)
    for other in ({"window": 128}, {"softcap": 30.0}, {"d": 256}):
        assert not cudnn.cudnn_attends(
            cache, AttentionShape(**{"heads": 8, "kv_heads": 2, "d": 64, "rotary": 64, **other})
        )
    cudnn.supports.cache_clear()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_side_by_side_kernels_are_compiled_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import JITFunction
    from triton.runtime._async_compile import active_mode

    from wisparse.kernels.gpu.packed_gemv import subnormal_kernel

    seen: list[tuple[object, ...]] = []

    def run(self: object, *given: object, **options: object) -> None:
        seen.append((self, *given, options, active_mode.get() is not None))

    monkeypatch.setattr(JITFunction, "run", run)
    with compiling_side_by_side():
        JITFunction.run("kernel", 7, grid=(1,), warmup=False, num_warps=4)
        # What it finds decides whether quantised weights are multiplied on the tensor cores.
        JITFunction.run(subnormal_kernel, grid=(1,), warmup=False)
    assert seen == [
        ("kernel", 7, {"grid": (1,), "warmup": True, "num_warps": 4}, True),
        (subnormal_kernel, {"grid": (1,), "warmup": False}, False),
    ]
    assert JITFunction.run is run


def test_compilations_run_in_processes_and_stay_found_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compile_one(index: int) -> int:
        with open(tmp_path / str(index), "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} ")
        time.sleep(0.05)
        return index // (index - 5)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    pool = ForkedCompilations()
    futures = [pool.submit(partial(compile_one, index)) for index in range(6)]
    pool.run()
    assert [future.result() for future in futures[:5]] == [index // (index - 5) for index in range(5)]
    with pytest.raises(ZeroDivisionError):
        futures[5].result()
    seen = [set(map(int, (tmp_path / str(index)).read_text("utf-8").split())) for index in range(6)]
    assert all(os.getpid() in one for one in seen)
    assert len(set.union(*seen)) == 2


_sizes = st.integers(1, 40)


@given(k=_sizes, n=_sizes, quantile=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_equals_a_product_over_the_kept_channels(k: int, n: int, quantile: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((k,), (n, k)))
    bias = torch.randn(n, generator=generator, dtype=torch.float64)
    scale = torch.rand(k, generator=generator) + 0.1
    threshold = torch.quantile(scores(x, scale), quantile)
    kept = [i for i in range(k) if abs(x[i].float()) * scale[i] >= threshold]
    expected = bias + sum((x[i] * weight[:, i] for i in kept), torch.zeros(n, dtype=torch.float64))
    torch.testing.assert_close(sparse_linear(x, weight, bias, scale, threshold), expected)


def test_edges_of_the_mask() -> None:
    for x, threshold, kept in (
        ([2.0, -2.0, 1.9], 2.0, [True, True, False]),  # equality keeps
        ([0.0, 0.0], 0.0, [True, True]),
        ([math.nan, 0.1], 1.0, [True, False]),  # NaN is kept
    ):
        assert keep_mask(torch.tensor(x), torch.ones(len(x)), threshold).tolist() == kept
    # inf * 0 is NaN, and a NaN score is kept: the output must say so rather than look plausible.
    y = sparse_linear(torch.tensor([math.inf, 1.0]), torch.ones(2, 2), None, torch.tensor([0.0, 1.0]), 0.5)
    assert not torch.isfinite(y).all()
