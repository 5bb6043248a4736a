"""Generating text: batches, limits, stops, streams, interrupts, long use."""

import gc
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from bundle_maker import cpu_decoder, make_bundle
from bundle_maker import run as run_to_the_end
from served import with_template

import wisparse
from wisparse import BundleError, ContextLengthError, Model, UsageError
from wisparse.formats.bundle import Bundle
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.memory import Paging, default_limits, weight_bytes
from wisparse.runtime.tokenizer import stop_ids


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    """Three slots, so that batches are decoded side by side and wait for each other too."""
    return wisparse.load(bundle, dtype="float32", backend="torch", max_batch=3)


@pytest.fixture(scope="module")
def tiny(variant_bundle: Callable[[str], Path]) -> Bundle:
    return Bundle.open(variant_bundle("llama"))


def tiny_scheduler(tiny: Bundle) -> Scheduler:
    return Scheduler(cpu_decoder(tiny, "torch", max_seq_len=32))


def test_seeds(model: Model) -> None:
    def sampled(prompt: Any = "import ", seed: int | None = None) -> Any:
        return model.generate(prompt, max_new_tokens=12, temperature=1.0, seed=seed)

    assert sampled(seed=1).token_ids == sampled(seed=1).token_ids != sampled(seed=2).token_ids
    assert model.generate("import ", max_new_tokens=2).seed is None
    # Without one each prompt of a list has its own.
    first, second = sampled(["import "] * 2)
    assert first.seed != second.seed
    assert sampled(seed=second.seed).token_ids == second.token_ids
    given = sampled(["import "] * 2, seed=5)
    assert [one.seed for one in given] == [5, 5]
    assert given[0].token_ids == given[1].token_ids


def test_the_context_is_filled_to_its_last_position(tiny: Bundle, bundle: Path) -> None:
    for prompt_length in (1, 20, 31, 32):
        scheduler = tiny_scheduler(tiny)
        request = run_to_the_end(scheduler, Request([5] * prompt_length))
        assert request.finish_reason == "length"
        # The last token needs no position: nothing is read after it.
        assert request.num_tokens == 33
    for prompt_length, error in ((0, UsageError), (33, ContextLengthError)):
        with pytest.raises(error, match="the prompt has"):
            tiny_scheduler(tiny).validate(Request([5] * prompt_length))
    short = wisparse.load(bundle, max_seq_len=16, backend="torch")
    with pytest.raises(ContextLengthError, match=r"the prompt has \d+ tokens and the context holds 16"):
        short.generate("x = 1\n" * 16)
    answer = short.generate("x = ", max_new_tokens=None)
    assert answer.prompt_tokens + len(answer.token_ids) <= 17


