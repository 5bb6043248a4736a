"""``wisparse.json``: the recipe and the sha256 of every file. FORMAT.md has the keys."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from .errors import AccessError, BundleError
from .folder import Kind
from .guard import dump_json, read_json
from .weight_types import PLANE_BITS, WEIGHT_TYPES

FORMAT_VERSION = 2
MANIFEST, SIDECAR = "wisparse.json", "wisparse.safetensors"
# Above it, thresholds depend on the extreme tail of the scores, and the error is about that of removing the projection.
MAX_SPARSITY = 0.95
MAX_LEVELS = 16
MAX_MANIFEST_BYTES = 32 << 20
# Numbers from 0 to the metadata's bound; a plain float is >= 0.
_Fraction = Annotated[float, 1.0]
_Sparsity = Annotated[float, MAX_SPARSITY]

# Names of a bundle's files: plain characters, at most one folder deep.
FILE_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_-]{0,99}/)?[A-Za-z0-9_][A-Za-z0-9 ._-]{0,199}")


@dataclass(frozen=True)
class ProjectionRecipe:
    """The recipe of one projection; ``realised_sparsity`` and ``zeros``, the fraction of the inputs that are exactly 0, are
    measured on the calibration tokens."""

    name: str
    sparsity: _Sparsity
    alpha: float
    threshold: float
    realised_sparsity: _Fraction
    zeros: _Fraction = 0.0  # measured of activations that have zeros (relu²)


@dataclass(frozen=True)
class SparsityLevel:
    sparsity: _Sparsity  # the target, a fraction of the projections' parameters
    projections: tuple[ProjectionRecipe, ...]  # in the order of execution
    block_sparsities: tuple[_Fraction, ...]  # weighted by parameters


@dataclass(frozen=True)
class CalibrationRecord:
    """The calibration text of the thresholds. ``digest``: sha256 of the token ids."""

    source: str
    num_samples: int
    seq_len: int
    num_tokens: int
    seed: int
    digest: str


@dataclass(frozen=True)
class RotationRecord:
    # ``pca``: to the principal directions of the hidden states over another text, and of each head's values; ``fitted``: the
    # same, where norms after attention and MLP are fitted to it, an approximation; ``heads``: of heads' values alone
    kind: str
    # KL(source || rotated) in nats per token, both dense, in the conversion's dtype: the effect of rounding and fitting
    kl: float
    num_tokens: int  # of that measurement
    # On disk only if it is known: the KL of a fitted rotation that was too high, where ``heads`` was taken in its place.
    rejected_kl: float | None = None

    def __str__(self) -> str:
        found = f"{self.kind}: KL {self.kl:.2g} nats/token to the source, both dense ({self.num_tokens} tokens)"
        if self.kind == "fitted":
            return f"{found}: norms after attention and MLP are fitted to the rotated hidden state"
        if self.rejected_kl is not None:
            return f"{found}; the hidden state is not rotated: norms fitted to it would give KL {self.rejected_kl:.2g}"
        return found


@dataclass(frozen=True)
class QualityRow:
    """Quality of a weight type at a sparsity level against the source's weights, every token sparse. Means over the table's
    tokens; with fewer ``num_tokens`` they are estimated from those by the default level's ratio between both."""

    weights: str  # one of `WEIGHT_TYPES`
    sparsity: _Sparsity  # one of the bundle's levels, or 0
    num_tokens: int
    kl: float  # nats per token
    kl_stderr: float | None  # over sequences; None of one sequence
    top1_agreement: _Fraction
    perplexity: float
    perplexity_stderr: float | None = None  # on disk only if it is known


@dataclass(frozen=True)
class QualityTable:
    """What the conversion measured of each weight type and level that can be had from the bundle."""

    text: str
    num_tokens: int
    dense_perplexity: float  # of the source's weights
    # KL of the arithmetic that the table was measured in to float32, the source's weights in both; None: not measured.
    noise_floor: float | None
    rows: tuple[QualityRow, ...]


