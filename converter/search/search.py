"""From calibration tokens to one sparsity, scale and threshold per projection.

    uniform    alpha per projection, the target everywhere
    greedy     the target in every block, greedy within blocks: TEAL's
    paper      alpha -> block sparsities by evolution -> greedy within blocks -> alpha again
    additive   alpha -> KL of each projection alone at a few sparsities -> allocation in closed form -> alpha again
    fisher     loss-weighted norms and each projection's damage from two backward passes, allocation in closed form
    refine     fisher, then every channel's scale and every threshold by a few gradient steps on the joint KL

Several sparsities of one model are `Sparsity levels`: they share what no sparsity decides, and a refinement begins where that of
the nearest sparsity ended.

Every search ends alike: exact thresholds over all tokens, block after block, each from inputs that are as sparse as
they will be at run time, so that what is realised is the target.

A search is a chain of units (a block's alphas, a generation, a block's row of a table); each is kept in the store under
its name, so a killed run goes on where it stood and ends with the same bytes. Several processes share the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import ProjectionRecipe

from ..budget import check_target, mean_sparsity, repair
from ..documents import CalibrationTokens
from ..masking import MaskedModel
from ..processes import ALONE, Processes, Progress
from ..sensitivity import fisher_diagonal, loss_weighted_norm, quadratic_damage
from ..settings import METHODS, SEARCHES
from ..source import SourceModel
from ..state import NO_STATE, Prefixed, Store, pack, unpack
from ..statistics import channel_scale, weight_norm
from ..workbench import BlockView, Workbench
from . import additive, evolution
from .refinement import Channels, Descent, Trajectory
from .thresholds import allocate_greedily, final_thresholds, search_alpha


class Units:
    """The units of one search.

    Args:
        store: where outcomes are kept.
        bench: whose KL evaluations are counted, also those that a unit from the store once took.
        prefix: of the units' keys.
    """

    def __init__(self, store: Store, bench: Workbench, prefix: str, processes: Processes) -> None:
        self._store, self._bench, self._prefix, self._processes = store, bench, prefix, processes

    def one(self, key: str, compute: Callable[[], Any]) -> Any:
        """The outcome of ``compute``, which every process calls, from the store if it is there."""
        data = self._load(key)
        if data is None:
            data = self._packed(compute)
            self._save(key, data)
        return self._unpacked(data)

    def many(self, keys: Sequence[str], compute: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
        """``(index, compute(index))`` in order, each computed by one process; kept after every round of them."""
        index = self._processes.index
        for share in self._processes.rounds(len(keys)):
            data = {i: self._load(keys[i]) for i in share}
            mine = share[index] if index < len(share) else None
            fresh = self._packed(partial(compute, mine)) if mine is not None and data[mine] is None else None
            for i, found in zip(share, self._processes.gather(fresh), strict=False):
                if found is not None:
                    data[i] = found
                    self._save(keys[i], found)
            for i in sorted(share):
                yield i, self._unpacked(data[i])

    def blocks(self, key: str, compute: Callable[[BlockView], Any]) -> Iterator[tuple[list[str], Any]]:
        """As `many`, one unit per block: the names of the block's projections, and the outcome."""
        bench, processes = self._bench, self._processes
        shares = processes.rounds(len(bench.groups))
        views = bench.blocks({share[processes.index] for share in shares if processes.index < len(share)})

        def compute_block(index: int) -> Any:
            return compute(next(view for view in views if view.index == index))

        for index, found in self.many([f"{key}/{i}" for i in range(len(bench.groups))], compute_block):
            yield bench.groups[index], found

    def _packed(self, compute: Callable[[], Any]) -> bytes:
        before = self._bench.num_kl_evaluations
        value = compute()
        data = pack([value, self._bench.num_kl_evaluations - before])
        self._bench.num_kl_evaluations = before
        return data

    def _unpacked(self, data: bytes | None) -> Any:
        value, evaluations = unpack(data or b"")
        self._bench.num_kl_evaluations += evaluations
        return value

    def _load(self, key: str) -> bytes | None:
        return self._store.load(f"{self._prefix}/{key}")

    def _save(self, key: str, data: bytes) -> None:
        self._store.save(f"{self._prefix}/{key}", data)


