"""``wisparse eval --reference A --model B``: any two models on the same tokens."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from wisparse.converter.calibration import CalibrationTokens, load_calibration
from wisparse.converter.divergence import Divergence, Estimate, LogitsCache, divergence
from wisparse.converter.evaluation import dense_logits, next_tokens, rounded, token_figures
from wisparse.converter.gguf_source import gguf_weights, open_checkpoint, open_source
from wisparse.converter.processes import Progress
from wisparse.converter.report import note_on
from wisparse.converter.source import SourceModel, choose_dtype, load_source, weight_digests
from wisparse.converter.tokenizer import differing_text, load_tokenizer
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.hub import Source
from wisparse.formats.machine import choose_device
from wisparse.formats.manifest import MANIFEST, level_name
from wisparse.formats.weight_types import sparse_from

from .options import backend_of, print_rows, print_table, with_error

_log = logging.getLogger("wisparse")

_FLOOR_TOKENS = 2048  # that the noise floor is measured on, at most
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """A Hugging Face folder, a GGUF file, a bundle, or a Hub id of one of these."""

    name: str
    source: Source

    @classmethod
    def open(cls, name: str) -> Place:
        return cls(name, open_source(name, None, None))

    @property
    def is_bundle(self) -> bool:
        return os.path.lexists(self.source.folder / MANIFEST)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        folder = self.source.folder
        return Checkpoint.open(folder, error=BundleError) if self.is_bundle else open_checkpoint(self.source)

    def dense(self, dtype: torch.dtype, device: torch.device) -> SourceModel:
        """The model in transformers; a bundle's without its masks."""
        how: dict[str, Any] = {"bundle": True} if self.is_bundle else {"weights": gguf_weights(self.source)}
        return load_source(self.source.folder, dtype, device, **how)


@dataclass(frozen=True)
class Against:
    """A model against the reference. ``floor``: KL of the model without masks and in its own weight type, in the arithmetic
    that it was evaluated in, against float32; None: it was evaluated in float32."""

    model: str
    how: str
    divergence: Divergence
    floor: Divergence | None

    def to_dict(self) -> dict[str, Any]:
        floor = None if self.floor is None else self.floor.to_dict()
        return {"model": self.model, "how": self.how, **self.divergence.to_dict(), "noise_floor": floor}


def read_tokens(
    texts: Sequence[str], folder: Path, model: Callable[[], SourceModel], size: tuple[int, int, int], progress: Progress
) -> CalibrationTokens:
    """Tokens of ``texts``, or with ``self`` alone those that ``model`` writes. ``size``: num_samples, seq_len, seed."""
    if list(texts) != ["self"]:
        return load_calibration(texts, load_tokenizer(folder), None, *size, progress)
    source = model()
    return load_calibration("self", source.tokenizer, source.model, *size, progress)


