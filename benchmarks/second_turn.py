"""What a chat's second turn waits for its first token, beside its first turn: the conversation is not read again.

Predicted: the positions that are read, over those of the first turn. What is read again is the answer (it was decoded
sparse), the new message, and up to a piece of the prompt before them. Every round is a conversation of its own, each
turn's first token is timed by the caller's clock; ratios are those of one round, the figure is their median.

    python benchmarks/second_turn.py BUNDLE --behind 1700
"""

from __future__ import annotations

import json
import os
import statistics
import time

import click
import torch

import wisparse


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False))
@click.option("--behind", default=1700, show_default=True, help="Tokens of the first turn's prompt.")
@click.option("--answer", default=40, show_default=True, help="Tokens of its answer.")
@click.option("--message", default=20, show_default=True, help="Tokens of the second turn's message.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--device", default="auto", show_default=True)
def main(bundle: str, behind: int, answer: int, message: int, rounds: int, device: str) -> None:
    """Print both times and their ratio, JSON last."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {"first_ms": [], "second_ms": [], "ratio": []}
    with wisparse.load(bundle, device=device, max_seq_len=behind + answer + message + 1) as model:

        def turn(tokens: list[int], count: int) -> tuple[float, wisparse.Generation]:
            began = time.perf_counter()
            stream = model.stream(tokens, max_new_tokens=count, stop=None)
            last = next(stream)
            seconds = time.perf_counter() - began
            last = list(stream)[-1] if count > 1 else last
            assert last.generation is not None
            return seconds, last.generation

        def random(count: int) -> list[int]:
            return torch.randint(3, model.config.vocab_size, (count,), generator=generator).tolist()

        turn(random(behind), 2)  # compiles
        for _ in range(rounds):
            prompt = random(behind)
            first, said = turn(prompt, answer)
            second, again = turn([*prompt, *said.token_ids, *random(message)], 1)
            read = again.prompt_tokens - again.cached_tokens
            for name, value in (("first_ms", first * 1e3), ("second_ms", second * 1e3), ("ratio", second / first)):
                found[name].append(value)
        about = {"backend": model.decoder.name, "device": str(model.decoder.device), "piece": model.decoder.piece}
    print(f"read again: {read} of {again.prompt_tokens} tokens; predicted {read / behind:.3f} of the first turn")
    figures = {name: round(statistics.median(values), 3) for name, values in found.items()}
    print(f"first token: {figures['first_ms']} ms, then {figures['second_ms']} ms: {figures['ratio']}")
    conditions = {"behind": behind, "answer": answer, "message": message, "rounds": rounds, "cores": os.cpu_count()}
    versions = {"torch": torch.__version__, "wisparse": wisparse.__version__}
    print(json.dumps({"bundle": bundle, **figures, "read": read, **about, **conditions, **versions}))


if __name__ == "__main__":
    main()
