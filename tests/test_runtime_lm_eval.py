"""The harness through our runtime: what it asks for is what the decoder computes, under every prefill policy."""

import importlib.util
import json
import logging
import math
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HTTPError
from torch import Tensor

from wisparse import AccessError, Model, UsageError, load
from wisparse.formats import hub
from wisparse.formats.bundle import verify_bundle
from wisparse.formats.card import read_findings
from wisparse.formats.weight_types import sparse_from
from wisparse.runtime.generation.scheduler import Stats
from wisparse.runtime.tasks import generators

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra `eval`)")

import datasets
import evaluate
import lm_eval
import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from wisparse.runtime import lm_eval as adapter
from wisparse.runtime.lm_eval import PAPER_TASKS, WisparseLM, count_questions, evaluate_tasks, task_manager


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, backend="torch", dtype="float32", max_batch=2, max_seq_len=256) as loaded:
        yield loaded


def ask(lm: WisparseLM, kind: str, *arguments: tuple[Any, ...]) -> Any:
    requests = [Instance(request_type=kind, doc={}, arguments=one, idx=index) for index, one in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


@pytest.fixture
def seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens, first sparse position) of every call of ``logits``."""
    calls: list[tuple[int, int]] = []
    original: Callable[[Tensor, int], Tensor] = model.decoder.logits

    def logits(ids: Tensor, start: int) -> Tensor:
        calls.append((len(ids), start))
        return original(ids, start)

    monkeypatch.setattr(model.decoder, "logits", logits)
    return calls


def by_hand(model: Model, prompt: list[int], answer: list[int], policy: str) -> tuple[float, bool]:
    ids = torch.tensor([*prompt, *answer])
    rows = model.decoder.logits(ids, sparse_from(policy, len(prompt))).double().log_softmax(-1)
    rows, wanted = rows[len(prompt) - 1 : -1], torch.tensor(answer)
    return float(rows.gather(-1, wanted[:, None]).sum()), bool((rows.argmax(-1) == wanted).all())


@pytest.mark.parametrize("policy", ["dense", "half", "all"])
def test_loglikelihood(model: Model, policy: str) -> None:
    add = "def add(a, b):\n    return"
    pairs = [(add, " a + b\n"), (add, " 7"), ("import ", "os"), ("for i in range(", "10):\n        print(i)\n")]
    found = ask(WisparseLM(model, prefill=policy), "loglikelihood", *pairs)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        # The harness hands spaces at the end of a context over to the continuation.
        context, continuation = context.rstrip(" "), context[len(context.rstrip(" ")) :] + continuation
        prompt = model.text.encode(context)
        answer = model.text.encode(context + continuation)[len(prompt) :]
        expected, was_greedy = by_hand(model, prompt, answer, policy)
        assert (value, greedy) == (pytest.approx(expected, rel=1e-4), was_greedy)
    assert len({round(value, 3) for value, _ in found}) == len(pairs)


def test_choices_of_one_question_are_one_pass(model: Model, seen: list[tuple[int, int]]) -> None:
    question = "Q: 1 + 1?\nA:"
    pairs = [(question, f" {choice}") for choice in "abcd"]
    found = ask(WisparseLM(model, prefill="half"), "loglikelihood", *pairs)
    length = len(model.text.encode(question))
    assert seen == [(length, length - length // 2)]
    assert len({value for value, _ in found}) == 4


def test_long_contexts_lose_their_beginning(model: Model, seen: list[tuple[int, int]]) -> None:
    limit = model.max_seq_len
    lm, line = WisparseLM(model, prefill="all"), "x = 1\n"
    assert len(model.text.encode(line)) * 90 > limit
    (long, _), (short, _) = ask(lm, "loglikelihood", (line * 100, "y = 2"), (line * 90, "y = 2"))
    assert seen == [(limit, 1)]  # the same tokens: one pass
    assert long == short
    assert ask(lm, "loglikelihood", ("x", "")) == [(0.0, True)]
    with pytest.raises(UsageError, match=r"\d+ tokens, the context holds 256"):
        ask(lm, "loglikelihood", ("x", line * 100))


@pytest.mark.parametrize("policy", ["dense", "half", "all"])
def test_rolling_scores_every_token_once(model: Model, policy: str, seen: list[tuple[int, int]]) -> None:
    text = "".join(f"value_{i} = {i} * {i}\n" for i in range(60))
    ids = model.text.encode(text)
    limit = model.max_seq_len
    assert limit < len(ids) < 3 * limit
    (found,) = ask(WisparseLM(model, prefill=policy), "loglikelihood_rolling", (text,))
    calls = list(seen)
    prefix = 0  # <|endoftext|>
    expected, done = 0.0, 0
    while done < len(ids):
        wanted = ids[done : done + limit]
        # The last window keeps as much context as fits.
        context = [prefix, *ids][: done + 1][-(limit - len(wanted) + 1) :]
        inputs = [*context, *wanted][:-1]
        rows = model.decoder.logits(torch.tensor(inputs), sparse_from(policy, len(inputs)))[-len(wanted) :]
        expected += float(rows.log_softmax(-1).gather(-1, torch.tensor(wanted)[:, None]).double().sum())
        done += len(wanted)
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(start == sparse_from(policy, length) for length, start in calls)


def test_generate_until_lets_no_slot_wait_for_another_answer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"until": ["\n", "<|endoftext|>"], "max_gen_toks": 40, "do_sample": False, "temperature": 0.0}
    how: dict[str, Any] = {"max_new_tokens": 40, "stop": settings["until"], "prefill": "half", "chat_template": False}
    prompts = [problem.prompt for problem in generators.make_problems(6, 0)] + ["import os, ", "def main"]
    alone = [model.generate(prompt, **how) for prompt in prompts]
    lengths = [len(one.token_ids) for one in alone]
    busy: list[int] = []  # rows of each step
    decode = model.decoder.decode

    def counting(ids: Tensor) -> Tensor:
        busy.append(int((ids >= 0).sum()))
        return decode(ids)

    monkeypatch.setattr(model.decoder, "decode", counting)
    stats = model.engine.scheduler.stats = Stats()
    found = ask(WisparseLM(model, prefill="half"), "generate_until", *((prompt, settings) for prompt in prompts))
    assert found == [one.text for one in alone]
    assert sum(busy) == sum(lengths) - len(lengths) == stats.tokens
    # Two slots: only what runs last may run alone, and that is one answer at most.
    assert 2 * len(busy) - sum(busy) < max(lengths)
    by_index = sum(max(lengths[i : i + 2]) - 1 for i in range(0, len(lengths), 2))
    assert len(busy) < by_index
    assert stats.seconds > 0


def test_settings_prompts_and_texts(model: Model, bundle: Path) -> None:
    lm = WisparseLM(model)
    # Also where generation_config.json has them.
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert lm.generation_options({"until": "\n"}) == {"stop": ["\n"], "max_new_tokens": 255, "temperature": 0.0, **off}
    sampled = lm.generation_options({"do_sample": True, "top_p": 0.9, "max_gen_toks": 5})
    assert sampled == {"stop": [], "max_new_tokens": 5, "temperature": 1.0, **off, "top_p": 0.9}
    assert lm.generation_options({"do_sample": False, "temperature": 0.7})["temperature"] == 0.0
    with pytest.raises(UsageError, match="does not have: num_beams"):
        lm.generation_options({"num_beams": 4})
    prompt = "x = 1\n" * 200 + "y ="
    request = prompt, {"until": ["\n"], "max_gen_toks": 8}
    (text,) = ask(WisparseLM(model, prefill="all"), "generate_until", request)
    end = model.text.encode(prompt)[-(model.max_seq_len - 8) :]
    assert text == model.generate(end, max_new_tokens=8, stop="\n", prefill="all").text
    lm = WisparseLM(model)
    assert lm.eot_token_id == lm.prefix_token_id == 0
    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|user|>hi<|assistant|>"
    assert lm.chat_template(True) == "default"
    assert lm.tok_encode("<|endoftext|><|endoftext|>x")[0:2] != [0, 0]  # written by a template and by the tokenizer
    assert lm.tokenizer_name == bundle.name


def test_the_harness_makes_one_by_name(bundle: Path) -> None:
    asked = f"pretrained={bundle},prefill=half,backend=torch,max_seq_len=64"
    made = get_model("wisparse").create_from_arg_string(asked, {"batch_size": 1, "device": "cpu"})
    assert (made.prefill, made.model.max_seq_len) == ("half", 64)
    made.model.close()
    with pytest.raises(UsageError, match="pretrained=BUNDLE"):
        WisparseLM()
    with pytest.raises(UsageError, match="prefill: expected one of"):
        WisparseLM(made.model, prefill="none")


def answer(model: Model, prompt: str, policy: str) -> str:
    return model.generate(prompt, max_new_tokens=48, stop="\n", prefill=policy, chat_template=False).text


@pytest.fixture
def no_metric_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """The harness asks the Hub for a metric that it does not know, and says as an error that it found none."""
    monkeypatch.setattr(evaluate, "load", lambda name, *_, **__: pytest.fail(f"looks {name} up"))
    yield
    assert "evaluate library" not in capfd.readouterr().err + caplog.text.lower()


def test_interpreter_tasks(model: Model, no_metric_is_looked_up: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "is_reachable", lambda: pytest.fail("asks the Hub"))
    found = evaluate_tasks(model, ["interpreter_lines"], prefill="dense", limit=8)
    right = [answer(model, one.prompt, "dense") == one.answer for one in generators.make_problems(8, 0)]
    error = pytest.approx(statistics.stdev(right) / math.sqrt(8))
    wanted = {"num_questions": 8, "exact_match": sum(right) / 8, "exact_match_stderr": error}
    assert found == {"interpreter_lines": wanted}
    assert 0 < sum(right) < 8
    found = evaluate_tasks(model, ["interpreter_chains"], prefill="all", limit=2)["interpreter_chains"]
    right = []
    for chain in generators.make_chains(generators.NUM_CHAINS, generators.SEED)[:2]:
        for question, wanted in zip(chain.questions(), chain.answers, strict=True):
            right.append(answer(model, chain.session + question, "all") == wanted)
    assert found["num_questions"] == 2
    assert found["lines"] == pytest.approx(sum(right) / len(right))
    assert 0 < found["lines"] < 1
    assert found["exact_match"] == (all(right[: generators.STEPS]) + all(right[generators.STEPS :])) / 2
    assert {"exact_match_stderr", "lines_stderr"} <= set(found)


def test_greedy_loops(model: Model, no_metric_is_looked_up: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(adapter: WisparseLM, requests: list[Instance], **_: Any) -> list[str]:
        wanted = {"until": [], "max_gen_toks": 256, "do_sample": False}
        prompts = generators.make_prompts(generators.NUM_LOOPS, generators.SEED)[:3]
        assert [request.args for request in requests] == [(prompt, wanted) for prompt in prompts]
        return [64 * "round ", "ends.", 64 * "and "]

    monkeypatch.setattr(WisparseLM, "generate_until", answers)
    found = evaluate_tasks(model, ["greedy_loops"], limit=3)["greedy_loops"]
    assert found == {"num_questions": 3, "loops": 2 / 3, "loops_stderr": pytest.approx(1 / 3)}


def test_a_users_own_task(model: Model, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"text": f"x = {i}\n", "choices": [" 1", " 2"], "label": i % 2} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}],
        "doc_to_text": "{{text}}y =", "doc_to_choice": "{{choices}}", "doc_to_target": "label",
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(task))  # JSON is YAML
    found = evaluate_tasks(model, ["mine", "interpreter_lines"], include_path=[tmp_path], limit=2)
    assert set(found) == {"mine", "interpreter_lines"}
    assert found["mine"]["acc"] in (0.0, 0.5, 1.0)
    assert found["mine"]["num_questions"] == 2


def test_the_questions_of_a_group_are_those_of_its_tasks() -> None:
    outcome = {
        "results": {"mmlu": {}, "mmlu_stem": {}, "mmlu_algebra": {}, "mmlu_law": {}},
        "n-samples": {name: {"original": 100, "effective": n} for name, n in (("mmlu_algebra", 3), ("mmlu_law", 4))},
        "group_subtasks": {"mmlu": ["mmlu_stem", "mmlu_law"], "mmlu_stem": ["mmlu_algebra"]},
    }
    assert [count_questions(outcome, name) for name in outcome["results"]] == [7, 3, 3, 4]


Run = Callable[..., tuple[int, str, str]]


def refusal(run: Run, bundle: Path, tasks: str, code: int = 4) -> list[str]:
    ended, _, err = run("eval", bundle, "--tasks", tasks, "--backend", "torch", "--device", "cpu")
    assert ended == code
    return [line for line in err.splitlines() if "compiling" not in line]


@pytest.mark.parametrize(
    "failure", [ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"), HTTPError("[Errno -2] unknown")]
)
def test_no_network_is_a_sentence(failure: Exception, bundle: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        logging.getLogger("huggingface_hub.utils").warning("thrown while requesting HEAD; retrying in 1s [Retry 1/5].")
        raise failure

    monkeypatch.setattr(adapter, "is_reachable", lambda: True)  # it goes away later
    monkeypatch.setattr(lm_eval, "simple_evaluate", unreachable)
    assert refusal(run, bundle, "gsm8k,mmlu") == [
        f"wisparse: the data of gsm8k, mmlu cannot be read: {failure}; check the network and the harness's version"
    ]


@pytest.mark.parametrize("silent", [False, True])
def test_absent_data(silent: bool, bundle: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real harness and the real client: a Hub that refuses, and one that takes the call and says nothing."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(hub, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not silent:
            server.close()
        monkeypatch.setattr(hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        started = time.monotonic()
        *_, last = refusal(run, bundle, "gsm8k")
    assert time.monotonic() - started < 20
    assert last == (
        "wisparse: the data of gsm8k (openai/gsm8k) are not in the cache, and the Hub cannot be reached: check the "
        "network, or run this once where there is one"
    )


def test_without_a_network_the_cache_serves(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def switches() -> list[bool]:
        return [hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE, evaluate.config.HF_EVALUATE_OFFLINE]

    def cached(**_: Any) -> None:
        assert switches() == [True, True, True]
        raise ValueError("Couldn't find cache for openai/gsm8k for config 'main'\nAvailable configs in the cache: []")

    before = switches()
    monkeypatch.setattr(adapter, "is_reachable", lambda: False)
    monkeypatch.setattr(lm_eval, "simple_evaluate", cached)
    with pytest.raises(AccessError, match=r"gsm8k \(openai/gsm8k\) are not in the cache"):
        evaluate_tasks(model, ["gsm8k"])
    assert switches() == before


def test_the_papers_tasks_have_these_names() -> None:
    # Indexed from their own folders in the harness; its whole index takes 10 s and more.
    manager = task_manager(list(PAPER_TASKS), [])
    for task in PAPER_TASKS:
        assert manager.match_tasks([task]) == [task]


def test_what_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = lm_eval.tasks.TaskManager
    asked_for_all = []

    def without_defaults(include_defaults: bool = True, **options: Any) -> Any:
        asked_for_all.append(include_defaults)
        return original(include_defaults=False, **options)  # the whole index takes 10 s and more

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", without_defaults)
    with pytest.raises(UsageError, match="unknown task 'gsm8kk'"):
        evaluate_tasks(model, ["interpreter_lines", "gsm8kk"])
    assert asked_for_all == [False, True]
    with pytest.raises(UsageError, match="--confirm-run-unsafe-code"):
        evaluate_tasks(model, ["humaneval"])
    with pytest.raises(UsageError, match="no such folder"):
        evaluate_tasks(model, ["interpreter_lines"], include_path=[tmp_path / "missing"])


def test_command(bundle: Path, tmp_path: Path, run: Run) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    options = ["--tasks", "interpreter_lines", "--limit", 8, "--prefill", "half", "--backend", "torch"]
    code, out, err = run("eval", copy, *options, "--json", "--save")
    assert code == 0, err
    document = json.loads(out)
    assert document["text"] is None
    (row,) = document["bundles"]
    assert list(row["tasks"]) == ["half", "masks off"]
    dense, sparse = (row["tasks"][name]["interpreter_lines"] for name in ("masks off", "half"))
    assert dense["exact_match"] >= 0.5
    (saved,) = read_findings(json.loads((copy / "conversion_report.json").read_text()))
    assert saved.what == "interpreter_lines, exact_match"
    assert saved.conditions.startswith("n = 8, the last half of each prompt sparse; torch on cpu")
    assert (saved.dense, saved.sparse, saved.sparsity) == (dense["exact_match"], sparse["exact_match"], row["sparsity"])
    assert (saved.dense_stderr, saved.sparse_stderr) == tuple(one["exact_match_stderr"] for one in (dense, sparse))
    assert verify_bundle(copy).notes == ()


def test_the_command_without_the_harness(bundle: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "lm_eval" else find(name))
    assert "pip install lm-eval" in refusal(run, bundle, "gsm8k", code=2)[-1]
