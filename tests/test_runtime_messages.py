"""Anthropic's ``/v1/messages``, asked by Anthropic's own client; helpers of both clients beside the protocol."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import anthropic
import openai
import pytest
from pydantic import BaseModel
from served import NAME, Running, lose_device, with_template

from wisparse.runtime.generation.engine import Engine, QueueFullError
from wisparse.runtime.model import Model
from wisparse.runtime.protocol.messages import MessagesFormatter, MessagesRequest
from wisparse.runtime.protocol.requests import validated
from wisparse.runtime.serve import transport

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ '\n' }}{% endfor %}assistant:{% if enable_thinking %}<think>\n{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": CITY}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object"}}
ASK: list[Any] = [{"role": "user", "content": "def f(x):"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
CALLS = f'{CALL}<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>'
TWO = f"Well.{CALLS}"


@pytest.fixture(scope="module")
def chat_bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of conftest's: that of the model and the server here."""
    return with_template(example_model, tmp_path_factory.mktemp("messages"), TEMPLATE)


def client(server: Running, **key: str) -> anthropic.Anthropic:
    key = key or {"api_key": "none"}
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", max_retries=0, **key)


def says(text: str) -> dict[str, Any]:
    """A model that can say nothing but this."""
    return {"grammar": f"start: {json.dumps(text)}"}


def ask(server: Running, messages: Any = ASK, stream: bool = False, **more: Any) -> Any:
    asked = {"model": NAME, "messages": messages, "max_tokens": 120, **more}
    asked["extra_body"] = {"temperature": 0, **asked.get("extra_body", {})}
    if not stream:
        return client(server).messages.create(**asked)
    with client(server).messages.stream(**asked) as events:
        return events.get_final_message()


# Of each request the messages of the chat that asks for the same.
_CALLED: dict[str, Any] = {"role": "assistant", "content": [
    {"type": "thinking", "thinking": "cold?", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
    {"type": "text", "text": "Well."},
    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
]}  # fmt: skip
_RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}
_PARTS = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
_BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=97bd6;"}
CHATS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "text": ({}, [("user", "def f(x):")]),
    "blocks": ({"messages": [{"role": "user", "content": _PARTS}]}, [("user", "ab")]),
    "system": ({"system": "Count."}, [("system", "Count."), ("user", "def f(x):")]),
    "system's blocks": ({"system": [_BILLING, *_PARTS]}, [("system", "ab"), ("user", "def f(x):")]),
    "neighbours of one role": ({"messages": ASK * 2}, [("user", "def f(x):\n\ndef f(x):")]),
    "results": (
        {"messages": [*ASK, _CALLED, {"role": "user", "content": [
            _RESULT, {**_RESULT, "content": _PARTS}, {"type": "tool_result", "tool_use_id": "toolu_1"},
            {**_RESULT, "is_error": True}, {"type": "text", "text": "on"},
        ]}]},
        [("user", "def f(x):"), ("assistant", "Well."), ("tool", "5"), ("tool", "ab"), ("tool", ""),
         ("tool", "Error: 5"), ("user", "on")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), CHATS.values(), ids=CHATS)
