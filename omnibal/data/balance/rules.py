"""Demand and rules: what is worked out once, before any window is planned.

``survey`` counts how many packs all samples ask for, and by which load a random stream of them is cut into steps;
``make_rules`` says what all windows of an epoch of so many packs have in common.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from omnibal.cost import Load
from omnibal.data.balance.tables import Int32Array, Int64Array
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import rounded_shares, rounded_totals
from omnibal.data.packing_spec import PackingSpec, Ranks

FULL: Final = 1 << 16  # a pack's room for the driving load
# Less than RESERVE: what asks for 0.2 % more packs finds them there.
NOTABLE: Final = 1.002
"""Weights that know which samples do not fit together count where they ask for this many times the volume's packs."""
RESERVE: Final = 0.0025  # least share of packs beyond the bound: room to move samples
CLOSING: Final = 0.001  # share of packs beyond the bound that is left where chance takes the rest
SIGMAS: Final = 6
"""Standard deviations of chance that the reserve covers: about one failure in a billion windows."""
CHUNK: Final = 1 << 20  # samples that are counted at a time
# Loads are counted in units of which a mean pack's cost holds 2**20 to 2**21, and its vision units three times 2**20:
# these come in few sizes and are to be even before all else. Sums of any subset stay within 32 bits.
PACK: Final = 1 << 20
VISION_PACKS: Final = 3
MOST_LOAD: Final = 1 << 23  # a sample's largest load
TOLERANCE: Final = PACK // 500  # a difference in cost that is not worth an exchange: 0.2 % of a pack
REPAIR_ROUNDS: Final = 10  # rounds in which packs over a limit meet others
PERSISTENCE: Final = 8
"""Rounds of repairs in another attempt, in those of the first: few packs are over a limit then, and soon tried."""
FEW_UNITS: Final = range(2, 256)
"""Vision units in a mean pack for which it matters whether a step's divide by its ranks.

With fewer, whole multiples would sort the steps; with more, one unit is too little to see.
"""
LEAST_SAMPLES: Final = 1.25
"""Samples in a mean pack from which on a step's vision units may be made to divide by its ranks.

Of fewer samples, too few sums do: steps would be of one kind each.
"""


class Demand(NamedTuple):
    """What all samples ask for; one over a limit counts as if it were at both."""

    num_samples: int
    mean_vision: float  # vision units of a sample
    mean_cost: float  # cost of a sample
    by_tokens: bool  # whether tokens ask for more packs than vision units do: they drive
    by_volume: bool  # whether the driving load is proportional to the size
    shares: Int32Array  # driving load of each size from 0 to the limit, in units of 1 / ``FULL`` of a pack
    driver: float  # packs per sample that the driving load asks for
    other: float  # packs per sample that the other load asks for
    spread: float  # standard deviation of a sample's driving load, relative to the mean
    other_spread: float  # the same of the other load's difference from the driving one
    # Units of a sample in each further encoder, by the column of the lengths.
    mean_further: Mapping[str, float] = MappingProxyType({})
    further: float = 0.0  # packs per sample that the further encoder ask for whose limit is the tightest
    further_spread: float = 0.0  # standard deviation of a sample's units in that encoder, relative to the mean

    def packs_needed(self, blocks: int, window: int, reserve: float = RESERVE) -> float:
        """Packs for all samples: the bound, and a reserve for what chance makes of the parts that are planned alone.

        Args:
            blocks: Parts of the samples that get equal numbers of steps whatever they hold.
            window: Samples in the parts that are planned alone: these get exact shares of the driving load only.
        """
        number = max(self.num_samples, 1)
        # Sums of n random samples deviate by their spread / sqrt(n), less where the n are a good part of all.
        by_block = self.spread * math.sqrt((blocks - 1) / number)
        by_window = self.other_spread * math.sqrt(max(1 / max(window, 1) - 1 / number, 0))
        return self.num_samples * max(
            self.driver * (1 + max(reserve, CLOSING + SIGMAS * by_block)),
            self.other * (1 + CLOSING + SIGMAS * math.hypot(by_block, by_window)),
            self.further
            * (1 + CLOSING + SIGMAS * self.further_spread * math.sqrt(max(1 / max(window, 1), 1 / number))),
        )


