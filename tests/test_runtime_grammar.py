"""Grammars that would end the process, or hold up every other request: refused, beside requests that are answered."""

import datetime
import decimal
import fractions
import ipaddress
import itertools
import json
import os
import random
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import pydantic
import pytest
import torch
from served import Running
from test_runtime_tokenizer import DECODERS
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from wisparse.formats.errors import UnavailableError, UsageError
from wisparse.runtime.generation import grammar as grammar_module
from wisparse.runtime.generation.grammar import Constraint, Grammar, Grammars
from wisparse.runtime.generation.grammar_worker import count_parts, depth
from wisparse.runtime.protocol.requests import as_api_error
from wisparse.runtime.tokenizer import Tokenizer

VOCABULARY = 8192


def _chain(count: int, link: Callable[[str], Any]) -> str:
    """A JSON schema whose definition number i is a link to number i + 1."""
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)}
    return json.dumps({"$defs": {**definitions, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def _references(count: int) -> str:
    return _chain(count, lambda to: {"$ref": to})


def _objects(count: int) -> str:
    return _chain(count, lambda to: {"type": "object", "properties": {"a": {"$ref": to}}, "required": ["a"]})


def _lark(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"\n'


def _gbnf(count: int) -> str:
    return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(count)) + f'r{count} ::= "a"\n'


def _optional(count: int) -> str:
    return "start: /" + "a?" * count + "/"


def _properties(count: int) -> str:
    return json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}})


_LEVELS = "expected at most 200 rules or references within one another, found"
_NAMES = "expected at most 10,000 names of rules and optional parts"
_WORK = "expected at most (2 seconds of processor time|512 MiB of memory) to compile it, found more; simplify it"
# A field, a grammar, whether it is a schema, and the refusal; each ended or held up the process before.
DEEP: list[tuple[str, bool, str]] = [
    (_references(3000), True, _LEVELS),
    (_objects(1000), True, _LEVELS),
    (_lark(3000), False, _LEVELS),
    (_gbnf(6000), False, _LEVELS),
    ('start: /[0-9]/ "x" ' + "n " * 60_000 + '\nn: "a"?', False, _NAMES),
    ('root ::= [0-9] "x" ' + '"a"? ' * 20_000, False, _NAMES),
    # As the parameters of a tool come.
    ("start: %json " + _references(3000), False, "expected at most 1 MiB of stack to compile it, found more"),
    (_properties(4000), True, "expected at most 1 MiB of stack to compile it, found more"),
    # It compiles, but an answer could not be followed beyond its brace; also as the only tool that has to be called.
    (_properties(600), True, "it does not compile: Parser Error: Current row has 2407 items; max is 2000"),
    ('start: "<tool_call>" %json ' + _properties(600), False, "it does not compile: Parser Error: Current row has"),
]
HEAVY = [(_optional(10_000), False, _WORK), (_optional(25_000), False, _WORK)]


@pytest.fixture(scope="module")
def tokenizer_json(example_model: Path) -> bytes:
    return (example_model / "tokenizer.json").read_bytes()


@pytest.fixture
def grammars(tokenizer_json: bytes) -> Iterator[Grammars]:
    found = Grammars(Tokenizer(tokenizer_json, {}, None, VOCABULARY), frozenset({0}))
    yield found
    found.close()


def _refused(grammars: Grammars, source: str, schema: bool = False) -> str:
    with pytest.raises(UsageError) as raised:
        grammars.begin(Grammar("grammar", source, schema))
    return str(raised.value)


def _refused_as(grammars: Grammars, case: tuple[str, bool, str]) -> None:
    with pytest.raises(UsageError, match=f"^grammar: {case[2]}"):
        grammars.begin(Grammar("grammar", case[0], case[1]))


def _allowed(constraint: Constraint, vocabulary: int = VOCABULARY) -> list[int]:
    logits = torch.zeros(vocabulary)
    constraint.mask(logits)
    return (logits == 0).nonzero()[:, 0].tolist()


def _pid(grammars: Grammars) -> int:
    return grammars._process._process.pid


def test_what_would_end_the_process_is_refused_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda case: _refused_as(grammars, case), HEAVY + DEEP))
    assert _allowed(grammars.begin(Grammar("grammar", 'start: "a"')))
    # Remembered: with whatever field it comes.
    monkeypatch.setattr(grammar_module.GrammarProcess, "compile", lambda *_: pytest.fail("tried again"))
    for case in HEAVY + DEEP:
        _refused_as(grammars, case)
    with pytest.raises(UsageError, match=r"^json_schema: expected at most 200"):
        grammars.begin(Grammar("json_schema", _references(3000), True))


