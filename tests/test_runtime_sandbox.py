"""A stranger's template or tokenizer in a process apart: what ends it, what it sees, and that it always answers."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

from wisparse.formats import sandbox
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import BundleError, ContextLengthError, UsageError, printable
from wisparse.formats.sandbox import ChatTemplate, Worker, WorkerError
from wisparse.runtime.backends import load
from wisparse.runtime.text.text import Text, check_text
from wisparse.runtime.text.tokenizer import is_plain, read_tokenizer

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = json.loads((ROOT / "examples" / "pycode-llama-6m" / "tokenizer.json").read_text())
HELLO = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi ü \U0001f600"}]


def process_of(template: ChatTemplate) -> subprocess.Popen[bytes]:
    process = template._worker._process
    assert process is not None
    return process


def test_processor_time_ends_what_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 0.3)
    monkeypatch.setattr(sandbox, "_PATIENCE", 100)  # not the clock, which comes after 30 seconds
    started = time.monotonic()
    with pytest.raises(BundleError, match=r"fails \(it takes more than 0\.3 seconds\)"):
        ChatTemplate(ENDLESS, {}).render(MESSAGES)
    assert time.monotonic() - started < 25


@pytest.mark.skipif(sys.platform == "win32", reason="only the clock counts there")
def test_a_busy_machine_is_no_fault_of_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(HELLO, {})
    monkeypatch.setattr(sandbox, "_SECONDS", 0.2)
    process = process_of(template).pid
    os.kill(process, signal.SIGSTOP)  # others have the processors for five times what it may take
    later = threading.Timer(1.0, os.kill, (process, signal.SIGCONT))
    later.start()
    assert template.render(MESSAGES) == "hi ü \U0001f600"
    later.join()


def test_the_clock_ends_what_hangs_without_working(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(HELLO, {})
    monkeypatch.setattr(sandbox, "_SECONDS", 0.2)
    monkeypatch.setattr(sandbox, "_PATIENCE", 3)
    os.kill(process_of(template).pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(BundleError, match=r"it takes more than 0\.2 seconds"):
        template.render(MESSAGES)
    assert 0.5 < time.monotonic() - started < 5
    monkeypatch.undo()
    assert template.render(MESSAGES) == "hi ü \U0001f600"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="macOS has no limit of address space")
def test_memory_is_limited() -> None:
    with pytest.raises(BundleError, match=r"fails \(it needs more than 512 MB of memory\)"):
        ChatTemplate("{{ messages | length * 10 ** 9 * 'x' }}", {}).render(MESSAGES)


def test_output_is_limited_by_what_was_given() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", {})
    with pytest.raises(BundleError, match=r"fails \(it makes more than 200,\d+ characters\)"):
        template.render(MESSAGES)
    long = "x" * 1_000_000
    assert ChatTemplate(HELLO, {}).render([{"role": "user", "content": long}]) == long


def test_a_strangers_long_token_gives_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 0.3)
    long = {"bos_token": "x" * 5_000_000}
    assert ChatTemplate("{{ bos_token | length }}", long).render(MESSAGES) == "5000000"
    with pytest.raises(BundleError, match=r"it makes more than 200,\d+ characters"):
        ChatTemplate("{{ bos_token }}", long).render(MESSAGES)
    with pytest.raises(BundleError, match=r"it takes more than 0\.3 seconds"):
        ChatTemplate(ENDLESS, long).render(MESSAGES)


def test_it_answers_again_after_it_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}" + HELLO, {})
    monkeypatch.setattr(sandbox, "_SECONDS", 0.3)
    first = process_of(template)
    with pytest.raises(BundleError):
        template.render(MESSAGES * 2)
    assert first.returncode is not None  # waited for: no zombie
    assert template.render(MESSAGES) == "hi ü \U0001f600"
    process_of(template).kill()
    process_of(template).wait()
    assert template.render(MESSAGES) == "hi ü \U0001f600"


# Some hundredths of a second of processor time.
BUSY = "{% for a in range(9) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def _seconds(template: ChatTemplate) -> float:
    """What one rendering takes; the first one also imports."""
    template.render(MESSAGES)
    with sandbox.together():
        allowance = sandbox._allowance.get()
        assert allowance is not None
        before = allowance.left
        template.render(MESSAGES)
        return before - allowance.left


def test_many_questions_that_each_take_less_than_they_may_are_ended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(BUSY + HELLO, {})
    monkeypatch.setattr(sandbox, "_SECONDS_TOGETHER", 3.5 * _seconds(template))
    rendered, refusal = 0, ""
    with sandbox.together():
        while not refusal and rendered < 50:
            try:
                template.render(MESSAGES)
                rendered += 1
            except BundleError as error:
                refusal = str(error)
        assert re.search(r"fails \(it takes more than \d\.\d seconds", refusal)
        with sandbox.together(), pytest.raises(BundleError, match="for a few questions together"):
            template.render(MESSAGES)  # one within another is the same
        with pytest.raises(BundleError, match="for a few questions together"):
            ChatTemplate(HELLO, {})  # nor does another file of the bundle get more
    assert 1 <= rendered <= 8
    # Alone each of them is within its limits, as often as a user asks.
    assert [template.render(MESSAGES) for _ in range(3 * rendered)] == ["hi ü \U0001f600"] * 3 * rendered


@pytest.mark.parametrize("opened", [load, lambda folder: check_text(Bundle.open(folder))], ids=["load", "verify"])
def test_opening_a_bundle_is_one_allowance(
    opened: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that takes its time at each of the questions that a program asks on its own account."""
    model = write_tiny_model(tmp_path / "model")
    document = json.loads((model / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}  # so that it runs apart
    (model / "tokenizer.json").write_text(json.dumps(document))
    folder = write_tiny_bundle(tmp_path / "bundle", model)
    opened(folder)
    monkeypatch.setattr(sandbox, "_SECONDS_TOGETHER", 0.0)
    with pytest.raises(BundleError, match="together"):
        opened(folder)


def test_threads_take_turns() -> None:
    template = ChatTemplate(HELLO, {})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(200)))
    assert found == [str(i) for i in range(200)]


