"""int4 weights in the coordinates in which they and the masks cost least: the source's, or rotated ones.

GPTQ needs correlated inputs, which a rotation to principal directions takes away, and masks need the rotation. Which
wins depends on the model and the sparsity (benchmarks/coordinates.py), so it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from wisparse.formats.checkpoint import Checkpoint

from .calibration import CalibrationTokens
from .evaluation import evaluate_text
from .gptq import quantise_weights
from .measurement import MaskedLogits
from .rotation import load_weights, rotate
from .search.search import SearchSettings, SparsityLevels
from .source import SourceModel
from .state import Stages

# Sequences and tokens of each, to fit and to mask with, and others to measure on.
SAMPLES, LONGEST = 4, 256


@torch.no_grad()
def compare_coordinates(
    source: SourceModel,
    checkpoint: Checkpoint,
    tokens: CalibrationTokens,
    directions: Callable[[], CalibrationTokens],
    held_back: Callable[[], CalibrationTokens],
    sparsity: float,
    stages: Stages,
) -> dict[str, float]:
    """KL(dense || int4 with masks of ``sparsity``), nats a token, of ``none`` and ``pca`` on a few sequences held back.
    ``source`` is changed in between, and holds the checkpoint's weights again afterwards."""
    few = replace(tokens, input_ids=tokens.input_ids[:SAMPLES, :LONGEST], keep=tokens.keep[:SAMPLES, :LONGEST])

    def compare() -> dict[str, float]:
        sequences = stages.processes.broadcast(list(held_back().input_ids) if stages.processes.leads else [])
        dense = [source.model(input_ids=ids[None].to(source.device)).logits[0].cpu() for ids in sequences]
        trial = replace(stages, folder=None)  # nothing of it is kept

        def kl() -> float:
            waiting = iter(dense)
            quantise_weights(source, few, "int4", checkpoint.dtype, trial)
            with SparsityLevels(source, few, SearchSettings(search="fisher"), trial) as levels:
                result = levels.at(sparsity)
            with MaskedLogits(source, result) as logits:
                found = evaluate_text(
                    logits, sequences, ["all"], reference=lambda ids, _: next(waiting).to(source.device)
                )
            load_weights(source.model, checkpoint)
            return found["all"].sparse.kl

        found = {"none": kl()}
        rotate(source, checkpoint, tokens, directions, stages)
        return stages.processes.broadcast({**found, "pca": kl()})

    return stages.run("coordinates", compare)
