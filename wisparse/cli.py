"""The command line: runs a sub-command, and turns expected errors into one sentence and an exit code."""

from __future__ import annotations

import codecs
import contextlib
import errno
import importlib
import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from wisparse.formats.machine import torchrun_place, usable_cores

from . import __version__
from .formats.errors import WisparseError

# Sub-commands and their short help. Their modules are imported when they are used, so that `wisparse --help` is quick.
VERBS = {
    "advise": "Estimate speed, memory and quality of a converted model on this machine.",
    "convert": "Convert a Hugging Face model into a sparse bundle.",
    "inspect": "Show a bundle's recipe.",
    "verify": "Check a bundle's every tensor, number and digest.",
    "generate": "Generate text from a prompt.",
    "chat": "Talk with a model.",
    "serve": "Serve a bundle over HTTP, with OpenAI's and Anthropic's APIs.",
    "bench": "Measure decoding speed, dense and sparse side by side.",
    "eval": "Measure quality, dense and sparse side by side.",
    "export-onnx": "Export a bundle as an ONNX decoder.",
    "push": "Upload a bundle to the Hugging Face Hub.",
}
# Sub-commands that share a module, where the function has their name; others are `command` in a module of their name.
_MODULES = {"inspect": "bundles", "verify": "bundles", "push": "bundles"}

# GOMP_SPINCOUNT: iterations, of about 20 to 50 ns, for which an idle OpenMP thread spins before it sleeps; the default is
# 300,000. A little longer than the time between two decode steps, so that threads do not sleep between them.
_SPIN_COUNT = "3000"


class _Verbs(click.Group):
    """A group that imports a sub-command when it is called or completed; `commands` has only names and short help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and load_verb(str(name)), rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except WisparseError as error:  # may name an argument of the Python API: name the option
            argument, colon, rest = str(error).partition(":")
            parameters = load_verb(str(ctx.invoked_subcommand)).params
            options = {one.name: max(one.opts, key=len) for one in parameters if isinstance(one, click.Option)}
            if not colon or argument not in options:
                raise
            raise type(error)(f"{options[argument]}:{rest}") from error


def load_verb(name: str) -> click.Command:
    module = importlib.import_module(f".commands.{_MODULES.get(name, name.replace('-', '_'))}", __package__)
    command: click.Command = getattr(module, name if name in _MODULES else "command")
    return command


@click.group(
    cls=_Verbs,
    commands={name: click.Command(name, short_help=text) for name, text in VERBS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="wisparse")
def cli() -> None:
    """Faster LLM decoding without training, by weight-aware activation sparsity.

    \b
    wisparse convert meta-llama/Llama-3.1-8B-Instruct -o out
    wisparse generate out --prompt "Why is the sky blue?"
    """


def main(args: Sequence[str] | None = None) -> None:
    _run(cli, args, "wisparse")


def convert_main(args: Sequence[str] | None = None) -> None:
    _run(convert_program(), args, "wisparse-convert")


def convert_program() -> click.Command:
    """``convert`` as a program of its own, with ``--version`` and the group's help options."""
    command = load_verb("convert")
    # A new command: click caches the help option in the old one, and the group's has other names.
    attributes = {name: getattr(command, name) for name in ("callback", "help", "epilog", "short_help")}
    settings = {**cli.context_settings, **command.context_settings}
    program = type(command)(command.name, params=list(command.params), context_settings=settings, **attributes)
    return click.version_option(__version__, prog_name="wisparse-convert")(program)


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that the shell closed (``>&-``). Else the next file that is opened gets the
    stream's file descriptor, and libraries' messages are written to it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  (open until the process ends)
            os.set_inheritable(null.fileno(), True)
            setattr(sys, name, null)


def encode_everything() -> None:
    """On stdout, write undecodable bytes of file names unchanged, and escape other characters it cannot encode."""

    def encodable(error: UnicodeError) -> tuple[str | bytes, int]:
        assert isinstance(error, UnicodeEncodeError)
        error.end = error.start + 1  # one character at a time
        escape = "surrogateescape" if "\udc80" <= error.object[error.start] <= "\udcff" else "backslashreplace"
        return codecs.lookup_error(escape)(error)

    codecs.register_error("wisparse", encodable)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="wisparse")


def limit_threads() -> None:
    """Limit torch's threads to the usable cores, and how long idle ones spin, which takes the core from working threads.
    OpenMP reads both variables when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    cores = usable_cores()
    if cores < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))


def _run(command: click.Command, args: Sequence[str] | None, name: str) -> None:
    _open_closed_streams()
    encode_everything()
    limit_threads()
    try:
        os.getcwd()  # torch's import fails without one
    except FileNotFoundError:
        _fail("the current folder does not exist any more; change to another one", 2)
    try:
        # Without standalone mode click returns the code of ctx.exit(), or None.
        sys.exit(command.main(args=args, prog_name=name, standalone_mode=False))
    except click.ClickException as error:
        _leave_to_first(error.exit_code)
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as interruption:
        # click raises Abort from KeyboardInterrupt; the sub-command's message on how to resume is in the cause.
        hint = str(interruption.__cause__ or interruption)
        _fail("; ".join(filter(None, ("interrupted", hint))), 130)
    except WisparseError as error:
        if os.environ.get("WISPARSE_DEBUG"):
            raise
        _leave_to_first(error.exit_code)
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _fail(f"the disk is full ({error.filename or 'while writing'}); free some space and run again", 5)
        if "temporary directory" in str(error):  # tempfile's message
            _fail("no folder for temporary files can be written to, /tmp for instance; is the disk full?", 5)
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            _fail(f"no permission: {error.filename}", 4)
        raise


def _leave_to_first(code: int) -> None:
    """Under torchrun, before the processes are joined, wait for rank 0 to report the error; torchrun then ends all."""
    distributed = sys.modules.get("torch.distributed")
    if torchrun_place().index and not (distributed and distributed.is_initialized()):
        time.sleep(30)
        sys.exit(code)


def _fail(message: str, code: int) -> None:
    with contextlib.suppress(OSError):  # stderr cannot be written to
        click.echo(f"wisparse: {message}", err=True)
    sys.exit(code)
