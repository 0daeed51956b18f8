"""Division of a random stream of samples into steps that have room for them."""

from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.subsets import add_subsets, nearest
from omnibal.data.balancing.tables import DIMENSIONS, LOADS, MASKS, MEMBERS, Int32Array, Int64Array, Integer

TRIMMED: Final = 6
"""Samples at a step's end, and behind it, that may change places: 64 subsets each."""
UNLIMITED: Final = (1 << 28, 1 << 28)
"""What may change places: steps are not limited, packs are."""
LOOKS: Final = 16
"""Next samples among which a step chooses to keep its other load in proportion."""
LOOKAHEAD: Final = 32
"""Next samples from which a step that lacks much is topped up."""


class StepRule(NamedTuple):
    """What every step of a window should hold."""

    step_packs: int
    """Packs per step."""
    num_replicas: int
    """Packs that run at the same time."""
    most_share: int
    """Driving load that a pack may hold."""
    share_unit: int
    """What the driving load of a step should be divisible by."""
    share_weight: int
    """Weight of the driving load in hitting its share."""
    vision_weight: int
    """Weight of a vision unit in hitting vision units that are divisible by the packs that run at the same time.

    0 where they need not be, or where they are the driving load.
    """
    other_weight: int
    """Weight of the load that does not drive in keeping it in proportion; 0 where it need not be."""


