"""A causal LM run block by block over fixed micro-batches of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.reference import soft_cap


@dataclass(frozen=True)
class State:
    """A block's input or output for one micro-batch."""

    hidden: Tensor  # (B, L, hidden_size)
    shared: Mapping[Any, tuple[Tensor, ...]] = field(default_factory=dict)  # transformers' shared_kv_states


Hidden = list[State]


class StopForward(Exception):
    """Raised by a hook to end a block's forward pass early."""


def input_device(model: Any) -> torch.device:
    """The device of the token ids; of a model that accelerate distributes, its hook's execution device."""
    device = getattr(getattr(model.get_input_embeddings(), "_hf_hook", None), "execution_device", None)
    if device is None:
        return next(model.parameters()).device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


class BlockFlow:
    """The blocks of a causal LM, run one at a time over micro-batches of ``input_ids`` (S, L) int64. ``keep`` (S, L)
    bool: the counted tokens. Searches leave the others, padding and attention sinks, dense."""

    def __init__(self, model: Any, config: ModelConfig, input_ids: Tensor, keep: Tensor, batch_size: int = 4) -> None:
        self.model, self.config = model, config
        self.device = input_device(model)
        decoder = model.get_decoder()
        self.blocks: nn.ModuleList = decoder.layers
        final_norm = config.architecture.final_norm.rpartition(".")[2]
        self.norm: Any = getattr(decoder, final_norm, None)
        if self.norm is None:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: expected a final norm called {final_norm!r}, found none"
            )
        self.head = model.get_output_embeddings()
        self.item_size = next(model.parameters()).element_size()
        self.input_ids = [part.to(self.device) for part in input_ids.split(batch_size) if len(part)]
        self.counted = [part.to(self.device) for part in keep.split(batch_size) if len(part)]
        self.places = [part.flatten().nonzero()[:, 0] for part in self.counted]  # the same as indices (T,) int64
        self.num_batches, self.num_counted = len(self.input_ids), int(keep.sum())
        # One pass in which blocks return their input records the embeddings, and each block's other arguments.
        self._start: Hidden = []
        self._arguments: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [[] for _ in self.blocks]

        def record(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if index == 0:
                self._start.append(State(hidden))
            self._arguments[index].append((args, kwargs))
            return hidden

        before = [vars(block).get("forward") for block in self.blocks]  # accelerate replaces it
        try:
            for index, block in enumerate(self.blocks):
                block.forward = partial(record, index)
            with torch.no_grad():
                for ids in self.input_ids:
                    decoder(input_ids=ids, use_cache=False)  # a captured cache would grow at every call of the block
        finally:
            for block, forward in zip(self.blocks, before, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward

    def start(self) -> Hidden:
        """The input of block 0, by micro-batch."""
        return list(self._start)

    def block(self, index: int, batch: int, state: State) -> State:
        """Run block ``index`` on one micro-batch."""
        args, kwargs = self._arguments[index][batch]
        shared = kwargs.get("shared_kv_states")
        if shared is not None:  # blocks add their keys and values to it
            shared = type(shared)(state.shared)
            kwargs = {**kwargs, "shared_kv_states": shared}
        out = self.blocks[index](state.hidden, *args, **kwargs)
        return State(out[0] if isinstance(out, tuple) else out, dict(shared or {}))

    def run(self, batch: int, state: State, start: int, stop: int) -> State:
        """Run blocks ``start`` to ``stop - 1`` on one micro-batch."""
        for index in range(start, stop):
            state = self.block(index, batch, state)
        return state

    def final(self, batch: int, start: int = 0, state: State | None = None) -> Tensor:
        """The last hidden states of a micro-batch's counted tokens, after the final norm: (T, hidden_size). ``state`` is
        the input of block ``start``; None: the embeddings."""
        state = self._start[batch] if state is None else state
        out = self.norm(self.run(batch, state, start, len(self.blocks)).hidden)
        return out.flatten(0, 1)[self.places[batch].to(out.device)]

    def logits(self, final: Tensor) -> Tensor:
        """Logits (T, V) float32 of `final`'s rows (T, hidden_size)."""
        logits, multiplier, cap = self.head(final).float(), self.config.logits_multiplier, self.config.logits_softcap
        if multiplier != 1.0:  # avoids a large copy
            logits = logits * multiplier
        return soft_cap(logits, cap)
