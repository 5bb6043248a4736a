"""Speculation against plain decoding: a copying task and fresh text by lookup, and heads' drafts.

    python benchmarks/speculation.py BUNDLE          # on any device
    PYTHONPATH=. python benchmarks/speculation.py --shape llama-3.1-8b --weights int4 --runs 1  # random, NVIDIA GPUs
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/speculation.py --shape llama-3.1-8b --tiny   # does it run

The copying task is replayed: the drafts of every step are as long, and accepted as far, as those of a file of this
repository that is answered with three edits; the model's own greedy tokens, known from the plain run, stand for the
file's. Fresh text is the documentation, replayed alike. A shape's steps that verify are timed by rows, and its drafts:
of an EAGLE-3 head and of one for multi-token prediction, both random and as wide as the model, and with 16-bit weights
of the model's own int4 weights. They are made, and replaced by others of which each is right in a share of the cases if
those before it are. Expected: copying 2.5 times (a CPU: 1.5), fresh text 0.98 and more, EAGLE-3 1.7 times in bf16 and
1.5 in int4. JSON last.
"""

from __future__ import annotations

import json
import re
import statistics
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import torch

import wisparse
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import block_fields, mtp_config
from wisparse.kernels.backend import compiling_side_by_side
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.heads import HeadWeights, llama_block
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation import generate
from wisparse.runtime.generation.generate import generate_step
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import METHODS, Drafter, Lookup, SpeculativeConfig

ROOT, CONFIG = Path(__file__).resolve().parent.parent, SpeculativeConfig()
RATES = {"eagle3": 0.7, "mtp": 0.7, "self": 0.85}  # of drafted tokens that are right behind right ones
PROMPT = 600  # of fresh text: steps at least so far into a context all have the same splits of it


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
    found = {"copying": (file, edited), "fresh": (prose[: min(PROMPT, count)], prose[PROMPT : PROMPT + count])}
    return {name: tuple([3 + id_ % (vocab_size - 3) for id_ in one] for one in pair) for name, pair in found.items()}


class Replayed(Drafter):
    """The drafts that another text would have, of an answer that is known."""

    def __init__(self, costs: tuple[float, float], prompt: Sequence[int], text: Sequence[int], answer: Sequence[int]):
        super().__init__(0, costs)
        self.lookup, self.text, self.answer, self.at = Lookup(CONFIG, costs, [*prompt, text[0]]), text, answer, 1

    def propose(self, limit: int) -> list[int]:
        draft = self.lookup.propose(limit)
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


class Drawn(Drafter):
    """As many tokens as ``METHODS`` has, which the decoder drafts; each is right at a rate if those before it are."""

    uses_decoder = True

    def __init__(self, method: str, answer: Sequence[int]):
        super().__init__(METHODS[method][1], (0.0, 0.0))
        self.rate, self.answer, self.at, self.drafts = RATES[method], answer, 1, 0

    def propose(self, limit: int) -> list[int]:
        return [-1] * min(limit, self._limit)

    def take(self, _: int) -> None:
        self.at += 1

    def draft(self, count: int) -> list[int]:
        self.drafts += 1
        place = self.drafts * 0.6180339887 % 1  # spread evenly: few drafts have the share of many
        right = sum(place < self.rate**i for i in range(1, count + 1))
        return [one if i < right else (one + 1) % 3 for i, one in enumerate(self.answer[self.at : self.at + count])]


