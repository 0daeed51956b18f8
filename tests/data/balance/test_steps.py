import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnibal.data.balance.rules import FULL, PACK
from omnibal.data.balance.tables import VISION
from omnibal.data.balance.window import cut_steps
from tests.data.balance.tables import make_rules


def steps_of(shares, num_steps, rules, *, vision=0):
    """Steps as lists of samples."""
    samples = np.zeros((len(shares), VISION + 1), dtype=np.int32)
    samples[:, VISION] = vision
    order, starts = cut_steps(samples, np.asarray(shares, dtype=np.int32), num_steps, rules)
    return [order[begin:end].tolist() for begin, end in itertools.pairwise(starts)]


@given(st.lists(st.integers(0, 20), max_size=80), st.integers(1, 6), st.integers(1, 5), st.booleans())
@example([0] * 10, 3, 2, True)
@settings(max_examples=300)
def test_every_sample_once_and_one_for_every_pack(shares, num_steps, step_packs, whole):
    rules = make_rules(step_packs)._replace(share_unit=step_packs if whole else 1, whole_vision=whole)
    steps = steps_of(shares, num_steps, rules)
    assert sorted(sample for step in steps for sample in step) == list(range(len(shares)))
    sizes = [len(step) for step in steps]
    if len(shares) >= num_steps * step_packs:
        assert min(sizes) >= step_packs
    else:
        full, rest = divmod(len(shares), step_packs)
        assert sizes == [step_packs] * full + ([rest] if full < num_steps else []) + [0] * (num_steps - full - 1)


@pytest.fixture
def tiles():
    return np.random.default_rng(2).choice([1, 3, 4, 5], p=[0.15, 0.4, 0.05, 0.4], size=2000)


def test_whole_shares_are_hit(tiles):
    rules = make_rules(8)._replace(share_unit=8, most_share=17, whole_vision=True)
    sums = [int(tiles[step].sum()) for step in steps_of(tiles, 58, rules)]
    assert sum(total % 8 == 0 for total in sums[:-1]) >= 55
    assert max(abs(total - tiles.sum() / 58) for total in sums) < 8 + 5


@pytest.mark.parametrize(("whole", "least", "most"), [(True, 0.35, 1), (False, 0, 0.2)])
def test_vision_units_are_whole_where_tokens_drive(tiles, whole, least, most):
    tokens = 256 * tiles + np.random.default_rng(3).integers(1, 500, len(tiles))
    shares = tokens * FULL // 5120
    rules = make_rules(8)._replace(whole_vision=whole, encoders=np.array([[3 * PACK // 15, 15, 0]]))
    steps = steps_of(shares, 58, rules, vision=tiles * rules.encoders[0, 0])
    assert least <= np.mean([int(tiles[step].sum()) % 8 == 0 for step in steps]) <= most
    assert max(abs(int(shares[step].sum()) - shares.sum() / 58) for step in steps) < shares.max()


def test_no_share_exceeds_what_packs_hold(tiles):
    rules = make_rules(8)._replace(share_unit=8, most_share=16, whole_vision=True)
    num_steps = -(-int(tiles.sum()) // (8 * 16))
    assert max(int(tiles[step].sum()) for step in steps_of(tiles, num_steps, rules)) == 8 * 16


def test_samples_stay_near_their_place_in_the_stream(tiles):
    steps = steps_of(tiles, 50, make_rules(8))
    place = {sample: step for step, members in enumerate(steps) for sample in members}
    assert np.mean([abs(place[sample] - sample * 50 / len(tiles)) for sample in range(len(tiles))]) < 1.5
