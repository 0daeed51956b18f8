import dataclasses

import numpy as np
import pytest
from hypothesis import given

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits, paper_limits
from omnibal.errors import ConfigError, DataError
from tests.data.strategies import pack_limits, sample_lengths


def test_full_marks_by_default():
    assert dataclasses.astuple(PackLimits(9, 4096)) == (9, 4096, 9, 3968, None)
    assert dataclasses.astuple(PackLimits(0, 101)) == (0, 101, 1, 51, None)
    assert dataclasses.astuple(PackLimits(9, 4096, full_vision_units=8, full_llm_tokens=4000)) == (
        9,
        4096,
        8,
        4000,
        None,
    )


def test_equal_limits_are_equal_and_survive_a_dictionary():
    limits = PackLimits(np.int32(9), 4096)
    assert limits == PackLimits(9, 4096)
    assert PackLimits(**dataclasses.asdict(limits)) == limits
    assert type(limits.vision_units) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vision_units": -1, "llm_tokens": 1}, "vision_units must be between 0 and 4194304, got -1"),
        ({"vision_units": 1, "llm_tokens": 0}, "llm_tokens must be between 1 and 4194304, got 0"),
        ({"vision_units": 1, "llm_tokens": 10**9}, "llm_tokens must be between 1 and 4194304, got 1000000000"),
        ({"vision_units": 1.5, "llm_tokens": 1}, "vision_units must be an integer, got 1.5"),
        ({"vision_units": True, "llm_tokens": 1}, "vision_units must be an integer, got True"),
        (
            {"vision_units": 3, "llm_tokens": 9, "full_vision_units": 4},
            "full_vision_units must be between 1 and 3, got 4",
        ),
        ({"vision_units": 3, "llm_tokens": 9, "full_llm_tokens": 0}, "full_llm_tokens must be between 1 and 9, got 0"),
    ],
)
def test_bad_limits_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PackLimits(**arguments)


@given(sample_lengths(), pack_limits())
def test_oversized_samples(lengths, limits):
    loads = zip(lengths.vision_units.tolist(), lengths.llm_tokens.tolist(), strict=True)
    expected = [s for s, (v, t) in enumerate(loads) if v > limits.vision_units or t > limits.llm_tokens]
    assert limits.oversized(lengths).tolist() == expected


def test_no_sample_is_read_where_the_summary_rules_oversized_ones_out(tmp_path):
    SampleLengths([1, 5], [300, 1400]).save(tmp_path)
    lengths = SampleLengths.load(tmp_path)
    lengths.vision_units = lengths.llm_tokens = None
    assert PackLimits(5, 1400).oversized(lengths).tolist() == []


def test_the_rule_of_the_paper():
    # 455 tokens to a tile and 4096 to the longest sample, as in InternVL-1.2M.
    assert paper_limits(SampleLengths([9, 1, 5], [4096, 455, 2275])) == PackLimits(9, 4096, full_llm_tokens=4096 - 128)
    # A sample with more tiles than the ratio asks for still fits.
    assert paper_limits(SampleLengths([7, 1], [910, 5000])).vision_units == 7
    assert paper_limits(SampleLengths([0, 0], [40, 30])) == PackLimits(0, 40)


def test_a_sample_too_large_for_any_limits_is_named():
    with pytest.raises(DataError, match=r"at most 4194304 .* got 1 and 1073741824 for sample 1; leave it out"):
        paper_limits(SampleLengths([3, 1], [900, 2**30]))


@given(sample_lengths())
def test_no_sample_is_over_the_limits_of_the_paper(lengths):
    assert paper_limits(lengths).oversized(lengths).tolist() == []


def test_limits_that_are_given_stay_and_the_rule_says_the_others():
    lengths = SampleLengths([9, 1, 5], [4096, 455, 2275])
    assert choose_limits(lengths) == paper_limits(lengths)
    assert choose_limits(lengths, 12) == PackLimits(12, 4096)
    text_too = SampleLengths([0, 1], [10, 20])
    assert choose_limits(text_too, 0) == PackLimits(0, 20)  # 0 is a limit, too
    assert choose_limits(lengths, llm_tokens=5000) == PackLimits(9, 5000)
    # the rule is not asked where it has nothing to say
    assert choose_limits(SampleLengths([3, 1], [900, 2**30]), 9, 1000) == PackLimits(9, 1000)


def test_no_samples_are_no_samples_over_the_limits():
    with pytest.raises(DataError, match=r"^lengths must hold at least one sample, got none$"):
        PackLimits(9, 99).refuse_none(SampleLengths([], []))


def test_limits_that_all_samples_exceed_are_refused():
    with pytest.raises(DataError, match="limits must hold at least one sample, got 1 vision units and 9 LLM tokens"):
        choose_limits(SampleLengths([0, 1], [10, 20]), 1, 9)
