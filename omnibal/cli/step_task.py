"""Options that say how a step runs."""

import shlex
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from omnibal.cli.costs import GIGA, bandwidth_of
from omnibal.cluster import OVERHEAD_BYTES, Links

if TYPE_CHECKING:
    from omnibal.profile.records import ModelProfile

# As in omnibal.pipeline and omnibal.memory.footprint, which load too much for a command's --help.
Mode = Literal["rendezvous", "overlap"]
Level = Literal["none", "selective", "full"]
ScheduleName = Literal["1f1b", "zero-bubble", "zero-bubble-lean"]

ReduceBandwidthOption = Annotated[
    float | None, typer.Option(help="GB/s between replicas, for the gradients; as between stages.", min=0)
]
OverheadOption = Annotated[
    float,
    typer.Option(
        help="GiB that a device holds beside the model: contexts, libraries, communicators; training on CUDA says what "
        "it was.",
        min=0,
        max=1e6,
    ),
]
OVERHEAD_GIB: Final = OVERHEAD_BYTES / 2**30
LatencyOption = Annotated[float, typer.Option(help="Microseconds that a transfer takes whatever its size.", min=0)]
ModeOption = Annotated[
    Mode, typer.Option(help="Transfers of 1f1b: blocking in DeepSpeed's order, or beside the computations.")
]
ZeroStageOption = Annotated[int, typer.Option(help="ZeRO stage; 1: replicas share the optimizer's work.", min=0, max=1)]
RecomputeOption = Annotated[
    Level | None,
    typer.Option(help="What every layer recomputes in its backward pass; left out, what a given plan says, or none."),
]
ScheduleOption = Annotated[
    ScheduleName | None, typer.Option(help="What stages run in which order: as the plan says; 1f1b without one.")
]


def _check_quotes(options: str | None) -> str | None:
    try:
        shlex.split(options or "")
    except ValueError as error:
        raise typer.BadParameter(f"must be options as on a command line, got {options!r}: {error}") from error
    return options


LauncherOption = Annotated[
    str | None,
    typer.Option(help="Options of the deepspeed launcher; --num_gpus with stages × replicas.", callback=_check_quotes),
]
MICROSECONDS: Final = 1e-6
MICRO_BATCHES_PER_STAGE: Final = 4
"""As many micro-batches make a step where nothing is said: the bubble is then a fifth at most."""


def links_of(
    profile: "ModelProfile", *, bandwidth: float | None, reduce_bandwidth: float | None, latency: float
) -> Links:
    """From options, in GB/s and microseconds; what is not given follows from the profile's device."""
    return Links(
        bandwidth_of(profile, bandwidth),
        reduce_bandwidth_bytes_per_second=None if reduce_bandwidth is None else reduce_bandwidth * GIGA,
        latency_seconds=latency * MICROSECONDS,
    )
