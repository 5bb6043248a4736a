"""Reading a bundle's tensors part by part onto a GPU, and the layout that its kernels read: the same tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import PUBLISHED, quantise_model, quantise_with_zeros
from tiny_bundle import change_tensor, tiny_config, write_tiny_bundle, write_tiny_model

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import BundleError
from wisparse.formats.weight_types import QuantizedMatrix, quantise, round_weight
from wisparse.kernels.gpu.weights import dequantize, empty_weight, store_columns
from wisparse.runtime.cuda.weights import load_weights, staged_reads

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "qwen2": tiny_config("qwen2"),
    "phi3": tiny_config("phi3", tie_word_embeddings=False),
}


def make(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Bundle:
    model = write_tiny_model(folder / name, CONFIGS[name], dtype=dtype)
    return Bundle.open(write_tiny_bundle(folder / "bundle", model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("threads", "part_bytes"), [(1, 1 << 20), (3, 100), (8, 64)])
def test_the_tensors_are_those_of_the_files(dtype: torch.dtype, threads: int, part_bytes: int, tmp_path: Path) -> None:
    checkpoint = make(tmp_path, "llama", dtype).checkpoint
    names = list(checkpoint.tensors)[::-1]
    with staged_reads(checkpoint, names, CPU, threads=threads, part_bytes=part_bytes) as read:
        for name in names:
            found, expected = read(name), checkpoint.tensor(name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_what_is_no_tensor_of_the_file(tmp_path: Path) -> None:
    bundle = make(tmp_path, "qwen2")
    first, second, *_ = bundle.checkpoint.tensors
    announced = staged_reads(bundle.checkpoint, [first, second], CPU)
    with announced as read, pytest.raises(ValueError, match="to be read next"):
        read(second)
    name = "model.layers.1.mlp.down_proj.weight"
    info = bundle.checkpoint.tensors[name]
    values = bundle.checkpoint.tensor(name).numpy().copy()
    values[-1, -1] = float("nan")
    change_tensor(bundle.folder / info.file, name, values)
    # Opened again: the file's time has changed; its sha256 is not looked at when weights are read.
    checkpoint = Bundle.open(bundle.folder).checkpoint
    with staged_reads(checkpoint, [name], CPU, part_bytes=64) as read, pytest.raises(BundleError, match="NaN"):
        read(name)
    path = checkpoint.folder / next(iter(checkpoint.files))
    path.write_bytes(path.read_bytes()[:-40])
    damaged = pytest.raises(BundleError, match=r"changed on disk|truncated")
    with damaged, staged_reads(checkpoint, checkpoint.tensors, CPU, part_bytes=256) as read:
        for name in checkpoint.tensors:
            read(name)


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_codes_stay_codes_and_widen_to_the_bundles_weights(scheme: str, tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", CONFIGS["llama"])
    source = quantise_model(plain, tmp_path / "source", *PUBLISHED[scheme]())
    bundle = Bundle.open(write_tiny_bundle(tmp_path / "bundle", source))
    weights = load_weights(bundle, CPU, torch.bfloat16)
    for index, block in enumerate(weights.blocks):
        projections = iter(bundle.config.projections(index))
        for linear in block.linears:
            for i in range(len(linear.widths)):
                stored = bundle.checkpoint.matrix(f"{next(projections).name}.weight")
                assert linear.weight.quant == stored.kind
                room = torch.full(stored.shape[::-1], float("nan"), dtype=torch.bfloat16)
                assert torch.equal(dequantize(linear.weight, i, room).T, stored.dequantise(torch.bfloat16))
            assert weights.dequantized.numel() >= linear.in_features * max(linear.widths)
    # Zero points that all say what codes without them mean are not kept.
    zero_points = "zero points" in scheme or scheme in ("awq", "auto-round, second version", "auto-round, as awq")
    assert (weights.blocks[0].qkv.weight.zeros is None) is not zero_points


@pytest.mark.parametrize(("weights", "kept"), [("int8", True), ("int4", False), ("fp8", False)])
def test_weights_are_rounded_at_load(weights: str, kept: bool, tmp_path: Path) -> None:
    """From plain ones as the table of types says; codes of the kind that is asked for are kept, others rounded anew."""
    plain = write_tiny_model(tmp_path / "plain", CONFIGS["phi3"])
    source = quantise_model(plain, tmp_path / "source", *PUBLISHED["pack int8 rows"]())
    for number, folder in enumerate((plain, source)):
        bundle = Bundle.open(write_tiny_bundle(tmp_path / f"bundle-{number}", folder))
        found = load_weights(bundle, CPU, torch.float32, weights)
        name = "model.layers.0.mlp.gate_up_proj.weight"
        expected = round_weight(bundle.checkpoint.tensor(name), weights)
        if kept and folder == source:
            stored = bundle.checkpoint.matrix(name)
            expected = stored
        linear = found.blocks[0].gate_up
        assert linear.weight.quant == weights
        room = [torch.empty(linear.in_features, width) for width in linear.widths]
        wide = [dequantize(linear.weight, i, out) for i, out in enumerate(room)]
        assert torch.equal(torch.cat(wide, 1).T, expected.dequantise(torch.float32))
        head = round_weight(bundle.checkpoint.tensor("lm_head.weight"), "int8")
        assert torch.equal(found.head, head.codes)
        assert torch.equal(found.head_scales, head.scales[:, 0])


def test_weights_beyond_the_type_are_not_rounded(tmp_path: Path) -> None:
    large = {"model.layers.1.mlp.up_proj.weight": torch.full((24, 16), 1e6)}
    model = write_tiny_model(tmp_path / "plain", CONFIGS["llama"], add=large)
    bundle = Bundle.open(write_tiny_bundle(tmp_path / "bundle", model))
    with pytest.raises(
        BundleError, match=r"up_proj\.weight: expected finite weights, found NaN or Inf in torch.float16"
    ):
        load_weights(bundle, CPU, torch.float16, "int8")


WIDTHS = (37, 300, 8)
K = 30  # three groups of ten; no multiple of what a word holds


def quantised(kind: str, group: int | None, zeros: bool) -> list[QuantizedMatrix]:
    weights = [torch.randn(width, K, generator=torch.Generator().manual_seed(width)) for width in WIDTHS]
    return [(quantise_with_zeros if zeros else quantise)(kind, weight, group=group) for weight in weights]


@pytest.mark.parametrize(
    ("kind", "group", "zeros"),
    [("int4", 10, False), ("int4", 10, True), ("int4", None, True), ("int8", None, False), ("int8", 10, True),
     ("fp8", None, False), ("int4", 10, "one of them"), ("none", None, False)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_put_in_is_dequantized_as_its_file_says(kind, group, zeros, dtype, monkeypatch):
    """Also where only one projection has zero points, and where a scale serves several groups."""
    monkeypatch.setattr("wisparse.kernels.gpu.weights.CHUNK", 1000)  # several chunks
    weight = empty_weight(kind, K, WIDTHS, group, torch.float32 if kind == "none" else dtype, "cpu", zeros=bool(zeros))
    if kind == "none":
        expected = [torch.randn(width, K) for width in WIDTHS]
        for i, one in enumerate(expected):
            store_columns(weight, i, one)
    else:
        parts = quantised(kind, group, bool(zeros))
        if zeros == "one of them":
            parts = [parts[0], *quantised(kind, group, False)[1:2], quantised(kind, None, False)[2]]
        for i, part in enumerate(parts):
            store_columns(weight, i, part.codes, part.scales, part.zeros)
        expected = [part.dequantise(dtype) for part in parts]
    for i, one in enumerate(expected if kind != "none" else ()):
        out = torch.full((WIDTHS[i], K), float("nan"), dtype=dtype)
        assert torch.equal(dequantize(weight, i, out.T), one.T)
        assert torch.equal(out, one)
    if kind == "none":
        assert torch.equal(weight.data[:, : sum(WIDTHS)], torch.cat(expected).T)


def test_what_does_not_fit_is_refused() -> None:
    for change, message in (
        ({"codes": torch.zeros(37, K).byte()}, r"codes: expected \(37, 15\), found \(37, 30\)"),
        ({"zeros": torch.zeros(37, 3)}, "zeros: the weight was made without zero points"),
    ):
        given = {"codes": torch.zeros(37, 15).byte(), "scales": torch.ones(37, 3), "zeros": None} | change
        with pytest.raises(ValueError, match=message):
            store_columns(empty_weight("int4", K, WIDTHS, 10, torch.bfloat16, "cpu"), 0, **given)
