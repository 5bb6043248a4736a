"""The CPU decoder gives what the reference decoder gives, alone and in a batch, on any number of threads."""

import dataclasses
import json
import subprocess
import sys
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bundle_maker
import psutil
import pytest
import torch
from family_cases import PLAIN
from runtime_models import HYBRIDS, SMALL, featured
from torch import Tensor

from wisparse.converter.cpu_kernels import start_compiling
from wisparse.converter.settings import ConvertSettings
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.weight_types import group_of, round_weight
from wisparse.kernels.cpu import launch as cpu_team
from wisparse.kernels.cpu.layout import StoredAs
from wisparse.runtime.cpu import decoder as decoder_module
from wisparse.runtime.cpu import step as cpu_step
from wisparse.runtime.cpu.decoder import CpuDecoder
from wisparse.runtime.cpu.weights import CpuProjection, read_matrix
from wisparse.runtime.torch.decoder import TorchDecoder

# Every feature once: also biases, odd head sizes, other windows and rotary scalings, tied weights.
VARIANTS = ("llama-bias", "llama-head-dim", "qwen3", "phi3-window", "phi3-long", *PLAIN, *SMALL)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """For models this small more are slower; tests about threads set their own number."""
    torch.set_num_threads(1)


@pytest.fixture
def as_many_threads_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_step, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(cpu_step, "usable_cores", lambda: 8)
    monkeypatch.setattr(cpu_team, "_DEBT_NS", float("inf"))


@pytest.fixture
def opened(variant_bundle: Callable[[str], Path]) -> Callable[[str], Bundle]:
    return lambda name: Bundle.open(variant_bundle(name))


cpu_decoder = partial(bundle_maker.cpu_decoder, backend="numba", max_seq_len=100)
torch_decoder = partial(bundle_maker.cpu_decoder, backend="torch", max_seq_len=100)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 101, shape, generator=torch.Generator().manual_seed(seed))


def decode_all(decoder: CpuDecoder | TorchDecoder, prompts: list[Tensor], steps: Tensor) -> Tensor:
    """Prefill every slot, then feed ``steps`` (S, B); the logits (S, B, V)."""
    for slot, prompt in enumerate(prompts):
        decoder.prefill(slot, prompt, len(prompt))
    return torch.stack([decoder.decode(step).clone() for step in steps])


PROMPTS = [tokens(5, seed=1), tokens(28, seed=2), tokens(12, seed=3)]


def give_rounded(bundle: Bundle, decoder: CpuDecoder, twin: TorchDecoder, kind: str) -> None:
    """The weights that ``decoder`` has rounded at load, to the reference as numbers; they are those asked for."""
    mine, theirs = decoder._projections, twin._projections
    for projection, cpu, plain in zip(bundle.config.projections(), mine, theirs, strict=True):
        weight = bundle.checkpoint.tensor(f"{projection.name}.weight").float()
        plain.weight = round_weight(weight, kind).dequantise(torch.float32)
        assert cpu.weight.stored_as == StoredAs[kind.upper()]
        own = cpu.weight.linear(torch.eye(weight.shape[1]), None).T
        torch.testing.assert_close(own, plain.weight, atol=0, rtol=0 if kind == "int4" else 1e-6)
    assert decoder._head.stored_as == StoredAs.INT8
    twin._head = decoder._head.linear(torch.eye(bundle.config.hidden_size), None).T


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        *((variant, "native") for variant in VARIANTS),
        *(pytest.param(*one.values, kind, marks=one.marks) for one in featured(VARIANTS) for kind in ("int8", "int4")),
    ],
)
def test_decodes_dense_as_the_reference_does(opened: Callable[[str], Bundle], variant: str, weights: str) -> None:
    """Sparse where the step reads a short prompt, below, and in test_every_family.py."""
    # 25 steps cross the window, and for phi3-long the switch of the rotary factors.
    bundle, steps = opened(variant).at(0), tokens(25, 3)
    decoder, twin = cpu_decoder(bundle, max_batch=3, weights=weights), torch_decoder(bundle, max_batch=3)
    if weights != "native":
        give_rounded(bundle, decoder, twin, weights)
    wanted = decode_all(twin, PROMPTS, steps)
    # A recurrent head's output is divided by its size, whatever that is: the plain decoder's own float32 is ten times
    # as far from its float64 there as with attention alone.
    atol = 3e-3 if variant in HYBRIDS and weights != "native" else 3e-4
    torch.testing.assert_close(decode_all(decoder, PROMPTS, steps), wanted, atol=atol, rtol=1e-4)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)],  # to be compiled for it alone
)
@pytest.mark.parametrize("which", ["example", "gemma3"])
def test_16_bits_are_as_good(bundle: Path, opened: Callable[[str], Bundle], which: str, dtype: torch.dtype) -> None:
    """gemma3: norms by 1 + weight on both sides of each half, and an embedding's multiplier that no 16 bits hold."""
    model = (Bundle.open(bundle) if which == "example" else opened(which)).at(0)
    if which == "gemma3":
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, embedding_multiplier=7.77))
    steps, prompt = tokens(20, 1), tokens(16, seed=5)
    exact = decode_all(torch_decoder(model), [prompt], steps)
    mine = (decode_all(cpu_decoder(model, dtype=dtype), [prompt], steps) - exact).abs().mean()
    theirs = (decode_all(torch_decoder(model, dtype=dtype), [prompt], steps) - exact).abs().mean()
    assert 0 < mine < theirs


