"""A picture of what the stages of several partitions do in a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omnibal.cost import FloatArray
from omnibal.report.stages import PartitionFigures
from omnibal.report.style import BLUE, GREY, ORANGE, SERIES, VERMILION, new_figure, save, styled
from omnibal.report.timeline import TRANSFER, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR: Final = 0.78
PARTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "forward": {"color": BLUE},
    "backward": {"color": ORANGE},
    TRANSFER[0]: {"color": TRANSFER[1]},
    "waiting": {"facecolor": "none", "edgecolor": GREY, "linewidth": 0.6, "hatch": "///", "alpha": 0.35},
    "gradients and optimizer": {"color": SERIES[3]},
}
BOUND: Final = "no partition is faster"
ORDER: Final = (*PARTS, BOUND)


def plot_stages(partitions: Mapping[str, PartitionFigures], lower_bound_seconds: float, path: Path) -> None:
    """Draw a panel per partition: how long each stage computes, transfers and waits in a step.

    Args:
        partitions: By title; drawn from top to bottom on a common axis.
        lower_bound_seconds: What no partition's step is below; drawn as a line.
        path: The PNG.
    """
    end = max(lower_bound_seconds, *(figures.step_seconds for figures in partitions.values()))
    unit, name = (1.0, "seconds") if end >= 10 else (1e3, "milliseconds")
    rows = [len(figures.stages) for figures in partitions.values()]
    with styled():
        figure = new_figure(9, 0.9 + sum(0.27 * count + 0.42 for count in rows))
        axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for panel, (title, figures) in zip(axes, partitions.items(), strict=True):
            _draw(panel, figures, unit)
            panel.axvline(unit * lower_bound_seconds, color=VERMILION, linewidth=1.2, label=BOUND)
            over = figures.step_seconds / lower_bound_seconds - 1
            panel.set_title(f"{title}: {short(unit * figures.step_seconds)} {name} (bound +{over:.1%})", loc="left")
            panel.set_xlim(0, 1.02 * unit * end)
        axes[-1].set_xlabel(f"{name} of a step; stages with their ViT + LLM layers")
        entries = {
            label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        labels = sorted(entries, key=ORDER.index)
        figure.legend([entries[label] for label in labels], labels, loc="outside lower center", ncols=len(labels))
        save(figure, path)


def _draw(axes: Axes, figures: PartitionFigures, unit: float) -> None:
    stages = figures.stages
    places, left = np.arange(len(stages)), np.zeros(len(stages))
    for (name, look), seconds in zip(PARTS.items(), _parts(figures), strict=True):
        if seconds.any():
            axes.barh(places, unit * seconds, BAR, left=unit * left, label=name, **look)
        left = left + seconds
    axes.set(yticks=places, ylim=(len(stages) - 0.5, -0.5))
    axes.set_yticklabels([f"{stage.stage}:  {stage.vision_layers}+{stage.language_layers}" for stage in stages])
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _parts(figures: PartitionFigures) -> tuple[FloatArray, ...]:
    """Seconds of each stage by PARTS; they add up to the step's."""
    stages, count = figures.stages, figures.micro_batches
    forward = np.array([count * stage.forward_seconds for stage in stages])
    backward = np.array([count * stage.backward_seconds for stage in stages])
    transfer = np.array([stage.transfer_seconds for stage in stages])
    waiting = np.maximum(figures.pipeline_seconds - forward - backward - transfer, 0)
    return forward, backward, transfer, waiting, np.full(len(stages), figures.step_seconds - figures.pipeline_seconds)
