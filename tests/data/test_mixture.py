"""What a mixture says of shares, and what it refuses."""

import sys

import numpy as np
import pytest
from pydantic import BaseModel

from omnibal.config.section import MixtureSetting
from omnibal.data.packing_spec import Knot, Mixture
from omnibal.errors import ConfigError


def test_shares_are_weights():
    assert Mixture({"ocr": 3, "chat": 5, "text": 2}).shares_at(7).tolist() == [0.3, 0.5, 0.2]
    for share in (sys.float_info.max, 1e308, 1e-300, 5e-324):
        assert Mixture({"ocr": share, "chat": share}).shares_at(7).tolist() == [0.5, 0.5]


def test_schedule_is_linear_between_knots():
    mixture = Mixture({"a": 1, "b": 1}, schedule=(Knot(10, {"a": 3, "b": 1}), Knot(11, {"c": 2})))
    assert mixture.sources == ("a", "b", "c")
    shares = mixture.shares_at([0, 5, 10, 11, 1000])
    expected = [[0.5, 0.5, 0], [0.625, 0.375, 0], [0.75, 0.25, 0], [0, 0, 1], [0, 0, 1]]
    np.testing.assert_allclose(shares, expected)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"a": 1, "b": 2}, Mixture({"a": 1, "b": 2})),
        ({"shares": 1, "by": 2}, Mixture({"shares": 1, "by": 2})),  # sources of these names
        (
            {"shares": {"a": 1}, "by": "llm_tokens", "schedule": [{"step": 9, "shares": {"b": 1}}]},
            Mixture({"a": 1}, "llm_tokens", (Knot(9, {"b": 1}),)),
        ),
        (Mixture({"a": 1}), Mixture({"a": 1})),
    ],
)
def test_forms(written, meant):
    assert Mixture.of(written) == meant


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"a": -1, "b": 2}, "shares must be at least 0, got a: -1.0"),
        ({"a": 0}, "shares must sum to more than 0, got {'a': 0.0}"),
        ({"a": float("nan")}, "shares must be numbers, got a: nan"),
        ({"a": float("inf")}, "shares must be numbers, got a: inf"),
        ({"a": "much"}, "mixture.shares must be a valid number, .* got 'much'"),
        (3, "mixture must be shares by source, or an object that has them, got 3"),
        ({"shares": {"a": 1}, "by": "tokens"}, "mixture.by must be 'samples', .* got 'tokens'"),
        ({"shares": {"a": 1}, "schedul": []}, "did you mean 'schedule'?"),
        ({"shares": {"a": 1}, "schedule": [{"step": 0, "shares": {"a": 1}}]}, "schedule must be at least 1, got 0"),
        (
            {"shares": {"a": 1}, "schedule": [{"step": 9, "shares": {"a": 1}}, {"step": 9, "shares": {"b": 1}}]},
            r"schedule must ascend, got \[9, 9\]",
        ),
        ({"shares": {"a": 1}, "schedule": [{"step": 9, "shares": {"b": 0}}]}, "shares at step 9 must sum to more"),
    ],
)
def test_refused(written, message):
    with pytest.raises(ConfigError, match=message) as error:
        Mixture.of(written)
    assert "\n" not in str(error.value)


def test_a_share_beyond_floating_point_is_refused():
    with pytest.raises(ConfigError, match="shares must be numbers, got a: 1000"):
        Mixture({"a": 10**400, "b": 1})


def test_refused_in_a_configuration():
    class Section(BaseModel):
        mixture: MixtureSetting

    with pytest.raises(ValueError, match="shares must sum to more than 0"):
        Section(mixture={"a": 0})


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["chats", "ocr"], "mixture must name sources of the data, got 'chat'; did you mean 'chats'?"),
        (["xyz"], "got 'chat'; the sources are 'xyz'"),
        (["chat", "ocr"], "must name every source of the data, got no share of 'ocr'; give it 0 to leave it out"),
    ],
)
def test_sources_are_those_of_the_data(sources, message):
    with pytest.raises(ConfigError, match=message):
        Mixture({"chat": 1}).check_sources(sources)
