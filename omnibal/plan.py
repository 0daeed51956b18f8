"""The plan: what a run does to data, model and memory, on which hardware, as one small JSON file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from omnibal.cluster import OVERHEAD_BYTES, Cluster, Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import MOST_STEP_PACKS
from omnibal.errors import ConfigError, integer, kind
from omnibal.memory.footprint import Footprint, SpreadFootprint, StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, Schedule, ScheduleName, schedule_of
from omnibal.pipeline.simulate import StepSimulation, simulate_step
from omnibal.profile.records import MOST_LAYERS, Level, ModelProfile, check_levels, levels_from_words, levels_in_words
from omnibal.records import Record, read_record

VERSION = 3
ROUNDING = 1e-6  # by which a ratio of nothing may be below 0


@dataclass(frozen=True)
class StagePrediction:
    """What one stage is predicted to do. Seconds are those of an average micro-batch."""

    forward_seconds: float
    backward_seconds: float
    """Recomputation included."""
    recompute_seconds: float
    """The share of the backward pass that only repeats the forward pass."""
    idle_ratio: float
    """Share of the step's pipeline time in which the stage does not compute."""
    pending_bytes: int
    """The most that weight gradients may keep while they wait; beyond it the engine computes the oldest at once."""
    memory: StageMemory
    """At its peak, if a micro-batch is as large as the limits allow."""


@dataclass(frozen=True)
class Prediction:
    """What a step is predicted to take."""

    step_seconds: float
    samples_per_step: float
    """On average, over all replicas."""
    bubble_ratio: float
    """Share of all stages' time that is idle."""
    stages: tuple[StagePrediction, ...]


