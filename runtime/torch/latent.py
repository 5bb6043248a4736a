"""Multi-head latent attention as attention with one KV head, whose keys are what a token's keys and values are made of.

c    = norm(kv_a[: rank]),  r = kv_a[rank :]                             the latent, and the part with a position
k, v = (K_h c, rotary(r)),  V_h c                                        of head h; kv_b stacks (K_h, V_h)
q.k  = rotary(q_r).rotary(r) + (K_h^T q_n).c                             so the queries are (q_r, K_h^T q_n),
out  = V_h (sum over positions of the softmax weight times c)            and keys and values both (r, c)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.model_config import Latent


@dataclass(frozen=True)
class LatentWeights:
    config: Latent
    norm: Any  # the latent's `block.Norm`
    kv_b: Tensor  # (heads * (key_dim + value_dim), rank)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values: (heads, key_dim or value_dim, rank)."""
        sizes = self.config.key_dim, self.config.value_dim
        keys, values = self.kv_b.view(-1, sum(sizes), self.config.rank).split(sizes, dim=1)
        return keys, values

    def queries_and_keys(self, q: Tensor, kv_a: Tensor) -> list[Tensor]:
        """q (T, heads * (key_dim + rotary_dim)), kv_a (T, rank + rotary_dim), of the projections, to queries
        (T, heads * (rotary_dim + rank)) and keys (T, rotary_dim + rank), before the rotation."""
        keys, config = self._parts()[0], self.config
        plain, rotated = q.view(len(q), len(keys), -1).split((config.key_dim, config.rotary_dim), dim=-1)
        queries = torch.cat((rotated, torch.einsum("thk,hkr->thr", plain, keys)), dim=-1)
        latent, position = kv_a.split((config.rank, config.rotary_dim), dim=-1)
        return [queries.flatten(1), torch.cat((position, self.norm(latent)), dim=-1)]

    def outputs(self, attended: Tensor) -> Tensor:
        """(T, heads * (rotary_dim + rank)), of the attention, to o_proj's input (T, heads * value_dim)."""
        values = self._parts()[1]
        latent = attended.view(len(attended), len(values), -1)[..., self.config.rotary_dim :]
        return torch.einsum("thr,hvr->thv", latent, values).flatten(1)
