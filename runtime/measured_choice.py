"""The choice of a loaded model's level by its measured speeds, which are kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence

from wisparse.formats.folder import write_file
from wisparse.formats.machine import cache_folder

from .benchmark import Workload, machine, time_run
from .choice import Choice, Pair, choose, forecast_pairs, rows_of
from .model import Model

log = logging.getLogger(__name__)

# Of the measurement, for each level: at least these rounds, and more for a second in all; seconds and steps of a round.
_ROUNDS, _MOST_ROUNDS, _SECONDS, _MOST_STEPS, _PROMPT = 3, 24, 0.06, 24, 5


def choose_level(model: Model, weights: str, given: str | None, supported: Sequence[str], max_kl: float) -> Choice:
    """Time the loaded model at its levels, or read what was measured before on this machine, choose, and set the level."""
    bundle, decoder = model.bundle, model.decoder
    rows = rows_of(bundle, given, supported)
    own = [row for row in rows if row.weights == weights]
    speeds = _speeds(model, weights, [row.sparsity for row in own])
    measured = [
        Pair(weights, row.sparsity, row.kl, speeds[row.sparsity], row.kl_stderr)
        for row in own
        if row.sparsity in speeds
    ]
    base = min(measured, key=lambda pair: pair.sparsity, default=None)
    others = [row for row in rows if row.weights != weights or row.sparsity not in speeds]
    found = choose([*measured, *forecast_pairs(bundle, decoder.dtype, others, base)], max_kl, bundle.recipe.graded)
    if found.pair.weights != weights:  # the forecast that chose the loaded type was wrong: the best of this type
        found = choose(measured, max_kl, bundle.recipe.graded)
    model.sparsity = found.pair.sparsity
    log.info("--max-kl %g: %s", max_kl, found)
    return found


def _speeds(model: Model, weights: str, levels: Sequence[float]) -> dict[float, float]:
    """Tokens per second by level of one request; empty if the context is too short to measure."""
    decoder, bundle = model.decoder, model.bundle
    steps = min(_MOST_STEPS, decoder.max_seq_len - _PROMPT - 1)
    if steps < 2:
        return {}
    kind = [
        machine(decoder.device),
        decoder.name,
        str(decoder.dtype),
        weights,
        decoder.kv_cache_dtype,
        decoder.max_batch,
    ]
    facts = json.dumps([*kind, dict(bundle.manifest.sha256)], sort_keys=True, default=str)
    key, path = hashlib.sha256(facts.encode()).hexdigest(), cache_folder() / "speeds.json"
    kept: dict[str, dict[str, float]] = {}
    try:
        kept = json.loads(path.read_text("utf-8"))
        found = {float(level): float(rate) for level, rate in kept.get(key, {}).items()}
        if {*levels} <= found.keys() and all(0 < rate < math.inf for rate in found.values()):
            return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s is ignored (%s); it is written anew", path, error)
        kept = {}
    found = model.engine.call(lambda: _time_levels(model, levels, steps))
    model.engine.call(model.engine.scheduler.start_over)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        newest = dict([*kept.items()][-99:]) | {key: {repr(level): rate for level, rate in found.items()}}
        write_file(path, json.dumps(newest).encode())
    except OSError as error:
        log.info("%s cannot be written: %s", path, error)
    return found


def _time_levels(model: Model, levels: Sequence[float], most_steps: int) -> dict[float, float]:
    # The fastest round of each level: other programs on the machine only add time.
    times: dict[float, list[float]] = {level: [] for level in levels}
    masks = {level: model.bundle.at(level).masks for level in levels}
    steps, began = 2, time.perf_counter()
    for count in range(2 + _MOST_ROUNDS):  # two rounds to warm up and to find the number of steps
        if count >= 2 + _ROUNDS and time.perf_counter() - began > 1:
            break
        for level in levels:
            model.decoder.set_masks(masks[level])
            seconds = time_run(model.decoder, Workload(_PROMPT, steps))[1] / steps
            if count > 1:
                times[level].append(seconds)
        if count == 1:
            steps = max(2, min(most_steps, round(_SECONDS / seconds)))
    return {level: 1 / min(seconds) for level, seconds in times.items()}
