"""How many short greedy answers change, over the KL of a bundle's quality table: what a verdict's range is taken from.

    python benchmarks/answers.py CHAT_BUNDLE --questions --output answers.json
    python benchmarks/answers.py CODE_BUNDLE...          # continue the heads of standard-library functions

For each weight type and level of the table: the answers of at most 32 tokens that differ anywhere from those of the
stored weights without masks, and the tokens before the first difference. Results are merged into ``--output``.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
from pathlib import Path

import wisparse
from wisparse.formats.bundle import Bundle

QUESTIONS = (
    "What is {}?", "Explain {} in one sentence.", "Name three facts about {}.", "Who would care about {}, and why?",
    "Give an example of {}.", "What do people often get wrong about {}?", "Write a title for an essay on {}.",
    "Which word describes {} best?", "Describe {} to a child.", "What came before {}?",
)  # fmt: skip
SUBJECTS = (
    "gravity", "a volcano", "inflation", "the moon", "an algorithm", "sleep", "a vaccine", "music", "a prime number",
    "the internet", "coffee", "democracy", "electricity", "chess", "the Roman Empire", "a haiku", "a river", "bread",
    "a contract", "photosynthesis",
)  # fmt: skip


def questions(count: int) -> list[list[dict[str, str]]]:
    texts = (question.format(subject) for subject in SUBJECTS for question in QUESTIONS)
    return [[{"role": "user", "content": text}] for text in texts][:count]


def function_heads(count: int) -> list[str]:
    """The lines before and the first lines of functions of the standard library, evenly over its files."""
    heads = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = path.read_text("utf-8")
        lines = text.splitlines(keepends=True)
        found = [node.lineno for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        heads += ["".join(lines[max(0, at - 12) : at + 2]) for at in found[:3]]
    return heads[:: max(1, len(heads) // count)][:count]


def answers(bundle: Path, prompts: list, tokens: int, **options: object) -> list[list[int]]:
    with wisparse.load(bundle, max_batch=16, **options) as model:
        return [one.token_ids for one in model.generate(prompts, max_new_tokens=tokens, temperature=0)]


def equal_tokens(a: list[int], b: list[int]) -> int:
    """The tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--questions", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=Path("answers.json"))
    options = parser.parse_args()
    prompts = questions(options.count) if options.questions else function_heads(options.count)
    for bundle in options.bundles:
        opened = Bundle.open(bundle)
        assert opened.recipe.quality is not None
        rows, reference = [], None
        for row in opened.recipe.quality.rows:
            given = {"weights": row.weights, "sparsity": row.sparsity, "device": options.device}
            try:
                found = answers(bundle, prompts, options.tokens, **given)
            except wisparse.UsageError as error:  # a weight type that this back end lacks
                print(error)
                continue
            if reference is None:  # the first row is of the stored weights without masks
                reference = found
                continue
            pairs = list(zip(reference, found, strict=True))
            changed = sum(a != b for a, b in pairs) / len(pairs)
            same = sum(equal_tokens(*pair) for pair in pairs) / len(pairs)
            error = math.sqrt(changed * (1 - changed) / len(pairs))
            rows.append({"weights": row.weights, "sparsity": row.sparsity, "kl": row.kl, "kl_stderr": row.kl_stderr,
                         "changed": changed, "changed_stderr": error, "tokens_before": same})  # fmt: skip
            print(f"{row.weights:6} {row.sparsity:4.0%} KL {row.kl:7.4f}  changed {changed:.0%} ± {error:.0%}, "
                  f"{same:.1f} tokens before", flush=True)  # fmt: skip
        results = json.loads(options.output.read_text()) if options.output.exists() else {}
        facts = {"base_model": opened.recipe.base_model, "answers": len(prompts), "tokens": options.tokens}
        results[bundle.name] = {**facts, "text of the KL": opened.recipe.quality.text, "rows": rows}
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
