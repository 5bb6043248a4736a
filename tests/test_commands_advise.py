"""``wisparse advise``: a complete table from config.json alone, and the extrapolation behind it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bundle import tiny_config

from wisparse.formats.model_config import ModelConfig
from wisparse.runtime import forecast
from wisparse.runtime.benchmark import Workload
from wisparse.runtime.decoding.decoder import Decoder

Run = Callable[..., tuple[int, str, str]]
LEVELS = (0.0, 0.3, 0.4, 0.5)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model its configuration only, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(forecast, "_ROUNDS", 1)
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(hidden_size=64, intermediate_size=128, head_dim=16)))
    return folder


def test_a_table_and_a_command_from_the_configuration_alone(run: Run, model: Path) -> None:
    code, out, err = run("advise", model, "--device", "cpu", "--context", 100, "--json")
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
    assert [rows["native", level]["quality"].split()[0] for level in LEVELS] == ["nearly", "nearly", "close", "close"]
    assert found["command"].startswith(f"wisparse convert '{model}' --weights int8 --sparsity 0")
    assert found["conversion_seconds"] > 0
    assert found["context"] == 100
    code, out, err = run("advise", model, "--device", "cpu")
    assert code == 0, err
    assert "Recommended: wisparse convert" in out
    assert "measured on two models: 6.5M Llama / 37M Qwen2" in out
    assert len([line for line in out.splitlines() if line.startswith(("native", "int8", "int4"))]) == 12


def test_a_quantised_model_keeps_its_weights(run: Run, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    code, out, err = run("advise", model, "--device", "cpu", "--json")
    assert code == 0, err
    assert {row["weights"] for row in json.loads(out)["rows"]} == {"int4"}
    assert "--weights" not in json.loads(out)["command"]


def test_all_experts_are_held_and_the_chosen_are_read(run: Run, model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    code, out, err = run("advise", model, "--device", "cpu", "--json")
    assert code == 0, err
    native, int8 = (
        next(row for row in json.loads(out)["rows"] if row["weights"] == kind) for kind in ("native", "int8")
    )
    experts = 8 * 3 * 64 * 64 * config["num_hidden_layers"]
    itemsize = 2 if config.get("dtype") in ("bfloat16", "float16") else 4
    for size in ("memory_bytes", "bundle_bytes"):
        assert native[size] - int8[size] > 0.9 * experts * (itemsize - 1)


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"model_type": "dbrx"}, 3, "unsupported architecture: "),
        ({"hidden_size": -1}, 3, "config.json: "),
        (None, 4, "no such folder"),
    ],
)
def test_what_is_refused_is_one_sentence(
    run: Run, model: Path, changes: dict[str, Any] | None, code: int, sentence: str
) -> None:
    if changes is not None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))
    found, out, err = run("advise", model if changes is not None else model / "gone")
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
        masks = (any(projection.thresholds) for projection in decoder._projections)  # type: ignore[attr-defined]
        return 0.0, work.new_tokens * seconds(decoder.config, 0.5 if any(masks) else 0.0)

    asked: list[int] = []
    monkeypatch.setattr(forecast, "time_run", timed)
    monkeypatch.setattr(forecast, "_cache_bytes", lambda: 2000)
    found = forecast.forecast(config, torch.device("cpu"), (0.0, 0.5), 100)
    assert 0 < max(asked) < 24
    assert all(count % 2 == 0 for count in asked)  # as many windows as in the whole
    for one in found:
        assert one.tok_per_s == pytest.approx(1 / seconds(config, one.sparsity), rel=0.02)
