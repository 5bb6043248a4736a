"""The model card (``README.md``) of a bundle: what the Hub shows, and what a person needs to decide and to start.

Equal arguments give equal text: no dates, no facts about the machine.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from .errors import BundleError
from .folder import check_target, clear_leftovers, replaced_folder
from .guard import dump_json, open_regular, parse_json, read_bounded, read_json, resolve_inside
from .manifest import BUNDLE, MANIFEST, MAX_MANIFEST_BYTES, Recipe, listed_files

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
        sparsity: the sparsity level.
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
    """All of them; of two of the same figure, conditions and sparsity level the fresh one, in the place of the other."""
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
    levels = sorted({one.sparsity for one in findings})
    rows: dict[tuple[str, str], dict[float, Finding]] = {}
    for one in findings:
        rows.setdefault((one.what, one.conditions), {})[one.sparsity] = one
    lines = [
        "Measured since the conversion (`wisparse eval --tasks … --save`, `wisparse bench --save`), on the same "
        "machine dense and sparse; ± is a standard error:\n",
        "| | dense | " + " | ".join(f"{100 * level:.4g}%" for level in levels) + " |",
        "|---|---|" + "---|" * len(levels),
    ]
    for (what, conditions), by_level in rows.items():
        newest = list(by_level.values())[-1]
        cells = [_shown(newest.what, newest.dense, newest.dense_stderr)]
        cells += [_cell(by_level[level]) if level in by_level else "–" for level in levels]
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


_MAX_DOCUMENT_BYTES = 32 << 20


def check_amendable(folder: str | os.PathLike[str]) -> None:
    """Whether `save_findings` may write there; meant for before the work.

    Raises:
        UsageError: no permission, another process writes there, or the folder holds what is not part of the bundle.
        BundleError: no bundle, findings in it that are none, or a file that is a symlink out of the folder.
    """
    out = Path(os.path.realpath(folder))
    names = listed_files(out)
    check_target(out, BUNDLE, overwrite=True)
    for name in names:
        _own_file(out, name)
    _amended(out, ())


def save_findings(folder: str | os.PathLike[str], findings: Iterable[Finding]) -> None:
    """Put findings beside those that a bundle has, in its report and on its card.

    Raises:
        UsageError, BundleError: as `check_amendable`.
        ResourceError: the disk is full.
    """
    out, findings = Path(os.path.realpath(folder)), tuple(findings)
    clear_leftovers(out, BUNDLE)  # a kill between two renames leaves the bundle beside its place
    names = {*listed_files(out), MANIFEST, REPORT, CARD}
    with replaced_folder(out, BUNDLE, names, overwrite=True) as partial:
        # Read while no other process may replace it.
        documents = _amended(out, findings)
        kept = {*listed_files(out)} - {*documents}
        if not kept <= names:
            raise BundleError(f"{out}: was replaced by another bundle meanwhile; run this again")
        for name in kept:
            _link_or_copy(_own_file(out, name), partial / name)
        manifest = read_json(out, MANIFEST, MAX_MANIFEST_BYTES, BundleError)
        digests = {name: {"sha256": hashlib.sha256(data).hexdigest()} for name, data in documents.items()}
        manifest["files"] = dict(sorted({**manifest["files"], **digests}.items()))
        for name, data in {**documents, MANIFEST: dump_json(manifest)}.items():
            (partial / name).write_bytes(data)


def _amended(folder: Path, findings: Iterable[Finding]) -> Mapping[str, bytes]:
    """Report and card with these findings too."""
    text = {name: _document(folder, name) for name in (REPORT, CARD)}
    report = parse_json(text[REPORT] or b"{}", REPORT, BundleError)
    known = merged(read_findings(report), findings)
    try:
        card = text[CARD].decode("utf-8")
    except UnicodeDecodeError as reason:
        raise BundleError(f"{CARD}: expected UTF-8, found a wrong byte at {reason.start}") from None
    return {
        REPORT: dump_json({**report, "findings": as_entries(known)}),
        CARD: with_table(card, known).encode(),
    }


def _document(folder: Path, name: str) -> bytes:
    """A file for people, which its owner may have removed."""
    if not os.path.lexists(folder / name):
        return b""
    return read_bounded(folder, name, _MAX_DOCUMENT_BYTES, BundleError)


def _own_file(folder: Path, name: str) -> Path | None:
    """The bundle's own file, never what a symlink out of the folder points at; None for one that was removed."""
    if not os.path.lexists(folder / name):
        return None  # a document: the manifest still names it, and `verify` says so
    open_regular(folder, name, BundleError).close()
    return resolve_inside(folder, name, BundleError)


def _link_or_copy(old: Path | None, new: Path) -> None:
    """The same file under a second name, or a copy of it where the disk knows no such thing."""
    if old is None:
        return
    new.parent.mkdir(exist_ok=True)
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)


