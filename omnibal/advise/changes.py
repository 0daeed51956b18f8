"""What would bring how much: settings of the trainer that somebody has, then packs of ours, one on top of the other.

All ways are compared at the same number of samples a step.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from omnibal.advise.batches import Batching
from omnibal.advise.estimate import CAUSES, Estimate, Setting, Way
from omnibal.advise.fitting import fits, missing_bytes, refuse_impossible, what_fits
from omnibal.advise.wait import Trainer
from omnibal.cost import FloatArray
from omnibal.data.limits import MOST, PackLimits
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.plan import Plan

MODEL_ERROR: Final = 0.03
"""Share of an estimated factor that it may be off by beside chance; tools/advise/RESULTS.md has what was measured."""
DEVIATIONS: Final = 2
"""Of chance that an error spans: 19 of 20 estimates lie within."""
UNSEEN: Final = 3
"""Divided by the number of samples: the share of the data that may be unlike all of them, in 19 of 20 cases.

Source: the rule of three; Hanley and Lippman-Hand, "If nothing goes wrong, is everything all right?", JAMA 1983.
"""
MOST_TRIED: Final = 12
"""Numbers of micro-batches that are tried, in about equal ratios."""
MOST_ROUNDS: Final = 4  # in which settings are tried one after another; two to three bring something
LEAST_FILL: Final = 0.75
"""Of the largest pack that packs hold on average: among emptier ones a few large samples lie in packs of their own."""
ALIKE: Final = 1.005
"""Times the fastest one's seconds: what takes no longer is about as fast."""
LEAST_TOKENS: Final = 1024
"""Of smaller batches on average: products of fewer rows do not keep a device as busy as counted costs have it."""
SHARING_LESS: Final[dict[Trainer, Trainer]] = {"fsdp": "zero2", "zero3": "zero2", "zero2": "zero1"}
"""What may be worth a try where its memory suffices."""
PADDED: Final[tuple[Batching, ...]] = ("random", "group_by_length", "batch_rebalance")
Name = Literal[
    "head", "group_by_length", "batch_rebalance", "padding_free", "neat_packing", "batch", "recompute", "trainer",
    "packing", "balance", "limits", "pipeline",
]  # fmt: skip
COSTS: Final[dict[Name, str]] = {
    "head": "one call, target_rows(model); the drop-in makes it",
    "group_by_length": "one setting; the length of every sample, with its images",
    "batch_rebalance": "one setting of a recent transformers; the length of every sample, with its images",
    "padding_free": "one setting",
    "neat_packing": "one setting",
    "batch": "two settings",
    "recompute": "one setting",
    "trainer": "one setting",
    "packing": "attention that keeps samples apart; the drop-in sets it",
    "balance": "lengths of all samples, measured once; the drop-in's sampler",
    "limits": "other limits and accumulation",
    "pipeline": "another launcher: a ds_config with a plan, deepspeed",
}
"""What each takes to adopt."""
BATCHINGS: Final[dict[Batching, tuple[Name, str]]] = {
    "group_by_length": ("group_by_length", "batches of samples of like length"),
    "batch_rebalance": ("batch_rebalance", "batches that cost about the same, of fewer samples where these are long"),
    "flattened": ("padding_free", "the same batches without their padding"),
    "packed": ("neat_packing", "packs of random samples"),
}
"""What trainers offer: its name, and what becomes of batches."""


@dataclass(frozen=True)
class Gain:
    """Samples a second in multiples of those before.

    Attributes:
        factor: The multiple.
        error: How far it may be off: chance, the model's error, and samples that were not seen.
    """

    factor: float = 1.0
    error: float = 0.0

    @classmethod
    def of(cls, before: Estimate, after: Estimate, *, changes: int = 1) -> "Gain":
        """From one estimate to another.

        Args:
            before: On the same draws.
            after: On the same draws.
            changes: How many lie between them, each with an error of its own.
        """
        ratios: FloatArray = before.sample_seconds / after.sample_seconds
        factor, unseen = float(ratios.mean()), min(UNSEEN / len(before.setting.lengths), 1.0)
        chance, model = DEVIATIONS * float(ratios.std(ddof=1)), MODEL_ERROR * max(changes, 1) ** 0.5
        return cls(factor, float(np.hypot(chance, factor * np.hypot(model, unseen))))

    @property
    def brings(self) -> bool:
        """Whether the gain is more than its error."""
        return self.factor - 1 > self.error

    def __mul__(self, other: "Gain") -> "Gain":
        """Both, one on top of the other."""
        factor = self.factor * other.factor
        return Gain(factor, factor * float(np.hypot(self.error / self.factor, other.error / other.factor)))


