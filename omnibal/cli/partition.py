"""omnibal partition: where to cut a model into pipeline stages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import typer
from rich.table import Table

from omnibal.cli.files import check_file, check_picture
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LengthsOption,
    LimitsOption,
    PictureOption,
    StagesOption,
    read_limits,
)
from omnibal.cli.output import show, show_json
from omnibal.cli.present import median_packs, present_plan
from omnibal.cli.run import Run
from omnibal.cli.simulate import record_of, title_of
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import PartitionSearch, search_partition
from omnibal.pipeline.simulate import StepSimulation
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.planner.prediction import predict
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import PartitionFigures, candidates_table, cut_of, methods_table, stage_table
from omnibal.report.timeline import plot_timeline

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
    """
    check_file("--out", out)
    check_picture("--plot", plot)
    fixed = read_limits(limits)
    run = Run.open(source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster)
    if not run.has_config and num_stages is None:
        raise ConfigError(f"--num-stages must be given beside a profile, got none with {run.source}")
    pipeline = {"partition": "uniform", "plan": None, "schedule": "1f1b"}
    base = present_plan(run, num_stages, limits=fixed, micro_batches=micro_batches, pipeline=pipeline)
    task = PartitionTask(run.profile, base, median_packs(run, base))
    wanted = get_args(Method) if compare else (*(BASELINES if plot else ()), method)
    found = {name: task.search(name) for name in dict.fromkeys(wanted)}
    report = PartitionReport(task, method, found)
    if out is not None:
        task.plan_of(report.chosen, method).save(out)
    if plot is not None:
        report.draw(plot)
    written = [str(path) for path in (out, plot) if path is not None]
    if as_json:
        show_json(report.to_record() | {"written": written})
    else:
        show(*report.parts(compare=compare), *(f"written: {path}" for path in written))


@dataclass(frozen=True)
class PartitionTask:
    """A step whose best partition is sought."""

    profile: ModelProfile
    base: Plan
    """All but the partition, with a cluster."""
    packing: Packing
    """The step's packs."""

    def search(self, method: str) -> PartitionSearch:
        """The best partitions by a method."""
        layout = self.base.layout
        return search_partition(
            self.profile, self.packing.steps[0], layout.num_stages, self.base.links, method=method,
            zero_stage=layout.zero_stage, recompute=self.base.recompute, top=SHOWN,
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


@dataclass(frozen=True)
class PartitionReport:
    """All that `omnibal partition` says."""

    task: PartitionTask
    method: str
    """The one whose partition is taken."""
    found: Mapping[str, PartitionSearch]
    """Results of every method that was asked for."""

    @property
    def chosen(self) -> Partition:
        """The best candidate of the method."""
        return self.found[self.method].best.partition

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
        }

    def parts(self, *, compare: bool) -> list[str | Table]:
        """Tables and the bound for people."""
        search = self.found[self.method]
        bound, best = search.lower_bound_seconds, self.task.figures(self.chosen)
        parts: list[str | Table] = [title_of(self.task.profile, self.task.base, self.task.packing)]
        if compare:
            figures = {name: self.task.figures(result.best.partition) for name, result in self.found.items()}
            parts.append(methods_table(figures, bound))
        candidates = [(entry.partition.boundaries, entry.step_seconds) for entry in search.candidates]
        parts += [f"best candidates of {self.method}", candidates_table(candidates, bound)]
        return [
            *parts,
            f"chosen: {cut_of(self.chosen.boundaries)}, bubble ratio {best.bubble_ratio:.1%}",
            stage_table(best.stages),
            f"predicted step {1e3 * best.step_seconds:,.1f} ms; no partition is below {1e3 * bound:,.1f} ms: "
            f"at most {1 - bound / best.step_seconds:.2%} are to be gained",
        ]
