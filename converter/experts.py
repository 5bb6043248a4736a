"""transformers' experts as modules, one for each of their projections, with hooks and weights as linear layers have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig


@dataclass(frozen=True)
class Routing:
    """The rows that a forward pass sends through the experts, expert by expert."""

    tokens: Tensor  # (R,): which token of the batch, (B, L) flattened, each row is
    experts: Tensor  # (R,), ascending
    ends: Tensor  # (E,) int32: the first row after those of each expert

    @property
    def counts(self) -> list[int]:
        """Rows of each expert, which a GPU has to be waited for."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1)).tolist()


class ExpertProjection(nn.Module):
    """One projection of all experts of a block: rows (R, K) in the order of `Routing` to (R, N). The weight (E, N, K) and
    the bias (E, N) are views of transformers' parameters; read in planes, see `planes`, the weight is ``numbers``."""

    def __init__(
        self, experts: nn.Module, role: str, chosen: int, numbers: Tensor | None = None, planes: int = 1
    ) -> None:
        super().__init__()
        self._experts, self._role = (experts,), role  # a tuple: no sub-module
        self.numbers, self.planes = numbers, planes  # (E, N, planes * K)
        self.routing, self.num_experts, self.chosen = None, len(self.weight), chosen
        self.out_features, self.in_features = self.weight.shape[1:]

    routing: Routing | None

    def part(self, stored: Callable[[str], Tensor]) -> Tensor:
        """The weight, from a function that gives transformers' parameters by name."""
        down = self._role == "down_proj"
        weight, second = stored("down_proj" if down else "gate_up_proj"), int(self._role == "up_proj")
        if hasattr(self.experts, "down_proj_bias"):  # gpt-oss's are transposed, and gates lie beside ups
            return (weight if down else weight[..., second::2]).transpose(1, 2)
        return weight if down else weight.chunk(2, dim=1)[second]

    @property
    def weight(self) -> Tensor:
        return self.part(partial(getattr, self.experts)) if self.numbers is None else self.numbers

    @property
    def bias(self) -> Tensor | None:
        if not hasattr(self.experts, "down_proj_bias"):
            return None
        if self._role == "down_proj":
            return self.experts.down_proj_bias
        return self.experts.gate_up_proj_bias[:, int(self._role == "up_proj") :: 2]

    @property
    def experts(self) -> Any:
        return self._experts[0]

    def forward(self, x: Tensor) -> Tensor:
        assert self.routing is not None
        if self.bias is None and not (self.in_features % 8 or self.out_features % 8):
            # One launch for all experts, of a GPU. It takes rows of 16 bytes and no bias.
            return functional.grouped_mm(x, self.weight.transpose(1, 2), offs=self.routing.ends)
        biases = [None] * self.num_experts if self.bias is None else self.bias
        parts = zip(x.split(self.routing.counts), self.weight, biases, strict=True)
        return torch.cat([functional.linear(rows, weight, bias) for rows, weight, bias in parts if len(rows)])


def find_experts(model: Any, config: ModelConfig) -> dict[str, ExpertProjection]:
    """The modules of experts' projections that the model has, by name; its experts run them from now on."""
    found: dict[str, ExpertProjection] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for projection in config.projections():
        experts: Any = modules.get(projection.name.rpartition(".")[0])
        if not projection.experts or not hasattr(experts, "gate_up_proj"):
            continue
        known = vars(experts).setdefault("_wisparse_projections", {})
        if projection.role not in known:
            known[projection.role] = ExpertProjection(experts, projection.role, projection.chosen)
        # accelerate's own forward brings the weights, and calls the old one.
        setattr(experts, "_old_forward" if hasattr(experts, "_old_forward") else "forward", partial(_run, experts))
        found[projection.name] = known[projection.role]
    return found


class Release:
    """Removes what `find_experts` did to a model, as the handle of a hook does."""

    def __init__(self, modules: Iterable[ExpertProjection]) -> None:
        self._modules = [module.experts for module in modules]

    def remove(self) -> None:
        for experts in self._modules:
            vars(experts).pop("_wisparse_projections", None)
            if hasattr(experts, "_old_forward"):
                experts._old_forward = partial(type(experts).forward, experts)
            else:
                vars(experts).pop("forward", None)


