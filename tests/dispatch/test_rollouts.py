import json
import runpy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal import SampleLengths, balanced_rows
from omnibal.advise.models import Model
from omnibal.cost import CostModel
from omnibal.dispatch.divide import divide
from omnibal.errors import ConfigError, DataError, InfeasibleError

PAIR = (CostModel(vision_units=6e-3), CostModel(llm_tokens=1.6e-4, llm_tokens_squared=4e-9))


EXAMPLE = runpy.run_path("launch/examples/rollouts.py")


def rollouts(count):
    return EXAMPLE["rollouts"](prompts=count // 4, answers=4)


def plain(rows):
    return [[micro_batch.tolist() for micro_batch in rank] for rank in rows]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_every_rollout_is_in_one_micro_batch_under_the_budget(count, ranks, least, seed):
    generator = np.random.default_rng(seed)
    tokens, units = generator.integers(1, 101, count), generator.integers(0, 10, count)
    budget = int(generator.integers(tokens.max(), 301))
    rows = balanced_rows(SampleLengths(units, tokens), PAIR, ranks, budget, micro_batches=least)
    assert len(rows) == ranks
    assert len({len(rank) for rank in rows}) == 1
    assert len(rows[0]) >= least
    parts = [part for rank in rows for part in rank]
    assert sorted(np.concatenate(parts)) == list(range(count))
    assert max(tokens[part].sum() for part in parts) <= budget
    assert all(map(len, parts)) or count < len(parts)


def test_ranks_are_even_in_encoder_and_llm_and_hold_as_few_micro_batches_as_the_budget_allows():
    lengths = rollouts(512)
    rows = balanced_rows(lengths, PAIR, 4, 32768)
    assert EXAMPLE["excess"](rows, lengths.vision_units) < 1.02
    assert len(rows[0]) == -(-int(lengths.llm_tokens.sum()) // (4 * 32768))
    tokens = lengths.llm_tokens.astype(float)
    for cost in (lengths.vision_units, tokens + tokens**2 / 40_000):
        of_parts = np.array([[cost[part].sum() for part in rank] for rank in rows])
        assert of_parts.sum(axis=1).max() < 1.02 * of_parts.sum(axis=1).mean()
        assert of_parts.max() < 1.1 * of_parts.mean()


def step_seconds(lengths, rows, pair=PAIR):
    """Ranks wait for the slowest encoder and the slowest LLM of each micro-batch."""
    tokens = lengths.llm_tokens.astype(float)
    costs = (pair[0].vision_units * lengths.vision_units, pair[1].llm_tokens * tokens)
    costs = (costs[0], costs[1] + pair[1].llm_tokens_squared * tokens**2)
    return sum(np.array([[cost[part].sum() for part in rank] for rank in rows]).max(axis=0).sum() for cost in costs)


def test_a_small_encoder_does_not_part_what_the_llm_needs_together():
    lengths = SampleLengths([1, 1, 0, 0, 0], [3, 3, 2, 2, 2])
    pair = CostModel(vision_units=0.1), CostModel(llm_tokens=1.0)
    rows = balanced_rows(lengths, pair, 2, 100)
    # 6 and 6 seconds of the LLM, 0.2 and 0 of the encoder; an even encoder leaves the LLM 7 and 5.
    assert sorted(rank[0].tolist() for rank in rows) == [[0, 1], [2, 3, 4]]
    assert step_seconds(lengths, rows, pair) == pytest.approx(6.2)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_steps_are_never_longer_than_by_differencing_of_one_cost(count, ranks, seed):
    generator = np.random.default_rng(seed)
    lengths = SampleLengths(generator.integers(0, 13, count), generator.integers(1, 9000, count))
    tokens = lengths.llm_tokens.astype(float)
    one_cost = 6e-3 * lengths.vision_units + 1.6e-4 * tokens + 4e-9 * tokens**2
    found = divide(one_cost, ranks, method="differencing")
    differenced = [[np.flatnonzero(found == rank)] for rank in range(ranks)]
    ours = balanced_rows(lengths, PAIR, ranks, 10**6)
    assert step_seconds(lengths, ours) <= step_seconds(lengths, differenced) * (1 + 1e-9)


def test_few_rollouts_a_rank_take_little_longer_than_the_least_that_is_possible():
    lengths = rollouts(256)
    tokens = lengths.llm_tokens.astype(float)
    seconds = 6e-3 * lengths.vision_units + 1.6e-4 * tokens + 4e-9 * tokens**2
    least = max(seconds.max(), seconds.sum() / 32)
    assert step_seconds(lengths, balanced_rows(lengths, PAIR, 32, 10**6)) < 1.03 * least


def test_long_rollouts_run_at_the_same_time():
    lengths = SampleLengths([0] * 34, [1000] * 2 + [100] * 32)
    rows = balanced_rows(lengths, PAIR, 2, 1000)
    assert [int(lengths.llm_tokens[rank[0]].max()) for rank in rows] == [1000, 1000]


def test_equal_counts():
    lengths = rollouts(96)
    rows = balanced_rows(lengths, PAIR, 4, 10**6, micro_batches=3, equal_counts=True)
    assert {len(part) for rank in rows for part in rank} == {8}
    # 96 rollouts do not divide over 4 ranks of 5, 7 or 9 micro-batches
    tight = balanced_rows(lengths, PAIR, 4, 10**6, micro_batches=5, equal_counts=True)
    assert len(tight[0]) == 6
    with pytest.raises(InfeasibleError, match="97 rollouts must divide into equal counts of at most 9000 tokens"):
        balanced_rows(rollouts(100).take(range(97)), PAIR, 4, 9000, equal_counts=True)


def test_models_that_set_the_costs(tmp_path):
    lengths = rollouts(64)
    named = Model.known("InternVL3-8B")
    (tmp_path / "config.json").write_text(json.dumps(named.config))
    config = SimpleNamespace(to_dict=lambda: named.config)
    expected = plain(balanced_rows(lengths, "InternVL3-8B", 4, 32768))
    assert expected != plain(balanced_rows(lengths, "InternVL3-38B", 4, 32768)), "an encoder of 6B costs more"
    for model in (tmp_path, str(tmp_path), named.config, config, SimpleNamespace(config=config)):
        assert plain(balanced_rows(lengths, model, 4, 32768)) == expected


def test_patches_that_attend_to_a_whole_image_cost_more():
    squared = np.where(np.arange(32) % 2, 4000**2, 4 * 1000**2)  # one image, or four, of 4000 patches in all
    lengths = SampleLengths([4000] * 32, [1100] * 32, vision_squared=squared)
    rows = balanced_rows(lengths, "Qwen2-VL-2B", 8, 10**6)
    assert {sorted(squared[rank[0]])[1] for rank in rows} == {4 * 1000**2}, "each rank gets two of both"


@pytest.mark.parametrize(
    ("given_lengths", "options", "error", "message"),
    [
        (SampleLengths([], []), {}, DataError, "rollouts must be at least one, got none"),
        (SampleLengths([0, 1], [5, 0]), {}, DataError, "rollouts must have tokens, got none in rollout 1"),
        (
            SampleLengths([0, 1], [5, 120]), {}, InfeasibleError,
            r"rollouts must be no longer than token_budget, got 120 of at most 100 tokens \(rollout 1\); raise",
        ),
        (SampleLengths([0], [5]), {"ranks": 0}, ConfigError, "ranks must be at least 1, got 0"),
        (SampleLengths([0], [5]), {"model": "no-such"}, ConfigError, "model must be a known name, a Hugging Face"),
        (SampleLengths([0], [5]), {"model": 5}, ConfigError, "model must be a name, a folder, .*, got int; or give"),
        (SampleLengths([0], [5]), {"model": (1, 2)}, ConfigError, "model must be a name, .* got tuple; or give the"),
    ],
)  # fmt: skip
def test_refusals(given_lengths, options, error, message):
    with pytest.raises(error, match=f"^{message}") as raised:
        balanced_rows(given_lengths, **{"model": PAIR, "ranks": 2, "token_budget": 100, **options})
    assert "\n" not in str(raised.value)
