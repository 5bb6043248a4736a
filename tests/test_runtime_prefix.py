"""Prompts in chunks, and what is kept of earlier ones: nobody's tokens depend on either."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from bundle_maker import VariantBundles, run, scarce, small_chunks, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_models import LACKING

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.prefixes import PrefixCache
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import SpeculativeConfig

# With windows, two rotary embeddings, queries that are scaled, and factors that change at 32 positions.
VARIANTS = ("llama", "mistral-window", "gemma3", "ministral3", "phi3-long")
STATES = ("qwen3.5", "lfm2", "granite-hybrid")  # with recurrent blocks
MADE = [variant for variant in STATES if variant not in LACKING]  # a skipped example would skip the whole test
CHUNK = 8  # as small_chunks has it


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    return VariantBundles(tmp_path_factory.mktemp("prefix"))


@pytest.mark.parametrize(
    ("variant", "backend", "sparse_from", "stored"),
    [
        *((variant, "torch", start, "auto") for variant, start in zip(VARIANTS, (45, 20, 0, 20, 20), strict=True)),
        *((variant, "numba", 20, "auto") for variant in ("llama", "gemma3")),
        ("gemma3", "torch", 20, "int8"),
        ("llama", "numba", 45, "int8"),
        ("gemma3", "numba", 20, "fp8"),
        ("glm4-moe-lite", "numba", 20, "auto"),
        ("deepseek-v2", "numba", 45, "fp8"),
        ("deepseek-v2", "torch", 0, "int8"),
        ("youtu", "numba", 20, "auto"),
        *(
            pytest.param(variant, backend, start, "auto", marks=pytest.mark.exhaustive)
            for variant in VARIANTS
            for backend in ("torch", "numba")
            for start in (45, 20, 0)
        ),
    ],
)
def test_a_prompt_is_read_in_chunks(
    bundles: dict[str, Bundle], variant: str, backend: str, sparse_from: int, stored: str
) -> None:
    decoder = small_chunks(bundles[variant], backend, max_batch=3, kv_cache_dtype=stored)
    prompt = torch.tensor(tokens_of(45))
    decoder.prefill_chunk = 64
    unchunked = decoder.prefill(0, prompt, sparse_from).clone()
    decoder.prefill_chunk = CHUNK
    whole = decoder.prefill(0, prompt, sparse_from).clone()
    if stored == "auto":
        torch.testing.assert_close(whole, unchunked, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(decoder.logits(prompt, sparse_from)[-1], whole, atol=1e-4, rtol=1e-4)
    for start, stop in ((0, 8), (8, 32), (32, 40), (40, 45)):
        last = decoder.prefill(1, prompt, sparse_from, start=start, stop=stop).clone()
        assert decoder.lengths[1] == stop
    decoder.prefill(2, prompt, sparse_from, stop=40)
    decoder.copy(1, 2, 32)
    assert decoder.lengths[2] == 32
    copied = decoder.prefill(2, prompt, sparse_from, start=32)
    assert torch.equal(last, whole)
    assert torch.equal(copied, whole)
    rows = decoder.decode(torch.tensor([5, 5, -1]))[:2].clone()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(decoder.decode(torch.tensor([-1, -1, 5]))[2], rows[0])  # idle, it was left as it was
    for start, stop in ((-1, 5), (5, 5), (0, 46)):
        with pytest.raises(UsageError, match=r"0 <= start < stop <= 45"):
            decoder.prefill(0, prompt, sparse_from, start=start, stop=stop)


def watch_prefill(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    read: list[tuple[int, int]] = []
    prefill = decoder.prefill

    def watched(*arguments: object, start: int, stop: int, **more: object) -> torch.Tensor:
        read.append((start, stop))
        return prefill(*arguments, start=start, stop=stop, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder, "prefill", watched)
    return read


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_next_turn_reads_the_rest(bundles: dict[str, Bundle], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_chunks(bundles["llama"], backend)
    scheduler, first = Scheduler(decoder), tokens_of(21)
    answer = run(scheduler, Request(first, 9))
    assert answer.cached_tokens == 0
    second = [*first, *answer.output_token_ids, *tokens_of(6, 1)]
    with monkeypatch.context() as patch:
        read = watch_prefill(decoder, patch)
        again = run(scheduler, Request(second, 5))
    # The prompt's whole chunks serve again. The answer was decoded with the masks: it is read again, densely.
    assert (again.cached_tokens, read) == (16, [(16, 24), (24, 32), (32, 36)])
    assert again.output_token_ids == run(Scheduler(decoder), Request(second, 5)).output_token_ids
    # The same prompt once more: its last position has to be read for what follows it.
    assert run(scheduler, Request(second[:32], 5)).cached_tokens == 24


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("variant", STATES)
@pytest.mark.parametrize("drafts", [None, SpeculativeConfig()])
def test_recurrent_blocks_go_on_from_kept_states(
    bundles: dict[str, Bundle], variant: str, backend: str, drafts: SpeculativeConfig | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A document of 40 tokens and a question, another question, the next turn, and what begins like the first half."""
    bundle, most = bundles[variant], 0 if drafts is None else 3
    decoder = small_chunks(bundle, backend, 2, max_drafted=most, state_checkpoints=9)
    decoder.prefill_chunk, text = 16, tokens_of(40)
    scheduler = Scheduler(decoder, bundle, drafts)
    read = watch_prefill(decoder, monkeypatch)
    asked = [[*text, 7, 8, 9], [*text, 7, 8], [*text, 7, 8, *tokens_of(12, 1)], [*text[:25], 9, 7, 8]]
    expected = ((0, [0, 16, 32, 40, 43]), (40, [40, 42]), (40, [40, 48, 54]), (16, [16, 24, 28]))
    for prompt, (cached, stops) in zip(asked, expected, strict=True):
        del read[:]
        found = run(scheduler, Request(prompt, 9))
        assert (found.cached_tokens, read) == (cached, list(itertools.pairwise(stops)))
        fresh = Scheduler(small_chunks(bundle, backend, max_drafted=most), bundle)
        assert found.output_token_ids == run(fresh, Request(prompt, 9)).output_token_ids
    # At another level, states serve up to the first sparse position; without copies of states nothing does.
    for level, policy, cached in ((0.6, "dense", 24), (0.3, "half", 0), (0.3, "half", 24), (0.6, "half", 0)):
        request = Request(asked[3], 5, prefill=policy, sparsity=level)
        assert run(scheduler, request).cached_tokens == cached
        alone = run(Scheduler(small_chunks(bundle, backend), bundle), replace(request))
        assert request.output_token_ids == alone.output_token_ids
    scheduler = Scheduler(small_chunks(bundle, backend, state_checkpoints=0), bundle)
    assert [run(scheduler, Request(asked[0], 1)).cached_tokens for _ in range(2)] == [0, 0]


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 100)), min_size=1, max_size=5), st.integers(1, 9))
def test_kept_states_are_few_and_near_the_end(turns: list[tuple[int, int]], most: int) -> None:
    """Each prompt goes on from the one before, up to some of its last tokens."""
    prefixes, tokens, unlimited = PrefixCache(2, 8, None, most), list[int](), PrefixCache(2, 8, None, 1000)
    for turn, (added, removed) in enumerate(turns):
        tokens = [*tokens[: len(tokens) - removed], *[turn] * added]
        positions = unlimited.checkpoints(len(tokens), 32)
        assert all(position % 8 == 0 < position < len(tokens) for position in positions)
        for distance in range(1, len(tokens)):  # from the end: at most twice as far, a block, and the rest of a chunk
            before = max((one for one in positions if one <= len(tokens) - distance), default=0)
            assert len(tokens) - before <= 2 * distance + 8 + (32 if distance > 8 else 0)
        slot, source, start = prefixes.choose(tokens, len(tokens), None, [0, 1])
        prefixes.note(slot, tokens[:start], len(tokens), len(tokens), None, source)
        for stop in sorted(position for position in positions if position > start):
            prefixes.note(slot, tokens[:stop], len(tokens), len(tokens), None)
            prefixes.keep(slot, [object()])  # type: ignore[list-item]
        prefixes.note(slot, tokens, len(tokens), len(tokens), None)
        kept = {id(states) for slot in (0, 1) for states in prefixes.prefix(slot).states.values()}
        assert len(kept) <= most
        assert not positions or max(positions) in prefixes.prefix(slot).states  # the newest is kept


