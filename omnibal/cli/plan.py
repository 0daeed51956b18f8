"""omnibal plan: pack limits, partition and recompute together, for the cluster's memory; or a look at a plan."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LauncherOption,
    LengthsOption,
    LimitsOption,
    PictureOption,
    ProfileOption,
    answer,
    check_file,
    check_picture,
    open_workspace,
    read_limits,
    refuse,
    say,
)
from omnibal.cli.plan_report import GainOverPresent, PlanReport, trial_line, trial_row
from omnibal.cli.planning import LayoutChoice, WeighedLayouts, median_packs, plan_of, present_plan, request_of, solve
from omnibal.config import RunFiles, check_batch
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, PlanResult
from omnibal.planner.search import Choice, retreat
from omnibal.profile.calibration import Calibration
from omnibal.report.stages import Explanation
from omnibal.report.style import Row
from omnibal.workspace import Workspace

if TYPE_CHECKING:
    from omnibal.trials import Trial  # needs torch

# Options, in the order of --help.
SourceArgument = Annotated[
    Path, typer.Argument(help="A ds_config; or, without one, a profile. Of a plan.json: a look at it, nothing is made.")
]
SamplesOption = Annotated[
    int | None,
    typer.Option(help="Samples in an optimizer step, whatever packs are like; by default as many as now.", min=1),
]
StagesOption = Annotated[int | None, typer.Option(help="Number of pipeline stages.", min=1)]
LayoutOption = Annotated[
    LayoutChoice,
    typer.Option(help="Weigh others first, or all (auto); plan the winner if it can be: docs/layouts.md."),
]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Measure layers on this machine in place of counting what they cost.")
]
FromRunOption = Annotated[
    Path | None,
    typer.Option(help="Plan for the costs that a run's first steps measured: its folder, such as runs/mine."),
]
TrialsOption = Annotated[
    int, typer.Option(help="Train a few steps under this many of the best plans, and keep the fastest.", min=0)
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="File of the plan; by default what-if/plan.json in the ds_config's run.output, or plan.json."),
]
WriteOption = Annotated[
    bool, typer.Option("--write", help="Put the plan where training finds it: plan.json in the ds_config's run.output.")
]
ExplainOption = Annotated[
    bool,
    typer.Option("--explain", help="Show the cut, where stages wait, their memory, and the plans that were weighed."),
]


def plan(
    source: SourceArgument,
    cluster: ClusterOption = None,
    lengths: LengthsOption = None,
    profile: ProfileOption = None,
    samples_per_step: SamplesOption = None,
    limits: LimitsOption = None,
    num_stages: StagesOption = None,
    layout: LayoutOption = "pipeline",
    measure: MeasureOption = False,
    from_run: FromRunOption = None,
    trials: TrialsOption = 0,
    launcher: LauncherOption = None,
    out: OutOption = None,
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
    check_file("--out", out)
    check_picture("--plot", plot)
    asked: dict[str, object] = {"samples-per-step": samples_per_step, "limits": limits, "num-stages": num_stages}
    workspace = open_workspace(
        source, kinds=("ds_config", "profile", "plan"), profile=profile, lengths=lengths, cluster=cluster,
        measures=measure, replaces=write,
    )  # fmt: skip
    if workspace.overrides.plan is not None:
        made = {"measure": measure, "from-run": from_run, "trials": trials, "out": out, "write": write}
        refuse(asked | made, f"{source} is a plan, which is only shown")
        _show(workspace, plot, as_json=as_json)
        return
    if layout != "pipeline":
        refuse(asked | {"samples-per-step": None}, "--layout weighs all of them")
    place = _place(workspace, out)
    _check(workspace, place, trials=trials > 0, from_run=from_run)
    fixed, weighs = read_limits(limits), layout != "pipeline"
    request = _request(workspace, from_run, samples_per_step, fixed, num_stages, weighs=weighs)
    weighed = WeighedLayouts.of(workspace, request, layout) if weighs else None
    found = request if weighed is None else weighed.request(request)
    if found is None:
        assert weighed is not None, "what nothing was weighed for is planned"
        answer(weighed.to_record(), *weighed.report.parts(), *weighed.lines(), as_json=as_json)
        return
    result = solve(workspace, found)
    result, tried = _try_best(workspace, result, trials, launcher) if trials else (result, ())
    report = _keep(workspace, result, tried, place)
    say(*(f"warning: {doubt}" for doubt in workspace.warnings))
    if plot is not None:
        report.explanation.draw(plot)
    table = [] if weighed is None else weighed.report.parts()
    record = report.to_record(explain=explain) | ({"layouts": weighed.report.to_record()} if weighed else {})
    answer(record, *table, *report.parts(explain=explain), as_json=as_json)


def _show(workspace: Workspace, plot: Path | None, *, as_json: bool) -> None:
    """Answer with a step of the workspace's plan: the median one of some steps of real packs."""
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
    samples_per_step: int | None,
    limits: tuple[int, int] | None,
    num_stages: int | None,
    *,
    weighs: bool,
) -> PlanRequest:
    """What is asked of the plan; for the costs that a run has measured where one is named."""
    if from_run is not None:
        refuse({"measure": workspace.measures}, "a run has measured costs")
        run = RunFiles(from_run)
        workspace.take_measured(Calibration.load(run.metrics))
        # The run can adopt a plan only under the limits of its packs.
        own = Plan.load(run.run_plan).limits if run.run_plan.is_file() else workspace.limits
        limits = limits or (own.vision_units, own.llm_tokens)
    return request_of(workspace, samples_per_step, limits, num_stages, weighs=weighs)


