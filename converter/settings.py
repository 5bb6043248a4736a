"""The settings of a conversion: one table for the command line, `wisparse.convert` and every check. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from wisparse.formats import guard
from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import MAX_LEVELS, MAX_SPARSITY, bits_of, unread
from wisparse.formats.weight_types import NOT_DTYPES

METHODS = ("wisparse", "teal", "wina", "wina-code")
SEARCHES = ("refine", "fisher", "paper", "greedy", "uniform")
REPORTS = ("auto", "full", "brief")
DTYPES = ("auto", "bfloat16", "float16", "float32")
WEIGHTS = ("native", "int8", "fp8", "int4", "graded")
ROTATIONS = ("auto", "pca", "none")

# The default sparsity levels. From 40% to 50% speed grows by an eighth and the KL more than doubles: docs/choosing.md.
USUAL, USUAL_DEFAULT = (0.3, 0.4, 0.5), 0.4
# The default levels of graded weights, in bits.
USUAL_BITS, USUAL_DEFAULT_BITS = (4.25, 3.5, 3.0), 3.5

# What --search auto is for each method. TEAL allocates greedily within blocks, the WINA methods uniformly.
_OWN_SEARCH = {"wisparse": "refine", "teal": "greedy", "wina": "uniform", "wina-code": "uniform"}

_LARGEST = 2**63 - 1
# Ranges: lower bound, upper bound, and both in words.
_FRACTION = 0.0, MAX_SPARSITY, f"a number from 0 to {MAX_SPARSITY}"
_BITS = bits_of(MAX_SPARSITY), 8.0, f"a number of bits from {bits_of(MAX_SPARSITY):.1g} to 8"
_LEVEL = 0.0, 8.0, "a sparsity or, of --weights graded, a number of bits"
_NATS = 0.0, 1e6, "a number of nats per token, 0 or more"
_SHARE = 0.0, 1.0, "a share of tokens, from 0 to 1"


# Help texts of the options.
HELP: dict[str, str] = dict(
    entry.split(": ", 1)
    for entry in """
output_dir: Folder to write the bundle to.
sparsity: Fraction of the weights in the blocks' linear layers to leave unread, 0 to 0.95. Several are sparsity levels of one
    bundle: choose among them when you load it.
bits: Of --weights graded: how many of a weight's 8 bits to read, on average over channels and tokens. Several are levels of
    one bundle.
default: The level in force unless another is asked for, by its sparsity or its bits.
max_kl: Find the highest sparsity (of --weights graded the fewest bits) whose KL(dense || sparse), in nats per token, is at
    most this, on text that neither the calibration nor the search has seen.
min_top1: The same for the share of tokens where dense and sparse choose the same: at least this, such as 0.95.
method: How channels are scored.
search: How the sparsity is spread over the layers. auto: refine; for other methods, their authors' way. fisher: nearly as
    good, in less time.
num_generations: Generations of --search paper. The paper has 400.
num_offspring: Candidates per generation of --search paper. The paper has 64.
calibration: self: the model writes its own text. paper: the paper's mixture, from the Hub. Or a text, JSONL or source file, a
    folder of them, or a Hub data set (USER/NAME). Repeat it for several.
num_samples: Calibration sequences.
seq_len: Tokens per calibration sequence.
seed: The same seed gives the same bundle.
rotation: pca: rotate the weights to the principal directions of what flows through them, where leaving channels out costs far
    less; the dense model stays the same but for rounding. none: the source's bytes. auto: pca where the model allows it; for
    int4, whichever costs less at the default level, measured.
weights: How the bundle stores the layers' weights. native: as the source does. int8, fp8: rounded, with a scale a row. int4:
    fitted to the calibration text (GPTQ), in groups of 128. graded: int8 in groups of 128, of which each token reads as many
    bits of a channel as its value is worth. As compressed-tensors, which others load.
