"""What an error in each input channel of each projection costs the model's output, by backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wisparse.kernels.reference import scores

from .experts import Rows, at_rows
from .flow import BlockFlow, State
from .masking import MaskedModel
from .statistics import channel_scale

# Elements of the logits handled at a time. On a CPU they should stay in the cache: 8 MiB of float32.
LARGEST_LOGITS = 1 << 26
_LARGEST_LOGITS_CPU = 1 << 21
# The dense model's distributions are kept up to this size, and computed again from the hidden states beyond it.
_LARGEST_REFERENCE_BYTES = 1 << 30
# Activations kept for one backward pass: several blocks of a small model, one block of a large one.
_LARGEST_GRAPH_BYTES = 1 << 29
_ENOUGH_TOKENS = 256  # that an expert's own statistics rest on alone


def kl_rows(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats per row (T,), from log-probabilities (T, V) float32."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def rows_at_once(flow: BlockFlow) -> int:
    """For how many tokens the logits are computed together."""
    largest = _LARGEST_LOGITS_CPU if flow.device.type == "cpu" else LARGEST_LOGITS
    return max(1, largest // flow.head.weight.shape[0])


class DenseReference:
    """The dense model's distributions over the counted tokens of a flow, computed when they are first asked for.
    KL(dense || sparse) = sum p log p - sum p log q, the first sum once for all sparse models."""

    def __init__(self, flow: BlockFlow, masked: MaskedModel) -> None:
        self.flow, self.masked = flow, masked
        self.keeps_distributions = flow.num_counted * flow.head.weight.shape[0] * 4 <= _LARGEST_REFERENCE_BYTES
        self._kept: dict[int, list[Any]] = {}
        self._device = flow.device

    @torch.no_grad()
    def distribution(self, batch: int, index: int) -> tuple[Tensor, Tensor]:
        """p (T, V) float32 and sum p log p (T,) of chunk ``index`` of `rows_at_once` counted tokens of a batch."""
        if batch not in self._kept:
            with self.masked.masking({}), self.masked.during(dense_tokens=None):
                final = self.flow.final(batch)
            self._device = final.device
            chunks = list(final.split(rows_at_once(self.flow)))
            self._kept[batch] = [self._p_log_p(rows) if self.keeps_distributions else rows.cpu() for rows in chunks]
        found = self._kept[batch][index]
        return found if self.keeps_distributions else self._p_log_p(found.to(self._device))

    def _p_log_p(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        log_p = self.flow.logits(rows).log_softmax(-1)
        p = log_p.exp()
        return p, torch.linalg.vecdot(p, log_p)

    @torch.no_grad()
    def kl_sum(self, batch: int, final: Tensor) -> float:
        """Sum of the KL over a micro-batch, given the sparse model's last hidden states (T, hidden_size)."""
        total = torch.zeros((), dtype=torch.float64, device=final.device)
        for index, rows in enumerate(final.split(rows_at_once(self.flow))):
            p, p_log_p = self.distribution(batch, index)
            total += (p_log_p - torch.linalg.vecdot(p, self.flow.logits(rows).log_softmax(-1))).double().sum()
        return float(total)

    def kl_gradient(self, batch: int, final: Tensor) -> tuple[Tensor, Tensor]:
        """`kl_sum` as a tensor, and its gradient in ``final``: d KL / d logits = softmax(logits) - p."""
        total, gradients = torch.zeros((), dtype=torch.float64, device=final.device), []
        for index, rows in enumerate(final.split(rows_at_once(self.flow))):
            rows = rows.detach().requires_grad_(True)
            logits = self.flow.logits(rows)
            (p, p_log_p), log_q = self.distribution(batch, index), logits.detach().log_softmax(-1)
            total += (p_log_p - torch.linalg.vecdot(p, log_q)).double().sum()
            gradients.append(torch.autograd.grad(logits, rows, log_q.exp_().sub_(p))[0])
        return total, torch.cat(gradients)


