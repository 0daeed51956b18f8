"""What a training run shows in the end: its loss curve and a short table."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from omnibal.report.metrics import Metrics
from omnibal.report.style import new_figure


def plot_training(metrics: Metrics, path: Path) -> None:
    """Draw loss, held-out loss and held-out accuracy over steps as a PNG."""
    figure = new_figure(9, 5)
    losses = figure.subplots()
    steps = [record["step"] for record in metrics.steps]
    values = np.array([record["loss"] for record in metrics.steps])
    losses.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
    losses.plot(steps, _moving_mean(values), color="tab:blue", label="training loss (mean of the last steps)")
    losses.set(xlabel="step", ylabel="loss of a target token", yscale="log")
    losses.grid(alpha=0.3, which="both")
    if metrics.evaluations:
        at = [record["step"] for record in metrics.evaluations]
        losses.plot(
            at,
            [record["held_out_loss"] for record in metrics.evaluations],
            "o-",
            color="tab:orange",
            label="held-out loss",
        )
        accuracy = losses.twinx()
        accuracy.plot(
            at,
            [100 * record["held_out_accuracy"] for record in metrics.evaluations],
            "s--",
            color="tab:green",
            label="held-out answers right",
        )
        accuracy.set(ylabel="held-out answers right (%)", ylim=(0, 100))
        accuracy.legend(loc="center right")
    losses.legend(loc="upper right")
    figure.savefig(path, dpi=120)


def _moving_mean(values: npt.NDArray[np.float64], window: int = 20) -> npt.NDArray[np.float64]:
    """Mean of up to ``window`` values that end at each position."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    means: npt.NDArray[np.float64] = (sums[ends] - sums[begins]) / (ends - begins)
    return means


def training_table(metrics: Metrics, written: Mapping[str, Path]) -> Table:
    """A run in a few lines, and the paths of what it wrote.

    Args:
        metrics: The run's log, with at least one step.
        written: Paths by name.
    """
    table = Table(title="training", show_header=False, title_justify="left")
    seconds = sum(record["seconds"] for record in metrics.steps)
    samples = sum(record["samples"] for record in metrics.steps)
    tokens = sum(record["llm_tokens"] for record in metrics.steps)
    first, last = metrics.steps[0], metrics.steps[-1]
    final_loss = _moving_mean(np.array([record["loss"] for record in metrics.steps]))[-1]
    table.add_row("steps", f"{last['step']}, {last['epoch'] + 1} times through the data")
    table.add_row("loss", f"{first['loss']:.3f} → {final_loss:.3f} (mean of the last steps)")
    table.add_row("speed", f"{samples / seconds:.1f} samples/s, {tokens / seconds:,.0f} LLM tokens/s")
    for name in last["balance"]:
        table.add_row(f"balance, {name}", f"{np.mean([record['balance'][name] for record in metrics.steps]):.3f}")
    if metrics.evaluations:
        result = metrics.evaluations[-1]
        table.add_row("held-out answers right", f"{result['held_out_accuracy']:.1%} of {result['held_out_samples']}")
    for name, path in written.items():
        table.add_row(name, str(path))
    return table
