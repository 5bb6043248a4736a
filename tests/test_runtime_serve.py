"""The server, driven over a loopback port: by OpenAI's own client, and by raw sockets where a client would not."""

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from served import NAME, TEMPLATE, Running, function, hold, lose_device, with_template
from starlette.testclient import TestClient

import wisparse
from wisparse import Model, UsageError
from wisparse.cli import cli
from wisparse.commands import serve as serve_verb
from wisparse.runtime.generation.engine import Engine
from wisparse.runtime.protocol.formatter import CompletionFormatter
from wisparse.runtime.protocol.messages import CountTokensRequest, MessagesRequest
from wisparse.runtime.protocol.requests import ApiError, ChatRequest, CompletionRequest, validated
from wisparse.runtime.protocol.responses import ResponsesRequest
from wisparse.runtime.serve import app, transport
from wisparse.runtime.serve.app import Encoder, ServeSettings, make_app
from wisparse.runtime.serve.transport import open_socket
from wisparse.runtime.thoughts import TagParser
from wisparse.runtime.torch.decoder import TorchDecoder


def test_a_completion_is_the_models(server: Running, model: Model) -> None:
    greedy, flat = {"temperature": 0}, {"temperature": 9.0, "seed": 3}
    cases = [(how, how) for how in (greedy, flat, {"temperature": 0.9, "seed": 7, "top_p": 0.9})]
    # Filters that leave the likeliest token alone.
    cases += [({**flat, **one}, greedy) for one in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0})]
    texts = []
    for asked, how in cases:
        expected = model.generate("def f(x):", max_new_tokens=12, **how)
        _, found = server.post("/v1/completions", {"prompt": "def f(x):", "max_tokens": 12, **asked})
        (choice,), usage = found["choices"], found["usage"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (expected.prompt_tokens, 12)
        texts.append(expected.text)
    assert len(set(texts)) == 3


def test_the_counters_tell_what_was_done(server: Running, model: Model) -> None:
    names = ["generated_tokens_total", "prompt_tokens_total", 'requests_total{status="400"}']
    names += ["time_to_first_token_seconds_count", "time_per_token_seconds_count", 'requests_total{status="200"}']
    before = [server.metric(f"wisparse_{name}") for name in names]
    for stream in (False, True):
        assert [None for _ in server.complete("import", max_tokens=7, stream=stream)]
    assert server.post("/v1/completions", {"prompt": 5})[0] == 400
    *more, pages = [server.metric(f"wisparse_{name}") - old for name, old in zip(names, before, strict=True)]
    assert more == [14, 2 * len(model.tokenizer.encode("import")), 1, 2, 2]
    assert pages > 2  # the pages of counters are requests themselves
    assert 0.2 < server.metric("wisparse_weights_unread_ratio ") < 0.6


def test_a_stream_joins_to_the_whole(server: Running, model: Model) -> None:
    expected = model.generate("import", max_new_tokens=30, stop="\n\n")
    for more in ({}, {"continuous_usage_stats": True}):
        options = {"stream_options": {"include_usage": True, **more}}
        *chunks, last = server.complete("import", max_tokens=30, stop="\n\n", stream=True, extra_body=options)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == expected.text
        assert choices[-1].finish_reason == expected.finish_reason
        told = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert (bool(told), told) == (bool(more), sorted(told))
        assert (last.choices, last.usage.completion_tokens) == ([], len(expected.token_ids))  # type: ignore[union-attr]
        assert (getattr(last.usage, "generation_seconds", 0) > 0) == bool(more)


def test_what_comes_together_goes_out_together(server: Running, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.generate("def f(x):", max_new_tokens=40).text
    read = hold(monkeypatch)
    monkeypatch.setattr(app, "FLUSH_SECONDS", 600.0)
    found = []
    for chunk in server.complete("def f(x):", max_tokens=40, stream=True):
        found.append(chunk.choices[0].text)
        read.set()
    # The first piece at once; the rest when the answer ends, long before the ten minutes are over.
    assert (len(found), "".join(found)) == (2, expected)


def test_the_next_turn_is_read_from_where_it_parts(server: Running) -> None:
    first = "x = 1\n" * 40
    asked = [{"role": "user", "content": first}]

    def ask(stream: bool) -> tuple[str, Any]:
        if not stream:
            found = server.chat(asked, max_tokens=8)
            return found.choices[0].message.content, found.usage
        *chunks, last = server.chat(asked, max_tokens=8, stream=True, stream_options={"include_usage": True})
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), last.usage

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
    server.complete([first[number:] for number in (1, 2, 3)], max_tokens=1)
    assert ask(stream=False)[0] == again
    several = server.complete(f"z = 2\n{first}", max_tokens=2, n=2)
    assert several.usage.prompt_tokens_details.cached_tokens == 0  # as the first of them found it


def test_more_prompts_than_go_at_once_and_token_ids(server: Running, model: Model, stream: bool) -> None:
    prompts = ["def", "import", "x =", "class", "for", "a, b", "return"]
    wanted = [prompt + model.generate(prompt, max_new_tokens=5).text for prompt in prompts]
    for asked in (prompts, [model.tokenizer.encode(prompt) for prompt in prompts]):
        found = server.complete(asked, max_tokens=5, echo=True, stream=stream)
        texts = [""] * len(prompts)
        for chunk in found if stream else [found]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert [text.removeprefix("<|endoftext|>") for text in texts] == wanted
    several = server.complete("def", max_tokens=6, n=3, seed=1, temperature=1)
    again = [server.complete("def", max_tokens=6, seed=1 + more, temperature=1) for more in range(3)]
    assert [choice.text for choice in several.choices] == [one.choices[0].text for one in again]


def test_a_request_names_its_level(example_model: Path, tmp_path: Path) -> None:
    levels = (0.3, 0.6)
    folder = with_template(example_model, tmp_path, TEMPLATE, *levels)
    messages: list[Any] = [{"role": "user", "content": "def f(x):"}]
    expected = {}
    for level in (0, *levels):
        with wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256, sparsity=level) as alone:
            expected[level] = alone.generate(messages, max_new_tokens=12).text
    assert len(set(expected.values())) == 3
    with Running(folder) as running:

        def client(level: float | None) -> str:
            answer = running.chat(messages, max_tokens=12, extra_body={"sparsity": level})
            return str(answer.choices[0].message.content)

        with ThreadPoolExecutor(4) as clients:
            assert list(clients.map(client, 2 * [None, 0, *levels])) == [expected[one] for one in 2 * [0.6, 0, *levels]]
        response = running.respond("def f(x):", max_output_tokens=12, extra_body={"sparsity": 0})
        assert response.output_text == expected[0]
        (about,) = running.client().models.list()
        assert (about.model_extra["sparsity"], about.model_extra["sparsities"]) == (0.6, [0, 0.3, 0.6])
        status, refused = running.post("/v1/responses", {"input": "a", "sparsity": 0.4})
        assert (status, refused["error"]["param"]) == (400, "sparsity")
        assert "one of the bundle's sparsity levels, 0.3, 0.6, or 0 for the dense model, found 0.4" in str(refused)


