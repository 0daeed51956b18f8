"""Accelerators, as far as costs depend on them, and those that are known."""

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from typing import Any, Final

from omnibal.errors import ConfigError

LINK_FRACTION: Final = 0.75
"""Share of a link's bandwidth that sums, gathers and reductions of tens of MB reach."""
# NCCL's protocol leaves 370 of an H100's 450 GB/s (0.82, NVIDIA/nccl-tests#212), and A100s with NVLink reach 208 of 300
# (0.69, NVIDIA/nccl-tests#178). NVSwitches that sum themselves (NVLink SHARP) do better from 256 MB on; PCIe without
# peer access does worse. A gather and a reduction are the two halves of such a sum, over the same rings; between nodes,
# where nothing of ours was measured, the same share is taken.

MARGIN_SHARE: Final = 0.06
"""Share of a device's memory that a run leaves free: counted peaks are not exact, and allocators fragment."""
# The margin is at least so much, but for devices on which this would be more than an eighth.
MARGIN_BYTES, MOST_MARGIN_SHARE = 2 * 2**30, 1 / 8


def usable_bytes(device_bytes: float) -> float:
    """What a run may take of a device, less the margin.

    >>> [usable_bytes(gib * 2**30) / 2**30 for gib in (80, 20, 8)]
    [75.2, 18.0, 7.0]
    """
    return device_bytes - max(MARGIN_SHARE * device_bytes, min(MARGIN_BYTES, MOST_MARGIN_SHARE * device_bytes))


@dataclass(frozen=True)
class Device:
    """An accelerator. What is None is not known of it: costs cannot be counted for it, or nodes of it joined.

    Raises:
        ConfigError: A number is not positive and finite, or the fraction is above 1.
    """

    name: str
    _: KW_ONLY
    memory_bytes: float
    """All that processes may hold, contexts included: what the driver reports, which is not the data sheet's."""
    link_bytes_per_second: float
    """To another device of the same node, one direction."""
    node_bytes_per_second: float | None = None
    """To a device of another node, one direction, where each device has its share of the node's network."""
    flops_per_second: float | None = None
    """Peak of dense matrix products in 16 bits; half of it is reckoned with in 32 bits."""
    fraction: float = 0.6
    """Share of the peak that matrix products of a training reach; what else it does is memory traffic."""
    memory_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "name" and value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} of device {self.name} must be positive and finite, got {value!r}")
        if self.fraction > 1:
            raise ConfigError(f"fraction of device {self.name} must be at most 1, got {self.fraction!r}")

    @classmethod
    def of(cls, given: Any) -> Any:
        return cls.named(given) if isinstance(given, str) else given

    @classmethod
    def named(cls, name: str) -> "Device":
        """The known device of this name, as torch calls it, or whose name starts so; of several the largest.

        Raises:
            ConfigError: There is none; the message names the nearest one, and says how to give numbers of one's own.

        Example:
            >>> Device.named("a100").name, Device.named("A100-40").name, Device.named("NVIDIA H200").name
            ('A100-80GB', 'A100-40GB', 'H200-141GB')
        """
        wanted = _TORCH_NAMES.get(name, name).lower().replace(" ", "-")
        wanted = f"rtx-{wanted[3:]}" if re.match(r"rtx\d|rtxa", wanted) else wanted  # RTX4090 and RTX 4090
        starts = re.compile(re.escape(wanted) + r"(?!\d)")  # an A10 is no A100
        found = [device for known, device in DEVICES.items() if wanted and starts.match(known.lower())]
        if found:
            return max(found, key=lambda device: device.memory_bytes)
        by_letters = {known.lower(): known for known in DEVICES}
        nearest = get_close_matches(wanted, by_letters, n=1, cutoff=0.5)
        hint = f"did you mean {by_letters[nearest[0]]!r}? " if nearest else ""
        raise ConfigError(
            f"device must begin like one of {', '.join(DEVICES)}, got {name!r}; {hint}for another one give a record "
            'with "name", "memory_bytes" and "link_bytes_per_second", for several nodes "node_bytes_per_second", and '
            '"flops_per_second" and "memory_bytes_per_second" to count costs; it is the "device" of a cluster\'s '
            'record, beside "num_nodes" and "devices_per_node"'
        )


