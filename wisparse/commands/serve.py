"""``wisparse serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path
from typing import Any

import click

from wisparse.formats.errors import UsageError
from wisparse.formats.guard import expand, shown

from .. import options as shared

_KEY = "WISPARSE_API_KEY"
# As browsers send it: a scheme, a host and perhaps a port, no path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@?#]+")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]|\*")
_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


class BatchSize(click.IntRange):
    """``auto``, which becomes None, or a number."""

    name = "auto|integer"

    def __init__(self) -> None:
        super().__init__(1, 64)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto":
            return None
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"expected auto or a number from {self.min} to {self.max}, found {value!r:.40}", param, ctx)


_ALLOWED = (
    "Host name that clients may use, beside localhost, 127.0.0.1 and [::1]; * for any; may be given several times.  "
    "[default: none on a loopback address, else any]"
)
_BATCH = "Requests in a batch: 1 to 64, or as many as fit in memory, up to 32 (8 on a CPU)."
_MEMORY = "Memory of the KV cache.  [default: 70% of what is free beside the weights, on a CPU a quarter]"
_CHECKPOINTS = (
    "Most copies of recurrent states kept for prompts that begin alike.  "
    "[default: 8 a request, in a quarter of the cache]"
)
_KEY_FILE = f"File with the API key that clients have to send.  [default: the variable {_KEY}, else none]"


@click.command("serve")
@click.argument("bundle", type=shared.FOLDER_OR_ID)
@shared.option_table(
    ("--host", str, "127.0.0.1", "Address to listen at; 0.0.0.0: all interfaces."),
    ("--port", click.IntRange(0, 65535), 8000, "0: any free port."),
    ("--alias", str, None, "Name of the model in requests and responses.  [default: the folder's, or the Hub id]"),
    ("--max-batch", BatchSize(), "auto", _BATCH),
    ("--kv-cache-memory-bytes", click.IntRange(min=1), None, _MEMORY),
    ("--state-checkpoints", click.IntRange(min=0), None, _CHECKPOINTS),
    ("--prompt-cache", str, None, "Folder to keep cached prompts in while the server is stopped."),
    ("--prompt-cache-bytes", click.IntRange(min=1), 4 << 30, "Most bytes in the folder of --prompt-cache."),
    ("--max-queue", click.IntRange(0, 100_000), 64, "Requests that may wait; more are refused (429)."),
    ("--api-key-file", click.Path(exists=True, dir_okay=False), None, _KEY_FILE),
)
@click.option("--allowed-host", "hosts", multiple=True, help=_ALLOWED)
@shared.speculative_option("auto")
@click.option("--cors", multiple=True, help="Origin whose pages may send requests, * for any; can be repeated.")
@shared.template_option
@shared.loading_options
def command(
    bundle: str, host: str, port: int, alias: str | None, prompt_cache: str | None, prompt_cache_bytes: int,
    max_queue: int, api_key_file: str | None, hosts: tuple[str, ...], cors: tuple[str, ...], chat_template: str | None,
    verbose: bool, **loading: Any,
) -> None:  # fmt: skip
    """Serve BUNDLE, a folder or a Hub id, over HTTP, with OpenAI's and Anthropic's APIs.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /health, /metrics; a chat
    page at / and the fields of requests at /docs. Ctrl-C or SIGTERM stops it when the running requests are finished.

    \b
    wisparse serve out
    wisparse serve USER/NAME --port 8080 --max-batch 8 --alias my-model
    """
    shared.set_up_logging(verbose)
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise UsageError('the server needs more packages: pip install ".[serve]" in a clone of wisparse')
    key = read_api_key(api_key_file)
    name = alias if alias is not None else Path(bundle).resolve().name if os.path.isdir(bundle) else bundle
    if not name.strip() or not name.isprintable():
        raise UsageError(f"--alias: expected a name, found {name!r:.80}")
    for origin in cors:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors: expected * or an origin as http://localhost:3000, found {origin!r:.80}")
    for allowed in hosts:
        if not _HOST.fullmatch(allowed):
            raise UsageError(f"--allowed-host: expected * or a host name without a port, found {allowed!r:.80}")
    loading["max_kl"] = shared.max_kl_of(loading)
    opened = shared.open_bundle(bundle, *(loading.pop(name) for name in ("revision", "sparsity", "bits")))
    from wisparse.runtime.backends import load
    from wisparse.runtime.serve.app import ServeSettings, serve
    from wisparse.runtime.serve.transport import allowed_hosts, open_socket

    with open_socket(host, port) as listener:
        settings = ServeSettings(name, max_queue, key, allowed_hosts(listener, hosts), cors)
        model = load(opened, **loading)
        if chat_template is not None:
            model.tokenizer.select_template(chat_template)
        prompts = None
        if prompt_cache is not None:
            from wisparse.runtime.generation.prompt_files import PromptFolder

            prompts = PromptFolder(Path(expand(prompt_cache)), model.engine.scheduler, model.bundle, prompt_cache_bytes)
        address = f"[{host}]" if ":" in host else host
        decoder = model.decoder
        serving = (
            f"{decoder.name} on {decoder.device}, {decoder.max_batch} requests at a time, context {model.max_seq_len}\n"
            f"KV cache {decoder.cache}; {'an' if key else 'no'} API key\n"
            f"{f'{model.choice}{chr(10)}' if model.choice else ''}sampling: {shared.describe_sampling(model, {})}\n"
            f"serving {name} at http://{address}:{listener.getsockname()[1]}/v1 (Ctrl-C stops it)"
        )
        if decoder.device.type == "cuda":
            # `serve` compiles kernels and captures graphs first.
            click.echo("preparing all batch sizes; the first time on a machine this may take a minute", err=True)
        try:
            serve(model, settings, listener, lambda: click.echo(serving, err=True))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # No traceback from the interpreter's shutdown.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if prompts is not None and not model.engine.closed:
            model.engine.call(prompts.save)


def read_api_key(file: str | None) -> str | None:
    where, key = (_KEY, os.environ.get(_KEY)) if file is None else (shown(file), shared.read_text(file, 4096))
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isprintable() or not key.isascii():
        raise UsageError(f"{where}: expected a key of printable ASCII letters, found none or others")
    return key
