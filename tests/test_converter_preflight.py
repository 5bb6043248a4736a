"""The preflight finds what is wrong before a weight is read, says it in one sentence, and writes nothing. ``wisparse advise``: a
complete table from config.json alone, and the extrapolation behind it."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from quantised_models import change_config
from safetensors.torch import load_file
from tiny_bundle import digests, tiny_config, write_tiny_model

from wisparse import AccessError, CalibrationError, ResourceError, UnsupportedModelError, UsageError, WisparseError
from wisparse.commands.convert import command
from wisparse.converter import pipeline
from wisparse.converter.api import convert
from wisparse.converter.preflight import preflight
from wisparse.converter.settings import ConvertSettings, auto_seq_len
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.model_config import ModelConfig
from wisparse.runtime import forecast
from wisparse.runtime.benchmark import Workload
from wisparse.runtime.cpu.decoder import CpuDecoder
from wisparse.runtime.decoding.decoder import Decoder

pytestmark = pytest.mark.usefixtures("quick_conversion")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> ConvertSettings:
    return ConvertSettings(str(model), tmp_path / "out", num_samples=2, seq_len=16, device="cpu")


def refused(settings: ConvertSettings, error: type[WisparseError], **changes: Any) -> str:
    before = sorted(settings.output_dir.parent.rglob("*"))
    with pytest.raises(error) as raised:
        preflight(replace(settings, **changes))
    assert type(raised.value) is error
    assert sorted(settings.output_dir.parent.rglob("*")) == before
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_plan_of_a_folder(settings: ConvertSettings, tmp_path: Path) -> None:
    # Every weight is NaN, the headers are whole: only the conversion itself can notice.
    file = Path(settings.model) / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    content[length:] = b"\xff" * (len(content) - length)
    file.write_bytes(content)
    plan = preflight(settings)
    assert (plan.source.name, plan.source.commit, plan.tokens, plan.calibration) == ("model", None, None, "self")
    assert plan.num_parameters == sum(tensor.numel() for tensor in load_file(file).values())
    assert 0 < plan.projection_parameters < plan.num_parameters
    assert plan.download_bytes == 0
    assert plan.memory_bytes < plan.memory_free_bytes
    assert not settings.output_dir.exists()
    assert not settings.state_dir.exists()
    assert {"sparsity": [0.3, 0.4, 0.5], "default": 0.4}.items() <= plan.to_dict().items()
    (tmp_path / "text.txt").write_text("some words " * 100)
    plan = preflight(replace(settings, calibration=(str(tmp_path / "text.txt"),), max_kl=0.02))
    assert plan.tokens.input_ids.shape == (2, 16)
    document = plan.to_dict()
    assert json.loads(json.dumps(document))["calibration"] == "text.txt"
    assert {"max_kl": 0.02, "min_top1": None}.items() <= document.items()
    assert "sparsity" not in document


def test_length_of_the_sequences_fits_the_device_and_the_model(settings: ConvertSettings) -> None:
    # Also with the lowest and the highest sparsity there can be.
    plan = preflight(replace(settings, seq_len=None, sparsity=(0.0, 0.95)))
    assert plan.settings.seq_len == 128, "the model's context"
    assert (auto_seq_len("cpu", 4096), auto_seq_len("cuda", 131072)) == (512, 2048)


# Of some options what they cannot be, refused with their name.
OF_ITSELF: dict[str, Any] = {"search": "random", "dtype": "int8", "num_samples": 0, "seq_len": 2, "seed": -1}
OF_ITSELF |= {"calibration": (), "device": "tpu", "revision": "main"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"sparsity": (sparsity,)}, "0 to 0.95") for sparsity in (-0.1, 0.96, 1.0, 50.0, float("nan"), float("inf"))),
        ({"max_kl": -0.1}, "--max-kl: expected a number of nats per token, 0 or more, found -0.1"),
        ({"min_top1": 1.01}, "--min-top1: expected a share of tokens, from 0 to 1, found 1.01"),
        ({"max_kl": 0.1, "sparsity": (0.4,)}, "leave --sparsity out"),
        ({"min_top1": 0.9, "default": 0.4}, "leave --default out"),
        ({"default": 0.35}, "--default: expected one of the sparsities 0.3, 0.4, 0.5, found 0.35"),
        ({"sparsity": (0.4, 0.4)}, "different numbers, found 0.4, 0.4"),
        ({"method": "wisparce"}, "did you mean 'wisparse'"),
        *(({name: value}, f"--{name.replace('_', '-')}") for name, value in OF_ITSELF.items()),
        ({"seq_len": 4096}, "--seq-len: expected at most the model's context, 128 tokens, found 4096"),
        ({"num_generations": 5, "search": "uniform"}, "--num-generations"),
        ({"num_offspring": 5, "search": "uniform"}, "--num-offspring"),
        ({"calibration": ("self", "paper")}, "stand alone"),
        ({"private": True}, "--upload-repo"),
        ({"work_dir": Path("w"), "resume": False}, "--no-resume"),
        ({"max_shard_size": "huge"}, "5GB"),
        *(({"work_dir": "{out}" + below}, "within each other") for below in ("", "/work", "/..")),
        ({"output_dir": "{model}", "overwrite": True}, ""),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], words: str, settings: ConvertSettings) -> None:
    for name, value in changes.items():
        if isinstance(value, str) and "{" in value:
            changes = changes | {name: Path(value.format(out=settings.output_dir, model=settings.model))}
    assert words in refused(settings, UsageError, **changes)


def test_output_exists(settings: ConvertSettings) -> None:
    settings.output_dir.mkdir()
    assert "--overwrite" in refused(settings, UsageError)
    (settings.output_dir / "thesis.tex").write_text("years of work")
    assert "not a bundle" in refused(settings, UsageError, overwrite=True)


def test_what_is_read_before_the_weights(settings: ConvertSettings, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    assert "found 9" in refused(settings, CalibrationError, calibration=(str(tmp_path / "short.txt"),))
    # Tokenizer of another model.
    write_tiny_model(tmp_path / "model", tiny_config(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=2))
    (tmp_path / "text.txt").write_text("words and words " * 50)
    message = refused(settings, UnsupportedModelError, calibration=(str(tmp_path / "text.txt"),))
    assert "do not belong together" in message


def test_what_the_machine_or_the_hub_refuses(settings: ConvertSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, answer, changes, words in (
        ("shutil.disk_usage", {"return_value": SimpleNamespace(free=10)}, {}, "disk"),
        ("available_bytes", {"return_value": 10}, {}, "MB of memory"),
        ("check_write_access", {"side_effect": AccessError("not me/x")}, {"upload_repo": "me/x"}, "me/x"),
        ("check_read_access", {"side_effect": AccessError("is gated")}, {"model": "org/gated"}, "gated"),
        (None, None, {"model": "/nowhere/at/all"}, "no such file or folder"),
    ):
        with monkeypatch.context() as patched:
            if place is not None:
                patched.setattr(f"wisparse.converter.preflight.{place}", Mock(**answer))
            assert words in refused(settings, AccessError if changes else ResourceError, **changes)


def test_dry_run_prints_the_plan_and_stops(settings: ConvertSettings, caplog: pytest.LogCaptureFixture) -> None:
    arguments = [settings.model, "-o", str(settings.output_dir), "--dry-run", "--device", "cpu", "--seq-len", "16"]
    shown = CliRunner().invoke(command, arguments)
    document = CliRunner().invoke(command, [*arguments, "--json"])
    assert shown.exit_code == document.exit_code == 0, shown.output
    assert "nothing was converted" in shown.stdout
    assert "llama, 2 blocks" in shown.stdout
    assert "Recommended: wisparse convert " in shown.stdout
    assert json.loads(document.stdout)["model"] == "model"
    assert len(json.loads(document.stdout)["advice"]["rows"]) == 12
    for err in (shown.stderr, document.stderr):  # nothing else
        assert [line.split("elapsed  ")[1] for line in err.splitlines()] == [
            "[1/7] Checking: 0 of 4",
            "[1/7] Measuring this machine",
        ]
    assert not settings.output_dir.exists()


@pytest.fixture(scope="module")
def three_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("accelerate")
    return write_tiny_model(tmp_path_factory.mktemp("source") / "model", tiny_config(num_hidden_layers=3))


@pytest.fixture
def larger(settings: ConvertSettings, three_blocks: Path) -> ConvertSettings:
    return replace(settings, model=str(three_blocks))


def test_rounded_weights_need_room_for_codes_and_the_logits_before(settings: ConvertSettings) -> None:
    plain, rounded = (preflight(replace(settings, device="cpu", weights=kind)) for kind in ("native", "int8"))
    logits = 2 * plain.config.vocab_size * plain.settings.num_samples * plain.settings.length
    assert rounded.memory_bytes - plain.memory_bytes == plain.projection_parameters + logits


def give_room(patch: pytest.MonkeyPatch, room: int) -> None:
    """To the weights, beside what the work needs."""
    patch.setattr("wisparse.converter.preflight.BASE_BYTES", 0)
    patch.setattr("wisparse.converter.preflight.working_bytes", lambda *_: 1 << 20)
    patch.setattr("wisparse.converter.preflight.available_bytes", lambda device: (9 << 17) + room)  # an eighth is kept


@pytest.mark.parametrize("search", ["refine", "greedy"])
def test_a_model_larger_than_memory_is_read_from_its_files(
    search: str, three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = {"refine": 24, "greedy": 2}[search]  # enough for the refinement's steps
    # No rotation: `auto` leaves alone what is read from its files.
    options = {"sparsity": 0.2, "search": search, "num_samples": samples, "rotation": "none"}
    options |= {"device": "cpu", "seq_len": 16, "progress": False}
    convert(three_blocks, tmp_path / "ample", **options)
    devices: list[set[str]] = []

    def load(*args: object, **kwargs: object) -> SourceModel:
        source = load_source(*args, **kwargs)  # type: ignore[arg-type]
        devices.append({parameter.device.type for parameter in source.model.parameters()})
        return source

    monkeypatch.setattr(pipeline, "load_source", load)
    give_room(monkeypatch, 30 << 10)  # the weights take 40
    convert(three_blocks, tmp_path / "tight", **options)
    assert devices == [{"cpu", "meta"}]
    # Weights read from their files are not rounded to measure int8 and fp8: the quality tables differ.
    described = ("README.md", "wisparse.json", "wisparse.safetensors")
    ample, tight = (tmp_path / name for name in ("ample", "tight"))
    found, expected = (
        {name: one for name, one in digests(folder).items() if name not in described} for folder in (tight, ample)
    )
    assert found == expected
    for name in ("channel_scale", "threshold"):
        parts = [
            {key: one for key, one in load_file(folder / described[2]).items() if name in key}
            for folder in (tight, ample)
        ]
        assert parts[0].keys() == parts[1].keys()
        assert all(torch.equal(one, parts[1][key]) for key, one in parts[0].items())
    tables = [json.loads((folder / described[1]).read_text())["quality"] for folder in (tight, ample)]
    native = [[row for row in table["rows"] if row["weights"] == "native"] for table in tables]
    assert native[0] == native[1]
    assert len(tables[0]["rows"]) == len(native[0]) < len(tables[1]["rows"])


def test_where_the_weights_go(larger: ConvertSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight(larger).weights_on == "cpu"
    give_room(monkeypatch, 30 << 10)
    assert preflight(larger).weights_on == "memory, the model's files"
    give_room(monkeypatch, 0)
    with pytest.raises(ResourceError, match="MB of memory"):
        preflight(larger)
    # The version that can spread a model is named.
    give_room(monkeypatch, 30 << 10)
    install = r": pip install 'accelerate>=1\.15'"
    for version, sentence in (
        ({"side_effect": PackageNotFoundError}, rf"but it needs the package accelerate{install}"),
        ({"return_value": "1.14.0"}, rf"but accelerate 1\.14\.0 is too old{install}"),
        ({"return_value": "0.34.2"}, r"but accelerate 0\.34\.2 is too old"),
        ({"return_value": "1.15.0"}, None),
        ({"return_value": "2.0.0.dev0"}, None),
    ):
        monkeypatch.setattr("wisparse.converter.source.version", Mock(**version))
        if sentence is None:
            assert preflight(larger).max_memory is not None
        else:
            with pytest.raises(ResourceError, match=sentence):
                preflight(larger)


Run = Callable[..., tuple[int, str, str]]
LEVELS = (0.0, 0.3, 0.4, 0.5)


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model its configuration only, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(forecast, "ROUNDS", 1)
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(hidden_size=64, intermediate_size=128, head_dim=16)))
    return folder


def test_a_table_and_a_command_from_the_configuration_alone(run: Run, described: Path) -> None:
    code, out, err = run("advise", described, "--device", "cpu", "--context", 100, "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {(row["weights"], row["sparsity"]): row for row in found["rows"]}
    assert list(rows) == [(kind, level) for kind in ("native", "int8", "int4") for level in LEVELS]
    for (_, level), row in rows.items():
        assert 0 < row["low"] <= row["tok_per_s"] * 0.86 < row["tok_per_s"] * 1.14 <= row["high"]
        assert row["fits"]
        assert all(kl >= level / 10 * 0.01 for kl in row["kl"])
    for size in ("memory_bytes", "bundle_bytes"):
        native, int8, int4 = (rows[kind, 0.0][size] for kind in ("native", "int8", "int4"))
        assert native > int8 > int4
    changed = [rows["native", level]["answers_changed"] for level in LEVELS]
    assert changed[0] == [0, 0]
    assert sorted(changed) == changed
    assert found["command"].startswith(f"wisparse convert '{described}' --weights int8 --sparsity 0")
    assert found["conversion_seconds"] > 0
    assert found["context"] == 100
    code, out, err = run("advise", described, "--device", "cpu")
    assert code == 0, err
    assert "Recommended: wisparse convert" in out
    assert "measured on two models: 6.5M Llama / 37M Qwen2" in out
    assert len([line for line in out.splitlines() if line.startswith(("native", "int8", "int4"))]) == 12


def test_a_quantised_model_keeps_its_weights(run: Run, described: Path) -> None:
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    change_config(described, lambda config: config.update(quantization_config=method))
    code, out, err = run("advise", described, "--device", "cpu", "--json")
    assert code == 0, err
    assert {row["weights"] for row in json.loads(out)["rows"]} == {"int4"}
    assert "--weights" not in json.loads(out)["command"]


def test_all_experts_are_held_and_the_chosen_are_read(run: Run, described: Path) -> None:
    routed = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    change_config(described, lambda config: config.update(routed))
    code, out, err = run("advise", described, "--device", "cpu", "--json")
    assert code == 0, err
    int8, native = ({row["weights"]: row for row in json.loads(out)["rows"]}[kind] for kind in ("int8", "native"))
    for size in ("memory_bytes", "bundle_bytes"):  # of two blocks' experts, in float32
        assert native[size] - int8[size] > 0.9 * 2 * 8 * 3 * 64 * 64 * 3


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"model_type": "dbrx"}, 3, "unsupported architecture: "),
        ({"hidden_size": -1}, 3, "config.json: "),
        (None, 4, "no such file or folder"),
    ],
)
def test_what_is_refused_is_one_sentence(
    run: Run, described: Path, changes: dict[str, Any] | None, code: int, sentence: str
) -> None:
    if changes is not None:
        change_config(described, lambda config: config.update(changes))
    found, out, err = run("advise", described / "gone" if changes is None else described)
    assert (found, out, len(err.splitlines())) == (code, "", 1), err
    assert sentence in err


def test_parts_of_a_model_tell_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine whose steps cost exactly what the formula says, every forecast is exact, and more sparsity faster."""
    windows = ["sliding_attention", "full_attention"] * 12
    given = tiny_config("qwen3", num_hidden_layers=24, layer_types=windows, sliding_window=8, vocab_size=3000)
    config = ModelConfig.from_dict({**given, "tie_word_embeddings": True})

    def seconds(of: ModelConfig, sparsity: float) -> float:
        return 1e-4 + of.num_blocks * 1e-3 * (1 - sparsity) + of.vocab_size * 1e-6

    def timed(decoder: Decoder, work: Workload) -> tuple[float, float]:
        asked.append(decoder.config.num_blocks)
        return 0.0, work.new_tokens * seconds(decoder.config, sparsities[decoder])

    def set_masks(decoder: Decoder, masks: dict[str, ProjectionMask]) -> None:
        sparsities[decoder] = max(mask.sparsity for mask in masks.values())

    asked: list[int] = []
    sparsities: dict[Decoder, float] = {}
    monkeypatch.setattr(CpuDecoder, "set_masks", set_masks)
    monkeypatch.setattr(forecast, "time_run", timed)
    monkeypatch.setattr(forecast, "_cache_bytes", lambda: 2000)
    found = forecast.forecast(config, torch.device("cpu"), (0.0, 0.5), 100)
    assert 0 < max(asked) < 24
    assert all(count % 2 == 0 for count in asked)  # as many windows as in the whole
    for one in found:
        assert one.tok_per_s == pytest.approx(1 / seconds(config, one.sparsity), rel=0.02)
