"""Sparsity realised on text of another kind than the calibration's, and KL there.

    OMP_NUM_THREADS=1 python benchmarks/other_text.py --json out.json         # the example model, minutes on two cores
    ... --judge answers --calibration answers --search refine --sparsity 0.5 0.4 0.3 --json answers.json
    ... --compare library.json answers.json --json both.json

Calibrated as a conversion does it (`--search`, several sparsities as its sparsity levels, rotated unless --rotation none) on
`library`, passages of every other file of the standard library; `self`, what the model writes; `answers`, prompts with
the dense model's own answers, as a file of such texts; `openings`, those of its long answers alone; or `half`, library
and answers in equal parts.

Judged, every token sparse (`--judge kinds`): the files between, two draws; the files calibrated on, other passages;
text that the model writes; interpreter sessions; the documentation of Python's statements, which is prose. Or (`--judge
answers`) the dense model's answers to other prompts, these read dense as when serving: openings of functions, classes
and stories answered greedily and sampled, 256 tokens, and lines of an interpreter; the same with every token sparse;
and the files between.

``--compare`` puts each KL of the second and further files over that of the first, on the same passages: at the same
target, and at equally many weights left unread (there the first's KL lies on a line between its sparsity levels, in logarithms).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from quality import EXAMPLE, describe_machine, print_document, stdlib_tokens
from torch import Tensor

from wisparse.converter.calibration import load_calibration, pack
from wisparse.converter.documents import CalibrationTokens
from wisparse.converter.masking import MaskedModel
from wisparse.converter.rotation import rotate
from wisparse.converter.search.search import SearchResult, SearchSettings, SparsityLevels
from wisparse.converter.sensitivity import kl_rows
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.checkpoint import Checkpoint
from wisparse.runtime.tasks.greedy_loops import MAX_NEW_TOKENS, make_prompts
from wisparse.runtime.tasks.interpreter_chains import make_chains
from wisparse.runtime.tasks.interpreter_lines import make_problems

_DIRECTIONS_SEED = 3_000_003
_PROMPTS_SEED = 11


@dataclass(frozen=True)
class Passage:
    """Tokens (1, L), of which the first ``prompt`` are read dense; like the very first token they are not measured."""

    ids: Tensor
    prompt: int = 0


def kinds(source: SourceModel, count: int, length: int) -> dict[str, list[Passage]]:
    """Text by its kind."""

    def packed(documents: list[str]) -> Tensor:
        return torch.tensor(pack(documents, source.tokenizer, count, length, 0, "text"))

    sessions = [chain.session + [*chain.questions()][-1] for chain in make_chains(40 * count, 1)]
    found = {
        "library, other files": stdlib_tokens(source, "evaluation", count, length).input_ids,
        "library, other files, again": stdlib_tokens(source, "evaluation", count, length, 1).input_ids,
        "library, the same files": stdlib_tokens(source, "calibration", count, length, 2_000_003).input_ids,
        "the model's own": calibration("self", source, count, length, 5).input_ids,
        "interpreter sessions": packed(sessions),
        "prose": packed([topics[name] for name in sorted(topics)]),
    }
    return {kind: whole(ids) for kind, ids in found.items()}


def whole(ids: Tensor) -> list[Passage]:
    return [Passage(row) for row in ids.split(1)]


def answers(source: SourceModel, seed: int, count: int) -> dict[str, list[Passage]]:
    """A dense model's: ``count`` of 256 tokens of either kind, four times as many lines of an interpreter."""
    # Openings of one list are none twice: those of seed n are from its n-th thousand.
    openings = make_prompts(1000 * (seed + 1), _PROMPTS_SEED)[1000 * seed :][: 2 * count]
    lines = [one.prompt for one in make_problems(4 * count, _PROMPTS_SEED + seed)]
    torch.manual_seed(seed)
    return {
        "answers, greedy": answered(source, openings[:count], MAX_NEW_TOKENS),
        "answers, sampled": answered(source, openings[count:], MAX_NEW_TOKENS, do_sample=True, top_k=0),
        "answers, interpreter lines": answered(source, lines, 24, stop="\n"),
    }


@torch.no_grad()
def answered(
    source: SourceModel, prompts: Sequence[str], longest: int, stop: str | None = None, **how: Any
) -> list[Passage]:
    """Each prompt with its answer, which ends with the model's end of text or with the first ``stop``."""
    tokenizer = source.tokenizer
    batch = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    pad = {"pad_token_id": tokenizer.pad_token_id}
    given = source.model.generate(**batch, max_new_tokens=longest, **({"do_sample": False} | how), **pad)
    found = []
    for row, mask in zip(given, batch["attention_mask"], strict=True):
        answer = row[len(mask) :].tolist()
        if tokenizer.eos_token_id in answer:
            answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
        ends = [i for i in range(len(answer)) if stop and stop in tokenizer.decode(answer[: i + 1])]
        prompt = row[: len(mask)][mask.bool()]
        answer = answer[: ends[0] + 1] if ends else answer
        found.append(Passage(torch.cat([prompt, torch.tensor(answer)])[None], len(prompt)))
    return found


