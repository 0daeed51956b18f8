"""Small models with bytes at random."""

import numpy as np

from omnibal.cost import CostModel
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.profile.records import LayerCost, ModelProfile


def block(
    name, *, none=100, selective=None, full=10, output=10, forward=1.0, per_token=0.0, saved=None, pending=0,
    trainable=True, **costs,
):  # fmt: skip
    """A layer of fixed bytes; recomputing fully takes a forward pass, selectively a third of it."""
    saved = saved or {"none": none, "full": full} | ({} if selective is None else {"selective": selective})
    seconds = CostModel(fixed=forward, llm_tokens=per_token)
    return LayerCost(
        name,
        name.split(".")[0],
        module="language",
        forward_seconds=seconds,
        backward_seconds=seconds,
        weight_seconds=seconds if trainable else CostModel(),
        pending_bytes=CostModel(fixed=pending if trainable else 0),
        output_bytes=CostModel(fixed=output),
        saved_bytes={level: CostModel(fixed=size) for level, size in saved.items()},
        recompute_seconds={level: seconds * (1 / 3) for level in saved if level == "selective"},
        trainable=trainable,
        **costs,
    )


def model(layers, *, dtype="bfloat16"):
    return ModelProfile(tuple(layers), device="test", dtype=dtype)


def random_model(rng, *, max_blocks=4, alike=0.6):
    """A vision-language model; with probability ``alike`` the blocks of a kind are equal, else each is its own."""
    same = rng.random() < alike

    def blocks(kind, count):
        first = random_block(rng, f"{kind}.0")
        return [_renamed(first, f"{kind}.{i}") if same else random_block(rng, f"{kind}.{i}") for i in range(count)]

    layers = [
        random_block(rng, "patch_embedding", trainable=rng.random() < 0.7),
        *blocks("vision_block", rng.integers(1, max_blocks)),
        random_block(rng, "text_embedding", tied_key="embedding"),
        *blocks("decoder_block", rng.integers(1, max_blocks)),
        random_block(rng, "head", tied_key="embedding"),
    ]
    return model(layers)


def random_block(rng, name, **options):
    full = rng.integers(0, 20)
    none = full + rng.integers(0, 100)
    selective = int(rng.integers(full, none + 1)) if rng.random() < 0.7 else None
    parameters = int(rng.integers(0, 10))
    return block(
        name,
        none=int(none),
        selective=selective,
        full=int(full),
        output=int(rng.integers(1, 12)),
        pending=int(rng.integers(0, 120)),
        forward=float(rng.integers(1, 30)),
        per_token=float(rng.integers(0, 3)) / 10,
        parameter_bytes=parameters,
        gradient_bytes=2 * parameters,
        optimizer_bytes=6 * parameters,
        **options,
    )


def _renamed(layer, name):
    return LayerCost(**{field: getattr(layer, field) for field in layer.__dataclass_fields__} | {"name": name})


def random_schedule(rng, num_stages):
    """One of those there are, of 1 to 7 micro-batches."""
    name = rng.choice(list(SCHEDULES))
    return SCHEDULES[name](num_stages, int(rng.integers(1, 8)))


def generator(seed):
    return np.random.default_rng(seed)