# By their data sheets, dense products in 16 bits. Fractions are measured on an H200 (tools/gpu/RESULTS.md), whose chip
# an H100 has. For the others they leave blocks of a 7B model, memory traffic among them, the share of the peak that
# published training runs commonly reach: 50 % (40 % of a B200 and a V100, 35 % of an MI300X), but are at most 0.65.
#
# Memory is the least that torch was seen to report in total (``torch.cuda.mem_get_info``), as drivers keep some tenths
# of a GiB more or less: 39.38 to 39.59 GiB of an A100-40GB (vllm-project/vllm#16570, raoyongming/DenseCLIP#52), 79.25
# to 79.35 of an A100-80GB (HiDream-ai/VAREdit#6, Instruction-Tuning-with-GPT-4/GPT-4-LLM#16), 79.10 of an H100
# (huggingface/trl#2688), 139.80 of an H200 (published logs; nvidia-smi says 143,771 MiB). Of those without NVLink, of
# B200, V100 and MI300X it is what their data sheets leave after the driver's share and error correction.
#
# Within a node it is NVLink's or Infinity Fabric's bandwidth in one direction, else that of a PCIe slot of 16 lanes.
# Between nodes it is that of the makers' own systems, a network card for each device: ConnectX-6 of 200 Gb/s (DGX A100
# user guide), ConnectX-7 of 400 Gb/s (DGX H100, H200 and B200); 100 Gb/s where there is no such system. Rented machines
# often have less. A V100 computes in float16 alone, whose costs are the same.
DEVICES: Final[Mapping[str, Device]] = {
    name: Device(
        name, memory_bytes=memory_gib * 2**30, link_bytes_per_second=link, node_bytes_per_second=network,
        flops_per_second=flops, fraction=fraction, memory_bytes_per_second=bandwidth,
    )
    for name, memory_gib, link, network, flops, fraction, bandwidth in (
        ("A100-40GB", 39.38, 300e9, 25e9, 312e12, 0.6, 1.555e12),
        ("A100-80GB", 79.25, 300e9, 25e9, 312e12, 0.6, 2.039e12),
        ("H100-80GB", 79.1, 450e9, 50e9, 989e12, 0.69, 3.35e12),
        ("H100-PCIe-80GB", 79.1, 64e9, 25e9, 756e12, 0.65, 2.0e12),
        ("H200-141GB", 139.8, 450e9, 50e9, 989e12, 0.69, 4.8e12),
        ("B200-180GB", 178.0, 900e9, 50e9, 2250e12, 0.53, 8.0e12),
        ("L40S-48GB", 44.4, 32e9, 25e9, 362e12, 0.65, 0.864e12),
        ("RTX-A6000-48GB", 47.4, 32e9, 12.5e9, 154.8e12, 0.65, 0.768e12),
        ("A10-24GB", 22.0, 32e9, 12.5e9, 125e12, 0.65, 0.6e12),
        ("L4-24GB", 22.0, 32e9, 12.5e9, 121e12, 0.65, 0.3e12),
        ("RTX-4090-24GB", 23.5, 32e9, 12.5e9, 165.2e12, 0.61, 1.008e12),
        ("RTX-3090-24GB", 23.5, 32e9, 12.5e9, 71e12, 0.55, 0.936e12),
        ("V100-32GB", 31.7, 150e9, 12.5e9, 125e12, 0.46, 0.9e12),
        ("MI300X-192GB", 191.0, 448e9, 50e9, 1307e12, 0.43, 5.3e12),
    )
}  # fmt: skip
_TORCH_NAMES: Final[Mapping[str, str]] = {
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA H100 80GB HBM3": "H100-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe-80GB",
    "NVIDIA H200": "H200-141GB",
    "NVIDIA B200": "B200-180GB",
    "NVIDIA L40S": "L40S-48GB",
    "NVIDIA RTX A6000": "RTX-A6000-48GB",
    "NVIDIA A10": "A10-24GB",
    "NVIDIA L4": "L4-24GB",
    "NVIDIA GeForce RTX 4090": "RTX-4090-24GB",
    "NVIDIA GeForce RTX 3090": "RTX-3090-24GB",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "AMD Instinct MI300X": "MI300X-192GB",
}
