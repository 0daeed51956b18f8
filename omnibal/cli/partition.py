"""omnibal partition: where to cut a model into pipeline stages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

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
    check_run,
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
    LauncherOption,
    ModeOption,
    RecomputeOption,
    ReduceBandwidthOption,
    ZeroStageOption,
    links_of,
)
from omnibal.errors import ConfigError

if TYPE_CHECKING:
    from omnibal.profile.records import ModelProfile

Method = Literal["uniform", "parameters", "paper", "slowest_stage", "model", "bound", "search"]
BASELINES: Final = ("uniform", "parameters", "paper")
"""What a picture sets the partition against."""


def partition(
    num_stages: Annotated[int, typer.Option(help="Pipeline stages.", min=1, show_default=False)],
    profile: ProfileArgument = None,
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
    method: Annotated[Method, typer.Option(help="How the partition is found.")] = "search",
    compare: Annotated[bool, typer.Option("--compare", help="Show all methods side by side.")] = False,
    top: Annotated[int, typer.Option(help="Candidates to show.", min=1)] = 5,
    trials: Annotated[
        int, typer.Option(help="Run so many candidates on the real engine and keep the fastest.", min=0)
    ] = 0,
    config: Annotated[
        Path | None, typer.Option(help="The ds_config to try them with; says the micro-batches too.")
    ] = None,
    launcher: LauncherOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a plan.json that a ds_config can name in omnibal.pipeline.plan.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw what stages do under each method, a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find where to cut a model into pipeline stages.

    Searches the partition with the shortest step, and says how far any other
    could be below it at most. uniform and parameters are DeepSpeed's methods,
    paper is OmniBal's; search is never worse than any of them.

    Example: omnibal partition profile.json --num-stages 4 --lengths
    runs/lengths --num-replicas 4 --micro-batches 16 --compare

    Example, tried on the machine itself: omnibal partition profile.json
    --num-stages 2 --trials 5 --config ds_config.json --out plan.json
    """
    from omnibal.cli.outputs import check_file, check_picture
    from omnibal.cli.partition_plan import try_candidates
    from omnibal.cli.partition_report import PartitionReport
    from omnibal.cli.steps import StepTask, every_layer, step_packs

    costs = read_costs(
        profile, model=model, device=device, dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen or ()
    )
    check_file("--out", out)
    check_picture("--plot", plot)
    run = _read_run(config, trials, costs)
    packs = step_packs(
        costs, lengths, step=step, vision_units=vision_units, llm_tokens=llm_tokens,
        num_replicas=num_replicas, micro_batches=_micro_batches(micro_batches, run, num_stages),
    )  # fmt: skip
    links = links_of(costs, bandwidth=bandwidth, reduce_bandwidth=reduce_bandwidth, latency=latency)
    task = StepTask(costs, packs, links, zero_stage, every_layer(recompute or "none", len(costs.layers)), mode)
    wanted = get_args(Method) if compare else (*(BASELINES if plot else ()), method)
    found = {name: task.search(num_stages, name, max(top, trials)) for name in dict.fromkeys(wanted)}
    tried = try_candidates(task, found[method].candidates[:trials], method, run, launcher) if run and trials else []
    report = PartitionReport(task, method, found, top, tuple(tried))
    report = replace(report, written=report.write(out, plot))
    if as_json:
        typer.echo(json.dumps(report.to_record(), indent=2))
    else:
        report.print(Console(), compare=compare)


def _read_run(config: Path | None, trials: int, costs: "ModelProfile") -> dict[str, Any] | None:
    """The content of the ds_config, which the costs must fit."""
    if config is None:
        if trials:
            raise ConfigError(f"--config must name a ds_config for --trials {trials}, got none")
        return None
    from omnibal.config import read_config

    deepspeed_config, section = read_config(config)
    check_run(costs, deepspeed_config, section.model, is_tried=trials > 0)
    return deepspeed_config | {"omnibal": section.model_dump()}


def _micro_batches(given: int | None, run: dict[str, Any] | None, num_stages: int) -> int:
    if run is None:
        return given or MICRO_BATCHES_PER_STAGE * num_stages
    from omnibal.config import micro_batches_of

    configured = micro_batches_of(run)
    if given not in (None, configured):
        raise ConfigError(f"--micro-batches must be {configured} as the ds_config says, got {given}; leave it out")
    return configured
