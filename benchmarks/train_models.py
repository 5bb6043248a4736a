"""Train a small model of a family: a mixture of 16 experts, 2 of which a token takes (17.6M parameters), or one with
Gemma 3's block, whose attention and MLP have a norm after them too (6.6M). Each has 6 blocks.

    python benchmarks/train_models.py --model experts --output PATH --minutes 3          # on a GPU

The text is the Python source of the packages installed beside torch (not transformers, whose models are evaluation text,
nor the standard library) and sessions of an interpreter; the tokenizer is the example's. The model is not shipped.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from quality import EXAMPLE
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3MoeConfig

from wisparse.runtime.tasks.generators import make_problems

LENGTH, BATCH, RATE = 512, 64, 2e-3
SHARED = {
    "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "intermediate_size": 704, "tie_word_embeddings": True, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 3,
}  # fmt: skip
CONFIGS = {
    "experts": Qwen3MoeConfig(
        moe_intermediate_size=192, num_experts=16, num_local_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        output_router_logits=True, router_aux_loss_coef=0.01, **SHARED,
    ),
    "gemma3": Gemma3TextConfig(query_pre_attn_scalar=32, sliding_window=512, **SHARED),
}  # fmt: skip


def encode(texts: list[str]) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))
    ids = (token for text in texts for token in [0, *tokenizer.encode(text).ids])
    return np.fromiter(ids, dtype=np.int16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--megabytes", type=int, default=120, help="of text, at most")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    packages = Path(torch.__file__).parent.parent
    files = [path for path in sorted(packages.rglob("*.py")) if "transformers" not in path.parts]
    random.Random(0).shuffle(files)
    texts, size = [f"{one.prompt}{one.answer}\n" for one in make_problems(30_000, 1)], 0
    for path in files:
        text = path.read_text("utf-8", "ignore")
        if 500 < len(text) < 200_000 and size < options.megabytes << 20:
            texts.append(text)
            size += len(text)
    random.Random(1).shuffle(texts)
    with ProcessPoolExecutor() as pool:
        tokens = torch.from_numpy(np.concatenate(list(pool.map(encode, (texts[i::64] for i in range(64))))))
    print(f"{len(files)} files, {size / 1e6:.0f} MB, {len(tokens) / 1e6:.1f}M tokens", flush=True)
    tokens = tokens.to(options.device)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_config(CONFIGS[options.model]).to(options.device)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    began, step, loss = time.monotonic(), 0, torch.zeros(())
    while (share := (time.monotonic() - began) / (60 * options.minutes)) < 1:
        rate = RATE * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = max(rate, 1e-5)
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), device=options.device)
        ids = tokens[starts[:, None] + torch.arange(LENGTH, device=options.device)].long()
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
        step += 1
    model.to(torch.bfloat16).save_pretrained(options.output, max_shard_size="12MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(EXAMPLE / name, options.output / name)
    stats = {"steps": step, "tokens": step * BATCH * LENGTH, "loss": loss.item(), "text_tokens": len(tokens)}
    (options.output / "train_stats.json").write_text(json.dumps(stats))
    print(json.dumps(stats))


if __name__ == "__main__":
    main()
