from types import SimpleNamespace

import torch

from omnibal.engine import peak


def test_beside_the_model_is_all_of_a_gpu_that_the_allocator_did_not_take(monkeypatch):
    assert peak.overhead_bytes() == 0  # on a CPU
    monkeypatch.setattr(peak, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 25)
    assert peak.overhead_bytes() == 5
