"""The pair of weight type and level that `--max-kl` takes, beside the fastest one found by timing all pairs.

    python benchmarks/chooser.py BUNDLE... --max-kl 0.01,0.05,0.2
    python benchmarks/chooser.py --shape llama-8b --device cuda    # 8 blocks of the shape, random weights, its table assumed

All pairs of the bundle's quality table that this machine runs are timed in turns, so that other load reaches all alike; a
pair's speed is that of its fastest of ``--rounds``, as other load only adds time. A choice is right if it has at least 0.95 of the fastest allowed pair's speed
and 0.99 of the dense model's of its weight type. The chooser measures anew: its remembered speeds
are deleted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.formats.machine import cache_folder
from wisparse.runtime.benchmark import Workload, machine, time_run


def time_pairs(bundle: Path, device: str, rounds: int, tokens: int) -> tuple[dict[tuple[str, float], float], Any]:
    """Tokens per second of one request by weight type and level, and the machine."""
    rows, models = Bundle.open(bundle).recipe.quality.rows, {}
    for kind in dict.fromkeys(row.weights for row in rows):
        try:
            models[kind] = wisparse.load(bundle, device=device, weights=kind, max_kl=None, max_seq_len=512)
        except wisparse.UsageError as error:  # a weight type that this back end lacks
            print(error)
    seconds: dict[tuple[str, float], list[float]] = {}
    for number in range(rounds + 1):
        for row in rows:
            if row.weights in models:
                model = models[row.weights]
                model.sparsity = row.sparsity
                spent = time_run(model.decoder, Workload(5, tokens))[1]
                if number:  # the first round warms up
                    seconds.setdefault((row.weights, row.sparsity), []).append(spent / tokens)
    facts = machine(next(iter(models.values())).decoder.device)
    for model in models.values():
        model.close()
    return {pair: 1 / min(each) for pair, each in seconds.items()}, facts


def shape_bundle(shape: str, blocks: int, work: Path) -> Path:
    """A bundle of random weights at 30, 40 and 50% with the KL that `wisparse advise` assumes."""
    from advise import SHAPES
    from cpu_models import calibrated_bundle, random_checkpoint

    from wisparse.advice import KL
    from wisparse.formats.manifest import QualityRow, QualityTable

    config = SHAPES[shape] | {"num_hidden_layers": blocks}
    rows = [QualityRow(kind, level, 8192, KL[kind][level][0], None, 0.9, 10.0) for kind in KL for level in KL[kind]]
    table = QualityTable("no text: assumed", 8192, 10.0, None, tuple(row for row in rows if row.weights != "int4"))
    source = random_checkpoint(config, work / f"{shape}-{blocks}")
    return calibrated_bundle(source, work / f"{shape}-{blocks}-levels", (0.3, 0.4, 0.5), quality=table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--shape")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--work-dir", type=Path, default=Path("bench-models"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-kl", default="0.01,0.05,0.2")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.shape:
        options.bundles.append(shape_bundle(options.shape, options.blocks, options.work_dir))
    results: dict[str, Any] = {}
    for bundle in options.bundles:
        speeds, facts = time_pairs(bundle, options.device, options.rounds, options.tokens)
        kl = {(row.weights, row.sparsity): row.kl for row in Bundle.open(bundle).recipe.quality.rows}
        print(", ".join(facts.values()))
        for (kind, level), speed in speeds.items():
            print(f"{bundle.name}  {kind:6} {level:4.0%}  KL {kl[kind, level]:.4f}  {speed:8.1f} tok/s")
        choices = []
        for limit in map(float, options.max_kl.split(",")):
            (cache_folder() / "speeds.json").unlink(missing_ok=True)
            with wisparse.load(bundle, device=options.device, max_kl=limit, max_seq_len=512) as model:
                pair = model.choice.pair
            chosen, best = (pair.weights, pair.sparsity), max((p for p in speeds if kl[p] <= limit), key=speeds.get)
            of_best, of_dense = speeds[chosen] / speeds[best], speeds[chosen] / speeds[pair.weights, 0.0]
            right = of_best >= 0.95 and of_dense >= 0.99
            names = [f"{kind} {level:.0%}" for kind, level in (chosen, best)]
            print(f"  --max-kl {limit:g}: {names[0]}, {of_best:.3f} of the best ({names[1]}), {of_dense:.3f} of dense: "
                  f"{'right' if right else 'WRONG'}")  # fmt: skip
            choices.append({"max_kl": limit, "chosen": names[0], "best": names[1], "of_best": of_best,
                            "of_dense": of_dense, "right": right})  # fmt: skip
        table = {f"{kind} {level:.0%}": speed for (kind, level), speed in speeds.items()}
        results[bundle.name] = {"machine": facts, "tok_per_s": table, "choices": choices}
    print(json.dumps(results))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
