"""Types of arguments, and tables: what every verb may use. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from wisparse.formats.errors import printable
from wisparse.formats.guard import expand, place
from wisparse.formats.weight_types import NOT_DTYPES

_F = TypeVar("_F", bound=Callable[..., Any])


class _Place(click.types.StringParamType):
    """A path or a Hub id; the shell completes names of files or folders."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._kind)]


class _NewFolder(click.Path):
    """A folder to be made: a path, and never the current folder because a variable was empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = max(param.opts, key=len) if param is not None else "folder"
        return expand(place(name.upper() if isinstance(param, click.Argument) else name, value))


class Dtype(click.Choice[str]):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in NOT_DTYPES:
            self.fail(f"expected {', '.join(self.choices)}; {NOT_DTYPES[value]}", param, ctx)
        return super().convert(value, param, ctx)


class Speculative(click.ParamType):
    """JSON as it stands, ``auto``, or ``off``, which becomes None."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        return None if value == "off" else value


FOLDER = FOLDER_OR_ID = _Place("dir")
FILE_OR_ID = _Place("file")
NEW_FOLDER = _NewFolder()


def stacked(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several click options as one decorator, in this order in the help text."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def print_rows(title: str, rows: Iterable[tuple[str, str | None]]) -> None:
    """A table of names and the values that there are, at least 100 columns wide where the output is no terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, printable(value))
    _show(table, 100)


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: int = 1, note: str = ""
) -> None:
    """A table whose first ``left`` columns are text and whose others are figures, and a note below it. Where the output
    is no terminal it is as wide as it has to be, so that no figure is broken in two."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < left else "right", no_wrap=index < left)
    for row in rows:
        table.add_row(*row)
    _show(table, 1000, note)


def _show(table: Any, width: int, note: str = "") -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, width)
    console.print(table)
    if note:
        console.print(note)
