"""The server, driven over a loopback port: by OpenAI's own client, and by raw sockets where a client would not."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from bundle_maker import make_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from served import NAME, TEMPLATE, Running, with_template

import wisparse
from wisparse.commands import serve as serve_verb
from wisparse.formats.errors import UsageError
from wisparse.runtime.generation.engine import Engine
from wisparse.runtime.generation.request import Request
from wisparse.runtime.model import Model
from wisparse.runtime.protocol.errors import ApiError
from wisparse.runtime.protocol.formatter import CompletionFormatter, ThinkParser
from wisparse.runtime.protocol.requests import ChatRequest, CompletionRequest, validated
from wisparse.runtime.protocol.responses import ResponsesRequest
from wisparse.runtime.serve import app, transport
from wisparse.runtime.serve.app import ServeSettings, make_app
from wisparse.runtime.serve.encoder import Encoder
from wisparse.runtime.serve.server import open_socket


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("serve") / NAME, 0.4)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    """One for what is expected; the server holds another."""
    with wisparse.load(bundle, dtype="float32", backend="torch", max_seq_len=256) as model:
        yield model


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    running = Running(bundle)
    yield running
    running.stop()


def test_a_completion_is_the_models(server: Running, model: Model) -> None:
    expected = model.generate("def f(x):", max_new_tokens=12)
    found = server.client().completions.create(model=NAME, prompt="def f(x):", max_tokens=12, temperature=0)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (expected.prompt_tokens, 12)
    sampled = model.generate("def f(x):", max_new_tokens=12, temperature=0.9, seed=7, top_p=0.9)
    again = server.client().completions.create(
        model=NAME, prompt="def f(x):", max_tokens=12, temperature=0.9, seed=7, top_p=0.9
    )
    assert again.choices[0].text == sampled.text


@pytest.mark.parametrize("field", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}], ids=lambda field: next(iter(field)))
def test_a_filter_that_leaves_the_likeliest_alone(server: Running, model: Model, field: dict[str, float]) -> None:
    asked = {"prompt": "def f(x):", "max_tokens": 12, "temperature": 9.0, "seed": 3}
    expected = model.generate("def f(x):", max_new_tokens=12).text
    texts = [server.post("/v1/completions", {**asked, **more})[1]["choices"][0]["text"] for more in (field, {})]
    assert texts[0] == expected != texts[1]


def test_the_counters_tell_what_was_done(server: Running, model: Model) -> None:
    names = [
        "generated_tokens_total", "prompt_tokens_total", 'requests_total{status="400"}',
        "time_to_first_token_seconds_count", "time_per_token_seconds_count", 'requests_total{status="200"}',
    ]  # fmt: skip
    before = [server.metric(f"wisparse_{name}") for name in names]
    for stream in (False, True):
        answer = server.client().completions.create(
            model=NAME, prompt="import", max_tokens=7, temperature=0, stream=stream
        )
        assert [None for _ in answer]
    assert server.post("/v1/completions", {"prompt": 5})[0] == 400
    prompt = len(model.tokenizer.encode("import"))
    more = [server.metric(f"wisparse_{name}") - old for name, old in zip(names, before, strict=True)]
    assert more[:5] == [14, 2 * prompt, 1, 2, 2]
    assert more[5] > 2  # the pages of counters are requests themselves
    assert 0.2 < server.metric("wisparse_weights_unread_ratio ") < 0.6


def test_a_stream_joins_to_the_whole(server: Running, model: Model) -> None:
    expected = model.generate("import", max_new_tokens=30, stop="\n\n")
    for more in ({}, {"continuous_usage_stats": True}):
        stream = server.client().completions.create(
            model=NAME, prompt="import", max_tokens=30, temperature=0, stop="\n\n", stream=True,
            extra_body={"stream_options": {"include_usage": True, **more}},
        )  # fmt: skip
        *chunks, last = stream
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == expected.text
        assert choices[-1].finish_reason == expected.finish_reason
        told = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert (bool(told), told) == (bool(more), sorted(told))
        assert (last.choices, last.usage.completion_tokens) == ([], len(expected.token_ids))  # type: ignore[union-attr]
        assert (getattr(last.usage, "generation_seconds", 0) > 0) == bool(more)


def test_what_comes_together_goes_out_together(server: Running, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from wisparse.runtime.torch.decoder import TorchDecoder

    read = threading.Event()
    decode = TorchDecoder.decode

    def after_the_first(self: Any, token_ids: Any) -> Any:
        assert read.wait(60)
        return decode(self, token_ids)

    expected = model.generate("def f(x):", max_new_tokens=40).text
    monkeypatch.setattr(TorchDecoder, "decode", after_the_first)
    monkeypatch.setattr(app, "FLUSH_SECONDS", 600.0)
    stream = server.client().completions.create(
        model=NAME, prompt="def f(x):", max_tokens=40, temperature=0, stream=True
    )
    found = []
    for chunk in stream:
        found.append(chunk.choices[0].text)
        read.set()
    # The first piece at once; the rest when the answer ends, long before the ten minutes are over.
    assert len(found) == 2
    assert "".join(found) == expected


def test_the_next_turn_is_read_from_where_it_parts(server: Running) -> None:
    first = "x = 1\n" * 40
    asked = [{"role": "user", "content": first}]

    def ask(stream: bool) -> tuple[str, openai.types.CompletionUsage]:
        chunks = server.client().chat.completions.create(
            model=NAME, messages=asked, max_tokens=8, temperature=0, stream=True,
            stream_options={"include_usage": True},
        ) if stream else [server.client().chat.completions.create(
            model=NAME, messages=asked, max_tokens=8, temperature=0)]  # fmt: skip
        text, usage = "", None
        for chunk in chunks:
            for choice in chunk.choices:
                text += (choice.delta.content if stream else choice.message.content) or ""
            usage = chunk.usage or usage
        assert usage is not None
        return text, usage

    said, usage = ask(stream=False)
    assert usage.prompt_tokens > 128
    assert usage.prompt_tokens_details.cached_tokens == 0
    whole = usage.prompt_tokens // 128 * 128
    asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "y"}]
    for stream in (False, True):
        before = server.metric("wisparse_cached_prompt_tokens_total")
        again, usage = ask(stream)
        assert usage.prompt_tokens_details.cached_tokens == whole
        assert server.metric("wisparse_cached_prompt_tokens_total") == before + whole
    # Nothing of it is left, and the answer is the same.
    server.client().completions.create(model=NAME, prompt=[first[number:] for number in (1, 2, 3)], max_tokens=1)
    assert ask(stream=False)[0] == again
    several = server.client().completions.create(model=NAME, prompt=f"z = 2\n{first}", max_tokens=2, n=2)
    assert several.usage.prompt_tokens_details.cached_tokens == 0  # as the first of them found it


def test_token_ids_and_several_prompts(server: Running, model: Model) -> None:
    prompts = ["def f(x):", "import os"]
    ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    expected = [model.generate(prompt, max_new_tokens=6).text for prompt in prompts]
    for prompt in (prompts, ids):
        found = server.client().completions.create(model=NAME, prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.text for choice in found.choices] == expected
    several = server.client().completions.create(model=NAME, prompt=prompts[0], max_tokens=6, n=3, seed=1)
    again = [
        server.client().completions.create(model=NAME, prompt=prompts[0], max_tokens=6, seed=1 + more).choices[0].text
        for more in range(3)
    ]
    assert [choice.text for choice in several.choices] == again


@pytest.mark.parametrize("stream", [False, True])
def test_more_prompts_than_go_at_once(server: Running, model: Model, stream: bool) -> None:
    prompts = ["def", "import", "x =", "class", "for", "a, b", "return"]
    found = server.client().completions.create(
        model=NAME, prompt=prompts, max_tokens=5, temperature=0, echo=True, stream=stream
    )
    texts = [""] * len(prompts)
    for chunk in found if stream else [found]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [prompt + model.generate(prompt, max_new_tokens=5).text for prompt in prompts]


def test_a_request_names_its_level(example_model: Path, tmp_path: Path) -> None:
    """Several clients at once, each for other sparsity levels than its neighbours."""
    levels = (0.3, 0.6)
    folder = with_template(example_model, tmp_path, TEMPLATE, *levels)
    messages: list[Any] = [{"role": "user", "content": "def f(x):"}]
    expected = {}
    for level in (0, *levels):
        with wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256, sparsity=level) as alone:
            expected[level] = alone.generate(messages, max_new_tokens=12).text
    assert len(set(expected.values())) == 3
    running = Running(folder)
    try:
        found: list[tuple[float | None, str]] = []

        def client(number: int) -> None:
            openai_client = running.client()
            for turn in range(2):
                level = (None, 0, 0.3, 0.6)[(number + turn) % 4]
                more: Any = {} if level is None else {"extra_body": {"sparsity": level}}
                answer = openai_client.chat.completions.create(
                    model=NAME, messages=messages, max_tokens=12, temperature=0, **more
                )
                found.append((level, answer.choices[0].message.content or ""))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 8
        assert all(text == expected[0.6 if level is None else level] for level, text in found)
        response = running.client().responses.create(
            model=NAME, input="def f(x):", max_output_tokens=12, temperature=0, extra_body={"sparsity": 0}
        )
        assert response.output_text == expected[0]
        (about,) = running.client().models.list()
        assert about.model_extra is not None
        assert (about.model_extra["sparsity"], about.model_extra["sparsities"]) == (0.6, [0, 0.3, 0.6])
        for path, body in (("completions", {"prompt": "a"}), ("responses", {"input": "a"})):
            status, refused = running.post(f"/v1/{path}", {**body, "sparsity": 0.4})
            assert (status, refused["error"]["param"]) == (400, "sparsity")
            assert "one of the bundle's sparsity levels, 0.3, 0.6, or 0 for the dense model, found 0.4" in str(refused)
    finally:
        running.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(server: Running, model: Model, stream: bool) -> None:
    wanted = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    bias = {"5": -3.0}
    expected = model.generate("import os", max_new_tokens=8, logprobs=2, logit_bias={5: -3.0}, **wanted)
    more = {"repetition_penalty": wanted.pop("repetition_penalty"), "sparsity": 0.4}
    found = server.client().completions.create(
        model=NAME, prompt="import os", max_tokens=8, temperature=0, logprobs=2, logit_bias=bias, stream=stream,
        extra_body=more, **wanted,
    )  # fmt: skip
    parts = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
    text = "".join(part.text for part in parts)
    scored = [part.logprobs for part in parts if part.logprobs is not None]
    assert text == expected.text
    assert expected.scores is not None
    assert [one for part in scored for one in part.token_logprobs] == pytest.approx(
        [s.logprob for s in expected.scores]
    )
    tokens = [one for part in scored for one in part.tokens]
    assert "".join(tokens) == text
    offsets = [one for part in scored for one in part.text_offset]
    assert [text[start:].startswith(token) for start, token in zip(offsets, tokens, strict=True)] == [True] * 8
    tops = [one for part in scored for one in part.top_logprobs]
    assert [max(top.values()) for top in tops] == pytest.approx([s.top[0][1] for s in expected.scores])
    assert all(token in top for token, top in zip(tokens, tops, strict=True))


@given(thought=st.text("a \n<", max_size=6), answer=st.text("a \n<", max_size=6), cuts=st.lists(st.integers(0, 40)))
def test_thoughts_are_split_off_wherever_pieces_end(thought: str, answer: str, cuts: list[int]) -> None:
    cases = [
        (f"{thought}</think>{answer}", True, thought.strip(), answer.lstrip()),
        (f"\n<think>{thought}</think>{answer}", False, thought.strip(), answer.lstrip()),
        (f"<think>{thought}", False, thought.strip(), ""),
        (f"b{answer}</think>", False, "", f"b{answer}</think>"),
    ]
    for text, begun, *expected in cases:
        thinking, found = ThinkParser(begun=begun), ["", ""]
        borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(borders)]
        for parts in (*map(thinking.add, pieces), thinking.finish()):
            found = [one + more for one, more in zip(found, parts, strict=True)]
        assert found == expected


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_model_thinks_is_not_its_answer(chat_server: Running, stream: bool) -> None:
    found = chat_server.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "2 + 2"}], stream=stream, max_tokens=60,
        stream_options={"include_usage": True} if stream else openai.omit,
        extra_body={
            "chat_template_kwargs": {"think": True},
            "grammar": 'root ::= "two and two\\n</think>\\n\\nfour"',
        },
    )  # fmt: skip
    *chunks, last = found if stream else [found]
    messages = [chunk.choices[0].delta for chunk in chunks] if stream else [found.choices[0].message]
    closing = chat_server.text.encode("two and two\n</think>", add_special_tokens=False)
    assert abs(last.usage.completion_tokens_details.reasoning_tokens - len(closing)) <= 2  # by other borders
    assert last.usage.completion_tokens > last.usage.completion_tokens_details.reasoning_tokens
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in messages) == "two and two"
    assert "".join(one.content or "" for one in messages) == "four"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response(chat_server: Running, model: Model, stream: bool) -> None:
    expected = model.generate("system: Count.\nuser: 1 2 3\nassistant: 4\nuser: on\nassistant:", max_new_tokens=12)
    messages: Any = [
        {"role": "user", "content": "1 2 3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "on"}]},
    ]
    found = chat_server.client().responses.create(
        model=NAME, instructions="Count.", input=messages, max_output_tokens=12, temperature=0, stream=stream
    )
    if stream:
        events = list(found)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
        assert events[0].type == "response.created"
        found = events[-1].response
    assert found.output_text == expected.text
    assert found.status == ("incomplete" if expected.finish_reason == "length" else "completed")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (expected.prompt_tokens, len(expected.token_ids))


@given(thought=st.text("a \n<", max_size=6), answer=st.text("a<", max_size=6), begun=st.booleans())
def test_thoughts_are_counted(thought: str, answer: str, begun: bool) -> None:
    for closed in (True, False):
        text = ("" if begun else "\n<think>") + thought + ("</think>" + answer if closed else "")
        count = ThinkParser(begun=begun)
        for letter in text:  # each a token
            count.add(letter)
        assert count.tokens == len(text) - (len(answer) if closed else 0)
    count = ThinkParser(begun=False)
    for letter in f"b{answer}</think>":
        count.add(letter)
    assert count.tokens == 0


def test_a_response_with_a_thought_and_a_schema(chat_server: Running) -> None:
    client = chat_server.client()
    thought = client.responses.create(
        model=NAME, input="2 + 2", max_output_tokens=60,
        extra_body={"chat_template_kwargs": {"think": True}, "grammar": 'root ::= "two and two</think>four"'},
    )  # fmt: skip
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert thought.output_text == "four"
    assert thought.usage is not None
    assert 0 < thought.usage.output_tokens_details.reasoning_tokens < thought.usage.output_tokens
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    found = client.responses.create(model=NAME, input="tags", max_output_tokens=120, text=wanted, temperature=0)
    assert set(json.loads(found.output_text)) == {"name", "tags"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "instructions": 5}, "instructions"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input[0].content[0]"),
        ({"input": ["a", {"role": "user", "content": 5}]}, "input[0]"),
        ({"input": [{"type": "reasoning"}, {"role": "user", "content": 5}], "instructions": "b"}, "input[1].content"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "a", "tools": [], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "a", "temperature": "hot"}, "temperature"),
        ({"input": "a", "reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
    ],
)
def test_a_bad_field_of_a_response_is_named(chat_server: Running, body: dict[str, Any], field: str) -> None:
    status, found = chat_server.post("/v1/responses", body)
    assert (status, found["error"]["param"]) == (400, field)
    assert field in found["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 5},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def test_answers_that_a_schema_describes_beside_one_that_may_be_anything(server: Running, model: Model) -> None:
    client = server.client()
    plain = model.generate("import os", max_new_tokens=40)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    done: dict[int, Any] = {}

    def ask(index: int, **more: Any) -> None:
        done[index] = client.completions.create(
            model=NAME, prompt="import os", max_tokens=40 if index == 2 else 120, **{"temperature": 0, **more}
        )  # fmt: skip

    wishes: list[dict[str, Any]] = [
        {"extra_body": {"response_format": schema}},
        {"extra_body": {"grammar": 'root ::= "yes" | "no"'}, "temperature": 1.0, "seed": 4},
        {},
    ]
    threads = [threading.Thread(target=ask, args=(index,), kwargs=wish) for index, wish in enumerate(wishes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done[2].choices[0].text == plain.text
    assert done[1].choices[0].text in ("yes", "no")
    assert done[1].choices[0].finish_reason == "stop"
    found = json.loads(done[0].choices[0].text)
    assert set(found) == {"name", "tags"}
    assert set(found["tags"]) <= {"a", "b"}
    assert done[0].choices[0].finish_reason == "stop"


def test_any_json_object(chat_server: Running) -> None:
    closing = str(chat_server.text.encode("}", add_special_tokens=False)[0])
    found = chat_server.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "a"}], max_tokens=40, response_format={"type": "json_object"},
        temperature=0, logit_bias={closing: 100},
    )  # fmt: skip
    assert (json.loads(found.choices[0].message.content or ""), found.choices[0].finish_reason) == ({}, "stop")


def test_what_lm_eval_asks(server: Running, model: Model) -> None:
    """The request of its ``local-completions``, and what it takes from the answer."""
    texts = ["def f(x):\n    return x", "import os\nimport sys"]
    prompts = [model.tokenizer.encode(text) for text in texts]
    for most in (1, 0):
        status, found = server.post(
            "/v1/completions",
            {"model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": most, "logprobs": 1, "seed": 1234,
             "echo": True},
        )  # fmt: skip
        assert status == 200
        for choice, text, ids in zip(found["choices"], texts, prompts, strict=True):
            rows = model.decoder.logits(torch.tensor(ids), len(ids)).log_softmax(-1)
            expected = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(ids) + most
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
            for top, row, own in zip(logprobs["top_logprobs"][1:], rows, expected, strict=False):
                assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
                assert (max(top.values()) == pytest.approx(own)) == (float(row.max()) == own)
            assert choice["text"].startswith(text)
            assert (choice["text"] == text) == (most == 0)
            assert choice["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == 2 * most
        assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    chunks = list(
        server.client().completions.create(
            model=NAME, prompt=texts[0], max_tokens=2, temperature=0, logprobs=1, echo=True, stream=True
        )
    )
    assert chunks[0].choices[0].text.startswith(texts[0])
    assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks) == len(prompts[0]) + 2  # type: ignore[union-attr, arg-type]


@pytest.fixture(scope="module")
def chat_server(bundle: Path, tmp_path_factory: pytest.TempPathFactory, example_model: Path) -> Iterator[Running]:
    running = Running(with_template(example_model, tmp_path_factory.mktemp("chat"), TEMPLATE))
    yield running
    running.stop()


def test_a_conversation(chat_server: Running, model: Model) -> None:
    expected = model.generate("system: be brief\nuser: what?\nassistant:", max_new_tokens=10)
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": "?"}]},
    ]
    client = chat_server.client()
    found = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=10, temperature=0)
    assert found.choices[0].message.content == expected.text
    chunks = list(
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=10, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    loud = model.generate("user: a\nLOUDassistant:", max_new_tokens=10).text
    extra = {"chat_template_kwargs": {"shout": "LOUD"}}
    found = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "a"}], max_tokens=10, temperature=0, extra_body=extra
    )
    assert found.choices[0].message.content == loud


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(chat_server: Running, model: Model, stream: bool) -> None:
    expected = model.generate("user: 1 + 1\nassistant:", max_new_tokens=6, logprobs=3)
    found = chat_server.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "1 + 1"}], max_tokens=6, temperature=0, logprobs=True,
        top_logprobs=3, stream=stream,
    )  # fmt: skip
    parts = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
    assert expected.scores is not None
    assert [entry.logprob for entry in entries] == pytest.approx([score.logprob for score in expected.scores])
    assert "".join(entry.token for entry in entries) == expected.text
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == expected.text
    for entry, score in zip(entries, expected.scores, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([value for _, value in score.top])
    status, refused = chat_server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}
    )
    assert (status, refused["error"]["param"]) == (400, "logprobs")


def test_a_model_without_a_template_says_so(chat_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server.text, "template", None)
    status, body = chat_server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert status == 400
    assert "no chat template" in body["error"]["message"]


def test_tools_need_a_template_that_has_them(chat_server: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    status, found = chat_server.post("/v1/chat/completions", body)
    assert (status, found["error"]["param"]) == (400, "tools")
    assert "<tool_call>" in found["error"]["message"]
    status, _ = chat_server.post("/v1/chat/completions", {**body, "tool_choice": "none", "max_tokens": 1})
    assert status == 200
    answered = {"role": "tool", "tool_call_id": "1", "content": "5"}
    status, found = chat_server.post("/v1/chat/completions", {"messages": [*body["messages"], answered]})
    assert (status, found["error"]["param"]) == (400, "messages")


def test_models_health_and_what_is_not_here(server: Running) -> None:
    client = server.client()
    assert [one.id for one in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="model: expected 'example', found 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.InternalServerError) as refused:
        client.embeddings.create(model=NAME, input="a")
    assert refused.value.status_code == 501
    for path, status in (
        ("/health", 200), ("/nothing", 404), ("/v1/completions", 405), ("/v1/images/edits", 501),
        ("/v1/responses/resp_1", 501), ("/" + "a" * 9000, 404),
    ):  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == status
        assert len(answer.read()) < 300
        connection.close()


BAD = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 1.5}, "top_p"),
    ({"prompt": "a", "seed": "x"}, "seed"),
    ({"prompt": "a", "stop": [1]}, "stop[0]"),
    ({"prompt": "a", "stop": ""}, "stop[0]"),
    ({"prompt": "a", "stop": ["a"] * 99}, "stop"),
    ({"prompt": "a", "n": 4}, "n"),
    ({"prompt": ["a"] * 34, "n": 2}, "prompt"),
    ({"prompt": "a", "stream": 1}, "stream"),
    ({"prompt": "a", "stream_options": 3}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": "1"}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "response_format": {"type": "json"}}, "response_format.type"),
    ({"prompt": "a", "response_format": "json"}, "response_format"),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        "response_format",
    ),
    ({"prompt": "a", "grammar": "root := ("}, "grammar"),
    ({"prompt": "a", "grammar": 5}, "grammar"),
    ({"prompt": "a", "sparsity": 0.3}, "sparsity"),
    ({"prompt": "a", "sparsity": "0.4"}, "sparsity"),
    ({"prompt": "a", "sparsity": True}, "sparsity"),
    ({"prompt": "a", "sparsity": 10**400}, "sparsity"),
    ({"prompt": "a", "grammar": "start: /a/", "response_format": {"type": "json_object"}}, "grammar"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    # What other servers have beside: not here, and not without a word either.
    ({"prompt": "a", "repeat_penalty": 1.3}, "repeat_penalty"),
    ({"prompt": "a", "min_tokens": 2}, "min_tokens"),
    ({"prompt": "a", "ignore_eos": True}, "ignore_eos"),
    ({"prompt": "a", "stop_token_ids": [5]}, "stop_token_ids"),
    ({"prompt": "a", "structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_field_is_named(server: Running, body: dict[str, Any], field: str) -> None:
    status, found = server.post("/v1/completions", body)
    assert status == 400
    assert found["error"]["param"] == field
    assert found["error"]["type"] == "invalid_request_error"
    assert field in found["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ("hi", 400),
        ([], 400),
        (["hi"], 400),
        ([{"role": "robot", "content": "a"}], 400),
        ([{"role": "user"}], 400),
        ([{"role": "user", "content": 5}], 400),
        ([{"role": "user", "content": [{"type": "text"}]}], 400),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}], 501),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], 400),
    ],
)
def test_bad_messages(chat_server: Running, messages: Any, status: int) -> None:
    found, body = chat_server.post("/v1/chat/completions", {"messages": messages})
    assert found == status
    assert body["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"prompt": "a", "prompt": "b"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b" " * (9 * 2**20), 413),
        (b'{"prompt": "' + b"a " * 100_000 + b'"}', 400),
    ],
    ids=["empty", "cut", "list", "nan", "twice", "surrogate", "not-utf8", "deep", "large", "long"],
)
def test_a_bad_body(server: Running, body: bytes, status: int) -> None:
    try:
        found, answer = server.post("/v1/completions", body)
    except (ConnectionResetError, BrokenPipeError):
        assert status == 413  # told before it had sent everything
        return
    assert found == status
    assert answer["error"]["message"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["", ["a", ""], [-1], [2**32], [2**64], [[5], [-(2**40)]]], ids=str)
def test_a_prompt_without_tokens_or_with_unknown_ones(server: Running, prompt: Any, echo: bool) -> None:
    status, body = server.post("/v1/completions", {"prompt": prompt, "echo": echo, "max_tokens": 1})
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert "tokens" in body["error"]["message"] or "token ids" in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unforeseen_exception_is_openais_error(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("secret")

    for where, name in ((CompletionFormatter, "__init__"), (Encoder, "encode")):
        monkeypatch.setattr(where, name, broken)
        before = server.metric('wisparse_requests_total{status="500"}')
        caplog.clear()
        status, body = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": stream})
        assert (status, set(body["error"]), body["error"]["type"]) == (
            500, {"message", "type", "param", "code"}, "server_error"
        )  # fmt: skip
        assert "secret" not in str(body)
        assert server.metric('wisparse_requests_total{status="500"}') == before + 1
        assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]
    monkeypatch.undo()
    monkeypatch.setattr(CompletionFormatter, "end", broken)  # the status is out by then
    if stream:
        with pytest.raises(openai.APIError, match="its log has more"):
            list(server.client().completions.create(model=NAME, prompt="a", max_tokens=1, stream=True))
    server.idle()


def test_the_protocol_is_described(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/openapi.json")
    found = json.loads(connection.getresponse().read())
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"} <= set(found["paths"])
    assert found["components"]["schemas"]["ChatRequest"]["properties"]["top_logprobs"]["maximum"] == 20
    connection.request("GET", "/docs")
    assert connection.getresponse().status == 200
    connection.close()


def test_a_prompt_longer_than_the_context(server: Running) -> None:
    status, body = server.post("/v1/completions", {"prompt": [5] * 300})
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert body["error"]["code"] == "context_length_exceeded"
    assert "300 tokens" in body["error"]["message"]
    assert "256" in body["error"]["message"]
    assert server.post("/v1/completions", {"prompt": [10**9]})[0] == 400


def test_a_conversation_longer_than_the_context(chat_server: Running) -> None:
    for path, body, field in (
        ("/v1/responses", {"input": "a " * 2000}, "input"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 2000}]}, "messages"),
    ):
        status, found = chat_server.post(path, body)
        assert (status, found["error"]["param"], found["error"]["code"]) == (400, field, "context_length_exceeded")


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template": "x"},
        {"continue_final_message": True},
        {"enable_thinking": False},
        {"add_generation_prompt": False},
    ],
)
def test_how_a_prompt_is_made_is_the_templates(chat_server: Running, field: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    status, found = chat_server.post("/v1/chat/completions", {**asked, **field})
    assert (status, [found["error"]["param"]]) == (400, list(field))


def test_fields_that_change_nothing_pass(chat_server: Running) -> None:
    neutral = {name: value for name, values in ResponsesRequest.unsupported.items() for value in values[-1:]}
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        **neutral,
        "user": "b",
        "metadata": {"c": "d"},
    }
    assert chat_server.post("/v1/chat/completions", {**asked, "chat_template": None})[0] == 200
    asked = {"input": "a", "max_output_tokens": 1, "include": ["reasoning.encrypted_content"], "store": False}
    assert chat_server.post("/v1/responses", {**asked, "reasoning": {"effort": None, "summary": "auto"}})[0] == 200


def test_only_json_is_taken(server: Running) -> None:
    # A form, which any page may send anywhere without being asked.
    status, _ = server.post("/v1/completions", {"prompt": "a"}, **{"content-type": "text/plain"})
    assert status == 415
    status, _ = server.post("/v1/completions", {"prompt": "a"}, **{"content-encoding": "gzip"})
    assert status == 415


def test_a_key(bundle: Path) -> None:
    server = Running(bundle, api_key="sesame", cors=("http://page.example",))
    try:
        assert server.client("sesame").completions.create(model=NAME, prompt="a", max_tokens=1).choices
        for key in ("wrong", "sesam", "sesame2", "é"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                server.client(key).completions.create(model=NAME, prompt="a", max_tokens=1)
        assert server.post("/v1/completions", {"prompt": "a"})[0] == 401
        assert "sesame" not in repr(server.settings)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"origin": "http://page.example", "access-control-request-method": "POST"}
        connection.request("OPTIONS", "/v1/completions", headers=headers)
        assert connection.getresponse().headers["access-control-allow-origin"] == "http://page.example"
        connection.close()
    finally:
        server.stop()


def test_more_than_may_wait_are_told_to_come_again(bundle: Path) -> None:
    server = Running(bundle, max_queue=1)
    try:
        streams = [
            server.client().completions.create(model=NAME, prompt="def", max_tokens=200, stream=True, temperature=0)
            for _ in range(3)
        ]
        waiting = threading.Thread(
            target=lambda: server.client().completions.create(model=NAME, prompt="import", max_tokens=1)
        )
        waiting.start()
        while not server.metric("wisparse_waiting "):
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as refused:
            server.client().completions.create(model=NAME, prompt="a", max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        waiting.join(60)
        server.idle()
    finally:
        server.stop()


def _raw(server: Running, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    one.sendall(head.encode() + b"\r\n\r\n" + data)
    return one


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_takes_its_request_with_it(server: Running, stream: bool) -> None:
    gone = server.metric("wisparse_cancelled_total")
    one = _raw(server, {"prompt": "def f(x):", "max_tokens": 240, "temperature": 0, "stream": stream})
    if stream:
        assert one.recv(100)
    else:
        while not server.metric("wisparse_running "):
            time.sleep(0.01)
    one.close()
    server.idle()
    assert server.metric("wisparse_cancelled_total") == gone + 1


def test_a_client_that_does_not_read_is_dropped(server: Running, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLIENT_SECONDS", 0.5)
    monkeypatch.setattr(app, "FLUSH_SECONDS", 0.0)
    # Events so large that the sockets' buffers fill: every token's comes with a name of 60 kB.
    monkeypatch.setattr(CompletionFormatter, "events", lambda self, items: b"data: " + b"x" * 300_000 + b"\n\n")
    gone = server.metric("wisparse_cancelled_total")
    one = _raw(server, {"prompt": "def f(x):", "max_tokens": 240, "temperature": 0, "stream": True})
    deadline = time.monotonic() + 60
    while server.metric("wisparse_cancelled_total") == gone:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    one.close()
    server.idle()
    monkeypatch.undo()
    found = server.client().completions.create(model=NAME, prompt="import", max_tokens=3, temperature=0)
    assert found.choices[0].text == model.generate("import", max_new_tokens=3).text


def test_a_body_that_does_not_come(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLIENT_SECONDS", 0.3)
    one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    one.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    )
    assert b" 408 " in one.recv(100)
    one.close()


def test_a_body_that_is_too_large_is_not_waited_for(server: Running) -> None:
    one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 99999999999"
    one.sendall(head.encode() + b"\r\n\r\n")
    assert b" 413 " in one.recv(100)
    one.close()


def test_connections_without_a_request_are_closed(
    server: Running, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CLIENT_SECONDS", 0.3)
    asking = _raw(server, {"prompt": "def f(x):", "max_tokens": 100, "temperature": 0})
    whole = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    refused = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 999\r\n\r\n{"
    for sent in (b"", whole[:20], refused, whole + b"GET "):
        one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        one.sendall(sent)
        while one.recv(1000):
            pass
        one.close()
    found = b""
    while b'"usage"' not in found:  # a client that waits for its answer is not cut off
        piece = asking.recv(10_000)
        assert piece
        found += piece
    asking.close()


def test_headers_without_end(server: Running) -> None:
    one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    one.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n")
    answered = b""
    try:
        for _ in range(200):
            one.sendall(b"x: " + b"y" * 1000 + b"\r\n")
        answered = one.recv(100)
    except (ConnectionResetError, BrokenPipeError):
        answered = b" 400 "
    assert b" 400 " in answered
    one.close()
    assert server.client().models.list()


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth step fails."""
    from wisparse.runtime.torch.decoder import TorchDecoder

    calls = []
    decode = TorchDecoder.decode

    def broken(self: Any, token_ids: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("the device is lost")
        return decode(self, token_ids)

    monkeypatch.setattr(TorchDecoder, "decode", broken)


@pytest.mark.usefixtures("breaking")
def test_a_failure_in_the_middle_is_said_in_the_stream(server: Running) -> None:
    with pytest.raises(openai.APIError, match="the device is lost"):
        list(server.client().completions.create(model=NAME, prompt="def", max_tokens=50, stream=True, temperature=0))
    assert server.client().completions.create(model=NAME, prompt="import", max_tokens=3, temperature=0).choices


def test_a_prompt_without_memory_fails_alone(server: Running, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from wisparse.runtime.torch.decoder import TorchDecoder

    expected = model.generate("def f(x):", max_new_tokens=60).text
    there = threading.Event()
    prefill, decode, submit = TorchDecoder.prefill, TorchDecoder.decode, Engine.submit

    def scarce(self: Any, slot: int, token_ids: Any, *more: Any, **part: Any) -> Any:
        if token_ids[0] == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, slot, token_ids, *more, **part)

    def held(self: Any, token_ids: Any) -> Any:
        assert there.wait(60)
        return decode(self, token_ids)

    def submitted(self: Engine, request: Request, *more: Any, **part: Any) -> Any:
        ticket = submit(self, request, *more, **part)
        if request.prompt_token_ids[0] == 5:
            there.set()
        return ticket

    monkeypatch.setattr(Engine, "submit", submitted)
    monkeypatch.setattr(TorchDecoder, "prefill", scarce)
    monkeypatch.setattr(TorchDecoder, "decode", held)
    stream = server.client().completions.create(
        model=NAME, prompt="def f(x):", max_tokens=60, temperature=0, stream=True
    )
    text = next(iter(stream)).choices[0].text
    status, found = server.post("/v1/completions", {"prompt": [5] * 20})
    assert (status, found["error"]["type"]) == (500, "server_error")
    assert "memory" in found["error"]["message"]
    assert text + "".join(chunk.choices[0].text for chunk in stream) == expected


@pytest.mark.usefixtures("breaking")
def test_a_failure_in_the_middle_of_a_response(chat_server: Running) -> None:
    *_, error, failed = chat_server.client().responses.create(
        model=NAME, input="def", max_output_tokens=50, stream=True, temperature=0
    )
    assert (error.type, failed.type, failed.response.status) == ("error", "response.failed", "failed")
    assert "the device is lost" in error.message
    assert failed.response.error.message == error.message


_FIELDS = [
    "prompt",
    "messages",
    "input",
    "n",
    "stop",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "echo",
    "logit_bias",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "grammar",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "stream_options",
    "user",
    "chat_template_kwargs",
]
_KEYS = st.sampled_from(["role", "content", "type", "text"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner),
    max_leaves=6,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES))