def test_nothing_is_left_when_it_is_no_longer_needed() -> None:
    template = ChatTemplate(HELLO, {})
    process = process_of(template)
    assert process.poll() is None
    del template
    gc.collect()
    assert process.returncode is not None


def test_a_forked_child_has_its_own() -> None:
    template = ChatTemplate(HELLO, {})
    child = os.fork()
    if child == 0:
        os._exit(0 if template.render(MESSAGES) == "hi ü \U0001f600" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process_of(template).poll() is None
    assert template.render(MESSAGES) == "hi ü \U0001f600"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_it_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    template = ChatTemplate(HELLO, {})
    template.render(MESSAGES)
    assert b"hf_secret" not in Path(f"/proc/{process_of(template).pid}/environ").read_bytes()


SCRIPT = """
import sys
from wisparse.formats.sandbox import ChatTemplate
text = ChatTemplate({source!r}, {{}}).render([{{"role": "user", "content": "hi"}}])
with open(sys.argv[1], "w") as file:
    file.write(text)
"""


@pytest.mark.parametrize("closed", ["", "<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_script_without_a_guard_and_with_closed_standard_files(closed: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(source=HELLO))
    command = f'exec "$0" "$1" "$2" {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, str(script), str(tmp_path / "out")], timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "out").read_text() == "hi"


def test_messages_are_what_json_can_hold() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": ("a", 1)}]) == "['a', 1]"
    with pytest.raises(UsageError, match="messages: expected texts, numbers, lists and mappings, found object"):
        template.render([{"role": "user", "content": object()}])


def test_what_cannot_be_made_says_why() -> None:
    with pytest.raises(WorkerError, match="TemplateSyntaxError: "):
        Worker("template", 512, source="{% if", variables={})


# Tokenizers.


def changed(**parts: Any) -> dict[str, Any]:
    return copy.deepcopy(EXAMPLE) | parts


def doubling(letter: str) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": letter}, "content": letter * 2}] * 30


def split(pattern: str) -> dict[str, Any]:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [part, level]}


def repeating(inputs: int, specials: int = 0) -> dict[str, Any]:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    single = [sequence] * inputs + [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}] * min(specials, 1000)
    token = {"id": "<|user|>", "ids": [1] * (specials // 1000), "tokens": ["<|user|>"] * (specials // 1000)}
    pair = [sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"<|user|>": token}}


BOMBS: dict[str, dict[str, Any]] = {
    "normalizer": changed(normalizer={"type": "Sequence", "normalizers": doubling("1")}),
    "decoder": changed(decoder={"type": "Sequence", "decoders": [*doubling("1")]}),
    "nested": changed(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": doubling("1")[:6]}] * 5}
    ),
    "backtracking": changed(pre_tokenizer=split("(1|11)+$")),
    "post-processor": changed(post_processor=repeating(1, 1_000_000)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_tokenizer_that_would_never_be_done_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 0.7)
    monkeypatch.setattr(sandbox, "_MOST_SECONDS_HELD", 1.5)
    started = time.monotonic()
    message = r"tokenizer\.json: the tokenizers library cannot run it: (it (takes|needs|makes)|Onig: .*limit)"
    with pytest.raises(BundleError, match=message):
        Text(json.dumps(BOMBS[kind]).encode(), {}, None, 8192).encode("1" * 60 + "!")
    assert time.monotonic() - started < 30


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA2 = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    },
    "pre_tokenizer": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}
START = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}},
}
ORDINARY: dict[str, dict[str, Any]] = {
    "example": EXAMPLE,
    "llama 3": changed(pre_tokenizer=split(LLAMA3), post_processor={"type": "Sequence", "processors": [START]}),
    "qwen": changed(pre_tokenizer=split(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")), normalizer={"type": "NFC"}),
    "llama 2": changed(**LLAMA2, post_processor=START),
}
UNUSUAL: dict[str, dict[str, Any]] = {
    "pattern": changed(pre_tokenizer=split(r"\w+|[^\w\s]+|\s")),
    "strip": changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "suffix": changed(model=EXAMPLE["model"] | {"end_of_word_suffix": "x" * 100}),
    "words": changed(
        model={"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}, post_processor=None, added_tokens=[]
    ),
}


@pytest.mark.parametrize("name", [*ORDINARY, *UNUSUAL])
def test_ordinary_tokenizers_need_no_process_and_all_give_the_librarys_ids(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {**ORDINARY, **UNUSUAL}[name]
    assert is_plain(document) == (name in ORDINARY)
    data = json.dumps(document).encode()
    library = tokenizers.Tokenizer.from_buffer(data)
    if name in ORDINARY:
        monkeypatch.setattr(subprocess, "Popen", None)
    found = read_tokenizer(data)
    for text in ("def f(x):\n    return 'ü' + 1", "", "  <|user|> 1234 \U0001f600"):
        for special in (True, False):
            ids = found.encode(text, special)
            assert ids == library.encode(text, add_special_tokens=special).ids
            assert found.decode(ids, True) == library.decode(ids)
    assert found.token_to_id("a") == library.token_to_id("a")
    assert found.token_to_id("nowhere") is None


UNBOUNDED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "long token": lambda d: d["model"]["vocab"].update({"x" * 513: 8192}),
    "prefix": lambda d: d["model"].update(continuing_subword_prefix="##"),
    "no model type": lambda d: d["model"].pop("type"),
    "growth": lambda d: d.update(normalizer={"type": "Sequence", "normalizers": doubling("1")[:7]}),
    "removal": lambda d: d.update(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": ""}),
    "nesting": lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [split(LLAMA3)]}),
    "many": lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 17}),
    "byte level": lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 4}),
    "twice": lambda d: d.update(post_processor=repeating(2)),
    "thousands of specials": lambda d: d.update(post_processor=repeating(1, 2000)),
    "unknown special": lambda d: d.update(post_processor=START | {"special_tokens": {}}),
    "empty added": lambda d: d["added_tokens"].append({"id": 8192, "content": ""}),
    "stripped": lambda d: d.update(decoder={"type": "Strip", "content": " ", "start": 0, "stop": 9}),
    "no object": lambda d: d.update(normalizer=[1]),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_what_is_not_known_to_be_bounded_is_not_plain(kind: str) -> None:
    document = changed()
    assert is_plain(document)
    UNBOUNDED[kind](document)
    assert not is_plain(document)


