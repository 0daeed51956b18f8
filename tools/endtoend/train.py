"""Ways to train the same model, in turn, on two processes: the measured ladder; see README.md."""

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from samples import LIMITS, PAD_TOKEN, make_sample, model_config, sample_lengths

from omnibal.cost import Load
from omnibal.data.collate import pack_samples
from omnibal.data.limits import PackLimits
from omnibal.data.sampler import BalancedBatchSampler
from omnibal.engine.config import complete_deepspeed_config, read_config
from omnibal.engine.distributed import meet
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import build_engine
from omnibal.engine.step import Step
from omnibal.memory.footprint import Footprint, Level
from omnibal.memory.state import TrainingSetup
from omnibal.pipeline.balanced import parameter_cut
from omnibal.pipeline.boundaries import Partition
from omnibal.pipeline.partition import search_partition
from omnibal.pipeline.profile import ModelProfile
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.plan import Plan
from omnibal.vlm import VisionLanguageModel, load_model
from omnibal.vlm.measure import measure_profile

BATCH, MICRO_BATCHES = 4, 4
"""Samples of a padded micro-batch; micro-batches of a step, of both replicas together."""
PIPELINE_MIB = 400
"""The memory budget of a stage of two."""
SETTINGS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 0.0,
    "omnibal": {"model": {"weights": "random"}},
}
Groups = list[list[list[int]]]
"""For each step this rank's micro-batches, each a list of samples."""


@dataclass
class Way:
    """One way to train, and what it did.

    Attributes:
        name: What has been balanced.
        partition: Where the model is cut.
        recompute: The level of all layers.
        padded: Whether micro-batches are random and padded.
        seconds: Of timed steps.
        samples: In those.
        losses: Of all steps, the one to warm up first.
        seen: Samples trained on after each of those.
        cpu_seconds: That both processes used in timed steps.
    """

    name: str
    partition: Partition
    recompute: Level
    padded: bool
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    cpu_seconds: float = 0.0


class Batches:
    """A loader of steps that are known beforehand; micro-batches are collated when asked for, before the clock runs."""

    steps_per_epoch = 1

    def __init__(self, groups: Groups, model: VisionLanguageModel, *, padded: bool) -> None:
        self._steps = iter(groups)
        self._model, self._padded = model, padded
        self.micro_batches = len(groups[0])
        self._ready: tuple[Step, list[dict[str, torch.Tensor]]] | None = None

    def prepare(self) -> int:
        """Collate the next step; its samples on this rank."""
        groups = next(self._steps)
        batches = []
        for group in groups:
            longest = int(sample_lengths().llm_tokens[group].max()) if self._padded else 0
            items = [make_sample(index, padded_to=longest) for index in group]
            batches.append(pack_samples(items, pad_token_id=PAD_TOKEN, pixel_shape=self._model.pixel_shape))
        samples = sum(map(len, groups))
        self._ready = Step(0, 0, samples, Load([1], [1])), batches
        return samples

    def next_step(self) -> tuple[Step, list[dict[str, torch.Tensor]]]:
        """The step that was prepared."""
        assert self._ready is not None
        step, batches = self._ready
        return step, list(batches)


