"""Whether a change to the Triton kernels changed what the GPU runs: the machine code, before and after. Needs no GPU.

    python benchmarks/ptx_compare.py dump BEFORE        # on the old commit
    python benchmarks/ptx_compare.py dump AFTER         # on the new one
    python benchmarks/ptx_compare.py compare BEFORE AFTER

``dump`` compiles the cases of ``tests/triton_compile.py`` for one GPU generation and writes PTX and SASS, a file each.
``compare`` leaves out what does not run (comments, names of kernels, source lines), numbers PTX's registers and
labels in the order in which they are met, and the parameters of both too, wherever PTX loads them: arguments may be
grouped and moved. What is then equal is the same instructions on the same values in the same order.

A line for each file that differs, then JSON: how many are equal, and of the others the instructions before, after, and
changed. Exits with 1 if the SASS of a case differs.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"


def plain_ptx(source: str) -> list[str]:
    """The instructions of a kernel in PTX, with registers, labels and parameters renumbered."""
    idle = re.compile(r"$|\.(loc|file|param|visible|reqntid|maxntid|version|target|reg)\b|\$L__(tmp|func)")
    parameters: dict[str, str] = {}
    lines = []
    for line in source.split(".section")[0].splitlines():
        line = re.sub(r"\s+", " ", line.split("//")[0]).strip()
        loaded = re.fullmatch(r"ld\.param\S* (%\w+), \[\w+?_(param_\d+)\];", line)
        if loaded:
            # The register is the parameter from here on, and nothing else's.
            parameters[loaded[1]] = f"${loaded[2]}"
        elif not idle.match(line):
            lines.append(re.sub(r"%\w+", lambda name: parameters.get(name[0], name[0]), line))
    return _renumbered(lines, r"(%[a-z]+)\d+|(\$L__)\w+|(\$param_)\d+")


def plain_sass(listing: str) -> list[str]:
    """The instructions of a kernel in SASS, without addresses and encodings, with parameters renumbered."""
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", listing, re.MULTILINE)
    # The first bank of constants: what the driver sets up, and from 0x210 on the parameters.
    return _renumbered(found, r"(c\[0x0\]\[0x)(?:2[1-9a-f]|[3-9a-f].)[0-9a-f]")


def _renumbered(lines: list[str], names: str) -> list[str]:
    """``names``: a pattern whose groups are the kinds of names that it finds, one each."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        kind = next(filter(None, found.groups()))
        return numbers.setdefault(found[0], f"{kind}{len(numbers)}")

    return [re.sub(names, number, line) for line in lines]


def disassembled(cubin: bytes) -> str:
    """What cuobjdump says of a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout


def dump(folder: Path, arch: int, only: str) -> None:
    """Write the machine code of every case whose name begins with ``only``."""
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    sys.path.insert(0, str(TESTS))
    import triton_compile

    folder.mkdir(parents=True, exist_ok=True)
    for name, compiled in triton_compile.compiled_cases(arch, only):
        path = folder / re.sub(r"\W+", "_", name)
        path.with_suffix(".ptx").write_text(compiled.asm["ptx"])
        path.with_suffix(".sass").write_text(disassembled(compiled.asm["cubin"]))
        print(name, flush=True)


def compare(before: Path, after: Path) -> int:
    """Print what differs of the cases that both have; returns 1 if any SASS does."""
    cases = sorted({path.name for path in before.glob("*.*")} & {path.name for path in after.glob("*.*")})
    if not cases:
        raise SystemExit(f"expected what `dump` wrote in {before} and {after}, found no case that both have")
    same = {".ptx": 0, ".sass": 0}
    differing: dict[str, list[int]] = {}
    for case in cases:
        kind = Path(case).suffix
        plain = plain_ptx if kind == ".ptx" else plain_sass
        old, new = (plain((folder / case).read_text()) for folder in (before, after))
        if old == new:
            same[kind] += 1
            continue
        changed = sum(line[0] in "+-" for line in list(difflib.unified_diff(old, new, n=0))[2:])
        differing[case] = [len(old), len(new), changed]
        print(f"{case}: {len(old)} -> {len(new)} instructions, {changed} lines changed")
    print(json.dumps({"same_ptx": same[".ptx"], "same_sass": same[".sass"], "differing": differing}))
    return int(any(case.endswith(".sass") for case in differing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("dump")
    one.add_argument("folder", type=Path)
    one.add_argument("--arch", type=int, default=90)
    one.add_argument("--only", default="", help="cases whose name begins so")
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "dump":
        dump(arguments.folder, arguments.arch, arguments.only)
    else:
        sys.exit(compare(arguments.before, arguments.after))


if __name__ == "__main__":
    main()
