from dataclasses import replace

import numpy as np
import pytest

from omnibal.cluster import Encoder, Layout, Links
from omnibal.cost import CostModel, Load
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import Operation, Schedule, encoder_schedule, one_f_one_b, schedule_of, zero_bubble
from omnibal.pipeline.search import PartitionProblem
from omnibal.pipeline.simulate import simulate, simulate_step
from omnibal.pipeline.times import Unit, numbered, step_times
from tests.pipeline.profiles import fixed_profile
from tests.pipeline.random_problems import all_partitions, random_arguments, random_profile
from tests.pipeline.test_simulate_step import packs

FREE = Links(np.inf)


def simulate_units(profile, partition, loads, layout, links, **more):
    return simulate_step(profile, partition, loads, links, layout=layout, **more)


def units(num_stages, replicas, encoder_replicas, encoder_stages=1, **more):
    return Layout(num_stages, replicas, encoder=Encoder(encoder_stages, encoder_replicas), precision="float32", **more)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_units_of_equal_replicas_are_the_pipeline_that_is_cut_there(seed, zero_stage):
    arguments = random_arguments(seed)
    profile, loads, links = arguments["profile"], arguments["loads"], arguments["links"]
    for cuts in [(1, 2), (2, 3), (1, 3)]:
        partition = Partition((0, *cuts, len(profile.layers)))
        pipeline = simulate_step(profile, partition, loads, links, zero_stage=zero_stage, mode="overlap")
        for encoder_stages in (1, 2):
            layout = units(3, len(loads), len(loads), encoder_stages, zero_stage=zero_stage)
            found = simulate_units(profile, partition, loads, layout, links)
            assert found.step_seconds == pytest.approx(pipeline.step_seconds, rel=1e-9)


def test_an_encoder_that_costs_nothing_leaves_the_pipeline_of_the_llm():
    profile = fixed_profile([0, 2, 3])
    for encoder_replicas in (1, 2, 4):
        found = simulate_units(profile, Partition((0, 1, 2, 3)), packs(6, 2), units(3, 2, encoder_replicas), FREE)
        alone = simulate_step(fixed_profile([2, 3]), Partition((0, 1, 2)), packs(6, 2), FREE, mode="overlap")
        assert found.step_seconds == pytest.approx(alone.step_seconds, rel=1e-9)


def test_an_encoder_serves_two_llms_in_turns():
    # Forward 1 s, backward 2 s on either; the encoder runs 8 of both: 24 s, and waits for the first gradient.
    found = simulate_units(fixed_profile([1, 1]), Partition((0, 1, 2)), packs(4, 2), units(2, 2, 1), FREE)
    operations, numbers, lengths = found.replicas[0].table[:3]
    rows = [
        [(Operation(kind).name, number) for kind, number in zip(*both, strict=True)][:length]
        for *both, length in zip(operations, numbers, lengths, strict=True)
    ]
    assert [entry[1] for entry in rows[1]] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [entry[1] for entry in rows[2]] == [1, 1, 3, 3, 5, 5, 7, 7]
    assert rows[0][:4] == [("F", 0), ("F", 1), ("F", 2), ("BW", 0)]
    assert found.replicas[0].busy_seconds.tolist() == [24, 12, 12] and found.step_seconds == 8 * 3 + 1


def test_two_encoders_take_turns_for_one_llm():
    found = simulate_units(fixed_profile([4, 1]), Partition((0, 1, 2)), packs(4, 1), units(2, 1, 2), FREE)
    assert found.replicas[0].table.lengths.tolist() == [4, 4, 8]
    assert found.replicas[0].busy_seconds.tolist() == [24, 24, 12]
    one = simulate_units(fixed_profile([4, 1]), Partition((0, 1, 2)), packs(4, 1), units(2, 1, 1), FREE)
    assert found.step_seconds < 0.65 * one.step_seconds


