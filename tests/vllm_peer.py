"""What test_runtime_vllm.py asks of vLLM, in vLLM's own environment; one line of JSON for each answer.

python tests/vllm_peer.py tokens BUNDLE PROMPTS SETTINGS
python tests/vllm_peer.py refusals CASES
python tests/vllm_peer.py logprobs BUNDLE PROMPTS SETTINGS
"""

import json
import os
import sys
import time
import urllib.request
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}  # fmt: skip


def engine(bundle: str, **changes: Any) -> Any:
    from vllm import LLM

    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "enforce_eager": True} | changes
    return LLM(model=bundle, **settings)


def tokens(bundle: str, prompts: str, settings: str) -> None:
    """Greedy tokens of each prompt alone and of all together, with a budget of tokens that cuts prompts in pieces."""
    from vllm import SamplingParams

    from wisparse.runtime.vllm.blocks import BETWEEN
    from wisparse.runtime.vllm.config import WisparseConfig

    original = WisparseConfig.get_quant_method

    def with_experts(config: Any, layer: Any, prefix: str) -> Any:
        from vllm_products import register_experts  # not earlier: vLLM's worker looks through all modules as it starts

        register_experts()
        return original(config, layer, prefix)

    WisparseConfig.get_quant_method = with_experts
    ids = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    llm = engine(bundle, max_num_batched_tokens=64, enable_chunked_prefill=True, **json.loads(settings))
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)

    def answers(batch: list[Any]) -> list[list[int]]:
        return [list(done.outputs[0].token_ids) for done in llm.generate(batch, sampling, use_tqdm=False)]

    together = answers(ids)
    alone = [answers([prompt])[0] for prompt in ids]
    found = {"method": llm.llm_engine.vllm_config.model_config.quantization, "together": together, "alone": alone}
    found["joined"] = len(BETWEEN)  # blocks of this process
    if not json.loads(settings).get("disable_log_stats", True):
        found["counts"] = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print(json.dumps(found), flush=True)


def refusals(cases: str) -> None:
    """Each case's error: a bundle, arguments for the engine, changes of the environment. ``reload``: load weights twice."""
    for bundle, arguments, environment in json.loads(cases):
        os.environ.update(environment)
        reload = arguments.pop("reload", False)
        try:
            llm = engine(bundle, **arguments)
            if reload:
                llm.collective_rpc("reload_weights")
            found = ["none", "", ""]
        except Exception as error:
            found = [type(error).__name__, str(error), error.__class__.__module__]
        for name in environment:
            del os.environ[name]
        print(json.dumps({"error": found}), flush=True)


def logprobs(bundle: str, prompts: str, settings: str) -> None:
    """Greedy tokens and all tokens' log-probabilities at their places; of vLLM's quantised weights by plain products."""
    from vllm import SamplingParams
    from vllm_products import register

    register()
    ids = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=-1)
    llm = engine(bundle, max_logprobs=-1, max_num_batched_tokens=64, **json.loads(settings))
    answers = [done.outputs[0] for done in llm.generate(ids, sampling, use_tqdm=False)]
    found: dict[str, Any] = {"method": llm.llm_engine.vllm_config.model_config.quantization}
    found["tokens"] = [list(answer.token_ids) for answer in answers]
    places = [answer.logprobs for answer in answers]
    found["logprobs"] = [[[one[token].logprob for token in range(len(one))] for one in each] for each in places]
    print(json.dumps(found), flush=True)


def client(url: str, prompt: str) -> None:
    import openai

    served = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for _ in range(220):
        try:
            served.models.list()
            break
        except openai.APIConnectionError:
            time.sleep(1)
    answer = served.completions.create(model="bundle", prompt=prompt, max_tokens=16, temperature=0)
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as page:
        metrics = [line for line in page.read().decode().splitlines() if line.startswith("wisparse_")]
    print(json.dumps({"text": answer.choices[0].text, "metrics": metrics}), flush=True)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    {"tokens": tokens, "refusals": refusals, "logprobs": logprobs, "client": client}[sys.argv[1]](*sys.argv[2:])
