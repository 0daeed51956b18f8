"""What each change would bring: settings of the trainer that somebody has, then packs of ours, each on top of the last.

All recipes are compared at the same number of samples a step.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from omnibal.advise.batches import Batching
from omnibal.advise.estimate import (
    Estimate,
    Recipe,
    Scenario,
    Speedup,
    Way,
    doubling,
    refuse_impossible,
    what_fits,
)
from omnibal.advise.wait import Sharding
from omnibal.data.limits import MOST, PackLimits
from omnibal.data.step_size import KEPT

TRAINER: Final = "ZeRO with a trainer's own settings"
MOST_ROUNDS: Final = 4  # in which settings are tried one after another; two to three bring something
ALIKE: Final = 1.005  # recipes of up to so many times the least seconds are taken to be equally fast
# Mean tokens of smaller batches: products of fewer rows do not keep a device as busy as counted costs assume.
LEAST_TOKENS: Final = 1024
# Share by which a step may differ from today's samples, and times that the size of random packs is scaled to that end.
SAME_STEP, MOST_SCALED = 0.01, 6
# What shares less and sends less, and may fit all the same.
SHARING_LESS: Final[dict[Sharding, Sharding]] = {"fsdp": "zero2", "zero3": "zero2", "zero2": "zero1"}
PADDED: Final[tuple[Batching, ...]] = ("random", "group_by_length", "batch_rebalance")
# Ways to batch that trainers offer: the name of the change, and what becomes of batches.
BATCHINGS: Final[dict[Batching, tuple[str, str]]] = {
    "group_by_length": ("group_by_length", "batches of samples of similar length"),
    "batch_rebalance": ("batch_rebalance", "batches of equal cost: fewer samples where they are long"),
    "flattened": ("padding_free", "the same batches without their padding"),
    "packed": ("neat_packing", "packs of random samples"),
}


@dataclass(frozen=True, eq=False)
class TriedChange:
    """One change, on top of those before it that bring something."""

    name: str
    detail: str
    gain: Speedup | None = None  # what it brings; None where it does not fit
    after: Estimate | None = None  # the estimate with the change; None where it does not fit
    is_setting: bool = False

    @property
    def factor(self) -> float | None:
        """Samples a second in multiples of those before; None where it does not fit."""
        return None if self.gain is None else self.gain.factor

    @property
    def brings(self) -> bool:
        return self.gain is not None and self.gain.brings


@dataclass(frozen=True, eq=False)
class Advice:
    today: Estimate
    settled: Estimate
    changes: tuple[TriedChange, ...]
    after: Estimate
    """With all changes that bring something; packs of ours are part of it where all that the drop-in makes together
    brings something on top of settings."""
    over_settings: Speedup | None = None
    """What packs of ours bring over settings, be it a loss; None if none fit."""
    fitting: tuple[str, ...] = ()

    @property
    def takes_packs(self) -> bool:
        return self.after.recipe.batching == "even"

    @property
    def adopted(self) -> tuple[TriedChange, ...]:
        """Changes that bring something, those of packs only where all of them together do."""
        own = (change for change in self.changes if change.is_setting or self.takes_packs)
        return tuple(change for change in own if change.brings)

    @property
    def settings(self) -> Speedup:
        return self._from(self.today, self.settled, sum(change.is_setting for change in self.adopted))

    @property
    def beyond(self) -> Speedup:
        """What packs of ours bring on top of settings."""
        count = sum(not change.is_setting for change in self.adopted)
        return self._from(self.settled, self.after if self.takes_packs else self.settled, count)

    @property
    def replaced(self) -> tuple[TriedChange, ...]:
        """Settings in whose place packs come: a step's samples are brought together once."""
        names = {name for name, _ in BATCHINGS.values()} | {"batch"}
        return tuple(change for change in self.adopted if self.takes_packs and change.name in names)

    @property
    def whole(self) -> Speedup:
        """What all changes that bring something bring together."""
        return self._from(self.today, self.after, len(self.adopted))

    @property
    def causes(self) -> list[tuple[str, float, float, float]]:
        """Each cause with its share of today's time: today, with settings alone, with all changes."""
        today, estimates = float(self.today.sample_seconds.mean()), (self.today, self.settled, self.after)
        shrunk = [float(estimate.sample_seconds.mean()) / today for estimate in estimates]
        shares = [estimate.shares for estimate in estimates]
        return [
            (cause, shares[0][cause], shrunk[1] * shares[1][cause], shrunk[2] * shares[2][cause]) for cause in shares[0]
        ]

    def _from(self, before: Estimate, after: Estimate, changes: int) -> Speedup:
        return Speedup() if after is before else Speedup.of(before, after, changes=changes)


