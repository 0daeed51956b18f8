"""Even packs of the estimate beside the planner's, and what padding and waits take: python tools/advise/packs.py.

Time of all ranks over the time that the samples take alone, by counted costs of InternVL3-8B, batches of four.
"""

import sys
from pathlib import Path

import numpy as np

from omnibal.advise.batches import Batches, Samples, even_packs, padded_batches, random_packs
from omnibal.advise.costs import phase_costs
from omnibal.advise.models import Model
from omnibal.advise.wait import wait
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.synthetic import tiled_lengths
from omnibal.device import DEVICES
from omnibal.profile.counted import analytic_profile

sys.path[:0] = [str(Path(__file__).parents[1] / "sampling")]
from data import real_lengths  # noqa: E402

STEPS, BATCH, LIMITS = 32, 4, PackLimits(16, 5120)
LAYOUTS = ((8, 16), (64, 1))
TRAINERS = ("ddp", "zero2", "zero3")


def rows(lengths: SampleLengths, ranks: int, micro_batches: int) -> dict[str, Batches]:
    """Each way's batches, of the same samples."""
    per_step = ranks * micro_batches * BATCH
    drawn = lengths.take(np.random.default_rng(0).permutation(len(lengths))[: per_step * STEPS])
    tokens = drawn.llm_tokens.astype(np.float64)
    samples = Samples(np.stack([drawn.vision_units, tokens, tokens**2, 0 * tokens], axis=1).astype(np.float64))
    shape = {"num_ranks": ranks, "micro_batches": micro_batches}
    epoch = arrange_epoch(drawn, LIMITS, num_replicas=ranks, micro_batches=micro_batches)
    planned = epoch.packs.load(drawn)[epoch.steps[:-1]]
    costs = phase_costs(PROFILE)
    seconds = np.stack([
        (costs[f"{part} forward"] + costs[f"{part} backward"])(samples.load) for part in ("vision", "language")
    ], axis=1)  # fmt: skip
    packed = round(len(drawn) / max(epoch.num_steps - 1, 1))
    return {
        "padded": padded_batches(samples, batch=BATCH, **shape),
        "random packs": random_packs(samples, LIMITS, **shape),
        "planner's packs": Batches(planned, planned, packed),
        "estimate's even packs, as many samples": even_packs(samples, seconds, samples_per_step=packed, **shape),
    }


def over_useful(batches: Batches, trainer: str) -> float:
    """Time of all ranks over that of real tokens."""
    costs = phase_costs(PROFILE)
    run, real = ({phase: cost(loads) for phase, cost in costs.items()} for loads in (batches.loads, batches.real))
    waits = sum(waited.sum() for waited in wait(run, trainer).values())
    return float((sum(s.sum() for s in run.values()) + waits) / sum(s.sum() for s in real.values()))


PROFILE = analytic_profile(Model.known("InternVL3-8B").records, DEVICES["A100-80GB"])


def main() -> None:
    """Print a table."""
    print(f"| data | ranks × accumulation | packs | {' | '.join(TRAINERS)} |")
    print(f"|{'---|' * (3 + len(TRAINERS))}")
    for name, lengths in {"real": real_lengths()[0], "mix": tiled_lengths(150_000, seed=1)}.items():
        for ranks, micro_batches in LAYOUTS:
            for way, batches in rows(lengths, ranks, micro_batches).items():
                cells = " | ".join(f"{over_useful(batches, trainer):.3f}" for trainer in TRAINERS)
                print(f"| {name} | {ranks} × {micro_batches} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
