"""A row of one of the OmniBal paper's tables: model, cluster and data, with costs counted for it."""

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from omnibal.cluster import Cluster, Layout, Links
from omnibal.cost import Load
from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.device import Device
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.pipeline.partition import Partition, parameter_cut
from omnibal.pipeline.schedule import ScheduleName
from omnibal.plan import Plan
from omnibal.planner import PlanRequest
from omnibal.planner.packings import StepLoads
from omnibal.profile.records import Level, ModelProfile
from tools.partition.paper_models import (
    BASELINE,
    DEVICE,
    FRACTION,
    LIMITS,
    MICRO_BATCHES,
    NETWORK,
    OVERHEAD,
    VISION_FACTOR,
    Published,
    counted_profile,
)
from tools.sampling.rules import RULES, Task
from tools.synthetic import tiled_lengths

DRAWN = 100_000
"""Samples of a dataset that packs are made of."""


@dataclass(frozen=True)
class Setting:
    """A row of a table.

    Attributes:
        row: The model, its tensor parallelism, replicas, and the paper's cut.
        lengths: Of the samples; InternVL's mix where left out.
        limits: The paper's.
        batch: Samples of a baseline's micro-batch.
        micro_batches: Of a step; 64 of four samples on four replicas are InternVL-1.5's 1024 samples.
        device: What it runs on.
        fraction: Of the device's peak; with it the last row of Table 7 is the paper's.
        network: Bytes per second between nodes.
        vision_factor: How many times as long as counted a layer of the ViT takes; the paper's Figure 2 says 1.5.
        image_size: Pixels of a tile's side.
        samples: Of the whole dataset.
        frozen: What is not trained.
        target_rows: Whether the head works on the rows that predict a target; the paper's works on all.
    """

    row: Published = BASELINE
    lengths: SampleLengths | None = None
    limits: PackLimits = LIMITS
    batch: int = 4
    micro_batches: int = MICRO_BATCHES
    device: Device = DEVICE
    fraction: float = FRACTION
    network: float = NETWORK
    vision_factor: float = VISION_FACTOR
    image_size: int = 448
    samples: int = 1_200_000
    frozen: tuple[str, ...] = ()
    target_rows: bool = False

    @cached_property
    def drawn(self) -> SampleLengths:
        """The samples that packs are made of."""
        drawn = tiled_lengths(DRAWN, seed=1) if self.lengths is None else self.lengths
        if self.target_rows:
            return drawn
        return SampleLengths(drawn.vision_units, drawn.llm_tokens, vision_squared=drawn.vision_squared)

    @property
    def num_stages(self) -> int:
        """Of the pipeline."""
        return len(self.row.blocks)

    @property
    def num_gpus(self) -> int:
        """All that take part."""
        return self.row.tensor_parallel * self.num_stages * self.row.num_replicas

    @property
    def layout(self) -> Layout:
        """As the paper trained: gradients are summed in 16 bits."""
        return Layout(
            self.num_stages, self.row.num_replicas, num_tensor=self.row.tensor_parallel, accumulate_float32=False
        )

    @property
    def cluster(self) -> Cluster:
        """Replicas and stages talk over the network."""
        return Cluster(1, self.num_gpus, self.device, overhead_bytes=OVERHEAD, links=Links(self.network))

    def plan(
        self, load: Load, partition: Partition, recompute: tuple[Level, ...], schedule: ScheduleName = "1f1b"
    ) -> Plan:
        """A plan for micro-batches of any size, shape (steps, replicas, micro-batches)."""
        limits = PackLimits(int(load.vision_units.max()), int(load.llm_tokens.max()))
        return Plan(
            limits, load.shape[-1], partition, recompute, schedule=schedule, layout=self.layout, cluster=self.cluster
        )

    @cached_property
    def profile(self) -> ModelProfile:
        """Counted costs."""
        device = replace(self.device, fraction=self.fraction)
        return counted_profile(
            self.row, device=device, vision_factor=self.vision_factor, image_size=self.image_size, frozen=self.frozen
        )  # fmt: skip

    @cached_property
    def by_parameters(self) -> Partition:
        """The baseline's cut: by all parameters, whether they are trained or not."""
        return parameter_cut(replace(self, frozen=()).profile, self.num_stages)

    @cached_property
    def request(self) -> PlanRequest:
        """What our planner is asked for: as many samples a step as the paper's packs bring."""
        return PlanRequest(
            cluster=self.cluster,
            num_stages=self.num_stages,
            global_batch=round(self.packed.samples_per_step),
            accumulate_float32=False,  # as the paper trained
            head_room=0.0,  # the paper's method fills a device by trial
        )

    @cached_property
    def packed(self) -> "Batches":
        """ISF's packs in random order."""
        packs = iterative_sampling_and_filtering(self.drawn, self.limits, seed=0)
        packs = packs.take(np.random.default_rng(0).permutation(len(packs)))
        return self._in_steps(packs, packs.load(self.drawn))

    def padded(self, rule: str = "random_batches") -> "Batches":
        """Micro-batches by a rule of ``tools/sampling/rules.py``, padded to their longest samples."""
        packs = RULES[rule](Task(self.drawn, self.limits, self.row.num_replicas, self.batch))
        longest = np.maximum.reduceat(self.drawn.llm_tokens[packs.samples], packs.starts[:-1]).astype(np.int64)
        load = Load(packs.vision_units(self.drawn), packs.sizes * longest, packs.sizes * longest**2)
        return self._in_steps(packs, load)

    def balanced(self, limits: PackLimits, micro_batches: int) -> "Batches":
        """Packs of our sampler."""
        sampler = BalancedBatchSampler(
            self.drawn, limits, num_replicas=self.row.num_replicas, rank=0, micro_batches=micro_batches
        )
        steps = [sampler.step(number) for number in range(sampler.num_steps - 1)]  # the last one may be short
        return Batches(tuple(tuple(step.load) for step in steps), fmean(step.num_samples for step in steps))

    def _in_steps(self, packs: Packs, load: Load) -> "Batches":
        """All whole steps; what runs at the same time lies side by side."""
        replicas, size = self.row.num_replicas, self.row.num_replicas * self.micro_batches
        count = len(packs) // size
        order = np.arange(count * size).reshape(count, self.micro_batches, replicas).transpose(0, 2, 1)
        steps = tuple(tuple(load[replica] for replica in step) for step in order)
        return Batches(steps, float(packs.sizes[: count * size].mean()) * size)


@dataclass(frozen=True)
class Batches:
    """Micro-batches of an epoch: of the same samples whatever they are made by, so that rows compare.

    Attributes:
        steps: For each step a Load per replica.
        samples_per_step: On average.
    """

    steps: StepLoads
    samples_per_step: float
