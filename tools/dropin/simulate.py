"""What packing and balance gain under ZeRO and DDP from 8 to 512 GPUs: python -m tools.dropin.simulate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from omnibal.advise.batches import Batches
from omnibal.advise.wait import wait
from omnibal.cost import CostModel, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import Packs
from omnibal.device import DEVICES
from omnibal.families import family_of
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from tools.dropin.ways import Task, Way, default, group_by_length, knapsack, limits_of, ours, random_packs, rebalance
from tools.sampling.data import real_lengths
from tools.synthetic import patch_lengths, tiled_lengths

SHAPES = ((8, 1), (8, 8), (64, 1), (512, 1))
"""GPUs, and micro-batches of each in a step."""
STEPS = 16
"""As many steps' worth of samples are drawn."""
MOST_REBALANCED = 64
"""Ranks for which transformers' rebalancing is run: its class does the whole step's work for one rank at a time."""
FRACTION = 0.46
"""What products reach of the A100's peak, 40 % with the rest of a block; ratios hardly depend on it."""
INTERNVL_8B: Mapping[str, Any] = {
    "model_type": "internvl",
    "vision_config": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "image_size": [448, 448], "patch_size": [14, 14],
    },
    "text_config": {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151674,
    },
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
}  # fmt: skip
"""InternVL2.5-8B and InternVL3-8B are of this size."""
QWEN_7B: Mapping[str, Any] = {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "model_type": "qwen2_5_vl", "hidden_size": 1280, "depth": 32, "num_heads": 16, "intermediate_size": 3420,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": 3584,
    },
    "text_config": {
        "model_type": "qwen2_5_vl_text", "hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
}  # fmt: skip


def phases(profile: ModelProfile) -> dict[str, CostModel]:
    """Seconds of a micro-batch by phase; the projector runs with the ViT."""
    found: dict[str, CostModel] = {}
    for direction in ("forward", "backward"):
        for layer in profile.layers:
            name = f"{'language' if layer.module == 'language' else 'vision'} {direction}"
            found[name] = found.get(name, CostModel()) + getattr(layer, f"{direction}_seconds")
            if direction == "backward":
                found[name] = found[name] + layer.weight_seconds
    return found


def step_seconds(profile: ModelProfile, load: Load, layout: Any) -> tuple[float, float]:
    """Seconds of a step, waits included, and the share of them that ranks wait; means over steps and ranks."""
    shape = load.shape
    costs = {name: model(load.ravel()).reshape(shape) for name, model in phases(profile).items()}
    own = sum(seconds.sum(axis=2) for seconds in costs.values())
    waited = sum(wait(costs, layout).values())
    return float((own + waited).mean()), float(waited.sum() / (own + waited).sum())


def timed(way: Way, lengths: SampleLengths) -> Load:
    """What costs are asked for: attention of padded rows is under transformers' dense mask."""
    load = way.load(lengths)
    real = Packs.from_lists([group for step in way.steps for rank in step for group in rank]).load(lengths)
    return Batches(load, real.reshape(load.shape), way.samples_a_step).timed()


def kept_bytes(profile: ModelProfile, load: Load) -> np.ndarray:
    """What a micro-batch's activations keep on each rank, of the fullest of its micro-batches."""
    model = CostModel()
    for layer in profile.layers:
        model = model + layer.saved_bytes["none"]
    return model(load.ravel()).reshape(load.shape).max(axis=(0, 2))


def compared(task: Task) -> list[Way]:
    """All ways of a table."""
    rebalanced = [rebalance(task)] if task.ranks <= MOST_REBALANCED else []
    return [
        default(task), group_by_length(task), *rebalanced, random_packs(task), knapsack(task, limits_of(task)),
        ours(task), ours(task, padded=True, name="omnibal, padded"),
    ]  # fmt: skip


def table(profile: ModelProfile, lengths: SampleLengths, ranks: int, micro_batches: int) -> None:
    """Print one table."""
    count = STEPS * 4 * micro_batches * ranks
    drawn = np.resize(np.random.default_rng(0).permutation(len(lengths)), count)  # all of them once, and again
    task = Task(lengths.take(drawn), ranks, micro_batches)
    rates: dict[str, dict[str, float]] = {}
    for way in compared(task):
        load = way.load(task.lengths)
        kept = kept_bytes(profile, load)
        row = {"samples": way.samples_a_step, "fullest": kept.max() / 2**30, "mean": kept.mean() / 2**30}
        for layout in ("ddp", "zero3"):
            seconds, share = step_seconds(profile, timed(way, task.lengths), layout)
            row |= {layout: way.samples_a_step / seconds, f"{layout} waits": share}
        rates[way.name] = row
    first = rates["default"]
    for name, row in rates.items():
        cells = [f"{row[key] / first[key]:.2f} | {row[f'{key} waits']:.0%}" for key in ("ddp", "zero3")]
        print(f"| {ranks} | {micro_batches} | {name} | {' | '.join(cells)} | "
              f"{row['fullest']:.1f} | {row['mean']:.1f} | {row['samples']:.0f} |", flush=True)  # fmt: skip


def main() -> None:
    """Print Markdown."""
    device = replace(DEVICES["A100-80GB"], fraction=FRACTION)
    tiled = analytic_profile(family_of(INTERNVL_8B).layer_records(INTERNVL_8B), device)
    native = analytic_profile(family_of(QWEN_7B).layer_records(QWEN_7B), device)
    real, called = real_lengths()
    for title, profile, lengths in (
        (f"InternVL 8B, {called}", tiled, real),
        ("InternVL 8B, made-up mix", tiled, tiled_lengths(60_000, seed=1)),
        ("Qwen2.5-VL 7B, made-up native resolution", native, patch_lengths(60_000, seed=1)),
    ):
        print(f"\n### {title}\n")
        print("| GPUs | accumulation | way | DDP, ZeRO 1: gain | waits | ZeRO 3, FSDP: gain | waits "
              "| GiB kept, fullest | mean rank | samples a step |\n|" + "---|" * 10)  # fmt: skip
        for ranks, micro_batches in SHAPES:
            table(profile, lengths, ranks, micro_batches)


if __name__ == "__main__":
    main()