def test_a_request_becomes_a_chat(body: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    request = validated(MessagesRequest, {"messages": ASK, "max_tokens": 5, "tools": [WEATHER], **body})
    chat = request.as_chat()
    assert [(one.role, one.content) for one in chat.messages] == expected
    called = [one for one in chat.messages if one.tool_calls]
    for one in called:
        assert one.reasoning_content == "cold?"
        assert one.tool_calls[0].id == "toolu_1"
        assert (one.tool_calls[0].function.name, one.tool_calls[0].function.arguments) == ("weather", {"city": "Oslo"})
    assert bool(called) == ("tool" in [role for role, _ in expected])
    assert chat.functions == [{"name": "weather", "description": "of a city", "parameters": CITY}]


def test_fields_become_a_chats() -> None:
    def chat(**more: Any) -> Any:
        body = {"messages": ASK, "max_tokens": 5, "tools": [WEATHER, CLOCK], **more}
        return validated(MessagesRequest, body).as_chat()

    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stream": True, "max_tokens": 5, "seed": 3}
    found = chat(**same, stop_sequences=["a"], metadata={"user_id": "b"})
    assert found.model_dump(include={*same, "stop"}) == {**same, "stop": ["a"]}
    choices = {"auto": [], "none": [], "any": ["weather", "clock"], "tool": ["clock"]}
    for kind, forced in choices.items():
        found = chat(tool_choice={"type": kind, **({"name": "clock"} if kind == "tool" else {})})
        assert [one["name"] for one in found.forced] == forced
        assert (found.functions == []) == (kind == "none")
    assert chat().several_calls
    assert not chat(tool_choice={"type": "any", "disable_parallel_tool_use": True}).several_calls
    for thinking, expected in ((None, False), ("disabled", False), ("enabled", True), ("adaptive", True)):
        given = {"type": thinking, "budget_tokens": 1024} if thinking else None
        found = chat(thinking=given)
        assert found.chat_template_kwargs == {"enable_thinking": expected, "thinking": expected}
        assert found.thinking_token_budget == (1024 if expected else None)
    assert chat(chat_template_kwargs={"enable_thinking": True}).chat_template_kwargs == {"enable_thinking": True}


_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
# By the words of the error's message, bodies that are refused.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "max_tokens: this field is required": [{"max_tokens": None}],
    "max_tokens: expected ": [{"max_tokens": 0}, {"max_tokens": "5"}],
    "messages: expected a user's message at the end": [{"messages": [*ASK, {"role": "assistant", "content": "a"}]}],
    "messages[0].role: expected 'user', 'assistant' or 'system', found 'robot'":
        [{"messages": [{"role": "robot", "content": "a"}]}],
    "messages[0].content[0]: expected a block of type text or tool_result, as this server reads text alone, found ": [
        {"messages": [{"role": "user", "content": [block]}]}
        for block in (_IMAGE, {"type": "document"}, {"type": "tool_use"}, {"text": "a"}, {"type": [5]})
    ],
    "messages[0].content[0].text: this field is required":
        [{"messages": [{"role": "user", "content": [{"type": "text"}]}]}],
    "messages[0].content[0].content: expected a block of type text":
        [{"messages": [{"role": "user", "content": [{**_RESULT, "content": [_IMAGE]}]}]}],
    "messages[1].content[0].input: ":
        [{"messages": [*ASK, {"role": "assistant", "content": [{**_CALLED["content"][-1], "input": "x"}]}, *ASK]}],
    "system: expected a block of type text": [{"system": [_IMAGE]}],
    "temperature: ": [{"temperature": "hot"}],
    "stop_sequences[0]: ": [{"stop_sequences": [""]}],
    "tools[0].type: expected 'custom', found 'web_search_20250305'":
        [{"tools": [{"type": "web_search_20250305", "name": "web_search"}]}],
    "tools[0].input_schema: ":
        [{"tools": [{"name": "f", **more}]} for more in ({}, {"input_schema": {"type": "string"}})],
    "tools[0].name: ": [{"tools": [{**CLOCK, "name": "a b"}]}],
    "tools: expected a name for each of them": [{"tools": [CLOCK, CLOCK]}],
    "tool_choice: expected tools": [{"tool_choice": {"type": "any"}}],
    "tool_choice.name: expected the name of one of the tools, found 'f'":
        [{"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "f"}}],
    "thinking.type: ": [{"thinking": {"type": "x"}}],
    "output_config.format.type: ": [{"output_config": {"format": {"type": "yaml"}}}],
    "mcp_servers: this server does not have it": [{"mcp_servers": [{"name": "a"}]}],
    "n: ": [{"n": 2}],
    "prompt is too long: the prompt ": [{"messages": [{"role": "user", "content": "a " * 2000}]}],
}  # fmt: skip


def test_what_is_refused_is_named(server: Running) -> None:
    for words, bodies in REFUSED.items():
        for body in bodies:
            status, found = server.post("/v1/messages", {"messages": ASK, "max_tokens": 1, **body})
            assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error"), body
            assert words in found["error"]["message"]
            if not words.startswith(("max_tokens", "messages: ", "stop_")):
                assert server.post("/v1/messages/count_tokens", {"messages": ASK, **body}) == (status, found)


def test_several_turns_and_a_stop_sequence(server: Running, model: Model, stream: bool) -> None:
    said = (("user", "1 2 3"), ("assistant", "4"), ("user", "on"))
    turns = [{"role": role, "content": content} for role, content in said]
    prompt = "system: Count.\nuser: 1 2 3\nassistant: 4\nuser: on\nassistant:"
    expected = model.generate(prompt, max_new_tokens=12)
    found = ask(server, turns, stream, system="Count.", max_tokens=12)
    assert (found.type, found.role, found.model, found.id[:4]) == ("message", "assistant", NAME, "msg_")
    assert [(block.type, block.text) for block in found.content] == [("text", expected.text)]
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.prompt_tokens
    assert usage.output_tokens == len(expected.token_ids) == 12
    for text, stop, *end in (
        ("4, 5, 6, 7", ["never", "5, "], "stop_sequence", "5, ", "4, "),
        ("4, 5, 6", [], "end_turn", None, "4, 5, 6"),
        ("4, 5", ["4"], "stop_sequence", "4", ""),
    ):
        found = ask(server, turns, stream, stop_sequences=stop, extra_body=says(text))
        (block,) = found.content
        assert [found.stop_reason, found.stop_sequence, block.text] == end


def test_what_the_cache_held_is_told(server: Running, stream: bool) -> None:
    server.complete(["z = 3", "y = 3", "x = 3"], max_tokens=1)  # which take the place of what was there
    asked = [{"role": "user", "content": f"{stream}\n" + "x = 1\n" * 40}]
    usage = ask(server, asked, stream, max_tokens=1).usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)
    again = ask(server, asked, stream, max_tokens=1).usage
    assert again.cache_read_input_tokens >= 128
    assert again.input_tokens + again.cache_read_input_tokens == usage.input_tokens


def test_thoughts_tools_and_their_results(server: Running, stream: bool) -> None:
    tools: Any = {"tools": [WEATHER, CLOCK]}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    found = ask(server, stream=stream, thinking=thinking, extra_body=says(f"cold?</think>\n\n{TWO}"), **tools)
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, *calls = found.content
    assert (thought.thinking, text.text, found.stop_reason) == ("cold?", "Well.", "tool_use")
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert len({call.id for call in calls}) == 2
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"{call.name}: 5"} for call in calls]
    turns = [*ASK, {"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    said = ask(server, turns, stream, extra_body=says("It is cold."), **tools)
    assert ([block.text for block in said.content], said.stop_reason) == (["It is cold."], "end_turn")
    prompt = f"weather clock user: def f(x):\nassistant: Well.(cold?){CALLS}\n"
    prompt += "tool: weather: 5\ntool: clock: 5\nassistant:"
    counted = client(server).messages.count_tokens(model=NAME, messages=turns, **tools)
    assert counted.input_tokens == len(server.text.encode(prompt, add_special_tokens=False))
    # A conversation that ends with an assistant's message can be counted, too.
    assert client(server).messages.count_tokens(model=NAME, messages=turns[:2], **tools).input_tokens > 0
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(server, stream=stream, extra_body=says(TWO), tool_choice=one, **tools).content) == 2
    none = ask(server, stream=stream, extra_body=says(TWO), tool_choice={"type": "none"}, **tools)
    assert [(block.type, block.text) for block in none.content] == [("text", TWO)]


def test_an_answer_of_a_schema(server: Running) -> None:
    config = {"format": {"type": "json_schema", "schema": CITY}, "effort": "low"}
    found = ask(server, extra_body={"output_config": config})
    assert json.loads(found.content[0].text)["city"] in ("Rome", "Oslo")


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]
    square: bool


