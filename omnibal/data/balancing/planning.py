"""Planning of a window: a random stream of samples becomes the packs of a number of steps."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.dense import fill_packs_densely
from omnibal.data.balancing.division import StepRule, divide
from omnibal.data.balancing.filling import fill_packs, sort_within_steps
from omnibal.data.balancing.instructions import Instructions
from omnibal.data.balancing.levelling import level_steps
from omnibal.data.balancing.relief import relieve
from omnibal.data.balancing.scales import PACK, Columns, Scales, capped_sizes, measure
from omnibal.data.balancing.scattering import scatter
from omnibal.data.balancing.shuffle import scrambled
from omnibal.data.balancing.tables import (
    DIMENSIONS,
    EXCESS,
    FIRST,
    LOADS,
    NEXT,
    NOWHERE,
    ROOM,
    SIZES,
    Int32Array,
    Int64Array,
    make_scratch,
)
from omnibal.data.packs import Packs

FEW: Final = 100
"""One pack in so many is few."""


def plan_steps(
    samples: Int64Array, columns: Columns, instructions: Instructions, num_steps: int, seed: int
) -> Packs | None:
    """Make the packs of ``num_steps`` steps.

    Args:
        samples: In the order in which they are drawn, as many as there are packs where possible.
        columns: The dataset's lengths.
        instructions: How to plan.
        num_steps: Number of steps.
        seed: What chance decides by.

    Returns:
        The packs, step after step, those of a step in running order; or None where some would hold too much.
    """
    rule, scales, scratch, chance = instructions.rule, instructions.scales, make_scratch(), np.uint64(seed)
    table = measure(samples, columns, scales)
    packs = _first_packs(table, instructions, num_steps, chance, scratch)
    weights = _limit_weights(scales)
    tries = instructions.relief_tries * len(packs)
    if instructions.rugged:
        relieve(table, packs, weights, tries, chance, scratch)
        table[:, LOADS:] = measure(samples, columns, scales)[:, LOADS:]
        _weigh(table, packs)
    if instructions.exchange_steps:
        level_steps(table, packs, rule.step_packs, instructions.exchange_steps, instructions.tolerance, chance, scratch)
    overfull = relieve(table, packs, weights, tries, chance, scratch)
    for scattering in range(instructions.scatterings):
        if not 0 < overfull <= len(packs) // FEW:
            break
        draws = chance + np.uint64((scattering + 1) * len(table))
        scatter(table, packs, weights, draws)
        overfull = relieve(table, packs, weights, tries, draws, scratch)
    return None if overfull else Packs(*_list_packs(table, packs, samples, rule, chance))


@compiled
def driving_shares(samples: Int64Array, columns: Columns, instructions: Instructions) -> Any:
    """The driving load of each sample, by which the random order is cut."""
    weights, scales = instructions.driver_weights, instructions.scales
    shares = np.empty(len(samples), dtype=np.int32)
    for place in range(len(samples)):
        vision, tokens = capped_sizes(columns, samples[place], scales)
        shares[place] = weights[tokens if instructions.driver_by_tokens else vision]
    return shares


def _first_packs(
    samples: Int32Array,
    instructions: Instructions,
    num_steps: int,
    seed: Any,
    scratch: Int32Array,
) -> Int64Array:
    """Cut the samples into steps, and fill the packs of each."""
    rule, scales = instructions.rule, instructions.scales
    vision, tokens = samples[:, SIZES].copy(), samples[:, SIZES + 1].copy()
    driver, other = (tokens, vision) if instructions.driver_by_tokens else (vision, tokens)
    shares = instructions.driver_weights[driver]
    order = np.arange(len(samples))
    step_starts = divide(shares, vision, other, num_steps, rule, order, scratch)
    packs = np.zeros((num_steps * rule.step_packs, EXCESS + DIMENSIONS), dtype=np.int64)
    packs[:, FIRST] = NOWHERE
    packs[:, ROOM], packs[:, ROOM + 1] = scales.most_vision, scales.most_tokens
    if instructions.together:
        weights = _limit_weights(scales)
        fill_packs_densely(samples, packs, step_starts, order, rule.step_packs, instructions.together, weights, seed)
    else:
        order = sort_within_steps(samples, step_starts, order)
        fill_packs(samples, packs, step_starts, order, rule.step_packs)
    return packs


def _limit_weights(scales: Scales) -> tuple[int, int]:
    """What a vision unit and a token beyond the limits weigh."""
    return max(PACK // max(scales.most_vision, 1), 1), max(PACK // scales.most_tokens, 1)


@compiled
def _weigh(samples: Int32Array, packs: Int64Array) -> None:
    """Measure what packs hold."""
    packs[:, EXCESS:] = 0
    for pack in range(len(packs)):
        sample = packs[pack, FIRST]
        while sample != NOWHERE:
            for dimension in range(DIMENSIONS):
                packs[pack, EXCESS + dimension] += samples[sample, LOADS + dimension]
            sample = samples[sample, NEXT]


@compiled
def _list_packs(samples: Int32Array, packs: Int64Array, chosen: Int64Array, rule: StepRule, seed: Any) -> Any:
    """List the packs' samples step after step, rank after rank, micro-batch after micro-batch.

    Packs of like vision units, and of like tokens where those are equal, run at the same time. The smallest run first,
    then all others from the largest on: a pipeline fills and drains with small ones, and its stages, which at any time
    are busy with neighbours, wait less where those are alike. Which rank gets which pack is random.
    """
    packed = np.empty(len(chosen), dtype=np.int64)
    starts = np.zeros(len(packs) + 1, dtype=np.int64)
    step_packs, num_replicas = rule.step_packs, rule.num_replicas
    micro_batches = step_packs // num_replicas
    order = np.empty(step_packs, dtype=np.int64)
    turns = (np.arange(micro_batches) - 1) % micro_batches
    end = number = 0
    for begin in range(0, len(packs), step_packs):
        for place in range(step_packs):
            order[place] = begin + place
        draws = seed + np.uint64(2 * begin)
        if micro_batches > 1:
            _sort_by_load(packs, order)
        for micro_batch in range(micro_batches):
            first = micro_batch * num_replicas
            _shuffle(order[first : first + num_replicas], draws + np.uint64(first))
        for rank in range(num_replicas):
            for turn in turns:
                sample = packs[order[turn * num_replicas + rank], FIRST]
                while sample != NOWHERE:
                    packed[end] = chosen[sample]
                    end += 1
                    sample = samples[sample, NEXT]
                number += 1
                starts[number] = end
    return packed, starts


@compiled
def _sort_by_load(packs: Int64Array, order: Int64Array) -> None:
    """Sort packs by their vision units, then by their tokens, the largest first."""
    keys = np.empty(len(order), dtype=np.int64)
    for place in range(len(order)):
        keys[place] = (packs[order[place], ROOM] << 32) + packs[order[place], ROOM + 1]
    order[:] = order[np.argsort(keys, kind="mergesort")]


@compiled
def _shuffle(items: Int64Array, seed: Any) -> None:
    for place in range(len(items) - 1, 0, -1):
        drawn = np.int64(scrambled(seed + np.uint64(place)) % np.uint64(place + 1))
        items[place], items[drawn] = items[drawn], items[place]
