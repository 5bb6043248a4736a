"""What a client of ``wisparse serve`` sees on a GPU, beside ``wisparse bench`` of the same bundle in the same run.

    PYTHONPATH=. python benchmarks/gpu_serve.py                       # the 8B shape, on an NVIDIA GPU: four minutes
    PYTHONPATH=. python benchmarks/gpu_serve.py --tiny --device cpu   # the example model: to try the script out
    PYTHONPATH=. python benchmarks/gpu_serve.py --bundle out          # a bundle that is there, if it never ends a text

Needs ``wisparse[serve]``; the client is Python's own ``http.client``. Makes the bundle by ``gpu_bundle.py`` (random
weights of the Llama-3.1-8B shape, thresholds calibrated to 50%), runs ``wisparse bench`` at one row and at eight, then
``wisparse serve --max-batch 8`` and a client of it, each in a process of its own. Each part warms up first and is a
median of rounds:

    one stream, eight streams (all greedy, half of them sampled), one and eight under a JSON schema
    first token of a chat's first and second turn, 4,000 tokens behind the second
    the longest gap of running answers while a prompt of 8,000 tokens is read
    a request for which the GPU's memory is short, beside one that goes on (another process takes the memory)

Predicted: a stream's token takes bench's step and nothing else, as all else is done while the GPU computes, a schema's
mask too: what is added is the choice behind the step, about 60 us. A second turn's few tokens are read by a captured
graph, in 8 ms. A running answer waits for half a piece of the prompt
(384 positions; 768 took 45 to 55 ms, 1,024 took 52 to 56) and a step.

A part that fails is told of, and the others go on; the script then ends with code 1. Writes NAME.json and NAME.md under
``--out``, anew after every part.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_bundle import EXAMPLE, ROOT, SPARSITY, endless_source, environment, wisparse
from gpu_models import SHAPES, need_gpu

TOKENS = 200  # of an answer, as in bench
ROUNDS = 5
ROWS = 8
BEHIND, PROMPT = 4000, 8000  # tokens: of a chat's first turn, of a prompt that is read while answers run
SECONDS = 45.0  # for one part
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "rows": {"type": "array", "items": {"type": "integer"}}},
    "required": ["text", "rows"],
}
# Takes the GPU's memory, all but a gibibyte, until its standard input ends.
_HOG = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(max(free - 2**30, 0), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass
class Answer:
    """One streamed answer, by the client's clock.

    Attributes:
        began: when the request was sent.
        at: of each event with text, when it came.
        counts: tokens so far, and when; with ``continuous_usage_stats`` alone.
    """

    began: float
    at: list[float] = field(default_factory=list)
    counts: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def rate(self) -> float:
        """Tokens a second after the first, as bench counts."""
        return (self.tokens - 1) / (self.at[-1] - self.at[0])

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.at[0] - self.began


class Client:
    """Streams answers from a server; any thread may ask."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(self, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", "connection": "close"})
        return connection.getresponse()

    def stream(self, path: str, body: Mapping[str, Any], *, counts: bool = False, most: int = TOKENS) -> Answer:
        """An answer, which has to have ``most`` tokens; one under a schema may end sooner."""
        options = {"include_usage": True, "continuous_usage_stats": counts}
        answer = Answer(time.perf_counter())
        with self.post(path, {**body, "stream": True, "stream_options": options, "max_tokens": most}) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read(2000)!r}")
            ended = False
            for line in response:
                now = time.perf_counter()
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    ended = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream ended with {event['error']}")
                if event.get("usage"):
                    answer.usage = event["usage"]
                    answer.counts.append((now, answer.tokens))
                for choice in event["choices"]:
                    piece = choice["text"] if "text" in choice else choice["delta"].get("content")
                    if piece:
                        answer.at.append(now)
                        answer.text += piece
        fewest = min(most, 2) if "response_format" in body else most
        if not ended or answer.tokens < fewest or len(answer.at) < min(most, 2):
            raise RuntimeError(f"expected a stream of {most} tokens, found {answer.usage} in {len(answer.at)} events")
        return answer

    def together(self, bodies: Sequence[Mapping[str, Any]], most: int = TOKENS) -> list[Answer]:
        """Completions at the same time."""
        found: list[Answer | BaseException] = [RuntimeError("no answer")] * len(bodies)
        barrier = threading.Barrier(len(bodies))

        def ask(index: int) -> None:
            barrier.wait(SECONDS)
            try:
                found[index] = self.stream("/v1/completions", bodies[index], counts=True, most=most)
            except BaseException as error:
                found[index] = error

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Answer)]


