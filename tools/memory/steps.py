"""Step times under a memory budget on two processes: all recomputed, the paper's four steps, ours; see README.md."""

from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
import torch.distributed as dist

from omnibal.cluster import Cluster
from omnibal.cost import CostModel, Load
from omnibal.device import Device
from omnibal.engine.engine import StagePeaks
from omnibal.pipeline.search import search_partition
from omnibal.planner import PlanRequest
from omnibal.planner.packings import Packing
from omnibal.planner.search import improve
from omnibal.planner.step_model import StepCosts, StepModel
from omnibal.profile.records import ModelProfile
from omnibal.vlm import VisionLanguageModel, load_model
from tools.bench import table
from tools.memory.four_steps import four_steps
from tools.partition.bench import Case, make_engine, measure_link, measure_model, time_steps
from tools.partition.models import MODELS
from tools.partition.reality import LIMITS, MINUTES, heading, links_of, make_parser, sampled, start

MODEL = "mixed"
SHARE = 0.5
"""Of the bytes between all recomputed and nothing recomputed, under the cut for unbounded memory, the budget allows."""


def main() -> None:
    """Plan by each method, then time all plans in turn."""
    arguments = make_parser(__doc__).parse_args()
    start()
    config, packs = MODELS[MODEL], sampled("balanced")
    vlm = load_model(config)
    profile, share = measure_model(config, LIMITS)
    link = measure_link()
    load = packs.load
    cut = search_partition(profile, [load], 2, links_of(link), method="paper").best.partition
    model = _step_model(profile, load, link, 1)
    ends = [model.footprint.stages(cut, (level,) * len(profile.layers)) for level in ("none", "full")]
    most, least = (max(stage.total for stage in stages) for stages in ends)
    model = _step_model(profile, load, link, int(least + SHARE * (most - least)))
    everywhere = Case("all recomputed", cut, packs, ("full",) * len(profile.layers))
    choice = improve(model)
    cases = [
        everywhere,
        replace(everywhere, name="the paper's four steps", recompute=four_steps(model, cut)),
        Case("ours", choice.partition, packs, model.levels(choice.boundaries)),
    ]
    peaks = [_peaks(vlm, case).step for case in cases]
    timings = time_steps(config, cases, rounds=arguments.rounds, minutes=MINUTES, report=print)
    if dist.get_rank() == 0:
        seconds = [timing.seconds for timing in timings]
        print(f"\n{heading(share, link)}\n\n{_report(model, cases, peaks, seconds)}\n")


def _step_model(profile: ModelProfile, load: Load, link: CostModel, budget_bytes: int) -> StepModel:
    sizes = (load.vision_units, load.llm_tokens, load.llm_tokens_squared)
    largest = Load(*(float(size.max()) for size in sizes))
    packing = Packing(LIMITS, len(load), float(len(load)), ((load,),), largest, 1.0)
    device = Device("process", memory_bytes=budget_bytes, link_bytes_per_second=1e9)
    request = PlanRequest(
        cluster=Cluster(1, 2, device, overhead_bytes=0, links=links_of(link)), num_stages=2, global_batch=len(load),
        head_room=0.0, zero_stage=0,
    )  # fmt: skip
    return StepModel(StepCosts(profile, packing, request.layouts(profile)[0], request))


def _peaks(vlm: VisionLanguageModel, case: Case) -> StagePeaks:
    """Measured bytes of each stage."""
    engine = make_engine(vlm, case)
    engine.train_batch()
    return engine.measured_batch()[1]


def _report(model: StepModel, cases: list[Case], peaks: list[tuple[int, ...]], seconds: list[list[float]]) -> str:
    middles = [median(times) for times in seconds]
    rows = []
    for case, peak, times, middle in zip(cases, peaks, seconds, middles, strict=True):
        predicted = [stage.total for stage in model.footprint.stages(case.partition, case.recompute)]
        levels = [case.recompute[a:b] for a, b in pairwise(case.partition.boundaries)]
        costs = model.costs.times_at(case.recompute)
        step = model.problem.step_seconds(np.array(case.partition.boundaries), costs)
        rows.append(
            (
                case.name,
                " ".join(map(str, case.partition.boundaries)),
                " ".join(f"{stage.count('full')}+{stage.count('selective')}" for stage in levels),
                f"{1e3 * middle:,.0f}",
                f"{1e3 * min(times):,.0f} … {1e3 * max(times):,.0f}",
                f"{1e3 * step:,.0f}",
                f"{middle / middles[-1]:.2f}",
                " ".join(f"{size / 2**20:.1f}" for size in peak),
                " ".join(f"{size / 2**20:.1f}" for size in predicted),
            )
        )
    names = (
        "plan", "boundaries", "full+selective", "measured ms", "fastest … slowest", "predicted ms", "of ours",
        "peak MiB", "predicted MiB",
    )  # fmt: skip
    return f"budget {' '.join(f'{budget / 2**20:.1f}' for budget in model.budgets)} MiB\n\n{table(names, rows)}"


if __name__ == "__main__":
    main()
