"""A training run: what it is about to do, its log (a JSON line per step and per evaluation), what it did in the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Final, NotRequired  # pydantic needs it before Python 3.12

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from rich.table import Table
from typing_extensions import TypedDict, Unpack

from omnibal.cost import FloatArray
from omnibal.data.packing_spec import Oversized
from omnibal.errors import ConfigError, DataError, bytes_in_words, reporting
from omnibal.families.base import LayerRecord, vision_unit_of
from omnibal.memory.footprint import StageMemory
from omnibal.plan import Plan
from omnibal.profile.calibration import Calibration
from omnibal.report.stages import stage_layers
from omnibal.report.style import BLUE, GREEN, ORANGE, SERIES, VERMILION, drawing, duration, label_of, legend_below

if TYPE_CHECKING:
    from PIL import Image  # an extra that reports do without

BALANCE: Final = "mean load of a step's packs over the largest, 1 if all are alike"
SHARE_STEPS = 50  # over which shares are averaged: a single step's are up to chance
# Of a picture of answers: questions beside each other, letters in a line, pixels between the images of a question.
COLUMNS, WORDS, GAP = 3, 38, 6
SMOOTHING = 0.9  # weight of the past in the figures that are shown while training


def _possible_loss(loss: float) -> float:
    if loss < 0:
        raise ValueError("a loss is at least 0, or not finite where training diverged")
    return loss


Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Loss = Annotated[float, AfterValidator(_possible_loss)]


class StepRecord(TypedDict):
    step: Count  # steps done
    epoch: Count  # the epoch of the step, from 0
    loss: Loss  # mean loss of a target token
    learning_rate: Finite  # the learning rate after the step
    seconds: Finite
    # Of these, how long the slowest rank waited for the step's packs to be read.
    data_seconds: NotRequired[Finite]
    samples: Count
    llm_tokens: Count
    balance: dict[str, Finite]  # mean over largest load of the step's packs, for each kind of load
    device: NotRequired[str]  # what rank 0 ran on; in a run's first line, and in the first one after it went on
    # For each source of a mixture the share that was asked for, and the one that the step holds.
    shares: NotRequired[dict[str, tuple[Finite, Finite]]]
    # What becomes of a stream's samples over a limit, and how many of them the run has met so far.
    oversized: NotRequired[dict[Oversized, Count]]
    left_out: NotRequired[Count]  # samples that were left out of the step, as they cannot be read


class EvaluationRecord(TypedDict):
    step: Count
    held_out_loss: Loss
    held_out_accuracy: Finite
    held_out_samples: Count


@dataclass(frozen=True)
class Metrics:
    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]

    @property
    def devices(self) -> str:
        named = dict.fromkeys(record["device"] for record in self.steps if "device" in record)
        return " and ".join(named) or "devices that its log does not name"


# pydantic's checks of a line; typed dictionaries cost nothing where lines are written.
_STEP, _EVALUATION = TypeAdapter(StepRecord), TypeAdapter(EvaluationRecord)


def read_metrics(path: Path) -> Metrics:
    """Read a log; a line that a running or killed run has half written is left out."""
    metrics = Metrics([], [])
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} must be a run's log, got a file that cannot be read as text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):  # half written
            break
        try:
            if '"calibration"' in line:  # which Calibration.load reads
                continue
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
    """Appends to a file of JSON lines, and renders the line that a progress bar shows."""

    def __init__(self, path: Path, *, first_step: int, device: str = "") -> None:
        self.path = path
        self._device = device
        self._rates: dict[str, float] = {}
        with reporting(f"cleaning of {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            # A run that was killed may have left half a line; steps after the first one will be trained again.
            whole = (line for line in lines if line.endswith("}\n"))
            beside = path.with_suffix(".partial")  # a disk that is full must not cost the old lines
            beside.write_text("".join(line for line in whole if json.loads(line)["step"] <= first_step))
            beside.replace(path)

    def training_step(self, **record: Unpack[StepRecord]) -> str:
        """Log a training step, and render it as a progress bar's line; rates are smoothed over the last steps."""
        # The first line of a run, or after it went on, names the device: the log may be of several.
        named: StepRecord = {**record, "device": self._device} if self._device else record
        self._device = ""
        self._append(named)
        loss, seconds, samples, tokens = (
            self._smooth(name, float(record[name]))  # type: ignore[literal-required]
            for name in ("loss", "seconds", "samples", "llm_tokens")
        )
        balances = " ".join(f"{name} {value:.2f}" for name, value in record["balance"].items())
        return (
            f"loss {loss:.3f}, {samples / seconds:.1f} samples/s, {tokens / seconds:,.0f} tokens/s, balance {balances}"
        )

    def evaluation(self, step: int, *, loss: float, accuracy: float, samples: int) -> str:
        self._append(
            EvaluationRecord(step=step, held_out_loss=loss, held_out_accuracy=accuracy, held_out_samples=samples)
        )
        return f"step {step}: held-out loss {loss:.3f}, answers right {accuracy:.1%} of {samples}"

    def calibration(self, step: int, found: Calibration) -> None:
        self._write(found.line(step=step))

    def _append(self, record: StepRecord | EvaluationRecord) -> None:
        self._write(json.dumps(record) + "\n")

    def _write(self, line: str) -> None:
        with reporting(f"a line of {self.path}"), self.path.open("a") as file:
            file.write(line)

    def _smooth(self, name: str, value: float) -> float:
        before = self._rates.get(name, value)
        if not isfinite(value):  # of a step that was skipped; it would stay in all means to come
            return before
        self._rates[name] = SMOOTHING * before + (1 - SMOOTHING) * value
        return self._rates[name]


