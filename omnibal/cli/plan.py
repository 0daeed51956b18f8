"""omnibal plan: pack limits, partition and recompute together; or a look at a plan. omnibal report: a page about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from omnibal.advise.estimate import Way
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    Kind,
    LengthsOption,
    LimitsOption,
    PictureOption,
    ProfileOption,
    answer,
    check_file,
    check_picture,
    expect,
    open_workspace,
    read_limits,
    refuse,
    say,
)
from omnibal.cli.plan_report import GainOverPresent, PlanReport, trial_line, trial_row
from omnibal.cli.planning import (
    LayoutChoice,
    cheapest_way,
    median_packs,
    plan_of,
    present_plan,
    present_rate,
    request_for_winner,
    request_of,
    solve,
    weigh,
)
from omnibal.config import check_batch
from omnibal.config.section import RunFiles
from omnibal.data.limits import largest_load
from omnibal.errors import ConfigError, InfeasibleError, require
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, PlanResult
from omnibal.planner.search import Choice, retreat, variants_up_to
from omnibal.profile.calibration import Calibration
from omnibal.report.page import PlanPart, write_page
from omnibal.report.stages import Explanation
from omnibal.report.style import Row
from omnibal.report.training import Metrics, read_metrics
from omnibal.workspace import Workspace

if TYPE_CHECKING:
    from omnibal.trials import Trial  # needs torch

BATCH_SIZE: Final = 4  # samples in each of the random, padded batches that the page begins with
REPORTED_STEPS: Final = 64  # of real packs, spread over an epoch

# Options, in the order of --help.
SourceArgument = Annotated[Path, typer.Argument(help="A ds_config. Of a plan.json: a look at it, nothing is made.")]
StagesOption = Annotated[int | None, typer.Option(help="Number of pipeline stages.", min=1)]
LayoutOption = Annotated[LayoutChoice, typer.Option(help="Weigh other layouts first, or all (auto): docs/layouts.md.")]
MeasureOption = Annotated[bool, typer.Option("--measure", help="Measure layers here; else costs are counted.")]
FromRunOption = Annotated[Path | None, typer.Option(help="Use the costs that a run measured: its folder (runs/mine).")]
TrialsOption = Annotated[
    int, typer.Option(help="Try this many of the best plans on the engine; keep the fastest.", min=0)
]
WriteOption = Annotated[bool, typer.Option("--write", help="Let training follow the plan: plan.json of run.output.")]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Show the cut, stages' waits and memory, other plans.")]


def plan(
    source: SourceArgument,
    cluster: ClusterOption = None,
    lengths: LengthsOption = None,
    profile: ProfileOption = None,
    limits: LimitsOption = None,
    num_stages: StagesOption = None,
    layout: LayoutOption = "pipeline",
    measure: MeasureOption = False,
    from_run: FromRunOption = None,
    trials: TrialsOption = 0,
    write: WriteOption = False,
    explain: ExplainOption = False,
    plot: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan data, model and memory together: what fits and takes the least time.

    Weighs pack limits (so how many micro-batches a step has), the number of stages unless the ds_config says one,
    where to cut the model, which layers recompute, and the schedule, by simulating steps of real packs. Says what it
    gains over the present configuration. Training follows a plan of --write; without, what it follows stays.
    --explain and --plot show a step of the plan, stage by stage.

    Example: omnibal plan ds_configs/mine.json --cluster 4x8xA100-80GB

    Example, tried on the machine itself: omnibal plan ds_configs/mine.json --measure --trials 3 --write

    Example, which a run adopts at its next --resume: omnibal plan ds_configs/mine.json --from-run runs/mine --write

    Example, a look at a plan: omnibal plan runs/mine/plan.json --plot timeline.png
    """
    # Wrong arguments are refused before anything is planned.
    check_picture("--plot", plot)
    asked: dict[str, object] = {"limits": limits, "num-stages": num_stages}
    kinds: tuple[Kind, ...] = ("ds_config", "plan")
    workspace = open_workspace(
        source, kinds=kinds, profile=profile, lengths=lengths, cluster=cluster, measures=measure, replaces=write
    )
    if workspace.overrides.plan is not None:
        made = {"measure": measure, "from-run": from_run, "trials": trials, "write": write}
        refuse(asked | made, f"{source} is a plan, which is only shown")
        _show(workspace, plot, as_json=as_json)
        return
    if layout != "pipeline":
        refuse(asked, "--layout weighs all of them")
    _check(workspace, needs_true_costs=trials > 0 and from_run is None)
    request = _request(workspace, from_run, read_limits(limits), num_stages, weighs=layout != "pipeline")
    weighed = None if layout == "pipeline" else weigh(workspace, request, layout)
    found = request if weighed is None else request_for_winner(workspace, request, weighed.answer)
    layouts, table = ({}, []) if weighed is None else ({"layouts": weighed.to_record()}, weighed.parts())
    if isinstance(found, str):
        answer(layouts, *table, f"nothing is written: {found}", as_json=as_json)
        return
    result = solve(workspace, found)
    result, tried = _try_best(workspace, result, trials) if trials else (result, ())
    report = _keep(workspace, result, tried)
    say(*(f"warning: {doubt}" for doubt in workspace.warnings))
    if plot is not None:
        report.explanation.draw(plot)
    answer(report.to_record(explain=explain) | layouts, *table, *report.parts(explain=explain), as_json=as_json)


