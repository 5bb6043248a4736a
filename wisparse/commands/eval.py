"""``wisparse eval``: what the sparsity costs, on text and on tasks, dense and sparse side by side."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.formats.guard import place
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.weight_types import PREFILL_POLICIES

from ..options import FILE_OR_ID, FOLDER_OR_ID, device_options, set_up_logging
from . import saving

if TYPE_CHECKING:
    from wisparse.converter.documents import CalibrationTokens
    from wisparse.converter.evaluation import Quality
    from wisparse.converter.processes import Progress
    from wisparse.runtime.model import Model


_OF_TASKS = ("include_path", "num_fewshot", "limit", "apply_chat_template", "confirm_run_unsafe_code")
_QUESTIONS = "num_questions"  # as `evaluate_tasks` says it; its module needs the harness


@click.command("eval")
@click.argument("bundles", type=FOLDER_OR_ID, metavar="BUNDLE...", nargs=-1, required=True)
@click.option("--compare", is_flag=True, help="One table over several bundles, on the same tokens.")
@click.option(
    "--text",
    "texts",
    type=FILE_OR_ID,
    multiple=True,
    metavar="PATH|HUB_ID",
    help="Evaluate on a file, a folder or a data set; may be given several times.  "
    "[default: self, text that the model writes, unless --tasks is given]",
)
@click.option("--num-samples", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences of the text.")
@click.option("--seq-len", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of a sequence.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, help="Which part of the text.")
@click.option(
    "--prefill",
    "policies",
    type=click.Choice(PREFILL_POLICIES),
    multiple=True,
    help="Which tokens of a text or prompt are sparse: none, the last half, all; may be given several times.  "
    "[default: half and all for texts, half for tasks]",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="Run tasks of lm-evaluation-harness, or those that ship with this: interpreter_lines, interpreter_chains, "
    "greedy_loops.",
)
@click.option("--include-path", type=FOLDER_OR_ID, multiple=True, metavar="DIR", help="Folder with further YAML tasks.")
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Solved examples per question.  [default: the task's]")
@click.option("--limit", type=click.IntRange(1, 2**63 - 1), help="At most so many questions per task.")
@click.option("--apply-chat-template", is_flag=True, help="Put the tasks' prompts through the chat template.")
@click.option(
    "--confirm-run-unsafe-code", is_flag=True, help="Allow tasks that run code the model writes (humaneval) here."
)
@saving.save_option
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(
    bundles: tuple[str, ...],
    compare: bool,
    texts: tuple[str, ...],
    num_samples: int,
    seq_len: int,
    seed: int,
    policies: tuple[str, ...],
    tasks: str | None,
    save: bool,
    verbose: bool,
    revision: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the quality of BUNDLE, a folder or a Hub id, against its dense self: the same bundle with its masks off.

    On text: KL(dense || sparse) in nats per token, perplexity, top-1 agreement and realised sparsity, over the tokens
    that ran sparse and, of the KL, over all, at every sparsity that the bundle holds or at --sparsity. With
    --weights int8 all of it against the weights as they are: rounding alone, masks alone, and both. On tasks: the
    harness's metrics, at one sparsity; --save keeps them on the bundle's model card.

    \b
    wisparse eval out
    wisparse eval out --text corpus.txt --prefill half --prefill all
    wisparse eval --compare out-40 out-50 out-60 --text corpus/
    wisparse eval out --text corpus.txt --sparsity 0.3
    wisparse eval out --text corpus.txt --weights int8
    wisparse eval out --tasks gsm8k,mmlu
    wisparse eval out --tasks interpreter_chains --sparsity 0.4 --save
    """
    set_up_logging(verbose)
    for text in texts:
        place("--text", text)
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    # The harness warns about what it does anyway, the Hub's client at every retry; the failure itself is said.
    for library in ("lm_eval", "huggingface_hub") if names else ():
        logging.getLogger(library).setLevel(logging.INFO if verbose else logging.ERROR)
    if tasks is not None:
        _check_tasks(names)
    else:
        for option in _OF_TASKS:
            if options[option] not in (None, ()) and options[option] is not False:
                raise UsageError(f"--{option.replace('_', '-')} belongs to --tasks, and there are none")
        if save:
            raise UsageError("--save keeps what --tasks found, and there are none")
    if len(bundles) > 1 and not compare:
        raise UsageError(f"found {len(bundles)} bundles: add --compare for one table over them, or give one")
    task_options = {key: options.pop(key) for key in _OF_TASKS}
    to_save = saving.folders_to_save(bundles, options["sparsity"]) if save else []
    folders = [fetch_bundle(bundle, revision) for bundle in bundles]
    opened = [Bundle.open(folder) for folder in folders]
    if options["sparsity"] is not None:
        opened = [bundle.at(options["sparsity"]) for bundle in opened]
    from wisparse.converter.processes import Progress

    progress = Progress()
    tokens = None
    if texts or not names:
        _check_comparable(opened)
        tokens = _read_text(opened[0], texts or ("self",), num_samples, seq_len, seed, options["device"], progress)
    rows = []
    for given, folder, bundle in zip(bundles, folders, opened, strict=True):
        in_force = bundle.sparsity
        # Texts are quick: of every sparsity level, unless one is asked for. Tasks are not.
        found: dict[float, dict[str, Any]] = {in_force: {}}
        if tokens is not None:
            levels = bundle.recipe.sparsities if options["sparsity"] is None else (in_force,)
            found = _on_text(folder, bundle, levels, tokens, policies or ("half", "all"), options, progress)
        if names:
            found[in_force] |= _on_tasks(folder, names, policies or ("half",), options, {**task_options, "seed": seed})
        facts = {"bundle": given, "base_model": bundle.recipe.base_model, "method": bundle.recipe.method}
        rows += [{**facts, "sparsity": level, **row} for level, row in found.items()]
    document = {"text": None if tokens is None else _text_facts(tokens), "bundles": rows}
    if as_json:
        click.echo(json.dumps(_plain(document), indent=2))
    else:
        _print_tables(document)
    for folder, row in zip(to_save, [row for row in rows if "tasks" in row], strict=True) if save else ():
        saving.save(folder, saving.task_findings(row))


