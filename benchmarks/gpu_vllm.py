"""The plug-in inside vLLM on a GPU: tokens a second beside dense vLLM, prompts, memory, start, and its tokens.

    PYTHONPATH=. python benchmarks/gpu_vllm.py              on a GPU; results in $OUT (or /tmp/gpu_vllm)
    PYTHONPATH=. python benchmarks/gpu_vllm.py --rehearse   a small model on a CPU: the same parts, no meaning

Every part is a process of its own with a time limit; what it found is a line of JSON in results.jsonl, and the last
lines of this script's output sum them up. Nothing needs to be installed: vLLM finds the plug-in by a folder with its
entry point that this script makes. ``--only dense@0+sparse@1,tokens``: parts joined by + start at once, each with
caches of its own; those with @ have that GPU to themselves, others measure one after the other, so that both see the
same machine. ``dense-tp2+sparse-tp2`` need two GPUs.

The speeds are of Llama-3.1-8B's shape with vLLM's own random weights (``load_format="dummy"``). The thresholds are
those that drop half of each projection's channels on tokens that the model itself decoded dense, all channel scales
are 1, and the share that is dropped is counted on other such tokens. The files of the weights are empty: nothing reads
them.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from shapes import LLAMA_8B

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT") or "/tmp/gpu_vllm")
WORK = Path("/tmp/gpu_vllm_work")
LLAMA = LLAMA_8B | {"bos_token_id": 128000, "eos_token_id": 128001}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}  # fmt: skip
REQUESTS = (1, 2, 4, 8, 32, 128)
PROMPT, TOKENS = 5, 200


def say(part: str, **found: Any) -> None:
    """One line of results."""
    line = json.dumps({"part": part, **found})
    print(line, flush=True)
    with open(OUT / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return LLAMA | (SMALL if arguments.rehearse else {})


def engine(arguments: argparse.Namespace, model: Path, **changes: Any) -> Any:
    """vLLM with the flags that dense and sparse runs share."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(model), "dtype": "bfloat16", "max_model_len": 4352, "max_num_seqs": 128, "seed": 0,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": 24 << 30,
        "gpu_memory_utilization": 0.45, "tensor_parallel_size": arguments.tensor_parallel,
    }  # fmt: skip
    if arguments.rehearse:
        settings |= {"dtype": "float32", "enforce_eager": True}
        del settings["kv_cache_memory_bytes"], settings["gpu_memory_utilization"]
    return LLM(**(settings | changes))


def take_turn(beside: int, alone: bool) -> Any:
    """Wait until ``beside`` engines have started, then be the one that measures while the answer is held; at once with
    the others if ``alone`` on a GPU."""
    (WORK / f"started-{os.getpid()}").touch()
    end = time.monotonic() + 100
    while len(list(WORK.glob("started-*"))) < beside and time.monotonic() < end:
        time.sleep(0.1)
    turn = open(WORK / (f"turn-{os.getpid()}" if alone else "turn"), "w")  # noqa: SIM115 (held open until the process ends)
    fcntl.flock(turn, fcntl.LOCK_EX)
    return turn


# --- parts


def part_folders(arguments: argparse.Namespace) -> None:
    """The dense folder, and the bundle; its thresholds drop nothing until ``drop_half``."""
    config = config_of(arguments)
    (WORK / "dense").mkdir(parents=True, exist_ok=True)
    (WORK / "dense" / "config.json").write_text(json.dumps(config))
    write_bundle(config, WORK / "bundle")


def drop_half(llm: Any, prompts: list[Any], sampling: Any) -> dict[str, Any]:
    """Give a bundle's layers thresholds for half of their channels, on tokens that the model decodes without them."""
    from gpu_vllm_inside import watch_products, watched
    from vllm import SamplingParams

    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
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
        found = {"layers": layers, "tokens": len(tokens), "dropped_mean": round(statistics.mean(shares), 4),
                 "dropped_from": round(min(shares), 4), "dropped_to": round(max(shares), 4)}  # fmt: skip
    return found