@dataclass(frozen=True, eq=False)
class Change:
    """One change, on top of those before it that bring something.

    Attributes:
        name: Which.
        detail: What becomes of what.
        gain: What it brings; None where it does not fit.
        after: What is then the case; None where it does not fit, or a pipeline runs it.
        is_setting: Whether the trainer has it without packs of ours.
    """

    name: Name
    detail: str
    gain: Gain | None
    after: Estimate | None
    is_setting: bool = False

    @property
    def factor(self) -> float | None:
        """Samples a second in multiples of those before; None where it does not fit."""
        return None if self.gain is None else self.gain.factor

    @property
    def error(self) -> float:
        """How far the factor may be off."""
        return 0.0 if self.gain is None else self.gain.error

    @property
    def brings(self) -> bool:
        """Whether it brings more than the estimate's error."""
        return self.gain is not None and self.gain.brings

    @property
    def cost(self) -> str:
        """What it takes to adopt."""
        return COSTS[self.name]


@dataclass(frozen=True, eq=False)
class Advice:
    """What is the case, and what would bring something.

    Attributes:
        today: The present way.
        settled: With those settings of the trainer that bring something.
        changes: All that were tried, in their order.
        after: What those that bring something end in, a pipeline aside; packs of ours are part of it where they bring
            something on top of settings, all that the drop-in makes together.
        fitting: What would make the present way fit, where it does not.
        plan: Of the pipeline, where one was planned.
    """

    today: Estimate
    settled: Estimate
    changes: tuple[Change, ...]
    after: Estimate
    fitting: tuple[str, ...] = ()
    plan: Plan | None = None

    @property
    def takes_packs(self) -> bool:
        """Whether packs of ours are part of the advice."""
        return self.after.way.batching == "even"

    @property
    def adopted(self) -> tuple[Change, ...]:
        """Changes that bring something, those of packs only where all of them together do."""
        own = (change for change in self.changes if change.is_setting or change.name == "pipeline" or self.takes_packs)
        return tuple(change for change in own if change.brings)

    @property
    def settings(self) -> Gain:
        """What settings alone bring."""
        count = sum(change.is_setting for change in self.adopted)
        return Gain() if self.settled is self.today else Gain.of(self.today, self.settled, changes=count)

    @property
    def beyond(self) -> Gain:
        """What packs of ours and a pipeline bring on top of settings."""
        count = sum(not change.is_setting for change in self.adopted)
        packs = Gain.of(self.settled, self.after, changes=count) if self.takes_packs else Gain()
        return packs * self._pipeline

    @property
    def factor(self) -> float:
        """Samples a second with all changes that bring something, in multiples of today's."""
        return self._whole.factor

    @property
    def error(self) -> float:
        """How far that may be off."""
        return self._whole.error

    @property
    def _whole(self) -> Gain:
        packs = Gain() if self.after is self.today else Gain.of(self.today, self.after, changes=len(self.adopted))
        return packs * self._pipeline

    @property
    def _pipeline(self) -> Gain:
        return next((change.gain for change in self.adopted if change.gain and change.name == "pipeline"), Gain())


