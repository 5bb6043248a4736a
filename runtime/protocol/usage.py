"""What an answer cost, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..generation.answer import Generation

__all__ = ["tokens_used", "usage"]


def usage(answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int | None) -> dict[str, Any]:
    """Tokens in and out, and of those the thought ones if they are told; each prompt counts once, however many answers
    it has, as what its first one found cached."""
    copies = sum(answer.prompt_tokens for answer in answers) // prompt_tokens
    cached = sum(min(one.cached_tokens for one in answers[at : at + copies]) for at in range(0, len(answers), copies))
    found = tokens_used(sum(len(answer.token_ids) for answer in answers), prompt_tokens, cached)
    if thought_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": thought_tokens}
    return found


def tokens_used(completion: int, prompt_tokens: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
