import json

import pytest

from omnibal.data.limits import PackLimits
from omnibal.demo import write_demo
from omnibal.engine.trials import run_trials
from omnibal.errors import ConfigError
from omnibal.pipeline.boundaries import Partition
from omnibal.plan import Plan
from tests.engine.launch import ROOT

LIMITS = PackLimits(12, 256)


def plan(*boundaries):
    return Plan(LIMITS, 2, Partition(boundaries), ("none",) * boundaries[-1])


@pytest.mark.distributed
def test_a_plan_that_fails_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    paths = write_demo(tmp_path, samples=60, held_out=20)
    config = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    config["omnibal"]["model"]["path"] = str(paths.model)
    config["omnibal"]["data"]["train"] = str(paths.meta)
    del config["csv_monitor"]
    seen = []
    trials = run_trials(
        config,
        [plan(0, 5, 12), plan(0, 6, 13)],
        launcher_options=["--num_gpus", "2"],
        steps=2,
        on_trial=seen.append,
    )
    assert [trial.plan.partition.boundaries for trial in seen] == [(0, 5, 12), (0, 6, 13)]
    good, bad = trials
    assert len(good.step_seconds) == 2
    assert good.median_seconds > 0
    assert good.error is None
    assert bad.median_seconds == float("inf")
    assert "layers of the partition must be 13" in bad.error


def test_steps_are_checked():
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        run_trials({}, [], steps=0)
