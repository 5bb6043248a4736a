"""The plug-in inside vLLM beside dense vLLM, each in a process of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from gpu_codes import plugin_path
from gpu_models import Several, need_gpu, out_option, save
from shapes import LLAMA_8B

from wisparse.formats.bundle import Bundle, ProjectionMask, sidecar_bytes
from wisparse.formats.manifest import CalibrationRecord, Manifest, ProjectionRecipe, Recipe, SparsityLevel
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.packings import Packed
from wisparse.formats.tensor_file import build_header
from wisparse.formats.tensors import expected_tensors

ROOT = Path(__file__).resolve().parent.parent
LLAMA = LLAMA_8B | {"bos_token_id": 128000, "eos_token_id": 128001}
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
PROMPT, TOKENS = 5, 200


@click.command(context_settings={"show_default": True})
@click.option(
    "--models",
    type=Several(("bundle", "plain", "dense")),
    default="bundle,dense",
    help="A bundle at 50%; its weights by the plug-in without masks (int8 and int4); by vLLM's own kernels.",
)
@click.option("--weights", type=Several(("bf16", "int8", "int4")), default="bf16")
@click.option("--layouts", type=click.Choice(["both", "ours"]), default="both", help="Of quantised weights.")
@click.option("--output-layer", type=click.Choice(["stored", "int8"]), default="stored", help="Of bundle and plain.")
@click.option("--blocks", default=LLAMA["num_hidden_layers"], help="Of the model, for a shorter start.")
@click.option("--requests", type=Several(int), default="1,2,4,8,32,128", help="At once.")
@click.option("--tensor-parallel", default=1, help="GPUs of one engine.")
@click.option("--prompts/--no-prompts", default=True, help="Time prompts too.")
@click.option("--seconds", default=300, help="For each model.")
@click.option("--rehearse", is_flag=True, help="A small model on a CPU: the same steps; its figures mean nothing.")
@click.option("--part", hidden=True, type=Path, help="The folder of the model that this process measures.")
@out_option
def vllm(
    models: list[str], weights: list[str], layouts: str, output_layer: str, blocks: int, requests: list[int],
    tensor_parallel: int, prompts: bool, seconds: int, rehearse: bool, part: Path | None, out: Path | None,
) -> None:  # fmt: skip
    """vLLM with the plug-in beside dense vLLM: start, memory, tokens a second by requests at once, prompts.

    Built: Llama-3.1-8B's config.json, with the weights of --weights, and a bundle of it with thresholds; vLLM fills in random weights
    (load_format="dummy"), gpu_codes.py random codes. The thresholds are those that drop half of each projection's channels on tokens that the model
    itself decoded dense, all channel scales are 1, and the share that is dropped is counted on other such tokens. Nothing
    needs to be installed: vLLM finds the plug-in by a folder with its entry point. Caches are empty at the start.

    Timed: the engine's start; greedy answers of 200 tokens after 5, best of two or three batches; prompts of 4,096 and of
    128 tokens.

    Printed: a line of JSON for each figure (gpu-vllm.jsonl), then bundle and plain over dense.
    """
    if importlib.util.find_spec("vllm") is None:
        raise click.UsageError("expected vLLM beside an NVIDIA GPU, found none: pip install 'wisparse[vllm]'")
    if not rehearse:
        need_gpu()
    if part is not None:
        measure(part, layouts, output_layer, requests, tensor_parallel, prompts, rehearse)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-vllm-") as temporary:
        work, config = Path(temporary), LLAMA | {"num_hidden_layers": blocks} | (SMALL if rehearse else {})
        for kind in weights:
            write_bundle(config, work / f"{kind}-bundle", kind)
            stored = json.loads((work / f"{kind}-bundle" / "config.json").read_text())
            del stored["wisparse"]
            for model in ("plain", "dense"):
                (work / f"{kind}-{model}").mkdir()
                (work / f"{kind}-{model}" / "config.json").write_text(json.dumps(stored))
        for model in (f"{kind}-{model}" for kind in weights for model in models if (kind, model) != ("bf16", "plain")):
            command = ["timeout", "-k", "10", str(seconds), sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
            command += [*sys.argv[1:], "--part", str(work / model)]
            with open(work / f"{model}.log", "w+", encoding="utf-8") as log:
                code = subprocess.run(command, env=environment(work, model), stdout=log, stderr=log).returncode
                log.seek(0)
                text = log.read()
            save(out, f"gpu-vllm-{model}.log", text)
            found[model] = [json.loads(line) for line in text.splitlines() if line.startswith('{"part"')]
            if code:
                print(text[-3000:])
                found[model].append({"part": model, "failed": code})
            print("\n".join(map(json.dumps, found[model])), flush=True)
    save(out, "gpu-vllm.jsonl", "".join(json.dumps(one) + "\n" for model in found.values() for one in model))
    for kind in weights:
        dense = figures(found.get(f"{kind}-dense", []))
        for model in ("plain", "bundle"):
            own = figures(found.get(f"{kind}-{model}", []))
            ratios = {
                key: [dense[key], value, round(value / dense[key], 3)] for key, value in own.items() if dense.get(key)
            }
            if ratios:
                print(json.dumps({f"{kind}: dense, {model}, ratio": ratios}), flush=True)
    if any("failed" in one for model in found.values() for one in model):
        sys.exit(1)


def figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{line['requests']} requests" if key == "tok_per_s" else key: line[key]
        for line in lines
        for key in ("start_s", "gib", "tok_per_s", "prompt_tok_per_s", "short_prompt_tok_per_s")
        if key in line
    }


def environment(work: Path, model: str) -> dict[str, str]:
    """The plug-ins' entry points, and empty caches."""
    caches = work / f"cache-{model}"
    plugins = plugin_path(caches / "plugins", {"wisparse": "wisparse.runtime.vllm.plugin:register"})
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(plugins), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_CACHE_ROOT": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "WISPARSE_CACHE": str(caches / "tiles"), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends functions
        # Of several GPUs: the plug-in's imports initialize CUDA in the process that starts the workers.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip


