"""JSON and server-sent events, as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["DONE", "event", "to_json"]

DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