PROMPT = list(range(20))


def test_positions_serve_only_whom_they_were_read_for() -> None:
    for held, held_from, tokens, sparse_from, block_size, expected in (
        (PROMPT, 20, [*PROMPT, 50], 21, 1, 20),
        (PROMPT, 20, PROMPT, 20, 1, 19),
        (PROMPT, 20, [*PROMPT[:9], 50, *PROMPT], 30, 1, 9),
        (PROMPT, 20, [*PROMPT, 50], 21, 8, 16),
        # Sparse positions serve only where the same ones are sparse.
        (PROMPT, 10, [*PROMPT, 50, 51], 11, 1, 10),
        (PROMPT, 10, PROMPT, 10, 1, 19),
        (PROMPT, 0, [*PROMPT, 50], 0, 1, 20),
        (PROMPT, 0, [*PROMPT, 50], 21, 1, 0),
        # Beyond 30 tokens every position is turned otherwise.
        (PROMPT, 20, [*PROMPT, *range(50, 62)], 32, 1, 0),
        (list(range(600)), 600, [*range(599), 7], 600, 1, 599),
    ):
        prefixes = PrefixCache(1, block_size, 30)
        prefixes.note(0, held, len(held), held_from, 0.5)
        assert prefixes.choose(tokens, sparse_from, 0.5, [0])[2] == expected
        # At another level only where they were read dense, and are to be.
        assert prefixes.choose(tokens, sparse_from, 0.3, [0])[2] == min(expected, held_from, sparse_from)


