"""omnibal profile: what each layer of a model costs, counted for a device or measured on this machine."""

import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from omnibal.cli.costs import (
    DeviceOption,
    Dtype,
    DtypeOption,
    FrozenOption,
    TensorParallelOption,
    count_costs,
)
from omnibal.errors import ConfigError

if TYPE_CHECKING:
    from omnibal.cost import Load
    from omnibal.profile.records import ModelProfile


def profile(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder; its config.json is enough.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The profile to write, a JSON file.", show_default=False)],
    device: DeviceOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure on this machine's accelerator, or CPU where it has none.")
    ] = False,
    dtype: DtypeOption = "bfloat16",
    vision_units: Annotated[
        int | None, typer.Option(help="Most vision units (tiles, patches) in a pack; 9.", min=0)
    ] = None,
    llm_tokens: Annotated[int | None, typer.Option(help="Most LLM tokens in a pack; 4096.", min=1)] = None,
    tensor_parallel: TensorParallelOption = 1,
    frozen: FrozenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Write what each layer of a model costs: time, bytes sent, bytes kept.

    Counted from operations and bytes for a device that you need not have, or
    measured: one layer of each kind, at a quarter, a half and all of the pack
    size. The costs are functions of what a pack holds; the table shows them
    for the full pack.

    Example: omnibal profile models/InternVL3-14B-hf profile.json --device a100

    Example: omnibal profile models/InternVL3-1B-hf profile.json --measure
    --dtype float32 --vision-units 4 --llm-tokens 1024

    Then: omnibal partition profile.json --num-stages 4
    """
    from omnibal.cli.outputs import check_file
    from omnibal.cli.steps import full_pack
    from omnibal.report.layers import bytes_table, layer_figures, time_table

    check_file("out", out)
    pack = full_pack(vision_units, llm_tokens)
    if measure == (device is not None):
        raise ConfigError(f"costs must come from either --device or --measure, got {'both' if measure else 'neither'}")
    notes: list[str] = []
    if device is not None:
        made = count_costs(model, device, dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen or ())
    else:
        if tensor_parallel > 1:
            raise ConfigError(f"--tensor-parallel must come with --device, got {tensor_parallel} with --measure")
        made, notes = _measure(model, pack, dtype, frozen or ())
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    rows = layer_figures(made, pack)
    if as_json:
        record = {"profile": str(out), "hash": made.content_hash, "device": made.devices, "dtype": made.dtype}
        kinds = [row.to_record() for row in rows]
        typer.echo(json.dumps(record | {"pack": _sizes(pack), "warnings": notes, "kinds": kinds}, indent=2))
        return
    console = Console()
    sizes = " and ".join(f"{size:,} {name}" for name, size in _sizes(pack).items())
    console.print(f"a layer of each kind on {made.devices} ({made.dtype}), a pack of {sizes}", highlight=False)
    console.print(time_table(rows))
    console.print(bytes_table(rows))
    for note in [*(f"warning: {note}" for note in notes), f"written: {out} (hash {made.content_hash})"]:
        console.print(note, highlight=False, markup=False)


def _sizes(pack: "Load") -> dict[str, int]:
    return {"vision units": int(pack.vision_units), "LLM tokens": int(pack.llm_tokens)}


def _measure(model: Path, pack: "Load", dtype: Dtype, frozen: Collection[str]) -> tuple["ModelProfile", list[str]]:
    """A measured profile, and what makes its measurements doubtful."""
    import torch

    from omnibal.data.limits import PackLimits
    from omnibal.vlm import load_model
    from omnibal.vlm.measure import measure_profile
    from omnibal.vlm.passes import MeasurementWarning, this_device

    limits = PackLimits(int(pack.vision_units), int(pack.llm_tokens))
    with Console(stderr=True).status("measuring") as status, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeasurementWarning)
        made = measure_profile(
            load_model(model),
            limits,
            dtype=getattr(torch, dtype),
            device=this_device(),
            frozen=frozen,
            report=lambda name: status.update(f"measuring {name}"),
        )
    return made, [str(entry.message) for entry in caught if issubclass(entry.category, MeasurementWarning)]
