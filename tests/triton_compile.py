"""Compile the Triton kernels for several GPU generations without a GPU; prints one JSON line per kernel.

    python tests/triton_compile.py 80 90 120

Registers, spills and shared memory are read from the binaries. Run by test_kernels_triton.py, without TRITON_INTERPRET.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wisparse.kernels.gpu import attention as triton_attention
from wisparse.kernels.gpu import delta_net as triton_delta_net
from wisparse.kernels.gpu import gemv as triton_gemv
from wisparse.kernels.gpu import head as triton_head
from wisparse.kernels.gpu import masked_gemm as triton_mask
from wisparse.kernels.gpu import masked_gemm as triton_mask_gemm
from wisparse.kernels.gpu import norms as triton_add
from wisparse.kernels.gpu import prompt as triton_prompt
from wisparse.kernels.gpu import sample as triton_sample
from wisparse.kernels.gpu.common import Counting, Memory, Source, Stretches, Target, Weights
from wisparse.kernels.gpu.matrix import CODE_BITS, padded_width

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMEM_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
SHAPES = {  # Llama-3.1-8B's: K, widths, source, target
    "qkv": (4096, (4096, 1024, 1024), "hidden", "plain"),
    "o": (4096, (4096, 0, 0), "attention", "residual"),
    "gate_up": (4096, (14336, 14336, 0), "hidden", "silu"),
    "down": (14336, (4096, 0, 0), "plain", "residual"),
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_kernel(kernel, arch: int, types: dict[str, Any], constants: dict, warps: int, stages: int = 3):
    """Compile one kernel; every pointer and every int in ``types`` is taken as divisible by 16. In a group of arguments
    what is no type's name is a constant."""
    attrs: dict[tuple[int, ...], list] = {}
    values: dict[tuple[int, ...], Any] = {}

    def signature_of(path: tuple[int, ...], given: Any) -> Any:
        if isinstance(given, tuple):
            return type(given)(*(signature_of((*path, i), inner) for i, inner in enumerate(given)))
        if not isinstance(given, str):
            values[path] = given
            return "constexpr"
        if given.startswith("*") or given == "i32":
            attrs[path] = [["tt.divisibility", 16]]
        return given

    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            values[(i,)] = constants[name]
        else:
            signature[name] = signature_of((i,), types[name])
    source = ASTSource(kernel, signature, values, attrs)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages}
    )


def types_of(dtype: str) -> tuple[str, str]:
    """Pointer types of activations and of sums: float64 for float32 weights, as kernels.gpu.common has it."""
    return ("*fp64", "*fp64") if dtype == "fp32" else (f"*{dtype}", "*fp32")


def numbers(dtype: str, **values: float) -> tuple[dict[str, str], dict[str, float]]:
    """Types and constants of float arguments, which are constants with float32 weights."""
    return ({}, values) if dtype == "fp32" else (dict.fromkeys(values, "fp32"), {})


