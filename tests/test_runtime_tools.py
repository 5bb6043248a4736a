"""Functions that a model may call: what is asked, what it writes, and what clients are told."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import make_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from served import NAME, TEMPLATE, Running, function
from tool_templates import PUBLISHED

from wisparse.formats.chat_template import ChatTemplate
from wisparse.runtime.generation.grammar import Grammars
from wisparse.runtime.protocol import tools as protocol
from wisparse.runtime.protocol.requests import ChatRequest, validated
from wisparse.runtime.protocol.tools import HERMES, LLAMA, MISTRAL, Delta, ToolCallParser, ToolSyntax, syntax_of
from wisparse.runtime.tokenizer import Tokenizer

SYNTAXES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
EACH_SYNTAX = pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
OBJECT = {"type": "object", "additionalProperties": False}
IN_A_CITY = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], **OBJECT}
WEATHER = function(name="weather", description="of a city", parameters=IN_A_CITY)
CLOCK = function(name="clock")
ASK: list[Any] = [{"role": "user", "content": "?"}]

_LISTS = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
_LISTS += "{% for m in messages %}{{ m.role }}: {{ m.content }}"
_ENDS = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{% if think is defined %}<think>{% endif %}"
_CALL = "{% for c in m.tool_calls or [] %}"
TEMPLATES = {
    "hermes": _LISTS + _CALL + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}" + _ENDS,
    "llama": _LISTS + _CALL + """{{ '{"name": "' + c.function.name + '", ' }}{{ '"parameters": ' }}"""
    "{{ c.function.arguments | tojson }}}{% endfor %}" + _ENDS,
    "mistral": _LISTS + "{% if m.tool_calls %}[TOOL_CALLS][" + _CALL + "{{ (c.function | tojson)[:-1] }}"
    '{% if c.id | length != 9 %}{{ raise_exception("nine characters") }}{% endif %}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + _ENDS,
}


def _told(parts: Sequence[Delta]) -> tuple[str, list[list[str]]]:
    calls: list[list[str]] = []
    for part in parts:
        if part.kind == "tool_call":
            if part.name is not None:
                assert part.index == len(calls)
                assert part.id
                calls.append([part.name, ""])
            assert part.index == len(calls) - 1  # one after the other
            calls[part.index][1] += part.text
    return "".join(part.text for part in parts if part.kind == "content"), calls


def _split(syntax: ToolSyntax, pieces: Sequence[str], **how: bool) -> tuple[str, list[list[str]]]:
    calls = ToolCallParser(syntax, {"weather", "clock"}, **how)
    parts = [part for piece in pieces for part in calls.add(piece)] + calls.finish()
    found = _told(parts)
    assert calls.count == len(found[1])
    return found


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(borders)]


def _written(syntax: ToolSyntax, calls: Sequence[tuple[str, str]]) -> str:
    objects = [f'{{"name": "{name}", "{syntax.key}": {arguments}}}' for name, arguments in calls]
    if syntax.listed:
        return f"{syntax.opens}[{', '.join(objects)}]"
    if syntax.bare:
        return "; ".join(objects)
    return "\n".join(f"{syntax.opens}\n{one}\n{syntax.closes}" for one in objects)


CALLS = ("weather", '{"city": "Oslo"}'), ("clock", "{}")
TWO = {name: _written(syntax, CALLS) for name, syntax in SYNTAXES.items()}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('aé"\\{}[]<\n '), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab{", max_size=3), inner, max_size=3),
    max_leaves=5,
)
_ARGUMENTS = st.dictionaries(st.text("ab}", max_size=3), _JSON, max_size=3)
_CUTS = st.lists(st.integers(0, 200), max_size=12)


@EACH_SYNTAX
@given(
    calls=st.lists(st.tuples(st.sampled_from(["weather", "clock"]), _ARGUMENTS), min_size=1, max_size=3),
    before=st.sampled_from(["", "Well", "Well,\n\n", "a {b}\n", "<tool", "  "]),
    ascii_only=st.booleans(),
    cuts=_CUTS,
)
def test_calls_are_found(syntax: ToolSyntax, calls: list[Any], before: str, ascii_only: bool, cuts: list[int]) -> None:
    if syntax.bare and before.strip():
        before += "\n"
    written = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    text = before + _written(syntax, written)
    for whole_calls in (True, False):
        said, found = _split(syntax, _pieces(text, cuts), whole=whole_calls)
        assert (said, [tuple(call) for call in found]) == (before.rstrip(), written)
        assert _split(syntax, _pieces(text, cuts), whole=whole_calls, one=True)[1] == [list(written[0])]


_SCRAPS = [
    "<tool_call>", "</tool_call>", "<tool_", "call>", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "<|py", "[", "]",
    "{", "}", '{"name": "weather", "arguments": ', '{"name": "clock", "parameters": {}}',
    '{"name": "nobody", "arguments": {}}',
    '{"arguments": {"a": 1}, "name": "weather"}', '{"name": "weather"}', '{"name"', '{"id": "1", ', '"', "\\", ";", ",",
    "\n", " ", "a", " " * 70, '"{\\"a\\": 1}"', "{}", "NaN", "1e999", "\\ud800", "[" * 40, "é",
]  # fmt: skip


@EACH_SYNTAX
@settings(max_examples=100)
@given(scraps=st.lists(st.sampled_from(_SCRAPS), max_size=14), cuts=_CUTS)
def test_where_pieces_end_makes_no_difference(syntax: ToolSyntax, scraps: list[str], cuts: list[int]) -> None:
    text = "".join(scraps)
    for whole in (True, False):
        found = _split(syntax, [text], whole=whole)
        assert _split(syntax, _pieces(text, cuts), whole=whole) == found
        assert _split(syntax, list(text), whole=whole) == found
        if whole:
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[1])
            assert found[1] or found[0] == text


_BROKEN = ['{"city": }', '{"city": "Oslo"', '{"city": "Oslo}}\n', '{"city": NaN}}', '["Oslo"]}', '{"a": ' * 100]
_BROKEN.append(f'{{"a": {"1" * 5000}}}}}')


@EACH_SYNTAX
def test_what_does_not_parse_is_text_as_it_stands(syntax: ToolSyntax) -> None:
    opens = "" if syntax.bare else f"{syntax.opens}[" if syntax.listed else syntax.opens
    bodies = [f'{{"name": "weather", "{syntax.key}": {broken}' for broken in _BROKEN]
    named = ('"name": "nobody", ', '"name": 5, ', "")
    for body in [*bodies, *(f'{{{name}"{syntax.key}": {{"city": "Oslo"}}}}' for name in named)]:
        text = f"So: \n{opens}{body}{']' if syntax.listed else ''}"
        assert _split(syntax, list(text)) == (text, [])


def test_arguments_come_in_pieces_and_the_name_first() -> None:
    calls = ToolCallParser(HERMES, {"weather"}, whole=False)
    pieces = 'a\n<tool_call>{"name": "wea', 'ther", "arguments": ', '{"ci', 'ty": 1}', "}", "</tool_call>"
    told = [[(part.kind, part.name, part.text) for part in calls.add(piece)] for piece in pieces]
    first = [("tool_call", "weather", ""), ("tool_call", None, '{"ci')]
    assert told == [[("content", None, "a")], [], first, [("tool_call", None, 'ty": 1}')], [], []]
    assert calls.finish() == []
    # A call whose arguments break once it is told keeps what it has.
    text = '<tool_call>{"name": "weather", "arguments": {"city": <b>Oslo'
    assert _split(HERMES, list(text), whole=False) == ("<b>Oslo", [["weather", '{"city": ']])


@EACH_SYNTAX
def test_much_of_what_could_begin_a_call_costs_little(syntax: ToolSyntax, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character is looked at so many times at most: an object ends, or is too deep, or breaks."""
    text = (syntax.opens + '{"id": {"name": "weather",\n') * 3000
    looked = 0
    reaches_end = protocol.JsonScanner.reaches_end

    def counted(self: protocol.JsonScanner, text: str) -> bool:
        nonlocal looked
        before = self.at
        try:
            return reaches_end(self, text)
        finally:
            looked += self.at - before

    monkeypatch.setattr(protocol.JsonScanner, "reaches_end", counted)
    calls = ToolCallParser(syntax, {"weather"})
    said, _ = _told(calls.add(text) + calls.finish())
    assert said == text
    assert looked < 40 * len(text)


