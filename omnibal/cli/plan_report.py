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

from omnibal.advise.changes import SAME_STEP, TRAINER
from omnibal.advise.estimate import Way, gain_over
from omnibal.cli.planning import cheapest_way, present_plan, rate_of
from omnibal.data.limits import largest_load
from omnibal.errors import ConfigError, bytes_in_words
from omnibal.families.base import trained_in_words, vision_unit_of
from omnibal.memory.footprint import StageMemory
from omnibal.plan import Plan
from omnibal.planner import PlanResult
from omnibal.planner.search import Choice
from omnibal.report.stages import Explanation, memory_table
from omnibal.report.style import Row, duration, excess, in_milliseconds, milliseconds, table_of
from omnibal.workspace import Workspace

if TYPE_CHECKING:
    from omnibal.trials import Trial  # needs torch


@dataclass(frozen=True)
class GainOverPresent:
    planned: float  # samples a second of the plan
    cheapest: Way  # what a trainer's settings alone bring
    present: float | None = None  # samples a second of the present configuration; None if it cannot train
    problem: str = ""  # why the present configuration cannot train, or what it lacks

    @classmethod
    def of(cls, workspace: Workspace, plan: Plan) -> GainOverPresent:
        assert plan.predicted is not None, "a made plan is predicted"
        planned = plan.predicted.samples_per_step / plan.predicted.step_seconds
        cheapest = cheapest_way(workspace, plan.known_cluster, plan.predicted.samples_per_step)
        try:
            present = present_plan(workspace)
        except ConfigError as error:
            return cls(planned, cheapest, problem=str(error))
        memory = present.memory(workspace.profile, largest_load(workspace.lengths, present.limits))
        problem = _overflow(memory, present.known_cluster.stage_memory_bytes(present.layout))
        is_followed = _run_by(present) == _run_by(plan)  # the plan that training follows was found again
        return cls(planned, cheapest, planned if is_followed else rate_of(workspace, present), problem)

    def to_record(self) -> dict[str, Any]:
        return {
            "present_samples_per_second": self.present,
            "gain": self.planned / self.present if self.present else None,
            "problem": self.problem,
            "settings_samples_per_second": self.cheapest.samples_per_second,
        }

    def __str__(self) -> str:
        settings = replace(self.cheapest, name=TRAINER)  # which ones, says --explain
        name = "the present configuration"
        if self.present is None:
            return f"{gain_over(self.planned, [settings])}; {name} cannot train here: {self.problem}"
        present = Way(name + (f", which {self.problem}" if self.problem else ""), self.present)
        return gain_over(self.planned, [settings, present])


def _run_by(plan: Plan) -> Plan:
    """What a run does under a plan, without how it was found."""
    return replace(plan, predicted=None, made_from={})


def _overflow(memory: Sequence[StageMemory], budgets: Sequence[int]) -> str:
    """The stage that exceeds its budget most, in words; empty if every stage fits."""
    short = [(m.total - budget, stage) for stage, (m, budget) in enumerate(zip(memory, budgets, strict=True))]
    missing, stage = max(short)
    if missing <= 0:
        return ""
    return f"needs {bytes_in_words(memory[stage].total)} on stage {stage} and has {bytes_in_words(budgets[stage])}"


