"""Parameters that name something here or on the Hub: plain strings, completed in a shell by what is here."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

__all__ = ["FILE_OR_ID", "FOLDER_OR_ID"]


class _Place(click.types.StringParamType):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._kind)]


FOLDER_OR_ID = _Place("dir")
FILE_OR_ID = _Place("file")
