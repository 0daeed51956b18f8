"""What one recipe takes and holds, estimated on drawn steps; how much faster another is, and how a gain is said."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, Literal

import numpy as np

from omnibal.advise.batches import GROUPED, Batches, Batching, Samples, even_packs, padded_batches, random_packs
from omnibal.advise.memory import USUAL, Filling, RankMemory, TrainingPrecision, free_levels
from omnibal.advise.wait import Sharding, exposed_seconds, host_seconds, phase_costs, wait
from omnibal.cluster import Cluster
from omnibal.cost import CostModel, FloatArray
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, fullest_load
from omnibal.data.step_size import StepSize, fit_step, lacking_bytes, limits_of_step
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.profile.records import Level, ModelProfile

STARTING: Final = "starting kernels"  # of small micro-batches, whose host takes longer than the device
CAUSES: Final = (
    "useful",
    "padding",
    "waiting for others' ViT",
    "waiting for others' LLM",
    "recomputation",
    "communication",
    STARTING,
)
"""What the devices' time goes to; the update of the weights is useful."""
SOUND: Final = "waiting for others' sounds"
"""A further cause where a model hears."""
DRAWS: Final = 8  # times that samples are drawn anew, to learn how far chance moves an estimate
# Samples of a draw, and steps of a draw; a step of more than MOST_SAMPLES samples is a draw of its own. An epoch of
# packs has whole steps: of few steps, one more would make all packs much smaller.
LEAST_SAMPLES, LEAST_STEPS, MOST_SAMPLES = 4096, 16, 65_536
LEAST_SEARCHED: Final = 32  # steps at least of the samples that limits are searched for: one step more is 3 %
# Share of an estimated factor that it may be off by beside chance; tools/advise/RESULTS.md has what was measured.
MODEL_ERROR: Final = 0.03
# Share of a gain's logarithm that it was off by on GPUs whose costs were not fitted, either way: 1.57 computed and 1.9
# measured on one H200, before costs were fitted to it; 2.09 computed and 1.53 published by OmniBal's authors. Sources:
# tools/gpu/RESULTS.md, tools/paper/RESULTS.md.
CHECKED_ERROR: Final = 0.42
DEVIATIONS: Final = 2  # standard deviations of chance that an error spans: 19 of 20 estimates lie within
# Over the number of samples: the share of the data that may be unlike all of them, in 19 of 20 cases. Source: the rule
# of three; Hanley and Lippman-Hand, "If nothing goes wrong, is everything all right?", JAMA 1983.
UNSEEN: Final = 3
SHARING_MORE: Final[tuple[Sharding, ...]] = ("ddp", "zero1", "zero2", "zero3")  # each holds less than the one before
ADAPTERS: Final = "LoRA of rank 16"
TOGETHER: Final = " together with "


@dataclass(frozen=True)
class Recipe:
    sharding: Sharding = "zero3"
    batching: Batching = "random"
    batch: int = 1
    micro_batches: int = 1
    recompute: Level | tuple[Level, ...] = "full"
    """One level for all layers, or one for each, as ``balance`` chooses them."""
    limits: PackLimits | None = None
    target_rows: bool = False
    """Whether the head works on the rows that predict a target alone, as far as lengths tell them."""
    offloaded: tuple[str, ...] = ()
    """What the host's memory holds, as far as ranks share it: "optimizer", "parameters"."""

    @property
    def batch_text(self) -> str:
        return f"batch {self.batch}, accumulation {self.micro_batches}"

    @property
    def text(self) -> str:
        """The recipe in words."""
        batches = {
            "random": f"batch {self.batch}",
            "group_by_length": f"batch {self.batch} by length",
            "batch_rebalance": f"batch {self.batch} on average, rebalanced",
            "flattened": f"batch {self.batch} without padding",
            "packed": "random packs",
            "even": "balanced packs",
        }[self.batching]
        again = "gradient checkpointing" if self.recompute != "none" else "no gradient checkpointing"
        return f"{self.sharding}, {batches}, accumulation {self.micro_batches}, {again}"


