"""How much the model's output minds an error in each channel of each projection: backward passes, no trial and error.

Dropping channels of one projection's input changes that input by -d, and to second order

    KL(dense || sparse) ~ 1/2 E[(gradient . d)^2]      gradient = d log p(y) / d input,  y drawn from the model's own p

1. Without the cross terms between channels, dropping channel i of token t costs 1/2 x_ti^2 h_i, with

       h_i = E[gradient_i^2] = (W^T F W)_ii            F: the Fisher information at the projection's output

   So sqrt(h) is the norm of the weight's column, measured by what the loss sees of it; with F = 1 it is the paper's g,
   and it takes g's place in channel_scale.
2. With the cross terms, the same formula gives each projection's damage at any sparsity: the table that otherwise takes
   a forward pass per entry.

Sources: curvature as the price of removal is Optimal Brain Damage (LeCun et al., 1989); labels drawn from the model
give the true Fisher (Kunstner et al., arXiv:1905.12558). Prices over thresholded activations are worked out here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from wisparse.kernels.reference import kept, scores

from .flow import BlockFlow
from .masking import MaskedModel
from .statistics import channel_scale

# Rows of logits handled at a time: bounds the float32 (rows, vocabulary) temporaries.
_ROWS = 1024


def kl_rows(dense_log_probs: Tensor, logits: Tensor) -> Tensor:
    """KL(dense || sparse) of every row, in nats.

    Args:
        dense_log_probs: (T, V) float32, normalised.
        logits: (T, V) float32 of the sparse model, not normalised.

    Returns:
        (T,) float32.
    """
    log_q = logits.log_softmax(dim=-1)
    return (dense_log_probs.exp() * (dense_log_probs - log_q)).sum(dim=-1)


class DenseReference:
    """The dense model's distributions over the counted tokens of a flow, and the KL of anything else to them."""

    def __init__(self, flow: BlockFlow, *, num_tokens: int | None = None, limit_bytes: int = 1 << 30) -> None:
        self.flow = flow
        vocabulary = flow.head.weight.shape[0]
        # By the tokens of all processes: a KL must not depend on how many there are.
        self.exact = (flow.num_counted if num_tokens is None else num_tokens) * vocabulary * 2 > limit_bytes
        self._kept: list[Tensor] = []

    def add(self, batch: int, final: Tensor) -> None:
        """Take the dense model's last hidden state (B, L, hidden_size) of micro-batch ``batch``, in order."""
        rows = self._rows(batch, final)
        if not self.exact:
            rows = torch.cat([self.flow.logits(part).log_softmax(-1).half() for part in rows.split(_ROWS)])
        self._kept.append(rows)

    def _rows(self, batch: int, final: Tensor) -> Tensor:
        return final[self.flow.counted[batch].to(final.device)]

    def _log_probs(self, rows: Tensor) -> Tensor:
        return (self.flow.logits(rows) if self.exact else rows.float()).log_softmax(-1)

    def kl_sum(self, batch: int, final: Tensor) -> float:
        """Sum of the KL over the counted tokens of one micro-batch, given the sparse model's last hidden state."""
        total: Tensor | float = 0.0
        for dense, sparse in zip(self._kept[batch].split(_ROWS), self._rows(batch, final).split(_ROWS), strict=True):
            total += kl_rows(self._log_probs(dense), self.flow.logits(sparse)).double().sum()
        return float(total)


# Logits in memory at once: 256 MiB of float32, a few times over.
LARGEST_LOGITS = 1 << 26


