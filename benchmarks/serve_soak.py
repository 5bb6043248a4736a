"""A server under requests of random kinds: what it answers wrongly or loses, and whether its memory grows.

Each of ``--clients`` threads sends one request after another over a raw socket: a whole answer, a stream, one cancelled
in the middle, a malformed body, a slow reader, a client that goes before it has sent everything. Whole answers and
streams are compared with the direct call's; a refusal other than the expected one, a timeout and a missing answer are
failures.

    python benchmarks/serve_soak.py BUNDLE --requests 10000
"""

from __future__ import annotations

import collections
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import click
import psutil
from serve_speed import address_of

import wisparse

PROMPTS = ["def mean(values):\n", "import os", "class A:", "x = [", "# ", "for i in range(10):\n    ", "return", "try:"]
LENGTHS = (1, 4, 16, 40)
KINDS = ("whole", "stream", "slow", "cancelled", "malformed", "disconnected")
MALFORMED = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "a", "n": 0}',
    b"\xff",
    b'{"prompt": "a", "temperature": "hot"}',
)
SECONDS = 120.0


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False))
@click.option("--requests", default=10_000, show_default=True)
@click.option("--clients", default=32, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(bundle: str, requests: int, clients: int, seed: int) -> None:
    """Print counts of each kind, failures, and the server's memory, JSON last."""
    with wisparse.load(bundle) as model:
        expected = {
            (p, n): model.generate(p, max_new_tokens=n, chat_template=False).text for p in PROMPTS for n in LENGTHS
        }
    command = [sys.executable, "-m", "wisparse", "serve", bundle, "--port", "0", "--max-batch", "4"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = int(address_of(server).split(":")[2].partition("/")[0])
        found = soak(port, expected, requests, clients, seed, lambda: psutil.Process(server.pid).memory_info().rss)
    finally:
        server.terminate()
        code = server.wait(90)
    machine = {"cores": os.cpu_count(), "wisparse": wisparse.__version__}
    print(json.dumps({"bundle": os.path.basename(bundle), **found, "exit_code": code, **machine}))


def soak(
    port: int, expected: dict[tuple[str, int], str], requests: int, clients: int, seed: int, memory: Callable[[], int]
) -> dict[str, object]:
    """Send them all; ``expected`` has each prompt's greedy text at each length, ``memory`` the server's bytes."""
    lock = threading.Lock()
    kinds: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    after: dict[int, int] = {}
    started = time.perf_counter()

    def client(first: int) -> None:
        for number in range(first, requests, clients):
            dice = random.Random(f"{seed} {number}")
            kind, key = dice.choice(KINDS), dice.choice(list(expected))
            try:
                wrong = _one(port, kind, key, expected[key], dice)
            except OSError as error:
                wrong = f"lost: {error!r}"
            with lock:
                kinds[kind] += 1
                if wrong is not None:
                    failures.append(f"request {number}, {kind}, {key}: {wrong}")
                done = kinds.total()
                if done in (min(1000, requests // 2), requests):
                    after[done] = memory()

    threads = [threading.Thread(target=client, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    growth = (max(after.items())[1] - min(after.items())[1]) / 1e6
    return {
        "requests": kinds.total(), "clients": clients, "kinds": dict(sorted(kinds.items())),
        "wrong_or_lost": len(failures), "failures": failures[:20], "seconds": round(seconds, 1),
        "measured_after": sorted(after), "memory_growth_mb": round(growth, 2),
    }  # fmt: skip


def _one(port: int, kind: str, key: tuple[str, int], text: str, dice: random.Random) -> str | None:
    """Send one request; what was wrong with its answer, if anything."""
    prompt, most = key
    stream = kind in ("stream", "slow", "cancelled")
    body = json.dumps({"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": stream}).encode()
    if kind == "malformed":
        body = dice.choice(MALFORMED)
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as one:
        sent = head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body
        if kind == "disconnected":
            one.sendall(sent[: dice.randrange(1, len(sent) + 1)])
            return None
        one.sendall(sent)
        if kind == "cancelled":
            one.recv(dice.randrange(1, 400))
            return None
        answer = bytearray()
        while piece := one.recv(64 if kind == "slow" else 65536):
            answer += piece
            if kind == "slow":
                time.sleep(0.002)
    return _wrong(bytes(answer), kind, text)


def _wrong(answer: bytes, kind: str, text: str) -> str | None:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if kind == "malformed":
        return None if status == [b"400"] else f"expected a 400, found {head[:80]!r}"
    if status == [b"429"]:
        return "refused: the queue is full"
    if status != [b"200"]:
        return f"expected a 200, found {head[:80]!r}"
    if kind == "whole":
        found = json.loads(body)["choices"][0]["text"]
    else:
        # The chunks of HTTP stand on lines of their own, between the events.
        lines = [line[6:] for line in body.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: ")]
        if not lines or lines[-1] != b"[DONE]":
            return "the stream has no end"
        found = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    return None if found == text else f"expected {text!r:.80}, found {found!r:.80}"


if __name__ == "__main__":
    main()
