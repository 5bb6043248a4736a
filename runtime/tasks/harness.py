"""The project's tasks as lm-evaluation-harness runs them; its YAML files name the functions here."""

from __future__ import annotations

from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from wisparse.runtime.tasks import generators


def _dataset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"test": datasets.Dataset.from_list(rows)}


def lines_dataset(**_: Any) -> dict[str, Any]:
    return _dataset([one._asdict() for one in generators.make_problems(generators.NUM_LINES, generators.SEED)])


def chains_dataset(**_: Any) -> dict[str, Any]:
    return _dataset([one._asdict() for one in generators.make_chains(generators.NUM_CHAINS, generators.SEED)])


def loops_dataset(**_: Any) -> dict[str, Any]:
    return _dataset([{"prompt": one} for one in generators.make_prompts(generators.NUM_LOOPS, generators.SEED)])


class ChainsTask(ConfigurableTask):
    """One document a program, one request for each of its lines; ``ctx`` is the session before the program."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config={key: value for key, value in (config or {}).items() if key != "class"})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        for unused in ("apply_chat_template", "chat_template"):
            kwargs.pop(unused, None)
        return [
            Instance("generate_until", doc, (ctx + question, dict(self.config.generation_kwargs)), idx=i, **kwargs)
            for i, question in enumerate(generators.Chain(**doc).questions())
        ]


def chains_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether all lines of a program are right, and what share of them."""
    right = [given == wanted for given, wanted in zip(results, doc["answers"], strict=True)]
    return {"exact_match": float(all(right)), "lines": sum(right) / len(right)}


def loops_results(_: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"loops": float(generators.loops(results[0]))}
