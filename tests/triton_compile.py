"""Compile the Triton kernels for several GPU generations without a GPU; prints one JSON line per kernel.

    python tests/triton_compile.py 80 90 120

Registers, spills and shared memory are read from the binaries. Run by test_kernels_triton.py, without TRITON_INTERPRET.
"""

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

from wisparse.kernels.gpu import attention as attention_module
from wisparse.kernels.gpu import delta_net, head, masked_gemm, packed_gemv, plan, reduction, sample
from wisparse.kernels.gpu.attention import AttentionShape, KVSlots, QKNorms, RotaryTables, Rows
from wisparse.kernels.gpu.common import Counting, Input, KVSplits, Output, Weights, Workspace
from wisparse.kernels.gpu.plan import GemvTile, Gpu
from wisparse.kernels.gpu.weights import BITS, LinearShape, padded_width

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = {  # Llama-3.1-8B's: K, widths, source, target
    "qkv": (4096, (4096, 1024, 1024), "hidden", "plain"),
    "o": (4096, (4096,), "attention", "residual"),
    "gate_up": (4096, (14336, 14336), "hidden", "silu"),
    "down": (14336, (4096,), "plain", "residual"),
}
LLAMA = AttentionShape(32, 8, 128, rotary=128)
LOGITS = head.Logits("*fp32", "*fp32", "*i32")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_kernel(kernel, arch: int, given: dict[str, Any], warps: int = 4):
    """Compile one kernel for ``given``: types of pointers and numbers ("*bf16", "i32"), every pointer and int taken as
    divisible by 16, or groups of them; all else is a constant. What the kernel has no argument for is left out."""
    attrs: dict[tuple[int, ...], list] = {}
    values: dict[tuple[int, ...], Any] = {}

    def signature_of(path: tuple[int, ...], given: Any) -> Any:
        if isinstance(given, (Input, KVSplits, Output, Weights, Workspace, Counting, QKNorms, RotaryTables, KVSlots, Rows,
                              head.Logits, sample.Choice, sample.SampleState, delta_net.DeltaInput,
                              delta_net.DeltaTensors, delta_net.DeltaMemory)):  # fmt: skip
            return type(given)(*(signature_of((*path, i), inner) for i, inner in enumerate(given)))
        if not isinstance(given, str) or not re.fullmatch(r"\*?[a-z]+\d+", given):
            values[path] = given
            return "constexpr"
        if given.startswith("*") or given == "i32":
            attrs[path] = [["tt.divisibility", 16]]
        return given

    signature = {name: signature_of((i,), given[name]) for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(kernel, signature, values, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})


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


def llama_shape(
    group: str, dense: bool, dtype: str = "bf16", quant: tuple[str, int, bool] = ("none", 0, False)
) -> LinearShape:
    """``quant``: the weights' type, group (0: all channels) and whether there are zero points."""
    k, widths, _, _ = SHAPES[group]
    kind, size, _ = quant
    coded = kind != "none"
    stride = sum(map(padded_width, widths)) * BITS[kind] // 32 if coded else sum(widths)
    return LinearShape(k, widths, stride, TORCH_TYPES[dtype], torch.device("meta"), dense, kind, coded * (size or k))