def calibration(kind: str, source: SourceModel, count: int, length: int, seed: int) -> CalibrationTokens:
    """(count, length) tokens of library, self, answers, openings or half."""
    if kind == "library":
        return stdlib_tokens(source, "calibration", count, length, seed)
    if kind == "self":
        return load_calibration("self", source.tokenizer, source.model, count, length, seed)
    if kind == "half":
        parts = [calibration(one, source, count // 2, length, seed) for one in ("library", "answers")]
        rows = torch.cat([part.input_ids for part in parts]).tolist()
        return CalibrationTokens.from_rows(rows, " and ".join(part.source for part in parts), seed)
    # As a file of texts would be read, one a prompt with its answer.
    found = answers(source, 1 + seed % 2, max(4, count * length // 320))
    if kind == "openings":
        del found["answers, interpreter lines"]
    texts = [source.tokenizer.decode(one.ids[0], skip_special_tokens=True) for each in found.values() for one in each]
    rows = pack(texts, source.tokenizer, count, length, seed, "answers")
    return CalibrationTokens.from_rows(rows, f"prompts and answers{', long ones' * (kind == 'openings')}", seed)


class Masks:
    """A search's masks on the projections."""

    def __init__(self, source: SourceModel, result: SearchResult) -> None:
        self.source, self.scales = source, result.channel_scales
        self.thresholds = {name: entry.threshold for name, entry in result.projections.items()}
        self.sizes = {name: module.weight.numel() for name, module in source.projections.items()}
        self.masked = MaskedModel(source.projections)

    @torch.no_grad()
    def logits(self, ids: Tensor, seen: dict[str, Tensor], prompt: int = 0) -> Tensor:
        """Of (1, L), the first ``prompt`` tokens dense; ``seen`` gets the share of each token's channels that is
        dropped, by projection (L,)."""

        def drop(name: str, x: Tensor) -> Tensor:
            keep = x.float().abs() * self.scales[name] >= self.thresholds[name]
            keep[:, :prompt] = True
            seen[name] = 1.0 - keep.float().mean(-1)[0]
            return torch.where(keep, x, 0.0)

        with self.masked.replacing(drop):
            return self.source.model(input_ids=ids, use_cache=False).logits[0].float()

    def measure(self, passages: Sequence[Passage], dense: Sequence[Tensor]) -> dict[str, Any]:
        """Means over tokens; errors by the spread of passages."""
        unread, kls, counts = [], [], []
        for one, wanted in zip(passages, dense, strict=True):
            seen: dict[str, Tensor] = {}
            first = max(1, one.prompt)
            kl = kl_rows(wanted, self.logits(one.ids, seen, one.prompt))[first:]
            total = sum(self.sizes.values())
            unread.append(float(sum(seen[name][first:].mean() * size / total for name, size in self.sizes.items())))
            kls.append(float(kl.mean()))
            counts.append(len(kl))
        weights = torch.tensor(counts, dtype=torch.float64)
        found: dict[str, Any] = {}
        for name, values in (("unread", unread), ("kl", kls)):
            mean, error = weighted(torch.tensor(values, dtype=torch.float64), weights)
            found |= {name: round(mean, 5), f"{name}_stderr": round(error, 5)}
        return found | {"tokens": counts, "kls": [round(kl, 6) for kl in kls]}


def weighted(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """Mean of values (N,) by weights (N,) and its standard error, that of a ratio of two sums."""
    mean = (values * weights).sum() / weights.sum()
    spread = ((values - mean) * weights).square().sum() * len(values) / (len(values) - 1)
    return float(mean), float(spread.sqrt() / weights.sum())


def with_all_answers(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with rows for the answers of every kind together."""
    rows = list(document["rows"])
    for sparsity in dict.fromkeys(row["sparsity"] for row in rows):
        parts = [one for one in rows if one["text"].startswith("answers, ") and one["sparsity"] == sparsity]
        if not parts:
            continue
        whole_row: dict[str, Any] = {"sparsity": sparsity, "text": "answers of all three kinds"}
        whole_row |= {name: [one for part in parts for one in part[name]] for name in ("tokens", "kls")}
        weights = torch.tensor(whole_row["tokens"], dtype=torch.float64)
        kl, error = weighted(torch.tensor(whole_row["kls"], dtype=torch.float64), weights)
        unread = sum(part["unread"] * sum(part["tokens"]) for part in parts) / float(weights.sum())
        rows.append(whole_row | {"unread": round(unread, 5), "kl": round(kl, 5), "kl_stderr": round(error, 5)})
    return document | {"rows": rows}


def compared(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``other`` with its KLs over those of ``first``, in place of the passages' own."""
    rows = []
    for row in other["rows"]:
        theirs = sorted((one for one in first["rows"] if one["text"] == row["text"]), key=lambda one: one["unread"])
        if any(one["tokens"] != row["tokens"] for one in theirs) or len(theirs) < 2:
            raise SystemExit(f"{row['text']}: expected the same passages in both files, and two sparsities or more")
        (same,) = (one for one in theirs if one["sparsity"] == row["sparsity"])
        low, high = sorted(theirs, key=lambda one: abs(one["unread"] - row["unread"]))[:2]
        place = (row["unread"] - low["unread"]) / (high["unread"] - low["unread"])
        ends = [torch.tensor(one["kls"], dtype=torch.float64).clamp_min(1e-6).log() for one in (low, high)]
        line = torch.lerp(*ends, place).exp()
        told = {name: value for name, value in row.items() if name not in ("tokens", "kls")}
        at_target = over(row, torch.tensor(same["kls"], dtype=torch.float64))
        rows.append(told | {"over": at_target, "over at equal unread": over(row, line)})
    return other | {"rows": rows}


def over(row: Mapping[str, Any], theirs: Tensor) -> list[float]:
    """KL over that of the same passages (N,) elsewhere, and its standard error."""
    weights = torch.tensor(row["tokens"], dtype=torch.float64)
    mine = torch.tensor(row["kls"], dtype=torch.float64)
    below = float((theirs * weights).sum() / weights.sum())
    ratio = float((mine * weights).sum() / weights.sum()) / below
    return [round(ratio, 4), round(weighted(mine - ratio * theirs, weights)[1] / below, 4)]


@torch.no_grad()
def log_probs(source: SourceModel, ids: Tensor) -> Tensor:
    """(L, V) of (1, L)."""
    logits: Tensor = source.model(input_ids=ids, use_cache=False).logits
    return logits[0].float().log_softmax(-1)


def judged(arguments: argparse.Namespace, dense: SourceModel, tokens: CalibrationTokens) -> dict[str, list[Passage]]:
    count, length = arguments.evaluation_samples, arguments.seq_len
    if arguments.judge == "kinds":
        return {"calibrated on": whole(tokens.input_ids), **kinds(dense, count, length)}
    found = answers(dense, 0, 2 * count)
    everything = [Passage(one.ids) for passages in found.values() for one in passages]
    library = whole(stdlib_tokens(dense, "evaluation", 2 * count, length).input_ids)
    return {**found, "prompts and answers, every token sparse": everything, "library, other files": library}


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    dense = load_source(arguments.model, device="cpu")
    source = load_source(arguments.model, device="cpu")
    shape = (arguments.num_samples, arguments.seq_len)
    tokens = calibration(arguments.calibration, source, *shape, 0)
    texts = judged(arguments, dense, tokens)
    if arguments.rotation != "none":
        # As a conversion does it: another text, half as long.
        directions = calibration(arguments.calibration, source, -(-shape[0] // 2), shape[1], _DIRECTIONS_SEED)
        source = rotate(source, Checkpoint.open(arguments.model), tokens, lambda: directions).source
    with SparsityLevels(source, tokens, SearchSettings(search=arguments.search)) as levels:
        results = [levels.at(sparsity) for sparsity in sorted(arguments.sparsity, reverse=True)]
    rows: list[dict[str, Any]] = []
    for kind, passages in texts.items():
        wanted = [log_probs(dense, one.ids) for one in passages]
        for result in results:
            rows.append({"sparsity": result.sparsity, "text": kind, **Masks(source, result).measure(passages, wanted)})
            told = {name: value for name, value in rows[-1].items() if name not in ("tokens", "kls")}
            print(json.dumps(told), file=sys.stderr, flush=True)
    return {
        "model": arguments.model.name,
        "search": arguments.search,
        "calibration": tokens.source,
        "rotation": arguments.rotation,
        "tokens": {"calibration": tokens.num_tokens},
        "machine": describe_machine(torch.device("cpu")),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--search", default="fisher")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5])
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--evaluation-samples", type=int, default=16)
    parser.add_argument("--calibration", choices=("library", "self", "answers", "openings", "half"), default="library")
    parser.add_argument("--judge", choices=("kinds", "answers"), default="kinds")
    parser.add_argument("--rotation", choices=("pca", "none"), default="pca")
    parser.add_argument("--compare", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.compare:
        first, *others = [with_all_answers(json.loads(path.read_text())) for path in arguments.compare]
        print_document(
            {"over": first["calibration"], "runs": [compared(first, one) for one in (first, *others)]}, arguments.json
        )
    else:
        print_document(measured(arguments), arguments.json)


if __name__ == "__main__":
    main()
