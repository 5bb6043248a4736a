"""The engine: many requests on one decoder, from many threads, each as if it were alone."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle

import wisparse
from wisparse.formats.errors import ResourceError, UsageError, WisparseError
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation.engine import Engine, EngineState, QueueFullError
from wisparse.runtime.generation.request import Chunk, Request
from wisparse.runtime.model import Model
from wisparse.runtime.tokenizer import Detokenizer

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def model(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_bundle(example_model, tmp_path_factory.mktemp("engine") / "bundle", 0.4)
    return wisparse.load(folder, dtype="float32", backend="torch", max_batch=3, max_seq_len=96)


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    model.engine.start(max_queue=100)
    yield model.engine
    model.engine.stop(drain=False)


class Reader:
    """Collects what one request delivers."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Chunk | WisparseError] = queue.SimpleQueue()
        self.text = ""

    def next(self) -> Chunk | WisparseError:
        return self.items.get(timeout=60)

    def all(self) -> Chunk | WisparseError:
        """The last chunk, or the error."""
        while True:
            item = self.next()
            if isinstance(item, WisparseError):
                return item
            self.text += item.text
            if item.finish_reason is not None:
                return item


def ask(model: Model, prompt: str, count: int, sampling: SamplingParams = GREEDY, stop: tuple[str, ...] = ()):
    reader = Reader()
    request = model.request(model.tokenizer.encode(prompt), max_new_tokens=count, sampling=sampling, stop=stop)
    return reader, model.engine.submit(request, reader.items.put)