def write_bundle(config: dict[str, Any], folder: Path) -> None:
    """A bundle that passes every check but has holes for weights, and thresholds that drop nothing."""
    import torch

    from wisparse.formats.bundle import Bundle, ProjectionMask, sidecar_bytes
    from wisparse.formats.checkpoint import build_header
    from wisparse.formats.manifest import CalibrationRecord, Manifest, ProjectionRecipe, Recipe, SparsityLevel
    from wisparse.formats.model_config import ModelConfig, expected_tensors

    model = ModelConfig.from_dict(config)
    threshold = 2.0**-100
    projections, masks = [], {}
    for projection in model.projections():
        projections.append(ProjectionRecipe(projection.name, 0.5, 0.0, threshold, 0.5))
        masks[projection.name] = ProjectionMask(torch.ones(projection.in_features), threshold, 0.5)
    recipe = Recipe(
        base_model="random/weights", base_revision=None, method="teal", default=0.5,
        levels=(SparsityLevel(0.5, tuple(projections), (0.5,) * model.num_blocks),),
        calibration=CalibrationRecord("self", 1, 64, 48, 0, "0" * 64), versions={"torch": torch.__version__},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}

    def write(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)
        files[name] = hashlib.sha256(data).hexdigest()

    shapes = expected_tensors(model)
    header = build_header({name: (torch.bfloat16, shape) for name, shape in shapes.items()}, {"format": "pt"})
    size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    weights = "model-00001-of-00001.safetensors"
    with open(folder / weights, "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    files[weights] = "0" * 64
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(shapes, weights)}
    write("model.safetensors.index.json", json.dumps(index).encode())
    write("wisparse.safetensors", sidecar_bytes(masks, recipe, [masks]))
    entry = {"format_version": 2, "sparsity": 0.5, "sparsities": [0.5], "sidecar": "wisparse.safetensors"}
    write("config.json", json.dumps(config | {"wisparse": entry}).encode())
    (folder / "wisparse.json").write_bytes(Manifest(recipe, files).to_bytes())
    Bundle.open(folder)


