"""The runtime computes what transformers computes: dense logits, and sparse ones under the same masks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bundle_maker import cpu_decoder, make_bundle, run
from family_cases import greedy, hugging_face
from hypothesis import given
from hypothesis import strategies as st
from runtime_models import FAMILIES, HYBRIDS, SMALL, VARIANTS, make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

import wisparse
from wisparse.converter.config import full_config
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.errors import ContextLengthError, UnsupportedModelError, UsageError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import PREFILL_POLICIES, sparse_from
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.onnx_export import export_onnx
from wisparse.runtime.torch.decoder import TorchDecoder
from wisparse.runtime.torch.mixers import apply_delta_rule


def torch_decoder(folder: Path, max_seq_len: int | None = None, max_batch: int = 1) -> TorchDecoder:
    bundle = Bundle.open(folder)
    length = max_seq_len or bundle.config.max_position_embeddings
    return cpu_decoder(bundle, "torch", max_seq_len=length, max_batch=max_batch)


def random_tokens(count: int, vocab_size: int = 101, seed: int = 0) -> Tensor:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def masked(folder: Path, bundle: Bundle, start: int) -> torch.nn.Module:
    """transformers' model with the bundle's masks on positions from ``start`` on, for inputs (1, T, K)."""
    model = hugging_face(folder)
    for name, mask in bundle.masks.items():

        def before(module: torch.nn.Module, args: tuple[Tensor], mask: ProjectionMask = mask) -> tuple[Tensor]:
            keep = keep_mask(args[0], mask.channel_scale, mask.threshold)
            keep[:, :start] = True
            return (torch.where(keep, args[0], 0.0),)

        if mask.sparsity > 0:
            model.get_submodule(name).register_forward_pre_hook(before)
    return model


@torch.inference_mode()
def greedy_by_transformers(folder: Path, tokens: Tensor, policy: str, count: int) -> list[int]:
    """Greedy continuation: the whole sequence anew for every token, so no cache of theirs is trusted."""
    model = masked(folder, Bundle.open(folder), sparse_from(policy, len(tokens)))
    ids = tokens.tolist()
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(tokens) :]


@pytest.mark.parametrize("variant", [*VARIANTS, *HYBRIDS, *SMALL])
def test_dense_logits_equal_transformers(variant: str, variant_bundle: Callable[[str], Path]) -> None:
    folder = variant_bundle(variant)
    tokens = random_tokens(48)
    decoder = torch_decoder(folder)
    model = hugging_face(folder)
    for length in (1, 20, 48):  # short and long side of LongRoPE's switch at 32, beyond every window
        with torch.inference_mode():
            expected = model(tokens[None, :length], use_cache=False).logits[0]
        found = decoder.logits(tokens[:length], length)
        assert expected.abs().max() > 1, "logits this small would hide any difference"
        assert (found - expected).abs().max() < 1e-4
        assert (decoder.prefill(0, tokens[:length], length) - expected[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("policy", PREFILL_POLICIES)
def test_longrope_switches_where_transformers_does(policy: str, variant_bundle: Callable[[str], Path]) -> None:
    folder = variant_bundle("phi3-long")
    tokens = random_tokens(27, seed=2)
    expected = greedy_by_transformers(folder, tokens, policy, 16)  # grows beyond 32
    request = run(Scheduler(torch_decoder(folder)), Request(tokens.tolist(), max_new_tokens=16, prefill=policy))
    assert request.output_token_ids == expected
    # The switch is seen: without it the tokens would differ, so this test can fail.
    assert greedy(torch_decoder(folder), tokens, 16, sparse_from(policy, len(tokens)))[0] != expected


def test_a_full_slot_takes_no_more(variant_bundle: Callable[[str], Path]) -> None:
    decoder = torch_decoder(variant_bundle("llama"), max_seq_len=12)
    decoder.prefill(0, random_tokens(11), 11)
    decoder.decode(torch.tensor([5]))
    with pytest.raises(ContextLengthError, match="slot 0 is full: it holds 12"):
        decoder.decode(torch.tensor([5]))
    decoder.decode(torch.tensor([-1]))
    decoder.prefill(0, random_tokens(12), 12)
    for count, error in ((0, UsageError), (13, ContextLengthError)):
        with pytest.raises(error, match="prompt has"):
            decoder.prefill(0, random_tokens(count), 0)


def test_realised_sparsity_counts_the_dropped_weights(variant_bundle: Callable[[str], Path]) -> None:
    folder = variant_bundle("phi3")
    tokens = random_tokens(30)
    bundle, decoder = Bundle.open(folder), torch_decoder(folder)
    model = masked(folder, bundle, 0)
    dropped = total = 0

    def count(module: torch.nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        nonlocal dropped, total
        dropped += int((args[0] == 0).sum()) * module.out_features
        total += args[0].numel() * module.out_features

    for projection in bundle.config.projections():
        model.get_submodule(projection.name).register_forward_hook(count)
    with torch.inference_mode():
        model(tokens[None], use_cache=False)
    assert decoder.realised_sparsity() is None
    decoder.measure_sparsity(True)
    assert decoder.realised_sparsity() is None  # nothing ran yet
    decoder.prefill(0, tokens, 0)
    assert decoder.realised_sparsity() == pytest.approx(dropped / total, abs=1e-4)
    assert 0.3 < dropped / total < 0.6
    decoder.measure_sparsity(False)
    assert decoder.realised_sparsity() is None


def test_a_block_with_wider_heads_than_the_kernels_keep_is_refused() -> None:
    pytest.importorskip("triton")
    from wisparse.runtime.cuda.decoder import CudaDecoder

    model_type, settings = FAMILIES["gemma4"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    values = {**settings, **sizes, "model_type": model_type, "vocab_size": 9, "max_position_embeddings": 64}
    for width, refused in ((512, None), (514, "expected head_dim of at most 512, found 514")):
        config = ModelConfig.from_dict(full_config(values | {"global_head_dim": width}))
        found = CudaDecoder.refusal(config, "native")
        assert found is refused if refused is None else str(found).endswith(refused)


def test_make_decoder_refuses_what_cannot_be(variant_bundle: Callable[[str], Path]) -> None:
    bundle = Bundle.open(variant_bundle("llama"))
    settings = {"device": torch.device("cpu"), "dtype": torch.float32, "max_seq_len": 16}
    for changes, message in (
        ({"max_seq_len": 257}, "max_seq_len: expected 1 to the model's context of 256"),
        ({"backend": "torch", "weights": "int8"}, "back end torch cannot run this model: it has no int8"),
        ({"backend": "cuda"}, "unknown back end 'cuda'; known ones: auto, torch, numba, triton"),
        ({"backend": "triton"}, "back end triton cannot run on cpu"),
    ):
        with pytest.raises(UsageError, match=message):
            make_decoder(bundle, **settings | changes)


def test_bfloat16_is_as_exact_as_transformers_bfloat16(example_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    bundle = Bundle.open(make_bundle(example_model, tmp_path / "bundle"))
    decoder = cpu_decoder(bundle, "torch", dtype=torch.bfloat16, max_seq_len=256)
    tokens = random_tokens(128, vocab_size=8192)
    theirs = AutoModelForCausalLM.from_pretrained(example_model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        exact = hugging_face(example_model)(tokens[None]).logits[0]
        their_error = (theirs(tokens[None]).logits[0].float() - exact).square().mean().sqrt()
    error = (decoder.logits(tokens, 128) - exact).square().mean().sqrt()
    assert error < 1.25 * their_error


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


def test_small_steps_of_mamba2_are_not_clamped(tmp_path: Path) -> None:
    """transformers clamps Nemotron-H's in a pass over many tokens, but not in decoding: a bundle's config.json turns it off."""
    source, tokens = make_checkpoint("nemotron-h", tmp_path / "source"), random_tokens(24)
    tensors = load_file(source / "model.safetensors")
    small = {name: tensor - 8 for name, tensor in tensors.items() if name.endswith("dt_bias")}
    save_file(tensors | small, source / "model.safetensors", {"format": "pt"})
    folder = make_bundle(source, tmp_path / "bundle")
    with torch.inference_mode():
        clamped, expected = (hugging_face(one)(tokens[None], use_cache=False).logits[0] for one in (source, folder))
    found = torch_decoder(folder).logits(tokens, len(tokens))
    assert (found - expected).abs().max() < 1e-4
    assert (found - clamped).abs().max() > 1e-2


@pytest.fixture(scope="module")
def hybrid(variant_bundle: Callable[[str], Path]) -> Path:
    return variant_bundle("qwen3.5")


def test_what_is_refused_of_recurrent_models(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        export_onnx(Bundle.open(hybrid), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for changes, words in (
        ({"layer_types": ["linear_attention", "mamba", "full_attention"]}, "layer_types: expected linear_attention or"),
        ({"linear_num_value_heads": 3}, "expected a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected 2 or more"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim: expected a positive integer"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            ModelConfig.from_dict({**Bundle.open(hybrid).config_dict, **changes})


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_state_serves_its_own_position_alone_and_is_read_in_parts(hybrid: Path, backend: str) -> None:
    model = wisparse.load(hybrid, device="cpu", dtype="float32", backend=backend)
    prompt = [5, 9, 14, 20, 33, 61, 8]
    alone = model.generate([*prompt, 40], max_new_tokens=8).token_ids
    model.generate(prompt, max_new_tokens=8)
    assert model.generate([*prompt, 40], max_new_tokens=8).token_ids == alone
    decoder, tokens = model.decoder, torch.tensor(prompt)
    whole = decoder.prefill(0, tokens, len(tokens)).clone()
    decoder.prefill(0, tokens, len(tokens), stop=4)
    torch.testing.assert_close(decoder.prefill(0, tokens, len(tokens), start=4), whole, rtol=1e-4, atol=1e-4)
