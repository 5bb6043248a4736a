#!/usr/bin/env bash
# Everything a GPU has to show besides decoding speed, in one call: kernel and decoder tests, tests that need a GPU, the
# sanitizer. Five minutes on one GPU, less on several.
#
#     PYTHONPATH=. bash benchmarks/gpu_check.sh RESULTS_FOLDER
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${1:?a folder for the results} PYTHONUNBUFFERED=1
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" = 0 ]; then
    echo "gpu_check.sh: expected an NVIDIA GPU, found none that nvidia-smi lists" >&2
    exit 2
fi
mkdir -p "$OUT"
failed="$OUT/failed"
rm -f "$failed"

part() { # GPU, name, command...
    local began=$SECONDS name=$2 status=0
    CUDA_VISIBLE_DEVICES=$(($1 % gpus)) "${@:3}" >"$OUT/$name.log" 2>&1 || status=$?
    [ $status = 0 ] || echo "$name" >>"$failed"
    echo "== $name: exit $status, $((SECONDS - began)) s"
    tail -n 12 "$OUT/$name.log" | cut -c 1-600
}

# The first of these compiles the kernels, which the sanitizer would slow down.
part 0 kernels python3 -m pytest -q -p no:cacheprovider -n 8 tests/triton_cases.py tests/triton_decoder_cases.py \
    tests/triton_runtime_cases.py tests/triton_codes_cases.py tests/triton_experts_cases.py
part 2 sanitize-memory python3 benchmarks/gpu.py sanitize memcheck &
part 3 sanitize-races python3 benchmarks/gpu.py sanitize racecheck &
part 0 gpu-tests python3 -m pytest -q -p no:cacheprovider -n 0 -m gpu &
wait
if [ -f "$failed" ]; then
    echo "failed: $(tr '\n' ' ' <"$failed")"
    exit 1
fi
