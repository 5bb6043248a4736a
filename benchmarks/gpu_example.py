"""Real models on the GPU: tokens of the CUDA decoder against the plain PyTorch decoder's, dense and at 50%.

    PYTHONPATH=. python benchmarks/gpu_example.py examples/pycode-llama-6m OTHER_MODEL

Per model, dtype and sparsity, for eight random prompts (three in 16 bits) and 201 greedy tokens: the first position at
which the two differ, and there the plain decoder's margin between its two best logits and how far the two decoders'
logits are apart; the first channel that one keeps and the other drops, with its score, the threshold and how far apart
they are; whether two runs give the same bits; whether tokens drawn in the graph are those that ``sampling.sample``
draws from the decoder's own logits (three prompts). Prints one line of JSON last.

float32 weights are compared with the plain decoder in float64, as the CUDA decoder adds up in float64 too; where the
plain decoder's own float32 leaves that is told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from gpu_models import calibrate, give_masks, need_gpu, set_sparsity
from safetensors.torch import load_file

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.reference import keep_mask, scores
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.step import DecodeStep
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.sampling import SamplingSettings, sample
from wisparse.runtime.torch import block as torch_linear
from wisparse.runtime.torch.decoder import TorchDecoder

TOKENS = 200
PROMPTS, FEW_PROMPTS = 8, 3
SETTINGS = (
    SamplingSettings(0.8, seed=1),
    SamplingSettings(0.7, 0, 0.9, 0.0, 2),
    SamplingSettings(1.0, 40, 0.95, 0.02, 3),
)


def greedy(decoder: Decoder, ids: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Tokens after a prompt, and the last logits."""
    logits = decoder.prefill(0, ids, len(ids))[None]
    tokens = []
    for _ in range(TOKENS):
        tokens.append(int(logits.argmax()))
        logits = decoder.decode(torch.tensor(tokens[-1:]))
    return [*tokens, int(logits.argmax())], logits.clone()


def first_difference(found: list[int], expected: list[int]) -> int | None:
    """The first position at which two answers of the same length differ."""
    return next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)


def margin(slow: Decoder, fast: Decoder, ids: torch.Tensor, tokens: list[int]) -> tuple[float, float]:
    """After these tokens: the plain decoder's best logit less its second, and the largest difference of the two
    decoders' logits."""
    for decoder in (slow, fast):
        logits = decoder.prefill(0, ids, len(ids))
        for token in tokens:
            logits = decoder.decode(torch.tensor([token]))[0]
        if decoder is slow:
            expected = logits.clone()
    first, second = expected.topk(2).values.tolist()
    return first - second, float((logits - expected).abs().max())


def kept_by_kernels(fast: CudaDecoder, token: int) -> list[torch.Tensor]:
    """Decode a token launch by launch; the scores (K,) of every projection, from what its launch reads."""
    step = fast.step_for(1, 0, fast.lengths[0] + 1)
    found: list[torch.Tensor] = []

    def record(index: int, role: str) -> None:
        if role in ("qkv", "o", "gate_up", "down"):
            block = step.weights.blocks[index]
            group = getattr(block, role)
            x = launch_input(step, index, role)
            found.extend(scores(x, group.scales[i])[0] for i in range(len(group.widths)))
        DecodeStep.launch_part(step, index, role)

    step.launch_part = record  # type: ignore[method-assign]
    with torch.inference_mode():
        step.tokens.copy_(torch.tensor([token]))
        step.launch()
    del step.launch_part
    fast._count([token])
    return found


def launch_input(step: DecodeStep, index: int, role: str) -> torch.Tensor:
    """(rows, K): what a launch is about to read, by the definitions."""
    block = step.weights.blocks[index]
    if role == "down":
        return step._activated
    if role == "o":
        largest, total = step._softmax
        factor = torch.exp2(largest - largest.amax(2, keepdim=True))
        combined = (step._attended[index] * factor[..., None]).sum(2) / (total * factor).sum(2)[..., None]
        return combined.flatten(1).to(step._activated.dtype)
    norm = block.attention_input if role == "qkv" else block.mlp_input
    return step.hidden if norm is None else norm(step.hidden)


@contextmanager
def kept_by_definition() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The scores (K,) and the threshold of every projection that the plain decoder masks meanwhile."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(x: torch.Tensor, scale: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        found.append((scores(x, scale)[-1], threshold))
        return keep_mask(x, scale, threshold)

    torch_linear.keep_mask = record  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        torch_linear.keep_mask = keep_mask  # type: ignore[attr-defined]


