"""The search for one sparsity, channel scale and threshold per projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.manifest import ProjectionRecipe

from ..calibration import CalibrationTokens
from ..calibration_state import TABLE_TOKENS, BlockView, CalibrationState, final_thresholds
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
# With one sparsity level, the report's quality curve has these sparsities too.
OTHER_SPARSITIES = (0.3, 0.4, 0.5, 0.6)
# About how many tokens the KL after a stage, and the predicted damage, are measured on.
_REPORTED_TOKENS, _DAMAGE_TOKENS = 2048, 4096
# Tables are built from at least this many sequences: texts differ more than the tokens of one.
_TABLE_SEQUENCES = 4
# All tokens are one micro-batch if its widest input has at most this many elements: 64 MiB of float32, on a GPU 512.
_ONE_BATCH = {"cpu": 1 << 24, "cuda": 1 << 27}


@dataclass(frozen=True)
class SearchSettings:
    sparsity: float = 0.5  # the target, a fraction of the parameters of all projections
    method: str = "wisparse"  # |x| g^alpha; teal: |x|; wina: |x| g; wina-code, its published code: |x| g for k and gate
    search: str = "refine"
    num_generations: int | None = None  # of ``paper``; None is 60, and 24 offspring. The paper's own are 400 and 64
    num_offspring: int | None = None
    seed: int = 0
    # tokens that losses are measured on; None: 16,384 for fisher and refine, else 4,096. Thresholds and refine use all
    kl_tokens: int | None = None
    greedy_step: float = 0.01  # of a block; TEAL's 5% costs small models a third of the quality (benchmarks/LOG.md)
    refine_steps: int | None = None  # None: from the number of tokens, see `plan_steps`
    # sequences per forward pass. None: of 16 sequences or more an eighth, at most 4, as a refinement holds one micro-batch
    # out; on a CPU 1, as a backward pass then keeps a small model's activations and computes none twice. Of fewer 4
    batch_size: int | None = None


@dataclass(frozen=True)
class SearchResult:
    projections: Mapping[str, ProjectionRecipe]  # by name, in order of execution
    channel_scales: Mapping[str, Tensor]  # by name, (K,) float32 on the CPU
    # JSON values: settings, losses by stage, KL evaluations. No times: equal runs give equal details
    details: dict[str, Any] = field(default_factory=dict)
    # by sparsity of the quality curve: thresholds by name with the same scales, from the dense model's inputs
    thresholds_at: Mapping[float, Mapping[str, float]] = field(default_factory=dict)

    def apply_to(self, masked: MaskedModel) -> dict[str, float]:
        """Set the scales on a model; returns the thresholds, for `MaskedModel.masking`."""
        for name, scale in self.channel_scales.items():
            masked.set_scale(name, scale)
        return {name: entry.threshold for name, entry in self.projections.items()}


def search(
    source: SourceModel, tokens: CalibrationTokens, settings: SearchSettings, processes: Processes = ALONE
) -> SearchResult:
    """Search at one sparsity; leaves the model unchanged."""
    with SparsityLevels(source, tokens, settings, stages=Stages(processes=processes)) as levels:
        return levels.with_curve(levels.at(settings.sparsity), OTHER_SPARSITIES)


class SparsityLevels(AbstractContextManager["SparsityLevels"]):
    """Searches at several sparsities of one model and text. All processes make the same calls and get the results.
    A search may depend on those before it: the same calls in the same order give the same results."""

    def __init__(
        self, source: SourceModel, tokens: CalibrationTokens, settings: SearchSettings, stages: Stages = NO_STATE
    ) -> None:
        self.source, self.tokens, self.settings, self.stages = source, tokens, settings, stages
        kl_tokens = settings.kl_tokens or (16384 if settings.search in ("fisher", "refine") else 4096)
        num_samples = min(tokens.num_samples, max(1, round(kl_tokens / tokens.seq_len)))
        several = 1 if source.device.type == "cpu" else min(4, tokens.num_samples // 8)
        batch_size = settings.batch_size or (several if tokens.num_samples >= 16 else 4)
        processes = stages.processes
        with torch.no_grad():
            # `calib` has the first kl_tokens, `all_calib` all; `all_local` is this process's part of `all_calib`, and
            # `table_calib` of the sequences that most tables are built from.
            self.calib = CalibrationState(source, tokens, num_samples=num_samples, batch_size=batch_size)
            masked = self.calib.masked
            self.all_calib = self.calib
            if num_samples < tokens.num_samples:
                self.all_calib = CalibrationState(source, tokens, batch_size=batch_size, masked=masked)
            self.all_local = self.all_calib
            options: dict[str, Any] = {"batch_size": batch_size, "processes": processes, "masked": masked}
            few = tokens.spread(max(_TABLE_SEQUENCES, -(-TABLE_TOKENS // tokens.seq_len)))
            self.table_calib = CalibrationState(source, few, **options)
            self.table_calib.scales, self.table_calib.tables = self.calib.scales, self.calib.tables
            widest = max(map(channels_read, source.projections.values()))
            if processes.world_size > 1:
                self.all_local = CalibrationState(source, tokens, **options)
            elif tokens.input_ids.numel() * widest <= _ONE_BATCH[source.device.type]:
                # `final_thresholds` runs a block once for one micro-batch, and up to five times for several.
                self.all_local = CalibrationState(source, tokens, batch_size=tokens.num_samples, masked=masked)
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

        state = self.stages.run(f"level-{sparsity!r}", compute)
        if state["trajectory"]:
            self.trajectories[sparsity] = state["trajectory"]
        entries = [ProjectionRecipe(**entry) for entry in state["projections"]]
        return SearchResult({entry.name: entry for entry in entries}, state["channel_scales"], state["details"])

    @torch.no_grad()
    def with_curve(self, result: SearchResult, sparsities: Sequence[float]) -> SearchResult:
        """The result with thresholds at other sparsities, at which each projection's sparsity is scaled alike."""
        target, calib = result.details["settings"]["sparsity"], self.calib
        others = [sparsity for sparsity in sparsities if abs(sparsity - target) > 0.02]
        if target <= 0.0 or not others:
            return result
        for name, scale in result.channel_scales.items():
            calib.set_scale(name, scale)
        with self.stages.progress.stage("Quantiles"):
            self.table_calib.build_tables()
        thresholds = {}
        for sparsity in others:
            scaled = {name: entry.sparsity * sparsity / target for name, entry in result.projections.items()}
            thresholds[sparsity] = calib.thresholds(repair(scaled, calib.sizes, sparsity))
        return replace(result, thresholds_at=thresholds)