class RandomHead:
    """As wide as the model, of 32,000 tokens if it is EAGLE-3's."""

    def __init__(self, config: ModelConfig, mtp: bool):
        self.config, self.mtp, blocks = mtp_config(config), mtp, config.num_blocks
        self.taps = (blocks,) if mtp else (min(2, blocks), blocks // 2, max(blocks - 3, 0))

    def weights(self, device: torch.device, dtype: torch.dtype) -> HeadWeights:
        one, mtp = self.config, self.mtp
        h, heads, inner = one.hidden_size, one.num_heads * one.head_dim, one.intermediate_size
        qkv = ((1 + one.architecture.attention_gate) * one.num_heads + 2 * one.num_kv_heads) * one.head_dim
        shapes = {"qkv": (qkv, (2 - mtp) * h), "o": (h, heads), "gate_up": (2 * inner, h), "down": (h, inner)}
        shapes |= {"fc": (h, (3 - mtp) * h), "output": (min(32000, one.vocab_size), h)}
        tensors = {k: torch.randn(v, device=device, dtype=dtype) * v[1] ** -0.5 for k, v in shapes.items()}
        for norm in ("model_norm", "embedding_norm", "hidden_norm", "norm"):
            tensors[norm] = torch.ones(h, device=device, dtype=dtype)
        sizes = {name: spec.shape for name, spec in block_fields(one, 0).items() if spec.norm}
        norms = {name: torch.ones(size, device=device, dtype=dtype) for name, size in sizes.items()}
        ids = None if mtp else torch.arange(len(tensors["output"]), device=device)
        block = llama_block(one, norms, {name: tensors.pop(name) for name in ("qkv", "o", "gate_up", "down")})
        return HeadWeights(one, self.taps, block, tensors, ids=ids)


def answer(decoder: Any, prompt: Sequence[int], count: int, drafts: Any = None) -> tuple[float, Scheduler, Request]:
    """Seconds of the decode steps."""
    scheduler = Scheduler(decoder, speculative=None if drafts is None else CONFIG)
    request = scheduler.add(Request(prompt, count))
    with patch.object(generate, "make_drafter", lambda *_: drafts):
        while scheduler.busy:
            generate_step(scheduler, lambda: False)
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
        times: list[tuple[float, float]] = []  # plain, lookup
        for run in range(runs + 1):  # the first one, which compiles, is short
            length = len(text) - 16 if run else min(len(text) - 16, 64)
            seconds, _, request = answer(decoder, prompt, length)
            known = request.output_token_ids + [0] * 32
            replayed = Replayed(decoder.verify_costs, prompt, text, known)
            other, scheduler, again = answer(decoder, prompt, length, replayed)
            times += [(seconds, other)] if run else []
        tokens, pairs = len(text) - 17, enumerate(zip(known, again.output_token_ids, strict=False))
        plain, lookup = map(statistics.median, zip(*times, strict=True))
        found[name] = {
            "plain_tok_per_s": round(tokens / plain, 1), "lookup_tok_per_s": round(tokens / lookup, 1),
            "ratio": round(statistics.median(a / b for a, b in times), 3), **draft_counts(scheduler),
            "drafts": scheduler.stats.drafts.drafts, "equal_tokens": next((i for i, (a, b) in pairs if a != b), tokens + 1),
        }  # fmt: skip
        print(name, json.dumps(found[name]), flush=True)
    decoder.verify_margin = margin
    return found


def draft_counts(scheduler: Scheduler) -> dict[str, float]:
    drafts = scheduler.stats.drafts
    return {"acceptance": round(drafts.acceptance_rate, 3), "mean_length": round(drafts.mean_length, 2)}


def drawn_speeds(decoder: Any, opened: Any, count: int, runs: int) -> dict[str, Any]:
    """Of a decoder of a shape: steps that verify, by rows, and what `Decoder.verify_costs` should be; each method's
    speed."""
    (prompt, _), margin = tasks(decoder.config.vocab_size, count)["fresh"], decoder.verify_margin
    count, decoder.verify_margin = min(count, 400), 0.0
    runs_of = [answer(decoder, prompt, count) for _ in range(runs + 1)]
    known = runs_of[0][2].output_token_ids + [0] * 32
    step = statistics.median(seconds for seconds, _, _ in runs_of[1:]) / (count - 1)
    length, verified = decoder.lengths[0], {}
    for rows in (2, 4, 8):
        seconds = []
        for _ in range(25 if decoder.device.type == "cuda" else 2):
            began = time.perf_counter()
            decoder.verify([[3] * rows], [SamplingParams()])[0].tolist()
            seconds.append(time.perf_counter() - began)
            decoder.truncate(0, length)
        verified[rows] = statistics.median(seconds[-20:])
    each = (verified[8] - verified[2]) / 6
    found: dict[str, Any] = {
        "step_ms": round(1e3 * step, 3), "verified_ms": {rows: round(1e3 * one, 3) for rows, one in verified.items()},
        "verify_costs": [round((verified[2] - each) / step - 1, 3), round(each / step, 4)],
    }  # fmt: skip
    print("verified", json.dumps(found), flush=True)
    for method in RATES if decoder.weights.dequantized is None else ("eagle3", "mtp"):
        decoder._steps.clear()  # they give what this method's head reads
        decoder.truncate(0, 0)
        if method == "self":
            decoder.head = None
            decoder.draft_by_steps(opened, "int4")
        else:
            decoder.attach(RandomHead(decoder.config, method == "mtp"))
        made, drafting, times = decoder.draft, list[float](), list[float]()

        def draft(tokens: Any, counts: dict[int, int], settings: Any) -> dict[int, list[int]]:
            began = time.perf_counter()
            made(tokens, counts, settings)  # noqa: B023
            drafting.append(time.perf_counter() - began)  # noqa: B023
            return {0: drawn.draft(counts[0])}  # noqa: B023

        decoder.draft = draft
        for run in range(runs + 1):
            drawn = Drawn(method, known)
            taken, scheduler, again = answer(decoder, prompt, count if run else min(count, 64), drawn)
            if run:
                times.append(taken)
        del decoder.draft
        speed = (count - 1) / statistics.median(times)
        found[method] = {
            "plain_tok_per_s": round(1 / step, 1), "tok_per_s": round(speed, 1), "ratio": round(speed * step, 3),
            **draft_counts(scheduler), "draft_cost": round(decoder.draft_cost, 3),
            "draft_ms": round(1e3 * statistics.median(drafting), 3), "equal": again.output_token_ids == known[:count],
        }  # fmt: skip
        print(method, json.dumps(found[method]), flush=True)
    decoder.verify_margin = margin
    return found


@click.command(context_settings={"show_default": True})
@click.argument("bundle", required=False)
@click.option("--shape", help="Random weights of a shape that gpu_models.py lists, instead of a bundle.")
@click.option("--device", default="auto")
@click.option("--weights", default=["native"], multiple=True, help="Several with a shape.")
@click.option("--tiny", is_flag=True, help="A shape of the same family that an interpreter gets through.")
@click.option("--sparsity", type=float)
@click.option("--tokens", default=2000, help="Of the file that is copied.")
@click.option("--runs", default=3)
def main(
    bundle: str | None, shape: str | None, device: str, weights: Sequence[str], tiny: bool, sparsity: float | None,
    tokens: int, runs: int,
) -> None:  # fmt: skip
    """Print both speeds and their ratio for each task, JSON last."""
    result: dict[str, Any] = {"bundle": bundle or shape, "weights": weights, "sparsity": sparsity}
    if bundle is not None:
        loading: dict[str, Any] = {"device": device, "weights": weights[0], "sparsity": sparsity}
        context = wisparse.load(bundle, **loading).max_seq_len
        with wisparse.load(bundle, max_seq_len=min(context, 2 * tokens + 64), **loading) as model:
            result |= {"backend": model.decoder.name}
            result |= speeds(model.decoder, min(tokens, (context - 64) // 2), runs)
        print(json.dumps(result))
        return
    import gpu_models

    from wisparse.runtime.cuda.decoder import CudaDecoder

    on_gpu = torch.cuda.is_available()
    if shape is None or not (on_gpu or tiny):
        raise click.UsageError("expected a bundle, or --shape on an NVIDIA GPU or with --tiny and TRITON_INTERPRET=1")
    of = gpu_models.tiny(gpu_models.SHAPES[shape]) | {"num_hidden_layers": 1} if tiny else shape
    opened = gpu_models.random_bundle(of)
    opened.recipe = SimpleNamespace(graded=None)
    predictable(opened.checkpoint)
    settings: dict[str, Any] = {
        "device": torch.device("cuda" if on_gpu else "cpu"), "dtype": torch.bfloat16 if on_gpu else torch.float32,
        "max_drafted": METHODS["eagle3"][1],
        "max_seq_len": min(2 * tokens + PROMPT, opened.config.max_position_embeddings),
    }  # fmt: skip
    if sparsity:
        decoder = CudaDecoder(opened, **settings)
        gpu_models.mask_bundle(opened, decoder, gpu_models.calibrate(decoder, [sparsity]), sparsity)
        decoder.close()
    for kind in weights:
        began, decoder = time.perf_counter(), CudaDecoder(opened, weights=kind, **settings)
        decoder.speculates = True
        if on_gpu:
            last = decoder.max_seq_len
            with torch.inference_mode(), compiling_side_by_side():
                for step in (decoder.step_for(1, last), *decoder._all_verifying(last, last)):
                    step.prepare(compile_only=True)
        ready = time.perf_counter()
        result[kind] = speeds(decoder, tokens, runs) | drawn_speeds(decoder, opened, tokens, runs)
        result[kind]["seconds"] = [round(ready - began), round(time.perf_counter() - ready)]
        decoder.close()
        print(kind, json.dumps(result[kind]), flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
