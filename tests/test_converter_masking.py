"""Masks on a model's projections, and inside transformers: our runtime's tokens, and nothing broken in what it does."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import make_bundle
from family_cases import runtime_tokens
from runtime_models import HYBRIDS, SMALL, VARIANTS, featured, make_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import wisparse
from wisparse.converter.masking import MaskedModel, desparsify, sparsify
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import BundleError, UnsupportedModelError, UsageError
from wisparse.formats.weight_types import sparse_from
from wisparse.kernels.reference import keep_mask

PROMPT = "def fibonacci(n):\n"


def load(folder: Path, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


def generate(model: Any, prompts: list[list[int]], count: int, **kwargs: Any) -> list[list[int]]:
    """Greedy tokens of transformers, prompts padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    kwargs |= {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, attention_mask=mask, pad_token_id=0, **kwargs)[:, longest:].tolist()


# ``half`` has what the other two have: positions of a prompt that are masked, and some that are not.
@pytest.mark.parametrize(
    ("variant", "policy"),
    [
        *(pytest.param(*one.values, "half", marks=one.marks) for one in featured((*VARIANTS, *HYBRIDS, *SMALL))),
        *((variant, policy) for variant in ("llama", "phi3-long", "gemma2", "qwen3.5") for policy in ("dense", "all")),
    ],
)
def test_tokens_are_our_runtimes(variant: str, policy: str, variant_bundle: Callable[[str], Path]) -> None:
    tiny = variant_bundle(variant)
    model = sparsify(load(tiny), tiny, prefill=policy)
    prompts = [[5, 17, 60, 4, 33, 8, 90, 21, 7, 12, 54], [44, 3, 71, 18], [9]]
    expected = [runtime_tokens(tiny, prompt, 16, sparse_from(policy, len(prompt))) for prompt in prompts]
    assert [generate(model, [prompt], 16)[0] for prompt in prompts] == expected
    # transformers lets the bias of in_proj into the convolution at padding.
    if variant not in ("lfm2-bias", "granite-hybrid", "nemotron-h"):
        assert generate(model, prompts, 16) == expected  # left-padded, in one batch
    if policy == "all":
        tokens = torch.arange(3, 20)[None]
        assert (load(tiny)(tokens).logits - model(tokens).logits).abs().max() > 0.1, "the masks change something"


@pytest.mark.parametrize("policy", ["dense", "half", "all"])
def test_every_level(policy: str, tmp_path: Path) -> None:
    folder = make_bundle(make_checkpoint("qwen2", tmp_path / "source"), tmp_path / "bundle", 0.3, 0.5)
    model = load(folder)
    prompts = [[5, 17, 60, 4, 33, 8, 90, 21, 7, 12, 54], [44, 3, 71, 18]]
    for sparsity in (0.5, 0.3, 0.0):
        sparsify(model, folder, sparsity=sparsity, prefill=policy)
        starts = [sparse_from(policy, len(prompt)) for prompt in prompts]
        expected = [runtime_tokens(folder, p, 12, start, sparsity) for p, start in zip(prompts, starts, strict=True)]
        assert generate(model, prompts, 12) == expected
    words = r"one of the bundle's sparsity levels, 0\.3, 0\.5, or 0 for the dense model, found 0\.4"
    with pytest.raises(UsageError, match=words):
        sparsify(model, folder, sparsity=0.4)


# flex_attention works too; compiling it here takes a minute.
@pytest.mark.parametrize(
    ("attention", "options"),
    [("eager", {}), ("sdpa", {}), ("sdpa", {"cache_implementation": "static", "disable_compile": True})],
)
def test_any_attention_implementation_and_cache(bundle: Path, attention: str, options: dict[str, Any]) -> None:
    prompt = AutoTokenizer.from_pretrained(bundle)(PROMPT).input_ids
    model = sparsify(load(bundle, attn_implementation=attention), bundle)
    assert generate(model, [prompt], 12, **options)[0] == runtime_tokens(bundle, prompt, 12, len(prompt))


def test_device_map_with_offloading(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="device maps need accelerate")
    config = Bundle.open(bundle).config
    places = {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(config.num_blocks)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = load(bundle, device_map=places, offload_folder=tmp_path)
    sparsify(model, bundle)
    prompt = AutoTokenizer.from_pretrained(bundle)(PROMPT).input_ids
    assert generate(model, [prompt], 6)[0] == runtime_tokens(bundle, prompt, 6, len(prompt))


def test_moving_to_bf16_keeps_the_scales(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    model = sparsify(load(bundle), bundle, prefill="all").to(torch.bfloat16)
    name, mask = next((n, m) for n, m in opened.masks.items() if m.sparsity > 0)
    seen = []
    for first in (True, False):  # one hook before ours, one after
        hook = model.get_submodule(name).register_forward_pre_hook
        hook(lambda m, args: seen.append(args[0].clone()), prepend=first)
    model(torch.arange(3, 40)[None])
    x, masked = seen
    assert x.dtype is torch.bfloat16
    kept = keep_mask(x, mask.channel_scale, mask.threshold)
    rounded = keep_mask(x, mask.channel_scale.bfloat16().float(), mask.threshold)
    assert not torch.equal(kept, rounded)  # so the next line would notice a cast scale
    kept[:, 0] = True  # the first position is never masked
    assert torch.equal(masked, torch.where(kept, x, torch.zeros_like(x)))


@pytest.mark.parametrize("options", [None, {"quantization_config": wisparse.WisparseConfig()}])
def test_a_saved_model_is_a_dense_checkpoint(options: dict[str, Any] | None, bundle: Path, tmp_path: Path) -> None:
    model = sparsify(load(bundle), bundle) if options is None else load(bundle, **options)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not {"wisparse", "quantization_config"} & config.keys()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    original = load(bundle).state_dict()
    assert set(saved) <= set(original)
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again(torch.arange(9)[None]).logits, load(bundle)(torch.arange(9)[None]).logits)


def test_masks_are_replaced_and_taken_off(bundle: Path) -> None:
    model, tokens = load(bundle), torch.arange(3, 30)[None]
    dense = model(tokens).logits
    once = sparsify(model, bundle, prefill="all")(tokens).logits
    twice = sparsify(model, bundle, prefill="all")(tokens).logits
    assert torch.equal(once, twice)
    assert not torch.equal(once, dense)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(tokens).logits, once)
    assert torch.equal(desparsify(model)(tokens).logits, dense)
    assert torch.equal(desparsify(model)(tokens).logits, dense)


