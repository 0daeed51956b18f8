"""What `omnibal partition` says, writes and draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from omnibal.cli.partition_plan import plan_of, save_plan
from omnibal.cli.steps import StepTask
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import PartitionSearch
from omnibal.pipeline.simulate import Simulation
from omnibal.report.stages import (
    PartitionFigures,
    candidates_table,
    cut_of,
    methods_table,
    slowest_replica,
    stage_table,
)
from omnibal.report.timeline import plot_timeline
from omnibal.report.trials import TrialFigures, trials_table


@dataclass(frozen=True)
class PartitionReport:
    """All that `omnibal partition` says.

    Attributes:
        task: The step that was predicted.
        method: The one whose partition is taken.
        found: Results of every method that was asked for.
        top: Candidates to show.
        tried: Candidates on the real engine, the fastest first.
        written: Files.
    """

    task: StepTask
    method: str
    found: Mapping[str, PartitionSearch]
    top: int
    tried: tuple[TrialFigures, ...]
    written: Sequence[Path] = ()

    @property
    def chosen(self) -> Partition:
        """The fastest one tried, or the best candidate of the method."""
        return Partition(self.tried[0].boundaries) if self.tried else self.search.best.partition

    @property
    def search(self) -> PartitionSearch:
        """What the method found."""
        return self.found[self.method]

    @property
    def figures(self) -> dict[str, PartitionFigures]:
        """The best partition of each method."""
        return {name: self.task.figures(result.best.partition) for name, result in self.found.items()}

    def write(self, plan: Path | None, plot: Path | None) -> list[Path]:
        """Write the plan and draw the picture, as asked; the paths."""
        if plan is not None:
            save_plan(plan_of(self.task, self.chosen, self.method), plan)
        if plot is not None:
            plot_timeline(self._timelines(), plot)
        return [path for path in (plan, plot) if path is not None]

    def _timelines(self) -> dict[str, Simulation]:
        """The slowest replica under the best partition of each method; methods that agree share a title."""
        methods: dict[Partition, list[str]] = {}
        for name, result in self.found.items():
            methods.setdefault(result.best.partition, []).append(name)
        steps = {cut: self.task.simulate(cut) for cut in methods}
        return {
            f"{', '.join(names)} ({cut_of(cut.boundaries)})": steps[cut].replicas[slowest_replica(steps[cut])]
            for cut, names in methods.items()
        }

    def to_record(self) -> dict[str, Any]:
        """The report as JSON values."""
        figures = self.figures
        return self.task.to_record() | {
            "num_stages": self.chosen.num_stages,
            "lower_bound_seconds": self.search.lower_bound_seconds,
            "chosen": self.chosen.boundaries,
            "method": self.method,
            "methods": {
                name: {
                    "gap": result.gap,
                    **figures[name].to_record(),
                    "candidates": [
                        {"boundaries": entry.partition.boundaries, "step_seconds": entry.step_seconds}
                        for entry in result.candidates
                    ],
                }
                for name, result in self.found.items()
            },
            "trials": [trial.to_record() for trial in self.tried],
            "written": [str(path) for path in self.written],
        }

    def print(self, console: Console, *, compare: bool) -> None:
        """Print tables, the bound, and what was written."""
        bound, best = self.search.lower_bound_seconds, self.task.figures(self.chosen)
        say(console, str(self.task))
        if compare:
            console.print(methods_table(self.figures, bound))
        candidates = [(entry.partition.boundaries, entry.step_seconds) for entry in self.search.candidates[: self.top]]
        say(console, f"best candidates of {self.method}")
        console.print(candidates_table(candidates, bound))
        if self.tried:
            say(console, "tried on the real engine, medians of 3 steps")
            console.print(trials_table(self.tried))
            say(console, *(str(trial) for trial in self.tried if trial.measured_seconds is None))
        say(console, f"chosen: {cut_of(self.chosen.boundaries)}, bubble ratio {best.bubble_ratio:.1%}")
        console.print(stage_table(best.stages))
        say(
            console,
            f"predicted step {1e3 * best.step_seconds:,.1f} ms; no partition is below {1e3 * bound:,.1f} ms: "
            f"at most {1 - bound / best.step_seconds:.2%} are to be gained",
            *(f"written: {path}" for path in self.written),
        )


def say(console: Console, *lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        console.print(line, highlight=False, markup=False)