def advise(setting: Setting, today: Way, *, with_pipeline: bool = False) -> Advice:
    """Estimate the present way, and what changes would bring.

    Args:
        setting: Data, model, machines, and what the trainer offers.
        today: The present way.
        with_pipeline: Whether a pipeline is planned too; today's way need not fit then.

    Raises:
        InfeasibleError: Today's mean rank needs more memory than there is.
    """
    now = setting.estimate(today)
    helps, plan = what_fits(now), None
    if not with_pipeline:
        refuse_impossible(now, helps)
    changes, settled = _settings(now)
    own, after = _packs(now, settled)
    changes += own
    if with_pipeline:
        change, plan = pipeline(setting, after)
        changes.append(change)
    return Advice(now, settled, tuple(changes), after, helps, plan)


def _settings(now: Estimate) -> tuple[list[Change], Estimate]:
    """What the trainer offers without packs of ours, and what those settings that bring something end in.

    Settings are tried in rounds until a round brings nothing: batches of like samples, say, may bring something only
    where they are larger, which another setting brings. What a setting brings in several rounds is told as one change,
    and so are ways to bring samples together that took each other's place.
    """
    setting, changes, current = now.setting, list[Change](), now
    batchings = {name for name, _ in BATCHINGS.values()}

    def tried(change: Change | None) -> None:
        nonlocal current
        if change is None:
            return
        if not change.brings or change.after is None:
            if all(found.name != change.name for found in changes):
                changes.append(replace(change, is_setting=True))
            return
        current, gain = change.after, change.gain
        for found in list(changes):
            if found.name == change.name or (found.brings and {found.name, change.name} <= batchings):
                changes.remove(found)
                if found.brings and found.gain and gain:
                    gain = found.gain * gain
        changes.append(replace(change, gain=gain, is_setting=True))

    if "head" in setting.offered:
        tried(_head(now))
    for _ in range(MOST_ROUNDS):
        begun = current
        for batching in BATCHINGS:
            if batching in setting.offered and current.way.batching in PADDED and batching != current.way.batching:
                tried(_batched(current, batching))
        if current.way.limits is None:
            tried(_other_batch(current))
        tried(_recompute(current))
        for _ in SHARING_LESS:
            before_sharing = current
            tried(_trainer(current))
            if current is before_sharing:
                break
        if current is begun:
            break
    return changes, current


def _head(now: Estimate) -> Change:
    spared = now.setting.estimate(replace(now.way, target_rows=True))
    return _change("head", "head and loss on the rows that predict a target alone", now, spared)


def _batched(current: Estimate, batching: Batching) -> Change:
    """Samples brought together in a way that the trainer has."""
    setting, way = current.setting, replace(current.way, batching=batching)
    name, detail = BATCHINGS[batching]
    if batching == "packed":
        way = replace(way, limits=PackLimits(MOST, setting.cutoff or MOST))
        once = setting.estimate(way)  # with as many packs as there were batches a step has other samples
        count = max(round(way.micro_batches * setting.samples_per_step / once.samples_per_step), 1)
        way = replace(way, micro_batches=count)
        detail = f"{detail} of {setting.cutoff or MOST:,} tokens, {count} a rank and step"
    found = setting.estimate(way)
    if way.limits is None and not fits(found):  # the longest samples meet in one batch
        found = _fastest(setting, _batch_sizes(way), way) or found
    if found.way.batch != way.batch:
        detail += f", {_batch_of(found.way)}"
    return _change(name, detail, current, found)


def _other_batch(current: Estimate) -> Change | None:
    """Batches of more samples, or of fewer, with as many a step; None where the present ones are as good."""
    least = LEAST_TOKENS / max(float(current.setting.lengths.llm_tokens.mean()), 1.0)
    found = _fastest(current.setting, _batch_sizes(current.way, least), current.way)
    if found is None or found.way == current.way:
        return None
    return _change("batch", _batch_of(found.way), current, found)


