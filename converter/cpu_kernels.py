"""The kernels with which this machine's CPU will decode the bundle, compiled while the model is converted."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Sequence

import torch

from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.machine import choose_device
from wisparse.kernels.backend import choose_backend

from .processes import Progress
from .settings import ConvertSettings

_log = logging.getLogger(__name__)


def start_compiling(settings: ConvertSettings, checkpoint: Checkpoint) -> list[subprocess.Popen[str]]:
    """Start to compile the kernels that are not on disk; none on a machine that would decode on a GPU."""
    dtype, device = checkpoint.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype), choose_device()
    if device.type != "cpu" or choose_backend(device, dtype)[0] != "numba":
        return []
    from wisparse.kernels.cpu import launch  # imports numba

    config = checkpoint.config
    int4 = any(stored.packing.kind == "int4" for stored in checkpoint.quantised.values())
    int4 |= settings.weights in ("int4", "graded")
    wanted = launch.regions_of(dtype, mixers=config.has_mixers, experts=config.has_experts, int4=int4)
    return launch.start_compiling(wanted)


def wait_for_compilers(compilers: Sequence[subprocess.Popen[str]], progress: Progress) -> None:
    if not compilers:
        return
    with progress.stage("Compiling CPU kernels", len(compilers)) as stage:
        done = 0
        while done < len(compilers):
            time.sleep(0.2)
            before, done = done, sum(compiler.poll() is not None for compiler in compilers)
            stage.advance(done - before)
    if any(compiler.returncode for compiler in compilers):
        _log.warning("a CPU kernel could not be compiled; the first start of the bundle on this machine says why")
