"""Pack limits worth trying, each with the number of micro-batches that keeps the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import search_limits
from omnibal.data.limits import PackLimits, largest_load, paper_limits
from omnibal.errors import ConfigError
from omnibal.planner.request import PlanRequest
from omnibal.planner.steps import Packing, largest_target_share, samples_per_pack, spread_steps

LEAST_SAMPLES = 8192
"""As many samples at least are packed to learn what packs are like."""
LEAST_STEPS = 32
"""As many steps at least: what the last one lacks of its samples makes the packs of all steps smaller."""
SIMULATED = 1024
"""Micro-batches of all replicas that a packing is judged by, in whole steps: fewer make the choice of limits luck."""
FEWEST_SIMULATED = 4
"""Steps that it is judged by at least."""
MOST_PACKINGS = 40
"""Numbers of micro-batches that are tried, in about equal ratios."""


def packings(lengths: SampleLengths, request: PlanRequest, num_replicas: int) -> list[Packing]:
    """Packings to choose from: those under the request's limits, or first the paper's, then others that waste little.

    Smaller packs make more micro-batches and smaller bubbles; larger ones are better balanced and waste less. For each
    number of micro-batches there is one pair of limits, the one that wastes least.

    Raises:
        ConfigError: There are fewer samples than the global batch needs.
    """
    if len(lengths) < request.global_batch:
        raise ConfigError(f"lengths must hold a step of {request.global_batch} samples, got {len(lengths)}")
    needed = max(LEAST_SAMPLES, max(LEAST_STEPS, (request.steps or 0) + 1) * request.global_batch)
    chosen = np.random.default_rng(request.seed).permutation(len(lengths))[:needed]
    task = _Task(lengths, lengths.take(np.sort(chosen)), request, num_replicas)
    if request.limits is not None:
        request.limits.refuse_none(lengths)
        return [task.pack(request.limits)]
    found = [task.pack(paper_limits(lengths))]
    for packing in map(task.pack, task.spread_limits()):
        known = {other.micro_batches for other in found}
        if packing.micro_batches not in known and task.keeps_batch(packing.samples_per_step):
            found.append(packing)
    return found


@dataclass(frozen=True)
class _Task:
    lengths: SampleLengths
    part: SampleLengths
    """A random part of the lengths."""
    request: PlanRequest
    num_replicas: int

    def pack(self, limits: PackLimits) -> Packing:
        """Pack with the number of micro-batches that comes nearest to the global batch."""
        micro_batches = self._micro_batches(samples_per_pack(self._arrange(limits, micro_batches=1)))
        epoch = self._arrange(limits, micro_batches)
        steps = self.request.steps or max(FEWEST_SIMULATED, SIMULATED // (self.num_replicas * micro_batches))
        packing = Packing.of(epoch, self.part, limits, spread_steps(epoch.num_steps, steps))
        return replace(
            packing,
            largest=largest_load(self.lengths, limits),
            target_share=largest_target_share(self.lengths),
        )

    def spread_limits(self) -> Iterator[PackLimits]:
        """For some numbers of micro-batches the limits that waste least among those that keep the global batch."""
        best: dict[int, PackLimits] = {}
        for scored in search_limits(self.part, self._ceiling(), num_replicas=self.num_replicas, method="isf"):
            count = self._micro_batches(scored.samples_per_pack)
            if self.keeps_batch(scored.samples_per_pack * self.num_replicas * count):
                best.setdefault(count, scored.limits)
        counts = sorted(best)
        places = np.unique(np.geomspace(1, max(len(counts), 1), MOST_PACKINGS).round().astype(int) - 1)
        return (best[counts[place]] for place in places if counts)

    def keeps_batch(self, samples_per_step: float) -> bool:
        """Whether steps of so many samples are as good as the global batch."""
        return abs(samples_per_step / self.request.global_batch - 1) <= self.request.batch_tolerance

    def _arrange(self, limits: PackLimits, micro_batches: int) -> Epoch:
        return arrange_epoch(
            self.part, limits, num_replicas=self.num_replicas, micro_batches=micro_batches,
            method=self.request.method, seed=self.request.seed,
        )  # fmt: skip

    def _micro_batches(self, samples_per_pack: float) -> int:
        return max(1, round(self.request.global_batch / (samples_per_pack * self.num_replicas)))

    def _ceiling(self) -> PackLimits:
        """What a pack holds on average if a step has one micro-batch; at least the largest sample."""
        summary, samples = self.lengths.summary, self.request.global_batch / self.num_replicas
        return PackLimits(
            max(summary.max_vision_units, round(samples * summary.total_vision_units / len(self.lengths))),
            max(summary.max_llm_tokens, round(samples * summary.total_llm_tokens / len(self.lengths)), 1),
        )