def survey(spec: PackingSpec, samples: IntArray | None = None, drawn: IntArray | None = None) -> Demand:
    """Count what ``samples`` ask for, by default those of the spec; their packs are counted exactly.

    All other figures are those of ``drawn``, a random part of them; None for all of them.
    """
    lengths, limits, cost = spec.lengths, spec.limits, spec.pack_cost
    samples = spec.samples if samples is None else samples
    chosen = samples if drawn is None else drawn
    # Means and spreads are of the drawn part; totals, which decide the number of steps, are of all samples.
    vision, tokens = sizes_of(lengths, limits, chosen)
    part = slice(None) if chosen is None else chosen
    squared = 0 if lengths.vision_squared is None else lengths.vision_squared[part]
    costs = cost(Load(vision, tokens, tokens**2, squared)) - cost.fixed
    weights = _weigh(vision, limits.vision_units), _weigh(tokens, limits.llm_tokens)
    num_samples = len(lengths) if samples is None else len(samples)
    totals = _total_shares(lengths, limits, samples, weights)
    # The load that asks for more packs drives: steps with equal shares of it leave room in the other one.
    by_tokens = totals[1] > totals[0]
    drives, follows = int(by_tokens), int(not by_tokens)
    driver, other = (weights[load][0][(vision, tokens)[load]] for load in (drives, follows))
    # Of further encoders, the packs per sample and the spread of the tightest one.
    means, tightest = dict[str, float](), (0.0, 0.0)
    for name, units in lengths.further_units().items():
        most = limits.most(name)
        fitting = np.minimum(units[part], most).astype(np.float64)
        mean = means[name] = float(fitting.mean()) if len(fitting) else 0.0
        tightest = max(tightest, (mean / max(most, 1), float(fitting.std()) / mean if mean else 0.0))
    number = max(len(vision), 1)
    return Demand(
        num_samples=num_samples,
        mean_vision=float(vision.sum()) / number,
        mean_cost=float(costs.sum()) / number,
        by_tokens=by_tokens,
        by_volume=weights[drives][1],
        shares=weights[drives][0],
        driver=totals[drives] / FULL / max(num_samples, 1),
        other=totals[follows] / FULL / max(num_samples, 1),
        spread=_spread(driver),
        other_spread=_spread(driver, other),
        mean_further=means,
        further=tightest[0],
        further_spread=tightest[1],
    )


def sizes_of(
    lengths: SampleLengths, limits: PackLimits, samples: IntArray | slice | None, *, further: bool = False
) -> tuple[Int64Array, Int64Array]:
    """Vision units and tokens, at least one token; both limits for a sample over one: nothing fits beside it.

    With ``further``, a sample over the limit of a further encoder counts so, too.
    """
    part = slice(None) if samples is None else samples
    vision, tokens = lengths.vision_units[part].astype(np.int64), lengths.llm_tokens[part].astype(np.int64)
    over = (vision > limits.vision_units) | (tokens > limits.llm_tokens)
    for name, units in lengths.further_units().items() if further else ():
        over |= units[part] > limits.most(name)
    np.maximum(tokens, 1, out=tokens)
    vision[over], tokens[over] = limits.vision_units, limits.llm_tokens
    return vision, tokens


Weights = tuple[Int32Array, bool]
"""What each size asks of a pack, in units of 1 / ``FULL``, and whether that is proportional to the size."""


def _total_shares(
    lengths: SampleLengths, limits: PackLimits, samples: IntArray | None, weights: tuple[Weights, Weights]
) -> tuple[float, float]:
    """What all samples ask for, in units of 1 / ``FULL`` of a pack."""
    summary = lengths.summary
    # If nothing is cut to a limit and weights are volumes, the totals that the lengths keep say it: no pass over 100
    # million samples.
    if (
        samples is None
        and all(by_volume for _, by_volume in weights)
        and summary.max_vision_units <= limits.vision_units
        and summary.max_llm_tokens <= limits.llm_tokens
    ):
        return (
            summary.total_vision_units * FULL / max(limits.vision_units, 1),
            summary.total_llm_tokens * FULL / limits.llm_tokens,
        )
    totals = [0, 0]
    for begin in range(0, len(lengths) if samples is None else len(samples), CHUNK):
        part = slice(begin, begin + CHUNK)
        sizes = sizes_of(lengths, limits, part if samples is None else samples[part])
        for load in range(2):
            totals[load] += int(weights[load][0][sizes[load]].sum(dtype=np.int64))
    return totals[0], totals[1]


def _spread(load: Int32Array, other: Int32Array | None = None) -> float:
    if load.sum() == 0 or (other is not None and other.sum() == 0):
        return 0.0
    relative = load / load.mean()
    return float((relative if other is None else relative - other / other.mean()).std())


def _weigh(sizes: IntArray, limit: int) -> Weights:
    """Weigh sizes by what they ask of packs: by volume, or by shares that cannot be combined.

    A limit of 9 holds no two samples of 5: then each of them weighs a whole pack, and 4 and less weigh nothing. See
    ``min_packs`` for these weights.
    """
    # By each k's weights no pack holds more than one (`rounded_shares`), so their total bounds the packs from below:
    # the largest of these bounds is taken.
    counts = np.bincount(sizes, minlength=limit + 1)
    weights = np.arange(limit + 1) * FULL // max(limit, 1)  # by volume
    asked = rounded_totals(counts, FULL) if limit else np.zeros(1, dtype=np.int64)
    best = int(asked.argmax()) + 1 if asked.max() > NOTABLE * float(counts @ weights) else 0
    if best:
        weights = rounded_shares(limit, best) * FULL // (best * limit)
    return weights.astype(np.int32), not best


