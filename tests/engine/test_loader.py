"""Steps are counted right where epochs differ in their number of steps."""

import pytest

from omnibal.data.limits import PackLimits
from omnibal.engine.loader import Loader
from omnibal.engine.reading import PackReader
from omnibal.feeds.sampler import BalancedBatchSampler
from tools.synthetic import tiled_lengths

LENGTHS = tiled_lengths(400, seed=5, text_share=0.2)
EPOCHS = 4


def loader(method):
    sampler = BalancedBatchSampler(LENGTHS, PackLimits(9, 4096), num_replicas=1, rank=0, micro_batches=1, method=method)
    reader = PackReader(view="nothing", pixel_shape=(3, 8, 8))
    return Loader(reader.feed([None] * len(LENGTHS), sampler), reader)


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
def test_steps_left_are_the_steps_that_come(method):
    packs = loader(method)
    left = packs.steps_left(EPOCHS)
    lengths = set()
    for epoch in range(EPOCHS):
        steps = packs.steps_per_epoch
        lengths.add(steps)
        for index in range(steps):
            assert packs.steps_left(EPOCHS) == left
            step, _ = packs.next_step()
            assert (step.epoch, step.index) == (epoch, index)
            left -= 1
    assert left == packs.steps_left(EPOCHS) == packs.steps_left(1) == 0
    assert (len(lengths) == 1) == (method == "balanced")


def test_a_resumed_loader_counts_what_is_left_of_its_epoch():
    first, again = loader("isf"), loader("isf")
    for _ in range(first.steps_per_epoch + 3):
        first.next_step()
    again.load_state_dict(first.state_dict())
    assert again.steps_left(EPOCHS) == first.steps_left(EPOCHS)
    assert again.steps_left(1) == 0


def test_a_loop_over_a_loader_goes_to_the_end_of_the_epoch():
    packs = loader("isf")
    packs.next_step()
    for epoch, begin in ((0, 1), (1, 0)):
        steps = len(packs)
        assert [(step.epoch, step.index) for step, _ in packs] == [(epoch, index) for index in range(begin, steps)]
