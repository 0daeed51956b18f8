"""Small planning problems, and every partition of them."""

from dataclasses import replace
from itertools import combinations

import numpy as np

from omnibal.cluster import Encoder, Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.families.base import encoder_layers
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.pipeline.search import search_partition
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.step_model import StepCosts, StepModel
from tests.clusters import cluster
from tests.memory.models import random_model

LIMITS = PackLimits(9, 300)


def random_packing(rng, *, num_replicas, micro_batches, num_steps=2):
    def load():
        tokens = rng.integers(50, 301, micro_batches)
        return Load(rng.integers(0, 10, micro_batches), tokens, tokens**2)

    steps = tuple(tuple(load() for _ in range(num_replicas)) for _ in range(num_steps))
    return Packing(LIMITS, micro_batches, 3.0 * num_replicas * micro_batches, steps, Load(9, 300, 300**2), 0.1)


def random_step_model(seed, *, max_blocks=4, tightness=None, apart=False):
    """A model on 2 or 3 stages, with a budget between what it needs at least and what it needs to recompute nothing.

    ``apart``: the encoder has devices of its own, one or two stages of one or two replicas.
    """
    rng = np.random.default_rng(seed)
    profile = random_model(rng, max_blocks=max_blocks)
    num_stages = int(rng.integers(2, 4))
    packing = random_packing(rng, num_replicas=int(rng.integers(1, 3)), micro_batches=int(rng.choice([1, 4, 7])))
    links = Links(float(rng.choice([1, 10])))
    layout = Layout(num_stages, len(packing.steps[0]), zero_stage=int(rng.integers(2)))
    if apart:
        profile, packing = with_vision(profile), random_packing(rng, num_replicas=1 + seed % 2, micro_batches=4)
        own = min(1 + seed % 3 // 2, sum(layer.module == "vision" for layer in profile.layers), num_stages - 1)
        layout = replace(layout, num_replicas=1 + seed % 2, encoder=Encoder(own, 1 + seed // 2 % 2))
    request = PlanRequest(
        cluster=cluster(layout.num_devices, 1, links),
        num_stages=num_stages,
        global_batch=8,
        head_room=0.0,
        zero_stage=layout.zero_stage,
    )
    schedule = list(SCHEDULES)[seed % len(SCHEDULES)]
    tight = StepModel(StepCosts(profile, packing, layout, request), schedule)
    least = 1 + tight.missing[0]
    most = max(
        max(stage.total for stage in tight.footprint.stages(partition, ("none",) * len(profile.layers)))
        for partition in partitions(profile, layout)
    )
    share = rng.random() if tightness is None else tightness
    roomy = replace(request.cluster, memory_bytes=int(least + share * (most - least)))
    return StepModel(StepCosts(profile, packing, layout, replace(request, cluster=roomy)), schedule)


def with_vision(profile):
    """The profile with layers before the text embedding that count as the encoder's."""
    count = [layer.kind for layer in profile.layers].index("text_embedding")
    vision = [replace(layer, module="vision") for layer in profile.layers[:count]]
    return replace(profile, layers=(*vision, *profile.layers[count:]))


def partitions(profile, layout):
    """All of them; of units, those that cut encoder and LLM apart."""
    num_layers = len(profile.layers)
    for inner in combinations(range(1, num_layers), layout.num_stages - 1):
        if not layout.has_units or inner[layout.encoder_stages - 1] == encoder_layers(profile.layers):
            yield Partition((0, *inner, num_layers))


def two_phase_seconds(model):
    """Of the best partition for unbounded memory, with the least recompute that makes it fit; or infinite."""
    loads, links, zero_stage = model.packing.steps[0], model.costs.links, model.layout.zero_stage
    found = search_partition(model.profile, loads, model.num_stages, links, zero_stage=zero_stage)
    return float(model.evaluate(np.array([found.best.partition.boundaries]))[0])
