import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.errors import ConfigError, InfeasibleError
from omnibal.planner import allocation as module_under_test
from omnibal.planner.allocation import ModuleCost, ParallelismUnit, allocate

GB = 10**9


def encoder(**changes):
    return ModuleCost(**{"name": "vision", "forward_seconds": {1: 1.0, 2: 0.6}} | changes)


def backbone(**changes):
    return ModuleCost(**{"name": "language", "forward_seconds": {1: 3.0, 2: 1.7, 4: 1.0}} | changes)


def best(modules, num_devices, **changes):
    return allocate(modules, num_devices, **{"global_batch": 12, "device_memory_bytes": 80 * GB} | changes)[0]


def devices(allocation):
    return {name: unit.num_devices for name, unit in allocation.units.items()}


def exhaustive(modules, num_devices, *, global_batch, device_memory_bytes, degrees=(1, 2, 4, 8)):
    """Seconds of the fastest stages for every combination of degrees and replicas that fits, best first."""
    fastest = {}
    divisors = [r for r in range(1, num_devices + 1) if global_batch % r == 0]

    def units(module, free, replicas):
        most = num_devices if module.num_layers is None else module.num_layers
        for t, r in itertools.product(set(degrees) & set(module.forward_seconds), replicas):
            for stages in range(1, min(free // (t * r), most) + 1):
                yield ParallelismUnit(stages, r, t, 0)

    def behind(modules, free, d):
        """Units of modules that fit together, with the stages in flight at the first of them."""
        if not modules:
            yield (), 0
            return
        first, *rest = modules
        for unit in units(first, free, [d] if first.name == "language" else divisors):
            for others, stages in behind(rest, free - unit.num_devices, d):
                flight = min(unit.num_stages + stages, global_batch // d) if first.backward_ratio else 0
                state = unit.num_replicas * (first.parameter_bytes + first.gradient_bytes) + first.optimizer_bytes
                kept = max(unit.num_replicas, d * flight) * first.activation_bytes
                if (state + kept) / unit.num_devices <= device_memory_bytes:
                    yield (unit, *others), unit.num_stages + stages

    for d in divisors:
        for found, _ in behind(modules, num_devices, d):
            pairs = [
                (unit, (1 + module.backward_ratio) * module.forward_seconds[unit.num_tensor])
                for unit, module in zip(found, modules, strict=True)
            ]
            warm_up = sum(math.ceil(d / unit.num_replicas) * seconds for unit, seconds in pairs)
            slowest = max(d * unit.num_tensor * seconds / unit.num_devices for unit, seconds in pairs)
            seconds = warm_up + (global_batch // d - 1) * slowest
            combination = tuple((unit.num_tensor, unit.num_replicas) for unit in found)
            fastest[combination] = min(seconds, fastest.get(combination, math.inf))
    return sorted(fastest.values())


def drawn_module(rng, name):
    one = rng.uniform(0.1, 4)
    speed_up = rng.uniform(0.5, 1)  # of every doubling of the tensor degree
    degrees = [1, 2, 4, 8][: rng.integers(1, 5)]
    return ModuleCost(
        name,
        {degree: one / (2 * speed_up) ** math.log2(degree) for degree in degrees},
        backward_ratio=float(rng.choice([0, 1, 2, 3])),
        parameter_bytes=rng.uniform(0, 40) * GB,
        gradient_bytes=rng.uniform(0, 40) * GB,
        optimizer_bytes=rng.uniform(0, 200) * GB,
        activation_bytes=rng.uniform(0, 20) * GB,
        num_layers=None if rng.random() < 0.5 else int(rng.integers(2, 9)),
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), names=st.sampled_from([["language"], ["vision", "language"]]))
def test_no_allocation_of_up_to_24_devices_is_faster(seed, names):
    check_against_exhaustive(np.random.default_rng(seed), names, most_devices=24)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_no_allocation_of_three_modules_is_faster(seed):
    check_against_exhaustive(np.random.default_rng(seed), ["vision", "language", "generator"], most_devices=12)


def check_against_exhaustive(rng, names, most_devices):
    modules = [drawn_module(rng, name) for name in names]
    task = {
        "global_batch": int(rng.choice([1, 6, 8, 24])),
        "device_memory_bytes": rng.uniform(20, 150) * GB,
    }
    num_devices = int(rng.integers(len(names), most_devices + 1))
    expected = exhaustive(modules, num_devices, **task)
    try:
        found = allocate(modules, num_devices, **task, most=3)
    except InfeasibleError:
        assert not expected
        return
    assert [one.iteration_seconds for one in found] == pytest.approx(expected[:3], rel=1e-9)
    for one in found:
        assert one.num_devices <= num_devices
        assert all(unit.memory_bytes <= task["device_memory_bytes"] + 1 for unit in one.units.values())


def test_one_module_gets_all_devices():
    alone = best([backbone(forward_seconds={1: 2.0})], 6, global_batch=60)
    # without pressure of memory six replicas beat six stages, which fill and drain
    assert alone.units == {"language": ParallelismUnit(1, 6, 1, 0)}
    assert (alone.micro_batches, alone.warm_up_seconds, alone.steady_seconds) == (10, 6.0, 54.0)


def test_equal_work_gets_equal_shares():
    same = {1: 1.0}
    even = best([encoder(forward_seconds=same), backbone(forward_seconds=same)], 12, global_batch=120)
    assert devices(even) == {"vision": 6, "language": 6}


def test_devices_go_by_work():
    modules = [encoder(forward_seconds={1: 1.0}), backbone(forward_seconds={1: 3.0})]
    assert devices(best(modules, 16, global_batch=1200)) == {"vision": 4, "language": 12}


def test_frozen_modules_count_their_passes_alone():
    modules = [
        encoder(forward_seconds={1: 1.0}, backward_ratio=0),  # 1 : 0
        backbone(forward_seconds={1: 1.0}, backward_ratio=1),  # 1 : 1, behind a trained projector
        ModuleCost("generator", {1: 1.0}),  # 1 : 2
    ]
    assert devices(best(modules, 12, global_batch=1200)) == {"vision": 2, "language": 4, "generator": 6}


def test_memory_is_a_lower_bound_on_devices():
    free = [encoder(forward_seconds={1: 1.0}), backbone(forward_seconds={1: 3.0})]
    bound = [replace(free[0], optimizer_bytes=6 * 80 * GB), free[1]]
    assert devices(best(free, 16, global_batch=1200))["vision"] == 4
    clamped = best(bound, 16, global_batch=1200)
    assert devices(clamped) == {"vision": 6, "language": 10}
    assert clamped.units["vision"].memory_bytes == 80 * GB


def test_an_encoder_keeps_what_is_in_flight_behind_it():
    # one stage before eight others: nine micro-batches of 5 GB each
    modules = [
        encoder(forward_seconds={1: 0.01}, activation_bytes=5 * GB, num_layers=1),
        backbone(forward_seconds={1: 1.0}, parameter_bytes=320 * GB, optimizer_bytes=320 * GB),
    ]
    found = best(modules, 9)
    assert devices(found) == {"vision": 1, "language": 8}
    assert found.units["vision"].memory_bytes == 45 * GB
    frozen = best([replace(modules[0], backward_ratio=0), modules[1]], 9)
    assert frozen.units["vision"].memory_bytes == 5 * GB


def test_degrees_are_those_asked_for_and_known():
    assert best([backbone()], 4, degrees=(4, 8)).units["language"].num_tensor == 4
    with pytest.raises(ConfigError, match=r"forward_seconds of language must have one of the degrees \[8\], got none"):
        best([backbone()], 8, degrees=(8,))


def test_replicas_need_not_divide_the_global_batch():
    modules = [encoder(num_layers=1), backbone(num_layers=1)]
    found = best(modules, 8, global_batch=16, degrees=[1], replicas=range(1, 8))
    # Two encoders for six LLMs, with three micro-batches each; divisors of 16 leave four LLMs, and devices idle.
    assert [(unit.num_replicas, unit.num_stages) for unit in found.units.values()] == [(2, 1), (6, 1)]
    assert found.micro_batches == 3 and found.steady_seconds == pytest.approx(2 * 9.0)
    assert found.iteration_seconds < best(modules, 8, global_batch=16, degrees=[1]).iteration_seconds


def test_the_missing_bytes_are_named():
    modules = [encoder(), backbone(optimizer_bytes=700 * GB)]
    with pytest.raises(InfeasibleError, match=r"on 8 devices, got 74.51 GiB: 18.6\d GiB are missing") as caught:
        best(modules, 8)
    needed = float(str(caught.value).split("at least ")[1].split(" GiB")[0]) * 2**30
    assert devices(best(modules, 8, device_memory_bytes=needed + 2**24)) == {"vision": 1, "language": 7}
    with pytest.raises(InfeasibleError):
        best(modules, 8, device_memory_bytes=needed - 2**25)
    with pytest.raises(InfeasibleError, match="num_devices must be at least 2 for these modules, got 1"):
        best(modules, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 0}, "num_devices must be at least 1, got 0"),
        ({"global_batch": 0}, "global_batch must be at least 1, got 0"),
        ({"most": 0}, "most must be at least 1, got 0"),
        ({"device_memory_bytes": 0}, "device_memory_bytes must be positive, got 0"),
        ({"backbone": "lm"}, "modules must have names of their own, 'lm' among them, got vision, language"),
    ],
)
def test_what_is_out_of_range_is_refused(changes, message):
    task = {"num_devices": 8, "global_batch": 8, "device_memory_bytes": GB} | changes
    with pytest.raises(ConfigError, match=message):
        allocate([encoder(num_layers=3), backbone()], **task)


