"""Sampling, penalties, bias and log-probabilities against transformers' own and the model's; grammars."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import run
from hypothesis import given
from hypothesis import strategies as st

import wisparse
from wisparse import Model, UsageError
from wisparse.formats.weight_types import sparse_from
from wisparse.runtime.decoding.sampling import SamplingParams, sample, uniform
from wisparse.runtime.generation.grammar import Grammar, Grammars
from wisparse.runtime.generation.logits import LogitsProcessor, score_tokens
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.tokenizer import Tokenizer


def random_logits(vocab_size: int, seed: int, rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def their_probabilities(logits: torch.Tensor, settings: SamplingParams) -> torch.Tensor:
    """Transformers' filters in its order; (V,) float64."""
    from transformers.generation import logits_process as theirs

    filters = theirs.LogitsProcessorList([theirs.TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        filters.append(theirs.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        filters.append(theirs.TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        filters.append(theirs.MinPLogitsWarper(settings.min_p))
    return filters(torch.zeros(1, 1, dtype=torch.int64), logits.double()).softmax(-1)[0]


def test_greedy_and_extreme_logits() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 1.0]])
    assert sample(logits, [SamplingParams()] * 2, [0, 0]).tolist() == [1, 0]
    settings = SamplingParams(1e-4, seed=1)
    assert int(sample(torch.tensor([[3e38, -3e38, 0.0]]), [settings], [0])[0]) == 0
    masked = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    assert int(sample(masked, [SamplingParams(1.0, 2, 0.9, 0.1, 5)], [0])[0]) == 1
    for broken in ([1.0, float("nan")], [1.0, float("inf")], [-torch.inf, -torch.inf]):
        for each in (SamplingParams(), SamplingParams(1.0, seed=0)):
            assert int(sample(torch.tensor([broken]), [each], [0])[0]) == -1


@given(
    temperature=st.floats(0.3, 3), top_k=st.sampled_from([0, 1, 5, 40, 300]), seed=st.integers(0, 2**62),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]), min_p=st.sampled_from([0.0, 0.02, 0.3]),
)  # fmt: skip
def test_filters_are_transformers(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    settings = SamplingParams(temperature, top_k, top_p, min_p, seed)
    logits = random_logits(200, seed % 1000)
    probabilities = their_probabilities(logits, settings)
    position = seed % 7
    drawn = int(sample(logits, [settings], [position])[0])
    assert probabilities[drawn] > 0
    # The definition, from their probabilities: the first id whose cumulative sum exceeds the random number.
    sums = probabilities.cumsum(0)
    number = uniform(seed, position)
    assert sums[drawn] > number - 1e-9
    assert drawn == 0 or sums[drawn - 1] <= number + 1e-9


@pytest.mark.parametrize(("top_p", "last"), [(0.5, 0), (0.50001, 1), (0.75, 1), (0.75001, 3)])
def test_the_nucleus_ends_with_the_token_that_reaches_top_p(top_p: float, last: int) -> None:
    # Weights of exactly 1, 1/2, 1/4 and 1/4; of equals all stay.
    logits = torch.tensor([[0.0, -1.0, -2.0, -2.0]])
    settings = [SamplingParams(1 / math.log(2), top_p=top_p, seed=seed) for seed in range(200)]
    drawn = sample(logits.expand(200, -1), settings, [0] * 200)
    assert drawn.unique().tolist() == list(range(last + 1))


def test_a_large_vocabulary_needs_the_full_sort_and_gets_it() -> None:
    # Nearly flat: the first 1024 tokens hold far less than top_p.
    logits = random_logits(5000, 1) * 0.01
    settings = [SamplingParams(1.0, top_p=0.9, seed=seed) for seed in range(200)]
    kept = their_probabilities(logits, settings[0]) > 0
    drawn = sample(logits.expand(200, -1), settings, [0] * 200)
    assert bool(kept[drawn].all())
    assert 1024 < int(kept.sum()) < 5000


def test_random_numbers_are_uniform_and_independent() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(64)] for seed in range(64)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(numbers.var() - 1 / 12) < 0.01
    for axis in (numbers, numbers.T):
        assert abs(torch.corrcoef(axis)[0, 1:].mean()) < 0.05
    assert numbers.unique().numel() > 4000
    # Written down: another implementation, on a device, has to give the same numbers.
    assert (uniform(0, 0), uniform(42, 1000)) == (0.6524484753608704, 11664524 * 2.0**-24)


VOCABULARY = 50
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=200)


