import pickle

import numpy as np
import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.synthetic import tiled_lengths
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.integrations.loading import Pack, PackedView, PackItems, PackSampler

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
            assert pack.filler == (SMALLEST_WITH_IMAGE if any(has_image) and not has else None)
            filled += pack.filler is not None
    assert filled


def test_steps_without_any_image_are_filled_on_demand_only():
    lengths = SampleLengths([1] + [0] * 40, [900] * 41)
    for demanded in (False, True):
        sampler = sampler_of(lengths=lengths, image_in_every_pack=demanded)
        packs = list(sampler)
        for step in sampler.steps():
            if 0 not in step.packs.samples:
                fillers = {pack.filler for pack in packs[2 * step.index :][:2] if pack}
                assert fillers <= ({0} if demanded else {None})


def test_an_empty_pack_gets_a_sample_of_the_kind_that_the_step_has():
    texts = SampleLengths([0, 0], [30, 20])
    packs = sampler_of(lengths=texts, num_replicas=3, micro_batches=1, method="balanced").packs_of_all_ranks(0)
    assert sorted((pack, pack.filler) for pack in packs) == [([], 1), ([0], None), ([1], None)]
    one_image = SampleLengths([0, 3], [30, 200])
    packs = sampler_of(lengths=one_image, num_replicas=3, micro_batches=1, method="balanced").packs_of_all_ranks(0)
    assert sorted((pack, pack.filler) for pack in packs) == [([], 1), ([0], 1), ([1], None)]


def test_a_pack_keeps_its_filler_on_the_way_to_a_worker():
    sent = pickle.loads(pickle.dumps(Pack([4, 2], filler=7)))
    assert (sent, sent.filler) == ([4, 2], 7)


def test_the_view_draws_the_filler_last():
    view = PackedView("abcdefgh")
    assert view.__getitems__(Pack([4, 2], filler=7)) == PackItems((4, 2, 7), ("e", "c", "h"), has_filler=True)
    assert view.__getitems__(Pack([3])) == PackItems((3,), ("d",), has_filler=False)
    assert (len(view), view[1]) == (8, "b")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_hands_on_what_the_view_draws(workers):
    data = pytest.importorskip("torch.utils.data")
    own = sampler_of()
    loader = data.DataLoader(
        PackedView(range(len(LENGTHS))), batch_sampler=own, collate_fn=lambda drawn: drawn, num_workers=workers
    )
    drawn = list(loader)
    expected = [(*pack, *([pack.filler] if pack.filler is not None else [])) for pack in own]
    assert [found.samples for found in drawn] == [found.items for found in drawn] == expected
