"""``wisparse.json``: the recipe, the sha256 of every file and the crc32 of every weight tensor.

The sha256 are what ``verify`` checks and what anyone can check with ``sha256sum``. The crc32 are checked on the very
bytes a tensor is loaded from: several times faster, and enough against damage. Neither is a signature: who can
rewrite a bundle can rewrite them too, so nothing is believed because a digest fits.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from .errors import AccessError, BundleError
from .folder import Kind
from .guard import dump_json, read_json

# Version 1 held one sparsity; it is still read.
FORMAT_VERSION = 2


@dataclass(frozen=True)
class ProjectionRecipe:
    """What was decided for one projection.

    Attributes:
        name: full Hugging Face module name, e.g. ``model.layers.0.mlp.down_proj``.
        sparsity: fraction of channels to drop, in [0, 0.95]; 0 means dense, no mask.
        alpha: exponent of the weight norm in the score, >= 0.
        threshold: keep a channel if its score is at least this.
        realised_sparsity: fraction of channels dropped on the calibration tokens.
    """

    name: str
    sparsity: float
    alpha: float
    threshold: float
    realised_sparsity: float


@dataclass(frozen=True)
class SparsityLevel:
    """One sparsity of a bundle.

    Attributes:
        sparsity: the target, a fraction of the parameters of all projections in scope, in [0, 0.95].
        projections: one entry per projection of the model, in the order of execution.
        block_sparsities: parameter-weighted sparsity of every block.
    """

    sparsity: float
    projections: tuple[ProjectionRecipe, ...]
    block_sparsities: tuple[float, ...]


@dataclass(frozen=True)
class CalibrationRecord:
    """Which text the thresholds rest on. ``digest`` is the sha256 of the token ids."""

    source: str
    num_samples: int
    seq_len: int
    num_tokens: int
    seed: int
    digest: str


@dataclass(frozen=True)
class RotationRecord:
    """How the source's weights were turned before anything else.

    Attributes:
        kind: ``pca``: to the principal directions of the hidden states over another text, and of each head's values.
        kl: KL(source || turned), nats a token, both dense, in the type of the conversion: what rounding costs.
        num_tokens: that it was measured on.
    """

    kind: str
    kl: float
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.kind}: KL {self.kl:.2g} nats/token to the source, both dense ({self.num_tokens} tokens)"


@dataclass(frozen=True)
class Recipe:
    """Everything a conversion decided, and from what.

    Attributes:
        base_model: Hub id or folder name of the source; never a path of the machine that converted it.
        base_revision: commit of the source, where it came from the Hub.
        method: ``wisparse``, ``teal``, …
        default: sparsity of the sparsity level that is in force unless another is asked for.
        sparsity levels: at least one, in ascending sparsity, no two of them equal.
        search: settings and outcome of the search, JSON values only.
        versions: of the libraries that took part.
        vision_tensors_left_out: how many tensors of the source are not its text model's; on disk only if any.
        rotation: of the weights; None where they are the source's, and then not on disk.
    """

    base_model: str
    base_revision: str | None
    method: str
    default: float
    levels: tuple[SparsityLevel, ...]
    calibration: CalibrationRecord
    search: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    vision_tensors_left_out: int = 0
    rotation: RotationRecord | None = None

    @property
    def sparsities(self) -> tuple[float, ...]:
        """Of all sparsity levels, ascending."""
        return tuple(level.sparsity for level in self.levels)

    @property
    def sparsity(self) -> float:
        """Of the default sparsity level."""
        return self.default

    @property
    def projections(self) -> tuple[ProjectionRecipe, ...]:
        """Of the default sparsity level."""
        return self.at(self.default).projections

    @property
    def block_sparsities(self) -> tuple[float, ...]:
        """Of the default sparsity level."""
        return self.at(self.default).block_sparsities

    def at(self, sparsity: float) -> SparsityLevel:
        """The sparsity level of exactly this sparsity, one of ``sparsities``."""
        return next(level for level in self.levels if level.sparsity == sparsity)

    @property
    def text_only(self) -> str | None:
        """What of the source is not in the bundle, in words; None where nothing is missing."""
        count = self.vision_tensors_left_out
        return f"text only: {count} tensor{'s' * (count > 1)} of the vision tower left out" if count else None

    def to_dict(self, version: int = FORMAT_VERSION) -> dict[str, Any]:
        """JSON-ready, with ``format_version`` first; as version 1 had it, where there is one sparsity level."""
        document = {"format_version": version, **asdict(self)}
        if version == 1:
            del document["default"]
            (level,) = document.pop("levels")
            document |= level
        if not self.vision_tensors_left_out:
            del document["vision_tensors_left_out"]
        if self.rotation is None:
            del document["rotation"]
        return document


MANIFEST = "wisparse.json"
SIDECAR = "wisparse.safetensors"
# No projection is dropped entirely: beyond this the error is that of removing the projection, and thresholds rest on
# the extreme tail of the scores.
MAX_SPARSITY = 0.95
# Steps of a dial; each costs a bundle one row of numbers a projection.
MAX_LEVELS = 16
MAX_MANIFEST_BYTES = 32 << 20

_FILE_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_-]{0,99}/)?[A-Za-z0-9_][A-Za-z0-9 ._-]{0,199}")


@dataclass(frozen=True)
class Manifest:
    """The content of ``wisparse.json``.

    Attributes:
        recipe: what the conversion decided.
        sha256: file name -> hex digest, for every file of the bundle but ``wisparse.json`` itself.
        crc32: weight tensor -> crc32 of its bytes.
        version: of the format; what is written has the newest.
    """

    recipe: Recipe
    sha256: Mapping[str, str]
    crc32: Mapping[str, int]
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file; equal manifests give equal bytes."""
        return dump_json(
            {
                **self.recipe.to_dict(self.version),
                "tensors": {name: {"crc32": f"{value:08x}"} for name, value in self.crc32.items()},
                "files": {name: {"sha256": self.sha256[name]} for name in sorted(self.sha256)},
            }
        )

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Manifest:
        """Read a parsed ``wisparse.json``; keys it does not know are left for later versions of the format.

        Raises:
            BundleError: a newer format version, a missing or ill-typed value, or sparsity levels out of order.
        """
        version = require_version(document.get("format_version"), MANIFEST)
        recipe = _recipe(document, version)
        sha256 = _files(document)
        crc32 = {
            name: int(_hex(entry, "crc32", 8, f"tensors.{name!r:.200}"), 16)
            for name, entry in _object(document, "tensors").items()
        }
        return cls(recipe, sha256, crc32, version)


