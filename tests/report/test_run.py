from dataclasses import replace

from omnibal.data.limits import PackLimits
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.boundaries import Partition
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.report.run import peak_text

MIB = 2**20
PLAN = Plan(PackLimits(9, 4096), 2, Partition((0, 1, 2)), ("none", "none"))


def stage(size):
    """Of so many bytes and as many of overhead, which is no part of what is compared."""
    terms = ("parameters", "gradients", "optimizer", "pending", "buffers", "transient", "logits")
    memory = StageMemory(**dict.fromkeys(terms, 0), activations=size, overhead=size)
    times = ("forward_seconds", "backward_seconds", "recompute_seconds", "idle_ratio")
    return StagePrediction(**dict.fromkeys(times, 0.0), pending_bytes=0, memory=memory)


def test_a_measured_peak_stands_beside_the_predicted_one():
    plan = replace(PLAN, predicted=Prediction(1.0, 8.0, 0.0, (stage(200 * MIB), stage(4096 * MIB))))
    assert peak_text((150 * MIB, 4300 * MIB), (0, 0), plan).splitlines() == [
        "stage 0: memory peak 150.00 MiB, 75.0% of the 200.00 MiB predicted for the largest packs",
        "stage 1: memory peak 4.20 GiB, 105.0% of the 4.00 GiB predicted for the largest packs",
    ]


def test_a_peak_that_nobody_predicted_is_said_all_the_same():
    assert peak_text((150 * MIB, MIB), (0, 0), PLAN).splitlines() == [
        "stage 0: memory peak 150.00 MiB; nothing predicted",
        "stage 1: memory peak 1.00 MiB; nothing predicted",
    ]


def test_what_a_device_held_beside_the_model_stands_beside_what_was_planned_for_it():
    plan = replace(PLAN, predicted=Prediction(1.0, 8.0, 0.0, (stage(200 * MIB), stage(200 * MIB))))
    first, second = peak_text((150 * MIB, 150 * MIB), (1536 * MIB, 0), plan).splitlines()
    assert first == (
        "stage 0: memory peak 150.00 MiB, 75.0% of the 200.00 MiB predicted for the largest packs; 1.50 GiB beside the "
        "model, 200.00 MiB planned (--overhead)"
    )
    assert second == "stage 1: memory peak 150.00 MiB, 75.0% of the 200.00 MiB predicted for the largest packs"
    unplanned, _ = peak_text((150 * MIB, MIB), (1536 * MIB, 0), PLAN).splitlines()
    assert unplanned == "stage 0: memory peak 150.00 MiB; nothing predicted; 1.50 GiB beside the model"
