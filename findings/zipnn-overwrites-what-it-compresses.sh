#!/usr/bin/env bash
# zipnn 0.5.4 (lossless compression of weights), `ZipNN.compress` of tensors and of bytes, on a CPU.
#
# Guess: the input stays as it is, and what is decompressed equals it.
# Seen: what is decompressed equals the input as it was, but the input itself is overwritten, for bfloat16 and float32: bits are
# reordered in the caller's memory, so a weight of 0.02 is 1e35 afterwards. It happens to a bytes object too, which
# Python holds to be immutable. float16 and fp8 stay. A model whose state_dict is compressed is destroyed where it stands, and of
# tied weights, which a state_dict has twice, the second is compressed after it was overwritten: it decompresses to other numbers.
# Nothing is printed.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 zipnn==0.5.4
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from zipnn import ZipNN


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


print(*(f"{name} {version(name)}" for name in ("zipnn", "torch", "transformers")))
seen = {}
for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn):
    weight = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    before = weight.clone()
    packed = ZipNN(input_format="torch").compress(weight)
    seen[dtype] = (same(ZipNN(input_format="torch").decompress(packed), before), same(weight, before))
    print(f"{dtype}: decompressed equals what it was {seen[dtype][0]}, input unchanged {seen[dtype][1]}, "
          f"{before[0].item():.3g} is now {weight[0].item():.3g}")
assert [unchanged for _, unchanged in seen.values()] == [False, False, True, True]
assert all(right for right, _ in seen.values())

data = torch.randn(4096).view(torch.uint8).numpy().tobytes()
before = bytes(bytearray(data))
ZipNN(bytearray_dtype="float32").compress(data)
print("bytes object unchanged:", data == before)
assert data != before

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
right = {name: tensor.clone() for name, tensor in model.state_dict().items()}
packed = {name: ZipNN(input_format="torch").compress(tensor) for name, tensor in model.state_dict().items()}
restored = {name: ZipNN(input_format="torch").decompress(one) for name, one in packed.items()}
wrong = [name for name, tensor in restored.items() if not same(tensor, right[name].flatten().view(restored[name].shape))]
left = [name for name, tensor in model.state_dict().items() if same(tensor, right[name])]
print(f"model: {len(restored)} tensors, wrong after decompression {wrong}, unchanged in memory {left}")
assert wrong == ["lm_head.weight"] and not left
PY
