"""The compiled CPU kernels agree with their definition, whatever the shape, type, number of rows and of threads."""

import hashlib
import importlib
import itertools
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from bundle_maker import make_bundle
from cpu_linear import sparse_linear
from torch import Tensor
from torch.nn import functional

from wisparse.formats.weight_types import interleaved, pack_int4, quantise
from wisparse.kernels import backend
from wisparse.kernels.cpu import intrinsics, launch, layout, projections
from wisparse.kernels.cpu.attention import store_row
from wisparse.kernels.cpu.layout import StoredAs
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.cpu import weights as cpu_weights
from wisparse.runtime.cpu.weights import Matrix

# The kernel for float16 would be compiled for its tests alone.
DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive))
# (N, K, group of int4): both odd, tiny, around the width of a pass (8 rows) and of a thread's span (32 columns), larger.
SHAPES = ((1, 1, 1), (5, 7, 7), (33, 8, 4), (31, 9, 3), (64, 17, 17), (97, 130, 65), (352, 256, 64), (1031, 256, 128))


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """Tests may set their own number."""
    torch.set_num_threads(2)


def case(n: int, k: int, dtype: torch.dtype, rows: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (rows, K), weight (N, K), bias (N,), channel_scale (K,)."""
    generator = torch.Generator().manual_seed(0)
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


def laid_out(kind: str, weight: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Matrix, Tensor]:
    """A weight (N, K) as the kernels read it, in memory whose unused bytes are all ones, and the numbers that it then
    stands for: of int4, those of any codes and zero points with the weight's scales."""
    n, k = weight.shape
    if kind == "native":
        matrix = Matrix(StoredAs.BASE, torch.empty(k, n, dtype=weight.dtype), (n, k))
        matrix.store(0, weight)
        return matrix, weight
    if kind == "int8":
        whole = quantise("int8", weight)
        matrix = Matrix(StoredAs.INT8, torch.empty(k, n, dtype=torch.int8), (n, k), scale=torch.empty(n))
    elif kind == "graded":
        whole = interleaved(quantise("int8", weight, group=group, scale_dtype=scale_dtype, graded=True))
        matrix = Matrix.int4((n, k), group, scale_dtype, False, planes=2)
    else:
        whole, generator = (
            quantise("int4", weight, group=group, scale_dtype=scale_dtype),
            torch.Generator().manual_seed(n),
        )
        codes, zeros = (
            torch.randint(16, shape, generator=generator, dtype=torch.uint8) for shape in ((n, k), whole.scales.shape)
        )
        whole = replace(whole, codes=pack_int4(codes), zeros=zeros if kind.endswith("points") else None)
        matrix = Matrix.int4((n, k), group, scale_dtype, kind.endswith("points"))
    matrix.data.view(torch.uint8).fill_(255)
    for first in range(0, n, 64):
        matrix.store(first, whole.rows(first, first + 64))
    return matrix, whole.dequantise(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["native", "int8", "int4", "int4 with zero points"])
def test_product_is_that_of_the_definition(kind: str, dtype: torch.dtype) -> None:
    """``dtype`` is the weight's or, of int4, that of its scales."""
    for n, k, group in SHAPES:
        inputs, weight, bias, scale = case(n, k, dtype, rows=8)
        bias = bias if n % 2 else None
        inputs = inputs if kind == "native" else inputs.float()
        matrix, weight = laid_out(kind, weight, group, dtype)
        magnitude = weight.abs()
        if kind.startswith("int4"):  # codes are summed as they are, and a group's zero is taken off its sum
            scales = matrix.scale.float().transpose(1, 2).flatten(1)[:, :n].repeat_interleave(group, 0).T
            magnitude = magnitude + 16 * scales
            unit = torch.eye(k, dtype=dtype)
            assert torch.equal(matrix.linear(unit, None), weight.to(dtype).T)
        for rows, threshold in itertools.product((1, 3, 8), (0.0, 0.8, 1e9)):
            x = inputs[:rows]
            y = sparse_linear(x, matrix, bias, scale, threshold)
            assert (y.dtype, y.shape) == (x.dtype, (rows, n))
            wanted, _ = exact(x, weight, bias, scale, threshold)
            _, tolerance = exact(x, magnitude, bias, scale, threshold)
            allowed = tolerance * (2 if kind == "int8" else 1) + half_step(wanted, x.dtype)
            assert bool(((y.double() - wanted).abs() <= allowed * 1.001).all()), (n, k, rows, threshold)
            assert torch.equal(y, torch.stack([sparse_linear(row, matrix, bias, scale, threshold) for row in x]))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_same_channels_as_the_definition_at_ties_and_odd_numbers(rows: int) -> None:
    # One output column shows which channels were used: an Inf that is dropped must not become a NaN.
    infinity, nan = float("inf"), float("nan")
    x = torch.tensor([0.5, -0.5, 0.49999997, 0.0, -0.0, infinity, -infinity, nan, 1e-45, 0.25])
    scale = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    for threshold in (0.5, 0.0, infinity):
        keep = keep_mask(x, scale, threshold)
        for channel in range(10):
            alone = torch.zeros(rows, 10)
            alone[0, channel] = x[channel]
            alone[1:, channel] = 7.0  # kept in the other rows at most thresholds
            found = sparse_linear(alone, torch.eye(10)[channel : channel + 1], None, scale, threshold)
            wanted = torch.where(keep[channel], x[channel], 0.0)[None]
            torch.testing.assert_close(found[0], wanted, atol=0, rtol=0, equal_nan=True)


def test_a_weight_of_a_dropped_channel_is_not_read() -> None:
    x, weight, bias, scale = case(40, 24, torch.float32)
    poisoned = torch.where(keep_mask(x[0], scale, 0.7), weight, float("nan"))
    found, wanted = (sparse_linear(x, one, bias, scale, 0.7) for one in (poisoned, weight))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_prompt_in_16_bits_is_multiplied_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 torch takes 50 to 80 times as long for a transposed 16-bit matrix as for a float32 one."""
    multiplied = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        multiplied.append((x.dtype, weight.dtype))
        return functional.linear(x, weight, bias)

    monkeypatch.setattr(cpu_weights, "functional", SimpleNamespace(linear=recorded))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    x, weight, _, _ = case(700, 96, dtype, rows=5)
    for matrix, plain in (laid_out(kind, weight, 96, dtype) for kind in ("native", "int8")):
        y = matrix.linear(x, None)
        wanted, tolerance = exact(x, plain, None, torch.ones(96), 0.0)
        assert y.dtype == dtype
        assert bool(((y.double() - wanted).abs() <= 2 * tolerance + half_step(wanted, dtype) * 1.001).all())
    assert set(multiplied) == {(torch.float32, torch.float32)}


REGION = "dequantize_float32"
TINY = "linear_tiny"  # compiled in no time


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "cache_folder", launch.cache_folder.__wrapped__)
    monkeypatch.setattr(launch, "regions", {})
    monkeypatch.setattr(backend, "_warned", set())
    return tmp_path


def test_a_region_is_compiled_once_into_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch.prepare(REGION)
    told = "compiling 1 kernel for the CPU, which takes some seconds; it happens once, later runs find it on disk"
    assert [message for message in caplog.messages if "done" not in message] == [told]
    # Loaded, also the first time: what this process compiled itself might compute other bits than what later ones load.
    assert launch.regions[REGION].cache_hits == 1
    assert [file.name.partition("-")[0] for file in (cache / "wisparse-cpu").glob("*.code")] == [REGION]
    monkeypatch.setattr(launch, "regions", {})
    monkeypatch.setattr(launch, "_COMPILER", "raise SystemExit('compiled again')")
    launch.prepare(REGION)
    assert caplog.messages.count(told) == 1
    for count in (2, 1):
        backend.warn_compiling("GPU", count)  # once
    assert caplog.messages[-1].startswith("compiling 2 kernels for the GPU")
    assert caplog.messages[-1].endswith("later runs find them on disk")
    # Another copy of the package finds the code, unless its source or numba differs.
    shutil.copytree(Path(launch.__file__).parents[1], cache / "copied" / "kernels")
    monkeypatch.syspath_prepend(cache)
    copy: Any = importlib.import_module("copied.kernels.cpu.launch")
    monkeypatch.setattr(copy, "_COMPILER", "raise SystemExit('compiled again')")
    copy.prepare(REGION)
    assert copy.regions.pop(REGION).cache_hits == 1
    part = Path(copy.__file__).with_name("barrier.py")
    source = part.read_text()
    part.write_text(source + "# changed\n")
    with pytest.raises(RuntimeError, match="compiled again"):
        copy.prepare(REGION)
    part.write_text(source)
    monkeypatch.setattr(numba, "__version__", "another")
    with pytest.raises(RuntimeError, match="compiled again"):
        copy.prepare(REGION)
    # The user's cache is the default.
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert launch.cache_folder().parent == cache / "wisparse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(cache / "home"))
    assert launch.cache_folder().parent == cache / "home" / ".cache" / "wisparse"


def test_damaged_code_is_deleted_and_compiled_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch.prepare(TINY)
    (file,) = (cache / "wisparse-cpu").glob("*.code")
    whole, other = file.read_bytes(), pickle.dumps("not code")
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    (cache / "whole").write_bytes(whole)  # what the compiler would write, to save its time
    copy = f"import shutil; shutil.copy({str(cache / 'whole')!r}, {str(file)!r})"
    monkeypatch.setattr(launch, "_COMPILER", copy)
    for damaged in (b"", whole[:half], whole[:-1], flipped, hashlib.sha256(other).digest() + other):
        file.write_bytes(damaged)
        caplog.clear()
        monkeypatch.setattr(launch, "regions", {})
        launch.prepare(TINY)
        assert [f"{file} is damaged: deleted, and compiled again" in one for one in caplog.messages] == [True]
        assert launch.regions[TINY].cache_hits == 1
        assert file.read_bytes() == whole


@pytest.mark.parametrize("others", ["all may write", "another user's"])
def test_code_that_others_could_have_written_is_not_loaded(
    others: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cache / "wisparse-cpu"
    folder.mkdir()
    if others == "all may write":
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    launch.prepare(TINY)
    assert "belongs to another user, or all users may write to it" in caplog.text
    assert list(folder.iterdir()) == []


def test_regions_compiled_ahead_are_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,), (second,) = (launch.start_compiling([TINY]) for _ in range(2))
    while not (found := list((cache / "wisparse-cpu").glob("*.code"))):
        time.sleep(0.01)
    written = found[0].stat().st_ino
    assert (first.wait(), second.wait()) == (0, 0)
    assert found[0].stat().st_ino == written, "compiled once, as the second process waits for the first"
    assert launch.start_compiling([TINY]) == []
    monkeypatch.setattr(launch, "_COMPILER", "raise SystemExit('compiled again')")
    launch.prepare(TINY)


@intrinsics.exact
def run_activation(gate, up, width, activation, slope, limit):
    projections.activate_times(gate, up, width, 1, width, activation, np.float32(slope), np.float32(limit))


@intrinsics.exact
def run_store(x, dim, codes, scales, kind):
    store_row(x, dim, codes, scales, 0, kind, np.float32(0))


def test_activations_and_stored_keys_keep_nan() -> None:
    """As the PyTorch reference does: a diverged model shows."""
    nan = np.nan
    gate, up = np.array([1, nan, 1, 9], np.float32), np.array([1, 1, nan, 100], np.float32)
    g, u = torch.from_numpy(gate.copy()).clamp(max=7), torch.from_numpy(up).clamp(-7, 7)
    run_activation(gate.ctypes.data, up.ctypes.data, 4, layout.MlpActivation.CLAMPED.value, 1.702, 7.0)
    torch.testing.assert_close(torch.from_numpy(gate), (u + 1) * (g * torch.sigmoid(g * 1.702)), equal_nan=True)
    for kind in StoredAs.INT8, StoredAs.E4M3:
        for key in ([1, nan, -2, 3], [nan, 1, 2, 3], [1, 2, 3, nan]):
            x, codes, scales = np.array(key, np.float32), np.zeros(4, np.uint8), np.zeros(1, np.float32)
            run_store(x.ctypes.data, 4, codes.ctypes.data, scales.ctypes.data, kind.value)
            assert np.isnan(scales[0])


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (None, ("NUMBA_CACHE_DIR", "Not a directory")),  # no folder to write to
        ("raise SystemExit('not written: no space left')", ("cannot be kept on disk", "in memory: no space left")),
    ],
)
def test_a_cache_that_cannot_be_written_is_said_and_survived(
    compiler: Any, words: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if compiler is None:
        (cache / "file").touch()
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(cache / "file" / "below"))
    else:
        monkeypatch.setattr(launch, "_COMPILER", compiler)
    with caplog.at_level(logging.INFO):
        launch.prepare(TINY)
    assert launch.regions[TINY].address
    assert all(word in caplog.text for word in words)
    assert ("it happens once" in caplog.text) == (compiler is not None)  # else every process compiles


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_takes_long_and_fails_is_told_with_its_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "_LINE_S", 0.05)
    code = "import time; print('first'); time.sleep(0.5); raise SystemExit('this is why')"
    monkeypatch.setattr(launch, "_COMPILER", code)
    with pytest.raises(RuntimeError, match=rf"{TINY} could not be compiled for this CPU, .*: this is why"):
        launch.prepare(TINY)
    assert "compiling CPU kernels: 0 of 1 done" in caplog.messages


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
    command = [sys.executable, "-c", code, str(bundle)]
    how: dict[str, Any] = {"env": environment, "check": True, "capture_output": True, "text": True}
    first, later = (subprocess.run(command, **how) for _ in range(2))
    assert "it happens once" in first.stderr
    assert "compiling" not in later.stderr
    assert first.stdout == later.stdout


def test_runs_on_one_thread_where_openmp_is_missing() -> None:
    script = """
import logging, torch
logging.basicConfig()
from wisparse.kernels.cpu import launch
launch.openmp_libraries = lambda: iter(["libdoes-not-exist.so"])
from cpu_linear import sparse_linear
assert launch.team_size() == 1
weight, x = torch.randn(70, 50), torch.randn(50)
torch.testing.assert_close(sparse_linear(x, weight, None, torch.ones(50), 0.0), weight @ x)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "one thread" in done.stderr
    assert "libdoes-not-exist.so" in done.stderr


def test_a_thread_that_waits_long_gives_its_core_away() -> None:
    launch.prepare(REGION)
    barrier = projections.barrier

    @numba.cfunc("void(int64)")
    def arrive(team: int) -> None:
        barrier(team, 2)

    team, used = launch.Team(), []

    def early() -> None:
        before = time.thread_time_ns()
        arrive.ctypes(team.words.ctypes.data)  # without the interpreter's lock
        used.append(time.thread_time_ns() - before)

    thread = threading.Thread(target=early)
    thread.start()
    time.sleep(0.3)
    assert not used
    arrive.ctypes(team.words.ctypes.data)
    thread.join()
    assert used[0] < 100_000_000  # a spinning thread takes all of 0.3 s; one that sleeps, a hundredth
    assert team.words[layout.TeamField.WAITED_NS] > 200_000_000


class Machine:
    """Stands for ``launch`` and the clock: a team that finds ``cores`` free, and beyond that loses a slice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int, slice_ms: float = 3) -> None:
        self.slice_ms, self.cores = slice_ms, cores
        self.now, self.worked, self.sizes = 1_000_000_000, 0, []
        self.shared = False  # the calling thread's core: others take half of it
        self.team = launch.Team()
        monkeypatch.setattr(launch, "launch", self._launch)
        monkeypatch.setattr(launch.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(launch.time, "thread_time_ns", lambda: self.worked)

    def _launch(self, name: str, parameters: object, threads: int) -> None:
        late = int(self.slice_ms * 1e6) if threads > self.cores else 0
        self.team.words[layout.TeamField.WAITED_NS] = late
        worked = 1_200_000 // threads
        self.worked += worked
        self.now += worked * (1 + self.shared) + late
        self.sizes.append(threads)

    def run(self, seconds: float, most: int = 2) -> list[int]:
        """Sizes of the launches of some time."""
        self.sizes, end = [], self.now + seconds * 1e9
        while self.now < end:
            self.team.launch("", None, most)
        return self.sizes


@pytest.mark.parametrize(("most", "cores"), [(2, 1), (4, 3), (8, 2)])
def test_a_team_is_as_large_as_cores_are_left(most: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_tanh_and_gelu_are_as_exact_as_float32_is() -> None:
    tanh = numba.vectorize(["float32(float32)"])(intrinsics.tanh32.py_func)
    ends = torch.tensor([0.0, 1e30, -torch.inf])
    x = torch.cat((torch.linspace(-12, 12, 100_001), torch.logspace(-30, 2, 10_001), ends))
    wanted = x.double().tanh()
    with np.errstate(all="ignore"):  # the branch that is not taken
        error = (torch.from_numpy(tanh(x.numpy())).double() - wanted).abs()
    assert bool((error <= 2**-23 * wanted.abs()).all())
    x = x[x.isfinite()]
    gate, up = x.clone(), torch.full_like(x, 0.5)
    projections.activate_times(gate.data_ptr(), up.data_ptr(), len(x), 1, len(x), 1, np.float32(0), np.float32(0))
    wanted = functional.gelu(x.double(), approximate="tanh") / 2
    error = (gate.double() - wanted).abs()
    assert bool((error <= torch.where(x > 0, 2**-22 * wanted.abs(), 3e-8)).all())  # torch's own: 7.5e-8 below 0


@pytest.mark.parametrize("kind", ["native", "int8", "int4", "int4 with zero points", "graded"])
@pytest.mark.parametrize("rows", [1, 40, 70])
def test_tiles_multiply_many_rows(kind: str, rows: int) -> None:
    """The whole product, with AMX's tiles or what they compute; bits that do not depend on the number of rows."""
    if intrinsics.HAS_TILES and not cpu_weights.has_tiles():
        pytest.skip("the system gives this process no tiles")
    x, bias, weight = torch.randn(rows, 640).bfloat16(), torch.randn(96).bfloat16(), torch.randn(96, 640) * 640**-0.5
    matrix, weight = laid_out(kind, weight.bfloat16(), 128, torch.bfloat16)
    if kind == "graded":
        given, x = x, torch.stack((16 * x, x), -1).flatten(1)
    product = matrix.multiply_tiles(x, bias)
    if kind == "graded" and cpu_weights.has_tiles():
        assert torch.equal(matrix.linear(given, bias), product)
        high = torch.stack((16 * given, 0 * given), -1).flatten(1)
        assert torch.equal(matrix.linear(given, bias, 0 * given), matrix.multiply_tiles(high, bias))
    numbers = weight.bfloat16() if matrix.stored_as == StoredAs.INT4 else weight
    torch.testing.assert_close(product.float(), x.float() @ numbers.float().T + bias, rtol=2**-8, atol=1e-3)
    assert torch.equal(product[:1], matrix.multiply_tiles(x[:1], bias))
