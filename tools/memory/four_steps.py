"""The OmniBal paper's adaptive recompute, with our footprint in the place of its trials on the machine.

1. With every block recomputed, measure the free memory of each stage, ``M_r``: what forward and backward passes leave,
   since an optimizer's step that takes more hides what blocks keep.
2. Let two blocks of each kind and stage keep their activations, or one where two do not fit; measure again, ``M'_r``.
3. By least squares over the stages: what one block of the ViT and one of the LLM keep, ``M_v`` and ``M_t``.
4. The most blocks of each stage that may keep. Try it; where it fails, let just enough recompute again, and repeat.

Source: Yao et al., OmniBal, ICML 2025, section 4.3. Deviation: the paper does not say how stages differ; here ``M_v``
and ``M_t`` are bytes of one micro-batch, and a stage keeps them for every micro-batch in flight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from omnibal.cost import FloatArray, IntArray
from omnibal.errors import InfeasibleError
from omnibal.families.base import Module
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.partition import Partition
from omnibal.planner.step_model import StepModel
from omnibal.profile.records import LayerCost, Level


class Blocks(NamedTuple):
    """Numbers of a stage's blocks."""

    vision: int
    """Of the ViT."""
    llm: int
    """Of the language model."""


class Passes(Footprint):
    """The memory of forward and backward passes, without the optimizer's step."""

    def update_bytes(self, stage: int) -> IntArray:
        """So little that a pass always takes more."""
        return super().update_bytes(stage) - 2**60


def four_steps(model: StepModel, partition: Partition) -> tuple[Level, ...]:
    """The levels that the four steps find.

    Raises:
        InfeasibleError: A stage does not fit with every block recomputed.
    """
    footprint, modules = model.footprint, block_modules(model.profile.layers)
    passes = Passes(*(getattr(footprint, field.name) for field in fields(footprint) if field.init))
    blocks, budgets = count_blocks(modules, partition), np.array(model.budgets)
    held = np.array(footprint.schedule.in_flight)

    def used(kept: Sequence[Blocks], measured: Footprint) -> FloatArray:
        stages = measured.stages(partition, levels_of(kept, modules, partition))
        return np.array([stage.total for stage in stages], dtype=np.float64)

    kept = [Blocks(0, 0)] * len(blocks)
    if (used(kept, footprint) > budgets).any():
        raise InfeasibleError(f"every stage must fit with all blocks recomputed, got {used(kept, footprint)} bytes")
    free = budgets - used(kept, passes)
    some = [Blocks(min(stage.vision, 2), min(stage.llm, 2)) for stage in blocks]
    block_bytes = nnls(held[:, None] * np.array(some), free - (budgets - used(some, passes)))[0]
    kept = [_most_within(room, stage, block_bytes) for room, stage in zip(free / held, blocks, strict=True)]
    while ((missing := used(kept, footprint) - budgets) > 0).any():
        fewer = [
            _fewer(stage, short, block_bytes) if short > 0 else stage
            for stage, short in zip(kept, missing / held, strict=True)
        ]
        if fewer == kept:
            raise InfeasibleError(f"every stage must fit with all blocks recomputed, got {missing} bytes too many")
        kept = fewer
    return levels_of(kept, modules, partition)


def block_modules(layers: Iterable[LayerCost]) -> tuple[Module | None, ...]:
    """The module of every layer that is a block, None for others. Blocks are the layers that a model numbers."""
    return tuple(layer.module if layer.name != layer.kind else None for layer in layers)


def count_blocks(modules: Sequence[Module | None], partition: Partition) -> tuple[Blocks, ...]:
    """The blocks of every stage."""
    stages = [list(modules[a:b]) for a, b in pairwise(partition.boundaries)]
    return tuple(Blocks(stage.count("vision"), stage.count("language")) for stage in stages)


def levels_of(kept: Sequence[Blocks], modules: Sequence[Module | None], partition: Partition) -> tuple[Level, ...]:
    """A level for each layer: in every stage the first blocks of a module recompute, the last ones keep."""
    levels: list[Level] = ["none"] * len(modules)
    for blocks, (a, b) in zip(kept, pairwise(partition.boundaries), strict=True):
        for module, count in (("vision", blocks.vision), ("language", blocks.llm)):
            places = [layer for layer in range(a, b) if modules[layer] == module]
            for layer in places[: len(places) - count]:
                levels[layer] = "full"
    return tuple(levels)


def _most_within(room: float, blocks: Blocks, block_bytes: FloatArray) -> Blocks:
    """The most of a stage's blocks whose bytes keep to the room."""
    return _most((choice for choice in _parts(blocks) if block_bytes @ choice <= room), block_bytes)


def _fewer(blocks: Blocks, missing: float, block_bytes: FloatArray) -> Blocks:
    """The most of a stage's blocks, but not all, that free what is missing; all but one where none would."""
    room, fewer = block_bytes @ blocks - missing, [choice for choice in _parts(blocks) if choice != blocks]
    return _most([choice for choice in fewer if block_bytes @ choice <= room] or fewer, block_bytes)


def _parts(blocks: Blocks) -> list[Blocks]:
    return [Blocks(v, t) for v in range(blocks.vision + 1) for t in range(blocks.llm + 1)]


def _most(choices: Iterable[Blocks], block_bytes: FloatArray) -> Blocks:
    """The most blocks; of equally many those with the fewest bytes, then those of the ViT."""
    return max(choices, key=lambda c: (c.vision + c.llm, -(block_bytes @ c), c.vision), default=Blocks(0, 0))
