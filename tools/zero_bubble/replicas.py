"""What replicas add to a step, who send each other gradients and weights: simulated and emulated; see README.md."""

from dataclasses import replace
from itertools import product
from statistics import median

import numpy as np

from omnibal.cluster import Cluster, Layout
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from tools.bench import table
from tools.emulator.run import LEAST_SLEEP_SECONDS, EmulationTask, run_emulation
from tools.zero_bubble.emulate import TOKENS, profile

STAGES, REPLICAS, MICRO_BATCHES, LAYERS = 4, 2, 8, 6
"""Layers are those of a stage."""
REDUCED = 3.0
"""How long a stage's gradients take between two replicas, in forward passes; the paper's take 3 to 5."""
STEPS, TIME_SCALE = 2, 3.0
BANDWIDTH = 1000.0


def layers() -> ModelProfile:
    """Those of ``emulate.py`` in equal parts, with gradients."""
    part, seconds = LAYERS, REDUCED * LEAST_SLEEP_SECONDS
    stage = profile(1, "1 : 1.25 : 0.8, transfers 0.02").layers[0]
    costs = {
        name: getattr(stage, name) * (1 / part) for name in ("forward_seconds", "backward_seconds", "weight_seconds")
    }
    one = replace(
        stage, **costs, output_bytes=BANDWIDTH * stage.output_bytes, gradient_bytes=round(BANDWIDTH * seconds / part)
    )
    return ModelProfile(
        tuple(replace(one, name=f"layer.{n}") for n in range(STAGES * part)), device="emulated", dtype="bfloat16"
    )


def task_of(schedule: ScheduleName, zero_stage: int) -> EmulationTask:
    """Steps of equal micro-batches."""
    device = Device("emulated", memory_bytes=2**40, link_bytes_per_second=BANDWIDTH)
    model, layout = layers(), Layout(STAGES, REPLICAS, zero_stage=zero_stage, accumulate_float32=False)
    plan = Plan(
        PackLimits(1, 2 * TOKENS), MICRO_BATCHES, Partition.uniform(len(model.layers), STAGES),
        ("none",) * len(model.layers), schedule=schedule, layout=layout,
        cluster=Cluster(1, layout.num_devices, device, overhead_bytes=0),
    )  # fmt: skip
    step = (Load(0, np.full(MICRO_BATCHES, TOKENS)),) * REPLICAS
    return EmulationTask(model, plan, (step,) * STEPS, time_scale=TIME_SCALE)


def main() -> None:
    """Print steps as Markdown, in multiples of the time that all devices would be busy for."""
    rows = []
    for schedule, zero_stage in product(SCHEDULES, (0, 1)):
        task = task_of(schedule, zero_stage)
        busy = float(task.predicted[0].replicas[0].busy_seconds.mean())
        passes, simulated = (seconds / busy for seconds in (_alone(task), task.predicted[0].step_seconds))
        emulated = median(step.step_seconds for step in run_emulation(task).steps) / busy
        rows.append((schedule, f"{zero_stage}", *(f"{value:.3f}" for value in (passes, simulated, emulated))))
        print(rows[-1], flush=True)
    print(table(("schedule", "ZeRO", "one replica, simulated", "simulated", "emulated"), rows))


def _alone(task: EmulationTask) -> float:
    """Seconds of a step of one replica."""
    plan = task.plan
    alone = replace(
        plan, layout=replace(plan.layout, num_replicas=1), cluster=replace(plan.known_cluster, devices_per_node=STAGES)
    )
    return alone.simulate(task.profile, task.steps[0][:1]).step_seconds


if __name__ == "__main__":
    main()
