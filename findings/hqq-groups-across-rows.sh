#!/usr/bin/env bash
# hqq 0.2.8.post1 on a CPU, 4 bits in groups along the inputs (axis=1), of 128 where the layer has 576 inputs, as SmolLM2-135M has
# (gpt-oss: 2880), which 128 does not divide.
#
# Guess: it is refused, as by compressed-tensors 0.20.1, or a row's last group is shorter.
# Seen: nothing is said. The matrix is cut into groups as one long row, so every ninth group has 64 weights of an output and 64 of
# the next. Where every second output's weights are 100 times smaller, a ninth of them is rounded to the large ones' steps: these
# outputs have an error of 0.40 of themselves, of 0.06 with groups of 64 or 96, which divide a row.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 hqq==0.2.8.post1 compressed-tensors==0.20.1
"$folder/venv/bin/python" - <<'PY'
import copy
from importlib.metadata import version

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

INPUTS, OUTPUTS = 576, 64
torch.manual_seed(0)
layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
with torch.no_grad():
    layer.weight[1::2] /= 100
weight, x = layer.weight.detach().clone(), torch.randn(256, INPUTS)
small = (x @ weight.T)[:, 1::2]
print(*(f"{name} {version(name)}" for name in ("torch", "hqq", "compressed-tensors")))
for group, least, most in ((64, 0.03, 0.12), (96, 0.03, 0.12), (128, 0.3, 0.6)):
    config = BaseQuantizeConfig(nbits=4, group_size=group, axis=1)
    rounded = HQQLinear(copy.deepcopy(layer), config, compute_dtype=torch.float32, device="cpu")
    scales, restored = rounded.meta["scale"].numel(), (rounded.dequantize() - weight)[1::2].abs()
    error = float((rounded(x)[:, 1::2] - small).norm() / small.norm())
    first, rest = (float(part.square().mean().sqrt() / weight[1::2].std()) for part in (restored[:, :64], restored[:, 64:]))
    print(f"groups of {group}: {scales} scales; small rows: outputs off by {error:.2f}, their first 64 weights by {first:.2f}, "
          f"the others by {rest:.2f}")
    assert scales == INPUTS * OUTPUTS // group and least < error < most and (first > 5 * rest) is (group == 128)
args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=128, symmetric=True)
scale = torch.ones(OUTPUTS, -(-INPUTS // 128))
try:
    quantize(weight, scale, torch.zeros_like(scale), args)
except ValueError as refusal:
    print("compressed-tensors:", refusal)
else:
    raise SystemExit("expected compressed-tensors to refuse groups of 128")
PY
