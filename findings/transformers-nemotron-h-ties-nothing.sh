#!/usr/bin/env bash
# transformers 5.24.0, NemotronHForCausalLM with `tie_word_embeddings` true in its configuration.
#
# Guess: the output layer is the embedding, as in its other causal models, or the value is refused.
# Seen: both have weights of their own, initialised apart, and a checkpoint has both. One that holds the embedding alone, as tied
# models are written, loads with an output layer of random numbers, which is listed as missing. Llama with the same keys ties them.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - "$folder/model" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, NemotronHConfig, NemotronHForCausalLM

print("transformers", version("transformers"), "torch", version("torch"))
common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
mamba = {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1}
made = {
    "nemotron_h": (NemotronHForCausalLM, NemotronHConfig(
        **common, **mamba, head_dim=16, layers_block_type=["linear_attention", "mlp"], tie_word_embeddings=True)),
    "llama": (LlamaForCausalLM, LlamaConfig(**common, num_hidden_layers=1, tie_word_embeddings=True)),
}
seen = {}
for name, (kind, config) in made.items():
    torch.manual_seed(0)
    folder = Path(sys.argv[1], name)
    model = kind(config)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    stored = "lm_head.weight" in tensors
    tensors.pop("lm_head.weight", None)
    save_file(tensors, file, metadata={"format": "pt"})
    again, info = kind.from_pretrained(folder, output_loading_info=True)
    tied = again.lm_head.weight is again.get_input_embeddings().weight
    seen[name] = (stored, tied, sorted(info["missing_keys"]))
    print(f"{name}: lm_head.weight stored {stored}, tied when loaded without it {tied}, missing {seen[name][2]}")
assert seen["llama"] == (False, True, []), seen
assert seen["nemotron_h"] == (True, False, ["lm_head.weight"]), seen
PY
