"""The OmniBal paper's Tables 4 and 9 beside ours, with costs counted for A100s; see README.md."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from statistics import fmean

import numpy as np

from omnibal.cluster import Links
from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import search_partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.profile.records import ModelProfile
from tools.bench import table
from tools.partition.paper_models import (
    BASELINE,
    LIMITS,
    MICRO_BATCHES,
    NETWORK,
    TABLE_4,
    TABLE_9,
    VISION_FACTOR,
    Published,
    block_places,
    blocks_of,
    counted_profile,
)
from tools.synthetic import tiled_lengths

STEPS = 4
FACTORS = np.round(np.arange(0.7, 2.51, 0.05), 2)
"""Times as long as counted that ViT layers might take."""


def main() -> None:
    """Print both tables."""
    load = Load.stack([Load.stack(step) for step in steps_of(BASELINE)])
    print(
        f"packs: {load.vision_units.mean():.2f} tiles and {load.llm_tokens.mean():,.0f} tokens on average "
        f"(at most {LIMITS.vision_units} and {LIMITS.llm_tokens}), {MICRO_BATCHES} micro-batches a step"
    )
    print(f"\n## Table 4: ours / the paper's\n\n{table_4(VISION_FACTOR)}")
    print(f"\nThe same with ViT layers as counted:\n\n{table_4(1.0)}")
    print(f"\n## Table 9: blocks of each stage\n\n{table_9()}")


@cache
def steps_of(row: Published) -> list[list[Load]]:
    """Steps of ISF's packs: a Load per replica."""
    lengths = tiled_lengths(40_000, seed=1)
    epoch = arrange_epoch(lengths, LIMITS, num_replicas=row.num_replicas, micro_batches=MICRO_BATCHES, method="isf")
    load = epoch.packs.load(lengths)
    numbers = np.linspace(0, epoch.num_steps - 2, STEPS).round().astype(int)
    return [[load[packs] for packs in epoch.steps[number]] for number in numbers]


LINKS = Links(NETWORK)


def step_seconds(row: Published, profile: ModelProfile, boundaries: Sequence[int]) -> float:
    """Of the row's steps on average."""
    cut = Partition(boundaries)
    return fmean(simulate_step(profile, cut, loads, LINKS, zero_stage=0).step_seconds for loads in steps_of(row))


def find(row: Published, profile: ModelProfile, method: str) -> tuple[int, ...]:
    """Boundaries by a method, on the first step."""
    found = search_partition(profile, steps_of(row)[0], len(row.blocks), LINKS, method=method, zero_stage=0)
    return found.best.partition.boundaries


def published_boundaries(row: Published, profile: ModelProfile) -> tuple[int, ...] | None:
    """The paper's cut as layer numbers: what it does not count goes where it makes the fastest step.

    None where its blocks are not as many as the model's.
    """
    places = [*block_places(profile), len(profile.layers)]
    if sum(row.blocks) != len(places) - 1:
        return None
    counts = np.cumsum(row.blocks)[:-1]
    choices = [range(places[count - 1] + 1, places[count] + 1) for count in counts]
    candidates = [(0, *inner, len(profile.layers)) for inner in product(*choices)]
    return min(candidates, key=lambda boundaries: step_seconds(row, profile, boundaries))


