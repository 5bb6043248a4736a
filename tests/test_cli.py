"""The frame of the command line: verbs, hints, exit codes, and no traceback on an expected failure."""

import dataclasses
import errno
import functools
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_bundle import digests, write_tiny_bundle, write_tiny_model

from wisparse import cli
from wisparse.commands import convert
from wisparse.commands.eval import print_task_table
from wisparse.converter.settings import ConvertOptions, ConvertSettings
from wisparse.formats import errors

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type)]


def _fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    failing = click.Command("inspect", callback=Mock(side_effect=error))
    monkeypatch.setitem(sys.modules, "wisparse.commands.bundles", types.SimpleNamespace(inspect=failing))


Run = Callable[..., tuple[int, str, str]]
FULL = "the disk is full (out/x); free some space and run again"
NO_TEMPORARY = "no folder for temporary files can be written to, /tmp for instance; is the disk full?"


@pytest.mark.parametrize(
    ("error", "expected", "sentence"),
    [
        *((kind("what was wrong"), kind.exit_code, "what was wrong") for kind in ERRORS),
        (KeyboardInterrupt("run the same command again"), 130, "interrupted; run the same command again"),
        (KeyboardInterrupt(), 130, "interrupted"),
        *((OSError(number, "No space", "out/x"), 5, FULL) for number in (errno.ENOSPC, errno.EFBIG)),
        (OSError(errno.EROFS, "Read-only file system", "out/x"), 4, "no permission: out/x"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), 5, NO_TEMPORARY),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_every_error_has_its_exit_code(
    error: BaseException, expected: int, sentence: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    _fail(monkeypatch, error)
    code, out, err = run("inspect")
    assert (code, out, err.lstrip("\n")) == (expected, "", f"wisparse: {sentence}\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect"])


def test_usage_errors_have_a_hint(run: Run) -> None:
    for typed, hint in (
        ("generte", "Did you mean 'generate'?"),
        ("convert model --sparsty 0.5", "--sparsity"),
        ("convert", "Missing argument 'MODEL'"),
        ("convert model --sparsity 2", "--sparsity: expected"),
    ):
        code, _, err = run(*typed.split())
        assert (code, hint in err) == (2, True), err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_with_an_example(verb: str, run: Run) -> None:
    code, out, _ = run(verb, "--help")
    assert code == 0
    examples = [line for line in out.splitlines() if re.match(rf"\s*wisparse[ -]{verb} ", line)]
    assert [len(line) <= 80 for line in examples] == [True] * max(1, len(examples))


@pytest.mark.parametrize("leftover", ["RANK=1", "RANK=3 WORLD_SIZE=4", "WORLD_SIZE=2", "RANK=x"])
def test_a_variable_of_torchrun_alone_silences_nothing(
    leftover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for variable in leftover.split():
        monkeypatch.setenv(*variable.split("="))

    # The command's clock and not the module's: others may wait for compilers of kernels.
    waits = Mock(side_effect=AssertionError("waits for a first process that nobody started"))
    monkeypatch.setattr(cli, "time", types.SimpleNamespace(sleep=waits))
    monkeypatch.setattr("wisparse.runtime.forecast.ROUNDS", 1)
    code, _, err = run("convert")
    assert (code, "Missing argument 'MODEL'" in err) == (2, True)
    text = tmp_path / "text.txt"
    text.write_text("a line of text for a calibration\n" * 200)
    options = f"-o {tmp_path}/out --calibration {text} --seq-len 8 --num-samples 2 --device cpu --dry-run".split()
    code, out, err = run("convert", str(write_tiny_model(tmp_path / "model")), *options)
    assert code == 0, err
    assert "Plan (nothing was converted)" in out
    assert "in the environment ignored" in caplog.text


def test_the_table_of_settings_is_the_command_lines() -> None:
    assert ConvertOptions.__annotations__.keys() | {"model", "output_dir"} == ConvertSettings.__annotations__.keys()
    settings = {field.name: field for field in dataclasses.fields(ConvertSettings)}
    parameters = {parameter.name: parameter for parameter in convert.command.params}
    own = {"dry_run", "verbose", "quiet", "as_json"}
    assert parameters.keys() == settings.keys() | own
    for name in settings.keys() - {"model", "sparsity", "bits"}:  # which are texts there
        assert parameters[name].get_default(click.Context(convert.command)) == settings[name].default, name


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, executable="/bin/bash", capture_output=True, text=True)


@pytest.mark.parametrize(
    ("program", "typed", "expected"),
    [
        ("wisparse", "exp", "plain,export-onnx"),
        ("wisparse", "push --pri", "plain,--private"),
        *(("wisparse", f"{verb} ex", "dir,ex") for verb in cli.VERBS),
        ("wisparse", "convert model --calibration ", "file,"),
        ("wisparse", "convert model -o ou", "file,ou"),
        ("wisparse", "eval one two ", "dir,"),
        ("wisparse", "eval out --text corpus/", "file,corpus/"),
        ("wisparse", "eval out --tasks mine --include-path ", "dir,"),
        ("wisparse", "export-onnx out ou", "file,ou"),
        ("wisparse-convert", "ex", "dir,ex"),
        ("wisparse-convert", "x --spars", "plain,--sparsity"),
        ("wisparse-convert", "model --calibration te", "file,te"),
        ("wisparse-convert", "model --work-dir ", "file,"),
    ],
)
def test_the_shell_completes_verbs_options_and_names_of_files(program: str, typed: str, expected: str) -> None:
    command = cli.convert_program() if program == "wisparse-convert" else cli.cli
    *before, word = typed.split(" ")
    offered = BashComplete(command, {}, program, "_COMPLETE").get_completions(before, word)
    assert [f"{item.type},{item.value}" for item in offered] == [expected]


def test_wisparse_convert_is_a_program_of_its_own(run: Run) -> None:
    program = functools.partial(run, main=cli.convert_main)
    # Also after the verb was run by itself, whose help option has one name.
    run(main=lambda _: convert.command(["--help"]))
    assert program("--version") == (0, f"wisparse-convert, version {cli.__version__}\n", "")
    for option in ("-h", "--help"):
        code, out, _ = program(option)
        assert (code, "--version" in out) == (0, True)
        assert out.startswith("Usage: wisparse-convert [OPTIONS] MODEL")
    code, _, err = program("model", "--sparsty", "1")
    assert code == 2
    assert err.startswith("Usage: wisparse-convert [OPTIONS] MODEL\nTry 'wisparse-convert -")
    assert "No such option" in run("convert", "model", "--version")[2], "the verb has no version of its own"


def test_threads_wait_briefly_and_are_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    spin, threads, quota = "GOMP_SPINCOUNT", "OMP_NUM_THREADS", 2
    monkeypatch.setattr(cli, "usable_cores", lambda: quota)
    for given, found in (
        ({}, {spin: "3000", threads: "2"}),
        ({spin: "5", threads: "7"}, {spin: "5", threads: "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active", threads: "2"}),
    ):
        monkeypatch.setattr(os, "environ", dict(given))
        cli.limit_threads()
        assert os.environ == found
    quota = 64
    monkeypatch.setattr(os, "environ", {})
    cli.limit_threads()
    assert threads not in os.environ


def test_a_conversion_leaves_busy_cores_alone_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "usable_cores", lambda: 4)
    for given, idle, found in ((None, 1, "1"), (None, 4, None), ("3", 1, "3")):
        monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_NUM_THREADS": given})
        monkeypatch.setattr(convert, "idle_cores", lambda idle=idle: idle)
        monkeypatch.delitem(sys.modules, "torch", raising=False)  # it would be too late otherwise
        convert.limit_threads_to_idle_cores()
        assert os.environ.get("OMP_NUM_THREADS") == found