@pytest.mark.usefixtures("as_many_threads_as_asked_for")
@pytest.mark.parametrize(
    ("variant", "dtype", "weights"),
    [
        ("llama-bias", torch.float32, "native"),
        ("llama-bias", torch.bfloat16, "int8"),
        ("llama-bias", torch.bfloat16, "int4"),
        # Norms of whole vectors, of which every thread computes a part.
        ("gemma2", torch.float32, "native"),
        ("olmo2", torch.float32, "native"),
        # Two key heads for up to six threads, and states that a step moves on.
        ("qwen3.5", torch.bfloat16, "native"),
        ("lfm2-bias", torch.float32, "native"),
        ("granite-hybrid", torch.float32, "native"),
    ],
)
def test_bits_are_reproducible(opened: Callable[[str], Bundle], variant: str, dtype: torch.dtype, weights: str) -> None:
    bundle = opened(variant)
    steps = tokens(12, 3)
    results = []
    for threads, together in ((1, True), (2, True), (3, False), (6, True)):
        decoder = cpu_decoder(bundle, dtype=dtype, max_batch=3, weights=weights)
        torch.set_num_threads(1)  # the prefill is torch's, and its bits may depend on them
        for slot, prompt in enumerate(PROMPTS):
            decoder.prefill(slot, prompt, len(prompt))
        torch.set_num_threads(threads)
        rows = []
        for step in steps:
            if together:
                rows.append(decoder.decode(step).clone())
            else:  # a negative id is an idle row
                alone = [decoder.decode(torch.where(torch.arange(3) == slot, step, -1)).clone() for slot in range(3)]
                rows.append(torch.stack([alone[slot][slot] for slot in range(3)]))
        assert (decoder._step._team.size, decoder.lengths) == (threads, [len(prompt) + 12 for prompt in PROMPTS])
        results.append(torch.stack(rows))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.usefixtures("as_many_threads_as_asked_for")