class Visit(BaseModel):
    place: Place
    days: Literal[1, 2, 3]


def test_answers_that_the_clients_parse(server: Running) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": ASK}
    chats, responses = server.client().chat.completions, server.client().responses
    answer = chats.parse(**asked, temperature=0, response_format=Visit).choices[0].message
    assert isinstance(answer.parsed, Visit)
    with chats.stream(**asked, temperature=0, response_format=Visit) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text == answer.content
    one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    called = chats.parse(**asked, **one, tools=[openai.pydantic_function_tool(Visit)])
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Visit)
    assert isinstance(responses.parse(model=NAME, input="def f(x):", text_format=Visit).output_parsed, Visit)
    found = client(server).messages.parse(**asked, max_tokens=100, output_format=Visit)
    assert isinstance(found.parsed_output, Visit)


def test_asynchronous_clients(server: Running) -> None:
    root = f"http://127.0.0.1:{server.port}"
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "max_tokens": 12, "extra_body": {"temperature": 0}}

    async def ask() -> set[str | None]:
        chats = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0).chat.completions
        messages = anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0).messages
        said = await asyncio.gather(*(chats.create(**asked) for _ in range(2)))
        told = await asyncio.gather(*(messages.create(**asked) for _ in range(2)))
        pieces = [chunk.choices[0].delta.content or "" async for chunk in await chats.create(**asked, stream=True)]
        return {
            *(one.choices[0].message.content for one in said),
            *(one.content[0].text for one in told),
            "".join(pieces),
        }

    assert asyncio.run(ask()) == {server.chat(ASK, max_tokens=12).choices[0].message.content}


