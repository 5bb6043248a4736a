"""Thoughts of reasoning models: every family's markers, wherever tokens end; budgets; grammars behind a thought."""

import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import NAME, Running, wants, with_template

import wisparse
from wisparse import UsageError
from wisparse.formats.chat_template import ChatTemplate
from wisparse.options import AnswerPrinter
from wisparse.runtime.generation.request import Chunk
from wisparse.runtime.protocol.requests import ApiError, ChatRequest, validated
from wisparse.runtime.thoughts import (
    FORMATS,
    HARMONY,
    HarmonyParser,
    ThinkingConstraint,
    ThoughtFormat,
    find_format,
    switch_of,
    template_variables,
)

CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}'
HERMES_CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def parse(parser: Any, pieces: list[str]) -> tuple[str, str]:
    parts = [parser.add(piece) for piece in pieces] + [parser.add("", True)]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(st.sampled_from(FORMATS), st.lists(st.integers(0, 60), max_size=8))
def test_every_familys_tags(form: Any, cuts: list[int]) -> None:
    for text, begun, expected in (
        (f"{form.opens}\nhm, 2\n{form.closes}\n\nfour", False, ("hm, 2", "four")),
        (f"\nhm{form.closes}four", True, ("hm", "four")),
        (f"{form.opens}{form.closes}four", False, ("", "four")),
        (f"{form.opens}it never {form.closes[:3]}", False, (f"it never {form.closes[:3]}", "")),
        ("four", False, ("", "four")),
        (form.opens[:3], False, ("", form.opens[:3])),
    ):
        parser = form.parser(begun)
        assert parse(parser, pieces_of(text, cuts)) == expected
        assert parser.closed == (expected[1] != "")


@given(st.lists(st.integers(0, 160), max_size=8))
def test_channels(cuts: list[int]) -> None:
    analysis = "<|channel|>analysis<|message|>sum<|end|>"
    for text, expected in (
        (f"{analysis}{FINAL}four", ("sum", "four")),
        (f"{analysis}<|start|>assistant{CALL}<|call|>", ("sum", HERMES_CALL)),
        (f"{analysis}<|start|>assistant<|channel|>commentary<|message|>I look<|end|><|start|>assistant{CALL}",
         ("sum", f"I look{HERMES_CALL}")),
        ("<|channel|>final<|message|>a <| b", ("", "a <| b")),
        ("<|channel|>analysis<|message|>it never en", ("it never en", "")),
        ("plain", ("", "plain")),
        *((text, ("", text)) for text in ("to be", "to", "to=5", "<", "a <")),
        # As the template writes a call of an earlier turn, on the analysis channel, and of a function of that name.
        (' to=functions.get<|channel|>commentary json<|message|>{"a": 1}', ("", HERMES_CALL)),
        ('<|channel|>analysis to=functions.get<|message|>{"a": 1}', ("", HERMES_CALL)),
        ('<|channel|>commentary to=functions.analysis <|constrain|>json<|message|>{"a": 1}',
         ("", HERMES_CALL.replace("get", "analysis"))),
    ):  # fmt: skip
        assert parse(HarmonyParser(False), pieces_of(text, cuts)) == expected
        assert parse(HarmonyParser(False), list(text)) == expected
    assert parse(HarmonyParser(True), [f"sum<|end|>{FINAL}four"]) == ("sum", "four")


def test_formats_and_switches_are_found_in_template_and_vocabulary() -> None:
    for form in FORMATS:
        assert find_format("", {form.markers[0]: 7}.get) is form
        assert find_format(f"a {form.closes} b", {}.get) is form
    assert find_format("", {"<|channel|>": 1, "<|message|>": 2, "<think>": 3}.get) is HARMONY
    assert find_format("{{ messages }}", {}.get) is None
    for template, switch in (
        ("{% if enable_thinking is defined and enable_thinking %}{% endif %}", "enable_thinking"),
        ("{% if not thinking %}{% endif %}", "thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", "thinking"),
        ("{{ message.thinking }} {{ message['thinking'] }}", None),
        ("{#- content and thinking #}Draft your thinking process.", None),
        ("{% for m in messages %}{% set thinking = m['thinking'] %}{{ thinking }}{% endfor %}", None),
    ):
        assert switch_of(ChatTemplate(template, {}).reads) == switch
    assert template_variables({"enable_thinking"}, False, "low", {"x": 1}) == {
        "x": 1,
        "enable_thinking": False,
        "reasoning_effort": "low",
    }
    with pytest.raises(UsageError, match="no switch for thoughts"):
        template_variables({"messages"}, True, None, None)


