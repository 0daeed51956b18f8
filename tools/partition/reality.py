"""The simulator against the real engine: partitions × packs on two processes; see README.md."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import spearmanr

from omnibal.cluster import Links
from omnibal.cost import CostModel
from omnibal.data.epoch import arrange_epoch
from omnibal.data.limits import PackLimits
from omnibal.engine.initialize import meet
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.profile.records import ModelProfile
from tools.bench import table
from tools.partition.bench import Case, Packs, measure_link, measure_model, time_steps
from tools.partition.models import MODELS, sample_lengths
from tools.partition.quiet import MOST_FOREIGN

LIMITS = PackLimits(16, 640)
MICRO_BATCHES = 4
CUTS = (3, 6, 9, 11, 14)
ROUNDS, MINUTES = 5, 3


def main() -> None:
    """Measure, predict, and report all that the file holds."""
    parser = make_parser(__doc__)
    parser.add_argument("file", type=Path, help="JSON of all timings; those of the same slice are replaced")
    parser.add_argument("--slice", choices=SLICES, help="measure it; left out, only report")
    arguments = parser.parse_args()
    rows = json.loads(arguments.file.read_text()) if arguments.file.exists() else []
    if arguments.slice:
        start()
        measured = measure(arguments.slice, arguments.rounds)
        rows = [row for row in rows if row["slice"] != arguments.slice] + measured
        if dist.get_rank() == 0:
            arguments.file.write_text(json.dumps(rows, indent=1) + "\n")
    if int(os.environ.get("RANK", "0")) == 0:
        print(report(rows))


def measure(name: str, rounds: int) -> list[dict]:
    """All cuts of a slice: what was predicted from a profile and a link of the same minutes, and the steps."""
    config, (make_packs, frozen) = MODELS["mixed"], SLICES[name]
    packs = make_packs()
    profile, share = measure_model(config, LIMITS, frozen)
    link = measure_link()
    size = len(profile.layers)
    cases = [Case(f"{cut} + {size - cut}", Partition((0, cut, size)), packs, frozen=frozen) for cut in CUTS]
    timings = time_steps(config, cases, rounds=rounds, minutes=MINUTES, report=print)
    return [
        {
            "slice": name,
            "cut": case.name,
            "heading": heading(share, link),
            "predicted_seconds": predict(profile, case, link),
            "measured_seconds": timing.seconds,
            "disturbed": timing.disturbed,
        }
        for case, timing in zip(cases, timings, strict=True)
    ]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every measurement, and what the launcher adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="quiet steps of each case")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


def start() -> None:
    """Join the other ranks; each has a core of its own."""
    meet("gloo")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {dist.get_rank() % (os.cpu_count() or 1)})


def sampled(method: str) -> Packs:
    """A step of one of our samplers."""
    lengths = sample_lengths()
    epoch = arrange_epoch(lengths, LIMITS, num_replicas=1, micro_batches=MICRO_BATCHES, method=method, seed=1)
    return Packs(method, tuple(tuple(epoch.packs[pack].tolist()) for pack in epoch.steps[3, 0]), lengths)


def uneven() -> Packs:
    """Images only and texts only in turn."""
    lengths = sample_lengths()
    texts, images = np.flatnonzero(lengths.vision_units == 0), np.flatnonzero(lengths.vision_units >= 3)
    packs = (images[:4], texts[:3], images[4:6], texts[3:9])
    return Packs("uneven", tuple(tuple(pack.tolist()) for pack in packs), lengths)


SLICES: dict[str, tuple[Callable[[], Packs], tuple[str, ...]]] = {
    "balanced": (partial(sampled, "balanced"), ()),
    "isf": (partial(sampled, "isf"), ()),
    "random": (partial(sampled, "random"), ()),
    "uneven": (uneven, ()),
    "frozen-vit": (partial(sampled, "balanced"), ("patch_embedding", "vision_block")),
    "frozen-llm": (partial(sampled, "balanced"), ("text_embedding", "decoder_block", "final_norm", "head")),
}
"""Packs, and kinds of layers that are frozen."""


def predict(profile: ModelProfile, case: Case, link: CostModel) -> float:
    """Seconds of a step, by the simulator."""
    return simulate_step(profile, case.partition, [case.packs.load], links_of(link)).step_seconds


def links_of(link: CostModel) -> Links:
    """A transfer's seconds, a byte of it a token, as bandwidth and latency."""
    return Links(1 / link.llm_tokens, latency_seconds=link.fixed)


def heading(share: float, link: CostModel) -> str:
    """When, on what, and how quiet it was."""
    warning = f" WARNING: over {MOST_FOREIGN:.0%}." if share > MOST_FOREIGN else ""
    return (
        f"{date.today()}, {os.cpu_count()} cores, two processes of one thread, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__}; others took {share:.1%} of the CPU beside the profile;{warning} "
        f"a transfer takes {1e3 * link.fixed:.2f} ms and {1e3 * 1e6 * link.llm_tokens:.2f} ms per MB"
    )


def report(rows: Sequence[dict]) -> str:
    """A line per case, and what they say together."""
    cells, errors = [], []
    for row in rows:
        seconds, middle = row["measured_seconds"], median(row["measured_seconds"])
        errors.append(row["predicted_seconds"] / middle - 1)
        times = f"{1e3 * middle:,.0f}", f"{1e3 * row['predicted_seconds']:,.0f}", f"{errors[-1]:+.1%}"
        cells.append((row["slice"], row["cut"], *times, f"{(max(seconds) - min(seconds)) / middle:.1%}"))
    names = ("slice", "layers of the stages", "measured ms", "predicted ms", "error", "spread of the measured")
    sizes, medians = np.abs(errors), [median(row["measured_seconds"]) for row in rows]
    rank = spearmanr(medians, [row["predicted_seconds"] for row in rows]).statistic
    steps, disturbed = sum(len(row["measured_seconds"]) for row in rows), sum(row["disturbed"] for row in rows)
    headings = "\n".join(dict.fromkeys(f"- {row['slice']}: {row['heading']}" for row in rows))
    return (
        f"{headings}\n\n{table(names, cells)}\n\n"
        f"{len(rows)} cases, {steps} quiet steps, {disturbed} disturbed ones left out: error "
        f"{np.mean(sizes):.1%} on average, {np.median(sizes):.1%} median, {np.max(sizes):.1%} at most; mean signed "
        f"error {np.mean(errors):+.1%}; rank correlation {rank:.3f}"
    )


if __name__ == "__main__":
    main()
