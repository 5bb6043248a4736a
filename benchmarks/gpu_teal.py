"""Our kernels beside TEAL's, from a checkout of https://github.com/FasterDecoding/TEAL: the same weights and inputs.

    PYTHONPATH=. python benchmarks/gpu_teal.py PATH_TO_TEAL --shape llama-3.1-8b --sparsity 0.5

Microseconds of one launch in fp16, batch 1, weights beyond the L2 cache, and the share of the ideal: the bytes of the
kept rows over ``--ceiling``. TEAL's kernels get x as it is read, keep |x| > threshold and leave plain outputs; for
gate and up it takes two. Ours do in one what stands around: norm or the attention's combination, residual, SiLU. TEAL
tunes itself at its first launches. Nothing of TEAL is part of this project.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

ROLES = ("qkv", "o", "gate_up", "down")


def load_teal(checkout: Path) -> ModuleType:
    """TEAL's kernels. This runs the code of the checkout.

    Raises:
        SystemExit: there are none in that folder.
    """
    file = checkout / "kernels" / "sparse_gemv.py"
    spec = importlib.util.spec_from_file_location("teal_sparse_gemv", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise SystemExit(f"expected a checkout of TEAL, found no {file}; give the folder that holds kernels/")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def teal_launch(
    teal: ModuleType, weight_t: Tensor, widths: Sequence[int], x: Tensor, thresholds: Sequence[float], sparsity: float
) -> Callable[[], list[Tensor]]:
    """What computes the projections of x (K,) over the channels with |x| > threshold, in one output or several.

    Args:
        weight_t: (K, sum(widths)) fp16, the projections' columns side by side: one, gate and up, or q, k and v.
        thresholds: one for each projection.
        sparsity: names the set of tiles that TEAL tunes.
    """
    row, share = x.view(1, 1, -1), round(sparsity * 100)
    if len(widths) == 3:
        return lambda: [teal.qkv_gemv(row, weight_t.T, *thresholds, share, widths[2]).flatten()]
    parts = [part.contiguous().T for part in weight_t.split(list(widths), dim=1)]
    return lambda: [
        teal.splitk_sparse_gemv(row, part, threshold, share).flatten()
        for part, threshold in zip(parts, thresholds, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--ceiling", type=float, default=4540.0, help="read bandwidth in GB/s")
    arguments = parser.parse_args()
    teal = load_teal(arguments.checkout)

    from gpu_models import SHAPES
    from gpu_tiles import case_for, time_graph

    from wisparse.formats.model_config import ModelConfig
    from wisparse.kernels.gpu.gemv import launch_kind
    from wisparse.kernels.gpu.tiles import choose_tile

    major, minor = torch.cuda.get_device_capability()
    config = ModelConfig.from_dict(SHAPES[arguments.shape])
    rows = []
    for role in ROLES:
        case = case_for(config, role, arguments.sparsity, dtype=torch.float16)
        tile = choose_tile(
            major * 10 + minor, torch.cuda.get_device_properties(0).multi_processor_count, case.k, case.widths,
            launch_kind(1, dense=arguments.sparsity == 0),
        )  # fmt: skip
        ours = time_graph(case.launcher(tile, major >= 9), len(case.groups))
        x = torch.randn(case.k, device="cuda", dtype=torch.float16)
        threshold = float(x.float().abs().quantile(arguments.sparsity)) if arguments.sparsity > 0 else -1.0
        launches = [
            teal_launch(teal, group.matrix.data, case.widths, x, [threshold] * len(case.widths), arguments.sparsity)
            for group in case.groups
        ]
        expected = torch.where(x.abs() > threshold, x, 0).float() @ case.groups[0].matrix.data.float()
        error = float((torch.cat(launches[0]()).float() - expected).norm() / expected.norm())

        def launch(launches: list[Callable[[], list[Tensor]]] = launches) -> None:
            for one in launches:
                one()

        theirs = time_graph(launch, len(launches))
        ideal = case.bytes / arguments.ceiling * 1e-3
        rows.append({"role": role, "ideal_us": ideal, "us": ours, "teal_us": theirs, "teal_error": error})
        print(
            f"{role:8s} ideal {ideal:6.2f} us  ours {ours:6.2f} ({ideal / ours:.0%})  TEAL {theirs:6.2f} "
            f"({ideal / theirs:.0%}), relative error {error:.1e}",
            flush=True,
        )
        del case, launches
        torch.cuda.empty_cache()
    line = json.dumps({"shape": arguments.shape, "sparsity": arguments.sparsity, "rows": rows})
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"gpu-teal-{arguments.shape}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
