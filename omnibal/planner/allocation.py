"""Devices for each module of a model whose modules have tensor ranks, replicas and stages of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from omnibal.cost import FloatArray, IntArray
from omnibal.errors import ConfigError, InfeasibleError, bytes_in_words, integer

_ROUNDS = 52  # halvings of an interval of stage seconds: a float's mantissa
_CHUNK = 256  # allocations whose stages are counted at once
_ROUNDING = 1e-12  # by which a quotient may exceed the whole number that it is
_MEMORY_TOLERANCE = 1e-4  # of the least memory that an error names


@dataclass(frozen=True)
class ModuleCost:
    """What one module (an encoder, the language model, a generator) costs as a whole.

    Raises:
        ConfigError: A number is out of range.
    """

    name: str
    forward_seconds: Mapping[int, float]
    """Forward pass of one sample by tensor degree, communication between tensor ranks included. A degree that is not
    there (because it does not divide the heads, say) is not tried."""
    _: KW_ONLY
    backward_ratio: float = 2.0
    """Seconds of the backward pass per second of the forward pass: 2 if trained, 3 if trained and recomputed, 1 if
    frozen behind something trained (gradients pass through), 0 if frozen behind nothing trained."""
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    """State and master weights, which replicas share among them (ZeRO stage 1)."""
    activation_bytes: float = 0.0
    """What one sample keeps from forward to backward in the whole module; with ``backward_ratio`` 0, what its forward
    pass needs: one sample's at a time."""
    num_layers: int | None = None
    """The most stages; None: as many as there are devices."""

    def __post_init__(self) -> None:
        for degree, seconds in self.forward_seconds.items():
            integer(f"degree of {self.name}", degree, 1)
            if not 0 < seconds < np.inf:
                raise ConfigError(f"forward_seconds of {self.name} must be positive and finite, got {seconds!r}")
        for name in ("backward_ratio", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name} of {self.name} must be finite and not negative, got {getattr(self, name)!r}")
        if self.num_layers is not None:
            integer(f"num_layers of {self.name}", self.num_layers, 1)


@dataclass(frozen=True)
class ParallelismUnit:
    num_stages: int
    num_replicas: int
    num_tensor: int
    memory_bytes: int  # what a device of the unit's first stage holds

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_replicas * self.num_tensor


@dataclass(frozen=True)
class Allocation:
    """Devices for every module, and the step that they are predicted to make."""

    units: Mapping[str, ParallelismUnit]
    """Devices by module, in the order of data."""
    micro_batches: int
    """Micro-batches of a step: global batch / replicas of the backbone."""
    warm_up_seconds: float
    steady_seconds: float

    @property
    def num_devices(self) -> int:
        return sum(unit.num_devices for unit in self.units.values())

    @property
    def iteration_seconds(self) -> float:
        return self.warm_up_seconds + self.steady_seconds


def allocate(
    modules: Sequence[ModuleCost],
    num_devices: int,
    *,
    global_batch: int,
    device_memory_bytes: float,
    backbone: str = "language",
    degrees: Iterable[int] = (1, 2, 4, 8),
    replicas: Iterable[int] | None = None,
    most: int = 10,
) -> list[Allocation]:
    """The fastest ways to give modules devices of their own, best first.

    The backbone's d replicas take a sample each in a micro-batch, so that a step has m = global_batch / d of them.
    With n = t · r · stages devices (tensor degree t, replicas r) for a module of C seconds per sample in all,

        warm_up = Σ ⌈d / r⌉ · C
        steady = (m − 1) · max(d · t · C / n)
        bytes on a device of the first stage = (r · P + S + L · max(r, d · q)) / n

    for P bytes of parameters and gradients, S of optimizer state, L of a sample's activations and q micro-batches in
    flight: the module's own stages and those of later modules, at most m. The result is the optimum over whole stages.

    Args:
        modules: In the order of data: encoder, language model, generator.
        num_devices: Devices of the cluster; the result may leave some idle.
        device_memory_bytes: What a device may hold of parameters, gradients, optimizer state and activations.
        degrees: Tensor degrees to try; at most the devices of a node, where tensor ranks must not cross nodes.
        replicas: Numbers of replicas to try; by default all divisors of the global batch. Others round m up.

    Raises:
        ConfigError: An argument is out of range.
        InfeasibleError: Nothing fits; the message has the missing devices or bytes.

    Source: Zhang et al., DistTrain, SIGCOMM 2025, sections 5.1 and 5.2 with Algorithm 1. Deviations: a search under
    lower bounds in place of a convex solver; whole stages, at most a module's layers; whole samples during warm-up;
    activations in flight count those of later modules; a step is never shorter than m micro-batches of its slowest
    stage.

    Example:
        >>> encoder = ModuleCost("vision", {1: 0.1}, backward_ratio=0)
        >>> language = ModuleCost("language", {1: 0.1, 2: 0.06}, parameter_bytes=8e9, optimizer_bytes=24e9)
        >>> best, *_ = allocate([encoder, language], 8, global_batch=48, device_memory_bytes=40e9)
        >>> best.units["vision"].num_devices, best.units["language"].num_devices, round(best.iteration_seconds, 3)
        (2, 6, 2.7)
    """
    tried = sorted(set(degrees))
    if not device_memory_bytes > 0:
        raise ConfigError(f"device_memory_bytes must be positive, got {device_memory_bytes!r}")
    problem = _AllocationProblem(
        tuple(modules),
        _backbone_index(modules, backbone, tried),
        integer("num_devices", num_devices, 1),
        integer("global_batch", global_batch, 1),
        tuple(tried),
        None if replicas is None else tuple(replicas),
    )
    return problem.best(device_memory_bytes, integer("most", most, 1)) or problem.refuse(device_memory_bytes)