def test_syntaxes_are_known_by_the_template() -> None:
    for name, template in TEMPLATES.items():
        assert syntax_of(template) is SYNTAXES[name]
        assert syntax_of(template.replace('"', '\\"')) is SYNTAXES[name]
    unlike = "", "<tool_call>\n<function=name>\n<parameter=a>", "<tool_call>name\n<arg_key>", "[TOOL_CALLS]name[ARGS]{}"
    for other in (TEMPLATE, *("{{ tools }}" + form for form in unlike), '<tool_call>{"name": 1, "arguments": 2}'):
        assert syntax_of(other) is None


@pytest.mark.parametrize(("template", "opens", "ends"), PUBLISHED.values(), ids=PUBLISHED)
def test_what_the_published_templates_ask_for(template: str, opens: str, ends: str) -> None:
    """A conversation as OpenAI's clients send it is rendered, and the calls that it writes are read back."""
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    syntax = syntax_of(template)
    wanted = [["weather", '{"city": "Oslo", "days": [1, {"a": "\\n é"}]}'], ["clock", "{}"]]
    for count in (1,) if syntax is LLAMA else (1, 2):
        ids = [f"call_{number}_of_another_server" for number in range(count)]
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, (name, arguments) in zip(ids, wanted[:count], strict=True)
        ]
        results = [{"role": "tool", "tool_call_id": id, "content": f"result {id[5]}"} for id in ids]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        request = validated(ChatRequest, {"messages": [*ASK, said, *results], "tools": [WEATHER, CLOCK]})
        messages, variables = request.conversation(), request.template_variables()
        if syntax.short_ids:
            protocol.short_ids(messages)
        text = chat.render(messages, **variables)
        assert "weather" in chat.render(messages[:1], **variables)
        assert all(f"result {number}" in text for number in range(count))
        if opens != "[/INST]":  # which opens every answer
            assert text.endswith(opens)
        written = text.partition(opens)[2].partition(ends)[0]
        for whole_calls, pieces in ((True, [written]), (False, list(written))):
            before, found = _split(syntax, pieces, whole=whole_calls)
            assert before.strip() == ""
            for (name, arguments), (right, own) in zip(found, wanted[:count], strict=True):
                assert (name, json.loads(arguments)) == (right, json.loads(own))


