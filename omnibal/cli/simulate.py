"""omnibal simulate: when each stage of a pipeline runs what, and how long it waits."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from omnibal.cli.costs import (
    BandwidthOption,
    DeviceOption,
    DtypeOption,
    FrozenOption,
    ModelOption,
    ProfileArgument,
    TensorParallelOption,
    read_costs,
)
from omnibal.cli.step_packs import (
    LengthsOption,
    LlmTokensOption,
    MicroBatchesOption,
    ReplicasOption,
    StepOption,
    VisionUnitsOption,
)
from omnibal.cli.step_task import (
    MICRO_BATCHES_PER_STAGE,
    LatencyOption,
    Level,
    ModeOption,
    RecomputeOption,
    ReduceBandwidthOption,
    ScheduleName,
    ScheduleOption,
    ZeroStageOption,
    links_of,
)
from omnibal.errors import ConfigError

if TYPE_CHECKING:
    from omnibal.data.limits import PackLimits
    from omnibal.pipeline.partition import Partition
    from omnibal.pipeline.simulate import Simulation, StepSimulation
    from omnibal.report.stages import PartitionFigures

MOST_PANELS: Final = 3


def simulate(
    profile: ProfileArgument = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan.json: partition, recomputation, micro-batches, most in a pack.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Or the boundaries: 0,22,45,69,98.")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "bfloat16",
    tensor_parallel: TensorParallelOption = 1,
    frozen: FrozenOption = None,
    lengths: LengthsOption = None,
    step: StepOption = None,
    vision_units: VisionUnitsOption = None,
    llm_tokens: LlmTokensOption = None,
    num_replicas: ReplicasOption = 1,
    micro_batches: MicroBatchesOption = None,
    bandwidth: BandwidthOption = None,
    reduce_bandwidth: ReduceBandwidthOption = None,
    latency: LatencyOption = 0.0,
    mode: ModeOption = "rendezvous",
    zero_stage: ZeroStageOption = 1,
    recompute: RecomputeOption = None,
    schedule: ScheduleOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline for chrome://tracing or ui.perfetto.dev, JSON.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline, a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Simulate a training step, stage by stage.

    How long it takes, how long each stage is idle (the bubble), how many
    micro-batches each holds at once. Under 1f1b transfers block both sides, in
    the order in which DeepSpeed sends and receives; under zero-bubble they run
    beside the computations.

    Example: omnibal simulate profile.json --plan plan.json --trace trace.json
    --plot timeline.png

    Example: omnibal simulate --model models/InternVL3-14B-hf --device a100
    --partition 0,13,26,40,53,76 --lengths runs/lengths --num-replicas 4
    """
    from omnibal.cli.outputs import check_file, check_picture
    from omnibal.cli.steps import StepTask, every_layer, step_packs
    from omnibal.report.stages import stage_table

    costs = read_costs(
        profile, model=model, device=device, dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen or ()
    )
    check_file("--trace", trace)
    check_picture("--plot", plot)
    cut = _read_cut(plan, partition)
    limits = cut.limits
    packs = step_packs(
        costs, lengths, step=step, num_replicas=num_replicas,
        vision_units=limits.vision_units if limits and vision_units is None else vision_units,
        llm_tokens=limits.llm_tokens if limits and llm_tokens is None else llm_tokens,
        micro_batches=micro_batches or cut.micro_batches,
    )  # fmt: skip
    links = links_of(costs, bandwidth=bandwidth, reduce_bandwidth=reduce_bandwidth, latency=latency)
    levels = every_layer(recompute or "none", len(costs.layers))
    if recompute is None and cut.recompute is not None:
        levels = cut.recompute
    task = StepTask(costs, packs, links, zero_stage, levels, mode, schedule or cut.schedule)
    written = _write(task.simulate(cut.partition), trace, plot)
    figures = task.figures(cut.partition)
    if as_json:
        typer.echo(json.dumps(task.to_record() | figures.to_record() | {"written": written}, indent=2))
        return
    console = Console()
    console.print(str(task), highlight=False, markup=False)
    console.print(stage_table(figures.stages))
    console.print(_summary(figures), highlight=False, markup=False)
    for path in written:
        console.print(f"written: {path}", highlight=False, markup=False)


@dataclass(frozen=True)
class _Cut:
    """What a plan or a partition says."""

    partition: "Partition"
    recompute: tuple[Level, ...] | None
    micro_batches: int
    limits: "PackLimits | None"
    schedule: ScheduleName = "1f1b"


def _read_cut(plan: Path | None, partition: str | None) -> _Cut:
    from omnibal.pipeline.partition import Partition
    from omnibal.plan import Plan

    if (plan is None) == (partition is None):
        raise ConfigError(f"a partition must come from --plan or --partition, got {'both' if plan else 'neither'}")
    if plan is not None:
        loaded = Plan.load(plan)
        return _Cut(loaded.partition, loaded.recompute, loaded.micro_batches, loaded.limits, loaded.schedule)
    assert partition is not None
    words = partition.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--partition must be layer numbers such as 0,13,26, got {partition!r}")
    cut = Partition([int(word) for word in words])
    return _Cut(cut, None, MICRO_BATCHES_PER_STAGE * cut.num_stages, None)


def _write(step: "StepSimulation", trace: Path | None, plot: Path | None) -> list[str]:
    """Write the timeline as asked; the paths."""
    from omnibal.pipeline.simulate import chrome_trace
    from omnibal.report.timeline import plot_timeline

    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_text(json.dumps(chrome_trace(step.replicas)))
    if plot is not None:
        plot_timeline(_panels(step), plot)
    return [str(path) for path in (trace, plot) if path is not None]


def _panels(step: "StepSimulation") -> dict[str, "Simulation"]:
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


def _summary(figures: "PartitionFigures") -> str:
    tail = figures.step_seconds - figures.pipeline_seconds
    return (
        f"step {1e3 * figures.step_seconds:,.1f} ms: pipeline {1e3 * figures.pipeline_seconds:,.1f} ms "
        f"(bubble ratio {figures.bubble_ratio:.1%}), gradients and optimizer {1e3 * tail:,.1f} ms"
    )
