"""``CudaDecoder`` itself against the plain PyTorch decoder: look-ahead, slots, limits, sampling. Run as
triton_cases.py is; under the interpreter the launches of a graph run one by one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bundle_maker import PoisonedPages
from triton_decoder_cases import DEVICE, assert_as_exact, make_bundle, within_half_precision

from wisparse.formats.errors import ContextLengthError, UsageError
from wisparse.kernels.gpu.cudnn import Attended
from wisparse.runtime.cuda import decoder as cuda_decoder
from wisparse.runtime.cuda import prefill as cuda_prefill
from wisparse.runtime.cuda import step as cuda_step
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.many_rows import ManyRowsStep
from wisparse.runtime.cuda.step import DecodeStep
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.sampling import SamplingParams, sample
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import SpeculativeConfig
from wisparse.runtime.memory import paging_of
from wisparse.runtime.torch.decoder import TorchDecoder

GREEDY = SamplingParams()
PROMPT = torch.arange(5) * 7 % 70


def make(
    cls: type[Decoder], *, dtype: torch.dtype = torch.float32, bundle: Any = None, family: str | None = None,
    dense: tuple[str, ...] = (), max_batch: int = 1, max_seq_len: int = 24,
):  # fmt: skip
    bundle = bundle or (make_bundle(family, 0.5) if family else make_bundle("llama", 0.5, num_hidden_layers=1))
    for name, mask in bundle.masks.items():
        if name.endswith(dense):
            bundle.masks[name] = replace(mask, threshold=0.0, sparsity=0.0)
    return cls(bundle, device=DEVICE, dtype=dtype, max_seq_len=max_seq_len, max_batch=max_batch)


def both(**settings: Any) -> tuple[CudaDecoder, TorchDecoder]:
    """The float32 decoder, and the plain one in float64: they part only where rounding decides."""
    return make(CudaDecoder, **settings), make(TorchDecoder, dtype=torch.float64, **settings)


def told(story: Callable[[Decoder], Iterator[object]], **settings: Any) -> tuple[CudaDecoder, TorchDecoder]:
    """Both decoders, after ``story`` has told the same of each."""
    fast, slow = both(**settings)
    assert list(story(fast)) == list(story(slow))
    return fast, slow


def start(decoder: Decoder, slot: int = 0, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    return decoder.prefill(slot, prompt, len(prompt)).argmax().view(1).cpu()


def start_logits(decoder: Decoder) -> torch.Tensor:
    return decoder.prefill(0, PROMPT, len(PROMPT)).clone()


def run(
    decoder: Decoder, token: torch.Tensor, count: int, settings: list[SamplingParams] | None = None, last: bool = False
) -> list:
    found = []
    for index in range(count):
        token = decoder.step(token, settings or [GREEDY] * len(token), last=last and index + 1 == count).cpu()
        found.append(token.tolist())
    return found


def captured_steps(decoder: CudaDecoder) -> list[int]:
    """How many steps were captured of each kind of masks, sparse and dense."""
    return [len(steps) for _, steps in decoder._by_dense.values()]


def captured_replays(decoder: CudaDecoder) -> dict[Any, set[Any]]:
    """Of each kept step the kinds of replays that were captured."""
    return {key: set(step._replays) for key, step in decoder._steps.items()}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[DecodeStep]:
    seen: list[DecodeStep] = []
    replay = DecodeStep.replay

    def counting(self: DecodeStep, *settings: object, **options: object) -> None:
        seen.append(self)
        replay(self, *settings, **options)

    monkeypatch.setattr(DecodeStep, "replay", counting)
    return seen


@pytest.mark.parametrize("settings", [GREEDY, SamplingParams(1.0, 10, 0.9, seed=7)])
def test_tokens_each_step_started_ahead(launches, settings):
    fast, slow = both()
    assert run(fast, start(fast), 6, [settings]) == run(slow, start(slow), 6, [settings])
    assert settings is not GREEDY or len(launches) == 7  # six, and the one ahead; float32 is not sampled there
    assert fast.lengths == slow.lengths == [11]


def test_other_masks_are_what_loading_them_gives():
    """To the bit, sparse and dense; and what the plain decoder gives. Steps are kept."""
    bundle, settings = make_bundle("llama", 0.5, num_hidden_layers=1), {"device": DEVICE, "max_seq_len": 24}

    def changed(factor: float) -> SimpleNamespace:
        masks = {
            name: replace(mask, threshold=mask.threshold * factor, sparsity=mask.sparsity * factor)
            for name, mask in bundle.masks.items()
        }
        return SimpleNamespace(config=bundle.config, checkpoint=bundle.checkpoint, masks=masks)

    def logits(decoder: Decoder) -> torch.Tensor:
        prompt = decoder.prefill(0, PROMPT, 3).clone()
        return torch.stack((prompt, decoder.decode(prompt.argmax().view(1))[0]))

    fast = CudaDecoder(bundle, dtype=torch.float32, **settings)
    seen = {}
    for key in (0.5, 0.0, 1.0, 0.75):
        level = changed(key)
        fast.set_masks(level.masks)
        seen[key] = logits(fast)
        own, exact = (logits(TorchDecoder(level, dtype=d, **settings)) for d in (torch.float32, torch.float64))
        assert_as_exact(seen[key], own, exact)
    assert torch.equal(logits(CudaDecoder(level, dtype=torch.float32, **settings)), seen[key])
    assert len({str(found.tolist()) for found in seen.values()}) == 4
    assert captured_steps(fast) == [1, 1]
    # The slots stay as they are under masks of another kind, also behind a step that ran ahead.
    slow = TorchDecoder(level, dtype=torch.float64, **settings)
    for decoder in (fast, slow):
        decoder.prefill(0, PROMPT, 3)
        decoder.measure_sparsity(True, 2)  # of the steps launched those that do not run ahead
        for token, factor in ((5, 0.0), (7, 0.75), (9, 0.0), (2, 0.5)):
            decoder.step(torch.tensor([token]), [GREEDY])
            decoder.set_masks(changed(factor).masks)
    assert fast.lengths == slow.lengths == [len(PROMPT) + 4]
    assert fast.realised_sparsity() == pytest.approx(slow.realised_sparsity(), abs=1e-9)
    torch.testing.assert_close(fast.decode(torch.tensor([7])), slow.decode(torch.tensor([7])), rtol=1e-5, atol=1e-5)
    assert captured_steps(fast) == [1, 1]  # nothing was captured anew


def test_rows_of_two_levels_take_turns():
    """A step leaves the slots of other masks as they are."""
    bundle = make_bundle("llama", 0.5, num_hidden_layers=1)
    dense = {key: replace(mask, threshold=0.0, sparsity=0.0) for key, mask in bundle.masks.items()}

    def story(decoder: Decoder) -> Iterator[list[int]]:
        tokens = [int(start(decoder, slot, PROMPT[: 3 - slot])) for slot in range(2)]
        for _ in range(2):
            for slot, masks in enumerate((bundle.masks, dense)):
                decoder.set_masks(masks)
                row = [tokens[0]] if slot == 0 else [-1, tokens[1]]
                tokens[slot] = int(decoder.step(torch.tensor(row), [GREEDY] * len(row))[slot])
            yield list(tokens)
        assert decoder.lengths == [5, 4]

    fast, _ = told(story, bundle=bundle, max_batch=2)
    assert captured_steps(fast) == [1, 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_prompt_is_read_in_pieces(dtype, monkeypatch):
    whole = start_logits(make(CudaDecoder, dtype=dtype))
    for name in ("_CHUNK", "_SMALL_CHUNK"):
        monkeypatch.setattr(cuda_prefill, name, 2)
    pieces = start_logits(make(CudaDecoder, dtype=dtype))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    exact = start_logits(make(TorchDecoder, dtype=torch.float64))
    torch.testing.assert_close(pieces, exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("family", ["gemma2", "olmo3", "ernie", "ministral3", "qwen3-moe", "gpt-oss", "glm4-moe-lite"])
def test_short_pieces_are_what_the_plain_decoder_reads(family, monkeypatch):
    """Behind a prefix, in another slot than the first, with fewer rows than the graph has; the cache goes on to be
    decoded from. No masks: a score near its threshold would make two answers of one."""
    settings = {"family": family, "max_batch": 2, "max_seq_len": 40, "dense": ("_proj",)}
    fast, slow = (make(cls, dtype=torch.float16, **settings) for cls in (CudaDecoder, TorchDecoder))
    exact = make(TorchDecoder, dtype=torch.float64, **settings)
    fast.prepare_prompts()
    monkeypatch.setattr(fast, "_read", None)  # nothing is read the other way
    prompt = torch.arange(30) * 7 % 70
    for start, stop in ((0, 9), (9, 30)):
        within_half_precision(fast, slow, exact, lambda d: d.prefill(1, prompt, 30, start=start, stop=stop))  # noqa: B023
    within_half_precision(fast, slow, exact, lambda decoder: decoder.decode(torch.tensor([-1, 5]))[1])


@pytest.mark.parametrize("family", ["gemma2", "lfm2", "deepseek-v2"])
def test_short_prompts_are_read_together(family, monkeypatch):
    """One behind a prefix; the cache goes on to be decoded from."""
    monkeypatch.setattr(cuda_prefill, "_ROWS", (16,))
    monkeypatch.setattr(cuda_prefill, "_JOINT_ROWS", (32,))
    settings = {"family": family, "max_batch": 3, "max_seq_len": 40, "dense": ("_proj",)}
    fast, slow = (make(cls, dtype=torch.float16, **settings) for cls in (CudaDecoder, TorchDecoder))
    exact = make(TorchDecoder, dtype=torch.float64, **settings)
    fast.prepare_prompts()
    monkeypatch.setattr(fast, "_read", None)
    prompts = [(2, torch.arange(15) * 7 % 70, 6), (0, PROMPT, 0), (1, torch.arange(12) * 11 % 70, 0)]
    for decoder in (fast, slow, exact):
        decoder.prefill(2, prompts[0][1], 15, stop=6)
    assert fast.max_joint_prefill == 32
    within_half_precision(fast, slow, exact, lambda decoder: decoder.prefill_together(prompts))
    assert fast.lengths == [5, 12, 15]
    within_half_precision(fast, slow, exact, lambda decoder: decoder.decode(torch.tensor([5, 6, 7])))


def test_prompts_are_the_same_with_graphs_and_without(monkeypatch):
    """Of more positions than the largest graph has, in chunks, and masked ones, which no graph reads."""
    monkeypatch.setattr(cuda_prefill, "_ROWS", (16, 32))
    monkeypatch.setattr(cuda_prefill, "_CHUNK", 48)
    fast, launched, slow = (make(CudaDecoder, dtype=torch.float16, max_seq_len=80) for _ in range(3))
    fast.prepare_prompts()
    monkeypatch.setattr(slow, "_prompts", None)
    exact = make(TorchDecoder, dtype=torch.float64, max_seq_len=80)
    prompt = torch.arange(70) * 7 % 70
    for start, stop in ((0, 5), (5, 70)):
        for reader in (fast, launched):
            within_half_precision(reader, slow, exact, lambda d: d.prefill(0, prompt, 70, start=start, stop=stop))  # noqa: B023
    assert torch.equal(fast.prefill(0, prompt, 3, stop=9), launched.prefill(0, prompt, 3, stop=9))
    for decoder in (make(CudaDecoder), make(CudaDecoder, dtype=torch.float16, family="qwen3.5")):
        decoder.prepare_prompts()
        assert decoder._prompts is None
    fast.close()
    fast.close()  # twice is fine


def plain_part(queries, keys, values, scale, *, causal=False):
    """Twin of ``attend_by_cudnn``."""
    k, v = (x.float().repeat_interleave(queries.shape[1] // len(x), 0) for x in (keys, values))
    scores = torch.einsum("thd,hsd->hts", queries.float(), k) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
    out = torch.einsum("hts,hsd->thd", scores.softmax(-1), v).to(queries.dtype)
    return Attended(out.contiguous(), scores.logsumexp(-1))


def test_cudnn_attends_to_long_chunks(monkeypatch):
    """On a GPU cuDNN itself. The first two chunks and a third that is nearly full are cuDNN's, padded; one that is not, one
    that begins elsewhere, and a short first one are the kernel's."""
    lengths, attend = [], plain_part if DEVICE.type == "cpu" else cuda_prefill.attend_by_cudnn

    def noting(queries, keys, *given, causal=False):
        lengths.append((keys.shape[1], causal))
        return attend(queries, keys, *given, causal=causal)

    monkeypatch.setattr(cuda_prefill, "attend_by_cudnn", noting)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(cuda_prefill, "cudnn_attends", lambda cache, shape: shape.window == 0)
    monkeypatch.setattr(cuda_prefill, "LARGE", 1)
    monkeypatch.setattr(cuda_prefill, "_ROWS", (16, 48, 64))
    monkeypatch.setattr(cuda_prefill, "_FIRST_ROWS", 48)
    monkeypatch.setattr(cuda_prefill, "_JOINT_ROWS", (16,))
    monkeypatch.setattr(cuda_prefill, "_CHUNK", 64)
    bundle = make_bundle("llama", 0.5, num_hidden_layers=1, **({} if DEVICE.type == "cpu" else {"head_dim": 64}))
    settings = {"bundle": bundle, "max_batch": 2, "max_seq_len": 250, "dense": ("_proj",)}
    fast, slow = (make(cls, dtype=torch.float16, **settings) for cls in (CudaDecoder, TorchDecoder))
    exact = make(TorchDecoder, dtype=torch.float64, **settings)
    fast.prepare_prompts()
    fast.prepare_thread()
    if DEVICE.type == "cuda" and not lengths:
        pytest.skip("cuDNN is not used on this GPU")
    own = 64, True
    assert set(lengths) == {(48, True), own, (64, False), (128, False), (192, False)}  # planned
    monkeypatch.setattr(fast, "_read", None)
    prompt = torch.arange(250) * 7 % 70
    whole = [own, own, (64, False), own, (128, False)]
    for start, stop, expected in ((0, 180, whole), (180, 240, []), (0, 16, []), (0, 40, [(48, True)])):
        lengths.clear()
        within_half_precision(fast, slow, exact, lambda d: d.prefill(1, prompt, 250, start=start, stop=stop))  # noqa: B023
        assert lengths == expected
    within_half_precision(fast, slow, exact, lambda decoder: decoder.decode(torch.tensor([-1, 5]))[1])


