"""OrchMLLM's comparisons by simulation: simulate.py [speed] [traffic] [idle] [RANKS ...]; by default all of them."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from omnibal.advise.wait import phase_costs
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.device import DEVICES
from omnibal.dispatch.divide import divide
from omnibal.dispatch.rearrangement import Rearrangement, keep_in_nodes
from omnibal.dispatch.step_plan import Costs, Link, PhaseCosts, plan_step
from omnibal.families import family_of
from omnibal.profile.counted import analytic_profile
from tools.dropin.simulate import INTERNVL_8B, QWEN_7B
from tools.dropin.ways import Task, default, group_by_length, ours
from tools.sampling.data import real_lengths
from tools.synthetic import patch_lengths, tiled_lengths

BATCH = 16
"""Samples that a rank draws."""
STEPS = 5
RANKS_PER_NODE = 8
BETWEEN_NODES = 25e9
"""Bytes a second of a rank's part of a node's network: 200 Gbit/s."""
LATENCY = 100e-6
"""Seconds of an all-to-all that brings next to nothing."""
FRACTION = 0.46
"""What products reach of the A100's peak, 40 % with the rest of a block; ratios hardly depend on it."""

Destinations = tuple[np.ndarray, np.ndarray]
"""The rank of each sample, for vision and for the LLM."""


