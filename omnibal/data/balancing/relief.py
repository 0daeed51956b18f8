"""Relief: exchanges that bring packs which hold too much back under the limits."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.exchange import (
    EXCESS,
    LOADS,
    MASKS,
    ROOM,
    SIZES,
    SUMS,
    Int32Array,
    Int64Array,
    Integer,
    keeps_samples,
    list_subsets,
    swap,
)
from omnibal.data.balancing.shuffle import scrambled

STRICT_PASSES: Final = 2
"""How often all packs that hold too much try others that keep the limits afterwards."""
PASSES: Final = 8
"""How often they try others in all; then the excess may also be handed on."""
MEETINGS: Final = 64
"""Others that a pack looks at in the first pass, twice as many in each that follows."""


@compiled
def relieve(
    samples: Int32Array,
    packs: Int64Array,
    vision_weight: Integer,
    token_weight: Integer,
    tries: int,
    seed: Any,
    scratch: Int32Array,
) -> int:
    """Exchange samples of packs over the limits with others until no pack holds too much, or none helps.

    Each tries packs with most room, every one beginning with another of them, and packs drawn at random.

    Args:
        samples: Changed in place; their loads become their sizes.
        packs: Changed in place; their excesses become what they hold beyond the limits.
        vision_weight: What a vision unit too much counts.
        token_weight: What a token too much counts.
        tries: Most exchanges to try.
        seed: Which packs to try first.
        scratch: From ``make_scratch``.

    Returns:
        How many packs still hold too much.
    """
    left = _count_overfull(packs)
    if left == 0:
        return 0
    _measure_by_size(samples, packs)
    roomy = _sort_by_room(packs)
    turn = 0
    while left and tries:
        served = 0
        for pack in range(len(packs)):
            if not _is_kept(packs, pack) and tries:
                by_room = roomy[0 if packs[pack, EXCESS] > 0 else 1]
                draw = scrambled(seed + np.uint64(turn * len(packs) + pack)) % np.uint64(len(packs))
                tries = _relieve_pack(
                    samples, packs, pack, by_room, served, np.int64(draw), turn, vision_weight, token_weight, tries,
                    scratch,
                )  # fmt: skip
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
    vision_weight: Integer,
    token_weight: Integer,
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
            evenness = vision_weight if turn == 0 and packs[pack, EXCESS] <= 0 else 0
            strictness = 1 << 16 if turn < STRICT_PASSES else 1
            _relieve_pair(
                samples, packs, pack, other, tries, vision_weight, token_weight, evenness, strictness, scratch
            )
    return tries


@compiled
def _measure_by_size(samples: Int32Array, packs: Int64Array) -> None:
    """Let loads be sizes, and excesses what packs hold beyond the limits."""
    samples[:, LOADS], samples[:, LOADS + 1] = samples[:, SIZES], samples[:, SIZES + 1]
    packs[:, EXCESS], packs[:, EXCESS + 1] = -packs[:, ROOM], -packs[:, ROOM + 1]


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
    vision_weight: Integer,
    token_weight: Integer,
    evenness: Integer,
    strictness: int,
    scratch: Int32Array,
) -> None:
    """Swap the subsets after which both packs together hold least too much, if that is less than before.

    ``evenness`` is what a vision unit counts that moves from one to the other, ``strictness`` how many times what the
    other then holds too much counts.
    """
    num_members, num_mine = list_subsets(samples, packs, pack, turn, scratch, 0)
    num_others, num_theirs = list_subsets(samples, packs, other, turn, scratch, 1)
    vision, tokens = packs[pack, EXCESS], packs[pack, EXCESS + 1]
    other_vision, other_tokens = packs[other, EXCESS], packs[other, EXCESS + 1]
    least = max(vision, 0) * vision_weight + max(tokens, 0) * token_weight
    least += strictness * (max(other_vision, 0) * vision_weight + max(other_tokens, 0) * token_weight)
    given = taken = -1
    for subset in range(num_mine):
        for candidate in range(num_theirs):
            more = np.int64(scratch[0, SUMS, subset] - scratch[1, SUMS, candidate])
            longer = np.int64(scratch[0, SUMS + 1, subset] - scratch[1, SUMS + 1, candidate])
            too_much = max(vision - more, 0) * vision_weight + max(tokens - longer, 0) * token_weight
            too_much += strictness * (
                max(other_vision + more, 0) * vision_weight + max(other_tokens + longer, 0) * token_weight
            )
            too_much += abs(more) * evenness
            if too_much < least and keeps_samples(
                packs, pack, other, scratch[0, MASKS, subset], scratch[1, MASKS, candidate]
            ):
                least, given, taken = too_much, subset, candidate
    if given >= 0:
        swap(samples, packs, pack, other, scratch, num_members, num_others, given, taken)