def run_table(plan: Plan, records: Sequence[LayerRecord], data: Mapping[str, str]) -> Table:
    holds = f"{plan.limits.vision_units} {vision_unit_of(records)}, {plan.limits.llm_tokens} LLM tokens"
    rows = {**data, "a pack holds at most": holds, "balance, as steps log it": BALANCE}
    for stage in range(plan.num_stages):
        layers = stage_layers(plan, records, stage)
        parameters = sum(records[layer].sizes["parameters"] for layer in plan.partition.layers(stage))
        parts = (f"{layers[f'{part}_layers']} {part}" for part in ("vision", "language") if layers[f"{part}_layers"])
        rows[f"stage {stage}"] = (
            f"{layers['first_layer']} … {layers['last_layer']}: {' + '.join(parts)} layers, "
            f"{parameters / 1e6:,.1f} M parameters, {layers['recomputed']} recomputed"
        )
    return _titled("plan", rows)


def peak_text(peak_bytes: Sequence[int], overhead_bytes: Sequence[int], plan: Plan) -> str:
    """A line per stage: its measured peak beside the predicted one, of a step of the largest packs."""
    # Overhead is what neither torch's allocator nor a count of tensors sees; 0 where nobody could measure it.
    predicted = [None] * plan.num_stages if plan.predicted is None else [s.memory for s in plan.predicted.stages]
    lines = zip(peak_bytes, overhead_bytes, predicted, strict=True)
    return "\n".join(f"stage {stage}: memory peak {_peak(*line)}" for stage, line in enumerate(lines))


def _peak(peak: int, overhead: int, predicted: StageMemory | None) -> str:
    most = 0 if predicted is None else predicted.total - predicted.overhead
    words = [
        f"{bytes_in_words(peak)}, {peak / most:.1%} of the {bytes_in_words(most)} predicted for the largest packs"
        if most
        else f"{bytes_in_words(peak)}; nothing predicted"
    ]
    if overhead:
        words.append(f"{bytes_in_words(overhead)} beside the model")
        if predicted is not None:
            words[-1] += f", {bytes_in_words(predicted.overhead)} planned (overhead_bytes of the cluster)"
    return "; ".join(words)


def training_rows(metrics: Metrics) -> dict[str, str]:
    """A run in figures, by name; at least one step."""
    first, last = metrics.steps[0], metrics.steps[-1]
    seconds, samples, tokens, losses = (
        np.array([record[name] for record in metrics.steps])  # type: ignore[literal-required]
        for name in ("seconds", "samples", "llm_tokens", "loss")
    )
    # Quantiles, as single steps compile, save or wait for data; means of loss, as steps hold other samples.
    rows = {
        "device": metrics.devices,
        "steps": f"{last['step']:,}, the last one in epoch {last['epoch'] + 1}",
        "loss": f"{first['loss']:.3f} → {_moving_mean(losses)[-1]:.3f} (mean of the last steps)",
        "step": f"{duration(np.median(seconds))}, 10 % … 90 %: {duration(np.quantile(seconds, 0.1))} … "
        f"{duration(np.quantile(seconds, 0.9))}",
        "speed": f"{samples.sum() / seconds.sum():,.1f} samples/s, {tokens.sum() / seconds.sum():,.0f} LLM tokens/s",
    }
    waits = [record["data_seconds"] for record in metrics.steps if "data_seconds" in record]
    if len(waits) == len(seconds):  # a log of an older version has none
        share, slowest = sum(waits) / seconds.sum(), int(np.argmax(waits))
        rows["waits for data"] = (
            f"{share:.1%} of the time, most in step {metrics.steps[slowest]['step']:,}: {duration(waits[slowest])}"
        )
    for name in last["balance"]:
        known = [record["balance"][name] for record in metrics.steps if name in record["balance"]]
        rows[f"balance, {name}"] = f"{np.mean(known):.3f} ({BALANCE})"
    for fate, count in last.get("oversized", {}).items():
        if count:
            what = "left out" if fate == "drop" else "each in a pack of its own"
            rows["over the limits"] = f"{count:,} samples, {what}"
    if left_out := sum(record.get("left_out", 0) for record in metrics.steps):
        rows["left out"] = f"{left_out:,} times a sample that cannot be read; the log names each"
    if metrics.evaluations:
        result = metrics.evaluations[-1]
        rows["held-out answers right"] = f"{result['held_out_accuracy']:.1%} of {result['held_out_samples']:,}"
    return rows


