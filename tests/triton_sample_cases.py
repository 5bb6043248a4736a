"""Sampling on the device against its twin, runtime/decoding/sampling.py. Run as triton_cases.py is."""

import itertools
import math

import pytest
import torch
from triton_cases import DEVICE, INTERPRETED

from wisparse.kernels.gpu.head import Logits
from wisparse.kernels.gpu.sample import Choice, SampleState, launch_sample
from wisparse.runtime.decoding.sampling import SamplingParams, sample, uniform

HEAD_TILE = 16


def draw(
    logits: torch.Tensor, settings: list[SamplingParams], positions: list[int], dtype: torch.dtype,
    state: SampleState | None = None, tokens: list[int] | None = None, **finish: float,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """One step's choice: token ids and the positions afterwards; positions as ``sampling.sample`` counts them."""
    batch, vocabulary = logits.shape
    logits = logits.to(DEVICE)
    padded = torch.nn.functional.pad(logits, (0, -vocabulary % HEAD_TILE), value=-torch.inf)
    tiles = padded.view(batch, -1, HEAD_TILE)
    best = tiles.amax(2).contiguous()
    first = torch.where(tiles == best[..., None], torch.arange(HEAD_TILE, device=DEVICE), HEAD_TILE).amin(2)
    best_id = (first + HEAD_TILE * torch.arange(tiles.shape[1], device=DEVICE)).int().contiguous()
    if state is None:  # what a step does not leave for the next one holds poison
        state = SampleState.empty(batch, vocabulary, DEVICE)
        for tensor in (state.block_sums, state.sums, state.largest):
            tensor.fill_(torch.nan)
        for tensor in (state.block_counts, state.threshold, state.likeliest):
            tensor.fill_(2**30)
    numbers = [[s.temperature, s.top_k, s.top_p, s.min_p] for s in settings]
    state.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
    state.seeds.copy_(torch.tensor([s.seed or 0 for s in settings]))
    given = torch.tensor(tokens or [0] * batch, device=DEVICE)
    places = torch.tensor([p - 1 for p in positions], dtype=torch.int32, device=DEVICE)
    launch_sample(Logits(logits, best, best_id), Choice(given, given, places), state, dtype, **finish)
    assert not state.counts.any()  # as the next step needs them
    assert not state.arrived.any()
    return given.tolist(), places.tolist()


def random_logits(batch: int, vocabulary: int, dtype: torch.dtype, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(batch, vocabulary, generator=generator)).to(dtype).float()


GRID = [
    SamplingParams(temperature, top_k, top_p, min_p, (2**63 - 1) // (1 + 7 * number))
    for number, (temperature, top_k, top_p, min_p) in enumerate(
        itertools.product([0.6, 1.0, 2.5], [0, 1, 7, 400, 10**9], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.05])
    )
]
VOCABULARIES = [(torch.bfloat16, 70), (torch.float16, 1024), (torch.bfloat16, 2500)]
VOCABULARIES += [(torch.float16, 128256)] * (not INTERPRETED)


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "multiplier", "cap"),
    [(*one, 1.0, None) for one in VOCABULARIES]
    + [(torch.bfloat16, 1500, *finish) for finish in ((0.125, None), (1.0, 4.0), (0.6, 2.5))],
)
def test_the_token_is_the_twins(dtype, vocabulary, multiplier, cap):
    # The interpreter takes 0.3 s for a row: a share of the grid, another one for each vocabulary.
    settings = [*(GRID[vocabulary % 13 :: 13] if INTERPRETED else GRID), SamplingParams()]
    logits = random_logits(len(settings), vocabulary, dtype)
    logits[:, 3] = logits[:, 60]  # equals, besides those that rounding makes
    logits[::3, 5:9] = -torch.inf
    logits[::5, 8], logits[::5, 9] = 0.0, -0.0
    positions = [1 + 1013 * i for i in range(len(settings))]
    finished = logits * multiplier
    finished = finished if cap is None else torch.where(logits.isinf(), logits, cap * torch.tanh(finished / cap))
    found, moved = draw(logits, settings, positions, dtype, multiplier=multiplier, cap=cap)
    assert (found, moved) == (sample(finished, settings, positions).tolist(), positions)


@pytest.mark.parametrize("spread", [1e-3, 2000.0])
def test_extreme_temperatures(spread):
    filters = ((0, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.99), (300, 0.999, 1e-4))
    settings = [
        SamplingParams(temperature, *filters[(i + shift) % 4], seed=i)
        for i, temperature in enumerate([5e-324, 1e-300, 1e-4, 0.05, 1e4])
        for shift in ([int(spread > 1)] if INTERPRETED else range(4))
    ]
    logits = random_logits(len(settings), 1500, torch.float16, spread)
    positions = [9] * len(settings)
    assert draw(logits, settings, positions, torch.float16)[0] == sample(logits, settings, positions).tolist()


@pytest.mark.quick
def test_the_nucleus_ends_with_the_token_that_reaches_top_p():
    # Weights of exactly 1, 1/2, 1/4 and 1/4 on neighbouring values: halves and quarters of the whole are reached with
    # nothing over. The random numbers are so high that any token beyond would be drawn.
    step = 2.0**-10
    logits = (1.25 - step * torch.tensor([[0.0, 1.0, 2.0, 2.0]])).half().float().expand(2, -1).contiguous()
    seeds = [seed for seed in range(200) if uniform(seed, 1) > 0.97][:2]
    settings = [
        SamplingParams(step / math.log(2), top_p=top_p, seed=seed)
        for top_p, seed in zip((0.5, 0.75), seeds, strict=True)
    ]
    assert sample(logits, settings, [1] * 2).tolist() == [0, 1]
    assert draw(logits, settings, [1] * 2, torch.float16)[0] == [0, 1]


def test_flat_and_single_valued_logits():
    settings = [SamplingParams(1.0, top_k, top_p, seed=s) for s, top_k in enumerate([0, 3, 50]) for top_p in (1, 0.3)]
    flat = torch.full((6, 3000), -2.5)
    assert draw(flat, settings, [1] * 6, torch.bfloat16)[0] == sample(flat, settings, [1] * 6).tolist()
    alone = torch.full((6, 3000), -torch.inf)
    alone[:, 2998] = 4.0
    assert draw(alone, settings, [1] * 6, torch.bfloat16)[0] == [2998] * 6


def test_rows_without_an_answer_and_idle_rows():
    logits = random_logits(6, 1100, torch.float16)
    logits[1, 1050], logits[2, 7] = torch.nan, torch.inf
    logits[3] = -torch.inf
    settings = [SamplingParams(0.8, 20, 0.9, 0.0, 1)] * 5 + [SamplingParams()]
    state = SampleState.empty(6, 1100, DEVICE)
    for tokens in ([0, 0, 0, 0, -1, 0], [0] * 6):
        found, moved = draw(logits, settings, [4] * 6, torch.float16, state, tokens)
        expected = sample(logits, settings, [4] * 6).tolist()
        assert expected[1:4] == [-1] * 3
        assert found == [-1 if token < 0 else chosen for token, chosen in zip(tokens, expected, strict=True)]
        assert moved == [4 if token >= 0 else 3 for token in tokens]
