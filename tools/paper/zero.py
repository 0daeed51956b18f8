"""Table 2's rows with ZeRO 3, Table 13, and what others published without a pipeline: python -m tools.paper.zero.

Estimated by ``omnibal.advise`` in the setting of ``README.md``; nothing is fitted here.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.models import Model
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from tools.bench import table
from tools.paper.datasets import SHAPES, llava
from tools.partition.paper_models import FRACTION, LIMITS, Published, cluster_of, counted_profile
from tools.synthetic import tiled_lengths

GPUS, BATCH, DAY = 32, 4, 86_400
TABLE_2 = {"6+20B": ("InternLM2-20B", 38.9, 25.3), "6+34B": ("Yi-34B", 54.3, 35.5)}
"""Language model; GPU days of random batches and of balanced packs, both under ZeRO 3."""
TABLE_13 = {"7B": ("LLaVA-v1.6-vicuna-7B", 10.2, 7.7), "13B": ("LLaVA-v1.6-vicuna-13B", 18.0, 13.3),
            "34B": ("LLaVA-v1.6-34B", 42.7, 31.3)}  # fmt: skip
SAMPLES = 1_200_000
LLAVA_SAMPLES = 760_000


def table_2() -> Iterator[tuple[str, ...]]:
    """Batches of four, 1024 samples a step, all layers recomputed, flash attention; packs of the paper's limits."""
    for name, (language, *days) in TABLE_2.items():
        row = Published("InternVL-6B", language, 1, GPUS, ())
        profile = counted_profile(row, vision_factor=1.0)
        scenario = Scenario(tiled_lengths(100_000, seed=1), profile, cluster_of(GPUS, 80 * 2**30), 1024, masks=False)
        yield (f"Table 2, {name}", *_days(scenario, LIMITS, 1024 // GPUS // BATCH, SAMPLES, days))


def table_13() -> Iterator[tuple[str, ...]]:
    """Batches of four, 128 samples a step, on LLaVA's part of the mix with images cut as LLaVA-1.6 cuts them."""
    for name, (model, *days) in TABLE_13.items():
        known = Model.known(model)
        profile = analytic_profile(known.records, replace(DEVICES["A100-80GB"], fraction=FRACTION))
        lengths = _any_resolution(known)
        limits = PackLimits(round(4.54 * float(lengths.vision_units.mean())), round(4.54 * lengths.llm_tokens.mean()))
        scenario = Scenario(lengths, profile, cluster_of(GPUS, 80 * 2**30), GPUS * BATCH, masks=False)
        yield (f"Table 13, {name}", *_days(scenario, limits, 1, LLAVA_SAMPLES, days))


def _any_resolution(model: Model) -> SampleLengths:
    """Samples as the mix has them, with tiles and tokens by the model's own rule for images of such shapes."""
    drawn, rule = llava(), model.image_rule()
    loads = {0: (0, 0)} | {
        tiles: tuple(np.mean([rule([size])[0][:2] for size in sizes], axis=0).round().astype(int))
        for tiles, sizes in SHAPES.items()
    }
    units, tokens = np.array([loads[tiles] for tiles in drawn.vision_units.tolist()]).T
    text = drawn.llm_tokens - 256 * drawn.vision_units
    return SampleLengths(units, tokens + text)


def _days(
    scenario: Scenario, limits: PackLimits, micro_batches: int, samples: int, published: list[float]
) -> tuple[str, ...]:
    random = scenario.estimate(Recipe("zero3", "random", BATCH, micro_batches, "full"))
    packed = scenario.estimate(Recipe("zero3", "packed", BATCH, micro_batches, "full", limits))
    even = scenario.estimate(scenario.packed(Recipe("zero3", "random", BATCH, micro_batches, "full")))
    days = [float(found.sample_seconds.mean()) * samples / DAY for found in (random, packed, even)]
    before, after = published
    gains = [before / after, days[0] / days[1], days[0] / days[2]]
    shown = f"{before:g} → {after:g}", f"{days[0]:.1f} → {days[1]:.1f}", f"{days[2]:.1f}"
    return tuple(cell for figure, gain in zip(shown, gains, strict=True) for cell in (figure, f"{gain:.2f}"))


def others() -> Iterator[tuple[str, ...]]:
    """What balance brings to packs that are full already; what packing brings to samples that are padded to a limit."""
    device = DEVICES["A100-80GB"]
    profile = analytic_profile(Model.known("InternVL3-8B").records, device)
    mix = tiled_lengths(50_000, seed=1)
    for ranks in (4, 16, 64, 256, 512):
        found = _over(profile, mix, ranks)
        yield "LoongForge: balance of full packs", f"{ranks} ranks", "1.0 at 4 to 16, to 1.1 at many", f"{found:.2f}"
    padded = float(mix.llm_tokens.max() / mix.llm_tokens.mean())
    yield "nanoVLM: packs over samples padded to the limit", "tokens", "5", f"{padded:.1f}"


def _over(profile: ModelProfile, lengths: SampleLengths, ranks: int) -> float:
    """Gain of even packs over random ones that are as large, four of them to a rank's step, under ZeRO 3."""
    batch, micro_batches = 8, 4
    scenario = Scenario(lengths, profile, Cluster(1, ranks, DEVICES["A100-80GB"]), ranks * micro_batches * batch)
    ways = (Recipe("zero3", name, batch, micro_batches, "none", PackLimits(16, 5120)) for name in ("packed", "even"))
    before, after = (float(scenario.estimate(way).sample_seconds.mean()) for way in ways)
    return before / after


def main() -> None:
    """Print tables as Markdown."""
    heads = ("", "paper, GPU days", "gain", "estimated, the paper's limits", "gain", "even packs", "gain")
    print(table(heads, [*table_2(), *table_13()]))
    print()
    print(table(("", "", "published", "estimated"), list(others())))


if __name__ == "__main__":
    main()
