"""omnibal partition: where to cut a model into pipeline stages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer
from rich.console import Console

from omnibal.cli.files import check_file, check_picture
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LauncherOption,
    LengthsOption,
    LimitsOption,
    PictureOption,
    StagesOption,
    read_limits,
)
from omnibal.errors import ConfigError, InfeasibleError

if TYPE_CHECKING:
    from omnibal.cli.run import Run
    from omnibal.pipeline.partition import Partition
    from omnibal.pipeline.search import PartitionSearch
    from omnibal.plan import Plan
    from omnibal.planner.packings import Packing
    from omnibal.profile.records import ModelProfile
    from omnibal.report.stages import PartitionFigures
    from omnibal.report.trials import TrialFigures

Method = Literal["uniform", "parameters", "paper", "slowest_stage", "model", "bound", "search"]
BASELINES: Final = ("uniform", "parameters", "paper")
"""What a picture sets the partition against."""
SHOWN: Final = 5
"""Candidates."""


def partition(
    source: Annotated[Path, typer.Argument(help="A ds_config; or, without one, a profile.", show_default=False)],
    num_stages: StagesOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    limits: LimitsOption = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(help="Packs per replica and step; the ds_config's, or 4 per stage.", min=1, show_default=False),
    ] = None,
    method: Annotated[Method, typer.Option(help="How the partition is found.")] = "search",
    compare: Annotated[bool, typer.Option("--compare", help="Show all methods side by side.")] = False,
    trials: Annotated[
        int, typer.Option(help="Run so many candidates on the real engine and keep the fastest.", min=0)
    ] = 0,
    launcher: LauncherOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a plan that a ds_config can name in omnibal.pipeline.plan.", show_default=False),
    ] = None,
    plot: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find where to cut a model into pipeline stages.

    Searches the partition with the shortest 1F1B step for limits and recompute
    levels as they are, and says how far any other could be below it at most.
    uniform and parameters are DeepSpeed's methods, paper is OmniBal's; search
    is never worse than any of them. omnibal plan chooses all of it together.

    Example: omnibal partition ds_configs/mine.json --compare

    Example, tried on the machine itself: omnibal partition
    ds_configs/mine.json --trials 5 --out plan.json
    """
    from omnibal.cli.present import present_plan, real_packs
    from omnibal.cli.run import Run

    check_file("--out", out)
    check_picture("--plot", plot)
    fixed = read_limits(limits)
    run = Run.open(source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster)
    _check_trials(run, trials, num_stages)
    pipeline = {"partition": "uniform", "plan": None, "schedule": "1f1b"}
    base = present_plan(run, num_stages, limits=fixed, micro_batches=micro_batches, pipeline=pipeline)
    task = PartitionTask(run.profile, base, real_packs(run, base, steps=MEDIAN_OF).median_step(run.profile))
    wanted = get_args(Method) if compare else (*(BASELINES if plot else ()), method)
    found = {name: task.search(name, max(SHOWN, trials)) for name in dict.fromkeys(wanted)}
    tried = _try(run, task, found[method], trials, launcher) if trials else []
    report = PartitionReport(task, method, found, tuple(tried))
    report = replace(report, written=report.write(out, plot))
    if as_json:
        typer.echo(json.dumps(report.to_record(), indent=2))
    else:
        report.print(Console(), compare=compare)


MEDIAN_OF: Final = 32
"""Steps, spread over an epoch, of which the median one is taken."""


def _check_trials(run: "Run", trials: int, num_stages: int | None) -> None:
    from omnibal.cli.costs import check_measured_here

    if not run.has_config:
        if trials:
            raise ConfigError(f"--trials must come with a ds_config, got {trials} with {run.source}")
        if num_stages is None:
            raise ConfigError(f"--num-stages must be given beside a profile, got none with {run.source}")
    if trials:
        check_measured_here(run.profile)


@dataclass(frozen=True)
class PartitionTask:
    """A step whose best partition is sought.

    Attributes:
        profile: What the layers cost.
        base: All but the partition, with a cluster.
        packing: The step's packs.
    """

    profile: "ModelProfile"
    base: "Plan"
    packing: "Packing"

    def search(self, method: str, top: int) -> "PartitionSearch":
        """The best partitions by a method."""
        from omnibal.pipeline.search import search_partition

        layout = self.base.layout
        return search_partition(
            self.profile, self.packing.steps[0], layout.num_stages, self.base.links, method=method,
            zero_stage=layout.zero_stage, recompute=self.base.recompute, top=top,
        )  # fmt: skip

    def plan_of(self, partition: "Partition", method: str) -> "Plan":
        """A plan with this partition, and what a step under it is predicted to be like."""
        from omnibal.planner.prediction import predict

        plan = replace(self.base, partition=partition, predicted=None)
        profile = self.profile
        made_from = {"method": method, "profile": profile.content_hash, "frozen": list(profile.frozen_parts)}
        return replace(plan, predicted=predict(profile, plan, self.packing), made_from=made_from)

    def figures(self, partition: "Partition") -> "PartitionFigures":
        """The step under a partition, in figures."""
        from omnibal.report.stages import PartitionFigures

        plan = replace(self.base, partition=partition, predicted=None)
        memory = [stage.total for stage in plan.memory(self.profile, self.packing.largest)]
        return PartitionFigures.of(self.profile, partition, plan.simulate(self.profile, self.packing.steps[0]), memory)


