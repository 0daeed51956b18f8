"""Step times under 1F1B and zero-bubble: simulated, and on DeepSpeed's engine with layers that sleep; see README.md."""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from omnibal.cluster import Cluster, Layout
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import ScheduleName
from omnibal.pipeline.simulate import Simulation
from omnibal.plan import Plan
from omnibal.profile.records import LayerCost, ModelProfile
from omnibal.report.stages import plot_timeline
from tools.emulator.run import LEAST_SLEEP_SECONDS, EmulationTask, run_emulation

COSTS = {"1 : 1 : 1": (1.0, 1.0, 0.0), "1 : 1.25 : 0.8, transfers 0.02": (1.25, 0.8, 0.02)}
"""Of a stage, in forward passes: backward to the inputs, to the weights, a transfer; the second as measured."""
COMPARED: tuple[ScheduleName, ...] = ("1f1b", "zero-bubble")
TOKENS, SPREAD = 4000, 0.1
MICRO_BATCHES = (8, 16, 32)
REPETITIONS = 2
DRAWN = (4, 8, "1 : 1.25 : 0.8, transfers 0.02")


def profile(num_stages: int, costs: str) -> ModelProfile:
    """A layer per stage; costs follow the tokens of a micro-batch."""
    inputs, weights, transfer = COSTS[costs]
    forward = CostModel(llm_tokens=LEAST_SLEEP_SECONDS / TOKENS)
    layers = [
        LayerCost(
            f"stage.{number}",
            "stage",
            module="language",
            forward_seconds=forward,
            backward_seconds=inputs * forward,
            weight_seconds=weights * forward,
            output_bytes=transfer * forward,
            saved_bytes={"none": CostModel(), "full": CostModel()},
        )
        for number in range(num_stages)
    ]
    return ModelProfile(tuple(layers), device="emulated", dtype="bfloat16")


def task_of(num_stages: int, micro_batches: int, schedule: ScheduleName, costs: str) -> EmulationTask:
    """Steps of equal micro-batches, and steps whose micro-batches vary."""
    rng = np.random.default_rng(0)
    equal = np.full(micro_batches, TOKENS)
    varied = [TOKENS * (1 + SPREAD * rng.standard_normal(micro_batches)) for _ in range(REPETITIONS)]
    device = Device("emulated", memory_bytes=2**40, link_bytes_per_second=1.0)
    cluster = Cluster(1, num_stages, device, overhead_bytes=0)
    plan = Plan(
        PackLimits(1, 2 * TOKENS), micro_batches, Partition.uniform(num_stages, num_stages), ("none",) * num_stages,
        schedule=schedule, layout=Layout(num_stages), cluster=cluster,
    )  # fmt: skip
    steps = tuple((Load(0, tokens),) for tokens in (equal, equal, *varied))
    return EmulationTask(profile(num_stages, costs), plan, steps, time_scale=1.0)


def ratio(ran: Simulation, predicted: Simulation) -> float:
    """Until the pipeline is done, in times that all devices would be busy for."""
    return ran.makespan_seconds / float(predicted.busy_seconds.mean())


def measure(task: EmulationTask, costs: str, *, emulate: bool, picture: Path | None) -> list[dict[str, Any]]:
    """One run of the engine; a row for equal micro-batches, and one for those that vary."""
    predicted = [step.replicas[0] for step in task.predicted]
    ran = [step.replicas[0] for step in run_emulation(task).steps] if emulate else None
    if ran is not None and picture is not None:
        plot_timeline({"emulated": ran[0], "simulated": predicted[0]}, picture)
    rows = []
    for name, chosen in (("equal", slice(0, 2)), ("varied", slice(2, None))):
        said = predicted[chosen]
        found = None if ran is None else median(ratio(*pair) for pair in zip(ran[chosen], said, strict=True))
        rows.append(
            {
                "costs": costs,
                "stages": task.plan.num_stages,
                "micro_batches": task.plan.micro_batches,
                "packs": name,
                "schedule": task.plan.schedule,
                "simulated": median(ratio(step, step) for step in said),
                "emulated": found,
            }
        )
    return rows


def main() -> None:
    """Run all numbers of micro-batches of one number of stages and sort of costs; replace their rows in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON of all rows")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--costs", type=int, choices=range(len(COSTS)), required=True)
    parser.add_argument("--no-emulate", action="store_true", help="only simulate")
    arguments = parser.parse_args()
    stages, costs = arguments.stages, list(COSTS)[arguments.costs]
    rows = json.loads(arguments.file.read_text()) if arguments.file.exists() else []
    rows = [row for row in rows if (row["stages"], row["costs"]) != (stages, costs)]
    for micro_batches in MICRO_BATCHES:
        for schedule in COMPARED:
            is_drawn = (stages, micro_batches, costs) == DRAWN
            picture = arguments.file.parent / f"timeline-{schedule}.png" if is_drawn else None
            task = task_of(stages, micro_batches, schedule, costs)
            rows += measure(task, costs, emulate=not arguments.no_emulate, picture=picture)
            print(rows[-2], rows[-1], sep="\n", flush=True)
            arguments.file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
