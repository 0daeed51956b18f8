"""The parts of `omnibal report`: what it reads."""

from collections.abc import Sequence
from pathlib import Path

from omnibal.cli.planning import lengths_of, on_cluster
from omnibal.cluster import Links
from omnibal.data.limits import largest_load
from omnibal.errors import ConfigError
from omnibal.plan import Plan
from omnibal.planner.prediction import variants_up_to
from omnibal.profile.levels import Level
from omnibal.profile.records import ModelProfile
from omnibal.report.page import PlanPart
from omnibal.report.training import Metrics, read_metrics


def plan_part(
    profile: ModelProfile,
    plan_path: Path,
    links: Links,
    *,
    lengths: Sequence[Path] | None,
    num_replicas: int,
    batch_size: int,
    steps: int,
    zero_stage: int,
    budget: str | None,
    overhead_bytes: int,
) -> PlanPart:
    """What the page says of a plan.

    Raises:
        ConfigError: Plan, profile, budget and lengths do not fit each other, or lengths are missing.
    """
    plan, samples = Plan.load(plan_path), lengths_of(lengths)
    plan = on_cluster(
        plan, profile, links, num_replicas=num_replicas, zero_stage=zero_stage, budget=budget,
        overhead_bytes=overhead_bytes,
    )  # fmt: skip
    variants = variants_up_to(plan, profile, samples, batch_size=batch_size, steps=steps)
    footprint = plan.footprint(profile, largest_load(samples, plan.limits))
    everything: Level = "full"
    return PlanPart(
        plan=plan,
        variants=variants,
        memory=footprint.stages(plan.partition, plan.recompute),
        recomputed_memory=footprint.stages(plan.partition, (everything,) * len(profile.layers)),
        budget_bytes=plan.known_cluster.stage_memory_bytes(plan.layout),
    )


def read_run(folder: Path) -> Metrics:
    """The log of a run.

    Raises:
        ConfigError: The folder has none, or no step in it.
        DataError: A line cannot be read.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"--run must name a run's folder with metrics.jsonl, got {folder}")
    metrics = read_metrics(path)
    if not metrics.steps:
        raise ConfigError(f"--run must name a run that has trained a step, got {folder}")
    return metrics
