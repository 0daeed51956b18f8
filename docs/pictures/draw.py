"""Draws the pictures of README, start.md and layouts.md: PYTHONPATH=. python docs/pictures/draw.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from omnibal import BalancedBatchSampler, PackLimits, SampleLengths
from omnibal.advise.wait import phase_costs
from omnibal.cluster import Cluster, Encoder, Layout, Links
from omnibal.cost import CostModel, Load
from omnibal.families import layer_records
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.simulate import simulate, simulate_step
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LayerCost, ModelProfile
from omnibal.report.stages import plot_timeline
from omnibal.report.style import BLUE, GREEN, GREY, ORANGE, PINK, SERIES, VERMILION, drawing, legend_below
from tools.synthetic import tiled_lengths

HERE = Path(__file__).parent
TOKENS = (900, 2600, 400, 1700, 700, 3100, 1300, 600)
LIMIT = 4096
WAITING: Any = {"facecolor": "none", "edgecolor": GREY, "hatch": "////", "linewidth": 0.6}


def main() -> None:
    """Draw all of them, in few colours: small files."""
    draw_ranks()
    draw_packs()
    draw_step()
    draw_pipeline()
    draw_recompute()
    draw_units()
    for path in HERE.glob("*.png"):
        Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)


def draw_ranks() -> None:
    """A step of eight ranks under ZeRO 3, where they meet behind every phase: random padded batches, and our packs."""
    records = layer_records(json.loads((HERE.parents[1] / "ds_configs/models/InternVL3-8B/config.json").read_text()))
    costs = phase_costs(analytic_profile(records, Cluster.parse("8xA100-80GB").device), recompute="full")
    lengths = tiled_lengths(20_000, seed=1)
    order = np.random.default_rng(0).permutation(len(lengths))[: 8 * 4 * 500].reshape(-1, 8, 4)
    batches = [[(batch, True) for batch in step] for step in order]
    limits = PackLimits(8, 3008)  # four samples a pack, as batches have
    samplers = [BalancedBatchSampler(lengths, limits, num_replicas=8, rank=rank) for rank in range(8)]
    packs = [[(np.array(pack), False) for pack in step] for step in zip(*samplers, strict=True)]
    with drawing(HERE / "ranks.png", 9, 3.2) as figure:
        panels = figure.subplots(1, 2, sharey=True, sharex=True)
        titles = ("padded random batches", "balanced packs")
        for axes, steps, title in zip(panels, (batches, packs), titles, strict=True):
            parts = np.array([[seconds_of(costs, lengths, *batch) for batch in step] for step in steps[:400]])
            vision, language, padding = np.moveaxis(parts, -1, 0)
            slowest = vision.max(axis=1) + (language + padding).max(axis=1)
            shown = int(np.argsort(slowest)[len(slowest) // 2])
            draw_rank_bars(axes, *parts[shown].T)
            busy = (vision + language)[shown].sum() / (8 * slowest[shown])
            axes.set_title(f"{title}: {busy:.0%} is work", loc="left")
        panels[0].set(ylabel="rank")
        legend_below(figure, panels[0])


def seconds_of(costs: Any, lengths: SampleLengths, samples: np.ndarray, padded: bool) -> tuple[float, float, float]:
    """Seconds of a micro-batch's ViT, of its LLM on real tokens, and of its LLM on padding."""
    tiles, tokens = lengths.vision_units[samples].sum(), lengths.llm_tokens[samples].astype(float)
    held = np.full(len(tokens), tokens.max()) if padded else tokens
    vision, real, whole = (
        sum(cost(load) for name, cost in costs.items() if name.startswith(part))
        for part, load in (
            ("vision", Load(tiles, 0, 0)),
            ("language", Load(0, tokens.sum(), (tokens**2).sum())),
            ("language", Load(0, held.sum(), (held**2).sum())),
        )
    )
    return float(vision), float(real), float(whole - real)


def draw_rank_bars(axes: Axes, vision: np.ndarray, language: np.ndarray, padding: np.ndarray) -> None:
    """Bars of one step: ranks wait for the slowest ViT, then for the slowest LLM."""
    ranks, left = np.arange(len(vision)), np.zeros(len(vision))
    after_vision = vision.max() - vision
    after_language = (language + padding).max() - language - padding
    for name, seconds, look in (
        ("ViT", vision, {"color": GREEN}),
        ("waiting", after_vision, WAITING),
        ("LLM", language, {"color": BLUE}),
        ("padding", padding, {"color": VERMILION}),
        ("", after_language, WAITING),
    ):
        axes.barh(ranks, seconds, left=left, label=name or None, **look)
        left += seconds
    axes.set(xlabel="seconds of a step, computed for A100s", ylim=(len(vision) - 0.4, -0.6), yticks=ranks)
    axes.grid(False, axis="y")


def draw_packs() -> None:
    """The same eight samples as two padded batches and as packs."""
    packs = ((1, 2, 4), (5, 0), (3, 6, 7))
    with drawing(HERE / "packs.png", 9, 2.9) as figure:
        padded, packed = figure.subplots(1, 2, sharex=True)
        for row, tokens in enumerate(TOKENS):
            place, longest = row + row // 4, max(TOKENS[4 * (row // 4) :][:4])
            padded.barh(place, tokens, color=SERIES[row], edgecolor="white")
            if tokens < longest:
                padded.barh(place, longest - tokens, left=tokens, **WAITING)
        for row, pack in enumerate(packs):
            start = 0
            for sample in pack:
                packed.barh(row, TOKENS[sample], left=start, color=SERIES[sample], edgecolor="white", height=0.55)
                start += TOKENS[sample]
        packed.axvline(LIMIT, color=VERMILION)
        packed.annotate(f"limit: {LIMIT:,} ", (LIMIT, 2.45), ha="right", color=VERMILION)
        used = sum(TOKENS) / sum(4 * max(TOKENS[start : start + 4]) for start in (0, 4))
        padded.set(title=f"two padded batches: {1 - used:.0%} is padding", yticks=[1.5, 6.5])
        padded.set_yticklabels(["batch 0", "batch 1"])
        packed.set(title="three packs: no padding", yticks=range(3), ylim=(2.6, -0.6))
        packed.set_yticklabels([f"pack {number}" for number in range(3)])
        padded.invert_yaxis()
        for axes in (padded, packed):
            axes.set_xlabel("LLM tokens")
            axes.grid(False, axis="y")


