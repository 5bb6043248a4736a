#!/usr/bin/env bash
# onnxruntime-genai 0.18.0, its model builder (float32, CPU), with transformers 5.24.0: a Llama with linear rotary scaling
# (DeepSeek-Coder 6.7B and 33B: factor 4), and one with YaRN.
#
# Guess: linear scaling and YaRN are exported, as the builder names both, or refused.
# Seen: for `LlamaForCausalLM` every scaling but llama3's is dropped without a word: the cosines are those of no scaling, and the
# logits are those of the same weights without scaling, to 1e-4. They differ from transformers' by half of the largest and more from the
# second token on. Linear scaling in `MistralForCausalLM` is exported right, and so is llama3's in Llama.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 onnxruntime==1.32.0 onnxruntime-genai==0.18.0 onnx-ir
cat > "$folder/build.py" <<'PY'
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.add_special_tokens(["<s>", "</s>"])
LENGTH, HEADS, HEAD = 40, 4, 16
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "none": {"rope_type": "default"}, "llama3": {"rope_type": "llama3", **LLAMA3}, "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
ids = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def build(family, scaling):
    kind, config = {"llama": (LlamaForCausalLM, LlamaConfig), "mistral": (MistralForCausalLM, MistralConfig)}[family]
    torch.manual_seed(0)
    model = kind(config(
        vocab_size=258, hidden_size=HEADS * HEAD, intermediate_size=112, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=HEAD, max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, **scaling},
    )).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5 if "embed" in name else 1.2 * parameter.shape[1] ** -0.5)
    return model


def exported(model, folder):
    """Logits (LENGTH, 258) of the builder's graph."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}')
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder, "-o", folder / "out", "-p", "fp32", "-e", "cpu", "-c", folder]
    subprocess.run(command, check=True, capture_output=True)
    session = onnxruntime.InferenceSession(folder / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    feed = {one.name: np.zeros((1, 2, 0, HEAD), np.float32) for one in session.get_inputs() if one.name.startswith("past")}
    feed |= {"input_ids": ids.numpy(), "attention_mask": np.ones((1, LENGTH), np.int64)}
    return torch.from_numpy(session.run(["logits"], feed)[0])[0]


print(*(f"{name} {version(name)}" for name in ("onnxruntime-genai", "onnxruntime", "transformers", "torch")))
seen = {}
for family in ("llama", "mistral"):
    for name, scaling in SCALINGS.items():
        if family == "mistral" and name in ("llama3", "yarn"):
            continue
        model = build(family, scaling)
        with torch.inference_mode():
            right, plain = model(ids).logits[0], build(family, SCALINGS["none"])(ids).logits[0]
        found = exported(model, Path(sys.argv[1], f"{family}-{name}"))
        seen[family, name] = [float((found - other).abs().max()) for other in (right, plain)]
        print(f"{family}, {name}: largest difference from transformers {seen[family, name][0]:.2g}, from transformers without scaling "
              f"{seen[family, name][1]:.2g}, largest logit {right.abs().max():.2g}")
wrong = [one for one, (difference, _) in seen.items() if difference > 1e-3]
assert wrong == [("llama", "linear"), ("llama", "yarn")], wrong
assert all(seen[one][0] > 1 and seen[one][1] < 1e-4 for one in wrong)
PY
"$folder/venv/bin/python" "$folder/build.py" "$folder"
