"""Ways to train the same model, in turn, on two processes: the measured ladder; see README.md."""

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from omnibal.config import layout_of, read_config
from omnibal.cost import Load
from omnibal.data.epoch import Step
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import build_engine, meet
from omnibal.engine.resolve import ResolvedRun
from omnibal.formats.collate import pack_samples
from omnibal.profile.records import ModelProfile
from omnibal.vlm import VisionLanguageModel, load_model
from omnibal.vlm.measure import measure_profile
from tools.endtoend.samples import LIMITS, PAD_TOKEN, make_sample, model_config, sample_lengths
from tools.endtoend.ways import Groups, Way, ladder, unrecomputed

SETTINGS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 0.0,
    "omnibal": {"model": {"weights": "random"}},
}


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


def prepared(model: VisionLanguageModel, num_stages: int) -> tuple[ModelProfile, list[Way]]:
    """Costs and ladder; both processes measure at once, since they train at once, and rank 0's counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = measure_profile(model, LIMITS)
    shared: list[Any] = [(profile, ladder(profile, num_stages)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    found: tuple[ModelProfile, list[Way]] = shared[0]
    return found


def build(model: VisionLanguageModel, way: Way, num_steps: int) -> tuple[OmnibalEngine, Batches]:
    """An engine of this process."""
    plan = way.plan
    groups = way.groups(num_steps, replica=dist.get_rank() % way.num_replicas)
    loader = Batches(groups, model, padded=way.padded)
    config, section = read_config(SETTINGS | {"gradient_accumulation_steps": plan.micro_batches})
    resolved = ResolvedRun(config, section, None, model, layout_of(config, plan.num_stages, way.num_replicas))
    return build_engine(resolved, plan, loader, num_steps), loader


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
    samples = torch.tensor([loader.prepare() / way.plan.num_stages])
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


def record(profile: ModelProfile, found: Sequence[Way]) -> dict[str, Any]:
    """All that is kept of a run, as JSON values."""
    padded = Way("", unrecomputed(found[0].plan), padded=True)
    return {
        "stages": found[0].plan.num_stages,
        "ways": [_way_record(profile, way) for way in found],
        "padded_mib": [size / 2**20 for size in padded.stage_bytes(profile)],
        "vision_to_language": _ratio(profile),
    }


def _way_record(profile: ModelProfile, way: Way) -> dict[str, Any]:
    plan = way.plan
    return vars(way) | {
        "plan": {
            "limits": None if way.padded else [plan.limits.vision_units, plan.limits.llm_tokens],
            "micro_batches": plan.micro_batches,
            "partition": plan.partition.boundaries,
            "recomputing_layers": sum(level != "none" for level in plan.recompute),
            "schedule": plan.schedule,
        },
        "predicted_seconds": way.predicted_seconds(profile),
        "memory_mib": [size / 2**20 for size in way.stage_bytes(profile)],
    }


def _ratio(profile: ModelProfile) -> float:
    """What the ViT's blocks cost forward, in those of the LLM, in a pack as large as the limits allow."""
    pack = Load(LIMITS.vision_units, LIMITS.llm_tokens, LIMITS.llm_tokens**2 / 4)
    sums = {
        kind: sum(float(layer.forward_seconds(pack)) for layer in profile.layers if layer.kind == kind)
        for kind in ("vision_block", "decoder_block")
    }
    return sums["vision_block"] / sums["decoder_block"]


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
    profile, found = prepared(model, arguments.stages)
    train_in_turn(model, found, rounds=arguments.rounds, minutes=arguments.minutes)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(record(profile, found), indent=1) + "\n")


if __name__ == "__main__":
    main()
