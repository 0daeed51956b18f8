"""What the layers of a model cost, kind by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.table import Table

from omnibal.cost import Load
from omnibal.profile.records import LayerCost, ModelProfile
from omnibal.report.style import MIB, Figures, make_table


@dataclass(frozen=True)
class LayerFigures(Figures):
    """Layers of equal cost that follow one another; figures are one layer's for one micro-batch."""

    kind: str
    layers: int
    """How many they are."""
    forward_seconds: float
    backward_seconds: float
    """To the inputs."""
    weight_seconds: float
    """Backward to the weights."""
    share: float
    """Of all layers' time, these layers together."""
    output_bytes: float
    saved_bytes: dict[str, float]
    """Kept for the backward pass, by recompute level."""
    parameter_bytes: int
    trainable: bool
    spread: float
    """Largest relative spread among the measurements; 0 for counted costs."""

    @classmethod
    def of(cls, group: Sequence[LayerCost], load: Load, total_seconds: float) -> LayerFigures:
        """Of equal layers of a model that takes so long for the micro-batch."""
        layer = group[0]
        return cls(
            kind=layer.kind,
            layers=len(group),
            forward_seconds=float(layer.forward_seconds(load)),
            backward_seconds=float(layer.backward_seconds(load)),
            weight_seconds=float(layer.weight_seconds(load)),
            share=len(group) * _seconds(layer, load) / total_seconds if total_seconds else 0.0,
            output_bytes=float(layer.output_bytes(load)),
            saved_bytes={level: float(model(load)) for level, model in layer.saved_bytes.items()},
            parameter_bytes=layer.parameter_bytes,
            trainable=layer.trainable,
            spread=layer.spread,
        )


def layer_figures(profile: ModelProfile, load: Load) -> list[LayerFigures]:
    """Figures of a profile's layers for one micro-batch, a row for each run of equal layers."""
    total = sum(_seconds(layer, load) for layer in profile.layers)
    groups = groupby(profile.layers, key=lambda layer: replace(layer, name=""))
    return [LayerFigures.of([*group], load, total) for _, group in groups]


def _seconds(layer: LayerCost, load: Load) -> float:
    return float((layer.forward_seconds + layer.backward_seconds + layer.weight_seconds)(load))


def time_table(rows: Sequence[LayerFigures]) -> Table:
    """Milliseconds of one layer of each kind, and the share of the model's time that all of them take."""
    spread = ("spread",) if any(row.spread for row in rows) else ()
    heads = ("kind", "layers", "forward ms", "backward", "weights", "of all", *spread)
    cells = (
        (
            _name(row),
            f"{row.layers}",
            *(f"{1e3 * part:,.3g}" for part in (row.forward_seconds, row.backward_seconds, row.weight_seconds)),
            f"{row.share:.0%}",
            *(f"{row.spread:.1%}" for _ in spread),
        )
        for row in rows
    )
    return make_table(heads, cells)


def bytes_table(rows: Sequence[LayerFigures]) -> Table:
    """MiB that one layer of each kind sends on, keeps for its backward pass at each level, and holds in weights."""
    levels = list(dict.fromkeys(level for row in rows for level in row.saved_bytes))
    heads = ("kind", "sends\nMiB", *(f"keeps MiB\n({level})" for level in levels), "weights\nMiB")
    cells = (
        (
            _name(row),
            _mebi(row.output_bytes),
            *(_mebi(row.saved_bytes[level]) if level in row.saved_bytes else "–" for level in levels),
            _mebi(row.parameter_bytes),
        )
        for row in rows
    )
    return make_table(heads, cells)


def _name(row: LayerFigures) -> str:
    return row.kind if row.trainable else f"{row.kind} (frozen)"


def _mebi(size: float) -> str:
    return f"{size / MIB:,.0f}" if size >= 10 * MIB else f"{size / MIB:.1f}"