def adjusted(logits: torch.Tensor, prompt: list[int], answer: list[int], **settings: Any) -> torch.Tensor:
    processor = LogitsProcessor(SamplingParams(**settings), prompt)
    for token in answer:
        processor.take(token)
    found = logits.clone()
    processor.process(found)
    return found


@given(prompt=tokens, answer=tokens, penalty=st.floats(0.5, 2.0))
def test_repetition_is_transformers(prompt: list[int], answer: list[int], penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(len(prompt)))
    ids = torch.tensor([prompt + answer], dtype=torch.int64)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None])[0] if len(ids[0]) else logits
    ours = adjusted(logits, prompt, answer, repetition_penalty=penalty)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


@given(prompt=tokens, answer=tokens, frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_frequency_and_presence(prompt: list[int], answer: list[int], frequency: float, presence: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(len(prompt)))
    counts = torch.tensor(answer, dtype=torch.int64).bincount(minlength=VOCABULARY)
    expected = logits - frequency * counts - presence * (counts > 0)
    found = adjusted(logits, prompt, answer, frequency_penalty=frequency, presence_penalty=presence)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_bias_is_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    theirs = SequenceBiasLogitsProcessor([[[3], 5.0], [[7], -100.0]])(ids, logits[None])
    assert torch.equal(adjusted(logits, [], [], logit_bias={3: 5.0, 7: -100}), theirs[0])


@pytest.fixture(scope="module", params=["torch", "numba"])
def model(request: pytest.FixtureRequest, bundle: Path) -> Iterator[Model]:
    with wisparse.load(bundle, dtype="float32", backend=request.param, max_batch=3, max_seq_len=128) as model:
        yield model


PROMPTS = ("def f(x):", "import os\n", ">>> 1 + ")


def test_an_answer_is_the_same_among_others_who_ask_for_less(model: Model) -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 3},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 2},
    ]
    asked = list(zip(PROMPTS, wishes, strict=True))
    alone = [model.generate(prompt, max_new_tokens=20, **wish) for prompt, wish in asked]
    assert [answer.scores is None for answer in alone] == [True, True, False]
    scheduler = Scheduler(model.decoder)
    rule = model.grammars.begin(Grammar("grammar", "start: /[0-9]{12}/"))
    ruled = scheduler.add(model.request(model.tokenizer.encode("x = "), max_new_tokens=20, constraint=rule))
    requests = []
    for prompt, wish in asked:
        request = model.request(model.tokenizer.encode(prompt), max_new_tokens=20, sampling=SamplingParams(**wish))
        requests.append(scheduler.add(request))
    run(scheduler)
    assert [tuple(request.output_token_ids) for request in requests] == [answer.token_ids for answer in alone]
    assert (len(model.tokenizer.decode(ruled.output_token_ids)), ruled.finish_reason) == (12, "stop")


def test_a_banned_token_never_comes_and_a_wanted_one_always_does(model: Model) -> None:
    plain = model.generate(PROMPTS[0], max_new_tokens=8)
    first = plain.token_ids[0]
    assert first not in model.generate(PROMPTS[0], max_new_tokens=8, logit_bias={first: -100}).token_ids
    wanted = model.generate(PROMPTS[0], max_new_tokens=8, logit_bias={5: 100, first: 0}).token_ids
    assert set(wanted) == {5}
    with pytest.raises(UsageError, match=f"logit_bias: expected token ids from 0 to {model.config.vocab_size - 1}"):
        model.generate(PROMPTS[0], logit_bias={model.config.vocab_size: 1})


def test_scores_are_the_models_own(model: Model) -> None:
    """Whatever chooses: the log-probabilities are of the logits before penalties and temperature."""
    ids = model.tokenizer.encode(PROMPTS[0])
    settings = {"temperature": 1.5, "seed": 1, "frequency_penalty": 2.0, "logit_bias": {5: 3.0}}
    answer = model.generate(ids, max_new_tokens=10, logprobs=3, **settings)  # type: ignore[arg-type]
    assert answer.token_ids == model.generate(ids, max_new_tokens=10, **settings).token_ids  # type: ignore[arg-type]
    whole = torch.tensor([*ids, *answer.token_ids])
    log_probs = model.decoder.logits(whole, sparse_from("dense", len(ids))).log_softmax(-1)[len(ids) - 1 : -1]
    for token, score, row in zip(answer.token_ids, answer.scores, log_probs, strict=True):
        assert (score.token_id, score.logprob) == (token, pytest.approx(float(row[token]), abs=2e-3))
        top = row.topk(3)
        assert [value for _, value in score.top] == pytest.approx(top.values.tolist(), abs=2e-3)
        assert score.top[0][0] == int(top.indices[0])
    streamed = [chunk.score for chunk in model.stream(ids, max_new_tokens=10, logprobs=3, **settings)]  # type: ignore[arg-type]
    assert tuple(streamed) == answer.scores


