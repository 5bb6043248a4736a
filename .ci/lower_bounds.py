"""Prints the lower bounds in pyproject.toml as pins, one ``name==bound`` a line: the oldest versions promised to work.

Of every direct dependency and of the extras named on the command line, those that an extra takes in from another
included. CI installs exactly these, and runs the tests on them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
_BOUNDED = re.compile(r"(?P<name>[\w.-]+)>=(?P<bound>[\w.]+)(,<[\w.]+)?(?P<marker>; .+)?")
_OWN_EXTRAS = re.compile(rf"{PROJECT['name']}\[(?P<extras>[\w,]+)\]")


def pins(requirements: list[str]) -> dict[str, str]:
    """The pin of each requirement under its name; exits with a sentence where one has no lower bound, or two."""
    found: dict[str, str] = {}
    for requirement in requirements:
        if own := _OWN_EXTRAS.fullmatch(requirement):
            pinned = pins([line for extra in own["extras"].split(",") for line in _extra(extra)])
        elif bounded := _BOUNDED.fullmatch(requirement):
            pinned = {bounded["name"]: f"{bounded['name']}=={bounded['bound']}{bounded['marker'] or ''}"}
        else:
            sys.exit(f"pyproject.toml: expected name>=version, found {requirement!r}; give it a lower bound")
        for name, pin in pinned.items():
            if found.setdefault(name, pin) != pin:
                sys.exit(f"pyproject.toml: two lower bounds for {name}: {found[name]} and {pin}; state it once")
    return found


def _extra(name: str) -> list[str]:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    if name not in extras:
        sys.exit(f"pyproject.toml: no extra {name!r}; there are {', '.join(extras)}")
    return extras[name]


if __name__ == "__main__":
    wanted = [line for extra in sys.argv[1:] for line in _extra(extra)]
    print("\n".join(pins(PROJECT["dependencies"] + wanted).values()))
