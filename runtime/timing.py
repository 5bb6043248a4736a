"""Measured read bandwidth, which every speed is held against."""

from __future__ import annotations

import time

import torch


def read_bandwidth_gbps(device: torch.device) -> float:
    """GB/s at which a device reads memory: the best of several sums over a buffer far larger than any cache."""
    buffer = torch.ones((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.float32, device=device)
    buffer.sum()
    best = float("inf")
    for _ in range(6):
        wait(device)
        began = time.perf_counter()
        buffer.sum()
        wait(device)
        best = min(best, time.perf_counter() - began)
    return buffer.nbytes / best * 1e-9


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
