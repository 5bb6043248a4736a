"""``wisparse verify``: is this bundle whole?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from wisparse.formats.bundle import Bundle
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.verify import verify_bundle
from wisparse.runtime.tokenizer import check_tokenizer

from ..options import FOLDER_OR_ID, revision_option


@click.command("verify")
@click.argument("bundle", type=FOLDER_OR_ID)
@revision_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(bundle: str, revision: str | None, as_json: bool) -> None:
    """Check every tensor, number and digest of BUNDLE, a folder or a Hub id, and try its tokenizer and chat template.

    \b
    wisparse verify out
    wisparse verify USER/NAME --revision main --json
    """
    folder = fetch_bundle(bundle, revision)
    report = verify_bundle(folder)
    check_tokenizer(Bundle.open(folder))
    if not Path(bundle).is_dir():
        # Pictures are not fetched, so that they are not there says nothing about the repository.
        report = replace(report, notes=tuple(note for note in report.notes if not note.endswith(": missing")))
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{bundle}: valid. {report.num_files} files, {report.num_bytes / 1e6:,.1f} MB, {report.num_tensors} weight "
        f"tensors, {report.num_projections} masks, in {report.seconds:.1f} s"
    )
