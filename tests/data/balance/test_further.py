"""An encoder of sound beside the ViT: packs are level in it, too, and keep its limit."""

import json

import numpy as np
import pytest

from omnibal.cost import CostModel, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.data.packing_spec import PackingSpec
from omnibal.errors import ConfigError, DataError

LIMITS = PackLimits(16384, 8192)


def mixed_lengths(count=4000, *, with_sound=True):
    """Images, sounds, texts, and samples of both, with tokens for all of them."""
    rng = np.random.default_rng(3)
    kind = rng.choice(4, count, p=[0.45, 0.3, 0.15, 0.1])
    patches = np.where(np.isin(kind, (0, 3)), rng.integers(16, 1500, count) * 4, 0)
    sounds = np.where(np.isin(kind, (1, 3)), rng.integers(25, 1500, count), 0)
    tokens = rng.integers(8, 1000, count) + patches // 4 + sounds // 2
    return SampleLengths(patches, tokens, sound_units=sounds if with_sound else None), sounds


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_packs_are_level_in_every_encoder(micro_batches):
    lengths, sounds = mixed_lengths()
    found = {}
    for name, given in (("apart", lengths), ("unknown", mixed_lengths(with_sound=False)[0])):
        epoch = arrange_epoch(given, LIMITS, num_replicas=8, micro_batches=micro_batches)
        packs = epoch.packs
        assert np.bincount(packs.samples, minlength=len(given)).tolist() == [1] * len(given)
        assert packs.vision_units(given).max() <= 16384
        assert packs.llm_tokens(given).max() <= 8192
        loads = [packs.sums(units)[epoch.steps] for units in (given.vision_units, sounds, given.llm_tokens)]
        found[name] = [dist_ratio(load) for load in loads]
    vision, sound, tokens = found["apart"]
    assert max(vision, tokens) < 0.01
    assert sound < 0.05
    assert found["unknown"][1] > 5 * sound


def test_a_limit_of_sound_is_kept_and_asks_for_packs():
    lengths, sounds = mixed_lengths()
    limits = PackLimits(16384, 8192, sound_units=1600)
    packs = arrange_epoch(lengths, limits, num_replicas=4).packs
    assert packs.sums(sounds).max() <= 1600
    assert len(packs) >= sounds.sum() / 1600
    free = arrange_epoch(lengths, LIMITS, num_replicas=4).packs
    assert free.sums(sounds).max() > 1600
    assert len(free) < len(packs)


def test_a_sound_over_its_limit_is_alone():
    lengths, sounds = mixed_lengths(400)
    limits = PackLimits(16384, 8192, sound_units=1000)
    over = np.flatnonzero(sounds > 1000)
    assert limits.oversized(lengths).tolist() == over.tolist()
    packs = arrange_epoch(lengths, limits, num_replicas=2).packs
    assert {pack[0] for pack in packs if len(pack) == 1} >= set(over)
    kept = arrange_epoch(lengths, limits, num_replicas=2, oversized="drop").packs
    assert not set(over) & set(kept.samples)
    with pytest.raises(DataError, match=r"limits of 16384 .* and 8192 LLM tokens and 1000 sound units, got \d+ and "):
        limits.refuse_oversized(lengths)
    with pytest.raises(ConfigError, match="method must be 'balanced' where sounds have a limit, got 'isf'"):
        PackingSpec(lengths, limits, method="isf")


def test_lengths_keep_their_sounds_and_the_name_of_their_unit(tmp_path):
    lengths = SampleLengths([1, 0], [10, 20], sound_units=[0, 7], unit_name="windows")
    lengths.save(tmp_path)
    loaded = SampleLengths.load(tmp_path)
    assert loaded.sound_units.tolist() == [0, 7]
    assert (loaded.vision_unit, loaded.take([1]).vision_unit) == ("windows", "windows")
    assert (loaded.summary.total_sound_units, loaded.summary.max_sound_units) == (7, 7)
    assert loaded.take([1]).sound_units.tolist() == [7]
    with pytest.raises(DataError, match="sound_units must have one entry per sample"):
        SampleLengths([1], [10], sound_units=[1, 2])


def test_folders_that_know_no_sound_still_load(tmp_path):
    SampleLengths([1, 0], [10, 20]).save(tmp_path)
    record = json.loads((tmp_path / "lengths.json").read_text())
    for key in ("total_sound_units", "max_sound_units"):
        del record["summary"][key]
    assert record.keys() == {"format", "columns", "content_hash", "summary"}
    (tmp_path / "lengths.json").write_text(json.dumps(record))
    loaded = SampleLengths.load(tmp_path)
    assert (loaded.sound_units, loaded.vision_unit) == (None, "vision units")


def test_costs_of_sound_are_fitted():
    loads = Load([0, 4, 0, 2], [100, 100, 200, 50], sound_units=[3, 0, 1, 5])
    fitted = CostModel.fit(loads, 2.0 * loads.sound_units + 0.01 * loads.llm_tokens + 1)
    assert fitted.sound_units == pytest.approx(2.0)
    assert "sound_units=[3.0" in repr(loads)


def test_states_of_runs_without_sound_stay_valid():
    spec = PackingSpec(SampleLengths([1], [10]), PackLimits(1, 10), cost=CostModel(llm_tokens=1))
    found = spec.fingerprint()
    assert found["limits"] == [1, 10, 1, 5]
    assert found["cost"] == [0.0, 0.0, 1, 0.0, 0.0, 0.0]
