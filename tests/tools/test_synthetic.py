import numpy as np
import pytest

from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.errors import ConfigError
from tests.data.real_lengths import FILES, needs_real_lengths, real_lengths
from tools.synthetic import INTERNVL_MIX, patch_lengths, tiled_lengths


def text_tokens(lengths):
    return lengths.llm_tokens - 256 * lengths.vision_units


def as_the_paper_counts(lengths, most_tiles):
    """A blank image for samples without one, and at most so many tiles to an image."""
    tiles = np.clip(lengths.vision_units, 1, most_tiles)
    images = np.minimum(lengths.vision_units, most_tiles)
    return SampleLengths(tiles, text_tokens(lengths) + 256 * images)


@pytest.fixture(scope="module")
def mix():
    return tiled_lengths(100_000)


def test_the_mix_has_the_published_tiles(mix):
    tiles = as_the_paper_counts(mix, 5).vision_units
    assert tiles.mean() == pytest.approx(1.9, abs=0.05)  # OmniBal, table 1
    assert tiles.std() == pytest.approx(1.2, abs=0.1)


def test_the_mix_leads_to_the_published_limits(mix):
    assert mix.llm_tokens.max() == 4096
    # The published code takes the mean of lengths rounded up to multiples of 256.
    rounded = -(-mix.llm_tokens // 256) * 256
    assert 4096 // (rounded.mean() / as_the_paper_counts(mix, 5).vision_units.mean()) == 9


@pytest.mark.parametrize(
    ("most_tiles", "samples_per_pack"),
    [(5, 4.6), (1, 7.6)],  # OmniBal, table 10, with up to four tiles and a thumbnail, and with one
)
def test_packs_of_the_mix_hold_the_published_number_of_samples(mix, most_tiles, samples_per_pack):
    lengths = as_the_paper_counts(mix, most_tiles)
    packs = iterative_sampling_and_filtering(lengths, PackLimits(9, 4096))
    assert len(lengths) / len(packs) == pytest.approx(samples_per_pack, rel=0.04)


@pytest.mark.parametrize(
    ("full_vision_units", "vision", "tokens"),
    [(9, 0.0156, 0.144), (8, 0.0417, 0.20)],  # OmniBal, table 6
)
def test_packs_of_the_mix_have_about_the_published_dist_ratios(mix, full_vision_units, vision, tokens):
    lengths = as_the_paper_counts(mix, 5)
    packs = iterative_sampling_and_filtering(
        lengths, PackLimits(9, 4096, full_vision_units=full_vision_units), iterations=50
    )
    steps = np.random.default_rng(0).permutation(len(packs) // 8 * 8).reshape(-1, 8)
    assert dist_ratio(packs.vision_units(lengths)[steps]) == pytest.approx(vision, abs=0.01)
    assert dist_ratio(packs.llm_tokens(lengths)[steps]) == pytest.approx(tokens, abs=0.06)


@needs_real_lengths
@pytest.mark.parametrize("name", [path.name.split("_")[0] for path in FILES])
def test_sources_follow_real_lengths(name):
    real, made_up = real_lengths(), tiled_lengths(200_000)
    real = real.take(np.flatnonzero(real.source == [path.name.split("_")[0] for path in FILES].index(name)))
    number = [source.name for source in INTERNVL_MIX].index(name)
    made_up = made_up.take(np.flatnonzero(made_up.source == number))

    def tile_shares(lengths):
        return np.bincount(lengths.vision_units, minlength=6) / len(lengths)

    np.testing.assert_allclose(tile_shares(made_up), tile_shares(real), atol=0.03)
    quantiles = [0.05, 0.25, 0.5, 0.75, 0.95]
    np.testing.assert_allclose(
        np.quantile(text_tokens(made_up), quantiles), np.quantile(text_tokens(real), quantiles), rtol=0.25
    )


def test_tiled_samples_are_consistent():
    lengths = tiled_lengths(5000, seed=3)
    assert set(lengths.vision_units.tolist()) == {0, 1, 3, 4, 5}
    assert text_tokens(lengths).min() > 0
    assert lengths.llm_tokens.max() <= 4096
    assert (lengths.target_tokens >= 1).all()
    assert (lengths.target_tokens <= text_tokens(lengths)).all()
    assert set(lengths.source.tolist()) == set(range(len(INTERNVL_MIX)))


def test_share_of_samples_without_an_image():
    share = (tiled_lengths(20_000, text_share=0.3).vision_units == 0).mean()
    assert share == pytest.approx(0.3, abs=0.02)
    assert (tiled_lengths(1000, text_share=0).vision_units > 0).all()


def test_patches_bring_a_quarter_of_their_number_in_tokens():
    lengths = patch_lengths(5000)
    assert (lengths.vision_units % 4 == 0).all()
    assert (lengths.llm_tokens - lengths.vision_units // 4 > 0).all()
    assert (lengths.vision_squared <= lengths.vision_units.astype(np.int64) ** 2).all()
    assert (lengths.vision_squared >= lengths.vision_units.astype(np.int64) ** 2 // 4).all()
    assert 0.04 < (lengths.vision_units == 0).mean() < 0.08


@pytest.mark.parametrize("draw", [tiled_lengths, patch_lengths])
def test_draws_repeat_and_bad_arguments_are_refused(draw):
    assert draw(100, seed=5).content_hash == draw(100, seed=np.random.default_rng(5)).content_hash
    assert draw(100, seed=5).content_hash != draw(100, seed=6).content_hash
    assert len(draw(0)) == 0
    with pytest.raises(ConfigError, match="num_samples must be at least 0, got -1"):
        draw(-1)
    with pytest.raises(ConfigError, match=r"text_share must lie between 0 and 1, got 1\.5"):
        draw(1, text_share=1.5)
