"""The decoder with weights in codes against the plain one with the same rounded weights. Run by test_kernels_triton.py
in a process of its own.

    TRITON_INTERPRET=1 python -m pytest tests/triton_weights_cases.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantised_models import PUBLISHED, quantise_model
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model
from triton_decoder_cases import DEVICE, make_bundle

from wisparse.formats.bundle import Bundle
from wisparse.formats.weight_types import WEIGHT_TYPES, round_weight
from wisparse.kernels.reference import keep_mask, scores
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.torch import block
from wisparse.runtime.torch.decoder import TorchDecoder

PROMPT = torch.arange(5) * 7 % 70


def rounded(bundle: SimpleNamespace, weights: str, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """The same with its weights as a decoder of ``dtype`` holds them, widened."""

    def tensor(name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        stored = bundle.checkpoint.tensor(name, device)
        kind = WEIGHT_TYPES[weights].head if name == "lm_head.weight" else weights
        if not name.endswith("_proj.weight") and name != "lm_head.weight":
            return stored
        return round_weight(stored.to(dtype), kind).dequantise(torch.float32)

    return SimpleNamespace(config=bundle.config, checkpoint=SimpleNamespace(tensor=tensor), masks=bundle.masks)


def follow(fast: CudaDecoder, slow: TorchDecoder, sparse_from: int) -> None:
    """Greedy tokens and logits of a prompt and two steps."""
    expected, found = slow.prefill(0, PROMPT, sparse_from), fast.prefill(0, PROMPT, sparse_from)
    for _ in range(2):
        torch.testing.assert_close(found.view(-1), expected.view(-1), rtol=1e-5, atol=1e-6)
        token = expected.view(-1).argmax().view(1)
        assert int(found.view(-1).argmax()) == int(token)
        expected, found = slow.decode(token), fast.decode(token)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_weights_rounded_at_load(weights: str) -> None:
    bundle = make_bundle("qwen2", 0.5, num_hidden_layers=1)
    settings = {"device": DEVICE, "max_seq_len": 24}
    fast = CudaDecoder(bundle, dtype=torch.float32, weights=weights, **settings)
    follow(fast, TorchDecoder(rounded(bundle, weights), dtype=torch.float64, **settings), 0 if weights == "int4" else 3)
    kinds = {linear.weight.quant for one in fast.weights.blocks for linear in one.linears}
    assert kinds == {weights}
    assert fast.weights.head.dtype is torch.int8


@pytest.mark.parametrize("scheme", ["awq", "fp8 blocks"])
def test_a_bundles_own_codes_at_every_level(scheme: str, tmp_path: Path) -> None:
    """With zero points, sparse and then dense; with scales of groups of rows and channels."""
    plain = write_tiny_model(tmp_path / "plain", tiny_config(tie_word_embeddings=False, num_hidden_layers=1))
    source = quantise_model(plain, tmp_path / "source", *PUBLISHED[scheme]())
    bundle = Bundle.open(write_tiny_bundle(tmp_path / "bundle", source))
    settings = {"device": DEVICE, "max_seq_len": 24}
    fast = CudaDecoder(bundle, dtype=torch.float32, **settings)
    slow = TorchDecoder(bundle, dtype=torch.float64, **settings)
    assert fast.weights.blocks[0].qkv.weight.quant == scheme.split()[0].replace("awq", "int4")
    follow(fast, slow, 2)
    if scheme == "awq":
        for decoder in (fast, slow):
            decoder.set_masks(bundle.at(0.0).masks)
        follow(fast, slow, 2)


def clear_of_scores(bundle: SimpleNamespace, run: Callable[[TorchDecoder], object], **settings: Any) -> None:
    """Move each threshold to the middle of the widest gap near it between the scores that ``run`` meets in one block, so
    that no rounding of half precision decides about a channel. In order, as a mask changes what projections behind it
    see."""
    projections = list(bundle.config.projections(0))
    for index, projection in enumerate(projections):
        met: list[torch.Tensor] = []  # of one projection after the other

        def keep(x: torch.Tensor, scale: torch.Tensor, threshold: float, met: list[torch.Tensor] = met) -> torch.Tensor:
            met.append(scores(x, scale))
            return keep_mask(x, scale, threshold)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block, "keep_mask", keep)
            run(TorchDecoder(bundle, dtype=torch.float64, **settings))
        mask = bundle.masks[projection.name]
        near = torch.cat(met[index :: len(projections)]).flatten().sort().values
        near = near[(near > 0.7 * mask.threshold) & (near < 1.4 * mask.threshold)]
        widest = int((near[1:] / near[:-1]).argmax())
        assert near[widest + 1] > 1.01 * near[widest]  # twenty half-precision roundings
        bundle.masks[projection.name] = replace(mask, threshold=float(near[widest] + near[widest + 1]) / 2)


def test_many_rows_in_half_precision() -> None:
    """The tensor cores' kernel: no further from the exact result than plain half precision is."""
    bundle = make_bundle("qwen2", 0.5, num_hidden_layers=1)
    settings = {"device": DEVICE, "max_seq_len": 12, "max_batch": 4}
    tokens = torch.arange(4) * 5 + 3

    def run(decoder: CudaDecoder | TorchDecoder) -> torch.Tensor:
        for slot in range(4):
            prompt = PROMPT[: 5 - slot] + slot
            decoder.prefill(slot, prompt, len(prompt))
        return decoder.decode(tokens)

    clear_of_scores(rounded(bundle, "int4", torch.float16), run, **settings)
    fast = CudaDecoder(bundle, dtype=torch.float16, weights="int4", **settings)
    same = rounded(bundle, "int4", torch.float16)
    slow, exact = (TorchDecoder(same, dtype=dtype, **settings) for dtype in (torch.float16, torch.float64))
    expected = run(exact)
    own, error = ((run(decoder) - expected).norm(dim=1) / expected.norm(dim=1) for decoder in (slow, fast))
    assert (error < 3 * own.max()).all(), (error, own)


def test_short_pieces_of_codes() -> None:
    """More rows than one launch has, and biases."""
    weights = "int4"
    bundle = make_bundle("qwen2", 0.5, num_hidden_layers=1)
    settings = {"device": DEVICE, "max_seq_len": 40, "max_batch": 2}
    fast = CudaDecoder(bundle, dtype=torch.float16, weights=weights, **settings)
    fast.prepare_prompts()
    same = rounded(bundle, weights, torch.float16)
    slow, exact = (TorchDecoder(same, dtype=dtype, **settings) for dtype in (torch.float16, torch.float64))
    prompt = torch.arange(30) * 7 % 70
    for decoder in (fast, slow, exact):
        decoder.prefill(1, prompt, 30, stop=9)
    found, own, expected = (decoder.prefill(1, prompt, 30, start=9) for decoder in (fast, slow, exact))
    assert (found - expected).norm() < 3 * (own - expected).norm()