class Only:
    """A grammar of one token."""

    def __init__(self, token: int) -> None:
        self.token, self.taken = token, list[int]()

    def mask(self, logits: torch.Tensor) -> None:
        kept = logits[self.token].clone()
        logits.fill_(-torch.inf)
        logits[self.token] = kept

    def take(self, token: int) -> None:
        self.taken.append(token)


def follow(constraint: ThinkingConstraint, wanted: list[int]) -> list[int]:
    """Greedy tokens of a model that wants these."""
    found = []
    for token in wanted:
        logits = torch.zeros(10)
        logits[token] = 1.0
        constraint.mask(logits)
        found.append(int(logits.argmax()))
        constraint.take(found[-1])
    return found


SPELLED = ["", "a", "b", "", "", "{", "</t", ">", "<t>", ">\n\n"]


def thinking(opens: list[int], closes: list[int], **more: Any) -> ThinkingConstraint:
    form = ThoughtFormat("<t>", "</t>", ())
    return ThinkingConstraint(form, opens, closes, lambda token: SPELLED[token].encode(), **more)


def test_a_thought_ends_at_its_budget_and_the_grammar_begins_behind_it() -> None:
    opens, closes = [8], [6, 7]
    assert follow(thinking(opens, closes, begun=True, budget=3), [1] * 7) == [1, 1, 1, 6, 7, 1, 1]
    assert follow(thinking(opens, closes, begun=None, budget=2), [8, 1, 1, 1, 1, 1]) == [8, 1, 1, 6, 7, 1]
    assert follow(thinking(opens, closes, begun=None, budget=2), [1] * 4) == [1] * 4  # no thought
    assert follow(thinking(opens, closes, begun=True, budget=2), [1, 6, 7, 2]) == [1, 6, 7, 2]  # half closed
    assert follow(thinking(opens, closes, begun=True, budget=0), [1, 1, 1]) == [6, 7, 1]
    # The end may be merged with the white space behind it.
    assert follow(thinking(opens, closes, begun=True, budget=3), [1, 6, 9, 1, 1]) == [1, 6, 9, 1, 1]
    constraint = thinking(opens, closes, begun=True, budget=None)
    constraint.grammar = Only(5)
    assert follow(constraint, [1, 6, 9, 1]) == [1, 6, 9, 5]
    constraint = thinking(opens, closes, begun=True, budget=None)
    constraint.grammar = grammar = Only(5)
    assert follow(constraint, [1, 6, 1, 6, 7, 1, 1]) == [1, 6, 1, 6, 7, 5, 5]
    assert grammar.taken == [5, 5]


def test_a_grammar_begins_after_the_thought_that_the_answer_opens() -> None:
    def said(wanted: list[int], opens: list[int], token: int = 5, begun: bool | None = None) -> list[int]:
        constraint = thinking(opens, [6, 7], begun=begun)
        constraint.grammar = Only(token)
        return follow(constraint, wanted)

    assert said([8, 1, 6, 7, 1], [8]) == [8, 1, 6, 7, 5]
    assert said([2, 1, 4, 1, 6, 7, 1], [2, 3, 4]) == [2, 3, 4, 1, 6, 7, 5]  # spelled by several tokens
    assert said([1, 1], [8]) == [5, 5]  # no thought
    assert said([8, 8], [8], 8) == [8, 8]  # what the grammar begins with is no marker
    assert said([8, 1], [8], begun=False) == [5, 5]  # thoughts are off