def rows_at_once(flow: BlockFlow) -> int:
    """Of how many tokens the logits may be in memory together."""
    return max(1, LARGEST_LOGITS // flow.head.weight.shape[0])


def backward(
    flow: BlockFlow,
    masked: MaskedModel,
    batch: int,
    loss: Callable[[Tensor], list[Tensor]],
    receive: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Gradients of losses with respect to the input of every projection, each through that projection alone.

    Goes forward without a graph, keeping the hidden state between blocks, then backward block by block: what is held is
    one micro-batch's hidden states and one block's graph, whatever the model's size. No weight gets a gradient.

    Args:
        loss: from the last hidden state of the counted tokens (T, hidden_size) to one or several scalars; the gradients
            of each are received in turn.
        receive: called with a projection's name, its input as multiplied (T, K) and the gradient (T, K), both at the
            counted tokens.
    """
    counted = flow.counted[batch]
    states = [flow.start()[batch]]
    # The fused attention kernels of a GPU add up their gradients in no fixed order; equal seeds must give equal bytes.
    fixed_order = sdpa_kernel(SDPBackend.MATH) if flow.device.type == "cuda" else nullcontext()
    with fixed_order, torch.enable_grad():
        with torch.no_grad():
            for index in range(len(flow.blocks)):
                states.append(flow.block(index, batch, states[-1]))
        last = states[-1].detach().requires_grad_(True)
        final = flow.norm(last)
        values = loss(final[counted.to(final.device)])
        above = [
            torch.autograd.grad(value, last, retain_graph=i + 1 < len(values))[0] for i, value in enumerate(values)
        ]
        for index in reversed(range(len(flow.blocks))):
            below = states[index].detach().requires_grad_(True)
            inputs: dict[str, Tensor] = {}

            def split(name: str, x: Tensor, inputs: dict[str, Tensor] = inputs) -> Tensor:
                # A view of its own per projection: q, k and v read one tensor, and must not share one gradient.
                inputs[name] = x.view_as(x)
                return inputs[name]

            with masked.replacing(split):
                out = flow.block(index, batch, below)
            wanted = [below, *inputs.values()]
            for i, gradient in enumerate(above):
                found = torch.autograd.grad(out, wanted, gradient, retain_graph=i + 1 < len(above))
                above[i] = found[0]
                for (name, x), at_input in zip(inputs.items(), found[1:], strict=True):
                    here = counted.to(x.device)
                    receive(name, x.detach()[here], at_input[here])


def _label_losses(flow: BlockFlow, generator: torch.Generator, num_draws: int) -> Callable[[Tensor], list[Tensor]]:
    """-log p(y) summed over tokens, once per draw of labels y from the model's own distribution."""

    def log_probs(rows: Tensor) -> Tensor:
        return flow.logits(rows).log_softmax(-1)

    def loss(rows: Tensor, labels: Tensor) -> Tensor:
        return -log_probs(rows).gather(1, labels).sum()

    def losses(final: Tensor) -> list[Tensor]:
        # By inversion, from numbers made on the CPU: the same on every device.
        drawn = torch.cat([torch.rand(final.shape[0], 1, generator=generator) for _ in range(num_draws)], dim=1)
        result: list[Tensor] = []
        # A vocabulary is many times a hidden state: some rows at a time, computed again on the way back.
        size = rows_at_once(flow)
        for rows, u in zip(final.split(size), drawn.split(size), strict=True):
            with torch.no_grad():
                cumulative = log_probs(rows).exp_().cumsum(-1)
                wanted = u.to(cumulative.device) * cumulative[:, -1:]
                labels = torch.searchsorted(cumulative, wanted).clamp(max=cumulative.shape[1] - 1)
                del cumulative
            found = [checkpoint(loss, rows, labels[:, i : i + 1], use_reentrant=False) for i in range(num_draws)]
            result = [a + b for a, b in zip(result, found, strict=True)] if result else found
        return result

    return losses


def fisher_diagonal(
    flow: BlockFlow, masked: MaskedModel, batch: int, generator: torch.Generator, *, num_draws: int = 2
) -> dict[str, Tensor]:
    """Sum over the counted tokens of one micro-batch of ``gradient_i^2``: per projection (K,) float64 on the CPU.

    Args:
        generator: on the CPU; draws the labels.
        num_draws: labels drawn per token; more of them lower the noise, at one backward pass each.
    """
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor, gradient: Tensor) -> None:
        # Stays on the device: no pass waits for a copy.
        found = gradient.float().square().sum(0, dtype=torch.float64) / num_draws
        sums[name] = found + sums[name] if name in sums else found

    masked.clear()
    backward(flow, masked, batch, _label_losses(flow, generator, num_draws), add)
    return {name: sums[name].cpu() for name in masked.projections}


def loss_weighted_norm(norm: Tensor, diagonal: Tensor) -> Tensor:
    """The norm that takes g's place in channel_scale: the geometric mean of g and sqrt(h), (K,) float32.

    h is estimated from few tokens and g is exact: half-way (in logarithms) is better than either (benchmarks/LOG.md).
    Both are divided by their geometric means first, which cancels in the threshold.

    Args:
        norm: (K,) float32, g.
        diagonal: (K,) float64, h.
    """
    return (channel_scale(norm, 0.5) * channel_scale(diagonal.sqrt().float().to(norm.device), 0.5)).float()


def quadratic_damage(
    flow: BlockFlow,
    masked: MaskedModel,
    batch: int,
    generator: torch.Generator,
    scales: Mapping[str, Tensor],
    thresholds: Mapping[str, Sequence[float]],
    *,
    num_draws: int = 2,
) -> dict[str, list[float]]:
    """Sum over the counted tokens of ``1/2 (gradient . d)^2``: per projection, one number per threshold.

    Args:
        scales: (K,) float32 per projection.
        thresholds: per projection, of the scores ``|x| * scale``; d is what falls below.
    """
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor, gradient: Tensor) -> None:
        score, products = scores(x, scales[name].to(x.device)), gradient.float() * x.float()
        found = torch.stack(
            [
                torch.where(kept(score, threshold), 0.0, products).sum(1).square().sum(dtype=torch.float64)
                for threshold in thresholds[name]
            ]
        ) / (2 * num_draws)
        sums[name] = found + sums[name] if name in sums else found

    masked.clear()
    backward(flow, masked, batch, _label_losses(flow, generator, num_draws), add)
    return {name: sums[name].tolist() for name in thresholds}
