"""A pipeline's first steps are timed by stage, and correct the costs that plans are made with."""

import itertools
import json
from dataclasses import replace

import pytest
import torch.distributed as dist

from omnibal import errors
from omnibal import train as train_file
from omnibal.cluster import Cluster
from omnibal.config import layout_of
from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.engine import engine as engine_file
from omnibal.engine import measured
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.planner.packings import Packing, spread_steps
from omnibal.planner.search import predict
from omnibal.profile.calibration import Calibration
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import every_layer
from omnibal.report.training import read_metrics
from omnibal.train import train
from omnibal.workspace import Workspace
from tests.engine.cases import SmallDataset, changed, settings
from tests.engine.launch import launch
from tests.engine.small import NUM_LAYERS, save_small_model

pytestmark = pytest.mark.distributed
HEADS = ("num_attention_heads", "num_key_value_heads")
LIMITS, CUT = PackLimits(4, 48), 5
STEPS = 8
"""Behind so many costs are fitted here, in place of a run's 20."""


def timed_runs(configs):
    """What this rank says of runs on a clock whose every mark is a second behind the one before."""
    seconds, said = itertools.count(), []
    real = measured.mark, train_file.tqdm, train_file.STEPS

    class Bar(train_file.tqdm):
        def write(self, text):
            said.append(text)

    measured.mark, train_file.tqdm, train_file.STEPS = lambda device: float(next(seconds)), Bar, STEPS
    try:
        engines = [train(config, dataset=SmallDataset()) for config in configs]
    finally:
        measured.mark, train_file.tqdm, train_file.STEPS = real
    return said, [engine.stage_times for engine in engines]


def fails(*_, **__):
    raise RuntimeError("no such measure")


def run_without_measures(config):
    """What is logged by a run in which all that measures or reports fails, some of it on one rank only."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors.LOG, "warning", told.append)
        patch.setattr(train_file, "STEPS", STEPS)
        for name in ("calibrate", "peak_text", "plot_training", "run_table"):
            patch.setattr(train_file, name, fails)
        patch.setattr(engine_file.MonitorMaster, "write_events", fails)
        patch.setattr(*((measured, "mark") if dist.get_rank() else (measured, "overhead_bytes")), fails)
        errors._warn_once.cache_clear()
        engine = train(config, dataset=SmallDataset())
    return engine.global_steps, told


def timed_and_untimed(configs, untimed):
    return *timed_runs(configs), run_without_measures(untimed)


def predicted_plan(config, folder):
    records, lengths = Workspace.read(config).records, SmallDataset().lengths()
    profile = analytic_profile(records, Device.named("A100-80GB"), dtype="float32")
    plan = Plan(
        LIMITS, 2, Partition((0, CUT, NUM_LAYERS)), every_layer("full", NUM_LAYERS), layout=layout_of(config, 2, 1),
        cluster=Cluster(1, 2, Device.named("A100-80GB")),
    )  # fmt: skip
    epoch = arrange_epoch(lengths, LIMITS, num_replicas=1, micro_batches=2)
    packing = Packing.of(epoch, lengths, LIMITS, spread_steps(epoch.num_steps, 4))
    replace(plan, predicted=predict(profile, plan, packing)).save(folder / "plan.json")
    return str(folder / "plan.json")


def check_untimed(output, first, second):
    assert (output / "model" / "model.safetensors").is_file()
    assert first[0] == second[0] == STEPS + 1
    parts = {text.partition(" failed, and the run goes on without: ")[0] for text in first[1]}
    assert parts == {
        "DeepSpeed's monitor", "the table of the plan", "measuring of memory", "the line about memory",
        f"a line of {output / 'metrics.jsonl'}", f"cleaning of {output / 'metrics.jsonl'}",
        "calibration of counted costs", "reading of the run's log",
    }  # fmt: skip
    assert second[1] == ["timing of the first steps failed, and the run goes on without: RuntimeError: no such measure"]


def test_passes_of_stages_correct_the_costs_that_a_plan_is_made_with(tmp_path):
    save_small_model(tmp_path / "model")
    base = settings(tmp_path / "model", num_stages=2)
    ways = {"planned": {"plan": predicted_plan(base, tmp_path)}, "split": {"schedule": "zero-bubble"}}
    ways["split"]["partition"] = [0, CUT, NUM_LAYERS]
    # One of two tensor ranks has two of three heads.
    ways["uneven"] = {"num_stages": 1, "num_tensor": 2}
    configs = [
        changed(changed(base, "run", epochs=30, max_steps=STEPS + 1, output=str(tmp_path / name)), "pipeline", **way)
        for name, way in ways.items()
    ]
    save_small_model(tmp_path / "uneven_model", text={name: 3 for name in HEADS} | {"head_dim": 8})
    configs[-1] = changed(configs[-1], "model", path=str(tmp_path / "uneven_model"))
    untimed = changed(configs[1], "run", output=str(tmp_path / "untimed"))
    (tmp_path / "untimed" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "no_folder").touch()
    untimed["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "no_folder"), "job_name": "a"}
    (said, left, first), (_, left_behind, second) = launch(
        2, "tests.engine.test_measured:timed_and_untimed", configs, untimed
    )
    assert left == left_behind == [None] * len(configs)
    check_untimed(tmp_path / "untimed", first, second)
    told = [text for text in said if text.startswith(f"steps 3 to {STEPS} measured: vision ")]
    assert len(told) == len(configs)
    assert "; a step was promised to take " in told[0]
    assert " s by measured costs, and took " in told[0]
    assert f"--from-run {tmp_path}/split --write` plans for these costs" in told[1]
    for config, name in zip(configs[:-1], ["planned", "split"], strict=True):
        metrics = tmp_path / name / "metrics.jsonl"
        assert len(read_metrics(metrics).steps) == STEPS + 1
        layers = Workspace.read(config).corrected_profile(Calibration.load(metrics)).layers
        for stage in (layers[:CUT], layers[CUT:]):  # a forward pass of either takes a second
            assert sum(float(layer.forward_seconds(Load(3, 40, 400))) for layer in stage) == pytest.approx(1, rel=0.4)

    (tmp_path / "ds_config.json").write_text(json.dumps(configs[0]))
    workspace = Workspace.read(tmp_path / "ds_config.json")
    found = Calibration.load(tmp_path / "planned" / "metrics.jsonl")
    assert workspace.corrected_profile(found).device == found.device