def test_log_probabilities_of_a_completion(server: Running, model: Model, stream: bool) -> None:
    wanted = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    expected = model.generate("import os", max_new_tokens=8, logprobs=2, logit_bias={5: -3.0}, **wanted)
    more = {**wanted, "sparsity": 0.4, "logit_bias": {"5": -3.0}}
    found = server.complete("import os", max_tokens=8, logprobs=2, stream=stream, extra_body=more)
    parts = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
    text, scores = "".join(part.text for part in parts), expected.scores or ()
    assert text == expected.text
    logprobs, tokens, offsets, tops = (
        [one for part in parts if part.logprobs is not None for one in getattr(part.logprobs, name)]
        for name in ("token_logprobs", "tokens", "text_offset", "top_logprobs")
    )
    assert logprobs == pytest.approx([score.logprob for score in scores])
    assert "".join(tokens) == text
    assert [text[start:].startswith(token) for start, token in zip(offsets, tokens, strict=True)] == [True] * 8
    assert [max(top.values()) for top in tops] == pytest.approx([score.top[0][1] for score in scores])
    assert all(token in top for token, top in zip(tokens, tops, strict=True))


@given(thought=st.text("a \n<", max_size=6), answer=st.text("a \n<", max_size=6), cuts=st.lists(st.integers(0, 40)))
def test_thoughts_are_split_off_wherever_pieces_end_and_counted(thought: str, answer: str, cuts: list[int]) -> None:
    for text, begun, *expected, thought_letters in (
        (f"{thought}</think>{answer}", True, thought.strip(), answer.lstrip(), len(thought) + 8),
        (f"\n<think>{thought}</think>{answer}", False, thought.strip(), answer.lstrip(), len(thought) + 16),
        (f"<think>{thought}", False, thought.strip(), "", len(thought) + 7),
        (f"b{answer}</think>", False, "", f"b{answer}</think>", 0),
    ):
        borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(borders)]
        for tokens in (pieces, list(text)):
            parser = TagParser("<think>", "</think>", begun)
            parts = list(map(parser.add, tokens))
            if tokens is not pieces:
                assert parser.tokens == thought_letters
            assert ["".join(part) for part in zip(*parts, parser.add("", True), strict=True)] == expected


def test_what_a_model_thinks_is_not_its_answer(server: Running, stream: bool) -> None:
    grammar = 'root ::= "two and two\\n</think>\\n\\nfour"'
    thinking: Any = {"extra_body": {"chat_template_kwargs": {"think": True}, "grammar": grammar}}
    usage = {"include_usage": True} if stream else openai.omit
    found = server.chat("2 + 2", stream=stream, max_tokens=60, stream_options=usage, **thinking)
    *chunks, last = found if stream else [found]
    messages = [chunk.choices[0].delta for chunk in chunks] if stream else [found.choices[0].message]
    closing = server.text.encode("two and two\n</think>", add_special_tokens=False)
    assert abs(last.usage.completion_tokens_details.reasoning_tokens - len(closing)) <= 2  # by other borders
    assert last.usage.completion_tokens > last.usage.completion_tokens_details.reasoning_tokens
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in messages) == "two and two"
    assert "".join(one.content or "" for one in messages) == "four"


def test_a_response(server: Running, model: Model, stream: bool) -> None:
    expected = model.generate("system: Count.\nuser: 1 2 3\nassistant: 4\nuser: on\nassistant:", max_new_tokens=12)
    messages: Any = [
        {"role": "user", "content": "1 2 3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "on"}]},
    ]
    found = server.respond(messages, instructions="Count.", max_output_tokens=12, stream=stream)
    if stream:
        events = list(found)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
        assert events[0].type == "response.created"
        found = events[-1].response
    assert found.output_text == expected.text
    assert found.status == ("incomplete" if expected.finish_reason == "length" else "completed")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (expected.prompt_tokens, len(expected.token_ids))


_TAGS = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 5}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "tags": _TAGS}}
SCHEMA |= {"required": ["name", "tags"], "additionalProperties": False}


