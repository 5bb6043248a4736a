"""Sensitivity of the model's output to each channel of each projection, by backward passes; the KL to the dense model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wisparse.kernels.reference import scores

from .experts import Rows, counted_rows
from .flow import BlockFlow, State
from .masking import MaskedModel
from .statistics import channel_scale

# Elements of the logits computed at a time. On a CPU they should fit into the cache: 8 MiB of float32.
LARGEST_LOGITS = 1 << 26
_LARGEST_LOGITS_CPU = 1 << 21
# The dense model's distributions are kept up to this size; if they are larger, its last hidden states are kept.
_LARGEST_REFERENCE_BYTES = 1 << 30
# Activations of one autograd graph: all blocks of a small model, one block of a large one.
_LARGEST_GRAPH_BYTES = 1 << 30
_ENOUGH_TOKENS = 256  # an expert with at least this many tokens is not pooled with the others


def kl_rows(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats per row (T,), from log-probabilities (T, V) float32."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def p_log_p(logits: Tensor) -> tuple[Tensor, Tensor]:
    """p (T, V) and sum p log p (T,) of logits (T, V) float32."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    return p, torch.linalg.vecdot(p, log_p)


def rows_at_once(flow: BlockFlow) -> int:
    """The number of tokens whose logits are computed at a time."""
    largest = _LARGEST_LOGITS_CPU if flow.device.type == "cpu" else LARGEST_LOGITS
    return max(1, largest // flow.head.weight.shape[0])


class DenseReference:
    """The dense model's distributions p at the counted tokens of a flow, computed at their first use.
    KL(dense || sparse) = sum p log p - sum p log q; the first sum is computed once for all sparse models."""

    def __init__(self, flow: BlockFlow, masked: MaskedModel) -> None:
        self.flow, self.masked = flow, masked
        self.keeps_distributions = flow.num_counted * flow.head.weight.shape[0] * 4 <= _LARGEST_REFERENCE_BYTES
        self._cache: dict[int, list[Any]] = {}  # by micro-batch and chunk
        self._device = flow.device

    @torch.no_grad()
    def distribution(self, batch: int, index: int) -> tuple[Tensor, Tensor]:
        """p (T, V) float32 and sum p log p (T,) of chunk ``index`` of `rows_at_once` counted tokens of a batch."""
        if batch not in self._cache:
            with self.masked.masking({}), self.masked.during(dense_tokens=None):
                final = self.flow.final(batch)
            self._device = final.device
            chunks = list(final.split(rows_at_once(self.flow)))
            self._cache[batch] = [self._p_log_p(rows) if self.keeps_distributions else rows.cpu() for rows in chunks]
        cached = self._cache[batch][index]
        return cached if self.keeps_distributions else self._p_log_p(cached.to(self._device))

    def keep(self, batch: int, chunks: Sequence[Any]) -> None:
        """Keep what a dense backward pass over a batch has computed: distributions, or else last hidden states. Not on a GPU,
        where it has other attention kernels than a forward pass, and a resumed run would compute other distributions."""
        if self.flow.device.type == "cpu":
            self._cache[batch] = list(chunks)

    def _p_log_p(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return p_log_p(self.flow.logits(rows))

    @torch.no_grad()
    def kl_sum(self, batch: int, final: Tensor) -> float:
        """Sum of the KL over a micro-batch; ``final``: the sparse model's last hidden states (T, hidden_size)."""
        total = torch.zeros((), dtype=torch.float64, device=final.device)
        for index, rows in enumerate(final.split(rows_at_once(self.flow))):
            p, p_log_p = self.distribution(batch, index)
            total += (p_log_p - torch.linalg.vecdot(p, self.flow.logits(rows).log_softmax(-1))).double().sum()
        return float(total)

    def kl_gradient(self, batch: int, final: Tensor) -> tuple[Tensor, Tensor]:
        """`kl_sum` as a tensor, and its gradient with respect to ``final``: d KL / d logits = softmax(logits) - p."""
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
    """Gradients of a loss with respect to each projection's input, through that projection alone, with activation
    checkpointing: a forward pass that keeps the hidden state every few blocks, then forward and backward over these.
    Weights get no gradients. ``gradient_of`` maps the last hidden states of the counted tokens (T, hidden_size) to the
    loss's gradient; ``receive`` is called with a projection's name, unmasked input and gradient (T, K)."""
    counted, places, config = flow.counted[batch], flow.places[batch], flow.config
    bytes_per_block = counted.numel() * (14 * config.hidden_size + 5 * config.mlp_size) * flow.item_size
    span = max(1, _LARGEST_GRAPH_BYTES // bytes_per_block)
    last = (len(flow.blocks) - 1) // span * span
    # Gradients of fused attention kernels on a GPU are not deterministic; equal seeds have to give equal bundles.
    deterministic = sdpa_kernel(SDPBackend.MATH) if flow.device.type == "cuda" else nullcontext()
    states = {0: flow.start()[batch]}
    with torch.no_grad():
        for start in range(0, last, span):
            states[start + span] = flow.run(batch, states[start], start, start + span)
    with deterministic, torch.enable_grad():
        gradient = torch.empty(0)
        shared_gradients: dict[Any, Sequence[Tensor]] = {}  # of keys and values that several blocks use
        for start in sorted(states, reverse=True):
            state = states.pop(start)
            below = state.hidden.detach().requires_grad_(True)
            shared = {key: tuple(x.detach().requires_grad_(True) for x in kv) for key, kv in state.shared.items()}
            inputs: dict[str, Tensor] = {}
            seen: dict[str, Tensor] = {}

            def split(name: str, x: Tensor, inputs: dict[str, Tensor] = inputs) -> Tensor:
                # A view for each projection: q, k and v share one tensor, but not its gradient.
                inputs[name] = x.view_as(x)
                return inputs[name]

            with masked.during(observer=seen.__setitem__, replacer=split):
                above = flow.run(batch, State(below, shared), start, min(start + span, len(flow.blocks)))
            out = above.hidden
            if start == last:
                out = flow.norm(out)
                out = out.flatten(0, 1)[places.to(out.device)]
                gradient = gradient_of(out.detach())
            produced = {key: kv for key, kv in above.shared.items() if key not in shared and key in shared_gradients}
            leaves = [x for kv in shared.values() for x in kv]
            gradient, *others = torch.autograd.grad(
                [out, *(x for kv in produced.values() for x in kv)],
                [below, *leaves, *inputs.values()],
                [gradient, *(g for key in produced for g in shared_gradients[key])],
                allow_unused=bool(leaves),  # not every block uses shared keys and values
            )
            at_leaves, at_inputs = iter(others[: len(leaves)]), others[len(leaves) :]
            for key, kv in shared.items():
                new = [torch.zeros_like(x) if g is None else g for x, g in zip(kv, at_leaves, strict=False)]
                later = shared_gradients.get(key)
                shared_gradients[key] = new if later is None else [a + b for a, b in zip(new, later, strict=True)]
            rows: dict[int, Rows] = {}  # by input, which several projections share
            for name, at_input in zip(inputs, at_inputs, strict=True):
                module, x = masked.projections[name], seen[name]
                if id(x) not in rows:
                    rows[id(x)] = Rows.counted(module, x.detach(), counted, places)
                selected = counted_rows(module, at_input, counted, places)
                receive(name, rows[id(x)], at_input.flatten(0, -2).index_select(0, selected))


def _label_gradient(reference: DenseReference, batch: int, generator: torch.Generator, final: Tensor) -> Tensor:
    """The gradient of -log p(y) with respect to the last hidden states, with y sampled from p for each token."""
    # Inverse transform sampling of random numbers from the CPU: the same labels on every device.
    uniform = torch.rand(final.shape[0], 1, generator=generator)
    flow, kept, gradients = reference.flow, list[Any](), []
    size = rows_at_once(flow)
    for rows, u in zip(final.split(size), uniform.split(size), strict=True):
        rows = rows.detach().requires_grad_(True)
        logits = flow.logits(rows)
        p, sums = p_log_p(logits.detach())
        cumulative = p.cumsum(-1)
        labels = torch.searchsorted(cumulative, u.to(cumulative.device) * cumulative[:, -1:])
        labels = labels.clamp(max=cumulative.shape[1] - 1)
        del cumulative
        # d -log p(y) / d logits = p - onehot(y); in place, as a copy would be large
        at_labels = p.gather(1, labels)
        gradients.append(torch.autograd.grad(logits, rows, p.scatter_(1, labels, at_labels - 1))[0])
        kept.append((p.scatter_(1, labels, at_labels), sums) if reference.keeps_distributions else rows.detach())
    reference.keep(batch, kept)
    return torch.cat(gradients)


def fisher_diagonal(reference: DenseReference, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The sum over the counted tokens of one micro-batch of ``gradient_i^2``, by projection: (K,) float64 on the CPU; of
    experts (E, K + 1), where the last column is the number of tokens. The CPU generator samples one label per token: a
    second one changes the KL by less than 1%."""
    sums: dict[str, Tensor] = {}

    def add(name: str, rows: Rows, gradient: Tensor) -> None:
        # Stays on the device, so that the pass does not synchronise.
        sums[name] = rows.total(gradient.float().square()).double()
        if rows.experts is not None:
            sums[name] = torch.cat((sums[name], rows.total(gradient.new_ones(len(gradient), 1)).double()), dim=1)

    masked = reference.masked
    masked.clear()
    backward(reference.flow, masked, batch, partial(_label_gradient, reference, batch, generator), add)
    return {name: sums[name].cpu() for name in masked.projections}


def drawn_to_pool(sums: Tensor, by_channel: bool, planes: int = 1) -> Tensor:
    """The experts' mean squares (E, K) from `fisher_diagonal`'s sums (E, K + 1). An expert with fewer than
    `_ENOUGH_TOKENS` tokens is filled up to them with the mean over all experts: of the same channel with ``by_channel``,
    for projections whose input all experts share, else of all channels of a plane."""
    squares, counts = sums[:, :-1], sums[:, -1:]
    pool = squares.sum(0, keepdim=True) / counts.sum().clamp(min=1)
    lacking = (_ENOUGH_TOKENS - counts).clamp(min=0)
    if not by_channel:
        pool = pool.unflatten(1, (planes, -1)).mean(2).repeat_interleave(pool.shape[1] // planes, dim=1)
    return (squares + lacking * pool) / (counts + lacking)


def loss_weighted_norm(norm: Tensor, diagonal: Tensor) -> Tensor:
    """The geometric mean of g (K,) and sqrt(h) (K,), each divided by its own geometric mean: (K,) float32. h is an
    estimate from few tokens and g is exact; their mean is better than either (benchmarks/LOG.md)."""
    return (channel_scale(norm, 0.5) * channel_scale(diagonal.sqrt().float().to(norm.device), 0.5)).float()


def quadratic_damage(
    reference: DenseReference,
    batch: int,
    generator: torch.Generator,
    scales: Mapping[str, Tensor],
    thresholds: Mapping[str, Sequence[float]],
) -> dict[str, list[float]]:
    """The sum over the counted tokens of ``1/2 (gradient . d)^2``, by projection and threshold; d is x where its score
    ``|x| * scale`` is below the threshold, else 0."""
    sums: dict[str, Tensor] = {}

    def add(name: str, rows: Rows, gradient: Tensor) -> None:
        # NaN is never dropped. On a CPU a product is several times as fast as torch.where.
        x = rows.x
        score, products = scores(x, rows.scale(scales[name])), (gradient.float() * x.float()).nan_to_num_()
        below = torch.empty_like(score)
        dropped = [torch.lt(score, threshold, out=below).mul_(products).sum(1) for threshold in thresholds[name]]
        sums[name] = torch.stack(dropped).square().sum(1, dtype=torch.float64) / 2

    reference.masked.clear()
    gradient_of = partial(_label_gradient, reference, batch, generator)
    backward(reference.flow, reference.masked, batch, gradient_of, add)
    return {name: sums[name].tolist() for name in thresholds}