@dataclass(frozen=True)
class SearchSettings:
    """What to search and how hard.

    Attributes:
        sparsity: the target, a fraction of the parameters of all projections.
        method: the score. ``wisparse`` |x| g^alpha; ``teal`` |x|; ``wina`` |x| g; ``wina-code`` as WINA's published
            code has it, |x| g for k and gate and |x| elsewhere.
        search: how sparsity is spread; see `search`.
        num_generations, num_offspring: of ``paper``; None is 60 x 24. The paper's own are 400 x 64.
        seed: of everything that is drawn.
        kl_tokens: how many tokens the search measures on, about; None is 16,384 for ``fisher`` and ``refine``, which go
            through them only twice, and 4,096 for the others. Final thresholds, and ``refine``'s steps, rest on all.
        stages: of the evolution, (survivors, micro-batches or None for all) in turn.
        levels: at which sparsities ``additive`` probes a projection.
        greedy_step: sparsity that one greedy step adds to a block. TEAL's 5% is half of a small projection at once, and
            in models this small costs a third of the quality (benchmarks/LOG.md).
        fisher_draws: labels drawn per token for ``fisher``.
        refine_steps: of ``refine``; None goes by the number of tokens, see `plan_steps`.
        batch_size: sequences per forward pass.
    """

    sparsity: float = 0.5
    method: str = "wisparse"
    search: str = "refine"
    num_generations: int | None = None
    num_offspring: int | None = None
    seed: int = 0
    kl_tokens: int | None = None
    stages: tuple[tuple[int, int | None], ...] = ((1, None),)
    levels: tuple[float, ...] = additive.LEVELS
    greedy_step: float = 0.01
    fisher_draws: int = 2
    refine_steps: int | None = None
    batch_size: int = 4

    def __post_init__(self) -> None:
        check_target(self.sparsity)
        for option, given, known in (("method", self.method, METHODS), ("search", self.search, SEARCHES)):
            if given not in known:
                raise UsageError(f"--{option}: expected one of {', '.join(known)}, found {given!r}")
        if self.by_gradients and self.method != "wisparse":
            raise UsageError(
                f"--search {self.search} decides the score too, so it belongs to --method wisparse; "
                f"with --method {self.method} choose additive, greedy, paper or uniform"
            )

    @property
    def by_gradients(self) -> bool:
        """Whether the search rests on backward passes."""
        return self.search in ("fisher", "refine")


