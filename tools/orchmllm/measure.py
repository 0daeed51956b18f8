"""Samples a second with and without rearranging, the same samples in turn, on two processes: measure.py [MINUTES]."""

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1] / "dropin"), str(Path(__file__).parents[1] / "sampling")]
from run import IMAGE_TOKEN, RANKS, Samples, add_up, lengths_of, model_of  # noqa: E402

from omnibal.dispatch.step_plan import Costs, StepPlan  # noqa: E402
from omnibal.integrations.packing import PackCollator, positions_of  # noqa: E402
from omnibal.integrations.rearranging import RearrangedModel  # noqa: E402
from omnibal.integrations.rearranging_loader import RearrangingLoader  # noqa: E402

BATCH = 8
"""Samples that a rank draws."""


def compare(rank: int, port: int, kind: str, minutes: float) -> None:
    """A process: a step as drawn, the same step rearranged, and so on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    lengths = lengths_of(kind)
    samples, model = Samples(kind, lengths), model_of(kind)
    rearranged = RearrangedModel(model)
    collator = PackCollator(samples.collate, positions_of(model.config))
    order = np.random.default_rng(0).permutation(len(lengths)).reshape(-1, RANKS, BATCH)
    ways = {
        "as drawn": Costs(least_gain=1.1),  # no gain is that large: everything stays
        "rearranged": Costs(),
    }
    loaders = {
        name: iter(
            RearrangingLoader(
                ([samples[int(number)] for number in of_ranks[rank]] for of_ranks in order),
                collator,
                image_token_id=IMAGE_TOKEN,
                costs=costs,
            )
        )
        for name, costs in ways.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    planned: list[StepPlan] = []
    ends = time.perf_counter() + 60 * minutes
    while True:
        for name, loader in loaders.items():
            drawn = next(loader)
            dist.barrier()
            begun = time.perf_counter()
            rearranged(drawn).backward()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
            add_up(model)
            model.zero_grad()
        planned.append(drawn.plan)
        late = torch.tensor(float(time.perf_counter() > ends))
        dist.all_reduce(late)
        if late:
            break
    if rank == 0:
        drawn_rate, moved_rate = (RANKS * BATCH / np.median(values[1:]) for values in seconds.values())
        imbalance = np.mean([list(plan.imbalance.values()) for plan in planned], axis=0)
        cells = [f"{before:.2f} -> {after:.2f}" for before, after in imbalance]
        cells += [f"{drawn_rate:.1f}", f"{moved_rate:.1f}", f"{moved_rate / drawn_rate:.2f}"]
        print(f"| {kind} | {len(planned) - 1} | {' | '.join(cells)} |", flush=True)
    for loader in loaders.values():
        loader.close()
    dist.destroy_process_group()


def main() -> None:
    """Print Markdown."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    print("| data | steps | ViT, largest over mean | LLM | samples/s as drawn | rearranged | gain |\n|" + "---|" * 7)
    for number, kind in enumerate(("mix", "native")):
        torch.multiprocessing.spawn(compare, args=(29650 + number, kind, minutes), nprocs=RANKS)


if __name__ == "__main__":
    main()
