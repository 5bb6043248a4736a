"""A server in a thread of the tests' own process, with its counters at hand."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any

import openai
from bundle_maker import make_bundle

import wisparse
from wisparse.runtime.serve.app import ServeSettings
from wisparse.runtime.serve.server import http_server, make_app, open_socket

NAME = "example"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if shout is defined %}{{ shout }}{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if think is defined %}<think>\n{% endif %}"
)


class Running:
    """A server in a thread of this process."""

    def __init__(self, bundle: Path, **more: Any) -> None:
        self.settings = ServeSettings(NAME, port=0, **more)
        self._listener = open_socket(self.settings)
        self.port = self._listener.getsockname()[1]
        model = wisparse.load(bundle, dtype="float32", backend="torch", max_batch=3, max_seq_len=256)
        self.text = model.tokenizer
        self._server = http_server(make_app(model, self.settings))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, data, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        return answer.status, found

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    def idle(self) -> None:
        """Wait until nothing runs and nothing waits."""
        deadline = time.monotonic() + 30
        while self.metric("wisparse_running ") + self.metric("wisparse_waiting "):
            assert time.monotonic() < deadline, "a request is still there"
            time.sleep(0.02)


def with_template(source: Path, folder: Path, template: str, *levels: float) -> Path:
    """A bundle of ``source`` with another chat template; ``folder`` is empty."""
    copy = folder / "source"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "chat_template.jinja").write_text(template)
    return make_bundle(copy, folder / NAME, *(levels or (0.4,)))
