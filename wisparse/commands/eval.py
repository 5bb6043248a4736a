"""``wisparse eval``: quality of a bundle, sparse and dense, on text and on tasks."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.formats.guard import place
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.manifest import level_name
from wisparse.formats.weight_types import PREFILL_POLICIES

from .. import options as shared

if TYPE_CHECKING:
    from wisparse.converter.calibration import CalibrationTokens
    from wisparse.converter.processes import Progress
    from wisparse.formats.card import Finding

_TASK_OPTIONS = ("include_path", "num_fewshot", "limit", "apply_chat_template", "confirm_run_unsafe_code")
_QUESTIONS = "num_questions"  # a key of `evaluate_tasks`, whose module imports the harness
_FACTS = ("source", "num_samples", "seq_len", "seed", "digest")  # of the text, as JSON has them
_TEXT = (
    "Evaluate on a file, a folder or a data set; may be given several times.  "
    "[default: self, text that the model writes, unless --tasks is given]"
)
_PREFILL = (
    "Which tokens of a text or prompt are sparse: none, the last half, all; may be given several times.  "
    "[default: half and all for texts, half for tasks]"
)
_REFERENCE = "Instead of BUNDLE: a folder, GGUF file, bundle or Hub id, whose model is the reference, in float32."
_MODEL = "With --reference: the model to measure, of the same kinds; may be given several times."
_TASKS = "Run tasks of lm-evaluation-harness, or wisparse's own: interpreter_lines, interpreter_chains, greedy_loops."
_PROMPTS = {"dense": "prompts dense", "half": "the last half of each prompt sparse", "all": "prompts sparse"}


@click.command("eval")
@click.argument("bundles", type=shared.FOLDER_OR_ID, metavar="[BUNDLE]...", nargs=-1)
@click.option("--reference", type=shared.FILE_OR_ID, metavar="MODEL", help=_REFERENCE)
@click.option("--model", "models", type=shared.FILE_OR_ID, multiple=True, metavar="MODEL", help=_MODEL)
@click.option("--compare", is_flag=True, help="One table over several bundles, on the same tokens.")
@click.option("--text", "texts", type=shared.FILE_OR_ID, multiple=True, metavar="PATH|HUB_ID", help=_TEXT)
@shared.option_table(
    ("--num-samples", click.IntRange(min=1), 16, "Sequences of the text."),
    ("--seq-len", click.IntRange(min=2), 512, "Tokens per sequence."),
    ("--seed", click.IntRange(0, 2**32 - 1), 1, "Seed of the choice of passages, or of sampling."),
)
@click.option("--prefill", "policies", type=click.Choice(PREFILL_POLICIES), multiple=True, help=_PREFILL)
@click.option("--tasks", metavar="NAME,...", help=_TASKS)
@click.option(
    "--include-path", type=shared.FOLDER_OR_ID, multiple=True, metavar="DIR", help="Folder with more YAML tasks."
)
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Solved examples per question.  [default: the task's]")
@click.option("--limit", type=click.IntRange(1, 2**63 - 1), help="Most questions per task.")
@click.option("--apply-chat-template", is_flag=True, help="Put the tasks' prompts through the chat template.")
@click.option(
    "--confirm-run-unsafe-code", is_flag=True, help="Allow tasks that run code the model writes (humaneval) here."
)
@shared.save_option
@shared.device_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(
    bundles: tuple[str, ...], reference: str | None, models: tuple[str, ...], compare: bool, texts: tuple[str, ...],
    num_samples: int, seq_len: int, seed: int, policies: tuple[str, ...], tasks: str | None, save: bool, verbose: bool,
    revision: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Measure the quality of BUNDLE, a folder or a Hub id, against the dense model: the same bundle with masks off.

    On text: KL(dense || sparse) in nats per token, perplexity, top-1 agreement and realised sparsity, over the sparse
    tokens and, for the KL, over all, at every sparsity level or at --sparsity. With --weights int8 or
    --kv-cache-dtype int8, all against the bundle's own weights and an unquantized cache: rounding alone, masks alone,
    and both. On tasks: the harness's metrics, at one sparsity; --save writes them to the bundle's model card.

    With --reference and --model, any two models of one tokenizer: KL(reference || model) with its standard error and noise
    floor, top-1 agreement, flips, and both by the reference's confidence. A bundle runs with its masks, as reference
    without. The reference's logits are cached on disk.

    \b
    wisparse eval out
    wisparse eval --reference org/model --model model-q4_0.gguf --text corpus.txt
    wisparse eval out --text corpus.txt --prefill half --prefill all
    wisparse eval --compare out-40 out-50 out-60 --text corpus/
    wisparse eval out --text corpus.txt --sparsity 0.3
    wisparse eval out --text corpus.txt --weights int8
    wisparse eval out --tasks gsm8k,mmlu
    wisparse eval out --tasks interpreter_chains --sparsity 0.4 --save
    """
    shared.set_up_logging(verbose)
    size = num_samples, seq_len, seed
    options["weights"] = options["weights"] or "native"
    for text in texts:
        place("--text", text)
    if reference is not None or models:
        given = {"BUNDLE": bundles, "--compare": compare, "--tasks": tasks, "--save": save, "--revision": revision}
        _against_reference(reference, models, texts, size, policies, options, given, as_json)
        return
    if not bundles:
        raise click.UsageError("expected a BUNDLE, or --reference and --model; found neither")
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    # The harness and the Hub's client log many warnings; errors are raised anyway.
    for library in ("lm_eval", "huggingface_hub") if names else ():
        logging.getLogger(library).setLevel(logging.INFO if verbose else logging.ERROR)
    task_options = {key: options.pop(key) for key in _TASK_OPTIONS}
    if tasks is not None:
        if not names:
            raise UsageError("--tasks: expected names, separated by commas")
        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError("--tasks needs lm-evaluation-harness: pip install lm-eval")
    else:
        for option, value in task_options.items():
            if value not in (None, ()) and value is not False:
                raise UsageError(f"--{option.replace('_', '-')} requires --tasks")
        if save:
            raise UsageError("--save requires --tasks, whose results it writes")
    if len(bundles) > 1 and not compare:
        raise UsageError(f"found {len(bundles)} bundles: add --compare for one table over them, or give one")
    to_save = shared.folders_to_save(bundles, options["sparsity"], options["bits"]) if save else []
    opened = [Bundle.open(fetch_bundle(bundle, revision)) for bundle in bundles]
    bits = options.pop("bits")
    opened = [bundle.chosen(options["sparsity"], bits) for bundle in opened]
    if bits is not None:
        options["sparsity"] = opened[0].sparsity  # the same for all bundles: it follows from the bits
    from wisparse.converter.processes import Progress

    progress, tokens, text_facts = Progress(), None, None
    if texts or not names:
        tokens = _read_text(opened, texts or ("self",), size, options["device"], progress)
        text_facts = {name: getattr(tokens, name) for name in _FACTS}
    rows = []
    for name, bundle in zip(bundles, opened, strict=True):
        # Text is evaluated at every sparsity level unless one is given; tasks, which take longer, at one.
        levels: dict[float, dict[str, Any]] = {bundle.sparsity: {}}
        if tokens is not None:
            levels = _on_text(bundle, tokens, policies or ("half", "all"), options, progress)
        if names:
            settings = {**task_options, "seed": seed}
            levels[bundle.sparsity] |= _on_tasks(bundle, names, policies or ("half",), options, settings)
        recipe = bundle.recipe
        facts = {"bundle": name, "base_model": recipe.base_model, "method": recipe.method, "graded": recipe.graded}
        rows += [{**facts, "sparsity": level, **row} for level, row in levels.items()]
    task_rows = [row for row in rows if "tasks" in row]
    if as_json:
        document = {"text": text_facts, "bundles": rows}
        click.echo(json.dumps(document, indent=2, default=lambda quality: quality.to_dict()))
    else:
        if text_facts is not None:
            _print_text_table(text_facts, rows)
        if task_rows:
            print_task_table(task_rows)
    for folder, row in zip(to_save, task_rows, strict=True) if save else ():
        shared.save_to(folder, _findings(row))