@dataclass(frozen=True)
class SearchResult:
    """Plain data.

    Attributes:
        projections: by name, in order of execution.
        channel_scales: by name, (K,) float32 on the CPU.
        details: JSON values: settings, losses by stage, KL evaluations. No times: equal runs give equal details.
        thresholds_at: another sparsity -> thresholds by name with the same scales, for a curve of quality: from the
            dense model's inputs, so about right.
    """

    projections: Mapping[str, ProjectionRecipe]
    channel_scales: Mapping[str, Tensor]
    details: dict[str, Any] = field(default_factory=dict)
    thresholds_at: Mapping[float, Mapping[str, float]] = field(default_factory=dict)

    @property
    def sparsity(self) -> float:
        """The target."""
        return float(self.details.get("settings", {}).get("sparsity", 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors in dicts and lists; all but ``thresholds_at``."""
        projections = [asdict(entry) for entry in self.projections.values()]
        return {"projections": projections, "channel_scales": dict(self.channel_scales), "details": self.details}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchResult:
        """Of `to_dict`."""
        entries = [ProjectionRecipe(**entry) for entry in data["projections"]]
        return cls({entry.name: entry for entry in entries}, data["channel_scales"], data["details"])

    def apply_to(self, masked: MaskedModel) -> dict[str, float]:
        """Put the scales on a model; the thresholds are returned, for `MaskedModel.set_thresholds`."""
        for name, scale in self.channel_scales.items():
            masked.set_scale(name, scale)
        return {name: entry.threshold for name, entry in self.projections.items()}


_LARGEST_LOGITS = 1 << 27


@dataclass(frozen=True)
class FisherStart:
    """Where ``fisher`` stands before it asks for a sparsity.

    Attributes:
        scales, tables: of every projection, with loss-weighted norms.
        curves: each projection's damage at every sparsity.
    """

    scales: Mapping[str, Tensor]
    tables: Mapping[str, list[float]]
    curves: Mapping[str, additive.Curve]


class Shared:
    """One per model and text.

    Attributes:
        bench: the search's tokens.
        part: this process's share of them; the bench itself where there is one process.
        norms: weight norms by projection.
        fisher: filled by the first search that needs it.
        dense_states: of `Descent`, by micro-batch.
        trajectories: of refinements, by sparsity.
    """

    def __init__(
        self, source: SourceModel, tokens: CalibrationTokens, settings: SearchSettings, processes: Processes
    ) -> None:
        kl_tokens = settings.kl_tokens or (16384 if settings.by_gradients else 4096)
        num_samples = min(tokens.num_samples, max(1, round(kl_tokens / tokens.seq_len)))
        size = batch_size(settings, source, tokens)
        self.bench = Workbench(source, tokens, num_samples=num_samples, batch_size=size)
        # Where all tokens are gone through once, each process goes through its own; else it has units of its own.
        self.part = self.bench.part(source, tokens, processes)
        self.norms = {name: weight_norm(source.weight(name)) for name in source.projections}
        self.fisher: FisherStart | None = None
        self.dense_states: dict[int, Tensor] = {}
        self.trajectories: dict[float, Trajectory] = {}

    def nearest_trajectory(self, sparsity: float) -> Trajectory | None:
        """The refinement at the nearest sparsity, of two the higher; None before the first one."""
        if not self.trajectories:
            return None
        return self.trajectories[min(self.trajectories, key=lambda other: (abs(other - sparsity), -other))]

    def close(self) -> None:
        """Take the masks off the model."""
        self.bench.masked.close()


def batch_size(settings: SearchSettings, source: SourceModel, tokens: CalibrationTokens) -> int:
    """Sequences of a micro-batch: a backward pass holds a few float32 tensors (tokens, vocabulary), 512 MiB at most."""
    return max(1, min(settings.batch_size, _LARGEST_LOGITS // (source.config.vocab_size * tokens.seq_len)))


Allocation = dict[str, float]

# Where the report's curve has its points where there is one sparsity level, beside the target.
OTHER_SPARSITIES = (0.3, 0.4, 0.5, 0.6)


def search(
    source: SourceModel,
    tokens: CalibrationTokens,
    settings: SearchSettings | None = None,
    progress: Progress | None = None,
    store: Store = NO_STATE,
    processes: Processes = ALONE,
) -> SearchResult:
    """Find sparsities, scales and thresholds at one sparsity; nothing about the model is changed.

    Several processes call it alike, and all get the result.

    Raises:
        UsageError: settings out of range.
        CalibrationError: from the tokens' source, before.
    """
    settings = settings or SearchSettings()
    with SparsityLevels(source, tokens, settings, progress, store, processes) as levels:
        return levels.with_curve(levels.at(settings.sparsity), OTHER_SPARSITIES)


class SparsityLevels:
    """Searches at several sparsities; arguments as `search`, whose ``settings.sparsity`` is of no concern here.

    What a search finds may hang on those before it: equal calls in equal order give equal results.
    """

    def __init__(
        self,
        source: SourceModel,
        tokens: CalibrationTokens,
        settings: SearchSettings | None = None,
        progress: Progress | None = None,
        store: Store = NO_STATE,
        processes: Processes = ALONE,
    ) -> None:
        self._settings = settings or SearchSettings()
        self._given = (source, tokens, progress or Progress(enabled=False), store, processes)
        with torch.no_grad():
            self._shared = Shared(source, tokens, self._settings, processes)

    def __enter__(self) -> SparsityLevels:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.close()

    @torch.no_grad()
    def at(self, sparsity: float) -> SearchResult:
        """The search at one sparsity, from the state if it is there."""
        settings = replace(self._settings, sparsity=sparsity)
        source, tokens, progress, store, processes = self._given
        place = Prefixed(store, f"sparsity level-{sparsity!r}")
        key = f"{settings.search}/result"
        saved = place.load(key)
        if saved is None:
            run = Run(source, tokens, settings, progress, store, place, processes, self._shared)
            result, trajectory = run.result(_PLANS[settings.search](run)), run.trajectory
            place.save(key, pack([result.to_dict(), trajectory and vars(trajectory)]))
        else:
            kept, moved = unpack(saved)
            result, trajectory = SearchResult.from_dict(kept), moved and Trajectory(**moved)
        if trajectory is not None:
            self._shared.trajectories[sparsity] = trajectory
        return result

    @torch.no_grad()
    def with_curve(self, result: SearchResult, sparsities: Sequence[float]) -> SearchResult:
        """A result with thresholds at other sparsities too, spread over the projections in its way."""
        target, bench, progress = result.sparsity, self._shared.bench, self._given[2]
        others = [one for one in sparsities if abs(one - target) > 0.02]
        if target <= 0.0 or not others:
            return result
        for name, scale in result.channel_scales.items():
            bench.set_scale(name, scale)
        with progress.stage("Quantiles", len(bench.groups)) as stage:
            for view in self._shared.part.blocks():
                view.build_tables()
                stage.advance()
        found = {}
        for sparsity in others:
            spread = {name: entry.sparsity * sparsity / target for name, entry in result.projections.items()}
            found[sparsity] = bench.thresholds(repair(spread, bench.sizes, sparsity))
        return replace(result, thresholds_at=found)


class Run:
    """One search under way: the workbench, and the stages as methods; `search` chains them."""

    def __init__(
        self,
        source: SourceModel,
        tokens: CalibrationTokens,
        settings: SearchSettings,
        progress: Progress,
        store: Store,
        place: Store,
        processes: Processes,
        shared: Shared,
    ) -> None:
        self.source, self.tokens, self.settings = source, tokens, settings
        self.progress, self.store, self.processes, self.shared = progress, place, processes, shared
        self.bench, self.part = shared.bench, shared.part
        self.units = Units(place, self.bench, settings.search, processes)
        self.common_units = Units(store, self.bench, "fisher", processes)
        self.norms = dict(shared.norms)
        self.alphas = {name: _first_alpha(settings.method, name) for name in self.bench.names}
        self.losses: dict[str, float] = {}
        self.history: dict[str, Any] = {}
        self.trajectory: Trajectory | None = None
        self.bench.num_kl_evaluations = 0.0
        for name in self.bench.names:
            self.bench.set_scale(name, self.scale(name, self.alphas[name]))

    # ------------------------------------------------------------------ helpers

    def scale(self, name: str, alpha: float) -> Tensor:
        return channel_scale(self.norms[name], alpha)

    def uniform(self) -> Allocation:
        return dict.fromkeys(self.bench.names, self.settings.sparsity)

    def unit(self, key: str, compute: Callable[[], Any]) -> Any:
        """A unit of work that every process does alike; see `Units`."""
        return self.units.one(key, compute)

    def draw(self, index: int) -> torch.Generator:
        """A generator of its own for every unit, so that a unit does not depend on those before it."""
        return torch.Generator().manual_seed((self.settings.seed << 32) + index)

    def note(self, stage: str, allocation: Allocation, thresholds: Mapping[str, float] | None = None) -> None:
        """The joint KL after a stage: reported, and in the recipe. Without ``thresholds`` those of the tables."""

        def measure() -> float:
            kl = self.part.kl(allocation, thresholds=thresholds)
            if self.part is not self.bench:
                self.bench.num_kl_evaluations += 1
            return kl

        self.losses[stage] = self.unit(f"kl-{stage}".replace(" ", "-"), measure)

    # ------------------------------------------------------------------ stages

    def tables(self, title: str = "Quantiles") -> None:
        """Quantile tables for the scales of now."""
        with self.progress.stage(title, len(self.bench.groups)) as stage:
            for view in self.part.blocks():
                view.build_tables()
                stage.advance()

    def choose_alphas(self, allocation: Allocation, key: str) -> None:
        """Alphas per projection at given sparsities, and the tables that follow."""
        with self.progress.stage("Alpha", len(self.bench.groups)) as stage:
            for _, found in self.units.blocks(key, partial(self._block_alphas, allocation=allocation)):
                for name, (alpha, table) in found.items():
                    self.alphas[name] = alpha
                    self.bench.set_scale(name, self.scale(name, alpha))
                    self.bench.set_table(name, table)
                stage.advance()

    def _block_alphas(self, view: BlockView, allocation: Allocation) -> dict[str, tuple[float, list[float]]]:
        thresholds: dict[tuple[str, float], float] = {}

        def error(alphas: Mapping[str, float]) -> float:
            for name, alpha in alphas.items():
                scale = self.scale(name, alpha)
                self.bench.masked.set_scale(name, scale)
                if (name, alpha) not in thresholds:
                    thresholds[name, alpha] = view.threshold(name, scale, allocation[name])
            return view.error({name: thresholds[name, alpha] for name, alpha in alphas.items()})

        alphas = search_alpha(error, view.names)
        for name, alpha in alphas.items():
            self.bench.set_scale(name, self.scale(name, alpha))
        view.build_tables()
        return {name: (alpha, self.bench.table(name)) for name, alpha in alphas.items()}

    def prepare(self) -> None:
        """Scales and tables at the start, as the method has it."""
        if self.settings.method == "wisparse":
            self.choose_alphas(self.uniform(), "alpha")
        else:
            self.tables()

    def evolve_blocks(self) -> list[float]:
        """The paper's coarse search: one sparsity per block."""
        settings, bench = self.settings, self.bench
        generations, offspring = settings.num_generations or 60, settings.num_offspring or 24
        generator = torch.Generator().manual_seed(settings.seed)
        before = bench.num_kl_evaluations
        start = None
        saved = self.store.load("paper/evolution")
        if saved is not None:
            state = unpack(saved)
            bench.num_kl_evaluations += state.pop("kl_evaluations")
            generator.set_state(state.pop("generator"))
            start = evolution.Evolution(**state)

        def losses(candidates: Sequence[evolution.Candidate], num_batches: int | None) -> list[float]:
            spreads = [
                {n: p for group, p in zip(bench.groups, candidate, strict=True) for n in group}
                for candidate in candidates
            ]
            size = bench.side_by_side
            sharing = [spreads[first : first + size] for first in range(0, len(spreads), size)]
            done = bench.num_kl_evaluations
            found = self.processes.spread(sharing, partial(bench.kls, num_batches=num_batches))
            share = 1.0 if num_batches is None else min(1.0, num_batches / bench.flow.num_batches)
            bench.num_kl_evaluations = done + share * len(spreads)
            return [kl for some in found for kl in some]

        with self.progress.stage("Block search", generations) as stage:
            if start is not None:
                stage.advance(start.generation)

            def keep(state: evolution.Evolution) -> None:
                spent = {"kl_evaluations": bench.num_kl_evaluations - before}
                self.store.save("paper/evolution", pack({**asdict(state), **spent, "generator": generator.get_state()}))
                stage.advance()
                stage.note(f"KL {state.loss:.4f}")

            found = evolution.evolve(
                losses,
                bench.block_sizes,
                settings.sparsity,
                generator,
                num_generations=generations,
                num_offspring=offspring,
                stages=settings.stages,
                start=start,
                on_generation=keep,
            )
        self.history["evolution"] = list(found.history)
        return list(found.parent)

    def spread_within(self, block_sparsities: list[float]) -> Allocation:
        """The paper's fine search: each block's sparsity over its projections, by block error."""
        result: Allocation = {}
        with self.progress.stage("Greedy within blocks", len(self.bench.groups)) as stage:
            spread = partial(self._block_spread, block_sparsities=block_sparsities)
            for _, found in self.units.blocks("greedy", spread):
                result |= found
                stage.advance()
        return result

    def _block_spread(self, view: BlockView, block_sparsities: Sequence[float]) -> Allocation:
        sizes = {name: self.bench.sizes[name] for name in view.names}
        target, step = block_sparsities[view.index], self.settings.greedy_step
        return allocate_greedily(lambda p: view.error(self.bench.thresholds(p)), sizes, target, step=step)

    def probe(self) -> dict[str, additive.Curve]:
        """KL of each projection alone, at every level: blocks before it are not run again, the others are dense."""
        curves: dict[str, additive.Curve] = {}
        with self.progress.stage("Probing projections", len(self.bench.names)) as stage:
            for names, found in self.units.blocks("table", self._block_table):
                for name, row in found.items():
                    curves[name] = additive.interpolate(self.settings.levels, row)
                stage.advance(len(names))
        return curves

    def _block_table(self, view: BlockView) -> dict[str, list[float]]:
        def alone(name: str, level: float) -> float:
            return self.bench.kl({name: level}, start=view.index, hidden=view.hidden)

        return {name: [alone(name, level) for level in self.settings.levels] for name in view.names}

    def weight_by_loss(self) -> None:
        """Loss-weighted norms in the place of the weight norms, and the tables that follow."""
        bench = self.bench
        sums: dict[str, Tensor] = {}
        with self.progress.stage("Sensitivities", bench.flow.num_batches) as stage:
            keys = [f"fisher/{batch}" for batch in range(bench.flow.num_batches)]
            for _, found in self.common_units.many(keys, self._batch_fisher):
                for name, values in found.items():
                    sums[name] = values + sums.get(name, 0.0)
                stage.advance()
        for name, norm in self.norms.items():
            self.norms[name] = loss_weighted_norm(norm, sums[name] / bench.flow.num_counted)
            self.alphas[name] = 1.0
            bench.set_scale(name, self.scale(name, 1.0))
        self.tables()

    def _batch_fisher(self, batch: int) -> dict[str, Tensor]:
        bench, num_draws = self.bench, self.settings.fisher_draws
        return fisher_diagonal(bench.flow, bench.masked, batch, self.draw(2 * batch), num_draws=num_draws)

    def predict(self) -> dict[str, additive.Curve]:
        """What `probe` measures, from backward passes."""
        bench, levels = self.bench, self.settings.levels
        thresholds = {name: [bench.thresholds({name: level})[name] for level in levels] for name in bench.names}
        rows = {name: [0.0] * len(levels) for name in bench.names}
        with self.progress.stage("Predicted damage", bench.flow.num_batches) as stage:
            keys = [f"damage/{batch}" for batch in range(bench.flow.num_batches)]
            for _, found in self.common_units.many(keys, partial(self._batch_damage, thresholds=thresholds)):
                for name, row in found.items():
                    rows[name] = [a + b / bench.flow.num_counted for a, b in zip(rows[name], row, strict=True)]
                stage.advance()
        return {name: additive.interpolate(levels, row) for name, row in rows.items()}

    def _batch_damage(self, batch: int, thresholds: Mapping[str, list[float]]) -> dict[str, list[float]]:
        bench, num_draws = self.bench, self.settings.fisher_draws
        generator = self.draw(2 * batch + 1)
        return quadratic_damage(
            bench.flow, bench.masked, batch, generator, bench.scales, thresholds, num_draws=num_draws
        )

    def begin(self) -> Mapping[str, additive.Curve]:
        """Loss-weighted scales and their tables on the bench, and the curves: computed once for all sparsities."""
        bench, shared = self.bench, self.shared
        if shared.fisher is None:
            self.weight_by_loss()
            curves = self.predict()
            shared.fisher = FisherStart(dict(bench.scales), {name: bench.table(name) for name in bench.names}, curves)
        for name, scale in shared.fisher.scales.items():
            self.alphas[name] = 1.0
            bench.set_scale(name, scale)
            bench.set_table(name, shared.fisher.tables[name])
        return shared.fisher.curves

    def refine(self, allocation: Allocation) -> Allocation:
        """Scales and sparsities by gradient steps on the joint KL, from those of ``allocation`` on."""
        settings, bench = self.settings, self.bench
        widths = {name: self.source.projections[name].in_features for name in bench.names}
        size = batch_size(settings, self.source, self.tokens)
        with Workbench(self.source, self.tokens, batch_size=size) as everything:
            channels, dense_states = Channels(widths, bench.sizes), self.shared.dense_states
            descent = Descent(everything, channels, settings.sparsity, self.processes, dense_states)
            found = descent.run(
                bench.scales,
                bench.thresholds(allocation),
                self.draw,
                settings.refine_steps,
                self.store,
                self.progress,
                self.shared.nearest_trajectory(settings.sparsity),
            )
        self.trajectory = found.trajectory
        bench.num_kl_evaluations += found.num_tokens / bench.flow.num_counted
        self.history |= found.history
        for name, scale in found.scales.items():
            bench.set_scale(name, scale)
        return repair(found.dropped, bench.sizes, settings.sparsity)

    # ------------------------------------------------------------------ the end

    def result(self, allocation: Allocation) -> SearchResult:
        bench, settings = self.bench, self.settings
        everything = Workbench(self.source, self.tokens, batch_size=settings.batch_size, processes=self.processes)
        with everything, self.progress.stage("Thresholds", len(bench.groups)) as stage:
            found = final_thresholds(everything, bench.scales, allocation, stage.advance)
        self.note("final", allocation, {name: threshold for name, (threshold, _) in found.items()})
        projections = {
            name: ProjectionRecipe(name, allocation[name], self.alphas[name], *found[name]) for name in bench.names
        }
        return SearchResult(
            projections=projections,
            channel_scales={name: bench.scales[name].cpu() for name in bench.names},
            details={
                "settings": asdict(settings),
                "kl_tokens": bench.flow.num_counted,
                "kl_evaluations": round(bench.num_kl_evaluations, 2),
                "kl": self.losses,
                "mean_sparsity": round(
                    mean_sparsity([allocation[name] for name in bench.names], list(bench.sizes.values())), 9
                ),
                **({"history": self.history} if self.history else {}),
            },
        )


def _first_alpha(method: str, name: str) -> float:
    weighted = method == "wina" or (method == "wina-code" and name.endswith(("k_proj", "gate_proj")))
    return 1.0 if weighted else 0.0


# ---------------------------------------------------------------------- the searches


def _uniform(run: Run) -> Allocation:
    run.prepare()
    return run.uniform()


def _greedy(run: Run) -> Allocation:
    run.prepare()
    return run.spread_within([run.settings.sparsity] * len(run.bench.groups))


def _paper(run: Run) -> Allocation:
    run.prepare()
    run.note("uniform", run.uniform())
    blocks = run.evolve_blocks()
    allocation = run.spread_within(blocks)
    if run.settings.method == "wisparse":
        run.note("greedy", allocation)
        run.choose_alphas(allocation, "alpha-again")
    return allocation


def _additive(run: Run) -> Allocation:
    run.prepare()
    run.note("uniform", run.uniform())
    curves = run.probe()
    allocation = additive.allocate(curves, run.bench.sizes, run.settings.sparsity)
    if run.settings.method == "wisparse":
        run.note("additive", allocation)
        run.choose_alphas(allocation, "alpha-again")
    return allocation


def _fisher(run: Run) -> Allocation:
    return additive.allocate(run.begin(), run.bench.sizes, run.settings.sparsity)


def _refine(run: Run) -> Allocation:
    allocation = _fisher(run)
    run.note("before refinement", allocation)
    return run.refine(allocation)


_PLANS: Mapping[str, Callable[[Run], Allocation]] = {
    "uniform": _uniform,
    "greedy": _greedy,
    "paper": _paper,
    "additive": _additive,
    "fisher": _fisher,
    "refine": _refine,
}
