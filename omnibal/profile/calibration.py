"""Measured corrections of counted costs: what passes took, over what was counted of them.

Each of ``PARTS`` gets a factor: measured over counted seconds of a unit of load. In packs that are balanced well all
micro-batches are alike, so loads cannot tell the encoders from the LLM: passes are timed by part (by stage in a
pipeline).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from omnibal.cost import CostModel, FloatArray, Load
from omnibal.errors import ConfigError
from omnibal.profile.records import LayerCost, Level, ModelProfile
from omnibal.records import Record, explain

WARM_UP: Final = 2
"""Steps whose passes are not timed: kernels are chosen and memory is allocated in the first ones."""
STEPS: Final = 20  # steps after which costs are fitted
MOST_PASSES: Final = 4096  # of all ranks together; more tell nothing new
PARTS: Final = ("vision forward", "language forward", "vision backward", "language backward")
"""The parts of a micro-batch's passes; "vision" are all encoders with the projector."""
# Relative errors above it count by their absolute value, so that single slow passes do not move the fit.
_OUTLIER = 0.1
# Keeps the factor of a part that nobody timed at the median of all passes.
_PULL = 0.01


class TimedPass(NamedTuple):
    """A pass of one micro-batch through neighbouring layers."""

    layers: tuple[int, int]  # the first layer, and the one behind the last
    is_backward: bool
    load: tuple[float, ...]  # sizes of the micro-batch, in the order of Load's arguments
    seconds: float


def sizes_of(load: Load) -> list[tuple[float, ...]]:
    """The sizes of each micro-batch of a load, as ``TimedPass`` has them."""
    sizes = [size.name for size in fields(CostModel)[1:]]  # all but "fixed", in the order of Load's arguments
    return list(zip(*(getattr(load, size).tolist() for size in sizes), strict=True))


class Calibration(Record):
    """Factors that make counted costs those that a run measured."""

    version: Literal[2] = 2
    device: str  # what the passes ran on
    counted_for: str  # the device that the corrected costs were counted for
    layers: str  # hash of the model's layers
    passes: int
    error: float  # median over the passes of |fitted seconds / measured seconds - 1|
    vision: float  # seconds of encoders and projector over what was counted, both passes
    language: float  # seconds of the LLM over what was counted
    factors: dict[str, float]  # for each of PARTS

    def __str__(self) -> str:
        return (
            f"vision {self.vision:.3g}x, language {self.language:.3g}x the seconds counted for "
            f"{self.counted_for}; the fit is off by {self.error:.1%} of a pass (median of {self.passes})"
        )

    def apply(self, counted: ModelProfile) -> ModelProfile:
        """Costs as measured.

        Raises:
            ConfigError: The costs were counted for another device, or of other layers.
        """
        if counted.device != self.counted_for:
            raise ConfigError(f"costs must be counted for {self.counted_for} to be corrected, got {counted.device}")
        if _hash_of(counted) != self.layers:
            raise ConfigError("measured costs must be of the model's layers, got those of another model")
        return replace(counted, layers=tuple(map(self._corrected, counted.layers)), device=self.device)

    def _corrected(self, layer: LayerCost) -> LayerCost:
        forward, backward = (self.factors[_part(layer, is_backward)] for is_backward in (False, True))
        return replace(
            layer,
            forward_seconds=forward * layer.forward_seconds,
            backward_seconds=backward * layer.backward_seconds,
            weight_seconds=backward * layer.weight_seconds,
            recompute_seconds={level: forward * cost for level, cost in layer.recompute_seconds.items()},
        )

    def line(self, **others: object) -> str:
        """The calibration as a line of a run's log."""
        return json.dumps({**others, "calibration": self.model_dump()}) + "\n"

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read the last calibration in a file of JSON lines, such as a run's log."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"measured costs must be in a readable file, got {path}: {error}") from error
        found = [line for line in lines if '"calibration"' in line and line.endswith("\n")]  # else half written
        if not found:
            raise ConfigError(f"{path} must hold measured costs, got none; a run writes them after {STEPS} steps")
        try:
            return cls.model_validate_json(json.dumps(json.loads(found[-1])["calibration"]))
        except ValidationError as error:
            raise ConfigError(f"{path}: {explain(cls, error, 'calibration')}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} must hold JSON lines with a calibration, got {error}") from error


