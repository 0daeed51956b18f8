"""What `omnibal plan` says: the plan, what it gains over the present configuration and why, and how trials did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from omnibal.advise.changes import SAME_STEP
from omnibal.advise.estimate import Way, gain_over
from omnibal.cli.planning import STEPS, cheapest_way, present_plan, real_packs
from omnibal.data.limits import largest_load
from omnibal.errors import ConfigError, bytes_in_words
from omnibal.families.base import trained_in_words, vision_unit_of
from omnibal.memory.footprint import StageMemory
from omnibal.plan import Plan
from omnibal.planner import PlanResult
from omnibal.planner.prediction import Variant
from omnibal.planner.search import Choice
from omnibal.report.stages import Explanation, cut_of, memory_table
from omnibal.report.style import Row, duration, excess, in_milliseconds, milliseconds, table_of, unit_of
from omnibal.workspace import Workspace

if TYPE_CHECKING:
    from omnibal.trials import Trial  # needs torch


@dataclass(frozen=True)
class GainOverPresent:
    # From the present configuration to the plan, one change after the other; empty if none is known that can train.
    variants: tuple[Variant, ...] = ()
    problem: str = ""  # why there are no variants, or what the present configuration lacks
    cheapest: Way | None = None  # what a trainer's settings alone bring; None without a ds_config

    @classmethod
    def of(cls, workspace: Workspace, plan: Plan) -> GainOverPresent:
        """Simulate the present configuration, the plan and the changes between them on the same samples."""
        if workspace.files is None:
            return cls()
        try:
            present = present_plan(workspace)
        except ConfigError as error:
            return cls(problem=str(error), cheapest=_cheapest(workspace, plan))
        # Each variant makes one more change than the one before it. Packs of the plan's limits come with micro-batches
        # that keep the plan's packs per step on the present number of replicas.
        replicas = present.layout.num_replicas
        alike = max(1, round(plan.micro_batches * plan.layout.num_replicas / replicas))
        plans = {
            "present": present,
            "packs": replace(present, limits=plan.limits, micro_batches=alike, predicted=None),
            "cut": replace(plan, recompute=present.recompute, schedule=present.schedule, predicted=None),
            "recompute": replace(plan, schedule=present.schedule, predicted=None),
            "schedule": plan,
        }
        variants: list[Variant] = []
        for name, variant in plans.items():
            packing = real_packs(workspace, variant, steps=STEPS)
            variants.append(Variant(name, workspace.profile, variant, packing.steps, packing.samples_per_step))
        memory = present.memory(workspace.profile, largest_load(workspace.lengths, present.limits))
        problem = _overflow(memory, present.known_cluster.stage_memory_bytes(present.layout))
        return cls(tuple(variants), problem, _cheapest(workspace, plan))

    @property
    def ratio(self) -> float | None:
        """Samples a second of the plan, in multiples of the present ones; None where nothing can be compared."""
        if not self.variants:
            return None
        return self.variants[-1].samples_per_second / self.variants[0].samples_per_second

    @property
    def reasons(self) -> dict[str, float]:
        pairs = pairwise(self.variants)
        return {after.name: after.samples_per_second / before.samples_per_second for before, after in pairs}

    def to_record(self) -> dict[str, Any]:
        present = self.variants[0].samples_per_second if self.variants else None
        return {
            "present_samples_per_second": present, "gain": self.ratio, "reasons": self.reasons, "problem": self.problem,
            "settings_samples_per_second": self.cheapest and self.cheapest.samples_per_second,
        }  # fmt: skip

    def lines(self, samples_per_second: float) -> list[str]:
        """The report as lines of text, of a plan that is predicted to train so many samples a second."""
        cheapest = [] if self.cheapest is None else [self.cheapest]
        if not self.variants:
            if not self.problem:
                return []
            gain = gain_over(samples_per_second, cheapest)
            return [f"gain: {gain}; the present configuration cannot train here: {self.problem}"]
        present = self.variants[0]
        name = "the present configuration" + (f", which {self.problem}" if self.problem else "")
        today = Way(name, present.samples_per_second)
        why = ", ".join(f"{name} {factor:.2f}" for name, factor in self.reasons.items())
        gain = gain_over(self.variants[-1].samples_per_second, [today, *cheapest])
        return [f"gain: {gain}", f"why: {why} times"]


def _cheapest(workspace: Workspace, plan: Plan) -> Way:
    assert plan.predicted is not None, "a made plan is predicted"
    return cheapest_way(workspace, plan.known_cluster, plan.predicted.samples_per_step)


def _overflow(memory: Sequence[StageMemory], budgets: Sequence[int]) -> str:
    """The stage that exceeds its budget most, in words; empty if every stage fits."""
    short = [(m.total - budget, stage) for stage, (m, budget) in enumerate(zip(memory, budgets, strict=True))]
    missing, stage = max(short)
    if missing <= 0:
        return ""
    return f"needs {bytes_in_words(memory[stage].total)} on stage {stage} and has {bytes_in_words(budgets[stage])}"


@dataclass(frozen=True)
class PlanReport:
    """All that `omnibal plan` says of a plan that it made."""

    workspace: Workspace
    result: PlanResult  # with trials, its plan is the fastest one that ran
    gain: GainOverPresent
    out: Path  # file of the plan
    trials: tuple[Row, ...] = ()
    refused: str = ""  # why training would not follow it

    @cached_property
    def explanation(self) -> Explanation:
        """The plan's median step, of the packs that it was chosen by."""
        model = self.result.choice.model
        return Explanation(model.whole, self.result.plan, model.packing.median_step(model.whole))

    def to_record(self, *, explain: bool) -> dict[str, Any]:
        result = self.result
        return {
            "plan": result.plan.to_record(),
            "trained": {name: numbers._asdict() for name, numbers in self.result.choice.model.whole.trained.items()},
            "written": str(self.out),
            "refused": self.refused or None,
            **self.gain.to_record(),
            "lower_bound_seconds": result.choice.model.lower_bound_seconds,
            "tried": [_record(choice) for choice in result.tried],
            "trials": list(self.trials),
            **({"explained": self.explanation.to_record()} if explain else {}),
        }

    def parts(self, *, explain: bool) -> list[str | Table]:
        """The plan in a few lines for people; explained, every stage and every packing that was weighed."""
        plan, limits = self.result.plan, self.result.plan.limits
        predicted = plan.predicted
        assert predicted is not None
        fullest = max(m.total / budget for m, budget in zip(self._memory(), self._budgets, strict=True))
        rate = predicted.samples_per_step / predicted.step_seconds
        unit = vision_unit_of(self.result.choice.model.whole.layers)
        return [
            *(self._explanations() if explain else ()),
            f"chosen: {plan.layout} of {plan.known_cluster}, {plan.schedule}, {plan.micro_batches} micro-batches of at "
            f"most {limits.vision_units:,} {unit} and {limits.llm_tokens:,} LLM tokens",
            f"cut at {cut_of(plan.partition.boundaries)}; {sum(level != 'none' for level in plan.recompute)} of "
            f"{len(plan.recompute)} layers recompute; the fullest device holds {fullest:.1%} of its memory",
            f"parameters trained: {trained_in_words(self.result.choice.model.whole.trained)}",
            f"predicted: step {duration(predicted.step_seconds)} of {predicted.samples_per_step:,.0f} samples, "
            f"{rate:,.1f} samples/s, bubble {predicted.bubble_ratio:.1%}",
            *self._other_step(predicted.samples_per_step),
            *self.gain.lines(rate),
            *([self._bound()] if explain or not self.gain.variants else ()),
            *([_trials_table(self.trials)] if self.trials else ()),
            *(f"{trial['name']}: {trial['outcome']}" for trial in self.trials),
            f"written: {self.out}",
            *self._followed(),
        ]

    def _followed(self) -> list[str]:
        """Which plan training follows, where there is a ds_config."""
        workspace = self.workspace
        if workspace.files is None:
            return []
        if self.refused:
            return [f"training refuses it: {self.refused}; change {workspace.source}"]
        if workspace.replaces:
            return [f"training follows it: deepspeed launch/train.py --deepspeed_config {workspace.source}"]
        followed = workspace.followed_plan or "no plan"
        return [f"training follows {followed}; --write puts this one in its place"]

    def _other_step(self, samples_per_step: float) -> list[str]:
        """Why a step has other samples than were asked for, if it has."""
        model = self.result.choice.model
        asked, packs = model.request.global_batch, model.packing.micro_batches * model.layout.num_replicas
        if abs(samples_per_step / asked - 1) <= SAME_STEP:
            return []
        given = "the given limits" if model.request.limits is not None else "these limits"
        near = "" if model.request.keeps_batch(samples_per_step) else "; no limits that were tried come nearer"
        return [
            f"samples a step: {samples_per_step:,.0f} in place of the {asked:,} asked for: {packs:,} packs under "
            f"{given} hold {samples_per_step / packs:.2f} samples each, and epochs have whole steps{near}"
        ]

    def _explanations(self) -> list[str | Table]:
        unit = vision_unit_of(self.result.choice.model.whole.layers)
        return [
            *self.explanation.parts(),
            memory_table(self._memory(), self._budgets),
            "plans that were weighed",
            _weighed_table([_record(choice) for choice in self.result.tried], unit),
        ]

    def _bound(self) -> str:
        result = self.result
        assert result.plan.predicted is not None
        gap = excess(result.plan.predicted.step_seconds, result.choice.model.lower_bound_seconds)
        return f"at most {gap:.1%} above the best partition of these packs"

    @property
    def _budgets(self) -> tuple[int, ...]:
        """What devices have beside the head room: after a retreat a plan was made for less."""
        model = self.result.choice.model
        return model.request.budgets(model.layout)

    def _memory(self) -> tuple[StageMemory, ...]:
        assert self.result.plan.predicted is not None
        return tuple(stage.memory for stage in self.result.plan.predicted.stages)


