from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.errors import ConfigError
from omnibal.memory.paper import (
    BlockBytes,
    Blocks,
    block_modules,
    count_blocks,
    estimate_block_bytes,
    keep_most,
    levels_of,
    retreat,
)
from omnibal.pipeline.partition import Partition
from tests.memory.models import block as layer

MODULES = [None, *["vision"] * 3, None, *["language"] * 4, None]
COUNTS = st.builds(Blocks, st.integers(0, 6), st.integers(0, 6))
BYTES = st.builds(BlockBytes, st.integers(1, 20).map(float), st.integers(1, 20).map(float))


def test_the_four_steps_on_a_made_up_machine():
    partition = Partition((0, 5, 10))
    blocks, in_flight, true = count_blocks(MODULES, partition), (2, 1), BlockBytes(7, 5)
    assert blocks == (Blocks(3, 0), Blocks(0, 4))
    free = [30.0, 12.0]
    trial = [Blocks(1, 0), Blocks(0, 2)]
    free_trial = [f - held * true.of(kept) for f, held, kept in zip(free, in_flight, trial, strict=True)]
    estimate = estimate_block_bytes(free, free_trial, trial, in_flight)
    assert (estimate.vision, estimate.llm) == pytest.approx((7, 5))
    kept = keep_most(free, blocks, estimate, in_flight)
    assert kept == (Blocks(2, 0), Blocks(0, 2))
    assert levels_of(kept, MODULES, partition) == (
        *("none", "full", "none", "none", "none"),
        *("full", "full", "none", "none", "none"),
    )
    assert retreat(kept, [3.0, 0.0], estimate, in_flight) == (Blocks(1, 0), Blocks(0, 2))


def test_blocks_are_the_numbered_layers():
    layers = [layer(name) for name in ("patch_embedding", "vision_block.0", "projector", "decoder_block.0", "head")]
    layers = [replace(one, module="vision") if place < 2 else one for place, one in enumerate(layers)]
    assert block_modules(layers) == (None, "vision", None, "language", None)


@given(st.lists(st.tuples(COUNTS, st.integers(1, 4)), min_size=1, max_size=5), BYTES)
def test_estimates_are_exact_where_measurements_are(stages, true):
    kept, in_flight = [blocks for blocks, _ in stages], [held for _, held in stages]
    free = [1000.0] * len(stages)
    after = [f - held * true.of(blocks) for f, (blocks, held) in zip(free, stages, strict=True)]
    found = estimate_block_bytes(free, after, kept, in_flight)
    assert [found.of(blocks) for blocks in kept] == pytest.approx([true.of(blocks) for blocks in kept], abs=1e-6)


@given(COUNTS, BYTES, st.integers(0, 300), st.integers(1, 4))
def test_no_more_blocks_could_keep(blocks, block_bytes, free, held):
    (kept,) = keep_most([free], [blocks], block_bytes, [held])
    assert held * block_bytes.of(kept) <= free or kept == Blocks(0, 0)
    counts = [
        v + t
        for v in range(blocks.vision + 1)
        for t in range(blocks.llm + 1)
        if held * block_bytes.of(Blocks(v, t)) <= free
    ]
    assert kept.vision + kept.llm == max(counts, default=0)


@given(COUNTS, BYTES, st.integers(-5, 200), st.integers(1, 4))
def test_a_retreat_frees_what_was_missing(kept, block_bytes, missing, held):
    (left,) = retreat([kept], [missing], block_bytes, [held])
    if missing <= 0:
        assert left == kept
        return
    assert left.vision <= kept.vision and left.llm <= kept.llm
    freed = held * (block_bytes.of(kept) - block_bytes.of(left))
    count, fewer = kept.vision + kept.llm, left.vision + left.llm
    if held * block_bytes.of(kept) >= missing:
        assert freed >= missing
    else:  # all of them would not do: the bytes are wrong, and the next trial shows more
        assert fewer == max(count - 1, 0)
    assert left != kept or kept == Blocks(0, 0)


def test_a_retreat_whose_bytes_explain_nothing_takes_one_block():
    """A block keeps 0.49 GiB, estimated as nothing: 24 are 0.16 GiB too many, and 23 fit."""
    unknown = BlockBytes(0, 0)
    assert retreat([Blocks(0, 24)], [0.16], unknown, [1]) == (Blocks(0, 23),)
    assert retreat([Blocks(3, 2)], [0.16], unknown, [4]) == (Blocks(3, 1),)
    assert retreat([Blocks(3, 0), Blocks(0, 0)], [1, 1], unknown, [2, 1]) == (Blocks(2, 0), Blocks(0, 0))


def test_what_was_never_kept_is_unknown_and_counts_nothing():
    assert estimate_block_bytes([50, 60], [30, 60], [Blocks(2, 0), Blocks(0, 0)], [1, 1]) == BlockBytes(10, 0)


def test_measurements_of_different_stages_are_refused():
    with pytest.raises(ConfigError, match="measurements must be of equally many stages, got 2, 2, 1 and 2"):
        estimate_block_bytes([1, 2], [1, 2], [Blocks(1, 1)], [2, 1])