def draw_step() -> None:
    """A step of two replicas and four micro-batches, once as it comes and once balanced."""
    uneven = np.array([[3.0, 1.0, 2.2, 1.4], [1.2, 2.8, 1.0, 0.8]])
    even = np.array([[1.7, 1.6, 1.7, 1.7], [1.7, 1.7, 1.6, 1.7]])
    with drawing(HERE / "step.png", 9, 2.5) as figure:
        for axes, seconds, title in zip(
            figure.subplots(1, 2, sharey=True), (uneven, even), ("as it comes", "balanced"), strict=True
        ):
            _draw_replicas(axes, seconds)
            slowest = seconds.max(axis=0)
            ratio = ((slowest - seconds) / (2 * slowest)).sum(axis=0).mean()
            axes.set_title(f"{title}: Dist Ratio {ratio:.2f}", loc="left")


def _draw_replicas(axes: Axes, seconds: np.ndarray) -> None:
    """Bars of work and of waiting: all ranks wait for the slowest at every micro-batch."""
    slowest = seconds.max(axis=0)
    starts = np.concatenate([[0], np.cumsum(slowest)])[:-1]
    for replica, row in enumerate(seconds):
        axes.barh([replica] * len(row), row, left=starts, color=BLUE, edgecolor="white")
        waits = row < slowest
        axes.barh([replica] * waits.sum(), (slowest - row)[waits], left=(starts + row)[waits], **WAITING)
        for number, start in enumerate(starts):
            axes.text(start + 0.12, replica, f"{number}", color="white", va="center", fontsize=8)
    axes.set(yticks=[0, 1], ylim=(1.6, -0.6), xlabel="seconds", xlim=(0, 10.5))
    axes.set_yticklabels(["replica 0", "replica 1"])
    axes.grid(False, axis="y")


def draw_pipeline() -> None:
    """One step of four stages: even ones, and a third stage that is half as slow again."""
    forward = np.ones((8, 4))
    uneven = forward * np.array([0.8, 0.8, 1.6, 0.8])
    schedule = one_f_one_b(4, 8)
    panels = {
        "even stages": simulate(schedule, forward, 2 * forward),
        "the same work, unevenly cut": simulate(schedule, uneven, 2 * uneven),
    }
    plot_timeline(panels, HERE / "pipeline.png")


def draw_recompute() -> None:
    """What a decoder block keeps and how long it takes, recomputed or not.

    As `omnibal profile` counts them for one of Qwen2-7B on an A100-80GB, 4,096 tokens: 13.0 ms forward, 26.4 ms
    backward; it keeps 880 MiB, or 28 MiB, its input alone, where it recomputes.
    """
    levels = ("kept", "recomputed")
    parts = {"forward": (13.0, 13.0), "forward again": (0.0, 13.0), "backward": (26.4, 26.4)}
    with drawing(HERE / "recompute.png", 9, 1.9) as figure:
        time, memory = figure.subplots(1, 2, sharey=True)
        left = np.zeros(2)
        for (name, milliseconds), colour in zip(parts.items(), (BLUE, PINK, ORANGE), strict=True):
            time.barh(levels, milliseconds, left=left, color=colour, label=name)
            left += milliseconds
        memory.barh(levels, (880, 28), color=GREEN)
        time.set(xlabel="milliseconds of a layer", ylim=(1.6, -0.6))
        memory.set(xlabel="MiB that it holds until its backward pass, for each micro-batch in flight")
        for axes in (time, memory):
            axes.grid(False, axis="y")
        legend_below(figure, time)


def draw_units() -> None:
    """An encoder that takes half as long as a stage of the LLM: in a pipeline, and as a unit that serves two LLMs."""
    seconds = {"encoder": 1.0, "decoder.0": 2.0, "decoder.1": 2.0}
    nothing = CostModel()
    layers = tuple(
        LayerCost(
            name, "block", module="vision" if name == "encoder" else "language",
            forward_seconds=CostModel(fixed=forward), backward_seconds=CostModel(fixed=2 * forward),
            output_bytes=nothing, saved_bytes={"none": nothing, "full": nothing},
        )
        for name, forward in seconds.items()
    )  # fmt: skip
    forward = np.tile(list(seconds.values()), (6, 1))
    units = simulate_step(
        ModelProfile(layers, device="any", dtype="float32"), Partition((0, 1, 2, 3)),
        [Load(np.ones(6), np.ones(6))] * 2, Links(np.inf),
        layout=Layout(3, 2, encoder=Encoder(1, 1), precision="float32"),
    )  # fmt: skip
    panels = {
        "one of two pipelines, six devices": simulate(one_f_one_b(3, 6), forward, 2 * forward),
        "units, five devices": units.replicas[0],
    }
    plot_timeline(panels, HERE / "units.png")


if __name__ == "__main__":
    main()