def test_streams_and_folders_that_are_not_there(tmp_path: Path) -> None:
    """Closed streams are as /dev/null: nothing is written into a file that got a stream's number."""
    program, gone, bundle = f"{sys.executable} -m wisparse", tmp_path / "gone", tmp_path / "bundle"
    gone.mkdir()
    write_tiny_bundle(bundle, write_tiny_model(tmp_path / "model"))
    before = digests(bundle)
    generate = f"{program} generate {bundle} --backend torch --max-new-tokens 1"
    no_folder = "wisparse: the current folder does not exist any more; change to another one\n"
    no_prompt = "wisparse: no prompt: standard input is empty; give one with --prompt or --prompt-file\n"
    for command, code, sentence in (
        *((f"{program} inspect {bundle} {closed}", 0, None) for closed in ("<&-", ">&-", "2>&-")),
        (f"{generate} --prompt hi <&- >&- 2>&-", 0, ""),
        (f"{program} --help | true", 0, ""),
        (f"{program} inspect /nowhere 2> /dev/full", 4, ""),
        (f"cd {gone} && rmdir {gone} && exec {program} generate out --prompt x", 2, no_folder),
        (f"{generate} <&-", 2, no_prompt),
    ):
        done = _shell(command)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), command
        assert sentence is None or (done.stdout, done.stderr) == ("", sentence), command
    assert digests(bundle) == before


