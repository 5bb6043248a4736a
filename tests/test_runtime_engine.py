"""The engine: many requests on one decoder, from many threads, each as if it were alone."""

import asyncio
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import wisparse
from wisparse import Model, ResourceError, UsageError, WisparseError
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation.engine import Engine, EngineState, QueueFullError
from wisparse.runtime.generation.logits import LogitsProcessor
from wisparse.runtime.generation.request import Chunk, Generation, Request
from wisparse.runtime.tokenizer import Detokenizer

TOGETHER = "wisparse.runtime.decoding.decoder.Decoder.delivery_interval"
IDLE = EngineState(0, 0)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    return wisparse.load(bundle, dtype="float32", backend="torch", max_batch=3, max_seq_len=96)


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    model.engine.start(max_queue=200)
    yield model.engine
    model.engine.stop(drain=False)


class Reader:
    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Chunk | WisparseError] = queue.SimpleQueue()
        self.text = ""

    def next(self) -> Chunk:
        item = self.items.get(timeout=60)
        assert isinstance(item, Chunk)
        self.text += item.text
        return item

    def answer(self) -> Generation:
        while (chunk := self.next()).finish_reason is None:
            pass
        assert (chunk.finish_reason, self.text) == (chunk.generation.finish_reason, chunk.generation.text)
        return chunk.generation

    def error(self) -> WisparseError:
        while isinstance(item := self.items.get(timeout=60), Chunk):
            assert item.finish_reason is None
        return item

    def rest(self) -> list[Chunk]:
        return [self.next() for _ in range(self.items.qsize())]


def ask(model: Model, prompt: str, count: int) -> tuple[Reader, Request]:
    reader, request = Reader(), model.request(model.tokenizer.encode(prompt), max_new_tokens=count)
    return reader, model.engine.submit(request, reader.items.put)


def answer_of(model: Model, prompt: str, count: int) -> tuple[int, ...]:
    return ask(model, prompt, count)[0].answer().token_ids


