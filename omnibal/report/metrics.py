"""The log of a training run: one JSON line per step and per evaluation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from omnibal.errors import DataError

SMOOTHING = 0.9
"""Weight of the past in the figures that are shown while training."""


class StepRecord(TypedDict):
    """A training step; see :meth:`MetricsLog.training_step`."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    seconds: float
    samples: int
    llm_tokens: int
    balance: dict[str, float]


class EvaluationRecord(TypedDict):
    """An evaluation on held-out samples."""

    step: int
    held_out_loss: float
    held_out_accuracy: float
    held_out_samples: int


@dataclass(frozen=True)
class Metrics:
    """A run's log, as it was read."""

    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]


_STEP, _EVALUATION = TypeAdapter(StepRecord), TypeAdapter(EvaluationRecord)


def read_metrics(path: Path) -> Metrics:
    """Read a log; a line that a running or killed run has half written is left out.

    Raises:
        DataError: A line is no record of a step or an evaluation.
    """
    metrics = Metrics([], [])
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be a run's log, got a file that is no text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            if "held_out_loss" in line:
                metrics.evaluations.append(_EVALUATION.validate_json(line))
            else:
                metrics.steps.append(_STEP.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "line"
            raise DataError(f"{path}, line {number}: {place} must be as a run logs it, got: {first['msg']}") from error
    return metrics


class MetricsLog:
    """Appends to the log, and renders the line a progress bar shows.

    Args:
        path: The JSON Lines file; its folder is made.
        first_step: Steps that the run has done before; what the file says of later ones is dropped (they will be
            trained again), and with 0 the file starts anew.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._path = path
        self._rates: dict[str, float] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A run that was killed may have left half a line.
        whole = (line for line in lines if line.endswith("}\n"))
        beside = path.with_suffix(".partial")  # a disk that is full must not cost the old lines
        beside.write_text("".join(line for line in whole if json.loads(line)["step"] <= first_step))
        beside.replace(path)

    def training_step(
        self,
        step: int,
        *,
        epoch: int,
        loss: float,
        learning_rate: float,
        seconds: float,
        samples: int,
        llm_tokens: int,
        balance: Mapping[str, float],
    ) -> str:
        """Log a training step.

        Args:
            step: Steps done.
            epoch: The epoch it lies in, from 0.
            loss: Mean loss of a target token.
            learning_rate: After the step.
            seconds: It took.
            samples: In all packs of the step.
            llm_tokens: In all packs of the step.
            balance: Mean load over largest load, for each kind of load.

        Returns:
            The line for the progress bar; rates are smoothed over the last steps.
        """
        self._append(
            step=step,
            epoch=epoch,
            loss=loss,
            learning_rate=learning_rate,
            seconds=seconds,
            samples=samples,
            llm_tokens=llm_tokens,
            balance=dict(balance),
        )
        shown = {
            "loss": self._smooth("loss", loss),
            "seconds": self._smooth("seconds", seconds),
            "samples": self._smooth("samples", samples),
            "llm_tokens": self._smooth("llm_tokens", llm_tokens),
        }
        balances = " ".join(f"{name} {value:.2f}" for name, value in balance.items())
        return (
            f"loss {shown['loss']:.3f}, {shown['samples'] / shown['seconds']:.1f} samples/s, "
            f"{shown['llm_tokens'] / shown['seconds']:,.0f} tokens/s, balance {balances}"
        )

    def evaluation(self, step: int, *, loss: float, accuracy: float, samples: int) -> str:
        """Log an evaluation on held-out samples, and render it as a line."""
        self._append(step=step, held_out_loss=loss, held_out_accuracy=accuracy, held_out_samples=samples)
        return f"step {step}: held-out loss {loss:.3f}, answers right {accuracy:.1%} of {samples}"

    def _append(self, **record: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _smooth(self, name: str, value: float) -> float:
        before = self._rates.get(name, value)
        self._rates[name] = SMOOTHING * before + (1 - SMOOTHING) * value
        return self._rates[name]
