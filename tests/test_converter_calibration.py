"""Calibration tokens: the same source and seed give the same rows; what cannot be used is refused in one sentence."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_bundle import write_tiny_model
from tokenizers import processors

from wisparse.converter import calibration, documents
from wisparse.converter.calibration import Row, conversation_renderer, load_calibration, write_calibration
from wisparse.converter.documents import document_of, is_dataset_id, path_documents
from wisparse.converter.processes import Progress
from wisparse.converter.source import load_source
from wisparse.converter.tokenizer import load_tokenizer
from wisparse.formats.errors import AccessError, CalibrationError

BOS, EOS = 256, 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(folder: Path):
    return load_tokenizer(folder)


def text(length: int, start: int = 0) -> str:
    return "".join(f"line {start + i} of a text\n" for i in range(length))


def write_conversation(path: Path, *messages: tuple[str, str], count: int = 1) -> str:
    line = json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]})
    path.write_text("\n".join([line] * count))
    return str(path)


def test_rows_hold_the_documents_text(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text(500))
    tokens = load_calibration(str(tmp_path / "a.txt"), tokenizer, num_samples=5, seq_len=64)
    assert tokens.input_ids.shape == tokens.keep.shape == (5, 64)
    assert tokens.input_ids.dtype == torch.int64
    assert not tokens.keep[:, 0].any()
    assert tokens.keep[:, 1:].all()
    assert (tokens.num_tokens, tokens.source) == (5 * 63, "a.txt")  # no path of this machine
    assert all(tokenizer.decode(row) in text(500) for row in tokens.input_ids.tolist())
    # Short documents are joined with the end token.
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"number {i}"}) for i in range(40)))
    tokens = load_calibration(str(tmp_path / "a.jsonl"), tokenizer, num_samples=2, seq_len=64)
    assert (tokens.input_ids == EOS).any(dim=1).all()


def test_same_seed_same_rows_other_seed_other_rows(tokenizer, tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(text(40, ord(name) * 1000))
    first, again, other = (load_calibration(str(tmp_path), tokenizer, None, 4, 32, seed) for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest


def test_a_sequence_begins_as_the_tokenizer_begins_a_text(tokenizer, tmp_path: Path) -> None:
    begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.backend_tokenizer.post_processor = begins
    (tmp_path / "a.txt").write_text(text(100))
    tokens = load_calibration(str(tmp_path / "a.txt"), tokenizer, num_samples=3, seq_len=32)
    assert (tokens.input_ids == BOS).sum(dim=1).tolist() == [1, 1, 1]
    assert (tokens.input_ids[:, 0] == BOS).all()


def test_text_that_just_suffices(tokenizer, tmp_path: Path) -> None:
    # One byte is one token here. One passage: nothing between its rows, so 128 bytes are two rows of 64.
    (tmp_path / "a.txt").write_text("x" * 128)
    tokens = load_calibration(str(tmp_path / "a.txt"), tokenizer, num_samples=2, seq_len=64)
    assert tokens.num_samples == 2
    (tmp_path / "a.txt").write_text("x" * 126)
    with pytest.raises(CalibrationError, match=r"2 samples of 64 tokens need 128 tokens, found 126"):
        load_calibration(str(tmp_path / "a.txt"), tokenizer, num_samples=2, seq_len=64)


def test_fields_of_a_record() -> None:
    for record, expected in (
        ({"text": "a"}, "a"),
        ({"content": "a"}, "a"),
        ({"prompt": "a", "completion": "b"}, "ab"),
        ({"instruction": "a", "input": "", "output": "b"}, "a\n\nb"),
        ({"instruction": "a", "input": "c", "output": "b"}, "a\n\nc\n\nb"),
        ({"query": "a", "response": "b", "type": "x"}, "a\n\nb"),
        ({"messages": [{"role": "user", "content": "a"}]}, [{"role": "user", "content": "a"}]),
        ({"conversations": [{"from": "human", "value": "a"}]}, [{"role": "user", "content": "a"}]),
        ("a", "a"),
    ):
        assert document_of(record, "x") == expected
    for record in ({"label": 1}, {"text": 3}, {"messages": [{"role": "user"}]}, 7, None, {}):
        with pytest.raises(CalibrationError, match=r"file\.jsonl"):
            document_of(record, "file.jsonl")


def test_a_folder_is_read_without_hidden_and_binary_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    table = "text,stars\n" + "".join(f"line {row},{row}\n" for row in range(250))
    files = {"deep/er/a.py": "print(1)", "b.md": "# b", "c.jsonl": '{"text": "c"}\n', ".git/config": "secret"}
    for name, content in (files | {"empty.txt": "", "reviews.csv": table}).items():
        (tmp_path / name).write_text(content)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    assert sorted(path_documents([str(tmp_path)], 0)) == ["# b", "c", "print(1)", table]
    assert "3 of text, JSONL or source, 1 CSV or TSV read as text, each as one document" in caplog.text
    assert "2 empty or binary and left out" in caplog.text


def test_what_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    for part in range(2):
        rows = "".join(f"line {part} {row},{row}\n" for row in range(3))
        (tmp_path / f"part-{part}.csv").write_text(f"text,stars\n{rows}")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    expected = {f"line {part} {row}" for part in range(2) for row in range(3)}
    assert set(path_documents([str(tmp_path)], seed=0)) == expected
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "part-0.csv"), "part-0.csv", "./part-0.csv"):
        assert set(path_documents([path], seed=0)) == {f"line 0 {row}" for row in range(3)}
    # What is a data set id.
    monkeypatch.chdir(tmp_path)
    assert all(map(is_dataset_id, ("mit-han-lab/pile-val-backup", "a/b:train[:100]")))
    assert not any(map(is_dataset_id, ("texts", "./a/b", "/a/b", "a/b/c", "a/b.txt", "self")))
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert not is_dataset_id("a/b")
    assert calibration.describe_spec(["a/b", "me/data"]) == "b, me/data"


@pytest.mark.parametrize("kind", ["saved", "parquet", "csv"])
def test_data_set_on_disk(kind: str, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    # Newer releases wait for 5 s after each Parquet file.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
    rows = datasets.Dataset.from_dict({"query": [text(4, i) for i in range(30)], "response": ["ok"] * 30})
    path = tmp_path / f"data.{kind}"
    {"saved": rows.save_to_disk, "parquet": rows.to_parquet, "csv": rows.to_csv}[kind](path)
    before = sorted(file.name for file in tmp_path.rglob("*"))
    tokens = [load_calibration(str(path), tokenizer, num_samples=3, seq_len=64, seed=5) for _ in range(2)]
    assert tokens[0].digest == tokens[1].digest
    assert tokens[0].source == path.name
    assert sorted(file.name for file in tmp_path.rglob("*")) == before  # nothing is written beside the user's data


def test_paper_mixture_in_equal_parts(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def letters(name: str, seed: int):
        asked.append(name)
        return iter([chr(ord("a") + len(asked)) * 4000])

    monkeypatch.setattr(calibration, "dataset_documents", letters)
    tokens = load_calibration("paper", tokenizer, num_samples=8, seq_len=32)
    assert asked == list(calibration.PAPER_DATASETS)
    first = [tokenizer.decode(row)[0] for row in tokens.input_ids]
    assert sorted(map(first.count, "bcd")) == [2, 3, 3]
    assert tokens.source == "paper"


def test_hub_data_set_is_streamed(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    loaded: dict[str, Any] = {}

    def load_dataset(name: str, **options: Any):
        loaded.update(name=name, **options)
        return datasets.Dataset.from_dict({"text": [text(9, i) for i in range(30)]}).to_iterable_dataset()

    monkeypatch.setattr(documents, "check_read_access", lambda name, dataset: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["test", "train"])
    tokens = load_calibration("someone/texts", tokenizer, num_samples=2, seq_len=64)
    assert tokens.source == "someone/texts"
    assert loaded == {"name": "someone/texts", "split": "train", "streaming": True}
    load_calibration("someone/texts:test", tokenizer, num_samples=2, seq_len=64)
    assert loaded["split"] == "test"
    monkeypatch.setattr(documents, "check_read_access", Mock(side_effect=AccessError("cannot reach the Hub")))
    with pytest.raises(AccessError, match="cannot reach the Hub"):
        load_calibration("someone/texts", tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no such file or folder"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n \n", "is empty"),
        ("zeros.bin", b"abc\0def", "binary"),
        ("latin.txt", "é".encode("latin-1") + b"x" * 100, "binary"),
        ("late.txt", b"x" * 100_000 + b"\xff" + b"x" * 100, "byte 100000"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": ', "line 2"),
        ("none.jsonl", b'{"label": 1}\n', "line 1.*found label"),
        ("folder/a.bin", b"\0" * 10, "holds no text"),
    ],
)
def test_unusable_file(name: str, content: bytes | None, message: str, tokenizer, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    given = tmp_path / path.relative_to(tmp_path).parts[0]
    with pytest.raises(CalibrationError, match=message) as error:
        load_calibration(str(given), tokenizer, num_samples=16, seq_len=128)
    assert given.name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["self", "paper"])
def test_self_and_paper_stand_alone(word: str, tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text(10))
    with pytest.raises(CalibrationError, match="stands alone"):
        load_calibration([str(tmp_path / "a.txt"), word], tokenizer)


def test_conversations_go_through_the_chat_template(tokenizer, tmp_path: Path) -> None:
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    path = write_conversation(tmp_path / "a.jsonl", ("user", "why"), ("assistant", "so"), count=20)
    tokens = load_calibration(path, tokenizer, num_samples=1, seq_len=64)
    assert "[user]why[assistant]so" in tokenizer.decode(tokens.input_ids[0])
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(CalibrationError, match="no system role"):
        load_calibration(path, tokenizer)
    # Conversations are rendered as in transformers.
    tokenizer.chat_template = {
        "default": "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "tool_use": "no",
    }
    messages = [{"role": "user", "content": "Ünd\n"}, {"role": "assistant", "content": "<b>"}]
    for opened in (False, True):
        found = conversation_renderer(tokenizer)(messages, add_generation_prompt=opened)
        assert found == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)


def test_a_hostile_template_is_ended(source, tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a bundle's is: a conversation of the data is refused, and the model writes documents alone."""
    tokenizer.chat_template = None
    expected = load_calibration("self", tokenizer, source.model, 2, 16, 0)
    assert caplog.text == ""
    tokenizer.chat_template = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    path = write_conversation(tmp_path / "a.jsonl", ("user", "x" * 99))
    with pytest.raises(CalibrationError, match=r"template refuses a conversation .*(takes|needs|makes) more than"):
        load_calibration(path, tokenizer)
    assert load_calibration("self", tokenizer, source.model, 2, 16, 0).digest == expected.digest
    assert "the model writes documents and no conversations: its chat template says " in caplog.text


