"""transformers' experts as one module per projection, with a weight, and hooks, as linear layers have."""

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
    """The rows of a forward pass through the experts, sorted by expert: one for each token and chosen expert."""

    tokens: Tensor  # (R,): each row's index in the batch (B, L), flattened
    experts: Tensor  # (R,): each row's expert, ascending
    ends: Tensor  # (E,) int32: the end of each expert's rows

    @property
    def counts(self) -> list[int]:
        """The number of rows of each expert; synchronises with a GPU."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1)).tolist()


class ExpertProjection(nn.Module):
    """One projection of all experts of a block: `Routing`'s rows (R, K) to (R, N). The weight (E, N, K) and the bias
    (E, N) are views of transformers' parameters; of graded weights, the weight is ``plane_weight``."""

    def __init__(
        self, experts: nn.Module, role: str, chosen: int, plane_weight: Tensor | None = None, planes: int = 1
    ) -> None:
        super().__init__()
        self._experts, self._role = (experts,), role  # in a tuple, so that it is not registered as a submodule
        self.plane_weight, self.planes = plane_weight, planes  # (E, N, planes * K)
        self._stored = role if hasattr(experts, role) else "gate_up_proj"
        self.routing, self.num_experts, self.chosen = None, len(self.weight), chosen
        self.out_features, self.in_features = self.weight.shape[1:]

    routing: Routing | None

    def part(self, parameter: Callable[[str], Tensor]) -> Tensor:
        """The weight as a view; ``parameter`` maps names to transformers' parameters."""
        weight, second = parameter(self._stored), int(self._role == "up_proj")
        alone = self._stored == self._role
        if hasattr(self.experts, "down_proj_bias"):  # gpt-oss: transposed, with gate and up interleaved
            return (weight if alone else weight[..., second::2]).transpose(1, 2)
        return weight if alone else weight.chunk(2, dim=1)[second]

    @property
    def weight(self) -> Tensor:
        return self.part(partial(getattr, self.experts)) if self.plane_weight is None else self.plane_weight

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
            # One launch on a GPU. It requires strides that are multiples of 16 bytes, and has no bias.
            return functional.grouped_mm(x, self.weight.transpose(1, 2), offs=self.routing.ends)
        biases = [None] * self.num_experts if self.bias is None else self.bias
        parts = zip(x.split(self.routing.counts), self.weight, biases, strict=True)
        return torch.cat([functional.linear(rows, weight, bias) for rows, weight, bias in parts if len(rows)])


def find_experts(model: Any, config: ModelConfig) -> dict[str, ExpertProjection]:
    """The model's expert projections by name, as modules, which its experts then run; empty without experts."""
    found: dict[str, ExpertProjection] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for projection in config.projections():
        experts: Any = modules.get(projection.name.rpartition(".")[0])
        if not projection.experts or not hasattr(experts, "down_proj"):
            continue
        known = vars(experts).setdefault("_wisparse_projections", {})
        if projection.role not in known:
            known[projection.role] = ExpertProjection(experts, projection.role, projection.chosen)
        # accelerate's forward loads offloaded weights and calls _old_forward.
        setattr(experts, "_old_forward" if hasattr(experts, "_old_forward") else "forward", partial(_run, experts))
        found[projection.name] = known[projection.role]
    return found


