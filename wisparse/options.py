"""Argument types, options and output (tables, footers) that sub-commands share. Imports no torch."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle
from wisparse.formats.config_fields import GENERATION_CONFIG, SAMPLING_FIELDS
from wisparse.formats.errors import UsageError, printable
from wisparse.formats.guard import WANTED_BUNDLE, expand, find_folder, parse_json, place, quoted, read_bounded, shown
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.manifest import bits_of
from wisparse.formats.weight_types import DTYPES, KV_CACHE_DTYPES, NOT_DTYPES, PREFILL_POLICIES, WEIGHT_TYPES
from wisparse.kernels.backend import BACKENDS

if TYPE_CHECKING:
    from wisparse.formats.card import Finding
    from wisparse.runtime.model import Chunk, Generation, Model

_F = TypeVar("_F", bound=Callable[..., Any])

# Control characters of a model's text, which must not reach a terminal as escape sequences.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Place(click.types.StringParamType):
    """A path or a Hub id, with shell completion of files or folders."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._kind)]


class _NewFolder(click.Path):
    """The path of a new folder; refuses an empty string, such as an unset shell variable."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = max(param.opts, key=len) if param is not None else "folder"
        return expand(place(name.upper() if isinstance(param, click.Argument) else name, value))


class Dtype(click.Choice[str]):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in NOT_DTYPES:
            self.fail(f"expected {', '.join(self.choices)}; {NOT_DTYPES[value]}", param, ctx)
        return super().convert(value, param, ctx)


class TextOrFile(click.ParamType):
    """A text, or the content of a file that exists or is named behind @."""

    name = "text|@file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return read_text(value.removeprefix("@")) if value.startswith("@") or os.path.isfile(expand(value)) else value


def read_text(file: str, limit: int = 1 << 28) -> str:
    path = Path(os.path.realpath(expand(file)))
    if not os.path.exists(path):  # False also for names that are too long
        raise UsageError(f"{file:.200}: there is no such file")
    try:  # utf-8-sig removes a byte order mark
        return read_bounded(path.parent, path.name, limit, UsageError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name:.200}: not text in UTF-8: {error}") from error


class Switch(click.Choice):
    """auto, on or off, which become None, True and False."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return {"auto": None, "on": True, "off": False}[super().convert(value, param, ctx)]


class JsonObject(click.ParamType):
    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        name = f"--{param.name.replace('_', '-')}" if param and param.name else ""
        return parse_json(guard.text(name, value).encode(), name, UsageError)


class OrWord(click.ParamType):
    """A value of another type, or one of some words, which become other values."""

    def __init__(self, name: str, inner: click.ParamType, words: Mapping[str, Any]) -> None:
        self.name, self._inner, self._words = name, inner, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._words:
            return self._words[value]
        try:
            return self._inner.convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}, nor one of {', '.join(self._words)}", param, ctx)


FOLDER = FOLDER_OR_ID = _Place("dir")
FILE_OR_ID = _Place("file")
NEW_FOLDER = _NewFolder()


