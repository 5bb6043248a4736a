"""Opening and verifying bundles: one rule of FORMAT.md broken at a time, with digests that fit and that do not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_bundle import (
    change_tensor,
    join_safetensors,
    resign,
    split_safetensors,
    tiny_config,
    write_tiny_bundle,
    write_tiny_model,
)

from wisparse.commands.bundles import inspect as inspect_command
from wisparse.commands.bundles import verify as verify_command
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.errors import AccessError, BundleError, UsageError, WisparseError

SHARD = "model-00001-of-00001.safetensors"
SIDECAR = "wisparse.safetensors"
INDEX = "model.safetensors.index.json"
O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    model = write_tiny_model(folder / "model")
    extra = {"README.md": b"# Card", "figures/a.png": b"png"}
    return write_tiny_bundle(folder / "bundle", model, 0.3, 0.5, 0.7, extra_files=extra)


@pytest.fixture
def bundle(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "bundle"))


Change = Callable[[Path], Any]


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change a JSON file of the bundle."""

    def apply(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return apply


def recipe(**values: Any) -> Change:
    return edit("wisparse.json", lambda d: d.update(values))


def config(**values: Any) -> Change:
    """What config.json says of the bundle."""
    return edit("config.json", lambda d: d["wisparse"].update(values))


def entry(**values: Any) -> Change:
    """What the recipe says of a projection at the sparsity level 0.5."""
    return edit("wisparse.json", lambda d: d["levels"][1]["projections"][3].update(values))


def header(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(folder: Path) -> None:
        found, data = split_safetensors((folder / name).read_bytes())
        change(found)
        (folder / name).write_bytes(join_safetensors(found, data))

    return apply


def row(what: str, values: Any) -> Change:
    """Overwrite what the sidecar holds for the sparsity level 0.5."""
    return lambda folder: change_tensor(folder / SIDECAR, f"{O_PROJ}.{what}", values, row=1)


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update({new: found.pop(old)})


def cut_scale(folder: Path) -> None:
    """A channel_scale of 3 x 4 instead of 3 x 16, the file otherwise in order."""
    found, data = split_safetensors((folder / SIDECAR).read_bytes())
    start, end = found[f"{O_PROJ}.channel_scale"]["data_offsets"]
    found[f"{O_PROJ}.channel_scale"].update(shape=[3, 4], data_offsets=[start, start + 48])
    for name, one in found.items():
        if name != "__metadata__" and one["data_offsets"][0] >= end:
            one["data_offsets"] = [offset - (end - start - 48) for offset in one["data_offsets"]]
    (folder / SIDECAR).write_bytes(join_safetensors(found, data[: start + 48] + data[end:]))


def drop_a_level(folder: Path) -> None:
    """Where it is written as text; the sidecar still has its rows."""
    edit("wisparse.json", lambda d: d["levels"].pop())(folder)
    edit("config.json", lambda d: d["wisparse"]["sparsities"].pop())(folder)


def swap_levels(folder: Path) -> None:
    """The rows of the sidecar in another order than the recipe's sparsity levels."""
    found, data = split_safetensors((folder / SIDECAR).read_bytes())
    for what in ("threshold", "sparsity", "channel_scale"):
        start, end = found[f"{O_PROJ}.{what}"]["data_offsets"]
        rows = np.frombuffer(data[start:end], "<f4").reshape(3, -1)
        change_tensor(folder / SIDECAR, f"{O_PROJ}.{what}", rows[[0, 0, 2]])


def drop_the_last_projection(folder: Path) -> None:
    """From a sidecar otherwise in order."""
    name = "model.layers.1.mlp.down_proj"
    found, data = split_safetensors((folder / SIDECAR).read_bytes())
    first = min(found[f"{name}.{what}"]["data_offsets"][0] for what in ("channel_scale", "threshold", "sparsity"))
    kept = {key: one for key, one in found.items() if not key.startswith(name)}
    (folder / SIDECAR).write_bytes(join_safetensors(kept, data[:first]))


def test_intact(intact: Path) -> None:
    report = verify_bundle(intact)
    assert (report.num_projections, report.num_tensors, report.notes) == (14, 20, ())
    assert report.num_files == len([file for file in intact.rglob("*") if file.is_file()])
    assert report.num_bytes == sum(
        f.stat().st_size for f in intact.rglob("*") if f.is_file() and f.name != "wisparse.json"
    )
    assert Bundle.open(intact).read_bytes("tokenizer.json") == (intact / "tokenizer.json").read_bytes()
    assert Bundle.open(intact).read_bytes("vocab.json") is None


# Rules that hold whatever the digests say: all of these are re-signed.
POSITIVE = f"{O_PROJ}: channel_scale: expected finite positive values"
SPARSITIES = r"wisparse\.sparsities: expected \[0\.3, 0\.5, 0\.7\], found "
NORM = "model.norm.weight"
LINEAR = {"rope_type": "linear", "rope_theta": 1, "factor": "x"}
BROKEN: dict[str, tuple[Change, str]] = {
    "scale-shape": (
        cut_scale,
        rf"{O_PROJ}: expected channel_scale \(3, 16\) in F32, found \(3, 4\) in F32; convert again",
    ),
    "scale-dtype": (
        header(SIDECAR, lambda h: h[f"{O_PROJ}.threshold"].update(dtype="I32")),
        rf"{O_PROJ}: expected threshold \(3,\) in F32, found \(3,\) in I32",
    ),
    "scale-nan": (row("channel_scale", [np.nan] + [1] * 15), POSITIVE),
    "scale-zero": (row("channel_scale", [0] + [1] * 15), POSITIVE),
    "scale-negative": (row("channel_scale", [-1] + [1] * 15), POSITIVE),
    "threshold-inf": (row("threshold", np.inf), "expected a finite number"),
    "threshold-nan": (row("threshold", np.nan), "expected a finite number"),
    "threshold-negative": (row("threshold", -1), "0 or more, found -1"),
    "threshold-denormal": (row("threshold", 1e-40), "finite number"),
    "threshold-other": (
        row("threshold", 0.125),
        f"{O_PROJ}: wisparse.json says threshold 0.69.*, wisparse.safetensors says 0.125",
    ),
    "sparsity-high": (row("sparsity", 0.96), r"expected a number in \[0, 0"),
    "sparsity-zero": (row("sparsity", 0), "sparsity 0 means dense"),
    "sidecar-misnamed": (
        header(SIDECAR, rename(f"{O_PROJ}.threshold", f"{O_PROJ}.treshold")),
        rf"{O_PROJ}: expected threshold \(3,\) in F32, found nothing",
    ),
    "sidecar-incomplete": (
        drop_the_last_projection,
        r"model\.layers\.1\.mlp\.down_proj: expected channel_scale \(3, 24\) in F32, found nothing",
    ),
    "sidecar-extra": (
        header(SIDECAR, lambda h: h.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})),
        "unexpected tensor 'x'",
    ),
    "sidecar-format": (
        header(SIDECAR, lambda h: h["__metadata__"].update(format="pt")),
        "format: expected 'wisparse', found 'pt'",
    ),
    "sidecar-version": (
        header(SIDECAR, lambda h: h["__metadata__"].update(format_version="3")),
        "the bundle has format version 3, this wisparse reads version 2",
    ),
    "sidecar-no-version": (
        header(SIDECAR, lambda h: h["__metadata__"].pop("format_version")),
        "format_version: expected 2",
    ),
    "sidecar-older": (
        header(SIDECAR, lambda h: h["__metadata__"].update(format_version="1")),
        r"wisparse\.safetensors: format_version: expected 2, found 1",
    ),
    "newer": (
        recipe(format_version=3),
        "the bundle has format version 3, this wisparse reads version 2; install a newer wisparse",
    ),
    "older": (recipe(format_version=1), r"wisparse\.json: format_version: expected 2, found 1; convert again"),
    "version-text": (recipe(format_version="2"), "format_version: expected 2, found '2'"),
    "newer-config": (config(format_version=3), "config.json: the bundle has format version 3"),
    "config-older": (config(format_version=1), r"config\.json: format_version: expected 2, found 1; convert again"),
    "config-no-key": (edit("config.json", lambda d: d.pop("wisparse")), "expected an object under"),
    "config-sidecar": (config(sidecar="../x"), "wisparse.sidecar: expected 'wisparse.safetensors', found '../x'"),
    "config-sparsity": (config(sparsity=0.4), "wisparse.sparsity: expected 0.5, found 0.4"),
    "config-sparsities": (config(sparsities=[0.3, 0.5]), SPARSITIES + r"\[0\.3, 0\.5\]"),
    "config-sparsities-none": (edit("config.json", lambda d: d["wisparse"].pop("sparsities")), SPARSITIES + "None"),
    "config-quantised": (
        edit("config.json", lambda d: d.update(quantization_config={"quant_method": "x"})),
        "quantised",
    ),
    "config-rope": (
        edit("config.json", lambda d: d.update(rope_parameters=LINEAR)),
        "rope_parameters.factor: expected a positive number, found 'x'",
    ),
    "default-other": (
        recipe(default=0.4),
        r"wisparse\.json: default: expected one of the sparsity levels 0\.3, 0\.5, 0\.7, found 0\.4",
    ),
    "default-none": (edit("wisparse.json", lambda d: d.pop("default")), "default: expected a number in"),
    "levels-none": (recipe(levels=[]), "levels: expected 1 to 16"),
    "levels-many": (edit("wisparse.json", lambda d: d.update(levels=d["levels"] * 6)), "levels: expected 1 to 16"),
    "levels-fewer": (
        edit("wisparse.json", lambda d: d["levels"].pop()),
        r"wisparse\.sparsities: expected \[0\.3, 0\.5\], found \[0\.3, 0\.5, 0\.7\]",
    ),
    "levels-fewer-everywhere": (
        drop_a_level,
        r"model\.layers\.0\.self_attn\.q_proj: expected channel_scale \(2, 16\) in F32, found \(3, 16\)",
    ),
    "levels-unordered": (
        edit("wisparse.json", lambda d: d["levels"].reverse()),
        r"sparsity levels: expected ascending sparsities, none twice, found 0\.7, 0\.5, 0\.3",
    ),
    "levels-twice": (
        edit("wisparse.json", lambda d: d["levels"][2].update(sparsity=0.5)),
        r"sparsity levels: expected ascending sparsities, none twice, found 0\.3, 0\.5, 0\.5",
    ),
    "levels-high": (
        edit("wisparse.json", lambda d: d["levels"][2].update(sparsity=0.96)),
        r"levels\[2\]\.sparsity: expected a number in \[0, 0\.95\], found 0\.96",
    ),
    "levels-text": (recipe(levels=["x"]), r"levels\[0\]: expected an object, found 'x'"),
    "levels-swapped": (swap_levels, f"{O_PROJ}: wisparse.json says threshold 0.69.*, wisparse.safetensors says 0.4"),
    "level-of-zero": (
        edit("wisparse.json", lambda d: d["levels"][0].update(sparsity=0)),
        r"k_proj: sparsity: expected 0 at the sparsity level 0, found 0\.3",
    ),
    "recipe-missing": (
        edit("wisparse.json", lambda d: d["levels"][1]["projections"].pop(3)),
        r"no entry for model\.layers\.0\.self_attn\.o_proj",
    ),
    "recipe-twice": (
        edit("wisparse.json", lambda d: d["levels"][1]["projections"].append(d["levels"][1]["projections"][0])),
        "unknown or repeated",
    ),
    "recipe-sparsity": (
        entry(sparsity=1.0),
        r"levels\[1\]\.projections\[3\]\.sparsity: expected a number in \[0, 0\.95\], found 1\.0",
    ),
    "recipe-alpha": (entry(alpha=-1), r"projections\[3\]\.alpha: expected a number, 0 or more, found -1"),
    "recipe-name": (entry(name=3), r"projections\[3\]\.name: expected a string, found 3"),
    "recipe-type": (recipe(calibration=[]), "calibration: expected an object"),
    "recipe-seed": (
        edit("wisparse.json", lambda d: d["calibration"].update(seed=1.5)),
        r"calibration\.seed: expected a whole number, 0 or more, found 1\.5",
    ),
    "recipe-projections": (
        edit("wisparse.json", lambda d: d["levels"][1].update(projections={})),
        r"levels\[1\]\.projections: expected a list, found \{\}",
    ),
    "recipe-blocks": (
        edit("wisparse.json", lambda d: d["levels"][1]["block_sparsities"].pop()),
        r"block_sparsities of the sparsity level 0\.5: expected 2 values, found 1",
    ),
    "files-missing": (edit("wisparse.json", lambda d: d["files"].pop(SHARD)), f"no entry for {SHARD}"),
    "files-tokenizer": (
        edit("wisparse.json", lambda d: d["files"].pop("tokenizer.json")),
        "no entry for tokenizer.json",
    ),
    "tensors-missing": (edit(INDEX, lambda d: d["weight_map"].pop(NORM)), "which the index does not place there"),
    "weight-shape": (
        header(SHARD, lambda h: h[NORM].update(shape=[4, 4])),
        r"model\.norm\.weight: expected shape \(16,\), found \(4, 4\)",
    ),
    "weight-misnamed": (
        header(SHARD, rename(NORM, "model.morn.weight")),
        "'model.morn.weight', which the index does not place there",
    ),
    "generation-config": (lambda f: (f / "generation_config.json").write_text("[]"), "expected a JSON object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule(name: str, bundle: Path) -> None:
    change, message = BROKEN[name]
    change(bundle)
    with contextlib.suppress(KeyError, AttributeError):  # too broken to be signed again
        resign(bundle)
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle)


def test_another_level_is_the_same_bundle(intact: Path) -> None:
    bundle = Bundle.open(intact)
    assert (list(bundle.levels), bundle.sparsity) == ([0.3, 0.5, 0.7], 0.5)
    for sparsity in (0.3, 0.5, 0.7):
        other = bundle.at(sparsity)
        assert other.checkpoint is bundle.checkpoint
        assert (other.sparsity, other.masks) == (sparsity, bundle.levels[sparsity])
        assert {mask.sparsity for mask in other.masks.values()} == {0.0, sparsity}
    assert bundle.at(0.1 + 0.2).sparsity == 0.3  # which is not 0.3
    dense = bundle.at(0)
    assert list(dense.masks) == list(bundle.masks)
    assert all((m.threshold, m.sparsity) == (0, 0) for m in dense.masks.values())


@pytest.mark.parametrize("sparsity", [0.4, -0.3, 1, float("nan"), float("inf"), True, "0.3", None])
def test_a_level_that_the_bundle_lacks(sparsity: Any, intact: Path) -> None:
    with pytest.raises(
        UsageError, match=r"one of the bundle's sparsity levels, 0\.3, 0\.5, 0\.7, or 0 for the dense model, found"
    ):
        Bundle.open(intact).at(sparsity)


def test_resigned_without_a_change_is_valid(bundle: Path) -> None:
    resign(bundle)
    assert verify_bundle(bundle).notes == ()


def other_space(name: str) -> Change:
    """The file with another white space at its end."""
    return lambda f: (f / name).write_bytes((d := (f / name).read_bytes())[:-1] + (b"\n" if d[-1:] == b" " else b" "))


def second(name: str) -> Change:
    return lambda folder: shutil.copyfile(folder / SHARD, folder / name)


# Files that the manifest's digests do not fit.
UNSIGNED: dict[str, tuple[Change, str]] = {
    **{
        f"edited {name}": (other_space(name), r"expected sha256|truncated|do not belong")
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX, SIDECAR)
    },
    "edited template": (other_space("chat_template.jinja"), "expected sha256"),
    "another recipe": (recipe(base_model="another/model"), "do not belong together"),
    **{
        f"no {name}": (lambda folder, name=name: (folder / name).unlink(), r"missing|not a bundle|no weights")
        for name in ("config.json", SHARD, INDEX, SIDECAR, "tokenizer.json", "wisparse.json")
    },
    **{
        f"also {name}": (second(name), f"{name}: weights that are not part of the bundle")
        for name in ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "x.pt")
    },
}


