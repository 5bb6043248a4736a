"""Requests of the openai client, for ``serve_clients.py``; each returns whether the answer shows what was asked for:
``n`` gives so many choices, a schema an object that it describes, a seed the same text twice. The model is the example
with a chat template that has tools in Hermes's syntax."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import openai

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


class Peer:
    def __init__(self, port: int) -> None:
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        self.model = self.client.models.list().data[0].id

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


def make_bundle(folder: Path) -> Path:
    """The example with a chat template for tools, at 50%."""
    source, bundle = folder / "source", folder / "bundle"
    shutil.copytree(EXAMPLE, source)
    (source / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    convert = [sys.executable, "-m", "wisparse", "convert", str(source), "-o", str(bundle), "--sparsity", "0.5"]
    convert += ["--calibration", str(ROOT / "converter"), "--num-samples", "1", "--seq-len", "128"]
    subprocess.run([*convert, "--search", "uniform", "-q"], check=True)
    return bundle


def outcome(ask: Callable[[Peer], bool], peer: Peer) -> str:
    try:
        return "yes" if ask(peer) else "no: answered otherwise"
    except Exception as error:
        return f"no: {type(error).__name__}: {error!s:.200}"


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None  # it was asked for
    for line in server.stderr:
        if line.startswith("serving "):
            return next(word for word in line.split() if word.startswith("http://"))
    raise click.ClickException("the server did not start; start it by hand to see why")
