"""The model card (``README.md``) of a bundle, and later measurements on it: `save_findings`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load
from jinja2 import Environment, FileSystemLoader

from .errors import BundleError
from .folder import check_target, clear_leftovers, replaced_folder
from .guard import dump_json, open_regular, parse_json, read_bounded, read_json, resolve_inside
from .manifest import BUNDLE, MANIFEST, MAX_MANIFEST_BYTES, Recipe, level_name, listed_files, plus_minus

# Address of the project's repository (https://…), empty while it has none. README.md, pyproject.toml, CITATION.cff and
# mkdocs.yml repeat it; a test compares them.
PROJECT = ""
REPORT, CARD = "conversion_report.json", "README.md"
LICENCE_FILE = re.compile(r"(LICEN[SC]E|USE_POLICY|NOTICE)[^/]*")

# Keeps the compiled template.
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)
_MAX_README_BYTES, _MAX_DOCUMENT_BYTES = 1 << 20, 32 << 20
# Tags of a source that do not apply to its text model.
_OF_PICTURES = re.compile(r"multi-?modal|vision|image|video|visual|vlm?\b")


@dataclass(frozen=True)
class Inherited:
    """Metadata of the source model that the card repeats."""

    licence: str | None = None
    licence_name: str | None = None
    licence_link: str | None = None
    languages: tuple[str, ...] = ()
    licence_files: tuple[str, ...] = ()
    chat: bool = False
    tags: tuple[str, ...] = ()


def read_inherited(folder: str | os.PathLike[str]) -> Inherited:
    """Licence, languages and chat template of a source model, from its card and files. Invalid metadata, which the Hub would
    refuse, is omitted."""
    folder = Path(folder)
    found: dict[str, Any] = {}
    readme, tokenizer_config = folder / "README.md", folder / "tokenizer_config.json"
    if readme.is_file() and readme.stat().st_size <= _MAX_README_BYTES:
        # A damaged card of the source; ours says that it names no licence.
        with contextlib.suppress(yaml.YAMLError, ValueError):
            found = metadata_load(readme) or {}
    files = tuple(sorted(path.name for path in folder.iterdir() if LICENCE_FILE.fullmatch(path.name)))
    licence, name, link = (found.get(key) for key in ("license", "license_name", "license_link"))
    licence = licence if isinstance(licence, str) and re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence) else None
    name = name if isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) else None
    link = link if isinstance(link, str) and (link in files or link.startswith("https://")) else None
    texts = [file for file in files if file.startswith("LICEN")]
    if licence in (None, "other") and texts:
        licence, name, link = "other", name or "as-in-the-source", link or texts[0]

    def texts_of(key: str, pattern: str) -> list[str]:
        given = found.get(key)
        given = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        return [one for one in given if isinstance(one, str) and re.fullmatch(pattern, one)]

    # Without tags on the storage and processing of the source's files.
    storage = ("safetensors", "pytorch", "gguf", "transformers")
    tags = [tag for tag in texts_of("tags", r"[A-Za-z0-9][\w.+-]{0,63}") if tag.lower() not in storage]
    template = (folder / "chat_template.jinja").is_file()
    return Inherited(
        licence=licence,
        licence_name=name,
        licence_link=link,
        languages=tuple(texts_of("language", r"[a-z]{2,3}|code|multilingual")),
        licence_files=files,
        chat=template or (tokenizer_config.is_file() and b'"chat_template"' in tokenizer_config.read_bytes()),
        tags=tuple(tags[:50]),
    )


QUALITY_HEADS = ("weights", "level", "KL, nats/token", "top-1 agreement", "perplexity", "tokens")


def quality_cells(recipe: Recipe) -> list[tuple[str, ...]]:
    """The quality table as text, by `QUALITY_HEADS`; empty without one."""
    rows: list[tuple[str, ...]] = []
    for row in recipe.quality.rows if recipe.quality else ():
        level = level_name(row.sparsity, recipe.graded) if row.sparsity else "dense"
        kl, perplexity = (
            f"{row.kl:.2g}{plus_minus(row.kl_stderr)}",
            f"{row.perplexity:.3f}{plus_minus(row.perplexity_stderr)}",
        )
        rows.append((row.weights, level, kl, f"{row.top1_agreement:.1%}", perplexity, f"{row.num_tokens:,}"))
    return rows


def quality_note(recipe: Recipe) -> str:
    """What the quality table was measured on, and its noise floor; empty without one."""
    table = recipe.quality
    if table is None:
        return ""
    few = (
        "" if all(row.num_tokens == table.num_tokens for row in table.rows) else ", the others from fewer by its ratio"
    )
    floor = "not measured" if table.noise_floor is None else f"KL {table.noise_floor:.2g}"
    scope = f"{table.num_tokens:,} tokens of {table.text}, every token sparse, against the source's weights"
    return f"{scope}; the default level on all of them{few}. Noise floor of the arithmetic: {floor}"


def render_card(
    recipe: Recipe,
    inherited: Inherited,
    report: Mapping[str, Any],
    *,
    figures: Sequence[tuple[str, str]] = (),
    repo_id: str | None = None,
) -> str:
    base = recipe.base_model
    level_of = partial(level_name, graded=recipe.graded)
    title = f"{base.split('/')[-1]}, {level_of(recipe.default)}{' graded' if recipe.graded else ' activation-sparse'}"
    on_hub = recipe.base_revision is not None
    licence, name, link = inherited.licence, inherited.licence_name, inherited.licence_link
    if licence == "other" and not (name and link):
        # The Hub requires both for "other"; they point to the source's page.
        name, link = name or "as-in-the-source", f"https://huggingface.co/{base}"
        licence, name, link = (licence, name, link) if on_hub else (None, None, None)
    tags = ["wisparse", "activation-sparsity", *(["conversational"] if inherited.chat else [])]
    tags += [tag for tag in inherited.tags if not (recipe.text_only and _OF_PICTURES.search(tag.lower()))]
    measured, text = report["quality"]["sparse"], report["quality"]["text"]
    metadata = ModelCardData(
        # A folder's name would be a wrong link.
        base_model=base if on_hub else None,
        base_model_relation="quantized" if on_hub else None,
        language=[*inherited.languages] or None,
        library_name="wisparse",
        license=licence,
        license_name=name,
        license_link=link,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
        model_name=title,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "text",
                dataset_name=text,
                metric_type=kind,
                metric_name=metric,
                metric_value=measured[key],
            )
            for kind, metric, key in (
                ("perplexity", "Perplexity, sparse", "perplexity"),
                ("kl_divergence", "KL(dense || sparse), nats per token", "kl"),
                ("accuracy", "Top-1 agreement with the dense model", "top1_agreement"),
            )
        ],
    )
    alphas = [entry.alpha for entry in recipe.projections]
    return _ENVIRONMENT.get_template("card.md.jinja").render(
        metadata=metadata.to_yaml(),
        title=title,
        level_of=level_of,
        quality_heads=QUALITY_HEADS,
        quality_cells=quality_cells(recipe),
        quality_note=quality_note(recipe),
        recipe=recipe,
        inherited=inherited,
        report=report,
        sparse=measured,
        figures=figures,
        project=PROJECT,
        search=recipe.search.get("settings", {}).get("search"),
        path=repo_id or "path/to/this/folder",
        alphas=alphas,
        median_alpha=statistics.median(alphas),
        sparsities=[entry.sparsity for entry in recipe.projections],
        blocks=recipe.block_sparsities,
    )


# ---------------------------------------------------------------------- measured after the conversion

_BEGIN, _END = "<!-- measured since the conversion -->", "<!-- end of what was measured since -->"
# Heading before which the table is inserted on a card without one.
_BEFORE = "\n## Use\n"
_MOST, _LONGEST = 1000, 300


@dataclass(frozen=True)
class Finding:
    """One measured figure of a bundle: an entry of ``findings`` in its report."""

    what: str  # a task and its metric, or "tok/s"
    conditions: str  # the conditions under which figures are comparable
    sparsity: float  # the sparsity level
    dense: float  # of the dense model
    sparse: float
    dense_stderr: float | None = None
    sparse_stderr: float | None = None


def read_findings(report: Mapping[str, Any]) -> list[Finding]:
    entries = report.get("findings", [])
    if not isinstance(entries, list) or len(entries) > _MOST:
        raise BundleError(f"{REPORT}: findings: expected a list of at most {_MOST} entries, found something else")
    names = {one.name for one in fields(Finding)}
    for index, entry in enumerate(entries):
        where = f"{REPORT}: findings[{index}]"
        if not isinstance(entry, dict) or set(entry) != names:
            raise BundleError(f"{where}: expected an object of {', '.join(sorted(names))}, found something else")
        for name, value in entry.items():
            wanted = f"a text of at most {_LONGEST} characters"
            valid = isinstance(value, str) and 0 < len(value) <= _LONGEST
            if name not in ("what", "conditions"):
                wanted, is_number = "a finite number", isinstance(value, int | float) and not isinstance(value, bool)
                valid = is_number and abs(value) <= sys.float_info.max
            if not valid and (value is not None or not name.endswith("_stderr")):
                raise BundleError(f"{where}.{name}: expected {wanted}, found {value!r:.60}")
    return [Finding(**entry) for entry in entries]


def with_table(card: str, findings: Sequence[Finding], graded: bool = False) -> str:
    """The card with a table of these findings, which replaces an existing one."""
    levels = sorted({one.sparsity for one in findings})
    rows: dict[tuple[str, str], dict[float, Finding]] = {}
    for one in findings:
        rows.setdefault((one.what, one.conditions), {})[one.sparsity] = one
    lines = [
        _BEGIN,
        "Measured since the conversion (`wisparse eval --tasks … --save`, `wisparse bench --save`), on the same "
        "machine dense and sparse; ± is a standard error:\n",
        "| | dense | " + " | ".join(level_name(level, graded) for level in levels) + " |",
        "|---|---|" + "---|" * len(levels),
    ]

    def number(what: str, value: float, stderr: float | None) -> str:
        text = f"{value:,.1f}" if what == "tok/s" else f"{value:.4f}"
        return text if stderr is None else f"{text} ± {stderr:.4f}"

    for (what, conditions), by_level in rows.items():
        newest = list(by_level.values())[-1]
        cells = [number(what, newest.dense, newest.dense_stderr)]
        for level in levels:
            found = by_level.get(level)
            # Of a speed, the ratio within a run is more reproducible than the value.
            ratio = f" ({found.sparse / found.dense:.2f}x)" if found and what == "tok/s" and found.dense > 0 else ""
            cells.append(number(what, found.sparse, found.sparse_stderr) + ratio if found else "–")
        # On one line, with the characters of Markdown and HTML escaped.
        name = re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(f"{what}: {conditions}".split()))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    section = "\n".join([*lines, _END, ""])
    begin, end, place = card.find(_BEGIN), card.find(_END), card.find(_BEFORE)
    if 0 <= begin < end:
        return card[:begin] + section + card[end + len(_END) :].removeprefix("\n")
    if place < 0:
        return f"{card.rstrip()}\n\n{section}" if card.strip() else section
    return f"{card[:place]}\n{section}{card[place:]}"


def check_amendable(folder: str | os.PathLike[str]) -> None:
    """Raise the error of a `save_findings` that would fail, before the measurement."""
    out = Path(os.path.realpath(folder))
    names = listed_files(out)
    check_target(out, BUNDLE, overwrite=True)
    for name in names:
        _own_file(out, name)
    _amended(out, ())


def save_findings(folder: str | os.PathLike[str], findings: Iterable[Finding]) -> None:
    """Add findings to a bundle's report and card."""
    out, findings = Path(os.path.realpath(folder)), tuple(findings)
    clear_leftovers(out, BUNDLE)  # a kill between two renames leaves the bundle under another name
    names = {*listed_files(out), MANIFEST, REPORT, CARD}
    with replaced_folder(out, BUNDLE, names, overwrite=True) as partial:
        # Read under the lock.
        documents = _amended(out, findings)
        kept = {*listed_files(out)} - {*documents}
        if not kept <= names:
            raise BundleError(f"{out}: was replaced by another bundle meanwhile; run this again")
        for name in kept:
            if (old := _own_file(out, name)) is not None:
                (partial / name).parent.mkdir(exist_ok=True)
                try:
                    os.link(old, partial / name)
                except OSError:  # the file system has no hard links
                    shutil.copyfile(old, partial / name)
        manifest = read_json(out, MANIFEST, MAX_MANIFEST_BYTES, BundleError)
        digests = {name: {"sha256": hashlib.sha256(data).hexdigest()} for name, data in documents.items()}
        manifest["files"] = dict(sorted({**manifest["files"], **digests}.items()))
        for name, data in {**documents, MANIFEST: dump_json(manifest)}.items():
            (partial / name).write_bytes(data)


