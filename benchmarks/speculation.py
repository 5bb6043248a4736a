"""Speculation by lookup against plain decoding: speed of a copying task and of fresh text, and equal greedy tokens.

    python benchmarks/speculation.py BUNDLE --prompts 1000          # a bundle with a tokenizer, on any device
    PYTHONPATH=. python benchmarks/speculation.py --shape llama-3.1-8b --weights int4   # random weights, NVIDIA GPUs

The copying task is replayed: the drafts of every step are as long, and accepted as far, as those of a file of this
repository that is answered with three edits; the model's own greedy tokens, known from the plain run, stand for the
file's. Fresh text is the documentation, replayed alike. Expected: copying 2.5 times (a CPU: 1.5), fresh text 0.98 and
more. JSON last.
"""

from __future__ import annotations

import json
import re
import statistics
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

import wisparse
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.generation import scheduler as scheduling
from wisparse.runtime.generation import speculation
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import Drafter, Lookup, SpeculativeConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG = SpeculativeConfig()


def words(*files: Path) -> list[int]:
    text = "\n".join(file.read_text("utf-8") for file in files)
    return [zlib.crc32(word.encode()) for word in re.findall(r"\s*(?:\w{1,6}|[^\w\s])", text)]


def tasks(vocab_size: int, count: int) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and text of each: ids of words."""
    file = words(ROOT / "runtime" / "generation" / "scheduler.py")[:count]
    edited, step = list(file), count // 4
    for i, number in enumerate((3, 1, 6)):  # a line is changed, a word added, some are left out
        at = step * (i + 1)
        edited[at : at + number] = range(number if i != 1 else 2)
    prose = words(*sorted((ROOT / "docs").glob("*.md")))
    found = {"copying": (file, edited), "fresh": (prose[:200], prose[200 : 200 + count])}
    return {name: tuple([3 + id_ % (vocab_size - 3) for id_ in one] for one in pair) for name, pair in found.items()}


class Replayed(Drafter):
    """The drafts that another text would have, of an answer that is known."""

    def __init__(self, costs: tuple[float, float], prompt: Sequence[int], text: Sequence[int], answer: Sequence[int]):
        super().__init__(0, costs)
        self.lookup, self.text, self.answer, self.at = Lookup(CONFIG, costs, [*prompt, text[0]]), text, answer, 1

    def propose(self, most: int) -> list[int]:
        draft = self.lookup.propose(most)
        if not draft:
            return draft
        right = next((i for i, one in enumerate(draft) if one != self.text[self.at + i]), len(draft))
        wrong = (self.answer[self.at + right] + 1) % 3 if right < len(draft) else 0
        return [*self.answer[self.at : self.at + right], *[wrong] * (len(draft) - right)]

    def take(self, _: int) -> None:
        if self.at < len(self.text):
            self.lookup.take(self.text[self.at])
            self.at += 1

    def settle(self, drafted: int, accepted: int, *, undecided: bool = False) -> None:
        self.lookup.settle(drafted, accepted, undecided=undecided)


def answer(
    decoder: Decoder, prompt: Sequence[int], count: int, replayed: Any = None
) -> tuple[float, Scheduler, Request]:
    """Seconds of the decode steps."""
    scheduler = Scheduler(decoder, speculative=None if replayed is None else CONFIG)
    if replayed is not None:
        scheduling.make_drafter = lambda *_: replayed  # type: ignore[assignment]
    request = scheduler.add(Request(prompt, count))
    while scheduler.busy:
        scheduler.step(lambda: False)
    return request.last_token_time - request.first_token_time, scheduler, request


def predictable(checkpoint: Any) -> None:
    """Let random weights answer each token with the one before it in the vocabulary, whatever the roundings are."""
    made = checkpoint.tensor

    def tensor(name: str, *given: Any) -> torch.Tensor:
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            return made(name, *given)
        embedding = made("model.embed_tokens.weight", *given).float()
        embedding *= 20 / embedding.std()
        head = embedding.roll(-1, 0) / 400
        return (head if name == "lm_head.weight" else embedding).to(torch.bfloat16)

    checkpoint.tensor = tensor


def speeds(decoder: Decoder, count: int, runs: int) -> dict[str, Any]:
    found = {}
    decoder.speculates = True
    margin, decoder.verify_margin = decoder.verify_margin, 0.0  # random weights have no clear favourites
    for name, (prompt, text) in tasks(decoder.config.vocab_size, count).items():
        plain: list[float] = []
        lookup: list[float] = []
        for run in range(runs + 1):
            seconds, _, request = answer(decoder, prompt, len(text) - 16)
            known = request.output_token_ids + [0] * 32
            other, scheduler, again = answer(
                decoder, prompt, len(text) - 16, Replayed(decoder.verify_costs, prompt, text, known)
            )
            if run:
                plain.append(seconds)
                lookup.append(other)
        tokens = len(text) - 17
        same = next(
            (i for i, (a, b) in enumerate(zip(known, again.output_token_ids, strict=False)) if a != b), tokens + 1
        )
        found[name] = {
            "plain_tok_per_s": round(tokens / statistics.median(plain), 1),
            "lookup_tok_per_s": round(tokens / statistics.median(lookup), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(plain, lookup, strict=True)), 3),
            "acceptance": round(scheduler.stats.drafts.acceptance_rate, 3),
            "mean_length": round(scheduler.stats.drafts.mean_length, 2), "drafts": scheduler.stats.drafts.drafts,
            "equal_tokens": same,
        }  # fmt: skip
        print(name, json.dumps(found[name]), flush=True)
    decoder.verify_margin = margin
    return found


def equality(bundle: str, count: int, length: int, head: str | None, **loading: Any) -> dict[str, Any]:
    """Greedy answers to beginnings of lines of this repository, with and without speculation."""
    lines = [
        line
        for file in sorted((ROOT / "runtime").rglob("*.py"))
        for line in re.findall(r"(?:^.*\S.*\n){4}", file.read_text(), re.M)
    ]
    prompts = [lines[i * len(lines) // count] for i in range(count)]
    found, speeds = [], []
    for speculative in (None, {"method": "eagle3", "model": head} if head else {"method": "ngram"}):
        with wisparse.load(bundle, max_seq_len=512, speculative=speculative, **loading) as model:
            found.append(
                [model.generate(prompt, max_new_tokens=length, chat_template=False).token_ids for prompt in prompts]
            )
            drafts = model.engine.scheduler.stats.drafts
            speeds.append(round(model.engine.scheduler.stats.tok_per_s, 1))
    equal = sum(a == b for a, b in zip(*found, strict=True))
    known = {"prompts": count, "equal": equal, "tokens": sum(map(len, found[0])), "tok_per_s": speeds}
    return known | {
        "accepted": drafts.accepted_tokens, "acceptance": drafts.acceptance_rate, "mean_length": drafts.mean_length
    }  # fmt: skip


@click.command()
@click.argument("bundle", required=False)
@click.option("--shape", help="Random weights of a shape that gpu_models.py lists, instead of a bundle.")
@click.option("--device", default="auto")
@click.option("--weights", default="native")
@click.option("--sparsity", type=float, default=None)
@click.option("--tokens", default=2000, show_default=True, help="Of the file that is copied.")
@click.option("--runs", default=3, show_default=True)
@click.option("--prompts", default=0, help="Greedy answers to compare.")
@click.option("--head", help="Compare those of an EAGLE-3 head, of four tokens in every step, instead of lookup's.")
def main(
    bundle: str | None,
    shape: str | None,
    device: str,
    weights: str,
    sparsity: float | None,
    tokens: int,
    runs: int,
    prompts: int,
    head: str | None,
) -> None:
    """Print both speeds and their ratio for each task, JSON last."""
    result: dict[str, Any] = {"bundle": bundle or shape, "weights": weights, "sparsity": sparsity}
    if shape is not None:
        from gpu_models import calibrate, mask_bundle, random_bundle

        from wisparse.runtime.cuda.decoder import CudaDecoder

        settings = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "max_seq_len": 2 * tokens + 64}
        opened = random_bundle(shape)
        predictable(opened.checkpoint)
        if sparsity:
            decoder = CudaDecoder(opened, **settings)
            mask_bundle(opened, decoder, calibrate(decoder, [sparsity]), sparsity)
            decoder.close()
        decoder = CudaDecoder(opened, weights=weights, **settings)
        result |= speeds(decoder, tokens, runs)
    else:
        assert bundle is not None
        loading = {"device": device, "weights": weights, "sparsity": sparsity}
        context = wisparse.load(bundle, **loading).max_seq_len
        with wisparse.load(bundle, max_seq_len=min(context, 2 * tokens + 64), **loading) as model:
            result |= {"backend": model.decoder.name}
            if head is None:
                result |= speeds(model.decoder, min(tokens, (context - 64) // 2), runs)
        if prompts:
            if head:  # whether it gains or not
                speculation._LEAST_GAIN, speculation._CREDIT, speculation._MOST_CREDIT = 0.0, 1e9, 1e9
            result["greedy"] = equality(bundle, prompts, 48, head, **loading)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