# ---------------------------------------------------------------------- text


def _check_comparable(bundles: Sequence[Bundle]) -> None:
    first = bundles[0]
    for other in bundles[1:]:
        if other.read_bytes("tokenizer.json") != first.read_bytes("tokenizer.json"):
            raise UsageError(
                f"--compare: {other.folder.name} and {first.folder.name} have different tokenizers, so no token is the "
                "same in both; compare bundles of one model"
            )


def _read_text(
    bundle: Bundle, texts: Sequence[str], num_samples: int, seq_len: int, seed: int, device: str, progress: Progress
) -> CalibrationTokens:
    """The evaluation tokens, made as calibration tokens are, with another seed."""
    from wisparse.converter.calibration import load_calibration
    from wisparse.converter.source import load_source, load_tokenizer

    limit = bundle.config.max_position_embeddings
    if seq_len > limit:
        raise UsageError(f"--seq-len {seq_len}: the model's context has {limit} tokens")
    if list(texts) != ["self"]:
        tokenizer = load_tokenizer(bundle.folder)
        return load_calibration(texts, tokenizer, None, num_samples, seq_len, seed, progress)
    # A bundle is a dense checkpoint too, and the dense model is the one to write.
    source = load_source(bundle.folder, device=device, bundle=True)
    return load_calibration("self", source.tokenizer, source.model, num_samples, seq_len, seed, progress)


