"""Draws what balance brings by ranks, spread of images and trainer: python -m tools.advise.map; see RESULTS.md."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.models import Model
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.device import DEVICES
from omnibal.profile.counted import analytic_profile
from omnibal.report.style import drawing

OUT = Path(__file__).parents[2] / "docs" / "pictures" / "advise.png"
TRAINERS = {"ddp": "DDP, ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3, FSDP"}
RANKS = (2, 8, 32, 128, 512)
SPREADS = (0.0, 0.25, 0.5, 1.0, 1.5)
"""Of the tiles of a sample: standard deviation over mean."""
MEAN_TILES, TEXT, TOKENS_PER_TILE = 6, 150, 256
BATCH = 4
ACCUMULATIONS = (1, 8)
SAMPLES, COLOURS = 20_000, 48
LIGHT_ON_DARK = 1.7  # gains whose field is so dark that figures are white


def lengths(spread: float) -> SampleLengths:
    """Samples with so many tiles on average, log-normal, and about as much text."""
    generator = np.random.default_rng(0)
    sigma = np.sqrt(np.log1p(spread**2))
    tiles = np.maximum(generator.lognormal(np.log(MEAN_TILES) - sigma**2 / 2, sigma, SAMPLES).round(), 1).astype(int)
    text = generator.lognormal(np.log(TEXT), 0.5, SAMPLES).astype(int)
    return SampleLengths(tiles, tiles * TOKENS_PER_TILE + text)


def gains(trainer: str, accumulation: int) -> np.ndarray:
    """Samples a second of even packs over those of random ones without padding, shape (spreads, ranks)."""
    device = replace(DEVICES["A100-80GB"], memory_bytes=1 << 50)  # packs are as large as batches
    profile = analytic_profile(Model.known("InternVL3-8B").records, device)
    found = np.empty((len(SPREADS), len(RANKS)))
    for row, spread in enumerate(SPREADS):
        for column, ranks in enumerate(RANKS):
            scenario = Scenario(lengths(spread), profile, Cluster(1, ranks, device), ranks * accumulation * BATCH)
            random = Recipe(trainer, "flattened", BATCH, accumulation, "none")
            seconds = [scenario.estimate(way).sample_seconds.mean() for way in (random, scenario.packed(random))]
            found[row, column] = seconds[0] / seconds[1]
    return found


def main() -> None:
    """Write the picture, and print its figures."""
    with drawing(OUT, 9.0, 4.6) as figure:
        panels = figure.subplots(len(ACCUMULATIONS), len(TRAINERS), sharex=True, sharey=True)
        for accumulation, row in zip(ACCUMULATIONS, panels, strict=True):
            for (trainer, title), axes in zip(TRAINERS.items(), row, strict=True):
                found = gains(trainer, accumulation)
                print(trainer, accumulation, found.round(2).tolist(), flush=True)
                axes.imshow(found, origin="lower", aspect="auto", cmap="YlGn", vmin=1, vmax=2.2)
                for (y, x), gain in np.ndenumerate(found):
                    colour = "white" if gain > LIGHT_ON_DARK else "black"
                    axes.text(x, y, f"{gain:.2f}", ha="center", va="center", fontsize=8, color=colour)
                axes.grid(visible=False)
                axes.set_title(f"{title}, accumulation {accumulation}", loc="left", fontsize=9)
                axes.set_xticks(range(len(RANKS)), [f"{ranks}" for ranks in RANKS])
                axes.set_yticks(range(len(SPREADS)), [f"{spread:g}" for spread in SPREADS])
            row[0].set_ylabel("spread of tiles")
        for axes in panels[-1]:
            axes.set_xlabel("ranks")
    with Image.open(OUT) as drawn:  # few colours, so that the repository stays small
        small = drawn.convert("RGB").quantize(COLOURS)
    small.save(OUT, optimize=True)


if __name__ == "__main__":
    main()
