import numpy as np
import pytest

from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.limits import PackLimits, paper_limits
from omnibal.data.synthetic import INTERNVL_MIX, patch_lengths, tiled_lengths
from omnibal.errors import ConfigError
from tests.data.real_lengths import FILES, needs_real_lengths, real_lengths


def text_tokens(lengths):
    return lengths.llm_tokens - 256 * lengths.vision_units


def test_the_mix_has_the_published_statistics():
    lengths = tiled_lengths(100_000)
    limits = paper_limits(lengths)
    assert limits == PackLimits(9, 4096)
    packs = iterative_sampling_and_filtering(lengths, limits)
    assert 4.4 < len(lengths) / len(packs) < 4.8  # 4.6 in the paper's table 3


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
