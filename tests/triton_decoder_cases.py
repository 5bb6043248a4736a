"""``CudaDecoder`` against the plain PyTorch decoder: every family, and weights in codes against the same rounded weights.
Run as triton_cases.py is; under the interpreter the launches of a graph run one by one."""

# ruff: noqa: C408 (tables of keyword arguments read better)
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantised_models import PUBLISHED, quantise_model
from runtime_models import EXPERTS, FAMILIES, HYBRIDS
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

from wisparse.converter.config import full_config
from wisparse.formats.block_ops import not_yet
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES, group_of, round_weight
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.torch.decoder import TorchDecoder

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
QUERY = "model.layers.0.self_attn.q_proj.weight"
PROMPT = torch.arange(9) * 7 % 70
_COMMON = dict(
    hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=70, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip
CONFIGS = {
    "llama": dict(_COMMON, model_type="llama", tie_word_embeddings=True),
    "mistral": dict(_COMMON, model_type="mistral", sliding_window=6),
    "qwen2": dict(_COMMON, model_type="qwen2"),
    "qwen3": dict(_COMMON, model_type="qwen3"),
    "phi3": dict(_COMMON, model_type="phi3", partial_rotary_factor=0.5),
}
MORE_CONFIGS = {
    name: config
    for name, (model_type, settings) in {**FAMILIES, **HYBRIDS, **EXPERTS}.items()
    if (config := {**_COMMON, "num_hidden_layers": 3, "model_type": model_type, **settings})
    and not_yet(ModelConfig.from_dict(full_config(config)), "triton") is None
}


def make_bundle(name: str, sparsity: float, **changes: int):
    """A tiny random model whose masks drop about ``sparsity``, a different share in each projection."""
    config = ModelConfig.from_dict(full_config({**CONFIGS, **MORE_CONFIGS}[name] | changes))
    generator = torch.Generator().manual_seed(len(name))
    tensors: dict[str, torch.Tensor] = {}
    for key, shape in expected_tensors(config).items():
        values = torch.randn(shape, generator=generator)
        middle = 0 if config.architecture.norm_offset and "norm" in key else 1
        tensors[key] = values / shape[-1] ** 0.5 if len(shape) > 1 else middle + 0.1 * values
    masks = {}
    for index in range(config.num_blocks):
        for i, projection in enumerate(config.projections(index)):
            typical = {"o_proj": 0.5, "out_proj": 0.5, "down_proj": 0.3}.get(projection.role, 1.0)
            shape = (projection.experts, projection.in_features)[projection.experts == 0 :]
            masks[projection.name] = ProjectionMask(
                scale=torch.rand(shape, generator=generator) + 0.5,
                threshold=typical * (sparsity + 0.02 * i) if sparsity else 0.0,
                sparsity=sparsity,
            )
    checkpoint = SimpleNamespace(tensor=lambda key, device="cpu": tensors[key].to(device))
    return SimpleNamespace(config=config, checkpoint=checkpoint, masks=masks)


def both(bundle: Any, **settings: Any) -> tuple[CudaDecoder, TorchDecoder]:
    """The decoder in float32, and the plain one in float64: they part only where rounding decides."""
    return CudaDecoder(bundle, dtype=torch.float32, **settings), TorchDecoder(bundle, dtype=torch.float64, **settings)


def assert_as_exact(found: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, times: float = 4.0) -> None:
    """Logits (..., V) are as near to float64's as the plain decoder's own in the same dtype are: within ``times`` the
    largest of its rows' errors, and at least some roundings of the largest logit."""
    exact = exact.double()
    error, least = ((one.double() - exact).norm(dim=-1).max() for one in (found, own))
    floor = 4 * torch.finfo(torch.float32).eps * exact.norm(dim=-1).max()
    assert error <= times * max(float(least), float(floor)), (float(error), float(least), float(floor))


MORE = [("qwen3.5-moe", 0.0, 2), ("qwen3-moe", 0.5, 3)]
MORE += [(name, 0.5, 1) for name in MORE_CONFIGS]


# Every family's step, alone and in rows, dense and sparse: few cases in which every two of these meet.
@pytest.mark.parametrize(
    ("name", "sparsity", "rows"),
    [
        ("llama", 0.5, 1), ("llama", 0.0, 2), ("llama", 0.5, 4), ("mistral", 0.0, 1), ("mistral", 0.5, 2),
        ("qwen2", 0.5, 1), ("qwen2", 0.0, 2), ("qwen3", 0.0, 1), ("qwen3", 0.5, 2), ("phi3", 0.5, 1), ("phi3", 0.0, 2),
        *MORE,
    ],
)  # fmt: skip
def test_a_familys_logits_are_the_plain_decoders(name, sparsity, rows):
    """A prompt longer than a window, and one after which queries are scaled; then two steps."""
    bundle = make_bundle(name, sparsity)
    settings = {"device": DEVICE, "max_seq_len": 24, "max_batch": rows}
    fast = CudaDecoder(bundle, dtype=torch.float32, **settings)
    exact, own = (TorchDecoder(bundle, dtype=dtype, **settings) for dtype in (torch.float64, torch.float32))
    for slot in range(rows):
        found, near, expected = (d.prefill(slot, (PROMPT + slot) % 70, 4).view(-1) for d in (fast, own, exact))
        assert_as_exact(found, near, expected)
    tokens = torch.tensor([int(expected.argmax()), 60, 4, 5][:rows])
    for _ in range(2):
        found, near, expected = (decoder.decode(tokens).clone() for decoder in (fast, own, exact))
        assert_as_exact(found, near, expected)
        tokens = expected.argmax(-1).cpu()
        assert name not in CONFIGS or torch.equal(found.argmax(-1).cpu(), tokens)


@pytest.mark.parametrize(
    ("name", "stored"),
    [("gemma3", "int8"), ("gemma3", "fp8"), ("deepseek-v2", "int8"), ("glm4-moe-lite", "fp8")],
)
def test_a_cache_in_codes(name: str, stored: str) -> None:
    """In float32 the same codes, but for numbers between two; in half precision, where prompts are read by kernels of
    their own, no further from float64's logits than the plain decoder."""
    bundle = make_bundle(name, 0.0)
    settings = {"device": DEVICE, "max_seq_len": 24, "max_batch": 2, "kv_cache_dtype": stored}
    fast, slow = both(bundle, **settings)
    for slot in range(2):
        expected, found = (decoder.prefill(slot, PROMPT[:5] + slot, 5)[None].clone() for decoder in (slow, fast))
    for _ in range(2 if DEVICE.type == "cpu" else 18):
        # Far below what the codes cost, and above what a number does that lies between two.
        torch.testing.assert_close(found, expected.float(), rtol=0, atol=5e-3)
        tokens = expected.argmax(-1).expand(2)
        expected, found = slow.decode(tokens), fast.decode(tokens)
    differ = [
        (own.view(torch.uint8)[..., :6, :] != other.view(torch.uint8)[..., :6, :]).float().mean()
        for index in fast.cache.attention
        for own, other in zip(fast.cache.attention[index][:2], slow.cache.attention[index][:2], strict=True)
    ]
    assert max(differ) < 1e-3

    def run(decoder: CudaDecoder | TorchDecoder) -> torch.Tensor:
        decoder.prefill(1, PROMPT, 9, stop=5)
        decoder.prefill(1, PROMPT, 9, start=5)
        decoder.copy(1, 0, 9)
        return decoder.decode(torch.tensor([3, 4]))

    for dtype in [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]:
        fast, near = (kind(bundle, dtype=dtype, **settings) for kind in (CudaDecoder, TorchDecoder))
        within_half_precision(fast, near, slow, run)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma4", marks=pytest.mark.quick), "mistral", "glm4-moe-lite"])
def test_rows_that_continue_one_another(name: str) -> None:
    """A row sees the rows of its slot before it; what was taken back is written over. The last slot's are sampled."""
    bundle, settings = make_bundle(name, 0.5), {"device": DEVICE, "max_seq_len": 24, "max_batch": 3}
    choices = [SamplingParams(), SamplingParams(), SamplingParams(0.8, seed=1)]
    fast, slow = both(bundle, **settings)
    for decoder in (fast, slow):
        for slot in (0, 2):
            decoder.prefill(slot, (PROMPT + slot) % 70, 4)
    for given, length in (([[3, 9, 14, 1], [], [8]], 11), ([[5], [], [6, 7]], 12)):
        (chosen, found), (near, expected) = (d.verify(given, choices) for d in (fast, slow))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(chosen.cpu(), near.cpu())
        assert fast.lengths == slow.lengths
        for decoder in (fast, slow):
            decoder.truncate(0, length)
    follow_on = torch.tensor([2, -1, 3])
    found, expected = fast.step(follow_on, choices), slow.step(follow_on, choices)
    assert found[[0, 2]].tolist() == expected[[0, 2]].tolist()


@pytest.mark.parametrize("weights", ["native", "int4"])
def test_a_model_drafts_for_itself(weights: str) -> None:
    """Drafts are steps of the other level, or of rounded weights; the slots stay as they are."""
    drafts, dense = make_bundle("llama", 0.5), make_bundle("llama", 0.0)
    kinds: dict = {"device": DEVICE, "dtype": torch.float32, "max_seq_len": 24, "max_batch": 2}
    decoder, plain = (CudaDecoder(dense, **kinds) for _ in range(2))
    decoder.draft_by_steps(drafts, weights)
    steps = CudaDecoder(drafts, weights=weights, cache=plain.cache, **kinds)
    settings = [SamplingParams(), SamplingParams(0.8, seed=1)]
    for one in (decoder, plain):
        for slot in (0, 1):
            one.prefill(slot, PROMPT + slot, 9)
    found = decoder.draft([3, 5], {0: 3, 1: 3}, settings)
    assert decoder.lengths == [9, 9]
    expected = [torch.tensor([3, 5])]
    for _ in range(3):
        expected.append(steps.step(expected[-1], settings).cpu())
    given = torch.stack(expected, 1).tolist()
    assert found == {0: given[0][1:], 1: given[1][1:]}
    plain.cache.lengths[:] = 9, 9
    assert torch.equal(decoder.verify(given, settings)[1], plain.verify(given, settings)[1])


def within_half_precision(fast, slow, exact, run, *, times=3):
    """``run`` of a decoder gives logits (rows, V): no further from the exact ones than plain half precision is."""
    expected = run(exact)
    own, error = ((run(decoder) - expected).norm(dim=-1) / expected.norm(dim=-1) for decoder in (slow, fast))
    assert (error < times * own.max()).all(), (error, own)


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("gemma2", 1), ("gemma2", 2), ("gemma2", 4), ("gemma4", 2), ("olmo3", 1), ("ernie", 4), ("qwen3.5", 4),
        ("lfm2", 4), ("lfm2-bias", 1), ("qwen3-moe", 2), ("gpt-oss", 2), ("gemma4-moe", 1),
        ("granite-hybrid", 2), ("glm4-moe-lite", 4), ("deepseek-v2", 1), ("nemotron-h", 1), ("nemotron-h", 17), ("nemotron-h-moe", 2),
    ],
)  # fmt: skip
def test_a_familys_rows_in_half_precision(family, rows):
    bundle, settings = make_bundle(family, 0.5), {"device": DEVICE, "max_seq_len": 24, "max_batch": rows}
    fast = CudaDecoder(bundle, dtype=torch.float16, **settings)
    slow, exact = (TorchDecoder(bundle, dtype=dtype, **settings) for dtype in (torch.float16, torch.float64))

    def run(decoder):
        for slot in range(rows):
            decoder.prefill(slot, (PROMPT[: 9 - slot % 5] + slot) % 70, 4)
        return decoder.decode((torch.arange(rows) * 5 + 3) % 70)

    within_half_precision(fast, slow, exact, run)


