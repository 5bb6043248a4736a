"""Every Triton kernel against its slow twin. Run by test_kernels_triton.py in a process of its own: Triton reads
``TRITON_INTERPRET`` when a kernel is decorated. On a machine with a GPU the same cases run compiled.

    TRITON_INTERPRET=1 python -m pytest tests/triton_cases.py
"""

import itertools
import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from wisparse.formats.model_config import DeltaNet, Mamba2
from wisparse.kernels.gpu.attention import (
    AttentionShape,
    QKNorms,
    RotaryTables,
    Rows,
    launch_attention,
)
from wisparse.kernels.gpu.common import Input, KVSplits, Output
from wisparse.kernels.gpu.count import launch_count
from wisparse.kernels.gpu.cudnn import Attended, merge
from wisparse.kernels.gpu.delta_net import DeltaInput, DeltaMemory, DeltaTensors, launch_delta_net
from wisparse.kernels.gpu.gemm import gemm, mask_rows
from wisparse.kernels.gpu.head import Logits, launch_argmax, launch_embed, launch_logits
from wisparse.kernels.gpu.kv_cache import kv_slots
from wisparse.kernels.gpu.launch import Scratch, launch_linear
from wisparse.kernels.gpu.mamba2 import MambaTensors, launch_mamba2
from wisparse.kernels.gpu.products import choose_product
from wisparse.kernels.gpu.reduction import EMPTY
from wisparse.kernels.gpu.short_conv import launch_short_conv
from wisparse.kernels.gpu.tiles import Tile
from wisparse.kernels.gpu.weights import FusedLinear, unquantized
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.decoding.cache import RecurrentState, quantise
from wisparse.runtime.torch.mixers import ConvWeights, DeltaWeights, MambaWeights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# bf16 casts truncate under the interpreter, so rounding is tested in fp16 there and in bf16 too on a GPU.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
# Two roundings of a value; float32: of its sums, of up to 6,000 products.
ROUNDING = {torch.float32: 2.0**-18, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def pairwise(**axes: list) -> tuple[str, list[tuple]]:
    """For parametrize: few cases in which every two values of two axes meet."""
    rows = list(itertools.product(*axes.values()))
    pairs = {row: set(itertools.combinations(enumerate(map(repr, row)), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return ",".join(axes), chosen


def make_linear(
    widths: tuple[int, ...], k: int, dtype: torch.dtype, sparsity: float, *, bias: bool = False, seed: int = 0
) -> FusedLinear:
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
    return FusedLinear(
        unquantized(weight_t.to(DEVICE, dtype), widths),
        torch.randn(n, generator=generator).to(DEVICE, dtype) if bias else None,
        scales.to(DEVICE),
        thresholds.to(DEVICE),
        dense=sparsity == 0,
    )


def launch(
    linear: FusedLinear, given: Input, target: Output, scratch: Scratch | None = None, *, tile: Tile | None = None,
    eps: float = 0.0, **planned: Any,
) -> Scratch:  # fmt: skip
    chosen = choose_product(linear.shape, len(target.out), tile=tile, pdl=planned.pop("pdl", False), **planned)
    scratch = scratch or Scratch(DEVICE, target.out.dtype)
    scratch.reserve(chosen)
    launch_linear(linear, given, target, scratch, chosen, eps=eps)
    return scratch


def apply_linear(x: torch.Tensor, linear: FusedLinear, tile: Tile | None = None) -> torch.Tensor:
    """Through scratch memory that holds poison, and is left as the next launch needs it."""
    out = torch.full((len(x), linear.out_features), float("nan"), dtype=x.dtype, device=DEVICE)
    scratch = Scratch(DEVICE, x.dtype)
    scratch.reserve(choose_product(linear.shape, len(x), tile=tile))
    scratch.partial.fill_(EMPTY)  # as a number a NaN
    scratch.value.fill_(float("nan"))
    scratch.index.fill_(2**30)
    launch(linear, Input(x), Output(out), scratch, tile=tile, pdl=None)
    assert (scratch.polled == EMPTY).all()
    assert not scratch.counter.any()
    return out


def twin(x: torch.Tensor, linear: FusedLinear) -> torch.Tensor:
    """(B, N) float64, each projection by reference.sparse_linear on the same mask."""
    parts = []
    start = 0
    for i, width in enumerate(linear.widths):
        weight = linear.weight.data[:, start : start + width].double().T
        mask = keep_mask(x, linear.scales[i], linear.thresholds[i])
        masked = torch.where(mask, x, x.new_zeros(())).double()
        bias = None if linear.bias is None else linear.bias[start : start + width].double()
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
    Tile(block_n=128, block_k=16, splits=1, unroll=2),
    Tile(block_n=64, block_k=32, splits=3, chunk=4, unroll=1, lead=1),
    Tile(block_n=128, block_k=8, splits=5, unroll=4),
    Tile(block_n=64, block_k=2, splits=3, unroll=2, lead=3),
    Tile(block_n=128, block_k=4, splits=5, unroll=2, reducers=1),
    *[Tile(block_n=64, block_k=4, splits=5, unroll=2, reducers=n) for n in (2, 4) if not INTERPRETED],
]
BATCH_TILES = [
    Tile(block_n=64, block_k=16, splits=1, stages=1),
    Tile(block_n=64, block_k=32, splits=3, stages=4),
    Tile(block_n=128, block_k=64, splits=2, stages=6, reducers=1),  # 80 KiB in flight: alone on a multiprocessor
    *[Tile(block_n=256, block_k=32, splits=5, warps=8, stages=5, reducers=n) for n in (4,) if not INTERPRETED],
]
SHAPES = [
    ((200,), 77, 0.5, False),  # multiples of nothing
    ((128, 37, 37), 130, 0.6, True),  # q, k, v
    ((128,), 96, 0.0, True),
    ((100,), 64, 1.0, True),  # every channel dropped: the bias alone is left
]
BATCH_SHAPES = [((200, 60), 77, 0.5, True), ((128, 128), 640, 0.6, True), ((256, 64, 64), 640, 0.0, True)]
LONG, LONG_TILE = ((64,), 6000, 0.5, False), Tile(block_n=64, block_k=16, splits=1, stages=3)
PDL = not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


# One row, rows that share a list, all channels; many rows.
@pytest.mark.parametrize(
    ("dtype", "tile", "batch", "shape"),
    [
        *pairwise(dtype=DTYPES, tile=TILES, batch=[1, 2, 5], shape=SHAPES)[1],
        *pairwise(dtype=DTYPES, tile=BATCH_TILES, batch=[3, 11, 20], shape=BATCH_SHAPES)[1],
        pytest.param(torch.float16, Tile(64, 8, 2), 1, SHAPES[1], marks=pytest.mark.quick),
        pytest.param(torch.float16, Tile(64, 8, 2), 3, SHAPES[1], marks=pytest.mark.quick),
        # Lists that are longer than shared memory.
        *[(torch.float16, replace(LONG_TILE, lead=lead), batch, LONG) for batch, lead in ((1, 2), (2, 0), (8, 0))],
    ],
)
def test_linears_are_the_twins(dtype, tile, batch, shape):
    widths, k, sparsity, bias = shape
    linear = make_linear(widths, k, dtype, sparsity, bias=bias)
    x = rows(batch, k, dtype)
    if shape is LONG:
        assert choose_product(linear.shape._replace(device=torch.device("meta")), batch, tile=tile).launch.smem == ""
    assert_close(apply_linear(x, linear, tile), twin(x, linear), dtype)


@pytest.mark.parametrize(
    *pairwise(dtype=DTYPES, batch=[1, 5], k=[130, 1152], given=["plain", "normed", "attention"], idle=[None, 1])
)
def test_kept_channels_are_counted_row_by_row(dtype, batch, k, given, idle):
    linear, x, total = make_linear((128, 37, 80), k, dtype, 0.6), rows(batch, k, dtype), torch.tensor([7]).to(DEVICE)
    tokens = None if idle is None else torch.arange(batch, device=DEVICE) - idle  # the first is idle
    inputs = Input(x)
    if given == "normed":
        norm = (1 + 0.1 * rows(1, k, dtype, seed=2)[0]).to(dtype)
        inputs = Input(x, x.float().square().sum(1, keepdim=True), norm)
        x = norm * (x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5)).to(dtype)
    elif given == "attention":  # two splits, each of them x
        parts, sums = x.float().view(batch, -1, 1, 2).expand(-1, -1, 2, -1).contiguous(), torch.ones(batch, k // 2, 2)
        inputs = Input(None, attention=KVSplits(parts, sums.to(DEVICE), sums.to(DEVICE)))
    counted = x if tokens is None else x[tokens >= 0]
    expected = sum(
        width * int(keep_mask(counted, linear.scales[i], linear.thresholds[i]).sum())
        for i, width in enumerate(linear.widths)
    )
    for turn in (1, 2):
        launch_count(linear, inputs, total, tokens=tokens, eps=1e-5, pdl=PDL)
        assert int(total) - 7 == turn * expected


SPINNING = [tile for tile in TILES + BATCH_TILES if tile.reducers]
SPINNING.append(Tile(64, 8, 4, 2, stages=3, trigger=2, reducers=1))


@pytest.mark.parametrize(
    ("tile", "dtype", "batch"),
    [
        *pairwise(tile=SPINNING, dtype=DTYPES, batch=[1, 8])[1],
        # float32's lists lie in scratch memory, the same for all launches; early starts need compute capability 9.0.
        (Tile(block_n=64, block_k=2, splits=4, unroll=2, trigger=1), torch.float32, 1),
    ],
)
def test_launches_one_after_the_other_leave_each_other_alone(dtype, tile, batch):
    # A sum that is taken too early, or left over for the next launch, would show in one of many.
    linears = [make_linear((96,), 300, dtype, 0.5, seed=seed) for seed in (0, 1)]
    xs = [rows(batch, 300, dtype, seed=seed) for seed in range(3 if INTERPRETED else 500)]
    runs, scratch = [], None
    for _ in range(2):
        outs = [torch.full((batch, 96), float("nan"), dtype=dtype, device=DEVICE) for _ in xs]
        for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
            scratch = launch(linears[i % 2], Input(x), Output(out), scratch, tile=tile, pdl=PDL)
        runs.append(outs)
    for i, (x, first, second) in enumerate(zip(xs, *runs, strict=True)):
        assert_close(first, twin(x, linears[i % 2]), dtype)
        assert torch.equal(first, second)


def test_without_spinning_the_last_program_adds_up(monkeypatch):
    linear, x = make_linear((96,), 300, torch.float16, 0.5), rows(1, 300, torch.float16)
    tile = Tile(64, 8, 4, 2, reducers=1)
    found = apply_linear(x, linear, tile)
    monkeypatch.setenv("WISPARSE_SPINNING", "0")
    assert choose_product(linear.shape, 1, tile=tile).tile.reducers == 0
    assert torch.equal(apply_linear(x, linear, tile), found)


@pytest.mark.parametrize(
    *pairwise(dtype=DTYPES[1:], case=[(TILES[3], 1), (TILES[2], 2), (BATCH_TILES[1], 5), (None, 19)], k=[130, 128])
)
def test_rows_that_are_not_masked_keep_all_channels(dtype, case, k):
    """In the decoder's kernels; in vLLM's for many rows (no tile)."""
    tile, batch = case
    linear, x = make_linear((64, 37 if k == 130 else 64), k, dtype, 0.5, bias=k == 130), rows(batch, k, dtype)
    whole = twin(x, replace(linear, thresholds=torch.zeros_like(linear.thresholds)))
    for first in (0, 1):
        masked = torch.tensor([float((row + first) % 2) for row in range(batch)], device=DEVICE)
        if tile is None:
            out = gemm(x, linear, Tile(64, 64, 1, stages=3, block_m=32), row_mask=masked)
        else:
            out = torch.full((batch, linear.out_features), float("nan"), dtype=dtype, device=DEVICE)
            launch(linear, Input(x, row_mask=masked), Output(out), tile=tile)
        assert_close(out, torch.where(masked[:, None] > 0, twin(x, linear), whole), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("copies", "of"), [(None, (0, 1, 2)), ((3, 1, 2), (0, 0, 0, 1, 2, 2))])
def test_copies_of_many_rows_are_masked_as_the_reference(dtype, copies, of):
    linear = make_linear((8, 8, 8), 1300, dtype, 0.5)
    x = rows(5, 1300, dtype)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    masked = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], device=DEVICE)
    found = mask_rows(x, linear.scales, linear.thresholds, masked, copies=copies, pdl=PDL)
    assert len(found) == len(of)
    for copy, i in enumerate(of):
        keep = keep_mask(x, linear.scales[i], linear.thresholds[i]) | (masked[:, None] == 0)
        expected = torch.where(keep, x, x.new_zeros(()))
        assert torch.equal(found[copy].nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    ("tile", "batch"), [*[(TILES[i], 1) for i in (0, 1, 4)], (TILES[1], 2), (TILES[4], 2), (TILES[0], 6)]
)
def test_nan_and_inf_go_where_the_twins_go(tile, batch):
    """And to no other row."""
    linear = make_linear((64,), 48, torch.float32, 0.5)
    for value in (float("nan"), float("inf")):
        x = rows(batch, 48, torch.float32)
        x[-1, 7] = value
        found, expected = apply_linear(x, linear, tile), twin(x, linear)
        assert_close(found, expected, torch.float32)
        assert not found[-1].isfinite().any()
        assert found[:-1].isfinite().all()
    # All bits set: the NaN that says "no partial sum yet", which would be waited for if it were left.
    half = make_linear((64,), 48, torch.float16, 0.5)
    x = rows(1, 48, torch.float16)
    x[0, 7] = torch.tensor(-1, dtype=torch.int16).view(torch.float16)
    half.weight.data.view(torch.int16)[7] = -1
    assert apply_linear(x, half, tile).isnan().all()
    # A dropped channel's weight is never read: an Inf there does not leak.
    x = rows(1, 48, torch.float32)
    x[0, 7] = 0.0
    linear.weight.data[7] = float("inf")
    assert apply_linear(x, linear, tile).isfinite().all()


@pytest.mark.parametrize(*pairwise(dtype=DTYPES, batch=[1, 3, 5], splits=[1, 3]))
def test_fused_norm_and_residual(dtype, batch, splits):
    k, n, eps, parts = 80, 144, 1e-5, 3
    linear, tile = make_linear((n,), k, dtype, 0.5), Tile(block_n=64, splits=splits)
    hidden, norm = rows(batch, k, dtype), (1 + 0.1 * rows(1, k, dtype, seed=2)[0]).to(dtype)
    ssq = torch.zeros(batch, parts, device=DEVICE)
    ssq[:, 1] = hidden.float().square().sum(1)
    out, before = torch.empty(batch, n, dtype=dtype, device=DEVICE), rows(batch, n, dtype, seed=3)
    out.copy_(before)
    ssq_out = torch.full((batch, 3), float("nan"), device=DEVICE)
    given, output = Input(hidden, ssq, norm), Output(out, ssq_out)
    launch(linear, given, output, tile=tile, eps=eps, output="residual", ssq_parts=parts)
    rstd = torch.rsqrt(hidden.float().square().mean(1, keepdim=True) + eps)
    x = norm * (hidden.float() * rstd).to(dtype)
    expected = before.double() + twin(x, linear).to(dtype).double()
    assert_close(out, expected, dtype)
    torch.testing.assert_close(ssq_out.sum(1), out.float().square().sum(1))


@pytest.mark.parametrize(
    *pairwise(
        dtype=DTYPES,
        batch=[1, 2, 5],
        tile=[
            *[Tile(block_n=64, splits=splits) for splits in (1, 2)],
            *[Tile(64, 4, 2, 1, unroll=2, reducers=n) for n in (1, 2) if n == 1 or not INTERPRETED],
        ],
        gated=[True, False],
    )
)
def test_the_activation_is_in_the_launch(dtype, batch, tile, gated):
    linear, x = make_linear((90,) * (1 + gated), 64, dtype, 0.5, bias=True), rows(batch, 64, dtype)
    out = torch.full((batch, 90), float("nan"), dtype=dtype, device=DEVICE)
    launch(linear, Input(x), Output(out), tile=tile, output="silu" if gated else "relu2")
    y = twin(x, linear)
    exact = torch.nn.functional.silu(y[:, :90]) * y[:, 90:] if gated else torch.relu(y).square()
    assert_close(out, exact, dtype)


def kept(x, stored):
    """x as a cache of codes holds it."""
    if stored == "auto":
        return x
    codes, scales = quantise(x, stored)
    return codes.float() * scales[..., None]


def attention_twin(qkv, caches, positions, rotary, shape, norms, eps, stored, sinks):
    """(B, heads, D) float32, row by row; writes the caches as the kernel does."""
    d, group = shape.d, shape.heads // shape.kv_heads
    out = torch.zeros(len(positions), shape.heads, d, device=DEVICE)
    for b, p in enumerate(positions.tolist()):
        if p < 0:
            continue
        q, k, v = qkv[b].view(-1, d).split([shape.heads, shape.kv_heads, shape.kv_heads])
        rotated = []
        for x, norm in zip((q, k), norms, strict=True):
            if norm is not None:
                x = norm * torch.nn.functional.rms_norm(x.float(), (d,), eps=eps).to(x.dtype)
            x1, x2, rest = x.tensor_split((shape.rotary // 2, shape.rotary), 1)
            cos, sin = rotary.cos[p], rotary.sin[p]
            rotated.append(torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], 1))
        for cache, new in zip(caches, (rotated[1], v), strict=True):
            cache[b, :, p] = kept(new, stored)
        low = max(0, p + 1 - shape.window) if shape.window else 0
        keys, values = (cache[b, :, low : p + 1].float().repeat_interleave(group, 0) for cache in caches)
        scores = (rotated[0].float()[:, None] @ keys.transpose(1, 2))[:, 0] / math.sqrt(d)
        scores = scores if sinks is None else torch.cat((scores, sinks.float()[:, None]), 1)
        out[b] = (scores.softmax(-1)[:, None, : keys.shape[1]] @ values)[:, 0]
    return out


ATTENTION = [
    (AttentionShape(4, 2, 16, 16), [290], False),
    (AttentionShape(6, 2, 24, 16), [0, 290, -1], True),  # padded head, partial rotary, an idle row
    (AttentionShape(4, 4, 32, 32, window=150), [290], False),
    (AttentionShape(8, 2, 128, 128), [60], False),  # as most models have them
    (AttentionShape(4, 1, 320, 320), [37], True),  # wide
]


# Codes in float32: a key that is rounded otherwise may have another code.
@pytest.mark.parametrize(
    ("dtype", "shape", "positions", "normed", "stored"),
    [
        *((dtype, *case, "auto") for dtype in DTYPES for case in ATTENTION),
        *((torch.float32, *case, stored) for case, stored in zip(ATTENTION[:3], ("fp8", "int8", "fp8"), strict=True)),
    ],
)
def test_attention_then_projection(dtype, shape, positions, normed, stored):
    batch, length, splits, d = len(positions), 300, 4, shape.d
    qkv = rows(batch, (shape.heads + 2 * shape.kv_heads) * d, dtype)
    cache_shape = batch, shape.kv_heads, length, d
    caches = [rows(batch * shape.kv_heads, length * d, dtype, seed=s).view(cache_shape) for s in (4, 5)]
    angle = torch.rand(length, shape.rotary // 2, generator=torch.Generator().manual_seed(6)) * 6
    rotary = RotaryTables(angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype), None)
    norms = [(1 + 0.1 * rows(1, d, dtype, seed=s)[0]).to(dtype) if normed else None for s in (7, 8)]
    place = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    expected_caches = [kept(cache, stored).clone() for cache in caches]
    # An idle row, one of the first position, and a window.
    sinks = 2 * rows(1, shape.heads, dtype, seed=9)[0] if batch > 1 or shape.window else None
    expected = attention_twin(qkv, expected_caches, place, rotary, shape, norms, 1e-6, stored, sinks)
    slots = torch.arange(batch, dtype=torch.int32, device=DEVICE).flip(0)  # the last row's cache comes first
    caches = [cache.flip(0) for cache in caches]
    if stored != "auto":
        codes, scales = zip(*(quantise(cache, stored) for cache in caches), strict=True)
        caches = [*codes, *scales]
    out = KVSplits(
        torch.full((batch, shape.heads, splits, d), float("nan"), device=DEVICE),
        *torch.full((2, batch, shape.heads, splits), float("nan"), device=DEVICE),
    )
    launch_attention(
        qkv, kv_slots(*caches), Rows(place.sign().long(), place, slots), rotary, out, shape, scale=d**-0.5,
        norms=QKNorms(*norms, 1e-6), sinks=sinks,
    )  # fmt: skip
    if stored != "auto":
        caches = [codes.float() * scales[..., None] for codes, scales in zip(caches[:2], caches[2:], strict=True)]
    for found, wanted in zip(caches, expected_caches, strict=True):
        assert_close(found.flip(0), wanted, dtype)
    factor = torch.exp2(out.maximum - out.maximum.amax(2, keepdim=True))
    combined = (out.x * factor[..., None]).sum(2) / (out.total * factor).sum(2)[..., None]
    active = place >= 0
    assert_close(combined[active], expected[active], dtype)
    # o_proj reads the splits itself.
    linear = make_linear((40,), shape.heads * d, dtype, 0.4)
    y = torch.full((batch, 40), float("nan"), dtype=dtype, device=DEVICE)
    given, tile = Input(None, attention=out), Tile(block_n=64, splits=2)
    launch(linear, given, Output(y), tile=tile, kv_splits=splits, head_dim=d)
    assert_close(y[active], twin(combined.to(dtype).view(batch, -1), linear)[active], dtype)


def attended(queries, keys, values, mask, dtype):
    """Attention of queries (T, heads, D) to keys and values (kv_heads, positions, D) where mask (T, positions), in float64
    but for its result."""
    k, v = (x.double().repeat_interleave(queries.shape[1] // len(x), 0) for x in (keys, values))
    scores = torch.einsum("thd,hsd->hts", queries.double(), k) * queries.shape[2] ** -0.5
    scores.masked_fill_(~mask, float("-inf"))
    out = torch.einsum("hts,hsd->thd", scores.softmax(-1), v).contiguous()
    return Attended(out.to(dtype), scores.logsumexp(-1).float())


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("seed", range(8))
def test_attention_to_parts_of_the_positions_is_merged(dtype, seed):
    """A chunk's own positions and those before it, with sinks and gates as other families have them."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, group, count, start, gated, sunk = (
        int(torch.randint(least, most + 1, (), generator=generator))
        for least, most in ((1, 3), (1, 5), (1, 40), (0, 80), (0, 1), (0, 1))
    )
    heads, d = kv_heads * group, 64
    shape = AttentionShape(heads, kv_heads, d, d, gated=bool(gated))
    keys, values = rows(2 * kv_heads, (start + count) * d, dtype, seed=seed).view(2, kv_heads, start + count, d)
    qkv = rows(count, (heads * (1 + gated) + 2 * kv_heads) * d, dtype, seed=seed + 1)
    queries = rows(count, heads * d, dtype, seed=seed + 2).view(count, heads, d)
    sinks = rows(1, heads, dtype, seed=seed + 3)[0] if sunk else None
    position = torch.arange(start + count, device=DEVICE)
    past = position <= start + torch.arange(count, device=DEVICE)[:, None]
    pieces = [(position >= start) & past, *([(position < start).expand_as(past)] * (start > 0))]
    parts = [attended(queries, keys, values, piece, dtype) for piece in pieces]
    expected, lse = attended(queries, keys, values, past, torch.float64)
    if sinks is not None:
        expected = expected * (lse - torch.logaddexp(lse, sinks.float()[:, None])).exp().T[..., None]
    if gated:
        expected = expected * qkv[:, : 2 * heads * d].view(count, heads, 2, d)[:, :, 1].double().sigmoid()
    assert_close(merge(parts, qkv, sinks, shape), expected, dtype)


# One row: whole rows of the weights, of one block of channels, of one in several passes, and in blocks; several rows.
@pytest.mark.parametrize(
    *pairwise(dtype=DTYPES, size=[(1, 48), (1, 2100), (1, 4200), (3, 300), (17, 300)], int8=[False, True])
)
def test_embedding_logits_and_argmax(dtype, size, int8):
    batch, k = size
    vocabulary, eps, parts = 101, 1e-5, 2
    embedding = rows(vocabulary, k, dtype)
    tokens = torch.tensor(([5, -1, 100] * 6)[:batch], device=DEVICE)
    hidden = torch.full((batch, k), float("nan"), dtype=dtype, device=DEVICE)
    ssq = torch.full((batch, parts), float("nan"), device=DEVICE)
    launch_embed(tokens, embedding, hidden, ssq)
    expected = torch.where(tokens[:, None] < 0, embedding.new_zeros(()), embedding[tokens.clamp(min=0)])
    assert torch.equal(hidden, expected)
    torch.testing.assert_close(ssq.sum(1), hidden.float().square().sum(1))
    norm = (1 + 0.1 * rows(1, k, dtype, seed=2)[0]).to(dtype)
    weight = rows(vocabulary, k, dtype, seed=3) / math.sqrt(k)
    scales = None
    if int8:
        scales = weight.float().abs().amax(1) / 127
        weight = torch.round(weight.float() / scales[:, None]).to(torch.int8)
        scales[70] = scales[40]
    weight[70] = weight[40]  # a tie, to be won by the lower id
    out = Logits.empty(batch, weight)
    out.logit.fill_(float("nan"))
    launch_logits(hidden, ssq, norm, weight, scales, out, eps=eps)
    x = norm * (hidden.float() * torch.rsqrt(hidden.float().square().mean(1, keepdim=True) + eps)).to(dtype)
    exact = x.double() @ (weight.double() if scales is None else weight.double() * scales.double()[:, None]).T
    assert_close(out.logit, exact, dtype)
    positions = torch.arange(3, 3 + batch, dtype=torch.int32, device=DEVICE)
    following = torch.empty(batch, dtype=torch.int64, device=DEVICE)
    launch_argmax(out, tokens, following, positions)
    lowest = [(row == row.max()).nonzero()[0].item() for row in out.logit]
    assert following.tolist() == [-1 if t < 0 else v for t, v in zip(tokens.tolist(), lowest, strict=True)]
    assert positions.tolist() == [3 + i + (t >= 0) for i, t in enumerate(tokens.tolist())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
def test_delta_net_is_the_plain_one_position_by_position(dtype, normed):
    """Two steps of three rows, one of them idle, whose sides keep what they hold; heads that share keys, odd sizes."""
    generator = torch.Generator().manual_seed(5)
    hidden, rows, eps, config = 72, 3, 1e-5, DeltaNet(2, 6, 12, 20, 3)

    def random(*shape, kind=dtype):
        return torch.randn(shape, generator=generator).to(kind).to(DEVICE)

    mixed, heads = config.mixed_size, config.value_heads
    weights = DeltaTensors(
        random(heads, hidden), random(heads, hidden), random(mixed, 1, config.taps), random(heads), random(heads),
        random(config.value_dim),
    )  # fmt: skip
    twin = DeltaWeights(config, *(tensor.double() for tensor in weights), eps)
    inputs = random(2, rows, config.taps - 1, mixed)
    state = random(2, rows, heads, config.key_dim, config.value_dim, kind=torch.float32)
    memory = DeltaMemory(inputs, state, inputs.stride(0), state.stride(0))
    tokens = torch.tensor([3, -1, 0], device=DEVICE)
    positions, slots = torch.tensor([[4, 4, 7], [0, 1, 2]], dtype=torch.int32, device=DEVICE)
    idle = inputs[:, 1].clone(), state[:, 1].clone()
    kept = {
        row: RecurrentState(inputs[at % 2, row].double(), state[at % 2, row].double()) for row, at in ((0, 4), (2, 7))
    }
    out = torch.empty(rows, config.value_size, dtype=dtype, device=DEVICE)
    norm = random(hidden) if normed else None
    for _ in range(2):
        x, new = random(rows, hidden), random(rows, mixed + config.value_size)
        ssq = (x.float() ** 2).sum(1, keepdim=True)
        given = DeltaInput(new, x, ssq if normed else None, norm)
        launch_delta_net(
            given, weights, memory, Rows(tokens, positions, slots), out, key_heads=config.key_heads, eps=eps
        )
        for row, before in kept.items():
            n, own = x[row : row + 1].double(), new[row : row + 1].double()
            if norm is not None:
                n = n * (n.square().mean() + eps).rsqrt() * norm.double()
            expected = twin(n, own[:, :mixed], own[:, mixed:], before)[0]
            rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 4e-2)
            torch.testing.assert_close(out[row].double(), expected, rtol=rtol, atol=atol)
            side = (int(positions[row]) + 1) % 2
            torch.testing.assert_close(state[side, row].double(), before.state, rtol=rtol, atol=atol)
            assert torch.equal(inputs[side, row].double(), before.inputs)
        positions += (tokens >= 0).int()
    assert torch.equal(inputs[:, 1], idle[0])
    assert torch.equal(state[:, 1], idle[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("biased", "groups", "taps"), [(True, 1, 4), (False, 3, 3)])
@pytest.mark.parametrize("in_order", [False, True])
def test_mamba2_is_the_plain_one_position_by_position(dtype, biased, groups, taps, in_order):
    """Rows of two slots and an idle one, or a draft's positions of one slot; odd sizes, one norm for all heads or several."""
    generator, config, eps = torch.Generator().manual_seed(5), Mamba2(6, groups, 20, 12, taps, biased, False), 1e-5

    def random(*shape, kind=dtype):
        return torch.randn(shape, generator=generator).to(kind).to(DEVICE)

    mixed, inner, buffers = config.mixed_size, config.inner, 4
    bias = random(mixed) if biased else None
    weights = MambaTensors(random(mixed, 1, taps), bias, random(6), random(6), random(6), random(inner))
    wide = {name: None if one is None else one.double() for name, one in weights._asdict().items()}
    twin = MambaWeights(config, eps=eps, **wide)
    inputs, state = random(buffers, 3, taps - 1, mixed), random(buffers, 3, 6, 12, 20, kind=torch.float32)
    memory, before = DeltaMemory(inputs, state, inputs.stride(0), state.stride(0)), (inputs.clone(), state.clone())
    tokens = torch.tensor([3, 5, 0] if in_order else [3, -1, 0], device=DEVICE)
    places = [(1, 6), (1, 7), (1, 8)] if in_order else [(2, 5), (1, 0), (0, 0)]
    slots, positions = torch.tensor(places, dtype=torch.int32, device=DEVICE).T.contiguous()
    projected, out = random(3, inner + mixed + 6), torch.empty(3, inner, dtype=dtype, device=DEVICE)
    gated = torch.empty(3, inner, device=DEVICE)
    rows = Rows(tokens, positions, slots)
    launch_mamba2(projected, weights, memory, rows, gated, out, groups=groups, eps=eps, in_order=in_order)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 4e-2)
    kept, written = None, set()
    for row, (slot, at) in enumerate(places):
        if tokens[row] >= 0:
            if kept is None or not in_order:
                kept = RecurrentState(*(one[at % buffers, slot].double() for one in before))
            expected = twin(projected[row : row + 1].double(), kept)[0]
            torch.testing.assert_close(out[row].double(), expected, rtol=rtol, atol=atol)
            side = (at + 1) % buffers, slot
            torch.testing.assert_close(state[side].double(), kept.state, rtol=rtol, atol=atol)
            assert torch.equal(inputs[side].double(), kept.inputs)
            written.add(side)
    for side in itertools.product(range(buffers), range(3)):
        assert side in written or all(
            torch.equal(one[side], old[side]) for one, old in zip((inputs, state), before, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, DTYPES[-1]])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("prompt", "runs"),  # runs: slot, first position, positions; slot -1: idle rows
    [
        (False, [(2, 5, 1), (-1, 0, 1), (0, 0, 1)]),  # a step
        (False, [(1, 6, 4), (0, 1, 2), (-1, 0, 2)]),  # drafts
        (
            True,
            [(1, 7, 9), (-1, 0, 3)],
        ),  # a chunk of a prompt, of as many positions as the cache has states of, and idle
        (True, [(0, 0, 2), (2, 0, 12), (1, 3, 1)]),  # several prompts
    ],
)
def test_the_short_convolution_is_the_plain_one(dtype, biased, prompt, runs):
    """Rows read what rows before them give, or the cache, and write one state each, or a prompt's last."""
    taps, width, buffers, generator = 4, 37, 9, torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    rows, kept = sum(count for *_, count in runs), random(buffers, 3, taps - 1, width)
    projected, kernel, bias = random(rows, 3 * width), random(width, 1, taps), random(width) if biased else None
    twin, before = ConvWeights(kernel.double(), None if bias is None else bias.double()), kept.clone()
    places = [(slot, start + i) for slot, start, count in runs for i in range(count)]
    tokens = torch.tensor([-1 if slot < 0 else 3 for slot, _ in places], device=DEVICE)
    slots, positions = torch.tensor([[max(slot, 0), at] for slot, at in places], dtype=torch.int32, device=DEVICE).T
    out = torch.empty(rows, width, dtype=dtype, device=DEVICE)
    given = Rows(tokens, positions.contiguous(), slots.contiguous())
    launch_short_conv(projected, kernel, bias, kept, given, out, prompt=prompt)
    row, written = 0, set()
    for slot, start, count in runs:
        parts = [projected[row : row + count]] if prompt else projected[row : row + count].split(1)
        row += count
        if slot < 0:
            continue
        state, at = RecurrentState(before[start % buffers, slot].double(), before.new_empty(0)), start
        for part in parts:
            b, c, x = part.chunk(3, dim=1)
            rounded = torch.cat(((b * x).double(), c.double(), torch.ones_like(c).double()), dim=1)
            expected = twin(rounded, state)
            rtol = 4 * ROUNDING[dtype]
            torch.testing.assert_close(
                out[row - count + at - start :][: len(part)].double(), expected, rtol=rtol, atol=rtol
            )
            at += len(part)
            assert torch.equal(kept[at % buffers, slot].double(), state.inputs)
            written.add((at % buffers, slot))
    for buffer, slot in itertools.product(range(buffers), range(3)):
        assert (buffer, slot) in written or torch.equal(kept[buffer, slot], before[buffer, slot])
