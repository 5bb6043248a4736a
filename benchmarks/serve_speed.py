"""What HTTP costs: tokens a second of one stream, and of several at once, over ``wisparse serve`` and without it.

Predicted ceiling: the direct call's own speed. Both run in turns, so that a busy machine slows both; the ratio is the
median over the rounds, each of which is a fresh request of the same prompt.

    python benchmarks/serve_speed.py BUNDLE
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import click
import openai

import wisparse

PROMPT = "def mean(values):\n"


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False))
@click.option("--max-new-tokens", default=200, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--streams", default=4, show_default=True, help="Streams at once, beside the single one.")
def main(bundle: str, max_new_tokens: int, rounds: int, streams: int) -> None:
    """Print both speeds and their ratio, JSON last."""
    command = [sys.executable, "-m", "wisparse", "serve", bundle, "--port", "0", "--max-batch", str(streams)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        client = openai.OpenAI(base_url=address_of(server), api_key="none", max_retries=0)
        name = client.models.list().data[0].id
        results = {}
        with wisparse.load(bundle, max_batch=streams) as model:

            def direct(count: int) -> float:
                started = time.perf_counter()
                answers = model.generate([PROMPT] * count, max_new_tokens=max_new_tokens)
                return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started)

            def served(count: int) -> float:
                time.sleep(0.05)  # the direct call's threads spin on for some milliseconds
                started = time.perf_counter()
                tokens = [0] * count

                def read(index: int) -> None:
                    stream = client.completions.create(
                        model=name, prompt=PROMPT, max_tokens=max_new_tokens, temperature=0, stream=True,
                        stream_options={"include_usage": True},
                    )  # fmt: skip
                    for chunk in stream:
                        if chunk.usage is not None:
                            tokens[index] = chunk.usage.completion_tokens

                readers = [threading.Thread(target=read, args=(index,)) for index in range(count)]
                for reader in readers:
                    reader.start()
                for reader in readers:
                    reader.join()
                return sum(tokens) / (time.perf_counter() - started)

            for count in (1, streams):
                results[str(count)] = _compare(direct, served, count, rounds)
                print(f"{count} at once: {json.dumps(results[str(count)])}")
    finally:
        server.terminate()
        server.wait(60)
        if server.stderr is not None:
            server.stderr.close()
    machine = {"cores": os.cpu_count(), "processor": platform.processor(), "wisparse": wisparse.__version__}
    print(json.dumps({"bundle": bundle, "max_new_tokens": max_new_tokens, "streams": results, **machine}))


def _compare(
    direct: Callable[[int], float], served: Callable[[int], float], count: int, rounds: int
) -> dict[str, float]:
    direct(count), served(count)
    pairs = [(direct(count), served(count)) for _ in range(rounds)]
    return {
        "direct_tok_per_s": round(statistics.median(one for one, _ in pairs), 1),
        "served_tok_per_s": round(statistics.median(other for _, other in pairs), 1),
        "served_over_direct": round(statistics.median(other / one for one, other in pairs), 3),
    }


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None  # it was asked for
    for line in server.stderr:
        if line.startswith("serving "):
            return next(word for word in line.split() if word.startswith("http://"))
    raise click.ClickException("the server did not start; start it by hand to see why")


if __name__ == "__main__":
    main()
