"""A server under requests of random kinds: what it answers wrongly or loses, and whether its memory grows.

Each of ``--clients`` threads sends one request after another over a raw socket, at a random one of the bundle's levels
or dense. Answered: completions, whole and streamed; with a JSON schema, a regular expression, Lark and GBNF; with
``echo`` and ``logprobs``; Anthropic's messages, whole and streamed. Beside them slow readers, streams cancelled in the
middle, clients that go before they have sent everything, malformed bodies, and grammars that are too deep or too wide.
Every answer is compared with the direct call's at its level, log-probabilities too, and with its constraint; a refusal
other than the expected one, a timeout and a missing answer are failures. Last, one stream alone and beside one client that
sends failing schemas one after another, the same one or always others, in short turns, as a machine's speed drifts: the ratio
of its speed beside to that alone, with its standard error, must be 0.95.
Answers are compared on a CPU only: on a GPU the sums of a batch are rounded otherwise than those of one sequence.

    wisparse convert examples/pycode-llama-6m --sparsity 0.3,0.5 --calibration self -o BUNDLE
    python benchmarks/serve_soak.py BUNDLE --requests 10000 > results/serve-soak.json
"""

from __future__ import annotations

import collections
import http.client
import itertools
import json
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import psutil

import wisparse
from wisparse.runtime.decoding.sampling import SamplingParams

PROMPTS = ["def mean(values):\n", "import os", "class A:", "x = [", "# ", "for i in range(10):\n    ", "return", "try:"]
LENGTHS = (1, 4, 16, 40)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
# Of each constraint what asks the server for it and what the direct call, and what every answer matches.
_REGEX = "[0-9]{2,4}-[a-z]{1,3}"
_LARK = 'start: pair ("," pair){0,2}\npair: NAME "=" VALUE\nNAME: /[a-z]{1,4}/\nVALUE: /[1-9][0-9]{0,2}/'
_GBNF = 'root ::= item item?\nitem ::= "(" [a-z] ("+" [a-z])? ")"'
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
GUIDED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "schema": ({"response_format": _FORMAT}, {"json_schema": SCHEMA}, r'\{"name": *"(a|bc)", *"count": *\d{1,3}\}'),
    "regex": ({"grammar": f"start: /{_REGEX}/"}, {"grammar": f"start: /{_REGEX}/"}, _REGEX),
    "lark": ({"grammar": _LARK}, {"grammar": _LARK}, "[a-z]{1,4}=[1-9][0-9]{0,2}(,[a-z]{1,4}=[1-9][0-9]{0,2}){0,2}"),
    "gbnf": ({"grammar": _GBNF}, {"grammar": _GBNF}, r"(\([a-z](\+[a-z])?\)){1,2}"),
}
ANSWERED = ("completion", *GUIDED, "echo", "message")  # one half of them streamed, but for ``echo``
KINDS = (*ANSWERED, "slow", "cancelled", "disconnected", "malformed", "hostile")
MALFORMED = (
    b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b"\xff", b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "sparsity": 0.123}', b'{"prompt": "a", "grammar": "start: /(/"}',
)  # fmt: skip
SECONDS = 120.0
_TURN_SECONDS = 1.5
_PREEMPTIONS = "wisparse:num_preemptions_total"


