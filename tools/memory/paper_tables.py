"""The OmniBal paper's Tables 5 and 9 beside ours, in the setting that all reports share; see README.md."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from omnibal.cost import CostModel
from omnibal.errors import InfeasibleError
from omnibal.pipeline.partition import Partition
from omnibal.planner import PlanRequest, make_plan
from omnibal.planner.step_model import StepModel
from omnibal.profile.records import LayerCost, Level, ModelProfile
from tools.memory.four_steps import block_modules, count_blocks, four_steps
from tools.partition.paper_models import (
    BASELINE,
    DEVICE,
    LIMITS,
    MICRO_BATCHES,
    SAMPLES_PER_PACK,
    TABLE_9,
    Published,
    cluster_of,
    counted_profile,
)
from tools.synthetic import tiled_lengths

GIB = 2**30
LENGTHS = tiled_lengths(40_000, seed=1)
MEMORY = 80 * GIB
RECOMPUTED = {
    "Llama3-8B": (8, 7, 10, 24),
    "InternLM2-20B": (0, 0, 0, 0),
    "Yi-34B": (3, 2, 0, 0),
    "Llama3-70B": (11, 12, 8, 5, 3, 2, 0, 0),
    "Qwen1.5-110B": (6, 9, 1, 3, 0, 0, 0, 0),
}
"""Blocks of each stage that recompute in Table 9, by the language model under InternViT-6B."""
TABLE_5 = {
    "everything recomputed (paper: + data & model balance)": (58.2, 56.2, 32.5, 32.7),
    "nothing recomputed (paper: + memory balance)": (12.3, 21.7, 24.7, 30.0),
}


def profile_of(row: Published, *, selective: bool = False) -> ModelProfile:
    """A model with counted costs, on request with the selective level too."""
    profile = counted_profile(row)
    if not selective:
        return profile
    return replace(profile, layers=tuple(_with_selective(layer, row.tensor_parallel) for layer in profile.layers))


def _with_selective(layer: LayerCost, tensor_parallel: int) -> LayerCost:
    """Add the level that keeps the results of matrix products and attention.

    What it recomputes, norms and activations, is memory traffic: everything it drops is written again, and about as
    much is read.
    """
    rows = _product_elements(layer)
    if rows == CostModel():
        return layer
    element = 2 / tensor_parallel
    kept = element * rows + layer.saved_bytes["full"]
    everything = layer.saved_bytes["none"]
    dropped = CostModel(**{name: max(getattr(everything, name) - getattr(kept, name), 0) for name in vars(kept)})
    return replace(
        layer,
        saved_bytes={**layer.saved_bytes, "selective": kept},
        recompute_seconds={**layer.recompute_seconds, "selective": 2 / DEVICE.memory_bytes_per_second * dropped},
    )


def _product_elements(layer: LayerCost) -> CostModel:
    """Elements that products of matrices and attention put out."""
    sizes = layer.sizes
    if layer.kind == "vision_block":  # queries, keys, values, attention, its projection, the MLP's two products
        return CostModel(vision_units=sizes["tokens_per_tile"] * (6 * sizes["hidden"] + sizes["intermediate"]))
    if layer.kind == "decoder_block":
        query, key_value = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
        return CostModel(llm_tokens=2 * query + 2 * key_value + 2 * sizes["hidden"] + 2 * sizes["intermediate"])
    return CostModel()


def boundaries_of(profile: ModelProfile, blocks: Sequence[int]) -> tuple[int, ...]:
    """The paper's cut as layer numbers: embedding and projector belong to the ViT's stages, the rest to the LLM's.

    The paper counts blocks alone and does not say which stage holds the layers between.
    """
    places = [i for i, layer in enumerate(profile.layers) if layer.kind in ("vision_block", "decoder_block")]
    inner = []
    for count in np.cumsum(blocks)[:-1]:
        last = places[count - 1]
        following = profile.layers[last + 1].kind
        inner.append(last + (2 if following == "projector" else 1))
    return (0, *inner, len(profile.layers))


def paper_levels(profile: ModelProfile, partition: Partition, recomputed: Sequence[int]) -> tuple[Level, ...]:
    """The first so many blocks of each stage recompute fully."""
    levels: list[Level] = ["none"] * len(profile.layers)
    for (a, b), count in zip(pairwise(partition.boundaries), recomputed, strict=True):
        blocks = [layer for layer in range(a, b) if profile.layers[layer].kind in ("vision_block", "decoder_block")]
        for layer in blocks[:count]:
            levels[layer] = "full"
    return tuple(levels)


def step_model(row: Published, *, budget: int = MEMORY, selective: bool = False) -> StepModel:
    """The row's model and cluster, at the paper's limits."""
    return make_plan(profile_of(row, selective=selective), LENGTHS, request_of(row, budget)).choice.model


def request_of(row: Published, budget: int = MEMORY) -> PlanRequest:
    """Its cluster."""
    return PlanRequest(
        cluster=cluster_of(len(row.blocks) * row.num_replicas * row.tensor_parallel, budget),
        num_stages=len(row.blocks),
        global_batch=round(MICRO_BATCHES * row.num_replicas * SAMPLES_PER_PACK), head_room=0.0,
        accumulate_float32=False, limits=LIMITS,
    )  # fmt: skip


def seconds_of(model: StepModel, boundaries: Sequence[int], levels: tuple[Level, ...]) -> float:
    """Mean simulated step."""
    return model.problem.step_seconds(np.array(boundaries), model.costs.times_at(levels))


def overflow(model: StepModel, partition: Partition, levels: tuple[Level, ...]) -> str:
    """Whether the levels fit a device's whole memory by our footprint, or by how much not."""
    most = max(stage.total for stage in model.footprint.stages(partition, levels))
    return "" if most <= MEMORY else f" ({(most - MEMORY) / GIB:+.1f} GiB)"


