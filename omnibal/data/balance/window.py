"""One window: random samples become the packs of some steps."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.levelling import ALL_LOADS, level_window, open_packs, sort_packs
from omnibal.data.balance.rules import MOST_LOAD, Rules, sizes_of
from omnibal.data.balance.tables import (
    COST,
    COST_OVER_MEAN,
    COUNT,
    FIRST,
    MOST,
    NEXT,
    NOWHERE,
    TOKEN_ROOM,
    TOKENS,
    VISION,
    VISION_OVER_MEAN,
    VISION_ROOM,
    WEIGHT,
    Int32Array,
    Int64Array,
    Integer,
    Tables,
    count_mixes,
    prepend,
)
from omnibal.data.packing_spec import PackingSpec
from omnibal.data.packs import Packs

SIZE_BITS: Final = 26
PLACE_BITS: Final = 20  # bits of a sample's vision load plus cost, and of its place in the window
SHARE_WEIGHT: Final = 64
"""What driving load weighs where it is trimmed beside vision load: a full pack of it 4 ``PACK``, vision units 3.

With a quarter of it real lengths are sorted at 40/8192 on 8 ranks (χ² 1.24 in place of 0.98).
"""
END_SAMPLES: Final = 16
"""Samples at a step's end, and behind it, of which one each may change steps to hit the step's share."""
REACH: Final = 6
"""Vision units that trimming can make up for, about: a step that is farther from a multiple would be sorted in vain."""


def plan_window(
    chosen: Int64Array, spec: PackingSpec, rules: Rules, num_steps: int, rng: np.random.Generator
) -> Packs | None:
    """Make the packs of ``num_steps`` steps, each step's in running order; None where some would hold too much."""
    samples, shares = _measure(chosen, spec, rules)
    # From here on a sample is its place in ``chosen``; ``_list_packs`` turns places back into samples.
    order, starts = cut_steps(samples, shares, num_steps, rules)
    tables = _deal(samples, order, starts, rules)
    # Compiled code draws by ``scrambled`` from this one number, and needs no generator.
    if level_window(tables, rules, np.uint64(rng.integers(1 << 62))):
        return None
    order = _running_order(tables.packs, rules, rng)
    packed, ends = np.empty(len(chosen), dtype=np.int64), np.zeros(len(order) + 1, dtype=np.int64)
    _list_packs(tables.samples, tables.packs, chosen, order, packed, ends)
    return Packs(packed, ends)


def _measure(chosen: Int64Array, spec: PackingSpec, rules: Rules) -> tuple[Int32Array, Int32Array]:
    """Rows of ``Tables.samples``, and driving loads."""
    lengths = spec.lengths
    vision, tokens = sizes_of(lengths, spec.limits, chosen, further=True)
    per_unit, per_token, per_squared_token, per_squared_unit = rules.costs
    cost = per_unit * vision + per_token * tokens + per_squared_token * tokens.astype(np.float64) * tokens
    if lengths.vision_squared is not None:
        cost += per_squared_unit * lengths.vision_squared[chosen]
    # Rows side by side: an exchange reads all loads of a few samples. Loads are cut to MOST_LOAD: sums of subsets stay
    # within 32 bits, whatever a cost model says.
    samples = np.empty((len(chosen), VISION + len(rules.encoders)), dtype=np.int32)
    samples[:, NEXT] = NOWHERE
    samples[:, COST] = np.clip(cost, -MOST_LOAD, MOST_LOAD)
    samples[:, TOKENS] = np.minimum(tokens * rules.token_weight, MOST_LOAD)
    further = (units[chosen].astype(np.int64) for units in lengths.further_units().values())
    for encoder, (units, (weight, most, _)) in enumerate(zip((vision, *further), rules.encoders, strict=True)):
        samples[:, VISION + encoder] = np.minimum(np.minimum(units, most) * weight, MOST_LOAD)
    return samples, rules.share_of[tokens if rules.by_tokens else vision]


def driving_loads(chosen: Int64Array, spec: PackingSpec, rules: Rules) -> Int32Array:
    vision, tokens = sizes_of(spec.lengths, spec.limits, chosen, further=True)
    return rules.share_of[tokens if rules.by_tokens else vision]


