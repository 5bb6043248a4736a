"""Mixtures of experts: files, refusals, statistics and quantised weights. Families are in test_every_family.py."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import cpu_decoder
from family_cases import greedy, hugging_face
from packaging.version import Version
from runtime_models import EXPERTS, make_checkpoint
from safetensors.torch import load_file, save_file
from test_converter_preflight import give_room
from tiny_bundle import VOCAB, byte_tokenizer

import wisparse
from wisparse.converter.api import convert
from wisparse.converter.config import full_config
from wisparse.converter.masking import MaskedModel
from wisparse.converter.planes import read_in_planes
from wisparse.converter.sensitivity import drawn_to_pool
from wisparse.converter.source import load_source
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, ResourceError, UnsupportedModelError
from wisparse.formats.weight_types import round_weight
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.onnx_export import export_onnx
from wisparse.runtime.torch.block import LINEARS, Block, read_spec, route

# Families whose routers keep float32 weights in a model of another dtype.
FLOAT32_ROUTERS = ("deepseek-v2", "deepseek-v3", "dots1", "glm4-moe-lite", "nemotron-h-moe")
PROMPT = torch.randint(3, VOCAB, (20,), generator=torch.Generator().manual_seed(5))

pytestmark = pytest.mark.usefixtures("quick_conversion")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("qwen3-moe", tmp_path_factory.mktemp("source"), vocab_size=VOCAB)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def changed(source: Path, out: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """The source with another config or other tensors."""
    out.mkdir()
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def fuse(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """All experts of a block in one tensor, as transformers has them in memory."""
    for block in (0, 2):
        prefix = f"model.layers.{block}.mlp.experts."
        parts = {
            role: torch.stack([tensors.pop(f"{prefix}{expert}.{role}.weight") for expert in range(6)])
            for role in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[prefix + "gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
        tensors[prefix + "down_proj"] = parts["down_proj"]


def test_experts_in_one_tensor_are_read_one_by_one(source: Path, tmp_path: Path) -> None:
    apart = Checkpoint.open(source, complete=full_config)
    fused = Checkpoint.open(changed(source, tmp_path / "fused", fuse), complete=full_config)
    assert list(fused.tensors) == list(apart.tensors)
    for name in apart.tensors:
        assert torch.equal(fused.tensor(name), apart.tensor(name)), name
        assert torch.equal(torch.cat(list(fused.chunks(name))), apart.tensor(name).flatten()), name


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("glm4-moe", "num_nextn_predict_layers"),
        ("glm4-moe", "num_mtp_layers"),
        ("deepseek-v3", "num_nextn_predict_layers"),
        ("glm4-moe-lite", "num_nextn_predict_layers"),
    ],
)
def test_an_mtp_block_behind_the_last_one_is_left_out_with_a_note(family: str, key: str, tmp_path: Path) -> None:
    def add(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for other in ("num_nextn_predict_layers", "num_mtp_layers"):
            config.pop(other, None)
        config[key] = 1
        block = {name: one for name, one in tensors.items() if name.startswith("model.layers.2.")}
        tensors |= {name.replace(".2.", ".3.", 1): one.clone() for name, one in block.items()}
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)

    plain = make_checkpoint(family, tmp_path / "plain", vocab_size=VOCAB)
    with_head = Checkpoint.open(changed(plain, tmp_path / "with", add), complete=full_config)
    assert list(with_head.tensors) == list(Checkpoint.open(plain, complete=full_config).tensors)
    (note,) = with_head.notes
    assert re.match(r"ignored \d+ tensors \('model.layers.3..*'\): an MTP head of a kind that is not known here", note)
    ids = torch.tensor([[5, 9, 2, 7]])
    for name in ("plain", "with"):
        byte_tokenizer().save(str(tmp_path / name / "tokenizer.json"))
    models = (load_source(tmp_path / name, device="cpu").model for name in ("plain", "with"))
    assert torch.equal(*(model(ids).logits for model in models))


GATE = "model.layers.0.mlp.experts.3.gate_proj.weight"


DOWN = "model.layers.2.mlp.experts.down_proj"


def cut(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    fuse(config, tensors)
    tensors[DOWN] = tensors[DOWN][:5].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config, tensors: tensors.pop(GATE), rf"missing 1 tensor \('{GATE}'\)"),
        (lambda config, tensors: tensors.update({GATE: torch.ones(8, 64)}), r"shape \(40, 64\), found \(8, 64\)"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok: expected at most .* \(6\)"),
        ({"scoring_func": "sigmoid"}, "scoring_func: .*such a router is not known here"),
        ({"mlp_only_layers": [7]}, "mlp_only_layers: expected a list of blocks"),
        ({"mlp_only_layers": [0, 1, 2]}, "expected blocks with experts"),
        (cut, r"down_proj: expected shape \(6, 64, 40\), found \(5, 64, 40\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_reading(source: Path, tmp_path: Path, change: Any, words: str) -> None:
    apply = (lambda config, tensors: config.update(change)) if isinstance(change, dict) else change
    with pytest.raises(UnsupportedModelError, match=words):
        Checkpoint.open(changed(source, tmp_path / "changed", apply), complete=full_config)


def test_few_tokens_of_an_expert_are_drawn_to_all_experts_together() -> None:
    sums = torch.tensor([[512.0, 1024.0, 512.0], [0.0, 0.0, 0.0], [128.0, 0.0, 64.0]])  # two channels, then tokens
    by_channel, of_all = drawn_to_pool(sums, True), drawn_to_pool(sums, False)
    pool = torch.tensor([640.0, 1024.0]) / 576
    assert torch.equal(by_channel[0], torch.tensor([1.0, 2.0]))  # enough of its own
    assert torch.allclose(by_channel[1], pool)  # none
    assert torch.allclose(by_channel[2], (torch.tensor([128.0, 0.0]) + 192 * pool) / 256)
    assert torch.allclose(of_all[1], pool.mean().expand(2))


def grouped(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source whose projections' inputs are cut into even groups."""
    model_type, given = EXPERTS[family]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    if family in ("qwen3.5-moe", "qwen3-next"):
        sizes |= {"shared_expert_intermediate_size": 64, "linear_value_head_dim": 16}
    if family == "nemotron-h-moe":
        sizes |= {"moe_shared_expert_intermediate_size": 128, "mamba_head_dim": 16}
    monkeypatch.setitem(EXPERTS, "grouped", (model_type, {**given, **sizes}))
    source = make_checkpoint("grouped", folder, vocab_size=VOCAB)
    byte_tokenizer().save(str(source / "tokenizer.json"))
    return source


