"""Speculation changes no token: what a step verifies has the bits of plain steps, whatever the drafts are."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import Drafts, VariantBundles, cpu_decoder, tokens_of
from starlette.testclient import TestClient

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ContextLengthError, UsageError
from wisparse.options import footer
from wisparse.runtime.decoding.sampling import SamplingParams, sample
from wisparse.runtime.generation import generate, speculation
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import Chain, Lookup, SpeculativeConfig
from wisparse.runtime.serve.app import ServeSettings, make_app

CONFIG = SpeculativeConfig()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    return VariantBundles(tmp_path_factory.mktemp("speculation"))


@pytest.mark.parametrize(
    ("variant", "backend", "dtype", "weights"),
    [
        ("gemma3", "torch", "float32", "native"),
        ("llama-bias", "numba", "float32", "native"),
        ("gemma3", "numba", "bfloat16", "native"),
        ("llama-bias", "numba", "bfloat16", "int8"),
        ("llama-bias", "numba", "float32", "int4"),
        ("qwen3.5", "torch", "float32", "native"),
        ("qwen3.5", "numba", "float32", "native"),
        ("qwen3.5", "numba", "bfloat16", "native"),
        ("glm4-moe-lite", "numba", "bfloat16", "native"),
        ("deepseek-v2", "numba", "float32", "int8"),
    ],
)
def test_a_verified_row_has_the_bits_of_a_plain_step(
    bundles: dict[str, Bundle], variant: str, backend: str, dtype: str, weights: str
) -> None:
    kind = getattr(torch, dtype)
    plain, other = (
        cpu_decoder(bundles[variant], backend, kind, weights=weights, max_seq_len=64, max_batch=3, max_drafted=5)
        for _ in range(2)
    )
    for decoder in (plain, other):
        for slot in (0, 2):
            decoder.prefill(slot, torch.tensor(tokens_of(9 + slot, slot)), 20)
    given = [tokens_of(6, 7), [], tokens_of(3, 8)]
    expected: list[list[torch.Tensor]] = [[], [], []]
    for step in range(6):
        rows = [one[step] if step < len(one) else -1 for one in given]
        logits = plain.decode(torch.tensor(rows))
        for slot, token in enumerate(rows):
            if token >= 0:
                expected[slot].append(logits[slot].clone())
    settings = [SamplingParams(), SamplingParams(), SamplingParams(1.0, seed=5)]
    chosen, logits = other.verify(given, settings)
    assert torch.equal(logits, torch.stack(expected[0] + expected[2]))
    assert chosen[:6].tolist() == logits[:6].argmax(1).tolist()
    assert other.lengths == plain.lengths == [15, 0, 14]
    for slot in (0, 2):
        other.truncate(slot, 12)
        plain.truncate(slot, 12)
    for too_long in ([tokens_of(3, 1), [], [7] * 53], [[7] * 53, [], tokens_of(3, 1)]):
        with pytest.raises(ContextLengthError, match="at most 64 positions, found 65"):
            other.verify(too_long, settings)
        assert other.lengths == [12, 0, 12]
    again = torch.tensor([5, -1, 6])
    assert torch.equal(other.decode(again)[[0, 2]], plain.decode(again)[[0, 2]])


REQUESTS: list[dict[str, Any]] = [
    {},
    {"sampling": SamplingParams(1.0, 20, 0.95, seed=3)},
    {"sampling": SamplingParams(0.7, frequency_penalty=0.5, repetition_penalty=1.2, seed=4, logprobs=2)},
    {"sampling": SamplingParams(logit_bias={50: 1.5}, logprobs=0)},
    {"speculative": False},
]


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        ("phi3-long", "torch"),
        ("phi3-long", "numba"),
        ("gemma3", "numba"),
        ("qwen3.5", "torch"),
        ("qwen3.5", "numba"),
        ("glm4-moe-lite", "torch"),
        ("glm4-moe-lite", "numba"),
    ],
)
def test_answers_are_those_without(
    bundles: dict[str, Bundle], variant: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = cpu_decoder(bundles[variant], backend, max_seq_len=64, max_batch=3, max_drafted=5)

    def answers(config: SpeculativeConfig | None) -> tuple[list[Request], Scheduler]:
        scheduler = Scheduler(decoder, speculative=config)
        requests = [Request(tokens_of(12 + i, i), 20, stop_token_ids=frozenset({55}), **REQUESTS[i]) for i in range(5)]
        for request in requests:
            scheduler.add(request)
        while scheduler.busy:
            generate_step(scheduler, lambda: False)
        return requests, scheduler

    plain, _ = answers(None)
    known = {tuple(one.prompt_token_ids): one.output_token_ids for one in plain}
    for kind in ("perfect", "hostile", "random"):
        monkeypatch.setattr(generate, "make_drafter", lambda *given, kind=kind: Drafts(kind, known, given[-1]))
        found, scheduler = answers(CONFIG)
        for one, expected in zip(found, plain, strict=True):
            assert one.output_token_ids == expected.output_token_ids
            assert one.finish_reason == expected.finish_reason
            assert one.scores == expected.scores
        counts = scheduler.stats.drafts
        assert counts.acceptance_rate == {"perfect": 1.0, "hostile": 0.0}.get(kind, pytest.approx(0.5, abs=0.3))
        assert counts.drafts > 4
        assert found[4].drafts.drafts == 0


def test_accepted_samples_have_the_distribution_of_plain_ones(bundles: dict[str, Bundle]) -> None:
    """20,000 first tokens, and the pairs that an accepted draft begins: chi-square below its 99.9% quantile."""
    decoder = cpu_decoder(bundles["llama-bias"], "torch", max_seq_len=64)
    decoder.prefill(0, torch.tensor(tokens_of(9, 1)), 9)
    draft = int(decoder.decode(torch.tensor([5])).argmax())
    decoder.truncate(0, 9)
    settings = [SamplingParams(0.7, seed=seed) for seed in range(20_000)]
    _, logits = decoder.verify([[5, draft]], settings[:1])
    # Of the 8 likeliest tokens, so that none is rare.
    rows = [torch.where(row >= row.topk(8).values[-1], row, -torch.inf) for row in logits]
    first = sample(rows[0].expand(20_000, -1), settings, [10] * 20_000)
    right = (first == draft).nonzero().flatten().tolist()
    second = sample(rows[1].expand(len(right), -1), [settings[i] for i in right], [11] * len(right))
    found = torch.cat((first[first != draft], len(rows[0]) + second)).bincount(minlength=2 * len(rows[0]))
    one, two = ((row / 0.7).softmax(0) for row in rows)
    expected = 20_000 * torch.cat((one.index_fill(0, torch.tensor(draft), 0), one[draft] * two))
    bins = expected > 0
    assert bins.sum() == 15
    assert found[~bins].sum() == 0
    assert float(((found - expected)[bins].square() / expected[bins]).sum()) < 36.1


def follow(lookup: Lookup, text: Sequence[int], most: int = 7) -> tuple[float, int]:
    """Seconds, in plain steps, that a text takes, and how many steps verified a draft."""
    seconds, verified, at = 0.0, 0, 0
    while at < len(text):
        draft = lookup.propose(min(most, len(text) - at - 1))
        right = next((i for i, one in enumerate(draft) if one != text[at + i]), len(draft))
        seconds += 1 + (0.2 + 0.3 * len(draft) if draft else 0)
        verified += bool(draft)
        for token in text[at : at + right + 1]:
            lookup.take(token)
        lookup.settle(len(draft), right)
        at += right + 1
    return seconds, verified


def test_drafts_follow_what_repeats_and_spare_what_does_not() -> None:
    text = tokens_of(600, 1)
    copied = [*text[:200], 1, 2, *text[202:400], 5, *text[400:]]
    seconds, verified = follow(Lookup(CONFIG, (0.2, 0.3), text), copied)
    assert seconds < len(copied) / 2.2
    assert verified < len(copied) / 6
    period = [5, 6, 7] * 40
    assert follow(Lookup(CONFIG, (0.2, 0.3), [1]), period)[0] < 70  # a draft goes on beyond what is there
    # Words that repeat in fresh order: matches of three tokens abound and tell nothing.
    words = [tokens_of(3, seed) for seed in range(30)]
    mixed = [token for i in random.Random(0).choices(range(30), k=400) for token in words[i]]
    for fresh in (tokens_of(1500, 3), mixed):
        assert follow(Lookup(CONFIG, (0.2, 0.3), fresh[:50]), fresh[50:])[0] <= 1.02 * len(fresh)
    assert follow(Lookup(CONFIG, (0.0, 1.0), text), copied)[1] == 0  # where each draft costs a step


@pytest.mark.parametrize(
    ("variant", "backend", "config", "rate"),
    [
        ("llama-bias", "torch", {"sparsity": 0.6}, 0.0),
        ("llama-bias", "numba", {"sparsity": 0.6}, 0.0),
        ("qwen3.5", "numba", {"sparsity": 0.6}, 0.0),
        ("gemma3", "numba", {"bits": 4}, 0.3),
        ("gemma3", "numba", {"bits": 4, "sparsity": 0.6}, 0.0),
    ],
)
def test_a_model_drafts_for_itself(
    bundles: dict[str, Bundle], variant: str, backend: str, config: dict[str, Any], rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its dense answers are those without; at the draft's own level every draft is right, however it is sampled."""
    monkeypatch.setattr(Chain, "_length", lambda self, rate, most: min(most, 4))
    for level in (0.0, 0.6):
        found = []
        for speculative in (None, {"method": "self", **config}):
            with wisparse.load(
                bundles[variant], backend=backend, device="cpu", dtype="float32", sparsity=level, speculative=speculative,
                max_seq_len=64, max_batch=3,
            ) as model:  # fmt: skip
                requests = [
                    Request(tokens_of(12 + i, i), 20, sampling=SamplingParams(0.8 * (i == 1), seed=i)) for i in range(3)
                ]
                scheduler = model.engine.scheduler
                for request in requests:
                    scheduler.add(request)
                while scheduler.busy:
                    generate_step(scheduler, lambda: False)
                found.append([request.output_token_ids for request in requests])
        assert found[0] == found[1]
        counts = scheduler.stats.drafts
        assert counts.drafts > 8
        assert counts.acceptance_rate >= (1.0 if config == {"sparsity": level} else rate)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "expected a JSON object"),
        ('{"method": "medusa"}', "method: expected one of ngram"),
        ('{"method": "ngram", "model": "x"}', "only the method eagle3"),
        ('{"method": "mtp", "prompt_lookup_min": 3}', "unknown to the method mtp"),
        ('{"method": "ngram", "depth": 3}', "'depth': unknown"),
        ({"method": "self"}, "a level to draft at"),
        ({"method": "self", "bits": "four"}, "bits: expected a level"),
        ({"method": "self", "prompt_lookup_min": 3}, "unknown to the method self"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens: expected"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "at most prompt_lookup_max"),
    ],
)
def test_configurations_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SpeculativeConfig.parse(given)