def table_4(vision_factor: float) -> str:
    """Spreads over stages, and what is sent, of each method; population standard deviations.

    Args:
        vision_factor: How many times as long as counted a layer of the ViT takes.
    """
    profile = counted_profile(BASELINE, vision_factor=vision_factor)
    cuts = {
        "parameters": find(BASELINE, profile, "parameters"),
        "layers": find(BASELINE, profile, "uniform"),
        "profile": find(BASELINE, profile, "slowest_stage"),
        "BMP": find(BASELINE, profile, "paper"),
        "search (ours)": find(BASELINE, profile, "search"),
        "the paper's cut": published_boundaries(BASELINE, profile),
    }
    names = "method", "blocks", "σ params (B)", "σ layers", "σ forward (ms)", "Δ sent (MB)", "step, of BMP's"
    rows = []
    seconds = {name: step_seconds(BASELINE, profile, cut) for name, cut in cuts.items()}
    sent = {name: sent_megabytes(profile, cut) for name, cut in cuts.items()}
    for name, cut in cuts.items():
        spreads = [np.std(values) for values in stage_sums(profile, cut)]
        theirs = TABLE_4.get(name)
        ours = (*spreads, sent[name] - sent["parameters"], seconds[name] / seconds["BMP"])
        published = (*theirs[:4], theirs[4] / TABLE_4["BMP"][4]) if theirs else ("",) * 5
        cells = [f"{a:.2f} / {b:.2f}" if theirs else f"{a:.2f}" for a, b in zip(ours, published, strict=True)]
        rows.append((name, listed(blocks_of(profile, cut)), *cells))
    return table(names, rows)


def stage_sums(profile: ModelProfile, cut: Sequence[int]) -> list[list[float]]:
    """Of each stage: parameters in billions, layers, forward milliseconds of an average micro-batch."""
    pack = mean_pack()
    columns = (
        [layer.parameter_bytes * BASELINE.tensor_parallel / 2 / 1e9 for layer in profile.layers],
        [1.0] * len(profile.layers),
        [1e3 * float(layer.forward_seconds(pack)) for layer in profile.layers],
    )
    return [[sum(column[a:b]) for a, b in pairwise(cut)] for column in columns]


def sent_megabytes(profile: ModelProfile, cut: Sequence[int]) -> float:
    """What an average micro-batch's activations are over all cuts."""
    return sum(float(profile.layers[boundary - 1].output_bytes(mean_pack())) for boundary in cut[1:-1]) / 1e6


@cache
def mean_pack() -> Load:
    """The average micro-batch of the baseline."""
    return Load.stack([Load.stack(step) for step in steps_of(BASELINE)]).mean()


def table_9() -> str:
    """Blocks per stage: the paper's, the paper's method on our costs, ours; and how the steps compare."""
    names = "model", "TP", "DP", "paper", "paper's method", "ours", "step, of the paper's cut", "ours with ViT × f", "f"
    rows = []
    for row in TABLE_9:
        profile = counted_profile(row)
        ours, theirs = find(row, profile, "search"), published_boundaries(row, profile)
        unknown = f"– ({sum(row.blocks)} of {len(block_places(profile))} blocks)"
        ratio = step_seconds(row, profile, ours) / step_seconds(row, profile, theirs) if theirs else None
        blocks, factors = nearest(row)
        cuts = row.blocks, blocks_of(profile, find(row, profile, "paper")), blocks_of(profile, ours)
        head = row.name, f"{row.tensor_parallel}", f"{row.num_replicas}"
        rows.append((*head, *map(listed, cuts), f"{ratio:.3f}" if ratio else unknown, listed(blocks), factors))
    return table(names, rows)


def listed(blocks: Sequence[int]) -> str:
    """Blocks of each stage as text."""
    return " ".join(map(str, blocks))


def nearest(row: Published) -> tuple[tuple[int, ...], str]:
    """Of our cuts with ViT layers dearer or cheaper than counted the one nearest to the paper's, and the factors."""
    cuts = {}
    for factor in FACTORS:
        profile = counted_profile(row, vision_factor=float(factor))
        cuts[float(factor)] = blocks_of(profile, find(row, profile, "search"))
    away = {factor: sum(abs(a - b) for a, b in zip(cut, row.blocks, strict=True)) for factor, cut in cuts.items()}
    best = [factor for factor, distance in away.items() if distance == min(away.values())]
    return cuts[best[0]], f"{best[0]:.2f}" if len(best) == 1 else f"{best[0]:.2f} … {best[-1]:.2f}"


if __name__ == "__main__":
    main()
