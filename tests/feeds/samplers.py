"""Samplers of all ranks for the tests of them, and what to draw them from."""

import json

from hypothesis import strategies as st

from omnibal.data.limits import PackLimits
from omnibal.feeds.sampler import BalancedBatchSampler
from tools.synthetic import tiled_lengths

LENGTHS = tiled_lengths(400, seed=5, text_share=0.2)
LIMITS = PackLimits(9, 4096)
methods = st.sampled_from(["balanced", "isf", "random"])
shapes = st.tuples(st.integers(1, 5), st.integers(1, 3))


def samplers(shape, lengths=LENGTHS, limits=LIMITS, **options):
    num_replicas, micro_batches = shape
    return [
        BalancedBatchSampler(
            lengths, limits, num_replicas=num_replicas, rank=rank, micro_batches=micro_batches, **options
        )
        for rank in range(num_replicas)
    ]


def resumed(shape, state, **options):
    ranks = samplers(shape, **options)
    for sampler in ranks:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def seen(ranks):
    return sorted(sample for sampler in ranks for pack in sampler for sample in pack)


def packs_of(ranks):
    return [list(sampler) for sampler in ranks]