@dataclass(frozen=True)
class Plan:
    """What a run does to data, model and memory.

    Args:
        limits: The most a pack may hold.
        micro_batches: Micro-batches per step and replica.
        partition: Which layers each stage holds.
        recompute: One level per layer: ``"none"``, ``"selective"`` or ``"full"``.
        predicted: What the step will be like; None for a plan that nobody predicted.
        made_from: What the plan was made from: profile hash, versions, options.
        schedule: ``"1f1b"``, ``"zero-bubble"`` or ``"zero-bubble-lean"``.
        layout: How the run is spread over devices; by default one replica of the partition's stages.
        cluster: What it was planned for; None for a plan that nobody predicted.

    Raises:
        ConfigError: A level or the schedule is unknown, there is not one level for each layer, the prediction or the
            layout is of other stages, or the cluster has too few devices.

    Example:
        >>> plan = Plan(PackLimits(9, 4096), 8, Partition((0, 3, 5)), ("full", "none", "none", "none", "none"))
        >>> plan.num_stages
        2
    """

    limits: PackLimits
    micro_batches: int
    partition: Partition
    recompute: tuple[Level, ...]
    predicted: Prediction | None = None
    made_from: Mapping[str, Any] = field(default_factory=dict)
    schedule: ScheduleName = "1f1b"
    layout: Layout = field(default=None)  # type: ignore[assignment]  # follows from the partition
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        kind("limits", self.limits, PackLimits)
        integer("micro_batches", self.micro_batches, 1, MOST_STEP_PACKS)
        check_levels(self.recompute, self.partition.num_layers)
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.predicted is not None and len(self.predicted.stages) != self.num_stages:
            raise ConfigError(
                f"predicted must be of the plan's {self.num_stages} stages, got {len(self.predicted.stages)}"
            )
        if self.layout is None:
            object.__setattr__(self, "layout", Layout(self.num_stages))
        if self.layout.num_stages != self.num_stages:
            raise ConfigError(f"layout must be of the plan's {self.num_stages} stages, got {self.layout.num_stages}")
        if self.layout.has_units:
            self.make_schedule()  # replicas and micro-batches
        if self.cluster is not None:
            self.cluster.check(self.layout)

    @property
    def num_stages(self) -> int:
        return self.partition.num_stages

    @property
    def links(self) -> Links:
        return self.known_cluster.links_of(self.layout)

    @property
    def known_cluster(self) -> Cluster:
        """The cluster; a ConfigError if the plan has none."""
        if self.cluster is None:
            raise ConfigError("cluster of the plan must be known, got none; give one, such as 4x8xA100-80GB")
        return self.cluster

    @property
    def runs_table(self) -> bool:
        """Whether the engine runs `make_schedule`, its transfers beside the computations; else DeepSpeed's own 1F1B."""
        return self.layout.has_units or self.schedule != "1f1b"

    def make_schedule(self) -> Schedule:
        return schedule_of(self.layout, self.micro_batches, self.schedule)

    def simulate(self, profile: ModelProfile, loads: Iterable[Load]) -> StepSimulation:
        """Predict one step; arguments and errors as of :func:`omnibal.pipeline.simulate.simulate_step`."""
        self._check(profile)
        links, encoder_links = self.links_of_parts
        run = partial(simulate_step, layout=self.layout, recompute=self.recompute, schedule=self.make_schedule())
        return run(profile, self.partition, loads, links, encoder_links=encoder_links)

    @property
    def links_of_parts(self) -> tuple[Links, Links]:
        """Links between replicas of the LLM, and of the encoder."""
        if self.layout.is_spread:
            alone, behind = self.layout.parts
            return self.known_cluster.links_of(behind), self.known_cluster.links_of(alone)
        return self.links, self.known_cluster.links_of(self.layout, of_encoder=True)

    def footprint(self, profile: ModelProfile, load: Load, mean: Load | None = None) -> Footprint | SpreadFootprint:
        """What stages hold for micro-batches of one size; arguments and errors as of ``Footprint`` and ``simulate``.

        ``mean`` is a mean micro-batch of the step that has most images, all of which a spread encoder keeps; by default
        all are like ``load``.
        """
        self._check(profile)
        overhead = OVERHEAD_BYTES if self.cluster is None else self.cluster.overhead_bytes
        if self.layout.is_spread:
            mean = load if mean is None else mean
            return SpreadFootprint(profile, load, mean, self.make_schedule(), self.layout, overhead)
        return Footprint(profile, load, self.make_schedule(), self.layout, overhead)

    def memory(self, profile: ModelProfile, load: Load) -> tuple[StageMemory, ...]:
        """What a device of each stage holds at its peak for such micro-batches."""
        return self.footprint(profile, load).stages(self.partition, self.recompute)

    def _check(self, profile: ModelProfile) -> None:
        encoder, language = self.layout.encoder, self.layout.num_tensor
        own = language if encoder is None else encoder.num_tensor
        if own != language:
            profile.check_matches(tensor_parallel={"vision": own, "language": language})
        elif language != profile.num_tensor:
            raise ConfigError(f"num_tensor of layout must be the profile's {profile.num_tensor}, got {language}")

    def to_record(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "cluster": None if self.cluster is None else asdict(self.cluster),
            "layout": {
                name: value for name, value in asdict(self.layout).items() if (name, value) != ("encoder", None)
            },
            "limits": self.limits.record(),
            "micro_batches": self.micro_batches,
            "partition": list(self.partition.boundaries),
            "recompute": [levels_in_words(self.recompute[a:b]) for a, b in pairwise(self.partition.boundaries)],
            "schedule": self.schedule,
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "made_from": dict(self.made_from),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, one line per key and per stage; its folder is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(_readable(self.to_record()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan; a ConfigError names the file and the key that is wrong."""
        content = read_record(path, _PlanFile, "plan", version=VERSION)
        try:
            if content.predicted is not None:
                _check_numbers("predicted", asdict(content.predicted))
            partition = Partition(content.partition)
            return cls(
                limits=PackLimits(**vars(content.limits)),  # pydantic runs no __init__ of a dataclass
                micro_batches=content.micro_batches,
                partition=partition,
                recompute=_levels(content.recompute, partition),
                schedule=content.schedule,
                predicted=content.predicted,
                made_from=content.made_from,
                layout=content.layout,
                cluster=content.cluster,
            )
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


class _PlanFile(Record):
    version: int
    cluster: Cluster | None
    layout: Layout
    limits: PackLimits
    micro_batches: int
    partition: tuple[Annotated[int, Field(ge=0, le=MOST_LAYERS)], ...]
    recompute: tuple[str, ...]
    schedule: ScheduleName
    predicted: Prediction | None
    made_from: dict[str, Any]


def _check_numbers(place: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_numbers(f"{place}.{name}", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            _check_numbers(f"{place}[{number}]", part)
    elif not (isfinite(value) and value > -ROUNDING):
        raise ConfigError(f"{place} must be finite and at least 0, got {value}")


def _levels(stages: Sequence[str], partition: Partition) -> tuple[Level, ...]:
    if len(stages) != partition.num_stages:
        raise ConfigError(f"recompute must have an entry for each of {partition.num_stages} stages, got {len(stages)}")
    levels: list[Level] = []
    for stage, words in enumerate(stages):
        found = levels_from_words(words)
        if len(found) != len(partition.layers(stage)):
            raise ConfigError(
                f"recompute of stage {stage} must count its {len(partition.layers(stage))} layers, "
                f"such as '2 full, 1 none', got {words!r}"
            )
        levels += found
    return tuple(levels)


def _readable(value: Any, indent: str = "") -> str:
    """JSON with a line for each key of mappings that hold lists or mappings, and for each entry of such lists."""
    inner = indent + "  "
    if isinstance(value, dict) and any(isinstance(entry, list | tuple | dict) for entry in value.values()):
        lines = [f"{inner}{json.dumps(key)}: {_readable(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(entry, str | dict) for entry in value):
        return "[\n" + ",\n".join(inner + json.dumps(entry) for entry in value) + f"\n{indent}]"
    return json.dumps(value)