# ---------------------------------------------------------------------- parts


def completion(prompt: Sequence[int] | str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, **more}


def one_stream(client: Client, prompt: Sequence[int], bench: float, **more: Any) -> dict[str, Any]:
    client.stream("/v1/completions", completion(prompt, **more))
    answers = [client.stream("/v1/completions", completion(prompt, **more)) for _ in range(ROUNDS)]
    rate = statistics.median(answer.rate for answer in answers)
    return {
        "tok_per_s": rate, "over_bench": rate / bench, "bench_tok_per_s": bench,
        "first_token_ms": 1e3 * statistics.median(answer.first for answer in answers),
        "tokens": answers[0].tokens, "added_us_a_token": 1e6 / rate - 1e6 / bench,
    }  # fmt: skip


def several(client: Client, prompts: Sequence[Sequence[int]], bench: float, more: Sequence[Any]) -> dict[str, Any]:
    """Streams at once; the rate is that of the time in which all of them run."""
    bodies = [completion(prompt, **each) for prompt, each in zip(prompts, more, strict=True)]
    client.together(bodies)
    rates, wholes = [], []
    for _ in range(ROUNDS):
        answers = client.together(bodies)
        since, until = max(one.counts[0][0] for one in answers), min(one.counts[-1][0] for one in answers)
        tokens = sum(_count_at(one, until) - _count_at(one, since) for one in answers)
        rates.append(tokens / (until - since))
        wholes.append(sum(one.tokens for one in answers) / (max(a.at[-1] for a in answers) - answers[0].began))
    rate = statistics.median(rates)
    return {
        "tok_per_s": rate, "over_bench": rate / bench, "bench_tok_per_s": bench,
        "whole_tok_per_s": statistics.median(wholes),
        "added_us_a_step": len(bodies) * (1e6 / rate - 1e6 / bench),
    }  # fmt: skip


def _count_at(answer: Answer, moment: float) -> float:
    """Tokens by then; between two counts, the part of the time between them."""
    before = (answer.counts[0][0], 0)
    for now, tokens in answer.counts:
        if now >= moment:
            span = now - before[0]
            return tokens if not span else before[1] + (tokens - before[1]) * (moment - before[0]) / span
        before = now, tokens
    return answer.tokens


def second_turn(client: Client, texts: Iterator[str], behind: int) -> dict[str, Any]:
    """First tokens of two turns; each round is a conversation of its own."""
    firsts, seconds, ratios = [], [], []
    usages: list[Mapping[str, Any]] = []
    for index in range(1 + ROUNDS):
        messages = [{"role": "user", "content": next(texts)}]
        first = client.stream("/v1/chat/completions", {"messages": messages, "temperature": 0}, most=40)
        said = {"role": "assistant", "content": "def mean(values):\n    return sum(values) / len(values)\n"}
        more = [*messages, said, {"role": "user", "content": "And the median of them?"}]
        second = client.stream("/v1/chat/completions", {"messages": more, "temperature": 0}, most=40)
        if index:  # the first compiles
            firsts.append(1e3 * first.first)
            seconds.append(1e3 * second.first)
            ratios.append(second.first / first.first)
            usages = [first.usage, second.usage]
    return {
        "behind": behind, "first_ms": statistics.median(firsts), "second_ms": statistics.median(seconds),
        "ratio": statistics.median(ratios), "usage": usages,
    }  # fmt: skip