def _try(
    run: "Run", task: PartitionTask, found: "PartitionSearch", count: int, launcher: str | None
) -> list["TrialFigures"]:
    """Run candidates on the real engine, a line for each as it comes; the fastest first, failed ones last.

    Raises:
        InfeasibleError: None of them runs.
    """
    import shlex

    from omnibal.cli.run import say
    from omnibal.report.stages import cut_of
    from omnibal.report.trials import TrialFigures
    from omnibal.trials.run import Trial, run_trials

    options = shlex.split(launcher) if launcher else ["--num_gpus", str(task.base.layout.num_devices)]
    plans = [task.plan_of(candidate.partition, found.method) for candidate in found.candidates[:count]]
    done: list[Trial] = []

    def figures_of(trial: Trial) -> TrialFigures:
        return TrialFigures.of(cut_of(trial.plan.partition.boundaries), trial)

    def show(trial: Trial) -> None:
        done.append(trial)
        say(f"trial {len(done)} of {len(plans)}: {figures_of(trial)}")

    trials = run_trials(run.whole_config, plans, launcher_options=options, on_trial=show)
    if trials[0].error is not None:
        raise InfeasibleError(f"a candidate must run, got {len(trials)} failures; the first: {trials[0].error}")
    return [figures_of(trial) for trial in trials]


@dataclass(frozen=True)
class PartitionReport:
    """All that `omnibal partition` says.

    Attributes:
        task: The step that was predicted.
        method: The one whose partition is taken.
        found: Results of every method that was asked for.
        tried: Candidates on the real engine, the fastest first.
        written: Files.
    """

    task: PartitionTask
    method: str
    found: Mapping[str, "PartitionSearch"]
    tried: tuple["TrialFigures", ...]
    written: Sequence[Path] = ()

    @property
    def chosen(self) -> "Partition":
        """The fastest one tried, or the best candidate of the method."""
        from omnibal.pipeline.partition import Partition

        return Partition(self.tried[0].boundaries) if self.tried else self.found[self.method].best.partition

    def write(self, out: Path | None, plot: Path | None) -> list[Path]:
        """Write the plan and draw the picture, as asked; the paths."""
        if out is not None:
            self.task.plan_of(self.chosen, self.method).save(out)
        if plot is not None:
            self._draw(plot)
        return [path for path in (out, plot) if path is not None]

    def _draw(self, plot: Path) -> None:
        """The slowest replica under the best partition of each method; methods that agree share a title."""
        from omnibal.report.stages import cut_of
        from omnibal.report.timeline import plot_timeline

        task, methods = self.task, dict[Any, list[str]]()
        for name, result in self.found.items():
            methods.setdefault(result.best.partition, []).append(name)
        panels = {}
        for cut, names in methods.items():
            plan = replace(task.base, partition=cut, predicted=None)
            step = plan.simulate(task.profile, task.packing.steps[0])
            panels[f"{', '.join(names)} ({cut_of(cut.boundaries)})"] = step.replicas[step.slowest_replica]
        plot_timeline(panels, plot)

    def to_record(self) -> dict[str, Any]:
        """The report as JSON values."""
        from omnibal.cli.simulate import record_of

        return record_of(self.task.profile, self.task.base, self.task.packing) | {
            "lower_bound_seconds": self.found[self.method].lower_bound_seconds,
            "chosen": self.chosen.boundaries,
            "method": self.method,
            "methods": {
                name: {
                    "gap": result.gap,
                    **self.task.figures(result.best.partition).to_record(),
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
        from omnibal.cli.simulate import title_of
        from omnibal.report.stages import candidates_table, cut_of, methods_table, stage_table
        from omnibal.report.trials import trials_table

        search = self.found[self.method]
        bound, best = search.lower_bound_seconds, self.task.figures(self.chosen)
        _say(console, title_of(self.task.profile, self.task.base, self.task.packing))
        if compare:
            figures = {name: self.task.figures(result.best.partition) for name, result in self.found.items()}
            console.print(methods_table(figures, bound))
        candidates = [(entry.partition.boundaries, entry.step_seconds) for entry in search.candidates[:SHOWN]]
        _say(console, f"best candidates of {self.method}")
        console.print(candidates_table(candidates, bound))
        if self.tried:
            _say(console, "tried on the real engine, medians of 3 steps")
            console.print(trials_table(self.tried))
            _say(console, *(str(trial) for trial in self.tried if trial.measured_seconds is None))
        _say(console, f"chosen: {cut_of(self.chosen.boundaries)}, bubble ratio {best.bubble_ratio:.1%}")
        console.print(stage_table(best.stages))
        _say(
            console,
            f"predicted step {1e3 * best.step_seconds:,.1f} ms; no partition is below {1e3 * bound:,.1f} ms: "
            f"at most {1 - bound / best.step_seconds:.2%} are to be gained",
            *(f"written: {path}" for path in self.written),
        )


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)