@torch.inference_mode()
def test_four_bit_experts_are_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, names = grouped("gpt-oss", tmp_path / "source", monkeypatch), ("gate_up_proj", "down_proj")
    whole = {f"model.layers.{block}.mlp.experts.{name}": name for block in range(3) for name in names}
    expected = {}

    def pack(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        for name in whole:
            experts, k, n = tensors.pop(name).shape
            blocks = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (experts, n, k // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales).contiguous()

    packed = changed(source, tmp_path / "packed", pack)
    byte_tokenizer().save(str(packed / "tokenizer.json"))
    how: dict[str, Any] = {"num_samples": 2, "seq_len": 24, "search": "uniform", "rotation": "none", "device": "cpu"}
    bundle = Bundle.open(convert(packed, tmp_path / "bundle", sparsity=0.5, **how))
    assert "quantization_config" not in bundle.config_dict
    for name, made in expected.items():
        assert torch.equal(bundle.checkpoint.tensor(name), made), name
    decoder = wisparse.load(bundle.folder, device="cpu", dtype="float32", backend="torch").decoder
    theirs = hugging_face(bundle.folder)(PROMPT[None]).logits[0]
    assert (decoder.logits(PROMPT, len(PROMPT)) - theirs).abs().max() < 1e-4

    def damage(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{next(iter(whole))}_scales"][0, 0, 0] = 255

    damaged = Checkpoint.open(changed(packed, tmp_path / "damaged", damage), complete=full_config)
    with pytest.raises(UnsupportedModelError, match="gate_up_proj: expected MXFP4 scales that are powers of two"):
        damaged.tensor(next(iter(whole)))


# Run so by test_kernels_triton.py, on the family with shared experts alone: it takes a minute.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize(
    "family", ["qwen3.5-moe"] if INTERPRETED else ["qwen3-moe", "qwen3.5-moe", "gpt-oss", "nemotron-h-moe"]
)
@torch.no_grad()
def test_graded_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of their int8 codes at 8 bits; below, every back end as the definition in transformers' model."""
    # Of some others a delta net's norm divides by nearly nothing, with any weights.
    prompt = torch.randint(3, VOCAB, (20,), generator=torch.Generator().manual_seed(2))
    source = grouped(family, tmp_path / "source", monkeypatch)
    how: dict[str, Any] = {"num_samples": 8, "seq_len": 96, "rotation": "none", "device": "cpu", "progress": False}
    bundle = Bundle.open(wisparse.convert(source, tmp_path / "bundle", bits=[5, 3], weights="graded", **how))
    assert bundle.recipe.plane_bits == (4, 4)
    codes = load_source(bundle.folder, torch.float32, device="cpu", bundle=True)
    codes.model.lm_head.weight.copy_(round_weight(codes.model.lm_head.weight, "int8").dequantise(torch.float32))
    expected, text = {8: codes.model(prompt[None]).logits[0]}, prompt
    count = 4 if INTERPRETED else 12
    for _ in range(count):
        text = torch.cat((text, codes.model(text[None]).logits[0, -1:].argmax(-1)))
    matrices = {n: bundle.checkpoint.matrix(f"{n}.weight") for p in bundle.config.projections() for n in p.parts}
    read = read_in_planes(codes, matrices)
    torch.testing.assert_close(read.model(prompt[None]).logits[0], expected[8], rtol=1e-4, atol=1e-4)
    masks: Any = None

    def by_plane(name: str, x: torch.Tensor) -> torch.Tensor:
        mask, routing = masks[name], getattr(read.projections[name], "routing", None)
        scale = mask.channel_scale if routing is None else mask.channel_scale[routing.experts]
        planes = zip(x.chunk(2, dim=-1), mask.plane_thresholds, strict=True)
        return torch.cat([plane * keep_mask(plane, scale, limit) for plane, limit in planes], dim=-1)

    with MaskedModel(read.projections) as masked, masked.during(replacer=by_plane):
        for bits in (5, 3):
            masks = bundle.at(bits=bits).masks
            expected[bits] = read.model(prompt[None]).logits[0]
    for bits, logits in expected.items():
        answers = []
        for backend in ("torch", "triton" if INTERPRETED else "numba"):
            if backend == "triton":
                from wisparse.runtime.cuda.decoder import CudaDecoder

                settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_seq_len": 64}
                decoder: Any = CudaDecoder(bundle.at(bits=bits), **settings)
            else:
                decoder = cpu_decoder(bundle.at(bits=bits), backend, max_seq_len=64)
            assert (decoder.logits(prompt, 0) - logits).abs().max() < 1e-4, (bits, backend)
            answers.append(greedy(decoder, prompt, count)[0])
        assert answers[0] == answers[1]
        assert bits < 8 or answers[0] == text[len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "weights"),
    [(name, kind) for name in ("qwen3-moe", "nemotron-h-moe") for kind in ("int8", "int4")] + [("gpt-oss", "int4")],
)
@torch.inference_mode()
def test_quantised_experts_give_the_tokens_of_transformers(
    family: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = grouped(family, tmp_path / "source", monkeypatch)
    how: dict[str, Any] = {"num_samples": 8, "seq_len": 96, "search": "uniform", "rotation": "none", "device": "cpu"}
    bundle = convert(source, tmp_path / "bundle", sparsity=0.5, weights=weights, **how)
    opened = Bundle.open(bundle)
    assert len(opened.checkpoint.quantised) == sum(len(one.parts) for one in opened.config.projections())
    if (family, weights) == ("qwen3-moe", "int4"):  # of 24 inputs, some from few tokens
        (said,) = (record.getMessage() for record in caplog.records if "rounded, not fitted" in record.getMessage())
        rounded, total = [int(word) for word in said.split() if word.isdigit()][:2]
        assert total == 24
        assert 0 < rounded < 24
    # transformers does not read gpt-oss's experts one by one.
    theirs = load_source(bundle, device="cpu", bundle=True).model if family == "gpt-oss" else hugging_face(bundle)
    expected = theirs(PROMPT[None]).logits[0]
    answers = []
    for backend in ("torch", "numba"):
        decoder = wisparse.load(bundle, device="cpu", dtype="float32", backend=backend).decoder
        assert (decoder.logits(PROMPT, len(PROMPT)) - expected).abs().max() < 1e-4
        answers.append(greedy(decoder, PROMPT, 12)[0])
    assert answers[0] == answers[1]


def test_experts_are_not_read_from_their_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_room(monkeypatch, 200_000)
    with pytest.raises(ResourceError, match="experts cannot stay in their files"):
        convert(source, tmp_path / "bundle", sparsity=0.5, device="cpu")


def test_experts_larger_than_memory_are_mapped_from_a_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"num_samples": 2, "seq_len": 16, "search": "uniform", "rotation": "none", "device": "cpu"}
    bundle = Bundle.open(convert(source, tmp_path / "bundle", sparsity=0.5, **how))
    with pytest.raises(UnsupportedModelError, match=r"qwen3_moe: expected .* dense MLPs, found experts"):
        export_onnx(bundle, tmp_path / "onnx")
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("wisparse.runtime.cpu.weights.SEGMENT_BYTES", 1 << 20)
    for weights in ("native", "int8"):
        found = []
        for free in (1 << 40, 600_000):
            for place in ("runtime.cpu.decoder", "runtime.memory"):
                monkeypatch.setattr(f"wisparse.{place}.available_bytes", lambda device, free=free: free)
            caplog.clear()
            decoder = cpu_decoder(bundle, "numba", weights=weights, max_seq_len=None)
            said = [one for one in caplog.messages if re.search(r"experts of .* mapped from a file in .* tok/s", one)]
            assert (len(said), os.listdir(folder)) == (int(free == 600_000 and weights == "native"), [])
            found.append(greedy(decoder, PROMPT, 8)[1])
        assert torch.equal(*found)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ResourceError, match=r"has no room .*No space left on device.*: set TMPDIR to a folder on a larger disk"
    ):
        cpu_decoder(bundle, "numba", max_seq_len=None)


