"""Every Triton kernel against its slow twin. Run by test_kernels_triton.py in a process of its own: Triton reads
``TRITON_INTERPRET`` when a kernel is decorated. On a machine with a GPU the same cases run compiled.

    TRITON_INTERPRET=1 python -m pytest tests/triton_cases.py
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

from wisparse.kernels.gpu.attention import launch_attention
from wisparse.kernels.gpu.common import room_source
from wisparse.kernels.gpu.delta_net import DeltaInput, DeltaMemory, DeltaTensors, launch_delta_net
from wisparse.kernels.gpu.gemv import GemvTile, Group, Scratch, launch_gemv, program_lists, sparse_gemv
from wisparse.kernels.gpu.head import launch_embed, launch_logits, launch_next
from wisparse.kernels.gpu.masked_gemm import mask_gemm, mask_rows
from wisparse.kernels.gpu.matrix import plain_matrix
from wisparse.kernels.gpu.reduction import NOTHING
from wisparse.kernels.reference import activation_dtype, keep_mask, rows_together, sparse_linear, wide_dtype

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# bf16 casts truncate under the interpreter, so rounding is tested in fp16 there and in bf16 too on a GPU.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
ROUNDING = {torch.float64: 2.0**-44, torch.float32: 2.0**-20, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def make_group(
    widths: tuple[int, ...], k: int, dtype: torch.dtype, sparsity: float, *, bias: bool = False, seed: int = 0
) -> Group:
    generator = torch.Generator().manual_seed(seed)
    n = sum(widths)
    stride = -(-n // 16) * 16
    weight_t = torch.randn(k, stride, generator=generator) / math.sqrt(k)
    scales = torch.rand(len(widths), k, generator=generator) + 0.5
    # |normal| * uniform(0.5, 1.5): one quantile for every projection, nudged so that they differ.
    sample = torch.randn(20000, generator=generator).abs() * (torch.rand(20000, generator=generator) + 0.5)
    levels = [min(1.0, sparsity * (1 + 0.1 * i)) for i in range(len(widths))]
    thresholds = torch.tensor([float(sample.quantile(level)) if 0 < level < 1 else 0.0 for level in levels])
    if sparsity >= 1:
        thresholds.fill_(1e30)
    return Group(
        plain_matrix(weight_t.to(DEVICE, dtype), widths),
        widths,
        torch.randn(n, generator=generator).to(DEVICE, dtype) if bias else None,
        scales.to(DEVICE),
        thresholds.to(DEVICE),
        dense=sparsity == 0,
    )


def twin(x: torch.Tensor, group: Group) -> torch.Tensor:
    """(B, N) float64, each projection by reference.sparse_linear on the same mask."""
    parts = []
    start = 0
    for i, width in enumerate(group.widths):
        weight = group.matrix.data[:, start : start + width].double().T
        mask = keep_mask(x, group.scales[i], group.thresholds[i])
        masked = torch.where(mask, x, x.new_zeros(())).double()
        bias = None if group.bias is None else group.bias[start : start + width].double()
        parts.append(torch.nn.functional.linear(masked, weight, bias))
        start += width
    return torch.cat(parts, dim=1)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """``dtype``: what the values were rounded to on their way; sums are wide."""
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
    torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def rows(batch: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, k, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


TILES = [
    GemvTile(block_n=128, block_k=16, splits=1, unroll=2),
    GemvTile(block_n=64, block_k=32, splits=3, chunk=4, unroll=1, lead=1),
    GemvTile(block_n=128, block_k=8, splits=5, unroll=4),
    GemvTile(block_n=64, block_k=2, splits=3, unroll=2, lead=3),
    GemvTile(block_n=128, block_k=4, splits=5, unroll=2, pollers=1),
    *[GemvTile(block_n=64, block_k=4, splits=5, unroll=2, pollers=n) for n in (2, 4) if not INTERPRETED],
]


BATCH_TILES = [
    GemvTile(block_n=64, block_k=16, splits=1, stages=1),
    GemvTile(block_n=64, block_k=32, splits=3, stages=4),
    GemvTile(block_n=128, block_k=64, splits=2, stages=6, pollers=1),  # 80 KiB on their way: alone on a multiprocessor
    *[GemvTile(block_n=256, block_k=32, splits=5, warps=8, stages=5, pollers=n) for n in (4,) if not INTERPRETED],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("batch", [1, 2, 5])  # one row, rows that share a list, all channels
@pytest.mark.parametrize(
    ("widths", "k", "sparsity", "bias"),
    [
        ((200,), 77, 0.5, False),  # multiples of nothing
        ((128, 37, 37), 130, 0.6, True),  # q, k, v
        ((128,), 96, 0.0, True),
        ((100,), 64, 1.0, True),  # every channel dropped: the bias alone is left
    ],
)
def test_gemv_is_the_twins(dtype, tile, batch, widths, k, sparsity, bias):
    group = make_group(widths, k, dtype, sparsity, bias=bias)
    x = rows(batch, k, dtype)
    assert_close(sparse_gemv(x, group, tile), twin(x, group), dtype)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("batch", [1, 3])
def test_float32_weights_are_added_up_in_float64(tile, batch):
    group = make_group((128, 37), 500, torch.float32, 0.5, bias=True)
    x = rows(batch, 500, torch.float32)
    assert torch.equal(sparse_gemv(x, group, tile), twin(x, group).float())


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("tile", BATCH_TILES)
@pytest.mark.parametrize("batch", [3, 8, 11])
@pytest.mark.parametrize(
    ("widths", "k", "sparsity"), [((200, 60), 77, 0.5), ((128, 128), 640, 0.6), ((256, 64, 64), 640, 0.0)]
)
def test_many_rows_are_the_twins(dtype, tile, batch, widths, k, sparsity):
    group = make_group(widths, k, dtype, sparsity, bias=True)
    x = rows(batch, k, dtype)
    assert_close(sparse_gemv(x, group, tile), twin(x, group), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [TILES[0], TILES[1], replace(TILES[2], lead=1), BATCH_TILES[1]])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_kept_channels_are_counted_row_by_row(dtype, tile, batch):
    group = make_group((128, 37, 80), 130, dtype, 0.6)
    launches = batch // rows_together(batch, dtype)
    x, stored = rows(batch, 130, activation_dtype(dtype)), activation_dtype(dtype)
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(group, tile, batch)
    cells = torch.full((2, launches, 3, tile.splits), 7, dtype=torch.int64, device=DEVICE)
    tokens = torch.arange(batch, device=DEVICE) - int(batch > 1)  # the first of several is idle
    counted = tokens >= 0
    expected = torch.stack([keep_mask(x[counted], group.scales[i], group.thresholds[i]).sum() for i in range(3)])
    outs = []
    for turn in (0, 1, 0, None):
        kept = None if turn is None else (tokens, cells[1 - turn], cells[turn])
        outs.append(torch.full((batch, 245), float("nan"), dtype=stored, device=DEVICE))
        launch_gemv(group, x, outs[-1], scratch, tile, batch=batch, kept=kept)
    assert all(torch.equal(out, outs[-1]) for out in outs)
    assert_close(outs[0], twin(x, group), stored)
    before = 7 * launches * tile.splits
    # The second launch adds to what the first left, and the third to that.
    assert torch.equal(cells.sum((1, 3)) - before, torch.stack([3 * expected, 2 * expected]))


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_lists_longer_than_shared_memory_are_the_twins(batch, lead):
    group = make_group((64,), 6000, torch.float16, 0.5)
    tile = GemvTile(block_n=64, block_k=16, splits=1, stages=3, lead=lead)
    assert room_source(2 * 4 * 6000) == "" != room_source(2 * 4 * 600)
    assert program_lists(replace(group, matrix=group.matrix.to("meta")).layout, tile, batch).in_room == ""
    x = rows(batch, 6000, torch.float16)
    assert_close(sparse_gemv(x, group, tile), twin(x, group), torch.float16)


def test_launches_that_begin_early_leave_the_lists_of_the_one_before_alone():
    # float32's lists lie in scratch memory, the same for all launches; early starts need a GPU of generation 9.0.
    pdl = not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)
    groups = [make_group((96,), 300, torch.float32, 0.5, seed=seed) for seed in (0, 1)]
    tile = GemvTile(block_n=64, block_k=2, splits=4, unroll=2, trigger=1)
    scratch = Scratch(DEVICE, torch.float32)
    xs = [rows(1, 300, torch.float32, seed=seed) for seed in range(4 if INTERPRETED else 200)]
    outs = [torch.full((1, 96), float("nan"), device=DEVICE) for _ in xs]
    scratch.reserve(groups[0], tile)
    for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
        launch_gemv(groups[i % 2], x, out, scratch, tile, pdl=pdl)
    for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
        assert_close(out, twin(x, groups[i % 2]), torch.float32)


@pytest.mark.parametrize(
    "tile",
    [tile for tile in TILES + BATCH_TILES if tile.pollers] + [GemvTile(64, 8, 4, 2, stages=3, trigger=2, pollers=1)],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 8])
def test_launches_one_after_the_other_take_their_own_sums(dtype, tile, batch):
    # A sum that is taken too early, or left over for the next launch, would show in one of many.
    pdl = not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)
    group = make_group((96,), 300, dtype, 0.5)
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(group, tile, batch)
    stored = activation_dtype(dtype)
    xs = [rows(batch, 300, stored, seed=seed) for seed in range(3 if INTERPRETED else 500)]
    runs = []
    for _ in range(2):
        outs = [torch.full((batch, 96), float("nan"), dtype=stored, device=DEVICE) for _ in xs]
        for x, out in zip(xs, outs, strict=True):
            launch_gemv(group, x, out, scratch, tile, batch=batch, pdl=pdl)
        runs.append(outs)
    for x, first, second in zip(xs, *runs, strict=True):
        assert_close(first, twin(x, group), stored)
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "batch"), [(TILES[3], 1), (TILES[2], 2), (BATCH_TILES[1], 5)])
def test_rows_that_are_not_masked_keep_all_channels(dtype, tile, batch):
    group = make_group((64, 37), 130, dtype, 0.5)
    x = rows(batch, 130, activation_dtype(dtype))
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(group, tile, batch)
    whole = twin(x, replace(group, thresholds=torch.zeros_like(group.thresholds)))
    for first in (0, 1):
        masked = torch.tensor([float((row + first) % 2) for row in range(batch)], device=DEVICE)
        out = torch.full((batch, 101), float("nan"), dtype=x.dtype, device=DEVICE)
        launch_gemv(group, x, out, scratch, tile, batch=batch, masked=masked)
        assert_close(out, torch.where(masked[:, None] > 0, twin(x, group), whole), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("copies", "of"), [(None, (0, 1, 2)), ((3, 1, 2), (0, 0, 0, 1, 2, 2))])
def test_copies_of_many_rows_are_masked_as_the_reference(dtype, copies, of):
    group = make_group((8, 8, 8), 1300, dtype, 0.5)
    x = rows(5, 1300, dtype)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    masked = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], device=DEVICE)
    pdl = not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)
    found = mask_rows(x, group.scales, group.thresholds, masked, copies=copies, pdl=pdl)
    assert len(found) == len(of)
    for copy, i in enumerate(of):
        keep = keep_mask(x, group.scales[i], group.thresholds[i]) | (masked[:, None] == 0)
        expected = torch.where(keep, x, x.new_zeros(()))
        assert torch.equal(found[copy].nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.quick
@pytest.mark.parametrize("batch", [1, 3])
def test_a_masked_product_is_the_twins(batch):
    group = make_group((64, 20), 50, torch.float16, 0.5, bias=True)
    x = rows(batch, 50, torch.float16)
    assert_close(sparse_gemv(x, group, GemvTile(block_n=64, block_k=8, splits=2)), twin(x, group), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("widths", "k", "bias"), [((64, 37), 130, True), ((64, 64), 128, False)])
def test_many_rows_in_one_launch_are_the_twins(dtype, widths, k, bias):
    group = make_group(widths, k, dtype, 0.5, bias=bias)
    x = rows(19, k, dtype)
    masked = torch.tensor([float(row % 3 > 0) for row in range(19)], device=DEVICE)
    whole = twin(x, replace(group, thresholds=torch.zeros_like(group.thresholds)))
    found = mask_gemm(x, group, masked, GemvTile(64, 64, 1, stages=3))
    assert_close(found, torch.where(masked[:, None] > 0, twin(x, group), whole), dtype)


def test_twin_here_is_the_reference():
    group = make_group((24, 8), 32, torch.float32, 0.5, bias=True)
    x = rows(2, 32, torch.float32)
    weight = group.matrix.data[:, :24].T
    whole = sparse_linear(x, weight, group.bias[:24], group.scales[0], group.thresholds[0])
    torch.testing.assert_close(twin(x, group)[:, :24].float(), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_poisoned_buffers_do_not_show(dtype, tile, batch):
    group = make_group((72,), 50, dtype, 0.5)
    x = rows(batch, 50, dtype)
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(group, tile, batch)
    scratch.partial.fill_(NOTHING)  # as a number a NaN
    scratch.value.fill_(float("nan"))
    scratch.index.fill_(2**30)
    out = torch.full((batch, 72), float("nan"), dtype=dtype, device=DEVICE)
    for _ in range(2):  # partial sums have to be taken back
        launch_gemv(group, x, out, scratch, tile, batch=batch)
        assert_close(out, twin(x, group), dtype)
    assert (scratch.awaited == NOTHING).all()
    assert not scratch.counter.any()


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU programs run side by side")
def test_several_pollers_are_refused_where_programs_run_in_turn():
    group = make_group((72,), 50, torch.float16, 0.5)
    with pytest.raises(ValueError, match="at most 1 programs that wait for each other on cpu, found 4"):
        sparse_gemv(rows(1, 50, torch.float16), group, GemvTile(block_n=64, splits=4, pollers=2))


@pytest.mark.parametrize("pollers", [-1, 3, 8])
def test_pollers_have_to_fit_the_tile(pollers):
    expected = "power of two up to splits" if pollers > 0 else "pollers: expected an integer of at least 0, found -1"
    with pytest.raises(ValueError, match=expected):
        GemvTile(block_n=64, splits=4, pollers=pollers)


def test_no_sum_is_looked_at_by_two_threads():
    """Seen on a GPU: 4 splits of 16 columns and 128 threads. One saw the last sum arrive, its double had not."""
    GemvTile(block_n=64, splits=4, warps=2, pollers=4)
    with pytest.raises(ValueError, match="for every thread"):
        GemvTile(block_n=64, splits=4, warps=4, pollers=4)


@pytest.mark.parametrize("tile", TILES)
def test_nan_and_inf_go_where_the_twins_go(tile):
    group = make_group((64,), 48, torch.float32, 0.5)
    for value in (float("nan"), float("inf")):
        x = rows(1, 48, torch.float32)
        x[0, 7] = value
        found, expected = sparse_gemv(x, group, tile), twin(x, group)
        assert_close(found, expected, torch.float32)
        assert not found.isfinite().any()
    # All bits set: the NaN that says "no partial sum yet", which would be waited for if it were left.
    half = make_group((64,), 48, torch.float16, 0.5)
    x = rows(1, 48, torch.float16)
    x[0, 7] = torch.tensor(-1, dtype=torch.int16).view(torch.float16)
    half.matrix.data.view(torch.int16)[7] = -1
    assert sparse_gemv(x, half, tile).isnan().all()
    # A dropped channel's weight is never read: an Inf there does not leak.
    x = rows(1, 48, torch.float32)
    x[0, 7] = 0.0
    group.matrix.data[7] = float("inf")
    assert sparse_gemv(x, group, tile).isfinite().all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("batch", [2, 6])
def test_rows_of_a_batch_keep_to_themselves(tile, batch):
    group = make_group((64, 32), 48, torch.float16, 0.5)
    x = rows(batch, 48, torch.float16)
    alone = torch.cat([sparse_gemv(row[None], group, tile) for row in x])
    assert_close(sparse_gemv(x, group, tile), alone, torch.float16)
    for value in (float("nan"), float("inf")):
        broken = x.clone()
        broken[1, 7] = value
        found = sparse_gemv(broken, group, tile)
        assert not found[1].isfinite().any()
        others = [0, *range(2, batch)]
        assert_close(found[others], alone[others], torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("splits", [1, 3])
def test_fused_norm_and_residual(dtype, batch, splits):
    k, n, eps, parts = 80, 144, 1e-5, 3
    stored, wide = activation_dtype(dtype), wide_dtype(dtype)
    group = make_group((n,), k, dtype, 0.5)
    tile = GemvTile(block_n=64, splits=splits)
    hidden, norm = rows(batch, k, stored), (1 + 0.1 * rows(1, k, dtype, seed=2)[0]).to(dtype)
    ssq = torch.zeros(batch, parts, dtype=wide, device=DEVICE)
    ssq[:, 1] = hidden.to(wide).square().sum(1)
    out, before = torch.empty(batch, n, dtype=stored, device=DEVICE), rows(batch, n, stored, seed=3)
    out.copy_(before)
    ssq_out = torch.full((batch, 3), float("nan"), dtype=wide, device=DEVICE)
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(group, tile, batch)
    launch_gemv(
        group, hidden, out, scratch, tile, batch=batch, source="hidden", target="residual",
        norm=norm, eps=eps, ssq_in=ssq, ssq_out=ssq_out,
    )  # fmt: skip
    rstd = torch.rsqrt(hidden.to(wide).square().mean(1, keepdim=True) + eps)
    x = norm * (hidden.to(wide) * rstd).to(stored)
    expected = before.double() + twin(x, group).to(stored).double()
    assert_close(out, expected, stored)
    torch.testing.assert_close(ssq_out.sum(1), out.to(wide).square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(
    "tile",
    [
        *[GemvTile(block_n=64, splits=splits) for splits in (1, 2)],
        *[GemvTile(64, 4, 2, 1, unroll=2, pollers=n) for n in (1, 2) if n == 1 or not INTERPRETED],
    ],
)
def test_gate_and_up_in_one_launch(dtype, batch, tile):
    group = make_group((90, 90), 64, dtype, 0.5, bias=True)
    stored = activation_dtype(dtype)
    x = rows(batch, 64, stored)
    out = torch.full((batch, 90), float("nan"), dtype=stored, device=DEVICE)
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(group, tile, batch)
    launch_gemv(group, x, out, scratch, tile, batch=batch, target="silu")
    both = twin(x, group)
    assert_close(out, torch.nn.functional.silu(both[:, :90]) * both[:, 90:], stored)


def attention_twin(qkv, k_cache, v_cache, positions, cos, sin, heads, window, qk_norm, eps):
    """(B, heads, D) wide, row by row; writes the cache as the kernel does."""
    kv_heads, d = k_cache.shape[1], k_cache.shape[3]
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    out = torch.zeros(len(positions), heads, d, dtype=wide, device=DEVICE)
    for b, p in enumerate(positions.tolist()):
        if p < 0:
            continue
        q, k, v = qkv[b].view(-1, d).split([heads, kv_heads, kv_heads])
        if qk_norm is not None:
            q, k = (
                weight * (t.to(wide) * torch.rsqrt(t.to(wide).square().mean(-1, keepdim=True) + eps)).to(t.dtype)
                for t, weight in ((q, qk_norm[0]), (k, qk_norm[1]))
            )
        half = cos.shape[1]

        def rotate(t, p=p, half=half):
            x1, x2, rest = t[:, :half], t[:, half : 2 * half], t[:, 2 * half :]
            return torch.cat([x1 * cos[p] - x2 * sin[p], x2 * cos[p] + x1 * sin[p], rest], 1)

        q, k = rotate(q), rotate(k)
        k_cache[b, :, p], v_cache[b, :, p] = k, v
        low = max(0, p + 1 - window) if window else 0
        keys, values = k_cache[b, :, low : p + 1].to(wide), v_cache[b, :, low : p + 1].to(wide)
        q = q.to(wide).view(kv_heads, heads // kv_heads, d)
        weights = torch.softmax(q @ keys.transpose(1, 2) / math.sqrt(d), -1)
        out[b] = (weights @ values).view(heads, d)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "rotary", "positions", "window", "qk_norm", "block_t"),
    [
        (4, 2, 16, 16, [37], None, False, 16),
        (4, 2, 16, 16, [37], None, False, None),
        (6, 2, 24, 16, [0, 29, -1], None, True, 16),  # padded head, partial rotary, an idle row
        (4, 4, 32, 32, [50], 10, False, 16),  # sliding window
        (8, 2, 128, 128, [60], None, False, None),  # as most models have them
        (4, 1, 320, 320, [37], None, True, None),  # wide
    ],
)
def test_attention_then_projection(dtype, heads, kv_heads, d, rotary, positions, window, qk_norm, block_t):
    batch, length, splits = len(positions), 64, 4
    stored, wide = activation_dtype(dtype), wide_dtype(dtype)
    qkv = rows(batch, (heads + 2 * kv_heads) * d, stored)
    caches = [rows(batch * kv_heads, length * d, stored, seed=s).view(batch, kv_heads, length, d) for s in (4, 5)]
    angle = torch.rand(length, rotary // 2, generator=torch.Generator().manual_seed(6)) * 6
    cos, sin = angle.cos().to(DEVICE, stored), angle.sin().to(DEVICE, stored)
    norms = tuple((1 + 0.1 * rows(1, d, dtype, seed=s)[0]).to(dtype) for s in (7, 8)) if qk_norm else None
    place = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    expected_caches = [cache.clone() for cache in caches]
    expected = attention_twin(qkv, *expected_caches, place, cos, sin, heads, window, norms, 1e-6)

    out = torch.full((batch, heads, splits, d), float("nan"), dtype=wide, device=DEVICE)
    softmax = (torch.full((batch, heads, splits), float("nan"), dtype=wide, device=DEVICE),) * 2
    softmax = (softmax[0], softmax[0].clone())
    launch_attention(
        qkv, *caches, place.sign().long(), place, cos, sin, out, softmax, heads=heads, scale=d**-0.5, window=window,
        qk_norm=norms, eps=1e-6, **({} if block_t is None else {"block_t": block_t}),
    )  # fmt: skip
    for found, wanted in zip(caches, expected_caches, strict=True):
        assert_close(found, wanted, stored)
    factor = torch.exp2(softmax[0] - softmax[0].amax(2, keepdim=True))
    combined = (out * factor[..., None]).sum(2) / (softmax[1] * factor).sum(2)[..., None]
    active = place >= 0
    assert_close(combined[active], expected[active], stored)

    # o_proj reads the splits itself.
    group = make_group((40,), heads * d, dtype, 0.4)
    tile = GemvTile(block_n=64, splits=2)
    y = torch.full((batch, 40), float("nan"), dtype=stored, device=DEVICE)
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(group, tile, batch)
    launch_gemv(group, out, y, scratch, tile, batch=batch, source="attention", softmax=softmax, head_dim=d)
    assert_close(y[active], twin(combined.to(stored).view(batch, -1), group)[active], stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "passes", "block_k", "codes"),
    [(1, 1, 32, False), (1, 4, 32, True), (1, 4, 64, False), (1, 4, 64, True), (3, 1, 32, False), (3, 1, 32, True)],
)  # rows of 48 in two pieces, or whole; int8 rows
def test_embedding_logits_and_next(dtype, batch, passes, block_k, codes):
    vocabulary, k, eps, parts, block_v = 101, 48, 1e-5, 2, 32
    embedding = rows(vocabulary, k, dtype)
    tokens = torch.tensor([5, -1, 100][:batch], device=DEVICE)
    stored, wide = activation_dtype(dtype), wide_dtype(dtype)
    hidden = torch.full((batch, k), float("nan"), dtype=stored, device=DEVICE)
    ssq = torch.full((batch, parts), float("nan"), dtype=wide, device=DEVICE)
    launch_embed(tokens, embedding, hidden, ssq)
    expected = torch.where(tokens[:, None] < 0, embedding.new_zeros(()), embedding[tokens.clamp(min=0)])
    assert torch.equal(hidden, expected.to(stored))
    torch.testing.assert_close(ssq.sum(1), hidden.to(wide).square().sum(1))

    norm = (1 + 0.1 * rows(1, k, dtype, seed=2)[0]).to(dtype)
    weight = rows(vocabulary, k, dtype, seed=3) / math.sqrt(k)
    scales = None
    if codes:
        scales = weight.float().abs().amax(1) / 127
        weight = torch.round(weight.float() / scales[:, None]).to(torch.int8)
        scales[70] = scales[40]
    weight[70] = weight[40]  # a tie, to be won by the lower id
    tiles = -(-vocabulary // block_v)
    logits = torch.full((batch, vocabulary), float("nan"), device=DEVICE)
    best, best_id = (
        torch.empty(batch, tiles, device=DEVICE),
        torch.empty(batch, tiles, dtype=torch.int32, device=DEVICE),
    )
    launch_logits(
        hidden, ssq, norm, weight, logits, best, best_id, eps=eps, scales=scales, block_k=block_k, block_v=block_v,
        passes=passes,
    )  # fmt: skip
    x = norm * (hidden.to(wide) * torch.rsqrt(hidden.to(wide).square().mean(1, keepdim=True) + eps)).to(stored)
    exact = x.double() @ (weight.double() if scales is None else weight.double() * scales.double()[:, None]).T
    assert_close(logits, exact, dtype)
    if dtype == torch.float32 and not codes:
        assert torch.equal(logits, exact.float())

    positions = torch.tensor([3, 4, 5][:batch], dtype=torch.int32, device=DEVICE)
    following = torch.empty(batch, dtype=torch.int64, device=DEVICE)
    launch_next(best, best_id, tokens, following, positions)
    lowest = [(row == row.max()).nonzero()[0].item() for row in logits]
    assert following.tolist() == [-1 if t < 0 else v for t, v in zip(tokens.tolist(), lowest, strict=True)]
    assert positions.tolist() == [4, 4, 6][:batch]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
def test_delta_net_is_the_rule_position_by_position(dtype, normed):
    """Two steps of three rows, one of them idle, whose sides keep what they hold; heads that share keys, odd sizes."""
    generator = torch.Generator().manual_seed(5)
    activations, wide = activation_dtype(dtype), wide_dtype(dtype)
    hidden, key_heads, heads, key_dim, value_dim, taps, rows = 72, 2, 6, 12, 20, 3, 3
    mixed, values = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim

    def random(*shape, kind=activations):
        return torch.randn(shape, generator=generator).to(kind).to(DEVICE)

    weights = DeltaTensors(
        random(heads, hidden), random(heads, hidden), random(mixed, 1, taps), random(heads), random(heads),
        random(value_dim),
    )  # fmt: skip
    inputs, state = random(2, rows, taps - 1, mixed), random(2, rows, heads, key_dim, value_dim, kind=wide)
    memory = DeltaMemory(inputs, state, inputs.stride(0), state.stride(0))
    tokens = torch.tensor([3, -1, 0], device=DEVICE)
    positions = torch.tensor([4, 4, 7], dtype=torch.int32, device=DEVICE)
    idle = inputs[:, 1].clone(), state[:, 1].clone()
    kept = {row: [side.double() for side in (inputs[at % 2, row], state[at % 2, row])] for row, at in ((0, 4), (2, 7))}
    out = torch.empty(rows, values, dtype=activations, device=DEVICE)
    eps = 1e-5
    norm = random(hidden) if normed else None
    a, b, kernel, log_rate, dt_bias, head_norm = (tensor.double() for tensor in weights)
    silu = torch.nn.functional.silu
    for _ in range(2):
        x, new = random(rows, hidden), random(rows, mixed + values)
        ssq = (x.to(wide) ** 2).sum(1, keepdim=True)
        given = DeltaInput(new, x, ssq if normed else None, norm)
        launch_delta_net(given, weights, memory, tokens, positions, out, key_heads=key_heads, eps=eps)
        for row, (before, s) in kept.items():
            n = x[row].double()
            if norm is not None:
                n = n * (n.square().mean() + eps).rsqrt() * norm.double()
            seen = torch.cat((before, new[row, :mixed].double()[None]))
            c = silu((seen * kernel[:, 0].T).sum(0))
            q, k, v = c.split((key_heads * key_dim, key_heads * key_dim, values))
            q, k = (
                (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads // key_heads, 0)
                for y in (q.view(key_heads, key_dim), k.view(key_heads, key_dim))
            )
            decay = (-log_rate.exp() * torch.nn.functional.softplus(a @ n + dt_bias)).exp()[:, None, None]
            s = s * decay
            recalled = torch.einsum("hkv,hk->hv", s, k)
            s = s + torch.einsum("hk,hv->hkv", k, (b @ n).sigmoid()[:, None] * (v.view(heads, -1) - recalled))
            o = torch.einsum("hkv,hk->hv", s, q * key_dim**-0.5)
            o = o * (o.square().mean(-1, keepdim=True) + eps).rsqrt() * head_norm
            expected = o.flatten() * silu(new[row, mixed:].double())
            kept[row] = [seen[1:], s]
            rtol, atol = (1e-9, 1e-9) if dtype == torch.float32 else (2e-2, 4e-2)
            torch.testing.assert_close(out[row].double(), expected, rtol=rtol, atol=atol)
            side = (int(positions[row]) + 1) % 2
            torch.testing.assert_close(state[side, row].double(), s, rtol=rtol, atol=atol)
            assert torch.equal(inputs[side, row].double(), seen[1:])
        positions += (tokens >= 0).int()
    assert torch.equal(inputs[:, 1], idle[0])
    assert torch.equal(state[:, 1], idle[1])