def gaps(
    client: Client, prompts: Sequence[Sequence[int]], long: Callable[[], list[int]], **more: Any
) -> dict[str, Any]:
    """How long running answers wait while a prompt is read."""
    most = 500

    def round_(read: bool) -> tuple[float, float]:
        moments: list[float] = []

        def reader() -> None:
            time.sleep(0.15)
            moments.append(time.perf_counter())
            if read:
                client.stream("/v1/completions", completion(long(), **more), most=1)
            else:
                time.sleep(0.3)
            moments.append(time.perf_counter())

        thread = threading.Thread(target=reader)
        thread.start()
        answers = client.together([completion(prompt, **more) for prompt in prompts], most)
        thread.join()
        if len(moments) != 2 or min(answer.at[-1] for answer in answers) < moments[1]:
            raise RuntimeError("the prompt was not read while the answers ran")
        waits = [
            after - before
            for answer in answers
            for before, after in zip(answer.at, answer.at[1:], strict=False)
            if after > moments[0] and before < moments[1]
        ]
        return 1e3 * max(waits), 1e3 * (moments[1] - moments[0])

    cold, _ = round_(True)
    quiet = [round_(False)[0] for _ in range(3)]
    found = [round_(True) for _ in range(ROUNDS)]
    return {
        "running": len(prompts), "longest_gap_ms": max(gap for gap, _ in found), "each_ms": [gap for gap, _ in found],
        "first_time_ms": cold, "without_ms": max(quiet), "first_token_ms": statistics.median(ms for _, ms in found),
    }  # fmt: skip


