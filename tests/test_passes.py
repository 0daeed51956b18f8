import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from omnibal.passes import (
    STEPS,
    WARM_UP,
    StorageMeter,
    Timing,
    device_name,
    kept_bytes,
    overhead_bytes,
    storage_bytes,
    time_optimizer,
    time_passes,
)
from omnibal.vlm import load_model
from omnibal.vlm.payload import run_layer
from tests.test_import import loaded_by
from tests.vlm.models import build_layers, make_pack, make_sample, pack_loss, tiny_config

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still unless it is told to go on."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


class Slow(torch.autograd.Function):
    """Takes seconds of a clock, forward and backward."""

    @staticmethod
    def forward(ctx, value, clock, forward_seconds, backward_seconds):
        ctx.clock, ctx.backward_seconds = clock, backward_seconds
        clock.now += forward_seconds
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward_seconds
        return gradient, None, None, None


def test_times_are_medians_of_the_passes_after_the_warm_up(monkeypatch):
    clock = Clock(monkeypatch)
    seconds = iter([(50, 60), (40, 70), (1, 10), (2, 30), (3, 20), (4, 20), (9, 90)])
    weight = torch.ones(3, requires_grad=True)
    forward, backward, _ = time_passes(lambda: Slow.apply(weight, clock, *next(seconds)), CPU)
    assert forward == Timing(seconds=3.0, spread_seconds=2.0)
    assert backward == Timing(seconds=20.0, spread_seconds=10.0)
    assert backward.spread == 0.5
    # gradients accumulate, as over micro-batches
    assert weight.grad.tolist() == [WARM_UP + STEPS] * 3


def test_without_gradients_there_is_no_backward_pass(monkeypatch):
    clock = Clock(monkeypatch)
    forward, backward, _ = time_passes(lambda: Slow.apply(torch.ones(3), clock, 2, 5), CPU)
    assert (forward.seconds, backward.seconds) == (2.0, 0.0)


def test_timings_add_up():
    assert Timing(1.0, 0.5) + Timing(2.0, 0.25) == Timing(3.0, 0.75)
    assert Timing(0.0, 0.0).spread == 0.0


def test_an_optimizer_step_is_timed_on_copies():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    assert time_optimizer([weight]).seconds > 0
    assert weight.tolist() == [1.0] * 4
    assert time_optimizer([]) == Timing(0.0, 0.0)


def floats(*shape):
    return torch.rand(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x.exp(), 4 * 100),  # saves its output
        (lambda x: x.exp() + 0, 4 * 100),
        (lambda x: x.sin(), 4 * 100),  # saves its input
        (lambda x: x.sin() + x.cos(), 4 * 100),  # the same input
        (lambda x: x.exp().sin(), 4 * 100),  # output of one, input of the other
        (lambda x: x.sin().sin(), 2 * 4 * 100),
        (lambda x: x.view(4, 25)[:2].sin(), 4 * 100),  # half of a storage keeps it whole
        (lambda x: (x > 0.5).float() * x, 4 * 100 + 0),
    ],
)
def test_kept_bytes_are_those_of_the_storages_that_autograd_saves(make, expected):
    x = floats(100)
    assert kept_bytes(lambda: make(x)) == expected


def test_what_is_there_anyway_does_not_count():
    layer, x = nn.Linear(10, 20), floats(5, 10)
    assert kept_bytes(lambda: layer(x), free=layer.parameters()) == 4 * 50
    assert kept_bytes(lambda: layer(x)) == 4 * (50 + 200)


def test_a_recomputed_layer_keeps_its_input():
    layer, x = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 10)), floats(5, 10)
    free = list(layer.parameters())
    assert kept_bytes(lambda: layer(x), free=free) == 4 * (50 + 100 + 100)
    assert kept_bytes(lambda: checkpoint(layer, x, use_reentrant=False), free=free) == 4 * 50


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        assert kept_bytes(lambda: floats(100).sin()) == 0


def test_what_lives_on_outside_of_autograd_counts():
    cache = []

    def forward():
        x = torch.ones(50)
        cache.append(x * 2)
        return x + 1

    assert kept_bytes(forward) == 4 * 50


def test_a_cpu_is_named_with_its_threads():
    assert device_name(CPU).endswith(f"CPU, {torch.get_num_threads()} threads")


def test_a_device_whose_torch_has_no_names_is_named_by_its_kind():
    assert device_name(torch.device("mps")) == "mps"


def test_loaders_for_loops_load_no_transformers():
    assert loaded_by("import omnibal.integrations.loops", ("transformers",)) == set()


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
