"""The rungs of the measured ladder as plans; what each holds, is predicted to take, and needs of memory."""

from dataclasses import dataclass, field, replace

import numpy as np

from omnibal.cluster import Cluster, Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.partition import Partition, parameter_cut
from omnibal.pipeline.search import search_partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, make_plan
from omnibal.profile.records import ModelProfile
from tools.endtoend.samples import LIMITS, sample_lengths

PROCESSES = 2
BATCH, MICRO_BATCHES = 4, 4
"""Samples of a padded micro-batch; micro-batches of a step, of both replicas together."""
BUDGET_BYTES = {1: 650 * 2**20, 2: 400 * 2**20}
"""Of a process, by the number of stages."""
NO_LIMITS = PackLimits(64, 4096)
"""Above every padded micro-batch."""
LINKS = Links(2e9)
"""Two cores of one machine: a transfer is a copy."""
Groups = list[list[list[int]]]
"""For each step a replica's micro-batches, each a list of samples."""


@dataclass
class Way:
    """One way to train, and what it did.

    Attributes:
        name: What has been balanced.
        plan: Packs, cut, recomputation and schedule.
        padded: Whether micro-batches are random and padded, and not packs.
        seconds: Of timed steps.
        samples: In those.
        losses: Of all steps, the one to warm up first.
        seen: Samples trained on after each of those.
        cpu_seconds: That both processes used in timed steps.
    """

    name: str
    plan: Plan
    padded: bool = False
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def num_replicas(self) -> int:
        """Pipelines side by side."""
        return PROCESSES // self.plan.num_stages

    def groups(self, steps: int, replica: int) -> Groups:
        """A replica's samples: random ones, a fixed number in a micro-batch, or our sampler's packs."""
        lengths, count = sample_lengths(), self.plan.micro_batches
        if self.padded:
            shape = (steps, self.num_replicas, count, BATCH)
            order = np.random.default_rng(0).permutation(len(lengths))[: np.prod(shape)]
            drawn: Groups = order.reshape(shape)[:, replica].tolist()
            return drawn
        sampler = BalancedBatchSampler(
            lengths, self.plan.limits, num_replicas=self.num_replicas, rank=replica, micro_batches=count
        )
        return [[sampler.step(step).pack(replica, pack).tolist() for pack in range(count)] for step in range(steps)]

    def loads(self, steps: int) -> list[tuple[Load, ...]]:
        """What each replica's micro-batches hold, step by step, padding included."""
        replicas = [self.groups(steps, replica) for replica in range(self.num_replicas)]
        return [tuple(map(self._load, step)) for step in zip(*replicas, strict=True)]

    def _load(self, groups: list[list[int]]) -> Load:
        lengths = sample_lengths()
        tokens = [lengths.llm_tokens[group].astype(np.int64) for group in groups]
        if self.padded:
            tokens = [np.full_like(row, row.max()) for row in tokens]
        tiles = [lengths.vision_units[group].sum() for group in groups]
        return Load(tiles, [row.sum() for row in tokens], [(row**2).sum() for row in tokens])

    def predicted_seconds(self, profile: ModelProfile) -> list[float]:
        """What the simulator says of each timed step, from layer times measured before."""
        _, *timed = self.loads(1 + len(self.seconds))
        steps = (
            simulate_step(
                profile, self.plan.partition, loads, LINKS, recompute=self.plan.recompute,
                schedule=self.plan.make_schedule(),
            )
            for loads in timed
        )  # fmt: skip
        return [step.step_seconds for step in steps]

    def stage_bytes(self, profile: ModelProfile) -> list[int]:
        """What each stage would hold at its peak, by our footprint, with the largest micro-batch of 64 steps."""
        largest = Load.stack(Load.stack(step) for step in self.loads(64)).max()
        layout = Layout(self.plan.num_stages, self.num_replicas, zero_stage=0, precision=profile.dtype)
        footprint = Footprint(profile, largest, self.plan.make_schedule(), layout, overhead_bytes=0)
        return [stage.total for stage in footprint.stages(self.plan.partition, self.plan.recompute)]


def ladder(profile: ModelProfile, num_stages: int) -> list[Way]:
    """From padded, cut by parameters and recomputed, to a plan of all together."""
    count = MICRO_BATCHES * num_stages // PROCESSES
    first = Plan(NO_LIMITS, count, parameter_cut(profile, num_stages), ("full",) * len(profile.layers))
    ways = [Way("padded", first, padded=True), Way("+ our data", replace(first, limits=LIMITS))]
    if num_stages > 1:
        ways.append(Way("+ our cut", replace(ways[-1].plan, partition=best_cut(profile, ways[-1]))))
    ways.append(Way("+ memory", unrecomputed(ways[-1].plan)))
    return [*ways, Way("ours", joint_plan(profile, ways[-1]))]


def unrecomputed(plan: Plan) -> Plan:
    """The plan with nothing recomputed."""
    return replace(plan, recompute=("none",) * len(plan.recompute))


def best_cut(profile: ModelProfile, way: Way) -> Partition:
    """The fastest on some of a way's packs that fits with nothing recomputed."""
    loads = [load for step in way.loads(4) for load in step]
    num_stages = way.plan.num_stages
    found = search_partition(profile, loads, num_stages, LINKS, top=len(profile.layers))
    ways = (Way("", replace(unrecomputed(way.plan), partition=one.partition)) for one in found.candidates)
    budget = BUDGET_BYTES[num_stages]
    return next(one.plan.partition for one in ways if max(one.stage_bytes(profile)) <= budget)


def joint_plan(profile: ModelProfile, way: Way) -> Plan:
    """What our planner makes of as many samples a step and the same budget, all else free."""
    num_stages = way.plan.num_stages
    samples = [len(group) for replica in range(way.num_replicas) for step in way.groups(64, replica) for group in step]
    request = PlanRequest(
        cluster=Cluster(
            1, PROCESSES, Device("process", memory_bytes=BUDGET_BYTES[num_stages], link_bytes_per_second=2e9),
            overhead_bytes=0,
        ),
        num_stages=num_stages,
        global_batch=round(sum(samples) / 64),
        head_room=0.0,
        zero_stage=0,
        schedule="auto",
    )  # fmt: skip
    return make_plan(profile, sample_lengths(), request).plan
