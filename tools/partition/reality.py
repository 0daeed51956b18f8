"""The simulator against the real engine: partitions × packs on two processes; see README.md."""

import argparse
import json
import os
from datetime import date
from pathlib import Path
from statistics import median

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from bench import Case, Packs, Timings, measure_link, measure_model, time_steps
from markdown import table
from models import MODELS, sample_lengths
from quiet import MOST_FOREIGN
from scipy.stats import spearmanr

from omnibal.cost import CostModel
from omnibal.data.epoch import arrange_epoch
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.profile import ModelProfile
from omnibal.pipeline.simulate import simulate_step

LIMITS = PackLimits(16, 640)
MICRO_BATCHES = 4
CUTS = (3, 6, 9, 11, 14)
ROUNDS, MINUTES = 5, 30


def main() -> None:
    """Measure, predict, print."""
    arguments = read_arguments()
    start()
    config = MODELS["mixed"]
    profile, share = measure_model(config, LIMITS)
    link = measure_link()
    num_layers = len(profile.layers)
    cases = [
        Case(f"{cut} | {num_layers - cut}", Partition((0, cut, num_layers)), packs)
        for packs in pack_sets()
        for cut in CUTS
    ]
    timings = time_steps(config, cases, rounds=arguments.rounds, minutes=MINUTES, report=print)
    if dist.get_rank() == 0:
        predicted = [predict(profile, case, link) for case in cases]
        print(heading(share, link, timings) + "\n\n" + report(cases, predicted, timings))
        if arguments.save:
            save(arguments.save, cases, predicted, timings)


def read_arguments() -> argparse.Namespace:
    """Options, and what the launcher adds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="quiet steps of each case")
    parser.add_argument("--save", type=Path, help="a JSON file for all timings")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


def start() -> None:
    """Join the other ranks; each has a core of its own."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {dist.get_rank() % (os.cpu_count() or 1)})


def pack_sets() -> list[Packs]:
    """Steps of three samplers, and one of packs with images only here and there."""
    lengths = sample_lengths()
    found = []
    for method in ("balanced", "isf", "random"):
        epoch = arrange_epoch(lengths, LIMITS, num_replicas=1, micro_batches=MICRO_BATCHES, method=method, seed=1)
        packs = [tuple(epoch.packs[pack].tolist()) for pack in epoch.steps[3, 0]]
        found.append(Packs(method, tuple(packs), lengths))
    texts, images = np.flatnonzero(lengths.vision_units == 0), np.flatnonzero(lengths.vision_units >= 3)
    uneven = (images[:4], texts[:3], images[4:6], texts[3:9])
    found.append(Packs("uneven", tuple(tuple(pack.tolist()) for pack in uneven), lengths))
    return found


def predict(profile: ModelProfile, case: Case, link: CostModel) -> float:
    """Seconds of a step, by the simulator."""
    return simulate_step(
        profile, case.partition, [case.packs.load],
        bandwidth_bytes_per_second=1 / link.llm_tokens, latency_seconds=link.fixed,
    ).step_seconds  # fmt: skip


def heading(share: float, link: CostModel, timings: list[Timings]) -> str:
    """Where and when, and how quiet it was."""
    disturbed, kept = sum(t.disturbed for t in timings), sum(len(t.seconds) for t in timings)
    warning = f" WARNING: over {MOST_FOREIGN:.0%}." if share > MOST_FOREIGN else ""
    return (
        f"{date.today()}, {os.cpu_count()} cores, two processes of one thread, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__}. Others took {share:.1%} of the CPU beside the profile.{warning} "
        f"{kept} quiet steps, {disturbed} left out. A transfer takes {1e3 * link.fixed:.2f} ms and "
        f"{1e3 * 1e6 * link.llm_tokens:.2f} ms per MB."
    )


def report(cases: list[Case], predicted: list[float], timings: list[Timings]) -> str:
    """A row per case, and what they say together."""
    rows, errors, measured = [], [], []
    for case, seconds, timing in zip(cases, predicted, timings, strict=True):
        if not timing.seconds:
            rows.append((case.packs.name, case.name, "–", f"{1e3 * seconds:,.0f}", "–", "–"))
            continue
        middle = median(timing.seconds)
        spread = (max(timing.seconds) - min(timing.seconds)) / middle
        measured.append((middle, seconds))
        errors.append(seconds / middle - 1)
        cells = f"{1e3 * middle:,.0f}", f"{1e3 * seconds:,.0f}", f"{errors[-1]:+.1%}", f"{spread:.1%}"
        rows.append((case.packs.name, case.name, *cells))
    names = ("packs", "layers of the stages", "measured ms", "predicted ms", "error", "spread of the measured")
    sizes = np.abs(errors)
    rank = spearmanr(*zip(*measured, strict=True)).statistic
    summary = (
        f"{len(measured)} cases: error {np.mean(sizes):.1%} on average, {np.median(sizes):.1%} median, "
        f"{np.max(sizes):.1%} at most; mean signed error {np.mean(errors):+.1%}; rank correlation {rank:.3f}"
    )
    return f"{table(names, rows)}\n\n{summary}"


def save(path: Path, cases: list[Case], predicted: list[float], timings: list[Timings]) -> None:
    """Write all timings."""
    rows = [
        {
            "packs": case.packs.name,
            "boundaries": case.partition.boundaries,
            "predicted_seconds": seconds,
            "measured_seconds": timing.seconds,
            "disturbed": timing.disturbed,
        }
        for case, seconds, timing in zip(cases, predicted, timings, strict=True)
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
