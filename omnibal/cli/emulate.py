"""omnibal emulate: a plan on DeepSpeed's real engine, with as many local processes as devices that only sleep."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omnibal.cli.costs import (
    BandwidthOption,
    DeviceOption,
    DtypeOption,
    FrozenOption,
    ModelOption,
    TensorParallelOption,
    read_costs,
)
from omnibal.cli.step_packs import LengthsOption, ReplicasOption
from omnibal.cli.step_task import (
    OVERHEAD_GIB,
    LatencyOption,
    OverheadOption,
    ReduceBandwidthOption,
    ZeroStageOption,
    links_of,
)
from omnibal.data.policies import Method


def emulate(
    plan: Annotated[Path, typer.Argument(help="What `omnibal plan` or `omnibal partition` wrote.", show_default=False)],
    profile: Annotated[
        Path | None,
        typer.Argument(help="What `omnibal profile` wrote; or --model and --device.", show_default=False),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "bfloat16",
    tensor_parallel: TensorParallelOption = 1,
    frozen: FrozenOption = None,
    lengths: LengthsOption = None,
    method: Annotated[Method, typer.Option(help="How the sampler makes and arranges packs.")] = "balanced",
    seed: Annotated[int, typer.Option(help="Of the sampler.", min=0)] = 0,
    num_replicas: ReplicasOption = 1,
    steps: Annotated[int, typer.Option(help="Steps to run behind one to warm up, spread over an epoch.", min=1)] = 3,
    budget: Annotated[
        str | None, typer.Option(help="GiB of a device, or of each stage's as 80,80,40; what the device has.")
    ] = None,
    overhead: OverheadOption = OVERHEAD_GIB,
    time_scale: Annotated[
        float | None,
        typer.Option(
            help="Seconds slept for each second of the cluster; left out, as few as are exact.", min=0, max=1000
        ),
    ] = None,
    bandwidth: BandwidthOption = None,
    reduce_bandwidth: ReduceBandwidthOption = None,
    latency: LatencyOption = 0.0,
    zero_stage: ZeroStageOption = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline beside the predicted one, a PNG.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline for chrome://tracing or ui.perfetto.dev, JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Run a plan on an emulated cluster: no accelerator is needed.

    DeepSpeed's real engine, schedule and transfers run on this machine, one
    process per device; layers sleep as long as they are predicted to take for
    each pack of the real sampler, and memory is accounted against the budget.
    Shows what the cluster would do, beside the simulator's prediction.

    Example: omnibal emulate plan.json profile.json --lengths runs/lengths
    --num-replicas 4 --steps 5 --plot emulated.png
    """
    from omnibal.cli.emulation import EmulationReport, emulation_task
    from omnibal.cli.outputs import check_file, check_picture

    costs = read_costs(
        profile, model=model, device=device, dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen or ()
    )
    links = links_of(costs, bandwidth=bandwidth, reduce_bandwidth=reduce_bandwidth, latency=latency)
    task = emulation_task(
        costs, plan, links, lengths=lengths, method=method, seed=seed, num_replicas=num_replicas, steps=steps,
        zero_stage=zero_stage, budget=budget, overhead_bytes=int(overhead * 2**30), time_scale=time_scale,
    )  # fmt: skip
    check_file("--trace", trace)
    check_picture("--plot", plot)
    doing = f"{task.num_processes} processes start, emulate a step to warm up and {len(task.steps)} to count"
    with Console(stderr=True).status(f"{doing}: {task.wall_seconds:.0f} s and the start"):
        report = EmulationReport.run(task)
    written = report.write(trace, plot)
    if as_json:
        typer.echo(json.dumps(report.to_record() | {"written": written}, indent=2))
    else:
        report.print(Console(), written)