def counts(levels: tuple[Level, ...], boundaries: Sequence[int]) -> str:
    """Layers that recompute, by stage."""
    return " ".join(f"{sum(level != 'none' for level in levels[a:b])}" for a, b in pairwise(boundaries))


def blocks_text(profile: ModelProfile, boundaries: Sequence[int]) -> str:
    """Blocks of each stage as V+L."""
    stages = count_blocks(block_modules(profile.layers), Partition(boundaries))
    return " ".join(f"{stage.vision}+{stage.llm}" if stage.vision and stage.llm else f"{stage.vision + stage.llm}"
                    for stage in stages)  # fmt: skip


def table_9() -> None:
    """Cuts and recomputed layers side by side."""
    print("| model, TP PP DP | plan | blocks of each stage | layers that recompute | step s |\n|---|---|---|---|---|")
    for row in (row for row in TABLE_9 if row.vision == BASELINE.vision):
        name = f"6B + {row.language}, {row.tensor_parallel} {len(row.blocks)} {row.num_replicas}"
        for selective in (False, True):
            profile = profile_of(row, selective=selective)
            result = make_plan(profile, LENGTHS, request_of(row))
            model = result.choice.model
            if not selective:
                _published_rows(name, row, model)
            label = "ours, with selective" if selective else "ours"
            levels = model.levels(result.choice.boundaries)
            print(
                f"| | {label} | {blocks_text(profile, result.choice.boundaries)} | "
                f"{counts(levels, result.choice.boundaries)} | {result.choice.step_seconds:.2f} |"
            )


def _published_rows(name: str, row: Published, model: StepModel) -> None:
    boundaries = boundaries_of(model.profile, row.blocks)
    partition, cut = Partition(boundaries), blocks_text(model.profile, boundaries)
    published = paper_levels(model.profile, partition, RECOMPUTED[row.language])
    print(f"| {name} | paper | {cut} | {counts(published, boundaries)} | "
          f"{seconds_of(model, boundaries, published):.2f}{overflow(model, partition, published)} |")  # fmt: skip
    everything = paper_levels(model.profile, partition, row.blocks)
    print(f"| | its cut, everything recomputed | {cut} | {counts(everything, boundaries)} | "
          f"{seconds_of(model, boundaries, everything):.2f}{overflow(model, partition, everything)} |")  # fmt: skip
    steps = four_steps(model, partition)
    print(f"| | its cut, its four steps on our footprint | {cut} | {counts(steps, boundaries)} | "
          f"{seconds_of(model, boundaries, steps):.2f}{overflow(model, partition, steps)} |")  # fmt: skip
    try:
        exact = model.levels(boundaries)
    except InfeasibleError as error:
        print(f"| | its cut, our levels | {cut} | {error} | – |")
        return
    print(f"| | its cut, our levels | {cut} | {counts(exact, boundaries)} | "
          f"{seconds_of(model, boundaries, exact):.2f}{overflow(model, partition, exact)} |")  # fmt: skip


def table_5() -> None:
    """Free memory of each stage, under the paper's cut of 6B + 20B."""
    row = BASELINE
    model = step_model(row)
    partition = Partition(boundaries_of(model.profile, row.blocks))
    print("| | stage 0 | stage 1 | stage 2 | stage 3 |\n|---|---|---|---|---|")
    for (name, published), recomputed in zip(TABLE_5.items(), (row.blocks, RECOMPUTED[row.language]), strict=True):
        memory = model.footprint.stages(partition, paper_levels(model.profile, partition, recomputed))
        print(f"| {name}, free GB in the paper | {' | '.join(f'{value}' for value in published)} |")
        print(f"| our footprint, free GiB | {' | '.join(f'{(MEMORY - stage.total) / GIB:.1f}' for stage in memory)} |")
    for name in ("parameters", "gradients", "optimizer", "activations", "transient", "logits"):
        sizes = " | ".join(f"{getattr(stage, name) / GIB:.1f}" for stage in memory)
        print(f"| nothing recomputed: {name}, GiB | {sizes} |")


if __name__ == "__main__":
    print("## Table 5\n")
    table_5()
    print("\n## Table 9\n")
    table_9()
