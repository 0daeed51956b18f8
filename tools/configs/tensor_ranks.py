"""The OmniBal paper's two models of ds_configs planned for its layout, with tensor ranks, and for layouts without."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from omnibal.cli.options import open_workspace
from omnibal.cli.planning import request_of
from omnibal.plan import Plan
from omnibal.planner import make_plan
from omnibal.profile.counted import analytic_profile
from omnibal.vlm import load_records
from tools.bench import table
from tools.configs.plans import LENGTHS

PAPERS = {"internvit-6b-llama-20b-32gpu": (4, 2), "internvit-6b-llama-34b-32gpu": (4, 4)}
"""Stages and tensor ranks of a configuration's model in the paper."""
SCHEDULES: tuple[Literal["1f1b", "auto"], ...] = ("1f1b", "auto")
NAMES = ("", "paper's layout", "samples/s", "without tensor ranks", "samples/s", "slower by")


def main() -> None:
    """Print the table as Markdown."""
    print(table(NAMES, [row(name, schedule) for name in PAPERS for schedule in SCHEDULES]))


def row(name: str, schedule: Literal["1f1b", "auto"]) -> tuple[str, ...]:
    """Both plans of a model."""
    stages, ranks = PAPERS[name]
    with TemporaryDirectory() as folder:
        LENGTHS[name]().save(Path(folder))
        workspace = open_workspace(Path("ds_configs", f"{name}.json"), lengths=[Path(folder)])
        lengths, request = workspace.lengths, replace(request_of(workspace), schedule=schedule)
    shared = analytic_profile(
        load_records(Path(workspace.section.model.path)), workspace.cluster.device, tensor_parallel=ranks
    )
    papers = make_plan(shared, lengths, replace(request, num_stages=stages)).plan
    without = make_plan(workspace.profile, lengths, request).plan
    before, after = rate(papers), rate(without)
    slower = f"{1 - after / before:.0%}"
    return f"{name}, {schedule}", layout(papers), f"{before:.1f}", layout(without), f"{after:.1f}", slower


def rate(plan: Plan) -> float:
    """Samples a second, as predicted."""
    assert plan.predicted is not None
    return plan.predicted.samples_per_step / plan.predicted.step_seconds


def layout(plan: Plan) -> str:
    """In words."""
    tensor = f" × {plan.layout.num_tensor} tensor ranks" * (plan.layout.num_tensor > 1)
    return f"{plan.num_stages} × {plan.layout.num_replicas}{tensor}, {plan.schedule}"


if __name__ == "__main__":
    main()
