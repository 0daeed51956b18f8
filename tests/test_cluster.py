import json
import math
from dataclasses import asdict, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from omnibal.cluster import (
    OVERHEAD_BYTES,
    Cluster,
    ClusterValue,
    Encoder,
    Layout,
    Links,
    PipelinePosition,
)
from omnibal.device import DEVICES, Device
from omnibal.errors import ConfigError

CARD = {"name": "card", "memory_bytes": 24e9, "link_bytes_per_second": 16e9}
RECORD = {"num_nodes": 1, "devices_per_node": 2, "device": "A100-80GB"}


@pytest.mark.parametrize("text", ["A100-80GB", "8xA100-80GB", "4x8xA100-80GB", "2x1xH200-141GB"])
def test_a_cluster_is_written_as_it_is_read(text):
    assert str(Cluster.parse(text)) == text
    assert Cluster.of(text) == Cluster.parse(text) == Cluster.of(Cluster.parse(text))


def test_a_cluster_in_short_is_nodes_by_devices_by_name():
    assert Cluster.parse(" 4x8xa100 ") == Cluster(4, 8, DEVICES["A100-80GB"])
    assert Cluster.parse("8xH100") == Cluster(1, 8, DEVICES["H100-80GB"])
    assert Cluster.parse("NVIDIA A100-SXM4-40GB") == Cluster(1, 1, DEVICES["A100-40GB"])
    assert str(Cluster.parse("1x8xA100-80GB")) == "8xA100-80GB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cluster must be such as '4x8xA100-80GB', '8xA100-80GB' or 'A100-80GB', got ''"),
        ("0x8xA100", "num_nodes must be positive, got 0"),
        ("2x3x4xA100", "cluster must be such as .*, got '2x3x4xA100'"),
        ("4 A100", "cluster must be such as .*, got '4 A100'; did you mean '4xA100-80GB'?"),
        ("8A100", "cluster must be such as .*, got '8A100'; did you mean '8xA100-80GB'?"),
        ("2x8rtx4090", "cluster must be such as .*, got '2x8rtx4090'; did you mean '2x8xRTX-4090-24GB'?"),
        ("8A9000", "device must begin like one of .*, got 'A9000'; did you mean"),
        ("8xA9000", "device must begin like one of .*, got 'A9000'; did you mean"),
        ("8xA1000", "got 'A1000'; did you mean 'A100-.*'.* a record with \"name\", \"memory_bytes\" and"),
        ("8xTPU", "got 'TPU'; for another one give a record"),
        ("99999x99999xA100", "a cluster must have at most 1000000 devices, got 9999800001"),
    ],
)
def test_what_is_no_cluster_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Cluster.parse(text)


@pytest.mark.parametrize(
    ("said", "name"),
    [("A10", "A10-24GB"), ("L4", "L4-24GB"), ("l40s", "L40S-48GB"), ("RTX 4090", "RTX-4090-24GB"),
     ("rtx3090", "RTX-3090-24GB"), ("NVIDIA GeForce RTX 3090", "RTX-3090-24GB"), ("h100", "H100-80GB"),
     ("H100-PCIe", "H100-PCIe-80GB"), ("NVIDIA B200", "B200-180GB"), ("mi300x", "MI300X-192GB")],
)  # fmt: skip
def test_devices_go_by_the_names_that_people_give_them(said, name):
    assert Cluster.parse(f"8x{said}").device == DEVICES[name]


