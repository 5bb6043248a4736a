#!/usr/bin/env bash
# transformers 5.24.0 on a CPU, torch 2.13.0: LFM2 with `conv_bias: true`, a batch padded on the left with its attention mask.
#
# Guess: padding changes no token's logits, as in models with attention only: the state of the convolution at padding is zero.
# Seen: with the bias the logits behind the padding change, and already a single padded position does it; without the bias they
# are equal. The hidden states at padding are set to zero before `in_proj`, whose bias then makes the convolution's inputs there
# other than zero: with that one bias at zero and the two others (of the convolution, of `out_proj`) kept they are equal again.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

IDS = torch.arange(5, 11)[None]


def model(bias):
    torch.manual_seed(0)
    found = Lfm2ForCausalLM(
        Lfm2Config(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                   num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], conv_bias=bias,
                   block_multiple_of=16)
    ).eval()
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


@torch.no_grad()
def change(found, padding):
    """The largest change of the last token's logits, over their largest value."""
    ids = torch.cat((torch.zeros(1, padding, dtype=torch.long), IDS), 1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain = found(IDS).logits[0, -1]
    return ((found(ids, attention_mask=mask, position_ids=positions).logits[0, -1] - plain).abs().max() / plain.abs().max()).item()


print(*(f"{name} {version(name)}" for name in ("transformers", "torch")))
without, biased, partly = model(False), model(True), model(True)
for name, parameter in partly.named_parameters():
    if name.endswith("in_proj.bias"):
        torch.nn.init.zeros_(parameter)
figures = {
    "no bias, 4 padded": change(without, 4), "bias, 1 padded": change(biased, 1), "bias, 4 padded": change(biased, 4),
    "bias of in_proj at zero, 4 padded": change(partly, 4),
}
for name, value in figures.items():
    print(f"{name}: logits change by {value:.2g} of the largest")
same, one, four, other = figures.values()
assert same < 1e-5 and other < 1e-5 and one > 1e-3 and four > 1e-3
PY
