"""Turning the model that is converted: find the directions, put the turned weights in place, see how far it went.

Before anything else is measured on the model: calibration, masks and figures are then those of the weights that the
bundle will hold. What is kept of it is the rotation; the weights are made from it again wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model.expected import LM_HEAD
from wisparse.formats.record.recipe import RotationRecord
from wisparse.formats.weights.checkpoint import Checkpoint
from wisparse.formats.weights.remade import Remade

from ..bench.divergence import kl_rows
from ..model.rotation import Rotation, find_rotation, rotated
from ..model.source import SourceModel
from ..text.tokens import CalibrationTokens
from ..work.processes import ALONE, Processes
from ..work.progress import Progress
from ..work.state import NO_STATE, Store, pack, unpack

__all__ = ["Turned", "rotate"]

# Sequences of a forward pass.
_BATCH = 4
# Tokens that say how far the turned model is from the source, and nats a token that rounding never costs: one that is
# further off is not the same model in other coordinates.
_TOKENS, _MOST = 256, 0.02


@dataclass(frozen=True)
class Turned:
    """A model in other coordinates.

    Attributes:
        source: it computes with the turned weights.
        checkpoint: it gives them, in the source's types.
        record: for the recipe.
    """

    source: SourceModel
    checkpoint: Remade
    record: RotationRecord


@torch.no_grad()
def rotate(
    source: SourceModel,
    checkpoint: Checkpoint,
    tokens: CalibrationTokens,
    text: Callable[[], CalibrationTokens],
    progress: Progress | None = None,
    store: Store = NO_STATE,
    processes: Processes = ALONE,
) -> Turned:
    """Turn ``source``, in place, to the principal directions over a text. Several processes call it alike.

    Args:
        source: all of its weights are on one device, and stand for ``checkpoint``, which `why_fixed` has nothing
            against.
        tokens: the calibration's; some of them say how far the turned model is from the source.
        text: gives the tokens whose directions count; asked of the first process, and only if there is no rotation yet.
            Not the text that thresholds are set on: it fits its own directions better than any other does, and with
            8,192 tokens 1.2 points fewer weights than asked for stay unread elsewhere (LOG.md).
        store: holds the rotation that an interrupted run had found.

    Raises:
        UnsupportedModelError: turned, the weights are beyond their type's range, or the model says something else.
    """
    progress = progress or Progress(enabled=False)
    data = store.load("rotation")
    if data is None:
        mine = pack(vars(_directions(source, checkpoint, text(), progress))) if processes.leads else b""
        data = processes.broadcast(mine)
        store.save("rotation", data)
    turned = rotated(checkpoint, Rotation(**unpack(data)), source.device)
    ids = tokens.input_ids[:1, :_TOKENS]
    before = _log_probs(source, ids)
    _put_in_place(source, turned, progress)
    # Of two models that differ by less than the sums' own rounding it can come out below 0.
    kl = max(0.0, float(kl_rows(before, _log_probs(source, ids)).double().mean()))
    if not kl <= _MOST:
        raise UnsupportedModelError(
            f"{checkpoint.folder.name}: rotated, the model is {kl:.2g} nats/token from what it was, expected less than "
            f"{_MOST:g}: {source.dtype} is too coarse for it; convert it with --rotation none"
        )
    return Turned(replace(source, config=turned.config), turned, RotationRecord("pca", kl, ids.numel()))


def _directions(source: SourceModel, checkpoint: Checkpoint, tokens: CalibrationTokens, progress: Progress) -> Rotation:
    with progress.stage("Principal directions", -(-tokens.num_samples // _BATCH)) as stage:
        ids, keep = tokens.input_ids, tokens.keep
        return find_rotation(source, checkpoint, ids, keep, batch_size=_BATCH, advance=stage.advance)


def _put_in_place(source: SourceModel, turned: Remade, progress: Progress) -> None:
    """Give the model the turned weights, tensor by tensor; of tied embeddings the output layer gets its own."""
    model = source.model
    output = model.get_output_embeddings()
    if output.weight is model.get_input_embeddings().weight:
        output.weight = nn.Parameter(torch.empty_like(output.weight), requires_grad=False)
        model.config.tie_word_embeddings = False
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with progress.stage("Rotating", len(turned.tensors)) as stage:
        for name in turned.tensors:
            place = output.weight if name == LM_HEAD else parameters[name]
            place.copy_(turned.tensor(name))
            stage.advance()


def _log_probs(source: SourceModel, ids: Tensor) -> Tensor:
    """Of one sequence, (L, V) float32."""
    logits: Tensor = source.model(input_ids=ids.to(source.device), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)