def test_rows_have_names_and_events_as_those_of_a_pipeline():
    profile = fixed_profile([1, 1, 1])
    (found,) = simulate_units(profile, Partition((0, 1, 2, 3)), packs(2, 2), units(3, 2, 1), FREE).replicas
    assert found.row_names == ["encoder 0", "LLM 0, stage 0", "LLM 0, stage 1", "LLM 1, stage 0", "LLM 1, stage 1"]
    assert found.events[0] == (0, Operation.F, 0, 0.0, 1.0) and len(found.events) == 2 * (4 + 2 * 2 + 2 * 2)
    assert found.bubble_ratio == pytest.approx(1 - found.busy_seconds.mean() / found.makespan_seconds)


def test_a_frozen_encoder_runs_forward_only():
    profile = fixed_profile([1, 1, 1])
    frozen = replace(profile, layers=(replace(profile.layers[0], trainable=False), *profile.layers[1:]))
    found = simulate_units(frozen, Partition((0, 1, 2, 3)), packs(4, 2), units(3, 2, 1), FREE)
    assert found.replicas[0].table.lengths.tolist() == [8, 8, 8, 8, 8] and found.replicas[0].busy_seconds[0] == 8
    assert set(found.replicas[0].table.operations[0].tolist()) == {int(Operation.F)}


def test_gradients_are_summed_over_the_replicas_of_their_own_part():
    profile = fixed_profile([1, 1])
    heavy = replace(profile, layers=tuple(replace(layer, gradient_bytes=100) for layer in profile.layers))
    sums = {}
    for encoder_replicas in (1, 2, 4):
        layout = units(2, 4, encoder_replicas, zero_stage=0)
        free = simulate_units(heavy, Partition((0, 1, 2)), packs(4, 4), layout, Links(np.inf))
        slow = simulate_units(
            heavy, Partition((0, 1, 2)), packs(4, 4), layout, Links(np.inf), encoder_links=Links(10),
        )  # fmt: skip
        sums[encoder_replicas] = slow.step_seconds - free.step_seconds
    # A ring of r replicas moves 2 (r - 1) / r times the gradients.
    assert sums == pytest.approx({1: 0, 2: 10, 4: 15})


def test_the_encoders_depth_follows_the_replicas():
    assert encoder_schedule(units(3, 2, 2), 8) == replace(one_f_one_b(3, 8), stages=one_f_one_b(3, 8).stages[:1])
    assert encoder_schedule(units(3, 2, 1), 8).in_flight == (5,)
    assert encoder_schedule(units(5, 1, 2), 8).in_flight == (3,)
    assert encoder_schedule(units(5, 1, 2), 7).micro_batches == 4


def test_stages_of_units_number_the_micro_batches_of_their_own_replica():
    one_for_two = schedule_of(units(3, 2, 1), 4, "zero-bubble")
    assert [one_for_two.micro_batches_of(stage) for stage in range(3)] == [8, 4, 4]
    assert one_for_two.stages[0] == encoder_schedule(units(3, 2, 1), 4).stages[0]
    assert one_for_two.stages[1:] == zero_bubble(2, 4).stages
    frozen = one_for_two.with_frozen_front(1)
    assert [len(stage) for stage in frozen.stages] == [8, 8, 12]
    assert (frozen.replicas, frozen.in_flight) == ((1, 2, 2), (0, 2, 1))
    two_for_one = schedule_of(units(2, 1, 2), 4, "1f1b")
    assert [two_for_one.micro_batches_of(stage) for stage in range(2)] == [2, 4]


def test_an_encoder_receives_its_first_gradient_where_the_llm_sends_it():
    """Before it sends the last of its first activations, for which the LLM's replica has no room yet."""
    for layout in (units(2, 1, 1), units(2, 2, 1), units(2, 1, 2), units(4, 4, 2), units(4, 2, 4)):
        table = schedule_of(layout, 8, "1f1b")
        order = [f"{operation.name} {micro_batch}" for operation, micro_batch in table.blocking[0]]
        last = table.in_flight[0] - 1
        first_gradient = order.index("RECEIVE_GRADIENT 0")
        assert order[first_gradient - 1 : first_gradient + 3] == [
            f"F {last}", "RECEIVE_GRADIENT 0", f"SEND_ACTIVATION {last}", "BW 0",
        ]  # fmt: skip


