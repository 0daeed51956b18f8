"""Rules: everything that all windows of an epoch have in common, worked out once."""

import math
from typing import Final, NamedTuple

import numpy as np

from omnibal.cost import CostModel
from omnibal.data.balance.demand import FULL, Demand
from omnibal.data.balance.tables import Int32Array
from omnibal.data.limits import PackLimits

# Loads are counted in units of which a mean pack's cost holds 2**20 to 2**21, and its vision units three times 2**20:
# these come in few sizes and are to be even before all else. Sums of any subset stay within 32 bits.
PACK: Final = 1 << 20
VISION_PACKS: Final = 3
MOST_LOAD: Final = 1 << 23
"""A sample's largest load."""
TOLERANCE: Final = PACK // 500
"""A difference in cost that is not worth an exchange: 0.2 % of a pack."""
PERSISTENCE: Final = 8
"""Rounds of repairs in another attempt, in those of the first: few packs are over a limit then, and soon tried."""
FEW_UNITS: Final = range(2, 256)
"""Vision units in a mean pack for which it matters whether a step's divide by its ranks.

With fewer, whole multiples would sort the steps; with more, one unit is too little to see.
"""
LEAST_SAMPLES: Final = 1.25
"""Samples in a mean pack from which on a step's vision units may be made to divide by its ranks.

Of fewer samples, too few sums do: steps would be of one kind each (χ² 1.28 in place of 1.15 at 1.0, of lengths like
docvqa's at 5/4096).
"""


class Effort(NamedTuple):
    """How much each part of the planner does; ``tools/sampling/ablation.py`` turns the parts off one by one."""

    end_samples: int = 16
    """Samples at a step's end, and behind it, of which one each may change steps to hit the step's share."""
    step_rounds: int = 4
    """Rounds in which the packs of a step meet; what is not even by then stays uneven."""
    vision_rounds: int = 8
    """Rounds in which packs of wrong vision units meet those of other steps."""
    group_rounds: int = 4
    """Rounds in which all packs of neighbouring steps meet."""
    passes: int = 2
    """How often packs meet those of other steps and are levelled again within their own."""
    heaviest_rounds: int = 8
    """Rounds in which the heaviest pack of a step meets all others."""
    repair_rounds: int = 10
    """Rounds in which packs over a limit meet others."""
    small_pack: int = 4
    """Packs of up to so many samples offer all their subsets, at most 4; larger ones single samples and pairs, but
    under 1 single samples alone."""
    mix_deviation: float = 0.4
    """How far exchanges may take a step's mix from that of all samples: random steps are at 1 on average."""
    mix_samples: int = 30
    """Samples by which any step counts as larger there: in a small one, a few exchanges are soon as much as chance."""
    most_mix_deviation: float = 1.0
    """How far they may take it at most, however small the step: as far as random ones are."""


DEFAULT_EFFORT: Final = Effort()


class PackingTask(NamedTuple):
    """What packs are planned for, whatever the samples."""

    limits: PackLimits
    cost: CostModel
    """What is made even besides vision units."""
    num_replicas: int
    """Data-parallel ranks."""
    micro_batches: int
    """Packs per rank and step."""
    exchange_steps: int
    """Consecutive steps that may exchange samples."""
    effort: Effort = DEFAULT_EFFORT

    @property
    def step_packs(self) -> int:
        """Packs of a step."""
        return self.num_replicas * self.micro_batches


class Rules(NamedTuple):
    """What all windows of an epoch have in common."""

    step_packs: int
    """Packs of a step."""
    num_replicas: int
    """Packs of a step that run at the same time."""
    group_steps: int
    """Consecutive steps that may exchange samples."""
    most_vision: int
    """Vision units that a pack may hold."""
    most_tokens: int
    """Tokens that a pack may hold."""
    vision_weight: int
    """Load of a vision unit."""
    token_weight: int
    """Load of a token."""
    costs: tuple[float, float, float, float]
    """Load of a vision unit, a token, a squared token and a squared vision unit in the cost."""
    vision_tolerance: int
    """Vision load by which packs may differ."""
    by_tokens: bool
    """Whether tokens, otherwise vision units, decide how many samples a step has room for: the driving load."""
    most_share: int
    """Driving load that a pack may hold."""
    share_unit: int
    """What the driving load of a step should be a multiple of."""
    repair_first: bool
    """Whether packs are brought under the limits before they are levelled: where samples hardly fit."""
    effort: Effort

    def for_another_attempt(self) -> "Rules":
        """Rules for samples that did not fit: limits first, and more repairs than trials of a number of steps make."""
        rounds = PERSISTENCE * self.effort.repair_rounds
        return self._replace(repair_first=True, effort=self.effort._replace(repair_rounds=rounds))


def make_rules(demand: Demand, task: PackingTask, num_packs: int) -> tuple[Rules, Int32Array]:
    """Work out the rules for epochs of ``num_packs`` packs, and the driving load of each size.

    Where packs have few vision units (tiles) and these drive, those of a step are made a multiple of its ranks: else
    one rank has one more than the others. That has a price: fewer sets of samples do, and what they leave uneven is
    cost (ALGORITHM.md has figures). So it pays where the ViT makes up half of the cost or more. A cost model without
    vision units says nothing about the ViT; then both count alike, as where ViT and LLM are stages of their own.
    """
    limits, cost, num_replicas = task.limits, task.cost, task.num_replicas
    per_pack = demand.num_samples / max(num_packs, 1)
    vision, mean_cost = per_pack * demand.mean_vision, per_pack * demand.mean_cost
    # A power of two: so samples weigh the same on machines whose mean costs differ in the last bit.
    unit = 2.0 ** math.floor(math.log2(max(mean_cost, 1e-300))) / PACK
    vision_weight = int(max(min(VISION_PACKS * PACK // max(vision, 1e-9), MOST_LOAD // max(limits.vision_units, 1)), 1))
    vision_pays = cost.vision_units == 0 or 2 * cost.vision_units * demand.mean_vision >= demand.mean_cost
    multiples = FEW_UNITS.start <= vision < FEW_UNITS.stop and vision_pays and per_pack >= LEAST_SAMPLES
    multiples = multiples and demand.by_volume and not demand.by_tokens
    # Packs that follow each other may differ by a vision unit, those of one micro-batch may not.
    tolerance = 3 / 4 if task.micro_batches == 1 else 7 / 8
    rules = Rules(
        step_packs=task.step_packs,
        num_replicas=num_replicas,
        group_steps=task.exchange_steps,
        most_vision=limits.vision_units,
        most_tokens=limits.llm_tokens,
        vision_weight=vision_weight,
        token_weight=max(MOST_LOAD // 2 // limits.llm_tokens, 1),
        costs=(
            cost.vision_units / unit,
            (cost.llm_tokens + cost.target_tokens) / unit,  # as if every token were a target
            cost.llm_tokens_squared / unit,
            cost.vision_squared / unit,
        ),
        vision_tolerance=max(int(tolerance * vision_weight), VISION_PACKS * TOLERANCE),
        by_tokens=demand.by_tokens,
        most_share=limits.vision_units if multiples else FULL,
        share_unit=num_replicas if multiples else 1,
        repair_first=False,
        effort=task.effort,
    )
    return rules, np.arange(limits.vision_units + 1, dtype=np.int32) if multiples else demand.shares
