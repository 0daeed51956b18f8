"""Emulated runs on real processes: DeepSpeed's engine runs the schedule's table; sleeps only ever last longer."""

import multiprocessing
import tempfile
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from omnibal.cluster import Encoder, Layout, Links
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.times import IMAGES
from omnibal.plan import Plan
from tests.clusters import on_cluster
from tests.emulator.test_device import token_layer
from tests.pipeline.profiles import layer, profile
from tools.emulator.run import EmulationTask, run_emulation

pytestmark = pytest.mark.distributed
LOADS = (Load(0, [1, 2, 3]), Load(0, [3, 3, 1]))


def layers_behind(frozen):
    """Four layers, the first ones frozen."""
    trained = [number >= frozen for number in range(4)]
    return [
        token_layer(number, trainable=trains, parameter_bytes=4, pending_bytes=CostModel(fixed=60 * trains))
        for number, trains in enumerate(trained)
    ]


@pytest.fixture(scope="module")
def task():
    """Two stages, two replicas; the first layer is frozen."""
    plan = Plan(PackLimits(4, 10), 3, Partition((0, 2, 4)), ("none", "full", "none", "full"))
    return EmulationTask(
        profile(layers_behind(1)), on_cluster(plan, 2, 10**6, Links(50.0)), (LOADS, LOADS[::-1]), time_scale=0.01
    )


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """No processes outlive a run, whatever came of it; also where a launcher ran the caller."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in {"LOCAL_SIZE": "4", "MASTER_ADDR": "emulated", "MASTER_PORT": tmp_path.name}.items():
        monkeypatch.setenv(name, value)
    yield
    assert not [found.pid for found in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(found.info["cmdline"])]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("schedule", "frozen"), [pytest.param("1f1b", 2, marks=pytest.mark.slow), ("zero-bubble", 1)])
def test_the_engine_runs_the_table_and_nothing_runs_too_early(task, schedule, frozen):
    task = replace(task, plan=replace(task.plan, schedule=schedule), profile=profile(layers_behind(frozen)))
    emulation = run_emulation(task)
    assert len(emulation.steps) == 2
    for emulated, predicted in zip(emulation.steps, task.predicted, strict=True):
        for ran, said in zip(emulated.replicas, predicted.replicas, strict=True):
            assert ran.table is said.table
            assert (ran.ends - ran.starts >= said.ends - said.starts - 1e-6).all()
            rows = zip(ran.starts, ran.table.lengths, strict=True)
            assert all((np.diff(starts[:length]) >= 0).all() for starts, length in rows)
        assert emulated.step_seconds >= predicted.step_seconds - 1e-6
        assert (emulated.reduced_seconds >= predicted.reduced_seconds - 1e-6).all()
    # full layers keep 10 bytes of a micro-batch, others 100; the frozen ones in stage 0 nothing
    memory = task.footprint(Load(0, 3)).stages(task.plan.partition, task.plan.recompute)
    assert [stage.activations for stage in memory] == [2 * 10 * (frozen == 1), 110]
    assert [stage.pending for stage in memory] == [0, 120 if schedule == "zero-bubble" else 0]
    assert list(emulation.peak_bytes) == [stage.total for stage in memory]


def apart(task):
    """One encoder for two LLMs."""
    layout = Layout(2, 2, encoder=Encoder(1, 1), precision="float32")
    cluster = on_cluster(task.plan, 2, 10**6, Links(50.0)).cluster
    return replace(task, plan=replace(task.plan, layout=layout, cluster=cluster))


def on_all(task, trained=True):
    """An encoder of two layers on all four devices."""
    vision = [
        replace(
            layer(f"vision.{number}", kind="block", module="vision", parameter_bytes=8, gradient_bytes=8 * trained,
                  optimizer_seconds=1.0 * trained, trainable=trained),
            forward_seconds=CostModel(vision_units=0.5), backward_seconds=CostModel(vision_units=0.5 * trained),
            weight_seconds=CostModel(vision_units=0.25 * trained), output_bytes=CostModel(vision_units=20),
        )
        for number in range(2)
    ]  # fmt: skip
    layout = Layout(2, 2, encoder=Encoder.on_all(4), precision="float32")
    plan = replace(
        task.plan, partition=Partition((0, 4, 6)), recompute=("none", "full", *task.plan.recompute), layout=layout,
        cluster=on_cluster(task.plan, 2, 10**6, Links(50.0)).cluster, schedule="zero-bubble",
    )  # fmt: skip
    loads = (Load([0, 4, 2], [1, 2, 3]), Load([2, 0, 0], [3, 3, 1]))
    return replace(task, plan=plan, profile=profile([*vision, *layers_behind(1)]), steps=(loads, loads[::-1]))


@pytest.mark.slow
def test_units_run_too(task):
    """Every replica of a stage is a row of its own."""
    task = apart(task)
    assert task.num_processes == 3
    emulation = run_emulation(task)
    for emulated, predicted in zip(emulation.steps, task.predicted, strict=True):
        (ran,), (said,) = emulated.replicas, predicted.replicas
        assert ran.row_names == ["encoder 0", "LLM 0", "LLM 1"]
        assert (ran.ends - ran.starts >= said.ends - said.starts - 1e-6).all()
        assert emulated.step_seconds >= predicted.step_seconds - 1e-6
        assert (emulated.reduced_seconds >= predicted.reduced_seconds - 1e-6).all()
    memory = task.footprint(Load(0, 3)).stages(task.plan.partition, task.plan.recompute)
    assert list(emulation.peak_bytes) == [stage.total for stage in memory]


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_a_spread_encoder_runs_too(task, trained):
    """Every device encodes its share before the pipeline, and trains on it behind."""
    task = on_all(task, trained)
    assert task.num_processes == 4
    emulation = run_emulation(task)
    for emulated, predicted in zip(emulation.steps, task.predicted, strict=True):
        for ran, said in zip(emulated.replicas, predicted.replicas, strict=True):
            assert (ran.ends - ran.starts >= said.ends - said.starts - 1e-6).all()
            of_images = ran.table.micro_batches == IMAGES
            assert of_images.sum() == (4 if trained else 2)
            assert (ran.ends[of_images] >= said.ends[of_images] - 1e-6).all()
        assert predicted.step_seconds - 1e-6 <= emulated.step_seconds <= 1.5 * predicted.step_seconds
        assert (emulated.reduced_seconds >= predicted.reduced_seconds - 1e-6).all()
    memory = task.footprint(Load(0, 3)).stages(task.plan.partition, task.plan.recompute)
    assert list(emulation.peak_bytes) == [stage.total for stage in memory]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [replace, apart, on_all], ids=["pipeline", "units", "spread"])
def test_an_emulated_step_takes_at_most_5_percent_longer_than_the_simulated_one(task, layout):
    task = replace(layout(task), time_scale=0.05)
    emulated = run_emulation(task).steps
    # What else runs on the machine only delays a step: the fastest one tells what the engine adds.
    over = [ran.step_seconds / said.step_seconds - 1 for ran, said in zip(emulated, task.predicted, strict=True)]
    print("emulated over simulated:", *(f"{share:+.1%}" for share in over))
    assert 0 <= min(over) <= 0.05


def test_memory_that_runs_out_ends_all_processes(task):
    with pytest.raises(InfeasibleError, match=r"^rank [23], stage 1: out of emulated memory in step 0, micro-batch 0"):
        run_emulation(replace(task, plan=on_cluster(task.plan, 2, (10**6, 10**6, 1, 1), Links(50.0))))


def test_a_killed_caller_takes_all_processes_along(task, tmp_path):
    endless = replace(task, time_scale=1e6)
    caller = multiprocessing.get_context("spawn").Process(target=_emulate_in, args=(tmp_path, endless))
    caller.start()
    processes = []
    while len(processes) < 1 + task.num_processes or not list(tmp_path.glob("*/rendezvous")):
        assert caller.is_alive()
        time.sleep(0.05)
        processes = psutil.Process(caller.pid).children(recursive=True)
    caller.kill()
    assert not psutil.wait_procs(processes, timeout=60)[1]
    caller.join()


def _emulate_in(folder, task):
    tempfile.tempdir = str(folder)
    run_emulation(task)
