"""Where each sample of a micro-batch is encoded, and where the LLM gets it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.data.limits import PackLimits
from omnibal.data.policies import DEFAULT_COST
from omnibal.dispatch.divide import divide
from omnibal.dispatch.nodes import keep_in_nodes
from omnibal.dispatch.rearrangement import Rearrangement
from omnibal.errors import DataError

COLUMNS: Final = ("vision_units", "images", "image_tokens", "llm_tokens", "target_tokens")
"""What a rank says of its samples: rows of pixels, entries of grids, features, tokens, targets."""
PER_VISION_UNIT: Final = CostModel(vision_units=1)


@dataclass(frozen=True)
class Costs:
    """What a sample costs in each phase, in seconds or in any unit. Source: OrchMLLM, equation 2."""

    vision: CostModel = PER_VISION_UNIT
    llm: CostModel = DEFAULT_COST
    limits: PackLimits | None = None
    """The most vision units that a rank encodes and the most tokens that its LLM gets, where memory is short."""
    ranks_per_node: int | None = None
    """Where given, lists of samples stay in nodes as far as they can."""
    least_gain: float = 0.01
    """A phase that would gain less than this share of its largest rank's cost leaves its samples where they are."""


@dataclass(frozen=True)
class StepPlan:
    """A micro-batch of all ranks, and where its samples go. Every rank makes the same one from the same numbers."""

    sizes: Mapping[str, IntArray]
    """Each of ``COLUMNS``, (samples,), over all ranks."""
    to_vision: Rearrangement
    to_llm: Rearrangement
    costs: Costs
    total_targets: int
    """Of the whole step: of all its micro-batches."""

    @cached_property
    def features(self) -> Rearrangement:
        """From where samples are encoded to where the LLM gets them, at once."""
        return self.to_llm.after(self.to_vision.inverse())

    def imbalance(self) -> dict[str, tuple[float, float]]:
        """The largest rank's cost over the mean, as drawn and as planned, of both phases; 1 where nothing is to do."""
        costs = {"vision": self.costs.vision, "llm": self.costs.llm}
        moves = {"vision": self.to_vision, "llm": self.to_llm}
        return {
            phase: tuple(
                _excess(cost(_loads(self.sizes)), ranks, self.to_llm.num_ranks)
                for ranks in (moves[phase].source, moves[phase].destination)
            )  # type: ignore[misc]
            for phase, cost in costs.items()
        }

    def describe(self) -> str:
        """One line, to be printed."""
        parts = []
        moves = (("vision encoder", self.to_vision), ("LLM", self.to_llm))
        for (name, move), (before, after) in zip(moves, self.imbalance().values(), strict=True):
            moved = np.count_nonzero(move.source != move.destination)
            then = (
                f"{before:.2f} -> {after:.2f}, {moved} of {len(move)} samples move" if moved else f"{before:.2f}, left"
            )
            parts.append(f"{name} {then}")
        return f"largest rank over mean: {'; '.join(parts)}"


def plan_step(
    source: IntArray, sizes: Mapping[str, IntArray], num_ranks: int, costs: Costs, *, total_targets: int
) -> StepPlan:
    """Divide a micro-batch's samples anew for the vision encoder and for the LLM.

    Args:
        source: The rank that drew each sample, (samples,), ascending.
        sizes: Each of ``COLUMNS``, (samples,).
        num_ranks: Of the group.
        costs: Of the phases.
        total_targets: Of the step.

    Raises:
        DataError: A sample has no tokens.
        InfeasibleError: The samples do not fit within the limits.
    """
    if (sizes["llm_tokens"] < 1).any():
        raise DataError(f"samples must have tokens, got none in sample {int(sizes['llm_tokens'].argmin())}")
    loads = _loads(sizes)
    moves = {}
    most = (None, None) if costs.limits is None else (costs.limits.vision_units, costs.limits.llm_tokens)
    phases = (("vision", costs.vision, "vision_units", most[0]), ("llm", costs.llm, "llm_tokens", most[1]))
    for phase, cost, volume, limit in phases:
        moves[phase] = _move(source, cost(loads), sizes[volume], num_ranks, costs, limit)
    return StepPlan(sizes, moves["vision"], moves["llm"], costs, total_targets)


def _move(
    source: IntArray, costs: FloatArray, volumes: IntArray, num_ranks: int, given: Costs, limit: int | None
) -> Rearrangement:
    """One phase's. A sample that brings nothing to it stays where it was drawn."""
    if limit is None:
        destination = divide(costs, num_ranks, method="longest_first")
    else:
        destination = divide(costs, num_ranks, sizes=volumes, limits=[limit])
    before, after = (np.bincount(ranks, costs, num_ranks).max(initial=0) for ranks in (source, destination))
    fits = limit is None or np.bincount(source, volumes, num_ranks).max(initial=0) <= limit
    if fits and before - after < given.least_gain * before:
        return Rearrangement(source, source, num_ranks)
    move = Rearrangement(source, destination, num_ranks)
    if given.ranks_per_node is not None:
        rank_of = keep_in_nodes(move.volumes(volumes), given.ranks_per_node).rank_of
        destination = rank_of[destination]
    return Rearrangement(source, np.where(volumes == 0, source, destination), num_ranks)


def _loads(sizes: Mapping[str, IntArray]) -> Load:
    tokens = sizes["llm_tokens"].astype(np.float64)
    return Load(sizes["vision_units"], tokens, tokens**2)


def _excess(costs: FloatArray, ranks: IntArray, num_ranks: int) -> float:
    of_ranks = np.bincount(ranks, costs, num_ranks)
    return float(of_ranks.max() / of_ranks.mean()) if of_ranks.any() else 1.0
