"""``wisparse push``: a bundle to the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path

import click

from wisparse.formats.errors import AccessError
from wisparse.formats.hub import check_write_access, push_bundle
from wisparse.formats.verify import verify_bundle

__all__ = ["command"]


@click.command("push")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make the repository private; refuse one that is public.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(bundle: Path, repo: str, private: bool, as_json: bool) -> None:
    """Upload the folder BUNDLE to the Hub as REPO (USER/NAME).

    The bundle is verified first. What is on the Hub already is not sent again, so a push that broke off can simply be
    repeated. Log in once with `hf auth login`, or set HF_TOKEN.

    \b
    Example:
      wisparse push out my-name/Llama-3.1-8B-wisparse-50 --private
    """
    if not bundle.is_dir():
        raise AccessError(f"{str(bundle)!r}: there is no such folder")
    check_write_access(repo)
    report = verify_bundle(bundle)
    click.echo(f"uploading {report.num_files} files, {report.num_bytes / 1e6:,.1f} MB, to {repo}", err=True)
    url = push_bundle(bundle, repo, private=private)
    click.echo(json.dumps({"url": url, "num_bytes": report.num_bytes}, indent=2) if as_json else url)