LAYOUTS = [
    Layout(),
    Layout(4, 2),
    Layout(2, 3, num_tensor=2),
    Layout(3, 2, encoder=Encoder(1, 4)),
    Layout(4, 1, num_tensor=4, encoder=Encoder(2, 3)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_one_place(layout):
    places = [
        PipelinePosition(stage, replica, tensor)
        for stage in range(layout.num_stages)
        for replica, tensor in product(*map(range, layout.shape(stage)))
    ]
    assert [layout.position(rank) for rank in range(layout.num_devices)] == places
    assert [layout.rank(*place) for place in places] == [*range(layout.num_devices)]
    assert [rank for stage in range(layout.num_stages) for rank in layout.ranks(stage)] == [*range(layout.num_devices)]
    with pytest.raises(ConfigError, match=f"rank must be below the layout's {layout.num_devices} devices, got "):
        layout.position(layout.num_devices)


def test_a_layout_agrees_with_deepspeeds_topology():
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology").PipeModelDataParallelTopology(2, 4, 3)
    layout = Layout(num_stages=2, num_replicas=3, num_tensor=4)
    for rank in range(layout.num_devices):
        place = topology.get_coord(rank)
        assert layout.position(rank) == (place.pipe, place.data, place.model)


def test_an_encoder_of_its_own_is_said_and_checked():
    assert str(Layout(3, 2, encoder=Encoder(1, 4))) == "1 stage × 4 replicas, then 2 stages × 2 replicas"
    with pytest.raises(ConfigError, match="num_replicas of the encoder must be positive, got 0"):
        Layout(2, encoder=Encoder(1, 0))
    with pytest.raises(ConfigError, match="num_stages of the encoder must be less than all 2, got 2"):
        Layout(2, encoder=Encoder(2, 1))


def test_a_record_gives_numbers_of_ones_own():
    cluster = Cluster.of({"num_nodes": 2, "devices_per_node": 2, "device": CARD, "node_bytes_per_second": 1e9,
                          "latency_seconds": 1e-5, "memory_bytes": [20e9, 24e9, 24e9, 22e9]})  # fmt: skip
    assert cluster.device == Device(**CARD)
    assert cluster.links_of(Layout(2, 2)) == Links(1e9, reduce_bandwidth_bytes_per_second=16e9, latency_seconds=1e-5)
    assert cluster.stage_memory_bytes(Layout(2, 2)) == (20 * 10**9, 22 * 10**9)
    assert Cluster.of(RECORD | {"memory_bytes": 4e10}).stage_memory_bytes(Layout(2)) == (4 * 10**10,) * 2


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.parse("4x8xA100-80GB"),
        Cluster(1, 2, Device(**CARD), memory_bytes=(1e10, 2e10), overhead_bytes=7),
        Cluster(3, 1, Device(**CARD), links=Links(math.inf, latency_seconds=0.25)),
    ],
)
def test_a_cluster_comes_back_from_json(cluster):
    assert Cluster.of(json.loads(json.dumps(asdict(cluster)))) == cluster


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (5, "cluster must be a string such as '4x8xA100-80GB' or a record, got 5"),
        ({"devices_per_node": 2, "device": "A100"}, "cluster must have the key 'num_nodes', got none"),
        (RECORD | {"nodes": 2}, "cluster.nodes must be a known key, got 'nodes'; did you mean 'num_nodes'"),
        (RECORD | {"devices_per_node": 2.5}, "cluster.devices_per_node must be a valid integer, got 2.5"),
        (RECORD | {"device": "B9"}, "cluster.device must begin like one of .*, got 'B9'"),
        (RECORD | {"device": CARD | {"memory": 1}}, "cluster.device.memory must be a known key.* mean 'memory_bytes'"),
        (
            RECORD | {"num_nodes": 2, "device": CARD},
            "node_bytes_per_second must be given for 2 nodes of card, got none",
        ),
        (RECORD | {"node_bytes_per_second": 0}, "node_bytes_per_second must be at least 1 byte per second, got 0"),
        (RECORD | {"latency_seconds": -1}, "latency_seconds must lie between 0 and 3600, got -1"),
        (RECORD | {"memory_bytes": [1e10]}, "memory_bytes must be one number, or one for each of 2 devices, got 1"),
        (RECORD | {"memory_bytes": 2**31}, f"memory_bytes must be finite and more than the {OVERHEAD_BYTES} bytes"),
        (RECORD | {"overhead_bytes": -1}, "overhead_bytes must not be negative, got -1"),
    ],
)
def test_a_wrong_record_is_refused(record, message):
    with pytest.raises(ConfigError, match=message):
        Cluster.of(record)


