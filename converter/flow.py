"""A causal LM as the chain of its blocks, over fixed batches of tokens.

A search compares many variants of one model on the same tokens. What does not differ is not computed again: the hidden
state that enters block b is the same for every candidate that changes block b or a later one, so a probe starts there.
Memory: one hidden state per token is held at a time (whoever wants the states of several blocks keeps them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.reference import soft_cap

Hidden = list[Tensor]


def input_device(model: Any) -> torch.device:
    """Where token ids go in. A model that is spread over devices, or whose weights come and go, has hooks that know."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        return next(model.parameters()).device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


class _StandIn(nn.Module):
    """Takes a block's place in the ModuleList: records what it was called with and returns its input unchanged."""

    def __init__(self, block: nn.Module, log: list[tuple[Tensor, dict[str, Any]]]) -> None:
        super().__init__()
        # Not registered as a sub-module: the stand-in must not show up among the model's parameters.
        object.__setattr__(self, "block", block)
        self.log = log

    def __getattr__(self, name: str) -> Any:
        # Some models read attributes of a block (its attention type) before they call it.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "__dict__")["block"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(one is not None for one in args):  # None is what it is where it is left out
            raise UnsupportedModelError(
                f"{type(self.block).__name__}: expected keyword arguments after the hidden state, "
                f"found {len(args)} positional ones"
            )
        self.log.append((hidden, kwargs))
        return hidden


class BlockFlow:
    """The blocks of a causal LM, run one at a time over micro-batches of the same tokens.

    Args:
        model: a Hugging Face causal LM whose decoder has ``layers`` and ``norm``.
        config: what becomes of the output layer's products on the way to logits.
        input_ids: (S, L) int64.
        keep: (S, L) bool, the tokens that count: neither padding nor the first token of a sequence, whose activations
            (the attention sink) are not like the others'. Quantiles, errors and divergences are over these; the other
            tokens are run, and left dense by a search. Sequences are full: attention is causal over all L tokens.
        batch_size: sequences per micro-batch.

    Attributes:
        blocks: the decoder's ModuleList.
        counted: ``keep`` by micro-batch.

    The blocks of one model may lie on several devices; each takes its input to its own.
    """

    def __init__(self, model: Any, config: ModelConfig, input_ids: Tensor, keep: Tensor, batch_size: int = 4) -> None:
        self.model, self.config = model, config
        self.device = input_device(model)
        decoder = model.get_decoder()
        self.blocks: nn.ModuleList = decoder.layers
        self.norm: Any = getattr(decoder, "norm", None)
        if self.norm is None:
            raise UnsupportedModelError(f"{type(decoder).__name__}: expected a final norm called 'norm', found none")
        self.head = model.get_output_embeddings()
        self.input_ids = [part.to(self.device) for part in input_ids.split(batch_size) if len(part)]
        self.counted = [part.to(self.device) for part in keep.split(batch_size) if len(part)]
        self.num_counted = int(keep.sum())
        self._kwargs: list[list[dict[str, Any]]] = []
        self._start = self._record()

    @property
    def num_batches(self) -> int:
        return len(self.input_ids)

    @torch.no_grad()
    def _record(self) -> Hidden:
        """One pass over the tokens with every block replaced: the embeddings, and each block's keyword arguments."""
        logs: list[list[tuple[Tensor, dict[str, Any]]]] = [[] for _ in self.blocks]
        with _replaced(self.blocks, [_StandIn(b, log) for b, log in zip(self.blocks, logs, strict=True)]):
            for ids in self.input_ids:
                # use_cache=False: a captured cache would grow at every call of the block.
                self.model.get_decoder()(input_ids=ids, use_cache=False)
        self._kwargs = [[kwargs for _, kwargs in log] for log in logs]
        return [hidden for hidden, _ in logs[0]]

    def start(self) -> Hidden:
        """The hidden states that enter block 0: per micro-batch (B, L, hidden_size)."""
        return list(self._start)

    def block(self, index: int, batch: int, hidden: Tensor) -> Tensor:
        """Block ``index`` on one micro-batch: (B, L, hidden_size) to the same shape."""
        out = self.blocks[index](hidden, **self._kwargs[index][batch])
        return out[0] if isinstance(out, tuple) else out

    def step(self, index: int, hidden: Hidden) -> Hidden:
        """Block ``index`` on every micro-batch."""
        return [self.block(index, batch, h) for batch, h in enumerate(hidden)]

    def finish(self, start: int, batch: int, hidden: Tensor) -> Tensor:
        """From the input of block ``start`` to the last hidden state, normalised: (B, L, hidden_size)."""
        for index in range(start, len(self.blocks)):
            hidden = self.block(index, batch, hidden)
        return self.norm(hidden)

    def logits(self, final: Tensor) -> Tensor:
        """Rows of normalised hidden states (T, hidden_size) to float32 logits (T, V)."""
        logits, times, cap = self.head(final).float(), self.config.logits_multiplier, self.config.logits_softcap
        if times != 1.0:  # a copy of them is large
            logits = logits * times
        return soft_cap(logits, cap)


@contextmanager
def _replaced(blocks: nn.ModuleList, stand_ins: list[nn.Module]) -> Iterator[None]:
    originals = list(blocks)
    try:
        for index, stand_in in enumerate(stand_ins):
            blocks[index] = stand_in
        yield
    finally:
        for index, block in enumerate(originals):
            blocks[index] = block


def block_projections(names: Mapping[str, Any] | list[str], num_blocks: int) -> list[list[str]]:
    """Projection names grouped by block, from the one number in a Hugging Face module name."""
    groups: list[list[str]] = [[] for _ in range(num_blocks)]
    for name in names:
        index = next(int(part) for part in name.split(".") if part.isdigit())
        groups[index].append(name)
    return groups