def test_a_tasks_table_shows_questions_and_standard_errors_and_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"masks off": (0.0556, 0.05), "half": (0.2222, 0.1)}
    tasks = {name: {"t": {"num_questions": 1319, "acc": acc, "acc_stderr": e}} for name, (acc, e) in found.items()}
    print_task_table([{"bundle": "out", "tasks": tasks, "generation": {}}])
    text = capsys.readouterr().out
    [line] = [" ".join(line.split()) for line in text.splitlines() if " acc " in line]
    assert line == "out t acc 1,319 0.0556 ± 0.0500 0.2222 ± 0.1000"
    assert "%" not in text


# Misuse: every parameter of every verb with what it cannot be. Whatever is given ends in one of the documented exit
# codes, with one sentence if it is refused, soon, and with nothing on disk that was not there before. The parameters
# are those that click knows, so a new one is in the table by itself.
EXIT_CODES = {0, 2, 3, 4, 5, 6, 7}
# Of the processor: the machine may have other work.
SECONDS = 10.0
ESCAPE = "a\nb\x1b[31m"
# What no number, choice, place or name is, or is rarely.
ODD = ["", " ", "-1", "0", "1", "9" * 30, "1.5", "nan", "-inf", "1e400", "nonsense", "a,b,,c", "me/it", "\udcff"]
ODD += [ESCAPE, "x" * 300, "x" * 5000, "x/" + "y" * 300, "missing/below", "~nobodyhere/x", ".", "/dev/null"]
ODD += ["/dev/null/below", "/proc/nothing", "FILE", "EMPTY", "PIPE", "BUNDLE"]
RUN = ["--backend", "torch", "--device", "cpu"]
# Where any text will do, one of each kind is enough.
FREE = ("--prompt", "--stop", "--system-prompt", "--alias", "--cors", "--allowed-host", "--grammar", "--json-schema")
FREE += ("--reasoning-effort", "--chat-template")
TEXTS = ["", " ", "0", "\udcff", ESCAPE, "x" * 5000]
QUICK = ["--calibration", "TEXT", "--num-samples", "2", "--seq-len", "8", "--method", "teal", "--search", "uniform"]
QUICK += ["--device", "cpu", "-q"]
EVAL = ["--num-samples", "1", "--seq-len", "8", *RUN]
# What each verb is given beside the parameter; small, so that a value that is taken costs little.
GIVEN = {
    "advise": (["MODEL"], ["--device", "cpu"]),
    "convert": (["MODEL"], ["-o", "out", "--dry-run", *QUICK]),
    "inspect": (["BUNDLE"], []),
    "verify": (["BUNDLE"], []),
    "generate": (["BUNDLE"], ["--prompt", "x", "--max-new-tokens", "1", *RUN]),
    "chat": (["BUNDLE"], ["--max-new-tokens", "1", *RUN]),
    "bench": (["BUNDLE"], ["--max-new-tokens", "2", "--runs", "1", *RUN]),
    "eval": (["BUNDLE"], ["--text", "TEXT", *EVAL]),
    "serve": (["BUNDLE"], ["--port", "0", *RUN]),
    "export-onnx": (["BUNDLE", "out"], ["--no-check"]),
    "push": (["BUNDLE", "me/it"], []),
}
# What some parameters mean something only together with; in place of the options above.
WITH = {
    "convert --num-generations --num-offspring": ["-o", "out", "--dry-run", "--search", "paper"],
    "convert --private": ["-o", "out", "--upload-repo", "me/it"],
    "generate --prompt-file": ["--max-new-tokens", "1", *RUN],
    "generate --input": ["--output", "answers", "--max-new-tokens", "1", *RUN],
    "generate --output": ["--input", "TEXT", "--max-new-tokens", "1", *RUN],
    "generate --top-k --top-p --min-p --seed": ["--prompt", "x", "--temperature", "0.5", "--max-new-tokens", "1", *RUN],
    "eval --tasks --include-path --num-fewshot --limit --apply-chat-template --confirm-run-unsafe-code --seed":
        ["--tasks", "odd_task", "--include-path", "TASKS", *RUN],
}  # fmt: skip


def _parameters(verb: str) -> dict[str, click.Parameter]:
    return {max(one.opts, key=len): one for one in cli.load_verb(verb).params}


