"""The dense baseline: a plain PyTorch decoder with a static cache under ``torch.compile(mode="reduce-overhead")``.

Written as gpt-fast does it (https://github.com/pytorch-labs/gpt-fast): fused q/k/v, static shapes, greedy choice inside
the graph. Compiled and timed by the code that ``wisparse bench --baseline torch.compile`` compiles transformers' model
with, ``wisparse/compiled.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.compiled import compiled_rates
from wisparse.formats.model_config import ModelConfig
from wisparse.runtime.benchmark import Workload


class Baseline(torch.nn.Module):
    """Dense weights in torch's own (N, K) layout; caches of ``length`` positions."""

    def __init__(self, bundle, device: torch.device, dtype: torch.dtype, batch: int, length: int) -> None:
        super().__init__()
        self.config: ModelConfig = bundle.config
        config = self.config
        read = lambda name: bundle.checkpoint.tensor(name, device).to(dtype)  # noqa: E731
        names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        self.embedding, self.head, self.norm = map(read, names)
        shape = (batch, config.num_kv_heads, length, config.head_dim)
        self.blocks = []
        for index in range(config.num_blocks):
            prefix = f"model.layers.{index}."
            names = [prefix + f"self_attn.{r}_proj" for r in "qkv"]
            block = {role: read(f"{prefix}mlp.{role}_proj.weight") for role in ("gate", "up", "down")}
            block |= {"n1": read(prefix + "input_layernorm.weight"), "o": read(prefix + "self_attn.o_proj.weight")}
            block |= {"n2": read(prefix + "post_attention_layernorm.weight")}
            block |= {"qkv": torch.cat([read(f"{name}.weight") for name in names])}
            block |= {"bias": torch.cat([read(f"{name}.bias") for name in names]) if config.qkv_bias else None}
            self.blocks.append(block | {one: torch.zeros(shape, device=device, dtype=dtype) for one in "kv"})
        half = config.head_dim // 2
        inverse = config.rotaries[0].theta ** (-torch.arange(half, device=device) / half)
        angle = torch.arange(length, device=device)[:, None] * inverse
        angle = torch.cat((angle, angle), 1)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.steps = torch.arange(length, device=device)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """(B, 1) ids at position (1,) to the next (B, 1) ids."""
        config = self.config
        x = functional.embedding(token, self.embedding)
        batch = x.shape[0]
        cos, sin = self.cos[position], self.sin[position]
        mask = (self.steps <= position)[None, None, None]
        for block in self.blocks:
            qkv = functional.linear(self._norm(x, block["n1"]), block["qkv"], block["bias"])
            heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            q, k, v = qkv.view(batch, 1, -1, config.head_dim).transpose(1, 2).split(heads, dim=1)
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            block["k"][:, :, position] = k
            block["v"][:, :, position] = v
            a = functional.scaled_dot_product_attention(q, block["k"], block["v"], attn_mask=mask, enable_gqa=True)
            x = x + functional.linear(a.transpose(1, 2).reshape(batch, 1, -1), block["o"])
            m = self._norm(x, block["n2"])
            gate = functional.silu(functional.linear(m, block["gate"]))
            x = x + functional.linear(gate * functional.linear(m, block["up"]), block["down"])
        logits = functional.linear(self._norm(x, self.norm), self.head)
        return logits.argmax(-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def tok_per_s(self, *, tokens: int, runs: int, batch: int = 1) -> tuple[float, ...]:
        """Tokens a second of ``runs`` generations, compiled and warmed up, as ``wisparse bench --baseline`` times."""
        device = self.cos.device
        first = torch.ones(batch, 1, dtype=torch.int64, device=device)
        return compiled_rates(lambda: first, self, Workload(5, tokens, batch, runs), device)