def test_a_budget_of_channels_ends_with_the_thought() -> None:
    spelled = ["a", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]
    spelled += ["commentary", "analysis"]
    opens, closes = [4, 8, 6], [1, 2, 3, 4, 5, 6]

    def limited() -> ThinkingConstraint:
        return ThinkingConstraint(HARMONY, opens, closes, lambda token: spelled[token].encode(), begun=None, budget=2)

    call = [*opens, 0, 1, 2, 3, 4, 7, 6, 0, 0, 0]
    assert follow(limited(), call) == call  # what follows the thought is no part of it
    assert follow(limited(), [*opens, *[0] * 9]) == [*opens, 0, 0, *closes, 0]
    constraint = limited()
    constraint.grammar = Only(5)
    assert follow(constraint, [4, 5, 0, 6, 0]) == [4, 5, 0, 6, 5]  # behind the answer's header, whatever it says
    constraint = limited()
    constraint.grammar = Only(5)
    assert follow(constraint, [*opens, *[0] * 9]) == [*opens, 0, 0, *closes, 5]


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {% if thinking is not defined or thinking %}<think>{% endif %}"


@pytest.fixture(scope="module")
def model(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = with_template(example_model, tmp_path_factory.mktemp("thoughts"), TEMPLATE, 0.3)
    with wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256) as model:
        yield model


def test_python_and_terminal_keep_thoughts_apart(model: Any, run: Callable[..., tuple[int, str, str]]) -> None:
    talk = [{"role": "user", "content": "2 + 2?"}]
    said: Any = {"grammar": 'root ::= "two and two\\n</think>\\n\\nfour"', "max_new_tokens": 60}
    answer = model.generate(talk, **said)
    assert (answer.thought, answer.text, answer.thought_closed) == ("two and two", "four", True)
    chunks = list(model.stream(talk, **said))
    assert "".join(chunk.thought for chunk in chunks) == answer.thought
    assert "".join(chunk.text for chunk in chunks) == answer.text
    off = model.generate(talk, **{**said, "grammar": 'root ::= "four"'}, thinking=False)
    assert (off.thought, off.text) == ("", "four")
    limited = model.generate(talk, thinking_budget=3, max_new_tokens=30)
    assert limited.thought_closed
    assert limited.thought_tokens <= 3 + len(model.text.encode("</think>", add_special_tokens=False)) + 1
    schema = model.generate(talk, thinking_budget=2, json_schema={"type": "integer"}, max_new_tokens=40)
    assert schema.text.strip().lstrip("-").isdigit()
    for setting in (
        {"thinking": False},
        {"thinking_budget": 3},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {}},
    ):
        with pytest.raises(UsageError, match=f"{next(iter(setting))}: expected a conversation or the chat template"):
            model.generate("2 + 2 = ", **setting)
    code, out, _ = run(
        "generate", model.bundle.folder, "--prompt", "2 + 2?", "--chat-template", "--grammar", said["grammar"]
    )
    assert (code, out) == (0, "four\n")
    code, out, _ = run(
        "generate", model.bundle.folder, "--prompt", "2 + 2?", "--chat-template", "--grammar", said["grammar"], "--json"
    )
    assert (json.loads(out)["thought"], json.loads(out)["text"]) == ("two and two", "four")


def test_only_thoughts_have_a_style_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    AnswerPrinter().show([Chunk("", 1, thought="two and two"), Chunk("fo", 2), Chunk("ur", 3)])
    assert terminal.getvalue() == "\x1b[2mtwo and two\x1b[0m\n\nfour"


HM = "<think>hm, 2</think>\n\n"
ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% set closes = '</think>' %}assistant:"
CHANNELS = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
# special tokens, template, what a model says before its answer
OPENED_BY_THE_ANSWER: dict[str, tuple[tuple[str, ...], str, str]] = {
    "text": ((), ROLES, HM),
    "special": (("<think>", "</think>"), ROLES, HM),
    "gpt-oss": (
        ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|return|>"),
        CHANNELS,
        "<|channel|>analysis<|message|>hm, 2<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>",
    ),
}


