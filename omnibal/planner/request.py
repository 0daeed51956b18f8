"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from omnibal.cluster import Cluster, Layout, check_zero_stage, replicas_of
from omnibal.data.limits import PackLimits
from omnibal.data.policies import Method
from omnibal.errors import ConfigError
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.profile.records import ModelProfile


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Hardware, batch and freedom of a plan.

    Raises:
        ConfigError: A number is out of range.
    """

    cluster: Cluster
    """All of its devices take part."""
    global_batch: int
    """Samples per optimizer step, which all plans keep."""
    num_stages: int | None = None
    """None: any number that divides the devices."""
    limits: PackLimits | None = None
    """None: the limits that make the fastest step."""
    head_room: float = 0.05
    """Share of the memory that stays free for fragments and for errors of the prediction."""
    batch_tolerance: float = 0.05
    """The share by which the mean number of samples in a step may differ from ``global_batch``, if limits are free."""
    zero_stage: int = 1
    """0 or 1, see :class:`omnibal.cluster.Layout`."""
    accumulate_float32: bool | None = None
    """Whether gradients are summed in float32, see :class:`omnibal.cluster.Layout`."""
    schedule: ScheduleName | Literal["auto"] = "1f1b"
    """``auto``: the fastest schedule of those that fit."""
    method: Method = "balanced"
    steps: int | None = None
    """Steps that a plan is simulated on; None: at least 4, with 1024 micro-batches in all as far as samples go."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("global_batch", "num_stages", "steps"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} must be positive, got {number}")
        for name in ("head_room", "batch_tolerance"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        check_zero_stage(self.zero_stage)
        least = min(self.budgets(Layout(self.cluster.num_devices)))
        if self.cluster.overhead_bytes >= least:
            raise ConfigError(
                f"overhead_bytes must be less than a device's memory without its head room, {least}, "
                f"got {self.cluster.overhead_bytes}; it is what a device holds beside the model"
            )

    def layouts(self, profile: ModelProfile) -> list[Layout]:
        """Layouts that the search considers, with rising numbers of stages and the profile's tensor ranks.

        Raises:
            ConfigError: The stages do not divide the cluster's devices, or exceed the model's layers.
        """
        num_devices, degree, num_layers = self.cluster.num_devices, profile.tensor_parallel, len(profile.layers)
        replicas_of(self.num_stages or 1, num_devices, num_layers=num_layers, num_tensor=degree)
        ranks = num_devices // degree
        counts = [count for count in range(1, min(ranks, num_layers) + 1) if ranks % count == 0]
        return [
            Layout(
                count, ranks // count, num_tensor=degree, zero_stage=self.zero_stage,
                precision=profile.dtype,  # type: ignore[arg-type]  # a layout checks it
                accumulate_float32=self.accumulate_float32,
            )
            for count in (counts if self.num_stages is None else [self.num_stages])
        ]  # fmt: skip

    @property
    def schedules(self) -> tuple[ScheduleName, ...]:
        """Schedules that the search considers."""
        return tuple(SCHEDULES) if self.schedule == "auto" else (self.schedule,)

    def budgets(self, layout: Layout) -> tuple[int, ...]:
        """The most that a device of each stage may hold: its memory without the head room."""
        return tuple(int(memory * (1 - self.head_room)) for memory in self.cluster.stage_memory_bytes(layout))

    def to_record(self) -> dict[str, Any]:
        """The request as JSON values, without the cluster, which the plan holds."""
        record = asdict(self)
        del record["cluster"]
        return record
