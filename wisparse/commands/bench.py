"""``wisparse bench``: how much faster a bundle decodes than its dense self, on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from . import saving
from .options import device_options, set_up_logging
from .places import FOLDER_OR_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from wisparse.runtime.benchmark import Comparison, Workload
    from wisparse.runtime.model import Model
    from wisparse.torch_compile import CompiledSpeed

__all__ = ["command"]


@click.command("bench", context_settings={"show_default": True})
@click.argument("bundle", type=FOLDER_OR_ID)
@click.option("--prompt-length", type=click.IntRange(min=1), default=5, help="Tokens of the random prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=200, help="Tokens decoded in one run.")
@click.option("--batch", type=click.IntRange(min=1), default=1, help="Prompts decoded side by side.")
@click.option("--runs", type=click.IntRange(1, 1000), default=5, help="Timed runs; medians are shown.")
@click.option("--kernels", is_flag=True, help="Time every kernel of a block too (NVIDIA GPUs).")
@click.option("--all-weights", is_flag=True, help="One table of all that weights can be held as there: native, int8, …")
@click.option(
    "--baseline",
    type=click.Choice(["torch.compile"]),
    help="Time the dense model in transformers too, compiled, with a static cache and CUDA graphs.",
)
@click.option("--tune", is_flag=True, help="First measure tiles for this GPU and model, and keep the best.")
@saving.save_option
@device_options
@click.option("--json", "as_json", is_flag=True, help="Leave the tables out: print the last line, JSON, alone.")
def command(
    bundle: str,
    prompt_length: int,
    max_new_tokens: int,
    batch: int,
    runs: int,
    kernels: bool,
    all_weights: bool,
    baseline: str | None,
    tune: bool,
    save: bool,
    verbose: bool,
    as_json: bool,
    **loading: Any,
) -> None:
    """Time BUNDLE, a folder or a Hub id, against its dense self: same weights, same back end, masks off.

    The ceiling is what the bytes allow: those that a step has to read, at the read bandwidth measured in the same run.
    The last line is all of it as JSON.

    \b
    wisparse bench out
    wisparse bench out --prompt-length 1024 --batch 4 --sparsity 0.3
    wisparse bench out --device cpu --all-weights
    wisparse bench out --all-weights --baseline torch.compile
    wisparse bench out --device cuda --kernels --json
    wisparse bench out --sparsity 0.4 --save
    """
    set_up_logging(verbose)
    if all_weights and (loading["weights"] != "native" or kernels or tune or save):
        raise click.UsageError("--all-weights goes without --weights, --kernels, --tune and --save")
    folders = saving.folders_to_save([bundle], loading["sparsity"]) if save else []
    from wisparse.formats.machine.device import choose_device
    from wisparse.runtime.benchmark import Workload, compare_weights
    from wisparse.runtime.loader import load

    if baseline:
        from wisparse.torch_compile import check_compiler

        check_compiler(choose_device(loading["device"]))
    if loading["max_seq_len"] is None:
        loading["max_seq_len"] = prompt_length + max_new_tokens
    model = load(bundle, max_batch=batch, **loading)
    if tune:
        from wisparse.runtime.cuda.kernel_times import tune as tune_tiles

        tune_tiles(model.decoder, batch=batch)
        model.close()
        model = load(bundle, max_batch=batch, **loading)
    workload = Workload(prompt_length, max_new_tokens, batch, runs)
    held = loading["weights"]
    models = {held: model}
    if all_weights:
        others = [name for name in model.decoder.weight_types if name != held]
        models |= {name: load(bundle, max_batch=batch, **{**loading, "weights": name}) for name in others}
    table = compare_weights(models, workload, kernels=kernels)
    compiled = _time_baseline(models, workload) if baseline else None
    if not as_json:
        if all_weights:
            _show_all(table, compiled)
        else:
            _show(table[held], compiled)
    document = {name: found.to_dict() for name, found in table.items()} if all_weights else table[held].to_dict()
    click.echo(json.dumps({**document, "baseline": asdict(compiled)} if compiled else document))
    for folder in folders:
        saving.save(folder, [saving.speed_finding(table[held])])


def _time_baseline(models: Mapping[str, Model], workload: Workload) -> CompiledSpeed:
    """Of the same bundle, on the same device. The models are closed first: a GPU need not have room for both."""
    from wisparse.torch_compile import time_compiled

    model = next(iter(models.values()))
    device, dtype = model.decoder.device, model.decoder.dtype
    for one in models.values():
        one.close()
    return time_compiled(model.bundle, workload, device, dtype)


def _show_all(table: Mapping[str, Comparison], compiled: CompiledSpeed | None) -> None:
    """Every way to hold the weights, dense and sparse, and the baseline."""
    from rich.table import Table

    native = table["native"]
    console = _console(native, ", ".join(table))
    rows = Table(box=None, pad_edge=False)
    rows.add_column("weights", no_wrap=True)
    over = f"over {compiled.name}" if compiled else "over native dense"
    for name in ("sparsity", "tok/s", "ms/step", over, "over own dense", "MB/step", "share", "unread"):
        rows.add_column(name, justify="right")
    ground = compiled or native.dense
    if compiled:
        rows.add_row(*_baseline_row(compiled), "1.00x")
    for name, found in table.items():
        for label, speed in (("dense", found.dense), (f"{found.sparsity:.3g}", found.sparse)):
            rows.add_row(
                name,
                label,
                f"{speed.tok_per_s:,.1f}",
                f"{speed.step_ms:.3f}",
                f"{speed.tok_per_s / ground.tok_per_s:.2f}x",
                f"{speed.tok_per_s / found.dense.tok_per_s:.2f}x",
                f"{speed.bytes_per_step / 1e6:,.1f}",
                f"{speed.ideal_ms / speed.step_ms:.0%}",
                f"{speed.realised_sparsity:.1%}",
            )
    console.print(rows)
    console.print(
        f"native: as the bundle has them, in {native.dtype}; others are rounded at load, which costs quality:\n"
        "`wisparse eval --weights` tells how much. MB/step: what a step reads; share: of the speed that they allow"
        + (f"\n{_baseline_note(compiled)}" if compiled else "")
    )


def _baseline_row(compiled: CompiledSpeed) -> tuple[str, str, str, str]:
    """The first cells of a table's row: name, sparsity, tok/s, ms/step."""
    return f"{compiled.name}, {compiled.dtype}", "dense", f"{compiled.tok_per_s:,.1f}", f"{compiled.step_ms:.3f}"