def test_the_least_recently_used_goes_first() -> None:
    prefixes = PrefixCache(3, 1, None)

    def take(tokens: list[int], idle: tuple[int, ...] = (0, 1, 2)) -> tuple[int, int, int]:
        chosen = prefixes.choose(tokens, len(tokens), None, idle)
        prefixes.note(chosen[0], tokens, len(tokens), len(tokens), None)
        return chosen

    system = list(range(100, 110))
    assert take([*system, 1]) == (0, 0, 0)
    assert take([*system, 2]) == (1, 0, 10)  # a free slot is left, and the first conversation stays
    assert take([5, 5, 5]) == (2, 2, 0)
    assert take([*system, 1, 4, 4]) == (0, 0, 11)  # goes on
    assert take([6, 6, 6]) == (1, 1, 0)  # the oldest
    assert take([*system, 1, 4, 4, 4], (1, 2)) == (2, 0, 13)  # whose slot is busy
    prefixes.touch(1)
    assert take([8]) == (0, 0, 0)
    prefixes.clear()
    assert take([8, 9]) == (0, 0, 0)


def test_others_go_on_while_a_prompt_is_read(bundles: dict[str, Bundle]) -> None:
    decoder = small_chunks(bundles["llama"], max_batch=3)
    alone = [run(Scheduler(decoder), Request(tokens_of(n, n), 20)).output_token_ids for n in (3, 40, 5)]
    scheduler = Scheduler(decoder)
    requests = [scheduler.add(Request(tokens_of(3, 3), 20))]
    generate_step(scheduler)
    requests += [scheduler.add(Request(tokens_of(n, n), 20)) for n in (40, 5)]
    events = []
    while scheduler.busy:
        events.append([requests.index(request) for request in generate_step(scheduler)])
    # A chunk of the long prompt, a token of whoever runs, and so on; the short one waits its turn and then goes along.
    assert events[:12] == [[], [0], [], [0], [], [0], [], [0], [1], [0, 1], [2], [0, 1, 2]]
    assert [request.output_token_ids for request in requests] == alone
    assert all(request.first_token_time > request.prefill_started > 0 for request in requests)


