"""omnibal partition: where to cut a model into pipeline stages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import typer
from rich.table import Table

from omnibal.cli.opening import open_run
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LengthsOption,
    LimitsOption,
    StagesOption,
    read_limits,
)
from omnibal.cli.output import answer
from omnibal.cli.present import median_packs, present_plan
from omnibal.cli.simulate import record_of, title_of
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import PartitionSearch, search_partition
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import PartitionFigures, candidates_table, cut_of, methods_table, stage_table
from omnibal.report.style import milliseconds

Method = Literal["uniform", "parameters", "paper", "slowest_stage", "model", "bound", "search"]
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
    as_json: JsonOption = False,
) -> None:
    """Find where to cut a model into pipeline stages.

    Searches the partition with the shortest 1F1B step for limits and recompute
    levels as they are, and says how far any other could be below it at most.
    uniform and parameters are DeepSpeed's methods, paper is OmniBal's; search
    is never worse than any of them. omnibal plan chooses all of it together.

    Example: omnibal partition ds_configs/mine.json --compare
    """
    fixed = read_limits(limits)
    run = open_run(source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster)
    if not run.has_config and num_stages is None:
        raise ConfigError(f"--num-stages must be given beside a profile, got none with {run.source}")
    pipeline = {"partition": "uniform", "plan": None, "schedule": "1f1b"}
    base = present_plan(run, num_stages, limits=fixed, micro_batches=micro_batches, pipeline=pipeline)
    packing = median_packs(run, base)
    found = {
        name: search_partition(
            run.profile, packing.steps[0], base.num_stages, base.links, method=name,
            zero_stage=base.layout.zero_stage, recompute=base.recompute, top=SHOWN,
        )
        for name in (get_args(Method) if compare else (method,))
    }  # fmt: skip
    report = PartitionReport(run.profile, base, packing, method, found)
    answer(report.to_record(), *report.parts(compare=compare), as_json=as_json)


@dataclass(frozen=True)
class PartitionReport:
    """All that `omnibal partition` says."""

    profile: ModelProfile
    base: Plan
    """All but the partition, with a cluster."""
    packing: Packing
    """The step's packs."""
    method: str
    """The one whose partition is taken."""
    found: Mapping[str, PartitionSearch]
    """Results of every method that was asked for."""

    @property
    def chosen(self) -> Partition:
        """The best candidate of the method."""
        return self.found[self.method].best.partition

    def _figures(self, partition: Partition) -> PartitionFigures:
        """The step under a partition, in figures."""
        plan = replace(self.base, partition=partition, predicted=None)
        step = plan.simulate(self.profile, self.packing.steps[0])
        return PartitionFigures.of(self.profile, plan, step, self.packing.largest)

    def to_record(self) -> dict[str, Any]:
        """The report as JSON values."""
        return record_of(self.profile, self.base, self.packing) | {
            "lower_bound_seconds": self.found[self.method].lower_bound_seconds,
            "chosen": self.chosen.boundaries,
            "method": self.method,
            "methods": {
                name: {
                    "gap": result.gap,
                    **self._figures(result.best.partition).to_record(),
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
        bound, best = search.lower_bound_seconds, self._figures(self.chosen)
        parts: list[str | Table] = [title_of(self.profile, self.base, self.packing)]
        if compare:
            figures = {name: self._figures(result.best.partition) for name, result in self.found.items()}
            parts.append(methods_table(figures, bound))
        candidates = [(entry.partition.boundaries, entry.step_seconds) for entry in search.candidates]
        parts += [f"best candidates of {self.method}", candidates_table(candidates, bound)]
        return [
            *parts,
            f"chosen: {cut_of(self.chosen.boundaries)}, bubble ratio {best.bubble_ratio:.1%}",
            stage_table(best.stages),
            f"predicted step {milliseconds(best.step_seconds)} ms; no partition is below {milliseconds(bound)} ms: "
            f"at most {max(1 - bound / best.step_seconds, 0.0):.2%} are to be gained",
        ]
