#!/usr/bin/env bash
# mlx 0.32.4 with its CPU back end (pip install "mlx[cpu]", Linux): `mx.quantized_matmul` of bfloat16 and float16 activations by weights
# of mode "affine", which is how mlx-lm stores its 4 and 8-bit models.
#
# Guess: products are summed in float32, as on Metal (ml-explore/mlx, issue 963), and as the CPU's product of unquantised weights is.
# Seen: they are summed in the activations' type. 4,096 ones times ones are 256 in bfloat16 and 2,048 in float16, where adding one no
# longer changes the sum. Of normal random numbers the error is 0.07 of the result's norm at 4,096 inputs and 0.03 at 576, for 8
# bits as for 4; the dense product's is 0.002, and rounding the weights to 8 bits costs 0.009. Modes mxfp4 and mxfp8 are summed
# right, and so is affine in float32. SmolLM2-135M-Instruct in 8 bits by mlx-lm 0.32.2 (48 tokens of English) has a KL of 0.15 to the
# dense model with bfloat16 activations, 0.005 with float32. Nothing is printed. (Plain sums on the CPU had the same fault, mended by pull request 4387.)
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4" numpy
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import mlx.core as mx
import numpy as np

INPUTS = 4096


def ones(kind, mode, bits):
    weights, x = mx.ones((64, INPUTS)).astype(kind), mx.ones((1, INPUTS)).astype(kind)
    codes = mx.quantize(weights, bits=bits, mode=mode)
    return float(mx.quantized_matmul(x, *codes, bits=bits, mode=mode)[0, 0])


def error(found, x, weights):
    """Of the norm of the product of the same (dequantised) weights in float32."""
    right = np.array(x.astype(mx.float32)) @ np.array(weights.astype(mx.float32)).T
    return float(np.linalg.norm(np.array(found.astype(mx.float32)) - right) / np.linalg.norm(right))


print(*(f"{name} {version(name)}" for name in ("mlx", "mlx-cpu")), mx.default_device())
for name, kind, seen in (("float32", mx.float32, 4096), ("float16", mx.float16, 2048), ("bfloat16", mx.bfloat16, 256)):
    found = {mode: ones(kind, mode, bits) for mode, bits in (("affine", 4), ("mxfp4", 4), ("mxfp8", 8))}
    print(f"{INPUTS} ones times ones, {name}:", found)
    assert found.pop("affine") == seen and set(found.values()) == {INPUTS}
mx.random.seed(0)
for inputs, least in ((576, 0.02), (4096, 0.04)):
    weights = (mx.random.normal((256, inputs)) * inputs**-0.5).astype(mx.bfloat16)
    x = mx.random.normal((4, inputs)).astype(mx.bfloat16)
    for bits in (4, 8):
        codes = mx.quantize(weights, bits=bits)
        restored = mx.dequantize(*codes, bits=bits)
        found = error(mx.quantized_matmul(x, *codes, bits=bits), x, restored)
        dense, rounding = error(x @ restored.T, x, restored), error(x @ restored.T, x, weights)
        print(f"{inputs} inputs, {bits} bits, normal random numbers in bfloat16: quantized_matmul is off by {found:.3f} of the norm, the "
              f"product of the dequantised weights by {dense:.4f}; rounding weights to {bits} bits costs {rounding:.4f}")
        assert found > least and dense < 0.003
PY
