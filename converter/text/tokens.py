"""Calibration tokens: full sequences of one length, and which of their tokens count.

Every sequence begins as the tokenizer begins a text (its beginning-of-text token, if it has one), because that is what
a decoder sees; that first token is an attention sink with activations unlike any other's and is excluded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["CalibrationTokens"]


@dataclass(frozen=True)
class CalibrationTokens:
    """Token sequences and which of their tokens count.

    Attributes:
        input_ids: (S, L) int64.
        keep: (S, L) bool; False for padding and for the first token of every sequence.
        source: what the tokens were made from, without any path of this machine.
        seed: of the order of the documents, or of the sampling.
    """

    input_ids: Tensor
    keep: Tensor
    source: str
    seed: int

    @property
    def num_samples(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """How many tokens count."""
        return int(self.keep.sum())

    @cached_property
    def digest(self) -> str:
        """sha256 of the shape and the token ids, as ``sha256:<hex>``."""
        ids = self.input_ids.to("cpu", torch.int64).contiguous()
        hashed = hashlib.sha256(f"{tuple(ids.shape)}".encode())
        hashed.update(ids.numpy().astype("<i8").tobytes())
        return f"sha256:{hashed.hexdigest()}"

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], source: str, seed: int) -> CalibrationTokens:
        """From full rows of one length; the first token of each is excluded."""
        input_ids = torch.tensor(rows, dtype=torch.int64)
        keep = torch.ones_like(input_ids, dtype=torch.bool)
        keep[:, 0] = False
        return cls(input_ids, keep, source, seed)
