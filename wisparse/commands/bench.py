"""``wisparse bench``: decoding speed of a bundle, sparse and dense, on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from wisparse.formats.errors import UsageError
from wisparse.formats.machine import choose_device

from .. import options as shared

if TYPE_CHECKING:
    from wisparse.formats.card import Finding
    from wisparse.runtime.benchmark import Comparison

    from ..compiled import CompiledSpeed

_BASELINE = "Also time the dense model in transformers under torch.compile, with a static cache and CUDA graphs."


@click.command("bench", context_settings={"show_default": True})
@click.argument("bundle", type=shared.FOLDER_OR_ID)
@shared.option_table(
    ("--prompt-length", click.IntRange(min=1), 5, "Tokens of the random prompt."),
    ("--max-new-tokens", click.IntRange(min=1), 200, "Tokens decoded in one run."),
    ("--batch", click.IntRange(min=1), 1, "Sequences in a batch."),
    ("--runs", click.IntRange(1, 1000), 5, "Timed runs; medians are shown."),
)
@click.option("--kernels", is_flag=True, help="Also time every kernel of a block (NVIDIA GPUs).")
@click.option(
    "--explain",
    is_flag=True,
    help="Print what --max-kl chose and why; on NVIDIA GPUs also the blocks' operations and each linear's kernel.",
)
@click.option("--all-weights", is_flag=True, help="One table over all weight types of the back end: native, int8, …")
@click.option("--baseline", type=click.Choice(["torch.compile"]), help=_BASELINE)
@click.option("--tune", is_flag=True, help="First tune tile sizes for this GPU and model, and save them.")
@shared.speculative_option("off")
@shared.save_option
@shared.device_options
@shared.max_kl_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(
    bundle: str, prompt_length: int, max_new_tokens: int, batch: int, runs: int, kernels: bool, explain: bool,
    all_weights: bool, baseline: str | None, tune: bool, speculative: str | None, save: bool, verbose: bool,
    as_json: bool, **loading: Any,
) -> None:  # fmt: skip
    """Time decoding with BUNDLE, a folder or a Hub id, sparse and dense: same weights, same back end, masks on and off.

    The ceiling is the speed at which a step's bytes are read at the memory bandwidth measured in the same run.

    \b
    wisparse bench out
    wisparse bench out --prompt-length 1024 --batch 4 --sparsity 0.3
    wisparse bench out --device cpu --all-weights
    wisparse bench out --all-weights --baseline torch.compile
    wisparse bench out --device cuda --kernels --json
    wisparse bench out --sparsity 0.4 --save
    """
    shared.set_up_logging(verbose)
    if all_weights and (loading["weights"] not in (None, "native") or kernels or tune or save):
        raise click.UsageError("--all-weights goes without --weights, --kernels, --tune and --save")
    folders = shared.folders_to_save([bundle], loading["sparsity"], loading["bits"]) if save else []
    # Without --weights the chosen type is timed, at the chosen level or, if that is the dense model, at the default one.
    asked = None if all_weights else shared.max_kl_of(loading)
    del loading["max_kl"]
    opened = shared.open_bundle(bundle, *(loading.pop(name) for name in ("revision", "sparsity", "bits")))
    if loading["max_seq_len"] is None:
        length, context = prompt_length + max_new_tokens, opened.config.max_position_embeddings
        if length > context:
            both = "--prompt-length and --max-new-tokens"
            expected = f"expected at most the model's context of {context} together"
            raise UsageError(f"{both}: {expected}, found {length}")
        loading["max_seq_len"] = length
    if all_weights and opened.recipe.graded:
        raise UsageError("--all-weights: expected a bundle that is not graded; a graded one holds its weights one way")
    from wisparse.runtime.backends import load
    from wisparse.runtime.benchmark import Workload, compare_weights, time_drafts

    if baseline:
        from ..compiled import require_compiler, time_compiled

        require_compiler(choose_device(loading["device"]))
    model = load(opened, max_batch=batch, speculative=speculative, max_kl=asked, **loading)
    choice = model.choice
    loading["weights"] = choice.pair.weights if choice is not None else loading["weights"] or "native"
    if choice is not None:
        opened = opened.at(choice.pair.sparsity or opened.sparsity)
        model.sparsity = opened.sparsity
    if tune:
        from wisparse.runtime.cuda.kernel_times import tune as tune_tiles

        tune_tiles(model.decoder, batch=batch)
        model.close()
        model = load(opened, max_batch=batch, speculative=speculative, **loading)
    if explain and choice is not None:
        click.echo(str(choice), err=as_json)
    if explain and (choice is None or model.decoder.device.type == "cuda"):
        from wisparse.runtime.cuda.kernel_times import explain as explain_step

        click.echo(explain_step(model.decoder, batch=batch), err=as_json)
    workload = Workload(prompt_length, max_new_tokens, batch, runs)
    models = {loading["weights"]: model}  # by weight type
    if all_weights:
        others = [name for name in model.decoder.weight_types if name != loading["weights"]]
        models |= {name: load(opened, max_batch=batch, **{**loading, "weights": name}) for name in others}
    comparisons = compare_weights(models, workload, kernels=kernels)
    drafts = time_drafts(model, workload) if model.engine.scheduler.speculative else None
    compiled = None
    if baseline:
        device, dtype = model.decoder.device, model.decoder.dtype
        for loaded in models.values():  # frees memory for the baseline
            loaded.close()
        compiled = time_compiled(model.bundle, workload, device, dtype)
    if as_json:
        documents = {name: comparison.to_dict() for name, comparison in comparisons.items()}
        document = documents if all_weights else documents[loading["weights"]]
        optional = {"baseline": compiled and asdict(compiled), "speculation": drafts}
        click.echo(json.dumps({**document, **{name: value for name, value in optional.items() if value}}))
    else:
        print_tables(comparisons, compiled, all_weights)
        if drafts is not None:
            ratio = drafts["tok_per_s"] / drafts["plain_tok_per_s"]
            click.echo(
                f"speculation, prompts read too: {drafts['plain_tok_per_s']:,.1f} tok/s without drafts, "
                f"{drafts['tok_per_s']:,.1f} with them ({ratio:.2f}x); {drafts['acceptance_rate']:.0%} of their tokens "
                f"accepted, {drafts['mean_length']:.1f} tokens each"
            )
    for folder in folders:
        shared.save_to(folder, [_finding(comparisons[loading["weights"]])])


def _finding(comparison: Comparison) -> Finding:
    from wisparse.formats.card import Finding

    work, machine = comparison.workload, comparison.machine
    requests = "one request" if work.batch == 1 else f"{work.batch} requests"
    weights = comparison.dtype if comparison.weights == "native" else comparison.weights
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] != '1')}" if "threads" in machine else ""
    where = f"{comparison.backend} on {machine['device']}{threads}"
    conditions = f"{requests}, {work.new_tokens} tokens after {work.prompt_length}; {weights} weights, {where}"
    dense, sparse = comparison.dense.tok_per_s, comparison.sparse.tok_per_s
    return Finding("tok/s", conditions, comparison.sparsity, dense, sparse)


def print_tables(comparisons: Mapping[str, Comparison], compiled: CompiledSpeed | None, all_weights: bool) -> None:
    first = comparisons["native"] if all_weights else next(iter(comparisons.values()))
    work, baseline = first.workload, compiled or first.dense
    click.echo(", ".join(f"{key} {value}" for key, value in first.machine.items()))
    click.echo(
        f"{first.backend}, {first.dtype}, weights {', '.join(comparisons)}, "
        f"{f'sparsity {first.sparsity:g}' if first.bits is None else f'{first.bits:g} bits'}; "
        f"prompt {work.prompt_length}, {work.new_tokens} tokens, batch {work.batch}; medians of {work.runs} runs, "
        f"alternating; memory reads {first.read_gbps:,.1f} GB/s"
    )
    graded = first.bits is not None
    if all_weights:
        heads = ["weights", "sparsity", "tok/s", "ms/step", f"over {compiled.name if compiled else 'native dense'}"]
        heads += ["over own dense", "MB/step", "share", "unread"]
        note = (
            f"native: as the bundle has them, in {first.dtype}; others are rounded at load, which costs quality:\n"
            "`wisparse eval --weights` tells how much. MB/step: what a step reads; share: of the speed that they allow"
        )
    else:
        heads = ["", "tok/s", "ms/step", "ceiling", "share", "GB/s", "unread", "prefill", "peak GB"]
        what = "weights' bits" if graded else "weights"
        note = f"sparse over dense: {first.speedup:.2f}x; ceiling and prefill in tok/s, unread: share of the {what}"
    lines = []
    for name, one in comparisons.items():
        level = f"{one.sparsity:.3g}" if one.bits is None else f"{one.bits:g} bits"
        for label, speed in (("dense", one.dense), (level, one.sparse)):
            rates, unread = [f"{speed.tok_per_s:,.1f}", f"{speed.step_ms:.3f}"], f"{speed.realised_sparsity:.1%}"
            share = f"{speed.ideal_ms / speed.step_ms:.0%}"
            if all_weights:
                over = [f"{speed.tok_per_s / base.tok_per_s:.2f}x" for base in (baseline, one.dense)]
                lines.append([name, label, *rates, *over, f"{speed.bytes_per_step / 1e6:,.1f}", share, unread])
            else:
                ceiling, prefill = work.batch / speed.ideal_ms * 1e3, speed.prefill_tok_per_s
                cells = [f"{ceiling:,.1f}", share, f"{speed.gbps:,.1f}", unread, f"{prefill:,.0f}"]
                lines.append([label, *rates, *cells, f"{speed.peak_memory_bytes / 1e9:.2f}"])
    if compiled:
        label, rates = f"{compiled.name}, {compiled.dtype}", [f"{compiled.tok_per_s:,.1f}", f"{compiled.step_ms:.3f}"]
        if all_weights:
            lines.insert(0, [label, "dense", *rates, "1.00x"])
        else:
            lines.append([label, *rates])
            dense, sparse = (speed.tok_per_s / compiled.tok_per_s for speed in (first.dense, first.sparse))
            note += f"\nover {compiled.name}: dense {dense:.2f}x, sparse {sparse:.2f}x"
        how = f"static cache, mode {compiled.mode}; after the others, alone; no token is read between steps"
        note += f"\n{compiled.name}: the same dense model in transformers, {how}"
    shared.print_table(heads, lines, note=note)
    if first.kernels and not all_weights:
        timed = []
        for role, row in first.kernels.items():
            ideal = row.get("ideal_us")
            bound = (f"{ideal:.2f}", f"{ideal / row['us']:.0%}") if ideal else ("", "")
            timed.append((role, f"{row['us']:.2f}", *bound))
        shared.print_table(("kernel", "us", "ideal us", "share"), timed)
