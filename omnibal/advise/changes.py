"""What would bring how much: changes to the present way of training, one on top of the other."""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from omnibal.advise.estimate import CAUSES, Estimate, Setting, Way
from omnibal.advise.fitting import fits, missing_bytes, refuse_impossible, what_fits
from omnibal.advise.wait import Trainer
from omnibal.cost import FloatArray
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import NEARBY, TRAP_WASTE, forced_waste
from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.plan import Plan

MODEL_ERROR: Final = 0.03
"""Share of an estimated factor that it may be off by beside chance; tools/advise/RESULTS.md has what was measured."""
DEVIATIONS: Final = 2
"""Of chance that an error spans: 19 of 20 estimates lie within."""
MOST_TRIED: Final = 12
"""Numbers of micro-batches that are tried, in about equal ratios."""
LEAST_FILL: Final = 0.75
"""Of their limits that packs hold on average: else the planner would put more into them, and a step would grow."""
GROWTH: Final = 1.2
"""Of a step's samples at a time, where one pack of a rank has room for more."""
TOKEN_MULTIPLE: Final = 64
SHARING_LESS: Final[dict[Trainer, Trainer]] = {"fsdp": "zero2", "zero3": "zero2", "zero2": "zero1"}
"""What may be worth a try where its memory suffices."""
Name = Literal["head", "packing", "balance", "limits", "recompute", "trainer", "pipeline"]
COSTS: Final[dict[Name, str]] = {
    "head": "one call, target_rows(model); the drop-in makes it",
    "packing": "attention that keeps samples apart; the drop-in sets it",
    "balance": "lengths of all samples, measured once; the drop-in's sampler",
    "limits": "other limits and accumulation, no more samples a step",
    "recompute": "one setting",
    "trainer": "one setting",
    "pipeline": "another launcher: a ds_config with a plan, deepspeed",
}
"""What each takes to adopt."""


@dataclass(frozen=True, eq=False)
class Change:
    """One change, on top of those before it that bring something.

    Attributes:
        name: Which.
        detail: What becomes of what.
        factor: Samples a second in multiples of those before it; None where it does not fit.
        error: How far the factor may be off, chance and model together.
        after: What is then the case; None where it does not fit, or a pipeline runs it.
    """

    name: Name
    detail: str
    factor: float | None
    error: float
    after: Estimate | None

    @property
    def brings(self) -> bool:
        """Whether it brings more than the estimate's error."""
        return self.factor is not None and self.factor - 1 > self.error

    @property
    def cost(self) -> str:
        """What it takes to adopt."""
        return COSTS[self.name]


@dataclass(frozen=True, eq=False)
class Advice:
    """What is the case, and what would bring something.

    Attributes:
        today: The present way.
        changes: All that were tried, in their order.
        after: What those that bring something end in, a pipeline aside; where one of the first three does, with them
            all, for the drop-in brings them together.
        fitting: What would make the present way fit, where it does not.
        plan: Of the pipeline, where one was planned.
    """

    today: Estimate
    changes: tuple[Change, ...]
    after: Estimate
    fitting: tuple[str, ...] = ()
    plan: Plan | None = None

    @property
    def adopted(self) -> tuple[Change, ...]:
        """Changes that bring something."""
        return tuple(change for change in self.changes if change.brings)

    @property
    def factor(self) -> float:
        """Samples a second with all of them, in multiples of today's."""
        return float(np.prod([change.factor for change in self.adopted if change.factor is not None]))

    @property
    def error(self) -> float:
        """How far that may be off."""
        relative = [change.error / change.factor for change in self.adopted if change.factor]
        return self.factor * float(np.sqrt(np.square(relative).sum()))


def advise(setting: Setting, today: Way, *, with_pipeline: bool = False) -> Advice:
    """Estimate the present way, and what changes would bring.

    Args:
        setting: Data, model, machines.
        today: The present way.
        with_pipeline: Whether a pipeline is planned too; today's way need not fit then.

    Raises:
        InfeasibleError: Today's mean rank needs more memory than there is.
    """
    now = setting.estimate(today)
    helps, plan = what_fits(now), None
    if not with_pipeline:
        refuse_impossible(now, helps)
    changes, after = _ladder(setting, now)
    if with_pipeline:
        change, plan = pipeline(setting, after)
        changes.append(change)
    return Advice(now, tuple(changes), after, helps, plan)