def test_what_is_prepared_is_what_batches_take():
    """Every step of a batch, of whatever slots and however long its contexts are, and nothing else."""
    fast, plain = (make(CudaDecoder, dtype=torch.float16, max_batch=4, max_seq_len=300) for _ in range(2))
    for decoder in (fast, plain):
        decoder.prefill(0, PROMPT, 5)
    fast.prepare_batches()
    held = captured_replays(fast)
    assert all(ways == {(False, False), (True, False)} for ways in held.values())
    assert {rows for _, rows, _ in held} == {1, 2, 4}
    for slots in ([3], [0, 1], [1, 3, 2], [0, 3]):
        for sampled in (False, True):
            fast.prepare(slots, 1, 300, sampled=sampled)
    assert captured_replays(fast) == held
    assert torch.equal(fast.decode(torch.tensor([5])), plain.decode(torch.tensor([5])))
    fast.close(), plain.close()


def test_a_prompts_beginning_serves_again_and_slots_are_decoded_where_they_are(launches):
    """Part of a prompt in a slot, the rest later, or copied from another slot; idle slots take no rows of a step."""

    def story(decoder: Decoder) -> Iterator[object]:
        whole = decoder.prefill(0, PROMPT, 5)
        yield whole.argmax().item()
        decoder.prefill(3, PROMPT, 5, stop=2)
        torch.testing.assert_close(decoder.prefill(3, PROMPT, 5, start=2), whole, rtol=1e-5, atol=1e-5)
        decoder.copy(3, 1, 4)
        assert decoder.lengths == [5, 4, 0, 5]
        torch.testing.assert_close(decoder.prefill(1, PROMPT, 5, start=4), whole, rtol=1e-5, atol=1e-5)
        for tokens in ([-1, -1, -1, 7], [-1, 8, -1, -1], [9, -1, -1, -1], [9, 3, -1, 4]):
            for _ in range(2):
                chosen = decoder.step(torch.tensor(tokens), [GREEDY] * 4).tolist()
                tokens = [new if old >= 0 else -1 for old, new in zip(tokens, chosen, strict=True)]
            yield tokens
        yield decoder.decode(torch.tensor([-1, -1, -1, 3]))[3].argmax().item()
        yield decoder.lengths

    told(story, max_batch=4)
    assert sorted({step.rows for step in launches}) == [1, 4]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has pages of its own: see test_runtime_cuda.py")
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_scarce_memory_changes_no_token(stored, monkeypatch, launches):
    """Prompts read together and one by one, copied beginnings, steps ahead, drafts' rows, slots that are given up. What is
    not mapped holds no number and is written by nobody."""
    monkeypatch.setattr(cuda_decoder, "Pages", PoisonedPages)
    bundle = make_bundle("llama", 0.5, num_hidden_layers=1)
    prompts = [PROMPT.tolist(), [*PROMPT.tolist()[:4], 9, 9], [5, 6], PROMPT.tolist()[:3]]
    paging, found = paging_of(bundle.config, torch.float16, stored, PoisonedPages.page_bytes), {}
    scarce = paging.pages(24) + paging.least
    for pages in (None, scarce):
        settings = {"dtype": torch.float16, "max_batch": 3, "max_seq_len": 24, "kv_cache_dtype": stored, "pages": pages}
        decoder = CudaDecoder(bundle, device=DEVICE, **settings)
        memory, cache = decoder.cache._memory, decoder.cache
        decoder.prepare_prompts()
        decoder.speculates = True
        scheduler = Scheduler(decoder, speculative=SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=2))
        requests = [scheduler.add(Request(prompt, 9)) for prompt in prompts]
        while scheduler.busy:
            generate_step(scheduler)
            memory.check()
            assert cache.free + sum(cache.taken) == cache.pages
            assert all(map(int.__ge__, cache.held, cache.lengths))
        found[pages] = [request.output_token_ids for request in requests]
        assert (scheduler.stats.preemptions > 0) == (pages is not None)
        assert scheduler.stats.drafts.drafts > 0
        decoder.close()
    assert found[scarce] == found[None]


