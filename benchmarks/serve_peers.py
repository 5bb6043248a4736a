"""Twenty requests of the openai client, sent to ``wisparse serve`` and to two other servers of one model: who answers.

    pip install openai gguf xllamacpp "mlx[cpu]" mlx-lm sentencepiece protobuf
    python benchmarks/serve_peers.py

xllamacpp is llama.cpp's own server (its C++ code) in a Python package; mlx-lm is ``mlx_lm.server``. A server whose
package is missing is left out of the table, and said to be. All get the example model's weights (ours as a bundle,
llama.cpp's as a GGUF file, both made here) and one chat template, which has tools in Hermes's syntax. An answer counts
if it shows what was asked for: ``n`` gives so many choices, a schema an object that it describes, a seed the same text
twice. What the text says is not compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import openai
from cpu_models import finish_gguf, gguf_writer

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pycode-llama-6m"
MOST = 24
TEMPLATE = """{%- if tools %}{{ 'system: call <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
{%- for m in messages %}{{ m.role + ': ' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
ASK: list[Any] = [{"role": "user", "content": "def mean(values):"}]
PROMPT = "def mean(values):\n"
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_LLAMA_CPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.use_jinja, params.warmup = 4096, 4, True, False
server = xllamacpp.Server(params)
while True:
    time.sleep(1)
"""


class Peer:
    """One server, and the requests to it; each returns whether the answer shows what was asked for."""

    def __init__(self, port: int) -> None:
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        listed = self.client.models.list().data
        self.model = listed[0].id if listed else "default_model"  # as mlx-lm calls the one it was started with

    def chat(self, **more: Any) -> Any:
        asked = {"model": self.model, "messages": ASK, "max_tokens": MOST, "temperature": 0, **more}
        return self.client.chat.completions.create(**asked)

    def complete(self, **more: Any) -> Any:
        asked = {"model": self.model, "prompt": PROMPT, "max_tokens": MOST, "temperature": 0, **more}
        return self.client.completions.create(**asked)

    def respond(self, **more: Any) -> Any:
        return self.client.responses.create(model=self.model, input=PROMPT, max_output_tokens=MOST, **more)

    def completion(self) -> bool:
        return bool(self.complete().choices[0].text)

    def completion_streamed(self) -> bool:
        pieces = [chunk.choices[0].text for chunk in self.complete(stream=True) if chunk.choices]
        return len(pieces) > 2 and "".join(pieces) == self.complete().choices[0].text

    def several_prompts(self) -> bool:
        return len(self.complete(prompt=[PROMPT, "import"]).choices) == 2

    def token_ids(self) -> bool:
        return bool(self.complete(prompt=[50, 60, 70]).choices[0].text)

    def logprobs_of_a_completion(self) -> bool:
        found = self.complete(logprobs=2).choices[0].logprobs
        return len(found.token_logprobs) > 2 and all(len(top) >= 2 for top in found.top_logprobs)

    def echo_with_logprobs(self) -> bool:
        found = self.complete(echo=True, logprobs=1, max_tokens=1).choices[0]
        return found.text.startswith(PROMPT) and len(found.logprobs.token_logprobs) > 3

    def a_chat(self) -> bool:
        return bool(self.chat().choices[0].message.content)

    def a_chat_streamed_with_usage(self) -> bool:
        *_, last = self.chat(stream=True, stream_options={"include_usage": True})
        return last.usage is not None and last.usage.completion_tokens > 2

    def stop(self) -> bool:
        word = self.chat().choices[0].message.content.split()[1]
        found = self.chat(stop=[word]).choices[0]
        return found.finish_reason == "stop" and word not in found.message.content

    def n(self) -> bool:
        return len(self.chat(n=2, temperature=1).choices) == 2

    def seed(self) -> bool:
        texts = [self.chat(temperature=1.0, seed=seed).choices[0].message.content for seed in (1, 1, 2, 3)]
        return texts[0] == texts[1] and len(set(texts)) > 1

    def penalties(self) -> bool:
        plain, other = (self.chat(frequency_penalty=p, presence_penalty=p, max_tokens=60) for p in (0.0, 2.0))
        return bool(plain.choices[0].message.content != other.choices[0].message.content)

    def logit_bias(self) -> bool:
        found = self.complete(logit_bias={"60": 100}, max_tokens=4).choices[0].text
        return len(found) == 4 * len(found[: len(found) // 4]) and found == found[: len(found) // 4] * 4

    def logprobs_of_a_chat(self) -> bool:
        found = self.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        return len(found) > 2 and all(len(one.top_logprobs) == 3 and math.isfinite(one.logprob) for one in found)

    def json_object(self) -> bool:
        found = self.chat(response_format={"type": "json_object"}, max_tokens=300, seed=3, temperature=0.8).choices[0]
        if found.finish_reason == "length":  # a small model finds no end: what there is begins an object
            return bool(found.message.content.lstrip().startswith("{"))
        return isinstance(json.loads(found.message.content), dict)

    def json_schema(self) -> bool:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        found = json.loads(self.chat(response_format=wanted, max_tokens=100).choices[0].message.content)
        return set(found) == {"a", "b"} and found["a"] in ("x", "y") and isinstance(found["b"], bool)

    def tools_offered(self) -> bool:
        return self.chat(tools=[WEATHER]).choices[0].finish_reason in ("stop", "length", "tool_calls")

    def tool_required(self) -> bool:
        found = self.chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
        (call,) = found.choices[0].message.tool_calls
        return call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")

    def a_response_streamed(self) -> bool:
        *_, last = self.respond(stream=True, temperature=0)
        return last.type in ("response.completed", "response.incomplete") and bool(last.response.output_text)


REQUESTS: dict[str, Callable[[Peer], bool]] = {
    "`completions`": Peer.completion,
    "… streamed, the same text": Peer.completion_streamed,
    "… of several prompts": Peer.several_prompts,
    "… of token ids": Peer.token_ids,
    "… `logprobs`": Peer.logprobs_of_a_completion,
    "… `echo` with `logprobs`": Peer.echo_with_logprobs,
    "`chat.completions`": Peer.a_chat,
    "… streamed, `include_usage`": Peer.a_chat_streamed_with_usage,
    "… `stop`": Peer.stop,
    "… `n`": Peer.n,
    "… `seed` repeats": Peer.seed,
    "… frequency and presence penalties": Peer.penalties,
    "… `logit_bias`": Peer.logit_bias,
    "… `logprobs` with `top_logprobs`": Peer.logprobs_of_a_chat,
    "… `response_format` `json_object`": Peer.json_object,
    "… `response_format` `json_schema`": Peer.json_schema,
    "… `tools`, free to call": Peer.tools_offered,
    "… `tool_choice` `required`": Peer.tool_required,
    "`responses`, streamed": Peer.a_response_streamed,
}


def cached_tokens(peer: Peer) -> bool:
    """The second turn of a conversation tells what of it was read before."""
    long = [{"role": "user", "content": "\n".join(f"x{number} = {number}" for number in range(150))}]
    said = peer.chat(messages=long, max_tokens=4).choices[0].message.content
    more = [*long, {"role": "assistant", "content": said or "x"}, {"role": "user", "content": "on"}]
    details = peer.chat(messages=more, max_tokens=4).usage.prompt_tokens_details
    return details is not None and (details.cached_tokens or 0) > 100


REQUESTS["second turn, `cached_tokens`"] = cached_tokens


def make_bundle(folder: Path) -> tuple[Path, Path]:
    """The example with a chat template for tools, as it is and at 50%."""
    source, bundle = folder / "source", folder / "bundle"
    shutil.copytree(EXAMPLE, source)
    (source / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    convert = [sys.executable, "-m", "wisparse", "convert", str(source), "-o", str(bundle), "--sparsity", "0.5"]
    convert += ["--calibration", str(ROOT / "converter"), "--num-samples", "1", "--seq-len", "128"]
    subprocess.run([*convert, "--search", "uniform", "-q"], check=True)
    return source, bundle


def make_gguf(source: Path, out: Path) -> Path:
    """The example model as llama.cpp reads it."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text("utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf_writer(config, out)
    words = {index: word for word, index in tokenizer["model"]["vocab"].items()}
    added = {one["id"]: one for one in tokenizer["added_tokens"]}
    words |= {index: one["content"] for index, one in added.items()}
    tokens = [words.get(index, f"[unused{index}]") for index in range(config["vocab_size"])]
    kinds = [gguf.TokenType.CONTROL if index in added else gguf.TokenType.NORMAL for index in range(len(tokens))]
    merges = tokenizer["model"]["merges"]
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])

    def halves(weight: torch.Tensor, count: int) -> torch.Tensor:
        """Rotated pairs side by side, as llama.cpp turns them."""
        return weight.view(count, 2, size // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)

    for name, tensor in load_file(source / "model.safetensors").items():
        weight = tensor.float()
        if "q_proj" in name or "k_proj" in name:
            weight = halves(weight, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    finish_gguf(writer)
    return out


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[Peer]:
    cache = log.parent / "hub"  # mlx-lm lists models only where there is one
    cache.mkdir(exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "HF_HUB_CACHE": str(cache)})
        try:
            peer, until = None, time.monotonic() + 120
            while peer is None:
                try:
                    peer = Peer(port)
                except (openai.APIConnectionError, openai.InternalServerError):
                    if process.poll() is not None or time.monotonic() > until:
                        raise click.ClickException(f"it did not start:\n{log.read_text()[-2000:]}") from None
                    time.sleep(0.5)
            yield peer
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@click.command()
def main() -> None:
    """Print the table as Markdown, JSON last."""
    folder = Path(tempfile.mkdtemp(prefix="wisparse-peers-"))
    commands: dict[str, Callable[[int], list[str]]] = {}
    try:
        source, bundle = make_bundle(folder)
        commands["wisparse"] = lambda port: [
            sys.executable, "-m", "wisparse", "serve", str(bundle), "--port", str(port)
        ]  # fmt: skip
        if importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf"):
            model = make_gguf(source, folder / "model.gguf")
            commands["llama.cpp"] = lambda port: [sys.executable, "-c", _LLAMA_CPP, str(model), str(port)]
        if importlib.util.find_spec("mlx_lm"):
            commands["mlx-lm"] = lambda port: [
                sys.executable, "-m", "mlx_lm.server", "--model", str(source), "--port", str(port)
            ]  # fmt: skip
        found: dict[str, dict[str, str]] = {}
        for name, command in commands.items():
            found[name] = ask_all(command, folder / f"{name}.log")
            click.echo(f"{name}: {sum(one == 'yes' for one in found[name].values())} of {len(REQUESTS)}", err=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    click.echo("| request | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for what in REQUESTS:
        click.echo(f"| {what} | " + " | ".join(found[name][what].partition(":")[0] for name in found) + " |")
    for name in {"wisparse", "llama.cpp", "mlx-lm"} - set(found):
        click.echo(f"{name}: not installed")
    versions = {name: _version(name) for name in ("wisparse", "xllamacpp", "mlx-lm", "mlx", "openai")}
    click.echo(json.dumps({"answered": found, "versions": versions}))


def ask_all(command: Callable[[int], list[str]], log: Path) -> dict[str, str]:
    """What comes of each request; a server that answers nothing more after one is started anew for the next."""
    found: dict[str, str] = {}
    while len(found) < len(REQUESTS):
        port = free_port()
        with running(command(port), port, log) as peer:
            for what, ask in REQUESTS.items():
                if what in found:
                    continue
                found[what] = outcome(ask, peer)
                if found[what] != "yes" and outcome(Peer.completion, peer) != "yes":
                    found[what] += "; after it the server answers nothing more"
                    break
    return found


def outcome(ask: Callable[[Peer], bool], peer: Peer) -> str:
    try:
        return "yes" if ask(peer) else "no: answered otherwise"
    except Exception as error:
        return f"no: {type(error).__name__}: {error!s:.200}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
