"""The README is true: its commands run as written, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("[A-Z]*.md")), *sorted((ROOT / "docs").glob("*.md"))]

# Needs the Hub, a GPU, an upload or the whole suite: shown to people, not run here.
_NOT_RUN = ("pip install", "python -m pytest", "meta-llama/", "huggingface-cli", "hf auth", "USER/", "USER/NAME")


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def _shown() -> list[tuple[str, list[str]]]:
    """Commands of the README in order, the lines after ``$ ``, each with the lines of output that stand below it."""
    shown: list[tuple[str, list[str]]] = []
    for block in _blocks(ROOT / "README.md", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                shown.append((line[2:].strip(), []))
            else:
                shown[-1][1].append(line)
    return shown


def _commands() -> list[str]:
    return [command for command, _ in _shown()]


def _words(text: str) -> str:
    """Text as one line without what differs from run to run.

    Numbers, where lines are broken, which steps took long enough to be named (under a second none is), and that kernels
    are compiled, which only a machine's first run says.
    """
    line = " ".join(re.sub(r"\d[\d,.]*(?:e-\d+)?", "0", text).split())
    line = re.sub(r"compiling 0 kernels? for the \w+, which takes some seconds; [^;]*? on disk ", "", line)
    return re.sub(r"\btime (?:[a-z]+ )+0 s(?:, (?:[a-z]+ )+0 s)*", "time", line)


def test_words_do_not_depend_on_the_machine() -> None:
    slow = "time         checking 2 s, loading the model 6 s, measuring 9\n             s, writing the bundle 1 s"
    assert _words(f"quality 1.5%\n{slow}\nTry it") == _words("quality 12.25%\ntime  loading the model 13 s\nTry it")
    assert _words("time  measuring 3 s\nquality 1%") != _words("time  measuring 3 s")
    first = "compiling 3 kernels for the CPU, which takes some seconds; it happens once, later runs find them on disk"
    assert _words(f"5\n{first}\nprompt 6") == _words("5\nprompt 7")


def test_there_are_commands_to_run() -> None:
    assert any("wisparse-convert examples/pycode-llama-6m" in command for command in _commands())
    assert any(command.startswith("wisparse generate") for command in _commands())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_run_in_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    scripts = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    for command, output in _shown():
        for part in command.split(" && "):
            if any(word in part for word in _NOT_RUN):
                continue
            done = subprocess.run(part, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200)
            assert done.returncode == 0, f"{part}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr
            if shlex.split(part)[:2] == ["wisparse", "generate"]:
                assert done.stdout.strip()
            # Joined, since where a line is broken depends on how wide its numbers are.
            shown, printed = _words("\n".join(output)), _words(done.stdout + done.stderr)
            assert shown in printed, f"{part}: the README shows {shown!r}, printed was {printed!r}"
    for block in _blocks(ROOT / "README.md", "python"):
        if any(word in block for word in _NOT_RUN):
            continue
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_options_named_in_the_pages_exist() -> None:
    known: set[str] = set()
    from wisparse.cli import _VERBS, cli

    for verb in _VERBS:
        command = cli.get_command(None, verb)  # type: ignore[arg-type]
        known |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "--version", "--nproc-per-node"}
    for page in PAGES:
        for block in _blocks(page, "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ wisparse"):
                    named = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", line))
                    assert named <= known, f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_requirements_page_is_up_to_date() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/requirements.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (ROOT / "docs" / "requirements.md").read_text("utf-8")


def test_the_readme_stays_short() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 160
    assert len(text.split()) <= 1300
