"""Measured corrections of counted costs: what passes through some layers took beside what was counted of them.

Each coefficient of each part of a pass (``parts_of``) gets a factor. In packs that are balanced well all micro-batches
are alike, so a regression on loads alone cannot tell the encoders from the LLM: passes are timed by part (by stage in a
pipeline), and factors that the loads cannot tell apart stay near that of their part.
"""

from __future__ import annotations

import hashlib
import json
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
SIZES: Final = tuple(field.name for field in fields(CostModel))  # "fixed" and the sizes of a Load, in Load's order
# Columns of a part: CostModel's coefficients, and seconds of each layer whatever the pass holds (starting kernels).
_COLUMNS = len(SIZES) + 1
# Relative errors above it count by their absolute value, so that single slow passes do not move the fit.
_OUTLIER = 0.1
# Noise of a pass (5 %) over the factor's distance from its part's that is likely beforehand (50 %).
_PULL = 0.1


def parts_of(profile: ModelProfile) -> tuple[str, ...]:
    """The parts of a micro-batch's passes that get factors of their own, all forward ones first."""
    return tuple(f"{part} {direction}" for direction in ("forward", "backward") for part in _modules(profile))


def _modules(profile: ModelProfile) -> tuple[str, ...]:
    hears = any(layer.part == "sound" for layer in profile.layers)
    return ("vision", "language", "sound") if hears else ("vision", "language")


class TimedPass(NamedTuple):
    """A pass of one micro-batch through neighbouring layers."""

    layers: tuple[int, int]  # the first layer, and the one behind the last
    is_backward: bool
    load: tuple[float, ...]  # sizes of the micro-batch, in the order of Load's arguments
    seconds: float


def sizes_of(load: Load) -> list[tuple[float, ...]]:
    """The sizes of each micro-batch of a load, as ``TimedPass`` has them."""
    columns = [getattr(load, size).tolist() for size in SIZES[1:]]
    return list(zip(*columns, strict=True))


