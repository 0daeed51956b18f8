import json

import pytest

from omnibal.cluster import OVERHEAD_BYTES, Links
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.memory.state import TrainingSetup
from omnibal.planner import PlanRequest


def request(**changes):
    given = {"num_devices": 8, "global_batch": 64, "budget_bytes": 1000, "links": Links(1e9)}
    return PlanRequest(**given | {"overhead_bytes": 0} | changes)


def test_a_device_holds_something_beside_the_model_unless_told_otherwise():
    task = PlanRequest(num_devices=1, global_batch=1, budget_bytes=80 * 2**30, links=Links(1.0))
    assert task.setup(1, 1.0).overhead_bytes == TrainingSetup().overhead_bytes == OVERHEAD_BYTES > 0
    assert task.allocatable_bytes(1) == (80 * 2**30 - OVERHEAD_BYTES,)


def test_stages_are_divisors_of_the_devices_and_no_more_than_layers():
    assert request(num_devices=12).stage_counts(10) == [1, 2, 3, 4, 6]
    assert request(num_stages=4).stage_counts(10) == [4]
    with pytest.raises(ConfigError, match="num_stages must be at most the model's 3 layers, got 4"):
        request(num_stages=4).stage_counts(3)


def test_budgets_leave_the_head_room():
    assert request(head_room=0.25).budgets(3) == (750, 750, 750)
    assert request(head_room=0.0, num_stages=2, budget_bytes=(10, 20)).budgets(2) == (10, 20)


def test_a_request_is_json():
    record = json.loads(json.dumps(request(limits=PackLimits(9, 4096)).to_record()))
    assert record["limits"]["llm_tokens"] == 4096 and record["global_batch"] == 64
    assert (record["bandwidth_bytes_per_second"], record["latency_seconds"]) == (1e9, 0) and "links" not in record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 0}, "num_devices must be positive, got 0"),
        ({"global_batch": 0}, "global_batch must be positive, got 0"),
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"num_stages": 3}, "num_stages must divide the 8 devices, got 3"),
        ({"head_room": 1.0}, r"head_room must lie in \[0, 1\), got 1.0"),
        ({"batch_tolerance": -0.1}, "batch_tolerance must lie in"),
        ({"budget_bytes": (10, 20)}, "budget_bytes must be one for each of None stages, got 2"),
        ({"budget_bytes": (10, 20), "num_stages": 4}, "budget_bytes must be one for each of 4 stages, got 2"),
        ({"budget_bytes": 0}, "budget_bytes must be positive, got 0"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        request(**changes)
