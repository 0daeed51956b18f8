"""Several ranks of NCCL on one device."""

import torch

SHARED = {
    "LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket",
    "NCCL_CUMEM_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": "1048576",
}  # fmt: skip
"""Of every rank: transfers go over sockets of the loopback, and buffers are small."""


def rank_environment(rank: int, num_processes: int, num_devices: int | None = None) -> dict[str, str]:
    """Variables of a rank on this machine, which shares the first device if there are fewer than ranks.

    NCCL refuses two ranks of one host on one device, and tells hosts apart by ``NCCL_HOSTID``.

    >>> rank_environment(1, 2, num_devices=2)
    {'LOCAL_RANK': '1'}
    >>> rank_environment(1, 2, num_devices=1)["NCCL_HOSTID"]
    'host1'
    """
    devices = torch.cuda.device_count() if num_devices is None else num_devices
    if devices == 0 or devices >= num_processes:
        return {"LOCAL_RANK": str(rank)}
    return {**SHARED, "NCCL_HOSTID": f"host{rank}"}
