"""Made-up sample lengths that look like real ones, for tests, documentation and benchmarks."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError

TOKENS_PER_TILE: Final = 256
PATCHES_PER_TOKEN: Final = 4
LONGEST_SAMPLE: Final = 4096
TILES: Final = np.array([0, 1, 3, 4, 5])


@dataclass(frozen=True)
class SyntheticSource:
    """Statistics of one source; text tokens are ``least_text`` and a log-normal number beyond."""

    name: str
    samples: int
    tile_shares: tuple[float, float, float, float, float]  # of samples with 0, 1, 3, 4 and 5 tiles; they add up to 1
    median_text: int
    spread: float  # standard deviation of the logarithm of the text tokens beyond ``least_text``
    least_text: int


# The mix that InternVL-Chat-1.2 was tuned on, about 1.27 million samples: nine sources in the proportions of their
# published sizes. Four of them (ai2d, chartqa, docvqa, synthdog) follow the lengths that OmniBal's authors published,
# sharegpt4v's texts the length that its paper states (826 characters). No length of the others is public, but OmniBal's
# paper says what all nine together look like in a model of tiles:
# - 1.9 ± 1.2 tiles to a sample (table 1: 1.9 ± 1.2 thousand tokens for the ViT, a thousand to a tile). That says how
#   the photographs of llava_mix, llava_instruct_zh and sharegpt4v divide into one, three and five tiles.
# - 7.6 samples in a pack of 4096 tokens where every image is one tile (table 10), 4.6 in a pack of 9 tiles where it is
#   up to five. That makes 260 tokens of text in the mean: 0.7 times an estimate from what the papers of llava_mix,
#   dvqa, llava_instruct_zh and geoqa say of their conversations, the same factor for all four.
# Figures that were not fitted agree on the 8 ranks of the published test script: Dist Ratios of ISF (tables 3 and 6)
# and of random batches, LLaVA's part alone (table 8). On the paper's 4 ranks ISF's are 0.021 and 0.11 (0.02 and 0.14 in
# the paper), those of random batches 0.25 and 0.23 (0.34 and 0.30). Two figures do not agree: the padding of random
# batches is 34 % (31 % in the paper), and Dist Ratios differ with one tile to an image. ``tools/sampling/RESULTS.md``
# has all of them side by side. The paper counts a sample without an image as one tile, for the blank image that it
# shows the ViT; here such a sample has none.
INTERNVL_MIX: Final = (
    SyntheticSource("llava_mix", 665_058, (0.06, 0.52, 0.34, 0.02, 0.06), 186, 0.85, 36),
    SyntheticSource("dvqa", 200_000, (0.0, 0.94, 0.03, 0.0, 0.03), 348, 0.55, 40),
    SyntheticSource("llava_instruct_zh", 157_712, (0.0, 0.60, 0.36, 0.01, 0.03), 222, 0.45, 40),
    SyntheticSource("sharegpt4v", 102_025, (0.0, 0.50, 0.38, 0.02, 0.10), 240, 0.30, 60),
    SyntheticSource("geoqa", 72_318, (0.0, 0.94, 0.04, 0.0, 0.02), 151, 0.40, 60),
    SyntheticSource("synthdog", 29_765, (0.0, 0.0, 0.58, 0.0, 0.42), 110, 0.60, 34),
    SyntheticSource("chartqa", 18_317, (0.0, 0.03, 0.06, 0.0, 0.91), 66, 1.05, 33),
    SyntheticSource("ai2d", 12_413, (0.0, 0.47, 0.30, 0.05, 0.18), 52, 0.60, 36),
    SyntheticSource("docvqa", 10_211, (0.0, 0.01, 0.27, 0.01, 0.71), 275, 0.75, 40),
)


def tiled_lengths(
    num_samples: int,
    *,
    seed: int | np.random.Generator = 0,
    sources: tuple[SyntheticSource, ...] = INTERNVL_MIX,
    text_share: float | None = None,
) -> SampleLengths:
    """Draw samples of a model that cuts images into tiles of 256 tokens, as InternVL does.

    Args:
        num_samples: How many.
        seed: Seed or generator.
        sources: The mix; column ``source`` numbers them in this order.
        text_share: Share of samples without an image, spread over all sources; by default what the mix says.

    Returns:
        Lengths with target tokens and sources; no sample is longer than 4096 tokens.

    Raises:
        ConfigError: ``num_samples`` is negative, or ``text_share`` lies outside 0 … 1.

    >>> lengths = tiled_lengths(1000, seed=1)
    >>> sorted(set(lengths.vision_units.tolist())), lengths.summary.max_llm_tokens <= 4096
    ([0, 1, 3, 4, 5], True)
    """
    generator = _checked(num_samples, text_share, seed)
    sizes = np.array([source.samples for source in sources], dtype=np.float64)
    source = generator.choice(len(sources), size=num_samples, p=sizes / sizes.sum()).astype(np.int32)
    tiles = np.empty(num_samples, dtype=np.int32)
    text = np.empty(num_samples, dtype=np.int32)
    for number, statistics in enumerate(sources):
        members = np.flatnonzero(source == number)
        tiles[members] = generator.choice(TILES, size=len(members), p=statistics.tile_shares)
        text[members] = _text_tokens(statistics, len(members), generator)
    if text_share is not None:
        without_image = generator.random(num_samples) < text_share
        tiles[without_image] = 0
        tiles[~without_image] = np.maximum(tiles[~without_image], 1)
    return _with_targets(tiles, tiles * TOKENS_PER_TILE, text, source=source, squared=None, generator=generator)


def patch_lengths(num_samples: int, *, seed: int | np.random.Generator = 0, text_share: float = 0.06) -> SampleLengths:
    """Draw samples of a native-resolution model, whose images bring a patch for every 14 × 14 pixels.

    Images have between 64 and 10,240 patches (median about 1,200, log-normal) and a token for every 2 × 2 patches, as
    with Qwen2-VL; a tenth of the samples have two to four images. ``vision_squared`` sums patches² over images.

    Args:
        num_samples: How many.
        seed: Seed or generator.
        text_share: Share of samples without an image.

    Raises:
        ConfigError: ``num_samples`` is negative, or ``text_share`` lies outside 0 … 1.
    """
    generator = _checked(num_samples, text_share, seed)
    images = np.where(generator.random(num_samples) < 0.9, 1, generator.integers(2, 5, num_samples))
    images[generator.random(num_samples) < text_share] = 0
    sample = np.repeat(np.arange(num_samples), images)
    tokens = np.exp(generator.normal(np.log(300), 0.8, len(sample)))
    patches = np.clip(tokens, 16, 2560).astype(np.int64) * PATCHES_PER_TOKEN
    units = np.bincount(sample, weights=patches, minlength=num_samples).astype(np.int64)
    squared = np.bincount(sample, weights=patches.astype(np.float64) ** 2, minlength=num_samples).astype(np.int64)
    sources = np.array([0, 1, 2, 3])
    source = generator.choice(sources, size=num_samples, p=(0.5, 0.25, 0.15, 0.1)).astype(np.int32)
    text = np.exp(generator.normal(np.log([250, 480, 110, 60])[source], 0.6)).astype(np.int64) + 34
    return _with_targets(units, units // PATCHES_PER_TOKEN, text, source=source, squared=squared, generator=generator)


def _checked(num_samples: int, text_share: float | None, seed: int | np.random.Generator) -> np.random.Generator:
    if num_samples < 0:
        raise ConfigError(f"num_samples must be at least 0, got {num_samples}")
    if text_share is not None and not 0 <= text_share <= 1:
        raise ConfigError(f"text_share must lie between 0 and 1, got {text_share}")
    return np.random.default_rng(seed)


def _text_tokens(statistics: SyntheticSource, count: int, generator: np.random.Generator) -> npt.NDArray[np.int32]:
    center = np.log(statistics.median_text - statistics.least_text)
    beyond = np.exp(generator.normal(center, statistics.spread, count))
    return (statistics.least_text + np.minimum(beyond, LONGEST_SAMPLE)).astype(np.int32)


def _with_targets(
    units: npt.NDArray[np.integer],
    image_tokens: npt.NDArray[np.integer],
    text: npt.NDArray[np.integer],
    *,
    source: npt.NDArray[np.int32],
    squared: npt.NDArray[np.int64] | None,
    generator: np.random.Generator,
) -> SampleLengths:
    longest = np.maximum(image_tokens + 64, LONGEST_SAMPLE)
    tokens = np.minimum(image_tokens + text, longest)
    targets = ((tokens - image_tokens) * generator.uniform(0.2, 0.8, len(tokens))).astype(np.int32)
    return SampleLengths(units, tokens, target_tokens=np.maximum(targets, 1), vision_squared=squared, source=source)