def _against_reference(
    reference: str | None,
    models: Sequence[str],
    texts: Sequence[str],
    size: tuple[int, int, int],
    policies: Sequence[str],
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    as_json: bool,
) -> None:
    if reference is None or not models:
        raise UsageError("--reference and --model go together: the first is compared with the second")
    if wrong := [name for name, value in given.items() if value]:
        raise UsageError(f"--reference: {', '.join(wrong)} cannot be given with it")
    if len(policies) > 1:
        raise UsageError(f"--prefill: expected one with --reference, found {len(policies)}")
    from wisparse.converter.processes import Progress

    from ..reference import compare, print_comparison

    loading = {name: value for name, value in options.items() if name not in _TASK_OPTIONS}
    prefill = policies[0] if policies else "all"
    tokens, results = compare(reference, models, texts or ("self",), size, prefill, loading, Progress())
    if as_json:
        text = {name: getattr(tokens, name) for name in _FACTS}
        document = {"text": text, "reference": reference, "models": [one.to_dict() for one in results]}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_comparison(reference, tokens, results)


def _read_text(
    bundles: Sequence[Bundle], texts: Sequence[str], size: tuple[int, int, int], device: str, progress: Progress
) -> CalibrationTokens:
    """The evaluation tokens of all bundles, read or generated like calibration tokens. ``size``: samples, length, seed."""
    from wisparse.converter.source import load_source

    from ..reference import read_tokens

    first = bundles[0]
    for other in bundles[1:]:
        if other.read_bytes("tokenizer.json") != first.read_bytes("tokenizer.json"):
            differ = f"{other.folder.name} and {first.folder.name} have different tokenizers"
            advice = "so no token is the same in both; compare bundles of one model"
            raise UsageError(f"--compare: {differ}, {advice}")
    limit = first.config.max_position_embeddings
    if size[1] > limit:
        raise UsageError(f"--seq-len: expected at most the model's context, {limit} tokens, found {size[1]}")
    # The dense model generates the text: a bundle is also a dense checkpoint.
    return read_tokens(
        texts, first.folder, lambda: load_source(first.folder, device=device, bundle=True), size, progress
    )


