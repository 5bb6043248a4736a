"""Fixtures shared by all tests: the real models, and text that no model here was trained on."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

# What the benchmarks measure with, tests hold the product to.
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

# Before torch is imported. Models this small gain nothing from a second thread, and lose minutes to threads that wait
# for each other where the machine has other work. Tests of threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A choice by speeds measured while other tests run would differ from run to run; tests of the choice allow it.
os.environ.setdefault("WISPARSE_MAX_KL", "off")

import hypothesis
import pytest

if TYPE_CHECKING:
    from served import Running

    from wisparse.runtime.model import Model

# A deadline per example measures the machine, not the code. CI repeats the same examples, so that a red run is red
# again; elsewhere every run explores.
hypothesis.settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=50)
hypothesis.settings.load_profile("project")

ROOT = Path(__file__).resolve().parent.parent
# Compiled by one process, regions share functions: each alone takes half a minute to two.
_COMPILE = """
import gc, sys
gc.disable()
sys.path[:0] = sys.argv[1:]
import cpu_linear, torch
from wisparse.kernels.cpu import launch
regions = [
    region for dtype in (torch.float32, torch.bfloat16) for mixers, experts in ((False, False), (True, False), (True, True))
    for region in launch.regions_of(dtype, mixers=mixers, experts=experts, int4=True)
]
regions += "linear_float32", "linear_bfloat16"
if folder := launch.cache_folder():
    launch.compile_here("cpu_linear", str(folder), *dict.fromkeys(regions))
"""
# Files that fork the worker dozens of times, while it is small: each time its memory is mapped anew, 0.1 s at 2 GB.
_FORKING = ("test_formats_folder", "test_formats_card", "test_converter_state", "test_formats_write")
# Files that take longest: a worker that begins one of them last would run alone for minutes. The last ones wait for
# compiled kernels.
_LONG = ("test_cli", "test_kernels_triton", "test_every_family", "test_packaging")


def pytest_configure(config: pytest.Config) -> None:
    """A run of many files compiles the CPU's kernels beside the tests, which wait for those that they need."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton_worker

        triton_worker.patch_once()
    spread = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    chosen = config.option.keyword or config.option.collectonly
    if spread and not chosen and (config.args_source is not pytest.Config.ArgsSource.ARGS or len(config.args) > 5):
        compiler = subprocess.Popen([sys.executable, "-c", _COMPILE, str(ROOT), str(ROOT / "tests")])
        config.add_cleanup(compiler.kill)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pytest-xdist hands out whole files in this order."""
    rank = {name: place for place, name in enumerate((*_FORKING, *_LONG))}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish() -> None:
    """Python's garbage collector looks no more at what imports and the collection made: it took 0.3 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    """Undo what a test did to the process. -q must not silence the next test's warnings; torch's threads, one more in each
    worker of pytest-xdist than there are cores, slow all tests that follow down to a third."""
    logger, torch = logging.getLogger("wisparse"), sys.modules.get("torch")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    threads = torch.get_num_threads() if torch else None
    yield
    if torch:
        torch.set_num_threads(threads)
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, standard output and standard error of ``wisparse ARGS``, or of another ``main``, in this process."""
    from wisparse import cli

    def run(*arguments: object, main: Callable[[list[str]], None] = cli.main) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def example_model() -> Path:
    return ROOT / "examples" / "pycode-llama-6m"


@pytest.fixture(scope="session")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model with random masks that drop 40% of the channels. Files with other bundles have their own."""
    from bundle_maker import make_bundle

    return make_bundle(example_model, tmp_path_factory.mktemp("example") / "bundle", 0.4)


@pytest.fixture(scope="session")
def chat_bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from served import TEMPLATE, with_template

    return with_template(example_model, tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="module")
def model(chat_bundle: Path) -> Iterator[Model]:
    import wisparse

    with wisparse.load(chat_bundle, dtype="float32", backend="torch", max_seq_len=256) as model:
        yield model


@pytest.fixture(scope="module")
def quick_conversion() -> Iterator[None]:
    """Conversions in this process try three alphas and draw no figures: most of a tiny model's conversion otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wisparse.converter.search.allocation.ALPHAS", (0.0, 0.5, 1.0))
        patch.setattr("wisparse.converter.report.render_figures", lambda report: {})
        yield


@pytest.fixture(params=[False, True])
def stream(request: pytest.FixtureRequest) -> bool:
    """Whether a server's answer comes in pieces."""
    return bool(request.param)


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Running]:
    from served import Running

    with Running(chat_bundle) as running:
        yield running


@pytest.fixture(scope="session")
def variant_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundle of a variant of ``runtime_models``, made once; its source is the folder ``source`` beside it."""
    from bundle_maker import make_bundle
    from runtime_models import make_checkpoint

    folder = tmp_path_factory.mktemp("variants")
    return cache(lambda name: make_bundle(make_checkpoint(name, folder / name / "source"), folder / name / "bundle"))


@pytest.fixture(scope="session")
def stdlib_file() -> Path:
    """A source of the standard library, which the example models never saw."""
    from quality import stdlib_files

    return stdlib_files("evaluation")[0]