_MAX_README_BYTES = 1 << 20
# Which channels are kept, in words, where a method has a rule of its own.
_RULE = (
    "a channel is kept if |x| · g^alpha reaches the projection's threshold, where g is the norm of the channel's "
    "weights, or what the search puts in its place"
)
_RULES = {
    "teal": "a channel is kept if |x| reaches the projection's threshold",
}

_CITATION = """```bibtex
@article{chen2026wisparse,
  title   = {WiSparse: Boosting LLM Inference Efficiency with Weight-aware Mixed Activation Sparsity},
  author  = {Chen, Lei and Meng, Yuan and Zhan, Xiaoyu and Wang, Zhi and Zhu, Wenwu},
  journal = {arXiv preprint arXiv:2602.14452},
  year    = {2026},
  url     = {https://arxiv.org/abs/2602.14452}
}
```"""

# Tags of a source that its text model alone does not earn.
_OF_PICTURES = re.compile(r"multi-?modal|vision|image|video|visual|vlm?\b")
LICENCE_FILE = re.compile(r"(LICEN[SC]E|USE_POLICY|NOTICE)[^/]*")


@dataclass(frozen=True)
class Evaluation:
    """What was measured on held-out text, dense and sparse on the same tokens.

    Attributes:
        sparsity: the sparsity level.
        text: what the text was, in words.
        num_tokens: how many tokens were predicted.
        protocol: which tokens were sparse, in words.
        dense_perplexity, sparse_perplexity: exp of the mean negative log-likelihood.
        kl: mean KL(dense || sparse) in nats per token.
        top1_agreement: fraction of tokens where both models' first choice is the same.
        realised_sparsity: fraction of the projections' weights not used, over the sparse tokens.
        grade: what that means in a few words, and
        verdict: in a sentence, those of the conversion's summary.
        expectation: what that will be on other text, in a sentence or two.
    """

    sparsity: float
    text: str
    num_tokens: int
    protocol: str
    dense_perplexity: float
    sparse_perplexity: float
    kl: float
    top1_agreement: float
    realised_sparsity: float
    expectation: str = ""
    grade: str = ""
    verdict: str | None = None


@dataclass(frozen=True)
class Inherited:
    """What a card takes over from the source model: its licence and languages hold for the bundle as well."""

    licence: str | None = None
    licence_name: str | None = None
    licence_link: str | None = None
    languages: tuple[str, ...] = ()
    licence_files: tuple[str, ...] = ()
    chat: bool = False
    tags: tuple[str, ...] = ()


def read_inherited(folder: str | os.PathLike[str]) -> Inherited:
    """Licence, languages and chat template of a source model, from its own card and files.

    Metadata that the Hub would refuse is left out: the source's mistake must not stop an upload.
    """
    folder = Path(folder)
    found: Mapping[str, Any] = {}
    readme = folder / "README.md"
    if readme.is_file() and readme.stat().st_size <= _MAX_README_BYTES:
        found = _front_matter(readme.read_text("utf-8", errors="replace"))
    files = tuple(sorted(path.name for path in folder.iterdir() if LICENCE_FILE.fullmatch(path.name)))
    licence, name, link = (found.get(key) for key in ("license", "license_name", "license_link"))
    licence = licence if isinstance(licence, str) and re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence) else None
    name = name if isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) else None
    link = link if isinstance(link, str) and (link in files or link.startswith("https://")) else None
    texts = [file for file in files if file.startswith("LICEN")]
    if licence in (None, "other") and texts:
        licence, name, link = "other", name or "as-in-the-source", link or texts[0]
    languages = found.get("language") or []
    languages = [languages] if isinstance(languages, str) else languages if isinstance(languages, list) else []
    chat = (folder / "chat_template.jinja").is_file() or _mentions_chat(folder / "tokenizer_config.json")
    return Inherited(
        licence=licence,
        licence_name=name,
        licence_link=link,
        languages=tuple(
            code for code in languages if isinstance(code, str) and re.fullmatch(r"[a-z]{2,3}|code|multilingual", code)
        ),
        licence_files=files,
        chat=chat,
        tags=_tags(found.get("tags")),
    )


