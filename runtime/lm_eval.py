"""lm-evaluation-harness through our runtime: the tasks are the harness's, every logit and token is ours.

    evaluate_tasks(model, ["gsm8k"], prefill="half")          or, from the harness:
    import wisparse.runtime.lm_eval                   # registers the model "wisparse"
    lm_eval.simple_evaluate(model="wisparse", model_args="pretrained=DIR,prefill=half", tasks=["gsm8k"])

The prefill policy holds for every request by its own true length: of a prompt of L tokens none, the last L // 2 or all
are sparse, and whatever comes after the prompt is sparse, be it generated or, for a multiple choice, given. A text that
is scored as a whole (a perplexity task) counts as a prompt.

Needs the extra ``eval``; nothing else of the runtime imports this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from .generation.scheduler import Stats
from .model import Model

# The tasks that ship with the project, as the harness reads them.
LOCAL_TASKS = Path(__file__).with_name("tasks")
OWN_TASKS = ("interpreter_lines", "interpreter_chains", "greedy_loops")

# The paper's six tasks by the harness's names, and their folders in it: its index of all tasks takes 10 s and more.
PAPER_TASKS = {
    "social_iqa": "siqa",
    "gsm8k": "gsm8k",
    "wic": "super_glue",
    "humaneval": "humaneval",
    "mmlu": "mmlu",
    "commonsense_qa": "commonsense_qa",
}

# Beside the metrics of a task: of how many questions they are.
QUESTIONS = "num_questions"

_DEFAULT_NEW_TOKENS = 256

# Standard errors of means have a closed form, which the harness computes only where it may also draw for other metrics;
# for those it draws so often, here and not in processes of its own that print.
_DRAWS, _DRAW_HERE = 1000, "DISABLE_MULTIPROC"

# What the harness reports beside the metrics.
_NO_METRIC = ("sample_len", "sample_count")


@register_model("wisparse")
class WisparseLM(TemplateLM):
    """A loaded bundle as the harness sees a model.

    Args:
        model: a loaded model; None loads ``pretrained``.
        pretrained: a bundle's folder or Hub id.
        prefill: ``dense``, ``half`` or ``all``; None is the model's own policy.
        batch_size, max_batch_size: accepted because the harness passes them; the model's ``max_batch`` decides.
        device: for ``pretrained``.
        options: further arguments of `load`, for ``pretrained``.

    Attributes:
        stats: what the generated answers took so far.
    """

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
        self.model = model
        self.text = model.text
        self.prefill = prefill or model.prefill
        sparse_from(self.prefill, 1)
        self.stats = Stats()
        self._device = model.decoder.device

    # ------------------------------------------------------------------ text

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; the lowest one if the model has several."""
        token = self.text.token_id(self.text.special_tokens.get("eos_token", ""))
        if token is None and not self.model.stop_ids:
            raise UsageError("lm-eval: the model has no end-of-text token")
        return token if token is not None else min(self.model.stop_ids)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        token = self.text.token_id(self.text.special_tokens.get("bos_token", ""))
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        """Tells the harness's caches one bundle's tokenizer from another's."""
        return str(self.model.bundle.folder.name)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's name for the harness's records: there is one or none."""
        return "default" if chat_template and self.text.template is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as the text the model was trained on."""
        return self.text.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; a beginning-of-text token is not doubled if a chat template wrote it already."""
        ids = self.text.encode(string, add_special_tokens=add_special_tokens is not False)
        bos = self.text.token_id(self.text.special_tokens.get("bos_token", ""))
        if add_special_tokens is None and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    # ------------------------------------------------------------------ log-likelihoods

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would give it."""
        result: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for inputs, start, members in tqdm(
            list(self._grouped(requests)), desc="wisparse: log-likelihoods", disable=disable_tqdm or None
        ):
            # One pass serves every request that reads the same tokens: the choices " A", " B", " C" of one question.
            logits = self._logits(torch.tensor(inputs, dtype=torch.int64), start)
            longest = max(len(continuation) for _, continuation in members)
            log_probs = logits[len(inputs) - longest :].float().log_softmax(dim=-1)
            for index, continuation in members:
                rows = log_probs[longest - len(continuation) :]
                wanted = torch.tensor(continuation, dtype=torch.int64, device=rows.device)
                value = float(rows.gather(-1, wanted[:, None]).double().sum())
                greedy = bool((rows.argmax(dim=-1) == wanted).all())
                result[index] = (value, greedy)
        for (request, _, _), answer in zip(requests, result, strict=True):
            self.cache_hook.add_partial("loglikelihood", request, answer)
        return result

    def _logits(self, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        """(T, V); between two steps of whatever else the model does. The caller's: the decoder goes on meanwhile."""
        return self.model.engine.call(lambda: self.model.decoder.logits(token_ids, start))

    def _grouped(
        self, requests: Sequence[tuple[Any, list[int], list[int]]]
    ) -> Iterator[tuple[list[int], int, list[tuple[int, list[int]]]]]:
        """Requests by what the model reads: its tokens, the first sparse position, and (index, continuation) pairs."""
        limit = self.model.max_seq_len
        groups: dict[tuple[tuple[int, ...], int], list[tuple[int, list[int]]]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not continuation:
                continue  # nothing is said with certainty: log-likelihood 0, and greedy
            if len(continuation) > limit:
                raise UsageError(
                    f"lm-eval: a continuation of {len(continuation)} tokens does not fit the context of {limit}"
                )
            # The last token is predicted, never read; of a context that is too long the end is kept.
            inputs = [*context, *continuation][-(limit + 1) : -1]
            prompt = len(inputs) - (len(continuation) - 1)
            groups.setdefault((tuple(inputs), sparse_from(self.prefill, prompt)), []).append((index, continuation))
        for (inputs_key, start), members in groups.items():
            yield list(inputs_key), start, members

    @torch.inference_mode()
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context's length that overlap by no prediction."""
        result = []
        for (text,) in tqdm(
            [request.args for request in requests], desc="wisparse: whole texts", disable=disable_tqdm or None
        ):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.max_seq_len,
                context_len=1,
            )
            total = 0.0
            for context, wanted in map(make_disjoint_window, windows):
                inputs = torch.tensor([*context, *wanted][:-1], dtype=torch.int64)
                logits = self._logits(inputs, sparse_from(self.prefill, len(inputs)))
                log_probs = logits[-len(wanted) :].float().log_softmax(dim=-1)
                chosen = torch.tensor(wanted, dtype=torch.int64, device=log_probs.device)
                total += float(log_probs.gather(-1, chosen[:, None]).double().sum())
            result.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return result

    # ------------------------------------------------------------------ generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt until one of its stop strings, as many at a time as the model has slots."""
        result: list[str] = [""] * len(requests)
        # Requests with the same settings go together: whenever one ends, the next takes its slot. Neighbours of like
        # length read contexts of like length.
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(str(request.args[1]), []).append(index)
        bar = tqdm(total=len(requests), desc="wisparse: answers", disable=disable_tqdm or None)
        for members in groups.values():
            options = self._options(requests[members[0]].args[1])
            room = self.model.max_seq_len - options["max_new_tokens"]
            prompts = {index: self.tok_encode(requests[index].args[0])[-room:] for index in members}
            order = sorted(members, key=lambda index: len(prompts[index]))
            answers = self.model.generate_each(
                [prompts[index] for index in order], prefill=self.prefill, stats=self.stats, **options
            )
            for place, answer in answers:
                index = order[place]
                result[index] = answer.text
                self.cache_hook.add_partial("generate_until", requests[index].args, answer.text)
                bar.update(1)
        bar.close()
        return result

    def _options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The harness's generation settings in the words of `Model.generate`.

        Raises:
            UsageError: a setting that this runtime does not have.
        """
        left = dict(settings)
        until = left.pop("until", None) or []
        stop = [until] if isinstance(until, str) else list(until)
        # Special tokens are no part of an answer's text; the harness adds the end-of-text token's name as a string.
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "max_length")
        given = [left.pop(name) for name in names if name in left]
        options: dict[str, Any] = {"stop": [one for one in stop if one]}
        wanted = int(given[0]) if given else _DEFAULT_NEW_TOKENS
        options["max_new_tokens"] = max(1, min(wanted, self.model.max_seq_len - 1))
        sampled = left.pop("do_sample", None)
        temperature = float(left.pop("temperature", None) or 0.0)
        if sampled and not temperature:
            temperature = 1.0
        options["temperature"] = temperature if sampled is not False else 0.0
        for name, kind in (("top_k", int), ("top_p", float), ("min_p", float), ("seed", int)):
            value = left.pop(name, None)
            if value is not None:
                options[name] = kind(value)
        left.pop("num_return_sequences", None)
        if left:
            raise UsageError(f"lm-eval: generation settings this runtime does not have: {', '.join(sorted(left))}")
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
    stats: Stats | None = None,
) -> dict[str, Any]:
    """Run tasks of the harness on a loaded model.

    Args:
        model: a loaded bundle.
        tasks: names of tasks or groups: the harness's, those that ship with the project (`LOCAL_TASKS`), or those under
            ``include_path``.
        prefill: ``dense``, ``half`` or ``all``; None is the model's own policy.
        include_path: folders with further YAML tasks.
        num_fewshot: solved examples before each question; None is the task's own number.
        limit: at most so many documents per task.
        seed: of everything the harness draws.
        apply_chat_template: put prompts through the model's chat template.
        confirm_run_unsafe_code: allow tasks that execute what the model writes (humaneval).
        stats: what the generated answers took is added to it.

    Returns:
        Per task its metrics, ``name -> value``, standard errors as ``name_stderr``, and under `QUESTIONS` how many
        questions they are of.

    Raises:
        UsageError: unknown task, or one that runs the model's code without consent.
        AccessError: its data cannot be fetched; without a network they come from the cache, or it is said at once.
    """
    from lm_eval import simple_evaluate

    manager = _task_manager(tasks, include_path)
    if not confirm_run_unsafe_code:
        _refuse_unsafe(tasks, manager)
    else:
        # The harness asks once, the metric it uses for this (code_eval) asks once more, through the environment.
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    os.environ.setdefault(_DRAW_HERE, "1")
    adapter = WisparseLM(model, prefill=prefill)
    if stats is not None:
        adapter.stats = stats
    offline = not _brings_its_data(tasks, manager) and not is_reachable()
    try:
        with _cache_alone() if offline else nullcontext():
            outcome = simple_evaluate(
                model=adapter,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=False,
                bootstrap_iters=_DRAWS,
                apply_chat_template=apply_chat_template,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
                confirm_run_unsafe_code=confirm_run_unsafe_code,
            )
    except ValueError as error:
        if "unsafe" in str(error):
            raise _unsafe(", ".join(tasks)) from error
        if num_fewshot and "larger than population" in str(error):
            raise UsageError(f"--num-fewshot {num_fewshot}: one of {', '.join(tasks)} has fewer examples") from error
        if offline and "Couldn't find cache" in str(error):
            raise _unreadable(tasks, error, offline) from error
        raise
    except (OSError, HTTPError) as error:
        raise _unreadable(tasks, error, offline) from error
    counts = _questions(outcome)
    return {name: {QUESTIONS: counts[name], **_metrics(values)} for name, values in outcome["results"].items()}


def _brings_its_data(tasks: Sequence[str], manager: Any) -> bool:
    """Whether every task makes its questions itself, as those of the project do, and none is fetched."""
    entries = [manager.task_index.get(task) for task in tasks]
    return all(entry is not None and "custom_dataset" in (entry.cfg or {}) for entry in entries)


def _unreadable(tasks: Sequence[str], error: Exception, offline: bool) -> AccessError:
    """A data set that does not exist, or cannot be fetched; each library has its own kind of error."""
    why = first_line(error)
    names = ", ".join(tasks)
    if not offline:
        return AccessError(f"the data of {names} cannot be read: {why}; check the network and the harness's version")
    dataset = re.search(r"[\w.-]+/[\w.-]+", str(error))
    return AccessError(
        f"the data of {names} ({dataset[0] if dataset else why}) are not in the cache, and the Hub cannot be "
        "reached: check the network, or run this once where there is one"
    )


@contextmanager
def _cache_alone() -> Iterator[None]:
    """Data sets and metrics come from the cache, at once or not at all: their libraries try for a minute, silently."""
    import datasets
    import evaluate

    switches = [
        (constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (evaluate.config, "HF_EVALUATE_OFFLINE"),
    ]
    before = [getattr(module, name) for module, name in switches]
    for module, name in switches:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)


def _questions(outcome: Mapping[str, Any]) -> dict[str, int]:
    """How many questions the metrics of each task are of; a group's are those of its tasks."""
    own = {name: int(count["effective"]) for name, count in outcome["n-samples"].items()}
    groups = outcome.get("group_subtasks") or {}

    def leaves(name: str) -> set[str]:
        return {name} if name in own else {leaf for part in groups.get(name, ()) for leaf in leaves(part)}

    return {name: sum(own[leaf] for leaf in leaves(name)) for name in outcome["results"]}


def _task_manager(tasks: Sequence[str], include_path: Sequence[str | os.PathLike[str]]) -> Any:
    """The index of tasks; the harness's own thousands are read (in seconds) only if one of them is asked for."""
    import lm_eval.tasks

    for path in include_path:
        if not os.path.isdir(path):  # False as well for what no file system can hold
            raise UsageError(f"--include-path {quoted(os.fspath(path))}: no such folder; expected one with YAML tasks")
    folders = [str(LOCAL_TASKS), *(os.fspath(path) for path in include_path)]
    shortcut = [Path(lm_eval.tasks.__file__).parent / PAPER_TASKS[task] for task in tasks if task in PAPER_TASKS]
    folders += [str(folder) for folder in shortcut if folder.is_dir()]
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    if all(manager.match_tasks([task]) for task in tasks):
        return manager
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=True)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UsageError(
            f"unknown task {quoted(unknown[0])}: expected a task of lm-evaluation-harness (lm_eval ls tasks), "
            f"{', '.join(OWN_TASKS)}, or a YAML task under --include-path"
        )
    return manager


def _refuse_unsafe(tasks: Sequence[str], manager: Any) -> None:
    """Tell before anything is downloaded or run which task executes what the model writes."""
    for task in tasks:
        config = getattr(manager.task_index.get(task), "cfg", None) or {}
        if config.get("unsafe_code"):
            raise _unsafe(task)


def _unsafe(task: str) -> UsageError:
    return UsageError(
        f"task {task} runs code that the model writes, on this machine and unguarded: do so in a container and "
        "confirm with --confirm-run-unsafe-code"
    )


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """``exact_match,none`` -> ``exact_match``; a filter's name stays where it tells two apart."""
    result: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        metric, _, filtered = key.partition(",")
        if metric in _NO_METRIC:
            continue
        result[metric if filtered in ("", "none") else f"{metric} ({filtered})"] = float(value)
    return result
