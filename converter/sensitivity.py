"""How much the model's output minds an error in each channel of each projection: one backward pass, no trial and error.

Dropping channels of one projection's input changes that input by -d. To second order

    KL(dense || sparse) ~ 1/2 E[(grad . d)^2]         grad = d log p(y) / d input,  y drawn from the model's own p

and with the cross terms between channels left out, dropping channel i of token t costs 1/2 x_ti^2 h_i, with

    h_i = E[grad_i^2] = (W^T F W)_ii                   F: the Fisher information at the projection's output

So sqrt(h) is the norm of the weight's column, measured by what the loss sees of it: with F = 1 it is the paper's g. It
takes g's place in channel_scale, and one and the same price per parameter then says for the whole model at once which
scores to drop.
Sources: Fisher-weighted pruning costs as in Optimal Brain Damage (LeCun et al., 1989) and SNIP-like saliencies; the
derivation for thresholds over activations is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .flow import BlockFlow
from .masking import MaskedModel

__all__ = ["backward", "damage_curve", "fisher_diagonal"]


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
    with torch.no_grad():
        for index in range(len(flow.blocks)):
            states.append(flow.block(index, batch, states[-1]))
    with torch.enable_grad():
        last = states[-1].detach().requires_grad_(True)
        values = loss(flow.norm(last)[counted])
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
                    receive(name, x.detach()[counted], at_input[counted])


def fisher_diagonal(
    flow: BlockFlow, masked: MaskedModel, batch: int, generator: torch.Generator, *, num_draws: int = 2
) -> dict[str, Tensor]:
    """Sum over the counted tokens of one micro-batch of ``grad_i^2``: per projection (K,) float64.

    Args:
        generator: on the CPU; draws the labels.
        num_draws: labels drawn per token; more of them lower the noise, at one backward pass each.
    """
    sums = {name: torch.zeros(module.in_features, dtype=torch.float64) for name, module in masked.projections.items()}

    def losses(final: Tensor) -> list[Tensor]:
        log_probs = flow.logits(final).log_softmax(-1)
        cumulative = log_probs.detach().exp().cumsum(-1)
        result = []
        for _ in range(num_draws):
            # Drawn by inversion from numbers made on the CPU: the same on every device.
            u = torch.rand(cumulative.shape[0], 1, generator=generator).to(cumulative.device) * cumulative[:, -1:]
            label = torch.searchsorted(cumulative, u).clamp(max=cumulative.shape[1] - 1)
            result.append(-log_probs.gather(1, label).sum())
        return result

    def add(name: str, x: Tensor, gradient: Tensor) -> None:
        sums[name] += gradient.float().square().sum(0, dtype=torch.float64).cpu() / num_draws

    masked.clear()
    backward(flow, masked, batch, losses, add)
    return sums


def damage_curve(x: Tensor, diagonal: Tensor, scale: Tensor, levels: Sequence[float]) -> list[tuple[float, float]]:
    """Predicted KL per token of dropping the lowest scores: ``1/2 sum of x_i^2 h_i`` over what is dropped.

    Args:
        x: (T, K), a projection's inputs.
        diagonal: (K,) float64, h.
        scale: (K,) float32, the score is ``|x| * scale``.
        levels: sparsities, ascending from 0.

    Returns:
        (sparsity, damage) points.
    """
    magnitude = x.float().abs()
    order = (magnitude * scale.to(x.device)).reshape(-1).argsort()
    cost = (magnitude.square() * diagonal.float().to(x.device)).reshape(-1)[order].cumsum(0, dtype=torch.float64)
    ends = torch.tensor([round(level * cost.numel()) for level in levels], device=x.device)
    totals = torch.cat([cost.new_zeros(1), cost])[ends] / (2 * x.shape[0])
    return list(zip(levels, totals.tolist(), strict=True))
