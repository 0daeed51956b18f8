"""Instructions: how the windows of an epoch are planned, worked out once from what is known of its samples."""

import math
from typing import Final, NamedTuple

import numpy as np

from omnibal.cost import CostModel
from omnibal.data.balancing.dense import MOST_PACKS
from omnibal.data.balancing.division import StepRule
from omnibal.data.balancing.levelling import Tolerance
from omnibal.data.balancing.scales import PACK, VISION_WEIGHT, Scales, scales_for
from omnibal.data.balancing.sizing import FULL, MeanPack, Survey
from omnibal.data.balancing.tables import Int32Array
from omnibal.data.limits import PackLimits

TIGHT: Final = 0.95
"""Share of the token limit in a mean pack from where on tokens are levelled, too."""
FINE: Final = 256
"""Vision units in a mean pack from where on it does not matter whether those of a step divide by its packs."""
COARSE: Final = 2
"""Vision units in a mean pack from where on steps are trimmed to divisible ones; with fewer that would sort steps."""
TIGHT_COST: Final = 0.5
"""What the cost weighs where tokens are levelled: they almost decide it, and have a limit to keep."""
RELIEF_TRIES: Final = 12
"""Exchanges that are tried to keep the limits, per pack of all."""
SCATTERINGS: Final = 8
"""How often a few packs that hold too much after all exchanges are scattered."""
TOLERANCE: Final = PACK // 500
"""Differences in cost and tokens that are not worth an exchange: 0.2 % of a pack."""


class Instructions(NamedTuple):
    """What all windows of an epoch have in common."""

    scales: Scales
    """How samples are measured."""
    rule: StepRule
    """What every step should hold."""
    driver_by_tokens: bool
    """Whether tokens, otherwise vision units, decide how many samples a step has room for."""
    driver_weights: Int32Array
    """Weight of each size in that decision; 1 per vision unit where a step's are to be divisible by its packs."""
    tolerance: Tolerance
    """Differences between packs that are not worth an exchange."""
    exchange_steps: int
    """Consecutive steps that may exchange samples; 0 leaves the first packs as they are."""
    relief_tries: int
    """Exchanges per pack that are tried to keep the limits."""
    rugged: bool
    """Whether packs have hardly room to spare, or samples do not combine to fill them: then limits are kept before
    loads are made even."""
    together: int
    """Packs that are filled together first, for several steps at once; 0 fills each step's own."""
    scatterings: int
    """How often packs that still hold too much may be scattered."""


def instruct(
    known: Survey,
    limits: PackLimits,
    cost: CostModel,
    *,
    num_replicas: int,
    micro_batches: int,
    num_packs: float,
    exchange_steps: int,
    dense: bool = False,
) -> Instructions:
    """Work out the instructions for steps of which all samples would make ``num_packs`` packs."""
    pack = known.mean_pack(num_packs)
    tight = pack.tokens > TIGHT * limits.llm_tokens
    scales = _choose_scales(pack, limits, cost, tight=tight, one_after_the_other=micro_batches > 1)
    whole_share = _has_whole_vision(pack) and not known.tokens_drive and known.vision.is_volume
    # Where the other load would exceed its limit in some steps, they hold it in proportion.
    other_mean = pack.vision if known.tokens_drive else pack.tokens
    overflows = known.other_load_overflows(num_packs, num_replicas * micro_batches)
    rule = StepRule(
        num_replicas * micro_batches,
        num_replicas,
        limits.vision_units if whole_share else FULL,
        num_replicas if whole_share else 1,
        scales.vision if whole_share else PACK // FULL,
        scales.vision if _has_whole_vision(pack) and not whole_share else 0,
        int(PACK // max(other_mean, 1)) if overflows else 0,
    )
    return Instructions(
        scales,
        rule,
        known.tokens_drive,
        np.arange(limits.vision_units + 1, dtype=np.int32) if whole_share else known.driver.weights,
        _choose_tolerance(scales, tight=tight, one_after_the_other=micro_batches > 1),
        exchange_steps,
        RELIEF_TRIES,
        tight or not known.driver.is_volume,
        MOST_PACKS if dense else 0,
        SCATTERINGS,
    )


def _has_whole_vision(pack: MeanPack) -> bool:
    """Tell whether vision units are so few that it matters whether those of a step divide by its packs."""
    return COARSE <= pack.vision < FINE


def _choose_scales(
    pack: MeanPack, limits: PackLimits, cost: CostModel, *, tight: bool, one_after_the_other: bool
) -> Scales:
    """Packs that run one after the other may differ by a vision unit: in proportion they keep stages equally busy."""
    has_room = pack.tokens * math.ceil(pack.vision) <= limits.llm_tokens * pack.vision
    return scales_for(
        limits.vision_units,
        limits.llm_tokens,
        cost,
        pack_vision=pack.vision,
        pack_tokens=pack.tokens,
        pack_cost=pack.cost / (TIGHT_COST if tight else 1),
        level_tokens=tight,
        in_proportion=_has_whole_vision(pack) and one_after_the_other and not tight and has_room,
    )


def _choose_tolerance(scales: Scales, *, tight: bool, one_after_the_other: bool) -> Tolerance:
    """Where micro-batches follow each other, packs whose vision units differ by one run at different times."""
    units = 7 / 8 if one_after_the_other else 3 / 4
    return Tolerance(
        vision=max(int(units * scales.vision), VISION_WEIGHT * TOLERANCE),
        others=TOLERANCE,
        group=TOLERANCE if tight else 5 * TOLERANCE // 2,
        weights=(scales.vision, scales.tokens),
    )
