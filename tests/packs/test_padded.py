import numpy as np
import pytest
import torch

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.errors import DataError
from omnibal.packs.collator import PaddedCollator
from omnibal.packs.loading import PackItems, PackSampler, PaddedSampler, deal_padded
from omnibal.packs.losses import loss_per_target
from tests.integrations.items import UNPACKED, Collate, config_of, items_of
from tests.vlm.families import plain_family_model
from tools.synthetic import tiled_lengths

LENGTHS = tiled_lengths(2000, seed=0, text_share=0.3)
LIMITS = PackLimits(16, 6000)
RANKS = {"num_replicas": 4, "micro_batches": 2}


def padded_tokens(packs, lengths=LENGTHS):
    return [len(pack) * lengths.llm_tokens[pack].max(initial=0) for pack in packs]


def test_steps_keep_their_samples_and_are_padded_little():
    padded, packed = (
        PaddedSampler(LENGTHS, LIMITS, rank=0, **RANKS),
        PackSampler(LENGTHS, PackLimits(12, 4500), rank=0, **RANKS),
    )
    assert padded.num_steps == packed.num_steps
    in_all = np.zeros(2)
    for step in range(padded.num_steps):
        dealt, planned = padded.packs_of_step(step), packed.packs_of_step(step)
        assert sorted(dealt.samples) == sorted(planned.samples)
        assert max(padded_tokens(dealt)) <= LIMITS.llm_tokens
        in_all += sum(padded_tokens(dealt)), sum(padded_tokens(planned))
    real = int(LENGTHS.llm_tokens.sum())
    # Padding the packs as they are wastes four tokens of ten.
    assert real / in_all[0] > 0.86
    assert real / in_all[1] < 0.65


def test_all_ranks_together_have_every_sample_once():
    ranks = [list(PaddedSampler(LENGTHS, LIMITS, rank=rank, **RANKS)) for rank in range(4)]
    assert sorted(sample for packs in ranks for pack in packs for sample in pack) == list(range(len(LENGTHS)))
    assert len({len(packs) for packs in ranks}) == 1


def test_loads_count_padding():
    sampler = PaddedSampler(LENGTHS, LIMITS, rank=0, **RANKS)
    packs, load = sampler.packs_of_step(3), sampler.load(3)
    assert (load.shape, sampler.limits) == ((4, 2), LIMITS)
    assert load.llm_tokens.ravel().tolist() == padded_tokens(packs)
    assert load.vision_units.ravel().tolist() == packs.vision_units(LENGTHS).tolist()
    squares = [len(pack) * int(LENGTHS.llm_tokens[pack].max()) ** 2 for pack in packs]
    assert load.llm_tokens_squared.ravel().tolist() == squares


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_largest_batch_is_as_small_as_runs_of_sorted_samples_allow(count):
    generator = np.random.default_rng(count)
    for _ in range(30):
        tokens = generator.integers(1, 40, generator.integers(count, 9))
        lengths = SampleLengths(np.zeros_like(tokens), tokens)
        dealt = deal_padded(np.arange(len(tokens)), lengths, PackLimits(1, 9999), count)
        assert sorted(dealt.samples) == list(range(len(tokens)))
        assert (len(dealt), dealt.sizes.min()) == (count, max(dealt.sizes.min(), 1))
        assert max(padded_tokens(dealt, lengths)) == best(sorted(tokens.tolist(), reverse=True), count)


def best(tokens, count):
    """Of all ways to cut sorted samples into so many runs."""
    if count == 1:
        return tokens[0] * len(tokens)
    cuts = range(1, len(tokens) - count + 2)
    return min(max(tokens[0] * cut, best(tokens[cut:], count - 1)) for cut in cuts)


def test_vision_units_keep_their_limit_where_they_can():
    lengths = SampleLengths([4, 4, 4, 1], [100, 90, 80, 70])
    kept = deal_padded(np.arange(4), lengths, PackLimits(5, 9999), 3)
    assert kept.vision_units(lengths).tolist() == [4, 4, 5]
    too_few = deal_padded(np.arange(4), lengths, PackLimits(5, 9999), 2)
    assert sorted(too_few.vision_units(lengths)) == [5, 8]


def test_fewer_samples_than_batches_leave_some_empty():
    dealt = deal_padded(np.array([2, 0]), SampleLengths([0, 0, 0], [5, 6, 7]), PackLimits(1, 99), 4)
    assert [pack.tolist() for pack in dealt] == [[2], [0], [], []]
    assert isinstance(dealt, Packs)


@pytest.mark.parametrize("family", UNPACKED)
def test_what_cannot_be_packed_has_the_gradients_of_its_samples_alone(family):
    model, items = plain_family_model(config_of(family)).train(), items_of(family)
    collator = PaddedCollator(Collate(family))

    def backward(batches, targets):
        model.zero_grad()
        for batch in batches:
            labels = batch.pop("labels")
            loss_per_target(model(**batch), labels, num_items_in_batch=targets).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    samples = range(5)
    targets = sum(loads[2] for loads in collator.measure(items, samples))
    alone = backward([collator(PackItems((n,), (items[n],))) for n in samples], targets)
    batch = PackItems((*samples, 6), (*items[:5], items[6]), num_fillers=1)
    together = backward([collator(batch)], targets)
    assert len(alone) > 20
    assert alone.keys() == together.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-3, atol=1e-5)


def test_the_hosts_batch_is_kept_but_for_the_labels_of_a_filler():
    items = items_of("internvl")
    drawn = PackItems((0, 4), (items[0], items[4]), num_fillers=1)
    batch, plain = PaddedCollator(Collate("internvl"))(drawn), Collate("internvl")(list(drawn.items))
    assert batch.keys() == plain.keys()
    assert torch.equal(batch["labels"][0], plain["labels"][0])
    assert (batch["labels"][1] == -100).all()
    assert all(torch.equal(batch[name], plain[name]) for name in batch.keys() - {"labels"})


def test_other_samples_than_planned_are_named():
    items = items_of("idefics3")
    collator = PaddedCollator(Collate("idefics3"))
    lengths = SampleLengths(*np.array(collator.measure(items, range(len(items)))).T[:2])
    assert lengths.vision_units[:3].tolist() == [2, 0, 4]
    checked = PaddedCollator(Collate("idefics3"), lengths)
    assert checked(PackItems((0, 2), (items[0], items[2])))["pixel_values"].shape[:2] == (2, 4)
    with pytest.raises(DataError, match=r"sample 1 must have the planned .*, \(0, 5\), got \(None, 12, 6\)"):
        checked(PackItems((0, 1), (items[0], items[4])))
    fewer = items[2] | {"pixel_values": items[2]["pixel_values"][:, :2]}
    with pytest.raises(DataError, match="samples 0, 2 must have the planned vision units together, 6, got 4"):
        checked(PackItems((0, 2), (items[0], fewer)))
    absorbing = PaddedCollator(Collate("idefics3"), lengths, absorb=True)
    with pytest.warns(UserWarning, match=r"sample 2 must have .* trained as it is"):
        assert absorbing(PackItems((0, 2), (items[0], items[3])))["pixel_values"].shape[:2] == (2, 2)
    with pytest.raises(DataError, match="samples 0 must have"):  # other ranks run the ViT
        absorbing(PackItems((0,), (items[1],)))
    with pytest.raises(DataError, match="data_collator must give labels, got only input_ids; "):
        PaddedCollator(lambda items: {"input_ids": torch.zeros(1, 3), "labels": None}).measure(items, [0])