def listed_files(folder: Path) -> dict[str, str]:
    """File of the bundle -> sha256 that it should have, for every file but ``wisparse.json`` itself.

    Raises:
        BundleError: no manifest, or none of a format version that this code reads.
    """
    document = read_json(folder, MANIFEST, MAX_MANIFEST_BYTES, BundleError)
    require_version(document.get("format_version"), MANIFEST)
    return _files(document)


def _files_of(folder: Path) -> set[str] | None:
    try:
        return {*listed_files(folder), MANIFEST}
    except (BundleError, AccessError):
        return None


# How a bundle's folder is told from all others when it is replaced.
BUNDLE = Kind("a bundle", "conversion", MANIFEST, _files_of)


def _files(document: Mapping[str, Any]) -> dict[str, str]:
    sha256 = {}
    for name, entry in _object(document, "files").items():
        if not is_file_name(name):
            raise BundleError(f"{MANIFEST}: files: {name!r:.200} is not a name this format allows")
        sha256[name] = _hex(entry, "sha256", 64, f"files.{name}")
    return sha256


def is_file_name(name: str) -> bool:
    """Whether a bundle may hold a file of this name: plain characters, at most one folder deep."""
    return _FILE_NAME.fullmatch(name) is not None


def has_masks(folder: Path) -> bool:
    """Whether a folder holds a bundle's own files, so that its model is sparse.

    The entry in ``config.json`` does not say: transformers copies it into whatever it saves from a bundle it loaded,
    which is a dense checkpoint.
    """
    return any((folder / name).exists() for name in (MANIFEST, SIDECAR))