def out_of_memory(client: Client, prompts: Sequence[Sequence[int]], long: Callable[[], list[int]]) -> dict[str, Any]:
    """A request that the GPU has no room for, beside one that has: 8,000 tokens' log-probabilities need 4 GB."""
    expected = client.stream("/v1/completions", completion(prompts[0]), most=600)
    hog = subprocess.Popen(
        [sys.executable, "-c", _HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert hog.stdin is not None  # they were asked for
        assert hog.stdout is not None
        if hog.stdout.readline().strip() != "ready":
            raise RuntimeError("nothing could take the GPU's memory")
        beside: list[Answer] = []
        thread = threading.Thread(
            target=lambda: beside.append(client.stream("/v1/completions", completion(prompts[0]), most=600))
        )
        thread.start()
        time.sleep(0.3)
        with client.post("/v1/completions", completion(long(), max_tokens=1, echo=True, logprobs=1)) as refused:
            status, told = refused.status, refused.read(500).decode(errors="replace")
        thread.join()
        after = client.stream("/v1/completions", completion(prompts[1]))
        hog.stdin.close()
        hog.wait(20)
    finally:
        hog.kill()
        hog.wait()
    if status == 200 or not beside:
        raise RuntimeError(f"expected a refusal and an answer beside it, found {status} and {len(beside)} answers")
    return {
        "status": status, "told": told, "beside_tokens": beside[0].tokens,
        "beside_as_before": beside[0].text == expected.text, "after_tokens": after.tokens,
    }  # fmt: skip


# ---------------------------------------------------------------------- the run


def make_bundle(arguments: argparse.Namespace, folder: Path) -> Path:
    """A bundle whose texts end, as a grammar needs, but by a token that no greedy answer here chooses."""
    bundle = folder / ("example" if arguments.tiny else arguments.shape)
    if arguments.tiny:
        end = json.loads((EXAMPLE / "config.json").read_text("utf-8"))["vocab_size"] - 7
        source = endless_source(folder / "source", end=end)
        text = ("--calibration", ROOT / "converter", "--num-samples", 1, "--seq-len", 128, "--search", "uniform")
        wisparse("convert", source, "-o", bundle, "--sparsity", SPARSITY, *text, "--device", arguments.device, "-q")
    else:
        child = [sys.executable, str(ROOT / "benchmarks" / "gpu_bundle.py"), "--folder", str(bundle)]
        child += ["--shape", arguments.shape, "--device", arguments.device]
        child += ["--end", str(SHAPES[arguments.shape]["vocab_size"] - 7)]
        child += ["--blocks", str(arguments.blocks)] if arguments.blocks else []
        subprocess.run(child, check=True, env=environment(), timeout=120)
    return bundle


@contextlib.contextmanager
def server(bundle: Path, device: str, max_seq_len: int, log: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """``wisparse serve``, until SIGTERM; what it says goes to a file."""
    command = [sys.executable, "-m", "wisparse", "serve", str(bundle), "--port", "0", "--max-batch", str(ROWS)]
    command += ["--device", device, "--max-seq-len", str(max_seq_len)]
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stderr=file, text=True, env=environment())
        try:
            until = time.monotonic() + 180
            while not (line := next((one for one in log.read_text().splitlines() if one.startswith("serving ")), "")):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            address = next(word for word in line.split() if word.startswith("http://"))
            yield process, Client(int(address.split(":")[2].partition("/")[0]))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def texts(characters: int) -> Iterator[str]:
    """Python code, never the same beginning twice."""
    code = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "converter").rglob("*.py")))
    for index in range(100):
        at = 7919 * index % max(len(code) - characters, 1)
        yield f"{index}:\n" + code[at : at + characters]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has, to try it out")
    parser.add_argument("--tiny", action="store_true", help="the example model instead, with a tenth of the prompts")
    parser.add_argument("--bundle", type=Path, help="measure a bundle that is there; none is made")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to make the bundle")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results"))
    parser.add_argument("--name", default="gpu-h200-serve")
    parser.add_argument("--only", nargs="+", help="these parts alone")
    arguments = parser.parse_args()
    need_gpu(parser, arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="wisparse-serve-", dir=arguments.folder))
    found: dict[str, Any] = {"bundle": arguments.shape, "python": platform.python_version(), "seconds": {}}
    began = time.perf_counter()

    def part(name: str, work: Callable[[], Any]) -> Any:
        if arguments.only and name not in arguments.only and not name.startswith(("make", "bench", "start")):
            return None
        started = time.perf_counter()
        try:
            found[name] = work()
        except (Exception, SystemExit) as error:  # the other parts are worth their time all the same
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        found["seconds"][name] = round(time.perf_counter() - started, 1)
        print(f"{time.perf_counter() - began:6.1f} s  {name}: {json.dumps(found[name])[:1500]}", flush=True)
        write(found, arguments.out / arguments.name)
        return found[name]

    def bench(rows: int) -> dict[str, Any]:
        more = ("--max-new-tokens", TOKENS, "--batch", rows, "--device", arguments.device, "--json")
        result: dict[str, Any] = json.loads(wisparse("bench", bundle, *more, timeout=90).stdout.splitlines()[-1])
        return result

    try:
        bundle = arguments.bundle or make_bundle(arguments, folder)
        found["bundle"], found["seconds"]["make"] = bundle.name, round(time.perf_counter() - began, 1)
        print(f"{time.perf_counter() - began:6.1f} s  made {bundle}", flush=True)
        alone, batch = (part(f"bench_{rows}", lambda rows=rows: bench(rows)) for rows in (1, ROWS))
        one_rate, all_rate = (one.get("sparse", {"tok_per_s": float("nan")})["tok_per_s"] for one in (alone, batch))
        vocab_size = json.loads((bundle / "config.json").read_text("utf-8"))["vocab_size"]
        dice = random.Random(0)

        def ids(count: int) -> list[int]:
            return [dice.randrange(10, vocab_size - 10) for _ in range(count)]

        scale = 10 if arguments.tiny else 1
        prompts, plain = [ids(5) for _ in range(ROWS)], [{}] * ROWS
        half = [{"temperature": 0.8, "top_p": 0.95, "seed": index} if index % 2 else {} for index in range(ROWS)]
        schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
        conversations = texts(int(BEHIND / scale * 3.3))
        log = arguments.out / f"{arguments.name}.log"
        started = time.perf_counter()
        with server(bundle, arguments.device, (PROMPT + 4000) // scale, log) as (process, client):
            found["seconds"]["start"] = round(time.perf_counter() - started, 1)
            part("one_stream", lambda: one_stream(client, prompts[0], one_rate))
            part("eight_streams", lambda: several(client, prompts, all_rate, plain))
            part("second_turn", lambda: second_turn(client, conversations, BEHIND // scale))
            part("gap", lambda: gaps(client, prompts[:4], lambda: ids(PROMPT // scale)))
            part("schema", lambda: one_stream(client, prompts[0], one_rate, **schema))
            part("eight_schema", lambda: several(client, prompts, all_rate, [schema] * ROWS))
            part("eight_half_sampled", lambda: several(client, prompts, all_rate, half))
            if arguments.device.startswith("cuda"):
                part("out_of_memory", lambda: out_of_memory(client, prompts, lambda: ids(PROMPT)))
        found["exit_code"] = process.returncode
        write(found, arguments.out / arguments.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"in all {time.perf_counter() - began:.0f} s\n{table(found)}")
    print(json.dumps(found))
    if process.returncode or any("error" in value for value in found.values() if isinstance(value, dict)):
        sys.exit(1)


def write(found: Mapping[str, Any], to: Path) -> None:
    to.with_suffix(".json").write_text(json.dumps(found) + "\n", "utf-8")
    to.with_suffix(".md").write_text(table(found), "utf-8")


def table(found: Mapping[str, Any]) -> str:
    """The figures beside their goals, as Markdown."""
    machine = found.get("bench_1", {}).get("machine", {})
    lines = [
        f"# `wisparse serve`, {found['bundle']}", "", ", ".join(f"{key} {value}" for key, value in machine.items()), "",
        "| figure | found | goal |", "|---|---|---|",
    ]  # fmt: skip

    def row(name: str, key: str, what: str, goal: str, digits: int = 3) -> None:
        part = found.get(name)
        if part is not None:
            value = part.get(key)
            shown = f"{value:,.{digits}f}" if isinstance(value, float) else str(value)
            lines.append(f"| {what} | {'failed: ' + part['error'] if 'error' in part else shown} | {goal} |")

    row("one_stream", "tok_per_s", "one stream, tok/s", "", 1)
    row("one_stream", "over_bench", "one stream, over bench", "0.95")
    row("eight_streams", "tok_per_s", "eight streams, tok/s", "", 1)
    row("eight_streams", "over_bench", "eight streams, over bench at batch 8", "0.92")
    row("eight_half_sampled", "over_bench", "eight streams, four of them sampled, over bench at batch 8", "")
    row("second_turn", "first_ms", f"first token, first turn of {BEHIND} tokens, ms", "", 1)
    row("second_turn", "second_ms", "first token, second turn, ms", "", 1)
    row("second_turn", "ratio", "second turn over first", "0.10")
    row("gap", "longest_gap_ms", f"longest gap of running answers while {PROMPT} tokens are read, ms", "50", 1)
    row("gap", "first_time_ms", "the same, the first time", "", 1)
    row("gap", "without_ms", "the same without a prompt", "", 1)
    row("one_stream", "added_us_a_token", "added to bench's step by HTTP, us a token", "", 0)
    row("schema", "added_us_a_token", "added to bench's step by HTTP and a schema, us a token", "300", 0)
    row("schema", "over_bench", "one stream with a schema, over bench", "")
    row("eight_schema", "over_bench", "eight streams with a schema, over bench at batch 8", "")
    row("out_of_memory", "status", "a request without room in the GPU's memory: status", "500")
    row("out_of_memory", "beside_tokens", "tokens of the answer beside it", "600")
    row("out_of_memory", "after_tokens", "tokens of the next answer, memory still taken", str(TOKENS))
    lines += ["", f"exit code after SIGTERM: {found.get('exit_code')}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
