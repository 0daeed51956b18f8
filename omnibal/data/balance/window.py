"""One window: random samples become the packs of some steps."""

from typing import Any, NamedTuple

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.levelling import level_window
from omnibal.data.balance.mixes import count_mixes
from omnibal.data.balance.rules import MOST_LOAD, Rules
from omnibal.data.balance.steps import cut_steps, deal_samples
from omnibal.data.balance.tables import (
    COST,
    FIRST,
    MOST_SUBSETS,
    NEXT,
    NOWHERE,
    TOKEN_ROOM,
    TOKEN_SUM,
    TOKENS,
    VISION,
    VISION_ROOM,
    Int32Array,
    Int64Array,
    Window,
)
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.packs import Packs


class Columns(NamedTuple):
    """The lengths' arrays that decide packs, for compiled code."""

    vision_units: IntArray
    llm_tokens: IntArray
    vision_squared: IntArray
    """Empty where it is unknown."""


def columns_of(lengths: SampleLengths) -> Columns:
    """Take the arrays out of lengths."""
    squared = lengths.vision_squared
    if squared is None:
        squared = np.zeros(0, dtype=np.int64)
        squared.flags.writeable = False  # as the others are: compiled code then exists once
    return Columns(lengths.vision_units, lengths.llm_tokens, squared)


def plan_window(
    chosen: Int64Array,
    columns: Columns,
    share_of: Int32Array,
    rules: Rules,
    num_steps: int,
    chance: np.random.Generator,
) -> Packs | None:
    """Make the packs of ``num_steps`` steps.

    Args:
        chosen: Samples in random order.
        columns: The dataset's lengths.
        share_of: Driving load of each size.
        rules: How to plan.
        num_steps: Number of steps.
        chance: What chance decides by.

    Returns:
        The packs, step after step, those of a step in running order; or None where some would hold too much.
    """
    samples, vision, shares = measure(chosen, columns, rules, share_of)
    scratch = np.zeros((2, TOKEN_SUM + 1, MOST_SUBSETS), dtype=np.int32)
    order, starts = cut_steps(shares, vision, num_steps, rules, scratch)
    window = _make_window(samples, order, starts, rules, scratch)
    seed = np.uint64(chance.integers(1 << 62))
    if level_window(window, rules, seed):
        return None
    order = _running_order(window.packs, rules, chance)
    return Packs(*_list_packs(window.samples, window.packs, chosen, order))


@compiled
def measure(chosen: Int64Array, columns: Columns, rules: Rules, share_of: Int32Array) -> Any:
    """Measure samples; one that exceeds a limit as if it were at both, so that nothing fits beside it.

    Returns:
        A row per sample (see ``omnibal.data.balance.tables``), vision units, and driving loads.
    """
    # Rows side by side: an exchange reads all loads of a few samples.
    samples = np.empty((len(chosen), TOKENS + 1), dtype=np.int32)
    units, shares = np.empty(len(chosen), dtype=np.int64), np.empty(len(chosen), dtype=np.int32)
    per_unit, per_token, per_squared_token, per_squared_unit = rules.costs
    # One pass: the lengths of a sample lie anywhere in memory, and are read once.
    for place in range(len(chosen)):
        vision, tokens = sizes_of(chosen[place], columns, rules)
        cost = per_unit * vision + per_token * tokens + per_squared_token * np.float64(tokens) * np.float64(tokens)
        if len(columns.vision_squared):
            cost += per_squared_unit * columns.vision_squared[chosen[place]]
        samples[place, NEXT] = NOWHERE
        samples[place, VISION] = min(vision * rules.vision_weight, MOST_LOAD)
        samples[place, COST] = np.int64(min(max(cost, -np.float64(MOST_LOAD)), np.float64(MOST_LOAD)))
        samples[place, TOKENS] = min(tokens * rules.token_weight, MOST_LOAD)
        units[place], shares[place] = vision, share_of[tokens if rules.by_tokens else vision]
    return samples, units, shares


@compiled_part
def sizes_of(sample: int, columns: Columns, rules: Rules) -> Any:
    """Vision units and tokens of a sample, at least one token; those of the limits where it exceeds one."""
    vision, tokens = np.int64(columns.vision_units[sample]), np.int64(columns.llm_tokens[sample])
    if vision > rules.most_vision or tokens > rules.most_tokens:
        return np.int64(rules.most_vision), np.int64(rules.most_tokens)
    return vision, max(tokens, np.int64(1))


@compiled
def driving_loads(chosen: Int64Array, columns: Columns, rules: Rules, share_of: Int32Array) -> Any:
    """The driving load of each sample."""
    shares = np.empty(len(chosen), dtype=np.int32)
    for place in range(len(chosen)):
        vision, tokens = sizes_of(chosen[place], columns, rules)
        shares[place] = share_of[tokens if rules.by_tokens else vision]
    return shares


def _make_window(
    samples: Int32Array, order: Int64Array, starts: Int64Array, rules: Rules, scratch: Int32Array
) -> Window:
    """Deal the samples of every step to its packs, and count its mix of sizes."""
    num_steps = len(starts) - 1
    packs = np.zeros((num_steps * rules.step_packs, TOKEN_ROOM + 1), dtype=np.int64)
    packs[:, FIRST] = NOWHERE
    packs[:, VISION_ROOM] = rules.most_vision * rules.vision_weight
    packs[:, TOKEN_ROOM] = rules.most_tokens * rules.token_weight
    mixes = count_mixes(samples, order, starts)
    room, weights = np.empty(len(packs), dtype=np.int64), np.empty(len(packs), dtype=np.int64)
    step, sizes = np.repeat(np.arange(num_steps), np.diff(starts)), samples[order, VISION] + samples[order, COST]
    # Step, size, place in one number each: no two are equal, so that every machine sorts them alike.
    keys = ((step << 26) - sizes << 20) + np.arange(len(order))
    deal_samples(samples, packs, order[np.argsort(keys)], starts, rules, room, weights)
    return Window(samples, packs, mixes, np.zeros(num_steps, dtype=np.int64), room, weights, scratch)


def _running_order(packs: Int64Array, rules: Rules, chance: np.random.Generator) -> Int64Array:
    """Packs in running order: step after step, rank after rank, micro-batch after micro-batch.

    Packs of like vision units, and of like tokens where those are equal, run at the same time. The smallest run first,
    then all others from the largest on: a pipeline fills and drains with small ones, and its stages, which at any time
    are busy with neighbours, wait less where those are alike. Which rank gets which pack is random.
    """
    number, micro_batches = len(packs), rules.step_packs // rules.num_replicas
    by_load = np.arange(number)
    if micro_batches > 1:
        by_load = np.lexsort((packs[:, TOKEN_ROOM], packs[:, VISION_ROOM], by_load // rules.step_packs))
    rows = chance.permuted(by_load.reshape(-1, micro_batches, rules.num_replicas), axis=2)
    return rows[:, np.arange(-1, micro_batches - 1)].transpose(0, 2, 1).ravel()


@compiled
def _list_packs(samples: Int32Array, packs: Int64Array, chosen: Int64Array, order: Int64Array) -> Any:
    """Write the chains of samples one after another, as ``Packs`` has them: samples, and where each pack begins."""
    packed, starts = np.empty(len(chosen), dtype=np.int64), np.zeros(len(order) + 1, dtype=np.int64)
    end = 0
    for place in range(len(order)):
        sample = packs[order[place], FIRST]
        while sample != NOWHERE:
            packed[end] = chosen[sample]
            end += 1
            sample = samples[sample, NEXT]
        starts[place + 1] = end
    return packed, starts