def test_records_may_hold_a_cluster_in_either_form():
    class Section(BaseModel):
        cluster: ClusterValue | None = None

    assert Section.model_validate({"cluster": "8xA100"}).cluster == Cluster.parse("8xA100-80GB")
    assert Section.model_validate({"cluster": RECORD}).cluster == Cluster.parse("2xA100-80GB")


@given(*[st.integers(1, 4)] * 5)
def test_the_slowest_link_between_neighbouring_ranks_counts(stages, replicas, tensor, nodes, devices):
    layout, cluster = Layout(stages, replicas, num_tensor=tensor), Cluster(nodes, devices, DEVICES["H100-80GB"])
    if layout.num_devices > cluster.num_devices:
        with pytest.raises(ConfigError, match=f"layout must have at most the {cluster.num_devices} devices"):
            cluster.links_of(layout)
        return
    place = {  # DeepSpeed's axes pipe, data, model
        (s, r, t): rank // devices
        for rank, (s, r, t) in enumerate(
            (s, r, t) for s in range(stages) for r in range(replicas) for t in range(tensor)
        )
    }
    apart = [place[s, r, t] != place[s + 1, r, t] for s, r, t in place if s + 1 < stages]
    reduced = [place[s, r, t] != place[s, 0, t] for s, r, t in place]
    found = cluster.links_of(layout)
    assert found.bandwidth_bytes_per_second == (50e9 if any(apart) else 450e9)
    assert found.between_replicas == (50e9 if any(reduced) else 450e9)


def test_links_that_were_given_take_the_place_of_derived_ones():
    given_links = Links(3.0)
    assert replace(Cluster.parse("4x8xA100"), links=given_links).links_of(Layout(4, 8)) == given_links


def test_a_layout_says_how_gradients_are_summed():
    assert Layout().sums_float32
    assert not Layout(zero_stage=0).sums_float32
    assert not Layout(accumulate_float32=False).sums_float32
    assert not Layout(precision="float32", accumulate_float32=True).sums_float32
    assert str(Layout(4, 1, num_tensor=2)) == "4 stages × 1 replica × 2 tensor ranks"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_stages": 0}, "num_stages must be positive, got 0"),
        ({"num_replicas": -1}, "num_replicas must be positive, got -1"),
        ({"precision": "float16"}, "precision must be one of bfloat16, float32, got 'float16'"),
        ({"num_tensor": 0}, "num_tensor must be positive, got 0"),
        ({"zero_stage": 2}, "zero_stage must be 0 or 1 under a pipeline, got 2"),
        ({"zero_stage": 0, "accumulate_float32": True}, "zero_stage must be 1 where 16-bit gradients are summed in"),
    ],
)
def test_impossible_layouts_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Layout(**wrong)


def test_replicas_talk_as_fast_as_stages_unless_said_otherwise():
    assert Links(10.0).between_replicas == 10.0
    assert Links(10.0, reduce_bandwidth_bytes_per_second=3.0).between_replicas == 3.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bandwidth_bytes_per_second": 0}, "bandwidth_bytes_per_second must be at least 1 byte per second, got 0"),
        ({"bandwidth_bytes_per_second": 1e-291}, "must be at least 1 byte per second, got 1e-291"),
        ({"bandwidth_bytes_per_second": math.nan}, "must be at least 1 byte per second, got nan"),
        ({"reduce_bandwidth_bytes_per_second": 0}, "reduce_bandwidth_bytes_per_second must be at least 1 byte"),
        ({"latency_seconds": 3601}, "latency_seconds must lie between 0 and 3600, got 3601"),
        ({"latency_seconds": math.nan}, "latency_seconds must lie between 0 and 3600, got nan"),
    ],
)
def test_links_without_end_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Links(**{"bandwidth_bytes_per_second": 1.0} | wrong)