def test_stop_tokens_end_a_text_and_have_no_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    free = model.generate("def f(", max_new_tokens=10)
    stop = free.token_ids[4]
    scheduler = Scheduler(model.decoder)
    asked = Request(model.text.encode("def f("), 10, stop_token_ids=frozenset({stop}))
    request = run_to_the_end(scheduler, asked)
    assert request.finish_reason == "stop"
    assert tuple(request.output_token_ids) == free.token_ids[: free.token_ids.index(stop) + 1]
    # A special token's name can be a stop string.
    real, steps = model.decoder.step, 0

    def step(tokens: torch.Tensor, *args: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return torch.ones_like(tokens) if steps % 5 == 0 else real(tokens, *args)  # now and then <|user|>

    monkeypatch.setattr(model.decoder, "step", step)
    free = model.generate("x = 1\n", max_new_tokens=10)
    steps = 0
    stopped = model.generate("x = 1\n", max_new_tokens=10, stop="<|user|>")
    assert (len(free.token_ids), stopped.token_ids) == (10, free.token_ids[:6])
    assert (stopped.token_ids[-1], stopped.finish_reason) == (1, "stop")
    assert free.text.startswith(stopped.text)


def test_stop_ids_are_the_union(tiny: Bundle, example_model: Path, tmp_path: Path) -> None:
    assert stop_ids(tiny, None) == {2}
    source = Path(shutil.copytree(example_model, tmp_path / "source"))
    for name, changes in (
        ("config.json", {"eos_token_id": [5, 6]}),
        ("generation_config.json", {"eos_token_id": 7}),
        ("tokenizer_config.json", {"eos_token": "<|user|>"}),
    ):
        (source / name).write_text(json.dumps({**json.loads((source / name).read_text()), **changes}))
    opened = wisparse.load(make_bundle(source, tmp_path / "bundle"), backend="torch")
    assert opened.stop_ids == {5, 6, 7, 1}


def test_prompts_in_all_their_forms(model: Model) -> None:
    def answer(prompt: Any, **options: Any) -> Any:
        return model.generate(prompt, max_new_tokens=4, **options)

    text, chat = answer("x = "), answer([{"role": "user", "content": "x = "}])
    ids = model.tokenizer.encode("x = ")
    assert model.tokenizer.decode(ids) == "x = "
    assert answer(ids).token_ids == answer("x = ", chat_template=False).token_ids == text.token_ids
    assert chat.prompt_tokens == text.prompt_tokens + 2
    assert answer("x = ", chat_template=True).token_ids == chat.token_ids
    assert answer("x = ", system_prompt="Be brief.").prompt_tokens > chat.prompt_tokens
    assert answer(["x = ", "y = "])[0].token_ids == text.token_ids
    assert [one.token_ids for one in answer([[{"role": "user", "content": "x = "}]])] == [chat.token_ids]


def test_a_bundle_without_a_tokenizer_takes_ids(tiny: Bundle) -> None:
    assert tiny.read_bytes("tokenizer.json") is None
    plain = wisparse.load(tiny.folder, backend="torch")
    answers = plain.generate([[5, 6, 7], [8]], max_new_tokens=6)
    assert ([len(answer.token_ids) for answer in answers], answers[0].text) == ([6, 6], "")
    assert plain.generate([8], max_new_tokens=6).token_ids == answers[1].token_ids
    for use in (lambda: plain.generate("text"), lambda: plain.tokenizer):
        with pytest.raises(UsageError, match="this bundle has no tokenizer: give token ids"):
            use()


ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (f"{ENDS}{{% endfor %}}<|assistant|>", 2),
        (f"{ENDS}\n{{% endfor %}}<|assistant|>", 2),
        # Every turn closed by the same token counts as well; one that generation does not stop at does not.
        ("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", 1),
        (f"{ENDS.replace('<|endoftext|>', '<|pad|>')}{{% endfor %}}<|assistant|>", 0),
    ],
)
def test_an_instruction_model_gets_its_template(example_model: Path, tmp_path: Path, template: str, more: int) -> None:
    model = wisparse.load(with_template(example_model, tmp_path, template), backend="torch")
    plain = model.generate("x", chat_template=False, max_new_tokens=1)
    assert model.generate("x", max_new_tokens=1).prompt_tokens == plain.prompt_tokens + more


def test_bad_arguments(model: Model) -> None:
    for call in (model.generate, model.stream):  # a stream's at once, not at the first chunk
        with pytest.raises(UsageError, match="needs the chat template"):
            call("x", system_prompt="y", chat_template=False)
        with pytest.raises(UsageError, match="token ids are used unchanged"):
            call([5, 6], system_prompt="y")


def test_weights_that_are_not_finite_are_not_loaded(bundle: Path, tmp_path: Path) -> None:
    for file in bundle.iterdir():
        data = bytearray(file.read_bytes())
        if file.name.startswith("model-"):
            data[-1000:-992] = b"\xff" * 8
        (tmp_path / file.name).write_bytes(data)
    with pytest.raises(BundleError, match="NaN or infinity"):
        wisparse.load(tmp_path, backend="torch")


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


