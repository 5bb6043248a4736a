"""KL over the bits read a weight: planes of two-bit codes beside int4, graded and bf16 weights with masks.

    python benchmarks/planes.py MODEL --device cuda --calibration calibrate.txt --eval measure.txt
    python benchmarks/planes.py MODEL --forms planes-4 int4 --tokens 8192 --search fisher    # on a CPU

Without texts: Python's standard library, every other file. Bits stored and read count all scales, but not the widths. A
form has its bits, if any, and with ``/source`` the source's coordinates, else the rotated ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plane_codes import quantise_in_planes, read_by_rows
from quality import EXAMPLE, Divergence, describe_machine, evaluate, print_document, stdlib_tokens

from wisparse.converter.calibration import CalibrationTokens, pack, path_documents
from wisparse.converter.gguf_source import gguf_weights, open_checkpoint, open_source
from wisparse.converter.gptq import group_size, quantise_weights
from wisparse.converter.masking import MaskedModel
from wisparse.converter.planes import read_in_planes
from wisparse.converter.rotation import rotate
from wisparse.converter.search.allocation import MAX_SPARSITY
from wisparse.converter.search.search import SearchSettings, SparsityLevels
from wisparse.converter.source import SourceModel, load_source

FORMS = ("native", "int4", "int4/source", "graded", "planes-4", "planes-5", "planes-4/source", "planes-5/source")
READ = (4.0, 3.5, 3.0, 2.5, 2.1)
_SCALE_BITS = 16


def text(source: SourceModel, path: Path | None, kind: str, tokens: int, seq_len: int, seed: int) -> CalibrationTokens:
    count = -(-tokens // seq_len)
    if path is None:
        return stdlib_tokens(source, kind, count, seq_len, seed)
    rows = pack(path_documents([str(path)], seed), source.tokenizer, count, seq_len, seed, path.name)
    return CalibrationTokens.from_rows(rows, path.name, seed)


def of_form(form: str, dense: list[torch.Tensor], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one form; ``dense``: the source's own log-probabilities, filled by the first call."""
    kind, _, coordinates = form.partition("/")
    place = open_source(str(options.model), None, None)
    source = load_source(place.folder, torch.float32, torch.device(options.device), weights=gguf_weights(place))
    ids = text(source, options.eval, "evaluation", options.eval_tokens, 512, 1).input_ids
    tokens = text(source, options.calibration, "calibration", options.tokens, options.seq_len, 0)

    def measured(masked: MaskedModel, thresholds: dict[str, float]) -> Divergence:
        return evaluate(source.model, masked, ids, thresholds, dense_log_probs=dense)

    if not dense:
        with MaskedModel(source.projections) as masked:
            measured(masked, {})
    began = time.perf_counter()
    fit = tokens
    if coordinates != "source":
        half = partial(text, source, options.calibration, "calibration", options.tokens // 2, options.seq_len, 1)
        source = rotate(source, open_checkpoint(place), tokens, half)[0]
        fit = tokens.joined(half())
    weights = sum(module.weight.numel() for module in source.projections.values())
    fixed = 0.0  # bits a weight that are read always
    if kind.startswith("planes"):
        matrices = quantise_in_planes(source, fit, float(kind.partition("-")[2]))
        stored = sum(matrix.bits for matrix in matrices.values()) / weights
        fixed = sum(_SCALE_BITS * len(matrix.output_scales) for matrix in matrices.values()) / weights
        about = dict.fromkeys((2, 4, 6, 8), 0)
        for matrix in matrices.values():
            for planes, count in zip(*torch.bincount(matrix.channels).unique(return_counts=True), strict=True):
                about[2 * int(planes)] += int(count) * matrix.codes.shape[1]
        print(form, {width: round(count / weights, 3) for width, count in about.items()}, file=sys.stderr)
        source = read_by_rows(source, matrices)
    else:
        stored = {"native": 16.0, "int4": 4.0, "graded": 8.0}[kind]
        if kind != "native":
            stored += _SCALE_BITS / group_size(source.config)
            codes = quantise_weights(source, fit, kind, torch.float16)
            source = read_in_planes(source, codes) if kind == "graded" else source
    rows, head = [], {"form": form, "tokens": options.tokens, "search": options.search, "stored": round(stored, 4)}

    def add(found: Divergence) -> None:
        read = (1 - found.realised_sparsity) * (stored - fixed) + fixed
        row = {**head, "read": round(read, 4), "kl": round(found.kl, 6), "top1": round(found.top1_agreement, 4)}
        rows.append({**row, "perplexity": round(found.perplexity, 4), "seconds": round(time.perf_counter() - began, 1)})
        print(rows[-1], file=sys.stderr, flush=True)

    with MaskedModel(source.projections) as masked:
        add(measured(masked, {}))
    bits = (16 * 0.7, 16 * 0.5) if kind == "native" else options.read
    sparsities = sorted(
        (s for s in (1 - (b - fixed) / (stored - fixed) for b in bits) if 0.01 < s < MAX_SPARSITY), reverse=True
    )
    settings = SearchSettings(search=options.search, refine_steps=options.steps, batch_size=options.batch)
    with SparsityLevels(source, tokens, settings) as levels:
        for sparsity in sparsities:
            # The search's matrix products may be coarse, the measurement's may not.
            torch.set_float32_matmul_precision("high" if options.coarse else "highest")
            result = levels.at(sparsity)
            torch.set_float32_matmul_precision("highest")
            with MaskedModel(source.projections) as masked:
                add(measured(masked, result.apply_to(masked)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=EXAMPLE, help="a folder, a GGUF file or a Hub id")
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--read", type=float, nargs="+", default=READ)
    parser.add_argument("--calibration", type=Path, help="a text or a folder of texts")
    parser.add_argument("--eval", type=Path)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--eval-tokens", type=int, default=24576)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--search", default="refine", choices=("fisher", "refine"))
    parser.add_argument("--steps", type=int, help="of refine")
    parser.add_argument("--batch", type=int, help="sequences of a micro-batch of the search")
    parser.add_argument("--coarse", action="store_true", help="TF32 in the search")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    document = {"benchmark": "planes", "machine": describe_machine(torch.device(options.device)), "rows": []}
    dense: list[torch.Tensor] = []
    for form in options.forms:
        document["rows"] += of_form(form, dense, options)
    print_document({"model": options.model.name, **document}, options.output)


if __name__ == "__main__":
    main()
