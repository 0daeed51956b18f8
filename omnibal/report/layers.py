"""What the layers of a model cost, kind by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from omnibal.cost import CostModel, Load
from omnibal.profile.records import LayerCost, ModelProfile

MEBI = 2**20


@dataclass(frozen=True)
class LayerFigures:
    """Layers of equal cost that follow one another, in figures for one micro-batch.

    Attributes:
        kind: What they compute.
        layers: How many they are.
        forward_seconds: Of one of them, as everything that follows.
        backward_seconds: To the inputs.
        weight_seconds: Backward to the weights.
        share: Of all layers' time, these layers together.
        output_bytes: What a cut after one sends.
        saved_bytes: What one keeps for its backward pass, by recompute level.
        parameter_bytes: In the dtype of the forward pass.
        trainable: Whether any parameter is trained.
        spread: Largest relative spread among the measurements; 0 for counted costs.
    """

    kind: str
    layers: int
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    share: float
    output_bytes: float
    saved_bytes: dict[str, float]
    parameter_bytes: int
    trainable: bool
    spread: float

    def to_record(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self)


def layer_figures(profile: ModelProfile, load: Load) -> list[LayerFigures]:
    """Figures of a profile's layers for one micro-batch, a row for each run of equal layers."""
    total = sum(float(_seconds(layer)(load)) for layer in profile.layers)
    groups = groupby(profile.layers, key=lambda layer: replace(layer, name=""))
    return [_figures([*group], load, total) for _, group in groups]


def _seconds(layer: LayerCost) -> CostModel:
    return layer.forward_seconds + layer.backward_seconds + layer.weight_seconds


def _figures(group: Sequence[LayerCost], load: Load, total: float) -> LayerFigures:
    layer = group[0]
    return LayerFigures(
        kind=layer.kind,
        layers=len(group),
        forward_seconds=float(layer.forward_seconds(load)),
        backward_seconds=float(layer.backward_seconds(load)),
        weight_seconds=float(layer.weight_seconds(load)),
        share=len(group) * float(_seconds(layer)(load)) / total if total else 0.0,
        output_bytes=float(layer.output_bytes(load)),
        saved_bytes={level: float(model(load)) for level, model in layer.saved_bytes.items()},
        parameter_bytes=layer.parameter_bytes,
        trainable=layer.trainable,
        spread=layer.spread,
    )


def time_table(rows: Sequence[LayerFigures]) -> Table:
    """Milliseconds of one layer of each kind, and the share of the model's time that all of them take."""
    measured = any(row.spread for row in rows)
    names = ("layers", "forward ms", "backward", "weights", "of all", *(["spread"] if measured else []))
    table = _table(names)
    for row in rows:
        seconds = row.forward_seconds, row.backward_seconds, row.weight_seconds
        cells = [f"{row.layers}", *(f"{1e3 * part:,.3g}" for part in seconds), f"{row.share:.0%}"]
        table.add_row(_name(row), *cells, *([f"{row.spread:.1%}"] if measured else []))
    return table


def bytes_table(rows: Sequence[LayerFigures]) -> Table:
    """MiB that one layer of each kind sends on, keeps for its backward pass at each level, and holds in weights."""
    levels = list(dict.fromkeys(level for row in rows for level in row.saved_bytes))
    table = _table(("sends\nMiB", *(f"keeps MiB\n({level})" for level in levels), "weights\nMiB"))
    for row in rows:
        kept = (_mebi(row.saved_bytes[level]) if level in row.saved_bytes else "–" for level in levels)
        table.add_row(_name(row), _mebi(row.output_bytes), *kept, _mebi(row.parameter_bytes))
    return table


def _table(names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("kind", overflow="fold", min_width=15)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _name(row: LayerFigures) -> str:
    return row.kind if row.trainable else f"{row.kind} (frozen)"


def _mebi(size: float) -> str:
    return f"{size / MEBI:,.0f}" if size >= 10 * MEBI else f"{size / MEBI:.1f}"
