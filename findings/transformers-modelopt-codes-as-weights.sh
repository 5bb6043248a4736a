#!/usr/bin/env bash
# transformers 5.24.0, a Llama checkpoint in the layout in which NVIDIA ModelOpt publishes FP8 models: float8 codes, a
# `weight_scale` each, and the settings in hf_quant_config.json or as `quant_method: modelopt` in config.json.
#
# Guess: refused, as the method is not one of transformers', or dequantised.
# Seen: it loads in both cases. The codes, up to 448, are taken as bfloat16 weights and no scale is applied, so weights are wrong by a
# factor of some thousands. The scales are listed as unexpected tensors; of config.json's method a warning says that "the
# quantization" is skipped; of the other file there is no word, and no exception in either case.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

print("transformers", version("transformers"), "torch", version("torch"))
sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
dense = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(torch.bfloat16)
expected = dense.model.layers[0].mlp.up_proj.weight.detach().float()
settings = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
seen = {}
for place in ("hf_quant_config.json", "config.json"):
    folder = Path(sys.argv[1], place.partition(".")[0])
    dense.save_pretrained(folder)
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.float().abs().max() / 448
        tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if place == "config.json":
        config = json.loads((folder / place).read_text())
        config["quantization_config"] = {**settings, "quant_method": "modelopt"}
        (folder / place).write_text(json.dumps(config))
    else:
        written = {"producer": {"name": "modelopt", "version": "0.31.0"}, "quantization": settings}
        (folder / place).write_text(json.dumps(written))
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    weight = loaded.model.layers[0].mlp.up_proj.weight
    seen[place] = (weight.dtype, float(weight.detach().abs().max()), len(info["unexpected_keys"]))
    print(f"settings in {place}: largest weight {seen[place][1]:g} in place of {expected.abs().max():.3g}, {weight.dtype}")
assert all(found == (torch.bfloat16, 448.0, 7) for found in seen.values()), seen
PY
