"""``wisparse push``: a bundle to the Hugging Face Hub."""

from __future__ import annotations

import json

import click

from wisparse.formats.errors import AccessError, printable
from wisparse.formats.guard import find_folder, quoted
from wisparse.formats.hub import (
    check_write_access,
    is_public,
    plan_push,
    public_repository,
    push_bundle,
    push_command,
)
from wisparse.formats.verify import verify_bundle

from ..options import FOLDER


@click.command("push")
@click.argument("bundle", type=FOLDER)
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make the repository private; refuse one that is public.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(bundle: str, repo: str, private: bool, as_json: bool) -> None:
    """Upload the folder BUNDLE to the Hub as REPO (USER/NAME).

    The bundle is verified first. Only its own files go, nothing else that lies in the folder. What is on the Hub
    already is not sent again, so a push that broke off can simply be repeated. Log in once with `hf auth login`, or set
    HF_TOKEN.

    \b
    Example:
      wisparse push out my-name/Llama-3.1-8B-wisparse-50 --private
    """
    folder = find_folder(bundle)
    if folder is None:
        raise AccessError(f"{quoted(bundle)}: there is no such folder")
    try:
        check_write_access(repo)
        if private and is_public(repo):
            raise AccessError(public_repository(folder, repo))
        verify_bundle(folder)
        plan = plan_push(folder, repo)
        for name in plan.left_out:
            click.echo(f"left out, not part of the bundle: {printable(name)}", err=True)
        num_bytes = sum(plan.send.values())
        what = f"nothing to upload: {repo} holds all {plan.num_files} files already"
        if plan.send:
            what = f"uploading {len(plan.send)} of {plan.num_files} files, {num_bytes / 1e6:,.1f} MB, to {repo}"
        click.echo(what, err=True)
        url = push_bundle(folder, repo, private=private)
    except KeyboardInterrupt as interruption:
        again = push_command(folder, repo, private)
        raise KeyboardInterrupt(str(interruption) or f"nothing was uploaded; repeat with: {again}") from None
    document = {"url": url, "num_files": len(plan.send), "num_bytes": num_bytes, "left_out": list(plan.left_out)}
    click.echo(json.dumps(document, indent=2) if as_json else url)
