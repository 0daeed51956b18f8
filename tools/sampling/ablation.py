"""Randomness of the balanced planner's steps, and harsh configurations: tables of ``RESULTS.md``.

python -m tools.sampling.ablation randomness        # χ² by ranks, the mean over 20 seeds with its standard error
python -m tools.sampling.ablation fuzz              # harsh configurations; prints those that fail
"""

from collections.abc import Iterator
from typing import Annotated, Final

import numpy as np
import typer

from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import source_mix, step_randomness, volume_bound
from omnibal.data.packs import Packs
from omnibal.errors import InfeasibleError
from tools.sampling.data import mixed_lengths, real_lengths
from tools.synthetic import INTERNVL_MIX, patch_lengths, tiled_lengths

LEAST_STEPS: Final = 50
"""χ² of fewer steps says little, and no epoch of training has so few."""
SEEDS: Final = 20
DOCUMENTS: Final = tuple(source for source in INTERNVL_MIX if source.name in {"synthdog", "chartqa", "ai2d", "docvqa"})


def datasets() -> dict[str, tuple[SampleLengths, PackLimits]]:
    """Lengths and limits, tight and generous; documents are made up, and hard to pack."""
    real, mix = real_lengths()[0], mixed_lengths()[0].take(np.arange(100_000))
    documents, patches = tiled_lengths(70_000, seed=3, sources=DOCUMENTS), patch_lengths(60_000, seed=7)
    small = real.take(np.random.default_rng(0).permutation(len(real))[:3000])
    named = {"real": real, "documents": documents, "mix": mix, "patches": patches, "small": small}
    cells = (
        ("real", 33, 10240), ("real", 16, 5120), ("real", 9, 4096), ("documents", 15, 4736), ("documents", 16, 5120),
        ("mix", 16, 7296), ("mix", 9, 4096), ("patches", 32768, 16384), ("patches", 16384, 8192), ("small", 16, 5120),
        ("mix", 16, 5120),  # tokens drive: they ask for more packs than vision units do
    )  # fmt: skip
    return {f"{name} {vision}/{tokens}": (named[name], PackLimits(vision, tokens)) for name, vision, tokens in cells}


def plan(lengths: SampleLengths, limits: PackLimits, shape: tuple[int, int], *, seed: int = 0, epoch: int = 0) -> Packs:
    """All packs of an epoch."""
    ranks, micro_batches = shape
    return arrange_epoch(lengths, limits, num_replicas=ranks, micro_batches=micro_batches, seed=seed, epoch=epoch).packs


def randomness() -> Iterator[str]:
    """χ² by the number of ranks; where there are too few samples for 50 steps, they are repeated."""
    ranks = (8, 64, 512)
    yield f"| where | {' | '.join(f'dp {number}' for number in ranks)} |"
    yield f"|{' --- |' * (len(ranks) + 1)}"
    for name, (lengths, limits) in datasets().items():
        row = []
        for number in ranks if not name.startswith("small") else ranks[:1]:
            copies = -(-LEAST_STEPS * number // max(volume_bound(lengths, limits), 1))
            many = lengths.take(np.tile(np.arange(len(lengths)), copies))
            found = []
            for seed in range(SEEDS):
                packs = plan(many, limits, (number, 1), seed=seed)
                steps = np.arange(len(packs)).reshape(-1, number)
                found.append(step_randomness(source_mix(many.source, packs, steps)))
            row.append(f"{np.mean(found):.2f} ± {np.std(found) / np.sqrt(SEEDS):.2f}")
        yield f"| {name} | {' | '.join(row)} |"


def fuzz() -> Iterator[str]:
    """Harsh configurations: tight limits, many ranks, few samples; every sample once, nothing over a limit."""
    rng, tried = np.random.default_rng(0), 0
    for number in range(300):
        count = int(10 ** rng.uniform(1, 5.2))
        kind = number % 3
        lengths = patch_lengths(count, seed=number) if kind == 0 else tiled_lengths(count, seed=number)
        if kind == 2:
            tiles = rng.integers(0, 7, count)
            lengths = SampleLengths(tiles, 200 * tiles + (10 ** rng.uniform(0, 3.5, count)).astype(np.int64) + 1)
        most = lengths.summary.max_vision_units, lengths.summary.max_llm_tokens
        limits = PackLimits(*(max(round(size * 10 ** rng.uniform(-0.3, 0.7)), 1) for size in most))
        shape = (int(2 ** rng.uniform(0, 9)), int(2 ** rng.uniform(0, 4)))
        name = f"{number}: {count} samples, {limits.vision_units} / {limits.llm_tokens}, {shape}"
        try:
            for epoch in (0, 1):
                packs = plan(lengths, limits, shape, epoch=epoch)
                load = packs.load(lengths)
                over = (load.vision_units > limits.vision_units) | (load.llm_tokens > limits.llm_tokens)
                assert (np.bincount(packs.samples, minlength=count) == 1).all(), name
                assert (packs.sizes[over] <= 1).all(), name
        except InfeasibleError as error:
            yield f"{name}: {error}"
        tried += 1
    yield f"{tried} configurations"


def main(what: Annotated[str, typer.Argument(help="randomness or fuzz")]) -> None:
    """Print one of the tables."""
    for line in {"randomness": randomness, "fuzz": fuzz}[what]():
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