def stacked(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """One decorator of several click options, in this order in the help text."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def option_table(*table: tuple[str, Any, Any, str]) -> Callable[[_F], _F]:
    """Options by name, with the parameter's name behind it if it is another one, type, default and help text."""
    options = (click.option(*n.split(), type=t, default=d, show_default=True, help=text) for n, t, d, text in table)
    return stacked(*options)


revision_option = click.option("--revision", help="Branch, tag or commit of a bundle on the Hub.")
_SAVE = "Also write the results into the bundle: to its report and its model card."
save_option = click.option("--save", is_flag=True, help=_SAVE)

_BACKEND = "Implementation of the model; auto is the fastest that supports this model on this machine."
_KV_CACHE = "Type of the KV cache. One-byte types halve it; of these, int8 costs the least quality."
_PREFILL = "Which tokens of the prompt are sparse: none, the last half, all. Those of the answer always are."
_OF_MODEL = f"the model's {GENERATION_CONFIG}, else greedy"
_TEMPERATURE = f"0 is greedy decoding.  [default of this and the next four: {_OF_MODEL}]"
_TOP_P = "Sample from the most likely tokens that together have this probability."
_MIN_P = "Drop tokens below this fraction of the highest probability."
_PENALTY = "Above 1: makes tokens of prompt and answer less likely; 1 is off."
_N = "Answers to a prompt; of several, at temperature 1 unless told otherwise, the chat goes on with the first."
_LOGPROBS = "Print the log-probability of each token, and the N most likely at its place."
_THINKING = "Thoughts of a reasoning model, by its chat template's switch; auto is the template's default."
_LENGTH = "Most tokens of prompt and answer together.  [default: the model's context, if memory allows]"
_LEVEL = "A sparsity level of the bundle, as inspect lists them, or 0 for the dense model.  [default: the bundle's own]"
_BITS = "A level of a graded bundle: the bits read of a weight, or 8 for the dense model.  [default: the bundle's own]"

_WEIGHTS = (
    "Quantize the weights at load, if the back end supports it.  "
    "[default: by --max-kl where the bundle has a table, else native]"
)
_MAX_KL = (
    "Choose the fastest weight type and level with at most this KL, by the bundle's quality table and a measurement of a "
    "second; auto is 0.05 or $WISPARSE_MAX_KL, off the bundle's default level. --weights, --sparsity and --bits win."
)


_KL = OrWord("kl", click.FloatRange(0, 1e9), {"auto": "auto", "off": None})
max_kl_option = option_table(("--max-kl", _KL, "auto", _MAX_KL))

# Where and how a bundle runs.
device_options = stacked(
    option_table(
        ("--device", str, "auto", "auto, cpu, cuda or cuda:N."),
        ("--dtype", Dtype(["auto", *DTYPES]), "auto", "Type of the weights in memory; auto is that of the files."),
        ("--backend", click.Choice(["auto", *BACKENDS]), "auto", _BACKEND),
        ("--weights", click.Choice(WEIGHT_TYPES), None, _WEIGHTS),
        ("--kv-cache-dtype", click.Choice(KV_CACHE_DTYPES), "auto", _KV_CACHE),
        ("--sparsity", float, None, _LEVEL),
        ("--bits", float, None, _BITS),
        ("--max-seq-len", click.IntRange(min=1), None, _LENGTH),
    ),
    revision_option,
    click.option("-v", "--verbose", is_flag=True, help="Print which back end was chosen, and why."),
)

# The same for sub-commands that generate text, with a prefill policy.
loading_options = stacked(
    device_options,
    max_kl_option,
    option_table(("--prefill", click.Choice(PREFILL_POLICIES), "dense", _PREFILL)),
)

_SPECULATIVE = (
    'Speculative decoding, as JSON with keys as in vLLM. Drafts by prompt lookup: {"method": "ngram"}; by an EAGLE-3 head: '
    '{"method": "eagle3", "model": PATH_OR_ID}; by the MTP head in a bundle of Qwen3.5: {"method": "mtp"}. '
    "auto is ngram if that changes no token; or off."
)


def speculative_option(default: str) -> Callable[[_F], _F]:
    kind = OrWord("json", click.STRING, {"off": None})
    return option_table(("--speculative-config speculative", kind, default, _SPECULATIVE))


sampling_options = stacked(
    option_table(
        ("--max-new-tokens", click.IntRange(min=1), 256, "Longest answer, in tokens."),
        ("--temperature", click.FloatRange(min=0), None, _TEMPERATURE),
        ("--top-k", click.IntRange(min=0), None, "Sample from the K most likely tokens; 0: from all."),
        ("--top-p", click.FloatRange(min=0, max=1, min_open=True), None, _TOP_P),
        ("--min-p", click.FloatRange(min=0, max=1), None, _MIN_P),
        ("--repetition-penalty", click.FloatRange(0, 100, min_open=True), None, _PENALTY),
        ("--seed", click.IntRange(min=0), None, "Seed of the sampling.  [default: a random one]"),
        ("--n", click.IntRange(1, 64), 1, _N),
        ("--logprobs", click.IntRange(0, 100), None, _LOGPROBS),
        ("--json-schema", TextOrFile(), None, "The answer is JSON of this schema: its text, or @FILE."),
        ("--grammar", TextOrFile(), None, "The answer follows this grammar, Lark or GBNF: its text, or @FILE."),
    ),
    click.option("--stop", multiple=True, help="Stop before this text; may be given several times."),
    click.option("--system-prompt", help="System message, for models with a chat template."),
)


thinking_options = stacked(
    option_table(
        ("--thinking", Switch(["auto", "on", "off"]), "auto", _THINKING),
        ("--thinking-budget", click.IntRange(min=0), None, "Most tokens of a thought; then its end is forced."),
        ("--reasoning-effort", str, None, "For chat templates that read it, such as low, medium and high of gpt-oss."),
        ("--chat-template-kwargs", JsonObject(), None, "Further variables of the chat template, as JSON."),
    ),
)

_TEMPLATE = (
    "Use the chat template, or the model's template of this name.  "
    "[default: the template, for a text if it ends an answer with a token the model stops at]"
)
_NAMED: dict[str, Any] = {"is_flag": False, "flag_value": "default", "metavar": "[NAME]"}
template_option = click.option("--chat-template", help=_TEMPLATE, **_NAMED)


def open_bundle(bundle: str, revision: str | None, sparsity: float | None, bits: float | None = None) -> Bundle:
    """The bundle at its default level or the one given. Call it before importing torch, so that errors come early."""
    return Bundle.open(fetch_bundle(bundle, revision)).chosen(sparsity, bits)


def max_kl_of(options: dict[str, Any]) -> float | None:
    """`load`'s max_kl; None if the options name a level."""
    from wisparse.runtime.choice import auto_max_kl

    if options["sparsity"] is not None or options["bits"] is not None:
        return None
    return auto_max_kl() if options["max_kl"] == "auto" else options["max_kl"]


def load_model(bundle: str, options: dict[str, Any], max_batch: int = 1) -> Model:
    """The bundle loaded with `loading_options`, which are removed from ``options``; the others are validated first."""
    options["max_kl"] = max_kl_of(options)
    opened = open_bundle(bundle, *(options.pop(name) for name in ("revision", "sparsity", "bits")))
    from wisparse.runtime.backends import load
    from wisparse.runtime.generation.request import GenerationSettings

    loading = ("device", "dtype", "backend", "weights", "prefill", "max_seq_len", "kv_cache_dtype", "max_kl")
    load_options = {name: options.pop(name) for name in (*loading, "speculative")}
    GenerationSettings(**{name: value for name, value in options.items() if value is not None})
    return load(opened, max_batch=max_batch, **load_options)


def set_up_logging(verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


def show(text: str, *, dim: bool = False) -> None:
    """Print a model's text; on a terminal, control characters are printed as escapes."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    click.secho(text, nl=False, dim=dim or None, reset=dim)  # flushes


class AnswerPrinter:
    """Prints a streamed answer; before it, on a terminal only, the thought, dim."""

    def __init__(self, thoughts: bool = True) -> None:
        self._thoughts, self._thinking = thoughts and sys.stdout.isatty(), False

    def show(self, chunks: Iterable[Chunk]) -> str:
        """Print some chunks; returns their text without the thought."""
        added = ""
        for chunk in chunks:
            if chunk.thought and self._thoughts:
                self._thinking = True
                show(chunk.thought, dim=True)
            if chunk.text and self._thinking:
                self._thinking = False
                show("\n\n")
            show(chunk.text)
            added += chunk.text
        return added


def backend_of(model: Model) -> str:
    decoder = model.decoder
    return f"{decoder.name} on {decoder.device}, {str(decoder.dtype).removeprefix('torch.')}"


def describe_sampling(model: Model, given: dict[str, Any]) -> str:
    """The sampling settings of an answer with these arguments, and which of them generation_config.json set."""
    used = model.sampling(given, given.get("n", 1))
    greedy = used["temperature"] == 0
    parts: dict[bool, list[str]] = {False: [], True: []}  # by whether the file set it
    for name in SAMPLING_FIELDS:
        value = used.get(name)
        if value is None or (greedy and name in ("top_k", "top_p", "min_p")):
            continue
        text = f"{len(value)} {name}" if isinstance(value, (list, tuple)) else f"{name} {value:g}"
        from_file = name in model.sampling_defaults and given.get(name) is None
        parts[from_file].append("greedy" if greedy and name == "temperature" else text)
    texts = ", ".join(parts[False]), f"{', '.join(parts[True])} ({GENERATION_CONFIG})" if parts[True] else ""
    return "; ".join(filter(None, texts))


def score_lines(answers: Sequence[Generation], model: Model) -> Iterable[str]:
    """A line for each token of answers with log-probabilities: itself, its log-probability, the most likely ones."""

    def spell(token: int) -> str:
        return str(token) if model.text is None else repr(model.text.token_bytes(token).decode("utf-8", "replace"))

    for answer in answers:
        for score in answer.scores or ():
            top = ", ".join(f"{spell(token)} {math.exp(logprob):.1%}" for token, logprob in score.top)
            yield printable(f"{spell(score.token_id):<20} {score.logprob:8.3f}  {top}".rstrip())


def footer(answer: Generation, model: Model, given: dict[str, Any]) -> str:
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
    if not answer.thought_closed:
        parts.append("the thought did not end, so there is no answer")
    if model.choice is not None:
        parts.append(str(model.choice))
    return " | ".join([*parts, f"sampling: {describe_sampling(model, given)}", backend_of(model)])


def folders_to_save(bundles: Sequence[str], sparsity: float | None, bits: float | None = None) -> list[Path]:
    """The bundles' folders, for `save_to`; UsageError, before any measurement, if they cannot be written."""
    from wisparse.formats.card import check_amendable

    if sparsity == 0 or bits == 8:
        found = "--bits 8" if bits else "--sparsity 0"
        raise UsageError(f"--save: expected a sparsity level, found {found}, which is the dense model")
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


def with_error(value: float, error: float | None, form: str) -> str:
    """A value and its standard error, which is NaN for a single sequence."""
    known = error is not None and math.isfinite(error)
    return f"{value:{form}} ± {error:{form}}" if known else f"{value:{form}}"


def print_rows(title: str, rows: Iterable[tuple[str, str | None]]) -> None:
    """A table of names and values, without rows of empty values; at least 100 columns wide unless on a terminal."""
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
    """A table whose first ``left`` columns are text and the others numbers, with a note below it. Unless on a terminal,
    it is as wide as needed to wrap no number."""
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
