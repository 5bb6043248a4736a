"""Import rules: which folder may import which, no cycles, and what a light import must not pull in."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOWEST = {"formats", "kernels"}
ROOMS = {"formats": set(), "kernels": set(), "converter": LOWEST, "runtime": LOWEST}
ROOMS["wisparse"] = {*LOWEST, "converter", "runtime", "commands", "cli"}
HEAVY = ("transformers", "datasets", "matplotlib")


def imports_of(file: Path, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Dotted names a file imports, relative ones resolved against its package."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = base + tuple((node.module or "").split(".") if node.module else ())
            # `from wisparse import runtime` names a room in the alias, not in the module.
            yield from ((*module, alias.name) for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may(room: str) -> None:
    package = ("wisparse",) if room == "wisparse" else ("wisparse", room)
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = []
    for file in files:
        inner = package + file.relative_to(ROOT / room).parts[:-1]
        for name in imports_of(file, inner):
            if name[0] != "wisparse" or len(name) < 2:
                continue
            target = name[1]
            if target in ROOMS and target not in ROOMS[room] | {room}:
                wrong.append(f"{file.relative_to(ROOT)} imports {'.'.join(name)}")
            if room != "wisparse" and target not in ROOMS:
                wrong.append(f"{file.relative_to(ROOT)} imports {'.'.join(name)} from the public face")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ["formats", "kernels", "converter", "runtime"])
def test_no_import_cycles(room: str) -> None:
    files = {file.relative_to(ROOT / room).with_suffix("").as_posix() for file in (ROOT / room).rglob("*.py")}
    arrows: dict[str, set[str]] = {name: set() for name in files}
    for name in files:
        for target in imports_of(ROOT / room / f"{name}.py", ("wisparse", room, *name.split("/")[:-1])):
            inner = target[2:] if target[:2] == ("wisparse", room) else ()
            # The last name may be a thing in a module, or itself the module.
            arrows[name] |= {"/".join(inner), "/".join(inner[:-1])} & files - {name}
    assert sum(map(len, arrows.values())) > 10  # the check sees the imports
    TopologicalSorter(arrows).prepare()  # raises CycleError


def test_allocations_state_their_dtype() -> None:
    """Where vLLM runs, torch's default is the weights' type: a kernel would read float32 from fewer bytes than it expects."""
    names, wrong, seen = ("empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye"), [], 0
    for folder in ("kernels", "formats", "runtime/vllm"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if not (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
                ):
                    continue
                if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
                    seen += 1
                    if not {"dtype", None} & {keyword.arg for keyword in node.keywords}:
                        wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert seen > 20
    assert not wrong, wrong


def test_light_imports_stay_light() -> None:
    modules = ["wisparse", "wisparse.cli"]
    files = [file.relative_to(ROOT / "runtime") for file in (ROOT / "runtime").rglob("*.py")]
    # What the harness reads and the plug-in exist to be imported by programs that bring all of these themselves.
    brought = ("__init__", "lm_eval", "harness")
    files = [file for file in files if file.stem not in brought and file.parts[0] != "vllm"]
    modules += [".".join(("wisparse", "runtime", *file.with_suffix("").parts)) for file in files]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_computes_nothing_imports_no_torch(bundle: Path, tmp_path: Path) -> None:
    from wisparse.cli import VERBS

    calls: list[tuple[int, list[str]]] = [(0, ["--help"]), *((0, [verb, "--help"]) for verb in VERBS)]
    calls += [(2, [verb]) for verb in VERBS] + [(2, [verb, str(bundle), "--wrong"]) for verb in VERBS]
    calls += [(0, ["inspect", str(bundle)]), (0, ["inspect", str(bundle), "--json"])]
    run = [str(bundle), "--sparsity", "0.123"]
    calls += [
        (2, ["generate", *run, "--prompt", "x"]),
        *((2, [verb, *run]) for verb in ("chat", "serve", "bench", "eval")),
    ]
    calls += [
        (2, ["generate", str(bundle), "--top-p", "7"]),
        (4, ["generate", str(tmp_path / "gone"), "--prompt", "x"]),
        (4, ["advise", str(tmp_path / "gone")]),
    ]
    calls += [(2, ["convert", str(bundle), "--sparsity", "3"]), (2, ["convert", str(bundle), "--seed=-1"])]
    script = (
        "import sys\n"
        "from wisparse.cli import main\n"
        f"for code, arguments in {calls!r}:\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert (end.code or 0) == code, (arguments, end.code)\n"
        "    heavy = {'torch', 'transformers', 'numba', 'triton'} & sys.modules.keys()\n"
        "    assert not heavy, (arguments, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_that_are_public() -> None:
    import wisparse

    (checked,) = [
        node
        for node in ast.parse((ROOT / "wisparse" / "__init__.py").read_text("utf-8")).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    seen = {}
    for line in checked.body:
        seen |= {alias.name: line.module for alias in line.names}
    assert set(seen) == set(wisparse.__all__) - {"__version__"}
    for name, module in seen.items():
        assert getattr(wisparse, name) is getattr(importlib.import_module(f"wisparse.{module}"), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = wisparse.nonsense
    # Every error is public.
    from wisparse.formats import errors

    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert "WisparseError" in names
    assert names <= set(wisparse.__all__)
    # Pydoc shows what is public.
    done = subprocess.run([sys.executable, "-m", "pydoc", "wisparse"], capture_output=True, text=True, check=True)
    for shown in ("class Model(", "class Generation(", "class BundleError(", "tokenizer", "load(", "desparsify("):
        assert shown in done.stdout, shown


def test_a_stream_takes_what_generate_takes() -> None:
    from wisparse.formats.config_fields import SAMPLING_FIELDS
    from wisparse.runtime.generation.request import GenerationArguments, GenerationSettings
    from wisparse.runtime.model import Model

    signature = inspect.signature(Model.generate)
    shown = {name: one for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert {name: hint.__forward_arg__ for name, hint in GenerationArguments.__annotations__.items()} == {
        name: one.annotation for name, one in shown.items()
    }
    defaults = {name: one.default for name, one in shown.items() if name not in SAMPLING_FIELDS}
    assert GenerationSettings(**defaults) == GenerationSettings()
    assert all(shown[name].default is None for name in SAMPLING_FIELDS)
