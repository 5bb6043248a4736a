"""Train an EAGLE-3 head for a small model, as published heads are stored.

    python benchmarks/train_head.py MODEL --output PATH --minutes 2       # on a GPU; MODEL is dense, with a tokenizer

The text is the Python source of the packages installed beside torch. The head guesses what the model would say next;
each batch unrolls a chain of drafts, whose later ones read what the head itself has given before.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

LENGTH, BATCH, RATE, CHAIN = 256, 32, 2e-3, 4


class Head:
    def __init__(self, config: object, device: str) -> None:
        get = vars(config).__getitem__
        hidden, inner, self.heads = get("hidden_size"), get("intermediate_size"), get("num_attention_heads")
        self.width, self.blocks, self.eps = hidden // self.heads, get("num_hidden_layers"), get("rms_norm_eps")
        # Outputs of these blocks.
        self.taps = [1, self.blocks // 2 - 1, self.blocks - 2]
        square = {f"self_attn.{one}_proj": (hidden, (1 if one == "o" else 2) * hidden) for one in "qkvo"}
        inside = {**square, **{f"mlp.{one}_proj": (inner, hidden) for one in ("gate", "up")}}
        shapes = {f"midlayer.{name}": shape for name, shape in inside.items()} | {"fc": (hidden, 3 * hidden)}
        shapes |= {"midlayer.mlp.down_proj": (hidden, inner), "lm_head": (get("vocab_size"), hidden)}
        self.w = {name: torch.randn(shape, device=device) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        norms = ("norm", *(f"midlayer.{one}" for one in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
        self.w |= {name: torch.ones(hidden, device=device) for name in norms}
        self.config = {
            key: get(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        }
        self.config |= {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "num_key_value_heads": self.heads, "rms_norm_eps": self.eps, "rope_theta": 10000.0,
            "max_position_embeddings": get("max_position_embeddings"), "draft_vocab_size": get("vocab_size"),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.taps},
        }  # fmt: skip

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.w[name], self.eps)

    def losses(self, embedded: Tensor, hidden: Tensor, target: Tensor) -> list[Tensor]:
        """embedded (B, T, H) of the tokens behind the positions of the fused hidden states (B, T, H); target: log
        probabilities (B, T, V) of what follows those tokens. Of every token of the chain the mean loss, and accuracy."""
        batch, length, _ = hidden.shape
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        cos, sin = (f(torch.cat((angles, angles), -1)).to(hidden) for f in (torch.cos, torch.sin))
        at = torch.arange(length, device=hidden.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found, embedded = [], self.norm(embedded, "midlayer.input_layernorm")
        for step in range(CHAIN):
            x = torch.cat((embedded, self.norm(hidden, "midlayer.hidden_norm")), -1)
            q, k, v = (
                functional.linear(x, self.w[f"midlayer.self_attn.{one}_proj"]).view(batch, length, -1, self.width)
                for one in "qkv"
            )
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            halves = (one.chunk(2, dim=-1) for one in (q, k))
            crossed = (torch.cat((-second, first), -1) for first, second in halves)
            q, k = (one * cos + other * sin for one, other in zip((q, k), crossed, strict=True))
            keys.append(k)
            values.append(v)
            # Its chain began at the position so many before: true pairs up to there, then each step's own.
            scores = [(q @ keys[0].mT).masked_fill(at > at[:, None] - step, -math.inf)]
            for i in range(1, step + 1):
                back = torch.roll(keys[i], step - i, dims=2)
                scores.append((q * back).sum(-1, keepdim=True))
            p = (torch.cat(scores, -1) * self.width**-0.5).softmax(-1)
            attended = p[..., :length] @ values[0]
            for i in range(1, step + 1):
                attended = attended + p[..., length + i - 1, None] * torch.roll(values[i], step - i, dims=2)
            y = hidden + functional.linear(attended.transpose(1, 2).flatten(2), self.w["midlayer.self_attn.o_proj"])
            n = self.norm(y, "midlayer.post_attention_layernorm")
            gate, up = (functional.linear(n, self.w[f"midlayer.mlp.{one}_proj"]) for one in ("gate", "up"))
            y = y + functional.linear(functional.silu(gate) * up, self.w["midlayer.mlp.down_proj"])
            said = functional.linear(self.norm(y, "norm"), self.w["lm_head"])[:, CHAIN:]
            loss = -(target[:, CHAIN:].exp() * said.log_softmax(-1)).sum(-1).mean()
            found += [loss, (said.argmax(-1) == target[:, CHAIN:].argmax(-1)).float().mean()]
            hidden = torch.roll(y, 1, dims=1)  # the next one's state is the head's own of the position before
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--megabytes", type=float, default=20, help="of text, at most")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    files = sorted(Path(torch.__file__).parent.parent.rglob("*.py"))
    random.Random(0).shuffle(files)
    tokenizer, ids, size = Tokenizer.from_file(str(options.model / "tokenizer.json")), list[int](), 0
    for path in files:
        text = path.read_text("utf-8", "ignore")
        if 500 < len(text) < 100_000 and size < options.megabytes * 1e6:
            ids += tokenizer.encode(text).ids
            size += len(text)
    tokens = torch.tensor(ids, device=options.device)
    print(f"{size / 1e6:.0f} MB, {len(ids) / 1e6:.2f}M tokens", flush=True)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device).eval()
    head, states = Head(model.config, options.device), dict[int, Tensor]()
    for index, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda _, __, out, index=index: states.update({index: out}))
    embedding, parameters = model.get_input_embeddings().weight.detach(), list(head.w.values())
    head.w["lm_head"].copy_(model.get_output_embeddings().weight.detach())
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, step, seconds = time.monotonic(), 0, 60 * options.minutes
    while (elapsed := time.monotonic() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(step / 50, 1.0, 1.05 - elapsed / seconds)
        first = torch.randint(len(tokens) - LENGTH - 1, (BATCH,)).tolist()
        batch = torch.stack([tokens[at : at + LENGTH + 1] for at in first])
        with torch.no_grad():
            target = model(input_ids=batch).logits[:, 1:].log_softmax(-1)
        fused = torch.cat([states[tap][:, :-1] for tap in head.taps], -1)
        losses = head.losses(embedding[batch[:, 1:]], functional.linear(fused, head.w["fc"]), target)
        loss = sum(0.8**i * one for i, one in enumerate(losses[::2]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 100 == 0:
            rates = " ".join(f"{float(one.detach()):.2f}" for one in losses[1::2])
            print(f"{elapsed:5.0f} s, step {step}: loss {float(losses[0].detach()):.2f}, right {rates}", flush=True)
        step += 1
    options.output.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.weight": value.detach().bfloat16().cpu().contiguous() for name, value in head.w.items()}
    save_file(tensors, options.output / "model.safetensors")
    (options.output / "config.json").write_text(json.dumps(head.config, indent=2))
    print(json.dumps({"steps": step, "right": [round(float(one.detach()), 3) for one in losses[1::2]]}))


if __name__ == "__main__":
    main()