def gemv(
    arch: int,
    tile: GemvTile | None,
    group: str,
    batch: int = 1,
    dense: bool = False,
    dtype: str = "bf16",
    pdl: bool | None = None,
    count: bool = False,
    by_row: bool = False,
    norm: str | None = None,
    quant: tuple[str, int, bool] = ("none", 0, False),
    **ends: str,
):
    """The linear as Llama-3.1-8B launches it for ``group``; ``count``: with its kept channels counted; ``by_row``:
    as vLLM does; ``norm`` (type of the norm's weights), ``source`` and ``target``: as other families do."""
    shape = llama_shape(group, dense, dtype, quant)
    _, _, source, target = SHAPES[group]
    if by_row:
        source = target = "plain"
    source, target = ends.get("source", source), ends.get("target", target)
    attention = {"kv_splits": 16 // batch, "head_dim": 128} if source == "attention" else {}
    chosen = plan.plan(shape, batch, Gpu(arch, 1 << 20), output=target, ssq_parts=16, tile=tile, pdl=pdl, **attention)
    in_scratch, many = chosen.launch.smem == "", chosen.kernel is masked_gemm.masked_gemm_kernel
    quantized = quant[0] != "none"
    given = {
        "plain": Input(f"*{dtype}"),
        "hidden": Input(f"*{dtype}", "*fp32", norm or f"*{dtype}"),
        "attention": Input(None, attention=KVSplits("*fp32", "*fp32", "*fp32")),
    }[source]
    arguments = {
        "given": given._replace(row_mask="*fp32" if by_row else None),
        "weights": Weights(
            "*i32" if quantized else f"*{dtype}", None, "*fp32", "*fp32", "*fp32" if quantized else None,
            "*fp32" if quant[2] else None,
        ),
        "output": Output(f"*{dtype}", "*fp32" if target == "residual" else None),
        "workspace": Workspace(
            "*i32", None if chosen.tile.reducers else "*i32", "*i32" if in_scratch and not many else None,
            f"*{dtype}" if in_scratch else None,
        ),
        "counting": Counting("*i64", "*i64", "*i64") if count else None,
        "eps": "fp32", "ssq_parts": "i32", "problem": chosen.problem, "launch": chosen.launch, "packed": chosen.packed,
    }  # fmt: skip
    return compile_kernel(chosen.kernel, arch, arguments, chosen.tile.warps)


def mask(arch: int, name: str, **constants: Any):
    """vLLM's launches for many rows."""
    pointers = dict.fromkeys(("x_ptr", "out_ptr", "weight_ptr"), "*bf16")
    pointers |= dict.fromkeys(("scale_ptr", "threshold_ptr", "row_mask_ptr"), "*fp32")
    given = {**pointers, "bias_ptr": None, "M": "i32", "K": 4096, "PDL": arch >= 90, **constants}
    return compile_kernel(getattr(masked_gemm, name), arch, given)


def attention(
    arch: int, dtype: str = "bf16", splits: int = 16, stages: int = 3, norm: str | None = None, **changes: Any
):
    """Llama-3.1-8B's; ``norm``: type of q and k norms' weights; ``changes``: of the shape, as other families have."""
    kind = f"*{dtype}"
    scale = kind if changes.pop("scaled", False) else None
    shape = LLAMA._replace(**changes)
    config, warps = attention_module.decode_config(shape, splits, 1, TORCH_TYPES[dtype], stages)
    given = {
        "qkv_ptr": kind, "norms": QKNorms(norm, norm, "fp32"), "rotary": RotaryTables(kind, kind, scale),
        "cache": KVSlots(kind, kind, "i32"), "rows": Rows("*i64", "*i32"), "out": KVSplits("*fp32", "*fp32", "*fp32"),
        "scale_log2": "fp32", "shape": shape, "config": config, "PDL": arch >= 90,
    }  # fmt: skip
    return compile_kernel(attention_module._attention_kernel, arch, given, warps)


def chunk(arch: int, name: str, rows: int, norm: str | None = None, **changes: Any):
    """Llama-3.1-8B's attention of a short prompt; ``norm`` and ``changes`` as for ``attention``."""
    scale = "*bf16" if changes.pop("scaled", False) else None
    shape = LLAMA._replace(**changes)
    given = {
        "qkv_ptr": "*bf16", "q_ptr": "*bf16", "out_ptr": "*bf16", "chunk_ptr": "*i64",
        "norms": QKNorms(norm, norm, "fp32"), "rotary": RotaryTables("*bf16", "*bf16", scale),
        "cache": KVSlots("*bf16", "*bf16", "i32"), "rows": "i32", "scale_log2": "fp32",
        "shape": shape, "config": attention_module.chunk_config(shape, rows),
    }  # fmt: skip
    return compile_kernel(getattr(attention_module, f"_{name}_kernel"), arch, given)


def logits(arch: int, batch: int = 1, dtype: str = "bf16", norm: str | None = None, int8: bool = False):
    given = {
        "hidden_ptr": f"*{dtype}", "ssq_ptr": "*fp32", "norm_ptr": norm or f"*{dtype}",
        "weight_ptr": "*i8" if int8 else f"*{dtype}", "scale_ptr": "*fp32" if int8 else None, "out": LOGITS,
        "eps": "fp32", "V": "i32", "config": head.head_config(batch, 4096, 16, TORCH_TYPES[dtype]), "PDL": arch >= 90,
    }  # fmt: skip
    return compile_kernel(head._logits_kernel, arch, given, 4 if batch == 1 else 2)


def ends(arch: int, name: str):
    """The embedding, and the greedy choice."""
    given = {
        "token_ptr": "*i64", "embedding_ptr": "*bf16", "hidden_ptr": "*bf16", "ssq_ptr": "*fp32", "logits": LOGITS,
        "next_ptr": "*i64", "position_ptr": "*i32", "tiles": "i32", "MULTIPLIER": 1.0, "K": 4096, "TILES": 16,
        "BLOCK": 256 if name == "embed" else 8192, "PDL": arch >= 90,
    }  # fmt: skip
    return compile_kernel(getattr(head, f"_{name}_kernel"), arch, given, 8)


def add(arch: int, norm: str | None, multiplier: float = 1.0, scalar: str | None = None):
    given = {
        "half_ptr": "*bf16", "hidden_ptr": "*bf16", "ssq_ptr": "*fp32", "eps": "fp32", "norm_ptr": norm,
        "scalar_ptr": scalar, "MULTIPLIER": multiplier, "K": 4096, "BLOCK": 4096, "PDL": arch >= 90,
    }  # fmt: skip
    return compile_kernel(reduction._residual_add_kernel, arch, given, 8)


def delta(arch: int, dtype: str = "bf16"):
    """Qwen3.5-4B's: hidden state 2560, 16 key heads and 32 value heads, each 128 wide."""
    kind = f"*{dtype}"
    shape = delta_net._Shape(2560, 16, 32, 128, 128, 4, ssq_pad=32)
    given = {
        "given": delta_net.DeltaInput(kind, kind, "*fp32", "*fp32"), "weights": delta_net.DeltaTensors(*[kind] * 6),
        "memory": delta_net.DeltaMemory(kind, "*fp32", "i32", "i32"), "rows": Rows("*i64", "*i32"), "out_ptr": kind,
        "ssq_parts": "i32", "eps": "fp32", "query_scale": "fp32", "shape": shape, "PDL": arch >= 90,
    }  # fmt: skip
    return compile_kernel(delta_net._delta_net_kernel, arch, given, 16)


def sampling(arch: int, name: str, half: bool, multiplier: float = 1.0, cap: float | None = None):
    given = {
        "logits": LOGITS, "choice": sample.Choice("*i64", "*i64", "*i32"),
        "state": sample.SampleState(
            "*fp64", "*i64", "*i32", "*i32", "*fp64", "*i32", "*fp64", "*fp32", "*i32", "*i32"
        ),
        "V": "i32", "head_tiles": "i32", "tiles": "i32", "HEAD_PAD": 8192, "TILES_PAD": 128,
        "finish": sample.Finish(multiplier, cap, half), "PDL": arch >= 90,
    }  # fmt: skip
    return compile_kernel(getattr(sample, f"_{name}_kernel"), arch, given)


def subnormals(arch: int):
    source, constraints = packed_gemv.sum_source("bfloat16")
    given = {"out_ptr": "*fp32", "X": 0x6F806F80, "TOTAL": source, "CONSTRAINTS": constraints}
    return compile_kernel(packed_gemv._subnormal_kernel, arch, given, 1)


def linear_cases(arch: int) -> Iterator[tuple[str, partial]]:
    def tile_of(group: str, kind: str, *, measured: bool = False) -> GemvTile:
        if not measured:
            return plan.default_tile(Gpu(arch, 132), llama_shape(group, kind == "dense"), kind)
        k, widths, _, _ = SHAPES[group]
        return plan.measured_tiles()[f"sm90:{kind}:{k}x{sum(widths)}"]

    def linear(name: str, tile: GemvTile, group: str, batch: int = 1, ending: str = "", **changes: Any):
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
                if not dense and measured == (arch == 90):
                    name, build = linear(*case, count=True)
                    yield f"{name} counting", build
        yield linear("fp32", tile_of(group, "sparse"), group, dtype="fp32")
        yield linear("batch 8 fp32", tile_of(group, "batch"), group, 8, dtype="fp32")
    # Programs without a block of channels, and the least that a spinning reducer may have.
    yield linear("batch 8 idle", GemvTile(128, 64, 2048, stages=3, unroll=1), "down", 8)
    for group in ("qkv", "down"):
        yield linear("least sparse 1", GemvTile(64, 4, 5, 4, unroll=2, reducers=4), group)
    for group, kind, batch in (("qkv", "sparse", 1), ("o", "rows", 2), ("down", "batch", 8)) if arch == 90 else ():
        tile = tile_of(group, kind, measured=True)
        yield linear(f"{kind} {batch} by row", tile, group, batch, pdl=False, by_row=True)
    for name, group, kind, batch, changes in (  # what families beyond Llama's launch
        ("gelu", "gate_up", "sparse", 1, {"norm": "*fp32", "target": "gelu_tanh"}),
        ("gelu", "gate_up", "batch", 8, {"norm": "*fp32", "target": "gelu_tanh"}),
        ("offset", "qkv", "sparse", 1, {"norm": "*fp32"}),
        ("offset", "qkv", "rows", 2, {"norm": "*fp32"}),
        ("offset", "qkv", "batch", 8, {"norm": "*fp32"}),
        ("unnormed", "qkv", "sparse", 1, {"source": "plain"}),
        ("beside", "o", "sparse", 1, {"target": "plain"}),
        ("beside", "down", "batch", 8, {"target": "plain"}),
    ):
        yield linear(f"{kind} {batch} {name}", tile_of(group, kind), group, batch, **changes)
    for group, rows, dense, quant, dtype in (
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
        tile, _ = plan.choose_tile(Gpu(arch, 132), llama_shape(group, dense, dtype, quant), rows)
        name = f"{quant[0]}-{quant[1]} {plan.regime(rows, dense=dense)} {rows}"
        yield linear(name, tile, group, rows, dense=dense, dtype=dtype, quant=quant, count=not dense)


def compiled_cases(arch: int, only: str = "") -> Iterator[tuple[str, Any]]:
    """Name and compiled kernel of every variant that is watched, if the name begins with ``only``."""
    gemma = {"heads": 8, "kv_heads": 4, "d": 256, "rotary": 256}
    wide = {"norm": "*bf16", "value_norm": True}
    widest = {**wide, "kv_heads": 4, "d": 512, "rotary": 512, "shared": True}
    capped = {**gemma, "softcap": 50.0, "window": 4096}
    mask_config = masked_gemm._MaskGemm(4096, 4096, 1024, 1024, 6144, 64, 64, 64, 4)
    cases = {
        **dict(linear_cases(arch)),
        "attention": partial(attention),
        "attention short": partial(attention, splits=4),
        "attention fp32": partial(attention, dtype="fp32"),
        **({f"attention {n} stretches": partial(attention, splits=n, stages=5) for n in (8, 16)} if arch == 90 else {}),
        "attention head norm offset": partial(attention, norm="*fp32", **gemma),
        "attention rotated head norm": partial(attention, norm="*bf16", norm_of="rotated head"),
        "attention whole norm": partial(attention, norm="*bf16", norm_of="whole", kv_heads=32),
        "attention capped": partial(attention, **capped),
        "attention interleaved": partial(attention, interleaved=True, rotary=64),
        "attention unrotated": partial(attention, rotary=0),
        "attention scaled": partial(attention, scaled=True),
        "attention gated": partial(attention, norm="*fp32", gated=True, heads=16, kv_heads=4, d=256, rotary=64),
        "attention 512 wide": partial(attention, **widest),
        "attention 512 wide fp32": partial(attention, dtype="fp32", **{**widest, "norm": "*fp32"}),
        "attention 512 wide short": partial(attention, splits=4, **widest),
        "attention 256 wide": partial(attention, kv_heads=16, d=256, rotary=256, window=1024, **wide),
        "chunk store": partial(chunk, name="store_kv", rows=16),
        "chunk store normed": partial(chunk, name="store_kv", rows=16, norm="*fp32", gated=True, scaled=True),
        "chunk 16": partial(chunk, name="chunk_attention", rows=16),
        "chunk 128": partial(chunk, name="chunk_attention", rows=128),
        "chunk capped": partial(chunk, name="chunk_attention", rows=128, gated=True, **capped),
        "delta net": delta,
        "delta net fp32": partial(delta, dtype="fp32"),
        **{f"logits batch {batch}{name}": partial(logits, batch=batch, **changes) for batch in (1, 4)
           for name, changes in {
               "": {}, " fp32": {"dtype": "fp32"}, " offset": {"norm": "*fp32"}, " int8": {"int8": True},
           }.items()},
        "add offset": partial(add, norm="*fp32"),
        "add norm": partial(add, norm="*bf16"),
        "add multiplied": partial(add, norm=None, multiplier=0.22),
        "add scaled": partial(add, norm="*bf16", scalar="*bf16"),
        "mask": partial(mask, name="_mask_rows_kernel", SECOND=3, THIRD=4, BLOCK_K=1024),
        "mask gemm": partial(mask, name="_mask_gemm_kernel", config=mask_config),
        "subnormals": subnormals,
        **{f"{name}": partial(ends, name=name) for name in ("embed", "argmax")},
        **{f"sample {name}{' fp16' * half}": partial(sampling, name=name, half=half)
           for name in ("count", "threshold", "draw") for half in (False, True)},
        **{f"sample {name} capped": partial(sampling, name=name, half=False, multiplier=0.125, cap=30.0)
           for name in ("count", "draw")},
    }  # fmt: skip
    for name, build in cases.items():
        if name.startswith(only):
            yield name, build(arch)


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:]):
        for name, compiled in compiled_cases(arch):
            print(json.dumps({"arch": arch, "kernel": name, **resources(compiled)}), flush=True)