def test_which_limit_was_exceeded_is_said(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_SECONDS", 1)
    monkeypatch.setattr(grammar_module, "MAX_BYTES", 16 << 30)
    assert "at most 1 seconds of processor time" in _refused(grammars, _optional(20_000))
    monkeypatch.setattr(grammar_module, "MAX_BYTES", 64 << 20)
    assert "at most 64 MiB of memory" in _refused(grammars, _optional(20_001))
    # A limit that was not reached is no reason to refuse.
    assert "it does not compile: lexer precomputation failed" in _refused(grammars, _optional(1000))


def test_the_process_is_started_again_when_it_has_died(grammars: Grammars, caplog: pytest.LogCaptureFixture) -> None:
    begin = itertools.count()

    def works() -> bool:
        return bool(_allowed(grammars.begin(Grammar("grammar", f'start: "a{next(begin)}"'))))

    assert works()
    first = _pid(grammars)
    assert works()
    assert _pid(grammars) == first
    os.kill(first, signal.SIGKILL)
    while psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert works()
    assert _pid(grammars) != first
    assert "had ended (-9); starting it again" in caplog.text
    # While it compiles: its fork ends that.
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(_refused, grammars, _optional(10_000))
        time.sleep(0.3)
        os.kill(_pid(grammars), signal.SIGKILL)
        assert works()
        assert "expected at most" in slow.result()
    last = _pid(grammars)
    grammars.close()
    assert not psutil.pid_exists(last)
    assert works()


def test_a_process_that_does_not_answer_is_replaced(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _allowed(grammars.begin(Grammar("grammar", 'start: "a"')))
    monkeypatch.setattr(grammar_module, "WAIT_SECONDS", 1.0)
    first = _pid(grammars)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(UnavailableError, match="not compiled in 1 seconds; try again") as raised:
        grammars.begin(Grammar("grammar", 'start: "b"'))
    assert as_api_error(raised.value).status_code == 503
    assert not psutil.pid_exists(first)
    monkeypatch.undo()
    assert _allowed(grammars.begin(Grammar("grammar", 'start: "b"')))


def test_what_is_kept_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CACHE_SIZE", "_MAX_REFUSED"):
        monkeypatch.setattr(grammar_module, name, 3)
    good = [Grammar("grammar", f'start: "{number}"') for number in range(5)]
    for number in range(5):
        assert "does not compile" in _refused(grammars, f"start: /({number}/")
        grammars.begin(good[number])
    assert [grammars.known(one) is not None for one in good] == [False, False, True, True, True]
    monkeypatch.setattr(grammar_module, "_CACHE_BYTES", 0)
    grammars.begin(good[0])
    assert grammars.known(good[0]) is None
    monkeypatch.setattr(grammar_module.GrammarProcess, "compile", lambda *_: pytest.fail("tried again"))
    for number in range(5):
        with pytest.raises(UsageError if number > 1 else pytest.fail.Exception):
            grammars.begin(Grammar("grammar", f"start: /({number}/", False))


def test_what_was_accepted_fits_a_small_stack(grammars: Grammars) -> None:
    """The deepest grammars that the process accepts, compiled and followed by a thread with twice its stack."""
    followed: list[int] = []

    def follow(source: str, schema: bool) -> None:
        constraint = grammars.begin(Grammar("grammar", source, schema))
        for step in range(40):
            constraint.take(_allowed(constraint)[0])
            followed.append(step)

    def deepest(make: Callable[[int], str], schema: bool) -> str:
        for count in range(190, 0, -10):
            try:
                grammars.begin(Grammar("grammar", make(count), schema))
                return make(count)
            except UsageError:
                pass
        pytest.fail("none is accepted")

    nested = deepest(_objects, True)
    assert nested.count("object") >= 80
    terminals = deepest(
        lambda n: "start: R0\n" + "".join(f'R{i}: "a" R{i + 1} "b"\n' for i in range(n)) + f'R{n}: "a"\n', False
    )
    before = threading.stack_size(2 << 20)
    threads = [threading.Thread(target=follow, args=case) for case in ((nested, True), (terminals, False))]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    for thread in threads:
        thread.join()
    assert len(followed) == 80


def test_a_grammar_that_costs_much_at_a_later_token_fails_there(grammars: Grammars) -> None:
    several = " | ".join(f"/[a-z]{{{count}}}/" for count in range(1, 7))
    grammar = Grammar("grammar", f"start: ({several})* e\ne: e e | /./\n")
    constraint = grammars.begin(grammar)

    def follow() -> None:
        choice = random.Random(1)
        for _ in range(100):
            constraint.take(choice.choice(_allowed(constraint)))

    with pytest.raises(UsageError, match=r"grammar: it cannot be followed further: .*Too many items"):
        follow()
    with pytest.raises(UsageError, match=r"grammar: it cannot be followed further: .*Too many items"):
        grammars.known(grammar)  # it is not tried again


_MARKED = "a<|end|>b<tool_call> </s>"
_OBJECT = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("stop", ["</s>", "<|end|>"])
def test_texts_of_added_tokens_are_text(kind: str, special: bool, stop: str) -> None:
    """Of a stop token too: neither ends it an answer within a string, nor does a hidden token stand for a text."""
    library = Library.from_str(DECODERS[kind].to_str())
    markers = ("<tool_call>", "<|end|>", "</s>")
    library.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in markers])
    text = Tokenizer(library.to_str().encode(), {}, None, library.get_vocab_size() + 3)
    end, grammars = text.token_id(stop), Grammars(text, frozenset({text.token_id(stop)}))
    cases = [
        ({"enum": [_MARKED]}, json.dumps(_MARKED)),
        (
            {"properties": {_MARKED: {"const": _MARKED}}, "required": [_MARKED], **_OBJECT},
            json.dumps({_MARKED: _MARKED}),
        ),
        ({"type": "string", "pattern": "^<tool_call>[0-9]<\\|end\\|></s>$"}, r'"<tool_call>\d<\|end\|></s>"'),
        (f"start: {json.dumps(_MARKED)}", _MARKED),
        (f"root ::= {json.dumps(_MARKED)}", _MARKED),
    ]
    for number, (source, expected) in enumerate(cases):
        schema = isinstance(source, dict)
        grammar = Grammar.of_schema("schema", source) if schema else Grammar("grammar", source)
        constraint, tokens, choice = grammars.begin(grammar), list[int](), random.Random(number)
        while (token := choice.choice(_allowed(constraint, library.get_vocab_size()))) != end:
            constraint.take(token)
            tokens.append(token)
            assert len(tokens) < 200
        said = text.decode(tokens)
        assert re.fullmatch(expected if "pattern" in source else re.escape(expected), said), said
    # A marker that is text is written as the model was trained to.
    grammar = Grammar("grammar", 'start: "<tool_call>"')
    hidden = special and "<tool_call>" in text.special_ids
    assert (_allowed(grammars.begin(grammar), library.get_vocab_size()) == [text.token_id("<tool_call>")]) is not hidden
    grammars.close()


