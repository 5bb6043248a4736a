"""The optional tensors of the sidecar: round trip, and one rule of FORMAT.md broken at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_bundle import join_safetensors, resign, split_safetensors, tiny_masks, tiny_recipe, write_tiny_model

from wisparse.formats.architectures import ModelConfig
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.verify import verify_bundle
from wisparse.formats.write import write_bundle

Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
FACTORS = (torch.randn(16, 3), torch.randn(3, 16))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("extras") / "model")


def masks(config: ModelConfig) -> dict[str, ProjectionMask]:
    found = tiny_masks(config)
    found[Q] = replace(found[Q], low_rank=FACTORS)
    found[DOWN] = replace(found[DOWN], threshold=0.0, gate_threshold=0.25)
    return found


def write(model: Path, out: Path, change: Callable[[dict[str, ProjectionMask]], None] = lambda _: None) -> Path:
    source = Checkpoint.open(model)
    wanted = masks(source.config)
    change(wanted)
    return write_bundle(source, tiny_recipe(source.config, wanted), wanted, out)


def test_round_trip(model: Path, tmp_path: Path) -> None:
    out = write(model, tmp_path / "out")
    verify_bundle(out)
    found = Bundle.open(out)
    low_rank = found.masks[Q].low_rank
    assert low_rank is not None
    assert all(map(torch.equal, low_rank, FACTORS))
    assert found.masks[DOWN].gate_threshold == 0.25
    assert [name for name, mask in found.masks.items() if mask.low_rank] == [Q]
    assert [name for name, mask in found.masks.items() if mask.gate_threshold] == [DOWN]
    assert "gate's activation" in str(found.beyond_masks)


def test_most_bundles_ask_for_nothing_more(model: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(model)
    plain = tiny_masks(source.config)
    assert (
        Bundle.open(write_bundle(source, tiny_recipe(source.config, plain), plain, tmp_path / "out")).beyond_masks
        is None
    )


def edit(out: Path, name: str, values: np.ndarray | None, rename: str | None = None) -> None:
    """Replace a tensor of the sidecar by one of another shape, remove it (None), or give it another name."""
    header, data = split_safetensors((out / "wisparse.safetensors").read_bytes())
    pieces = {key: data[slice(*entry["data_offsets"])] for key, entry in header.items() if key != "__metadata__"}
    if values is not None:
        pieces[name] = values.astype("<f4").tobytes()
        header[name]["shape"] = list(values.shape)
    elif rename is not None:
        pieces[rename], header[rename] = pieces[name], header[name]
    if values is None:
        del pieces[name], header[name]
    end = 0
    for key, piece in pieces.items():
        header[key]["data_offsets"] = [end, end + len(piece)]
        end += len(piece)
    (out / "wisparse.safetensors").write_bytes(join_safetensors(header, b"".join(pieces.values())))
    resign(out)


BROKEN = {
    "a factor alone": (f"{Q}.low_rank_in", None, None, "low_rank_in"),
    "the other alone": (f"{Q}.low_rank_out", None, None, "low_rank_out"),
    "two ranks": (f"{Q}.low_rank_in", np.ones((2, 16)), None, r"expected low_rank_in \(3, 16\), found \(2, 16\)"),
    "turned": (f"{Q}.low_rank_out", np.ones((3, 16)), None, "low_rank"),
    "rank 0": (f"{Q}.low_rank_out", np.ones((16, 0)), None, "rank"),
    "a rank above the weight's": (f"{Q}.low_rank_out", np.ones((16, 17)), None, "rank from 1 to 16"),
    "three axes": (f"{Q}.low_rank_out", np.ones((16, 3, 1)), None, "rank"),
    "NaN in a factor": (f"{Q}.low_rank_out", np.full((16, 3), np.nan), None, "finite"),
    "a gate per channel": (f"{DOWN}.gate_threshold", np.ones(24), None, r"expected gate_threshold \(\)"),
    "infinite gate": (f"{DOWN}.gate_threshold", np.array(np.inf), None, "gate_threshold: expected a finite"),
    "gate 0": (f"{DOWN}.gate_threshold", np.array(0.0), None, "gate_threshold: expected a finite"),
    "negative gate": (f"{DOWN}.gate_threshold", np.array(-1.0), None, "gate_threshold: expected a finite"),
    "subnormal gate": (f"{DOWN}.gate_threshold", np.array(1e-40), None, "gate_threshold: expected a finite"),
    "a gate on q": (f"{DOWN}.gate_threshold", None, f"{Q}.gate_threshold", "unexpected tensor"),
    "factors of no projection": (f"{Q}.low_rank_in", None, "model.low_rank_in", "low_rank_in"),
    "another tensor": (f"{DOWN}.gate_threshold", None, f"{DOWN}.bias", "unexpected tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule(name: str, model: Path, tmp_path: Path) -> None:
    tensor, values, rename, message = BROKEN[name]
    out = write(model, tmp_path / "out")
    edit(out, tensor, values, rename)
    with pytest.raises(BundleError, match=message):
        Bundle.open(out)


def change(name: str, **fields: object) -> Callable[[dict[str, ProjectionMask]], None]:
    def apply(found: dict[str, ProjectionMask]) -> None:
        found[name] = replace(found[name], **fields)

    return apply


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (change(Q, gate_threshold=0.5, low_rank=None, threshold=0.0), "belongs to down_proj"),
        (change(Q, low_rank=(torch.ones(16, 3), torch.ones(2, 16))), "low_rank: expected"),
        (change(Q, low_rank=(torch.ones(16), torch.ones(16))), "low_rank: expected"),
        (change(Q, low_rank=(torch.ones(16, 3).double(), torch.ones(3, 16))), "float32"),
        (change(DOWN, threshold=0.5), "expected sparsity above 0 and threshold 0"),
        (change(DOWN, sparsity=0.0), "expected sparsity above 0 and threshold 0"),
        (change(DOWN, low_rank=(torch.ones(16, 1), torch.ones(1, 24))), "in the place of any other mask"),
    ],
)
def test_the_writer_refuses(
    apply: Callable[[dict[str, ProjectionMask]], None], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        write(model, tmp_path / "out", apply)
    assert not list(tmp_path.iterdir())
