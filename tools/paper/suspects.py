"""What may separate Tables 8, 10 and 12 from the paper's: samples of a pack, recomputation; see README.md."""

from dataclasses import replace

import numpy as np
from datasets import LCS, SAMPLES, at_resolution, captions, cut_into, llava
from ladder import gpu_days, ladder
from markdown import table
from scipy.optimize import brentq
from setting import Setting
from tables import TABLE_8, TABLE_10, TABLE_12

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.synthetic import tiled_lengths

NAMES = ("", "tiles of a sample", "samples of a pack", "baseline", "+ memory", "+ model", "paper")
Row = tuple[str, ...]


def main() -> None:
    """Print all of it as Markdown."""
    for number, rows in ((8, datasets()), (10, tile_limits()), (12, resolutions())):
        print(f"### Table {number}\n\n{table(NAMES, rows)}\n", flush=True)


def datasets() -> list[Row]:
    """LCS-558K's pictures in one tile each; and in as many as make the 5.8 samples a pack of the paper's Table 11."""
    other = replace(LCS[0], tile_shares=(0.0, 0.725, 0.275, 0.0, 0.0))
    cut = tiled_lengths(SAMPLES, seed=1, sources=(other,))
    days = TABLE_8["LCS-558K"]
    return [
        row("LLaVA-665K", Setting(lengths=llava(), samples=665_000), TABLE_8["LLaVA-665K"]),
        row("LCS-558K", Setting(lengths=captions(), samples=558_000), days),
        row("LCS-558K, as many samples a pack", Setting(lengths=cut, samples=558_000), days),
    ]


def tile_limits() -> list[Row]:
    """Up to 6 and 12 tiles; and samples drawn again such that packs hold the paper's 2.7 and 1.9."""
    rows = []
    for most, packed in ((6, 2.7), (12, 1.9)):
        vision, tokens, *days = TABLE_10[most]
        drawn, limits = cut_into(most), PackLimits(vision, tokens)
        rows.append(row(f"at most {most} tiles", Setting(lengths=drawn, limits=limits), days))
        again = with_packs_of(Setting(lengths=drawn, limits=limits), packed)
        rows.append(row(f"at most {most} tiles, as many samples a pack", again, days))
    return rows


def resolutions() -> list[Row]:
    """Tiles of 224 and 336 pixels; and samples drawn again such that packs hold the paper's 4.8 and 3.3."""
    rows = []
    for pixels, packed in ((224, 4.8), (336, 3.3)):
        drawn, days = at_resolution(pixels), TABLE_12[pixels]
        rows.append(row(f"{pixels} pixels", Setting(lengths=drawn, image_size=pixels), days))
        again = with_packs_of(Setting(lengths=drawn, image_size=pixels), packed)
        rows.append(row(f"{pixels} pixels, as many samples a pack", again, days))
    return rows


def row(name: str, setting: Setting, published: tuple[float, ...] | list[float]) -> Row:
    """GPU days of the ladder; "+ model" recomputes everything."""
    first, _, model, memory = (gpu_days(setting, rung) for rung in ladder(setting, ours=False))
    tiles = setting.drawn.vision_units.mean()
    before, after = published
    days = (f"{value:.1f}" for value in (first, memory, model))
    return name, f"{tiles:.2f}", f"{samples_of_a_pack(setting):.1f}", *days, f"{before:g} → {after:g}"


def samples_of_a_pack(setting: Setting) -> float:
    """By ISF."""
    return setting.packed.samples_per_step / (setting.row.num_replicas * setting.micro_batches)


def with_packs_of(setting: Setting, samples: float) -> Setting:
    """The setting with its samples drawn again such that a pack holds so many."""
    found, mean = setting, float(setting.drawn.vision_units.mean())
    for _ in range(4):
        mean *= samples_of_a_pack(found) / samples
        found = replace(setting, lengths=with_tiles(setting.drawn, mean))
    return found


def with_tiles(lengths: SampleLengths, mean: float) -> SampleLengths:
    """Samples drawn again, those with more tiles more often, until a sample has so many on average."""
    tiles = lengths.vision_units.astype(np.float64)

    def shares(tilt: float) -> np.ndarray:
        weights = np.exp(tilt * (tiles - tiles.max()))
        return weights / weights.sum()

    tilt = brentq(lambda tilt: float(shares(tilt) @ tiles) - mean, -5, 5)
    chosen = np.random.default_rng(3).choice(len(tiles), size=len(tiles), p=shares(tilt))
    return SampleLengths(lengths.vision_units[chosen], lengths.llm_tokens[chosen])


if __name__ == "__main__":
    main()
