"""Misuse of the command line: every parameter of every verb with what it cannot be.

Whatever is given ends in one of the documented exit codes, with one sentence if it is refused, soon, and with nothing
on disk that was not there before. The parameters are those that click knows, so a new one is in the table by itself.
"""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tiny_bundle import write_tiny_bundle, write_tiny_model

from wisparse import cli

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
FREE = ("--prompt", "--stop", "--system-prompt", "--alias", "--cors")
TEXTS = ["", " ", "0", "\udcff", ESCAPE, "x" * 5000]
QUICK = [
    "--calibration",
    "TEXT",
    "--num-samples",
    "2",
    "--seq-len",
    "8",
    "--method",
    "teal",
    "--search",
    "uniform",
    "--device",
    "cpu",
    "-q",
]
EVAL = ["--num-samples", "1", "--seq-len", "8", *RUN]
# What each verb is given beside the parameter; small, so that a value that is taken costs little.
GIVEN = {
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
    "eval --tasks --include-path --num-fewshot --limit --apply-chat-template --confirm-run-unsafe-code --seed": [
        *("--tasks", "odd_task", "--include-path", "TASKS"),
        *RUN,
    ],
}


def _command(verb: str) -> click.Command:
    command = cli.cli.get_command(click.Context(cli.cli), verb)
    assert command is not None
    return command


PARAMETERS = [(verb, max(one.opts, key=len)) for verb in cli._VERBS for one in _command(verb).params]


def _line(verb: str, name: str, value: str) -> list[str]:
    """The command line: what is given, with ``value`` in the place of the parameter, or behind it."""
    arguments, options = GIVEN[verb]
    for names, others in WITH.items():
        if verb == names.split()[0] and name in names.split():
            options = others
    parameters = {max(one.opts, key=len): one for one in _command(verb).params}
    if isinstance(parameters[name], click.Argument):
        index = [key for key, one in parameters.items() if isinstance(one, click.Argument)].index(name)
        return [verb, *options, "--", *arguments[:index], value, *arguments[index + 1 :]]
    if parameters[name].is_flag:  # type: ignore[attr-defined]
        return [verb, *arguments, *options, f"{name}={value}"]
    return [verb, *arguments, *options, name, value]


TASK = """
task: odd_task
custom_dataset: !function odd_task.documents
output_type: generate_until
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 2}
metric_list:
  - metric: exact_match
"""
DOCUMENTS = """
import datasets

def documents(**given):
    return {"test": datasets.Dataset.from_list([{"prompt": "1", "answer": "2"}, {"prompt": "3", "answer": "4"}])}
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import transformers.models.llama.modeling_llama  # noqa: F401  seconds on a busy machine, and no odd value's

    folder = tmp_path_factory.mktemp("odd")
    (folder / "text").write_text("a line of text to count channels on\n" * 200)
    (folder / "file").write_text("not a bundle")
    os.mkfifo(folder / "pipe")
    for name in ("empty", "tasks"):
        (folder / name).mkdir()
    (folder / "tasks" / "odd_task.yaml").write_text(TASK)
    (folder / "tasks" / "odd_task.py").write_text(DOCUMENTS)
    write_tiny_bundle(folder / "bundle", write_tiny_model(folder / "model"))
    names = ("model", "bundle", "text", "file", "empty", "pipe", "tasks")
    return {name.upper(): str(folder / name) for name in names}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, and of the harness's thousands of tasks none: its index takes ten seconds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    # A server that has come so far would answer for ever.
    monkeypatch.setattr("wisparse.runtime.serve.app.serve", lambda model, settings, listener, ready: model.close())
    monkeypatch.chdir(tmp_path)
    tasks = pytest.importorskip("lm_eval.tasks")
    whole = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **given: whole(**{**given, "include_defaults": False}))


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
    home = Path(places["BUNDLE"]).parent
    for value in TEXTS if name in FREE else ODD:
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
    assert "Converted" in shown
    assert _call(["verify", out])[0] == 0
    assert {name for name in _tree(tmp_path) if not name.startswith(out)} == {"é", "-1"}


def test_a_folder_that_cannot_be_made_is_said_so(places: dict[str, str], tmp_path: Path) -> None:
    for option in ("-o", "--work-dir"):
        line = [places.get(word, word) for word in ["convert", "MODEL", *QUICK, "-o", "out", option, "/proc/nothing"]]
        code, _, err, _ = _call(line)
        assert code in (2, 5)
        assert err.startswith("wisparse: "), err
        assert "/proc/nothing: " in err
        assert _tree(tmp_path) == []


@pytest.mark.parametrize("option", ["--include-path=x", "--num-fewshot=0", "--limit=1", "--apply-chat-template"])
def test_options_of_tasks_are_refused_without_tasks(option: str, places: dict[str, str]) -> None:
    code, _, err, _ = _call(["eval", places["BUNDLE"], "--text", places["TEXT"], option])
    assert code == 2
    assert err == f"wisparse: {option.partition('=')[0]} belongs to --tasks, and there are none\n"


def test_what_the_terminal_cannot_show_is_spelled_out(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", shown)
    cli._encode_everything()
    print("é☃\udcff", end="", flush=True)
    assert shown.buffer.getvalue() == b"\xe9\\u2603\xff"
