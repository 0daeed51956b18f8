from dataclasses import replace

import pytest

from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.models import Model
from omnibal.advise.tensor_costs import TensorCosts, check_weighable, degrees_that_fit
from omnibal.cluster import Cluster
from omnibal.data.synthetic import tiled_lengths
from omnibal.errors import ConfigError

MACHINES = Cluster.parse("8xA100-80GB")
RECORDS = Model.known("InternVL3-8B").records
COSTS = TensorCosts(RECORDS, MACHINES.device)


def estimate(recipe, machines=MACHINES):
    return Scenario(tiled_lengths(2000, seed=1), COSTS(1, 1), machines, 64).estimate(recipe)


def test_frozen_parts_and_adapters_are_passed_on():
    frozen, adapted = replace(COSTS, frozen=("vision",)), replace(COSTS, lora_rank=16)
    assert frozen(1, 2).frozen_front > 0 == COSTS(1, 2).frozen_front
    assert adapted(1, 2).adapter_parameters and not COSTS(1, 2).adapter_parameters
    assert adapted(1, 2).tensor_parallel == {"vision": 1, "language": 2}
    assert sum(layer.gradient_bytes for layer in adapted(2, 2).layers) < 0.05 * sum(
        layer.gradient_bytes for layer in COSTS(2, 2).layers
    )


def test_what_is_left_out_is_named_with_its_reason():
    assert COSTS.left_out(Cluster.parse("2x2xA100-80GB"))[0] == "4, 8 tensor ranks: they would cross nodes of 2"
    assert COSTS.left_out(MACHINES) == [
        "8 tensor ranks of the LLM: tensor_parallel must divide the heads 28 of decoder_block.0, got 8"
    ]
    measured = replace(COSTS, records=None)
    assert measured.left_out(MACHINES) == [
        "tensor ranks: these costs are of one device; costs counted of a model tell all"
    ]
    with pytest.raises(ConfigError, match="counted costs, got measured ones for 2"):
        measured(1, 2)


def test_one_device_and_a_step_of_few_samples_are_refused():
    with pytest.raises(ConfigError, match="cluster must have at least 2 devices for layouts to differ, got A100-80GB"):
        check_weighable(Cluster.parse("A100-80GB"), 8)
    with pytest.raises(ConfigError, match="the 8 devices of 8xA100-80GB for layouts to be weighed, got 7; take more"):
        check_weighable(MACHINES, 7)
    check_weighable(MACHINES, 8)


def test_the_fewest_devices_that_must_share_a_sample():
    fits = estimate(Recipe("zero3", batch=1, micro_batches=8))
    assert degrees_that_fit(fits, COSTS) == ()
    large = estimate(Recipe("zero3", batch=4, micro_batches=2, recompute="none"))
    shared, divided = degrees_that_fit(large, COSTS)
    assert shared == "4 tensor ranks" and divided.startswith("sequence parallelism of degree ")
    # Half as many would not do: what a micro-batch keeps is divided by the degree, and the state is not.
    degree, memory = int(divided.rpartition(" ")[2]), large.memory
    kept, room = large.peaks[0] - memory.state_bytes, 0.95 * memory.budget_bytes - memory.state_bytes
    assert kept / degree <= room < kept / (degree / 2)


def test_where_the_state_alone_is_too_large_no_sequence_parallelism_helps():
    small = estimate(Recipe("ddp", batch=1, micro_batches=8), Cluster.parse("8xA100-40GB"))
    assert not any("sequence" in way for way in degrees_that_fit(small, COSTS))