PARAMETERS = [(verb, name) for verb in cli.VERBS for name in _parameters(verb)]


def _line(verb: str, name: str, value: str) -> list[str]:
    """The command line: what is given, with ``value`` in the place of the parameter, or behind it."""
    arguments, options = GIVEN[verb]
    for names, others in WITH.items():
        if verb == names.split()[0] and name in names.split():
            options = others
    parameters = _parameters(verb)
    if isinstance(parameters[name], click.Argument):
        index = [key for key, one in parameters.items() if isinstance(one, click.Argument)].index(name)
        return [verb, *options, "--", *arguments[:index], value, *arguments[index + 1 :]]
    if parameters[name].is_flag:  # type: ignore[attr-defined]
        return [verb, *arguments, *options, f"{name}={value}"]
    return [verb, *arguments, *options, name, value]


TASK = {
    "task": "odd_task", "dataset_path": "json", "output_type": "generate_until", "test_split": "test",
    "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["."], "max_gen_toks": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import transformers.models.llama.modeling_llama  # noqa: F401  seconds on a busy machine, and no odd value's

    folder = tmp_path_factory.mktemp("odd")
    (folder / "text").write_text("a line of text to count channels on\n" * 200)
    (folder / "file").write_text("not a bundle")
    os.mkfifo(folder / "pipe")
    for name in ("empty", "tasks"):
        (folder / name).mkdir()
    (folder / "documents").write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "3", "answer": "4"}\n')
    data = {"data_files": {"test": str(folder / "documents")}}
    (folder / "tasks" / "odd_task.yaml").write_text(json.dumps({**TASK, "dataset_kwargs": data}))  # JSON is YAML
    write_tiny_bundle(folder / "bundle", write_tiny_model(folder / "model"))
    names = ("model", "bundle", "text", "file", "empty", "pipe", "tasks")
    return {name.upper(): str(folder / name) for name in names}


@pytest.fixture
def places(made: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Names of what was made; no network, and of the harness's tasks none, whose index takes ten seconds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("wisparse.runtime.forecast.ROUNDS", 1)
    # A server that has come so far would answer for ever.
    monkeypatch.setattr("wisparse.runtime.serve.app.serve", lambda model, settings, listener, ready: model.close())
    monkeypatch.chdir(tmp_path)
    tasks = pytest.importorskip("lm_eval.tasks")
    whole = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **given: whole(**{**given, "include_defaults": False}))
    return made


def _call(line: list[str]) -> tuple[int, str, str, float]:
    """Exit code, standard output and error, seconds; the streams encode as a terminal's do."""
    started = time.process_time()
    with CliRunner().isolation(input=b"") as (out, err, _), pytest.raises(SystemExit) as exit_info:
        cli.main(line)
    texts = out.getvalue().decode(errors="surrogateescape"), err.getvalue().decode()
    return int(exit_info.value.code or 0), *texts, time.process_time() - started


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(("verb", "name"), PARAMETERS)
def test_odd_values(verb: str, name: str, places: dict[str, str], tmp_path: Path) -> None:
    home, values = Path(places["BUNDLE"]).parent, TEXTS if name in FREE else ODD
    # Some are enough where an earlier verb has the parameter, and where the harness reads its tasks anew for each value.
    first = next(earlier for earlier, other in PARAMETERS if other == name)
    for value in values if verb == first and "--tasks" not in _line(verb, name, "") else values[::3]:
        before = _tree(home), _tree(tmp_path)
        line = [places.get(word, word) for word in _line(verb, name, value)]
        code, out, err, seconds = _call(line)
        said = f"{verb} {name} {value[:40]!r}: {code}\n{out}{err}"
        assert code in EXIT_CODES, said
        assert "Traceback" not in err, said
        assert "\x1b" not in out + err, said
        assert seconds < SECONDS, said
        assert _tree(home) == before[0], said
        if code:
            assert _tree(tmp_path) == before[1], said
            *usage, sentence = [part for part in err.splitlines() if part and "it/s]" not in part]
            usage = [part for part in usage if not re.match(r" *\d+ s elapsed  ", part)]  # progress
            if sentence.startswith("Error: "):  # click's, which repeats what was typed
                assert [part[:6] for part in usage] in ([], ["Usage:", "Try 'w"]), said
            else:
                assert sentence.startswith("wisparse: "), said
                assert usage == [], said
                assert len(sentence) < 1000, said