class _Color(Enum):
    RED = "red"


class _Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    friend: "_Cat | None" = None


class _Dog(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["dog"]


_F: Any = pydantic.Field
PYDANTIC: list[Any] = [
    int, float, bool, str, bytes, None, dict, list, tuple, set, frozenset, Any, int | None, int | str, Literal["a", 1], dict[int, str],
    set[int], frozenset[str], tuple[int, str], tuple[int, ...], Sequence[int], _Color, _Cat, _Dog, datetime.datetime, datetime.date,
    datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, Path, re.Pattern, fractions.Fraction, complex, ipaddress.IPv4Address,
    ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Interface, pydantic.UUID4, pydantic.FilePath, pydantic.DirectoryPath,
    pydantic.SecretStr, pydantic.SecretBytes, pydantic.Json, pydantic.Json[_Cat], pydantic.ByteSize, pydantic.Base64Bytes,
    pydantic.Base64UrlStr, pydantic.PastDate, pydantic.AwareDatetime, pydantic.ImportString, pydantic.PositiveInt, pydantic.FiniteFloat,
    pydantic.AnyUrl, pydantic.HttpUrl, pydantic.PostgresDsn, pydantic.IPvAnyAddress, pydantic.IPvAnyNetwork,
    Annotated[str, _F(min_length=2, max_length=9, pattern="^[a-z]+$")], Annotated[int, _F(ge=0, lt=100, multiple_of=5)],
    Annotated[decimal.Decimal, _F(max_digits=5, decimal_places=2)], Annotated[list[int], _F(min_length=1, max_length=3)],
    Annotated[_Cat | _Dog, _F(discriminator="kind")], dict[Literal["a", "b"], int], dict[_Color, int],
    dict[Annotated[str, _F(pattern="^[a-z]+$")], int], Annotated[int, _F(default=3, examples=[4], deprecated=True)],
]  # fmt: skip


# A decimal number as pydantic 2.12 and 2.13 write it; later releases leave the pattern out.
DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}


