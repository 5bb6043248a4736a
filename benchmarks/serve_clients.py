"""Calls of OpenAI's and Anthropic's own Python clients to ``wisparse serve``: which give what they have to.

A call counts if what its function says of it holds: answers are compared with one another, with their schemas and their
usage, errors with the class that the client raises. The model gets a chat template that has tools and thoughts.

    pip install openai anthropic
    python benchmarks/serve_clients.py --out benchmarks/results/serve-clients
    python benchmarks/serve_clients.py --model "$(python benchmarks/smollm2.py)" --out benchmarks/results/serve-clients-smollm2
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import anthropic
import click
import openai
from pydantic import BaseModel
from serve_soak import address_of

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pycode-llama-6m"
MOST = 24
_REASONS = ("stop", "length", "tool_calls")
# BEGIN, AFTER (the role) and END mark a turn.
TEMPLATE = """{%- if tools %}BEGINsystemAFTERcall <tool_call>{"name": ..., "arguments": ...}</tool_call>{{ '\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}END{% endif %}
{%- for m in messages %}BEGIN{{ m.role }}AFTER{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}END{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}BEGINassistantAFTER{% if enable_thinking %}<think>{{ '\\n' }}{% endif %}{% endif %}"""
ASK: list[Any] = [{"role": "user", "content": "def mean(values):"}]
PROMPT = "def mean(values):\n"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,  # else a model that was not trained on tools adds some until it is cut
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
}
_CHOICES = {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": _CHOICES, "required": ["a", "b"], "additionalProperties": False}
LONG = "x = 1\n" * 3000
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]}]
SYSTEM = {"role": "system", "content": "Count."}
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}
TOOL: Any = {"name": "weather", "description": "of a city", "input_schema": PARAMETERS}
NAMED = {"type": "tool", "name": "weather"}
CITIES = ("Rome", "Oslo")
# The grammar stands for a model that was trained to think.
THOUGHT: Any = {"grammar": 'root ::= "two and two\\n</think>\\n\\nfour"'}
THINK: Any = {"max_tokens": 60, "extra_body": {**THOUGHT, "chat_template_kwargs": {"enable_thinking": True}}}


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]
    square: bool


class Forecast(BaseModel):
    place: Place
    days: Literal[1, 2, 3]


class Clients:
    def __init__(self, address: str) -> None:
        self.root = address.removesuffix("/v1")
        self.keys: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
        self.client = openai.OpenAI(base_url=f"{self.root}/v1", **self.keys)
        self.claude = anthropic.Anthropic(base_url=self.root, **self.keys)
        self.model = self.client.models.list().data[0].id
        self.common: dict[str, Any] = {"model": self.model, "messages": ASK, "temperature": 0}

    def chat(self, **more: Any) -> Any:
        asked = {"model": self.model, "messages": ASK, "max_tokens": MOST, "temperature": 0, **more}
        return self.client.chat.completions.create(**asked)

    def complete(self, **more: Any) -> Any:
        asked = {"model": self.model, "prompt": PROMPT, "max_tokens": MOST, "temperature": 0, **more}
        return self.client.completions.create(**asked)

    def respond(self, **more: Any) -> Any:
        return self.client.responses.create(model=self.model, input=PROMPT, max_output_tokens=MOST, **more)

    def completion_streamed(self) -> bool:
        long = {"max_tokens": 300}  # what a small model writes in little time comes in one piece
        pieces = [chunk.choices[0].text for chunk in self.complete(stream=True, **long) if chunk.choices]
        return len(pieces) > 2 and "".join(pieces) == self.complete(**long).choices[0].text

    def logprobs_of_a_completion(self) -> bool:
        found = self.complete(logprobs=2).choices[0].logprobs
        return len(found.token_logprobs) > 2 and all(len(top) >= 2 for top in found.top_logprobs)

    def echo_with_logprobs(self) -> bool:
        found = self.complete(echo=True, logprobs=1, max_tokens=1).choices[0]
        return found.text.startswith(PROMPT) and len(found.logprobs.token_logprobs) > 3

    def a_chat_streamed_with_usage(self) -> bool:
        *_, last = self.chat(stream=True, stream_options={"include_usage": True})
        return last.usage is not None and last.usage.completion_tokens > 2

    def stop(self) -> bool:
        word = self.chat().choices[0].message.content.split()[1]
        found = self.chat(stop=[word]).choices[0]
        return found.finish_reason == "stop" and word not in found.message.content

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

    def tool_required(self) -> bool:
        found = self.chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
        (call,) = found.choices[0].message.tool_calls
        return call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")

    def a_response_streamed(self) -> bool:
        *_, last = self.respond(stream=True, temperature=0)
        return last.type in ("response.completed", "response.incomplete") and bool(last.response.output_text)

    def cached_tokens(self) -> bool:
        """The second turn of a conversation tells what of it was read before."""
        long = [{"role": "user", "content": "\n".join(f"x{number} = {number}" for number in range(150))}]
        said = self.chat(messages=long, max_tokens=4).choices[0].message.content
        more = [*long, {"role": "assistant", "content": said or "x"}, {"role": "user", "content": "on"}]
        details = self.chat(messages=more, max_tokens=4).usage.prompt_tokens_details
        return details is not None and (details.cached_tokens or 0) > 100

    def text(self, **more: Any) -> Any:
        return self.chat(**more).choices[0].message.content

    def parsed(self, **more: Any) -> Any:
        return self.client.chat.completions.parse(**self.common, **more).choices[0].message

    def asked(self, **more: Any) -> dict[str, Any]:
        """What ``messages.create`` takes, whose newer versions have no ``temperature``."""
        return {"model": self.model, "messages": ASK, "max_tokens": MOST, "extra_body": {"temperature": 0}, **more}

    def message(self, **more: Any) -> Any:
        return self.claude.messages.create(**self.asked(**more))

    def streamed_message(self, **more: Any) -> Any:
        with self.claude.messages.stream(**self.asked(**more)) as stream:
            return stream.get_final_message()

    def named_tool_and_result(self) -> bool:
        named = {"type": "function", "function": {"name": "weather"}}
        message = self.chat(tools=[WEATHER], tool_choice=named, max_tokens=60).choices[0].message
        (one,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": one.id, "content": "5"}
        answer = self.text(tools=[WEATHER], messages=[*ASK, message, result])
        return json.loads(one.function.arguments)["city"] in CITIES and bool(answer)

    def streamed_calls(self) -> bool:
        chunks = self.chat(tools=[WEATHER], **ONE_CALL, max_tokens=60, stream=True)
        first, *rest = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(one.function.arguments or "" for one in (first, *rest))
        return first.function.name == "weather" and json.loads(arguments)["city"] in CITIES

    def stream_helper(self) -> bool:
        with self.client.chat.completions.stream(**self.common, response_format=Forecast) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "content.delta")
            message = stream.get_final_completion().choices[0].message
        return deltas == message.content and isinstance(message.parsed, Forecast)

    def asynchronous(self) -> bool:
        async def ask() -> set[str]:
            create = openai.AsyncOpenAI(base_url=f"{self.root}/v1", **self.keys).chat.completions.create
            asked = {**self.common, "max_tokens": MOST}
            found = await asyncio.gather(*(create(**asked) for _ in range(4)))
            pieces = [one.choices[0].delta.content or "" async for one in await create(**asked, stream=True)]
            return {*(one.choices[0].message.content for one in found), "".join(pieces)}

        return asyncio.run(ask()) == {self.text()}

    def given_up(self) -> bool:
        stream = self.chat(stream=True, max_tokens=1500)
        next(iter(stream))
        stream.close()
        late = raises(openai.APITimeoutError, lambda c: c.chat(max_tokens=1500, timeout=0.05), self)
        deadline = time.monotonic() + 5
        while late and time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.root}/metrics") as page:
                lines = [line.split() for line in page.read().decode().splitlines()]
            if not sum(float(line[1]) for line in lines if line[0] in ("wisparse_running", "wisparse_waiting")):
                return True
        return False

    def any_tool_and_result(self) -> bool:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        found = self.message(tools=[TOOL], tool_choice=choice, max_tokens=60)
        result = {"type": "tool_result", "tool_use_id": found.content[0].id, "content": "5"}
        turns = [*ASK, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
        called = found.stop_reason == "tool_use" and found.content[0].input["city"] in CITIES
        return called and bool(self.message(tools=[TOOL], messages=turns).content)

    def thought(self) -> bool:
        message = self.chat(**THINK).choices[0].message
        return (message.reasoning_content, message.content) == ("two and two", "four")

    def thought_streamed(self) -> bool:
        deltas = [chunk.choices[0].delta for chunk in self.chat(stream=True, **THINK)]
        thought = "".join(getattr(one, "reasoning_content", None) or "" for one in deltas)
        return (thought, "".join(one.content or "" for one in deltas)) == ("two and two", "four")

    def thought_in_a_response(self) -> bool:
        first, last = self.respond(extra_body=THINK["extra_body"]).output
        return (first.type, first.content[0].text, last.content[0].text) == ("reasoning", "two and two", "four")

    def thought_of_a_message(self, streamed: bool) -> bool:
        given = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000, "extra_body": THOUGHT}
        first, last = (self.streamed_message if streamed else self.message)(**given).content
        return (first.type, first.thinking, last.text) == ("thinking", "two and two", "four")

    def asynchronous_messages(self) -> bool:
        async def ask() -> set[str]:
            messages = anthropic.AsyncAnthropic(base_url=self.root, **self.keys).messages
            found = await asyncio.gather(*(messages.create(**self.asked()) for _ in range(4)))
            async with messages.stream(**self.asked()) as stream:
                return {one.content[0].text for one in (*found, await stream.get_final_message())}

        return asyncio.run(ask()) == {self.text()}


def raises(kind: type[Exception], ask: Callable[[Any], object], clients: Clients) -> bool:
    try:
        ask(clients)
    except kind:
        return True
    return False


OPENAI: dict[str, Callable[[Any], bool]] = {
    "`completions`": lambda c: bool(c.complete().choices[0].text),
    "… streamed, the same text": Clients.completion_streamed,
    "… of several prompts": lambda c: len(c.complete(prompt=[PROMPT, "import"]).choices) == 2,
    "… of token ids": lambda c: bool(c.complete(prompt=[50, 60, 70]).choices[0].text),
    "… `logprobs`": Clients.logprobs_of_a_completion,
    "… `echo` with `logprobs`": Clients.echo_with_logprobs,
    "`chat.completions`": lambda c: bool(c.text()),
    "… streamed, `include_usage`": Clients.a_chat_streamed_with_usage,
    "… `stop`": Clients.stop,
    "… `n`": lambda c: len(c.chat(n=2, temperature=1).choices) == 2,
    "… `seed` repeats": Clients.seed,
    "… frequency and presence penalties": Clients.penalties,
    "… `logit_bias`": Clients.logit_bias,
    "… `logprobs` with `top_logprobs`": Clients.logprobs_of_a_chat,
    "… `response_format` `json_object`": Clients.json_object,
    "… `response_format` `json_schema`": Clients.json_schema,
    "… `tools`, free to call": lambda c: c.chat(tools=[WEATHER]).choices[0].finish_reason in _REASONS,
    "… `tool_choice` `required`": Clients.tool_required,
    "`responses`, streamed": Clients.a_response_streamed,
    "second turn, `cached_tokens`": Clients.cached_tokens,
    "`models.list`, `retrieve`": lambda c: c.client.models.retrieve(c.client.models.list().data[0].id).id == c.model,
    "`max_completion_tokens`": lambda c: c.chat(max_completion_tokens=5, max_tokens=None).usage.completion_tokens == 5,
    "a system message": lambda c: c.chat(messages=[SYSTEM, *ASK]).usage.prompt_tokens > c.chat().usage.prompt_tokens,
    "`chat.completions.parse`": lambda c: isinstance(c.parsed(response_format=Forecast).parsed, Forecast),
    "`chat.completions.stream`": Clients.stream_helper,
    "a nested pydantic model as a tool": lambda c: isinstance(
        c.parsed(tools=[openai.pydantic_function_tool(Forecast)], **ONE_CALL).tool_calls[0].function.parsed_arguments,
        Forecast,
    ),
    "`tool_choice` names one, its result sent back": Clients.named_tool_and_result,
    "calls, streamed": Clients.streamed_calls,
    "`responses.parse`": lambda c: isinstance(
        c.client.responses.parse(model=c.model, input=PROMPT, text_format=Forecast).output_parsed, Forecast
    ),
    "a thought, `reasoning_content`": Clients.thought,
    "… streamed": Clients.thought_streamed,
    "… of `responses`": Clients.thought_in_a_response,
    "`extra_body` `sparsity`": lambda c: c.text(extra_body={"sparsity": 0.5}) == c.text(),
    "`with_raw_response`": lambda c: c.client.models.with_raw_response.list().parse().data[0].id == c.model,
    "AsyncOpenAI, four at once and a stream": Clients.asynchronous,
    "a stream closed early and a timeout leave nothing behind": Clients.given_up,
}
ANTHROPIC: dict[str, Callable[[Any], bool]] = {
    "`messages.create`": lambda c: c.message().content[0].text == c.text(),
    "`messages.stream`": lambda c: c.streamed_message().content[0].text == c.text(),
    "`stream`, the last event": lambda c: [one.type for one in c.message(stream=True)][-1] == "message_stop",
    "`count_tokens`, as the usage": lambda c: (
        c.claude.messages.count_tokens(model=c.model, messages=ASK).input_tokens == c.chat().usage.prompt_tokens
    ),
    "`system`": lambda c: c.message(system="Count.").content[0].text == c.text(messages=[SYSTEM, *ASK]),
    "`stop_sequences`": lambda c: c.message(stop_sequences=[c.text().split()[1]]).stop_reason == "stop_sequence",
    "`tools`, auto": lambda c: bool(c.message(tools=[TOOL], tool_choice={"type": "auto"}).content),
    "any tool, its result sent back": Clients.any_tool_and_result,
    "a named tool, streamed": lambda c: (
        c.streamed_message(tools=[TOOL], tool_choice=NAMED, max_tokens=60).content[0].input["city"] in CITIES
    ),
    "`messages.parse`": lambda c: isinstance(
        c.claude.messages.parse(**c.asked(output_format=Forecast, max_tokens=100)).parsed_output, Forecast
    ),
    "`thinking`": lambda c: c.thought_of_a_message(streamed=False),
    "`thinking`, streamed": lambda c: c.thought_of_a_message(streamed=True),
    "`with_raw_response`": lambda c: bool(c.claude.messages.with_raw_response.create(**c.asked()).parse().content),
    "AsyncAnthropic, four at once and a stream": Clients.asynchronous_messages,
}
# What is asked, and the class that the client raises.
ERRORS: list[tuple[str, type[Exception], Callable[[Any], object]]] = [
    ("openai: another model", openai.NotFoundError, lambda c: c.chat(model="another")),
    ("openai: a bad `temperature`", openai.BadRequestError, lambda c: c.chat(temperature=-1)),
    ("openai: `suffix`", openai.BadRequestError, lambda c: c.complete(suffix="x")),
    ("openai: a prompt too long", openai.BadRequestError, lambda c: c.complete(prompt=LONG)),
    ("openai: no such level", openai.BadRequestError, lambda c: c.chat(extra_body={"sparsity": 0.9})),
    ("openai: an image", openai.InternalServerError, lambda c: c.chat(messages=IMAGE)),
    ("openai: `embeddings`", openai.InternalServerError, lambda c: c.client.embeddings.create(model="x", input="x")),
    ("anthropic: another model", anthropic.NotFoundError, lambda c: c.message(model="another")),
    ("anthropic: a bad `temperature`", anthropic.BadRequestError, lambda c: c.message(extra_body={"temperature": -1})),
    ("anthropic: an image", anthropic.BadRequestError, lambda c: c.message(messages=IMAGE)),
    ("anthropic: a prompt too long", anthropic.BadRequestError, lambda c: c.message(system=LONG)),
]
CALLS = {f"openai: {what}": ask for what, ask in OPENAI.items()}
CALLS |= {f"anthropic: {what}": ask for what, ask in ANTHROPIC.items()}
CALLS |= {f"{what}: {kind.__name__}": partial(raises, kind, ask) for what, kind, ask in ERRORS}


def make_bundle(model: Path, folder: Path) -> Path:
    """The model with a chat template for tools and thoughts, at 50%."""
    source, bundle = folder / "source", folder / "bundle"
    shutil.copytree(model, source)
    marked = "<|im_start|>" in (source / "tokenizer.json").read_text("utf-8")
    begin, after, end = ("<|im_start|>", "\n", "<|im_end|>") if marked else ("", ": ", "")
    template = TEMPLATE.replace("BEGIN", begin).replace("AFTER", after).replace("END", end)
    (source / "chat_template.jinja").write_text(template, "utf-8")
    convert = [sys.executable, "-m", "wisparse", "convert", str(source), "-o", str(bundle), "--sparsity", "0.5"]
    convert += ["--calibration", str(ROOT / "converter"), "--num-samples", "1", "--seq-len", "128"]
    subprocess.run([*convert, "--search", "fisher", "--rotation", "none", "-q"], check=True)
    return bundle


def outcome(ask: Callable[[Any], bool], clients: Clients) -> str:
    try:
        return "yes" if ask(clients) else "no: answered otherwise"
    except Exception as error:
        return f"no: {type(error).__name__}: {error!s:.200}"


@click.command()
@click.option("--model", type=Path, default=EXAMPLE, help="Folder of the source model.  [default: the example]")
@click.option("--out", type=Path, help="Write PATH.json and PATH.md.")
def main(model: Path, out: Path | None) -> None:
    """Print the table as Markdown; the exit code is 1 if a call fails."""
    with tempfile.TemporaryDirectory(prefix="wisparse-clients-") as folder:
        bundle = make_bundle(model, Path(folder))
        command = [sys.executable, "-m", "wisparse", "serve", str(bundle), "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        found = []
        try:
            clients = Clients(address_of(server))
            for what, ask in CALLS.items():
                began = time.perf_counter()
                answer = outcome(ask, clients)
                found.append({"call": what, "ok": answer, "milliseconds": round(1000 * (time.perf_counter() - began))})
        finally:
            server.terminate()
            server.wait(90)
    versions = {name: version(name) for name in ("wisparse", "openai", "anthropic")}
    good = sum(one["ok"] == "yes" for one in found)
    head = f"{model.name}: {good} of {len(found)} calls; {', '.join(' '.join(one) for one in versions.items())}."
    rows = [f"| {one['call']} | {one['ok']} | {one['milliseconds']} |" for one in found]
    table = "\n".join([head, "", "| call | as it has to be | ms |", "|---|---|--:|", *rows, ""])
    click.echo(table)
    if out is not None:
        out.with_suffix(".md").write_text(table, "utf-8")
        out.with_suffix(".json").write_text(json.dumps({"versions": versions, "calls": found}) + "\n", "utf-8")
    sys.exit(good < len(found))


if __name__ == "__main__":
    main()
