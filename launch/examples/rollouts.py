"""Rollouts of unlike lengths, divided over ranks by two costs: python launch/examples/rollouts.py.

A trainer for reinforcement learning knows how long its rollouts are only when they are there. Which rank trains on
which of them does not change the gradient, as long as the loss is a sum over all ranks' tokens divided by their number;
how long the slowest rank takes does change. No torch is needed, and no model: every rank computes the same division
from the same numbers.
"""

from itertools import count
from math import ceil

import numpy as np

from omnibal.cost import CostModel, IntArray, Load
from omnibal.dispatch.divide import divide
from omnibal.errors import InfeasibleError

VISION = CostModel(vision_units=6e-3)
"""Seconds of a tile in the vision encoder, forward and backward."""
LLM = CostModel(llm_tokens=1.6e-4, llm_tokens_squared=4e-9)
"""Seconds of a rollout's tokens in the LLM; what attention takes grows with their square."""


def deal(tiles: IntArray, tokens: IntArray, num_ranks: int, most_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of every rank, as many on each: ``dealt[rank][micro_batch]`` are numbers of rollouts.

    Args:
        tiles: Of each rollout's images, (rollouts,).
        tokens: Of each rollout, prompt and answer, (rollouts,).
        num_ranks: That train together.
        most_tokens: That a micro-batch may hold.
    """
    load = Load(tiles, tokens, tokens.astype(float) ** 2)
    costs = np.stack([VISION(load), LLM(load)], axis=1)
    for micro_batches in count(max(ceil(tokens.sum() / (num_ranks * most_tokens)), 1)):
        try:
            place = divide(costs, num_ranks * micro_batches, sizes=tokens, limits=[most_tokens])
        except InfeasibleError:
            if tokens.max() > most_tokens:  # more micro-batches would not help
                raise
            continue
        places = [np.flatnonzero(place == number).tolist() for number in range(num_ranks * micro_batches)]
        return [places[rank::num_ranks] for rank in range(num_ranks)]
    raise AssertionError("count() has no end")


def rollouts(prompts: int, answers: int) -> tuple[IntArray, IntArray]:
    """Made-up ones: the answers to a prompt share its images, and few of them are very long."""
    generator = np.random.default_rng(0)
    tiles = np.repeat(generator.choice([0, 1, 4, 12], prompts), answers)
    return tiles, 100 + 256 * tiles + generator.lognormal(6.5, 1.0, prompts * answers).astype(np.int64).clip(max=8192)


def excess(dealt: list[list[list[int]]], costs: np.ndarray) -> float:
    """The rank with most over the mean."""
    of_ranks = [costs[[number for micro_batch in rank for number in micro_batch]].sum() for rank in dealt]
    return float(max(of_ranks) / np.mean(of_ranks))


if __name__ == "__main__":
    tiles, tokens = rollouts(prompts=128, answers=8)
    load = Load(tiles, tokens, tokens.astype(float) ** 2)
    as_they_came = [[part.tolist()] for part in np.array_split(np.arange(len(tokens)), 16)]
    dealt = deal(tiles, tokens, num_ranks=16, most_tokens=32768)
    print(f"{len(tokens)} rollouts on 16 ranks, {len(dealt[0])} micro-batches each; largest rank over mean:")
    for name, cost in {"vision": VISION(load), "LLM": LLM(load)}.items():
        print(f"  {name}: {excess(as_they_came, cost):.2f} as they came, {excess(dealt, cost):.3f} divided")
