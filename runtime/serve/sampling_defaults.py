"""What a request that is silent about sampling gets from this model."""

from __future__ import annotations

from wisparse.formats.errors import UsageError
from wisparse.formats.guard.safe_json import parse_json

from ..model import Model
from ..protocol.requests import Defaults

__all__ = ["sampling_defaults"]


def sampling_defaults(model: Model) -> Defaults:
    """The model's own sampling settings, where its generation config has them."""
    data = model.bundle.read_bytes("generation_config.json")
    config = {} if data is None else parse_json(data, "generation_config.json", UsageError)

    def number(key: str, fallback: float, least: float, most: float) -> float:
        value = config.get(key)
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        return float(value) if known else fallback  # type: ignore[arg-type]

    plain = Defaults()
    return Defaults(
        temperature=number("temperature", plain.temperature, 0.0, 100.0),
        top_k=int(number("top_k", plain.top_k, 0, 2**31)),
        top_p=number("top_p", plain.top_p, 1e-9, 1.0),
        repetition_penalty=number("repetition_penalty", plain.repetition_penalty, 0.01, 100.0),
    )
