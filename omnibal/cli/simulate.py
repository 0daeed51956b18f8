"""omnibal simulate: when each stage of a pipeline runs what, and how long it waits."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from omnibal.cli.files import check_picture
from omnibal.cli.opening import open_run
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LengthsOption,
    LimitsOption,
    PictureOption,
    ProfileOption,
    read_limits,
)
from omnibal.cli.output import answer
from omnibal.cli.present import median_packs, present_plan
from omnibal.cli.run import Run
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import ScheduleName
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import PartitionFigures, stage_table
from omnibal.report.style import milliseconds
from omnibal.report.timeline import plot_timeline

MOST_PANELS: Final = 3


def simulate(
    source: Annotated[
        Path, typer.Argument(help="A ds_config or a plan; or a profile, with --partition.", show_default=False)
    ],
    present: Annotated[
        bool, typer.Option("--present", help="What the ds_config spells out, and not the plan made for it.")
    ] = False,
    partition: Annotated[str | None, typer.Option(help="Other boundaries: 0,22,45,69,98.", show_default=False)] = None,
    schedule: Annotated[
        ScheduleName | None, typer.Option(help="What stages run in which order, if not as planned.", show_default=False)
    ] = None,
    limits: LimitsOption = None,
    profile: ProfileOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    step: Annotated[
        int | None,
        typer.Option(help="Which step of the epoch; the median of some.", min=0, show_default=False),
    ] = None,
    plot: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a training step, stage by stage.

    How long it takes, how long each stage is idle (the bubble), how many
    micro-batches each holds at once. Under 1f1b transfers block both sides, in
    the order in which DeepSpeed sends and receives; under zero-bubble they run
    beside the computations.

    Example: omnibal simulate ds_configs/mine.json --plot timeline.png

    Example: omnibal simulate runs/mine/plan.json --schedule 1f1b
    """
    check_picture("--plot", plot)
    fixed, cut = read_limits(limits), _read_cut(partition)
    run = open_run(source, kinds=("ds_config", "plan", "profile"), profile=profile, lengths=lengths, cluster=cluster)
    plan = _plan_of(run, cut, present=present)
    if fixed:
        plan = replace(plan, limits=PackLimits(*fixed), predicted=None)
    if schedule is not None and schedule != plan.schedule:
        plan = replace(plan, schedule=schedule, predicted=None)
    packing = median_packs(run, plan, number=step)
    simulated = plan.simulate(run.profile, packing.steps[0])
    figures = PartitionFigures.of(run.profile, plan, simulated, packing.largest)
    written = [] if plot is None else [str(plot)]
    if plot is not None:
        plot_timeline(_panels(simulated), plot)
    answer(
        record_of(run.profile, plan, packing) | figures.to_record() | {"written": written},
        title_of(run.profile, plan, packing),
        stage_table(figures.stages),
        _summary(figures),
        *(f"written: {path}" for path in written),
        as_json=as_json,
    )


def _read_cut(partition: str | None) -> tuple[int, ...] | None:
    if partition is None:
        return None
    words = partition.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"--partition must be layer numbers such as 0,13,26, got {partition!r}")
    return tuple(map(int, words))


def _plan_of(run: Run, cut: tuple[int, ...] | None, *, present: bool) -> Plan:
    """The plan to simulate: that of the ds_config, the present one, or one with other boundaries."""
    if cut is None:
        if run.named_plan is None and not run.has_config:
            raise ConfigError(f"--partition must be given beside a profile, got none with {run.source}")
        return present_plan(run) if present else run.plan
    if present:
        raise ConfigError("--partition must be left out beside --present, which has one, got both")
    partition = Partition(cut)
    if partition.num_layers != len(run.profile.layers):
        raise ConfigError(
            f"partition must be of the profile's {len(run.profile.layers)} layers, got one of {partition.num_layers}"
        )
    plan = run.named_plan
    if plan is not None and plan.num_stages == partition.num_stages:
        return replace(run.plan, partition=partition, predicted=None)
    base = present_plan(run, partition.num_stages, pipeline={"partition": list(cut), "plan": None})
    return replace(base, partition=partition)


def record_of(profile: ModelProfile, plan: Plan, packing: Packing) -> dict[str, Any]:
    """What a step is simulated of, as JSON values."""
    limits = plan.limits
    return {
        "profile": {"hash": profile.content_hash, "device": profile.devices, "dtype": profile.dtype},
        "cluster": str(plan.known_cluster),
        "layout": asdict(plan.layout),
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
        f"{plan.micro_batches} micro-batches; {packs} {limits.vision_units:,} vision units and "
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


def _summary(figures: PartitionFigures) -> str:
    tail = figures.step_seconds - figures.pipeline_seconds
    return (
        f"step {milliseconds(figures.step_seconds)} ms: pipeline {milliseconds(figures.pipeline_seconds)} ms "
        f"(bubble ratio {figures.bubble_ratio:.1%}), gradients and optimizer {milliseconds(tail)} ms"
    )
