"""Which tile a launch gets, without a GPU: whatever the shape and the chip, its pollers have room."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
shapes = st.tuples(st.integers(16, 40_000), st.lists(st.integers(16, 40_000), min_size=1, max_size=3).map(tuple))
kinds = st.sampled_from(["sparse", "dense", "rows", "batch"])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WISPARSE_CACHE", str(tmp_path))


def has_room(tile, multiprocessors: int, widths: tuple[int, ...]) -> bool:
    """No tile spans two projections, so widths that are no multiples of a tile's have more of them."""
    return tile.pollers * sum(-(-width // tile.block_n) for width in widths) <= multiprocessors


@given(shapes, st.integers(1, 200), kinds)
def test_pollers_of_any_shape_have_room(shape, multiprocessors, kind):
    from wisparse.kernels.gpu.tiles import default_tile

    tile = default_tile(multiprocessors, *shape, kind)
    assert has_room(tile, multiprocessors, shape[1])
    assert 1 <= tile.splits <= max(1, shape[0] // 64)
    if kind == "batch":  # no program without a block of channels
        assert tile.splits <= -(-shape[0] // tile.block_k)


@given(
    shapes, st.integers(1, 200), st.sampled_from([64, 128, 256, 512]), st.integers(1, 64), st.sampled_from([1, 4, 8])
)
def test_the_most_pollers_have_room_and_each_thread_its_own_sums(shape, multiprocessors, block_n, splits, warps):
    from wisparse.kernels.gpu.gemv import GemvTile
    from wisparse.kernels.gpu.tiles import most_pollers

    pollers = most_pollers(multiprocessors, shape[1], block_n, splits, warps)
    tile = GemvTile(block_n, splits=splits, warps=warps, pollers=pollers)  # does not refuse
    assert has_room(tile, multiprocessors, shape[1])


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 8])
def test_the_tables_tiles_fit_smaller_chips_of_the_same_generation(multiprocessors):
    from wisparse.kernels.gpu.tiles import TABLE, choose_tile

    for key, tile in TABLE.items():
        _, kind, *codes, shape = key.split(":")
        codes = codes[0].split("-") if codes else ["plain"]
        group = int(codes[1]) if codes[1:] else None
        k, n = map(int, shape.split("x"))
        chosen = choose_tile(90, multiprocessors, k, (n,), kind, codes=codes[0], group=group)
        assert has_room(chosen, multiprocessors, (n,))
        assert chosen == tile or (multiprocessors < 132 and chosen.pollers < tile.pollers)


@pytest.mark.parametrize(
    ("batch", "dense", "kind"),
    [
        (1, True, "dense"), (1, False, "sparse"), (2, True, "batch"), (2, False, "rows"), (3, False, "batch"),
        (4, True, "batch"), (8, False, "batch"),
    ],
)  # fmt: skip
def test_rows_share_a_list_where_that_was_measured_to_be_faster(batch, dense, kind):
    from wisparse.kernels.gpu.gemv import launch_kind

    assert launch_kind(batch, dense=dense) == kind


def test_a_local_tile_is_taken_before_the_table_and_an_impossible_one_is_not(caplog):
    from wisparse.kernels.gpu.gemv import GemvTile
    from wisparse.kernels.gpu.tiles import TABLE, cache_file, choose_tile, remember_tiles

    key, tile = "sm90:sparse:4096x4096:1:bfloat16", GemvTile(128, 4, 10, 2)
    remember_tiles({key: tile})
    assert choose_tile(90, 132, 4096, (4096,)) == tile
    # Not for what it was not measured with.
    table = TABLE["sm90:sparse:4096x4096"]
    assert choose_tile(90, 132, 4096, (4096,), dtype=torch.float16) == table
    assert choose_tile(90, 132, 4096, (4096,), rows=2) == table
    fields = json.loads(cache_file().read_text("utf-8"))
    fields[key]["pollers"] = 3
    cache_file().write_text(json.dumps(fields), "utf-8")
    with caplog.at_level(logging.WARNING, logger="wisparse"):
        assert choose_tile(90, 132, 4096, (4096,)) == TABLE["sm90:sparse:4096x4096"]
    assert "pollers" in caplog.text


@pytest.mark.parametrize("field", ["block_n", "block_k", "splits", "warps", "stages", "chunk", "unroll", "trigger"])
@pytest.mark.parametrize("value", [0, -4, "8", 2.0, None])
def test_a_damaged_local_tile_is_told_and_ignored(field, value, caplog):
    from wisparse.kernels.gpu.gemv import GemvTile
    from wisparse.kernels.gpu.tiles import TABLE, cache_file, choose_tile, remember_tiles

    key = "sm90:sparse:4096x4096:1:bfloat16"
    remember_tiles({key: GemvTile(128, 4, 10, 2)})
    fields = json.loads(cache_file().read_text("utf-8"))
    fields[key][field] = value
    cache_file().write_text(json.dumps(fields), "utf-8")
    with caplog.at_level(logging.WARNING, logger="wisparse"):
        assert choose_tile(90, 132, 4096, (4096,)) == TABLE["sm90:sparse:4096x4096"]
    assert str(cache_file()) in caplog.text


@given(shapes, kinds, st.integers(1, 200))
def test_tiles_tried_around_one_have_room_too(shape, kind, multiprocessors):
    from wisparse.kernels.gpu.tiles import default_tile
    from wisparse.runtime.cuda.kernel_times import _neighbours

    tile = default_tile(multiprocessors, *shape, kind)
    tried = list(_neighbours(tile, kind, shape[1], multiprocessors))
    assert tile not in tried
    assert all(has_room(other, multiprocessors, shape[1]) for other in tried)


@pytest.mark.parametrize(
    ("dtype", "kinds"), [(torch.bfloat16, {"rows", "batch"}), (torch.float32, {"sparse", "dense"})]
)
def test_tiles_are_tuned_for_the_launches_that_a_step_makes(dtype, kinds):
    """float32's rows are launched one by one."""
    from wisparse.runtime.cuda.kernel_times import _kinds

    block = SimpleNamespace(**{role: SimpleNamespace(dense=role == "o") for role in ("qkv", "o", "gate_up", "down")})
    decoder = SimpleNamespace(weights=SimpleNamespace(blocks=[block]), dtype=dtype)
    assert set(_kinds(decoder, 2).values()) == kinds


def test_tiles_are_tuned_on_a_context_that_was_read(monkeypatch, tmp_path):
    """With an empty cache o's input is zero, no channel is kept, and a tile that reads nothing fast would win."""
    from wisparse.kernels.gpu.gemv import GemvTile
    from wisparse.runtime.cuda import kernel_times

    monkeypatch.setenv("WISPARSE_CACHE", str(tmp_path))
    events = []
    block = SimpleNamespace(
        **{
            role: SimpleNamespace(
                dense=False,
                widths=(64,),
                in_features=64,
                out_features=64,
                matrix=SimpleNamespace(kind="int8", group=64),
            )
            for role in ("qkv", "o", "gate_up", "down")
        }
    )
    decoder = SimpleNamespace(
        weights=SimpleNamespace(blocks=[block]), dtype=torch.bfloat16, device=torch.device("cuda"), max_seq_len=100,
        config=SimpleNamespace(vocab_size=50), prefill=lambda slot, ids, sparse_from: events.append((slot, len(ids))),
    )  # fmt: skip
    tile = GemvTile(block_n=64, splits=4, warps=2)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernel_times, "_require_triton", lambda given, option: given)
    monkeypatch.setattr(kernel_times, "_step", lambda *_: SimpleNamespace(tiles=[dict.fromkeys(vars(block), tile)]))
    monkeypatch.setattr(kernel_times, "_time", lambda *_: events.append("timed") or 1.0)
    kernel_times.tune(decoder, batch=2)
    assert events[:3] == [(0, 99), (1, 99), "timed"]
    assert set(events[3:]) == {"timed"}


@pytest.mark.parametrize(("pollers", "multiprocessors"), [(2, 3), (4, 7), (4, 8)])
def test_a_launch_whose_programs_would_wait_for_ever_is_refused(pollers, multiprocessors, monkeypatch):
    """Two tiles, of projections that are no multiple of one: each poller waits for all others."""
    from wisparse.kernels.gpu import gemv

    monkeypatch.setattr(gemv, "_places", lambda device: multiprocessors)
    monkeypatch.setattr(gemv, "plan_launch", lambda layout, tile, *arguments: tile)
    layout = gemv.Layout(64, (40, 40), 80, torch.float16, torch.device(f"cuda:{multiprocessors}"), False)
    tile = gemv.GemvTile(block_n=64, splits=4, warps=2, pollers=pollers)
    if 2 * pollers <= multiprocessors:
        assert gemv._checked_plan(layout, tile) == tile
    else:
        with pytest.raises(ValueError, match=f"at most {multiprocessors} programs .* found {2 * pollers}"):
            gemv._checked_plan(layout, tile)


def test_the_launcher_refuses_pollers_where_programs_run_one_after_the_other():
    from wisparse.kernels.gpu.gemv import GemvTile, Group, sparse_gemv
    from wisparse.kernels.gpu.matrix import plain_matrix

    group = Group(plain_matrix(torch.ones(50, 72), (72,)), (72,), None, torch.ones(1, 50), torch.zeros(1), False)
    with pytest.raises(ValueError, match="at most 1 programs that wait for each other on cpu, found 4"):
        sparse_gemv(torch.ones(1, 50), group, GemvTile(block_n=64, splits=4, warps=2, pollers=2))


@given(st.integers(1, 10**6), st.integers(1, 16))
def test_several_rows_split_a_context_into_about_as_many_programs_as_one(context, rows):
    from wisparse.runtime.cuda.step import KV_SPLITS, kv_splits_for

    splits, alone = kv_splits_for(context, rows), kv_splits_for(context)
    assert splits & (splits - 1) == 0
    assert splits == 1 or splits * rows <= max(KV_SPLITS.values())
    assert rows * splits * 2 > alone


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"codes": "plain", "group": 0}, False),
        ({"dtype": torch.float32}, False),
        ({"device": torch.device("cpu")}, False),
        ({"group": 48}, False),  # no power of two
        ({"group": 8}, False),  # less than a step
        ({"codes": "int8", "group": 4096, "stride": 1536}, True),
    ],
)
def test_which_weights_are_multiplied_on_the_tensor_cores(change, taken):
    from wisparse.kernels.gpu.matrix import GemvTile, Layout
    from wisparse.kernels.gpu.packed_gemv import packed_lists

    layout = Layout(4096, (6144,), 768, torch.bfloat16, torch.device("meta"), False, "int4", 128)._replace(**change)
    assert (packed_lists(layout, GemvTile(256, 1, 8, 4), 1) is not None) == taken
    assert packed_lists(layout, GemvTile(64, 1, 8, 4), 1) is None  # a lane would read half a word


@given(
    k=st.integers(1, 300).map(lambda n: 16 * n),
    splits=st.integers(1, 64),
    unroll=st.integers(1, 8),
    chunk=st.integers(1, 200),
    batch=st.integers(1, 16),
    grouped=st.booleans(),
)
def test_lists_hold_what_is_read_ahead(k, splits, unroll, chunk, batch, grouped):
    from wisparse.kernels.gpu.matrix import GemvTile, Layout
    from wisparse.kernels.gpu.packed_gemv import packed_chunk, packed_lists

    layout = Layout(k, (512,), 64, torch.float16, torch.device("meta"), False, "int4", 16 if grouped else k)
    tile = GemvTile(256, 1, splits, 4, unroll=unroll, chunk=chunk)
    lists = packed_lists(layout, tile, batch)
    if lists is None:
        return
    dealt = packed_chunk(layout, tile)
    channels = math.ceil(math.ceil(k / dealt) / splits) * dealt
    turn = 16 * lists.steps
    assert channels <= lists.segment
    assert math.ceil(channels / turn) * turn + turn <= lists.length
    assert lists.slot % turn == 0
    assert lists.length % 16 == 0
