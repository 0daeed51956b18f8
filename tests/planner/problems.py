"""Small planning problems, and every partition of them."""

from dataclasses import replace
from itertools import combinations

import numpy as np

from omnibal.cluster import Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.pipeline.search import search_partition
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.search import StepModel
from tests.clusters import cluster
from tests.memory.models import random_model

LIMITS = PackLimits(9, 300)


def random_packing(rng, *, num_replicas, micro_batches, num_steps=2):
    def load():
        tokens = rng.integers(50, 301, micro_batches)
        return Load(rng.integers(0, 10, micro_batches), tokens, tokens**2)

    steps = tuple(tuple(load() for _ in range(num_replicas)) for _ in range(num_steps))
    return Packing(LIMITS, micro_batches, 3.0 * num_replicas * micro_batches, steps, Load(9, 300, 300**2), 0.1)


def random_step_model(seed, *, max_blocks=4, tightness=None):
    """A model on 2 or 3 stages, with a budget between what it needs at least and what it needs to recompute nothing."""
    rng = np.random.default_rng(seed)
    profile = random_model(rng, max_blocks=max_blocks)
    num_stages = int(rng.integers(2, 4))
    packing = random_packing(rng, num_replicas=int(rng.integers(1, 3)), micro_batches=int(rng.choice([1, 4, 7])))
    request = PlanRequest(
        cluster=cluster(num_stages * len(packing.steps[0]), 1, Links(float(rng.choice([1, 10])))),
        num_stages=num_stages,
        global_batch=8,
        head_room=0.0,
        zero_stage=int(rng.integers(2)),
    )
    schedule = list(SCHEDULES)[seed % len(SCHEDULES)]
    layout = Layout(num_stages, len(packing.steps[0]), zero_stage=request.zero_stage)
    tight = StepModel(profile, packing, layout, request, schedule)
    least = 1 + tight.missing[0]
    most = max(
        max(stage.total for stage in tight.footprint.stages(partition, ("none",) * len(profile.layers)))
        for partition in partitions(len(profile.layers), num_stages)
    )
    share = rng.random() if tightness is None else tightness
    roomy = replace(request.cluster, memory_bytes=int(least + share * (most - least)))
    return StepModel(profile, packing, layout, replace(request, cluster=roomy), schedule)


def partitions(num_layers, num_stages):
    """All of them."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield Partition((0, *inner, num_layers))


def two_phase_seconds(model):
    """Of the best partition for unbounded memory, with the least recompute that makes it fit; or infinite."""
    loads, links, zero_stage = model.packing.steps[0], model.links, model.layout.zero_stage
    found = search_partition(model.profile, loads, model.num_stages, links, zero_stage=zero_stage)
    return float(model.step_seconds(np.array([found.best.partition.boundaries]))[0])