def _on_text(
    bundle: Bundle, tokens: CalibrationTokens, policies: Sequence[str], options: Mapping[str, Any], progress: Progress
) -> dict[float, dict[str, Any]]:
    """Rows by sparsity level, of a bundle that is loaded once."""
    from wisparse.converter.evaluation import evaluate_text, same_text
    from wisparse.runtime.backends import load

    folder = bundle.folder
    warning = same_text(tokens.digest, tokens.source, tokens.seed, bundle.recipe.calibration)
    if warning is not None:
        click.echo(f"warning: {folder.name}: {warning}; the figures flatter the bundle", err=True)
    load_options = {**options, "max_seq_len": options["max_seq_len"] or tokens.seq_len}
    if load_options["max_seq_len"] < tokens.seq_len:
        raise UsageError(f"--max-seq-len {load_options['max_seq_len']} is below --seq-len {tokens.seq_len}")
    levels = bundle.recipe.sparsities if options["sparsity"] is None else (bundle.sparsity,)
    load_options["sparsity"], weights = levels[0], options["weights"]
    rows: dict[float, dict[str, Any]] = {}
    with ExitStack() as stack:
        model = stack.enter_context(load(folder, **load_options, max_kl=None))
        quantized = [] if weights == "native" else [weights]
        quantized += [] if options["kv_cache_dtype"] == "auto" else [f"{options['kv_cache_dtype']} cache"]
        reference = model
        if quantized:
            native = {"weights": "native", "kv_cache_dtype": "auto"}
            reference = stack.enter_context(load(folder, **{**load_options, **native}, max_kl=None))
        passes = 1 + 2 * len(levels) if quantized else len(levels)
        stage = stack.enter_context(progress.stage("Evaluating", passes * tokens.num_samples))
        decoder, native_decoder = model.decoder, reference.decoder
        once, dense = list(dict.fromkeys(policies)), native_decoder.logits
        measure = functools.partial(
            evaluate_text, sequences=tokens.input_ids, policies=once, reference=dense, advance=stage.advance
        )
        rounding = measure(lambda ids, _: decoder.logits(ids, len(ids))) if quantized else None
        for level in levels:
            model.sparsity = reference.sparsity = level
            row = {"backend": shared.backend_of(model), "weights": weights, "warning": warning}
            row["kv_cache_dtype"] = options["kv_cache_dtype"]
            row["quality"] = measure(decoder.logits, counter=decoder)
            if rounding is not None:
                masks = measure(native_decoder.logits, counter=native_decoder)
                row["alone"] = {", ".join(quantized): rounding, "masks": masks}
            rows[level] = row
    return rows


