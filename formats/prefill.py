"""Which positions of a prompt are sparse: the prefill policies. What is decoded is always sparse."""

from __future__ import annotations

from .guard import arguments

__all__ = ["PREFILL_POLICIES", "sparse_from"]

PREFILL_POLICIES = ("dense", "half", "all")


def sparse_from(policy: str, length: int) -> int:
    """The first sparse position of a prompt of ``length`` tokens; ``length`` if none is.

    ``dense``: none of them is sparse. ``half``: the last ``length // 2``, the paper's protocol for measuring accuracy.
    ``all``: every one.

    Raises:
        UsageError: no such policy.
    """
    arguments.choice("prefill", policy, PREFILL_POLICIES)
    return {"dense": length, "half": length - length // 2, "all": 0}[policy]