def test_what_a_dry_run_accepts_is_converted(places: dict[str, str], tmp_path: Path) -> None:
    """Odd names and numbers at their ends, all at once; nothing is left but the bundle."""
    code, _, err, _ = _call([places.get(word, word) for word in ["convert", "MODEL", *QUICK, "-o", "\udcff"]])
    assert code == 2
    assert err.startswith("wisparse: --output-dir: expected text, found half of a surrogate pair in")
    out = f"é/{ESCAPE}"
    odd = ["-o", out, "--work-dir", "-1/ ", "--max-shard-size", "1", "--num-samples", "1", "--seed", str(2**63 - 1)]
    line = [places.get(word, word) for word in ["convert", "MODEL", *QUICK, *odd]]
    assert _call([*line, "--dry-run"])[0] == 0
    assert _tree(tmp_path) == []
    code, shown, err, _ = _call(line)
    assert code == 0, err
    assert shown == ""  # -q
    assert _call(["verify", out])[0] == 0
    assert {name for name in _tree(tmp_path) if not name.startswith(out)} == {"é", "-1"}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("convert NOTOKENS -o out", "no tokenizer: expected tokenizer.json beside config.json, found none; copy it"),
        ("convert EMBEDDING -o out", "an embedding, reward or classification model writes no text: give the causal LM"),
        ("convert MODEL -o /proc/x", "/proc/x: /proc cannot be written to; choose another output folder"),
        ("convert MODEL -o out --work-dir /proc/x", "/proc/x: "),
        ("convert a/tune -o out", "there is no folder 'a/tune' here; 'a/tune' is not in the Hub's cache"),
        ("convert ./tune -o out", "cannot open model './tune': there is no such file or folder, and it is not a Hub"),
        ("generate a --prompt x", "there is no folder 'a' here; 'a' is not in the Hub's cache at this revision"),
        ("generate TEXT --prompt x", "is a file, not a folder: give the folder of a bundle, or its Hub id"),
        ("push TEXT me/it", "is a file, not a folder: give the folder of a bundle, or its Hub id"),
        ("generate BUNDLE --dtype int8", "expected auto, bfloat16, float16, float32; int8 weights are chosen by"),
        ("convert MODEL --dtype fp8", "fp8 weights are chosen by --weights fp8"),
        ("convert MODEL --num-samples 0", "--num-samples: expected a positive integer, found 0"),
        ("convert MODEL --max-shard-size 5XB", "--max-shard-size: expected a size such as 5GB or 500MiB, found '5XB'"),
        ("convert MODEL -o TEXT", "not a bundle but a file, so it is not replaced; choose another output folder"),
        ("inspect BUNDLE --sparsity 0.25", "--sparsity: expected one of the bundle's sparsity levels, "),
        ("serve BUNDLE --bits 4", "--bits: expected a graded bundle, found one with sparsity levels; choose a"),
        ("export-onnx BUNDLE out --sparsity 0.25", "--sparsity: expected one of the bundle's sparsity levels, "),
        ("generate BUNDLE --prompt-file none.txt", "none.txt: there is no such file"),
        ("bench BUNDLE --max-new-tokens 9999", "expected at most the model's context of "),
        ("serve BUNDLE --max-batch many", "expected auto or a number from 1 to 64, found 'many'"),
        ("serve BUNDLE --kv-cache-memory-bytes 10", "--kv-cache-memory-bytes: 10 bytes hold 0 positions"),
        ("eval BUNDLE --seq-len 64 --text none.txt", "none.txt: no such file or folder; expected"),
        ("generate BUNDLE", "no prompt: standard input is empty; give one with --prompt or --prompt-file"),
    ],
)
def test_a_mistake_is_answered_by_what_to_do(line: str, sentence: str, places: dict[str, str], tmp_path: Path) -> None:
    for name in ("NOTOKENS", "EMBEDDING"):
        if name in line:
            places = {**places, name: str(shutil.copytree(places["MODEL"], tmp_path / name.lower()))}
    for file in (tmp_path / "notokens").glob("tokenizer*"):
        file.unlink()
    for file in (tmp_path / "embedding").glob("*.safetensors"):
        save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    code, _, err, _ = _call([places.get(word, word) for word in line.split()])
    assert code in (2, 3, 4, 5)
    assert sentence in err


@pytest.mark.parametrize("option", ["--include-path=x", "--num-fewshot=0", "--limit=1", "--apply-chat-template"])
def test_options_of_tasks_are_refused_without_tasks(option: str, places: dict[str, str]) -> None:
    code, _, err, _ = _call(["eval", places["BUNDLE"], "--text", places["TEXT"], option])
    assert code == 2
    assert err == f"wisparse: {option.partition('=')[0]} requires --tasks\n"


