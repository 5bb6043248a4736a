"""Grammars and schemas: what an answer may be, on every back end, whatever a stranger's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundle_maker import make_bundle

import wisparse
from wisparse.formats.errors import UsageError
from wisparse.runtime.generation.grammar import Grammar, Grammars, mask_bits
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.model import Model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["torch", "numba"])
def model(
    request: pytest.FixtureRequest, example_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = make_bundle(example_model, tmp_path_factory.mktemp("grammar") / "bundle", 0.4)
    with wisparse.load(folder, dtype="float32", backend=request.param, max_batch=3, max_seq_len=128) as model:
        yield model


def run(scheduler: Scheduler) -> None:
    while scheduler.busy:
        scheduler.step()


def test_answers_are_what_the_schema_describes(model: Model) -> None:
    for temperature in (0.0, 1.5):
        answer = model.generate("person = ", temperature=temperature, seed=5, max_new_tokens=100, json_schema=SCHEMA)
        found = json.loads(answer.text)
        assert list(found) == ["name", "age"]
        assert "\n" not in answer.text
        assert 0 <= found["age"] <= 99
        assert len(found["name"]) <= 10
        assert answer.finish_reason == "stop"


def test_a_grammar_in_either_notation(model: Model) -> None:
    for grammar in ('start: "yes" | "no"', 'root ::= "yes" | "no"', "start: /yes|no/"):
        assert model.generate("is it?", max_new_tokens=10, grammar=grammar).text in ("yes", "no")


def test_one_of_a_batch_has_a_grammar(model: Model) -> None:
    """The others' tokens stay what they are alone."""
    prompts = ("def f(x):", "import os\n")
    alone = [model.generate(prompt, max_new_tokens=20).token_ids for prompt in prompts]
    scheduler = Scheduler(model.decoder)
    requests = [Request(model.tokenizer.encode(prompt), 20, stop_token_ids=model.stop_ids) for prompt in prompts]
    rule = model.grammars.begin(Grammar.of_text("grammar", "start: /[0-9]{12}/"))
    ruled = Request(model.tokenizer.encode("x = "), 20, stop_token_ids=model.stop_ids, constraint=rule)
    first, numbers, last = (scheduler.add(one) for one in (requests[0], ruled, requests[1]))
    run(scheduler)
    assert [tuple(first.output_token_ids), tuple(last.output_token_ids)] == alone
    assert len(model.tokenizer.decode(numbers.output_token_ids)) == 12
    assert numbers.finish_reason == "stop"


class Failing:
    """A grammar that can be followed for some tokens."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def mask(self, logits: torch.Tensor) -> None:
        if not self.steps:
            raise UsageError("grammar: it cannot be followed further")

    def take(self, token: int) -> None:
        self.steps -= 1


@pytest.mark.parametrize("steps", [0, 3])
def test_a_grammar_that_fails_ends_its_own_answer(model: Model, steps: int) -> None:
    alone = model.generate("def f(x):", max_new_tokens=12).token_ids
    scheduler = Scheduler(model.decoder)
    other = scheduler.add(Request(model.tokenizer.encode("def f(x):"), 12, stop_token_ids=model.stop_ids))
    ruled = scheduler.add(Request([5, 6, 7], 12, constraint=Failing(steps)))
    with pytest.raises(UsageError, match="cannot be followed"):
        run(scheduler)
    assert scheduler.fail() == [ruled]
    run(scheduler)
    assert tuple(other.output_token_ids) == alone
    assert len(ruled.output_token_ids) == steps


NESTED = 3000
BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "objekt"}}, "json_schema: it does not compile: Invalid type: objekt"),
    ({"json_schema": "{"}, "json_schema: it does not compile"),
    ({"json_schema": {"$ref": "http://example.com/a"}}, "json_schema: it does not compile"),
    ({"json_schema": {"pattern": "(", "type": "string"}}, "json_schema: it does not compile"),
    ({"json_schema": '{"items":' * NESTED + "{}" + "}" * NESTED}, "json_schema: it does not compile: recursion limit"),
    ({"json_schema": {"a": {1}}}, "json_schema: expected a JSON schema, found what JSON cannot hold"),
    ({"json_schema": "x" * (1 << 18)}, "json_schema: expected at most 131,072 characters, found 262,144"),
    ({"grammar": "start: /(/"}, "grammar: it does not compile"),
    ({"grammar": "root := ("}, "grammar: it does not compile"),
    ({"grammar": "start: " + "(" * NESTED + '"a"' + ")" * NESTED}, "grammar: it does not compile"),
    ({"grammar": "root ::= " + "(" * NESTED + '"a"' + ")" * NESTED}, "grammar: it does not compile"),
    ({"grammar": "start: /a/", "json_schema": {}}, "grammar: expected none beside json_schema"),
]


@pytest.mark.parametrize(("given", "sentence"), BAD, ids=lambda value: str(value)[:50])
def test_what_does_not_compile_is_one_sentence(model: Model, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        model.generate("a", max_new_tokens=5, **given)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_costly_grammar_is_refused(model: Model) -> None:
    """Repetitions within repetitions: with other settings of the library's this one runs for minutes."""
    with pytest.raises(UsageError, match=r"grammar: .*too many expressions"):
        model.generate("a", max_new_tokens=3, grammar="start: /(((a{1000}){1000}){1000})/")


def test_what_a_model_lacks_is_named(model: Model) -> None:
    data = model.bundle.read_bytes("tokenizer.json")
    assert data is not None
    rule = Grammar.of_text("grammar", "start: /a/")
    with pytest.raises(UsageError, match="grammar: this bundle has no tokenizer"):
        Grammars(lambda: None, frozenset({0})).begin(rule)
    with pytest.raises(UsageError, match="grammar: this bundle has no token that ends a text"):
        Grammars(lambda: data, frozenset()).begin(rule)
    strange = json.dumps({**json.loads(data), "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
    with pytest.raises(UsageError, match="grammar: it needs a byte-pair tokenizer"):
        Grammars(strange.encode, frozenset({0})).begin(rule)


def test_a_vocabulary_padded_beyond_the_tokenizer(model: Model) -> None:
    rule = model.grammars.begin(Grammar.of_text("grammar", "start: /a/"))
    logits = torch.zeros(model.config.vocab_size + 1000)
    rule.mask(logits)
    assert bool((logits[model.config.vocab_size :] == -torch.inf).all())
    allowed = [model.tokenizer.decode([token]) for token in (logits == 0).nonzero()[:, 0].tolist()]
    assert allowed == ["a"]


def test_each_bit_of_a_mask_is_one_token() -> None:
    bits = np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8)
    allowed = [bool(bits[token // 8] >> token % 8 & 1) for token in range(4000)]
    logits = torch.zeros(4003)
    mask_bits(logits, bits)
    assert (logits == 0).tolist() == [*allowed, False, False, False]
