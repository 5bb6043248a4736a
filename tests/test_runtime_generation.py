"""Generating text: batches, limits, stops, streams, threads, long use."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from bundle_maker import make_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_models import make_checkpoint

import wisparse
from wisparse.cli import main
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import AccessError, BundleError, ContextLengthError, UsageError, WisparseError
from wisparse.formats.weight_types import sparse_from
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.decoding.decoder import default_max_seq_len, weight_bytes
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.model import Model
from wisparse.runtime.tokenizer import stop_ids


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("generation") / "bundle", 0.4)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    """Three slots, so that batches are decoded side by side and wait for each other too."""
    return wisparse.load(bundle, dtype="float32", backend="torch", max_batch=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("tiny")
    return Bundle.open(make_bundle(make_checkpoint("llama", folder / "source"), folder / "bundle"))


def test_a_model_shows_what_it_is(bundle: Path) -> None:
    with wisparse.load(bundle, dtype="float32", backend="torch", max_seq_len=64) as model:
        shown = repr(model)
        for part in (repr(str(bundle)), "llama, 6 blocks", "sparsity 0.4", "torch on cpu, float32", "max_seq_len 64"):
            assert part in shown, shown
        assert "closed" not in shown
    assert repr(model).endswith("; closed>")


def test_a_models_tokenizer_encodes_and_decodes(model: Model, tiny: Bundle) -> None:
    ids = model.tokenizer.encode("def f(x):")
    assert model.generate(ids, max_new_tokens=4).text == model.generate("def f(x):", max_new_tokens=4).text
    assert model.tokenizer.decode(ids) == "def f(x):"
    decoder = make_decoder(tiny, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=8, backend="torch")
    assert tiny.read_bytes("tokenizer.json") is None
    with pytest.raises(UsageError, match="this bundle has no tokenizer"):
        _ = Model(tiny, decoder, None).tokenizer


def tiny_scheduler(tiny: Bundle, max_seq_len: int = 32, max_batch: int = 1) -> Scheduler:
    return Scheduler(
        make_decoder(
            tiny,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            backend="torch",
        )
    )


def run(scheduler: Scheduler) -> int:
    steps = 0
    while scheduler.busy:
        scheduler.step()
        steps += 1
    return steps


SOLVED = ">>> 1 + 2\n3\n>>> 4 + 4\n8\n>>> 'ab' + 'c'\n'abc'\n>>> 10 + 7\n"


def test_text_of_the_real_model(model: Model) -> None:
    answer = model.generate(SOLVED, max_new_tokens=40, stop="\n>>>", measure_sparsity=True)
    assert answer.text == "17"
    assert answer.finish_reason == "stop"
    assert answer.prompt_tokens == len(model.text.encode(SOLVED))
    assert 0.2 < answer.realised_sparsity < 0.6
    assert answer.prompt_tok_per_s > 0
    assert answer.generation_tok_per_s > 0
    assert answer.peak_memory_bytes > 10**8


PROMPTS = ["def f(", ">>> 12 + 30\n", SOLVED, "import ", "class A:\n    def", "x"]


@given(
    prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 0.9]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 5),
    prefill=st.sampled_from(["dense", "half", "all"]),
    tokens=st.integers(1, 14),
)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_gives_what_one_at_a_time_gives(
    model: Model, prompts: list[str], temperature: float, top_p: float, seed: int, prefill: str, tokens: int
) -> None:
    kwargs = {
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "prefill": prefill,
        "max_new_tokens": tokens,
        "stop": ["\n\n"],
    }
    together = model.generate(prompts, **kwargs)
    alone = [model.generate(prompt, **kwargs) for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason


def test_a_stream_gives_what_generate_gives(model: Model) -> None:
    kwargs = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3, "stop": ["):"]}
    answer = model.generate("def area(", **kwargs)
    chunks = list(model.stream("def area(", **kwargs))
    assert "".join(chunk.text for chunk in chunks) == answer.text == chunks[-1].generation.text
    assert tuple(chunk.token_id for chunk in chunks) == answer.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == answer.finish_reason
    assert "):" not in answer.text


def test_seeds(model: Model) -> None:
    first, again, other = (
        model.generate("import ", max_new_tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first.token_ids == again.token_ids != other.token_ids
    fresh = model.generate("import ", max_new_tokens=12, temperature=1.0)
    assert model.generate("import ", max_new_tokens=12, temperature=1.0, seed=fresh.seed).token_ids == fresh.token_ids
    assert model.generate("import ", max_new_tokens=2).seed is None


def test_the_context_is_filled_to_its_last_position(tiny: Bundle) -> None:
    for prompt_length in (1, 20, 31, 32):
        scheduler = tiny_scheduler(tiny)
        job = scheduler.add(Request([5] * prompt_length))
        run(scheduler)
        assert job.finish_reason == "length"
        # The last token needs no position: nothing is read after it.
        assert prompt_length + len(job.output_token_ids) == 33
    for prompt_length in (0, 33):
        with pytest.raises(ContextLengthError):
            tiny_scheduler(tiny).validate(Request([5] * prompt_length))


def test_a_prompt_longer_than_the_context(bundle: Path) -> None:
    short = wisparse.load(bundle, max_seq_len=16, backend="torch")
    with pytest.raises(ContextLengthError, match=r"the prompt has \d+ tokens and the context holds 16"):
        short.generate("x = 1\n" * 16)
    answer = short.generate("x = ", max_new_tokens=None)
    assert answer.finish_reason in ("length", "stop")
    assert answer.prompt_tokens + len(answer.token_ids) <= 17


def test_a_freed_slot_takes_the_next_prompt(tiny: Bundle) -> None:
    scheduler = tiny_scheduler(tiny, max_batch=2)
    jobs = [scheduler.add(Request([5 + i] * 3, max_new_tokens=count)) for i, count in enumerate((2, 9, 4, 1))]
    steps = run(scheduler)
    assert [len(job.output_token_ids) for job in jobs] == [2, 9, 4, 1]
    # 4 prefills, and 8 decodes for the longest: the others fit beside it.
    assert steps == 12


def test_jobs_can_be_taken_back(tiny: Bundle) -> None:
    scheduler = tiny_scheduler(tiny)
    running, waiting, last = (scheduler.add(Request([token], max_new_tokens=5)) for token in (5, 6, 7))
    scheduler.step()
    scheduler.finish(waiting, "cancelled")
    scheduler.finish(running, "cancelled")
    run(scheduler)
    assert (running.finish_reason, len(running.output_token_ids)) == ("cancelled", 1)
    assert (waiting.finish_reason, waiting.output_token_ids) == ("cancelled", [])
    assert last.finish_reason == "length"
    scheduler.finish(last, "cancelled")
    assert last.finish_reason == "length"


def test_stop_tokens_end_a_text_and_have_no_text(model: Model) -> None:
    free = model.generate("def f(", max_new_tokens=10)
    stop = free.token_ids[4]
    scheduler = Scheduler(model.decoder)
    job = scheduler.add(Request(model.text.encode("def f("), 10, stop_token_ids=frozenset({stop})))
    run(scheduler)
    assert job.finish_reason == "stop"
    assert tuple(job.output_token_ids) == free.token_ids[: free.token_ids.index(stop) + 1]


def test_a_special_token_can_be_a_stop_string(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = model.decoder.step, 0

    def step(tokens: torch.Tensor, *args: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return torch.ones_like(tokens) if steps % 5 == 0 else real(tokens, *args)  # now and then <|user|>

    monkeypatch.setattr(model.decoder, "step", step)
    free = model.generate("x = 1\n", max_new_tokens=10)
    steps = 0
    stopped = model.generate("x = 1\n", max_new_tokens=10, stop="<|user|>")
    assert len(free.token_ids) == 10
    assert stopped.token_ids == free.token_ids[:6]
    assert stopped.token_ids[-1] == 1
    assert stopped.finish_reason == "stop"
    assert free.text.startswith(stopped.text)


def test_stop_ids_are_the_union(tiny: Bundle, example_model: Path, tmp_path: Path) -> None:
    assert stop_ids(tiny, None) == {2}
    source = tmp_path / "source"
    shutil.copytree(example_model, source)

    def edit(name: str, **changes: object) -> None:
        (source / name).write_text(json.dumps({**json.loads((source / name).read_text()), **changes}))

    edit("config.json", eos_token_id=[5, 6])
    edit("generation_config.json", eos_token_id=7)
    edit("tokenizer_config.json", eos_token="<|user|>")
    opened = wisparse.load(make_bundle(source, tmp_path / "bundle"), backend="torch")
    assert opened.stop_ids == {5, 6, 7, 1}


def test_prompts_in_all_their_forms(model: Model) -> None:
    text = model.generate("x = ", max_new_tokens=4)
    assert model.generate(model.text.encode("x = "), max_new_tokens=4).token_ids == text.token_ids
    chat = model.generate([{"role": "user", "content": "x = "}], max_new_tokens=4)
    assert chat.prompt_tokens == text.prompt_tokens + 2
    assert model.generate("x = ", chat_template=True, max_new_tokens=4).token_ids == chat.token_ids
    assert model.generate("x = ", chat_template=False, max_new_tokens=4).token_ids == text.token_ids
    with_system = model.generate("x = ", system_prompt="Be brief.", max_new_tokens=4)
    assert with_system.prompt_tokens > chat.prompt_tokens
    both = model.generate(["x = ", "y = "], max_new_tokens=4)
    assert both[0].token_ids == text.token_ids
    conversations = model.generate([[{"role": "user", "content": "x = "}]], max_new_tokens=4)
    assert [answer.token_ids for answer in conversations] == [chat.token_ids]


def test_a_bundle_without_a_tokenizer_takes_ids(tiny: Bundle) -> None:
    plain = wisparse.load(tiny.folder, backend="torch")
    answers = plain.generate([[5, 6, 7], [8]], max_new_tokens=6)
    assert [len(answer.token_ids) for answer in answers] == [6, 6]
    assert answers[0].text == ""
    assert plain.generate([8], max_new_tokens=6).token_ids == answers[1].token_ids
    with pytest.raises(UsageError, match="no tokenizer: give token ids"):
        plain.generate("text")


def test_an_instruction_model_gets_its_template(example_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(example_model, source)
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
    )
    (source / "chat_template.jinja").write_text(template + "{% endfor %}<|assistant|>")
    model = wisparse.load(make_bundle(source, tmp_path / "bundle"), backend="torch")
    plain = model.generate("x", chat_template=False, max_new_tokens=1)
    assert model.generate("x", max_new_tokens=1).prompt_tokens == plain.prompt_tokens + 2


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (5, {}, "prompt: expected a text"),
        ([{"content": "x"}], {}, "a message with a role"),
        ([{"role": "user", "content": "x"}, 5], {}, "one kind of thing in a list"),
        ([10**6], {}, "prompt: expected token ids from 0 to 8191"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens: expected a positive integer"),
        ("x", {"prefill": "none"}, "prefill: expected one of dense, half, all"),
        ("x", {"stop": [""]}, "stop: expected a text"),
        ("x", {"temperature": -1.0}, "temperature"),
        ("x", {"system_prompt": "y", "chat_template": False}, "needs the chat template"),
        ("", {}, "the prompt has no tokens"),
        ([], {}, "expected a text"),
        ([5, 6], {"system_prompt": "y"}, "token ids stand for themselves"),
        ([[]], {}, "empty list|one prompt"),
    ],
)
def test_bad_arguments(model: Model, prompt: object, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model.generate(prompt, **settings)
    with pytest.raises(UsageError, match=message):
        model.stream(prompt, **settings)  # at once, not at the first chunk


def test_bad_loading_arguments(bundle: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ({"device": "tpu"}, "device: expected auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"dtype": "int4"}, "dtype: expected one of auto, bfloat16, float16, float32"),
        ({"prefill": "some"}, "prefill: expected"),
        ({"max_seq_len": 4096}, "max_seq_len: expected 1 to the model's context of 2048"),
    ):
        with pytest.raises(UsageError, match=message):
            wisparse.load(bundle, backend="torch", **arguments)
    with pytest.raises(AccessError):
        wisparse.load(tmp_path / "nowhere")
    with pytest.raises(BundleError):
        wisparse.load(tmp_path)


def test_a_weight_that_is_no_number_is_seen_at_load(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    copy.mkdir()
    for file in bundle.iterdir():
        data = bytearray(file.read_bytes())
        if file.name.startswith("model-"):
            data[-1000:-992] = b"\xff" * 8
        (copy / file.name).write_bytes(data)
    with pytest.raises(BundleError, match="NaN or infinity"):
        wisparse.load(copy, backend="torch")


def test_leaving_a_stream_early_leaves_the_model_usable(model: Model) -> None:
    expected = model.generate("def f(", max_new_tokens=8).token_ids
    for chunk in model.stream("import os\n", max_new_tokens=50):
        if chunk.token_id:
            break
    gc.collect()
    assert model.generate("def f(", max_new_tokens=8).token_ids == expected
    stream = model.stream("import os\n", max_new_tokens=50)
    next(stream)
    assert model.generate("def f(", max_new_tokens=8).token_ids == expected
    stream.close()
    assert model.generate("def f(", max_new_tokens=8).token_ids == expected


def test_a_stream_may_be_pulled_by_a_thread_pool(model: Model) -> None:
    expected = model.generate("def f(", max_new_tokens=8).token_ids
    wanted = [chunk.token_id for chunk in model.stream("import os\n", max_new_tokens=12)]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        stream = first.submit(model.stream, "import os\n", max_new_tokens=12).result()
        found = [first.submit(next, stream).result()]
        waiting = first.submit(model.generate, "def f(", max_new_tokens=8)  # by the thread that pulled last
        found += second.submit(list, stream).result()
        assert waiting.result().token_ids == expected
    assert [chunk.token_id for chunk in found] == wanted


def test_without_a_seed_each_prompt_of_a_list_has_its_own(model: Model) -> None:
    first, second = model.generate(["import "] * 2, max_new_tokens=12, temperature=1.0)
    assert first.seed != second.seed
    again = model.generate("import ", max_new_tokens=12, temperature=1.0, seed=second.seed)
    assert again.token_ids == second.token_ids
    given = model.generate(["import "] * 2, max_new_tokens=12, temperature=1.0, seed=5)
    assert [one.seed for one in given] == [5, 5]
    assert given[0].token_ids == given[1].token_ids


def test_the_speed_told_is_that_of_the_clock(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # What happens between two tokens (text, printing, a slow reader) takes the user's time too.
    monkeypatch.setattr("wisparse.runtime.generation.scheduler._TOGETHER_SECONDS", 0.0)
    began = time.perf_counter()
    answer = None
    for chunk in model.stream([5, 6, 7], max_new_tokens=4):
        time.sleep(0.05)
        answer = chunk.generation
    seconds = time.perf_counter() - began
    assert answer is not None
    assert 3 * 0.05 <= answer.generation_seconds <= seconds
    assert answer.generation_tok_per_s == (len(answer.token_ids) - 1) / answer.generation_seconds


@pytest.mark.parametrize("method", ["prefill", "decode"])
def test_an_interrupt_anywhere_leaves_the_model_usable(
    model: Model, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.generate(["def f(", "x = "], max_new_tokens=8)
    real = model.decoder._forward
    calls = 0

    def interrupted(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == {"prefill": 2, "decode": 6}[method]:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(model.decoder, "_forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(["def f(", "x = "], max_new_tokens=8)
    monkeypatch.undo()
    again = model.generate(["def f(", "x = "], max_new_tokens=8)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]


def test_threads_wait_for_each_other(model: Model) -> None:
    expected = {prompt: model.generate(prompt, max_new_tokens=10).token_ids for prompt in PROMPTS}
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for prompt in PROMPTS[number % 3 :]:
                if number % 2:
                    found[number, prompt] = model.generate(prompt, max_new_tokens=10).token_ids
                else:
                    chunks = list(model.stream(prompt, max_new_tokens=10))
                    found[number, prompt] = tuple(chunk.token_id for chunk in chunks)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(found) == 2 * (6 + 5 + 4)
    for (_, prompt), tokens in found.items():
        assert tokens == expected[prompt]


def test_a_closed_model_says_so(bundle: Path) -> None:
    with wisparse.load(bundle, backend="torch") as model:
        model.generate("x", max_new_tokens=1)
    with pytest.raises(UsageError, match="closed"):
        model.generate("x")
    model.decoder.close()


def test_output_that_is_no_number_is_an_error(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = tiny_scheduler(tiny)
    scheduler.add(Request([5]))
    decoder = scheduler.decoder
    monkeypatch.setattr(decoder, "prefill", lambda *args, **part: torch.full((101,), torch.nan))
    with pytest.raises(WisparseError, match="not a number"):
        scheduler.step()


def test_sparse_from() -> None:
    assert [sparse_from(policy, 7) for policy in ("dense", "half", "all")] == [7, 4, 0]
    assert [sparse_from("half", length) for length in (1, 2, 3)] == [1, 1, 2]


def test_default_max_seq_len(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    position = 2 * 3 * 2 * 16 * 4  # keys and values, blocks, heads, head_dim, float32

    def with_free(count: int, max_batch: int = 1, device: str = "cpu") -> int:
        monkeypatch.setattr(
            "wisparse.runtime.decoding.decoder.available_bytes", lambda device: count * 4 * position + 1000
        )
        return default_max_seq_len(tiny.config, torch.float32, torch.device(device), max_batch, 1000)

    assert tiny.config.max_position_embeddings == 256
    assert with_free(10**6) == 256
    assert with_free(0) == 256  # the fewest, too
    object.__setattr__(tiny.config, "max_position_embeddings", 5000)
    try:
        assert with_free(10**6) == 5000
        assert with_free(1000) == 768
        assert with_free(1000, max_batch=3) == 256
        assert with_free(1200) == 1024
    finally:
        object.__setattr__(tiny.config, "max_position_embeddings", 256)


@pytest.mark.exhaustive
def test_many_prompts_do_not_grow(model: Model) -> None:
    process = psutil.Process()

    def burst(count: int) -> None:
        for number in range(count):
            length = 1 + number % 20
            model.generate("x = 1\n" * length, max_new_tokens=4, temperature=float(number % 2), seed=number)
            stream = model.stream("y", max_new_tokens=8)
            next(stream)
            stream.close()

    burst(30)
    gc.collect()
    before = process.memory_info().rss
    burst(120)
    gc.collect()
    assert process.memory_info().rss - before < 8 << 20


def test_what_weights_take_is_counted_in_memory_not_on_disk(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    tensors = opened.checkpoint.tensors
    numbers = sum(info.nbytes // info.dtype.itemsize for info in tensors.values())
    assert weight_bytes(opened, torch.bfloat16, "native") == 2 * numbers
    assert weight_bytes(opened, torch.float32, "native") == 4 * numbers
    assert numbers < weight_bytes(opened, torch.bfloat16, "int8") < 2 * numbers


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
                                   RuntimeError("CUDA error: out of memory"), MemoryError()])  # fmt: skip
def test_no_memory_while_loading_is_a_sentence(
    bundle: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr("wisparse.runtime.torch.decoder.KVCache", full)
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(bundle), "--backend", "torch", "--prompt", "x"])
    assert ended.value.code == 5
    said = capsys.readouterr().err
    assert "not enough memory on cpu to load the model" in said
    assert "Traceback" not in said
