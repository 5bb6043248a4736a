"""Real models on the GPU: tokens of the CUDA decoder against the plain PyTorch decoder's, dense and at 50%.

    PYTHONPATH=. python benchmarks/gpu_example.py examples/pycode-llama-6m OTHER_MODEL

Per model, dtype and sparsity, for three random prompts and 201 greedy tokens: the first position at which the two
differ, and there the plain decoder's margin between its two best logits and how far the two decoders' logits are apart;
whether two runs give the same bits; whether tokens drawn in the graph are those that ``sampling.sample`` draws
from the decoder's own logits. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from gpu_models import calibrate, give_masks, set_sparsity
from safetensors.torch import load_file

from wisparse.formats.architectures import ModelConfig
from wisparse.runtime.cuda_decoder import CudaDecoder
from wisparse.runtime.decoder import Decoder, SamplingSettings
from wisparse.runtime.sampling import sample
from wisparse.runtime.torch_decoder import TorchDecoder

TOKENS = 200
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
    device = torch.device("cuda")
    prompts = [
        torch.randint(config.vocab_size, (12,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    ]
    rows = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        fast = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
        calibrated = calibrate(fast, [0.5], tokens=200)
        for sparsity in (0.0, 0.5):
            set_sparsity(fast, calibrated, sparsity)
            slow = TorchDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
            if sparsity > 0:
                give_masks(slow, fast)
            first, margins, repeats = [], [], True
            for ids in prompts:
                tokens, logits = greedy(fast, ids)
                again, logits_again = greedy(fast, ids)
                repeats &= tokens == again and torch.equal(logits, logits_again)
                repeats &= stepped(fast, ids, SamplingSettings(), inside=True) == tokens[1:]
                expected, _ = greedy(slow, ids)
                at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
                first.append(at)
                if at is not None:
                    margins.append(margin(slow, fast, ids, expected[:at]))
            drawn = all(
                stepped(fast, ids, settings, inside=True) == stepped(fast, ids, settings, inside=False)
                for ids in prompts
                for settings in SETTINGS
            )
            rows.append(
                {
                    "model": folder.name, "dtype": str(dtype).removeprefix("torch."), "sparsity": sparsity,
                    "first_difference": first, "of": TOKENS + 1, "margin_and_distance": margins,
                    "repeats_bit_for_bit": bool(repeats), "sampled_as_defined": drawn,
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        fast.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    rows = [row for folder in parser.parse_args().models for row in check(folder)]
    line = json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu-h200-example.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
