#!/usr/bin/env bash
# transformers 5.24.0 on a CPU, torch 2.13.0: `generate` of MiniMax (MiniMax-Text-01, MiniMax-M1), whose first layers have lightning
# attention, with a prompt padded on the left and its attention mask, as in each batch of prompts of several lengths.
#
# Guess: padding changes nothing, as the first pass sets padding to zero in the lightning layers and masks it in the others.
# Seen: the first token is right, all later ones are wrong; logits differ by 2 to 3 (largest 3.5) from a pass over the same tokens without
# a cache. The length of the cache is that of layer 0, which is a lightning layer and stays empty. So a step's causal mask
# has one column, that of the first padding, which masks every key alike. Without padding no mask is made, and generation is
# equal; so it is with padding if the first layer has softmax attention. Without `position_ids` a step's position is 0 for the same reason.
# Nothing is printed.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

PROMPT, PADDING, NEW = 20, 3, 4
LAYERS = {"lightning first": ["linear_attention"] * 3 + ["full_attention"], "softmax first": ["full_attention"] + ["linear_attention"] * 3}
prompt = torch.randint(3, 96, (1, PROMPT), generator=torch.Generator().manual_seed(1))
padded = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), prompt], 1)
mask = (torch.arange(PADDING + PROMPT) >= PADDING).long()[None]


def build(layers):
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(MiniMaxConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        block_size=8, num_local_experts=4, num_experts_per_tok=2, layer_types=layers, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 1.2 * parameter.shape[1] ** -0.5)
    return model


def differences(model, ids, **arguments):
    """Of each new token's logits from those of one pass, without padding and cache, over the same tokens."""
    answer = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, output_logits=True,
                            return_dict_in_generate=True, **arguments)
    right = model(answer.sequences[:, -PROMPT - NEW:-1], use_cache=False).logits[0, PROMPT - 1:]
    return [float((step[0] - row).abs().max()) for step, row in zip(answer.logits, right, strict=True)], float(right.abs().max())


print(*(f"{name} {version(name)}" for name in ("transformers", "torch")))
with torch.inference_mode():
    for name, layers in LAYERS.items():
        model = build(layers)
        (plain, _), (found, largest) = differences(model, prompt), differences(model, padded, attention_mask=mask)
        cache = model(prompt).cache
        print(f"{name}: largest difference of each new token, without padding {[f'{one:.1g}' for one in plain]}, with {PADDING} padded "
              f"positions {[f'{one:.1g}' for one in found]}, largest logit {largest:.2g}; length of the cache {cache.get_seq_length()}")
        wrong = name == "lightning first"
        assert max(plain) < 1e-4 and found[0] < 1e-4 and cache.get_seq_length() == (0 if wrong else PROMPT)
        assert all((one > 0.5) is wrong for one in found[1:])
PY
