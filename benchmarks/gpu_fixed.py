"""What a launch costs besides its bytes: times at several sparsities, their slope and intercept.

    PYTHONPATH=. python benchmarks/gpu_fixed.py gate_up 512 16 7 4 1

With ``--once SPARSITY`` one launch and nothing else, for ``ncu`` or ``compute-sanitizer``:

    PYTHONPATH=. ncu --clock-control none --set full -s 3 -c 1 \\
        python benchmarks/gpu_fixed.py gate_up 512 16 7 4 1 --once 0.5
"""

from __future__ import annotations

import argparse

import torch
from gpu_models import SHAPES, need_gpu
from gpu_tiles import case_for, time_graph

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.gpu.gemv import GemvTile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("qkv", "o", "gate_up", "down"))
    parser.add_argument("tile", type=int, nargs="+", help="the first fields of a GemvTile")
    parser.add_argument("--once", type=float, metavar="SPARSITY")
    options = parser.parse_args()
    need_gpu(parser)
    role, tile = options.role, GemvTile(*options.tile)
    config = ModelConfig.from_dict(SHAPES["llama-3.1-8b"])
    if options.once is not None:
        case_for(config, role, options.once, copies=6).launcher(tile, pdl=False)()
        torch.cuda.synchronize()
        return
    for sparsity in (1.0, 0.9, 0.7, 0.5, 0.3, 0.0001, 0.0):
        case = case_for(config, role, sparsity, copies=8)
        times = [time_graph(case.launcher(tile, pdl), len(case.groups)) for pdl in (True, False)]
        print(
            f"{role} {tile} sparsity {sparsity}: {times[0]:.2f} us, late {times[1]:.2f}, "
            f"bytes {case.bytes / 4.6e6:.2f} us"
        )
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
