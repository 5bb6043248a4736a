"""The engine: many requests on one decoder, from many threads, each as if it were alone."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle

import wisparse
from wisparse.formats.errors import ResourceError, UsageError, WisparseError
from wisparse.runtime.model import Model, Piece
from wisparse.runtime.sampling import SamplingSettings
from wisparse.runtime.serve.engine import Engine, QueueFullError

GREEDY = SamplingSettings()


@pytest.fixture(scope="module")
def model(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_bundle(example_model, tmp_path_factory.mktemp("engine") / "bundle", 0.4)
    return wisparse.load(folder, dtype="float32", backend="torch", max_batch=3, max_seq_len=96)


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = Engine(model, max_queue=100)
    yield engine
    engine.close(drain=False)


class Reader:
    """Collects what one request delivers."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Piece | WisparseError] = queue.SimpleQueue()
        self.text = ""

    def next(self) -> Piece | WisparseError:
        return self.items.get(timeout=60)

    def all(self) -> Piece | WisparseError:
        """The last piece, or the error."""
        while True:
            item = self.next()
            if isinstance(item, WisparseError):
                return item
            self.text += item.text
            if item.finish_reason is not None:
                return item


def ask(engine: Engine, prompt: str, count: int, sampling: SamplingSettings = GREEDY, stop: tuple[str, ...] = ()):
    reader = Reader()
    request, stops = engine.model.request(engine.model.tokenizer.encode(prompt), count, sampling, stop, "dense")
    return reader, engine.submit(request, stops, reader.items.put)


def test_answers_are_those_of_the_model_alone(model: Model) -> None:
    rng = random.Random(0)
    prompts = ["def f(x):", "import", ">>> len('hello')", "class A:", "for i in range(10):\n    ", "#"]
    wishes = [
        (prompt, rng.randint(1, 30), SamplingSettings(rng.choice([0.0, 0.8]), seed=number), rng.choice([(), ("\n\n",)]))
        for number, prompt in enumerate(prompts * 3)
    ]
    alone = [
        model.generate(
            prompt, max_new_tokens=count, temperature=one.temperature, seed=one.seed, stop=list(stop) or None
        )
        for prompt, count, one, stop in wishes
    ]
    engine = Engine(model)
    try:
        readers: list[Reader] = [Reader() for _ in wishes]

        def client(numbers: list[int]) -> None:
            for number in numbers:
                readers[number], _ = ask(engine, *wishes[number])

        threads = [threading.Thread(target=client, args=([*range(first, len(wishes), 4)],)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for reader, expected in zip(readers, alone, strict=True):
            last = reader.all()
            assert isinstance(last, Piece)
            assert last.generation is not None
            assert reader.text == last.generation.text == expected.text
            assert last.generation.token_ids == expected.token_ids
            assert last.finish_reason == expected.finish_reason
        assert engine.state.running == engine.state.waiting == 0
    finally:
        engine.close()


def test_a_cancelled_request_frees_its_place(engine: Engine) -> None:
    long = [ask(engine, "def f(x):", 80) for _ in range(3)]
    waiting, _ = ask(engine, "import", 2)
    for reader, _ in long:
        reader.next()
    for _, ticket in long:
        engine.cancel(ticket)
    last = waiting.all()
    assert isinstance(last, Piece)
    assert last.finish_reason == "length"
    # Nothing comes any more for those that were taken back, and they are not counted.
    assert engine.state.running == 0
    assert all(item.finish_reason is None for reader, _ in long for item in _drained(reader))
    engine.cancel(long[0][1])  # once more is as good as once


def _drained(reader: Reader) -> Iterator[Piece]:
    while not reader.items.empty():
        item = reader.items.get()
        assert isinstance(item, Piece)
        yield item


def test_the_queue_has_a_bound(model: Model) -> None:
    engine = Engine(model, max_queue=2)
    try:
        tickets = [ask(engine, "def f(x):", 90) for _ in range(5)]
        assert engine.state.running == 3
        assert engine.state.waiting == 2
        with pytest.raises(QueueFullError, match="2 requests are waiting already"):
            ask(engine, "import", 1)
        for _, ticket in tickets:
            engine.cancel(ticket)
    finally:
        engine.close()


def test_closing_finishes_what_is_under_way(model: Model) -> None:
    engine = Engine(model)
    readers = [ask(engine, "def f(x):", 12)[0] for _ in range(5)]
    engine.close()
    for reader in readers:
        last = reader.all()
        assert isinstance(last, Piece)
        assert last.generation is not None
        assert len(last.generation.token_ids) == 12
    with pytest.raises(UsageError, match="shutting down"):
        ask(engine, "import", 1)
    assert model.generate("import", max_new_tokens=2).token_ids  # the model is free again


def test_closing_without_draining_is_quick(model: Model) -> None:
    engine = Engine(model)
    readers = [ask(engine, "def f(x):", 90)[0] for _ in range(4)]
    readers[0].next()
    engine.close(drain=False)
    assert all(item.finish_reason is None for reader in readers for item in _drained(reader))


def test_a_prompt_that_does_not_fit_fails_alone(engine: Engine) -> None:
    good, _ = ask(engine, "def f(x):", 20)
    bad = Reader()
    request, stops = engine.model.request([5] * 1000, 4, GREEDY, (), "dense")
    engine.submit(request, stops, bad.items.put)
    error = bad.all()
    assert isinstance(error, UsageError)
    assert "1000 tokens" in str(error)
    assert isinstance(good.all(), Piece)


def test_no_memory_for_a_prompt_is_that_requests_failure(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model_free_answer(engine, "def f(x):", 24)
    prefill = model.decoder.prefill

    def scarce(slot: int, token_ids: torch.Tensor, sparse_from: int, **part: int) -> torch.Tensor:
        if len(token_ids) == 17 and sparse_from == 17:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(slot, token_ids, sparse_from, **part)

    monkeypatch.setattr(model.decoder, "prefill", scarce)
    good, _ = ask(engine, "def f(x):", 24)
    good.text += good.next().text  # it is under way
    bad = Reader()
    request, stops = engine.model.request([5] * 17, 4, GREEDY, (), "dense")
    engine.submit(request, stops, bad.items.put)
    assert isinstance(bad.all(), ResourceError)
    last = good.all()  # read anew with what it had, it goes on as if nothing had been
    assert isinstance(last, Piece)
    assert last.generation is not None
    assert last.generation.token_ids == expected
    assert engine.state.running == 0


def model_free_answer(engine: Engine, prompt: str, count: int) -> tuple[int, ...]:
    last = ask(engine, prompt, count)[0].all()
    assert isinstance(last, Piece)
    assert last.generation is not None
    return last.generation.token_ids


def test_a_step_that_fails_ends_the_batch_and_no_more(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = model.decoder.step
    failures = [RuntimeError("the device is lost")]

    def broken(*arguments: object) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model.decoder, "step", broken)
    first, _ = ask(engine, "def f(x):", 20)
    error = first.all()
    assert isinstance(error, WisparseError)
    assert "the device is lost" in str(error)
    assert len(model_free_answer(engine, "import", 5)) == 5


def test_unread_weights_are_told_between_steps(engine: Engine) -> None:
    model_free_answer(engine, "def f(x):", 10)
    unread = engine.realised_sparsity().result(timeout=30)
    assert unread is not None
    assert 0.3 < unread < 0.5
