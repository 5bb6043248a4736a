"""Set up a virtual environment, convert the example model, and generate from the bundle.

    python3 examples/quickstart.py

Needs Python 3.11 or newer and nothing else. A second run takes the same environment.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "2.13.0"  # the version that .ci/run tests
_STAMP = "wisparse-extras.txt"  # in the environment: what it was made for


def run(*command: str | Path) -> None:
    """Print and run a command; exit with its code if it fails."""
    words = [str(word) for word in command]
    print("$", shlex.join(words), flush=True)
    code = subprocess.run(words, cwd=ROOT).returncode
    if code:
        sys.exit(code)


def make_environment(folder: Path = ENVIRONMENT, extras: Sequence[str] = ()) -> Path:
    """The ``bin`` folder of a virtual environment with the project and these extras; makes or completes it."""
    if sys.version_info < (3, 11):  # noqa: UP036  (the interpreter that a user has)
        sys.exit(f"expected Python 3.11 or newer, found {sys.version.split()[0]}; run this with a newer one")
    python, stamp = folder / "bin" / "python", folder / _STAMP
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    made_for, *installed = stamp.read_text().split() if stamp.is_file() else [""]
    if made_for == digest and set(extras) <= set(installed):
        return python.parent
    if not (folder / "bin" / "pip").exists():
        print(f"making a virtual environment in {folder}", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", folder]).returncode:
            shutil.rmtree(folder, ignore_errors=True)
            sys.exit("venv failed; on Debian and Ubuntu: apt install python3-venv")
    if not _has_torch(python):
        _install_torch(python)
    wanted = sorted({*installed, *extras})
    print(f"downloading the packages: about {700 if 'test' in wanted else 150} MB beside torch", flush=True)
    _pip(python, "-e", f".[{','.join(wanted)}]" if wanted else ".")
    stamp.write_text(" ".join([digest, *wanted]))
    size = subprocess.run(["du", "-sk", folder], capture_output=True, text=True).stdout.split()
    print(f"{folder}: {int(size[0]) / 1e6:.1f} GB on disk" if size else folder, flush=True)
    return python.parent


def _has_torch(python: Path) -> bool:
    code = "import importlib.util; raise SystemExit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def _install_torch(python: Path) -> None:
    """On Linux without an NVIDIA driver, torch's CPU build. Elsewhere pip's default is right: CUDA on Linux, CPU on macOS."""
    large = "about 3 GB, of which most are NVIDIA's libraries"
    if sys.platform != "linux":
        return
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        print(f"an NVIDIA driver is there: downloading torch's CUDA build, {large}", flush=True)
        return
    print(f"no NVIDIA driver: downloading torch {TORCH}, CPU build, about 200 MB", flush=True)
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5).close()
        index = ["--extra-index-url", CPU_INDEX]
    except (urllib.error.URLError, TimeoutError):
        index = []  # the user's own index may have it
    if not _pip(python, "--no-deps", *index, f"torch=={TORCH}+cpu", optional=True):
        print(f"{CPU_INDEX} does not answer; from pip's default index torch is {large}", flush=True)


def _pip(python: Path, *arguments: str, optional: bool = False) -> bool:
    """``pip install``, of whose output the downloads of 1 MB and more are shown."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.match(r"\s*(Downloading|Using cached) .*\([\d.]+ [MG]B\)", line):
                print(f"  {line.strip()}", flush=True)
    if process.returncode and not optional:
        sys.exit(f"{''.join(lines[-20:])}\npip failed; {' '.join(command)} repeats it")
    return process.returncode == 0


def main() -> None:
    programs, bundle = make_environment(), Path("build", "quickstart")
    convert = [programs / "wisparse-convert", "examples/pycode-llama-6m", "--sparsity", "0.5"]
    run(*convert, "--calibration", "self", "--overwrite", "-o", bundle)
    run(
        programs / "wisparse",
        "generate",
        bundle,
        "--prompt",
        '>>> len("hello")',
        "--max-new-tokens",
        "8",
        "--stop",
        ">>>",
    )
    print(f"\nthe commands are in {programs}: . {programs / 'activate'} puts them on the path")


if __name__ == "__main__":
    main()