def cut_steps(samples: Int32Array, shares: Int32Array, num_steps: int, rules: Rules) -> tuple[Int64Array, Int64Array]:
    """Cut a stream into steps of an equal share of the driving load: the samples' order, and where steps begin in it.

    Every step has a sample for every pack; only where the whole stream has too few does the last one lack some.
    """
    order, starts = np.arange(len(shares)), np.zeros(num_steps + 1, dtype=np.int64)
    _cut_steps(samples, shares, int(shares.sum(dtype=np.int64)), order, starts, rules)
    return order, starts


@compiled
def _cut_steps(
    samples: Int32Array, shares: Int32Array, total: int, order: Int64Array, starts: Int64Array, rules: Rules
) -> None:
    number, num_steps = len(shares), len(starts) - 1
    done = np.int64(0)  # driving load of the steps so far
    for step in range(num_steps):
        begin, left = starts[step], num_steps - step
        # The last step takes what is left, all others a sample for every pack at least.
        end = number if left == 1 else min(begin + rules.step_packs, number)
        drawn = np.int64(0)
        for place in range(begin, end):
            drawn += shares[order[place]]
        if left > 1 and number - begin > left * rules.step_packs:  # there are more samples than that
            most = number - (left - 1) * rules.step_packs  # the steps behind need one for every pack, too
            # By what all steps so far should hold: what one of them misses, the next makes up for.
            due: Any = total * (step + 1) // num_steps - done
            # Rounded up, so that the last step gets what is left.
            due = min(-(-due // rules.share_unit) * rules.share_unit, rules.step_packs * rules.most_share)
            # Draw until the next sample would take the step farther from its share than it is.
            while end < most and 2 * (due - drawn) >= shares[order[end]]:
                drawn, end = drawn + shares[order[end]], end + 1
            if rules.whole_vision:
                # Vision load from here to the nearest multiple of the ranks; where vision drives, the share says it.
                whole = rules.num_replicas * rules.encoders[0, WEIGHT]
                vision = np.int64(0)
                for place in range(begin, end):
                    vision += samples[order[place], VISION]
                odd: Any = whole // 2 - (vision + whole // 2) % whole
                odd *= rules.share_unit == 1 and abs(odd) <= REACH * rules.encoders[0, WEIGHT]
                more, end = _trim(samples, shares, order, begin, end, most, due - drawn, odd, rules)
                drawn += more
        done += drawn
        starts[step + 1] = end


@compiled_part
def _trim(
    samples: Int32Array,
    shares: Int32Array,
    order: Int64Array,
    begin: Integer,
    end: Integer,
    most: Integer,
    lacking: Integer,
    odd: Integer,
    rules: Rules,
) -> Any:
    """Give away one of a step's last samples, take one of the next in the stream, or both, to hit the step's share.

    Args:
        lacking: What it has less than its share; below 0 what it has more.
        odd: What the step's vision units lack to a multiple of the ranks, where tokens are the share.

    Returns:
        What the step gains, and where it ends now.
    """
    first, behind = max(end - END_SAMPLES, begin), min(end + END_SAMPLES, np.int64(len(order)))
    best, vision_weight = SHARE_WEIGHT * abs(lacking) + abs(odd), rules.share_unit == 1
    gained, mine, other = np.int64(0), end, behind  # ``end`` and ``behind`` stand for no sample
    # All pairs of one of the last samples, or none, and one of the next, or none: at most 17². Of equally good
    # ones the first is taken, the one that moves the earliest samples.
    for give in range(first, end + 1):
        for take in range(end, behind + 1):
            size = end + (take < behind) - (give < end)
            if begin + rules.step_packs <= size <= most:
                taken, given = order[min(take, behind - 1)], order[min(give, end - 1)]
                gain = (take < behind) * np.int64(shares[taken]) - (give < end) * np.int64(shares[given])
                vision = (take < behind) * samples[taken, VISION] - (give < end) * samples[given, VISION]
                away = SHARE_WEIGHT * abs(lacking - gain) + vision_weight * abs(odd - vision)
                if away < best:
                    best, gained, mine, other = away, gain, give, take
    # Steps are stretches of ``order``: what is given away or taken changes places with what stands at the border.
    if mine < end and other < behind:
        order[mine], order[other] = order[other], order[mine]
    elif mine < end:
        order[mine], order[end - 1] = order[end - 1], order[mine]
        end -= 1
    elif other < behind:
        order[other], order[end] = order[end], order[other]
        end += 1
    return gained, end


def _deal(samples: Int32Array, order: Int64Array, starts: Int64Array, rules: Rules) -> Tables:
    num_steps, number = len(starts) - 1, len(samples)
    # Packs hold sums of any number of samples, in 64 bits. Samples' loads have 32: a processor compares eight at once.
    packs = np.zeros((num_steps * rules.step_packs, VISION_OVER_MEAN + 2 * len(rules.encoders)), dtype=np.int64)
    packs[:, FIRST] = NOWHERE
    packs[:, TOKEN_ROOM] = rules.most_tokens * rules.token_weight
    packs[:, VISION_ROOM::2] = rules.encoders[:, MOST] * rules.encoders[:, WEIGHT]
    tables = Tables.of(samples, packs, *count_mixes(samples, order, starts))
    # Step, size from large to small, place in one number each: no two are equal, so that every machine sorts alike.
    step = np.repeat(np.arange(num_steps), np.diff(starts))
    size = samples[order, COST] + samples[order, VISION:].sum(axis=1, dtype=np.int32)
    keys = (((step << SIZE_BITS) - size) << PLACE_BITS) + np.arange(number)
    _deal_samples(samples, packs, order[np.argsort(keys)], starts, tables.order, tables.weights)
    return tables


@compiled
def _deal_samples(
    samples: Int32Array,
    packs: Int64Array,
    by_size: Int64Array,
    starts: Int64Array,
    order: Int64Array,
    weights: Int64Array,
) -> None:
    """Deal each step's samples in rounds, largest first: the largest of a round to the pack that holds least so far.

    Packs have no samples before; their loads above the mean count from 0 until ``center``.
    """
    step_packs = len(packs) // max(len(starts) - 1, 1)
    for step in range(len(starts) - 1):
        begin = step * step_packs
        number, dealt = step_packs, 0  # packs of this round, and how many of them have got a sample
        for place in range(number):
            order[place] = begin + place
        for place in range(starts[step], starts[step + 1]):
            if dealt == number:  # a new round: the lightest packs come first, and full ones get no company
                number, dealt = open_packs(packs, begin, step_packs, order), 0
                sort_packs(packs, order, weights, number, ALL_LOADS)
            sample, pack = by_size[place], order[dealt]
            dealt += 1
            prepend(samples, packs, pack, sample)
            packs[pack, COUNT] += 1
            packs[pack, COST_OVER_MEAN] += samples[sample, COST]
            packs[pack, TOKEN_ROOM] -= samples[sample, TOKENS]
            for encoder in range(samples.shape[1] - VISION):
                packs[pack, VISION_OVER_MEAN + 2 * encoder] += samples[sample, VISION + encoder]
                packs[pack, VISION_ROOM + 2 * encoder] -= samples[sample, VISION + encoder]


def _running_order(packs: Int64Array, rules: Rules, rng: np.random.Generator) -> Int64Array:
    """Packs in running order: step after step, rank after rank, micro-batch after micro-batch.

    Packs of like vision units, and of like tokens where those are equal, run at the same time. The smallest run first,
    then all others from the largest on: a pipeline fills and drains with small ones, and its stages, which at any time
    are busy with neighbours, wait less where those are alike. Which rank gets which pack is random.
    """
    number, micro_batches = len(packs), rules.step_packs // rules.num_replicas
    by_load = np.arange(number)
    # Little room means many vision units: the largest come first within each step.
    if micro_batches > 1:
        by_load = np.lexsort((packs[:, TOKEN_ROOM], packs[:, VISION_ROOM], by_load // rules.step_packs))
    rows = rng.permuted(by_load.reshape(-1, micro_batches, rules.num_replicas), axis=2)
    # Rows −1, 0, 1, …: the last row, with the smallest packs, goes first. Then each rank's packs stand side by side.
    return rows[:, np.arange(-1, micro_batches - 1)].transpose(0, 2, 1).ravel()


@compiled
def _list_packs(
    samples: Int32Array,
    packs: Int64Array,
    chosen: Int64Array,
    order: Int64Array,
    packed: Int64Array,
    starts: Int64Array,
) -> None:
    end = 0
    for place in range(len(order)):
        sample = packs[order[place], FIRST]
        while sample != NOWHERE:
            packed[end] = chosen[sample]
            end += 1
            sample = samples[sample, NEXT]
        starts[place + 1] = end
