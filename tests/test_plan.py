import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.cluster import Cluster, Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.profile.records import LEVELS
from tests.clusters import on_cluster
from tests.pipeline.profiles import fixed_profile

MEMORY = StageMemory(8, 16, 96, 1000, 0, 20, 30, 0, 7)
STAGE = StagePrediction(0.1, 0.25, 0.05, 0.125, 9, MEMORY)
CLUSTER = Cluster(
    1, 4, Device("card", memory_bytes=2e9, link_bytes_per_second=1e9), memory_bytes=(1000, 2000, 3000, 4000),
    overhead_bytes=7,
)  # fmt: skip
PLAN = Plan(
    PackLimits(9, 4096, full_llm_tokens=4000),
    16,
    Partition((0, 3, 5)),
    ("full", "full", "none", "selective", "none"),
    Prediction(1.5, 70.5, 0.125, (STAGE, STAGE)),
    {"profile": "0123456789abcdef", "options": {"global_batch": 64, "budget_bytes": [10, 20]}},
    "zero-bubble",
    Layout(2, 2, accumulate_float32=False),
    CLUSTER,
)


def test_a_plan_reads_well(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    stage = (
        '{"forward_seconds": 0.1, "backward_seconds": 0.25, "recompute_seconds": 0.05, "idle_ratio": 0.125, '
        '"pending_bytes": 9, "memory": {"parameters": 8, "gradients": 16, "optimizer": 96, "activations": 1000, '
        '"pending": 0, "buffers": 20, "transient": 30, "logits": 0, "overhead": 7}}'
    )
    expected = f"""{{
  "version": 3,
  "cluster": {{
    "num_nodes": 1,
    "devices_per_node": 4,
    "device": {{"name": "card", "memory_bytes": 2000000000.0, "link_bytes_per_second": 1000000000.0, \
"node_bytes_per_second": null, "flops_per_second": null, "fraction": 0.6, "memory_bytes_per_second": null}},
    "node_bytes_per_second": null,
    "latency_seconds": 0.0,
    "memory_bytes": [1000, 2000, 3000, 4000],
    "overhead_bytes": 7,
    "links": null
  }},
  "layout": {{"num_stages": 2, "num_replicas": 2, "num_tensor": 1, "zero_stage": 1, "precision": "bfloat16", \
"accumulate_float32": false}},
  "limits": {{"vision_units": 9, "llm_tokens": 4096, "full_vision_units": 9, "full_llm_tokens": 4000}},
  "micro_batches": 16,
  "partition": [0, 3, 5],
  "recompute": [
    "2 full, 1 none",
    "1 selective, 1 none"
  ],
  "schedule": "zero-bubble",
  "predicted": {{
    "step_seconds": 1.5,
    "samples_per_step": 70.5,
    "bubble_ratio": 0.125,
    "stages": [
      {stage},
      {stage}
    ]
  }},
  "made_from": {{
    "profile": "0123456789abcdef",
    "options": {{
      "global_batch": 64,
      "budget_bytes": [10, 20]
    }}
  }}
}}
"""
    assert (tmp_path / "plan.json").read_text() == expected


def test_a_plan_comes_back_as_it_was_saved(tmp_path):
    for plan in (PLAN, Plan(PackLimits(0, 7), 1, Partition((0, 1)), ("full",))):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


@given(st.lists(st.lists(st.sampled_from(LEVELS), min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_levels_come_back(tmp_path_factory, stages):
    boundaries = [0]
    for stage in stages:
        boundaries.append(boundaries[-1] + len(stage))
    plan = Plan(PackLimits(1, 1), 1, Partition(boundaries), tuple(level for stage in stages for level in stage))
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "plan must be of version 3, got 1; make it again"),
        ({"layout": {"num_stages": 3}}, "layout must be of the plan's 2 stages, got 3"),
        ({"layout": {"num_stages": 2, "num_replicas": 3}}, "layout must have at most the 4 devices of 4xcard, got 6"),
        ({"layout": {"zero_stage": 3}}, "plan.layout: zero_stage must be 0 or 1 under a pipeline, got 3"),
        ({"cluster": {"nodes": 3}}, "plan.cluster.nodes must be a known key"),
        ({"partition": None}, "plan.partition must be a valid array, got None"),
        ({"micro_batches": 2.5}, "plan.micro_batches must be a valid integer, got 2.5"),
        ({"scedule": "1f1b"}, "plan.scedule must be a known key, got 'scedule'; did you mean 'schedule'"),
        ({"partition": [0, 3, 3]}, "boundaries must start at 0 and increase"),
        ({"recompute": ["3 full"]}, "recompute must have an entry for each of 2 stages, got 1"),
        ({"recompute": ["2 full", "2 none"]}, "recompute of stage 0 must count its 3 layers.* got '2 full'"),
        ({"recompute": ["3 some", "2 none"]}, "recompute of stage 0 must count its 3 layers.* got '3 some'"),
        ({"recompute": ["3 full", "none"]}, "recompute of stage 1 must count its 2 layers.* got 'none'"),
        ({"micro_batches": 0}, "micro_batches must be between 1 and 16777216, got 0"),
        ({"limits": {"vision_units": 9}}, "plan.limits must have the key 'llm_tokens', got none"),
        ({"predicted": {"step_seconds": 1, "samples_per_step": 1, "bubble_ratio": 0, "stages": []}}, "predicted must"),
    ],
)
def test_a_wrong_key_is_an_error_that_names_the_file(tmp_path, change, message):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["version", "cluster", "layout", "limits", "micro_batches", "partition", "recompute", "schedule", "predicted"],
)
def test_a_missing_key_is_named(tmp_path, key):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"plan must have the key '{key}', got none in {path}"):
        Plan.load(path)


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(ConfigError, match="plan must be a readable file"):
        Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text('{\n "version": }')
    with pytest.raises(ConfigError, match=r"plan must be JSON, got .*broken\.json, line 2"):
        Plan.load(tmp_path / "broken.json")