class Calibration(Record):
    """Factors that make counted costs those that a run measured."""

    version: Literal[1] = 1
    device: str  # what the passes ran on
    counted_for: str  # the device that the corrected costs were counted for
    layers: str  # hash of the model's layers
    passes: int
    error: float  # median over the passes of |fitted seconds / measured seconds - 1|
    vision: float  # seconds of ViT and projector over what was counted
    language: float  # seconds of the LLM over what was counted
    factors: dict[str, dict[str, float]]
    """For each of ``parts_of`` the factor of each coefficient, and ``layer_seconds``."""
    sound: float | None = None
    """Seconds of an encoder of sound over what was counted; None where there is none."""

    def __str__(self) -> str:
        sound = "" if self.sound is None else f", sound {self.sound:.3g}x"
        return (
            f"vision {self.vision:.3g}x, language {self.language:.3g}x{sound} the seconds counted for "
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
        def scaled(cost: CostModel, direction: str) -> CostModel:
            if cost == CostModel():
                return cost
            of_part = self.factors[f"{layer.part} {direction}"]
            each = {size: getattr(cost, size) * of_part[size] for size in SIZES}
            return CostModel(**each | {"fixed": each["fixed"] + of_part["layer_seconds"]})

        return replace(
            layer,
            forward_seconds=scaled(layer.forward_seconds, "forward"),
            backward_seconds=scaled(layer.backward_seconds, "backward"),
            # The pass to the weights runs right behind the one to the inputs, which has the layer_seconds.
            weight_seconds=replace(scaled(layer.weight_seconds, "backward"), fixed=0.0),
            recompute_seconds={level: scaled(cost, "forward") for level, cost in layer.recompute_seconds.items()},
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

    Source: LoongForge fits a·l² + b·l + c to iterations 2 to 11; deviations: by part, by size, and robust.
    """
    from scipy.optimize import least_squares  # a third of a second that other commands need not wait

    parts, columns = parts_of(profile), _counted(profile, passes, recompute)
    seconds = np.array([each.seconds for each in passes])
    timed = (seconds > 0) & (columns[..., :-1].sum(axis=(1, 2)) > 0)
    columns, seconds = columns[timed], seconds[timed]
    if not len(seconds):
        return None
    # In units in which factors are about 1: of the counted columns, and of seconds that each layer takes at least.
    whole = columns[..., :-1].sum(axis=(1, 2))
    units = np.full(_COLUMNS, np.median(seconds / whole))
    units[-1] = np.median(seconds / columns[..., -1].sum(axis=1))
    share = columns * units / seconds[:, None, None]  # of each pass: (passes, parts, columns)

    def fit(matrix: FloatArray, start: FloatArray, pulls: FloatArray) -> FloatArray:
        """Factors f >= 0 with matrix f near 1, pulled to ``start``."""
        rows, aim = np.vstack([matrix, np.diag(pulls)]), np.concatenate([np.ones(len(matrix)), pulls * start])
        found: FloatArray = least_squares(
            lambda factors: rows @ factors - aim, start, jac=lambda factors: rows, bounds=(0, np.inf),
            loss="soft_l1", f_scale=_OUTLIER,
        ).x  # fmt: skip
        return found

    # 1. One factor for each part. 2. One for each column of it, which starts from its part's and is pulled there.
    of_part = fit(share[..., :-1].sum(axis=2), np.ones(len(parts)), np.full(len(parts), _PULL / 10))
    start = np.tile(of_part[:, None], _COLUMNS)
    start[:, -1] = 0
    pulls = np.full_like(start, _PULL) / np.maximum(start, 1e-3)
    pulls[:, -1] = _PULL
    flat = fit(share.reshape(len(share), -1), start.ravel(), pulls.ravel())
    factors = flat.reshape(start.shape) * units
    fitted = (columns * factors).sum(axis=2)
    modules = _modules(profile)

    def ratio(of_parts: slice) -> float:
        if columns[:, of_parts, :-1].sum() == 0:  # of a part that had nothing to do: it follows the others
            of_parts = slice(None)
        return float(fitted[:, of_parts].sum() / columns[:, of_parts, :-1].sum())

    vision, language, *sound = (ratio(slice(part, None, len(modules))) for part in range(len(modules)))
    error = np.median(np.abs(fitted.sum(axis=1) / seconds - 1))
    return Calibration(
        device=device, counted_for=profile.device, layers=_hash_of(profile), passes=len(seconds), error=float(error),
        vision=vision, language=language, sound=sound[0] if sound else None,
        factors={
            part: dict(zip((*SIZES, "layer_seconds"), of_columns.tolist(), strict=True))
            for part, of_columns in zip(parts, factors, strict=True)
        },
    )  # fmt: skip


def _counted(profile: ModelProfile, passes: Sequence[TimedPass], recompute: Sequence[Level]) -> FloatArray:
    """Counted seconds of each pass by part and column, and layers in the last column: (passes, parts, columns)."""
    layers, modules = profile.layers, _modules(profile)
    of_layer = np.zeros((len(layers), 2, 2 * len(modules), _COLUMNS))

    def add(layer: int, is_backward: int, part: int, cost: CostModel) -> None:
        if cost != CostModel():
            of_layer[layer, is_backward, part] += (*(getattr(cost, size) for size in SIZES), 1)

    for index, (layer, reached) in enumerate(zip(layers, profile.reached, strict=True)):
        part = modules.index(layer.part)
        add(index, 0, part, layer.forward_seconds)
        if reached:
            add(index, 1, part, layer.recompute_seconds.get(recompute[index], CostModel()))
            add(index, 1, len(modules) + part, layer.backward_seconds + layer.weight_seconds)
    sums = np.concatenate([np.zeros((1, *of_layer.shape[1:])), of_layer.cumsum(axis=0)])
    first, behind = np.array([each.layers for each in passes], dtype=np.int64).reshape(-1, 2).T
    direction = np.array([int(each.is_backward) for each in passes], dtype=np.int64)
    loads = np.array([(1, *each.load, 1) for each in passes], dtype=np.float64).reshape(-1, _COLUMNS)
    counted: FloatArray = (sums[behind, direction] - sums[first, direction]) * loads[:, None]
    return counted


def _hash_of(profile: ModelProfile) -> str:
    # Adapters are left out: the model is the same whatever is trained of it.
    known = [(layer.name, layer.kind, layer.sizes.get("hidden")) for layer in profile.layers]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