@pytest.mark.parametrize("name", OPENED_BY_THE_ANSWER)
def test_a_schema_begins_after_the_thought_that_the_answer_opens(
    name: str, example_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    special, template, before = OPENED_BY_THE_ANSWER[name]
    schema: Any = {"type": "integer", "minimum": 3, "maximum": 5}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ask = [{"role": "user", "content": "2 + 2?"}]
    with Running(with_template(example_model, tmp_path, template, 0.3, special=special)) as server:
        wants(monkeypatch, server.text.encode(f"{before}It is four.", add_special_tokens=False))
        found = server.chat(ask, response_format=wanted, max_tokens=60).choices[0]
        assert (found.message.reasoning_content, found.finish_reason) == ("hm, 2", "stop")
        assert int(found.message.content) in (3, 4, 5)
        deltas = [one.choices[0].delta for one in server.chat(ask, response_format=wanted, max_tokens=60, stream=True)]
        assert "".join(getattr(one, "reasoning_content", None) or "" for one in deltas) == "hm, 2"
        assert "".join(one.content or "" for one in deltas) == found.message.content
        folder = tmp_path / NAME
        with wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256) as model:
            answer = model.generate(ask, json_schema=schema, max_new_tokens=60)
            assert (answer.thought, answer.text) == ("hm, 2", found.message.content)
            grammar = model.generate(ask, grammar='root ::= "four"', max_new_tokens=60)
            assert (grammar.thought, grammar.text) == ("hm, 2", "four")


def warning_of(server: Running, path: str, **body: Any) -> tuple[int, str]:
    sent = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 3, **body}).encode()
    answer = server.request("POST", f"/v1/{path}", sent, headers={"content-type": "application/json"})
    text = answer.read().decode()
    return answer.status, answer.getheader("x-wisparse-warning") or (text if answer.status != 200 else "")


def test_models_without_thoughts(example_model: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    folder = with_template(example_model, tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}:", 0.3)
    with Running(folder) as server:
        code, said = warning_of(server, "chat/completions", thinking_token_budget=5)
        assert (code, json.loads(said)["error"]["param"]) == (400, "thinking_token_budget")
        thinking = {"type": "enabled", "budget_tokens": 1024}
        assert warning_of(server, "messages", thinking=thinking) == (200, "thinking: this model marks no thoughts")
        assert warning_of(server, "messages/count_tokens", thinking=thinking)[0] == 200
        for path in ("chat/completions", "messages"):
            assert warning_of(server, path) == (200, "")
    code, _, noted = run("generate", folder, "--prompt", "a", "--chat-template", "--thinking-budget", "5")
    said = "wisparse: --thinking-budget: this model marks no thoughts: leave it out"
    assert (code, noted.splitlines()[-1]) == (2, said)


@pytest.mark.parametrize("key", ["messages", "chat_template", "add_generation_prompt", "tokenize", "self", "padding"])
def test_what_is_no_variable_of_a_template(key: str, model: Any, run: Callable[..., tuple[int, str, str]]) -> None:
    for wrong in ({key: True}, {"ok": 1, key: []}, {5: 1}):
        with pytest.raises(
            UsageError, match=r"^chat_template_kwargs: expected further variables of the template, found"
        ):
            model.generate([{"role": "user", "content": "a"}], chat_template_kwargs=wrong)
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {key: 1}}
    with pytest.raises(ApiError, match=f"chat_template_kwargs: expected further template variables, found '{key}'"):
        validated(ChatRequest, body)
    options = ("--prompt", "a", "--chat-template", "--chat-template-kwargs", json.dumps({key: 1}))
    code, _, noted = run("generate", model.bundle.folder, *options)
    assert (code, noted.count("\n")) == (2, 1)


def test_a_thought_that_does_not_end_is_reported(
    model: Any, caplog: pytest.LogCaptureFixture, run: Callable[..., tuple[int, str, str]]
) -> None:
    said = "a thought did not end: it has no answer, and calls in it were not read"
    with Running(model.bundle.folder) as server:
        for path in ("chat/completions", "messages"):
            assert warning_of(server, path) == (
                200,
                "" if path == "messages" else said,
            )  # Anthropic's default: no thought
        assert warning_of(server, "messages", thinking={"type": "enabled"}) == (200, said)
        assert warning_of(server, "chat/completions", stream=True) == (200, "")  # the header is sent before
        assert warning_of(server, "chat/completions", chat_template_kwargs={"thinking": False}) == (200, "")
    assert caplog.text.count(said) == 1
    options = ("--prompt", "a", "--chat-template", "--max-new-tokens", "3")
    code, out, noted = run("generate", model.bundle.folder, *options)
    assert (code, out.strip()) == (0, "")
    assert "the thought did not end, so there is no answer" in noted