def _place(workspace: Workspace, out: Path | None) -> Path:
    """Where the plan goes: what the command line names, or where the workspace keeps plans."""
    followed = workspace.followed_plan
    if workspace.replaces and workspace.files is not None:
        refuse({"out": out}, f"--write puts the plan into {workspace.kept_plan}, where training finds it")
        if followed not in (None, workspace.kept_plan):
            raise ConfigError(
                f"omnibal.pipeline.plan must be left out for --write, got {followed}; training then follows "
                f"{workspace.kept_plan}"
            )
    if followed is not None and out is not None and out.resolve() == followed.resolve():
        raise ConfigError(
            f"--out must be another file than the plan that {workspace.source} follows, got {out}; say --write"
        )
    if out is None:
        out = Path("plan.json") if workspace.files is None else workspace.kept_plan
    check_file("--out", out)
    return out


def _check(workspace: Workspace, out: Path, *, trials: bool, from_run: Path | None) -> None:
    """Refuse, before anything is planned, what could not be done with the plan."""
    asked_of = {"trials": trials, "write": workspace.replaces, "measure": workspace.measures, "from-run": from_run}
    for option, asked in asked_of.items():
        if asked and workspace.files is None:
            raise ConfigError(f"--{option} must come with a ds_config, got {workspace.source}")
    if trials and from_run is None and workspace.profile.versions:
        # Costs of another device or other software tell nothing of the trials; counted ones hold anywhere.
        from omnibal.vlm.measure import measured_versions
        from omnibal.vlm.passes import device_name, this_device

        workspace.profile.check_matches(device=device_name(this_device()), versions=measured_versions())
    if workspace.replaces:
        _check_alone(Path(str(workspace.source)), out)
    if workspace.config.get("train_batch_size", "auto") == "auto":
        return
    # A train_batch_size must follow on the ds_config's own cluster, in whose place a what-if may put another one.
    try:
        layout = workspace.layout(cluster=workspace.section.cluster)
    except ConfigError:  # the present configuration cannot train, which the plan says
        return
    check_batch(workspace.run_config, layout.num_replicas)


def _check_alone(config: Path, out: Path) -> None:
    """Refuse to replace the file of a plan that was made for another ds_config, which still follows it."""
    try:
        other = Path(Plan.load(out).made_from.get("ds_config", config))
    except ConfigError:  # no plan, or none that training could read
        return
    if other.is_file() and not other.samefile(config):
        raise ConfigError(
            f"omnibal.run.output must be another folder than that of {other}, whose plan is {out}, got it for "
            f"{config}; leave it out (the folder is then runs/{config.stem}), or name one"
        )


def _keep(workspace: Workspace, result: PlanResult, tried: tuple[Row, ...], out: Path) -> PlanReport:
    """Save the plan; with what it gains over the configuration before."""
    if workspace.files is not None:
        # A look at the plan opens this ds_config, and `_check_alone` reads it.
        made_from = {**result.plan.made_from, "ds_config": str(workspace.source)}
        result = replace(result, plan=replace(result.plan, made_from=made_from))
    gain = GainOverPresent.of(workspace, result.plan)  # the plan that was followed before is read here
    result.plan.save(out)
    if not workspace.replaces:
        return PlanReport(workspace, result, gain, out, tried)
    # Keys of the ds_config, such as a number of stages, may say something else than the command line did.
    known = replace(workspace.overrides, lengths=workspace.found_lengths, profile=workspace.profile)
    try:
        present_plan(Workspace.read(Path(str(workspace.source)), overrides=known))
    except ConfigError as error:
        return PlanReport(workspace, result, gain, out, tried, refused=str(error))
    return PlanReport(workspace, result, gain, out, tried)


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