def _show(workspace: Workspace, plot: Path | None, *, as_json: bool) -> None:
    plan = plan_of(workspace)
    explained = Explanation(workspace.profile, plan, median_packs(workspace, plan))
    if plot is not None:
        explained.draw(plot)
    written = [] if plot is None else [str(plot)]
    record = explained.to_record() | {"written": written}
    answer(record, *explained.parts(), *(f"written: {path}" for path in written), as_json=as_json)


def _request(
    workspace: Workspace,
    from_run: Path | None,
    limits: tuple[int, int] | None,
    num_stages: int | None,
    *,
    weighs: bool,
) -> PlanRequest:
    if from_run is not None:
        refuse({"measure": workspace.measures}, "a run has measured costs")
        run = RunFiles(from_run)
        workspace.take_measured(Calibration.load(run.metrics))
        # The run can adopt a plan only under the limits of its packs.
        own = Plan.load(run.run_plan).limits if run.run_plan.is_file() else workspace.limits
        limits = limits or (own.vision_units, own.llm_tokens)
    return request_of(workspace, limits, num_stages, weighs=weighs)


def _check(workspace: Workspace, *, needs_true_costs: bool) -> None:
    """Refuse, before anything is planned, what could not be done with the plan."""
    check_file("the plan", workspace.kept_plan)
    if needs_true_costs and workspace.profile.versions:
        # Costs of another device or other software tell nothing of trials; counted ones hold anywhere.
        from omnibal.passes import device_name, this_device
        from omnibal.vlm.measure import measured_versions

        workspace.profile.check_matches(device=device_name(this_device()), versions=measured_versions())
    followed = workspace.followed_plan
    if workspace.replaces and followed not in (None, workspace.kept_plan):
        raise ConfigError(
            f"omnibal.pipeline.plan must be left out for --write, got {followed}; training then follows "
            f"{workspace.kept_plan}"
        )
    if workspace.config.get("train_batch_size", "auto") == "auto":
        return
    # A train_batch_size must follow on the ds_config's own cluster, in whose place a what-if may put another one.
    try:
        layout = workspace.layout(cluster=workspace.section.cluster)
    except ConfigError:  # the present configuration cannot train, which the plan says
        return
    check_batch(workspace.run_config, layout.num_replicas)


def _keep(workspace: Workspace, result: PlanResult, trials: tuple[Row, ...]) -> PlanReport:
    # A look at the plan opens this ds_config.
    made_from = {**result.plan.made_from, "ds_config": str(workspace.source)}
    result = replace(result, plan=replace(result.plan, made_from=made_from))
    gain = GainOverPresent.of(workspace, result.plan)  # the plan that was followed before is read here
    report = PlanReport(workspace, result, gain, trials)
    result.plan.save(report.out)
    if workspace.replaces:
        # Keys of the ds_config, such as a number of stages, may say something else than the command line did.
        known = replace(workspace.overrides, lengths=workspace.found_lengths, profile=workspace.profile)
        try:
            present_plan(Workspace.read(Path(str(workspace.source)), overrides=known))
        except ConfigError as error:
            return replace(report, refused=str(error))
    return report


