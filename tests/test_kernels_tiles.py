"""Which kernel and tile a linear gets, without a GPU: whatever the shape and the chip, its spinning reducers have room."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton_decoder_cases import make_bundle

from wisparse.formats.errors import UsageError
from wisparse.kernels.gpu import packed_gemv
from wisparse.kernels.gpu import plan as plan_module
from wisparse.kernels.gpu.plan import GemvTile, Gpu, choose_tile, measured_tiles, plan, tuned_file
from wisparse.kernels.gpu.weights import BITS, LinearShape, padded_width
from wisparse.runtime.cuda import kernel_times
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.kernel_times import _neighbours
from wisparse.runtime.torch.decoder import TorchDecoder

META = torch.device("meta")
H200 = Gpu(90, 132)
shapes = st.tuples(st.integers(16, 40_000), st.lists(st.integers(16, 40_000), min_size=1, max_size=3).map(tuple))
kinds = st.sampled_from(["sparse", "dense", "rows", "batch", "wide"])


def shape_of(k: int, widths: tuple[int, ...], quant: str = "none", group: int = 0, **changes) -> LinearShape:
    stride = sum(map(padded_width, widths)) * BITS[quant] // 32 if quant != "none" else sum(widths)
    return LinearShape(k, widths, stride, torch.bfloat16, META, False, quant, group)._replace(**changes)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WISPARSE_CACHE", str(tmp_path))


def has_room(tile: GemvTile, multiprocessors: int, widths: tuple[int, ...]) -> bool:
    """No tile spans two projections, so widths that are no multiples of a tile's have more of them."""
    return tile.reducers * sum(-(-width // tile.block_n) for width in widths) <= multiprocessors


@given(shapes, st.integers(1, 200), kinds)
def test_spinning_reducers_of_any_shape_have_room(shape, multiprocessors, kind):
    gpu = Gpu(90, multiprocessors)
    tile = plan_module.default_tile(gpu, shape_of(*shape), kind)
    assert has_room(tile, multiprocessors, shape[1])
    most = replace(tile, reducers=plan_module.most_reducers(gpu, shape[1], tile))
    for tried in (most, *_neighbours(tile, kind, shape[1], gpu)):
        assert has_room(tried, multiprocessors, shape[1])  # and GemvTile does not refuse it
    assert 1 <= tile.splits <= max(1, shape[0] // 64)
    if kind == "batch":  # no program without a block of channels
        assert tile.splits <= -(-shape[0] // tile.block_k)


@pytest.mark.parametrize("multiprocessors", [132, 78, 8])
def test_the_measured_tiles_fit_smaller_chips_of_the_same_generation(multiprocessors):
    rows = {"dense": 1, "sparse": 1, "rows": 2, "batch": 3, "wide": 17}
    for key, tile in measured_tiles().items():
        _, kind, *quant, size = key.split(":")
        if kind.startswith("mask"):
            continue
        k, n = map(int, size.split("x"))
        name, group = (*quant[0].split("-"), k)[:2] if quant else ("none", 0)
        shape = shape_of(k, (n,), name, int(group), dense=kind == "dense")
        chosen, origin = choose_tile(Gpu(90, multiprocessors), shape, rows[kind])
        assert origin.startswith("measured")
        assert has_room(chosen, multiprocessors, (n,))
        assert chosen == tile or (multiprocessors < 132 and chosen.reducers < tile.reducers)


KEY, SQUARE = "sm90:sparse:4096x4096:1:bfloat16", shape_of(4096, (4096,))


def test_a_tuned_tile_is_taken_before_the_table():
    tile, table = GemvTile(128, 4, 10, 2), measured_tiles()["sm90:sparse:4096x4096"]
    plan_module.remember_tiles({KEY: tile})
    assert choose_tile(H200, SQUARE, 1) == (tile, "tuned here")
    # Not for what it was not measured with.
    assert choose_tile(H200, SQUARE._replace(dtype=torch.float16), 1)[0] == table
    assert choose_tile(H200, SQUARE, 2)[0] != tile
    assert list(tuned_file().parent.iterdir()) == [tuned_file()]  # no temporary file is left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_n": 0}, "block_n: expected an integer of at least 1, found 0"),
        ({"block_k": -4}, "block_k"),
        ({"block_k": 3}, "block_k: expected a power of two, found 3"),
        ({"splits": "8"}, "splits"),
        ({"warps": 2.0}, "warps"),
        ({"stages": None}, "stages"),
        ({"trigger": 0}, "trigger"),
        ({"reducers": -1}, "reducers: expected an integer of at least 0, found -1"),
        ({"reducers": 3}, "power of two up to splits"),
        ({"reducers": 16}, "power of two up to splits"),
        # Seen on a GPU: one of two threads that polled a sum saw the last one arrive, its double had not.
        ({"block_n": 64, "splits": 4, "warps": 4, "reducers": 4}, "for every thread"),
    ],
)
def test_an_impossible_tile_is_refused_and_in_the_cache_told_and_ignored(changes, message, caplog):
    fields = {"block_n": 128, "block_k": 4, "splits": 10, "warps": 2} | changes
    with pytest.raises(ValueError, match=message):
        GemvTile(**fields)
    tuned_file().write_text(json.dumps({KEY: fields}), "utf-8")
    assert choose_tile(H200, SQUARE, 1)[0] == measured_tiles()["sm90:sparse:4096x4096"]
    assert str(tuned_file()) in caplog.text
    assert message.split(":")[0] in caplog.text


@pytest.mark.parametrize(("reducers", "multiprocessors"), [(2, 3), (4, 7), (4, 8)])
def test_a_launch_whose_programs_would_wait_for_ever_is_refused(reducers, multiprocessors):
    """Two tiles, of projections that are no multiple of one: each reducer waits for all others."""
    shape, tile = shape_of(64, (40, 40)), GemvTile(block_n=64, splits=4, warps=2, reducers=reducers)
    if 2 * reducers <= multiprocessors:
        assert plan(shape, 1, Gpu(90, multiprocessors), tile=tile).tile == tile
    else:
        with pytest.raises(ValueError, match=f"at most {multiprocessors} programs .* found {2 * reducers}"):
            plan(shape, 1, Gpu(90, multiprocessors), tile=tile)
    with pytest.raises(ValueError, match="at most 1 programs that wait for each other on cpu"):
        plan(shape._replace(device=torch.device("cpu")), 1, tile=tile)  # the interpreter runs one after the other


def test_which_weights_are_multiplied_on_the_tensor_cores() -> None:
    for block_n, changes, why_not in (
        (256, {}, ""),
        (64, {}, "a lane would not read 4, 8 or 16 bytes in tiles of 64 columns"),
        (256, {"dtype": torch.float32}, "float32 activations"),
        (256, {"device": torch.device("cpu")}, "the interpreter has no tensor cores"),
        (256, {"group": 48}, "no power of two"),
        (256, {"group": 8}, "no power of two of at least 16"),
        (256, {"quant": "int8", "group": 4096, "stride": 1536}, ""),
    ):
        shape = shape_of(4096, (6144,), "int4", 128)._replace(**changes)
        chosen = plan(shape, 1, H200, tile=GemvTile(block_n, 1, 8, 4))
        assert why_not in chosen.why_not_packed
        assert (chosen.packed is None) == ("not packed_gemv: " in str(chosen)) == bool(why_not)


def test_tensor_cores_that_flush_subnormal_numbers_get_the_dequantizing_kernel(monkeypatch):
    """The check's answer decides; the check itself runs on GPUs (triton_codes_cases.py)."""
    shape = shape_of(4096, (6144,), "int4", 128, device=torch.device("cuda", 0))
    monkeypatch.setattr(plan_module, "gpu_of", lambda device: H200)
    for keeps in (True, False):
        monkeypatch.setattr(packed_gemv, "keeps_subnormals", lambda device, dtype, keeps=keeps: keeps)
        plan.cache_clear()
        chosen = plan(shape, 1)
        assert (chosen.packed is not None) == keeps
        assert chosen.kernel.__name__ == ("packed_gemv_kernel" if keeps else "sparse_gemv_kernel")
    assert "the tensor cores of cuda:0 flush subnormal bfloat16 numbers" in str(chosen)
    plan.cache_clear()


def test_plans_are_printed() -> None:
    assert str(plan(SQUARE, 1)) == (
        "sparse_gemv (sparse), bfloat16, 4096 x 4096, 1 row: 16 tiles of 256 columns x 20 splits = 320 programs of 4 "
        "warps; 8 spinning reducers a tile; tile: measured (tiles.json)"
    )
    # One line for each linear that differs from the others; what no GPU runs is refused.
    bundle = make_bundle("llama", 0.5)
    for name, mask in list(bundle.masks.items()):
        if "layers.0" in name and name.endswith("down_proj"):
            bundle.masks[name] = replace(mask, threshold=0.0, sparsity=0.0)
    settings = {"device": torch.device("cpu"), "dtype": torch.float32, "max_seq_len": 16, "max_batch": 2}
    lines = kernel_times.explain(CudaDecoder(bundle, **settings), batch=1).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "qkv (2 blocks)", "o (2 blocks)", "gate_up (2 blocks)", "down (block 0)", "down (block 1)",
    ]  # fmt: skip
    assert "sparse_gemv (dense), float32, 88 x 48, 1 row" in lines[3]
    with pytest.raises(UsageError, match="--explain: expected the triton back end"):
        kernel_times.explain(TorchDecoder(bundle, **settings), batch=1)


@given(
    k=st.integers(1, 300).map(lambda n: 16 * n), splits=st.integers(1, 64), unroll=st.integers(1, 8),
    chunk=st.integers(1, 200), batch=st.integers(1, 32), grouped=st.booleans(),
)  # fmt: skip
def test_lists_hold_what_is_read_ahead(k, splits, unroll, chunk, batch, grouped):
    shape = shape_of(k, (512,), "int4", 16 if grouped else k, dtype=torch.float16)
    chosen = plan(shape, batch, H200, tile=GemvTile(256, 1, splits, 4, unroll=unroll, chunk=chunk))
    if chosen.packed is None:
        return
    launch, block_k = chosen.launch, 16 * chosen.packed.steps
    channels = math.ceil(math.ceil(k / launch.chunk) / splits) * launch.chunk
    x_tiles = chosen.packed.x_tiles
    assert channels <= launch.segment * x_tiles
    # One pipeline stage beyond the last, or one tile of x.
    assert (math.ceil(channels / block_k) * block_k + block_k if x_tiles == 1 else launch.segment) <= launch.length
    assert x_tiles == 1 or launch.segment % chosen.packed.slot == 0
    assert (chosen.packed.slot % block_k, launch.length % 16) == (0, 0)
