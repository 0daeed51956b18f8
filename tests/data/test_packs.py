import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import Packs, random_padded_steps
from omnibal.errors import ConfigError, DataError

pack_rows = st.lists(st.lists(st.integers(0, 19), max_size=5), max_size=8)


def rows(packs):
    return [pack.tolist() for pack in packs]


@given(pack_rows)
def test_lists_there_and_back(lists):
    packs = Packs.from_lists(lists)
    assert rows(packs) == lists
    assert len(packs) == len(lists)
    assert packs.sizes.tolist() == [len(row) for row in lists]


@given(pack_rows, st.data())
def test_take_reorders_and_leaves_out(lists, data):
    order = data.draw(st.lists(st.sampled_from(range(len(lists))))) if lists else []
    assert rows(Packs.from_lists(lists).take(order)) == [lists[pack] for pack in order]


@given(pack_rows, st.data())
def test_packs_between_two_others(lists, data):
    first = data.draw(st.integers(0, len(lists)))
    last = data.draw(st.integers(first, len(lists)))
    assert rows(Packs.from_lists(lists).between(first, last)) == lists[first:last]


@given(st.lists(pack_rows, max_size=4))
def test_concatenate(parts):
    joined = Packs.concatenate(Packs.from_lists(lists) for lists in parts)
    assert rows(joined) == [row for lists in parts for row in lists]


@given(pack_rows, st.integers(0, 2**32 - 1))
def test_loads_are_sums_over_samples(lists, seed):
    generator = np.random.default_rng(seed)
    vision, tokens, squares = generator.integers(0, 2**20, (3, 20))
    lengths = SampleLengths(vision, tokens, vision_squared=squares)
    packs = Packs.from_lists(lists)
    assert packs.vision_units(lengths).tolist() == [sum(vision[s] for s in row) for row in lists]
    assert packs.llm_tokens(lengths).tolist() == [sum(tokens[s] for s in row) for row in lists]
    assert packs.load(lengths) == Load(
        [sum(vision[s] for s in row) for row in lists],
        [sum(tokens[s] for s in row) for row in lists],
        [sum(tokens[s] ** 2 for s in row) for row in lists],
        [sum(squares[s] for s in row) for row in lists],
    )


def test_indexing_from_both_ends():
    packs = Packs([3, 1, 2], [0, 1, 1, 3])
    assert packs[0].tolist() == [3]
    assert packs[-1].tolist() == [1, 2]
    assert packs[-2].tolist() == []
    for outside in (3, -4):
        with pytest.raises(IndexError):
            packs[outside]


@pytest.mark.parametrize("starts", [[], [0], [1, 3], [0, 2], [0, 3, 2, 3]])
def test_starts_must_divide_the_samples(starts):
    with pytest.raises(DataError, match="starts must rise"):
        Packs([3, 1, 2], starts)


def test_samples_must_be_integers():
    with pytest.raises(DataError, match="samples must be one-dimensional and integer"):
        Packs([0.5], [0, 1])


LENGTHS = SampleLengths(np.arange(30) % 3, np.arange(30) + 5, vision_squared=np.arange(30) % 5)


def test_every_sample_is_padded_to_the_longest_of_its_micro_batch():
    load = random_padded_steps(LENGTHS, batch_size=3, num_replicas=2, micro_batches=2, steps=9, seed=4)
    assert load.shape == (2, 2, 2)
    order = np.random.default_rng(4).permutation(30)[:24].reshape(2, 2, 2, 3)
    for place in np.ndindex(2, 2, 2):
        samples, longest = order[place], max(order[place]) + 5
        assert load.llm_tokens[place] == 3 * longest
        assert load.llm_tokens_squared[place] == 3 * longest**2
        assert load.vision_units[place] == sum(samples % 3)
        assert load.vision_squared[place] == sum(samples % 5)


def test_no_more_steps_than_asked_for():
    assert random_padded_steps(LENGTHS, batch_size=1, num_replicas=1, micro_batches=2, steps=4).shape == (4, 1, 2)


def test_a_step_needs_enough_samples():
    with pytest.raises(ConfigError, match="lengths must hold a step of 32 samples, got 30"):
        random_padded_steps(LENGTHS, batch_size=4, num_replicas=4, micro_batches=2, steps=1)