def _try_best(workspace: Workspace, result: PlanResult, count: int) -> tuple[PlanResult, tuple[Row, ...]]:
    """Run the ``count`` best plans on the real engine; the result with the fastest of them, and all trials.

    Where memory runs out, a trial is followed by one of a plan that holds less. How each did is said as it comes.
    """
    done = [
        entry
        for number, choice in enumerate(result.tried[:count], start=1)
        for entry in _try(workspace, result, choice, f"plan {number}")
    ]
    seconds, best, _ = min(done, key=lambda entry: entry[0])
    figures = tuple(row for *_, row in done)
    if seconds == float("inf"):
        raise InfeasibleError(f"a plan must run, got {len(done)} failures; the first: {figures[0]['outcome']}")
    return replace(result, plan=result.plan_of(best), choice=best), figures


def _try(workspace: Workspace, result: PlanResult, choice: Choice, name: str) -> list[tuple[float, Choice, Row]]:
    """Run a plan on the real engine, then those that hold less and less until one fits.

    Of each: measured seconds per sample (infinite where the trial failed), the choice that ran, the trial's figures.
    """
    from omnibal.trials import run_trials

    done: list[tuple[float, Choice, Row]] = []

    def ease(trial: Trial) -> Plan | None:
        """What to run after a trial that was short of memory; None where no layer is left to recompute."""
        nonlocal choice
        try:
            choice = retreat(choice, trial.missing_bytes)
        except InfeasibleError:
            return None
        return result.plan_of(choice)

    plan = result.plan_of(choice)
    config = workspace.config | {"omnibal": workspace.section.model_dump(mode="json")}
    for trial in run_trials(config, plan, plan.known_cluster.allocatable_bytes(plan.layout), ease):
        row = trial_row(name + f", retreat {len(done)}" * (len(done) > 0), trial)
        done.append((trial.median_seconds / choice.model.packing.samples_per_step, choice, row))
        say(trial_line(row))
    return done


def report(
    source: Annotated[
        Path, typer.Argument(help="A ds_config, for its plan and its run; or a plan, or a run's folder.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File of the page; by default report.html in the ds_config's run.output, or here."),
    ] = None,
    profile: ProfileOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one page that shows what a plan changes and what a run did.

    It opens with the gain over what the ds_config trains with now and over a trainer's own settings, and with how
    uneven your data makes random batches; it goes on with data, partition, memory, timeline, predicted gain, and the
    figures of a run. Pictures are in the file: send it to anyone.

    Example: omnibal report ds_configs/mine.json

    Example: omnibal report runs/quickstart --out quickstart.html
    """
    # A page has a part about the plan, a part about the run, or both: whatever the source has.
    require("matplotlib")
    kind = expect("source", source, ("ds_config", "plan", "run"))
    check_file("--out", out)
    part, files = None, RunFiles(source) if kind == "run" else None
    if kind != "run":
        workspace = open_workspace(source, kinds=(kind,), profile=profile, lengths=lengths, cluster=cluster)
        files = workspace.files or RunFiles(source.parent)
        if workspace.named_plan is not None or workspace.known_cluster is not None or files.plan.is_file():
            plan, found = plan_of(workspace), workspace.lengths
            variants = variants_up_to(plan, workspace.profile, found, batch_size=BATCH_SIZE, steps=REPORTED_STEPS)
            # What the ds_config trains with, unless that is the plan, and the cheapest alternative.
            present = present_rate(workspace) if workspace.followed_plan is None else None
            ways = () if present is None else (Way("the present configuration", present),)
            cheapest = cheapest_way(workspace, plan.known_cluster, variants[-1].samples_per_step)
            part = PlanPart(variants, (*ways, cheapest), largest_load(found, plan.limits))
        elif files.metrics.is_file():
            say("what a plan changes is left out: nothing says which cluster; --cluster 8xA100-80GB does")
        else:
            workspace.cluster  # says how to give one  # noqa: B018
    assert files is not None
    metrics = _read_run(files, is_needed=part is None)
    out = out or (files.report if kind == "ds_config" else Path("report.html"))
    check_file("--out", out)
    write_page(out, plan=part, run=metrics)
    rates = {} if part is None else {variant.name: variant.samples_per_second for variant in part.variants}
    others = {} if part is None else {way.name: way.samples_per_second for way in part.others}
    answer({"written": out, "samples_per_second": rates, "others": others}, f"written: {out}", as_json=as_json)


def _read_run(files: RunFiles, *, is_needed: bool) -> Metrics | None:
    metrics = read_metrics(files.metrics) if files.metrics.is_file() else None
    if metrics is not None and metrics.steps:
        return metrics
    if is_needed:
        raise ConfigError(f"a report must be about a plan or a run that has trained a step, got {files.folder}")
    return None
