"""generation_config.json: the sampling defaults of Python, terminal and server, and the tokens that it forbids."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from served import Running
from tiny_bundle import resign, write_tiny_model

import wisparse
from wisparse import ContextLengthError, Model, UsageError
from wisparse.converter.preflight import preflight
from wisparse.converter.settings import ConvertSettings
from wisparse.formats.config_fields import sampling_defaults
from wisparse.formats.machine import shown_bytes
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation.logits import LogitsProcessor

FIXED = {"max_new_tokens": 12}


@pytest.fixture
def configured(chat_bundle: Path, tmp_path: Path) -> Callable[..., Path]:
    """The chat bundle with fields added to generation_config.json."""

    def make(**fields: Any) -> Path:
        folder = Path(shutil.copytree(chat_bundle, tmp_path / f"bundle-{len(list(tmp_path.iterdir()))}"))
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_bytes()), **fields}))
        resign(folder)
        return folder

    return make


def load(folder: Path, **more: Any) -> Model:
    return wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256, **more)


SAMPLED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


@pytest.mark.parametrize(("config", "defaults", "ignored"), [
    ({"eos_token_id": 2, "transformers_version": "5.0", "use_cache": True}, {}, ()),
    (SAMPLED, SAMPLED, ()),
    ({**SAMPLED, "do_sample": True}, SAMPLED, ()),
    ({**SAMPLED, "do_sample": False}, {**SAMPLED, "temperature": 0.0}, ()),
    ({"do_sample": True}, {"temperature": 1.0}, ()),
    ({"temperature": "hot", "top_k": -1, "top_p": 0, "suppress_tokens": [True]}, {},
     ("temperature", "top_k", "top_p", "suppress_tokens")),
    ({"suppress_tokens": [5], "bad_words_ids": [[1, 2]]}, {"suppress_tokens": [5], "bad_words_ids": [[1, 2]]}, ()),
    ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "forced_eos_token_id": None}, {}, ()),
    ({"num_beams": 4, "typical_p": 0.9, "no_repeat_ngram_size": 3, "forced_bos_token_id": 1, "sequence_bias": [[[1], 2.0]]},
     {}, ("typical_p", "num_beams", "no_repeat_ngram_size", "forced_bos_token_id", "sequence_bias")),
])  # fmt: skip
def test_fields(config: dict[str, Any], defaults: dict[str, Any], ignored: tuple[str, ...]) -> None:
    found, unsupported = sampling_defaults(config)
    assert (found, sorted(unsupported)) == (defaults, sorted(ignored))


def test_unsupported_fields_are_named_once_at_conversion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_tiny_model(tmp_path / "model")
    (source / "generation_config.json").write_text(json.dumps({"num_beams": 4, "typical_p": 0.9, "top_k": 5}))
    preflight(ConvertSettings(str(source), tmp_path / "out", num_samples=2, seq_len=16, device="cpu"))
    (line,) = (record.getMessage() for record in caplog.records if "generation_config" in record.getMessage())
    assert line == "generation_config.json: not supported, so ignored: num_beams 4, typical_p 0.9"


def test_forbidden_tokens_are_those_of_transformers() -> None:
    from transformers.generation import logits_process as theirs

    generator = torch.Generator().manual_seed(0)
    words = [[3], [1, 2], [2, 1, 0], [1, 1], [4, 4, 4, 5]]
    sampling = SamplingParams(suppress_tokens=[6], begin_suppress_tokens=[1, 7], bad_words_ids=words)
    for _ in range(30):
        tokens = torch.randint(0, 8, (40,), generator=generator).tolist()
        prompt = tokens[: int(torch.randint(1, 6, (), generator=generator))]
        ours = LogitsProcessor(sampling, prompt)
        chain = theirs.LogitsProcessorList([
            theirs.NoBadWordsLogitsProcessor(words), theirs.SuppressTokensLogitsProcessor([6]),
            theirs.SuppressTokensAtBeginLogitsProcessor([1, 7], len(prompt)),
        ])  # fmt: skip
        for end in range(len(prompt), len(tokens)):
            logits = torch.randn(8, generator=generator)
            expected = chain(torch.tensor([tokens[:end]]), logits[None].clone())[0]
            assert ours.active
            ours.process(logits)
            assert torch.equal(logits, expected)
            ours.take(tokens[end])
    assert not SamplingParams(begin_suppress_tokens=[1]).adjusts


@pytest.mark.parametrize("field", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "bad pair"])
def test_forbidden_tokens_are_not_generated(field: str, configured: Callable[..., Path], model: Model) -> None:
    free = model.generate("x = ", **FIXED).token_ids
    values: dict[str, Any] = {"suppress_tokens": [free[0], 10**6], "begin_suppress_tokens": [free[0]]}
    values |= {"bad_words_ids": [[free[0]], [free[1], 10**6]]}
    if field == "bad pair":
        field, values = "bad_words_ids", {"bad_words_ids": [list(free[:2])]}

    def forbidden(tokens: tuple[int, ...]) -> bool:
        match field:
            case "suppress_tokens":
                return free[0] in tokens
            case "begin_suppress_tokens":
                return free[0] == tokens[0]
        word = tuple(values["bad_words_ids"][0])
        return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))

    with load(configured(**{field: values[field]}), max_batch=3, speculative={"method": "ngram"}) as changed:
        answer = changed.generate("x = ", **FIXED)
        assert not forbidden(answer.token_ids)
        assert answer.token_ids != free
        assert tuple(chunk.token_id for chunk in changed.stream("x = ", **FIXED)) == answer.token_ids
        assert changed.generate("x = ", speculative=False, **FIXED).token_ids == answer.token_ids
        for seed in range(3):
            assert not forbidden(changed.generate("x = ", temperature=1.0, seed=seed, **FIXED).token_ids)
        # An argument replaces the file's, also of one request among others.
        own = changed.request(changed.tokenizer.encode("x = "), max_new_tokens=12)
        changed.engine.submit(own, lambda item: None)
        assert changed.generate(["x = "] * 2, **FIXED)[1].token_ids == answer.token_ids
        changed.engine.drive(lambda: own.done)
        assert tuple(own.output_token_ids) == free
        assert changed.generate("x = ", **{field: []}, **FIXED).token_ids == free
    scored = model.generate("x = ", **{field: values[field][:1]}, logprobs=2, max_new_tokens=2)
    assert scored.scores is not None
    assert scored.scores[0].token_id == scored.token_ids[0]


def test_a_grammar_decides_where_it_allows_forbidden_tokens_only(model: Model) -> None:
    ids = [token for token in range(model.config.vocab_size) if b"y" in model.tokenizer.token_bytes(token)]
    assert model.generate("x", grammar='root ::= "yes"', suppress_tokens=ids).text == "yes"
    assert model.generate("x", grammar='root ::= "yes" | "no"', suppress_tokens=ids).text == "no"


@pytest.mark.parametrize(("arguments", "message"), [
    ({"suppress_tokens": 5}, "suppress_tokens: expected a list of token ids"),
    ({"begin_suppress_tokens": [-1]}, "begin_suppress_tokens: expected"),
    ({"suppress_tokens": [10**6]}, "suppress_tokens: expected token ids from 0 to"),
    ({"suppress_tokens": list(range(8192))}, "suppress_tokens: expected token ids that leave one"),
    ({"bad_words_ids": [[]]}, "bad_words_ids: expected a list of lists"),
    ({"bad_words_ids": [5]}, "bad_words_ids: expected a list of lists"),
    ({"bad_words_ids": [[1, 10**6]]}, "bad_words_ids: expected token ids from 0 to"),
    ({"n": 0}, "n: expected"), ({"n": "2"}, "n: expected"), ({"do_sample": True}, "did you mean temperature"),
    ({"num_return_sequences": 2}, r"did you mean n\?"),
])  # fmt: skip
def test_invalid_arguments(arguments: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(UsageError, match=message):
        model.generate("x", **arguments)


def test_several_answers(model: Model) -> None:
    several = model.generate("x = ", n=3, seed=4, **FIXED)
    assert [one.seed for one in several] == [4, 5, 6]
    assert [model.generate("x = ", temperature=1, seed=i, **FIXED).text for i in (4, 5, 6)] == [x.text for x in several]
    assert len(model.generate(["x", "y"], n=2, max_new_tokens=1)) == 4
    with pytest.raises(UsageError, match="use generate for several"):
        model.stream("x", n=2)


def test_python_terminal_and_server_agree(configured: Callable[..., Path], run: Callable[..., Any]) -> None:
    """The defaults, and single values over them, in three ways of asking; the next, without defaults, is greedy."""
    settings = {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.3}
    greedy = {"do_sample": False}
    for fields, own in ((settings, {}), (settings, {"temperature": 0.0}), (greedy, {}), ({}, {}), ({}, {"top_k": 3})):
        folder = configured(**fields)
        with load(folder) as model:
            expected = model.generate("x = ", seed=9, chat_template=False, **FIXED, **own)
            explicit = {"temperature": 0.0, **fields, **own}
            explicit.pop("do_sample", None)
            assert model.generate("x = ", seed=9, chat_template=False, **FIXED, **explicit).text == expected.text
        options = [part for name, value in own.items() for part in (f"--{name.replace('_', '-')}", value)]
        options += ["--seed", 9, "--max-new-tokens", 12, "--backend", "torch", "--dtype", "float32"]
        code, out, err = run("generate", folder, "--prompt", "x = ", "--ignore-chat-template", *options)
        assert (code, out) == (0, expected.text + "\n")
        said = "sampling: temperature 0.7, top_k 40, repetition_penalty 1.3 (generation_config.json)"
        assert (said if fields == settings and not own else "greedy") in err
        with Running(folder) as server:
            status, answer = server.post("/v1/completions", {"prompt": "x = ", "max_tokens": 12, "seed": 9, **own})
            assert (status, answer["choices"][0]["text"]) == (200, expected.text)


@pytest.mark.parametrize("field", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_p"])
def test_the_server_keeps_to_the_file(field: str, configured: Callable[..., Path], model: Model) -> None:
    """Streamed and not, greedy and sampled, completions and chats: as Python, and not as without the field."""
    chat = [{"role": "user", "content": "x"}]
    sampled = {"temperature": 1.5, "seed": 2}
    settings: list[dict[str, Any]] = [sampled] if field == "min_p" else [{}, sampled]
    asked = [(prompt, one) for prompt in ("x = ", chat) for one in settings]
    plain = [model.generate(prompt, chat_template=None, **FIXED, **one) for prompt, one in asked]
    first, second = plain[0].token_ids[:2]
    values = {
        "suppress_tokens": [first],
        "begin_suppress_tokens": [first],
        "bad_words_ids": [[first, second]],
        "min_p": 0.5,
    }
    folder = configured(**{field: values[field]})
    with load(folder) as changed:
        expected = [changed.generate(prompt, **FIXED, **one).text for prompt, one in asked]
    assert expected[0] != plain[0].text
    with Running(folder) as server:
        for (prompt, one), text in zip(asked, expected, strict=True):
            more = {"max_tokens": 12, **(one or {"temperature": openai.omit})}
            for stream in (False, True):
                ask = server.complete if isinstance(prompt, str) else server.chat
                found = ask(prompt, stream=stream, **more)
                choices = [part.choices[0] for part in found] if stream else found.choices
                if isinstance(prompt, str):
                    parts = [choice.text for choice in choices]
                else:
                    parts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
                assert "".join(parts) == text


@pytest.mark.parametrize(("name", "meant"), [
    ("device_map", "device"), ("torch_dtype", "dtype"), ("max_model_len", "max_seq_len"), ("n_ctx", "max_seq_len"),
    ("load_in_4bit", "weights"), ("gpu_memory_utilization", "kv_cache_memory_bytes"), ("sparsty", "sparsity"),
])  # fmt: skip
def test_load_knows_the_names_of_other_libraries(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"load: unknown argument '{name}'; did you mean {meant}\?"):
        wisparse.load("nowhere", **{name: 1})


def test_content_in_parts_is_its_text(model: Model) -> None:
    def ask(content: Any) -> Any:
        return model.generate([{"role": "user", "content": content}], max_new_tokens=3)

    part = {"type": "text", "text": "x ="}
    assert ask([part]).token_ids == ask("x =").token_ids
    assert ask([part, {"type": "text", "text": " 1"}]).prompt_tokens == ask("x = 1").prompt_tokens
    for wrong in ([{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], ["x"]):
        with pytest.raises(UsageError, match=r"prompt\[0\]: content: expected a text, or parts"):
            ask(wrong)


def test_an_empty_prompt_is_not_a_long_one(server: Running, model: Model) -> None:
    status, answer = server.post("/v1/completions", {"prompt": "", "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    with pytest.raises(UsageError, match="no tokens") as raised:
        model.generate("", chat_template=False)
    assert not isinstance(raised.value, ContextLengthError)


def test_sizes_are_never_zero() -> None:
    assert [shown_bytes(size) for size in (0, 1, 4e5, 3e8, 2.34e9)] == ["0 MB", "1 MB", "1 MB", "300 MB", "2.3 GB"]
