"""The compiled CPU kernels agree with their definition, whatever the shape, type, number of rows and of threads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from bundle_maker import make_bundle
from cpu_linear import LinearField, quantize, sparse_linear, transpose
from torch import Tensor
from torch.nn import functional

from wisparse.kernels.cpu import compile as cpu_compile
from wisparse.kernels.cpu import intrinsics as cpu_intrinsics
from wisparse.kernels.cpu import layout as cpu_layout
from wisparse.kernels.cpu import matrix as cpu_matrix
from wisparse.kernels.cpu import step as cpu_step
from wisparse.kernels.cpu import threads as cpu_threads
from wisparse.kernels.cpu.layout import StoredAs, aligned_empty
from wisparse.kernels.cpu.matrix import Matrix, empty_int4, pack_int4_into, quantize_into, transpose_into
from wisparse.kernels.reference import from_codes, keep_mask
from wisparse.kernels.reference import sparse_linear as reference

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (N, K): both odd, tiny, around the width of a pass (8 rows) and of a thread's span (32 columns), and larger.
SHAPES = ((1, 1), (5, 7), (33, 8), (31, 9), (64, 17), (97, 130), (352, 256))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Tests may set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def case(n: int, k: int, dtype: torch.dtype, rows: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (rows, K), weight (N, K), bias (N,), channel_scale (K,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    return x, weight, bias, torch.rand(k, generator=generator) + 0.5


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The result in float64, and the most that rounding once per addition in float32 can change it by."""
    masked = torch.where(keep_mask(x, scale, threshold), x, 0.0).double()
    wide = weight.double()
    result = masked @ wide.T + (0 if bias is None else bias.double())
    magnitude = masked.abs() @ wide.abs().T + (0 if bias is None else bias.double().abs())
    return result, magnitude * 2.0**-24 * (x.shape[-1] + 2)


