"""prime-rl's micro-batches dealt to trainers by vision and text; prime-rl itself looks at the text's lengths alone.

    import prime_rl.trainer.batch
    import prime_rl_rows
    prime_rl.trainer.batch._distribute_group = prime_rl_rows.distributor("Qwen3-VL-4B")

in the process that packs. prime-rl puts a rollout with images into a micro-batch of its own, packs the others, and runs
the micro-batches of each kind at the same time on all trainers; then ``_distribute_group`` says which trainer gets
which of a kind, as many each. Only this choice is replaced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from omnibal import SampleLengths, balanced_rows


def distributor(model: Any) -> Callable[[list[Any], int, Callable[[Sequence[int]], int]], list[list[Any]]]:
    """What stands in for ``prime_rl.trainer.batch._distribute_group``; ``model`` as in ``omnibal.balanced_rows``."""

    def distribute(
        group: list[Any], num_train_workers: int, bin_cost: Callable[[Sequence[int]], int]
    ) -> list[list[Any]]:
        if not group:
            return [[] for _ in range(num_train_workers)]
        each = len(group) // num_train_workers  # prime-rl has filled the group up to a multiple
        lengths = lengths_of(group)
        budget = int(lengths.llm_tokens.max())
        rows = balanced_rows(lengths, model, num_train_workers, budget, micro_batches=each, equal_counts=True)
        return [[group[place] for (place,) in trainer] for trainer in rows]

    return distribute


def lengths_of(group: list[Any]) -> SampleLengths:
    """Tokens and patches of prime-rl's micro-batches."""
    units, squared = [], []
    for micro_batch in group:
        patches = np.zeros(0, dtype=np.int64)
        if micro_batch.mm_kwargs is not None:
            grid = micro_batch.mm_kwargs["image_grid_thw"]
            patches = np.frombuffer(bytes(grid.data), dtype=grid.dtype).reshape(grid.shape).prod(axis=1)
        units.append(int(patches.sum()))
        squared.append(int((patches**2).sum()))
    tokens = [len(micro_batch.input_ids) for micro_batch in group]
    return SampleLengths(units, tokens, vision_squared=squared)