def test_the_speed_told_is_that_of_the_clock(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # What happens between two tokens (text, printing, a slow reader) takes the user's time too.
    monkeypatch.setattr(type(model.decoder), "delivery_interval", 0.0)
    began = time.perf_counter()
    for chunk in model.stream([5, 6, 7], max_new_tokens=4):
        time.sleep(0.05)
        answer = chunk.generation
    assert 3 * 0.05 <= answer.generation_seconds <= time.perf_counter() - began
    assert answer.generation_tok_per_s == (len(answer.token_ids) - 1) / answer.generation_seconds


def test_default_limits(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """``free``: pages of 256 positions that four times the share of the cache holds; it has one at least."""
    sizes = (2 * 2 * 16 * 4,) * 3  # of a position in each block: keys and values, heads, head_dim, float32
    paging, page, available = Paging(sizes, 256 * sizes[0]), 256 * sum(sizes), Mock()
    monkeypatch.setattr("wisparse.runtime.memory.available_bytes", available)
    config = Bundle.open(tiny.folder).config
    for device, context, free, max_batch, max_seq_len, expected in (
        ("cpu", 256, 4000, 1, None, (1, 256, 1)), ("cpu", 256, 0, 1, None, (1, 256, 1)),
        ("cpu", 5000, 3, 1, None, (1, 768, 3)), ("cpu", 5000, 3, 4, None, (4, 768, 3)),
        ("cpu", 5000, 4000, 3, None, (3, 5000, 60)),
        # A server's batch: slots of 2,048 positions, or the context, or what was asked for, up to 8 on a CPU, 32 on a GPU.
        ("cpu", 5000, 400, None, None, (8, 5000, 160)), ("cpu", 5000, 20, None, None, (2, 5000, 20)),
        ("cpu", 5000, 1, None, 4000, (1, 4000, 16)), ("cpu", 10**5, 40, None, None, (5, 10240, 40)),
        ("cuda", 5000, 400, None, None, (32, 5000, 640)), ("cuda", 5000, 1, None, 10, (2, 10, 2)),
        # Where both are given a CPU's share is the larger one too.
        ("cpu", 5000, 10, 3, 5000, (3, 5000, 28)), ("cpu", 5000, 10, 1, 200, (1, 200, 1)),
    ):  # fmt: skip
        available.return_value = free * 4 * page + 1000
        object.__setattr__(config, "max_position_embeddings", context)
        found = default_limits(config, torch.device(device), max_batch, max_seq_len, 1000, paging)
        assert (*found[:2], found[2] / 3, found[3]) == (*expected, 0)
    # The states of a slot take as much as a page.
    available.return_value = 40 * 4 * page + 1000
    for max_batch, expected in ((None, (4, 5000, 36)), (10, (10, 5000, 30))):
        found = default_limits(config, torch.device("cpu"), max_batch, None, 1000, paging, slot_bytes=page)
        assert (*found[:2], found[2] / 3) == expected
    # Copies of them: eight a slot, in a quarter of the memory.
    for size, most, expected in ((page // 3, None, (24, 1, 29)), (page, None, (10, 1, 27)), (page, 5, (5, 1, 32))):
        sizes = {"slot_bytes": page, "state_bytes": size, "checkpoints": most}
        found = default_limits(config, torch.device("cpu"), 3, None, 1000, paging, **sizes)
        assert (found[3], found[0] // 3, found[2] // 3) == expected


@pytest.mark.exhaustive
def test_many_prompts_do_not_grow(model: Model) -> None:
    def burst(count: int) -> int:
        for number in range(count):
            length = 1 + number % 20
            model.generate("x = 1\n" * length, max_new_tokens=4, temperature=float(number % 2), seed=number)
            stream = model.stream("y", max_new_tokens=8)
            next(stream)
            stream.close()
        gc.collect()
        return psutil.Process().memory_info().rss

    assert -burst(30) + burst(120) < 8 << 20


def test_what_weights_take_is_counted_in_memory_not_on_disk(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    numbers = sum(info.nbytes // info.dtype.itemsize for info in opened.checkpoint.tensors.values())
    assert weight_bytes(opened, torch.bfloat16, "native", lambda _: False) == 2 * numbers
    assert weight_bytes(opened, torch.float32, "native", lambda _: False) == 4 * numbers
    assert numbers < weight_bytes(opened, torch.bfloat16, "int8", lambda _: False) < 2 * numbers


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
                                   RuntimeError("CUDA error: out of memory"), MemoryError()])  # fmt: skip
def test_no_memory(bundle: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    monkeypatch.setattr("wisparse.runtime.torch.decoder.KVCache", Mock(side_effect=error))
    code, _, said = run("generate", bundle, "--backend", "torch", "--prompt", "x")
    assert (code, "not enough memory on cpu to load the model" in said, "Traceback" in said) == (5, True, False)
