"""What would make a recipe fit: other settings, or devices that share each sample."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from omnibal.advise.estimate import HEAD_ROOM, Estimate
from omnibal.advise.wait import Sharding
from omnibal.cluster import Cluster
from omnibal.errors import ConfigError, InfeasibleError, bytes_in_words
from omnibal.profile.records import ModelProfile

SHARING_MORE: Final[tuple[Sharding, ...]] = ("ddp", "zero1", "zero2", "zero3")  # each holds less than the one before
ADAPTERS: Final = "LoRA of rank 16"
TOGETHER: Final = " together with "
TENSOR_DEGREES: Final = (2, 4, 8)


def what_fits(now: Estimate) -> tuple[str, ...]:
    """Changes that would make a recipe fit that does not, each by itself; where none does, several together."""
    if now.peaks[0] <= now.memory.budget_bytes:
        return ()
    scenario, kinds = now.scenario, _kinds(now)
    adapted = None if scenario.adapted is None else replace(scenario, profile=scenario.adapted)
    found = list[str]()
    for kind in kinds:
        fitting = (name for name, changed in kind if scenario.estimate(replace(now.recipe, **changed)).fits)
        if name := next(fitting, None):
            found.append(name)
    if adapted is not None and adapted.estimate(now.recipe).fits:
        found.append(ADAPTERS)
    if found:
        return tuple(found)
    names, recipe = list[str](), now.recipe
    for kind in kinds:  # all of one kind before any of the next
        for name, changed in kind:
            if scenario.estimate(replace(recipe, **changed)).fits:
                return (TOGETHER.join([*names, name]),)
        names, recipe = [*names, kind[-1][0]], replace(recipe, **kind[-1][1])
    return (TOGETHER.join([*names, ADAPTERS]),) if adapted is not None and adapted.estimate(recipe).fits else ()


def refuse_impossible(now: Estimate, helps: tuple[str, ...]) -> None:
    """Refuse a recipe that could not have run: even its mean rank needs more than there is."""
    memory, recipe, held = now.memory, now.recipe, int(now.peaks[1])
    if now.peaks[1] <= memory.budget_bytes:
        return
    missing, before = (bytes_in_words(size) for size in (held - memory.budget_bytes, memory.state_bytes))
    would = f"; what would fit: {', or '.join(helps)}" if helps else ""
    raise InfeasibleError(
        f"the present batch must fit a device's {bytes_in_words(memory.budget_bytes)}, got {bytes_in_words(held)} on "
        f"the mean rank ({missing} too many, {before} of it before any sample); which is wrong: the batch of "
        f"{recipe.batch}, {recipe.sharding}, recomputation {recipe.recompute!r}, what is frozen, the optimizer, or the "
        f"cluster?{would}; --pipeline plans another way, --layouts weighs all"
    )


def _kinds(now: Estimate) -> list[list[tuple[str, dict[str, Any]]]]:
    """Kinds of changes that take memory away, each from the smallest to the largest: in words, and as fields."""
    recipe, batches, smaller = now.recipe, [], now.recipe
    while smaller.batch % 2 == 0 and recipe.limits is None:
        changed: dict[str, Any] = {"batch": smaller.batch // 2, "micro_batches": 2 * smaller.micro_batches}
        smaller = replace(smaller, **changed)
        batches.append((smaller.batch_text, changed))
    sharding = recipe.sharding
    more = SHARING_MORE[SHARING_MORE.index(sharding) + 1 :] if sharding in SHARING_MORE else ()
    kinds: list[list[tuple[str, dict[str, Any]]]] = [
        [("target_rows(model)", {"target_rows": True})]
        if "head" in now.scenario.offered and not recipe.target_rows else [],
        [("gradient checkpointing", {"recompute": "full"})] if recipe.recompute == "none" else [],
        batches,
        [(f"{other} in place of {sharding}", {"sharding": other}) for other in more],
    ]  # fmt: skip
    return [kind for kind in kinds if kind]


def degrees_that_fit(now: Estimate, profiles: Callable[[int, int], ModelProfile]) -> tuple[str, ...]:
    """The fewest devices that would have to share each sample for the present recipe to fit; nothing if it does.

    Where no number suffices, the fewest together with all changes of the recipe that take memory away.
    """
    if now.peaks[0] <= now.memory.budget_bytes:
        return ()
    if found := _sharing_degrees(now, profiles):
        return found
    largest = [kind[-1] for kind in _kinds(now)]
    recipe = now.recipe
    for _, changed in largest:
        recipe = replace(recipe, **changed)
    names = [name for name, _ in largest]
    return tuple(TOGETHER.join([way, *names]) for way in _sharing_degrees(now.scenario.estimate(recipe), profiles))


def _sharing_degrees(now: Estimate, profiles: Callable[[int, int], ModelProfile]) -> tuple[str, ...]:
    """The least tensor degree, and the least degree of sequence parallelism, with which a recipe fits.

    Sequence parallelism divides all that a micro-batch keeps, of ViT and LLM alike, and none of the model's state.
    """
    memory, room = now.memory, now.memory.budget_bytes * (1 - HEAD_ROOM)
    found = list[str]()
    for degree in TENSOR_DEGREES:
        try:
            profile = profiles(degree, degree)
        except ConfigError:
            continue
        if memory.cluster.devices_per_node % degree:
            continue
        # Logits are shared as the head is: each device has those of its part of the vocabulary.
        layers = tuple(
            replace(layer, sizes={**layer.sizes, "vocab": -(-layer.sizes["vocab"] // degree)})
            if layer.kind == "head" else layer
            for layer in profile.layers
        )  # fmt: skip
        ranks = replace(memory.cluster, devices_per_node=memory.cluster.devices_per_node // degree, memory_bytes=None)
        shared = replace(memory, profile=replace(profile, layers=layers), cluster=ranks)
        if max(float(shared.peak_bytes(batches.loads).max()) for batches in now.batches) <= room:
            found.append(f"{degree} tensor ranks")
            break
    kept = now.peaks[0] - memory.state_bytes
    degrees = (2**power for power in range(1, memory.cluster.num_devices.bit_length()))
    least = next((degree for degree in degrees if memory.state_bytes + kept / degree <= room), None)
    if least is not None and memory.cluster.num_devices % least == 0:
        found.append(f"sequence parallelism of degree {least}")
    return tuple(found)


def check_weighable(cluster: Cluster, samples_per_step: int) -> None:
    """Refuse machines and steps that all layouts are alike for, or that not every device has work in."""
    if cluster.num_devices < 2:
        raise ConfigError(f"cluster must have at least 2 devices for layouts to differ, got {cluster}")
    if samples_per_step < cluster.num_devices:
        raise ConfigError(
            f"samples of a step must be at least as many as the {cluster.num_devices} devices of {cluster} for layouts "
            f"to be weighed, got {samples_per_step}; take more accumulation, or fewer devices"
        )