def resources(compiled) -> dict[str, int]:
    """Registers and local memory (spills) of one thread, from the binary; shared memory from the compiler, and what the
    kernel itself declares of it (room), from its PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([str(_CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout + done.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {done.stdout} {done.stderr}")
    registers, stack, _, local = map(int, found.groups())
    shared = compiled.metadata.shared
    room = sum(map(int, re.findall(r"\.shared \.align 16 \.b8 room\[(\d+)\]", compiled.asm["ptx"])))
    return {
        "registers": registers, "stack": stack, "local": local, "shared": shared, "room": room,
        "looks_shared": looks_shared(compiled), "waits": compiled.asm["ptx"].count("griddepcontrol.wait"),
    }  # fmt: skip


def looks_shared(compiled) -> int:
    """Looks at partial sums (volatile loads) in which a number has more than one register, from the compiler's layouts;
    -1: there are no looks."""
    source = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", source, re.MULTILINE))
    shared = 0
    looks = [line for line in source.splitlines() if "tt.load" in line and "isVolatile = true" in line]
    for line in looks:
        shape, layout = re.search(r"tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", line).groups()  # type: ignore[union-attr]
        factors = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", layouts[layout])
        covered = [math.prod(numbers) for numbers in zip(*(map(int, f.split(",")) for f in factors), strict=True)]
        shared += any(n > size for n, size in zip(covered, map(int, shape.split("x")), strict=True))
    return shared if looks else -1


def gemv(
    arch: int,
    tile,
    group: str,
    batch: int = 1,
    dense: bool = False,
    dtype: str = "bf16",
    pdl: bool | None = None,
    count: bool = False,
    by_row: bool = False,
    norm: str | None = None,
    codes: tuple[str, int, bool] = ("plain", 0, False),
    **ends: str,
):
    """The GEMV as Llama-3.1-8B launches it for ``group``; ``count``: with its kept channels counted; ``by_row``:
    as it does within vLLM; ``norm`` (type of the norm's weights), ``source`` and ``target``: as other families do;
    ``codes``: the weights' kind, group (0: all channels) and whether there are zero points."""
    k, widths, source, target = SHAPES[group]
    if by_row:
        source = target = "plain"
    source, target = ends.get("source", source), ends.get("target", target)
    activation, wide = types_of(dtype)
    widths = tuple(width for width in widths if width)
    kind, size, zeros = codes
    coded = kind != "plain"
    stride = sum(map(padded_width, widths)) * CODE_BITS[kind] // 32 if coded else sum(widths)
    layout = triton_gemv.Layout(
        k, widths, stride, TORCH_TYPES[dtype], torch.device("meta"), dense, kind, coded * (size or k), zeros
    )
    stretches = (16 // batch, 128) if source == "attention" else (1, 1)
    plan = triton_gemv.plan_launch(layout, tile, batch, target, stretches, 16, arch >= 90 if pdl is None else pdl)
    in_scratch, many = plan.lists.in_room == "", plan.kernel is triton_gemv.masked_gemm_kernel
    types = {
        "source": {
            "plain": Source(activation, None, None, None),
            "hidden": Source(activation, wide, norm or f"*{dtype}", None),
            "attention": Source(None, None, None, Stretches(wide, wide, wide)),
        }[source],
        "weights": Weights(
            "*i32" if coded else f"*{dtype}",
            None,
            "*fp32",
            "*fp32",
            "*fp32" if coded else None,
            "*fp32" if zeros else None,
        ),
        "masked_ptr": "*fp32" if by_row else None,
        "target": Target(activation, wide if target == "residual" else None),
        "memory": Memory(
            "*i64" if dtype == "fp32" else "*i32",
            None if tile.pollers else "*i32",
            "*i32" if in_scratch and not many else None,
            activation if in_scratch else None,
        ),
        "counting": Counting("*i64", "*i64", "*i64") if count else None,
        "eps": 1e-5 if dtype == "fp32" else "fp32",
        "ssq_parts": "i32",
    }
    constants = dict(shape=plan.shape, modes=plan.modes, cut=plan.cut, lists=plan.lists, AT_ONCE=plan.at_once)
    return compile_kernel(plan.kernel, arch, types, constants, tile.warps)


def mask(arch: int, projections: int):
    pointers = dict.fromkeys(("x_ptr", "out_ptr"), "*bf16") | dict.fromkeys(
        ("scale_ptr", "threshold_ptr", "masked_ptr"), "*fp32"
    )
    constants = dict(K=4096, SECOND=projections, THIRD=projections + 1, BLOCK_K=1024, PDL=arch >= 90)
    return compile_kernel(triton_mask._mask_rows_kernel, arch, pointers | {"M": "i32"}, constants, 4)


def mask_gemm(arch: int, block_m: int, tile):
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16") | dict.fromkeys(
        ("scale_ptr", "threshold_ptr", "masked_ptr"), "*fp32"
    )
    constants = dict(
        K=4096, N0=4096, N1=1024, N2=1024, STRIDE=6144, HAS_BIAS=False, BLOCK_M=block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, STAGES=tile.stages,
    )  # fmt: skip
    kernel = triton_mask_gemm._mask_gemm_kernel
    return compile_kernel(kernel, arch, pointers | {"M": "i32"}, constants, tile.warps)


def attention(arch: int, dtype: str = "bf16", splits: int = 16, stages: int = 3, norm: str | None = None, **changes):
    """Llama-3.1-8B's; ``norm``: type of q and k norms' weights; ``changes``: of the shape, as other families have."""
    activation, wide = types_of(dtype)
    exact = dtype == "fp32"
    module = triton_attention
    types = {
        "qkv_ptr": activation, "norms": module._Norms(norm, norm, 1e-5 if exact else "fp32"),
        "rotary": module._Rotary(activation, activation, activation if changes.pop("scaled", False) else None),
        "cache": module._Cache(activation, activation, "i32"),
        "rows": module._Rows("*i64", "*i32"), "out": Stretches(wide, wide, wide), "scale_log2": "fp32",
    }  # fmt: skip
    shape = module._Shape(32, 8, 128, rotary=128, window=0)._replace(**changes)
    _, cut, warps = module._constants(
        shape.heads, shape.kv_heads, shape.d, 0, 0, False, 0.0, "head", False, False, False, splits, 1,
        torch.float64 if exact else torch.float32, None, stages,
    )  # fmt: skip
    constants = dict(shape=shape, cut=cut, PDL=arch >= 90, **(dict(scale_log2=0.1275) if exact else {}))
    return compile_kernel(module._attention_kernel, arch, types, constants, warps)


def prompt(arch: int, name: str, rows: int, norm: str | None = None, **changes: Any):
    """Llama-3.1-8B's attention of a prompt's piece; ``norm`` and ``changes`` as for ``attention``."""
    module = triton_prompt
    types = {
        "qkv_ptr": "*bf16", "q_ptr": "*bf16", "out_ptr": "*bf16", "piece_ptr": "*i64",
        "norms": triton_attention._Norms(norm, norm, "fp32"),
        "rotary": triton_attention._Rotary("*bf16", "*bf16", "*bf16" if changes.pop("scaled", False) else None),
        "cache": triton_attention._Cache("*bf16", "*bf16", "i32"), "rows": "i32", "scale_log2": "fp32",
    }  # fmt: skip
    shape, cut = module._constants(rows, 32, 8, 128, 128, 0, False, 0.0, "head", False)
    if changes:
        shape = shape._replace(**changes)
        _, cut = module._constants(rows, *shape[:3], 128, 0, False, 0.0, "head", False)
    kernel = getattr(module, f"_{name}_kernel")
    types = {key: value for key, value in types.items() if key in kernel.arg_names}
    return compile_kernel(kernel, arch, types, dict(shape=shape, cut=cut), 4)


def logits(
    arch: int,
    batch: int = 1,
    block_v: int = 16,
    block_k: int = 4096,
    dtype: str = "bf16",
    stages: int = 1,
    passes: int = 4,
    norm: str | None = None,
    codes: bool = False,
):
    activation, wide = types_of(dtype)
    floats, exact = numbers(dtype, eps=1e-5)
    if codes:
        floats["scale_ptr"] = "*fp32"
    else:
        exact["scale_ptr"] = None
    types = {
        "hidden_ptr": activation, "ssq_ptr": wide, "norm_ptr": norm or f"*{dtype}",
        "weight_ptr": "*i8" if codes else f"*{dtype}",
        "logits_ptr": "*fp32", "best_ptr": "*fp32", "best_id_ptr": "*i32", "V": "i32", **floats,
    }  # fmt: skip
    constants = dict(
        K=4096, BATCH=batch, SSQ=16, SSQ_PAD=32, BLOCK_V=block_v, PASSES=passes, BLOCK_K=block_k, STAGES=stages,
        PDL=arch >= 90, **exact,
    )  # fmt: skip
    return compile_kernel(triton_head._logits_kernel, arch, types, constants, 4 if batch == 1 else 2, stages)


def add(arch: int, norm: str | None, multiplier: float, dtype: str = "bf16", scaled: bool = False):
    activation, wide = types_of(dtype)
    floats, exact = numbers(dtype, eps=1e-5)
    types = {"half_ptr": activation, "hidden_ptr": activation, "ssq_ptr": wide, **floats}
    constants = dict(MULTIPLIER=multiplier, K=4096, BLOCK=4096, PDL=arch >= 90, **exact)
    for name, given in (("norm_ptr", norm), ("scalar_ptr", activation if scaled else None)):
        (constants if given is None else types)[name] = given
    return compile_kernel(triton_add._add_kernel, arch, types, constants, 8)


def delta_net(arch: int, dtype: str = "bf16", **changes: int):
    """Qwen3.5-4B's: hidden state 2560, 16 key heads and 32 value heads, each 128 wide."""
    module = triton_delta_net
    activation, wide = types_of(dtype)
    floats, exact = numbers(dtype, eps=1e-6, query_scale=128**-0.5)
    types = {
        "given": module.DeltaInput(activation, activation, wide, wide),
        "weights": module.DeltaTensors(*[activation] * 6), "memory": module.DeltaMemory(activation, wide, "i32", "i32"),
        "rows": module._Rows("*i64", "*i32"), "out_ptr": activation, "ssq_parts": "i32", **floats,
    }  # fmt: skip
    shape = module._Shape(2560, 16, 32, 128, 128, 4, 4, 128, 128, ssq_pad=32, block_h=1024)._replace(**changes)
    constants = dict(shape=shape, PDL=arch >= 90, **exact)
    return compile_kernel(module._delta_net_kernel, arch, types, constants, module.warps_for(shape, dtype == "fp32"))


def sampling(arch: int, name: str, half: bool, multiplier: float = 1.0, cap: float | None = None):
    types = dict.fromkeys(("logits_ptr", "best_ptr", "largest_ptr"), "*fp32")
    types |= dict.fromkeys(("numbers_ptr", "block_sums_ptr", "sums_ptr"), "*fp64")
    types |= dict.fromkeys(("token_ptr", "next_ptr", "seed_ptr"), "*i64")
    integers = ("best_id_ptr", "counts_ptr", "likeliest_ptr", "block_counts_ptr", "threshold_ptr", "arrived_ptr")
    types |= dict.fromkeys((*integers, "position_ptr"), "*i32") | dict.fromkeys(("V", "head_tiles", "tiles"), "i32")
    kernel = getattr(triton_sample, f"_{name}_kernel")
    constants = dict(HEAD_PAD=8192, TILES_PAD=128, MULTIPLIER=multiplier, CAP=cap, HALF=half, PDL=arch >= 90)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return compile_kernel(kernel, arch, {k: v for k, v in types.items() if k in kernel.arg_names}, constants, 4)


def families(arch: int) -> dict[str, tuple]:
    """What families beyond Llama's launch, by what they have."""
    from wisparse.kernels.gpu.tiles import default_tile

    def product(group: str, kind: str = "sparse", batch: int = 1, **changes: str) -> tuple:
        k, widths, _, _ = SHAPES[group]
        tile = default_tile(132, k, tuple(filter(None, widths)), kind, arch)
        return (partial(gemv, **changes), tile, group, batch, kind == "dense")

    def attending(dtype: str = "bf16", **changes: Any) -> tuple:
        return (partial(attention, **changes), dtype)

    of = triton_attention.QK_NORMS
    cases = {
        "gemv gate_up sparse 1 gelu": product("gate_up", norm="*fp32", target="gelu_tanh"),
        "gemv gate_up batch 8 gelu": product("gate_up", "batch", 8, norm="*fp32", target="gelu_tanh"),
        "gemv qkv sparse 1 offset": product("qkv", norm="*fp32"),
        "gemv qkv rows 2 offset": product("qkv", "rows", 2, norm="*fp32"),
        "gemv qkv batch 8 offset": product("qkv", "batch", 8, norm="*fp32"),
        "gemv qkv sparse 1 unnormed": product("qkv", source="plain"),
        "gemv o sparse 1 beside": product("o", target="plain"),
        "gemv down batch 8 beside": product("down", "batch", 8, target="plain"),
        "attention head norm offset": attending(
            norm="*fp32", norm_of=of["head"], heads=8, kv_heads=4, d=256, rotary=256
        ),
        "attention turned head norm": attending(norm="*bf16", norm_of=of["turned head"]),
        "attention whole norm": attending(norm="*bf16", norm_of=of["whole"], kv_heads=32),
        "attention whole norm fp32": attending("fp32", norm="*fp32", norm_of=of["whole"], kv_heads=32),
        "attention capped": attending(cap_log2=72.0, window=4096, heads=8, kv_heads=4, d=256, rotary=256),
        "attention interleaved": attending(interleaved=True, rotary=64),
        "attention unturned": attending(rotary=0),
        "attention scaled": attending(scaled=True),
        "attention gated": attending(
            norm="*fp32", gated=True, heads=16, kv_heads=4, d=256, rotary=64, norm_of=of["head"]
        ),
        **{
            f"attention {width} wide{kind}": attending(
                kind.strip() or "bf16",
                norm=f"*{kind.strip() or 'bf16'}",
                heads=32,
                kv_heads=kv_heads,
                d=width,
                rotary=width,
                value_norm=True,
                shared=width == 512,
                norm_of=of["head"],
                **more,
            )
            for width, kv_heads, kind, more in (
                (512, 4, "", {}),
                (512, 4, " fp32", {}),
                (256, 16, "", {"window": 1024}),
            )
        },
        "attention 512 wide short": (
            partial(attention, norm="*bf16", heads=32, kv_heads=4, d=512, rotary=512, shared=True, value_norm=True),
            "bf16",
            4,
        ),
        "prompt place": (prompt, "place", 16),
        "prompt place normed": (partial(prompt, norm="*fp32", gated=True, scaled=True), "place", 16),
        "prompt piece 16": (prompt, "piece", 16),
        "prompt piece 128": (prompt, "piece", 128),
        "prompt piece capped": (
            partial(prompt, cap_log2=72.0, window=4096, gated=True, heads=8, kv_heads=4, d=256, rotary=256),
            "piece",
            128,
        ),
        "delta net": (delta_net,),
        "delta net fp32": (delta_net, "fp32"),
        "logits batch 1 offset": (partial(logits, norm="*fp32"),),
        "logits batch 4 offset": (partial(logits, norm="*fp32"), 4, 64, 128, "bf16", 3, 1),
        "logits int8": (partial(logits, codes=True),),
        "logits int8 batch 4": (partial(logits, codes=True), 4, 64, 128, "bf16", 3, 1),
        "add offset": (add, "*fp32", 1.0),
        "add norm": (add, "*bf16", 1.0),
        "add multiplied": (add, None, 0.22),
        "add fp32": (add, "*fp64", 1.0, "fp32"),
        "add scaled": (partial(add, scaled=True), "*bf16", 1.0),
        "sample count capped": (sampling, "count", False, 0.125, 30.0),
        "sample draw capped": (sampling, "draw", False, 0.125, 30.0),
    }
    return {
        f"{name} waiting" if name.startswith("gemv") and case[1].pollers else name: case for name, case in cases.items()
    }


def coded(arch: int) -> dict[str, tuple]:
    """Weights in codes, with the tiles that they get."""
    from wisparse.kernels.gpu.tiles import choose_tile

    cases = {}
    for group, rows, dense, codes, dtype in (
        ("gate_up", 1, True, ("int4", 128, False), "bf16"),
        ("gate_up", 1, False, ("int4", 128, False), "bf16"),
        ("qkv", 1, False, ("int4", 64, True), "fp16"),
        ("o", 1, False, ("int4", 128, False), "bf16"),
        ("down", 2, False, ("int4", 128, False), "bf16"),
        ("gate_up", 8, False, ("int4", 128, False), "bf16"),
        ("qkv", 16, True, ("int4", 128, True), "bf16"),
        ("gate_up", 1, False, ("int8", 0, False), "bf16"),
        ("o", 1, True, ("int8", 0, False), "fp16"),
        ("down", 8, True, ("int8", 128, True), "bf16"),
        ("down", 1, False, ("fp8", 0, False), "bf16"),
        ("qkv", 8, False, ("fp8", 0, False), "fp16"),
    ):
        k, widths, _, _ = SHAPES[group]
        kind = triton_gemv.launch_kind(rows, dense=dense)
        widths = tuple(filter(None, widths))
        tile = choose_tile(arch, 132, k, widths, kind, rows, TORCH_TYPES[dtype], codes[0], codes[1] or None)
        name = f"gemv {group} {codes[0]}-{codes[1]} {kind} {rows}{' waiting' if tile.pollers else ''}"
        cases[name] = (partial(gemv, codes=codes, count=not dense), tile, group, rows, dense, dtype)
    return cases


def compiled_cases(arch: int, only: str = "") -> Iterator[tuple[str, Any]]:
    """Name and compiled kernel of every variant that is watched, if the name begins with ``only``."""
    from wisparse.kernels.gpu.gemv import GemvTile
    from wisparse.kernels.gpu.tiles import TABLE, default_tile

    sizes = {group: (k, tuple(filter(None, widths))) for group, (k, widths, _, _) in SHAPES.items()}
    cases = {
        f"gemv {group} {kind} {batch}": (
            gemv, default_tile(132, *size, kind, arch), group, batch, kind == "dense"
        )
        for group, size in sizes.items()
        for kind, batch in (("sparse", 1), ("dense", 1), ("rows", 2), ("batch", 8))
    }  # fmt: skip
    cases = {f"{name} waiting" if case[1].pollers else name: case for name, case in cases.items()}
    cases |= {
        f"gemv {group} fp32": (gemv, default_tile(132, *size), group, 1, False, "fp32") for group, size in sizes.items()
    }
    # Programs without a block of channels.
    cases["gemv down batch 8 idle"] = (gemv, GemvTile(128, 64, 2048, stages=3, unroll=1), "down", 8)
    cases |= {"attention fp32": (attention, "fp32"), "logits fp32": (logits, 1, 16, 256, "fp32", 1, 1)}
    cases |= {"attention": (attention,), "attention short": (attention, "bf16", 4), "logits batch 1": (logits,)}
    cases |= {"logits batch 4": (logits, 4, 64, 128, "bf16", 3, 1)}
    if arch == 90:
        cases |= {f"attention {splits} stretches": (attention, "bf16", splits, 5) for splits in (8, 16)}
    # The measured tiles that wait for their sums, and the least that a poller may have.
    waiting = GemvTile(64, 4, 5, 4, unroll=2, pollers=4)
    cases |= {f"gemv {group} sparse 1 waiting": (gemv, waiting, group) for group in ("qkv", "down")}
    if arch == 90:
        for group, (k, each) in sizes.items():
            for kind, batch in (("sparse", 1), ("dense", 1), ("rows", 2), ("batch", 8), ("batch", 11)):
                tile = TABLE[f"sm90:{kind}:{k}x{sum(each)}"]
                name = f"gemv {group} {kind} {batch}{' waiting' if tile.pollers else ''}, as measured"
                cases[name] = (gemv, tile, group, batch, kind == "dense")
    cases |= {
        f"{name} counting": (partial(gemv, count=True), *case[1:])
        for name, case in cases.items()
        if case[0] is gemv and not {"dense", "fp32"} & set(name.split()) and (arch == 90) == ("measured" in name)
    }
    if arch == 90:
        for group, kind, batch in (("qkv", "sparse", 1), ("o", "rows", 2), ("down", "batch", 8)):
            k, each = sizes[group]
            tile = TABLE[f"sm90:{kind}:{k}x{sum(each)}"]
            cases[f"gemv {group} {kind} {batch} by row waiting"] = (
                gemv, tile, group, batch, False, "bf16", None, False, True
            )  # fmt: skip
    cases |= {"mask": (mask, 3), "mask gemm": (mask_gemm, 64, GemvTile(64, 64, 1, 4, stages=4, unroll=1))}
    for name in ("count", "threshold", "draw"):
        cases |= {f"sample {name}{' fp16' if half else ''}": (sampling, name, half) for half in (False, True)}
    cases |= families(arch) | coded(arch)
    for name, (build, *arguments) in cases.items():
        if name.startswith(only):
            yield name, build(arch, *arguments)


def main(archs: list[int]) -> None:
    for arch in archs:
        for name, compiled in compiled_cases(arch):
            print(json.dumps({"arch": arch, "kernel": name, **resources(compiled)}), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
