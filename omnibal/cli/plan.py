"""omnibal plan: pack limits, partition and recompute together, for the cluster's memory."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnibal.cli.entering import check_alone, enter
from omnibal.cli.opening import open_workspace
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LauncherOption,
    LengthsOption,
    LimitsOption,
    StagesOption,
    answer,
    check_file,
    read_limits,
    refuse,
    say,
)
from omnibal.cli.plan_report import GainOverPresent, PlanReport, trial_line, trial_row
from omnibal.cli.planning import request_of, solve
from omnibal.cli.weighing import LayoutChoice, WeighedLayouts
from omnibal.config import RunFiles, check_batch
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.plan import Plan
from omnibal.planner import PlanResult
from omnibal.planner.search import Choice, retreat
from omnibal.profile.calibration import Calibration
from omnibal.profile.records import ModelProfile
from omnibal.report.style import Row
from omnibal.workspace import Workspace

if TYPE_CHECKING:
    from omnibal.trials import Trial  # needs torch


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
    layout: Annotated[
        LayoutChoice,
        typer.Option(help="Weigh others first, or all (auto); plan the winner if it can be: docs/layouts.md."),
    ] = "pipeline",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure layers on this machine in place of counting what they cost.")
    ] = False,
    from_run: Annotated[
        Path | None,
        typer.Option(help="Plan for the costs that a run's first steps measured: its folder, such as runs/mine."),
    ] = None,
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

    Example: omnibal plan ds_configs/mine.json --layout auto

    Example, which a run adopts at its next --resume: omnibal plan
    ds_configs/mine.json --from-run runs/mine --write

    Example, tried on the machine itself: omnibal plan ds_configs/mine.json
    --measure --trials 3 --write
    """
    # Wrong arguments are refused before anything is planned.
    check_file("--out", out)
    if layout != "pipeline":
        refuse({"limits": limits, "num-stages": num_stages}, "--layout weighs all of them")
    workspace = open_workspace(
        source, kinds=("ds_config", "profile"), lengths=lengths, cluster=cluster, measures=measure, replaces=write
    )
    fixed, out = read_limits(limits), _place(workspace, out)
    _check(workspace, out, trials=trials > 0, from_run=from_run)
    if from_run is not None:
        refuse({"measure": measure}, "a run has measured costs")
        of_run = _take_measured(workspace, RunFiles(from_run))
        fixed = fixed or of_run
    weighs, weighed = layout != "pipeline", None
    request = request_of(workspace, samples_per_step, fixed, num_stages, weighs=weighs)
    if weighs:
        weighed = WeighedLayouts.of(workspace, request, layout)
        found = weighed.request(request)
        if found is None:
            answer(weighed.to_record(), *weighed.report.parts(), *weighed.lines(), as_json=as_json)
            return
        request = found
    result = solve(workspace, request)
    result, tried = _try_best(workspace, result, trials, launcher) if trials else (result, ())
    report = _keep(workspace, result, tried, out, source if write else None)
    say(*(f"warning: {doubt}" for doubt in workspace.warnings))
    parts, record = report.parts(explain=explain), report.to_record()
    if weighed is not None:
        parts, record = [*weighed.report.parts(), *parts], record | {"layouts": weighed.report.to_record()}
    answer(record, *parts, as_json=as_json)


def _take_measured(workspace: Workspace, run: RunFiles) -> tuple[int, int]:
    """Plan for the costs that a run has measured; the limits of its packs, under which it can adopt the plan."""
    workspace.take_measured(Calibration.load(run.metrics))
    limits = Plan.load(run.run_plan).limits if run.run_plan.is_file() else workspace.limits
    return limits.vision_units, limits.llm_tokens


def _keep(
    workspace: Workspace, result: PlanResult, tried: tuple[Row, ...], out: Path, entered: Path | None
) -> PlanReport:
    """Save the plan and enter it in the ds_config ``entered``, if any."""
    if entered is not None:
        # `check_alone` reads this: the file of a plan that a ds_config follows is not replaced for another one.
        made_from = {**result.plan.made_from, "ds_config": str(entered)}
        result = replace(result, plan=replace(result.plan, made_from=made_from))
    result.plan.save(out)
    gain = GainOverPresent.of(workspace, result.plan)  # over what the ds_config says before the plan is entered
    if entered is not None:
        enter(entered, result.plan, out)
    followed = None if entered is not None else workspace.followed_plan
    return PlanReport(result, gain, out, tried, entered=entered, followed=followed)