def part_speed(arguments: argparse.Namespace) -> None:
    """Decoding and prompts of one engine, ``--model dense`` or ``bundle``."""
    import torch
    from gpu_vllm_inside import reserved_gib
    from vllm import SamplingParams

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # apply_model sends this script's functions
    began = time.perf_counter()
    llm = engine(arguments, WORK / arguments.model, load_format="dummy", skip_tokenizer_init=True)
    started = round(time.perf_counter() - began, 1)
    turn = take_turn(arguments.beside, arguments.alone)
    method = llm.llm_engine.vllm_config.model_config.quantization
    if (method == "wisparse") != (arguments.model == "bundle"):
        raise RuntimeError(f"expected the plug-in for the bundle alone, found {method!r} for {arguments.model}")
    vocab = config_of(arguments)["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[Any]:
        ids = torch.randint(3, vocab, (count, length), generator=generator).tolist()
        return [{"prompt_token_ids": row} for row in ids]

    tokens = 20 if arguments.rehearse else TOKENS
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    name = f"speed {arguments.model}" + (f" tp{arguments.tensor_parallel}" if arguments.tensor_parallel > 1 else "")
    say(name, start_s=started, gib=llm.apply_model(reserved_gib)[0])
    if arguments.model == "bundle":
        say("thresholds" + name.removeprefix("speed"), **drop_half(llm, prompts(16, PROMPT), sampling))
    else:
        llm.generate(prompts(16, PROMPT), sampling, use_tqdm=False)
    for count in REQUESTS[: 3 if arguments.rehearse else arguments.sizes]:
        rates = []
        for _ in range(3 if count in (4, 8) else 2):
            batch = prompts(count, PROMPT)
            start = time.perf_counter()
            done = llm.generate(batch, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            rates.append(sum(len(answer.outputs[0].token_ids) for answer in done) / seconds)
        say(name, requests=count, tok_per_s=round(max(rates), 1), each=[round(rate, 1) for rate in rates])
    if arguments.sizes < len(REQUESTS):
        turn.close()
        return
    length = 64 if arguments.rehearse else 4096
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    rates = []
    for _ in range(3):
        batch = prompts(8, length)
        start = time.perf_counter()
        llm.generate(batch, one, use_tqdm=False)
        rates.append(8 * length / (time.perf_counter() - start))
    say(name, prompt_tok_per_s=round(max(rates)), each=[round(rate) for rate in rates],
        gib=llm.apply_model(reserved_gib)[0])  # fmt: skip
    short = [prompts(16, length // 32) for _ in range(3)]
    rates = []
    for batch in short:
        start = time.perf_counter()
        llm.generate(batch, one, use_tqdm=False)
        rates.append(16 * (length // 32) / (time.perf_counter() - start))
    say(name, short_prompt_tok_per_s=round(max(rates)), each=[round(rate) for rate in rates])
    turn.close()


def part_start(arguments: argparse.Namespace) -> None:
    """Seconds of a second start, with all caches filled."""
    began = time.perf_counter()
    engine(arguments, WORK / arguments.model, load_format="dummy", skip_tokenizer_init=True)
    say(f"start again {arguments.model}", start_s=round(time.perf_counter() - began, 1))


def part_convert(arguments: argparse.Namespace) -> None:
    """A bundle of a real model, as the tests make one; in a process of its own: vLLM forks one without a GPU in use."""
    sys.path.insert(0, str(ROOT / "tests"))
    from bundle_maker import make_bundle

    source = Path(arguments.source)
    if not (WORK / f"bundle-{source.name}").exists():
        make_bundle(source, WORK / f"bundle-{source.name}")


def part_tokens(arguments: argparse.Namespace) -> None:
    """A real model: tokens alone, together, in a second run, and our own runtime's; where they first differ."""
    import torch
    from vllm import SamplingParams

    source = Path(arguments.source)
    bundle = WORK / f"bundle-{source.name}"
    text = Path(__file__).read_text("utf-8").splitlines(keepends=True)
    prompts = ["".join(text[i * 9 : i * 9 + 1 + i % 5]) or "def" for i in range(20)]
    sampling = SamplingParams(temperature=0, max_tokens=64)
    changes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "dtype": arguments.dtype}
    if not arguments.rehearse:
        # The cut-down FlashAttention has no heads of 32.
        changes |= {"attention_backend": "TRITON_ATTN", "kv_cache_memory_bytes": 2 << 30}
    llm = engine(arguments, bundle, enforce_eager=arguments.eager or arguments.rehearse, **changes)
    if llm.llm_engine.vllm_config.model_config.quantization != "wisparse":
        raise RuntimeError("expected the plug-in to find the bundle")

    def answers(llm: Any, batch: list[str]) -> list[list[int]]:
        return [list(done.outputs[0].token_ids) for done in llm.generate(batch, sampling, use_tqdm=False)]

    def differ(a: list[list[int]], b: list[list[int]]) -> list[int]:
        found = []
        for x, y in zip(a, b, strict=True):
            same = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
            found.append(-1 if same == len(x) == len(y) else same)
        return found

    together, again = answers(llm, prompts), answers(llm, prompts)
    alone = [answers(llm, [prompt])[0] for prompt in prompts]
    one = SamplingParams(temperature=0, max_tokens=1)
    read = [list(done.prompt_token_ids) for done in llm.generate(prompts, one, use_tqdm=False)]
    del llm
    import wisparse

    own = wisparse.load(bundle, dtype=arguments.dtype)
    # Ours on vLLM's tokens: how many it would have chosen, and how much less likely it finds the others.
    same, short = 0, []
    for ids, tokens in zip(read, alone, strict=True):
        logits = own.decoder.prefill(0, torch.tensor(ids), len(ids))
        for token in tokens:
            logits = logits.float().flatten().cpu()
            short.append(float(logits.max() - logits[token]))
            same += int(logits.argmax()) == token
            logits = own.decoder.decode(torch.tensor([token]))
    ours = [list(own.generate(prompt, max_new_tokens=64).token_ids) for prompt in prompts]
    say(
        f"tokens {source.name} {arguments.dtype}{' eager' if arguments.eager else ''}",
        note="-1: never; else the first that differs",
        own_choice=round(same / len(short), 4), worst_logit_short=round(max(short), 4),
        two_runs=differ(together, again), alone_together=differ(alone, together), own_alone=differ(ours, alone),
    )  # fmt: skip


# --- the driver


def entry_point() -> Path:
    """A folder by which vLLM finds the plug-in without an installation."""
    folder = WORK / "plugin"
    info = folder / "wisparse-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wisparse\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nwisparse = wisparse.runtime.vllm.plugin:register\n")
    return folder


def start(name: str, seconds: int, gpu: str, *arguments: str) -> subprocess.Popen[bytes]:
    """One part in a process of its own, with one GPU to itself unless ``gpu`` is empty."""
    environment = dict(os.environ)
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "benchmarks"), str(entry_point()), environment.get("PYTHONPATH", "")]
    )
    # Every start is a first one, but those that are meant to be second ones.
    caches = WORK / f"cache-{name.removesuffix('-again')}"
    environment |= {
        "VLLM_CACHE_ROOT": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "WISPARSE_CACHE": str(WORK / "tiles"),
    }
    command = ["timeout", "-k", "10", str(seconds), sys.executable, __file__, *arguments]
    with open(WORK / f"{name}.log", "w", encoding="utf-8") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def finish(name: str, part: subprocess.Popen[bytes], began: float) -> None:
    """Its log stays, a failure is a line of results."""
    code = part.wait()
    print(f"== {name}: exit {code}, {time.perf_counter() - began:.1f} s", flush=True)
    text = (WORK / f"{name}.log").read_text("utf-8", errors="replace")
    with open(OUT / "logs.txt", "a", encoding="utf-8") as file:
        file.write(f"== {name}\n{text}")
    lines = text.splitlines()
    if code:
        say(name, failed=code)
        print("\n".join(line[:300] for line in lines[-25:]), flush=True)
    for line in lines:
        if line.startswith('{"part"'):
            print(line, flush=True)
        elif any(word in line for word in ("Model loading took", "attention backend", "capturing finished", "took ")):
            print(line[-160:], flush=True)


def summary() -> None:
    """The figures of the sparse engine over the dense one's."""
    found: dict[str, dict[str, float]] = {}
    for line in (OUT / "results.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if not entry["part"].startswith("speed "):
            continue
        rows = found.setdefault(entry["part"], {})
        if "requests" in entry:
            rows[f"{entry['requests']} requests"] = entry["tok_per_s"]
        for key in ("start_s", "gib", "prompt_tok_per_s", "short_prompt_tok_per_s"):
            if key in entry:
                rows[key] = entry[key]
    for name in found:
        if "bundle" in name and (dense := found.get(name.replace("bundle", "dense"))):
            ratios = {key: [dense[key], value, round(value / dense[key], 3)] for key, value in found[name].items()
                      if dense.get(key)}  # fmt: skip
            print(json.dumps({"part": "summary: dense, sparse, ratio", "of": name, **ratios}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", help="names of parts, with commas")
    parser.add_argument("--model", default="bundle")
    parser.add_argument("--source", default=str(ROOT / "examples" / "pycode-llama-6m"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one engine")
    parser.add_argument("--sizes", type=int, default=len(REQUESTS), help="how many of the numbers of requests")
    parser.add_argument("--beside", type=int, default=1, help="engines that start at once")
    parser.add_argument("--alone", action="store_true", help="on a GPU that no other part uses")
    parser.add_argument("--seconds", type=int, default=3600, help="for all parts together")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("expected vLLM beside an NVIDIA GPU, found no module vllm; pip install 'wisparse[vllm]'")
    if not arguments.rehearse:
        from gpu_models import need_gpu

        need_gpu(parser)
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        globals()[f"part_{arguments.part}"](arguments)
        return
    WORK.mkdir(parents=True, exist_ok=True)
    (OUT / "results.jsonl").write_text("")
    extra = ["--rehearse"] if arguments.rehearse else []
    cards = [*extra, "--tensor-parallel", "2"]
    extra += ["--sizes", str(arguments.sizes)]
    cards += ["--sizes", "4"]
    source = ["--source", arguments.source, *extra]
    parts = {
        "folders": (40, "folders", *extra),
        "sparse": (200, "speed", "--model", "bundle", *extra),
        "dense": (170, "speed", "--model", "dense", *extra),
        "sparse-tp2": (200, "speed", "--model", "bundle", *cards),
        "dense-tp2": (200, "speed", "--model", "dense", *cards),
        "convert": (60, "convert", "--source", arguments.source),
        "tokens-float32": (100, "tokens", "--dtype", "float32", *source),
        "tokens": (100, "tokens", *source),
        "sparse-again": (100, "start", "--model", "bundle", *extra),
        "dense-again": (80, "start", "--model", "dense", *extra),
    }
    needs_gpu = ("tokens", "sparse-tp2", "dense-tp2") if arguments.rehearse else ()
    wanted = arguments.only.split(",") if arguments.only else [name for name in parts if name not in needs_gpu]
    end = time.perf_counter() + arguments.seconds
    for names in wanted:
        running, began = {}, time.perf_counter()
        for old in WORK.glob("started-*"):
            old.unlink()
        beside = sum(parts[name.partition("@")[0]][1] == "speed" for name in names.split("+"))
        for name, _, gpu in (name.partition("@") for name in names.split("+")):
            seconds, *command = parts[name]
            command += ["--beside", str(beside), *(["--alone"] if gpu else [])]
            left = min(900 if arguments.rehearse else seconds, int(end - began))
            if left > 5:
                running[name] = start(name, left, gpu, *command)
        for name, part in running.items():
            finish(name, part, began)
    summary()


if __name__ == "__main__":
    main()