def test_a_server_tells_what_was_drafted(chat_bundle: Path) -> None:
    prompt = "values = [1, 2, 3]\n" * 12
    cases: list[dict[str, Any]] = [{"max_tokens": 60}, {"max_tokens": 60, "temperature": 0.3, "seed": 1, "logprobs": 1}]
    cases += [{"max_tokens": 40, "stop": ["3]\nv", "\n\n"]}]
    cases += [{"max_tokens": 60, "grammar": 'start: ("values = [1, 2, 3]\\n")+'}]
    with (
        wisparse.load(
            chat_bundle, device="cpu", dtype="float32", backend="numba", max_batch=2, speculative={"method": "ngram"}
        ) as model,
        TestClient(make_app(model, ServeSettings("m"))) as client,
    ):

        def counts() -> list[float]:
            lines = client.get("/metrics").text.splitlines()
            names = [f"wisparse:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
            return [float(line.split()[1]) for name in names for line in lines if line.startswith(name)]

        for case in cases:
            before = counts()
            body = {"prompt": prompt, "temperature": 0, **case}
            plain, drafted = (
                client.post("/v1/completions", json={**body, "speculative": one}).json()["choices"]
                for one in (False, True)
            )
            assert plain == drafted
            drafts, tokens, accepted = (b - a for a, b in zip(before, counts(), strict=True))
            assert 0 < drafts < accepted <= tokens
        answer = model.generate(prompt, max_new_tokens=40)
        assert answer.drafts.mean_length == 1 + answer.drafts.accepted_tokens / answer.drafts.drafts > 2
        assert "accepted" in footer(answer, model, {})


def test_recurrent_models_speculate_if_asked(bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_MIN_SPEEDUP", 0.0)  # it drafts although that takes longer
    how: dict[str, Any] = {"device": "cpu", "dtype": "float32", "backend": "numba", "max_seq_len": 160}
    answers, every = [], {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    for given in ("auto", every):
        with wisparse.load(bundles["qwen3.5"], speculative=given, **how) as model:
            assert model.decoder.speculates is (given != "auto")
            answers.append(model.generate(list(range(3, 100)), max_new_tokens=40))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].drafts.drafts > 0
    with pytest.raises(UsageError, match=r"a head for multi-token prediction in the bundle \(mtp\.\*\), found none"):
        wisparse.load(bundles["qwen3.5"], speculative={"method": "mtp"}, **how)
