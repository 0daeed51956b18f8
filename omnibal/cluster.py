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
    """All that processes may hold, contexts included: what the driver reports, which is not the data sheet's."""
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
        Device("A100-40GB", 312e12, 0.5, 39.38 * 2**30, 1.555e12, 300e9),
        Device("A100-80GB", 312e12, 0.5, 79.25 * 2**30, 2.039e12, 300e9),
        Device("H100-80GB", 989e12, 0.45, 79.1 * 2**30, 3.35e12, 450e9),
        Device("H200-141GB", 989e12, 0.45, 139.8 * 2**30, 4.8e12, 450e9),
    )
}
"""SXM modules by their data sheets; the fractions are what published training runs commonly reach.

Memory is the least that torch was seen to report in total (``torch.cuda.mem_get_info``), as drivers keep some tenths
of a GiB more or less: 39.38 to 39.59 GiB of an A100-40GB (vllm-project/vllm#16570, raoyongming/DenseCLIP#52), 79.25 to
79.35 of an A100-80GB (HiDream-ai/VAREdit#6, Instruction-Tuning-with-GPT-4/GPT-4-LLM#16), 79.10 of an H100
(huggingface/trl#2688), 139.80 of an H200 (published logs; nvidia-smi says 143,771 MiB).
"""

OVERHEAD_BYTES = 2 * 2**30
"""What a process holds on its device beside the model, unless it was measured.

A context with the kernels that were used, 0.3 to 0.5 GB (pytorch/pytorch#107667, #81257), and NCCL's buffers of the
two communicators that a rank moves most with, of its replicas and of its stages: 0.54 to 0.69 GB each
(NVIDIA/nccl#964, four A100). Together up to 1.9 GB, rounded up. Fragments belong to the head room.
"""