def _on_tasks(
    bundle: Bundle, names: Sequence[str], policies: Sequence[str], options: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    from wisparse.runtime.backends import load
    from wisparse.runtime.generation.scheduler import Stats
    from wisparse.runtime.lm_eval import evaluate_tasks

    results, speed = {}, {}
    with load(bundle.folder, **options, max_kl=None) as model:
        for policy in (*dict.fromkeys(policies), "masks off"):
            if policy == "masks off":
                model.sparsity = 0
            stats = model.engine.scheduler.stats = Stats()
            prefill = "dense" if policy == "masks off" else policy
            results[policy] = evaluate_tasks(model, names, prefill=prefill, **extra)
            if stats.tokens:
                speed[policy] = {"tokens": stats.tokens, "tok_per_s": stats.tok_per_s}
        return {"backend": shared.backend_of(model), "tasks": results, "generation": speed}


def _print_text_table(text: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    from wisparse.converter.report import verdict

    lines = []
    for row in rows:
        parts = {f", {part} alone": alone for part, alone in row.get("alone", {}).items()}
        for policy, quality in row["quality"].items():
            cases = {name: alone[policy] for name, alone in parts.items()}
            for name, one in {**cases, f", {' and '.join(row['alone'])}" if cases else "": quality}.items():
                sparse, overall, realised = one.sparse, one.overall, one.realised_sparsity
                cells = ["none", f"{overall.kl:.4f}", f"{overall.dense_perplexity:.3f}", "", "", ""]
                if sparse.num_tokens:
                    cells = [
                        shared.with_error(sparse.kl, sparse.kl_stderr, ".4f"),
                        f"{overall.kl:.4f}",
                        f"{sparse.dense_perplexity:.3f}",
                        shared.with_error(sparse.perplexity, sparse.perplexity_stderr, ".3f"),
                        shared.with_error(sparse.top1_agreement, sparse.top1_stderr, ".1%"),
                        "not counted" if realised is None else f"{realised:.1%}",
                    ]
                level = level_name(row["sparsity"], row["graded"], ".1f")
                lines.append((row["bundle"], level, f"{policy}{name}", *cells))
    note = "All but 'KL, all tokens' is over the tokens that ran sparse; dense is the same bundle, masks off"
    note += ", weights and cache as they are" if any("alone" in row for row in rows) else ""
    note += "; ± is a standard error, each sequence a draw."
    for row in rows:
        measured = [quality for quality in row["quality"].values() if quality.sparse.num_tokens]
        note += f"\n{row['bundle']}: {verdict(row['sparsity'], measured[-1] if measured else None, row['graded'])}"
    figures = ("KL, nats/token", "KL, all tokens", "perplexity dense", "sparse", "top-1 agreement", "realised sparsity")
    title = f"{text['num_samples']} x {text['seq_len']} tokens of {text['source']}, seed {text['seed']}"
    shared.print_table(("bundle", "sparsity", "sparse tokens", *figures), lines, title=title, left=3, note=note)


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, str, int, dict[str, tuple[float, float | None]]]]:
    """Task, metric, number of questions, and (value, standard error) by prefill policy, dense first."""
    dense = row["tasks"]["masks off"]
    for task, metrics in dense.items():
        for metric in metrics:
            if metric != _QUESTIONS and not metric.endswith("_stderr"):
                results = {policy: tasks[task] for policy, tasks in {"masks off": dense, **row["tasks"]}.items()}
                values = {policy: (one[metric], one.get(f"{metric}_stderr")) for policy, one in results.items()}
                yield task, metric, metrics[_QUESTIONS], values


def print_task_table(rows: Sequence[Mapping[str, Any]]) -> None:
    lines, notes = [], []
    for row in rows:
        for task, metric, count, values in _metrics(row):
            cells = [shared.with_error(*one, ".4f") for one in values.values()]
            lines.append((row["bundle"], task, metric, f"{count:,}", *cells))
        if row["generation"]:
            rates = (f"{name} {speed['tok_per_s']:,.1f}" for name, speed in row["generation"].items())
            notes.append(f"{row['bundle']}: answers decoded at {', '.join(rates)} tok/s, prompts left out")
    policies = dict.fromkeys(("masks off", *rows[0]["tasks"]))
    title = "tasks, by which tokens of a prompt are sparse"
    shared.print_table(("bundle", "task", "metric", "n", *policies), lines, title=title, left=3, note="\n".join(notes))


def _findings(row: Mapping[str, Any]) -> Iterator[Finding]:
    from wisparse.formats.card import Finding

    for task, metric, count, values in _metrics(row):
        dense, dense_error = values.pop("masks off")
        for policy, (value, error) in values.items():
            if math.isfinite(value):
                conditions = f"n = {count:,}, {_PROMPTS[policy]}; {row['backend']}"
                errors = (one if one is not None and math.isfinite(one) else None for one in (dense_error, error))
                yield Finding(f"{task}, {metric}", conditions, row["sparsity"], dense, value, *errors)
