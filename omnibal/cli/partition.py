"""omnibal partition: where to cut a model into pipeline stages."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer
from rich.table import Table

from omnibal.cli.costs import check_measured_here
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
from omnibal.cli.output import say, show, show_json
from omnibal.cli.present import median_packs, present_plan
from omnibal.cli.run import Run
from omnibal.cli.simulate import record_of, title_of
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import PartitionSearch, search_partition
from omnibal.pipeline.simulate import StepSimulation
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.planner.prediction import predict
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import PartitionFigures, candidates_table, cut_of, methods_table, stage_table
from omnibal.report.timeline import plot_timeline
from omnibal.report.trials import TrialFigures, trials_table

if TYPE_CHECKING:
    from omnibal.trials.run import Trial  # needs torch

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
    check_file("--out", out)
    check_picture("--plot", plot)
    fixed = read_limits(limits)
    run = Run.open(source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster)
    _check_trials(run, trials, num_stages)
    pipeline = {"partition": "uniform", "plan": None, "schedule": "1f1b"}
    base = present_plan(run, num_stages, limits=fixed, micro_batches=micro_batches, pipeline=pipeline)
    task = PartitionTask(run.profile, base, median_packs(run, base))
    wanted = get_args(Method) if compare else (*(BASELINES if plot else ()), method)
    found = {name: task.search(name, max(SHOWN, trials)) for name in dict.fromkeys(wanted)}
    tried = _try(run, task, found[method], trials, launcher) if trials else []
    report = PartitionReport(task, method, found, tuple(tried))
    if out is not None:
        task.plan_of(report.chosen, method).save(out)
    if plot is not None:
        report.draw(plot)
    written = [str(path) for path in (out, plot) if path is not None]
    if as_json:
        show_json(report.to_record() | {"written": written})
    else:
        show(*report.parts(compare=compare), *(f"written: {path}" for path in written))


def _check_trials(run: Run, trials: int, num_stages: int | None) -> None:
    if not run.has_config:
        if trials:
            raise ConfigError(f"--trials must come with a ds_config, got {trials} with {run.source}")
        if num_stages is None:
            raise ConfigError(f"--num-stages must be given beside a profile, got none with {run.source}")
    if trials:
        check_measured_here(run.profile)


@dataclass(frozen=True)
class PartitionTask:
    """A step whose best partition is sought."""

    profile: ModelProfile
    base: Plan
    """All but the partition, with a cluster."""
    packing: Packing
    """The step's packs."""

    def search(self, method: str, top: int) -> PartitionSearch:
        """The best partitions by a method."""
        layout = self.base.layout
        return search_partition(
            self.profile, self.packing.steps[0], layout.num_stages, self.base.links, method=method,
            zero_stage=layout.zero_stage, recompute=self.base.recompute, top=top,
        )  # fmt: skip

    def plan_of(self, partition: Partition, method: str) -> Plan:
        """A plan with this partition, and what a step under it is predicted to be like."""
        plan = replace(self.base, partition=partition, predicted=None)
        profile = self.profile
        made_from = {
            "method": method,
            "profile": profile.content_hash,
            "frozen": list(profile.frozen_parts),
            "adapters": profile.adapter_parameters,
        }
        return replace(plan, predicted=predict(profile, plan, self.packing), made_from=made_from)

    def figures(self, partition: Partition) -> PartitionFigures:
        """The step under a partition, in figures."""
        plan = replace(self.base, partition=partition, predicted=None)
        memory = [stage.total for stage in plan.memory(self.profile, self.packing.largest)]
        return PartitionFigures.of(self.profile, partition, self.simulate(partition), memory)

    def simulate(self, partition: Partition) -> StepSimulation:
        """The step under a partition."""
        plan = replace(self.base, partition=partition, predicted=None)
        return plan.simulate(self.profile, self.packing.steps[0])


def _try(run: Run, task: PartitionTask, found: PartitionSearch, count: int, launcher: str | None) -> list[TrialFigures]:
    """Run candidates on the real engine, a line for each as it comes; the fastest first, failed ones last.

    Raises:
        InfeasibleError: None of them runs.
    """
    from omnibal.trials.run import run_trials

    options = shlex.split(launcher) if launcher else ["--num_gpus", str(task.base.layout.num_devices)]
    plans = [task.plan_of(candidate.partition, found.method) for candidate in found.candidates[:count]]
    done: list[Trial] = []

    def figures_of(trial: "Trial") -> TrialFigures:
        return TrialFigures.of(cut_of(trial.plan.partition.boundaries), trial)

    def on_trial(trial: "Trial") -> None:
        done.append(trial)
        say(f"trial {len(done)} of {len(plans)}: {figures_of(trial)}")

    trials = run_trials(run.whole_config, plans, launcher_options=options, on_trial=on_trial)
    if trials[0].error is not None:
        raise InfeasibleError(f"a candidate must run, got {len(trials)} failures; the first: {trials[0].error}")
    return [figures_of(trial) for trial in trials]


@dataclass(frozen=True)
class PartitionReport:
    """All that `omnibal partition` says."""

    task: PartitionTask
    method: str
    """The one whose partition is taken."""
    found: Mapping[str, PartitionSearch]
    """Results of every method that was asked for."""
    tried: tuple[TrialFigures, ...]
    """Candidates on the real engine, the fastest first."""

    @property
    def chosen(self) -> Partition:
        """The fastest one tried, or the best candidate of the method."""
        return Partition(self.tried[0].boundaries) if self.tried else self.found[self.method].best.partition

    def draw(self, path: Path) -> None:
        """The slowest replica under the best partition of each method; methods that agree share a title."""
        methods = dict[Partition, list[str]]()
        for name, result in self.found.items():
            methods.setdefault(result.best.partition, []).append(name)
        panels = {}
        for cut, names in methods.items():
            step = self.task.simulate(cut)
            panels[f"{', '.join(names)} ({cut_of(cut.boundaries)})"] = step.replicas[step.slowest_replica]
        plot_timeline(panels, path)

    def to_record(self) -> dict[str, Any]:
        """The report as JSON values."""
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
        }

    def parts(self, *, compare: bool) -> list[str | Table]:
        """Tables and the bound for people."""
        search = self.found[self.method]
        bound, best = search.lower_bound_seconds, self.task.figures(self.chosen)
        parts: list[str | Table] = [title_of(self.task.profile, self.task.base, self.task.packing)]
        if compare:
            figures = {name: self.task.figures(result.best.partition) for name, result in self.found.items()}
            parts.append(methods_table(figures, bound))
        candidates = [(entry.partition.boundaries, entry.step_seconds) for entry in search.candidates[:SHOWN]]
        parts += [f"best candidates of {self.method}", candidates_table(candidates, bound)]
        if self.tried:
            parts += ["tried on the real engine, medians of 3 steps", trials_table(self.tried)]
            parts += [str(trial) for trial in self.tried if trial.measured_seconds is None]
        return [
            *parts,
            f"chosen: {cut_of(self.chosen.boundaries)}, bubble ratio {best.bubble_ratio:.1%}",
            stage_table(best.stages),
            f"predicted step {1e3 * best.step_seconds:,.1f} ms; no partition is below {1e3 * bound:,.1f} ms: "
            f"at most {1 - bound / best.step_seconds:.2%} are to be gained",
        ]
