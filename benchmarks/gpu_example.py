"""The example model on the GPU: greedy tokens of the CUDA decoder against the plain PyTorch decoder's, dense and
sparse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from gpu_models import calibrate, set_sparsity
from safetensors.torch import load_file

from wisparse.formats.architectures import ModelConfig
from wisparse.runtime.cuda_decoder import CudaDecoder
from wisparse.runtime.torch_decoder import TorchDecoder

MODEL = Path(__file__).resolve().parent.parent / "examples" / "pycode-llama-6m"


def main() -> None:
    tensors = load_file(MODEL / "model.safetensors")
    config = ModelConfig.from_dict(json.loads((MODEL / "config.json").read_text("utf-8")))
    checkpoint = SimpleNamespace(tensor=lambda name, device="cpu": tensors[name].to(device))
    bundle = SimpleNamespace(config=config, checkpoint=checkpoint, masks={})
    device = torch.device("cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        fast = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
        calibrated = calibrate(fast, [0.5], tokens=200)
        for sparsity in (0.0, 0.5):
            set_sparsity(fast, calibrated, sparsity)
            slow = TorchDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
            for block, groups in zip(slow._blocks, fast.weights.blocks, strict=True):
                own = iter(block.projections)
                for group in groups.groups:
                    for i in range(len(group.widths)):
                        projection = next(own)
                        if sparsity > 0:
                            projection.channel_scale, projection.threshold = group.scales[i], group.thresholds[i]
            for seed in range(3):
                ids = torch.randint(config.vocab_size, (12,), generator=torch.Generator().manual_seed(seed))
                tokens = []
                for decoder in (fast, slow):
                    token = decoder.prefill(0, ids, 12).argmax().view(1)
                    own_tokens = [int(token)]
                    for _ in range(200):
                        token = decoder.decode(token).argmax(-1)
                        own_tokens.append(int(token))
                    tokens.append(own_tokens)
                differs = next((i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), None)
                print(
                    f"{dtype} sparsity {sparsity} prompt {seed}: first differing position of 201: {differs}", flush=True
                )


if __name__ == "__main__":
    main()