class Setting:
    """What a model's samples cost."""

    def __init__(self, config: dict, lengths: SampleLengths, bytes_per_unit: int, features_per_unit: int) -> None:
        device = replace(DEVICES["A100-80GB"], fraction=FRACTION)
        profile = analytic_profile(family_of(config).layer_records(config), device)
        costs = phase_costs(profile)
        self.vision = costs["vision forward"] + costs["vision backward"]
        self.llm = costs["language forward"] + costs["language backward"]
        self.lengths, self.bytes_per_unit = lengths, bytes_per_unit
        self.feature_bytes = features_per_unit * config["text_config"]["hidden_size"] * 2

        self.product = Costs(
            {"vision": PhaseCosts(replace(self.vision, fixed=0.0))},
            PhaseCosts(replace(self.llm, fixed=0.0)),
            link=Link(LATENCY, BETWEEN_NODES, {"vision": bytes_per_unit}, {"vision": 2 * self.feature_bytes}, 3 * 8),
        )

    def loads(self, samples: np.ndarray) -> Load:
        """Of samples one by one."""
        sizes = self.sizes(samples)
        tokens = sizes["llm_tokens"].astype(float)
        return Load(sizes["vision_units"], tokens, tokens**2, sizes["vision_squared"])

    def sizes(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """What ranks tell each other; features are counted by vision units."""
        units, squared = self.lengths.vision_units[samples], self.lengths.vision_squared
        return {
            "vision_units": units,
            "vision_squared": np.zeros_like(units) if squared is None else squared[samples],
            "vision_tokens": units,
            "llm_tokens": self.lengths.llm_tokens[samples],
            "target_tokens": np.ones_like(units),
        }

    def costs(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each sample in both phases; what a micro-batch costs whatever it holds is left out."""
        loads = self.loads(samples)
        return self.product.encoders["vision"].cost(loads), self.product.llm.cost(loads)


def step_seconds(costs: tuple[np.ndarray, np.ndarray], ranks: Destinations, num_ranks: int) -> float:
    """Of a step whose phases wait for their slowest rank (ZeRO 3, FSDP)."""
    return sum(np.bincount(of, cost, num_ranks).max() for cost, of in zip(costs, ranks, strict=True))


def idle(costs: tuple[np.ndarray, np.ndarray], ranks: Destinations, num_ranks: int) -> np.ndarray:
    """The share of a phase's time that ranks wait in it, (2,)."""
    sums = [np.bincount(of, cost, num_ranks) for cost, of in zip(costs, ranks, strict=True)]
    return np.array([1 - of_ranks.mean() / of_ranks.max() for of_ranks in sums])


def comparisons(setting: Setting, num_ranks: int) -> None:
    """Print one row a way: the paper's Figures 8, 10 and 11."""
    generator = np.random.default_rng(0)
    source = np.repeat(np.arange(num_ranks), BATCH)
    seconds: dict[str, list[float]] = {}
    for _ in range(STEPS):
        samples = generator.choice(len(setting.lengths), num_ranks * BATCH)
        vision, llm = costs = setting.costs(samples)
        tokens = setting.lengths.llm_tokens[samples]
        longest: Callable[..., np.ndarray] = lambda cost: divide(cost, num_ranks, method="longest_first")  # noqa: E731
        pad = divide(tokens, num_ranks, method="padded")
        by_llm = longest(llm)
        ways = {
            "as drawn": (source, source),
            "LLM alone balanced (Figure 10)": (source, by_llm),
            "one division for both phases, by LLM cost": (by_llm, by_llm),
            "both by the padded algorithm (Figure 11)": (pad, pad),
            "each by Algorithm 1": (longest(vision), by_llm),
            "each by `even`": (divide(vision, num_ranks), divide(llm, num_ranks)) if num_ranks <= 512 else None,
        }
        for name, ranks in ways.items():
            if ranks is not None:
                seconds.setdefault(name, []).append(step_seconds(costs, ranks, num_ranks))
        useful = sum(cost.sum() / num_ranks for cost in costs)
        seconds.setdefault("(useful work)", []).append(useful)
    base = np.mean(seconds["as drawn"])
    for name, values in seconds.items():
        print(f"| {num_ranks} | {name} | {base / np.mean(values):.2f} |", flush=True)


def traffic(setting: Setting, num_ranks: int) -> None:
    """Print what travels: Figures 12 and 13, and what planning takes (Table 2)."""
    generator = np.random.default_rng(1)
    source = np.repeat(np.arange(num_ranks), BATCH)
    samples = generator.choice(len(setting.lengths), num_ranks * BATCH)
    costs = setting.costs(samples)
    begun = time.process_time()
    ranks = [divide(cost, num_ranks, method="longest_first") for cost in costs]
    planned = time.process_time() - begun
    units = setting.lengths.vision_units[samples]
    pixels = Rearrangement(source, np.where(units > 0, ranks[0], source), num_ranks)
    text = Rearrangement(source, ranks[1], num_ranks)
    node = np.arange(num_ranks) // RANKS_PER_NODE
    moves = {
        "pixels": (pixels, units * setting.bytes_per_unit),
        "features": (text.after(pixels.inverse()), units * setting.feature_bytes),
        "text": (text, setting.lengths.llm_tokens[samples] * 3 * 8),
    }
    step = step_seconds(costs, (ranks[0], ranks[1]), num_ranks)
    for name, (move, size) in moves.items():
        volumes = move.volumes(size)
        keep_in_nodes(volumes, RANKS_PER_NODE)  # compiles
        begun = time.process_time()
        plan = keep_in_nodes(volumes, RANKS_PER_NODE)
        node_seconds = time.process_time() - begun
        between = np.bincount(move.source, np.where(node[move.source] != node[move.destination], size, 0)).max()
        gathered = size.sum() - np.bincount(node[source], size).min()
        left = f"{plan.after / plan.before:.2f} ({node_seconds * 1e3:.0f} ms)" if num_ranks > RANKS_PER_NODE else "-"
        print(f"| {num_ranks} | {name} | {between / 2**20:.0f} | {left} | {between / BETWEEN_NODES / step:.1%} "
              f"| {gathered / BETWEEN_NODES / step:.0%} | {planned * 1e3:.2f} |", flush=True)  # fmt: skip


def left_idle(setting: Setting, num_ranks: int) -> None:
    """Print what each way of drawing leaves idle, with and without rearranging as the loader does it."""
    task = Task(setting.lengths, num_ranks, 1, BATCH)
    for way in (default(task), group_by_length(task), ours(task)):
        before, after, gain = [], [], []
        for step in way.steps[:: max(len(way.steps) // STEPS, 1)][:STEPS]:
            groups = [rank[0] for rank in step]
            source = np.repeat(np.arange(num_ranks), [len(group) for group in groups])
            samples = np.array([sample for group in groups for sample in group])
            plan = plan_step(source, setting.sizes(samples), num_ranks, setting.product, total_targets=1)
            costs, ranks = setting.costs(samples), tuple(move.destination for move in plan.moves.values())
            before.append(idle(costs, (source, source), num_ranks))
            after.append(idle(costs, ranks, num_ranks))
            exchanged = plan.costs.link.seconds_of_all(plan.moves, plan.sizes)
            drawn, moved = (step_seconds(costs, of, num_ranks) for of in ((source, source), ranks))
            gain.append(drawn / (moved + exchanged))
        cells = [f"{share:.1%}" for share in (*np.mean(before, axis=0), *np.mean(after, axis=0))]
        print(f"| {num_ranks} | {way.name} | {' | '.join(cells)} | {np.mean(gain):.2f} |", flush=True)


def main() -> None:
    """Print Markdown."""
    parts = [word for word in sys.argv[1:] if not word.isdecimal()] or ["speed", "traffic", "idle"]
    chosen = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    real, called = real_lengths()
    pixel_bytes, patch_bytes = 3 * 448 * 448 * 2, 3 * 2 * 14 * 14 * 2
    native = patch_lengths(200_000, seed=1)
    settings = {
        f"InternVL 8B, {called}": Setting(INTERNVL_8B, real, pixel_bytes, 256),
        "InternVL 8B, made-up mix": Setting(INTERNVL_8B, tiled_lengths(200_000, seed=1), pixel_bytes, 256),
        "Qwen2.5-VL 7B, made-up native resolution": Setting(QWEN_7B, native, patch_bytes, 1),
    }
    for name, setting in settings.items():
        if "speed" in parts:
            print(f"\n### {name}: speed over random draws\n\n| ranks | way | speed |\n|---|---|---|")
            for num_ranks in chosen or (8, 32, 128, 512, 2560):
                comparisons(setting, num_ranks)
        if "traffic" in parts:
            print(f"\n### {name}: what travels\n\n| ranks | what | MiB between nodes, most of a rank "
                  "| left by node-wise | of the step | all-gather | planning, ms |\n|" + "---|" * 7)  # fmt: skip
            for num_ranks in chosen or (8, 32, 128, 512, 2560):
                traffic(setting, num_ranks)
        if "idle" in parts:
            print(f"\n### {name}: idle\n\n| ranks | drawn by | ViT | LLM | rearranged: ViT | LLM | gain |\n|"
                  + "---|" * 7)  # fmt: skip
            for num_ranks in chosen or (2, 8, 32, 128, 512):
                left_idle(setting, num_ranks)


if __name__ == "__main__":
    main()
