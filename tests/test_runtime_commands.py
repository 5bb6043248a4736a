"""``wisparse generate`` and ``wisparse chat``, as a user runs them."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import resign

import wisparse
from wisparse.commands.generate import Batch
from wisparse.formats.errors import UsageError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run: Run, bundle: Path) -> Run:
    return lambda verb, *args, bundle=bundle: run(verb, bundle, *args)


def test_generate_prints_a_footer_or_json(bundle: Path, run: Run) -> None:
    code, out, err = run("generate", "--prompt", ">>> 12 + 30", "--max-new-tokens", 20, "--backend", "torch")
    expected = wisparse.load(bundle, backend="torch").generate(">>> 12 + 30", max_new_tokens=20)
    assert (code, out) == (0, expected.text + "\n")
    parts = "prompt 4 tokens", "generation 20 tokens", "tok/s", "peak memory", "realised sparsity", "torch on cpu"
    assert [part for part in parts if part not in err] == []
    assert len(err.splitlines()) == 1
    settings = ("--temperature", 0.8, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5)
    command = ("generate", "--prompt", "def f(", "--max-new-tokens", 9, "--json", *settings)
    code, out, _ = run(*command)
    document = json.loads(out)
    assert code == 0
    found = [document[name] for name in ("seed", "prompt_tokens", "finish_reason")]
    assert (found, len(document["token_ids"])) == ([5, 3, "length"], 9)
    assert 0 < document["realised_sparsity"] < 1
    assert json.loads(run(*command)[1])["text"] == document["text"]


def test_generate_reads_a_pipe_or_a_file(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt").write_text("x = 1\n")
    direct = run("generate", "--prompt", "x = 1\n", "--max-new-tokens", 5)[1]
    for option in ([], ["--prompt", "-"], ["--prompt-file", tmp_path / "prompt"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("x = 1\n"))
        assert run("generate", "--max-new-tokens", 5, *option)[1] == direct


def test_the_chat_template_on_request(run: Run) -> None:
    def tokens(*options: object) -> int:
        _, out, _ = run("generate", "--prompt", "x = 1", "--json", "--max-new-tokens", 1, *options)
        return json.loads(out)["prompt_tokens"]

    plain = tokens()
    assert tokens("--ignore-chat-template") == plain
    assert tokens("--chat-template") == tokens("--chat-template", "default") == plain + 2
    for arguments, message in (
        (("rag",), "templates ('default'), found 'rag'"),
        (("default", "--ignore-chat-template"), "found both"),
    ):
        for command in ("generate", "chat")[: 2 if arguments == ("rag",) else 1]:
            code, _, err = run(
                command, *(("--prompt", "x") if command == "generate" else ()), "--chat-template", *arguments
            )
            assert (code, message in err) == (2, True), (command, err)
    assert tokens("--system-prompt", "Be brief.") > plain + 2
    _, out, _ = run("generate", "--prompt", ">>> 12 + 30\n", "--stop", ">>>", "--prefill", "all")
    assert ">>>" not in out


def test_generate_refuses_in_one_sentence(bundle: Path, example_model: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    for arguments, code, message in (
        (("--prompt", "x = 1\n" * 2000), 2, "the context holds 2048"),
        (("--prompt", "x", "--max-seq-len", 5000), 2, "--max-seq-len: expected"),
        (("--prompt", "x", "--top-p", 0), 2, "top-p"),
        (("--prompt", "x", "--device", "cuda:77"), 2, "torch sees"),
        (("--prompt", "x", "--backend", "triton", "--device", "cpu"), 2, "triton cannot run on cpu"),
        (("--prompt", ""), 2, "no tokens"),
        (("--prompt-file", tmp_path / "binary"), 2, "not text in UTF-8"),
        (("--prompt", "a", "--prompt-file", tmp_path / "binary"), 2, "found both"),
    ):
        found, out, err = run("generate", *arguments)
        assert (found, out, message in err, "Traceback" in err) == (code, "", True, False), err
    assert run("generate", "--prompt", "x", bundle=tmp_path / "nowhere")[0] == 4
    code, _, err = run("generate", "--prompt", "x", bundle=example_model)
    assert (code, "expected a bundle" in err) == (6, True)


def test_chat_keeps_and_forgets_the_conversation(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def chat(text: str, *options: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return run("chat", "--max-new-tokens", 4, *options)

    code, out, err = chat("one\n\ntwo\n/reset\none\n/exit\nnever\n")
    assert code == 0
    answers = [line for line in err.splitlines() if line.startswith("prompt ")]
    first, second, third = (int(line.split()[1]) for line in answers)
    assert first == third < second
    assert "forgotten" in err
    assert "never" not in out
    # What was read of the conversation is not read again, but for the last piece and the answer.
    code, _, err = chat(f"{'x = 1 ' * 100}\ntwo\n", "--backend", "torch")
    assert code == 0
    first, second = (line.split(" tok/s")[0] for line in err.splitlines() if line.startswith("prompt "))
    assert "cached" not in first
    assert f"({int(first.split()[1]) // 128 * 128} cached)" in second
    # A conversation that outgrows the context is no end of the program.
    code, _, err = chat(f"{'x ' * 60}\none\n", "--max-seq-len", 32)
    assert code == 0
    assert "/reset" in err.splitlines()[1]
    assert err.count("prompt ") >= 1
    assert chat("one\n", "--system-prompt", "Be brief.")[0] == 0
    # A first message of many lines, from a file; the conversation goes on from there.
    (tmp_path / "first").write_text("one\n\ntwo\n")
    code, _, err = chat("three\n", "--prompt-file", tmp_path / "first")
    assert code == 0
    first, second = (int(line.split()[1]) for line in err.splitlines() if line.startswith("prompt "))
    assert first < second
    (tmp_path / "first").write_text(" \n")
    assert chat("", "--prompt-file", tmp_path / "first")[::2] == (
        2, "wisparse: --prompt-file: expected a message, found an empty file\n"
    )  # fmt: skip


def test_a_chat_goes_on_after_a_restart(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def chat(text: str, *options: object, session: Path = tmp_path / "new" / "talk") -> tuple[str, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code, out, err = run("chat", "--max-new-tokens", 4, "--backend", "torch", "--session", session, *options)
        assert code == 0
        return out, err, next((line.split(" tok/s")[0] for line in err.splitlines() if line.startswith("prompt ")), "")

    long, other = f"{'x = 1 ' * 100}\n", tmp_path / "other"
    whole = chat(f"{long}two\nthree\n", session=other)[0]
    parts = [chat(text) for text in (long, "two\n", "three\n")]
    assert "".join(out for out, _, _ in parts) == whole
    first = int(parts[0][2].split()[1])
    assert "cached" not in parts[0][2]
    assert f"({first // 128 * 128} cached)" in parts[1][2]
    assert "4 messages of " in parts[2][1]
    # Keys of another type are read again; what is no conversation is ignored and left as it is.
    _, err, answer = chat("four\n", "--kv-cache-dtype", "int8")
    assert "the conversation is read again: talk: of another model, back end or type of weights" in err
    assert "cached" not in answer
    cut = tmp_path / "cut"
    cut.write_bytes(other.read_bytes()[:-1])
    (tmp_path / "notes").write_text("mine")
    for path in (cut, tmp_path / "notes"):
        before = path.read_bytes()
        assert f"--session: ignored, and will not be written: {path.name}: " in chat("one\n", session=path)[1]
        assert path.read_bytes() == before
    # Without a message there is nothing to keep.
    assert "6 messages of " in chat("/reset\n", session=other)[1]
    assert not other.exists()
    chat("", session=other)
    assert not other.exists()


def test_commands_and_long_messages_of_a_chat(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def chat(text: str, *options: object) -> tuple[str, list[dict[str, str]]]:
        file = tmp_path / f"saved-{len(list(tmp_path.iterdir()))}"
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}/save {file}\n"))
        code, _, err = run("chat", "--max-new-tokens", 4, "--backend", "torch", *options)
        assert code == 0, err
        return err, json.loads(file.read_text())["messages"]

    def typed(text: str) -> list[str]:
        return [one["content"] for one in chat(text)[1] if one["role"] == "user"]

    quoted = '"""x = 1\n\n/help\n"""\n', '"""\nx = 1\n\n/help"""\n'
    assert [typed(text) for text in quoted] == [["x = 1\n\n/help\n".rstrip("\n")], ["x = 1\n\n/help"]]
    assert typed('one \\\ntwo\\\n\n"""three"""\n') == ["one \ntwo", "three"]
    assert typed("/usr/bin fails\n/* a */\n // b\n /help\n") == ["/usr/bin fails", "/* a */", "// b", "/help"]
    # Of commands, mistyped ones among them, the model sees nothing.
    err, messages = chat("/hlp\n/Reset now\n/\n/?\n/regen\n/regen hot\n/save\n/system\n")
    assert messages == []
    for words in ("/hlp; did you mean /help?", "unknown command /Reset", "/regen [TEMPERATURE]", "there is no answer yet",
                  "expected a file", "no system message"):  # fmt: skip
        assert words in err, words
    err, messages = chat("/system Be brief.\none\n/regen\n/regen hot\n/regen 0.9\n", "--seed", 3)
    assert [one["role"] for one in messages] == ["system", "user", "assistant"]
    assert "greedy decoding gives the same answer again" in err
    assert "expected a temperature, found 'hot'" in err
    assert [line.split(" | ")[3] for line in err.splitlines() if line.startswith("prompt")] == [
        "sampling: greedy", "sampling: temperature 0.9"
    ]  # fmt: skip
    assert [one["role"] for one in chat("/system a\n/system off\none\n")[1]] == ["user", "assistant"]
    once, twice = (chat(f"one\n{again}\n", "--seed", 3, "--temperature", 9)[1] for again in ("", "/regen"))
    assert once[1]["content"] != twice[1]["content"]
    # Several answers: the chat goes on with the first. A file is never written over.
    (tmp_path / "kept").write_text("mine")
    err, messages = chat(f"one\n/save {tmp_path / 'kept'}\n/save {tmp_path / 'no' / 'file'}\n", "--n", 2, "--seed", 3)
    assert len(messages) == 2
    assert "sampling: temperature 1" in err
    assert (tmp_path / "kept").read_text() == "mine"
    assert "No such file" in err


def test_options_of_the_answer(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    (tmp_path / "schema").write_text(json.dumps(schema))
    asked = ("--max-new-tokens", 40, "--backend", "torch")
    for given in (json.dumps(schema), tmp_path / "schema", f"@{tmp_path / 'schema'}"):
        code, out, err = run("generate", "--prompt", "x = ", *asked, "--json-schema", given)
        assert (code, list(json.loads(out))) == (0, ["a"]), err
    assert run("generate", "--prompt", "x = ", *asked, "--grammar", 'root ::= "yes"')[1] == "yes\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert run("chat", *asked, "--grammar", 'root ::= "yes"')[1] == "yes\n"
    code, out, err = run("generate", "--prompt", "x = ", "--max-new-tokens", 3, "--logprobs", 2)
    first = err.splitlines()[0]
    assert (code, len(err.splitlines())) == (0, 4), err
    assert re.fullmatch(r"'.*' +-\d\.\d{3}  '.*' \d+\.\d%, '.*' \d+\.\d%", first), first
    code, out, err = run("generate", "--prompt", "x = ", "--max-new-tokens", 3, "--n", 2, "--seed", 1, "--json")
    assert [one["seed"] for one in json.loads(out)] == [1, 2]
    assert {one["sampling"] for one in json.loads(out)} == {"temperature 1"}
    code, out, err = run("generate", "--prompt", "x = ", "--max-new-tokens", 3, "--n", 2)
    assert (code, out.count("--- 1 of 2 ---"), out.count("--- 2 of 2 ---")) == (0, 1, 1)
    for options, words in (
        (("--json-schema", "{"), "--json-schema: "), (("--grammar", f"@{tmp_path / 'none'}"), "none"),
        (("--repetition-penalty", 0), "--repetition-penalty"), (("--n", 0), "--n"),
        (("--json-schema", "{}", "--grammar", "x"), "found both"),
    ):  # fmt: skip
        code, out, err = run("generate", "--prompt", "x", *options)
        assert (code, out, words in err, "Traceback" in err) == (2, "", True, False), err


def test_chat_refuses_settings_before_the_first_message(run: Run) -> None:
    for setting in ("temperature=nan", "temperature=inf", "top-p=nan", "min-p=nan", "stop="):
        code, out, err = run("chat", f"--{setting}")
        assert (code, out) == (2, "")
        assert err.startswith(f"wisparse: --{setting.partition('=')[0]}: expected ")


def start(*args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", "wisparse", *map(str, args)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # A suite started in the background has SIGINT ignored, and children inherit that.
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, preexec_fn=interruptible, **pipes)


def test_interrupts_and_a_closed_pipe(bundle: Path) -> None:
    command = "generate", bundle, "--prompt", "x", "--max-new-tokens", 2000, "--backend", "torch"
    process = start(*command)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, b"wisparse: interrupted")
    process = start(*command)
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(60)
    assert b"Traceback" not in err
    # An interrupt stops an answer and not the chat.
    process = start("chat", bundle, "--max-new-tokens", 1500, "--backend", "torch")
    process.stdin.write(b"x = 1\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    while b"(stopped)" not in process.stderr.readline():
        assert process.poll() is None
    _, err = process.communicate(b"/reset\n", timeout=60)
    assert (b"forgotten" in err, process.returncode) == (True, 0)


class _Killed:
    def __init__(self, model: Any, after: int) -> None:
        self._model, self._after, self.asked = model, after, 0
        self.bundle = model.bundle

    def generate_each(self, prompts: Any, **settings: Any) -> Any:
        for count, found in enumerate(self._model.generate_each(prompts, **settings)):
            if count == self._after:
                raise KeyboardInterrupt
            self.asked += 1
            yield found


def test_prompts_from_a_file_go_on_after_a_kill(bundle: Path, tmp_path: Path, run: Run) -> None:
    prompts, output = tmp_path / "prompts", tmp_path / "answers"
    texts = [f"x{number} = " + "1 + " * (number % 3) for number in range(7)]
    prompts.write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in texts))
    line = ("generate", "--input", prompts, "--output", output, "--max-new-tokens", 4, "--max-batch", 3)
    assert run(*line)[0] == 0
    whole = output.read_bytes()
    found = [json.loads(one) for one in whole.decode().splitlines()]
    assert [one["id"] for one in found] == texts
    model = wisparse.load(bundle)
    assert [one["answer"]["text"] for one in found] == [model.generate(text, max_new_tokens=4).text for text in texts]
    assert not list(tmp_path.glob("*.progress"))
    assert run(*line)[0] == 2  # it is there already
    # Killed in the middle of a line, with two answers there, one of which could only come from there.
    output.unlink()
    progress = tmp_path / "answers.progress"

    def answer(model: Any) -> tuple[int, int]:
        return Batch(str(prompts), str(output), {}).run(model, {"max_new_tokens": 4})

    with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        answer(_Killed(model, 2))
    with open(progress, "a") as file:
        file.write('[6, {"te')
    kept = progress.read_text().splitlines()[1:3]
    rest = _Killed(model, 99)
    assert (answer(rest), rest.asked, len(kept)) == ((7, 2), 5, 2)
    assert output.read_bytes() == whole
    # Another run's progress is not gone on with, nor that of a bundle which another has replaced since.
    output.unlink()
    with pytest.raises(KeyboardInterrupt):
        answer(_Killed(model, 2))
    replaced = shutil.copytree(bundle, tmp_path / "other")
    settings = replaced / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_bytes()), "eos_token_id": 7}))
    resign(replaced)
    with wisparse.load(replaced) as other, pytest.raises(UsageError, match="another bundle"):
        answer(other)
    progress.write_text("0" * 64 + "\n" + kept[0] + "\n")
    code, _, err = run(*line)
    assert code == 2
    assert "other prompts, settings" in err
    # One that was killed before its first answer has nothing to lose.
    progress.write_text("0" * 64 + "\n")
    assert (run(*line)[0], output.read_bytes()) == (0, whole)


def test_only_a_line_feed_ends_a_line_of_prompts(tmp_path: Path, run: Run) -> None:
    """Letters that Python takes for the end of a line stand raw in what other programs write as JSON."""
    texts = ["a\u2028b", "a\u2029b", "a\x85b"]
    prompts, output = tmp_path / "prompts", tmp_path / "answers"
    prompts.write_bytes("\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts).encode())
    code, _, err = run("generate", "--input", prompts, "--output", output, "--max-new-tokens", 1)
    assert code == 0, err
    answers = output.read_bytes().decode().split("\n")
    assert [json.loads(line)["prompt"] for line in answers if line] == texts


NO_PROMPT = "line 3: expected a text as prompt, or a list of messages with role and content"
BAD_LINES: dict[str | None, str] = {
    '{"prompt": ""}': "line 3: the prompt has no tokens",
    json.dumps({"prompt": "x " * 5000}): "the context holds",
    '{"messages": [{"role": "user"}]}': NO_PROMPT,
    '{"messages": [{"role": 1, "content": "x"}]}': NO_PROMPT,
    **dict.fromkeys(("{}", '{"prompt": 5}', '{"messages": []}'), NO_PROMPT),
    "[1]": "line 3: ",
    '{"prompt": "a", "answer": 1}': "line 3: has an answer already",
    None: "expected a prompt a line, found none",
}


def test_a_prompt_that_cannot_be_answered_is_named_by_its_line(tmp_path: Path, run: Run) -> None:
    line = ("generate", "--input", tmp_path / "prompts", "--output", tmp_path / "answers")
    for bad, words in BAD_LINES.items():
        (tmp_path / "prompts").write_text("" if bad is None else f'\ufeff{{"prompt": "x"}}\n\n{bad}\n')
        code, _, err = run(*line, "--max-seq-len", 64, "--max-new-tokens", 1)
        assert (code, err.startswith("wisparse: --input: "), words in err) == (2, True, True), err
        assert [file.name for file in tmp_path.iterdir()] == ["prompts"]
