"""What each part of the balanced planner is worth: the table of ``omnibal/data/balance/ALGORITHM.md``.

Each row turns one part off, or changes how much it does; a cell holds the Dist Ratio of vision units, that of cost, χ²
of the steps' mixes of sources, packs over the volume bound, and processor seconds of one plan: means over 8, 64 and 512
ranks and several micro-batches. F counts configurations that could not be planned.

    python -m tools.sampling.ablation parts        # the table: half an hour
    python -m tools.sampling.ablation randomness   # χ² by ranks, the mean over 20 seeds with its standard error
    python -m tools.sampling.ablation fuzz         # harsh configurations; prints those that fail
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
import typer

from omnibal.data.balance import BalancedPacks
from omnibal.data.balance.rules import Effort
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, source_mix, step_randomness, volume_bound
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.data.policies import DEFAULT_COST
from omnibal.data.synthetic import INTERNVL_MIX, patch_lengths, tiled_lengths
from omnibal.errors import InfeasibleError
from tools.sampling.data import mixed_lengths, real_lengths

PARTS: Final[dict[str, dict[str, Any]]] = {
    "as it is": {},
    "steps' ends not trimmed": {"end_samples": 0},
    "packs of a step do not meet": {"step_rounds": 0},
    "packs of wrong vision units meet none of other steps": {"vision_rounds": 0},
    "packs of neighbouring steps do not meet": {"group_rounds": 0},
    "one pass": {"passes": 1},
    "no passes": {"passes": 0},
    "the heaviest meets nobody": {"heaviest_rounds": 0},
    "no repairs": {"repair_rounds": 0},
    "exchanges of single samples": {"small_pack": 1},
    "mixes not watched": {"mix_deviation": 1e6, "most_mix_deviation": 1e6},
    "large steps may be as strange as small ones": {"mix_deviation": 1e6},
    "mixes watched half as closely": {"mix_deviation": 0.8},
    "mixes of small steps hardly watched": {"most_mix_deviation": 1e6},
    "exchange_steps 1": {"exchange_steps": 1},
    "exchange_steps 256": {"exchange_steps": 256},
}
SHAPES: Final = ((8, 1), (8, 4), (8, 16), (64, 1), (512, 1))
LEAST_STEPS: Final = 50
"""χ² of fewer steps says little, and no epoch of training has so few."""
SEEDS: Final = 20
DOCUMENTS: Final = tuple(source for source in INTERNVL_MIX if source.name in {"synthdog", "chartqa", "ai2d", "docvqa"})


@dataclass
class Cell:
    """Figures of some plans."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    failures: int = 0

    def __str__(self) -> str:
        vision, cost, randomness, over, seconds = np.nanmean(self.rows or [(np.nan,) * 5], axis=0)
        failed = f" F{self.failures}" if self.failures else ""
        return f"{vision:.4f} / {cost:.4f} / {randomness:.2f} / {over:+.1%} / {seconds:.2f}{failed}"


def datasets() -> dict[str, tuple[SampleLengths, PackLimits]]:
    """Lengths and limits, tight and generous; documents are made up, and hard to pack."""
    real, mix = real_lengths()[0], mixed_lengths()[0].take(np.arange(100_000))
    documents, patches = tiled_lengths(70_000, seed=3, sources=DOCUMENTS), patch_lengths(60_000, seed=7)
    small = real.take(np.random.default_rng(0).permutation(len(real))[:3000])
    large = real.take(np.tile(np.arange(len(real)), 10))
    named = {"real": real, "documents": documents, "mix": mix, "patches": patches, "small": small, "large": large}
    cells = (
        ("real", 33, 10240), ("real", 16, 5120), ("real", 9, 4096), ("documents", 15, 4736), ("documents", 16, 5120),
        ("mix", 16, 7296), ("mix", 9, 4096), ("patches", 32768, 16384), ("patches", 16384, 8192), ("small", 16, 5120),
        ("large", 16, 5120),
    )  # fmt: skip
    return {f"{name} {vision}/{tokens}": (named[name], PackLimits(vision, tokens)) for name, vision, tokens in cells}