def test_answers_that_a_schema_describes_beside_one_that_may_be_anything(server: Running, model: Model) -> None:
    plain = model.generate("import os", max_new_tokens=40).text
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    without_schema = {"type": "json_schema", "json_schema": {"name": "x"}}
    closing = str(server.text.encode("}", add_special_tokens=False)[0])
    any_object: Any = {"response_format": {"type": "json_object"}, "logit_bias": {closing: 100}}
    wishes: list[dict[str, Any]] = [
        {"max_tokens": 120, "extra_body": {"response_format": schema}},
        {"extra_body": {"grammar": 'root ::= "yes" | "no"'}, "temperature": 1.0, "seed": 4},
        {"max_tokens": 40},
        {"max_tokens": 40, "extra_body": any_object},
        {"max_tokens": 40, "extra_body": {**any_object, "response_format": without_schema}},
    ]
    with ThreadPoolExecutor(3) as clients:
        done = list(clients.map(lambda wish: server.complete("import os", **wish).choices[0], wishes))
    assert done[2].text == plain
    assert done[1].text in ("yes", "no")
    tags = json.loads(done[0].text)
    assert (set(tags), set(tags["tags"]) <= {"a", "b"}) == ({"name", "tags"}, True)
    assert json.loads(done[3].text) == json.loads(done[4].text) == {}
    assert [done[index].finish_reason for index in (0, 1, 3)] == ["stop", "stop", "stop"]
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    found = server.respond("tags", max_output_tokens=120, text=wanted)
    assert set(json.loads(found.output_text)) == {"name", "tags"}


def test_the_text_of_a_stop_token_ends_no_string(server: Running, stream: bool) -> None:
    text = "a<|endoftext|>b<|user|>"
    for schema, expected in (
        ({"enum": [text]}, text),
        ({"type": "string", "pattern": "^<\\|endoftext\\|>$"}, text[1:14]),
    ):
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = server.chat("?", response_format=form, max_tokens=60, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        content = "".join((one.delta if stream else one.message).content or "" for one in choices)
        assert (content, choices[-1].finish_reason) == (json.dumps(expected), "stop")


def test_what_lm_eval_asks(server: Running, model: Model) -> None:
    texts = ["def f(x):\n    return x", "import os\nimport sys"]
    prompts = [model.tokenizer.encode(text) for text in texts]
    for most in (1, 0):
        body = {"model": NAME, "temperature": 0, "max_tokens": most, "logprobs": 1, "seed": 1234, "echo": True}
        status, found = server.post("/v1/completions", {"prompt": prompts, **body})
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
            assert (choice["text"] == text, choice["finish_reason"]) == (most == 0, "length")
        assert found["usage"]["completion_tokens"] == 2 * most
        assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    chunks = list(server.complete(texts[0], max_tokens=2, logprobs=1, echo=True, stream=True))
    assert chunks[0].choices[0].text.startswith(texts[0])
    assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks) == len(prompts[0]) + 2  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(("stream", "name"), [(False, "complete"), (True, "events")])