def test_a_step_ahead_is_forgotten_when_something_else_is_asked_for():
    def story(decoder: Decoder) -> Iterator[object]:
        start(decoder)
        start(decoder, 1, PROMPT[:3])
        yield run(decoder, torch.tensor([3, 4]), 2)
        yield run(decoder, torch.tensor([3, 4]), 2)  # other tokens than the steps gave
        yield run(decoder, torch.tensor([9]), 2)  # fewer rows
        yield int(decoder.decode(torch.tensor([8, 2])).argmax(-1)[1])
        yield run(decoder, torch.tensor([1, 1]), 1)
        yield start(decoder, 1, PROMPT[1:]).tolist()  # the other slot anew
        yield run(decoder, torch.tensor([5, 6]), 1)
        yield decoder.logits(PROMPT, 2).argmax(-1).tolist()  # leaves the slots and the step ahead alone
        yield run(decoder, torch.tensor([5, 6]), 2)
        decoder.measure_sparsity(True)
        yield run(decoder, torch.tensor([2, 3]), 2)
        decoder.measure_sparsity(False)
        yield run(decoder, torch.tensor([7, 7]), 1)
        yield decoder.lengths

    told(story, max_batch=2)


ONE_RECURRENT_BLOCK = {
    "num_hidden_layers": 1, "layer_types": ["linear_attention"], "intermediate_size": 32, "vocab_size": 40,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid"])
def test_recurrent_states_are_those_of_the_tokens_that_were_asked_for(family):
    """Whatever was started ahead and is not wanted, however prompts are cut and slots copied."""
    bundle = make_bundle(family, 0.5, **ONE_RECURRENT_BLOCK)
    prompt = PROMPT % 40

    def story(decoder: Decoder) -> Iterator[object]:
        start(decoder, 0, prompt)
        yield run(decoder, torch.tensor([3]), 2)
        yield run(decoder, torch.tensor([4]), 1)  # another token than the step ahead had
        decoder.prefill(1, prompt, 5, stop=2)
        decoder.prefill(1, prompt, 5, start=2)
        decoder.copy(0, 1, 8)
        yield decoder.decode(torch.tensor([8]))[0].argmax().item()
        assert decoder.lengths == [9, 8]
        copied = decoder.cache.state(0, 1, 8).state
        assert not torch.equal(copied, decoder.cache.state(0, 0, 9).state), "one has moved on"
        yield start(decoder, 0, prompt[1:]).tolist()
        decoder.prefill(1, prompt, 5, stop=2)
        kept = decoder.cache.checkpoint(1)
        whole = decoder.prefill(1, prompt, 5, start=2).clone()
        run(decoder, torch.tensor([-1, 3]), 2)
        for slot in (0, 1):  # another slot, and the same one
            decoder.copy(1, slot, 2, kept)
            torch.testing.assert_close(decoder.prefill(slot, prompt, 5, start=2), whole, rtol=1e-5, atol=1e-5)
        decoder.copy(1, 1, 2, kept)

    decoders = told(story, bundle=bundle, max_batch=2)
    state, expected = (decoder.cache.state(0, 1, 2).state for decoder in decoders)
    torch.testing.assert_close(state.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_context_is_filled_to_its_last_position():
    def story(decoder: Decoder) -> Iterator[object]:
        token = torch.cat([start(decoder), start(decoder, 1, PROMPT[:2])])
        yield run(decoder, token, 3)
        assert decoder.lengths == [8, 5]
        with pytest.raises(ContextLengthError, match="slot 0 is full: it holds 8 positions"):
            decoder.step(torch.tensor([1, 1]), [GREEDY] * 2)
        yield run(decoder, torch.tensor([-1, 4]), 1)[0][1:]  # full, but idle

    told(story, max_batch=2, max_seq_len=8)


@pytest.mark.quick
def test_no_step_runs_ahead_of_a_full_slot(monkeypatch):
    seen: list[list[int]] = []

    def moving_only(self: DecodeStep, *settings: object, **options: object) -> None:
        # Where a step writes, and that it moves on; what it computes takes the interpreter seconds.
        active = self.tokens >= 0
        seen.append(self.positions[active].tolist())
        self._buffer = 1 - self._buffer
        self.tokens.copy_(torch.where(active, 1, -1))
        self.positions += active.int()

    monkeypatch.setattr(DecodeStep, "replay", moving_only)
    decoder = make(CudaDecoder, max_batch=2, max_seq_len=7)
    run(decoder, start(decoder), 2)
    assert seen == [[5], [6]]  # a third would write behind the cache's end
    start(decoder, 1, PROMPT[:3])
    seen.clear()
    run(decoder, torch.tensor([-1, 4]), 1)
    assert seen == [[3], [4]]  # the full one is idle
    start(decoder, 0, PROMPT[:4])
    start(decoder, 1, torch.arange(6))
    seen.clear()
    run(decoder, torch.tensor([1, 4]), 1)
    assert seen == [[4, 6]]
    assert decoder.lengths == [5, 7]


@pytest.mark.parametrize("prompt", [4, 5])
def test_the_steps_change_where_the_context_grows_long(prompt, monkeypatch, launches):
    monkeypatch.setattr(cuda_step, "KV_SPLITS", {6: 4, 2**31: 16})
    fast, slow = both()
    ids = torch.arange(prompt) * 3 + 1
    assert run(fast, start(fast, 0, ids), 3) == run(slow, start(slow, 0, ids), 3)
    assert len(set(launches)) == 2


@pytest.mark.parametrize("several", [False, True])
def test_more_rows_than_usual_take_a_step_of_another_kind_or_several(several, monkeypatch, launches):
    """Idle slots among them, tokens started ahead, and what is counted."""
    monkeypatch.setattr(cuda_decoder, "MAX_ROWS", 4)
    monkeypatch.setattr(cuda_decoder, "MANY_ROWS", 4 if several else 32)

    def story(decoder: Decoder) -> Iterator[object]:
        tokens = torch.full((9,), -1)
        for slot in (0, 1, 3, 5, 6, 7, 8):
            tokens[slot] = start(decoder, slot, PROMPT[: 2 + slot % 3])
        decoder.measure_sparsity(True)
        for last in (False, True):
            tokens = torch.where(tokens >= 0, decoder.step(tokens, [GREEDY] * 9, last=last).cpu(), -1)
            yield tokens.tolist()
        yield pytest.approx(decoder.realised_sparsity(), abs=1e-9)
        yield decoder.decode(tokens)[[0, 8]].argmax(-1).tolist()

    fast, _ = told(story, bundle=make_bundle("qwen2", 0.5, num_hidden_layers=1), max_batch=9)
    with pytest.raises(UsageError, match="1 to max_batch"):
        fast.decode(torch.zeros(10, dtype=torch.int64))
    assert {type(step) for step in launches} == {DecodeStep if several else ManyRowsStep}
    assert len(launches) == 3 * (2 if several else 1)  # one, one ahead, and one that gave logits


@pytest.mark.parametrize("dense", [False, True])
def test_counted_sparsity_is_the_plain_decoders(dense):
    def story(decoder: Decoder) -> Iterator[float]:
        start(decoder, 1)
        run(decoder, torch.tensor([-1, 2]), 1)  # a step ahead that is not counted
        decoder.measure_sparsity(True)
        assert decoder.realised_sparsity() is None
        decoder.prefill(0, PROMPT, 2)
        yield decoder.realised_sparsity()
        for tokens, count, settings in (
            ([4], 3, None),
            ([5], 2, None),
            ([5], 2, [SamplingParams(1.0, seed=3)]),  # another graph
            ([-1, 6], 1, None),  # an idle row
        ):
            run(decoder, torch.tensor(tokens), count, settings, last=True)
            yield decoder.realised_sparsity()
        decoder.prefill(0, PROMPT, 5)  # none of it sparse
        decoder.decode(torch.tensor([6, 7]))
        yield decoder.realised_sparsity()
        decoder.measure_sparsity(True)  # from zero
        run(decoder, torch.tensor([4]), 2, last=True)
        yield decoder.realised_sparsity()

    found, expected = map(list, map(story, both(max_batch=2, dense=("o_proj",) if dense else ())))
    assert found == pytest.approx(expected, abs=1e-9)
    assert 0.2 < min(found) < max(found) < 0.9


def test_a_sample_of_the_steps_is_counted():
    """Every third that is launched; and one that ran ahead, also if it is discarded."""
    sampled, whole = (make(CudaDecoder) for _ in range(2))
    for decoder, every in ((sampled, 3), (whole, 1)):
        start(decoder)
        decoder.measure_sparsity(True, every)
    unread = [0.0]
    for index in range(7):
        for decoder in (sampled, whole):
            run(decoder, torch.tensor([index]), 1, last=True)
        unread.append((index + 1) * whole.realised_sparsity())
    of_step = [after - before for before, after in pairwise(unread)]
    assert sampled.realised_sparsity() == pytest.approx(sum(of_step[::3]) / 3, abs=1e-9)
    for decoder in (sampled, whole):
        decoder.measure_sparsity(True)
    assert run(sampled, torch.tensor([1]), 1) == run(whole, torch.tensor([1]), 2, last=True)[:1]
    sampled.prefill(0, PROMPT, len(PROMPT))  # discards it
    assert sampled.realised_sparsity() == pytest.approx(whole.realised_sparsity(), abs=1e-9)


@pytest.mark.parametrize("where", ["while a token is read", "in an adjustment"])
def test_a_step_that_fails_leaves_nothing_behind(where, monkeypatch):
    fast, slow = both()
    expected = run(slow, start(slow), 2)
    token = start(fast)
    run(fast, token, 1)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "while a token is read":
            patch.setattr(cuda_decoder.TokenReadback, "read", fail)
        with pytest.raises(KeyboardInterrupt):
            fast.step(token, [GREEDY], fail if where == "in an adjustment" else None)
    assert run(fast, start(fast), 2) == expected


def test_sampled_tokens_are_those_of_the_definition(launches):
    # float16: what the device draws from has to be what decode() shows. Settings change, and one row stays greedy.
    drawing, showing = (make(CudaDecoder, dtype=torch.float16, max_batch=2) for _ in range(2))
    settings = [SamplingParams(1.2, 20, 0.95, 0.0, 3), GREEDY]
    token = torch.tensor([1, 2])
    for decoder in (drawing, showing):
        start(decoder)
        start(decoder, 1, PROMPT[:3])
    launches.clear()
    for step in range(4):
        if step == 2:
            settings = [SamplingParams(2.0, seed=8), SamplingParams(0.9, 0, 0.8, 0.01, 4)]
        found = drawing.step(token, settings).cpu()
        token = sample(showing.decode(token), settings, showing.lengths).cpu()
        assert found.tolist() == token.tolist()
    # Each step is started ahead, and started once more where the settings changed.
    assert len(launches) == (4 + 1 + 1) + 4
    # The same seed, the same tokens, from a decoder that has a past.
    start(drawing)
    again = run(drawing, torch.tensor([1]), 3, [SamplingParams(1.2, 20, 0.95, 0.0, 3)])
    fresh = make(CudaDecoder, dtype=torch.float16)
    start(fresh)
    assert run(fresh, torch.tensor([1]), 3, [SamplingParams(1.2, 20, 0.95, 0.0, 3)]) == again


def test_adjusted_tokens_are_those_of_the_definition_each_step_started_ahead(launches):
    """Greedy and sampled rows, an idle one before them; then as the graph itself chooses, and adjusted again."""
    drawing, showing = (make(CudaDecoder, dtype=torch.float16, max_batch=3) for _ in range(2))
    for decoder in (drawing, showing):
        for slot in (1, 2):
            start(decoder, slot, PROMPT[: 6 - slot])
    settings = [GREEDY, GREEDY, SamplingParams(1.2, 20, 0.95, 0.0, 3)]
    launches.clear()
    tokens = torch.tensor([-1, 2, 3])
    for step in range(5):
        chosen_from: list[torch.Tensor] = []

        def adjust(logits: torch.Tensor, step: int = step, seen: list = chosen_from) -> None:
            logits[1:, step % 3 :: 3] = -torch.inf
            seen.append(logits.clone())

        given = GREEDY if step == 3 else settings[2]
        found = drawing.step(tokens, [*settings[:2], given], None if step == 3 else adjust).tolist()
        expected = Decoder.step(showing, tokens, [*settings[:2], given], None if step == 3 else adjust).tolist()
        assert found[1:] == expected[1:], step
        assert step == 3 or len(chosen_from) == 2
        assert drawing.lengths == showing.lengths
        tokens = torch.tensor([-1, *found[1:]])
    # One ahead of each; once more where the graph's own choice was asked for: the one ahead did not choose so.
    assert len(launches) == (5 + 1 + 1) + 5
