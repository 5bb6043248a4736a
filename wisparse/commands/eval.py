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

from ..console import print_table
from ..options import FILE_OR_ID, FOLDER_OR_ID, device_options, set_up_logging
from . import saving

if TYPE_CHECKING:
    from wisparse.converter.calibration import CalibrationTokens
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
    # The harness warns about what it does anyway, the Hub's client at every retry; the failure itself is told.
    for library in ("lm_eval", "huggingface_hub") if names else ():
        logging.getLogger(library).setLevel(logging.INFO if verbose else logging.ERROR)
    if tasks is not None:
        if not names:
            raise UsageError("--tasks: expected names, separated by commas")
        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError("--tasks needs lm-evaluation-harness: pip install 'wisparse[eval]'")
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
    opened = [Bundle.open(fetch_bundle(bundle, revision)) for bundle in bundles]
    if options["sparsity"] is not None:
        opened = [bundle.at(options["sparsity"]) for bundle in opened]
    from wisparse.converter.processes import Progress

    progress, tokens = Progress(), None
    if texts or not names:
        tokens = _read_text(opened, texts or ("self",), num_samples, seq_len, seed, options["device"], progress)
    rows = []
    for given, bundle in zip(bundles, opened, strict=True):
        # Texts are quick: every sparsity level, unless one is asked for. Tasks are not.
        found: dict[float, dict[str, Any]] = {bundle.sparsity: {}}
        if tokens is not None:
            found = _on_text(bundle, tokens, policies or ("half", "all"), options, progress)
        if names:
            found[bundle.sparsity] |= _on_tasks(
                bundle, names, policies or ("half",), options, {**task_options, "seed": seed}
            )
        facts = {"bundle": given, "base_model": bundle.recipe.base_model, "method": bundle.recipe.method}
        rows += [{**facts, "sparsity": level, **row} for level, row in found.items()]
    facts_of_text = ("source", "num_samples", "seq_len", "seed", "digest")
    text_facts = None if tokens is None else {name: getattr(tokens, name) for name in facts_of_text}
    if as_json:
        document = {"text": text_facts, "bundles": rows}
        click.echo(json.dumps(document, indent=2, default=lambda quality: quality.to_dict()))
    else:
        if text_facts is not None:
            _print_text_table(text_facts, rows)
        _print_task_table([row for row in rows if "tasks" in row])
    for folder, row in zip(to_save, [row for row in rows if "tasks" in row], strict=True) if save else ():
        saving.save(folder, saving.task_findings(row))


def _read_text(
    bundles: Sequence[Bundle],
    texts: Sequence[str],
    num_samples: int,
    seq_len: int,
    seed: int,
    device: str,
    progress: Progress,
) -> CalibrationTokens:
    """The evaluation tokens of all bundles, made as calibration tokens are, with another seed."""
    from wisparse.converter.calibration import load_calibration
    from wisparse.converter.source import load_source, load_tokenizer

    first = bundles[0]
    for other in bundles[1:]:
        if other.read_bytes("tokenizer.json") != first.read_bytes("tokenizer.json"):
            raise UsageError(
                f"--compare: {other.folder.name} and {first.folder.name} have different tokenizers, so no token is the "
                "same in both; compare bundles of one model"
            )
    limit = first.config.max_position_embeddings
    if seq_len > limit:
        raise UsageError(f"--seq-len {seq_len}: the model's context has {limit} tokens")
    if list(texts) != ["self"]:
        tokenizer = load_tokenizer(first.folder)
        return load_calibration(texts, tokenizer, None, num_samples, seq_len, seed, progress)
    # A bundle is a dense checkpoint too, and the dense model writes the text.
    source = load_source(first.folder, device=device, bundle=True)
    return load_calibration("self", source.tokenizer, source.model, num_samples, seq_len, seed, progress)


def _on_text(
    bundle: Bundle,
    tokens: CalibrationTokens,
    policies: Sequence[str],
    options: Mapping[str, Any],
    progress: Progress,
) -> dict[float, dict[str, Any]]:
    """Sparsity level -> its row, of one bundle that is loaded once."""
    from wisparse.converter.evaluation import evaluate_text, same_text
    from wisparse.runtime.backends import load

    folder = bundle.folder
    warning = same_text(tokens.digest, tokens.source, tokens.seed, bundle.recipe.calibration)
    if warning is not None:
        click.echo(f"warning: {folder.name}: {warning}; the figures flatter the bundle", err=True)
    wanted = {**options, "max_seq_len": options["max_seq_len"] or tokens.seq_len}
    if wanted["max_seq_len"] < tokens.seq_len:
        raise UsageError(f"--max-seq-len {wanted['max_seq_len']} is below --seq-len {tokens.seq_len}")
    levels = bundle.recipe.sparsities if options["sparsity"] is None else (bundle.sparsity,)
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