@pytest.fixture(scope="module")
def source(folder: Path):
    return load_source(folder, device="cpu")


@pytest.fixture(scope="module")
def example(example_model: Path):
    return load_source(example_model, device="cpu")


def test_self_is_seeded_and_the_same_side_by_side(source) -> None:
    torch.manual_seed(3)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    runs = [load_calibration("self", source.tokenizer, source.model, 4, 24, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].input_ids.shape == (4, 24)
    assert (runs[0].input_ids[:, 0] == BOS).all()
    assert not runs[0].keep[:, 0].any()
    assert len({tuple(row) for row in runs[0].input_ids.tolist()}) == 4
    assert runs[0].source == "self"
    # Texts side by side are those written alone.
    texts = [(4, 24, 0), (2, 16, 7)]
    together = write_calibration(source.model, source.tokenizer, texts, Progress(enabled=False))
    alone = [load_calibration("self", source.tokenizer, source.model, *text) for text in texts]
    assert [one.digest for one in together] == [one.digest for one in alone]


def test_self_writes_what_the_model_says(example) -> None:
    # A model that learned Python is not surprised by its own text: far less than by noise (ln 8192 = 9).
    tokens = load_calibration("self", example.tokenizer, example.model, 4, 96, 0)
    logits = example.model(tokens.input_ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.input_ids[:, 1:].flatten())
    assert loss < 4.5
    # Its template does not end an answer with an end-of-text token: it was never trained on conversations.
    assert not torch.isin(tokens.input_ids, torch.tensor([1, 2])).any()


def test_self_writes_conversations_where_the_template_ends_turns(example, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|endoftext|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(example.tokenizer, "chat_template", template)
    tokens = load_calibration("self", example.tokenizer, example.model, 4, 96, 0)
    user, assistant = example.tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    conversations = tokens.input_ids[:2]
    assert (conversations[:, 1] == user).all()
    assert (conversations == assistant).any(dim=1).all()
    assert not (tokens.input_ids[2:] == user).any()


def test_self_without_any_first_token(source) -> None:
    none = {"bos_token_id": None, "eos_token_id": None}
    own = {name: getattr(source.model, name) for name in ("parameters", "get_input_embeddings")}
    model = SimpleNamespace(**own, config=SimpleNamespace(**none, vocab_size=258))
    with pytest.raises(CalibrationError, match="--calibration PATH"):
        load_calibration("self", SimpleNamespace(**none, chat_template=None), model)


@pytest.mark.parametrize(
    ("ends", "question", "answer", "drawn", "written"),
    [
        # opening, question, answer's opening in place of the end, answer, end, next opening
        (EOS, [BOS, 1, 2], [5, 6], [0, 0, 0, 70, 71, EOS, 0, 72, EOS, 0, 0, 0, 73],
         [BOS, 1, 2, 70, 71, 5, 6, 72, EOS, BOS, 1, 2, 73]),
        (EOS, [BOS], None, [0, 70, EOS, 0, 71], [BOS, 70, EOS, BOS, 71]),
        # Where one token both ends and begins a text, it stands once.
        (BOS, [BOS], None, [0, 70, BOS, 71], [BOS, 70, BOS, 71]),
        # A question that never ends is answered after a quarter of the row.
        (EOS, [BOS], [5], [70] * 11, [BOS, *[70] * 8, 5, 70]),
    ],
)  # fmt: skip
def test_a_row_forces_openings_and_takes_what_is_drawn(
    ends: int, question: list[int], answer: list[int] | None, drawn: list[int], written: list[int]
) -> None:
    row = Row(32, {ends}, question, answer)
    assert [row.accept(token) for token in drawn] == written
