"""Tokens of ONNX exports in onnxruntime-genai and in optimum-onnx, against the tokens of our runtime.

    python -m venv onnx-peers && onnx-peers/bin/pip install -r benchmarks/onnx_peers.txt
    onnx-peers/bin/python benchmarks/onnx_peers.py EXPORT TOKENS.json [EXPORT TOKENS.json ...]

Neither is installed beside this project: optimum-onnx wants an older transformers. So this file imports nothing of
ours. It compares exported folders with prompts and answers of our runtime in a JSON file. One line of JSON for each;
exit code 1 if any differs. ``tests/test_onnx.py`` writes both and runs it, by the interpreter in
WISPARSE_ONNX_PEERS_PYTHON.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def genai_tokens(folder: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of onnxruntime-genai, up to and without the end token."""
    import onnxruntime_genai as genai

    model = genai.Model(folder)
    answers = []
    for prompt in prompts:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + count, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array([prompt], dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        answers.append([int(token) for token in generator.get_sequence(0)[len(prompt) :]])
    return answers


def optimum_tokens(folder: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of optimum-onnx, all prompts in one batch, padded on the left."""
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    model = ORTModelForCausalLM.from_pretrained(folder)
    # The step that docs/ecosystem.md asks for: optimum-onnx 0.1 takes hidden_size / num_attention_heads for the size
    # of a head, and for some architectures one key head per query head. What the model says itself is right.
    shape = next(value for value in model.session.get_inputs() if value.name == "past_key_values.0.key").shape
    model.num_key_value_heads, model.embed_size_per_head = shape[1], shape[3]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    lengths = {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **lengths)
    return out[:, longest:].tolist()


def until_end(tokens: list[int], ends: list[int]) -> list[int]:
    """Tokens before the first end token."""
    return next((tokens[:i] for i, token in enumerate(tokens) if token in ends), tokens)


def compare(folder: str, expected_file: str) -> dict[str, Any]:
    """What each peer makes of one export: whether its tokens are the expected ones."""
    expected = json.loads(Path(expected_file).read_text())
    prompts, answers, count = expected["prompts"], expected["answers"], len(expected["answers"][0])
    ends = json.loads((Path(folder) / "genai_config.json").read_text())["model"].get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    report: dict[str, Any] = {"folder": Path(folder).name, "prompts": len(prompts), "tokens": count}
    report["optimum_onnx"] = optimum_tokens(folder, prompts, count) == answers
    found = [until_end(tokens, ends) for tokens in genai_tokens(folder, prompts, count)]
    report["onnxruntime_genai"] = found == [until_end(tokens, ends) for tokens in answers]
    for package in ("onnxruntime", "onnxruntime-genai", "optimum-onnx", "transformers"):
        report[f"{package} version"] = importlib.metadata.version(package)
    return report


def main() -> None:
    if len(sys.argv) < 3 or len(sys.argv) % 2 == 0:
        sys.exit(__doc__)
    reports = [compare(folder, tokens) for folder, tokens in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]
    print(*map(json.dumps, reports), sep="\n")
    sys.exit(0 if all(report["optimum_onnx"] and report["onnxruntime_genai"] for report in reports) else 1)


if __name__ == "__main__":
    main()
