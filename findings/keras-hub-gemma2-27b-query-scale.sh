#!/usr/bin/env bash
# keras-hub 0.32.0 (Keras 3.15.1 on torch 2.13.0) with transformers 5.24.0: `GemmaBackbone.from_preset` of a Hugging Face folder in the
# shape of Gemma 2 27B, whose queries are scaled by the root of 144 (`query_pre_attn_scalar`, hidden size over heads) and not by
# that of its head size, 128. Gemma 2 2B and 9B have both equal.
#
# Guess: hidden states are transformers' to 1e-4, as the converter reads `query_pre_attn_scalar` into an argument for this.
# Seen: `query_head_dim_normalize=False` reaches the backbone, whose decoder block passes True to its attention whatever it was
# given. So queries of the 27B are 6% too large in every layer. Logits differ by 0.26 (largest logit 19); they are those of the same
# weights with `query_pre_attn_scalar` 128, to 1e-4. A model in the shape of the 9B is equal. Nothing is printed.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 keras==3.15.1 kagglehub==1.0.3 sentencepiece==0.2.3
"$folder/venv/bin/pip" install -q --no-deps keras-hub==0.32.0  # its tokenizers need tensorflow-text; the models do not
KERAS_BACKEND=torch "$folder/venv/bin/python" - "$folder" <<'PY'
import copy
import sys
from importlib.metadata import version
from pathlib import Path

import keras_hub
import numpy as np
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

# Heads and sizes of the 27B over eight: 4608 = 32 heads * 144, head size 128, 16 heads of keys.
SHAPES = {"9B": {"hidden_size": 576, "query_pre_attn_scalar": 128}, "27B": {"hidden_size": 576, "query_pre_attn_scalar": 144}}
ids = torch.randint(0, 256, (1, 48), generator=torch.Generator().manual_seed(1))


def build(hidden_size, query_pre_attn_scalar):
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(
        vocab_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=128, sliding_window=64, hidden_size=hidden_size, query_pre_attn_scalar=query_pre_attn_scalar,
    )).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return model


def logits(model):
    with torch.inference_mode():
        return model(ids).logits[0]


print(*(f"{name} {version(name)}" for name in ("keras-hub", "keras", "transformers", "torch")))
found = {}
for name, shape in SHAPES.items():
    model = build(**shape)
    model.save_pretrained(Path(sys.argv[1], name))
    backbone = keras_hub.models.GemmaBackbone.from_preset(str(Path(sys.argv[1], name)), dtype="float32")
    with torch.inference_mode():
        states = backbone({"token_ids": ids.numpy(), "padding_mask": np.ones(ids.shape, np.int32)})
        keras = backbone.token_embedding(states, reverse=True)[0]
    right, of_head_size = logits(model), logits(build(**shape | {"query_pre_attn_scalar": 128}))
    found[name] = [float((keras - other).abs().max()) for other in (right, of_head_size)]
    inner = {layer.attention.query_head_dim_normalize for layer in backbone.transformer_layers}
    print(f"{name}: query_head_dim_normalize {backbone.query_head_dim_normalize}, in the layers {inner}; largest difference from "
          f"transformers {found[name][0]:.2g}, with query_pre_attn_scalar 128 {found[name][1]:.2g}, largest logit {right.abs().max():.2g}")
    assert backbone.query_head_dim_normalize is (name == "9B") and inner == {True}
assert found["9B"][0] < 1e-3 and found["27B"][1] < 1e-3 and found["27B"][0] > 0.1
PY
