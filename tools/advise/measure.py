"""What omnibal.advise predicts against what is measured: python -m tools.advise.measure; see README.md.

For each kind of data and shape of model: costs are fitted to a few packs, as a profile is; gains of packing and of
balance are predicted from drawn lengths as ``omnibal advise`` does; and measured, by running every micro-batch of two,
four and eight ranks one after another, with the batches of a random sampler and the packs of the real planner, ViT and
language model timed apart in processor time. What ranks wait is composed by the rule that tools/replay/rule.py checks.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import torch

from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.wait import PHASES, wait
from omnibal.cluster import Cluster
from omnibal.cost import CostModel, Load
from omnibal.data.lengths import SampleLengths
from omnibal.device import Device
from omnibal.profile.records import LayerCost, ModelProfile
from tools.dropin.ways import Task, default, ours, random_packs
from tools.replay.bench import SHAPES, Bench, config_of, pack_of, shorter
from tools.sampling.data import real_lengths
from tools.synthetic import patch_lengths, tiled_lengths

RANKS, REPEATED = (8, 4, 2), 2
STEPS = {8: 8, 4: 16, 2: 16}
"""That are run, by ranks."""
NATIVE = "native resolution"
FITTED = 40
"""Random micro-batches that costs are fitted to; none of those that are measured."""
LAYOUTS = ((4, 1), (2, 4))
"""Samples of a micro-batch, micro-batches of a step."""
TRAINERS = ("ddp", "zero2", "zero3")
FREE = Device("processor", memory_bytes=2**40, link_bytes_per_second=1e15)
NOTHING = CostModel()


def datasets() -> Iterator[tuple[str, SampleLengths]]:
    """By name."""
    yield NATIVE, patch_lengths(50_000, seed=3)
    yield "mix", tiled_lengths(50_000, seed=1)
    yield "tiles (real)", real_lengths()[0]
    yield "text-heavy", tiled_lengths(50_000, seed=2, text_share=0.7)
    tokens = 256 * 3 + np.random.default_rng(0).integers(180, 220, 50_000)
    yield "uniform", SampleLengths(np.full(50_000, 3), tokens)


def fitted(bench: Bench, lengths: SampleLengths) -> ModelProfile:
    """Costs of ViT and language model as one layer each, fitted to random micro-batches of one to eight samples."""
    generator, loads, rows = np.random.default_rng(7), [], []
    for number in range(FITTED):
        chosen = generator.integers(0, len(lengths), 1 + number % 8)
        pack = pack_of(lengths, chosen.tolist(), padded=number % 2 > 0)
        loads.append(pack.load)
        rows.append(np.min([bench.seconds(bench.made(pack)) for _ in range(REPEATED)], axis=0))
    load, seconds = Load.stack(loads), dict(zip(PHASES, np.array(rows).T, strict=True))
    squared = load.vision_squared if lengths.vision_squared is not None else 0
    vision = Load(load.vision_units, 0, vision_squared=squared)
    language = Load(0, load.llm_tokens, load.llm_tokens_squared)
    layers = (
        _layer("vision", "projector", vision, seconds),
        _layer("language", "language", language, seconds),
    )
    return ModelProfile(layers, device="processor", dtype="float32")


def _layer(part: str, module: str, load: Load, seconds: dict[str, np.ndarray]) -> LayerCost:
    forward, backward = (CostModel.fit(load, seconds[f"{part} {way}"]) for way in ("forward", "backward"))
    kept = {"none": NOTHING, "full": NOTHING}
    return LayerCost(
        part, "head" if part == "language" else part, module=module, forward_seconds=forward,
        backward_seconds=backward, output_bytes=NOTHING, saved_bytes=kept, sizes={"vocab": 1},
    )  # fmt: skip


def predicted(profile: ModelProfile, lengths: SampleLengths, ranks: int, batch: int, micro_batches: int) -> dict:
    """Gains by trainer: of packing over padding, of balance over packing."""
    sample = lengths.take(np.random.default_rng(3).permutation(len(lengths))[:1000])
    scenario = Scenario(sample, profile, Cluster(1, ranks, FREE), ranks * micro_batches * batch)
    found = {}
    for trainer in TRAINERS:
        ways = [Recipe(trainer, batching, batch, micro_batches, "none") for batching in ("random", "flattened")]
        ways.append(scenario.packed(ways[0]))
        seconds = [scenario.estimate(way).sample_seconds.mean() for way in ways]
        found[trainer] = (seconds[0] / seconds[1], seconds[1] / seconds[2])
    return found


def measured(bench: Bench, lengths: SampleLengths, ranks: int, batch: int, micro_batches: int) -> dict:
    """The same, of micro-batches that were run."""
    steps = STEPS[ranks]
    count = (steps + 2) * ranks * micro_batches * batch
    own = lengths.take(np.random.default_rng(11).permutation(len(lengths))[:count])
    task, seconds = Task(own, ranks, micro_batches, batch), {}
    ways = {"padded": default(task), "flattened": random_packs(task), "even": ours(task)}
    rows: dict[str, list] = {name: [] for name in ways}
    for step in range(steps):  # ways in turn, so that whatever slows the machine slows all of them
        for name, way in ways.items():
            packs = [[pack_of(own, group, padded=way.padded) for group in rank] for rank in way.steps[step]]
            rows[name].append([[bench.seconds(bench.made(pack)) for pack in rank] for rank in packs])
    for name, way in ways.items():
        passes = np.array(rows[name])
        samples = sum(len(group) for step in way.steps[:steps] for rank in step for group in rank)
        costs = dict(zip(PHASES, np.moveaxis(passes, -1, 0), strict=True))
        waits = {trainer: sum(waited.sum() for waited in wait(costs, trainer).values()) for trainer in TRAINERS}
        seconds[name] = {trainer: (passes.sum() + waits[trainer]) / samples for trainer in TRAINERS}
    return {
        trainer: (
            seconds["padded"][trainer] / seconds["flattened"][trainer],
            seconds["flattened"][trainer] / seconds["even"][trainer],
        )
        for trainer in TRAINERS
    }


def main() -> None:
    """Measure what is not yet in the file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/advise.jsonl"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(row["shape"], row["data"], row["ranks"], row["batch"], row["micro_batches"]) for row in rows}
    torch.set_num_threads(1)
    for (name, whole), shape in product(datasets(), SHAPES):
        wanted = [(ranks, *layout) for ranks, layout in product(RANKS, LAYOUTS)]
        wanted = [layout for layout in wanted if (shape, name, *layout) not in known]
        if not wanted:
            continue
        bench, lengths = Bench(config_of(shape, native=name == NATIVE)), shorter(whole, native=name == NATIVE)
        bench.warm_up()
        profile = fitted(bench, lengths)
        for layout in wanted:
            rows.append({
                "shape": shape, "data": name, **dict(zip(("ranks", "batch", "micro_batches"), layout, strict=True)),
                "predicted": predicted(profile, lengths, *layout), "measured": measured(bench, lengths, *layout),
            })  # fmt: skip
            with given.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    report(rows)


def report(rows: list[dict]) -> None:
    """Print gains, predicted → measured, and how far they are apart."""
    print("| shape | data | ranks | batch × micro-batches | trainer | packing | off | balance | off |")
    print("|---|---|---|---|---|---|---|---|---|")
    off = []
    for row in rows:
        for trainer in TRAINERS:
            pairs = list(zip(row["predicted"][trainer], row["measured"][trainer], strict=True))
            off.append([guess / found - 1 for guess, found in pairs])
            cells = " | ".join(f"{guess:.2f} → {found:.2f} | {guess / found - 1:+.0%}" for guess, found in pairs)
            layout = f"{row['ranks']} | {row['batch']} × {row['micro_batches']}"
            print(f"| {row['shape']} | {row['data']} | {layout} | {trainer} | {cells} |")
    apart = np.abs(off)
    for part, name in enumerate(("packing", "balance")):
        print(
            f"{name}: off by {apart[:, part].mean():.1%} on average, {np.quantile(apart[:, part], 0.9):.1%} at most in "
            f"nine of ten, {apart[:, part].max():.1%} at most, of {len(apart)}"
        )


if __name__ == "__main__":
    main()
