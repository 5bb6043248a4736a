"""Launch one kernel a few times, for ``ncu`` or ``compute-sanitizer``.

PYTHONPATH=. ncu --clock-control none --set full -s 3 -c 1 python benchmarks/gpu_profile.py gate_up 0.5 512 16 7 4 1
"""

from __future__ import annotations

import sys

import torch
from gpu_models import SHAPES
from gpu_tiles import case_for

from wisparse.formats.architectures import ModelConfig
from wisparse.kernels.gpu.gemv import GemvTile


def main() -> None:
    role, sparsity, *numbers = sys.argv[1:]
    case = case_for(ModelConfig.from_dict(SHAPES["llama-3.1-8b"]), role, float(sparsity), copies=6)
    case.launcher(GemvTile(*map(int, numbers)), pdl=False)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
