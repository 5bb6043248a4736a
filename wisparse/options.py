"""Types of arguments, options that verbs share, and what they print: tables, and lines beside the text. Imports no torch."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError, printable
from wisparse.formats.guard import WANTED_BUNDLE, expand, find_folder, place, quoted, shown
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.manifest import bits_of
from wisparse.formats.weight_types import DTYPES, KV_CACHE_DTYPES, NOT_DTYPES, PREFILL_POLICIES, WEIGHT_TYPES
from wisparse.kernels.backend import BACKENDS

if TYPE_CHECKING:
    from wisparse.formats.card import Finding
    from wisparse.runtime.model import Generation, Model

_F = TypeVar("_F", bound=Callable[..., Any])

# Text of a model may hold escape sequences; on a terminal none of them is obeyed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Place(click.types.StringParamType):
    """A path or a Hub id; the shell completes names of files or folders."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._kind)]


class _NewFolder(click.Path):
    """A folder to be made: a path, and never the current folder because a variable was empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = max(param.opts, key=len) if param is not None else "folder"
        return expand(place(name.upper() if isinstance(param, click.Argument) else name, value))


class Dtype(click.Choice[str]):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in NOT_DTYPES:
            self.fail(f"expected {', '.join(self.choices)}; {NOT_DTYPES[value]}", param, ctx)
        return super().convert(value, param, ctx)


class Speculative(click.ParamType):
    """JSON as it stands, ``auto``, or ``off``, which becomes None."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        return None if value == "off" else value


FOLDER = FOLDER_OR_ID = _Place("dir")
FILE_OR_ID = _Place("file")
NEW_FOLDER = _NewFolder()