dtype: Of the bundle's weights; auto copies the source's bytes.
device: auto, cpu, cuda or cuda:N.
revision: Branch, tag or commit of a model on the Hub.
gguf_file: The GGUF file to convert, of those in MODEL.
max_shard_size: Largest weight file.
work_dir: Folder for the state of an unfinished conversion.
resume: Keep the results of finished stages, and go on after the last one.
overwrite: Replace an existing bundle, once the new one is complete.
report: full: the report shows how sensitive each block is alone. brief leaves that out: nothing is decided by it, and on a CPU
    it takes time. auto: full on a GPU, brief on a CPU.
upload_repo: Push the bundle to the Hub afterwards.
private: Make that repository private.
""".replace("\n    ", " ")
    .strip()
    .splitlines()
)


def _option(kind: str, default: Any, group: str, **more: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "group": group, **more})


class ConvertOptions(TypedDict, total=False):
    """Keyword arguments of `wisparse.convert`, for type checkers: the fields of `ConvertSettings` before validation."""

    sparsity: float | Sequence[float]
    bits: float | Sequence[float]
    default: float | None
    max_kl: float | None
    min_top1: float | None
    method: str
    search: str
    num_generations: int | None
    num_offspring: int | None
    calibration: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    num_samples: int
    seq_len: int | None
    seed: int
    rotation: str
    weights: str
    dtype: str
    device: str
    revision: str | None
    gguf_file: str | None
    max_shard_size: str | int
    work_dir: str | os.PathLike[str] | None
    resume: bool
    overwrite: bool
    report: str
    upload_repo: str | None
    private: bool


@dataclass(frozen=True)
class ConvertSettings:
    """Settings of a conversion; ``None`` stands for a default that depends on the model or the device."""

    model: str = field(metadata={"kind": "place"})
    output_dir: Path = _option(  # noqa: RUF009
        "folder", None, "Output", letter="-o", shown="MODEL's name and -wisparse, with one sparsity its percentage"
    )
    sparsity: tuple[float, ...] = _option(
        "fractions", (), "Sparsity", range=_FRACTION, metavar="FRACTION[,…]", shown=",".join(map(str, USUAL))
    )
    bits: tuple[float, ...] = _option(
        "fractions", (), "Sparsity", range=_BITS, metavar="BITS[,…]", shown=",".join(map(str, USUAL_BITS))
    )
    default: float | None = _option(
        "float", None, "Sparsity", range=_LEVEL, metavar="LEVEL", shown="0.4, or the nearest to it; 3.5 bits"
    )
    max_kl: float | None = _option("float", None, "Sparsity", range=_NATS, metavar="NATS")
    min_top1: float | None = _option("float", None, "Sparsity", range=_SHARE, metavar="SHARE")
    method: str = _option("choice", "wisparse", "Search", choices=METHODS)
    search: str = _option("choice", "auto", "Search", choices=("auto", *SEARCHES))
    num_generations: int | None = _option("int", None, "Search", low=1)
    num_offspring: int | None = _option("int", None, "Search", low=1)
    calibration: tuple[str, ...] = _option("places", ("self",), "Calibration", metavar="SOURCE")
    num_samples: int = _option("int", 16, "Calibration", low=1)
    # The first token of a sequence is not counted.
    seq_len: int | None = _option("int", None, "Calibration", low=8, shown="2048 on a GPU, 512 on a CPU")
    seed: int = _option("int", 0, "Calibration", low=0)
    rotation: str = _option("choice", "auto", "Weights", choices=ROTATIONS)
    weights: str = _option("choice", "native", "Weights", choices=WEIGHTS)
    dtype: str = _option("choice", "auto", "Weights", choices=DTYPES)
    device: str = _option("any", "auto", "Run")
    revision: str | None = _option("text", None, "Run")
    gguf_file: str | None = _option("text", None, "Run", metavar="NAME.gguf")
    max_shard_size: str = _option("size", "5GB", "Output")
    work_dir: Path | None = _option("folder", None, "Run", shown="OUTPUT_DIR.work")  # noqa: RUF009
    resume: bool = _option("switch", True, "Run", no="--no-resume")
    overwrite: bool = _option("switch", False, "Output")
    report: str = _option("choice", "auto", "Output", choices=REPORTS)
    upload_repo: str | None = _option("text", None, "Output", metavar="USER/NAME")
    private: bool = _option("switch", False, "Output")

    def __post_init__(self) -> None:
        """Validate each value, then combinations of values; raises UsageError before anything is read."""
        for option in fields(self):
            object.__setattr__(self, option.name, _validated(option, getattr(self, option.name)))
        if self.output_dir is None:
            object.__setattr__(self, "output_dir", default_output(self.model, self.sparsity, self.gguf_file))
        guard.text("--output-dir", str(self.output_dir))  # safetensors cannot open a path that is not UTF-8
        name, work, out = self.output_dir.name, self.work_dir and self.work_dir.resolve(), self.output_dir.resolve()
        budget = self.has_budget and ("--max-kl" if self.max_kl is not None else "--min-top1")
        graded, named = self.weights == "graded", "--bits" if self.bits else "--sparsity"
        values = self.bits or self.sparsity
        found = ", ".join(f"{level:g}" for level in values)
        levels = ", ".join(f"{bits_of(level) if graded else level:g}" for level in self.levels)
        finds, search = f"{budget} finds the sparsity: leave", self.chosen_search
        of_paper = f"requires --search paper, found --search {search}"
        for wrong, sentence in (
            (not name or name == "..", "--output-dir: expected the name of a folder to be made, found "
             f"{str(self.output_dir)!r}; name one inside it"),
            (graded and self.sparsity, "--weights graded: expected levels by --bits, found --sparsity"),
            (self.bits and not graded, f"--bits: expected --weights graded, found --weights {self.weights}"),
            (graded and (self.method != "wisparse" or search not in ("refine", "fisher")),
             "--weights graded: expected --method wisparse and --search refine or fisher, found "
             f"{self.method} and {search}"),
            (len(set(values)) < len(values), f"{named}: expected one or several different numbers, found {found}"),
            (len(values) > MAX_LEVELS, f"{named}: a bundle holds at most {MAX_LEVELS} of them, found {len(values)}"),
            (budget and values, f"{finds} {named} out"),
            (budget and self.default is not None, f"{finds} --default out"),
            (not budget and self.default is not None and self._default not in self.levels,
             f"--default: expected one of the {'bits' if graded else 'sparsities'} {levels}, found {self.default!r:.40}"),
            (self.search in ("fisher", "refine") and self.method != "wisparse",
             f"--search {self.search} requires --method wisparse, found --method {self.method}; choose greedy, paper or "
             "uniform"),
            (self.num_generations is not None and search != "paper", f"--num-generations {of_paper}"),
            (self.num_offspring is not None and search != "paper", f"--num-offspring {of_paper}"),
            (self.weights != "native" and self.dtype != "auto",
             f"--weights {self.weights} stores the layers quantized and the rest as it is; leave --dtype out"),
            (not self.calibration, "--calibration: expected self, paper, a Hub data set or paths, found nothing"),
            (len(self.calibration) > 1 and {"self", "paper"} & set(self.calibration),
             "--calibration: self and paper stand alone; they cannot be mixed with other sources"),
            (self.private and self.upload_repo is None, "--private requires --upload-repo"),
            (work and not self.resume, "--work-dir and --no-resume exclude each other: it keeps no state"),
            (work and (work == out or out in work.parents or work in out.parents),
             f"--work-dir {self.work_dir} and the output {self.output_dir} must not lie within each other"),
        ):  # fmt: skip
            if wrong:
                raise UsageError(sentence)

    @property
    def has_budget(self) -> bool:
        return self.max_kl is not None or self.min_top1 is not None

    @property
    def levels(self) -> tuple[float, ...]:
        """Sparsity levels, ascending (of graded weights the fractions of their bits left unread); empty with a budget."""
        if self.has_budget:
            return ()
        if self.weights == "graded":
            return tuple(sorted(unread(bits) for bits in self.bits or USUAL_BITS))
        return self.sparsity or USUAL

    @property
    def _default(self) -> float | None:
        """``default`` as a sparsity."""
        return unread(self.default) if self.weights == "graded" and self.default is not None else self.default

    @property
    def usual_default(self) -> float:
        return unread(USUAL_DEFAULT_BITS) if self.weights == "graded" else USUAL_DEFAULT

    def default_of(self, levels: Iterable[float]) -> float:
        """The default of ``levels``: the one asked for, or the nearest to `usual_default`, of two the lower."""
        if self._default is not None:
            return self._default
        return min(levels, key=lambda level: (round(abs(level - self.usual_default), 9), level))

    @property
    def length(self) -> int:
        """``seq_len``, which is set after the preflight."""
        assert self.seq_len is not None
        return self.seq_len

    @property
    def chosen_search(self) -> str:
        """``search``, with ``auto`` resolved."""
        return _OWN_SEARCH[self.method] if self.search == "auto" else self.search

    @property
    def state_dir(self) -> Path:
        return self.work_dir or self.output_dir.with_name(self.output_dir.name + ".work")

    def full_report(self, device_type: str) -> bool:
        """Whether the report has the KL with one block sparse at a time."""
        return self.report == "full" or (self.report == "auto" and device_type == "cuda")

    def fingerprint(self) -> dict[str, Any]:
        """The settings that a recipe's numbers depend on, by the names of their options."""
        target: dict[str, Any] = {"max_kl": self.max_kl, "min_top1": self.min_top1}
        if not self.has_budget:
            target = {"sparsity": list(self.levels), "default": self.default_of(self.levels)}
        names = ("rotation", "weights", "method", "num_generations", "num_offspring", "num_samples", "seq_len", "seed")
        return {**target, **{name: getattr(self, name) for name in names}, "search": self.chosen_search}


