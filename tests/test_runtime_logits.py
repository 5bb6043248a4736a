"""Penalties, bias and log-probabilities: against transformers' own, and against the model's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import make_bundle
from hypothesis import given
from hypothesis import strategies as st

import wisparse
from wisparse.formats.errors import UsageError
from wisparse.formats.weight_types import sparse_from
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation.logits import LogitsProcessor, score_tokens
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.model import Model

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
def test_frequency_and_presence_are_of_the_answer_alone(
    prompt: list[int], answer: list[int], frequency: float, presence: float
) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(len(prompt)))
    expected = [
        logit - frequency * answer.count(token) - presence * (token in answer) for token, logit in enumerate(logits)
    ]
    found = adjusted(logits, prompt, answer, frequency_penalty=frequency, presence_penalty=presence)
    assert found.tolist() == pytest.approx(torch.stack(expected).tolist(), abs=1e-4)


def test_bias_is_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    theirs = SequenceBiasLogitsProcessor([[[3], 5.0], [[7], -100.0]])(
        torch.zeros(1, 1, dtype=torch.int64), logits[None]
    )
    assert torch.equal(adjusted(logits, [], [], logit_bias={3: 5.0, 7: -100}), theirs[0])


@pytest.fixture(scope="module", params=["torch", "numba"])
def model(
    request: pytest.FixtureRequest, example_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = make_bundle(example_model, tmp_path_factory.mktemp("choosing") / "bundle", 0.4)
    with wisparse.load(folder, dtype="float32", backend=request.param, max_batch=3, max_seq_len=128) as model:
        yield model


PROMPTS = ("def f(x):", "import os\n", ">>> 1 + ")


def test_an_answer_is_the_same_among_others_who_ask_for_less(model: Model) -> None:
    """One batch of a plain, a penalised and a scored answer: each as alone."""
    wishes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 3},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 2},
    ]
    alone = [
        model.generate(prompt, max_new_tokens=20, **wish) for prompt, wish in zip(PROMPTS, wishes, strict=True)
    ]  # fmt: skip
    assert [answer.scores is None for answer in alone] == [True, True, False]
    scheduler = Scheduler(model.decoder)
    jobs = []
    for prompt, wish in zip(PROMPTS, wishes, strict=True):
        request = model.request(model.tokenizer.encode(prompt), max_new_tokens=20, sampling=SamplingParams(**wish))
        jobs.append(scheduler.add(request))
    while scheduler.busy:
        scheduler.step()
    assert [tuple(job.output_token_ids) for job in jobs] == [answer.token_ids for answer in alone]


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
    assert answer.scores is not None
    whole = torch.tensor([*ids, *answer.token_ids])
    log_probs = model.decoder.logits(whole, sparse_from("dense", len(ids))).log_softmax(-1)[len(ids) - 1 : -1]
    for token, score, row in zip(answer.token_ids, answer.scores, log_probs, strict=True):
        assert score.token_id == token
        assert score.logprob == pytest.approx(float(row[token]), abs=2e-3)
        top = row.topk(3)
        assert [value for _, value in score.top] == pytest.approx(top.values.tolist(), abs=2e-3)
        assert score.top[0][0] == int(top.indices[0])
    streamed = [chunk.score for chunk in model.stream(ids, max_new_tokens=10, logprobs=3, **settings)]  # type: ignore[arg-type]
    assert tuple(streamed) == answer.scores


def test_a_prompts_scores_need_no_slot_and_change_no_answer(model: Model) -> None:
    ids = model.tokenizer.encode("def f(x):\n    return x + 1\n" * 6)  # more than are scored together
    expected = score_tokens(model.decoder.logits(torch.tensor(ids), len(ids))[:-1], ids[1:], 1)
    assert len(ids) > 64
    assert [one.token_id for one in expected] == ids[1:]
    for count in (1, 4):
        plain = model.request(ids, max_new_tokens=count, sampling=SamplingParams(logprobs=1))
        scheduler = Scheduler(model.decoder)
        jobs = [scheduler.add(replace(plain, score_prompt=scored)) for scored in (False, True)]
        while scheduler.busy:
            scheduler.step()
        assert jobs[0].output_token_ids == jobs[1].output_token_ids
        assert jobs[0].prompt_scores is None
        assert jobs[1].prompt_scores == expected


def test_a_prompts_logits_are_never_held_at_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = (model.tokenizer.encode("def f(x):\n    return x + 1\n") * 12)[:120]
    expected = score_tokens(model.decoder.logits(torch.tensor(ids), len(ids))[:-1], ids[1:], 2)
    rows, compute = [], model.decoder._logits  # type: ignore[attr-defined]

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(model.decoder, "_logits", counted)
    monkeypatch.setattr(model.decoder, "logits", lambda *_: pytest.fail("(T, V) float32"))
    monkeypatch.setattr(model.decoder, "prefill_chunk", 16)
    scheduler = Scheduler(model.decoder)
    request = scheduler.add(
        model.request(ids, max_new_tokens=1, sampling=SamplingParams(logprobs=2), score_prompt=True)
    )
    while scheduler.busy:
        scheduler.step()
    assert max(rows) == 16
    assert request.prompt_scores is not None
    assert [one.token_id for one in request.prompt_scores] == ids[1:]
    assert [one.logprob for one in request.prompt_scores] == pytest.approx([one.logprob for one in expected], abs=1e-4)