@compiled
def divide(
    driver: Int32Array,
    vision: Int32Array,
    other: Int32Array,
    num_steps: int,
    rule: StepRule,
    order: Int64Array,
    scratch: Int32Array,
) -> Any:
    """Cut a stream into steps of an equal share of the driving load, and trim each step's end to hit its targets.

    A step draws the next samples of the stream until it has its share; then some of its last and of the next samples
    (up to 6 each) change places where that comes nearer to the share and to divisible vision units. Every step has a
    sample for every pack; only where the whole stream has too few does the last one lack some.

    Args:
        driver: The load of each sample that decides how many samples a step has room for.
        vision: Vision units of each sample.
        other: The other load of each sample, which steps hold in proportion where ``rule.other_weight`` is not 0.
        num_steps: Number of steps, at least 1.
        rule: What every step should hold.
        order: Samples as they were drawn; reordered in place.
        scratch: From ``make_scratch``.

    Returns:
        ``num_steps + 1`` positions in ``order``.

    Complexity: O(samples).
    """
    num_samples, step_packs = len(order), rule.step_packs
    table = np.zeros((num_samples, LOADS + DIMENSIONS), dtype=np.int32)
    total_driver = total_other = done_driver = done_other = np.int64(0)
    for sample in range(num_samples):
        table[sample, LOADS] = vision[sample] * rule.vision_weight
        table[sample, LOADS + 1] = driver[sample] * rule.share_weight
        table[sample, LOADS + 2] = other[sample] * rule.other_weight
        total_driver += driver[sample]
        total_other += other[sample]
    looks = LOOKS if rule.other_weight else 1
    starts = np.zeros(num_steps + 1, dtype=np.int64)
    for step in range(num_steps):
        begin, steps_left = starts[step], num_steps - step
        end = num_samples
        if steps_left > 1:
            end = min(begin + step_packs, num_samples)
        if steps_left > 1 and num_samples - begin > steps_left * step_packs:
            most = num_samples - (steps_left - 1) * step_packs
            share = _share(total_driver * (step + 1) // num_steps - done_driver, rule)
            proportion = np.float64(total_other - done_other) / np.float64(max(total_driver - done_driver, np.int64(1)))
            end = _draw(driver, other, order, begin, end, most, share, proportion, looks)
            drawn, drawn_vision, drawn_other = _sums(driver, vision, other, order, begin, end)
            whole = (drawn_vision + rule.num_replicas // 2) // rule.num_replicas * rule.num_replicas
            end = _trim(
                table, order, begin, end, begin + step_packs, most, (drawn_vision - whole) * rule.vision_weight,
                (drawn - share) * rule.share_weight,
                np.int64(drawn_other - proportion * share) * rule.other_weight, scratch,
            )  # fmt: skip
            missing = share - _sums(driver, vision, other, order, begin, end)[0]
            if rule.vision_weight == 0 and missing > share >> 7:  # a very large sample comes next
                end = _top_up(driver, order, end, most, missing)
        starts[step + 1] = end
        drawn, drawn_vision, drawn_other = _sums(driver, vision, other, order, begin, end)
        done_driver += drawn
        done_other += drawn_other
    return starts


@compiled
def _sums(
    driver: Int32Array, vision: Int32Array, other: Int32Array, order: Int64Array, begin: int, end: int
) -> tuple[Integer, Integer, Integer]:
    """Driving load, vision units and other load of the samples at some places."""
    drawn = drawn_vision = drawn_other = np.int64(0)
    for position in range(begin, end):
        drawn += driver[order[position]]
        drawn_vision += vision[order[position]]
        drawn_other += other[order[position]]
    return drawn, drawn_vision, drawn_other


@compiled
def _share(due: Integer, rule: StepRule) -> Integer:
    """What a step should hold of a load that is due: rounded up, so that the last step gets what is left."""
    return min(max(-(-due // rule.share_unit) * rule.share_unit, 0), rule.step_packs * rule.most_share)


@compiled
def _draw(
    driver: Int32Array,
    other: Int32Array,
    order: Int64Array,
    begin: int,
    least: int,
    most: int,
    share: Integer,
    proportion: Integer,
    looks: int,
) -> int:
    """Draw samples until the driving load is nearest to a share; return where the step ends.

    With several looks, each drawn sample is the one of the next few after which the other load is nearest to its
    proportion of the driving one; those passed over are among the next few again.
    """
    end = begin
    drawn, surplus = np.int64(0), 0.0
    while end < most:
        best, least_surplus = end, np.inf
        for position in range(end, min(end + looks, len(order))):
            after = abs(surplus + other[order[position]] - proportion * driver[order[position]])
            if after < least_surplus:
                best, least_surplus = position, after
        order[end], order[best] = order[best], order[end]
        sample = order[end]
        if end >= least and 2 * (share - drawn) < driver[sample]:
            break
        drawn += driver[sample]
        surplus += other[sample] - proportion * driver[sample]
        end += 1
    return end


@compiled
def _trim(
    table: Int32Array,
    order: Int64Array,
    begin: int,
    end: int,
    least: int,
    most: int,
    over_vision: Integer,
    over_share: Integer,
    over_other: Integer,
    scratch: Int32Array,
) -> int:
    """Let last samples of a step and next ones change places to remove an excess; return the step's new end."""
    num_mine, num_theirs = min(TRIMMED, end - begin), min(TRIMMED, len(order) - end)
    first = end - num_mine
    scratch[0, MEMBERS, :num_mine] = order[first:end]
    scratch[1, MEMBERS, :num_theirs] = order[end : end + num_theirs]
    given, taken = nearest(
        scratch,
        add_subsets(table, scratch, 0, num_mine, TRIMMED, 0),
        add_subsets(table, scratch, 1, num_theirs, TRIMMED, 0),
        (over_vision, over_share, over_other),
        UNLIMITED,
        UNLIMITED,
        abs(over_vision) + abs(over_share) + abs(over_other),
    )
    if given < 0:
        return end
    give, take = scratch[0, MASKS, given], scratch[1, MASKS, taken]
    new_end = end
    for number in range(TRIMMED):
        new_end += (take >> number & 1) - (give >> number & 1)
    if not least <= new_end <= most:
        return end  # the step would have too few samples, or leave too few
    place, behind = first, new_end
    for side, count, moved in ((0, num_mine, give), (1, num_theirs, take)):
        for number in range(count):
            if (moved >> number & 1) == side:
                order[place] = scratch[side, MEMBERS, number]
                place += 1
            else:
                order[behind] = scratch[side, MEMBERS, number]
                behind += 1
    return new_end


@compiled
def _top_up(driver: Int32Array, order: Int64Array, end: int, most: int, missing: Integer) -> int:
    """Add the largest of the next samples that fit, as long as one does; return the step's new end."""
    while end < most:
        best, largest = end, 0
        for position in range(end, min(end + LOOKAHEAD, len(order))):
            load = driver[order[position]]
            if largest < load <= missing:
                best, largest = position, load
        if largest == 0:
            break
        missing -= largest
        order[end], order[best] = order[best], order[end]
        end += 1
    return end