class Run:
    """One search at one sparsity. A method for each value of `SearchSettings.search`, then the stages they share."""

    def __init__(self, levels: SparsityLevels, settings: SearchSettings) -> None:
        self.levels, self.settings = levels, settings
        self.calib, self.progress, self.processes = levels.calib, levels.stages.progress, levels.stages.processes
        self.names, self.norms = self.calib.names, dict(levels.norms)
        self.losses: dict[str, float] = {}
        self.history: dict[str, Any] = {}
        self.trajectory: Trajectory | None = None
        self.calib.num_kl_evaluations = 0.0
        key_or_gate = [
            one.name for one in levels.source.config.projections() if one.role.endswith(("k_proj", "gate_proj"))
        ]
        weighted = {"wina": self.names, "wina-code": key_or_gate}
        self.alphas = {name: float(name in weighted.get(settings.method, ())) for name in self.names}
        for name, alpha in self.alphas.items():
            self.calib.set_scale(name, channel_scale(self.norms[name], alpha))

    def uniform(self) -> Allocation:
        self.prepare()
        return self.uniform_allocation()

    def greedy(self) -> Allocation:
        self.prepare()
        return self.spread_within([self.settings.sparsity] * len(self.calib.groups))

    def paper(self) -> Allocation:
        self.prepare()
        self.note("uniform", self.calib.thresholds(self.uniform_allocation()))
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
        nearest = min(levels.trajectories, key=lambda other: (abs(other - target), -other), default=target)
        scales, dropped, history, num_tokens, self.trajectory = refine(
            levels.all_calib,
            Channels(widths, calib.sizes, planes, experts),
            target,
            calib.scales,
            calib.thresholds(allocation),
            self.draw,
            steps=settings.refine_steps,
            after=levels.trajectories.get(nearest),
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
            self.levels.table_calib.build_tables()

    def uniform_allocation(self) -> Allocation:
        return dict.fromkeys(self.names, self.settings.sparsity)

    def draw(self, index: int) -> torch.Generator:
        """The random generator of one unit of work: independent of the order in which units run."""
        return torch.Generator().manual_seed((self.settings.seed << 32) + index)

    def note(self, stage: str, thresholds: Mapping[str, float]) -> None:
        """Record the KL after a stage, with all projections sparse."""
        batches = max(1, _REPORTED_TOKENS // self.calib.flow.input_ids[0].numel())
        self.losses[stage] = self.calib.kl(thresholds, num_batches=batches)

    def by_block(self, title: str, compute: Callable[[BlockView], Any]) -> list[Any]:
        """Map ``compute`` over the blocks, round robin over the processes; results in the order of the blocks."""
        local = range(self.processes.rank, len(self.calib.groups), self.processes.world_size)
        results = []
        with self.progress.stage(title, len(local)) as stage:
            for view in self.calib.blocks(local):
                results.append(compute(view))
                stage.advance()
        return self.processes.in_order(results)

    def prepare(self) -> None:
        """The method's initial scales, and the quantile tables for them."""
        if self.settings.method == "wisparse":
            self.choose_alphas(self.uniform_allocation())
        else:
            self.build_tables()

    def choose_alphas(self, allocation: Allocation) -> None:
        """Search alphas per projection at the sparsities of ``allocation``; sets the scales and their tables."""
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

        for block in self.by_block("Alpha", compute):
            for name, (alpha, table) in block.items():
                self.alphas[name] = alpha
                calib.set_scale(name, channel_scale(self.norms[name], alpha))
                calib.tables[name] = table

    def evolve_blocks(self) -> list[float]:
        """The paper's coarse search: one sparsity per block."""
        settings, calib = self.settings, self.calib

        def losses(candidates: Sequence[Sequence[float]]) -> list[float]:
            by_block = (zip(calib.groups, candidate, strict=True) for candidate in candidates)
            allocations = [{name: sparsity for group, sparsity in pairs for name in group} for pairs in by_block]
            size, before = calib.side_by_side, calib.num_kl_evaluations
            passes = [allocations[first : first + size] for first in range(0, len(allocations), size)]
            kls = chain.from_iterable(self.processes.spread(passes, calib.kls))
            calib.num_kl_evaluations = before + len(allocations)  # of all processes
            return list(kls)

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
        """The paper's fine search: divide each block's sparsity among its projections, by the block's output error."""
        calib = self.calib

        def compute(view: BlockView) -> Allocation:
            sizes = {name: calib.sizes[name] for name in view.names}
            target, step = block_sparsities[view.index], self.settings.greedy_step
            return allocate_greedily(lambda p: view.error(calib.thresholds(p)), sizes, target, step=step)

        blocks = self.by_block("Greedy within blocks", compute)
        return {name: sparsity for block in blocks for name, sparsity in block.items()}

    def sensitivities(self) -> Mapping[str, Curve]:
        """Set loss-weighted scales and their tables; returns the damage curves. Measured once for all sparsities."""
        calib, levels = self.calib, self.levels
        if levels.fisher is None:
            levels.fisher = levels.stages.run("sensitivities", self.measure_sensitivities)
        for name, scale in levels.fisher["scales"].items():
            self.alphas[name] = 1.0
            calib.set_scale(name, scale)
            calib.tables[name] = levels.fisher["tables"][name]
        return {name: interpolate(DAMAGE_LEVELS, damages) for name, damages in levels.fisher["damages"].items()}

    def measure_sensitivities(self) -> dict[str, Any]:
        calib = self.calib
        flow, reference, batches = calib.flow, calib.reference, range(calib.flow.num_batches)
        # Where there are enough tokens, the damages are predicted on others than the scales are taken from.
        few = min(-(-_DAMAGE_TOKENS // flow.input_ids[0].numel()), len(batches))
        weighed = batches[: max(len(batches) - few, -(-len(batches) // 2))]
        damaged = batches[-few:]
        planes = self.levels.source.planes
        with self.progress.stage("Sensitivities"):
            diagonals = self.processes.spread(weighed, lambda b: fisher_diagonal(reference, b, self.draw(2 * b)))
            counted = sum(int(flow.counted[b].sum()) for b in weighed)
            for name, norm in self.norms.items():
                total = sum((by_name[name] for by_name in diagonals), torch.zeros_like(diagonals[0][name]))
                mean = total / counted
                if norm.dim() == 2:  # experts
                    mean = drawn_to_pool(total, not name.endswith("down_proj"), planes)
                weighted = loss_weighted_norm(norm, mean)
                calib.set_scale(name, tied(channel_scale(weighted, 1.0), planes))
        self.build_tables()
        with self.progress.stage("Predicted damage"):
            thresholds = {name: [calib.thresholds({name: s})[name] for s in DAMAGE_LEVELS] for name in self.names}
            sums = self.processes.spread(
                damaged, lambda b: quadratic_damage(reference, b, self.draw(2 * b + 1), calib.scales, thresholds)
            )
        by_level = {name: zip(*(batch[name] for batch in sums), strict=True) for name in self.names}
        counted = sum(int(flow.counted[b].sum()) for b in damaged)
        damages = {name: [sum(row) / counted for row in by_level[name]] for name in self.names}
        return {"scales": dict(calib.scales), "tables": dict(calib.tables), "damages": damages}

    def result(self, allocation: Allocation) -> SearchResult:
        """The result for an allocation: final thresholds with the present scales."""
        calib = self.calib
        with self.progress.stage("Thresholds", len(calib.groups)) as stage:
            final = final_thresholds(self.levels.all_local, calib.scales, allocation, stage.advance)
        mean = mean_sparsity([allocation[name] for name in self.names], list(calib.sizes.values()))
        return SearchResult(
            {name: ProjectionRecipe(name, allocation[name], self.alphas[name], *final[name]) for name in self.names},
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