def test_a_prompt_that_cannot_fit_is_not_tokenised_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(json.dumps(EXAMPLE).encode(), {}, None, 8192)
    plain, seen = text._tokenizer.encode, []
    monkeypatch.setattr(text._tokenizer, "encode", lambda some, special: seen.append(len(some)) or plain(some, special))
    with pytest.raises(ContextLengthError, match=r"has 10,000,000 characters, the first .* the context holds 256:"):
        text.encode("def f(x): " * 1_000_000, most=256)
    assert sum(seen) < 100_000
    # What may still fit is tokenised, and all of it: 300,000 spaces are few tokens.
    spaces = " " * 300_000
    assert text.encode(spaces, most=20_000) == text.encode(spaces)


def test_a_model_does_not_tokenise_what_cannot_fit(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", write_tiny_model(tmp_path / "model", tiny_config("llama")))
    with load(bundle, device="cpu", backend="torch", max_seq_len=32) as model:
        for prompt in ("def f(x): " * 1_000_000, [{"role": "user", "content": "def f(x): " * 1_000_000}]):
            with pytest.raises(ContextLengthError, match=r"has 10,\d+,\d+ characters, the first .* holds 32:"):
                model.generate(prompt)


def test_printable_text() -> None:
    assert printable("a b\x1b[2J\n\u202e\ud800\x9b é\U0001f600") == "a b\ufffd[2J\ufffd\ufffd\ufffd\ufffd é\U0001f600"