def stacked(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several click options as one decorator, in this order in the help text."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def option_table(*table: tuple[str, Any, Any, str], show_default: bool = True) -> Callable[[_F], _F]:
    options = (click.option(n, type=t, default=d, show_default=show_default, help=text) for n, t, d, text in table)
    return stacked(*options)


revision_option = click.option("--revision", help="Branch, tag or commit of a bundle on the Hub.")
_SAVED = "Write what was found into the bundle as well: its report and its model card."
save_option = click.option("--save", is_flag=True, help=_SAVED)

_LENGTH = "Tokens that prompt and answer may have together.  [default: the model's context, if memory allows]"
_LEVEL = "A sparsity level of the bundle, as inspect lists them, or 0 for the dense model.  [default: the bundle's own]"
_BITS = "A level of a graded bundle: the bits read of a weight, or 8 for the dense model.  [default: the bundle's own]"

# Where and how a bundle runs.
device_options = stacked(
    option_table(
        ("--device", str, "auto", "auto, cpu, cuda or cuda:N."),
        ("--dtype", Dtype(["auto", *DTYPES]), "auto", "Type of the weights in memory; auto is that of the files."),
        ("--backend", click.Choice(["auto", *BACKENDS]), "auto",
         "What multiplies; auto is the fastest that can run this model here."),
        ("--weights", click.Choice(WEIGHT_TYPES), "native", "Round the weights at load, where the back end can."),
        ("--kv-cache-dtype", click.Choice(KV_CACHE_DTYPES), "auto",
         "Keys and values in a byte a number, which halves the cache; int8 costs the least quality."),
        ("--sparsity", float, None, _LEVEL),
        ("--bits", float, None, _BITS),
        ("--max-seq-len", click.IntRange(min=1), None, _LENGTH),
    ),
    revision_option,
    click.option("-v", "--verbose", is_flag=True, help="Say which back end was chosen and why."),
)  # fmt: skip

# The same for the verbs that generate text, which follow one prefill policy.
loading_options = stacked(
    device_options,
    option_table(
        ("--prefill", click.Choice(PREFILL_POLICIES), "dense",
         "Which part of the prompt runs sparse: none, the last half, all. The answer always does."),
    ),
)  # fmt: skip

_SPECULATIVE = (
    'Verify several tokens at a time where the text repeats itself: {"method": "ngram"} and further keys as vLLM has them, '
    'drafts of an EAGLE-3 head: {"method": "eagle3", "model": PATH_OR_ID}, or of the one in a bundle of Qwen3.5: {"method": "mtp"}; '
    "auto (ngram, where that changes no token), or off."
)


def speculative_option(default: str) -> Callable[[_F], _F]:
    return option_table(("--speculative-config", Speculative(), default, _SPECULATIVE))


sampling_options = stacked(
    option_table(
        ("--max-new-tokens", click.IntRange(min=1), 256, "Longest answer, in tokens."),
        ("--temperature", click.FloatRange(min=0), 0.0, "0 is greedy decoding."),
    ),
    option_table(
        ("--top-k", click.IntRange(min=0), 0, "Sample from the K likeliest tokens."),
        ("--top-p", click.FloatRange(min=0, max=1, min_open=True), 1.0,
         "Sample from the likeliest tokens that reach this probability together."),
        ("--min-p", click.FloatRange(min=0, max=1), 0.0, "Drop tokens below this share of the likeliest one's probability."),
        ("--seed", click.IntRange(min=0), None, "Repeat a sampled answer.  [default: a fresh one]"),
        show_default=False,  # 0 and 1 leave the step out
    ),
    click.option("--stop", multiple=True, help="End before this text; may be given several times."),
    click.option("--system-prompt", help="The system's message, for models with a chat template."),
)  # fmt: skip


def open_bundle(bundle: str, revision: str | None, sparsity: float | None, bits: float | None = None) -> Bundle:
    """The bundle at its default level or another; meant for before torch is imported, which takes seconds."""
    return Bundle.open(fetch_bundle(bundle, revision)).chosen(sparsity, bits)


def load_model(bundle: str, options: dict[str, Any], max_batch: int = 1) -> Model:
    """The bundle, loaded as `loading_options` say; what is left in ``options`` is of the answers, and checked first."""
    opened = open_bundle(bundle, *(options.pop(name) for name in ("revision", "sparsity", "bits")))
    from wisparse.runtime.backends import load
    from wisparse.runtime.generation.request import GenerationSettings

    loading = ("device", "dtype", "backend", "weights", "prefill", "max_seq_len", "kv_cache_dtype")
    given = {name: options.pop(name) for name in loading}
    given["speculative"] = options.pop("speculative_config")
    GenerationSettings(**options)
    return load(opened, max_batch=max_batch, **given)


def set_up_logging(verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


def show(text: str) -> None:
    """Print a model's text as it comes; on a terminal control characters are spelled out."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    click.echo(text, nl=False)  # which flushes


def backend_of(model: Model) -> str:
    decoder = model.decoder
    return f"{decoder.name} on {decoder.device}, {str(decoder.dtype).removeprefix('torch.')}"


def footer(answer: Generation, model: Model) -> str:
    cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens else ""
    parts = [
        f"prompt {answer.prompt_tokens} tokens{cached}, {answer.prompt_tok_per_s:,.1f} tok/s",
        f"generation {len(answer.token_ids)} tokens, {answer.generation_tok_per_s:,.1f} tok/s",
        f"peak memory {answer.peak_memory_bytes / 1e9:.2f} GB",
    ]
    if answer.realised_sparsity is not None:
        read = f"{bits_of(answer.realised_sparsity):.2f} bits a weight read"
        parts.append(f"realised sparsity {answer.realised_sparsity:.1%}" if model.bits is None else read)
    if answer.drafts.drafts:
        parts.append(str(answer.drafts))
    return " | ".join([*parts, backend_of(model)])


def folders_to_save(bundles: Sequence[str], sparsity: float | None, bits: float | None = None) -> list[Path]:
    """The bundles' folders, for `save_to`; refused before the work if nothing can be written there."""
    from wisparse.formats.card import check_amendable

    if sparsity == 0 or bits == 8:
        found = "--bits 8" if bits else "--sparsity 0"
        raise UsageError(f"--save: expected a sparsity level to tell of, found {found}, which is the dense model")
    folders = []
    for bundle in bundles:
        if (folder := find_folder(bundle, WANTED_BUNDLE)) is None:
            raise UsageError(f"--save: expected a bundle's folder, found {quoted(bundle)}: download it first")
        check_amendable(folder)
        folders.append(folder)
    return folders


def save_to(folder: Path, findings: Iterable[Finding]) -> None:
    from wisparse.formats.card import save_findings

    save_findings(folder, findings)
    click.echo(f"saved in {shown(folder)}: conversion_report.json and README.md", err=True)


def print_rows(title: str, rows: Iterable[tuple[str, str | None]]) -> None:
    """A table of names and the values that there are, at least 100 columns wide where the output is no terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, printable(value))
    _show(table, 100)


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: int = 1, note: str = ""
) -> None:
    """A table whose first ``left`` columns are text and whose others are figures, and a note below it. Where the output
    is no terminal it is as wide as it has to be, so that no figure is broken in two."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < left else "right", no_wrap=index < left)
    for row in rows:
        table.add_row(*row)
    _show(table, 1000, note)


def _show(table: Any, width: int, note: str = "") -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, width)
    console.print(table)
    if note:
        console.print(note)
