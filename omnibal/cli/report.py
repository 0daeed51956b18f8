"""omnibal report: one HTML page about a plan, a run, or both."""

import json
from pathlib import Path
from typing import Annotated

import typer

from omnibal.cli.costs import (
    BandwidthOption,
    DeviceOption,
    DtypeOption,
    FrozenOption,
    ModelOption,
    ProfileArgument,
    TensorParallelOption,
)
from omnibal.cli.step_packs import LengthsOption, ReplicasOption
from omnibal.cli.step_task import OVERHEAD_GIB, LatencyOption, OverheadOption, ReduceBandwidthOption, ZeroStageOption


def report(
    profile: ProfileArgument = None,
    plan: Annotated[Path | None, typer.Option(help="A plan.json; with a profile and --lengths.")] = None,
    run: Annotated[Path | None, typer.Option(help="A run's folder, with its metrics.jsonl.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its heading.")] = "Balanced training",
    lengths: LengthsOption = None,
    batch_size: Annotated[
        int, typer.Option(help="Samples of a micro-batch as you batch today: drawn at random, padded.", min=1)
    ] = 4,
    num_replicas: ReplicasOption = 1,
    steps: Annotated[int, typer.Option(help="Steps of real packs to simulate, spread over an epoch.", min=1)] = 64,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "bfloat16",
    tensor_parallel: TensorParallelOption = 1,
    frozen: FrozenOption = None,
    budget: Annotated[
        str | None, typer.Option(help="GiB of a device, or of each stage's as 80,80,40; what the device has.")
    ] = None,
    overhead: OverheadOption = OVERHEAD_GIB,
    bandwidth: BandwidthOption = None,
    reduce_bandwidth: ReduceBandwidthOption = None,
    latency: LatencyOption = 0.0,
    zero_stage: ZeroStageOption = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gain as JSON.")] = False,
) -> None:
    """Write one page that shows what a plan changes and what a run did.

    It opens with how uneven your data makes the work as you batch today, and
    goes on with data, partition, memory, timeline, predicted gain, and the
    figures of a run. Pictures are in the file: send it to anyone.

    Example: omnibal report profile.json --plan plan.json --lengths
    runs/lengths --num-replicas 4 --out report.html

    Example: omnibal report --run runs/quickstart
    """
    from omnibal.cli.costs import read_costs
    from omnibal.cli.outputs import check_file
    from omnibal.cli.reporting import plan_part, read_run
    from omnibal.cli.step_task import links_of
    from omnibal.errors import ConfigError
    from omnibal.report.page import write_page

    if plan is None and run is None:
        raise ConfigError("a report must be about a --plan, a --run, or both, got neither")
    if plan is None and (profile or model or lengths):
        raise ConfigError("--plan must be given beside costs or --lengths, got none: a --run alone needs neither")
    check_file("--out", out)
    part = None
    if plan is not None:
        costs = read_costs(
            profile, model=model, device=device, dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen or ()
        )
        links = links_of(costs, bandwidth=bandwidth, reduce_bandwidth=reduce_bandwidth, latency=latency)
        part = plan_part(
            costs, plan, links, lengths=lengths, num_replicas=num_replicas, batch_size=batch_size, steps=steps,
            zero_stage=zero_stage, budget=budget, overhead_bytes=int(overhead * 2**30),
        )  # fmt: skip
    write_page(out, title, plan=part, run=None if run is None else read_run(run))
    if as_json:
        variants = [] if part is None else part.variants
        rates = {variant.name: variant.samples_per_second for variant in variants}
        typer.echo(json.dumps({"written": str(out), "samples_per_second": rates}, indent=2))
    else:
        typer.echo(f"written: {out}")
