"""What an answer cost, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..generation.answer import Generation

__all__ = ["cached_tokens", "tokens_used", "usage"]


def usage(answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int | None) -> dict[str, Any]:
    """Tokens in and out, and of those the thought ones if they are told; each prompt counts once, however many answers
    it has."""
    completion = sum(len(answer.token_ids) for answer in answers)
    found = tokens_used(completion, prompt_tokens, cached_tokens(answers, prompt_tokens))
    if thought_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": thought_tokens}
    return found


def cached_tokens(answers: Sequence[Generation], prompt_tokens: int) -> int:
    """Tokens of the prompts that the cache still held; of each prompt what its first answer found."""
    copies = sum(answer.prompt_tokens for answer in answers) // prompt_tokens
    return sum(min(one.cached_tokens for one in answers[at : at + copies]) for at in range(0, len(answers), copies))


def tokens_used(completion: int, prompt_tokens: int, cached: int) -> dict[str, Any]:
    """As OpenAI writes it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
