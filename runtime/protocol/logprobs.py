"""Log-probabilities of an answer's tokens, as chats and as completions tell them; ``spell``: a token's text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..generation.choosing import TokenScore

__all__ = ["chat_logprobs", "completion_logprobs"]

# What JSON has for the logarithm of nothing, as OpenAI writes it.
_NEVER = -9999.0


def chat_logprobs(scores: Sequence[TokenScore | int], spell: Callable[[int], str]) -> dict[str, Any]:
    """Of a message's tokens."""

    def spelled(token: int, logprob: float) -> dict[str, Any]:
        text = spell(token)
        # A token may be part of a character, of which there is no text.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": octets}

    entries = []
    for score in scores:
        if isinstance(score, TokenScore):
            top = [spelled(token, logprob) for token, logprob in score.top]
            entries.append({**spelled(score.token_id, score.logprob), "top_logprobs": top})
    return {"content": entries, "refusal": None}


def completion_logprobs(
    scores: Sequence[TokenScore | int], spell: Callable[[int], str], offset: int
) -> tuple[dict[str, Any], int]:
    """Of a text's tokens, the first of which is at this character; and the character after the last. A token that is
    there by its id alone has no score: it is a prompt's first."""
    tokens = [spell(score if isinstance(score, int) else score.token_id) for score in scores]
    *offsets, end = itertools.accumulate(map(len, tokens), initial=offset)
    known = [None if isinstance(score, int) else score for score in scores]
    found = {
        "tokens": tokens,
        "token_logprobs": [None if score is None else _finite(score.logprob) for score in known],
        "top_logprobs": [None if score is None else _top(score, spell) for score in known],
        "text_offset": offsets,
    }
    return found, end


def _top(score: TokenScore, spell: Callable[[int], str]) -> dict[str, float]:
    """The most probable tokens, and the token itself; the likelier of two that are written alike."""
    found: dict[str, float] = {}
    for token, logprob in (*score.top, (score.token_id, score.logprob)):
        found.setdefault(spell(token), _finite(logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)
