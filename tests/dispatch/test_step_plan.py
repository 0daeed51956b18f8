"""Plans of a micro-batch."""

from dataclasses import replace
from hashlib import sha256
from itertools import product

import numpy as np
import pytest

from omnibal.cost import CostModel
from omnibal.dispatch.rearrangement import Rearrangement
from omnibal.dispatch.step_plan import Costs, Link, PhaseCosts, plan_step
from omnibal.errors import DataError, InfeasibleError

BY_TOKEN = PhaseCosts(CostModel(llm_tokens=1))
TOKENS = Costs(llm=BY_TOKEN)


def sizes_of(vision, tokens):
    vision, tokens = np.array(vision), np.array(tokens)
    return {
        "vision_units": vision,
        "vision_squared": 0 * vision,
        "vision_tokens": vision,
        "llm_tokens": tokens,
        "target_tokens": tokens // 2,
    }


def plan(vision, tokens, costs=TOKENS):
    source = np.repeat([0, 1], len(tokens) // 2)
    return plan_step(source, sizes_of(vision, tokens), 2, costs, total_targets=9)


def test_each_phase_is_even_on_its_own():
    # Rank 0 drew all images and short texts.
    made = plan([4, 4, 2, 0, 0, 0], [10, 10, 10, 40, 40, 40])
    assert made.moves["vision"].destination.tolist() == [0, 1, 0, 1, 1, 1]
    assert made.imbalance["vision"] == pytest.approx((2.0, 1.2))
    before, after = made.imbalance["llm"]
    assert (before, after) == pytest.approx((1.6, 16 / 15))
    assert made.features["vision"].source.tolist() == made.moves["vision"].destination.tolist()
    assert made.features["vision"].destination.tolist() == made.moves["llm"].destination.tolist()
    assert made.describe() == (
        "largest rank over mean: vision encoder 2.00 -> 1.20, 1 of 6 samples move; "
        "LLM 1.60 -> 1.07, 5 of 6 samples move"
    )


def test_what_is_even_is_left():
    made = plan([3, 3, 3, 3], [10, 20, 20, 10])
    for move in made.moves.values():
        assert move.destination.tolist() == [0, 0, 1, 1]
    told = "1.00 as drawn (less than 1% to gain)"
    assert made.describe() == f"largest rank over mean: vision encoder {told}; LLM {told}"


LINK = Link(
    latency_seconds=1.0,
    bytes_per_second=10.0,
    unit_bytes={"vision": 5.0},
    feature_bytes={"vision": 2.0},
    token_bytes=1.0,
)


def test_an_exchange_takes_as_long_as_that_of_the_busiest_rank():
    move = Rearrangement([0, 0, 1, 1], [1, 0, 0, 0], 2)
    # Rank 0 sends 30 bytes and gets 50; what stays on a rank does not travel.
    sizes = {
        "vision_units": np.zeros(4),
        "vision_tokens": np.zeros(4),
        "llm_tokens": np.array([30.0, 999.0, 20.0, 30.0]),
    }
    assert LINK.seconds_of_all({"llm": move}, sizes) == pytest.approx(1 + 50 / 10)
    assert LINK.seconds_of_all({"llm": Rearrangement([0] * 4, [0] * 4, 2)}, sizes) == 0


def test_what_moves_saves_more_seconds_than_its_exchange_takes():
    # As drawn 8 s of vision, and an even LLM. Moved 4 s, 1 + 4 * 5 / 10 s for pixels and 1 + 4 * 2 / 10 for features.
    vision, tokens = [4, 4, 0, 0], [10, 10, 10, 10]
    slow = plan(vision, tokens, replace(TOKENS, link=LINK))
    assert slow.moves["vision"].is_still
    assert slow.moves["llm"].is_still
    assert slow.weighed["vision"] == pytest.approx((4.0, 4.8))
    assert (
        "vision encoder 2.00 as drawn (to move would save 4000.00 ms of computing and take 4800.00 ms"
        in slow.describe()
    )
    fast = plan(vision, tokens, replace(TOKENS, link=replace(LINK, latency_seconds=0.5)))
    assert fast.moves["vision"].destination.tolist() == [0, 1, 1, 1]
    assert fast.moves["llm"].is_still
    assert fast.describe().startswith("largest rank over mean: vision encoder 2.00 -> 1.00, 1 of 4 samples move")


def test_where_phases_do_not_meet_one_makes_up_for_the_other():
    # Rank 0 has all images, rank 1 the long texts: together they are even.
    vision, tokens, link = [4, 4, 0, 0], [1, 1, 5, 5], replace(LINK, latency_seconds=0.01, bytes_per_second=1e3)
    assert not plan(vision, tokens, replace(TOKENS, link=link)).moves["vision"].is_still
    left = plan(vision, tokens, replace(TOKENS, link=replace(link, phases_meet=False)))
    assert left.moves["vision"].is_still
    assert left.moves["llm"].is_still


def test_a_link_does_not_lead_over_limits():
    costs = replace(TOKENS, llm=replace(BY_TOKEN, limit=60), link=replace(LINK, bytes_per_second=1e-3))
    made = plan([0, 0, 0, 0], [40, 40, 10, 10], costs)
    assert np.bincount(made.moves["llm"].destination, made.sizes["llm_tokens"]).max() <= 60


def test_limits_hold_even_where_the_draw_is_even():
    # By cost all samples are alike; rank 0 drew more tokens than it can hold.
    costs = Costs(llm=PhaseCosts(CostModel(fixed=1), limit=60))
    made = plan([0, 0, 0, 0], [40, 40, 10, 10], costs)
    assert np.bincount(made.moves["llm"].destination, made.sizes["llm_tokens"]).max() <= 60
    with pytest.raises(InfeasibleError, match="got 70 of at most 60"):
        plan([0, 0], [70, 10], costs)


def test_nodes_keep_what_they_can():
    generator = np.random.default_rng(0)
    source = np.repeat(np.arange(8), 20)
    tokens = generator.lognormal(6, 1, len(source)).astype(int) + 1
    sizes = sizes_of(generator.integers(0, 9, len(source)), tokens)
    sent = {}
    for ranks_per_node in (None, 2):
        made = plan_step(source, sizes, 8, replace(TOKENS, ranks_per_node=ranks_per_node), total_targets=9)
        volumes, node = made.moves["llm"].volumes(tokens).toarray(), np.arange(8) // 2
        sent[ranks_per_node] = np.where(node[:, None] != node, volumes, 0).sum(axis=1).max()
        assert made.imbalance["llm"][1] < 1.05
    assert sent[2] < 0.9 * sent[None]


def test_samples_without_tokens_are_refused():
    with pytest.raises(DataError, match="samples must have tokens, got none in sample 1"):
        plan([0, 0], [5, 0])


def test_padded_rows_are_divided_and_measured_with_their_padding():
    # As drawn both ranks have a long sample, and so 3 rows of 30 tokens; 50 tokens of a rank are real on average.
    rows = replace(BY_TOKEN, method="padded")
    made = plan([0] * 6, [30, 10, 10, 30, 10, 10], Costs(llm=rows))
    assert sorted(np.bincount(made.moves["llm"].destination).tolist()) == [2, 4]
    assert made.imbalance["llm"] == pytest.approx((90 / 50, 60 / 50))
    assert plan([0] * 4, [30, 10, 30, 30], Costs(llm=replace(rows, limit=60))).moves["llm"].is_still
    with pytest.raises(InfeasibleError, match=r"rows must fit within the 50 tokens .* got 4 samples of up to 30"):
        plan([0] * 4, [30, 10, 30, 30], Costs(llm=replace(rows, limit=50)))


def one_encoder():
    """Costs of every kind that plans had when they knew one encoder alone."""
    vision = PhaseCosts(CostModel(vision_units=2e-3, vision_squared=1e-6))
    seconds = Costs({"vision": vision}, PhaseCosts(CostModel(llm_tokens=1e-5, llm_tokens_squared=1e-9)))
    yield Costs()
    yield Costs(llm=replace(Costs().llm, method="padded"))
    limited = {"vision": replace(vision, limit=60)}
    yield replace(seconds, encoders=limited, llm=replace(seconds.llm, limit=20000))
    yield replace(seconds, ranks_per_node=2)
    for speed, meet in product((1e8, 1e9, 1e11), (True, False)):
        yield replace(seconds, link=Link(1e-3, speed, {"vision": 6e5}, {"vision": 8e3}, 32.0, meet))


def test_plans_of_one_encoder_are_those_of_earlier_versions():
    digest = sha256()
    for number, costs in enumerate(one_encoder()):
        generator = np.random.default_rng(number)
        for num_ranks in (2, 8):
            units = generator.integers(0, 9, 6 * num_ranks)
            tokens = np.ceil(generator.lognormal(6, 1, len(units))).astype(int) + 4 * units
            sizes = sizes_of(units, tokens) | {"vision_squared": units**2, "vision_tokens": 4 * units}
            made = plan_step(np.repeat(np.arange(num_ranks), 6), sizes, num_ranks, costs, total_targets=9)
            told = made.digest, made.imbalance, dict(made.weighed), made.describe()
            digest.update(repr(told).encode())
    assert digest.hexdigest()[:16] == "6a670df6f51980ac"
