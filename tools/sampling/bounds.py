"""Bounds that no planner can beat: packs that heed both limits at once, cost of steps that are even in vision units."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.optimize import linprog

from omnibal.cost import CostModel, Load
from omnibal.data.epoch import Epoch
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits

Counts = npt.NDArray[np.int64]

TOKEN_UNIT: Final = 16
"""Tokens are rounded down to multiples of this."""
CLASSES: Final = 48
"""Sizes that samples with equally many vision units are rounded down to."""
GAP: Final = 5e-4
"""How near the bound comes to what it could be at most with these sizes."""


def fewest_packs(lengths: SampleLengths, limits: PackLimits) -> float:
    """Packs without which no packing can do, as both limits hold at the same time.

    The linear relaxation of cutting stock: how many packs of every possible content, fractions allowed, hold all
    samples. Its prices say what each size is worth such that no pack is worth more than 1; then no packing has fewer
    packs than all samples are worth. Sizes are rounded down, samples over a limit left out, so that it stays a bound.

    Sources: Gilmore and Gomory, A linear programming approach to the cutting-stock problem, 1961; Farley, A note on
    bounding a class of linear programming problems, 1990.
    """
    sizes, counts = _classes(lengths, limits)
    room = (limits.vision_units, limits.llm_tokens // TOKEN_UNIT)
    patterns = [np.where(np.arange(len(sizes)) == size, 1, 0) for size in range(len(sizes))]
    best = 0.0
    while True:
        matrix = np.array(patterns).T
        solved = linprog(np.ones(len(patterns)), A_ub=-matrix, b_ub=-counts, method="highs")
        prices = np.maximum(-solved.ineqlin.marginals, 0)
        dearest, pattern = _dearest_pack(sizes, prices, *room)
        best = max(best, float(prices @ counts) / max(dearest, 1.0))
        if solved.fun <= best * (1 + GAP):
            return best
        patterns.append(pattern)


def least_cost_ratio(lengths: SampleLengths, cost: CostModel, epoch: Epoch) -> float:
    """Dist Ratio of cost below which an epoch's steps of one micro-batch cannot come while vision units are even.

    The pack with a sample of many tokens must hold as many vision units as all others. Those that the sample lacks come
    with others of the same step: at least with the cheapest per vision unit, fractions allowed. That pack is the one
    that the step waits for.
    """
    tokens = lengths.llm_tokens.astype(np.int64)
    squared = 0 if lengths.vision_squared is None else lengths.vision_squared
    costs = cost(Load(lengths.vision_units, tokens, tokens**2, squared))
    packs = epoch.packs
    ratios = []
    for step in epoch.steps.reshape(epoch.num_steps, -1):
        samples = np.concatenate([packs.samples[packs.starts[pack] : packs.starts[pack + 1]] for pack in step])
        largest = _least_largest(costs[samples], lengths.vision_units[samples], len(step))
        ratios.append(1 - costs[samples].sum() / len(step) / largest)
    return float(np.mean(ratios))


def _least_largest(costs: Any, vision: IntArray, num_packs: int) -> float:
    """What the costliest of packs costs at least."""
    with_images = np.flatnonzero(vision)
    by_worth = with_images[np.argsort(costs[with_images] / vision[with_images])]
    units = np.concatenate([[0], np.cumsum(vision[by_worth])])
    prices = np.concatenate([[0.0], np.cumsum(costs[by_worth])])
    lacking = np.maximum(vision.sum() // num_packs - vision, 0)
    return float(max(costs.sum() / num_packs, (costs + np.interp(lacking, units, prices)).max()))


def _classes(lengths: SampleLengths, limits: PackLimits) -> tuple[Counts, Counts]:
    """Sizes (vision units, tokens in units) and how many samples have at least them."""
    kept = (lengths.vision_units <= limits.vision_units) & (lengths.llm_tokens <= limits.llm_tokens)
    vision, tokens = lengths.vision_units[kept], lengths.llm_tokens[kept] // TOKEN_UNIT
    rows = []
    for units in np.unique(vision):
        some = tokens[vision == units]
        edges = np.unique(np.quantile(some, np.linspace(0, 1, CLASSES, endpoint=False), method="lower"))
        rows += [
            (units, edge, count) for edge, count in zip(edges, np.histogram(some, [*edges, 1 << 40])[0], strict=True)
        ]
    table = np.array(rows, dtype=np.int64)
    return table[:, :2], table[:, 2]


@njit(cache=True)
def _dearest_pack(sizes: Counts, prices: Any, most_vision: int, most_tokens: int) -> Any:
    """The content worth most that one pack can hold: an unbounded knapsack with two limits."""
    worth = np.zeros((most_vision + 1, most_tokens + 1))
    last = np.full((most_vision + 1, most_tokens + 1), -1)
    for vision in range(most_vision + 1):
        for tokens in range(most_tokens + 1):
            if tokens and worth[vision, tokens - 1] > worth[vision, tokens]:
                worth[vision, tokens], last[vision, tokens] = worth[vision, tokens - 1], -2
            if vision and worth[vision - 1, tokens] > worth[vision, tokens]:
                worth[vision, tokens], last[vision, tokens] = worth[vision - 1, tokens], -3
            for size in range(len(sizes)):
                if sizes[size, 0] <= vision and sizes[size, 1] <= tokens:
                    more = worth[vision - sizes[size, 0], tokens - sizes[size, 1]] + prices[size]
                    if more > worth[vision, tokens]:
                        worth[vision, tokens], last[vision, tokens] = more, size
    pattern = np.zeros(len(sizes), dtype=np.int64)
    vision, tokens = most_vision, most_tokens
    while last[vision, tokens] != -1:
        step = last[vision, tokens]
        if step == -2:
            tokens -= 1
        elif step == -3:
            vision -= 1
        else:
            pattern[step] += 1
            vision, tokens = vision - sizes[step, 0], tokens - sizes[step, 1]
    return worth[most_vision, most_tokens], pattern
