#!/usr/bin/env bash
# transformers 5.24.0, NemotronHForCausalLM (Mamba-2) without its optional kernels, float32: one pass over a prompt and the same
# tokens one by one with a cache.
#
# Guess: equal to about 1e-5, as for the other Mamba-2 models; 1e-3 at most where steps of the recurrence are very small.
# Seen: a pass clamps softplus(dt + dt_bias) to at least `time_step_min` (0.001), a step of one token does not. With dt_bias 0 the
# logits differ by 1e-5, with -7 and -9 by 0.02 and more (largest logit 6).
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
config = NemotronHConfig(
    vocab_size=64, hidden_size=32, layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=48, ssm_state_size=8, mamba_num_heads=4,
    mamba_head_dim=16, n_groups=1, initializer_range=0.3,
)
model = NemotronHForCausalLM(config).eval()
ids = torch.randint(3, 64, (1, 24))
print("transformers", version("transformers"), "torch", version("torch"), "time_step_min", config.time_step_min)
seen = {}
for bias in (0.0, -7.0, -9.0):
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(bias)
        whole = model(ids, use_cache=False).logits[0]
        out = model(ids[:, :12], use_cache=True)
        rows = [out.logits[0, -1]]
        for position in range(12, 24):
            out = model(ids[:, position : position + 1], use_cache=True, past_key_values=out.past_key_values)
            rows.append(out.logits[0, -1])
    seen[bias] = float((torch.stack(rows) - whole[11:]).abs().max())
    print(f"dt_bias {bias}: largest difference {seen[bias]:.2g}, largest logit {float(whole.abs().max()):.2g}")
assert seen[0.0] < 1e-4, seen
assert seen[-7.0] > 5e-3, seen
assert seen[-9.0] > 5e-3, seen
PY