@torch.inference_mode()
def test_recurrent_projections_in_one_matrix_are_read_in_the_order_of_separate_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every stored type, in which rows have scales and zero points of their own."""
    source = grouped("qwen3-next", tmp_path / "source", monkeypatch)
    how: dict[str, Any] = {"num_samples": 4, "seq_len": 24, "search": "uniform", "rotation": "none", "device": "cpu"}
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    for weights in ("native", "int8", "int4"):
        bundle = Bundle.open(convert(source, tmp_path / weights, sparsity=0.5, weights=weights, **how))
        stored, delta = Checkpoint.open(bundle.folder, error=BundleError).tensor(name), bundle.config.delta_net
        assert delta is not None
        q, k, v, z = stored.view(delta.key_heads, -1, 64).split([delta.key_dim] * 2 + [2 * delta.value_dim] * 2, dim=1)
        expected = torch.cat([part.flatten(0, 1) for part in (q, k, v, z)])
        assert torch.equal(bundle.checkpoint.tensor(name), expected)
        assert torch.equal(torch.cat(list(bundle.checkpoint.row_pieces(name, 7))), expected)
        decoders = [cpu_decoder(bundle, backend, max_seq_len=None) for backend in ("torch", "numba")]
        ours, theirs = (decoder.logits(PROMPT, 1) for decoder in decoders)
        assert (ours - theirs).abs().max() < 1e-3, weights


@pytest.mark.parametrize("family", [name for name in EXPERTS if name not in ("gemma4-moe", "glm4-moe-plain")])
@torch.inference_mode()
def test_routers_round_as_transformers_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Of near scores, rounding decides which are chosen."""
    from transformers import AutoModelForCausalLM, __version__

    if family in FLOAT32_ROUTERS and Version(__version__) < Version("5.24"):
        pytest.skip(f"transformers {__version__}: routers of {family} keep float32 weights since 5.24")
    source, dtype = make_checkpoint(family, tmp_path / "source", vocab_size=VOCAB), torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    checkpoint = Checkpoint.open(source, complete=full_config)
    index = next(at for at, block in enumerate(checkpoint.config.blocks) if block.experts)
    module = next(one for name, one in model.model.layers[index].named_modules() if name.endswith(".experts"))
    seen: list[Any] = []
    handle = module.register_forward_pre_hook(
        lambda _, args, given: seen.append((*args, *given.values())), with_kwargs=True
    )
    generator = torch.Generator().manual_seed(0)
    model(torch.randint(3, VOCAB, (4, 200), generator=generator))
    handle.remove()
    x, chosen, weights = seen[0]
    spec = read_spec(checkpoint.config, index, checkpoint.tensor, dtype)
    block = Block[Any](**spec, **dict.fromkeys(LINEARS))
    ours, at = route(block, x)
    order, of_theirs = at.argsort(-1), chosen.argsort(-1)
    same = (at.gather(-1, order) == chosen.gather(-1, of_theirs)).all(-1)
    assert same.all()
    near = ours.gather(-1, order).float(), weights.gather(-1, of_theirs).float()
    torch.testing.assert_close(*near, rtol=2e-2, atol=2e-3)
