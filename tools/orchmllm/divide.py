"""Processor time of dividing samples, beside numpy's sort of the same costs, and the largest rank over the mean."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from omnibal.dispatch.divide import METHODS, divide

REPEATS = 25
ROWS = ("longest_first", "least_squares_within", "padded", "padded_attention")


def seconds(run: Callable[[np.ndarray], object], draws: Sequence[np.ndarray]) -> float:
    """The least of several runs, each on other costs: a processor learns to guess comparisons that repeat."""
    found = []
    for costs in draws:
        begun = time.process_time()
        run(costs)
        found.append(time.process_time() - begun)
        if sum(found) > 1:
            break
    return min(found)


def main() -> None:
    """Print Markdown."""
    generator = np.random.default_rng(0)
    print("| ranks | samples | method | ms | over sort | over argsort | largest rank over mean - 1 |\n|" + "---|" * 7)
    for num_ranks in (8, 32, 128, 512, 2560):
        for each in (4, 16, 60):
            draws = np.ceil(generator.lognormal(6, 0.7, (REPEATS, num_ranks * each)))
            sort, argsort, costs = seconds(np.sort, draws), seconds(np.argsort, draws), draws[0]
            for method in (*ROWS, "even", "differencing"):
                if method == "differencing" and len(costs) > 10_000:
                    continue
                sums = np.bincount(divide(costs, num_ranks, method=method), costs, num_ranks)  # compiles, too
                taken = seconds(partial(METHODS.get(method, divide), num_ranks=num_ranks), draws)
                print(f"| {num_ranks} | {len(costs)} | {method} | {taken * 1e3:.3f} | {taken / sort:.1f} "
                      f"| {taken / argsort:.1f} | {sums.max() / sums.mean() - 1:.5f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
