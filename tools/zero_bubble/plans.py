"""Plans under each schedule for the OmniBal paper's 6B + 20B model, budget by budget; see README.md."""

import argparse
import json
from pathlib import Path
from typing import Any

from omnibal.errors import InfeasibleError
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.planner import PlanRequest, make_plan
from omnibal.profile.records import ModelProfile
from tools.memory.paper_tables import profile_of
from tools.partition.paper_models import BASELINE, LIMITS, cluster_of
from tools.synthetic import tiled_lengths

GIB = 2**30
LENGTHS = tiled_lengths(40_000, seed=1)
STAGES, REPLICAS, GLOBAL_BATCH = 8, 2, 256
BUDGETS = (28, 32, 40, 48, 64, 80)


def main() -> None:
    """Plan for every budget and schedule; write all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON of all figures")
    arguments = parser.parse_args()
    profile = profile_of(BASELINE, selective=True)
    rows = []
    for budget in BUDGETS:
        rows.append({"budget": budget} | {schedule: plan(profile, budget, schedule) for schedule in SCHEDULES})
        print(rows[-1], flush=True)
    arguments.file.write_text(json.dumps(rows, indent=1) + "\n")


def plan(profile: ModelProfile, budget: int, schedule: Any) -> dict[str, float] | None:
    """Seconds of a step, layers that recompute, GiB of weight gradients that wait; None where nothing fits."""
    request = PlanRequest(
        cluster=cluster_of(STAGES * REPLICAS * profile.num_tensor, budget * GIB), num_stages=STAGES,
        global_batch=GLOBAL_BATCH, accumulate_float32=False, head_room=0.0, limits=LIMITS, schedule=schedule,
    )  # fmt: skip
    try:
        found = make_plan(profile, LENGTHS, request).plan
    except InfeasibleError:
        return None
    assert found.predicted is not None
    return {
        "seconds": found.predicted.step_seconds,
        # The head has its gradients at once, and no level makes it recompute.
        "recomputed": sum(level != "none" for level in found.recompute[:-1]),
        "pending": max(stage.pending_bytes for stage in found.predicted.stages) / GIB,
    }


if __name__ == "__main__":
    main()
