"""Layer costs from whatever a user names: a profile, or a model and a device."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from omnibal.device import DEVICES, Device
from omnibal.errors import ConfigError

if TYPE_CHECKING:
    from omnibal.config import ModelSection
    from omnibal.profile.records import ModelProfile

Dtype = Literal["bfloat16", "float32"]

GIGA: Final = 1e9

ProfileArgument = Annotated[
    Path | None, typer.Argument(help="What `omnibal profile` wrote; or --model and --device.", show_default=False)
]
ModelOption = Annotated[
    Path | None,
    typer.Option(help="The model's Hugging Face folder (its config.json is enough); checked against a profile."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help=f"Count costs for a device: {', '.join(DEVICES)}, or how a name starts (a100).")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Of the forward pass.")]
TensorParallelOption = Annotated[int, typer.Option(help="Devices that share each layer, of a counted profile.", min=1)]
FrozenOption = Annotated[
    list[str] | None, typer.Option(help="A kind of layers that is not trained, such as vision_block; repeatable.")
]
BandwidthOption = Annotated[
    float | None,
    typer.Option(
        help="GB/s between stages; by default what the profile's device has within a node: give your network's where "
        "neighbouring stages lie on different nodes.",
        min=0,
    ),
]


def find_device(name: str) -> Device:
    """The known device whose name starts so; of several the one with the most memory.

    Raises:
        ConfigError: There is none.

    Example:
        >>> find_device("a100").name, find_device("A100-40").name
        ('A100-80GB', 'A100-40GB')
    """
    found = [device for known, device in DEVICES.items() if known.lower().startswith(name.lower())]
    if not name or not found:
        raise ConfigError(f"--device must be how one of {', '.join(DEVICES)} starts, got {name!r}")
    return max(found, key=lambda device: device.memory_bytes)


def count_costs(
    model: Path, device: str, *, dtype: Dtype, tensor_parallel: int = 1, frozen: Collection[str] = ()
) -> "ModelProfile":
    """The profile of a model folder on a device, by counting."""
    from omnibal.profile.counted import analytic_profile
    from omnibal.vlm.families import load_records

    return analytic_profile(
        load_records(model), find_device(device), dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen
    )


def read_costs(
    profile: Path | None,
    *,
    model: Path | None,
    device: str | None,
    dtype: Dtype,
    tensor_parallel: int,
    frozen: Collection[str],
) -> "ModelProfile":
    """The profile that a command's arguments name.

    Raises:
        ConfigError: Neither a profile nor a model and a device are given, or both are; or the profile is of another
            model, or of other frozen layers.
    """
    if profile is None:
        if model is None or device is None:
            raise ConfigError("costs must come from a PROFILE, or from --model and --device, got neither")
        return count_costs(model, device, dtype=dtype, tensor_parallel=tensor_parallel, frozen=frozen)
    if device is not None:
        raise ConfigError(f"--device must be left out where a profile is given, got {device}: {profile} has its own")
    if tensor_parallel > 1:
        raise ConfigError(f"--tensor-parallel must be left out where a profile is given, got {tensor_parallel}")
    from omnibal.profile.records import ModelProfile

    loaded = ModelProfile.load(profile)
    if frozen:
        loaded.check_matches(frozen=frozen)
    if model is not None:
        from omnibal.vlm.families import load_records

        loaded.check_matches(records=load_records(model))
    return loaded


def check_run(
    profile: "ModelProfile", deepspeed_config: dict[str, Any], model: "ModelSection", *, is_tried: bool
) -> None:
    """Refuse a profile of another run than a ds_config's.

    Args:
        profile: What layers cost.
        deepspeed_config: The ds_config without its "omnibal" section.
        model: Of that section: which layers are trained, and whose they are.
        is_tried: Whether plans are tried on this machine: measured costs must then be of its device and software.

    Raises:
        ConfigError: Something differs; the message names every difference.
    """
    from omnibal.config import dtype_of

    here: dict[str, Any] = {"tensor_parallel": 1} if is_tried else {}
    if is_tried and model.path is not None:
        from omnibal.vlm.families import load_records

        here["records"] = load_records(model.path)
    if is_tried and profile.versions:
        from omnibal.vlm.measure import measured_versions
        from omnibal.vlm.passes import device_name, this_device

        here |= {"device": device_name(this_device()), "versions": measured_versions()}
    profile.check_matches(dtype=dtype_of(deepspeed_config), frozen=model.frozen, **here)


def bandwidth_of(profile: "ModelProfile", gigabytes: float | None) -> float:
    """Bytes per second between stages: what is given, or what the profile's device has within a node.

    Raises:
        ConfigError: It is not given and the device is unknown, or it is not positive.
    """
    if gigabytes is not None:
        if not gigabytes > 0:
            raise ConfigError(f"--bandwidth must be positive, got {gigabytes:g} GB/s")
        return gigabytes * GIGA
    if profile.device not in DEVICES:
        raise ConfigError(
            f"--bandwidth must be given for {profile.device!r}, got none; links are known of {', '.join(DEVICES)}"
        )
    return DEVICES[profile.device].link_bytes_per_second
