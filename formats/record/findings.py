"""What was measured of a bundle after it was written: tasks and speed, in its report and on its model card.

A finding is one figure, dense and sparse, under conditions said in words. The report (``conversion_report.json``) holds
them as data, under the key ``findings``; the card (``README.md``) has them as a table between two marks, so that the
rest of a card, which its owner may have written anew, stays as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import BundleError

__all__ = ["CARD", "REPORT", "Finding", "as_entries", "merged", "read_findings", "with_table"]

REPORT, CARD = "conversion_report.json", "README.md"

_BEGIN, _END = "<!-- measured since the conversion -->", "<!-- end of what was measured since -->"
# Where the table goes on a card that has none: behind what the conversion measured.
_BEFORE = "\n## Use\n"
_MOST, _LONGEST = 1000, 300


@dataclass(frozen=True)
class Finding:
    """One figure of a bundle.

    Attributes:
        what: the figure's name: a task and its metric, or ``tok/s``.
        conditions: all that another measurement must share to be comparable, in words.
        sparsity: the rung.
        dense, sparse: with the masks off and on.
        dense_stderr, sparse_stderr: standard errors, where there are any.
    """

    what: str
    conditions: str
    sparsity: float
    dense: float
    sparse: float
    dense_stderr: float | None = None
    sparse_stderr: float | None = None


def read_findings(report: Mapping[str, Any]) -> list[Finding]:
    """Those of a parsed report; none if it has no such key.

    Raises:
        BundleError: it has, and something else stands there.
    """
    entries = report.get("findings", [])
    if not isinstance(entries, list) or len(entries) > _MOST:
        raise BundleError(f"{REPORT}: findings: expected a list of at most {_MOST} entries, found something else")
    return [_finding(entry, f"{REPORT}: findings[{index}]") for index, entry in enumerate(entries)]


def merged(known: Iterable[Finding], fresh: Iterable[Finding]) -> list[Finding]:
    """All of them; of two of the same figure, conditions and rung the fresh one, in the place of the other."""
    found = {(one.what, one.conditions, one.sparsity): one for one in known}
    found |= {(one.what, one.conditions, one.sparsity): one for one in fresh}
    return list(found.values())


def with_table(card: str, findings: Sequence[Finding]) -> str:
    """The card with the table of these findings, in place of the one that it may have."""
    section = f"{_BEGIN}\n{_table(findings)}\n{_END}\n"
    begin, end = card.find(_BEGIN), card.find(_END)
    if 0 <= begin < end:
        return card[:begin] + section + card[end + len(_END) :].removeprefix("\n")
    place = card.find(_BEFORE)
    if place < 0:
        return f"{card.rstrip()}\n\n{section}" if card.strip() else section
    return f"{card[:place]}\n{section}{card[place:]}"


def _table(findings: Sequence[Finding]) -> str:
    rungs = sorted({one.sparsity for one in findings})
    rows: dict[tuple[str, str], dict[float, Finding]] = {}
    for one in findings:
        rows.setdefault((one.what, one.conditions), {})[one.sparsity] = one
    lines = [
        "Measured since the conversion (`wisparse eval --tasks … --save`, `wisparse bench --save`), on the same "
        "machine dense and sparse; ± is a standard error:\n",
        "| | dense | " + " | ".join(f"{100 * rung:.4g}%" for rung in rungs) + " |",
        "|---|---|" + "---|" * len(rungs),
    ]
    for (what, conditions), by_rung in rows.items():
        newest = list(by_rung.values())[-1]
        cells = [_shown(newest.what, newest.dense, newest.dense_stderr)]
        cells += [_cell(by_rung[rung]) if rung in by_rung else "–" for rung in rungs]
        lines.append(f"| {_plain(what)}: {_plain(conditions)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(one: Finding) -> str:
    # Of a speed the ratio, from one run, says more than the figure.
    ratio = f" ({one.sparse / one.dense:.2f}x)" if one.what == "tok/s" and one.dense > 0 else ""
    return _shown(one.what, one.sparse, one.sparse_stderr) + ratio


def _shown(what: str, value: float, stderr: float | None) -> str:
    text = f"{value:,.1f}" if what == "tok/s" else f"{value:.4f}"
    return text if stderr is None else f"{text} ± {stderr:.4f}"


def _plain(text: str) -> str:
    """On one line, and with nothing that a table or a page would take for its own."""
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


def _finding(entry: Any, where: str) -> Finding:
    names = set(Finding.__dataclass_fields__)
    if not isinstance(entry, Mapping) or set(entry) != names:
        raise BundleError(f"{where}: expected an object of {', '.join(sorted(names))}, found something else")
    for name in ("what", "conditions"):
        if not isinstance(entry[name], str) or not 0 < len(entry[name]) <= _LONGEST:
            raise BundleError(f"{where}.{name}: expected a text of at most {_LONGEST} characters, found something else")
    for name in ("sparsity", "dense", "sparse", "dense_stderr", "sparse_stderr"):
        value = entry[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number and not (value is None and name.endswith("_stderr")):
            raise BundleError(f"{where}.{name}: expected a finite number, found {value!r:.60}")
    return Finding(**entry)


def as_entries(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """JSON-ready, as `read_findings` reads them."""
    return [asdict(one) for one in findings]
