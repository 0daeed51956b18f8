import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.data.epoch import Epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.errors import ConfigError

LENGTHS = SampleLengths(np.arange(200) % 7, np.arange(200) % 11)


class Windows:
    """An arrangement whose packs are given: window after window, for steps of ``step_packs`` packs."""

    def __init__(self, windows, step_packs):
        self.planned = []
        self._windows = [Packs.from_lists(window) for window in windows]
        steps = [len(window) // step_packs for window in windows]
        self._starts = np.concatenate([[0], np.cumsum(steps)])

    def window_starts(self, epoch):
        return self._starts

    def window(self, epoch, index):
        assert epoch == 0
        self.planned.append(index)
        return self._windows[index]


def stream(windows, *, begun_by, ranks, packs_done=0, split=True):
    arrangement = Windows(windows, begun_by.step_packs)
    num_samples = sum(len(pack) for window in windows for pack in window)
    spec = PackingSpec(
        LENGTHS.take(np.arange(num_samples)), PackLimits(6, 10), method="balanced" if split else "random"
    )
    return Epoch(spec, arrangement, 0, ranks, begun_by=begun_by, packs_done=packs_done), arrangement


def rows(step):
    return [pack.tolist() for pack in step.packs]


def single_packs(*window_sizes):
    """Windows of packs with one sample each, numbered through."""
    ends = np.cumsum(window_sizes)
    return [[[sample] for sample in range(end - size, end)] for size, end in zip(window_sizes, ends, strict=True)]


def test_ranks_that_began_an_epoch_get_its_steps_untouched():
    windows = [[[0, 1], [2], [3], [4]], [[5], [6, 7], [8], []]]
    own = Ranks(2, 1)
    packs, _ = stream(windows, begun_by=own, ranks=own)
    assert packs.last_step == 4
    assert [rows(packs.step(index)) for index in range(4)] == [[[0, 1], [2]], [[3], [4]], [[5], [6, 7]], [[8], []]]
    packs, _ = stream(windows, begun_by=own, ranks=own, packs_done=4)
    assert [rows(packs.step(index)) for index in range(packs.last_step)] == [[[5], [6, 7]], [[8], []]]


def test_other_ranks_cut_the_same_packs_into_steps_of_their_own():
    packs, _ = stream(single_packs(4, 4, 4), begun_by=Ranks(4, 1), ranks=Ranks(3, 1), packs_done=4)
    steps = [sorted(packs.step(index).packs.samples.tolist()) for index in range(packs.last_step)]
    assert steps[:2] == [[4, 5, 6], [7, 8, 9]]
    assert steps[2] == [10, 11]
    assert packs.step(2).packs.sizes.tolist().count(0) == 1


def test_the_last_step_splits_packs_to_have_work_for_every_rank():
    packs, _ = stream([[[0, 1, 2, 3], [4, 5]]], begun_by=Ranks(2, 1), ranks=Ranks(4, 1))
    assert packs.last_step == 1
    assert sorted(packs.step(0).packs.samples.tolist()) == list(range(6))
    assert packs.step(0).packs.sizes.min() > 0


def test_or_leaves_packs_as_they_are():
    packs, _ = stream([[[0, 1, 2, 3], [4, 5]]], begun_by=Ranks(2, 1), ranks=Ranks(4, 1), split=False)
    assert packs.last_step == 1
    assert sorted(map(tuple, rows(packs.step(0)))) == [(), (), (0, 1, 2, 3), (4, 5)]


@pytest.mark.parametrize("third", [[2], [2, 3, 4, 5]])
def test_empty_packs_are_not_handed_on_to_other_ranks(third):
    packs, _ = stream([[[0], [1]], [third, []]], begun_by=Ranks(1, 2), ranks=Ranks(1, 1), split=False)
    assert [rows(packs.step(index)) for index in range(packs.last_step)] == [[[0]], [[1]], [third]]
    packs, _ = stream([[[0], [1]], [[2], []]], begun_by=Ranks(1, 2), ranks=Ranks(1, 1))
    assert packs.last_step == 3
    assert [rows(packs.step(index)) for index in range(3)] == [[[0]], [[1]], [[2]]]
    packs, _ = stream([[[0], [1]], [[2], []]], begun_by=Ranks(1, 2), ranks=Ranks(1, 1), packs_done=4)
    assert packs.last_step == 0


def test_micro_batches_get_packs_of_like_load_the_smallest_before_the_others_from_the_largest_on():
    windows = [[[0], [1], [2], [3], [4], [5]]]  # loads as the numbers
    packs, _ = stream(windows, begun_by=Ranks(6, 1), ranks=Ranks(2, 3))
    shaped = packs.step(0).packs.samples.reshape(2, 3)  # rank, micro-batch
    assert [sorted(pair) for pair in shaped.T.tolist()] == [[0, 1], [4, 5], [2, 3]]


def test_windows_are_planned_once_each_also_where_steps_lie_across_them():
    packs, arrangement = stream(single_packs(4, 4, 4, 4), begun_by=Ranks(4, 1), ranks=Ranks(3, 1))
    samples = [sample for index in range(packs.last_step) for sample in packs.step(index).packs.samples.tolist()]
    assert sorted(samples) == list(range(16))
    assert arrangement.planned == [0, 1, 2, 3]


def test_a_step_in_the_middle_plans_its_own_window_alone():
    packs, arrangement = stream(single_packs(4, 4, 4, 4), begun_by=Ranks(2, 1), ranks=Ranks(2, 1))
    assert rows(packs.step(5)) == [[10], [11]]
    assert arrangement.planned == [2]


def test_the_next_pack_is_the_first_that_has_samples_whoever_asks():
    windows = [[[0], [1], [], [2]]]
    for ranks in (Ranks(4, 1), Ranks(1, 1)):
        packs, _ = stream(windows, begun_by=Ranks(4, 1), ranks=ranks)
        assert packs.next_pack(0) == [0]
        assert packs.next_pack(packs.last_step) == []
    packs, _ = stream([[[], [1]]], begun_by=Ranks(2, 1), ranks=Ranks(2, 1))
    assert packs.next_pack(0) == [1]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 5), st.data())
def test_every_pack_from_a_position_on_once(steps_per_window, begun_by, ranks, data):
    windows = single_packs(*(steps * begun_by for steps in steps_per_window))
    total = sum(steps_per_window) * begun_by
    packs_done = data.draw(st.integers(0, total))
    packs, _ = stream(windows, begun_by=Ranks(begun_by, 1), ranks=Ranks(ranks, 1), packs_done=packs_done)
    steps = [sorted(packs.step(index).packs.samples.tolist()) for index in range(packs.last_step)]
    assert [sample for step in steps for sample in step] == list(range(packs_done, total))
    assert [packs.packs_done(index) for index in range(len(steps) + 1)] == [
        min(packs_done + index * ranks, total) for index in range(len(steps) + 1)
    ]


@pytest.mark.parametrize(("shape", "name"), [((0, 1), "num_replicas"), ((1, 0), "micro_batches")])
def test_ranks_are_at_least_one(shape, name):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        Ranks(*shape)
