import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from omnibal.advise.wait import MEETINGS, wait
from omnibal.errors import ConfigError

# One step of two ranks, two micro-batches each: (vision, language) is (4, 1), (0, 2) on rank 0; (1, 2), (1, 5) on 1.
COSTS = {"vision": [[[4, 0], [1, 1]]], "language": [[[1, 2], [2, 5]]]}


def waits(layout, costs=COSTS):
    return {phase: seconds.tolist() for phase, seconds in wait(costs, layout).items()}


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_ranks_meet_once_a_step(layout):
    # Rank 1 takes 9 seconds, rank 0 takes 7: language costs rank 0 four seconds, of which vision gives two back.
    assert waits(layout) == {"vision": [[-2, 0]], "language": [[4, 0]]}


def test_zero_2_meets_after_every_micro_batch():
    # First rank 1 waits 5 - 3, then rank 0 waits 6 - 2.
    assert waits("zero2") == {"vision": [[1, 3]], "language": [[3, -1]]}


@pytest.mark.parametrize("layout", ["zero3", "fsdp"])
def test_ranks_meet_in_every_phase_where_parameters_are_gathered(layout):
    assert waits(layout) == {"vision": [[1, 3]], "language": [[4, 0]]}


def test_steps_are_apart():
    costs = {"vision": [[[1], [2]], [[5], [2]]]}
    assert waits("ddp", costs) == {"vision": [[1, 0], [0, 3]]}


@given(
    arrays(np.int64, st.tuples(*(st.integers(1, 3) for _ in range(4))), elements=st.integers(0, 50)),
    st.sampled_from(sorted(MEETINGS)),
)
def test_with_its_wait_every_rank_ends_a_step_at_the_same_time(seconds, layout):
    costs = {f"phase {number}": phase for number, phase in enumerate(seconds)}
    waited = sum(wait(costs, layout).values())
    ends = seconds.sum(axis=(0, 3)) + waited
    assert (waited >= 0).all()
    assert (ends == ends[:, :1]).all()
    sooner = [sum(wait(costs, other).values()).sum() for other in ("ddp", "zero2", "zero3")]
    assert sooner == sorted(sooner)  # the more often ranks meet, the more they wait


@pytest.mark.parametrize(
    ("costs", "layout", "message"),
    [
        (COSTS, "zero4", "layout must be one of ddp, zero1, zero2, zero3, fsdp, got 'zero4'"),
        ({}, "ddp", "costs must hold at least one phase, got none"),
        ({"vision": [[1]]}, "ddp", r"costs must be of one shape .*, got {'vision': \(1, 1\)}"),
        ({"vision": [[[1]]], "language": [[[1, 2]]]}, "ddp", "costs must be of one shape"),
        ({"vision": np.zeros((1, 0, 1))}, "ddp", "none of them 0"),
        ({"vision": [[[-1]]]}, "ddp", r"costs\['vision'\] must be finite and not negative, got -1"),
        ({"vision": [[[np.inf]]]}, "ddp", r"costs\['vision'\] must be finite and not negative, got inf"),
    ],
)
def test_bad_costs_are_named(costs, layout, message):
    with pytest.raises(ConfigError, match=message):
        wait(costs, layout)
