"""Ranks that share a step's packs otherwise than the sampler's ranks do: an encoder's, with replicas of their own."""

from itertools import islice

import pytest

from omnibal.feeds.feed import EpochFeed, PacksFromHere, Share
from tests.feeds.samplers import samplers


def numbered_packs(ranks, epochs=2):
    """The packs of the first epochs in the order of their numbers: micro-batch m of rank d is m · ranks + d."""
    found = []
    for epoch in range(epochs):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        found += [pack for packs in zip(*ranks, strict=True) for pack in packs]
    return found


@pytest.mark.parametrize(("num_replicas", "micro_batches"), [(1, 4), (2, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_shares_take_the_packs_of_every_step_in_turns(num_replicas, micro_batches, num_shares):
    numbered = numbered_packs(samplers((num_replicas, micro_batches)))
    for number in range(num_shares):
        sampler = samplers((num_replicas, micro_batches))[0]
        own = numbered[number::num_shares]
        packs = PacksFromHere(sampler, Share(number, num_shares))
        assert list(islice(packs, len(own))) == own
        feed = EpochFeed(sampler, packs, Share(number, num_shares))
        assert feed.micro_batches * num_shares == num_replicas * micro_batches
        _, first = feed.step()
        step, second = feed.step()
        assert first + second == own[: 2 * feed.micro_batches]
        assert feed.share.packs(sampler, step.index) == second
        # Another feed goes on from the state of this one, whatever has been read ahead.
        other = samplers((num_replicas, micro_batches))[0]
        follower = EpochFeed(other, PacksFromHere(other, feed.share), feed.share)
        follower.load_state_dict(feed.state_dict())
        assert follower.step()[1] == feed.step()[1] == own[2 * feed.micro_batches : 3 * feed.micro_batches]


def test_a_rank_without_a_share_of_its_own_reads_what_its_sampler_plans():
    ranks = samplers((3, 2))
    for sampler in ranks:
        assert list(islice(PacksFromHere(sampler), len(sampler))) == list(sampler)
