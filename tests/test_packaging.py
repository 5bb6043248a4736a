"""What a user gets: both kinds of install work, the README's commands run as written, and links lead somewhere."""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import requirements
import torch
from test_structure import ROOMS, imports_of

import wisparse

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
VERSION = PROJECT["project"]["version"]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("[A-Z]*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SITES = [entry for entry in sys.path if entry.endswith("site-packages")]
_CLEAN = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WISPARSE_MAX_KL")}


def _modules() -> list[str]:
    """Every module of the project under its import name."""
    names = []
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            parts = (() if room == "wisparse" else ("wisparse",)) + file.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(part for part in parts if part != "__init__"))
    return sorted(set(names) - {"wisparse.__main__"})


def _python(python: Path | str, code: str, cwd: Path) -> str:
    done = subprocess.run([python, "-c", code], cwd=cwd, env=_CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that builds leave nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("checkout") / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _environment(folder: Path, checkout: Path, *options: str) -> Path:
    """A virtual environment with the project installed; its dependencies are borrowed from the running one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    # From a .pth file, so that the folders' own .pth files, such as an editable install's, are not read.
    (_site(python) / "borrowed.pth").write_text("\n".join(SITES) + "\n")
    _install(python, "--ignore-installed", *options, str(checkout))
    return python


def _site(python: Path) -> Path:
    return Path(_python(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])", python.parent))


def _install(python: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, cwd=python.parent)


@pytest.fixture(scope="module")
def installs(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("environments")
    return {
        "plain": _environment(folder / "plain", checkout),
        "editable": _environment(folder / "editable", checkout, "-e"),
    }


def test_dependencies() -> None:
    # A dependency that nothing imports is downloaded in vain; one that is not declared is there by luck.
    distributions = importlib.metadata.packages_distributions()
    imported = set()
    for file in (file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        modules = {name[0] for name in imports_of(file, ("wisparse", *file.relative_to(ROOT).parts[:-1]))}
        modules -= {"wisparse", *sys.stdlib_module_names}
        imported |= {distributions.get(module, [module])[0].lower().replace("_", "-") for module in modules}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = {line.partition(">=")[0] for line in PROJECT["project"]["dependencies"]}
    lines = [line for extra in ("datasets", "eval", "gguf", "onnx", "serve", "vllm") for line in extras[extra]]
    optional = {line.partition(">=")[0] for line in lines}
    # parts of numba, of lm-eval and of torch's CUDA builds, which pin the version that fits
    brought = {"evaluate", "llvmlite", "tqdm", "triton"}
    assert needed <= imported
    assert imported - brought == needed | optional
    # What CI installs: every dependency, the test extra, and the extras that it takes in.
    command = [sys.executable, ROOT / ".ci" / "lower_bounds.py", "test"]
    pins = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    extras = PROJECT["project"]["optional-dependencies"]
    taken = [line for extra in ("test", "eval", "gguf", "onnx", "sentencepiece", "serve") for line in extras[extra]]
    lines = [*PROJECT["project"]["dependencies"], *taken]
    assert sorted(pins) == sorted({line.replace(">=", "==").partition(",<")[0] for line in lines if ">=" in line})


def test_every_module_imports(installs: dict[str, Path], checkout: Path) -> None:
    """And in the checkout's folder transformers, beside the distribution named kernels."""
    # runtime.lm_eval and its task need the `eval` extra, the plug-in needs vLLM.
    names = [name for name in _modules() if not name.startswith(("wisparse.runtime.vllm", "wisparse.runtime.lm_eval"))]
    names = [name for name in names if "_task" not in name]
    code = (
        "import importlib, importlib.metadata, sys; importlib.metadata.version('kernels')\n"
        # transformers imports names from it as soon as it is installed.
        "import kernels, transformers\n"
        "from transformers.integrations import hub_kernels\n"
        "sys.path.remove('')  # the checkout's folder\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(kernels.__file__, sys.modules['wisparse'].__file__)"
    )
    assert str(checkout) not in _python(installs["plain"], code, checkout)
    code = f"import importlib.util\nfor name in {_modules()!r}: assert importlib.util.find_spec(name)"
    _python(installs["editable"], code, checkout.parent)


def test_what_is_installed(installs: dict[str, Path]) -> None:
    """Also modules that need an extra; and nothing of ours at the top level of site-packages."""
    site = _site(installs["plain"])
    assert {one.name for one in site.iterdir()} == {"borrowed.pth", "wisparse", f"wisparse-{VERSION}.dist-info"}
    held = {".".join(file.relative_to(site).with_suffix("").parts) for file in site.glob("wisparse/**/*.py")}
    assert set(_modules()) <= {name.removesuffix(".__init__") for name in held}
    page = {file.name for file in (site / "wisparse" / "runtime" / "serve" / "web").iterdir()}
    assert page == {"page.css", "page.html", "page.js", "markdown-it.min.js", "markdown-it.LICENSE"}
    assert (site / "wisparse" / "py.typed").exists()


def test_mypy_and_python_find_an_editable_install(installs: dict[str, Path], checkout: Path, tmp_path: Path) -> None:
    (checkout / "runtime" / "newer.py").write_text("")  # than the install
    names = [name for name in _modules() if "." in name]
    (tmp_path / "user.py").write_text("".join(f"import {name}\n" for name in [*names, "wisparse.missing"]))
    command = [sys.executable, "-m", "mypy", "--python-executable", installs["editable"], "--config-file", os.devnull]
    done = subprocess.run(
        [*command, "--follow-imports", "skip", "user.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert re.findall(r'^.*error.* named "(.*)"', done.stdout, re.MULTILINE) == ["wisparse.missing"], done.stdout
    _python(installs["editable"], "import wisparse.runtime.newer", tmp_path)
    (checkout / "runtime" / "newer.py").unlink()


# A line that ends in "# wrong" has to be refused, all others have to pass.
_USER = """
import wisparse

model = wisparse.load("out", device="cpu", max_batch=2)
text: str = model.generate("Why?", max_new_tokens=20).text
ids: tuple[int, ...] = model.generate([1, 2, 3]).token_ids
chat: str = model.generate([{"role": "user", "content": "Why?"}], seed=1).text
several: list[wisparse.Generation] = model.generate(["a", "b"])
mixed: list[str] = [one.text for one in model.generate([[1, 2], [3]], stop="x")]
pieces: list[str] = [piece.text for piece in model.stream("Why?", temperature=0.5)]
tokens: list[int] = model.tokenizer.encode("Why?")
try:
    folder: str = wisparse.convert("model", "out", sparsity=0.5).name
except (wisparse.BundleError, wisparse.WisparseError) as error:
    code: int = error.exit_code
number: int = wisparse.sparsify(3, "out")
wisparse.load("x", devise=1)  # wrong
wisparse.lode("x")  # wrong
model.generate("a", max_tokens=3)  # wrong
model.generate("a", stop=5)  # wrong
model.generate(["a", "b"]).text  # wrong
model.generate(1.5)  # wrong
length: int = model.generate("a").text  # wrong
for piece in model.stream("a", tempreature=1.0):  # wrong
    print(piece.txt)  # wrong
wisparse.convert("model", sparsity="half")  # wrong
"""


@pytest.mark.exhaustive
def test_mypy_sees_the_types_of_an_installed_copy(installs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(_USER)
    command = [sys.executable, "-m", "mypy", "--python-executable", installs["plain"], "--config-file", os.devnull]
    command += ["--strict", "--hide-error-context", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    refused = {int(number) for number in re.findall(r"^user\.py:(\d+): error", done.stdout, re.MULTILINE)}
    wrong = {number for number, line in enumerate(_USER.splitlines(), start=1) if line.endswith("# wrong")}
    assert refused == wrong, done.stdout + done.stderr


def test_a_checkout_on_the_path_needs_no_installed_distribution(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.metadata as m; found = m.version\n"
        "def version(name):\n"
        "    if name == 'wisparse': raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        f"m.version = version; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        "import torch, quality; from wisparse.converter import pipeline\n"
        "print(pipeline.library_versions()['wisparse'], quality.describe_machine(torch.device('cpu'))['wisparse'])"
    )
    assert _python(sys.executable, code, tmp_path) == f"{VERSION} {VERSION}"
    assert wisparse.__version__ == VERSION


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


def _words(text: str) -> str:
    """Text as one line without what differs from run to run: numbers, where lines are broken, which steps took long
    enough to be named, and that kernels are compiled, which only a machine's first run says."""
    line = " ".join(re.sub(r"\d[\d,.]*(?:e-\d+)?", "0", text).split())
    line = re.sub(r"compiling 0 kernels? for the \w+, which takes some seconds; [^;]*? on disk ", "", line)
    line = line.replace("compiling CPU kernels: 0 of 0 done ", "")
    return re.sub(r"\btime (?:[a-z]+ )+0 s(?:, (?:[a-z]+ )+0 s)*", "time", line)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fewer", ["--num-samples 9 --seq-len 256", pytest.param("", marks=pytest.mark.exhaustive)])
def test_a_fresh_clone_goes_through_the_readme_in_its_order(
    fewer: str, installs: dict[str, Path], checkout: Path, tmp_path: Path
) -> None:
    python = installs["plain"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {**_CLEAN, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}

    def run(command: str) -> tuple[str, str]:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    shown = _shown()
    for start in ("wisparse-convert examples/pycode-llama-6m", "wisparse generate"):
        assert any(command.startswith(start) for command, _ in shown)
    for command, output in shown:
        for part in command.split(" && "):
            if any(word in part for word in _NOT_RUN):
                continue
            said, noted = run(f"{part} {fewer}" if part.startswith("wisparse-convert") else part)
            if shlex.split(part)[:2] == ["wisparse", "generate"]:
                assert said.strip()
            # Joined, since where a line is broken depends on how wide its numbers are.
            wanted, printed = _words("\n".join(output)), _words(said + noted)
            assert wanted in printed, f"{part}: the README shows {wanted!r}, printed was {printed!r}"
    for block in _blocks(ROOT / "README.md", "python"):
        if not any(word in block for word in _NOT_RUN):
            said, _ = run(f"python -c {shlex.quote(block + 'print(model)')}")
            assert "back end numba" in said or torch.cuda.is_available()
    # What using an installed copy leaves in its folder, pip does not take away: an editable install would then be
    # hidden by a package without a single module.
    _install(python, "-e", str(checkout))
    assert not (_site(python) / "wisparse").exists()
    # By torch: the other back end's kernels would be compiled again for this folder.
    said, _ = run("python -c \"import wisparse; print(wisparse.__file__, wisparse.load('out', backend='torch'))\"")
    assert said.startswith(str(checkout))


def test_pages_are_up_to_date() -> None:
    from wisparse.cli import VERBS, load_verb

    known = {"--help", "--version", "--nproc-per-node"}
    for parameter in (parameter for verb in VERBS for parameter in load_verb(verb).params):
        known.update(parameter.opts, parameter.secondary_opts)
    for page in PAGES:
        for block in _blocks(page, "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ wisparse"):
                    named = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", line))
                    assert named <= known, f"{page.name}: {line}"
    assert requirements.table() in (ROOT / "docs" / "requirements.md").read_text("utf-8")


def test_the_projects_address_is_the_same_everywhere() -> None:
    """None while `card.PROJECT` is empty."""
    from wisparse.formats.card import PROJECT as address

    def named(file: str, pattern: str) -> list[str]:
        return re.findall(pattern, (ROOT / file).read_text("utf-8"), re.MULTILINE)

    expected = [address] if address else []
    assert list(PROJECT["project"].get("urls", {}).values()) == expected
    assert named("mkdocs.yml", r"^repo_url: (\S+)") == expected
    assert named("CITATION.cff", r"^repository-code: \"?([^\s\"]+)") == expected
    assert named("README.md", r"git clone (\S+)") == expected


def test_every_environment_variable_is_on_its_page() -> None:
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    files = [file for room in (*ROOMS, "tests", "benchmarks", ".ci") for file in (ROOT / room).rglob("*")]
    files = [file for file in (*files, ROOT / "mkdocs.yml") if file.is_file() and "__pycache__" not in file.parts]
    text = "".join(file.read_bytes().decode("utf-8", "ignore") for file in files)
    # Completion's are click's, made from the programs' names.
    named = set(re.findall(r"WISPARSE_[A-Z_]*[A-Z]", text)) | {"WISPARSE_COMPLETE", "WISPARSE_CONVERT_COMPLETE"}
    assert set(re.findall(r"WISPARSE_[A-Z_]*[A-Z]", page)) == named


def test_the_first_models_page_has_the_benchmarks_commands() -> None:
    import first_model

    page = (ROOT / "docs" / "first-model.md").read_text("utf-8")
    shown = re.findall(r"^\$ (.+?)(?: &)?$", page, re.MULTILINE)
    assert {*shown, f"wisparse advise {first_model.MODEL}"} == {*first_model.COMMANDS}


def test_the_page_of_limits_has_the_sources_numbers() -> None:
    from wisparse.formats import bundle, checkpoint, manifest, model_config, tensor_file
    from wisparse.runtime.decoding import sampling
    from wisparse.runtime.generation import grammar, grammar_worker
    from wisparse.runtime.serve import transport

    page = (ROOT / "docs" / "limits.md").read_text("utf-8")
    for row in (
        f"sparsity | {manifest.MAX_SPARSITY} |",
        f"levels in a bundle | {manifest.MAX_LEVELS} |",
        f"blocks | {model_config.LARGEST_NUM_BLOCKS:,} |",
        f"a chat template | {checkpoint.MAX_CONFIG_BYTES >> 20} MiB each |",
        f"the index of the weights | {tensor_file.MAX_INDEX_BYTES >> 20} MiB each |",
        f"`merges.txt` | {bundle.SMALL_FILES['merges.txt'] >> 20} MiB each |",
        f"`wisparse.json` | {manifest.MAX_MANIFEST_BYTES >> 20} MiB |",
        f"any other file but weights | {bundle.MAX_FILE_BYTES >> 20} MiB |",
        f"each token | {sampling.MAX_LOGPROBS} in Python",
        f"within one another | {grammar_worker.MAX_DEPTH} |",
        f"GBNF grammar | {grammar_worker.MAX_PARTS:,} |",
        f"{grammar.MAX_SECONDS} seconds of processor time, {grammar.MAX_BYTES >> 20} MiB of memory, "
        f"{grammar_worker.STACK_BYTES >> 20} MiB of stack",
        f"a compiled grammar | {grammar.WAIT_SECONDS:.0f} seconds |",
        f"each part of an answer | {transport.CLIENT_SECONDS:.0f} seconds |",
    ):
        assert row in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
