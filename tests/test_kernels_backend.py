"""The choice of a back end."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from wisparse.kernels.backend import BACKENDS, choose_backend

CPU = torch.device("cpu")


def test_the_fastest_for_the_device() -> None:
    choice = choose_backend(CPU, torch.bfloat16)
    assert choice.name == "numba"
    assert "cpu" in choice.reason
    assert choose_backend(CPU, torch.float32, "torch").name == "torch"


def test_auto_gives_a_reason_for_falling_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(CPU, torch.float64).name == "torch"
    assert "float64" in choose_backend(CPU, torch.float64).reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend(CPU, torch.float32).reason == "numba cannot: the package numba is not installed"


def test_an_old_gpu_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    choice = choose_backend(torch.device("cuda", 0), torch.float16)
    assert choice.name == "torch"
    assert "7.5" in choice.reason


def test_another_makers_gpu_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    choice = choose_backend(torch.device("cuda", 0), torch.bfloat16)
    assert choice.name == "torch"
    assert "NVIDIA" in choice.reason


def test_a_named_back_end_is_never_replaced() -> None:
    with pytest.raises(ValueError, match="triton cannot run on cpu"):
        choose_backend(CPU, torch.bfloat16, "triton")
    with pytest.raises(ValueError, match=f"known ones: auto, {', '.join(BACKENDS)}"):
        choose_backend(CPU, torch.bfloat16, "cuda")
