"""Time, memory and speed of an ONNX export, and the tokens that other runtimes have to reproduce.

    python benchmarks/onnx_export.py BUNDLE [--dtype float32] [--out DIR] [--tokens TOKENS.json] [--num-tokens 64]

Exports a bundle (into a temporary folder, or DIR to keep it), loads it in ONNX Runtime, and decodes greedily with it
and with our plain decoder. The lower bound of the time is a copy of the weights; that of the memory is the largest
weight.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from wisparse.commands.export_onnx import OnnxDecoder, check_export, rotary_tables
from wisparse.formats.bundle import Bundle
from wisparse.formats.onnx.export import export_onnx
from wisparse.runtime.torch.decoder import TorchDecoder


def peak_mb() -> float:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def export_alone(folder: str, out: str, dtype: str) -> dict[str, Any]:
    """In a process of its own, so that the peak is the export's."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from onnx_export import measure_export\n"
        f"measure_export({folder!r}, {out!r}, {dtype!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_export(folder: str, out: str, dtype: str) -> None:
    """Export, and print seconds and memory as JSON."""
    bundle = Bundle.open(folder)
    rotaries = rotary_tables(bundle.config)
    before, started = peak_mb(), time.perf_counter()
    export = export_onnx(bundle, out, rotaries, dtype=dtype, overwrite=True)
    report = {"seconds": time.perf_counter() - started, "peak_mb": peak_mb(), "before_mb": before}
    print(json.dumps({**report, "megabytes": export.num_bytes / 1e6, "dtype": export.dtype}))


def decode_ours(bundle: Bundle, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    """Greedy answers of our plain decoder in float32, and its tokens per second."""
    answers, seconds = [], 0.0
    longest = max(map(len, prompts)) + count
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=longest)
    for prompt in prompts:
        tokens = [int(decoder.prefill(0, torch.tensor(prompt), len(prompt)).argmax())]
        started = time.perf_counter()
        while len(tokens) < count:
            tokens.append(int(decoder.decode(torch.tensor(tokens[-1:]))[0].argmax()))
        seconds += time.perf_counter() - started
        answers.append(tokens)
    return answers, len(prompts) * (count - 1) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16"])
    parser.add_argument("--out")
    parser.add_argument("--tokens", help="write prompts and our answers here, for onnx_peers.py")
    parser.add_argument("--num-tokens", type=int, default=64)
    args = parser.parse_args()

    bundle = Bundle.open(args.bundle)
    largest = max(info.nbytes for info in bundle.checkpoint.tensors.values()) / 1e6
    print(f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}, torch {torch.__version__}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}")
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or str(Path(scratch) / "export")
        copy = Path(scratch) / "copy"
        copy.mkdir()
        started = time.perf_counter()
        for file in bundle.checkpoint.files():
            shutil.copy(file, copy / file.name)
        copied = time.perf_counter() - started
        print(f"ceiling: a copy of the weights takes {copied:.2f} s; the largest weight has {largest:.1f} MB on disk")
        exported = export_alone(args.bundle, out, args.dtype)
        grown = exported["peak_mb"] - exported["before_mb"]
        print(
            f"export: {exported['seconds']:.2f} s, {exported['megabytes']:.1f} MB in {exported['dtype']}, memory grew "
            f"by {grown:.0f} MB to {exported['peak_mb']:.0f} MB"
        )
        agreement = check_export(Path(out), bundle, exported["dtype"])
        print("check: " + ", ".join(f"{name} {value:.2g}" for name, value in agreement.items()))

        generator = np.random.default_rng(0)
        vocab = bundle.config.vocab_size
        prompts = [generator.integers(3, vocab, size=length).tolist() for length in (31, 8, 1)]
        answers, ours = decode_ours(bundle, prompts, args.num_tokens)
        decoder = OnnxDecoder(out, num_threads=torch.get_num_threads())
        started = time.perf_counter()
        found = [decoder.generate([prompt], args.num_tokens)[0] for prompt in prompts]
        theirs = len(prompts) * args.num_tokens / (time.perf_counter() - started)
        batched = decoder.generate(prompts, args.num_tokens)
        same = found == answers and batched == answers
        print(f"tokens of our runtime: {same}; plain torch {ours:.1f} tok/s, ONNX Runtime {theirs:.1f} tok/s")
        if args.tokens:
            Path(args.tokens).write_text(json.dumps({"prompts": prompts, "answers": answers}))
    report = {
        "bundle": Path(args.bundle).name,
        "copy_seconds": copied,
        "largest_weight_mb": largest,
        **exported,
        "check": agreement,
        "tokens_equal": same,
        "torch_tok_per_s": ours,
        "onnxruntime_tok_per_s": theirs,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
