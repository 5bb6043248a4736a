#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0: GGUF files of architecture `llama` with scaled rotary frequencies, as llama.cpp's converter
# writes them: the tensor rope_freqs.weight for Llama 3.1 to 3.3, the fields rope.scaling.* for linear scaling and YaRN.
#
# Guess: they become `rope_parameters`, or the load report names the tensor as unexpected.
# Seen: the model is loaded without scaling, `rope_type: default`, and nothing is logged, not even a load report. With Llama 3.1's
# factors the logits of 64 tokens differ by 11 (largest logit 9), as the low frequencies are eight times too high at every
# position; with linear scaling and YaRN by as much. The same file without scaling gives the model's logits exactly.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
"$folder/venv/bin/python" - "$folder" <<'PY'
import logging
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "blk.0.attn_norm",
         "post_attention_layernorm": "blk.0.ffn_norm", "q_proj": "blk.0.attn_q", "k_proj": "blk.0.attn_k",
         "v_proj": "blk.0.attn_v", "o_proj": "blk.0.attn_output", "gate_proj": "blk.0.ffn_gate", "up_proj": "blk.0.ffn_up",
         "down_proj": "blk.0.ffn_down"}
IDS = torch.arange(64)[None]
logged = []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
transformers_logging.get_logger("transformers").addHandler(handler)
transformers_logging.disable_progress_bar()


def write(model, path, scaling):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    if scaling["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(64)
    if scaling["rope_type"] == "llama3":
        plain = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for name, tensor in model.state_dict().items():
        *_, module, kind = name.split(".")
        if module in ("q_proj", "k_proj"):  # this architecture's files have the two halves of a head's rows interleaved
            tensor = tensor.reshape(2, 2, 16, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{NAMES[module]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


print(*(f"{name} {version(name)}" for name in ("transformers", "torch", "gguf")))
SCALINGS = {
    "none": {"rope_type": "default"},
    "Llama 3.1": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "YaRN": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
}
for name, scaling in SCALINGS.items():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3,
        max_position_embeddings=512, rope_parameters={"rope_theta": 10000.0, **scaling})).eval()
    file = Path(sys.argv[1], "model.gguf")
    write(model, file, scaling)
    logged.clear()
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(IDS).logits
        difference = float((loaded(IDS).logits - expected).abs().max())
    kind = loaded.config.rope_parameters["rope_type"]
    print(f"{name}: rope_type {kind}, logits differ by {difference:.2g} (largest {float(expected.abs().max()):.2g}), logged {logged}")
    assert kind == "default" and not logged
    assert (difference < 1e-4) if name == "none" else (difference > 0.1)
PY
