"""omnibal simulate and partition: what each stage of a pipeline does when, and where to cut a model into stages."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from omnibal.cli.opening import open_workspace
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LengthsOption,
    LimitsOption,
    PictureOption,
    PresentOption,
    ProfileOption,
    StagesOption,
    answer,
    check_picture,
    read_limits,
)
from omnibal.cli.planning import median_packs, plan_of, present_plan
from omnibal.errors import ConfigError
from omnibal.families.base import vision_unit_of
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import ScheduleName
from omnibal.pipeline.search import METHODS, PartitionSearch, search_partition
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import (
    candidates_table,
    cut_of,
    methods_table,
    plot_timeline,
    stage_table,
    step_figures,
)
from omnibal.report.style import Row, milliseconds

MOST_PANELS: Final = 3
SHOWN: Final = 5  # candidates of a search


def simulate(
    source: Annotated[Path, typer.Argument(help="A ds_config or a plan.")],
    present: PresentOption = False,
    schedule: Annotated[ScheduleName | None, typer.Option(help="Another schedule than the plan's.")] = None,
    profile: ProfileOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    plot: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a training step, stage by stage: the median one of some steps of real packs.

    How long it takes, how long each stage is idle (the bubble), how many
    micro-batches each holds at once. Under 1f1b transfers block both sides, in
    the order in which DeepSpeed sends and receives; under zero-bubble they run
    beside the computations. For other boundaries or limits edit the plan.

    Example: omnibal simulate ds_configs/mine.json --plot timeline.png

    Example: omnibal simulate runs/mine/plan.json --schedule 1f1b
    """
    check_picture("--plot", plot)
    workspace = open_workspace(source, kinds=("ds_config", "plan"), profile=profile, lengths=lengths, cluster=cluster)
    plan = present_plan(workspace) if present else plan_of(workspace)
    costs = workspace.profile
    if schedule is not None and schedule != plan.schedule:
        plan = replace(plan, schedule=schedule, predicted=None)
    packing = median_packs(workspace, plan)
    simulated = plan.simulate(costs, packing.steps[0])
    figures = step_figures(costs, plan, simulated, packing.largest)
    written = [] if plot is None else [str(plot)]
    if plot is not None:
        plot_timeline(_panels(simulated), plot)
    answer(
        _record_of(costs, plan, packing) | dict(figures) | {"written": written},
        _title_of(costs, plan, packing),
        stage_table(figures["stages"]),
        _summary(figures),
        *(f"written: {path}" for path in written),
        as_json=as_json,
    )


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
    workspace = open_workspace(source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster)
    if workspace.files is None and num_stages is None:
        raise ConfigError(f"--num-stages must be given beside a profile, got none with {source}")
    # Any valid cut serves: the base plan only fixes limits, levels and layout, and the search replaces the partition.
    pipeline = {"partition": "uniform", "plan": None, "schedule": "1f1b"}
    base = present_plan(workspace, num_stages, limits=fixed, pipeline=pipeline)
    if base.layout.encoder is not None:
        raise ConfigError(
            f"layout must be one pipeline to search its partition, got {base.layout}; `omnibal plan` cuts both parts"
        )
    costs, packing = workspace.profile, median_packs(workspace, base)

    def figures_of(cut: Partition) -> Row:
        plan = replace(base, partition=cut, predicted=None)
        step = plan.simulate(costs, packing.steps[0])
        return step_figures(costs, plan, step, packing.largest)

    found = {
        name: search_partition(
            costs, packing.steps[0], base.num_stages, base.links, method=name,
            zero_stage=base.layout.zero_stage, recompute=base.recompute, top=SHOWN,
        )
        for name in (METHODS if compare else ("search",))
    }  # fmt: skip
    figures = {name: figures_of(result.best.partition) for name, result in found.items()}
    best, bound = figures["search"], found["search"].lower_bound_seconds
    record = _record_of(costs, base, packing) | {
        "lower_bound_seconds": bound,
        "chosen": best["boundaries"],
        "methods": {name: _found_record(found[name], entry) for name, entry in figures.items()},
    }
    answer(
        record,
        _title_of(costs, base, packing),
        *([methods_table(figures, bound)] if compare else []),
        "best candidates",
        candidates_table(record["methods"]["search"]["candidates"], bound),
        f"chosen: {cut_of(best['boundaries'])}, bubble ratio {best['bubble_ratio']:.1%}",
        stage_table(best["stages"]),
        f"predicted step {milliseconds(best['step_seconds'])} ms; no partition is below {milliseconds(bound)} ms: "
        f"at most {max(1 - bound / best['step_seconds'], 0.0):.2%} are to be gained",
        as_json=as_json,
    )


def _found_record(found: PartitionSearch, best: Row) -> dict[str, Any]:
    """What a method found, as JSON values."""
    candidates = [
        {"boundaries": entry.partition.boundaries, "step_seconds": entry.step_seconds} for entry in found.candidates
    ]
    return {"gap": found.gap, **best, "candidates": candidates}


def _record_of(profile: ModelProfile, plan: Plan, packing: Packing) -> dict[str, Any]:
    """What a step is simulated of, as JSON values."""
    limits = plan.limits
    return {
        "profile": {"hash": profile.content_hash, "device": profile.devices, "dtype": profile.dtype},
        "cluster": str(plan.known_cluster),
        "layout": plan.to_record()["layout"],
        "links": asdict(plan.links),
        "schedule": plan.schedule,
        "limits": {"vision_units": limits.vision_units, "llm_tokens": limits.llm_tokens},
        "micro_batches": plan.micro_batches,
        "step": packing.numbers[0] if packing.numbers else None,
    }


def _title_of(profile: ModelProfile, plan: Plan, packing: Packing) -> str:
    """What a step is simulated of, in two lines."""
    limits = plan.limits
    packs = f"step {packing.numbers[0]} of an epoch, packs of at most" if packing.numbers else "equal packs of"
    return (
        f"{len(profile.layers)} layers on {plan.known_cluster} ({profile.dtype}): {plan.layout}, {plan.schedule}\n"
        f"{plan.micro_batches} micro-batches; {packs} {limits.vision_units:,} {vision_unit_of(profile.layers)} and "
        f"{limits.llm_tokens:,} LLM tokens"
    )


def _panels(step: StepSimulation) -> Mapping[str, Simulation]:
    """Every replica where they are few, else the fastest and the slowest one."""
    replicas = step.replicas
    if len(replicas) == 1:
        return {"": replicas[0]}
    if len(replicas) <= MOST_PANELS:
        return {f"replica {number}": replica for number, replica in enumerate(replicas)}
    order = sorted(range(len(replicas)), key=lambda number: replicas[number].makespan_seconds)
    return {
        f"replica {order[0]}, the fastest": replicas[order[0]],
        f"replica {order[-1]}, the slowest": replicas[order[-1]],
    }


def _summary(figures: Row) -> str:
    step, pipeline = figures["step_seconds"], figures["pipeline_seconds"]
    return (
        f"step {milliseconds(step)} ms: pipeline {milliseconds(pipeline)} ms (bubble ratio "
        f"{figures['bubble_ratio']:.1%}), gradients and optimizer {milliseconds(step - pipeline)} ms"
    )