def test_answers_are_those_of_the_model_alone(model: Model, engine: Engine) -> None:
    rng = random.Random(0)
    prompts = ["def f(x):", "import", ">>> len('hello')", "class A:", "for i in range(10):\n    ", "#"]
    wishes = [
        (prompt, rng.randint(1, 30), SamplingParams(rng.choice([0.0, 0.8]), seed=number), rng.choice([(), ("\n\n",)]))
        for number, prompt in enumerate(prompts * 3)
    ]
    alone = [
        model.generate(
            prompt, max_new_tokens=count, temperature=one.temperature, seed=one.seed, stop=list(stop) or None
        )
        for prompt, count, one, stop in wishes
    ]
    readers: list[Reader] = [Reader() for _ in wishes]

    def client(numbers: list[int]) -> None:
        for number in numbers:
            readers[number], _ = ask(model, *wishes[number])

    threads = [threading.Thread(target=client, args=([*range(first, len(wishes), 4)],)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for reader, expected in zip(readers, alone, strict=True):
        last = reader.all()
        assert isinstance(last, Chunk)
        assert last.generation is not None
        assert reader.text == last.generation.text == expected.text
        assert last.generation.token_ids == expected.token_ids
        assert last.finish_reason == expected.finish_reason
    assert engine.state.running == engine.state.waiting == 0


def test_a_cancelled_request_frees_its_place(model: Model, engine: Engine) -> None:
    long = [ask(model, "def f(x):", 80) for _ in range(3)]
    waiting, _ = ask(model, "import", 2)
    for reader, _ in long:
        reader.next()
    for _, ticket in long:
        engine.cancel(ticket)
    last = waiting.all()
    assert isinstance(last, Chunk)
    assert last.finish_reason == "length"
    # Nothing comes any more for those that were taken back, and they are not counted.
    assert engine.state.running == 0
    assert all(item.finish_reason is None for reader, _ in long for item in _drained(reader))
    engine.cancel(long[0][1])  # once more is as good as once


def _drained(reader: Reader) -> Iterator[Chunk]:
    while not reader.items.empty():
        item = reader.items.get()
        assert isinstance(item, Chunk)
        yield item


def test_the_queue_has_a_bound(model: Model) -> None:
    engine = model.engine
    engine.start(max_queue=2)
    try:
        tickets = [ask(model, "def f(x):", 90) for _ in range(5)]
        tickets[2][0].next()
        assert engine.state == EngineState(3, 2)
        with pytest.raises(QueueFullError, match="2 requests are waiting already"):
            ask(model, "import", 1)
        for _, ticket in tickets:
            engine.cancel(ticket)
        with pytest.raises(UsageError, match="a server runs on this model already"):
            engine.start(max_queue=2)
    finally:
        engine.stop()
    assert len(model.generate(["import"] * 9, max_new_tokens=1)) == 9  # without a server there is none


def test_stopping_finishes_what_is_under_way(model: Model) -> None:
    model.engine.start(max_queue=10)
    readers = [ask(model, "def f(x):", 12)[0] for _ in range(5)]
    model.engine.stop()
    for reader in readers:
        last = reader.all()
        assert isinstance(last, Chunk)
        assert last.generation is not None
        assert len(last.generation.token_ids) == 12
    assert model.generate("import", max_new_tokens=2).token_ids  # the calling thread runs its steps again


def test_stopping_without_draining_is_quick(model: Model) -> None:
    model.engine.start(max_queue=10)
    readers = [ask(model, "def f(x):", 90)[0] for _ in range(4)]
    readers[0].next()
    model.engine.stop(drain=False)
    assert all(item.finish_reason is None for reader in readers for item in _drained(reader))


def test_a_prompt_that_does_not_fit_is_refused_at_once(model: Model, engine: Engine) -> None:
    good, _ = ask(model, "def f(x):", 20)
    with pytest.raises(UsageError, match="1000 tokens"):
        model.request([5] * 1000, max_new_tokens=4)
    assert isinstance(good.all(), Chunk)


def test_no_memory_for_a_prompt_is_that_requests_failure(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer_of(model, "def f(x):", 24)
    prefill = model.decoder.prefill

    def scarce(slot: int, token_ids: torch.Tensor, sparse_from: int, **part: int) -> torch.Tensor:
        if len(token_ids) == 17 and sparse_from == 17:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(slot, token_ids, sparse_from, **part)

    monkeypatch.setattr(model.decoder, "prefill", scarce)
    good, _ = ask(model, "def f(x):", 24)
    good.text += good.next().text  # it is under way
    bad = Reader()
    request = model.request([5] * 17, max_new_tokens=4)
    engine.submit(request, bad.items.put)
    assert isinstance(bad.all(), ResourceError)
    last = good.all()  # read anew with what it had, it goes on as if nothing had been
    assert isinstance(last, Chunk)
    assert last.generation is not None
    assert last.generation.token_ids == expected
    assert engine.state.running == 0


def answer_of(model: Model, prompt: str, count: int) -> tuple[int, ...]:
    last = ask(model, prompt, count)[0].all()
    assert isinstance(last, Chunk)
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
    first, _ = ask(model, "def f(x):", 20)
    error = first.all()
    assert isinstance(error, WisparseError)
    assert "the device is lost" in str(error)
    assert len(answer_of(model, "import", 5)) == 5


def test_unread_weights_are_told_between_steps(model: Model, engine: Engine) -> None:
    engine.start_measuring()
    answer_of(model, "def f(x):", 10)
    unread = engine.ask(model.decoder.realised_sparsity).result(timeout=30)
    assert unread is not None
    assert 0.3 < unread < 0.5
    engine.stop_measuring()


def test_tokens_of_slow_steps_are_handed_on_one_by_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = model.decoder.step, []
    reader = Reader()

    def slow(*arguments: object) -> torch.Tensor:
        seen.append(reader.items.qsize())
        time.sleep(0.002)
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model.decoder, "step", slow)
    request = model.request(model.tokenizer.encode("import"), max_new_tokens=8)
    ticket = model.engine.submit(request, reader.items.put)
    model.engine.drive(lambda: ticket.done)
    assert seen == [1, 2, 3, 4, 5, 6, 7]  # each step finds every token before it handed on


def test_tokens_of_fast_steps_come_together_and_keep_nobody_waiting(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [model.generate(prompt, max_new_tokens=40).token_ids for prompt in ("import", "def f(x):")]
    monkeypatch.setattr("wisparse.runtime.generation.scheduler._TOGETHER_SECONDS", 1e9)
    together = list(model.stream_together("import", max_new_tokens=40))
    assert [len(chunks) for chunks in together] == [1, 39]  # the first one is not kept back
    assert tuple(chunk.token_id for chunks in together for chunk in chunks) == alone[0]

    step, rows = model.decoder.step, []
    early, late, tickets = Reader(), Reader(), []

    def submit(reader: Reader, prompt: str) -> None:
        request = model.request(model.tokenizer.encode(prompt), max_new_tokens=40)
        tickets.append(model.engine.submit(request, reader.items.put))

    def watched(tokens: torch.Tensor, *more: object) -> torch.Tensor:
        rows.append(int((tokens >= 0).sum()))
        if len(rows) == 5:  # in the middle of what comes together
            submit(late, "def f(x):")
        if len(rows) == 10:
            model.engine.cancel(tickets[0])
        return step(tokens, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(model.decoder, "step", watched)
    submit(early, "import")
    model.engine.drive(lambda: len(tickets) == 2 and tickets[1].done)
    assert rows == [1] * 5 + [2] * 5 + [1] * 34  # in before the very next step, and out
    last = late.all()
    assert isinstance(last, Chunk)
    assert last.generation is not None
    assert last.generation.token_ids == alone[1]
    given = [chunk.token_id for chunk in _drained(early)]
    assert given == list(alone[0][: len(given)])
    assert model.engine.state.running == 0


def test_what_a_failed_step_left_behind_is_handed_on_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wisparse.runtime.generation.scheduler._TOGETHER_SECONDS", 1e9)
    expected = [model.generate(prompt, max_new_tokens=6).token_ids for prompt in ("import", "def f(x):")]
    step, steps = model.decoder.step, 0

    def broken(*arguments: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        chosen = step(*arguments)  # type: ignore[arg-type]
        if steps == 5:  # the last one of both, and that of the last row is no number
            chosen[-1] = -1
        return chosen

    monkeypatch.setattr(model.decoder, "step", broken)
    readers = [Reader(), Reader()]
    tickets = []
    for reader, prompt in zip(readers, ("import", "def f(x):"), strict=True):
        request = model.request(model.tokenizer.encode(prompt), max_new_tokens=6)
        tickets.append(model.engine.submit(request, reader.items.put))
    model.engine.drive(lambda: all(ticket.done for ticket in tickets))
    assert [reader.items.qsize() for reader in readers] == [6, 6]  # the failed one's error is its last item
    ended = dict(zip(expected, (reader.all() for reader in readers), strict=True))
    (error,) = (last for last in ended.values() if isinstance(last, WisparseError))
    assert "not a number" in str(error)
    ((tokens, whole),) = ((tokens, last) for tokens, last in ended.items() if isinstance(last, Chunk))
    assert whole.generation is not None
    assert whole.generation.token_ids == tokens


def test_a_request_taken_back_while_others_are_taken_back_leaves_nothing(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted and cancelled between two loops of the thread that handles both."""
    scheduler, late = engine.scheduler, []
    finish = scheduler.finish

    def hooked(request: Request, reason: str) -> None:
        finish(request, reason)
        if reason == "cancelled" and not late:
            late.append(ask(model, "import", 80)[1])
            engine.cancel(late[0])

    monkeypatch.setattr(scheduler, "finish", hooked)
    reader, request = ask(model, "def f(x):", 80)
    reader.next()
    engine.cancel(request)
    assert len(answer_of(model, "import", 3)) == 3
    assert late[0].done
    engine.call(lambda: None)
    assert scheduler.slots == [None] * 3
    assert not scheduler.waiting


def test_what_fails_twice_ends_one_request_and_not_the_engine(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails, and so does the text of the tokens that it left behind."""
    monkeypatch.setattr("wisparse.runtime.generation.scheduler._TOGETHER_SECONDS", 1e9)
    step, steps = model.decoder.step, 0

    def broken(*arguments: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("the device is lost")
        return step(*arguments)  # type: ignore[arg-type]

    add = Detokenizer.add

    def unreadable(self: Detokenizer, token: int) -> str:
        if steps:
            raise WisparseError("no text")
        return add(self, token)

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "step", broken)
        patch.setattr(Detokenizer, "add", unreadable)
        error = ask(model, "def f(x):", 20)[0].all()
    assert isinstance(error, WisparseError)
    assert "no text" in str(error)
    assert len(answer_of(model, "import", 5)) == 5


def test_a_failure_of_one_request_spares_its_neighbours(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer_of(model, "def f(x):", 60)
    good, _ = ask(model, "def f(x):", 60)
    good.next()
    # A receiver that fails, a future that nobody waits for any more, and a tokenizer that fails in any way.
    bad = Reader()

    def refuse(item: Chunk | WisparseError) -> None:
        bad.items.put(item)
        raise ValueError("no reader")

    engine.submit(model.request(model.tokenizer.encode("import"), max_new_tokens=5), refuse)
    assert isinstance(bad.next(), Chunk)
    forgotten = engine.ask(lambda: time.sleep(0.01))
    forgotten.cancel()
    add = Detokenizer.add

    def failing(self: Detokenizer, token: int) -> str:
        if self in broken:
            raise ZeroDivisionError("a bug")
        return add(self, token)

    monkeypatch.setattr(Detokenizer, "add", failing)
    broken: list[Detokenizer] = []
    make = model.text.detokenizer
    monkeypatch.setattr(model.text, "detokenizer", lambda visible: broken.append(make(visible)) or broken[-1])
    assert isinstance(ask(model, "class A:", 5)[0].all(), WisparseError)
    last = good.all()
    assert isinstance(last, Chunk)
    assert last.generation is not None
    assert last.generation.token_ids == expected
    assert isinstance(bad.all(), WisparseError)


# ---------------------------------------------------------------------- without a server: the callers run the steps


def test_calls_from_several_threads_are_decoded_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["def f(x):", "import", "class A:"]
    alone = [model.generate(prompt, max_new_tokens=30).token_ids for prompt in prompts]
    rows: list[int] = []
    step, inside = model.decoder.step, threading.Event()

    def counting(tokens: torch.Tensor, *settings: object) -> torch.Tensor:
        rows.append(int((tokens >= 0).sum()))
        if not inside.is_set():  # the first waits until the others have asked
            inside.set()
            until = time.monotonic() + 60
            while len(model.engine._open) < 3 and time.monotonic() < until:
                time.sleep(0.001)
        return step(tokens, *settings)  # type: ignore[arg-type]

    monkeypatch.setattr(model.decoder, "step", counting)
    found: dict[int, tuple[int, ...]] = {}

    def call(number: int) -> None:
        if number:
            inside.wait(60)
            found[number] = tuple(chunk.token_id for chunk in model.stream(prompts[number], max_new_tokens=30))
        else:
            found[0] = model.generate(prompts[0], max_new_tokens=30).token_ids

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(3)] == alone
    assert max(rows) > 1
    assert len(rows) < 3 * 29  # fewer steps than one after the other
    assert model.engine.state.running == 0


def test_an_unfinished_stream_keeps_nobody_waiting_for_ever(model: Model) -> None:
    wanted = [chunk.token_id for chunk in model.stream("import", max_new_tokens=20)]
    expected = [model.generate("def f(x):", max_new_tokens=8).token_ids] * 5
    streams = [model.stream("import", max_new_tokens=20) for _ in range(3)]
    begun = [next(stream) for stream in streams]
    # Every place is taken by a stream that nobody reads: they are moved on, and their chunks are kept for them.
    assert [answer.token_ids for answer in model.generate(["def f(x):"] * 5, max_new_tokens=8)] == expected
    for first, stream in zip(begun, streams, strict=True):
        assert [first.token_id, *(chunk.token_id for chunk in stream)] == wanted
    forgotten = model.stream("import", max_new_tokens=90)
    next(forgotten)
    del forgotten
    assert model.generate("def f(x):", max_new_tokens=8).token_ids == expected[0]
    assert model.engine.state == type(model.engine.state)(0, 0)


def test_chunks_for_an_event_loop(model: Model) -> None:
    prompts = ["def f(x):", "import", "class A:", "x"]
    alone = [model.generate(prompt, max_new_tokens=12) for prompt in prompts]

    async def read(prompt: str) -> list[Chunk]:
        return [chunk async for chunk in model.astream(prompt, max_new_tokens=12)]

    async def leave(prompt: str) -> None:
        stream = model.astream(prompt, max_new_tokens=90)
        await anext(stream)
        await stream.aclose()

    async def everything() -> list[list[Chunk]]:
        read_all = asyncio.gather(*(read(prompt) for prompt in prompts))
        await asyncio.gather(*(leave(prompt) for prompt in prompts))
        return await read_all

    for chunks, expected in zip(asyncio.run(everything()), alone, strict=True):
        assert tuple(chunk.token_id for chunk in chunks) == expected.token_ids
        assert chunks[-1].generation is not None
        assert "".join(chunk.text for chunk in chunks) == expected.text
    with pytest.raises(UsageError, match="max_new_tokens"):
        model.astream("x", max_new_tokens=0)  # at once
    with pytest.raises(UsageError, match="one prompt"):
        model.astream(["x", "y"])


def test_an_error_of_a_step_reaches_every_caller_as_it_was_raised(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> torch.Tensor:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "step", broken)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            model.generate(["x", "y"], max_new_tokens=3)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            list(model.stream("x", max_new_tokens=3))
    assert model.engine.state.running == 0
    assert len(model.generate("x", max_new_tokens=3).token_ids) == 3


def test_an_interrupted_call_leaves_the_others_what_they_have(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [chunk.text for chunk in model.stream("import", max_new_tokens=20)]
    stream = model.stream("import", max_new_tokens=20)
    found = [next(stream).text]
    step, steps = model.decoder.step, 0

    def interrupted(*arguments: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model.decoder, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate("def f(x):", max_new_tokens=20)
    assert found + [chunk.text for chunk in stream] == expected
    assert model.engine.state.running == 0


def test_a_model_that_is_closed_ends_what_is_under_way(example_model: Path, tmp_path: Path) -> None:
    model = wisparse.load(make_bundle(example_model, tmp_path / "bundle", 0.4), backend="torch", max_seq_len=64)
    stream = model.stream("import", max_new_tokens=20)
    next(stream)
    reader, _ = ask(model, "def f(x):", 4)
    model.close()
    assert isinstance(reader.all(), UsageError)
    with pytest.raises(UsageError, match="closed before the answer was there"):
        next(stream)
    with pytest.raises(UsageError, match="the model was closed: load it again"):
        model.generate("x")
    model.close()


def test_closing_ends_a_servers_thread(example_model: Path, tmp_path: Path) -> None:
    model = wisparse.load(make_bundle(example_model, tmp_path / "bundle", 0.4), backend="torch", max_seq_len=64)
    model.engine.start(max_queue=5)
    thread = model.engine._thread
    assert thread is not None
    reader, _ = ask(model, "def f(x):", 50)
    reader.next()
    model.close()
    assert isinstance(reader.all(), UsageError)
    thread.join(20)
    assert not thread.is_alive()
    model.engine.stop()


def test_what_later_requests_need_is_there_before_a_server_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    for name in ("prepare_prompts", "prepare_batches"):
        monkeypatch.setattr(model.decoder, name, lambda: asked.append(model.engine._thread is None))
    model.engine.start(max_queue=1)
    model.engine.stop()
    assert asked == [True, True]
