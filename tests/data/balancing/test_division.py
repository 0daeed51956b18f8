import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnibal.data.balancing.division import StepRule, divide
from omnibal.data.balancing.tables import make_scratch

MANY = 1 << 30


def divided(driver, num_steps, rule, *, vision=None, other=None):
    """Steps as lists of samples."""
    driver = np.asarray(driver, dtype=np.int32)
    vision = driver if vision is None else np.asarray(vision, dtype=np.int32)
    other = driver if other is None else np.asarray(other, dtype=np.int32)
    order = np.arange(len(driver))
    starts = divide(driver, vision, other, num_steps, rule, order, make_scratch())
    return [order[begin:end].tolist() for begin, end in itertools.pairwise(starts)]


def rule(step_packs, **changes):
    usual = {
        "num_replicas": step_packs,
        "most_share": MANY,
        "share_unit": 1,
        "share_weight": 16,
        "vision_weight": 0,
        "other_weight": 0,
    }
    return StepRule(step_packs, **{**usual, **changes})


@given(
    st.lists(st.integers(0, 20), max_size=80),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0, 3]),
    st.sampled_from([0, 7]),
    st.booleans(),
)
@example([0] * 10, 3, 2, 1, 0, True)
@settings(max_examples=300)
def test_every_sample_once_and_one_for_every_pack(driver, num_steps, step_packs, other_weight, vision_weight, whole):
    steps = divided(
        driver,
        num_steps,
        rule(step_packs, other_weight=other_weight, vision_weight=vision_weight, share_unit=step_packs if whole else 1),
        other=driver[::-1],
    )
    assert sorted(sample for step in steps for sample in step) == list(range(len(driver)))
    sizes = [len(step) for step in steps]
    if len(driver) >= num_steps * step_packs:
        assert min(sizes) >= step_packs
    else:
        full, rest = divmod(len(driver), step_packs)
        assert sizes == [step_packs] * full + ([rest] if full < num_steps else []) + [0] * (num_steps - full - 1)


@pytest.fixture
def tiles():
    return np.random.default_rng(2).choice([1, 3, 4, 5], p=[0.15, 0.4, 0.05, 0.4], size=2000)


def test_whole_shares_are_hit_exactly(tiles):
    num_steps = 58
    steps = divided(tiles, num_steps, rule(8, share_unit=8, most_share=17))
    sums = [int(tiles[step].sum()) for step in steps]
    share = tiles.sum() / num_steps
    assert [total % 8 for total in sums[:-1]] == [0] * (num_steps - 1)
    assert max(abs(total - share) for total in sums) < 8 + 5


def test_no_share_exceeds_what_packs_hold(tiles):
    num_steps = -(-int(tiles.sum()) // (8 * 16))
    sums = [int(tiles[step].sum()) for step in divided(tiles, num_steps, rule(8, share_unit=8, most_share=16))]
    assert max(sums) == 8 * 16


def test_shares_are_equal_where_units_are_fine():
    patches = np.random.default_rng(3).lognormal(7, 0.7, 3000).astype(int)
    sums = [patches[step].sum() for step in divided(patches, 60, rule(4))]
    assert max(sums) / np.mean(sums) < 1.003
    patches[::200] = 40_000  # a fifth of a step: those that come at a step's end go into the next
    sums = [patches[step].sum() for step in divided(patches, 60, rule(4))]
    assert max(sums) / np.mean(sums) < 1.02


def test_vision_units_become_divisible_where_tokens_drive(tiles):
    tokens = 256 * tiles + np.random.default_rng(4).integers(20, 400, len(tiles))
    steps = divided(tokens, 50, rule(8, share_weight=1, vision_weight=20_000), vision=tiles)
    assert np.mean([tiles[step].sum() % 8 == 0 for step in steps]) > 0.9
    assert max(tokens[step].sum() for step in steps) / (tokens.sum() / 50) < 1.05


def test_looking_ahead_keeps_the_other_load_in_proportion(tiles):
    text = np.random.default_rng(5).lognormal(6, 0.8, len(tiles)).astype(int)

    def deviation(other_weight):
        steps = divided(tiles, 50, rule(8, share_unit=8, share_weight=1000, other_weight=other_weight), other=text)
        return np.std([text[step].sum() for step in steps]) / (text.sum() / 50)

    assert 3 * deviation(1) < deviation(0)


def test_samples_stay_near_their_place_in_the_stream(tiles):
    for other_weight in (0, 1):
        steps = divided(tiles, 50, rule(8, share_unit=8, other_weight=other_weight), other=tiles[::-1])
        place = {sample: step for step, members in enumerate(steps) for sample in members}
        moved = [abs(place[sample] - sample * 50 / len(tiles)) for sample in range(len(tiles))]
        assert np.mean(moved) < 1.5
