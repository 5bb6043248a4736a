#!/usr/bin/env bash
# keras-hub 0.32.0 (Keras 3.15.1 on torch 2.13.0) with transformers 5.24.0: `Llama3Backbone.from_preset` of a Hugging Face folder.
#
# Guess: what config.json says is read, or refused, as it refuses a `rope_type` other than llama3 in `rope_scaling`.
# Seen: three settings are lost, and nothing is printed; logits are those of the same weights without them, to 2e-5. (1) `rms_norm_eps`: it
# is 1e-6 always, where Llama 3, SmolLM2 and most others have 1e-5. It shows where embeddings are small: with a deviation of 0.01 logits
# differ by 2.1 (largest 6.5); with SmolLM2-135M, which has 0.14, by 0.03 of 40. (2) The rotary scaling of Llama 3.1 in a folder that
# transformers 5 saved, as `rope_parameters`: only `rope_theta` is taken from there. In the older spelling, `rope_scaling`, it is read.
# (3) `attention_bias`.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 keras==3.15.1 kagglehub==1.0.3 sentencepiece==0.2.3
"$folder/venv/bin/pip" install -q --no-deps keras-hub==0.32.0  # its tokenizers need tensorflow-text; the models do not
KERAS_BACKEND=torch "$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import keras_hub
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

THETA, LENGTH = 500000.0, 600
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES = {
    "epsilon 1e-6": {}, "epsilon 1e-5": {"rms_norm_eps": 1e-5}, "scaling of Llama 3.1": {"rope_parameters": SCALED | {"rope_theta": THETA}},
    "the same as rope_scaling": {"rope_parameters": SCALED | {"rope_theta": THETA}}, "biases of attention": {"attention_bias": True},
}
ids = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def build(settings):
    config = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}} | settings
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=131072, tie_word_embeddings=False, **config,
    )).eval()
    draws = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # The mean square of the embedding, which the first norm adds epsilon to, is 1e-4.
            std = 0.01 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=draws) * std
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=draws)
    return model


def logits(model):
    with torch.inference_mode():
        return model(ids).logits[0]


print(*(f"{name} {version(name)}" for name in ("keras-hub", "keras", "transformers", "torch")))
for number, (name, settings) in enumerate(CASES.items()):
    path = Path(sys.argv[1], str(number))
    model = build(settings)
    model.save_pretrained(path)
    if "rope_scaling" in name:
        config = json.loads((path / "config.json").read_text())
        config |= {"rope_theta": config["rope_parameters"].pop("rope_theta"), "rope_scaling": config.pop("rope_parameters")}
        (path / "config.json").write_text(json.dumps(config))
    backbone = keras_hub.models.Llama3Backbone.from_preset(str(path), dtype="float32")
    with torch.inference_mode():
        states = backbone({"token_ids": ids.numpy(), "padding_mask": np.ones(ids.shape, np.int32)})
        found = backbone.token_embedding(states, reverse=True)[0]
    right, without = logits(model), logits(build({}))
    off, rest = float((found - right).abs().max()), float((found - without).abs().max())
    print(f"{name}: largest difference from transformers {off:.2g}, without the setting {rest:.2g}, largest logit {right.abs().max():.2g}")
    read = number in (0, 3)
    assert off < 2e-3 if read else off > 0.05 and rest < 2e-3
PY
