"""Parameters that name something here or on the Hub, completed in a shell by what is here."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem

from wisparse.formats.guard.arguments import place
from wisparse.formats.guard.places import expand

__all__ = ["FILE_OR_ID", "FOLDER", "FOLDER_OR_ID", "NEW_FOLDER", "revision_option"]


class _Place(click.types.StringParamType):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._kind)]


class _NewFolder(click.Path):
    """A folder to be made: a path, and never the current folder because a variable was empty."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        name = max(param.opts, key=len) if param is not None else "folder"
        return expand(place(name.upper() if isinstance(param, click.Argument) else name, value))


FOLDER = _Place("dir")
FOLDER_OR_ID = _Place("dir")
FILE_OR_ID = _Place("file")
NEW_FOLDER = _NewFolder()

revision_option = click.option("--revision", help="Branch, tag or commit of a bundle on the Hub.")
