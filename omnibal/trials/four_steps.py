"""The OmniBal paper's adaptive recompute, run on the real engine: measure, infer, set, try, retreat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from omnibal.errors import InfeasibleError, OmnibalError
from omnibal.families.base import Module
from omnibal.memory.paper import (
    BlockBytes,
    Blocks,
    count_blocks,
    estimate_block_bytes,
    keep_most,
    levels_of,
    retreat,
)
from omnibal.plan import Plan
from omnibal.trials.run import Trial

_KEPT_AT_FIRST = (2, 1)
"""Blocks of each kind and stage that keep their activations in step 2; fewer where so many end in a crash."""

Run = Callable[[Plan], Trial]


@dataclass(frozen=True)
class FourSteps:
    """What the four steps found.

    Attributes:
        plan: With the levels of the trial that fits.
        block_bytes: What a block of each kind keeps, as inferred.
        trials: All of them, in order.
    """

    plan: Plan
    block_bytes: BlockBytes
    trials: tuple[Trial, ...]


def take_four_steps(
    plan: Plan,
    modules: Sequence[Module | None],
    in_flight: Sequence[int],
    budget_bytes: Sequence[int],
    run: Run,
    *,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> FourSteps:
    """Find the blocks that need not recompute as the paper does, from measured memory alone.

    Args:
        plan: Limits, micro-batches and partition; its levels do not matter.
        modules: Of the model's blocks, from ``block_modules``.
        in_flight: Micro-batches that each stage holds.
        budget_bytes: What a device of each stage may hold.
        run: Trains a few steps under a plan and measures their memory.
        on_trial: Called with each result as it comes.

    Raises:
        InfeasibleError: A stage does not fit with every block recomputed, at first or after the last retreat.
        OmnibalError: A trial fails for another reason than memory.

    Source: Yao et al., OmniBal, ICML 2025, section 4.3; deviations as in :mod:`omnibal.memory.paper`.
    """
    blocks = count_blocks(modules, plan.partition)
    trials: list[Trial] = []

    def keep(kept: Sequence[Blocks], *, retreat_bytes: tuple[int, ...] = ()) -> Trial:
        trial = run(replace(plan, recompute=levels_of(kept, modules, plan.partition), predicted=None))
        trials.append(replace(trial, retreat_bytes=retreat_bytes))
        on_trial(trials[-1])
        if trials[-1].error is not None and not any(trials[-1].missing_bytes):
            raise OmnibalError(f"a trial must run, got {trials[-1].error}")
        return trials[-1]

    def free(trial: Trial) -> list[int]:  # the optimizer's own peak does not depend on what blocks keep
        return [budget - peak for budget, peak in zip(budget_bytes, trial.pass_bytes, strict=True)]

    recomputed = keep([Blocks(0, 0)] * len(blocks))
    if recomputed.error is not None:
        raise InfeasibleError(f"every stage must fit with all blocks recomputed, got {recomputed.error}")
    for most in _KEPT_AT_FIRST:
        some = [Blocks(min(stage.vision, most), min(stage.llm, most)) for stage in blocks]
        if keep(some).peak_bytes:
            break
    else:
        return FourSteps(recomputed.plan, BlockBytes(0, 0), tuple(trials))
    block_bytes = estimate_block_bytes(free(recomputed), free(trials[-1]), some, in_flight)
    kept = keep_most(free(recomputed), blocks, block_bytes, in_flight)
    last = keep(kept)
    while last.error is not None:
        held, kept = kept, retreat(kept, last.missing_bytes, block_bytes, in_flight)
        if kept == held:
            raise InfeasibleError(f"every stage must fit with all blocks recomputed, got {last.error}")
        last = keep(kept, retreat_bytes=last.missing_bytes)
    return FourSteps(last.plan, block_bytes, tuple(trials))