def test_units_take_no_seconds_by_stage():
    with pytest.raises(ConfigError, match=r"as many on every stage, got \(1, 2\)"):
        simulate(schedule_of(units(2, 2, 1), 4, "1f1b"), np.ones((4, 2)), np.ones((4, 2)))


def test_replicas_that_cannot_share_a_step_are_refused():
    with pytest.raises(ConfigError, match=r"must divide the step's 3 micro-batches, got \(2, 1\)"):
        Schedule(one_f_one_b(2, 3).stages, 3, (2, 1))
    with pytest.raises(ConfigError, match=r"a positive number for each of 2 stages, got \(1,\)"):
        Schedule(one_f_one_b(2, 3).stages, 3, (1,))


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="must divide each other, got 2 and 3"):
        simulate_units(fixed_profile([1, 1]), Partition((0, 1, 2)), packs(4, 3), units(2, 3, 2), FREE)
    with pytest.raises(ConfigError, match="loads' 2 replicas"):
        simulate_units(fixed_profile([1, 1]), Partition((0, 1, 2)), packs(4, 2), units(2, 1, 1), FREE)
    with pytest.raises(ConfigError, match=r"must divide the 4 packs of a step .*, got 8"):
        simulate_units(fixed_profile([1, 1]), Partition((0, 1, 2)), packs(4, 1), units(2, 1, 8), FREE)


@pytest.mark.parametrize(("replicas", "encoder_replicas"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_the_bound_is_what_a_step_takes_where_packs_are_few(replicas, encoder_replicas, micro_batches):
    profile = fixed_profile([1, 2, 3])
    profile = replace(profile, layers=(replace(profile.layers[0], module="vision"), *profile.layers[1:]))
    layout, loads = units(3, replicas, encoder_replicas), packs(micro_batches, replicas)
    found = simulate_units(profile, Partition((0, 1, 2, 3)), loads, layout, FREE)
    unit = Unit(1, encoder_replicas, FREE)
    times = step_times(profile, [numbered(Load.stack(loads))], FREE, num_replicas=replicas, unit=unit)
    problem = PartitionProblem(profile, times, schedule_of(layout, micro_batches, "1f1b"), "overlap")
    bound = problem.lower_bound_seconds
    assert 0.93 * found.step_seconds <= bound <= found.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_no_cut_of_units_with_a_frozen_encoder_is_faster_than_its_bound(seed):
    """A frozen encoder waits for no gradient, however uneven the packs are."""
    rng, micro_batches = np.random.default_rng(seed), 4
    profile = random_profile(rng, 2, 2)
    border = encoder_layers(profile.layers)
    frozen = (replace(layer, trainable=False, weight_seconds=CostModel()) for layer in profile.layers[:border])
    profile = replace(profile, layers=(*frozen, *profile.layers[border:]))
    replicas, encoder_replicas = ((2, 1), (1, 2), (2, 2), (1, 1))[seed % 4]
    layout, links = units(3, replicas, encoder_replicas), Links(1e3)
    loads = [
        Load(rng.choice([0, 1, 30], micro_batches), rng.choice([0, 100, 8000], micro_batches)) for _ in range(replicas)
    ]
    unit = Unit(border, encoder_replicas, links)
    times = step_times(profile, [numbered(Load.stack(loads))], links, num_replicas=replicas, unit=unit)
    schedule = schedule_of(layout, micro_batches, ("1f1b", "zero-bubble")[seed % 2])
    problem = PartitionProblem(profile, times, schedule, "overlap")
    partitions = np.array([cut for cut in all_partitions(len(profile.layers), 3) if cut[1] == border])
    assert (problem.bound(partitions) <= problem.evaluate(partitions) * (1 + 1e-9)).all()
