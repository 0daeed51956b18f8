"""`omnibal plan` on the real engine: its best plans, or the paper's four steps in place of the solver's levels."""

import itertools
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omnibal.cli.costs import check_measured_here
from omnibal.cli.output import say
from omnibal.cli.run import Run
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.memory.paper import block_modules
from omnibal.plan import Plan
from omnibal.planner import PlanResult
from omnibal.planner.search import Choice, retreat
from omnibal.report.trials import TrialFigures

if TYPE_CHECKING:
    from omnibal.trials.run import Trial  # needs torch


def check_trials(run: Run, *, trials: int, four_steps: bool) -> None:
    """Refuse, before anything is planned, trials that cannot be.

    Raises:
        ConfigError: Trials are asked for without a ds_config, in two ways at once, or with costs of another machine.
    """
    if not trials and not four_steps:
        return
    if trials and four_steps:
        raise ConfigError(f"--trials must be left out beside --four-steps, got {trials}")
    if not run.has_config:
        raise ConfigError(f"--trials and --four-steps must come with a ds_config, got {run.source}")
    check_measured_here(run.profile)


class Engine:
    """Runs plans on the real engine, and says how each did.

    Args:
        run: The ds_config that names model and data.
        result: What was planned.
        launcher: Options of the deepspeed launcher; by default a process on this machine for each device.
    """

    def __init__(self, run: Run, result: PlanResult, launcher: str | None) -> None:
        self.config, self.result = run.whole_config, result
        layout = result.choice.model.layout
        self._options = shlex.split(launcher) if launcher else ["--num_gpus", str(layout.num_devices)]
        self.trials: list[TrialFigures] = []

    def try_best(self, count: int) -> PlanResult:
        """Run the best plans, retreating where memory runs out; the result with the one of the most samples a second.

        Raises:
            InfeasibleError: None of them runs.
        """
        measured: list[tuple[float, Choice]] = []
        for place, choice in enumerate(self.result.tried[:count], start=1):
            measured += self._try(choice, f"plan {place}")
        seconds, best = min(measured, key=lambda entry: entry[0])
        if seconds == float("inf"):
            raise InfeasibleError(f"a plan must run, got {len(measured)} failures; the first: {self.trials[0].outcome}")
        return replace(self.result, plan=self.result.plan_of(best), choice=best)

    def _try(self, choice: Choice, name: str) -> list[tuple[float, Choice]]:
        """Measured seconds of a sample under a plan and its retreats, infinite where a trial failed."""
        done: list[tuple[float, Choice]] = []
        step_back = _Retreat(self.result, choice)
        show = self._shown_as(name + f", retreat {number}" * (number > 0) for number in itertools.count())

        def on_trial(trial: "Trial") -> None:
            show(trial)
            done.append((trial.median_seconds / choice.model.packing.samples_per_step, step_back.choice))

        self._run(self.result.plan_of(choice), on_trial=on_trial, retreat=step_back)
        return done

    def take_four_steps(self) -> Plan:
        """The best plan's packs and partition, with the levels that the paper's four steps find; then the plan itself.

        Raises:
            InfeasibleError: A stage does not fit with every block recomputed.
        """
        from omnibal.trials.four_steps import take_four_steps

        model, plan = self.result.choice.model, self.result.plan
        modules = block_modules(model.profile.layers)
        budgets = model.request.cluster.allocatable_bytes(model.layout)
        show = self._shown_as(f"paper's {number}" for number in itertools.count(1))
        in_flight = model.footprint.schedule.in_flight
        found = take_four_steps(plan, modules, in_flight, budgets, lambda tried: self._run(tried)[0], on_trial=show)
        self._run(plan, on_trial=self._shown_as(["solver's"]))
        return found.plan

    def _run(self, plan: Plan, **calls: Any) -> list["Trial"]:
        from omnibal.trials.run import run_trials

        budgets = plan.known_cluster.allocatable_bytes(plan.layout)
        return run_trials(self.config, [plan], launcher_options=self._options, budget_bytes=budgets, **calls)

    def _shown_as(self, names: Iterable[str]) -> Callable[["Trial"], None]:
        """Keeps trials and says how they did, as they come, under these names."""
        left = iter(names)

        def show(trial: "Trial") -> None:
            self.trials.append(TrialFigures.of(next(left), trial))
            say(str(self.trials[-1]))

        return show


@dataclass
class _Retreat:
    """Makes plans that hold less and less memory.

    Attributes:
        result: What was planned.
        choice: The last one.
    """

    result: PlanResult
    choice: Choice

    def __call__(self, trial: "Trial") -> Plan | None:
        """The next one after a trial of the last one; None where no layer is left to recompute."""
        try:
            self.choice = retreat(self.choice, trial.missing_bytes)
        except InfeasibleError:
            return None
        return self.result.plan_of(self.choice)