def _baseline_note(compiled: CompiledSpeed) -> str:
    return (
        f"{compiled.name}: the same dense model in transformers, static cache, mode {compiled.mode}; after the others, "
        "alone; no token is read between steps"
    )


def _console(found: Comparison, weights: str) -> Console:
    """Where the table goes, with what was measured on what already written."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    # Without a terminal there is no width to fit into.
    console.width = console.width if console.is_terminal else 160
    console.print(", ".join(f"{key} {value}" for key, value in found.machine.items()))
    work = found.workload
    console.print(
        f"{found.backend}, {found.dtype}, weights {weights}, sparsity {found.sparsity:g}; "
        f"prompt {work.prompt_length}, {work.new_tokens} tokens, batch {work.batch}; medians of {work.runs} runs, "
        f"alternating; memory reads {found.read_gbps:,.1f} GB/s"
    )
    return console


def _show(found: Comparison, compiled: CompiledSpeed | None) -> None:
    from rich.table import Table

    console, work = _console(found, found.weights), found.workload
    table = Table(box=None, pad_edge=False)  # 80 columns are enough
    table.add_column("", no_wrap=True)
    for name in ("tok/s", "ms/step", "ceiling", "share", "GB/s", "unread", "prefill", "peak GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, speed in (("dense", found.dense), (f"{found.sparsity:.3g}", found.sparse)):
        ceiling = work.batch / speed.ideal_ms * 1e3
        table.add_row(
            name,
            f"{speed.tok_per_s:,.1f}",
            f"{speed.step_ms:.3f}",
            f"{ceiling:,.1f}",
            f"{speed.tok_per_s / ceiling:.0%}",
            f"{speed.gbps:,.1f}",
            f"{speed.realised_sparsity:.1%}",
            f"{speed.prefill_tok_per_s:,.0f}",
            f"{speed.peak_memory_bytes / 1e9:.2f}",
        )
    if compiled:
        name, _, *speed_cells = _baseline_row(compiled)
        table.add_row(name, *speed_cells)
    console.print(table)
    console.print(
        f"sparse over dense: {found.speedup:.2f}x; ceiling and prefill in tok/s, unread: share of the weights"
    )
    if compiled:
        ratios = (speed.tok_per_s / compiled.tok_per_s for speed in (found.dense, found.sparse))
        console.print("over {}: dense {:.2f}x, sparse {:.2f}x".format(compiled.name, *ratios))
        console.print(_baseline_note(compiled))
    if found.kernels:
        rows = Table(box=None, pad_edge=False)
        for name in ("kernel", "us", "ideal us", "share"):
            rows.add_column(name, justify="left" if name == "kernel" else "right")
        for role, row in found.kernels.items():
            ideal = row.get("ideal_us")
            share = f"{ideal / row['us']:.0%}" if ideal else ""
            rows.add_row(role, f"{row['us']:.2f}", f"{ideal:.2f}" if ideal else "", share)
        console.print(rows)
