"""omnibal simulate: when each stage of a pipeline runs what, and how long it waits."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from omnibal.cli.files import check_picture
from omnibal.cli.opening import open_run
from omnibal.cli.options import ClusterOption, JsonOption, LengthsOption, PictureOption, PresentOption, ProfileOption
from omnibal.cli.output import answer
from omnibal.cli.present import median_packs, present_plan
from omnibal.families.base import vision_unit_of
from omnibal.pipeline.schedule import ScheduleName
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import plot_timeline, stage_table, step_figures
from omnibal.report.style import Row, milliseconds

MOST_PANELS: Final = 3


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
    run = open_run(source, kinds=("ds_config", "plan"), profile=profile, lengths=lengths, cluster=cluster)
    plan = present_plan(run) if present else run.plan
    if schedule is not None and schedule != plan.schedule:
        plan = replace(plan, schedule=schedule, predicted=None)
    packing = median_packs(run, plan)
    simulated = plan.simulate(run.profile, packing.steps[0])
    figures = step_figures(run.profile, plan, simulated, packing.largest)
    written = [] if plot is None else [str(plot)]
    if plot is not None:
        plot_timeline(_panels(simulated), plot)
    answer(
        record_of(run.profile, plan, packing) | dict(figures) | {"written": written},
        title_of(run.profile, plan, packing),
        stage_table(figures["stages"]),
        _summary(figures),
        *(f"written: {path}" for path in written),
        as_json=as_json,
    )


def record_of(profile: ModelProfile, plan: Plan, packing: Packing) -> dict[str, Any]:
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


def title_of(profile: ModelProfile, plan: Plan, packing: Packing) -> str:
    """The same in two lines."""
    limits = plan.limits
    packs = f"step {packing.numbers[0]} of an epoch, packs of at most" if packing.numbers else "equal packs of"
    return (
        f"{len(profile.layers)} layers on {plan.known_cluster} ({profile.dtype}): {plan.layout}, {plan.schedule}\n"
        f"{plan.micro_batches} micro-batches; {packs} {limits.vision_units:,} {vision_unit_of(profile.layers)} and "
        f"{limits.llm_tokens:,} LLM tokens"
    )


def _panels(step: StepSimulation) -> dict[str, Simulation]:
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
