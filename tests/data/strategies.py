"""Hypothesis strategies for sample lengths and limits."""

import numpy as np
from hypothesis import strategies as st

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits


@st.composite
def sample_lengths(draw, *, max_samples=40, max_vision_units=12, max_llm_tokens=60):
    """Few samples with small loads, zeros, duplicates and samples over usual limits among them."""
    count = draw(st.integers(0, max_samples))
    vision = draw(st.lists(st.integers(0, max_vision_units), min_size=count, max_size=count))
    tokens = draw(st.lists(st.integers(0, max_llm_tokens), min_size=count, max_size=count))
    return SampleLengths(np.array(vision, dtype=np.int64), np.array(tokens, dtype=np.int64))


@st.composite
def pack_limits(draw, *, max_vision_units=14, max_llm_tokens=80):
    vision = draw(st.integers(0, max_vision_units))
    tokens = draw(st.integers(1, max_llm_tokens))
    full_vision = draw(st.none() | st.integers(1, max(vision, 1)))
    full_tokens = draw(st.none() | st.integers(1, tokens))
    return PackLimits(vision, tokens, full_vision_units=full_vision, full_llm_tokens=full_tokens)