@pytest.mark.parametrize("name", UNSIGNED)
def test_files_that_do_not_fit_the_manifest(name: str, bundle: Path) -> None:
    change, message = UNSIGNED[name]
    change(bundle)
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle)


def test_damaged_weights(bundle: Path) -> None:
    data = (bundle / SHARD).read_bytes()
    (bundle / SHARD).write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    with pytest.raises(BundleError, match=f"{SHARD}: expected sha256"):
        verify_bundle(bundle)
    change_tensor(bundle / SHARD, "model.norm.weight", [np.nan] * 16)
    resign(bundle)
    Bundle.open(bundle)
    with pytest.raises(BundleError, match=r"model\.norm\.weight: the weights hold NaN or infinity"):
        verify_bundle(bundle)


def test_changed_after_it_was_opened(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    (bundle / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json: expected sha256"):
        opened.read_bytes("tokenizer.json")
    (bundle / SHARD).write_bytes((bundle / SHARD).read_bytes())
    with pytest.raises(BundleError, match="changed on disk"):
        opened.checkpoint.tensor("model.norm.weight")


def test_documents_may_be_edited(bundle: Path) -> None:
    (bundle / "README.md").write_text("# A better card")
    (bundle / "figures" / "a.png").unlink()
    (bundle / "notes.txt").write_text("mine")
    (bundle / ".gitattributes").write_text("* -text")
    notes = verify_bundle(bundle).notes
    assert [note.split(":")[0] for note in notes] == ["README.md", "figures/a.png", "notes.txt"]


def test_names_of_unknown_files_do_not_steer_the_terminal(bundle: Path) -> None:
    for name in (b"\x1b]0;owned\x07.txt", "\u202etxt.exe".encode(), b"\xff.txt", b"a\nb"):
        with open(os.path.join(os.fsencode(bundle), name), "wb"):
            pass
    result = CliRunner().invoke(verify_command, [str(bundle)])
    assert result.exit_code == 0
    assert "note: \ufffd]0;owned\ufffd.txt: not part of the bundle\n" in result.output
    assert result.output.count("\n") == 5
    assert all(line.isprintable() for line in result.output.splitlines())


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("wisparse.json", ("base_model",)),
        ("wisparse.json", ("method",)),
        ("wisparse.json", ("calibration", "source")),
        ("wisparse.json", ("search", "a\ud800b")),
        ("wisparse.json", ("versions", "torch")),
        ("tokenizer_config.json", ("eos_token",)),
        ("config.json", ("torch_dtype",)),
        (INDEX, ("weight_map", "a\ud800b")),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(name: str, keys: tuple[str, ...], bundle: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = "a\ud800b"

    edit(name, change)(bundle)
    resign(bundle, recipe=False)
    for command in (verify_command, inspect_command):
        raised = CliRunner().invoke(command, [str(bundle)]).exception
        assert isinstance(raised, BundleError)
        assert "expected characters, found '\\ud800', half of a surrogate pair" in str(raised)


def test_a_pair_of_surrogates_is_a_character(bundle: Path) -> None:
    recipe(base_model="\U0001f600")(bundle)
    assert b"\\ud83d\\ude00" in (bundle / "wisparse.json").read_bytes().lower()
    resign(bundle)
    assert Bundle.open(bundle).recipe.base_model == "\U0001f600"


def test_verify_tries_the_chat_template(bundle: Path) -> None:
    (bundle / "chat_template.jinja").write_text("{% for m in messages %}{{ 1 / 0 }}{% endfor %}")
    resign(bundle)
    raised = CliRunner().invoke(verify_command, [str(bundle)]).exception
    assert isinstance(raised, BundleError)
    assert str(raised).startswith("the chat template fails (ZeroDivisionError")


def test_no_bundle(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"not a bundle: no wisparse\.json; make one with wisparse-convert"):
        Bundle.open(tmp_path)
    with pytest.raises(AccessError, match="expected a folder"):
        Bundle.open(tmp_path / "nope")
    with pytest.raises(BundleError, match="an unfinished conversion"):
        Bundle.open(bundle.rename(bundle.with_name("x.partial")))


def test_snapshot_of_the_hub_cache(intact: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / ("a" * 40)
    blobs.mkdir(parents=True)
    for index, file in enumerate(sorted(file for file in intact.rglob("*") if file.is_file())):
        link = snapshot / file.relative_to(intact)
        link.parent.mkdir(parents=True, exist_ok=True)
        (blobs / str(index)).write_bytes(file.read_bytes())
        link.symlink_to(blobs / str(index))
    assert verify_bundle(snapshot).notes == ()


def test_verify_command(bundle: Path) -> None:
    result = CliRunner().invoke(verify_command, [str(bundle)])
    assert result.exit_code == 0
    assert "valid. 12 files" in result.stdout
    report = json.loads(CliRunner().invoke(verify_command, [str(bundle), "--json"]).stdout)
    assert report["num_projections"] == 14
    (bundle / SHARD).write_bytes(b"")
    assert isinstance(CliRunner().invoke(verify_command, [str(bundle)]).exception, WisparseError)


def test_inspect_command(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", tiny_config("phi3"))
    bundle = write_tiny_bundle(tmp_path / "bundle", model)
    for show, cell in (("sparsity", "50.0%"), ("alpha", "0.50"), ("threshold", "0.7"), ("realised", "50.0%")):
        lines = CliRunner().invoke(inspect_command, [str(bundle), "--show", show]).stdout.splitlines()
        assert any("qkv_proj" in line and "gate_up_proj" in line for line in lines)
        assert lines[-1].split()[0] == "1"
        assert cell in lines[-1]
    document = json.loads(CliRunner().invoke(inspect_command, [str(bundle), "--json"]).stdout)
    assert document["model"]["num_blocks"] == 2
    assert [len(level["projections"]) for level in document["levels"]] == [8]


def test_inspect_prints_no_control_characters(bundle: Path) -> None:
    recipe(base_model="\x1b]0;owned\x07[bold]x", method="a\nb\u202e")(bundle)
    resign(bundle)
    stdout = CliRunner().invoke(inspect_command, [str(bundle)]).stdout
    assert "levels       30.0%, 50.0% (the default), 70.0%\n" in stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(stdout)
    assert "\ufffd]0;owned\ufffd[bold]x" in stdout
