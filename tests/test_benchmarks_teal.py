"""The comparison with TEAL's kernels: a folder that is no checkout, and what the kernels are given, by a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

# As the checkout has it: weights (N, K) with K-major memory, x (1, 1, K), outputs (1, 1, N).
STAND_IN = """
import torch

def splitk_sparse_gemv(x, weight, threshold, sparsity_bin):
    assert x.shape[:2] == (1, 1) and weight.stride(1) > 1 and sparsity_bin == 40
    return torch.where(x.abs() > threshold, x, 0) @ weight.T

def qkv_gemv(x, weight, threshold_q, threshold_k, threshold_v, sparsity_bin, kv_size):
    assert weight.stride(1) > 1
    parts = weight.split([len(weight) - 2 * kv_size, kv_size, kv_size])
    limits = (threshold_q, threshold_k, threshold_v)
    return torch.cat([splitk_sparse_gemv(x, w, t, sparsity_bin) for w, t in zip(parts, limits)], -1)
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("gpu_teal", None)
    import gpu_teal

    return gpu_teal


def test_a_folder_without_the_kernels_is_refused(benchmark, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected a checkout of TEAL, found no .*sparse_gemv\.py"):
        benchmark.load_teal(tmp_path)


@pytest.mark.parametrize("widths", [(24,), (16, 16), (16, 4, 4)])
def test_every_projection_has_its_threshold(benchmark, tmp_path: Path, widths: tuple[int, ...]) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "sparse_gemv.py").write_text(STAND_IN)
    teal = benchmark.load_teal(tmp_path)
    generator = torch.Generator().manual_seed(0)
    weight_t = torch.randn(10, sum(widths), generator=generator)
    x = torch.randn(10, generator=generator)
    thresholds = [0.3, 0.6, 0.9][: len(widths)]
    found = benchmark.teal_launch(teal, weight_t, widths, x, thresholds, 0.4)()
    parts = weight_t.split(list(widths), dim=1)
    expected = [torch.where(x.abs() > t, x, 0) @ part for t, part in zip(thresholds, parts, strict=True)]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))