@dataclass(frozen=True)
class PlanReport:
    workspace: Workspace
    result: PlanResult  # with trials, its plan is the fastest one that ran
    gain: GainOverPresent
    trials: tuple[Row, ...] = ()
    refused: str = ""  # why training would not follow it

    @property
    def out(self) -> Path:
        return self.workspace.kept_plan

    @cached_property
    def explanation(self) -> Explanation:
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
        """The plan in five lines, a fact each; explained, every stage and every packing that was weighed."""
        plan, limits, model = self.result.plan, self.result.plan.limits, self.result.choice.model
        predicted, unit = plan.predicted, vision_unit_of(model.whole.layers)
        assert predicted is not None, "a made plan is predicted"
        samples = predicted.samples_per_step
        rate = samples / predicted.step_seconds
        memory, budgets = tuple(stage.memory for stage in predicted.stages), model.request.budgets(model.layout)
        held, budget = max(
            ((stage.total, most) for stage, most in zip(memory, budgets, strict=True)),
            key=lambda pair: pair[0] / pair[1],
        )
        recomputed = sum(level != "none" for level in plan.recompute)
        rows = {
            "gain": str(self.gain),
            "step": f"{duration(predicted.step_seconds)} for {samples:,.0f} samples, {rate:,.1f} samples/s; stages "
            f"are idle {predicted.bubble_ratio:.1%} of the time",
            "layout": f"{plan.layout} of {plan.known_cluster}, {plan.schedule}; {plan.micro_batches} packs per replica "
            f"and step, each of at most {limits.vision_units:,} {unit} and {limits.llm_tokens:,} LLM tokens",
            "memory": f"the fullest device holds {bytes_in_words(held)}, {bytes_in_words(budget)} are allowed; "
            f"{recomputed} of {len(plan.recompute)} layers recompute",
            "written": f"{self.out}; {self._followed()}",
        } | ({"asked": other} if (other := self._other_step(samples)) else {})
        lines = [f"{name:<9}{text}" for name, text in rows.items()]
        lines += [trial_line(trial) for trial in self.trials]
        if not explain:
            return [*lines]
        gap = excess(predicted.step_seconds, model.lower_bound_seconds)
        return [
            *lines,
            *self.explanation.parts(),
            memory_table(memory, budgets),
            "plans that were weighed",
            _weighed_table([_record(choice) for choice in self.result.tried], unit),
            f"compared with {self.gain.cheapest.name}",
            f"parameters trained: {trained_in_words(model.whole.trained)}",
            f"at most {gap:.1%} above the best partition of these packs",
        ]

    def _followed(self) -> str:
        source = self.workspace.source
        if self.refused:
            return f"training refuses it: {self.refused}; change {source}"
        if self.workspace.replaces:
            return f"deepspeed launch/train.py --deepspeed_config {source} follows it"
        return f"training follows {self.workspace.followed_plan or 'no plan'}; with --write it follows this one"

    def _other_step(self, samples_per_step: float) -> str:
        """Why a step has other samples than were asked for, if it has."""
        model = self.result.choice.model
        asked, packs = model.request.global_batch, model.packing.micro_batches * model.layout.num_replicas
        if abs(samples_per_step / asked - 1) <= SAME_STEP:
            return ""
        given = "the given limits" if model.request.limits is not None else "these limits"
        near = "" if model.request.keeps_batch(samples_per_step) else "; no limits that were tried come nearer"
        return (
            f"{asked:,} samples a step; the plan has {samples_per_step:,.0f}: {packs:,} packs under {given}, with "
            f"{samples_per_step / packs:.2f} samples each on average{near}"
        )


def _record(choice: Choice) -> dict[str, Any]:
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
    plan, predicted = trial.plan, trial.plan.predicted
    stages = () if predicted is None else predicted.stages
    outcome = f"after a retreat by {_by_stage(trial.retreat_bytes)}: " if trial.retreat_bytes else ""
    if trial.missing_bytes:
        outcome += f"out of memory, {_by_stage(trial.missing_bytes)} missing"
    else:
        outcome += f"failed: {trial.error}" if trial.error else "fits"
    return {
        "name": name,
        "measured_seconds": None if trial.error else trial.median_seconds,
        "predicted_seconds": None if predicted is None else predicted.step_seconds,
        "predicted_for": None if plan.cluster is None else plan.cluster.device.name,
        "peak_bytes": trial.peak_bytes,
        "predicted_bytes": [stage.memory.total - stage.memory.overhead for stage in stages],
        "outcome": outcome,
    }


def trial_line(row: Row) -> str:
    measured, predicted = row["measured_seconds"], row["predicted_seconds"]
    expected = "" if predicted is None else f"predicted {milliseconds(predicted)} ms on {row['predicted_for']}, "
    done = "" if measured is None else f"measured {milliseconds(measured)} ms: "
    return f"{row['name']}: {expected}{done}{row['outcome']}"


def _by_stage(sizes: Sequence[int]) -> str:
    return ", ".join(
        f"{size} bytes ({bytes_in_words(size)}) on stage {stage}" for stage, size in enumerate(sizes) if size
    )