def before_steps(model: Model, monkeypatch: pytest.MonkeyPatch, hook: Callable[[int, torch.Tensor], object]) -> None:
    """Call ``hook`` with each decode step's number, from 1 on, and its tokens."""
    step, numbers = model.decoder.step, itertools.count(1)

    def hooked(tokens: torch.Tensor, *more: object) -> torch.Tensor:
        hook(next(numbers), tokens)
        return step(tokens, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(model.decoder, "step", hooked)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wisparse-engine"]


def in_threads(work: Callable[[int], object], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_submitting_and_cancelling_at_once_leaves_nothing_behind(model: Model, engine: Engine) -> None:
    """From several threads; a request is taken back before it was queued, while it waits, or while it runs."""
    ids = model.tokenizer.encode("import")

    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(40):
            request = engine.submit(model.request(ids, max_new_tokens=rng.randint(1, 90)), lambda item: None)
            if rng.random() < 0.3:
                time.sleep(0.002 * rng.random())
            for _ in range(rng.randint(1, 2)):
                engine.cancel(request)

    in_threads(client, 4)
    engine.call(lambda: None)
    assert (engine.state, engine.scheduler.slots) == (IDLE, [None] * 3)
    assert (list(engine.scheduler.waiting), engine.scheduler.prefilling) == ([], None)
    assert len(answer_of(model, "import", 3)) == 3


def test_the_queue_has_a_bound(model: Model) -> None:
    engine = model.engine
    engine.start(max_queue=2)
    try:
        asked = [ask(model, "def f(x):", 90) for _ in range(5)]
        asked[2][0].next()
        assert engine.state == EngineState(3, 2)
        with pytest.raises(QueueFullError, match="2 requests are waiting already"):
            ask(model, "import", 1)
        for _, request in asked:
            engine.cancel(request)
        with pytest.raises(UsageError, match="a server runs on this model already"):
            engine.start(max_queue=2)
    finally:
        engine.stop()
    assert len(model.generate(["import"] * 9, max_new_tokens=1)) == 9  # without a server there is none


def test_stopping_finishes_what_is_under_way_unless_told_not_to(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    for name in ("prepare_prompts", "prepare_batches"):
        monkeypatch.setattr(model.decoder, name, lambda: prepared.append(not engine_threads()))
    ready: list[threading.Thread] = []
    monkeypatch.setattr(model.decoder, "prepare_thread", lambda: ready.append(threading.current_thread()))
    model.engine.start(max_queue=10)
    assert ready == engine_threads()
    assert prepared == [True] * (2 + len(model.bundle.levels))  # what later requests need is there before a server runs
    readers = [ask(model, "def f(x):", 12)[0] for _ in range(5)]
    model.engine.stop()
    assert [len(reader.answer().token_ids) for reader in readers] == [12] * 5
    assert model.generate("import", max_new_tokens=2).token_ids  # the calling thread runs its steps again
    model.engine.start(max_queue=10)
    readers = [ask(model, "def f(x):", 90)[0] for _ in range(4)]
    readers[0].next()
    model.engine.stop(drain=False)
    assert all(chunk.finish_reason is None for reader in readers for chunk in reader.rest())


def test_no_memory_for_a_prompt_ends_its_request(model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer_of(model, "def f(x):", 24)
    prefill = model.decoder.prefill

    def scarce(slot: int, token_ids: torch.Tensor, sparse_from: int, **part: int) -> torch.Tensor:
        if len(token_ids) == 17 and sparse_from == 17:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(slot, token_ids, sparse_from, **part)

    monkeypatch.setattr(model.decoder, "prefill", scarce)
    good, _ = ask(model, "def f(x):", 24)
    good.next()  # it is under way
    bad = Reader()
    engine.submit(model.request([5] * 17, max_new_tokens=4), bad.items.put)
    assert isinstance(bad.error(), ResourceError)
    assert good.answer().token_ids == expected  # read anew with what it had, it goes on as if nothing had been
    assert engine.state == IDLE


def test_tokens_of_slow_steps_are_handed_on_one_by_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    reader, request = ask(model, "import", 8)

    def slow(number: int, tokens: torch.Tensor) -> None:
        seen.append(reader.items.qsize())
        time.sleep(0.002)

    before_steps(model, monkeypatch, slow)
    model.engine.drive(lambda: request.done)
    assert seen == [1, 2, 3, 4, 5, 6, 7]  # each step finds every token before it handed on


def test_tokens_of_fast_steps_come_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [model.generate(prompt, max_new_tokens=40).token_ids for prompt in ("import", "def f(x):")]
    monkeypatch.setattr(TOGETHER, 1e9)
    together = list(model.stream_together("import", max_new_tokens=40))
    assert [len(chunks) for chunks in together] == [1, 39]  # the first one is not kept back
    assert tuple(chunk.token_id for chunks in together for chunk in chunks) == alone[0]
    rows: list[int] = []
    asked: list[tuple[Reader, Request]] = []

    def watched(number: int, tokens: torch.Tensor) -> None:
        rows.append(int((tokens >= 0).sum()))
        if number == 5:  # in the middle of what comes together
            asked.append(ask(model, "def f(x):", 40))
        if number == 10:
            model.engine.cancel(asked[0][1])

    before_steps(model, monkeypatch, watched)
    asked.append(ask(model, "import", 40))
    model.engine.drive(lambda: len(asked) == 2 and asked[1][1].done)
    assert rows == [1] * 5 + [2] * 5 + [1] * 34  # in before the very next step, and out
    assert asked[1][0].answer().token_ids == alone[1]
    given = tuple(chunk.token_id for chunk in asked[0][0].rest())
    assert given == alone[0][: len(given)]
    assert model.engine.state == IDLE


def test_what_a_failed_step_left_behind_is_handed_on_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOGETHER, 1e9)
    expected = {prompt: model.generate(prompt, max_new_tokens=6).token_ids for prompt in ("import", "def f(x):")}
    step, numbers = model.decoder.step, itertools.count(1)

    def broken(*arguments: object) -> torch.Tensor:
        chosen = step(*arguments)  # type: ignore[arg-type]
        if next(numbers) == 5:  # the last one of both, and that of the last row is no number
            chosen[-1] = -1
        return chosen

    monkeypatch.setattr(model.decoder, "step", broken)
    asked = {prompt: ask(model, prompt, 6) for prompt in expected}
    model.engine.drive(lambda: all(request.done for _, request in asked.values()))
    assert [reader.items.qsize() for reader, _ in asked.values()] == [6, 6]  # the failed one's error is its last item
    (failed,) = (prompt for prompt, (_, request) in asked.items() if request.error is not None)
    assert "not a number" in str(asked.pop(failed)[0].error())
    ((prompt, (reader, _)),) = asked.items()
    assert reader.answer().token_ids == expected[prompt]


def test_what_fails_twice_ends_one_request(model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOGETHER, 1e9)
    add, failed = Detokenizer.add, []

    def unreadable(self: Detokenizer, token: int) -> str:
        if failed:
            raise WisparseError("no text")
        return add(self, token)

    def broken(number: int, tokens: torch.Tensor) -> None:
        failed.append(number)
        if number == 4:
            raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        before_steps(model, patch, broken)
        patch.setattr(Detokenizer, "add", unreadable)
        assert "no text" in str(ask(model, "def f(x):", 20)[0].error())
    assert len(answer_of(model, "import", 5)) == 5


def test_a_failed_request_spares_its_neighbours(model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that fails, a future that fails or that nobody waits for any more, and a tokenizer that fails."""
    expected = answer_of(model, "def f(x):", 60)
    good, _ = ask(model, "def f(x):", 60)
    good.next()
    bad = Reader()

    def refuse(item: Chunk | WisparseError) -> None:
        bad.items.put(item)
        raise ValueError("no reader")

    engine.submit(model.request(model.tokenizer.encode("import"), max_new_tokens=5), refuse)
    bad.next()
    engine.ask(lambda: time.sleep(0.01)).cancel()
    asked = engine.ask(lambda: 1 // 0)
    asked.add_done_callback(lambda future: 1 // 0)
    assert isinstance(asked.exception(60), ZeroDivisionError)
    add = Detokenizer.add

    def failing(self: Detokenizer, token: int) -> str:
        if self in broken:
            raise ZeroDivisionError("a bug")
        return add(self, token)

    monkeypatch.setattr(Detokenizer, "add", failing)
    broken: list[Detokenizer] = []
    make = model.text.detokenizer
    monkeypatch.setattr(model.text, "detokenizer", lambda visible: broken.append(make(visible)) or broken[-1])
    ask(model, "class A:", 5)[0].error()
    assert good.answer().token_ids == expected
    bad.error()


def test_a_request_that_fails_alone_restarts_nobody(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that cannot be processed, in prefill and later, and logits that are not numbers: nobody else is computed again."""
    expected = {prompt: answer_of(model, prompt, 60) for prompt in ("def f(x):", "class A:")}
    prefill, prefilled, process = model.decoder.prefill, Mock(), LogitsProcessor.process

    def counted(slot: int, tokens: torch.Tensor, *more: object, **part: object) -> torch.Tensor:
        prefilled(len(tokens))
        return prefill(slot, tokens, *more, **part)  # type: ignore[arg-type]

    def failing(self: LogitsProcessor, logits: torch.Tensor) -> None:
        process(self, logits)
        if (count := self.sampling.seed) == 0:
            logits.fill_(torch.nan)
        elif count is not None and len(self._new) == count:
            raise WisparseError("this grammar fails")

    monkeypatch.setattr(model.decoder, "prefill", counted)
    monkeypatch.setattr(LogitsProcessor, "process", failing)
    monkeypatch.setattr(engine.scheduler, "start_over", Mock(side_effect=AssertionError("no slot was lost")))
    good = {prompt: ask(model, prompt, 60)[0] for prompt in expected}
    for reader in good.values():
        reader.next()
    for seed, error in ((0, "not a number"), (1, "this grammar fails"), (3, "this grammar fails")):
        bad, sampling = Reader(), SamplingParams(logit_bias={5: 1.0}, seed=seed)
        engine.submit(model.request([5] * 17, max_new_tokens=9, sampling=sampling), bad.items.put)
        assert error in str(bad.error())
    assert {prompt: reader.answer().token_ids for prompt, reader in good.items()} == expected
    assert [call.args for call in prefilled.call_args_list].count((17,)) == 3
    assert engine.state == IDLE


def test_calls_from_several_threads_are_decoded_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["def f(x):", "import", "class A:"]
    alone = [model.generate(prompt, max_new_tokens=30).token_ids for prompt in prompts]
    rows: list[int] = []
    inside = threading.Event()

    def counting(number: int, tokens: torch.Tensor) -> None:
        rows.append(int((tokens >= 0).sum()))
        if number == 1:  # the first waits until the others have asked
            inside.set()
            until = time.monotonic() + 60
            while sum(model.engine.state) < 3 and time.monotonic() < until:
                time.sleep(0.001)

    before_steps(model, monkeypatch, counting)
    found: dict[int, tuple[int, ...]] = {}

    def call(number: int) -> None:
        if number:
            inside.wait(60)
            found[number] = tuple(chunk.token_id for chunk in model.stream(prompts[number], max_new_tokens=30))
        else:
            found[0] = model.generate(prompts[0], max_new_tokens=30).token_ids

    in_threads(call, 3)
    assert [found[number] for number in range(3)] == alone
    assert max(rows) > 1
    assert len(rows) < 3 * 29  # fewer steps than one after the other
    assert model.engine.state == IDLE


def test_an_unfinished_stream_keeps_nobody_waiting_for_ever(model: Model) -> None:
    wanted = [chunk.token_id for chunk in model.stream("import", max_new_tokens=20)]
    expected = [model.generate("def f(x):", max_new_tokens=8).token_ids] * 5
    streams = [model.stream("import", max_new_tokens=20) for _ in range(3)]
    begun = [next(stream) for stream in streams]
    # Every place is taken by a stream that nobody reads: they are moved on, and their chunks are kept for them.
    assert [answer.token_ids for answer in model.generate(["def f(x):"] * 5, max_new_tokens=8)] == expected
    for first, stream in zip(begun, streams, strict=True):
        assert [first.token_id, *(chunk.token_id for chunk in stream)] == wanted
    forgotten, closed = (model.stream("import", max_new_tokens=90) for _ in range(2))
    next(forgotten)
    next(closed)
    del forgotten
    closed.close()
    assert model.generate("def f(x):", max_new_tokens=8).token_ids == expected[0]
    assert model.engine.state == IDLE


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
        assert "".join(chunk.text for chunk in chunks) == expected.text
    with pytest.raises(UsageError, match="max_new_tokens"):
        model.astream("x", max_new_tokens=0)  # at once
    with pytest.raises(UsageError, match="one prompt"):
        model.astream(["x", "y"])


def test_an_error_of_a_step_reaches_every_caller(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (lambda: model.generate(["x", "y"], max_new_tokens=3), lambda: list(model.stream("x"))):
        with monkeypatch.context() as patch:
            before_steps(model, patch, Mock(side_effect=ZeroDivisionError("a bug")))
            with pytest.raises(ZeroDivisionError, match="a bug"):
                call()
    assert model.engine.state == IDLE
    assert len(model.generate("x", max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_an_interrupted_call_spares_the_others(model: Model, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [chunk.text for chunk in model.stream("import", max_new_tokens=20)]
    stream = model.stream("import", max_new_tokens=20)
    found = [next(stream).text]
    with monkeypatch.context() as patch:
        if where == "decode":
            before_steps(model, patch, Mock(side_effect=[None, None, None, KeyboardInterrupt]))
        else:
            patch.setattr(model.decoder, "prefill", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.generate("def f(x):", max_new_tokens=20)
    assert found + [chunk.text for chunk in stream] == expected
    assert model.engine.state == IDLE


@pytest.mark.parametrize("served", [False, True])
def test_a_model_that_is_closed_ends_what_is_under_way(bundle: Path, served: bool) -> None:
    model = wisparse.load(bundle, backend="torch", max_seq_len=64)
    if served:
        model.engine.start(max_queue=5)
    threads, stream = engine_threads(), model.stream("import", max_new_tokens=50)
    assert len(threads) == served
    next(stream)
    reader, _ = ask(model, "def f(x):", 50)
    model.close()
    assert isinstance(reader.error(), UsageError)
    with pytest.raises(UsageError, match="closed before the request finished"):
        list(stream)
    with pytest.raises(UsageError, match="the model was closed: load it again"):
        model.generate("x")
    model.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
        model.engine.stop()


def test_closing_twice_at_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wisparse.load(bundle, backend="torch", max_seq_len=64)
    engine, ask_engine, errors = model.engine, model.engine.ask, list[Exception]()

    def close() -> None:
        try:
            engine.close()
        except Exception as error:
            errors.append(error)

    def overtaken(function: Callable[[], None]) -> Future[None]:  # another thread closes it just before
        monkeypatch.setattr(engine, "ask", ask_engine)
        thread = threading.Thread(target=close)
        thread.start()
        thread.join(1)
        return ask_engine(function)

    monkeypatch.setattr(engine, "ask", overtaken)
    close()
    assert (errors, engine.closed) == ([], True)


@pytest.mark.parametrize(
    ("users", "expected"), [("+-", [True, False]), ("++-+--", [True, False]), ("+-++--", [True, False] * 2)]
)
def test_measuring_follows_its_users(
    model: Model, monkeypatch: pytest.MonkeyPatch, users: str, expected: list[bool]
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(model.decoder, "measure_sparsity", lambda enabled, every: calls.append(enabled))
    engine = model.engine
    for user in users:
        (engine.start_measuring if user == "+" else engine.stop_measuring)()
    engine.call(int)
    assert calls == expected
