"""What the quality benchmarks share: text no model here was trained on, an evaluation, tables, the machine.

Calibration and evaluation text are different files of the Python standard library: every other one, by name.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wisparse
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.config import full_config
from wisparse.converter.evaluation import dense_logits, measured, next_tokens, token_figures
from wisparse.converter.masking import MaskedModel
from wisparse.converter.rotation import rotate
from wisparse.converter.search.search import SearchResult
from wisparse.converter.source import SourceModel
from wisparse.formats.checkpoint import Checkpoint
from wisparse.runtime.benchmark import machine

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "pycode-llama-6m"
# A file shorter than this gives no full sequence.
_SMALLEST_FILE = 8192


def stdlib_files(kind: str) -> list[Path]:
    """Standard-library sources, by name; ``kind`` is calibration or evaluation: disjoint files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = [path for path in files if path.stat().st_size > _SMALLEST_FILE]
    return files[0::2] if kind == "calibration" else files[1::2]


def print_document(document: Mapping[str, Any], output: Path | None) -> None:
    """A script's last words: one JSON document, to a file as well if one was asked for."""
    text = json.dumps(document, indent=1)
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")


def stdlib_tokens(source: SourceModel, kind: str, num_samples: int, seq_len: int, seed: int = 0) -> CalibrationTokens:
    """``num_samples`` passages of standard-library source; ``kind`` is calibration or evaluation: disjoint files."""
    files = stdlib_files(kind)
    order = random.Random(seed)
    order.shuffle(files)
    texts = [source.tokenizer(path.read_text("utf-8", "replace"), verbose=False).input_ids for path in files]
    texts = [ids for ids in texts if len(ids) >= seq_len]
    rows: list[list[int]] = []
    # Round after round, one passage of every file, so that no file dominates.
    while len(rows) < num_samples:
        for ids in texts:
            begin = order.randrange(len(ids) - seq_len + 1)
            rows.append(ids[begin : begin + seq_len])
    return CalibrationTokens.from_rows(rows[:num_samples], f"standard library, {kind} files", seed)


def turned(source: SourceModel, folder: Path, tokens: CalibrationTokens, seed: int) -> SourceModel:
    """``source``, in place, in the principal directions of other passages of the calibration files, half as many as
    ``tokens``: as a conversion turns it."""
    text = partial(stdlib_tokens, source, "calibration", -(-tokens.num_samples // 2), tokens.seq_len, seed)
    return rotate(source, Checkpoint.open(folder, complete=full_config), tokens, text)[0]


@dataclass(frozen=True)
class Divergence:
    """Dense against sparse on the same tokens; perplexities are per token, ``realised_sparsity`` by parameters."""

    kl: float
    perplexity: float
    dense_perplexity: float
    top1_agreement: float
    realised_sparsity: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    source: SourceModel,
    masked: MaskedModel,
    input_ids: Tensor,
    thresholds: Mapping[str, float],
    batch_size: int = 4,
    dense: Sequence[Tensor] = (),
) -> Divergence:
    """Run the model dense and masked, every token sparse, over whole sequences (S, L) int64 without padding. ``thresholds``
    are per projection; their scales are on ``masked`` already. ``dense``: the dense logits (B, L, V) per batch, if known."""
    sizes = {name: module.weight.numel() for name, module in masked.projections.items()}
    batches = input_ids.split(batch_size)
    masked.clear()
    dense = dense or [dense_logits(source, ids) for ids in batches]
    figures = []
    with masked.counting() as realised, masked.masking(thresholds):
        for batch, before in zip(batches, dense, strict=True):
            for ids, known, found in zip(batch, before, dense_logits(source, batch), strict=True):
                figures.append(token_figures(known, found, next_tokens(ids)))
        dropped = realised()
    of = measured(figures)
    share = sum(float(dropped[name]) * sizes[name] for name in sizes) / sum(sizes.values())
    return Divergence(of.kl, of.perplexity, of.dense_perplexity, of.top1_agreement, share, of.num_tokens)


class Evaluator:
    """Scores search results on held-out tokens, every token sparse; the dense model runs once. ``dense``: its logits, if
    another evaluator has computed them."""

    def __init__(
        self, source: SourceModel, input_ids: Tensor, batch_size: int = 4, dense: Sequence[Tensor] = ()
    ) -> None:
        self.source, self.input_ids, self.batch_size, self._dense = source, input_ids, batch_size, dense

    def dense(self) -> Sequence[Tensor]:
        """The dense logits (B, L, V) per batch."""
        self._dense = self._dense or [dense_logits(self.source, ids) for ids in self.input_ids.split(self.batch_size)]
        return self._dense

    def against(self, source: SourceModel) -> Evaluator:
        """The same of another model, still against the dense model of this one."""
        return Evaluator(source, self.input_ids, self.batch_size, self.dense())

    def __call__(self, result: SearchResult | None = None, places: Mapping[str, Any] | None = None) -> Divergence:
        """``result``: None reads all weights; ``places``: what its masks are put on, if not on the projections."""
        dense = self.dense()
        with MaskedModel(places or self.source.projections) as masked:
            thresholds = dict.fromkeys(masked.projections, 0.0) if result is None else result.apply_to(masked)
            return evaluate(self.source, masked, self.input_ids, thresholds, self.batch_size, dense)


def row(label: str, found: Divergence, seconds: float, result: SearchResult) -> dict[str, Any]:
    """One line of a table."""
    evaluations = result.details["kl_evaluations"]
    return {"recipe": label, **asdict(found), "seconds": round(seconds, 1), "kl_evaluations": evaluations}


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """The columns of the design's table."""
    lines = [
        "| recipe | KL | of uniform | perplexity | top-1 | realised sparsity | seconds | KL evaluations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    formats = {"kl": "{:.4f}", "of_uniform": "{:.3f}", "perplexity": "{:.3f}", "top1_agreement": "{:.3f}"}
    formats |= {"realised_sparsity": "{:.2%}", "seconds": "{:.0f}", "kl_evaluations": "{:.0f}"}
    for r in rows:
        cells = [form.format(r[key]) if r.get(key) is not None else "" for key, form in formats.items()]
        lines.append(f"| {r['recipe'].replace('|', chr(92) + '|')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Machine and versions, for the head of an output."""
    versions = {"wisparse": wisparse.__version__, "transformers": metadata.version("transformers")}
    return {**machine(device), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}


class Clock:
    """Seconds since the last `restart`, over stages that are timed apart from their evaluation."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._began: float | None = None

    def __enter__(self) -> Clock:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent += time.perf_counter() - (self._began or 0.0)