def render_card(
    recipe: Recipe,
    inherited: Inherited | None = None,
    *,
    evaluations: Sequence[Evaluation] = (),
    figures: Sequence[tuple[str, str]] = (),
    repo_id: str | None = None,
) -> str:
    """The text of a bundle's ``README.md``.

    Args:
        recipe: what the conversion decided.
        inherited: from ``read_inherited(source)``.
        evaluations: what was measured, by sparsity level; without the default sparsity level's the card says that nothing was.
        figures: (file name in the bundle, caption) of every picture.
        repo_id: where the bundle is going to be on the Hub, where that is known.
    """
    inherited = inherited or Inherited()
    evaluation = next((one for one in evaluations if one.sparsity == recipe.default), None)
    base = recipe.base_model
    title = f"{base.split('/')[-1]}, {100 * recipe.sparsity:.4g}% activation-sparse"
    on_hub = recipe.base_revision is not None
    licence, name, link = inherited.licence, inherited.licence_name, inherited.licence_link
    if licence == "other" and not (name and link):
        # The Hub wants both beside "other"; the source's own page is where it says more.
        name, link = name or "as-in-the-source", f"https://huggingface.co/{base}"
        licence, name, link = (licence, name, link) if on_hub else (None, None, None)
    metadata = ModelCardData(
        # A folder's name would be a link to nowhere, or to a stranger's model.
        base_model=base if on_hub else None,
        base_model_relation="quantized" if on_hub else None,
        language=[*inherited.languages] or None,
        library_name="wisparse",
        license=licence,
        license_name=name,
        license_link=link,
        pipeline_tag="text-generation",
        tags=list(
            dict.fromkeys(
                [
                    *("wisparse", "activation-sparsity"),
                    *(["conversational"] if inherited.chat else []),
                    *(tag for tag in inherited.tags if not (recipe.text_only and _OF_PICTURES.search(tag.lower()))),
                ]
            )
        ),
        model_name=title,
        eval_results=_results(evaluation) if evaluation else None,
    )
    if evaluation is None:
        metadata.pop("model_name")
    source = f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{base}`"
    sections = [
        f"# {title}",
        f"A WiSparse bundle of {source}: at every decoded token each linear "
        "layer reads only the weights of its most important input channels, about "
        f"{100 * recipe.sparsity:.4g}% fewer in all. Nothing was trained{_weights(recipe)}.",
        "## Measured\n\n" + _measured(evaluation, evaluations),
        *(f"![{caption}]({name})\n\n*{caption}*" for name, caption in figures),
        "## Use\n\n" + _usage(repo_id or "path/to/this/folder", inherited.chat),
        "## Recipe\n\n" + _recipe(recipe),
        "## Limitations\n\n" + _limitations(recipe, inherited),
        "## Citation\n\n" + _CITATION,
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def _weights(recipe: Recipe) -> str:
    if recipe.rotation is None:
        return " and no weight was changed"
    return (
        ". The weights are the source's in other coordinates, where leaving channels out costs less; dense, they say "
        f"what the source's say but for rounding (KL {recipe.rotation.kl:.2g} nats per token)"
    )


def _results(evaluation: Evaluation) -> list[EvalResult]:
    slug = re.sub(r"[^a-z0-9]+", "-", evaluation.text.lower()).strip("-")[:60] or "text"
    rows = [
        ("perplexity", "Perplexity, sparse", evaluation.sparse_perplexity),
        ("kl_divergence", "KL(dense || sparse), nats per token", evaluation.kl),
        ("accuracy", "Top-1 agreement with the dense model", evaluation.top1_agreement),
    ]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=slug,
            dataset_name=evaluation.text,
            metric_type=kind,
            metric_name=name,
            metric_value=float(f"{value:.6g}"),
        )
        for kind, name, value in rows
    ]


def _measured(evaluation: Evaluation | None, all_levels: Sequence[Evaluation]) -> str:
    if evaluation is None:
        return "Nothing yet. `wisparse eval` measures the loss against the dense model on text of your choice."
    return (
        (f"**{evaluation.verdict}**\n\n" if evaluation.verdict else "") + "| | dense | sparse |\n|---|---|---|\n"
        f"| perplexity | {evaluation.dense_perplexity:.3f} | {evaluation.sparse_perplexity:.3f} |\n"
        f"| KL(dense ‖ sparse), nats per token | 0 | {evaluation.kl:.4f} |\n"
        f"| top-1 agreement with the dense model | 1 | {evaluation.top1_agreement:.3f} |\n"
        f"| weights left unread | 0 | {evaluation.realised_sparsity:.1%} |\n\n"
        + (_levels(evaluation, all_levels) if len(all_levels) > 1 else "")
        + f"On {evaluation.num_tokens:,} tokens of {evaluation.text}; {evaluation.protocol}. "
        + (f"{evaluation.expectation} " if evaluation.expectation else "")
        + "Speed depends on the machine: `wisparse bench` measures it on yours, dense and sparse side by side."
    )


def _levels(default: Evaluation, evaluations: Sequence[Evaluation]) -> str:
    rows = [
        f"| {one.sparsity:.4g}{', the default' if one is default else ''} | {one.kl:.4f} | {one.top1_agreement:.3f} "
        f"| {one.sparse_perplexity:.3f} | {one.realised_sparsity:.1%} | {one.grade} |"
        for one in evaluations
    ]
    return (
        "Every sparsity that this bundle holds (`--sparsity`, or `model.sparsity = …` between two answers):\n\n"
        "| sparsity | KL | top-1 agreement | perplexity | weights left unread | |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n"
    )


def _usage(place: str, chat: bool) -> str:
    ask = (
        "model.generate([{'role': 'user', 'content': 'Why is the sky blue?'}], max_new_tokens=200)"
        if chat
        else "model.generate('Why is the sky blue?', max_new_tokens=200)"
    )
    ask = ask.replace("'", '"')
    return (
        "```sh\npip install wisparse\n"
        f'wisparse generate {place} --prompt "Why is the sky blue?"\n'
        + (f"wisparse chat {place}\n" if chat else "")
        + "```\n\n"
        f'```python\nimport wisparse\n\nmodel = wisparse.load("{place}")\nprint({ask}.text)\n```\n\n'
        f"In vLLM, with `wisparse[vllm]` installed: `vllm serve {place}`.\n\n"
        "Any program that reads Hugging Face checkpoints loads this folder too, as the dense model. In transformers,\n"
        "`wisparse.sparsify(model, bundle)` puts the masks on."
    )


