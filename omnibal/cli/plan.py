"""omnibal plan: pack limits, partition and recompute together, for the cluster's memory."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omnibal.cli.files import check_file
from omnibal.cli.opening import open_run
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LauncherOption,
    LengthsOption,
    LimitsOption,
    StagesOption,
    read_limits,
)
from omnibal.cli.output import answer, say
from omnibal.cli.plan_report import Gain, PlanReport, check_alone, enter
from omnibal.cli.present import present_plan, real_packs
from omnibal.cli.run import Run
from omnibal.cli.trials import check_trials, try_best
from omnibal.config import check_batch, layout_of
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, PlanResult, make_plan


def plan(
    source: Annotated[Path, typer.Argument(help="A ds_config; or, without one, a profile.")],
    cluster: ClusterOption = None,
    lengths: LengthsOption = None,
    samples_per_step: Annotated[
        int | None,
        typer.Option(help="Samples in an optimizer step, whatever packs are like; by default as many as now.", min=1),
    ] = None,
    limits: LimitsOption = None,
    num_stages: StagesOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure layers on this machine in place of counting what they cost.")
    ] = False,
    trials: Annotated[
        int, typer.Option(help="Train a few steps under so many of the best plans, and keep the fastest.", min=0)
    ] = 0,
    launcher: LauncherOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of the plan; by default plan.json in the ds_config's run.output, or here; what-if/plan.json "
            "there while the ds_config follows a plan that --write does not replace."
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Enter the plan in the ds_config.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every stage, and the plans that were weighed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan data, model and memory together: what fits and takes the least time.

    Weighs pack limits (so how many micro-batches a step has), the number of
    stages unless the ds_config says one, where to cut the model, which layers
    recompute, and the schedule, by simulating steps of real packs. Says what
    it gains over the present configuration; --write enters it there, and
    training follows it. Without --write the plan that training follows, and
    its profile, stay as they are.

    Example: omnibal plan ds_configs/mine.json --cluster 4x8xA100-80GB

    Example, tried on the machine itself: omnibal plan ds_configs/mine.json
    --measure --trials 3 --write
    """
    check_file("--out", out)
    fixed = read_limits(limits)
    run = open_run(
        source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster, measure=measure, replaces=write
    )
    if trials:
        check_trials(run)
    if not run.has_config and (write or measure):
        raise ConfigError(f"--{'write' if write else 'measure'} must come with a ds_config, got {source}")
    followed = None if write else run.followed_plan
    if followed is not None and out is not None and out.resolve() == followed.resolve():
        raise ConfigError(f"--out must be another file than the plan that {source} follows, got {out}; say --write")
    out = out or (run.kept.plan if run.has_config else Path("plan.json"))
    check_file("--out", out)
    if write and out.is_file():
        check_alone(source, out)
    _check_batch(run)
    request = request_of(run, samples_per_step, fixed, num_stages)
    result = solve(run, request)
    result, tried = try_best(run, result, trials, launcher) if trials else (result, ())
    if write:
        made_from = {**result.plan.made_from, "ds_config": str(source)}
        result = replace(result, plan=replace(result.plan, made_from=made_from))
    result.plan.save(out)
    gain = Gain.of(run, result.plan)
    if write:
        enter(run.source, result.plan, out)
    report = PlanReport(result, gain, out, tried, entered=run.source if write else None, followed=followed)
    say(*(f"warning: {doubt}" for doubt in run.doubts))
    answer(report.to_record(), *report.parts(explain=explain), as_json=as_json)


def _check_batch(run: Run) -> None:
    """Refuse a train_batch_size that does not follow on the ds_config's own cluster, which a what-if may exchange."""
    if run.config.get("train_batch_size", "auto") == "auto":
        return
    try:
        layout = run.layout(cluster=run.section.cluster)
    except ConfigError:  # the present configuration cannot train, which the plan says
        return
    check_batch(run.config, layout.num_replicas)


def request_of(
    run: Run,
    samples_per_step: int | None = None,
    limits: tuple[int, int] | None = None,
    num_stages: int | None = None,
) -> PlanRequest:
    """What the ds_config asks of a plan, but for what is given.

    Raises:
        ConfigError: Nothing says how many samples a step has.
    """
    packing, layout = run.section.packing, layout_of(run.config, 1, 1)
    wanted = run.section.pipeline.num_stages
    return PlanRequest(
        cluster=run.cluster,
        num_stages=num_stages or (None if wanted == "auto" else wanted),
        global_batch=samples_per_step or run.samples_per_step or _present_samples(run),
        zero_stage=layout.zero_stage,
        accumulate_float32=layout.accumulate_float32,
        limits=None if limits is None else PackLimits(*limits),
        method=packing.method,
        schedule=run.section.pipeline.schedule,
        seed=packing.seed,
    )


def _present_samples(run: Run) -> int:
    """What a step of the present configuration holds on average."""
    if not run.has_config:
        raise ConfigError(f"--samples-per-step must be given beside a profile, got none with {run.source}")
    _readable = run.profile, run.lengths  # outside: that a file is missing is no matter of the configuration
    try:
        return round(real_packs(run, present_plan(run), steps=1).samples_per_step)
    except ConfigError as error:
        raise ConfigError(
            f"--samples-per-step must be given where the present configuration cannot train, got none: {error}"
        ) from error


def solve(run: Run, request: PlanRequest) -> PlanResult:
    """Plan, and show what is being done."""
    profile, lengths = run.profile, run.lengths  # made before, each with a bar of its own
    with Console(stderr=True).status("planning") as status:
        return make_plan(profile, lengths, request, report=status.update)


def make_kept_plan(run: Run) -> Plan:
    """Plan as a ds_config asks, keep it in its run.output, and say so."""
    plan = solve(run, request_of(run)).plan
    plan.save(run.kept.plan)
    say(f"planned: {run.kept.plan}")
    return plan
