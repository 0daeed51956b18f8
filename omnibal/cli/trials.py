"""`omnibal plan --trials`: its best plans on the real engine, their time and memory measured beside predicted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.table import Table

from omnibal.cli.costs import check_measured_here
from omnibal.cli.output import say
from omnibal.cli.run import Run
from omnibal.errors import ConfigError, InfeasibleError, bytes_in_words
from omnibal.plan import Plan
from omnibal.planner import PlanResult
from omnibal.planner.search import Choice, retreat
from omnibal.report.style import Row, milliseconds, table_of, unit_of

if TYPE_CHECKING:
    from omnibal.trials import Trial  # needs torch


def _row(name: str, trial: Trial) -> Row:
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


def _line(row: Row) -> str:
    """The trial in a line, as it is said when it is done."""
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


def trials_table(trials: Sequence[Row]) -> Table:
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


def check_trials(run: Run) -> None:
    """Refuse, before anything is planned, trials that cannot be.

    Raises:
        ConfigError: There is no ds_config, or costs are of another machine.
    """
    if not run.has_config:
        raise ConfigError(f"--trials must come with a ds_config, got {run.source}")
    check_measured_here(run.profile)


def try_best(run: Run, result: PlanResult, count: int, launcher: str | None) -> tuple[PlanResult, tuple[Row, ...]]:
    """Run the best plans, retreating where memory runs out, and say how each did as it comes.

    Args:
        run: The ds_config that names model and data.
        result: What was planned.
        count: So many plans.
        launcher: Options of the deepspeed launcher; by default a process on this machine for each device.

    Returns:
        The result with the plan of the most samples a second, and all trials.

    Raises:
        InfeasibleError: None of them runs.
    """
    layout = result.choice.model.layout
    options = shlex.split(launcher) if launcher else ["--num_gpus", str(layout.num_devices)]
    tries = [_Try(result, choice, f"plan {place}") for place, choice in enumerate(result.tried[:count], start=1)]
    for each in tries:
        each.run(run.whole_config, options)
    done = [entry for each in tries for entry in each.done]
    seconds, best, _ = min(done, key=lambda entry: entry[0])
    figures = tuple(entry[2] for entry in done)
    if seconds == float("inf"):
        raise InfeasibleError(f"a plan must run, got {len(done)} failures; the first: {figures[0]['outcome']}")
    return replace(result, plan=result.plan_of(best), choice=best), figures


class _Try:
    """A plan on the real engine, and then the plans that hold less and less until one fits."""

    def __init__(self, result: PlanResult, choice: Choice, name: str) -> None:
        self._result, self._choice, self._name = result, choice, name
        self.done: list[tuple[float, Choice, Row]] = []
        """Measured seconds of a sample, infinite where a trial failed; what ran; and how it did."""

    def run(self, config: dict[str, object], options: list[str]) -> None:
        """Run them all."""
        from omnibal.trials import run_trials

        plan = self._result.plan_of(self._choice)
        budgets = plan.known_cluster.allocatable_bytes(plan.layout)
        run_trials(
            config, [plan], launcher_options=options, budget_bytes=budgets,
            on_trial=self._on_trial, retreat=self._retreat,
        )  # fmt: skip

    def _on_trial(self, trial: Trial) -> None:
        name = self._name + f", retreat {len(self.done)}" * (len(self.done) > 0)
        figures = _row(name, trial)
        seconds = trial.median_seconds / self._choice.model.packing.samples_per_step
        self.done.append((seconds, self._choice, figures))
        say(_line(figures))

    def _retreat(self, trial: Trial) -> Plan | None:
        """What to run after a trial that was short of memory; None where no layer is left to recompute."""
        try:
            self._choice = retreat(self._choice, trial.missing_bytes)
        except InfeasibleError:
            return None
        return self._result.plan_of(self._choice)
