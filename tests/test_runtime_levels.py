"""The sparsity levels of one bundle: switching on a running model is loading at that sparsity level, on every back end; and answering a
request that names one."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import make_bundle
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_models import make_checkpoint

import wisparse
from wisparse.cli import cli
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ResourceError, UsageError, WisparseError
from wisparse.runtime.cpu.decoder import CpuDecoder
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation.engine import Engine, EngineState
from wisparse.runtime.generation.request import Chunk, Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.torch.decoder import TorchDecoder

LEVELS = (0.3, 0.5, 0.7)
CPU = torch.device("cpu")
DECODERS: dict[str, type[Decoder]] = {"torch": TorchDecoder, "numba": CpuDecoder}
PROMPT = torch.arange(3, 15)


@pytest.fixture(scope="module", params=["qwen2", "phi3"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sparsity levels; biases, or fused projections."""
    folder = tmp_path_factory.mktemp("levels")
    return make_bundle(make_checkpoint(request.param, folder / "source"), folder / "bundle", *LEVELS)


@pytest.fixture(scope="module")
def example(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("levels") / "bundle", *LEVELS)


def make(bundle: Bundle, backend: str, **settings: Any) -> Decoder:
    settings = {"device": CPU, "dtype": torch.float32, "max_seq_len": 64, "max_batch": 2} | settings
    return DECODERS[backend](bundle, **settings)


def run(decoder: Decoder, sparse_from: int = 7) -> torch.Tensor:
    """Logits (S, B, V) of a prompt in two slots, part of it sparse, and of some steps."""
    rows = [torch.stack([decoder.prefill(slot, PROMPT + slot, sparse_from).clone() for slot in range(2)])]
    for token in (5, 9, 33, 2):
        rows.append(decoder.decode(torch.tensor([token, token + 1])).clone())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("backend", "weights"), [("torch", "native"), ("numba", "native"), ("numba", "int8"), ("numba", "int4")]
)
def test_other_masks_are_what_loading_them_gives(bundle: Path, backend: str, weights: str) -> None:
    """To the bit, whatever was in force before; dense too."""
    opened = Bundle.open(bundle)
    decoder = make(opened, backend, weights=weights)
    expected = {level: run(make(opened.at(level), backend, weights=weights)) for level in (0.0, *LEVELS)}
    for sparsity in (0.7, 0.3, 0.0, 0.5, 0.3, 0.7, 0.0):
        decoder.set_masks(opened.at(sparsity).masks)
        assert decoder.lengths == [0, 0]
        assert torch.equal(run(decoder), expected[sparsity]), sparsity
    assert not torch.equal(expected[0.3], expected[0.5])


