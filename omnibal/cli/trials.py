"""`omnibal plan --trials`: its best plans on the real engine."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from omnibal.cli.costs import check_measured_here
from omnibal.cli.output import say
from omnibal.cli.run import Run
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.plan import Plan
from omnibal.planner import PlanResult
from omnibal.planner.search import Choice, retreat
from omnibal.report.trials import TrialFigures

if TYPE_CHECKING:
    from omnibal.trials import Trial  # needs torch


def check_trials(run: Run) -> None:
    """Refuse, before anything is planned, trials that cannot be.

    Raises:
        ConfigError: There is no ds_config, or costs are of another machine.
    """
    if not run.has_config:
        raise ConfigError(f"--trials must come with a ds_config, got {run.source}")
    check_measured_here(run.profile)


def try_best(
    run: Run, result: PlanResult, count: int, launcher: str | None
) -> tuple[PlanResult, tuple[TrialFigures, ...]]:
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
        raise InfeasibleError(f"a plan must run, got {len(done)} failures; the first: {figures[0].outcome}")
    return replace(result, plan=result.plan_of(best), choice=best), figures


class _Try:
    """A plan on the real engine, and then the plans that hold less and less until one fits."""

    def __init__(self, result: PlanResult, choice: Choice, name: str) -> None:
        self._result, self._choice, self._name = result, choice, name
        self.done: list[tuple[float, Choice, TrialFigures]] = []
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

    def _on_trial(self, trial: "Trial") -> None:
        name = self._name + f", retreat {len(self.done)}" * (len(self.done) > 0)
        figures = TrialFigures.of(name, trial)
        seconds = trial.median_seconds / self._choice.model.packing.samples_per_step
        self.done.append((seconds, self._choice, figures))
        say(str(figures))

    def _retreat(self, trial: "Trial") -> Plan | None:
        """What to run after a trial that was short of memory; None where no layer is left to recompute."""
        try:
            self._choice = retreat(self._choice, trial.missing_bytes)
        except InfeasibleError:
            return None
        return self._result.plan_of(self._choice)