def _validated(option: Field[Any], value: Any) -> Any:
    """The value converted to the option's type; UsageError if it is not valid."""
    metadata = option.metadata
    name = "model" if option.name == "model" else "--" + option.name.replace("_", "-")
    if metadata["kind"] in ("fractions", "places"):
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if metadata["kind"] == "places":
            return tuple(guard.place(name, item) for item in values)
        if value is None or (isinstance(value, tuple) and not value):
            return ()
        low, high, words = metadata["range"]
        expected = f"{words}, or several"
        if not values:
            raise UsageError(f"{name}: expected {expected}, found none")
        return tuple(sorted(guard.number(name, item, low, high, expected) for item in values))
    if value is None and option.default is None:
        return None
    match metadata["kind"]:
        case "float":
            return guard.number(name, value, *metadata["range"])
        case "int":
            return guard.integer(name, value, metadata["low"], _LARGEST)
        case "switch":
            return guard.switch(name, value)
        case "choice":
            return guard.choice(name, value, metadata["choices"], NOT_DTYPES if name == "--dtype" else {})
        case "text":
            return guard.text(name, value, empty=False)
        case "place":
            return guard.place(name, value)
        case "folder":
            return guard.expand(guard.place(name, value))
        case "size" if not isinstance(value, str):
            return str(guard.integer(name, value, 1))
        case _:  # device and max_shard_size: validated in the preflight
            return value


def auto_seq_len(device_type: str, context: int) -> int:
    """Default tokens per calibration sequence: a conversion takes minutes, and the model's context is the limit."""
    return min(2048 if device_type == "cuda" else 512, context)


def default_output(model: str, sparsity: tuple[float, ...] = (), gguf_file: str | None = None) -> Path:
    """``<model-name>-wisparse`` in the current folder; with one sparsity level of 50%, ``<model-name>-wisparse-50``."""
    percent = "-" + f"{100 * sparsity[0]:.4g}".replace(".", "p") if len(sparsity) == 1 else ""
    if gguf := guard.find_gguf(model, gguf_file):
        name = gguf.stem
    else:
        folder = guard.find_folder(model)
        name = folder.resolve().name if folder else model.rsplit("/", 1)[-1]
    return Path(f"{name or 'model'}-wisparse{percent}")
