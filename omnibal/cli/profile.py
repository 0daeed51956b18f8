"""omnibal profile: what each layer of a model costs, counted for a device or measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from omnibal.cli.costs import measured_costs, one_sample, read_cluster, usual_limits
from omnibal.cli.files import check_file, expect, refuse
from omnibal.cli.opening import open_run
from omnibal.cli.options import ClusterOption, JsonOption, LimitsOption, read_limits
from omnibal.cli.output import answer
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LayerCost, ModelProfile
from omnibal.report.style import MIB, Figures, make_table


def profile(
    source: Annotated[
        Path, typer.Argument(help="A ds_config; or, without one, a Hugging Face folder (its config.json is enough).")
    ],
    out: Annotated[Path | None, typer.Argument(help="File to write; by default in the ds_config's run.output.")] = None,
    cluster: ClusterOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure on this machine's accelerator, or CPU where it has none.")
    ] = False,
    limits: LimitsOption = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Of the forward pass, where no ds_config says it; by default bfloat16."),
    ] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(
            help="A module (vision), kind of layers (vision_block) or pattern of weights' names that is not trained; "
            "repeatable."
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Count costs for so many devices that share each layer.", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write what each layer of a model costs: time, bytes sent, bytes kept.

    Counted from operations and bytes for a device that you need not have, or
    measured: one layer of each kind, at a quarter, a half and all of the pack
    size. The costs are functions of what a pack holds; the table shows them
    for the full pack.

    Example: omnibal profile ds_configs/mine.json --measure

    Example: omnibal profile models/InternVL3-14B-hf profile.json
    --cluster a100
    """
    kind = expect("source", source, ("ds_config", "model"))
    check_file("out", out)
    fixed = read_limits(limits)
    if kind == "ds_config":
        refuse({"dtype": dtype, "frozen": frozen, "tensor-parallel": tensor_parallel}, "the ds_config says it")
        made, notes, out, fixed = _of_config(source, out, cluster, fixed, measure=measure)
    elif out is None:
        raise ConfigError(f"out must name a file for the profile, got none: {source} is no ds_config")
    elif measure == (cluster is not None):
        got = "both" if measure else "neither"
        raise ConfigError(f"costs must be counted for a --cluster or come from --measure, got {got}")
    elif measure and tensor_parallel:
        raise ConfigError(f"--tensor-parallel must come with --cluster, got {tensor_parallel} with --measure")
    else:
        options = {"dtype": dtype or "bfloat16", "frozen": frozen or ()}
        made, notes = _of_model(source, cluster, fixed, tensor_parallel or 1, **options)
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    _say(made, fixed or usual_limits(made.layers), notes, out, as_json=as_json)


def _say(made: ModelProfile, limits: tuple[int, int], notes: list[str], out: Path, *, as_json: bool) -> None:
    """Show what layers cost for a pack as large as the limits."""
    rows = layer_figures(made, one_sample(limits))
    sizes = dict(zip(("vision units", "LLM tokens"), limits, strict=True))
    record = {
        "profile": out,
        "hash": made.content_hash,
        "device": made.devices,
        "dtype": made.dtype,
        "pack": sizes,
        "warnings": notes,
        "kinds": [row.to_record() for row in rows],
    }
    pack_of = " and ".join(f"{size:,} {name}" for name, size in sizes.items())
    answer(
        record,
        f"a layer of each kind on {made.devices} ({made.dtype}), a pack of {pack_of}",
        time_table(rows),
        bytes_table(rows),
        *(f"warning: {note}" for note in notes),
        f"written: {out} (hash {made.content_hash})",
        as_json=as_json,
    )


def _of_config(
    source: Path, out: Path | None, cluster: str | None, limits: tuple[int, int] | None, *, measure: bool
) -> tuple[ModelProfile, list[str], Path, tuple[int, int] | None]:
    """The profile of a ds_config, what makes it doubtful, where it goes, and the limits that it is for."""
    run = open_run(source, cluster=cluster, measure=measure)
    out = out or run.files.profile
    check_file("out", out)
    if not measure:
        return run.profile, [], out, limits
    largest = run.limits if limits is None else PackLimits(*limits)
    return run.make_profile(largest), run.doubts, out, (largest.vision_units, largest.llm_tokens)


def _of_model(
    folder: Path, cluster: str | None, limits: tuple[int, int] | None, tensor_parallel: int, **options: Any
) -> tuple[ModelProfile, list[str]]:
    """The profile of a model's folder, and what makes it doubtful."""
    from omnibal.vlm.families import load_model, load_records

    if cluster is None:
        model = load_model(folder)
        return measured_costs(model, PackLimits(*(limits or usual_limits(model.records))), **options)
    device = read_cluster(cluster).device
    return analytic_profile(load_records(folder), device, tensor_parallel=tensor_parallel, **options), []


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
