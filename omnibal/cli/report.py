"""omnibal report: one HTML page about a plan, a run, or both."""

from pathlib import Path
from typing import Annotated, Final

import typer

from omnibal.advise.estimate import Way
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LengthsOption,
    ProfileOption,
    answer,
    check_file,
    expect,
    open_workspace,
    say,
)
from omnibal.cli.planning import cheapest_way, plan_of, present_rate
from omnibal.config import RunFiles
from omnibal.data.limits import largest_load
from omnibal.errors import ConfigError, require
from omnibal.plan import Plan
from omnibal.planner.prediction import Variant, variants_up_to
from omnibal.report.page import PlanPart, write_page
from omnibal.report.training import Metrics, read_metrics
from omnibal.workspace import Workspace

BATCH_SIZE: Final = 4  # samples in each of the random, padded batches that the page begins with
STEPS: Final = 64  # of real packs, spread over an epoch


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

    It opens with the gain over what the ds_config trains with now and over a
    trainer's own settings, and with how uneven your data makes random batches;
    it goes on with data, partition, memory, timeline, predicted gain, and the
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
            variants = variants_up_to(plan, workspace.profile, found, batch_size=BATCH_SIZE, steps=STEPS)
            part = PlanPart(variants, _others(workspace, plan, variants[-1]), largest_load(found, plan.limits))
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


def _others(workspace: Workspace, plan: Plan, last: Variant) -> tuple[Way, ...]:
    """What the ds_config trains with, unless that is the plan, and the cheapest alternative."""
    cheapest = cheapest_way(workspace, plan.known_cluster, last.samples_per_step)
    present = present_rate(workspace) if workspace.followed_plan is None else None
    return (cheapest,) if present is None else (Way("the present configuration", present), cheapest)


def _read_run(files: RunFiles, *, is_needed: bool) -> Metrics | None:
    """The log of a run, refused where it is needed and has no step."""
    metrics = read_metrics(files.metrics) if files.metrics.is_file() else None
    if metrics is not None and metrics.steps:
        return metrics
    if is_needed:
        raise ConfigError(f"a report must be about a plan or a run that has trained a step, got {files.folder}")
    return None
