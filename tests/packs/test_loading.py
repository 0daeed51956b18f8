import pickle
from itertools import combinations_with_replacement

import numpy as np
import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.errors import DataError
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.packs.loading import Pack, PackedView, PackItems, PackSampler, PlannedLoads
from tools.synthetic import tiled_lengths

LENGTHS = tiled_lengths(60, seed=0, text_share=0.5)
SMALLEST_WITH_IMAGE = int(np.lexsort((LENGTHS.llm_tokens, LENGTHS.vision_units, LENGTHS.vision_units == 0))[0])


def sampler_of(rank=0, sampler=PackSampler, lengths=LENGTHS, **options):
    options = {"num_replicas": 2, "rank": rank, "micro_batches": 2, "method": "isf", **options}
    return sampler(lengths, PackLimits(5, 1600), **options)


@pytest.mark.parametrize("rank", [0, 1])
def test_packs_are_those_of_the_sampler_also_where_it_goes_on(rank):
    own, plain = sampler_of(rank), sampler_of(rank, BalancedBatchSampler)
    for epoch in (0, 1, 1):
        own.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert list(own) == list(plain)
    state = plain.state_dict(3)
    again = sampler_of(rank)
    again.load_state_dict(state)
    assert list(again) == list(plain)[3 * 2 :]


def test_loads_count_the_logits_of_all_tokens():
    load = sampler_of().load(3)
    assert (LENGTHS.target_tokens < LENGTHS.llm_tokens).any()
    np.testing.assert_array_equal(load.target_tokens, load.llm_tokens)


def test_a_pack_without_an_image_is_filled_where_its_step_has_one():
    ranks = [list(sampler_of(rank)) for rank in range(2)]
    filled = 0
    for step in range(sampler_of().num_steps):
        packs = [pack for packs in ranks for pack in packs[2 * step : 2 * step + 2]]
        has_image = [bool(LENGTHS.vision_units[pack].any()) for pack in packs]
        for pack, has in zip(packs, has_image, strict=True):
            assert pack.fillers == ((SMALLEST_WITH_IMAGE,) if any(has_image) and not has else ())
            filled += len(pack.fillers)
    assert filled


def test_steps_without_any_image_are_filled_on_demand_only():
    lengths = SampleLengths([1] + [0] * 40, [900] * 41)
    for demanded in (False, True):
        sampler = sampler_of(lengths=lengths, image_in_every_pack=demanded)
        packs = list(sampler)
        for step in sampler.steps():
            if 0 not in step.packs.samples:
                fillers = {pack.fillers for pack in packs[2 * step.index :][:2] if pack}
                assert fillers <= ({(0,)} if demanded else {()})


def test_an_empty_pack_gets_a_sample_of_the_kind_that_the_step_has():
    texts = SampleLengths([0, 0], [30, 20])
    packs = sampler_of(lengths=texts, num_replicas=3, micro_batches=1, method="balanced").packs_of_all_ranks(0)
    assert sorted((pack, pack.fillers) for pack in packs) == [([], (1,)), ([0], ()), ([1], ())]
    one_image = SampleLengths([0, 3], [30, 200])
    packs = sampler_of(lengths=one_image, num_replicas=3, micro_batches=1, method="balanced").packs_of_all_ranks(0)
    assert sorted((pack, pack.fillers) for pack in packs) == [([], (1,)), ([0], (1,)), ([1], ())]


def test_packs_get_each_kind_that_another_pack_of_the_step_has():
    """Kinds of 2 ranks, in all pairs: texts, images, videos, both in a sample."""
    units, videos, tokens = [0, 8, 16, 24, 0, 4, 6], [0, 0, 16, 16, 0, 0, 6], [9, 20, 30, 50, 8, 15, 16]
    lengths = SampleLengths(units, tokens, video_units=videos)
    assert lengths.kinds.tolist() == [0, 1, 2, 3, 0, 1, 2]
    sampler = PackSampler(lengths, PackLimits(24, 60), num_replicas=2, rank=0)
    for first, second in combinations_with_replacement(range(4), 2):
        sampler.packs_of_step = lambda step, pair=(first, second): Packs(np.array(pair), np.array([0, 1, 2]))
        packs = sampler.packs_of_all_ranks(0)
        ran = [
            {int(kind) for s in (*pack, *pack.fillers) for kind in (lengths.kinds[s] & 1, lengths.kinds[s] & 2)} - {0}
            for pack in packs
        ]
        assert ran[0] == ran[1] == {kind for kind in (1, 2) if kind & (lengths.kinds[first] | lengths.kinds[second])}
        assert {filler for pack in packs for filler in pack.fillers} <= {5, 6}  # the smallest of each kind
    demanded = PackSampler(lengths, PackLimits(24, 60), num_replicas=2, rank=0, image_in_every_pack=True)
    demanded.packs_of_step = lambda step: Packs(np.array([0, 1]), np.array([0, 1, 2]))
    assert [pack.fillers for pack in demanded.packs_of_all_ranks(0)] == [(5, 6), (6,)]
    together = SampleLengths([10, 0], [20, 5], video_units=[6, 0])  # no sample has one kind alone
    sampler = PackSampler(together, PackLimits(24, 60), num_replicas=2, rank=0)
    sampler.packs_of_step = lambda step: Packs(np.array([0, 1]), np.array([0, 1, 2]))
    assert [pack.fillers for pack in sampler.packs_of_all_ranks(0)] == [(), (0,)]


def test_a_kind_that_was_planned_must_be_there():
    lengths = SampleLengths([8, 16], [20, 30], video_units=[0, 16])
    PlannedLoads(lengths).check([0, 1], [(8, 20, 1, 0), (16, 30, 1, 16)])
    with (
        pytest.warns(UserWarning, match="sample 1 must have the planned"),
        pytest.raises(
            DataError,
            match="samples 0, 1 must have a video among them, as planned, got none; the other ranks would wait",
        ),
    ):
        PlannedLoads(lengths, absorb=True).check([0, 1], [(8, 20, 1, 0), (16, 31, 1, 0)])
    with pytest.raises(DataError, match="must have an image among them"):
        PlannedLoads(lengths, absorb=True).check([0, 1], [(None, 20, 1), (None, 30, 1)], (16, 16, 0))


def test_a_pack_keeps_its_filler_on_the_way_to_a_worker():
    sent = pickle.loads(pickle.dumps(Pack([4, 2], [7])))
    assert (sent, sent.fillers) == ([4, 2], (7,))


def test_the_view_draws_the_filler_last():
    view = PackedView("abcdefgh")
    assert view.__getitems__(Pack([4, 2], [7])) == PackItems((4, 2, 7), ("e", "c", "h"), num_fillers=1)
    assert view.__getitems__(Pack([3])) == PackItems((3,), ("d",))
    assert (len(view), view[1]) == (8, "b")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_hands_on_what_the_view_draws(workers):
    data = pytest.importorskip("torch.utils.data")
    own = sampler_of()
    loader = data.DataLoader(
        PackedView(range(len(LENGTHS))), batch_sampler=own, collate_fn=lambda drawn: drawn, num_workers=workers
    )
    drawn = list(loader)
    expected = [(*pack, *pack.fillers) for pack in own]
    assert [found.samples for found in drawn] == [found.items for found in drawn] == expected