def _batch_sizes(way: Way, least: float = 1.0) -> list[Way]:
    """The same samples of a rank's step in batches of other sizes, the smaller ones of at least so many samples."""
    samples = way.batch * way.micro_batches
    sizes = [size for size in range(1, samples + 1) if samples % size == 0 and size >= min(way.batch, least)]
    return [replace(way, batch=size, micro_batches=samples // size) for size in sizes]


def _batch_of(way: Way) -> str:
    return f"batches of {way.batch}, {way.micro_batches} a rank and step"


def _fastest(setting: Setting, ways: list[Way], present: Way, *, least_fill: float = 0.0) -> Estimate | None:
    """The fastest way of those that fit; None if none does.

    Of ways that are about equally fast, the one whose number of micro-batches is nearest to the present one's.
    """
    tried = (setting.estimate(way) for way in ways)
    fitting = [
        found for found in tried
        if fits(found) and (found.way.micro_batches == present.micro_batches or fill(found) >= least_fill)
    ]  # fmt: skip
    if not fitting:
        return None
    least = min(float(found.sample_seconds.mean()) for found in fitting)
    fast = [found for found in fitting if found.sample_seconds.mean() <= ALIKE * least]
    return min(fast, key=lambda found: abs(np.log(found.way.micro_batches / present.micro_batches)))


def _recompute(current: Estimate) -> Change | None:
    """Without recomputation, in batches or packs as large as then fit; None where nothing is recomputed."""
    if current.way.recompute == "none":
        return None
    setting, plain = current.setting, replace(current.way, recompute="none")
    kept = setting.estimate(plain)
    if not fits(kept):
        smaller = best_packs(setting, plain) if plain.batching == "even" else None
        if plain.batching != "even" and plain.limits is None:
            smaller = _fastest(setting, _batch_sizes(plain), plain)
        kept = smaller or kept
    detail = "no layer does any more"
    if kept.way.micro_batches != current.way.micro_batches:
        packs = f"{count_of(kept.way.micro_batches, 'pack')} of a rank"
        detail += f", in {packs if plain.batching == 'even' else _batch_of(kept.way)}"
    return _change("recompute", detail, current, kept)


def _trainer(current: Estimate) -> Change | None:
    """A trainer that shares less; None where none does."""
    if current.way.trainer not in SHARING_LESS:
        return None
    other = replace(current.way, trainer=SHARING_LESS[current.way.trainer])
    return _change(
        "trainer", f"{other.trainer} in place of {current.way.trainer}", current, current.setting.estimate(other)
    )


def _packs(now: Estimate, settled: Estimate) -> tuple[list[Change], Estimate]:
    """What packs of ours bring on top of settings, change by change; and what they end in, or the settings alone."""
    setting, changes, current = settled.setting, list[Change](), settled

    def tried(change: Change | None, *, belongs: bool = False) -> None:
        nonlocal current
        if change is not None:
            changes.append(change)
            current = change.after if (change.brings or belongs) and change.after is not None else current

    way = replace(settled.way, target_rows=settled.way.target_rows or setting.spares_rows, limits=None)
    if now.way.micro_batches < way.micro_batches:  # smaller batches pad less, smaller packs gain nothing
        way = replace(way, batch=now.way.batch, micro_batches=now.way.micro_batches)
    if way.target_rows and "head" not in setting.offered:
        tried(_head(current), belongs=True)
    balanced = _balanced(setting, way)
    if settled.way.batching in PADDED:
        flattened = setting.estimate(replace(way, batching="flattened"))
        # what only tells packing from balance need not fit: nobody is advised to stay there
        detail, gain = f"{_batch_of(way)}, without padding", Gain.of(current, flattened)
        tried(Change("packing", detail, gain, flattened), belongs=True)
    detail = f"the same samples in {count_of(balanced.way.micro_batches, 'pack')} of a rank that take equally long"
    tried(_change("balance", detail, current, balanced), belongs=True)
    larger = best_packs(setting, balanced.way)  # where ranks mostly gather parameters, only fewer packs pay
    if larger is not None and larger.way != balanced.way:
        even = "" if current is balanced else "even "
        tried(
            _change(
                "limits", f"{count_of(larger.way.micro_batches, f'{even}pack')} of a rank in a step", current, larger
            )
        )
    tried(_recompute(current))
    tried(_trainer(current))
    kept = sum(change.brings for change in changes)
    is_worth_it = current.way.batching == "even" and Gain.of(settled, current, changes=kept).brings
    return changes, current if is_worth_it else settled


def _balanced(setting: Setting, way: Way) -> Estimate:
    """Even packs, as many as today or fewer: as few that they are about equally full.

    None of them is larger than memory allows, if those of today's number are not; else as many as then fit.
    """
    counts = np.unique(np.geomspace(1, way.micro_batches, MOST_TRIED).round().astype(int))[::-1].tolist()
    found = setting.estimate(replace(way, batching="even"))
    if not fits(found):
        return best_packs(setting, found.way) or found
    for count in counts[1:]:
        if fill(found) >= LEAST_FILL:
            break
        larger = setting.estimate(replace(found.way, micro_batches=count))
        if not fits(larger):
            break
        found = larger
    return found


def _change(name: Name, detail: str, before: Estimate, after: Estimate) -> Change:
    if not fits(after):
        missing = bytes_in_words(missing_bytes(after))
        return Change(name, f"{detail}: does not fit, {missing} are missing", None, None)
    return Change(name, detail, Gain.of(before, after), after)


def best_packs(setting: Setting, way: Way) -> Estimate | None:
    """The numbers of even packs, for the samples of a step, that are fastest of those that fit; None if none does."""
    most = max(setting.samples_per_step // setting.cluster.num_devices, 1)
    counts = np.unique(np.geomspace(1, most, MOST_TRIED).round().astype(int)).tolist()
    ways = [replace(way, micro_batches=int(count)) for count in dict.fromkeys([way.micro_batches, *counts])]
    return _fastest(setting, ways, way, least_fill=LEAST_FILL)


def fill(estimate: Estimate) -> float:
    """Of the fuller of both loads, the share of the largest pack that packs hold on average."""
    loads = [batches.loads for batches in estimate.batches]
    vision, tokens = (
        float(np.mean([getattr(load, name).mean() for load in loads])) for name in ("vision_units", "llm_tokens")
    )
    return max(vision / max(estimate.limits.vision_units, 1), tokens / estimate.limits.llm_tokens)


def pipeline(setting: Setting, current: Estimate) -> tuple[Change, Plan | None]:
    """The fastest pipeline that the planner finds for as many samples a step, and its plan; None where none fits."""
    from omnibal.planner import PlanRequest, make_plan  # its loops are compiled, which no other advice needs

    request = PlanRequest(cluster=setting.cluster, global_batch=setting.samples_per_step, schedule="auto")
    try:
        plan = make_plan(setting.profile, setting.lengths, request).plan
    except InfeasibleError as refusal:
        return Change("pipeline", f"none fits: {refusal}", None, None), None
    predicted = plan.predicted
    assert predicted is not None, "a made plan is predicted"
    seconds = predicted.step_seconds * setting.cluster.num_devices / predicted.samples_per_step
    factor = float(current.sample_seconds.mean()) / seconds
    spread = float(current.sample_seconds.std(ddof=1)) / seconds
    detail = f"{plan.layout}, {plan.schedule}, {plan.micro_batches} packs of a replica"
    error = float(np.hypot(DEVIATIONS * spread, MODEL_ERROR * factor))
    return Change("pipeline", detail, Gain(factor, error), None), plan


def count_of(number: int, name: str) -> str:
    """A count and what it is of.

    >>> count_of(1, "pack"), count_of(2, "pack")
    ('1 pack', '2 packs')
    """
    return f"{number:,} {name}{'s' * (number != 1)}"


def causes(advice: Advice) -> list[tuple[str, float, float, float]]:
    """Of each cause, its share today, with settings alone, and with all changes but a pipeline; all of today's time."""
    estimates = (advice.today, advice.settled, advice.after)
    today = float(advice.today.sample_seconds.mean())
    shrunk = [float(estimate.sample_seconds.mean()) / today for estimate in estimates]
    shares = [estimate.shares for estimate in estimates]
    return [(cause, shares[0][cause], shrunk[1] * shares[1][cause], shrunk[2] * shares[2][cause]) for cause in CAUSES]
