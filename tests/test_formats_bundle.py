"""Opening and verifying bundles: one rule of FORMAT.md broken at a time, with digests that fit and that do not; and bundles
damaged and forged at random."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_bundle import (
    change_tensor,
    files_of,
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
from wisparse.formats.manifest import Recipe, sidecar_metadata

SHARD = "model-00001-of-00001.safetensors"
SIDECAR = "wisparse.safetensors"
RECIPE, CONFIG = "wisparse.json", "config.json"
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
    def apply(folder: Path) -> None:
        content, tensors = (folder / name).read_bytes(), name.endswith(".safetensors")
        document, data = split_safetensors(content) if tensors else (json.loads(content), b"")
        change(document)
        (folder / name).write_bytes(join_safetensors(document, data) if tensors else json.dumps(document).encode())

    return apply


def put(name: str, path: str, value: Any = ...) -> Change:
    """Set what stands at ``a/b/0`` in such a file, or take it out."""

    def change(document: Any) -> None:
        *above, key = (int(step) if step.isdigit() else step for step in path.split("/"))
        for step in above:
            document = document[step]
        if value is ...:
            del document[key]
        else:
            document[key] = value(document[key]) if callable(value) else value

    return edit(name, change)


def recipe(**values: Any) -> Change:
    return edit(RECIPE, lambda d: d.update(values))


def row(what: str, values: Any) -> Change:
    """Overwrite what the sidecar holds for the sparsity level 0.5."""
    return lambda folder: change_tensor(folder / SIDECAR, f"{O_PROJ}.{what}", values, row=1)


def rename(name: str, old: str, new: str) -> Change:
    return edit(name, lambda found: found.update({new: found.pop(old)}))


def drop_a_level(folder: Path) -> None:
    """Where it is written as text; the sidecar still has its rows."""
    put(RECIPE, "levels/2")(folder)
    put(CONFIG, "wisparse/sparsities/2")(folder)


def test_intact(intact: Path) -> None:
    report = verify_bundle(intact)
    assert (report.num_projections, report.num_tensors, report.notes) == (14, 20, ())
    assert report.num_files == len(files_of(intact))
    assert report.num_bytes == sum(len(data) for name, data in files_of(intact).items() if name != RECIPE)
    assert Bundle.open(intact).read_bytes("tokenizer.json") == (intact / "tokenizer.json").read_bytes()
    assert Bundle.open(intact).read_bytes("vocab.json") is None


# Rules that hold whatever the digests say: all of these are re-signed.
POSITIVE = f"{O_PROJ}: channel_scale: expected finite positive values"
THRESHOLD = rf"{O_PROJ}: expected threshold \(3,\) in F32, found "
OLD, NEW = "format_version: expected 2, found 1", "the bundle has format version 3, this wisparse reads version 2"
SPARSITIES = r"wisparse\.sparsities: expected \[0\.3, 0\.5, 0\.7\], found "
ASCENDING = "sparsity levels: expected ascending sparsities, none twice, found "
LEVEL, ENTRY = "levels/1", "levels/1/projections/3"
NORM = "model.norm.weight"
LINEAR = {"rope_type": "linear", "rope_theta": 1, "factor": "x"}
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
BROKEN: list[tuple[Change, str]] = [
    # The sidecar.
    (put(SIDECAR, f"{O_PROJ}.threshold/dtype", "I32"), rf"{THRESHOLD}\(3,\) in I32; convert again"),
    *((row("channel_scale", [value] + [1] * 15), POSITIVE) for value in (np.nan, 0, -1)),
    *((row("threshold", value), "expected a finite number, 0 or more, found") for value in (np.inf, np.nan, -1, 1e-40)),
    (row("threshold", 0.125), f"{O_PROJ}: wisparse.json says threshold 0.69.*, wisparse.safetensors says 0.125"),
    (row("sparsity", 0.96), r"expected a number in \[0, 0"),
    (row("sparsity", 0), "sparsity 0 means dense"),
    (rename(SIDECAR, f"{O_PROJ}.threshold", f"{O_PROJ}.treshold"), f"{THRESHOLD}nothing"),
    (put(SIDECAR, "x", EMPTY), "unexpected tensor 'x'"),
    (put(SIDECAR, "__metadata__/format", "pt"), "format: expected 'wisparse', found 'pt'"),
    (put(SIDECAR, "__metadata__/format_version", "3"), rf"wisparse\.safetensors: {NEW}"),
    (put(SIDECAR, "__metadata__/format_version"), "format_version: expected 2"),
    (put(SIDECAR, "__metadata__/format_version", "1"), rf"wisparse\.safetensors: {OLD}"),
    # The recipe.
    (recipe(format_version=3), f"{NEW}; install a newer wisparse"),
    (recipe(format_version=1), rf"wisparse\.json: {OLD}; convert again"),
    (recipe(format_version="2"), "format_version: expected 2, found '2'"),
    (recipe(default=0.4), r"wisparse\.json: default: expected one of the sparsity levels 0\.3, 0\.5, 0\.7, found 0\.4"),
    (put(RECIPE, "default"), "default: expected a number in"),
    (recipe(levels=[]), "levels: expected 1 to 16"),
    (put(RECIPE, "levels", lambda levels: levels * 6), "levels: expected 1 to 16"),
    (put(RECIPE, "levels/2"), r"wisparse\.sparsities: expected \[0\.3, 0\.5\], found \[0\.3, 0\.5, 0\.7\]"),
    (drop_a_level, r"model\.layers\.0\.self_attn\.q_proj: expected channel_scale \(2, 16\) in F32, found \(3, 16\)"),
    (put(RECIPE, "levels", lambda levels: levels[::-1]), rf"{ASCENDING}0\.7, 0\.5, 0\.3"),
    (put(RECIPE, "levels/2/sparsity", 0.5), rf"{ASCENDING}0\.3, 0\.5, 0\.5"),
    (put(RECIPE, "levels/2/sparsity", 0.96), r"levels\[2\]\.sparsity: expected a number in \[0, 0\.95\], found 0\.96"),
    (recipe(levels=["x"]), r"levels\[0\]: expected an object, found 'x'"),
    (put(RECIPE, "levels/0/sparsity", 0), r"k_proj: sparsity: expected 0 at the sparsity level 0, found 0\.3"),
    (put(RECIPE, ENTRY), r"no entry for model\.layers\.0\.self_attn\.o_proj"),
    (put(RECIPE, f"{LEVEL}/projections", lambda found: [*found, found[0]]), "unknown or repeated"),
    (put(RECIPE, f"{ENTRY}/sparsity", 1.0), r"projections\[3\]\.sparsity: expected a number in \[0, 0\.95\], found 1"),
    (put(RECIPE, f"{ENTRY}/alpha", -1), r"projections\[3\]\.alpha: expected a number, 0 or more, found -1"),
    (put(RECIPE, f"{ENTRY}/alpha", 10**400), "alpha: expected a number, 0 or more, found 1000"),
    (put(RECIPE, f"{ENTRY}/name", 3), r"projections\[3\]\.name: expected a string, found 3"),
    (recipe(calibration=[]), "calibration: expected an object"),
    (put(RECIPE, "calibration/seed", 1.5), r"calibration\.seed: expected a whole number, 0 or more, found 1\.5"),
    (put(RECIPE, f"{LEVEL}/projections", {}), r"levels\[1\]\.projections: expected a list, found \{\}"),
    (put(RECIPE, f"{LEVEL}/block_sparsities/0"), r"block_sparsities of .* level 0\.5: expected 2 values, found 1"),
    (put(RECIPE, f"files/{SHARD}"), f"no entry for {SHARD}"),
    (put(RECIPE, "files/tokenizer.json"), "no entry for tokenizer.json"),
    # The configuration.
    (put(CONFIG, "wisparse/format_version", 3), f"config.json: {NEW}"),
    (put(CONFIG, "wisparse/format_version", 1), rf"config\.json: {OLD}; convert again"),
    (put(CONFIG, "wisparse"), "expected an object under"),
    (put(CONFIG, "wisparse/sidecar", "../x"), "wisparse.sidecar: expected 'wisparse.safetensors', found '../x'"),
    (put(CONFIG, "wisparse/sparsity", 0.4), "wisparse.sparsity: expected 0.5, found 0.4"),
    (put(CONFIG, "wisparse/sparsities", [0.3, 0.5]), SPARSITIES + r"\[0\.3, 0\.5\]"),
    (put(CONFIG, "wisparse/sparsities"), SPARSITIES + "None"),
    (edit(CONFIG, lambda d: d.update(quantization_config={"quant_method": "x"})), "quantised"),
    (put(CONFIG, "rope_parameters", LINEAR), "rope_parameters.factor: expected a positive number, found 'x'"),
    (lambda f: (f / "generation_config.json").write_text("[]"), "expected a JSON object"),
    # The weights.
    (put(INDEX, f"weight_map/{NORM}"), "which the index does not place there"),
    (put(SHARD, f"{NORM}/shape", [4, 4]), r"model\.norm\.weight: expected shape \(16,\), found \(4, 4\)"),
    (rename(SHARD, NORM, "model.morn.weight"), "'model.morn.weight', which the index does not place there"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_rule(change: Change, message: str, bundle: Path) -> None:
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
    words = r"one of the bundle's sparsity levels, 0\.3, 0\.5, 0\.7, or 0 for the dense model, found"
    with pytest.raises(UsageError, match=words):
        Bundle.open(intact).at(sparsity)


def other_space(name: str) -> Change:
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
        f"no {name}": (lambda folder, name=name: (folder / name).unlink(), r"missing|expected a bundle|no weights")
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
    (bundle / "figures" / "a.png").unlink()
    for name in ("README.md", "notes.txt", ".gitattributes"):
        (bundle / name).write_text("another")
    notes = verify_bundle(bundle).notes
    assert [note.split(":")[0] for note in notes] == ["README.md", "figures/a.png", "notes.txt"]


def test_names_of_unknown_files_do_not_steer_the_terminal(bundle: Path) -> None:
    for name in (b"\x1b]0;owned\x07.txt", "\u202etxt.exe".encode(), b"\xff.txt", b"a\nb"):
        (bundle / os.fsdecode(name)).touch()
    result = CliRunner().invoke(verify_command, [str(bundle)])
    assert result.exit_code == 0
    assert "note: \ufffd]0;owned\ufffd.txt: not part of the bundle\n" in result.output
    assert result.output.count("\n") == 5
    assert all(line.isprintable() for line in result.output.splitlines())


PLACES = [(RECIPE, "base_model"), (RECIPE, "search/a\ud800b"), ("tokenizer_config.json", "eos_token")]


@pytest.mark.parametrize(("name", "path"), [*PLACES, (CONFIG, "torch_dtype"), (INDEX, "weight_map/a\ud800b")])
def test_half_of_a_surrogate_pair_is_refused(name: str, path: str, bundle: Path) -> None:
    put(name, path, "a\ud800b")(bundle)
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
    for folder, error, words in (
        (tmp_path, BundleError, r"expected a bundle, a folder with wisparse\.json, found .*; make one with"),
        (tmp_path / "nope", AccessError, "expected a folder"),
        (bundle.rename(bundle.with_name("x.partial")), BundleError, "an unfinished conversion"),
    ):
        with pytest.raises(error, match=words):
            Bundle.open(folder)


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


TESTS = Path(__file__).resolve().parent

# Readers that believe what they are told: no digests.
CREDULOUS = """
import json, sys
sys.path.insert(0, {tests!r})
import hostile
from wisparse.formats import bundle
bundle.is_document = lambda name: True
bundle.read_checked = lambda *file: bundle.guard.read_bounded(*file[:2], 1 << 30, bundle.BundleError)
hostile.MUTATIONS = {{kind: hostile.MUTATIONS[kind] for kind in ("swap_tensors", "flip_bits", "bad_tokenizer")}}
print(json.dumps(hostile.run([f"0:{{index}}" for index in range(60)], seconds=20)))
"""


def _run(*command: str) -> tuple[dict[str, Any], str]:
    # One process of its own: it limits its memory and listens to the alarm clock.
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=1700)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("cases", "seed"), [(75, 0), pytest.param(850, 1, marks=pytest.mark.exhaustive)])
def test_hostile_bundles(cases: int, seed: int) -> None:
    summary, stderr = _run(str(TESTS / "hostile.py"), *(f"{seed}:{index}" for index in range(cases)))
    assert summary["failures"] == [], stderr[-3000:]
    assert sum(summary["outcomes"].values()) == cases
    assert set(summary["outcomes"]) == {"refused", "identical", "unverified", "forged"}


@pytest.mark.exhaustive
def test_the_harness_sees_readers_that_check_nothing() -> None:
    summary, _ = _run("-c", CREDULOUS.format(tests=str(TESTS)))
    assert any("other tokens or meaning than the intact bundle" in failure["error"] for failure in summary["failures"])


def test_the_digest_of_an_older_bundle_stays_as_it_was() -> None:
    """Fields that came later are not in a document that lacks them: a change of this digest makes bundles unreadable."""
    projection = {"name": "model.layers.0.mlp.down_proj", "sparsity": 0.5, "alpha": 1.0, "threshold": 0.25}
    projection |= {"realised_sparsity": 0.5}
    calibration = {"source": "s", "num_samples": 1, "seq_len": 2, "seed": 0, "digest": "0" * 64, "num_tokens": 2}
    levels = [{"sparsity": 0.5, "projections": [projection], "block_sparsities": [0.5]}]
    document = {"base_model": "a", "base_revision": None, "method": "wisparse", "default": 0.5, "levels": levels}
    document |= {"format_version": 2, "calibration": calibration, "search": {}, "versions": {}}
    recipe = Recipe.from_dict(document)
    assert json.loads(json.dumps(recipe.to_dict())) == document
    known = "1ba0e24a8e6404c8ff519610901df914b812638905f50271bfbec47057a38366"
    assert sidecar_metadata(recipe)["recipe_sha256"] == known
