"""``wisparse inspect``, ``verify`` and ``push``: show a bundle's recipe, check its files, upload it to the Hub."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from wisparse.formats import hub
from wisparse.formats.block_ops import describe
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.card import QUALITY_HEADS, quality_cells, quality_note
from wisparse.formats.errors import AccessError, BundleError, UsageError, printable
from wisparse.formats.guard import WANTED_BUNDLE, find_folder, quoted
from wisparse.formats.manifest import level_name
from wisparse.formats.tensors import MTP

from ..options import FOLDER, FOLDER_OR_ID, print_table, revision_option


@click.command("inspect")
@click.argument("bundle", type=FOLDER_OR_ID)
@revision_option
@click.option("--show", type=click.Choice(["sparsity", "alpha", "threshold", "realised"]), default="sparsity")
@click.option("--sparsity", type=float, help="The sparsity level whose table is shown.  [default: the bundle's own]")
@click.option("--bits", type=float, help="The same of a graded bundle, by its bits.")
@click.option("--ops", is_flag=True, help="Print what a block computes instead: its operations in order.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole recipe as JSON.")
def inspect(
    bundle: str,
    revision: str | None,
    show: str,
    sparsity: float | None,
    bits: float | None,
    ops: bool,
    as_json: bool,
) -> None:
    """Show the recipe of BUNDLE, a folder or a Hub id: one line per block, one column per projection.

    The weights are not read; `wisparse verify` does that.

    \b
    wisparse inspect out
    wisparse inspect USER/NAME --revision main --json
    """
    opened = Bundle.open(hub.fetch_bundle(bundle, revision)).chosen(sparsity, bits)
    if ops:
        click.echo("\n".join(describe(opened.config)))
        return
    if opened.sparsity not in opened.levels:
        dense = "sparsity: 0" if bits is None else "bits: 8"
        raise UsageError(f"{dense} is the dense model, which has no masks to show")
    recipe, config, calibration = opened.recipe, opened.config, opened.recipe.calibration
    num_bytes = opened.checkpoint.nbytes
    dtypes = sorted({info.dtype_name for info in opened.checkpoint.tensors.values()})
    if as_json:
        names = ("model_type", "num_blocks", "hidden_size", "intermediate_size")
        model = {**{name: getattr(config, name) for name in names}, "num_bytes": num_bytes, "dtypes": dtypes}
        click.echo(json.dumps({"model": model, **recipe.to_dict()}, indent=2))
        return
    masks, sizes = opened.at(0).masks, {one.name: one.num_parameters for one in config.projections()}
    zeros = sum(sizes[name] * mask.sparsity for name, mask in masks.items()) / sum(sizes.values())
    levels = {one: level_name(one, recipe.graded, ".1f") for one in recipe.sparsities}
    shape = f"{config.num_blocks} blocks, hidden {config.hidden_size}, MLP {config.intermediate_size}"
    each = f"{calibration.num_samples} samples of up to {calibration.seq_len} tokens"
    rows = (
        ("base model", recipe.base_model + (f" at {recipe.base_revision}" if recipe.base_revision else "")),
        ("left out", recipe.text_only),
        ("rotation", str(recipe.rotation or "none: the weights are the source's")),
        ("model", f"{config.model_type}, {shape}, {num_bytes / 1e6:,.1f} MB {'/'.join(dtypes)}"),
        ("drafts", "by a head for multi-token prediction" if f"{MTP}fc.weight" in opened.checkpoint.tensors else None),
        ("method", recipe.method),
        ("levels", ", ".join(f"{name}{' (the default)' * (one == recipe.default)}" for one, name in levels.items())),
        ("exact zeros", f"{zeros:.1%} of the weights are not read at sparsity 0 either" if zeros else None),
        ("calibration", f"{calibration.source}: {each} ({calibration.num_tokens:,} in all), seed {calibration.seed}"),
    )
    for name, value in rows:
        if value:
            click.echo(f"{name:<12} {printable(value)[:500]}")
    if cells := quality_cells(recipe):
        print_table(QUALITY_HEADS, cells, title="quality", left=2, note=quality_note(recipe))
    formats = {"alpha": "{0.alpha:.2f}", "threshold": "{0.threshold:.4g}", "sparsity": "{0.sparsity:.1%}"}
    cell, level = formats.get(show, "{0.realised_sparsity:.1%}"), recipe.at(opened.sparsity)
    entries = {entry.name: entry for entry in level.projections}
    lines = [
        [str(block), *(cell.format(entries[one.name]) for one in config.projections(block)), f"{sparsity:.1%}"]
        for block, sparsity in enumerate(level.block_sparsities)
    ]
    heads = ("block", *(projection.role for projection in config.projections(0)), "whole")
    print_table(heads, lines, title=f"{show} per projection at {levels[opened.sparsity]}", left=0)


@click.command("verify")
@click.argument("bundle", type=FOLDER_OR_ID)
@revision_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(bundle: str, revision: str | None, as_json: bool) -> None:
    """Check every tensor, number and digest of BUNDLE, a folder or a Hub id, and try its tokenizer and chat template. The
    token ids are compared with transformers'.

    \b
    wisparse verify out
    wisparse verify USER/NAME --revision main --json
    """
    from wisparse.converter.tokenizer import differing_text
    from wisparse.runtime.tokenizer import check_tokenizer

    folder = hub.fetch_bundle(bundle, revision)
    report = verify_bundle(folder)
    tokenizer = check_tokenizer(Bundle.open(folder))
    if tokenizer is not None and (text := differing_text(folder, tokenizer.encode)) is not None:
        differ = f"tokenizer.json gives {tokenizer.encode(text)} for {text!r}, transformers other ids"
        raise BundleError(f"{quoted(bundle)}: {differ} by the bundle's other files; convert the model again")
    if not Path(bundle).is_dir():
        # Figures are not downloaded: that they are missing here says nothing about the repository.
        report = replace(report, notes=tuple(note for note in report.notes if not note.endswith(": missing")))
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
        return
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{bundle}: valid. {report.num_files} files, {report.num_bytes / 1e6:,.1f} MB, {report.num_tensors} weight "
        f"tensors, {report.num_projections} masks, in {report.seconds:.1f} s"
    )


@click.command("push")
@click.argument("bundle", type=FOLDER)
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make the repository private; refuse one that is public.")
@click.option("--dry-run", is_flag=True, help="Print the files, their sizes and the model card; the Hub is not asked.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def push(bundle: str, repo: str, private: bool, dry_run: bool, as_json: bool) -> None:
    """Upload the folder BUNDLE to the Hub as REPO (USER/NAME).

    The bundle is verified first. Only its own files are uploaded, no others in the folder. Files that the repository has
    are not uploaded again, so an interrupted push can be repeated. Log in once with `hf auth login`, or set HF_TOKEN.

    \b
    wisparse push out my-name/Llama-3.1-8B-wisparse-50 --dry-run
    wisparse push out my-name/Llama-3.1-8B-wisparse-50 --private
    """
    folder = find_folder(bundle, WANTED_BUNDLE)
    if folder is None:
        raise AccessError(f"{quoted(bundle)}: there is no such folder")
    if dry_run:
        _print_files(folder, repo, as_json)
        return
    try:
        hub.check_write_access(repo)
        if private and hub.is_public(repo):
            raise AccessError(hub.public_repository(folder, repo))
        verify_bundle(folder)
        plan = hub.plan_push(folder, repo)
        for name in plan.left_out:
            click.echo(f"left out, not part of the bundle: {printable(name)}", err=True)
        num_bytes = sum(plan.send.values())
        what = f"nothing to upload: {repo} holds all {plan.num_files} files already"
        if plan.send:
            what = f"uploading {len(plan.send)} of {plan.num_files} files, {num_bytes / 1e6:,.1f} MB, to {repo}"
        click.echo(what, err=True)
        url = hub.push_bundle(folder, repo, private=private)
    except KeyboardInterrupt as interruption:
        command = hub.push_command(folder, repo, private)
        raise KeyboardInterrupt(str(interruption) or f"nothing was uploaded; repeat with: {command}") from None
    document = {"url": url, "num_files": len(plan.send), "num_bytes": num_bytes, "left_out": list(plan.left_out)}
    click.echo(json.dumps(document, indent=2) if as_json else url)


def _print_files(folder: Path, repo: str, as_json: bool) -> None:
    from wisparse.formats.card import CARD

    sizes = hub.push_sizes(folder, repo)
    verify_bundle(folder)
    card = (folder / CARD).read_text(encoding="utf-8", errors="replace") if CARD in sizes else ""
    if as_json:
        click.echo(json.dumps({"repo": repo, "files": sizes, "num_bytes": sum(sizes.values()), "card": card}, indent=2))
        return
    click.echo(f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB, for {repo} (nothing was uploaded)")
    print_table(("file", "bytes"), [(printable(name), f"{size:,}") for name, size in sizes.items()])
    click.echo(f"\n{CARD}:\n\n{card}" if card else f"\nno {CARD}: the repository will have no model card")
