#!/usr/bin/env bash
# Triton 3.6.0, which torch 2.11 brings, and 3.7.1, which torch 2.13 brings: a kernel takes a NamedTuple as `tl.constexpr` and
# counts to one of its fields with `tl.static_range`.
#
# Guess: it compiles, since `if` and `tl.arange` take the same field, and the interpreter runs it.
# Seen: the compiler refuses it, "3 used as tl.static_range start value is not a constexpr", which names the start where the field
# is the end. The same field compiles in `if`, in `tl.arange`, and in `tl.static_range` once a line `N: tl.constexpr = sizes.rows` has named
# it; 3.9.0 compiles all. TRITON_INTERPRET=1 runs all of them in each release, so a kernel that was tested by the interpreter
# alone can fail on its first GPU.
# Compiled for sm_90; no GPU is needed. Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernels.py" <<'PY'
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Sizes(NamedTuple):
    rows: int
    columns: int


@triton.jit
def in_range(out, sizes: tl.constexpr):
    for i in tl.static_range(sizes.rows):
        tl.store(out + i, i + 1)


@triton.jit
def in_named_range(out, sizes: tl.constexpr):
    N: tl.constexpr = sizes.rows
    for i in tl.static_range(N):
        tl.store(out + i, i + 1)


@triton.jit
def in_arange(out, sizes: tl.constexpr):
    i = tl.arange(0, sizes.columns)
    tl.store(out + i, i + 1, mask=i < 3)


@triton.jit
def in_branch(out, sizes: tl.constexpr):
    if sizes.rows == 3:
        for i in tl.static_range(3):
            tl.store(out + i, i + 1)


def result(kernel):
    if os.environ.get("TRITON_INTERPRET") == "1":
        out = torch.zeros(4, dtype=torch.int32)
        kernel[(1,)](out, Sizes(3, 4))
        return out.tolist() == [1, 2, 3, 0]
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, {"out": "*i32", "sizes": "constexpr"}, {"sizes": Sizes(3, 4)})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except triton.CompilationError as error:
        print(" ", str(error.__cause__ or error).strip().splitlines()[-1])
        return False
    return True


found = {kernel.__name__: result(kernel) for kernel in (in_range, in_named_range, in_arange, in_branch)}
how = "interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled"
print(f"triton {triton.__version__}, {how}: {found}")
runs = how == "interpreted" or triton.__version__ == "3.9.0"
assert found == {"in_range": runs, "in_named_range": True, "in_arange": True, "in_branch": True}
PY
python3 -m venv "$folder/venv"
for version in 3.6.0 3.7.1 3.9.0; do
    "$folder/venv/bin/pip" install -q torch==2.13.0 "triton==$version" numpy==2.4.6
    TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1 "$folder/venv/bin/python" "$folder/kernels.py"
    TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1 TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/kernels.py"
done
