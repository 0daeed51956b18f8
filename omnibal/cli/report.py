"""omnibal report: one HTML page about a plan, a run, or both."""

from pathlib import Path
from typing import Annotated

import typer

from omnibal.cli.files import check_file, expect
from omnibal.cli.opening import open_run
from omnibal.cli.options import ClusterOption, JsonOption, LengthsOption, ProfileOption
from omnibal.cli.output import answer, say
from omnibal.cli.run import Run
from omnibal.config import RunFiles
from omnibal.data.limits import largest_load
from omnibal.errors import ConfigError, require
from omnibal.planner.prediction import variants_up_to
from omnibal.report.page import PlanPart, write_page
from omnibal.report.training import Metrics, read_metrics


def report(
    source: Annotated[
        Path, typer.Argument(help="A ds_config, for its plan and its run; or a plan, or a run's folder.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File of the page; by default report.html in the ds_config's run.output, or here."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Samples in a padded micro-batch of today's, which the plan is compared with.", min=1)
    ] = 4,
    steps: Annotated[int, typer.Option(help="Steps of real packs to simulate, spread over an epoch.", min=1)] = 64,
    profile: ProfileOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one page that shows what a plan changes and what a run did.

    It opens with how uneven your data makes the work as you batch today, and
    goes on with data, partition, memory, timeline, predicted gain, and the
    figures of a run. Pictures are in the file: send it to anyone.

    Example: omnibal report ds_configs/mine.json

    Example: omnibal report runs/quickstart --out quickstart.html
    """
    require("matplotlib")
    kind = expect("source", source, ("ds_config", "plan", "run"))
    check_file("--out", out)
    part, files = None, RunFiles(source) if kind == "run" else None
    if kind != "run":
        run = open_run(source, kinds=(kind,), profile=profile, lengths=lengths, cluster=cluster)
        files = run.files if run.has_config else RunFiles(source.parent)
        if run.named_plan is not None or run.known_cluster is not None or files.plan.is_file():
            part = _plan_part(run, batch_size, steps)
        elif files.metrics.is_file():
            say("what a plan changes is left out: nothing says which cluster; --cluster 8xA100-80GB does")
        else:
            run.cluster  # says how to give one  # noqa: B018
    assert files is not None
    metrics = _read_run(files, is_needed=part is None)
    out = out or (files.report if kind == "ds_config" else Path("report.html"))
    check_file("--out", out)
    write_page(out, plan=part, run=metrics)
    rates = {} if part is None else {variant.name: variant.samples_per_second for variant in part.variants}
    answer({"written": out, "samples_per_second": rates}, f"written: {out}", as_json=as_json)


def _plan_part(run: Run, batch_size: int, steps: int) -> PlanPart:
    """What the page says of a plan."""
    plan, lengths = run.plan, run.lengths
    variants = variants_up_to(plan, run.profile, lengths, batch_size=batch_size, steps=steps)
    return PlanPart(variants, largest_load(lengths, plan.limits))


def _read_run(files: RunFiles, *, is_needed: bool) -> Metrics | None:
    """The log of a run.

    Raises:
        ConfigError: It is needed, and the folder has none, or no step in it.
        DataError: A line cannot be read.
    """
    metrics = read_metrics(files.metrics) if files.metrics.is_file() else None
    if metrics is not None and metrics.steps:
        return metrics
    if is_needed:
        raise ConfigError(f"a report must be about a plan or a run that has trained a step, got {files.folder}")
    return None
