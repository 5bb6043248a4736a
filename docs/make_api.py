"""The Python API as a page, from the docstrings.

python docs/make_api.py            writes docs/api.md
python docs/make_api.py --check    compares
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_overloads

import wisparse
from wisparse.runtime.model import Generation, Model, Piece

PAGE = Path(__file__).with_name("api.md")

_HEAD = """# Python API

Made from the docstrings by `python docs/make_api.py`; `python -m pydoc wisparse` shows the same in a terminal.

"""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
_ITEM = re.compile(r"^    (\S[^:]*): (.*)$")


def page() -> str:
    """The page's text."""
    functions = [wisparse.load, wisparse.convert, wisparse.sparsify, wisparse.desparsify]
    parts = [_entry("wisparse", thing) for thing in functions]
    parts += [_entry("wisparse", thing) for thing in (Model, Generation, Piece, wisparse.WisparseConfig)]
    errors = sys.modules[wisparse.WisparseError.__module__]
    parts.append(f"## Errors\n\n```text\n{inspect.cleandoc(errors.__doc__ or '')}\n```\n")
    return _HEAD + "\n".join(parts)


def _entry(owner: str, thing: Any, level: int = 2) -> str:
    """One function, or one class with its public methods."""
    name = f"{owner}.{thing.__name__}"
    text = f"{'#' * level} {name}\n\n```python\n{_signatures(name, thing)}\n```\n\n{_prose(thing)}\n"
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            if key.startswith("_"):
                continue
            if isinstance(member, property) and member.__doc__:
                text += f"\n{'#' * (level + 1)} {thing.__name__}.{key}\n\n{_prose(member)}\n"
            elif inspect.isfunction(member) and member.__doc__:
                text += "\n" + _entry(thing.__name__, member, level + 1)
    return text


class _Words(str):
    """An annotation as it was written, without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def _signatures(name: str, thing: Any) -> str:
    """How it is called: a line an argument where one line is too long; every overload where there are some."""
    calls = []
    for function in get_overloads(thing) or [thing]:
        signature = inspect.signature(function)
        kept = [p.replace(annotation=_plain(p.annotation)) for p in signature.parameters.values() if p.name != "self"]
        signature = signature.replace(parameters=kept, return_annotation=_plain(signature.return_annotation))
        call = f"{name}{signature}"
        if len(call) > 100:
            words = [str(parameter) for parameter in kept]
            keyword = next((i for i, p in enumerate(kept) if p.kind is p.KEYWORD_ONLY), None)
            if keyword is not None:
                words.insert(keyword, "*")
            call = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + call[call.rindex(") ->") :]
        calls.append(call)
    return "\n".join(calls)


def _plain(annotation: Any) -> Any:
    return _Words(annotation) if isinstance(annotation, str) else annotation


def _prose(thing: Any) -> str:
    """A docstring as Markdown: its sections as lists."""
    return "\n".join(_lines(inspect.getdoc(thing) or "")).strip().replace("``", "`")


def _lines(doc: str) -> Iterator[str]:
    section = False
    for line in re.sub(r":(?:class|meth|func):`([\w.]+)`", r"`\1`", doc).splitlines():
        if found := _SECTION.match(line):
            section = True
            yield from (f"**{found[1]}**", "")
        elif section and (item := _ITEM.match(line)) and not line.startswith("     "):
            names = ", ".join(f"`{name.strip()}`" for name in item[1].split(","))
            yield f"- {names}: {item[2]}"
        elif section and line.startswith("    "):
            yield "  " + line.strip()
        else:
            section = section and not line.strip()
            yield line


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text("utf-8") == page() else f"{PAGE.name} is out of date: python docs/make_api.py")
    PAGE.write_text(page(), "utf-8")
