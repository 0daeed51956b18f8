"""The paper's adaptive recompute as functions of measured numbers; trials do the measuring in between.

1. With every block recomputed, measure the free memory of each stage, ``M_r``: what forward and backward passes leave,
   since an optimizer's step that takes more hides what blocks keep.
2. Let some blocks of each stage keep their activations; measure again, ``M'_r``.
3. :func:`estimate_block_bytes`: what one block of the ViT and one of the LLM keep, ``M_v`` and ``M_t``.
4. :func:`keep_most`: the most blocks of each stage that may keep. Try it; where it fails, :func:`retreat` and repeat.

Source: Yao et al., OmniBal, ICML 2025, section 4.3. Deviation: the paper does not say how stages differ; here ``M_v``
and ``M_t`` are bytes of one micro-batch, and a stage keeps them for every micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, Module
from omnibal.pipeline.partition import Partition
from omnibal.profile.levels import Level
from omnibal.profile.records import LayerCost


@dataclass(frozen=True)
class Blocks:
    """Numbers of a stage's blocks."""

    vision: int
    """Of the ViT."""
    llm: int
    """Of the language model."""


@dataclass(frozen=True)
class BlockBytes:
    """What a block keeps of one micro-batch more than when it recomputes."""

    vision: float
    """``M_v``."""
    llm: float
    """``M_t``."""

    def of(self, blocks: Blocks) -> float:
        """What so many blocks keep."""
        return blocks.vision * self.vision + blocks.llm * self.llm


def block_modules(layers: Iterable[LayerRecord | LayerCost]) -> tuple[Module | None, ...]:
    """The module of every layer that is a block, None for others. Blocks are the layers that a model numbers."""
    return tuple(layer.module if layer.name != layer.kind else None for layer in layers)


def count_blocks(modules: Sequence[Module | None], partition: Partition) -> tuple[Blocks, ...]:
    """The blocks of every stage.

    Args:
        modules: Of the model's blocks, from :func:`block_modules`.
        partition: Of the same layers.

    Example:
        >>> count_blocks(["vision", "vision", "language", None], Partition((0, 1, 4)))
        (Blocks(vision=1, llm=0), Blocks(vision=1, llm=1))
    """
    stages = [list(modules[a:b]) for a, b in pairwise(partition.boundaries)]
    return tuple(Blocks(stage.count("vision"), stage.count("language")) for stage in stages)


def estimate_block_bytes(
    free_recomputed: Sequence[float], free_trial: Sequence[float], kept: Sequence[Blocks], in_flight: Sequence[int]
) -> BlockBytes:
    """Step 3: what one block of each kind keeps, by least squares over the stages.

    Args:
        free_recomputed: ``M_r``, free bytes of each stage with every block recomputed.
        free_trial: ``M'_r``, with some blocks keeping their activations.
        kept: These blocks.
        in_flight: Micro-batches that each stage holds.

    Returns:
        Bytes, not negative; 0 for a kind of which no stage has kept a block.

    Raises:
        ConfigError: The numbers of stages differ.

    Example:
        >>> estimate_block_bytes([50, 60], [30, 56], [Blocks(2, 0), Blocks(0, 1)], in_flight=[2, 1])
        BlockBytes(vision=5.0, llm=4.0)
    """
    if len({len(free_recomputed), len(free_trial), len(kept), len(in_flight)}) != 1:
        raise ConfigError(
            "measurements must be of equally many stages, got "
            f"{len(free_recomputed)}, {len(free_trial)}, {len(kept)} and {len(in_flight)}"
        )
    counts = np.array([[held * blocks.vision, held * blocks.llm] for held, blocks in zip(in_flight, kept, strict=True)])
    (vision, llm), _ = nnls(counts, np.subtract(free_recomputed, free_trial))
    return BlockBytes(float(vision), float(llm))


def keep_most(
    free_recomputed: Sequence[float],
    blocks: Sequence[Blocks],
    block_bytes: BlockBytes,
    in_flight: Sequence[int],
) -> tuple[Blocks, ...]:
    """Step 4: the largest number of each stage's blocks that may keep their activations.

    Args:
        free_recomputed: ``M_r`` of each stage.
        blocks: What each stage holds.
        block_bytes: ``M_v`` and ``M_t``.
        in_flight: Micro-batches that each stage holds.

    Returns:
        Blocks that keep, of equally many those with the fewest bytes; all others recompute.
    """
    return tuple(
        _most_within(free / held, there, block_bytes)
        for free, there, held in zip(free_recomputed, blocks, in_flight, strict=True)
    )


def retreat(
    kept: Sequence[Blocks], missing_bytes: Sequence[float], block_bytes: BlockBytes, in_flight: Sequence[int]
) -> tuple[Blocks, ...]:
    """After a failed trial: let just enough blocks recompute again.

    Args:
        kept: Blocks that kept their activations in the trial.
        missing_bytes: By how much each stage exceeded its memory; at most 0 where it did not.
        block_bytes: ``M_v`` and ``M_t``.
        in_flight: Micro-batches that each stage holds.

    Returns:
        For each stage the most of its kept blocks that free what was missing, at least one fewer where something was.
        One fewer also where all of them would not free it: then the bytes do not explain what the trial showed.
    """
    return tuple(
        _fewer(blocks, block_bytes.of(blocks) - missing / held, block_bytes) if missing > 0 else blocks
        for blocks, missing, held in zip(kept, missing_bytes, in_flight, strict=True)
    )


def levels_of(kept: Sequence[Blocks], modules: Sequence[Module | None], partition: Partition) -> tuple[Level, ...]:
    """A level for each layer: in every stage the first blocks of a module recompute, the last ones keep.

    Layers that are no blocks keep their activations.

    Example:
        >>> levels_of([Blocks(1, 0)], ["vision", "vision", "language", None], Partition((0, 4)))
        ('full', 'none', 'full', 'none')
    """
    levels: list[Level] = ["none"] * len(modules)
    for blocks, (a, b) in zip(kept, pairwise(partition.boundaries), strict=True):
        for module, count in (("vision", blocks.vision), ("language", blocks.llm)):
            places = [layer for layer in range(a, b) if modules[layer] == module]
            for layer in places[: len(places) - count]:
                levels[layer] = "full"
    return tuple(levels)


def _most_within(room: float, blocks: Blocks, block_bytes: BlockBytes) -> Blocks:
    """The most of a stage's blocks whose bytes keep to the room."""
    return _most((choice for choice in _parts(blocks) if block_bytes.of(choice) <= room), block_bytes)


def _fewer(blocks: Blocks, room: float, block_bytes: BlockBytes) -> Blocks:
    """The most of a stage's blocks, but not all, whose bytes keep to the room; or the most but one."""
    fewer = [choice for choice in _parts(blocks) if choice != blocks]
    return _most([choice for choice in fewer if block_bytes.of(choice) <= room] or fewer, block_bytes)


def _parts(blocks: Blocks) -> Iterator[Blocks]:
    return (Blocks(v, t) for v in range(blocks.vision + 1) for t in range(blocks.llm + 1))


def _most(choices: Iterable[Blocks], block_bytes: BlockBytes) -> Blocks:
    """The most blocks; of equally many those with the fewest bytes, then those of the ViT."""
    return max(choices, key=lambda c: (c.vision + c.llm, -block_bytes.of(c), c.vision), default=Blocks(0, 0))
