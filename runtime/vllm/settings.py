"""What a user may say about a bundle in vLLM: which of its sparsities, and whether prompts are masked.

``--additional-config '{"wisparse": {"prefill": "all", "sparsity": 0}}'``, or the environment; the first wins.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wisparse.formats.errors import UsageError

__all__ = ["ENVIRONMENT", "POLICIES", "Settings", "require_cards"]

# "half" is a protocol for measuring accuracy: it needs whole prompts, and vLLM reads them in pieces.
POLICIES = ("dense", "all")
ENVIRONMENT = {"prefill": "WISPARSE_VLLM_PREFILL", "sparsity": "WISPARSE_VLLM_SPARSITY"}


@dataclass(frozen=True)
class Settings:
    """How a bundle is run.

    Attributes:
        prefill: ``dense``: prompt tokens are not masked; ``all``: every token is.
        sparsity: of a rung, or 0: nothing is masked. Whether the bundle has it is asked of the bundle.
    """

    prefill: str
    sparsity: float

    @classmethod
    def read(cls, additional: Any, environment: Mapping[str, str], default: float) -> Settings:
        """From vLLM's ``additional_config`` and the environment; ``default`` is the sparsity of the default rung.

        Raises:
            UsageError: a key, a policy, or a sparsity that is no number.
        """
        if isinstance(additional, Mapping):
            _refuse_strays(additional)
        entry = additional.get("wisparse") if isinstance(additional, Mapping) else None
        if entry is not None and not isinstance(entry, Mapping):
            raise UsageError(f"additional_config: wisparse: expected an object, found {entry!r:.80}")
        given = {key: environment[name] for key, name in ENVIRONMENT.items() if environment.get(name)}
        given |= dict(entry or {})
        for key in given:
            if key not in ENVIRONMENT:
                raise UsageError(
                    f"additional_config: wisparse: expected {' or '.join(ENVIRONMENT)}, found {str(key)!r:.80}"
                )
        prefill = given.get("prefill", "dense")
        if prefill not in POLICIES:
            raise UsageError(f"prefill: expected one of {', '.join(POLICIES)} in vLLM, found {prefill!r:.80}")
        return cls(prefill, _sparsity(given.get("sparsity", default)))


def _refuse_strays(additional: Mapping[Any, Any]) -> None:
    """Other keys are other plug-ins', but these would be meant for us and change nothing."""
    for key in map(str, additional):
        nearly = key != "wisparse" and difflib.get_close_matches(key.lower(), ["wisparse"], cutoff=0.8)
        if key in ENVIRONMENT or nearly:
            raise UsageError(
                f'additional_config: expected {{"wisparse": {{"sparsity": …}}}} or the like, found the key {key!r:.80}'
            )


def require_cards(size: int, model: Any) -> None:
    """Raise UsageError unless a model of this config can be cut into ``size`` parts, as tensor parallel."""
    for key in ("num_attention_heads", "hidden_size", "intermediate_size"):
        value = getattr(model, key)
        if value % size:
            raise UsageError(f"tensor_parallel_size: expected a divisor of {key} ({value}), found {size}")
    heads = getattr(model, "num_key_value_heads", None) or size
    if heads % size and size % heads:
        raise UsageError(
            f"tensor_parallel_size: expected a divisor or a multiple of num_key_value_heads ({heads}), found {size}"
        )


def _sparsity(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"sparsity: expected a number, found {value!r:.80}") from None