def half_step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of ``dtype`` around a value: what storing it there costs at most."""
    return 0 if dtype == torch.float32 else value.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        for rows in (1, 3):
            for threshold in (0.0, 0.8, 1e9):
                x, weight, bias, scale = case(n, k, dtype, rows)
                y = sparse_linear(x, transpose(weight), bias, scale, threshold)
                assert y.dtype == dtype
                assert y.shape == (rows, n)
                wanted, tolerance = exact(x, weight, bias, scale, threshold)
                error = (y.double() - wanted).abs()
                assert bool((error <= (tolerance + half_step(wanted, dtype)) * 1.001).all()), (n, k, rows, threshold)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_torchs_own(dtype: torch.dtype) -> None:
    x, weight, bias, scale = case(512, 1024, dtype)
    wanted, _ = exact(x, weight, bias, scale, 0.6)
    ours = (sparse_linear(x, transpose(weight), bias, scale, 0.6).double() - wanted).abs()
    torchs = (reference(x, weight, bias, scale, 0.6).double() - wanted).abs()
    assert ours.mean() <= torchs.mean() * 1.001
    assert ours.max() <= torchs.max() * 1.001


def test_same_channels_as_the_definition_at_ties_and_odd_numbers() -> None:
    # One output column per channel shows which channels were used: an Inf that is dropped must not become a NaN.
    infinity, nan = float("inf"), float("nan")
    x = torch.tensor([0.5, -0.5, 0.49999997, 0.0, -0.0, infinity, -infinity, nan, 1e-45, 0.25])
    scale = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    for threshold in (0.5, 0.0, infinity):
        weight = torch.eye(10)
        mine = sparse_linear(x, transpose(weight), None, scale, threshold)
        keep = keep_mask(x, scale, threshold)
        poisoned = bool((keep & ~x.isfinite()).any())  # 0 * Inf of a kept channel reaches every column, as it should
        if not poisoned:
            assert torch.equal(mine, torch.where(keep, x, 0.0))
        for channel in range(10):
            alone = torch.zeros(10, 1)
            alone[channel] = 1.0
            others = x.clone()
            others[torch.arange(10) != channel] = 0.0
            got = sparse_linear(others, transpose(alone.T.contiguous()), None, scale, threshold)
            assert torch.equal(got, torch.where(keep[channel], x[channel], 0.0)[None]) or bool(
                got.isnan() & x[channel].isnan()
            )


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_score_on_the_threshold_is_kept_in_every_row(rows: int) -> None:
    # One output column per channel: what a row drops must come out as 0, what lies on the threshold as itself.
    x = torch.tensor([0.5, -0.5, 0.49999997, 0.25, 1.0]).repeat(rows, 1)
    x[0, 0] = 0.75  # in one row above it, in the others on it
    scale = torch.tensor([1.0, 1.0, 1.0, 2.0, 0.5])
    mine = sparse_linear(x, transpose(torch.eye(5)), None, scale, 0.5)
    assert torch.equal(mine, torch.where(keep_mask(x, scale, 0.5), x, 0.0))
    assert mine[:, 1:].tolist() == [[-0.5, 0.0, 0.25, 1.0]] * rows


def test_a_weight_of_a_dropped_channel_is_not_read() -> None:
    x, weight, bias, scale = case(40, 24, torch.float32)
    keep = keep_mask(x[0], scale, 0.7)
    poisoned = torch.where(keep, weight, float("nan"))
    assert torch.equal(
        sparse_linear(x, transpose(poisoned), bias, scale, 0.7), sparse_linear(x, transpose(weight), bias, scale, 0.7)
    )


def test_bits_do_not_depend_on_threads_nor_on_other_rows() -> None:
    x, weight, bias, scale = case(200, 150, torch.bfloat16, rows=4)
    weight_t = transpose(weight)
    alone = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        together = sparse_linear(x, weight_t, bias, scale, 0.7)
        alone.append(torch.stack([sparse_linear(row, weight_t, bias, scale, 0.7) for row in x]))
        assert torch.equal(together, alone[-1])
    assert all(torch.equal(one, alone[0]) for one in alone)


def test_leaves_torchs_thread_count_alone() -> None:
    x, weight, bias, scale = case(64, 64, torch.float32)
    torch.set_num_threads(3)
    sparse_linear(x, transpose(weight), bias, scale, 0.5)
    assert torch.get_num_threads() == 3
    assert cpu_threads.team_size() == 3  # which is where ours come from


def test_without_masks_bias_rows_or_channels() -> None:
    x, weight, bias, scale = case(20, 10, torch.float32)
    weight_t = transpose(weight)
    torch.testing.assert_close(sparse_linear(x, weight_t, None, None, 0.0), x @ weight.T)
    assert sparse_linear(x[0], weight_t, None, scale, 0.5).shape == (20,)
    assert sparse_linear(x[:0], weight_t, None, scale, 0.5).shape == (0, 20)
    assert torch.equal(sparse_linear(x, weight_t, bias, scale, 1e9), bias[None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(9)}, "x: expected"),
        ({"bias": torch.zeros(21)}, "bias: expected"),
        ({"channel_scale": torch.zeros(11)}, "channel_scale: expected"),
        ({"weight_t": torch.zeros(20, 10).t()}, "contiguous"),
        ({"column_scale": torch.zeros(20)}, "int8"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(10), "weight_t": torch.zeros(10, 20), "bias": None, "channel_scale": torch.ones(10)}
    with pytest.raises(ValueError, match=message):
        sparse_linear(**(arguments | change), threshold=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float64"):
        transpose(torch.zeros(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposes_whole_and_in_pieces(dtype: torch.dtype) -> None:
    for n, k in ((1, 1), (3, 200), (130, 65), (64, 64), (257, 31)):
        weight = torch.randn(n, k).to(dtype)
        assert torch.equal(transpose(weight), weight.T)
        target = aligned_empty((k, n), dtype).fill_(float("nan"))
        for first in range(0, n, 50):
            transpose_into(weight[first : first + 50], target, first)
        assert torch.equal(target, weight.T)
    with pytest.raises(ValueError, match="do not fit"):
        transpose_into(weight, target, 1)


def test_large_memory_is_aligned_and_writable() -> None:
    for shape in ((3, 5), (1024, 1536)):
        memory = aligned_empty(shape, torch.float32)
        assert memory.shape == shape
        assert memory.data_ptr() % 64 == 0
        assert float(memory.fill_(2.0).sum()) == 2.0 * memory.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rounds_to_nearest_per_output_channel(dtype: torch.dtype) -> None:
    weight = torch.randn(100, 77).to(dtype)
    weight[3] = 0.0
    stored, scale = quantize(weight, transposed=False)
    assert torch.equal(stored.abs().amax(1).int(), torch.where(torch.arange(100) == 3, 0, 127).int())
    torch.testing.assert_close(scale[scale != 1.0], (weight.float().abs().amax(1) / 127)[scale != 1.0])
    error = (stored.double() * scale[:, None].double() - weight.double()).abs()
    assert bool((error <= scale[:, None].double() * 0.5001).all())
    stored_t, scale_t = quantize(weight)
    assert torch.equal(stored_t, stored.T)
    assert torch.equal(scale_t, scale)
    pieces, piece_scale = torch.empty_like(stored_t), torch.empty_like(scale)
    for first in range(0, 100, 32):
        quantize_into(weight[first : first + 32], pieces, piece_scale, first, transposed=True)
    assert torch.equal(pieces, stored_t)
    assert torch.equal(piece_scale, scale)


def test_int8_product_is_that_of_the_rounded_weight() -> None:
    x, weight, bias, scale = case(97, 130, torch.float32, rows=2)
    stored, column_scale = quantize(weight)
    rounded = stored.T.float() * column_scale[:, None]
    wanted, tolerance = exact(x, rounded, bias, scale, 0.6)
    y = sparse_linear(x, stored, bias, scale, 0.6, column_scale=column_scale)
    assert bool(((y.double() - wanted).abs() <= 2 * tolerance).all())


# (N, K, group): one group, several, an odd last one, columns of whole cache lines and an odd number of them.
INT4 = ((1, 1, 1), (5, 7, 7), (33, 8, 4), (97, 130, 65), (352, 256, 64), (1031, 256, 128))


def int4_case(n: int, k: int, group: int, *, zero_points: bool, scale_dtype: torch.dtype) -> tuple[Matrix, Tensor]:
    """A weight as the kernels read it, in memory whose unused bytes are all ones, and what it stands for (N, K)."""
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 16, (n, k + k % 2), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=generator) + 0.1).to(scale_dtype)
    zeros = torch.randint(0, 16, (n, k // group), generator=generator, dtype=torch.uint8) if zero_points else None
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    matrix = empty_int4((n, k), group, scale_dtype=scale_dtype, zero_points=zero_points)
    matrix.data.fill_(255)
    for first in range(0, n, 64):
        part = None if zeros is None else zeros[first : first + 64]
        pack_int4_into(packed[first : first + 64], scales[first : first + 64], part, matrix, first)
    return matrix, from_codes(codes[:, :k], scales, 8.0 if zeros is None else zeros)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("zero_points", [False, True])
def test_int4_product_is_that_of_the_rounded_weight(scale_dtype: torch.dtype, zero_points: bool) -> None:
    for n, k, group in INT4:
        matrix, weight = int4_case(n, k, group, zero_points=zero_points, scale_dtype=scale_dtype)
        for rows in (1, 3, 8):
            x, _, bias, scale = case(n, k, torch.float32, rows)
            for threshold in (0.0, 0.8, 1e9):
                y = sparse_linear(x, matrix, bias, scale, threshold)
                wanted, _ = exact(x, weight, bias, scale, threshold)
                # Codes are summed as they are, and what stands for zero is taken off a group's sum.
                _, tolerance = exact(x, weight.abs() + 16 * matrix_scales(matrix), bias, scale, threshold)
                assert bool(((y.double() - wanted).abs() <= tolerance).all()), (n, k, rows, threshold)
                assert torch.equal(y, torch.stack([sparse_linear(row, matrix, bias, scale, threshold) for row in x]))


def matrix_scales(matrix: Matrix) -> Tensor:
    """(N, K): the scale of every number of an int4 weight."""
    assert matrix.scale is not None
    return matrix.scale.float().transpose(1, 2).flatten(1)[:, : matrix.shape[0]].repeat_interleave(matrix.group, 0).T


def test_int4_product_is_independent_of_the_number_of_threads() -> None:
    matrix, _ = int4_case(701, 384, 128, zero_points=True, scale_dtype=torch.bfloat16)
    x, _, bias, scale = case(701, 384, torch.float32, 2)
    found = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.append(sparse_linear(x, matrix, bias, scale, 0.7))
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_widened_to_the_weight_that_it_stands_for(dtype: torch.dtype) -> None:
    for n, k, group in INT4:
        for zero_points in (False, True):
            matrix, weight = int4_case(n, k, group, zero_points=zero_points, scale_dtype=torch.bfloat16)
            x = torch.eye(k, dtype=dtype)
            assert torch.equal(matrix.linear(x, None), weight.to(dtype).T)


def test_int4_refuses_what_does_not_fit() -> None:
    matrix = empty_int4((20, 8), 4)
    codes, scales = torch.zeros(20, 4, dtype=torch.uint8), torch.ones(20, 2)
    for wrong, first in ((codes, 1), (codes, 2), (codes[:, :3], 0), (codes[:6], -2)):
        with pytest.raises(ValueError, match="do not fit an int4 20 x 8"):
            pack_int4_into(wrong, scales, None, matrix, first)
    with pytest.raises(ValueError, match="zeros: expected where"):
        pack_int4_into(codes, scales, torch.zeros(20, 2, dtype=torch.uint8), matrix, 0)


def test_int8_marks_rows_that_are_not_finite() -> None:
    weight = torch.randn(4, 9)
    weight[1, 2], weight[3, 8] = float("nan"), float("inf")
    assert quantize(weight)[1].isnan().tolist() == [False, True, False, True]


def test_compiled_code_is_found_on_disk_until_the_back_end_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu_threads.prepare("transpose_float32")
    region = cpu_compile.REGIONS["transpose_float32"]
    assert cpu_compile.compile_region(region).cache_hits == 1
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    folder = cpu_compile._cache_folder.__wrapped__()
    monkeypatch.setattr(cpu_compile, "_digest", lambda: "changed")
    assert cpu_compile._cache_folder.__wrapped__() != folder


def test_the_cache_folder_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_compile, "_cache_folder", cpu_compile._cache_folder.__wrapped__)
    region = cpu_compile.REGIONS["transpose_float32"]
    assert not cpu_compile.is_compiled(region)
    # Also the first time: what this process compiled itself might compute other bits than what later ones load.
    assert cpu_compile.compile_region(region).cache_hits == 1
    assert cpu_compile.is_compiled(region)
    assert list(tmp_path.rglob("*.nbc"))
    assert str(tmp_path) == numba.config.CACHE_DIR


def test_the_users_cache_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cpu_compile._cache_folder.__wrapped__()
    assert folder is not None
    assert folder.parent == tmp_path / "wisparse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cpu_compile._cache_folder.__wrapped__().parent == tmp_path / "home" / ".cache" / "wisparse"


def test_an_unusable_cache_folder_is_said_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(cpu_compile, "_cache_folder", cpu_compile._cache_folder.__wrapped__)
    with caplog.at_level(logging.WARNING):
        region = cpu_compile.compile_region(cpu_compile.REGIONS["transpose_float32"])
    assert region.cache_hits == 1
    assert "NUMBA_CACHE_DIR" in caplog.text
    assert "Not a directory" in caplog.text


def test_a_full_disk_is_said_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_compile, "_cache_folder", cpu_compile._cache_folder.__wrapped__)
    monkeypatch.setattr(cpu_compile, "_COMPILER", "raise SystemExit('not written: no space left')")
    with caplog.at_level(logging.INFO):
        region = cpu_compile.compile_region(cpu_compile.REGIONS["transpose_float32"])
    assert region.address
    assert "cannot be kept on disk" in caplog.text
    assert "compiled in memory: no space left" in caplog.text


def test_a_compiler_that_fails_is_told_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_compile, "_cache_folder", cpu_compile._cache_folder.__wrapped__)
    monkeypatch.setattr(cpu_compile, "_COMPILER", "print('first'); raise SystemExit('this is why')")
    with pytest.raises(RuntimeError, match=r"transpose_float32 could not be compiled for this CPU, .*: this is why"):
        cpu_compile.compile_region(cpu_compile.REGIONS["transpose_float32"])


@pytest.mark.exhaustive  # compiles a whole decode step
def test_the_first_process_computes_the_bits_of_all_later_ones(example_model: Path, tmp_path: Path) -> None:
    """Of bfloat16, whose sums are those that were seen to run in another order."""
    bundle = make_bundle(example_model, tmp_path / "bundle", 0.4)
    code = (
        "import sys, torch, wisparse\n"
        "decoder = wisparse.load(sys.argv[1], device='cpu', dtype='bfloat16', backend='numba').decoder\n"
        "decoder.prefill(0, torch.arange(100) * 37 % 60 + 3, 100)\n"
        "print([decoder.decode(torch.tensor([token])).view(torch.int32).sum().item() for token in range(3, 23)])"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""}
    first, later = (
        subprocess.run(
            [sys.executable, "-c", code, str(bundle)], env=environment, check=True, capture_output=True, text=True
        )
        for _ in range(2)
    )
    assert "compiling 2 kernels" in first.stderr
    assert "compiling" not in later.stderr
    assert first.stdout == later.stdout


def test_a_thread_that_waits_long_gives_its_core_away() -> None:
    cpu_threads.prepare("transpose_float32")
    barrier = cpu_step.barrier

    @numba.cfunc("void(int64)")
    def arrive(team: int) -> None:
        barrier(team, 2)

    team, used = cpu_threads.Team(), []

    def early() -> None:
        before = time.thread_time_ns()
        arrive.ctypes(team.address)  # without the interpreter's lock
        used.append(time.thread_time_ns() - before)

    thread = threading.Thread(target=early)
    thread.start()
    time.sleep(0.3)
    assert not used
    arrive.ctypes(team.address)
    thread.join()
    assert used[0] < 100_000_000  # a spinning thread takes all of 0.3 s; one that sleeps, a hundredth
    assert team._words[cpu_layout.TeamField.WAITED_NS] > 200_000_000


class Machine:
    """Stands for ``launch`` and the clock: a team that finds ``cores`` free, and beyond that loses a slice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int, slice_ms: int = 3) -> None:
        self._slice_ns = slice_ms * 1_000_000
        self.now, self.worked, self.cores, self.sizes = 1_000_000_000, 0, cores, []
        self.shared = False  # the calling thread's core: others take half of it
        self.team = cpu_threads.Team()
        monkeypatch.setattr(cpu_threads, "launch", self._launch)
        monkeypatch.setattr(cpu_threads.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(cpu_threads.time, "thread_time_ns", lambda: self.worked)

    def _launch(self, name: str, parameters: object, threads: int) -> None:
        late = self._slice_ns if threads > self.cores else 0
        self.team._words[cpu_layout.TeamField.WAITED_NS] = late
        worked = 1_200_000 // threads
        self.worked += worked
        self.now += worked * (1 + self.shared) + late
        self.sizes.append(threads)

    def run(self, seconds: float, most: int) -> list[int]:
        """Sizes of the launches of some time."""
        self.sizes, end = [], self.now + seconds * 1e9
        while self.now < end:
            self.team.launch("", None, most)
        return self.sizes


@pytest.mark.parametrize(("most", "cores"), [(2, 1), (4, 3), (8, 2)])
def test_a_team_is_as_large_as_the_machine_has_cores_left(
    most: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, cores)
    machine.run(0.2, most)
    assert machine.team.size == cores
    sizes = machine.run(5, most)
    assert 1 <= sum(size > cores for size in sizes) <= 10  # it goes on trying, and seldom
    assert min(sizes) == cores
    machine.cores = most  # the other programs end
    machine.run(1, most)
    assert set(machine.run(5, most)) == {most}
    machine.cores = 1
    machine.run(0.2, most)
    assert machine.team.size == 1


def test_a_thread_that_has_to_share_its_core_does_not_try_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1)
    machine.run(0.1, 2)
    machine.shared = True
    machine.run(2, 2)  # what it knew before is forgotten by then
    assert set(machine.run(5, 2)) == {1}
    machine.shared, machine.cores = False, 2  # the other programs end
    machine.run(2, 2)
    assert machine.team.size == 2