class Rules(NamedTuple):
    """What all windows of an epoch have in common."""

    step_packs: int  # packs of a step
    num_replicas: int  # packs of a step that run at the same time
    group_steps: int  # consecutive steps that may exchange samples
    most_tokens: int  # tokens that a pack may hold
    token_weight: int  # load of a token
    # Load of a vision unit, a token, a squared token and a squared vision unit in the cost.
    costs: tuple[float, float, float, float]
    # Whether tokens, otherwise vision units, decide how many samples a step has room for: the driving load.
    by_tokens: bool
    most_share: int  # driving load that a pack may hold
    share_unit: int  # what the driving load of a step should be a multiple of
    whole_vision: bool  # whether a step's vision units should be a multiple of its ranks
    # Whether packs are brought under the limits before they are levelled: where samples hardly fit.
    repair_first: bool
    repair_rounds: int  # rounds in which packs over a limit meet others
    share_of: Int32Array  # driving load of each size
    # For each encoder: load of a unit, units that a pack may hold, load by which packs may differ.
    encoders: Int64Array

    def for_another_attempt(self) -> "Rules":
        """Rules for samples that did not fit: limits first, and more repairs than trials of a number of steps make."""
        return self._replace(repair_first=True, repair_rounds=PERSISTENCE * self.repair_rounds)


def make_rules(demand: Demand, spec: PackingSpec, ranks: Ranks, num_packs: int) -> Rules:
    """Work out the rules for epochs of ``num_packs`` packs.

    If packs have few vision units (tiles) and these drive, those of a step are made a multiple of its ranks: else one
    rank has one more than the others. That has a price: fewer sets of samples do, and what they leave uneven is cost
    (PLANNER.md has figures). So it pays if the ViT makes up half of the cost or more. A cost model without vision
    units says nothing about the ViT; then both count alike, as if ViT and LLM were stages of their own.
    """
    limits, cost = spec.limits, spec.pack_cost
    per_pack = demand.num_samples / max(num_packs, 1)
    vision, mean_cost = per_pack * demand.mean_vision, per_pack * demand.mean_cost
    # Costs come in any unit, seconds or FLOPs: they are scaled so that a mean pack has one to two PACK.
    # A power of two: so samples weigh the same on machines whose mean costs differ in the last bit.
    unit = 2.0 ** math.floor(math.log2(max(mean_cost, 1e-300))) / PACK
    # A mean pack's vision units weigh VISION_PACKS times its cost, unless a single sample's load would leave 32 bits.
    vision_weight = int(max(min(VISION_PACKS * PACK // max(vision, 1e-9), MOST_LOAD // max(limits.vision_units, 1)), 1))
    vision_pays = cost.vision_units == 0 or 2 * cost.vision_units * demand.mean_vision >= demand.mean_cost
    multiples = FEW_UNITS.start <= vision < FEW_UNITS.stop and vision_pays and per_pack >= LEAST_SAMPLES
    # Steps are cut by the driving load; where tokens drive, only their ends are trimmed to multiples. Where weights are
    # no volumes that would sort steps (χ² of token lengths 1.29 in place of 1.16, of lengths like docvqa's at 9/4096).
    whole_vision = multiples and demand.by_volume
    multiples = whole_vision and not demand.by_tokens
    # Packs that follow each other may differ by a vision unit, those of one micro-batch may not.
    tolerance = 3 / 4 if ranks.micro_batches == 1 else 7 / 8
    # Where tiles are few, less than one of them; of many patches 0.2 % of a pack, as of cost.
    encoders = [(vision_weight, limits.vision_units, max(int(tolerance * vision_weight), VISION_PACKS * TOLERANCE))]
    for name, mean in demand.mean_further.items():  # a mean pack's units weigh as much as its cost
        weight = max(min(int(PACK / max(per_pack * mean, 1e-9)), MOST_LOAD), 1)
        encoders.append((weight, limits.most(name), TOLERANCE))
    return Rules(
        step_packs=ranks.step_packs,
        num_replicas=ranks.num_replicas,
        group_steps=spec.exchange_steps,
        most_tokens=limits.llm_tokens,
        # Tokens are never levelled, they only have to fit: those of a full pack weigh half of MOST_LOAD.
        token_weight=max(MOST_LOAD // 2 // limits.llm_tokens, 1),
        costs=(
            cost.vision_units / unit,
            (cost.llm_tokens + cost.target_tokens) / unit,  # as if every token were a target
            cost.llm_tokens_squared / unit,
            cost.vision_squared / unit,
        ),
        by_tokens=demand.by_tokens,
        most_share=limits.vision_units if multiples else FULL,
        share_unit=ranks.num_replicas if multiples else 1,
        whole_vision=whole_vision,
        repair_first=False,
        repair_rounds=REPAIR_ROUNDS,
        share_of=np.arange(limits.vision_units + 1, dtype=np.int32) if multiples else demand.shares,
        encoders=np.array(encoders, dtype=np.int64),
    )
