"""What fits into memory, and what would make the present way fit."""

from dataclasses import replace
from typing import Any, Final

from omnibal.advise.estimate import Estimate, Way
from omnibal.advise.wait import Trainer
from omnibal.errors import InfeasibleError, bytes_in_words

HEAD_ROOM: Final = 0.05
"""Share of a device's memory that stays free, as of plans."""
SHARING_MORE: Final[tuple[Trainer, ...]] = ("ddp", "zero1", "zero2", "zero3")
"""Each holds less than the one before."""
ADAPTERS: Final = "LoRA of rank 16"
TOGETHER: Final = " together with "


def missing_bytes(estimate: Estimate) -> int:
    """What the fullest rank lacks, with the head room; negative or 0 where it fits."""
    return int(estimate.peaks[0] - estimate.memory.budget_bytes * (1 - HEAD_ROOM))


def fits(estimate: Estimate) -> bool:
    """Whether the fullest rank keeps to its memory, less the head room."""
    return missing_bytes(estimate) <= 0


def what_fits(now: Estimate) -> tuple[str, ...]:
    """Changes that would make the present way fit, each by itself; where none does, several together.

    Nothing where it fits already, and where not even all together do. Adapters are among them where the setting says
    what they would cost.
    """
    if now.peaks[0] <= now.memory.budget_bytes:
        return ()
    setting, kinds = now.setting, _kinds(now.way)
    if "head" in setting.offered and not now.way.target_rows:
        kinds.insert(0, [("target_rows(model)", {"target_rows": True})])
    adapted = None if setting.adapted is None else replace(setting, profile=setting.adapted)
    firsts = ((name for name, way in kind if fits(setting.estimate(replace(now.way, **way)))) for kind in kinds)
    found = [name for first in firsts if (name := next(first, None)) is not None]
    if adapted is not None and fits(adapted.estimate(now.way)):
        found.append(ADAPTERS)
    if found:
        return tuple(found)
    names: list[str] = []
    way = now.way
    for kind in kinds:  # all of one kind before any of the next
        for name, changed in kind:
            if fits(setting.estimate(replace(way, **changed))):
                return (TOGETHER.join([*names, name]),)
        names, way = [*names, kind[-1][0]], replace(way, **kind[-1][1])
    return (TOGETHER.join([*names, ADAPTERS]),) if adapted is not None and fits(adapted.estimate(way)) else ()


def _kinds(way: Way) -> list[list[tuple[str, dict[str, Any]]]]:
    """Kinds of changes, each at first by as little as possible, then by more: in words, and what changes of the way."""
    batches, sharing = [], SHARING_MORE[SHARING_MORE.index(way.trainer) + 1 :] if way.trainer in SHARING_MORE else ()
    batch, micro_batches = way.batch, way.micro_batches
    while batch % 2 == 0 and way.limits is None:
        batch, micro_batches = batch // 2, 2 * micro_batches
        changed = {"batch": batch, "micro_batches": micro_batches}
        batches.append((f"batches of {batch}, {micro_batches} a rank and step", changed))
    kinds: list[list[tuple[str, dict[str, Any]]]] = [
        [("gradient checkpointing", {"recompute": "full"})] if way.recompute == "none" else [],
        batches,
        [(f"{trainer} in place of {way.trainer}", {"trainer": trainer}) for trainer in sharing],
    ]
    return [kind for kind in kinds if kind]


def refuse_impossible(now: Estimate, helps: tuple[str, ...]) -> None:
    """Refuse a present way that could not have run: even its mean rank needs more than there is.

    Args:
        now: The present way.
        helps: What would fit.

    Raises:
        InfeasibleError: Says by how much.
    """
    memory, (_, mean) = now.memory, now.peaks
    if mean <= memory.budget_bytes:
        return
    way, has, held = now.way, bytes_in_words(memory.budget_bytes), int(mean)
    missing, before = (bytes_in_words(size) for size in (held - memory.budget_bytes, memory.state_bytes))
    would = f"; what would fit: {', or '.join(helps)}" if helps else ""
    raise InfeasibleError(
        f"the present batch must fit a device's {has}, got {bytes_in_words(held)} on the mean rank ({missing} too "
        f"many, {before} of it before any sample); which is wrong: the batch of {way.batch}, {way.trainer}, "
        f"recomputation {way.recompute!r}, what is frozen, the optimizer, or the cluster?{would}; --pipeline plans "
        "another way"
    )