def test_what_a_request_tells_the_template() -> None:
    request = validated(ChatRequest, {"messages": ASK, "tools": [CLOCK], "tool_choice": "none"})
    assert (request.functions, "tools" in request.template_variables()) == ([], False)
    request = validated(ChatRequest, {"messages": ASK, "tools": [CLOCK]})
    filled = {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert request.template_variables() == {"tools": [{"type": "function", "function": filled}]}
    looks_like_gbnf = {"name": "f", "parameters": {"description": "a ::= b"}}
    assert "::=" not in protocol.call_grammar([looks_like_gbnf], HERMES, {}, several=True).source
    # A thought goes back with the calls it led to.
    called = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "reasoning_content": "what time?", "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "1", "content": "5"}
    request = validated(ChatRequest, {"messages": [*ASK, said, result], "tools": [CLOCK]})
    text = ChatTemplate(PUBLISHED["qwen-3"][0], {}).render(request.conversation(), **request.template_variables())
    assert "<|im_start|>assistant\n<think>\nwhat time?\n</think>\n\n<tool_call>" in text


# As pydantic writes nested models.
_FIELDS: dict[str, Any] = {"value": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/Node"}}
_FIELDS["file"] = {"type": "string", "format": "path"}
_NODE = {"properties": _FIELDS, **OBJECT, "required": ["value"]}
LISTED = {"$defs": {"Node": _NODE}, "properties": {"first": {"$ref": "#/$defs/Node"}}, "required": ["first"], **OBJECT}


@EACH_SYNTAX
@pytest.mark.parametrize("others", [0, 2])
def test_parameters_with_definitions(syntax: ToolSyntax, others: int, example_model: Path) -> None:
    tokenizer = Tokenizer((example_model / "tokenizer.json").read_bytes(), {}, None, 8192)
    grammars = Grammars(tokenizer, frozenset({0}))
    # Another function's definition of the same name.
    same: dict[str, Any] = {**LISTED, "$defs": {"Node": {"type": "null"}}}
    functions = [{"name": f"other{number}", "parameters": same} for number in range(others)]
    grammar = protocol.call_grammar([*functions, {"name": "weather", "parameters": LISTED}], syntax, {}, several=False)

    def follows(arguments: str) -> bool:
        constraint = grammars.begin(grammar)
        text = _written(syntax, [("weather", arguments)])
        for token in tokenizer.encode(text, add_special_tokens=False):
            logits = torch.zeros(8192)
            constraint.mask(logits)
            if logits[token]:
                return False
            constraint.take(token)
        return True

    assert follows('{"first": {"value": 1, "next": {"value": 2}}}')
    assert not follows('{"first": {"value": 3}}')
    assert not follows('{"first": null}')
    grammars.close()


def test_only_references_are_moved() -> None:
    names = {"$ref": {"$ref": "#"}, "default": {"$ref": "#/$defs/a"}, "const": {"const": {"$ref": "#/a"}}}
    other = {"$id": "http://example.com/a", "items": {"$ref": "#/$defs/b"}}
    schema = {"properties": names, "anyOf": [{"$ref": "#name"}, other], "enum": [{"$ref": "#/a"}], "$ref": "b#/c"}
    source = protocol.call_grammar([{"name": "f", "parameters": schema}], HERMES, {}, several=True).source
    moved = json.loads(source.partition("%json ")[2])["properties"]["arguments"]
    place = "#/properties/arguments"
    names["$ref"], names["default"] = {"$ref": place}, {"$ref": f"{place}/$defs/a"}
    assert moved == {**schema, "properties": names}


@pytest.fixture(scope="module", params=list(SYNTAXES))
def syntax(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def chat_bundle(syntax: str, example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of conftest's. The marker is an added token: a special one in two of three, as in those models."""
    folder = tmp_path_factory.mktemp(syntax)
    source = shutil.copytree(example_model, folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        data = json.loads((source / name).read_text().replace("<|pad|>", SYNTAXES[syntax].opens))
        for token in data.get("added_tokens", ()):
            token["special"] &= syntax != "hermes" or token["id"] != 3
        (source / name).write_text(json.dumps(data))
    (source / "chat_template.jinja").write_text(TEMPLATES[syntax])
    return make_bundle(source, folder / NAME, 0.4)


@pytest.fixture
def prompts(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    rendered: list[str] = []
    render = server.text.render

    def seen(*args: Any, **more: Any) -> str:
        rendered.append(render(*args, **more))
        return rendered[-1]

    monkeypatch.setattr(server.text, "render", seen)
    return rendered


def _says(syntax: str, text: str) -> dict[str, Any]:
    """A model that can say nothing but this."""
    opens = SYNTAXES[syntax].opens
    parts = [json.dumps(part, ensure_ascii=False) for part in text.split(opens)]
    return {"grammar": "start: " + (" <[3]> " if syntax != "hermes" else f" {json.dumps(opens)} ").join(parts)}


def _ask(server: Running, text: str, syntax: str, stream: bool, most: int = 120, **more: Any) -> tuple[Any, ...]:
    asked: dict[str, Any] = {"messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": most, **more}
    asked["extra_body"] = _says(syntax, text) if text else {}
    completions = server.client().chat.completions
    if stream:
        with completions.stream(model=NAME, **asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = completions.create(model=NAME, **asked).choices[0]
    return choice.message.content or "", choice.message.tool_calls or [], str(choice.finish_reason)


def test_calls_and_the_turn_after_them(server: Running, syntax: str, stream: bool, prompts: list[str]) -> None:
    before = "Well.\n" if syntax == "llama" else "Well. "
    said, calls, reason = _ask(server, before + TWO[syntax], syntax, stream)
    assert (said, reason) == ("Well.", "tool_calls")
    assert tuple((call.function.name, call.function.arguments) for call in calls) == CALLS
    assert len({call.id for call in calls}) == 2
    told = [{**call.model_dump(include={"id", "type"}), "function": call.function.model_dump()} for call in calls]
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": told}]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: 5"} for call in calls]
    said, calls, reason = _ask(server, "It is cold.", syntax, stream, messages=turns)
    assert (said, calls, reason) == ("It is cold.", [], "stop")
    first, second = prompts
    assert first == "weather clock user: ?\nassistant:"
    assert second.startswith(f"{first} ")
    assert second.endswith("tool: weather: 5\ntool: clock: 5\nassistant:")
    assert '"name": "weather"' in second
    assert '{"city": "Oslo"}' in second


def test_one_call_where_several_are_not_wanted_and_none(server: Running, syntax: str, stream: bool) -> None:
    _, calls, reason = _ask(server, TWO[syntax], syntax, stream, parallel_tool_calls=False)
    assert ([call.function.name for call in calls], reason) == (["weather"], "tool_calls")
    text = TWO[syntax].replace("weather", "whether").replace("clock", "crock")
    assert _ask(server, text, syntax, stream) == (text, [], "stop")
    # Where nothing is offered, nothing is looked for.
    assert _ask(server, "Well.", syntax, stream, tool_choice="none") == ("Well.", [], "stop")
    # A call that is cut off is text.
    if not stream:
        cut, calls, reason = _ask(server, TWO[syntax], syntax, stream, 12, logprobs=True)
        assert (TWO[syntax].startswith(cut), calls, reason) == (True, [], "length")


def test_a_call_in_a_stream_has_openais_form(server: Running, syntax: str) -> None:
    more: Any = {"tools": [WEATHER, CLOCK], "extra_body": _says(syntax, TWO[syntax])}
    choices = [chunk.choices[0] for chunk in server.chat("?", stream=True, max_tokens=120, logprobs=True, **more)]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)
    heads = [(call.index, call.type, call.function.name, call.function.arguments) for call in deltas if call.id]
    assert heads == [(0, "function", "weather", ""), (1, "function", "clock", "")]
    assert sum(len(choice.logprobs.content) for choice in choices if choice.logprobs) > 20


def test_calls_that_have_to_be(server: Running, syntax: str) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for stream in (False, True):
        said, calls, reason = _ask(server, "", syntax, stream, tool_choice=named, temperature=0)
        assert (said, reason, [call.function.name for call in calls]) == ("", "tool_calls", ["weather"])
        assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    more: Any = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5, "seed": 3}
    either = [WEATHER, function(parameters=IN_A_CITY)]
    said, calls, _ = _ask(server, "", syntax, False, tools=either, **more)
    assert (said, [call.function.name in ("weather", "f") for call in calls]) == ("", [True])
    assert _ask(server, "", syntax, False, 40, tools=[WEATHER], tool_choice="required", temperature=0)[1]
    found = server.chat("?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    assert found.choices[0].message.content is None
    nested = function(name="nested", parameters=LISTED)  # with definitions
    for tools in ([nested], [WEATHER, nested]):
        body = {"messages": ASK, "tools": tools, "tool_choice": "required", "max_tokens": 2}
        assert server.post("/v1/chat/completions", body)[0] == 200
    rounded = function(parameters={"properties": {"id": {"const": 1234567890123456789}}, **OBJECT})
    status, answer = server.post("/v1/chat/completions", {**body, "tools": [rounded]})
    assert status == 400
    assert "found 1234567890123456789; larger ones would be rounded" in str(answer)


def test_a_response_calls_and_goes_on(server: Running, syntax: str, stream: bool, prompts: list[str]) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    before = "Well.\n" if syntax == "llama" else "Well. "

    def ask(given: Any, text: str, **more: Any) -> Any:
        extra = {**_says(syntax, text), **more} if text else more
        asked: dict[str, Any] = {"model": NAME, "input": given, "tools": tools, "max_output_tokens": 120}
        if not stream:
            return server.client().responses.create(**asked, extra_body=extra)
        with server.client().responses.stream(**asked, extra_body=extra) as events:
            told = list(events)
            final = events.get_final_response()
        assert [event.sequence_number for event in told] == list(range(len(told)))
        deltas = [event for event in told if event.type == "response.function_call_arguments.delta"]
        for index, item in enumerate(final.output):
            if item.type == "function_call":
                assert "".join(one.delta for one in deltas if one.output_index == index) == item.arguments
                assert {one.item_id for one in deltas if one.output_index == index} <= {item.id}
        added = [event.item.id for event in told if event.type == "response.output_item.added"]
        done = [event.item.id for event in told if event.type == "response.output_item.done"]
        assert added == done == [item.id for item in final.output]
        return final

    found = ask("?", f"cold?</think>\n\n{before}{TWO[syntax]}", chat_template_kwargs={"think": True})
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert {found.status, *(item.status for item in found.output)} == {"completed"}
    assert (found.output[0].content[0].text, found.output_text) == ("cold?", "Well.")
    calls = found.output[2:]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert found.usage.output_tokens_details.reasoning_tokens > 0
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": f"{call.name}: 5"} for call in calls]
    turns = [{"role": "user", "content": "?"}, *(item.to_dict() for item in found.output), *results]
    found = ask(turns, "It is cold.")
    assert ([item.type for item in found.output], found.output_text) == (["message"], "It is cold.")
    # As the same conversation of /v1/chat/completions is rendered.
    assert "user: ?\nassistant: Well." in prompts[-1]
    assert prompts[-1].endswith("tool: weather: 5\ntool: clock: 5\nassistant:")
    assert prompts[-1].count("assistant:") == 2
    found = ask("?", "", tool_choice={"type": "function", "name": "weather"}, temperature=0)
    assert [item.type for item in found.output] == ["function_call"]
    assert json.loads(found.output[0].arguments)["city"] in ("Rome", "Oslo")
