"""What may separate Tables 8, 10, 11 and 12 from the paper's: samples of a pack, recomputation; see README.md."""

from dataclasses import replace

import numpy as np
from scipy.optimize import brentq

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from tools.bench import table
from tools.paper.datasets import LCS, SAMPLES, captions, cut_into, llava, with_tiles
from tools.paper.ladder import gpu_days, ladder, rung
from tools.paper.setting import Setting
from tools.paper.tables import TABLE_8, TABLE_10, TABLE_11, TABLE_12, frozen_setting
from tools.synthetic import TOKENS_PER_TILE, tiled_lengths

NAMES = ("", "tiles of a sample", "samples of a pack", "baseline", "+ memory", "+ model", "paper")
FROZEN_NAMES = ("", "baseline", "the same, nothing recomputed", "+ memory", "+ model", "paper")
Row = tuple[str, ...]
FITTED_TEXT = 0.7
"""The mix's texts over what their papers say; see ``tools/synthetic.py``."""


def main() -> None:
    """Print all of it as Markdown."""
    for number, rows in ((8, datasets()), (10, tile_limits()), (12, resolutions())):
        print(f"### Table {number}\n\n{table(NAMES, rows)}\n", flush=True)
    print(f"### Table 11\n\n{table(FROZEN_NAMES, frozen())}\n", flush=True)


def datasets() -> list[Row]:
    """LLaVA-665K, and what could make its baseline dearer; LCS-558K in one tile, and in as many as the paper packs.

    The paper's Table 11 has 5.8 samples of LCS-558K in a pack.
    """
    drawn = llava()
    tiles, images = drawn.vision_units, TOKENS_PER_TILE * drawn.vision_units
    longer = images + (drawn.llm_tokens - images) / FITTED_TEXT
    of_llava = {
        "": drawn,
        ", a blank tile for text alone": SampleLengths(tiles.clip(1), drawn.llm_tokens),
        ", texts × 1.4": SampleLengths(tiles, longer.astype(np.int64).clip(max=4096)),
        ", no texts": SampleLengths(tiles.clip(1), images.clip(TOKENS_PER_TILE)),
        ", tiles × 1.3": drawn_again(drawn, 1.3 * float(tiles.mean())),
    }
    wider = replace(LCS[0], tile_shares=(0.0, 0.725, 0.275, 0.0, 0.0))
    of_lcs = {"": captions(), ", as many samples a pack": tiled_lengths(SAMPLES, seed=1, sources=(wider,))}
    return [
        row(f"{name}{change}", Setting(lengths=lengths, samples=samples), TABLE_8[name])
        for name, samples, changes in (("LLaVA-665K", 665_000, of_llava), ("LCS-558K", 558_000, of_lcs))
        for change, lengths in changes.items()
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
    """Tiles of 224 and 336 pixels: as many as of 448; and as many as InternVL's rule cuts the same images into."""
    rows = []
    for pixels in (224, 336):
        vision, tokens, *days = TABLE_12[pixels]
        alike = with_tiles(tiled_lengths(SAMPLES, seed=1), pixels=pixels)
        rows.append(row(f"{pixels} pixels, tiles as of 448", Setting(lengths=alike, image_size=pixels), days))
        limits = PackLimits(vision, tokens)
        cut = Setting(lengths=cut_into(pixels=pixels), limits=limits, image_size=pixels)
        rows.append(row(f"{pixels} pixels, cut by the rule", cut, days))
    return rows


def frozen() -> list[Row]:
    """Frozen parts: nothing recomputed; a frozen ViT at the front that runs backward passes all the same."""
    rows = []
    for name, (_, parts, before, after) in TABLE_11.items():
        settings = {"": frozen_setting(name)}
        if "vision" in parts:
            settings[", backward through the frozen ViT"] = _backward_everywhere(settings[""])
        for change, setting in settings.items():
            first, _, model, memory = ladder(setting, ours=False)
            none = ("none",) * len(setting.profile.layers)
            kept = rung(setting, "nothing recomputed", setting.padded(), setting.by_parameters, none)
            days = (f"{gpu_days(setting, found):.1f}" for found in (first, kept, memory, model))
            rows.append((f"{name}{change}", *days, f"{before:g} → {after:g}"))
    return rows


def _backward_everywhere(setting: Setting) -> Setting:
    """As if something were trained before all frozen layers."""
    first, *others = setting.profile.layers
    changed = replace(setting)
    vars(changed)["profile"] = replace(setting.profile, layers=(replace(first, trainable=True), *others))
    return changed


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
        found = replace(setting, lengths=drawn_again(setting.drawn, mean))
    return found


def drawn_again(lengths: SampleLengths, mean: float) -> SampleLengths:
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
