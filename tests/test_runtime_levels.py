"""The sparsity levels of one bundle: a running model switches, and a request may name one, on every back end."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import cpu_decoder, make_bundle, run, small_chunks
from click.testing import CliRunner
from runtime_models import make_checkpoint

import wisparse
from wisparse.cli import cli
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ResourceError, UsageError
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.generation import scheduler as levels_module
from wisparse.runtime.generation.engine import Engine, EngineState
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler

LEVELS = (0.3, 0.5, 0.7)
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
    return cpu_decoder(bundle, backend, max_seq_len=64, max_batch=2, **settings)


def logits_of(decoder: Decoder, sparse_from: int = 7) -> torch.Tensor:
    """Logits (S, B, V) of a prompt in two slots, part of it sparse, and of some steps."""
    rows = [torch.stack([decoder.prefill(slot, PROMPT + slot, sparse_from).clone() for slot in range(2)])]
    for token in (5, 9, 33, 2):
        rows.append(decoder.decode(torch.tensor([token, token + 1])).clone())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("backend", "weights"), [("torch", "native"), ("numba", "native"), ("numba", "int8"), ("numba", "int4")]
)
def test_other_masks_are_what_loading_them_gives(bundle: Path, backend: str, weights: str) -> None:
    opened = Bundle.open(bundle)
    decoder = make(opened, backend, weights=weights)
    expected = {level: logits_of(make(opened.at(level), backend, weights=weights)) for level in (0.0, *LEVELS)}
    for sparsity in (0.7, 0.3, 0.0, 0.5, 0.3, 0.7, 0.0):
        decoder.set_masks(opened.at(sparsity).masks)
        assert torch.equal(logits_of(decoder), expected[sparsity]), sparsity
    assert not torch.equal(expected[0.3], expected[0.5])


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_running_model_switches_and_what_it_cannot_be_set_to(backend: str, example: Path) -> None:
    where: dict[str, Any] = {"backend": backend, "device": "cpu", "dtype": "float32", "max_seq_len": 64}
    model = wisparse.load(example, **where)
    words = r"one of the bundle's sparsity levels, 0\.3, 0\.5, 0\.7, or 0 for the dense model, found"
    with pytest.raises(UsageError, match=words):
        model.sparsity = 0.4
    stream = model.stream("def f", max_new_tokens=8)
    next(stream)
    with pytest.raises(UsageError, match=r"an answer is in progress at 0\.7; wait for its end or close\(\) the stream"):
        model.sparsity = 0.3
    stream.close()
    answers = {}
    for sparsity in (0, 0.3, 0.7):
        model.sparsity = sparsity
        assert f"sparsity {sparsity:g}," in repr(model)
        answer = model.generate("def f(x):", max_new_tokens=8, prefill="half", measure_sparsity=True)
        assert answer.realised_sparsity == pytest.approx(sparsity, abs=0.15)
        answers[sparsity] = answer.token_ids
    assert len(set(answers.values())) > 1
    loaded = wisparse.load(example, sparsity=0.3, **where)
    assert loaded.generate("def f(x):", max_new_tokens=8, prefill="half").token_ids == answers[0.3]
    model.close()
    with pytest.raises(UsageError, match="the model was closed"):
        model.sparsity = 0.5
    with pytest.raises(UsageError, match="one of the bundle's sparsity levels"):
        wisparse.load(example, sparsity=0.31)


def test_verbs_take_a_level(example: Path) -> None:
    model = wisparse.load(example, device="cpu", sparsity=0.3)
    expected = model.generate("def f", max_new_tokens=8).text
    run = CliRunner().invoke
    wanted = ["--prompt", "def f", "--max-new-tokens", "8", "--device", "cpu"]
    found = run(cli, ["generate", str(example), "--sparsity", "0.3", *wanted])
    assert (found.exit_code, found.stdout.strip()) == (0, expected.strip())
    options = {"generate": wanted, "inspect": [], "bench": [], "eval": ["--text", str(example / "wisparse.json")]}
    for verb, more in options.items():
        refused = run(cli, [verb, str(example), "--sparsity", "0.4", *more])
        assert isinstance(refused.exception, UsageError), (verb, refused.output)
        assert "one of the bundle's sparsity levels, 0.3, 0.5, 0.7, or 0" in str(refused.exception)
    inspected = run(cli, ["inspect", str(example), "--sparsity", "0.3"]).stdout
    assert "at 30.0%" in inspected
    text = Bundle.open(example).recipe.calibration
    told = f"{text.num_samples} samples of up to {text.seq_len} tokens ({text.num_tokens:,} in all)"
    assert told in " ".join(inspected.split())  # a product of the two it need not be


SHARED = tuple(range(3, 20))


def wish(sparsity: float, count: int = 12, prefill: str = "dense") -> Request:
    return Request(SHARED, count, prefill=prefill, sparsity=sparsity)


def alone(bundle: Bundle, request: Request) -> list[int]:
    scheduler = Scheduler(small_chunks(bundle.at(request.sparsity or 0)))
    return run(scheduler, replace(request, sparsity=None)).output_token_ids


@pytest.mark.parametrize("where", ["set_masks", "step"])
def test_a_failure_spares_the_other_levels(bundle: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks for which there is no memory, once; and steps at one of the levels."""
    monkeypatch.setattr(levels_module, "TURN_SECONDS", 0.0)
    opened = Bundle.open(bundle)
    engine = Engine(small_chunks(opened, max_batch=2), None, opened)
    works, failures = getattr(engine.decoder, where), [torch.OutOfMemoryError("no memory")]

    def broken(*given: Any) -> Any:
        if where == "set_masks" and failures:
            raise failures.pop()
        if where == "step" and engine.scheduler.levels.current == 0.3:
            raise RuntimeError("the device is lost")
        return works(*given)

    monkeypatch.setattr(engine.decoder, where, broken)
    good, bad, *more = (engine.submit(wish(level, 8), lambda item: None) for level in (0.7, 0.3, 0.7))
    engine.drive(lambda: engine.state == EngineState(0, 0))
    assert isinstance(bad.error, ResourceError if where == "set_masks" else RuntimeError)
    assert where == "set_masks" or "the device is lost" in str(bad.error)
    for request in (good, *more):
        assert (request.error, request.output_token_ids) == (None, alone(opened, request))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With recurrent blocks, whose state no step of other rows may touch."""
    folder = tmp_path_factory.mktemp("hybrid")
    return make_bundle(make_checkpoint("qwen3.5", folder / "source"), folder / "bundle", *LEVELS)


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("kind", ["example", "hybrid"])
def test_levels_share_the_slots(
    example: Path, hybrid: Path, kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Bundle.open(hybrid if kind == "hybrid" else example)
    prompts = [[*range(3, 3 + length)] for length in (12, 5, 20, 3, 9, 17)]
    asked = [
        Request(prompt, count, prefill=prefill, sparsity=level)
        for prompt, count, prefill, level in zip(
            prompts, (30, 12, 25, 9, 16, 4), ("half", "dense", "all") * 2, (0.7, 0.0, 0.3, 0.7, 0.0, 0.3), strict=True
        )
    ]
    expected = []
    for one in asked:
        alone = Scheduler(cpu_decoder(opened.at(one.sparsity or 0), backend, max_seq_len=64))
        expected.append(run(alone, replace(one, sparsity=None)).output_token_ids)
    for turn in (0.0, 0.25):
        monkeypatch.setattr(levels_module, "TURN_SECONDS", turn)
        scheduler = Scheduler(cpu_decoder(opened, backend, max_seq_len=64, max_batch=4), opened)
        requests = [scheduler.add(replace(one)) for one in asked[:3]]
        together = set()
        while scheduler.busy:
            advanced = generate_step(scheduler)
            assert len({one.sparsity for one in advanced}) <= 1 or scheduler.prefilling is not None
            together.add(frozenset(one.sparsity for one in scheduler.running))
            if len(requests) < len(asked) and len(requests[0].output_token_ids) > 2 * len(requests):
                requests.append(scheduler.add(replace(asked[len(requests)])))
        assert frozenset((0.0, 0.3, 0.7)) in together
        assert [one.output_token_ids for one in requests] == expected


def test_levels_take_turns(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bounded time; a turn ends when its rows do, and with one level there are none."""
    opened, clock, steps, switches = Bundle.open(bundle), [100.0], [], []
    decoder = make(opened, "torch")
    step, set_masks = decoder.step, decoder.set_masks

    def slow(tokens: torch.Tensor, *more: Any) -> torch.Tensor:
        clock[0] += 0.1
        steps.append((tokens >= 0).nonzero()[:, 0].tolist())
        return step(tokens, *more)

    monkeypatch.setattr(decoder, "step", slow)
    monkeypatch.setattr(decoder, "set_masks", lambda masks: switches.append(len(steps)) or set_masks(masks))
    monkeypatch.setattr(levels_module.time, "perf_counter", lambda: clock[0])
    scheduler = Scheduler(decoder, opened)
    scheduler.add(wish(0.7, 13))
    while len(steps) < 5:
        generate_step(scheduler)
    late = scheduler.add(wish(0.3, 6))
    generate_step(scheduler)
    assert late.running
    assert len(late.output_token_ids) == 1  # read at once
    run(scheduler)
    # 0.25 s are three steps of 0.1 s; row 1 has five to decode, row 0 seven more.
    assert (steps[5:], switches) == ([[1]] * 3 + [[0]] * 3 + [[1]] * 2 + [[0]] * 4, [5, 8, 11, 13])


def test_a_model_keeps_its_own_level(example: Path) -> None:
    model = wisparse.load(example, backend="torch", device="cpu", dtype="float32", max_seq_len=64, sparsity=0.5)
    expected = model.generate("def f", max_new_tokens=8).token_ids
    model.engine.start(max_queue=9)
    ended = threading.Event()
    dense = model.request(list(SHARED), max_new_tokens=4, sparsity=0)
    model.engine.submit(dense, lambda item: ended.set(), final_only=True)
    assert ended.wait(60)
    assert (model.sparsity, model.generate("def f", max_new_tokens=8).token_ids) == (0.5, expected)
    model.engine.submit(replace(dense), print, final_only=True)
    model.engine.stop()
    measured = model.engine.call(lambda: model.decoder.logits(PROMPT, 0).clone())
    assert torch.equal(measured, make(Bundle.open(example).at(0.5), "torch").logits(PROMPT, 0))
    with pytest.raises(UsageError, match=r"sparsity levels, 0\.3, 0\.5, 0\.7, or 0 for the dense model, found 0\.4"):
        model.engine.validate(wish(0.4))
    model.close()
