"""omnibal partition: where to cut a model into pipeline stages."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from omnibal.cli.opening import open_run
from omnibal.cli.options import ClusterOption, JsonOption, LengthsOption, LimitsOption, StagesOption, read_limits
from omnibal.cli.output import answer
from omnibal.cli.present import median_packs, present_plan
from omnibal.cli.simulate import record_of, title_of
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import METHODS, PartitionSearch, search_partition
from omnibal.report.stages import candidates_table, cut_of, methods_table, stage_table, step_figures
from omnibal.report.style import Row, milliseconds

SHOWN: Final = 5
"""Candidates."""


def partition(
    source: Annotated[Path, typer.Argument(help="A ds_config; or, without one, a profile.")],
    num_stages: StagesOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    limits: LimitsOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show DeepSpeed's methods, the paper's and others beside it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find where to cut a model into pipeline stages.

    Searches the partition with the shortest 1F1B step for limits and recompute
    levels as they are, and says how far any other could be below it at most.
    With --compare: uniform and parameters are DeepSpeed's methods, paper is
    OmniBal's; search is never worse than any of them. omnibal plan chooses
    limits, partition, recomputation and schedule together.

    Example: omnibal partition ds_configs/mine.json --compare
    """
    fixed = read_limits(limits)
    run = open_run(source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster)
    if not run.has_config and num_stages is None:
        raise ConfigError(f"--num-stages must be given beside a profile, got none with {run.source}")
    pipeline = {"partition": "uniform", "plan": None, "schedule": "1f1b"}
    base = present_plan(run, num_stages, limits=fixed, pipeline=pipeline)
    packing = median_packs(run, base)

    def figures_of(cut: Partition) -> Row:
        plan = replace(base, partition=cut, predicted=None)
        step = plan.simulate(run.profile, packing.steps[0])
        return step_figures(run.profile, plan, step, packing.largest)

    found = {
        name: search_partition(
            run.profile, packing.steps[0], base.num_stages, base.links, method=name,
            zero_stage=base.layout.zero_stage, recompute=base.recompute, top=SHOWN,
        )
        for name in (METHODS if compare else ("search",))
    }  # fmt: skip
    figures = {name: figures_of(result.best.partition) for name, result in found.items()}
    best, bound = figures["search"], found["search"].lower_bound_seconds
    record = record_of(run.profile, base, packing) | {
        "lower_bound_seconds": bound,
        "chosen": best["boundaries"],
        "methods": {name: _record(found[name], entry) for name, entry in figures.items()},
    }
    answer(
        record,
        title_of(run.profile, base, packing),
        *([methods_table(figures, bound)] if compare else []),
        "best candidates",
        candidates_table(record["methods"]["search"]["candidates"], bound),
        f"chosen: {cut_of(best['boundaries'])}, bubble ratio {best['bubble_ratio']:.1%}",
        stage_table(best["stages"]),
        f"predicted step {milliseconds(best['step_seconds'])} ms; no partition is below {milliseconds(bound)} ms: "
        f"at most {max(1 - bound / best['step_seconds'], 0.0):.2%} are to be gained",
        as_json=as_json,
    )


def _record(found: PartitionSearch, best: Row) -> dict[str, Any]:
    """What a method found, as JSON values."""
    candidates = [
        {"boundaries": entry.partition.boundaries, "step_seconds": entry.step_seconds} for entry in found.candidates
    ]
    return {"gap": found.gap, **best, "candidates": candidates}