def test_a_streams_events(server: Running) -> None:
    body = {"model": NAME, "messages": ASK, "max_tokens": 120, "stream": True, "tools": [WEATHER, CLOCK]}
    body |= {"thinking": {"type": "adaptive"}, **says(f"cold?</think>{TWO}")}
    headers = {"content-type": "application/json"}
    answer = server.request("POST", "/v1/messages?beta=true", json.dumps(body).encode(), headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    told: list[Any] = []
    for event in answer.read().decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    first, *blocks, last, end = told
    assert (first["type"], last["type"], end) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    assert message["usage"]["input_tokens"] > 0
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] > 0
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks)
    kinds = ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]
    for index, kind in enumerate(kinds):
        begun, *deltas, ended = (event for event in blocks if event["index"] == index)
        assert (begun["type"], ended["type"]) == ("content_block_start", "content_block_stop")
        assert {(event["type"], event["delta"]["type"]) for event in deltas} == {("content_block_delta", kind)}
        if index > 1:
            assert begun["content_block"]["input"] == {}
    pieces = [event["delta"]["partial_json"] for event in blocks if event.get("delta", {}).get("partial_json")]
    assert "".join(pieces) == '{"city": "Oslo"}{}'


def _refused(server: Running, status: int, **more: Any) -> str:
    with pytest.raises(anthropic.APIStatusError) as refused:
        ask(server, **more)
    body: Any = refused.value.body
    assert (refused.value.status_code, body["type"]) == (status, "error")
    assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["type"])


def test_each_kind_of_error(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=QueueFullError("64 requests are waiting already: ask again later"))
    broken = Mock(side_effect=ZeroDivisionError("secret"))
    assert _refused(server, 400, messages=[]) == "invalid_request_error"
    assert _refused(server, 404, model="gpt-4") == "not_found_error"
    for method, path, status in (("POST", "/v1/messages/batches", 404), ("GET", "/v1/messages", 405)):
        found = json.loads(server.request(method, path).read())
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert (found["type"], found["error"]["type"]) == ("error", kind)
    monkeypatch.setattr(transport, "_MAX_BODY_BYTES", 100)
    assert _refused(server, 413) == "request_too_large"
    monkeypatch.undo()
    for owner, method, error, *refused in (
        (Engine, "submit", full, 529, "overloaded_error"),
        (MessagesFormatter, "__init__", broken, 500, "api_error"),
    ):
        monkeypatch.setattr(owner, method, error)
        assert [_refused(server, refused[0], stream=stream) for stream in (False, True)] == refused[1:] * 2
        monkeypatch.undo()
    # Those of OpenAI's addresses stay as they are.
    status, found = server.post("/v1/chat/completions", {})
    assert (status, found["error"]["param"], "type" in found) == (400, "messages", False)
    monkeypatch.setattr(Engine, "submit", full)
    with pytest.raises(openai.RateLimitError) as refused:
        server.complete("a", max_tokens=1)
    assert refused.value.response.headers["retry-after"] == "1"
    monkeypatch.undo()
    lose_device(monkeypatch)
    with pytest.raises(anthropic.APIError, match="the device is lost"):
        ask(server, stream=True)
    assert ask(server, max_tokens=3).content