def compare(
    reference: str,
    models: Sequence[str],
    texts: Sequence[str],
    size: tuple[int, int, int],
    prefill: str,
    options: Mapping[str, Any],
    progress: Progress,
) -> tuple[CalibrationTokens, list[Against]]:
    """Each of ``models`` against ``reference``, which is computed in float32, a bundle with masks off. ``size``: num_samples,
    seq_len, seed of the text; ``options``: `load`'s, of which other models than bundles take ``device`` and ``dtype``."""
    device = choose_device(options["device"])
    first, others = Place.open(reference), [Place.open(model) for model in models]
    for other in others:
        _require_same_vocabulary(first, other)
    limit = min(one.checkpoint.config.max_position_embeddings for one in (first, *others))
    if size[1] > limit:
        raise UsageError(f"--seq-len: expected at most the models' context, {limit} tokens, found {size[1]}")
    if not any(other.is_bundle for other in others):
        for name in ("sparsity", "bits", "weights", "kv_cache_dtype", "backend", "max_seq_len"):
            if options[name] not in (None, "auto", "native"):
                raise UsageError(f"--{name.replace('_', '-')}: expected a bundle as --model, found none")
    loaded: list[SourceModel] = []  # the reference, once it is needed

    def dense_reference() -> SourceModel:
        if not loaded:
            with progress.stage(f"Loading {first.name}"):
                loaded.append(first.dense(torch.float32, device))
        return loaded[0]

    tokens = read_tokens(texts, first.source.folder, dense_reference, size, progress)
    with progress.stage("Reading the reference's weights"):
        digests = weight_digests(first.checkpoint)
    key = [digests, first.checkpoint.config_dict, device.type, version("torch"), version("transformers")]
    vocabulary = first.checkpoint.config.vocab_size
    cache = LogitsCache(hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest(), vocabulary)
    keeps = cache.holds(tokens.input_ids.numel())

    def reference_logits(ids: Tensor) -> Tensor:
        found = cache.read(ids) if keeps else None
        if found is None:
            found = rounded(dense_logits(dense_reference(), ids))
            if keeps:
                cache.write(ids, found)
        return found

    if keeps:
        with progress.stage("Reference", len(tokens.input_ids)) as stage:
            for ids in tokens.input_ids:
                reference_logits(ids)
                stage.advance()
        loaded.clear()  # frees its memory for the models
    results = []
    for other in others:
        with running(other, prefill, size[1], device, options) as (logits, how):
            found = _diverge(reference_logits, logits, tokens.input_ids, progress, f"Evaluating {other.name}")
        results.append(Against(other.name, how, found, _floor(other, tokens.input_ids, device, options, progress)))
    return tokens, results


@contextmanager
def running(
    place: Place, prefill: str, seq_len: int, device: torch.device, options: Mapping[str, Any]
) -> Iterator[tuple[Forward, str]]:
    """A model's logits of a sequence, and how it runs: a bundle in the runtime with ``options``, others in transformers."""
    if not place.is_bundle:
        dtype = _transformers_dtype(place, device, options)
        yield (
            partial(dense_logits, place.dense(dtype, device)),
            f"transformers on {device}, {str(dtype).removeprefix('torch.')}",
        )
        return
    from wisparse.runtime.backends import load

    chosen = {name: value for name, value in options.items() if name not in ("bits", "revision")}
    bundle = Bundle.open(place.source.folder).chosen(options["sparsity"], options["bits"])
    chosen |= {"sparsity": bundle.sparsity, "max_seq_len": options["max_seq_len"] or seq_len}
    with load(bundle, **chosen) as model:
        weights = "" if options["weights"] == "native" else f", {options['weights']} weights"
        level = level_name(model.sparsity, bundle.recipe.graded) if model.sparsity else "masks off"
        logits = model.decoder.logits
        yield (
            lambda ids: logits(ids, sparse_from(prefill, len(ids))),
            f"{level}{f', {prefill} of each text sparse' if prefill != 'all' else ''}{weights}; {backend_of(model)}",
        )


def _transformers_dtype(place: Place, device: torch.device, options: Mapping[str, Any]) -> torch.dtype:
    named = options["dtype"]
    return choose_dtype(place.checkpoint.config.dtype, device) if named == "auto" else getattr(torch, named)


def _diverge(reference: Forward, logits: Forward, texts: Tensor, progress: Progress, what: str) -> Divergence:
    figures = []
    with progress.stage(what, len(texts)) as stage:
        for ids in texts:
            figures.append(token_figures(reference(ids), logits(ids), next_tokens(ids)))
            for column, whose in ((2, "the reference's"), (0, "the model's")):
                if wrong := int(figures[-1][:, column].isnan().sum()):
                    found = f"found NaN or infinity at {wrong} of {len(ids)} tokens"
                    advice = "the weights are damaged, or overflow in this type: see --dtype"
                    raise UsageError(f"{what}: expected {whose} logits to be numbers, {found}; {advice}")
            stage.advance()
    return divergence(figures)


