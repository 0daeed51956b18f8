"""Random micro-batches of a fixed number of samples, padded to their longest: how most people batch today."""

import numpy as np

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError


def random_padded_steps(
    lengths: SampleLengths, *, batch_size: int, num_replicas: int, micro_batches: int, steps: int, seed: int = 0
) -> Load:
    """What random padded micro-batches bring to the devices.

    Images are not padded; the LLM works on ``batch_size`` sequences as long as the longest. With fewer samples than the
    steps need there are fewer steps.

    Args:
        lengths: Of the samples.
        batch_size: Samples of a micro-batch.
        num_replicas: Data-parallel ranks.
        micro_batches: Of each rank and step.
        steps: At most so many.
        seed: Of the order.

    Returns:
        Shape (steps, replicas, micro-batches).

    Raises:
        ConfigError: There are fewer samples than one step needs.

    >>> load = random_padded_steps(
    ...     SampleLengths([1, 0], [10, 4]), batch_size=2, num_replicas=1, micro_batches=1, steps=1
    ... )
    >>> load.vision_units.tolist(), load.llm_tokens.tolist(), load.llm_tokens_squared.tolist()
    ([[[1.0]]], [[[20.0]]], [[[200.0]]])
    """
    step_samples = num_replicas * micro_batches * batch_size
    count = min(steps, len(lengths) // step_samples)
    if count < 1:
        raise ConfigError(f"lengths must hold a step of {step_samples} samples, got {len(lengths)}")
    order = np.random.default_rng(seed).permutation(len(lengths))[: count * step_samples]
    samples = order.reshape(count, num_replicas, micro_batches, batch_size)
    longest = lengths.llm_tokens[samples].max(axis=-1).astype(np.float64)
    squared = None if lengths.vision_squared is None else lengths.vision_squared[samples].sum(axis=-1)
    return Load(
        lengths.vision_units[samples].sum(axis=-1),
        batch_size * longest,
        batch_size * longest**2,
        0 if squared is None else squared,
    )