def test_whatever_a_body_holds_is_read_or_refused(body: dict[str, Any]) -> None:
    for model in (ChatRequest, CompletionRequest, ResponsesRequest):
        refused = None
        try:
            call = validated(model, body)
        except ApiError as error:
            refused = error
        if refused is None:
            assert call.n >= 1
        else:
            assert refused.status_code in (400, 501)
            assert refused.error["param"]


def test_a_port_in_use() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="choose another --host or --port"),
    ):
        open_socket(ServeSettings(NAME, port=taken.getsockname()[1]))
    with pytest.raises(UsageError, match="cannot listen at"):
        open_socket(ServeSettings(NAME, host="no.such.host.invalid"))


def test_the_verb_serves_and_ends_well(bundle: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    command = [sys.executable, "-m", "wisparse", "serve", str(bundle), "--port", "0", "--backend", "torch", "--device"]
    command += ["cpu", "--max-seq-len", "256", "--alias", "other"]
    command += ["--api-key-file", str(key)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "WISPARSE_API_KEY": "none"}  # what is typed comes first
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=given)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        assert line.startswith("serving other at http://127.0.0.1:")
        assert "sesame" not in line
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=line.split()[3], api_key="none", max_retries=0).models.list()
        client = openai.OpenAI(base_url=line.split()[3], api_key="sesame", max_retries=0)
        stream = client.completions.create(model="other", prompt="def", max_tokens=100, stream=True, temperature=0)
        first = next(iter(stream))
        server.send_signal(signal.SIGTERM)  # what is under way is finished
        rest = list(stream)
        assert first.choices[0].finish_reason is None
        assert rest[-1].choices[0].finish_reason == "length"
        assert server.wait(60) == 0
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.mark.parametrize("origin", ["", "localhost:3000", "http://a.example/", "http://a.example/page", "http://"])
def test_an_origin_that_no_page_has(origin: str, bundle: Path) -> None:
    from click.testing import CliRunner

    from wisparse.cli import cli

    done = CliRunner().invoke(cli, ["serve", str(bundle), "--cors", origin])
    assert isinstance(done.exception, UsageError)
    assert "--cors: expected * or an origin" in str(done.exception)