def test_a_team_forgives_a_short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.run(1, 2)
    for _ in range(20):
        machine.team._learn(machine.now, 900_000, 300_000)  # an interrupt, say
        machine.run(0.05, 2)
    assert machine.team.size == 2


def test_a_try_that_waits_longer_than_the_pause_before_it_has_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside several programs a thread gets a core back after longer than the shortest pause between two tries."""
    machine = Machine(monkeypatch, 1, slice_ms=40)
    assert machine.run(3, 2).count(2) < 12  # one each 50 ms would be 60


def test_tanh_and_gelu_are_as_exact_as_float32_is() -> None:
    tanh = numba.vectorize(["float32(float32)"])(cpu_intrinsics.tanh32.py_func)
    x = torch.cat(
        (torch.linspace(-12, 12, 100_001), torch.logspace(-30, 2, 10_001), torch.tensor([0.0, 1e30, -torch.inf]))
    )
    wanted = x.double().tanh()
    with np.errstate(all="ignore"):  # the branch that is not taken
        error = (torch.from_numpy(tanh(x.numpy())).double() - wanted).abs()
    assert bool((error <= 2**-23 * wanted.abs()).all())

    x = x[x.isfinite()]
    gate, up = x.clone(), torch.full_like(x, 0.5)
    cpu_step.activate_times(gate.data_ptr(), up.data_ptr(), len(x), 1, len(x), 1)
    wanted = functional.gelu(x.double(), approximate="tanh") / 2
    error = (gate.double() - wanted).abs()
    assert bool((error <= torch.where(x > 0, 2**-22 * wanted.abs(), 3e-8)).all())  # torch's own: 7.5e-8 below 0


def test_runs_on_one_thread_where_openmp_is_missing() -> None:
    script = """