def test_long_answers_hold_up_nobody(server: Running, stream: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of thousands of tokens take a while to write out: nobody else waits."""
    begun, go_on, method = threading.Event(), threading.Event(), getattr(CompletionFormatter, name)

    def slow(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return method(*given)

    monkeypatch.setattr(CompletionFormatter, name, slow)
    with ThreadPoolExecutor(1) as client:
        asked = {"prompt": "def f", "max_tokens": 1, "logprobs": 2, "echo": True, "stream": stream}
        answer = client.submit(server.request, "POST", "/v1/completions", json.dumps(asked).encode(),
                               headers={"content-type": "application/json"})  # fmt: skip
        try:
            assert begun.wait(30)
            assert server.request("GET", "/health").status == 200
        finally:
            go_on.set()
        assert answer.result(30).status == 200
        assert b"error" not in answer.result(30).read()


def test_a_conversation(server: Running, model: Model) -> None:
    expected = model.generate("system: be brief\nuser: what?\nassistant:", max_new_tokens=10)
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": "?"}]},
    ]
    assert server.chat(messages, max_completion_tokens=10).choices[0].message.content == expected.text
    chunks = list(server.chat(messages, max_tokens=10, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    loud = model.generate("user: a\nLOUDassistant:", max_new_tokens=10).text
    found = server.chat("a", max_tokens=10, extra_body={"chat_template_kwargs": {"shout": "LOUD"}})
    assert found.choices[0].message.content == loud


def test_log_probabilities_of_a_chat(server: Running, model: Model, stream: bool) -> None:
    expected = model.generate("user: 1 + 1\nassistant:", max_new_tokens=6, logprobs=3)
    found = server.chat("1 + 1", max_tokens=6, logprobs=True, top_logprobs=3, stream=stream)
    parts = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
    assert [entry.logprob for entry in entries] == pytest.approx([score.logprob for score in expected.scores])
    assert "".join(entry.token for entry in entries) == expected.text
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == expected.text
    for entry, score in zip(entries, expected.scores, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([value for _, value in score.top])


def test_what_needs_a_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": _HI, "tools": [_F]}
    answered = [*_HI, {"role": "tool", "tool_call_id": "1", "content": "5"}]
    for asked, param, why in ((body, "tools", "<tool_call>"), ({"messages": answered}, "messages", "chat template")):
        status, found = server.post("/v1/chat/completions", asked)
        assert (status, found["error"]["param"], why in found["error"]["message"]) == (400, param, True)
    assert server.post("/v1/chat/completions", {**body, "tool_choice": "none", "max_tokens": 1})[0] == 200
    monkeypatch.setattr(server.text, "template", None)
    status, found = server.post("/v1/chat/completions", {"messages": _HI})
    assert (status, "no chat template" in found["error"]["message"]) == (400, True)


def test_models_health_and_what_is_not_here(server: Running) -> None:
    client = server.client()
    assert ([one.id for one in client.models.list()], client.models.retrieve(NAME).id) == ([NAME], NAME)
    with pytest.raises(openai.NotFoundError, match="model: expected 'example', found 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.InternalServerError) as refused:
        client.embeddings.create(model=NAME, input="a")
    assert refused.value.status_code == 501
    for path, status in (
        ("/health", 200), ("/nothing", 404), ("/v1/completions", 405), ("/v1/images/edits", 501),
        ("/v1/responses/resp_1", 501), ("/" + "a" * 9000, 404),
    ):  # fmt: skip
        answer = server.request("GET", path)
        assert (answer.status, len(answer.read()) < 300) == (status, True)
    described = json.loads(server.request("GET", "/openapi.json").read())
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"} <= set(described["paths"])
    assert described["components"]["schemas"]["ChatRequest"]["properties"]["top_logprobs"]["maximum"] == 20
    assert server.request("GET", "/docs").status == 200


_HI = [{"role": "user", "content": "a"}]
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}
_OBJEKT = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
_IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}
_F = function()
_CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
# By the field that is named, messages that are refused.
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "tool_call_id": [{"role": "tool", "content": "5"}],
    "content": [{"role": "user"}, {"role": "system", "content": None}],
    "tool_calls": [{**_CALLED, "role": "user", "content": ""}, {**_CALLED, "tool_calls": 5}],
    "tool_calls[0].function": [{**_CALLED, "tool_calls": [{"id": "1"}]}],
    "tool_calls[0].id": [{**_CALLED, "tool_calls": [{"function": {"name": "f"}}]}],
    "function_call": [{"role": "assistant", "function_call": {"name": "f"}}],
    "reasoning_content": [{"role": "assistant", "content": "a", "reasoning_content": 5}],
}
# Of each endpoint what its request has anyway, and the values refused by the field named (before a dot or bracket).
REFUSED: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "completions": ({"prompt": "a"}, {
        "prompt": [5, [], [1, "a"], [True], None, "", ["a", ""], [-1], [2**32], [2**64], [[5], [-(2**40)]], [5, 2**33]],
        "max_tokens": [-1, 2.5, True], "temperature": [-1, "hot"], "top_p": [1.5], "seed": ["x"], "n": [4],
        "stop[0]": [[1], ""], "stop": [["a"] * 99],
        "stream": [1], "stream_options": [3], "stream_options.include_usage": [{"include_usage": "yes"}],
        "logprobs": [21, True], "echo": [1], "logit_bias": [{"a": 1}, {"999999": 1}], "logit_bias.5": [{"5": 101}],
        "presence_penalty": [2.5], "frequency_penalty": ["1"], "repetition_penalty": [0],
        "response_format.type": [{"type": "json"}], "response_format": ["json", _OBJEKT],
        "response_format.json_schema.schema": [_SCHEMA],
        "response_format.json_schema": [{"type": "json_schema"}], "grammar": ["root := (", 5],
        "sparsity": [0.3, "0.4", True, 10**400],
        # What other servers have beside: not here, and not without a word either.
        "best_of": [2], "repeat_penalty": [1.3], "min_tokens": [2], "ignore_eos": [True], "stop_token_ids": [[5]],
        "structured_outputs": [{"json": {}}], "tools": [[_F]], "verbosity": ["low"],
    }),
    "chat/completions": ({"messages": _HI, "max_tokens": 1}, {
        "messages": ["hi", []], "messages[0]": [["hi"]], "messages[0].role": [[{"role": "robot", "content": "a"}]],
        "messages[0].content": [
            [{"role": "user"}], [{"role": "user", "content": 5}], [_IMAGE],
            [{"role": "user", "content": [{"type": "text"}]}],
        ],
        "logprobs": [None],
        # How a prompt is made is the template's.
        "chat_template": ["x"], "continue_final_message": [True], "enable_thinking": [False],
        "add_generation_prompt": [False],
        "tools": [{}, [_F] * 2, [function(name=f"f{number}") for number in range(129)],
                  [function(description="a" * 300_000)]],
        "tools[0]": [[5]], "tools[0].type": [[{"type": "web_search"}]], "tools[0].function": [[{"type": "function"}]],
        "tools[1].function.name": [[_F, function(name="a b")]],
        "tools[0].function.name": [[function(name="a" * 65)], [function(name="f\n")]],
        "tools[0].function.description": [[function(description=5)]],
        "tools[0].function.parameters": [[function(parameters=[])], [function(parameters={"type": "string"})]],
        "tools[0].function.strict": [[function(strict="yes")]],
        "tool_choice": ["clock", "required", {"type": "function", "function": {"name": "f"}}, 5],
        "parallel_tool_calls": [1],
        "chat_template_kwargs": [{"self": 1}, {"messages": []}, {"add_generation_prompt": False}, [1], 5],
        **{f"messages[1].{field}": [[*_HI, message] for message in messages] for field, messages in MESSAGES.items()},
    }),
    "responses": ({"input": "a"}, {
        "input": [None],
        "input[0].role": [[{"role": "robot", "content": "a"}]],
        "input[0].name": [[{"type": "function_call"}]],
        "input[0].arguments": [[{"type": "function_call", "name": "f"}]],
        "input[0].call_id": [[{"type": "function_call_output", "output": "5"}]],
        "input[0].output": [[{"type": "function_call_output", "call_id": "1"}]],
        "input[0]": [[{"type": "item_reference", "id": "1"}], ["a", {"role": "user", "content": 5}]],
        "input[0].content[0]": [[{"type": "reasoning", "content": [5]}]],
        "input[1].content": [[{"type": "reasoning"}, {"role": "user", "content": 5}]],
        "max_output_tokens": [0], "text.format.type": [{"format": {"type": "yaml"}}], "text.verbosity": [{"verbosity": "high"}],
        "instructions": [5],
        "previous_response_id": ["resp_1"], "tools[0].type": [[{"type": "web_search"}]],
        "tools[0].name": [[{"type": "function", "name": "a b"}]], "tool_choice": [{"type": "function", "name": "f"}],
        "temperature": ["hot"], "reasoning.effort": [{"effort": 5}], "include": [["message.output_text.logprobs"]],
    }),
}  # fmt: skip


@pytest.mark.parametrize("path", REFUSED)
def test_a_bad_field_is_named(server: Running, path: str) -> None:
    given, rows = REFUSED[path]
    pairs = [(param, value) for param, values in rows.items() for value in values]
    cases = [({**given, re.split(r"[.[]", param)[0]: value}, param) for param, value in pairs]
    if path == "completions":
        both = {"grammar": "start: /a/", "response_format": {"type": "json_object"}}
        cases += [({"prompt": ["a"] * 34, "n": 2}, "prompt"), ({**given, **both}, "grammar")]
        cases += [({**body, "echo": True}, param) for body, param in cases if param == "prompt"]
    if path == "chat/completions":
        other = {"type": "function", "function": {"name": "g"}}
        beside_tools: list[tuple[str, dict[str, Any]]] = [
            ("tool_choice", {"tool_choice": other}),
            ("tool_choice", {"tool_choice": "required", "grammar": "start: /a/"}),
            ("chat_template_kwargs", {"chat_template_kwargs": {"tools": []}}),
        ]
        cases += [({**given, "tools": [_F], **more}, param) for param, more in beside_tools]
    long: Any = {"completions": [5] * 300, "responses": "a " * 2000}
    field = next(iter(given))
    status, found = server.post(f"/v1/{path}", {field: long.get(path, [{"role": "user", "content": "a " * 2000}])})
    assert (status, found["error"]["param"], found["error"]["code"]) == (400, field, "context_length_exceeded")
    assert "256" in found["error"]["message"]
    assert field != "prompt" or "300 tokens" in found["error"]["message"]
    for body, param in cases:
        body |= {"top_logprobs": 2} if param == "logprobs" and path != "completions" else {}
        status, found = server.post(f"/v1/{path}", body)
        error = found["error"]
        code = 501 if body.get("messages") == [_IMAGE] else 400
        assert (status, error["param"], error["type"]) == (code, param, "invalid_request_error"), body
        assert param in error["message"]


def test_a_bad_body(server: Running) -> None:
    refused = [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"prompt": "' + b"a " * 100_000 + b'"}']
    refused += [b'{"prompt": NaN}', b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\\ud800"}']
    for body in refused:
        status, answer = server.post("/v1/completions", body)
        assert (status, bool(answer["error"]["message"])) == (400, True), body[:40]
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # told before it had sent everything
        assert server.post("/v1/completions", b" " * (9 * 2**20))[0] == 413
    # A form, which any page may send anywhere without being asked.
    for header in ({"content-type": "text/plain"}, {"content-encoding": "gzip"}):
        assert server.post("/v1/completions", {"prompt": "a"}, **header)[0] == 415


def test_a_bug_is_a_500(server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = Mock(side_effect=ZeroDivisionError("secret"))
    for where, name in ((CompletionFormatter, "__init__"), (Encoder, "encode")):
        monkeypatch.setattr(where, name, broken)
        for stream in (False, True):
            before = server.metric('wisparse_requests_total{status="500"}')
            caplog.clear()
            status, body = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": stream})
            assert (status, body["error"].pop("type")) == (500, "server_error")
            assert set(body["error"]) == {"message", "param", "code"}
            assert "secret" not in str(body)
            assert server.metric('wisparse_requests_total{status="500"}') == before + 1
            assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]
    monkeypatch.undo()
    monkeypatch.setattr(CompletionFormatter, "end", broken)  # the status is out by then
    with pytest.raises(openai.APIError, match="its log has more"):
        list(server.complete("a", max_tokens=1, stream=True))
    server.idle()


def test_fields_that_change_nothing_pass(server: Running) -> None:
    neutral = {name: value for name, values in ResponsesRequest.unsupported.items() for value in values[-1:]}
    asked = {"messages": _HI, "max_tokens": 1, **neutral, "user": "b", "metadata": {"c": "d"}}
    assert server.post("/v1/chat/completions", {**asked, "chat_template": None})[0] == 200
    asked = {"input": "a", "max_output_tokens": 1, "store": False}
    asked |= {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"}}
    assert server.post("/v1/responses", {**asked, "reasoning": {"effort": None, "summary": "auto"}})[0] == 200


HABITS: list[tuple[str, dict[str, Any], str | None]] = [
    ("chat/completions", {"stop": [str(number) for number in range(64)], "reasoning_effort": "low", "user": "u"}, None),
    ("completions", {"prompt": "a", "stop": ["s"] * 17, "store": True}, None),
    ("messages", {"stop_sequences": ["s"] * 64, "metadata": {"user_id": "u"}, "context_management": {}}, None),
    ("responses", {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}, "prompt_cache_key": "k"}, None),
    ("chat/completions", {"temprature": 0.5, "guidance": 1}, "'temprature' (did you mean temperature?), 'guidance'"),
    ("completions", {"prompt": "a", "max_token": 1}, "'max_token' (did you mean max_tokens?)"),
    ("messages", {"stop_sequence": ["s"]}, "'stop_sequence' (did you mean stop_sequences?)"),
    ("responses", {"input": "a", "max_output_token": 1}, "'max_output_token' (did you mean max_output_tokens?)"),
    ("chat/completions", {"\x1b[2J\xe9\n" * 30: 1}, "'\\x1b[2J\\xe9\\n\\x1b[2J\\xe9\\n\\x1b[2J\\xe9\\n"),
]


@pytest.mark.parametrize(("path", "more", "unknown"), HABITS)
def test_what_clients_send(
    server: Running, stream: bool, path: str, more: dict[str, Any], unknown: str | None, caplog: Any
) -> None:
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    asked = {} if "prompt" in more or "input" in more else {"messages": _HI}
    body = json.dumps({**asked, limit: 1, "stream": stream, **more})
    for _ in range(2):
        answer = server.request("POST", f"/v1/{path}", body.encode(), headers={"content-type": "application/json"})
        assert answer.status == 200, answer.read()
        answer.read()
        warning = answer.getheader("x-wisparse-warning")
        assert (warning or "").startswith(f"unknown fields are ignored: {unknown}" if unknown else "")
        assert (warning is None) is (unknown is None)
    assert len([record for record in caplog.records if "unknown fields" in record.message]) <= 1  # once


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}), ('{"a": 1}', {"a": 1}), ('"{\\"a\\": 1}"', {"a": 1}), ('{"city": "Os', {"arguments": '{"city": "Os'}),
        ("[1]", {"arguments": "[1]"}), ([5], {"arguments": [5]}), ("null", {"arguments": "null"}), ({"a": 1}, {"a": 1}),
    ],
)  # fmt: skip
def test_calls_of_earlier_turns_are_read(arguments: Any, read: dict[str, Any]) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    answered = {"role": "tool", "tool_call_id": "1", "content": None}
    messages = [*_HI, {"role": "assistant", "tool_calls": [call]}, answered]
    _, said, result = validated(ChatRequest, {"messages": messages}).conversation()
    assert (said["tool_calls"][0]["function"]["arguments"], result["content"]) == (read, "")


def test_the_effort_goes_to_the_template(server: Running) -> None:
    chat: Any = {"messages": _HI, "reasoning_effort": "low"}
    assert validated(ChatRequest, chat).template_variables() == {"reasoning_effort": "low"}
    respond = validated(ResponsesRequest, {"input": "a", "reasoning": {"effort": "high"}})
    assert respond.as_chat().template_variables() == {"reasoning_effort": "high"}
    for path in ("/health", "/v1/models", "/"):
        answer = server.request("HEAD", path)
        assert (answer.status, answer.read()) == (200, b"")


def test_a_key(bundle: Path) -> None:
    with Running(bundle, api_key="sesame", cors=("http://page.example",)) as server:
        assert server.client("sesame").models.list()
        for key in ("wrong", "sesam", "sesame2", "é"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                server.client(key).completions.create(model=NAME, prompt="a", max_tokens=1)
        assert "sesame" not in repr(server.settings)
        # Anthropic's clients have one of two headers.
        asked = {"messages": _HI, "max_tokens": 1}
        for header in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
            assert server.post("/v1/messages", asked, **header)[0] == 200
        for header in ({"x-api-key": "wrong"}, {}):
            status, refused = server.post("/v1/messages", asked, **header)
            assert (status, refused["error"]["type"]) == (401, "authentication_error")
            assert "x-api-key: KEY" in refused["error"]["message"]
        for header in ({"x-api-key": "sesame"}, {}):
            assert server.post("/v1/completions", {"prompt": "a"}, **header)[0] == 401
        headers = {"origin": "http://page.example", "access-control-request-method": "POST"}
        answer = server.request("OPTIONS", "/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"


def test_only_allowed_host_names_are_answered(bundle: Path) -> None:
    """Without this, a page of evil.example could have its name resolve to 127.0.0.1, and read what the server says."""

    def status(host: str, path: str = "/v1/models") -> int:
        answer = server.request("GET", path, headers={"host": host, "origin": f"http://{host}"})
        found.append(answer.read().decode())
        return answer.status

    found: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as local:
        hosts = transport.allowed_hosts(local, ["Chat.example"])
    with Running(bundle, hosts=hosts) as server:
        good = ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]", "[::1]:8000", "chat.example", "chat.example:1")
        assert [status(host) for host in good] == [200] * len(good)
        bad = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80"]
        bad += ["::1", "", "localhost:80:80", "[::2]"]
        for path in ("/", "/v1/models", "/metrics", "/health", "/docs", "/nothing"):
            assert [status(host, path) for host in bad] == [400] * len(bad), path
            error = json.loads(found[-1])["error"]
            assert (error["code"], "--allowed-host" in error["message"]) == ("host_not_allowed", True)
    local = ["localhost", "127.0.0.1", "[::1]"]
    for address, names, expected in (
        *((address, [], local) for address in ("127.0.0.1", "::1")),
        *((address, ["a.example"], [*local, address, "a.example"]) for address in ("127.0.0.2", "192.0.2.7")),
        ("127.0.0.1", ["*"], []),
        ("0.0.0.0", [], []),
    ):
        assert transport.allowed_hosts(Mock(getsockname=Mock(return_value=(address, 8000))), names) == expected


def _send(server: Running, head: str, body: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    one.sendall(head.encode() + body)
    return one


_POST = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


def _raw(server: Running, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    return _send(server, _POST.format(len(data)), data)


def test_a_client_that_goes_takes_its_request_with_it(server: Running, stream: bool) -> None:
    gone = server.metric("wisparse_cancelled_total")
    one = _raw(server, {"prompt": "def f(x):", "max_tokens": 240, "temperature": 0, "stream": stream})
    if stream:
        assert one.recv(100)
    else:
        server.until(lambda: server.metric("wisparse_running "))
    one.close()
    server.idle()
    assert server.metric("wisparse_cancelled_total") == gone + 1


def test_a_client_that_does_not_read_is_dropped(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLIENT_SECONDS", 0.5)
    monkeypatch.setattr(app, "FLUSH_SECONDS", 0.0)
    # Events so large that the sockets' buffers fill: every token's comes with a name of 60 kB.
    monkeypatch.setattr(CompletionFormatter, "events", lambda self, items: b"data: " + b"x" * 300_000 + b"\n\n")
    gone = server.metric("wisparse_cancelled_total")
    one = _raw(server, {"prompt": "def f(x):", "max_tokens": 240, "temperature": 0, "stream": True})
    server.until(lambda: server.metric("wisparse_cancelled_total") > gone)
    one.close()
    server.idle()
    monkeypatch.undo()
    assert server.complete("import", max_tokens=3).choices


def test_slow_and_endless_clients(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with _send(server, _POST.format(99999999999)) as one:
        assert b" 413 " in one.recv(100)  # not waited for
    monkeypatch.setattr(transport, "CLIENT_SECONDS", 0.3)
    with _send(server, _POST.format(50), b"{") as one:
        assert b" 408 " in one.recv(100)
    monkeypatch.undo()
    endless = _send(server, "GET /health HTTP/1.1\r\nhost: a\r\n")
    with endless, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for _ in range(200):
            endless.sendall(b"x: " + b"y" * 1000 + b"\r\n")
        assert b" 400 " in endless.recv(100)
    assert server.client().models.list()
    monkeypatch.setattr(transport, "CLIENT_SECONDS", 0.3)
    asking = _raw(server, {"prompt": "def f(x):", "max_tokens": 100, "temperature": 0})
    whole = "GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    refused = _POST.replace("content-type: application/json\r\n", "").format(999) + "{"
    for sent in ("", whole[:20], refused, f"{whole}GET "):
        with _send(server, sent) as one:
            while one.recv(1000):
                pass
    found = b""
    while b'"usage"' not in found:  # a client that waits for its answer is not cut off
        piece = asking.recv(10_000)
        assert piece
        found += piece
    asking.close()


def test_failures_are_said(server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lose_device(monkeypatch)
    with pytest.raises(openai.APIError, match="the device is lost"):
        list(server.complete("def", max_tokens=50, stream=True))
    (record,) = (record for record in caplog.records if record.levelname in ("WARNING", "ERROR"))
    assert record.exc_info is not None
    assert "in broken" in caplog.text  # the traceback
    assert server.complete("import", max_tokens=3).choices
    lose_device(monkeypatch)
    *_, error, failed = server.respond("def", max_output_tokens=50, stream=True)
    assert (error.type, failed.type, failed.response.status) == ("error", "response.failed", "failed")
    assert "the device is lost" in error.message
    assert failed.response.error.message == error.message
    assert server.complete("import", max_tokens=3).choices

    monkeypatch.setattr(TorchDecoder, "prefill", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    status, found = server.post("/v1/completions", {"prompt": [5] * 20})
    assert (status, found["error"]["type"]) == (500, "server_error")
    assert "memory" in found["error"]["message"]


BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest)
_FIELDS = sorted({field for kind in BODIES for field in kind.model_fields})
_KEYS = st.sampled_from(["role", "content", "type", "text", "name", "id", "input", "format", "tool_use_id"])
_WORDS = ["user", "assistant", "text", "tool_use", "tool_result", "thinking", "custom", "any"]
_NUMBERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
_VALUES = st.recursive(
    _NUMBERS | st.sampled_from(_WORDS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner),
    max_leaves=8,
)
_ROLES = st.sampled_from(["user", "assistant", "system"])
_MESSAGE = st.fixed_dictionaries({"role": _ROLES, "content": st.lists(st.dictionaries(_KEYS, _VALUES), max_size=3)})


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES), st.lists(_MESSAGE, max_size=3))
def test_whatever_a_body_holds_is_read_or_refused(body: dict[str, Any], messages: list[Any]) -> None:
    enough: dict[str, Any] = {"messages": _HI, "max_tokens": 1}
    for kind, more in itertools.product(BODIES, ({}, enough, {**enough, "messages": messages}, {"input": messages})):
        refused = None
        try:
            found = validated(kind, {**body, **more})
            assert (found if isinstance(found, (ChatRequest, CompletionRequest)) else found.as_chat()).n >= 1
        except ApiError as error:
            refused = error
        assert refused is None or (refused.status_code in (400, 501) and refused.error["param"])


def test_an_address_that_cannot_be_listened_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, reason in (("127.0.0.1", "Address already in use"), ("no.such.host.invalid", "[^()]+")):
            said = f"cannot listen at {host} port {port}: {reason}; choose another --host or --port"
            with pytest.raises(UsageError, match=f"^{said}$"):
                open_socket(host, port)


@contextlib.contextmanager
def _serving(bundle: Path, *options: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``wisparse serve`` in a process of its own that ends well, and what it says when it serves."""
    command = [sys.executable, "-m", "wisparse", "serve", bundle, "--port", "0", "--backend", "torch", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment) as server:
        try:
            yield server, next(line for line in server.stderr if line.startswith("serving "))
            assert (server.wait(60), server.stderr.read()) == (0, "")
        finally:
            server.kill()


def test_the_verb_serves_and_ends_well(bundle: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    options = ("--device", "cpu", "--max-seq-len", "256", "--alias", "other", "--api-key-file", key)
    with _serving(bundle, *options, WISPARSE_API_KEY="none") as (server, line):  # what is typed comes first
        assert line.startswith("serving other at http://127.0.0.1:")
        assert "sesame" not in line
        url = line.split()[3]
        none, client = (openai.OpenAI(base_url=url, api_key=key, max_retries=0) for key in ("none", "sesame"))
        with pytest.raises(openai.AuthenticationError):
            none.models.list()
        with pytest.raises(openai.BadRequestError, match="--allowed-host"):
            none.models.list(extra_headers={"host": "evil.example"})
        stream = client.completions.create(model="other", prompt="def", max_tokens=100, stream=True, temperature=0)
        first = next(iter(stream))
        server.send_signal(signal.SIGTERM)  # what is under way is finished
        *_, last = stream
        assert [one.choices[0].finish_reason for one in (first, last)] == [None, "length"]


def test_prompts_outlive_the_server(bundle: Path, tmp_path: Path) -> None:
    found, cached = None, []
    for _ in range(2):
        with _serving(bundle, "--max-seq-len", "512", "--prompt-cache", tmp_path / "prompts") as (server, line):
            client = openai.OpenAI(base_url=line.split()[3], api_key="none", max_retries=0)
            found = client.completions.create(model=bundle.name, prompt="x = 1\n" * 60, max_tokens=1).usage
            cached.append(found.prompt_tokens_details.cached_tokens)
            server.send_signal(signal.SIGTERM)
    assert cached == [0, (found.prompt_tokens - 1) // 128 * 128]
    assert cached[1] > 0


# As from a terminal: a program started in the background inherits that Ctrl-C is ignored.
_SIGNALLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import wisparse.runtime.serve.app as app
number, make_app = int(sys.argv.pop(1)), app.make_app
app.make_app = lambda *given: os.kill(os.getpid(), number) or make_app(*given)
from wisparse.cli import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_before_the_server_runs_ends_it(bundle: Path, number: int, code: int) -> None:
    options = ["serve", str(bundle), "--port", "0", "--backend", "torch", "--max-seq-len", "64"]
    done = subprocess.run([sys.executable, "-c", _SIGNALLED, f"{number:d}", *options], capture_output=True, timeout=60)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def test_a_second_interrupt_answers_what_waits_with_an_error(bundle: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 1500, "stop_token_ids": [], "logit_bias": {"0": -100}}
    down = 'data: {"error":{"message":"the server is shutting down'
    cases = [
        ("/v1/completions", {"prompt": "def"}, '"code":"unavailable"'),
        ("/v1/completions", {"prompt": "def", "stream": True}, down),
        ("/v1/messages", {"messages": _HI, "stream": True}, "event: error\n"),
        ("/v1/responses", {"input": "def", "stream": True, "max_tokens": None}, "event: response.failed\n"),
    ]
    with _serving(bundle) as (server, line):
        port = int(line.split("/v1")[0].rpartition(":")[2])
        connections = []
        for path, body, _ in cases:
            connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=60))
            headers = {"content-type": "application/json"}
            connections[-1].request("POST", path, json.dumps({**asked, **body}), headers)
        answers = [connection.getresponse() for connection in connections[1:]]
        for answer in answers:
            assert answer.readline()
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionRefusedError):  # it listens no more
            while True:
                socket.create_connection(("127.0.0.1", port), timeout=60).close()
        server.send_signal(signal.SIGINT)
        answers.insert(0, connections[0].getresponse())
        assert [answer.status for answer in answers] == [503, 200, 200, 200]
        for answer, (path, _, expected) in zip(answers, cases, strict=True):
            assert expected in answer.read().decode(), path
        assert server.wait(30) == 0


