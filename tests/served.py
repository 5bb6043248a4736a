"""A server in a thread of the tests' own process, with its counters at hand."""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from bundle_maker import make_bundle

import wisparse
from wisparse.runtime.generation.logits import LogitsProcessor
from wisparse.runtime.serve.app import ServeSettings, make_app
from wisparse.runtime.serve.transport import http_server, open_socket
from wisparse.runtime.torch.decoder import TorchDecoder

NAME = "example"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if shout is defined %}{{ shout }}{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if think is defined %}<think>\n{% endif %}"
)


class Running:
    def __init__(self, bundle: Path, **more: Any) -> None:
        self.settings = ServeSettings(NAME, **more)
        self._listener = open_socket("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        model = wisparse.load(bundle, dtype="float32", backend="torch", max_batch=3, max_seq_len=256)
        self.text = model.tokenizer
        self._server = http_server(make_app(model, self.settings))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def client(self, key: str = "none") -> openai.OpenAI:
        # Unverified: to read the certificates takes a client a tenth of a second, and this is no TLS.
        plain = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, http_client=plain)

    def complete(self, prompt: Any, **more: Any) -> Any:
        return self.client().completions.create(model=NAME, prompt=prompt, **{"temperature": 0, **more})

    def chat(self, messages: Any, **more: Any) -> Any:
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self.client().chat.completions.create(model=NAME, messages=asked, **{"temperature": 0, **more})

    def respond(self, given: Any, **more: Any) -> Any:
        return self.client().responses.create(model=NAME, input=given, **{"temperature": 0, **more})

    def request(self, method: str, path: str, body: bytes | None = None, **more: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, **more)
        return connection.getresponse()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.request("POST", path, data, headers={"content-type": "application/json", **headers})
        return answer.status, json.loads(answer.read())

    def metric(self, name: str) -> float:
        page = self.request("GET", "/metrics").read().decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    def until(self, true: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def idle(self) -> None:
        self.until(lambda: self.metric("wisparse_running ") + self.metric("wisparse_waiting ") == 0, 30)


def hold(monkeypatch: pytest.MonkeyPatch, steps: int = 0) -> threading.Event:
    """From now on no token but an answer's first, and those of this many ``steps``, comes before the event is set."""
    go_on, decode, numbers = threading.Event(), TorchDecoder.decode, itertools.count()

    def held(self: Any, token_ids: Any) -> Any:
        assert next(numbers) < steps or go_on.wait(60)
        return decode(self, token_ids)

    monkeypatch.setattr(TorchDecoder, "decode", held)
    return go_on


def lose_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the fifth step fails, and no other."""
    decode, numbers = TorchDecoder.decode, itertools.count(1)

    def broken(self: Any, token_ids: Any) -> Any:
        if next(numbers) == 5:
            raise RuntimeError("the device is lost")
        return decode(self, token_ids)

    monkeypatch.setattr(TorchDecoder, "decode", broken)


def function(**more: Any) -> dict[str, Any]:
    """One that a model may call, as clients describe it."""
    return {"type": "function", "function": {"name": "f", **more}}


def wants(monkeypatch: pytest.MonkeyPatch, token_ids: list[int]) -> None:
    """From now on these tokens are by far the most likely of each answer with settings that change logits."""
    process, take = LogitsProcessor.process, LogitsProcessor.take
    taken: dict[int, int] = {}

    def processed(self: Any, logits: torch.Tensor) -> None:
        if (at := taken.get(id(self), 0)) < len(token_ids):
            logits[token_ids[at]] += 1000
        process(self, logits)

    def took(self: Any, token: int) -> None:
        taken[id(self)] = taken.get(id(self), 0) + 1
        take(self, token)

    monkeypatch.setattr(LogitsProcessor, "process", processed)
    monkeypatch.setattr(LogitsProcessor, "take", took)


def with_template(source: Path, folder: Path, template: str, *levels: float, special: Sequence[str] = ()) -> Path:
    """A bundle of ``source`` with another chat template; ``folder`` is empty. ``special``: tokens in place of the last ones."""
    copy = shutil.copytree(source, folder / "source")
    (copy / "chat_template.jinja").write_text(template)
    if special:
        file = copy / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
        for name, (token, index) in zip(special, list(vocabulary.items())[-len(special) :], strict=True):
            del vocabulary[token]
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokenizer["added_tokens"].append({"id": index, "content": name, "special": True, **flags})
        tokenizer["model"]["merges"] = merges[: -len(special)]
        file.write_text(json.dumps(tokenizer))
    return make_bundle(copy, folder / NAME, *(levels or (0.4,)))