@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
@pytest.mark.parametrize("variant", ["llama-bias", "phi3-long", "gemma2", "qwen3.5", "lfm2", "granite-hybrid"])
def test_a_short_prompt_is_read_by_the_step(
    opened: Callable[[str], Bundle], variant: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a product of torch's, and as torch reads it: dense, half sparse, and behind what stands there."""
    torch.set_num_threads(2)
    decoder, prompt = cpu_decoder(opened(variant), weights=weights), tokens(16, seed=7)
    found = []
    for rows in (0, 16):
        monkeypatch.setattr(decoder, "_step_rows", rows)
        if rows:
            monkeypatch.setattr(CpuProjection, "product", None)
        for sparse_from, stop in ((16, 16), (8, 16), (0, 6)):
            decoder.measure_sparsity(True)
            found.append([decoder.prefill(0, prompt, sparse_from, stop=stop), decoder.realised_sparsity()])
            if stop < 16:
                found[-1][0] = decoder.prefill(0, prompt, sparse_from, start=stop)
    for theirs, mine in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(mine[0], theirs[0], atol=3e-3, rtol=1e-3)
        assert (mine[1] or 0) == pytest.approx(theirs[1] or 0, abs=0.02)


def test_16_bits_take_about_as_long_as_float32(bundle: Path) -> None:
    model, prompt, prompts, steps = Bundle.open(bundle), tokens(64), [], []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = cpu_decoder(model, dtype=dtype)
        prompts.append(min(timeit.repeat(partial(decoder.prefill, 0, prompt, len(prompt)), number=1, repeat=5)))
        steps.append(min(timeit.repeat(partial(decoder.decode, torch.tensor([5])), number=1, repeat=30)))
    assert prompts[1] < 4 * prompts[0]  # 50 to 80 times where torch has a slow product
    assert steps[1] < 1.5 * steps[0]  # which compute in float32 whatever the type: nobody has to ask for the fast one


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_codes_refuse_infinity(opened: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    bundle = opened("llama-bias")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = bundle.checkpoint.tensor(name)
    weight[7, 3] = float("inf")  # what a larger weight becomes in float16
    monkeypatch.setattr(type(bundle.checkpoint), "chunks", lambda *_: iter([weight.flatten()]))
    with pytest.raises(BundleError, match="row 7"):
        read_matrix(bundle, name, torch.float32, weights, transposed=True)


def test_int4_refuses_channels_without_a_group(opened: Callable[[str], Bundle]) -> None:
    assert [group_of(k) for k in (4096, 320, 96, 24, 11008, 8960)] == [128, 80, 96, 24, 128, 128]
    checkpoint = opened("llama-bias").checkpoint
    name = "model.layers.0.mlp.up_proj.weight"
    odd = {**checkpoint.tensors, name: dataclasses.replace(checkpoint.tensors[name], shape=(64, 131))}
    bundle = dataclasses.replace(opened("llama-bias"), checkpoint=dataclasses.replace(checkpoint, tensors=odd))
    with pytest.raises(UsageError, match=r"up_proj.weight: 131 channels cannot be cut .* load it with weights int8"):
        read_matrix(bundle, name, torch.float32, "int4", transposed=True)


@pytest.mark.usefixtures("as_many_threads_as_asked_for")
def test_counts_what_the_reference_counts(opened: Callable[[str], Bundle]) -> None:
    decoders = [make(opened("qwen3"), max_batch=3) for make in (cpu_decoder, torch_decoder)]
    assert decoders[0].realised_sparsity() is None
    for decoder in decoders:
        decoder.measure_sparsity(True)
        decoder.prefill(0, PROMPTS[0], 2)
        decode_all(decoder, PROMPTS, tokens(6, 3))
    mine, wanted = (decoder.realised_sparsity() for decoder in decoders)
    assert mine == pytest.approx(wanted, abs=2e-3)
    torch.set_num_threads(3)  # a larger team keeps what was counted
    decoders[0].decode(tokens(3))
    assert decoders[0].realised_sparsity() == pytest.approx(wanted, abs=2e-2)
    counted = []
    for threads in (3, 2, 1):  # and a smaller one counts the same: the same tokens again
        torch.set_num_threads(threads)
        decoders[0]._cache.lengths[:] = [length - 1 for length in decoders[0].lengths]
        before = torch.tensor(decoders[0]._step.kept())
        decoders[0].decode(tokens(3))
        counted.append((torch.tensor(decoders[0]._step.kept()) - before).tolist())
    assert counted[0] == counted[1] == counted[2]
    decoders[0].measure_sparsity(False)
    assert decoders[0].realised_sparsity() is None


def test_prompts_leak_nothing(opened: Callable[[str], Bundle]) -> None:
    decoder = cpu_decoder(opened("qwen3"), max_batch=2)

    def prompts(count: int) -> int:
        for index in range(count):
            decoder.prefill(index % 2, tokens(3 + index % 7), 0)
            decoder.decode(tokens(2, seed=index))
        return psutil.Process().memory_info().rss

    before = prompts(100)
    assert prompts(500) - before < 1 << 20
    decoder.close()
    decoder.close()


@pytest.mark.slow
def test_a_model_is_never_in_memory_twice(tmp_path: Path) -> None:
    script = """
import json, resource, sys, torch
from wisparse.formats.bundle import Bundle
from wisparse.runtime.backends import make_decoder
bundle, (backend, weights) = Bundle.open(sys.argv[1]), sys.argv[2:]
settings = dict(device=torch.device("cpu"), dtype=torch.float32, max_seq_len=8)
from wisparse.kernels.cpu.launch import prepare
prepare("step_float32", "dequantize_float32")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decoder = make_decoder(bundle, backend=backend, weights=weights, **settings)
decoder.prefill(0, torch.tensor([5, 6]), 2)
decoder.decode(torch.tensor([7]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([(after - before) * 1024, sum(info.nbytes for info in bundle.checkpoint.tensors.values())]))
"""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 101}
    config = AutoConfig.for_model("llama", num_attention_heads=8, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    bundle = bundle_maker.make_bundle(tmp_path / "source", tmp_path / "bundle")
    cases = ("torch", "native", 1.0), ("numba", "native", 1.0), ("numba", "int4", 0.14)
    for backend, weights, share in cases:
        command = [sys.executable, "-c", script, bundle, backend, weights]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        grown, size = json.loads(done.stdout)
        assert size > 130e6
        # Beside the weights: pieces in flight.
        assert grown < share * size + 60e6


@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
def test_a_conversion_compiles_what_its_bundle_runs(
    weights: str, variant_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[str] = []
    needed: list[str] = []
    monkeypatch.setattr(cpu_team, "start_compiling", lambda names: ahead.extend(names) or [])
    monkeypatch.setattr(decoder_module, "prepare", lambda *names: needed.extend(names))
    bundle = Bundle.open(variant_bundle("llama"))
    start_compiling(ConvertSettings(str(bundle.folder), weights=weights), bundle.checkpoint)
    CpuDecoder(bundle, device=torch.device("cpu"), dtype=bundle.checkpoint.dtype, max_seq_len=16, weights=weights)
    assert needed
    assert set(needed) == set(ahead)
