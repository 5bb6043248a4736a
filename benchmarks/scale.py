"""What a whole conversion costs at a model's real size: seconds by stage, memory over the weights.

    python benchmarks/scale.py --shape llama-3.1-8b --folder /tmp/scale --json out.json
    torchrun --nproc-per-node 4 benchmarks/scale.py --shape llama-3.1-8b --folder /tmp/scale --json out.json

The weights are random and are made on the spot: time and memory depend on shapes. The default search's outcome on them
means nothing, but it must be the same on one GPU and on several: its digest is in the output.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import LLAMA, LLAMA_1B, LLAMA_8B, QWEN3_30B_A3B
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wisparse.converter.pipeline import run
from wisparse.converter.processes import Progress, Stage
from wisparse.converter.settings import ConvertSettings
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors

_ENDS = dict(bos_token_id=256, eos_token_id=257)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_8B | _ENDS,
    "llama-3.2-1b": LLAMA_1B | _ENDS,
    "qwen3-30b-a3b": QWEN3_30B_A3B | _ENDS,
    "tiny": LLAMA | _ENDS | dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=512, max_position_embeddings=512,
    ),
}  # fmt: skip


def make_checkpoint(shape: str, folder: Path, device: torch.device, blocks: int | None = None, seed: int = 0) -> None:
    """A random model of a named shape and a tokenizer of bytes: weights of deviation about 1/sqrt(K), norms near 1."""
    folder.mkdir(parents=True)
    config = SHAPES[shape] | ({"num_hidden_layers": blocks} if blocks else {})
    generator = torch.Generator(device).manual_seed(seed)
    shapes = expected_tensors(ModelConfig.from_dict(config))
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    for name, size in shapes.items():
        values = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        if len(size) == 1:
            values = 1 + 0.1 * values
        elif "embed" not in name:
            # Channels of unequal weight, as models have them.
            spread = torch.rand(size[1], generator=generator, device=device, dtype=torch.float32).add(0.5)
            values *= (spread / size[1] ** 0.5).to(torch.bfloat16)
        pending[name] = values.cpu()
        full = sum(t.nbytes for t in pending.values()) >= 2 << 30
        if full or name == list(shapes)[-1]:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(pending, file)
            pending = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


class Meter(Progress):
    """Notes the peak of the GPU's memory in every stage beside its seconds."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(enabled=None)
        self.device = device
        self.peaks: dict[str, tuple[int, int]] = {}
        self.ends: list[tuple[str, float]] = []
        # By stage, at most: memory without files' pages, which the system takes back.
        self.own_bytes: dict[str, int] = {}
        self._title = "between stages"
        self._began = time.perf_counter()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            found = int(status.partition("RssAnon:")[2].split()[0]) << 10
            self.own_bytes[self._title] = max(found, self.own_bytes.get(self._title, 0))
            time.sleep(0.1)

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Stage]:
        self._note("between stages")
        outer, self._title = self._title, title
        with super().stage(title, total) as stage:
            yield stage
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._note(title)
        self._title = outer
        self.ends.append((title, time.perf_counter() - self._began))
        print(f"{self.ends[-1][1]:7.1f} s  {title}", file=sys.stderr, flush=True)

    def _note(self, title: str) -> None:
        if self.device.type == "cuda":
            found = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
            self.peaks[title] = tuple(map(max, found, self.peaks.get(title, (0, 0))))  # type: ignore[assignment]
            torch.cuda.reset_peak_memory_stats(self.device)

    def search_seconds(self) -> float:
        """From the end of what comes before the search (calibration tokens, a loaded model) to the final thresholds."""
        before = [end for title, end in self.ends if title in ("Loading the model", "Writing calibration text")]
        over = max(end for title, end in self.ends if title == "Thresholds")  # each sparsity level has its own
        return over - max(end for end in before if end < over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--folder", type=Path, required=True, help="where the model is made, and kept for a next run")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5], help="several: levels of one bundle")
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has")
    parser.add_argument("--search", default="auto")
    parser.add_argument("--weights", default="native", help="int4: the time of GPTQ as well; graded: its default bits")
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--calibration", nargs="+", default=["self"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available() and args.device != "cpu"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    model = args.folder / args.shape
    if not model.exists() and rank == 0:
        began = time.perf_counter()
        make_checkpoint(args.shape, args.folder / "unfinished", device, args.blocks)
        os.rename(args.folder / "unfinished", model)
        print(f"model made in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    while not model.exists():
        time.sleep(0.2)
    out = args.folder / f"out-{size}"
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name(out.name + ".work"), ignore_errors=True)
    if gpu:
        torch.cuda.init()  # what measures memory needs it, and a model that is there already has not asked for it
        torch.cuda.empty_cache()
    meter = Meter(device)
    began = time.perf_counter()
    settings = ConvertSettings(
        model=str(model), output_dir=out, sparsity=() if args.weights == "graded" else tuple(args.sparsity),
        search=args.search, weights=args.weights, num_samples=args.num_samples, seq_len=args.seq_len,
        calibration=tuple(args.calibration), device=args.device,
    )  # fmt: skip
    conversion = run(settings, meter)
    seconds = time.perf_counter() - began
    if conversion is None:
        return
    plan, recipe = conversion.plan, json.dumps(conversion.report.recipe.to_dict(), sort_keys=True)
    weights, in_gb = plan.num_parameters * plan.dtype.itemsize, lambda size: round(size / 1e9, 2)
    result: dict[str, Any] = {
        "shape": args.shape + (f", {args.blocks} blocks" if args.blocks else ""), "sparsities": plan.settings.levels,
        "device": torch.cuda.get_device_name(device) if gpu else "CPU", "processes": size, "torch": torch.__version__,
        "calibration": f"{args.calibration[0]}, {args.num_samples} x {args.seq_len}",
        "search": plan.settings.chosen_search, "weights": args.weights, "rotation": plan.settings.rotation,
        "seconds": round(seconds, 1), "search_seconds": round(meter.search_seconds(), 2),
        "stage_seconds": {name: round(value, 2) for name, value in conversion.seconds.items()},
        "weights_gb": in_gb(weights), "host_own_gb": {name: in_gb(value) for name, value in meter.own_bytes.items()},
        "host_with_mapped_files_gb": in_gb(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
    }  # fmt: skip
    if gpu:
        allocated, reserved = (max(peak[i] for peak in meter.peaks.values()) for i in (0, 1))
        peaks = {name: [in_gb(value - weights) for value in peak] for name, peak in meter.peaks.items()}
        result |= {"gpu_peak_over_weights_gb": in_gb(allocated - weights), "stage_peak_over_weights_gb": peaks}
        result["gpu_reserved_over_weights_gb"] = in_gb(reserved - weights)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
