"""Misuse from Python: every public argument with what it cannot be gets one sentence that names it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_bundle import write_tiny_bundle, write_tiny_model

import wisparse
from wisparse import Generation, Model, UsageError, WisparseError

HALF = "a\ud800b"  # half of a surrogate pair: a str that no encoding can write
# What no argument is: every one of them is refused by every argument that is not in the table of exceptions.
STRANGE: list[Any] = [
    True, -1, 2**70, 1.5, math.nan, math.inf, "", "2", HALF, "x" * 5000, "a\0b", b"x", bytearray(b"x"), [], {}, [None],
    [HALF], (1.0,), object(), Path("~nobodyhere/x"), Path("x" * 5000), np.array([[1.5]]), np.array([1, 2]),
    np.float32(-0.5), torch.tensor([True]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("misuse")
    write_tiny_model(top / "model")
    return write_tiny_bundle(top / "bundle", top / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return wisparse.load(folder, backend="torch")


Test = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != HALF


def _true(value: Any) -> bool:
    return value is True


def _never(value: Any) -> bool:
    return False


def _place(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, str) and value == "2")


def _within(kind: Any, low: float, high: float) -> Test:
    return lambda value: isinstance(value, kind) and value is not True and low <= value < high


_seed, _penalty = _within(int, 0, 2**63), _within((int, float, np.floating), -2, 2)
# Argument of generate -> what of STRANGE it takes all the same.
GENERATE: dict[str, Test] = {
    "max_new_tokens": _within(int, 1, math.inf),
    "temperature": _within(float, 0, 10),
    "top_k": _seed,
    "seed": _seed,
    "repetition_penalty": _within(float, 1e-9, 100),
    "frequency_penalty": _penalty,
    "presence_penalty": _penalty,
    "logit_bias": lambda value: type(value) is dict,
    "json_schema": lambda value: type(value) is dict,
    "stop": lambda value: (_text(value) and value != "") or (type(value) is list and value == []),
    "system_prompt": lambda value: _text(value) and len(value) < 100,  # else longer than the context
    "chat_template": _true,
    "measure_sparsity": _true,
    **dict.fromkeys(("top_p", "min_p", "logprobs", "grammar", "prefill"), _never),
}


def test_an_unknown_argument_is_named_with_the_nearest_one(model: Model) -> None:
    for name, advice in (
        ("max_tokens", "did you mean max_new_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("stop_strings", "did you mean stop?"),
        ("flavour", "known are max_new_tokens, temperature, "),
    ):
        for call in (model.generate, model.stream):
            with pytest.raises(UsageError) as caught:
                call("hello", **{name: 6})
            assert str(caught.value).startswith(f"generate: unknown argument {name!r}; {advice}")


LOAD = ("bundle", "device", "dtype", "backend", "weights", "prefill", "max_seq_len", "max_batch", "kv_cache_dtype")


@pytest.mark.parametrize("name", GENERATE)
def test_generate_refuses_what_an_argument_cannot_be(model: Model, name: str) -> None:
    for value in STRANGE:
        arguments = {"max_new_tokens": 1, name: value}
        if GENERATE[name](value):
            assert isinstance(model.generate("hello", **arguments), Generation)
            continue
        for call in (model.generate, model.stream):  # a stream's arguments are checked before its first token
            named = "context" if name == "system_prompt" and _text(value) else name
            with pytest.raises(UsageError, match=named):
                call("hello", **arguments)


@pytest.mark.parametrize("name", LOAD)
def test_load_refuses_what_an_argument_cannot_be(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for value in [*STRANGE, *([] if name in ("max_seq_len", "max_batch", "weights") else [None])]:
        given = {"bundle": folder, name: value}
        # A path that leads nowhere is no access (4); a value that is no path is misuse (2).
        expected = WisparseError if name == "bundle" and isinstance(value, (str, Path)) else UsageError
        with pytest.raises(expected, match=None if name == "bundle" else name):
            wisparse.load(given.pop("bundle"), **given)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([[1, 2], 3], "prompt: expected one kind of thing in a list, found prompts and then 3"),
        (["a", 1], "prompt: expected one kind of thing in a list, found prompts and then 1"),
        ([1, "a"], "prompt: expected one kind of thing in a list, found ids and then 'a'"),
        ([None], "prompt[0]: expected a text, messages with a role, token ids, or a list of these, found None"),
        (["a", None], "prompt[1]: expected a text"),
        *((one, "prompt[0]: expected a text") for one in ([1.0], [True], np.array([1.0]), np.array([True]), [[]])),
        ([[1, True]], "prompt[0][1]: expected a text"),
        (torch.tensor([[1.5]]), "prompt[0][0]: expected a text"),
        (np.zeros((1, 2, 3), dtype=int), "prompt[0]: expected a text, messages or token ids, found a list of lists"),
        *((one, "prompt: expected a text") for one in (np.int64(3), None, b"text")),
        ([], "found an empty list"),
        ([["a"]], "prompt[0]: expected a text, messages or token ids, found a list of lists"),
        (HALF, "prompt: expected text, found half of a surrogate pair in 'a\\ud800b'"),
        (["a", HALF], "prompt[1]: expected text, found half of a surrogate pair"),
        ([-1], "prompt[0]: expected an integer, 0 or more, found -1"),
        ([300], "prompt: expected token ids from 0 to 257, found 300"),
        ([2**70], "prompt: expected token ids from 0 to 257, found"),
        ({"role": "user", "content": "x"}, "found one message: put it into a list"),
        ([{"content": "x"}], "prompt[0]: expected a message with a role (str) and a content, found {'content': 'x'}"),
        ([{"role": "user"}], "prompt[0]: content: expected a text (str), found None"),
        ([{"role": "user", "content": 5}], "prompt[0]: content: expected a text (str), found 5"),
        ([{"role": "user", "content": HALF}], "prompt[0]: content: expected text, found half of a surrogate pair"),
    ],
    ids=repr,
)
def test_what_is_no_prompt(model: Model, prompt: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        model.generate(prompt, max_new_tokens=1)
    assert sentence in str(caught.value)


def test_integers_and_numbers_of_any_kind(model: Model) -> None:
    def answer(prompt: Any) -> Any:
        return model.generate(prompt, max_new_tokens=3)

    expected = answer([1, 2]).token_ids
    vectors = [(1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], dtype=np.uint8), torch.tensor([1, 2])]
    for prompt in [*vectors, [np.int64(1), 2], [torch.tensor(1), np.int32(2)]]:
        assert answer(prompt).token_ids == expected
    for prompts in [np.array([[1, 2], [1, 2]]), torch.tensor([[1, 2]]), [np.array([1, 2])], [[1, 2], np.array([1, 2])]]:
        assert {one.token_ids for one in answer(prompts)} == {expected}
    assert len({model.generate("hello", max_new_tokens=4, stop=stop).text for stop in (None, (), [])}) == 1
    plain = model.generate("hello", max_new_tokens=4, temperature=0.5, top_k=7, top_p=0.5, seed=3)
    numbers = {"temperature": np.float32(0.5), "top_k": np.int16(7), "top_p": np.float64(0.5), "seed": np.uint32(3)}
    numpy = model.generate("hello", max_new_tokens=np.int64(4), **numbers)
    assert numpy.token_ids == plain.token_ids
    json.dumps(numpy.seed)  # as Python's own


# Argument of convert -> what of STRANGE it takes all the same; a path that leads nowhere has a sentence of its own.
CONVERT: dict[str, Test] = {
    **dict.fromkeys(("sparsity", "default", "min_top1", "method", "search", "num_generations"), _never),
    **dict.fromkeys(("num_offspring", "num_samples", "seq_len", "seed", "dtype"), _never),
    **dict.fromkeys(("device", "revision", "weights"), _never),
    **dict.fromkeys(("resume", "overwrite", "progress"), _true),
    **dict.fromkeys(("model", "output_dir", "calibration", "work_dir"), _place),
    "max_kl": _within(float, 0, math.inf),
    "max_shard_size": lambda value: type(value) in (int, str) and str(value) in ("2", str(2**70)),
}
_MAY_BE_NONE = ("output_dir", "num_generations", "num_offspring", "seq_len", "revision", "work_dir", "progress")
_MAY_BE_NONE += ("sparsity", "default", "max_kl", "min_top1")


@pytest.mark.parametrize("name", CONVERT)
def test_convert_refuses_what_an_argument_cannot_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is converted: what fits stops at the model, which is an empty folder (or at a place that is none)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for value in [*STRANGE, None]:
        fits = name in _MAY_BE_NONE if value is None else CONVERT[name](value)
        given = {"model": "empty", "output_dir": "out", name: value}
        with pytest.raises(WisparseError) as caught:
            wisparse.convert(given.pop("model"), **given)
        assert isinstance(caught.value, UsageError) != (fits and "x" * 50 not in str(value)), repr(value)
        assert len(str(caught.value)) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
