#!/usr/bin/env bash
# ctranslate2 4.8.5 with transformers 5.24.0: `TransformersConverter` on a Llama with the rotary scaling of Llama 3.1 to 3.3
# (`rope_type` llama3, factor 8, low and high frequency factors 1 and 4, original context 8192), float32 on a CPU.
#
# Guess: the scaling is converted, as its name is in the converter's list of supported types; logits are transformers' to 1e-4.
# Seen: the converted model has the scaling's type and its frequency factors, but neither its factor, which is then 1, nor the
# original context, so nothing is scaled: logits are those of the same weights without any scaling, to 1e-4. They differ from
# transformers' by up to 6.7 on 1,500 random tokens (largest logit 8), and by little on short texts. Linear scaling is converted. Nothing is printed.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.add_special_tokens(["<s>", "</s>"])
LLAMA = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = {
    "none": {"rope_type": "default"}, "linear": {"rope_type": "linear", "factor": 8.0}, "llama3": {"rope_type": "llama3", **LLAMA}
}
LENGTH = 1500
ids = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def build(scaling):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=131072, rope_parameters={"rope_theta": 500000.0, **scaling},
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5)
    return model


def converted(model, folder):
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}')
    TransformersConverter(str(folder)).convert(str(folder / "out"))
    generator = ctranslate2.Generator(str(folder / "out"), device="cpu", compute_type="float32")
    tokens = ctranslate2.StorageView.from_array(ids.numpy().astype(np.int32))
    found = generator.forward_batch(tokens, ctranslate2.StorageView.from_array(np.array([LENGTH], np.int32)))
    return torch.from_numpy(np.array(found))[0, :, :258]


print(*(f"{name} {version(name)}" for name in ("ctranslate2", "transformers", "torch")))
right, found = {}, {}
for name, scaling in SCALINGS.items():
    model = build(scaling)
    with torch.inference_mode():
        right[name] = model(ids).logits[0]
    found[name] = converted(model, Path(sys.argv[1], name))
    print(f"{name}: largest difference from transformers {(found[name] - right[name]).abs().max():.2g}, "
          f"from transformers without scaling {(found[name] - right['none']).abs().max():.2g}, largest logit {right[name].abs().max():.2g}")
assert all((found[name] - right[name]).abs().max() < 1e-3 for name in ("none", "linear"))
assert (found["llama3"] - right["none"]).abs().max() < 1e-3 and (found["llama3"] - right["llama3"]).abs().max() > 0.3
PY