@dataclass(frozen=True)
class Case:
    path: str
    body: dict[str, Any]
    text: str  # the direct call's
    logprobs: list[float] | None = None  # of the prompt's tokens but the first, and of the answer's
    pattern: str = "(?s:.*)"  # what the text matches


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False))
@click.option("--requests", default=10_000, show_default=True)
@click.option("--clients", default=32, show_default=True)
@click.option("--max-batch", default=4, show_default=True)
@click.option("--memory", type=int, help="Bytes of the server's cache; if they are few, requests go back to its queue.")
@click.option("--seed", default=0, show_default=True)
@click.option("--storm-rounds", default=24, show_default=True, help="Of the last stream: three turns of 1.5 seconds.")
def main(
    bundle: str, requests: int, clients: int, max_batch: int, memory: int | None, seed: int, storm_rounds: int
) -> None:
    """Print JSON: counts of each kind, failures, times of answers, and the server's memory after each tenth."""
    cases = direct_answers(bundle)
    command = [sys.executable, "-m", "wisparse", "serve", bundle, "--port", "0", "--max-batch", str(max_batch)]
    if memory is not None:
        command += ["--max-seq-len", "256", "--kv-cache-memory-bytes", str(memory)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = int(address_of(server).split(":")[2].partition("/")[0])
        # What it writes later is read too: a full pipe would hold it up.
        tracebacks: list[str] = []
        log = (line for line in server.stderr or () if line.startswith("Traceback"))
        threading.Thread(target=tracebacks.extend, args=[log], daemon=True).start()
        found = soak(port, cases, requests, clients, seed, lambda: psutil.Process(server.pid).memory_info().rss)
        found["bystander"] = bystander(port, storm_rounds)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            (line,) = (one for one in page.read().decode().splitlines() if one.startswith(_PREEMPTIONS))
        found |= {"preemptions": int(float(line.split()[1])), "cache_bytes": memory}
    finally:
        server.terminate()
        code = server.wait(90)
    machine = {"cores": os.cpu_count(), "wisparse": wisparse.__version__}
    found |= {"max_batch": max_batch, "exit_code": code, "tracebacks": len(tracebacks), **machine}
    print(json.dumps({"bundle": os.path.basename(bundle), **found}))


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None  # it was asked for
    for line in server.stderr:
        if line.startswith("serving "):
            return next(word for word in line.split() if word.startswith("http://"))
    raise click.ClickException("the server did not start; start it by hand to see why")


def direct_answers(bundle: str) -> dict[str, list[Case]]:
    """The cases of each answered kind, with what the direct call gives for them."""
    cases: dict[str, list[Case]] = {kind: [] for kind in ANSWERED}
    with wisparse.load(bundle) as model:
        for level in (0.0, *model.bundle.recipe.sparsities):
            model.sparsity = level
            common = {"temperature": 0, "sparsity": level}
            for length in LENGTHS:
                answers = model.generate(PROMPTS, max_new_tokens=length, chat_template=False)
                for prompt, answer in zip(PROMPTS, answers, strict=True):
                    body = {**common, "prompt": prompt, "max_tokens": length}
                    cases["completion"].append(Case("/v1/completions", body, answer.text))
            for kind, (asked, direct, pattern) in GUIDED.items():
                for seed, prompt in enumerate(PROMPTS):
                    heat = {"temperature": float(seed % 2), "seed": seed}  # every other one is sampled
                    text = model.generate(prompt, max_new_tokens=64, chat_template=False, **direct, **heat).text
                    body = {**common, "prompt": prompt, "max_tokens": 64, **asked, **heat}
                    cases[kind].append(Case("/v1/completions", body, text, pattern=pattern))
            for prompt in PROMPTS:
                # ``Model.generate`` does not score prompts; the engine does, without HTTP.
                sampling = SamplingParams(temperature=0, logprobs=0)
                asked = {"max_new_tokens": 8, "sampling": sampling, "score_prompt": True, "sparsity": level}
                request = model.request(model.tokenizer.encode(prompt), **asked)
                chunks: list[Any] = []
                model.engine.submit(request, chunks.append)
                model.engine.drive(lambda request=request: request.done)  # type: ignore[misc]
                answer = chunks[-1].generation
                scores = [score.logprob for score in (*answer.prompt_scores, *answer.scores)]
                body = {**common, "prompt": prompt, "max_tokens": 8, "echo": True, "logprobs": 2}
                cases["echo"].append(Case("/v1/completions", body, prompt + answer.text, scores))
                messages = [{"role": "user", "content": prompt}]
                body = {**common, "messages": messages, "max_tokens": 16, "model": os.path.basename(bundle)}
                text = model.generate(messages, max_new_tokens=16).text
                cases["message"].append(Case("/v1/messages", body, text))
    return cases


def soak(
    port: int, cases: dict[str, list[Case]], requests: int, clients: int, seed: int, memory: Callable[[], int]
) -> dict[str, object]:
    """Send them all; ``memory``: the server's bytes."""
    lock = threading.Lock()
    kinds: collections.Counter[str] = collections.Counter()
    levels: collections.Counter[float] = collections.Counter()
    failures: list[str] = []
    after: dict[int, float] = {}
    slowest: dict[str, float] = {}  # of the answers that nothing holds up
    started = time.perf_counter()

    def client(first: int) -> None:
        for number in range(first, requests, clients):
            dice = random.Random(f"{seed} {number}")
            kind = dice.choice(KINDS)
            case = dice.choice(cases[kind if kind in cases else dice.choice(ANSWERED)])
            stream = kind in ("slow", "cancelled") or (kind in ANSWERED and dice.random() < 0.5)
            stream = stream and not case.body.get("echo")
            began = time.perf_counter()
            try:
                wrong = _one(port, kind, case, stream, dice)
            except (OSError, ValueError, LookupError, TypeError) as error:
                wrong = f"lost: {error!r}"
            with lock:
                kinds[f"{kind}, streamed" if stream and kind in ANSWERED else kind] += 1
                if kind in ANSWERED:
                    levels[case.body["sparsity"]] += 1
                    slowest[kind] = max(slowest.get(kind, 0), round(time.perf_counter() - began, 3))
                if wrong is not None:
                    failures.append(f"request {number}, {kind}, {case.body}: {wrong}")
                    click.echo(failures[-1], err=True)
                if (done := kinds.total()) % max(requests // 10, 1) == 0:
                    after[done] = round(memory() / 1e6, 2)
                    seconds = time.perf_counter() - started
                    click.echo(f"{done}: {len(failures)} failed, {after[done]} MB, {seconds:.0f} s", err=True)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "requests": kinds.total(), "clients": clients, "kinds": dict(sorted(kinds.items())),
        "answers_by_sparsity": dict(sorted(levels.items())), "wrong_or_lost": len(failures), "failures": failures[:20],
        "seconds": round(time.perf_counter() - started, 1), "memory_mb_after": after,
        "memory_growth_mb": round(after[max(after)] - after[min(after)], 2),
        "slowest_seconds": slowest,
    }  # fmt: skip


def bystander(port: int, rounds: int) -> dict[str, Any]:
    """Characters a second of one stream, alone and beside a client with schemas whose answers cannot be followed."""
    names = {f"k{number}": {"type": "string"} for number in range(600)}

    def post(body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def speed() -> float:
        count, began = 0, time.perf_counter()
        for seed in itertools.count():
            answer = post({"prompt": PROMPTS[0], "max_tokens": 400, "temperature": 1, "seed": seed, "stream": True})
            for line in answer:
                if line.startswith(b"data: {"):
                    count += len(json.loads(line[6:])["choices"][0]["text"])
                if (taken := time.perf_counter() - began) > _TURN_SECONDS:
                    answer.close()
                    return count / taken
        raise AssertionError

    found: dict[str, Any] = {"refused": collections.Counter(), "alone": [], "same": [], "others": []}
    speed()  # a warmup
    for phase in ("alone", "same", "others") * rounds:
        stop = threading.Event()

        def storm(phase: str = phase, stop: threading.Event = stop) -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                title = "storm" if phase == "same" else f"storm {number}"
                form = {"schema": {"title": title, "type": "object", "properties": names}}
                wish = {"type": "json_schema", "json_schema": form}
                found["refused"][post({"prompt": "a", "max_tokens": 9, "response_format": wish}).status] += 1

        thread = threading.Thread(target=storm)
        if phase != "alone":
            thread.start()
        found[phase].append(round(speed(), 1))
        stop.set()
        if phase != "alone":
            thread.join()
    ratios = {}
    for phase in ("same", "others"):
        logs = [math.log(one / alone) for one, alone in zip(found[phase], found["alone"], strict=True)]
        ratios[phase] = round(math.exp(statistics.mean(logs)), 3), round(statistics.stdev(logs) / rounds**0.5, 3)
    return {**found, "ratios": ratios}


def _one(port: int, kind: str, case: Case, stream: bool, dice: random.Random) -> str | None:
    """Send one request; what was wrong with its answer, if anything."""
    body, path = json.dumps({**case.body, "stream": stream}).encode(), case.path
    if kind == "malformed":
        body, path = dice.choice(MALFORMED), "/v1/completions"
    if kind == "hostile":
        body, path = json.dumps({"prompt": "a", "max_tokens": 4, **_hostile(dice)}).encode(), "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as one:
        sent = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
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
    first, _, rest = bytes(answer).partition(b"\r\n\r\n")
    status = first.split(b" ")[1:2]
    if kind in ("malformed", "hostile"):
        limits = b"expected at most", b"max is 2000"
        refused = status == [b"400"] and (kind == "malformed" or any(limit in rest for limit in limits))
        return None if refused else f"expected a 400, found {first[:80]!r} {rest[:200]!r}"
    if status != [b"200"]:
        return f"expected a 200, found {first[:80]!r} {rest[:200]!r}"
    return _wrong(rest, case, stream)


def _hostile(dice: random.Random) -> dict[str, Any]:
    """A grammar beyond the limits: rules within rules, optional parts, or an expression that takes too long. Most are
    new to the server; of those that cost it two seconds each there are four."""
    depth, title = dice.randrange(300, 3000), str(dice.random())
    properties = {f"p{number}": {"type": "integer"} for number in range(4000)}
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(depth)} | {f"d{depth}": {"type": "integer"}}
    match dice.randrange(6):
        case 0:
            return {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(depth)) + f'r{depth}: "a"\n'}
        case 1:
            return {"grammar": 'root ::= [0-9] "x" ' + '"a"? ' * (10_000 + depth)}
        case 2:
            return {"grammar": f"start: /{'a?' * (10_000 + dice.randrange(4))}/"}
        case 3:
            schema = {"title": title, "$defs": definitions, "$ref": "#/$defs/d0"}
        case 4:
            schema = {"title": title, "type": "object", "properties": dict([*properties.items()][:600])}
        case _:
            schema = {"title": title, "type": "object", "properties": properties}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _wrong(body: bytes, case: Case, stream: bool) -> str | None:
    """What differs from the direct call, or from the constraint."""
    messages, logprobs = case.path == "/v1/messages", None
    if not stream:
        answer = json.loads(body)
        found = answer["content"][0]["text"] if messages else answer["choices"][0]["text"]
        if case.logprobs is not None:
            first, *logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            if first is not None or len(logprobs) != len(case.logprobs):
                return f"expected {len(case.logprobs)} log-probabilities, found {first}, {len(logprobs)}"
            if logprobs != case.logprobs:
                far = max(abs(a - b) for a, b in zip(logprobs, case.logprobs, strict=True))
                return f"log-probabilities differ by {far}"
    else:
        # The chunks of HTTP stand on lines of their own, between the events.
        lines = [line[6:] for line in body.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: ")]
        if not lines or lines[-1] != (b'{"type":"message_stop"}' if messages else b"[DONE]"):
            return f"the stream has no end: {lines[-1:]}"
        events = [json.loads(line) for line in lines if line != b"[DONE]"]
        if messages:
            found = "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta")
        else:
            found = "".join(one["choices"][0]["text"] for one in events)
    if not re.fullmatch(case.pattern, found):
        return f"expected what {case.pattern} matches, found {found!r:.80}"
    return None if found == case.text else f"expected {case.text!r:.80}, found {found!r:.80}"


if __name__ == "__main__":
    main()