def advise(scenario: Scenario, today: Recipe, *, must_fit: bool = True) -> Advice:
    """Estimate the present recipe, and what changes would bring."""
    now = scenario.estimate(today)
    helps = what_fits(now)
    if must_fit:
        refuse_impossible(now, helps)
    settings = _settings(now)
    packs, over_settings = _packs(now, settings.current)
    changes = [*(replace(change, is_setting=True) for change in settings.changes), *packs.changes]
    return Advice(now, settings.current, tuple(changes), packs.current, over_settings, helps)


class _Search:
    """Changes that were tried one after another, and the estimate that those which bring something end in."""

    def __init__(self, current: Estimate) -> None:
        self.current = current
        self.changes: list[TriedChange] = []

    def offer(self, change: TriedChange | None, *, belongs: bool = False) -> None:
        """Try the next change; one that belongs to others after it is taken even if it brings nothing by itself."""
        if change is None:
            return
        if change.after is None or not (change.brings or belongs):
            if all(found.name != change.name for found in self.changes):
                self.changes.append(change)
            return
        self.current, gain = change.after, change.gain
        # What a setting brings in several rounds is one change; and so are ways to batch, which replace each other.
        batchings = {name for name, _ in BATCHINGS.values()}
        for found in list(self.changes):
            if found.name == change.name or (found.brings and {found.name, change.name} <= batchings):
                self.changes.remove(found)
                if found.brings and found.gain and gain:
                    gain = found.gain * gain
        self.changes.append(replace(change, gain=gain))


def _settings(now: Estimate) -> _Search:
    """What the trainer offers without packs of ours.

    Settings are tried in rounds until a round brings nothing: batches of like samples, say, may bring something only
    where they are larger, which another setting brings.
    """
    scenario, search = now.scenario, _Search(now)
    if "head" in scenario.offered:
        search.offer(_head(now))
    for _ in range(MOST_ROUNDS):
        begun = search.current
        for batching in BATCHINGS:
            recipe = search.current.recipe
            if batching in scenario.offered and recipe.batching in PADDED and batching != recipe.batching:
                search.offer(_batched(search.current, batching))
        if search.current.recipe.limits is None:
            search.offer(_other_batch(search.current))
        search.offer(_recompute(search.current))
        for _ in SHARING_LESS:
            before = search.current
            search.offer(_sharing_less(before))
            if search.current is before:
                break
        if search.current is begun:
            break
    return search


def settings_alone(scenario: Scenario) -> Way:
    """The cheapest alternative to a pipeline or to packs: ZeRO, with what a trainer has by its settings.

    Settings are searched as `omnibal advise` searches its steps 0, from ZeRO 3 with single samples on.
    """
    ranks = scenario.cluster.num_devices
    micro_batches = max(round(scenario.samples_per_step / ranks), 1)
    asked = replace(scenario, samples_per_step=ranks * micro_batches)
    return Way.of(TRAINER, _settings(asked.estimate(Recipe("zero3", micro_batches=micro_batches))).current)


def _packs(now: Estimate, settled: Estimate) -> tuple[_Search, Speedup | None]:
    """What packs of ours bring on top of settings; the search ends in the settings alone if it is nothing."""
    scenario, search = settled.scenario, _Search(settled)
    # Packs take the place of batches: those that ``balance`` makes of today's.
    recipe = replace(settled.recipe, target_rows=settled.recipe.target_rows or scenario.spares_rows, limits=None)
    recipe = replace(recipe, batch=now.recipe.batch, micro_batches=now.recipe.micro_batches)
    if recipe.target_rows and "head" not in scenario.offered:
        search.offer(_head(settled), belongs=True)
    balanced = scenario.estimate(scenario.packed(recipe))
    if settled.recipe.batching in PADDED:
        flattened = scenario.estimate(replace(settled.recipe, batching="flattened", target_rows=recipe.target_rows))
        # Need not fit: the line tells packing from balance, and nobody is advised to stop there.
        instead = BATCHINGS.get(settled.recipe.batching)
        detail = (f"in place of {instead[0]}: " if instead else "") + "random samples, no padding"
        gain = Speedup.of(search.current, flattened)
        search.offer(TriedChange("no padding", detail, gain, flattened), belongs=True)
    packs = count_of(balanced.recipe.micro_batches, "pack")
    detail = f"equally long packs, {packs} per rank and step"
    search.offer(_change("balanced packs", detail, search.current, balanced), belongs=True)
    if search.current is balanced:
        search.offer(_filled(balanced) if scenario.fills else _recompute(balanced))
    other = _other_packs(search.current, recipe)  # fewer packs pay where ranks mostly gather parameters
    search.offer(other, belongs=other is not None and _alone_brings(settled, other.after, search.current))
    search.offer(_sharing_less(search.current))
    gain = Speedup.of(settled, search.current, changes=sum(change.brings for change in search.changes))
    is_even = search.current.recipe.batching == "even"
    if not (is_even and gain.brings):
        search.current = settled
    return search, gain if is_even else None


