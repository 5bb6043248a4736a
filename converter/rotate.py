"""A rotated copy of a model, to be converted in its place: read, find the directions, write, compare.

The copy is an ordinary checkpoint that says the same as the source but for rounding; `rotate` measures by how much. It
is written one tensor at a time, whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.guard.folder import Kind, check_target, replaced_folder, write_file
from wisparse.formats.guard.safe_json import dump_json
from wisparse.formats.guard.safetensors_header import build_header
from wisparse.formats.hub import fetch_source
from wisparse.formats.weights.checkpoint import INDEX, Checkpoint
from wisparse.formats.write import copied_files

from .bench.divergence import kl_rows
from .model.rotation import check_rotatable, find_rotation, rotated_tensors
from .model.source import SourceModel, load_source
from .text.calibration import load_calibration
from .work.progress import Progress

__all__ = ["Rotated", "rotate"]

_MANIFEST = "wisparse_rotation.json"
# A rotated copy is never replaced: nothing says of one that it is finished and whose.
_ROTATED = Kind("a rotated model", "rotation", _MANIFEST, lambda folder: None)

_SHARD_BYTES = 5 * 10**9
# Sequences of a forward pass.
_BATCH = 4


@dataclass(frozen=True)
class Rotated:
    """Attributes:
    folder: where the copy lies.
    kl: KL(source || copy), nats a token, both in the computation's type, over ``num_tokens``: what rounding costs.
    """

    folder: Path
    kl: float
    num_tokens: int


def rotate(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: str | Sequence[str] = "self",
    num_samples: int = 16,
    seq_len: int = 512,
    seed: int = 2,
    device: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> Rotated:
    """Write a rotated copy of ``model`` to the new folder ``out``.

    Args:
        model: a folder or a Hub id.
        calibration, num_samples, seq_len, seed: the text whose directions count, as for a conversion; not the very text
            that the conversion will take, which fits these directions better than any other and would make thresholds
            too low for the rest.

    Raises:
        UsageError: ``out`` exists, or ``seq_len`` is beyond the context.
        UnsupportedModelError: a family whose norms tie the hidden state to its coordinates.
        CalibrationError, AccessError, ResourceError: as for a conversion.
    """
    progress = progress or Progress(enabled=False)
    target = Path(os.path.abspath(out))
    if not str(target).isprintable():
        raise UsageError(f"{target}: expected a folder name of printable letters, which transformers can read from")
    check_target(target, _ROTATED, False)
    found = fetch_source(model, revision)
    checkpoint = Checkpoint.open(found.folder)
    if checkpoint.quantised:
        raise UnsupportedModelError(
            f"{found.name}: the model is quantised, and turned weights would have to be rounded anew; rotate the "
            "unquantised model, and convert that with --weights"
        )
    check_rotatable(checkpoint)
    if not 2 <= seq_len <= checkpoint.config.max_position_embeddings:
        raise UsageError(
            f"--seq-len {seq_len}: expected 2 to {checkpoint.config.max_position_embeddings}, the model's context"
        )
    copied = dict(copied_files(found.folder, UnsupportedModelError))
    source = load_source(found.folder, device=device)
    tokens = load_calibration(calibration, source.tokenizer, source.model, num_samples, seq_len, seed, progress)
    ids, keep = tokens.input_ids, tokens.keep
    with progress.stage("Principal directions", -(-len(ids) // _BATCH)) as stage:
        rotation = find_rotation(source, checkpoint, ids, keep, batch_size=_BATCH, advance=stage.advance)
    made = rotated_tensors(checkpoint, rotation, source.device)
    dense = _log_probs(source, ids[:1])
    where = source.device
    del source

    def nbytes(name: str) -> int:
        return checkpoint.tensors[name if name in checkpoint.tensors else "model.embed_tokens.weight"].nbytes

    shards: list[list[str]] = [[]]
    for name in made:
        if shards[-1] and sum(map(nbytes, [*shards[-1], name])) > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    config = {**checkpoint.config_dict, "tie_word_embeddings": False}
    facts = {"source": str(model), "calibration": tokens.source, "seed": seed, "digest": tokens.digest}
    names = [*files, INDEX, *copied, "config.json", _MANIFEST]
    with replaced_folder(target, _ROTATED, names) as partial, progress.stage("Rotating", len(made)) as stage:
        for file, members in zip(files, shards, strict=True):
            _write_shard(partial / file, members, made, checkpoint, stage)
        weight_map = {name: file for file, members in zip(files, shards, strict=True) for name in members}
        total = sum(map(nbytes, made))
        write_file(partial / INDEX, dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}))
        for name, content in copied.items():
            write_file(partial / name, content)
        write_file(partial / _MANIFEST, json.dumps(facts, indent=1).encode())
        write_file(partial / "config.json", dump_json(config))
    copy = _log_probs(load_source(target, device=str(where)), ids[:1])
    return Rotated(target, float(kl_rows(dense, copy).double().mean()), ids.shape[1])


@torch.no_grad()
def _log_probs(source: SourceModel, ids: Tensor) -> Tensor:
    """Of one sequence, (L, V) float32 on the CPU."""
    logits: Tensor = source.model(input_ids=ids.to(source.device), use_cache=False).logits[0]
    return logits.float().log_softmax(-1).cpu()


def _write_shard(file: Path, names: list[str], made: Any, checkpoint: Checkpoint, stage: Any) -> None:
    """One file of weights; every tensor is made, written and forgotten in turn."""
    infos = [checkpoint.tensors[n if n in checkpoint.tensors else "model.embed_tokens.weight"] for n in names]
    header, _ = build_header({n: (i.dtype, i.shape) for n, i in zip(names, infos, strict=True)}, {"format": "pt"})
    with open(file, "xb") as sink:
        sink.write(header)
        for name in names:
            tensor = made[name]()
            if not bool(tensor.isfinite().all()):
                raise UnsupportedModelError(f"{name}: rotated, it holds values beyond {tensor.dtype}'s range")
            sink.write(tensor.view(torch.uint8).numpy().data)
            stage.advance()