def backward(
    flow: BlockFlow,
    masked: MaskedModel,
    batch: int,
    gradient_of: Callable[[Tensor], Tensor],
    receive: Callable[[str, Rows, Tensor], None],
) -> None:
    """Gradients of a loss with respect to the input of every projection, each through that projection alone: forward
    without a graph, keeping a hidden state every few blocks, then forward with a graph and backward over those blocks.
    No weight gets a gradient. ``gradient_of`` gives the loss's gradient in the last hidden states of the counted tokens
    (T, hidden_size); ``receive`` gets a projection's name, its input before the mask and the gradient (T, K)."""
    counted, config = flow.counted[batch], flow.config
    bytes_per_block = counted.numel() * (14 * config.hidden_size + 5 * config.mlp_size) * flow.item_size
    span = max(1, _LARGEST_GRAPH_BYTES // bytes_per_block)
    last = (len(flow.blocks) - 1) // span * span
    # The fused attention kernels of a GPU add up their gradients in no fixed order; equal seeds must give equal bytes.
    fixed_order = sdpa_kernel(SDPBackend.MATH) if flow.device.type == "cuda" else nullcontext()
    with fixed_order, torch.enable_grad():
        states = {0: flow.start()[batch]}
        with torch.no_grad():
            for start in range(0, last, span):
                states[start + span] = flow.run(batch, states[start], start, start + span)
        gradient = torch.empty(0)
        of_shared: dict[Any, Sequence[Tensor]] = {}  # gradients of keys and values, from the blocks that share them
        for start in sorted(states, reverse=True):
            state = states.pop(start)
            below = state.hidden.detach().requires_grad_(True)
            shared = {key: tuple(x.detach().requires_grad_(True) for x in kv) for key, kv in state.shared.items()}
            inputs: dict[str, Tensor] = {}
            seen: dict[str, Tensor] = {}

            def split(name: str, x: Tensor, inputs: dict[str, Tensor] = inputs) -> Tensor:
                # A view of its own per projection: q, k and v read one tensor, and must not share one gradient.
                inputs[name] = x.view_as(x)
                return inputs[name]

            with masked.during(observer=seen.__setitem__, replacer=split):
                above = flow.run(batch, State(below, shared), start, min(start + span, len(flow.blocks)))
            out = above.hidden
            if start == last:
                out = flow.norm(out)
                out = out[counted.to(out.device)]
                gradient = gradient_of(out.detach())
            made = {key: kv for key, kv in above.shared.items() if key not in shared and key in of_shared}
            leaves = [x for kv in shared.values() for x in kv]
            gradient, *others = torch.autograd.grad(
                [out, *(x for kv in made.values() for x in kv)],
                [below, *leaves, *inputs.values()],
                [gradient, *(one for key in made for one in of_shared[key])],
                allow_unused=bool(leaves),  # by blocks that have keys and values of their own
            )
            found, at_inputs = iter(others[: len(leaves)]), others[len(leaves) :]
            for key, kv in shared.items():
                more = [torch.zeros_like(x) if one is None else one for x, one in zip(kv, found, strict=False)]
                so_far = of_shared.get(key)
                of_shared[key] = more if so_far is None else [a + b for a, b in zip(more, so_far, strict=True)]
            for name, at_input in zip(inputs, at_inputs, strict=True):
                module = masked.projections[name]
                rows = Rows.counted(module, seen[name].detach(), counted)
                receive(name, rows, at_input[at_rows(module, at_input, counted.to(at_input.device))])


def _label_gradient(flow: BlockFlow, generator: torch.Generator, final: Tensor) -> Tensor:
    """The gradient of -log p(y) in the last hidden states, for a label y a token from the model's own distribution."""
    # By inversion, from numbers made on the CPU: the same on every device.
    drawn = torch.rand(final.shape[0], 1, generator=generator)
    size, found = rows_at_once(flow), []
    for rows, u in zip(final.split(size), drawn.split(size), strict=True):
        rows = rows.detach().requires_grad_(True)
        logits = flow.logits(rows)
        probabilities = logits.detach().softmax(-1)
        cumulative = probabilities.cumsum(-1)
        labels = torch.searchsorted(cumulative, u.to(cumulative.device) * cumulative[:, -1:])
        labels = labels.clamp(max=cumulative.shape[1] - 1)
        del cumulative
        # d -log p(y) / d logits = softmax(logits) - onehot(y), in place: a copy of them is large
        probabilities.scatter_add_(1, labels, probabilities.new_full(labels.shape, -1.0))
        found.append(torch.autograd.grad(logits, rows, probabilities)[0])
    return torch.cat(found)


def fisher_diagonal(flow: BlockFlow, masked: MaskedModel, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sum over the counted tokens of one micro-batch of ``gradient_i^2``: per projection (K,) float64 on the CPU; of
    experts (E, K + 1), each followed by its number of tokens. The generator is on the CPU and draws a label for each
    token; a second draw changes the KL by less than 1%."""
    sums: dict[str, Tensor] = {}

    def add(name: str, rows: Rows, gradient: Tensor) -> None:
        # Stays on the device: no pass waits for a copy.
        sums[name] = rows.total(gradient.float().square()).double()
        if rows.experts is not None:
            sums[name] = torch.cat((sums[name], rows.total(gradient.new_ones(len(gradient), 1)).double()), dim=1)

    masked.clear()
    backward(flow, masked, batch, partial(_label_gradient, flow, generator), add)
    return {name: sums[name].cpu() for name in masked.projections}


def drawn_to_pool(sums: Tensor, by_channel: bool, planes: int = 1) -> Tensor:
    """The mean of experts' squares (E, K) from `fisher_diagonal`'s sums (E, K + 1). Where fewer than `_ENOUGH_TOKENS`
    tokens reached an expert, those that lack are taken to be as in all experts together: of the same channel, where
    ``by_channel``, as all read the same, else of all channels of a plane."""
    squares, counts = sums[:, :-1], sums[:, -1:]
    pool = squares.sum(0, keepdim=True) / counts.sum().clamp(min=1)
    lacking = (_ENOUGH_TOKENS - counts).clamp(min=0)
    if not by_channel:
        pool = pool.unflatten(1, (planes, -1)).mean(2).repeat_interleave(pool.shape[1] // planes, dim=1)
    return (squares + lacking * pool) / (counts + lacking)


def loss_weighted_norm(norm: Tensor, diagonal: Tensor) -> Tensor:
    """The geometric mean of g (K,) and sqrt(h) (K,), each divided by its own geometric mean: (K,) float32. h is
    estimated from few tokens and g is exact: half-way (in logarithms) is better than either (benchmarks/LOG.md)."""
    return (channel_scale(norm, 0.5) * channel_scale(diagonal.sqrt().float().to(norm.device), 0.5)).float()


def quadratic_damage(
    flow: BlockFlow,
    masked: MaskedModel,
    batch: int,
    generator: torch.Generator,
    scales: Mapping[str, Tensor],
    thresholds: Mapping[str, Sequence[float]],
) -> dict[str, list[float]]:
    """Sum over the counted tokens of ``1/2 (gradient . d)^2``: per projection, one number per threshold; d is what
    falls below a threshold of the scores ``|x| * scale``."""
    sums: dict[str, Tensor] = {}

    def add(name: str, rows: Rows, gradient: Tensor) -> None:
        # A NaN is kept. A product is several times as fast as torch.where on a CPU.
        x = rows.x
        score, products = scores(x, rows.scale(scales[name])), (gradient.float() * x.float()).nan_to_num_()
        below = torch.empty_like(score)
        dropped = [torch.lt(score, threshold, out=below).mul_(products).sum(1) for threshold in thresholds[name]]
        sums[name] = torch.stack(dropped).square().sum(1, dtype=torch.float64) / 2

    masked.clear()
    backward(flow, masked, batch, partial(_label_gradient, flow, generator), add)
    return {name: sums[name].tolist() for name in thresholds}