def _backbone_index(modules: Sequence[ModuleCost], backbone: str, tried: Sequence[int]) -> int:
    names = [module.name for module in modules]
    if len(set(names)) < len(names) or backbone not in names:
        raise ConfigError(f"modules must have names of their own, {backbone!r} among them, got {', '.join(names)}")
    for module in modules:
        if not set(tried) & set(module.forward_seconds):
            raise ConfigError(f"forward_seconds of {module.name} must have one of the degrees {tried}, got none")
    return names.index(backbone)


class _Choices(NamedTuple):
    """Tensor degrees t and replicas r of one module, in arrays that broadcast against those of the other modules."""

    replicas: IntArray
    group: IntArray  # devices of a stage, t · r
    warm_up: FloatArray  # ⌈d / r⌉ · C
    one_stage: FloatArray  # d / r · C: seconds of a micro-batch if the module were one stage
    state: FloatArray  # r · P + S, bytes
    sample: FloatArray  # L · r, bytes of a sample on every replica
    flight: FloatArray  # L · d, bytes of a micro-batch in flight; 0 where nothing waits for a backward pass
    all_kept: FloatArray  # L · d · m, bytes of all micro-batches; 0 likewise
    most_stages: IntArray


@dataclass(frozen=True)
class _AllocationProblem:
    # Whole stages are counted only if a lower bound on the step is below the best found so far. The time grows with the
    # product of all modules' combinations: on one core 0.25 seconds for three modules on 1296 devices with a global
    # batch of 1920, and some seconds for four on 324.
    modules: tuple[ModuleCost, ...]
    backbone: int
    num_devices: int
    global_batch: int
    degrees: tuple[int, ...]
    replicas: tuple[int, ...] | None

    def best(self, memory: float, most: int) -> list[Allocation]:
        found: list[Allocation] = []
        limit = np.inf
        for micro_batches, grid in self._grids():
            bounds = self._bounds(grid, micro_batches, memory)
            order = np.flatnonzero(bounds < limit)
            order = order[np.argsort(bounds.flat[order], kind="stable")]
            # Lowest bounds first. Once they reach the worst of the best, no later combination can be among the best.
            for start in range(0, len(order), _CHUNK):
                chunk = order[start : start + _CHUNK]
                if bounds.flat[chunk[0]] >= limit:
                    break
                index = np.unravel_index(chunk, bounds.shape)
                rows = [_Choices._make(part.ravel()[at] for part in one) for one, at in zip(grid, index, strict=True)]
                found += self._counted(rows, micro_batches, memory)
                found = sorted(found, key=attrgetter("iteration_seconds", "num_devices"))[:most]
                limit = found[-1].iteration_seconds if len(found) == most else np.inf
        return found

    def refuse(self, memory: float) -> NoReturn:
        least = sum(min(set(self.degrees) & set(module.forward_seconds)) for module in self.modules)
        if least > self.num_devices:
            raise InfeasibleError(f"num_devices must be at least {least} for these modules, got {self.num_devices}")
        few, enough = memory, 2 * memory
        while not self._fits(enough):
            few, enough = enough, 2 * enough
        while enough - few > _MEMORY_TOLERANCE * few:
            middle = (few + enough) / 2
            few, enough = (few, middle) if self._fits(middle) else (middle, enough)
        needed, given, missing = (bytes_in_words(round(size)) for size in (enough, memory, enough - memory))
        raise InfeasibleError(
            f"device_memory_bytes must be at least {needed} for these modules on {self.num_devices} devices, "
            f"got {given}: {missing} are missing",
            missing_bytes=round(enough - memory),
        )

    def _fits(self, memory: float) -> bool:
        return any(np.isfinite(self._bounds(grid, count, memory)).any() for count, grid in self._grids())

    def _grids(self) -> Iterator[tuple[int, list[_Choices]]]:
        """For all replicas d of the backbone: micro-batches, and every module's choices along an axis of their own."""
        tried = self.replicas
        if tried is None:
            tried = tuple(r for r in range(1, self.num_devices + 1) if self.global_batch % r == 0)
        for d in tried:
            micro_batches, grid = -(-self.global_batch // d), []
            others = tried if self.replicas is None else [r for r in tried if max(r, d) % min(r, d) == 0]
            for axis, module in enumerate(self.modules):
                degrees = [degree for degree in self.degrees if degree in module.forward_seconds]
                t, r = (part.ravel() for part in np.meshgrid(degrees, [d] if axis == self.backbone else others))
                seconds = (1 + module.backward_ratio) * np.array([module.forward_seconds[degree] for degree in t])
                most_stages = module.num_layers or self.num_devices
                kept = float(d * module.activation_bytes * (module.backward_ratio > 0))
                choices = _Choices(
                    replicas=r,
                    group=t * r,
                    warm_up=-(-d // r) * seconds,
                    one_stage=d / r * seconds,
                    state=r * (module.parameter_bytes + module.gradient_bytes) + module.optimizer_bytes,
                    sample=r * module.activation_bytes,
                    flight=np.full(len(t), kept),
                    all_kept=np.full(len(t), kept * micro_batches),
                    most_stages=np.full(len(t), most_stages),
                )
                shape = [-1 if other == axis else 1 for other in range(len(self.modules))]
                grid.append(_Choices._make(part.reshape(shape) for part in choices))
            yield micro_batches, grid

    def _bounds(self, grid: Sequence[_Choices], micro_batches: int, memory: float) -> FloatArray:
        """Seconds of a step that no whole number of stages undercuts; infinite where the modules do not fit."""
        stages = _least_stages(grid, np.inf, memory)
        least = [one.group * count for one, count in zip(grid, stages, strict=True)]
        # All devices share all work, and no module gets those that the others need at least.
        slowest: FloatArray = sum((one.one_stage * one.group for one in grid), np.zeros(())) / self.num_devices
        for one, own in zip(grid, least, strict=True):
            left = np.maximum(self.num_devices - sum(least) + own, 1)
            slowest = np.maximum(slowest, one.one_stage * one.group / left)
            slowest = np.maximum(slowest, one.one_stage / one.most_stages)
        bounds: FloatArray = np.where(self._fit(grid, stages), sum(self._seconds(grid, slowest, micro_batches)), np.inf)
        return bounds

    def _counted(self, rows: Sequence[_Choices], micro_batches: int, memory: float) -> list[Allocation]:
        """For each row the allocation with the stages whose slowest is fastest."""
        # Modules need fewer stages the longer a stage may take: halve the interval of the slowest stage's seconds.
        slow = _longest(rows, _least_stages(rows, np.inf, memory))
        fast = np.zeros_like(slow)
        for _ in range(_ROUNDS):
            middle = (fast + slow) / 2
            enough = self._fit(rows, _least_stages(rows, middle, memory))
            fast, slow = np.where(enough, fast, middle), np.where(enough, middle, slow)
        stages = _least_stages(rows, slow * (1 + _ROUNDING), memory)
        in_flight = np.minimum(np.cumsum(stages[::-1], axis=0)[::-1], micro_batches)
        units = np.array(
            [
                [count, one.replicas, one.group // one.replicas, np.ceil(held / (one.group * count))]
                for one, count, passes in zip(rows, stages, in_flight, strict=True)
                for held in [one.state + np.maximum(one.sample, one.flight * passes)]
            ]
        )
        names = [module.name for module in self.modules]
        step = np.transpose(self._seconds(rows, _longest(rows, stages), micro_batches)).tolist()
        return [
            Allocation(
                {name: ParallelismUnit(*unit) for name, unit in zip(names, units_of, strict=True)},
                micro_batches,
                *seconds,
            )
            for units_of, seconds in zip(np.moveaxis(units, -1, 0).astype(int).tolist(), step, strict=True)
        ]

    def _fit(self, grid: Sequence[_Choices], stages: Sequence[FloatArray]) -> NDArray[np.bool_]:
        fit: NDArray[np.bool_] = np.less_equal(
            sum(one.group * count for one, count in zip(grid, stages, strict=True)), self.num_devices
        )
        for one, count in zip(grid, stages, strict=True):
            fit = fit & (count <= one.most_stages)
        return fit

    def _seconds(
        self, grid: Sequence[_Choices], slowest: FloatArray, micro_batches: int
    ) -> tuple[FloatArray, FloatArray]:
        warm_up: FloatArray = sum((one.warm_up for one in grid), np.zeros(()))
        return warm_up, (micro_batches - 1) * slowest


def _least_stages(grid: Sequence[_Choices], slowest: FloatArray | float, memory: float) -> list[FloatArray]:
    """The fewest stages of each module that fit and take at most ``slowest`` seconds."""
    stages: list[FloatArray] = []
    behind: FloatArray | float = 0.0  # stages of later modules, each of which has one more micro-batch in flight here
    for one in reversed(grid):
        room = memory * one.group
        # (state + flight · (stages + behind)) / (stages · group) ≤ memory, solved for the stages
        growing = np.where(room > one.flight, room - one.flight, np.nan)
        needed = np.fmin((one.state + one.flight * behind) / growing, (one.state + one.all_kept) / room)
        needed = np.maximum(needed, (one.state + one.sample) / room)
        stages.append(np.ceil(np.maximum(np.maximum(needed, one.one_stage / slowest), 1)))
        behind = behind + stages[-1]
    return stages[::-1]


def _longest(rows: Sequence[_Choices], stages: Sequence[FloatArray]) -> FloatArray:
    longest: FloatArray = np.max([one.one_stage / count for one, count in zip(rows, stages, strict=True)], axis=0)
    return longest
