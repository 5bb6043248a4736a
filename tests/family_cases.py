"""A tiny bundle of every family, and prompts after which rounding decides nothing: there right programs agree."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runtime_models import EXPERTS, FAMILIES, HYBRIDS, WRAPPERS, make_checkpoint, make_wrapper
from tiny_bundle import VOCAB, byte_tokenizer
from torch import Tensor

import wisparse
from wisparse.converter.api import convert
from wisparse.converter.experts import find_experts
from wisparse.formats.bundle import Bundle
from wisparse.formats.weight_types import round_weight
from wisparse.kernels.reference import scores
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.torch.block import MaskedLinear
from wisparse.runtime.torch.decoder import TorchDecoder

# Those whose blocks are Llama's but for a switch, with the switches on; and those that are models of their own.
LLAMAS = ("llama-3.1", "mistral-window", "qwen2-window", "qwen3-window", "phi3-partial")
PLAIN = (*LLAMAS, *FAMILIES, *HYBRIDS)
ROUTED = (*EXPERTS,)

LENGTH, COUNT = 24, 16
# How many times the rounding seen a score, or the best token's logit, is from where it would decide otherwise.
TIMES = 8
_SEEDS = range(1, 31)

# Every masked projection's input, in the order of decoded tokens; of experts one an expert, in their order.
Inputs = dict[str, list[Tensor]]


def make_source(name: str, folder: Path) -> Path:
    """A tiny checkpoint with a tokenizer; a model of pictures and text if ``folder`` is called so: ``wrapper``."""
    make = make_wrapper if name in WRAPPERS and folder.name == "wrapper" else make_checkpoint
    make(name, folder, vocab_size=VOCAB)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def converted(source: Path, out: Path, search: str) -> Path:
    rotation = "none" if search == "uniform" else "auto"
    # With relu² half of the inputs of down_proj are zero: at 50% its threshold would be within rounding of zero.
    sparsity = 0.7 if '"relu2"' in (source / "config.json").read_text("utf-8") else 0.5
    convert(source, out, sparsity=sparsity, search=search, rotation=rotation, num_samples=4, seq_len=24, device="cpu")
    return out


def hugging_face(folder: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    # transformers 5.19 takes torch's fused attention for Gemma 2 too, which cannot cap scores; later releases do not.
    capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None) is not None
    attention = {"attn_implementation": "eager"} if capped else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention).eval()


@torch.inference_mode()
def greedy(decoder: Decoder, prompt: Tensor, count: int, start: int | None = None) -> tuple[list[int], Tensor]:
    """Tokens, whatever the end of a text is, and the logits (count, V) that they were chosen from: a prompt read dense
    up to ``start``, then sparse tokens."""
    logits = [decoder.prefill(0, prompt, len(prompt) if start is None else start).cpu().clone()]
    while len(logits) < count:
        logits.append(decoder.decode(logits[-1].argmax().view(1))[0].cpu().clone())
    rows = torch.stack(logits)
    return rows.argmax(1).tolist(), rows


def runtime_tokens(
    folder: Path,
    prompt: list[int],
    count: int,
    start: int | None = None,
    sparsity: float | None = None,
    dtype: torch.dtype = torch.float32,
    output_layer: str = "stored",
    thresholds: float = 1.0,
) -> list[int]:
    """Greedy tokens of the plain decoder. ``output_layer``: int8 rounds it; ``thresholds``: a factor of them."""
    bundle = Bundle.open(folder) if sparsity is None else Bundle.open(folder).at(sparsity)
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=dtype, max_seq_len=len(prompt) + count)
    if output_layer == "int8":
        decoder._head = round_weight(decoder._head, "int8").dequantise(dtype)
    if thresholds != 1:
        decoder.set_masks({
            name: replace(
                mask, threshold=mask.threshold * thresholds,
                plane_thresholds=tuple(threshold * thresholds for threshold in mask.plane_thresholds),
            )
            for name, mask in bundle.masks.items()
        })  # fmt: skip
    return greedy(decoder, torch.tensor(prompt), count, start)[0]


@dataclass(frozen=True)
class ClearAnswer:
    """What transformers says to a prompt after which rounding decides nothing."""

    seed: int  # the prompt's: the first that is clear
    prompt: Tensor  # (LENGTH,) token ids
    tokens: list[int]  # COUNT greedy ones of transformers with the bundle's masks, in float32
    logits: Tensor  # (COUNT, V), which they were chosen from
    clearance: float  # how far the nearest decision is from falling otherwise, over the rounding seen there


@torch.inference_mode()
def clear_answer(folder: Path) -> ClearAnswer:
    """The first seed whose prompt is answered by transformers in float32 with no decision within rounding.

    Decisions are every masked projection's ``score >= threshold``, and the choice of the largest logit. Rounding is how
    far the same numbers are from those of the plain decoder in float64 that is given the same tokens: of a score the
    largest difference in its vector, as a channel that cancels out is as far off as a large one beside it. Each
    decision has to be `TIMES` as far from falling otherwise. So two programs that differ in rounding alone agree, and
    one whose arithmetic is not the family's finds no prompt at all.
    """
    nearest = []
    bundle = Bundle.open(folder)
    model = hugging_face(folder)
    theirs = watch_inputs(model, bundle)
    wisparse.sparsify(model, bundle)
    for seed in _SEEDS:
        prompt = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed))
        for inputs in theirs.values():
            inputs.clear()
        tokens, logits = generate(model, prompt)
        exact, scales, exact_logits = follow_exactly(bundle, prompt, tokens)
        # The least gap between a token's two largest logits over twice its rounding, as both may be off.
        first, second = exact_logits.topk(2).values.unbind(1)
        clearances = [(first - second) / (2 * (logits - exact_logits).abs().amax(1))]
        for name, found in theirs.items():
            scale = torch.stack(scales[name])
            right = torch.stack(exact[name]).abs() * scale
            rounding = (scores(torch.stack(found), scale) - right).abs().amax(1)
            clearances.append((right - bundle.masks[name].threshold).abs().amin(1) / rounding)
        clearance = min(float(one.min()) for one in clearances)
        if clearance >= TIMES:
            return ClearAnswer(seed, prompt, tokens, logits, clearance)
        nearest.append(round(clearance, 2))
    raise AssertionError(
        f"expected a prompt that stays {TIMES} times the rounding from every threshold, found {nearest} times; if all "
        "are below 1, the plain decoder does not compute what transformers does"
    )


def watch_inputs(model: torch.nn.Module, bundle: Bundle) -> Inputs:
    """What reaches the model's masked projections from now on, a token at a time; called before the masks are put on,
    it sees what they look at."""
    seen: Inputs = {name: [] for name, mask in bundle.masks.items() if mask.sparsity > 0}

    at_prompt = [True]  # which is read dense; blocks that share keys see its last token alone

    def notice(_: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        at_prompt[0] = kwargs["input_ids"].shape[1] == LENGTH

    def look(name: str, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        if not at_prompt[0]:
            seen[name].extend(args[0].flatten(0, -2).clone())

    model.get_decoder().register_forward_pre_hook(notice, with_kwargs=True)
    experts = find_experts(model, bundle.config)
    for name in seen:
        (experts.get(name) or model.get_submodule(name)).register_forward_pre_hook(partial(look, name))
    return seen


def generate(model: Any, prompt: Tensor) -> tuple[list[int], Tensor]:
    """Greedy tokens by transformers, and the logits (COUNT, V) that they were chosen from."""
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(prompt[None], max_new_tokens=COUNT, output_logits=True, return_dict_in_generate=True, **how)
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def follow_exactly(bundle: Bundle, prompt: Tensor, tokens: list[int]) -> tuple[Inputs, Inputs, Tensor]:
    """The plain decoder in float64, given the same tokens: its masked projections' inputs and scales, and its logits."""
    seen: Inputs = {name: [] for name, mask in bundle.masks.items() if mask.sparsity > 0}
    scales: Inputs = {name: [] for name in seen}
    apply = MaskedLinear.__call__

    def look(self: MaskedLinear, x: Tensor, first_sparse: int) -> Tensor:
        if self.channel_scale is not None and first_sparse < len(x):
            seen[self.name].append(x.flatten().clone())
            scales[self.name].append(self.channel_scale)
        return apply(self, x, first_sparse)

    length = LENGTH + COUNT
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float64, max_seq_len=length)
    with mock.patch.object(MaskedLinear, "__call__", look):
        logits = [decoder.prefill(0, prompt, LENGTH)]
        logits += [decoder.decode(torch.tensor([token]))[0] for token in tokens[:-1]]
    return seen, scales, torch.stack(logits)