def _amended(folder: Path, findings: Iterable[Finding]) -> Mapping[str, bytes]:
    """Report and card with these findings added; either may have been removed."""
    there = [name for name in (REPORT, CARD) if os.path.lexists(folder / name)]
    text = {name: read_bounded(folder, name, _MAX_DOCUMENT_BYTES, BundleError) for name in there}
    report = parse_json(text.get(REPORT) or b"{}", REPORT, BundleError)
    # A finding replaces an older one with the same conditions and sparsity level.
    known = {(one.what, one.conditions, one.sparsity): one for one in (*read_findings(report), *findings)}
    try:
        card = text.get(CARD, b"").decode("utf-8")
    except UnicodeDecodeError as reason:
        raise BundleError(f"{CARD}: expected UTF-8, found a wrong byte at {reason.start}") from None
    report["findings"] = [asdict(one) for one in known.values()]
    graded = "plane_bits" in read_json(folder, MANIFEST, MAX_MANIFEST_BYTES, BundleError)
    return {REPORT: dump_json(report), CARD: with_table(card, list(known.values()), graded).encode()}


def _own_file(folder: Path, name: str) -> Path | None:
    """The bytes of a file in the bundle, not of a symlink out of it; None if it was removed."""
    if not os.path.lexists(folder / name):
        return None  # a document; `verify` reports it
    open_regular(folder, name, BundleError).close()
    return resolve_inside(folder, name, BundleError)