@dataclass(frozen=True)
class Recipe:
    base_model: str  # Hub id or folder name of the source, without a local path
    base_revision: str | None  # commit of a source on the Hub
    method: str
    default: _Sparsity  # the default level
    levels: tuple[SparsityLevel, ...]  # ascending, at least one
    calibration: CalibrationRecord
    search: Mapping[str, Any] = field(default_factory=dict)  # settings and outcome of the search, JSON values only
    versions: Mapping[str, str] = field(default_factory=dict)  # of libraries
    vision_tensors_left_out: int = 0  # number of the source's tensors outside the text model; on disk only if not 0
    rotation: RotationRecord | None = None  # on disk only if the weights were rotated
    plane_bits: tuple[int, ...] = ()  # of a graded bundle, the high plane first; on disk only then
    quality: QualityTable | None = None  # MAY be there
    dequantised_from: str = ""  # of a GGUF file, the types of its matrices with their number; on disk only then

    @property
    def sparsities(self) -> tuple[float, ...]:
        return tuple(level.sparsity for level in self.levels)

    @property
    def projections(self) -> tuple[ProjectionRecipe, ...]:
        return self.at(self.default).projections

    @property
    def block_sparsities(self) -> tuple[float, ...]:
        return self.at(self.default).block_sparsities

    def at(self, sparsity: float) -> SparsityLevel:
        """The level of this sparsity, one of ``sparsities``."""
        return next(level for level in self.levels if level.sparsity == sparsity)

    @property
    def graded(self) -> bool:
        return bool(self.plane_bits)

    @property
    def text_only(self) -> str | None:
        """A sentence on the source's parts that are not in the bundle, or None."""
        count = self.vision_tensors_left_out
        return f"text only: {count} tensor{'s' * (count > 1)} of the vision tower left out" if count else None

    @property
    def measured_against(self) -> str | None:
        """A sentence on the weights of a GGUF file, which quality is measured against, or None."""
        types = self.dequantised_from
        against = "quality is measured against the dequantised weights, not against what the file was made from"
        return f"dequantised from GGUF, {types}; {against}" if types else None

    def to_dict(self) -> dict[str, Any]:
        only_if_any = ("vision_tensors_left_out", "rotation", "plane_bits", "quality", "dequantised_from")
        document = {key: value for key, value in asdict(self).items() if value or key not in only_if_any}
        # Left off if not measured, as in bundles that are older than these fields: their digests are without them.
        for row in document.get("quality", {"rows": ()})["rows"]:
            if row["perplexity_stderr"] is None:
                del row["perplexity_stderr"]
        if "rotation" in document and document["rotation"]["rejected_kl"] is None:
            del document["rotation"]["rejected_kl"]
        for one in (one for level in document["levels"] for one in level["projections"]):
            if not one["zeros"]:
                del one["zeros"]
        return {"format_version": FORMAT_VERSION, **document}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Recipe:
        """From a parsed ``wisparse.json``; unknown keys are ignored. Raises BundleError."""
        recipe: Recipe = _decode(cls, document, "")
        found, listed = recipe.sparsities, ", ".join(f"{one!r:.20}" for one in recipe.sparsities)
        ascending = all(low < high for low, high in pairwise(found))
        planes = f"{[*PLANE_BITS]}, the high plane first, which are the {sum(PLANE_BITS)} bits of a code"
        checks = [
            (1 <= len(found) <= MAX_LEVELS, "sparsity levels", f"1 to {MAX_LEVELS}", f"{len(found)}"),
            (ascending, "sparsity levels", "ascending sparsities, none twice", listed),
            (recipe.default in found, "default", f"one of the sparsity levels {listed}", f"{recipe.default!r:.20}"),
            (recipe.plane_bits in ((), PLANE_BITS), "plane_bits", planes, f"{[*recipe.plane_bits]!r:.60}"),
        ]
        for one in recipe.levels[0].projections if found and not found[0] else ():
            where = f"{one.name:.200}: sparsity"
            checks.append((not one.sparsity, where, "0 at the sparsity level 0", f"{one.sparsity!r:.20}"))
        pairs = [(row.weights, row.sparsity) for row in recipe.quality.rows] if recipe.quality else []
        for number, (kind, sparsity) in enumerate(pairs):
            where, levels = f"quality.rows[{number}]", f"0 or one of the sparsity levels {listed}"
            checks.append(
                (kind in WEIGHT_TYPES, f"{where}.weights", f"one of {', '.join(WEIGHT_TYPES)}", f"{kind!r:.60}")
            )
            checks.append((sparsity in (0, *found), f"{where}.sparsity", levels, f"{sparsity!r:.20}"))
        checks.append(
            (len(set(pairs)) == len(pairs), "quality.rows", "each weight type and sparsity once", "one twice")
        )
        for valid, where, wanted, given in checks:
            if not valid:
                raise BundleError(f"{MANIFEST}: {where}: expected {wanted}, found {given}; convert again")
        return recipe


def bits_of(sparsity: float) -> float:
    """Bits read per graded weight at a level, whose sparsity is the share of unread bits."""
    return sum(PLANE_BITS) * (1.0 - sparsity)


def plus_minus(stderr: float | None) -> str:
    """A standard error behind its figure; empty if it is not known, or 0."""
    return f" ± {float(f'{stderr:.1g}'):g}" if stderr and math.isfinite(stderr) else ""


def level_name(sparsity: float, graded: bool, form: str = ".4g") -> str:
    """A level's name: its sparsity in percent, or the bits read per graded weight."""
    return f"{bits_of(sparsity):.4g} bits" if graded else f"{100 * sparsity:{form}}%"