def _run(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Forward of transformers' experts: hidden (T, H), and which experts, with which weights, (T, k) each."""
    modules: Mapping[str, ExpertProjection] = experts._wisparse_projections
    gate_proj, up_proj, down_proj = (modules[role] for role in ("gate_proj", "up_proj", "down_proj"))
    each, flat = chosen.shape[1], chosen.flatten()
    order = flat.argsort(stable=True)
    sorted_experts = flat[order]
    every = torch.arange(gate_proj.num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_experts, every, right=True, out_int32=True)
    routing = Routing(order // each, sorted_experts, ends)
    for module in modules.values():
        module.routing = routing
    # Permutations and sums alone, whose gradients a GPU adds up in one order.
    x = hidden[:, None].expand(-1, each, -1).flatten(0, 1)[order]
    if gate_proj.planes > 1:
        x = x.repeat(1, gate_proj.planes)
    gate, up = gate_proj(x), up_proj(x)
    if gate_proj.bias is None:
        half = experts.act_fn(gate) * up
    else:  # gpt-oss's, which takes the two interleaved
        half = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))
    if down_proj.planes > 1:
        half = half.repeat(1, down_proj.planes)
    y = down_proj(half) * weights.flatten()[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))  # the inverse
    return y[back].view(len(hidden), each, -1).sum(1).to(hidden.dtype)


@dataclass(frozen=True)
class Rows:
    """Inputs of a projection at the tokens that count; of experts also which one reads each row."""

    x: Tensor  # (T, K)
    experts: Tensor | None = None  # (T,)
    num_experts: int = 0

    @classmethod
    def counted(cls, module: nn.Module, x: Tensor, counted: Tensor) -> Rows:
        """Of x as the module got it; counted: (B, L) bool."""
        here, routing = at_rows(module, x, counted.to(x.device)), getattr(module, "routing", None)
        if routing is None:
            return cls(x[here])
        return cls(x[here], routing.experts[here], len(routing.ends))

    @classmethod
    def none(cls, module: Any) -> Rows:
        weight, num_experts = module.weight, getattr(module, "num_experts", 0)
        experts = torch.empty(0, dtype=torch.int64, device=weight.device) if num_experts else None
        return cls(weight.new_empty(0, weight.shape[-1]), experts, num_experts)

    @classmethod
    def cat(cls, parts: list[Rows]) -> Rows:
        first = parts[0]
        experts = (
            None if first.experts is None else torch.cat([one.experts for one in parts if one.experts is not None])
        )
        return cls(torch.cat([one.x for one in parts]), experts, first.num_experts)

    def scale(self, scale: Tensor) -> Tensor:
        """A `channel_scale` (K,) as it is, or (E, K) as (T, K): of each row's expert."""
        scale = scale.to(self.x.device)
        return scale if self.experts is None else scale[self.experts]

    def total(self, values: Tensor) -> Tensor:
        """The sum over the rows of values (T, K): (K,), or (E, K), in an order that depends on nothing."""
        if self.experts is None:
            return values.sum(0)
        one_hot = functional.one_hot(self.experts, self.num_experts).to(values.dtype)
        return one_hot.t() @ values

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(self.x[rows], None if self.experts is None else self.experts[rows], self.num_experts)


def at_rows(module: nn.Module, x: Tensor, values: Tensor) -> Tensor:
    """Values of a batch's tokens (B, L), at the rows of a projection's input x: (B, L, K), (B * L, K), or of experts. Of
    Gemma 4's blocks that share keys and values these may be a prompt's last tokens alone."""
    tokens = x.shape[1] if x.dim() == 3 else len(x) // (len(values) * getattr(module, "chosen", 1))
    values = values[:, -tokens:]
    if x.dim() == 3:
        return values
    routing = getattr(module, "routing", None)
    return values.flatten() if routing is None else values.flatten()[routing.tokens]


def numbers_read(module: Any) -> int:
    """How many of a projection's weights a token reads."""
    return int(module.in_features * module.out_features * getattr(module, "chosen", 1))


def channels_read(module: Any) -> int:
    return int(module.in_features * getattr(module, "chosen", 1))