def _floor(
    place: Place, texts: Tensor, device: torch.device, options: Mapping[str, Any], progress: Progress
) -> Divergence | None:
    texts = texts[: max(1, _FLOOR_TOKENS // texts.shape[1])]
    plain = {**options, "sparsity": 0.0, "bits": None, "weights": "native", "kv_cache_dtype": "auto"}
    if not place.is_bundle and _transformers_dtype(place, device, options) == torch.float32:
        return None
    what = f"Noise floor of {place.name}"
    with running(place, "dense", texts.shape[1], device, plain) as (logits, _):
        kept = [rounded(logits(ids)) for ids in texts]
    known = {ids.numpy().tobytes(): one for ids, one in zip(texts, kept, strict=True)}
    exact = partial(dense_logits, place.dense(torch.float32, device))
    return _diverge(exact, lambda ids: known[ids.numpy().tobytes()], texts, progress, what)


def _require_same_vocabulary(first: Place, other: Place) -> None:
    """UsageError unless a token id means the same in both; a warning if their tokenizers cut text differently."""
    sizes = [one.checkpoint.config.vocab_size for one in (first, other)]
    if sizes[0] != sizes[1]:
        wrong = f"expected the vocabulary of {first.name}, {sizes[0]:,} tokens, found {sizes[1]:,} in {other.name}"
        raise UsageError(f"--model: {wrong}; the KL is over the same tokens: compare models of one family")
    tokenizers = [load_tokenizer(one.source.folder) for one in (first, other)]
    names, found = ({index: name for name, index in one.get_vocab().items()} for one in tokenizers)
    differ = [index for index in names.keys() & found.keys() if names[index] != found[index]]
    if differ:
        index = min(differ)
        example = f"token {index} is {names[index]!r:.60} in {first.name} and {found[index]!r:.60} in {other.name}"
        raise UsageError(
            f"--model: expected the reference's tokenizer, found another: {example}; compare models of one family"
        )
    text = differing_text(other.source.folder, tokenizers[0].encode)
    if text is not None:
        _log.warning(
            "%s cuts text into other tokens than %s, such as %r; all models get %s's tokens",
            other.name,
            first.name,
            text[:60],
            first.name,
        )


def print_comparison(reference: str, tokens: CalibrationTokens, results: Sequence[Against]) -> None:
    def shown(value: Estimate, form: str) -> str:
        return with_error(value.mean, value.stderr, form)

    text = f"{tokens.num_samples} x {tokens.seq_len} tokens of {tokens.source}, seed {tokens.seed}"
    for one in results:
        found = one.divergence
        floor = "0: the model is computed in float32, as the reference"
        if one.floor is not None:
            floor = f"{shown(one.floor.kl, '.5f')}: the model's arithmetic alone, {one.floor.num_tokens:,} tokens"
        quantiles = ", ".join(f"{name} {value:.4f}" for name, value in found.kl_quantiles.items())
        lost, gained = shown(found.flips_lost, ".2%"), shown(found.flips_gained, ".2%")
        ratio = shown(found.perplexity_ratio, ".4f")
        perplexity = f"{found.reference_perplexity:.3f} -> {found.perplexity:.3f}, ratio {ratio}"
        rows = [
            ("model", f"{one.model} ({one.how})"),
            ("reference", f"{reference} (float32)"),
            ("KL", f"{shown(found.kl, '.5f')} nats/token"),
            ("noise floor", floor),
            ("KL by token", quantiles),
            ("top-1 agreement", shown(found.top1_agreement, ".2%")),
            ("flips", f"{lost} of the text's tokens are no longer the most likely, {gained} newly are"),
            ("probability", f"of the text's tokens changes by {shown(found.probability_rms, '.2%')} (RMS)"),
            ("perplexity", perplexity),
            ("note", note_on(found.num_tokens, found.kl.mean, found.perplexity_ratio.mean - 1)),
        ]
        print_rows(text, rows)
        lines = [
            (
                f"{bucket.low:.0%} to {bucket.high:.0%}",
                f"{bucket.num_tokens:,}",
                shown(bucket.kl, ".5f"),
                shown(bucket.top1_agreement, ".2%"),
            )
            for bucket in found.buckets
        ]
        heads = ("reference's confidence", "tokens", "KL, nats/token", "top-1 agreement")
        print_table(heads, lines, note="confidence: the probability of its most likely token; ± is a standard error")
        click.echo()
