"""From calibration tokens to one sparsity, scale and threshold per projection.

    uniform    alpha per projection, the target everywhere
    greedy     the target in every block, greedy within blocks: TEAL's
    paper      alpha -> block sparsities by evolution -> greedy within blocks -> alpha again
    additive   alpha -> KL of each projection alone at a few sparsities -> allocation in closed form -> alpha again
    fisher     loss-weighted norms and each projection's damage from two backward passes, allocation in closed form
    refine     fisher, then every channel's scale and every threshold by a few gradient steps on the joint KL

Several sparsities of one model are `Rungs`: they share what no sparsity decides, and a refinement begins where that of
the nearest sparsity ended.

Every search ends alike: exact thresholds over all tokens, block after block, each from inputs that are as sparse as
they will be at run time, so that what is realised is the target.

A search is a chain of units (a block's alphas, a generation, a block's row of a table); each is kept in the store under
its name, so a killed run goes on where it stood and ends with the same bytes. Several processes share the units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.record.recipe import ProjectionRecipe

from ..bench.sensitivity import fisher_diagonal, loss_weighted_norm, quadratic_damage
from ..bench.statistics import channel_scale
from ..bench.workbench import BlockView, Workbench
from ..budget import mean_sparsity, repair
from ..model.source import SourceModel
from ..settings import METHODS, SEARCHES
from ..text.tokens import CalibrationTokens
from ..work.processes import ALONE, Processes
from ..work.progress import Progress
from ..work.state import NO_STATE, Prefixed, Store, pack, unpack
from . import additive, evolution
from .alpha import search_alpha
from .descent import Descent, Trajectory
from .greedy import allocate_greedily
from .refinement import Channels
from .settings import SearchResult, SearchSettings
from .shared import FisherStart, Shared, batch_size
from .thresholds import final_thresholds
from .units import Units

__all__ = ["METHODS", "OTHER_SPARSITIES", "SEARCHES", "Rungs", "SearchResult", "SearchSettings", "search"]

Allocation = dict[str, float]

# Where the report's curve has its points where there is one rung, beside the target.
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
    with Rungs(source, tokens, settings, progress, store, processes) as rungs:
        return rungs.with_curve(rungs.at(settings.sparsity), OTHER_SPARSITIES)


class Rungs:
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

    def __enter__(self) -> Rungs:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.close()

    @torch.no_grad()
    def at(self, sparsity: float) -> SearchResult:
        """The search at one sparsity, from the state if it is there."""
        settings = replace(self._settings, sparsity=sparsity)
        source, tokens, progress, store, processes = self._given
        place = Prefixed(store, f"rung-{sparsity!r}")
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