def _record(choice: Choice) -> dict[str, Any]:
    """A choice as JSON values; of each stage, how many layers recompute."""
    model, limits = choice.model, choice.model.packing.limits
    plan = choice.plan
    boundaries, levels = plan.partition.boundaries, np.array(plan.recompute) != "none"
    return {
        "num_stages": model.num_stages,
        "schedule": model.schedule_name,
        "micro_batches": model.packing.micro_batches,
        "limits": {"vision_units": limits.vision_units, "llm_tokens": limits.llm_tokens},
        "samples_per_step": model.packing.samples_per_step,
        "step_seconds": choice.step_seconds,
        "partition": list(boundaries),
        "recomputed": [int(levels[a:b].sum()) for a, b in pairwise(boundaries)],
    }


def _weighed_table(choices: Sequence[Row], vision_unit: str) -> Table:
    """A row per packing and number of stages: packs of a replica's step, their limits, and what a step is like."""
    return table_of(
        choices,
        [
            # A line of its own for "-lean": the table then fits 80 columns.
            ("schedule", lambda row: row["schedule"].replace("-lean", "\n-lean")),
            ("stages", "{num_stages}"),
            ("packs", "{micro_batches}"),
            (vision_unit.replace(" ", "\n"), "{limits[vision_units]:,}"),
            ("tokens", "{limits[llm_tokens]:,}"),
            ("samples", "{samples_per_step:,.0f}"),
            ("step ms", in_milliseconds("step_seconds")),
            ("samples\na second", lambda row: f"{row['samples_per_step'] / row['step_seconds']:,.1f}"),
            ("re-\ncomp", lambda row: f"{sum(row['recomputed'])}"),
        ],
    )


