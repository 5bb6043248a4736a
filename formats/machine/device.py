"""The device that a name stands for, on this machine."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..errors import UsageError
from ..guard.arguments import quoted

__all__ = ["choose_device"]

_NAME = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")


def choose_device(requested: Any = "auto", name: str = "device") -> torch.device:
    """``auto`` is the first NVIDIA GPU, or the CPU where there is none; else ``cpu``, ``cuda`` or ``cuda:N``.

    Args:
        requested: the name, or a ``torch.device``.
        name: what the caller calls this argument, for the message.

    Raises:
        UsageError: not a device, or one that this machine lacks.
    """
    if isinstance(requested, str) and requested == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    spelled = str(requested) if isinstance(requested, torch.device) else requested
    match = _NAME.fullmatch(spelled) if isinstance(spelled, str) else None
    if match is None:
        raise UsageError(f"{name}: expected auto, cpu, cuda or cuda:N, found {quoted(requested)}")
    if spelled == "cpu":
        return torch.device("cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise UsageError(
            f"{name}: expected a device of this machine, found {spelled!r}, and torch sees {count} NVIDIA GPUs here; "
            "use cpu, or a torch with CUDA"
        )
    return torch.device("cuda", index)
