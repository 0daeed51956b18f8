"""omnibal plan: pack limits, partition and recompute together, for a memory budget."""

import json
from pathlib import Path
from typing import Annotated, Literal

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
from omnibal.cli.step_packs import LengthsOption
from omnibal.cli.step_task import (
    OVERHEAD_GIB,
    LatencyOption,
    LauncherOption,
    ModeOption,
    OverheadOption,
    ReduceBandwidthOption,
    ZeroStageOption,
    links_of,
)
from omnibal.cluster import Layout
from omnibal.data.policies import Method


def plan(
    profile: ProfileArgument = None,
    out: Annotated[Path, typer.Option(help="The plan to write.")] = Path("plan.json"),
    lengths: LengthsOption = None,
    global_batch: Annotated[
        int, typer.Option(help="Samples per optimizer step; packs change, this does not.", min=1)
    ] = 128,
    num_stages: Annotated[
        int | None, typer.Option(help="Pipeline stages; left out, the best divisor of the devices.", min=1)
    ] = None,
    num_replicas: Annotated[int | None, typer.Option(help="Data-parallel ranks, with --num-stages.", min=1)] = None,
    num_devices: Annotated[int | None, typer.Option(help="All devices, in place of --num-replicas.", min=1)] = None,
    budget: Annotated[
        str | None, typer.Option(help="GiB of a device, or of each stage's as 80,80,40; what the device has.")
    ] = None,
    head_room: Annotated[float, typer.Option(help="Share of the budget that stays free.", min=0, max=0.99)] = 0.05,
    overhead: OverheadOption = OVERHEAD_GIB,
    zero_stage: ZeroStageOption = 1,
    float32_gradients: Annotated[
        bool | None,
        typer.Option(
            "--float32-gradients/--no-float32-gradients",
            help='Whether 16-bit gradients are summed in float32 ("grad_accum_dtype"); with --zero-stage 1 they are.',
            show_default=False,
        ),
    ] = None,
    vision_units: Annotated[int | None, typer.Option(help="Fix the limits, with --llm-tokens.", min=0)] = None,
    llm_tokens: Annotated[int | None, typer.Option(help="Fix the limits, with --vision-units.", min=1)] = None,
    method: Annotated[Method, typer.Option(help="How packs are made and arranged.")] = "balanced",
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "bfloat16",
    tensor_parallel: TensorParallelOption = 1,
    frozen: FrozenOption = None,
    bandwidth: BandwidthOption = None,
    reduce_bandwidth: ReduceBandwidthOption = None,
    latency: LatencyOption = 0.0,
    mode: ModeOption = "rendezvous",
    schedule: Annotated[
        Literal["1f1b", "zero-bubble", "zero-bubble-lean", "auto"],
        typer.Option(
            help="DeepSpeed's own; weight gradients where stages would wait, or at once; the fastest that fits."
        ),
    ] = "1f1b",
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of real packs that plans are simulated on; by default as many as hold 1024 packs.", min=1
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which samples are looked at.", min=0)] = 0,
    trials: Annotated[
        int, typer.Option(help="Run so many of the best plans on the real engine and keep the fastest.", min=0)
    ] = 0,
    four_steps: Annotated[
        bool, typer.Option("--four-steps", help="Let the paper's trials find what recomputes, on the real engine.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="The ds_config to try plans with.")] = None,
    launcher: LauncherOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every stage, and the plans that were weighed.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Folder to draw memory and timeline into.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan and what it was weighed against as JSON.")
    ] = False,
) -> None:
    """Plan data, model and memory together: what fits and takes the least time.

    Weighs pack limits (so how many micro-batches a step has), where to cut
    the model, which layers recompute, and with --schedule auto the schedule,
    by simulating steps of real packs.
    A ds_config with "pipeline": {"plan": "plan.json"} trains that way.

    Example: omnibal plan profile.json --lengths runs/lengths
    --num-stages 4 --num-replicas 2 --global-batch 128 --explain

    Example: omnibal plan --model models/InternVL3-14B-hf --device a100
    --lengths runs/lengths --num-devices 16 --budget 40 --plot runs/plots

    Example, tried on the machine itself: omnibal plan profile.json --lengths
    runs/lengths --num-stages 2 --num-replicas 1 --trials 3 --config
    ds_config.json
    """
    from omnibal.cli.outputs import check_file, check_folder
    from omnibal.cli.planning import (
        PlanReport,
        check_trials,
        cluster_of,
        count_devices,
        fixed_limits,
        lengths_of,
        try_on_engine,
    )
    from omnibal.planner import PlanRequest, make_plan

    costs = read_costs(
        profile, model=model, device=device, dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen or ()
    )
    check_file("--out", out)
    check_folder("--plot", plot)
    check_trials(
        costs,
        trials=trials,
        four_steps=four_steps,
        config=config,
        zero_stage=zero_stage,
        float32_gradients=float32_gradients,
    )
    ranks = count_devices(num_stages, num_replicas, num_devices, costs)
    cluster = cluster_of(
        costs, budget, links_of(costs, bandwidth=bandwidth, reduce_bandwidth=reduce_bandwidth, latency=latency),
        layout=Layout(num_stages or 1, ranks // (num_stages or 1), num_tensor=costs.tensor_parallel),
        overhead_bytes=int(overhead * 2**30),
    )  # fmt: skip
    request = PlanRequest(
        cluster=cluster,
        num_stages=num_stages,
        global_batch=global_batch,
        head_room=head_room,
        zero_stage=zero_stage,
        accumulate_float32=float32_gradients,
        limits=fixed_limits(vision_units, llm_tokens),
        method=method,
        mode=mode,
        schedule=schedule,
        steps=steps,
        seed=seed,
    )
    with Console(stderr=True).status("reading lengths") as status:
        result = make_plan(costs, lengths_of(lengths), request, report=status.update)
    result, kept, tried = try_on_engine(result, trials=trials, four_steps=four_steps, config=config, launcher=launcher)
    kept.save(out)
    report = PlanReport(result, kept, out, plot, tried)
    report.draw()
    if as_json:
        typer.echo(json.dumps(report.to_record(), indent=2))
    else:
        report.print(Console(), explain=explain)