def test_what_pydantic_writes_is_accepted(grammars: Grammars, caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {f"f{number}": (kind, ...) for number, kind in enumerate(PYDANTIC)}
    for mode in ("validation", "serialization"):
        every = pydantic.create_model("Every", **fields).model_json_schema(mode=mode)
        for name, schema in every["properties"].items():
            grammars.begin(Grammar.of_schema(name, {**schema, "$defs": every["$defs"]}))
    said = [record.message for record in caplog.records]
    assert "JSON schemas: the format 'password' does not constrain answers" in said
    assert "JSON schemas: uniqueItems does not constrain answers" in said
    assert len(set(said)) == len(said)  # once each


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "date"}, "2024-02-29", "2024-02-31"),
        ({"format": "uuid4"}, "12345678-1234-4234-8234-123456789abc", "12345678"),
        ({"format": "path", "maxLength": 4}, "/a/b", "/a/bc"),
        (
            {"properties": {"format": {"format": "ipv4"}}, "required": ["format"]},
            {"format": "1.2.3.4"},
            {"format": "1.2"},
        ),
        ({"enum": [{"format": "x", "uniqueItems": True}]}, {"format": "x", "uniqueItems": True}, {}),
        # As zod 4.1 and pydantic 2.13 write an address, a time and a decimal number.
        ({"format": "email", "pattern": r"^(?!\.)(?!.*\.\.)([a-z.]*)[a-z]@([a-z]+\.)+[a-z]{2,}$"}, "a@b.de", "a.b.de"),
        ({"format": "time", "pattern": r"^[0-2]\d:[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"}, "12:30", "12:30:00Z"),
        ({"type": ["number", "string"], "anyOf": [{"type": "number"}, DECIMAL]}, 1.5, "1.5"),
        ({"type": "object", "properties": {"anyOf": {"const": 1}}, "required": ["anyOf"]}, {"anyOf": 1}, {}),
        # Of a 64-bit integer; bounds between the doubles are taken a little closer.
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, 1234567890123456789, 2**63),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, -1234567890123456789, -(2**63) - 1),
        ({"minimum": 0, "maximum": 2**64 - 1}, 2**63 - 1024, 2**64),
        ({"maximum": 10**18 - 1}, 10**18 - 1024, 10**18),
        ({"exclusiveMinimum": 10**17 + 1, "exclusiveMaximum": 10**18}, 10**17 + 16, 10**17 + 1),
        ({"enum": [2**53, -(2**53)]}, 2**53, 2**53 + 1),
    ],
)
def test_known_formats_constrain(grammars: Grammars, tokenizer_json: bytes, schema: Any, good: Any, bad: Any) -> None:
    text = Tokenizer(tokenizer_json, {}, None, VOCABULARY)
    for value, fits in ((good, True), (bad, False)):
        kind = {dict: "object", int: "integer"}.get(type(good), "string")
        constraint, followed = grammars.begin(Grammar.of_schema("json_schema", {"type": kind, **schema})), True
        for token in [*text.literal_encoder({0})(json.dumps(value)), 0]:
            followed = followed and token in _allowed(constraint)
            constraint.take(token)
        assert followed is fits


@pytest.mark.parametrize("schema", [DECIMAL, {"anyOf": [DECIMAL, DECIMAL]}, {"format": "path", **DECIMAL}])
def test_a_pattern_that_alone_constrains_is_not_left_out(grammars: Grammars, schema: Any) -> None:
    with pytest.raises(UsageError, match=r"json_schema: it does not compile: .*look-around"):
        grammars.begin(Grammar.of_schema("json_schema", schema))


