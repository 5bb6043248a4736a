"""Bundles with thresholds that really drop half of the channels, a scheduler run to its end, and made-up drafts."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import make_checkpoint
from tiny_bundle import tiny_recipe

from wisparse.converter.config import full_config
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.manifest import CalibrationRecord
from wisparse.formats.write import write_bundle
from wisparse.runtime import memory
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.decoding import cache
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import Drafter


@torch.inference_mode()
def make_bundle(source: Path, out: Path, *sparsities: float) -> Path:
    """A bundle with random channel scales and the thresholds that drop as many of the channels.

    ``sparsities``: of the levels, ascending, the last one the default; without them one of 0.5."""
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(source, complete=full_config)
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    sparsities = sparsities or (0.5,)
    levels: dict[float, dict[str, ProjectionMask]] = {sparsity: {} for sparsity in sparsities}
    projections = list(checkpoint.config.projections())

    def random_scale(width: int) -> torch.Tensor:
        return torch.exp(0.3 * torch.randn(width, generator=generator))

    scales = [{p.name: random_scale(p.in_features) for p in projections} for _ in sparsities]

    def record(name: str, module: Any, args: Any) -> None:
        # The last projection stays dense: a bundle may hold such.
        dense = name == projections[-1].name
        for scale, (sparsity, masks) in zip(scales, levels.items(), strict=True):
            score = (args[0][0, 4:].abs() * scale[name]).flatten()
            threshold = 0.0 if dense else float(torch.quantile(score, sparsity))
            masks[name] = ProjectionMask(scale[name], threshold, 0.0 if dense else sparsity)

    for projection in projections:
        if projection.experts:  # dense: transformers has no modules of single experts
            for masks in levels.values():
                masks[projection.name] = ProjectionMask(
                    torch.ones(projection.experts, projection.in_features), 0.0, 0.0
                )
            continue
        model.get_submodule(projection.name).register_forward_pre_hook(partial(record, projection.name))
    tokens = torch.randint(3, checkpoint.config.vocab_size, (1, 48), generator=generator)
    model(tokens, use_cache=False)
    levels = {sparsity: {p.name: masks[p.name] for p in projections} for sparsity, masks in levels.items()}
    said = {"default": sparsities[-1], "calibration": CalibrationRecord("self", 1, 48, 48, 0, "0" * 64), "search": {}}
    recipe = tiny_recipe(checkpoint.config, levels, base_model="org/source", **said)
    return write_bundle(checkpoint, recipe, levels, out)


def cpu_decoder(bundle: Bundle, backend: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Decoder:
    return make_decoder(bundle, device=torch.device("cpu"), dtype=dtype, backend=backend, **settings)


def small_chunks(bundle: Bundle, backend: str = "torch", max_batch: int = 1, **settings: Any) -> Decoder:
    """One that reads prompts, and keeps what it has read, in pieces of eight positions."""
    decoder = cpu_decoder(bundle, backend, max_seq_len=64, max_batch=max_batch, **settings)
    decoder.prefill_chunk = decoder.prefix_block_size = 8
    return decoder


def run(scheduler: Scheduler, request: Request | None = None) -> Any:
    """Step until nothing is left; ``request`` is queued first, and given back."""
    if request is not None:
        scheduler.add(request)
    while scheduler.busy:
        generate_step(scheduler)
    return request


class VariantBundles(dict[str, Bundle]):
    """Models of ``runtime_models`` by name, with levels of 30 and 60%, made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Bundle:
        source = make_checkpoint(name, self.folder / f"{name}-source")
        bundle = self[name] = Bundle.open(make_bundle(source, self.folder / name, 0.3, 0.6))
        return bundle


def scarce(bundle: Bundle, backend: str, patch: pytest.MonkeyPatch, max_batch: int = 3, **settings: Any) -> Decoder:
    """`small_chunks` with memory for one sequence alone, in pages of eight positions that hold no numbers before they
    are written, nor again when they are given back."""
    patch.setattr(memory, "PAGE_POSITIONS", 8)
    patch.setattr(cache, "_discard", lambda x: x.view(torch.uint8).fill_(0xFF))
    paging = memory.paging_of(bundle.config, settings.get("dtype", torch.float32), "auto", None)
    states = memory.state_bytes(bundle.config, settings.get("dtype", torch.float32))
    size = paging.pages(64) * paging.page_bytes + (max_batch + 5) * states
    settings |= {"state_checkpoints": 5}
    decoder = small_chunks(bundle, backend, max_batch, kv_cache_memory_bytes=size, **settings)
    for slot in range(max_batch):
        assert decoder.cache.grow(slot, 1)
        decoder.cache.release(slot)
    return decoder


class PoisonedPages(cache.Pages):
    """Pages hold no numbers before they are written, nor again when they are given back."""

    page_bytes = 256

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        self.mapped = torch.zeros(size // self.page_bytes, dtype=torch.bool)
        self._bytes.fill_(0xFF)  # NaN in every floating type

    def map(self, ranges: Sequence[tuple[int, int]]) -> bool:
        self._mark(ranges, True)
        return super().map(ranges)

    def unmap(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._mark(ranges, False)

    def _mark(self, ranges: Sequence[tuple[int, int]], mapped: bool) -> None:
        for offset, count in ranges:
            first, rest = divmod(offset, self.page_bytes)
            assert rest == 0
            assert (self.mapped[first : first + count] != mapped).all()
            self.mapped[first : first + count] = mapped
            self._bytes[offset : offset + count * self.page_bytes] = 0xFF

    def check(self) -> None:
        """Nobody has written what is not mapped."""
        assert (self._bytes.view(-1, self.page_bytes)[~self.mapped] == 0xFF).all()


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Drafts(Drafter):
    """Drafts of a kind, of a sequence whose answer is known."""

    def __init__(self, kind: str, answers: dict[tuple[int, ...], list[int]], tokens: Sequence[int]) -> None:
        super().__init__(5, (0.0, 0.0))
        prompt = next(one for one in answers if tuple(tokens[: len(one)]) == one)
        self.kind, self.answer, self.done = kind, answers[prompt], len(tokens) - len(prompt)
        self.random = random.Random(0)

    def propose(self, most: int) -> list[int]:
        right = self.answer[self.done : self.done + min(most, 5)]
        if self.kind == "hostile":
            return [(token + 1) % 100 for token in right]
        return [one if self.kind == "perfect" or self.random.random() < 0.7 else 7 for one in right]

    def take(self, token: int) -> None:
        self.done += 1