def test_a_plan_of_an_older_version_is_refused_as_such(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    content = json.loads(path.read_text()) | {"version": 2}
    del content["cluster"], content["layout"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="plan must be of version 3, got 2; make it again"):
        Plan.load(path)
    path.write_text(json.dumps({"version": 2, "layers": []}))
    with pytest.raises(ConfigError, match="plan must have the key 'cluster', got none in"):
        Plan.load(path)


def test_links_and_memory_follow_from_cluster_and_layout():
    assert PLAN.links == Links(1e9, reduce_bandwidth_bytes_per_second=1e9)
    assert PLAN.known_cluster.stage_memory_bytes(PLAN.layout) == (1000, 3000)
    unplanned = Plan(PackLimits(0, 7), 1, Partition((0, 1, 2)), ("full",) * 2)
    assert unplanned.layout == Layout(2)
    with pytest.raises(ConfigError, match="cluster of the plan must be known, got none; give one, such as 4x8xA100"):
        unplanned.links  # noqa: B018


@pytest.mark.parametrize(
    ("levels", "message"),
    [(("none",), "recompute must have a level for each of 5 layers, got 1"), (("some",) * 5, "got 'some'")],
)
def test_levels_must_fit_the_partition(levels, message):
    with pytest.raises(ConfigError, match=message):
        Plan(PackLimits(1, 1), 1, Partition((0, 3, 5)), levels)


def test_a_layout_shares_layers_as_the_profile_does():
    """Costs of two devices a layer say nothing of a layout of one, and the links would be another layout's."""
    plan = on_cluster(Plan(PackLimits(9, 4096), 1, Partition((0, 1, 2)), ("none",) * 2))
    shared, load = replace(fixed_profile([1, 1]), tensor_parallel=2), Load([1], [1])
    for ask in (lambda: plan.simulate(shared, [load]), lambda: plan.memory(shared, load[0])):
        with pytest.raises(ConfigError, match="num_tensor of layout must be the profile's 2, got 1"):
            ask()


def test_a_schedule_is_known():
    with pytest.raises(ConfigError, match="schedule must be one of 1f1b, zero-bubble, zero-bubble-lean, got 'gpipe'"):
        Plan(PackLimits(1, 1), 1, Partition((0, 1)), ("none",), schedule="gpipe")