def first_flip(slow: TorchDecoder, fast: CudaDecoder, ids: torch.Tensor, tokens: list[int]) -> dict | None:
    """Decoding these tokens after a dense prompt: the first channel that one decoder keeps and the other drops."""
    names = [projection.name for projection in fast.config.projections()]
    for decoder in (slow, fast):
        decoder.prefill(0, ids, len(ids))
    for position, token in enumerate(tokens):
        with kept_by_definition() as expected:
            slow.decode(torch.tensor([token]))
        for name, (wanted, threshold), found in zip(names, expected, kept_by_kernels(fast, token), strict=True):
            differing = ((wanted < threshold) != (found < threshold)).nonzero().flatten().tolist()
            if differing:
                channel, limit = differing[0], float(threshold)
                pair = float(wanted[channel]), float(found[channel])
                distance = max(abs(one - limit) for one in pair) / limit
                return {
                    "position": position, "projection": name, "channel": channel, "channels": len(differing),
                    "score": pair, "threshold": limit, "relative_distance": distance,
                }  # fmt: skip
    return None


def stepped(decoder: Decoder, ids: torch.Tensor, settings: SamplingSettings, *, inside: bool) -> list[int]:
    """Tokens by ``step``, or by ``decode`` and the definition of sampling."""
    token = decoder.prefill(0, ids, len(ids)).argmax().view(1).cpu()
    tokens = []
    for _ in range(TOKENS):
        if inside:
            token = decoder.step(token, [settings])
        else:
            token = sample(decoder.decode(token), [settings], decoder.lengths[:1])
        tokens.append(int(token))
    return tokens


def check(folder: Path) -> list[dict]:
    """One row for each dtype and sparsity."""
    tensors = load_file(folder / "model.safetensors")
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
    checkpoint = SimpleNamespace(tensor=lambda name, device="cpu": tensors[name].to(device))
    bundle = SimpleNamespace(config=config, checkpoint=checkpoint, masks={})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    all_prompts = [
        torch.randint(config.vocab_size, (12,), generator=torch.Generator().manual_seed(seed))
        for seed in range(PROMPTS)
    ]
    rows = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        fast = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
        calibrated = calibrate(fast, [0.5], tokens=200)
        exact = dtype == torch.float32
        prompts = all_prompts if exact else all_prompts[:FEW_PROMPTS]
        references = {
            kind: TorchDecoder(bundle, device=device, dtype=kind, max_seq_len=256)
            for kind in ((torch.float64, torch.float32) if exact else (dtype,))
        }
        for sparsity in (0.0, 0.5):
            set_sparsity(fast, calibrated, sparsity)
            if sparsity > 0:
                for reference in references.values():
                    give_masks(reference, fast)
            slow, *others = references.values()
            first, margins, flips, repeats, other_first = [], [], [], True, []
            for ids in prompts:
                tokens, logits = greedy(fast, ids)
                again, logits_again = greedy(fast, ids)
                repeats &= tokens == again and torch.equal(logits, logits_again)
                repeats &= stepped(fast, ids, SamplingSettings(), inside=True) == tokens[1:]
                expected, _ = greedy(slow, ids)
                at = first_difference(tokens, expected)
                first.append(at)
                if at is not None:
                    margins.append(margin(slow, fast, ids, expected[:at]))
                    flips.append(first_flip(slow, fast, ids, expected[:at]) if sparsity > 0 else None)
                for other in others:
                    found, _ = greedy(other, ids)
                    other_first.append(first_difference(found, expected))
            drawn = all(
                stepped(fast, ids, settings, inside=True) == stepped(fast, ids, settings, inside=False)
                for ids in prompts[:FEW_PROMPTS]
                for settings in SETTINGS
            )
            rows.append(
                {
                    "model": folder.name, "dtype": str(dtype).removeprefix("torch."), "sparsity": sparsity,
                    "reference": str(slow.dtype).removeprefix("torch."), "first_difference": first, "of": TOKENS + 1,
                    "margin_and_distance": margins, "first_flips": flips,
                    **({"first_difference_of_plain_float32": other_first} if others else {}),
                    "repeats_bit_for_bit": bool(repeats), "sampled_as_defined": drawn,
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        fast.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        need_gpu(parser)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, interpreted"
    for folder in arguments.models:
        line = json.dumps({"gpu": name, "torch": torch.__version__, "rows": check(folder)})
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], f"gpu-h200-example-{folder.name}.json").write_text(line + "\n")
        print(line)


if __name__ == "__main__":
    main()
