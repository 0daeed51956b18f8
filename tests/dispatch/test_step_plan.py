"""Plans of a micro-batch."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.cost import CostModel
from omnibal.data.limits import PackLimits
from omnibal.dispatch.step_plan import Costs, plan_step
from omnibal.errors import DataError, InfeasibleError

TOKENS = Costs(llm=CostModel(llm_tokens=1))


def sizes_of(vision, tokens):
    vision, tokens = np.array(vision), np.array(tokens)
    return {
        "vision_units": vision,
        "images": vision > 0,
        "image_tokens": vision,
        "llm_tokens": tokens,
        "target_tokens": tokens // 2,
    }


def plan(vision, tokens, costs=TOKENS):
    source = np.repeat([0, 1], len(tokens) // 2)
    return plan_step(source, sizes_of(vision, tokens), 2, costs, total_targets=9)


def test_each_phase_is_even_on_its_own():
    # Rank 0 drew all images and short texts.
    made = plan([4, 4, 2, 0, 0, 0], [10, 10, 10, 40, 40, 40])
    assert made.to_vision.destination.tolist() == [0, 1, 0, 1, 1, 1]
    assert made.imbalance()["vision"] == pytest.approx((2.0, 1.2))
    before, after = made.imbalance()["llm"]
    assert (before, after) == pytest.approx((1.6, 16 / 15))
    assert made.features.source.tolist() == made.to_vision.destination.tolist()
    assert made.features.destination.tolist() == made.to_llm.destination.tolist()
    assert made.describe() == (
        "largest rank over mean: vision encoder 2.00 -> 1.20, 1 of 6 samples move; "
        "LLM 1.60 -> 1.07, 5 of 6 samples move"
    )


def test_what_is_even_is_left():
    made = plan([3, 3, 3, 3], [10, 20, 20, 10])
    for move in (made.to_vision, made.to_llm):
        assert move.destination.tolist() == [0, 0, 1, 1]
    assert made.describe() == "largest rank over mean: vision encoder 1.00, left; LLM 1.00, left"


def test_limits_hold_even_where_the_draw_is_even():
    # By cost all samples are alike; rank 0 drew more tokens than it can hold.
    costs = Costs(llm=CostModel(fixed=1), limits=PackLimits(9, 60))
    made = plan([0, 0, 0, 0], [40, 40, 10, 10], costs)
    assert np.bincount(made.to_llm.destination, made.sizes["llm_tokens"]).max() <= 60
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
        volumes, node = made.to_llm.volumes(tokens), np.arange(8) // 2
        sent[ranks_per_node] = np.where(node[:, None] != node, volumes, 0).sum(axis=1).max()
        assert made.imbalance()["llm"][1] < 1.05
    assert sent[2] < 0.9 * sent[None]


def test_samples_without_tokens_are_refused():
    with pytest.raises(DataError, match="samples must have tokens, got none in sample 1"):
        plan([0, 0], [5, 0])
