"""Accelerators, as far as costs depend on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omnibal.errors import ConfigError


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
