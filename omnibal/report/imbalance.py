"""How uneven the work of stages and micro-batches is: in figures, and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from omnibal.cost import FloatArray, Load
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.report.style import SERIES, drawing, legend_below

SHOWN: Final = 48
"""Micro-batches that are looked at, of the first replica."""


@dataclass(frozen=True)
class Imbalance:
    """Forward time and memory of stages and micro-batches.

    Attributes:
        forward_seconds: Shape (micro-batches, stages), of some micro-batches of one replica.
        memory_bytes: Of a device of each stage if all micro-batches in flight are like this one; the same shape.
    """

    forward_seconds: FloatArray
    memory_bytes: FloatArray

    @classmethod
    def of(cls, profile: ModelProfile, loads: Load, plan: Plan) -> Imbalance:
        """Of micro-batches, shape (steps, replicas, micro-batches), under a plan."""
        shown = loads[:, 0].ravel()[:SHOWN]
        forward = np.stack([layer.forward_seconds(shown) for layer in profile.layers], axis=1)
        stages = [forward[:, a:b].sum(axis=1) for a, b in pairwise(plan.partition.boundaries)]
        memory = [[stage.total for stage in plan.memory(profile, one)] for one in shown]
        return cls(np.stack(stages, axis=1), np.array(memory, dtype=np.float64))

    def rows(self) -> list[tuple[str, str, str]]:
        """Mean and spread of time and memory across stages, and over time in the first stage."""
        means = self.forward_seconds.mean(axis=0), self.memory_bytes.mean(axis=0)
        first = self.forward_seconds[:, 0], self.memory_bytes[:, 0]
        return [("across stages", *_spread(*means)), ("in stage 0, over time", *_spread(*first))]


def _spread(seconds: FloatArray, size: FloatArray) -> tuple[str, str]:
    milliseconds, gibibytes = 1e3 * seconds, size / 2**30
    return (
        f"{milliseconds.mean():,.1f} ± {milliseconds.std():,.1f} ms",
        f"{gibibytes.mean():,.1f} ± {gibibytes.std():,.1f} GiB",
    )


def plot_imbalance(variants: Mapping[str, Imbalance], path: Path) -> None:
    """Draw each stage's forward time over micro-batches, a column per variant on common axes."""
    with drawing(path, 4.9 * len(variants), 3.2) as figure:
        axes = figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
        for panel, (title, imbalance) in zip(axes, variants.items(), strict=True):
            for stage, seconds in enumerate(1e3 * imbalance.forward_seconds.T):
                colour = SERIES[stage % len(SERIES)]
                panel.step(np.arange(len(seconds)), seconds, where="mid", color=colour, label=f"stage {stage}")
            panel.set_title(title, loc="left")
            panel.set_xlabel("micro-batch of a replica")
            panel.set_ylim(bottom=0)
        axes[0].set_ylabel("forward pass, milliseconds")
        legend_below(figure, axes[0])