def random_groups(steps: int, replica: int, num_replicas: int) -> Groups:
    """Random micro-batches of a fixed number of samples."""
    shape = (steps, num_replicas, MICRO_BATCHES // num_replicas, BATCH)
    order = np.random.default_rng(0).permutation(len(sample_lengths()))[: np.prod(shape)]
    groups: Groups = order.reshape(shape)[:, replica].tolist()
    return groups


def balanced_groups(steps: int, replica: int, num_replicas: int) -> Groups:
    """Our sampler's packs."""
    sampler = BalancedBatchSampler(
        sample_lengths(), LIMITS, num_replicas=num_replicas, rank=replica, micro_batches=MICRO_BATCHES // num_replicas
    )
    return [
        [sampler.step(number).pack(replica, pack).tolist() for pack in range(sampler.micro_batches)]
        for number in range(steps)
    ]


def ways(profile: ModelProfile, num_stages: int) -> list[Way]:
    """From padded, cut by parameters and recomputed to nothing of it."""
    cut = parameter_cut(profile, num_stages)
    found = [Way("padded", cut, "full", padded=True), Way("+ data", cut, "full", padded=False)]
    best = cut
    if num_stages > 1:
        best = best_cut(profile, num_stages)
        found.append(Way("+ model", best, "full", padded=False))
    return [*found, Way("+ memory", best, "none", padded=False)]


def best_cut(profile: ModelProfile, num_stages: int) -> Partition:
    """The fastest on some steps of our sampler's packs that fits with nothing recomputed."""
    lengths = sample_lengths()
    sampler = BalancedBatchSampler(lengths, LIMITS, num_replicas=4, rank=0, micro_batches=MICRO_BATCHES)
    loads = list(sampler.step(0).load(lengths))
    # two cores of one machine: a transfer is a copy
    found = search_partition(profile, loads, num_stages, bandwidth_bytes_per_second=2e9, top=len(profile.layers))
    partitions = [candidate.partition for candidate in found.candidates]
    ways = (Way("", partition, "none", padded=False) for partition in partitions)
    return next(way.partition for way in ways if max(stage_mib(profile, way, num_replicas=1)) <= PIPELINE_MIB)


def measured_profile(model: VisionLanguageModel) -> ModelProfile:
    """Both processes measure at once, since they train at once; rank 0's counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shared: list[object] = [measure_profile(model, LIMITS)]
    dist.broadcast_object_list(shared)
    assert isinstance(shared[0], ModelProfile)
    return shared[0]


def build(model: VisionLanguageModel, way: Way, num_steps: int) -> tuple[OmnibalEngine, Batches]:
    """An engine of this process."""
    num_stages = way.partition.num_stages
    num_replicas = dist.get_world_size() // num_stages
    replica = dist.get_rank() % num_replicas
    groups = (random_groups if way.padded else balanced_groups)(num_steps, replica, num_replicas)
    loader = Batches(groups, model, padded=way.padded)
    config, section = read_config(SETTINGS | {"gradient_accumulation_steps": loader.micro_batches})
    config = complete_deepspeed_config(config, num_stages=num_stages, num_replicas=num_replicas, total_steps=num_steps)
    # limits above every padded micro-batch: none is oversized
    plan = Plan(PackLimits(64, 4096), loader.micro_batches, way.partition, (way.recompute,) * len(model.records))
    return build_engine(config, section, model, plan, loader, None), loader


def train_in_turn(model: VisionLanguageModel, found: Sequence[Way], *, rounds: int, minutes: float) -> None:
    """One step to warm up, then a step of each way in every round, until there are enough or time is up."""
    engines = [build(model, way, rounds + 1) for way in found]
    ends = time.perf_counter() + 60 * minutes
    for number in range(rounds + 1):
        for way, (engine, loader) in zip(found, engines, strict=True):
            _step(way, engine, loader, timed=number > 0)
        late = [time.perf_counter() > ends]
        dist.broadcast_object_list(late)
        if late[0]:
            break


def _step(way: Way, engine: OmnibalEngine, loader: Batches, *, timed: bool) -> None:
    samples = torch.tensor([loader.prepare() / way.partition.num_stages])
    dist.all_reduce(samples)
    before = time.process_time()
    dist.barrier()
    started = time.perf_counter()
    loss = engine.train_batch().item()
    dist.barrier()
    seconds = time.perf_counter() - started
    used = torch.tensor([time.process_time() - before])
    dist.all_reduce(used)
    way.losses.append(loss)
    way.seen.append((way.seen or [0])[-1] + round(samples.item()))
    if timed:
        way.seconds.append(seconds)
        way.samples.append(round(samples.item()))
        way.cpu_seconds += used.item()


def memory_of(profile: ModelProfile, found: Sequence[Way], num_replicas: int) -> dict[str, list[float]]:
    """MiB that each stage would hold at its peak, by our footprint, with the largest micro-batch there was."""
    padded = Way("padded, nothing recomputed", found[0].partition, "none", padded=True)
    return {way.name: stage_mib(profile, way, num_replicas) for way in [*found, padded]}


def stage_mib(profile: ModelProfile, way: Way, num_replicas: int) -> list[float]:
    """MiB of each stage."""
    lengths = sample_lengths()
    groups = (random_groups if way.padded else balanced_groups)(64, 0, num_replicas)
    flat = [group for step in groups for group in step]
    tokens = [
        len(group) * lengths.llm_tokens[group].max() if way.padded else lengths.llm_tokens[group].sum()
        for group in flat
    ]
    tiles = [lengths.vision_units[group].sum() for group in flat]
    largest = Load(max(tiles), max(tokens), max(tokens) * lengths.summary.max_llm_tokens)
    schedule = one_f_one_b(way.partition.num_stages, len(groups[0]))
    footprint = Footprint(profile, largest, schedule, TrainingSetup(num_replicas=num_replicas, zero_stage=0))
    stages = footprint.stages(way.partition, (way.recompute,) * len(profile.layers))
    return [stage.total / 2**20 for stage in stages]


def main() -> None:
    """Train, and write what came of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, choices=(1, 2), required=True, help="2: a pipeline; 1: two replicas")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=4.0, help="after which no round begins")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    meet("gloo")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {dist.get_rank() % (os.cpu_count() or 1)})
    model = load_model(model_config())
    profile = measured_profile(model)
    found = ways(profile, arguments.stages)
    train_in_turn(model, found, rounds=arguments.rounds, minutes=arguments.minutes)
    if dist.get_rank() == 0:
        record = {
            "stages": arguments.stages,
            "ways": [vars(way) | {"partition": way.partition.boundaries} for way in found],
            "memory_mib": memory_of(profile, found, dist.get_world_size() // arguments.stages),
            "vision_to_language": _ratio(profile),
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


def _ratio(profile: ModelProfile) -> float:
    """What the ViT's blocks cost forward, in those of the LLM, in a pack as large as the limits allow."""
    pack = Load(LIMITS.vision_units, LIMITS.llm_tokens, LIMITS.llm_tokens**2 / 4)
    sums = {
        kind: sum(float(layer.forward_seconds(pack)) for layer in profile.layers if layer.kind == kind)
        for kind in ("vision_block", "decoder_block")
    }
    return sums["vision_block"] / sums["decoder_block"]


if __name__ == "__main__":
    main()