def _on_text(
    folder: Any,
    bundle: Bundle,
    levels: Sequence[float],
    tokens: CalibrationTokens,
    policies: Sequence[str],
    options: Mapping[str, Any],
    progress: Progress,
) -> dict[float, dict[str, Any]]:
    """Sparsity level -> its row, of one bundle that is loaded once."""
    from wisparse.converter.evaluation import evaluate_text, same_text
    from wisparse.runtime.backends import load

    warning = same_text(tokens.digest, tokens.source, tokens.seed, bundle.recipe.calibration)
    if warning is not None:
        click.echo(f"warning: {folder.name}: {warning}; the figures flatter the bundle", err=True)
    wanted = {**options, "max_seq_len": options["max_seq_len"] or tokens.seq_len}
    if wanted["max_seq_len"] < tokens.seq_len:
        raise UsageError(f"--max-seq-len {wanted['max_seq_len']} is below --seq-len {tokens.seq_len}")
    asked, weights, ids = list(dict.fromkeys(policies)), options["weights"], tokens.input_ids
    wanted["sparsity"] = levels[0]
    rows: dict[float, dict[str, Any]] = {}
    with ExitStack() as loaded:
        model = loaded.enter_context(load(folder, **wanted))
        plain = model if weights == "native" else loaded.enter_context(load(folder, **{**wanted, "weights": "native"}))
        passes = len(levels) if plain is model else 1 + 2 * len(levels)
        stage = loaded.enter_context(progress.stage("Evaluating", passes * tokens.num_samples))
        ours, dense = model.decoder, plain.decoder
        rounded = None
        if plain is not model:
            rounded = evaluate_text(
                lambda some, _: ours.logits(some, len(some)), ids, asked, reference=dense.logits, advance=stage.advance
            )
        for level in levels:
            model.sparsity = plain.sparsity = level
            row = {"backend": _backend(model), "weights": weights, "warning": warning}
            both = evaluate_text(ours.logits, ids, asked, reference=dense.logits, counter=ours, advance=stage.advance)
            if rounded is not None:
                masked = evaluate_text(dense.logits, ids, asked, counter=dense, advance=stage.advance)
                row["alone"] = {weights: rounded, "masks": masked}
            rows[level] = {**row, "quality": both}
    return rows


def _text_facts(tokens: CalibrationTokens) -> dict[str, Any]:
    return {
        "source": tokens.source,
        "num_samples": tokens.num_samples,
        "seq_len": tokens.seq_len,
        "seed": tokens.seed,
        "digest": tokens.digest,
    }


# ---------------------------------------------------------------------- tasks


def _check_tasks(names: Sequence[str]) -> None:
    if not names:
        raise UsageError("--tasks: expected names, separated by commas")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("--tasks needs lm-evaluation-harness: pip install 'wisparse[eval]'")


def _on_tasks(
    folder: Any,
    names: Sequence[str],
    policies: Sequence[str],
    options: Mapping[str, Any],
    task_options: Mapping[str, Any],
) -> dict[str, Any]:
    """Metrics with masks off and under each policy."""
    from wisparse.runtime.backends import load
    from wisparse.runtime.generation.scheduler import Stats
    from wisparse.runtime.lm_eval import evaluate_tasks

    results = {}
    tallies: dict[str, Stats] = {}

    def run(name: str, some: Model, policy: str) -> None:
        tallies[name] = Stats()
        results[name] = evaluate_tasks(some, names, prefill=policy, stats=tallies[name], **task_options)

    with load(folder, **options) as model:
        backend = _backend(model)
        for policy in dict.fromkeys(policies):
            run(policy, model, policy)
        model.sparsity = 0
        run("masks off", model, "dense")
    speed = {name: {"tokens": t.tokens, "tok_per_s": t.tok_per_s} for name, t in tallies.items() if t.tokens}
    return {"backend": backend, "tasks": results, "generation": speed}


# ---------------------------------------------------------------------- output


def _backend(model: Model) -> str:
    decoder = model.decoder
    return f"{decoder.name} on {decoder.device}, {str(decoder.dtype).removeprefix('torch.')}"


