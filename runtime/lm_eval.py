"""An adapter that runs tasks of lm-evaluation-harness on this runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from wisparse.formats.errors import AccessError, UsageError, first_line
from wisparse.formats.guard import quoted, shown
from wisparse.formats.hub import is_reachable
from wisparse.formats.weight_types import sparse_from

from .backends import load
from .generation.logits import score_tokens
from .model import Model

LOCAL_TASKS = Path(__file__).with_name("tasks")
OWN_TASKS = ("interpreter_lines", "interpreter_chains", "greedy_loops")
# The paper's six tasks and their folders in the harness: indexing all tasks takes over 10 s.
PAPER_TASKS = {name: name for name in ("gsm8k", "humaneval", "mmlu", "commonsense_qa")}
PAPER_TASKS |= {"social_iqa": "siqa", "wic": "super_glue"}
_SAMPLING: dict[str, type] = {"top_k": int, "top_p": float, "min_p": float, "seed": int}


@register_model("wisparse")
class WisparseLM(TemplateLM):
    def __init__(
        self,
        model: Model | None = None,
        pretrained: str | None = None,
        prefill: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if model is None:
            if pretrained is None:
                raise UsageError("lm-eval: expected a loaded model, or pretrained=BUNDLE")
            model = load(pretrained, device=device or "auto", **options)
        if model.text is None:
            raise UsageError(f"{shown(model.bundle.folder)}: no tokenizer.json, and the harness's tasks are text")
        self.model, self.text = model, model.text
        self.prefill = prefill or model.prefill
        sparse_from(self.prefill, 1)
        self._device = model.decoder.device

    @property
    def eot_token_id(self) -> int:
        token = self.text.special_id("eos_token")
        if token is None and not self.model.stop_ids:
            raise UsageError("lm-eval: the model has no end-of-text token")
        return min(self.model.stop_ids) if token is None else token

    @property
    def prefix_token_id(self) -> int:
        token = self.text.special_id("bos_token")
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.bundle.folder.name)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "default" if chat_template and self.text.template is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.text.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, without a second beginning-of-text token if the chat template has one."""
        ids = self.text.encode(string, add_special_tokens=add_special_tokens is not False)
        bos = self.text.special_id("bos_token")
        return ids[1:] if add_special_tokens is None and bos is not None and ids[:2] == [bos, bos] else ids

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_ignored: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        limit = self.model.max_seq_len
        result: list[tuple[float, bool]] = [(0.0, True)] * len(requests)  # of an empty continuation
        # One forward pass for all requests with the same input, as the choices " A", " B", " C" of a question.
        groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not continuation:
                continue
            if len(continuation) > limit:
                raise UsageError(f"lm-eval: a continuation has {len(continuation)} tokens, the context holds {limit}")
            # The last token is not an input; a too long context is truncated on the left.
            inputs = tuple([*context, *continuation][-(limit + 1) : -1])
            start = sparse_from(self.prefill, len(inputs) - (len(continuation) - 1))
            groups.setdefault((inputs, start), []).append(index)
        for (inputs, start), members in tqdm(groups.items(), "wisparse: log-likelihoods", disable=disable_tqdm or None):
            logits = self._logits(inputs, start)
            for index in members:
                continuation = requests[index][2]
                rows = logits[len(inputs) - len(continuation) :]
                value = sum(score.logprob for score in score_tokens(rows, continuation, 0))
                result[index] = value, rows.argmax(dim=-1).tolist() == continuation
        for (request, _, _), answer in zip(requests, result, strict=True):
            self.cache_hook.add_partial("loglikelihood", request, answer)
        return result

    def _logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits (T, V), computed between two steps of the engine."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        return self.model.engine.call(lambda: self.model.decoder.logits(ids, start))

    @torch.inference_mode()
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of complete texts, in windows of the context's length with disjoint predictions."""
        result = []
        for request in tqdm(requests, desc="wisparse: whole texts", disable=disable_tqdm or None):
            (text,) = request.args
            token_ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(token_ids, self.prefix_token_id, self.model.max_seq_len, context_len=1)
            total = 0.0
            for context, wanted in map(make_disjoint_window, windows):
                inputs = [*context, *wanted][:-1]
                logits = self._logits(inputs, sparse_from(self.prefill, len(inputs)))
                total += sum(score.logprob for score in score_tokens(logits[-len(wanted) :], wanted, 0))
            result.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return result

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt up to one of its stop strings, in batches."""
        result: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}  # indices of requests with the same settings
        for index, request in enumerate(requests):
            groups.setdefault(str(request.args[1]), []).append(index)
        bar = tqdm(total=len(requests), desc="wisparse: answers", disable=disable_tqdm or None)
        for members in groups.values():
            options = self.generation_options(requests[members[0]].args[1])
            most = self.model.max_seq_len - options["max_new_tokens"]
            prompts = {index: self.tok_encode(requests[index].args[0])[-most:] for index in members}
            order = sorted(members, key=lambda index: len(prompts[index]))
            answers = self.model.generate_each([prompts[index] for index in order], prefill=self.prefill, **options)
            for place, answer in answers:
                result[order[place]] = answer.text
                self.cache_hook.add_partial("generate_until", requests[order[place]].args, answer.text)
                bar.update(1)
        bar.close()
        return result

    def generation_options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        left = {name: value for name, value in settings.items() if name != "num_return_sequences"}
        until = left.pop("until", None) or []
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "max_length")
        wanted, *_ = *(int(left.pop(name)) for name in names if name in left), 256
        sampled, temperature = left.pop("do_sample", None), float(left.pop("temperature", None) or 0.0)
        options: dict[str, Any] = {
            "stop": [one for one in ([until] if isinstance(until, str) else until) if one],
            "max_new_tokens": max(1, min(wanted, self.model.max_seq_len - 1)),
            "temperature": 0.0 if sampled is False else temperature or (1.0 if sampled else 0.0),
        }
        options |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # not generation_config.json's
        options |= {name: kind(left[name]) for name, kind in _SAMPLING.items() if left.get(name) is not None}
        if unknown := sorted(left.keys() - _SAMPLING):
            raise UsageError(f"lm-eval: generation settings this runtime does not have: {', '.join(unknown)}")
        return options


def evaluate_tasks(
    model: Model,
    tasks: Sequence[str],
    *,
    prefill: str | None = None,
    include_path: Sequence[str | os.PathLike[str]] = (),
    num_fewshot: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    apply_chat_template: bool = False,
    confirm_run_unsafe_code: bool = False,
) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    manager, names = task_manager(tasks, include_path), ", ".join(tasks)
    configs = [getattr(manager.task_index.get(task), "cfg", None) or {} for task in tasks]
    unsafe = UsageError(
        f"task {names} runs code that the model writes, on this machine and unguarded: do so in a container and "
        "confirm with --confirm-run-unsafe-code"
    )
    if confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # also required by the metric of these tasks, code_eval
    elif any(config.get("unsafe_code") for config in configs):
        raise unsafe
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # bootstrap in this process: the child processes print
    adapter = WisparseLM(model, prefill=prefill)
    # Tasks with local data need no network.
    offline = not all("custom_dataset" in config for config in configs) and not is_reachable()
    try:
        with _offline() if offline else nullcontext():
            outcome = simple_evaluate(
                model=adapter,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=False,
                bootstrap_iters=1000,
                apply_chat_template=apply_chat_template,
                **{f"{name}_seed": seed for name in ("random", "numpy_random", "torch_random", "fewshot_random")},
                confirm_run_unsafe_code=confirm_run_unsafe_code,
            )
    except (ValueError, OSError, HTTPError) as error:
        reason, is_value = first_line(error), isinstance(error, ValueError)
        if is_value and "unsafe" in str(error):
            raise unsafe from error  # of a group, whose tasks are known now
        if num_fewshot and "larger than population" in str(error):
            raise UsageError(f"--num-fewshot {num_fewshot}: one of {names} has fewer examples") from error
        if offline and ("Couldn't find cache" in str(error) or not is_value):
            dataset = re.search(r"[\w.-]+/[\w.-]+", str(error))
            reason = f"({dataset[0] if dataset else reason}) are not in the cache, and the Hub cannot be reached"
            reason += ": check the network, or run this once where there is one"
        elif is_value:
            raise
        else:
            reason = f"cannot be read: {reason}; check the network and the harness's version"
        raise AccessError(f"the data of {names} {reason}") from error
    results: dict[str, dict[str, float]] = {}
    for name, values in outcome["results"].items():
        results[name] = {"num_questions": count_questions(outcome, name)}
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and not metric.startswith("sample_"):
                # Keep a filter's name if there are several.
                results[name][metric if filtered in ("", "none") else f"{metric} ({filtered})"] = float(value)
    return results


@contextmanager
def _offline() -> Iterator[None]:
    """Offline mode: data sets and metrics only from the cache, without network timeouts of a minute."""
    import datasets
    import evaluate

    hub = "HF_HUB_OFFLINE"
    with ExitStack() as restored:
        for module, name in (constants, hub), (datasets.config, hub), (evaluate.config, "HF_EVALUATE_OFFLINE"):
            restored.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, True)
        yield


def count_questions(outcome: Mapping[str, Any], name: str) -> int:
    """Number of samples of a task's metrics; of a group, the sum over its tasks."""
    own, groups = outcome["n-samples"], outcome.get("group_subtasks") or {}

    def leaves(name: str) -> set[str]:
        return {name} if name in own else {leaf for part in groups.get(name, ()) for leaf in leaves(part)}

    return sum(int(own[leaf]["effective"]) for leaf in leaves(name))


def task_manager(tasks: Sequence[str], include_path: Sequence[str | os.PathLike[str]]) -> Any:
    """The index of tasks; the harness's own, which takes seconds, is read only if needed."""
    import lm_eval.tasks

    for path in include_path:
        if not os.path.isdir(path):  # also False for an invalid path
            raise UsageError(f"--include-path {quoted(os.fspath(path))}: no such folder; expected one with YAML tasks")
    folders = [str(LOCAL_TASKS), *(os.fspath(path) for path in include_path)]
    shortcut = [Path(lm_eval.tasks.__file__).parent / PAPER_TASKS[task] for task in tasks if task in PAPER_TASKS]
    folders += [str(folder) for folder in shortcut if folder.is_dir()]
    for include_defaults in (False, True):
        manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=include_defaults)
        unknown = [task for task in tasks if not manager.match_tasks([task])]
        if not unknown:
            return manager
    raise UsageError(
        f"unknown task {quoted(unknown[0])}: expected a task of lm-evaluation-harness (lm_eval ls tasks), "
        f"{', '.join(OWN_TASKS)}, or a YAML task under --include-path"
    )
