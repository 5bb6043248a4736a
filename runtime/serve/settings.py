"""How a server listens, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ServeSettings"]


@dataclass(frozen=True)
class ServeSettings:
    """How a server listens.

    Attributes:
        host, port: where; port 0 takes a free one.
        name: what the model is called in answers and in ``/v1/models``.
        max_queue: requests that may wait beside those in the batch.
        api_key: what clients have to show, as ``Authorization: Bearer KEY``; None lets everybody in. Never logged.
        cors: origins whose pages may ask, ``*`` for all.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_queue: int = 64
    api_key: str | None = field(default=None, repr=False)
    cors: Sequence[str] = ()