@pytest.mark.parametrize("schema", [{"const": 2**53 + 1}, {"items": {"enum": ["a", {"id": [-(10**400)]}]}}])
def test_integers_that_would_be_rounded_are_refused(schema: Any) -> None:
    for given in (schema, json.dumps(schema)):
        with pytest.raises(UsageError, match=r"^JSON schemas: expected integers in const and enum from -9,007,199"):
            Grammar.of_schema("json_schema", given)


def test_parts_and_depth() -> None:
    assert count_parts('start: a b? "a?*" /[ab]?*/ // a?\na: b*\nb: %json {"a": "b*"}\n') == 5
    # Depth is that of references.
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}, "all": {"$ref": "#"}}}
    assert depth(json.dumps({"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}), True) == 2
    assert depth(_references(5), True) == 7
    older = {"definitions": {"a": {"items": [{"$ref": "#/$defs/x"}]}}, "$defs": {"x": {}}, "$ref": "#/definitions/a"}
    assert depth(json.dumps(older), True) == 3
    assert depth(json.dumps({"$ref": "http://example.com/a", "items": {"$ref": "#/missing/0"}}), True) == 1
    assert [depth(wrong, True) for wrong in ("{", "true", '{"$defs": 5}', "[" * 9000)] == [0, 0, 0, 0]
    assert depth('start: a "b: c" // d: e\na: b | "x"\n  | /c:/ a\n?b.2: "y" a c\nc: "c"\n', False) == 4
    assert depth('root ::= a-b "c ::= d" # e ::= root\na-b ::= [a-b] c | root\nc ::= "x"\n', False) == 3
    assert depth("", False) == 0


def _memory() -> float:
    return psutil.Process().memory_info().rss / 2**20


def _varied(source: str, schema: bool, number: int) -> str:
    """The same grammar, but not one that is remembered."""
    return source[:-1] + f', "title": "{number}"}}' if schema else f"{source}\n" + "\n" * number


def _refuse(grammars: Grammars, numbers: Sequence[int]) -> None:
    for number in numbers:
        source, schema, _ = DEEP[number % len(DEEP)]
        _refused(grammars, _varied(source, schema, number), schema)


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_hostile_grammars_take_no_memory_of_the_server(grammars: Grammars, count: int) -> None:
    _refuse(grammars, range(5))
    before, pid = _memory(), _pid(grammars)
    _refuse(grammars, range(5, 5 + count))
    assert _memory() - before < 20
    assert _pid(grammars) == pid
    deadline = time.monotonic() + 10
    while psutil.Process(pid).children():  # the last one is about to end
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _good(server: Running, number: int) -> float:
    """Seconds that the slowest of three took: without a grammar, with a known one, with a new one."""
    wishes: list[dict[str, Any]] = [{}, {"grammar": "start: /[0-9]{4}/"}, {"grammar": f'start: "new" "{number}"'}]
    slowest = 0.0
    for wish in wishes:
        began = time.monotonic()
        status, found = server.post("/v1/completions", {"prompt": "a = ", "max_tokens": 4, **wish})
        assert status == 200, found
        slowest = max(slowest, time.monotonic() - began)
    return slowest


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_good_requests_beside_hostile_ones(server: Running, rounds: int) -> None:
    _good(server, 0)
    alone = _good(server, 1)

    def attack(case: tuple[str, bool, str]) -> list[tuple[int, dict[str, Any]]]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
        answers = []
        for number in range(rounds):
            source = _varied(case[0], case[1], number)
            if case[1]:
                form = {"name": "x", "schema": json.loads(source)}
                body["response_format"] = {"type": "json_schema", "json_schema": form}
            else:
                body["grammar"] = source
            answers.append(server.post("/v1/chat/completions", body))
        return answers

    beside: list[float] = []
    with ThreadPoolExecutor(3) as hostile:
        attacks = [hostile.submit(attack, case) for case in HEAVY[1:] + DEEP]
        while not all(one.done() for one in attacks):
            beside.append(_good(server, 2 + len(beside)))
    for case, one in zip(HEAVY[1:] + DEEP, attacks, strict=True):
        for status, found in one.result():
            assert (status, found["error"]["param"]) == (400, "response_format" if case[1] else "grammar")
            assert case[2].partition("(")[0] in found["error"]["message"]
    assert len(beside) > 3
    # The slowest of them, or of the faster half where other programs keep the processors busy.
    assert sorted(beside)[-1 if rounds > 1 else len(beside) // 2] < alone + 1
    _good(server, -1)