def test_chunks_are_smaller_while_others_wait(bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_chunks(bundles["llama"], max_batch=2)
    monkeypatch.setattr(decoder, "chunks_split_under_load", 2)
    read = watch_prefill(decoder, monkeypatch)
    scheduler = Scheduler(decoder)
    first = scheduler.add(Request(tokens_of(18, 1), 3))
    while scheduler.busy:
        generate_step(scheduler)
        if len(read) == 3 and len(first.output_token_ids) == 1:
            scheduler.add(Request(tokens_of(21, 2), 1))
    assert read == [(0, 8), (8, 16), (16, 18), (0, 4), (4, 8), (8, 16), (16, 21)]


@pytest.mark.parametrize("scored", [False, True])
def test_others_go_on_beside_scoring(bundles: dict[str, Bundle], scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token after each chunk, and never more positions between two tokens than beside a prompt that is only read."""
    decoder = small_chunks(bundles["llama"], max_batch=2)
    monkeypatch.setattr("wisparse.runtime.generation.scheduler.SCORE_CHUNK", 6)
    read, between = watch_prefill(decoder, monkeypatch), []
    scheduler = Scheduler(decoder)
    stream = scheduler.add(Request(tokens_of(3, 3), 40))
    generate_step(scheduler)
    sampling = SamplingParams(logprobs=2)
    prompt = scheduler.add(Request(tokens_of(45), 1, sampling, score_prompt=scored))
    del read[:]
    while not prompt.output_token_ids:
        if generate_step(scheduler) == [stream]:
            between.append(sum(stop - start for start, stop in read))
            del read[:]
    assert (max(between), len(prompt.prompt_scores or ())) == (6 if scored else CHUNK, 44 if scored else 0)


LEVELS = st.sampled_from([None, None, 0, 0.3, 0.6])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 5), st.integers(1, 12), st.sampled_from([0.0, 1.0]), LEVELS),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("start over")),
    ),
    min_size=1,
    max_size=14,
)


@given(
    actions=ACTIONS, variant=st.sampled_from(["llama", "phi3-long", "gemma3", *MADE]), max_batch=st.integers(1, 3),
    policy=st.sampled_from(["dense", "half", "all"]), turn=st.sampled_from([0.0, 0.25]),
    together=st.sampled_from([0, 45]), short=st.booleans(),
)  # fmt: skip
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_and_goes_an_answer_is_the_one_it_gets_alone(
    bundles: dict[str, Bundle], decoders: dict[tuple[str, int, bool], Decoder], monkeypatch: pytest.MonkeyPatch,
    actions: list[tuple[Any, ...]], variant: str, policy: str, max_batch: int, turn: float, together: int, short: bool,
) -> None:  # fmt: skip
    """Whatever sparsity levels the others name, and if memory is ``short``; first tokens come in order."""
    monkeypatch.setattr("wisparse.runtime.generation.scheduler.TURN_SECONDS", turn)
    bundle = bundles[variant]
    if (variant, max_batch, short) not in decoders:
        more = (monkeypatch,) if short else ()
        decoders[variant, max_batch, short] = (scarce if short else small_chunks)(bundle, "torch", *more, max_batch)
    decoder, cache = decoders[variant, max_batch, short], decoders[variant, max_batch, short].cache
    decoder.max_joint_prefill = together

    def fresh() -> Scheduler:
        decoder.set_masks(bundle.masks)
        return Scheduler(decoder, bundle)

    scheduler = fresh()
    requests: list[Request] = []
    # Every turn of two conversations that begin alike, and of a third.
    shared = tokens_of(19)
    turns = [shared + tokens_of(9, seed) for seed in (1, 2)]
    prompts = [shared, *turns, shared[:17], tokens_of(25, 3), tokens_of(2, 4)]
    for action, *values in actions:
        if action == "ask":
            which, count, temperature, level = values
            earlier = [one for one in requests if one.finish_reason == "length" and len(one.prompt_token_ids) < 30]
            # Now and then the next turn of what was answered.
            prompt = prompts[which]
            if which == 5 and earlier:
                prompt = [*earlier[-1].prompt_token_ids, *earlier[-1].output_token_ids, 7]
            sampling = SamplingParams(temperature, seed=3)
            requests.append(scheduler.add(Request(prompt, count, sampling, prefill=policy, sparsity=level)))
        elif action == "step":
            for _ in range(values[0]):
                generate_step(scheduler)
                assert cache.free + sum(cache.taken) == cache.pages
                assert all(map(int.__ge__, cache.held, cache.lengths))
        elif action == "cancel" and values[0] < len(requests):
            scheduler.finish(requests[values[0]], "cancelled")
        elif action == "start over":
            scheduler.start_over()
    while scheduler.busy:
        generate_step(scheduler)
    assert scheduler.slots == [None] * max_batch
    assert scheduler.prefilling is None
    began = [request.first_token_time for request in requests if request.output_token_ids]
    assert began == sorted(began)
    for request in requests:
        alone = run(fresh(), replace(request)).output_token_ids
        given = len(request.output_token_ids) if request.finish_reason == "cancelled" else None
        assert request.output_token_ids == alone[:given]


@pytest.fixture(scope="module")
def decoders() -> dict[tuple[str, int, bool], Decoder]:
    return {}
