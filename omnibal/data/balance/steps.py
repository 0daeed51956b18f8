"""Steps: a random stream of samples is cut into steps of equal load, and each step's samples are dealt to its packs."""

from typing import Any

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.levelling import open_packs, sort_packs
from omnibal.data.balance.rules import Rules
from omnibal.data.balance.subsets import WITHIN, Goal, add_subsets, nearest
from omnibal.data.balance.tables import (
    COST,
    COST_EXCESS,
    COUNT,
    MASK,
    MEMBER,
    TOKEN_ROOM,
    TOKENS,
    VISION,
    VISION_EXCESS,
    VISION_ROOM,
    Int32Array,
    Int64Array,
    Integer,
    prepend,
)


@compiled
def cut_steps(shares: Int32Array, vision: Int64Array, num_steps: int, rules: Rules, scratch: Int32Array) -> Any:
    """Cut a stream of samples into steps of an equal share of the driving load.

    A step draws the next samples until it has its share; then some of its last and of the next samples change places
    where that comes nearer to the share, and to vision units that divide by the ranks. Every step has a sample for
    every pack; only where the whole stream has too few does the last one lack some.

    Args:
        shares: Driving load of each sample.
        vision: Vision units of each sample.
        num_steps: Number of steps, at least 1.
        rules: What steps should hold.
        scratch: Room.

    Returns:
        The samples in the order of steps, and where each step begins in it.

    Complexity: O(samples).
    """
    number = len(shares)
    order: Int64Array = np.arange(number)
    starts: Any = np.zeros(num_steps + 1, dtype=np.int64)
    table = np.zeros((number, TOKENS + 1), dtype=np.int32)  # what the ends of steps are trimmed by
    total = done = np.int64(0)  # driving load of all samples, and of the steps so far
    for sample in range(number):
        table[sample, VISION] = vision[sample] * rules.multiple_weight
        table[sample, COST] = shares[sample] * rules.share_weight
        total += shares[sample]
    for step in range(num_steps):
        begin, left = starts[step], num_steps - step
        # The last step takes what is left, all others a sample for every pack at least.
        end = number if left == 1 else min(begin + rules.step_packs, number)
        if left > 1 and number - begin > left * rules.step_packs:  # there are more samples than that
            most = number - (left - 1) * rules.step_packs  # the steps behind need one for every pack, too
            due: Any = total * (step + 1) // num_steps - done
            # Rounded up, so that the last step gets what is left.
            due = min(-(-due // rules.share_unit) * rules.share_unit, rules.step_packs * rules.most_share)
            # Draw until the next sample would take the step farther from its share than it is.
            drawn = _sum(shares, order, begin, end)
            while end < most and 2 * (due - drawn) >= shares[order[end]]:
                drawn, end = drawn + shares[order[end]], end + 1
            # How far vision units are from the next multiple of the ranks.
            units = _sum(vision, order, begin, end)
            multiple = (units + rules.num_replicas // 2) // rules.num_replicas * rules.num_replicas
            # Beyond that the next multiple is out of reach, and steps would be sorted in vain.
            units = units - multiple if abs(units - multiple) <= rules.effort.trimmed else 0
            excess = (units * rules.multiple_weight, (drawn - due) * rules.share_weight)
            if rules.effort.trimmed:
                end = _trim(table, order, begin + rules.step_packs, begin, end, most, excess, rules, scratch)
        done += _sum(shares, order, begin, end)
        starts[step + 1] = end
    return order, starts


@compiled_part
def _sum(values: Any, order: Int64Array, begin: Integer, end: Integer) -> Any:
    total = np.int64(0)
    for place in range(begin, end):
        total += values[order[place]]
    return total


@compiled_part
def _trim(
    table: Int32Array,
    order: Int64Array,
    least: int,
    begin: int,
    end: int,
    most: int,
    excess: tuple[Integer, Integer],
    rules: Rules,
    scratch: Int32Array,
) -> int:
    """Let last samples of a step and next ones change places to remove an excess; return the step's new end.

    It is an exchange as between two packs: the step's last samples against the next ones in the stream.

    Args:
        table: What each sample weighs, for vision units and for the driving load.
        order: The stream; the places around ``end`` are changed.
        least: First end that the step may get.
        begin: Where the step begins.
        end: Where it ends.
        most: Last end that it may get.
        excess: What it has too much of both weights, possibly below 0.
        rules: How many samples may change places.
        scratch: Room.
    """
    mine, theirs = min(rules.effort.trimmed, end - begin), min(rules.effort.trimmed, len(order) - end)
    first = end - mine
    for member in range(mine):
        scratch[0, MEMBER, member] = order[first + member]
    for member in range(theirs):
        scratch[1, MEMBER, member] = order[end + member]
    num_mine = add_subsets(table, scratch[0], mine, rules.effort.trimmed)
    num_theirs = add_subsets(table, scratch[1], theirs, rules.effort.trimmed)
    vision, cost = min(max(excess[0], -WITHIN), WITHIN), min(max(excess[1], -WITHIN), WITHIN)
    anything, twice = np.int32(WITHIN), np.uint32(2 * WITHIN)  # steps are not limited; packs are
    goal = Goal(np.int32(vision), np.int32(cost), anything, anything, twice, twice, np.int32(0))
    given, taken = nearest(scratch, num_mine, num_theirs, goal, np.int32(abs(vision) + abs(cost)))
    if given < 0:
        return end
    give, take, behind = scratch[0, MASK, given], scratch[1, MASK, taken], end
    for member in range(rules.effort.trimmed):  # the step grows by what it takes and shrinks by what it gives
        behind += (take >> member & 1) - (give >> member & 1)
    if not least <= behind <= most:
        return end  # the step would have too few samples, or leave too few
    # First what stays in the step and what comes to it, then what leaves it and what stays behind it.
    place, new_end = first, behind
    for side, count, moved in ((0, mine, give), (1, theirs, take)):
        for member in range(count):
            if (moved >> member & 1) == side:
                order[place] = scratch[side, MEMBER, member]
                place += 1
            else:
                order[behind] = scratch[side, MEMBER, member]
                behind += 1
    return new_end


@compiled
def deal_samples(
    samples: Int32Array,
    packs: Int64Array,
    by_size: Int64Array,
    starts: Int64Array,
    rules: Rules,
    order: Int64Array,
    weights: Int64Array,
) -> None:
    """Deal each step's samples to its packs in rounds: the largest of a round to the pack that holds least so far.

    Args:
        samples: Linked in place.
        packs: Without samples, with all room; changed in place. Excesses are measured from the mean of the step.
        by_size: Samples, within each step from large to small.
        starts: Where steps begin in ``by_size``.
        rules: What all steps have in common.
        order: Room for the packs of a step.
        weights: Room for what each of them weighs.
    """
    for step in range(len(starts) - 1):
        begin = step * rules.step_packs
        number, turn = rules.step_packs, 0
        for place in range(number):
            order[place] = begin + place
        for place in range(starts[step], starts[step + 1]):
            if turn == number:  # a new round: the lightest packs come first
                number, turn = open_packs(packs, begin, rules.step_packs, order), 0
                sort_packs(packs, order, weights, number, True, True)
            sample, pack = by_size[place], order[turn]
            turn += 1
            prepend(samples, packs, pack, sample)
            packs[pack, COUNT] += 1
            packs[pack, VISION_EXCESS] += samples[sample, VISION]
            packs[pack, COST_EXCESS] += samples[sample, COST]
            packs[pack, VISION_ROOM] -= samples[sample, VISION]
            packs[pack, TOKEN_ROOM] -= samples[sample, TOKENS]