class Release:
    """Undoes `find_experts`; has the ``remove`` of a hook's handle."""

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
    """Forward of transformers' experts: hidden (T, H), the chosen experts and their weights, (T, k) each."""
    modules: Mapping[str, ExpertProjection] = experts._wisparse_projections
    first, *_ = inputs = [module for role, module in modules.items() if role != "down_proj"]  # gate and up, or up
    down_proj = modules["down_proj"]
    top_k, flat = chosen.shape[1], chosen.flatten()
    order = flat.argsort(stable=True)
    sorted_experts = flat[order]
    all_experts = torch.arange(first.num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_experts, all_experts, right=True, out_int32=True)
    routing = Routing(order // top_k, sorted_experts, ends)
    for module in modules.values():
        module.routing = routing
    # Only permutations and sums, whose gradients are deterministic on a GPU.
    x = hidden[:, None].expand(-1, top_k, -1).flatten(0, 1)[order]
    if first.planes > 1:
        x = x.repeat(1, first.planes)
    gate, *up = (module(x) for module in inputs)
    if first.bias is not None:  # gpt-oss's takes gate and up interleaved
        activation = experts._apply_gate(torch.stack((gate, *up), dim=-1).flatten(-2))
    else:
        activation = experts.act_fn(gate) * up[0] if up else experts.act_fn(gate)
    if down_proj.planes > 1:
        activation = activation.repeat(1, down_proj.planes)
    y = down_proj(activation) * weights.flatten()[order, None]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return y[inverse].view(len(hidden), top_k, -1).sum(1).to(hidden.dtype)


@dataclass(frozen=True)
class Rows:
    """Inputs of a projection at the counted tokens."""

    x: Tensor  # (T, K)
    experts: Tensor | None = None  # (T,): each row's expert
    num_experts: int = 0

    @classmethod
    def counted(cls, module: nn.Module, x: Tensor, counted: Tensor, places: Tensor) -> Rows:
        """Select the counted rows of a module's input x; counted and places: see `counted_rows`."""
        selected, routing = counted_rows(module, x, counted, places), getattr(module, "routing", None)
        rows = x.flatten(0, -2).index_select(0, selected)
        return cls(rows) if routing is None else cls(rows, routing.experts[selected], len(routing.ends))

    @classmethod
    def none(cls, module: Any) -> Rows:
        weight, num_experts = module.weight, getattr(module, "num_experts", 0)
        experts = torch.empty(0, dtype=torch.int64, device=weight.device) if num_experts else None
        return cls(weight.new_empty(0, weight.shape[-1]), experts, num_experts)

    @classmethod
    def cat(cls, parts: list[Rows]) -> Rows:
        first = parts[0]
        indices = [part.experts for part in parts if part.experts is not None]
        return cls(torch.cat([part.x for part in parts]), torch.cat(indices) if indices else None, first.num_experts)

    def scale(self, scale: Tensor) -> Tensor:
        """A `channel_scale` for these rows: (K,), or of experts (E, K) to (T, K)."""
        scale = scale.to(self.x.device)
        return scale if self.experts is None else scale[self.experts]

    def total(self, values: Tensor) -> Tensor:
        """The sum of values (T, K) over the rows: (K,), or of experts (E, K). Deterministic."""
        if self.experts is None:
            return values.sum(0)
        one_hot = functional.one_hot(self.experts, self.num_experts).to(values.dtype)
        return one_hot.t() @ values

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(self.x[rows], None if self.experts is None else self.experts[rows], self.num_experts)


def at_rows(module: nn.Module, x: Tensor, values: Tensor) -> Tensor:
    """Map values of a batch's tokens (B, L) to the rows of a projection's input x: (B, L, K), (B * L, K), or experts'
    rows. Gemma 4's blocks with shared keys and values may compute only the last tokens of a prompt."""
    tokens = x.shape[1] if x.dim() == 3 else len(x) // (len(values) * getattr(module, "chosen", 1))
    values = values[:, -tokens:]
    if x.dim() == 3:
        return values
    routing = getattr(module, "routing", None)
    return values.flatten() if routing is None else values.flatten()[routing.tokens]


def counted_rows(module: nn.Module, x: Tensor, counted: Tensor, places: Tensor) -> Tensor:
    """The indices of the rows of a projection's flattened input x that belong to counted tokens. counted: (B, L) bool;
    places: (T,) int64, the same tokens as indices, which a GPU selects by without waiting for the host."""
    if getattr(module, "routing", None) is None and x.numel() == counted.numel() * x.shape[-1]:
        return places.to(x.device)
    return at_rows(module, x, counted.to(x.device)).flatten().nonzero()[:, 0]


def weights_read(module: Any) -> int:
    """The number of a projection's weights that a token reads, in the chosen experts."""
    return int(module.in_features * module.out_features * getattr(module, "chosen", 1))


def channels_read(module: Any) -> int:
    return int(module.in_features * getattr(module, "chosen", 1))