def _plain(value: Any) -> Any:
    """JSON values; qualities as mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def _print_tables(document: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    # Without a terminal there is no width to fit into.
    console.width = console.width if console.is_terminal else 160
    rows = document["bundles"]
    text = document["text"]
    if text is not None:
        title = f"{text['num_samples']} x {text['seq_len']} tokens of {text['source']}, seed {text['seed']}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("bundle", "sparsity", "sparse tokens"):
            table.add_column(name, no_wrap=True)
        heads = (
            "KL, nats/token",
            "KL, all tokens",
            "perplexity dense",
            "sparse",
            "top-1 agreement",
            "realised sparsity",
        )
        for name in heads:
            table.add_column(name, justify="right")
        for row in rows:
            at = f"{row['sparsity']:.1%}"
            for policy, quality in row["quality"].items():
                for part, alone in row.get("alone", {}).items():
                    table.add_row(row["bundle"], at, f"{policy}, {part} alone", *_cells(alone[policy]))
                both = f"{policy}, {row['weights']} and masks" if "alone" in row else policy
                table.add_row(row["bundle"], at, both, *_cells(quality))
        console.print(table)
        console.print(
            "All but 'KL, all tokens' is over the tokens that ran sparse; dense is the same bundle, masks off"
            + (", weights as they are" if any("alone" in row for row in rows) else "")
            + "; ± is a standard error, each sequence a draw."
        )
        for row in rows:
            console.print(_verdict(row))
    if any("tasks" in row for row in rows):
        with_tasks = [row for row in rows if "tasks" in row]
        console.print(_task_table(with_tasks))
        for row in with_tasks:
            if row["generation"]:
                rates = (f"{name} {found['tok_per_s']:,.1f}" for name, found in row["generation"].items())
                console.print(f"{row['bundle']}: answers decoded at {', '.join(rates)} tok/s, prompts left out")


def _cells(quality: Quality) -> list[str]:
    found = quality.sparse
    if not found.num_tokens:
        return ["none", f"{quality.overall.kl:.4f}", f"{quality.overall.dense_perplexity:.3f}", "", "", ""]
    realised = quality.realised_sparsity
    return [
        f"{found.kl:.4f}{_error(found.kl_stderr, '.4f')}",
        f"{quality.overall.kl:.4f}",
        f"{found.dense_perplexity:.3f}",
        f"{found.perplexity:.3f}{_error(found.perplexity_stderr, '.3f')}",
        f"{found.top1_agreement:.1%}{_error(found.top1_stderr, '.1%')}",
        "not counted" if realised is None else f"{realised:.1%}",
    ]


def _error(stderr: float, digits: str) -> str:
    """A standard error behind its figure; of a single text there is none."""
    return f" ± {stderr:{digits}}" if math.isfinite(stderr) else ""


def _verdict(row: Mapping[str, Any]) -> str:
    from wisparse.converter.report import verdict

    measured = [quality for quality in row["quality"].values() if quality.sparse.num_tokens]
    return f"{row['bundle']}: {verdict(row['sparsity'], measured[-1] if measured else None)}"


def _task_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    policies = list(rows[0]["tasks"])
    policies = ["masks off", *(policy for policy in policies if policy != "masks off")]
    table = Table(title="tasks, by which tokens of a prompt are sparse", title_justify="left", box=None)
    for name in ("bundle", "task", "metric"):
        table.add_column(name, no_wrap=True)
    table.add_column("n", justify="right")
    for policy in policies:
        table.add_column(policy, justify="right")
    for row in rows:
        for task, metrics in row["tasks"]["masks off"].items():
            for metric in metrics:
                if metric.endswith("_stderr") or metric == _QUESTIONS:
                    continue
                cells = [_with_error(row["tasks"][policy][task], metric) for policy in policies]
                table.add_row(row["bundle"], task, metric, f"{metrics[_QUESTIONS]:,}", *cells)
    return table


def _with_error(metrics: Mapping[str, Any], metric: str) -> str:
    """A metric and its standard error; no ratio of two of them, which says little on few questions."""
    value, error = metrics.get(metric), metrics.get(f"{metric}_stderr")
    if value is None:
        return ""
    return f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else "")
