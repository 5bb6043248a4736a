#!/usr/bin/env bash
# numba 0.68.1 on an x86-64 CPU with AVX2: NUMBA_CPU_NAME, with which one compiles for an older CPU, as for a cache of compiled
# functions that several machines share.
#
# Guess: NUMBA_CPU_NAME=nehalem compiles for Nehalem, which has SSE4.2 and no AVX.
# Seen: the name sets the scheduling model only; the features stay those of the machine that compiles, so the code has AVX
# registers (and 512-bit ones where the CPU has them, also if code for the host itself has none) and Nehalem cannot run it. Only with
# NUMBA_CPU_FEATURES beside it, or with the name "generic", which empties the features, is the code what the name says.
# Ends with an error if this changes.
set -euo pipefail
grep -q avx2 /proc/cpuinfo || { echo "expected a CPU with AVX2" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q numba==0.68.1 numpy==2.4.6
cat > "$folder/registers.py" <<'PY'
import sys

import numba
import numpy as np


@numba.njit(fastmath=True)
def axpy(out, a, b):
    for i in range(len(out)):
        out[i] += a[i] * b[i]


axpy(*np.zeros((3, 64), np.float32))
code = next(iter(axpy.inspect_asm().values()))
found = {name: code.count(f"%{name}") for name in ("xmm", "ymm", "zmm")}
print(numba.__version__, found, file=sys.stderr)
print("AVX" if found["ymm"] + found["zmm"] else "SSE")
PY
run() { env "$@" "$folder/venv/bin/python" "$folder/registers.py"; }
host=$(run A=); named=$(run NUMBA_CPU_NAME=nehalem); generic=$(run NUMBA_CPU_NAME=generic)
both=$(run NUMBA_CPU_NAME=nehalem NUMBA_CPU_FEATURES=+sse4.2)
echo "host $host; named nehalem $named; generic $generic; nehalem with features $both"
[ "$host $named $generic $both" = "AVX AVX SSE SSE" ]
