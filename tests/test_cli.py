"""The frame of the command line: verbs, hints, exit codes, and no traceback on an expected failure."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from tiny_bundle import write_tiny_bundle, write_tiny_model

from wisparse import cli
from wisparse.commands import convert
from wisparse.converter.settings import ConvertSettings
from wisparse.formats import errors


def _verb(monkeypatch: pytest.MonkeyPatch, body: Callable[[], None]) -> None:
    """Put a command in the place of `inspect`."""
    module = types.ModuleType("wisparse.commands.bundles")
    module.inspect = click.command("inspect")(body)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wisparse.commands.bundles", module)


def _run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(args)
    captured = capsys.readouterr()
    return exit_info.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize("name", [name for name in vars(errors) if isinstance(getattr(errors, name), type)])
def test_every_error_has_its_exit_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = getattr(errors, name)

    def body() -> None:
        raise error("what was wrong")

    _verb(monkeypatch, body)
    code, out, err = _run(["inspect"], capsys)
    assert (code, out, err) == (error.exit_code, "", "wisparse: what was wrong\n")


def test_interrupt_tells_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise KeyboardInterrupt("run the same command again to resume")

    _verb(monkeypatch, body)
    code, _, err = _run(["inspect"], capsys)
    assert code == 130
    assert "interrupted; run the same command again to resume" in err


def test_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")

    _verb(monkeypatch, body)
    code, _, err = _run(["inspect"], capsys)
    assert code == 5
    assert "the disk is full (out/model.safetensors)" in err


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (
            OSError(errno.EFBIG, "File too large", "out/model.safetensors"),
            5,
            "the disk is full (out/model.safetensors)",
        ),
        (OSError(errno.EROFS, "Read-only file system", "out/x"), 4, "no permission: out/x"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), 5, "is the disk full?"),
    ],
)
def test_what_a_disk_refuses_in_other_words(
    error: OSError, expected: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise error

    _verb(monkeypatch, body)
    code, _, err = _run(["inspect"], capsys)
    assert code == expected
    assert words in err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        raise ZeroDivisionError

    _verb(monkeypatch, body)
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect"])


def test_mistyped_verb_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(["generte"], capsys)
    assert code == 2
    assert "Did you mean 'generate'?" in err


def test_mistyped_option_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(["convert", "model", "--sparsty", "0.5"], capsys)
    assert code == 2
    assert "--sparsity" in err


@pytest.mark.parametrize("verb", cli._VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run([verb, "--help"], capsys)
    assert code == 0
    examples = [
        line for line in out.splitlines() if line.strip().startswith((f"wisparse {verb} ", f"wisparse-{verb} "))
    ]
    assert examples
    assert all(len(line) <= 80 for line in examples)


@pytest.mark.parametrize(
    "leftover", [{"RANK": "1"}, {"RANK": "3", "WORLD_SIZE": "4"}, {"WORLD_SIZE": "2"}, {"RANK": "x"}]
)
def test_a_variable_of_torchrun_alone_silences_nothing(
    leftover: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in leftover.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: pytest.fail("waits for a first process that nobody started"))
    code, _, err = _run(["convert"], capsys)
    assert code == 2
    assert "Missing argument 'MODEL'" in err
    code, _, err = _run(["convert", "model", "--sparsity", "2"], capsys)
    assert code == 2
    assert "--sparsity: expected" in err
    model = write_tiny_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("a line of text for a calibration\n" * 200)
    options = ["--calibration", str(text), "--seq-len", "8", "--num-samples", "2", "--device", "cpu", "--dry-run"]
    code, out, err = _run(["convert", str(model), "-o", str(tmp_path / "out"), *options], capsys)
    assert code == 0, err
    assert "Plan (nothing was converted)" in out
    assert "in the environment ignored" in caplog.text


@pytest.mark.parametrize(
    "arguments", [["--help"], ["convert", "--help"], ["convert", "x", "--sparsty", "1"], ["convert", "x", "--seed=-1"]]
)
def test_help_and_usage_errors_need_no_torch(arguments: list[str]) -> None:
    script = (
        f"import sys\nfrom wisparse.cli import main\ntry: main({arguments})\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("0 False" if "--help" in arguments else "2 False")


def test_the_table_of_settings_is_the_command_lines() -> None:
    settings = {field.name: field for field in dataclasses.fields(ConvertSettings)}
    parameters = {parameter.name: parameter for parameter in convert.command.params}
    own = {"dry_run", "verbose", "quiet", "as_json"}
    assert parameters.keys() == settings.keys() | own
    for name in settings.keys() - {"model", "sparsity"}:  # which is a text there
        assert parameters[name].get_default(click.Context(convert.command)) == settings[name].default, name


def test_closed_pipe_shows_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m wisparse --help | true",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("program", "typed", "expected"),
    [
        ("wisparse", "wisparse ", {"convert", "generate", "export-onnx", "push"}),
        ("wisparse", "wisparse exp", {"export-onnx"}),
        ("wisparse", "wisparse push --pri", {"--private"}),
        ("wisparse-convert", "wisparse-convert --spars", {"--sparsity"}),
    ],
)
def test_shell_completion(program: str, typed: str, expected: set[str]) -> None:
    entry = {"wisparse": "main", "wisparse-convert": "convert_main"}[program]
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    script = f"import sys; from wisparse import cli; sys.argv[0] = {program!r}; cli.{entry}()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), variable: "bash_complete"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert expected <= {line.partition(",")[2] for line in done.stdout.splitlines()}, done.stderr
    if typed == "wisparse exp":
        assert done.stdout.splitlines() == ["plain,export-onnx"]


def _complete(program: str, typed: str) -> list[str]:
    """What a shell offers after ``typed``, which ends with the word to complete; in this process."""
    command = cli._convert_program() if program == "wisparse-convert" else cli.cli
    *before, word = typed.split(" ")
    complete = BashComplete(command, {}, program, "_COMPLETE")
    return [f"{item.type},{item.value}" for item in complete.get_completions(before, word)]


@pytest.mark.parametrize("verb", cli._VERBS)
def test_the_shell_completes_a_verbs_first_argument_with_names_of_folders(verb: str) -> None:
    assert _complete("wisparse", f"{verb} ex") == ["dir,ex"]


@pytest.mark.parametrize(
    ("program", "typed", "expected"),
    [
        ("wisparse", "convert model --calibration ", "file,"),
        ("wisparse", "convert model -o ou", "file,ou"),
        ("wisparse", "eval one two ", "dir,"),
        ("wisparse", "eval out --text corpus/", "file,corpus/"),
        ("wisparse", "eval out --tasks mine --include-path ", "dir,"),
        ("wisparse", "export-onnx out ou", "file,ou"),
        ("wisparse-convert", "ex", "dir,ex"),
        ("wisparse-convert", "model --calibration te", "file,te"),
        ("wisparse-convert", "model --work-dir ", "file,"),
    ],
)
def test_the_shell_completes_names_of_files(program: str, typed: str, expected: str) -> None:
    assert _complete(program, typed) == [expected]


def test_wisparse_convert_is_a_program_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            cli.convert_main(arguments)
        captured = capsys.readouterr()
        return exit_info.value.code or 0, captured.out, captured.err

    # Also after the verb was run by itself, whose help option has one name.
    with pytest.raises(SystemExit):
        convert.command(["--help"])
    capsys.readouterr()
    assert run("--version") == (0, f"wisparse-convert, version {cli.__version__}\n", "")
    for option in ("-h", "--help"):
        code, out, _ = run(option)
        assert code == 0
        assert out.startswith("Usage: wisparse-convert [OPTIONS] MODEL")
        assert "--version" in out
    code, _, err = run("model", "--sparsty", "1")
    assert code == 2
    assert err.startswith("Usage: wisparse-convert [OPTIONS] MODEL\nTry 'wisparse-convert -")
    assert "No such option" in _run(["convert", "model", "--version"], capsys)[2], "the verb has no version of its own"


def test_threads_wait_briefly_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os; from wisparse.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)

    def count(**settings: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, check=True
        ).stdout.split()[-1]

    assert count() == "3000"
    assert count(OMP_WAIT_POLICY="active") == "None"
    assert count(GOMP_SPINCOUNT="5") == "5"


def test_threads_are_no_more_than_the_quota_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for given, quota, found in ((None, 2, "2"), ("7", 2, "7"), (None, 64, None)):
        monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_NUM_THREADS": given})
        monkeypatch.setattr(cli, "usable_cores", lambda quota=quota: quota)
        cli._limit_threads()
        assert os.environ.get("OMP_NUM_THREADS") == found


def test_a_conversion_leaves_busy_cores_alone_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from wisparse.commands import convert

    monkeypatch.setattr(convert, "usable_cores", lambda: 4)
    for given, idle, found in ((None, 1, "1"), (None, 4, None), ("3", 1, "3")):
        monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_NUM_THREADS": given})
        monkeypatch.setattr(convert, "idle_cores", lambda idle=idle: idle)
        monkeypatch.delitem(sys.modules, "torch", raising=False)  # it would be too late otherwise
        convert._leave_busy_cores()
        assert os.environ.get("OMP_NUM_THREADS") == found


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["inspect", "generate"])
def test_closed_standard_streams_are_as_dev_null(tmp_path: Path, verb: str, closed: str) -> None:
    """No traceback, the exit code of /dev/null, and nothing written into a file that got a stream's number."""
    write_tiny_bundle(tmp_path / "bundle", write_tiny_model(tmp_path / "model"))
    options = "" if verb == "inspect" else "--prompt hi --max-new-tokens 1 --backend torch"
    command = f"{sys.executable} -m wisparse {verb} {tmp_path / 'bundle'} {options} {closed}"
    done = subprocess.run(command, shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_a_full_disk_behind_standard_error_keeps_the_exit_code() -> None:
    done = subprocess.run(
        f"{sys.executable} -m wisparse inspect /nowhere 2> /dev/full", shell=True, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (4, "")


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m wisparse generate out --prompt x"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "wisparse: the folder that this was started in is there no more; go to another one\n"


def test_generate_without_a_standard_input(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path / "bundle", write_tiny_model(tmp_path / "model"))
    command = f"{sys.executable} -m wisparse generate {tmp_path / 'bundle'} --backend torch <&-"
    done = subprocess.run(command, shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "wisparse: the prompt has no tokens: give at least one\n"


def test_a_tasks_table_shows_questions_and_standard_errors_and_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    from wisparse.commands.eval import _print_task_table

    tasks = {
        "masks off": {"t": {"num_questions": 1319, "acc": 0.0556, "acc_stderr": 0.05}},
        "half": {"t": {"num_questions": 1319, "acc": 0.2222, "acc_stderr": 0.1}},
    }
    _print_task_table([{"bundle": "out", "tasks": tasks, "generation": {}}])
    text = capsys.readouterr().out
    assert "0.0556 ± 0.0500" in text
    assert [line.split()[:4] for line in text.splitlines() if " acc " in line] == [["out", "t", "acc", "1,319"]]
    assert "0.2222 ± 0.1000" in text
    assert "%" not in text