@dataclass(frozen=True, eq=False)
class Scenario:
    """What all recipes are estimated for: data, model, machines and the samples of a step."""

    lengths: SampleLengths
    profile: ModelProfile
    cluster: Cluster  # every device is a rank
    samples_per_step: int  # samples of all ranks, where packs do not decide it
    adapted: ModelProfile | None = None
    """What the layers would cost with adapters, where these are not trained already."""
    spares_rows: bool = False
    """Whether the head can work on target rows alone: the trainer's drop-in does so, and lengths tell them."""
    offered: tuple[Batching | Literal["head"], ...] = ()
    """What the trainer has by one setting or call, without packs of ours: ways to batch, and a head on target rows."""
    fills: bool = False
    """Whether the trainer's drop-in frees layers from recomputation, as many as fit."""
    cutoff: int | None = None  # tokens of the trainer's own packs, where offered has them
    precision: TrainingPrecision = USUAL
    masks: bool = True
    """Whether attention of padded rows is under a dense mask, as transformers' "sdpa" has it."""
    is_whole: bool = False
    """Whether the lengths are those of all samples of the data, or of some that were measured."""
    _batches: dict[Recipe, tuple[Batches, ...]] = field(init=False, default_factory=dict)
    _sizes: dict[int | Recipe, StepSize] = field(init=False, default_factory=dict)

    @cached_property
    def draws(self) -> tuple[Samples, ...]:
        """Samples of some steps each; all recipes get the same ones, so that chance moves their estimates alike."""
        sorted_at_once = -(-GROUPED // self.cluster.num_devices)  # steps, under group_by_length
        least = max(-(-LEAST_SAMPLES // self.samples_per_step), LEAST_STEPS, sorted_at_once)
        count = max(min(least, MOST_SAMPLES // self.samples_per_step), 1) * self.samples_per_step
        rng, draws = np.random.default_rng(0), list[Samples]()
        for _ in range(DRAWS):
            seen = self.lengths
            if not self.is_whole:
                # The bootstrap (Efron, 1979): lengths are drawn anew each time, as if others had been measured.
                seen = seen.take(rng.integers(0, len(seen), len(seen)))
            draws.append(Samples.draw(seen, count, rng))
        return tuple(draws)

    @cached_property
    def typical(self) -> SampleLengths:
        """The samples that limits are searched for, as ``balance`` does it: those of the data, or as many of others."""
        if self.is_whole:
            return self.lengths
        count, seen = LEAST_SEARCHED * self.samples_per_step, len(self.lengths)
        return self.lengths if seen >= count else self.lengths.take(np.random.default_rng(0).integers(0, seen, count))

    @cached_property
    def hears(self) -> bool:
        """Whether the model has an encoder of sound."""
        return "sound forward" in phase_costs(self.profile)

    @property
    def causes(self) -> tuple[str, ...]:
        """``CAUSES``, with ``SOUND`` where the model hears."""
        return (*CAUSES, SOUND) if self.hears else CAUSES

    @property
    def parts(self) -> tuple[str, ...]:
        """The encoders and the LLM, in the order of ``alone``."""
        return ("sound", "vision", "language") if self.hears else ("vision", "language")

    @cached_property
    def alone(self) -> tuple[FloatArray, ...]:
        """For each draw the seconds that every sample takes alone in each encoder and the LLM, (samples, parts)."""
        costs = phase_costs(self.profile)
        parts = [costs[f"{part} forward"] + costs[f"{part} backward"] for part in self.parts]
        # As the planner does, every token counts as a target.
        loads = (samples.all_rows.load for samples in self.draws)
        return tuple(np.stack([cost(load) for cost in parts], axis=1) for load in loads)

    def samples(self, draw: int) -> Samples:
        """The samples of a draw, as the head works on them where packs are trained."""
        return self.draws[draw] if self.spares_rows else self.draws[draw].all_rows

    def batches(self, recipe: Recipe, draw: int) -> Batches:
        shape = {"num_ranks": self.cluster.num_devices, "micro_batches": recipe.micro_batches}
        samples = self.draws[draw] if recipe.target_rows else self.draws[draw].all_rows
        if recipe.batching in ("even", "packed"):
            assert recipe.limits is not None, "packs have limits"
            make = even_packs if recipe.batching == "even" else random_packs
            return make(samples, recipe.limits, **shape)
        return padded_batches(samples, batch=recipe.batch, batching=recipe.batching, **shape)

    def packed(self, recipe: Recipe) -> Recipe:
        """Even packs in place of batches: the limits, and the packs of a rank's step, that ``balance`` would take."""
        lengths, ranks, memory = self.typical, self.cluster.num_devices, self.memory(recipe).with_margin
        if self.fills and recipe.recompute == "full":  # limits are searched for layers that recompute all they may
            memory = replace(memory, recompute=Filling(free_levels(self.profile), None, self.profile).levels(None))
        fit = partial(fit_step, lengths, self.samples_per_step, batch_size=recipe.batch, num_replicas=ranks)
        if recipe.batch not in self._sizes:
            self._sizes[recipe.batch] = fit()
        size = self._sizes[recipe.batch]
        asked = replace(recipe, batching="even", limits=None, micro_batches=1)
        if lacking_bytes(lengths, size.limits, memory) > 0:
            if asked not in self._sizes:
                self._sizes[asked] = size  # where none fit
                with suppress(InfeasibleError):
                    self._sizes[asked] = fit(memory=memory)
            size = self._sizes[asked]
        return replace(asked, limits=size.limits, micro_batches=size.micro_batches)

    def in_packs(self, recipe: Recipe, count: int) -> Recipe:
        """So many even packs of a rank's step, by limits that are found at once; models that hear need a search."""
        ranks = self.cluster.num_devices
        if self.hears:
            return self.packed(replace(recipe, batch=max(self.samples_per_step // (ranks * count), 1)))
        limits = limits_of_step(self.typical, self.samples_per_step, ranks * count)
        return replace(recipe, batching="even", limits=limits, micro_batches=count)

    def memory(self, recipe: Recipe) -> RankMemory:
        return RankMemory(
            self.profile, recipe.sharding, self.cluster, recipe.recompute, recipe.target_rows, recipe.offloaded,
            self.precision,
        )  # fmt: skip

    def estimate(self, recipe: Recipe) -> "Estimate":
        # Batches depend neither on what ranks share nor on what recomputes.
        like = replace(recipe, sharding="zero3", recompute="full", offloaded=())
        if recipe.batching == "even":
            like = replace(like, batch=1)
        if like not in self._batches:
            self._batches[like] = tuple(self.batches(like, draw) for draw in range(DRAWS))
        return Estimate(self, recipe, self._batches[like])


@dataclass(frozen=True, eq=False)
class Estimate:
    scenario: Scenario
    recipe: Recipe
    batches: tuple[Batches, ...]

    @cached_property
    def _costs(self) -> tuple[dict[str, CostModel], dict[str, CostModel]]:
        """Seconds of each phase as it is, and without recomputation."""
        profile = self.scenario.profile
        return phase_costs(profile, recompute=self.recipe.recompute), phase_costs(profile)

    @cached_property
    def spent(self) -> FloatArray:
        """Seconds of a device per sample that go to each of the scenario's causes, shape (draws, causes)."""
        return np.array([self._spent(batches) for batches in self.batches])

    @property
    def sample_seconds(self) -> FloatArray:
        seconds: FloatArray = self.spent.sum(axis=1)
        return seconds

    @property
    def samples_per_second(self) -> float:
        """Samples a second of all ranks together."""
        return self.scenario.cluster.num_devices / float(self.sample_seconds.mean())

    @property
    def shares(self) -> dict[str, float]:
        spent = self.spent.mean(axis=0)
        return dict(zip(self.scenario.causes, (spent / spent.sum()).tolist(), strict=True))

    @property
    def samples_per_step(self) -> float:
        return float(np.mean([batches.samples_per_step for batches in self.batches]))

    @cached_property
    def memory(self) -> RankMemory:
        return self.scenario.memory(self.recipe)

    def filled(self) -> "Estimate":
        """Even packs beside which only those layers recompute that must; smaller ones if that is faster in all."""
        scenario, recipe = self.scenario, self.recipe
        assert recipe.limits is not None, "packs have limits"
        filling = Filling(free_levels(scenario.profile), self.memory.with_margin, scenario.profile)

        def fit(batch: int) -> StepSize:
            found = scenario.packed(replace(recipe, batch=batch))
            assert found.limits is not None, "packs have limits"
            return StepSize(found.limits, found.micro_batches)

        size = filling.best_size(scenario.lengths, StepSize(recipe.limits, recipe.micro_batches), recipe.batch, fit)
        levels = filling.levels(filling.chosen(scenario.lengths, size.limits))
        return scenario.estimate(
            replace(recipe, limits=size.limits, micro_batches=size.micro_batches, recompute=levels)
        )

    @cached_property
    def peaks(self) -> tuple[float, float]:
        """Bytes of the fullest rank of any step, and of a rank on average."""
        ranks = [self.memory.peak_bytes(batches.loads).max(axis=2) for batches in self.batches]
        fullest, mean = max(float(peaks.max()) for peaks in ranks), float(np.mean([peaks.mean() for peaks in ranks]))
        if self.recipe.batching == "even" and self.recipe.limits is not None:  # no step of the run has a fuller pack
            fullest = float(self.memory.peak_bytes(fullest_load(self.scenario.lengths, self.recipe.limits)))
        return fullest, mean

    @property
    def missing_bytes(self) -> int:
        """What the fullest rank lacks, with the margin; negative or 0 where it fits."""
        return int(self.peaks[0] - self.memory.with_margin.budget_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @property
    def needs(self) -> str:
        """Bytes that the fullest rank needs, beside those that it may use."""
        needed, usable = int(self.peaks[0]), self.memory.with_margin.budget_bytes
        return f"needs {bytes_in_words(needed)}, {bytes_in_words(usable)} are usable"

    def _spent(self, batches: Batches) -> FloatArray:
        recipe, steps = self.recipe, batches.loads.shape[0]
        ranks = self.scenario.cluster.num_devices
        # What passes take as they are; without recomputation; and without padding, too.
        loads = batches.timed(masks=self.scenario.masks)
        again, once_through = self._costs
        costs = {phase: cost(loads) for phase, cost in again.items()}
        plain, real = ({phase: cost(each) for phase, cost in once_through.items()} for each in (loads, batches.real))
        run, once, useful = (float(sum(seconds.sum() for seconds in each.values())) for each in (costs, plain, real))
        # A micro-batch takes at least what its host does; all of its phases are taken to last longer alike.
        busy: FloatArray = np.sum(list(costs.values()), axis=0)
        least = np.maximum(host_seconds(self.scenario.profile, recompute=recipe.recompute), busy)
        started = float((least - busy).sum())
        longer = least / np.maximum(busy, np.finfo(float).tiny)  # an empty pack takes no phase any time
        costs = {phase: seconds * longer for phase, seconds in costs.items()}
        waits = {phase: seconds.sum() for phase, seconds in wait(costs, recipe.sharding).items()}
        waited = float(sum(waits.values()))
        # A phase in which the last rank spends less makes up for a part of another one's waits.
        by_part, left = dict[str, float](), waited
        for part in ("vision", "sound"):
            own = float(sum(seconds for phase, seconds in waits.items() if phase.startswith(part)))
            by_part[part] = min(max(own, 0.0), left)
            left -= by_part[part]
        exposed = exposed_seconds(self.memory.held, recipe.sharding, self.scenario.cluster, costs)
        update = sum(layer.optimizer_seconds for layer in self.memory.held.layers) * steps
        update *= ranks if recipe.sharding == "ddp" else 1  # under ZeRO and FSDP each rank updates its share
        beside = [by_part["sound"]] if self.scenario.hears else []
        spent = [
            useful + update,
            once - useful,
            waited - left - sum(beside),
            left,
            run - once,
            float(exposed.sum()) * ranks,
            started,
            *beside,
        ]
        return np.array(spent) / batches.num_samples


def doubling(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``, and ``most`` itself.

    >>> doubling(6)
    [1, 2, 4, 6]
    """
    powers = [2**power for power in range(max(most, 1).bit_length()) if 2**power < most]
    return [*powers, most] if most > 0 else []


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
        f"cluster?{would}; --layouts weighs pipelines and others"
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


@dataclass(frozen=True)
class Speedup:
    """Samples a second in multiples of those before, and how far that may be off."""

    factor: float = 1.0
    error: float = 0.0  # chance, the model's error, and samples that were not seen

    @classmethod
    def of(cls, before: Estimate, after: Estimate, *, changes: int = 1) -> "Speedup":
        """From one estimate to another on the same draws; each change in between has an error of its own."""
        ratios: FloatArray = before.sample_seconds / after.sample_seconds
        factor, unseen = float(ratios.mean()), min(UNSEEN / len(before.scenario.lengths), 1.0)
        chance, model = DEVIATIONS * float(ratios.std(ddof=1)), MODEL_ERROR * max(changes, 1) ** 0.5
        return cls(factor, float(np.hypot(chance, factor * np.hypot(model, unseen))))

    @property
    def brings(self) -> bool:
        return self.factor - 1 > self.error

    def __mul__(self, other: "Speedup") -> "Speedup":
        factor = self.factor * other.factor
        return Speedup(factor, factor * float(np.hypot(self.error / self.factor, other.error / other.factor)))

    @property
    def likely(self) -> tuple[float, float]:
        """The least and the largest factor that are likely: as far off as in checks on GPUs, and by the error."""
        spread = np.hypot(self.error / self.factor, CHECKED_ERROR * np.log(self.factor))
        return self.factor * float(np.exp(-spread)), self.factor * float(np.exp(spread))

    def __str__(self) -> str:
        return f"{self.factor:.2f}x"


@dataclass(frozen=True)
class Way:
    """A way to train, in words, and its samples a second where they are to be said."""

    name: str
    samples_per_second: float | None = None
    lacks: str = ""  # why nobody can train so

    @classmethod
    def of(cls, name: str, estimate: Estimate) -> "Way":
        """A way of data parallelism, as it is estimated."""
        name = f"{name} ({estimate.recipe.text})"
        if not estimate.fits:
            return cls(name, None, f"does not fit: {estimate.needs}")
        return cls(name, estimate.samples_per_second)


def gain_in_words(gains: Sequence[tuple[float, Way]]) -> str:
    """Samples a second in multiples of those of other ways: today's first, then the cheapest alternative's.

    >>> gain_in_words([(1.04, Way("the present configuration", 15.3)), (1.07, Way("ZeRO", 14.9))])
    '1.04x the 15.3 samples/s of the present configuration, 1.07x the 14.9 samples/s of ZeRO'
    >>> gain_in_words([(2.5, Way("random batches")), (1.02, Way("group_by_length"))])
    '2.50x the samples a second of random batches, 1.02x those of group_by_length'
    """
    found = list[str]()
    for factor, way in gains:
        plain = "those" if found else "the samples a second"
        rate = plain if way.samples_per_second is None else f"the {way.samples_per_second:,.1f} samples/s"
        found.append(f"{factor:.2f}x {rate} of {way.name}")
    return ", ".join(found)


def gain_over(samples_per_second: float, ways: Sequence[Way]) -> str:
    """The gain of so many samples a second over ways whose rates are known, and which others cannot be taken."""
    known = [(samples_per_second / way.samples_per_second, way) for way in ways if way.samples_per_second is not None]
    return "; ".join([gain_in_words(known), *(f"{way.name} {way.lacks}" for way in ways if way.lacks)]).lstrip("; ")
