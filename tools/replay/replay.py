"""A cluster's micro-batches, of every rank, replayed on one device: python -m tools.replay.replay; see README.md.

Every micro-batch of every rank runs once, its ViT and its language model timed apart; what ranks would wait is composed
by the rule that rule.py checks. Steps are appended to a file as they are done, and a further call goes on behind them.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from omnibal.advise.wait import PHASES, wait
from omnibal.data.lengths import SampleLengths
from tools.dropin.ways import Task, Way, default, group_by_length, ours, random_packs, rebalance
from tools.replay.bench import SHAPES, Bench, config_of, pack_of, shorter
from tools.sampling.data import real_lengths
from tools.synthetic import tiled_lengths

STEPS = 20
CLUSTERS = {"8 ranks": (8, 4), "64 ranks": (64, 1)}
"""Ranks, and micro-batches of a rank's step."""
TRAINERS = ("ddp", "zero2", "zero3")


def ways_of(lengths: SampleLengths, ranks: int, micro_batches: int) -> list[Way]:
    """Of the same samples, four to a micro-batch on average."""
    task = Task(lengths, ranks, micro_batches)
    return [
        default(task), group_by_length(task), rebalance(task), random_packs(task), ours(task),
    ]  # fmt: skip


def replay(way: Way, lengths: SampleLengths, bench: Bench, step: int) -> dict:
    """A step's samples, seconds of its phases, shape (ranks, micro-batches, phases), and the most that ranks hold."""
    packs = [[pack_of(lengths, group, padded=way.padded) for group in rank] for rank in way.steps[step]]
    measured = [bench.measured(of_rank) for of_rank in packs]
    return {
        "way": way.name, "step": step, "samples": sum(len(g) for r in way.steps[step] for g in r),
        "seconds": np.round([seconds for seconds, _ in measured], 6).tolist(),
        "bytes": [held for _, held in measured],
    }  # fmt: skip


def drawn(name: str, ranks: int, micro_batches: int) -> SampleLengths:
    """As many samples as the steps need, and a few that a last step may lack."""
    whole = real_lengths()[0] if name == "real" else tiled_lengths(100_000, seed=1)
    chosen = np.random.default_rng(0).permutation(len(whole))[: (STEPS + 1) * ranks * micro_batches * 4]
    return whole.take(chosen)


def run(out: Path, shape: str, data: str, minutes: float) -> None:
    """Replay what is not yet in the file, ways in turn, for so long."""
    end, bench = time.monotonic() + 60 * minutes, Bench(config_of(shape))
    bench.warm_up()
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(row["cluster"], row["way"], row["step"]) for row in rows}
    torch.set_num_threads(1)
    with out.open("a") as file:
        for cluster, (ranks, micro_batches) in CLUSTERS.items():
            lengths = drawn(data, ranks, micro_batches)
            ways = ways_of(lengths, ranks, micro_batches)
            for step in range(STEPS):
                for way in ways:
                    if time.monotonic() > end:
                        print("not done: call again")
                        return
                    if step < len(way.steps) and (cluster, way.name, step) not in known:
                        found = {"cluster": cluster, **replay(way, shorter(lengths), bench, step)}
                        file.write(json.dumps(found) + "\n")
                        file.flush()
    print("done")


def composed(seconds: np.ndarray, samples: int) -> dict[str, tuple[float, float]]:
    """By trainer, samples a second and the share of the time that ranks wait.

    ``seconds`` are those of all passes, shape (steps, ranks, micro-batches, phases).
    """
    costs, found = dict(zip(PHASES, np.moveaxis(seconds, -1, 0), strict=True)), {}
    for trainer in TRAINERS:
        waits = sum(float(waited.sum()) for waited in wait(costs, trainer).values())
        whole = float(seconds.sum()) + waits
        found[trainer] = samples / whole, waits / whole
    return found


def report(out: Path) -> None:
    """Print samples a second in multiples of the default, by trainer, and what ranks hold at most."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    print(f"| ranks | batches | steps | {' | '.join(TRAINERS)} | waiting under zero3 | fullest rank, MiB | mean rank |")
    print(f"|{'---|' * (6 + len(TRAINERS))}")
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        base: dict[str, float] = {}
        for way in dict.fromkeys(row["way"] for row in rows):
            own = [row for row in rows if (row["cluster"], row["way"]) == (cluster, way)]
            if not own:
                continue
            seconds = np.array([row["seconds"] for row in own])  # steps, ranks, micro-batches, phases
            found = composed(seconds, sum(row["samples"] for row in own))
            cells = " | ".join(f"{rate / base.setdefault(trainer, rate):.2f}" for trainer, (rate, _) in found.items())
            share = found["zero3"][1]
            held = np.array([row["bytes"] for row in own]) / 2**20  # steps, ranks
            print(f"| {cluster} | {way} | {len(own)} | {cells} | {share:.0%} | {held.max():.0f} | {held.mean():.0f} |")


def main() -> None:
    """Replay, then report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="large LLM")
    parser.add_argument("--data", choices=("real", "mix"), default="mix")
    parser.add_argument("--minutes", type=float, default=10, help="So long at most.")
    parser.add_argument("--out", type=Path, default=Path("runs/replay.jsonl"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    run(given.out, given.shape, given.data, given.minutes)
    report(given.out)


if __name__ == "__main__":
    main()
