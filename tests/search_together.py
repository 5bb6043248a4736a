"""Run by torchrun, see test_converter_processes.py: searches of a tiny model by several processes, each of which writes
what it found to OUT-<index>.json: search_together.py OUT"""

import json
import sys
from pathlib import Path

from tiny_source import tiny_source, tiny_tokens

from wisparse.converter.processes import joined
from wisparse.converter.search.search import SearchResult, SearchSettings, search

SEARCHES = {
    "refine": {"kl_tokens": 8 * 24, "batch_size": 3, "refine_steps": 2},
    "paper": {"num_generations": 2, "num_offspring": 5, "kl_tokens": 96},
}


def settings(kind: str) -> SearchSettings:
    return SearchSettings(search=kind, greedy_step=0.25, **SEARCHES[kind])


def flat(result: SearchResult) -> list:
    scales = {name: scale.tolist() for name, scale in result.channel_scales.items()}
    return json.loads(json.dumps([{n: vars(p) for n, p in result.projections.items()}, scales, result.details]))


def main() -> None:
    with joined("cpu") as (processes, _):
        source, tokens = tiny_source(), tiny_tokens(8)
        found = {kind: flat(search(source, tokens, settings(kind), processes=processes)) for kind in SEARCHES}
        Path(f"{sys.argv[1]}-{processes.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
