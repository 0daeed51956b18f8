"""omnibal profile: what each layer of a model costs, counted for a device or measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LimitsOption,
    answer,
    check_file,
    expect,
    open_workspace,
    read_cluster,
    read_limits,
    working,
)
from omnibal.cli.planning import usual_limits
from omnibal.config import ModelSection, OmnibalSection
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.families.base import vision_unit_of
from omnibal.profile.records import LayerCost, ModelProfile
from omnibal.report.style import MIB, Row, scaled, table_of
from omnibal.workspace import Overrides, Workspace


def profile(
    source: Annotated[
        Path, typer.Argument(help="A ds_config; or, without one, a Hugging Face folder (its config.json is enough).")
    ],
    out: Annotated[Path | None, typer.Argument(help="File to write; by default in the ds_config's run.output.")] = None,
    cluster: ClusterOption = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure on this machine's accelerator, or CPU where it has none; else costs are counted."
        ),
    ] = False,
    limits: LimitsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what each layer of a model costs: time, bytes sent, bytes kept.

    Measured, one layer of each kind at a quarter, a half and all of the pack size; or counted from operations and
    bytes for a device that you need not have. The costs are functions of what a pack holds; the table shows them for
    the full pack.

    Example: omnibal profile ds_configs/mine.json --measure

    Example: omnibal profile models/InternVL3-14B-hf profile.json
    --cluster a100
    """
    kind = expect("source", source, ("ds_config", "model"))
    check_file("out", out)
    fixed = read_limits(limits)
    if kind == "ds_config":
        workspace = open_workspace(source, cluster=cluster, measures=measure, replaces=out is None)
        out = out or workspace.section.run.files.profile
        check_file("out", out)
    elif out is None:
        raise ConfigError(f"out must name a file for the profile, got none: {source} is no ds_config")
    elif measure == (cluster is not None):
        got = "both" if measure else "neither"
        raise ConfigError(f"costs must be counted for a --cluster or come from --measure, got {got}")
    else:
        workspace = _workspace_of(source, cluster, measures=measure)
    if measure:
        if fixed is None:
            usual = workspace.limits if kind == "ds_config" else PackLimits(*usual_limits(workspace.records))
            fixed = usual.vision_units, usual.llm_tokens
        made = workspace.make_profile(PackLimits(*fixed))
    else:
        made = workspace.profile
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    _say(made, fixed or usual_limits(made.layers), workspace.warnings, out, as_json=as_json)


def _workspace_of(folder: Path, cluster: str | None, *, measures: bool) -> Workspace:
    """What a ds_config would say of a model's folder: all of it is trained, in bfloat16."""
    config, section = {"bf16": {"enabled": True}}, OmnibalSection(model=ModelSection(path=str(folder)))
    named = Overrides(cluster=None if cluster is None else read_cluster(cluster))
    return Workspace(config, section, overrides=named, measures=measures, working=working)


def _say(made: ModelProfile, limits: tuple[int, int], notes: list[str], out: Path, *, as_json: bool) -> None:
    """Show what layers cost for a pack of one sample, with one image, as large as the limits."""
    units, tokens = limits
    rows = _layer_rows(made, Load(units, tokens, tokens**2, units**2))
    record = {
        "profile": out,
        "hash": made.content_hash,
        "device": made.devices,
        "dtype": made.dtype,
        "pack": dict(zip(("vision units", "LLM tokens"), limits, strict=True)),
        "warnings": notes,
        "kinds": rows,
    }
    pack_of = f"{units:,} {vision_unit_of(made.layers)} and {tokens:,} LLM tokens"
    answer(
        record,
        f"a layer of each kind on {made.devices} ({made.dtype}), a pack of {pack_of}",
        _time_table(rows),
        _bytes_table(rows),
        *(f"warning: {note}" for note in notes),
        f"written: {out} (hash {made.content_hash})",
        as_json=as_json,
    )


def _layer_rows(profile: ModelProfile, load: Load) -> list[dict[str, Any]]:
    """What layers cost for one micro-batch, as JSON values, a row for each run of equal layers.

    Figures are one layer's; ``share`` is that of all of them in the time of the model.
    """
    groups = ([*group] for _, group in groupby(profile.layers, key=lambda layer: replace(layer, name="")))
    runs = [(group[0], len(group)) for group in groups]
    total = sum(count * _seconds(layer, load) for layer, count in runs)
    return [
        {
            "kind": layer.kind,
            "layers": count,
            "forward_seconds": float(layer.forward_seconds(load)),
            "backward_seconds": float(layer.backward_seconds(load)),
            "weight_seconds": float(layer.weight_seconds(load)),
            "share": count * _seconds(layer, load) / total if total else 0.0,
            "output_bytes": float(layer.output_bytes(load)),
            "saved_bytes": {level: float(model(load)) for level, model in layer.saved_bytes.items()},
            "parameter_bytes": layer.parameter_bytes,
            "trainable": layer.trainable,
            "spread": layer.spread,
        }
        for layer, count in runs
    ]


def _seconds(layer: LayerCost, load: Load) -> float:
    return float((layer.forward_seconds + layer.backward_seconds + layer.weight_seconds)(load))


def _time_table(rows: Sequence[Row]) -> Table:
    """Milliseconds of one layer of each kind, and the share of the model's time that all of them take."""
    names = {"forward ms": "forward_seconds", "backward": "backward_seconds", "weights": "weight_seconds"}
    times = [(head, scaled(name, 1e-3, ",.3g")) for head, name in names.items()]
    spread = [("spread", "{spread:.1%}")] if any(row["spread"] for row in rows) else []
    return table_of(rows, [("kind", _name), ("layers", "{layers}"), *times, ("of all", "{share:.0%}"), *spread])


def _bytes_table(rows: Sequence[Row]) -> Table:
    """MiB that one layer of each kind sends on, keeps for its backward pass at each level, and holds in weights."""

    def kept(level: str) -> Callable[[Row], str]:
        return lambda row: _mebi(row["saved_bytes"].get(level))

    levels = dict.fromkeys(level for row in rows for level in row["saved_bytes"])
    return table_of(
        rows,
        [
            ("kind", _name),
            ("sends\nMiB", lambda row: _mebi(row["output_bytes"])),
            *((f"keeps MiB\n({level})", kept(level)) for level in levels),
            ("weights\nMiB", lambda row: _mebi(row["parameter_bytes"])),
        ],
    )


def _name(row: Row) -> str:
    return f"{row['kind']}" if row["trainable"] else f"{row['kind']} (frozen)"


def _mebi(size: float | None) -> str:
    if size is None:
        return "–"
    return f"{size / MIB:,.0f}" if size >= 10 * MIB else f"{size / MIB:.1f}"