def recipe_digest(recipe: Recipe, version: int = FORMAT_VERSION) -> str:
    """sha256 of the recipe as compact JSON with sorted keys; it ties the sidecar to its recipe."""
    text = json.dumps(
        recipe.to_dict(version), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def require_version(value: Any, where: str, same: int | None = None) -> int:
    """``value``, if it is a format version that this code reads, and the ``same`` as the rest of the bundle has.

    Raises:
        BundleError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BundleError(f"{where}: format_version: expected {same or FORMAT_VERSION}, found {value!r:.60}")
    if value > FORMAT_VERSION:
        raise BundleError(
            f"{where}: the bundle has format version {value!r:.60}, this wisparse reads versions 1 to "
            f"{FORMAT_VERSION}; install a newer wisparse"
        )
    if value != (same or value):
        raise BundleError(f"{where}: format_version: expected {same} as in {MANIFEST}, found {value}; convert again")
    return value


def check_levels(recipe: Recipe, error: Callable[[str], Exception]) -> None:
    """Raise ``error(text)`` unless the sparsity levels are in order, each in its range, and the default is one of them."""
    found = recipe.sparsities
    listed = ", ".join(f"{sparsity!r:.20}" for sparsity in found)
    if not 1 <= len(found) <= MAX_LEVELS:
        raise error(f"sparsity levels: expected 1 to {MAX_LEVELS}, found {len(found)}; convert again")
    for sparsity in found:
        if not 0 <= sparsity <= MAX_SPARSITY:
            raise error(f"sparsity: expected a number in [0, {MAX_SPARSITY}], found {sparsity!r:.20}")
    if any(low >= high for low, high in pairwise(found)):
        raise error(f"sparsity levels: expected ascending sparsities, none twice, found {listed}; convert again")
    if recipe.default not in found:
        raise error(
            f"default: expected one of the sparsity levels {listed}, found {recipe.default!r:.20}; convert again"
        )
    for level in recipe.levels:
        if level.sparsity == 0 and (odd := next((entry for entry in level.projections if entry.sparsity), None)):
            raise error(
                f"{odd.name:.200}: sparsity: expected 0 at the sparsity level 0, found {odd.sparsity!r:.20}; convert again"
            )


def _recipe(document: Mapping[str, Any], version: int) -> Recipe:
    if version == 1:
        levels = [_level(document, "")]
        default = levels[0].sparsity
    else:
        default = _number(document, "default", "", high=MAX_SPARSITY)
        listed = document.get("levels")
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_LEVELS:
            raise _wrong("levels", f"a list of 1 to {MAX_LEVELS}", listed)
        levels = [_level(entry, f"sparsity levels[{index}]") for index, entry in enumerate(listed)]
    revision = document.get("base_revision")
    calibration = _object(document, "calibration")
    recipe = Recipe(
        base_model=_text(document.get("base_model"), "base_model"),
        base_revision=None if revision is None else _text(revision, "base_revision"),
        method=_text(document.get("method"), "method"),
        default=default,
        levels=tuple(levels),
        calibration=CalibrationRecord(
            source=_text(calibration.get("source"), "calibration.source"),
            num_samples=_count(calibration, "num_samples"),
            seq_len=_count(calibration, "seq_len"),
            num_tokens=_count(calibration, "num_tokens"),
            seed=_count(calibration, "seed"),
            digest=_text(calibration.get("digest"), "calibration.digest"),
        ),
        search=_object(document, "search"),
        versions={key: _text(value, f"versions.{key}") for key, value in _object(document, "versions").items()},
        vision_tensors_left_out=_count(document, "vision_tensors_left_out", "", default=0),
        rotation=_rotation(document.get("rotation")),
    )
    check_levels(recipe, lambda text: BundleError(f"{MANIFEST}: {text}"))
    return recipe


def _rotation(entry: Any) -> RotationRecord | None:
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise _wrong("rotation", "an object", entry)
    return RotationRecord(
        kind=_text(entry.get("kind"), "rotation.kind"),
        kl=_number(entry, "kl", "rotation"),
        num_tokens=_count(entry, "num_tokens", "rotation"),
    )


def _level(entry: Any, where: str) -> SparsityLevel:
    if not isinstance(entry, dict):
        raise _wrong(where, "an object", entry)
    inside = f"{where}." if where else ""
    projections = entry.get("projections")
    if not isinstance(projections, list):
        raise _wrong(f"{inside}projections", "a list", projections)
    return SparsityLevel(
        sparsity=_number(entry, "sparsity", where, high=MAX_SPARSITY),
        projections=tuple(_projection(one, f"{inside}projections[{index}]") for index, one in enumerate(projections)),
        block_sparsities=_fractions(entry.get("block_sparsities"), f"{inside}block_sparsities"),
    )


def _projection(entry: Any, where: str) -> ProjectionRecipe:
    if not isinstance(entry, dict):
        raise _wrong(where, "an object", entry)
    return ProjectionRecipe(
        name=_text(entry.get("name"), f"{where}.name"),
        sparsity=_number(entry, "sparsity", where, high=MAX_SPARSITY),
        alpha=_number(entry, "alpha", where),
        threshold=_number(entry, "threshold", where),
        realised_sparsity=_number(entry, "realised_sparsity", where, high=1.0),
    )


def _fractions(values: Any, where: str) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise _wrong(where, "a list", values)
    return tuple(_number({"block": value}, "block", where, high=1.0) for value in values)


def _object(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise _wrong(key, "an object", value)
    return value


def _hex(entry: Any, key: str, length: int, where: str) -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{length}}}", value):
        raise _wrong(f"{where}.{key}", f"{length} hex digits", value)
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a string", value)
    return value


def _number(entry: Mapping[str, Any], key: str, where: str, high: float = math.inf) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
        wanted = f"a number in [0, {high}]" if high < math.inf else "a number, 0 or more"
        raise _wrong(f"{where}.{key}" if where else key, wanted, value)
    return value


def _count(entry: Mapping[str, Any], key: str, where: str = "calibration.", default: int | None = None) -> int:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(where + key, "a whole number, 0 or more", value)
    return value


def _wrong(where: str, wanted: str, found: Any) -> BundleError:
    return BundleError(f"{MANIFEST}: {where:.200}: expected {wanted}, found {found!r:.80}")
