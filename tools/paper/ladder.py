"""The paper's ladder for any of its settings: baseline, + data, + model, + memory, and ours on top."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

import numpy as np

from tools.paper.setting import Batches, Setting  # makes the other tools' modules known

from tools.memory.four_steps import four_steps  # isort: skip

from omnibal.cluster import Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import ScheduleName
from omnibal.pipeline.search import search_partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.planner import make_plan
from omnibal.planner.packings import packings
from omnibal.planner.search import Variant
from omnibal.planner.step_model import StepCosts, StepModel
from omnibal.profile.records import Level

DAY_SECONDS = 86_400
"""Of a Load, in the order in which it takes them."""


def ladder(setting: Setting, *, ours: bool = True) -> list[Variant]:
    """The rungs, the baseline first; ours last."""
    full: tuple[Level, ...] = ("full",) * len(setting.profile.layers)
    cut = paper_cut(setting, setting.packed)
    rungs = [
        rung(setting, "baseline", setting.padded(), setting.by_parameters, full),
        rung(setting, "+ data", setting.packed, setting.by_parameters, full),
        rung(setting, "+ model", setting.packed, cut, full),
        rung(setting, "+ memory", setting.packed, cut, paper_levels(setting, cut)),
    ]
    return [*rungs, best(setting)] if ours else rungs


def rung(setting: Setting, name: str, batches: Batches, partition: Partition, recompute: tuple[Level, ...]) -> Variant:
    """One way to train in a setting."""
    load = Load.stack(Load.stack(step) for step in batches.steps)
    plan = setting.plan(load, partition, recompute)
    return Variant(name, setting.profile, plan, batches.steps, batches.samples_per_step)


def best(
    setting: Setting, schedule: ScheduleName | Literal["auto"] = "1f1b", limits: PackLimits | None = None
) -> Variant:
    """Our joint plan: limits if none are given, cut and recomputation together, packs by our planner."""
    request = replace(setting.request, schedule=schedule, limits=limits)
    plan = make_plan(setting.profile, setting.drawn, request).plan
    batches = setting.balanced(plan.limits, plan.micro_batches)
    ours = rung(setting, "ours", batches, plan.partition, plan.recompute)
    return replace(ours, plan=replace(ours.plan, schedule=plan.schedule))


def paper_cut(setting: Setting, batches: Batches) -> Partition:
    """By the paper's method for some micro-batches, with the simulator in the place of its trials."""
    found = search_partition(
        setting.profile, batches.steps[0], setting.num_stages, Links(setting.network), method="paper"
    )
    return found.best.partition


def paper_levels(setting: Setting, cut: Partition) -> tuple[Level, ...]:
    """By the paper's four steps, with our footprint in the place of its trials; all recomputes where nothing fits."""
    request = replace(setting.request, limits=setting.limits, method="isf", steps=1)
    (packing,) = packings(setting.drawn, request, setting.row.num_replicas)
    try:
        return four_steps(StepModel(StepCosts(setting.profile, packing, setting.layout, request)), cut)
    except InfeasibleError:
        return ("full",) * len(setting.profile.layers)


def gpu_days(setting: Setting, of: Variant, step_seconds: float | None = None) -> float:
    """Of the whole dataset, from a step's seconds."""
    seconds = of.step_seconds if step_seconds is None else step_seconds
    return seconds * setting.samples / of.samples_per_step * setting.num_gpus / DAY_SECONDS


def limits_days(setting: Setting, of: Variant) -> tuple[float, float]:
    """GPU days if all micro-batches and stages were alike and nothing recomputed: under 1F1B, and all busy."""
    whole = sum(
        float((layer.forward_seconds + layer.backward_seconds + layer.weight_seconds)(of.load).mean())
        for layer in setting.profile.layers
    )
    count, stage = of.load.shape[-1], whole / setting.num_stages
    return gpu_days(setting, of, whole + (count - 1) * stage), gpu_days(setting, of, count * stage)


def above_limit(setting: Setting, of: Variant) -> dict[str, float]:
    """Why a step takes longer than 1F1B's limit: the share of the limit that each reason adds."""
    days, load = limits_days(setting, of)[0], of.load
    alike = (Load.stack([load.mean()] * load.shape[-1]),) * load.shape[1]

    def simulated(links: Links, *steps: Sequence[Load]) -> float:
        """Without what replicas send each other."""
        plan, links = of.plan, replace(links, reduce_bandwidth_bytes_per_second=np.inf)
        seconds = [
            simulate_step(
                of.profile, plan.partition, step, links, recompute=plan.recompute, schedule=plan.make_schedule()
            ).pipeline_seconds
            for step in steps
        ]
        return gpu_days(setting, of, fmean(seconds))

    reached = {
        "stages unlike (whole layers)": simulated(Links(np.inf), alike),
        "transfers": simulated(of.plan.links, alike),
        "micro-batches unlike": simulated(of.plan.links, *of.steps),
        "gradients, weights, optimizer": gpu_days(setting, of),
    }
    ends = [days, *reached.values()]
    return {name: (b - a) / days for name, a, b in zip(reached, ends, ends[1:], strict=False)}


def fitted(setting: Setting, days: float) -> Setting:
    """The setting with the fraction of the peak that makes the last row of the paper's ladder take so many GPU days."""
    for _ in range(3):
        found = gpu_days(setting, ladder(setting, ours=False)[-1])
        setting = replace(setting, fraction=setting.fraction * found / days)
    return setting