def plan(
    lengths: SampleLengths, limits: PackLimits, shape: tuple[int, int], *, seed: int = 0, epoch: int = 0, **options: Any
) -> tuple[Packs, float]:
    """All packs of an epoch, and the processor seconds that they took."""
    exchange_steps = options.pop("exchange_steps", 64)
    started = time.process_time()
    arranged = BalancedPacks(
        PackingSpec(lengths, limits, seed=seed, exchange_steps=exchange_steps), Ranks(*shape), effort=Effort(**options)
    )
    packs = Packs.concatenate(arranged.window(epoch, index) for index in range(len(arranged.window_starts(epoch)) - 1))
    return packs, time.process_time() - started


def figures(
    lengths: SampleLengths, limits: PackLimits, packs: Packs, shape: tuple[int, int], seconds: float
) -> tuple[float, ...]:
    """One row of a cell."""
    load, steps = packs.load(lengths), np.arange(len(packs)).reshape(-1, *shape)
    over = int((packs.sizes > 0).sum()) / max(volume_bound(lengths, limits), 1) - 1
    randomness = step_randomness(source_mix(lengths.source, packs, steps)) if len(steps) >= LEAST_STEPS else np.nan
    return dist_ratio(load.vision_units[steps]), dist_ratio(DEFAULT_COST(load)[steps]), randomness, over, seconds


def parts() -> Iterator[str]:
    """A row for each part."""
    cells = datasets()
    plan(*next(iter(cells.values())), SHAPES[0])  # compiles
    yield f"| what | {' | '.join(cells)} |"
    yield f"|{' --- |' * (len(cells) + 1)}"
    for name, options in PARTS.items():
        row = []
        for lengths, limits in cells.values():
            cell = Cell()
            for shape in SHAPES:
                try:
                    packs, seconds = plan(lengths, limits, shape, **options)
                except InfeasibleError:
                    cell.failures += 1
                    continue
                cell.rows.append(figures(lengths, limits, packs, shape, seconds))
            row.append(str(cell))
        yield f"| {name} | {' | '.join(row)} |"


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
                packs, _ = plan(many, limits, (number, 1), seed=seed)
                found.append(figures(many, limits, packs, (number, 1), 0.0)[2])
            row.append(f"{np.mean(found):.2f} ± {np.std(found) / np.sqrt(SEEDS):.2f}")
        yield f"| {name} | {' | '.join(row)} |"


def fuzz() -> Iterator[str]:
    """Harsh configurations: tight limits, many ranks, few samples; every sample once, nothing over a limit."""
    chance, tried = np.random.default_rng(0), 0
    for number in range(300):
        count = int(10 ** chance.uniform(1, 5.2))
        kind = number % 3
        lengths = patch_lengths(count, seed=number) if kind == 0 else tiled_lengths(count, seed=number)
        if kind == 2:
            tiles = chance.integers(0, 7, count)
            lengths = SampleLengths(tiles, 200 * tiles + (10 ** chance.uniform(0, 3.5, count)).astype(np.int64) + 1)
        most = lengths.summary.max_vision_units, lengths.summary.max_llm_tokens
        limits = PackLimits(*(max(round(size * 10 ** chance.uniform(-0.3, 0.7)), 1) for size in most))
        shape = (int(2 ** chance.uniform(0, 9)), int(2 ** chance.uniform(0, 4)))
        name = f"{number}: {count} samples, {limits.vision_units} / {limits.llm_tokens}, {shape}"
        try:
            for epoch in (0, 1):
                packs, _ = plan(lengths, limits, shape, epoch=epoch)
                load = packs.load(lengths)
                over = (load.vision_units > limits.vision_units) | (load.llm_tokens > limits.llm_tokens)
                assert (np.bincount(packs.samples, minlength=count) == 1).all(), name
                assert (packs.sizes[over] <= 1).all(), name
        except InfeasibleError as error:
            yield f"{name}: {error}"
        tried += 1
    yield f"{tried} configurations"


def main(what: Annotated[str, typer.Argument(help="parts, randomness or fuzz")]) -> None:
    """Print one of the tables."""
    for line in {"parts": parts, "randomness": randomness, "fuzz": fuzz}[what]():
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