def _change(name: str, detail: str, before: Estimate, after: Estimate) -> TriedChange:
    if not after.fits:
        return TriedChange(name, f"{detail} does not fit: {after.needs}")
    return TriedChange(name, detail, Speedup.of(before, after), after)


def _head(now: Estimate) -> TriedChange:
    spared = now.scenario.estimate(replace(now.recipe, target_rows=True))
    return _change("head", "logits and loss only for tokens that predict a target: target_rows(model)", now, spared)


def _batched(current: Estimate, batching: Batching) -> TriedChange:
    """Samples brought together in a way that the trainer has."""
    scenario, recipe = current.scenario, replace(current.recipe, batching=batching)
    name, detail = BATCHINGS[batching]
    if batching == "packed":
        return _random_packs(current, name, detail)
    found = scenario.estimate(recipe)
    if recipe.limits is None and not found.fits:  # the longest samples meet in one batch
        found = _fastest(scenario, _batch_sizes(recipe), recipe) or found
    if found.recipe.batch != recipe.batch:
        detail += f", {found.recipe.batch_text}"
    return _change(name, detail, current, found)


def _random_packs(current: Estimate, name: str, detail: str) -> TriedChange:
    """Packs of random samples, as many and as large as make today's step; hosts drop samples longer than a pack."""
    scenario, wanted = current.scenario, current.scenario.samples_per_step
    longest = int(scenario.lengths.llm_tokens.max())
    tokens, recipe = scenario.cutoff or MOST, replace(current.recipe, batching="packed")
    found = scenario.estimate(replace(recipe, limits=PackLimits(MOST, tokens)))
    count = max(round(recipe.micro_batches * wanted / found.samples_per_step), 1)
    for _ in range(MOST_SCALED):
        found = scenario.estimate(replace(recipe, limits=PackLimits(MOST, tokens), micro_batches=count))
        if abs(found.samples_per_step / wanted - 1) <= SAME_STEP:
            break
        tokens = min(max(round(tokens * wanted / found.samples_per_step), longest), MOST)
    detail = f"{detail} of {tokens:,} tokens, {count} per rank and step"
    if abs(found.samples_per_step / wanted - 1) > SAME_STEP:
        return TriedChange(
            name, f"{detail}: {found.samples_per_step:,.0f} samples a step, which no size makes {wanted:,}"
        )
    return _change(name, detail, current, found)


def _other_batch(current: Estimate) -> TriedChange | None:
    """Batches of more samples, or of fewer, with as many a step; None where the present ones are as good."""
    least = LEAST_TOKENS / max(float(current.scenario.lengths.llm_tokens.mean()), 1.0)
    found = _fastest(current.scenario, _batch_sizes(current.recipe, least), current.recipe)
    if found is None or found.recipe == current.recipe:
        return None
    return _change("batch", found.recipe.batch_text, current, found)


def _recompute(current: Estimate) -> TriedChange | None:
    """Without recomputation, in batches or packs as large as then fit; None where nothing is recomputed."""
    if current.recipe.recompute == "none":
        return None
    scenario, recipe = current.scenario, replace(current.recipe, recompute="none")
    found, is_even = scenario.estimate(recipe), recipe.batching == "even"
    if not found.fits and is_even:
        more = [count for count in _numbers_of_packs(scenario) if count > recipe.micro_batches]
        found = _fastest_packs(scenario, recipe, more) or found
    elif not found.fits and recipe.limits is None:
        found = _fastest(scenario, _batch_sizes(recipe), recipe) or found
    return _change("recompute", f"gradient checkpointing off{_told_batches(found, recipe)}", current, found)


def _filled(current: Estimate) -> TriedChange | None:
    """Even packs beside which only those layers recompute that must."""
    recipe = current.recipe
    if recipe.recompute == "none":
        return None
    found = current.filled()
    return _change("recompute", f"{_told_layers(found)}{_told_batches(found, recipe)}", current, found)


