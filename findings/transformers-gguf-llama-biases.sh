#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0: a GGUF file of architecture `llama` whose projections have biases, as a Llama with
# `attention_bias` and `mlp_bias` has them (attn_q.bias, ..., ffn_down.bias; llama.cpp reads these).
#
# Guess: the biases are loaded, or the load report names them as unexpected.
# Seen: they are dropped. Nothing is logged, not even a load report; the configuration says attention_bias False; logits differ by
# 1.0. With biases of zero in the same file they are equal.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
"$folder/venv/bin/python" - <<'PY'
import logging
import tempfile
from importlib.metadata import version
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "blk.0.attn_norm",
         "post_attention_layernorm": "blk.0.ffn_norm", "q_proj": "blk.0.attn_q", "k_proj": "blk.0.attn_k",
         "v_proj": "blk.0.attn_v", "o_proj": "blk.0.attn_output", "gate_proj": "blk.0.ffn_gate",
         "up_proj": "blk.0.ffn_up", "down_proj": "blk.0.ffn_down"}
HEADS = {"q_proj": 2, "k_proj": 1}
IDS = torch.arange(1, 17)[None]
logged = []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
transformers_logging.get_logger("transformers").addHandler(handler)
transformers_logging.disable_progress_bar()


def write(model, path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    for name, tensor in model.state_dict().items():
        *_, module, kind = name.split(".")
        if module in HEADS:  # this architecture's files have the two halves of a head's rows interleaved
            tensor = tensor.reshape(HEADS[module], 2, 16, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{NAMES[module]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def loaded(model):
    """The model from its file, and the largest difference of its logits."""
    with tempfile.TemporaryDirectory() as folder:
        write(model, Path(folder, "x.gguf"))
        logged.clear()
        again = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="x.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    with torch.no_grad():
        return again, (again(IDS).logits - model(IDS).logits).abs().max().item()


print(*(f"{name} {version(name)}" for name in ("transformers", "gguf", "torch")))
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=64, attention_bias=True, mlp_bias=True)
).eval()
again, far = loaded(model)  # biases are zero at first
print(f"control, biases of zero: logits differ by {far:.2g}")
assert far < 1e-5
for name, value in model.named_parameters():
    if name.endswith("bias"):
        torch.nn.init.normal_(value)
again, far = loaded(model)
biases = [name for name, _ in again.named_parameters() if name.endswith("bias")]
print(f"biases: logits differ by {far:.2g}; biases in the loaded model: {biases}; messages: {logged}")
assert far > 0.1 and not biases and not logged and again.config.attention_bias is False
PY
