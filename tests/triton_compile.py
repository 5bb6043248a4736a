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

from wisparse.kernels.gpu import attention as attention_module
from wisparse.kernels.gpu import delta_net as delta_net_module
from wisparse.kernels.gpu import head, masked_gemm, packed_gemv, plan, sample
from wisparse.kernels.gpu.attention import QK_NORMS, AttentionShape, KVSlots, QKNorms, RotaryTables, Rows
from wisparse.kernels.gpu.common import Counting, Input, KVSplits, Output, Weights, Workspace
from wisparse.kernels.gpu.head import Logits, _logits_kernel, head_config
from wisparse.kernels.gpu.masked_gemm import masked_gemm_kernel
from wisparse.kernels.gpu.plan import GemvTile, Gpu
from wisparse.kernels.gpu.reduction import _residual_add_kernel
from wisparse.kernels.gpu.weights import BITS, LinearShape, padded_width

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMEM_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
SHAPES = {  # Llama-3.1-8B's: K, widths, source, target
    "qkv": (4096, (4096, 1024, 1024), "hidden", "plain"),
    "o": (4096, (4096,), "attention", "residual"),
    "gate_up": (4096, (14336, 14336), "hidden", "silu"),
    "down": (14336, (4096,), "plain", "residual"),
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
    shared = compiled.metadata.shared
    declared = sum(map(int, re.findall(r"\.shared \.align 16 \.b8 smem\[(\d+)\]", compiled.asm["ptx"])))
    return {
        "registers": registers, "stack": stack, "local": local, "shared": shared, "declared": declared,
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
    kind, size, zeros = quant
    coded = kind != "none"
    stride = sum(map(padded_width, widths)) * BITS[kind] // 32 if coded else sum(widths)
    return LinearShape(
        k, widths, stride, TORCH_TYPES[dtype], torch.device("meta"), dense, kind, coded * (size or k), zeros
    )


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
    in_scratch, many = chosen.launch.smem == "", chosen.kernel is masked_gemm_kernel
    quantized = quant[0] != "none"
    given = {
        "plain": Input(f"*{dtype}"),
        "hidden": Input(f"*{dtype}", "*fp32", norm or f"*{dtype}"),
        "attention": Input(None, attention=KVSplits("*fp32", "*fp32", "*fp32")),
    }[source]
    types = {
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
        "eps": "fp32",
        "ssq_parts": "i32",
    }  # fmt: skip
    constants = dict(problem=chosen.problem, launch=chosen.launch)
    if chosen.packed is not None:
        constants["packed"] = chosen.packed
    return compile_kernel(chosen.kernel, arch, types, constants, chosen.tile.warps)


def mask(arch: int, projections: int):
    types = dict.fromkeys(("x_ptr", "out_ptr"), "*bf16") | dict.fromkeys(
        ("scale_ptr", "threshold_ptr", "row_mask_ptr"), "*fp32"
    )
    constants = dict(K=4096, SECOND=projections, THIRD=projections + 1, BLOCK_K=1024, PDL=arch >= 90)
    return compile_kernel(masked_gemm._mask_rows_kernel, arch, types | {"M": "i32"}, constants, 4)


def mask_gemm(arch: int, block_m: int, tile: GemvTile):
    types = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16") | dict.fromkeys(
        ("scale_ptr", "threshold_ptr", "row_mask_ptr"), "*fp32"
    )
    config = masked_gemm._MaskGemm(4096, 4096, 1024, 1024, 6144, block_m, tile.block_n, tile.block_k, tile.stages)
    constants = dict(config=config, bias_ptr=None)
    return compile_kernel(masked_gemm._mask_gemm_kernel, arch, types | {"M": "i32"}, constants, tile.warps)


def subnormals(arch: int):
    source, constraints = packed_gemv.sum_source("bfloat16")
    constants = dict(X=0x6F806F80, TOTAL=source, CONSTRAINTS=constraints)
    return compile_kernel(packed_gemv._subnormal_kernel, arch, {"out_ptr": "*fp32"}, constants, 1)


LLAMA = AttentionShape(32, 8, 128, rotary=128)


def attention(arch: int, dtype: str = "bf16", splits: int = 16, stages: int = 3, norm: str | None = None, **changes):
    """Llama-3.1-8B's; ``norm``: type of q and k norms' weights; ``changes``: of the shape, as other families have."""
    kind = f"*{dtype}"
    types = {
        "qkv_ptr": kind, "norms": QKNorms(norm, norm, "fp32"),
        "rotary": RotaryTables(kind, kind, kind if changes.pop("scaled", False) else None),
        "cache": KVSlots(kind, kind, "i32"),
        "rows": Rows("*i64", "*i32"), "out": KVSplits("*fp32", "*fp32", "*fp32"), "scale_log2": "fp32",
    }  # fmt: skip
    shape = LLAMA._replace(**changes)
    config, warps = attention_module.decode_config(shape, splits, 1, TORCH_TYPES[dtype], None, stages)
    constants = dict(shape=shape, config=config, PDL=arch >= 90)
    return compile_kernel(attention_module._attention_kernel, arch, types, constants, warps)


def chunk(arch: int, name: str, rows: int, norm: str | None = None, **changes: Any):
    """Llama-3.1-8B's attention of a short prompt; ``norm`` and ``changes`` as for ``attention``."""
    types = {
        "qkv_ptr": "*bf16", "q_ptr": "*bf16", "out_ptr": "*bf16", "chunk_ptr": "*i64",
        "norms": QKNorms(norm, norm, "fp32"),
        "rotary": RotaryTables("*bf16", "*bf16", "*bf16" if changes.pop("scaled", False) else None),
        "cache": KVSlots("*bf16", "*bf16", "i32"), "rows": "i32", "scale_log2": "fp32",
    }  # fmt: skip
    shape = LLAMA._replace(**changes)
    kernel = getattr(attention_module, f"_{name}_kernel")
    types = {key: value for key, value in types.items() if key in kernel.arg_names}
    constants = dict(shape=shape, config=attention_module.chunk_config(shape, rows))
    return compile_kernel(kernel, arch, types, constants, 4)


def logits(arch: int, batch: int = 1, dtype: str = "bf16", norm: str | None = None, int8: bool = False):
    types = {
        "hidden_ptr": f"*{dtype}", "ssq_ptr": "*fp32", "norm_ptr": norm or f"*{dtype}",
        "weight_ptr": "*i8" if int8 else f"*{dtype}", "scale_ptr": "*fp32" if int8 else None,
        "out": Logits("*fp32", "*fp32", "*i32"), "eps": "fp32", "V": "i32",
    }  # fmt: skip
    config = head_config(batch, 4096, 16, TORCH_TYPES[dtype])
    constants = dict(config=config, PDL=arch >= 90)
    return compile_kernel(_logits_kernel, arch, types, constants, 4 if batch == 1 else 2, config.stages)


def ends(arch: int, name: str):
    """The embedding, and the greedy choice."""
    types = {
        "token_ptr": "*i64", "embedding_ptr": "*bf16", "hidden_ptr": "*bf16", "ssq_ptr": "*fp32",
        "logits": Logits("*fp32", "*fp32", "*i32"), "next_ptr": "*i64", "position_ptr": "*i32", "tiles": "i32",
    }  # fmt: skip
    kernel = getattr(head, f"_{name}_kernel")
    constants = dict(MULTIPLIER=1.0, K=4096, TILES=16, BLOCK=256 if name == "embed" else 8192, PDL=arch >= 90)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return compile_kernel(kernel, arch, {k: v for k, v in types.items() if k in kernel.arg_names}, constants, 8)


def add(arch: int, norm: str | None, multiplier: float, dtype: str = "bf16", scaled: bool = False):
    types = {"half_ptr": f"*{dtype}", "hidden_ptr": f"*{dtype}", "ssq_ptr": "*fp32", "eps": "fp32"}
    constants = dict(MULTIPLIER=multiplier, K=4096, BLOCK=4096, PDL=arch >= 90)
    for name, given in (("norm_ptr", norm), ("scalar_ptr", f"*{dtype}" if scaled else None)):
        (constants if given is None else types)[name] = given
    return compile_kernel(_residual_add_kernel, arch, types, constants, 8)


def delta_net(arch: int, dtype: str = "bf16"):
    """Qwen3.5-4B's: hidden state 2560, 16 key heads and 32 value heads, each 128 wide."""
    module, kind = delta_net_module, f"*{dtype}"
    types = {
        "given": module.DeltaInput(kind, kind, "*fp32", "*fp32"), "weights": module.DeltaTensors(*[kind] * 6),
        "memory": module.DeltaMemory(kind, "*fp32", "i32", "i32"), "rows": Rows("*i64", "*i32"), "out_ptr": kind,
        "ssq_parts": "i32", "eps": "fp32", "query_scale": "fp32",
    }  # fmt: skip
    shape = module._Shape(2560, 16, 32, 128, 128, 4, 4, 128, 128, ssq_pad=32, block_h=1024)
    constants = dict(shape=shape, PDL=arch >= 90)
    return compile_kernel(module._delta_net_kernel, arch, types, constants, module.warps_for(shape))


def sampling(arch: int, name: str, half: bool, multiplier: float = 1.0, cap: float | None = None):
    types = {
        "logits": Logits("*fp32", "*fp32", "*i32"), "choice": sample.Choice("*i64", "*i64", "*i32"),
        "state": sample.SampleState(
            "*fp64", "*i64", "*i32", "*i32", "*fp64", "*i32", "*fp64", "*fp32", "*i32", "*i32"
        ),
        "V": "i32", "head_tiles": "i32", "tiles": "i32",
    }  # fmt: skip
    kernel = getattr(sample, f"_{name}_kernel")
    constants = dict(HEAD_PAD=8192, TILES_PAD=128, finish=sample.Finish(multiplier, cap, half), PDL=arch >= 90)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return compile_kernel(kernel, arch, {k: v for k, v in types.items() if k in kernel.arg_names}, constants, 4)


def compiled_cases(arch: int, only: str = "") -> Iterator[tuple[str, Any]]:
    """Name and compiled kernel of every variant that is watched, if the name begins with ``only``."""
    cases: dict[str, tuple] = {}

    def tile_of(group: str, kind: str) -> GemvTile:
        return plan.default_tile(Gpu(arch, 132), llama_shape(group, kind == "dense"), kind)

    def linear(name: str, tile: GemvTile, group: str, batch: int = 1, dense: bool = False, *more, **changes) -> None:
        """A case; of those that are not dense another one that counts."""
        waiting = " waiting" if tile.reducers else ""
        ending = ", as measured" if name.endswith(", as measured") else ""
        name = name.removesuffix(ending) + waiting + ending
        cases[name] = (partial(gemv, **changes), tile, group, batch, dense, *more)
        if not dense and not more and not changes and (arch == 90) == ("measured" in name):
            cases[f"{name} counting"] = (partial(gemv, count=True), tile, group, batch, dense)

    regimes = (("sparse", 1), ("dense", 1), ("rows", 2), ("batch", 8))
    for group, (k, widths, _, _) in SHAPES.items():
        for kind, batch in regimes:
            linear(f"gemv {group} {kind} {batch}", tile_of(group, kind), group, batch, kind == "dense")
        linear(f"gemv {group} fp32", tile_of(group, "sparse"), group, 1, False, "fp32")
        linear(f"gemv {group} batch 8 fp32", tile_of(group, "batch"), group, 8, False, "fp32")
        for kind, batch in (*regimes, ("batch", 11)) if arch == 90 else ():
            tile = plan.measured_tiles()[f"sm90:{kind}:{k}x{sum(widths)}"]
            linear(f"gemv {group} {kind} {batch}, as measured", tile, group, batch, kind == "dense")
    # Programs without a block of channels, and the least that a spinning reducer may have.
    linear("gemv down batch 8 idle", GemvTile(128, 64, 2048, stages=3, unroll=1), "down", 8)
    for group in ("qkv", "down"):
        linear(f"gemv {group} sparse 1", GemvTile(64, 4, 5, 4, unroll=2, reducers=4), group)
    if arch == 90:
        for group, kind, batch in (("qkv", "sparse", 1), ("o", "rows", 2), ("down", "batch", 8)):
            k, widths, _, _ = SHAPES[group]
            tile = plan.measured_tiles()[f"sm90:{kind}:{k}x{sum(widths)}"]
            linear(f"gemv {group} {kind} {batch} by row", tile, group, batch, pdl=False, by_row=True)
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
        linear(f"gemv {group} {kind} {batch} {name}", tile_of(group, kind), group, batch, **changes)
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
        shape = llama_shape(group, dense, dtype, quant)
        tile, _ = plan.choose_tile(Gpu(arch, 132), shape, rows)
        name = f"gemv {group} {quant[0]}-{quant[1]} {plan.regime(rows, dense=dense)} {rows}"
        linear(name, tile, group, rows, dense, dtype, quant=quant, count=not dense)
    wide = dict(norm="*bf16", norm_of=QK_NORMS["head"], heads=32, value_norm=True)
    cases |= {
        "attention": (attention,),
        "attention short": (attention, "bf16", 4),
        "attention fp32": (attention, "fp32"),
        **({f"attention {n} stretches": (attention, "bf16", n, 5) for n in (8, 16)} if arch == 90 else {}),
        "attention head norm offset": (partial(attention, norm="*fp32", heads=8, kv_heads=4, d=256, rotary=256),),
        "attention rotated head norm": (partial(attention, norm="*bf16", norm_of=QK_NORMS["rotated head"]),),
        "attention whole norm": (partial(attention, norm="*bf16", norm_of=QK_NORMS["whole"], kv_heads=32),),
        "attention capped": (
            partial(attention, cap_log2=72.0, window=4096, heads=8, kv_heads=4, d=256, rotary=256),
        ),
        "attention interleaved": (partial(attention, interleaved=True, rotary=64),),
        "attention unrotated": (partial(attention, rotary=0),),
        "attention scaled": (partial(attention, scaled=True),),
        "attention gated": (
            partial(attention, norm="*fp32", gated=True, heads=16, kv_heads=4, d=256, rotary=64),
        ),
        "attention 512 wide": (partial(attention, kv_heads=4, d=512, rotary=512, shared=True, **wide),),
        "attention 512 wide fp32": (
            partial(attention, kv_heads=4, d=512, rotary=512, shared=True, **(wide | {"norm": "*fp32"})), "fp32",
        ),
        "attention 512 wide short": (
            partial(attention, kv_heads=4, d=512, rotary=512, shared=True, **wide), "bf16", 4,
        ),
        "attention 256 wide": (partial(attention, kv_heads=16, d=256, rotary=256, window=1024, **wide),),
        "chunk store": (chunk, "store_kv", 16),
        "chunk store normed": (partial(chunk, norm="*fp32", gated=True, scaled=True), "store_kv", 16),
        "chunk 16": (chunk, "chunk_attention", 16),
        "chunk 128": (chunk, "chunk_attention", 128),
        "chunk capped": (
            partial(chunk, cap_log2=72.0, window=4096, gated=True, heads=8, kv_heads=4, d=256, rotary=256),
            "chunk_attention", 128,
        ),
        "delta net": (delta_net,),
        "delta net fp32": (delta_net, "fp32"),
        "logits batch 1": (logits,),
        "logits batch 4": (logits, 4),
        "logits fp32": (logits, 1, "fp32"),
        "logits batch 4 fp32": (logits, 4, "fp32"),
        "logits batch 1 offset": (partial(logits, norm="*fp32"),),
        "logits batch 4 offset": (partial(logits, norm="*fp32"), 4),
        "logits int8": (partial(logits, int8=True),),
        "logits int8 batch 4": (partial(logits, int8=True), 4),
        "add offset": (add, "*fp32", 1.0),
        "add norm": (add, "*bf16", 1.0),
        "add multiplied": (add, None, 0.22),
        "add scaled": (partial(add, scaled=True), "*bf16", 1.0),
        "mask": (mask, 3),
        "mask gemm": (mask_gemm, 64, GemvTile(64, 64, 1, 4, stages=4, unroll=1)),
        "subnormals": (subnormals,),
        "embed": (ends, "embed"),
        "argmax": (ends, "argmax"),
        **{f"sample {n}{' fp16' * half}": (sampling, n, half) for n in ("count", "threshold", "draw")
           for half in (False, True)},
        "sample count capped": (sampling, "count", False, 0.125, 30.0),
        "sample draw capped": (sampling, "draw", False, 0.125, 30.0),
    }  # fmt: skip
    for name, (build, *arguments) in cases.items():
        if name.startswith(only):
            yield name, build(arch, *arguments)


def main(archs: list[int]) -> None:
    for arch in archs:
        for name, compiled in compiled_cases(arch):
            print(json.dumps({"arch": arch, "kernel": name, **resources(compiled)}), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
