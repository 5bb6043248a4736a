"""A plug-in of vLLM for measurements: with ``load_format="dummy"`` quantized weights get random codes.

vLLM fills floating-point parameters alone (findings/vllm-dummy-codes.sh), and with equal codes a GPU needs less power: int8
prompts of 16,000 tokens took 118 ms instead of 131 (8 blocks of the 8B shape, H200, vLLM 0.26).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    """What vLLM calls, in each of its processes and more than once."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights
    if load.__module__ == __name__:
        return

    def load_with_codes(loader: DummyModelLoader, model: torch.nn.Module, *given: Any) -> None:
        load(loader, model, *given)
        for name, parameter in model.named_parameters():
            if name.endswith((".weight_packed", ".qweight")):
                generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
                parameter.data.view(torch.uint8).random_(256, generator=generator)

    DummyModelLoader.load_weights = load_with_codes


def plugin_path(folder: Path, more: Mapping[str, str] | None = None) -> Path:
    """A new folder that, on PYTHONPATH beside this one's, has vLLM load this plug-in and those of ``more``."""
    info = folder / "wisparse-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wisparse\nVersion: 0.1.0\n")
    entries = {"random_codes": "gpu_codes:register", **(more or {})}
    lines = [f"{name} = {entry}\n" for name, entry in entries.items()]
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(lines))
    return folder
