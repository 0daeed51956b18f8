"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from omnibal.cluster import OVERHEAD_BYTES, Links
from omnibal.data.limits import PackLimits
from omnibal.data.policies import Method
from omnibal.errors import ConfigError
from omnibal.memory.state import TrainingSetup
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.pipeline.simulate import Mode


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Hardware, batch and freedom of a plan.

    Raises:
        ConfigError: A number is out of range.
    """

    num_devices: int
    """Stages × replicas; devices that share layers (tensor parallelism) count as one."""
    global_batch: int
    """Samples per optimizer step: kept whatever the packs are like."""
    budget_bytes: int | tuple[int, ...]
    """Memory of a device, or of a device of each stage (then ``num_stages`` is fixed)."""
    links: Links
    num_stages: int | None = None
    """None: any divisor of ``num_devices``."""
    limits: PackLimits | None = None
    """None: those that make the fastest step."""
    head_room: float = 0.05
    """Share of the budget that stays free: for fragments, and for what the prediction misses."""
    batch_tolerance: float = 0.05
    """By what share the mean number of samples in a step may differ from ``global_batch``, if limits are free."""
    zero_stage: int = 1
    overhead_bytes: int = OVERHEAD_BYTES
    """What a device holds beside the model; a run on CUDA says what it was."""
    accumulate_float32: bool | None = None
    """Whether 16-bit gradients are summed in float32; None: as the engine does by default, under ZeRO stage 1."""
    mode: Mode = "rendezvous"
    """Of 1F1B's transfers."""
    schedule: ScheduleName | Literal["auto"] = "1f1b"
    """``auto``: the faster one of those that fit."""
    method: Method = "balanced"
    steps: int | None = None
    """Steps of the sampler's packs that a plan is simulated on; None: as many as hold 1024 micro-batches, at least
    4, as far as the drawn samples go."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_devices", "global_batch", "steps"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} must be positive, got {number}")
        for name in ("head_room", "batch_tolerance"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.num_stages is not None and (self.num_stages < 1 or self.num_devices % self.num_stages):
            raise ConfigError(f"num_stages must divide the {self.num_devices} devices, got {self.num_stages}")
        if isinstance(self.budget_bytes, tuple) and len(self.budget_bytes) != self.num_stages:
            raise ConfigError(
                f"budget_bytes must be one for each of {self.num_stages} stages, got {len(self.budget_bytes)}"
            )
        if min(self.budgets(1)) < 1:
            raise ConfigError(f"budget_bytes must be positive, got {self.budget_bytes}")
        if self.overhead_bytes >= min(self.budgets(1)):
            raise ConfigError(
                f"overhead_bytes must be less than a budget without its head room, {min(self.budgets(1))}, "
                f"got {self.overhead_bytes}; it is what a device holds beside the model"
            )

    def stage_counts(self, num_layers: int) -> list[int]:
        """Numbers of stages to try, rising.

        Raises:
            ConfigError: The model has fewer layers than the stages that were asked for.
        """
        if self.num_stages is None:
            return [count for count in range(1, num_layers + 1) if self.num_devices % count == 0]
        if self.num_stages > num_layers:
            raise ConfigError(f"num_stages must be at most the model's {num_layers} layers, got {self.num_stages}")
        return [self.num_stages]

    @property
    def schedules(self) -> tuple[ScheduleName, ...]:
        """Those to try."""
        return tuple(SCHEDULES) if self.schedule == "auto" else (self.schedule,)

    def budgets(self, num_stages: int) -> tuple[int, ...]:
        """What a device of each stage may hold: its memory without the head room."""
        given = self.budget_bytes if isinstance(self.budget_bytes, tuple) else (self.budget_bytes,) * num_stages
        return tuple(int(budget * (1 - self.head_room)) for budget in given)

    def allocatable_bytes(self, num_stages: int) -> tuple[int, ...]:
        """What tensors may take of each stage's device, head room included."""
        given = self.budget_bytes if isinstance(self.budget_bytes, tuple) else (self.budget_bytes,) * num_stages
        return tuple(budget - self.overhead_bytes for budget in given)

    def setup(self, num_replicas: int, target_share: float) -> TrainingSetup:
        """What decides about memory beside model and pipeline."""
        return TrainingSetup(
            num_replicas=num_replicas,
            zero_stage=self.zero_stage,
            overhead_bytes=self.overhead_bytes,
            accumulate_float32=self.accumulate_float32,
            target_share=target_share,
        )

    def to_record(self) -> dict[str, Any]:
        """The request as JSON values, links among the others."""
        record = asdict(self)
        links: dict[str, Any] = record.pop("links")
        return record | links
