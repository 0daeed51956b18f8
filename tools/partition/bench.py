"""Profiles, links and training steps, measured on all ranks at once and only while the machine is quiet."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from transformers import InternVLConfig

from omnibal.config import layout_of, read_config
from omnibal.cost import CostModel, Load
from omnibal.data.epoch import Step
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import build_engine
from omnibal.engine.resolve import ResolvedRun
from omnibal.formats.collate import pack_samples
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.profile.records import Level, ModelProfile
from omnibal.vlm import VisionLanguageModel, load_model
from omnibal.vlm.measure import measure_profile
from tools.partition.models import make_sample
from tools.partition.quiet import MOST_FOREIGN, Instant, foreign_share, wait_until_quiet

PROFILE_TRIES, PATIENCE_SECONDS = 6, 120
MESSAGES = (5, 1)
"""Messages that DeepSpeed sends for an activation (shapes, hidden states, three integer tensors) and a gradient."""
SETTINGS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 0.0,
}


@dataclass(frozen=True)
class Packs:
    """The micro-batches of one step.

    Attributes:
        name: Where they come from.
        packs: For each micro-batch its samples.
        lengths: Of all samples.
    """

    name: str
    packs: tuple[tuple[int, ...], ...]
    lengths: SampleLengths

    @property
    def load(self) -> Load:
        """What each micro-batch holds."""
        tokens = [self.lengths.llm_tokens[list(pack)].astype(float) for pack in self.packs]
        units = [self.lengths.vision_units[list(pack)].sum() for pack in self.packs]
        return Load(units, [part.sum() for part in tokens], [(part**2).sum() for part in tokens])


@dataclass(frozen=True)
class Case:
    """A partition and packs; nothing recomputes where no levels are given, and every layer is trained by default."""

    name: str
    partition: Partition
    packs: Packs
    recompute: tuple[Level, ...] = ()
    frozen: tuple[str, ...] = ()
    """Kinds of layers."""


@dataclass
class Timings:
    """Steps of a case.

    Attributes:
        seconds: Of quiet steps.
        disturbed: How many steps were left out because others used the CPU.
    """

    seconds: list[float] = field(default_factory=list)
    disturbed: int = 0


def measure_model(config: InternVLConfig, limits: PackLimits, frozen: Sequence[str] = ()) -> tuple[ModelProfile, float]:
    """Profile on all ranks at once, as they will train: they share caches and memory.

    Returns:
        Rank 0's profile of the quietest of a few tries, on every rank; and the share of CPU time others took in it.
    """
    model = load_model(config)
    best: tuple[float, ModelProfile] | None = None
    for _ in range(PROFILE_TRIES):
        wait_until_quiet(PATIENCE_SECONDS)
        before = Instant.now()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profile = measure_profile(model, limits, frozen=frozen)
        share = foreign_share(before, Instant.now())
        if best is None or share < best[0]:
            best = share, profile
        if share <= MOST_FOREIGN:
            break
    assert best is not None
    shared: list[object] = [best]
    dist.broadcast_object_list(shared)
    share, profile = shared[0]  # type: ignore[misc]
    return profile, share


def measure_link(sizes: Sequence[int] = (1 << 12, 1 << 18, 1 << 20, 1 << 22), repeats: int = 20) -> CostModel:
    """Seconds of a transfer between ranks 0 and 1 as a fixed part and a part per byte (``llm_tokens`` of the model).

    An activation goes there as so many messages as DeepSpeed sends and a gradient comes back; a transfer is half of it.
    """
    loads, seconds = [], []
    for size in sizes:
        times = [_there_and_back(size) for _ in range(repeats)]
        loads.append(Load(0, size))
        seconds.append(sorted(times)[len(times) // 2] / 2)
    fitted: list[object] = [CostModel.fit(Load.stack(loads), seconds)]
    dist.broadcast_object_list(fitted)
    return fitted[0]  # type: ignore[return-value]


def _there_and_back(size: int) -> float:
    rank, large = dist.get_rank(), torch.zeros(size // 4)
    small = torch.zeros(256, dtype=torch.int32)
    dist.barrier()
    started = time.perf_counter()
    for messages, sender in zip(MESSAGES, (0, 1), strict=True):
        pass_on = partial(dist.send, dst=1 - rank) if rank == sender else partial(dist.recv, src=1 - rank)
        for _ in range(messages - 1):
            pass_on(small)
        pass_on(large)
    return time.perf_counter() - started


def time_steps(
    config: InternVLConfig, cases: Sequence[Case], *, rounds: int, minutes: float, report: Callable[[str], object]
) -> list[Timings]:
    """Train every case in turn, round by round, until each has enough quiet steps.

    Args:
        config: The model.
        cases: All of one number of stages, which is the number of ranks.
        rounds: Quiet steps of each case, after one to warm up.
        minutes: After which to stop anyway.
        report: Called with a line after each round, on rank 0.
    """
    model = load_model(config)
    engines = [make_engine(model, case) for case in cases]
    timings = [Timings() for _ in cases]
    for engine in engines:
        engine.train_batch()
    ends = time.perf_counter() + 60 * minutes
    for number in count(1):
        for engine, timing in zip(engines, timings, strict=True):
            if len(timing.seconds) < rounds:
                _time_step(engine, timing)
        left = sum(len(timing.seconds) < rounds for timing in timings)
        if dist.get_rank() == 0:
            disturbed = sum(timing.disturbed for timing in timings)
            report(f"round {number}: {left} of {len(cases)} cases to go, {disturbed} disturbed steps left out")
        if _agreed(not left or time.perf_counter() > ends):
            break
    return timings


def _time_step(engine: OmnibalEngine, timing: Timings) -> None:
    dist.barrier()
    before = Instant.now()
    engine.train_batch().item()
    dist.barrier()
    seconds = time.perf_counter() - before.wall
    if _agreed(foreign_share(before, Instant.now()) <= MOST_FOREIGN):
        timing.seconds.append(seconds)
    else:
        timing.disturbed += 1
        wait_until_quiet(PATIENCE_SECONDS)


def _agreed(value: bool) -> bool:
    """What rank 0 thinks."""
    shared: list[object] = [value]
    dist.broadcast_object_list(shared)
    return bool(shared[0])


class _SamePacks:
    """A loader that gives the same packs in every step."""

    steps_per_epoch = 1

    def __init__(self, packs: Packs, model: VisionLanguageModel) -> None:
        self.micro_batches = len(packs.packs)
        self._step = Step(0, 0, sum(map(len, packs.packs)), Load([1], [1]))
        self._batches = [
            pack_samples(
                [make_sample(int(packs.lengths.vision_units[i]), int(packs.lengths.llm_tokens[i]), i) for i in pack],
                pad_token_id=0,
                pixel_shape=model.pixel_shape,
            )
            for pack in packs.packs
        ]

    def next_step(self) -> tuple[Step, list[dict[str, torch.Tensor]]]:
        return self._step, list(self._batches)


def make_engine(model: VisionLanguageModel, case: Case) -> OmnibalEngine:
    """This rank's engine, which trains a case again and again."""
    micro_batches, num_stages = len(case.packs.packs), case.partition.num_stages
    omnibal = {"model": {"weights": "random", "frozen": list(case.frozen)}}
    config, section = read_config(SETTINGS | {"gradient_accumulation_steps": micro_batches, "omnibal": omnibal})
    load = case.packs.load
    largest = PackLimits(int(load.vision_units.max()), int(load.llm_tokens.max()))  # a larger pack would recompute
    plan = Plan(largest, micro_batches, case.partition, case.recompute or ("none",) * len(model.records))
    resolved = ResolvedRun(config, section, None, model, layout_of(config, num_stages, 1))
    return build_engine(resolved, plan, _SamePacks(case.packs, model), 100)
