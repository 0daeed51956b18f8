"""Clusters and layouts for tests: devices of so many bytes, all pairs equally fast."""

from dataclasses import replace

from omnibal.cluster import Cluster, Layout, Links
from omnibal.device import Device

DEVICE = Device("test", memory_bytes=80e9, link_bytes_per_second=1e9)


def cluster(num_devices, memory_bytes, links=None, *, overhead_bytes=0):
    """One node; a number of bytes for all devices, or one for each."""
    links = links or Links(1e9)
    return Cluster(1, num_devices, DEVICE, memory_bytes=memory_bytes, overhead_bytes=overhead_bytes, links=links)


def on_cluster(plan, num_replicas=1, memory_bytes=10**12, links=None, *, precision="float32", **layout):
    """The plan with a layout of so many replicas on as many devices as it needs."""
    layout = Layout(plan.num_stages, num_replicas, precision=precision, **layout)
    return replace(plan, layout=layout, cluster=cluster(layout.num_devices, memory_bytes, links))
