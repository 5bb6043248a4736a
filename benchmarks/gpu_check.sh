#!/usr/bin/env bash
# Everything a GPU has to show besides decoding speed, in one call of about eight minutes: kernel and decoder tests,
# sampling's cost, loading, the sanitizer, real models against the plain decoder.
#
#     PYTHONPATH=. bash benchmarks/gpu_check.sh RESULTS_FOLDER MODEL...
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${1:?a folder for the results} PYTHONUNBUFFERED=1
shift
mkdir -p "$OUT"

part() {
    local name=$1 began=$SECONDS
    shift
    "$@" >"$OUT/$name.log" 2>&1
    echo "== $name: exit $?, $((SECONDS - began)) s"
    tail -n 12 "$OUT/$name.log" | cut -c 1-600
}

# Compiles the kernels as well.
part kernels python3 -m pytest -q -p no:cacheprovider -n 8 tests/triton_cases.py tests/triton_decoder_cases.py \
    tests/triton_sample_cases.py tests/triton_runtime_cases.py
part sample python3 benchmarks/gpu_sample.py
part load python3 benchmarks/gpu_load.py ${LOAD_OPTIONS:-}
# What follows measures no time.
part gpu-tests python3 -m pytest -q -p no:cacheprovider -m gpu &
part sanitize-memory python3 benchmarks/gpu_sanitize.py memcheck &
part sanitize-races python3 benchmarks/gpu_sanitize.py racecheck &
part example python3 benchmarks/gpu_example.py "$@" &
wait