def _ladder(setting: Setting, now: Estimate) -> tuple[list[Change], Estimate]:
    """Changes, each on top of those before it that bring something, and what these end in."""
    changes: list[Change] = []
    current = balanced = now
    if now.way.batching != "even":
        spared = now
        if setting.spares_rows:
            spared = setting.estimate(replace(now.way, target_rows=True))
            changes.append(_change("head", "head and loss on the rows that predict a target alone", now, spared))
            current = spared if changes[-1].brings else now
        balanced = _balanced(setting, spared.way)
        if now.way.batching in ("random", "group_by_length"):
            packed = _packed(balanced)
            changes.append(_change("packing", _packing_of(packed, now.way.batch), current, packed))
            current = packed
        changes.append(_change("balance", "the same samples in packs that take equally long", current, balanced))
        current = balanced if any(change.brings for change in changes) and fits(balanced) else now
    larger = best_packs(balanced.setting, balanced.way)  # where ranks mostly gather parameters, only fewer packs pay
    if larger is not None and larger.way != balanced.way:
        even = "" if current is balanced else "even "
        detail = f"{count_of(larger.way.micro_batches, f'{even}pack')} of a rank in a step"
        change = _change("limits", detail, current, larger)
        changes.append(change)
        current = larger if change.brings else current
    if current.way.recompute != "none":
        change = _recompute(current)
        changes.append(change)
        current = change.after if change.brings and change.after is not None else current
    if current.way.trainer in SHARING_LESS:
        other = replace(current.way, trainer=SHARING_LESS[current.way.trainer])
        detail = f"{other.trainer} in place of {current.way.trainer}"
        change = _change("trainer", detail, current, current.setting.estimate(other))
        changes.append(change)
        current = change.after if change.brings and change.after is not None else current
    return changes, current


def _packing_of(packed: Estimate, batch: int) -> str:
    before = f"padded batches of {batch}" if batch > 1 else "single ones"
    return f"packs of {packed.samples_per_pack:.1f} random samples in place of {before}"


def _balanced(setting: Setting, way: Way) -> Estimate:
    """Even packs, as many as today or fewer: as few that their limits, which hold every sample, are made use of.

    None of them is larger than memory allows, if those of today's number are not.
    """
    counts = np.unique(np.geomspace(1, way.micro_batches, MOST_TRIED).round().astype(int))[::-1].tolist()
    found = setting.estimate(replace(way, batching="even", limits=None))
    for count in counts[1:]:
        if fill(found) >= LEAST_FILL:
            break
        larger = setting.estimate(replace(found.way, micro_batches=count))
        if fits(found) and not fits(larger):
            break
        found = larger
    return found if found.way.micro_batches > 1 else _filled(found)


def _filled(found: Estimate) -> Estimate:
    """One pack of a rank, of more samples a step until its limits are made use of, as the planner would put in."""
    while fill(found) < LEAST_FILL:
        setting = replace(found.setting, samples_per_step=math.ceil(GROWTH * found.setting.samples_per_step))
        larger = setting.estimate(found.way)
        if not fits(larger):
            break
        found = larger
    return found


def _packed(balanced: Estimate) -> Estimate:
    """Random packs under the same limits, of about as many samples a step."""
    setting, way = balanced.setting, replace(balanced.way, batching="packed", limits=balanced.limits)
    found = setting.estimate(way)
    count = max(round(way.micro_batches * setting.samples_per_step / found.samples_per_step), 1)
    return found if count == way.micro_batches else setting.estimate(replace(way, micro_batches=count))


def _recompute(current: Estimate) -> Change:
    """Without recomputation, in packs as large as then fit."""
    setting, plain = current.setting, replace(current.way, recompute="none")
    kept = setting.estimate(plain)
    if not fits(kept) and plain.batching == "even":
        kept = best_packs(setting, plain) or kept
    detail = "no layer does any more"
    if kept.way.micro_batches != current.way.micro_batches:
        detail += f", in {count_of(kept.way.micro_batches, 'pack')} of a rank"
    return _change("recompute", detail, current, kept)


def _change(name: Name, detail: str, before: Estimate, after: Estimate) -> Change:
    factor, chance = _gain(before, after)
    if not fits(after):
        missing = bytes_in_words(missing_bytes(after))
        return Change(name, f"{detail}: does not fit, {missing} are missing", None, 0.0, None)
    return Change(name, detail, factor, float(np.hypot(DEVIATIONS * chance, MODEL_ERROR * factor)), after)