def test_wrong_models_and_bundles_are_refused(bundle: Path, tmp_path: Path) -> None:
    other = make_bundle(make_checkpoint("qwen2", tmp_path / "q"), tmp_path / "qb")
    tiny = make_checkpoint("llama", tmp_path / "l")
    changed = load(bundle)
    changed.model.layers[2].mlp.up_proj = torch.nn.Identity()
    rotated = load(bundle)  # as the source of a rotated bundle, whose masks are of other channels
    for module in rotated.model.layers[0].modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.flip(1)
    for model, folder, error, words in (
        (load(other), bundle, UnsupportedModelError, "for a llama model, found 'qwen2'"),
        (load(tiny), bundle, UnsupportedModelError, "expected a projection of that name"),  # fewer blocks
        (load(bundle), make_bundle(tiny, tmp_path / "lb"), UnsupportedModelError, "channels"),  # other width
        (torch.nn.Linear(2, 2), bundle, UsageError, "expected a transformers causal LM"),
        (changed, bundle, UnsupportedModelError, r"layers\.2\.mlp\.up_proj"),
        (rotated, bundle, UnsupportedModelError, r"layers\.0\.self_attn\.q_proj: expected the bundle's own weights"),
    ):
        with pytest.raises(error, match=words):
            sparsify(model, folder)
    with pytest.raises(UsageError, match="prefill: expected one of dense, half, all"):
        sparsify(load(bundle), bundle, prefill="some")
    # A missing entry is an error.
    broken = shutil.copytree(bundle, tmp_path / "broken")
    (broken / "wisparse.safetensors").unlink()
    with pytest.raises(BundleError):
        sparsify(load(broken), broken)
    with pytest.raises(BundleError):
        load(broken, quantization_config=wisparse.WisparseConfig())


def test_from_pretrained_with_our_config(bundle: Path) -> None:
    model = load(bundle, quantization_config=wisparse.WisparseConfig(prefill="half"))
    tokens = torch.arange(3, 30)[None]
    assert torch.equal(model(tokens).logits, sparsify(load(bundle), bundle, prefill="half")(tokens).logits)
    assert not torch.equal(model(tokens).logits, load(bundle)(tokens).logits)
    for wrong, words in (
        ({"prefill": "some"}, "prefill: expected one of"),
        ({"sparsity": 7}, "sparsity: expected a sparsity level of the bundle, or 0, found 7"),
        ({"bits": 3.5}, "wisparse.load(..., bits=...) reads fewer bits of graded weights"),
        ({"sparsitiy": 0.5}, "WisparseConfig: unknown argument 'sparsitiy'; did you mean sparsity?"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            wisparse.WisparseConfig(**wrong)
    assert torch.isfinite(model.half().float()(tokens).logits).all()
    # Our config takes a level.
    tokens, config = torch.arange(3, 30)[None], wisparse.WisparseConfig("all", sparsity=0)
    again = wisparse.WisparseConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert torch.equal(load(bundle, quantization_config=again)(tokens).logits, load(bundle)(tokens).logits)
    with pytest.raises(UsageError, match="sparsity: expected one of the bundle's sparsity levels"):
        load(bundle, quantization_config=wisparse.WisparseConfig(sparsity=0.123))


def test_clear_close_and_an_error_within_leave_the_dense_model() -> None:
    linear = torch.nn.Linear(16, 8).requires_grad_(False)
    masked = MaskedModel({"p": linear})
    masked.set_scale("p", torch.ones(16))
    x = torch.randn(1, 4, 16)
    dense = linear(x)
    for threshold in (0.0, None):
        masked.set_threshold("p", 9.0)
        assert not torch.equal(linear(x), dense)
        masked.set_threshold("p", threshold)
        assert torch.equal(linear(x), dense)
    spared = torch.tensor([[True, False, False, False]])
    with pytest.raises(ZeroDivisionError), masked.masking({"p": 99.0}), masked.during(dense_tokens=spared):
        raise ZeroDivisionError
    assert torch.equal(linear(x), dense)
    with masked.masking({"p": 99.0}):
        torch.testing.assert_close(linear(x), linear.bias.expand(1, 4, 8))
    masked.set_threshold("p", 9.0)
    masked.close()
    assert torch.equal(linear(x), dense)


def test_no_policy_masks_the_first_position() -> None:
    for length in range(4):
        starts = {policy: sparse_from(policy, length) for policy in ("dense", "half", "all")}
        assert starts == {"dense": length, "half": (length + 1) // 2, "all": min(1, length)}
