"""Rollouts of unlike lengths, divided over ranks by two costs: python launch/examples/rollouts.py.

A trainer for reinforcement learning knows how long its rollouts are only when they are there. Which rank trains on
which of them does not change the gradient, as long as the loss is a sum over all ranks' tokens divided by their number;
how long the slowest rank takes does change. No torch is needed: every rank computes the same division from the same
numbers.
"""

import numpy as np

from omnibal import SampleLengths, balanced_rows


def rollouts(prompts: int, answers: int, seed: int = 0) -> SampleLengths:
    """Made-up ones: the answers to a prompt share its images, and few of them are very long."""
    generator = np.random.default_rng(seed)
    tiles = np.repeat(generator.choice([0, 1, 4, 12], prompts), answers)
    answered = generator.lognormal(6.5, 1.0, prompts * answers).astype(np.int64).clip(max=8192)
    return SampleLengths(tiles, 100 + 256 * tiles + answered)


def excess(rows: list[list[np.ndarray]], load: np.ndarray) -> float:
    """The rank with most over the mean."""
    of_ranks = [load[np.concatenate(rank)].sum() for rank in rows]
    return float(max(of_ranks) / np.mean(of_ranks))


if __name__ == "__main__":
    lengths = rollouts(prompts=128, answers=8)
    as_they_came = [[part] for part in np.array_split(np.arange(len(lengths)), 16)]
    rows = balanced_rows(lengths, "InternVL3-8B", ranks=16, token_budget=32768)
    print(f"{len(lengths)} rollouts on 16 ranks, {len(rows[0])} micro-batches each; largest rank over mean:")
    for name, load in {"tiles": lengths.vision_units, "tokens": lengths.llm_tokens}.items():
        print(f"  {name}: {excess(as_they_came, load):.2f} as they came, {excess(rows, load):.3f} divided")