import logging, torch
logging.basicConfig()
from wisparse.kernels.cpu import threads as cpu_threads
cpu_threads._candidates = lambda: iter(["libdoes-not-exist.so"])
from cpu_linear import sparse_linear, transpose
assert cpu_threads.team_size() == 1
weight, x = torch.randn(70, 50), torch.randn(50)
torch.testing.assert_close(sparse_linear(x, transpose(weight), None, torch.ones(50), 0.0), weight @ x)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(BENCHMARKS), *sys.path)))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "one thread" in done.stderr
    assert "libdoes-not-exist.so" in done.stderr


def test_layouts_have_no_gaps() -> None:
    for fields in (
        cpu_layout.StepField,
        cpu_layout.BlockField,
        cpu_layout.FloatField,
        LinearField,
        cpu_layout.RearrangeField,
        cpu_layout.ProjectionField,
    ):
        assert sorted(fields) == list(range(len(fields)))
        assert len(fields) <= cpu_compile._MOST_FIELDS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_prompt_in_16_bits_is_not_multiplied_in_a_slow_type(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512 torch takes 50 to 80 times as long for a transposed 16-bit matrix as for a float32 one."""
    multiplied = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        multiplied.append((x.dtype, weight.dtype))
        return functional.linear(x, weight, bias)

    monkeypatch.setattr(cpu_matrix, "functional", SimpleNamespace(linear=recorded))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    x, weight, _, _ = case(700, 96, dtype, rows=5)
    for matrix in (
        Matrix(StoredAs.BASE, transpose(weight), (700, 96), transposed=True),
        Matrix(StoredAs.INT8, *(stored := quantize(weight))[:1], (700, 96), transposed=True, scale=stored[1]),
    ):
        y = matrix.linear(x, None)
        rounded = weight if matrix.scale is None else matrix.data.T.float() * matrix.scale[:, None]
        wanted, tolerance = exact(x, rounded, None, torch.ones(96), 0.0)
        assert y.dtype == dtype
        assert bool(((y.double() - wanted).abs() <= 2 * tolerance + half_step(wanted, dtype) * 1.001).all())
    assert set(multiplied) == {(torch.float32, torch.float32)}
