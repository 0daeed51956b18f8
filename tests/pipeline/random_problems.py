"""Small vision-language models at random: what partition searches are tested on."""

from itertools import combinations

import numpy as np

from omnibal.cluster import Links
from omnibal.cost import CostModel, Load
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.search import PartitionProblem
from omnibal.pipeline.times import step_times
from omnibal.profile.records import LayerCost, ModelProfile

MODES = ("rendezvous", "overlap")


def random_arguments(seed, *, max_blocks=7, max_stages=5):
    """Arguments of search_partition: a model, packs of 1 to 4 replicas, 2 to 5 stages, links, a mode."""
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, rng.integers(1, max_blocks), rng.integers(1, max_blocks))
    return {
        "profile": profile,
        "loads": random_loads(rng, replicas=rng.choice([1, 2, 4]), micro_batches=rng.choice([1, 2, 4, 8, 16])),
        "num_stages": int(rng.integers(2, min(max_stages, len(profile.layers)) + 1)),
        "links": Links(float(rng.choice([20, 100, 1000]))),
        "mode": MODES[rng.integers(2)],
    }


def random_profile(rng, vision_blocks, decoder_blocks):
    frozen, uneven = rng.random() < 0.3, rng.random() < 0.3
    width = rng.uniform(0.3, 3)
    size = rng.choice([0, 0.1, 1, 5])
    vision, text = CostModel(vision_units=size), CostModel(llm_tokens=size / 400)

    def layer(name, vision_seconds, text_seconds, output, parameters, *, trainable=True):
        factor = rng.uniform(0.5, 1.5) if uneven else 1.0
        forward = CostModel(vision_units=vision_seconds * factor, llm_tokens=text_seconds / 400 * factor)
        return LayerCost(
            name,
            name.split(".")[0],
            module="vision" if vision_seconds else "language",
            forward_seconds=forward,
            backward_seconds=forward,
            weight_seconds=forward if trainable else CostModel(),
            split_seconds=CostModel(fixed=float(rng.random())) if trainable else CostModel(),
            output_bytes=output,
            saved_bytes={"none": CostModel(), "full": CostModel()},
            parameter_bytes=parameters,
            gradient_bytes=parameters if trainable else 0,
            optimizer_seconds=parameters / 10 if trainable else 0.0,
            trainable=trainable,
        )

    layers = [
        layer("patch_embedding", 0.1, 0, vision, 10, trainable=not frozen),
        *(layer(f"vision_block.{i}", width, 0, vision, 100, trainable=not frozen) for i in range(vision_blocks)),
        layer("projector", 0.3, 0, 0.25 * vision, 20),
        layer("text_embedding", 0, 0.05, text, 300),
        *(layer(f"decoder_block.{i}", 0, 1, text, 150) for i in range(decoder_blocks)),
        layer("head", 0, rng.uniform(1, 6), CostModel(), 300),
    ]
    return ModelProfile(tuple(layers), device="test", dtype="float32")


def random_loads(rng, *, replicas, micro_batches):
    spread = rng.choice([0, 0.1, 0.5])

    def sizes(mean):
        return np.maximum(mean * (1 + spread * rng.standard_normal(micro_batches)), 0)

    return [Load(sizes(9), sizes(4000)) for _ in range(replicas)]


def problem_of(arguments):
    times = step_times(arguments["profile"], arguments["loads"], arguments["links"])
    schedule = one_f_one_b(arguments["num_stages"], times.forward.shape[1])
    return PartitionProblem(arguments["profile"], times, schedule, arguments["mode"])


def all_partitions(num_layers, num_stages):
    return np.array([(0, *cut, num_layers) for cut in combinations(range(1, num_layers), num_stages - 1)])