def _recipe(recipe: Recipe) -> str:
    alphas = [entry.alpha for entry in recipe.projections]
    sparsities = [entry.sparsity for entry in recipe.projections]
    blocks = recipe.block_sparsities
    calibration = recipe.calibration
    search = recipe.search.get("settings", {}).get("search") if isinstance(recipe.search, Mapping) else None
    commit = f" at `{recipe.base_revision}`" if recipe.base_revision else ""
    return "\n".join(
        [
            f"- source: `{recipe.base_model}`{commit}",
            *([f"- {recipe.text_only}"] if recipe.text_only else []),
            *([f"- rotation of the weights: {recipe.rotation}"] if recipe.rotation else []),
            f"- method: {recipe.method}; {_RULES.get(recipe.method, _RULE)}",
            *([f"- search: {search}"] if isinstance(search, str) and search.isprintable() else []),
            f"- sparsity: {recipe.sparsity:.1%} of the weights of {len(sparsities)} projections in {len(blocks)} "
            f"blocks; {min(blocks):.1%} to {max(blocks):.1%} by block, {min(sparsities):.1%} to {max(sparsities):.1%} "
            "by projection",
            f"- alpha: {min(alphas):g} to {max(alphas):g}, median {statistics.median(alphas):g}",
            f"- calibration: {calibration.source}, {calibration.num_samples} samples of up to {calibration.seq_len} "
            f"tokens ({calibration.num_tokens:,} in all), seed {calibration.seed}",
            "- everything else, projection by projection: `wisparse.json`",
        ]
    )


def _limitations(recipe: Recipe, inherited: Inherited) -> str:
    lines = [
        "- An approximation: the answers differ from the dense model's, more so the further the text is from the "
        "calibration text.",
        "- It speeds up decoding of one or few sequences at a time. Prompts are read dense by default, and large "
        "batches gain nothing.",
        "- Programs other than WiSparse, or vLLM with its plug-in, run it dense, at the dense model's speed and "
        "quality.",
    ]
    if recipe.text_only:
        lines.insert(0, "- Text only: the source reads pictures too, this bundle does not.")
    files = " and ".join(f"`{name}`" for name in inherited.licence_files)
    if inherited.licence or inherited.licence_files:
        licence = inherited.licence_name or inherited.licence
        named = f" ({licence})" if licence else ""
        lines.append(f"- The source model's licence{named} applies" + (f": see {files}." if files else "."))
    else:
        lines.append("- The source model names no licence; ask its authors before you share this.")
    return "\n".join(lines)


def _tags(found: Any) -> tuple[str, ...]:
    """The source's tags, but for those that say how its own files are stored or what was done to them."""
    if not isinstance(found, list):
        return ()
    known = (tag for tag in found if isinstance(tag, str) and re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,63}", tag))
    return tuple(tag for tag in known if tag.lower() not in ("safetensors", "pytorch", "gguf", "transformers"))[:50]


def _front_matter(text: str) -> Mapping[str, Any]:
    """The YAML between the first two ``---``; empty if there is none or it cannot be read."""
    match = re.match(r"\s*---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    if match is None:
        return {}
    try:
        found = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}  # a damaged card is the source's; ours then says that it names no licence
    return found if isinstance(found, dict) else {}


def _mentions_chat(tokenizer_config: Path) -> bool:
    return tokenizer_config.is_file() and b'"chat_template"' in tokenizer_config.read_bytes()[: 16 << 20]
