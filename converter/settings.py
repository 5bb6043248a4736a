"""Everything a conversion can be told, in one place, and what contradicts what. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wisparse.formats import guard
from wisparse.formats.errors import UsageError
from wisparse.formats.guard import find_folder
from wisparse.formats.manifest import MAX_LEVELS, MAX_SPARSITY

METHODS = ("wisparse", "teal", "wina", "wina-code")
# What these need beside masks no bundle holds.
_MEASURED = ("cats", "rsparse")
SEARCHES = ("refine", "fisher", "additive", "paper", "greedy", "uniform")
REPORTS = ("auto", "full", "brief")
DTYPES = ("auto", "bfloat16", "float16", "float32")
WEIGHTS = ("native", "int8", "fp8", "int4")
ROTATIONS = ("auto", "pca", "none")

# From 40% to 50% speed grows by an eighth and the KL more than doubles: docs/choosing.md.
USUAL, USUAL_DEFAULT = (0.3, 0.4, 0.5), 0.4

# TEAL spreads each block's sparsity greedily, the others take the same everywhere.
_OWN_SEARCH = {"wisparse": "refine", "teal": "greedy"} | dict.fromkeys(METHODS[2:], "uniform")

# Sequences need a first token that is left out and enough others; a sample of fewer tokens says little.
_SHORTEST = 8
_LARGEST = 2**63 - 1
_LARGEST_KL = 1e6


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert, how, and where to.

    Attributes:
        model: a folder, or a Hub id.
        output_dir: the bundle's folder.
        sparsities: the bundle's sparsity levels, fractions of the projections' parameters to leave unread, ascending, in
            [0, 0.95]; none: `USUAL`, or what a budget allows.
        default: the sparsity level that is in force unless another is asked for; None is `USUAL_DEFAULT`, or the sparsity level nearest to
            it.
        max_kl, min_top1: a budget: the one sparsity level is the highest sparsity whose KL(dense || sparse), in nats per token,
            and share of tokens with the dense model's first choice stay within it.
        method: what the score is and who is sparse (`METHODS`).
        search: how the sparsity is spread over the projections (`SEARCHES`); ``auto`` is the method's own: the best
            for its time for ``wisparse``, what its authors do for the others.
        num_generations, num_offspring: of an evolutionary search; None is the search's own default.
        calibration: ``self``, ``paper``, a Hub data set, or paths.
        num_samples, seq_len: how many sequences of how many tokens; a length of None is `auto_seq_len`'s.
        seed: of everything that is drawn.
        rotation: ``pca`` turns the weights to the principal directions of what flows through them (`rotate`), ``none``
            leaves them as they are; ``auto``, settled by the preflight, turns them where that is possible and
            ``wisparse`` is the method: the others are what their authors have.
        weights: how the projections are stored: ``native`` as the source has them, ``int8`` and ``fp8`` rounded with a
            scale a row, ``int4`` fitted to the calibration text in groups.
        dtype: of the bundle's weights; ``auto`` copies the source's bytes.
        device: to compute on.
        revision: branch, tag or commit of a Hub model.
        max_shard_size: bytes per weight file, as a number or as a text such as ``5GB``.
        work_dir: where the state lies; None is ``OUT.work`` beside the output.
        resume: keep state, and go on from it.
        overwrite: replace an existing bundle after success.
        report: ``full`` measures for a figure of the report how much each block minds being sparse alone, ``brief``
            leaves that out; ``auto`` is full on a GPU, where it takes seconds, and brief on a CPU. Nothing is decided
            by it.
        upload_repo: Hub repository to push to afterwards.
        private: make that repository private.
    """

    model: str
    output_dir: Path
    sparsities: tuple[float, ...] = ()
    default: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None
    method: str = "wisparse"
    search: str = "auto"
    num_generations: int | None = None
    num_offspring: int | None = None
    calibration: tuple[str, ...] = ("self",)
    num_samples: int = 16
    seq_len: int | None = None
    seed: int = 0
    rotation: str = "auto"
    weights: str = "native"
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    max_shard_size: str = "5GB"
    work_dir: Path | None = None
    resume: bool = True
    overwrite: bool = False
    report: str = "auto"
    upload_repo: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        # Here and not in `check`: what lies beside the output folder is named after it, by whoever asks first.
        if not self.output_dir.name or self.output_dir.name == "..":
            raise UsageError(
                f"--output-dir: expected the name of a folder to be made, found {str(self.output_dir)!r}; "
                "name one inside it"
            )

    @property
    def has_budget(self) -> bool:
        """Whether the sparsity is to be found."""
        return self.max_kl is not None or self.min_top1 is not None

    @property
    def levels(self) -> tuple[float, ...]:
        """The sparsities, ascending; none where a budget is to find one."""
        return () if self.has_budget else self.sparsities or USUAL

    def default_of(self, levels: Iterable[float]) -> float:
        """The default among these; of two equally near to the usual one the lower."""
        if self.default is not None:
            return self.default
        return min(levels, key=lambda level: (round(abs(level - USUAL_DEFAULT), 9), level))

    @property
    def length(self) -> int:
        """``seq_len`` where it is settled: given, or filled in by the preflight."""
        if self.seq_len is None:
            raise ValueError("seq_len is settled by the preflight, which knows the device")
        return self.seq_len

    @property
    def chosen_search(self) -> str:
        """The search that ``auto`` stands for, or the one asked for."""
        return _OWN_SEARCH[self.method] if self.search == "auto" else self.search

    @property
    def state_dir(self) -> Path:
        """Where the state of an unfinished conversion lies."""
        return self.work_dir or self.output_dir.with_name(self.output_dir.name + ".work")

    def full_report(self, device_type: str) -> bool:
        """Whether the report tells how much each block minds being sparse alone."""
        return self.report == "full" or (self.report == "auto" and device_type == "cuda")

    def deciding(self) -> dict[str, Any]:
        """The settings that the numbers in a recipe depend on, by the names of their options."""
        names = ("method", "search", "num_generations", "num_offspring", "num_samples", "seq_len", "seed")
        settings = asdict(self)
        target: dict[str, Any]
        if self.has_budget:
            target = {"max_kl": self.max_kl, "min_top1": self.min_top1}
        else:
            target = {"sparsity": list(self.levels), "default": self.default_of(self.levels)}
        # Native weights are named by no state that was kept before there were others.
        stored = {} if self.weights == "native" else {"weights": self.weights}
        turned = {} if self.rotation == "none" else {"rotation": self.rotation}
        return {**target, **turned, **stored, **{name: settings[name] for name in names}, "search": self.chosen_search}

    def check(self) -> None:
        """Find every contradiction, before anything is read.

        Raises:
            UsageError: an argument out of range, unknown, or at odds with another.
        """
        self._check_target()
        check_method(self.method)
        guard.choice("--search", self.search, ("auto", *SEARCHES))
        if self.search in ("fisher", "refine") and self.method != "wisparse":
            raise UsageError(
                f"--search {self.search} makes a score of its own, so it cannot be --method {self.method}'s; "
                "choose additive, greedy or uniform"
            )
        guard.choice("--dtype", self.dtype, DTYPES)
        guard.choice("--weights", self.weights, WEIGHTS)
        guard.choice("--rotation", self.rotation, ROTATIONS)
        if self.weights != "native" and self.dtype != "auto":
            raise UsageError(
                f"--weights {self.weights} stores the layers in codes and the rest as it is; leave --dtype out"
            )
        guard.integer("--num-samples", self.num_samples, 1, _LARGEST)
        guard.integer("--seed", self.seed, 0, _LARGEST)
        for option, value, least in (
            ("--seq-len", self.seq_len, _SHORTEST),
            ("--num-generations", self.num_generations, 1),
            ("--num-offspring", self.num_offspring, 1),
        ):
            if value is not None:
                guard.integer(option, value, least, _LARGEST)
        for option, given in (("--num-generations", self.num_generations), ("--num-offspring", self.num_offspring)):
            if given is not None and self.chosen_search != "paper":
                raise UsageError(f"{option} belongs to --search paper, but the search is {self.chosen_search!r}")
        for option, flag in (("resume", self.resume), ("overwrite", self.overwrite), ("private", self.private)):
            guard.switch(option, flag)
        for option, name in (("--revision", self.revision), ("--upload-repo", self.upload_repo)):
            if name is not None:
                guard.text(option, name, empty=False)
        for source in self.calibration:
            guard.place("--calibration", source)
        if not self.calibration:
            raise UsageError("--calibration: expected self, paper, a Hub data set or paths, found nothing")
        if len(self.calibration) > 1 and {"self", "paper"} & set(self.calibration):
            raise UsageError("--calibration: self and paper stand alone; they cannot be mixed with other sources")
        if self.private and self.upload_repo is None:
            raise UsageError("--private says how to upload, but there is no --upload-repo")
        if self.work_dir is not None and not self.resume:
            raise UsageError("--work-dir says where to keep state, but --no-resume keeps none")
        if self.work_dir is not None:
            work, out = self.work_dir.resolve(), self.output_dir.resolve()
            if work == out or out in work.parents or work in out.parents:
                raise UsageError(f"--work-dir {self.work_dir} and the output {self.output_dir} lie within each other")

    def _check_target(self) -> None:
        for sparsity in self.sparsities:
            guard.number("--sparsity", sparsity, 0.0, MAX_SPARSITY, f"a number from 0 to {MAX_SPARSITY}")
        if list(self.sparsities) != sorted(set(self.sparsities)):
            names = ", ".join(f"{sparsity:g}" for sparsity in self.sparsities)
            raise UsageError(f"--sparsity: expected one or several different numbers, found {names}")
        if len(self.sparsities) > MAX_LEVELS:
            raise UsageError(f"--sparsity: a bundle holds at most {MAX_LEVELS} of them, found {len(self.sparsities)}")
        if self.max_kl is not None:
            guard.number("--max-kl", self.max_kl, 0.0, _LARGEST_KL, "a number of nats per token, 0 or more")
        if self.min_top1 is not None:
            guard.number("--min-top1", self.min_top1, 0.0, 1.0, "a share of tokens, from 0 to 1")
        if not self.has_budget:
            if self.default is not None and self.default not in self.levels:
                levels = ", ".join(f"{sparsity:g}" for sparsity in self.levels)
                raise UsageError(f"--default: expected one of the sparsities {levels}, found {self.default!r:.40}")
            return
        budget = "--max-kl" if self.max_kl is not None else "--min-top1"
        for option, given in (("--sparsity", bool(self.sparsities)), ("--default", self.default is not None)):
            if given:
                raise UsageError(f"{budget} finds the sparsity, so there is none to give: leave {option} out")


def check_method(method: str) -> str:
    """A method, if it is one that a bundle is written with.

    Raises:
        UsageError: it is not.
    """
    if isinstance(method, str) and method in _MEASURED:
        raise UsageError(
            f"--method {method} is measured by benchmarks/methods.py and no longer written; choose "
            f"{', '.join(METHODS[:-1])} or {METHODS[-1]}"
        )
    return guard.choice("--method", method, METHODS)


def auto_seq_len(device_type: str, context: int) -> int:
    """Tokens per sequence where nobody says: what a machine does in minutes, and no more than the model's context."""
    return min(2048 if device_type == "cuda" else 512, context)


def default_output(model: str, sparsities: tuple[float, ...] = ()) -> Path:
    """``<model-name>-wisparse`` in the current folder; with one sparsity level of 50%, ``<model-name>-wisparse-50``."""
    percent = f"-{_percent(sparsities[0])}" if len(sparsities) == 1 else ""
    folder = find_folder(model)
    name = folder.resolve().name if folder else model.rsplit("/", 1)[-1]
    return Path(f"{name or 'model'}-wisparse{percent}")


def _percent(sparsity: float) -> str:
    return f"{100 * sparsity:.4g}".replace(".", "p")