def unread(bits: float) -> float:
    """The sparsity of a level of ``bits`` read per weight."""
    return 1.0 - bits / sum(PLANE_BITS)


@dataclass(frozen=True)
class Manifest:
    """``sha256``: hex digest by file name, of all files except ``wisparse.json``."""

    recipe: Recipe
    sha256: Mapping[str, str]

    def to_bytes(self) -> bytes:
        files = {name: {"sha256": digest} for name, digest in sorted(self.sha256.items())}
        return dump_json({**self.recipe.to_dict(), "files": files})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises BundleError for another version, or a missing or ill-typed value."""
        document = read_json(folder, MANIFEST, MAX_MANIFEST_BYTES, BundleError)
        sha256 = _files(document)
        return cls(Recipe.from_dict(document), sha256)


def listed_files(folder: Path) -> dict[str, str]:
    """Expected sha256 by file name, of all files except ``wisparse.json``. Raises BundleError."""
    return _files(read_json(folder, MANIFEST, MAX_MANIFEST_BYTES, BundleError))


def _files_of(folder: Path) -> set[str] | None:
    try:
        return {*listed_files(folder), MANIFEST}
    except (BundleError, AccessError):
        return None


# How `replaced_folder` recognises a bundle.
BUNDLE = Kind("a bundle", "conversion", MANIFEST, _files_of)


def sidecar_metadata(recipe: Recipe) -> dict[str, str]:
    """The sidecar's metadata; recipe_sha256 is over the recipe as compact JSON with sorted keys."""
    text = json.dumps(recipe.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return {"format": "wisparse", "format_version": str(FORMAT_VERSION), "recipe_sha256": digest}


def require_version(value: Any, where: str) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value > FORMAT_VERSION:
        newer = f"the bundle has format version {value!r:.60}, this wisparse reads version {FORMAT_VERSION}"
        raise BundleError(f"{where}: {newer}; install a newer wisparse")
    if isinstance(value, bool) or value != FORMAT_VERSION:
        raise BundleError(f"{where}: format_version: expected {FORMAT_VERSION}, found {value!r:.60}; convert again")


def _files(document: Mapping[str, Any]) -> dict[str, str]:
    require_version(document.get("format_version"), MANIFEST)
    files = {}
    for name, entry in _decode(Mapping[str, Any], document.get("files"), "files").items():
        if not FILE_NAME.fullmatch(name):
            raise BundleError(f"{MANIFEST}: files: {name!r:.200} is not a name this format allows")
        found = entry.get("sha256") if isinstance(entry, dict) else None
        if not isinstance(found, str) or not re.fullmatch("[0-9a-f]{64}", found):
            raise BundleError(f"{MANIFEST}: files.{name!r:.180}.sha256: expected 64 hex digits, found {found!r:.80}")
        files[name] = found
    return files


@cache
def _fields_of(record: type) -> dict[str, tuple[Any, Any]]:
    """By field of a record, its type and its default."""
    hints = get_type_hints(record, include_extras=True)
    return {one.name: (hints[one.name], None if one.default is MISSING else one.default) for one in fields(record)}


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to ``kind``, the type of a record's field; BundleError with its path and the expected type."""
    origin, arguments = get_origin(kind), get_args(kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if kind is Any or (origin is UnionType and value is None):
        return value
    if origin is UnionType:
        return _decode(arguments[0], value, where)
    if is_dataclass(kind) or origin is Mapping:
        valid, wanted = isinstance(value, dict), "an object"
    elif origin is tuple:
        valid, wanted = isinstance(value, list | tuple), "a list"  # a default is a tuple
    elif kind is str:
        valid, wanted = isinstance(value, str), "a string"
    elif kind is int:
        valid, wanted = is_number and isinstance(value, int), "a whole number, 0 or more"
    elif kind is float:
        valid, wanted = is_number and value <= sys.float_info.max, "a number, 0 or more"
    else:
        valid, wanted = is_number and value <= arguments[1], f"a number in [0, {arguments[1]}]"
    if not valid:
        raise BundleError(f"{MANIFEST}: {where:.200}: expected {wanted}, found {value!r:.80}")
    inside = f"{where}." if where else ""
    if is_dataclass(kind):
        hints = _fields_of(kind).items()  # type: ignore[arg-type]
        found = {name: _decode(hint, value.get(name, default), f"{inside}{name}") for name, (hint, default) in hints}
        return kind(**found)  # type: ignore[operator]
    if origin is Mapping:
        return {key: _decode(arguments[1], one, f"{inside}{key}") for key, one in value.items()}
    if origin is tuple:
        return tuple(_decode(arguments[0], one, f"{where}[{index}]") for index, one in enumerate(value))
    return value