@pytest.mark.parametrize("which", ["example_model", pytest.param("qwen_model", marks=pytest.mark.exhaustive)])
def test_a_running_model_switches(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Token for token what loading at the sparsity level gives, and at 0 what the dense model gives, on every back end."""
    bundle = make_bundle(request.getfixturevalue(which), tmp_path / "bundle", *LEVELS)
    prompts = ["def f(x):\n", "import os\n", ">>> 12 + 30\n", "# The "]
    expected = {}
    for backend in DECODERS:
        settings: dict[str, Any] = {"backend": backend, "device": "cpu", "dtype": "float32", "max_seq_len": 64}
        with wisparse.load(bundle, **settings) as model:
            assert model.sparsity == LEVELS[-1]
            for sparsity in (*LEVELS, 0, 0.3):
                model.sparsity = sparsity
                assert f"sparsity {sparsity:g}," in repr(model)
                found = [answer.token_ids for answer in model.generate(prompts, max_new_tokens=16, prefill="half")]
                if sparsity not in expected:
                    with wisparse.load(bundle, sparsity=sparsity, **settings) as alone:
                        assert alone.sparsity == sparsity
                        answers = alone.generate(prompts, max_new_tokens=16, prefill="half")
                        expected[sparsity] = [answer.token_ids for answer in answers]
                assert found == expected[sparsity]
                measured = model.generate("x", max_new_tokens=3, measure_sparsity=True).realised_sparsity
                assert measured == pytest.approx(sparsity, abs=0.15)
    assert len({str(answer) for answer in expected.values()}) > 1


def test_what_cannot_be_set(example: Path) -> None:
    model = wisparse.load(example, backend="torch", device="cpu", max_seq_len=64)
    with pytest.raises(
        UsageError, match=r"one of the bundle's sparsity levels, 0\.3, 0\.5, 0\.7, or 0 for the dense model, found"
    ):
        model.sparsity = 0.4
    stream = model.stream("def f", max_new_tokens=8)
    next(stream)
    with pytest.raises(UsageError, match=r"an answer is in progress at 0\.7; wait for its end or close\(\) the stream"):
        model.sparsity = 0.3
    stream.close()
    model.sparsity = 0.3
    assert model.sparsity == 0.3
    model.close()
    with pytest.raises(UsageError, match="the model was closed"):
        model.sparsity = 0.5
    with pytest.raises(UsageError, match="one of the bundle's sparsity levels"):
        wisparse.load(example, sparsity=0.31)


def test_verbs_take_a_level(example: Path) -> None:
    """And what they print is that sparsity level's answer."""
    model = wisparse.load(example, device="cpu", sparsity=0.3)
    expected = model.generate("def f", max_new_tokens=8).text
    run = CliRunner().invoke
    wanted = ["--prompt", "def f", "--max-new-tokens", "8", "--device", "cpu"]
    found = run(cli, ["generate", str(example), "--sparsity", "0.3", *wanted])
    assert found.exit_code == 0
    assert found.stdout.strip() == expected.strip()
    for verb, more in {
        "generate": wanted,
        "inspect": [],
        "bench": [],
        "eval": ["--text", str(example / "wisparse.json")],
    }.items():
        refused = run(cli, [verb, str(example), "--sparsity", "0.4", *more])
        assert isinstance(refused.exception, UsageError), (verb, refused.output)
        assert "one of the bundle's sparsity levels, 0.3, 0.5, 0.7, or 0" in str(refused.exception)
    inspected = run(cli, ["inspect", str(example), "--sparsity", "0.3"]).stdout
    assert "at 30.0%" in inspected
    text = Bundle.open(example).recipe.calibration
    told = f"{text.num_samples} samples of up to {text.seq_len} tokens ({text.num_tokens:,} in all)"
    assert told in " ".join(inspected.split())  # a product of the two it need not be


def test_three_levels_take_hardly_more_room_than_one(example_model: Path, tmp_path: Path) -> None:
    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    one = make_bundle(example_model, tmp_path / "one", 0.5)
    three = make_bundle(example_model, tmp_path / "three", *LEVELS)
    # 1.009: this model's rows are short, so a scale weighs more beside its row than in any model in use.
    assert size(three) < 1.01 * size(one)


# ---------------------------------------------------------------------------------------- requests that name a sparsity level


CHUNK = 8


class Bench:
    """An engine on a tiny model, stepped by hand, and what each request gets from a decoder made at its sparsity level."""

    def __init__(self, folder: Path) -> None:
        self.bundle = Bundle.open(folder)
        self.decoder = self.make(self.bundle)
        self._alone: dict[Request, list[int]] = {}
        self._made: dict[float, Decoder] = {}
        self.renew()

    @staticmethod
    def make(bundle: Bundle) -> Decoder:
        decoder = make(bundle, "torch")
        decoder.prefill_chunk = decoder.prefix_block_size = CHUNK
        return decoder

    def renew(self) -> None:
        """Another engine on the same decoder, whatever sparsity level that is at."""
        self.decoder.set_masks(self.bundle.masks)
        self.engine = Engine(self.decoder, None, self.bundle)
        self.answers: list[list[int]] = []
        self.begun: list[int] = []
        self.failed: dict[int, WisparseError] = {}

    def ask(self, request: Request) -> Request:
        number = len(self.answers)
        self.answers.append([])

        def deliver(item: Chunk | WisparseError) -> None:
            if isinstance(item, WisparseError):
                self.failed[number] = item
                return
            if not self.answers[number]:
                self.begun.append(number)
            self.answers[number].append(item.token_id)

        return self.engine.submit(request, deliver)

    def steps(self, most: int = 10_000) -> None:
        left = iter(range(most))
        self.engine.drive(lambda: self.engine.state == EngineState(0, 0) or next(left, None) is None)

    def alone(self, request: Request) -> list[int]:
        level = self.bundle.sparsity if request.sparsity is None else request.sparsity
        if request not in self._alone:
            if level not in self._made:
                self._made[level] = self.make(self.bundle.at(level))
            scheduler = Scheduler(self._made[level])
            job = scheduler.add(replace(request, sparsity=None))
            while scheduler.busy:
                scheduler.step()
            self._alone[request] = job.output_token_ids
        return self._alone[request]


@pytest.fixture(scope="module")
def bench(bundle: Path) -> Bench:
    return Bench(bundle)


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


SHARED = tokens(17, 0)
PROMPTS = (SHARED, SHARED + tokens(5, 1), SHARED[:9], tokens(26, 2), tokens(2, 3))
REQUESTS = st.builds(
    Request,
    st.sampled_from(PROMPTS),
    st.integers(1, 9),
    st.sampled_from([SamplingParams(), SamplingParams(1.0, seed=3)]),
    prefill=st.sampled_from(["dense", "dense", "half", "all"]),
    sparsity=st.sampled_from([None, 0, *LEVELS]),
)
ACTIONS = st.lists(
    st.one_of(
        REQUESTS,
        REQUESTS,
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=14,
)


@given(actions=ACTIONS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_for_any_levels_get_what_loading_at_theirs_gives(bench: Bench, actions: list[Any]) -> None:
    """And their first tokens in the order in which they came."""
    bench.renew()
    requests: list[Request] = []
    tickets: list[Request] = []
    cancelled: set[int] = set()
    for action in actions:
        match action:
            case Request():
                requests.append(action)
                tickets.append(bench.ask(action))
            case "step", count:
                bench.steps(count)
            case "cancel", number if number < len(tickets):
                bench.engine.cancel(tickets[number])
                cancelled.add(number)
    bench.steps()
    assert bench.failed == {}
    assert bench.begun == sorted(bench.begun)
    for number, request in enumerate(requests):
        found, expected = bench.answers[number], bench.alone(request)
        assert found == expected or (number in cancelled and found == expected[: len(found)])


def wish(sparsity: float | None, count: int = 12, prompt: tuple[int, ...] = SHARED, prefill: str = "dense") -> Request:
    return Request(prompt, count, prefill=prefill, sparsity=sparsity)


def test_a_switch_that_fails_is_that_requests_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.renew()
    set_masks, failures = bench.decoder.set_masks, [torch.OutOfMemoryError("no memory")]

    def scarce(masks: Any) -> None:
        if failures:
            raise failures.pop()
        set_masks(masks)

    monkeypatch.setattr(bench.decoder, "set_masks", scarce)
    wanted = [wish(0.7, 4), wish(0.3, 4), wish(0.3, 4), wish(0.7, 4)]
    for one in wanted:
        bench.ask(one)
    bench.steps()
    assert list(bench.failed) == [1]
    assert isinstance(bench.failed[1], ResourceError)
    for number in (0, 2, 3):
        assert bench.answers[number] == bench.alone(wanted[number])
    assert bench.engine.scheduler.stats.tokens == 3 * 3  # nothing was decoded for the one that failed


@pytest.mark.parametrize(("prefill", "kept"), [("dense", 16), ("half", 8), ("all", 0)])
def test_what_was_read_dense_serves_at_every_level(bench: Bench, prefill: str, kept: int) -> None:
    scheduler = Scheduler(bench.decoder, bench.bundle)
    bench.decoder.set_masks(bench.bundle.masks)

    def cached(sparsity: float) -> int:
        one = wish(sparsity, 3, prefill=prefill)
        job = scheduler.add(one)
        while scheduler.busy:
            scheduler.step()
        assert job.output_token_ids == bench.alone(one)
        return job.cached_tokens

    assert cached(0.7) == 0
    assert cached(0.7) == 16
    assert [cached(sparsity) for sparsity in (0, 0.3, 0.5)] == [kept] * 3


def test_a_model_keeps_its_own_level(example: Path) -> None:
    """Whatever others name."""
    model = wisparse.load(example, backend="torch", device="cpu", dtype="float32", max_seq_len=64, sparsity=0.5)
    expected = model.generate("def f", max_new_tokens=8).token_ids
    model.engine.start(max_queue=9)
    ended = threading.Event()
    dense = model.request(list(SHARED), max_new_tokens=4, sparsity=0)
    model.engine.submit(dense, lambda item: ended.set(), final_only=True)
    assert ended.wait(60)
    assert model.sparsity == 0.5
    assert model.generate("def f", max_new_tokens=8).token_ids == expected
    model.engine.submit(replace(dense), print, final_only=True)
    model.engine.stop()
    measured = model.engine.call(lambda: model.decoder.logits(PROMPT, 0).clone())
    assert torch.equal(measured, make(Bundle.open(example).at(0.5), "torch").logits(PROMPT, 0))
    with pytest.raises(UsageError, match=r"sparsity levels, 0\.3, 0\.5, 0\.7, or 0 for the dense model, found 0\.4"):
        model.engine.validate(wish(0.4))
    model.close()
