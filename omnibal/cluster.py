"""Accelerators, as far as costs depend on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

from omnibal.errors import ConfigError

LEAST_BANDWIDTH: Final = 1
MOST_LATENCY_SECONDS: Final = 3600
"""Of links: beyond these a step has no end that numbers could hold."""


@dataclass(frozen=True)
class Links:
    """How fast data moves between devices.

    Raises:
        ConfigError: A bandwidth is less than a byte per second, or the latency is negative or above an hour.
    """

    bandwidth_bytes_per_second: float
    """Between neighbouring stages; infinity for free transfers."""
    _: KW_ONLY
    reduce_bandwidth_bytes_per_second: float | None = None
    """Between replicas, for the gradients; None: as between stages."""
    latency_seconds: float = 0.0
    """What each transfer between stages takes whatever its size."""

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_second", "reduce_bandwidth_bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not value >= LEAST_BANDWIDTH:
                raise ConfigError(f"{name} must be at least {LEAST_BANDWIDTH} byte per second, got {value!r}")
        if not 0 <= self.latency_seconds <= MOST_LATENCY_SECONDS:
            raise ConfigError(
                f"latency_seconds must lie between 0 and {MOST_LATENCY_SECONDS}, got {self.latency_seconds!r}"
            )

    @property
    def between_replicas(self) -> float:
        """Bytes per second."""
        given = self.reduce_bandwidth_bytes_per_second
        return self.bandwidth_bytes_per_second if given is None else given


def check_zero_stage(zero_stage: int) -> None:
    """Refuse what DeepSpeed's pipeline does not have.

    Raises:
        ConfigError: The ZeRO stage is neither 0 nor 1.
    """
    if zero_stage not in (0, 1):
        raise ConfigError(f"zero_stage must be 0 or 1 under a pipeline, got {zero_stage}")


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Raises:
        ConfigError: A number is not positive and finite, or the fraction is above 1.
    """

    name: str
    flops_per_second: float
    """Peak of dense matrix products in 16 bits; half of it is reckoned with in 32 bits."""
    fraction: float
    """Share of the peak that training reaches while it computes."""
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """To another device of the same node, one direction."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "name" and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} of device {self.name} must be positive and finite, got {value!r}")
        if self.fraction > 1:
            raise ConfigError(f"fraction of device {self.name} must be at most 1, got {self.fraction!r}")


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("A100-40GB", 312e12, 0.5, 40 * 2**30, 1.555e12, 300e9),
        Device("A100-80GB", 312e12, 0.5, 80 * 2**30, 2.039e12, 300e9),
        Device("H100-80GB", 989e12, 0.45, 80 * 2**30, 3.35e12, 450e9),
        Device("H200-141GB", 989e12, 0.45, 141e9, 4.8e12, 450e9),
    )
}
"""SXM modules by their data sheets; the fractions are what published training runs commonly reach."""
