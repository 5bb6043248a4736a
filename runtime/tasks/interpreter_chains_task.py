"""Interpreter chains as lm-evaluation-harness runs them: one document a program, one request for each of its lines."""

from __future__ import annotations

from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from wisparse.runtime.tasks.interpreter_chains import COUNT, SEED, Chain, make_chains


def custom_dataset(**_: Any) -> dict[str, Any]:
    """The chains as a data set with one split, ``test``."""
    return {"test": datasets.Dataset.from_list([chain._asdict() for chain in make_chains(COUNT, SEED)])}


class ChainsTask(ConfigurableTask):
    """A document's requests are its lines; ``exact_match`` is of whole programs, ``lines`` of lines."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config={key: value for key, value in (config or {}).items() if key != "class"})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """One request a line; ``ctx`` is the session before the program."""
        for unused in ("apply_chat_template", "chat_template"):
            kwargs.pop(unused, None)
        settings = self.config.generation_kwargs
        return [
            Instance(
                request_type="generate_until", doc=doc, arguments=(ctx + question, dict(settings)), idx=i, **kwargs
            )
            for i, question in enumerate(Chain(**doc).questions())
        ]


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether all of a document's lines are right, and what share of them."""
    right = [given == wanted for given, wanted in zip(results, doc["answers"], strict=True)]
    return {"exact_match": float(all(right)), "lines": sum(right) / len(right)}
