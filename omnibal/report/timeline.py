"""A picture of simulated pipelines: what every stage runs when, and how long it is idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omnibal.pipeline.schedule import Operation
from omnibal.pipeline.simulate import Event, Simulation
from omnibal.report.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

COLOURS: Final = {
    Operation.F: ("forward", BLUE),
    Operation.BW: ("backward", ORANGE),
    Operation.B: ("backward to inputs", PINK),
    Operation.W: ("backward to weights", GREEN),
}
TRANSFER: Final = ("transfer", "#B0B7BF")
WIDTH: Final = 11.0
BAR: Final = 0.82
EDGE: Final = 0.4
VISIBLE_SHARE: Final = 0.001
"""A bar of less of the picture is not a dot wide."""
NUMBER_WIDTH: Final = 0.008
"""Micro-batches are numbered where a bar takes at least this share of the picture, per digit."""


def plot_timeline(simulations: Mapping[str, Simulation], path: Path) -> None:
    """Draw a panel per pipeline on a common time axis: a row per stage, a bar per instruction.

    Forward and backward passes are numbered by micro-batch where there is room. To the right of each row: how long the
    stage is idle until the pipeline is done, and what share of the time that is.
    """
    end = max(simulation.makespan_seconds for simulation in simulations.values())
    unit, name = (1.0, "seconds") if end >= 10 else (1e3, "milliseconds")
    rows = [simulation.schedule.num_stages for simulation in simulations.values()]
    with drawing(path, WIDTH, 0.9 + sum(0.34 * count + 0.45 for count in rows)) as figure:
        axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for panel, (title, simulation) in zip(axes, simulations.items(), strict=True):
            _draw(panel, simulation, unit, unit * end)
            bubble = f"{short(unit * simulation.makespan_seconds)} {name}, bubble ratio {simulation.bubble_ratio:.1%}"
            panel.set_title(f"{title}: {bubble}" if title else bubble, loc="left")
        axes[-1].set_xlabel(f"{name} since the start of the step")
        figure.legend(handles=_legend(simulations), loc="outside lower center", ncols=4)


def _draw(axes: Axes, simulation: Simulation, unit: float, end: float) -> None:
    stages = range(simulation.schedule.num_stages)
    rows = groupby(sorted(simulation.events), key=lambda event: (event.stage, event.operation))
    for (stage, operation), events in rows:
        _draw_bars(axes, stage, operation, [*events], unit, end)
    for stage in stages:
        idle = float(simulation.idle_seconds[stage])
        share = idle / simulation.makespan_seconds if simulation.makespan_seconds else 0.0
        axes.annotate(
            f"idle {short(unit * idle)} ({share:.0%})",
            (1.0, stage), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, color=GREY,
        )  # fmt: skip
    axes.axvline(unit * simulation.makespan_seconds, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(ylim=(len(stages) - 0.5, -0.5), xlim=(0, end), yticks=[*stages])
    axes.set_yticklabels([f"stage {stage}" for stage in stages])
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _draw_bars(axes: Axes, stage: int, operation: Operation, events: Sequence[Event], unit: float, end: float) -> None:
    """All bars of one colour in one row, as one collection: thousands of single ones take a minute."""
    bars = [(unit * event.start_seconds, unit * (event.end_seconds - event.start_seconds)) for event in events]
    place = (stage - BAR / 2, BAR)
    if operation.is_transfer:
        axes.broken_barh(bars, place, facecolor=TRANSFER[1], linewidth=0)
        return
    axes.broken_barh(bars, place, facecolor=COLOURS[operation][1], edgecolor="white", linewidth=EDGE)
    for event, (start, width) in zip(events, bars, strict=True):
        number = str(event.micro_batch)
        if width >= NUMBER_WIDTH * len(number) * end:
            axes.text(start + width / 2, stage, number, ha="center", va="center", fontsize=7, color="white")


def _legend(simulations: Mapping[str, Simulation]) -> list[Patch]:
    """An entry for everything that can be seen."""
    from matplotlib.patches import Patch

    events = [event for simulation in simulations.values() for event in simulation.events]
    least = VISIBLE_SHARE * max(simulation.makespan_seconds for simulation in simulations.values())
    ran = {event.operation for event in events if event.end_seconds - event.start_seconds > least}
    entries = [COLOURS[operation] for operation in COLOURS if operation in ran]
    entries += [TRANSFER] * any(operation.is_transfer for operation in ran)
    return [Patch(facecolor=colour, label=name) for name, colour in entries]