def trial_row(name: str, trial: Trial) -> Row:
    """A trial beside what its plan predicted, as JSON values; None and empty lists where nothing is known."""
    plan, predicted = trial.plan, trial.plan.predicted
    stages = () if predicted is None else predicted.stages
    return {
        "name": name,
        "boundaries": plan.partition.boundaries,
        "micro_batches": plan.micro_batches,
        "recomputed": [
            sum(level != "none" for level in plan.recompute[a:b]) for a, b in pairwise(plan.partition.boundaries)
        ],
        "measured_seconds": None if trial.error else trial.median_seconds,
        "predicted_seconds": None if predicted is None else predicted.step_seconds,
        "predicted_for": None if plan.cluster is None else plan.cluster.device.name,
        "samples_per_step": None if predicted is None else predicted.samples_per_step,
        "peak_bytes": trial.peak_bytes,
        "predicted_bytes": [stage.memory.total - stage.memory.overhead for stage in stages],
        "outcome": _outcome(trial),
    }


def trial_line(row: Row) -> str:
    measured, predicted = row["measured_seconds"], row["predicted_seconds"]
    expected = "" if predicted is None else f"predicted {milliseconds(predicted)} ms on {row['predicted_for']}, "
    done = "" if measured is None else f"measured {milliseconds(measured)} ms: "
    return f"{row['name']}: {expected}{done}{row['outcome']}"


def _outcome(trial: Trial) -> str:
    before = f"after a retreat by {_by_stage(trial.retreat_bytes)}: " if trial.retreat_bytes else ""
    if trial.missing_bytes:
        return f"{before}out of memory, {_by_stage(trial.missing_bytes)} missing"
    return before + (f"failed: {trial.error}" if trial.error else "fits")


def _by_stage(sizes: Sequence[int]) -> str:
    return ", ".join(
        f"{size} bytes ({bytes_in_words(size)}) on stage {stage}" for stage, size in enumerate(sizes) if size
    )


def _trials_table(trials: Sequence[Row]) -> Table:
    """A row per trial, in the order given: time and peak as measured, and as the plan predicted them."""
    unit, name = unit_of(size for trial in trials for size in (*trial["peak_bytes"], *trial["predicted_bytes"]))
    return table_of(
        trials,
        [
            ("trial", "{name}"),
            ("packs", "{micro_batches}"),
            ("recompute", lambda row: " ".join(map(str, row["recomputed"]))),
            ("ms", lambda row: milliseconds(row["measured_seconds"])),
            ("plan\nms", lambda row: milliseconds(row["predicted_seconds"])),
            ("samples\na second", _rate),
            (name, lambda row: _sizes(row["peak_bytes"], unit)),
            (f"plan\n{name}", lambda row: _sizes(row["predicted_bytes"], unit)),
        ],
    )


def _rate(trial: Row) -> str:
    if trial["measured_seconds"] is None or trial["samples_per_step"] is None:
        return "–"
    return f"{trial['samples_per_step'] / trial['measured_seconds']:,.1f}"


def _sizes(sizes: Sequence[int], unit: int) -> str:
    return " ".join(f"{size / unit:.1f}" for size in sizes) if any(sizes) else "–"