def _told_layers(found: Estimate) -> str:
    blocks = [layer.kind.endswith("_block") for layer in found.scenario.profile.layers]
    again = sum(level == "full" for level, is_block in zip(found.memory.levels, blocks, strict=True) if is_block)
    return f"{again} of {sum(blocks)} layers recompute"


def _told_batches(found: Estimate, before: Recipe) -> str:
    """The packs or batches of an estimate, where they are others than before."""
    if found.recipe.micro_batches == before.micro_batches:
        return ""
    if found.recipe.batching == "even":
        return f", in {count_of(found.recipe.micro_batches, 'pack')} per rank and step"
    return f", in {found.recipe.batch_text}"


def _sharing_less(current: Estimate) -> TriedChange | None:
    sharding = current.recipe.sharding
    if sharding not in SHARING_LESS:
        return None
    recipe = replace(current.recipe, sharding=SHARING_LESS[sharding])
    after, detail = current.scenario.estimate(recipe), f"{recipe.sharding} in place of {sharding}"
    if isinstance(recipe.recompute, tuple):  # what recomputes is chosen anew
        after = current.scenario.estimate(replace(recipe, recompute="full")).filled()
        detail += f", {_told_layers(after)}{_told_batches(after, recipe)}"
    return _change("sharding", detail, current, after)


def _alone_brings(settled: Estimate, packs: Estimate | None, present: Estimate) -> bool:
    """Whether packs bring something over settings where those at hand do not."""
    return packs is not None and Speedup.of(settled, packs).brings and not Speedup.of(settled, present).brings


def _other_packs(current: Estimate, recipe: Recipe) -> TriedChange | None:
    """Fewer packs of a rank's step where they are faster than those at hand; None where these are the fastest."""
    alike = replace(recipe, recompute="none" if current.recipe.recompute == "none" else "full")
    fewer = [count for count in _numbers_of_packs(current.scenario) if count < current.recipe.micro_batches]
    found = _fastest_packs(current.scenario, alike, fewer)
    if found is None or found.recipe.limits == current.recipe.limits:
        return None
    detail = f"{count_of(found.recipe.micro_batches, 'pack')} per rank and step"
    if found.recipe.recompute != current.recipe.recompute:
        detail += f", {_told_layers(found)}"
    return _change("number of packs", detail, current, found)


def _numbers_of_packs(scenario: Scenario) -> list[int]:
    """Packs of a rank's step that may be tried: 1, 2, 4, ... and one for each sample."""
    return doubling(scenario.samples_per_step // scenario.cluster.num_devices)


def _fastest_packs(scenario: Scenario, recipe: Recipe, counts: list[int]) -> Estimate | None:
    """The packs of ``balance``, or as many of a rank's step as ``counts`` say: the fastest that fit, if any do."""
    others, wanted = (scenario.in_packs(recipe, count) for count in counts), scenario.samples_per_step
    # Where samples hardly combine, no limits make so many packs hold just the samples of a step.
    alike = (each for each in others if abs(scenario.estimate(each).samples_per_step / wanted - 1) <= KEPT)
    recipes = [scenario.packed(recipe), *alike]
    if scenario.fills and recipe.recompute == "full":
        recipes = [scenario.estimate(each).filled().recipe for each in recipes]
    return _fastest(scenario, recipes, recipes[0])


def _batch_sizes(recipe: Recipe, least: float = 1.0) -> list[Recipe]:
    """The same samples of a rank's step in batches of other sizes, the smaller ones of at least so many samples."""
    samples = recipe.batch * recipe.micro_batches
    sizes = [size for size in range(1, samples + 1) if samples % size == 0 and size >= min(recipe.batch, least)]
    return [replace(recipe, batch=size, micro_batches=samples // size) for size in sizes]


def _fastest(scenario: Scenario, recipes: list[Recipe], present: Recipe) -> Estimate | None:
    """The fastest recipe that fits, if any; of equally fast ones that with the most usual number of micro-batches."""
    fitting = [found for found in map(scenario.estimate, recipes) if found.fits]
    if not fitting:
        return None
    least = min(found.sample_seconds.mean() for found in fitting)
    fast = [found for found in fitting if found.sample_seconds.mean() <= ALIKE * least]
    return min(fast, key=lambda found: abs(np.log(found.recipe.micro_batches / present.micro_batches)))


def count_of(number: int, name: str) -> str:
    """A count and what it is of.

    >>> count_of(1, "pack"), count_of(2, "pack")
    ('1 pack', '2 packs')
    """
    return f"{number:,} {name}{'s' * (number != 1)}"
