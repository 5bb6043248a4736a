"""From calibration tokens to one sparsity, scale and threshold per projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.manifest import ProjectionRecipe

from ..calibration import CalibrationTokens
from ..calibration_state import BlockView, CalibrationState, final_thresholds
from ..experts import channels_read
from ..masking import MaskedModel
from ..planes import tied
from ..processes import ALONE, Processes
from ..sensitivity import drawn_to_pool, fisher_diagonal, loss_weighted_norm, quadratic_damage
from ..source import SourceModel
from ..state import NO_STATE, Stages
from ..statistics import Scores, channel_scale, score_quantiles, weight_norm
from .allocation import Curve, allocate, allocate_greedily, evolve, interpolate, mean_sparsity, repair, search_alpha
from .refinement import Channels, Trajectory, refine

Allocation = dict[str, float]

# Sparsities at which ``fisher`` predicts each projection's damage.
DAMAGE_LEVELS: tuple[float, ...] = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.95)
# The report's curve of quality where there is one sparsity level, beside the target.
OTHER_SPARSITIES = (0.3, 0.4, 0.5, 0.6)
# The KL after a stage is measured on about so many tokens.
_REPORTED_TOKENS = 4096
_LARGEST_LOGITS = 1 << 27
# Elements of the widest tensor for which all tokens are one micro-batch: 64 MiB of float32.
_SMALL = 1 << 24


@dataclass(frozen=True)
class SearchSettings:
    sparsity: float = 0.5  # the target, a fraction of the parameters of all projections
    method: str = "wisparse"  # |x| g^alpha; teal: |x|; wina: |x| g; wina-code, its published code: |x| g for k and gate
    search: str = "refine"
    num_generations: int | None = None  # of ``paper``; None is 60, and 24 offspring. The paper's own are 400 and 64
    num_offspring: int | None = None
    seed: int = 0
    # measured on, about; None: 16,384 for fisher and refine, else 4,096. Final thresholds, and refine's steps, use all
    kl_tokens: int | None = None
    greedy_step: float = 0.01  # of a block; TEAL's 5% costs small models a third of the quality (benchmarks/LOG.md)
    refine_steps: int | None = None  # None goes by the number of tokens, see `plan_steps`
    batch_size: int = 4  # sequences per forward pass


@dataclass(frozen=True)
class SearchResult:
    projections: Mapping[str, ProjectionRecipe]  # by name, in order of execution
    channel_scales: Mapping[str, Tensor]  # by name, (K,) float32 on the CPU
    # JSON values: settings, losses by stage, KL evaluations. No times: equal runs give equal details
    details: dict[str, Any] = field(default_factory=dict)
    # another sparsity -> thresholds by name with the same scales, from the dense model's inputs: for a curve of quality
    thresholds_at: Mapping[float, Mapping[str, float]] = field(default_factory=dict)

    def apply_to(self, masked: MaskedModel) -> dict[str, float]:
        """Put the scales on a model; the thresholds are returned, for `MaskedModel.masking`."""
        for name, scale in self.channel_scales.items():
            masked.set_scale(name, scale)
        return {name: entry.threshold for name, entry in self.projections.items()}


def search(
    source: SourceModel, tokens: CalibrationTokens, settings: SearchSettings, processes: Processes = ALONE
) -> SearchResult:
    """Find sparsities, scales and thresholds at one sparsity; nothing about the model is changed."""
    with SparsityLevels(source, tokens, settings, stages=Stages(processes=processes)) as levels:
        return levels.with_curve(levels.at(settings.sparsity), OTHER_SPARSITIES)


class SparsityLevels(AbstractContextManager["SparsityLevels"]):
    """Searches at several sparsities of one model and text. Several processes call it alike, and all get the results.
    What a search finds may depend on those before it: equal calls in equal order give equal results."""

    def __init__(
        self, source: SourceModel, tokens: CalibrationTokens, settings: SearchSettings, stages: Stages = NO_STATE
    ) -> None:
        self.source, self.tokens, self.settings, self.stages = source, tokens, settings, stages
        kl_tokens = settings.kl_tokens or (16384 if settings.search in ("fisher", "refine") else 4096)
        num_samples = min(tokens.num_samples, max(1, round(kl_tokens / tokens.seq_len)))
        # A backward pass holds a few float32 tensors (tokens, vocabulary), 512 MiB at most.
        most = _LARGEST_LOGITS // (source.config.vocab_size * tokens.seq_len)
        size, processes = max(1, min(settings.batch_size, most)), stages.processes
        with torch.no_grad():
            self.calib = CalibrationState(source, tokens, num_samples=num_samples, batch_size=size)
            masked = self.calib.masked
            self.everything = self.calib
            if num_samples < tokens.num_samples:
                self.everything = CalibrationState(source, tokens, batch_size=size, masked=masked)
            # Where all tokens are gone through once, each process goes through its own.
            self.share, self.all_shared = self.calib, self.everything
            widest = max(map(channels_read, source.projections.values()))
            if processes.world_size > 1:
                shared = partial(CalibrationState, source, tokens, batch_size=size, processes=processes, masked=masked)
                self.share, self.all_shared = shared(num_samples=num_samples), shared()
                self.share.scales, self.share.tables = self.calib.scales, self.calib.tables
            elif tokens.input_ids.numel() * widest <= _SMALL:
                # `final_thresholds` goes through one micro-batch once, through several up to five times.
                self.all_shared = CalibrationState(source, tokens, batch_size=tokens.num_samples, masked=masked)
            self.norms = {name: weight_norm(source.weight(name)) for name in source.projections}
        self.fisher: dict[str, Any] | None = None
        self.trajectories: dict[float, Trajectory] = {}

    def __exit__(self, *_: object) -> None:
        self.calib.masked.close()

    @torch.no_grad()
    def at(self, sparsity: float) -> SearchResult:
        def compute() -> dict[str, Any]:
            run = Run(self, replace(self.settings, sparsity=sparsity))
            result = run.result(getattr(run, self.settings.search)())
            return {
                "projections": [asdict(entry) for entry in result.projections.values()],
                "channel_scales": dict(result.channel_scales),
                "details": result.details,
                "trajectory": run.trajectory,
            }

        found = self.stages.run(f"level-{sparsity!r}", compute)
        if found["trajectory"]:
            self.trajectories[sparsity] = found["trajectory"]
        entries = [ProjectionRecipe(**entry) for entry in found["projections"]]
        return SearchResult({entry.name: entry for entry in entries}, found["channel_scales"], found["details"])

    @torch.no_grad()
    def with_curve(self, result: SearchResult, sparsities: Sequence[float]) -> SearchResult:
        """A result with thresholds at other sparsities too, in proportion to those of its projections."""
        target, calib = result.details["settings"]["sparsity"], self.calib
        others = [one for one in sparsities if abs(one - target) > 0.02]
        if target <= 0.0 or not others:
            return result
        for name, scale in result.channel_scales.items():
            calib.set_scale(name, scale)
        with self.stages.progress.stage("Quantiles"):
            self.share.build_tables()
        found = {}
        for sparsity in others:
            spread = {name: entry.sparsity * sparsity / target for name, entry in result.projections.items()}
            found[sparsity] = calib.thresholds(repair(spread, calib.sizes, sparsity))
        return replace(result, thresholds_at=found)


class Run:
    """One search at one sparsity. The methods named like a search are the searches; the others are their stages."""

    def __init__(self, levels: SparsityLevels, settings: SearchSettings) -> None:
        self.levels, self.settings = levels, settings
        self.calib, self.progress, self.processes = levels.calib, levels.stages.progress, levels.stages.processes
        self.names, self.norms = self.calib.names, dict(levels.norms)
        self.losses: dict[str, float] = {}
        self.history: dict[str, Any] = {}
        self.trajectory: Trajectory | None = None
        self.calib.num_kl_evaluations = 0.0
        chosen = {"wina": self.names, "wina-code": [n for n in self.names if n.endswith(("k_proj", "gate_proj"))]}
        self.alphas = {name: float(name in chosen.get(settings.method, ())) for name in self.names}
        for name, alpha in self.alphas.items():
            self.calib.set_scale(name, channel_scale(self.norms[name], alpha))

    def uniform(self) -> Allocation:
        self.prepare()
        return self.everywhere()

    def greedy(self) -> Allocation:
        self.prepare()
        return self.spread_within([self.settings.sparsity] * len(self.calib.groups))

    def paper(self) -> Allocation:
        self.prepare()
        self.note("uniform", self.calib.thresholds(self.everywhere()))
        allocation = self.spread_within(self.evolve_blocks())
        if self.settings.method == "wisparse":
            self.note("greedy", self.calib.thresholds(allocation))
            self.choose_alphas(allocation)
        return allocation

    def fisher(self) -> Allocation:
        return allocate(self.sensitivities(), self.calib.sizes, self.settings.sparsity)

    def refine(self) -> Allocation:
        settings, calib, levels = self.settings, self.calib, self.levels
        planes = levels.source.planes
        allocation = self.fisher()
        widths = {name: channels_read(levels.source.projections[name]) for name in self.names}
        experts = {name: tuple(scale.shape) for name, scale in calib.scales.items() if scale.dim() == 2}
        target = settings.sparsity
        near = min(levels.trajectories, key=lambda other: (abs(other - target), -other), default=target)
        scales, dropped, history, num_tokens, self.trajectory = refine(
            levels.everything,
            Channels(widths, calib.sizes, planes, experts),
            target,
            calib.scales,
            calib.thresholds(allocation),
            self.draw,
            steps=settings.refine_steps,
            after=levels.trajectories.get(near),
            processes=self.processes,
            progress=self.progress,
        )
        calib.num_kl_evaluations += num_tokens / calib.flow.num_counted
        self.history |= history
        for name, scale in scales.items():
            calib.set_scale(name, tied(scale, planes))
        return repair(dropped, calib.sizes, settings.sparsity)

    # ------------------------------------------------------------------ stages

    def build_tables(self) -> None:
        with self.progress.stage("Quantiles"):
            self.levels.share.build_tables()

    def everywhere(self) -> Allocation:
        return dict.fromkeys(self.names, self.settings.sparsity)

    def draw(self, index: int) -> torch.Generator:
        """A generator for each unit of work, so that none depends on those before it."""
        return torch.Generator().manual_seed((self.settings.seed << 32) + index)

    def note(self, stage: str, thresholds: Mapping[str, float]) -> None:
        """The joint KL after a stage, for the recipe."""
        batches = max(1, _REPORTED_TOKENS // self.calib.flow.input_ids[0].numel())
        self.losses[stage] = self.calib.kl(thresholds, num_batches=batches)

    def by_block(self, title: str, compute: Callable[[BlockView], Any]) -> list[Any]:
        """``compute`` of every block in order, each by one process."""
        mine = range(self.processes.rank, len(self.calib.groups), self.processes.world_size)
        found = []
        with self.progress.stage(title, len(mine)) as stage:
            for view in self.calib.blocks(mine):
                found.append(compute(view))
                stage.advance()
        return self.processes.in_order(found)

    def prepare(self) -> None:
        """Scales and tables at the start, as the method has it."""
        if self.settings.method == "wisparse":
            self.choose_alphas(self.everywhere())
        else:
            self.build_tables()

    def choose_alphas(self, allocation: Allocation) -> None:
        """Alphas per projection at given sparsities, and the tables that follow."""
        calib = self.calib

        def compute(view: BlockView) -> dict[str, tuple[float, list[float]]]:
            thresholds: dict[tuple[str, float], float] = {}

            def error(alphas: Mapping[str, float]) -> float:
                for name, alpha in alphas.items():
                    scale = channel_scale(self.norms[name], alpha)
                    calib.masked.set_scale(name, scale)
                    if (name, alpha) not in thresholds:
                        scores = Scores(view.inputs[name], scale)
                        thresholds[name, alpha] = score_quantiles(scores, [allocation[name]])[0]
                return view.error({name: thresholds[name, alpha] for name, alpha in alphas.items()})

            alphas = search_alpha(error, view.names)
            for name, alpha in alphas.items():
                calib.set_scale(name, channel_scale(self.norms[name], alpha))
            view.build_tables()
            return {name: (alpha, calib.tables[name]) for name, alpha in alphas.items()}

        for found in self.by_block("Alpha", compute):
            for name, (alpha, table) in found.items():
                self.alphas[name] = alpha
                calib.set_scale(name, channel_scale(self.norms[name], alpha))
                calib.tables[name] = table

    def evolve_blocks(self) -> list[float]:
        """The paper's coarse search: one sparsity per block."""
        settings, calib = self.settings, self.calib

        def losses(candidates: Sequence[Sequence[float]]) -> list[float]:
            spreads = [{n: p for group, p in zip(calib.groups, one, strict=True) for n in group} for one in candidates]
            size, before = calib.side_by_side, calib.num_kl_evaluations
            together = [spreads[first : first + size] for first in range(0, len(spreads), size)]
            found = self.processes.spread(together, calib.kls)
            calib.num_kl_evaluations = before + len(spreads)  # of all processes
            return [kl for some in found for kl in some]

        generations, offspring = settings.num_generations or 60, settings.num_offspring or 24
        with self.progress.stage("Block search", generations) as stage:

            def show(loss: float) -> None:
                stage.advance()
                stage.note(f"KL {loss:.4f}")

            best, self.history["evolution"] = evolve(
                losses,
                [sum(calib.sizes[name] for name in group) for group in calib.groups],
                settings.sparsity,
                torch.Generator().manual_seed(settings.seed),
                num_generations=generations,
                num_offspring=offspring,
                on_generation=show,
            )
        return list(best)

    def spread_within(self, block_sparsities: Sequence[float]) -> Allocation:
        """The paper's fine search: each block's sparsity over its projections, by block error."""
        calib = self.calib

        def compute(view: BlockView) -> Allocation:
            sizes = {name: calib.sizes[name] for name in view.names}
            target, step = block_sparsities[view.index], self.settings.greedy_step
            return allocate_greedily(lambda p: view.error(calib.thresholds(p)), sizes, target, step=step)

        blocks = self.by_block("Greedy within blocks", compute)
        return {name: sparsity for block in blocks for name, sparsity in block.items()}

    def sensitivities(self) -> Mapping[str, Curve]:
        """Loss-weighted scales and their tables, and each projection's damage curve: once for all sparsities."""
        calib, levels = self.calib, self.levels
        if levels.fisher is None:
            levels.fisher = levels.stages.run("sensitivities", self.measure_sensitivities)
        for name, scale in levels.fisher["scales"].items():
            self.alphas[name] = 1.0
            calib.set_scale(name, scale)
            calib.tables[name] = levels.fisher["tables"][name]
        rows = levels.fisher["damages"]
        return {name: interpolate(DAMAGE_LEVELS, row) for name, row in rows.items()}

    def measure_sensitivities(self) -> dict[str, Any]:
        calib = self.calib
        flow, masked, batches = calib.flow, calib.masked, range(calib.flow.num_batches)
        planes = self.levels.source.planes
        with self.progress.stage("Sensitivities"):
            diagonals = self.processes.spread(batches, lambda b: fisher_diagonal(flow, masked, b, self.draw(2 * b)))
            for name, norm in self.norms.items():
                total = sum((one[name] for one in diagonals), torch.zeros_like(diagonals[0][name]))
                experts = norm.dim() == 2
                mean = (
                    drawn_to_pool(total, not name.endswith("down_proj"), planes)
                    if experts
                    else total / flow.num_counted
                )
                weighted = loss_weighted_norm(norm, mean)
                calib.set_scale(name, tied(channel_scale(weighted, 1.0), planes))
        self.build_tables()
        with self.progress.stage("Predicted damage"):
            points = {name: [calib.thresholds({name: s})[name] for s in DAMAGE_LEVELS] for name in self.names}
            found = self.processes.spread(
                batches, lambda b: quadratic_damage(flow, masked, b, self.draw(2 * b + 1), calib.scales, points)
            )
        rows = {name: zip(*(one[name] for one in found), strict=True) for name in self.names}
        damages = {name: [sum(row) / flow.num_counted for row in rows[name]] for name in self.names}
        return {"scales": dict(calib.scales), "tables": dict(calib.tables), "damages": damages}

    def result(self, allocation: Allocation) -> SearchResult:
        """Final thresholds for an allocation with the scales of now."""
        calib = self.calib
        with self.progress.stage("Thresholds", len(calib.groups)) as stage:
            found = final_thresholds(self.levels.all_shared, calib.scales, allocation, stage.advance)
        self.note("final", {name: threshold for name, (threshold, _) in found.items()})
        mean = mean_sparsity([allocation[name] for name in self.names], list(calib.sizes.values()))
        return SearchResult(
            {name: ProjectionRecipe(name, allocation[name], self.alphas[name], *found[name]) for name in self.names},
            {name: calib.scales[name].cpu() for name in self.names},
            {
                "settings": asdict(self.settings),
                "kl_tokens": calib.flow.num_counted,
                "kl_evaluations": round(calib.num_kl_evaluations, 2),
                "kl": self.losses,
                "mean_sparsity": round(mean, 9),
                **({"history": self.history} if self.history else {}),
            },
        )