def calibrate(
    profile: ModelProfile, passes: Sequence[TimedPass], recompute: Sequence[Level], *, device: str
) -> Calibration | None:
    """Fit the factors under which counted costs are those of timed passes; None where no pass was timed.

    ``recompute`` has a level for each layer, ``passes`` none of the first steps, and ``device`` is what they ran on.

    Source: LoongForge fits a·l² + b·l + c to iterations 2 to 11; deviations: counted costs, by part, robust.
    """
    from scipy.optimize import least_squares  # a third of a second that other commands need not wait

    counted, seconds = _counted(profile, passes, recompute), np.array([each.seconds for each in passes])
    timed = (seconds > 0) & (counted.sum(axis=1) > 0)
    counted, seconds = counted[timed], seconds[timed]
    if not len(seconds):
        return None
    # Relative errors of passes, in a unit in which factors are about 1; the last rows pull each factor to 1.
    unit, pulls = float(np.median(seconds / counted.sum(axis=1))), _PULL * np.eye(len(PARTS))
    rows = np.vstack([counted * unit / seconds[:, None], pulls])
    aim = np.concatenate([np.ones(len(seconds)), np.full(len(PARTS), _PULL)])
    robust = {"bounds": (0, np.inf), "loss": "soft_l1", "f_scale": _OUTLIER}
    found = least_squares(lambda each: rows @ each - aim, np.ones(len(PARTS)), jac=lambda _: rows, **robust)
    factors = unit * found.x
    fitted = counted * factors

    def ratio(module: str) -> float:
        parts = [part.startswith(module) for part in PARTS]
        if not counted[:, parts].any():  # a module that had nothing to do follows the other one
            parts = [True] * len(PARTS)
        return float(fitted[:, parts].sum() / counted[:, parts].sum())

    return Calibration(
        device=device,
        counted_for=profile.device,
        layers=_hash_of(profile),
        passes=len(seconds),
        error=float(np.median(np.abs(fitted.sum(axis=1) / seconds - 1))),
        vision=ratio("vision"),
        language=ratio("language"),
        factors=dict(zip(PARTS, factors.tolist(), strict=True)),
    )


def _counted(profile: ModelProfile, passes: Sequence[TimedPass], recompute: Sequence[Level]) -> FloatArray:
    """Counted seconds of each pass by part, shape (passes, parts)."""
    alike = defaultdict[tuple[int, int, bool], list[int]](list)  # passes through the same layers, one way
    for number, each in enumerate(passes):
        alike[*each.layers, each.is_backward].append(number)
    counted = np.zeros((len(passes), len(PARTS)))
    layers = list(zip(profile.layers, profile.reached, recompute, strict=True))
    for (first, behind, is_backward), numbers in alike.items():
        costs = dict.fromkeys(PARTS, CostModel())
        for layer, is_reached, level in layers[first:behind]:
            if not is_backward:
                costs[_part(layer, False)] += layer.forward_seconds
            elif is_reached:
                costs[_part(layer, False)] += layer.recompute_seconds.get(level, CostModel())
                costs[_part(layer, True)] += layer.backward_seconds + layer.weight_seconds
        loads = Load(*np.array([passes[number].load for number in numbers]).T)
        counted[numbers] = np.stack([cost(loads) for cost in costs.values()], axis=1)
    return counted


def _part(layer: LayerCost, is_backward: bool) -> str:
    module = "language" if layer.part == "language" else "vision"
    return f"{module} {'backward' if is_backward else 'forward'}"


def _hash_of(profile: ModelProfile) -> str:
    # Adapters are left out: the model is the same whatever is trained of it.
    known = [(layer.name, layer.kind, layer.sizes.get("hidden")) for layer in profile.layers]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