def _gain(before: Estimate, after: Estimate) -> tuple[float, float]:
    """Samples a second in multiples of those before, and how far chance moves that."""
    ratios: FloatArray = before.sample_seconds / after.sample_seconds
    return float(ratios.mean()), float(ratios.std(ddof=1))


def best_packs(setting: Setting, way: Way) -> Estimate | None:
    """The numbers of even packs, for the samples of a step, that are fastest of those that fit; None if none does.

    Of packs that are about equally fast (within half a percent), those nearest to the present number.
    """
    most = max(setting.samples_per_step // setting.cluster.num_devices, 1)
    counts = np.unique(np.geomspace(1, most, MOST_TRIED).round().astype(int)).tolist()
    tried = []
    for count in dict.fromkeys([way.micro_batches, *counts]):
        found = setting.estimate(replace(way, micro_batches=int(count)))
        if fits(found) and (fill(found) >= LEAST_FILL or count == way.micro_batches):
            tried.append(found)
    if not tried:
        return None
    least = min(float(found.sample_seconds.mean()) for found in tried)
    fast = [found for found in tried if found.sample_seconds.mean() <= 1.005 * least]
    return min(fast, key=lambda found: abs(np.log(found.way.micro_batches / way.micro_batches)))


def fill(estimate: Estimate) -> float:
    """Of the fuller of both limits, the share that packs hold on average."""
    loads = [batches.loads for batches in estimate.batches]
    vision, tokens = (
        float(np.mean([getattr(load, name).mean() for load in loads])) for name in ("vision_units", "llm_tokens")
    )
    return max(vision / max(estimate.limits.vision_units, 1), tokens / estimate.limits.llm_tokens)


def proposed_limits(estimate: Estimate, lengths: SampleLengths) -> PackLimits:
    """The limits to give the planner: what even packs hold at most, without a trap.

    Some vision limits waste room whatever the packer does (``omnibal.data.limit_search``): the nearest above that does
    not is taken. Tokens are rounded up to a multiple of 64.
    """
    largest = estimate.limits
    vision = max(largest.vision_units, lengths.summary.max_vision_units)
    tokens = max(largest.llm_tokens, lengths.summary.max_llm_tokens)
    counts = np.bincount(lengths.vision_units)
    above = [vision + step for step in range(max(NEARBY) + 1)]
    good = [limit for limit in above if forced_waste(_resized(counts, limit)) <= TRAP_WASTE]
    return PackLimits((good or above)[0], -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE)


def _resized(counts: np.ndarray, limit: int) -> np.ndarray:
    return np.pad(counts, (0, max(limit + 1 - len(counts), 0)))


def pipeline(setting: Setting, current: Estimate) -> tuple[Change, Plan | None]:
    """The fastest pipeline that the planner finds for as many samples a step, and its plan; None where none fits."""
    from omnibal.planner import PlanRequest, make_plan  # its loops are compiled, which no other advice needs

    request = PlanRequest(cluster=setting.cluster, global_batch=setting.samples_per_step, schedule="auto")
    try:
        plan = make_plan(setting.profile, setting.lengths, request).plan
    except InfeasibleError as refusal:
        return Change("pipeline", f"none fits: {refusal}", None, 0.0, None), None
    predicted = plan.predicted
    assert predicted is not None, "a made plan is predicted"
    seconds = predicted.step_seconds * setting.cluster.num_devices / predicted.samples_per_step
    factor = float(current.sample_seconds.mean()) / seconds
    spread = float(current.sample_seconds.std(ddof=1)) / seconds
    detail = f"{plan.layout}, {plan.schedule}, {plan.micro_batches} packs of a replica"
    error = float(np.hypot(DEVIATIONS * spread, MODEL_ERROR * factor))
    return Change("pipeline", detail, factor, error, None), plan


def count_of(number: int, name: str) -> str:
    """A count and what it is of.

    >>> count_of(1, "pack"), count_of(2, "pack")
    ('1 pack', '2 packs')
    """
    return f"{number:,} {name}{'s' * (number != 1)}"


def causes_before_and_after(advice: Advice) -> list[tuple[str, float, float]]:
    """Of each cause, its share today, and with the changes, both of today's time."""
    before, after = advice.today.shares, advice.after.shares
    shrunk = float(advice.after.sample_seconds.mean() / advice.today.sample_seconds.mean())
    return [(cause, before[cause], shrunk * after[cause]) for cause in CAUSES]