def test_a_prompt_is_scored_without_all_its_logits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = (model.tokenizer.encode("def f(x):\n    return x + 1\n") * 12)[:120]
    expected = score_tokens(model.decoder.logits(torch.tensor(ids), len(ids))[:-1], ids[1:], 2)
    rows, prefill = [], model.decoder.prefill

    def watched(*given: Any, on_logits: Any, **more: Any) -> Any:
        seen = on_logits and (lambda logits: rows.append(len(logits)) or on_logits(logits))
        return prefill(*given, on_logits=seen, **more)

    monkeypatch.setattr(model.decoder, "prefill", watched)
    monkeypatch.setattr(model.decoder, "logits", lambda *_: pytest.fail("(T, V) float32"))
    monkeypatch.setattr(model.decoder, "prefill_chunk", 16)
    scheduler = Scheduler(model.decoder)
    plain = model.request(ids, max_new_tokens=4, sampling=SamplingParams(logprobs=2))
    unscored, scored = (scheduler.add(replace(plain, score_prompt=asked)) for asked in (False, True))
    run(scheduler)
    assert unscored.output_token_ids == scored.output_token_ids
    assert max(rows) == 16
    assert unscored.prompt_scores is None
    assert [one.token_id for one in scored.prompt_scores] == ids[1:]
    assert [one.logprob for one in scored.prompt_scores] == pytest.approx([one.logprob for one in expected], abs=1e-4)


_AGE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "age": _AGE}}
SCHEMA |= {"required": ["name", "age"], "additionalProperties": False}


def test_answers_follow_schemas_and_grammars(model: Model) -> None:
    for temperature in (0.0, 1.5):
        answer = model.generate("person = ", temperature=temperature, seed=5, max_new_tokens=100, json_schema=SCHEMA)
        found = json.loads(answer.text)
        assert list(found) == ["name", "age"]
        assert "\n" not in answer.text
        assert 0 <= found["age"] <= 99
        assert len(found["name"]) <= 10
        assert answer.finish_reason == "stop"
    for grammar in ('start: "yes" | "no"', 'root ::= "yes" | "no"', "start: /yes|no/"):
        assert model.generate("is it?", max_new_tokens=10, grammar=grammar).text in ("yes", "no")


class Failing:
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
    run(scheduler)
    assert "cannot be followed" in str(ruled.error)
    assert (tuple(other.output_token_ids), len(ruled.output_token_ids)) == (alone, steps)


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
    ({"grammar": "start: /a/", "json_schema": {}}, "grammar: expected none beside a JSON schema"),
    # With other settings of the library's this one runs for minutes.
    ({"grammar": "start: /(((a{1000}){1000}){1000})/"}, "too many expressions"),
]


@pytest.mark.parametrize(("given", "sentence"), BAD, ids=lambda value: str(value)[:50])
def test_what_does_not_compile_is_one_sentence(model: Model, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        model.generate("a", max_new_tokens=5, **given)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_grammars_and_odd_tokenizers(model: Model) -> None:
    data = model.bundle.read_bytes("tokenizer.json")
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "pre_tokenizer": None}
    words |= {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    for tokenizer, stop_ids, sentence in (
        (None, {0}, "this bundle has no tokenizer"),
        (data, (), "this bundle has no token that ends a text"),
        (json.dumps({**json.loads(data), **words}).encode(), {0}, "it needs a byte-level tokenizer"),
    ):
        text = None if tokenizer is None else Tokenizer(tokenizer, {}, None, 8192)
        with pytest.raises(UsageError, match=f"grammar: {sentence}"):
            Grammars(text, frozenset(stop_ids)).begin(Grammar("grammar", "start: /a/"))
    # A vocabulary padded beyond the tokenizer.
    rule = model.grammars.begin(Grammar("grammar", "start: /a/"))
    logits = torch.zeros(model.config.vocab_size + 1000)
    rule.mask(logits)
    assert bool((logits[model.config.vocab_size :] == -torch.inf).all())
    allowed = [model.tokenizer.decode([token]) for token in (logits == 0).nonzero()[:, 0].tolist()]
    assert allowed == ["a"]