def test_what_the_terminal_cannot_show_is_spelled_out(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", shown)
    cli.encode_everything()
    print("é☃\udcff", end="", flush=True)
    assert shown.buffer.getvalue() == b"\xe9\\u2603\xff"


MLX = {"quantization": {"group_size": 64, "bits": 4}}


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"model_type": "gemma3n_text"}, "", "the nearest known ones are gemma3_text"),
    ({"model_type": "mamba2", "time_step_limit": [0.0, math.inf]}, "", "is a recurrent or state-space model"),
    ({"model_type": None}, "", "model_type: expected a known one (docs/models.md), found None"),
    (MLX, "---\nbase_model: Qwen/Qwen3-8B\n---\n", "convert Qwen/Qwen3-8B"),
    (MLX, "---\nbase_model:\n- Qwen/Qwen3-8B\n---\n", "convert Qwen/Qwen3-8B"),
    (MLX, "no front matter", "convert the model that it was made from"),
    ({"hidden_act": "relu"}, "", "hidden_act: expected 'silu' or 'gelu_pytorch_tanh', found 'relu'"),
    ({"hidden_size": "64"}, "", "hidden_size: expected a number, found '64'"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "", "rotary scaling: expected one of default"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "xpos"}}},
        "",
        "rotary scaling: expected one of default",
    ),
    (
        {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
        "",
        "layer_types: expected sliding_attention or full_attention, found 'chunked_attention'",
    ),
    (
        {"model_type": "nemotron_h", "layers_block_type": ["mlp", "conv"]},
        "",
        "layers_block_type: expected linear_attention or full_attention or mlp or moe, found 'conv'",
    ),
    (
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "conv"]},
        "",
        "layers_block_type: expected mamba or attention or mlp or moe, found 'conv'",
    ),
    (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*E-D|X"},
        "",
        "hybrid_override_pattern: expected the letters M, *, -, E, found 'D|X'",
    ),
    ({"model_type": "nemotron_h", "moe_latent_size": 1024}, "", "moe_latent_size: expected null or false"),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "", "clip_qkv: expected null or false"),
    ({"model_type": "mixtral", "scoring_func": "cosine"}, "", "scoring_func: expected nothing: such a router"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "", "is an encoder"),
    ({"model_type": "mistral3", "text_config": {"model_type": "gpt2"}}, "", "text model inside mistral3"),
    ({"model_type": "qwen3_vl", "text_config": {"hidden_act": "mish"}}, "", "hidden_act: expected 'silu'"),
    ({"quantization_config": {"load_in_4bit": True}}, "", "the model is quantised by bitsandbytes"),
    ({}, "hf_quant_config.json", "the model is quantised by NVIDIA ModelOpt"),
]
_REFUSE = """
import sys, wisparse
from wisparse.cli import convert_main, main
for model in sys.argv[1:]:
    for program, arguments in (convert_main, [model]), (convert_main, [model, "--dry-run"]), (main, ["advise", model]):
        try: program(arguments)
        except SystemExit as ended: print(ended.code)
    try: wisparse.convert(model)
    except wisparse.UnsupportedModelError: print("refused")
    print({"torch", "transformers", "numba"} & sys.modules.keys())
    for stream in sys.stdout, sys.stderr: print(end="\f", file=stream, flush=True)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Standard output and error for each of REFUSED, by one process."""
    folders = [tmp_path_factory.mktemp("refused") for _ in REFUSED]
    for folder, (config, card, _) in zip(folders, REFUSED, strict=True):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        (folder / "model.safetensors").touch()
        (folder / "README.md").write_text(card)
        if card == "hf_quant_config.json":  # beside a config.json that says nothing of it
            settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
            (folder / card).write_text(json.dumps(settings))
    done = subprocess.run([sys.executable, "-c", _REFUSE, *folders], capture_output=True, text=True, timeout=120)
    return list(zip(done.stdout.split("\f"), done.stderr.split("\f"), strict=True))


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[words for *_, words in REFUSED])
def test_models_that_are_not_supported_are_refused_before_torch_is_imported(
    index: int, refusals: list[tuple[str, str]]
) -> None:
    out, err = refusals[index]
    assert out.split() == ["3", "3", "3", "refused", "set()"], err
    assert " ".join(err.split()).count(REFUSED[index][2]) == 3
