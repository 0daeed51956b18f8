import numpy as np
import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.data.padded import random_padded_steps
from omnibal.errors import ConfigError

LENGTHS = SampleLengths(np.arange(30) % 3, np.arange(30) + 5, vision_squared=np.arange(30) % 5)


def test_every_sample_is_padded_to_the_longest_of_its_micro_batch():
    load = random_padded_steps(LENGTHS, batch_size=3, num_replicas=2, micro_batches=2, steps=9, seed=4)
    assert load.shape == (2, 2, 2)
    order = np.random.default_rng(4).permutation(30)[:24].reshape(2, 2, 2, 3)
    for place in np.ndindex(2, 2, 2):
        samples, longest = order[place], max(order[place]) + 5
        assert load.llm_tokens[place] == 3 * longest
        assert load.llm_tokens_squared[place] == 3 * longest**2
        assert load.vision_units[place] == sum(samples % 3)
        assert load.vision_squared[place] == sum(samples % 5)


def test_no_more_steps_than_asked_for():
    assert random_padded_steps(LENGTHS, batch_size=1, num_replicas=1, micro_batches=2, steps=4).shape == (4, 1, 2)


def test_a_step_needs_enough_samples():
    with pytest.raises(ConfigError, match="lengths must hold a step of 32 samples, got 30"):
        random_padded_steps(LENGTHS, batch_size=4, num_replicas=4, micro_batches=2, steps=1)