def test_keys_and_origins_that_serve_takes(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(option: str, value: str) -> str:
        done = CliRunner().invoke(cli, ["serve", str(bundle), option, value])
        assert isinstance(done.exception, UsageError)
        return str(done.exception)

    for origin in ("", "localhost:3000", "http://a.example/", "http://a.example/page", "http://"):
        assert "--cors: expected * or an origin" in refused("--cors", origin)
    for host in ("", "http://a.example", "a.example:80", "a b", "::1"):
        assert "--allowed-host: expected * or a host name" in refused("--allowed-host", host)
    monkeypatch.delenv("WISPARSE_API_KEY", raising=False)
    assert serve_verb.read_api_key(None) is None
    monkeypatch.setenv("WISPARSE_API_KEY", "sesame\n")
    assert serve_verb.read_api_key(None) == "sesame"
    for key in ("", "  \n", "zwölf", "a\x01b"):
        (tmp_path / "key").write_text(key)
        assert "expected a key" in refused("--api-key-file", str(tmp_path / "key"))
        monkeypatch.setenv("WISPARSE_API_KEY", key)
        with pytest.raises(UsageError, match="WISPARSE_API_KEY: expected a key"):
            serve_verb.read_api_key(None)


def test_a_server_says_that_it_serves_once_all_is_prepared(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for that line finds nothing left to compile; who connects before gets the same answer later."""
    done: list[str] = []

    def prepare(self: Engine, max_queue: int) -> None:
        time.sleep(0.2)
        done.append(f"prepared for {max_queue}")

    monkeypatch.setattr(Engine, "start", prepare)
    model = wisparse.load(bundle, dtype="float32", backend="torch", max_seq_len=64)
    with model, TestClient(make_app(model, ServeSettings(NAME, 7), lambda: done.append("ready"))):
        assert done == ["prepared for 7", "ready"]
