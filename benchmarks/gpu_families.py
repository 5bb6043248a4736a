"""Every family on an NVIDIA GPU: the kernels' tokens and logits against the plain decoder's, and how fast they are.

    PYTHONPATH=. python benchmarks/gpu_families.py                     # all families, published shapes
    PYTHONPATH=. python benchmarks/gpu_families.py --only gemma3 olmo2 --time-blocks 8
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_families.py --tiny   # without a GPU: does it run

Random weights, masks calibrated to 50% on the device. ``float32``: a few blocks, the CUDA decoder, whose activations
are float64, against the plain one in float64: a prompt, of which half is masked, and greedy tokens; both must give the
same tokens. ``bf16``: the largest difference of a logit from the same, as a share of the largest logit, beside the
plain decoder's own in bf16. Then tokens a second of all blocks, dense and at 50%, and of Llama's shape of the same size
as the yardstick: bytes that a token reads over time. Prints a line a family, then one line of JSON.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import time

import torch
import triton
from gpu_models import calibrate, mask_bundle, random_bundle

from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.sampling import SamplingSettings
from wisparse.runtime.timing import wait
from wisparse.runtime.torch.decoder import TorchDecoder

GREEDY = SamplingSettings()
SPARSITY = 0.5


def shape(model_type: str, hidden: int, mlp: int, blocks: int, heads: int, kv_heads: int, vocabulary: int, **more):
    return dict(
        model_type=model_type, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=blocks,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=8192,
        **more,
    )  # fmt: skip


_YARN = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384)
# As published, of one to four billion weights.
SHAPES = {
    "llama": shape("llama", 2048, 8192, 16, 32, 8, 128256, rope_theta=5e5, tie_word_embeddings=True),
    "gemma2": shape("gemma2", 2304, 9216, 26, 8, 4, 256000),
    "gemma3": shape("gemma3_text", 2560, 10240, 34, 8, 4, 262208, sliding_window=1024),
    "gemma4": shape(  # of the 31B's 60 blocks a period
        "gemma4_text", 5376, 21504, 6, 32, 16, 262144, num_global_key_value_heads=4, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, sliding_window=1024, final_logit_softcapping=30.0,
    ),
    "olmo2": shape("olmo2", 2048, 8192, 16, 16, 16, 100352, rope_theta=5e5),
    "olmo3": shape("olmo3", 4096, 11008, 8, 32, 32, 100278),
    "smollm3": shape("smollm3", 2048, 11008, 36, 16, 4, 128256),
    "granite": shape(
        "granite", 2048, 8192, 40, 32, 8, 49159, embedding_multiplier=12.0, attention_multiplier=0.015625,
        residual_multiplier=0.22, logits_scaling=8.0,
    ),
    "glm4": shape("glm4", 4096, 13696, 8, 32, 2, 151552),
    "seed-oss": shape("seed_oss", 5120, 27648, 4, 80, 8, 155136, rope_theta=1e7),
    "exaone4": shape("exaone4", 2048, 4096, 30, 32, 8, 102400, head_dim=64, sliding_window=None),
    "hunyuan": shape("hunyuan_v1_dense", 2048, 6144, 32, 16, 4, 120818, head_dim=128),
    "ernie": shape("ernie4_5", 1024, 3072, 18, 16, 2, 103424),
    "qwen3.5": shape(
        "qwen3_5_text", 2560, 9216, 32, 16, 4, 248320, head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
        linear_num_key_heads=16, linear_num_value_heads=32,
    ),
    "ministral3": shape(
        "ministral3", 3072, 9216, 26, 32, 8, 131072, rope_parameters={**_YARN, "llama_4_scaling_beta": 0.1}
    ),
}  # fmt: skip


def tiny(given: dict) -> dict:
    """A model of the same family that an interpreter gets through."""
    given = {key: value for key, value in given.items() if key != "head_dim"}
    heads, kv_heads = 4, 4 if given["num_attention_heads"] == given["num_key_value_heads"] else 2
    if given["model_type"] == "qwen3_5_text":  # a block of either kind
        given |= dict(
            full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12,
            linear_value_head_dim=20,
        )  # fmt: skip
    if given["model_type"] == "gemma4_text":
        given |= dict(global_head_dim=24, num_global_key_value_heads=1, sliding_window=7)
    return given | dict(
        hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, vocab_size=70, max_position_embeddings=256,
    )  # fmt: skip


def follow(decoder: Decoder, prompt: torch.Tensor, forced: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, or ``forced`` ones where there are any, and the logits (count + 1, V) that they were read from."""
    rows = [decoder.prefill(0, prompt, len(prompt) // 2).clone()]
    tokens = [int(rows[-1].argmax())]
    for position in range(count):
        token = forced[position] if forced else tokens[-1]
        rows.append(decoder.decode(torch.tensor([token]))[0].clone())
        tokens.append(int(rows[-1].argmax()))
    return tokens, torch.stack(rows).double()


def masked(given: dict, device: torch.device, blocks: int | None, dtype: torch.dtype, length: int):
    """A bundle at 50%."""
    bundle = random_bundle(given, num_blocks=blocks, dtype=dtype)
    decoder = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=length)
    mask_bundle(bundle, decoder, calibrate(decoder, [SPARSITY], length // 2), SPARSITY)
    decoder.close()
    return bundle


def check(given: dict, device: torch.device, blocks: int | None, length: int, count: int) -> dict:
    """The kernels against the plain decoder in float64."""
    found: dict = {}
    prompt = torch.randint(given["vocab_size"], (length - count - 2,), generator=torch.Generator().manual_seed(3))
    for dtype in (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16):
        bundle = masked(given, device, blocks, dtype, length)
        exact = TorchDecoder(bundle, device=device, dtype=torch.float64, max_seq_len=length)
        tokens, expected = follow(exact, prompt, [], count)
        exact.close()
        name = str(dtype).removeprefix("torch.")
        for kind in (CudaDecoder,) if dtype == torch.float32 else (CudaDecoder, TorchDecoder):
            decoder = kind(bundle, device=device, dtype=dtype, max_seq_len=length)
            own, logits = follow(decoder, prompt, tokens, count)
            decoder.close()
            error = float((logits - expected).abs().max() / expected.abs().max())
            found[f"{name} {kind.name}"] = {"error": error, "other_tokens": sum(map(int.__ne__, own, tokens))}
    return found


def speed(given: dict, device: torch.device, blocks: int | None, dtype: torch.dtype, tokens: int) -> dict:
    """Tokens a second, dense and sparse, and GB/s of the weights that a token reads."""
    found = {}
    bundle = masked(given, device, blocks, dtype, 256 if device.type == "cuda" else 32)
    for name, masks in (("dense", {}), ("sparse", bundle.masks)):
        bundle.masks = masks
        decoder = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=8 + 2 * tokens)
        token = decoder.prefill(0, torch.arange(5), 5).argmax().view(1).cpu()
        took = []
        for run in range(3):
            decoder.prefill(0, torch.arange(5), 5)
            token = decoder.step(token, [GREEDY]).cpu()
            wait(device)
            began = time.perf_counter()
            for _ in range(tokens):
                token = decoder.step(token, [GREEDY]).cpu()
            wait(device)
            if run or tokens == 1:
                took.append((time.perf_counter() - began) / tokens)
        inside = sum(projection.num_parameters for projection in bundle.config.projections())
        read = (inside * (1 - SPARSITY if masks else 1) + decoder.weights.head.numel()) * dtype.itemsize
        seconds = statistics.median(took)
        found[name] = {"tok_per_s": 1 / seconds, "gbps": read / seconds * 1e-9}
        decoder.close()
        del decoder
        gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--check-blocks", type=int, default=6, help="blocks that are compared")
    parser.add_argument("--time-blocks", type=int, help="blocks that are timed; all by default")
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if not (on_gpu or arguments.tiny):
        parser.error("without a GPU: only --tiny, with TRITON_INTERPRET=1")
    conditions = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(), "torch": torch.__version__,
        "triton": triton.__version__, "tiny": arguments.tiny,
    }  # fmt: skip
    print(json.dumps(conditions))
    results = {}
    with torch.inference_mode():
        for name in arguments.only:
            given = tiny(SHAPES[name]) if arguments.tiny else SHAPES[name]
            checked = check(
                given,
                device,
                min(arguments.check_blocks, given["num_hidden_layers"]),
                *((96, 24) if on_gpu else (24, 2)),
            )
            timed = speed(
                given, device, arguments.time_blocks, torch.bfloat16 if on_gpu else torch.float16,
                arguments.tokens if on_gpu else 1,
            )  # fmt: skip
            results[name] = {"checked": checked, "speed": timed}
            print(name, json.dumps(results[name]), flush=True)
    wrong = [
        name for name, found in results.items()
        if found["checked"]["float32 triton"]["other_tokens"] or not math.isfinite(
            found["checked"]["float32 triton"]["error"]
        )
    ]  # fmt: skip
    print(json.dumps({**conditions, "results": results, "wrong": wrong}))
    if wrong:
        raise SystemExit(f"other tokens than the plain decoder's in float64: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