def test_costs_are_checked():
    with pytest.raises(ConfigError, match="forward_seconds of vision must be positive and finite, got 0"):
        encoder(forward_seconds={1: 0})
    with pytest.raises(ConfigError, match="optimizer_bytes of vision must be finite and not negative, got -1"):
        encoder(optimizer_bytes=-1)
    with pytest.raises(ConfigError, match="degree of vision must be at least 1, got 0"):
        encoder(forward_seconds={0: 1.0})


def test_of_1296_devices_few_allocations_are_counted(monkeypatch):
    """DistTrain's largest case, which takes its solver 0.922 s: MLLM-72B with a global batch of 1920."""
    rows, cells = [], []
    counted, bounded = module_under_test._AllocationProblem._counted, module_under_test._AllocationProblem._bounds

    def count_rows(self, choices, *arguments):
        rows.append(choices[0].group.size)
        return counted(self, choices, *arguments)

    def count_cells(self, *arguments):
        bounds = bounded(self, *arguments)
        cells.append(bounds.size)
        return bounds

    monkeypatch.setattr(module_under_test._AllocationProblem, "_counted", count_rows)
    monkeypatch.setattr(module_under_test._AllocationProblem, "_bounds", count_cells)
    modules = [
        encoder(forward_seconds={1: 0.06, 2: 0.033, 4: 0.02, 8: 0.014}, parameter_bytes=1.3 * GB, num_layers=32),
        backbone(
            forward_seconds={1: 6.9, 2: 3.6, 4: 1.85, 8: 1.0},
            parameter_bytes=140 * GB,
            gradient_bytes=280 * GB,
            optimizer_bytes=840 * GB,
            activation_bytes=60 * GB,
            num_layers=80,
        ),
        ModuleCost("generator", {1: 0.5, 2: 0.27, 4: 0.15, 8: 0.09}, parameter_bytes=2 * GB, num_layers=24),
    ]
    found = allocate(modules, 1296, global_batch=1920, device_memory_bytes=76 * 2**30)
    assert len(found) == 10 and found[0].num_devices <= 1296
    # 31 numbers of replicas and 4 degrees a module: a bound on each, stages for one in a hundred
    assert sum(cells) == 31**3 * 4**3
    assert sum(rows) < 0.01 * sum(cells)