def _place(workspace: Workspace, out: Path | None) -> Path:
    """Where the plan goes: what the command line names, or where the workspace keeps plans."""
    followed = None if workspace.replaces else workspace.followed_plan
    if followed is not None and out is not None and out.resolve() == followed.resolve():
        raise ConfigError(
            f"--out must be another file than the plan that {workspace.source} follows, got {out}; say --write"
        )
    if out is None:
        out = Path("plan.json") if workspace.files is None else workspace.kept.plan
    check_file("--out", out)
    return out


def _check(workspace: Workspace, out: Path, *, trials: bool, from_run: Path | None) -> None:
    """Refuse, before anything is planned, what could not be done with the plan."""
    asked_of = {"trials": trials, "write": workspace.replaces, "measure": workspace.measures, "from-run": from_run}
    for option, asked in asked_of.items():
        if asked and workspace.files is None:
            raise ConfigError(f"--{option} must come with a ds_config, got {workspace.source}")
    if trials and from_run is None:
        _check_measured_here(workspace.profile)
    if workspace.replaces and out.is_file():
        check_alone(Path(str(workspace.source)), out)
    if workspace.config.get("train_batch_size", "auto") == "auto":
        return
    # A train_batch_size must follow on the ds_config's own cluster, in whose place a what-if may put another one.
    try:
        layout = workspace.layout(cluster=workspace.section.cluster)
    except ConfigError:  # the present configuration cannot train, which the plan says
        return
    check_batch(workspace.config, workspace.micro_batches, layout.num_replicas)


def _check_measured_here(profile: ModelProfile) -> None:
    """Refuse costs of another device or other software than trials run on; counted ones hold anywhere."""
    if profile.versions:
        from omnibal.vlm.measure import measured_versions
        from omnibal.vlm.passes import device_name, this_device

        profile.check_matches(device=device_name(this_device()), versions=measured_versions())


def _try_best(
    workspace: Workspace, result: PlanResult, count: int, launcher: str | None
) -> tuple[PlanResult, tuple[Row, ...]]:
    """Run the ``count`` best plans on the real engine; the result with the fastest of them, and all trials.

    Where memory runs out, a trial is followed by one of a plan that holds less. How each did is said as it comes.
    """
    layout = result.choice.model.layout
    options = shlex.split(launcher) if launcher else ["--num_gpus", str(layout.num_devices)]
    tries = [_Try(result, choice, f"plan {place}") for place, choice in enumerate(result.tried[:count], start=1)]
    for each in tries:
        each.run(workspace.whole_config, options)
    done = [entry for each in tries for entry in each.done]
    seconds, best, _ = min(done, key=lambda entry: entry[0])
    figures = tuple(entry[2] for entry in done)
    if seconds == float("inf"):
        raise InfeasibleError(f"a plan must run, got {len(done)} failures; the first: {figures[0]['outcome']}")
    return replace(result, plan=result.plan_of(best), choice=best), figures


class _Try:
    """A plan on the real engine, and then the plans that hold less and less until one fits."""

    def __init__(self, result: PlanResult, choice: Choice, name: str) -> None:
        self._result, self._choice, self._name = result, choice, name
        # Measured seconds per sample (infinite where the trial failed), the choice that ran, and the trial's figures.
        self.done: list[tuple[float, Choice, Row]] = []

    def run(self, config: dict[str, object], options: list[str]) -> None:
        """Run the plan, and after each lack of memory a plan that holds less."""
        from omnibal.trials import run_trials

        plan = self._result.plan_of(self._choice)
        budgets = plan.known_cluster.allocatable_bytes(plan.layout)
        run_trials(
            config, [plan], launcher_options=options, budget_bytes=budgets,
            on_trial=self._on_trial, retreat=self._retreat,
        )  # fmt: skip

    def _on_trial(self, trial: Trial) -> None:
        name = self._name + f", retreat {len(self.done)}" * (len(self.done) > 0)
        figures = trial_row(name, trial)
        seconds = trial.median_seconds / self._choice.model.packing.samples_per_step
        self.done.append((seconds, self._choice, figures))
        say(trial_line(figures))

    def _retreat(self, trial: Trial) -> Plan | None:
        """What to run after a trial that was short of memory; None where no layer is left to recompute."""
        try:
            self._choice = retreat(self._choice, trial.missing_bytes)
        except InfeasibleError:
            return None
        return self._result.plan_of(self._choice)
