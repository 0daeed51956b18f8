"""Relief: exchanges that bring packs which hold too much back under the limits."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.exchange import keeps_samples, swap
from omnibal.data.balancing.shuffle import scrambled
from omnibal.data.balancing.subsets import FAR, list_subsets, within_bits
from omnibal.data.balancing.tables import EXCESS, LOADS, MASKS, ROOM, SIZES, SUMS, Int32Array, Int64Array, Integer

STRICT_PASSES: Final = 2
"""How often all packs that hold too much try others that keep the limits afterwards."""
PASSES: Final = 10
"""How often they try others in all; then the excess may also be handed on."""
MEETINGS: Final = 64
"""Others that a pack looks at in the first pass, twice as many in each that follows."""


@compiled
def relieve(
    samples: Int32Array,
    packs: Int64Array,
    weights: tuple[int, int],
    tries: int,
    seed: Any,
    scratch: Int32Array,
) -> int:
    """Exchange samples of packs over the limits with others until no pack holds too much, or none helps.

    Each tries packs with most room, every one beginning with another of them, and packs drawn at random.

    Args:
        samples: Changed in place; their loads become their sizes, weighted.
        packs: Changed in place; their excesses become what they hold beyond the limits, weighted.
        weights: What a vision unit and a token too much count.
        tries: Most exchanges to try.
        seed: Which packs to try first.
        scratch: From ``make_scratch``.

    Returns:
        How many packs still hold too much.
    """
    left = _count_overfull(packs)
    if left == 0:
        return 0
    _measure_by_size(samples, packs, weights)
    roomy = _sort_by_room(packs)
    turn = 0
    while left and tries:
        served = 0
        for pack in range(len(packs)):
            if not _is_kept(packs, pack) and tries:
                by_room = roomy[0 if packs[pack, EXCESS] > 0 else 1]
                draw = scrambled(seed + np.uint64(turn * len(packs) + pack)) % np.uint64(len(packs))
                tries = _relieve_pack(samples, packs, pack, by_room, served, np.int64(draw), turn, tries, scratch)
                served += 1
        left = _count_overfull(packs)
        turn += 1
        if turn == PASSES:
            break
    return left


@compiled
def _relieve_pack(
    samples: Int32Array,
    packs: Int64Array,
    pack: int,
    by_room: Int64Array,
    roomy: int,
    drawn: Integer,
    turn: int,
    tries: int,
    scratch: Int32Array,
) -> int:
    """Try others from two places in the order by room in turns; return how many more tries there are."""
    for meeting in range(min(MEETINGS << turn, 2 * len(packs))):
        if _is_kept(packs, pack) or tries == 0:
            break
        other = by_room[((drawn if meeting % 2 else roomy) + meeting // 2) % len(packs)]
        if other != pack and _has_room(packs, pack, other):
            tries -= 1
            # At first, tokens alone are no reason to make vision units uneven.
            keep_vision = turn == 0 and packs[pack, EXCESS] <= 0
            _relieve_pair(samples, packs, pack, other, tries, turn < STRICT_PASSES, keep_vision, scratch)
    return tries


@compiled
def _measure_by_size(samples: Int32Array, packs: Int64Array, weights: tuple[int, int]) -> None:
    """Let loads be sizes, and excesses what packs hold beyond the limits."""
    for size in range(2):
        samples[:, LOADS + size] = samples[:, SIZES + size] * weights[size]
        packs[:, EXCESS + size] = -packs[:, ROOM + size] * weights[size]


@compiled
def _sort_by_room(packs: Int64Array) -> Any:
    """Sort packs from the one with most room on: by vision units, and by tokens."""
    return np.argsort(packs[:, EXCESS], kind="mergesort"), np.argsort(packs[:, EXCESS + 1], kind="mergesort")


@compiled
def _count_overfull(packs: Int64Array) -> int:
    number = 0
    for pack in range(len(packs)):
        number += not _is_kept(packs, pack)
    return number


@compiled
def _is_kept(packs: Int64Array, pack: int) -> bool:
    """Tell whether a pack keeps the limits."""
    return bool(packs[pack, ROOM] >= 0 and packs[pack, ROOM + 1] >= 0)


@compiled
def _has_room(packs: Int64Array, pack: int, other: Integer) -> bool:
    """Tell whether the other pack has room for some of what is too much in the pack."""
    return bool(
        (packs[pack, EXCESS] <= 0 or packs[other, EXCESS] < 0)
        and (packs[pack, EXCESS + 1] <= 0 or packs[other, EXCESS + 1] < 0)
    )


@compiled
def _relieve_pair(
    samples: Int32Array,
    packs: Int64Array,
    pack: int,
    other: Integer,
    turn: int,
    strict: bool,
    keep_vision: bool,
    scratch: Int32Array,
) -> None:
    """Swap the subsets after which both packs together hold least too much, if that is less than before."""
    num_members, num_mine = list_subsets(samples, packs, pack, turn, scratch, 0)
    num_others, num_theirs = list_subsets(samples, packs, other, turn, scratch, 1)
    excess = within_bits(packs[pack, EXCESS]), within_bits(packs[pack, EXCESS + 1])
    other_excess = within_bits(packs[other, EXCESS]), within_bits(packs[other, EXCESS + 1])
    given, taken = _most_relieving(scratch, num_mine, num_theirs, excess, other_excess, strict, keep_vision)
    if given >= 0 and keeps_samples(packs, pack, other, scratch[0, MASKS, given], scratch[1, MASKS, taken]):
        swap(samples, packs, pack, other, scratch, num_members, num_others, given, taken)


@compiled
def _most_relieving(
    scratch: Int32Array,
    num_mine: int,
    num_theirs: int,
    excess: tuple[Integer, Integer],
    other_excess: tuple[Integer, Integer],
    strict: bool,
    keep_vision: bool,
) -> tuple[int, int]:
    """Find the subsets after whose swap two packs together hold least too much.

    Args:
        scratch: Both packs' subsets.
        num_mine: Subsets in the first table.
        num_theirs: Subsets in the second table.
        excess: What the first pack holds beyond its limits, negative where it has room.
        other_excess: The same of the second pack.
        strict: Whether the second pack must not hold more beyond its limits than it does.
        keep_vision: Whether vision units that move count as if they were too much.

    Returns:
        Their numbers, or −1 twice where none holds less than now.
    """
    best = np.int32(max(excess[0], 0) + max(excess[1], 0) + max(other_excess[0], 0) + max(other_excess[1], 0))
    most = (np.int32(max(other_excess[0], 0)), np.int32(max(other_excess[1], 0))) if strict else (FAR, FAR)
    moved = np.int32(keep_vision)
    given = taken = -1
    for subset in range(num_mine):
        vision, tokens = np.int32(scratch[0, SUMS, subset]), np.int32(scratch[0, SUMS + 1, subset])
        least = FAR
        for candidate in range(num_theirs):
            least = min(least, _left_over(scratch, candidate, vision, tokens, excess, other_excess, most, moved))
        if least < best:
            best, given = least, subset
            if best == 0:
                break
    if given < 0:
        return -1, -1
    vision, tokens = np.int32(scratch[0, SUMS, given]), np.int32(scratch[0, SUMS + 1, given])
    taken = 0
    while _left_over(scratch, taken, vision, tokens, excess, other_excess, most, moved) != best:
        taken += 1
    return given, taken


@compiled
def _left_over(
    scratch: Int32Array,
    candidate: int,
    vision: Any,
    tokens: Any,
    excess: tuple[Integer, Integer],
    other_excess: tuple[Integer, Integer],
    most: tuple[Any, Any],
    moved: Any,
) -> Any:
    """What both packs together hold too much after a swap; ``FAR`` where the other one would hold more than it may."""
    zero = np.int32(0)
    more = np.int32(vision - scratch[1, SUMS, candidate])
    longer = np.int32(tokens - scratch[1, SUMS + 1, candidate])
    other_vision, other_tokens = np.int32(other_excess[0] + more), np.int32(other_excess[1] + longer)
    left = np.int32(
        max(np.int32(excess[0] - more), zero) + max(np.int32(excess[1] - longer), zero)
        + max(other_vision, zero) + max(other_tokens, zero) + moved * abs(more)
    )  # fmt: skip
    return left if (other_vision <= most[0]) & (other_tokens <= most[1]) else FAR
