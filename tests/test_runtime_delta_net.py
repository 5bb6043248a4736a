"""The recurrent half of a hybrid's blocks: chunks give what positions give, and what is not built is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle
from family_cases import COUNT, generate, greedy, hugging_face
from hypothesis import given
from hypothesis import strategies as st
from runtime_models import make_checkpoint

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.model_config import ModelConfig
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.onnx_export import export_onnx
from wisparse.runtime.torch.delta_net import apply_delta_rule


def by_positions(q, k, v, log_decay, beta, state):
    """The definition: forget, compare with what the key recalls, take in the difference, read."""
    state, outputs = state.clone(), []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t, None, None].exp()
        recalled = torch.einsum("hkv,hk->hv", state, k[:, t])
        state = state + torch.einsum("hk,hv->hkv", k[:, t], beta[:, t, None] * (v[:, t] - recalled))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[:, t]))
    return torch.stack(outputs, 1), state


@given(st.integers(1, 3), st.integers(1, 150), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_chunks_give_what_positions_give(heads: int, length: int, key_dim: int, value_dim: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(heads, length, key_dim, generator=make, dtype=torch.float64) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(heads, length, value_dim, generator=make, dtype=torch.float64)
    # From heads that forget at once to heads that keep all.
    log_decay = -torch.rand(heads, length, generator=make, dtype=torch.float64) * 10.0 ** (seed % 7 - 4)
    beta = torch.rand(heads, length, generator=make, dtype=torch.float64)
    state = torch.randn(heads, key_dim, value_dim, generator=make, dtype=torch.float64)
    expected, last = by_positions(q, k, v, log_decay, beta, state)
    found = apply_delta_rule(q, k, v, log_decay, beta, state)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    return make_bundle(make_checkpoint("qwen3.5", folder / "source"), folder / "bundle")


BACKENDS = ("torch", "numba")


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_and_logits_are_those_of_transformers(hybrid: Path, backend: str) -> None:
    tokens = torch.randint(3, 101, (24,), generator=torch.Generator().manual_seed(1))
    theirs = hugging_face(hybrid)
    with torch.inference_mode():
        expected = theirs(tokens[None], use_cache=False).logits[0]
    model = wisparse.load(hybrid, device="cpu", dtype="float32", backend=backend)
    assert expected.abs().max() > 1
    assert (model.decoder.logits(tokens, len(tokens)) - expected).abs().max() < 1e-4
    sparse, _ = generate(wisparse.sparsify(theirs, hybrid), tokens)
    assert greedy(model.decoder, tokens, COUNT)[0] == sparse


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_used_again_remembers_nothing(hybrid: Path, backend: str) -> None:
    model = wisparse.load(hybrid, device="cpu", dtype="float32", backend=backend)
    first = model.generate([5, 9, 14], max_new_tokens=12)
    model.generate([70, 2, 33, 33, 8], max_new_tokens=9)
    assert model.generate([5, 9, 14], max_new_tokens=12).token_ids == first.token_ids


def test_slots_join_and_leave_while_others_are_decoded(hybrid: Path) -> None:
    """Each sequence's logits are what they are alone, whoever is idle, joins or starts anew beside it."""
    bundle, found = Bundle.open(hybrid), {}
    for backend in BACKENDS:
        decoder = make_decoder(
            bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=40, backend=backend, max_batch=3
        )
        rows = []
        for slot in (2, 0):
            decoder.prefill(slot, torch.tensor([5, 9, 14, 20 + slot]), 4)
        for step in ([7, -1, 8], [7, -1, -1], [-1, -1, 9]):
            logits = decoder.decode(torch.tensor(step))
            rows += [logits[slot].clone() for slot in range(3) if step[slot] >= 0]
        decoder.prefill(1, torch.tensor([33, 4]), 2)
        decoder.copy(2, 0, 6)
        rows += [row.clone() for row in decoder.decode(torch.tensor([3, 4, 3]))]
        assert torch.equal(rows[-1], rows[-3]), "a copy goes on as what it was made of"
        decoder.prefill(0, torch.tensor([5, 9, 14, 20]), 4)
        assert torch.equal(decoder.decode(torch.tensor([7]))[0], rows[0]), "nothing is left of before"
        found[backend] = torch.stack(rows)
    torch.testing.assert_close(found["numba"], found["torch"], rtol=1e-4, atol=3e-4)


def test_no_export_without_recurrent_blocks(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        export_onnx(Bundle.open(hybrid), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention", "mamba", "full_attention"]}, "layer_types: expected linear_attention or"),
        ({"linear_num_value_heads": 3}, "not a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected 2 or more"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim: expected a positive integer"),
    ],
)
def test_nonsense_is_refused(hybrid: Path, changes: dict, words: str) -> None:
    config = dict(Bundle.open(hybrid).config_dict)
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.from_dict({**config, **changes})


def test_which_blocks_are_recurrent(hybrid: Path) -> None:
    config = dict(Bundle.open(hybrid).config_dict)
    assert [block.recurrent for block in ModelConfig.from_dict(config).blocks] == [True, False, True]
    full = ModelConfig.from_dict({**config, "layer_types": ["full_attention"] * 3})
    assert full.delta_net is None, "a model without recurrent blocks needs none of what they need"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_that_begins_like_another_is_read_anew(hybrid: Path, backend: str) -> None:
    model = wisparse.load(hybrid, device="cpu", dtype="float32", backend=backend)
    prompt = [5, 9, 14, 20, 33, 61, 8]
    alone = model.generate([*prompt, 40], max_new_tokens=8).token_ids
    model.generate(prompt, max_new_tokens=8)
    assert model.generate([*prompt, 40], max_new_tokens=8).token_ids == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_is_not_taken_for_that_of_another_position(hybrid: Path, backend: str) -> None:
    decoder = wisparse.load(hybrid, device="cpu", dtype="float32", backend=backend).decoder
    tokens = torch.tensor([5, 9, 14, 20, 33, 61, 8])
    whole = decoder.prefill(0, tokens, len(tokens)).clone()
    decoder.prefill(0, tokens, len(tokens), stop=4)
    torch.testing.assert_close(decoder.prefill(0, tokens, len(tokens), start=4), whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="recurrent blocks"):
        decoder.prefill(0, tokens, len(tokens), start=4)