def training_table(metrics: Metrics, written: Mapping[str, Path]) -> Table:
    """A run of at least one step in a few lines, and the paths of what it wrote."""
    return _titled("training", training_rows(metrics) | {name: str(path) for name, path in written.items()})


def _titled(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    return table


def plot_training(metrics: Metrics, path: Path) -> None:
    """Draw the loss over steps and, beside it, loss and right answers on held-out samples."""
    losses = np.array([record["loss"] for record in metrics.steps])
    steps = [record["step"] for record in metrics.steps]
    at = [record["step"] for record in metrics.evaluations]
    from matplotlib.ticker import LogLocator

    with drawing(path, 9, 3.6) as figure:
        axes = figure.subplots()
        axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _moving_mean(losses), color=BLUE, label="training loss, mean of the last 20 steps")
        axes.set(xlabel="step", ylabel="loss of a target token", yscale="log")
        # Numbers in place of powers of ten, which would be formulas: style.py leaves formulas unread.
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        if at:
            held_out = [record["held_out_loss"] for record in metrics.evaluations]
            right = [100 * record["held_out_accuracy"] for record in metrics.evaluations]
            axes.plot(at, held_out, "o-", color=ORANGE, markersize=4, label="held-out loss")
            # Right answers have their axis on the right; an empty line brings them into the one legend.
            answers = axes.twinx()
            answers.plot(at, right, "s--", color=GREEN, markersize=4)
            answers.set(ylabel="held-out answers right, %", ylim=(0, 100))
            answers.spines["right"].set_visible(True)
            answers.grid(False)
            axes.plot([], [], "s--", color=GREEN, markersize=4, label="held-out answers right")
        legend_below(figure, axes)


def plot_shares(steps: Sequence[int], shares: Sequence[Mapping[str, tuple[float, float]]], path: Path) -> None:
    """Draw the share of each source of a mixture over steps: asked for, and held by some steps in a row on average."""
    with drawing(path, 9, 3.6) as figure:
        axes = figure.subplots()
        for number, name in enumerate(dict.fromkeys(name for step in shares for name in step)):
            # A source that came or went with a resumed run is drawn where it was.
            asked, held = 100 * np.array([step.get(name, (np.nan, np.nan)) for step in shares]).T
            color = SERIES[number % len(SERIES)]
            axes.plot(steps, asked, color=color, linewidth=0.8, linestyle="--")
            means = np.where(np.isfinite(held), _moving_mean(held, SHARE_STEPS), np.nan)
            axes.plot(steps, means, color=color, label=label_of(name))
        axes.set(xlabel="step", ylabel="share, %", ylim=(0, None))
        legend_below(figure, axes)


Answer = tuple[str, Sequence["Image.Image"], str, str | None]
"""Question, images, what the model says, and the right answer where it is known."""


def plot_answers(answers: Sequence[Answer], path: Path) -> None:
    """Draw the images of each question, the question, and the answer: green if it is right, red if not."""
    seen = [answer for answer in answers if answer[1]]
    if not seen:
        raise ConfigError("questions must have images to draw a picture of answers, got none that has one")
    rows = -(-len(seen) // COLUMNS)
    with drawing(path, 9, 3 * rows) as figure:
        for axes in figure.subplots(rows, COLUMNS, squeeze=False).flat:
            axes.axis("off")
        for axes, (question, images, said, right) in zip(figure.axes, seen, strict=False):
            axes.imshow(_side_by_side(images))
            axes.set_title(fill(question, WORDS), fontsize=9)
            # An empty axis has no label: the answer is a text below the picture.
            words = said if right in (None, said) else f"{said} (right: {right})"
            colour = "black" if right is None else GREEN if said == right else VERMILION
            text, below = fill(words, WORDS), axes.transAxes
            axes.text(0.5, -0.04, text, fontsize=9, color=colour, transform=below, ha="center", va="top")


def _side_by_side(images: Sequence[Image.Image]) -> NDArray[np.uint8]:
    """The images of a question as one, each as high as the highest."""
    height = max(image.height for image in images)
    scaled = [image.resize((round(image.width * height / image.height), height)).convert("RGB") for image in images]
    gap = np.full((height, GAP, 3), 255, dtype=np.uint8)
    return np.hstack([part for image in scaled for part in (np.asarray(image), gap)][:-1])


def _moving_mean(values: FloatArray, window: int = 20) -> FloatArray:
    """Mean of up to ``window`` values that end at each position, without those that are not finite."""
    finite, ones = np.isfinite(values), np.ones(window)
    sums = np.convolve(np.where(finite, values, 0.0), ones)[: len(values)]
    with np.errstate(invalid="ignore"):  # of none, there is no mean
        means: FloatArray = sums / np.convolve(finite, ones)[: len(values)]
    return means
