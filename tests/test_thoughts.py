"""Thoughts of reasoning models: every family's markers, wherever tokens end; budgets; grammars behind a thought."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import with_template

import wisparse
from wisparse import UsageError
from wisparse.formats.chat_template import ChatTemplate
from wisparse.runtime.thoughts import (
    FORMATS,
    HARMONY,
    HarmonyParser,
    ThinkingConstraint,
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
    return ThinkingConstraint(opens, closes, b"</t>", lambda token: SPELLED[token].encode(), **more)


def test_a_thought_ends_at_its_budget_and_the_grammar_begins_behind_it() -> None:
    opens, closes = [8], [6, 7]
    assert follow(thinking(opens, closes, begun=True, budget=3), [1] * 7) == [1, 1, 1, 6, 7, 1, 1]
    assert follow(thinking(opens, closes, begun=False, budget=2), [8, 1, 1, 1, 1, 1]) == [8, 1, 1, 6, 7, 1]
    assert follow(thinking(opens, closes, begun=False, budget=2), [1] * 4) == [1] * 4  # no thought
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


def test_a_budget_of_channels_ends_with_the_thought() -> None:
    spelled = [
        "a",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
        "<|message|>",
        "commentary",
        "analysis",
    ]
    opens, closes = [4, 8, 6], [1, 2, 3, 4, 5, 6]

    def limited() -> ThinkingConstraint:
        end, spell = HARMONY.end.encode(), lambda token: spelled[token].encode()
        return ThinkingConstraint(opens, closes, end, spell, begun=False, budget=2)

    call = [*opens, 0, 1, 2, 3, 4, 7, 6, 0, 0, 0]
    assert follow(limited(), call) == call  # what follows the thought is no part of it
    assert follow(limited(), [*opens, *[0] * 9]) == [*opens, 0, 0, *closes, 0]


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {% if thinking is not defined or thinking %}<think>{% endif %}"


@pytest.fixture(scope="module")
def model(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = with_template(example_model, tmp_path_factory.mktemp("thoughts"), TEMPLATE, 0.3)
    with wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256) as model:
        yield model


def test_python_and_terminal_keep_thought_and_answer_apart(
    model: Any, run: Callable[..., tuple[int, str, str]]
) -> None:
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