def _on_tasks(
    bundle: Bundle,
    names: Sequence[str],
    policies: Sequence[str],
    options: Mapping[str, Any],
    task_options: Mapping[str, Any],
) -> dict[str, Any]:
    """Metrics under each policy and with masks off."""
    from wisparse.runtime.backends import load
    from wisparse.runtime.generation.scheduler import Stats
    from wisparse.runtime.lm_eval import evaluate_tasks

    results, speed = {}, {}
    with load(bundle.folder, **options) as model:
        for name in (*dict.fromkeys(policies), "masks off"):
            policy = name
            if name == "masks off":
                model.sparsity, policy = 0, "dense"
            stats = Stats()
            results[name] = evaluate_tasks(model, names, prefill=policy, stats=stats, **task_options)
            if stats.tokens:
                speed[name] = {"tokens": stats.tokens, "tok_per_s": stats.tok_per_s}
        return {"backend": _backend(model), "tasks": results, "generation": speed}


def _backend(model: Model) -> str:
    decoder = model.decoder
    return f"{decoder.name} on {decoder.device}, {str(decoder.dtype).removeprefix('torch.')}"


def _print_text_table(text: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    from wisparse.converter.report import verdict

    lines = []
    for row in rows:
        bundle, at = row["bundle"], f"{row['sparsity']:.1%}"
        for policy, quality in row["quality"].items():
            for part, alone in row.get("alone", {}).items():
                lines.append((bundle, at, f"{policy}, {part} alone", *_quality_cells(alone[policy])))
            both = f"{policy}, {row['weights']} and masks" if "alone" in row else policy
            lines.append((bundle, at, both, *_quality_cells(quality)))
    note = "All but 'KL, all tokens' is over the tokens that ran sparse; dense is the same bundle, masks off"
    note += ", weights as they are" if any("alone" in row for row in rows) else ""
    note += "; ± is a standard error, each sequence a draw."
    for row in rows:
        measured = [quality for quality in row["quality"].values() if quality.sparse.num_tokens]
        note += f"\n{row['bundle']}: {verdict(row['sparsity'], measured[-1] if measured else None)}"
    figures = ("KL, nats/token", "KL, all tokens", "perplexity dense", "sparse", "top-1 agreement", "realised sparsity")
    title = f"{text['num_samples']} x {text['seq_len']} tokens of {text['source']}, seed {text['seed']}"
    print_table(("bundle", "sparsity", "sparse tokens", *figures), lines, title=title, left=3, note=note)


def _quality_cells(quality: Quality) -> list[str]:
    found, overall, realised = quality.sparse, quality.overall, quality.realised_sparsity
    if not found.num_tokens:
        return ["none", f"{overall.kl:.4f}", f"{overall.dense_perplexity:.3f}", "", "", ""]

    def error(stderr: float, digits: str) -> str:  # of a single text there is none
        return f" ± {stderr:{digits}}" if math.isfinite(stderr) else ""

    return [
        f"{found.kl:.4f}{error(found.kl_stderr, '.4f')}",
        f"{overall.kl:.4f}",
        f"{found.dense_perplexity:.3f}",
        f"{found.perplexity:.3f}{error(found.perplexity_stderr, '.3f')}",
        f"{found.top1_agreement:.1%}{error(found.top1_stderr, '.1%')}",
        "not counted" if realised is None else f"{realised:.1%}",
    ]


def _print_task_table(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    policies = ["masks off", *(policy for policy in rows[0]["tasks"] if policy != "masks off")]
    lines, notes = [], []
    for row in rows:
        for task, metrics in row["tasks"]["masks off"].items():
            for metric in metrics:
                if metric.endswith("_stderr") or metric == _QUESTIONS:
                    continue
                cells = []
                for policy in policies:
                    found = row["tasks"][policy][task]
                    value, error = found.get(metric), found.get(f"{metric}_stderr")
                    told = f" ± {error:.4f}" if isinstance(error, float) else ""
                    cells.append("" if value is None else f"{value:.4f}{told}")
                lines.append((row["bundle"], task, metric, f"{metrics[_QUESTIONS]:,}", *cells))
        if row["generation"]:
            rates = (f"{name} {found['tok_per_s']:,.1f}" for name, found in row["generation"].items())
            notes.append(f"{row['bundle']}: answers decoded at {', '.join(rates)} tok/s, prompts left out")
    title = "tasks, by which tokens of a prompt are sparse"
    print_table(("bundle", "task", "metric", "n", *policies), lines, title=title, left=3, note="\n".join(notes))
