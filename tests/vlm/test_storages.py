import torch

from omnibal.vlm import load_model
from omnibal.vlm.backward import run_layer
from omnibal.vlm.passes import StorageMeter, overhead_bytes, storage_bytes
from tests.vlm.models import build_layers, make_pack, make_sample, pack_loss, tiny_config


class SlowMeter(StorageMeter):
    """Counts everything that is alive after every operator."""

    def __init__(self):
        super().__init__()
        self.slow_peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.slow_peak = max(self.slow_peak, sum(self.alive.values()))
        return result


def test_the_peak_of_a_few_tensors():
    with StorageMeter() as meter:
        first = torch.zeros(100)  # 400 bytes
        view = first[:50]
        second = torch.zeros(25) + 1  # 100, and 100 that die at once
        del first
        third = view.clone()  # 200
    assert meter.peak_bytes == 400 + 100 + 200
    assert sum(meter.alive.values()) == 400 + 100 + 200
    del view, third
    assert sum(meter.alive.values()) == 100
    assert meter.peak_bytes == 700
    assert second.numel() == 25


def test_what_was_there_before_does_not_count():
    given = torch.zeros(10)
    with StorageMeter() as meter:
        given.add_(1)
        given.view(2, 5)
    assert meter.peak_bytes == 0


def test_the_peak_of_a_training_step_is_that_of_a_slow_count():
    layers, pack = build_layers(load_model(tiny_config())), make_pack([make_sample(1, tiles=(1, 2)), make_sample(2)])
    peaks = {}
    for level in ("none", "full"):
        meter = SlowMeter()
        with meter:
            pack_loss(
                [lambda payload, layer=layer, level=level: run_layer(layer, payload, level) for layer in layers], pack
            ).backward()
        assert meter.peak_bytes == meter.slow_peak
        peaks[level] = meter.peak_bytes
        for layer in layers:
            layer.zero_grad()
    assert peaks["full"] < peaks["none"]


def test_tensors_of_one_storage_count_once():
    base = torch.zeros(10)
    assert storage_bytes([base, base[3:], torch.zeros(2)]) == 48


def test_beside_the_model_is_all_of_a_gpu_that_the_allocator_did_not_take(monkeypatch):
    assert overhead_bytes(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 25)
    assert overhead_bytes(torch.device("cuda")) == 5
