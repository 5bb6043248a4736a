"""``wisparse bench``: how much faster a bundle decodes than its dense self, on this machine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import torch
from torch import Tensor

from wisparse.converter.source import load_source
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UnsupportedModelError, UsageError, first_line
from wisparse.runtime.benchmark import Workload, prompts
from wisparse.runtime.decoding.decoder import memory_errors
from wisparse.runtime.timing import wait

from ..options import FOLDER_OR_ID, device_options, set_up_logging
from . import saving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from wisparse.runtime.benchmark import Comparison, Workload
    from wisparse.runtime.model import Model

NAME = "torch.compile"
_MODE = "reduce-overhead"


@dataclass(frozen=True)
class CompiledSpeed:
    """How fast the baseline was: ``tok_per_s`` the median of ``runs``, all rows together; ``step_ms`` one step."""

    dtype: str
    tok_per_s: float
    step_ms: float
    runs: tuple[float, ...]
    name: str = NAME
    mode: str = _MODE


def check_compiler(device: torch.device) -> None:
    """Raise UsageError where ``torch.compile`` would find no C++ compiler; a GPU's kernels need none."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UsageError(
            f"--baseline {NAME} needs a C++ compiler on a CPU, and there is none: install g++, or let CXX name one"
        ) from error


@torch.no_grad()
def compiled_rates(
    prefill: Callable[[], Tensor], step: Callable[[Tensor, Tensor], Tensor], workload: Workload, device: torch.device
) -> tuple[float, ...]:
    """Tokens a second, all rows together, of every run but a first one, which compiles and captures.

    Args:
        prefill: empties the cache, reads the prompts, and gives the first ids (B, 1).
        step: ids (B, 1) and their position (1,), int64, to the next ids (B, 1).
        workload: ``prompt_length`` is the first position of a step, ``new_tokens`` their number.

    Raises:
        UnsupportedModelError: the step cannot be compiled whole.
    """
    compiled = torch.compile(step, mode=_MODE, fullgraph=True)
    first = workload.prompt_length
    positions = [torch.tensor([place], device=device) for place in range(first, first + workload.new_tokens)]
    rates = []
    try:
        for run in range(1 + workload.runs):
            token = prefill()
            wait(device)
            began = time.perf_counter()
            for position in positions:
                token = compiled(token, position).clone()  # out of the graph's own memory
            wait(device)
            if run:
                rates.append(workload.batch * workload.new_tokens / (time.perf_counter() - began))
    except torch._dynamo.exc.TorchDynamoException as error:
        raise UnsupportedModelError(
            f"--baseline {NAME}: this model cannot be compiled whole here: {first_line(error)}; go without"
        ) from error
    finally:
        torch._dynamo.reset()  # gives back the graphs' memory
    return tuple(rates)


def time_compiled(bundle: Bundle, workload: Workload, device: torch.device, dtype: torch.dtype) -> CompiledSpeed:
    """A bundle's dense model, its weights as numbers of ``dtype`` whatever they are stored as; ids as `compare` has.

    Raises:
        BundleError, UnsupportedModelError: the weights cannot be loaded, or the model cannot be compiled whole.
        ResourceError: not enough memory.
    """
    from transformers import StaticCache

    with memory_errors(device, f"for the dense model under {NAME}"):
        model = load_source(bundle.folder, dtype, device, bundle=True).model
        length = workload.prompt_length + workload.new_tokens
        cache = StaticCache(config=model.config, max_cache_len=length)
        ids = torch.stack(prompts(bundle.config, workload)).to(device)

        def step(tokens: Tensor, positions: Tensor) -> Tensor:
            seen = model(input_ids=tokens, position_ids=positions[None], past_key_values=cache, use_cache=True)
            return seen.logits[:, -1].argmax(-1, keepdim=True)

        def prefill() -> Tensor:
            cache.reset()
            return step(ids, torch.arange(workload.prompt_length, device=device))

        rates = compiled_rates(prefill, step, workload, device)
    rate = statistics.median(rates)
    return CompiledSpeed(str(dtype).removeprefix("torch."), rate, workload.batch / rate * 1e3, rates)


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
    from wisparse.formats.machine import choose_device
    from wisparse.runtime.backends import load
    from wisparse.runtime.benchmark import Workload, compare_weights

    if baseline:
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