def rounded(bundle: SimpleNamespace, weights: str, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """The same with its weights as a decoder of ``dtype`` holds them, widened."""

    def tensor(name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        stored = bundle.checkpoint.tensor(name, device)
        kind = WEIGHT_TYPES[weights].head if name == "lm_head.weight" else weights
        ends = "_proj", "_mqa", "_qkv", "_z", ".w1", ".w2", ".w3", "_linear"
        if not name.removesuffix(".weight").endswith((*ends, "lm_head")) or "kv_b_proj" in name:
            return stored
        experts = next((block.experts for block in bundle.config.blocks if block.experts), None)
        group = group_of(experts.intermediate_size) if "shared_experts.down" in name else None
        return round_weight(stored.to(dtype), kind, group).dequantise(torch.float32)

    return SimpleNamespace(config=bundle.config, checkpoint=SimpleNamespace(tensor=tensor), masks=bundle.masks)


def follow(fast: CudaDecoder, slow: TorchDecoder, sparse_from: int, rows: int = 1) -> None:
    """Greedy tokens and logits of a prompt in each row and of some steps: more of them where kernels are compiled. Codes
    are multiplied in float32, in which the plain decoder itself is off by up to 1.4e-6 (gemma4-moe in fp8)."""
    expected, found = (
        torch.stack([decoder.prefill(row, PROMPT[:5] + row, sparse_from).view(-1).clone() for row in range(rows)])
        for decoder in (slow, fast)
    )
    for _ in range(2 if DEVICE.type == "cpu" else 18):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
        tokens = expected.argmax(-1)
        assert torch.equal(found.argmax(-1), tokens)
        expected, found = slow.decode(tokens), fast.decode(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("weights", "rows", "family"),
    [
        *((weights, rows, "qwen2") for weights in ("int8", "int4", "fp8") for rows in (1, 2)),
        ("int8", 1, "qwen3.5-moe"), ("int4", 2, "lfm2"), ("fp8", 2, "olmoe"), ("int4", 2, "olmoe"),
        ("int8", 2, "gpt-oss"), ("fp8", 1, "gemma4-moe"), ("int4", 1, "muse-glimmer"),
        ("int8", 2, "granite-hybrid"), ("int8", 2, "glm4-moe-lite"), ("fp8", 1, "deepseek-v2"), ("int4", 1, "nemotron-h"), ("int8", 1, "nemotron-h-moe"), ("int4", 1, "deepseek-v2"),
    ],
)  # fmt: skip
def test_weights_rounded_at_load(weights: str, rows: int, family: str) -> None:
    """With an output layer of its own, and tied: then it is rounded and the embedding is not."""
    layers = {"num_hidden_layers": 1} if family in ("qwen2", "olmoe") else {}
    bundle = make_bundle(family, 0.5, tie_word_embeddings=rows == 2, **layers)
    settings = {"device": DEVICE, "max_seq_len": 24, "max_batch": rows}
    fast = CudaDecoder(bundle, dtype=torch.float32, weights=weights, **settings)
    slow = TorchDecoder(rounded(bundle, weights), dtype=torch.float64, **settings)
    if bundle.config.tie_word_embeddings:
        head = round_weight(bundle.checkpoint.tensor("model.embed_tokens.weight"), WEIGHT_TYPES[weights].head)
        slow._head = head.dequantise(torch.float32).to(DEVICE, torch.float64)
    follow(fast, slow, 0 if weights == "int4" else 3, rows)
    kinds = {linear.weight.quant for one in fast.weights.blocks for linear in one.linears}
    assert kinds == {weights}
    assert fast.weights.head.dtype is torch.int8


@pytest.mark.parametrize("scheme", ["awq", "fp8 blocks"] if DEVICE.type == "cpu" else PUBLISHED)
def test_a_bundles_own_codes_at_every_level(scheme: str, tmp_path: Path) -> None:
    """With zero points, sparse and then dense; with scales of groups of rows and channels."""
    plain = write_tiny_model(tmp_path / "plain", tiny_config(tie_word_embeddings=False, num_hidden_layers=1))
    source = quantise_model(plain, tmp_path / "source", *PUBLISHED[scheme]())
    bundle = Bundle.open(write_tiny_bundle(tmp_path / "bundle", source))
    settings = {"device": DEVICE, "max_seq_len": 24}
    fast, slow = both(bundle, **settings)
    assert fast.weights.blocks[0].qkv.weight.quant == bundle.checkpoint.matrix(QUERY).kind
    follow(fast, slow, 2)
    if scheme == "awq":
        for decoder in (fast, slow):
            decoder.set_masks(bundle.at(0.0).masks)
        follow(fast, slow, 2)


@pytest.mark.parametrize("hidden", [48, 64])
def test_short_pieces_of_codes(hidden: int) -> None:
    """More rows than one launch has, and biases; widened, or multiplied as codes where blocks of 64 channels fit."""
    bundle = make_bundle("qwen2", 0.5, num_hidden_layers=1, hidden_size=hidden, intermediate_size=2 * hidden)
    settings = {"device": DEVICE, "max_seq_len": 40, "max_batch": 2}
    fast = CudaDecoder(bundle, dtype=torch.float16, weights="int4", **settings)
    fast.prepare_prompts()
    same = rounded(bundle, "int4", torch.float16)
    slow, exact = (TorchDecoder(same, dtype=dtype, **settings) for dtype in (torch.float16, torch.float64))
    prompt = torch.arange(30) * 7 % 70

    def run(decoder: CudaDecoder | TorchDecoder) -> torch.Tensor:
        decoder.prefill(1, prompt, 30, stop=9)
        return decoder.prefill(1, prompt, 30, start=9)

    within_half_precision(fast, slow, exact, run)


@pytest.mark.parametrize(("weights", "sparsity"), [("int8", 0.0), ("int4", 0.5)])
def test_a_step_of_many_rows_of_codes(weights: str, sparsity: float) -> None:
    bundle = make_bundle("qwen2", sparsity, num_hidden_layers=1, hidden_size=64, intermediate_size=128)
    settings = {"device": DEVICE, "max_seq_len": 24, "max_batch": 17}
    fast = CudaDecoder(bundle, dtype=torch.float16, weights=weights, **settings)
    same = rounded(bundle, weights, torch.float16)
    unread = []
    slow, exact = (TorchDecoder(same, dtype=dtype, **settings) for dtype in (torch.float16, torch.float64))

    def run(decoder: CudaDecoder | TorchDecoder) -> torch.Tensor:
        for slot in range(17):
            decoder.prefill(slot, PROMPT[: 1 + slot % 3], 1 + slot % 3)
        decoder.measure_sparsity(True)
        logits = decoder.decode(torch.arange(17))
        unread.append(decoder.realised_sparsity())
        return logits

    within_half_precision(fast, slow, exact, run)
    assert max(unread) - min(unread) < 2e-3  # scores at a threshold, rounded otherwise
    assert [rows for _, rows, _ in fast._steps] == [32]