def measure(
    model: Path, layouts: str, output_layer: str, requests: list[int], tensor_parallel: int, with_prompts: bool,
    rehearse: bool,
) -> None:  # fmt: skip
    """Print the figures of one engine."""
    from vllm import LLM, SamplingParams

    def say(**found: Any) -> None:
        print(json.dumps({"part": model.name, "tensor_parallel": tensor_parallel, **found}), flush=True)

    settings: dict[str, Any] = {
        "model": str(model), "dtype": "bfloat16", "max_model_len": 4352, "max_num_seqs": 128, "seed": 0,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": 24 << 30, "gpu_memory_utilization": 0.45,
        "tensor_parallel_size": tensor_parallel, "load_format": "dummy", "skip_tokenizer_init": True,
    }  # fmt: skip
    kind, _, way = model.name.partition("-")
    if way == "plain":
        settings["quantization"] = "wisparse"
    own = {"output_layer": output_layer} | ({} if kind == "bf16" or rehearse else {"layouts": layouts})
    if way != "dense":
        settings["additional_config"] = {"wisparse": own}
    if rehearse:
        settings |= {"dtype": "float32", "enforce_eager": True}
        del settings["kv_cache_memory_bytes"], settings["gpu_memory_utilization"]
    began = time.perf_counter()
    llm = LLM(**settings)
    say(start_s=round(time.perf_counter() - began, 1), gib=llm.apply_model(reserved_gib)[0])
    method = llm.llm_engine.vllm_config.model_config.quantization
    if (method == "wisparse") != (way != "dense"):
        raise RuntimeError(f"expected the plug-in for bundle and plain, found {method!r} for {model.name}")
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def random_prompts(count: int, length: int) -> list[Any]:
        ids = torch.randint(3, vocab_size, (count, length), generator=generator).tolist()
        return [{"prompt_token_ids": row} for row in ids]

    def sampling(tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def rates(count: int, length: int, tokens: int, rounds: int) -> list[float]:
        """Tokens a second: of the answers, or of the prompts where an answer is one token."""
        found = []
        for _ in range(rounds):
            batch = random_prompts(count, length)
            start = time.perf_counter()
            llm.generate(batch, sampling(tokens), use_tqdm=False)
            found.append(count * (tokens if tokens > 1 else length) / (time.perf_counter() - start))
        return found

    tokens = 20 if rehearse else TOKENS
    if way == "bundle":
        say(**drop_half(llm, random_prompts(16, PROMPT), sampling(tokens), sampling(1)))
    else:
        llm.generate(random_prompts(16, PROMPT), sampling(tokens), use_tqdm=False)
    for count in requests:
        each = rates(count, PROMPT, tokens, 3 if count in (4, 8) else 2)
        say(requests=count, tok_per_s=round(max(each), 1), each=[round(rate, 1) for rate in each])
    if with_prompts:
        length = 64 if rehearse else 4096
        for name, count, size in (("prompt_tok_per_s", 8, length), ("short_prompt_tok_per_s", 16, length // 32)):
            each = rates(count, size, 1, 3)
            say(**{name: round(max(each)), "each": [round(rate) for rate in each]})
        say(gib=llm.apply_model(reserved_gib)[0])


def drop_half(llm: Any, prompts: list[Any], sampling: Any, one: Any) -> dict[str, Any]:
    """Give a bundle's layers thresholds for half of their channels, on tokens that the model decodes without them."""
    done = [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, sampling, use_tqdm=False)]
    half, found = len(done) // 2, {}
    # More tokens at once than any graph holds: only then do products run from Python.
    for answers, choose in ((done[:half], True), (done[half:], False)):
        tokens = [token for answer in answers for token in answer]
        layers = llm.apply_model(partial(watch_products, choose=choose))[0]
        llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        shares = llm.apply_model(watched)[0]
        if len(shares) != layers:
            raise RuntimeError(f"expected {layers} products of one prompt, found {len(shares)}")
        found = {"layers": layers, "tokens": len(tokens), "dropped_mean": round(statistics.mean(shares), 4)}
        found |= {"dropped_from": round(min(shares), 4), "dropped_to": round(max(shares), 4)}
    return found


# --- functions that run in vLLM's processes


def reserved_gib(model: Any) -> float:
    """What the process of a model's first part has reserved at most."""
    return round(torch.cuda.max_memory_reserved() / 2**30, 2) if torch.cuda.is_available() else 0.0


def watch_products(model: Any, choose: bool) -> int:
    """From here on products of prompts choose thresholds that drop half of their rows' channels, or count what is
    dropped; returns how many layers there are."""
    from wisparse.runtime.vllm import product

    placed: dict[int, Any] = {}
    for module in model.modules():
        if not hasattr(module, "wisparse_thresholds") or module.wisparse_placed.dense:
            continue

        def record(x: Any, bias: Any = None, of: Any = module) -> Any:
            thresholds, sizes = of.wisparse_thresholds, x[::16].abs().float().flatten()
            if choose:
                thresholds.fill_(float(sizes.kthvalue(sizes.numel() // 2).values))
            dropped.append(float((sizes < thresholds[0]).float().mean()))
            if of.wisparse_placed.many is not None:
                return of.wisparse_placed.many(x, bias)
            if not of.wisparse_codes:
                return torch.nn.functional.linear(x, of.weight, bias)
            return product.of_codes(x, of.wisparse_layer, of.wisparse_masked[: len(x)], dense=True)

        placed[module.weight.data_ptr()] = product.Placed(dense=False, many=record)
    dropped: list[float] = []
    product.KEPT = (product.PLACED, dropped)
    product.PLACED = placed
    return len(placed)


def watched(model: Any) -> list[float]:
    """The share of the channels that each layer's threshold drops; products are as before."""
    from wisparse.runtime.vllm import product

    product.PLACED, dropped = product.KEPT
    found: list[float] = dropped
    return found


def write_bundle(config: dict[str, Any], folder: Path, kind: str) -> None:
    """A bundle that passes every check but has holes for weights, and thresholds that drop nothing. int8 has a scale for
    each row, int4 for each group of 128 channels."""
    model, threshold = ModelConfig.from_dict(config), 2.0**-100
    masks = {p.name: ProjectionMask(torch.ones(p.in_features), threshold, 0.5) for p in model.projections()}
    entries = tuple(ProjectionRecipe(name, 0.5, 0.0, threshold, 0.5) for name in masks)
    recipe = Recipe(
        base_model="random/weights", base_revision=None, method="teal", default=0.5,
        levels=(SparsityLevel(0.5, entries, (0.5,) * model.num_blocks),),
        calibration=CalibrationRecord("self", 1, 64, 48, 0, "0" * 64), versions={"torch": torch.__version__},
    )  # fmt: skip
    folder.mkdir()
    files: dict[str, str] = {}

    def write(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)
        files[name] = hashlib.sha256(data).hexdigest()

    expected = expected_tensors(model)
    tensors = {name: (torch.bfloat16, shape) for name, shape in expected.items()}
    weights = "model-00001-of-00001.safetensors"
    if kind != "bf16":
        packing = Packed("int8", None) if kind == "int8" else Packed("int4", 128)
        types = {"I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16}
        for name in masks:
            for part, stored in packing.parts(*tensors.pop(f"{name}.weight")[1]).items():
                tensors[f"{name}.{part}"] = types[stored.codes[0]], stored.shapes[0]
        spread = {"strategy": "channel"} if kind == "int8" else {"strategy": "group", "group_size": 128}
        each = {"num_bits": 8 if kind == "int8" else 4, "type": "int", "symmetric": True, "dynamic": False} | spread
        group = {"targets": ["Linear"], "weights": each, "input_activations": None, "output_activations": None}
        how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
        config = config | {"quantization_config": how | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}}
    header = build_header(tensors, {"format": "pt"})
    size = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in tensors.values())
    with open(folder / weights, "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
        at = len(header)
        for name, (dtype, dimensions) in tensors.items():
            if name.endswith("weight_shape"):  # which is checked
                file.seek(at)
                file.write(struct.pack("<2q", *expected[name.removesuffix("_shape")]))
            at += dtype.itemsize * torch.Size(dimensions).numel()
    files[weights] = "0" * 64
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(tensors, weights)}
    write("model.safetensors.index.json", json.dumps(index).encode())
    write("wisparse.safetensors", sidecar_bytes(masks, recipe, [masks]))
    entry = {"format_version": 2, "sparsity": 0.5, "sparsities": [0.5], "sidecar": "wisparse.safetensors"}
    write("config.json", json.dumps(config | {"wisparse": entry}).encode())
    (folder / "wisparse.json").write_bytes(Manifest(recipe, files).to_bytes())
    Bundle.open(folder)
