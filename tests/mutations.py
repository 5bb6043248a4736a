"""Whether the fast tests notice a change to an important line: each change alone, in a copy of the tree.

    python tests/mutations.py [--only WORD] [--json FILE]

A change is noticed if the tests named beside it fail; they pass on the tree as it is. A line that is no longer there
is an error, so the table cannot rot in silence.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """One change: in ``file`` the text ``before``, which stands there once, becomes ``after``.

    ``tests`` are pytest's arguments, by blanks: the fast tests that guard the line.
    """

    what: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    # Six that no test noticed once.
    Mutation(
        "a symlink into any sibling `blobs/` is followed",
        "formats/guard.py",
        'and repository.name.startswith("models--")',
        "",
        "tests/test_formats_checkpoint.py",
    ),
    Mutation(
        "the nucleus leaves out the token that reaches top_p",
        "runtime/decoding/sampling.py",
        "inside = (sums - ordered.exp() / total) < top_p",
        "inside = (sums - ordered.exp() / total) <= top_p",
        "tests/test_runtime_sampling.py",
    ),
    Mutation(
        "final thresholds come from the dense model's inputs",
        "converter/search/thresholds.py",
        "                masked.set_threshold(name, threshold)\n",
        "",
        "tests/test_converter_thresholds.py",
    ),
    Mutation(
        "the CUDA step looks ahead past the cache's end",
        "runtime/cuda/decoder.py",
        "lengths[slot] < self.max_seq_len for slot, token",
        "lengths[slot] <= self.max_seq_len for slot, token",
        "tests/test_kernels_triton.py -k quick_cases",
    ),
    Mutation(
        "a template's trial is not limited",
        "formats/chat_template.py",
        "resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))",
        "",
        "tests/test_runtime_tokenizer.py -k takes_too_much",
    ),
    Mutation(
        "the preflight does not see a container's limit",
        "formats/machine.py",
        "free = min(free, int(limit) - max(0, int(usage) - cache))",
        "pass",
        "tests/test_formats_machine.py",
    ),
    # Twenty more.
    Mutation(
        "a score on the threshold is dropped",
        "kernels/reference.py",
        "return ~(score < threshold)",
        "return ~(score <= threshold)",
        "tests/test_kernels_reference.py",
    ),
    Mutation(
        "a NaN score is dropped",
        "kernels/reference.py",
        "return ~(score < threshold)",
        "return score >= threshold",
        "tests/test_kernels_reference.py",
    ),
    Mutation(
        "the CPU kernel drops a score on the threshold where rows share a list",
        "kernels/cpu/linear.py",
        "keep = 0 if abs(v) * scale_[k] < threshold else 1",
        "keep = 0 if abs(v) * scale_[k] <= threshold else 1",
        "tests/test_kernels_cpu.py",
    ),
    Mutation(
        "half a prompt is one token more",
        "formats/weight_types.py",
        '"half": length - length // 2',
        '"half": length // 2',
        "tests/test_runtime_generation.py",
    ),
    Mutation(
        "an answer ends a token before the context is full",
        "runtime/generation/scheduler.py",
        "self._filled(job) == self._decoder.max_seq_len:",
        "self._filled(job) + 1 == self._decoder.max_seq_len:",
        "tests/test_runtime_generation.py",
    ),
    Mutation(
        "a random number belongs to the position before",
        "runtime/decoding/sampling.py",
        "(start + (position + 1) * 0x9E3779B97F4A7C15)",
        "(start + position * 0x9E3779B97F4A7C15)",
        "tests/test_runtime_sampling.py",
    ),
    Mutation(
        "a sliding window is one position wider",
        "runtime/torch/block.py",
        "mask &= ahead > -window",
        "mask &= ahead >= -window",
        "tests/test_runtime_decoder.py",
    ),
    Mutation(
        "LongRoPE's long factors begin one token early",
        "runtime/decoding/rotary.py",
        "length > self._switch",
        "length >= self._switch",
        "tests/test_runtime_decoder.py",
    ),
    Mutation(
        "a safetensors file may have bytes behind its last tensor",
        "formats/safetensors_header.py",
        "if 8 + length + position != seen.size:",
        "if 8 + length + position > seen.size:",
        "tests/test_formats_safetensors_header.py",
    ),
    Mutation(
        "a key may stand in a JSON object twice",
        "formats/guard.py",
        "if len(found) != len(pairs):",
        "if len(found) > len(pairs):",
        "tests/test_formats_safetensors_header.py",
    ),
    Mutation(
        "a sidecar of another recipe is believed",
        "formats/sidecar.py",
        'if metadata.get("recipe_sha256") != recipe_digest(manifest.recipe):',
        'if metadata.get("recipe_sha256") is None:',
        "tests/test_formats_bundle.py",
    ),
    Mutation(
        "an infinite threshold is believed",
        "formats/sidecar.py",
        '_SMALLEST_NORMAL <= threshold < float("inf")',
        '_SMALLEST_NORMAL <= threshold <= float("inf")',
        "tests/test_formats_bundle.py",
    ),
    Mutation(
        "the CPU's step keeps the thresholds of the sparsity level before",
        "runtime/cpu/step.py",
        "self._thresholds[row] = projection.threshold",
        "self._thresholds[row] = self._thresholds[row] or projection.threshold",
        "tests/test_runtime_levels.py -k other_masks",
    ),
    Mutation(
        "sparsity levels may stand in any order",
        "formats/manifest.py",
        "if any(low >= high for low, high in pairwise(found)):",
        "if len(set(found)) < len(found):",
        "tests/test_formats_bundle.py",
    ),
    Mutation(
        "a small file's digest is not compared",
        "formats/bundle.py",
        "if found != manifest.sha256[name]:",
        "if not found:",
        "tests/test_formats_bundle.py",
    ),
    Mutation(
        "a file may change between its check and its reading",
        "formats/guard.py",
        "if expected is not None and FileIdentity.of(status) != expected:",
        "if expected is not None and status.st_size != expected.size:",
        "tests/test_formats_bundle.py",
    ),
    Mutation(
        "the budget is spent on projections alike, whatever their size",
        "converter/budget.py",
        "shift = missing / sum(sizes[name] for name in free)",
        "shift = missing / total",
        "tests/test_converter_budget.py",
    ),
    Mutation(
        "a threshold stands on the upper score of the gap",
        "converter/search/thresholds.py",
        "middle = float(torch.tensor((below + above) / 2))",
        "middle = above",
        "tests/test_converter_thresholds.py",
    ),
    Mutation(
        "the divergence is taken the other way round",
        "converter/sensitivity.py",
        "(dense_log_probs.exp() * (dense_log_probs - log_q)).sum(dim=-1)",
        "(log_q.exp() * (log_q - dense_log_probs)).sum(dim=-1)",
        "tests/test_converter_divergence.py",
    ),
    Mutation(
        "a choice's log-probabilities are read one token late",
        "runtime/lm_eval.py",
        "[*context, *wanted][:-1]",
        "[*context, *wanted][1:]",
        "tests/test_runtime_lm_eval.py",
    ),
    Mutation(
        "crc32 of parts: the order does not matter",
        "formats/safetensors_header.py",
        "return _multiply(_appended(second_bytes), first) ^ second",
        "return _multiply(_appended(second_bytes), second) ^ first",
        "tests/test_formats_crc.py",
    ),
    Mutation(
        "the scores' scale is squared in the reference",
        "kernels/reference.py",
        "return x.float().abs() * channel_scale",
        "return x.float().abs() * channel_scale * channel_scale",
        "tests/test_kernels_reference.py",
    ),
    # What users met, each of which was mended.
    Mutation(
        "questions are asked two at a time, each of which waits for the longer answer",
        "runtime/lm_eval.py",
        "groups.setdefault(str(request.args[1]), []).append(index)",
        'groups.setdefault(f"{request.args[1]}{index // 2}", []).append(index)',
        "tests/test_runtime_lm_eval.py",
    ),
    Mutation(
        "a folder with somebody's files is replaced",
        "formats/folder.py",
        "        if name not in known and not (name.endswith",
        "        if not known and not (name.endswith",
        "tests/test_formats_folder.py",
    ),
    Mutation(
        "a link out of the bundle is published",
        "formats/hub.py",
        "open_regular(folder, name, BundleError).close()",
        "open(folder / name).close()",
        "tests/test_formats_hub.py -k link",
    ),
    Mutation(
        "an old bundle counts as what a killed conversion was making",
        "converter/state.py",
        ' or mark.get("made from") != json.loads(json.dumps(made_from))',
        "",
        "tests/test_converter_pipeline.py",
    ),
    Mutation(
        "only the beginning of each piece of the weights is looked at",
        "converter/source.py",
        "hashed.update(read)",
        "hashed.update(read[:4096])",
        "tests/test_converter_pipeline.py -k every_byte",
    ),
    Mutation(
        "template and licence of the source are not looked at",
        "converter/source.py",
        "contents = dict(copied_files(folder, error))",
        "contents = {}",
        "tests/test_converter_pipeline.py -k every_file",
    ),
    Mutation(
        "a state folder that the user made is deleted with the state",
        "converter/state.py",
        'last=("lock",), keep=not self._made)',
        'last=("lock",))',
        "tests/test_converter_pipeline.py tests/test_converter_state.py",
    ),
    Mutation(
        "names of unknown files reach the terminal as they are",
        "formats/verify.py",
        'f"{printable(name)}: not part of the bundle"',
        'f"{name}: not part of the bundle"',
        "tests/test_formats_bundle.py -k terminal",
    ),
    Mutation(
        "RANK alone makes a silent worker",
        "formats/machine.py",
        "if missing := [name for name in _NEEDED if name not in found]:",
        "if missing := [name for name in () if name not in found]:",
        "tests/test_cli.py -k torchrun",
    ),
    Mutation(
        "a spreadsheet among texts is a document a line",
        "converter/documents.py",
        " and not (str(file) != path and file.suffix in _TEXT_TABLES)",
        "",
        "tests/test_converter_calibration.py -k spreadsheet",
    ),
    Mutation(
        "answers of one bundle are gone on with by another under its name",
        "wisparse/commands/generate.py",
        "json.dumps([*self._told, files], sort_keys=True)",
        "json.dumps([*self._told], sort_keys=True)",
        "tests/test_runtime_commands.py -k prompts",
    ),
    Mutation(
        "an interrupted exchange of folders deletes files of the old one",
        "formats/folder.py",
        "if (partial / UNFINISHED).is_file():",
        "if partial.is_dir():",
        "tests/test_formats_folder.py -k interrupt",
    ),
)


def run(mutation: Mutation, tree: Path) -> dict[str, object]:
    """Apply one change in ``tree``, run its tests, take it back."""
    file = tree / mutation.file
    source = file.read_text("utf-8")
    if source.count(mutation.before) != 1:
        raise SystemExit(
            f"{mutation.file}: expected once, found {source.count(mutation.before)} times: {mutation.before}"
        )
    file.write_text(source.replace(mutation.before, mutation.after), "utf-8")
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    env = {**os.environ, "CI": "true", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run([*command, *shlex.split(mutation.tests)], cwd=tree, env=env, capture_output=True, text=True)
    file.write_text(source, "utf-8")
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.what}: pytest did not run\n{done.stdout}{done.stderr}")
    by = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    seconds = round(time.perf_counter() - start, 1)
    return {"change": mutation.what, "noticed": done.returncode == 1, "by": by[:1], "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose description or file contains this")
    parser.add_argument("--json", type=Path, help="write the outcome there")
    options = parser.parse_args()
    chosen = [one for one in MUTATIONS if options.only in one.what or options.only in one.file]
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, names.decode().split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        for mutation in chosen:
            outcomes.append(run(mutation, tree))
            print(json.dumps(outcomes[-1], ensure_ascii=False), flush=True)
    noticed = sum(bool(outcome["noticed"]) for outcome in outcomes)
    print(f"{noticed} of {len(outcomes)} changes noticed")
    if options.json:
        options.json.write_text(
            json.dumps({"noticed": noticed, "changes": outcomes}, indent=1, ensure_ascii=False) + "\n"
        )
    return 0 if noticed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
