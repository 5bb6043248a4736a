"""Compile the Triton kernels for several GPU generations without a GPU; prints one JSON line per kernel.

    python tests/triton_compile.py 80 90 120

Registers, spills and shared memory are read from the binaries. Run by test_kernels_triton.py, without TRITON_INTERPRET.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from wisparse.kernels.gpu import tiles
from wisparse.kernels.gpu.attention import (
    AttentionShape,
    QKNorms,
    RotaryTables,
    Rows,
    launch_attention,
    launch_chunk_attention,
    launch_store_kv,
    launch_store_rows,
)
from wisparse.kernels.gpu.common import Input, KVSplits, Output, Routing
from wisparse.kernels.gpu.count import launch_count
from wisparse.kernels.gpu.cudnn import Attended, merge
from wisparse.kernels.gpu.delta_net import DeltaInput, DeltaMemory, DeltaTensors, launch_delta_net
from wisparse.kernels.gpu.expert_gemm import expert_gemm, sort_by_expert
from wisparse.kernels.gpu.experts import (
    ExpertLinear,
    Router,
    empty_experts,
    launch_router,
)
from wisparse.kernels.gpu.gemm import gemm, mask_rows
from wisparse.kernels.gpu.head import Logits, launch_argmax, launch_embed, launch_logits
from wisparse.kernels.gpu.kv_cache import kv_slots
from wisparse.kernels.gpu.latent import (
    LatentShape,
    launch_latent_attention,
    launch_latent_norms,
    launch_latent_queries,
    launch_latent_values,
)
from wisparse.kernels.gpu.launch import Scratch, launch_linear
from wisparse.kernels.gpu.mamba2 import MambaTensors, launch_mamba2
from wisparse.kernels.gpu.packed_gemv import subnormal_kernel, sum_source
from wisparse.kernels.gpu.products import choose_product
from wisparse.kernels.gpu.reduction import ParallelExperts, launch_activate, launch_combine, launch_residual_add
from wisparse.kernels.gpu.sample import Choice, SampleState, launch_sample
from wisparse.kernels.gpu.short_conv import launch_short_conv
from wisparse.kernels.gpu.tiles import Gpu, Tile
from wisparse.kernels.gpu.weights import FusedLinear, empty_weight, widen

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I8, I32, I64 = torch.int8, torch.int32, torch.int64
TYPES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP64: "fp64", I8: "i8", I32: "i32", I64: "i64"}
TYPES |= {torch.int16: "i16", torch.uint16: "u16"}
META = torch.device("meta")
SHAPES = {  # Llama-3.1-8B's: K, widths, source, target
    "qkv": (4096, (4096, 1024, 1024), "hidden", "plain"),
    "o": (4096, (4096,), "attention", "residual"),
    "gate_up": (4096, (14336, 14336), "hidden", "silu"),
    "down": (14336, (4096,), "plain", "residual"),
}
LLAMA = AttentionShape(32, 8, 128, rotary=128)
VOCABULARY = 128256
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def launched(arch: int, launch: Callable[[], object]) -> dict[str, Any]:
    """The kernels, by name, that ``launch`` launches on meta tensors, compiled instead; every pointer and int is taken as
    divisible by 16."""
    found = {}

    def compile_kernel(kernel: JITFunction, *given: Any, grid: object, warmup: bool, **options: Any) -> None:
        attrs: dict[tuple[int, ...], list] = {}
        values: dict[tuple[int, ...], Any] = {}

        def type_of(path: tuple[int, ...], value: Any) -> Any:
            if isinstance(value, (Tensor, int)):
                attrs[path] = [["tt.divisibility", 16]]
                return "i32" if isinstance(value, int) else f"*{TYPES[value.dtype]}"
            if isinstance(value, tuple):
                inner = [type_of((*path, i), one) for i, one in enumerate(value)]
                return tuple(inner) if type(value) is tuple else type(value)(*inner)
            return "fp32" if isinstance(value, float) else constant(path, value)

        def constant(path: tuple[int, ...], value: Any) -> str:
            values[path] = value
            return "constexpr"

        given += tuple(options[name] for name in kernel.arg_names[len(given) :])
        signature = {
            parameter.name: (constant if parameter.is_constexpr else type_of)((i,), value)
            for i, (parameter, value) in enumerate(zip(kernel.params, given, strict=True))
        }
        source = ASTSource(kernel, signature, values, attrs)
        given_options = {"num_warps": 4, "maxnreg": None} | options
        warps = {name: given_options[name] for name in ("num_warps", "maxnreg")}
        found[kernel.__name__] = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=warps)

    with patch.object(JITFunction, "run", compile_kernel):
        launch()
    return found


def resources(compiled) -> dict[str, int]:
    """Registers and local memory (spills) of one thread, from the binary; shared memory from the compiler, and what the
    kernel itself declares, from its PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([str(_CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout + done.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {done.stdout} {done.stderr}")
    registers, stack, _, local = map(int, found.groups())
    declared = sum(map(int, re.findall(r"\.shared \.align 16 \.b8 smem\[(\d+)\]", compiled.asm["ptx"])))
    return {
        "registers": registers, "stack": stack, "local": local, "shared": compiled.metadata.shared, "declared": declared,
        "polls_shared": polls_shared(compiled), "waits": compiled.asm["ptx"].count("griddepcontrol.wait"),
    }  # fmt: skip


def polls_shared(compiled) -> int:
    """Polls of partial sums (volatile loads) in which a number has more than one register, from the compiler's layouts;
    -1: there are none."""
    source = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", source, re.MULTILINE))
    shared = 0
    polls = [line for line in source.splitlines() if "tt.load" in line and "isVolatile = true" in line]
    for line in polls:
        shape, layout = re.search(r"tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", line).groups()  # type: ignore[union-attr]
        factors = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", layouts[layout])
        covered = [math.prod(numbers) for numbers in zip(*(map(int, f.split(",")) for f in factors), strict=True)]
        shared += any(n > size for n, size in zip(covered, map(int, shape.split("x")), strict=True))
    return shared if polls else -1


def llama_linear(
    group: str, dense: bool, dtype: torch.dtype = BF16, quant: tuple[str, int, bool] = ("none", 0, False)
) -> FusedLinear:
    """``quant``: the weights' type, group (0: all channels) and whether there are zero points."""
    k, widths, _, _ = SHAPES[group]
    kind, size, zeros = quant
    planes = 2 if kind == "graded" else 1
    kind, rows = ("int4", 2 * k) if planes == 2 else (kind, k)
    weight = empty_weight(kind, rows, widths, planes * size or None, dtype, META, zeros=zeros, planes=planes)
    parts = len(widths)
    return FusedLinear(weight, None, empty(parts, k, dtype=FP32), empty(parts * planes, dtype=FP32), dense)


def input_of(source: str, batch: int, k: int, dtype: torch.dtype = BF16, norm: torch.dtype | None = None) -> Input:
    x, sums = empty(batch, k, dtype=dtype), empty(batch, k // 128, 16 // batch, dtype=FP32)
    if source == "attention":
        return Input(None, attention=KVSplits(empty(*sums.shape, 128, dtype=FP32), sums, sums))
    return Input(x) if source == "plain" else Input(x, empty(batch, 16, dtype=FP32), empty(k, dtype=norm or dtype))


def count(arch: int, group: str, batch: int, quant: tuple[str, int, bool] = ("none", 0, False)) -> None:
    linear, (k, _, source, _) = llama_linear(group, False, BF16, quant), SHAPES[group]
    tokens, total = empty(batch, dtype=I64), empty(2, dtype=I64)
    launch_count(linear, input_of(source, batch, k), total, tokens=tokens, pdl=arch >= 90)


def count_experts(arch: int, k: int, rows: int) -> None:
    expert, total = empty(8, 8, dtype=I32), empty(2, dtype=I64)
    launch_count(of_experts(k, ("graded", 128), BF16), Input(empty(rows, k)), total, expert=expert, pdl=arch >= 90)


def gemv(
    arch: int, tile: Tile | None, group: str, batch: int = 1, dense: bool = False, dtype: torch.dtype = BF16,
    pdl: bool | None = None, by_row: bool = False, norm: torch.dtype | None = None,
    quant: tuple[str, int, bool] = ("none", 0, False), **ends: str,
) -> None:  # fmt: skip
    """The linear as Llama-3.1-8B launches it for ``group``; ``by_row``: as vLLM does; ``norm`` (type of the norm's weights), ``source`` and ``target``: as other families do."""
    linear, (k, _, source, target) = llama_linear(group, dense, dtype, quant), SHAPES[group]
    if by_row:
        source = target = "plain"
    source, target, splits = ends.get("source", source), ends.get("target", target), 16 // batch
    given, sums = input_of(source, batch, k, dtype, norm), empty(batch, k // 128, splits, dtype=FP32)
    chosen = choose_product(
        linear.shape, batch, gpu=Gpu(arch, 1 << 20), output=target, ssq_parts=16, tile=tile, pdl=pdl,
        **({"kv_splits": splits, "head_dim": 128} if source == "attention" else {}),
    )  # fmt: skip
    scratch = Scratch(META, dtype)
    scratch.reserve(chosen)
    out = Output(empty(batch, linear.out_features, dtype=dtype), sums if target == "residual" else None)
    launch_linear(linear, given._replace(row_mask=empty(batch, dtype=FP32) if by_row else None), out, scratch, chosen)


def attention(
    arch: int, rows: int = 0, dtype: torch.dtype = BF16, splits: int = 16, stages: int = 3,
    norm: torch.dtype | None = None, scaled: bool = False, cached: torch.dtype | None = None, stored: bool = False,
    sunk: bool = False, attended: int = 0, **changes: Any,
) -> None:  # fmt: skip
    """Llama-3.1-8B's, of a step or a short prompt's ``rows``; ``norm``: type of q and k norms' weights; ``cached``: of the
    cache's codes; ``changes``: of the shape, as other families have."""
    shape = LLAMA._replace(**changes)
    qkv = empty(rows or 1, (shape.heads * (1 + shape.gated) + 2 * shape.kv_heads) * shape.d, dtype=dtype)
    cache = empty(1, shape.kv_heads, 64, shape.d, dtype=cached or dtype)
    angles, scales = empty(64, shape.rotary // 2, dtype=dtype), [empty(1, shape.kv_heads, 64, dtype=FP32)] * 2
    norms = QKNorms(*[None if norm is None else empty(shape.d, dtype=norm)] * 2, 1e-5)
    slots = kv_slots(cache, cache, *(scales if cached else ()))
    rotary = RotaryTables(angles, angles, empty(64, dtype=dtype) if scaled else None)
    sinks = empty(shape.heads, dtype=dtype) if sunk else None
    if rows:
        q = empty(rows, shape.heads, shape.d)
        own = empty(2, shape.kv_heads, rows, shape.d) if attended else None
        launch_store_kv(qkv, empty(3, dtype=I64), slots, rotary, q, shape, norms, own)
        if attended:
            merge([Attended(q, empty(shape.heads, rows, dtype=FP32))] * attended, qkv, sinks, shape)
        else:
            launch_chunk_attention(q, qkv, empty(3, dtype=I64), slots, q, shape, 0.1, sinks=sinks)
        return
    sums, step = empty(1, shape.heads, splits, dtype=FP32), Rows(empty(1, dtype=I64), *empty(2, 1, dtype=I32))
    if stored:
        launch_store_rows(qkv, slots, step, rotary, shape, norms, pdl=arch >= 90)
    launch_attention(
        qkv, slots, step, rotary,
        KVSplits(empty(*sums.shape, shape.d, dtype=FP32), sums, sums), shape, scale=0.1, norms=norms, stages=stages,
        stored=stored, sinks=sinks, pdl=arch >= 90,
    )  # fmt: skip


def latent(
    arch: int,
    rows: int = 1,
    heads: int = 20,
    dtype: torch.dtype = BF16,
    cached: torch.dtype | None = None,
    splits: int = 16,
) -> None:
    """GLM-4.7-Flash's attention, with 128 heads DeepSeek-V3's, of a step or a prompt of many rows."""
    sizes = (768, 512, 64, 192, 256) if heads == 20 else (1536, 512, 64, 128, 128)
    shape, step = LatentShape(heads, *sizes, 576), Rows(empty(rows, dtype=I64), *empty(2, rows, dtype=I32))
    keys, scales, pdl = (
        empty(1, 1, 64, 576, dtype=cached or dtype),
        [empty(1, 1, 64, dtype=FP32)] * 2,
        arch >= 90 and rows <= 16,
    )
    slots, angles = kv_slots(keys, keys, *(scales if cached else ())), empty(64, 32, dtype=dtype)
    rotary, kv_b = RotaryTables(angles, angles, None), empty(heads, shape.key_dim + shape.value_dim, 512, dtype=dtype)
    norms = empty(shape.query_rank, dtype=dtype), empty(512, dtype=dtype)
    x, q = (empty(rows, shape.query_rank + width, dtype=dtype) for width in (576, 0))
    launch_latent_norms(x, *norms, rotary, slots, step, q, shape, eps=1e-6, pdl=pdl)
    queries = empty(rows, heads * (shape.key_dim + 64), dtype=dtype)
    latents = empty(rows, heads, 576, dtype=dtype)
    launch_latent_queries(queries, kv_b, rotary, step, latents, shape, pdl=pdl)
    sums = empty(rows, heads, splits if rows <= 16 else 1, dtype=FP32)
    attended = KVSplits(empty(*sums.shape, 512, dtype=FP32), sums, sums)
    with patch("wisparse.kernels.gpu.latent.gpu_of", lambda _: Gpu(arch, 132)):
        launch_latent_attention(latents, slots, step, attended, shape, 0.1, pdl=pdl)
    launch_latent_values(attended, kv_b, empty(rows, heads * shape.value_dim, dtype=dtype), shape, pdl=pdl)


def logits(
    arch: int, batch: int = 1, dtype: torch.dtype = BF16, norm: torch.dtype | None = None, int8: bool = False
) -> None:
    hidden, weight = empty(batch, 4096, dtype=dtype), empty(VOCABULARY, 4096, dtype=I8 if int8 else dtype)
    norm_of = (None, None) if batch > 16 else (empty(batch, 16, dtype=FP32), empty(4096, dtype=norm or dtype))
    launch_logits(
        hidden, *norm_of, weight, empty(VOCABULARY, dtype=FP32) if int8 else None, Logits.empty(batch, weight), eps=1e-5,
        pdl=arch >= 90,
    )  # fmt: skip


def delta(arch: int, dtype: torch.dtype = BF16) -> None:
    """Qwen3.5-4B's: hidden state 2560, 16 key heads and 32 value heads, each 128 wide."""
    one, state = empty(1, dtype=dtype), empty(2, 1, 32, 128, 128, dtype=FP32)
    given = DeltaInput(one, empty(1, 2560, dtype=dtype), empty(1, 16, dtype=FP32), empty(2560, dtype=FP32))
    weights = DeltaTensors(one, one, empty(8192, 1, 4, dtype=dtype), one, one, one)
    rows = Rows(empty(1, dtype=I64), *empty(2, 1, dtype=I32))
    launch_delta_net(given, weights, DeltaMemory(one, state, 1, 1), rows, one, key_heads=16, eps=1e-5, pdl=arch >= 90)


def mamba2(arch: int, heads: int, groups: int, dtype: torch.dtype = BF16, biased: bool = True) -> None:
    """Granite 4.0 H Micro's (48 heads, 1 group) and Nemotron-H 8B's (128, 8): heads of 64, states of 128."""
    mixed, rows = 64 * heads + 256 * groups, Rows(empty(1, dtype=I64), *empty(2, 1, dtype=I32))
    one, out = empty(heads, dtype=dtype), empty(1, 64 * heads, dtype=dtype)
    bias = empty(mixed, dtype=dtype) if biased else None
    weights = MambaTensors(empty(mixed, 1, 4, dtype=dtype), bias, one, one, one, out[0])
    memory = DeltaMemory(one, empty(2, 1, heads, 128, 64, dtype=FP32), 1, 1)
    gated = empty(1, 64 * heads, dtype=FP32)
    launch_mamba2(one, weights, memory, rows, gated, out, groups=groups, eps=1e-5, pdl=arch >= 90)


def short_conv(arch: int, taps: int = 3, **more: Any) -> None:
    """LFM2-1.2B's."""
    rows = Rows(empty(8, dtype=I64), *empty(2, 8, dtype=I32))
    launch_short_conv(
        empty(8, 6144), empty(2048, 1, taps), None, empty(4, 8, taps - 1, 2048), rows, empty(8, 2048), pdl=arch >= 90,
        **more,
    )  # fmt: skip


def of_experts(k: int, quant: tuple[str, int | None], dtype: torch.dtype, gated: bool = True) -> ExpertLinear:
    """Qwen3-30B-A3B's: gate and up, or up alone, for k = 2048, down for k = 768."""
    (kind, group), planes, widths = quant, 1, (768,) * (1 + gated) if k == 2048 else (2048,)
    if kind == "graded":
        kind, k, group, planes = "int4", 2 * k, 256, 2
    return empty_experts(128, 8, kind, k, widths, group, dtype, META, planes=planes)


def experts(
    arch: int, k: int, rows: int = 1, quant: tuple[str, int | None] = ("none", None), dense: bool = False,
    dtype: torch.dtype = BF16, biased: bool = False, gated: bool = True,
) -> None:  # fmt: skip
    """``biased``: as gpt-oss has them; not ``gated``: as Nemotron 3."""
    gate_up, linear = k == 2048, of_experts(k, quant, dtype, gated)
    linear = replace(linear, dense=dense, bias=empty(128, linear.out_features, dtype=dtype) if biased else None)
    output = "residual" if not gate_up else "clamped" if biased else "silu" if gated else "relu2"
    chosen = choose_product(linear.shape, rows, output=output, ssq_parts=32, pdl=arch >= 90, clamp=(1.702, 7.0))
    scratch = Scratch(META, dtype)
    scratch.reserve(chosen)
    pairs, hidden = empty(rows * 8, 768, dtype=dtype), empty(rows, 2048, dtype=dtype)
    sums = empty(rows, 64, dtype=FP32)
    launch_linear(
        linear, Input(hidden, sums, empty(2048, dtype=dtype)) if gate_up else Input(pairs),
        Output(pairs) if gate_up else Output(hidden, sums), scratch, chosen,
        routing=Routing(empty(rows, 8, dtype=I32), empty(rows, 8, dtype=FP32)),
    )  # fmt: skip


def many_experts(
    arch: int,
    k: int,
    quant: tuple[str, int | None] = ("none", None),
    first_sparse: int | None = None,
    biased: bool = False,
    gated: bool = True,
) -> None:
    gate_up, linear = k == 2048, of_experts(k, quant, BF16, gated)
    bias = empty(128, linear.out_features) if biased else None
    linear = replace(linear, dense=first_sparse is None, bias=bias)
    groups = sort_by_expert(empty(1000, 8, dtype=I32), 128)
    tile = choose_product(linear.shape, 1000, "prompt", gpu=Gpu(arch, 132)).tile
    activation = "plain" if not gate_up else "clamped" if biased else "silu" if gated else "relu2"
    expert_gemm(
        empty(1000 if gate_up else 8000, k), linear, groups, empty(8000, 768) if gate_up else empty(1000, 8, 2048),
        tile, weight=empty(1000, 8, dtype=FP32), activation=activation, clamp=(1.702, 7.0), first_sparse=first_sparse,
    )  # fmt: skip


def router(arch: int, **more: Any) -> None:
    launch_router(
        Input(empty(1, 2048), empty(1, 64, dtype=FP32), empty(2048)), Router(empty(129, 2048), 128, 8, 1, True, **more),
        empty(1, 129, dtype=FP32), empty(1, dtype=I32), Routing(empty(1, 9, dtype=I32), empty(1, 9, dtype=FP32)),
        pdl=arch >= 90,
    )  # fmt: skip


def codes(rows: int, quant: tuple[str, int, bool]) -> None:
    linear = llama_linear("qkv", True, BF16, quant)
    tile = tiles.gemm_tile(linear.shape, rows, Gpu(90, 132))
    assert tile is not None
    gemm(empty(rows, 4096), linear, tile, counter=empty(256, dtype=I32))


def linear_cases(arch: int) -> Iterator[tuple[str, partial]]:
    def tile_of(group: str, kind: str, *, measured: bool = False) -> Tile:
        if not measured:
            return tiles.default_tile(Gpu(arch, 132), llama_linear(group, kind == "dense").shape, kind)
        k, widths, _, _ = SHAPES[group]
        return tiles.measured_tiles()[f"sm90:{kind}:{k}x{sum(widths)}"]

    def linear(name: str, tile: Tile, group: str, batch: int = 1, ending: str = "", **changes: Any):
        return f"gemv {group} {name}{' waiting' * bool(tile.reducers)}{ending}", partial(
            gemv, tile=tile, group=group, batch=batch, **changes
        )

    for group in SHAPES:
        for measured in (False, True) if arch == 90 else (False,):
            for kind, batch in (("sparse", 1), ("dense", 1), ("rows", 2), ("batch", 8), ("batch", 11)):
                if batch == 11 and not measured:
                    continue
                dense, ending = kind == "dense", ", as measured" * measured
                case = f"{kind} {batch}", tile_of(group, kind, measured=measured), group, batch, ending
                yield linear(*case, dense=dense)
        yield linear("fp32", tile_of(group, "sparse"), group, dtype=FP32)
        yield linear("batch 8 fp32", tile_of(group, "batch"), group, 8, dtype=FP32)
    # Programs without a block of channels, and the least that a spinning reducer may have.
    yield linear("batch 8 idle", Tile(128, 64, 2048, stages=3, unroll=1), "down", 8)
    for group in ("qkv", "down"):
        yield linear("least sparse 1", Tile(64, 4, 5, 4, unroll=2, reducers=4), group)
    for group, kind, batch in (("qkv", "sparse", 1), ("o", "rows", 2), ("down", "batch", 8)) if arch == 90 else ():
        tile = tile_of(group, kind, measured=True)
        yield linear(f"{kind} {batch} by row", tile, group, batch, pdl=False, by_row=True)
    for name, changes, launches in (  # what families beyond Llama's launch
        ("gelu", {"norm": FP32, "target": "gelu_tanh"}, "gate_up sparse 1, gate_up batch 8"),
        ("relu2", {"target": "relu2"}, "gate_up sparse 1, gate_up rows 2, gate_up batch 8"),
        ("offset", {"norm": FP32}, "qkv sparse 1, qkv rows 2, qkv batch 8"),
        ("unnormed", {"source": "plain"}, "qkv sparse 1"),
        ("beside", {"target": "plain"}, "o sparse 1, down batch 8"),
    ):
        for group, kind, batch in map(str.split, launches.split(", ")):
            yield linear(f"{kind} {batch} {name}", tile_of(group, kind), group, int(batch), **changes)
    for quant, dtype, launches in (
        (("int4", 128, False), BF16, "gate_up 1 dense, gate_up 1, o 1, down 2, gate_up 8"),
        (("int4", 64, True), FP16, "qkv 1"),
        (("int4", 128, True), BF16, "qkv 16 dense, gate_up 32"),
        (("int8", 0, False), BF16, "gate_up 1, down 32 dense"),
        (("int8", 0, False), FP16, "o 1 dense"),
        (("int8", 128, True), BF16, "down 8 dense"),
        (("fp8", 0, False), BF16, "down 1"),
        (("fp8", 0, False), FP16, "qkv 8, qkv 32"),
        (("graded", 128, False), BF16, "gate_up 1 dense, qkv 1, o 1, gate_up 8, o 32"),
        (("graded", 128, False), FP16, "down 2"),
    ):
        for group, count, *more in map(str.split, launches.split(", ")):
            rows, dense = int(count), bool(more)
            tile, _ = tiles.choose_tile(Gpu(arch, 132), llama_linear(group, dense, dtype, quant).shape, rows)
            name = f"{quant[0]}-{quant[1]} {tiles.regime(rows, dense=dense)} {rows}"
            ends = {"source": "plain", "target": "plain"} if rows > 16 else {}
            yield linear(name, tile, group, rows, dense=dense, dtype=dtype, quant=quant, **ends)


def compiled_cases(arch: int, only: str = "") -> Iterator[tuple[str, Any]]:
    """Name and compiled kernel of every variant that is watched, if the name begins with ``only``."""
    gemma = {"heads": 8, "kv_heads": 4, "d": 256, "rotary": 256}
    wide = {"norm": BF16, "value_norm": True}
    widest = {**wide, "kv_heads": 4, "d": 512, "rotary": 512, "shared": True}
    capped = {**gemma, "softcap": 50.0, "window": 4096}
    pdl, hidden, ids, place = arch >= 90, empty(1, 4096), empty(1, dtype=I64), empty(1, dtype=I32)
    found, state = Logits.empty(1, empty(VOCABULARY, 4096)), SampleState.empty(1, VOCABULARY, META)
    qkv, many, by_row = llama_linear("qkv", False), empty(64, 4096), empty(64, dtype=FP32)
    add = partial(launch_residual_add, hidden, hidden, empty(1, 1, dtype=FP32), pdl=pdl)
    draw = partial(launch_sample, found, Choice(ids, ids, place), state, pdl=pdl)
    cases = {
        **{name: partial(launch, arch) for name, launch in linear_cases(arch)},
        "attention": partial(attention, arch),
        "attention short": partial(attention, arch, splits=4),
        "attention of rows stored": partial(attention, arch, stored=True),
        "attention of rows stored gated": partial(attention, arch, stored=True, norm=FP32, gated=True),
        "attention fp32": partial(attention, arch, dtype=FP32),
        "attention sunk": partial(attention, arch, sunk=True, d=64, rotary=64, window=128, heads=64),
        "attention sunk fp32": partial(attention, arch, dtype=FP32, sunk=True, d=64, rotary=64),
        **({f"attention {n} stretches": partial(attention, arch, splits=n, stages=5) for n in (8, 16)} if arch == 90 else {}),
        "attention head norm offset": partial(attention, arch, norm=FP32, **gemma),
        "attention rotated head norm": partial(attention, arch, norm=BF16, norm_of="rotated head"),
        "attention whole norm": partial(attention, arch, norm=BF16, norm_of="whole", kv_heads=32),
        "attention capped": partial(attention, arch, **capped),
        "attention interleaved": partial(attention, arch, interleaved=True, rotary=64),
        "attention unrotated": partial(attention, arch, rotary=0),
        "attention scaled": partial(attention, arch, scaled=True),
        "attention gated": partial(attention, arch, norm=FP32, gated=True, heads=16, kv_heads=4, d=256, rotary=64),
        "attention gates last": partial(attention, arch, norm=BF16, gated=True, gates_last=True, kv_heads=2),
        "attention 512 wide": partial(attention, arch, **widest),
        "attention 512 wide fp32": partial(attention, arch, dtype=FP32, **{**widest, "norm": FP32}),
        "attention 512 wide short": partial(attention, arch, splits=4, **widest),
        "attention 256 wide": partial(attention, arch, kv_heads=16, d=256, rotary=256, window=1024, **wide),
        "chunk 16": partial(attention, arch, rows=16),
        "chunk normed": partial(attention, arch, rows=16, norm=FP32, gated=True, scaled=True),
        "chunk gates last": partial(attention, arch, rows=128, gated=True, gates_last=True),
        "chunk 128": partial(attention, arch, rows=128),
        **{f"{name} {kind}": partial(attention, arch, cached=stored, **given) for name, given in (
            ("attention", {}), ("attention 256 wide fp16", {"dtype": FP16, **capped}), ("chunk 128", {"rows": 128}),
        ) for kind, stored in (("int8", I8), ("fp8", torch.float8_e4m3fn))},
        **({f"chunk attended {n}": partial(attention, arch, rows=128, attended=n, sunk=n == 1, gated=n > 1) for n in (1, 2)} if arch == 90 else {}),
        "chunk sunk": partial(attention, arch, rows=128, sunk=True, d=64, rotary=64, window=128, heads=64),
        "chunk capped": partial(attention, arch, rows=128, gated=True, **capped),
        **{f"{name} {kind}": partial(latent, arch, cached=stored, **given) for name, given in (
            ("latent", {}), ("latent batch", {"rows": 16, "splits": 1, "heads": 128}), ("chunk latent", {"rows": 512}),
            ("chunk latent 128 heads wide", {"rows": 512, "heads": 128}),
        ) for kind, stored in (("", None), ("int8", I8), ("fp8", torch.float8_e4m3fn))},
        "latent fp32": partial(latent, arch, dtype=FP32),
        "latent fp16 int8": partial(latent, arch, dtype=FP16, cached=I8),
        "delta net": partial(delta, arch),
        "delta net fp32": partial(delta, arch, dtype=FP32),
        "mamba2": partial(mamba2, arch, 48, 1),
        "mamba2 fp32": partial(mamba2, arch, 128, 8, dtype=FP32, biased=False),
        "short conv": partial(short_conv, arch),
        "short conv of a prompt": partial(short_conv, arch, prompt=True),
        **{f"logits batch {batch}{name}": partial(logits, arch, batch=batch, **changes) for batch in (1, 4, 32)
           for name, changes in {
               "": {}, " fp32": {"dtype": FP32}, " offset": {"norm": FP32}, " int8": {"int8": True},
           }.items()},
        "add offset": partial(add, norm=empty(4096, dtype=FP32)),
        "add norm": partial(add, norm=hidden[0]),
        "add multiplied": partial(add, multiplier=0.22),
        "add beside": partial(add, norm=hidden[0], scalar=empty(1), parallel=ParallelExperts(hidden, hidden[0], hidden[0])),
        "add scaled": partial(add, norm=hidden[0], scalar=empty(1)),
        "add, then norm": partial(add, next_norm=hidden[0], normed=hidden),
        "activate": partial(launch_activate, empty(64, 28672), "silu", pdl=pdl),
        "relu2": partial(launch_activate, empty(64, 14336), "relu2", pdl=pdl),
        "activate, then mask": partial(launch_activate, empty(64, 28672), "silu", (empty(1, 14336, dtype=FP32), by_row), pdl=pdl),
        "activate, then mask by row": partial(launch_activate, empty(64, 28672), "silu", (empty(1, 14336, dtype=FP32), by_row), by_row),
        "combine": partial(
            launch_combine, KVSplits(*(empty(32, 32, 2, d, dtype=FP32) for d in (128, 1, 1))), BF16, (by_row, by_row), pdl=pdl
        ),
        **{f"widen {kind}": partial(
               widen, empty_weight(kind, 4096, (4096, 1024, 1024), group, BF16, META, zeros=kind == "int4"), range(3), empty(4096, 6144)
           ) for kind, group in (("int4", 128), ("int8", None), ("fp8", None))},
        "embed": partial(launch_embed, ids, empty(VOCABULARY, 4096), hidden, empty(1, 16, dtype=FP32)),
        "argmax": partial(launch_argmax, found, ids, ids, place, pdl=pdl),
        "sample": partial(draw, dtype=BF16),
        "sample fp16": partial(draw, dtype=FP16),
        "sample capped": partial(draw, dtype=BF16, multiplier=0.125, cap=30.0),
        **{f"codes {rows} {quant[0]}": partial(codes, rows, quant) for rows in (32, 128)
           for quant in (("int4", 128, True), ("int8", 0, False))},
        **{f"count {group} {batch} {quant[0]}": partial(count, arch, group, batch, quant) for group, batch, quant in (
            ("qkv", 1, ("none", 0, False)), ("o", 8, ("none", 0, False)), ("down", 1, ("graded", 128, False)),
        )},
        **{f"count experts {k}": partial(count_experts, arch, k, rows) for k, rows in ((2048, 8), (768, 64))},
        "router": partial(router, arch),
        "router biased": partial(router, arch, bias=empty(129)),
        "router of sigmoids": partial(router, arch, choice_bias=empty(128, dtype=FP32), sigmoid=True, norm=(0.0, 1e-6), factor=1.5, rounded="scores"),
        "router of groups": partial(router, arch, choice_bias=empty(128, dtype=FP32), sigmoid=True, norm=(0.0, 1e-20), rounded=None, groups=(8, 4, 2)),
        "router in float32": partial(router, arch, choice_bias=empty(128, dtype=FP32), norm=(1e-12, 0.0), rounded=None),
        "router scaled": partial(router, arch, multiplier=0.02, expert_scale=empty(128)),
        **{f"experts {k} {quant[0]} {rows}{' dense' * dense}": partial(experts, arch, k, rows, quant, dense)
           for k in (2048, 768) for quant in (("none", None), ("int8", None), ("int4", 128), ("fp8", None), ("graded", 128))
           for rows, dense in ((1, False), (1, True), (8, False))},
        **{f"many experts {k} {quant[0]}{'' if first is None else ' masked'}": partial(many_experts, arch, k, quant, first)
           for k, quant, first in (
               (2048, ("none", None), None), (768, ("none", None), 0), (2048, ("int4", 128), 0), (768, ("int8", None), None),
               (2048, ("graded", 128), None), (768, ("graded", 128), 0),
           )},
        **{f"experts {k} {quant[0]} {rows}{' dense' * dense} biased": partial(experts, arch, k, rows, quant, dense, biased=True)
           for k in (2048, 768) for quant in (("none", None), ("int4", 128)) for rows, dense in ((1, False), (8, True))},
        **{f"many experts {k} biased": partial(many_experts, arch, k, first_sparse=0, biased=True) for k in (2048, 768)},
        "experts 2048 fp32": partial(experts, arch, 2048, dtype=FP32),
        **{f"experts 2048 {quant[0]} ungated": partial(experts, arch, 2048, 8, quant, gated=False)
           for quant in (("none", None), ("int4", 128))},
        **{f"many experts 2048 {quant[0]} ungated": partial(many_experts, arch, 2048, quant, 0, gated=False)
           for quant in (("none", None), ("int4", 128))},
        # Long lists beside what Triton takes to reduce splits.
        **{f"gemv gate_up {rows} {warps}{' waiting' * bool(reducers)}": partial(
               gemv, arch, Tile(block_n, 1, 4, warps, stages=1, chunk=128, unroll=4, trigger=2, reducers=reducers),
               "gate_up", rows, dense=True, by_row=True, quant=("int4", 128, False))
           for rows, warps, block_n, reducers in ((8, 8, 512, 0), (16, 4, 256, 2), (32, 8, 512, 4))},
        # vLLM's for many rows.
        "mask rows": partial(mask_rows, many, qkv.scales, qkv.thresholds, by_row, copies=(3, 1, 2), pdl=pdl),
        "mask gemm": partial(gemm, many, qkv, Tile(64, 64, 1, stages=4, block_m=64), row_mask=by_row),
        "subnormals": partial(
            subnormal_kernel[(1,)], empty(128, dtype=FP32), 0x6F806F80, *sum_source("bfloat16"), num_warps=1
        ),
    }  # fmt: skip
    for name, launch in cases.items():
        if name.startswith(only):
            for kernel, compiled in launched(arch, launch).items():
                yield f"{name} {kernel}", compiled


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:]):
        for name, compiled in compiled_cases(arch):
            print(json.dumps({"arch": arch, "kernel": name, **resources(compiled)}), flush=True)
