import json
from dataclasses import replace

import pytest

from omnibal.cluster import OVERHEAD_BYTES, Cluster, Layout
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.planner import PlanRequest
from tests.clusters import cluster
from tests.pipeline.profiles import fixed_profile


def request(*, num_devices=8, memory_bytes=1000, **changes):
    return PlanRequest(**{"cluster": cluster(num_devices, memory_bytes), "global_batch": 64} | changes)


def stages(task, num_layers, **profile):
    return [layout.num_stages for layout in task.layouts(fixed_profile([1] * num_layers, **profile))]


def test_a_device_holds_something_beside_the_model_unless_told_otherwise():
    task = PlanRequest(cluster=Cluster.parse("A100-80GB"), global_batch=1)
    assert task.cluster.overhead_bytes == OVERHEAD_BYTES > 0
    assert task.cluster.allocatable_bytes(Layout()) == (int(79.25 * 2**30) - OVERHEAD_BYTES,)


def test_stages_are_divisors_of_the_devices_and_no_more_than_layers():
    assert stages(request(num_devices=12), 10) == [1, 2, 3, 4, 6]
    assert stages(request(num_stages=4), 10) == [4]
    with pytest.raises(ConfigError, match="num_stages must be at most the model's 3 layers, got 4"):
        stages(request(num_stages=4), 3)
    with pytest.raises(ConfigError, match="num_stages must divide the 8 devices, got 3"):
        stages(request(num_stages=3), 10)


def test_devices_that_share_layers_count_as_one():
    shared = replace(fixed_profile([1, 1, 1, 1]), tensor_parallel=2)
    found = request(num_devices=12, zero_stage=0).layouts(shared)
    assert found[1] == Layout(2, 3, num_tensor=2, zero_stage=0, precision="float32")
    assert [layout.num_devices for layout in found] == [12, 12, 12]
    with pytest.raises(ConfigError, match="devices must be a multiple of the 2 that share each layer, got 7"):
        request(num_devices=7).layouts(shared)


def test_budgets_leave_the_head_room():
    assert request(head_room=0.25).budgets(Layout(3)) == (750, 750, 750)
    assert request(head_room=0.0, num_devices=4, memory_bytes=(10, 20, 30, 15)).budgets(Layout(2, 2)) == (10, 15)


def test_a_request_is_json():
    record = json.loads(json.dumps(request(limits=PackLimits(9, 4096)).to_record()))
    assert record["limits"]["llm_tokens"] == 4096 and record["global_batch"] == 64
    assert "cluster" not in record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 0}, "global_batch must be positive, got 0"),
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"head_room": 1.0}, r"head_room must lie in \[0, 1\), got 1.0"),
        ({"num_stages": 0}, "num_stages must be positive, got 0"),
        ({"zero_stage": 2}, "zero_stage must be 0 or 1 under a pipeline, got 2"),
        (
            {"cluster": cluster(8, 1000, overhead_bytes=960)},
            "overhead_bytes must be less than a device's memory without its head room, 950, got 960",
        ),
        ({"batch_tolerance": -0.1}, "batch_tolerance must lie in"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        request(**changes)
