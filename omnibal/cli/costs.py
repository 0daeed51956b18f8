"""What layers cost, on which machines: from a command line, this machine, or a model."""

import json
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console

from omnibal.cluster import Cluster
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.profile.records import ModelProfile
from omnibal.records import read_json

if TYPE_CHECKING:
    from omnibal.families.base import LayerRecord
    from omnibal.profile.records import LayerCost
    from omnibal.vlm import VisionLanguageModel

LLM_TOKENS: Final = 4096
IMAGE_TOKENS: Final = 9 * 256
"""Of a pack where nothing is said; with InternVL's 256 tokens a tile, the OmniBal paper's limits."""


def usual_limits(layers: "Sequence[LayerCost | LayerRecord]") -> tuple[int, int]:
    """Vision units and LLM tokens of a pack where nothing is said: as many units as bring ``IMAGE_TOKENS``."""
    for layer in layers:
        if "image_tokens_per_tile" in layer.sizes:
            return max(IMAGE_TOKENS // layer.sizes["image_tokens_per_tile"], 1), LLM_TOKENS
        if "units_per_token" in layer.sizes:
            return IMAGE_TOKENS * layer.sizes["units_per_token"], LLM_TOKENS
    return IMAGE_TOKENS // 256, LLM_TOKENS


def one_sample(limits: tuple[int, int]) -> Load:
    """A pack of one sample, with one image, as large as the limits."""
    units, tokens = limits
    return Load(units, tokens, tokens**2, units**2)


def read_cluster(text: str) -> Cluster:
    """A cluster as the command line gives it: nodes x devices x device, or a JSON record or its file.

    Raises:
        ConfigError: It is neither.
    """
    if text.endswith(".json"):
        return Cluster.of(read_json(text, "--cluster"))
    if not text.lstrip().startswith("{"):
        return Cluster.parse(text)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--cluster must be JSON where it begins with a brace, got {text!r}: {error}") from error
    return Cluster.of(record)


def devices_at_hand() -> Cluster | None:
    """This machine's CUDA devices, or None.

    Raises:
        ConfigError: They are of a kind that nothing is known of.
    """
    try:
        import torch
    except ModuleNotFoundError:  # the base install plans too
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Cluster(1, count, Device.named(torch.cuda.get_device_name())) if count else None


def measured_costs(
    model: "VisionLanguageModel", limits: PackLimits, *, dtype: str, frozen: Collection[str]
) -> tuple[ModelProfile, list[str]]:
    """A profile measured on this machine, and what makes its measurements doubtful.

    Args:
        model: Its layers.
        limits: The largest pack.
        dtype: Of the forward pass.
        frozen: What is not trained.
    """
    import torch

    from omnibal.vlm.measure import measure_profile
    from omnibal.vlm.passes import MeasurementWarning, this_device

    with Console(stderr=True).status("measuring") as status, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeasurementWarning)
        made = measure_profile(
            model,
            limits,
            dtype=getattr(torch, dtype),
            device=this_device(),
            frozen=frozen,
            report=lambda name: status.update(f"measuring {name}"),
        )
    return made, [str(entry.message) for entry in caught if issubclass(entry.category, MeasurementWarning)]


def check_measured_here(profile: ModelProfile) -> None:
    """Refuse costs of another device or other software than trials run on; counted ones hold anywhere.

    Raises:
        ConfigError: Something differs, or devices share layers.
    """
    profile.check_matches(tensor_parallel=1)
    if profile.versions:
        from omnibal.vlm.measure import measured_versions
        from omnibal.vlm.passes import device_name, this_device

        profile.check_matches(device=device_name(this_device()), versions=measured_versions())