@pytest.mark.parametrize("key", ["", "  \n", "zwölf", "a\x00b"])
def test_a_key_that_no_client_could_show(key: str, bundle: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from wisparse.cli import cli

    file = tmp_path / "key"
    file.write_text(key)
    done = CliRunner().invoke(cli, ["serve", str(bundle), "--api-key-file", str(file)])
    assert isinstance(done.exception, UsageError)
    assert "expected a key" in str(done.exception)


def test_a_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WISPARSE_API_KEY", raising=False)
    assert serve_verb._api_key(None) is None
    monkeypatch.setenv("WISPARSE_API_KEY", "sesame\n")
    assert serve_verb._api_key(None) == "sesame"
    for key in ("", " ", "zwölf"):
        monkeypatch.setenv("WISPARSE_API_KEY", key)
        with pytest.raises(UsageError, match="WISPARSE_API_KEY: expected a key"):
            serve_verb._api_key(None)


def test_a_server_says_that_it_serves_once_all_is_prepared(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for that line finds nothing left to compile; who connects before gets the same answer later."""
    done: list[str] = []

    def prepare(self: Engine, max_queue: int) -> None:
        time.sleep(0.2)
        done.append("prepared")

    async def run() -> None:
        with wisparse.load(bundle, dtype="float32", backend="torch", max_seq_len=64) as model:
            app = make_app(model, ServeSettings(NAME, port=0), lambda: done.append("ready"))
            async with app.router.lifespan_context(app):
                assert done == ["prepared", "ready"]

    monkeypatch.setattr(Engine, "start", prepare)
    asyncio.run(run())
    assert done == ["prepared", "ready"]
